"""Measures everything on one GPU and keeps what it has after each measurement, as JSON.

    python benchmarks/gpu.py --out gpu.json                   # all of it, in 25 minutes at most
    python benchmarks/gpu.py --minutes 9 --only correctness speed   # in parts, by name, into one
    python benchmarks/gpu.py --minutes 9 --only learning atari      # file; if a command may run ten
    python benchmarks/gpu.py --minutes 9 --only graphs profile games resume commands   # minutes
    python benchmarks/gpu.py --small --out trial.json         # tiny sizes, for a trial on a CPU

| stage       | what is measured                                                                   |
| ----------- | ---------------------------------------------------------------------------------- |
| device      | versions, driver; rates of products and memory, seconds of kernels and loops       |
| correctness | three updates beside the CPU's (1e-3); EnvPool's calls beside its plain interface  |
| speed       | steps per second by environments and seeds; the settings of accelerators.py, with  |
|             | the milliseconds that were estimated for them                                      |
| learning    | steps and seconds of training until the task is solved                             |
| atari       | emulators alone, network alone, half-pools, the whole                              |
| graphs      | the training programs without CUDA graphs, and with all loops as CUDA graphs       |
| profile     | the kernels of an update by their time                                             |
| purejaxrl   | PureJaxRL (`--purejaxrl FOLDER`, a clone) and CartPole in turn                     |
| resume      | whether a resumed run ends bit for bit where the uninterrupted one ends            |
| commands    | the scripts' default commands, as a user would run them: seconds in all            |
| games       | Pong and Breakout, as far as the time goes                                         |

Every stage runs in a process of its own, and gets its share of the time that is left. What fails,
crashes or hangs costs its own measurement: the file then has the error's last line and the end of
the log, a new process goes on with the next one. Without a package that it needs a measurement is
"missing"; when the time is over the rest is "skipped". Where JAX finds no GPU the program ends with
status 3: a plugin that does not load would otherwise leave all to the CPU. Ctrl-C keeps what is
there. If the file exists, new measurements are put in the place of old ones, but no failure in that
of a success, so all can also be measured by several commands with `--only`.

On a machine without a package registry, wheels of what it lacks can be carried there. Tyro takes
0.3 MB (typeguard needs a recent typing-extensions, so that is among them), EnvPool 54 MB more,
without most of its assets: benchmarks/notes.md says how.

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux_2_28_x86_64 -d wheels tyro docstring-parser typeguard typing-extensions
    # there:
    python -m pip install --no-index --no-deps --upgrade --target site wheels/*.whl
    PYTHONPATH=$PWD/site python benchmarks/gpu.py --out gpu.json
"""

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sps
from sps import LARGE, ROOT, version

with unittest.mock.patch.dict(os.environ):  # which it changes, to compile without a device
    import accelerators

CARTPOLE, SWINGUP, MINIGRID, ATARI = accelerators.SCRIPTS
PURE = (CARTPOLE, SWINGUP, MINIGRID)  # whose environments are part of the program
PACKAGES = (*sps.PACKAGES, "tyro", "numpy")
TOLERANCE = 1e-3
LOG_LINES = 40  # of a failed measurement that are kept
START_ANEW = 75  # exit status of a worker after an error of the device, which may outlast its cause

# Where a task counts as solved: what is taken from the summary of an evaluation, and how much.
SOLVED = {
    CARTPOLE: (lambda summary: summary["eval_return_mean"], 475.0),
    SWINGUP: (lambda summary: summary["success_rate"]["random"], 0.95),
    MINIGRID: (lambda summary: summary["success_rate"], 0.95),
}
# Name -> script and flags: the defaults, and wider.
LEARNING = {
    "CartPole default": (CARTPOLE, ""),
    "swing-up default": (SWINGUP, ""),
    "MiniGrid default": (MINIGRID, ""),
    "CartPole 4,096": accelerators.PRESETS["CartPole, for a GPU"],
    "swing-up 1,024": accelerators.PRESETS["swing-up, for a GPU"],
    "swing-up 16,384": (SWINGUP, "--num-envs 16384"),
    "MiniGrid 1,024": accelerators.PRESETS["MiniGrid, for a GPU"],
}
LEARNING_POINTS = 20  # evaluations of a training
COMPARED_WITH_CPU = {
    CARTPOLE: dict(num_envs=64, num_steps=32),
    SWINGUP: dict(num_envs=64, num_steps=64),
    MINIGRID: dict(num_envs=64, num_steps=32, num_minibatches=4),
    ATARI: dict(num_envs=8, num_steps=32),
}
RESUMED = {  # runs with four checkpoints, of which a resumed one starts from the oldest kept
    CARTPOLE: "--total-timesteps 81920 --checkpoint-interval 10",
    SWINGUP: "--total-timesteps 131072 --checkpoint-interval 2",
    MINIGRID: "--total-timesteps 65536 --checkpoint-interval 2",
}
# Compiler options of the programs that are compared with XLA's choice.
GRAPHS = {
    "off": {"xla_gpu_enable_command_buffer": ""},
    "loops too": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,"
        "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
        "xla_gpu_graph_min_graph_size": 1,
    },
}
_, GAMES_FLAGS = accelerators.PRESETS["Atari, for a GPU"]
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


class NoGPU(Exception):
    """JAX does not find one."""


class Missing(Exception):
    """Something that a measurement needs is not on this machine."""


def require(*packages):
    """Raises Missing unless all of these can be imported."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Missing(f"needs {package}, which is not installed")


# ==================================================================================================
# Sizes: the real ones, and tiny ones for a trial
# ==================================================================================================


def small_fields(script):
    """Fields of `Args` that make anything of a script tiny."""
    fields = dict(num_envs=8, num_steps=8, num_minibatches=2, update_epochs=1)
    if script == MINIGRID:
        fields |= dict(rnn_hidden_dim=8, head_hidden_dim=8)
    return fields


def small_flags(script, **options):
    """The same as words of a command line."""
    options = small_fields(script) | options
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def words_for(choice, script, flags, **small):
    """Words of a command line; in a trial tiny, whatever the flags say."""
    return flags.split() + (small_flags(script, **small) if choice.small else [])


def fields_of(script, words):
    """What these words change in the `Args` of a script, but for the length of the run."""
    fields, defaults = vars(script.parse_args(words)), vars(script.Args())
    changed = {name: value for name, value in fields.items() if value != defaults[name]}
    changed.pop("total_timesteps", None)
    return changed


# ==================================================================================================
# device
# ==================================================================================================


def sources():
    """{file: the beginning of its SHA-256} of what is measured and of what measures."""
    files = [*ROOT.glob("ppo_*.py"), *(ROOT / "benchmarks").glob("*.py")]
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return {path.name: digest(path) for path in sorted(files)}


def nvidia_smi(query):
    """What nvidia-smi answers, None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def versions():
    """What runs here."""
    devices = jax.local_devices()
    installed = {x.metadata["Name"]: x.version for x in importlib.metadata.distributions()}
    related = {n: v for n, v in installed.items() if n.startswith(("jax", "nvidia", "flax"))}
    facts = {
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in devices],
        "platform_version": devices[0].client.platform_version,
        "memory_stats": devices[0].memory_stats(),
        "machine": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES if version(package)}
        | dict(sorted(related.items())),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("JAX_", "XLA_", "CUDA_", "NVIDIA_"))
        },
        "sources": sources(),
    }
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.sm,power.limit"
    return facts | {"nvidia_smi": nvidia_smi(query)}


def seconds_of(function, *arguments, repeats=10):
    """The shortest of some calls, of a compiled function."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peaks(choice):
    """Rates of large products and of memory."""
    with jax.default_matmul_precision("highest"):
        highest = sps.matrix_peak()
    numbers = jnp.ones((2**22 if choice.small else 2**28), jnp.float32)
    copy = seconds_of(jax.jit(lambda x: x + 1), numbers)
    return {
        "product_tflops": sps.matrix_peak() / 1e12,
        "product_tflops_highest": highest / 1e12,
        "memory_gb_per_second": 2 * numbers.nbytes / copy / 1e9,
    }


def launches():
    """Microseconds of eight tiny products with tanh, in a row and as the body of loops.

    `accelerators.py` assumes 1.5 microseconds for each kernel and nothing for loops.
    """

    def eight(x):  # products stay kernels of their own; few would not become a graph
        for _ in range(8):
            x = jnp.tanh(x @ x)
        return x

    def straight(x):
        for _ in range(16):
            x = eight(x)
        return x

    def counted(x):
        return jax.lax.fori_loop(0, 200, lambda i, x: eight(x), x)

    def on_data(x):
        stop = lambda carry: (carry[1] < 200) & (carry[0].sum() < jnp.inf)
        step = lambda carry: (eight(carry[0]), carry[1] + 1)
        return jax.lax.while_loop(stop, step, (x, 0))[0]

    x = jax.random.normal(jax.random.key(0), (64, 64))
    row = {}
    programs = {"straight": (straight, 16), "counted_loop": (counted, 200)}
    for name, (function, times) in (programs | {"loop_on_data": (on_data, 200)}).items():
        for graphs, options in {"": None, "_without_graphs": GRAPHS["off"]}.items():
            compiled = jax.jit(function).lower(x).compile(compiler_options=options)
            found = {"us_of_eight": 1e6 * seconds_of(compiled, x) / times}
            row[f"{name}{graphs}"] = found
            with contextlib.suppress(Exception):  # the time counts, also where XLA's text is new
                module = accelerators.Module(compiled.as_text())
                loops = accelerators.loop_tree(module, accelerators.CHIPS["h100"])
                body = loops if name == "straight" else loops.inner[0]
                found["kernels"] = body.all_kernels
    return row


def device(choice):
    yield "versions", versions
    yield "peaks", functools.partial(peaks, choice)
    yield "launches", launches


# ==================================================================================================
# correctness
# ==================================================================================================


def differences(ours, theirs):
    """{leaf: the largest difference of two trees there}, relative to numbers above 1; NaN == NaN.

    Infinite where only one of them is NaN.
    """
    found = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        difference = np.abs(a - b) / np.maximum(1, np.abs(b))
        difference = np.where(np.isnan(a) & np.isnan(b), 0, difference)
        largest = float(np.nan_to_num(difference, nan=math.inf).max(initial=0))
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = largest
    return found


def far_apart(ours, theirs):
    """The largest of all `differences`."""
    return max(differences(ours, theirs).values(), default=0.0)


def furthest(ours, theirs, number=5):
    """The leaves that differ most."""
    found = differences(ours, theirs)
    return dict(sorted(found.items(), key=lambda item: -item[1])[:number])


def places(choice):
    """{name: (device, platform)} of what is measured and of the CPU that it is compared with.

    Where there is a CPU only, it runs the programs that are made for GPUs.
    """
    ours = jax.local_devices()[0]
    name = "gpu" if choice.small else ours.platform
    return {"device": (ours, name), "cpu": (jax.local_devices(backend="cpu")[0], "cpu")}


def updates_like_cpu(choice, name):
    """Three updates from the same state, here and on the CPU."""
    script = importlib.import_module(name)
    args = script.Args(**COMPARED_WITH_CPU[name] | (small_fields(name) if choice.small else {}))
    sides = places(choice)
    with jax.default_device(sides["cpu"][0]):
        start = jax.jit(functools.partial(script.init_train_state, args))(jax.random.key(1))
    found = {}
    with jax.default_matmul_precision("highest"):
        for side, (where, kind) in sides.items():
            step = jax.jit(functools.partial(script.update, args, platform=kind))
            state, found[side] = jax.device_put(start, where), []
            for _ in range(3):
                state, metrics = step(state)
                values = {tag: getattr(x, "value", x) for tag, x in metrics.items()}
                found[side].append(jax.device_get((state.params, values)))
    pairs = list(zip(found["device"], found["cpu"]))
    params = [far_apart(ours[0], theirs[0]) for ours, theirs in pairs]
    metrics = [far_apart(ours[1], theirs[1]) for ours, theirs in pairs]
    return {
        "passed": max(params + metrics) <= TOLERANCE,
        "params_differ": params,
        "metrics_differ": metrics,
        "furthest": furthest(*pairs[0]),  # after the first update: later ones add up
        "tolerance": TOLERANCE,
    }


def atari_args(choice, script, **changes):
    """`Args` of the Atari script; in a trial tiny."""
    return script.Args(**changes | (small_fields(ATARI) if choice.small else {}))


def pool_like_plain(choice):
    """Observations and rewards of EnvPool's XLA calls beside those of its plain interface."""
    require("envpool")
    script = importlib.import_module(ATARI)
    args = atari_args(choice, script, num_envs=8)
    num_steps = 16 if choice.small else 200
    shape = (num_steps, args.num_envs)
    actions = np.random.default_rng(0).integers(script.count_actions(args), size=shape)
    actions = actions.astype(np.int32)

    envs = script.make_env(args)
    first, _ = envs.reset()
    outcomes = [envs.step(action) for action in actions]
    expected = [first, *(outcome[0] for outcome in outcomes)]
    expected_rewards = [outcome[1] for outcome in outcomes]

    envs = script.make_env(args)
    handle, _, _, pool_step = envs.xla()
    first, _ = envs.reset()

    @jax.jit
    def play(actions):
        def one(handle, action):
            handle, (obs, reward, *_) = pool_step(handle, action)
            return handle, (obs, reward)

        return jax.lax.scan(one, handle, actions)[1]

    obs, rewards = jax.device_get(play(actions))
    assert envs is not None  # the program steps it: it has to live as long
    return {
        "passed": bool(
            np.array_equal([first, *obs], expected) and (rewards == expected_rewards).all()
        ),
        "steps": num_steps,
        "rewards": float(rewards.sum()),
    }


def atari_like_cpu(choice):
    """A rollout from the same games and what is learnt from it, here and on the CPU."""
    require("envpool")
    script = importlib.import_module(ATARI)
    args = atari_args(choice, script, **COMPARED_WITH_CPU[ATARI])
    pools, played, learned = [], {}, {}
    with jax.default_matmul_precision("highest"):
        for side, (where, kind) in places(choice).items():
            envs = script.make_env(args)
            pools.append(envs)
            state = script.start_games(args, envs, script.init_agents(args))
            rollout = jax.jit(functools.partial(script.rollout, args, envs, platform=kind))
            played[side] = jax.device_get(rollout(jax.device_put(state, where)))
        one_agent = jax.tree.map(lambda x: x[0], played["cpu"])
        for side, (where, kind) in places(choice).items():
            learn = jax.jit(functools.partial(script.learn, args, platform=kind))
            state, metrics = learn(*jax.device_put(one_agent, where))
            values = {tag: getattr(x, "value", x) for tag, x in metrics.items()}
            learned[side] = jax.device_get((state.params, values))
    obs = [played[side][1].obs for side in ("device", "cpu")]
    params, metrics = map(far_apart, learned["device"], learned["cpu"])
    return {
        "passed": max(params, metrics) <= TOLERANCE,
        "same_frames": bool(np.array_equal(*obs)),
        "params_differ": [params],
        "metrics_differ": [metrics],
        "furthest": furthest(learned["device"], learned["cpu"]),
        "tolerance": TOLERANCE,
    }


def correctness(choice):
    for name in PURE:
        yield f"{name} like CPU", functools.partial(updates_like_cpu, choice, name)
    yield "EnvPool's calls", functools.partial(pool_like_plain, choice)
    yield f"{ATARI} like CPU", functools.partial(atari_like_cpu, choice)


# ==================================================================================================
# resume, commands, games: the scripts as programs. Their stages leave the GPU's memory to them
# ==================================================================================================


def run_script(name, words, folder, xla_flags="", seconds=None):
    """Runs a script in a folder; returns (run folder, exit status, seconds of the process).

    After `seconds` it is asked to stop. What it prints goes to the log. Raises RuntimeError where
    it leaves no summary: drawing a video, which comes after that, needs ffmpeg.
    """
    require("tyro", "tensorboard", "PIL", "imageio")
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {xla_flags}".strip()
    paths = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths))  # the script runs elsewhere
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / f"{name}.py"), *words]
    log = pathlib.Path(folder, "log")
    before = set(pathlib.Path(folder).glob("runs/*/summary.json"))
    with log.open("w") as stream:
        options = dict(cwd=folder, env=env, stdout=stream, stderr=stream)
        process = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # finishes its chunk of updates, saves
            process.wait()
    print(log.read_text()[-2000:], file=sys.stderr)
    summaries = set(pathlib.Path(folder).glob("runs/*/summary.json"))
    if not summaries - before and "--resume" not in words:
        raise RuntimeError((log.read_text().strip().splitlines() or ["no output"])[-1])
    (run_dir,) = pathlib.Path(folder).glob("runs/*")
    return run_dir, process.returncode, time.perf_counter() - start


def resume_bit_for_bit(choice, name, xla_flags):
    """A run, and one that goes on from an earlier checkpoint of it in a new process."""
    words = words_for(choice, name, RESUMED[name], total_timesteps=512, checkpoint_interval=2)
    words.append("--eval-episodes=4")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        run_dir, status, _ = run_script(name, words, first, xla_flags)
        checkpoints = sorted(run_dir.glob("checkpoints/*.npz"))
        copy = pathlib.Path(shutil.copytree(run_dir, pathlib.Path(second, "runs", run_dir.name)))
        for checkpoint in checkpoints[1:]:
            (copy / "checkpoints" / checkpoint.name).unlink()
        run_script(name, ["--resume", str(copy)], second, xla_flags)
        last = copy / "checkpoints" / checkpoints[-1].name
        if not last.exists():
            raise RuntimeError(f"the resumed run wrote no {last.name}")
        with np.load(checkpoints[-1]) as whole, np.load(last) as resumed:
            differ = [key for key in whole.files if whole[key].tobytes() != resumed[key].tobytes()]
            largest = max((far_apart(resumed[key], whole[key]) for key in differ), default=0.0)
            arrays = len(whole.files)
    return {
        "passed": not differ,
        "arrays": arrays,
        "arrays_that_differ": len(differ),
        "largest_difference": largest,
        "from": checkpoints[0].stem,
        "to": last.stem,
        "xla_flags": xla_flags,
        "exit_status": status,
    }


def resume(choice):
    yield CARTPOLE, functools.partial(resume_bit_for_bit, choice, CARTPOLE, DETERMINISTIC)
    without = functools.partial(resume_bit_for_bit, choice, CARTPOLE, "")
    yield f"{CARTPOLE} without the flag", without
    for name in (MINIGRID, SWINGUP):
        yield name, functools.partial(resume_bit_for_bit, choice, name, DETERMINISTIC)


def command_seconds(choice, name):
    """The default command from its start to its end, nothing loaded from a cache."""
    words = words_for(choice, name, "", total_timesteps=256, eval_episodes=4)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, status, seconds = run_script(name, words, folder)
        summary = json.loads((run_dir / "summary.json").read_text())
    keys = "total_timesteps compile_seconds train_seconds wall_seconds sps eval_return_mean"
    row = {key: summary[key] for key in [*keys.split(), "success_rate"] if key in summary}
    return row | {"process_seconds": seconds, "exit_status": status, "flags": " ".join(words)}


def commands(choice):
    for name in PURE:
        yield name, functools.partial(command_seconds, choice, name)


def game_curve(choice, game, share):
    """Trains on a game for a share of the stage's time; returns where it got and the curve."""
    require("envpool")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = words_for(choice, ATARI, GAMES_FLAGS, total_timesteps=512, eval_episodes=2)
    words += ["--env-id", game]
    # It notices the signal only after a chunk of updates, and has to begin and end.
    seconds = max(1, share * (choice.seconds - 30))
    with tempfile.TemporaryDirectory() as folder:
        run_dir, status, process_seconds = run_script(ATARI, words, folder, seconds=seconds)
        summary = json.loads((run_dir / "summary.json").read_text())
        accumulator = EventAccumulator(str(run_dir)).Reload()
        tag = "charts/episodic_return"
        events = accumulator.Scalars(tag) if tag in accumulator.Tags()["scalars"] else []
    curve = [[e.step, round(e.wall_time - events[0].wall_time, 1), e.value] for e in events]
    keys = "status total_timesteps compile_seconds train_seconds sps eval_return_mean"
    row = {key: summary[key] for key in keys.split() if key in summary}
    row |= {"process_seconds": process_seconds, "exit_status": status, "flags": " ".join(words)}
    row["curve"] = "steps, seconds since the first entry, mean return of the last finished games"
    return row | {"points": curve[:: max(1, len(curve) // 100)]}


def games(choice):
    yield "Pong-v5", functools.partial(game_curve, choice, "Pong-v5", 0.5)
    yield "Breakout-v5", functools.partial(game_curve, choice, "Breakout-v5", 0.5)


# ==================================================================================================
# speed
# ==================================================================================================


def estimates(setting):
    """{file: milliseconds} that `accelerators.py` estimated for an update on an H100."""
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("accelerators*.json")):
        for row in json.loads(path.read_text())["rows"]:
            key = row.get("setting"), row["program"], row["target"], row["devices"]
            if key == (setting, "train", "h100", 1) and "ms" in row:
                found[path.stem] = row["ms"]
    return found


def rounds_of(choice):
    return 1 if choice.small else 3


def speed_of(choice, name, wrap_pool=lambda envs: envs, **changes):
    """Steps per second and milliseconds of an update of a script with these fields changed."""
    if name == ATARI:
        require("envpool")
    script = importlib.import_module(name)
    group = [("it", functools.partial(sps.ours, name, wrap_pool, **changes))]
    rounds, facts = sps.measure(group, rounds_of(choice))["it"]
    args = script.Args(**{"total_timesteps": 10**12, **changes})
    median = statistics.median(rounds)
    return {
        "sps": median,
        "ms_per_update": 1e3 * args.batch_size * args.num_seeds / median,
        "rounds": rounds,
        "compile_seconds": facts["compile_seconds"],
        "product_tflops": median * facts["product_flops_per_step"] / 1e12,
        "fields": changes,
    }


def speed_of_setting(choice, setting, wrap_pool=lambda envs: envs):
    """`speed_of` one of accelerators.py's settings or presets, beside the estimates."""
    name, flags = (accelerators.PRESETS | accelerators.SETTINGS)[setting]
    if name == ATARI:
        require("envpool")
    script = importlib.import_module(name)
    fields = fields_of(script, words_for(choice, name, flags, total_timesteps=10**6))
    row = speed_of(choice, name, wrap_pool, **fields)
    return row | {"flags": flags, "estimated_ms_h100": estimates(setting)}


def scaled(choice, name, changes, field, value):
    """`speed_of` a script with these changes and one field set; in a trial tiny."""
    small = small_fields(name) if choice.small else {}
    return speed_of(choice, name, **changes | small | {field: value})


def speed(choice):
    for name in PURE:
        yield f"{name} default", functools.partial(scaled, choice, name, {}, "num_seeds", 1)
    for setting, (name, _) in (accelerators.PRESETS | accelerators.SETTINGS).items():
        if name == ATARI:  # the estimates are without emulators
            still = functools.partial(speed_of_setting, choice, setting, sps.StillPool)
            yield f"{setting}, emulators stand still", still
        yield setting, functools.partial(speed_of_setting, choice, setting)
    large = {name: changes for name, changes in LARGE if "rnn_hidden_dim" not in changes}
    large[MINIGRID] = sps.COMPARED[MINIGRID]
    sizes = [8, 16] if choice.small else [1024, 65_536, 4096, 16_384]  # the ends first
    for size in sizes:
        for name, changes in large.items():
            measurement = functools.partial(scaled, choice, name, changes, "num_envs", size)
            yield f"{name} {size} environments", measurement
    for number in [2] if choice.small else [256, 16]:
        for name in PURE:
            measurement = functools.partial(scaled, choice, name, {}, "num_seeds", number)
            yield f"{name} {number} seeds", measurement
    for name, changes in LARGE:
        if name == MINIGRID:
            size = sizes[0] if choice.small else changes["num_envs"]
            measurement = functools.partial(scaled, choice, name, changes, "num_envs", size)
            yield f"{name} {size} environments, LARGE", measurement


# ==================================================================================================
# learning
# ==================================================================================================


def learn(choice, setting):
    """Trains with an evaluation at each twentieth of the run.

    Seconds of training do not count the evaluations; "until solved" counts compilation apart.
    """
    name, flags = LEARNING[setting]
    script = importlib.import_module(name)
    words = words_for(choice, name, flags, total_timesteps=512, eval_episodes=4)
    args = script.parse_args(words)
    score_of, threshold = SOLVED[name]
    start = time.perf_counter()
    state = script.init_agents(args)
    chunk = script.make_train_chunk(args).lower(state, jnp.int32(1)).compile()
    compile_seconds = time.perf_counter() - start
    keys = script.evaluation_keys(args)
    evaluate = script.make_evaluate(args).lower(state.params, keys).compile()
    points = max(1, args.num_updates // LEARNING_POINTS)
    done, seconds, curve, solved = 0, 0.0, [], None
    while done < args.num_updates:
        until = min(args.num_updates, done - done % points + points)
        start = time.perf_counter()
        while done < until:
            number = min(until - done, script.chunk_size(args))
            state, _ = chunk(state, jnp.int32(number))
            done += number
        jax.block_until_ready(state)
        seconds += time.perf_counter() - start
        finite = script.finite_agents(state.params)
        summary = script.summarize_evaluation(args, evaluate(state.params, keys), finite)
        score = float(score_of(summary))
        curve.append([done * args.batch_size, round(seconds, 3), score])
        if solved is None and score >= threshold:
            solved = {"steps": done * args.batch_size, "train_seconds": seconds}
            solved["seconds_with_compilation"] = compile_seconds + seconds
    return {
        "solved": solved is not None,
        "until_solved": solved,
        "score": score,
        "threshold": threshold,
        "total_timesteps": done * args.batch_size,
        "train_seconds": seconds,
        "sps": done * args.batch_size / seconds,
        "compile_seconds": compile_seconds,
        "flags": " ".join(words),
        "curve": "steps, seconds of training, score",
        "points": curve,
    }


def learning(choice):
    for setting in LEARNING:
        yield setting, functools.partial(learn, choice, setting)


# ==================================================================================================
# graphs
# ==================================================================================================


def graphs_of(choice, name, flags, variant):
    """A training program as XLA has it and with one of GRAPHS, in turn."""
    script = importlib.import_module(name)
    fields = fields_of(script, words_for(choice, name, flags, total_timesteps=10**6))
    group = [
        (label, functools.partial(sps.ours, name, compiler_options=options, **fields))
        for label, options in {"as it is": None, variant: GRAPHS[variant]}.items()
    ]
    return {"flags": flags, **in_turn(choice, group)}


def graphs(choice):
    settings = {"CartPole default": (CARTPOLE, ""), "swing-up default": (SWINGUP, "")}
    settings |= {
        setting: (name, flags)
        for setting, (name, flags) in accelerators.SETTINGS.items()
        if name != ATARI
    }
    for variant in GRAPHS:  # the one that may end in a crash comes last
        for setting, (name, flags) in settings.items():
            measurement = functools.partial(graphs_of, choice, name, flags, variant)
            yield f"{setting}, {variant}", measurement


# ==================================================================================================
# atari, purejaxrl, profile
# ==================================================================================================


def in_turn(choice, group):
    """{name: steps per second} of candidates that take turns, all faster than the first by."""
    measured = sps.measure(group, rounds_of(choice))
    base = next(iter(measured.values()))[0]
    return {
        name: {
            "sps": statistics.median(rounds),
            "rounds": rounds,
            "compile_seconds": facts["compile_seconds"],
            "faster_by": statistics.median(a / b for a, b in zip(rounds, base)),
        }
        for name, (rounds, facts) in measured.items()
    }


def emulators_in_turn(choice, group):
    """`in_turn` of candidates that need EnvPool."""
    require("envpool")
    return in_turn(choice, group)


def atari(choice):
    for num_envs in [8] if choice.small else [64, 128, 8, 256]:
        fields = (small_fields(ATARI) if choice.small else {}) | {"num_envs": num_envs}
        halves = [
            ("one pool", functools.partial(sps.rollout_alone, 1, **fields)),
            ("two half-pools", functools.partial(sps.rollout_alone, 2, **fields)),
        ]
        whole = [
            ("whole", functools.partial(sps.ours, ATARI, **fields)),
            ("emulators alone", functools.partial(sps.emulators_alone, **fields)),
            ("network alone", functools.partial(sps.ours, ATARI, sps.StillPool, **fields)),
        ]
        for label, group in {"parts": whole, "rollouts": halves}.items():
            measurement = functools.partial(emulators_in_turn, choice, group)
            yield f"{label}, {num_envs} environments", measurement


def beside_purejaxrl(choice):
    """PureJaxRL's CartPole and ours in its setting, in turn."""
    if choice.purejaxrl is None:
        raise Missing("needs --purejaxrl FOLDER")
    require("gymnax")
    fields = sps.COMPARED[CARTPOLE]
    group = [
        ("ours", functools.partial(sps.ours, CARTPOLE, **fields)),
        ("purejaxrl", functools.partial(sps.purejaxrl_ppo, choice.purejaxrl.resolve())),
    ]
    measured = sps.measure(group, rounds_of(choice))
    ratios = [a / b for a, b in zip(measured["ours"][0], measured["purejaxrl"][0])]
    row = {f"{name}_sps": statistics.median(rounds) for name, (rounds, _) in measured.items()}
    return row | {"ours_is_faster": statistics.median(ratios), "fields": fields}


def purejaxrl(choice):
    yield CARTPOLE, functools.partial(beside_purejaxrl, choice)


def kernels_by_time(choice, name, flags):
    """The longest kernels of an update."""
    from profile_update import profile

    if name == ATARI:
        require("envpool")
    script = importlib.import_module(name)
    words = words_for(choice, name, flags, total_timesteps=10**6)
    # A trace holds a million events.
    milliseconds, steps, operations = profile(name, updates=1, **fields_of(script, words))
    return {
        "traced_ms_per_update": milliseconds,  # without CUDA graphs: XLA has none while it traces
        "steps_per_update": steps,
        "busy_ms_per_update": sum(operation.milliseconds for operation in operations),
        "kernels_per_update": sum(operation.calls for operation in operations),
        "flags": flags,
        "kernels": [operation._asdict() for operation in operations[:25]],
    }


def profile(choice):
    settings = {f"{name} default": (name, "") for name in (CARTPOLE, SWINGUP)}
    for setting, (name, flags) in (settings | accelerators.SETTINGS).items():
        yield setting, functools.partial(kernels_by_time, choice, name, flags)


# ==================================================================================================
# Workers: a process of a stage
# ==================================================================================================


class Stage(NamedTuple):
    """What a stage measures, and its part of the time."""

    measurements: object  # a function of the command line's choices that yields (name, function)
    weight: float  # shares of the time left are in proportion to these
    least: float = 0  # seconds that it gets at least


STAGES = {
    "device": Stage(device, 1, least=90),
    "correctness": Stage(correctness, 3, least=150),
    "speed": Stage(speed, 10),
    "learning": Stage(learning, 4),
    "atari": Stage(atari, 3),
    "graphs": Stage(graphs, 4),
    "profile": Stage(profile, 3),
    "purejaxrl": Stage(purejaxrl, 1),
    "resume": Stage(resume, 3),
    "commands": Stage(commands, 2),
    "games": Stage(games, 4),
}


def last_line(error):
    """The last line of an exception's traceback."""
    return traceback.format_exception_only(error)[-1].strip().splitlines()[-1][:500]


def end_with_parent():
    """Lets the kernel end this process with the one that started it, however that ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work(choice):
    """Measures what is named, one after the other; appends a line of JSON for each."""
    end_with_parent()
    faulthandler.enable()
    jax.config.update("jax_enable_compilation_cache", False)
    if choice.small:
        sps.SECONDS = 0.1
    measurements = dict(STAGES[choice.worker].measurements(choice))
    for name in choice.names:
        start, failure = time.perf_counter(), None
        try:
            row = measurements[name]()
        except (Missing, ModuleNotFoundError) as error:
            row = {"missing": str(error)}
        except Exception as error:
            traceback.print_exc()
            row, failure = {"error": last_line(error)}, error
        row = {"name": name, "seconds": round(time.perf_counter() - start, 1), **row}
        if clocks := nvidia_smi("clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"):
            row["clock, power, temperature, throttling"] = clocks
        with choice.rows.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        if isinstance(failure, jax.errors.JaxRuntimeError):
            os._exit(START_ANEW)
        gc.collect()  # the arrays and programs of one measurement do not crowd out the next
        jax.clear_caches()


# ==================================================================================================
# The process that starts them, which leaves the GPU alone
# ==================================================================================================


class Results:
    """What was measured, kept in a file that is whole at any time."""

    def __init__(self, choice):
        self.path = choice.out
        self.content = {"small": choice.small, "commands": [], "stages": {}}
        if self.path.exists():
            try:
                before = json.loads(self.path.read_text())
            except ValueError as error:
                raise SystemExit(f"error: {self.path} is no file of this program") from error
            if before["small"] != choice.small:
                raise SystemExit(f"error: {self.path} has sizes of the other kind (--small)")
            self.content = before
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        command = "python " + " ".join(["benchmarks/gpu.py", *sys.argv[1:]])
        entry = {"command": command, "commit": choice.commit, "date": now, "status": "running"}
        self.content["commands"].append(entry)
        self.write()

    def add(self, stage, name, row):
        """One more measurement, in the place of an earlier one of this name; a failure takes no
        place of a success."""
        measured = self.content["stages"].setdefault(stage, {})
        row["command"] = len(self.content["commands"]) - 1
        failures = {"error", "missing", "skipped"}
        if not failures & set(row) or failures & set(measured.get(name, row)):
            measured[name] = row
        elif "skipped" not in row:
            measured[name].setdefault("failed_later", []).append(row)
        self.write()
        print(f"{stage}, {name}: {describe(row)}", flush=True)

    def end(self, status):
        self.content["commands"][-1]["status"] = status
        self.write()

    def write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self.content, indent=1) + "\n")
        whole.replace(self.path)


def describe(row):
    """A measurement in a line: what it lacks, or its first numbers."""
    for key in ("error", "missing", "skipped"):
        if key in row:
            return f"{key}: {row[key]}"
    words = []
    for key, value in row.items():
        if isinstance(value, dict) and "sps" in value:
            words.append(f"{key} {value['sps']:,.0f} SPS")
        elif isinstance(value, float) and key != "seconds":
            words.append(f"{key} {value:,.4g}")
        elif isinstance(value, bool):
            words.append(key if value else f"not {key}")
    return ", ".join([*words[:5], f"{row['seconds']:.0f} s"])


def end_of(log):
    """The last lines of a log, each not too long."""
    lines = log.read_text(errors="replace").splitlines()
    return [line[:300] for line in lines[-LOG_LINES:]]


def end_group(process):
    """Ends a worker and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_worker(choice, stage, left, deadline, folder, results):
    """A worker that measures the names in `left`, which are taken out when they are done.

    It ends when there are none, at the deadline, when a measurement takes too long or crashes it;
    what it was at then is taken out too.
    """
    rows, log = pathlib.Path(folder, "rows"), pathlib.Path(folder, "log")
    rows.write_text("")
    words = ["--worker", stage, "--rows", str(rows), "--seconds", str(deadline - time.monotonic())]
    command = [sys.executable, __file__, *sys.argv[1:], *words, "--names", *left]
    seen, waited = 0, 0.0  # s of sleep, so that a time in which all was suspended does not count
    # A game may take as long as the stage.
    patience = math.inf if stage == "games" else choice.patience
    env = dict(os.environ)
    if not choice.small:  # the CPU is compared with, but is no substitute
        env.setdefault("JAX_PLATFORMS", "cuda,cpu")
    with log.open("w") as stream:
        options = dict(stdout=stream, stderr=stream, env=env, start_new_session=True)
        process = subprocess.Popen(command, **options)
    why = None
    try:
        while left and why is None:
            running = process.poll() is None  # before the rows are read: they are all of them then
            lines = rows.read_text().split("\n")[:-1]
            for line in lines[seen:]:
                row = json.loads(line)
                name, waited = row.pop("name"), 0.0
                left.remove(name)
                if "error" in row:
                    row["log"] = end_of(log)
                results.add(stage, name, row)
            seen = len(lines)
            if not left:
                break
            if process.returncode == START_ANEW:
                break
            if not running:
                why = f"the process ended with status {process.returncode}"
            elif time.monotonic() > deadline:
                results.add(stage, left.pop(0), {"skipped": "stopped: no time was left"})
                break
            elif waited > patience:
                why = f"took longer than {patience:.0f} s"
            else:
                time.sleep(0.1)
                waited += 0.1
    except KeyboardInterrupt:
        if left:
            results.add(stage, left.pop(0), {"skipped": "interrupted"})
        raise
    finally:
        end_group(process)
    if why:
        results.add(stage, left.pop(0), {"error": why, "log": end_of(log)})


def is_chosen(choice, stage, name):
    """Whether `--only` names a measurement; versions are always wanted."""
    if not choice.only or (stage, name) == ("device", "versions"):
        return True
    return any(word in f"{stage} {name}" for word in choice.only)


def measure_all(choice, results):
    """All stages in turn, each within its share of the time that is left."""
    end = time.monotonic() + 60 * choice.minutes
    chosen = {}
    for stage, (measurements, *_) in STAGES.items():
        names = [name for name, _ in measurements(choice) if is_chosen(choice, stage, name)]
        if names:
            chosen[stage] = names
    weights = {stage: STAGES[stage].weight for stage in chosen}
    for stage, left in chosen.items():
        now = time.monotonic()
        share = (end - now) * weights[stage] / sum(weights.values())
        deadline = min(end, now + max(share, STAGES[stage].least))
        del weights[stage]
        while left and time.monotonic() < deadline:
            with tempfile.TemporaryDirectory() as folder:
                run_worker(choice, stage, left, deadline, folder, results)
        for name in left:
            results.add(stage, name, {"skipped": "no time was left"})
        if stage == "device" and not choice.small:
            backend = results.content["stages"]["device"]["versions"].get("backend")
            if backend != "gpu":
                raise NoGPU(f"JAX's backend is {backend}")


def parse_args():
    """The command line's choices."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    option = parser.add_argument
    option("--minutes", type=float, default=25, help="time for everything (default: 25)")
    option("--only", nargs="+", help="stages or measurements whose name contains one of these")
    option("--out", type=pathlib.Path, default=pathlib.Path("gpu.json"), help="JSON file")
    option("--small", action="store_true", help="tiny sizes, for a trial on a CPU")
    option("--purejaxrl", type=pathlib.Path, help="a clone of PureJaxRL's repository")
    option("--patience", type=float, default=300, help="seconds that a measurement may take")
    option("--commit", help="the commit that is measured, for the record")
    # What a worker is told:
    option("--worker", choices=STAGES, help=argparse.SUPPRESS)
    option("--names", nargs="+", help=argparse.SUPPRESS)
    option("--rows", type=pathlib.Path, help=argparse.SUPPRESS)
    option("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    choice = parse_args()
    if choice.worker:
        work(choice)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = Results(choice)
    try:
        measure_all(choice, results)
    except NoGPU as error:
        results.end(f"no GPU: {error}")
        print(f"error: {error}; {choice.out} has what JAX said", file=sys.stderr)
        sys.exit(3)
    except KeyboardInterrupt:
        results.end("interrupted")
        print(f"interrupted; {choice.out} has what was measured")
        sys.exit(130)
    results.end("finished")
    print(f"results: {choice.out}")


if __name__ == "__main__":
    main()
