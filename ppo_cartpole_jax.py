# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.10", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20", "pillow>=11.0"]
# ///
"""PPO on CartPole-v1 in one file and one XLA program: environment, networks, Adam, GAE and update.

    python ppo_cartpole_jax.py                           # solves it in seconds on two CPU cores
    python ppo_cartpole_jax.py --num-seeds 8             # eight independent agents in one program
    python ppo_cartpole_jax.py --resume runs/<run_name>  # go on after an interruption, bit for bit
    python ppo_cartpole_jax.py --eval runs/<run_name>    # evaluate a saved run, record a video

With its default flags every one of 20 seeds reaches the maximum, a return of 500 in each of 100
greedy episodes. For comparisons of speed CleanRL's and PureJaxRL's setting, but with 64
environments, a constant learning rate and another epsilon:

    python ppo_cartpole_jax.py --num-steps 128 --learning-rate 2.5e-4 --no-anneal-lr \
        --gae-lambda 0.95 --norm-adv --clip-coef 0.2 --clip-vloss --ent-coef 0.01 --adam-eps 1e-8

For one large GPU; tried on a CPU only, where three of three seeds reach 500. For an H100 the
compiled program predicts 15 million steps per second (benchmarks/README.md):

    python ppo_cartpole_jax.py --num-envs 4096 --num-minibatches 16 --total-timesteps 2e7

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

    1. rollout            T steps in N environments with the current policy    B = T * N samples
    2. trajectory_values  what return did the critic expect from each state?   values V
    3. compute_gae        how much better than that did each action turn out?  advantages A
    4. update_epochs      several passes over the samples in shuffled minibatches:
         ppo_loss           make better actions likelier; fit the critic       its gradient
         adam_update        a step against that gradient                       parameters

`update` is one of these rounds; `train`, all of them as one pure function of a key, is for programs
of your own. Up to the end of the section "Training" stands reinforcement learning for one agent;
what follows is about running it: many agents and devices, evaluation, files, the command line,
which calls `update` through `make_train_chunk`. `update` shows how the parts fit together. Skip at
a first reading what is there for speed alone: `gpu_unroll`, `loss_gradient` (it is the gradient of
`ppo_loss`), `random_permutation`, `make_take`, and all that `platform` and `sharding` stand for.
XLA, JAX's compiler, turns several whole updates, environment included, into one program, so Python
and the device meet once in `--log-interval` updates instead of once a step. Details follow
https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.

Five things of JAX that NumPy lacks: `jax.jit(f)` compiles f for the shapes it is called with;
`jax.vmap(f)` maps f over a leading axis of its arguments, `jax.vmap(f, (0, None))` over that of the
first alone; `jax.lax.scan(f, carry, xs)` is a loop, `carry, y = f(carry, x)` for each x (with
`reverse` from the last one), that returns the last carry and all y, stacked; `jax.grad(f)` is the
gradient of f by its first argument (by the second with `argnums=1`; with `has_aux` f returns
something else too); `jax.tree.map` applies a function to all arrays of a tree, that is of nested
tuples and dicts. Rarer are `lax.map`, a `vmap` of one element after the other;
`lax.cond(flag, f, g, *x)`, which calls f or g; `lax.while_loop`; and `eval_shape`, which tells
shapes and runs nothing. Random numbers come from keys: each key is used once, and `split` makes new
ones.

Axes in shape comments: K agents (seeds), T steps, N environments, B = T * N batch, M samples of a
minibatch, O observation size, A actions, E evaluation episodes, U updates.
"""

import time

PROCESS_START = time.time()  # before the heavy imports: `wall_seconds` counts them

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import math
import operator
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import threading
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image, ImageDraw
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer

# A renamed copy logs under its own name, "ppo (1).py" as ppo__1_.
SCRIPT = re.sub(r"[^\w.-]", "_", pathlib.Path(__file__).stem, flags=re.ASCII)
DEVICES = "devices"  # the mesh axis over which agents or environments are spread


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
    """PPO on pure-JAX CartPole-v1."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """independent agents trained at once, with seeds seed .. seed + num_seeds - 1"""
    num_devices: int = 1
    """devices over which agents are spread or, if that does not divide --num-seeds, environments (a
    CPU shows as N of them with XLA_FLAGS=--xla_force_host_platform_device_count=N)"""
    exp_name: str = SCRIPT
    """name of the experiment, part of the run's name"""
    runs_dir: str = "runs"
    """folder that receives <run_name>/: TensorBoard events, args.json, checkpoints, summary.json"""
    videos_dir: str = "videos"
    """folder that receives <run_name>/ with videos"""
    log_interval: int = 10
    """updates in one call of the device, at most; then Python logs each of them"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 100
    """greedy episodes of an evaluation, each in an environment of its own"""
    eval_interval: int = 0
    """updates between evaluations during training; 0: none but after the last update and for
    videos"""
    capture_video: bool = False
    """also record the policy during training, not only at its end"""
    video_interval: int = 50
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
    env_id: Literal["CartPole-v1"] = "CartPole-v1"
    """the only environment of this script; see make_env"""
    kinematics_integrator: Literal["euler", "semi-implicit"] = "euler"
    """whether positions advance with the old (euler, Gymnasium's default) or the new velocities"""
    num_envs: int = 64
    """parallel environments of each agent"""

    # Algorithm
    total_timesteps: Count = 500_000
    """environment steps of each agent, rounded down to whole updates"""
    num_steps: int = 32
    """steps per environment and update"""
    learning_rate: float = 3e-3
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly; it would be zero after the last update"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """passes over the batch per update"""
    norm_adv: bool = False
    """normalise advantages in each minibatch; once CartPole is solved that only amplifies noise"""
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

    @property
    def batch_size(self) -> int:
        """Environment steps of one update, B."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return self.total_timesteps // self.batch_size


# ==================================================================================================
# Environment
# ==================================================================================================


class CartPoleState(NamedTuple):
    """State of one environment; float32 scalars."""

    x: jax.Array  # position of the cart, m
    x_dot: jax.Array  # its velocity, m/s
    theta: jax.Array  # angle of the pole from upright, clockwise, rad
    theta_dot: jax.Array  # its angular velocity, rad/s


@dataclasses.dataclass(frozen=True)
class CartPole:
    """Gymnasium's CartPole-v1 (Barto, Sutton & Anderson, 1983); one environment, to be vmapped.

    | what        | value                                                                    |
    | ----------- | ------------------------------------------------------------------------ |
    | state       | `CartPoleState`                                                          |
    | observation | float32 [4]: position, velocity, angle, angular velocity                 |
    | action      | 0 pushes the cart to the left, 1 to the right                            |
    | reward      | 1 for every step                                                         |
    | terminated  | cart further than 2.4 m from the centre, or pole more than 12 degrees off |
    | truncated   | by the caller, after `max_episode_steps`                                 |
    | start       | each component uniform in [-0.05, 0.05]                                  |

    An environment of your own needs the same: `reset`, `step`, `observe`, `num_actions`,
    `max_episode_steps` and, for videos, `render`. States and observations may have any structure,
    shapes and types (the agent below takes arrays; others need another `init_agent` and
    `forward`). `terminated` is a bool. Neither time limit nor reset belong inside: `rollout` takes
    care of both. It draws a start state for every step, all at once, and keeps every observation:
    large ones, or a slow `reset`, may ask for fewer environments. Evaluation plays
    `max_episode_steps` steps and keeps the states of one environment.
    """

    gravity: float = 9.8  # m/s^2
    mass_cart: float = 1.0  # kg
    mass_pole: float = 0.1  # kg
    half_length: float = 0.5  # m, pivot to the pole's centre of mass
    force: float = 10.0  # N
    tau: float = 0.02  # s per step
    x_limit: float = 2.4  # m
    theta_limit: float = 12 * math.pi / 180  # rad
    num_actions: int = 2
    max_episode_steps: int = 500
    integrator: str = "euler"

    def reset(self, key):
        """A start state, drawn with a PRNG key."""
        x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        return CartPoleState(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot)

    def step(self, key, state, action):
        """One step of tau seconds; returns (state, reward [], terminated []).

        With force F, total mass M, the pole's mass m and half length l, the equations of motion
        (Florian, 2007, without friction) are

            push       = (F + m l theta_dot^2 sin(theta)) / M
            theta_acc  = (g sin(theta) - cos(theta) push) / (l (4/3 - m cos(theta)^2 / M))
            x_acc      = push - m l theta_acc cos(theta) / M

        `key` is for environments with random transitions; this one has none.
        """
        x, x_dot, theta, theta_dot = state
        force = jnp.where(action == 1, self.force, -self.force)
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        total_mass = self.mass_cart + self.mass_pole
        push = (force + self.mass_pole * self.half_length * theta_dot**2 * sin) / total_mass
        effective_length = self.half_length * (4 / 3 - self.mass_pole * cos**2 / total_mass)
        theta_acc = (self.gravity * sin - cos * push) / effective_length
        x_acc = push - self.mass_pole * self.half_length * theta_acc * cos / total_mass

        new_x_dot = x_dot + self.tau * x_acc
        new_theta_dot = theta_dot + self.tau * theta_acc
        if self.integrator == "semi-implicit":
            x_dot, theta_dot = new_x_dot, new_theta_dot
        new_state = CartPoleState(
            x=x + self.tau * x_dot,
            x_dot=new_x_dot,
            theta=theta + self.tau * theta_dot,
            theta_dot=new_theta_dot,
        )
        off_track = jnp.abs(new_state.x) > self.x_limit
        fallen = jnp.abs(new_state.theta) > self.theta_limit
        return new_state, jnp.ones_like(x), off_track | fallen

    def observe(self, state):
        """The observation [4] of a state."""
        return jnp.stack(state)

    def render(self, state, width=300, height=200):
        """Draws a state to scale on the host; uint8 [height, width, 3]."""
        x, theta = float(state.x), float(state.theta)
        scale = width / (2.2 * self.x_limit)  # pixels per metre
        axle_x, axle_y = width / 2 + x * scale, 0.75 * height
        length = 2 * self.half_length * scale
        tip = (axle_x + length * math.sin(theta), axle_y - length * math.cos(theta))

        def box(half_width, half_height):  # around the axle, in metres
            w, h = half_width * scale, half_height * scale
            return [axle_x - w, axle_y - h, axle_x + w, axle_y + h]

        image = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(image)
        draw.line([0, axle_y, width, axle_y], fill="black")
        draw.rectangle(box(0.2, 0.12), fill=(40, 40, 40))
        draw.line([axle_x, axle_y, *tip], fill=(204, 153, 102), width=max(2, round(0.08 * scale)))
        draw.ellipse(box(0.04, 0.04), fill=(130, 130, 255))
        return np.asarray(image)


def make_env(args):
    """The environment; the only place that names it."""
    return CartPole(integrator=args.kinematics_integrator)


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


def init_mlp(key, sizes, head_gain):
    """Layers {"w" [out, in], "b" [out, 1]} of a multilayer perceptron with these sizes.

    An orthogonal matrix keeps the lengths of the vectors that pass through it, so that signals and
    gradients neither vanish nor explode with depth. The gain sqrt(2) is derived for relu, which
    halves a signal's power; with tanh it is a convention that works. The gain of the head sets
    where learning begins: 0.01 gives nearly the same policy in all states.
    """
    layers = []
    for i, layer_key in enumerate(jax.random.split(key, len(sizes) - 1)):
        is_head = i == len(sizes) - 2
        initializer = jax.nn.initializers.orthogonal(head_gain if is_head else math.sqrt(2))
        # One after the other under vmap: jaxlib 0.10's batched QR can deadlock on a CPU. An
        # initializer of your own that is orthogonal, flax's too, needs the same.
        draw = jax.custom_batching.sequential_vmap(
            functools.partial(initializer, shape=(sizes[i + 1], sizes[i]))
        )
        layers.append({"w": draw(layer_key), "b": jnp.zeros((sizes[i + 1], 1))})
    return layers


def mlp(layers, x):
    """tanh layers and a linear head: [in, M] -> [out, M].

    Features come first, so that the long batch is the contiguous axis: `w @ x` is then faster for
    small networks on a CPU than `x @ w`.
    """
    for layer in layers[:-1]:
        x = jnp.tanh(layer["w"] @ x + layer["b"])
    return layers[-1]["w"] @ x + layers[-1]["b"]


def init_agent(args, key, env):
    """Parameters: {"actor": layers, "critic": layers}; `args` is for networks with flags.

    Actor and critic share no layer, so that the critic's errors, large at first, do not reshape the
    features of the policy. Their gradients meet in one place only, the common norm (`adam_update`).
    """
    obs = jax.eval_shape(lambda: env.observe(env.reset(jax.random.key(0))))  # runs nothing
    obs_size = math.prod(obs.shape)
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": init_mlp(actor_key, (obs_size, 64, 64, env.num_actions), head_gain=0.01),
        "critic": init_mlp(critic_key, (obs_size, 64, 64, 1), head_gain=1.0),
    }


def forward(args, params, obs):
    """The policy's distribution and the values [M] of a batch of observations [M, ...].

    Outside of the network the batch is the first axis, inside it is the last (see `mlp`).
    """
    obs_size = params["actor"][0]["w"].shape[1]
    if obs.ndim == 0 or math.prod(obs.shape[1:]) != obs_size:
        raise ValueError(
            f"forward takes the parameters of one agent (without the axis K of `load_run`) and a "
            f"batch of observations, [M, ...] with {obs_size} numbers in each (obs[None] is a "
            f"batch of one), but got observations of shape {obs.shape}"
        )
    x = obs.reshape(len(obs), -1).astype(jnp.float32).T  # [O, M]
    logits = mlp(params["actor"], x)  # [A, M]
    value = mlp(params["critic"], x)  # [1, M]
    return Categorical(logits=logits.T), value[0]


# ==================================================================================================
# Optimizer
# ==================================================================================================


class AdamState(NamedTuple):
    """Adam's moments, trees like the parameters, and the number of steps taken."""

    m: dict
    v: dict
    count: jax.Array


def adam_init(params):
    """The state before the first step."""
    return AdamState(
        m=jax.tree.map(jnp.zeros_like, params),
        v=jax.tree.map(jnp.zeros_like, params),
        count=jnp.zeros((), jnp.int32),
    )


def adam_update(args, grads, state, params, learning_rate, beta1=0.9, beta2=0.999):
    """Scales the gradients down to `max_grad_norm`, then one step of Adam, arXiv:1412.6980.

    Running means of the gradient and of its square, which begin at zero and are therefore too small
    by a factor of 1 - beta^t after t steps, give

        m = beta1 m + (1 - beta1) g            m_hat = m / (1 - beta1^t)
        v = beta2 v + (1 - beta2) g^2          v_hat = v / (1 - beta2^t)
        p = p - learning_rate * m_hat / (sqrt(v_hat) + eps)

    so the scale of a gradient does not matter, if it is well above eps: a parameter moves by about
    the learning rate where its gradients agree from step to step, by less, the noisier they are,
    and at the first step by exactly learning_rate * g / (|g| + eps). Gradients are scaled down
    before, because a single huge one would otherwise fill m and, for longer, v. (Where the critic's
    errors are large, as in CartPole at first, that happens to nearly all of them; Adam then takes
    out what they have in common.)

    Returns (params, state, norm of the gradients before they were scaled).
    """
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    scale = jnp.minimum(1.0, args.max_grad_norm / norm)  # norm 0 gives min(1, inf) = 1
    grads = jax.tree.map(lambda g: scale * g, grads)

    count = state.count + 1
    m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.m, grads)
    v = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, state.v, grads)
    m_correction = 1 / (1 - beta1**count)
    v_correction = 1 / (1 - beta2**count)

    def step(p, m, v):
        return p - learning_rate * (m * m_correction) / (jnp.sqrt(v * v_correction) + args.adam_eps)

    return jax.tree.map(step, params, m, v), AdamState(m=m, v=v, count=count), norm


# ==================================================================================================
# PPO
# ==================================================================================================


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

    obs: jax.Array  # [N, ...]
    action: jax.Array  # [N, ...]
    dist: Categorical  # of the actions, for losses of your own; XLA drops what nothing reads
    log_prob: jax.Array  # [N], of the actions
    reward: jax.Array  # [N]
    # An episode that terminated has no future. One that the time limit truncated would have gone
    # on, and the observation does not show the limit: its future must be estimated, not set to 0.
    terminated: jax.Array  # [N]
    truncated: jax.Array  # [N]
    next_obs: jax.Array  # [N, ...], the true successor, before any reset


class Batch(NamedTuple):
    """What the loss may read: B samples, or the M of a minibatch."""

    obs: jax.Array  # [B, ...]
    action: jax.Array  # [B, ...]
    dist: Categorical  # the old policy's
    log_prob: jax.Array  # [B], the old policy's
    value: jax.Array  # [B], the old critic's
    advantage: jax.Array  # [B]
    target: jax.Array  # [B], what the critic should have said


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


def select(mask, yes, no):
    """`yes` where `mask` [N] is set, `no` elsewhere; both are trees of arrays [N, ...]."""

    def choose(yes, no):
        per_array = mask.reshape(mask.shape + (1,) * (yes.ndim - 1))  # [N, 1, ...]
        return jnp.where(per_array, yes, no)

    return jax.tree.map(choose, yes, no)


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


def rollout(args, env, params, env_state, stats, key, *, platform=None):
    """Plays T steps in N environments, which begin a new episode where one has ended.

    Returns (env_state, stats, trajectory: `Transition` of [T, N, ...]).
    """
    action_key, step_key, reset_key = jax.random.split(key, 3)
    action_keys = jax.random.split(action_key, args.num_steps)
    step_keys = jax.random.split(step_key, (args.num_steps, args.num_envs))
    # All start states at once take less time than a few in every step, and less along one axis.
    start_states = jax.vmap(env.reset)(jax.random.split(reset_key, args.batch_size))
    start_states = jax.tree.map(
        lambda x: x.reshape(args.num_steps, args.num_envs, *x.shape[1:]), start_states
    )

    def env_step(carry, inputs):
        env_state, stats = carry
        action_key, step_keys, start_state = inputs

        # --- Act ---
        obs = jax.vmap(env.observe)(env_state)
        # Only the shape of `value` is read here: `trajectory_values` computes all in one batch.
        dist, value = forward(args, params, obs)
        action = dist.sample(action_key)
        log_prob = dist.log_prob(action)
        next_state, reward, terminated = jax.vmap(env.step)(step_keys, env_state, action)
        outcome = dict(reward=reward, terminated=terminated, entropy=dist.entropy())
        check_one_each(args.num_envs, value=value, log_prob=log_prob, **outcome)

        # --- Has the episode ended? ---
        stats = stats._replace(
            running_return=stats.running_return + reward, running_length=stats.running_length + 1
        )
        truncated = stats.running_length >= env.max_episode_steps  # so it is the clock, too
        done = terminated | truncated
        transition = Transition(
            obs=obs,
            action=action,
            dist=dist,
            log_prob=log_prob,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            next_obs=jax.vmap(env.observe)(next_state),
        )

        # --- Then begin a new one ---
        env_state = select(done, start_state, next_state)
        return (env_state, restart_ended(done, stats)), transition

    inputs = action_keys, step_keys, start_states
    (env_state, stats), trajectory = jax.lax.scan(
        env_step, (env_state, stats), inputs, unroll=gpu_unroll(platform, 8)
    )
    return env_state, stats, trajectory


def trajectory_values(args, env, params, trajectory):
    """Values of all observations and of their true successors, both [T, N].

    The successor of a step is the observation of the next one, unless the episode was truncated:
    then it is the last observation of that episode. (Where it terminated there is none, and
    `compute_gae` ignores what stands here.) The last step of the rollout has no next one; its
    successor is valued, too. So `value_of(trajectory.next_obs)` would do for all, but take twice as
    long. The time limit, all that truncates here, does so at most once in a window of
    `max_episode_steps` steps, so it is enough to value one more observation in each window.
    """

    def value_of(obs):  # [T, N, ...] -> [T, N], as one batch
        flat_obs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        return forward(args, params, flat_obs)[1].reshape(-1, args.num_envs)

    value = value_of(trajectory.obs)
    last_obs = jax.tree.map(lambda x: x[-1:], trajectory.next_obs)
    next_value = jnp.concatenate([value[1:], value_of(last_obs)])

    # --- In which step of each of the W windows was an environment truncated? ---
    length = min(env.max_episode_steps, args.num_steps)
    num_windows = math.ceil(args.num_steps / length)
    padding = ((0, num_windows * length - args.num_steps), (0, 0))
    truncated = jnp.pad(trajectory.truncated, padding).reshape(num_windows, length, args.num_envs)
    step_in_window = truncated.argmax(1)  # [W, N], 0 where it was not
    step = step_in_window + length * jnp.arange(num_windows)[:, None]

    # --- Value those observations; `where` drops the values of those that were not truncated ---
    # x[step[w, n], n] for each window w and environment n
    pick = jax.vmap(lambda x, step: x[step], in_axes=1, out_axes=1)  # x [T, N, ...], step [W, N]
    truncated_obs = jax.tree.map(lambda x: pick(x, step), trajectory.next_obs)
    truncated_value = jnp.repeat(value_of(truncated_obs), length, axis=0)[: args.num_steps]
    return value, jnp.where(trajectory.truncated, truncated_value, next_value)


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


def ppo_loss(args, params, batch):
    """The loss of a minibatch, a mean over its samples.

    Returns (loss [], metrics {tag: `Mean` or `Max`}); `target_kl` needs "losses/approx_kl".

    loss = policy loss + vf_coef * value loss - ent_coef * entropy. The policy loss is the negative
    mean of `clipped_objective`; in the first minibatch every ratio is 1 and it is -mean(A), 0 if
    these are normalised, so it measures no progress: only its gradient matters. The value loss is
    half the mean squared distance to the target, advantage + old value. With `clip_vloss` the
    larger of two errors counts, that of the value and that of the value held within clip_coef of
    the old one. Once a value has moved further than that towards its target, the second one is
    larger and has no gradient. That slows the critic wherever values are large (here up to
    1 / (1 - gamma) = 100), so it is off by default. The entropy bonus keeps the policy from
    becoming certain before it has tried all actions; CartPole is solved without one.

    Healthy, while the return rises: approx_kl about 0.001 to 0.01, clipfrac 0.02 to 0.3, entropy
    that falls slowly from log(num_actions), explained_variance that rises towards 1. Once the task
    is solved, approx_kl and clipfrac go towards 0 with the learning rate, and explained_variance
    means little, because all returns are nearly the same.
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
        "losses/policy_loss": Mean(policy_loss),
        "losses/value_loss": Mean(value_loss),
        "losses/entropy": Mean(entropy),
        # Two estimates of KL(old policy || new), http://joschu.net/blog/kl-approx.html: the first
        # is less noisy and never negative; the other's tag, CleanRL's, calls it the older one.
        "losses/approx_kl": Mean((ratio - 1 - log_ratio).mean()),
        "losses/old_approx_kl": Mean(-log_ratio.mean()),
        # On either side of the range; only those that went where A asks have no gradient.
        "losses/clipfrac": Mean((jnp.abs(ratio - 1) > args.clip_coef).mean()),
    }


def loss_gradient(args, params, batch, platform, sharding):
    """(gradients of `ppo_loss`, metrics); on CPUs and TPUs large minibatches go block by block.

    A block is so small that its activations stay in the processor's cache (1.6 times as fast on a
    CPU with 1,024 environments and 128 steps), or in the memory on a TPU's chip, if the minibatch
    can be divided so. Blocks are of one size, and `ppo_loss` is a mean over samples, so the mean of
    their gradients is that of the minibatch. (Of a function of a mean, say a hinge on the mean KL
    divergence, it is not: what needs the whole minibatch belongs into `minibatch_step`.)
    """
    grad = jax.grad(ppo_loss, argnums=1, has_aux=True)
    block_size = {"cpu": 4096, "tpu": 32_768}.get(platform)
    size = len(batch.log_prob)
    if block_size is None or size < 2 * block_size or sharding is not None:
        return grad(args, params, batch)
    num_blocks = max(n for n in range(1, size // block_size + 1) if size % n == 0)
    blocks = jax.tree.map(lambda x: x.reshape(num_blocks, -1, *x.shape[1:]), batch)
    grads, metrics = jax.lax.map(lambda block: grad(args, params, block), blocks)
    metrics = combine_metrics(metrics, np.ones(num_blocks, bool))
    return jax.tree.map(lambda g: g.mean(0), grads), metrics


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


def make_take(batch):
    """Returns `take(index)`: the batch of the samples `index` [M], so x[index] of every array x.

    A gather has a price of its own on a CPU, so arrays like `advantage`, float32 [B], are stacked
    and gathered as one: an update takes 4 to 8% less time on one processor, 1% more on another.
    """
    leaves, tree = jax.tree.flatten(batch)
    like = batch.advantage
    is_row = [x.shape == like.shape and x.dtype == like.dtype for x in leaves]
    stacked = jnp.stack([x for x, row in zip(leaves, is_row) if row])

    def take(index):
        rows = iter(stacked[:, index])
        return tree.unflatten([next(rows) if row else x[index] for x, row in zip(leaves, is_row)])

    return take


def update_epochs(args, params, opt_state, batch, learning_rate, key, platform, sharding):
    """Passes over a batch of B samples in shuffled minibatches.

    A scan over epochs of a scan over minibatches; `active` and `no_epoch` serve `target_kl` alone.
    `platform` and `sharding` are explained at `update`.
    Returns (params, opt_state, metrics {tag: []}).
    """

    take = make_take(batch)

    def minibatch_step(carry, index):  # index [M] into the batch
        params, opt_state = carry
        minibatch = take(index)
        if sharding is not None:  # each device takes its part of the samples
            minibatch = jax.lax.with_sharding_constraint(minibatch, sharding)
        if args.norm_adv:
            advantage = minibatch.advantage - minibatch.advantage.mean()
            advantage = advantage / (minibatch.advantage.std() + 1e-8)
            minibatch = minibatch._replace(advantage=advantage)
        grads, metrics = loss_gradient(args, params, minibatch, platform, sharding)
        params, opt_state, norm = adam_update(args, grads, opt_state, params, learning_rate)
        return (params, opt_state), {**metrics, "losses/grad_norm": Mean(norm)}

    def one_epoch(params, opt_state, key):
        order = random_permutation(key, args.batch_size).reshape(args.num_minibatches, -1)
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
        approx_kl = metrics["losses/approx_kl"].value.mean()
        return (params, opt_state, active & (approx_kl <= args.target_kl)), (metrics, active)

    (params, opt_state, _), (metrics, active) = jax.lax.scan(
        epoch, (params, opt_state, jnp.bool_(True)), jax.random.split(key, args.update_epochs)
    )
    took_place = jnp.broadcast_to(active[:, None], (args.update_epochs, args.num_minibatches))
    metrics = combine_metrics(metrics, took_place)
    return params, opt_state, {tag: metric.value for tag, metric in metrics.items()}


# ==================================================================================================
# Training
# ==================================================================================================


class TrainState(NamedTuple):
    """Everything that training needs to go on; checkpoints hold exactly this."""

    params: dict
    opt_state: AdamState
    env_state: CartPoleState  # of [N]
    stats: EpisodeStats  # of [N]
    key: jax.Array  # PRNG key
    update: jax.Array  # [], updates done


def init_train_state(args, key):
    """The `TrainState` of one agent before its first update."""
    env = make_env(args)
    agent_key, reset_key, key = jax.random.split(key, 3)
    params = init_agent(args, agent_key, env)
    env_state = jax.vmap(env.reset)(jax.random.split(reset_key, args.num_envs))
    state = TrainState(
        params=params,
        opt_state=adam_init(params),
        env_state=env_state,
        stats=init_episode_stats(args.num_envs),
        key=key,
        update=jnp.zeros((), jnp.int32),
    )
    # For states of your own: a Python 0 in one is weakly typed, and `scan` would let a step make a
    # float of it without a word.
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)


def update(args, state, *, platform=None, sharding=None):
    """One PPO update of one agent; returns (state, metrics {tag: []}).

    `platform` ("cpu", "gpu", "tpu") picks what is faster there, `sharding` spreads the samples of a
    minibatch over devices; without both it is plain JAX, for `jit` and `vmap` on any device.
    """
    env = make_env(args)
    rollout_key, epochs_key, next_key = jax.random.split(state.key, 3)

    # --- Play ---
    env_state, stats, trajectory = rollout(
        args, env, state.params, state.env_state, state.stats, rollout_key, platform=platform
    )

    # --- Advantages ---
    value, next_value = trajectory_values(args, env, state.params, trajectory)
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
    )
    batch = jax.tree.map(lambda x: x.reshape(args.batch_size, *x.shape[2:]), batch)
    learning_rate = jnp.float32(args.learning_rate)
    if args.anneal_lr:
        left = jnp.maximum(0.0, 1 - state.update / float(args.num_updates))  # 0 after the run
        learning_rate = learning_rate * left
    params, opt_state, metrics = update_epochs(
        args, state.params, state.opt_state, batch, learning_rate, epochs_key, platform, sharding
    )

    metrics |= {
        # Of the targets, by the old critic: target - value = advantage.
        "losses/explained_variance": 1 - advantage.var() / target.var(),
        "charts/learning_rate": learning_rate,
        "charts/episodic_return": mean_of_ended(stats.last_return),
        "charts/episodic_length": mean_of_ended(stats.last_length),
    }
    state = TrainState(
        params=params,
        opt_state=opt_state,
        env_state=env_state,
        stats=stats,
        key=next_key,
        update=state.update + 1,
    )
    return state, metrics


def train(args, key):
    """All of training, one agent: returns (state, metrics {tag: [U]} of every update).

    A pure function of a key and of every float in `args`, so both can be swept in one program:

        def agent(learning_rate, key):
            return train(dataclasses.replace(args, learning_rate=learning_rate), key)

        states, metrics = jax.jit(jax.vmap(agent))(learning_rates, keys)

    `args.seed` is not read (`seed_keys` has the command line's keys). Flags are not checked: call
    `check_args` yourself, before you put arrays in. Sizes belong into `Args(...)`: where it derives
    a flag from others, `replace` keeps the old one. charts/episodic_return is -inf until an episode
    has ended.
    """
    if args.num_updates < 1:
        raise ValueError(f"total_timesteps must be at least a batch, {args.batch_size} steps")
    state = init_train_state(args, key)
    return jax.lax.scan(lambda state, _: update(args, state), state, length=args.num_updates)


def make_train_step(args):
    """Returns the jitted `train_step(state) -> (state, metrics)`: one update of one agent.

        state = jax.jit(functools.partial(init_train_state, args))(key)
        train_step = make_train_step(args)
        state, metrics = train_step(state)

    It donates its argument: the new state takes the memory of the old one, which is gone. After
    `args.num_updates` calls an annealed learning rate is zero.
    """
    return jax.jit(functools.partial(update, args), donate_argnums=0)


# ==================================================================================================
# Seeds and devices: everything above is one agent, the rest of the file is about running it
# ==================================================================================================


def seed_keys(args):
    """One PRNG key per agent, [K]."""
    first = jnp.uint32(args.seed)
    return jax.vmap(jax.random.key)(first + jnp.arange(args.num_seeds, dtype=jnp.uint32))


def make_mesh(args):
    """The first `num_devices` devices."""
    return jax.sharding.Mesh(np.array(jax.local_devices()[: args.num_devices]), (DEVICES,))


def spreads_agents(args):
    """Whether devices have agents of their own; if not, they share each agent's environments."""
    return args.num_seeds % args.num_devices == 0


def place(args, state):
    """A `TrainState` of K agents, spread over the mesh."""
    return jax.device_put(state, state_shardings(args))


def state_shardings(args):
    """How a `TrainState` of K agents lies on the mesh; a prefix of its tree."""
    mesh = make_mesh(args)
    if spreads_agents(args):
        return jax.NamedSharding(mesh, jax.P(DEVICES))
    everywhere = jax.NamedSharding(mesh, jax.P())
    by_environment = jax.NamedSharding(mesh, jax.P(None, DEVICES))  # [K, N]
    fields = dict.fromkeys(TrainState._fields, everywhere)  # those you add, too
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


def make_train_chunk(args):
    """Returns the jitted `train_chunk(state, n) -> (state, metrics {tag: [rows, K]})`: n updates.

    It takes the state of `init_agents` (or `place`) or of the chunk before, and donates it: the new
    state takes the memory of the old one. Metrics have `chunk_size(args)` rows, the most that n may
    be: those of the n updates come first, the rest is zero.
    """
    mesh = make_mesh(args)
    platform = mesh.devices.flat[0].platform
    sharding = None
    if not spreads_agents(args):
        sharding = jax.NamedSharding(mesh, jax.P(DEVICES))
    update_agent = functools.partial(update, args, platform=platform, sharding=sharding)
    update_agents = over_agents(update_agent, platform)
    if spreads_agents(args) and args.num_devices > 1:
        layout = dict(mesh=mesh, in_specs=jax.P(DEVICES), out_specs=jax.P(DEVICES))
        update_agents = jax.shard_map(update_agents, **layout, check_vma=False)

    # Inlined, it compiles to the same program, but is traced once for both of its uses below.
    update_agents = jax.jit(update_agents, inline=True)

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

    placed, everywhere = state_shardings(args), jax.NamedSharding(mesh, jax.P())
    layout = dict(in_shardings=(placed, None), out_shardings=(placed, everywhere))
    return jax.jit(train_chunk, donate_argnums=0, **layout)


def chunk_size(args):
    """The most updates in one call of the device."""
    return min(args.log_interval, args.checkpoint_interval, args.num_updates)


# ==================================================================================================
# Evaluation and video
# ==================================================================================================


class Evaluation(NamedTuple):
    """Episodes in fresh environments, and what it takes to draw the first one.

    L is the longest possible episode; states after the end of the first one repeat its last.
    """

    episode_return: jax.Array  # [E]
    episode_length: jax.Array  # [E]
    states: CartPoleState  # of [L + 1]


def evaluate(args, params, key):
    """One greedy episode of one agent in each of E fresh environments: an `Evaluation`."""
    env = make_env(args)
    reset_key, step_key = jax.random.split(key)
    start_state = jax.vmap(env.reset)(jax.random.split(reset_key, args.eval_episodes))

    def env_step(carry, key):
        state, running = carry
        dist, _ = forward(args, params, jax.vmap(env.observe)(state))
        keys = jax.random.split(key, args.eval_episodes)
        next_state, reward, terminated = jax.vmap(env.step)(keys, state, dist.mode())
        state = select(running, next_state, state)
        first_state = jax.tree.map(lambda x: x[0], state)
        return (state, running & ~terminated), (jnp.where(running, reward, 0), running, first_state)

    carry = start_state, jnp.ones(args.eval_episodes, bool)
    keys = jax.random.split(step_key, env.max_episode_steps)
    _, (reward, running, first_states) = jax.lax.scan(env_step, carry, keys)
    states = jax.tree.map(
        lambda start, later: jnp.concatenate([start[:1], later]), start_state, first_states
    )
    return Evaluation(episode_return=reward.sum(0), episode_length=running.sum(0), states=states)


def make_evaluate(args):
    """Returns the jitted `evaluate_agents(params, keys)` of K agents: `Evaluation` of [K, ...]."""
    platform = make_mesh(args).devices.flat[0].platform
    return jax.jit(over_agents(functools.partial(evaluate, args), platform))


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
        "eval_mode": "greedy",
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
    """Writes the first agent's first episode as a GIF; returns its path, None without `render`."""
    env = make_env(args)
    if not hasattr(env, "render"):
        return None
    states = jax.tree.map(lambda x: x[0] if is_key(x) else np.asarray(x[0]), evaluation.states)
    length = int(evaluation.episode_length[0, 0])
    frames = []
    for t in range(0, length + 1, 2):  # 25 frames a second show it in real time
        state = jax.tree.map(operator.itemgetter(t), states)
        frames.append(Image.fromarray(env.render(state)).quantize(16))
    path = pathlib.Path(folder, f"{name}.gif")
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=40, loop=0)
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
    check(args.num_devices >= 1, f"--num-devices must be at least 1, not {args.num_devices}")
    name = re.fullmatch(r"\w[\w.-]*", args.exp_name, re.ASCII)
    check(name, "--exp-name must consist of letters, digits and ._-, the last two not first")
    check(args.log_interval >= 1, "--log-interval must be at least 1")
    check(args.checkpoint_interval >= 1, "--checkpoint-interval must be at least 1")
    check(args.eval_episodes >= 1, "--eval-episodes must be at least 1")
    check(args.eval_interval >= 0, "--eval-interval must be at least 0")
    check(args.video_interval >= 1, "--video-interval must be at least 1")
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
    divides = args.num_seeds % args.num_devices == 0 or args.num_envs % args.num_devices == 0
    check(divides, f"--num-devices {args.num_devices} must divide --num-seeds or --num-envs")
    size = args.batch_size
    check(size % args.num_minibatches == 0, f"--num-minibatches must divide the batch, {size}")
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

    saved = load_args(run_dir)
    if args.eval is not None:  # on one device, and writes nowhere that a stranger's folder names
        saved = dataclasses.replace(saved, num_devices=1, track=False, videos_dir=Args().videos_dir)
    default = dataclasses.replace(saved, resume=args.resume, eval=args.eval)
    args = tyro.cli(Args, args=words, default=default)
    may_change = {"resume", "eval", "eval_episodes", "videos_dir", "num_devices"}
    if args.resume is not None:
        may_change |= {"log_interval", "checkpoint_interval", "eval_interval"}
        may_change |= {"capture_video", "video_interval", "track", "wandb_project"}
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
    score = f"greedy return {summary['eval_return_mean']:.1f}"
    return f"{score} over {summary['eval_episodes']} episodes"


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
    if args.num_devices > jax.local_device_count():
        raise UsageError(f"--num-devices {args.num_devices}: JAX sees {jax.local_devices()}")
    use_compilation_cache()
    if args.eval is not None:
        evaluate_run(args)
        return

    # --- Start, or go on: XLA compiles training while Python does the rest ---
    start = time.perf_counter()
    if args.resume is not None:
        state = load_checkpoint(args, args.resume)
        if state.update[0] > args.num_updates:
            raise UsageError("--total-timesteps: this run has done more steps already")
        if is_finished(args, state):
            say(f"{args.resume} is finished; to evaluate it again: --eval {args.resume}")
            return
    shapes = jax.eval_shape(functools.partial(init_states, args))
    lowered = make_train_chunk(args).lower(shapes, jnp.int32(1))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compilation = pool.submit(lowered.compile)
        if args.resume is None:
            state = init_agents(args)
        evaluate_agents = make_evaluate(args)  # only traced: its errors show before training
        jax.eval_shape(evaluate_agents, state.params, evaluation_keys(args))
        train_chunk = compilation.result()
    compile_seconds = time.perf_counter() - start

    run_dir = create_run_folder(args) if args.resume is None else pathlib.Path(args.resume)
    video_dir = create_video_folder(args, run_dir)
    flags = to_json(vars(dataclasses.replace(args, resume=None)))
    write_file(run_dir / "args.json", flags.encode())  # write_json would make infinity null
    for name in ("summary.json", "eval.json"):  # of an earlier end
        (run_dir / name).unlink(missing_ok=True)
    say(f"{run_dir}: compiled in {compile_seconds:.1f} s")

    # --- Train: while the device works on a chunk of updates, the host logs the one before ---
    done = int(state.update[0])
    logger = Logger(args, run_dir, done)
    with contextlib.closing(logger):
        pending = None  # (first, last, metrics) of the chunk that is not logged yet
        with StopSignals() as signals:
            while done < args.num_updates and not signals.received:
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
                        save_checkpoint(run_dir, state)
                    if video_due:
                        name = f"step_{done * args.batch_size}"
                        record_video(args, evaluation, video_dir, name)
            if pending:
                logger.log_chunk(*pending)
            save_checkpoint(run_dir, state)

        # --- Evaluate and sum up; the video comes last, so that nothing depends on it ---
        finite = logger.finite & finite_agents(state.params)
        device = make_mesh(args).devices.flat[0]
        summary = {
            "script": SCRIPT,
            "status": "interrupted" if signals.received else "finished",
            "env_id": args.env_id,
            "seed": args.seed,
            "num_seeds": args.num_seeds,
            "num_devices": args.num_devices,
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
            "args": vars(dataclasses.replace(args, resume=None)),
        }
        if not signals.received:
            evaluation = evaluate_agents(state.params, evaluation_keys(args))
            summary |= summarize_evaluation(args, evaluation, finite)
            logger.write(done, {"eval/episodic_return": summary["per_seed"]["eval_return_mean"]})
        summary["wall_seconds"] = time.time() - begin
        write_json(run_dir / "summary.json", summary)

    if signals.received:
        how = f"python {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(run_dir))}"
        if words is not None:  # called from Python, perhaps with parts replaced
            how = f'main(["--resume", {str(run_dir)!r}])'
        say(f"interrupted at update {done}; to go on: {how}")
        sys.exit(128 + signals.received)
    video = record_video(args, evaluation, video_dir, f"step_{done * args.batch_size}")
    say(f"run: {run_dir}")
    if video:
        say(f"video: {video}" + ("" if finite[0] else " (of an agent that failed)"))
    say(f"{describe(summary)}, {summary['wall_seconds']:.1f} s in all")


if __name__ == "__main__":
    # Python notices Ctrl-C only when a compilation has ended; the system's own action is at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except (UsageError, RunError) as error:  # errors of the code keep their traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
