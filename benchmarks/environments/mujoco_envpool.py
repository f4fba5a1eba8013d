r"""Continuous control in Atari's script: MuJoCo, dm_control, MetaWorld and others that EnvPool has.

    python benchmarks/environments/mujoco_envpool.py --env-id HalfCheetah-v4 --seed 2
    python benchmarks/environments/mujoco_envpool.py --env-id CartpoleBalance-v1
    python benchmarks/environments/mujoco_envpool.py --eval runs/<run_name> --eval-episodes 100

The agent is that of CleanRL's ppo_continuous_action.py: a Gaussian policy whose standard deviations
do not depend on the observation, two networks with two hidden layers, and running statistics that
normalize observations and scale rewards. benchmarks/mujoco_search.py found the default flags. These
are CleanRL's:

    python benchmarks/environments/mujoco_envpool.py --num-envs 1 --num-steps 2048 --gamma 0.99 \
        --num-minibatches 32 --ent-coef 0 --critic-size 64 --activation tanh --log-std-init 0

The parts of a Dict observation are concatenated, discrete ones as one-hot vectors. Discrete actions
have a categorical policy. The statistics are part of the parameters, so a checkpoint contains them.
`eval_return_mean` is the return of sampled actions, with unscaled rewards.
"""

import dataclasses
import math
import pathlib
import sys
from typing import ClassVar, Literal

import envpool
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import ppo_atari_envpool_xla_jax as ppo  # noqa: E402
from ppo_swingup_jax import Gaussian, init_mlp  # noqa: E402


@dataclasses.dataclass
class PoolArgs(ppo.Args):
    """Flags without those of Atari, which become class attributes."""

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
    num_envs: int = 8
    num_steps: int = 128
    num_minibatches: int = 8
    update_epochs: int = 10
    learning_rate: float = 3e-4
    gamma: float = 0.995
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.002
    hidden_size: int = 64
    """units of each of the two hidden layers of the actor"""
    critic_size: int = 256
    """units of each of the two hidden layers of the critic"""
    activation: Literal["tanh", "relu"] = "relu"
    """activation function of the hidden layers"""
    log_std_init: float = -1.0
    """initial log standard deviation of continuous actions"""
    reward_clip: float = 10.0
    """maximum absolute value of the scaled rewards"""


class Vectors:
    """An EnvPool environment with vector observations, replaces `ppo.Atari`.

    The memory is the discounted sum of rewards, which `learn` updates.
    """

    eval_setting = {}
    spec_options = {}

    def __init__(self, args):
        """Raises `UserError` for an unknown id, and for a game of several players."""
        self.args = args
        spec = ppo.make_spec(args.env_id, **self.spec_options)
        if spec.config.max_num_players > 1:
            raise ppo.UserError(f"--env-id {args.env_id} has several players, not one")
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        # By default, EnvPool's Humanoid-v4 lacks the contact forces that Gymnasium's observes.
        has_forces = hasattr(spec.config, "post_constraint")
        self.pool_options = {"post_constraint": True} if has_forces else {}

    def make_pool(self, seeds, evaluation=False, **options):
        """A pool with an environment for each of `seeds`."""
        options |= self.pool_options | {"num_envs": len(seeds), "seed": seeds.tolist()}
        return envpool.make(self.args.env_id, env_type="gymnasium", **options)

    def start(self, obs, info):
        obs = flatten(self.observation_space, obs)
        return obs, jnp.zeros(len(obs))

    def read(self, memory, valid, outcome):
        obs, reward, terminated, truncated, _ = outcome
        obs, ended = flatten(self.observation_space, obs), valid & (terminated | truncated)
        return (obs, reward, terminated, truncated), reward, ended, memory

    def bounded(self, action):
        """Actions [N, A] in the shape [N, ...] of the space, clipped or counted from its start."""
        space = self.action_space
        action = action.reshape(len(action), *space.shape)
        if isinstance(space, spaces.Box):
            return action.astype(space.dtype).clip(space.low, space.high)
        return (action + getattr(space, "start", 0)).astype(action.dtype)

    def remember(self, memory, dist):
        return memory


def flatten(space, obs):
    """Observations of a space, a tree of [N, ...], as one array [N, O]; discrete ones one-hot.

    Raises `UserError` for a space without vectors of a fixed size.
    """
    if isinstance(space, spaces.Dict):
        parts = [flatten(space[name], obs[name]) for name in sorted(space)]
    elif isinstance(space, spaces.Tuple):
        parts = [flatten(*part) for part in zip(space, obs)]
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        columns = (obs - space.start).reshape(len(obs), -1).T
        parts = [jax.nn.one_hot(*part) for part in zip(columns, num_choices(space))]
    elif isinstance(space, spaces.Box | spaces.MultiBinary) and math.prod(space.shape):
        parts = [obs.reshape(len(obs), -1)]
    else:
        raise ppo.UserError(f"observations are vectors of a fixed size here, not {space}")
    return jnp.concatenate(parts, axis=1)


def num_choices(space):
    """Numbers of choices [A] of the components of discrete actions; None for a Box of floats."""
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return None
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return np.ravel(getattr(space, "nvec", getattr(space, "n", None)))
    if isinstance(space, spaces.MultiBinary):
        return np.full(math.prod(space.shape), 2)
    kinds = "Discrete, MultiDiscrete, MultiBinary or a Box of floats"
    raise ppo.UserError(f"actions are {kinds} here, not {space}")


class Categoricals(ppo.Categorical):
    """Independent distributions over the choices of each component of actions [..., A]."""

    def log_prob(self, action):
        """Log-probabilities [...] of actions [..., A]."""
        return super().log_prob(action).sum(-1)

    def entropy(self):
        """Entropies [...], in nats."""
        return super().entropy().sum(-1)


def head_size(space):
    """Outputs of an actor for actions of a space."""
    sizes = num_choices(space)
    return math.prod(space.shape) if sizes is None else len(sizes) * int(sizes.max())


def distribution(space, params, head):
    """The distribution over actions of a space, from outputs [..., F] of an actor."""
    sizes = num_choices(space)
    if sizes is None:
        return Gaussian(mean=head, log_std=jnp.broadcast_to(params["log_std"], head.shape))
    logits = head.reshape(*head.shape[:-1], len(sizes), -1)  # [..., A, largest size]
    exists = np.arange(logits.shape[-1]) < sizes[:, None]
    return Categoricals(logits=jnp.where(exists, logits, -1e9))


def init_statistics(args, env, obs_size):
    """Parameters that are not part of a network: log_std and running statistics."""
    size = None if num_choices(env.action_space) is not None else head_size(env.action_space)
    return {
        "log_std": None if size is None else jnp.full(size, args.log_std_init, jnp.float32),
        "obs": {"count": jnp.zeros(()), "mean": jnp.zeros(obs_size), "var": jnp.ones(obs_size)},
        "returns": {"count": jnp.zeros(()), "mean": jnp.zeros(()), "var": jnp.ones(())},
    }


def normalized(params, obs):
    """Observations [..., O] with the running mean and variance removed, clipped to +-10."""
    seen = jax.lax.stop_gradient(params["obs"])
    return jnp.clip((obs - seen["mean"]) / jnp.sqrt(seen["var"] + 1e-8), -10.0, 10.0)


def init_agent(args, key, env):
    """Parameters of the networks, and the statistics."""
    obs = jax.tree.map(lambda x: np.zeros_like(x)[None], env.observation_space.sample())
    obs_size = flatten(env.observation_space, obs).shape[1]
    actor_key, critic_key = jax.random.split(key)
    actor_sizes = obs_size, args.hidden_size, args.hidden_size, head_size(env.action_space)
    critic_sizes = obs_size, args.critic_size, args.critic_size, 1
    return init_statistics(args, env, obs_size) | {
        "actor": init_mlp(actor_key, actor_sizes, head_gain=0.01),
        "critic": init_mlp(critic_key, critic_sizes, head_gain=1.0),
    }


def mlp(args, layers, x):
    """Hidden layers with `--activation` and a linear head: [in, M] -> [out, M]."""
    activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[args.activation]
    for layer in layers[:-1]:
        x = activation(layer["w"] @ x + layer["b"])
    return layers[-1]["w"] @ x + layers[-1]["b"]


def forward(args, params, obs):
    """The policy's distribution and the values [M] of observations [M, O]."""
    x = normalized(params, obs).T  # [O, M], see `mlp`
    head, value = mlp(args, params["actor"], x).T, mlp(args, params["critic"], x)[0]
    return distribution(ppo.make_env(args).action_space, params, head), value


def updated(old, x, valid):
    """Statistics of all earlier samples and of x [T, N, ...] where `valid` [T, N]."""
    where = jnp.expand_dims(valid, range(2, x.ndim))
    mean, var = x.mean((0, 1), where=where), x.var((0, 1), where=where)
    count = old["count"] + valid.sum()
    share = valid.sum() / count  # of the new samples among all
    change = mean - old["mean"]
    new = {
        "count": count,
        "mean": old["mean"] + share * change,
        "var": (1 - share) * (old["var"] + share * change**2) + share * var,
    }
    # The mean over no sample is NaN.
    return jax.tree.map(lambda new, old: jnp.where(valid.any(), new, old), new, old)


plain_learn = ppo.learn


def learn(args, state, trajectory):
    """Divides rewards by the standard deviation of their discounted sums, then learns.

    The statistics of observations change afterwards: both policies of a ratio need the same inputs.
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
    reward = trajectory.reward / jnp.sqrt(returns["var"] + 1e-8)
    reward = jnp.clip(reward, -args.reward_clip, args.reward_clip)
    state = state._replace(env_state=state.env_state._replace(memory=total))
    state, metrics = plain_learn(args, state, trajectory._replace(reward=reward))
    obs = trajectory.obs["obs"] if isinstance(trajectory.obs, dict) else trajectory.obs
    statistics = {"obs": updated(params["obs"], obs, valid), "returns": returns}
    return state._replace(params=state.params | statistics), metrics


def main(words=None, args=Args, env=Vectors, agent=(init_agent, forward, learn)):
    """Atari's `main` with its parts replaced by these."""
    ppo.Args, ppo.make_env = args, env
    ppo.init_agent, ppo.forward, ppo.learn = agent
    try:
        ppo.main(words)
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")


if __name__ == "__main__":
    main()
