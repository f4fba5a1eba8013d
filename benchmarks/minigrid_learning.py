"""Trains ppo_minigrid_rnn.py on MiniGrid ids; evaluates it here and in Farama's environments.

    python benchmarks/minigrid_learning.py DoorKey-6x6 MemoryS9  # default: all RUNS
    python benchmarks/minigrid_learning.py --cut MemoryS13  # without recurrence
    python benchmarks/minigrid_learning.py --no-bonus MultiRoom-N4-S5-v1  # without the bonus
    python benchmarks/minigrid_learning.py --img-obs Empty-8x8  # from pixels
    python benchmarks/minigrid_learning.py FourRooms --out FILE -- --learning-rate 5e-4

Flags after `--` go to the script. Each run is evaluated over 1,024 episodes in our environment and
over as many in Farama's, with the same weights. Results are written to
benchmarks/results/minigrid_learning.json, one entry per run.

MemoryS7-NoCue is Farama's MemoryS7 without the cue: the agent must try both ends of the junction.
It is evaluated over 1,024 trials of four episodes on the same level.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
import time

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import minigrid_count_bonus
import numpy as np
from minigrid.envs import MemoryEnv  # minigrid also registers the ids
from minigrid.wrappers import RGBImgPartialObsWrapper
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ppo_minigrid_rnn as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "minigrid_learning.json"
# Flags that differ from the script's defaults. Memory: half of the episodes succeed from the start,
# so advantages can be normalized. A high entropy makes the agent look around first.
MEMORY = dict(
    num_envs=256, num_minibatches=8, update_epochs=4, gae_lambda=0.95, norm_adv=True, ent_coef=0.03
)
# Random play succeeds once in thousands of episodes: larger batches and more epochs.
RARE = dict(num_steps=128, update_epochs=4)
# Random play succeeds in a few percent of the episodes; the agent learns which object the mission
# names. Advantages can be normalized, and entropy keeps exploring all answers.
MISSION = dict(norm_adv=True, ent_coef=0.01)
# The same for millions of steps: larger batches, two epochs.
LONG_MISSION = dict(MISSION, num_envs=256, num_minibatches=8, update_epochs=2, gae_lambda=0.95)
# Random play hardly ever succeeds: with the exploration bonus of minigrid_count_bonus.py.
EXPLORE = dict(
    num_envs=1024,
    num_minibatches=8,
    update_epochs=2,
    gamma=0.99,
    gae_lambda=0.95,
    norm_adv=True,
    ent_coef=0.01,
    int_coef=0.05,
)
RUNS = {
    "Empty-8x8": dict(),
    "Empty-16x16": dict(total_timesteps=800_000),
    "DoorKey-6x6": dict(total_timesteps=800_000),
    "DoorKey-8x8": dict(total_timesteps=2_500_000),
    "SimpleCrossingS9N1": dict(total_timesteps=1_000_000),
    "LavaGapS7": dict(total_timesteps=1_000_000),
    "Unlock": dict(total_timesteps=1_000_000),
    "UnlockPickup": dict(RARE, total_timesteps=6_000_000),
    "FourRooms": dict(LONG_MISSION, total_timesteps=10_000_000),
    "RedBlueDoors-6x6": dict(total_timesteps=2_000_000),
    # A collision costs 1. With less entropy the agent learns to stand still.
    "Dynamic-Obstacles-8x8": dict(MEMORY, total_timesteps=2_000_000),
    "MultiRoom-N2-S4": dict(total_timesteps=1_000_000),
    "KeyCorridorS3R1": dict(total_timesteps=2_000_000),
    "MemoryS9": dict(MEMORY, total_timesteps=4_000_000),
    "MemoryS13": dict(MEMORY, total_timesteps=8_000_000),
    "MultiRoom-N4-S5-v1": dict(EXPLORE, total_timesteps=3_000_000),
    "ObstructedMaze-1Dlh": dict(EXPLORE, total_timesteps=6_000_000),
    "KeyCorridorS4R3": dict(EXPLORE, total_timesteps=8_000_000),
    "Fetch-5x5-N2": dict(MISSION, total_timesteps=1_200_000),
    "GoToDoor-5x5": dict(MISSION, total_timesteps=800_000),
    "GoToObject-6x6-N2": dict(MISSION, total_timesteps=2_000_000),
    "PutNear-6x6-N2": dict(LONG_MISSION, total_timesteps=8_000_000),
    # With MEMORY's entropy the agent learns nothing in a million steps.
    "MemoryS7-NoCue": dict(MEMORY, total_timesteps=1_500_000, episodes_per_trial=4, ent_coef=0.003),
}


def level_without_cue(env, draw):
    """Returns a level of a memory environment without the object in the start room."""
    level = script.memory_level(env, draw)
    cue = (env.height // 2 - 1) * env.width + 1
    return level._replace(grid=script.put(level.grid, cue, script.EMPTY))


class MemoryWithoutCue(MemoryEnv):
    """Farama's memory environment, without the object in the start room."""

    def _gen_grid(self, width, height):
        super()._gen_grid(width, height)
        self.grid.set(1, height // 2 - 1, None)


NO_CUE = dataclasses.replace(
    script.find_env("MemoryS7"), env_id="MiniGrid-MemoryS7-NoCue-v0", level=level_without_cue
)
script.ENVIRONMENTS[NO_CUE.env_id] = NO_CUE
gymnasium.register(NO_CUE.env_id, MemoryWithoutCue, kwargs={"size": NO_CUE.width})


class ForgetfulGRU(script.GRU):
    """A GRU whose hidden state is reset at every step."""

    @nn.compact
    def __call__(self, x, h, start):
        return super().__call__(x, jnp.zeros_like(h), jnp.ones_like(start))


def cut_recurrence():
    """Sets hidden states to zero; the agent still observes the previous action and reward."""
    script.GRU = ForgetfulGRU


def words_of(options):
    """Returns command-line arguments for {flag: value}."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={value}")
    return words


def mission_numbers(env, sentence):
    """Returns the variable words of Farama's sentence, encoded as in `env.observe`."""
    words = re.fullmatch(env.sentence.replace("{}", "(.+)"), sentence).groups()
    return [script.WORDS.index(word) for word in words]


def farama_success(args, params, episodes):
    """Returns success rates [C] in Farama's environment, one per episode of a trial.

    `episodes` counts trials of C = `args.episodes_per_trial` episodes. The episodes of a trial are
    resets with the same seed. A success is an episode with a positive final reward.
    """
    env = script.make_env(args)
    side_by_side = min(128, episodes)
    blank = script.init_agent_state(args, side_by_side)

    @jax.jit
    def act(obs, agent_state, key):
        inputs = script.Inputs(
            obs=obs,
            prev_action=agent_state.prev_action,
            prev_reward=agent_state.prev_reward,
            start=agent_state.start,
        )
        dist, _, rnn_state = script.forward_step(args, params, inputs, agent_state.rnn_state)
        action = dist.sample(key) if args.eval_mode == "sampled" else dist.mode()
        return action, rnn_state

    def make_game():
        game = gymnasium.make(env.env_id)
        return RGBImgPartialObsWrapper(game, tile_size=8) if args.img_obs else game

    games, key = [make_game() for _ in range(side_by_side)], jax.random.key(0)
    successes, played = np.zeros(args.episodes_per_trial), 0
    while played < episodes:
        is_counted = played + np.arange(side_by_side) < episodes
        agent_state = blank
        for episode in range(args.episodes_per_trial):
            running, is_first_step = is_counted.copy(), True
            observations = [game.reset(seed=played + i)[0] for i, game in enumerate(games)]
            while running.any():
                obs = {
                    "image": np.stack([obs["image"] for obs in observations]),
                    "direction": np.array([obs["direction"] for obs in observations], np.int32),
                }
                if args.episodes_per_trial > 1:
                    obs["restarted"] = np.full(side_by_side, is_first_step and episode > 0)
                is_first_step = False
                if env.observes_mission:
                    missions = [mission_numbers(env, obs["mission"]) for obs in observations]
                    obs["mission"] = np.array(missions, np.int32)
                key, action_key = jax.random.split(key)
                action, rnn_state = act(obs, agent_state, action_key)
                rewards, chosen = np.zeros(side_by_side, np.float32), np.asarray(action)
                plays = running.copy()
                for i in np.flatnonzero(plays):
                    outcome = games[i].step(int(chosen[i]))
                    observations[i], rewards[i], terminated, truncated, _ = outcome
                    running[i] = not (terminated or truncated)
                successes[episode] += (rewards > 0).sum()
                now = script.agent_state_after(rnn_state, action, rewards)
                agent_state = script.select(plays, now, agent_state)
        played += side_by_side
    return successes / episodes


def steps_to(threshold, run_dir, first):
    """Returns the step at which the logged training return first reaches the threshold, or None.

    Points before step `first` are ignored, because only short episodes have ended by then.
    """
    name, log = "charts/episodic_return", EventAccumulator(str(run_dir)).Reload()
    events = log.Scalars(name) if name in log.Tags()["scalars"] else []  # no finished episode
    reached = (event.step for event in events if event.value >= threshold)
    return next((step for step in reached if step >= first), None)


def run(env_id, options, choice, flags=()):
    """Trains on an id and evaluates; returns the result entry."""
    has_bonus = "int_coef" in options
    with minigrid_count_bonus.installed() if has_bonus else contextlib.nullcontext():
        return train_and_evaluate(env_id, options, choice, flags)


def train_and_evaluate(env_id, options, choice, flags):
    """The same as `run`, after the bonus was installed."""
    options = options | {
        "env_id": env_id,
        "seed": choice.seed,
        "eval_episodes": choice.episodes,
        "eval_mode": choice.eval_mode,
        "exp_name": "cut" if choice.cut else "gru",
        "img_obs": choice.img_obs,
        "runs_dir": f"{choice.folder}/runs",
        "videos_dir": f"{choice.folder}/videos",
    }
    start = time.perf_counter()
    script.main([*words_of(options), *flags])
    seconds = time.perf_counter() - start
    name = f"{script.full_id(env_id)}__{options['exp_name']}__{choice.seed}__*"
    run_dir = max(pathlib.Path(choice.folder, "runs").glob(name))  # the latest

    summary = json.loads((run_dir / "summary.json").read_text())
    names = "total_timesteps train_seconds compile_seconds sps eval_mode eval_episodes"
    result = {name: summary[name] for name in [*names.split(), "eval_return_mean"]}
    result["success_rate"] = summary["eval_success_rate"]
    episodes = summary["args"]["episodes_per_trial"]  # a trial's return is a sum
    args, params = script.load_run(run_dir)
    first = args.num_envs * script.make_env(args).max_episode_steps
    result["steps_to_0.9"] = steps_to(0.9 * episodes, run_dir, first)
    result["seed"] = choice.seed
    result["wall_seconds"] = seconds
    paths = ("runs_dir", "videos_dir", "resume", "eval")
    result["args"] = {name: x for name, x in summary["args"].items() if name not in paths}
    if args.episodes_per_trial > 1:
        episodes = range(1, args.episodes_per_trial + 1)
        result["trial_success_rates"] = [summary[f"eval_success_rate_{c}"] for c in episodes]
        result["success_rate"] = np.mean(result["trial_success_rates"])  # over episodes
    params = jax.tree.map(lambda x: x[0], params)
    farama = farama_success(args, params, choice.episodes)
    result["farama_success_rate"] = farama.mean()
    if args.episodes_per_trial > 1:
        result["farama_trial_success_rates"] = farama.tolist()
    result["date"] = datetime.date.today().isoformat()
    result["device"] = f"{summary['device']}, {platform.machine()}"
    return result | {"cpu_count": len(os.sched_getaffinity(0)), "jax": summary["jax_version"]}


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("ids", nargs="*", help="keys of RUNS; default: all")
    parser.add_argument("--cut", action="store_true", help="train without recurrence")
    parser.add_argument("--no-bonus", action="store_true", help="train without the bonus")
    parser.add_argument("--img-obs", action="store_true", help="train from pixels")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, help="default: as in RUNS")
    parser.add_argument("--eval-mode", default="greedy", choices=["greedy", "sampled"])
    parser.add_argument("--episodes", type=int, default=1024, help="episodes per evaluation")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    folder = f"{tempfile.gettempdir()}/minigrid_learning"
    parser.add_argument("--folder", default=folder, help="folder for runs and videos")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    choice, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    if unknown := set(choice.ids) - set(RUNS):
        parser.error(f"unknown ids {unknown}; choose from {list(RUNS)}")
    if flags and choice.out == RESULTS:
        parser.error("script flags require --out: the default file is for RUNS")
    jax.config.update("jax_enable_compilation_cache", False)  # for `compile_seconds`
    if choice.cut:
        cut_recurrence()
    for env_id in choice.ids or RUNS:
        options = dict(RUNS[env_id])
        if choice.no_bonus:
            options.pop("int_coef", None)
        if choice.total_timesteps:
            options["total_timesteps"] = choice.total_timesteps
        result = run(env_id, options, choice, flags)
        results = json.loads(choice.out.read_text()) if choice.out.exists() else {}
        variant = " without recurrence" * choice.cut + " without the bonus" * choice.no_bonus
        variant += " from pixels" * choice.img_obs
        variant += f" in {choice.total_timesteps} steps" if choice.total_timesteps else ""
        name = f"{env_id}{variant}, {choice.eval_mode}, seed {choice.seed}"
        choice.out.write_text(json.dumps(results | {name: result}, indent=2) + "\n")
        print(f"{name}:")
        for key, value in result.items():
            if "success_rate" in key or key == "eval_return_mean":
                print(f"    {key}: {np.round(value, 3)}", flush=True)


if __name__ == "__main__":
    main()
