"""Measures the seconds before training: imports, tracing, compilation, first update.

    python benchmarks/start.py --out benchmarks/results/start_cpu.json
    python benchmarks/start.py --script ppo_minigrid_rnn --pairs 3 -- --num-envs 1024

Flags after `--` go to the scripts. Every script runs in pairs of processes: the first one has an
empty compilation cache (cold), the second one uses the cache of the first (cached). Reported are
medians over the pairs. JAX's monitoring events contain the times of tracing, lowering and compiling
(or loading) each function.

- `start`: seconds from the start of the process until the first update runs
- `first_update`: seconds of the first update, not contained in `start`
- `kernels`: fusions of a compiled function; on a CPU, XLA's compile time grows with their number
"""

import argparse
import datetime
import importlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPILE = "/jax/core/compile/backend_compile_duration"  # or load from the cache
STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
}
PROGRAMS = {"init_states": "compile_init", "update_seeds": "compile_update"}
SHOWN = "import trace lower compile_init compile_update other start first_update".split()
QUICK = {"ppo_atari_envpool_xla_jax": ["--eval-episodes", "1", "--max-episode-steps", "10"]}


def kernels(compiled):
    """Returns the number of kernels of a compiled function."""
    return compiled.as_text().count(" fusion(")


def run_script(name, begin, words):
    """Runs a script's `main` for one update and prints the measurements as one line of JSON.

    `begin` is the start time of the process in seconds since 1970.
    """
    seconds = dict.fromkeys([*STAGES.values(), *PROGRAMS.values()], 0.0)
    found = {}
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(name)
    seconds["import"] = time.time() - begin

    def listen(event, duration, fun_name="", **_):
        if "start" not in seconds and event in STAGES:
            seconds[STAGES[event]] += duration
        program = fun_name.removeprefix("jit(").removesuffix(")")
        if "start" not in seconds and event == COMPILE and program in PROGRAMS:
            seconds[PROGRAMS[program]] += duration

    lowered_compile, logger_log, logger_flush = (
        jax.stages.Lowered.compile,
        script.Logger.log,
        script.Logger.flush,
    )

    def compile(lowered, *inputs, **options):
        compiled = lowered_compile(lowered, *inputs, **options)
        if "update_seeds" in compiled.as_text()[:100]:
            found["kernels_update"] = kernels(compiled)
        return compiled

    def log(logger, update, metrics):
        if "start" not in seconds:  # the first update runs
            seconds["start"] = time.time() - begin
        logger_log(logger, update, metrics)

    def flush(logger, keep=0):
        logger_flush(logger, keep)
        seconds["first_update"] = logger.seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.stages.Lowered.compile = compile
    script.Logger.log, script.Logger.flush = log, flush
    script.try_video = lambda *_: None  # slow and not measured
    script.main(words)
    seconds["other"] = seconds["start"] - sum(seconds[key] for key in SHOWN[:5])
    args = script.parse_args(words)
    init = script.jit_function(args, script.init_states, level=0)
    init = init.lower(script.float_inputs(args))
    found["kernels_init"] = kernels(lowered_compile(init))
    print("\n" + json.dumps({"seconds": seconds, **found}))


def measure(name, words, cache):
    """Runs `run_script` in a new process with a cache folder; returns its output."""
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # as in the scripts
    command = [sys.executable, __file__, "--child", name, str(time.time()), *words]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"error: {name} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def pair(name, flags):
    """Returns {"cold": ..., "cached": ...}, measured in two processes with the same cache."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", f"{folder}/runs", "--videos-dir", f"{folder}/videos"]
        args = importlib.import_module(name).parse_args(flags)
        words += [*flags, *QUICK.get(name, []), f"--total-timesteps={args.batch_size}"]
        cache = pathlib.Path(folder, "cache")
        return {kind: measure(name, words, cache) for kind in ("cold", "cached")}


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--script", action="append", help="may be repeated; default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    choice, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    result = {
        "command": " ".join(["python benchmarks/start.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "rows": {},
    }
    print(f"{'':34} {'  '.join(SHOWN)}  kernels of init, update")
    for name in choice.script or sorted(path.stem for path in ROOT.glob("ppo_*.py")):
        pairs = [pair(name, flags) for _ in range(choice.pairs)]
        for kind in ("cold", "cached"):
            measured = [one[kind] for one in pairs]
            row = {key: value for key, value in measured[0].items() if key != "seconds"}
            seconds = [one["seconds"] for one in measured]
            row |= {key: statistics.median(one[key] for one in seconds) for key in SHOWN}
            result["rows"][f"{name}, {kind}"] = row | {"pairs": seconds}
            numbers = "  ".join(f"{row[key]:{len(key)}.2f}" for key in SHOWN)
            print(
                f"{name}, {kind:6}".ljust(34), numbers, row["kernels_init"], row["kernels_update"]
            )
        if choice.out:
            choice.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_script(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    else:
        sys.path.insert(0, str(ROOT))
        main()
