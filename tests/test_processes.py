"""Runs that are stopped, by signals and by force, and go on."""

import concurrent.futures
import signal
import subprocess
import sys
import time

import pytest
from conftest import QUICK, arrays_of, environment, once, run_main, run_of, scalars, start


@pytest.fixture(scope="session")
def long_options(script):
    """The quick run, so long that it can be stopped after its first checkpoint: for seconds."""
    quick = QUICK[script.__name__]
    return quick | {"total_timesteps": 10 * quick["total_timesteps"]}


@pytest.fixture(scope="session")
def uninterrupted_run(script, long_options, tmp_path_factory):
    return run_main(script, tmp_path_factory.mktemp("uninterrupted"), **long_options)


@once("stop_signals")  # test_distributed.py stops recurrent ones, by SIGTERM
@pytest.mark.parametrize(
    "number, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130)], ids=["SIGKILL", "SIGINT"]
)
def test_stopped_and_resumed_run_ends_the_same(
    script, long_options, uninterrupted_run, number, code, tmp_path
):
    """Every array of the last checkpoint and every logged value but the SPS: bit for bit."""
    process = start(script, tmp_path, **long_options)
    while not list(tmp_path.glob("runs/*/checkpoint.npz")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    stdout, stderr = process.communicate()
    assert process.returncode == code, stdout + stderr
    run_dir = run_of(tmp_path)
    expected = arrays_of(uninterrupted_run)
    assert arrays_of(run_dir)["update"] < expected["update"]
    resume = f"--resume runs/{run_dir.name}"
    if number != signal.SIGKILL:
        assert "interrupted at update" in stdout and resume in stdout and not stderr
    assert not (run_dir / "summary.json").exists()

    program = [sys.executable, f"{script.__name__}.py", *resume.split()]
    result = subprocess.run(program, cwd=tmp_path, env=environment())
    assert result.returncode == 0 and run_of(tmp_path) == run_dir
    assert (run_dir / "summary.json").exists()
    ours = arrays_of(run_dir)
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        assert ours[name].dtype == array.dtype and ours[name].tobytes() == array.tobytes(), name
    logged, expected = scalars(run_dir), scalars(uninterrupted_run)
    del logged["charts/SPS"], expected["charts/SPS"]
    assert logged == expected


@once("stop_signals")
def test_second_interrupt_ends_at_once(script, tmp_path):
    """An update of a minute: nobody waits for it twice."""
    sizes = dict(num_envs=1024, num_steps=512, update_epochs=1000, eval_episodes=1)
    process = start(script, tmp_path, total_timesteps=10**9, **sizes)
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


STOPS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


@once("stop_signals")
@pytest.mark.quick
@pytest.mark.parametrize("number", STOPS)
def test_signals_in_turn(script, number):
    """The first one is remembered; then, and after `with`, the handlers of before are in place."""
    before = [signal.getsignal(number) for number in STOPS]
    with script.stop_signals() as signals:
        assert not signals
        signal.raise_signal(number)
        assert signals == [number]
        assert [signal.getsignal(number) for number in STOPS] == [signal.SIG_DFL] * 4
    assert [signal.getsignal(number) for number in STOPS] == before


@once("stop_signals")
@pytest.mark.quick
def test_python_without_some_signals(script, monkeypatch):
    """Windows has neither SIGHUP nor SIGUSR1."""
    monkeypatch.delattr(signal, "SIGHUP")
    monkeypatch.delattr(signal, "SIGUSR1")
    with script.stop_signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals == [signal.SIGTERM]


@once("stop_signals")
@pytest.mark.quick
def test_ignored_signal_stays_ignored(script):
    """As SIGHUP is under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with script.stop_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert not signals
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@once("main")
def test_main_in_another_thread(script, tmp_path):
    """As notebooks' widgets and optimisers of flags call it: it trains, without handlers."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run_dir = pool.submit(run_main, script, tmp_path).result()
    assert (run_dir / "summary.json").exists()
