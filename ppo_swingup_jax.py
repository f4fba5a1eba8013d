# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20", "pillow>=11.0",
#     "imageio[ffmpeg]>=2.37",
# ]
# ///
"""PPO with continuous actions on cart-pole swing-up in one file, with a fully jitted update.

    python ppo_swingup_jax.py                            # swings the pole up and balances it
    python ppo_swingup_jax.py --num-envs 1024            # more environments, larger minibatches
    python ppo_swingup_jax.py --num-seeds 8              # trains eight independent agents
    python ppo_swingup_jax.py --resume runs/<run_name>   # resumes an interrupted run, bit for bit
    python ppo_swingup_jax.py --eval runs/<run_name>     # evaluates a saved run, records a video

With default flags, the greedy policy of each of 30 seeds swings the pole up and balances it from
more than 99% of the initial states, after less than half a minute of training on two CPU cores.
Training truncates episodes after 100 steps; evaluation plays the full 500 steps. These are the
hyperparameters of the notebook in which this task appeared (without a time limit, with advantages
normalized over the batch, without tanh for the mean, and with a clipped log standard deviation):

    python ppo_swingup_jax.py --total-timesteps 1e8 --num-envs 1024 --num-steps 128 \
        --update-epochs 4 --num-minibatches 4 --learning-rate 1e-4 --gae-lambda 0.95 \
        --clip-coef 0.1 --max-grad-norm 1.0 --adam-eps 1e-8 --reward-scale 1 \
        --train-episode-steps 500 --hanging-starts 0 --train-start-range 1

ppo_cartpole_jax.py explains PPO. Here the policy is a Gaussian, rewards are scaled, and evaluation
starts from two kinds of initial states. The sections above "Running" contain the algorithm for one
agent. "Running" trains it from a shell.

Axes in shape comments: K seeds, T steps, N environments, B = T * N batch, M samples of a minibatch,
O observation size, A action size, G kinds of start, E evaluation episodes, S steps of a video, U
updates; [] is a scalar.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import re
import signal
import sys
import time
import warnings
from typing import Any, Literal, NamedTuple

import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.flatten_util import ravel_pytree
from PIL import Image, ImageDraw
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

# ==================================================================================================
# Args
# ==================================================================================================


@dataclasses.dataclass
class Args:
    """PPO on pure-JAX cart-pole swing-up."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """number of independent agents; their seeds are seed, seed + 1, ..."""
    exp_name: str = pathlib.Path(globals().get("__file__", "ppo_swingup_jax")).stem
    """experiment name, part of the run name"""
    runs_dir: str = "runs"
    """folder for <run_name>/: event files, args.json, checkpoint.npz, summary.json"""
    videos_dir: str = "videos"
    """folder for <run_name>/ with videos"""
    log_interval: int = 10
    """updates between progress lines; every update is logged"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 1024
    """episodes from each kind of start, each in an environment of its own"""
    eval_mode: Literal["greedy", "sampled"] = "greedy"
    """take the most probable actions (greedy) or sample from the policy (sampled)"""
    eval_interval: int = 0
    """updates between evaluations during training; 0: only at the end"""
    capture_video: bool = False
    """record a video at each evaluation during training"""
    resume: str | None = None
    """folder of a run to resume; its flags become the defaults"""
    eval: str | None = None
    """folder of a run to evaluate; writes eval.json and a video"""
    track: bool = False
    """log to Weights & Biases (requires the wandb package)"""
    wandb_project_name: str = "single-file-jax-ppo"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases user or team"""

    # Environment
    env_id: str = "CartPoleSwingUp-v0"
    """environment id, see make_env"""
    hanging_starts: float = 0.1
    """fraction of training episodes that start with the pole hanging; others start anywhere"""
    train_start_range: float = 1.5
    """maximum initial distance from the center in training, m; 1 in evaluation"""
    train_episode_steps: int = 100
    """steps after which training truncates an episode; 500 in evaluation"""
    num_envs: int = 128
    """parallel environments per agent"""

    # Algorithm. Float flags and the seed are traced: new values need no recompilation, but no `if`
    # can test them. Other flags are static. `total_timesteps` is a float, so that 1e6 parses.
    total_timesteps: float | None = None
    """environment steps per agent; default: 2 million, or 45 updates if that is more"""
    num_steps: int = 128
    """steps per environment and update"""
    learning_rate: float = 1e-3
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    reward_scale: float = 0.02
    """factor on rewards in GAE; reported returns are not scaled"""
    gamma: float = 0.995
    """discount"""
    gae_lambda: float = 0.98
    """lambda of generalized advantage estimation"""
    num_minibatches: int | None = None
    """minibatches per epoch; by default up to 16 of at least 2,048 samples"""
    update_epochs: int = 6
    """passes over the batch per update"""
    norm_adv: bool = True
    """normalize advantages per minibatch"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    clip_vloss: bool = False
    """use a clipped value loss, with the range clip_coef"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 5.0
    """maximum global norm of the gradients"""
    target_kl: float | None = None
    """stop an update at the first minibatch whose KL from the rollout's policy exceeds this"""
    adam_eps: float = 1e-5
    """Adam's epsilon"""

    def __post_init__(self):
        """Derives the defaults that depend on other flags."""
        if self.total_timesteps is None:
            self.total_timesteps = max(2e6, 45.0 * self.batch_size)
        if self.num_minibatches is None:
            most = min(16, self.batch_size // 2048)
            divisors = [n for n in range(1, most + 1) if self.batch_size % n == 0]
            self.num_minibatches = max(divisors, default=1)

    @property
    def batch_size(self) -> int:
        """Environment steps per update, B."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> float:
        """Updates per run, U; a whole number, as a float."""
        return self.total_timesteps // self.batch_size


# ==================================================================================================
# Environment
# ==================================================================================================


class SwingUpState(NamedTuple):
    """State of one environment; float32 scalars."""

    x: jax.Array  # position of the cart, m
    x_dot: jax.Array  # its velocity, m/s
    theta: jax.Array  # angle of the pole from upright, clockwise, rad
    theta_dot: jax.Array  # its angular velocity, rad/s


@dataclasses.dataclass(frozen=True)
class CartPoleSwingUp:
    """Swing a pole up on a cart and balance it; one environment, for `vmap`.

    | what        | value                                                                      |
    | ----------- | -------------------------------------------------------------------------- |
    | state       | `SwingUpState`                                                             |
    | observation | float32 [5]: position / 2.4, velocity / 2, cosine and sine of the angle,   |
    |             | angular velocity / 3                                                       |
    | action      | float32 [1]; clipped to [-1, 1] and times 20 N it is the force on the cart |
    | reward      | height; nearly upright also rest at the center; see `reward`               |
    | terminated  | cart more than 2.4 m off the center                                        |
    | truncated   | by the caller, after `max_episode_steps`                                   |
    | start       | at rest, position uniform within `start_range` of the center, angle        |
    |             | uniform or, with probability `hanging`, within 0.05 rad of straight down   |
    | success     | 500 steps on the track, nearly upright in each of the last 100             |

    Your own environment needs `reset`, `step`, `observe`, `action_size` and `max_episode_steps`.
    States are pytrees of arrays; `terminated` is a bool. `step` scales and clips the action: it
    gets the unbounded sample [A], whose mean is in [-1, 1]. `rollout` applies the time limit and
    resets the environment. Optional: `render` and `tau` for videos; `succeeds` and `success_steps`
    for success rates; `evaluations` for several kinds of start; `metrics(state)`, a dict of scalars
    whose means are logged as env/<name>; `starts_per_update` for slow resets, see `rollout`. JAX
    traces all methods. For environments not in JAX, use ppo_atari_envpool_xla_jax.py.
    """

    gravity: float = 9.8  # m/s^2
    mass_cart: float = 1.0  # kg
    mass_pole: float = 0.1  # kg
    half_length: float = 0.5  # m, pivot to the pole's center of mass
    force: float = 20.0  # N, maximum
    tau: float = 0.02  # s per step
    x_limit: float = 2.4  # m
    upright: float = 0.95  # a larger cosine of the angle counts as nearly upright: 18 degrees
    success_steps: int = 100  # last steps of a successful episode, nearly upright
    action_size: int = 1
    max_episode_steps: int = 500
    hanging: float = 0.0
    start_range: float = 1.0  # m

    def reset(self, key):
        """Samples an initial state."""
        x, turn, kind = jax.random.uniform(key, (3,), jnp.float32, -1.0, 1.0)
        hangs = kind < 2 * self.hanging - 1
        theta = jnp.where(hangs, math.pi + 0.05 * turn, math.pi * turn)
        x *= self.start_range
        # Separate zeros, for donation.
        return SwingUpState(x=x, x_dot=jnp.zeros_like(x), theta=theta, theta_dot=jnp.zeros_like(x))

    def step(self, key, state, action):
        """One step of tau seconds by an action [1]; returns (state, reward [], terminated []).

        The pole is a uniform rod of mass m and half length l; M is the mass of cart and pole, F the
        force. Lagrange's equations for x and theta are

            M x_acc + m l (theta_acc cos(theta) - theta_dot^2 sin(theta)) = F
            x_acc cos(theta) + (4/3) l theta_acc = g sin(theta)

        Explicit Euler steps integrate their solution:

            push       = (F + m l theta_dot^2 sin(theta)) / M
            theta_acc  = (g sin(theta) - cos(theta) push) / (l (4/3 - m cos(theta)^2 / M))
            x_acc      = push - m l theta_acc cos(theta) / M
        """
        x, x_dot, theta, theta_dot = state
        (level,) = action  # raises if `action_size` is not 1
        force = self.force * jnp.clip(level, -1.0, 1.0)
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        total_mass = self.mass_cart + self.mass_pole
        push = (force + self.mass_pole * self.half_length * theta_dot**2 * sin) / total_mass
        effective_length = self.half_length * (4 / 3 - self.mass_pole * cos**2 / total_mass)
        theta_acc = (self.gravity * sin - cos * push) / effective_length
        x_acc = push - self.mass_pole * self.half_length * theta_acc * cos / total_mass

        new_state = SwingUpState(
            x=x + self.tau * x_dot,
            x_dot=x_dot + self.tau * x_acc,
            theta=theta + self.tau * theta_dot,
            theta_dot=theta_dot + self.tau * theta_acc,
        )
        off_track = jnp.abs(new_state.x) > self.x_limit
        return new_state, self.reward(new_state, action), off_track

    def reward(self, state, action):
        """The reward [] of reaching a state by an action [1], at most 2.5: the sum of

        | term                             | purpose                                             |
        | -------------------------------- | --------------------------------------------------- |
        | cos(theta)                       | height                                              |
        | 1.5 exp(-10 (1 - cos(theta))^2)  | staying at the top pays more than swinging through  |
        | -0.01 x^2                        | keeps the cart away from the ends of the track      |
        | -0.3 x^2 - 0.05 theta_dot^2,     | rest at the center; the swing-up itself needs room  |
        | if nearly upright                | and speed                                           |
        | -0.0005 action^2                 | little force; the action is not clipped here        |

        Upright, hanging, and upright 1 m off the center, all at rest:

        >>> env, action = CartPoleSwingUp(), jnp.zeros(1)
        >>> states = [(0.0, 0.0, 0.0, 0.0), (0.0, 0.0, math.pi, 0.0), (1.0, 0.0, 0.0, 0.0)]
        >>> [round(float(env.reward(SwingUpState(*state), action)), 4) for state in states]
        [2.5, -1.0, 2.19]
        """
        cos = jnp.cos(state.theta)
        height = cos + 1.5 * jnp.exp(-10 * (1 - cos) ** 2)
        balance_cost = 0.3 * state.x**2 + 0.05 * state.theta_dot**2
        balance_cost = jnp.where(cos > self.upright, balance_cost, 0.0)
        return height - 0.01 * state.x**2 - balance_cost - 0.0005 * (action**2).sum()

    def observe(self, state):
        """The observation [5] of a state: continuous in the angle, all of order one."""
        x, x_dot, theta, theta_dot = state
        position, velocity = x / self.x_limit, x_dot / 2
        return jnp.stack([position, velocity, jnp.cos(theta), jnp.sin(theta), theta_dot / 3])

    def evaluations(self):
        """{kind of start: environment}, which differ in `reset` only."""
        task = dataclasses.replace(self, max_episode_steps=500, start_range=1.0)
        shares = {"random": 0.0, "hanging": 1.0}
        return {kind: dataclasses.replace(task, hanging=share) for kind, share in shares.items()}

    def succeeds(self, state):
        """Whether a state is on the track and nearly upright; returns bool []."""
        return (jnp.abs(state.x) <= self.x_limit) & (jnp.cos(state.theta) > self.upright)

    def render(self, state, width=400, height=300):
        """Draws a state to scale, on the host; uint8 [height, width, 3]."""
        x, theta = float(state.x), float(state.theta)
        length = 2 * self.half_length
        scale = width / (2.2 * (self.x_limit + length))  # pixels per meter
        axle_x, axle_y = width / 2 + x * scale, height / 2
        tip_x = axle_x + length * scale * math.sin(theta)
        tip_y = axle_y - length * scale * math.cos(theta)
        track = self.x_limit * scale

        def box(half_width, half_height):  # around the axle, in meters
            w, h = half_width * scale, half_height * scale
            return [axle_x - w, axle_y - h, axle_x + w, axle_y + h]

        image = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(image)
        draw.line([width / 2 - track, axle_y, width / 2 + track, axle_y], fill="black")
        draw.rectangle(box(0.2, 0.12), fill=(40, 40, 40))
        pole = [axle_x, axle_y, tip_x, tip_y]
        draw.line(pole, fill=(204, 153, 102), width=max(2, round(0.08 * scale)))
        draw.ellipse(box(0.04, 0.04), fill=(130, 130, 255))
        return np.asarray(image)


def make_env(args):
    """The environment for training. Raises `UserError` for an unknown id.

    Short episodes suffice because `reset` covers the state space. For another environment choose
    `reward_scale` so that values, up to reward_scale * reward / (1 - gamma), stay below ten or so.
    """
    if args.env_id != "CartPoleSwingUp-v0":
        raise UserError(f"unknown --env-id {args.env_id}: this script has only CartPoleSwingUp-v0")
    return CartPoleSwingUp(
        hanging=args.hanging_starts,
        start_range=args.train_start_range,
        max_episode_steps=args.train_episode_steps,
    )


# ==================================================================================================
# Agent
# ==================================================================================================


class Gaussian(NamedTuple):
    """Diagonal Gaussian distributions over actions [A].

        log p(a) = -sum_i [((a_i - mu_i) / sigma_i)^2 / 2 + log(sigma_i) + log(2 pi) / 2]

    Samples are unbounded and the environment clips them. Log-probabilities of the unclipped samples
    keep the policy gradient exact. At the means, with standard deviations 1 and 2:

    >>> dist = Gaussian(mean=jnp.zeros((1, 2)), log_std=jnp.log(jnp.array([[1.0, 2.0]])))
    >>> round(float(dist.log_prob(jnp.zeros((1, 2)))[0]), 3)
    -2.531
    """

    mean: jax.Array  # [..., A]
    log_std: jax.Array  # [..., A], logarithm of the standard deviation

    def std(self):
        """Standard deviations [..., A]."""
        return jnp.exp(self.log_std)

    def sample(self, key):
        """Samples actions [..., A]."""
        return self.mean + self.std() * jax.random.normal(key, self.mean.shape, self.mean.dtype)

    def mode(self):
        """The most probable actions [..., A]."""
        return self.mean

    def log_prob(self, action):
        """Log-densities [...] of actions [..., A]."""
        distance = (action - self.mean) / self.std()
        return -(0.5 * distance**2 + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self):
        """Differential entropies [...], in nats, negative for small standard deviations."""
        return (self.log_std + 0.5 * (1 + math.log(2 * math.pi))).sum(-1)


@jax.custom_batching.sequential_vmap  # seed by seed, to round as with one seed
def orthogonalized(noise):
    """The orthogonal matrix nearest to `noise` [out, in], by Newton-Schulz (Bjorck & Bowie, 1971).

    Each iteration maps every singular value s to 1.5 s - 0.5 s^3, which converges to 1. Normal
    noise gives uniformly distributed orthogonal matrices. A QR decomposition compiles more slowly.
    """
    with jax.default_matmul_precision("highest"):
        start = noise / jnp.linalg.norm(noise)  # 0 < s <= 1
        return jax.lax.fori_loop(0, 60, lambda _, x: 1.5 * x - 0.5 * (x @ x.T) @ x, start)


def init_mlp(key, sizes, head_gain):
    """Layers {"w" [out, in], "b" [out, 1]} of a multilayer perceptron.

    Orthogonal matrices preserve lengths, which keeps signals and gradients in range. Each matrix is
    multiplied by a gain: sqrt(2) suits relu and is also customary for tanh. A head gain of 0.01
    makes the initial policy nearly uniform.
    """
    gains = [math.sqrt(2)] * (len(sizes) - 2) + [head_gain]
    # One call for all layers compiles faster.
    shape = len(gains), max(sizes[1:]), max(sizes[:-1])
    noise = jax.random.normal(key, shape, jnp.float32)
    return [
        {"w": gain * orthogonalized(x[:fan_out, :fan_in]), "b": jnp.zeros_like(x[:fan_out, :1])}
        for gain, x, fan_in, fan_out in zip(gains, noise, sizes, sizes[1:])
    ]


def mlp(layers, x):
    """tanh layers and a linear head: [in, M] -> [out, M].

    Features come first: on a CPU `w @ x` with a contiguous batch axis is faster than `x @ w`.
    """
    for layer in layers[:-1]:
        x = jnp.tanh(layer["w"] @ x + layer["b"])
    return layers[-1]["w"] @ x + layers[-1]["b"]


def init_agent(args, key, env):
    """Parameters {"actor": layers, "critic": layers, "spread": [A], see `bounded_log_std`}."""
    obs = jax.eval_shape(lambda key: env.observe(env.reset(key)), key)
    obs_size = math.prod(obs.shape)
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": init_mlp(actor_key, (obs_size, 128, 128, env.action_size), head_gain=0.01),
        "critic": init_mlp(critic_key, (obs_size, 128, 128, 1), head_gain=1.0),
        # `bounded_log_std` of this is -0.5, a standard deviation of 0.6.
        "spread": jnp.full(env.action_size, 1.25 * math.atanh(0.2), jnp.float32),
    }


def bounded_log_std(spread):
    """Log standard deviations between -2 and 0.5, from unbounded parameters.

    Unlike clipping, tanh has a gradient everywhere.

    >>> bounded_log_std(jnp.array([-9.0, 1.25 * math.atanh(0.2), 9.0])).round(2).tolist()
    [-2.0, -0.5, 0.5]
    """
    return -0.75 + 1.25 * jnp.tanh(spread / 1.25)


def forward(args, params, obs):
    """The policy's distribution and the values [M] for observations [M, ...].

    For a CNN, see benchmarks/recipes.md, which avoids XLA's slow gradient of a convolution.
    """
    x = obs.reshape(obs.shape[0], -1).astype(jnp.float32).T  # [O, M], see `mlp`
    # tanh, because samples far beyond [-1, 1] would all be clipped to the same action.
    mean = jnp.tanh(mlp(params["actor"], x)).T  # [M, A]
    value = mlp(params["critic"], x)  # [1, M]
    # The standard deviation does not depend on the observation.
    log_std = jnp.broadcast_to(bounded_log_std(params["spread"]), mean.shape)
    return Gaussian(mean=mean, log_std=log_std), value[0]


# ==================================================================================================
# Optimizer
# ==================================================================================================


class AdamState(NamedTuple):
    """Adam's moments as vectors of all P parameters, and the number of steps."""

    m: jax.Array  # [P]
    v: jax.Array  # [P]
    count: jax.Array  # []


def adam_init(params):
    """Adam's initial state."""
    zeros = jnp.zeros_like(ravel_pytree(params)[0])
    return AdamState(m=zeros, v=jnp.copy(zeros), count=jnp.int32(0))  # its own buffer


def adam_update(args, grads, state, params, learning_rate, beta1=0.9, beta2=0.999):
    """Clips the global norm of the gradients g, then takes step t of Adam, arXiv:1412.6980:

        m = beta1 m + (1 - beta1) g            m_hat = m / (1 - beta1^t)
        v = beta2 v + (1 - beta2) g^2          v_hat = v / (1 - beta2^t)
        p = p - learning_rate * m_hat / (sqrt(v_hat) + eps)

    The divisors correct the bias of running means that start at zero. Returns (params, state,
    norm of the gradients before clipping []).
    """
    # One vector of all parameters needs fewer kernels than one array per layer.
    g, unravel = ravel_pytree(grads)
    norm = jnp.sqrt(jnp.sum(g**2))
    g *= jnp.minimum(1.0, args.max_grad_norm / norm)  # norm 0 gives min(1, inf) = 1

    count = state.count + 1
    m = beta1 * state.m + (1 - beta1) * g
    v = beta2 * state.v + (1 - beta2) * g**2
    m_hat = m / (1 - beta1 ** jnp.float32(count))
    v_hat = v / (1 - beta2 ** jnp.float32(count))
    step = unravel(learning_rate * m_hat / (jnp.sqrt(v_hat) + args.adam_eps))
    return jax.tree.map(jnp.subtract, params, step), AdamState(m=m, v=v, count=count), norm


# ==================================================================================================
# PPO
# ==================================================================================================


class EpisodeStats(NamedTuple):
    """The running and the last finished episode of each environment, [N].

    Returns are undiscounted. The log shows the mean over the last episodes of all environments. A
    mean over the episodes that end in one update would favor short ones.
    """

    running_return: jax.Array
    running_length: jax.Array
    last_return: jax.Array  # -inf until an episode ends
    last_length: jax.Array  # -inf until an episode ends


class Transition(NamedTuple):
    """One step of N environments; a trajectory has a leading axis of T steps."""

    obs: jax.Array  # [N, ...]
    action: jax.Array  # [N, ...]
    log_prob: jax.Array  # [N]
    reward: jax.Array  # [N]
    # Termination: no later rewards. Truncation: the critic estimates the later rewards.
    terminated: jax.Array  # [N]
    truncated: jax.Array  # [N]
    next_obs: jax.Array  # [N, ...], after the step, before any reset
    info: dict  # {name: [N]}, the environment's `metrics`


class Batch(NamedTuple):
    """Inputs of the loss: B samples, or the M of a minibatch."""

    obs: jax.Array  # [B, ...]
    action: jax.Array  # [B, ...]
    log_prob: jax.Array  # [B], of the old policy
    value: jax.Array  # [B], of the old critic
    advantage: jax.Array  # [B]
    target: jax.Array  # [B], for the critic


def init_episode_stats(num_envs):
    """Statistics before the first step."""
    zeros, never = jnp.zeros(num_envs, jnp.float32), jnp.full(num_envs, -jnp.inf, jnp.float32)
    return EpisodeStats(zeros, zeros.astype(jnp.int32), never, jnp.copy(never))


def restart_ended(ended, stats):
    """Moves the statistics from running to last where `ended` [N] is true."""
    return stats._replace(
        running_return=jnp.where(ended, 0.0, stats.running_return),
        running_length=jnp.where(ended, 0, stats.running_length),
        last_return=jnp.where(ended, stats.running_return, stats.last_return),
        last_length=jnp.where(ended, stats.running_length, stats.last_length),
    )


def mean_of_ended(last):
    """Mean of `last` [N] over environments with a finished episode; -inf if there is none."""
    ended = jnp.isfinite(last)
    total, count = jnp.where(ended, last, 0.0).sum(), ended.sum()
    return jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)


def select(mask, yes, no):
    """`yes` where `mask` [N] is true, else `no`; both are pytrees of arrays [N, ...]."""
    return jax.tree.map(lambda yes, no: jax.vmap(jnp.where)(mask, yes, no), yes, no)


def check_shapes(shape, **arrays):
    """Raises ValueError for an array of another shape, which would be broadcast silently."""
    for name, array in arrays.items():
        if getattr(array, "shape", None) != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {array}")


def array_types(state):
    """The set of "state.<name>: dtype shape" of all arrays of an environment state."""
    leaves = jax.tree.leaves_with_path(state)
    return {f"state{jax.tree_util.keystr(path)}: {x.dtype} {x.shape}" for path, x in leaves}


def env_metrics(env, states):
    """The environment's `metrics` for states [N], {name: [N]}; {} if it has none."""
    return jax.vmap(env.metrics)(states) if hasattr(env, "metrics") else {}


def gpu_unroll(steps):
    """The unroll factor of a scan: `steps` on a GPU, where launching kernels is slow, else 1."""
    return steps if jax.default_backend() == "gpu" else 1


def rollout(args, env, params, env_state, stats, key):
    """Plays T steps in N environments and resets environments whose episode has ended.

    Returns (env_state, stats, trajectory: `Transition` of [T, N, ...]).

    It samples T * N initial states in one batch, enough for a reset after every step; most are
    never used. An environment with slow resets can define `starts_per_update`, the size of a
    smaller pool that is used cyclically.
    """
    # One split for all keys: each use of `jax.random` adds 10% to the compile time on a CPU.
    keys = jax.random.split(key, (args.num_steps, 1 + 2 * args.num_envs))
    step_keys, reset_keys = keys[:, 1 : 1 + args.num_envs], keys[:, 1 + args.num_envs :].ravel()
    pool_size = getattr(env, "starts_per_update", None)
    reset_keys = reset_keys[:pool_size]
    start_states = jax.vmap(env.reset)(reset_keys)

    def env_step(carry, inputs):
        env_state, stats, num_taken = carry
        action_key, step_keys = inputs

        # --- Act ---
        obs = jax.vmap(env.observe)(env_state)
        # XLA removes the unused `value`; `trajectory_values` computes all values in one batch.
        dist, value = forward(args, params, obs)
        action = dist.sample(action_key)
        log_prob = dist.log_prob(action)
        next_state, reward, terminated = jax.vmap(env.step)(step_keys, env_state, action)
        shape = (args.num_envs,)
        check_shapes(shape, value=value, log_prob=log_prob, entropy=dist.entropy())
        check_shapes(shape, reward=reward, terminated=terminated)
        before, after = array_types(env_state), array_types(next_state)
        if before != after:
            raise TypeError(f"`reset` returns {before - after}, `step` returns {after - before}")

        # --- End episodes ---
        stats = stats._replace(
            running_return=stats.running_return + reward, running_length=stats.running_length + 1
        )
        truncated = stats.running_length >= env.max_episode_steps
        done = terminated | truncated
        next_obs, info = jax.vmap(env.observe)(next_state), env_metrics(env, next_state)
        check_shapes(shape, **info)
        transition = Transition(
            obs, action, log_prob, reward, terminated, truncated, next_obs, info
        )

        # --- Reset ---
        # By default, each step and environment has its own initial state. With a smaller pool,
        # environments that are done take its next states.
        order = jnp.arange(args.num_envs) if pool_size is None else jnp.cumsum(done) - 1
        place = (num_taken + order) % len(reset_keys)
        start_state = jax.tree.map(lambda x: x[place], start_states)
        env_state = select(done, start_state, next_state)
        num_taken = jnp.int32(num_taken + order[-1] + 1)
        return (env_state, restart_ended(done, stats), num_taken), transition

    carry, inputs = (env_state, stats, jnp.int32(0)), (keys[:, 0], step_keys)
    carry, trajectory = jax.lax.scan(env_step, carry, inputs, unroll=gpu_unroll(4))
    env_state, stats, _ = carry
    return env_state, stats, trajectory


def trajectory_values(args, env, params, trajectory):
    """Values of all observations and of their successors before any reset, both [T, N].

    The successor is the next step's observation, except after a truncation: there it is `next_obs`.
    `compute_gae` ignores the successors of terminated episodes. In T steps, an environment has at
    most W = ceil(T / max_episode_steps) truncations, so W of its `next_obs` suffice.
    """
    # W steps of each environment: all truncated ones, and others, where `next_obs` fits as well.
    most = math.ceil(args.num_steps / env.max_episode_steps)
    _, step = jax.lax.top_k(trajectory.truncated.T.astype(jnp.float32), most)  # [N, W]
    index = step.T, jnp.arange(args.num_envs)

    def needed(obs, next_obs):  # [T + 1 + W, N, ...], for one pass through the critic
        obs = jnp.concatenate([obs, next_obs[-1:], next_obs[index]])
        return obs.reshape(-1, *obs.shape[2:])

    obs = jax.tree.map(needed, trajectory.obs, trajectory.next_obs)
    value = forward(args, params, obs)[1].reshape(-1, args.num_envs)
    value, truncated_value = jnp.split(value, (args.num_steps + 1,))
    return value[:-1], value[1:].at[index].set(truncated_value)


def compute_gae(args, reward, value, next_value, terminated, truncated):
    """Generalized advantage estimation, arXiv:1506.02438; all arrays [T, N].

        delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1},      done = terminated or truncated

    The TD error delta_t measures how much better a step was than expected. lambda = 0 gives A_t =
    delta_t, with low variance but the critic's bias. With lambda = 1 all later values cancel: A_t =
    G_t - V(s_t), with high variance. If an episode is truncated or continues after the rollout,
    `next_value` replaces all later rewards in G_t. Here step 3 of 4 terminates the episode, so its
    next value, 9, is ignored:

    >>> column = lambda *numbers: jnp.array(numbers)[:, None]
    >>> advantage = compute_gae(
    ...     Args(gamma=0.5, gae_lambda=0.5),
    ...     reward=column(1.0, 1.0, 1.0, 1.0),
    ...     value=column(2.0, 2.0, 2.0, 2.0),
    ...     next_value=column(2.0, 2.0, 9.0, 4.0),
    ...     terminated=column(False, False, True, False),
    ...     truncated=column(False, False, False, False),
    ... )
    >>> advantage[:, 0].tolist()
    [-0.0625, -0.25, -1.0, 1.0]
    """
    delta = reward + args.gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = args.gamma * args.gae_lambda * (1 - (terminated | truncated))

    def backwards(next_advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * next_advantage
        return advantage, advantage

    start, inputs = jnp.zeros_like(delta[0]), (delta, decay)
    _, advantage = jax.lax.scan(backwards, start, inputs, reverse=True, unroll=gpu_unroll(16))
    return advantage


def clipped_objective(ratio, advantage, clip_coef):
    """PPO's surrogate objective of each sample: min(ratio A, clip(ratio, 1 - c, 1 + c) A).

    The ratio p_new(a|s) / p_old(a|s) is an importance weight: the old policy played the rollout. At
    ratio 1 the gradient is A grad log p_new(a|s), the policy gradient. The gradient is zero if the
    ratio is above 1 + c and A > 0, or below 1 - c and A < 0. Elsewhere it is kept, even if the
    ratio moved the wrong way. d objective / d ratio at 1, 1.5 and 0.5, for A = 1, then A = -1:

    >>> gradient = jax.vmap(jax.grad(clipped_objective), (0, None, None))
    >>> gradient(jnp.array([1.0, 1.5, 0.5]), 1.0, 0.25).tolist()
    [1.0, 0.0, 1.0]
    >>> gradient(jnp.array([1.0, 1.5, 0.5]), -1.0, 0.25).tolist()
    [-1.0, -1.0, -0.0]
    """
    clipped_ratio = jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    return jnp.minimum(ratio * advantage, clipped_ratio * advantage)


def ppo_loss(args, params, batch):
    """The loss of a minibatch, a mean over its samples; returns (loss [], metrics {tag: []}).

    loss = policy loss + vf_coef * value loss - ent_coef * entropy, as in CartPole's script.
    """
    dist, value = forward(args, params, batch.obs)

    # --- Policy ---
    log_ratio = dist.log_prob(batch.action) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    policy_loss = -clipped_objective(ratio, batch.advantage, args.clip_coef).mean()

    # --- Value ---
    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * value_error.mean()

    # --- Entropy ---
    entropy = dist.entropy().mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        # Two estimates of KL(old || new), k3 and k1 in http://joschu.net/blog/kl-approx.html.
        "losses/approx_kl": (jnp.expm1(log_ratio) - log_ratio).mean(),
        "losses/old_approx_kl": -log_ratio.mean(),
        "losses/clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
        "charts/action_std": dist.std().mean(),
    }


def reduce_metrics(metrics):
    """Averages metrics over minibatches; takes the maximum of tags that end in _max."""
    return {tag: x.max(0) if tag.endswith("_max") else x.mean(0) for tag, x in metrics.items()}


def loss_gradient(args, params, batch):
    """Returns (gradients of `ppo_loss`, metrics). The loss must be a mean over samples.

    On a CPU, multiples of 4,096 samples are split into blocks whose activations fit into the cache.
    """
    grad = jax.grad(ppo_loss, argnums=1, has_aux=True)
    size, block = len(batch.log_prob), 4096
    if jax.default_backend() != "cpu" or size == block or size % block:
        return grad(args, params, batch)
    blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), batch)
    grads, metrics = jax.lax.map(lambda block: grad(args, params, block), blocks)
    return jax.tree.map(lambda g: g.mean(0), grads), reduce_metrics(metrics)


def random_permutations(key, count, n):
    """Pseudo-random permutations of range(n), [count, n].

    Sorting random numbers takes longer than the gradients of a small network. If n is a power of
    two above 256, an invertible hash (a Feistel cipher) maps the indices instead. Its XORs can be
    undone, so no index repeats.
    """
    if n <= 256 or n & (n - 1):
        return jnp.argsort(jax.random.bits(key, (count, n), jnp.uint32))
    bits = n.bit_length() - 1
    low, high = bits // 2, bits - bits // 2  # widths of the two halves

    def mix(half, round_key, width):  # the top bits of a multiplicative hash
        x = (half ^ round_key) * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
        return (x ^ (x >> 13)) >> (32 - width)

    index = jnp.arange(n, dtype=jnp.uint32)
    left, right = index >> low, index & ((1 << low) - 1)
    for left_key, right_key in jax.random.bits(key, (6, 2, count, 1), jnp.uint32):
        left = left ^ mix(right, left_key, high)
        right = right ^ mix(left, right_key, low)
    return (left << low) | right


def update_epochs(args, params, opt_state, batch, learning_rate, key):
    """Several passes over a batch of B samples in shuffled minibatches.

    Stops before the first minibatch whose approx_kl exceeds `target_kl`.
    Returns (params, opt_state, metrics {tag: []} averaged over all minibatches).
    """

    def minibatch_step(carry, index):  # index [M] into the batch
        params, opt_state, active = carry
        minibatch = jax.tree.map(lambda x: x[index], batch)
        if args.norm_adv:
            advantage = minibatch.advantage - minibatch.advantage.mean()
            advantage = advantage / (minibatch.advantage.std() + 1e-8)
            minibatch = minibatch._replace(advantage=advantage)
        grads, metrics = loss_gradient(args, params, minibatch)
        *new, norm = adam_update(args, grads, opt_state, params, learning_rate)
        check_shapes((), **metrics)
        metrics["losses/grad_norm"] = norm
        if args.target_kl is not None:
            active &= metrics["losses/approx_kl"] <= args.target_kl
            new = jax.tree.map(functools.partial(jnp.where, active), new, [params, opt_state])
        return (*new, active), metrics

    order = random_permutations(key, args.update_epochs, args.batch_size)
    order = order.reshape(args.update_epochs * args.num_minibatches, -1)
    carry = params, opt_state, jnp.bool_(True)
    (params, opt_state, _), metrics = jax.lax.scan(minibatch_step, carry, order)
    return params, opt_state, reduce_metrics(metrics)


# ==================================================================================================
# Training
# ==================================================================================================


class TrainState(NamedTuple):
    """The state of training, as saved in checkpoints."""

    params: dict
    opt_state: AdamState
    env_state: SwingUpState  # of [N]
    stats: EpisodeStats  # of [N]
    key: jax.Array  # PRNG key
    update: jax.Array  # [], updates done


def init_train_state(args, key):
    """The `TrainState` of one agent before its first update."""
    env = make_env(args)
    agent_key, reset_key, key = jax.random.split(key, 3)
    params = init_agent(args, agent_key, env)
    state = TrainState(
        params=params,
        opt_state=adam_init(params),
        env_state=jax.vmap(env.reset)(jax.random.split(reset_key, args.num_envs)),
        stats=init_episode_stats(args.num_envs),
        key=key,
        update=jnp.zeros((), jnp.int32),
    )
    # Removes weak types (of Python numbers), because the types of the state must not change.
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)


def update(args, state):
    """One PPO update of one agent; returns (state, metrics {tag: []})."""
    env = make_env(args)
    rollout_key, epochs_key, next_key = jax.random.split(state.key, 3)

    # --- Play ---
    env_state, stats, trajectory = rollout(
        args, env, state.params, state.env_state, state.stats, rollout_key
    )

    # --- Advantages ---
    value, next_value = trajectory_values(args, env, state.params, trajectory)
    reward = args.reward_scale * trajectory.reward
    advantage = compute_gae(
        args, reward, value, next_value, trajectory.terminated, trajectory.truncated
    )
    target = advantage + value  # an estimate of the return

    # --- Learn ---
    batch = Batch(trajectory.obs, trajectory.action, trajectory.log_prob, value, advantage, target)
    batch = jax.tree.map(lambda x: x.reshape(args.batch_size, *x.shape[2:]), batch)
    learning_rate = jnp.float32(args.learning_rate)
    if args.anneal_lr:  # reaches 0 after the last update
        learning_rate *= jnp.maximum(0.0, 1 - state.update / jnp.float32(args.num_updates))
    params, opt_state, metrics = update_epochs(
        args, state.params, state.opt_state, batch, learning_rate, epochs_key
    )

    metrics |= {
        # target - value = advantage
        "losses/explained_variance": 1 - advantage.var() / target.var(),
        "charts/learning_rate": learning_rate,
        "charts/episodic_return": mean_of_ended(stats.last_return),
        "charts/episodic_length": mean_of_ended(stats.last_length),
        "charts/reward_mean": trajectory.reward.mean(),
        "charts/value_mean": value.mean(),
        **{f"env/{name}": x.mean() for name, x in trajectory.info.items()},
    }
    return TrainState(params, opt_state, env_state, stats, next_key, state.update + 1), metrics


def train(args, key):
    """Trains one agent; returns (state, metrics {tag: [U]} of every update).

    The function is pure. Your own script can compile a whole sweep:

        def agent(learning_rate, key):
            return train(dataclasses.replace(args, learning_rate=learning_rate), key)

        states, metrics = jax.jit(jax.vmap(agent))(learning_rates, keys)
    """
    step, length = lambda state, _: update(args, state), int(args.num_updates)
    return jax.lax.scan(step, init_train_state(args, key), length=length)


# ==================================================================================================
# Evaluation
# ==================================================================================================


VIDEO_STEPS = 1000  # maximum length of a video, in steps


class Evaluation(NamedTuple):
    """Episodes in fresh environments from G kinds of start, and the states of one of each kind."""

    episode_return: jax.Array  # [G, E]
    episode_length: jax.Array  # [G, E]
    info: dict  # {name: [G, E]}, sums of the environment's `metrics` over an episode
    success: dict  # {kind of start: [E]}; empty if the environment has no `succeeds`
    states: Any  # of [S + 1, G]; undefined after the end of an episode


def evaluate(args, params, key):
    """Plays E episodes from each kind of start with one agent; returns an `Evaluation`.

    All kinds of start are played in one batch.
    """
    env = make_env(args)
    kinds = env.evaluations() if hasattr(env, "evaluations") else {"default": env}
    env, shape = next(iter(kinds.values())), (len(kinds), args.eval_episodes)
    starts = []
    for kind, kind_key in zip(kinds.values(), jax.random.split(key, len(kinds))):
        reset_key, step_key = jax.random.split(kind_key)
        starts.append(jax.vmap(kind.reset)(jax.random.split(reset_key, args.eval_episodes)))
    start_state, num_envs = jax.tree.map(lambda *x: jnp.concatenate(x), *starts), math.prod(shape)

    def is_playing(carry):
        t, playing, _, _, _ = carry
        return (t < env.max_episode_steps) & playing.any()

    def env_step(carry):
        t, playing, state, sums, states = carry
        dist, _ = forward(args, params, jax.vmap(env.observe)(state))
        keys = jax.random.split(jax.random.fold_in(step_key, t), num_envs + 1)
        action = dist.mode() if args.eval_mode == "greedy" else dist.sample(keys[-1])
        state, reward, terminated = jax.vmap(env.step)(keys[:-1], state, action)
        returns, lengths, held, info = sums
        if hasattr(env, "succeeds"):  # the number of successful steps up to now
            held = jnp.where(jax.vmap(env.succeeds)(state), held + 1, 0)
        info = jax.tree.map(jnp.add, info, env_metrics(env, state))
        new_sums = returns + reward, lengths + 1, held, info
        sums = select(playing, new_sums, sums)
        states = jax.tree.map(lambda kept, x: kept.at[t + 1].set(first(x)), states, state)
        return t + 1, playing & ~terminated, state, sums, states

    def first(x):  # of each kind
        return x[:: args.eval_episodes]

    nothing, count = jnp.zeros(num_envs, jnp.float32), jnp.zeros(num_envs, jnp.int32)
    sums = nothing, count, count, dict.fromkeys(env_metrics(env, start_state), nothing)
    steps = min(env.max_episode_steps, VIDEO_STEPS) if hasattr(env, "render") else 0
    states = jax.tree.map(first, start_state)
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (steps + 1, *x.shape)), states)
    carry = jnp.int32(0), jnp.ones(num_envs, bool), start_state, sums, states
    # Stops once all episodes have ended.
    _, _, _, sums, states = jax.lax.while_loop(is_playing, env_step, carry)
    returns, lengths, held, info = jax.tree.map(lambda x: x.reshape(shape), sums)
    success = dict(zip(kinds, held >= env.success_steps)) if hasattr(env, "succeeds") else {}
    return Evaluation(returns, lengths, info=info, success=success, states=states)


def record_video(args, evaluation, path):
    """Writes the first seed's first episode from each kind of start, side by side, as path.mp4.

    The video runs in real time. An episode that has ended shows its last state.
    """
    env = make_env(args)
    lengths, states = jax.device_get((evaluation.episode_length[0, :, 0], evaluation.states))
    path = path.with_suffix(".mp4")
    with warnings.catch_warnings():
        # JAX warns about forks; this one only runs ffmpeg.
        warnings.simplefilter("ignore", RuntimeWarning)
        with imageio.get_writer(path, fps=round(1 / env.tau), macro_block_size=2) as writer:
            for t in range(min(lengths.max(), VIDEO_STEPS) + 1):
                panels = []
                for kind, length in enumerate(lengths):
                    place = 0, min(t, length), kind
                    frame = env.render(jax.tree.map(lambda x: x[place], states))  # noqa: B023
                    panels.append(frame)
                writer.append_data(np.hstack(panels))
    if not path.stat().st_size:  # ffmpeg may fail silently
        raise OSError(f"{path} is empty")
    return path


# ==================================================================================================
# Running: seeds, files, flags, logging and the command line
# ==================================================================================================


class UserError(Exception):
    """An error that the user can fix, reported in one line without a traceback."""


# --- Seeds ---


def seed_keys(args):
    """One PRNG key per seed, [K]."""
    seeds = jnp.uint32(args.seed) + jnp.arange(args.num_seeds, dtype=jnp.uint32)
    return jax.vmap(jax.random.key)(seeds)


def evaluation_keys(args):
    """PRNG keys [K] that only evaluations use."""
    # Training uses `split(key, n)`, which is `fold_in(key, i)` for i < n: never this key.
    return jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 1))(seed_keys(args))


def over_seeds(function, *trees):
    """Maps a function of one agent over pytrees [K, ...]; on a CPU, one agent at a time."""
    if jax.default_backend() == "cpu" or len(jax.tree.leaves(trees)[0]) == 1:
        return jax.lax.map(lambda agent: function(*agent), trees)
    return jax.vmap(function)(*trees)


def update_seeds(args, states):
    """One update of K agents; returns (states, metrics {tag: [K]})."""
    return over_seeds(functools.partial(update, args), states)


def evaluate_seeds(args, params):
    """Evaluates K agents; returns an `Evaluation` of [K, ...]."""
    return over_seeds(functools.partial(evaluate, args), params, evaluation_keys(args))


# --- Compiled functions ---


def float_inputs(args):
    """{name: number} of the float flags and the seed, the traced inputs of compiled functions."""
    floats = {name: np.float32(x) for name, x in vars(args).items() if isinstance(x, float)}
    return floats | {"seed": np.uint32(args.seed)}


def jit_function(args, function, level=2, **options):
    """Jits function(args, ...). The jitted function takes `float_inputs(args)` instead of `args`.

    `level` is LLVM's optimization level on a CPU. Level 2 compiles faster than the default, 3, and
    runs as fast. Level 0 suits a function that runs once. XLA_FLAGS takes precedence.
    """

    @functools.wraps(function)  # its name appears in profiles
    def with_floats(numbers, *inputs):
        return function(dataclasses.replace(args, **numbers), *inputs)

    name = "xla_backend_optimization_level"
    if jax.default_backend() == "cpu" and name not in os.environ.get("XLA_FLAGS", ""):
        options["compiler_options"] = {name: level}
    return jax.jit(with_floats, **options)


# --- Files ---


@contextlib.contextmanager
def user_errors(message, *kinds):
    """Turns exceptions of the given kinds into a `UserError` that begins with `message`."""
    try:
        yield
    except kinds as error:
        raise UserError(f"{message}: {getattr(error, 'strerror', None) or error}") from error


def write_file(path, content):
    """Writes bytes to a file, atomically."""
    temporary = path.with_suffix(".tmp")
    with user_errors(f"{path} cannot be written", OSError), contextlib.ExitStack() as stack:
        stack.callback(temporary.unlink, missing_ok=True)  # if writing fails
        temporary.write_bytes(content)
        temporary.replace(path)


def write_json(path, content):
    """Writes a dict as strict JSON: infinity is 1e999 and NaN is null."""
    text = json.dumps(content, indent=2).replace('": Infinity', '": 1e999')
    write_file(path, re.sub(r"\bNaN\b", "null", text).encode())


def named_arrays(state):
    """{name: array} of a tree, such as stats/running_return; PRNG keys become integers."""
    arrays = {}
    for path, x in jax.tree.leaves_with_path(state):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        arrays[name] = jax.random.key_data(x) if is_key else x
    return arrays


def save_checkpoint(run_dir, state):
    """Replaces checkpoint.npz of a run."""
    buffer = io.BytesIO()
    np.savez(buffer, **jax.device_get(named_arrays(state)))
    write_file(run_dir / "checkpoint.npz", buffer.getvalue())


def load_checkpoint(run_dir, like):
    """The arrays of a run's checkpoint, arranged as in `like`.

    `like` contains shapes and dtypes: a `TrainState`, or {"params": ...} for a part of one.
    Raises `UserError` if the file is damaged, an array is missing, or a shape or dtype differs.
    """
    path = pathlib.Path(run_dir, "checkpoint.npz")
    wanted, arrays = jax.eval_shape(named_arrays, like), []
    with user_errors(f"{path} cannot be read", Exception):  # damaged bytes raise nearly anything
        with np.load(path, allow_pickle=False) as file:
            saved = {name: file[name] for name in file if name in wanted}
    for keys, leaf in jax.tree.leaves_with_path(like):  # in the order of `like`
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        array, want = saved.get(name, np.empty(0)), wanted[name]
        if array.dtype.kind == "V" and array.itemsize == want.dtype.itemsize:  # V: bfloat16
            array = array.view(want.dtype)
        if (array.shape, array.dtype) != (want.shape, want.dtype):
            found = f"{array.dtype} {array.shape}" if name in saved else "missing"
            wish = f"{want.dtype} {want.shape}"
            raise UserError(f"{path} does not fit: {name} is {found}, not {wish}")
        if leaf.dtype != want.dtype:
            array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.zeros_like(leaf)))
        arrays.append(jnp.asarray(array))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def load_run(run_dir):
    """The (args, params) of a saved run; parameters have a leading axis of K seeds."""
    args = load_args(run_dir)
    params = jax.eval_shape(functools.partial(init_states, args)).params
    return args, load_checkpoint(run_dir, {"params": params})["params"]


def init_states(args):
    """The `TrainState` of K agents before their first update."""
    return over_seeds(functools.partial(init_train_state, args), seed_keys(args))


# --- Flags ---


def check_args(args):
    """Raises `UserError` for invalid flags. `counts` may name flags that you removed."""
    if not args.total_timesteps >= args.batch_size:
        raise UserError(f"--total-timesteps must be at least a batch, {args.batch_size} steps")
    counts = "num_seeds num_envs num_steps num_minibatches update_epochs log_interval"
    counts = f"{counts} checkpoint_interval eval_episodes train_episode_steps".split()
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if (name in counts and value < 1) or value != value:  # NaN
            raise UserError(f"{flag} must be a positive number")
        as_json = list(value) if isinstance(value, tuple) else value
        if json.loads(json.dumps(value, default=str)) != as_json:
            raise UserError(f"{flag}: args.json cannot store {value!r}")
    if args.batch_size % args.num_minibatches:
        raise UserError(f"--num-minibatches must divide the batch of {args.batch_size} samples")


def load_args(run_dir):
    """The `Args` saved in a run's args.json; raises `UserError`."""
    message = f"{run_dir} is not a run of this script; use the script that started it"
    with user_errors(message, OSError, ValueError, AttributeError, TypeError, UserError):
        saved = json.loads(pathlib.Path(run_dir, "args.json").read_text())
        args = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()})
        check_args(args)
    return args


def parse_args(words=None):
    """The `Args` of a command line; --resume and --eval take defaults from their run."""
    args = tyro.cli(Args, args=words)
    if args.resume is not None or args.eval is not None:
        saved = load_args(args.eval or args.resume)
        saved = dataclasses.replace(saved, resume=args.resume, eval=args.eval)
        args = tyro.cli(Args, args=words, default=saved)
        for name, old in vars(saved).items():
            if getattr(args, name) != old:
                print(f"--{name.replace('_', '-')}: {old} becomes {getattr(args, name)}")
        for name in ("env_id", "seed", "num_seeds", "num_envs", "num_steps"):
            if args.resume and getattr(args, name, None) != getattr(saved, name, None):
                raise UserError(f"--{name.replace('_', '-')} cannot change when a run is resumed")
    check_args(args)
    return args


def use_compilation_cache():
    """Stores compiled functions in ~/.cache/jax-ppo, unless JAX_COMPILATION_CACHE_DIR is set."""
    folder = os.path.expanduser("~/.cache/jax-ppo")
    if jax.config.jax_compilation_cache_dir is None and os.path.isabs(folder):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@contextlib.contextmanager
def stop_signals():
    """Yields a list that receives the first stop signal; a second one ends the process.

    Stop signals: SIGINT (Ctrl-C), SIGTERM, SIGHUP (closed terminal), SIGUSR1 (job scheduler).
    """
    received, handlers = [], {}

    def remember(number, frame):
        received.append(number)
        for n in handlers:
            signal.signal(n, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # not in the main thread
        for n in (getattr(signal, f"SIG{name}", None) for name in ("INT", "TERM", "HUP", "USR1")):
            if n is not None and signal.getsignal(n) != signal.SIG_IGN:  # nohup ignores SIGHUP
                handlers[n] = signal.signal(n, remember)
    try:
        yield received
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)


# --- Metrics ---


class Logger:
    """Writes metrics of K seeds to TensorBoard, one run per seed, and prints progress.

    Reading metrics stalls training, so they are queued for `log_interval` updates.
    """

    def __init__(self, args, run_dir, first_update):
        self.args, self.run_dir, self.first_update = args, run_dir, first_update
        self.queue = []  # (update, metrics {tag: [K]})
        self.failed = np.zeros(args.num_seeds, bool)  # seeds with non-finite gradients
        self.cause, self.train_return = None, math.nan
        seeds = range(args.seed, args.seed + args.num_seeds)
        self.runs = [f"seed_{seed}/" if args.num_seeds > 1 else "" for seed in seeds]
        self.files = []
        for run in self.runs:
            path = run_dir / run / f"events.out.tfevents.{time.time():.0f}.{os.getpid()}"
            path.parent.mkdir(exist_ok=True)
            file = open(path, "ab", buffering=0)  # a kill loses no written event
            self.files.append(file)
            self.add(file, first_update, file_version="brain.Event:2")
            # Makes TensorBoard drop what an interrupted run had logged after this update.
            self.add(file, first_update, 1, session_log={"status": "START"})
        self.start = time.perf_counter()  # `run_updates` adds pauses
        self.seconds = self.sps = None  # training time and speed of this process

    def add(self, file, update, offset=0, **content):
        step = update * self.args.batch_size + offset
        event = Event(wall_time=time.time(), step=step, **content)
        with user_errors(f"{file.name} cannot be written", OSError):
            RecordWriter(file).write(event.SerializeToString())

    def write(self, update, metrics):
        """Writes {tag: [K]} of an update, except non-finite values."""
        for k, (run, file) in enumerate(zip(self.runs, self.files)):
            values = {tag: float(x[k]) for tag, x in metrics.items() if np.isfinite(x[k])}
            entries = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
            self.add(file, update, summary={"value": entries})
            if self.args.track:
                named = {run + tag: value for tag, value in values.items()}
                sys.modules["wandb"].log(named, step=update * self.args.batch_size)

    def log(self, update, metrics):
        """Queues the metrics of an update and blocks until the previous update is done."""
        self.queue.append((update, metrics))
        jax.block_until_ready(self.queue[-2:-1])  # two updates in flight keep a device busy
        if len(self.queue) > (self.args.log_interval if self.seconds else 1):  # early line
            self.flush(keep=1)  # the device computes the newest update meanwhile

    def flush(self, keep=0):
        """Waits for all queued updates, except the newest `keep`, and writes their metrics."""
        count = len(self.queue) - keep
        rows, self.queue = jax.device_get(self.queue[:count]), self.queue[count:]
        if not rows:
            return
        update, metrics = rows[-1]
        self.seconds = time.perf_counter() - self.start
        steps = (update - self.first_update) * self.args.batch_size * self.args.num_seeds
        self.sps = steps / self.seconds
        metrics["charts/SPS"] = np.full(self.args.num_seeds, self.sps)
        for row in rows:
            self.write(*row)
            self.report_failures(*row)
        returns = metrics["charts/episodic_return"]
        returns = returns[np.isfinite(returns)]
        self.train_return = float(returns.mean()) if returns.size else math.nan
        done, left = update / self.args.num_updates, self.args.num_updates - update
        seconds_left = self.seconds * left / (update - self.first_update)
        line = f"{update * self.args.batch_size:,} steps ({done:.0%}), {seconds_left:.0f} s left"
        line += f", {self.sps:,.0f} SPS, return {self.train_return:.4g}"
        print(f"{line:<79}", end="\r" if sys.stdout.isatty() else "\n", flush=True)

    def report_failures(self, update, metrics):
        """Reports, once per seed, that gradients are not finite and what was NaN first."""
        failed = ~np.isfinite(metrics["losses/grad_norm"])
        for k in np.flatnonzero(failed & ~self.failed):
            sources = {"observations": "charts/value_mean", "rewards": "charts/reward_mean"}
            bad = [name for name, tag in sources.items() if not np.isfinite(metrics[tag][k])]
            self.cause = (bad + ["parameters; try a smaller --learning-rate"])[0]
            print(f"\nseed {self.args.seed + k} failed at update {update}: NaN in {self.cause}")
        self.failed = failed

    def close(self):
        """Ends the line of progress; closes the event files and the run of Weights & Biases."""
        print(end="\n" if sys.stdout.isatty() else "")
        for file in self.files:
            file.close()
        if self.args.track:
            sys.modules["wandb"].finish()


def start_tracking(args, run_dir):
    """Starts or resumes the run of Weights & Biases that `Logger` writes to."""
    with user_errors("--track", Exception):  # not installed, no login, no network
        import wandb

        owner = dict(project=args.wandb_project_name, entity=args.wandb_entity)
        wandb.init(**owner, id=run_dir.resolve().name, resume="allow", config=vars(args))


# --- Evaluations ---


def evaluation_scores(evaluation):
    """{name: [K]} of an `Evaluation` of [K, ...]; success of each kind of start."""
    *sums, success = jax.device_get(evaluation[:4])
    returns, lengths, info = jax.tree.map(lambda x: x[:, 0], sums)
    return {
        "eval_return_mean": returns.mean(1),
        "eval_return_std": returns.std(1),
        "eval_length_mean": lengths.mean(1),
        **{f"eval_success_rate_{kind}": won.mean(1) for kind, won in success.items()},
        **{f"eval_env_{name}": x.sum(1) / lengths.sum(1) for name, x in info.items()},  # per step
    }


def evaluation_summary(args, evaluation):
    """Prints an evaluation; returns its entries of summary.json: means and values per seed."""
    scores = evaluation_scores(evaluation)
    means = {name: float(x.mean()) for name, x in scores.items()}
    text = ", ".join(f"{name[5:]} {x:.4g}" for name, x in means.items())  # without "eval_"
    print(f"{args.eval_episodes} {args.eval_mode} episodes: {text}", flush=True)
    setting = {"eval_episodes": args.eval_episodes, "eval_mode": args.eval_mode}
    return {**setting, **means, "per_seed": {name: x.tolist() for name, x in scores.items()}}


def try_video(args, evaluation, run_dir, name):
    """Records a video as <videos_dir>/<run_name>/<name>. Prints errors as warnings."""
    path = pathlib.Path(args.videos_dir, run_dir.resolve().name, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"video: {record_video(args, evaluation, path)}")
    except Exception as error:
        print(f"warning: no video: {type(error).__name__}: {error}", file=sys.stderr)


def evaluate_run(args):
    """`--eval`: writes the run's eval.json and a video."""
    _, params = load_run(args.eval)
    evaluation = jit_function(args, evaluate_seeds)(float_inputs(args), params)
    summary = {"args": vars(args), **evaluation_summary(args, evaluation)}
    write_json(pathlib.Path(args.eval, "eval.json"), summary)
    try_video(args, evaluation, pathlib.Path(args.eval), "eval")


# --- Main ---


def start_run(args, run_dir):
    """Creates or loads the state of a run and compiles its update.

    Returns the state and two functions, run_update(state) and run_evaluation(params). Raises
    `UserError` for a finished run.
    """
    numbers = float_inputs(args)
    init = jit_function(args, init_states, level=0)
    run_update = jit_function(args, update_seeds, donate_argnums=1)
    run_evaluation = jit_function(args, evaluate_seeds)
    like = jax.eval_shape(init, numbers)
    # Without checkpoint and summary, the run is new or was killed before it first saved.
    saved = any((run_dir / name).exists() for name in ("checkpoint.npz", "summary.json"))
    state = load_checkpoint(run_dir, like) if saved else init(numbers)
    done = jax.device_get(state.update)[0] >= args.num_updates
    if done and (run_dir / "summary.json").exists():
        raise UserError(f"{run_dir} is finished: a larger --total-timesteps continues it")
    # Tracing finds errors in the evaluation before the update is compiled.
    traced = run_update.trace(numbers, like)
    run_evaluation.trace(numbers, like.params)
    if args.track:
        start_tracking(args, run_dir)
    with user_errors(f"{run_dir} cannot be written", OSError):
        run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    write_json(run_dir / "args.json", vars(args) | {"resume": None})
    (run_dir / "summary.json").unlink(missing_ok=True)
    if not jax.config.jax_disable_jit:  # JAX_DISABLE_JIT is for debugging
        run_update = traced.lower().compile()
    return state, functools.partial(run_update, numbers), functools.partial(run_evaluation, numbers)


def run_updates(args, logger, state, run_update, run_evaluation):
    """Trains until the last update, a signal, or the failure of all seeds.

    Evaluates and saves in between; returns (state, updates done, received signals).
    """
    done = logger.first_update
    with stop_signals() as signals:
        while done < args.num_updates and not signals and not logger.failed.all():
            state, metrics = run_update(state)  # asynchronous
            done += 1
            logger.log(done, metrics)
            save_due = done % args.checkpoint_interval == 0
            eval_due = args.eval_interval > 0 and done % args.eval_interval == 0
            if done == args.num_updates or not (save_due or eval_due):
                continue
            logger.flush()
            pause = time.perf_counter()
            if eval_due:
                evaluation = run_evaluation(state.params)
                score = evaluation_scores(evaluation)["eval_return_mean"]
                logger.write(done, {"eval/episodic_return": score})
            if eval_due and args.capture_video:
                try_video(args, evaluation, logger.run_dir, f"step_{done * args.batch_size}")
            if save_due and not logger.failed.all():
                save_checkpoint(logger.run_dir, state)
            logger.start += time.perf_counter() - pause
        logger.flush()
    return state, done, signals


def finish_run(args, logger, done, evaluation, begin, compile_seconds):
    """Prints the result, logs the last evaluation and writes summary.json."""
    print(f"run: {logger.run_dir}")
    summary = evaluation_summary(args, evaluation)
    logger.write(done, {"eval/episodic_return": np.array(summary["per_seed"]["eval_return_mean"])})
    train_return = logger.train_return
    print(f"last episodes of training (sampled actions): return_mean {train_return:.4g}")
    far_worse = summary["eval_return_mean"] < train_return - abs(train_return) / 2
    if far_worse and args.eval_mode == "greedy":
        print("greedy actions are far worse: try --eval-mode sampled")
    summary = {
        "args": vars(args) | {"resume": None},
        "total_timesteps": done * args.batch_size,
        "failed_seeds": (args.seed + np.flatnonzero(logger.failed)).tolist(),
        "train_return_mean": train_return,
        **summary,
        "sps": logger.sps,
        "compile_seconds": compile_seconds,
        "train_seconds": logger.seconds,
        "wall_seconds": time.time() - begin,  # without imports and the last video
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
    }
    write_json(logger.run_dir / "summary.json", summary)


def main(words=None):
    """Trains, resumes or evaluates a run; raises `UserError`."""
    begin = time.time()
    args = parse_args(words)
    use_compilation_cache()
    if args.eval is not None:
        return evaluate_run(args)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{begin:.0f}_{os.urandom(3).hex()}"
    new_dir = pathlib.Path(args.runs_dir, re.sub(r"[^\w.-]", "-", name))
    run_dir = new_dir if args.resume is None else pathlib.Path(args.resume)

    start = time.perf_counter()
    state, run_update, run_evaluation = start_run(args, run_dir)
    done = int(jax.device_get(state.update)[0])
    compile_seconds = time.perf_counter() - start
    print(f"{run_dir}: compiled in {compile_seconds:.1f} s", flush=True)
    with contextlib.closing(Logger(args, run_dir, done)) as logger:
        state, done, signals = run_updates(args, logger, state, run_update, run_evaluation)
        if logger.failed.all():
            raise UserError(f"all seeds have failed: NaN in {logger.cause}")
        save_checkpoint(run_dir, state)
        if signals:
            print(f"interrupted at update {done}; to resume: --resume {run_dir}")
            sys.exit(128 + signals[0])
        evaluation = run_evaluation(state.params)
        finish_run(args, logger, done, evaluation, begin, compile_seconds)
    try_video(args, evaluation, run_dir, f"step_{done * args.batch_size}")


if __name__ == "__main__":
    try:
        main()
    except (UserError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, UserError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sys.exit(f"error: {error}")
