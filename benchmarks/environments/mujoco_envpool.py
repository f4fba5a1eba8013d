"""Continuous control in Atari's script: MuJoCo, dm_control, MetaWorld and others that EnvPool has.

    python benchmarks/environments/mujoco_envpool.py --env-id HalfCheetah-v4 --seed 2
    python benchmarks/environments/mujoco_envpool.py --env-id CartpoleBalance-v1 --total-timesteps 2e5
    python benchmarks/environments/mujoco_envpool.py --eval runs/<run_name> --eval-episodes 100

The agent and the flags are those of CleanRL's ppo_continuous_action.py: a Gaussian whose deviations
do not depend on the observation, two networks of 64-64 tanh, running statistics that normalise
observations and scale rewards. Observations that are a Dict are joined, and where actions are
discrete, the distribution is. The statistics are among the parameters, so that a checkpoint has
them. `eval_return_mean` is of sampled actions and plain rewards.
"""

import dataclasses
import math
import pathlib
import sys
from typing import ClassVar

import envpool
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import ppo_atari_envpool_xla_jax as ppo  # noqa: E402
from ppo_swingup_jax import Gaussian, init_mlp, mlp  # noqa: E402


@dataclasses.dataclass
class PoolArgs(ppo.Args):
    """Without the flags of Atari, which are class attributes here and no longer fields."""

    eval_protocol: ClassVar = "training"
    max_episode_steps: ClassVar = 1
    repeat_action_probability: ClassVar = 0.0
    full_action_space: ClassVar = False


@dataclasses.dataclass
class Args(PoolArgs):
    """PPO on continuous control through EnvPool's XLA interface."""

    env_id: str = "HalfCheetah-v4"
    """environment, as EnvPool names it"""
    exp_name: str = pathlib.Path(__file__).stem
    total_timesteps: float = 1_000_000.0
    num_envs: int = 1
    num_steps: int = 2048
    num_minibatches: int = 32
    update_epochs: int = 10
    learning_rate: float = 3e-4
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.0


class Vectors:
    """An EnvPool environment with vector observations, in the place of `ppo.Atari`.

    Observations are joined. The memory is the discounted sum of rewards, which `learn` updates.
    """

    eval_setting = {}

    def __init__(self, args):
        self.args = args
        spec = ppo.make_spec(args.env_id)
        self.observation_space, self.action_space = spec.observation_space, spec.action_space

    def make_pool(self, seeds, evaluation=False, **options):
        """A pool with an environment for each of `seeds`."""
        options |= {"num_envs": len(seeds), "seed": seeds.tolist()}
        return envpool.make(self.args.env_id, env_type="gymnasium", **options)

    def start(self, obs, info):
        obs = joined(obs)
        return obs, jnp.zeros(len(obs))

    def read(self, memory, valid, outcome):
        obs, reward, terminated, truncated, _ = outcome
        ended = valid & (terminated | truncated)
        return (joined(obs), reward, terminated, truncated), reward, ended, memory

    def bounded(self, action):
        """Actions [N, ...], clipped to the bounds of their space, and of its dtype."""
        space = self.action_space
        if hasattr(space, "low"):
            action = action.clip(space.low, space.high).astype(space.dtype)
        return action


def joined(obs):
    """A tree of arrays [N, ...] as one array [N, O]."""
    return jnp.concatenate([x.reshape(len(x), -1) for x in jax.tree.leaves(obs)], axis=1)


def init_agent(args, key, env):
    """Parameters of the networks, and the statistics."""
    obs = jax.tree.map(lambda x: np.zeros_like(x)[None], env.observation_space.sample())
    obs_size, space = joined(obs).shape[1], env.action_space
    discrete = not str(space.dtype).startswith("float")
    if discrete and (space.shape or getattr(space, "start", 1) > 0):
        raise ppo.UserError(f"actions are Discrete, from 0, or a Box of floats here, not {space}")
    action_size = int(space.n) if discrete else math.prod(space.shape)
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": init_mlp(actor_key, (obs_size, 64, 64, action_size), head_gain=0.01),
        "critic": init_mlp(critic_key, (obs_size, 64, 64, 1), head_gain=1.0),
        "log_std": None if discrete else jnp.zeros(action_size),
        "obs": {"count": jnp.zeros(()), "mean": jnp.zeros(obs_size), "var": jnp.ones(obs_size)},
        "returns": {"count": jnp.zeros(()), "mean": jnp.zeros(()), "var": jnp.ones(())},
    }


def forward(args, params, obs):
    """The policy's distribution and the values [M] of observations [M, O]."""
    seen = jax.lax.stop_gradient(params["obs"])
    x = (obs - seen["mean"]) / jnp.sqrt(seen["var"] + 1e-8)
    x = jnp.clip(x, -10.0, 10.0).T  # [O, M], see `mlp`
    head, value = mlp(params["actor"], x).T, mlp(params["critic"], x)[0]  # [M, A], [M]
    if params["log_std"] is None:
        return ppo.Categorical(logits=head), value
    return Gaussian(mean=head, log_std=jnp.broadcast_to(params["log_std"], head.shape)), value


def updated(old, x, valid):
    """Statistics of all that came before and of x [T, N, ...] where `valid` [T, N]."""
    where = jnp.expand_dims(valid, range(2, x.ndim))
    mean, var = x.mean((0, 1), where=where), x.var((0, 1), where=where)
    count = old["count"] + valid.sum()
    share = valid.sum() / count  # of the new ones among all
    change = mean - old["mean"]
    return {
        "count": count,
        "mean": old["mean"] + share * change,
        "var": (1 - share) * (old["var"] + share * change**2) + share * var,
    }


plain_learn = ppo.learn


def learn(args, state, trajectory):
    """Rewards are divided by the deviation of their discounted sums before all else.

    The statistics of observations change after it: ratios compare policies that see the same.
    """
    params, valid = state.params, trajectory.valid
    done = trajectory.terminated | trajectory.truncated

    def add(total, step):
        reward, valid, done = step
        total = jnp.where(valid, args.gamma * total + reward, total)
        return jnp.where(done, 0.0, total), total

    steps = trajectory.reward, valid, done
    total, totals = jax.lax.scan(add, state.env_state.memory, steps)
    returns = updated(params["returns"], totals, valid)
    reward = jnp.clip(trajectory.reward / jnp.sqrt(returns["var"] + 1e-8), -10.0, 10.0)
    state = state._replace(env_state=state.env_state._replace(memory=total))
    state, metrics = plain_learn(args, state, trajectory._replace(reward=reward))
    statistics = {"obs": updated(params["obs"], trajectory.obs, valid), "returns": returns}
    return state._replace(params=state.params | statistics), metrics


def main(words=None, args=Args, world=Vectors, agent=(init_agent, forward, learn)):
    """Atari's `main` with these parts in the place of its own."""
    ppo.Args, ppo.make_env = args, world
    ppo.init_agent, ppo.forward, ppo.learn = agent
    try:
        ppo.main(words)
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
