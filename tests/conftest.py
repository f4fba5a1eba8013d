"""What the tests share: the scripts of this repository, quick flags for each, and runs of them."""

import atexit
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parent.parent

os.environ["JAX_PLATFORMS"] = "cpu"  # bit-for-bit comparisons hold on a CPU
# Fusions without MLIR compile in half the time. JAX 0.11.1 and later have only MLIR.
PLAIN_FUSIONS, USUAL_COMPILATION = "", {"xla_backend_optimization_level": 3}
if Version(importlib.metadata.version("jax")) < Version("0.11.1"):
    PLAIN_FUSIONS = " --xla_cpu_use_fusion_emitters=false"
    USUAL_COMPILATION["xla_cpu_use_fusion_emitters"] = True
# Without LLVM's optimizations a fifth of the time. Tests of users' settings ask for those.
QUICK_COMPILATION = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
QUICK_COMPILATION += PLAIN_FUSIONS
# Compiles faster than users' settings; training is about as fast.
LIGHT_COMPILATION = " --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4" + QUICK_COMPILATION
# All tests and processes share compiled functions.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers get it from the process that starts them
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"])
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
sys.path.insert(0, str(ROOT))
# Each process of pytest-xdist has its own core, which saves 8% of the time of `-m quick`.
if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
# Tracing makes many objects: looking for cycles among them took 9% of the time of some tests.
gc.set_threshold(100_000, 50, 50)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# A run of 20 updates for each script. A new script needs its row here.
SERVICES = dict(log_interval=2, checkpoint_interval=5, eval_episodes=4)
MLP = SERVICES | dict(num_envs=8, num_steps=16, total_timesteps=2560)
RNN = SERVICES | dict(num_envs=8, num_steps=8, total_timesteps=1280)
RNN |= dict(num_minibatches=2, rnn_hidden_dim=16, head_hidden_dim=16)
RNN |= dict(env_id="MiniGrid-Empty-Random-5x5-v0")
ATARI = SERVICES | dict(num_envs=4, num_steps=4, total_timesteps=320, num_minibatches=2)
ATARI |= dict(update_epochs=2, eval_episodes=2, max_episode_steps=20)
QUICK = {
    "ppo_cartpole_jax": MLP,
    "ppo_swingup_jax": MLP,
    "ppo_minigrid_rnn": RNN,
    "ppo_atari_envpool_xla_jax": ATARI,
}
MODULES = [importlib.import_module(name) for name in QUICK]


# Files in the order of their start: long tests first, so that no process ends early.
ORDER = """readme distributed processes benchmarks atari replacements swingup cli minigrid_rnn
    minigrid_count_bonus accelerators xland ppo cartpole minigrid_env minigrid_envpool same_text"""
ORDER = ORDER.split()
# Files whose tests share neither fixtures nor caches.
INDEPENDENT = ["readme", "benchmarks", "accelerators", "replacements"]


def file_of(path):
    return pathlib.Path(path).stem.removeprefix("test_")


def pytest_collection_modifyitems(items):
    """Sorts the tests by file, a new one first; those of MiniGrid's many ids are short, so last."""

    def place(item):
        place = ORDER.index(file_of(item.path)) if file_of(item.path) in ORDER else -1
        return place, "MiniGrid-" in item.name

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # of xdist, which need not be there
def pytest_xdist_make_scheduler(config, log):
    """Tests of a file that are of one script or one environment id share things: one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path, _, test = nodeid.partition("::")
            shared = re.search(r"ppo_\w+|MiniGrid-[\w-]+?-v\d", test)
            if file_of(path) in INDEPENDENT:
                return nodeid
            if shared and "minigrid_env" in path:  # of two files, which share levels and programs
                return shared[0]
            return f"{path} {shared[0]}" if shared else path

    return Scheduling(config, log)


@pytest.fixture(scope="session", params=MODULES, ids=lambda module: module.__name__)
def script(request):
    """Each script of the repository in turn, imported."""
    return request.param


def _with_scripts(modules):
    return pytest.mark.parametrize(
        "script", modules, ids=lambda module: module.__name__, indirect=True, scope="session"
    )


def having(*names, lacking=None):
    """Restricts a test's `script` to those that define all `names`, and not the one `lacking`."""
    modules = [module for module in MODULES if all(hasattr(module, name) for name in names)]
    return _with_scripts([m for m in modules if lacking is None or not hasattr(m, lacking)])


def once(name):
    """Restricts a test to the first script that defines a name: others have the same text."""
    return _with_scripts([module for module in MODULES if hasattr(module, name)][:1])


def each_text(name, lacking=None):
    """Restricts a test to one script for each text of a name; `lacking` as above."""
    scripts = {}
    for module in MODULES:
        if hasattr(module, name) and not (lacking and hasattr(module, lacking)):
            scripts.setdefault(inspect.getsource(getattr(module, name)), module)
    return _with_scripts(list(scripts.values()))


# --- Runs ---


def quick_args(script, **options):
    """`Args` of the script's quick run with some options changed."""
    return script.Args(**QUICK[script.__name__] | options)


def jit_args(function, *static):
    """Jits a function with its first arguments fixed; `Args` is mutable, so it has no hash."""
    return jax.jit(functools.partial(function, *static))


def cached(function):
    """Caches results by the text of the inputs, because `Args` has no hash."""
    results = {}

    @functools.wraps(function)
    def with_cache(*inputs):
        text = repr(inputs)
        if text not in results:
            results[text] = function(*inputs)
        return results[text]

    return with_cache


def words_of(**options):
    """The command-line words of these options: `norm_adv=False` gives `--no-norm-adv`."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            words += [f"--{flag}", *map(str, value)]
        else:
            words.append(f"--{flag}={value}")
    return words


def quick_words(script, folder, **options):
    """The words of a quick run whose folders runs/ and videos/ lie in this folder."""
    folders = {"runs_dir": folder / "runs", "videos_dir": folder / "videos"}
    return words_of(**QUICK[script.__name__] | folders | options)


def run_main(script, folder, **options):
    """A quick run by `main` in this process; returns its run folder."""
    script.main(quick_words(script, folder, **options))
    return run_of(folder)


def command(script, **options):
    """The command line that runs a script with these options."""
    return [sys.executable, f"{script.__name__}.py", *words_of(**options)]


def environment(devices=4, flags=QUICK_COMPILATION):
    """Environment variables of a process with this many devices; users have one and no flags."""
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}{flags}"}


def start(script, folder, devices=4, *flags, code=None, env=None, **options):
    """Copies the script alone into a folder and starts it there, as `environment` has it.

    `flags` are flags without a value. `code` is run instead of the script, with the same arguments.
    `env` changes environment variables; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(script.__file__, folder)
    env = environment(devices) | (env or {})
    env = {name: value for name, value in env.items() if value is not None}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    python, file, *words = command(script, **options)
    program = ["-c", code] if code else [file]
    words = [python, *program, *words, *flags]
    return subprocess.Popen(words, cwd=folder, env=env, text=True, **pipes)


def finish(script, folder, devices=4, *flags, **options):
    """Runs the script to its successful end; returns its run folder."""
    process = start(script, folder, devices, *flags, **options)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stdout + stderr
    return run_of(folder)


def run_of(folder):
    """The only run in a folder in which a script ran."""
    (run_dir,) = folder.glob("runs/*")
    return run_dir


def arrays_of(run_dir):
    """{name: array} of a run's checkpoint."""
    with np.load(run_dir / "checkpoint.npz") as file:
        return dict(file)


def json_of(run_dir, name="summary"):
    """A JSON file of a run."""
    return json.loads((run_dir / f"{name}.json").read_text())


def contents(folder):
    """{relative path: bytes} of all files below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def scalars(run_dir):
    """{tag: [(step, value), ...]} as TensorBoard reads the event files of a run."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def close(ours, expected, rtol, atol=0.0):
    """Asserts that two trees have the same structure and nearly the same leaves."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), ours, expected)


def scipy_categorical(logits, action):
    """Log-probabilities of actions and the mean entropy."""
    probabilities = scipy.special.softmax(np.asarray(logits, float), axis=-1)
    chosen = np.take_along_axis(probabilities, np.asarray(action)[..., None], -1)[..., 0]
    return np.log(chosen), scipy.stats.entropy(probabilities, axis=-1).mean()


def numpy_ppo_loss(args, log_prob, entropy, value, batch):
    """The loss and metrics of PPO from the definition."""
    ratio = np.exp(log_prob - batch.log_prob)
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    gain = np.minimum(ratio * batch.advantage, np.clip(ratio, low, high) * batch.advantage)
    errors = (value - batch.target) ** 2
    if args.clip_vloss:
        clipped = np.clip(value, batch.value - args.clip_coef, batch.value + args.clip_coef)
        errors = np.maximum(errors, (clipped - batch.target) ** 2)
    policy_loss, value_loss = -gain.mean(), 0.5 * errors.mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": np.mean(ratio - 1 - np.log(ratio)),
        "losses/old_approx_kl": -np.mean(np.log(ratio)),
        "losses/clipfrac": np.mean((ratio < low) | (ratio > high)),
    }


def report_maximum(script, monkeypatch):
    """Adds the greatest ratio to the metrics of the loss; the list returned receives each one."""
    original, seen = script.ppo_loss, []

    def ppo_loss(args, params, batch):
        loss, metrics = original(args, params, batch)
        dist, _ = script.forward(args, params, batch.obs)
        ratio = jnp.exp(dist.log_prob(batch.action) - batch.log_prob)
        jax.debug.callback(lambda ratio: seen.append(float(ratio.max())), ratio)
        return loss, metrics | {"losses/ratio_max": ratio.max()}

    monkeypatch.setattr(script, "ppo_loss", ppo_loss)
    return seen


def load(path):
    """Imports a file under its own name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where typing looks annotations up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def finished_run(script, tmp_path_factory):
    """Folder of a finished quick run, by a process. Tests that change it use `run_copy`."""
    return finish(script, tmp_path_factory.mktemp("quick"), **QUICK[script.__name__])


@pytest.fixture
def run_copy(finished_run, tmp_path):
    """A copy of the finished run that the test may damage."""
    return pathlib.Path(shutil.copytree(finished_run, tmp_path / "runs" / finished_run.name))
