r"""Recurrent PPO for EnvPool's Atari and for Gymnasium: a GRU agent in the Atari script.

    python benchmarks/environments/recurrent.py --env-id Pendulum-v1 --hide 2
    python benchmarks/environments/recurrent.py --env-id Pong-v5 --total-timesteps 1e7 \
        --num-steps 64 --update-epochs 1 --num-minibatches 8 --learning-rate 5e-4 --gamma 0.99 \
        --clip-coef 0.1 --ent-coef 0.01

Atari games are observed as single frames. Other ids are Gymnasium's; your own environment is
`--env-id my_module:Mine-v0`, see gymnasium_envs.py. `--hide` removes components of the observation,
for example velocities. Vector observations and their rewards are normalized by running statistics.
Atari's flags, such as `--max-episode-steps`, have no effect on Gymnasium's environments.

The hidden state is part of the environment's memory and of the observation {"obs", "hidden",
"start"}. It is zero at the first observation of an episode and continues over updates. Minibatches
contain whole environments, so `--num-minibatches` must divide `--num-envs`, and gradients flow
through all `--num-steps` steps of a rollout.
"""

import dataclasses
import pathlib
from typing import Any, Literal, NamedTuple

import envpool
import flax.linen as nn
import gymnasium_envs
import jax
import jax.numpy as jnp
import mujoco_envpool as control
import numpy as np

ppo = control.ppo  # ppo_atari_envpool_xla_jax


@dataclasses.dataclass
class Args(ppo.Args):
    """Recurrent PPO on Atari and Gymnasium."""

    vectorization: Literal["sync", "async"] = "sync"
    """step Gymnasium's environments in sequence, or each in its own process"""
    env_id: str = "Pendulum-v1"
    """an Atari game of EnvPool, or an id of Gymnasium; module:id imports the module first"""
    exp_name: str = pathlib.Path(__file__).stem
    hide: tuple[int, ...] = ()
    """components of the observation vector that the agent does not see"""
    hidden_size: int = 128
    """units of the GRU"""
    log_std_init: float = 0.0
    """initial log standard deviation of continuous actions"""
    reward_clip: float = 10.0
    """maximum absolute value of Gymnasium's scaled rewards"""
    total_timesteps: float = 1_000_000.0
    num_envs: int = 16
    learning_rate: float = 1e-3
    gamma: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.0


class Frames(ppo.Atari):
    """Atari with single frames, uint8 [1, 84, 84]."""

    bounded = control.Vectors.bounded

    def __init__(self, args):
        super().__init__(args)
        self.options["stack_num"] = 1
        self.observation_space = ppo.make_spec(args.env_id, **self.options).observation_space


class Vectors(gymnasium_envs.Gymnasium):
    """Gymnasium environments without the components `--hide`."""

    def __init__(self, args):
        super().__init__(args)
        example = jax.tree.map(lambda x: np.zeros_like(x)[None], self.observation_space.sample())
        size = control.flatten(self.observation_space, example).shape[1]
        if any(i not in range(-size, size) for i in args.hide):
            raise ppo.UserError(f"--hide {args.hide}: observations have {size} components")

    def start(self, obs, info):
        obs, memory = super().start(obs, info)
        return jnp.delete(obs, np.array(self.args.hide, int), axis=1), memory

    def read(self, memory, valid, outcome):
        (obs, *rest), *more = super().read(memory, valid, outcome)
        return (jnp.delete(obs, np.array(self.args.hide, int), axis=1), *rest), *more


def with_hidden_state(env_class):
    """The environment class with a hidden state in its memory and in its observations."""

    class Recurrent(env_class):
        def start(self, obs, info):
            obs, memory = super().start(obs, info)
            hidden = jnp.zeros((len(obs), self.args.hidden_size))
            obs = {"obs": obs, "hidden": hidden, "start": jnp.ones(len(obs), bool)}
            return obs, (memory, hidden)

        def remember(self, memory, dist):
            return super().remember(memory[0], dist), dist.hidden

        def read(self, memory, valid, outcome):
            memory, hidden = memory
            (obs, *rest), *more, memory = super().read(memory, valid, outcome)
            hidden = hidden * valid[:, None]  # a step that only resets leads to a new episode
            obs = {"obs": obs, "hidden": hidden, "start": ~valid}
            return (obs, *rest), *more, (memory, hidden)

    return Recurrent


def make_env(args):
    """The environments to play. Raises `UserError` for flags that do not fit."""
    if args.num_envs % args.num_minibatches:
        raise ppo.UserError("--num-minibatches must divide --num-envs")
    import_path, _, _ = envpool.registration.registry.specs.get(args.env_id, ("", "", ""))
    is_atari = import_path == "envpool.atari"
    return with_hidden_state(Frames if is_atari else Vectors)(args)


class Network(nn.Module):
    """Features, a GRU, and linear heads for actor and critic."""

    num_outputs: int  # of the actor
    hidden_size: int

    @nn.compact
    def __call__(self, obs, hidden, start):
        """Takes [M, T, ...], [M, H] and [M, T].

        Returns (actor outputs [M, T, A], values [M, T], last hidden state [M, H]).
        """
        x = obs.reshape(-1, *obs.shape[2:])
        if x.ndim > 2:
            x = ppo.NatureCNN(0, name="features")(x)
        else:
            x = nn.tanh(nn.Dense(64, kernel_init=ppo.orthogonal(2**0.5), name="features")(x))
        x = x.reshape(*start.shape, -1)

        def step(cell, hidden, inputs):
            x, start = inputs
            hidden, _ = cell(jnp.where(start[:, None], 0.0, hidden), x)
            return hidden, hidden

        options = dict(variable_broadcast="params", split_rngs={"params": False})
        cell = nn.GRUCell(self.hidden_size, name="gru")
        last, x = nn.scan(step, in_axes=1, out_axes=1, **options)(cell, hidden, (x, start))
        heads = ("actor", 0.01, self.num_outputs), ("critic", 1.0, 1)
        out = [nn.Dense(n, kernel_init=ppo.orthogonal(g), name=name)(x) for name, g, n in heads]
        return out[0], out[1][..., 0], last


class Policy(NamedTuple):
    """A distribution, with the hidden state after the observation."""

    dist: Any
    hidden: jax.Array

    def __getattr__(self, name):
        return getattr(self.dist, name)


def init_agent(args, key, env):
    """Parameters of the network and, for vectors, the statistics."""
    example = jax.tree.map(lambda x: np.zeros_like(x)[None], env.observation_space.sample())
    obs, _ = env.start(example, {"lives": np.zeros(1, np.int32)})
    obs = jax.tree.map(lambda x: x[:, None], obs)  # [1, 1, ...]
    params = control.init_statistics(args, env, obs["obs"].shape[-1])
    network = Network(control.head_size(env.action_space), args.hidden_size)
    return params | {"network": network.init(key, obs["obs"], obs["hidden"][:, 0], obs["start"])}


def forward(args, params, obs):
    """The policy and the values of observations [M, ...], or of sequences [M, T, ...]."""
    if obs["start"].ndim == 1:
        policy, value = forward(args, params, jax.tree.map(lambda x: x[:, None], obs))
        dist = jax.tree.map(lambda x: x[:, 0], policy.dist)
        return Policy(dist, policy.hidden), value[:, 0]
    x = obs["obs"]
    if x.dtype != jnp.uint8:
        x = control.normalized(params, x)
    action_space = make_env(args).action_space
    network = Network(control.head_size(action_space), args.hidden_size)
    head, value, hidden = network.apply(params["network"], x, obs["hidden"][:, 0], obs["start"])
    return Policy(control.distribution(action_space, params, head), hidden), value


def learn(args, state, trajectory):
    """The learning part of an update; vectors and their rewards are normalized."""
    if trajectory.obs["obs"].dtype == jnp.uint8:
        return control.plain_learn(args, state, trajectory)
    memory, hidden = state.env_state.memory
    state = state._replace(env_state=state.env_state._replace(memory=memory))
    state, metrics = control.learn(args, state, trajectory)
    memory = state.env_state.memory, hidden
    return state._replace(env_state=state.env_state._replace(memory=memory)), metrics


plain_update_epochs = ppo.update_epochs


def update_epochs(args, params, opt_state, batch, learning_rate, key):
    """Passes over minibatches of whole environments, [M, T, ...]."""

    def by_env(x):  # [T * N, ...] -> [N, T, ...]
        return x.reshape(args.num_steps, args.num_envs, *x.shape[1:]).swapaxes(0, 1)

    batch = jax.tree.map(by_env, batch)
    return plain_update_epochs(args, params, opt_state, batch, learning_rate, key)


def main(words=None):
    """Atari's `main` with a recurrent agent."""
    ppo.update_epochs = update_epochs
    control.main(words, Args, make_env, (init_agent, forward, learn))


if __name__ == "__main__":
    main()
