# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20", "pillow>=11.0"]
# ///
"""PPO on CartPole-v1 in one file and one XLA program: environment, networks, Adam, GAE and the update in pure JAX.

    python ppo_cartpole_jax.py                            # solves CartPole-v1 in about 10 s on two CPU cores
    python ppo_cartpole_jax.py --num-seeds 8              # eight independent agents in the same program
    python ppo_cartpole_jax.py --resume runs/<run_name>   # go on after an interruption, bit for bit

The classic setting, for comparisons (its advantages are normalised per minibatch):

    python ppo_cartpole_jax.py --num-steps 128 --learning-rate 2.5e-4 --no-anneal-lr --gae-lambda 0.95 --norm-adv \
        --clip-coef 0.2 --clip-vloss --ent-coef 0.01 --adam-eps 1e-8

Algorithm: PPO (https://arxiv.org/abs/1707.06347) with the details of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.
Time limits are not terminations: a truncated episode is bootstrapped with the value of its true last observation.

Arrays put the batch LAST (features first, contiguous batch): that layout is faster for small networks on a CPU.
Axes in shape comments: K seeds, T steps, N environments (of one device), B = T * N batch, M minibatch,
O observation size, A actions, E evaluation episodes.
"""

import time

PROCESS_START = time.time()  # before the heavy imports: `wall_seconds` counts them

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image, ImageDraw
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer

SCRIPT = "ppo_cartpole_jax"
INTEGRATORS = ("euler", "semi-implicit")
VIDEO_FORMAT = "gif"
AXIS = "devices"  # mesh axis over which the environments are sharded


# ======================================================================================================================
# Arguments
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Args:
    """PPO on pure-JAX CartPole-v1."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """independent agents trained at once, with seeds seed .. seed + num_seeds - 1"""
    num_devices: int = 1
    """devices over which the environments are sharded (a CPU shows as N of them with
    XLA_FLAGS=--xla_force_host_platform_device_count=N)"""
    exp_name: str = SCRIPT
    """name of the experiment, part of the run's name"""
    runs_dir: str = "runs"
    """folder that receives <run_name>/ with TensorBoard events, args.json, checkpoints and summary.json"""
    videos_dir: str = "videos"
    """folder that receives <run_name>/ with videos"""
    log_interval: int = 10
    """updates between two log entries, fewer updates where a checkpoint or video is due"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 100
    """greedy episodes after training, each in an environment of its own"""
    capture_video: bool = False
    """also evaluate and record the policy during training, not only at its end"""
    video_interval: int = 50
    """updates between two videos"""
    resume: str | None = None
    """folder of a run to continue with its saved flags; a flag given now counts if it differs from its default"""
    eval: str | None = None
    """folder of a run to evaluate, with the evaluation flags given now, no others; writes eval.json and a video"""
    track: bool = False
    """also log to Weights & Biases (needs the wandb package)"""
    wandb_project: str = "single-file-jax-ppo"
    """Weights & Biases project"""

    # Environment
    env_id: str = "CartPole-v1"
    """the only environment of this script"""
    kinematics_integrator: str = "euler"
    """whether positions advance with the old (euler, Gymnasium's default) or the new (semi-implicit) velocities"""
    num_envs: int = 64
    """parallel environments, over all devices, of each agent"""

    # Algorithm
    total_timesteps: int = 500_000
    """environment steps of each agent, rounded down to whole updates"""
    num_steps: int = 32
    """steps per environment and update"""
    learning_rate: float = 3e-3
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the batch per update"""
    norm_adv: bool = False
    """normalise advantages in each minibatch; once CartPole is solved that would only amplify noise"""
    clip_coef: float = 0.1
    """clipping range of the probability ratio"""
    clip_vloss: bool = False
    """clip the value loss too, by the same range"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this global norm"""
    target_kl: float | None = None
    """skip an update's remaining epochs once the mean KL divergence of an epoch exceeds this"""
    adam_eps: float = 1e-5
    """Adam's epsilon"""

    def __post_init__(self):
        """Raises UsageError with a message a person can act on. Whole numbers but the seed start at 1, others at 0."""
        for name, kind in Args.__annotations__.items():
            value, low = getattr(self, name), 1 if kind is int and name != "seed" else 0
            _check(isinstance(value, kind | int if "float" in str(kind) else kind), f"--{name} is of the wrong type")
            if isinstance(value, int | float):
                _check(low <= value < math.inf, f"--{name} must be a finite number from {low} on, not {value}")
        for name in "learning_rate max_grad_norm adam_eps".split():
            _check(getattr(self, name) > 0, f"--{name} must be positive")
        _check(max(self.gamma, self.gae_lambda) <= 1, "--gamma and --gae_lambda must not be more than 1")
        _check(self.env_id == "CartPole-v1", f"--env_id must be CartPole-v1, not {self.env_id}")
        _check(self.kinematics_integrator in INTEGRATORS, f"--kinematics_integrator must be one of {INTEGRATORS}")
        _check(self.seed <= 2**32 - self.num_seeds, f"--seed {self.seed}: all seeds must lie in [0, 2**32)")
        _check(re.fullmatch(r"\w[\w.-]*", self.exp_name, re.A), "--exp_name must consist of letters, digits and ._-")
        _check("" not in (self.resume, self.eval) and None in (self.resume, self.eval), "--resume, --eval: one folder")
        if self.resume:
            return  # `merge_args` checks the rest, given the flags of the saved run
        _check(self.num_envs % self.num_devices == 0, f"--num_devices must divide --num_envs {self.num_envs}")
        share = self.batch_size // self.num_devices
        _check(share % self.num_minibatches == 0, f"--num_minibatches must divide a device's batch, {share} steps")
        _check(self.num_updates > 0, f"--total_timesteps must be at least a batch, {self.batch_size} steps")

    @property
    def batch_size(self) -> int:
        """Environment steps of one update."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return self.total_timesteps // self.batch_size


class UsageError(ValueError):
    """Arguments that cannot work, with a message for the user."""


def _check(condition, message, error=UsageError):
    if not condition:
        raise error(re.sub(r"(^| )--\w+", lambda flag: flag[0].replace("_", "-"), message))


# ======================================================================================================================
# Environment
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class CartPole:
    """Gymnasium's CartPole-v1 (Barto, Sutton & Anderson, 1983), for one or many at once: batch axes come last.

    | what        | value                                                                              |
    | ----------- | ---------------------------------------------------------------------------------- |
    | state       | float32 [4]: cart position m, cart velocity m/s, pole angle rad, pole velocity rad/s |
    | observation | the state                                                                          |
    | action      | 0 pushes the cart to the left, 1 to the right                                      |
    | reward      | 1 for every step                                                                   |
    | terminated  | cart further than 2.4 m from the centre, or pole more than 12 degrees from upright |
    | truncated   | by the caller, after `max_episode_steps`                                           |
    | start       | uniform in [-0.05, 0.05]^4                                                         |
    """

    gravity: float = 9.8  # m/s^2
    mass_cart: float = 1.0  # kg
    mass_pole: float = 0.1  # kg
    half_length: float = 0.5  # m, pivot to the pole's centre of mass
    force: float = 10.0  # N
    tau: float = 0.02  # s per step
    x_limit: float = 2.4  # m
    theta_limit: float = 12 * math.pi / 180  # rad
    max_episode_steps: int = 500
    integrator: str = "euler"
    obs_size = 4
    num_actions = 2

    def reset(self, key, shape=()):
        """Start states [4, *shape]."""
        return jax.random.uniform(key, (4, *shape), minval=-0.05, maxval=0.05)

    def step(self, state, action):
        """Advances states [4, ...] by tau; returns (states, rewards [...], terminated [...])."""
        x, x_dot, theta, theta_dot = state
        force = jnp.where(action == 1, self.force, -self.force)
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        total_mass = self.mass_cart + self.mass_pole
        push = (force + self.mass_pole * self.half_length * theta_dot**2 * sin) / total_mass
        effective_length = self.half_length * (4 / 3 - self.mass_pole * cos**2 / total_mass)
        theta_acc = (self.gravity * sin - cos * push) / effective_length
        x_acc = push - self.mass_pole * self.half_length * theta_acc * cos / total_mass
        new_x_dot, new_theta_dot = x_dot + self.tau * x_acc, theta_dot + self.tau * theta_acc
        if self.integrator == "semi-implicit":
            x_dot, theta_dot = new_x_dot, new_theta_dot
        x, theta = x + self.tau * x_dot, theta + self.tau * theta_dot
        terminated = (jnp.abs(x) > self.x_limit) | (jnp.abs(theta) > self.theta_limit)
        return jnp.stack([x, new_x_dot, theta, new_theta_dot]), jnp.ones_like(x), terminated

    def observe(self, state):
        """Observations [4, ...] of states [4, ...]."""
        return state

    def render(self, state, width=600, height=400):
        """Draws a state [4] to scale on the host; uint8 [height, width, 3]."""
        x, _, theta, _ = (float(v) for v in state)
        scale, axle_y = width / (2.2 * self.x_limit), 0.75 * height  # pixels per metre
        axle_x, length = width / 2 + x * scale, 2 * self.half_length * scale
        image = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(image)
        box = lambda x, y: [axle_x - x * scale, axle_y - y * scale, axle_x + x * scale, axle_y + y * scale]
        draw.line([0, axle_y, width, axle_y], fill="black")
        draw.rectangle(box(0.2, 0.12), fill=(40, 40, 40))
        tip = axle_x + length * math.sin(theta), axle_y - length * math.cos(theta)
        draw.line([axle_x, axle_y, *tip], fill=(204, 153, 102), width=max(2, round(0.08 * scale)))
        draw.ellipse(box(0.04, 0.04), fill=(130, 130, 255))
        return np.asarray(image)


def make_env(args):
    return CartPole(integrator=args.kinematics_integrator)


# ======================================================================================================================
# Networks
# ======================================================================================================================


def init_mlp(key, sizes, head_gain):
    """Orthogonal weights [out, in] with gain sqrt(2), `head_gain` for the last layer; zero biases [out, 1]."""
    gains, params = [math.sqrt(2)] * (len(sizes) - 2) + [head_gain], {}
    for i, layer_key in enumerate(jax.random.split(key, len(gains)), start=1):
        params[f"w{i}"] = jax.nn.initializers.orthogonal(gains[i - 1])(layer_key, (sizes[i], sizes[i - 1]))
        params[f"b{i}"] = jnp.zeros((sizes[i], 1))
    return params


def mlp(params, x):
    """Two hidden tanh layers and a linear head: [in, M] -> [out, M]."""
    x = jnp.tanh(params["w1"] @ x + params["b1"])
    x = jnp.tanh(params["w2"] @ x + params["b2"])
    return params["w3"] @ x + params["b3"]


def init_params(key, env):
    """Separate actor and critic; a dict of dicts of arrays."""
    actor_key, critic_key = jax.random.split(key)
    actor = init_mlp(actor_key, (env.obs_size, 64, 64, env.num_actions), head_gain=0.01)
    critic = init_mlp(critic_key, (env.obs_size, 64, 64, 1), head_gain=1.0)
    return {"actor": actor, "critic": critic}


def policy(params, obs):
    """Action distribution of observations [O, M]: logits [2, M]."""
    return mlp(params["actor"], obs)


def sample_noise(key, shape):
    """The random numbers that `sample_action` needs for this many actions: two actions take one uniform each."""
    return jax.random.uniform(key, shape)


def sample_action(logits, noise):
    """Actions [M] drawn from a distribution."""
    return (noise < jax.nn.sigmoid(logits[1] - logits[0])).astype(jnp.int32)


def greedy_action(logits):
    """The most likely actions [M]."""
    return logits.argmax(0)


def action_logprob(logits, action):
    """Log-probabilities [M] of actions."""
    return jnp.where(action == 1, *jax.nn.log_softmax(logits, axis=0)[::-1])


def entropy(logits):
    """Mean entropy of a distribution."""
    logprobs = jax.nn.log_softmax(logits, axis=0)
    return -(jnp.exp(logprobs) * logprobs).sum(0).mean()


def value(params, obs):
    """State values [M] of observations [O, M]."""
    return mlp(params["critic"], obs)[0]


# ======================================================================================================================
# Optimizer
# ======================================================================================================================


class AdamState(NamedTuple):
    """First and second moments, trees like the parameters, and the number of steps taken."""

    m: dict
    v: dict
    count: jax.Array


def adam_init(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return AdamState(zeros, zeros, jnp.int32(0))


def adam_update(args, grads, state, params, learning_rate, beta1=0.9, beta2=0.999):
    """Clips the gradients to a global norm, then one step of Adam (https://arxiv.org/abs/1412.6980).

    Returns (params, state, norm of the gradients before clipping).
    """
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, args.max_grad_norm / norm)  # norm 0 gives min(1, inf) = 1
    count = state.count + 1
    m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * (g * scale), state.m, grads)
    v = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * (g * scale) ** 2, state.v, grads)
    m_scale, v_scale = 1 / (1 - beta1**count), 1 / (1 - beta2**count)
    step = lambda p, m, v: p - learning_rate * (m * m_scale) / (jnp.sqrt(v * v_scale) + args.adam_eps)
    return jax.tree.map(step, params, m, v), AdamState(m, v, count), norm


# ======================================================================================================================
# PPO
# ======================================================================================================================


class Episodes(NamedTuple):
    """Running and last finished episode of every environment, each [N].

    Statistics are means over the environments' last finished episodes, so a short episode counts as much as a long one.
    """

    ret: jax.Array  # return of the running episode
    length: jax.Array  # its length
    last_ret: jax.Array  # of the last finished one, NaN before the first
    last_length: jax.Array


class Trajectory(NamedTuple):
    """T steps of N environments. Both flags may be set at once, as in Gymnasium."""

    obs: jax.Array  # [T, O, N]
    action: jax.Array  # [T, N]
    logprob: jax.Array  # [T, N]
    reward: jax.Array  # [T, N]
    terminated: jax.Array  # [T, N]
    truncated: jax.Array  # [T, N]
    next_obs: jax.Array  # [T, O, N], successors before any reset


class Batch(NamedTuple):
    """What the loss needs."""

    obs: jax.Array  # [O, M]
    action: jax.Array  # [M]
    logprob: jax.Array  # [M]
    advantage: jax.Array  # [M]
    ret: jax.Array  # [M], the critic's target
    value: jax.Array  # [M]


def rollout(args, env, params, env_state, episodes, key):
    """Takes T steps in N environments that reset themselves; returns (env_state, episodes, trajectory)."""
    action_key, reset_key = jax.random.split(key)
    shape = args.num_steps, len(episodes.length)
    # All random numbers in two calls: far cheaper than a key per step and environment.
    random = sample_noise(action_key, shape), env.reset(reset_key, shape).swapaxes(0, 1)  # [T, N], [T, 4, N]

    def step(carry, random):
        (env_state, episodes), (noise, reset_state) = carry, random
        obs = env.observe(env_state)
        dist = policy(params, obs)
        action = sample_action(dist, noise)
        logprob = action_logprob(dist, action)
        next_state, reward, terminated = env.step(env_state, action)
        ret, length = episodes.ret + reward, episodes.length + 1
        truncated = length >= env.max_episode_steps
        done = terminated | truncated
        ended, running = (0.0, 0, ret, length), (ret, length, episodes.last_ret, episodes.last_length)
        episodes = Episodes(*(jnp.where(done, a, b) for a, b in zip(ended, running)))
        next_obs, env_state = env.observe(next_state), jnp.where(done, reset_state, next_state)
        return (env_state, episodes), Trajectory(obs, action, logprob, reward, terminated, truncated, next_obs)

    (env_state, episodes), trajectory = jax.lax.scan(step, (env_state, episodes), random)
    return env_state, episodes, trajectory


def trajectory_values(env, params, trajectory):
    """Values [T, N] of the observations and of their true successors, also where an episode was truncated."""
    obs = jnp.concatenate([trajectory.obs, trajectory.next_obs[-1:]]).swapaxes(0, 1)  # [O, T + 1, N]
    values = value(params, obs.reshape(len(obs), -1)).reshape(obs.shape[1:])
    next_values = values[1:]
    # An environment is truncated at most once in max_episode_steps steps: gather that one observation and value it.
    for start in range(0, len(next_values), env.max_episode_steps):
        window = slice(start, start + env.max_episode_steps)
        truncated = trajectory.truncated[window]
        final_obs = jnp.take_along_axis(trajectory.next_obs[window], truncated.argmax(0)[None, None], axis=0)[0]
        next_values = next_values.at[window].set(jnp.where(truncated, value(params, final_obs), next_values[window]))
    return values[:-1], next_values


def compute_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438); all arrays [T, N].

    `next_values` are the values of the true successors. A termination has no successor value; both a termination and
    a truncation end the recursion. Returns the advantages; the critic's targets are advantages + values.
    """
    deltas = rewards + gamma * next_values * (1 - terminated) - values
    decay = gamma * gae_lambda * (1 - (terminated | truncated))

    def step(advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros_like(deltas[0]), (deltas, decay), reverse=True)[1]


def ppo_loss(params, batch, args):
    """Clipped surrogate, (clipped) value loss and entropy bonus of a minibatch; returns (loss, metrics)."""
    dist = policy(params, batch.obs)
    log_ratio = action_logprob(dist, batch.action) - batch.logprob
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(ratio * batch.advantage, clipped_ratio * batch.advantage).mean()

    new_value = value(params, batch.obs)
    value_error = (new_value - batch.ret) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + jnp.clip(new_value - batch.value, -args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (clipped_value - batch.ret) ** 2)
    value_loss = 0.5 * value_error.mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy(dist)
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy(dist),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),  # http://joschu.net/blog/kl-approx.html
        "losses/old_approx_kl": -log_ratio.mean(),
        "losses/clipfrac": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
    }


def loss_gradient(params, batch, args):
    """(metrics, gradients) of `ppo_loss`; on a CPU in blocks of samples whose activations fit into its cache."""
    gradient = lambda block: jax.grad(ppo_loss, has_aux=True)(params, block, args)[::-1]
    size = batch.action.size
    num_blocks = max(n for n in range(1, size // 4096 + 2) if size % n == 0) if jax.default_backend() == "cpu" else 1
    blocks = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], num_blocks, -1), -2, 0), batch)
    return jax.tree.map(lambda x: x.mean(0), jax.lax.map(gradient, blocks))


def random_permutation(key, n):
    """A pseudo-random permutation of range(n), without the sorts that make `jax.random.permutation` slow.

    A Feistel network is a bijection on the index bits whatever its round function is; where n is no power of two,
    indices that leave the range walk on along their cycle until they are back in it (Black & Rogaway, 2002).
    """
    bits = max(8, (n - 1).bit_length())  # narrower halves have too few round functions to be unbiased
    low, high = bits // 2, bits - bits // 2  # widths of the two halves
    round_keys = jax.random.bits(key, (6, 2), jnp.uint32)

    def mix(half, round_key, width):  # the top bits of a multiplicative hash
        x = (half ^ round_key) * jnp.uint32(0x9E3779B1)
        x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
        return (x ^ (x >> 13)) >> (32 - width)

    def feistel(index):
        left, right = index >> low, index & ((1 << low) - 1)
        for left_key, right_key in round_keys:
            left = left ^ mix(right, left_key, high)
            right = right ^ mix(left, right_key, low)
        return (left << low) | right

    index = feistel(jnp.arange(n, dtype=jnp.uint32))
    return jax.lax.while_loop(lambda i: (i >= n).any(), lambda i: jnp.where(i < n, i, feistel(i)), index)


def update_epochs(args, params, opt_state, batch, learning_rate, key):
    """Passes over a batch of B samples in shuffled minibatches; returns (params, opt_state, metrics)."""
    # One packed array [B, O + 5]: gathering its rows is far cheaper than gathering six arrays.
    packed = jnp.concatenate([batch.obs, jnp.stack([jnp.asarray(x, jnp.float32) for x in batch[1:]])]).T

    def minibatch_step(carry, minibatch):
        params, opt_state = carry
        batch = Batch(minibatch.T[:-5], *minibatch.T[-5:])  # features first again
        if args.norm_adv:
            advantages = jax.lax.all_gather(batch.advantage, AXIS)  # of all devices
            batch = batch._replace(advantage=(batch.advantage - advantages.mean()) / (advantages.std() + 1e-8))
        metrics, grads = jax.lax.pmean(loss_gradient(params, batch, args), AXIS)
        params, opt_state, norm = adam_update(args, grads, opt_state, params, learning_rate)
        return (params, opt_state), {**metrics, "losses/grad_norm": norm}

    def epoch(carry, key):
        params, opt_state, active = carry
        order = random_permutation(key, len(packed)).reshape(args.num_minibatches, -1)
        new, metrics = jax.lax.scan(minibatch_step, (params, opt_state), packed[order])
        metrics, was_active = jax.tree.map(jnp.mean, metrics), active
        if args.target_kl is not None:
            new = jax.tree.map(lambda new, old: jnp.where(active, new, old), new, (params, opt_state))
            active = active & (metrics["losses/approx_kl"] <= args.target_kl)
        return (*new, active), (metrics, was_active)

    keys = jax.random.split(key, args.update_epochs)
    (params, opt_state, _), (metrics, taken) = jax.lax.scan(epoch, (params, opt_state, jnp.bool_(True)), keys)
    return params, opt_state, jax.tree.map(lambda x: x.mean(where=taken), metrics)


# ======================================================================================================================
# Training step
# ======================================================================================================================


class TrainState(NamedTuple):
    """Everything training needs; checkpoints hold exactly this. Every leaf has a leading seed axis K."""

    params: dict
    opt_state: AdamState
    env_state: jax.Array  # [K, 4, N]
    episodes: Episodes  # of [K, N]
    key: jax.Array  # [K, 2], a PRNG key's data: a checkpoint is plain arrays
    update: jax.Array  # [K], updates done


def seed_keys(args):
    """One PRNG key per agent, [K]."""
    return jax.vmap(jax.random.key)(jnp.uint32(args.seed) + jnp.arange(args.num_seeds, dtype=jnp.uint32))


# Runs once: compiling it quickly matters more than running it fast.
@jax.jit(static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def init_train_state(args, key):
    """The first `TrainState` of the agents with keys [K], usually `seed_keys(args)`."""
    env = make_env(args)

    def init(key):
        params_key, reset_key, key = jax.random.split(key, 3)
        params = init_params(params_key, env)
        env_state = env.reset(reset_key, (args.num_envs,))
        zeros, none = jnp.zeros(args.num_envs), jnp.full(args.num_envs, jnp.nan)
        episodes = Episodes(zeros, zeros.astype(jnp.int32), none, none)
        return TrainState(params, adam_init(params), env_state, episodes, jax.random.key_data(key), jnp.int32(0))

    return jax.lax.map(init, key)  # not vmap: jaxlib 0.10's batched QR on a CPU can deadlock its own thread pool


def update(args, state):
    """One PPO update of one agent on one device of the mesh: rollout, GAE, epochs of minibatches."""
    env = make_env(args)
    key, rollout_key, epochs_key = jax.random.split(jax.random.wrap_key_data(state.key), 3)
    rollout_key, epochs_key = (jax.random.fold_in(k, jax.lax.axis_index(AXIS)) for k in (rollout_key, epochs_key))
    env_state, episodes, traj = rollout(args, env, state.params, state.env_state, state.episodes, rollout_key)
    values, next_values = trajectory_values(env, state.params, traj)
    flags = traj.terminated, traj.truncated
    advantages = compute_gae(traj.reward, values, next_values, *flags, args.gamma, args.gae_lambda)
    flat = (x.reshape(-1) for x in (traj.action, traj.logprob, advantages, advantages + values, values))
    batch = Batch(traj.obs.swapaxes(0, 1).reshape(env.obs_size, -1), *flat)
    learning_rate = args.learning_rate * (1 - state.update / float(args.num_updates) if args.anneal_lr else 1.0)
    params, opt_state, metrics = update_epochs(args, state.params, state.opt_state, batch, learning_rate, epochs_key)
    all_devices = lambda x: jax.lax.all_gather(x, AXIS)
    metrics |= {
        "losses/explained_variance": 1 - all_devices(batch.advantage).var() / all_devices(batch.ret).var(),
        "charts/learning_rate": jnp.float32(learning_rate),
        "charts/episodic_return": jnp.nanmean(all_devices(episodes.last_ret)),  # NaN before the first episode ends
        "charts/episodic_length": jnp.nanmean(all_devices(episodes.last_length)),
    }
    return TrainState(params, opt_state, env_state, episodes, jax.random.key_data(key), state.update + 1), metrics


def over_seeds(function):
    """Maps a function of one agent over trees with a leading axis K; in turn on a CPU, where batching is slow."""
    in_turn = lambda *trees: jax.lax.map(lambda agent: function(*agent), trees)
    return in_turn if jax.default_backend() == "cpu" else jax.vmap(function)


def make_mesh(args):
    """`num_devices` devices of every process, in the order of the processes."""
    devices = [jax.local_devices(process_index=p)[: args.num_devices] for p in range(jax.process_count())]
    return jax.sharding.Mesh(np.array(devices).ravel(), (AXIS,))


# How a `TrainState` is laid out over the mesh: the last axis, N, of what belongs to the environments.
STATE_SPECS = TrainState(*[jax.P()] * 6)._replace(env_state=jax.P(None, None, AXIS), episodes=jax.P(None, AXIS))


def shard_state(args, state):
    """Spreads a `TrainState` over the mesh."""
    return jax.device_put(state, jax.tree.map(lambda spec: jax.NamedSharding(make_mesh(args), spec), STATE_SPECS))


def make_train_step(args):
    """Returns the jitted `train_step(state) -> (state, metrics)`: one PPO update of K agents, metrics of [K]."""
    layout = dict(mesh=make_mesh(args), in_specs=(STATE_SPECS,), out_specs=(STATE_SPECS, jax.P()))
    # check_vma=False: else shard_map itself would add up the gradients over the devices, before the explicit pmean.
    return jax.jit(jax.shard_map(over_seeds(lambda state: update(args, state)), **layout, check_vma=False))


def make_train_chunk(args):
    """Returns the jitted `train_chunk(state, n) -> (state, metrics of the last)`: n updates in one dispatch."""
    train_step = make_train_step(args)

    def train_chunk(state, num_updates):
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(train_step, state)[1])
        return jax.lax.fori_loop(0, num_updates, lambda _, carry: train_step(carry[0]), (state, metrics))

    return jax.jit(train_chunk, donate_argnums=0)


# ======================================================================================================================
# Evaluation, video, checkpoints, logging
# ======================================================================================================================


@jax.jit(static_argnums=0)
def evaluate(args, params, key):
    """Plays one greedy episode in each of E fresh environments per agent.

    Takes parameters and keys with a leading axis K. Gives returns [K, E], lengths [K, E] and the states [K, L, 4] of
    the first episode, frozen after its end (L = longest possible episode + 1).
    """
    env = make_env(args)

    def play(params, key):
        first = env.reset(key, (args.eval_episodes,))

        def step(carry, _):
            state, ret, length, running = carry
            action = greedy_action(policy(params, env.observe(state)))
            next_state, reward, terminated = env.step(state, action)
            state = jnp.where(running, next_state, state)
            return (state, ret + reward * running, length + running, running & ~terminated), state[:, 0]

        zeros = jnp.zeros(args.eval_episodes)
        carry = first, zeros, zeros.astype(jnp.int32), zeros == 0
        (_, ret, length, _), states = jax.lax.scan(step, carry, length=env.max_episode_steps)
        return ret, length, jnp.concatenate([first[None, :, 0], states])

    return over_seeds(play)(params, key)


def evaluation_keys(args):
    """Keys [K] that no training uses, the same for every evaluation of a run."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 1))(seed_keys(args))


def summarize_evaluation(args, evaluation, alive):
    """What summary.json and eval.json say of an evaluation: over agents alive, and lists with one entry per agent."""
    returns, lengths = (np.asarray(x, float) for x in evaluation[:2])  # [K, E]
    statistics = lambda agents, axis=None: {
        "eval_return_mean": returns[agents].mean(axis).tolist(),
        "eval_return_std": returns[agents].std(axis).tolist(),
        "eval_length_mean": lengths[agents].mean(axis).tolist(),
    }
    overall = {"eval_episodes": args.eval_episodes, "eval_mode": "greedy"} | statistics(alive)
    return overall | {"eval_return_ci95": bootstrap_interval(returns[alive].mean(1)), "per_seed": statistics(..., 1)}


def bootstrap_interval(values, samples=10_000):
    """95% bootstrap interval [low, high] of the mean of values [K]; None for a single one."""
    means = np.random.default_rng(0).choice(values, (samples, len(values))).mean(1)
    return np.percentile(means, [2.5, 97.5]).tolist() if len(values) > 1 else None


def record_video(args, path, evaluation):
    """Writes the first agent's first evaluation episode as a GIF of 25 frames a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    env = make_env(args)
    _, lengths, states = (np.asarray(x[0]) for x in evaluation)
    frames = [Image.fromarray(env.render(state, 300, 200)).quantize(16) for state in states[: lengths[0] + 1 : 2]]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40, loop=0)


def assess(args, state, video):
    """Evaluates all agents and records the first one; returns the summary."""
    evaluation = evaluate(args, state.params, evaluation_keys(args))
    record_video(args, video, evaluation)
    alive = [all(np.isfinite(x[k]).all() for x in jax.tree.leaves(state.params)) for k in range(args.num_seeds)]
    return summarize_evaluation(args, evaluation, np.array(alive))


class RunError(Exception):
    """A failure with a message for the user."""


def flatten_state(state):
    """{tree path: array} of a `TrainState`, in the order of its leaves."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(state)}


def save_checkpoint(run_dir, state, num_kept=3):
    """Writes checkpoints/<update>.npz atomically and removes all but the newest."""
    folder = pathlib.Path(run_dir, "checkpoints")
    folder.mkdir(exist_ok=True)
    path = folder / f"{int(state.update[0]):09d}.npz"
    with open(path.with_suffix(".tmp"), "wb") as file:
        np.savez(file, script=SCRIPT, **flatten_state(state))
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)
    for old in sorted(folder.glob("*.npz"))[:-num_kept]:
        old.unlink()


def load_checkpoint(run_dir, template):
    """The newest checkpoint of a run as a `TrainState` like `template`; raises RunError."""
    path = max(pathlib.Path(run_dir, "checkpoints").glob("*.npz"), default=None)
    _check(path, f"{run_dir} holds no checkpoint", RunError)
    expected = flatten_state(template)
    try:
        arrays = dict(np.load(path, allow_pickle=False))  # reading checks the CRC
    except Exception as error:  # what damaged bytes make of NumPy and zipfile is not limited to a few types
        raise RunError(f"{path} is damaged ({error}); remove it to go back to an older one") from error
    form = lambda arrays: {name: (x.shape, x.dtype) for name, x in arrays.items()}
    fits = str(arrays.pop("script", None)) == SCRIPT and form(arrays) == form(expected)
    _check(fits, f"{path} does not fit: it is not a checkpoint of {SCRIPT} with these arguments", RunError)
    return jax.tree.unflatten(jax.tree.structure(template), [jnp.asarray(arrays[name]) for name in expected])


def load_args(run_dir):
    """The `Args` saved in a run's args.json; raises RunError."""
    try:
        return Args(**json.loads(pathlib.Path(run_dir, "args.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{run_dir} is not a run of {SCRIPT}: {error}") from error


def load_run(run_dir):
    """The (args, state) of a saved run; `state.params` has a leading seed axis."""
    args = load_args(run_dir)
    return args, load_checkpoint(run_dir, init_train_state(args, seed_keys(args)))


RENEWABLE = "runs_dir videos_dir log_interval checkpoint_interval eval_episodes capture_video video_interval".split()
RENEWABLE += "num_devices track wandb_project total_timesteps".split()


def merge_args(given, saved):
    """A saved run's arguments with those of `given` that are not the default and may be given anew."""
    changes = dict(vars(given).items() - vars(Args(resume=given.resume)).items() - vars(saved).items())
    for name, new in sorted(changes.items()):
        renewable = name in RENEWABLE and not (name == "total_timesteps" and saved.anneal_lr)
        _check(renewable, f"--{name} {new}: this run has {getattr(saved, name)}, which cannot change")
    return dataclasses.replace(saved, **changes)


class Logger:
    """Writes metrics of K agents to TensorBoard (a run each) and the terminal; keeps the clock of training."""

    def __init__(self, args, run_dir, update):
        self.args, self.first_update, self.pending = args, update, None
        self.finite = np.ones(args.num_seeds, bool)  # agents whose losses are finite
        self.is_terminal = sys.stdout.isatty()
        if args.track:
            import wandb

            wandb.tensorboard.patch(root_logdir=str(run_dir), save=False)  # sends what the writers below write
            wandb.init(project=args.wandb_project, id=run_dir.resolve().name, resume="allow", config=vars(args))
        folders = [run_dir / (f"seed_{args.seed + k}" if args.num_seeds > 1 else "") for k in range(args.num_seeds)]
        self.writers = [event_file_writer.EventFileWriter(str(folder)) for folder in folders]
        table = "\n".join(["|flag|value|", "|-|-|"] + [f"|{name}|{value}|" for name, value in vars(args).items()])
        step = update * args.batch_size
        for writer in self.writers:
            writer.add_event(Event(wall_time=time.time(), step=step, summary=text_pb("hyperparameters", table)))
            # Readers drop what an interrupted run had logged after this step.
            writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log={"status": "START"}))
        self.start, self.seconds, self.sps = time.perf_counter(), 0.0, None  # of training, in this process, no pauses

    def log(self, step, metrics):
        """Writes {tag: [K]} at a step; values that are not finite are left out."""
        for k, writer in enumerate(self.writers):
            values = [dict(tag=tag, simple_value=x[k]) for tag, x in metrics.items() if np.isfinite(x[k])]
            writer.add_event(Event(wall_time=time.time(), step=step, summary={"value": values}))
            writer.flush()  # before a checkpoint of this step: a killed run must not lose what it will not log again

    def log_pending(self):
        """Waits for the chunk of updates whose (update, metrics) are pending and logs it; raises RunError."""
        if self.pending is None:
            return
        (update, metrics), self.pending = jax.tree.map(np.asarray, self.pending), None  # waits for the device
        step, total = update * self.args.batch_size, self.args.num_updates * self.args.batch_size
        self.seconds = time.perf_counter() - self.start
        self.sps = (update - self.first_update) * self.args.batch_size * self.args.num_seeds / self.seconds
        self.log(step, {**metrics, "charts/SPS": np.full(self.args.num_seeds, self.sps)})
        returns = metrics["charts/episodic_return"]
        score = f", return {np.nanmean(returns):.2f}" if np.isfinite(returns).any() else ""
        left = (total - step) * self.args.num_seeds / self.sps
        line = f"{step:,}/{total:,} steps ({step / total:.0%}){score}, {self.sps:,.0f} SPS, {left:.0f} s left"
        print(f"\r{line}\033[K" if self.is_terminal else line, end="" if self.is_terminal else "\n", flush=True)
        for k in np.flatnonzero(self.finite & ~np.isfinite(metrics["losses/grad_norm"])):
            self.finite[k] = False
            message = f"the losses of seed {self.args.seed + k} are not finite at update {update}"
            _check(self.finite.any(), f"{message}, no seed is left; a smaller --learning-rate may help", RunError)
            print(f"error: {message}; the others go on", file=sys.stderr)

    @contextlib.contextmanager
    def paused(self):
        """Logs what is pending and stops the clock for whatever is not training."""
        self.log_pending()
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin

    def close(self):
        jax.block_until_ready(jax.live_arrays())  # a chunk that still runs must end before what it uses is gone
        for writer in self.writers:
            writer.close()
        print(end="\n" if self.is_terminal else "")


def write_json(path, content):
    """Writes JSON atomically."""
    path.with_suffix(".tmp").write_text(json.dumps(content, indent=2) + "\n")
    path.with_suffix(".tmp").replace(path)


# ======================================================================================================================
# Main
# ======================================================================================================================


def open_run(given):
    """Returns (args, run folder, video folder), both created; a resumed run goes on with its own arguments."""
    name = f"{given.env_id}__{given.exp_name}__{given.seed}__{int(time.time())}"
    run_dir = pathlib.Path(given.resume or f"{given.runs_dir}/{name}")
    args = merge_args(given, load_args(run_dir)) if given.resume else given
    _check(not args.track or importlib.util.find_spec("wandb"), "--track needs wandb: pip install wandb")
    _check(args.num_devices <= jax.local_device_count(), f"--num-devices: JAX sees {jax.local_devices()}, see --help")
    video_dir = pathlib.Path(args.videos_dir, run_dir.resolve().name)
    run_dir.mkdir(parents=True, exist_ok=bool(given.resume))
    video_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "args.json", vars(args))
    return args, run_dir, video_dir


def train(given, stop):
    """Trains, evaluates and saves a run until done or until a signal is in the list `stop`."""
    args, run_dir, video_dir = open_run(given)
    start = time.perf_counter()
    state = init_train_state(args, seed_keys(args))
    state = shard_state(args, load_checkpoint(run_dir, state) if given.resume else state)
    train_chunk = make_train_chunk(args).lower(state, jnp.int32(1)).compile()
    compile_seconds = time.perf_counter() - start
    print(f"{run_dir}: compiled in {compile_seconds:.1f} s", flush=True)

    done = int(state.update[0])
    intervals = [args.log_interval, args.checkpoint_interval] + [args.video_interval] * args.capture_video
    video = lambda: video_dir / f"step_{done * args.batch_size}.{VIDEO_FORMAT}"
    with contextlib.closing(Logger(args, run_dir, done)) as logger:
        while done < args.num_updates and not stop:
            target = min(args.num_updates, *(done - done % interval + interval for interval in intervals))
            state, metrics = train_chunk(state, jnp.int32(target - done))
            logger.log_pending()  # the chunk before, while this one runs
            done, logger.pending = target, (target, metrics)
            if args.capture_video and done % args.video_interval == 0 and done < args.num_updates:
                with logger.paused():
                    scores = assess(args, state, video())["per_seed"]
                    logger.log(done * args.batch_size, {"eval/episodic_return": scores["eval_return_mean"]})
            if done % args.checkpoint_interval == 0:
                with logger.paused():
                    save_checkpoint(run_dir, state)
        with logger.paused():
            save_checkpoint(run_dir, state)
        interrupted = bool(stop)  # a signal during the final evaluation comes too late to change anything
        summary = vars(args) | {"script": SCRIPT, "status": "interrupted" if interrupted else "finished"}
        summary |= {"total_timesteps": done * args.batch_size, "train_seconds": logger.seconds, "sps": logger.sps}
        summary |= {"compile_seconds": compile_seconds, "jax_version": jax.__version__}
        summary |= {"backend": jax.default_backend(), "device_kind": jax.devices()[0].device_kind}
        summary["failed_seeds"] = (args.seed + np.flatnonzero(~logger.finite)).tolist()
        if not interrupted:
            summary |= assess(args, state, video())
            logger.log(done * args.batch_size, {"eval/episodic_return": summary["per_seed"]["eval_return_mean"]})
        summary["wall_seconds"] = time.time() - PROCESS_START
        write_json(run_dir / "summary.json", summary)
    if interrupted:
        print(f"interrupted at update {done}; go on with: python {sys.argv[0]} --resume {run_dir}")
        sys.exit(128 + stop[0])
    print(f"run: {run_dir}\nvideo: {video()}\n{describe(summary)}, {summary['wall_seconds']:.1f} s in all")


def describe(summary):
    return f"greedy return {summary['eval_return_mean']:.1f} over {summary['eval_episodes']} episodes"


def evaluate_run(given):
    """Evaluates a saved run: writes its eval.json and a video, nothing else."""
    args, state = load_run(given.eval)
    args = dataclasses.replace(args, eval_episodes=given.eval_episodes)
    video = pathlib.Path(given.videos_dir, pathlib.Path(given.eval).resolve().name, f"eval.{VIDEO_FORMAT}")
    summary = assess(args, state, video)
    write_json(pathlib.Path(given.eval, "eval.json"), summary)
    print(f"video: {video}\n{describe(summary)}")


def main(args):
    """Runs the script; exits with 0, 1 (failed), 2 (wrong usage), 130 or 143 (interrupted, resumable)."""
    stop = []  # signals received: training ends after the chunk that is running
    numbers = () if args.eval else (signal.SIGINT, signal.SIGTERM)
    handlers = {n: signal.signal(n, lambda n, _: stop.append(n)) for n in numbers}
    try:
        evaluate_run(args) if args.eval else train(args, stop)
    except (UsageError, RunError, OSError, jax.errors.JaxRuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main(tyro.cli(Args))
