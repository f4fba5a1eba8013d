# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10", "flax>=0.12", "optax>=0.2.6", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20", "pillow>=11.0"
# ]
# ///
"""Recurrent PPO on MiniGrid in one file and one XLA program: environments, GRU agent and update in JAX.

    python ppo_minigrid_rnn.py                            # solves Empty-8x8 in less than a minute on two CPU cores
    python ppo_minigrid_rnn.py --env-id DoorKey-8x8 --total-timesteps 4000000    # --list-envs lists all
    python ppo_minigrid_rnn.py --env-id MemoryS9 --total-timesteps 4000000 --num-envs 256 --num-steps 64 \
        --num-minibatches 8 --gae-lambda 0.95 --norm-adv --ent-coef 0.03    # memory: more exploration
    python ppo_minigrid_rnn.py --resume runs/<run_name>   # go on after an interruption, bit for bit

The setting of the notebook that this script succeeds, for comparisons:

    python ppo_minigrid_rnn.py --env-id Empty-6x6 --total-timesteps 5000000 --num-envs 8192 --num-steps 16 \
        --update-epochs 1 --num-minibatches 16 --gamma 0.99 --gae-lambda 0.95 --norm-adv --ent-coef 0.01 \
        --target-kl None --adam-eps 1e-8 --rnn-hidden-dim 1024 --head-hidden-dim 256 --no-reset-hidden

The environments are 44 of Farama's MiniGrid 3.x (https://minigrid.farama.org): same ids, encoding, rules and
distributions of levels; missions, which none of them needs, are left out.

Algorithm: PPO (https://arxiv.org/abs/1707.06347) with the details of https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/.
Time limits are not terminations: a truncated episode is bootstrapped with the value of its true last observation, given
the hidden state from before the reset. Minibatches are whole environments, so a gradient goes back through all of the
`num_steps` steps of a rollout, but not beyond.

Axes in shape comments: K seeds, T steps, N environments (in what runs on a device: its share), M environments of a
minibatch, B = T * M, A actions, L GRU layers, H hidden units, E evaluation episodes (C of them in a row); C, Y, X,
F channels, rows, columns, features of images; in grids, H and W are height and width and M the marked cells.
"""

import time

PROCESS_START = time.time()  # before the heavy imports: `wall_seconds` counts them

import contextlib
import dataclasses
import difflib
import functools
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
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer

SCRIPT = "ppo_minigrid_rnn"
EVAL_MODES = ("greedy", "sampled")
VIDEO_FORMAT = "gif"
AXIS = "devices"  # mesh axis over which the environments are sharded


# ======================================================================================================================
# Arguments
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Args:
    """Recurrent PPO on pure-JAX MiniGrid."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """independent agents trained at once, with seeds seed .. seed + num_seeds - 1"""
    num_devices: int = 1
    """devices (of each process) over which the environments are sharded (a CPU shows as N of them with
    XLA_FLAGS=--xla_force_host_platform_device_count=N)"""
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
    eval_episodes: int = 256
    """episodes after training, each in an environment of its own"""
    eval_mode: str = "greedy"
    """whether evaluation takes the most probable actions (greedy) or draws them (sampled)"""
    eval_consecutive_episodes: int = 1
    """episodes in a row per environment, each on its own level; --no-reset-hidden: on one hidden state (meta-RL)"""
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
    env_id: str = "MiniGrid-Empty-8x8-v0"
    """environment, with or without "MiniGrid-" and "-v0" """
    list_envs: bool = False
    """print the environments and exit"""
    img_obs: bool = False
    """observe the partial view as 56x56 pixels instead of its 7x7 codes"""
    num_envs: int = 64
    """parallel environments, over all devices, of each agent"""

    # Agent
    action_emb_dim: int = 16
    """size of the previous action's embedding"""
    rnn_hidden_dim: int = 64
    """hidden units of each GRU"""
    rnn_num_layers: int = 1
    """stacked GRUs, whose outputs are summed"""
    head_hidden_dim: int = 64
    """units of the hidden layer of actor and critic"""
    reset_hidden: bool = True
    """reset hidden state, previous action and previous reward when an episode starts"""
    bf16: bool = False
    """do the matrix products in bfloat16"""

    # Algorithm
    total_timesteps: int = 300_000
    """environment steps of each agent, rounded down to whole updates"""
    num_steps: int = 128
    """steps per environment and update"""
    learning_rate: float = 1e-3
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.995
    """discount"""
    gae_lambda: float = 0.99
    """lambda of generalised advantage estimation; rewards are rare and many steps after what earned them"""
    num_minibatches: int = 16
    """minibatches per epoch, of whole environments"""
    update_epochs: int = 4
    """passes over the batch per update"""
    norm_adv: bool = False
    """normalise advantages in each minibatch; it would only amplify noise until the first success"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    clip_vloss: bool = True
    """clip the value loss too, by the same range"""
    ent_coef: float = 0.0001
    """weight of the entropy bonus; a larger one pulls back to random play between rare successes"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are scaled down to this global norm"""
    target_kl: float | None = 0.02
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
        object.__setattr__(self, "env_id", find_env(self.env_id).env_id)  # the full id
        _check(self.eval_mode in EVAL_MODES, f"--eval_mode must be one of {EVAL_MODES}, not {self.eval_mode}")
        _check(self.seed <= 2**32 - self.num_seeds, f"--seed {self.seed}: all seeds must lie in [0, 2**32)")
        _check(re.fullmatch(r"\w[\w.-]*", self.exp_name, re.A), "--exp_name must consist of letters, digits and ._-")
        _check("" not in (self.resume, self.eval) and None in (self.resume, self.eval), "--resume, --eval: one folder")
        _check(not (self.distributed and self.eval), "--eval is done by one process, without --distributed")
        _check(self.distributed or self.num_processes is None, "--num_processes needs --distributed")
        if self.resume:
            return  # `merge_args` checks the rest, given the flags of the saved run
        parts = self.num_devices * (self.num_processes or 1) * self.num_minibatches
        _check(self.num_envs % parts == 0, f"--num_envs is no multiple of {parts}, --num_devices x --num_minibatches")
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


# A cell is one byte, `kind * 8 + colour`: a third of the memory traffic of Farama's (object, colour, state) triples.
# Kinds up to 10 are Farama's object codes; the state, which only doors have, is folded in as two more kinds of door.
# The constants of kinds are multiplied by 8 already, like `cell & 0xF8`.
RED, GREEN, BLUE, PURPLE, YELLOW, GREY = range(6)
UNSEEN, EMPTY, WALL, FLOOR, DOOR_OPEN, KEY, BALL, BOX, GOAL, LAVA, AGENT, DOOR_CLOSED, DOOR_LOCKED = range(0, 104, 8)
GREY_WALL, GREEN_GOAL, RED_LAVA, BLUE_BALL = WALL + GREY, GOAL + GREEN, LAVA + RED, BALL + BLUE

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)
VIEW = 7  # the agent sees 7x7 cells and stands in the middle of the last row, facing the first
AGENT_CELL = VIEW**2 - 1 - VIEW // 2


def unpack(cells):  # [...] -> [..., 3]
    """One byte per cell as Farama's (object, colour, state) codes: a look-up, cheaper than stacking three results."""
    kind, colour = np.divmod(np.arange(128), 8)
    shut = np.maximum(kind - AGENT // 8, 0)
    return at(np.stack((np.where(shut, DOOR_OPEN // 8, kind), colour, shut), axis=1).astype(np.uint8), cells)


class State(NamedTuple):
    """State of one environment (`jax.vmap` for more). Cells are numbered row by row, `cell = y * W + x`."""

    grid: jax.Array  # [H * W] uint8, packed cells
    position: jax.Array  # [] int32, the agent's cell
    direction: jax.Array  # [] int32: 0 right, 1 down, 2 left, 3 up
    carrying: jax.Array  # [] uint8, packed cell, EMPTY for nothing
    step_count: jax.Array  # [] int32
    marks: jax.Array | None  # [M] int32, cells for the end rule (Dynamic-Obstacles: the obstacles, in moving order)
    key: jax.Array | None = None  # random key of the obstacles' moves, only where there are any


@functools.cache
def view_table(width, height):
    """The cells of an agent's view, [H * W * 4, 7 * 7] by `position * 4 + direction`; -1 for those outside the grid.

    Rows come from far to near, columns from left to right.
    """
    position, direction = np.divmod(np.arange(width * height * 4)[:, None], 4)
    row, column = np.divmod(np.arange(VIEW * VIEW), VIEW)
    ahead, aside = VIEW - 1 - row, column - VIEW // 2
    forward_x, forward_y = np.array([1, 0, -1, 0])[direction], np.array([0, 1, 0, -1])[direction]
    x = position % width + forward_x * ahead - forward_y * aside  # a quarter turn right of (x, y) is (-y, x)
    y = position // width + forward_y * ahead + forward_x * aside
    return np.where((x >= 0) & (x < width) & (y >= 0) & (y < height), y * width + x, -1)


def light(clear, lit):
    """(cells of a row that end up seen, cells of the row ahead that are lit by them), given its clear and lit cells.

    Rows are the bits of an integer, bit i for column i. Light spreads from lit clear cells, first from left to right
    and then back, to the next cell in the sweep and to the cells ahead of both; the last cell of a sweep passes nothing
    on, as in Farama's `Grid.process_vis`.
    """
    lit = (lit | clear ^ (clear + (lit & clear))) & 127  # a carry runs through clear cells and stops behind them
    rightward = lit & clear & 63
    two = clear & clear << 1  # clear, as is the next one to the left
    lit |= (lit & clear) >> 1
    lit |= (lit & two) >> 2
    lit |= (lit & two & two << 2) >> 4
    leftward = lit & clear & 126
    return lit, rightward | rightward << 1 | leftward | leftward >> 1


@dataclasses.dataclass(frozen=True)
class MiniGrid:
    """One MiniGrid id: static constants and pure functions of one environment's state.

    | what        | values                                                                                            |
    | ----------- | ------------------------------------------------------------------------------------------------- |
    | action      | 0 left, 1 right, 2 forward, 3 pick up, 4 drop, 5 toggle, 6 done (Dynamic-Obstacles: only 0 to 2)  |
    | observation | image [7, 7, 3] uint8, axes (column, row, code), (object, colour, state); direction 0 to 3        |
    | reward      | `1 - 0.9 * step_count / max_steps` on success, else 0 (Dynamic-Obstacles: -1 for a collision)     |
    | terminated  | goal or lava entered, a collision, or what the family's `end_rule` says                           |
    | truncated   | left to the caller: `state.step_count >= env.max_steps`. No auto-reset in `step` either           |
    """

    env_id: str
    width: int
    height: int
    max_steps: int
    level: Callable  # the family's generator: (env, uniforms, x, y) -> (grid, position, direction, *marks)
    end_rule: Callable | None = None  # (before, action, after) -> (success, failure), on top of goal and lava
    see_through_walls: bool = False
    num_obstacles: int = 0
    num_actions: int = 7
    can_pick_up: bool = True  # in Memory, picking up counts as toggling

    def reset(self, key):
        """An independent draw from Farama's distribution of levels."""
        key, level_key = jax.random.split(key) if self.num_obstacles else (None, key)
        uniforms = jax.random.uniform(level_key, (MAX_UNIFORMS,))
        grid, position, direction, *marks = self.level(self, uniforms, *coordinates(self))
        marks, key = jnp.array(marks, jnp.int32) if marks else None, jax.tree.map(jax.random.key_data, key)
        return State(grid, jnp.int32(position), jnp.int32(direction), jnp.uint8(EMPTY), jnp.int32(0), marks, key)

    def step(self, state, action):
        """(state, action [] int) -> (state, reward [] float32, terminated [] bool)."""
        marks = self.move_obstacles(state) if self.num_obstacles else state.marks
        return self.transition(state, action, marks)

    def transition(self, state, action, marks):
        """`step` without its randomness: `marks` is [M], where the obstacles go (without any, `state.marks` itself)."""
        front = state.position + at(np.array([1, self.width, -1, -self.width], np.int32), state.direction)
        grid, before = state.grid, at(state.grid, front)
        if self.num_obstacles:
            action = jnp.where(action < self.num_actions, action, LEFT)
            grid = put(put(grid, state.marks, EMPTY), marks, BLUE_BALL)
        if not self.can_pick_up:
            action = jnp.where(action == PICKUP, TOGGLE, action)
        cell = at(grid, front)
        kind, colour = cell & 0xF8, cell & 7
        forward, pickup, drop, toggle = (action == a for a in (FORWARD, PICKUP, DROP, TOGGLE))

        enter = forward & ((kind == EMPTY) | (kind == FLOOR) | (kind == DOOR_OPEN) | (kind == GOAL) | (kind == LAVA))
        take = pickup & ((kind == KEY) | (kind == BALL) | (kind == BOX)) & (state.carrying == EMPTY)
        leave = drop & (kind == EMPTY) & (state.carrying != EMPTY)
        unlock = (kind == DOOR_LOCKED) & (state.carrying == KEY + colour)
        toggled = jnp.where((kind == DOOR_CLOSED) | unlock, DOOR_OPEN + colour, cell)
        toggled = jnp.where(kind == DOOR_OPEN, DOOR_CLOSED + colour, jnp.where(kind == BOX, EMPTY, toggled))
        new_cell = jnp.where(toggle, toggled, jnp.where(take, EMPTY, jnp.where(leave, state.carrying, cell)))

        position = jnp.where(enter, front, state.position)
        direction = (state.direction + (action == RIGHT) - (action == LEFT)) % 4
        carrying = jnp.where(take, cell, jnp.where(leave, jnp.uint8(EMPTY), state.carrying))
        after = State(put(grid, front, new_cell), position, direction, carrying, state.step_count + 1, marks, state.key)
        success, failure = forward & (kind == GOAL), forward & (kind == LAVA)
        if self.end_rule:
            won, lost = self.end_rule(state, action, after)
            success, failure = (success | won) & ~lost, failure | lost
        reward = jnp.where(success, 1 - 0.9 * (after.step_count / self.max_steps), 0.0)
        if self.num_obstacles:  # judged by what stood in front before the obstacles moved, walls included
            crash = forward & (before != EMPTY) & (before & 0xF8 != GOAL)
            reward, failure = jnp.where(crash, -1.0, reward), failure | crash
        return after, reward.astype(jnp.float32), success | failure

    def move_obstacles(self, state):
        """The obstacles' next cells [M]: one after the other moves to any free cell around it, or stays without one.

        Farama tries 101 random cells; that all miss the only free one (probability below 1e-5) is ignored.
        """
        around = np.array([y * self.width + x for y in (-1, 0, 1) for x in (-1, 0, 1)], np.int32)
        key = jax.random.wrap_key_data(state.key)
        uniforms = jax.random.uniform(jax.random.fold_in(key, state.step_count), (self.num_obstacles,))
        grid, moved = put(state.grid, state.position, GREY_WALL), []  # nothing moves to where the agent is
        for old, uniform in zip(state.marks, uniforms, strict=True):
            free = at(grid, old + around) == EMPTY
            new = jnp.where(free.any(), old + at(around, pick(uniform, free)), old)
            grid = put(put(grid, old, EMPTY), new, BLUE_BALL)
            moved.append(new)
        return jnp.stack(moved)

    def view(self, state):
        """[7, 7] uint8 packed cells (row, column) of the agent's view, UNSEEN where walls or doors hide them."""
        shown = np.maximum(view_table(self.width, self.height), 0)  # cell 0, a wall, stands for those outside
        cells = at(state.grid, at(shown, state.position * 4 + state.direction))
        cells = jnp.where(np.arange(VIEW**2) == AGENT_CELL, state.carrying, cells)  # what it carries is seen there
        if self.see_through_walls:
            return cells.reshape(VIEW, VIEW)
        # Rows as bits of two scalars: XLA on a CPU would fuse arrays of rows into what reads them, once for every cell.
        bit = np.arange(VIEW**2) % (4 * VIEW)
        clear = ((cells & 0xF8 != WALL) & (cells < DOOR_CLOSED)).astype(jnp.int32) << bit
        words = [clear[: 4 * VIEW].sum(), clear[4 * VIEW :].sum()]
        lit, seen = 1 << VIEW // 2, [0, 0]
        for word, shift in [divmod(row, 4) for row in reversed(range(VIEW))]:
            row, lit = light(words[word] >> shift * VIEW & 127, lit)
            seen[word] |= row << shift * VIEW
        seen = jnp.where(np.arange(VIEW**2) < 4 * VIEW, *seen) >> bit & 1
        return jnp.where(seen == 1, cells, UNSEEN).reshape(VIEW, VIEW)

    def observe(self, state):
        """Farama's partial observation: {"image": [7, 7, 3] uint8, "direction": [] int32}."""
        return {"image": unpack(self.view(state).T), "direction": state.direction}

    def observe_rgb(self, state):
        """`observe` with an image [56, 56, 3] of 8 pixels a tile (Farama's RGBImgPartialObsWrapper(tile_size=8))."""
        agent = np.arange(VIEW**2).reshape(VIEW, VIEW) == AGENT_CELL
        tiles = self.view(state).astype(jnp.int32) + 128 * agent
        rows = tiles[:, None] * 8 + np.arange(8)[:, None]  # [7, 8, 7], the order of the picture: no transposition
        return self.observe(state) | {"image": at(tile_table().reshape(-1, 24), rows).reshape(VIEW * 8, VIEW * 8, 3)}

    def render(self, state, tile_size=32):
        """[H * tile_size, W * tile_size, 3] uint8 of one state, with what the agent sees highlighted; on the host."""
        position, direction = int(state.position), int(state.direction)
        shown = view_table(self.width, self.height)[position * 4 + direction]
        lit = set(shown[np.asarray(self.view(state)).ravel() != UNSEEN].tolist())
        agent = {position: direction}
        tiles = [draw_tile(cell, agent.get(i), i in lit, tile_size) for i, cell in enumerate(state.grid.tolist())]
        image = np.reshape(tiles, (self.height, self.width, tile_size, tile_size, 3))
        return image.swapaxes(1, 2).reshape(self.height * tile_size, self.width * tile_size, 3)


def at(table, index):
    """`table[index]` without clamping, which costs more than the look-up: an index outside gives anything."""
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def put(grid, cells, value):
    """The grid with `value` in one cell ([]) or several ([M]). A select: a scatter is slower on a CPU."""
    chosen = (np.arange(grid.size, dtype=np.int32) == jnp.reshape(cells, (-1, 1))).any(0)
    return jnp.where(chosen, jnp.asarray(value, jnp.uint8), grid)


# End rules: (before, action, after) -> (success, failure) ------------------------------------------------------------


def memory_end(before, action, after):
    """The agent stands beside the matching object (success) or beside the other one (failure)."""
    return after.position == after.marks[0], after.position == after.marks[1]


def door_end(before, action, after):
    """The door is open after a toggle."""
    return (action == TOGGLE) & (at(after.grid, after.marks[0]) & 0xF8 == DOOR_OPEN), jnp.bool_(False)


def pickup_end(before, action, after, kind):
    """The agent holds the object of the mission: the only one of its kind in these levels."""
    return (action == PICKUP) & (after.carrying & 0xF8 == kind), jnp.bool_(False)


def red_blue_end(before, action, after):
    """The blue door is open: success if the red one was before, else failure. Closing blue with red open: failure."""
    red, blue = (at(before.grid, before.marks[i]) & 0xF8 == DOOR_OPEN for i in range(2))
    red_after, blue_after = (at(after.grid, after.marks[i]) & 0xF8 == DOOR_OPEN for i in range(2))
    return blue_after & red, (blue_after & ~red) | (~blue_after & red_after & blue)


# Level generators: (env, uniforms, x and y of every cell) -> grid, agent's cell and direction, marks ----------------
# One call draws all uniforms of a level. Where Farama tries random cells until one fits, `place` draws once from the
# cells that fit: the same distribution.

MAX_UNIFORMS = 29  # that a level needs: KeyCorridorS3R3 (reading beyond would repeat the last one, silently)


def below(uniform, n):
    """Uniform integer below n from a uniform float."""
    return (uniform * n).astype(jnp.int32)


def pick(uniform, allowed):
    """Uniformly one of the true entries of `allowed` ([n] bool), as its index."""
    rank = jnp.cumsum(allowed.astype(jnp.int32))
    return (rank <= below(uniform, rank[-1])).sum(dtype=jnp.int32)


def place(uniform, grid, region=True, taken=-1):
    """Uniformly one of the empty cells of a region ([H * W] bool), but not the cell `taken`."""
    return pick(uniform, (grid == EMPTY) & region & (np.arange(grid.size) != taken))


def place_agent(env, uniform, grid, region):
    """(cell, direction), uniform over those in a region with nothing or a wall in front, as RoomGrid places agents."""
    fronts = jnp.stack([jnp.roll(grid, -ahead) for ahead in (1, env.width, -1, -env.width)])
    choice = pick(uniform, ((grid == EMPTY) & region & ((fronts == EMPTY) | (fronts == GREY_WALL))).ravel())
    return choice % grid.size, choice // grid.size


def coordinates(env):
    """Numpy (x, y) of every cell, each [H * W] int32."""
    return np.indices((env.height, env.width), np.int32).reshape(2, -1)[::-1]


def walled(env, filled=False, goal=False, filling=GREY_WALL):
    """[H * W] uint8: empty cells within the outer walls, `filling` where `filled`, plus the goal bottom right."""
    x, y = coordinates(env)
    border = (x == 0) | (y == 0) | (x == env.width - 1) | (y == env.height - 1)
    grid = jnp.where(border, jnp.uint8(GREY_WALL), jnp.where(filled, jnp.uint8(filling), jnp.uint8(EMPTY)))
    return put(grid, (env.height - 2) * env.width + env.width - 2, GREEN_GOAL) if goal else grid


def empty_level(env, u, x, y, random_start=False):
    """A room with the goal in its bottom right corner; obstacles (if any) in other free cells, one at a time."""
    grid, position, direction, obstacles = walled(env, goal=True), env.width + 1, 0, []
    if random_start:
        position, direction = place(u[0], grid), below(u[1], 4)
    for uniform in u[2 : 2 + env.num_obstacles]:
        obstacles.append(place(uniform, grid, taken=position))
        grid = put(grid, obstacles[-1], BLUE_BALL)
    return grid, position, direction, *obstacles


def door_key_level(env, u, x, y):
    """A wall with a locked door; agent and key somewhere on its left, the goal bottom right."""
    wall = 2 + below(u[0], env.width - 4)
    door = (1 + below(u[1], env.height - 3)) * env.width + wall
    grid = put(walled(env, x == wall, goal=True), door, DOOR_LOCKED + YELLOW)
    position = place(u[2], grid, x < wall)
    grid = put(grid, place(u[3], grid, x < wall, position), KEY + YELLOW)
    return grid, position, below(u[4], 4)


def four_rooms_level(env, u, x, y):
    """Four rooms joined by one gap in each wall; agent and goal in any two free cells, gaps included."""
    middle = env.width // 2
    along = 1 + below(u[:4], middle - 1) + np.array([0, middle, 0, middle])  # the upper, lower, left, right gap
    gaps = along * np.array([env.width, env.width, 1, 1]) + middle * np.array([1, 1, env.width, env.width])
    grid = put(walled(env, (x == middle) | (y == middle)), gaps, EMPTY)
    position = place(u[4], grid)
    return put(grid, place(u[5], grid, taken=position), GREEN_GOAL), position, below(u[6], 4)


def lava_gap_level(env, u, x, y):
    """A wall of lava with one gap between the agent (top left) and the goal (bottom right)."""
    gap_x, gap_y = 2 + below(u[0], env.width - 4), 1 + below(u[1], env.height - 2)
    return walled(env, (x == gap_x) & (y != gap_y), goal=True, filling=RED_LAVA), env.width + 1, 0


def dist_shift_level(env, u, x, y, second_row):
    """Two strips of lava, the second near the first or far from it; nothing is random."""
    strips = (x >= 3) & (x < env.width - 3) & ((y == 1) | (y == second_row))
    return put(walled(env, strips, filling=RED_LAVA), 2 * env.width - 2, GREEN_GOAL), env.width + 1, 0


def crossing_level(env, u, x, y, num_crossings, obstacle):
    """Rivers of lava or wall on even rows and columns, each with an opening on a random way to the goal."""
    lines = np.arange(2, env.width - 2, 2)
    chosen = np.zeros(2 * len(lines), bool)
    for uniform in u[:num_crossings]:
        chosen = chosen | (np.arange(len(chosen)) == pick(uniform, ~chosen))
    chosen = chosen.reshape(2, -1)  # columns, rows
    river = (chosen & (np.stack((x, y), axis=1)[:, :, None] == lines)).any((1, 2))
    grid = walled(env, river, goal=True, filling=obstacle)

    room = jnp.zeros(2, jnp.int32)  # x and y of the rivers just crossed, left of and above the current room
    for order, where in u[num_crossings : 3 * num_crossings].reshape(2, -1).T:
        left = chosen & (lines > room[:, None])  # rivers still to cross
        ahead = jnp.where(left, lines, env.width - 1).min(1)  # the next one in either direction
        across = (order * left.sum() < left[0].sum()) == np.array([True, False])  # a column or a row is crossed
        opening = jnp.where(across, ahead, room + 1 + below(where, ahead - room - 1))
        grid = put(grid, opening[1] * env.width + opening[0], EMPTY)
        room = jnp.where(across, ahead, room)
    return grid, env.width + 1, 0


def memory_level(env, u, x, y, random_length=False):
    """A key or ball in the start room; a hallway leads to a junction with one of each: go to the same one.

    `marks` are the cells beside the matching and beside the other object.
    """
    middle = env.height // 2
    end = 4 + below(u[0], env.width - 6) if random_length else env.width - 3
    away = abs(y - middle)
    room, hallway = (x <= 4) & (away == 2), (x >= 4) & (x < end) & (away == 1)
    junction = (x == end) & (away > 0) | (x == end + 2)
    same, other = jnp.where(u[1] < 0.5, np.array([KEY, BALL]), np.array([BALL, KEY])) + GREEN
    grid = put(walled(env, room | hallway | junction), (middle - 1) * env.width + 1, same)
    beside, up = middle * env.width + end + 1, jnp.where(u[2] < 0.5, -1, 1) * env.width
    grid = put(put(grid, beside + 2 * up, same), beside - 2 * up, other)
    return grid, middle * env.width + 1 + below(u[3], end), 0, beside + up, beside - up


def unlock_level(env, u, x, y, box=False, ball=False):
    """Two 6x6 rooms, a locked door between them, key and agent in the left one; box behind, ball before the door."""
    door, colour = (1 + below(u[0], 4)) * env.width + 5, below(u[1], 6)
    grid = put(walled(env, x == 5), door, DOOR_LOCKED + colour)
    if box:  # not on or beside (8, 3): RoomGrid's provisional place of the agent, in the middle of the right room
        cell = place(u[2], grid, (x > 5) & (abs(x - 8) + abs(y - 3) > 1))
        grid = put(grid, cell, BOX + below(u[3], 6))
    if ball:
        grid = put(grid, door - 1, BALL + below(u[4], 6))
    grid = put(grid, place(u[5], grid, x < 5), KEY + colour)
    return grid, *place_agent(env, u[6], grid, x < 5), door


def red_blue_doors_level(env, u, x, y):
    """A room in the middle with a red door in its left and a blue one in its right wall, agent inside."""
    left, right = env.height // 2, env.height // 2 + env.height - 1
    red, blue = ((1 + below(u[i], env.height - 2)) * env.width + wall for i, wall in enumerate((left, right)))
    grid = walled(env, (x == left) | (x == right))
    position = place(u[2], grid, (x > left) & (x < right))
    grid = put(put(grid, red, DOOR_CLOSED + RED), blue, DOOR_CLOSED + BLUE)
    return grid, position, below(u[3], 4), red, blue


def key_corridor_level(env, u, x, y):
    """Three columns of 1x1 rooms: a hallway, a key on its left, and on its right a ball behind a locked door.

    Farama's `connect_all` adds doors in a random order until every room can be reached. So give each possible door a
    random time and open those up to the moment at which the last room is reached.
    """
    num_rows = env.height // 2
    behind, key_row, colour = below(u[0], num_rows), below(u[1], num_rows), below(u[2], 6)
    grid = walled(env, (x % 2 == 0) | ((y % 2 == 0) & (x != 3)))
    grid = put(grid, (2 * behind + 1) * env.width + 4, DOOR_LOCKED + colour)
    grid = put(grid, (2 * behind + 1) * env.width + 5, BALL + below(u[3], 6))
    grid = put(grid, (2 * key_row + 1) * env.width + 1, KEY + colour)
    middle = 2 * (num_rows // 2) + 1  # the agent's room, with the removed walls above and below it
    agent = place_agent(env, u[4], grid, (x == 3) & (abs(y - middle) <= 1))

    # [R, 4] possible doors of each row: left room to hallway, hallway to right room, left and right room downwards
    times, colours = u[5 : 5 + 8 * num_rows].reshape(2, num_rows, 4)
    row = np.arange(num_rows)[:, None]
    locked, bottom = row == behind, row == num_rows - 1
    never = jnp.concatenate((row < 0, locked, bottom, bottom | locked | (row + 1 == behind)), axis=1)
    times = jnp.where(never, jnp.inf, times)
    own, down, up = times[:, :2], times[:, 2:], jnp.roll(times[:, 2:], 1, axis=0)
    groups = [(i, j) for j in range(num_rows) for i in range(j + 1)]  # neighbours in one column: each needs a way out
    found = jnp.stack([jnp.minimum(own[i : j + 1].min(0), jnp.minimum(up[i], down[j])) for i, j in groups])
    opened = times <= jnp.where(jnp.isinf(found), 0, found).max()  # infinite only where the lock is the way in
    places = (2 * row + np.array([1, 1, 2, 2])) * env.width + np.array([2, 4, 1, 5])
    doors = jnp.where(opened, jnp.uint8(DOOR_CLOSED) + below(colours, 6).astype(jnp.uint8), at(grid, places))
    return grid.at[places].set(doors), *agent


# The ids --------------------------------------------------------------------------------------------------------------


def list_environments():
    """Every id -> its environment, with the sizes and limits of Farama's registry."""
    envs, options = [], functools.partial

    def add(name, width, height, max_steps, level, **constants):
        envs.append(MiniGrid(f"MiniGrid-{name}-v0", width, height, max_steps, level, **constants))

    for name, n in (("", 5), ("", 6), ("", 8), ("", 16), ("Random-", 5), ("Random-", 6)):
        room = {"level": options(empty_level, random_start=bool(name)), "see_through_walls": True}
        add(f"Empty-{name}{n}x{n}", n, n, 4 * n**2, **room)
        add(f"Dynamic-Obstacles-{name}{n}x{n}", n, n, 4 * n**2, num_obstacles=n // 2, num_actions=3, **room)
    for n in (5, 6, 8, 16):
        add(f"DoorKey-{n}x{n}", n, n, 10 * n**2, door_key_level)
    add("FourRooms", 19, 19, 100, four_rooms_level)
    for n in (5, 6, 7):
        add(f"LavaGapS{n}", n, n, 4 * n**2, lava_gap_level)
    for i, row in ((1, 2), (2, 5)):
        add(f"DistShift{i}", 9, 7, 252, options(dist_shift_level, second_row=row), see_through_walls=True)
    for name, obstacle in (("Lava", RED_LAVA), ("Simple", GREY_WALL)):
        for n, k in ((9, 1), (9, 2), (9, 3), (11, 5)):
            add(f"{name}CrossingS{n}N{k}", n, n, 4 * n**2, options(crossing_level, num_crossings=k, obstacle=obstacle))
    for name, n in (("7", 7), ("9", 9), ("11", 11), ("13", 13), ("13Random", 13), ("17Random", 17)):
        level = options(memory_level, random_length="Random" in name)
        add(f"MemoryS{name}", n, n, 5 * n**2, level, end_rule=memory_end, can_pick_up=False)
    take_box, take_ball = options(pickup_end, kind=BOX), options(pickup_end, kind=BALL)
    add("Unlock", 11, 6, 288, unlock_level, end_rule=door_end)
    add("UnlockPickup", 11, 6, 288, options(unlock_level, box=True), end_rule=take_box)
    add("BlockedUnlockPickup", 11, 6, 576, options(unlock_level, box=True, ball=True), end_rule=take_box)
    for n in (6, 8):
        add(f"RedBlueDoors-{n}x{n}", 2 * n, n, 20 * n**2, red_blue_doors_level, end_rule=red_blue_end)
    for rows in (1, 2, 3):
        add(f"KeyCorridorS3R{rows}", 7, 2 * rows + 1, 270, key_corridor_level, end_rule=take_ball)
    return {env.env_id: env for env in envs}


ENVIRONMENTS = list_environments()


def find_env(env_id):
    """The environment of an id, with or without `MiniGrid-` and `-v0`; UsageError with the nearest ids if unknown."""
    full_id = f"MiniGrid-{env_id.removeprefix('MiniGrid-').removesuffix('-v0')}-v0"
    nearest = ", ".join(difflib.get_close_matches(full_id, ENVIRONMENTS, n=3, cutoff=0))
    _check(full_id in ENVIRONMENTS, f"--env_id {env_id}: unknown; nearest: {nearest} (--list-envs lists all)")
    return ENVIRONMENTS[full_id]


def make_env(args):
    return find_env(args.env_id)


# Drawing --------------------------------------------------------------------------------------------------------------

RGB = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [112, 39, 195], [255, 255, 0], [100, 100, 100]])
SHAPES = {  # of each kind: boxes (left, right, top, bottom, brightness), strokes (x, y, run, rise, radius, brightness)
    WALL: [(0, 1, 0, 1, 1)],
    FLOOR: [(0.031, 1, 0.031, 1, 0.5)],
    DOOR_OPEN: [(0.88, 1, 0, 1, 1), (0.92, 0.96, 0.04, 0.96, 0)],
    DOOR_LOCKED: [(0, 1, 0, 1, 1), (0.06, 0.94, 0.06, 0.94, 0.45), (0.52, 0.75, 0.5, 0.56, 1)],
    DOOR_CLOSED: [(i, 1 - i, i, 1 - i, i in (0, 0.08)) for i in (0, 0.04, 0.08, 0.12)] + [(0.75, 0.5, 0, 0, 0.08, 1)],
    KEY: [(0.5, 0.63, 0.31, 0.88, 1), (0.38, 0.5, 0.59, 0.66, 1), (0.38, 0.5, 0.81, 0.88, 1)]
    + [(0.56, 0.28, 0, 0, 0.19, 1), (0.56, 0.28, 0, 0, 0.064, 0)],
    BALL: [(0.5, 0.5, 0, 0, 0.31, 1)],
    BOX: [(0.12, 0.88, 0.12, 0.88, 1), (0.18, 0.82, 0.18, 0.82, 0), (0.16, 0.84, 0.47, 0.53, 1)],
    GOAL: [(0, 1, 0, 1, 1)],
    LAVA: [(0, 1, 0, 1, 1)]  # three waves of four strokes
    + [(0.1 + 0.2 * i, 0.3 + 0.2 * j + 0.1 * (i % 2), 0.2, 0.1 - 0.2 * (i % 2), 0.03, 0) for i, j in np.ndindex(4, 3)],
}


@functools.cache
def draw_tile(cell, direction, lit, size):
    """[size, size, 3] uint8 of one packed cell, with the agent on it if `direction` is given, brighter if `lit`.

    Shapes and colours are Farama's, in units of the tile, drawn at three times the size and averaged.
    """
    y, x = (np.indices((3 * size, 3 * size)) + 0.5) / (3 * size)
    kind = cell & 0xF8
    colour = np.array([255, 128, 0]) if kind == LAVA else RGB[min(cell & 7, 5)]
    image = np.zeros((3 * size, 3 * size, 3), np.uint8)
    image[(x <= 0.031) | (y <= 0.031)] = RGB[GREY]  # the grid lines
    for *shape, brightness in SHAPES.get(kind, ()):
        if len(shape) == 4:
            left, right, top, bottom = shape
            inside = (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
        else:
            start_x, start_y, run, rise, radius = shape
            along = np.clip(((x - start_x) * run + (y - start_y) * rise) / max(run**2 + rise**2, 1e-9), 0, 1)
            inside = np.hypot(x - start_x - along * run, y - start_y - along * rise) <= radius
        image[inside] = (brightness * colour).astype(np.uint8)
    if direction is not None:  # a triangle that points to where the agent looks: turn the pixels into its frame
        cos, sin = (1, 0, -1, 0)[direction], (0, 1, 0, -1)[direction]
        ahead, aside = 0.5 + cos * (x - 0.5) + sin * (y - 0.5), np.abs(cos * (y - 0.5) - sin * (x - 0.5))
        image[(ahead >= 0.12) & (aside / 0.31 + (ahead - 0.12) / 0.75 < 1)] = RGB[RED]
    if lit:
        image = (image + 0.3 * (255 - image)).astype(np.uint8)
    return image.reshape(size, 3, size, 3, 3).mean((1, 3)).astype(np.uint8)


@functools.cache
def tile_table():
    """[256, 8, 8, 3] uint8: the tiles of the partial view by packed cell, plus 128 where the agent stands."""
    return np.stack([draw_tile(c % 128, 3 if c >= 128 else None, c % 128 != UNSEEN, 8) for c in range(256)])


# ======================================================================================================================
# Networks
# ======================================================================================================================


class Inputs(NamedTuple):
    """What the agent takes in during T steps of M environments."""

    image: jax.Array  # [T, M, 7, 7, 3] uint8, or [T, M, 56, 56, 3] with --img-obs
    direction: jax.Array  # [T, M]
    action: jax.Array  # [T, M], the previous action; A for none: there the hidden state starts from zero too
    reward: jax.Array  # [T, M], the previous reward


class Memory(NamedTuple):
    """What the agent remembers from one step to the next."""

    hidden: jax.Array  # [N, L, H]
    action: jax.Array  # [N], the last action; A for none
    reward: jax.Array  # [N], the last reward


def patches(x, size, stride):
    """[C, Y, X, B] -> [size * size * C, Y', X', B]: a convolution is one matrix product with these.

    XLA's gradient of a convolution inside `lax.scan` is a slow loop on a CPU; that of slices and a product is not. With
    the batch last, each slice copies long contiguous runs.
    """
    rows, columns = ((n - size) // stride * stride + 1 for n in x.shape[1:3])  # from the first patch to the last
    slices = [x[:, i : i + rows : stride, j : j + columns : stride] for i, j in np.ndindex(size, size)]
    return jnp.concatenate(slices)


def one_hot_codes(x):
    """[4 * 3, ...] -> [80, ...] bool: one-hot codes of the objects, colours and states in patches of 2x2 cells."""
    codes = ((x[i::3, None] == np.arange(n).reshape(-1, *[1] * (x.ndim - 1))) for i, n in enumerate((11, 6, 3)))
    return jnp.concatenate([code.reshape(-1, *x.shape[1:]) for code in codes])


def gru(projected, recurrent, bias, hidden, start):
    """Gated recurrent unit (https://arxiv.org/abs/1406.1078, with PyTorch's reset gate): hidden states [T, H, M].

    `projected` [T, 3 H, M] are the inputs' products, done before the scan: only `recurrent` [3 H, H] is sequential.
    """

    def step(hidden, inputs):
        projected, start = inputs
        hidden = jnp.where(start, 0.0, hidden)
        product = jnp.dot(recurrent, hidden.astype(recurrent.dtype), preferred_element_type=jnp.float32)
        (reset_x, update_x, new_x), (reset_h, update_h, new_h) = (jnp.split(x, 3) for x in (projected, product))
        update = jax.nn.sigmoid(update_x + update_h)
        new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * (new_h + bias))
        hidden = (1 - update) * new + update * hidden
        return hidden, hidden

    return jax.lax.scan(step, hidden, (projected, start))[1]


class Agent(nn.Module):
    """Encoder, stacked GRUs whose outputs are summed, actor and critic heads. Inside, the batch is the last axis."""

    args: Args
    num_actions: int

    @nn.compact
    def __call__(self, inputs, hidden):
        """`Inputs` of [T, M] and hidden states [M, L, H] before them.

        Returns logits [T, M, A], values [T, M] and the hidden states [T, M, L, H] after every step.
        """
        args, dtype = self.args, jnp.bfloat16 if self.args.bf16 else jnp.float32
        num_steps, num_envs = inputs.action.shape
        size, hiddens = args.rnn_hidden_dim, []

        def weight(name, shape, gain):
            return self.param(name, nn.initializers.orthogonal(gain), shape).astype(dtype)

        def remember(key, shape):  # https://arxiv.org/abs/1804.11188: units that forget after 1 to `num_steps` steps
            spans = jax.random.uniform(key, (size, 1), minval=1.0, maxval=args.num_steps)
            return jnp.zeros(shape).at[size : 2 * size].set(jnp.log(spans))

        def dense(x, features, gain, name, bias_init=nn.initializers.zeros):  # [in, ...] -> [features, ...]
            bias = self.param(f"{name}_bias", bias_init, (features, 1))
            kernel, flat = weight(name, (features, len(x)), gain), x.astype(dtype).reshape(len(x), -1)
            product = jnp.dot(kernel, flat, preferred_element_type=jnp.float32)
            return (product + bias).reshape(features, *x.shape[1:])

        x = inputs.image.reshape(-1, *inputs.image.shape[2:]).transpose(3, 1, 2, 0)  # [3, Y, X, B], codes: [3, X, Y, B]
        for i, (features, extent, stride) in enumerate(PIXEL_LAYERS if args.img_obs else CODE_LAYERS):
            x = patches(x, extent, stride)
            if i == 0:
                x = x.astype(dtype) / 255 if args.img_obs else one_hot_codes(x).astype(dtype)
            x = nn.relu(dense(x, features, math.sqrt(2), f"conv{i}")).astype(dtype)
        embedding = weight("action", (args.action_emb_dim, self.num_actions + 1), 1.0)
        embedded = embedding @ jax.nn.one_hot(inputs.action.ravel(), self.num_actions + 1, axis=0, dtype=dtype)
        direction = jax.nn.one_hot(inputs.direction.ravel(), 4, axis=0)
        x = jnp.concatenate([x.reshape(-1, x.shape[-1]), direction, embedded, inputs.reward.reshape(1, -1)])  # [F, B]

        for i in range(args.rnn_num_layers):
            projected = dense(x, 3 * size, GRU_GAIN, f"gru{i}", remember)
            projected = projected.reshape(-1, num_steps, num_envs).swapaxes(0, 1)
            recurrent = jnp.concatenate([weight(f"gru{i}_{gate}", (size, size), 1.0) for gate in GATES])
            bias = self.param(f"gru{i}_new_bias", nn.initializers.zeros, (size, 1))
            hiddens.append(gru(projected, recurrent, bias, hidden[:, i].T, inputs.action == self.num_actions))
            x = hiddens[-1].swapaxes(0, 1).reshape(size, -1)
        x = sum(hiddens).swapaxes(0, 1).reshape(size, -1)  # [H, B]
        actor = jnp.tanh(dense(x, args.head_hidden_dim, math.sqrt(2), "actor_hidden"))
        critic = jnp.tanh(dense(x, args.head_hidden_dim, math.sqrt(2), "critic_hidden"))
        logits = dense(actor, self.num_actions, 0.01, "actor").reshape(-1, num_steps, num_envs)
        # Small too: where rewards are rare, the first errors of the critic are all that the actor learns from.
        value = dense(critic, 1, 0.01, "critic").reshape(num_steps, num_envs)
        return logits.transpose(1, 2, 0), value, jnp.stack(hiddens).transpose(1, 3, 0, 2)


GATES = "reset", "update", "new"
GRU_GAIN = 4.0  # views differ in a few of their cells: large weights let that make a difference from the start
CODE_LAYERS = (16, 2, 1), (32, 2, 1), (64, 2, 1)  # features, extent and stride of each convolution
PIXEL_LAYERS = (16, 3, 2), (32, 3, 2), (32, 3, 2), (32, 3, 2)


def initial_memory(args, env, num_envs):
    """The `Memory` before the first step of an episode."""
    hidden = jnp.zeros((num_envs, args.rnn_num_layers, args.rnn_hidden_dim))
    return Memory(hidden, jnp.full(num_envs, env.num_actions, jnp.int32), jnp.zeros(num_envs))


def see(args, env, env_state, memory):
    """`Inputs` of [1, N] for states [N] and a `Memory`."""
    obs = jax.vmap(env.observe_rgb if args.img_obs else env.observe)(env_state)
    return jax.tree.map(lambda x: x[None], Inputs(obs["image"], obs["direction"], memory.action, memory.reward))


def init_params(args, key, env, env_state, memory):
    """Parameters of the agent, a dict of arrays; what it sees and remembers only gives their shapes."""
    return Agent(args, env.num_actions).init(key, see(args, env, env_state, memory), memory.hidden)


def forward(args, env, params, inputs, hidden):
    """Logits [T, M, A], values [T, M] and hidden states [T, M, L, H] of `Inputs` [T, M] that start from `hidden`."""
    return Agent(args, env.num_actions).apply(params, inputs, hidden)


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
    """Mean entropy of a distribution."""
    logprobs = jax.nn.log_softmax(logits)
    return -(jnp.exp(logprobs) * logprobs).sum(-1).mean()


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

    inputs: Inputs  # of [T, N]
    action: jax.Array  # [T, N]
    logprob: jax.Array  # [T, N]
    value: jax.Array  # [T, N]
    reward: jax.Array  # [T, N]
    terminated: jax.Array  # [T, N]
    truncated: jax.Array  # [T, N]
    successor: tuple  # the State and Memory of [T, N] after the step and before any reset


class Batch(NamedTuple):
    """What the loss needs: T steps of M environments."""

    inputs: Inputs  # of [T, M]
    action: jax.Array  # [T, M]
    logprob: jax.Array  # [T, M]
    advantage: jax.Array  # [T, M]
    ret: jax.Array  # [T, M], the critic's target
    value: jax.Array  # [T, M]


def where_envs(condition, new, old):
    """Trees of [N, ...]: `new` where the condition [N] holds."""
    return jax.tree.map(functools.partial(jax.vmap(jnp.where), condition), new, old)


def reset_ended(env, key, done, env_state):
    """States [N], those that are `done` replaced by independent new levels.

    Most steps end few episodes, so levels are made for a small number of them at a time, until none is left.
    """
    num_levels = max(1, done.size // 64)

    def replace_some(carry):
        key, done, env_state = carry
        key, level_key = jax.random.split(key)
        levels = jax.vmap(env.reset)(jax.random.split(level_key, num_levels))
        rank = jnp.cumsum(done)
        where = jnp.searchsorted(rank, jnp.arange(1, num_levels + 1))  # N, which is dropped, once none is left
        env_state = jax.tree.map(lambda old, new: old.at[where].set(new, mode="drop"), env_state, levels)
        return key, done & (rank > num_levels), env_state

    return jax.lax.while_loop(lambda carry: carry[1].any(), replace_some, (key, done, env_state))[2]


def rollout(args, env, params, env_state, memory, episodes, key):
    """Takes T steps in N environments, reset as episodes end; returns (env_state, memory, episodes, trajectory)."""
    action_key, reset_key = jax.random.split(key)
    num_envs = episodes.length.shape[0]
    noises = sample_noise(action_key, (args.num_steps, num_envs))

    def step(carry, inputs):
        env_state, memory, episodes = carry
        noise, reset_key = inputs
        seen = see(args, env, env_state, memory)
        dist, value, hidden = (x[0] for x in forward(args, env, params, seen, memory.hidden))
        action = sample_action(dist, noise)
        next_state, reward, terminated = jax.vmap(env.step)(env_state, action)
        ret, length = episodes.ret + reward, episodes.length + 1
        truncated = next_state.step_count >= env.max_steps
        done = terminated | truncated
        ended, running = (0.0, 0, ret, length), (ret, length, episodes.last_ret, episodes.last_length)
        episodes = Episodes(*(jnp.where(done, a, b) for a, b in zip(ended, running)))
        seen, after = jax.tree.map(lambda x: x[0], seen), Memory(hidden, action, reward)
        memory = where_envs(done & args.reset_hidden, initial_memory(args, env, num_envs), after)
        env_state = reset_ended(env, reset_key, done, next_state)
        outcome = reward, terminated, truncated, (next_state, after)
        return (env_state, memory, episodes), Trajectory(seen, action, action_logprob(dist, action), value, *outcome)

    reset_keys = jax.random.split(reset_key, args.num_steps)
    carry, trajectory = jax.lax.scan(step, (env_state, memory, episodes), (noises, reset_keys))
    return *carry, trajectory


def trajectory_values(args, env, params, trajectory):
    """Values [T, N] of the true successors, for truncated episodes with the hidden state from before the reset."""
    num_steps, num_envs = trajectory.reward.shape

    def successor_values(step):  # after the steps [N], one of each environment
        env_state, memory = jax.tree.map(lambda x: x[step, jnp.arange(num_envs)], trajectory.successor)
        return forward(args, env, params, see(args, env, env_state, memory), memory.hidden)[1][0]

    next_values = jnp.concatenate([trajectory.value[1:], successor_values(jnp.full(num_envs, num_steps - 1))[None]])
    # An environment is truncated at most once in max_steps steps: gather that one successor and value it.
    for start in range(0, num_steps, env.max_steps):
        window = slice(start, start + env.max_steps)
        truncated = trajectory.truncated[window]
        final_values = successor_values(start + truncated.argmax(0))
        next_values = next_values.at[window].set(jnp.where(truncated, final_values, next_values[window]))
    return next_values


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


def ppo_loss(params, batch, hidden, args, env):
    """Clipped surrogate, (clipped) value loss and entropy bonus of a minibatch; returns (loss, metrics).

    `hidden` [M, L, H] are the hidden states before the first step.
    """
    dist, new_value, _ = forward(args, env, params, batch.inputs, hidden)
    log_ratio = action_logprob(dist, batch.action) - batch.logprob
    ratio = jnp.exp(log_ratio)
    advantage = batch.advantage
    if args.norm_adv:
        everywhere = jax.lax.all_gather(advantage, AXIS)
        advantage = (advantage - everywhere.mean()) / (everywhere.std() + 1e-8)
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

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


def update_epochs(args, env, params, opt_state, batch, hidden, learning_rate, key):
    """Passes over a `Batch` of [T, N] in minibatches of whole environments; returns (params, opt_state, metrics)."""

    def minibatch_step(carry, index):  # [M]
        params, opt_state = carry
        minibatch = jax.tree.map(lambda x: x[:, index], batch)
        (_, metrics), grads = jax.value_and_grad(ppo_loss, has_aux=True)(params, minibatch, hidden[index], args, env)
        grads = jax.lax.pmean(grads, AXIS)
        params, opt_state, norm = optimizer_update(args, grads, opt_state, params, learning_rate)
        return (params, opt_state), {**metrics, "losses/grad_norm": norm}

    def epoch(carry, key):
        params, opt_state, active = carry
        order = jax.random.permutation(key, hidden.shape[0]).reshape(args.num_minibatches, -1)
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
    """Everything training needs; checkpoints hold exactly this. Every leaf has a leading seed axis K."""

    params: dict
    opt_state: optax.OptState
    env_state: State  # of [K, N]
    memory: Memory  # of [K, N]
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
        env_state = jax.vmap(env.reset)(jax.random.split(reset_key, args.num_envs))
        memory = initial_memory(args, env, args.num_envs)
        params = init_params(args, params_key, env, env_state, memory)
        zeros, none = jnp.zeros(args.num_envs), jnp.full(args.num_envs, jnp.nan)
        episodes = Episodes(zeros, zeros.astype(jnp.int32), none, none)
        opt_state = make_optimizer(args).init(params)
        return TrainState(params, opt_state, env_state, memory, episodes, jax.random.key_data(key), jnp.int32(0))

    return jax.lax.map(init, key)  # not vmap: jaxlib 0.10's batched QR on a CPU can deadlock its own thread pool


def update(args, state):
    """One PPO update of one agent on one device of the mesh: rollout, GAE, epochs of minibatches."""
    env = make_env(args)
    key, *keys = jax.random.split(jax.random.wrap_key_data(state.key), 3)
    rollout_key, epochs_key = (jax.random.fold_in(k, jax.lax.axis_index(AXIS)) for k in keys)
    *carry, traj = rollout(args, env, state.params, state.env_state, state.memory, state.episodes, rollout_key)
    inputs, action, logprob, values, rewards, terminated, truncated, *_ = traj
    next_values = trajectory_values(args, env, state.params, traj)
    advantages = compute_gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)
    returns, episodes = advantages + values, carry[-1]
    batch, hidden = Batch(inputs, action, logprob, advantages, returns, values), state.memory.hidden
    learning_rate = args.learning_rate * (1 - state.update / float(args.num_updates) if args.anneal_lr else 1.0)
    params, opt_state, metrics = update_epochs(args, env, *state[:2], batch, hidden, learning_rate, epochs_key)
    all_devices = lambda x: jax.lax.all_gather(x, AXIS)
    return TrainState(params, opt_state, *carry, jax.random.key_data(key), state.update + 1), metrics | {
        "losses/explained_variance": 1 - all_devices(batch.advantage).var() / all_devices(batch.ret).var(),
        "charts/learning_rate": jnp.float32(learning_rate),
        "charts/episodic_return": jnp.nanmean(all_devices(episodes.last_ret)),  # NaN before the first episode ends
        "charts/episodic_length": jnp.nanmean(all_devices(episodes.last_length)),
    }


def over_seeds(function):
    """Maps a function of one agent over trees with a leading axis K; in turn on a CPU, where batching is slow."""
    in_turn = lambda *trees: jax.lax.map(lambda agent: function(*agent), trees)
    return in_turn if jax.default_backend() == "cpu" else jax.vmap(function)


def make_mesh(args):
    """`num_devices` devices of every process, in the order of the processes."""
    devices = [jax.local_devices(process_index=p)[: args.num_devices] for p in range(jax.process_count())]
    return jax.sharding.Mesh(np.array(devices).ravel(), (AXIS,))


# How a `TrainState` is laid out over the mesh: the second axis, N, of what belongs to the environments.
STATE_SPECS = TrainState(jax.P(), jax.P(), *[jax.P(None, AXIS)] * 3, jax.P(), jax.P())


def shard_state(args, state):
    """Spreads a `TrainState`, the same in every process, over the mesh."""
    put = lambda spec, x: jax.make_array_from_callback(x.shape, jax.NamedSharding(make_mesh(args), spec), x.__getitem__)
    return jax.tree.map(lambda spec, tree: jax.tree.map(lambda x: put(spec, x), tree), STATE_SPECS, state)


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
    """Plays in E fresh environments per agent: one episode each, or C consecutive ones (`eval_consecutive_episodes`).

    Takes parameters and keys with a leading axis K. Gives returns [K, C, E], lengths [K, C, E] and the states
    [K, C, max_steps + 1] of the first environment, valid up to its episode's end.
    """
    env, num = make_env(args), args.eval_episodes

    def play(params, memory, key):
        reset_key, action_key = jax.random.split(key)
        first = jax.vmap(env.reset)(jax.random.split(reset_key, num))
        film = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (env.max_steps + 1, *x.shape[1:])), first)

        def step(carry):
            t, state, memory, ret, length, running, film = carry
            seen = see(args, env, state, memory)
            dist, _, hidden = (x[0] for x in forward(args, env, params, seen, memory.hidden))
            noise = sample_noise(jax.random.fold_in(action_key, t), (num,))
            action = sample_action(dist, noise) if args.eval_mode == "sampled" else greedy_action(dist)
            state, reward, terminated = jax.vmap(env.step)(state, action)
            memory = where_envs(running, Memory(hidden, action, reward), memory)
            film = jax.tree.map(lambda film, x: film.at[t + 1].set(x[0]), film, state)
            return t + 1, state, memory, ret + reward * running, length + running, running & ~terminated, film

        zeros = jnp.zeros(num)
        carry = jnp.int32(0), first, memory, zeros, zeros.astype(jnp.int32), zeros == 0, film
        going_on = lambda carry: (carry[0] < env.max_steps) & carry[5].any()
        _, _, memory, ret, length, _, film = jax.lax.while_loop(going_on, step, carry)
        return memory, (ret, length, film)

    def play_all(params, key):
        blank = initial_memory(args, env, num)
        following = lambda memory, key: play(params, blank if args.reset_hidden else memory, key)
        return jax.lax.scan(following, blank, jax.random.split(key, args.eval_consecutive_episodes))[1]

    return over_seeds(play_all)(params, key)


def evaluation_keys(args):
    """Keys [K] that no training uses, the same for every evaluation of a run."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 2**32 - 1))(seed_keys(args))


def summarize_evaluation(args, evaluation, alive):
    """What summary.json and eval.json say of an evaluation: over agents alive, and lists with one entry per agent."""
    returns, lengths = (np.asarray(x, float) for x in evaluation[:2])  # [K, C, E]
    statistics = lambda agents, axis=None: {
        "eval_return_mean": returns[agents].mean(axis).tolist(),
        "eval_return_std": returns[agents].std(axis).tolist(),
        "eval_length_mean": lengths[agents].mean(axis).tolist(),
        "success_rate": (returns[agents] > 0).mean(axis).tolist(),
    }
    overall = {"eval_episodes": returns[0].size, "eval_mode": args.eval_mode} | statistics(alive)
    if args.eval_consecutive_episodes > 1:
        overall["consecutive_episodes"] = statistics(alive, (0, 2))
    interval = bootstrap_interval(returns[alive].mean((1, 2)))
    return overall | {"eval_return_ci95": interval, "per_seed": statistics(..., (1, 2))}


def bootstrap_interval(values, samples=10_000):
    """95% bootstrap interval [low, high] of the mean of values [K]; None for a single one."""
    means = np.random.default_rng(0).choice(values, (samples, len(values))).mean(1)
    return np.percentile(means, [2.5, 97.5]).tolist() if len(values) > 1 else None


def record_video(args, path, evaluation, width=320):
    """Writes what the first agent does in the first evaluation environment as a GIF of 8 frames a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    env = make_env(args)
    lengths, film = evaluation[1][0, :, 0], jax.tree.map(lambda x: np.asarray(x[0]), evaluation[2])
    state = lambda *step: jax.tree.map(lambda x: x[step], film)
    images = (env.render(state(c, t), width // env.width) for c, n in enumerate(lengths) for t in range(n + 1))
    frames = [Image.fromarray(image).quantize(64) for image in images]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)


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
RENEWABLE += "eval_mode eval_consecutive_episodes num_devices track wandb_project total_timesteps".split()
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
    result = f"return {summary['eval_return_mean']:.3f}, success rate {summary['success_rate']:.3f}"
    return f"{summary['eval_mode']} {result} over {summary['eval_episodes']} episodes"


def evaluate_run(given):
    """Evaluates a saved run: writes its eval.json and a video, nothing else."""
    args, state = load_run(given.eval)
    args = dataclasses.replace(args, **{name: x for name, x in vars(given).items() if name.startswith("eval_")})
    video = pathlib.Path(given.videos_dir, pathlib.Path(given.eval).resolve().name, f"eval.{VIDEO_FORMAT}")
    summary = assess(args, state, video)
    write_json(pathlib.Path(given.eval, "eval.json"), summary)
    print(f"video: {video}\n{describe(summary)}")


def main(args):
    """Runs the script; exits with 0, 1 (failed), 2 (wrong usage), 130 or 143 (interrupted, resumable)."""
    if args.list_envs:
        print("\n".join(f"{e.env_id:40} {e.width}x{e.height}, {e.max_steps} steps" for e in ENVIRONMENTS.values()))
        return
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
