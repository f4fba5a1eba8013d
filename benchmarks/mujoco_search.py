r"""Search for one set of flags of mujoco_envpool.py that works for all MuJoCo tasks.

    python benchmarks/mujoco_search.py 300000 --seeds 1
    python benchmarks/mujoco_search.py 1000000 --narrow 12 --seeds 2
    python benchmarks/mujoco_search.py 1000000 --tasks HalfCheetah-v4 Hopper-v4 Walker2d-v4 \
        --seeds 2 --names $(seq -f c%g 24)
    python benchmarks/mujoco_search.py 1000000 --tasks HalfCheetah-v4 Hopper-v4 Walker2d-v4 \
        --seeds 3 4 5 6 --names c5 c8 c11 c13 c14 c18 c19

Candidate 0 of the first command has CleanRL's flags; the others are sampled from `SPACE`. The
second command samples n1, n2, ... from `NARROW`, which contains the values of the best of them. The
third command changes a few values of n7, the last one gives the best more seeds; both were stopped
early. A score is the mean over tasks of the return, divided by RL Zoo's tuned return at a million
steps. Results are appended to results/mujoco_search.json, and a run in the file is not repeated.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
SCRIPT = next(FOLDER.glob("*/mujoco_envpool.py"))
RESULTS = FOLDER / "results" / "mujoco_search.json"
# Tuned PPO after a million steps, benchmark.md of RL Baselines3 Zoo.
REFERENCE = {"HalfCheetah-v4": 5819, "Hopper-v4": 2410, "Walker2d-v4": 3479, "Ant-v4": 1327}
SPACE = {
    "num_envs": [1, 4, 8],
    "batch_size": [512, 1024, 2048],
    "minibatch_size": [32, 64, 128],
    "update_epochs": [5, 10, 20],
    "learning_rate": [5e-5, 1e-4, 2e-4, 3e-4, 5e-4],
    "anneal_lr": [True, False],
    "gamma": [0.98, 0.99, 0.995],
    "gae_lambda": [0.9, 0.92, 0.95, 0.98],
    "clip_coef": [0.1, 0.2],
    "clip_vloss": [True, False],
    "ent_coef": [0.0, 0.0005, 0.002],
    "max_grad_norm": [0.5, 1.0],
    "hidden_size": [64, 256],
    "activation": ["tanh", "relu"],
    "log_std_init": [0.0, -1.0, -2.0],
    "reward_clip": [10.0, 1000.0],
}
NARROW = {
    **SPACE,
    "num_envs": [4, 8],
    "minibatch_size": [64, 128],
    "learning_rate": [2e-4, 3e-4],
    "gamma": [0.99, 0.995],
    "gae_lambda": [0.9, 0.95],
    "clip_coef": [0.2],
    "clip_vloss": [True],
    "ent_coef": [0.0, 0.002],
    "max_grad_norm": [0.5],
    "log_std_init": [-0.5, -1.0, -1.5],
}

CLEANRL = {
    "num_envs": 1, "num_steps": 2048, "num_minibatches": 32, "update_epochs": 10,
    "learning_rate": 3e-4, "gamma": 0.99, "ent_coef": 0.0, "critic_size": 64, "activation": "tanh",
    "log_std_init": 0.0,
}  # fmt: skip
CHANGES = {  # of n7
    "c1": {"critic_size": 256},
    "c2": {"learning_rate": 3e-4},
    "c3": {"critic_size": 256, "hidden_size": 256},
    "c4": {"gae_lambda": 0.9},
    "c5": {"critic_size": 256, "learning_rate": 3e-4},
    "c6": {"num_steps": 256, "num_minibatches": 16},
    "c7": {"log_std_init": -1.5},
}
LONG = CLEANRL | {"num_envs": 4, "num_steps": 512, "critic_size": 256}
CHANGES |= {  # of c5
    name: CHANGES["c5"] | changes
    for name, changes in {
        "c8": {"activation": "tanh"},
        "c9": {"ent_coef": 0.0},
        "c10": {"log_std_init": -0.5},
        "c11": {"gamma": 0.99},
        "c12": {"update_epochs": 5},
        "c13": {"num_envs": 4, "num_steps": 256},
        "c14": {"num_envs": 4, "num_steps": 256, "gamma": 0.99},
        "c15": {"num_envs": 4, "num_steps": 256, "gamma": 0.99, "hidden_size": 128},
        "c16": {"num_envs": 4, "num_steps": 256, "gamma": 0.99, "gae_lambda": 0.92},
        "c17": {"num_envs": 4, "num_steps": 256, "gamma": 0.99, "clip_vloss": False},
        "c18": {"num_envs": 4, "num_steps": 256, "activation": "tanh"},
        "c19": {"num_envs": 4, "num_steps": 256, "gamma": 0.99, "activation": "tanh"},
        "c20": LONG,
        "c21": LONG | {"log_std_init": -1.0},
        "c22": LONG | {"log_std_init": -1.0, "activation": "relu"},
        "c23": {"gamma": 0.99, "num_minibatches": 16},
        "c24": {"gamma": 0.99, "num_minibatches": 16, "activation": "tanh"},
    }.items()
}


def sample_candidates(space, count, prefix=""):
    """{name: flags} of `count` random combinations of the values in `space`."""
    rng = np.random.default_rng(0)
    candidates = {}
    for i in range(1, count + 1):
        flags = {name: values[rng.integers(len(values))] for name, values in space.items()}
        batch_size, minibatch_size = flags.pop("batch_size"), flags.pop("minibatch_size")
        flags["num_steps"] = batch_size // flags["num_envs"]
        flags["num_minibatches"] = batch_size // minibatch_size
        flags["critic_size"] = flags["hidden_size"]
        candidates[f"{prefix}{i}"] = flags
    return candidates


def command_line(flags):
    """Flags as a list of words."""
    words = []
    for name, value in flags.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


def run(flags):
    """Trains once; returns the parts of summary.json that are kept."""
    with tempfile.TemporaryDirectory() as folder:
        folders = ["--runs-dir", folder, "--videos-dir", f"{folder}/videos"]
        command = [sys.executable, str(SCRIPT), *folders, *command_line(flags)]
        output = subprocess.run(command, capture_output=True, text=True)
        files = list(pathlib.Path(folder).glob("*/summary.json"))
        if not files:
            return {"error": output.stderr[-300:]}
        summary = json.loads(files[0].read_text())
    return {key: summary[key] for key in ("eval_return_mean", "eval_return_std", "wall_seconds")}


def scores(results, steps, tasks):
    """{candidate: score} of the candidates that have been trained for `steps` on all `tasks`."""
    table = {}
    for name in results["candidates"]:
        runs = [r for r in results["runs"] if (r["candidate"], r["steps"]) == (name, steps)]
        returns = {
            env_id: [r.get("eval_return_mean") or 0.0 for r in runs if r["env_id"] == env_id]
            for env_id in tasks
        }
        if all(returns.values()):
            table[name] = np.mean([np.mean(x) / REFERENCE[task] for task, x in returns.items()])
    return dict(sorted(table.items(), key=lambda item: -item[1]))


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("steps", type=int)
    parser.add_argument("--narrow", type=int, default=0, help="number of candidates of NARROW")
    parser.add_argument("--names", nargs="+", help="candidates to train")
    parser.add_argument("--tasks", nargs="+", default=list(REFERENCE), choices=list(REFERENCE))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    first = {"0": CLEANRL, **sample_candidates(SPACE, 23)}
    narrow = sample_candidates(NARROW, max(choice.narrow, 12), "n")
    changed = {name: narrow["n7"] | changes for name, changes in CHANGES.items()}
    candidates = {**first, **narrow, **changed}
    results = {"candidates": candidates, "runs": []}
    if choice.out.exists():
        results["runs"] = json.loads(choice.out.read_text())["runs"]
    for name in choice.names or list(narrow if choice.narrow else first):
        for seed in choice.seeds:
            for env_id in choice.tasks:
                key = {"candidate": name, "env_id": env_id, "seed": seed, "steps": choice.steps}
                if any(key.items() <= r.items() for r in results["runs"]):
                    continue
                flags = {"env_id": env_id, "seed": seed, "total_timesteps": choice.steps}
                result = run({**flags, "eval_episodes": 20, **candidates[name]})
                results["runs"].append({**key, **result})
                choice.out.write_text(json.dumps(results, indent=1) + "\n")
                print(key, result, flush=True)
    for name, score in scores(results, choice.steps, choice.tasks).items():
        print(f"candidate {name}: score {score:.3f}, {candidates[name]}")


if __name__ == "__main__":
    main()
