"""Is a learned task lost again? Ways to prevent it, on MiniGrid's ids, seed by seed.

    python benchmarks/minigrid_collapse.py LavaGapS7 --seeds 10      # all of VARIANTS
    python benchmarks/minigrid_collapse.py LavaGapS7 --variants "KL limit 0.1" "no KL limit"
    python benchmarks/minigrid_collapse.py DoorKey-8x8 --seeds 3 --total-timesteps 4000000

Where gradients are tiny for a long time, Adam's second moment follows them. Then one large gradient
moves every parameter by many learning rates. Each run keeps the training return of every update; it
counts those below 0.9 after 0.94 was first reached, and the steps to 0.9, and ends with the success
of 1,024 greedy episodes. Results go to benchmarks/results/minigrid_collapse.json after every run;
runs that stand there are not repeated.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import sys
import time

import jax
import numpy as np
import optax

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import minigrid_learning  # noqa: E402

import ppo_minigrid_rnn as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "minigrid_collapse.json"
SIZES = dict(num_steps=128, update_epochs=4)  # the script's defaults when all this was measured
VARIANTS = {  # flags of the script, and Adam's beta2
    "KL limit 0.02": dict(target_kl=0.02),
    "KL limit 0.05": dict(target_kl=0.05),
    "KL limit 0.1": dict(target_kl=0.1),
    "no KL limit": dict(target_kl=None),
    "beta2 0.95, no KL limit": dict(beta2=0.95, target_kl=None),
    "eps 1e-4, no KL limit": dict(adam_eps=1e-4, target_kl=None),
    "grad norm 0.05, no KL limit": dict(max_grad_norm=0.05, target_kl=None),
}


def make_optimizer(beta2, args):
    """The script's optimiser with this beta2."""
    return optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        optax.scale_by_adam(b2=beta2, eps=args.adam_eps),
    )


def run(env_id, variant, seeds, total_timesteps, episodes, save):
    """Trains each seed with a variant; calls `save(seed, row)` after each."""
    options = SIZES | minigrid_learning.RUNS[env_id] | VARIANTS[variant]
    options["total_timesteps"] = total_timesteps
    beta2 = options.pop("beta2", 0.999)
    script.make_optimizer = functools.partial(make_optimizer, beta2)
    args = script.Args(env_id=script.full_id(env_id), eval_episodes=episodes, **options)
    train = jax.jit(functools.partial(script.train, args))
    evaluate = jax.jit(functools.partial(script.evaluate, args))
    for seed in seeds:
        start = time.perf_counter()
        state, metrics = train(jax.random.key(seed))
        evaluation = evaluate(state.params, jax.random.key(2**31 + seed))
        returns = np.asarray(metrics["charts/episodic_return"])
        reached = np.flatnonzero(returns >= 0.94)
        above = np.flatnonzero(returns >= 0.9)
        row = {
            "success_rate": float((evaluation.episode_return > 0).mean()),
            "steps_to_0.9": int((above[0] + 1) * args.batch_size) if len(above) else None,
            "updates_lost": int((returns[reached[0] :] < 0.9).sum()) if len(reached) else None,
            "lowest_after": float(returns[reached[0] :].min()) if len(reached) else None,
            "returns": [round(float(x), 3) if np.isfinite(x) else None for x in returns],
            "seconds": time.perf_counter() - start,
            "args": {name: getattr(args, name) for name in options} | {"beta2": beta2},
            "date": datetime.date.today().isoformat(),
            "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
            "jax": jax.__version__,
        }
        save(seed, row)


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("ids", nargs="+", help="environments, as in minigrid_learning.RUNS")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--total-timesteps", type=int, default=1_000_000)
    parser.add_argument("--episodes", type=int, default=1024, help="of each evaluation")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()

    def read():
        return json.loads(choice.out.read_text()) if choice.out.exists() else {}

    for env_id in choice.ids:
        for variant in choice.variants:
            name = f"{env_id}, {variant}, {choice.total_timesteps} steps, seed "
            seeds = [seed for seed in range(1, choice.seeds + 1) if f"{name}{seed}" not in read()]

            def save(seed, row, name=name):
                choice.out.write_text(json.dumps(read() | {f"{name}{seed}": row}) + "\n")
                shown = {key: row[key] for key in ("success_rate", "updates_lost", "lowest_after")}
                print(f"{name}{seed}: {shown}, {row['seconds']:.0f} s", flush=True)

            run(env_id, variant, seeds, choice.total_timesteps, choice.episodes, save)


if __name__ == "__main__":
    main()
