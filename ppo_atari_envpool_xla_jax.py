# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10", "flax>=0.12", "optax>=0.2.6", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20",
#     "imageio[ffmpeg]>=2.37", "envpool>=1.2.5"
# ]
# ///
"""PPO on Atari in one file and one XLA program: EnvPool's emulators, CNN, GAE and update.

    python ppo_atari_envpool_xla_jax.py                           # Breakout, ten million steps
    python ppo_atari_envpool_xla_jax.py --env-id Pong-v5 --num-seeds 2  # two agents, one pool
    python ppo_atari_envpool_xla_jax.py --resume runs/<run_name>  # go on, with new games
    python ppo_atari_envpool_xla_jax.py --eval runs/<run_name>    # evaluate a run, record a video

The default flags are the setting of CleanRL's ppo_atari_envpool_xla_jax_scan.py. One step is one
decision of the agent, four frames of the console. On two CPU cores ten million steps take three and
a half to eight hours, depending on the processor. One pass over each batch takes less than half of
that; Pong was learned so, to a return of 20, in two and a half hours (benchmarks/README.md):

    python ppo_atari_envpool_xla_jax.py --env-id Pong-v5 --total-timesteps 10e6 --num-envs 16 \
        --num-steps 64 --update-epochs 1 --num-minibatches 8 --learning-rate 5e-4

Not tried: one large GPU with many CPU cores beside it. For an H100 the compiled program predicts
330,000 steps per second of the network alone (benchmarks/README.md); emulators are slower:

    python ppo_atari_envpool_xla_jax.py --num-envs 64 --num-minibatches 16 --log-interval 2

An agent wants a policy pi(a|s) with a large return, the discounted sum of gamma^t r_t (logs and
evaluations show the plain sum of rewards instead). A network, the actor, is the policy; another
network or head, the critic, learns the value V(s), the return to expect from a state. The gradient
of the expected return by the actor's parameters is the mean of the sum over steps of
G_t grad log pi(a_t|s_t), G_t being the return from step t on (REINFORCE; a factor gamma^t is
usually left out). To subtract V(s_t) from G_t changes nothing in that mean, and takes away much of
its noise. G_t - V(s_t) estimates the advantage A(s, a), how much better than expected an action
was: better actions become likelier and worse ones rarer, in proportion to A. Proximal policy
optimisation (PPO, https://arxiv.org/abs/1707.06347) takes many such steps on the same samples,
while it stops each sample from pushing the policy too far from the one that played. It repeats one
update:

    1. rollout        T steps in N environments with the current policy       B = T * N samples
    2. compute_gae    how much better than expected did each action turn out? advantages A
    3. update_epochs  several passes over the samples in shuffled minibatches:
         ppo_loss          make better actions likelier; fit the critic       its gradient
         optimizer_update  a step against that gradient                       parameters

One pool of emulators plays for all agents, so `rollout` and `update` are of K agents; `learn`,
steps 2 and 3, is of one and pure. Up to the end of the section "Training" stands reinforcement
learning, with few words from below: `over_agents` maps over agents, `make_mesh` names the device,
`spread_update` is for several processes. What follows is about running it: many agents and
processes, evaluation, files, the command line. EnvPool's XLA interface makes its emulators a call
inside the program: XLA compiles several whole updates into one, so Python and the device meet once
in `--log-interval` updates instead of once a step, though at each step the device hands actions to
the pool's threads and waits for their frames. Details follow
https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.

EnvPool's XLA calls exist for CPUs and CUDA GPUs on Linux, not for TPUs. A pool belongs to one
device, so more devices need more processes, one each (`--distributed`). Emulators cannot be saved:
a resumed run goes on with the same parameters, optimizer, schedule and key, but its games start
anew, from the seeds of the first ones.

Axes in shape comments: K agents (seeds), T steps, N environments (within a process: its share),
B = T * N batch, M samples of a minibatch, A actions, E evaluation episodes, U updates; C, Y, X, F
channels, rows, columns, features of images.
"""

import time

PROCESS_START = time.time()  # before the heavy imports: `wall_seconds` counts them

import atexit
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import io
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from typing import Annotated, Literal, NamedTuple

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

# A renamed copy logs under its own name, "ppo (1).py" as ppo__1_.
SCRIPT = re.sub(r"[^\w.-]", "_", pathlib.Path(__file__).stem, flags=re.ASCII)
DEVICES = "devices"  # the mesh axis over which environments are spread, a device a process
EVALUATION = 1  # sets the emulators' seeds of evaluations apart from those of training


# ==================================================================================================
# Args
# ==================================================================================================


def parse_count(text):
    """A whole number in decimal notation: 500000, 500_000 or 5e5."""
    number = float(text)
    if not number.is_integer():
        raise ValueError(f"{text} is not a whole number")
    return int(number)


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: parse_count(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]


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
    """train with several processes that each run this command, also to --resume; the first one
    writes"""
    coordinator_address: str | None = None
    """address:port of the first process; JAX finds this and the next two by itself under SLURM and
    MPI"""
    num_processes: int | None = None
    """processes that train together"""
    process_id: int | None = None
    """number of this process, from 0"""
    exp_name: str = SCRIPT
    """name of the experiment, part of the run's name"""
    runs_dir: str = "runs"
    """folder that receives <run_name>/: TensorBoard events, args.json, checkpoints, summary.json"""
    videos_dir: str = "videos"
    """folder that receives <run_name>/ with videos"""
    log_interval: int = 5
    """updates in one call of the device, at most; then Python logs each of them"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 10
    """games of an evaluation, each in an emulator of its own"""
    eval_interval: int = 0
    """updates between evaluations during training; 0: none but after the last update and for
    videos"""
    eval_mode: Literal["sampled", "greedy"] = "sampled"
    """whether evaluation draws actions or takes the most likely ones; these may never press the
    FIRE that some games wait for"""
    eval_protocol: Literal["training", "whole-games"] = "training"
    """training: games go on after each life as in training, with no-ops and FIRE (CleanRL's way);
    whole-games: the agent plays from the first life to the last without help. Both add up the raw
    rewards of all lives; what a game gives during the no-ops and FIRE, EnvPool does not tell"""
    capture_video: bool = False
    """also record the policy during training, not only at its end"""
    video_interval: int = 1000
    """updates between two videos"""
    resume: str | None = None
    """folder of a run to go on with; its flags become the defaults"""
    eval: str | None = None
    """folder of a run to evaluate; writes its eval.json and a video, nothing else"""
    track: bool = False
    """also log to Weights & Biases (needs the wandb package)"""
    wandb_project: str = "single-file-jax-ppo"
    """Weights & Biases project"""

    # Environment
    env_id: str = "Breakout-v5"
    """game, as EnvPool names it"""
    max_episode_steps: int = 27_000
    """steps of four frames after which a game is truncated, in training and in evaluation"""
    repeat_action_probability: float = 0.0
    """probability that a frame repeats the action of the frame before ("sticky actions", 0.25 in
    Machado et al., 2018), in training and in evaluation; emulators need a number, not a tracer"""
    full_action_space: bool = False
    """all 18 actions of the console instead of those that the game uses"""
    num_envs: int = 8
    """parallel environments, over all processes, of each agent"""

    # Algorithm
    total_timesteps: Count = 10_000_000
    """environment steps of each agent, rounded down to whole updates"""
    num_steps: int = 128
    """steps per environment and update"""
    learning_rate: float = 2.5e-4
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly; it would be zero after the last update"""
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

    @property
    def batch_size(self) -> int:
        """Environment steps of one update, B, over all processes."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return self.total_timesteps // self.batch_size


# ==================================================================================================
# Environment
# ==================================================================================================


OBS_SHAPE, OBS_DTYPE = (4, 84, 84), jnp.uint8  # frames, rows, columns


def check_game(env_id):
    """Raises RunError without EnvPool; UsageError with the nearest names if it has no such game."""
    if sys.platform != "linux" or not importlib.util.find_spec("envpool"):
        raise RunError(
            "this script needs EnvPool, whose XLA calls exist on Linux only: pip install envpool"
        )
    from envpool.atari.registration import atari_game_list

    names = ["".join(word.capitalize() for word in game.split("_")) for game in atari_game_list]
    games = [f"{name}-v5" for name in names]
    if env_id not in games:
        near = difflib.get_close_matches(env_id, games, cutoff=0.3)
        raise UsageError(
            f"--env-id {env_id} is not one of EnvPool's {len(games)} games; "
            f"near it: {', '.join(near or games)}"
        )


def count_actions(args):
    """The number of actions, A, of the game."""
    import envpool

    spec = envpool.make_spec(args.env_id, full_action_space=args.full_action_space)
    return int(spec.action_space.n)


def make_pool(args, seeds, *, episodic_life, reward_clip, **options):
    """EnvPool's emulators, one for each of `seeds`; further options go to EnvPool.

    | what        | value                                                                        |
    | ----------- | ---------------------------------------------------------------------------- |
    | observation | uint8 [4, 84, 84]: the last four observed frames, grey, oldest first          |
    | action      | one of the game's own, held for four frames; the maximum of the last two of   |
    |             | them is observed, because some consoles' sprites flicker                      |
    | reward      | change of the score, with `reward_clip` its sign; info["reward"]: unclipped   |
    | terminated  | game over, with `episodic_life` also a life lost; info["terminated"]: game    |
    |             | over only                                                                     |
    | truncated   | after `max_episode_steps` of a game, all lives together                       |
    | start       | up to 30 no-ops, then FIRE where the game has it                              |

    Four frames show velocities, which a single one does not. No-ops make games differ, which would
    otherwise all begin in the same way. The sign of the reward lets one set of hyper-parameters
    serve games whose scores differ a thousandfold. A life as an episode teaches that losing one is
    bad: nothing good comes after it.

    The pool must outlive all that steps it.
    """
    import envpool

    settings = {
        "env_type": "gymnasium",
        "num_envs": len(seeds),
        "seed": seeds.tolist(),
        "max_episode_steps": args.max_episode_steps,
        "repeat_action_probability": args.repeat_action_probability,
        "full_action_space": args.full_action_space,
        "episodic_life": episodic_life,
        "reward_clip": reward_clip,
        "stack_num": 4,
        "frame_skip": 4,
        "noop_max": 30,
        "use_fire_reset": True,
    }
    return envpool.make(args.env_id, **(settings | options))


def env_seeds(args, num_envs, *purpose):
    """Seeds [K, num_envs] of emulators: an agent gets those that it would get if trained alone.

    With a `purpose`, a number, they are others; all evaluations have the same, `EVALUATION`.
    """
    seeds = []
    for k in range(args.num_seeds):
        sequence = np.random.SeedSequence([args.seed + k, *purpose])
        seeds.append(sequence.generate_state(num_envs) >> 1)  # EnvPool takes 31 bits
    return np.stack(seeds)


def make_env(args):
    """The pool of this process for training: its share of the environments of all agents.

    An environment of your own needs what EnvPool's gymnasium interface has: `reset()`, `xla()` for
    calls inside a program, `step()` for evaluation; and in `info` "reward", "terminated" and
    "lives" (from `reset()` only the last), which EnvPool's other families do not have. It must
    reset late, as in `rollout`'s table. With it change OBS_SHAPE and OBS_DTYPE, `make_pool`'s
    settings, `count_actions`, `check_game`, `make_eval_pool`, from which `evaluate` has its games,
    the network, and `record_video`, which may return None. EnvPool writes into XLA's buffers
    unchecked: a family with float64 observations needs JAX_ENABLE_X64=1, with which the network
    here does not run.
    """
    platform = make_mesh(args).devices.flat[0].platform
    if platform not in ("cpu", "gpu"):
        raise RunError(f"EnvPool needs a CPU or CUDA GPU, not a {platform}: set JAX_PLATFORMS=cpu")
    shares = np.split(env_seeds(args, args.num_envs), jax.process_count(), axis=1)
    seeds = shares[jax.process_index()]  # [K, N]
    return make_pool(args, seeds.reshape(-1), episodic_life=True, reward_clip=True)


# ==================================================================================================
# Agent
# ==================================================================================================


class Categorical(NamedTuple):
    """Distributions over A actions, one for each observation: p(a) = softmax(logits)_a.

    To forbid an action, give it the logit -1e9 (with -inf, 0 * inf would make the entropy NaN).
    """

    logits: jax.Array  # [..., A]

    def log_probs(self):
        """Logarithms of all probabilities, actions first: [A, ...]."""
        # With actions first the batch stays contiguous. Where the network computes so, too, XLA
        # merges this transpose with the one at its end.
        return jax.nn.log_softmax(jnp.moveaxis(self.logits, -1, 0), axis=0)

    def sample(self, key):
        """Random actions [...], int32."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self):
        """The most likely actions [...], int32."""
        return self.logits.argmax(-1).astype(jnp.int32)

    def log_prob(self, action):
        """Log-probabilities [...] of actions [...]."""
        # log_probs[action] of each sample; a choice among A arrays, as a gather's gradient is slow.
        return jax.lax.select_n(action.astype(jnp.int32), *self.log_probs())

    def entropy(self):
        """Entropies [...], in nats: -sum_a p(a) log p(a)."""
        log_probs = self.log_probs()
        return -(jnp.exp(log_probs) * log_probs).sum(0)


def convolve(x, kernel, stride):
    """Convolution without padding: images [M, Y, X, C], kernel [k, k, C, F] -> [M, Y', X', F]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@jax.custom_jvp
def relu_of_result(x):
    """relu with a gradient that is found from the result: it passes where that is not 0.

    On a GPU a convolution adds the bias and applies relu before it writes its result, unless
    something else reads what comes in between, as the gradient of `jax.nn.relu` does.
    """
    return jnp.maximum(x, 0)


@relu_of_result.defjvp
def relu_of_result_jvp(primals, tangents):
    """Its derivative, as `jax.custom_jvp` wants it."""
    y = relu_of_result(*primals)
    return y, jnp.where(y == 0, 0, tangents[0])  # y > 0 would be simplified to x > 0


def convolve_by_product(x, kernel, stride):
    """Convolution without padding as a matrix product, for CPUs: [C, Y, X, M] -> [F, Y', X', M].

    XLA's gradient of a convolution inside `lax.scan` is a slow loop on a CPU; that of slices and a
    product is twenty times faster. With the batch last, each slice copies long contiguous runs.
    Raises ValueError unless the stride divides the sizes of the kernel and the images.
    """
    channels, height, width, num = x.shape
    size, features = kernel.shape[0], kernel.shape[-1]
    if size % stride or height % stride or width % stride:
        raise ValueError(
            f"convolve_by_product: the stride {stride} must divide the sizes of the kernel, {size} "
            f"x {size}, and of the images, {height} x {width}; `convolve` has no such limit"
        )
    # Blocks of stride x stride pixels become channels: a convolution of stride 1 remains, with
    # fewer slices.
    x = x.reshape(channels, height // stride, stride, width // stride, stride, num)
    x = x.transpose(2, 4, 0, 1, 3, 5)  # [stride, stride, C, Y / stride, X / stride, M]
    x = x.reshape(-1, height // stride, width // stride, num)
    extent = size // stride
    kernel = kernel.reshape(extent, stride, extent, stride, channels, features)
    kernel = kernel.transpose(0, 2, 1, 3, 4, 5)  # [extent, extent, stride, stride, C, F]
    rows = x.shape[1] - extent + 1
    columns = x.shape[2] - extent + 1
    slices = [x[:, i : i + rows, j : j + columns] for i in range(extent) for j in range(extent)]
    patches = jnp.concatenate(slices).reshape(-1, rows * columns * num)
    return (kernel.reshape(-1, features).T @ patches).reshape(features, rows, columns, num)


def batch_last(obs):
    """Frames [M, C, Y, X] uint8 as float32 [C, Y, X, M], for CPUs: a transpose by words.

    Words of four pixels move faster than bytes.
    """
    words = jax.lax.bitcast_convert_type(obs.reshape(*obs.shape[:-1], -1, 4), jnp.uint32)
    words = words.transpose(1, 2, 3, 0)
    # Without this barrier XLA would merge the transpose into later copies, of bytes again.
    words = jax.lax.optimization_barrier(words)
    shifts = 8 * jnp.arange(4, dtype=jnp.uint32)[:, None]  # the first pixel comes lowest
    pixels = words[..., None, :] >> shifts & 255
    return pixels.reshape(*obs.shape[1:], -1).astype(jnp.float32)


def orthogonal(gain):
    """An initializer of orthogonal weights, for flax.

    A square orthogonal matrix keeps the lengths of the vectors that pass through it, so that
    signals and gradients neither vanish nor explode with depth (a wide one shortens most of them).
    The gain sqrt(2) is derived for relu, which halves a signal's power. The gain of the head sets
    where learning begins: 0.01 gives nearly the same policy in all states.
    """

    def draw(key, shape, dtype=jnp.float32):
        initializer = nn.initializers.orthogonal(gain)
        # One after the other under vmap: jaxlib 0.10's batched QR can deadlock on a CPU. An
        # orthogonal initializer of your own needs the same.
        draw_one = jax.custom_batching.sequential_vmap(
            functools.partial(initializer, shape=shape, dtype=dtype)
        )
        return draw_one(key)

    return draw


class NatureCNN(nn.Module):
    """The "Nature" CNN (https://doi.org/10.1038/nature14236) with heads for actor and critic.

    Both share the convolutions: seeing costs nearly all of the time, and the critic's errors help
    to learn it. 84 x 84 pixels x 4 frames -> 20 x 20 x 32 -> 9 x 9 x 64 -> 7 x 7 x 64 -> 512
    features.

    Another network may begin with `x = obs.transpose(0, 2, 3, 1) / 255`, images [M, Y, X, C], and
    use `nn.Conv`: with `relu_of_result` that is as fast on a GPU; on a CPU its gradient is slow. It
    keeps a layer "actor" with a bias, in which `forward` counts the actions.
    """

    num_actions: int
    layers: tuple = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, size of the kernel, stride
    platform: str | None = None  # how to compute it; the parameters do not depend on that

    @nn.compact
    def __call__(self, obs):
        """Logits [M, A] and values [M] of frames [M, 4, 84, 84], uint8."""
        on_cpu = self.platform == "cpu"
        if on_cpu:
            x = batch_last(obs) / 255  # [C, Y, X, M]
        else:
            x = obs.transpose(0, 2, 3, 1) / 255  # [M, Y, X, C]
        channels = obs.shape[1]
        for i, (features, size, stride) in enumerate(self.layers):
            shape = (size, size, channels, features)
            kernel = self.param(f"conv{i}", orthogonal(math.sqrt(2)), shape)
            bias = self.param(f"conv{i}_bias", nn.initializers.zeros, (features,))
            if on_cpu:
                x = nn.relu(convolve_by_product(x, kernel, stride) + bias[:, None, None, None])
            else:
                x = relu_of_result(convolve(x, kernel, stride) + bias)
            channels = features
        if on_cpu:
            x = x.transpose(3, 1, 2, 0)
        x = x.reshape(len(obs), -1)  # [M, Y * X * F]
        x = nn.relu(nn.Dense(512, kernel_init=orthogonal(math.sqrt(2)), name="dense")(x))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01), name="actor")(x)
        value = nn.Dense(1, kernel_init=orthogonal(1.0), name="critic")(x)
        return logits, value[:, 0]


def init_agent(args, key, num_actions):
    """Parameters: flax's nested dict of arrays, {"params": {"conv0": ..., "actor": ..., ...}}.

    `args` is for networks with flags of their own.
    """
    return NatureCNN(num_actions=num_actions).init(key, jnp.zeros((1, *OBS_SHAPE), OBS_DTYPE))


def forward(args, params, obs, *, platform=None):
    """The policy's distribution and the values [M] of a batch of observations [M, 4, 84, 84].

    `platform` is how the network is computed; None does for all.
    """
    actor_bias = params["params"]["actor"]["bias"]
    if obs.shape[1:] != OBS_SHAPE or actor_bias.ndim != 1:
        raise ValueError(
            f"forward takes the parameters of one agent (without the axis K of `load_run`) and a "
            f"batch of observations, [M, 4, 84, 84] (obs[None] is a batch of one), but got "
            f"observations of shape {obs.shape}"
        )
    network = NatureCNN(num_actions=len(actor_bias), platform=platform)
    logits, value = network.apply(params, obs)
    return Categorical(logits=logits), value


# ==================================================================================================
# Optimizer
# ==================================================================================================


def make_optimizer(args):
    """Scales gradients down to `max_grad_norm`, then Adam, arXiv:1412.6980, without its rate.

    Adam divides a running mean of the gradient by the root of one of its square, so that every
    parameter moves by about the learning rate, whatever the scale of its gradient; `adam_update` in
    ppo_cartpole_jax.py has the formulas. `optimizer_update` multiplies by the learning rate, which
    changes from update to update.
    """
    return optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps)
    )


def optimizer_update(args, grads, opt_state, params, learning_rate):
    """One step; returns (params, opt_state, norm of the gradients before they were scaled)."""
    direction, opt_state = make_optimizer(args).update(grads, opt_state, params)
    step = jax.tree.map(lambda d: -learning_rate * d, direction)
    return optax.apply_updates(params, step), opt_state, optax.tree.norm(grads)


# ==================================================================================================
# PPO
# ==================================================================================================


class EnvState(NamedTuple):
    """What the pool's last step told; the emulators themselves cannot be saved. Each [N, ...]."""

    obs: jax.Array  # [N, 4, 84, 84] uint8
    done: jax.Array  # [N], that step ended a life or a game: the next one only resets
    lives: jax.Array  # [N], lives left


class EpisodeStats(NamedTuple):
    """The running and the last finished episode of every environment, each [N].

    Returns are plain sums of rewards, not discounted. Logs show the mean, over environments, of the
    last episode that each has finished. A mean over the episodes that end in one update would
    favour short ones: more of them end. (So does this one until each environment has finished one.)
    """

    running_return: jax.Array
    running_length: jax.Array
    last_return: jax.Array  # -inf before the first episode has ended
    last_length: jax.Array  # likewise


class Transition(NamedTuple):
    """One step of N environments; a trajectory has an axis of T steps in front.

    Every array has N in front, those of the distribution and of structured actions too.
    """

    obs: jax.Array  # [N, 4, 84, 84] uint8
    action: jax.Array  # [N, ...]
    dist: Categorical  # of the actions, for losses of your own; XLA drops what nothing reads
    log_prob: jax.Array  # [N], of the actions
    value: jax.Array  # [N], of obs
    reward: jax.Array  # [N], clipped
    # An episode, here a life, that terminated has no future. One that the time limit truncated
    # would have gone on: its future must be estimated, not set to 0.
    terminated: jax.Array  # [N]
    truncated: jax.Array  # [N]
    valid: jax.Array  # [N], False where the step only resets: then only obs and value mean anything


class Batch(NamedTuple):
    """What the loss may read: B samples, or the M of a minibatch."""

    obs: jax.Array  # [B, ...]
    action: jax.Array  # [B, ...]
    dist: Categorical  # the old policy's
    log_prob: jax.Array  # [B], the old policy's
    value: jax.Array  # [B], the old critic's
    advantage: jax.Array  # [B]; in the loss, with `norm_adv`, normalised already
    target: jax.Array  # [B], what the critic should have said
    valid: jax.Array  # [B], whether the sample counts; the loss leaves others out, `valid_mean`


def init_episode_stats(num_envs):
    """Before the first step."""
    return EpisodeStats(
        running_return=jnp.zeros(num_envs, jnp.float32),
        running_length=jnp.zeros(num_envs, jnp.int32),
        last_return=jnp.full(num_envs, -jnp.inf, jnp.float32),
        last_length=jnp.full(num_envs, -jnp.inf, jnp.float32),
    )


def restart_ended(ended, stats):
    """Statistics after a step: those of episodes that have ended [N] move from running to last."""
    return EpisodeStats(
        running_return=jnp.where(ended, 0.0, stats.running_return),
        running_length=jnp.where(ended, 0, stats.running_length),
        last_return=jnp.where(ended, stats.running_return, stats.last_return),
        last_length=jnp.where(ended, stats.running_length, stats.last_length),
    )


def mean_of_ended(last):
    """Mean of `last` [N] over environments where an episode has ended; -inf where none has."""
    ended = jnp.isfinite(last)
    total, count = jnp.where(ended, last, 0.0).sum(), ended.sum()
    return jnp.where(count > 0, total / jnp.maximum(count, 1), -jnp.inf)


def device_key(key, axis_name):
    """A key of this device's own, of one that all devices of the axis have."""
    if axis_name is None:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(axis_name))


def check_one_each(num_envs, **arrays):
    """Raises ValueError where an array is not [N]: others would be broadcast without a word."""
    for name, array in arrays.items():
        if array.shape != (num_envs,):
            raise ValueError(f"{name} must have the shape {(num_envs,)}, not {array.shape}")
        if name == "terminated" and array.dtype != bool:
            raise ValueError(f"terminated must be bool, not {array.dtype}")


def gpu_unroll(platform, steps):
    """How many steps of a scan go into an iteration of its compiled loop: on a GPU `steps`, else 1.

    A GPU starts a kernel for whatever could not be merged into one, which takes longer than the
    small operations of a step. Within an iteration those of neighbouring steps merge too, and the
    host, which drives such loops, has fewer turns to make.
    """
    is_gpu = platform in ("gpu", "cuda")  # "cuda": compiled for without having one
    return steps if is_gpu else 1


def rollout(args, envs, state, *, platform=None, axis_name=None):
    """Plays T steps in N environments with each of K agents, all in one pool.

    Takes a `TrainState` of K agents; returns (state, trajectory: `Transition` of [K, T, N, ...]).

    EnvPool resets an environment on the step AFTER the one that ended an episode, and that step
    ignores its action. Say that step 4 loses a life:

        step t       3      4      5      6
        obs          o3     o4     o5     n0     o5: the last frame; n0: the first of the next life
        action       a3     a4     --     b0     --: drawn from the policy, ignored by EnvPool
        reward       r3     r4     0      q0
        terminated   no     YES    no     no
        valid        yes    yes    NO     yes    valid[t] = not (terminated or truncated)[t - 1]

    Step 5 is nobody's decision. It stays in the arrays, whose shape is fixed, and counts as a step
    of training, but neither in the loss nor in any statistics.

    Scores are those of games: of all lives together, and not clipped. What a game gives during the
    no-ops and FIRE after a lost life EnvPool does not tell.
    """
    handle, _, _, pool_step = envs.xla()  # without those that only receive or only send
    num_agents, num_envs = state.env_state.done.shape
    keys = jax.vmap(jax.random.split)(state.key)  # [K, 2]
    rollout_key, next_key = keys[:, 0], keys[:, 1]

    def step_keys(key):
        return jax.random.split(device_key(key, axis_name), args.num_steps)

    def act(params, obs, key):  # one agent
        dist, value = forward(args, params, obs, platform=platform)
        action = dist.sample(key)
        log_prob = dist.log_prob(action)
        outcome = dict(value=value, log_prob=log_prob, entropy=dist.entropy())
        check_one_each(len(obs), **outcome)
        return action, dist, log_prob, value

    def by_agent(x):  # [K * N, ...] -> [K, N, ...]
        return x.reshape(num_agents, num_envs, *x.shape[1:])

    def env_step(carry, action_key):
        handle, env_state, stats = carry

        # --- Act ---
        acting = over_agents(act, platform)
        action, dist, log_prob, value = acting(state.params, env_state.obs, action_key)
        # EnvPool hands the handle on only to keep the steps in order: the pool is compiled in.
        handle, outcome = pool_step(handle, action.reshape(-1, *action.shape[2:]))
        obs, reward, terminated, truncated, info = outcome
        ends = dict(terminated=terminated, truncated=truncated)
        check_one_each(num_agents * num_envs, reward=reward, **ends)
        score = by_agent(info["reward"])
        game_over = by_agent(info["terminated"]) > 0
        lives = by_agent(info["lives"])
        truncated = by_agent(truncated)
        # A life or game that the very step of the time limit ends is only truncated to EnvPool. But
        # it has no future: that it terminated is what counts.
        life_lost = game_over | (lives < env_state.lives)
        terminated = by_agent(terminated) | (truncated & life_lost)

        # --- Has the game ended? ---
        valid = ~env_state.done
        stats = stats._replace(
            running_return=stats.running_return + jnp.where(valid, score, 0.0),
            running_length=stats.running_length + valid,
        )
        # If a game ends within the no-ops after a lost life, EnvPool silently begins the next one.
        # Then a step that resets finds more lives than the running game had.
        unnoticed = (lives > env_state.lives) & (stats.running_length > 0)
        stats = restart_ended(jnp.where(valid, game_over | truncated, unnoticed), stats)
        transition = Transition(
            obs=env_state.obs,
            action=action,
            dist=dist,
            log_prob=log_prob,
            value=value,
            reward=by_agent(reward),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
        )
        env_state = EnvState(obs=by_agent(obs), done=terminated | truncated, lives=lives)
        return (handle, env_state, stats), transition

    carry = handle, state.env_state, state.stats
    action_keys = jax.vmap(step_keys, out_axes=1)(rollout_key)  # [T, K]
    unroll = gpu_unroll(platform, 4)
    (_, env_state, stats), trajectory = jax.lax.scan(env_step, carry, action_keys, unroll=unroll)
    trajectory = jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)
    return state._replace(env_state=env_state, stats=stats, key=next_key), trajectory


def trajectory_values(args, params, last_obs, trajectory, *, platform=None):
    """Values of all observations and of their true successors, both [T, N].

    `last_obs` [N, ...] is what was observed after the trajectory. Because EnvPool resets late, the
    next observation is the true successor of every valid step, also of one that ended an episode.
    Again with step 4 at the end of an episode and step 5 masked:

        step t       3      4      5      6
        valid        yes    yes    NO     yes
        value        V(o3)  V(o4)  V(o5)  V(n0)
        next_value   V(o4)  V(o5)  V(n0)  V(n1)

    So `compute_gae` needs to know nothing of masks. Where step 4 was truncated, it finds the value
    of the true last observation, V(o5); where it terminated, it ignores that. Either way it cuts
    the recursion there: the advantage of step 5, which compares two episodes, reaches no other
    step, and is masked itself.
    """
    _, last_value = forward(args, params, last_obs, platform=platform)
    next_value = jnp.concatenate([trajectory.value[1:], last_value[None]])
    return trajectory.value, next_value


def compute_gae(
    reward, value, next_value, terminated, truncated, gamma, gae_lambda, *, platform=None
):
    """Generalised advantage estimation, arXiv:1506.02438; all arrays [T, N].

    The TD error tells how much better one step went than the critic had expected,

        delta_t = r_t + gamma (1 - terminated_t) V(s_{t+1}) - V(s_t),

    and the advantage adds up those of the steps that follow in the same episode:

        A_t = delta_t + gamma lambda (1 - done_t) A_{t+1},      done = terminated or truncated.

    A_t needs A_{t+1}, so the sum runs backwards in time. lambda = 0 leaves A_t = delta_t: little
    noise, but wrong wherever the critic is. lambda = 1 leaves the discounted rewards up to the end
    of the episode or of the rollout, plus the discounted value of what comes after, minus V(s_t):
    it trusts the critic as little as the samples allow, but has the noise of all those steps.

    A terminated episode has no future, hence no value of a successor. A truncated one would have
    gone on: `next_value` is the value of its true last observation (not of the reset that follows)
    and counts. Neither lets the sum run on into the next episode. The end of the rollout is like a
    truncation: A_T = 0, and the last delta holds V(s_T).

    Four steps with reward 1 and value 2, terminated after the third (whose next value, 9, does not
    count); after the fourth the value is 4. With gamma = lambda = 0.5, backwards:
    A_3 = 1 + 0.5 * 4 - 2 = 1, A_2 = 1 - 2 = -1, A_1 = 1 + 0.5 * 2 - 2 + 0.25 * -1 = -0.25,
    A_0 = 1 + 0.5 * 2 - 2 + 0.25 * -0.25 = -0.0625.

    >>> column = lambda *numbers: jnp.array(numbers)[:, None]
    >>> advantage = compute_gae(
    ...     reward=column(1.0, 1.0, 1.0, 1.0),
    ...     value=column(2.0, 2.0, 2.0, 2.0),
    ...     next_value=column(2.0, 2.0, 9.0, 4.0),
    ...     terminated=column(False, False, True, False),
    ...     truncated=column(False, False, False, False),
    ...     gamma=0.5,
    ...     gae_lambda=0.5,
    ... )
    >>> advantage[:, 0].tolist()
    [-0.0625, -0.25, -1.0, 1.0]
    """
    delta = reward + gamma * jnp.where(terminated, 0.0, next_value) - value
    decay = gamma * gae_lambda * (1 - (terminated | truncated))

    def backwards(next_advantage, inputs):
        delta, decay = inputs
        advantage = delta + decay * next_advantage
        return advantage, advantage

    start = jnp.zeros_like(delta[0])
    unroll = gpu_unroll(platform, 16)
    _, advantage = jax.lax.scan(backwards, start, (delta, decay), reverse=True, unroll=unroll)
    return advantage


def clipped_objective(ratio, advantage, clip_coef):
    """PPO's surrogate objective for each sample: min(ratio A, clip(ratio, 1 - c, 1 + c) A).

    ratio = p_new(a|s) / p_old(a|s) weights samples of the old policy so that they count as samples
    of the new one. At ratio 1 its gradient is that of A log p_new(a|s), the policy gradient. But
    samples of the old policy say little about one far from it. So the objective stops growing where
    the ratio has moved by c in the direction that A asks for: there the minimum is the clipped
    term, a constant with gradient zero, and the sample stops pushing. On the other side nothing is
    clipped: a sample that went the wrong way is always pulled back.

    With A = 1 and c = 0.25, the ratio 1.5 is beyond the range (no gradient), 0.5 is not clipped:

    >>> clipped_objective(jnp.array([1.0, 1.5, 0.5]), 1.0, 0.25).tolist()
    [1.0, 1.25, 0.5]
    >>> jax.vmap(jax.grad(clipped_objective), (0, None, None))(
    ...     jnp.array([1.0, 1.5, 0.5]), 1.0, 0.25
    ... ).tolist()
    [1.0, 0.0, 1.0]

    With A = -1 it is the other way round:

    >>> clipped_objective(jnp.array([1.0, 1.5, 0.5]), -1.0, 0.25).tolist()
    [-1.0, -1.5, -0.75]
    >>> jax.vmap(jax.grad(clipped_objective), (0, None, None))(
    ...     jnp.array([1.0, 1.5, 0.5]), -1.0, 0.25
    ... ).tolist()
    [-1.0, -1.0, -0.0]
    """
    clipped_ratio = jnp.clip(ratio, 1 - clip_coef, 1 + clip_coef)
    return jnp.minimum(ratio * advantage, clipped_ratio * advantage)


def count_valid(valid, axis_name):
    """How many samples of a minibatch are valid [M], on average over the devices."""
    count = valid.sum(dtype=jnp.float32)
    if axis_name is not None:
        count = jax.lax.pmean(count, axis_name)
    return jnp.maximum(count, 1e-8)  # where there is none, means are 0 / 1e-8 = 0


def valid_mean(x, valid, count):
    """The mean of x [M] over the valid samples, of which `count_valid` has found `count`.

    On several devices it is a device's part: the mean of those is that over all valid samples.
    """
    return jnp.where(valid, x, 0.0).sum() / count


def normalize(advantage, valid, axis_name):
    """Advantages [M] with mean 0 and standard deviation 1 over the valid samples of all devices."""
    count = count_valid(valid, axis_name)

    def mean(x):
        part = valid_mean(x, valid, count)
        return part if axis_name is None else jax.lax.pmean(part, axis_name)

    advantage = advantage - mean(advantage)
    return advantage / (jnp.sqrt(mean(advantage**2)) + 1e-8)


class Mean(NamedTuple):
    """A metric of a minibatch that is a mean over samples; minibatches are averaged."""

    value: jax.Array  # [], a number; a vector wants a tag for each component

    def combine(self, where):
        """The mean of several minibatches; `where` tells which of them took place."""
        return Mean(self.value.mean(where=where))


class Max(NamedTuple):
    """A metric of a minibatch that is a maximum; the greatest of all counts. For your own ones."""

    value: jax.Array  # []

    def combine(self, where):
        """The maximum of several minibatches; `where` tells which of them took place."""
        return Max(self.value.max(where=where, initial=-jnp.inf))


def combine_metrics(metrics, where):
    """{tag: `Mean` or `Max` of []} from those of several minibatches, of the shape of `where`.

    Raises TypeError where a metric does not say how, ValueError where it is no plain number.
    """
    for tag, metric in metrics.items():
        if not isinstance(metric, Mean | Max):
            raise TypeError(f"the metric {tag} must say what it is: Mean(...) or Max(...)")
        if metric.value.shape != where.shape:
            raise ValueError(f"the metric {tag} of a minibatch must be a plain number")
    return {tag: metric.combine(where) for tag, metric in metrics.items()}


def ppo_loss(args, params, batch, *, platform=None, axis_name=None):
    """The loss of a minibatch, a mean over its valid samples.

    Returns (loss [], metrics {tag: `Mean` or `Max`}); `target_kl` needs "losses/approx_kl".

    loss = policy loss + vf_coef * value loss - ent_coef * entropy. The policy loss is the negative
    mean of `clipped_objective`; in the first minibatch every ratio is 1 and it is -mean(A), 0 if
    these are normalised, so it measures no progress: only its gradient matters. The value loss is
    half the mean squared distance to the target, advantage + old value. With `clip_vloss` the
    larger of two errors counts, that of the value and that of the value held within clip_coef of
    the old one. Once a value has moved further than that towards its target, the second one is
    larger and has no gradient. That slows the critic wherever values are large. The entropy bonus
    keeps the policy from becoming certain before it has tried all actions.

    Healthy: approx_kl about 0.001 to 0.02, clipfrac 0.05 to 0.3, entropy that falls slowly from
    log(num_actions), explained_variance that rises towards 1.
    """
    dist, value = forward(args, params, batch.obs, platform=platform)
    count = count_valid(batch.valid, axis_name)
    mean = functools.partial(valid_mean, valid=batch.valid, count=count)

    # --- Policy ---
    log_ratio = jnp.where(batch.valid, dist.log_prob(batch.action) - batch.log_prob, 0.0)
    ratio = jnp.exp(log_ratio)
    policy_loss = -mean(clipped_objective(ratio, batch.advantage, args.clip_coef))

    # --- Value ---
    value_error = (value - batch.target) ** 2
    if args.clip_vloss:
        change = jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
        value_error = jnp.maximum(value_error, (batch.value + change - batch.target) ** 2)
    value_loss = 0.5 * mean(value_error)

    # --- Entropy ---
    entropy = mean(dist.entropy())

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    return loss, {
        "losses/policy_loss": Mean(policy_loss),
        "losses/value_loss": Mean(value_loss),
        "losses/entropy": Mean(entropy),
        # Two estimates of KL(old policy || new), http://joschu.net/blog/kl-approx.html: the first
        # is less noisy and never negative; the other's tag, CleanRL's, calls it the older one.
        "losses/approx_kl": Mean(mean(ratio - 1 - log_ratio)),
        "losses/old_approx_kl": Mean(-mean(log_ratio)),
        # On either side of the range; only those that went where A asks have no gradient.
        "losses/clipfrac": Mean(mean(jnp.abs(ratio - 1) > args.clip_coef)),
    }


def loss_gradient(args, params, batch, platform, axis_name):
    """(gradients of `ppo_loss` over the samples of all devices, metrics of this device's)."""
    grad = jax.grad(ppo_loss, argnums=1, has_aux=True)
    grads, metrics = grad(args, params, batch, platform=platform, axis_name=axis_name)
    if axis_name is not None:
        grads = jax.lax.pmean(grads, axis_name)
    return grads, metrics


def over_devices(metric, axis_name):
    """A `Mean` or `Max` of all devices from those of each."""
    if axis_name is None:
        return metric
    if isinstance(metric, Max):
        return jax.lax.pmax(metric, axis_name)
    return jax.lax.pmean(metric, axis_name)


def random_permutation(key, n):
    """A pseudo-random permutation of range(n), uint32 [n]: a fast `jax.random.permutation(key, n)`.

    That one sorts, which took 40% of the time of training CartPole. Few numbers are ranked by
    comparing all with all. For many there is a Feistel network: it is a bijection on the bits of
    the index, whatever function mixes their halves. Where n is no power of two, indices that leave
    the range walk on along their cycle until they are back in it (Black & Rogaway, 2002).
    """
    if n <= 256:  # with so few bits some orders would come up too often
        draws = jax.random.bits(key, n, jnp.uint32)
        index = np.arange(n)
        is_less = draws < draws[:, None]
        is_tied = (draws == draws[:, None]) & (index < index[:, None])
        return (is_less | is_tied).sum(1, dtype=jnp.uint32)

    bits = (n - 1).bit_length()
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
    if n == 1 << bits:
        return index
    return jax.lax.while_loop(
        lambda index: (index >= n).any(),
        lambda index: jnp.where(index < n, index, feistel(index)),
        index,
    )


def update_epochs(args, params, opt_state, batch, learning_rate, key, platform, axis_name):
    """Passes over a batch of B samples in shuffled minibatches.

    A scan over epochs of a scan over minibatches; `active` and `no_epoch` serve `target_kl` alone.
    On several devices each shuffles its own samples.
    Returns (params, opt_state, metrics {tag: []}).
    """

    def minibatch_step(carry, index):  # index [M] into the batch
        params, opt_state = carry
        minibatch = jax.tree.map(lambda x: x[index], batch)
        if args.norm_adv:
            advantage = normalize(minibatch.advantage, minibatch.valid, axis_name)
            minibatch = minibatch._replace(advantage=advantage)
        grads, metrics = loss_gradient(args, params, minibatch, platform, axis_name)
        params, opt_state, norm = optimizer_update(args, grads, opt_state, params, learning_rate)
        return (params, opt_state), {**metrics, "losses/grad_norm": Mean(norm)}

    def one_epoch(params, opt_state, key):
        order = random_permutation(key, len(batch.log_prob)).reshape(args.num_minibatches, -1)
        return jax.lax.scan(minibatch_step, (params, opt_state), order)

    def no_epoch(params, opt_state, key):
        _, metrics = jax.eval_shape(one_epoch, params, opt_state, key)
        return (params, opt_state), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

    def epoch(carry, key):
        params, opt_state, active = carry
        if args.target_kl is None:
            (params, opt_state), metrics = one_epoch(params, opt_state, key)
            return (params, opt_state, active), (metrics, active)
        (params, opt_state), metrics = jax.lax.cond(
            active, one_epoch, no_epoch, params, opt_state, key
        )
        approx_kl = over_devices(metrics["losses/approx_kl"], axis_name).value.mean()
        return (params, opt_state, active & (approx_kl <= args.target_kl)), (metrics, active)

    (params, opt_state, _), (metrics, active) = jax.lax.scan(
        epoch, (params, opt_state, jnp.bool_(True)), jax.random.split(key, args.update_epochs)
    )
    took_place = jnp.broadcast_to(active[:, None], (args.update_epochs, args.num_minibatches))
    metrics = combine_metrics(metrics, took_place)
    metrics = {tag: over_devices(metric, axis_name).value for tag, metric in metrics.items()}
    return params, opt_state, metrics


# ==================================================================================================
# Training
# ==================================================================================================


class TrainState(NamedTuple):
    """Everything that training needs to go on except the emulators; checkpoints hold just this."""

    params: dict
    opt_state: optax.OptState
    env_state: EnvState  # of [N]
    stats: EpisodeStats  # of [N]; its episodes are whole games, those of `Transition` are lives
    key: jax.Array  # PRNG key
    update: jax.Array  # [], updates done


def init_train_state(args, key):
    """The `TrainState` of one agent before its first update; `start_games` fills in the games."""
    agent_key, key = jax.random.split(key)
    params = init_agent(args, agent_key, count_actions(args))
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        env_state=EnvState(
            obs=jnp.zeros((args.num_envs, *OBS_SHAPE), OBS_DTYPE),
            done=jnp.zeros(args.num_envs, bool),
            lives=jnp.zeros(args.num_envs, jnp.int32),
        ),
        stats=init_episode_stats(args.num_envs),
        key=key,
        update=jnp.zeros((), jnp.int32),
    )


def update(args, envs, state, *, platform=None, axis_name=None):
    """One PPO update of K agents: one pool plays for all, then each learns.

    Takes and returns a `TrainState` of K agents: (state, metrics {tag: [K]}). `platform` ("cpu",
    "gpu") picks what is faster there; with an `axis_name` the agents' environments are spread over
    the devices of that axis, by `shard_map`. Without both it is plain JAX.
    """
    state, trajectory = rollout(args, envs, state, platform=platform, axis_name=axis_name)

    def learn_agent(agent):
        return learn(args, *agent, platform=platform, axis_name=axis_name)

    # One after the other: vmap would make grouped convolutions, whose gradients are slow on GPUs.
    return jax.lax.map(learn_agent, (state, trajectory))


def learn(args, state, trajectory, *, platform=None, axis_name=None):
    """The learning half of an update, of one agent; returns (state, metrics {tag: []}).

    The trajectory, a `Transition` of [T, N, ...], was played with the state's parameters and led to
    its `env_state`. A pure function, for `jit` and `vmap` over agents and over any float of `args`
    that belongs to the algorithm; see `update` for the keywords.
    """
    epochs_key, next_key = jax.random.split(state.key)
    epochs_key = device_key(epochs_key, axis_name)

    # --- Advantages ---
    value, next_value = trajectory_values(
        args, state.params, state.env_state.obs, trajectory, platform=platform
    )
    advantage = compute_gae(
        trajectory.reward,
        value,
        next_value,
        trajectory.terminated,
        trajectory.truncated,
        args.gamma,
        args.gae_lambda,
        platform=platform,
    )
    target = advantage + value  # A = return - V, so this estimates the return: the critic's aim

    # --- Learn ---
    batch = Batch(
        obs=trajectory.obs,
        action=trajectory.action,
        dist=trajectory.dist,
        log_prob=trajectory.log_prob,
        value=value,
        advantage=advantage,
        target=target,
        valid=trajectory.valid,
    )
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    learning_rate = jnp.float32(args.learning_rate)
    if args.anneal_lr:
        left = jnp.maximum(0.0, 1 - state.update / float(args.num_updates))  # 0 after the run
        learning_rate = learning_rate * left
    params, opt_state, metrics = update_epochs(
        args, state.params, state.opt_state, batch, learning_rate, epochs_key, platform, axis_name
    )

    def of_all_devices(x):  # with an axis of devices in front, if there are several
        return x if axis_name is None else jax.lax.all_gather(x, axis_name)

    valid = of_all_devices(batch.valid)
    advantage_variance = of_all_devices(batch.advantage).var(where=valid)
    target_variance = of_all_devices(batch.target).var(where=valid)
    stats = state.stats
    metrics |= {
        # Of the targets, by the old critic: target - value = advantage.
        "losses/explained_variance": 1 - advantage_variance / target_variance,
        "charts/learning_rate": learning_rate,
        "charts/episodic_return": mean_of_ended(of_all_devices(stats.last_return)),
        "charts/episodic_length": mean_of_ended(of_all_devices(stats.last_length)),
    }
    state = state._replace(
        params=params, opt_state=opt_state, key=next_key, update=state.update + 1
    )
    return state, metrics


def make_train_step(args, envs):
    """Returns the jitted `train_step(state) -> (state, metrics {tag: [K]})`: one update.

        envs = make_env(args)
        state = start_games(args, envs, init_agents(args))
        train_step = make_train_step(args, envs)
        state, metrics = train_step(state)

    It is of K agents and donates its argument: the new state takes the memory of the old one, which
    is gone. The pool must outlive it.
    """
    return jax.jit(spread_update(args, envs), donate_argnums=0)


# ==================================================================================================
# Seeds and devices: the pool plays for K agents, each learns alone; from here on, running it
# ==================================================================================================


def seed_keys(args):
    """One PRNG key per agent, [K]."""
    first = jnp.uint32(args.seed)
    return jax.vmap(jax.random.key)(first + jnp.arange(args.num_seeds, dtype=jnp.uint32))


def make_mesh(args):
    """The first `num_devices` devices of every process, in the order of the processes."""
    devices = []
    for process in range(jax.process_count()):
        devices += jax.local_devices(process_index=process)[: args.num_devices]
    return jax.sharding.Mesh(np.array(devices), (DEVICES,))


def place(args, state):
    """A `TrainState` of K agents, spread over the mesh; every process must have the same one."""
    if jax.process_count() == 1:
        return jax.device_put(state, state_shardings(args))
    # device_put would compare the processes' states, and find that NaN differs from itself.
    return jax.jit(lambda state: state, out_shardings=state_shardings(args))(state)


def state_shardings(args):
    """How a `TrainState` of K agents lies on the mesh; a prefix of its tree."""
    mesh = make_mesh(args)
    everywhere = jax.NamedSharding(mesh, jax.P())
    by_environment = jax.NamedSharding(mesh, jax.P(None, DEVICES))  # [K, N]
    # Those you add, too; but one of [K, N], or what devices do not agree on, goes below.
    fields = dict.fromkeys(TrainState._fields, everywhere)
    return TrainState(**fields | {"env_state": by_environment, "stats": by_environment})


def over_agents(function, platform):
    """Maps a function of one agent over trees with a leading axis K.

    On a CPU one agent after the other: products that are batched over agents are slower there. A
    single agent is never batched, because `lax.cond` under vmap does the work of both branches.
    """

    def mapped(*trees):
        num_agents = len(jax.tree.leaves(trees)[0])
        if platform == "cpu" or num_agents == 1:
            return jax.lax.map(lambda agent: function(*agent), trees)
        return jax.vmap(function)(*trees)

    return mapped


def init_agents(args):
    """The placed `TrainState` of K agents before their first update."""
    # Runs once: compiling it quickly matters more than running it fast.
    options = {"xla_backend_optimization_level": 0}
    if make_mesh(args).devices.flat[0].platform == "cpu":  # these take off another half or more
        options["xla_cpu_use_fusion_emitters"] = False
        options["xla_cpu_parallel_codegen_split_count"] = 1
    init = jax.jit(functools.partial(init_states, args), compiler_options=options)
    return place(args, init())


def init_states(args):
    """The `TrainState` of K agents before their first update, where JAX likes to put it."""
    # One after the other, which compiles sooner than a batch of them.
    return jax.lax.map(functools.partial(init_train_state, args), seed_keys(args))


def start_games(args, envs, state):
    """The placed `TrainState` of K agents with new games in the pool of every process.

    Statistics of finished games stay, those of running ones begin again.
    """
    obs, info = envs.reset()
    num_envs = args.num_envs // jax.process_count()
    fresh = EnvState(
        obs=obs.reshape(args.num_seeds, num_envs, *OBS_SHAPE),
        done=np.zeros((args.num_seeds, num_envs), bool),
        lives=info["lives"].reshape(args.num_seeds, num_envs),
    )
    sharding = state_shardings(args).env_state
    env_state = jax.tree.map(
        lambda share: jax.make_array_from_process_local_data(sharding, share), fresh
    )
    stats = state.stats._replace(
        running_return=jnp.zeros_like(state.stats.running_return),
        running_length=jnp.zeros_like(state.stats.running_length),
    )
    return state._replace(env_state=env_state, stats=stats)


def spread_update(args, envs):
    """`update` as a function of the placed `TrainState` of K agents, over all processes."""
    mesh = make_mesh(args)
    platform = mesh.devices.flat[0].platform
    update_agents = functools.partial(update, args, envs, platform=platform)
    if mesh.size == 1:
        return update_agents
    # EnvPool's calls are per device, so this part of the program is written per device, too.
    specs = jax.tree.map(lambda sharding: sharding.spec, state_shardings(args))
    return jax.shard_map(
        functools.partial(update_agents, axis_name=DEVICES),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(specs, jax.P()),
        check_vma=False,  # or shard_map would add up the gradients itself, before `pmean`
    )


def make_train_chunk(args, envs):
    """Returns the jitted `train_chunk(state, n) -> (state, metrics {tag: [rows, K]})`: n updates.

    It takes the state of `start_games` or of the chunk before, and donates it: the new state takes
    the memory of the old one. Metrics have `chunk_size(args)` rows, the most that n may be: those
    of the n updates come first, the rest is zero. The pool must outlive it.
    """
    mesh = make_mesh(args)
    # Inlined, it compiles to the same program, but is traced once for both of its uses below.
    update_agents = jax.jit(spread_update(args, envs), inline=True)

    def train_chunk(state, num_updates):
        def one_update(i, carry):
            state, log = carry
            state, metrics = update_agents(state)
            return state, jax.tree.map(lambda rows, row: rows.at[i].set(row), log, metrics)

        # The host chooses how many updates run; one program serves all.
        _, metrics = jax.eval_shape(update_agents, state)
        for tag, metric in metrics.items():
            if getattr(metric, "shape", None) != (args.num_seeds,):  # a `Mean` has none
                raise ValueError(f"the metric {tag} that `update` returns must be a plain number")
        log = jax.tree.map(lambda x: jnp.zeros((chunk_size(args), *x.shape), x.dtype), metrics)
        return jax.lax.fori_loop(0, num_updates, one_update, (state, log))

    shardings = (state_shardings(args), jax.NamedSharding(mesh, jax.P()))
    # The pool's address makes programs differ between processes, so they cannot share autotuning.
    options = {"xla_gpu_shard_autotuning": False}
    return jax.jit(train_chunk, donate_argnums=0, out_shardings=shardings, compiler_options=options)


def chunk_size(args):
    """The most updates in one call of the device."""
    return min(args.log_interval, args.checkpoint_interval, args.num_updates)


def join_processes(args):
    """Starts JAX's distributed runtime; returns the arguments of this process.

    All processes do exactly the same, down to the files. But only the first one's are kept: the
    others write into temporary folders, and print nothing but errors.
    """
    # JAX's own service would catch SIGTERM before `StopSignals` does.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=args.coordinator_address,
            num_processes=args.num_processes,
            process_id=args.process_id,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=20,
        )
    except ValueError as error:
        raise UsageError(f"--distributed: {error}") from error
    args = dataclasses.replace(
        args, num_processes=jax.process_count(), process_id=jax.process_index()
    )
    check_args(args)
    if args.process_id > 0:
        scratch = tempfile.mkdtemp(prefix=f"{SCRIPT}-")
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        sys.stdout = open(os.devnull, "w")
        os.environ["WANDB_MODE"] = "disabled"
        resume = args.resume
        if resume is not None:
            logs = shutil.ignore_patterns("events.out.tfevents.*")  # as long as the run
            resume = shutil.copytree(resume, pathlib.Path(scratch, "resumed"), ignore=logs)
        args = dataclasses.replace(args, runs_dir=scratch, videos_dir=scratch, resume=resume)
    # Only now may the first process write into a run that the others have copied.
    multihost_utils.sync_global_devices("processes joined")
    return args


def wait_for_processes(args):
    """Waits until all processes are here: JAX ends those that end 20 s after the first one."""
    if args.distributed:
        multihost_utils.sync_global_devices("processes done")


def without_processes(args):
    """The `Args` that belong to the run itself: not by how many processes it was trained."""
    return dataclasses.replace(
        args, distributed=False, coordinator_address=None, num_processes=None, process_id=None
    )


def gather(tree):
    """The tree with arrays that are spread over processes whole in each; all must take part."""

    def gather_leaf(x):
        if x.is_fully_addressable or x.is_fully_replicated:
            return x
        if is_key(x):
            return jax.random.wrap_key_data(gather_leaf(jax.random.key_data(x)))
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gather_leaf, tree)


def agree_on_signal(signals):
    """A signal that any of the processes has received, or None; all must ask equally often."""
    if jax.process_count() == 1:
        return signals.received
    received = multihost_utils.process_allgather(np.int32(signals.received or 0))
    return int(received.max()) or None


# ==================================================================================================
# Evaluation and video
# ==================================================================================================


class Evaluation(NamedTuple):
    """Games in fresh emulators, and what it takes to play the first one again."""

    episode_return: np.ndarray  # [K, E], raw scores of whole games
    episode_length: np.ndarray  # [K, E], the agent's steps
    actions: list  # of the first agent's first game, those that EnvPool ignored included


def make_eval_pool(args, seeds, **options):
    """The pool of an evaluation, one game for each seed; see `--eval-protocol`."""
    episodic_life = args.eval_protocol == "training"
    return make_pool(args, seeds, episodic_life=episodic_life, reward_clip=False, **options)


def evaluate(args, act, params, keys):
    """One game of K agents in each of E fresh emulators: an `Evaluation`.

    `act`, of `make_act`, chooses the actions. The host steps this pool: compiling it into a program
    would take longer than most evaluations.

    A game goes on until it is over or truncated, through all its lives. Under the protocol
    "training" a lost life is the end of an episode to EnvPool, which makes the step after it one
    that only resets; it counts neither in the score nor in the length. As in `rollout`, it ends the
    game if there are more lives after it.
    """
    # Every process evaluates by itself, with its own copy of the parameters.
    params = jax.tree.map(lambda x: x.addressable_data(0), params)
    shape = (args.num_seeds, args.eval_episodes)
    envs = make_eval_pool(args, env_seeds(args, args.eval_episodes, EVALUATION).reshape(-1))
    obs, info = envs.reset()
    episode_return = np.zeros(shape)
    episode_length = np.zeros(shape, int)
    running = np.ones(shape, bool)  # this game is not over
    valid = np.ones(shape, bool)  # this step is not one that only resets
    actions = []
    for step in itertools.count():
        action = np.asarray(act(params, obs.reshape(*shape, *OBS_SHAPE), keys, step))
        if running[0, 0]:
            actions.append(action[0, 0])
        lives = info["lives"]
        obs, _, terminated, truncated, info = envs.step(action.reshape(-1, *action.shape[2:]))

        counts = running & valid
        episode_return += np.where(counts, info["reward"].reshape(shape), 0.0)
        episode_length += counts
        game_over = (info["terminated"] > 0) | truncated
        unnoticed = info["lives"] > lives
        running &= ~np.where(valid, game_over.reshape(shape), unnoticed.reshape(shape))
        valid = ~(terminated | truncated).reshape(shape)
        if not running.any():
            return Evaluation(
                episode_return=episode_return, episode_length=episode_length, actions=actions
            )


def make_act(args):
    """Returns the jitted `act(params, obs [K, E, ...], keys [K], step)` -> actions [K, E]."""
    platform = make_mesh(args).devices.flat[0].platform

    def act(params, obs, keys, step):
        def act_agent(params, obs, key):
            dist, _ = forward(args, params, obs, platform=platform)
            if args.eval_mode == "greedy":
                return dist.mode()
            return dist.sample(jax.random.fold_in(key, step))

        return over_agents(act_agent, platform)(params, obs, keys)

    return jax.jit(act)


def make_evaluate(args):
    """Returns `evaluate_agents(params, keys)` of K agents: an `Evaluation`."""
    return functools.partial(evaluate, args, make_act(args))


def evaluation_keys(args):
    """Keys [K] that no training uses, the same for every evaluation of a run.

    Training splits the seeds' keys, too; that never gives what `fold_in` gives here.
    """
    return jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 1))(seed_keys(args))


def summarize_evaluation(args, evaluation, finite):
    """What summary.json and eval.json say of an evaluation of K agents.

    Means over the agents with finite [K] parameters, and under "per_seed" those of every agent.
    Raises RunError where there is none.
    """
    if not finite.any():
        raise RunError("the parameters of all agents are NaN or infinite")
    returns = np.asarray(evaluation.episode_return, float)  # [K, E]
    lengths = np.asarray(evaluation.episode_length, float)
    return {
        "eval_episodes": args.eval_episodes,
        "eval_mode": args.eval_mode,
        "eval_protocol": args.eval_protocol,
        "repeat_action_probability": args.repeat_action_probability,
        "full_action_space": args.full_action_space,
        "eval_return_mean": returns[finite].mean(),
        "eval_return_std": returns[finite].std(),
        "eval_return_ci95": bootstrap_interval(returns[finite].mean(1)),
        "eval_length_mean": lengths[finite].mean(),
        "per_seed": {
            "eval_return_mean": returns.mean(1).tolist(),
            "eval_return_std": returns.std(1).tolist(),
            "eval_length_mean": lengths.mean(1).tolist(),
        },
    }


def bootstrap_interval(values, samples=10_000):
    """95% bootstrap interval [low, high] of the mean of values [K]; None for a single one."""
    if len(values) == 1:
        return None
    means = np.random.default_rng(0).choice(values, (samples, len(values))).mean(1)
    return np.percentile(means, [2.5, 97.5]).tolist()


def finite_agents(params):
    """Which agents have finite parameters, bool [K]."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    return np.all([np.isfinite(x).reshape(len(x), -1).all(1) for x in leaves], axis=0)


def record_video(args, evaluation, folder, name):
    """Writes the first agent's first game as an MP4; returns its path.

    Its actions are played again, in an emulator of its own that sees colours.
    """
    seeds = env_seeds(args, args.eval_episodes, EVALUATION)[0, :1]
    envs = make_eval_pool(args, seeds, gray_scale=False, img_height=210, img_width=160)
    path = pathlib.Path(folder, f"{name}.mp4")
    path.parent.mkdir(parents=True, exist_ok=True)

    def frame(obs):  # the newest of the stacked ones, [210, 160, 3]
        return obs[0, -3:].transpose(1, 2, 0)

    with warnings.catch_warnings():
        # JAX warns of forks; this one runs ffmpeg and nothing of JAX.
        warnings.simplefilter("ignore", RuntimeWarning)
        # 15 steps of four frames a second show it in real time; ffmpeg must not rescale it.
        with imageio.get_writer(path, fps=15, macro_block_size=2) as writer:
            obs, _ = envs.reset()
            writer.append_data(frame(obs))
            for action in evaluation.actions:
                obs, *_ = envs.step(np.array([action]))
                writer.append_data(frame(obs))
    return path


# ==================================================================================================
# Run folder
# ==================================================================================================


class UsageError(ValueError):
    """Flags that cannot work; exit status 2."""


class RunError(Exception):
    """A failure that is not a mistake in the code: files, packages, diverged losses; status 1."""


def create_run_folder(args):
    """Creates the folder of a new run; returns its path."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    try:
        pathlib.Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):  # runs that start in one second get numbers
            run_dir = pathlib.Path(args.runs_dir, name if number == 1 else f"{name}_{number}")
            if not pathlib.Path(args.videos_dir, run_dir.name).exists():  # of another --runs-dir
                with contextlib.suppress(FileExistsError):
                    run_dir.mkdir()
                    return run_dir
    except OSError as error:
        raise RunError(f"the folder of the run cannot be created: {error}") from error


def create_video_folder(args, run_dir):
    """Creates the folder for the videos of a run, unless it exists; returns its path."""
    video_dir = pathlib.Path(args.videos_dir, run_dir.resolve().name)
    try:
        video_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the folder for videos cannot be created: {error}") from error
    return video_dir


def write_file(path, content):
    """Writes bytes to a file that nobody sees half-written; raises RunError."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.unlink(missing_ok=True)  # in a stranger's folder it may be a link to elsewhere
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def to_json(content):
    """The text of flags or results; a path, which a flag that you add may be, is a string there."""
    return json.dumps(content, indent=2, default=os.fspath)


def write_json(path, content):
    """Writes JSON; numbers that are not finite become null. Raises RunError."""
    content = json.loads(to_json(content), parse_constant=lambda _: None)
    write_file(path, (to_json(content) + "\n").encode())


def load_args(run_dir):
    """The `Args` saved in a run's args.json; raises RunError.

    They are turned into a command line and parsed like one, which checks the types of all.
    """
    try:
        saved = json.loads(pathlib.Path(run_dir, "args.json").read_text())
        unknown = saved.keys() - vars(Args()).keys()  # tyro has flags of its own: one writes a file
        if unknown:
            raise ValueError(f"args.json has unknown flags: {sorted(unknown)}")
        words = []
        for name, value in saved.items():
            if isinstance(value, list):  # a tuple; flags that you add may be one
                words += [f"--{name}", *map(str, value)]
            else:
                words.append(f"--{name}={value}")
        plain = [tyro.conf.FlagConversionOff]  # --name=True instead of --name
        args = tyro.cli(Args, args=words, config=plain, console_outputs=False)
        parsed = json.loads(to_json(vars(args)))
        if parsed | saved != parsed:
            raise ValueError("args.json has values of the wrong type")
        check_args(args)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise RunError(f"{run_dir} is not a run of {SCRIPT}: {error}") from error
    except SystemExit as error:  # tyro's
        raise RunError(f"{run_dir} is not a run of {SCRIPT}: args.json does not fit") from error
    return args


def leaf_name(path):
    """The name of an array in a checkpoint, such as stats/running_return, from its path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_key(leaf):
    """Whether an array holds PRNG keys, of which a checkpoint holds the data."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def flatten_state(state):
    """{name: plain array} of a state."""
    leaves = jax.tree.leaves_with_path(state)
    return {leaf_name(p): jax.random.key_data(x) if is_key(x) else x for p, x in leaves}


def checkpoints(run_dir):
    """The paths of a run's checkpoints, the newest last; files with other names are the user's."""
    paths = pathlib.Path(run_dir, "checkpoints").glob("*.npz")
    return sorted(path for path in paths if re.fullmatch("[0-9]{9,}", path.stem))


def save_checkpoint(run_dir, state, num_kept=3):
    """Writes checkpoints/<update>.npz and removes all but the newest few; raises RunError."""
    path = pathlib.Path(run_dir, "checkpoints", f"{int(state.update[0]):09d}.npz")
    buffer = io.BytesIO()
    np.savez(buffer, **jax.device_get(flatten_state(state)))
    write_file(path, buffer.getbuffer())
    for old in checkpoints(run_dir)[:-num_kept]:
        with contextlib.suppress(OSError):  # more files than needed do no harm
            old.unlink()


def load_checkpoint(args, run_dir):
    """The newest checkpoint of a run as the placed `TrainState` of K agents; raises RunError."""
    path = max(checkpoints(run_dir), default=None)
    if path is None:
        raise RunError(f"{run_dir} holds no checkpoint")
    template = jax.eval_shape(functools.partial(init_states, args))
    expected = jax.eval_shape(flatten_state, template)
    try:
        with np.load(path, allow_pickle=False) as file:
            # A small file may unpack to what fills the memory.
            size = sum(member.file_size for member in file.zip.infolist())
            if size > 2**26 + 10 * sum(x.size * x.dtype.itemsize for x in expected.values()):
                raise ValueError(f"it unpacks to {size:,} bytes")
            saved = dict(file)  # reading checks the CRC
    except Exception as error:  # damaged bytes make NumPy and zipfile raise nearly anything
        message = f"{path} is damaged ({error}); remove it to go back to an older one"
        raise RunError(message) from error
    for name in saved.keys() & expected.keys():  # NumPy saves bfloat16 as bytes without a type
        dtype = expected[name].dtype
        if saved[name].dtype == np.dtype(f"V{dtype.itemsize}"):
            saved[name] = saved[name].view(dtype)
    for name in sorted(expected.keys() | saved.keys()):
        have, want = (
            f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "missing"
            for arrays in (saved, expected)
        )
        if have != want:
            message = f"{name} is {have}, expected: {want}"
            raise RunError(f"{path} does not fit {SCRIPT} with these flags: {message}")

    def restore(path, leaf):
        array = saved[leaf_name(path)]
        return jax.random.wrap_key_data(array) if is_key(leaf) else array

    return place(args, jax.tree.map_with_path(restore, template))


def load_run(run_dir):
    """The (args, state) of a saved run, on one device; the state is that of K agents.

    Raises RunError.
    """
    args = dataclasses.replace(load_args(run_dir), num_devices=1)
    return args, load_checkpoint(args, run_dir)


def is_finished(args, state):
    """Whether nothing of a resumed run is left to do, its final evaluation included."""
    summary = pathlib.Path(args.resume, "summary.json")
    if int(state.update[0]) < args.num_updates or not summary.is_file():
        return False
    return '"status": "finished"' in summary.read_text(errors="replace")


def say(line, **options):
    """Prints a line at once; where nobody can read it any more, the run goes on."""
    try:
        print(line, flush=True, **options)
    except OSError:
        sys.stdout = open(os.devnull, "w")


class Logger:
    """Writes metrics of K agents to TensorBoard (a run each) and the terminal; keeps the time."""

    def __init__(self, args, run_dir, first_update):
        self.args = args
        self.first_update = first_update
        self.finite = np.ones(args.num_seeds, bool)  # agents whose losses are finite
        if args.track:
            import wandb

            wandb.tensorboard.patch(root_logdir=str(run_dir), save=False)  # sends what is written
            name = run_dir.resolve().name
            wandb.init(project=args.wandb_project, id=name, resume="allow", config=vars(args))
        folders = [run_dir]
        if args.num_seeds > 1:
            folders = [run_dir / f"seed_{args.seed + k}" for k in range(args.num_seeds)]
        self.writers = [event_file_writer.EventFileWriter(str(folder)) for folder in folders]
        rows = [f"|{name}|{value}|" for name, value in vars(args).items()]
        table = "\n".join(["|flag|value|", "|-|-|", *rows])
        for writer in self.writers:
            self.add(writer, first_update, 0, summary=text_pb("hyperparameters", table))
            # Readers drop what an interrupted run had logged after this step.
            self.add(writer, first_update, 1, session_log={"status": "START"})
        # Of training in this process, without pauses:
        self.start = time.perf_counter()
        self.seconds = 0.0
        self.sps = None

    def add(self, writer, update, offset, **content):
        step = update * self.args.batch_size + offset
        writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def write(self, update, metrics):
        """Writes {tag: [K]} of an update; values that are not finite are left out."""
        for k, writer in enumerate(self.writers):
            values = {tag: value[k] for tag, value in metrics.items() if np.isfinite(value[k])}
            entries = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
            self.add(writer, update, 0, summary={"value": entries})

    def flush(self):
        """Before a checkpoint: a killed run must not lose what comes before it."""
        for writer in self.writers:
            writer.flush()

    def log_chunk(self, first, last, metrics):
        """Waits for updates first + 1 .. last and logs their metrics {tag: [n, K]}.

        Raises RunError when no agent with finite losses is left.
        """
        jax.block_until_ready(metrics)
        self.seconds = time.perf_counter() - self.start
        steps = (last - self.first_update) * self.args.batch_size * self.args.num_seeds
        self.sps = steps / self.seconds
        metrics = {tag: np.asarray(value)[: last - first] for tag, value in metrics.items()}
        for i in range(last - first):
            self.write(first + 1 + i, {tag: value[i] for tag, value in metrics.items()})
        self.write(last, {"charts/SPS": np.full(self.args.num_seeds, self.sps)})
        self.flush()
        self.check_losses(first, metrics["losses/grad_norm"])
        self.print_progress(last, {tag: value[-1] for tag, value in metrics.items()})

    def print_progress(self, update, metrics):
        """One line that is rewritten on a terminal, a new one each time elsewhere."""
        mean = {tag: value[self.finite].mean() for tag, value in metrics.items()}
        done = update / self.args.num_updates
        steps_left = (self.args.num_updates - update) * self.args.batch_size * self.args.num_seeds
        line = f"{update * self.args.batch_size:,} steps ({done:.0%})"
        line += f", {steps_left / self.sps:.0f} s left, {self.sps:,.0f} SPS"
        for tag in ("charts/episodic_return", "losses/policy_loss", "losses/value_loss"):
            if np.isfinite(mean.get(tag, math.nan)):
                name = tag.partition("/")[2].removeprefix("episodic_").replace("_", " ")
                line += f", {name} {mean[tag]:.4g}"
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            say(f"\r{line[:width]}\033[K", end="")
        else:
            say(line)

    def check_losses(self, first, grad_norm):
        """Names agents whose gradients [n, K] are no longer finite; RunError if none is left."""
        for k in np.flatnonzero(self.finite & ~np.isfinite(grad_norm).all(0)):
            self.finite[k] = False
            update = first + 1 + np.isfinite(grad_norm[:, k]).argmin()
            message = f"the losses of seed {self.args.seed + k} are not finite at update {update}"
            if not self.finite.any():
                raise RunError(f"{message}, no seed is left; a smaller --learning-rate may help")
            start = "\n" if sys.stdout.isatty() else ""  # not into the progress line
            say(f"{start}error: {message}; the others go on", file=sys.stderr)

    @contextlib.contextmanager
    def paused(self):
        """Stops the clock for what is not training."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin

    def close(self):
        for writer in self.writers:
            writer.close()
        if self.args.track:
            import wandb

            wandb.finish()
            wandb.tensorboard.unpatch()  # a second run of this process patches it again
        if sys.stdout.isatty():
            say("")


# ==================================================================================================
# Main
# ==================================================================================================


def check_args(args):
    """Raises UsageError for flags that cannot work."""

    def check(condition, message):
        if not condition:
            raise UsageError(message)

    check(args.num_seeds >= 1, f"--num-seeds must be at least 1, not {args.num_seeds}")
    check(0 <= args.seed <= 2**32 - args.num_seeds, "--seed: all seeds must lie in [0, 2^32)")
    several = f"--num-devices {args.num_devices}: start a process for each device (--distributed)"
    check(args.num_devices == 1, f"{several}, by hand each with its own CUDA_VISIBLE_DEVICES")
    name = re.fullmatch(r"\w[\w.-]*", args.exp_name, re.ASCII)
    check(name, "--exp-name must consist of letters, digits and ._-, the last two not first")
    check(args.log_interval >= 1, "--log-interval must be at least 1")
    check(args.checkpoint_interval >= 1, "--checkpoint-interval must be at least 1")
    check(args.eval_episodes >= 1, "--eval-episodes must be at least 1")
    check(args.eval_interval >= 0, "--eval-interval must be at least 0")
    check(args.video_interval >= 1, "--video-interval must be at least 1")
    check_game(args.env_id)
    check(args.max_episode_steps >= 1, "--max-episode-steps must be at least 1")
    repeat = args.repeat_action_probability
    check(0 <= repeat < 1, f"--repeat-action-probability must lie in [0, 1), not be {repeat}")
    check(args.num_envs >= 1, f"--num-envs must be at least 1, not {args.num_envs}")
    check(args.num_steps >= 1, f"--num-steps must be at least 1, not {args.num_steps}")
    check(args.num_minibatches >= 1, "--num-minibatches must be at least 1")
    check(args.update_epochs >= 1, "--update-epochs must be at least 1")
    check(0 < args.learning_rate < math.inf, "--learning-rate must be positive")
    check(0 <= args.gamma <= 1, f"--gamma must lie in [0, 1], not be {args.gamma}")
    check(0 <= args.gae_lambda <= 1, f"--gae-lambda must lie in [0, 1], not be {args.gae_lambda}")
    check(0 <= args.clip_coef < math.inf, "--clip-coef must be at least 0")
    check(0 <= args.ent_coef < math.inf, "--ent-coef must be at least 0")
    check(0 <= args.vf_coef < math.inf, "--vf-coef must be at least 0")
    check(0 < args.max_grad_norm < math.inf, "--max-grad-norm must be positive")
    limited = args.target_kl is None or 0 <= args.target_kl < math.inf
    check(limited, "--target-kl must be at least 0 and finite")
    check(0 < args.adam_eps < math.inf, "--adam-eps must be positive")
    processes = args.num_processes if args.num_processes is not None else 1
    check(processes >= 1, f"--num-processes must be at least 1, not {processes}")
    for flag in ("coordinator_address", "num_processes", "process_id"):
        unused = not args.distributed and getattr(args, flag) is not None
        check(not unused, f"--{flag.replace('_', '-')} needs --distributed")
    check(not (args.distributed and args.eval is not None), "--eval: without --distributed")
    divides = args.num_envs % processes == 0
    check(divides, f"--num-processes {processes} must divide --num-envs {args.num_envs}")
    size = args.batch_size // processes
    batch = "the batch" if processes == 1 else "a process's share of the batch"
    check(size % args.num_minibatches == 0, f"--num-minibatches must divide {batch}, {size}")
    size = args.batch_size
    check(args.num_updates >= 1, f"--total-timesteps must be at least a batch, {size} steps")


def parse_args(words=None):
    """The `Args` of a command line; those of a saved run are the defaults of --resume and --eval.

    Raises UsageError, or RunError where the saved run cannot be read.
    """
    args = tyro.cli(Args, args=words)
    run_dir = args.resume if args.resume is not None else args.eval
    if run_dir is None:
        check_args(args)
        return args
    if args.resume is not None and args.eval is not None:
        raise UsageError("--resume and --eval exclude each other")

    saved = without_processes(load_args(run_dir))
    if args.eval is not None:  # on one device, and writes nowhere that a stranger's folder names
        saved = dataclasses.replace(saved, num_devices=1, track=False, videos_dir=Args().videos_dir)
    default = dataclasses.replace(saved, resume=args.resume, eval=args.eval)
    args = tyro.cli(Args, args=words, default=default)
    may_change = {"resume", "eval", "eval_episodes", "videos_dir", "num_devices"}
    may_change |= {"eval_mode", "eval_protocol"}
    if args.resume is not None:
        may_change |= {"log_interval", "checkpoint_interval", "eval_interval"}
        may_change |= {"capture_video", "video_interval", "track", "wandb_project"}
        may_change |= {"distributed", "coordinator_address", "num_processes", "process_id"}
        if not args.anneal_lr:
            may_change.add("total_timesteps")
    for field in dataclasses.fields(args):
        old, new = getattr(saved, field.name), getattr(args, field.name)
        if new != old and field.name not in may_change:
            flag = "--" + field.name.replace("_", "-")
            message = f"{flag}: this run has {old}, which cannot become {new} here"
            if field.name == "total_timesteps" and args.resume is not None:
                message += " (only where the learning rate is not annealed)"
            raise UsageError(message)
    check_args(args)
    return args


def use_compilation_cache():
    """Lets a later process load the programs this one compiles, from the user's cache folder.

    A folder that JAX was told already, by an environment variable too, wins. The name under which
    JAX keeps a program depends on jaxlib's version and on what the processor can do.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folder = home / "single-file-jax-ppo"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no home, or nothing may be written there: no cache, then
    # JAX's own limit needs another package. A gigabyte; what was written first goes first.
    with contextlib.suppress(OSError):  # another process may do the same
        files = [(path.stat(), path) for path in folder.rglob("*") if path.is_file()]
        files.sort(key=lambda file: file[0].st_mtime, reverse=True)
        sizes = itertools.accumulate(status.st_size for status, _ in files)
        for (_, path), size in zip(files, sizes):
            if size > 2**30:
                path.unlink(missing_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@contextlib.contextmanager
def without_compilation_cache():
    """Keeps what is compiled inside `with` out of the persistent cache.

    For programs that step a pool: they name its address in the memory of this process.
    """
    limit = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)


class StopSignals:
    """The first Ctrl-C or SIGTERM inside `with` is remembered, a second one ends the process."""

    def __init__(self):
        self.received = None

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        if threading.current_thread() is not threading.main_thread():
            numbers = []  # Python has handlers in its main thread only
        # None where a handler is not Python's, which cannot put it back.
        self.handlers = {n: signal.signal(n, self.receive) or signal.SIG_DFL for n in numbers}
        return self

    def receive(self, number, frame):
        self.received = number
        for n in (signal.SIGINT, signal.SIGTERM):
            signal.signal(n, signal.SIG_DFL)

    def __exit__(self, *exception):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def device_finished():
    """Waits at the end of `with`: a chunk that still runs must not outlive the pool it steps."""
    try:
        yield
    finally:
        jax.block_until_ready(jax.live_arrays())


def next_pause(args, done):
    """The update after which the host has something to do again."""
    intervals = [args.log_interval, args.checkpoint_interval]
    if args.eval_interval:
        intervals.append(args.eval_interval)
    if args.capture_video:
        intervals.append(args.video_interval)
    return min(args.num_updates, *(done - done % interval + interval for interval in intervals))


def describe(summary):
    """The result of an evaluation in a few words."""
    score = f"{summary['eval_mode']} return {summary['eval_return_mean']:.1f}"
    return f"{score} over {summary['eval_episodes']} episodes ({summary['eval_protocol']} protocol)"


def evaluate_run(args):
    """`--eval`: writes the run's eval.json and a video, nothing else."""
    run_dir = pathlib.Path(args.eval)
    state = load_checkpoint(args, run_dir)
    video_dir = create_video_folder(args, run_dir)
    evaluation = make_evaluate(args)(state.params, evaluation_keys(args))
    finite = finite_agents(state.params)
    summary = summarize_evaluation(args, evaluation, finite)
    summary["total_timesteps"] = int(state.update[0]) * args.batch_size
    summary["failed_seeds"] = (args.seed + np.flatnonzero(~finite)).tolist()
    say(describe(summary))  # before anything that the disk may refuse
    write_json(run_dir / "eval.json", summary)
    video = record_video(args, evaluation, video_dir, "eval")
    if video:
        say(f"video: {video}" + ("" if finite[0] else " (of an agent that failed)"))


def main(words=None):
    """Trains, resumes or evaluates as the command line says; raises UsageError and RunError."""
    begin = PROCESS_START if words is None else time.time()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # None if it was closed
    args = parse_args(words)
    if args.track:
        wandb = importlib.util.find_spec("wandb")
        if wandb is None or wandb.origin is None:  # or a mere folder of that name
            raise UsageError("--track needs wandb: pip install wandb")
    if args.distributed:
        args = join_processes(args)  # before anything else that JAX does
    use_compilation_cache()
    if args.eval is not None:
        evaluate_run(args)
        return

    # --- Start, or go on ---
    start = time.perf_counter()
    if args.resume is None:
        state = init_agents(args)
    else:
        state = load_checkpoint(args, args.resume)
        if state.update[0] > args.num_updates:
            raise UsageError("--total-timesteps: this run has done more steps already")
        if is_finished(args, state):
            say(f"{args.resume} is finished; to evaluate it again: --eval {args.resume}")
            return
        say("emulators cannot be saved: all games start anew")
    envs = make_env(args)
    state = start_games(args, envs, state)

    # --- Compile; evaluation's network is only traced: its errors show before training ---
    with without_compilation_cache():
        train_chunk = make_train_chunk(args, envs).lower(state, jnp.int32(1)).compile()
    frames = jax.ShapeDtypeStruct((args.num_seeds, args.eval_episodes, *OBS_SHAPE), OBS_DTYPE)
    jax.eval_shape(make_act(args), state.params, frames, evaluation_keys(args), 0)
    evaluate_agents = make_evaluate(args)
    compile_seconds = time.perf_counter() - start

    run_dir = create_run_folder(args) if args.resume is None else pathlib.Path(args.resume)
    video_dir = create_video_folder(args, run_dir)
    run_args = without_processes(dataclasses.replace(args, resume=None))
    flags = to_json(vars(run_args))
    write_file(run_dir / "args.json", flags.encode())  # write_json would make infinity null
    for name in ("summary.json", "eval.json"):  # of an earlier end
        (run_dir / name).unlink(missing_ok=True)
    say(f"{run_dir}: compiled in {compile_seconds:.1f} s")

    # --- Train: while the device works on a chunk of updates, the host logs the one before ---
    done = int(state.update[0])
    logger = Logger(args, run_dir, done)
    with contextlib.closing(logger), device_finished():
        pending = None  # (first, last, metrics) of the chunk that is not logged yet
        with StopSignals() as signals:
            while done < args.num_updates and not agree_on_signal(signals):
                first, done = done, next_pause(args, done)
                state, metrics = train_chunk(state, jnp.int32(done - first))  # does not wait
                if pending:
                    logger.log_chunk(*pending)
                pending = (first, done, metrics)

                save_due = done % args.checkpoint_interval == 0
                video_due = args.capture_video and done % args.video_interval == 0
                eval_due = video_due or (args.eval_interval and done % args.eval_interval == 0)
                if done == args.num_updates or not (save_due or eval_due):
                    continue  # what is due at the end comes below
                logger.log_chunk(*pending)  # waits for the device
                pending = None
                with logger.paused():
                    if eval_due:
                        evaluation = evaluate_agents(state.params, evaluation_keys(args))
                        scores = np.asarray(evaluation.episode_return).mean(1)  # [K]
                        logger.write(done, {"eval/episodic_return": scores})
                        logger.flush()
                    if save_due:  # after it nothing is repeated: all that is logged comes before
                        save_checkpoint(run_dir, gather(state))
                    if video_due:
                        name = f"step_{done * args.batch_size}"
                        record_video(args, evaluation, video_dir, name)
            if pending:
                logger.log_chunk(*pending)
            save_checkpoint(run_dir, gather(state))
        received = agree_on_signal(signals)

        # --- Evaluate and sum up; the video comes last, so that nothing depends on it ---
        finite = logger.finite & finite_agents(state.params)
        device = make_mesh(args).devices.flat[0]
        summary = {
            "script": SCRIPT,
            "status": "interrupted" if received else "finished",
            "env_id": args.env_id,
            "repeat_action_probability": args.repeat_action_probability,
            "full_action_space": args.full_action_space,
            "seed": args.seed,
            "num_seeds": args.num_seeds,
            "num_devices": args.num_devices,
            "num_processes": jax.process_count(),
            "num_envs": args.num_envs,
            "num_steps": args.num_steps,
            "total_timesteps": done * args.batch_size,
            "failed_seeds": (args.seed + np.flatnonzero(~finite)).tolist(),
            "sps": logger.sps,
            "compile_seconds": compile_seconds,
            "train_seconds": logger.seconds,
            "backend": device.platform,
            "device_kind": device.device_kind,
            "jax_version": jax.__version__,
            "args": vars(run_args),
        }
        if not received:
            evaluation = evaluate_agents(state.params, evaluation_keys(args))
            summary |= summarize_evaluation(args, evaluation, finite)
            logger.write(done, {"eval/episodic_return": summary["per_seed"]["eval_return_mean"]})
        summary["wall_seconds"] = time.time() - begin
        write_json(run_dir / "summary.json", summary)

    if received:
        how = f"python {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(run_dir))}"
        if words is not None:  # called from Python, perhaps with parts replaced
            how = f'main(["--resume", {str(run_dir)!r}])'
        if args.distributed:
            how += " with --distributed, in every process as before"
        say(f"interrupted at update {done}; to go on: {how}")
        wait_for_processes(args)
        sys.exit(128 + received)
    video = record_video(args, evaluation, video_dir, f"step_{done * args.batch_size}")
    say(f"run: {run_dir}")
    if video:
        say(f"video: {video}" + ("" if finite[0] else " (of an agent that failed)"))
    say(f"{describe(summary)}, {summary['wall_seconds']:.1f} s in all")
    wait_for_processes(args)


if __name__ == "__main__":
    # Python notices Ctrl-C only when a compilation has ended; the system's own action is at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except (UsageError, RunError) as error:  # errors of the code keep their traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
