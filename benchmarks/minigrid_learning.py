"""What ppo_minigrid_rnn.py learns, id by id: success here and with the same weights in Farama's own environments.

    python benchmarks/minigrid_learning.py DoorKey-6x6 MemoryS9     # these ids; without any, all of RUNS
    python benchmarks/minigrid_learning.py --cut MemoryS13          # the same agent whose hidden state is always zero
    python benchmarks/minigrid_learning.py --img-obs Empty-8x8      # from pixels

Every id is trained by the script's `main` and evaluated over 1,024 episodes of its own; then Farama's environments play
as many, with actions from the same weights. Results go to benchmarks/results/minigrid_learning.json, one entry per run.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import sys
import tempfile

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from minigrid.wrappers import RGBImgPartialObsWrapper  # minigrid also registers the ids

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ppo_minigrid_rnn as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "minigrid_learning.json"
EPISODES = 1024
# Flags that differ from the script's defaults. Memory rewards half of the episodes from the start, so advantages can be
# normalised; what it needs is entropy, to look around before walking on.
MEMORY = dict(num_envs=256, num_steps=64, num_minibatches=8, gae_lambda=0.95, norm_adv=True, ent_coef=0.03)
RUNS = {
    "Empty-8x8": dict(),
    "Empty-16x16": dict(total_timesteps=400_000),
    "DoorKey-6x6": dict(total_timesteps=800_000),
    "DoorKey-8x8": dict(total_timesteps=4_000_000),
    "SimpleCrossingS9N1": dict(total_timesteps=600_000),
    "LavaGapS7": dict(total_timesteps=600_000),
    "Unlock": dict(total_timesteps=1_000_000),
    "UnlockPickup": dict(total_timesteps=6_000_000),
    "FourRooms": dict(total_timesteps=5_000_000),
    "MemoryS9": dict(MEMORY, total_timesteps=4_000_000),
    "MemoryS13": dict(MEMORY, total_timesteps=8_000_000),
}


def cut_recurrence():
    """Makes every hidden state start from zero: what is left of the memory are the previous action and reward."""
    gru = script.gru
    script.gru = lambda projected, recurrent, bias, hidden, start: gru(
        projected, recurrent, bias, jnp.zeros_like(hidden), jnp.ones_like(start)
    )


def farama_success(args, params, seed=0, side_by_side=128):
    """Share of EPISODES in Farama's environment that end with a positive reward."""
    env = script.make_env(args)
    blank = script.initial_memory(args, env, side_by_side)
    noise = np.random.default_rng(seed)

    @jax.jit
    def act(image, direction, memory, uniform):
        inputs = script.Inputs(image, direction, memory.action, memory.reward)
        inputs = jax.tree.map(lambda x: x[None], inputs)
        dist, _, hidden = (x[0] for x in script.forward(args, env, params, inputs, memory.hidden))
        sampled = args.eval_mode == "sampled"
        return script.sample_action(dist, uniform) if sampled else script.greedy_action(dist), hidden

    look = functools.partial(RGBImgPartialObsWrapper, tile_size=8) if args.img_obs else lambda game: game
    games, successes = [look(gymnasium.make(args.env_id)) for _ in range(side_by_side)], 0
    for batch in range(EPISODES // side_by_side):
        seeds = range(batch * side_by_side, (batch + 1) * side_by_side)
        observations = [game.reset(seed=seed + s)[0] for game, s in zip(games, seeds)]
        memory, running = blank, np.ones(side_by_side, bool)
        while running.any():
            image = np.stack([obs["image"] for obs in observations])
            direction = np.array([obs["direction"] for obs in observations], np.int32)
            action, hidden = act(image, direction, memory, noise.random(side_by_side, np.float32))
            rewards = np.zeros(side_by_side, np.float32)
            for i in np.flatnonzero(running):
                observations[i], rewards[i], terminated, truncated, _ = games[i].step(int(action[i]))
                running[i] = not (terminated or truncated)
            successes += (rewards > 0).sum()
            memory = script.Memory(hidden, action, jnp.asarray(rewards))
    return float(successes / EPISODES)


def run(env_id, cut, img_obs, seed, eval_mode, total_timesteps, folder):
    options = RUNS[env_id] | {"img_obs": img_obs}
    options |= {"total_timesteps": total_timesteps} if total_timesteps else {}
    flags = dict(
        env_id=env_id, seed=seed, eval_episodes=EPISODES, eval_mode=eval_mode, exp_name="cut" if cut else "gru"
    )
    args = script.Args(**flags, **options, runs_dir=f"{folder}/runs", videos_dir=f"{folder}/videos")
    script.main(args)
    run_dir = max(pathlib.Path(folder, "runs").glob(f"{args.env_id}__{args.exp_name}__{seed}__*"))
    args, state = script.load_run(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    names = (
        "total_timesteps train_seconds compile_seconds wall_seconds sps eval_mode eval_episodes success_rate".split()
    )
    result = {name: summary[name] for name in [*names, "eval_return_mean"]} | {"seed": seed}
    result["args"] = {k: v for k, v in vars(args).items() if k not in ("runs_dir", "videos_dir", "resume", "eval")}
    result["farama_success_rate"] = farama_success(args, jax.tree.map(lambda x: x[0], state.params))
    result |= {"date": datetime.date.today().isoformat(), "device": f"{summary['backend']}, {platform.machine()}"}
    return result | {"cpu_count": len(os.sched_getaffinity(0)), "jax": jax.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="environments, spelled as in RUNS; if none, all of these")
    parser.add_argument("--cut", action="store_true", help="train without recurrence")
    parser.add_argument("--img-obs", action="store_true", help="train from pixels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, help="instead of those in RUNS")
    parser.add_argument("--eval-mode", default="greedy", choices=script.EVAL_MODES)
    parser.add_argument(
        "--folder", default=f"{tempfile.gettempdir()}/minigrid_learning", help="for the runs and videos"
    )
    choice = parser.parse_args()
    if unknown := set(choice.ids) - set(RUNS):
        parser.error(f"{unknown} not among {list(RUNS)}")
    if choice.cut:
        cut_recurrence()
    for env_id in choice.ids or RUNS:
        options = choice.seed, choice.eval_mode, choice.total_timesteps, choice.folder
        result = run(env_id, choice.cut, choice.img_obs, *options)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        variant = " without recurrence" * choice.cut + " from pixels" * choice.img_obs
        variant += f" in {choice.total_timesteps} steps" if choice.total_timesteps else ""
        name = f"{env_id}{variant}, {choice.eval_mode}, seed {choice.seed}"
        RESULTS.write_text(json.dumps(results | {name: result}, indent=2) + "\n")
        print(f"{name}: {result['success_rate']:.3f}, in Farama's {result['farama_success_rate']:.3f}", flush=True)


if __name__ == "__main__":
    main()
