"""Compares the returns of mujoco_envpool.py with CleanRL's documentation.

    for seed in 1 2 3; do
        for id in HalfCheetah-v4 Hopper-v4 Walker2d-v4 InvertedPendulum-v4 Humanoid-v4 Pusher-v4; do
            python benchmarks/environments/mujoco_envpool.py --env-id $id --seed $seed \\
                --eval-episodes 100
        done
    done
    python benchmarks/compare_mujoco.py runs/*-v4__mujoco_envpool__* --commit 559d298

Reads summary.json of every run, writes benchmarks/results/mujoco.json and prints a table: mean and
standard deviation over seeds of the return of sampled episodes after training. CleanRL's numbers
are those of its page on ppo_continuous_action.py (one million steps, three seeds). `--cleanrl` adds
runs of that script on this machine, with the mean of the last 100 training episodes:

    python cleanrl/ppo_continuous_action.py --env-id Humanoid-v4 --seed 1  # in a clone of CleanRL
    ... --cleanrl CLONE/runs/Humanoid-v4__ppo_continuous_action__*
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RESULTS = pathlib.Path(__file__).resolve().parent / "results" / "mujoco.json"
CLEANRL = {  # mean and standard deviation, docs/benchmark/ppo_continuous_action.md at fe8d8a0
    "HalfCheetah-v4": (1442.64, 46.03),
    "Hopper-v4": (2382.86, 271.74),
    "Walker2d-v4": (2287.95, 571.78),
    "InvertedPendulum-v4": (963.09, 22.20),
    "Humanoid-v4": (716.11, 49.08),
    "Pusher-v4": (-40.38, 7.15),
}


def read_run(summary):
    """Returns the reported values of one summary."""
    keys = "total_timesteps eval_episodes eval_mode eval_return_mean eval_return_std"
    keys = f"{keys} eval_length_mean sps compile_seconds train_seconds wall_seconds".split()
    return {"seed": summary["args"]["seed"]} | {key: summary[key] for key in keys}


def read_cleanrl(folder):
    """Returns (environment id, reported values) of a CleanRL run."""
    env_id, _, seed, _ = folder.name.split("__")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    returns = [event.value for event in events.Scalars("charts/episodic_return")]
    return env_id, {"seed": int(seed), "episodes": 100, "return_mean": np.mean(returns[-100:])}


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", type=pathlib.Path)
    parser.add_argument("--cleanrl", nargs="*", type=pathlib.Path, default=[])
    parser.add_argument("--commit", help="commit of the runs")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    files = [folder / "summary.json" for folder in choice.runs]
    summaries = [json.loads(file.read_text()) for file in files if file.exists()]
    versions = {name: importlib.metadata.version(name) for name in ("envpool", "gymnasium")}
    versions |= {"python": platform.python_version(), "jax": summaries[0]["jax_version"]}
    flags = summaries[0]["args"]  # the same for all runs
    results = {
        "command": "python benchmarks/environments/mujoco_envpool.py --env-id ID --seed SEED "
        f"--eval-episodes 100 --num-envs {flags['num_envs']} --num-steps {flags['num_steps']}",
        "commit": choice.commit,
        "date": datetime.date.today().isoformat(),
        "device": f"{summaries[0]['device']}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
        "environments": {},
    }
    print("| environment | ours | CleanRL | seeds | steps | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")
    cleanrl_runs = [read_cleanrl(folder) for folder in choice.cleanrl]
    for env_id, cleanrl in CLEANRL.items():
        runs = [read_run(x) for x in summaries if x["args"]["env_id"] == env_id]
        runs.sort(key=lambda run: run["seed"])
        if not runs:
            continue
        returns = np.array([run["eval_return_mean"] for run in runs])
        results["environments"][env_id] = {
            "return_mean": returns.mean(),
            "return_std": returns.std(),
            "cleanrl_return_mean": cleanrl[0],
            "cleanrl_return_std": cleanrl[1],
            "runs": runs,
            "cleanrl_runs": [run for of, run in cleanrl_runs if of == env_id],
        }
        minutes = np.mean([run["wall_seconds"] for run in runs]) / 60
        print(
            f"| {env_id} | {returns.mean():,.0f} ± {returns.std():,.0f} "
            f"| {cleanrl[0]:,.0f} ± {cleanrl[1]:,.0f} | {len(runs)} "
            f"| {runs[0]['total_timesteps']:,} | {minutes:.1f} |"
        )
    choice.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
