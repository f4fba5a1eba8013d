# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10", "flax>=0.12", "optax>=0.2.6", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20",
#     "imageio[ffmpeg]>=2.37", "envpool>=1.2.5"
# ]
# ///
"""PPO on Atari in one file and one XLA program: EnvPool's emulators through its XLA interface, CNN and update in JAX.

    python ppo_atari_envpool_xla_jax.py                            # Breakout, 10 million steps of four frames each
    python ppo_atari_envpool_xla_jax.py --env-id Pong-v5 --num-seeds 2   # two agents that share one pool of emulators
    python ppo_atari_envpool_xla_jax.py --resume runs/<run_name>   # go on after an interruption, with new games

The defaults are those of CleanRL's ppo_atari_envpool_xla_jax_scan.py; one step is one decision of the agent, four
frames of the console. On two CPU cores ten million steps take about six hours.

Algorithm: PPO (https://arxiv.org/abs/1707.06347) with the details of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.
Time limits are not terminations: a truncated episode is bootstrapped with the value of its true last observation.
EnvPool resets on the step _after_ the end of a life or game and ignores that step's action. That step is masked out of
the losses and of the statistics of advantages and episodes, GAE does not cross it, but it counts as a step of training.

EnvPool's XLA calls exist for CPUs and CUDA GPUs, not for TPUs. The pool is compiled into the program, and all devices
of a process run the same program: more devices need more processes, one each (`--distributed`).
Emulators cannot be saved: a resumed run goes on with the same parameters, optimiser, schedule and key, but its games
start anew, from the seeds of the first ones.

Axes in shape comments: K seeds, T steps, N environments (in what runs on a device: its share), B = T * N batch,
M minibatch, A actions, E evaluation episodes; C, Y, X, F channels, rows, columns, features of images.
"""

import time

PROCESS_START = time.time()  # before the heavy imports: `wall_seconds` counts them

import contextlib
import dataclasses
import difflib
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import warnings
from typing import NamedTuple

import flax.linen as nn
import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer

SCRIPT = "ppo_atari_envpool_xla_jax"
VIDEO_FORMAT = "mp4"
AXIS = "devices"  # mesh axis over which the environments are sharded


# ======================================================================================================================
# Arguments
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Args:
    """PPO on Atari through EnvPool's XLA interface."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """independent agents trained at once, with seeds seed .. seed + num_seeds - 1"""
    num_devices: int = 1
    """always 1: a process steps one pool on one device; see distributed"""
    distributed: bool = False
    """train with several processes that each run this command, also to --resume; the first one writes"""
    coordinator_address: str | None = None
    """address:port of the first process; JAX finds this and the next two by itself under SLURM and MPI"""
    num_processes: int | None = None
    """processes that train together"""
    process_id: int | None = None
    """number of this process, from 0"""
    exp_name: str = SCRIPT
    """name of the experiment, part of the run's name"""
    runs_dir: str = "runs"
    """folder that receives <run_name>/ with TensorBoard events, args.json, checkpoints and summary.json"""
    videos_dir: str = "videos"
    """folder that receives <run_name>/ with videos"""
    log_interval: int = 5
    """updates between two log entries, fewer updates where a checkpoint or video is due"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 10
    """whole games after training, each in an environment of its own"""
    eval_mode: str = "sampled"
    """whether evaluation draws actions (sampled) or takes the most probable (greedy), which may never press the FIRE
    that some games wait for after a lost life: training presses it for the agent"""
    capture_video: bool = False
    """also evaluate and record the policy during training, not only at its end"""
    video_interval: int = 1000
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
    env_id: str = "Breakout-v5"
    """game, as EnvPool names it"""
    max_episode_steps: int = 27_000
    """steps of four frames after which a game is truncated, in training and in evaluation"""
    num_envs: int = 8
    """parallel environments, over all processes, of each agent"""

    # Algorithm
    total_timesteps: int = 10_000_000
    """environment steps of each agent, rounded down to whole updates"""
    num_steps: int = 128
    """steps per environment and update"""
    learning_rate: float = 2.5e-4
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the batch per update"""
    norm_adv: bool = True
    """normalise advantages in each minibatch"""
    clip_coef: float = 0.1
    """clipping range of the probability ratio"""
    clip_vloss: bool = False
    """clip the value loss too, by the same range"""
    ent_coef: float = 0.01
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
        _check(self.eval_mode in ("greedy", "sampled"), f"--eval_mode must be greedy or sampled, not {self.eval_mode}")
        _check(self.seed <= 2**32 - self.num_seeds, f"--seed {self.seed}: all seeds must lie in [0, 2**32)")
        _check(re.fullmatch(r"\w[\w.-]*", self.exp_name, re.A), "--exp_name must consist of letters, digits and ._-")
        _check("" not in (self.resume, self.eval) and None in (self.resume, self.eval), "--resume, --eval: one folder")
        _check(not (self.distributed and self.eval), "--eval is done by one process, without --distributed")
        _check(self.num_devices == 1, f"--num_devices {self.num_devices}: start a process per device (--distributed)")
        _check(self.distributed or self.num_processes is None, "--num_processes needs --distributed")
        check_game(self.env_id)
        if self.resume:
            return  # `merge_args` checks the rest, given the flags of the saved run
        _check(self.num_envs % (self.num_processes or 1) == 0, "--num_processes must divide --num_envs")
        share = self.batch_size // (self.num_processes or 1)
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


def check_game(env_id):
    """Raises UsageError without EnvPool, or with the nearest names where it has no such game."""
    usable = sys.platform == "linux" and importlib.util.find_spec("envpool")
    _check(usable, "this script needs EnvPool, whose XLA calls exist on Linux only: pip install envpool")
    from envpool.atari.registration import atari_game_list

    games = ["".join(word.capitalize() for word in game.split("_")) + "-v5" for game in atari_game_list]
    near = ", ".join(difflib.get_close_matches(env_id, games, cutoff=0.3))
    _check(env_id in games, f"--env_id {env_id} is not one of EnvPool's {len(games)} games; near it: {near or games}")


def make_pool(args, seeds, training=False, **options):
    """EnvPool's emulators, one for each of `seeds`. The pool must outlive all that steps it.

    `training` ends an episode with each life and clips rewards; `options` go to EnvPool, except for these two.

    | what        | value                                                                                           |
    | ----------- | ----------------------------------------------------------------------------------------------- |
    | observation | uint8 [4, 84, 84]: the last four observed frames, grey, oldest first                            |
    | action      | one of the game's own, held for four frames; the last two of them are observed as their maximum |
    | reward      | change of the score, in training its sign; always unclipped in info["reward"]                   |
    | terminated  | game over, in training also a life lost; info["terminated"] tells games from lives              |
    | truncated   | after `max_episode_steps` of a game (then not terminated, even if the game is over)             |
    | start       | after a game, in training after a life: up to 30 no-ops, then FIRE where the game has it        |
    """
    _check(jax.default_backend() in ("cpu", "gpu"), "EnvPool needs a CPU or CUDA GPU: set JAX_PLATFORMS=cpu", RunError)
    import envpool

    options = {"stack_num": 4, "frame_skip": 4, "noop_max": 30, "use_fire_reset": True} | options
    options |= {"num_envs": len(seeds), "seed": seeds.tolist(), "episodic_life": training, "reward_clip": training}
    return envpool.make(args.env_id, env_type="gymnasium", max_episode_steps=args.max_episode_steps, **options)


def env_seeds(args, num_envs, *purpose):
    """Seeds [K, num_envs] of emulators: an agent gets those that it would get if trained alone.

    With a `purpose` they are others; 1 stands for evaluations, which all play the same games.
    """
    sequences = (np.random.SeedSequence([args.seed + k, *purpose]) for k in range(args.num_seeds))
    return np.stack([sequence.generate_state(num_envs) >> 1 for sequence in sequences])  # EnvPool takes 31 bits


def local_envs(array):
    """The part of an array [K, N, ...] that is of the environments this process steps, as a view."""
    return np.split(array, jax.process_count(), axis=1)[jax.process_index()]


def make_env(args):
    """The pool of this process for training: its N environments of each of K agents, K * N in all."""
    return make_pool(args, local_envs(env_seeds(args, args.num_envs)).ravel(), training=True)


# ======================================================================================================================
# Networks
# ======================================================================================================================


CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, extent and stride of each


def convolve(x, kernel, stride):
    """Convolution without padding: images [C, Y, X, M] and a kernel [k, k, C, F] give [F, Y', X', M]."""
    return jax.lax.conv_general_dilated(x, kernel, [stride] * 2, "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))


def batch_last(obs):
    """Frames [M, C, Y, X] uint8 as float [C, Y, X, M]: moved in words of four pixels, which is faster than bytes."""
    words = jax.lax.bitcast_convert_type(obs.reshape(*obs.shape[:-1], -1, 4), jnp.uint32).transpose(1, 2, 3, 0)
    words = jax.lax.optimization_barrier(words)  # or XLA would merge this into later copies, of bytes again
    pixels = words[..., None, :] >> 8 * jnp.arange(4, dtype=jnp.uint32)[:, None] & 255  # the first one comes lowest
    return pixels.reshape(*obs.shape[1:], -1).astype(jnp.float32)


def convolve_by_product(x, kernel, stride):
    """`convolve` as one matrix product.

    XLA's gradient of a convolution inside `lax.scan` is a slow loop on a CPU; that of slices and a product is not. With
    the batch last, each slice copies long contiguous runs.
    """
    channels, height, width, num = x.shape
    extent, features = kernel.shape[0] // stride, kernel.shape[-1]
    # Blocks of stride x stride pixels become channels: a convolution of stride 1 remains, with fewer slices.
    x = x.reshape(channels, height // stride, stride, width // stride, stride, num).transpose(2, 4, 0, 1, 3, 5)
    x = x.reshape(-1, height // stride, width // stride, num)
    kernel = kernel.reshape(extent, stride, extent, stride, channels, features).transpose(0, 2, 1, 3, 4, 5)
    rows, columns = (n - extent + 1 for n in x.shape[1:3])
    slices = [x[:, i : i + rows, j : j + columns] for i, j in np.ndindex(extent, extent)]
    patches = jnp.concatenate(slices).reshape(-1, rows * columns * num)
    return (kernel.reshape(-1, features).T @ patches).reshape(features, rows, columns, num)


class NatureCNN(nn.Module):
    """The "Nature" CNN (https://doi.org/10.1038/nature14236) with a head each for actor and critic."""

    num_actions: int
    by_products: bool  # how to convolve, which the parameters do not depend on

    @nn.compact
    def __call__(self, obs):
        """Logits [M, A] and values [M] of frames [M, 4, 84, 84], uint8."""
        x = (batch_last(obs) if self.by_products else obs.transpose(1, 2, 3, 0).astype(jnp.float32)) / 255
        orthogonal, convolution = nn.initializers.orthogonal, convolve_by_product if self.by_products else convolve
        for i, (features, extent, stride) in enumerate(CONVOLUTIONS):
            kernel = self.param(f"conv{i}", orthogonal(math.sqrt(2)), (extent, extent, len(x), features))
            bias = self.param(f"conv{i}_bias", nn.initializers.zeros, (features,))
            x = nn.relu(convolution(x, kernel, stride) + bias[:, None, None, None])
        x = x.transpose(3, 1, 2, 0).reshape(len(obs), -1)  # [M, Y * X * F]
        x = nn.relu(nn.Dense(512, kernel_init=orthogonal(math.sqrt(2)), name="dense")(x))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01), name="actor")(x)
        return logits, nn.Dense(1, kernel_init=orthogonal(1.0), name="critic")(x)[:, 0]


def init_params(key, num_actions):
    """Parameters of the agent, a nested dict of arrays."""
    return NatureCNN(num_actions, by_products=False).init(key, jnp.zeros((1, 4, 84, 84), jnp.uint8))


def forward(params, obs):
    """Logits [M, A] and values [M] of frames [M, 4, 84, 84]."""
    return NatureCNN(params["params"]["actor"]["bias"].size, jax.default_backend() == "cpu").apply(params, obs)


def sample_noise(key, shape):
    """The random numbers that `sample_action` needs for this many actions: one uniform each."""
    return jax.random.uniform(key, shape)


def sample_action(logits, noise):
    """Actions [...] drawn from logits [..., A], by inverting the cumulative distribution."""
    cumulative = jnp.cumsum(jax.nn.softmax(logits), axis=-1)
    return (noise[..., None] >= cumulative[..., :-1]).sum(-1, dtype=jnp.int32)


def greedy_action(logits):
    """The most likely actions [...]."""
    return logits.argmax(-1).astype(jnp.int32)


def action_logprob(logits, action):
    """Log-probabilities [...] of actions."""
    chosen = action[..., None] == jnp.arange(logits.shape[-1])  # a sum over few actions is cheaper than a gather
    return (jax.nn.log_softmax(logits) * chosen).sum(-1)


def entropy(logits):
    """Entropies [...] of distributions."""
    logprobs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logprobs) * logprobs).sum(-1)


# ======================================================================================================================
# Optimizer
# ======================================================================================================================


def make_optimizer(args):
    """Clips the gradients to a global norm, then Adam's direction; the caller scales it by the learning rate."""
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps))


def optimizer_update(args, grads, opt_state, params, learning_rate):
    """One step of `make_optimizer`; returns (params, opt_state, norm of the gradients before clipping)."""
    updates, opt_state = make_optimizer(args).update(grads, opt_state, params)
    params = optax.apply_updates(params, optax.tree.scale(-learning_rate, updates))
    return params, opt_state, optax.tree.norm(grads)


# ======================================================================================================================
# PPO
# ======================================================================================================================


class EnvState(NamedTuple):
    """The pool's last output; the emulators themselves cannot be saved."""

    obs: jax.Array  # [K, N, 4, 84, 84] uint8
    done: jax.Array  # [K, N], whether the last step ended a life or game: the next one only resets
    lives: jax.Array  # [K, N], lives left; with the next ones they tell whether the step of a time limit lost one


class Episodes(NamedTuple):
    """Running and last finished episode of every environment, each [N].

    Statistics are means over the environments' last finished episodes, so a short episode counts as much as a long one.
    """

    ret: jax.Array  # return of the running episode
    length: jax.Array  # its length
    last_ret: jax.Array  # of the last finished one, NaN before the first
    last_length: jax.Array


class Trajectory(NamedTuple):
    """T steps of N environments."""

    obs: jax.Array  # [T, N, 4, 84, 84] uint8
    action: jax.Array  # [T, N]
    logprob: jax.Array  # [T, N]
    value: jax.Array  # [T, N]
    reward: jax.Array  # [T, N]
    terminated: jax.Array  # [T, N]
    truncated: jax.Array  # [T, N]
    valid: jax.Array  # [T, N], False where the step only resets: then nothing but obs and value means anything


class Batch(NamedTuple):
    """What the loss needs."""

    obs: jax.Array  # [M, 4, 84, 84] uint8
    action: jax.Array  # [M]
    logprob: jax.Array  # [M]
    advantage: jax.Array  # [M]
    ret: jax.Array  # [M], the critic's target
    value: jax.Array  # [M]
    valid: jax.Array  # [M]


def rollout(args, envs, params, env_state, episodes, key):
    """Takes T steps with all agents in one pool; returns (env_state, episodes, trajectory).

    Everything has a leading axis K, the trajectory as well.
    """
    handle, _, _, pool_step = envs.xla()
    shape = episodes.length.shape  # K, N
    noises = jax.vmap(lambda key: sample_noise(key, (args.num_steps, shape[1])), out_axes=1)(key)  # [T, K, N]

    def step(carry, noise):
        handle, env_state, episodes = carry
        logits, value = over_seeds(forward)(params, env_state.obs)
        action = sample_action(logits, noise)
        # EnvPool hands the handle through only to keep the steps in order: the pool itself is compiled in.
        handle, (obs, reward, terminated, truncated, info) = pool_step(handle, action.reshape(-1))
        outcome = obs, reward, terminated, truncated, info["reward"], info["terminated"] > 0, info["lives"]
        obs, reward, terminated, truncated, score, game_over, lives = (x.reshape(*shape, *x.shape[1:]) for x in outcome)
        valid = ~env_state.done
        ret, length = episodes.ret + jnp.where(valid, score, 0.0), episodes.length + valid
        ended, running = (0.0, 0, ret, length), (ret, length, episodes.last_ret, episodes.last_length)
        game_ended = valid & (game_over | truncated)
        episodes = Episodes(*(jnp.where(game_ended, a, b) for a, b in zip(ended, running)))
        # EnvPool calls the step of the time limit truncated even if it ends a life or the game.
        terminated |= truncated & (game_over | (lives < env_state.lives))
        seen = env_state.obs, action, action_logprob(logits, action), value
        env_state = EnvState(obs, terminated | truncated, lives)
        return (handle, env_state, episodes), Trajectory(*seen, reward, terminated, truncated, valid)

    (_, env_state, episodes), trajectory = jax.lax.scan(step, (handle, env_state, episodes), noises)
    return env_state, episodes, jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)


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


def make_batch(args, trajectory, last_value):
    """Advantages and targets of a `Trajectory` [T, N], given the values [N] of what was seen after it: [B].

    An observation of EnvPool is the true successor of the step before it, also where that ended an episode: there it
    is the last frame, and the step that starts from it is the one that only resets. So the recursion, cut at the end
    of an episode, needs no special case to leave that step out, and a truncated one finds its bootstrap value there.
    """
    obs, action, logprob, values, rewards, terminated, truncated, valid = trajectory
    next_values = jnp.concatenate([values[1:], last_value[None]])
    advantages = compute_gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)
    batch = Batch(obs, action, logprob, advantages, advantages + values, values, valid)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def ppo_loss(params, batch, args):
    """Clipped surrogate, (clipped) value loss and entropy bonus of a minibatch; returns (loss, metrics).

    Means are over the valid samples of all devices, scaled so that `pmean` of the devices' gradients is right.
    """
    count = jnp.maximum(jax.lax.pmean(batch.valid.sum(dtype=jnp.float32), AXIS), 1e-8)
    mean = lambda x: jnp.where(batch.valid, x, 0.0).sum() / count
    logits, new_value = forward(params, batch.obs)
    log_ratio = jnp.where(batch.valid, action_logprob(logits, batch.action) - batch.logprob, 0.0)
    ratio = jnp.exp(log_ratio)
    advantage = batch.advantage
    if args.norm_adv:
        center = jax.lax.pmean(mean(advantage), AXIS)
        variance = jax.lax.pmean(mean((advantage - center) ** 2), AXIS)
        advantage = (advantage - center) / (jnp.sqrt(variance) + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -mean(jnp.minimum(ratio * advantage, clipped_ratio * advantage))

    value_error = (new_value - batch.ret) ** 2
    if args.clip_vloss:
        clipped_value = batch.value + jnp.clip(new_value - batch.value, -args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (clipped_value - batch.ret) ** 2)
    value_loss = 0.5 * mean(value_error)

    mean_entropy = mean(entropy(logits))
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * mean_entropy
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": mean_entropy,
        "losses/approx_kl": mean(ratio - 1 - log_ratio),  # http://joschu.net/blog/kl-approx.html
        "losses/old_approx_kl": -mean(log_ratio),
        "losses/clipfrac": mean(jnp.abs(ratio - 1) > args.clip_coef),
    }


def update_epochs(args, params, opt_state, batch, learning_rate, key):
    """Passes over a batch of B samples in shuffled minibatches; returns (params, opt_state, metrics)."""

    def minibatch_step(carry, index):  # [M]
        params, opt_state = carry
        minibatch = jax.tree.map(lambda x: x[index], batch)
        (_, metrics), grads = jax.value_and_grad(ppo_loss, has_aux=True)(params, minibatch, args)
        grads = jax.lax.pmean(grads, AXIS)
        params, opt_state, norm = optimizer_update(args, grads, opt_state, params, learning_rate)
        return (params, opt_state), {**metrics, "losses/grad_norm": norm}

    def epoch(carry, key):
        params, opt_state, active = carry
        order = jax.random.permutation(key, batch.action.shape[0]).reshape(args.num_minibatches, -1)
        new, metrics = jax.lax.scan(minibatch_step, (params, opt_state), order)
        metrics, was_active = jax.lax.pmean(jax.tree.map(jnp.mean, metrics), AXIS), active
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
    """All that training needs except the emulators; checkpoints hold just this. Leaves have a leading seed axis K."""

    params: dict
    opt_state: optax.OptState
    env_state: EnvState  # of [K, N]
    episodes: Episodes  # of [K, N]
    key: jax.Array  # [K, 2], a PRNG key's data: a checkpoint is plain arrays
    update: jax.Array  # [K], updates done


def seed_keys(args):
    """One PRNG key per agent, [K]."""
    return jax.vmap(jax.random.key)(jnp.uint32(args.seed) + jnp.arange(args.num_seeds, dtype=jnp.uint32))


def init_train_state(args, key, envs):
    """The first `TrainState` of the agents with keys [K], usually `seed_keys(args)`; starts new games in the pool.

    Only this process's share of the frames is filled, the rest is zero: `shard_state` takes its share of each process.
    """
    obs, info = envs.reset()
    frames = np.zeros((args.num_seeds, args.num_envs, *obs.shape[1:]), np.uint8)
    lives = np.zeros((args.num_seeds, args.num_envs), np.int32)
    for array, local in ((frames, obs), (lives, info["lives"])):
        local_envs(array)[:] = local.reshape(local_envs(array).shape)

    def init(agent):
        (params_key, key), env_state = jax.random.split(agent[0]), agent[1]
        params = init_params(params_key, int(envs.action_space.n))
        zeros, none = jnp.zeros(args.num_envs), jnp.full(args.num_envs, jnp.nan)
        episodes, opt_state = Episodes(zeros, zeros.astype(jnp.int32), none, none), make_optimizer(args).init(params)
        return TrainState(params, opt_state, env_state, episodes, jax.random.key_data(key), jnp.int32(0))

    # Not vmap: jaxlib 0.10's batched QR on a CPU can deadlock its own thread pool.
    # Runs once: compiling it quickly matters more than running it fast.
    init_all = jax.jit(lambda agents: jax.lax.map(init, agents), compiler_options={"xla_backend_optimization_level": 0})
    return init_all((key, EnvState(frames, lives < 0, lives)))


def update(args, envs, state):
    """One PPO update of K agents on one device of the mesh: the pool plays for all at once, then each one learns."""
    on_device = jax.vmap(lambda key: jax.random.fold_in(key, jax.lax.axis_index(AXIS)))
    key, *keys = jax.vmap(lambda key: jax.random.split(jax.random.wrap_key_data(key), 3), out_axes=1)(state.key)
    rollout_key, epochs_key = map(on_device, keys)
    env_state, episodes, trajectory = rollout(args, envs, state.params, state.env_state, state.episodes, rollout_key)

    def learn(state, trajectory, epochs_key):
        batch = make_batch(args, trajectory, forward(state.params, state.env_state.obs)[1])
        learning_rate = args.learning_rate * (1 - state.update / float(args.num_updates) if args.anneal_lr else 1.0)
        params, opt_state, metrics = update_epochs(args, *state[:2], batch, learning_rate, epochs_key)
        all_devices = lambda x: jax.lax.all_gather(x, AXIS)
        variance = lambda x: jnp.var(all_devices(x), where=all_devices(batch.valid))
        return state._replace(params=params, opt_state=opt_state, update=state.update + 1), metrics | {
            "losses/explained_variance": 1 - variance(batch.advantage) / variance(batch.ret),
            "charts/learning_rate": jnp.float32(learning_rate),
            # NaN before the first game ends
            "charts/episodic_return": jnp.nanmean(all_devices(state.episodes.last_ret)),
            "charts/episodic_length": jnp.nanmean(all_devices(state.episodes.last_length)),
        }

    state = state._replace(env_state=env_state, episodes=episodes, key=jax.random.key_data(key))
    return over_seeds(learn)(state, trajectory, epochs_key)


def over_seeds(function):
    """Maps a function of one agent over trees with a leading axis K; in turn on a CPU, where batching is slow."""
    in_turn = lambda *trees: jax.lax.map(lambda agent: function(*agent), trees)
    return in_turn if jax.default_backend() == "cpu" else jax.vmap(function)


def make_mesh(args):
    """`num_devices` devices of every process, in the order of the processes."""
    devices = [jax.local_devices(process_index=p)[: args.num_devices] for p in range(jax.process_count())]
    return jax.sharding.Mesh(np.array(devices).ravel(), (AXIS,))


# How a `TrainState` is laid out over the mesh: the second axis, N, of what belongs to the environments.
STATE_SPECS = TrainState(*[jax.P()] * 6)._replace(env_state=jax.P(None, AXIS), episodes=jax.P(None, AXIS))


def shard_state(args, state):
    """Spreads a `TrainState`, the same in every process, over the mesh."""
    put = lambda spec, x: jax.make_array_from_callback(x.shape, jax.NamedSharding(make_mesh(args), spec), x.__getitem__)
    return jax.tree.map(lambda spec, tree: jax.tree.map(lambda x: put(spec, x), tree), STATE_SPECS, state)


def make_train_step(args, envs):
    """Returns the jitted `train_step(state) -> (state, metrics)`: one PPO update of K agents, metrics of [K]."""
    layout = dict(mesh=make_mesh(args), in_specs=(STATE_SPECS,), out_specs=(STATE_SPECS, jax.P()))
    # check_vma=False: else shard_map itself would add up the gradients over the devices, before the explicit pmean.
    return jax.jit(jax.shard_map(lambda state: update(args, envs, state), **layout, check_vma=False))


def make_train_chunk(args, envs):
    """Returns the jitted `train_chunk(state, n) -> (state, metrics of the last)`: n updates in one dispatch."""
    train_step = make_train_step(args, envs)

    def train_chunk(state, num_updates):
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(train_step, state)[1])
        return jax.lax.fori_loop(0, num_updates, lambda _, carry: train_step(carry[0]), (state, metrics))

    # EnvPool's calls are named by addresses, so programs differ between processes, which cannot share XLA's autotuning.
    return jax.jit(train_chunk, donate_argnums=0, compiler_options={"xla_gpu_shard_autotuning": False})


# ======================================================================================================================
# Evaluation, video, checkpoints, logging
# ======================================================================================================================


@jax.jit(static_argnums=0)
def act(args, params, obs, key, step):
    """Actions [K, E] for frames [K, E, 4, 84, 84] at a step of the evaluation; everything has a leading axis K."""
    logits, _ = over_seeds(forward)(params, obs)
    noise = jax.vmap(lambda key: sample_noise(jax.random.fold_in(key, step), logits.shape[1:2]))(key)
    return sample_action(logits, noise) if args.eval_mode == "sampled" else greedy_action(logits)


def evaluate(args, params, key):
    """Plays one whole game, lives and raw scores included, in each of E fresh environments per agent.

    Takes parameters and keys with a leading axis K. Gives returns [K, E], lengths [K, E] and the actions of the first
    game. The host steps this pool: compiling it into a program would take longer than most evaluations.
    """
    params, shape = jax.tree.map(lambda x: x.addressable_data(0), params), (args.num_seeds, args.eval_episodes)
    envs = make_pool(args, env_seeds(args, args.eval_episodes, 1).ravel())
    obs, _ = envs.reset()
    ret, length, running, actions = np.zeros(shape), np.zeros(shape, int), np.ones(shape, bool), []
    while running.any():
        action = np.asarray(act(args, params, obs.reshape(*shape, *obs.shape[1:]), key, len(actions)))
        actions.append(action[0, 0])
        obs, _, terminated, truncated, info = envs.step(action.ravel())
        ret, length = ret + info["reward"].reshape(shape) * running, length + running
        running &= ~(terminated | truncated).reshape(shape)
    return ret, length, actions[: length[0, 0]]


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
    overall = {"eval_episodes": args.eval_episodes, "eval_mode": args.eval_mode} | statistics(alive)
    return overall | {"eval_return_ci95": bootstrap_interval(returns[alive].mean(1)), "per_seed": statistics(..., 1)}


def bootstrap_interval(values, samples=10_000):
    """95% bootstrap interval [low, high] of the mean of values [K]; None for a single one."""
    means = np.random.default_rng(0).choice(values, (samples, len(values))).mean(1)
    return np.percentile(means, [2.5, 97.5]).tolist() if len(values) > 1 else None


def record_video(args, path, evaluation):
    """Writes the first game as an MP4 in real time: its actions again, in an emulator of its own that sees colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    envs = make_pool(args, env_seeds(args, 1, 1)[0], gray_scale=False, img_height=210, img_width=160)
    frame = lambda obs: obs[0, -3:].transpose(1, 2, 0)  # the newest of the stacked frames, [210, 160, 3]
    with warnings.catch_warnings(), imageio.get_writer(path, fps=15, macro_block_size=2) as writer:
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks; this one runs ffmpeg and nothing of JAX
        writer.append_data(frame(envs.reset()[0]))
        for action in evaluation[2]:
            writer.append_data(frame(envs.step(np.array([action]))[0]))


def assess(args, state, video):
    """Evaluates all agents and records the first one; returns the summary."""
    evaluation = evaluate(args, state.params, evaluation_keys(args))
    record_video(args, video, evaluation)
    alive = [all(np.isfinite(x[k]).all() for x in jax.tree.leaves(state.params)) for k in range(args.num_seeds)]
    return summarize_evaluation(args, evaluation, np.array(alive))


def join_processes(args, scratch):
    """Starts JAX's distributed runtime; returns the arguments of this process.

    All processes do exactly the same, down to the files; those of all but the first go into the folder `scratch`.
    """
    if args.resume:
        load_args(args.resume)  # what is wrong here must end all of them, not leave the others waiting
    address = args.coordinator_address, args.num_processes, args.process_id
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM before `StopSignals` does
    try:
        jax.distributed.initialize(*address, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=20)
    except ValueError as error:
        raise UsageError(f"--distributed: {error}") from error
    args = dataclasses.replace(args, num_processes=jax.process_count(), process_id=jax.process_index())
    if args.process_id > 0:
        sys.stdout, os.environ["WANDB_MODE"] = open(os.devnull, "w"), "disabled"
        resume = args.resume and shutil.copytree(args.resume, f"{scratch}/resumed")
        args = dataclasses.replace(args, runs_dir=scratch, videos_dir=scratch, resume=resume)
    multihost_utils.sync_global_devices("the first process may write into a resumed run that the others have copied")
    return args


class StopSignals(list):
    """Signals received. Its truth, if any process has one, is a collective: all processes must ask equally often."""

    def __bool__(self):
        received = np.ravel(multihost_utils.process_allgather(np.int32(self[0] if len(self) else 0)))
        self.extend(received[received > 0].tolist())
        return bool(received.any())  # not of `self`, to which a signal may just have been added


class RunError(Exception):
    """A failure with a message for the user."""


def flatten_state(state):
    """{tree path: array} of a `TrainState`, in the order of its leaves.

    Arrays that are spread over processes are gathered, in which all of them take part.
    """
    gather = lambda x: x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): gather(x) for p, x in jax.tree.leaves_with_path(state)}


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


def with_new_games(state, fresh):
    """A saved `TrainState` with the games of a fresh one, because emulators cannot be saved."""
    return state._replace(env_state=fresh.env_state, episodes=Episodes(*fresh.episodes[:2], *state.episodes[2:]))


def load_args(run_dir):
    """The `Args` saved in a run's args.json; raises RunError."""
    try:
        return Args(**json.loads(pathlib.Path(run_dir, "args.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{run_dir} is not a run of {SCRIPT}: {error}") from error


def load_run(run_dir):
    """The (args, state) of a saved run; `state.params` has a leading seed axis."""
    args = load_args(run_dir)
    return args, load_checkpoint(run_dir, init_train_state(args, seed_keys(args), make_env(args)))


RENEWABLE = "runs_dir videos_dir log_interval checkpoint_interval eval_episodes capture_video video_interval".split()
RENEWABLE += "eval_mode track wandb_project total_timesteps".split()
RENEWABLE += "distributed coordinator_address num_processes process_id".split()


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
    local = dict(distributed=False, coordinator_address=None, num_processes=None, process_id=None)  # not the run's
    write_json(run_dir / "args.json", vars(args) | local)
    return args, run_dir, video_dir


def train(given, stop):
    """Trains, evaluates and saves a run until done or until a signal is in the list `stop`."""
    args, run_dir, video_dir = open_run(given)
    start = time.perf_counter()
    envs = make_env(args)
    state = init_train_state(args, seed_keys(args), envs)
    if given.resume:
        state = with_new_games(load_checkpoint(run_dir, state), state)
        print("emulators cannot be saved: all games start anew", flush=True)
    state = shard_state(args, state)
    train_chunk = make_train_chunk(args, envs).lower(state, jnp.int32(1)).compile()
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
    return f"{summary['eval_mode']} return {summary['eval_return_mean']:.1f} over {summary['eval_episodes']} episodes"


def evaluate_run(given):
    """Evaluates a saved run: writes its eval.json and a video, nothing else."""
    args, state = load_run(given.eval)
    args = dataclasses.replace(args, eval_episodes=given.eval_episodes, eval_mode=given.eval_mode)
    video = pathlib.Path(given.videos_dir, pathlib.Path(given.eval).resolve().name, f"eval.{VIDEO_FORMAT}")
    summary = assess(args, state, video)
    write_json(pathlib.Path(given.eval, "eval.json"), summary)
    print(f"video: {video}\n{describe(summary)}")


def main(args):
    """Runs the script; exits with 0, 1 (failed), 2 (wrong usage), 130 or 143 (interrupted, resumable)."""
    stop = StopSignals()  # training ends after the chunk that is running
    numbers = () if args.eval else (signal.SIGINT, signal.SIGTERM)
    handlers = {n: signal.signal(n, lambda n, _: stop.append(n)) for n in numbers}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            args = join_processes(args, scratch) if args.distributed else args
            evaluate_run(args) if args.eval else train(args, stop)
    except (UsageError, RunError, OSError, jax.errors.JaxRuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main(tyro.cli(Args))
