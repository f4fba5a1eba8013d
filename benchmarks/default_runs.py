"""Runs a script once per seed, each in its own process; writes evaluations and the mean curve.

    python benchmarks/default_runs.py ppo_cartpole_jax --seeds 20
    python benchmarks/default_runs.py ppo_swingup_jax --seeds 2 --out FILE -- --num-envs 1024

Flags after `--` go to the script. Without `--cache` every process compiles. `--at-once 2` runs two
processes in parallel, which slows each of them. Results: <out>.json (evaluation, SPS, seconds per
seed, mean curve) and <out>.png (mean training return with a 95% bootstrap interval over seeds).
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import matplotlib
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUCCESS = "eval_success_rate eval_success_rate_random eval_success_rate_hanging".split()


def run_seed(script, seed, flags, folder, cache):
    """Runs the script; returns (summary with the process's seconds, steps, returns)."""
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / f"{script}.py"), "--seed", str(seed), *flags]
    env = os.environ | ({} if cache else {"JAX_ENABLE_COMPILATION_CACHE": "false"})
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=env)
    seconds = time.perf_counter() - start
    (run,) = (folder / "runs").glob(f"*__{seed}__*")
    events = EventAccumulator(str(run)).Reload().Scalars("charts/episodic_return")
    summary = json.loads((run / "summary.json").read_text()) | {
        "process_seconds": seconds,
        "seed": seed,
    }
    return summary, [event.step for event in events], [event.value for event in events]


def draw(title, result, path):
    """Plots the mean curve over seeds with its interval."""
    curve = result["curve"]
    steps = np.array(curve["steps"]) / 1e6
    plt.style.use(ROOT / "benchmarks" / "plots.mplstyle")
    figure, axes = plt.subplots(figsize=(7, 4))
    label = "95% bootstrap interval of the mean"
    axes.fill_between(steps, curve["low"], curve["high"], alpha=0.3, label=label)
    axes.plot(steps, curve["mean_return"], label=f"mean of {len(result['runs'])} seeds")
    axes.set(xlabel="million environment steps", ylabel="episodic return", title=title)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("script")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--cache", action="store_true", help="use the compilation cache")
    parser.add_argument("--at-once", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--out", type=pathlib.Path, help="output path without suffix")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    choice, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    if flags and not choice.out:
        parser.error("script flags require --out: the default file is for default flags")
    out = choice.out or ROOT / "benchmarks" / "results" / f"{choice.script}_default_runs"

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        pool = concurrent.futures.ThreadPoolExecutor(choice.at_once)
        seeds = range(choice.first_seed, choice.first_seed + choice.seeds)
        started = pool.map(
            lambda seed: run_seed(choice.script, seed, flags, pathlib.Path(folder), choice.cache),
            seeds,
        )
        for seed, run in zip(seeds, started):
            summary = run[0]
            runs.append(run)
            text = f"seed {seed:3d}: return {summary['eval_return_mean']:.3f}"
            for key in SUCCESS:
                if key in summary:
                    text += f", {key} {summary[key]:.3f}"
            print(f"{text}, {summary['process_seconds']:.1f} s", flush=True)

    summaries = [summary for summary, _, _ in runs]
    keys = "seed eval_return_mean eval_return_std sps compile_seconds train_seconds process_seconds"
    keys, cores = [*keys.split(), *SUCCESS], len(os.sched_getaffinity(0))
    result = {
        "command": "python benchmarks/default_runs.py " + " ".join(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
        "device": f"{summaries[0]['device']}, {platform.machine()}, {cores} cores",
        "versions": {"python": platform.python_version(), "jax": summaries[0]["jax_version"]},
        "compilation_cache": choice.cache,
        "processes_at_once": choice.at_once,
        "total_timesteps": summaries[0]["total_timesteps"],
        "median_process_seconds": statistics.median(s["process_seconds"] for s in summaries),
        "runs": [{key: summary[key] for key in keys if key in summary} for summary in summaries],
    }
    steps = np.array(runs[0][1])
    curves = np.array([np.interp(steps, s, r) for _, s, r in runs])  # [seeds, points]
    resampled = np.random.default_rng(0).integers(len(curves), size=(2000, len(curves)))
    low, high = np.percentile(curves[resampled].mean(1), [2.5, 97.5], axis=0)
    lines = {"mean_return": curves.mean(0), "low": low, "high": high}
    lines = {name: values.round(2).tolist() for name, values in lines.items()}
    result["curve"] = {"steps": steps.tolist()} | lines
    out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    draw(choice.script, result, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
