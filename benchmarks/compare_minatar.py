"""Compares gymnax_minatar.py with PureJaxRL on gymnax's MinAtar: returns and speed at equal steps.

    python benchmarks/compare_minatar.py --purejaxrl FOLDER
    python benchmarks/compare_minatar.py --purejaxrl FOLDER --games Breakout --out FILE

`--purejaxrl` is a clone of https://github.com/luchris429/purejaxrl, which requires distrax, brax
and navix. Hyperparameters are those of its MinAtar notebook, examples/brax_minatar.ipynb, except
for the length. Every run is a process, and the two sides alternate. Results are written to
benchmarks/results/minatar.json after every process.

- return: mean of the last training episode of 64 environments, at each tenth of the steps
- SPS: training steps per second, without compilation
- time limit: 1,000 steps (Freeway 2,500); PureJaxRL treats it as a termination
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "minatar.json"
GAMES = "Breakout Freeway SpaceInvaders Asterix".split()
TAG = "charts/episodic_return"


def purejaxrl_worker(folder, game, seed, steps):
    """Runs PureJaxRL's `ppo.py` and prints {"curve": [[steps, return]], "sps": number}."""
    sys.path[:0] = [str(folder), str(folder / "purejaxrl")]
    import jax
    import ppo

    config = dict(
        LR=5e-3, NUM_ENVS=64, NUM_STEPS=128, TOTAL_TIMESTEPS=steps, UPDATE_EPOCHS=4,
        NUM_MINIBATCHES=8, GAMMA=0.99, GAE_LAMBDA=0.95, CLIP_EPS=0.2, ENT_COEF=0.01, VF_COEF=0.5,
        MAX_GRAD_NORM=0.5, ACTIVATION="relu", ENV_NAME=f"{game}-MinAtar", ANNEAL_LR=True,
        DEBUG=False,
    )  # fmt: skip
    key, batch = jax.random.PRNGKey(seed), 64 * 128
    train = jax.jit(ppo.make_train(config)).lower(key).compile()
    start = time.perf_counter()
    metrics = jax.block_until_ready(train(key))["metrics"]
    seconds = time.perf_counter() - start
    returns = metrics["returned_episode_returns"][:, -1].mean(-1)  # [U]
    curve = [[(update + 1) * batch, float(x)] for update, x in enumerate(returns)]
    print(json.dumps({"curve": curve, "sps": len(curve) * batch / seconds}))


def run_purejaxrl(choice, game, seed, folder):
    words = ["--worker", "--purejaxrl", str(choice.purejaxrl.resolve()), "--games", game]
    words += ["--seeds", str(seed), "--steps", str(choice.steps)]
    command = [sys.executable, __file__, *words]
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def run_ours(choice, game, seed, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = ROOT / "benchmarks" / "environments" / "gymnax_minatar.py"
    words = ["--env-id", f"{game}-MinAtar", "--seed", str(seed)]
    words += ["--total-timesteps", str(choice.steps)]
    command = [sys.executable, str(path), *words]
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    (run_dir,) = pathlib.Path(folder, "runs").glob("*")
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    summary = json.loads((run_dir / "summary.json").read_text())
    curve = [[event.step, event.value] for event in events.Scalars(TAG)]
    return {
        "curve": curve,
        "sps": summary["sps"],
        "eval_return_mean": summary["eval_return_mean"],
        "eval_mode": summary["eval_mode"],
    }


def tenths(curve, steps):
    """Returns the first point of a curve at or after each tenth of the steps."""
    wanted = [next((p for p in curve if p[0] >= i * steps / 10), curve[-1]) for i in range(1, 11)]
    return [[step, round(value, 3)] for step, value in wanted]


def summarize(rows):
    """Returns {"game, side": mean final return and median speed over seeds}."""
    groups = {}
    for row in rows:
        groups.setdefault(f"{row['game']}, {row['program']}", []).append(row)
    return {
        name: {
            "returns": [row["curve"][-1][1] for row in group],
            "return_mean": round(statistics.mean(row["curve"][-1][1] for row in group), 2),
            "sps_median": round(statistics.median(row["sps"] for row in group)),
        }
        for name, group in groups.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--purejaxrl", type=pathlib.Path, required=True, help="clone of PureJaxRL")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=GAMES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=float, default=1e6, help="environment steps per run")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.worker:
        return purejaxrl_worker(choice.purejaxrl, choice.games[0], choice.seeds[0], choice.steps)

    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    clone = subprocess.run(git, cwd=choice.purejaxrl, capture_output=True, text=True).stdout.strip()
    names = "jax gymnax flax optax distrax numpy".split()
    versions = {name: importlib.metadata.version(name) for name in names}
    result = {
        "command": "python benchmarks/compare_minatar.py --purejaxrl FOLDER",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "purejaxrl_commit": clone,
        "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"python": platform.python_version()} | versions,
        "steps": choice.steps,
        "summary": {},
        "rows": [],
    }
    for game in choice.games:
        for seed in choice.seeds:
            for program, run in (("ours", run_ours), ("PureJaxRL", run_purejaxrl)):
                with tempfile.TemporaryDirectory() as folder:
                    row = run(choice, game, seed, folder)
                row["curve"] = tenths(row["curve"], choice.steps)
                result["rows"].append({"game": game, "program": program, "seed": seed} | row)
                result["summary"] = summarize(result["rows"])
                choice.out.write_text(json.dumps(result, indent=1) + "\n")
                final = row["curve"][-1][1]
                print(f"{game} {program} {seed}: {final:.2f}, {row['sps']:,.0f} SPS", flush=True)


if __name__ == "__main__":
    main()
