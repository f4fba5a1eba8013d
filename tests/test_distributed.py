"""Environments spread over devices and over processes: the same training, and one stop for all."""

import functools
import os
import socket

import jax
import pytest
from conftest import (
    QUICK,
    arrays_of,
    close,
    having,
    json_of,
    quick_args,
    quick_words,
    run_of,
    scalars,
    start,
)

UPDATES = 6


def quick(script, **options):
    """The quick run with fewer epochs and updates: each collective is a change of processes."""
    steps = UPDATES * quick_args(script).batch_size
    fewer = dict(update_epochs=1, total_timesteps=steps, checkpoint_interval=2)
    return QUICK[script.__name__] | fewer | options


def start_two(script, folder, codes=(None, None), **options):
    """Two processes in folders of their own, so that it shows who writes what."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = []
    for i in range(2):
        flags = quick(script, coordinator_address=address, num_processes=2, process_id=i, **options)
        place = folder / f"process_{i}"
        process = start(script, place, 1, "--distributed", code=codes[i], **flags)
        if hasattr(os, "sched_setaffinity"):  # all cores: on one they wait for each other's turns
            os.sched_setaffinity(process.pid, range(os.cpu_count()))
        processes.append(process)
    return processes


def communicate(processes, timeout=300):
    """[(exit code, standard output, standard error)]; fails when one hangs."""
    texts = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *text) for process, text in zip(processes, texts)]


@pytest.fixture(scope="module")
def together(script, tmp_path_factory):
    """Folder in which two processes finished a `quick` run."""
    folder = tmp_path_factory.mktemp("together")
    for status, out, err in communicate(start_two(script, folder)):
        assert status == 0, out + err
    return folder


@having("make_mesh")
def test_four_devices_train_as_one_does(script, tmp_path):
    """All arrays after two updates of 4 and of 1 device; and each device has its own part."""
    arrays, num_seeds = [], 2
    for devices in (1, 4):
        folder = tmp_path / str(devices)
        steps = 2 * quick_args(script).batch_size
        options = dict(num_devices=devices, num_seeds=num_seeds, total_timesteps=steps)
        script.main(quick_words(script, folder, **options))
        arrays.append(arrays_of(run_of(folder)))
    close(*arrays, rtol=1e-3, atol=1e-4)
    args = quick_args(script, num_devices=4, num_seeds=num_seeds)
    placed = script.state_shardings(script.make_mesh(args))
    state = jax.jit(functools.partial(script.init_states, args), out_shardings=placed)()
    shard = state.stats.running_return.addressable_shards[0].data
    assert shard.shape == (num_seeds, args.num_envs // 4)


@having("make_mesh")
@pytest.mark.quick
@pytest.mark.parametrize("change", [dict(num_devices=5), dict(num_devices=4, num_minibatches=4)])
def test_devices_that_do_not_fit(script, change):
    """More than there are; minibatches that cannot be shared equally."""
    with pytest.raises(script.UserError, match="--num-"):
        script.make_mesh(quick_args(script, **change))


@having("join_processes")
def test_first_process_writes_what_one_alone_would(script, together, tmp_path):
    """The last checkpoint, every update's metrics, a summary; the other one leaves nothing."""
    left = {path.name for path in (together / "process_1").iterdir()}
    assert left == {f"{script.__name__}.py"}
    run_dir = run_of(together / "process_0")
    assert json_of(run_dir)["eval_episodes"]
    assert len(scalars(run_dir)["losses/policy_loss"]) == UPDATES
    assert list((together / "process_0").glob("videos/*/*.gif"))
    script.main(quick_words(script, tmp_path, **quick(script)))
    close(arrays_of(run_dir), arrays_of(run_of(tmp_path)), rtol=1e-3, atol=1e-4)


@having("join_processes")
def test_stopped_and_resumed_together(script, together, tmp_path):
    """The second process gets SIGTERM: both stop; resumed, they end as if uninterrupted."""
    code = f"""import os, signal, sys, {script.__name__} as script
log = script.Logger.log
def log_and_stop(self, update, metrics):
    log(self, update, metrics)
    if update == 3:
        os.kill(os.getpid(), signal.SIGTERM)
script.Logger.log = log_and_stop
script.main(sys.argv[1:])"""
    processes = start_two(script, tmp_path, codes=(None, code))
    (code, out, err), (other, *_) = communicate(processes)
    run_dir = run_of(tmp_path / "process_0")
    assert (code, other) == (143, 143) and f"--resume runs/{run_dir.name}" in out, err
    assert arrays_of(run_dir)["update"][0] == 4  # at the end of a log interval
    for code, out, err in communicate(start_two(script, tmp_path, resume=run_dir)):
        assert code == 0, out + err
    ours, expected = arrays_of(run_dir), arrays_of(run_of(together / "process_0"))
    assert all(ours[name].tobytes() == expected[name].tobytes() for name in expected)
