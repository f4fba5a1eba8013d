"""The environments against Farama's MiniGrid: rules by step, levels by chi-square, pixels."""

import dataclasses
import functools
import itertools
import pathlib
from collections import Counter

import gymnasium
import jax
import jax.numpy as jnp
import minigrid  # noqa: F401  (registers the ids)
import numpy as np
import pytest
from conftest import load
from minigrid.core.constants import DIR_TO_VEC
from minigrid.core.grid import Grid
from minigrid.core.world_object import Ball, Box, Door, Floor, Goal, Key, Lava, Wall
from minigrid.envs import EmptyEnv
from scipy import stats

import ppo_minigrid_rnn as script

IDS = list(script.ENVIRONMENTS)
COLOURS = "red green blue purple yellow grey".split()
COPIES = 24  # Farama environments stepped side by side
STEPS = 40  # 24 x 40 steps of each of 76 ids: 72,960
MOVING = [i for i in IDS if "Dynamic" in i]
pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date")  # Farama has newer versions


def cell_of(reference, pos):
    return int(pos[1]) * reference.width + int(pos[0])


def marks_of(reference):
    """What `State.marks` holds, read from Farama's environment."""
    if hasattr(reference, "success_pos"):
        places = (reference.success_pos, reference.failure_pos)
        return [cell_of(reference, place) for place in places]
    if hasattr(reference, "target_pos"):
        return [cell_of(reference, reference.target_pos)]
    if hasattr(reference, "obstacles"):
        return [cell_of(reference, o.cur_pos) for o in reference.obstacles]
    place_of = {id(thing): i for i, thing in enumerate(reference.grid.grid) if thing}
    if hasattr(reference, "red_door"):
        return [place_of[id(reference.red_door)], place_of[id(reference.blue_door)]]
    if hasattr(reference, "door"):
        return [place_of[id(reference.door)]]
    doors = [i for i, thing in enumerate(reference.grid.grid) if isinstance(thing, Door)]
    return doors[:1] if "Unlock" in type(reference).__name__ else []


def mission_of(reference):
    """What `State.mission` holds, read from the attributes of Farama's environment."""
    name = type(reference).__name__
    if name == "FetchEnv":
        verb = reference.mission.removesuffix(f" {reference.targetColor} {reference.targetType}")
        words = [verb, reference.targetColor, reference.targetType]
    elif name == "GoToDoorEnv":
        words = [reference.target_color]
    elif name == "GoToObjectEnv":
        words = [reference.target_color, reference.targetType]
    elif name == "PutNearEnv":
        words = [reference.moveColor, reference.move_type]
        words += [reference.target_color, reference.target_type]
    elif name == "LockedRoomEnv":
        locked = next(room for room in reference.rooms if room.locked)
        has_key = lambda room: any(
            isinstance(reference.grid.get(x, y), Key)
            for x in range(room.top[0], room.top[0] + room.size[0])
            for y in range(room.top[1], room.top[1] + room.size[1])
        )
        words = [locked.color, next(room.color for room in reference.rooms if has_key(room))]
    elif name in ("KeyCorridorEnv", "UnlockPickupEnv", "BlockedUnlockPickupEnv"):
        words = [reference.obj.color]
    else:
        return ()
    return np.array([script.WORDS.index(word) for word in words], np.int32)


def pack(encoding):
    """Farama's (object, colour, state) codes [..., 3] as one byte per cell [...]."""
    kind, colour, state = encoding[..., 0], encoding[..., 1], encoding[..., 2]
    return ((kind + (state > 0) * (6 + state)) * 8 + colour).astype(np.uint8)


@functools.cache  # cells are packed by millions, of few kinds
def pack_one(*codes):
    return int(pack(np.array(codes, np.uint8)))


def pack_object(thing):
    if thing is None:
        return script.EMPTY
    if isinstance(thing, Box) and thing.contains is not None:
        assert thing.color == "grey" and isinstance(thing.contains, Key)
        return script.KEY_BOX + COLOURS.index(thing.contains.color)
    return pack_one(*thing.encode())


def pack_grid(reference):
    """[H * W] packed cells of Farama's grid."""
    return np.array([pack_object(thing) for thing in reference.grid.grid], np.uint8)


def state_of(reference):
    """Our state of Farama's environment (numpy leaves)."""
    return script.GridState(
        grid=pack_grid(reference),
        position=np.int32(cell_of(reference, reference.agent_pos)),
        direction=np.int32(reference.agent_dir),
        carrying=np.uint8(pack_object(reference.carrying)),
        step_count=np.int32(reference.step_count),
        marks=np.array(marks_of(reference), np.int32),
        mission=mission_of(reference),
    )


def stack(states):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)


def scatter(reference, rng):
    """Put random objects into a third of the free cells, turn the agent, let it carry something."""
    name = type(reference).__name__
    colour = lambda: COLOURS[rng.integers(6)]  # noqa: E731
    makers = [
        lambda: Key(colour()),
        lambda: Door(colour(), is_open=bool(rng.integers(2))),
        lambda: Door(colour(), is_locked=True),
        lambda: Wall(),
        lambda: Goal(),
        lambda: Lava(),
        lambda: Floor(colour()),
    ]
    # The mission's object is known by its kind: levels with a second one do not exist.
    if "Unlock" not in name:
        makers.append(lambda: Box(colour()))
    if "Unlock" not in name and not isinstance(mission_of(reference), np.ndarray):
        makers.append(lambda: Box("grey", contains=Key(colour())))
    if "Corridor" not in name:
        makers.append(lambda: Ball("green" if "Obstructed" in name else colour()))
    for i, content in enumerate(reference.grid.grid):
        if content is None and i != cell_of(reference, reference.agent_pos) and rng.random() < 0.33:
            reference.grid.grid[i] = makers[rng.integers(len(makers))]()
    for content in reference.grid.grid:  # but for GoToDoor's, which lead out of the grid
        if isinstance(content, Door) and "GoToDoor" not in name and rng.random() < 0.3:
            content.is_open, content.is_locked = True, False
    reference.agent_dir = int(rng.integers(4))
    if rng.random() < 0.3 and not hasattr(reference, "obstacles"):
        reference.carrying = Key(colour())


def go_to_target(reference, rng):
    """Put the agent before the thing to pick up, where there is room."""
    x, y = reference.obj.cur_pos
    for direction in rng.permutation(4):
        before = np.subtract((x, y), DIR_TO_VEC[direction])
        if reference.grid.get(*before) is None:
            reference.agent_pos, reference.agent_dir = before, int(direction)
            return


def choose_action(reference, rng):
    """Mostly random, often the action that does something to what is in front."""
    near = abs(np.subtract(reference.agent_pos, getattr(reference, "target_pos", (99, 99))))
    if near.max() <= 2 and rng.random() < 0.3:
        return 6 if "GoTo" in type(reference).__name__ else 4
    if rng.random() < 0.5:
        return int(rng.choice(7, p=[0.2, 0.2, 0.3, 0.1, 0.07, 0.1, 0.03]))
    front = reference.grid.get(*reference.front_pos)
    if isinstance(front, Door) and not (front.is_open and rng.random() < 0.7):
        return 5
    if isinstance(front, (Key, Ball, Box)):
        return int(rng.choice([3, 3, 5]))
    return 2 if rng.random() < 0.8 else 4


def new_episode(reference, rng, wild):
    reference.reset(seed=int(rng.integers(2**31)))
    mission = mission_of(reference)  # before it can be hidden by other objects
    if rng.random() < 0.3:  # near the limit, so that truncation and the last rewards are met
        reference.step_count = reference.max_steps - int(rng.integers(1, 30))
    if wild and hasattr(reference, "obj") and rng.random() < 0.3:
        go_to_target(reference, rng)
    if wild and rng.random() < 0.6:
        scatter(reference, rng)
    return state_of(reference)._replace(mission=mission)


@functools.cache  # test_minigrid_envpool.py uses the same programs
def jitted(env):
    """(transition, observe) of a batch of states."""
    return jax.jit(jax.vmap(env.transition)), jax.jit(jax.vmap(env.observe))


@pytest.mark.parametrize("env_id", IDS)
def test_steps_equal_farama(env_id):
    env = script.find_env(env_id)
    rng = np.random.default_rng(IDS.index(env_id))
    references = [gymnasium.make(env_id).unwrapped for _ in range(COPIES)]
    state = stack([new_episode(r, rng, wild=True) for r in references])
    step, observe = jitted(env)
    seen = Counter()
    for t in range(STEPS):
        actions = [choose_action(r, rng) for r in references]
        theirs = [r.step(a) for r, a in zip(references, actions, strict=True)]
        marks = np.array([marks_of(r) for r in references]) if env.num_obstacles else state.marks
        state, reward, terminated = jax.device_get(step(state, np.array(actions), marks))
        obs = jax.device_get(observe(state))
        truncated = state.step_count >= env.max_episode_steps
        np.testing.assert_array_equal(obs["image"], np.stack([o["image"] for o, *_ in theirs]))
        np.testing.assert_array_equal(obs["direction"], [o["direction"] for o, *_ in theirs])
        assert ("mission" in obs) == env.observes_mission
        if env.observes_mission:
            np.testing.assert_array_equal(obs["mission"], state.mission)
        if t % 20 == 0:
            for i, reference in enumerate(references):
                one = jax.tree.map(lambda x, i=i: x[i], state)
                assert env.mission(one) == reference.mission
        np.testing.assert_allclose(reward, [r for _, r, *_ in theirs], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(terminated, [x[2] for x in theirs])
        np.testing.assert_array_equal(truncated, [x[3] for x in theirs])
        np.testing.assert_array_equal(state.position, [cell_of(r, r.agent_pos) for r in references])
        if t % 10 == 9:
            np.testing.assert_array_equal(state.grid, np.stack([pack_grid(r) for r in references]))
        seen.update(terminated=terminated.sum(), truncated=truncated.sum(), won=(reward > 0).sum())
        state = jax.tree.map(np.array, state)
        for i in np.flatnonzero(terminated | truncated):
            fresh = new_episode(references[i], rng, wild=True)
            jax.tree.map(lambda old, new, i=i: old.__setitem__(i, new), state, fresh)
    assert seen["terminated"] and seen["truncated"], seen  # the comparison met both ends
    if env.observes_mission:  # missions fulfilled and failed
        assert 0 < seen["won"] < seen["terminated"]
    assert seen["won"] or "Obstructed" not in env_id


def test_a_level_gets_as_many_random_numbers_as_it_asks_for():
    """Of MultiRoom by hand: 24 C (R - 1) + 2 C + R + 2."""
    for name, rooms, chains in (("N2-S4-v0", 2, 3), ("N4-S5-v1", 4, 10), ("N6-v0", 6, 40)):
        env = script.find_env(f"MultiRoom-{name}")
        expected = 24 * chains * (rooms - 1) + 2 * chains + rooms + 2
        assert script.num_uniforms(env) == expected
    draw = script.Uniforms(jnp.arange(5.0))
    assert draw().tolist() == 0 and draw(2, 2).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="5 random numbers, not 6"):
        draw()


@pytest.mark.parametrize("env_id", IDS)
def test_constants_equal_farama(env_id):
    env, reference = script.find_env(env_id), gymnasium.make(env_id).unwrapped
    assert (env.width, env.height) == (reference.width, reference.height)
    assert env.max_episode_steps == reference.max_steps
    assert env.see_through_walls == reference.see_through_walls
    assert env.num_actions == reference.action_space.n
    assert env.num_obstacles == getattr(reference, "n_obstacles", 0)
    # where one cannot know otherwise what to do
    assert env.observes_mission == any(x in env_id for x in ("Fetch", "GoTo", "PutNear"))
    for seed in range(5):
        reference.reset(seed=seed)
        assert env.mission(state_of(reference)) == reference.mission


# --- Levels ---


@functools.cache
def our_levels(env_id, count):
    env = script.find_env(env_id)
    return jax.device_get(jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(7), count)))


@functools.cache
def farama_levels(env_id, count):
    reference, states = gymnasium.make(env_id).unwrapped, []
    reference.reset(seed=1)
    for _ in range(count):
        reference.agent_pos, reference.agent_dir = (-1, -1), -1
        reference._gen_grid(reference.width, reference.height)
        states.append(state_of(reference))
    return stack(states)


def sample_sizes(env_id):
    """How many levels of ours and of Farama's are compared: fewer of those that take long."""
    slow = ("MultiRoom", "LockedRoom", "Playground", "S5R3", "S6R3", "Full", "2Q", "1Q", "2Dl")
    return (2_000, 500) if any(name in env_id for name in slow) else (8_000, 1_000)


def flood(grid, position, height, width):
    """Where the agent gets to, [N, H * W]: with keys that it reaches, balls and boxes moved."""
    cells = grid.reshape(-1, height, width)
    kind, bit = cells & 0xF8, np.uint8(1) << (cells & 7)  # a bit for each colour
    keys = np.where((kind == script.KEY) | (kind == script.KEY_BOX), bit, 0)
    locks = np.where(kind == script.DOOR_LOCKED, bit, 0)
    is_open = (kind != script.WALL) & (kind != script.LAVA) & (locks == 0)
    reached = (np.arange(height * width) == position[:, None]).reshape(cells.shape)
    growing = np.arange(len(cells))  # levels in which the last step reached new cells
    while growing.size:
        now = reached[growing]
        wider = now.copy()
        wider[:, 1:] |= now[:, :-1]
        wider[:, :-1] |= now[:, 1:]
        wider[:, :, 1:] |= now[:, :, :-1]
        wider[:, :, :-1] |= now[:, :, 1:]
        have = np.bitwise_or.reduce(np.where(now, keys[growing], 0), axis=(1, 2), keepdims=True)
        wider = now | (wider & (is_open[growing] | (locks[growing] & have > 0)))
        reached[growing] = wider
        growing = growing[(wider != now).any((1, 2))]
    return reached.reshape(len(cells), -1)


def check_mission_level(env, levels):
    """Things lie as the mission says; free cells are one region, so that all can be reached."""
    grid, rows = levels.grid, np.arange(len(levels.grid))
    words = np.array(script.WORDS)[levels.mission].T
    colour = {word: number for number, word in enumerate(script.COLOUR_WORDS)}
    kind = {"key": script.KEY, "ball": script.BALL, "box": script.BOX}
    cells = lambda colours, kinds: np.array([colour[c] + kind[k] for c, k in zip(colours, kinds)])
    if "GoToDoor" in env.env_id:
        marked = grid[rows, levels.marks[:, 0]]
        assert (marked == script.DOOR_CLOSED + np.array([colour[c] for c in words[0]])).all()
        doors = np.sort(np.where(grid & 0xF8 == script.DOOR_CLOSED, grid, 0), axis=1)[:, -4:]
        assert (np.diff(doors.astype(int), axis=1) > 0).all() and (doors[:, 0] > 0).all()
        return
    things = np.isin(grid & 0xF8, list(kind.values()))
    number = {"GoToObject": 2, "PutNear-6": 2, "PutNear-8": 3, "Fetch-8": 3, "Fetch": 2}
    expected = next(n for name, n in number.items() if name in env.env_id)
    assert (things.sum(1) == expected).all()
    first = cells(*words[-2:])  # of Fetch and GoToObject all there is
    assert (grid == first[:, None]).any(1).all()
    if "Fetch" not in env.env_id:
        assert (grid[rows, levels.marks[:, 0]] == first).all()
        sorted_things = np.sort(np.where(things, grid, 0), axis=1)[:, -expected:].astype(int)
        assert (np.diff(sorted_things, axis=1) > 0).all()  # no two alike
    if "PutNear" in env.env_id:
        moved = cells(*words[:2])
        assert (grid == moved[:, None]).any(1).all() and (moved != first).all()


def is_always_solvable(env_id):
    """Farama's first versions of ObstructedMaze's blocked levels may lock keys in."""
    is_blocked = "Obstructed" in env_id and not any(name in env_id for name in ("Dl-", "Dlh-"))
    return not is_blocked or "v1" in env_id or "1Dl" in env_id


def check_obstructed_maze(env, levels, theirs, reached):
    """A key for every locked door; all levels can be solved, or as many as of Farama's."""
    kind, colour = levels.grid & 0xF8, levels.grid & 7
    locked, in_box = kind == script.DOOR_LOCKED, kind == script.KEY_BOX
    key, green = in_box | (kind == script.KEY), levels.grid == script.BALL + script.GREEN
    target = levels.grid == script.BLUE_BALL
    quarters = {"1D": 0.5, "2Q": 2, "Full": 4}
    doors = 2 * next((n for name, n in quarters.items() if name in env.env_id), 1)
    assert (target.sum(1) == 1).all() and (locked.sum(1) == doors).all()
    assert (in_box if "Dl-" not in env.env_id else kind == script.KEY).sum() == key.sum()
    is_blocked = not any(name in env.env_id for name in ("Dl-", "Dlh-"))
    assert (green.sum(1) == is_blocked * doors).all()
    solvable = (target & reached).any(1)
    if is_always_solvable(env.env_id):
        assert solvable.all() and (key.sum(1) == doors).all()
        colours = [[((colour == c) & x).sum(1) for c in range(6)] for x in (key, locked)]
        np.testing.assert_array_equal(*colours)
    else:
        their_reached = flood(theirs.grid, theirs.position, env.height, env.width)
        theirs_solvable = ((theirs.grid == script.BLUE_BALL) & their_reached).any(1)
        shares = {"2D": 0.93, "1Q": 0.93, "2Q": 0.97, "Full": 1.0}  # as minigrid_ids.md has them
        share = next(share for name, share in shares.items() if name in env.env_id)
        assert abs(solvable.mean() - share) < 0.01
        assert key.sum(1).min() < doors == key.sum(1).max()
        assert same_distribution(solvable.tolist(), theirs_solvable.tolist()) > 1e-5
        their_keys = (theirs.grid & 0xF8 == script.KEY_BOX).sum(1)
        assert same_distribution(key.sum(1).tolist(), their_keys.tolist()) > 1e-5


@pytest.mark.parametrize("env_id", IDS)
def test_levels_are_solvable_and_complete(env_id):
    env, (ours, theirs) = script.find_env(env_id), sample_sizes(env_id)
    levels, theirs = our_levels(env_id, ours), farama_levels(env_id, theirs)
    grid, rows = levels.grid, np.arange(len(levels.grid))
    x, y = script.coordinates(env)
    is_border = (x == 0) | (y == 0) | (x == env.width - 1) | (y == env.height - 1)
    if "MultiRoom" in env_id or "GoToDoor" in env_id:  # walls of smaller rooms
        shut = np.where(grid & 0xF8 == script.DOOR_CLOSED, np.uint8(script.WALL), grid)
        assert not flood(shut, levels.position, env.height, env.width)[:, is_border].any()
    else:
        assert (grid[:, is_border] & 0xF8 == script.WALL).all()
    reached = flood(grid, levels.position, env.height, env.width)
    if "Memory" in env_id:
        assert reached[rows[:, None], levels.marks].all()
        is_object = np.isin(grid & 0xF8, (script.KEY, script.BALL))
        objects = np.where(is_object, grid, 0)
        beside = levels.marks[:, :, None] + np.array([-env.width, env.width])
        success, failure = objects[rows[:, None, None], beside].max(2).T
        shown = grid[:, (env.height // 2 - 1) * env.width + 1]
        assert (success == shown).all() and (failure != shown).all()
    elif "RedBlue" in env_id:
        doors = [script.DOOR_CLOSED + script.RED, script.DOOR_CLOSED + script.BLUE]
        assert (grid[rows[:, None], levels.marks] == np.array(doors)).all()
        assert reached[rows[:, None], levels.marks].all()
    elif "Obstructed" in env_id:
        check_obstructed_maze(env, levels, theirs, reached)
    elif env.observes_mission:
        check_mission_level(env, levels)
    elif "Playground" in env_id:
        assert (reached | (grid & 0xF8 == script.WALL)).all()
    else:
        kinds = {"Pickup": script.BOX, "Corridor": script.BALL, "Unlock-": script.DOOR_LOCKED}
        kind = next((kind for name, kind in kinds.items() if name in env_id), script.GOAL)
        targets = grid & 0xF8 == kind
        assert (targets.sum(1) == 1).all() and (targets & reached).any(1).all()
    assert (grid[rows, levels.position] == script.EMPTY).all()
    assert (levels.carrying == script.EMPTY).all() and (levels.step_count == 0).all()
    locked, keys = grid & 0xF8 == script.DOOR_LOCKED, grid & 0xF8 == script.KEY
    if locked.any() and "Obstructed" not in env_id:
        assert (locked.sum(1) == 1).all() and (keys.sum(1) == 1).all()
        assert (np.where(locked, grid & 7, 0).max(1) == np.where(keys, grid & 7, 0).max(1)).all()
    # each cell holds, in some level, exactly the kinds that it can hold in Farama's levels
    for kind in np.unique(np.concatenate((grid, theirs.grid)) & 0xF8):
        ours_kind, their_kind = (grid & 0xF8 == kind).mean(0), (theirs.grid & 0xF8 == kind).mean(0)
        rare = 10 / len(theirs.grid)
        assert not ours_kind[their_kind == 0].max(initial=0) > rare
        assert not their_kind[ours_kind == 0].max(initial=0) > (rare if len(grid) < 8_000 else 0)


def same_distribution(ours, theirs):
    """p value of a chi-square test that two samples have one distribution, rare outcomes merged."""
    a, b = Counter(ours), Counter(theirs)
    share = len(theirs) / (len(ours) + len(theirs))
    common = [k for k in a | b if (a[k] + b[k]) * share >= 5]
    table = np.array([[a[k] for k in common], [b[k] for k in common]])
    rest = np.array([[len(ours)], [len(theirs)]]) - table.sum(1, keepdims=True)
    table = np.hstack((table, rest)) if rest.sum() * share >= 5 else table
    return stats.chi2_contingency(table).pvalue if table.shape[1] > 1 else 1.0


def features(levels, width):
    """Outcomes to compare: name -> list of one hashable value per level."""
    grid, kind, rows = levels.grid, levels.grid & 0xF8, np.arange(len(levels.grid))
    height = grid.shape[1] // width
    solid = ((kind == script.WALL) | (kind == script.LAVA)).reshape(-1, height, width)
    halves = np.split(solid, [height // 2], axis=1)
    quarters = [q for half in halves for q in np.split(half, [width // 2], axis=2)]
    agent, layout = levels.position, kind == script.WALL
    x, y = agent % width, agent // width
    out = {
        "agent": [agent],
        "direction": [levels.direction],
        "agent and direction": [agent, levels.direction],
        "walls and lava by quarters": [quarter.sum((1, 2)) for quarter in quarters],
        "layout": [layout],
        "grid": [grid],
    }
    # Where levels are too many to count each one, what follows still has few enough outcomes.
    occupied = (kind != script.EMPTY).reshape(solid.shape)
    out |= {
        "agent's column": [x],
        "agent's row": [y],
        "number of walls": [solid.sum((1, 2))],
        "first row": [occupied.any(2).argmax(1)],
        "last row": [occupied.any(2)[:, ::-1].argmax(1)],
        "first column": [occupied.any(1).argmax(1)],
        "last column": [occupied.any(1)[:, ::-1].argmax(1)],
    }
    middles = {"column": solid[:, :, width // 2], "row": solid[:, height // 2]}
    for name, line in middles.items():
        halves = np.split(line, [line.shape[1] // 2], axis=1)
        out[f"gaps in the middle {name}"] = [half.argmin(1) for half in halves]
    if len(levels.mission):
        out["mission"] = [levels.mission]
        out |= {f"word {place}": [words] for place, words in enumerate(levels.mission.T)}
    if levels.marks.size:
        out["marks"] = [np.sort(levels.marks)]
    kinds = "DOOR_CLOSED DOOR_LOCKED KEY BALL BOX GOAL LAVA KEY_BOX".split()
    for name in kinds:
        places = kind == getattr(script, name)
        if not places.any():
            continue
        first = places.argmax(1)
        last = places.shape[1] - 1 - places[:, ::-1].argmax(1)
        colour, last_colour = grid[rows, first] & 7, grid[rows, last] & 7
        column, row = first % width, first // width
        sides = [2 * y >= height, 2 * x >= width, 2 * row >= height, 2 * column >= width]
        out |= {
            f"all {name}": [places],
            f"number of {name}": [places.sum(1)],
            f"first {name}": [first],
            f"last {name}": [last],
            f"column of {name}": [column],
            f"row of {name}": [row],
            f"colour of {name}": [colour],
            f"colours of first and last {name}": [colour, last_colour],
            f"quarters of {name} and agent": sides,
            f"way from agent to {name}": [x - column, y - row],
            f"first {name} and agent": [first, agent],
            f"first {name} and layout": [first, layout],
        }
    tables = {name: np.column_stack(columns).astype(np.int16) for name, columns in out.items()}
    return {name: [line.tobytes() for line in table] for name, table in tables.items()}


@pytest.mark.parametrize("env_id", IDS)
def test_level_distribution_equals_farama(env_id):
    env, (ours, theirs) = script.find_env(env_id), sample_sizes(env_id)
    ours = features(our_levels(env_id, ours), env.width)
    theirs = features(farama_levels(env_id, theirs), env.width)
    assert ours.keys() == theirs.keys()
    for name in ours:  # about 2,000 tests in all
        assert same_distribution(ours[name], theirs[name]) > 1e-5, name


def skewed_gap(levels, env):
    """Gaps of the middle column's upper wall in its upper part twice as often."""
    column = levels.grid.reshape(len(levels.grid), env.height, env.width)[:, :, env.width // 2]
    return (column[:, : env.height // 2] & 0xF8 != script.WALL).argmax(1) < env.height // 4


def skewed_pairs(levels, env):
    """Agent and goal in the same half twice as often."""
    goal = (levels.grid == script.GREEN_GOAL).argmax(1)
    agent_left, goal_left = (x % env.width < env.width // 2 for x in (levels.position, goal))
    return agent_left == goal_left


@pytest.mark.parametrize("favoured", [skewed_gap, skewed_pairs])
@pytest.mark.parametrize("env_id", ["MiniGrid-FourRooms-v0"])  # its levels are there already
def test_a_wrong_level_distribution_is_noticed(env_id, favoured):
    """FourRooms, too many levels to count; half of those that are not favoured are left out."""
    env, rng = script.find_env(env_id), np.random.default_rng(0)
    levels, theirs = our_levels(env.env_id, 8_000), farama_levels(env.env_id, 1_000)
    keep = favoured(levels, env) | (rng.random(len(levels.grid)) < 0.5)
    ours = features(jax.tree.map(lambda x: x[keep], levels), env.width)
    theirs = features(theirs, env.width)
    assert min(same_distribution(ours[name], theirs[name]) for name in ours) < 1e-5


@pytest.mark.parametrize("env_id", MOVING)
def test_obstacles_move_as_in_farama(env_id):
    env, reference = script.find_env(env_id), gymnasium.make(env_id).unwrapped
    reference.reset(seed=3)
    before, grid, state = marks_of(reference), list(reference.grid.grid), state_of(reference)
    theirs = []
    for _ in range(2_000):
        reference.grid.grid = list(grid)
        for obstacle, cell in zip(reference.obstacles, before, strict=True):
            obstacle.cur_pos = (cell % env.width, cell // env.width)
        reference.step(0)  # a turn: the obstacles move, the agent stays
        theirs.append(marks_of(reference))
    keys = jax.random.split(jax.random.key(0), 16_000)
    move = jax.jit(jax.vmap(env.move_obstacles, in_axes=(0, None)))
    ours = np.asarray(move(keys, state))
    theirs = np.array(theirs)
    for i in range(env.num_obstacles):
        assert same_distribution(ours[:, i].tolist(), theirs[:, i].tolist()) > 1e-5
    pairs = [[tuple(marks) for marks in moves[:, :2].tolist()] for moves in (ours, theirs)]
    assert same_distribution(*pairs) > 1e-5
    # `step` is the move, drawn anew at every step, and then the transition
    state = jax.tree.map(jnp.asarray, our_levels(env_id, 8_000))
    state = jax.tree.map(lambda leaf: leaf[:256], state)
    step, turns = jax.jit(jax.vmap(env.step)), jnp.zeros(256, int)
    after, _, _ = step(keys[:256], state, turns)
    again, _, _ = step(keys[256:512], state, turns)
    assert (after.grid == script.BLUE_BALL).sum() == 256 * env.num_obstacles
    assert (after.marks != again.marks).any()


# --- Pictures ---


@pytest.mark.parametrize("env_id", IDS[::5] + ["MiniGrid-FourRooms-v0"])
def test_pictures_equal_farama(env_id):
    env, reference = script.find_env(env_id), gymnasium.make(env_id).unwrapped
    rng = np.random.default_rng(IDS.index(env_id))
    observe = jax.jit(script.dataclasses.replace(env, pixels=True).observe)
    reference.reset(seed=0)
    mission = mission_of(reference)  # any one
    for i in range(8):
        new_episode(reference, rng, wild=i > 1)
        for _ in range(6):
            _, _, terminated, *_ = reference.step(choose_action(reference, rng))
            if terminated:
                new_episode(reference, rng, wild=i > 1)
            state = state_of(reference)._replace(mission=mission)
            np.testing.assert_array_equal(observe(state)["image"], reference.get_pov_render(8))
        size = (8, 16, 32)[i % 3] if env.width < 20 else 8
        expected = reference.get_full_render(True, size)
        np.testing.assert_array_equal(env.render(state, size), expected)


def test_tiles_equal_farama():
    """Each thing, with the agent and without."""
    kinds = [Key, Ball, Box, Floor, Door]
    kinds += [functools.partial(Door, is_open=True), functools.partial(Door, is_locked=True)]
    kinds += [lambda colour: Box("grey", contains=Key(colour))]
    things = [None, Wall(), Goal(), Lava(), *(kind(c) for kind in kinds for c in COLOURS)]
    for n, thing in enumerate(things):
        for look in itertools.product((None, n % 4), (False, True), (8, 16)):
            expected = Grid.render_tile(thing, *look).astype(np.uint8)
            ours = script.draw_tile(pack_object(thing), *look)
            np.testing.assert_array_equal(ours, expected)


# --- Names ---


def test_names():
    """Without a version it is Farama's newest one, as its own registry has it."""
    for env_id in IDS:
        name = env_id.removeprefix("MiniGrid-").rsplit("-v", 1)[0]
        assert script.find_env(env_id) is script.find_env(env_id.removeprefix("MiniGrid-"))
        assert script.find_env(env_id).env_id == env_id
        versions = [x for x in gymnasium.registry if x.rsplit("-v", 1)[0] == f"MiniGrid-{name}"]
        assert script.full_id(name) == script.find_env(name).env_id == max(versions)
    assert script.find_env("Empty-8x8-v1") is script.find_env("Empty-8x8-v0")
    assert script.parse_args(["--env-id", "MemoryS9"]).env_id == "MiniGrid-MemoryS9-v0"
    assert len(IDS) == 76
    for name, message in [
        ("DorKey-8x8", "DoorKey-8x8"),
        ("fourrooms", "FourRooms"),
        ("BabyAI-GoToObj-v0", "BabyAI and WFC levels are not included"),
    ]:
        with pytest.raises(script.UserError, match=message):
            script.main(["--env-id", name])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("env_id", ["MiniGrid-FourRooms-v0", "MiniGrid-Dynamic-Obstacles-6x6-v0"])
def test_ended_episodes_get_levels_of_their_own(env_id, share):
    """However many end at once: the others go on, and the new levels are independent draws."""
    env, n = script.find_env(env_id), 4_000
    states = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), n))
    going_on = states._replace(step_count=states.step_count + 7)
    done = np.random.default_rng(0).random(n) < share
    reset = jax.jit(lambda key: script.reset_ended(env, key, jnp.asarray(done), going_on))
    after = jax.device_get(reset(jax.random.key(2)))
    before = jax.device_get(going_on)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[~done], y[~done]), after, before)
    assert (after.step_count == np.where(done, 0, 7)).all()
    if share < 0.5:
        return
    fresh = jax.tree.map(lambda x: x[done], after)
    ours, theirs = features(fresh, env.width), features(farama_levels(env_id, 1_000), env.width)
    for name in ours:
        assert same_distribution(ours[name], theirs[name]) > 1e-5, name
    if "FourRooms" in env_id:  # two equal ones would be one draw given twice: there are so many
        agent = np.stack([fresh.position, fresh.direction], axis=1)
        whole = np.concatenate([fresh.grid, agent], axis=1)
        assert len(np.unique(whole, axis=0)) == len(whole)


def test_wide_levels_are_rendered():
    """Each cell has at least four pixels."""
    env = dataclasses.replace(script.find_env("Empty-8x8"), width=400)
    image = env.render(env.reset(jax.random.key(0)))
    assert image.shape == (4 * env.height, 1600, 3) and image.any()


def test_other_views_equal_farama(tmp_path):
    """VIEW = 9 in a copy of the script: from every cell; where light must spread it is an error."""
    text = pathlib.Path(script.__file__).read_text()
    (tmp_path / "wide.py").write_text(text.replace("\nVIEW = 7\n", "\nVIEW = 9\n"))
    wide = load(tmp_path / "wide.py")
    reference = EmptyEnv(size=8, agent_view_size=9)
    reference.reset(seed=0)
    env = wide.find_env("Empty-8x8")
    state = env.reset(jax.random.key(0))
    observe = jax.jit(env.observe)
    for x, y, way in itertools.product(range(1, 7), range(1, 7), range(4)):
        image = observe(state._replace(position=8 * y + x, direction=way))["image"]
        reference.agent_pos, reference.agent_dir = (x, y), way
        np.testing.assert_array_equal(image, reference.gen_obs()["image"])
    env = wide.find_env("DoorKey-8x8")
    with pytest.raises(ValueError, match="7x7"):
        env.observe(env.reset(jax.random.key(0)))


# --- Trials ---


def test_trials_equal_resets_with_the_same_seed():
    """A rollout in one long trial, played again in Farama's, which are reset with its seed."""
    num_envs, limit, env_id = 8, 15, "MiniGrid-LavaGapS5-v0"
    single = script.dataclasses.replace(script.find_env(env_id), max_episode_steps=limit)
    env = script.Trials(single, 1000)
    assert env.max_episode_steps == 1000 * limit and env.num_actions == 7
    sizes = dict(num_envs=num_envs, num_steps=64, rnn_hidden_dim=8, head_hidden_dim=8)
    args = script.Args(env_id=env_id, episodes_per_trial=1000, **sizes)
    references = [gymnasium.make(env_id, max_steps=limit).unwrapped for _ in range(num_envs)]
    observations = [game.reset(seed=n)[0] for n, game in enumerate(references)]
    start = jax.tree.map(jnp.asarray, stack([state_of(game) for game in references]))
    trial = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), num_envs))
    trial = trial._replace(env_state=start, start_state=start)

    @jax.jit
    def play(key):
        params = script.init_agent(args, key, env)
        stats = script.init_episode_stats(num_envs)
        agent_state = script.init_agent_state(args, num_envs)
        return script.rollout(args, env, params, trial, agent_state, stats, key)[3]

    trajectory = jax.device_get(play(jax.random.key(0)))
    assert not (trajectory.terminated | trajectory.truncated).any()  # the trial goes on
    seen = Counter()
    for n, game in enumerate(references):
        obs, ended = observations[n], False
        for t in range(args.num_steps):
            inputs = jax.tree.map(lambda x: x[t, n], trajectory.inputs)  # noqa: B023
            np.testing.assert_array_equal(inputs.obs["image"], obs["image"])
            assert inputs.obs["direction"] == obs["direction"]
            assert inputs.obs["restarted"] == ended and inputs.start == (t == 0)
            obs, reward, terminated, truncated, _ = game.step(trajectory.action[t, n])
            np.testing.assert_allclose(trajectory.reward[t, n], reward, atol=1e-6)
            ended = terminated or truncated
            seen.update(terminated=terminated, truncated=truncated)
            if ended:
                obs, _ = game.reset(seed=n)
    assert seen["terminated"] and seen["truncated"], seen


def test_a_trial_ends_with_its_last_episode():
    """Whether that ended by success or by the time limit; returns by episode."""
    single = script.dataclasses.replace(script.find_env("Empty-5x5"), max_episode_steps=6)
    env = script.Trials(single, 3)
    step = jax.jit(env.step)
    to_goal = [script.FORWARD, script.FORWARD, script.RIGHT, script.FORWARD, script.FORWARD]
    too_long = [script.LEFT] * 6
    for episodes in ([to_goal, too_long, to_goal], [too_long, to_goal, too_long]):
        state = start = env.reset(jax.random.key(0))
        returns = []
        for number, actions in enumerate(episodes):
            returns.append(0.0)
            for t, action in enumerate(actions):
                state, reward, terminated = step(jax.random.key(1), state, action)
                returns[-1] += float(reward)
                is_end = t == len(actions) - 1
                assert bool(terminated) == (is_end and number == 2)
                assert bool(env.observe(state)["restarted"]) == is_end
            jax.tree.map(np.testing.assert_array_equal, state.env_state, start.env_state)
        assert [x > 0 for x in returns] == [actions is to_goal for actions in episodes]
        np.testing.assert_allclose(state.returns, returns)
        again, _, _ = step(jax.random.key(1), state, script.LEFT)
        np.testing.assert_array_equal(again.returns, state.returns)
