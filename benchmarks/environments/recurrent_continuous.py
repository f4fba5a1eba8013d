"""Recurrent PPO with continuous actions and hidden velocities, for environments in JAX.

    python benchmarks/environments/recurrent_continuous.py
    python benchmarks/environments/recurrent_continuous.py --env-id CartpoleSwingup --hide 3 4

The first command trains on Pendulum without its velocity. Other ids belong to MuJoCo Playground,
see playground_control.py. To use it elsewhere, copy it, ppo_minigrid_rnn.py and ppo_swingup_jax.py
into one folder and remove the line with sys.path.
"""

import dataclasses
import math
import pathlib
import sys
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_minigrid_rnn as ppo  # noqa: E402
from ppo_swingup_jax import Gaussian  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """Recurrent PPO with continuous actions."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Pendulum-v1"
    hide: tuple[int, ...] = (2,)
    """components of the observation that the agent does not see"""
    reward_scale: float = 0.1
    """factor of rewards in training; logged returns are unscaled"""
    log_std_init: float = 0.0
    """initial log standard deviation of actions"""
    eval_mode: Literal["greedy", "sampled"] = "greedy"
    total_timesteps: float = 1e6
    num_envs: int = 64
    num_steps: int = 64
    num_minibatches: int = 4
    update_epochs: int = 10
    learning_rate: float = 1e-3
    gamma: float = 0.95
    norm_adv: bool = True
    clip_vloss: bool = False
    ent_coef: float = 0.0
    rnn_hidden_dim: int = 64
    head_hidden_dim: int = 64


# --- Environments ---


class PendulumState(NamedTuple):
    """State of one pendulum; float32 scalars."""

    theta: jax.Array  # angle from upright, rad
    theta_dot: jax.Array  # rad/s


class Pendulum:
    """Gymnasium's Pendulum-v1: observations [3] are cosine and sine of the angle, and velocity."""

    action_size, max_episode_steps = 1, 200

    def reset(self, key):
        theta, theta_dot = jax.random.uniform(key, (2,), minval=-1.0)
        return PendulumState(math.pi * theta, theta_dot)

    def step(self, key, state, action):
        theta, theta_dot = state
        torque = jnp.clip(action[0], -2.0, 2.0)
        angle = (theta + math.pi) % (2 * math.pi) - math.pi
        cost = angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2
        theta_dot = jnp.clip(theta_dot + 0.05 * (15 * jnp.sin(theta) + 3 * torque), -8.0, 8.0)
        return PendulumState(theta + 0.05 * theta_dot, theta_dot), -cost, jnp.bool_(False)

    def observe(self, state):
        return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])


@dataclasses.dataclass(frozen=True)
class Partial:
    """An environment without some components of its observations."""

    env: Any
    hide: tuple

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "env"), name)

    def observe(self, state):
        return jnp.delete(self.env.observe(state), np.array(self.hide, int))


def make_env(args):
    """Pendulum or an environment of MuJoCo Playground, partially observable."""
    if args.env_id == "Pendulum-v1":
        return Partial(Pendulum(), args.hide)
    from playground_control import playground

    return Partial(playground(args.env_id), args.hide)


# --- Continuous actions ---


class Actor(nn.Module):
    """Gaussian actions [T, M, A] for features [F, M, T]."""

    args: Args
    action_size: int

    @nn.compact
    def __call__(self, x):
        mean = ppo.Dense(self.action_size, 0.01, name="mean")(x).transpose(2, 1, 0)
        init = nn.initializers.constant(self.args.log_std_init)
        log_std = self.param("log_std", init, (self.action_size,))
        return Gaussian(mean=mean, log_std=jnp.broadcast_to(log_std, mean.shape))


def action_dist(args, env, x):
    return Actor(args, env.action_size, name="actor")(x)


def embed_action(args, env, action, start):
    action = jnp.where(start[..., None], 0.0, action)  # [T, M, A]
    return ppo.Dense(args.action_emb_dim, 1.0, name="prev_action")(action.transpose(2, 1, 0))


def encode(args, env, obs):
    """Features [F, M, T] of observations [T, M, O]."""
    return jnp.tanh(ppo.Dense(64, math.sqrt(2), name="encoder")(obs.transpose(2, 1, 0)))


init_discrete, compute_gae = ppo.init_agent_state, ppo.compute_gae


def init_agent_state(args, num_envs):
    action = jnp.zeros((num_envs, make_env(args).action_size), jnp.float32)
    return init_discrete(args, num_envs)._replace(prev_action=action)


def compute_scaled_gae(args, reward, *inputs):
    return compute_gae(args, args.reward_scale * reward, *inputs)


if __name__ == "__main__":
    ppo.Args, ppo.make_env, ppo.encode = Args, make_env, encode
    ppo.action_dist, ppo.embed_action = action_dist, embed_action
    ppo.init_agent_state, ppo.compute_gae = init_agent_state, compute_scaled_gae
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
