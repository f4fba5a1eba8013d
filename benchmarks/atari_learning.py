"""Whether ppo_atari_envpool_xla_jax.py learns: random play, then training, on the same evaluation.

    python benchmarks/atari_learning.py                                  # Breakout, 500,000 steps: fits two CPU cores
    python benchmarks/atari_learning.py Pong-v5 --seeds 3 -- --total-timesteps 10000000   # flags for the script

Random play and the trained agents play whole games of the same emulators, without reward clipping or episodic life. The
result is benchmarks/results/atari_learning.json, one entry per game, with steps, seconds and the learning curve.
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

import jax
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ppo_atari_envpool_xla_jax as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "atari_learning.json"


def random_returns(env_id, episodes):
    """Returns of whole games of uniformly random actions, in the emulators of the evaluation."""
    args = script.Args(env_id=env_id, eval_episodes=episodes)
    envs = script.make_pool(args, script.env_seeds(args, args.eval_episodes, 1)[0])
    envs.reset()
    rng, returns, running = np.random.default_rng(0), np.zeros(episodes), np.ones(episodes, bool)
    while running.any():
        _, _, terminated, truncated, info = envs.step(rng.integers(envs.action_space.n, size=episodes, dtype=np.int32))
        returns += info["reward"] * running
        running &= ~(terminated | truncated)
    return returns


def train(env_id, seed, flags, folder):
    """Runs the script; returns its summary, whole seconds of the process, and the learning curve."""
    start = time.perf_counter()
    command = [sys.executable, str(ROOT / f"{script.SCRIPT}.py"), "--env-id", env_id, "--seed", str(seed), *flags]
    subprocess.run(command, cwd=folder, check=True)
    seconds = time.perf_counter() - start
    run = max(pathlib.Path(folder).glob(f"runs/{env_id}__*__{seed}__*"))
    events = EventAccumulator(str(run)).Reload().Scalars("charts/episodic_return")
    first = events[0].wall_time
    curve = [[event.step, round(event.wall_time - first, 1), event.value] for event in events]
    return json.loads((run / "summary.json").read_text()), seconds, curve[:: max(1, len(curve) // 100)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", default=["Breakout-v5"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/atari_learning", help="for the runs and videos")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    choice, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    # Sampled, because a young greedy policy may wait for ever for a ball that it never serves.
    flags = ["--total-timesteps", "500000", "--eval-mode", "sampled", "--eval-episodes", str(choice.episodes), *flags]
    pathlib.Path(choice.folder).mkdir(parents=True, exist_ok=True)
    results = json.loads(choice.out.read_text()) if choice.out.exists() else {}
    for game in choice.games:
        random_play, runs = random_returns(game, choice.episodes), []
        for seed in range(1, choice.seeds + 1):
            summary, seconds, curve = train(game, seed, flags, choice.folder)
            keys = "seed total_timesteps eval_mode eval_return_mean eval_return_std sps train_seconds".split()
            runs.append({key: summary[key] for key in keys} | {"process_seconds": seconds, "curve": curve})
            print(f"{game} seed {seed}: random {random_play.mean():.2f}, trained {summary['eval_return_mean']:.2f}")
        results[game] = {
            "command": "python benchmarks/atari_learning.py " + " ".join(sys.argv[1:]),
            "date": datetime.date.today().isoformat(),
            "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "random_return_mean": random_play.mean(),
            "random_return_std": random_play.std(),
            "curve": "steps, seconds since the first entry, mean of the last finished games",
            "runs": runs,
        }
        choice.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
