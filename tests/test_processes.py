"""Robustness: real processes that are killed, interrupted and resumed."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import MODULES, QUICK, finish, newest_checkpoint, once, quick_args, run_of, scalars, start


@pytest.fixture(scope="session")
def long_options(script):
    """The quick run, twenty times as long: long enough to be stopped after its first checkpoint."""
    quick = QUICK[script.__name__]
    return quick | {"total_timesteps": 20 * quick["total_timesteps"]}


@pytest.fixture(scope="session")
def uninterrupted_run(script, long_options, tmp_path_factory):
    return finish(script, tmp_path_factory.mktemp("uninterrupted"), **long_options)


STOPS = [(module, signal.SIGKILL, -9) for module in MODULES if not hasattr(module, "make_pool")]  # emulators are lost
STOPS += [(MODULES[0], signal.SIGTERM, 143), (MODULES[0], signal.SIGINT, 130)]  # `main` and `train` treat both alike


@pytest.mark.parametrize("script, number, code", STOPS, indirect=["script"], ids=lambda x: getattr(x, "__name__", None))
def test_stopped_and_resumed_run_ends_the_same(script, long_options, uninterrupted_run, number, code, tmp_path):
    """Every array of the last checkpoint and every logged value but the SPS equal those of the uninterrupted run."""
    process = start(script, tmp_path, **long_options)
    while not list(tmp_path.glob("runs/*/checkpoints/*.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == code, stdout + stderr
    run_dir = run_of(tmp_path)
    assert newest_checkpoint(run_dir).name < newest_checkpoint(uninterrupted_run).name
    resume = f"--resume runs/{run_dir.name}"
    if number != signal.SIGKILL:
        assert resume in stdout and not stderr
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"

    result = subprocess.run([sys.executable, f"{script.__name__}.py", *resume.split()], cwd=tmp_path)
    assert result.returncode == 0 and run_of(tmp_path) == run_dir
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    with np.load(newest_checkpoint(run_dir)) as ours, np.load(newest_checkpoint(uninterrupted_run)) as expected:
        assert ours.files == expected.files
        for name in expected.files:
            assert ours[name].dtype == expected[name].dtype and ours[name].tobytes() == expected[name].tobytes(), name
    logged, expected = scalars(run_dir), scalars(uninterrupted_run)
    steps = {tag: [step for step, _ in events] for tag, events in logged.items()}
    assert steps == {tag: [step for step, _ in events] for tag, events in expected.items()}
    del logged["charts/SPS"], expected["charts/SPS"]
    assert logged == expected


@once("train")
def test_stopped_while_recording_a_video(script, tmp_path, monkeypatch, capsys):
    """SIGTERM during the evaluation for a video, before a checkpoint is due: there is one to resume from."""
    evaluate = script.evaluate

    def stopping(*args):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", stopping)
    folders = {"runs_dir": str(tmp_path / "runs"), "videos_dir": str(tmp_path / "videos")}
    with pytest.raises(SystemExit) as exit:
        script.main(quick_args(script, capture_video=True, video_interval=3, checkpoint_interval=100, **folders))
    run_dir = run_of(tmp_path)
    assert exit.value.code == 143 and f"--resume {run_dir}" in capsys.readouterr().out
    _, state = script.load_run(run_dir)
    assert (state.update == 3).all()
