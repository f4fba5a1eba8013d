"""Writes a file of tasks for `xland_minigrid.py --benchmark-id FILE`.

    python benchmarks/environments/xland_tasks.py trivial --tasks 64  # needs xminigrid, no download

XLand-MiniGrid's own benchmarks are downloads. These tasks are like those of its trivial one: a goal
without any rules (hold a thing, stand beside one, lay one beside another, some of them on a certain
side) and five different things, those of the goal among them.
"""

import argparse

import jax.numpy as jnp
import numpy as np


def write_tasks(path, num_tasks, seed=0):
    """Writes `num_tasks` random tasks, which depend on the seed alone, in xminigrid's format."""
    from xminigrid.benchmarks import save_bz2_pickle
    from xminigrid.core import goals, rules
    from xminigrid.core.constants import Colors, Tiles

    rng = np.random.default_rng(seed)
    sides = ("", "Up", "Right", "Down", "Left")
    kinds = [goals.AgentHoldGoal]
    kinds += [getattr(goals, f"AgentNear{side}Goal") for side in sides]
    kinds += [getattr(goals, f"TileNear{side}Goal") for side in sides]
    shapes = [Tiles.BALL, Tiles.SQUARE, Tiles.PYRAMID, Tiles.KEY, Tiles.HEX, Tiles.STAR]
    colours = [colour for colour in range(Colors.RED, Colors.PINK + 1) if colour != Colors.BLACK]
    things = jnp.array([(shape, colour) for shape in shapes for colour in colours], jnp.uint8)

    chosen_goals, chosen_things = [], []
    for _ in range(num_tasks):
        five = things[rng.choice(len(things), 5, replace=False)]
        kind = kinds[rng.integers(len(kinds))]
        if kind.__name__.startswith("Tile"):
            goal = kind(tile_a=five[0], tile_b=five[1])
        else:
            goal = kind(tile=five[0])
        chosen_goals.append(goal.encode())
        chosen_things.append(five)
    no_rule = rules.EmptyRule().encode()[None]
    tasks = {
        "goals": jnp.stack(chosen_goals),
        "rules": jnp.stack([no_rule] * num_tasks),
        "init_tiles": jnp.stack(chosen_things),
        "num_rules": jnp.zeros((num_tasks, 1), jnp.uint8),
    }
    save_bz2_pickle(tasks, str(path))


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("file")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    choice = parser.parse_args()
    write_tasks(choice.file, choice.tasks, choice.seed)


if __name__ == "__main__":
    main()
