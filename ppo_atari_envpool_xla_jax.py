# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20",
#     "flax>=0.12", "optax>=0.2.6", "imageio[ffmpeg]>=2.37", "envpool>=1.2.5",
# ]
# ///
"""PPO on Atari in one file: EnvPool's XLA interface, a CNN, GAE and a fully jitted update.

    python ppo_atari_envpool_xla_jax.py                           # Breakout, ten million steps
    python ppo_atari_envpool_xla_jax.py --env-id Pong-v5 --num-seeds 2  # two agents, one pool
    python ppo_atari_envpool_xla_jax.py --resume runs/<run_name>  # resumes with new games
    python ppo_atari_envpool_xla_jax.py --eval runs/<run_name>    # evaluates, records a video

The default flags are those of CleanRL's ppo_atari_envpool_xla_jax_scan.py: ten million steps, 8
environments x 128 steps, four epochs. (That script ignores its flag for value clipping, treats
truncation as termination, and also learns from steps that only reset a game, see `rollout`.) A
step is one action, held for four frames. With one epoch instead of four, training learns less per
step, but takes less than half the time. With `--update-epochs 1 --num-minibatches 16
--total-timesteps 5e6` on one CPU core, the return reached 248 in Breakout (4.4 hours) and 17 in
Pong (2.1 hours). The next command reached 20 in Pong (2.6 hours on two cores):

    python ppo_atari_envpool_xla_jax.py --env-id Pong-v5 --total-timesteps 10e6 --num-envs 16 \
        --num-steps 64 --update-epochs 1 --num-minibatches 8 --learning-rate 5e-4

ppo_cartpole_jax.py explains PPO. Here one pool of emulators serves all K agents (one per seed), so
`rollout` and `update` handle K agents. `learn`, the second half of `update`, is pure and handles
one agent. Only the class `Atari` and the network are specific to Atari; `Atari` explains how to
replace it. The sections before "Running" contain the algorithm. "Running" adds files and flags.

EnvPool requires Linux and supports CPUs and CUDA GPUs. Emulators cannot be saved: a resumed run
restores parameters, optimizer, schedule and key, and starts new games.

Axes in shape comments ([] is a scalar): K agents (seeds), T steps, N environments, B = T * N batch,
M samples of a minibatch, A actions, E evaluation episodes; C channels, Y rows, X columns and F
features of images.
"""

import contextlib
import dataclasses
import difflib
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
from typing import Literal, NamedTuple

import envpool
import flax.linen as nn
import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

# ==================================================================================================
# Args
# ==================================================================================================


@dataclasses.dataclass
class Args:
    """PPO on Atari through EnvPool's XLA interface."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """number of independent agents; their seeds are seed, seed + 1, ..."""
    exp_name: str = pathlib.Path(globals().get("__file__", "ppo_atari_envpool_xla_jax")).stem
    """experiment name, part of the run name"""
    runs_dir: str = "runs"
    """folder for <run_name>/: event files, args.json, checkpoint.npz, summary.json"""
    videos_dir: str = "videos"
    """folder for <run_name>/ with videos"""
    log_interval: int = 5
    """updates between progress lines; every update is logged"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 10
    """episodes per evaluation, each in its own environment"""
    eval_interval: int = 0
    """updates between evaluations during training; 0: only at the end"""
    eval_mode: Literal["sampled", "greedy"] = "sampled"
    """sample actions, or take the most probable ones (may never FIRE, see --eval-protocol)"""
    eval_protocol: Literal["training", "whole-games"] = "training"
    """press no-ops and FIRE in each life (training) or each game; scores are of whole games"""
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
    env_id: str = "Breakout-v5"
    """EnvPool's name of the game"""
    max_episode_steps: int = 27_000
    """steps of four frames after which a game is truncated"""
    repeat_action_probability: float = 0.0
    """sticky actions: probability that a frame repeats the previous action"""
    full_action_space: bool = False
    """all 18 actions of the console instead of the game's own"""
    num_envs: int = 8
    """parallel environments per agent"""

    # Algorithm. Float flags and the seed are traced: new values need no recompilation, but no `if`
    # can test them. Other flags are static. `total_timesteps` is a float, so that 1e6 parses.
    total_timesteps: float = 10_000_000.0
    """environment steps per agent, rounded down to whole updates"""
    num_steps: int = 128
    """steps per environment and update"""
    learning_rate: float = 2.5e-4
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the batch per update"""
    norm_adv: bool = True
    """normalize advantages per minibatch"""
    clip_coef: float = 0.1
    """clipping range of the probability ratio"""
    clip_vloss: bool = False
    """use a clipped value loss, with the range clip_coef"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """maximum global norm of the gradients"""
    target_kl: float | None = None
    """stop an update at the first minibatch whose KL from the rollout's policy exceeds this"""
    adam_eps: float = 1e-5
    """Adam's epsilon"""

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


EVALUATION, RESUMED = 1, 2  # purposes of seeds: see `env_seeds`


def env_seeds(args, num_envs, *purpose):
    """Seeds [K * num_envs] of environments; agent k gets the same ones as if trained alone.

    `purpose` is empty for a new run; integers select other seeds.
    """
    sequences = [np.random.SeedSequence([args.seed + k, *purpose]) for k in range(args.num_seeds)]
    # EnvPool takes 31 bits.
    return np.concatenate([sequence.generate_state(num_envs) for sequence in sequences]) >> 1


@functools.cache
def make_spec(env_id, **options):
    """EnvPool's spec of an environment, with its spaces; raises `UserError` for an unknown id."""
    try:
        return envpool.make_spec(env_id, **options)
    except Exception as error:  # unknown id, or not Atari: wrong options, missing library
        near = difflib.get_close_matches(env_id, envpool.list_all_envs(), cutoff=0.3)
        hint = f"similar names: {near}; ids other than Atari's need a class like `Atari`"
        raise UserError(f"--env-id {env_id}: {error!r}; {hint}") from error


class Atari:
    """Adapter: EnvPool's Atari games, as the agent and the logs see them.

    | what        | value                                                                         |
    | ----------- | ----------------------------------------------------------------------------- |
    | observation | uint8 [4, 84, 84]: the last four observed frames, grey, oldest first           |
    | action      | one of the game's own, held for four frames; the maximum of the last two       |
    |             | frames is observed, because sprites flicker in some games                      |
    | reward      | change of the score, in training only its sign; info["reward"]: unclipped      |
    | terminated  | game over, in training also a lost life; info["terminated"]: game over         |
    | truncated   | after `max_episode_steps` of a game, all lives together                        |
    | start       | up to 30 no-ops, then FIRE if the game has it; also after a lost life          |

    Four frames show velocities. No-ops make games differ. With the sign of the reward, the same
    flags suit games whose scores differ a thousandfold. Ending an episode with each life teaches
    the agent to stay alive. Reported episodes are whole games with unclipped scores. EnvPool does
    not report rewards of the no-ops and FIRE.

    To use another vector environment, import this file as ppo and set ppo.make_env = MyEnv, a
    class with the same attributes and methods. `video_options`, `video_fps` and `render` are needed
    only for videos. MyEnv's pool has `reset()`, `step(action)`, `close()` and `xla()` like
    EnvPool's Gymnasium interface, and steps all environments at once. It resets an environment on
    the step after the end of an episode (Gymnasium's AutoresetMode.NEXT_STEP), see `rollout`.
    `xla()` must not reset and returns (handle, _, _, step). step(handle, action) returns the handle
    for the next step and (obs, reward, terminated, truncated, info). With environments in Python,
    `step` can use `jax.experimental.io_callback`, as in benchmarks/environments/gymnasium_envs.py.
    """

    video_options = {"gray_scale": False, "img_height": 210, "img_width": 160}
    video_fps = 15  # 60 frames a second, 4 per step

    def __init__(self, args):
        """Raises `UserError` for an unknown id. Called under `jit`: floats may be tracers."""
        self.args = args
        self.options = dict(stack_num=4, frame_skip=4, noop_max=30, use_fire_reset=True)
        for name in ("max_episode_steps", "full_action_space"):
            self.options[name] = getattr(args, name)
        spec = make_spec(args.env_id, **self.options)
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        self.eval_setting = {"eval_protocol": args.eval_protocol}  # reported with evaluations

    def make_pool(self, seeds, evaluation=False, **options):
        """A pool with an environment for each of `seeds`; see `--eval-protocol`."""
        options = {
            "num_envs": len(seeds),
            "seed": seeds.tolist(),
            "episodic_life": not evaluation or self.args.eval_protocol == "training",
            "reward_clip": not evaluation,
            "repeat_action_probability": self.args.repeat_action_probability,
            **self.options,
            **options,
        }
        return envpool.make(self.args.env_id, env_type="gymnasium", **options)

    def start(self, obs, info):
        """(obs, memory) after a reset of N environments; `read` explains the memory."""
        return obs, info["lives"]

    def read(self, lives, valid, outcome):
        """Interprets a step of N environments; returns (outcome, score, ended, memory).

        Inputs: the memory that the call before returned (here `lives`); `valid` [N], False for
        steps that only reset; the pool's (obs, reward, terminated, truncated, info). Returns:

            outcome   (obs, reward, terminated, truncated), from which the agent learns
            score     [N], the reported reward
            ended     [N], whether a reported episode has ended
            memory    for the next step, a tree of [N, ...]

        Arrays are JAX's in training, NumPy's in evaluation. In Atari, the agent's episodes are
        lives and the reported episodes are games.
        """
        obs, reward, terminated, truncated, info = outcome
        game_over = info["terminated"] > 0
        # If a life is lost on the truncated step, EnvPool reports only truncation.
        life_lost = game_over | (info["lives"] < lives)
        terminated = terminated | (truncated & life_lost)
        # Lives rise when a game starts: after game over and, which EnvPool does not report, if the
        # no-ops after a lost life ended the game.
        unnoticed = ~valid & (info["lives"] > lives)
        ended = (valid & (game_over | truncated)) | unnoticed
        return (obs, reward, terminated, truncated), info["reward"], ended, info["lives"]

    def bounded(self, action):
        """Actions [N, ...] clipped to the pool's bounds; Atari has none."""
        return action

    def remember(self, memory, dist):
        """The memory after an action. A recurrent agent can put its hidden state in `dist`."""
        return memory

    def render(self, pool, obs):
        """The newest frame of the first game, [210, 160, 3]."""
        return obs[0, -3:].transpose(1, 2, 0)


def make_env(args):
    """The adapter of the environments."""
    return Atari(args)


# ==================================================================================================
# Agent
# ==================================================================================================


class Categorical(NamedTuple):
    """Distributions over A actions: p(a) = softmax(logits)_a.

    To forbid an action, set its logit to -1e9 (with -inf the entropy would be NaN).
    """

    logits: jax.Array  # [..., A]

    def log_probs(self):
        """Log-probabilities of all actions, actions first: [A, ...]."""
        return jax.nn.log_softmax(jnp.moveaxis(self.logits, -1, 0), axis=0)

    def sample(self, key):
        """Samples actions [...], int32."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self):
        """The most probable actions [...], int32."""
        return self.logits.argmax(-1).astype(jnp.int32)

    def log_prob(self, action):
        """Log-probabilities [...] of actions [...]."""
        log_probs = self.log_probs()
        # A masked sum: the gradient of indexing is slow.
        taken = jax.nn.one_hot(action, len(log_probs), axis=0, dtype=bool)
        return log_probs.sum(0, where=taken)

    def entropy(self):
        """Entropies [...], in nats: -sum_a p(a) log p(a)."""
        log_probs = self.log_probs()
        return -(jnp.exp(log_probs) * log_probs).sum(0)


def pixels_first(obs):
    """Frames [M, C, Y, X] uint8 as float32 [C, Y, X, M].

    `convolve` needs M last. Transposing words of four pixels instead of bytes makes training 1.2
    times faster on a CPU.
    """
    words = jax.lax.bitcast_convert_type(obs.reshape(*obs.shape[:-1], -1, 4), jnp.uint32)
    # Without this barrier XLA would unpack first and transpose bytes.
    words = jax.lax.optimization_barrier(words.transpose(1, 2, 3, 0))
    shifts = 8 * jnp.arange(4, dtype=jnp.uint32).reshape(1, 1, 1, 4, 1)  # low byte first
    pixels = words[..., None, :] >> shifts & 255
    return pixels.reshape(*obs.shape[1:], -1).astype(jnp.float32)


def convolve(x, kernel, stride):
    """Convolution without padding: [C, Y, X, M] with [k, k, C, F] gives [F, Y', X', M].

    A matrix product of the kernel with all patches. On a CPU, XLA's gradient of a convolution
    inside `lax.scan` is a loop, 26 times slower than the gradient of this function. A block of
    stride x stride pixels becomes one pixel with more channels, so the stride becomes 1. Raises
    ValueError unless the stride divides k, Y and X.
    """
    channels, height, width, num = x.shape
    size, features = kernel.shape[0], kernel.shape[-1]
    if size % stride or height % stride or width % stride:
        raise ValueError(f"the stride {stride} must divide the sizes {size}, {height} and {width}")
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


orthogonal = nn.initializers.orthogonal  # `init_mlp` in CartPole's script explains gains


class NatureCNN(nn.Module):
    """The "Nature" CNN (https://doi.org/10.1038/nature14236) with heads for actor and critic.

    Shapes: 4 x 84 x 84 pixels -> 32 x 20 x 20 -> 64 x 9 x 9 -> 64 x 7 x 7 -> 512 features. Your own
    network needs a layer "actor" with a bias, from which `forward` gets the number of actions.
    """

    num_actions: int
    layers: tuple = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # features, size of the kernel, stride

    @nn.compact
    def __call__(self, obs):
        """Logits [M, A] and values [M] of frames [M, 4, 84, 84], uint8; the features if A is 0."""
        x = pixels_first(obs) / 255  # [C, Y, X, M]
        for i, (features, size, stride) in enumerate(self.layers):
            shape = (size, size, len(x), features)
            kernel = self.param(f"conv{i}", orthogonal(math.sqrt(2)), shape)
            bias = self.param(f"conv{i}_bias", nn.initializers.zeros, (features,))
            x = nn.relu(convolve(x, kernel, stride) + bias[:, None, None, None])
        x = x.transpose(3, 1, 2, 0).reshape(obs.shape[0], -1)  # [M, Y * X * F]
        x = nn.relu(nn.Dense(512, kernel_init=orthogonal(math.sqrt(2)), name="dense")(x))
        if not self.num_actions:
            return x
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01), name="actor")(x)
        value = nn.Dense(1, kernel_init=orthogonal(1.0), name="critic")(x)
        return logits, value[:, 0]


def init_agent(args, key, env):
    """Parameters: flax's nested dict of arrays, {"params": {"conv0": ..., "actor": ..., ...}}."""
    space = env.observation_space
    return NatureCNN(int(env.action_space.n)).init(key, jnp.zeros((1, *space.shape), space.dtype))


def forward(args, params, obs):
    """The policy's distribution and the values [M] of observations [M, 4, 84, 84]."""
    num_actions = len(params["params"]["actor"]["bias"])
    logits, value = NatureCNN(num_actions).apply(params, obs)
    return Categorical(logits=logits), value


# ==================================================================================================
# Optimizer
# ==================================================================================================


def make_optimizer(args):
    """Clips the global norm of gradients, then applies Adam without its learning rate."""
    return optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=args.adam_eps)
    )


def optimizer_update(args, grads, opt_state, params, learning_rate):
    """One step; returns (params, opt_state, norm of the gradients before clipping)."""
    # CartPole's script uses one vector. XLA would update a large one on a single CPU core.
    direction, opt_state = make_optimizer(args).update(grads, opt_state)
    step = jax.tree.map(lambda x: -learning_rate * x, direction)
    return optax.apply_updates(params, step), opt_state, optax.tree.norm(grads)


# ==================================================================================================
# PPO
# ==================================================================================================


class EnvState(NamedTuple):
    """The result of the pool's last step."""

    obs: jax.Array  # [N, ...]
    done: jax.Array  # [N], whether the step ended an episode: then the next step only resets
    memory: jax.Array  # see `Atari.read`


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
    action: jax.Array  # [N, ...], as sampled, before `bounded`
    log_prob: jax.Array  # [N]
    value: jax.Array  # [N], of obs
    reward: jax.Array  # [N]
    terminated: jax.Array  # [N], whether an episode (in Atari a life) terminated
    truncated: jax.Array  # [N]
    valid: jax.Array  # [N], False if the step only resets: then only obs and value are meaningful


class Batch(NamedTuple):
    """Inputs of the loss: B samples, or the M of a minibatch."""

    obs: jax.Array  # [B, ...]
    action: jax.Array  # [B, ...]
    log_prob: jax.Array  # [B], of the old policy
    value: jax.Array  # [B], of the old critic
    advantage: jax.Array  # [B]
    target: jax.Array  # [B], for the critic
    valid: jax.Array  # [B], whether the sample counts


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


def check_shapes(shape, **arrays):
    """Raises ValueError for an array of another shape, which would be broadcast silently."""
    for name, array in arrays.items():
        if getattr(array, "shape", None) != shape:
            raise ValueError(f"{name} must have the shape {shape}, not {array}")


def gpu_unroll(steps):
    """The unroll factor of a scan: `steps` on a GPU, where launching kernels is slow, else 1."""
    return steps if jax.default_backend() == "gpu" else 1


def rollout(args, env, pool, state):
    """Plays T steps in N environments with each of K agents, all in one pool.

    Takes a `TrainState` of K agents; returns (state, trajectory: `Transition` of [K, T, N, ...]).

    A pool resets an environment on the step after the end of an episode and ignores that step's
    action. If step 4 ends an episode:

        step t       3      4      5      6
        obs          o3     o4     o5     n0     o5: the episode's last; n0: the next one's first
        action       a3     a4     --     b0     --: sampled, but ignored by the pool
        reward       r3     r4     0      q0
        terminated   no     YES    no     no
        valid        yes    yes    NO     yes    valid[t] = not (terminated or truncated)[t - 1]

    Step 5 stays in the arrays, but counts neither in the loss nor in the statistics.
    """
    # EnvPool writes float64. Without x64, it would write beyond JAX's float32 buffers.
    with jax.enable_x64(True):
        handle, _, _, pool_step = pool.xla()
    num_agents, num_envs = state.env_state.done.shape
    split = functools.partial(jax.random.split, num=args.num_steps + 1)
    keys = jax.vmap(split, out_axes=1)(state.key)  # [T + 1, K]
    action_keys, next_key = keys[:-1], keys[-1]

    def act(params, env_state, key):  # one agent
        dist, value = forward(args, params, env_state.obs)
        action = dist.sample(key)
        log_prob = dist.log_prob(action)
        check_shapes((num_envs,), value=value, log_prob=log_prob, entropy=dist.entropy())
        return action, log_prob, value, env.remember(env_state.memory, dist)

    def by_agent(tree):  # [K * N, ...] -> [K, N, ...]
        return jax.tree.map(lambda x: x.reshape(num_agents, num_envs, *x.shape[1:]), tree)

    def env_step(carry, action_key):
        handle, env_state, stats = carry

        # --- Act ---
        action, log_prob, value, memory = over_seeds(act, state.params, env_state, action_key)
        # Each step takes the previous step's handle, which keeps the steps in order.
        with jax.enable_x64(True):
            handle, step = pool_step(handle, env.bounded(action.reshape(-1, *action.shape[2:])))
        step = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == "float64" else x, step)
        valid = ~env_state.done
        outcome, score, ended, memory = jax.vmap(env.read)(memory, valid, by_agent(step))
        obs, _, terminated, truncated = outcome

        # --- Has the episode ended? ---
        stats = stats._replace(
            running_return=stats.running_return + jnp.where(valid, score, 0.0),
            running_length=stats.running_length + valid,
        )
        # `ended` is also true at the reset after game over; then the length is still 0.
        stats = restart_ended(ended & (stats.running_length > 0), stats)
        transition = Transition(env_state.obs, action, log_prob, value, *outcome[1:], valid)
        env_state = EnvState(obs, done=terminated | truncated, memory=memory)
        return (handle, env_state, stats), transition

    carry = handle, state.env_state, state.stats
    (_, env_state, stats), trajectory = jax.lax.scan(
        env_step, carry, action_keys, unroll=gpu_unroll(4)
    )
    trajectory = jax.tree.map(lambda x: x.swapaxes(0, 1), trajectory)
    return state._replace(env_state=env_state, stats=stats, key=next_key), trajectory


def trajectory_values(args, params, last_obs, trajectory):
    """Values of all observations and of their true successors, both [T, N].

    `last_obs` [N, ...] follows the trajectory. The next observation is the true successor of every
    valid step, because a pool resets one step after the end of an episode. If step 4 ends one:

        step t       3      4      5      6
        valid        yes    yes    NO     yes
        value        V(o3)  V(o4)  V(o5)  V(n0)
        next_value   V(o4)  V(o5)  V(n0)  V(n1)

    `compute_gae` needs no mask: it cuts the recursion at step 4, so A_5 enters no other advantage.
    """
    _, last_value = forward(args, params, last_obs)
    next_value = jnp.concatenate([trajectory.value[1:], last_value[None]])
    return trajectory.value, next_value


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


def valid_mean(x, valid):
    """The mean of x [M] over the valid samples; 0 if there is none."""
    return jnp.where(valid, x, 0.0).sum() / jnp.maximum(valid.sum(), 1)


def normalize(advantage, valid):
    """Advantages [M] with mean 0 and standard deviation 1 over the valid samples."""
    advantage = advantage - valid_mean(advantage, valid)
    return advantage / (jnp.sqrt(valid_mean(advantage**2, valid)) + 1e-8)


def ppo_loss(args, params, batch):
    """The loss of a minibatch, a mean over valid samples; returns (loss [], metrics {tag: []}).

    loss = policy loss + vf_coef * value loss - ent_coef * entropy, as in CartPole's script.
    """
    dist, value = forward(args, params, batch.obs)
    mean = functools.partial(valid_mean, valid=batch.valid)

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
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        # Two estimates of KL(old || new), k3 and k1 in http://joschu.net/blog/kl-approx.html.
        "losses/approx_kl": mean(jnp.expm1(log_ratio) - log_ratio),
        "losses/old_approx_kl": -mean(log_ratio),
        "losses/clipfrac": mean(jnp.abs(ratio - 1) > args.clip_coef),
    }


def reduce_metrics(metrics):
    """Averages metrics over minibatches; takes the maximum of tags that end in _max."""
    return {tag: x.max(0) if tag.endswith("_max") else x.mean(0) for tag, x in metrics.items()}


def update_epochs(args, params, opt_state, batch, learning_rate, key):
    """Several passes over a batch of B samples in shuffled minibatches.

    Stops before the first minibatch whose approx_kl exceeds `target_kl`.
    Returns (params, opt_state, metrics {tag: []} averaged over all minibatches).
    """

    def minibatch_step(carry, index):  # index [M] into the batch
        params, opt_state, active = carry
        minibatch = jax.tree.map(lambda x: x[index], batch)
        if args.norm_adv:
            advantage = normalize(minibatch.advantage, minibatch.valid)
            minibatch = minibatch._replace(advantage=advantage)
        grads, metrics = jax.grad(ppo_loss, argnums=1, has_aux=True)(args, params, minibatch)
        *new, norm = optimizer_update(args, grads, opt_state, params, learning_rate)
        check_shapes((), **metrics)
        metrics["losses/grad_norm"] = norm
        if args.target_kl is not None:
            active &= metrics["losses/approx_kl"] <= args.target_kl
            new = jax.tree.map(functools.partial(jnp.where, active), new, [params, opt_state])
        return (*new, active), metrics

    # Random permutations by sorting, which is fast compared with this network's gradients.
    order = jnp.argsort(jax.random.bits(key, (args.update_epochs, len(batch.target)), jnp.uint32))
    order = order.reshape(args.update_epochs * args.num_minibatches, -1)
    carry = params, opt_state, jnp.bool_(True)
    (params, opt_state, _), metrics = jax.lax.scan(minibatch_step, carry, order)
    return params, opt_state, reduce_metrics(metrics)


# ==================================================================================================
# Training
# ==================================================================================================


class TrainState(NamedTuple):
    """The state of training; checkpoints omit env_state."""

    params: dict
    opt_state: optax.OptState
    env_state: EnvState | None  # of [N]; None before `start_episodes` and in checkpoints
    stats: EpisodeStats  # of [N]
    key: jax.Array  # PRNG key
    update: jax.Array  # [], updates done


def init_train_state(args, key):
    """The `TrainState` of one agent before its first update, without env_state."""
    agent_key, key = jax.random.split(key)
    params = init_agent(args, agent_key, make_env(args))
    return TrainState(
        params=params,
        opt_state=make_optimizer(args).init(params),
        env_state=None,
        stats=init_episode_stats(args.num_envs),
        key=key,
        update=jnp.zeros((), jnp.int32),
    )


def start_episodes(args, env, pool, state):
    """Resets the pool and the running statistics; returns the `TrainState` of K agents."""
    shape = (args.num_seeds, args.num_envs)
    first = env.start(*pool.reset())
    obs, memory = jax.tree.map(lambda x: jnp.array(x.reshape(*shape, *x.shape[1:])), first)
    zeros = np.zeros(shape, np.float32)
    stats = state.stats._replace(running_return=zeros, running_length=np.int32(zeros))
    env_state = EnvState(obs, done=zeros > 0, memory=memory)
    return state._replace(env_state=env_state, stats=stats)


def update(args, env, pool, state):
    """One PPO update of K agents; returns (state, metrics {tag: [K]}). Usage:

    env = make_env(args)
    pool = env.make_pool(env_seeds(args, args.num_envs))
    state = start_episodes(args, env, pool, init_states(args))
    state, metrics = jax.jit(functools.partial(update, args, env, pool))(state)
    """
    state, trajectory = rollout(args, env, pool, state)
    return over_seeds(functools.partial(learn, args), state, trajectory)


def learn(args, state, trajectory):
    """The learning part of an update for one agent; returns (state, metrics {tag: []}).

    `trajectory`, a `Transition` of [T, N, ...], ends in the state's `env_state`. `learn` is
    pure: `jit` it, or `vmap` it over agents and float hyperparameters.
    """
    epochs_key, next_key = jax.random.split(state.key)

    # --- Advantages ---
    value, next_value = trajectory_values(args, state.params, state.env_state.obs, trajectory)
    advantage = compute_gae(
        args, trajectory.reward, value, next_value, trajectory.terminated, trajectory.truncated
    )
    target = advantage + value  # an estimate of the return

    # --- Learn ---
    sampled = trajectory.obs, trajectory.action, trajectory.log_prob
    batch = Batch(*sampled, value, advantage, target, trajectory.valid)
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)  # [B, ...]
    learning_rate = jnp.float32(args.learning_rate)
    if args.anneal_lr:  # reaches 0 after the last update
        learning_rate *= jnp.maximum(0.0, 1 - state.update / jnp.float32(args.num_updates))
    learning_rate *= trajectory.valid.any()  # else Adam's momentum moves params
    params, opt_state, metrics = update_epochs(
        args, state.params, state.opt_state, batch, learning_rate, epochs_key
    )

    # --- Report ---
    target_variance = batch.target.var(where=batch.valid)
    metrics |= {
        # target - value = advantage
        "losses/explained_variance": 1 - batch.advantage.var(where=batch.valid) / target_variance,
        "charts/learning_rate": learning_rate,
        "charts/episodic_return": mean_of_ended(state.stats.last_return),
        "charts/episodic_length": mean_of_ended(state.stats.last_length),
        "charts/reward_mean": trajectory.reward.mean(where=trajectory.valid),
        "charts/value_mean": value.mean(where=trajectory.valid),
    }
    state = state._replace(params=params, opt_state=opt_state, update=state.update + 1)
    return state._replace(key=next_key), metrics


# ==================================================================================================
# Evaluation
# ==================================================================================================


class Evaluation(NamedTuple):
    """Results of E episodes of each of K agents."""

    episode_return: np.ndarray  # [K, E], sums of scores
    episode_length: np.ndarray  # [K, E], the agent's steps
    actions: list  # of the first agent's first episode, including those that the pool ignored


def evaluation_actions(args, params, obs, memory, step):
    """(actions, memory), all of [K, E, ...], at a step of an evaluation."""
    env = make_env(args)

    def act(params, obs, memory, key):  # one agent
        dist, _ = forward(args, params, obs)
        sample_key = jax.random.fold_in(key, step)
        action = dist.mode() if args.eval_mode == "greedy" else dist.sample(sample_key)
        return action, env.remember(memory, dist)

    return over_seeds(act, params, obs, memory, evaluation_keys(args))


def evaluate(args, act, params):
    """Plays E episodes with each of K agents, all in parallel; returns an `Evaluation`.

    `act` is the compiled `evaluation_actions`. A Python loop steps the pool, which needs less
    compilation. Steps that only reset count neither in the score nor in the length.
    """
    env = make_env(args)
    pool = env.make_pool(env_seeds(args, args.eval_episodes, EVALUATION), evaluation=True)
    shape = (args.num_seeds, args.eval_episodes)
    obs, memory = env.start(*pool.reset())
    episode_return, episode_length = np.zeros((2, math.prod(shape)))
    # Whether the reported episode is running, and whether the next step does more than reset.
    running, valid = np.ones((2, math.prod(shape)), bool)
    actions, step = [], 0
    while running.any():
        obs, memory = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (obs, memory))
        actions_and_memory = act(params, obs, memory, step)
        action, memory = jax.tree.map(np.concatenate, actions_and_memory)  # [K * E, ...]
        if running[0]:
            actions.append(action[0])
        outcome, score, ended, memory = env.read(memory, valid, pool.step(env.bounded(action)))
        obs, _, terminated, truncated = outcome
        episode_return += np.where(running & valid, score, 0.0)
        episode_length += running & valid
        running &= ~ended
        valid = ~(terminated | truncated)
        step += 1
    pool.close()
    return Evaluation(episode_return.reshape(shape), episode_length.reshape(shape), actions)


def record_video(args, evaluation, path):
    """Replays the first agent's first episode of an `Evaluation` and writes it as path.mp4."""
    env = make_env(args)
    seeds = env_seeds(args, args.eval_episodes, EVALUATION)[:1]
    pool = env.make_pool(seeds, evaluation=True, **env.video_options)
    path = path.with_suffix(".mp4")
    with warnings.catch_warnings():
        # JAX warns about forks; this one only runs ffmpeg.
        warnings.simplefilter("ignore", RuntimeWarning)
        # ffmpeg must not rescale the frames.
        with imageio.get_writer(path, fps=env.video_fps, macro_block_size=2) as writer:
            writer.append_data(env.render(pool, pool.reset()[0]))
            for action in evaluation.actions:
                obs, *_ = pool.step(env.bounded(action[None]))
                writer.append_data(env.render(pool, obs))
    pool.close()
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
    counts = f"{counts} checkpoint_interval eval_episodes max_episode_steps".split()
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
    received, handlers, process = [], {}, os.getpid()

    def remember(number, frame):
        if os.getpid() != process:  # in a forked worker of a vector environment
            os._exit(128 + number)
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
    """Scores {name: [K]} of an `Evaluation` of K agents."""
    returns, lengths, _ = evaluation
    return {
        "eval_return_mean": returns.mean(1),
        "eval_return_std": returns.std(1),
        "eval_length_mean": lengths.mean(1),
    }


def evaluation_summary(args, evaluation):
    """Prints an evaluation; returns its entries of summary.json: means and values per seed."""
    scores = evaluation_scores(evaluation)
    means = {name: float(x.mean()) for name, x in scores.items()}
    text = ", ".join(f"{name[5:]} {x:.4g}" for name, x in means.items())  # without "eval_"
    print(f"{args.eval_episodes} {args.eval_mode} episodes: {text}", flush=True)
    setting = {"eval_episodes": args.eval_episodes, "eval_mode": args.eval_mode}
    setting |= make_env(args).eval_setting
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
    act = functools.partial(jit_function(args, evaluation_actions), float_inputs(args))
    evaluation = evaluate(args, act, params)
    summary = {"args": vars(args), **evaluation_summary(args, evaluation)}
    write_json(pathlib.Path(args.eval, "eval.json"), summary)
    try_video(args, evaluation, pathlib.Path(args.eval), "eval")


# --- Main ---


def start_run(args, run_dir, env):
    """Creates or loads the state of a run, starts its episodes and compiles its update.

    Returns the state, the pool and two functions, run_update(state) and run_evaluation(params).
    Raises `UserError` for a finished run.
    """
    numbers = float_inputs(args)
    init = jit_function(args, init_states, level=0)
    like = jax.eval_shape(init, numbers)
    # Without checkpoint and summary, the run is new or was killed before it first saved.
    saved = any((run_dir / name).exists() for name in ("checkpoint.npz", "summary.json"))
    state = load_checkpoint(run_dir, like) if saved else init(numbers)
    done = int(jax.device_get(state.update)[0])
    if done >= args.num_updates and (run_dir / "summary.json").exists():
        raise UserError(f"{run_dir} is finished: a larger --total-timesteps continues it")
    # Emulators cannot be saved: a resumed run starts other episodes.
    pool = env.make_pool(env_seeds(args, args.num_envs, *([RESUMED, done] if done else [])))
    state = start_episodes(args, env, pool, state)

    def update_seeds(args, state):
        return update(args, env, pool, state)

    # The state is not donated: if the environments fail, the previous state can be saved.
    traced = jit_function(args, update_seeds).trace(numbers, state)
    act = jit_function(args, evaluation_actions)
    # Tracing finds errors in the evaluation before the update is compiled.
    jax.eval_shape(act, numbers, state.params, state.env_state.obs, state.env_state.memory, 0)
    if args.track:
        start_tracking(args, run_dir)
    with user_errors(f"{run_dir} cannot be written", OSError):
        run_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    write_json(run_dir / "args.json", vars(args) | {"resume": None})
    (run_dir / "summary.json").unlink(missing_ok=True)
    # Bypasses the cache: the compiled update contains the pool's address in this process.
    limit = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    run_update = functools.partial(traced.lower().compile(), numbers)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)
    run_evaluation = functools.partial(evaluate, args, functools.partial(act, numbers))
    return state, pool, run_update, run_evaluation


def run_updates(args, logger, state, run_update, run_evaluation):
    """Trains until the last update, a signal, or the failure of all seeds.

    Evaluates and saves in between; returns (state, updates done, received signals).
    """
    done, states = logger.first_update, [state]  # the last three states; two may be in flight
    try:
        with stop_signals() as signals:
            while done < args.num_updates and not signals and not logger.failed.all():
                state, metrics = run_update(state)  # asynchronous
                states = [*states[-2:], state]
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
                    save_checkpoint(logger.run_dir, state._replace(env_state=None))
                logger.start += time.perf_counter() - pause
            logger.flush()
    except Exception:  # for example, an environment failed: saves what was learned
        for state in reversed(states):
            with contextlib.suppress(Exception):  # fails if the update to this state failed
                save_checkpoint(logger.run_dir, state._replace(env_state=None))
                print(f"\nsaved update {state.update[0]}; to resume: --resume {logger.run_dir}")
                break
        raise
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
    env = make_env(args)  # raises `UserError` for an unknown id
    if args.eval is not None:
        return evaluate_run(args)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{begin:.0f}_{os.urandom(3).hex()}"
    new_dir = pathlib.Path(args.runs_dir, re.sub(r"[^\w.-]", "-", name))
    run_dir = new_dir if args.resume is None else pathlib.Path(args.resume)

    start = time.perf_counter()
    state, pool, run_update, run_evaluation = start_run(args, run_dir, env)
    done = int(jax.device_get(state.update)[0])
    compile_seconds = time.perf_counter() - start
    print(f"{run_dir}: compiled in {compile_seconds:.1f} s", flush=True)
    with contextlib.closing(Logger(args, run_dir, done)) as logger:
        state, done, signals = run_updates(args, logger, state, run_update, run_evaluation)
        if logger.failed.all():
            raise UserError(f"all seeds have failed: NaN in {logger.cause}")
        save_checkpoint(run_dir, state._replace(env_state=None))
        if signals:
            print(f"interrupted at update {done}; to resume: --resume {run_dir}")
            sys.exit(128 + signals[0])
        pool.close()
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
