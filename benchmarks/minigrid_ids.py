"""Writes minigrid_ids.md: what of each MiniGrid id is compared with what, and what was learned.

    python benchmarks/minigrid_ids.py

It asks the tests themselves which ids they are run with, and minigrid_learning.json for the rest. A
test fails where the file is not what this program would write.
"""

import argparse
import json
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import test_minigrid_env as farama  # noqa: E402
import test_minigrid_envpool as envpool  # noqa: E402

import ppo_minigrid_rnn as script  # noqa: E402

PATH = ROOT / "benchmarks" / "minigrid_ids.md"
LEARNED = ROOT / "benchmarks" / "results" / "minigrid_learning.json"
TOP = """# MiniGrid's ids, one by one

Written by `python benchmarks/minigrid_ids.py`; a test guards it. What the columns say:

- steps: more than a thousand random and meaningful actions, in levels as they are and in levels
  full of random things, give Farama's observations, terminations and truncations exactly, and its
  rewards to 1e-6 (`test_steps_equal_farama`).
- levels: chi-square tests of many features do not tell the levels from Farama's
  (`test_level_distribution_equals_farama`).
- solvable: a search over all levels drawn finds that each can be solved, or as many as of Farama's
  (`test_levels_are_solvable_and_complete`).
- mission: the sentence is Farama's (`test_constants_equal_farama`).
- EnvPool: its C++ gives the same in steps and in levels (`test_minigrid_envpool.py`); a number is
  a note on how its levels differ from Farama's. In all of its ids a step that ends an episode by
  itself and reaches the time limit counts as truncated only; its boxes that hide a key are blue.
- success: of 1,024 greedy episodes, here and with the same weights in Farama's environments, a
  seed each; flags and steps are in `results/minigrid_learning.json`.

| id | steps | levels | solvable | mission | EnvPool | success | in Farama's |
| -- | ----- | ------ | -------- | ------- | ------- | ------- | ----------- |
"""


def ids_of(test):
    """The ids that a test is parametrised with."""
    for mark in test.pytestmark:
        if mark.name == "parametrize" and mark.args[0] == "env_id":
            return set(mark.args[1])
    raise ValueError(f"{test.__name__} has no ids")


def successes(learned, env_id):
    """(here, in Farama's): the success of all greedy runs with recurrence, from codes."""
    here, there = [], []
    for name, result in learned.items():
        run = re.fullmatch(r"(\S+), greedy, seed \d+", name)
        if run and script.full_id(run[1]) == env_id:
            here.append(f"{result['success_rate']:.3f}")
            there.append(f"{result['farama_success_rate']:.3f}")
    return " / ".join(here), " / ".join(there)


def make_table():
    """The whole text."""
    learned = json.loads(LEARNED.read_text())
    compared = [
        ids_of(farama.test_steps_equal_farama),
        ids_of(farama.test_level_distribution_equals_farama),
        ids_of(farama.test_levels_are_solvable_and_complete),
        ids_of(farama.test_constants_equal_farama),
    ]
    steps_in_envpool = ids_of(envpool.test_steps_equal_envpool)
    levels_in_envpool = ids_of(envpool.test_level_distribution_equals_envpool)
    reasons, lines = [], []
    for env_id in script.ENVIRONMENTS:
        marks = ["yes" if env_id in ids else "" for ids in compared]
        if marks[2] and not farama.is_always_solvable(env_id):
            marks[2] = "as Farama's"
        theirs = ["steps"] if env_id in steps_in_envpool else []
        if env_id in envpool.OTHER_LEVELS:
            reason = envpool.OTHER_LEVELS[env_id]
            if reason not in reasons:
                reasons.append(reason)
            theirs.append(f"({reasons.index(reason) + 1})")
        elif env_id in levels_in_envpool:
            theirs.append("levels")
        name = env_id.removeprefix("MiniGrid-")
        cells = [name, *marks, ", ".join(theirs), *successes(learned, env_id)]
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"({number}) {reason}." for number, reason in enumerate(reasons, 1)]
    return TOP + "\n".join(lines) + "\n\n" + "\n\n".join(notes) + "\n"


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    PATH.write_text(make_table())
