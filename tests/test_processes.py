"""Robustness: real processes that are killed, interrupted and resumed."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import (
    QUICK,
    each_text,
    environment,
    newest_checkpoint,
    once,
    run_main,
    run_of,
    scalars,
    start,
)


@pytest.fixture(scope="session")
def long_options(script):
    """The quick run, so long that it can be stopped after its first checkpoint: for seconds."""
    quick = QUICK[script.__name__]
    times = {"ppo_cartpole_jax": 10, "ppo_minigrid_rnn": 4}[script.__name__]
    return quick | {"total_timesteps": times * quick["total_timesteps"]}


@pytest.fixture(scope="session")
def uninterrupted_run(script, long_options, tmp_path_factory):
    return run_main(script, tmp_path_factory.mktemp("uninterrupted"), **long_options)


STOPS = [  # a script for each `main`, but those with emulators, whose games are lost
    ("ppo_cartpole_jax", signal.SIGKILL, -9),
    ("ppo_cartpole_jax", signal.SIGTERM, 143),
    ("ppo_minigrid_rnn", signal.SIGINT, 130),
]


@pytest.mark.parametrize(
    "script, number, code",
    [pytest.param(sys.modules[name], *rest, id=f"{name}-{rest[0].name}") for name, *rest in STOPS],
    indirect=["script"],
)
def test_stopped_and_resumed_run_ends_the_same(
    script, long_options, uninterrupted_run, number, code, tmp_path
):
    """Every array of the last checkpoint and every logged value but the SPS: bit for bit."""
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
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["status"] == "interrupted" and "eval_return_mean" not in summary
        batch_size = summary["num_envs"] * summary["num_steps"]
        assert summary["total_timesteps"] == int(newest_checkpoint(run_dir).stem) * batch_size

    program = [sys.executable, f"{script.__name__}.py", *resume.split()]
    result = subprocess.run(program, cwd=tmp_path, env=environment())
    assert result.returncode == 0 and run_of(tmp_path) == run_dir
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    ours, expected = (np.load(newest_checkpoint(run)) for run in (run_dir, uninterrupted_run))
    with ours, expected:
        assert ours.files == expected.files
        for name in expected.files:
            assert ours[name].dtype == expected[name].dtype
            assert ours[name].tobytes() == expected[name].tobytes(), name
    logged, expected = scalars(run_dir), scalars(uninterrupted_run)
    steps = {tag: [step for step, _ in events] for tag, events in logged.items()}
    assert steps == {tag: [step for step, _ in events] for tag, events in expected.items()}
    del logged["charts/SPS"], expected["charts/SPS"]
    assert logged == expected


@once("StopSignals")
def test_second_interrupt_ends_at_once(script, tmp_path):
    """All updates are one call of the device, for minutes; nobody waits for them twice."""
    sizes = dict(num_envs=64, num_steps=128, total_timesteps=10**9, eval_episodes=1)
    process = start(script, tmp_path, log_interval=10**5, checkpoint_interval=10**5, **sizes)
    while not list(tmp_path.glob("runs/*/*tfevents*")):  # opened just before training
        assert process.poll() is None
        time.sleep(0.1)
    try:
        for _ in range(2):
            time.sleep(1)
            process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.returncode == -signal.SIGINT
    finally:
        process.kill()  # the one of this test
        process.communicate()
    assert not list(run_of(tmp_path).glob("summary.json"))


@once("StopSignals")
def test_interrupt_while_compiling_ends_at_once(script, tmp_path):
    """Without a run folder, hence without a summary."""
    env = environment(1, flags="")  # takes seconds
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_LOG_COMPILES": "1"}
    process = start(script, tmp_path, env=env, **QUICK[script.__name__])
    for line in process.stderr:
        if "Compiling jit(train_chunk)" in line:
            break
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate()
    assert process.returncode == -signal.SIGINT and not stdout
    assert not (tmp_path / "runs").exists()


@once("StopSignals")
@pytest.mark.quick
def test_signals_in_turn(script):
    """The first one is remembered; then, and after `with`, the handlers of before are in place."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with script.StopSignals() as signals:
        assert not signals.received
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        for number in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(number) is signal.SIG_DFL
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@once("StopSignals")
@pytest.mark.quick
def test_handlers_that_are_not_pythons(script, monkeypatch):
    """Where a program that embeds Python has set some, `signal.signal` returns None."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    set_handler = signal.signal

    def forgetful(number, handler):
        if handler is None:
            raise TypeError
        set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", forgetful)
    with script.StopSignals():
        pass
    monkeypatch.undo()
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
        assert signal.signal(number, handler) == signal.SIG_DFL


@each_text("main", lacking="make_pool")
def test_stopped_while_recording_a_video(script, tmp_path, monkeypatch, capsys):
    """SIGTERM during a video, before a checkpoint is due: there is one to resume from."""
    record_video = script.record_video

    def stopping(*args):
        signal.raise_signal(signal.SIGTERM)
        return record_video(*args)

    monkeypatch.setattr(script, "record_video", stopping)
    options = dict(capture_video=True, video_interval=3, checkpoint_interval=100)
    with pytest.raises(SystemExit) as exit:
        run_main(script, tmp_path, **options)
    run_dir = run_of(tmp_path)
    assert exit.value.code == 143 and f'"--resume", {str(run_dir)!r}' in capsys.readouterr().out
    _, state = script.load_run(run_dir)
    assert (np.asarray(state.update) == 3).all()
