"""What the tests share: the scripts of this repository, quick flags for each, and real processes of them."""

import atexit
import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent

os.environ["JAX_PLATFORMS"] = "cpu"  # bit-for-bit comparisons hold on a CPU
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # virtual devices for test_parallel.py
# What one test or process has compiled the others load: most of the suite's time would be compilation.
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers get it from the process that starts them
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"])
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
sys.path.insert(0, str(ROOT))

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# A run of 20 updates for each script. A new script needs its row here, nothing else.
QUICK = {
    "ppo_cartpole_jax": dict(
        num_envs=8, num_steps=16, total_timesteps=2560, log_interval=2, checkpoint_interval=5, eval_episodes=4
    ),
    "ppo_swingup_jax": dict(
        num_envs=8, num_steps=16, total_timesteps=2560, log_interval=2, checkpoint_interval=5, eval_episodes=4
    ),
    "ppo_minigrid_rnn": dict(
        num_envs=8,
        num_steps=16,
        total_timesteps=2560,
        log_interval=2,
        checkpoint_interval=5,
        eval_episodes=4,
        env_id="MiniGrid-Dynamic-Obstacles-5x5-v0",
        num_minibatches=2,
        rnn_hidden_dim=16,
        head_hidden_dim=16,
    ),
    "ppo_atari_envpool_xla_jax": dict(
        num_envs=4,
        num_steps=8,
        total_timesteps=640,
        log_interval=2,
        checkpoint_interval=5,
        eval_episodes=2,
        max_episode_steps=20,
    ),
}
MODULES = [importlib.import_module(name) for name in QUICK]


def pytest_collection_modifyitems(items):
    """The slowest files first: begun last, they would keep one of two processes busy long after the other is done."""
    slow = ["test_distributed.py", "test_parallel.py", "test_processes.py"]
    items.sort(key=lambda item: slow.index(item.path.name) if item.path.name in slow else len(slow))


@pytest.fixture(scope="session", params=MODULES, ids=lambda module: module.__name__)
def script(request):
    """Each script of the repository in turn, imported."""
    return request.param


def having(*names, lacking=None):
    """Restricts a test's `script` to those that define all these names, and not the one they should be lacking."""
    modules = [module for module in MODULES if all(hasattr(module, name) for name in names)]
    modules = [module for module in modules if lacking is None or not hasattr(module, lacking)]
    return pytest.mark.parametrize(
        "script", modules, ids=lambda module: module.__name__, indirect=True, scope="session"
    )


def once(name):
    """Restricts a test to the first script that defines a name, which test_drift.py holds to be one text in all."""
    module = next(module for module in MODULES if hasattr(module, name))
    return pytest.mark.parametrize(
        "script", [module], ids=lambda module: module.__name__, indirect=True, scope="session"
    )


def quick_args(script, **options):
    """`Args` of the script's quick run with some options changed."""
    return script.Args(**QUICK[script.__name__] | options)


def command(script, **options):
    """The command line that runs a script with these options."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return [sys.executable, f"{script.__name__}.py", *(word for pair in pairs for word in pair)]


def start(script, folder, devices=1, *flags, code=None, **options):
    """Copies the script alone into a folder and starts it there as a process that sees this many devices.

    `flags` are flags without a value. `code` is run instead of the script, with the same arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(script.__file__, folder)
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    python, file, *words = command(script, **options)
    program = ["-c", code] if code else [file]
    return subprocess.Popen([python, *program, *words, *flags], cwd=folder, env=env, text=True, **pipes)


def finish(script, folder, devices=1, **options):
    """Runs the script to its successful end; returns its run folder."""
    process = start(script, folder, devices, **options)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stdout + stderr
    return run_of(folder)


def run_of(folder):
    """The only run in a folder in which a script ran."""
    (run_dir,) = folder.glob("runs/*")
    return run_dir


def newest_checkpoint(run_dir):
    return max(run_dir.glob("checkpoints/*.npz"))


def scalars(run_dir):
    """{tag: [(step, value), ...]} as TensorBoard reads the event files of a run."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="session")
def finished_run(script, tmp_path_factory):
    """Folder of a finished quick run. Tests that change something work on a copy: see `run_copy`."""
    return finish(script, tmp_path_factory.mktemp("quick"), **QUICK[script.__name__])


@pytest.fixture
def run_copy(finished_run, tmp_path):
    """A copy of the finished run that the test may damage."""
    return pathlib.Path(shutil.copytree(finished_run, tmp_path / "runs" / finished_run.name))


@pytest.fixture(scope="session")
def default_run(script, tmp_path_factory):
    """Folder of a run with the default flags."""
    return finish(script, tmp_path_factory.mktemp("default"))
