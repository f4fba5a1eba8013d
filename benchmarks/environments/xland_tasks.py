"""Writes a file of tasks for `xland_minigrid.py --benchmark-id FILE`.

    python benchmarks/environments/xland_tasks.py trivial --tasks 64  # xminigrid without a download

XLand-MiniGrid's own benchmarks are downloads. These tasks resemble those of its trivial one: a goal
without rules (hold an object, stand next to one, put one next to another, some on a certain side)
and five different objects, including those of the goal.
"""

import argparse

import jax.numpy as jnp
import numpy as np


def write_tasks(path, num_tasks, seed=0):
    """Writes random tasks in xminigrid's format."""
    from xminigrid.benchmarks import save_bz2_pickle
    from xminigrid.core import goals, rules
    from xminigrid.core.constants import Colors, Tiles

    rng = np.random.default_rng(seed)
    sides = ("", "Up", "Right", "Down", "Left")
    kinds = [goals.AgentHoldGoal]
    kinds += [getattr(goals, f"AgentNear{side}Goal") for side in sides]
    kinds += [getattr(goals, f"TileNear{side}Goal") for side in sides]
    shapes = [Tiles.BALL, Tiles.SQUARE, Tiles.PYRAMID, Tiles.KEY, Tiles.HEX, Tiles.STAR]
    colors = [color for color in range(Colors.RED, Colors.PINK + 1) if color != Colors.BLACK]
    objects = jnp.array([(shape, color) for shape in shapes for color in colors], jnp.uint8)

    chosen_goals, chosen_objects = [], []
    for _ in range(num_tasks):
        five = objects[rng.choice(len(objects), 5, replace=False)]
        kind = kinds[rng.integers(len(kinds))]
        if kind.__name__.startswith("Tile"):
            goal = kind(tile_a=five[0], tile_b=five[1])
        else:
            goal = kind(tile=five[0])
        chosen_goals.append(goal.encode())
        chosen_objects.append(five)
    no_rule = rules.EmptyRule().encode()[None]
    tasks = {
        "goals": jnp.stack(chosen_goals),
        "rules": jnp.stack([no_rule] * num_tasks),
        "init_tiles": jnp.stack(chosen_objects),
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
