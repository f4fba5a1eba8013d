"""Several processes on one machine that train one agent: they agree and stop together."""

import json
import os
import signal
import socket
import time

import numpy as np
import pytest
from conftest import QUICK, having, newest_checkpoint, once, run_of, start

# Runs a script whose processes wait for each other for a shorter time than it asks for.
IMPATIENT = """
import {script} as script, jax, numpy as np, time
initialize = jax.distributed.initialize
def initialize_impatiently(**options):
    assert options.keys() >= set({patience})
    initialize(**options | {patience})
jax.distributed.initialize = initialize_impatiently
"""
# With each checkpoint every process writes down the parameters of its device. The first one is
# still busy, as if with a video, when JAX's patience with processes that end later is over.
WATCHED = """
save_checkpoint = script.save_checkpoint
def save_both(run_dir, state):
    np.savez("params.npz", *[x.addressable_data(0) for x in jax.tree.leaves(state.params)])
    save_checkpoint(run_dir, state)
script.save_checkpoint = save_both
def record_slowly(*arguments):
    time.sleep(0 if jax.process_index() else 2)
script.record_video = record_slowly
"""


def quick(script):
    """The quick run with fewer epochs and updates: each collective is a change of processes."""
    options = QUICK[script.__name__]
    fewer_steps = options["total_timesteps"] * 6 // 20
    return options | dict(update_epochs=1, total_timesteps=fewer_steps, checkpoint_interval=2)


def program(script, *parts, **patience):
    """Code that runs the script after these parts; the processes' patience is in seconds."""
    text = IMPATIENT.format(script=script.__name__, patience=patience)
    return "".join([text, *parts, "script.main()\n"])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def joined(script, **options):
    """The flags of two processes that share a `quick` run."""
    options = quick(script) | options
    address = f"127.0.0.1:{free_port()}"
    shared = options | dict(coordinator_address=address, num_processes=2)
    return [shared | dict(process_id=i) for i in range(2)]


def start_two(script, folder, code=None, **options):
    """Two processes, in folders of their own so that it shows who writes what.

    `code` runs instead of the script.
    """
    processes = []
    for i, flags in enumerate(joined(script, **options)):
        place = folder / f"process_{i}"
        process = start(script, place, 1, "--distributed", code=code, **flags)
        if hasattr(os, "sched_setaffinity"):  # all cores: on one they wait for each other's turns
            os.sched_setaffinity(process.pid, range(os.cpu_count()))
        processes.append(process)
    return processes


def communicate(processes, timeout=120):
    """[(exit code, standard output, standard error)]; fails when one hangs."""
    texts = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *text) for process, text in zip(processes, texts)]


def final(run_dir):
    """{name: array} of a run's last checkpoint."""
    with np.load(max(run_dir.glob("checkpoints/*.npz"))) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def together(script, tmp_path_factory):
    """Folder in which two processes finished a `quick` run."""
    folder = tmp_path_factory.mktemp("together")
    code = program(script, WATCHED, shutdown_timeout_seconds=1)
    for status, out, err in communicate(start_two(script, folder, code)):
        assert status == 0, out + err
    return folder


@having("join_processes", lacking="make_pool")
def test_first_process_writes_what_one_with_two_devices_would(script, together, tmp_path):
    """All arrays of the last checkpoint, up to rounding; the other process leaves nothing."""
    left = {path.name for path in (together / "process_1").iterdir()}
    assert left - {"params.npz", "__pycache__"} == {f"{script.__name__}.py"}  # those are the test's
    run_dir = run_of(together / "process_0")
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    flags = quick(script) | {"num_devices": 2}
    alone = start(script, tmp_path, devices=2, **flags)
    assert communicate([alone])[0][0] == 0
    ours, expected = final(run_dir), final(run_of(tmp_path))
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


@having("join_processes")
def test_parameters_are_the_same_in_both(script, together):
    """Bit for bit, and those of the checkpoint."""
    checkpoint = final(run_of(together / "process_0"))
    params = [array for name, array in checkpoint.items() if name.startswith("params/")]
    first = np.load(together / "process_0/params.npz")
    second = np.load(together / "process_1/params.npz")
    for name, expected in zip(first.files, params, strict=True):
        assert first[name].tobytes() == second[name].tobytes() == expected.tobytes()


def wait_for_checkpoint(processes, folder):
    while not list(folder.glob("runs/*/checkpoints/*.npz")):
        assert all(p.poll() is None for p in processes)
        time.sleep(0.01)


@having("join_processes", lacking="make_pool")  # emulators cannot be saved
def test_stopped_and_resumed_together(script, together, tmp_path):
    """The second process gets SIGTERM: both stop; resumed, they end as if uninterrupted."""
    processes = start_two(script, tmp_path)
    wait_for_checkpoint(processes, tmp_path / "process_0")
    processes[1].send_signal(signal.SIGTERM)
    (code, out, err), (other, *_) = communicate(processes)
    run_dir = run_of(tmp_path / "process_0")
    assert (code, other) == (143, 143) and f"--resume runs/{run_dir.name}" in out, err
    whole_run = run_of(together / "process_0")
    assert newest_checkpoint(run_dir).stem < newest_checkpoint(whole_run).stem
    for code, out, err in communicate(start_two(script, tmp_path, resume=run_dir)):
        assert code == 0, out + err
    ours, expected = final(run_dir), final(whole_run)
    assert all(ours[name].tobytes() == expected[name].tobytes() for name in expected)
    # Only the first one draws the video.
    assert list((tmp_path / "process_0").glob("videos/*/*.gif"))
    left = {path.name for path in (tmp_path / "process_1").iterdir()}
    assert left == {f"{script.__name__}.py"}


@having("join_processes")
def test_killed_process_ends_the_other(script, tmp_path):
    """With an error, soon after its heartbeats are missed; the checkpoint stays.

    What processes have in common is one text in both scripts: the coordinator dies in one run, the
    other process in the other.
    """
    victim = ["ppo_minigrid_rnn", "ppo_atari_envpool_xla_jax"].index(script.__name__)
    steps = 1000 * QUICK[script.__name__]["total_timesteps"]
    code = program(script, heartbeat_timeout_seconds=5)
    processes = start_two(script, tmp_path, code, total_timesteps=steps)
    wait_for_checkpoint(processes, tmp_path / "process_0")
    processes[victim].kill()
    results = communicate(processes)
    code, _, err = results[1 - victim]
    assert code not in (0, 130, 143) and err
    assert final(run_of(tmp_path / "process_0"))


@once("join_processes")
def test_without_coordinator(script, tmp_path):
    """Where JAX finds no cluster the coordinator's address must be given: wrong usage."""
    process = start(script, tmp_path, 1, "--distributed")
    ((code, _, err),) = communicate([process])
    assert code == 2 and "--distributed" in err and "Traceback" not in err


@once("join_processes")
def test_folder_that_is_no_run_ends_both(script, tmp_path):
    """Neither waits for the other: both say at once what is wrong."""
    processes = start_two(script, tmp_path, resume="runs/missing")
    for code, _, err in communicate(processes, timeout=60):
        assert code == 1 and "runs/missing is not a run" in err and "Traceback" not in err


@having("join_processes")
def test_evaluation_is_refused(script):
    """All processes would write the same eval.json."""
    with pytest.raises(script.UsageError, match="--eval"):
        script.check_args(script.Args(distributed=True, eval="run"))
