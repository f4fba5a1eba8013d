"""Craftax Classic in the recurrent script: `encode` is all that a GRU agent needs beside the world.

    python benchmarks/worlds/craftax_classic_rnn.py --seed 2
    python benchmarks/worlds/craftax_classic_rnn.py --eval runs/<run_name>

Needs `pip install craftax`. The return is the number of achievements, of 22, and a tenth of what
health changes by. To use it elsewhere, copy it beside ppo_minigrid_rnn.py and leave out the line
with sys.path.
"""

import dataclasses
import functools
import math
import pathlib
import sys
from typing import Literal

import flax.linen as nn
import jax
from craftax.craftax_env import make_craftax_env_from_name

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_minigrid_rnn as ppo  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Args(ppo.Args):
    """Recurrent PPO on Craftax Classic."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Craftax-Classic-Symbolic-v1"
    eval_mode: Literal["greedy", "sampled"] = "sampled"  # greedy play gets stuck
    rnn_hidden_dim: int = 128
    head_hidden_dim: int = 128
    total_timesteps: float = 1e6
    learning_rate: float = 5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.8
    num_minibatches: int = 8
    update_epochs: int = 4
    norm_adv: bool = True
    ent_coef: float = 0.01


class Craftax:
    """An environment of Craftax, without its own reset and time limit."""

    starts_per_update = 64

    def __init__(self, env_id):
        with jax.ensure_compile_time_eval():  # `make_env` is called while a program is traced
            self.env = make_craftax_env_from_name(env_id, auto_reset=False)
        self.num_actions = self.env.num_actions
        self.max_episode_steps = self.env.default_params.max_timesteps
        # `rollout` keeps the time limit, as it tells a truncation from a termination.
        self.params = self.env.default_params.replace(max_timesteps=2**30)

    def reset(self, key):
        return self.env.reset_env(key, self.params)[1]

    def step(self, key, state, action):
        _, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        return state, reward, terminated

    def observe(self, state):
        return self.env.get_obs(state)


def encode(args, env, obs):
    """Features [F, M, T] of observations [T, M, 1345]."""
    return nn.relu(ppo.Dense(256, math.sqrt(2), name="encoder")(obs.transpose(2, 1, 0)))


@functools.cache  # it loads textures
def craftax(env_id):
    return Craftax(env_id)


if __name__ == "__main__":
    ppo.Args, ppo.encode, ppo.make_env = Args, encode, lambda args: craftax(args.env_id)
    try:
        ppo.main()
    except ppo.Problem as problem:
        sys.exit(f"error: {problem}")
