"""What the protocol of an evaluation changes: one Atari checkpoint, the same emulators, both ways.

    python benchmarks/atari_protocols.py runs/<run_name> --episodes 30
    python benchmarks/atari_protocols.py runs/<run_name> runs/<run_name> --modes sampled greedy

The newest checkpoint of every run plays this many games under each protocol ("training": with
no-ops and FIRE after every life, as CleanRL evaluates; "whole-games": without help from the first
life to the last) and in each mode. The games under both begin in the same states; they differ from
the first lost life on, and wherever sampled actions do. Nothing is written into the run folders.
The result is benchmarks/results/atari_protocols.json, one entry per run, with the score and length
of every game.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ppo_atari_envpool_xla_jax as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "atari_protocols.json"
PROTOCOLS = ("training", "whole-games")


def measure(args, act, params):
    """One evaluation of K agents: scores and lengths of all games, their mean and its error."""
    evaluation = script.evaluate(args, act, params, script.evaluation_keys(args))
    returns = evaluation.episode_return.reshape(-1)
    lengths = evaluation.episode_length.reshape(-1)
    return {
        "return_mean": returns.mean(),
        "return_standard_error": returns.std() / np.sqrt(max(returns.size - 1, 1)),
        "length_mean": lengths.mean(),
        "truncated_games": int((lengths >= args.max_episode_steps).sum()),
        "returns": returns.tolist(),
        "lengths": lengths.tolist(),
    }


def compare(run_dir, episodes, modes):
    """The entry of a run: every mode under both protocols, and their difference."""
    args, state = script.load_run(run_dir)
    rows = {}
    for mode in modes:
        args = dataclasses.replace(args, eval_episodes=episodes, eval_mode=mode)
        act = script.make_act(args)
        for protocol in PROTOCOLS:
            args = dataclasses.replace(args, eval_protocol=protocol)
            rows[f"{mode} {protocol}"] = row = measure(args, act, state.params)
            print(
                f"{args.env_id} {mode:8s} {protocol:12s} return {row['return_mean']:9.2f} +- "
                f"{row['return_standard_error']:.2f}, length {row['length_mean']:.0f}, "
                f"truncated {row['truncated_games']} of {len(row['returns'])}",
                flush=True,
            )
        helped, alone = (rows[f"{mode} {protocol}"] for protocol in PROTOCOLS)
        errors = helped["return_standard_error"], alone["return_standard_error"]
        rows[f"{mode} difference"] = {
            "return": alone["return_mean"] - helped["return_mean"],
            "standard_error": float(np.hypot(*errors)),
        }
    return {
        "env_id": args.env_id,
        "timesteps": int(state.update[0]) * args.batch_size,
        "num_seeds": args.num_seeds,
        "repeat_action_probability": args.repeat_action_probability,
        "full_action_space": args.full_action_space,
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs")
    parser.add_argument("--episodes", type=int, default=30, help="games of each agent")
    choices = ["sampled", "greedy"]
    parser.add_argument("--modes", nargs="+", default=["sampled"], choices=choices)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    for run_dir in choice.runs:
        result = compare(run_dir, choice.episodes, choice.modes)
        results = json.loads(choice.out.read_text()) if choice.out.exists() else {}
        cores = len(os.sched_getaffinity(0))
        name = run_dir.resolve().name
        words = f"runs/{name} --episodes {choice.episodes} --modes {' '.join(choice.modes)}"
        result["command"] = f"python benchmarks/atari_protocols.py {words}"
        result["device"] = f"{jax.devices()[0].device_kind}, {platform.machine()}, {cores} cores"
        packages = ("jax", "envpool")
        result["versions"] = {name: importlib.metadata.version(name) for name in packages}
        name = f"{name}, {result['timesteps']:,} steps"
        choice.out.write_text(json.dumps(results | {name: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
