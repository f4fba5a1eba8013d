"""Compares the returns of mujoco_envpool.py with published ones.

    for seed in 51 52 53; do
        for id in HalfCheetah-v4 Hopper-v4 ...; do
            python benchmarks/environments/mujoco_envpool.py --env-id $id --seed $seed \\
                --eval-episodes 100
        done
    done
    for run in runs/*__mujoco_envpool__*; do
        python benchmarks/environments/mujoco_envpool.py --eval $run --eval-mode greedy
    done
    python benchmarks/compare_mujoco.py runs/*__mujoco_envpool__*

Reads summary.json and eval.json of every run, writes benchmarks/results/mujoco.json and prints a
table: mean and standard deviation over seeds, and documented figures, of which RL Zoo's are greedy.
Only id and seed of the runs may differ. `--cleanrl` adds the mean of the last 100 training episodes
of CleanRL's script on this machine:

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
ENVIRONMENTS = """HalfCheetah-v4 Hopper-v4 Walker2d-v4 Ant-v4 Swimmer-v4 InvertedPendulum-v4
    InvertedDoublePendulum-v4 Humanoid-v4 Pusher-v4 BipedalWalker-v3 CheetahRun-v1""".split()
CLEANRL = {  # docs/benchmark/ppo_continuous_action.md at fe8d8a0, a million steps, three seeds
    "HalfCheetah-v4": "1,443 ± 46",
    "Hopper-v4": "2,383 ± 272",
    "Walker2d-v4": "2,288 ± 572",
    "InvertedPendulum-v4": "963 ± 22",
    "Humanoid-v4": "716 ± 49",
    "Pusher-v4": "-40 ± 7",
}
RL_ZOO = {  # benchmark.md of RL Baselines3 Zoo: flags tuned for each task, one run
    "HalfCheetah-v4": "5,819",
    "Hopper-v4": "2,410",
    "Walker2d-v4": "3,479",
    "Ant-v4": "1,327",
    "Swimmer-v4": "282",
    "BipedalWalker-v3": "213 (5 million steps)",
}
OWN = "env_id seed exp_name runs_dir videos_dir resume eval".split()  # flags that may differ


def read_run(folder):
    """Returns summary.json and the reported values of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    keys = "total_timesteps eval_episodes eval_mode eval_return_mean eval_return_std"
    keys = f"{keys} eval_length_mean sps compile_seconds train_seconds wall_seconds".split()
    run = {"seed": summary["args"]["seed"]} | {key: summary[key] for key in keys}
    if (folder / "eval.json").exists():
        evaluation = json.loads((folder / "eval.json").read_text())
        run[f"{evaluation['eval_mode']}_return_mean"] = evaluation["eval_return_mean"]
    return summary, run


def spread(returns):
    """Returns mean and standard deviation as text."""
    return f"{np.mean(returns):,.0f} ± {np.std(returns):,.0f}" if returns else ""


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
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    pairs = [read_run(folder) for folder in choice.runs if (folder / "summary.json").exists()]
    summaries = [summary for summary, _ in pairs]
    flags = [{k: v for k, v in x["args"].items() if k not in OWN} for x in summaries]
    if any(x != flags[0] for x in flags):
        parser.error("the runs differ in more than environment and seed")
    versions = {name: importlib.metadata.version(name) for name in ("envpool", "gymnasium")}
    versions |= {"python": platform.python_version(), "jax": summaries[0]["jax_version"]}
    results = {
        "command": "python benchmarks/environments/mujoco_envpool.py --env-id ID --seed SEED",
        "flags": flags[0],
        "date": datetime.date.today().isoformat(),
        "device": f"{summaries[0]['device']}, {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
        "environments": {},
    }
    print("| environment | sampled | greedy | sampled, each seed | RL Zoo | CleanRL | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    cleanrl_runs = [read_cleanrl(folder) for folder in choice.cleanrl]
    for env_id in ENVIRONMENTS:
        runs = [run for summary, run in pairs if summary["args"]["env_id"] == env_id]
        runs.sort(key=lambda run: run["seed"])
        if not runs:
            continue
        returns = [run["eval_return_mean"] for run in runs]
        greedy = [run["greedy_return_mean"] for run in runs if "greedy_return_mean" in run]
        results["environments"][env_id] = {
            "return_mean": np.mean(returns),
            "return_std": np.std(returns),
            "runs": runs,
            "cleanrl_runs": [run for of, run in cleanrl_runs if of == env_id],
        }
        seconds = np.median([run["wall_seconds"] for run in runs])
        each = ", ".join(f"{x:,.0f}" for x in returns)
        peers = [RL_ZOO.get(env_id, ""), CLEANRL.get(env_id, "")]
        cells = [env_id, spread(returns), spread(greedy), each, *peers, f"{seconds:.0f}"]
        print("|", " | ".join(cells), "|")
    choice.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
