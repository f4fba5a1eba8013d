# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10", "numpy>=2.0", "tyro>=1.0", "tensorboard>=2.20", "pillow>=11.0",
#     "flax>=0.12", "optax>=0.2.6",
# ]
# ///
"""Recurrent PPO on MiniGrid in one file: environments, GRU agent and a fully jitted update.

    python ppo_minigrid_rnn.py                            # solves Empty-8x8 in 35 s on two cores
    python ppo_minigrid_rnn.py --list-envs                # prints all 76 environments
    python ppo_minigrid_rnn.py --env-id DoorKey-8x8 --total-timesteps 4e6
    python ppo_minigrid_rnn.py --resume runs/<run_name>   # resumes an interrupted run, bit for bit
    python ppo_minigrid_rnn.py --eval runs/<run_name>     # evaluates a saved run, records a video
    # Memory tasks need more exploration.
    python ppo_minigrid_rnn.py --env-id MemoryS9 --total-timesteps 4e6 --num-envs 256 \
        --num-minibatches 8 --update-epochs 4 --gae-lambda 0.95 --norm-adv --ent-coef 0.03
    # Rare rewards need larger batches and more epochs.
    python ppo_minigrid_rnn.py --env-id UnlockPickup --total-timesteps 6e6 --num-steps 128 \
        --update-epochs 4
    # Meta-learning plays several episodes on each level, see `Trials`.
    python ppo_minigrid_rnn.py --env-id FourRooms --episodes-per-trial 4 --total-timesteps 5e6

The environments are the 76 ids of Farama's MiniGrid 3.x (https://minigrid.farama.org) that need no
wave function collapse: same ids, encoding, rules, missions and distributions of levels. If random
play hardly ever succeeds, benchmarks/minigrid_count_bonus.py adds an exploration bonus.

These are the hyperparameters of XLand-MiniGrid's recurrent PPO. (In XLand-MiniGrid the recurrent
state continues across episodes, and truncation counts as termination.)

    python ppo_minigrid_rnn.py --env-id Empty-6x6 --total-timesteps 5e6 --num-envs 8192 \
        --num-steps 16 --update-epochs 1 --num-minibatches 16 --gamma 0.99 --gae-lambda 0.95 \
        --norm-adv --ent-coef 0.01 --target-kl None --adam-eps 1e-8 --rnn-hidden-dim 1024 \
        --head-hidden-dim 256

ppo_cartpole_jax.py explains PPO. Recurrence changes three things:

- The agent sees only a part of the level, so `forward` takes sequences and a recurrent state.
- Minibatches consist of whole environments, [T, M]. Gradients pass through the T steps only.
- The value of a truncated episode's last observation depends on the agent's memory of this episode,
  so `rollout` returns both.

The sections before "Running" train one agent. "Running" adds seeds, files and the command line.

Axes in shape comments: K agents (seeds), T steps, N environments, M environments of a minibatch,
W windows of steps (`truncation_window`), G cells of a grid, A actions, F features, Y, X rows and
columns, L stacked GRUs, H hidden units, U updates, E evaluation environments, C episodes of a
trial, S steps of a video.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import json
import math
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

# ==================================================================================================
# Args
# ==================================================================================================


@dataclasses.dataclass
class Args:
    """Recurrent PPO on pure-JAX MiniGrid."""

    # Run
    seed: int = 1
    """seed of the first agent"""
    num_seeds: int = 1
    """number of independent agents; their seeds are seed, seed + 1, ..."""
    num_devices: int = 1
    """devices per process; the environments are split among them"""
    distributed: bool = False
    """train with several processes that run this command; the first one writes files"""
    coordinator_address: str | None = None
    """address:port of the first process; detected under SLURM and similar launchers"""
    num_processes: int | None = None
    """number of processes; detected under SLURM and similar launchers"""
    process_id: int | None = None
    """index of this process, from 0; detected under SLURM and similar launchers"""
    exp_name: str = pathlib.Path(globals().get("__file__", "ppo_minigrid_rnn")).stem
    """experiment name, part of the run name"""
    runs_dir: str = "runs"
    """folder for <run_name>/: event files, args.json, checkpoint.npz, summary.json"""
    videos_dir: str = "videos"
    """folder for <run_name>/ with videos"""
    log_interval: int = 5
    """updates between progress lines; every update is logged"""
    checkpoint_interval: int = 100
    """updates between checkpoints; the last update is always saved"""
    eval_episodes: int = 256
    """episodes (or trials) per evaluation, each in its own environment"""
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
    env_id: str = "MiniGrid-Empty-8x8-v0"
    """environment id; without -v0 or -v1: Farama's newest version"""
    list_envs: bool = False
    """print the environments and exit"""
    img_obs: bool = False
    """observe the view as 56x56 pixels instead of 7x7 codes"""
    num_envs: int = 64
    """parallel environments per agent, over all devices"""
    episodes_per_trial: int = 1
    """consecutive episodes per level; more than one: meta-learning, see Trials"""

    # Agent
    action_emb_dim: int = 16
    """size of the previous action's embedding"""
    rnn_hidden_dim: int = 64
    """hidden units per GRU, H"""
    rnn_num_layers: int = 1
    """number of stacked GRUs, L; their outputs are summed"""
    head_hidden_dim: int = 64
    """units of the hidden layers of actor and critic"""

    # Algorithm. Float flags and the seed are traced: no `if` can test them. Other flags are static.
    total_timesteps: float = 300_000.0
    """environment steps per agent, rounded down to whole updates"""
    num_steps: int = 64
    """steps per environment and update; gradients pass through all of them"""
    learning_rate: float = 1e-3
    """Adam's learning rate (its initial value when annealed)"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    gamma: float = 0.995
    """discount factor"""
    gae_lambda: float = 0.99
    """lambda of generalized advantage estimation; high because rewards are rare and late"""
    num_minibatches: int = 16
    """minibatches per epoch, each of whole environments"""
    update_epochs: int = 3
    """passes over the batch per update"""
    norm_adv: bool = False
    """normalize advantages per minibatch; amplifies noise before the first success"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    clip_vloss: bool = True
    """use a clipped value loss, with the range clip_coef"""
    ent_coef: float = 0.0001
    """weight of the entropy bonus; a larger one favors random play between rare successes"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """maximum global norm of the gradients"""
    target_kl: float | None = 0.1
    """stop an update at the first minibatch whose KL from the rollout's policy exceeds this"""
    adam_eps: float = 1e-5
    """Adam's epsilon"""

    def __post_init__(self):
        """Completes the environment id, see `full_id`."""
        self.env_id = full_id(self.env_id)

    @property
    def batch_size(self) -> int:
        """Environment steps per update, T * N."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> float:
        """Updates per run, U; a whole number, as a float."""
        return self.total_timesteps // self.batch_size


# ==================================================================================================
# Environment
# ==================================================================================================

# To use your own environment, delete these names and the code between the two names of a range:
#     imports       difflib, itertools
#     Args          list_envs, img_obs, __post_init__
#     Environment   RED to num_uniforms; full_id, find_env
#     Agent         CODE_LAYERS to MISSION_FEATURES; patches to Encoder
#     Running       print_envs; in `main` the statement with `args.list_envs`
#     Catalogue     memory_end to draw_view
# Rewrite: make_env, encode (see their docstrings). Keep: TrialState, Trials.

RED, GREEN, BLUE, PURPLE, YELLOW, GREY = range(6)
# A cell is one byte, kind + color. Kinds are multiples of 8 below NUM_CELLS.
UNSEEN, EMPTY, WALL, FLOOR, DOOR_OPEN, KEY, BALL, BOX, GOAL, LAVA = range(0, 80, 8)
KEY_BOX, DOOR_CLOSED, DOOR_LOCKED = range(80, 104, 8)
NUM_CELLS = 128


class Kind(NamedTuple):
    """A kind of cell. `MiniGrid.transition` defines the effect of toggling it.

    A new kind needs a row in KINDS and an image in PICTURES. A new object code needs an environment
    with larger `code_sizes`: the agent does not see codes beyond them.
    """

    object: int  # Farama's code
    state: int = 0  # Farama's code of a door: open, closed, locked
    is_clear: bool = True  # light passes
    can_enter: bool = False  # `transition` handles goal and lava
    can_carry: bool = False


KINDS = {
    UNSEEN: Kind(object=0),
    EMPTY: Kind(object=1, can_enter=True),
    WALL: Kind(object=2, is_clear=False),
    FLOOR: Kind(object=3, can_enter=True),
    DOOR_OPEN: Kind(object=4, state=0, can_enter=True),
    DOOR_CLOSED: Kind(object=4, state=1, is_clear=False),
    DOOR_LOCKED: Kind(object=4, state=2, is_clear=False),
    KEY: Kind(object=5, can_carry=True),
    BALL: Kind(object=6, can_carry=True),
    BOX: Kind(object=7, can_carry=True),
    KEY_BOX: Kind(object=7, can_carry=True),  # its color is that of the key
    GOAL: Kind(object=8, can_enter=True),
    LAVA: Kind(object=9, can_enter=True),
}
CODE_SIZES = (11, 6, 3)  # numbers of Farama's codes: objects, colors, door states

GREY_WALL = WALL + GREY
GREEN_GOAL = GOAL + GREEN
RED_LAVA = LAVA + RED
BLUE_BALL = BALL + BLUE

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)  # actions

# Words that vary between the missions of an environment: a mission is a few indices into WORDS.
# Colors and things are in the order of their codes. Append new words at the end. Saved agents that
# observe a mission then no longer fit.
COLOUR_WORDS = ["red", "green", "blue", "purple", "yellow", "grey"]
THING_WORDS = ["key", "ball", "box"]
VERB_WORDS = ["get a", "go get a", "fetch a", "go fetch a", "you must fetch a"]
WORDS = COLOUR_WORDS + THING_WORDS + VERB_WORDS


def kind_of(cells):
    """Kinds of cells, without their colors."""
    return cells & 0xF8


def colour_of(cells):
    """Colors of cells."""
    return cells & 7


def are(cells, flag):
    """Whether the kind of each cell has a flag of `Kind`, such as "is_clear"."""
    kinds_as_bits = sum(1 << kind // 8 for kind, row in KINDS.items() if getattr(row, flag))
    return (np.int32(kinds_as_bits) >> (cells >> 3)) & 1 == 1


def words_of(cell):
    """The mission's indices (color, thing) of a key, ball or box."""
    return colour_of(cell), (cell - KEY) // 8 + len(COLOUR_WORDS)


def named(colour, thing):
    """The cell of a key, ball or box with the mission's indices (color, thing)."""
    return KEY + 8 * (thing - len(COLOUR_WORDS)) + colour


def unpack(cells):
    """Cells [...] as Farama's codes [..., 3] uint8: object, color, door state."""
    table = np.zeros((NUM_CELLS, 3), np.uint8)
    for kind, row in KINDS.items():
        for colour in range(8):
            seen_colour = GREY if kind == KEY_BOX else colour  # the contents are hidden
            table[kind + colour] = row.object, seen_colour, row.state
    return at(table, cells)


def at(table, index):
    """`table[index]` without bounds checks: clamping costs more than the look-up."""
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


def put(grid, cells, value):
    """The grid [G] with `value` [] written to one cell [] or to several cells [any]."""
    # A comparison with every cell: a scatter is slower on a CPU.
    chosen = (np.arange(grid.size, dtype=np.int32)[None] == jnp.reshape(cells, (-1, 1))).any(0)
    return jnp.where(chosen, jnp.asarray(value, jnp.uint8), grid)


# The agent sees 7x7 cells from the middle of the last row. Levels that `see_through_walls` work
# with any odd VIEW; others require 7.
VIEW = 7
AGENT_CELL = VIEW * (VIEW - 1) + VIEW // 2  # counted row by row
TILE = 8  # pixels per cell in the view of --img-obs


@functools.cache
def view_table(width, height):
    """Cells in the agent's view, [4 G, 49], by position * 4 + direction; -1 is outside the grid."""
    position_and_direction = np.arange(width * height * 4)[:, None]
    position, direction = position_and_direction // 4, position_and_direction % 4
    row, column = np.arange(VIEW**2) // VIEW, np.arange(VIEW**2) % VIEW
    ahead = VIEW - 1 - row
    aside = column - VIEW // 2  # to the right
    forward_x = np.array([1, 0, -1, 0])[direction]
    forward_y = np.array([0, 1, 0, -1])[direction]
    # y points down: a turn to the right maps the direction (x, y) to (-y, x).
    x = position % width + ahead * forward_x - aside * forward_y
    y = position // width + ahead * forward_y + aside * forward_x
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    return np.where(inside, y * width + x, -1)


def spread_light(clear, lit):
    """Propagates light along one row of the view and to the row ahead.

    Rows are 7-bit integers; bit i is column i. `clear` marks transparent cells, `lit` the cells lit
    by the row behind. Returns (visible cells of this row, lit cells of the row ahead).

    This is Farama's `Grid.process_vis` without a loop over columns. Light sweeps from left to
    right, then back. A lit, clear cell lights the next cell of the sweep and the cells ahead of
    both, except at the end of the sweep. Here walls in columns 1 and 5 stop the light from column
    3:

    >>> seen, ahead = spread_light(clear=0b1011101, lit=0b0001000)
    >>> f"{seen:07b} {ahead:07b}"
    '0111110 0111110'
    """
    all_cells = 0b1111111
    # From left to right: the carry of the addition runs through clear cells up to the next wall.
    reached = clear ^ (clear + (lit & clear))
    lit = (lit | reached) & all_cells
    passes_right = lit & clear & 0b0111111
    # From right to left in steps of 1, 2 and 4 cells, which cover a row of 7.
    clear_two = clear & clear << 1  # clear, and so is the cell to the left
    clear_four = clear_two & clear_two << 2
    lit |= (lit & clear) >> 1
    lit |= (lit & clear_two) >> 2
    lit |= (lit & clear_four) >> 4
    passes_left = lit & clear & 0b1111110
    lit_ahead = passes_right | passes_right << 1 | passes_left | passes_left >> 1
    return lit, lit_ahead


class GridState(NamedTuple):
    """State of one environment. Its G cells are numbered row by row: y * width + x."""

    grid: jax.Array  # [G] uint8, cells
    position: jax.Array  # [] int32, the agent's cell
    direction: jax.Array  # [] int32: 0 right, 1 down, 2 left, 3 up
    carrying: jax.Array  # [] uint8, a cell; EMPTY for nothing
    step_count: jax.Array  # [] int32
    marks: jax.Array  # [any] int32, marked cells, see `Level`
    mission: Any  # [any] int32, indices into WORDS; () if it never varies


class Level(NamedTuple):
    """Output of a level generator. Walls must enclose all cells that the agent can reach."""

    grid: jax.Array  # [G] uint8
    position: jax.Array  # the agent's cell
    direction: jax.Array  # as in `GridState`
    marks: tuple = ()  # cells that the end rule uses, or those of the obstacles
    mission: tuple = ()  # indices into WORDS, to fill `MiniGrid.sentence`


class Uniforms:
    """Returns the random numbers of a level, each of them once.

    >>> draw = Uniforms(np.array([0.1, 0.2, 0.3, 0.4]))
    >>> float(draw()), draw(3).tolist(), draw.count
    (0.1, [0.2, 0.3, 0.4], 4)
    """

    def __init__(self, numbers):
        self.numbers = numbers
        self.count = 0

    def __call__(self, *shape):
        """The next numbers, an array of this shape; raises ValueError if there are too few."""
        first = self.count
        self.count += math.prod(shape)
        if self.count > len(self.numbers):
            raise ValueError(f"a level has {len(self.numbers)} random numbers, not {self.count}")
        return self.numbers[first : self.count].reshape(shape)


@dataclasses.dataclass(frozen=True)
class MiniGrid:
    """One of Farama's MiniGrid environments; one environment, for `vmap`.

    | what        | value                                                                        |
    | ----------- | ---------------------------------------------------------------------------- |
    | state       | `GridState`                                                                  |
    | observation | {"image": uint8 [7, 7, 3], "direction": 0 to 3}; see `observe`               |
    |             | Fetch, GoToDoor, GoToObject, PutNear: also "mission", int32 [1 to 4]         |
    | action      | 0 left, 1 right, 2 forward, 3 pick up, 4 drop, 5 toggle, 6 done              |
    | reward      | 1 - 0.9 * step_count / max_episode_steps on success, else 0                  |
    | terminated  | at a goal, in lava, or by the `end_rule` of the family                       |
    | truncated   | by the caller, after `max_episode_steps`                                     |
    | start       | a level sampled by the family's `level`                                      |

    Dynamic-Obstacles has the actions 0 to 2. Walking into anything except the goal is a collision,
    which terminates the episode with reward -1. Playground has no goal.

    The mission is a sentence that states the task. The agent observes the words of the mission that
    vary, but only in the four families that cannot be solved without them.

    A new level is a function like `lava_gap_level` and a row in `TABLE`. Width, height and time
    limit are the same in all levels of an id. A smaller room occupies a corner of the grid, as in
    `go_to_door_level`.

    A shaping reward in `step` would distort eval_success_rate. Add such a reward to the trajectory
    of `rollout`, as benchmarks/minigrid_count_bonus.py does.
    """

    env_id: str
    width: int
    height: int
    max_episode_steps: int
    level: Callable  # (env, draw: `Uniforms`) -> `Level`
    end_rule: Callable | None = None  # (env, before, action, after) -> (success [], failure [])
    sentence: str = "get to the green goal square"  # the mission, with {} for each word that varies
    observes_mission: bool = False
    see_through_walls: bool = False
    num_obstacles: int = 0
    num_actions: int = 7
    code_sizes: tuple = CODE_SIZES
    can_pick_up: bool = True  # False: picking up counts as toggling, as in Memory
    pixels: bool = False

    def reset(self, key):
        """Samples an initial state from Farama's distribution of levels."""
        numbers = jax.random.uniform(key, (num_uniforms(self),), jnp.float32)
        level = self.level(self, Uniforms(numbers))
        return GridState(
            grid=level.grid,
            position=jnp.int32(level.position),
            direction=jnp.int32(level.direction),
            carrying=jnp.uint8(EMPTY),
            step_count=jnp.int32(0),
            marks=jnp.array(level.marks, jnp.int32),
            mission=jnp.array(level.mission, jnp.int32) if level.mission else (),
        )

    def step(self, key, state, action):
        """One step; returns (state, reward [], terminated []). `key` moves the obstacles."""
        marks = self.move_obstacles(key, state) if self.num_obstacles else state.marks
        return self.transition(state, action, marks)

    def front(self, state):
        """The cell in front of the agent."""
        ahead = np.array([1, self.width, -1, -self.width], np.int32)  # by direction
        return state.position + at(ahead, state.direction)

    def transition(self, state, action, marks):
        """`step` without randomness. The obstacles move to the cells `marks`."""
        action = jnp.asarray(action)  # it may be a Python number
        front = self.front(state)
        grid = state.grid
        if self.num_obstacles:
            # Other actions turn left, as in Farama's MiniGrid.
            action = jnp.where(action < self.num_actions, action, LEFT)
            grid = put(grid, state.marks, EMPTY)
            grid = put(grid, marks, BLUE_BALL)
        if not self.can_pick_up:
            action = jnp.where(action == PICKUP, TOGGLE, action)
        cell = at(grid, front)
        kind, colour = kind_of(cell), colour_of(cell)

        # --- Effects of the action ---
        hand_is_empty = state.carrying == EMPTY
        enters = (action == FORWARD) & are(cell, "can_enter")
        takes = (action == PICKUP) & are(cell, "can_carry") & hand_is_empty
        drops = (action == DROP) & (kind == EMPTY) & ~hand_is_empty
        has_key = state.carrying == KEY + colour
        opens = (kind == DOOR_CLOSED) | ((kind == DOOR_LOCKED) & has_key)
        toggled = jnp.where(opens, DOOR_OPEN + colour, cell)
        toggled = jnp.where(kind == DOOR_OPEN, DOOR_CLOSED + colour, toggled)
        toggled = jnp.where(kind == BOX, EMPTY, toggled)  # these boxes are empty
        toggled = jnp.where(kind == KEY_BOX, KEY + colour, toggled)

        # --- Next state ---
        new_cell = jnp.where(drops, state.carrying, cell)
        new_cell = jnp.where(takes, EMPTY, new_cell)
        new_cell = jnp.where(action == TOGGLE, toggled, new_cell)
        grid = put(grid, front, new_cell)  # effects on other cells would follow here
        carrying = jnp.where(drops, jnp.uint8(EMPTY), state.carrying)
        carrying = jnp.where(takes, cell, carrying)
        turn = (action == RIGHT).astype(jnp.int32) - (action == LEFT)
        after = GridState(
            grid=grid,
            position=jnp.where(enters, front, state.position),
            direction=(state.direction + turn) % 4,
            carrying=carrying,
            step_count=state.step_count + 1,
            marks=marks,
            mission=state.mission,
        )

        # --- Reward and termination ---
        success = (action == FORWARD) & (kind == GOAL)
        failure = (action == FORWARD) & (kind == LAVA)
        if self.end_rule is not None:
            won, lost = self.end_rule(self, state, action, after)
            success = (success | won) & ~lost
            failure = failure | lost
        reward = jnp.where(success, 1 - 0.9 * (after.step_count / self.max_episode_steps), 0.0)
        if self.num_obstacles:
            # Depends on the cell in front before the obstacles move; walls count.
            cell_before = at(state.grid, front)
            is_blocked = (cell_before != EMPTY) & (kind_of(cell_before) != GOAL)
            crash = (action == FORWARD) & is_blocked
            reward = jnp.where(crash, -1.0, reward)
            failure = failure | crash
        return after, reward.astype(jnp.float32), success | failure

    def move_obstacles(self, key, state):
        """The obstacles' next cells [num_obstacles]; each moves to a random free cell around it."""
        around = [y * self.width + x for y in (-1, 0, 1) for x in (-1, 0, 1)]
        around = np.array(around, np.int32)
        uniforms = jax.random.uniform(key, (self.num_obstacles,))
        grid = put(state.grid, state.position, GREY_WALL)  # the agent's cell is not free
        moved = []
        for old, uniform in zip(state.marks, uniforms, strict=True):
            # Farama tries 101 random cells; all miss a free cell with a probability below 1e-5.
            free = at(grid, old + around) == EMPTY
            chosen = jnp.minimum(pick(uniform, free), len(around) - 1)  # 9 if none is free
            new = old + at(around, chosen)
            new = jnp.where(free.any(), new, old)
            grid = put(grid, old, EMPTY)
            grid = put(grid, new, BLUE_BALL)
            moved.append(new)
        return jnp.stack(moved)

    def view(self, state):
        """The cells [7, 7] (row, column) of the agent's view; UNSEEN if hidden.

        Rows run from far to near, columns from the agent's left to its right. The agent's cell
        shows the carried object. Cells outside the grid look like walls.

        A level (# wall, X locked door, K key, G goal) and the view (? hidden) of an agent that is
        in the top left corner and looks down, with the door on the left:

        >>> env = find_env("DoorKey-5x5")
        >>> state = env.reset(jax.random.key(2))
        >>> letters = np.array(list("?.#,/KABGLb+X"))
        >>> for row in state.grid.reshape(5, 5):
        ...     print("".join(letters[row // 8]))
        #####
        #.#.#
        #.X.#
        #K#G#
        #####
        >>> for row in env.view(state):
        ...     print("".join(letters[row // 8]))
        ???????
        ???????
        ???????
        ??###??
        ??#K#??
        ??X.#??
        ??#.#??
        """
        # Cell 0 represents the cells outside the grid: it is a wall wherever they are visible.
        shown = np.maximum(view_table(self.width, self.height), 0)
        cells = at(state.grid, at(shown, state.position * 4 + state.direction))  # [49]
        cells = jnp.where(np.arange(VIEW**2) == AGENT_CELL, state.carrying, cells)
        if self.see_through_walls:
            return cells.reshape(VIEW, VIEW)
        if VIEW != 7:
            raise ValueError("levels that hide cells behind walls need a view of 7x7 cells")

        # Four rows in the first integer, three in the second, see `spread_light`. On a CPU, XLA
        # would recompute an array of rows for every cell that reads it.
        rows_per_word = 4
        bits_per_word = rows_per_word * VIEW
        bit = np.arange(VIEW**2) % bits_per_word  # of each cell in its integer
        clear_bits = are(cells, "is_clear").astype(jnp.int32) << bit
        clear_words = [clear_bits[:bits_per_word].sum(), clear_bits[bits_per_word:].sum()]
        seen_words = [0, 0]
        lit = 1 << VIEW // 2  # light starts at the agent
        for row in reversed(range(VIEW)):  # from near to far
            word, shift = row // rows_per_word, row % rows_per_word * VIEW
            clear = (clear_words[word] >> shift) & 0b1111111
            seen, lit = spread_light(clear, lit)
            seen_words[word] |= seen << shift
        seen_word = jnp.where(np.arange(VIEW**2) < bits_per_word, seen_words[0], seen_words[1])
        is_seen = ((seen_word >> bit) & 1) == 1
        return jnp.where(is_seen, cells, UNSEEN).reshape(VIEW, VIEW)

    def observe(self, state):
        """The observation of a state: {"image": uint8, "direction": [] int32}.

        The image is Farama's [7, 7, 3] with axes (column, row, code) and the codes (object, color,
        door state). With `pixels` it is the rendered view [56, 56, 3] (`RGBImgPartialObsWrapper`).
        With `observes_mission` there is also "mission", int32 [any], indices into WORDS.
        """
        view = self.view(state)
        image = draw_view(view) if self.pixels else unpack(view.T)
        obs = {"image": image, "direction": state.direction}
        if self.observes_mission:
            obs["mission"] = state.mission
        return obs

    def mission(self, state):
        """Farama's mission for the level of a state, formatted on the host.

        >>> env = find_env("PutNear-6x6-N2")
        >>> env.mission(env.reset(jax.random.key(0)))
        'put the yellow ball near the grey key'
        """
        return self.sentence.format(*(WORDS[number] for number in np.asarray(state.mission, int)))

    def render(self, state, tile_size=None):
        """Renders a state on the host, visible cells brighter; uint8 [rows, columns, 3]."""
        tile_size = tile_size or max(4, 320 // self.width)
        position, direction = int(state.position), int(state.direction)
        shown = view_table(self.width, self.height)[position * 4 + direction]
        is_seen = np.asarray(self.view(state)).ravel() != UNSEEN
        seen = set(shown[is_seen].tolist())
        image = np.zeros((self.height, tile_size, self.width, tile_size, 3), np.uint8)
        for cell, content in enumerate(state.grid.tolist()):
            y, x = divmod(cell, self.width)
            agent = direction if cell == position else None
            image[y, :, x] = draw_tile(content, agent, cell in seen, tile_size)
        return image.reshape(self.height * tile_size, self.width * tile_size, 3)


@functools.cache
def num_uniforms(env):
    """Number of random numbers that a level of a `MiniGrid` uses, found by tracing one."""

    def used(numbers):
        draw = Uniforms(numbers)
        env.level(env, draw)
        return numbers[: draw.count]

    return jax.eval_shape(used, jax.ShapeDtypeStruct((2**16,), jnp.float32)).size


class TrialState(NamedTuple):
    """State of a trial."""

    env_state: Any  # of the current episode
    start_state: Any  # initial state of every episode
    step_count: jax.Array  # [] int32, steps of the current episode
    returns: jax.Array  # [C]
    episode: jax.Array  # [] int32, number of finished episodes
    restarted: jax.Array  # [] bool, whether the last step ended an episode
    info: dict  # {name: []}, see `metrics`


@dataclasses.dataclass(frozen=True)
class Trials:
    """An environment whose episodes are trials: C consecutive episodes on the same level.

    This is meta-reinforcement learning as in RL^2 (arXiv:1611.02779): the hidden state learns the
    level. Hidden state, return and TD errors continue through the trial, so exploration in the
    first episode pays if it improves later ones. All episodes of a trial have the same initial
    state; a PRNG key in this state replays the same noise in every episode. The trial terminates
    with its last episode, even at the time limit.

    With C episodes of about n steps, gamma should be well above 1 - 1 / (C n). Remembering should
    pay within the `num_steps` steps of a gradient.
    """

    env: Any
    num_episodes: int

    def __getattr__(self, name):  # num_actions, code_sizes, width and so on
        return getattr(object.__getattribute__(self, "env"), name)

    @property
    def max_episode_steps(self):
        return self.num_episodes * self.env.max_episode_steps

    def reset(self, key):
        """Samples a level; returns the initial state of a trial."""
        start_state = self.env.reset(key)
        return TrialState(
            env_state=start_state,
            start_state=jax.tree.map(jnp.copy, start_state),  # a second buffer, for donation
            step_count=jnp.int32(0),
            returns=jnp.zeros(self.num_episodes, jnp.float32),
            episode=jnp.int32(0),
            restarted=jnp.bool_(False),
            info=jax.tree.map(jnp.copy, self.env_info(start_state)),
        )

    def step(self, key, state, action):
        """One step; returns (state, reward [], terminated [])."""
        env_state, reward, terminated = self.env.step(key, state.env_state, action)
        step_count = state.step_count + 1
        ended = terminated | (step_count >= self.env.max_episode_steps)
        episode = state.episode + ended
        now = functools.partial(jnp.where, ended)
        after = TrialState(
            env_state=jax.tree.map(now, state.start_state, env_state),
            start_state=state.start_state,
            step_count=jnp.where(ended, 0, step_count),
            returns=state.returns.at[state.episode].add(reward),
            episode=episode,
            restarted=ended,
            info=self.env_info(env_state),
        )
        return after, reward, episode >= self.num_episodes

    def observe(self, state):
        """The environment's observation and "restarted", see `TrialState`."""
        return {**self.env.observe(state.env_state), "restarted": state.restarted}

    def env_info(self, env_state):
        """The environment's `metrics` of a state; {} if it has none."""
        return self.env.metrics(env_state) if hasattr(self.env, "metrics") else {}

    def metrics(self, state):
        """The environment's `metrics` after the last step, before any restart."""
        return state.info

    @property
    def render(self):
        """The environment's `render`, for a `TrialState`; AttributeError if it has none."""
        render = self.env.render
        return lambda state: render(state.env_state)


def full_id(text):
    """The full id of an environment: adds "MiniGrid-" and Farama's newest version if missing."""
    # If Farama has only -v0, -v1 also refers to it.
    name = f"MiniGrid-{text.removeprefix('MiniGrid-')}"
    for known in (name, f"{name}-v1", f"{name}-v0", name.removesuffix("-v1") + "-v0"):
        if known in ENVIRONMENTS:
            return known
    return text


def find_env(env_id):
    """The `MiniGrid` of an id; raises `UserError` with similar ids if there is none."""
    if full_id(env_id) in ENVIRONMENTS:
        return ENVIRONMENTS[full_id(env_id)]
    near = difflib.get_close_matches(f"MiniGrid-{env_id}", ENVIRONMENTS, n=3, cutoff=0)
    hint = f"similar: {', '.join(near)}; BabyAI and WFC levels are not included"
    raise UserError(f"unknown --env-id {env_id}, see --list-envs; {hint}")


def make_env(args):
    """The environment that the flags select. Raises `UserError` for an unknown id.

    Your own environment needs `reset`, `step`, `observe`, `num_actions` and `max_episode_steps`,
    and a function `encode` for its observations. States and observations are pytrees of arrays (for
    `Trials` observations are dicts); `terminated` is a bool. `rollout` applies the time limit and
    resets the environment. Optional: `render(state)` -> uint8 [rows, columns, 3] for videos;
    `metrics(state)`, a dict of scalars whose means are logged as env/<name>; `starts_per_update`
    for slow resets, see `rollout`. eval_success_rate is the fraction of episodes with a positive
    return.
    """
    env = dataclasses.replace(find_env(args.env_id), pixels=args.img_obs)
    return Trials(env, args.episodes_per_trial) if args.episodes_per_trial > 1 else env


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


class Inputs(NamedTuple):
    """Inputs of the agent in T steps of M environments."""

    obs: Any  # pytree of [T, M, ...], the input of `encode`; see `observe`
    prev_action: jax.Array  # [T, M, ...]
    prev_reward: jax.Array  # [T, M]
    start: jax.Array  # [T, M], whether the agent starts here without any memory


CODE_LAYERS = [(16, 2, 1), (32, 2, 1), (64, 2, 1)]  # features, size and stride of each convolution
PIXEL_LAYERS = [(16, 3, 2), (32, 3, 2), (32, 3, 2), (32, 3, 2)]
MISSION_FEATURES = 32  # size of a mission's embedding
GRU_GAIN = 4.0  # views differ in few cells: large weights make this matter from the start


def orthogonal(gain):
    """A flax initializer of orthogonal weights; `init_mlp` of CartPole's script explains gains."""

    def draw(key, shape, dtype=jnp.float32):
        initializer = functools.partial(nn.initializers.orthogonal(gain), shape=shape, dtype=dtype)
        # In sequence under vmap: jaxlib 0.10's batched QR decomposition can deadlock on a CPU.
        return jax.custom_batching.sequential_vmap(initializer)(key)

    return draw


class Dense(nn.Module):
    """A layer w x + b, [in, ...] -> [features, ...]; on a CPU faster than with features last."""

    features: int
    gain: float
    bias_init: Callable = nn.initializers.zeros

    @nn.compact
    def __call__(self, x):
        w = self.param("w", orthogonal(self.gain), (self.features, len(x)))
        b = self.param("b", self.bias_init, (self.features, 1), jnp.float32)
        # Merges the batch axes: with several, XLA transposes x before the product on a CPU.
        flat = x.astype(jnp.float32).reshape(len(x), -1)
        return (w @ flat + b).reshape(-1, *x.shape[1:])


def patches(x, size, stride):
    """Patches [F, Y, X, ...] -> [size * size * F, Y', X', ...], for convolutions as products."""
    # On a CPU, XLA's gradient of a convolution inside `lax.scan` is twenty times slower than this.
    num_rows = (x.shape[1] - size) // stride + 1
    num_columns = (x.shape[2] - size) // stride + 1
    slices = []
    for i in range(size):
        for j in range(size):
            rows = slice(i, i + num_rows * stride, stride)
            columns = slice(j, j + num_columns * stride, stride)
            slices.append(x[:, rows, columns])
    return jnp.concatenate(slices)


def one_hot_codes(x, sizes):
    """One-hot codes of patches; with CODE_SIZES [4 * 3, ...] -> [4 * (11 + 6 + 3), ...] bool."""
    rest = x.shape[1:]
    one_hot = []
    for code, num_values in enumerate(sizes):
        values = np.arange(num_values).reshape(1, -1, *[1] * len(rest))
        is_value = x[code :: len(sizes), None] == values  # [4, num_values, ...]
        one_hot.append(is_value.reshape(-1, *rest))
    return jnp.concatenate(one_hot)


class Encoder(nn.Module):
    """Convolutions over the codes or pixels of a view: [T, M, 7, 7, 3] -> [F, M, T]."""

    pixels: bool
    code_sizes: tuple = CODE_SIZES

    @nn.compact
    def __call__(self, image):
        x = image.transpose(4, 2, 3, 1, 0)  # [F, Y, X, M, T]; of codes [F, X, Y, M, T]
        layers = PIXEL_LAYERS if self.pixels else CODE_LAYERS
        for i, (features, size, stride) in enumerate(layers):
            if min(x.shape[1:3]) < size:
                break
            x = patches(x, size, stride)
            if i == 0:
                x = x / jnp.float32(255) if self.pixels else one_hot_codes(x, self.code_sizes)
            x = nn.relu(Dense(features, math.sqrt(2), name=f"conv{i}")(x))
        return x.reshape(-1, *x.shape[3:])


class GRU(nn.Module):
    """Gated recurrent unit, arXiv:1406.1078, with the reset gate of PyTorch and cuDNN.

        reset = sigmoid(W_r x + b_r + U_r h)           fraction of h that the new content uses
        keep  = sigmoid(W_k x + b_k + U_k h)           fraction of h that stays ("update gate")
        new   = tanh(W_n x + b_n + reset * (U_n h + c))
        h     = (1 - keep) * new + keep * h

    At keep = 1 a unit passes on its content and its gradient unchanged. At keep = s / (1 + s) the
    unit forgets in about s steps. The initial bias b_k = log(s), with s uniform in [1, max_span],
    gives the units different time spans (arXiv:1804.11188).
    """

    size: int
    max_span: int

    @nn.compact
    def __call__(self, x, h, start):
        """Hidden states [H, M, T] after steps x [F, M, T] from h [H, M]; start is [T, M]."""

        def spans_init(key, shape, dtype):
            spans = jax.random.uniform(key, (self.size, 1), dtype, 1.0, self.max_span)
            bias = jnp.zeros(shape, dtype)
            return bias.at[self.size : 2 * self.size].set(jnp.log(spans))

        # One product for the inputs of all steps; only the recurrent part is sequential.
        from_x = Dense(3 * self.size, GRU_GAIN, spans_init, name="input")(x)
        from_x = from_x.transpose(2, 0, 1)  # [T, 3 H, M]
        square = (self.size, self.size)
        u_reset = self.param("u_reset", orthogonal(1.0), square)
        u_keep = self.param("u_keep", orthogonal(1.0), square)
        u_new = self.param("u_new", orthogonal(1.0), square)
        c = self.param("c", nn.initializers.zeros, (self.size, 1), jnp.float32)
        u = jnp.concatenate([u_reset, u_keep, u_new])  # [3 H, H]

        def step(h, inputs):
            from_x, start = inputs  # [3 H, M], [1, M]
            h = jnp.where(start, 0.0, h)
            reset_x, keep_x, new_x = jnp.split(from_x, 3)
            reset_h, keep_h, new_h = jnp.split(u @ h, 3)
            reset = jax.nn.sigmoid(reset_x + reset_h)
            keep = jax.nn.sigmoid(keep_x + keep_h)
            new = jnp.tanh(new_x + reset * (new_h + c))
            h = (1 - keep) * new + keep * h
            return h, h

        _, hs = jax.lax.scan(step, h, (from_x, start[:, None]), unroll=gpu_unroll(8))
        return hs.transpose(1, 2, 0)


def encode(args, env, obs):
    """Features [F, M, T] of the observations in `Inputs`, [T, M, ...]; may contain flax layers.

    Rewrite it for other observations. M precedes T, so that the merged axis can be sharded.
    """
    if not hasattr(env, "code_sizes"):
        raise TypeError("observations of other environments need another `encode`")
    encoder = Encoder(args.img_obs, env.code_sizes, name="encoder")
    features = [encoder(obs["image"]), jax.nn.one_hot(obs["direction"].T, 4, axis=0)]
    if args.episodes_per_trial > 1:
        features.append(obs["restarted"].T[None])
    if env.observes_mission:
        words = jax.nn.one_hot(obs["mission"], len(WORDS))  # [T, M, places, len(WORDS)]
        words = words.transpose(2, 3, 1, 0)
        # Each word has a separate embedding for each place of the sentence.
        words = words.reshape(-1, *words.shape[2:])
        features.append(Dense(MISSION_FEATURES, 1.0, name="mission")(words))
    return jnp.concatenate(features)


def embed_action(args, env, action, start):
    """Features [F, M, T] of the previous actions [T, M]; at a start, of an extra code."""
    action = jnp.where(start, env.num_actions, action)
    one_hot = jax.nn.one_hot(action.T, env.num_actions + 1, axis=0)
    return Dense(args.action_emb_dim, 1.0, name="prev_action")(one_hot)


def action_dist(args, env, x):
    """The policy's distribution [T, M] for features [F, M, T]."""
    logits = Dense(env.num_actions, 0.01, name="actor")(x)
    return Categorical(logits=logits.transpose(2, 1, 0))


class ActorCritic(nn.Module):
    """`encode`, stacked GRUs with summed outputs, and heads for actor and critic."""

    args: Args
    env: Any

    @nn.compact
    def __call__(self, inputs, rnn_state):
        """Policy, values [T, M] and recurrent states [T, M, L, H] after each step."""
        args = self.args
        prev_action = embed_action(args, self.env, inputs.prev_action, inputs.start)
        prev_reward = jnp.where(inputs.start, 0.0, inputs.prev_reward).T[None]
        x = jnp.concatenate([encode(args, self.env, inputs.obs), prev_action, prev_reward])

        outputs = []  # [H, M, T] of each layer
        for i in range(args.rnn_num_layers):
            gru = GRU(args.rnn_hidden_dim, args.num_steps, name=f"gru{i}")
            x = gru(x, rnn_state[:, i].T, inputs.start)
            outputs.append(x)
        rnn_states = jnp.stack(outputs).transpose(3, 2, 0, 1)
        x = sum(outputs)

        gain = math.sqrt(2)
        actor = jnp.tanh(Dense(args.head_hidden_dim, gain, name="actor_hidden")(x))
        critic = jnp.tanh(Dense(args.head_hidden_dim, gain, name="critic_hidden")(x))
        # A small gain: before the first reward, the actor learns only from the critic's errors.
        value = Dense(1, 0.01, name="critic")(critic)
        return action_dist(args, self.env, actor), value[0].T, rnn_states


def init_rnn_state(args, num_envs):
    """The initial recurrent state [N, L, H]; an LSTM would need a pair of these."""
    return jnp.zeros((num_envs, args.rnn_num_layers, args.rnn_hidden_dim), jnp.float32)


def init_agent(args, key, env):
    """Parameters of the agent, flax's nested dict of arrays.

    To replace the agent, rewrite `init_rnn_state`, `init_agent` and `forward`. Recurrent states are
    pytrees of arrays [N, ...]; parameters are any pytree of arrays. For continuous actions, rewrite
    `embed_action`, `action_dist` and `init_agent_state`.
    """

    def example_inputs():  # of one step in one environment
        env_state = jax.vmap(env.reset)(jax.random.key(0)[None])
        inputs = make_inputs(env, env_state, init_agent_state(args, 1))
        return jax.tree.map(lambda x: x[None], inputs)

    shapes = jax.eval_shape(example_inputs)  # computes shapes only
    inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return ActorCritic(args, env).init(key, inputs, init_rnn_state(args, 1))


def forward(args, params, inputs, rnn_state):
    """Policy, values [T, M] and recurrent states [T, M, ...] after each step of `Inputs` [T, M].

    `rnn_state` [M, ...] is the state before the first step. `rollout` calls `forward` with T = 1.
    `ppo_loss` calls `forward` with all T steps, in every epoch from the `rnn_state` of the rollout.
    Where `inputs.start` is set, recurrent state, previous action and reward are ignored.
    """
    if inputs.start.ndim != 2:
        raise ValueError(
            "forward expects parameters of one agent (without the axis K of `load_run`) and inputs "
            f"[T, M, ...], but inputs.start has the shape {inputs.start.shape}"
        )
    return ActorCritic(args, make_env(args)).apply(params, inputs, rnn_state)


class AgentState(NamedTuple):
    """The memory of the agent between two steps of N environments."""

    rnn_state: Any  # pytree of [N, ...]
    prev_action: jax.Array  # [N, ...]
    prev_reward: jax.Array  # [N]
    start: jax.Array  # [N], whether the next step ignores all of this


def init_agent_state(args, num_envs):
    """The `AgentState` before the first step."""
    return AgentState(
        rnn_state=init_rnn_state(args, num_envs),
        prev_action=jnp.zeros(num_envs, jnp.int32),
        prev_reward=jnp.zeros(num_envs, jnp.float32),
        start=jnp.ones(num_envs, bool),
    )


def agent_state_after(rnn_state, action, reward):
    """The `AgentState` [N] after a step of an episode that continues; else set `start`."""
    return AgentState(
        rnn_state=rnn_state,
        prev_action=action,
        prev_reward=reward.astype(jnp.float32),
        start=jnp.zeros(reward.shape, bool),
    )


def make_inputs(env, env_state, agent_state):
    """`Inputs` [N] of one step from the states of N environments and of the agent."""
    return Inputs(
        obs=jax.vmap(env.observe)(env_state),
        prev_action=agent_state.prev_action,
        prev_reward=agent_state.prev_reward,
        start=agent_state.start,
    )


def forward_step(args, params, inputs, rnn_state):
    """`forward` for `Inputs` [N] of one step; returns (dist, value, rnn_state) of [N]."""
    sequence = jax.tree.map(lambda x: x[None], inputs)
    outputs = forward(args, params, sequence, rnn_state)
    return jax.tree.map(lambda x: x[0], outputs)


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
    # One vector of all parameters needs fewer kernels than one array per layer.
    grads, unravel = ravel_pytree(grads)
    direction, opt_state = make_optimizer(args).update(grads, opt_state)
    step = unravel(-learning_rate * direction)
    return optax.apply_updates(params, step), opt_state, optax.tree.norm(grads)


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

    inputs: Inputs  # of [N]
    action: jax.Array  # [N, ...]
    log_prob: jax.Array  # [N]
    value: jax.Array  # [N]
    reward: jax.Array  # [N]
    terminated: jax.Array  # [N]
    truncated: jax.Array  # [N]
    info: dict  # {name: [N]}, the environment's `metrics`


class Batch(NamedTuple):
    """Inputs of the loss: T steps of N environments, or of the M of a minibatch."""

    inputs: Inputs  # of [T, N]
    rnn_state: Any  # [1, N, ...], before the first step; all arrays have N second
    action: jax.Array  # [T, N, ...]
    log_prob: jax.Array  # [T, N], of the old policy
    value: jax.Array  # [T, N], of the old critic
    advantage: jax.Array  # [T, N]
    target: jax.Array  # [T, N], for the critic


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


def level_keys(key, envs):
    """PRNG keys for new levels of the environments `envs`; each depends only on its index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, envs)


def reset_ended(env, key, done, env_state):
    """Replaces the states [N] of environments that are `done` by levels of their `level_keys`."""
    num_envs = done.size
    num_levels = max(1, num_envs // 64)  # per iteration, because few episodes end in one step

    def any_left(carry):
        done, _ = carry
        return done.any()

    def replace_some(carry):
        done, env_state = carry
        # The first environments that are done, padded with N, which is dropped.
        rank = jnp.cumsum(done)
        place = jnp.where(done, rank - 1, num_levels)
        index = jnp.full(num_levels, num_envs).at[place].set(jnp.arange(num_envs), mode="drop")
        levels = jax.vmap(env.reset)(level_keys(key, index))
        env_state = jax.tree.map(
            lambda old, new: old.at[index].set(new, mode="drop"), env_state, levels
        )
        return done & (rank > num_levels), env_state

    _, env_state = jax.lax.while_loop(any_left, replace_some, (done, env_state))
    return env_state


def truncation_window(args, env):
    """Number of steps in which an environment is truncated at most once."""
    return min(env.max_episode_steps, args.num_steps)


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


def rollout(args, env, params, env_state, agent_state, stats, key):
    """Plays T steps in N environments and resets environments whose episode has ended.

    Returns (env_state, agent_state, stats, trajectory, truncated_state). The trajectory is a
    `Transition` of [T, N, ...]. truncated_state = (env_state, agent_state), [W, N, ...], contains
    the last states of truncated episodes, one per window of `truncation_window` steps. It is
    undefined for windows without truncation.

    A CPU generates new levels on demand, in `reset_ended`. An accelerator would wait for the
    condition of that loop, so it generates the same levels in advance, one per step and
    environment. An environment with `starts_per_update` has a pool of that many initial states on
    every platform. Each new episode takes the next state of the pool, in a cycle.
    """
    # One split for all keys: each use of `jax.random` adds 10% to the compile time on a CPU.
    keys = jax.random.split(key, (args.num_steps, 2 + args.num_envs))
    action_keys, reset_keys, step_keys = keys[:, 0], keys[:, 1], keys[:, 2:]
    pool_size = getattr(env, "starts_per_update", None)
    when_needed = pool_size is None and jax.default_backend() == "cpu"
    levels = pool = None
    if pool_size is not None:
        pool = jax.vmap(env.reset)(level_keys(reset_keys[0], jnp.arange(pool_size)))
    elif not when_needed:

        def levels_of_step(key):
            return jax.vmap(env.reset)(level_keys(key, jnp.arange(args.num_envs)))

        if args.batch_size <= 65_536:
            levels = jax.vmap(levels_of_step)(reset_keys)
        else:  # all at once may not fit into memory
            levels = jax.lax.map(levels_of_step, reset_keys)
    num_windows = math.ceil(args.num_steps / truncation_window(args, env))
    window = jnp.arange(args.num_steps) // truncation_window(args, env)

    def env_step(carry, inputs_of_step):
        env_state, agent_state, stats, truncated_state, num_taken = carry
        action_key, step_keys, reset_key, levels, window = inputs_of_step

        # --- Act ---
        inputs = make_inputs(env, env_state, agent_state)
        dist, value, rnn_state = forward_step(args, params, inputs, agent_state.rnn_state)
        action = dist.sample(action_key)
        log_prob = dist.log_prob(action)
        next_env_state, reward, terminated = jax.vmap(env.step)(step_keys, env_state, action)
        shape = (args.num_envs,)
        check_shapes(shape, value=value, log_prob=log_prob, entropy=dist.entropy())
        check_shapes(shape, reward=reward, terminated=terminated)
        before, after = array_types(env_state), array_types(next_env_state)
        if before != after:
            raise TypeError(f"`reset` returns {before - after}, `step` returns {after - before}")
        next_agent_state = agent_state_after(rnn_state, action, reward)

        # --- End episodes ---
        stats = stats._replace(
            running_return=stats.running_return + reward, running_length=stats.running_length + 1
        )
        truncated = stats.running_length >= env.max_episode_steps
        done = terminated | truncated
        truncated_state = jax.tree.map(
            lambda kept, new: kept.at[window].set(select(truncated, new, kept[window])),
            truncated_state,
            (next_env_state, next_agent_state),
        )
        info = env_metrics(env, next_env_state)
        check_shapes(shape, **info)
        transition = Transition(
            inputs, action, log_prob, value, reward, terminated, truncated, info
        )

        # --- Reset ---
        if when_needed:
            env_state = reset_ended(env, reset_key, done, next_env_state)
        else:
            if pool is not None:
                place = (num_taken + jnp.cumsum(done) - 1) % pool_size
                levels = jax.tree.map(lambda x: x[place], pool)
            env_state = select(done, levels, next_env_state)
        agent_state = next_agent_state._replace(start=done)
        carry = env_state, agent_state, restart_ended(done, stats), truncated_state
        return (*carry, num_taken + done.sum(dtype=jnp.int32)), transition

    truncated_state = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num_windows, *x.shape)), (env_state, agent_state)
    )
    carry = (env_state, agent_state, stats, truncated_state, jnp.int32(0))
    inputs_of_steps = (action_keys, step_keys, reset_keys, levels, window)
    unroll = gpu_unroll(4)
    carry, trajectory = jax.lax.scan(env_step, carry, inputs_of_steps, unroll=unroll)
    env_state, agent_state, stats, truncated_state, _ = carry
    return env_state, agent_state, stats, trajectory, truncated_state


def trajectory_values(args, env, params, trajectory, last_state, truncated_state):
    """Values of all observations and of their true successors, both [T, N].

    The successor is the observation of the next step. After the last step it is from last_state =
    (env_state, agent_state), [N]; after a truncation it is from truncated_state [W, N, ...].
    """

    def value_of(env_state, agent_state):  # of [N] -> [N]
        inputs = make_inputs(env, env_state, agent_state)
        _, value, _ = forward_step(args, params, inputs, agent_state.rnn_state)
        return value

    states = jax.tree.map(  # [1 + W, N], for one pass through the critic
        lambda last, others: jnp.concatenate([last[None], others]), last_state, truncated_state
    )
    last_value, truncated_value = jnp.split(jax.vmap(value_of)(*states), (1,))
    next_value = jnp.concatenate([trajectory.value[1:], last_value])
    truncated_value = jnp.repeat(truncated_value, truncation_window(args, env), axis=0)
    truncated_value = truncated_value[: args.num_steps]  # the last window may be shorter
    return trajectory.value, jnp.where(trajectory.truncated, truncated_value, next_value)


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
    """The loss of a minibatch, a mean over samples; returns (loss [], metrics {tag: []}).

    Returns of episodes lie in [-1, 1], so `clip_vloss` hardly slows the critic. Returns of trials
    may be larger: try `--no-clip-vloss`.
    """
    rnn_state = jax.tree.map(lambda x: x[0], batch.rnn_state)
    dist, value, _ = forward(args, params, batch.inputs, rnn_state)

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
    }


def reduce_metrics(metrics):
    """Averages metrics over minibatches; takes the maximum of tags that end in _max."""
    return {tag: x.max(0) if tag.endswith("_max") else x.mean(0) for tag, x in metrics.items()}


def spread(minibatch):
    """Shards a shuffled minibatch [T, M] over the devices of the current mesh, if there is one."""
    if jax.sharding.get_abstract_mesh().empty:
        return minibatch
    return jax.lax.with_sharding_constraint(minibatch, jax.P(None, "devices"))


def update_epochs(args, params, opt_state, batch, learning_rate, key):
    """Several passes over a batch of N environments in shuffled minibatches of environments.

    Stops before the first minibatch whose approx_kl exceeds `target_kl`.
    Returns (params, opt_state, metrics {tag: []} averaged over all minibatches).
    """

    def minibatch_step(carry, index):  # index [M] of environments
        params, opt_state, active = carry
        minibatch = spread(jax.tree.map(lambda x: x[:, index], batch))
        if args.norm_adv:
            advantage = minibatch.advantage - minibatch.advantage.mean()
            advantage = advantage / (minibatch.advantage.std() + 1e-8)
            minibatch = minibatch._replace(advantage=advantage)
        grads, metrics = jax.grad(ppo_loss, argnums=1, has_aux=True)(args, params, minibatch)
        *new, norm = optimizer_update(args, grads, opt_state, params, learning_rate)
        check_shapes((), **metrics)
        metrics["losses/grad_norm"] = norm
        if args.target_kl is not None:
            active &= metrics["losses/approx_kl"] <= args.target_kl
            new = jax.tree.map(functools.partial(jnp.where, active), new, [params, opt_state])
        return (*new, active), metrics

    order = jnp.argsort(jax.random.bits(key, (args.update_epochs, args.num_envs), jnp.uint32))
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
    opt_state: optax.OptState
    env_state: Any  # of [N]
    agent_state: AgentState  # of [N]
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
        opt_state=make_optimizer(args).init(ravel_pytree(params)[0]),
        env_state=env_state,
        agent_state=init_agent_state(args, args.num_envs),
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
    env_state, agent_state, stats, trajectory, truncated_state = rollout(
        args, env, state.params, state.env_state, state.agent_state, state.stats, rollout_key
    )

    # --- Advantages ---
    value, next_value = trajectory_values(
        args, env, state.params, trajectory, (env_state, agent_state), truncated_state
    )
    advantage = compute_gae(
        args, trajectory.reward, value, next_value, trajectory.terminated, trajectory.truncated
    )
    target = advantage + value  # an estimate of the return

    # --- Learn ---
    rnn_state = jax.tree.map(lambda x: x[None], state.agent_state.rnn_state)
    sampled = trajectory.inputs, rnn_state, trajectory.action, trajectory.log_prob
    batch = Batch(*sampled, value, advantage, target)
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
    state = TrainState(params, opt_state, env_state, agent_state, stats, next_key, state.update + 1)
    return state, metrics


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
    """Results of E episodes, and the states of the first one."""

    episode_return: jax.Array  # [E]
    episode_length: jax.Array  # [E]
    info: dict  # {name: [E]}, sums of the environment's `metrics` over an episode
    states: Any  # [S + 1, ...], the first episode; undefined after its end
    trial_returns: Any  # [E, C], of each episode of `Trials`; None without trials


def evaluate(args, params, key):
    """Plays an episode (or trial) in each of E environments with one agent; an `Evaluation`."""
    env = make_env(args)
    num_envs = args.eval_episodes
    reset_key, action_key, step_key = jax.random.split(key, 3)
    start_state = jax.vmap(env.reset)(jax.random.split(reset_key, num_envs))

    def is_playing(carry):
        t, playing, _, _, _, _ = carry
        return (t < env.max_episode_steps) & playing.any()

    def env_step(carry):
        t, playing, env_state, agent_state, sums, states = carry
        inputs = make_inputs(env, env_state, agent_state)
        dist, _, rnn_state = forward_step(args, params, inputs, agent_state.rnn_state)
        action = dist.mode()
        if args.eval_mode == "sampled":
            action = dist.sample(jax.random.fold_in(action_key, t))
        keys = jax.random.split(jax.random.fold_in(step_key, t), num_envs)
        env_state, reward, terminated = jax.vmap(env.step)(keys, env_state, action)
        agent_state = agent_state_after(rnn_state, action, reward)
        returns, lengths, info = sums
        info = jax.tree.map(jnp.add, info, env_metrics(env, env_state))
        sums = select(playing, (returns + reward, lengths + 1, info), sums)
        states = jax.tree.map(lambda kept, x: kept.at[t + 1].set(x[0]), states, env_state)
        return t + 1, playing & ~terminated, env_state, agent_state, sums, states

    playing, nothing = jnp.ones(num_envs, bool), jnp.zeros(num_envs, jnp.float32)
    info = dict.fromkeys(env_metrics(env, start_state), nothing)
    sums = nothing, jnp.zeros(num_envs, jnp.int32), info
    steps = min(env.max_episode_steps, VIDEO_STEPS) if hasattr(env, "render") else 0
    states = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (steps + 1, *x.shape[1:])), start_state)
    carry = jnp.int32(0), playing, start_state, init_agent_state(args, num_envs), sums, states
    carry = jax.lax.while_loop(is_playing, env_step, carry)
    _, _, env_state, _, (returns, lengths, info), states = carry
    return Evaluation(
        episode_return=returns,
        episode_length=lengths,
        info=info,
        states=states,
        # `Trials` ignores rewards after the end of a trial.
        trial_returns=env_state.returns if args.episodes_per_trial > 1 else None,
    )


def record_video(args, evaluation, path):
    """Writes the first episode of the first seed as path.gif; `evaluation` is [K, ...]."""
    env = make_env(args)
    states = jax.device_get(evaluation.states)
    frames = []
    for t in range(min(int(evaluation.episode_length[0, 0]), VIDEO_STEPS) + 1):
        image = env.render(jax.tree.map(lambda x: x[0, t], states))  # noqa: B023
        # A level has about 80 colors at most, so none is lost.
        frames.append(Image.fromarray(image).quantize(256, Image.Quantize.MAXCOVERAGE))
    path = path.with_suffix(".gif")
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)
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


# --- Devices and processes ---


def make_mesh(args):
    """A mesh of the first `num_devices` devices of every process; raises `UserError`."""
    if args.num_devices > jax.local_device_count():
        raise UserError(f"--num-devices {args.num_devices}: JAX sees {jax.local_device_count()}")
    devices = []
    for process in range(jax.process_count()):
        devices += jax.local_devices(process_index=process)[: args.num_devices]
    if args.num_envs % (args.num_minibatches * len(devices)):
        size = f"--num-minibatches x {len(devices)} devices"
        raise UserError(f"--num-envs must be a multiple of {size}")
    return jax.sharding.Mesh(np.array(devices), ("devices",))


def state_shardings(mesh):
    """Shardings of a `TrainState`: environments, axis 1, are split; the rest is replicated."""
    shardings = dict.fromkeys(TrainState._fields, jax.NamedSharding(mesh, jax.P()))
    for name in ("env_state", "agent_state", "stats"):
        shardings[name] = jax.NamedSharding(mesh, jax.P(None, "devices"))
    return TrainState(**shardings)


def join_processes(args):
    """Starts JAX's distributed runtime; only the first process prints. Returns the new `Args`."""
    # JAX's preemption service would catch SIGTERM before `stop_signals`.
    jax.config.update("jax_enable_preemption_service", False)
    with user_errors("--distributed", ValueError):  # no cluster found
        jax.distributed.initialize(args.coordinator_address, args.num_processes, args.process_id)
    if jax.process_index() == 0:
        return args
    sys.stdout = open(os.devnull, "w")
    return dataclasses.replace(args, track=False)


def agree_on_signal(signals):
    """The first signal that any process has received, or 0; all processes must call this."""
    received = signals[0] if signals else 0
    if jax.process_count() > 1:
        received = int(multihost_utils.process_allgather(np.int32(received)).max())
    return received


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
    """Replaces checkpoint.npz of a run; all processes must call this."""
    arrays = named_arrays(state)
    if jax.process_count() > 1:
        arrays = multihost_utils.process_allgather(arrays, tiled=True)
    buffer = io.BytesIO()
    np.savez(buffer, **jax.device_get(arrays))
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
    sizes = "action_emb_dim rnn_hidden_dim rnn_num_layers head_hidden_dim"
    more = "checkpoint_interval eval_episodes num_devices episodes_per_trial"
    counts = f"{counts} {sizes} {more}".split()
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if (name in counts and value < 1) or value != value:  # NaN
            raise UserError(f"{flag} must be a positive number")
        as_json = list(value) if isinstance(value, tuple) else value
        if json.loads(json.dumps(value, default=str)) != as_json:
            raise UserError(f"{flag}: args.json cannot store {value!r}")
    if args.num_envs % args.num_minibatches:
        raise UserError(f"--num-minibatches must divide the {args.num_envs} of --num-envs")
    if args.distributed and args.eval is not None:
        raise UserError("--eval is for one process, without --distributed")


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
    """Scores {name: [K]} of an `Evaluation` of K agents."""
    returns, lengths, info = jax.device_get(evaluation[:3])
    scores = {
        "eval_return_mean": returns.mean(1),
        "eval_return_std": returns.std(1),
        "eval_length_mean": lengths.mean(1),
        "eval_success_rate": (returns > 0).mean(1),
        **{f"eval_env_{name}": x.sum(1) / lengths.sum(1) for name, x in info.items()},  # per step
    }
    if evaluation.trial_returns is not None:  # of the first, second, ... episode of a trial
        rates = (jax.device_get(evaluation.trial_returns) > 0).mean(1)  # [K, C]
        scores |= {f"eval_success_rate_{c + 1}": rate for c, rate in enumerate(rates.T)}
    return scores


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
    if jax.process_index() > 0:
        return
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


def print_envs():
    """Prints all environments, for `--list-envs`."""
    for env in ENVIRONMENTS.values():
        size, mission = f"{env.width}x{env.height}", ", observes its mission"
        line = f"{env.env_id:42} {size:>5} cells, {env.max_episode_steps:4} steps"
        print(line + (mission if env.observes_mission else ""))


# --- Main ---


def saved_flags(args):
    """The flags for args.json and summary.json, without those of this start and this process."""
    joined = ("coordinator_address", "num_processes", "process_id", "resume")
    return vars(args) | dict.fromkeys(joined) | {"distributed": False}


def start_run(args, run_dir, out_dir):
    """Creates or loads the state of a run and compiles its update.

    Writes args.json into `out_dir`. Returns (state, run_update, run_evaluation), the functions as
    `run_updates` calls them. Raises `UserError` for a finished run.
    """
    numbers, mesh = float_inputs(args), make_mesh(args)
    placed, everywhere = state_shardings(mesh), jax.NamedSharding(mesh, jax.P())
    init = jit_function(args, init_states, level=0)
    layout = dict(donate_argnums=1, out_shardings=(placed, everywhere))
    run_update = jit_function(args, update_seeds, **layout)
    run_evaluation = jit_function(args, evaluate_seeds, out_shardings=everywhere)
    like = jax.eval_shape(init, numbers)
    # Without checkpoint and summary, the run is new or was killed before it first saved.
    saved = any((run_dir / name).exists() for name in ("checkpoint.npz", "summary.json"))
    state = load_checkpoint(run_dir, like) if saved else init(numbers)
    place = jax.jit(lambda state: state, out_shardings=placed)
    like, state = jax.eval_shape(place, like), place(state)
    done = jax.device_get(state.update)[0] >= args.num_updates
    if done and (run_dir / "summary.json").exists():
        raise UserError(f"{run_dir} is finished: a larger --total-timesteps continues it")
    # Tracing finds errors in the evaluation before the update is compiled.
    with jax.set_mesh(mesh):  # for `spread`
        traced = run_update.trace(numbers, like)
    run_evaluation.trace(numbers, like.params)
    if args.track:
        start_tracking(args, run_dir)
    with user_errors(f"{out_dir} cannot be written", OSError):
        out_dir.mkdir(parents=True, exist_ok=args.resume is not None)
    write_json(out_dir / "args.json", saved_flags(args))
    (out_dir / "summary.json").unlink(missing_ok=True)
    if not jax.config.jax_disable_jit:  # JAX_DISABLE_JIT is for debugging
        run_update = traced.lower().compile()
    return state, functools.partial(run_update, numbers), functools.partial(run_evaluation, numbers)


def run_updates(args, logger, state, run_update, run_evaluation):
    """Trains until the last update, a signal, or the failure of all seeds.

    Evaluates and saves in between; returns (state, updates done, signal or 0).
    """
    done, stop = logger.first_update, 0
    with stop_signals() as signals:
        while done < args.num_updates and not stop and not logger.failed.all():
            state, metrics = run_update(state)  # asynchronous
            done += 1
            logger.log(done, metrics)
            if not args.distributed or done % args.log_interval == 0:
                stop = agree_on_signal(signals)
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
        stop = agree_on_signal(signals)
    return state, done, stop


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
        "args": saved_flags(args),
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
    if args.list_envs:
        return print_envs()
    if args.distributed:
        args = join_processes(args)  # before anything else that JAX does
    env = make_env(args)
    if args.episodes_per_trial > 1 and not isinstance(env, Trials):
        raise UserError("--episodes-per-trial: `make_env` does not return `Trials`")
    use_compilation_cache()
    if args.eval is not None:
        return evaluate_run(args)
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{begin:.0f}_{os.urandom(3).hex()}"
    new_dir = pathlib.Path(args.runs_dir, re.sub(r"[^\w.-]", "-", name))
    run_dir = out_dir = new_dir if args.resume is None else pathlib.Path(args.resume)
    if jax.process_index() > 0:  # the first process writes
        scratch = tempfile.TemporaryDirectory()
        out_dir = pathlib.Path(scratch.name, "run")

    start = time.perf_counter()
    state, run_update, run_evaluation = start_run(args, run_dir, out_dir)
    done = int(jax.device_get(state.update)[0])
    compile_seconds = time.perf_counter() - start
    print(f"{run_dir}: compiled in {compile_seconds:.1f} s", flush=True)
    with contextlib.closing(Logger(args, out_dir, done)) as logger:
        state, done, stop = run_updates(args, logger, state, run_update, run_evaluation)
        if logger.failed.all():
            raise UserError(f"all seeds have failed: NaN in {logger.cause}")
        save_checkpoint(out_dir, state)
        if stop:
            print(f"interrupted at update {done}; to resume: --resume {run_dir}")
            sys.exit(128 + stop)
        evaluation = run_evaluation(state.params)
        finish_run(args, logger, done, evaluation, begin, compile_seconds)
    try_video(args, evaluation, run_dir, f"step_{done * args.batch_size}")


# ==================================================================================================
# Catalogue: levels, end rules, ids and drawing
# ==================================================================================================

# --- End rules, in addition to goal and lava; in Memory TOGGLE replaces the action PICKUP ---


def memory_end(env, before, action, after):
    """Success: the agent is next to the matching object. Failure: next to the other one."""
    matching, other = after.marks
    return after.position == matching, after.position == other


def door_end(env, before, action, after):
    """Success: the marked door is open after a toggle."""
    is_open = kind_of(at(after.grid, after.marks[0])) == DOOR_OPEN
    return (action == TOGGLE) & is_open, jnp.bool_(False)


def take_box_end(env, before, action, after):
    """Success: the agent picked up the box, the only one of the level."""
    return (action == PICKUP) & (kind_of(after.carrying) == BOX), jnp.bool_(False)


def take_ball_end(env, before, action, after):
    """Success: the agent picked up the ball, the only one in KeyCorridor."""
    return (action == PICKUP) & (kind_of(after.carrying) == BALL), jnp.bool_(False)


def take_blue_ball_end(env, before, action, after):
    """Success: the agent picked up the blue ball, the only blue one in ObstructedMaze."""
    return (action == PICKUP) & (after.carrying == BLUE_BALL), jnp.bool_(False)


def red_blue_end(env, before, action, after):
    """Success: red door open, then blue. Failure: blue first, or blue closed while red is open."""
    red_was_open, blue_was_open = kind_of(at(before.grid, before.marks)) == DOOR_OPEN
    red_is_open, blue_is_open = kind_of(at(after.grid, before.marks)) == DOOR_OPEN
    success = blue_is_open & red_was_open
    blue_first = blue_is_open & ~red_was_open
    blue_shut = ~blue_is_open & blue_was_open & red_is_open
    return success, blue_first | blue_shut


def fetch_end(env, before, action, after):
    """Success: the agent holds the object of the mission. Failure: it holds another one."""
    _, colour, thing = after.mission
    holds_right = after.carrying == named(colour, thing)
    return holds_right, (after.carrying != EMPTY) & ~holds_right


def go_to_end(env, before, action, after):
    """Success: done next to the marked cell. Failure: done elsewhere, or any toggle."""
    distance = jnp.abs(after.position - after.marks[0])
    # A distance of 1 could also join two rows, but the agent is never in the outer columns.
    is_beside = (distance == 1) | (distance == env.width)
    is_done = action == DONE
    return is_done & is_beside, (is_done & ~is_beside) | (action == TOGGLE)


def put_near_end(env, before, action, after):
    """Success: the agent drops its object next to the mark, the target's initial cell.

    Failure: it drops the object elsewhere, cannot drop it, or picks up an object that the mission
    does not name first.
    """
    colour, thing, _, _ = after.mission
    takes_wrong = (after.carrying != EMPTY) & (after.carrying != named(colour, thing))
    tries_to_drop = (action == DROP) & (before.carrying != EMPTY)
    front, near = env.front(after), after.marks[0]
    distance_x = jnp.abs(front % env.width - near % env.width)
    distance_y = jnp.abs(front // env.width - near // env.width)
    is_near = (distance_x <= 1) & (distance_y <= 1)
    success = tries_to_drop & (after.carrying == EMPTY) & is_near
    return success, (tries_to_drop & ~success) | ((action == PICKUP) & takes_wrong)


# --- Level generators: (env, draw: `Uniforms`) -> `Level` ---


def below(uniform, n):
    """A random integer below n from a uniform number in [0, 1)."""
    return (uniform * n).astype(jnp.int32)


def several_below(uniform, *sizes):
    """Independent random integers below `sizes`; their product must be far below 2^23."""
    rest = below(uniform, math.prod(sizes))
    digits = []
    for size in sizes:
        digits.append(rest % size)
        rest = rest // size
    return digits


def random_colours(uniform):
    """The six colors [6] in random order."""
    orders = np.array(list(itertools.permutations(range(6))), np.int32)  # [720, 6]
    return at(orders, below(uniform, len(orders)))


def pick(uniform, allowed):
    """Index of a random true entry of `allowed` [n]; n if there is none."""
    rank = jnp.cumsum(allowed.astype(jnp.int32))
    return (rank <= below(uniform, rank[-1])).sum(dtype=jnp.int32)


def random_cell(uniform, grid, region=True, taken=-1):
    """A random empty cell of a region (bool [G]), not `taken`; if none, G, which `put` ignores."""
    # Farama tries cells until one fits, which gives the same distribution.
    return pick(uniform, (grid == EMPTY) & region & (np.arange(grid.size) != taken))


def random_agent(env, uniform, grid, region):
    """A random (cell, direction) in a region; empty or wall ahead, as in Farama's RoomGrid."""
    allowed = []
    for ahead in (1, env.width, -1, -env.width):  # by direction
        front = jnp.roll(grid, -ahead)
        allowed.append((grid == EMPTY) & region & ((front == EMPTY) | (front == GREY_WALL)))
    choice = pick(uniform, jnp.concatenate(allowed))
    return choice % grid.size, choice // grid.size


def coordinates(env):
    """x and y of every cell, NumPy arrays [G] int32."""
    y, x = np.indices((env.height, env.width), np.int32)
    return x.ravel(), y.ravel()


def make_room(env, filled=False, filling=GREY_WALL):
    """A grid [G] with outer walls, and `filling` in the cells where `filled` [G] is true."""
    x, y = coordinates(env)
    is_border = (x == 0) | (y == 0) | (x == env.width - 1) | (y == env.height - 1)
    grid = jnp.where(filled, jnp.uint8(filling), jnp.uint8(EMPTY))
    return jnp.where(is_border, jnp.uint8(GREY_WALL), grid)


def put_goal(env, grid):
    """The grid with the goal in its bottom right corner."""
    return put(grid, (env.height - 2) * env.width + env.width - 2, GREEN_GOAL)


def empty_level(env, draw, random_start=False):
    """A room with the goal at the bottom right, and obstacles in random free cells."""
    for_agent, for_direction = draw(2)
    grid = put_goal(env, make_room(env))
    position, direction = env.width + 1, 0
    if random_start:
        position, direction = random_cell(for_agent, grid), below(for_direction, 4)
    obstacles = []
    for uniform in draw(env.num_obstacles):
        obstacle = random_cell(uniform, grid, taken=position)
        grid = put(grid, obstacle, BLUE_BALL)
        obstacles.append(obstacle)
    return Level(grid, position, direction, marks=tuple(obstacles))


def door_key_level(env, draw):
    """A wall with a locked door; agent and key on its left, the goal at the bottom right."""
    for_wall, for_door, for_agent, for_key, for_direction = draw(5)
    x, _ = coordinates(env)
    wall = 2 + below(for_wall, env.width - 4)
    door = (1 + below(for_door, env.height - 3)) * env.width + wall
    grid = put_goal(env, make_room(env, x == wall))
    grid = put(grid, door, DOOR_LOCKED + YELLOW)
    position = random_cell(for_agent, grid, x < wall)
    key = random_cell(for_key, grid, x < wall, taken=position)
    grid = put(grid, key, KEY + YELLOW)
    return Level(grid, position, below(for_direction, 4))


def four_rooms_level(env, draw):
    """Four rooms, a gap in each wall; agent and goal in random cells, gaps included."""
    for_upper, for_lower, for_left, for_right, for_agent, for_goal, for_direction = draw(7)
    x, y = coordinates(env)
    middle = env.width // 2
    gaps = [
        (1 + below(for_upper, middle - 1)) * env.width + middle,
        (1 + below(for_lower, middle - 1) + middle) * env.width + middle,
        middle * env.width + 1 + below(for_left, middle - 1),
        middle * env.width + 1 + below(for_right, middle - 1) + middle,
    ]
    grid = make_room(env, (x == middle) | (y == middle))
    grid = put(grid, jnp.stack(gaps), EMPTY)
    position = random_cell(for_agent, grid)
    grid = put(grid, random_cell(for_goal, grid, taken=position), GREEN_GOAL)
    return Level(grid, position, below(for_direction, 4))


def lava_gap_level(env, draw):
    """A wall of lava with a gap, between agent (top left) and goal (bottom right)."""
    for_x, for_y = draw(2)
    x, y = coordinates(env)
    gap_x = 2 + below(for_x, env.width - 4)
    gap_y = 1 + below(for_y, env.height - 2)
    grid = make_room(env, (x == gap_x) & (y != gap_y), RED_LAVA)
    return Level(put_goal(env, grid), position=env.width + 1, direction=0)


def dist_shift_level(env, draw, second_row):
    """Two strips of lava, one at the top and one in `second_row`; nothing is random."""
    x, y = coordinates(env)
    is_strip = (x >= 3) & (x < env.width - 3) & ((y == 1) | (y == second_row))
    grid = make_room(env, is_strip, RED_LAVA)
    grid = put(grid, env.width + env.width - 2, GREEN_GOAL)  # top right
    return Level(grid, position=env.width + 1, direction=0)


def crossing_level(env, draw, num_crossings, obstacle):
    """Rivers of lava or wall, in even rows and columns; a random path to the goal has openings."""
    for_river, for_order, for_opening = draw(3, num_crossings)
    x, y = coordinates(env)
    lines = np.arange(2, env.width - 2, 2)  # possible places of rivers, in columns and in rows
    chosen = np.zeros(2 * len(lines), bool)
    for uniform in for_river:
        river = pick(uniform, ~chosen)
        chosen = chosen | (np.arange(2 * len(lines)) == river)
    columns, rows = chosen[: len(lines)], chosen[len(lines) :]
    in_column = (columns[None] & (x[:, None] == lines)).any(1)
    in_row = (rows[None] & (y[:, None] == lines)).any(1)
    grid = put_goal(env, make_room(env, in_column | in_row, obstacle))

    room_x, room_y = jnp.int32(0), jnp.int32(0)  # rivers left of and above the room
    for order, where in zip(for_order, for_opening, strict=True):
        columns_ahead = columns & (lines > room_x)  # not yet crossed
        rows_ahead = rows & (lines > room_y)
        next_x = jnp.where(columns_ahead, lines, env.width - 1).min()
        next_y = jnp.where(rows_ahead, lines, env.width - 1).min()
        # All orders of crossing have the same probability: each river ahead may be next.
        num_ahead = columns_ahead.sum() + rows_ahead.sum()
        crosses_column = order * num_ahead < columns_ahead.sum()
        between_x = room_x + 1 + below(where, next_x - room_x - 1)
        between_y = room_y + 1 + below(where, next_y - room_y - 1)
        opening_x = jnp.where(crosses_column, next_x, between_x)
        opening_y = jnp.where(crosses_column, between_y, next_y)
        grid = put(grid, opening_y * env.width + opening_x, EMPTY)
        room_x = jnp.where(crosses_column, next_x, room_x)
        room_y = jnp.where(crosses_column, room_y, next_y)
    return Level(grid, position=env.width + 1, direction=0)


def memory_level(env, draw, random_length=False):
    """Go to the object shown in the start room. Marks: next to this one, next to the other."""
    for_length, for_object, for_side, for_agent = draw(4)
    x, y = coordinates(env)
    middle = env.height // 2
    end = env.width - 3  # of the hallway
    if random_length:
        end = 4 + below(for_length, env.width - 6)
    away = abs(y - middle)
    is_room = (x <= 4) & (away == 2)
    is_hallway = (x >= 4) & (x < end) & (away == 1)
    is_junction = (x == end) & (away > 0) | (x == end + 2)
    grid = make_room(env, is_room | is_hallway | is_junction)

    is_key = for_object < 0.5
    matching = jnp.where(is_key, KEY + GREEN, BALL + GREEN)
    other = jnp.where(is_key, BALL + GREEN, KEY + GREEN)
    junction = middle * env.width + end + 1
    towards_matching = jnp.where(for_side < 0.5, -env.width, env.width)  # up or down
    grid = put(grid, (middle - 1) * env.width + 1, matching)
    grid = put(grid, junction + 2 * towards_matching, matching)
    grid = put(grid, junction - 2 * towards_matching, other)
    position = middle * env.width + 1 + below(for_agent, end)
    marks = junction + towards_matching, junction - towards_matching
    return Level(grid, position, direction=0, marks=marks)


def two_rooms(env, for_door, for_colour, for_key, for_behind, for_agent, key, before, behind):
    """Agent, key, a locked door with `before` in front, `behind` in the next room. Mark: door."""
    x, y = coordinates(env)
    wall = 5
    door = (1 + below(for_door, 4)) * env.width + wall
    colour = below(for_colour, 6)
    grid = put(make_room(env, x == wall), door, DOOR_LOCKED + colour)
    grid = put(grid, door - 1, before)
    grid = put(grid, random_cell(for_key, grid, x < wall), key + colour)
    # Not at or next to the middle of the right room, where Farama's RoomGrid first has the agent.
    is_far = (x > wall) & (abs(x - 8) + abs(y - 3) > 1)
    grid = put(grid, random_cell(for_behind, grid, is_far), behind)
    position, direction = random_agent(env, for_agent, grid, x < wall)
    return Level(grid, position, direction, marks=(door,))


def unlock_level(env, draw, box=False, ball=False):
    """`two_rooms`, optionally with a box in the right room and a ball before the door."""
    for_door, for_colour, for_box, for_box_colour, for_ball, for_key, for_agent = draw(7)
    uniforms = for_door, for_colour, for_key, for_box, for_agent
    box_colour = below(for_box_colour, 6)
    before = BALL + below(for_ball, 6) if ball else EMPTY
    if not box:
        return two_rooms(env, *uniforms, key=KEY, before=before, behind=EMPTY)
    level = two_rooms(env, *uniforms, key=KEY, before=before, behind=BOX + box_colour)
    return level._replace(mission=(box_colour,))


def obstructed_pair_level(env, draw, hidden, blocked=False):
    """`two_rooms`, a blue ball on the right; the key may be hidden, the door blocked."""
    key, before = KEY_BOX if hidden else KEY, BALL + GREEN if blocked else EMPTY
    level = two_rooms(env, *draw(5), key=key, before=before, behind=BLUE_BALL)
    return level._replace(marks=())


def red_blue_doors_level(env, draw):
    """A room with a red door in its left, a blue one in its right wall. Marks: both."""
    for_red, for_blue, for_agent, for_direction = draw(4)
    x, _ = coordinates(env)
    left = env.height // 2
    right = left + env.height - 1
    red = (1 + below(for_red, env.height - 2)) * env.width + left
    blue = (1 + below(for_blue, env.height - 2)) * env.width + right
    grid = make_room(env, (x == left) | (x == right))
    position = random_cell(for_agent, grid, (x > left) & (x < right))
    grid = put(grid, red, DOOR_CLOSED + RED)
    grid = put(grid, blue, DOOR_CLOSED + BLUE)
    return Level(grid, position, below(for_direction, 4), marks=(red, blue))


def key_corridor_level(env, draw):
    """Rooms along a hallway: a key in a left one, a ball in a locked one on the right.

    Farama's `connect_all` adds doors in random order until every room is reachable. Equivalently,
    each possible door gets a random opening time; doors open until the last room becomes reachable.
    """
    for_lock, for_key, for_key_colour, for_ball, for_agent = draw(5)
    x, y = coordinates(env)
    pitch = (env.width - 1) // 3  # from one wall to the next
    inside = pitch - 1  # cells between walls
    num_rows = (env.height - 1) // pitch
    row = np.arange(num_rows)
    is_hallway = (x > pitch) & (x < 2 * pitch)
    grid = make_room(env, (x % pitch == 0) | ((y % pitch == 0) & ~is_hallway))

    # --- Possible doors [rows, 4]: left and right room to the hallway, left and right downwards ---
    open_time, for_door = draw(2, num_rows, 4)
    door_colour, door_place = several_below(for_door, 6, inside)
    along = door_place + 1  # from the corner of the room
    sideways_cells = (pitch * row[:, None] + along[:, :2]) * env.width + np.array([[1, 2]]) * pitch
    down_cells = pitch * (row[:, None] + 1) * env.width + np.array([[0, 2]]) * pitch + along[:, 2:]
    door_cells = jnp.concatenate([sideways_cells, down_cells], axis=1)

    locked_row = below(for_lock, num_rows)
    colour = below(for_key_colour, 6)
    ball_colour, ball_x, ball_y = several_below(for_ball, 6, inside, inside)
    key_row, key_x, key_y = several_below(for_key, num_rows, inside, inside)
    grid = put(grid, at(door_cells[:, 1], locked_row), DOOR_LOCKED + colour)
    ball = (pitch * locked_row + 1 + ball_y) * env.width + 2 * pitch + 1 + ball_x
    grid = put(grid, ball, BALL + ball_colour)
    key = (pitch * key_row + 1 + key_y) * env.width + 1 + key_x
    grid = put(grid, key, KEY + colour)
    top = pitch * (num_rows // 2)  # of the agent's room; walls above and below it are removed
    is_start = is_hallway & (y >= top) & (y <= top + pitch)
    position, direction = random_agent(env, for_agent, grid, is_start)

    is_bottom = row == num_rows - 1
    is_locked = row == locked_row
    is_above_locked = row + 1 == locked_row
    never = [row < 0, is_locked, is_bottom, is_bottom | is_locked | is_above_locked]
    open_time = jnp.where(jnp.stack(never, axis=1), jnp.inf, open_time)

    # --- Every group of adjacent rooms in a column needs an exit: sideways, up or down ---
    sideways, down = open_time[:, :2], open_time[:, 2:]  # [rows, 2], left and right column
    up = jnp.roll(down, 1, axis=0)  # the last row has no door down, so the first has none up
    last_time = jnp.float32(0)
    for first in range(num_rows):
        for last in range(first, num_rows):
            way_out = sideways[first : last + 1].min(0)
            way_out = jnp.minimum(way_out, jnp.minimum(up[first], down[last]))
            # Infinite only for the locked room, whose exit is the locked door.
            way_out = jnp.where(jnp.isinf(way_out), 0, way_out)
            last_time = jnp.maximum(last_time, way_out.max())
    is_open = open_time <= last_time

    doors = jnp.uint8(DOOR_CLOSED) + door_colour.astype(jnp.uint8)
    grid = grid.at[door_cells].set(jnp.where(is_open, doors, at(grid, door_cells)))
    return Level(grid, position, direction, mission=(ball_colour,))


def locked_room_level(env, draw):
    """Three rooms on each side of a hallway; a locked one has the goal, another its key."""
    for_locked, for_key, for_goal_cell, for_key_cell, for_colours = draw(5)
    for_agent, for_direction = draw(2)
    x, y = coordinates(env)
    left, right = env.width // 2 - 2, env.width // 2 + 2  # the hallway's walls
    pitch = env.height // 3
    is_hallway = (x > left) & (x < right)
    grid = make_room(env, (x == left) | (x == right) | ((y % pitch == 0) & ~is_hallway))

    room = np.arange(6)  # row by row
    room_left, room_top = room % 2 * right, room // 2 * pitch
    locked_room = below(for_locked, 6)
    key_room = (locked_room + 1 + below(for_key, 5)) % 6

    def random_place(uniform, number):
        place_x, place_y = several_below(uniform, left - 1, pitch - 1)
        x, y = at(room_left, number) + 1 + place_x, at(room_top, number) + 1 + place_y
        return y * env.width + x

    colours = random_colours(for_colours)
    colour = at(colours, locked_room)
    doors = jnp.where(room == locked_room, DOOR_LOCKED, DOOR_CLOSED) + colours
    door_cells = (room_top + 3) * env.width + np.where(room % 2 == 0, left, right)
    grid = grid.at[door_cells].set(doors.astype(jnp.uint8))
    grid = put(grid, random_place(for_goal_cell, locked_room), GREEN_GOAL)
    grid = put(grid, random_place(for_key_cell, key_room), KEY + colour)
    position = random_cell(for_agent, grid, is_hallway)
    mission = colour, at(colours, key_room)
    return Level(grid, position, below(for_direction, 4), mission=mission)


def playground_level(env, draw):
    """Nine rooms, a door in each inner wall, twelve objects in random cells; no goal."""
    num_objects = 12
    for_agent, for_direction = draw(2)
    for_door = draw(2, 3, 2)
    for_object, for_cell = draw(2, num_objects)
    x, y = coordinates(env)
    pitch = env.width // 3
    grid = make_room(env, (x % pitch == 0) | (y % pitch == 0))

    # --- Doors [2, 3, 2]: vertical, then horizontal walls; room along the wall; which wall ---
    colour, place = several_below(for_door, 6, pitch - 2)  # none next to the last crossing
    along = pitch * np.arange(3)[None, :, None] + 1 + place
    across = pitch * np.array([[1, 2]])
    in_columns = along[0] * env.width + across
    in_rows = across * env.width + along[1]
    doors = (DOOR_CLOSED + colour).astype(jnp.uint8)
    grid = grid.at[jnp.stack([in_columns, in_rows])].set(doors)

    position = random_cell(for_agent, grid)
    colours, kinds = several_below(for_object, 6, 3)
    objects = KEY + 8 * kinds + colours
    for uniform, content in zip(for_cell, objects, strict=True):
        grid = put(grid, random_cell(uniform, grid, taken=position), content)
    return Level(grid, position, below(for_direction, 4))


def in_room(env, column, row, pitch):
    """The cells [G], bool, of a room in a grid of rooms, walls included."""
    x, y = coordinates(env)
    is_column = (x >= column * pitch) & (x <= (column + 1) * pitch)
    return is_column & (y >= row * pitch) & (y <= (row + 1) * pitch)


def obstructed_maze_level(
    env, draw, num_quarters, agent_room, hidden=True, blocked=True, keys_last=False
):
    """Nine rooms with a blue ball behind locked doors in one of `num_quarters` corners.

    Doors connect the middle room with as many side rooms. Each side room has two locked doors,
    maybe blocked by green balls, and contains the keys, maybe `hidden` in boxes. Without
    `keys_last` a ball may replace a key, as in Farama's -v0, and the level may be unsolvable.
    """
    for_colours, for_ball_corner, for_ball_place, for_agent = draw(4)
    for_middle_door = draw(num_quarters)
    for_side = draw(num_quarters, 2, 2)
    x, y = coordinates(env)
    pitch = 5
    grid = make_room(env, (x % pitch == 0) | (y % pitch == 0))
    colours = random_colours(for_colours)
    ahead = [1, env.width, -1, -env.width]  # by direction: right, down, left, up
    side_rooms = [(2, 1), (1, 2), (0, 1), (1, 0)]  # in these directions from the middle
    corners = np.array([(2, 0), (2, 2), (0, 2), (0, 0)])

    def door_cell(uniform, room, direction):
        """A random cell of one wall of a room."""
        left, top = room[0] * pitch, room[1] * pitch
        along = 1 + below(uniform, pitch - 1)
        if direction in (0, 2):
            return (top + along) * env.width + left + (pitch if direction == 0 else 0)
        return (top + (pitch if direction == 1 else 0)) * env.width + left + along

    def with_door(grid, uniform, i, turn):
        """Adds a locked door to side room i, `turn` quarter turns from its direction."""
        direction = (i + turn) % 4
        door = door_cell(uniform, side_rooms[i], direction)
        grid = put(grid, door, DOOR_LOCKED + colours[(i + turn) % 6])
        return put(grid, door - ahead[direction], BALL + GREEN) if blocked else grid

    def with_key(grid, uniform, i, turn):
        key = (KEY_BOX if hidden else KEY) + colours[(i + turn) % 6]
        return put(grid, random_cell(uniform, grid, in_room(env, *side_rooms[i], pitch)), key)

    for i in range(num_quarters):
        middle_door = door_cell(for_middle_door[i], (1, 1), i)
        grid = put(grid, middle_door, DOOR_CLOSED + colours[i])
        (first_door, first_key), (second_door, second_key) = for_side[i]
        grid = with_door(grid, first_door, i, turn=-1)
        if not keys_last:
            grid = with_key(grid, first_key, i, turn=-1)
        grid = with_door(grid, second_door, i, turn=1)
        if keys_last:
            grid = with_key(grid, first_key, i, turn=-1)
        grid = with_key(grid, second_key, i, turn=1)

    corner_x, corner_y = at(corners * pitch, below(for_ball_corner, num_quarters))
    place_x, place_y = several_below(for_ball_place, pitch - 1, pitch - 1)
    ball = (corner_y + 1 + place_y) * env.width + corner_x + 1 + place_x
    grid = put(grid, ball, BLUE_BALL)
    agent_cells = in_room(env, *agent_room, pitch)
    position, direction = random_agent(env, for_agent, grid, agent_cells)
    return Level(grid, position, direction)


class Rooms(NamedTuple):
    """Rectangles of rooms, walls included; integer arrays of one shape."""

    left: jax.Array
    top: jax.Array
    width: jax.Array
    height: jax.Array


def multi_room_level(env, draw, num_rooms, max_size, num_chains):
    """A chain of rooms of random sizes joined by doors; agent in the first, goal in the last.

    Farama adds rooms, each with up to eight tries, and restarts until the chain is complete. The
    first complete one of `num_chains` parallel chains has the same distribution. If none is
    complete, the longest one counts (probability below 4e-7 in `TABLE`).
    """
    num_tries = 8
    sizes = max_size - 3  # from 4 to `max_size`, walls included
    for_left, for_top = draw(2, num_chains)
    for_tries = draw(3, num_rooms - 1, num_chains, num_tries)
    for_agent, for_direction, for_goal = draw(3)
    for_doors = draw(num_rooms - 1)

    # --- The first rooms [chains]: uniform over all places and sizes that fit ---
    # Like Farama's check, this leaves the last row of the grid free.
    corner, size = np.arange(env.width - 2)[:, None], np.arange(4, max_size + 1)
    lefts, widths = np.nonzero(corner + size <= env.width)
    tops, heights = np.nonzero(corner + size < env.height)
    column, row = below(for_left, len(lefts)), below(for_top, len(tops))
    room = Rooms(
        left=at(lefts, column),
        top=at(tops, row),
        width=at(widths, column) + 4,
        height=at(heights, row) + 4,
    )

    # --- Another room: the first of eight tries [chains, 8] that fits ---
    # A scan: XLA takes minutes to compile five copies.
    def add_room(carry, inputs):
        room, entry_wall, is_whole, others = carry
        number, for_shape, for_door, for_place = inputs
        last = jax.tree.map(lambda side: side[:, None], room)
        more_width, more_height, turn = several_below(for_shape, sizes, sizes, 3)
        width, height = more_width + 4, more_height + 4
        exit_wall = (entry_wall[:, None] + 1 + turn) % 4  # never the entry
        is_right, is_bottom, is_left, is_top = (exit_wall == wall for wall in range(4))
        is_sideways = is_right | is_left
        door_x = last.left + 1 + below(for_door, last.width - 2)
        door_x = jnp.where(is_sideways, last.left + is_right * (last.width - 1), door_x)
        door_y = last.top + 1 + below(for_door, last.height - 2)
        door_y = jnp.where(is_sideways, door_y, last.top + is_bottom * (last.height - 1))
        left = door_x - 1 - below(for_place, width - 2)
        left = jnp.where(is_sideways, door_x - is_left * (width - 1), left)
        top = door_y - 1 - below(for_place, height - 2)
        top = jnp.where(is_sideways, top, door_y - is_top * (height - 1))

        # Does it fit? The last room needs no check: it is on the other side of the door.
        fits = (left >= 0) & (left + width <= env.width) & (top >= 0) & (top + height < env.height)
        other = jax.tree.map(lambda side: side[:, :, None], others)  # [rooms, chains, 1]
        is_apart = ((left + width)[None] < other.left) | (other.left + other.width <= left[None])
        is_apart |= ((top + height)[None] < other.top) | (other.top + other.height <= top[None])
        fits &= is_apart.all(0)
        is_chosen = fits & (jnp.cumsum(fits, axis=1) == 1)

        def chosen(values):
            return jnp.where(is_chosen, values, 0).sum(1)  # [chains]

        others = jax.tree.map(lambda sides, side: sides.at[number].set(side), others, room)
        room = Rooms(chosen(left), chosen(top), chosen(width), chosen(height))
        is_whole &= fits.any(1)
        carry = room, chosen((exit_wall + 2) % 4), is_whole, others
        return carry, (room, chosen(door_y * env.width + door_x), is_whole)

    nowhere = jnp.full((num_rooms - 1, num_chains), 2 * env.width)  # apart from all rooms
    entry_wall = jnp.full(num_chains, 2)  # walls are 0 right, 1 bottom, 2 left, 3 top
    no_others = Rooms(left=nowhere, top=nowhere, width=nowhere, height=nowhere)
    carry = room, entry_wall, jnp.ones(num_chains, bool), no_others
    number = jnp.arange(num_rooms - 1)
    _, (rooms, doors, is_whole) = jax.lax.scan(add_room, carry, (number, *for_tries))

    chain = is_whole.sum(0).argmax()  # the longest
    length = 1 + is_whole[:, chain].sum()
    rooms = jax.tree.map(
        lambda first, more: jnp.append(first[chain], more[:, chain])[:, None], room, rooms
    )  # [rooms, 1]
    right, bottom = rooms.left + rooms.width - 1, rooms.top + rooms.height - 1
    x, y = (places[None] for places in coordinates(env))  # [1, G]
    is_in_room = (x >= rooms.left) & (x <= right) & (y >= rooms.top) & (y <= bottom)  # [rooms, G]
    is_inside = (x > rooms.left) & (x < right) & (y > rooms.top) & (y < bottom)
    is_wall = is_in_room & ~is_inside & (np.arange(num_rooms)[:, None] < length)
    grid = jnp.where(is_wall.any(0), jnp.uint8(GREY_WALL), jnp.uint8(EMPTY))
    for number, (door, uniform) in enumerate(zip(doors[:, chain], for_doors, strict=True)):
        if number == 0:
            colour = below(uniform, 6)
        else:
            colour = (colour + 1 + below(uniform, 5)) % 6  # not the color of the previous door
        with_door = put(grid, door, DOOR_CLOSED + colour)
        grid = jnp.where(number + 1 < length, with_door, grid)

    position = random_cell(for_agent, grid, is_inside[0])
    goal = random_cell(for_goal, grid, at(is_inside, length - 1), taken=position)
    grid = put(grid, goal, GREEN_GOAL)
    return Level(grid, position, below(for_direction, 4))


def fetch_level(env, draw, num_objects):
    """Keys and balls; the mission names one of them (an identical one also counts)."""
    for_agent, for_direction, for_target, for_verb = draw(4)
    for_object, for_cell = draw(2, num_objects)
    colours, kinds = several_below(for_object, 6, 2)
    objects = KEY + 8 * kinds + colours
    grid = make_room(env)
    for uniform, content in zip(for_cell, objects, strict=True):
        grid = put(grid, random_cell(uniform, grid), content)
    position = random_cell(for_agent, grid)
    target = at(objects, below(for_target, num_objects))
    verb = WORDS.index(VERB_WORDS[0]) + below(for_verb, len(VERB_WORDS))
    mission = verb, *words_of(target)
    return Level(grid, position, below(for_direction, 4), mission=mission)


def go_to_door_level(env, draw):
    """A room of random size, four doors of different colors. Mark: the mission's door."""
    for_size, for_upper, for_lower, for_left, for_right, for_colours = draw(6)
    for_agent, for_direction, for_target = draw(3)
    x, y = coordinates(env)
    more_width, more_height = several_below(for_size, env.width - 4, env.height - 4)
    width, height = more_width + 5, more_height + 5
    is_in_room = (x < width) & (y < height)
    is_border = (x == 0) | (y == 0) | (x == width - 1) | (y == height - 1)
    grid = jnp.where(is_in_room & is_border, jnp.uint8(GREY_WALL), jnp.uint8(EMPTY))

    doors = [
        2 + below(for_upper, width - 4),
        (height - 1) * env.width + 2 + below(for_lower, width - 4),
        (2 + below(for_left, height - 4)) * env.width,
        (2 + below(for_right, height - 4)) * env.width + width - 1,
    ]
    colours = random_colours(for_colours)[: len(doors)]
    for door, colour in zip(doors, colours, strict=True):
        grid = put(grid, door, DOOR_CLOSED + colour)
    position = random_cell(for_agent, grid, is_in_room)
    target = below(for_target, len(doors))
    mark, colour = at(jnp.stack(doors), target), at(colours, target)
    return Level(grid, position, below(for_direction, 4), marks=(mark,), mission=(colour,))


def different_objects(env, draw, grid, num_objects, apart=False):
    """Places objects, all different, with `apart` no neighbors: (grid, objects, their cells)."""
    x, y = coordinates(env)
    numbers = np.arange(3 * 6)
    is_unused, is_apart = np.ones(3 * 6, bool), True
    objects, cells = [], []
    for for_object, for_cell in draw(num_objects, 2):
        number = pick(for_object, is_unused)
        cell = random_cell(for_cell, grid, is_apart)
        is_unused = is_unused & (numbers != number)
        if apart:
            is_far = (abs(x - cell % env.width) > 1) | (abs(y - cell // env.width) > 1)
            is_apart = is_apart & is_far
        objects.append(KEY + 8 * (number // 6) + number % 6)
        cells.append(cell)
        grid = put(grid, cell, objects[-1])
    return grid, jnp.stack(objects), jnp.stack(cells)


def go_to_object_level(env, draw, num_objects):
    """Objects, one of which the mission names. Mark: its cell."""
    for_agent, for_direction, for_target = draw(3)
    grid, objects, cells = different_objects(env, draw, make_room(env), num_objects)
    position = random_cell(for_agent, grid)
    target = below(for_target, num_objects)
    mission = words_of(at(objects, target))
    mark = at(cells, target)
    return Level(grid, position, below(for_direction, 4), marks=(mark,), mission=mission)


def put_near_level(env, draw, num_objects):
    """Objects apart from each other; one is to be put near another. Mark: the latter's cell."""
    for_agent, for_direction, for_moved, for_target = draw(4)
    grid = make_room(env)
    grid, objects, cells = different_objects(env, draw, grid, num_objects, apart=True)
    position = random_cell(for_agent, grid)
    moved = below(for_moved, num_objects)
    target = (moved + 1 + below(for_target, num_objects - 1)) % num_objects
    mission = *words_of(at(objects, moved)), *words_of(at(objects, target))
    mark = at(cells, target)
    return Level(grid, position, below(for_direction, 4), marks=(mark,), mission=mission)


# --- The ids ---

variant = functools.partial  # a level generator with some options set

RANDOM_EMPTY = variant(empty_level, random_start=True)
LAVA_CROSSING = variant(crossing_level, obstacle=RED_LAVA)
WALL_CROSSING = variant(crossing_level, obstacle=GREY_WALL)
RANDOM_MEMORY = variant(memory_level, random_length=True)
BOX_BEHIND = variant(unlock_level, box=True)
BALL_BEFORE = variant(unlock_level, box=True, ball=True)
TWO_ROOMS = variant(multi_room_level, num_rooms=2, max_size=4, num_chains=3)
FOUR_SMALL_ROOMS = variant(multi_room_level, num_rooms=4, max_size=5, num_chains=10)
SIX_SMALL_ROOMS = variant(multi_room_level, num_rooms=6, max_size=5, num_chains=16)
SIX_LARGE_ROOMS = variant(multi_room_level, num_rooms=6, max_size=10, num_chains=40)
ONE_DOOR = variant(obstructed_pair_level, hidden=False)
ONE_DOOR_HIDDEN = variant(obstructed_pair_level, hidden=True)
ONE_DOOR_BLOCKED = variant(obstructed_pair_level, hidden=True, blocked=True)
TWO_DOORS_BLOCKED = variant(obstructed_maze_level, num_quarters=1, agent_room=(2, 1))
TWO_DOORS_HIDDEN = variant(TWO_DOORS_BLOCKED, blocked=False)
TWO_DOORS = variant(TWO_DOORS_HIDDEN, hidden=False)
ONE_QUARTER = variant(obstructed_maze_level, num_quarters=1, agent_room=(1, 1))
TWO_QUARTERS = variant(obstructed_maze_level, num_quarters=2, agent_room=(2, 1))
FOUR_QUARTERS = variant(obstructed_maze_level, num_quarters=4, agent_room=(1, 1))

OPEN = {"see_through_walls": True}
USE_KEY = {"sentence": "use the key to open the door and then get to the goal"}
ANY_GOAL = {"sentence": "reach the goal"}
AVOID_LAVA = {"sentence": "avoid the lava and get to the green goal square"}
FIND_OPENING = {"sentence": "find the opening and get to the green goal square"}
MEMORY = {
    "end_rule": memory_end,
    "can_pick_up": False,
    "sentence": "go to the matching object at the end of the hallway",
}
UNLOCK = {"end_rule": door_end, "sentence": "open the door"}
TAKE_BOX = {"end_rule": take_box_end, "sentence": "pick up the {} box"}
TAKE_BALL = {"end_rule": take_ball_end, "sentence": "pick up the {} ball"}
TAKE_BLUE = {"end_rule": take_blue_ball_end, "sentence": "pick up the blue ball"}
RED_BLUE = {"end_rule": red_blue_end, "sentence": "open the red door then the blue door"}
LOCKED_ROOM = {
    "sentence": "get the {0} key from the {1} room, unlock the {0} door and go to the goal"
}
ROOMS = {"sentence": "traverse the rooms to get to the goal"}
PLAY = {"sentence": ""}
MISSION = {"observes_mission": True, "see_through_walls": True}
FETCH = MISSION | {"end_rule": fetch_end, "sentence": "{} {} {}"}
GO_TO_DOOR = MISSION | {"end_rule": go_to_end, "sentence": "go to the {} door"}
GO_TO_OBJECT = MISSION | {"end_rule": go_to_end, "sentence": "go to the {} {}"}
PUT_NEAR = MISSION | {"end_rule": put_near_end, "sentence": "put the {} {} near the {} {}"}


def moving(num_obstacles):
    """Fields of a `MiniGrid` with moving obstacles."""
    return OPEN | {"num_obstacles": num_obstacles, "num_actions": 3}


TABLE = [
    # name, width, height, time limit, level generator, other fields of `MiniGrid`
    ("Empty-5x5-v0", 5, 5, 100, empty_level, OPEN),
    ("Empty-6x6-v0", 6, 6, 144, empty_level, OPEN),
    ("Empty-8x8-v0", 8, 8, 256, empty_level, OPEN),
    ("Empty-16x16-v0", 16, 16, 1024, empty_level, OPEN),
    ("Empty-Random-5x5-v0", 5, 5, 100, RANDOM_EMPTY, OPEN),
    ("Empty-Random-6x6-v0", 6, 6, 144, RANDOM_EMPTY, OPEN),
    ("Dynamic-Obstacles-5x5-v0", 5, 5, 100, empty_level, moving(2)),
    ("Dynamic-Obstacles-6x6-v0", 6, 6, 144, empty_level, moving(3)),
    ("Dynamic-Obstacles-8x8-v0", 8, 8, 256, empty_level, moving(4)),
    ("Dynamic-Obstacles-16x16-v0", 16, 16, 1024, empty_level, moving(8)),
    ("Dynamic-Obstacles-Random-5x5-v0", 5, 5, 100, RANDOM_EMPTY, moving(2)),
    ("Dynamic-Obstacles-Random-6x6-v0", 6, 6, 144, RANDOM_EMPTY, moving(3)),
    ("DoorKey-5x5-v0", 5, 5, 250, door_key_level, USE_KEY),
    ("DoorKey-6x6-v0", 6, 6, 360, door_key_level, USE_KEY),
    ("DoorKey-8x8-v0", 8, 8, 640, door_key_level, USE_KEY),
    ("DoorKey-16x16-v0", 16, 16, 2560, door_key_level, USE_KEY),
    ("FourRooms-v0", 19, 19, 100, four_rooms_level, ANY_GOAL),
    ("LavaGapS5-v0", 5, 5, 100, lava_gap_level, AVOID_LAVA),
    ("LavaGapS6-v0", 6, 6, 144, lava_gap_level, AVOID_LAVA),
    ("LavaGapS7-v0", 7, 7, 196, lava_gap_level, AVOID_LAVA),
    ("DistShift1-v0", 9, 7, 252, variant(dist_shift_level, second_row=2), OPEN),
    ("DistShift2-v0", 9, 7, 252, variant(dist_shift_level, second_row=5), OPEN),
    ("LavaCrossingS9N1-v0", 9, 9, 324, variant(LAVA_CROSSING, num_crossings=1), AVOID_LAVA),
    ("LavaCrossingS9N2-v0", 9, 9, 324, variant(LAVA_CROSSING, num_crossings=2), AVOID_LAVA),
    ("LavaCrossingS9N3-v0", 9, 9, 324, variant(LAVA_CROSSING, num_crossings=3), AVOID_LAVA),
    ("LavaCrossingS11N5-v0", 11, 11, 484, variant(LAVA_CROSSING, num_crossings=5), AVOID_LAVA),
    ("SimpleCrossingS9N1-v0", 9, 9, 324, variant(WALL_CROSSING, num_crossings=1), FIND_OPENING),
    ("SimpleCrossingS9N2-v0", 9, 9, 324, variant(WALL_CROSSING, num_crossings=2), FIND_OPENING),
    ("SimpleCrossingS9N3-v0", 9, 9, 324, variant(WALL_CROSSING, num_crossings=3), FIND_OPENING),
    ("SimpleCrossingS11N5-v0", 11, 11, 484, variant(WALL_CROSSING, num_crossings=5), FIND_OPENING),
    ("MemoryS7-v0", 7, 7, 245, memory_level, MEMORY),
    ("MemoryS9-v0", 9, 9, 405, memory_level, MEMORY),
    ("MemoryS11-v0", 11, 11, 605, memory_level, MEMORY),
    ("MemoryS13-v0", 13, 13, 845, memory_level, MEMORY),
    ("MemoryS13Random-v0", 13, 13, 845, RANDOM_MEMORY, MEMORY),
    ("MemoryS17Random-v0", 17, 17, 1445, RANDOM_MEMORY, MEMORY),
    ("Unlock-v0", 11, 6, 288, unlock_level, UNLOCK),
    ("UnlockPickup-v0", 11, 6, 288, BOX_BEHIND, TAKE_BOX),
    ("BlockedUnlockPickup-v0", 11, 6, 576, BALL_BEFORE, TAKE_BOX),
    ("RedBlueDoors-6x6-v0", 12, 6, 720, red_blue_doors_level, RED_BLUE),
    ("RedBlueDoors-8x8-v0", 16, 8, 1280, red_blue_doors_level, RED_BLUE),
    ("KeyCorridorS3R1-v0", 7, 3, 270, key_corridor_level, TAKE_BALL),
    ("KeyCorridorS3R2-v0", 7, 5, 270, key_corridor_level, TAKE_BALL),
    ("KeyCorridorS3R3-v0", 7, 7, 270, key_corridor_level, TAKE_BALL),
    ("KeyCorridorS4R3-v0", 10, 10, 480, key_corridor_level, TAKE_BALL),
    ("KeyCorridorS5R3-v0", 13, 13, 750, key_corridor_level, TAKE_BALL),
    ("KeyCorridorS6R3-v0", 16, 16, 1080, key_corridor_level, TAKE_BALL),
    ("LockedRoom-v0", 19, 19, 190, locked_room_level, LOCKED_ROOM),
    ("MultiRoom-N2-S4-v0", 25, 25, 40, TWO_ROOMS, ROOMS),
    # Despite its name Farama's N4-S5-v0 has six rooms; v1 has four.
    ("MultiRoom-N4-S5-v0", 25, 25, 120, SIX_SMALL_ROOMS, ROOMS),
    ("MultiRoom-N4-S5-v1", 25, 25, 80, FOUR_SMALL_ROOMS, ROOMS),
    ("MultiRoom-N6-v0", 25, 25, 120, SIX_LARGE_ROOMS, ROOMS),
    ("ObstructedMaze-1Dl-v0", 11, 6, 288, ONE_DOOR, TAKE_BLUE),
    ("ObstructedMaze-1Dlh-v0", 11, 6, 288, ONE_DOOR_HIDDEN, TAKE_BLUE),
    ("ObstructedMaze-1Dlhb-v0", 11, 6, 288, ONE_DOOR_BLOCKED, TAKE_BLUE),
    ("ObstructedMaze-2Dl-v0", 16, 16, 576, TWO_DOORS, TAKE_BLUE),
    ("ObstructedMaze-2Dlh-v0", 16, 16, 576, TWO_DOORS_HIDDEN, TAKE_BLUE),
    ("ObstructedMaze-2Dlhb-v0", 16, 16, 576, TWO_DOORS_BLOCKED, TAKE_BLUE),
    ("ObstructedMaze-2Dlhb-v1", 16, 16, 576, variant(TWO_DOORS_BLOCKED, keys_last=True), TAKE_BLUE),
    ("ObstructedMaze-1Q-v0", 16, 16, 720, ONE_QUARTER, TAKE_BLUE),
    ("ObstructedMaze-1Q-v1", 16, 16, 720, variant(ONE_QUARTER, keys_last=True), TAKE_BLUE),
    ("ObstructedMaze-2Q-v0", 16, 16, 1584, TWO_QUARTERS, TAKE_BLUE),
    ("ObstructedMaze-2Q-v1", 16, 16, 1584, variant(TWO_QUARTERS, keys_last=True), TAKE_BLUE),
    ("ObstructedMaze-Full-v0", 16, 16, 3600, FOUR_QUARTERS, TAKE_BLUE),
    ("ObstructedMaze-Full-v1", 16, 16, 3600, variant(FOUR_QUARTERS, keys_last=True), TAKE_BLUE),
    ("Playground-v0", 19, 19, 100, playground_level, PLAY),
    ("Fetch-5x5-N2-v0", 5, 5, 125, variant(fetch_level, num_objects=2), FETCH),
    ("Fetch-6x6-N2-v0", 6, 6, 180, variant(fetch_level, num_objects=2), FETCH),
    ("Fetch-8x8-N3-v0", 8, 8, 320, variant(fetch_level, num_objects=3), FETCH),
    ("GoToDoor-5x5-v0", 5, 5, 100, go_to_door_level, GO_TO_DOOR),
    ("GoToDoor-6x6-v0", 6, 6, 144, go_to_door_level, GO_TO_DOOR),
    ("GoToDoor-8x8-v0", 8, 8, 256, go_to_door_level, GO_TO_DOOR),
    ("GoToObject-6x6-N2-v0", 6, 6, 180, variant(go_to_object_level, num_objects=2), GO_TO_OBJECT),
    ("GoToObject-8x8-N2-v0", 8, 8, 320, variant(go_to_object_level, num_objects=2), GO_TO_OBJECT),
    ("PutNear-6x6-N2-v0", 6, 6, 30, variant(put_near_level, num_objects=2), PUT_NEAR),
    ("PutNear-8x8-N3-v0", 8, 8, 40, variant(put_near_level, num_objects=3), PUT_NEAR),
]
ENVIRONMENTS = {
    f"MiniGrid-{name}": MiniGrid(f"MiniGrid-{name}", width, height, limit, level, **fields)
    for name, width, height, limit, level, fields in TABLE
}


# --- Drawing ---


class Rectangle(NamedTuple):
    """A filled rectangle; the sides of a tile have length 1, and y points down."""

    left: float
    right: float
    top: float
    bottom: float
    brightness: float  # 1 is the color of the cell, 0 black


class Stroke(NamedTuple):
    """All points within a radius of the segment from (x, y) to (x + run, y + rise)."""

    x: float
    y: float
    run: float
    rise: float
    radius: float
    brightness: float


WHOLE_TILE = Rectangle(0, 1, 0, 1, 1)
LAVA_WAVES = [
    Stroke(x, y + low, 0.2, 0.1 - 2 * low, 0.03, 0)
    for y in (0.3, 0.5, 0.7)
    for x, low in ((0.1, 0), (0.3, 0.1), (0.5, 0), (0.7, 0.1))
]
PICTURES = {  # shapes of each kind, in drawing order
    WALL: [WHOLE_TILE],
    FLOOR: [Rectangle(0.031, 1, 0.031, 1, 0.5)],
    DOOR_OPEN: [Rectangle(0.88, 1, 0, 1, 1), Rectangle(0.92, 0.96, 0.04, 0.96, 0)],
    DOOR_CLOSED: [
        WHOLE_TILE,
        Rectangle(0.04, 0.96, 0.04, 0.96, 0),
        Rectangle(0.08, 0.92, 0.08, 0.92, 1),
        Rectangle(0.12, 0.88, 0.12, 0.88, 0),
        Stroke(0.75, 0.5, 0, 0, 0.08, 1),  # the handle
    ],
    DOOR_LOCKED: [
        WHOLE_TILE,
        Rectangle(0.06, 0.94, 0.06, 0.94, 0.45),
        Rectangle(0.52, 0.75, 0.5, 0.56, 1),  # the keyhole
    ],
    KEY: [
        Rectangle(0.5, 0.63, 0.31, 0.88, 1),
        Rectangle(0.38, 0.5, 0.59, 0.66, 1),  # the teeth
        Rectangle(0.38, 0.5, 0.81, 0.88, 1),
        Stroke(0.56, 0.28, 0, 0, 0.19, 1),  # the ring
        Stroke(0.56, 0.28, 0, 0, 0.064, 0),
    ],
    BALL: [Stroke(0.5, 0.5, 0, 0, 0.31, 1)],
    BOX: [
        Rectangle(0.12, 0.88, 0.12, 0.88, 1),
        Rectangle(0.18, 0.82, 0.18, 0.82, 0),
        Rectangle(0.16, 0.84, 0.47, 0.53, 1),  # the slit
    ],
    GOAL: [WHOLE_TILE],
    LAVA: [WHOLE_TILE, *LAVA_WAVES],
}
PICTURES[KEY_BOX] = PICTURES[BOX]
RGB = np.array(
    [[255, 0, 0], [0, 255, 0], [0, 0, 255], [112, 39, 195], [255, 255, 0], [100, 100, 100]]
)
LAVA_RGB = np.array([255, 128, 0])


def covers(shape, x, y):
    """Whether points (x, y), arrays of one shape, lie in a `Rectangle` or `Stroke`."""
    if isinstance(shape, Rectangle):
        inside_x = (x >= shape.left) & (x <= shape.right)
        return inside_x & (y >= shape.top) & (y <= shape.bottom)
    # The distance to the nearest point of the segment
    length_squared = max(shape.run**2 + shape.rise**2, 1e-9)
    along = ((x - shape.x) * shape.run + (y - shape.y) * shape.rise) / length_squared
    along = np.clip(along, 0, 1)
    distance_x = x - shape.x - along * shape.run
    distance_y = y - shape.y - along * shape.rise
    return np.hypot(distance_x, distance_y) <= shape.radius


@functools.cache
def draw_tile(cell, direction, lit, size):
    """Draws a cell [size, size, 3] uint8 as Farama does, with the agent if `direction` is given."""
    pixels = 3 * size
    y, x = (np.indices((pixels, pixels)) + 0.5) / pixels
    kind = kind_of(cell)
    if kind == LAVA:
        colour = LAVA_RGB
    elif kind == KEY_BOX:
        colour = RGB[GREY]  # hides the color of the key inside
    else:
        colour = RGB[min(colour_of(cell), GREY)]  # `tile_rows` also draws colors 6 and 7
    image = np.zeros((pixels, pixels, 3), np.uint8)
    image[(x <= 0.031) | (y <= 0.031)] = RGB[GREY]  # grid lines
    for shape in PICTURES.get(kind, []):
        image[covers(shape, x, y)] = (shape.brightness * colour).astype(np.uint8)
    if direction is not None:
        # A triangle that points in the agent's direction
        cos, sin = [(1, 0), (0, 1), (-1, 0), (0, -1)][direction]
        ahead = 0.5 + cos * (x - 0.5) + sin * (y - 0.5)
        aside = np.abs(cos * (y - 0.5) - sin * (x - 0.5))
        image[(ahead >= 0.12) & (aside / 0.31 + (ahead - 0.12) / 0.75 < 1)] = RGB[RED]
    if lit:
        image = (image + 0.3 * (255 - image)).astype(np.uint8)
    return image.reshape(size, 3, size, 3, 3).mean((1, 3)).astype(np.uint8)


@functools.cache
def tile_rows():
    """The pixel rows of all tiles, without and with the agent, uint8 [2 * 128 * 8, 8 * 3]."""
    tiles = [draw_tile(cell, None, cell != UNSEEN, TILE) for cell in range(NUM_CELLS)]
    up = 3  # the agent's direction in its view
    tiles += [draw_tile(cell, up, cell != UNSEEN, TILE) for cell in range(NUM_CELLS)]
    return np.stack(tiles).reshape(2 * NUM_CELLS * TILE, TILE * 3)


def draw_view(view):
    """Renders a view [7, 7] as an image [56, 56, 3], uint8."""
    has_agent = np.arange(VIEW**2).reshape(VIEW, VIEW) == AGENT_CELL
    tile = view.astype(jnp.int32) + NUM_CELLS * has_agent
    # One look-up per pixel row of each tile, [7, 8, 7], gives the pixels in order.
    row = tile[:, None] * TILE + np.arange(TILE)[None, :, None]
    return at(tile_rows(), row).reshape(VIEW * TILE, VIEW * TILE, 3)


if __name__ == "__main__":
    try:
        main()
    except (UserError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, UserError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sys.exit(f"error: {error}")
