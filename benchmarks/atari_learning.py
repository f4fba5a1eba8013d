"""Whether ppo_atari_envpool_xla_jax.py learns: random play, then training, on the same evaluation.

    python benchmarks/atari_learning.py  # Breakout, 500,000 steps: fits two CPU cores
    python benchmarks/atari_learning.py Pong-v5 --seeds 3 -- --total-timesteps 10000000

Flags after `--` go to the script. Random play and the trained agents play the same emulators under
the same protocol, by default CleanRL's (`--eval-protocol training`). The result is
benchmarks/results/atari_learning.json, one entry per game, with steps, seconds, human-normalised
scores (`atari_curves.py`) and the learning curve.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

import numpy as np
from atari_curves import human_normalized, read_curve

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ppo_atari_envpool_xla_jax as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "atari_learning.json"


def random_returns(words):
    """Returns of games of uniformly random actions, in the emulators of the evaluation."""
    args = script.parse_args(words)
    rng, num_actions = np.random.default_rng(0), script.make_env(args).action_space.n

    def act(params, obs, step):
        return rng.integers(num_actions, size=obs.shape[:2], dtype=np.int32)

    return script.evaluate(args, act, None).episode_return


def train(game, seed, words, folder):
    """Runs the script; returns its summary, seconds of the whole process, and the curve."""
    start = time.perf_counter()
    command = [sys.executable, script.__file__, *words]
    command += ["--env-id", game, "--seed", str(seed)]
    subprocess.run(command, cwd=folder, check=True)
    seconds = time.perf_counter() - start
    run = max(pathlib.Path(folder).glob(f"runs/{game}__*__{seed}__*"))  # the latest
    summary = json.loads((run / "summary.json").read_text())
    curve, _ = read_curve(run)
    curve = [[step, round(3600 * hours, 1), value] for step, hours, value in curve]
    return summary, seconds, curve[:: max(1, len(curve) // 100)]


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("games", nargs="*", default=["Breakout-v5"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    folder = f"{tempfile.gettempdir()}/atari_learning"
    parser.add_argument("--folder", default=folder, help="for the runs and videos")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    choice, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    # Sampled, because a young greedy policy may wait for ever for a ball that it never serves.
    words = ["--total-timesteps=500000", "--eval-mode=sampled"]
    words += [f"--eval-episodes={choice.episodes}", *flags]
    pathlib.Path(choice.folder).mkdir(parents=True, exist_ok=True)
    results = json.loads(choice.out.read_text()) if choice.out.exists() else {}
    keys = "total_timesteps eval_mode eval_protocol eval_return_mean eval_return_std sps"
    keys = [*keys.split(), "train_seconds"]
    for game in choice.games:
        random_play, runs = random_returns([*words, "--env-id", game]), []
        for seed in range(1, choice.seeds + 1):
            summary, seconds, curve = train(game, seed, words, choice.folder)
            run = {"seed": seed} | {key: summary[key] for key in keys}
            run["human_normalized_score"] = human_normalized(game, summary["eval_return_mean"])
            runs.append(run | {"process_seconds": seconds, "curve": curve})
            scores = random_play.mean(), summary["eval_return_mean"]
            print(f"{game} seed {seed}: random {scores[0]:.2f}, trained {scores[1]:.2f}")
        cores = len(os.sched_getaffinity(0))
        results[game] = {
            "command": "python benchmarks/atari_learning.py " + " ".join(sys.argv[1:]),
            "date": datetime.date.today().isoformat(),
            "device": f"{summary['device']}, {platform.machine()}, {cores} cores",
            "versions": {"python": platform.python_version(), "jax": summary["jax_version"]},
            "random_return_mean": random_play.mean(),
            "random_return_std": random_play.std(),
            "random_human_normalized_score": human_normalized(game, random_play.mean()),
            "curve": "steps, seconds of training, mean of the last finished games",
            "runs": runs,
        }
        choice.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
