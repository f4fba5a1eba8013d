"""Measures the scripts on one GPU; writes a JSON file after each measurement.

    python benchmarks/gpu.py --out gpu.json                     # everything, at most 25 minutes
    python benchmarks/gpu.py --out gpu.json --minutes 9 --only correctness learning
    python benchmarks/gpu.py --out gpu.json --only start solve environments --purejaxrl FOLDER
    python benchmarks/gpu.py --out trial.json --smoke           # tiny sizes, also on a CPU

| stage        | what is measured                                                                  |
| ------------ | --------------------------------------------------------------------------------- |
| device       | packages, driver                                                                  |
| correctness  | three updates (Atari: one) compared with a CPU, in full matrix precision          |
| resume       | whether a run resumed after 20 of 40 updates is bit-identical to one in one piece |
| learning     | steps and seconds of training until the task is solved                            |
| speed        | steps per second by number of environments                                        |
| unroll       | steps per second, compile time and kernels by unroll factor                       |
| start        | seconds of a process until the first update                                       |
| solve        | seconds of a process until a task is solved, also for PureJaxRL and Rejax         |
| environments | steps per second and return in Brax, MuJoCo Playground and Craftax                |

- Each of the last three stages starts no process after five minutes. `start` and our script in
  `solve` run twice: with an empty and with a filled compilation cache.
- Results are added to an existing file. A failed measurement does not replace a successful one.
- Without a GPU the exit status is 3.
- Required packages: JAX, NumPy, flax and optax (MiniGrid, Atari), EnvPool (Atari).
"""

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

import jax
import numpy as np
import sps
import start
import time_to_solve
from sps import ATARI, CARTPOLE, MINIGRID, SWINGUP

UNUSED = """PIL imageio filelock tensorboard.compat.proto.event_pb2 flax.serialization
    tensorboard.plugins.text.summary_v2 tensorboard.summary.writer.record_writer""".split()
ROOT = pathlib.Path(__file__).resolve().parents[1]
TOLERANCE = 1e-3
COMPARED_WITH_CPU = {
    CARTPOLE: dict(num_envs=64, num_steps=32),
    SWINGUP: dict(num_envs=64, num_steps=64),
    MINIGRID: dict(num_envs=64, num_steps=32, num_minibatches=4),
    ATARI: dict(num_envs=8, num_steps=32),
}
# Name -> script, flags, (score, threshold).
LEARNING = {
    "CartPole 4,096": (
        CARTPOLE,
        dict(num_envs=4096, num_minibatches=16, total_timesteps=20e6),
        ("eval_return_mean", 475),
    ),
    "swing-up 1,024": (SWINGUP, dict(num_envs=1024), ("eval_success_rate_random", 0.95)),
    "MiniGrid DoorKey-6x6 1,024": (
        MINIGRID,
        dict(env_id="DoorKey-6x6", num_envs=1024, total_timesteps=8e6),
        ("eval_success_rate", 0.95),
    ),
    "CartPole default": (CARTPOLE, {}, ("eval_return_mean", 475)),
    "swing-up default": (SWINGUP, {}, ("eval_success_rate_random", 0.95)),
    "MiniGrid DoorKey-6x6": (
        MINIGRID,
        dict(env_id="DoorKey-6x6", total_timesteps=1e6),
        ("eval_success_rate", 0.95),
    ),
    "Atari Pong 64": (  # training return, because an evaluation takes minutes
        ATARI,
        dict(env_id="Pong-v5", num_envs=64, num_minibatches=16, total_timesteps=10e6),
        ("charts/episodic_return", 18),
    ),
}
LEARNING_POINTS = 40  # evaluations per run
RESUMED = (CARTPOLE, MINIGRID)
UNROLLED = (1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (4, 16), (8, 16)  # other loops, GAE
WIDE = dict(num_steps=128, num_minibatches=4, update_epochs=4)
NUM_ENVS = {  # flags, numbers of environments
    CARTPOLE: (WIDE, (1024, 4096, 16_384, 65_536)),
    SWINGUP: (WIDE, (1024, 4096, 16_384, 65_536)),
    MINIGRID: (sps.COMPARED[MINIGRID], (1024, 4096, 16_384)),
    ATARI: ({}, (8, 64, 256)),
}
PROCESSES = ("start", "solve", "environments")  # stages of five minutes
STARTED = {
    "CartPole": (CARTPOLE, {}),
    "MiniGrid DoorKey-6x6": (MINIGRID, dict(env_id="DoorKey-6x6")),
    "swing-up": (SWINGUP, {}),
    "Atari": (ATARI, {}),
}
SOLVED = "ours", "purejaxrl", "rejax"
# Adapter script -> required package, flags in addition to 1,024 environments and 32 minibatches.
WORLDS = {
    "brax_physics": ("brax", dict(total_timesteps=8e6)),
    "playground_control": ("mujoco_playground", dict(total_timesteps=4e6)),
    "craftax_classic": ("craftax", dict(total_timesteps=16e6)),
    "craftax_classic_rnn": ("craftax", dict(total_timesteps=8e6)),
}
REPORTED = """sps compile_seconds train_seconds wall_seconds total_timesteps
    eval_return_mean eval_return_std""".split()


def stand_in_for_unused():
    """Replaces missing packages: tyro by without_tyro/, those that write files by empty modules."""
    try:
        importlib.import_module("tyro")
    except ImportError:
        folder = str(ROOT / "benchmarks" / "without_tyro")
        sys.path.insert(0, folder)
        folders = [folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    for name in UNUSED:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()


def flags_of(choice, name, flags):
    """The flags, with tiny sizes for --smoke."""
    if not choice.smoke:
        return flags
    sizes = dict(num_envs=8, num_steps=8, num_minibatches=2, update_epochs=1, total_timesteps=128.0)
    sizes |= dict(rnn_hidden_dim=8, head_hidden_dim=8) if name == MINIGRID else {}
    sizes |= dict(max_episode_steps=20) if name == ATARI else {}
    return flags | sizes | dict(eval_episodes=4)


def words_of(flags):
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def device():
    facts = {
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.local_devices()],
        "python": platform.python_version(),
        "versions": {name: sps.version(name) for name in "jax flax optax envpool tyro".split()},
    }
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        facts["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return facts


def far_apart(ours, theirs):
    """The largest difference of two trees, relative for values above 1; NaN equals NaN."""
    largest = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):  # inf - inf
            difference = abs(a - b) / np.maximum(1, abs(b))
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, difference)
        largest = max(largest, float(np.nan_to_num(difference, nan=np.inf).max(initial=0)))
    return largest


def like_cpu(choice, name):
    """Compares updates from the same state with those of a CPU, each traced for its platform."""
    script = importlib.import_module(name)
    args, state, update, envs = sps.prepare(
        script, **flags_of(choice, name, COMPARED_WITH_CPU[name])
    )
    inputs, updates = (state,), 3
    if envs is not None:
        inputs, updates = jax.jit(functools.partial(script.rollout, args, envs))(state), 1
        update = lambda args, *inputs: script.over_seeds(
            functools.partial(script.learn, args), *inputs
        )
    found = {}
    for kind in ("gpu", "cpu"):
        where = jax.local_devices(backend="cpu" if kind == "cpu" or choice.smoke else None)[0]
        with (
            mock.patch.object(jax, "default_backend", return_value=kind),
            jax.default_matmul_precision("highest"),
            jax.default_device(where),
        ):
            (state, *others), found[kind] = jax.device_put(inputs, where), []
            step = jax.jit(lambda *inputs: update(args, *inputs))  # is traced again
            for _ in range(updates):
                state, metrics = step(state, *others)
                found[kind].append(jax.device_get((state.params, metrics)))
    pairs = list(zip(found["gpu"], found["cpu"]))
    params = [far_apart(ours[0], theirs[0]) for ours, theirs in pairs]
    metrics = [far_apart(ours[1], theirs[1]) for ours, theirs in pairs]
    passed = max(params) < TOLERANCE
    return {"passed": passed, "params_differ": params, "metrics_differ": metrics}


def resume(choice, name, xla_flags):
    """Compares a resumed run with an uninterrupted one bit by bit, without a compilation cache."""
    script = importlib.import_module(name)
    updates = 4 if choice.smoke else 40
    env = os.environ | {"XLA_FLAGS": xla_flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    fixed = flags_of(choice, name, {}) | dict(eval_episodes=1)
    batch_size = script.Args(**fixed).batch_size
    with tempfile.TemporaryDirectory() as folder:

        def run(runs, updates, *words):
            words = [*words, f"--total-timesteps={updates * batch_size}"]
            words += [f"--runs-dir={folder}/{runs}", f"--videos-dir={folder}/videos"]
            command = [sys.executable, f"{name}.py", *words]
            return subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, check=True
            )

        def arrays(runs):
            (path,) = pathlib.Path(folder, runs).glob("*/checkpoint.npz")
            with np.load(path) as file:
                return dict(file), path.parent

        words = words_of(fixed) + ["--no-anneal-lr"]  # annealing depends on the length
        run("whole", updates, *words)
        run("parts", updates // 2, *words)
        run("parts", updates, "--resume", str(arrays("parts")[1]))
        whole, parts = arrays("whole")[0], arrays("parts")[0]
    differ = [key for key in whole if whole[key].tobytes() != parts[key].tobytes()]
    return {"xla_flags": xla_flags, "updates": updates, "equal": not differ, "differ": differ}


def learning(choice, name, flags, aim):
    """Trains until the score `aim` = (name, threshold) is reached, or the run or time ends."""
    script = importlib.import_module(name)
    length = {"total_timesteps": script.Args.total_timesteps}
    args, state, update, envs = sps.prepare(script, **flags_of(choice, name, length | flags))
    score, threshold = aim
    start = time.perf_counter()
    run_update = sps.compiled(script, args, update, state, donate_argnums=1)
    if envs is None:
        evaluate = sps.compiled(script, args, script.evaluate_seeds, state.params)
    row = {"flags": flags, "aim": aim, "solved": False, "points": []}
    row["compile_seconds"] = time.perf_counter() - start
    done, seconds = 0, 0.0  # training only
    while done < args.num_updates and not row["solved"] and time.time() < choice.end:
        start = time.perf_counter()
        rest = int(args.num_updates) - done
        for _ in range(min(max(1, int(args.num_updates) // LEARNING_POINTS), rest)):
            state, metrics = run_update(state)
            done += 1
        jax.block_until_ready(state.params)
        seconds += time.perf_counter() - start
        if envs is None:
            evaluation = evaluate(state.params)
            metrics = script.evaluation_scores(evaluation)
        value = float(np.mean(metrics[score]))
        row["points"].append([done * args.batch_size, seconds, value])
        row["solved"] = value >= threshold
    return row | {"sps": done * args.batch_size / seconds}


def speed(choice, name, flags):
    """Steps per second, the median of several rounds."""
    run, facts = sps.ours(name, **flags_of(choice, name, flags))
    rounds = [run() for _ in range(1 if choice.smoke else 5)]
    return {"flags": flags, "sps": statistics.median(rounds), "rounds": rounds} | facts


def unroll(choice, name, steps, gae_steps):
    """`speed` with these unroll factors; GAE's loop is the one with factor 16."""
    script = importlib.import_module(name)
    with mock.patch.object(script, "gpu_unroll", lambda own: gae_steps if own == 16 else steps):
        return speed(choice, name, {})


def start_of(choice, name, flags):
    """The seconds until the first update, from start.py."""
    pair = start.pair(name, words_of(flags_of(choice, name, flags)))
    seconds = {kind: row["seconds"]["start"] for kind, row in pair.items()}
    return {"flags": flags, "seconds": seconds, "points": pair}


def solve(choice, task, name):
    """The seconds until a library solves a task of time_to_solve.py."""
    wanted = argparse.Namespace(only=[name], xland=None, cleanrl=None, purejaxrl=choice.purejaxrl)
    with tempfile.TemporaryDirectory() as folder:
        command = time_to_solve.commands(wanted, task, 1, folder).get(name)
        if command is None:
            return {"skipped": f"{name} is not installed, not given or has no such task"}
        if name == "ours":
            command += words_of(flags_of(choice, pathlib.Path(command[1]).stem, {}))
        threshold = time_to_solve.THRESHOLDS[task]
        min_steps = time_to_solve.WINDOW * time_to_solve.LIMITS.get(task, 0)
        cache = f"{folder}/cache" if name == "ours" else None
        rows = {}
        for kind in ("cold", "cached") if cache else ("cold",):
            limit = max(10, choice.stage_end - time.time())
            rows[kind] = time_to_solve.clocked(command, folder, threshold, limit, cache, min_steps)
    keys = ("solved", "seconds", "steps")
    return {kind: {key: row[key] for key in keys} for kind, row in rows.items()} | {"points": rows}


def environment_row(choice, name, package, flags):
    """Values from the summary of an adapter script of benchmarks/environments."""
    if importlib.util.find_spec(package) is None:
        return {"skipped": f"{package} is not installed"}
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, str(ROOT / "benchmarks" / "environments" / f"{name}.py")]
    command += words_of(flags_of(choice, name, flags))
    options = dict(env=env, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        limit = choice.stage_end - time.time()
        result = subprocess.run(command, cwd=folder, timeout=limit, **options)
        if result.returncode != 0:
            text = result.stdout + result.stderr
            raise RuntimeError(f"{name} ended with {result.returncode}: {text[-1500:]}")
        (path,) = pathlib.Path(folder, "runs").glob("*/summary.json")
        summary = json.loads(path.read_text())
    return {"flags": flags} | {key: summary[key] for key in REPORTED}


def measurements(choice):
    """Yields (name, function) of all measurements, the most important first."""
    yield "device", device
    for name, _ in sorted(COMPARED_WITH_CPU.items(), key=lambda item: item[0] == ATARI):
        yield f"correctness {name}", functools.partial(like_cpu, choice, name)
    for name in RESUMED:
        for flag in ("false", "true"):
            xla_flags = f"--xla_gpu_deterministic_ops={flag}"
            yield f"resume {name} {flag}", functools.partial(resume, choice, name, xla_flags)
    for label, (name, flags, aim) in LEARNING.items():
        yield f"learning {label}", functools.partial(learning, choice, name, flags, aim)
    for name, (flags, sizes) in NUM_ENVS.items():
        yield f"speed {name} default", functools.partial(speed, choice, name, {})
        for num_envs in sizes:
            wide = functools.partial(speed, choice, name, flags | dict(num_envs=num_envs))
            yield f"speed {name} num_envs={num_envs}", wide
    for name in (CARTPOLE, SWINGUP, MINIGRID):
        for steps, gae_steps in UNROLLED:
            label = f"unroll {name} {steps}, GAE {gae_steps}"
            yield label, functools.partial(unroll, choice, name, steps, gae_steps)
    for label, (name, flags) in STARTED.items():
        yield f"start {label}", functools.partial(start_of, choice, name, flags)
    for task in ("CartPole-v1", "Empty-8x8", "DoorKey-6x6"):
        for name in SOLVED:
            yield f"solve {task} {name}", functools.partial(solve, choice, task, name)
    for name, (package, flags) in WORLDS.items():
        flags = dict(num_envs=1024, num_minibatches=32) | flags
        row = functools.partial(environment_row, choice, name, package, flags)
        yield f"environments {name}", row


def measure(choice, name, function):
    """The row of a measurement, also if it fails."""
    if time.time() > choice.stage_end:
        return {"skipped": "no time was left"}
    if ATARI in name or "Atari" in name:
        with contextlib.suppress(ImportError):
            importlib.import_module("envpool")
        if "envpool" not in sys.modules:
            return {"skipped": "EnvPool is not installed"}
    start = time.time()
    try:
        row = function()
    except (Exception, SystemExit) as error:
        lines = traceback.format_exc().splitlines()
        row = {"error": f"{type(error).__name__}: {error}"[-2000:], "traceback": lines[-20:]}
    return row | {"wall_seconds": time.time() - start}


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=25, help="starts nothing afterwards")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of measurement names")
    parser.add_argument("--purejaxrl", type=pathlib.Path, help="clone of PureJaxRL")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also without a GPU")
    choice = parser.parse_args()
    choice.end = time.time() + 60 * choice.minutes
    with mock.patch.dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false"):
        backend = jax.default_backend()  # leaves memory for other processes
    if backend != "gpu" and not choice.smoke:
        print("error: JAX finds no GPU; use --smoke for a trial on a CPU", file=sys.stderr)
        sys.exit(3)
    stand_in_for_unused()
    jax.config.update("jax_enable_compilation_cache", False)
    if choice.smoke:
        sps.SECONDS = 0.01
    result = json.loads(choice.out.read_text()) if choice.out.exists() else {"rows": {}}
    result |= {"smoke": choice.smoke, "date": datetime.date.today().isoformat()}
    result.setdefault("commands", []).append(" ".join(["gpu.py", *sys.argv[1:]]))
    ends = {}  # end time of each stage
    for name, function in measurements(choice):
        if name != "device" and not any(part in name for part in choice.only):
            continue
        stage = name.split()[0]
        minutes = 5 if stage in PROCESSES else choice.minutes
        choice.stage_end = min(choice.end, ends.setdefault(stage, time.time() + 60 * minutes))
        row = measure(choice, name, function)
        old = result["rows"].get(name, {"skipped": ""})
        if not {"error", "skipped"} & set(row) or {"error", "skipped"} & set(old):
            result["rows"][name] = row
        choice.out.write_text(json.dumps(result, indent=2) + "\n")
        hidden = ("traceback", "points", "rounds", "flags")
        print(name, {key: x for key, x in row.items() if key not in hidden}, flush=True)
    rows = result["rows"].values()
    sys.exit(int(any("error" in row or row.get("passed") is False for row in rows)))


if __name__ == "__main__":
    main()
