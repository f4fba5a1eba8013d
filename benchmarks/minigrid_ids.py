"""Trains ppo_minigrid_rnn.py on all 76 MiniGrid ids and fills the table of minigrid_ids.md.

    python benchmarks/minigrid_ids.py                  # all ids; resumes an interrupted run
    python benchmarks/minigrid_ids.py MemoryS7-v0 ...  # these ids
    python benchmarks/minigrid_ids.py ObstructedMaze-2Q-v1 --total-timesteps 80000000
    python benchmarks/minigrid_ids.py LavaCrossingS11N5-v0 --weights RUN  # of an easier level
    python benchmarks/minigrid_ids.py --table          # only write the table

All ids of a family are trained for the same number of steps with one seed. FAMILIES lists the sets
of flags (see minigrid_learning.py) in the order in which they are tried: an id gets the next set if
its success rate is below 0.95. The table contains the best run of each id. Results are written to
benchmarks/results/minigrid_ids.json after each run, and finished runs are not repeated. To share a
GPU between processes, set XLA_PYTHON_CLIENT_PREALLOCATE=false and give each process its own ids,
--out and --page.
"""

import argparse
import json
import pathlib
import tempfile

import jax
import minigrid_count_bonus
import minigrid_learning
from minigrid_learning import EXPLORE, LONG_MISSION, MEMORY, MISSION, RARE, ROOT, script

RESULTS = ROOT / "benchmarks" / "results" / "minigrid_ids.json"
PAGE = ROOT / "benchmarks" / "minigrid_ids.md"
SETS = {
    "default": {},
    "mission": MISSION,
    "long mission": LONG_MISSION,
    "memory": MEMORY,
    "rare": RARE,
    "explore": EXPLORE,
}
FAMILIES = {  # prefix of the ids: steps, sets of flags in order of trial
    "Empty": (800_000, ["default"]),
    "DistShift": (1_000_000, ["default"]),
    "LavaGap": (1_000_000, ["default"]),
    "LavaCrossing": (3_000_000, ["default", "explore", "mission"]),
    "SimpleCrossing": (3_000_000, ["default", "explore"]),
    "DoorKey": (5_000_000, ["default", "explore"]),
    "RedBlueDoors": (3_000_000, ["default", "explore"]),
    "Unlock": (1_000_000, ["default"]),
    "UnlockPickup": (6_000_000, ["rare", "explore"]),
    "BlockedUnlockPickup": (16_000_000, ["explore"]),
    "FourRooms": (10_000_000, ["long mission"]),
    "Dynamic-Obstacles": (2_000_000, ["memory", "mission"]),
    "Memory": (8_000_000, ["memory"]),
    "KeyCorridor": (16_000_000, ["explore"]),
    "LockedRoom": (16_000_000, ["explore"]),
    "MultiRoom": (10_000_000, ["explore"]),
    "ObstructedMaze": (16_000_000, ["explore"]),
    "Fetch": (5_000_000, ["mission", "long mission"]),
    "GoToDoor": (5_000_000, ["mission", "long mission"]),
    "GoToObject": (5_000_000, ["mission", "long mission"]),
    "PutNear": (8_000_000, ["long mission", "explore"]),
    "Playground": (0, []),
}
GOOD = 0.95  # success rate that needs no other set of flags
HEADER = ["flags", "timesteps", "steps to 0.9", "success", "in Farama's"]


def family(env_id):
    """Returns (steps, names of sets of flags) of an id."""
    return FAMILIES[max(filter(env_id.startswith, FAMILIES), key=len)]


def best(rows):
    """Returns (name of the set, row) with the highest success rate."""
    return max(rows.items(), key=lambda item: item[1]["success_rate"])


def cells(env_id, rows):
    """Returns the table cells of an id."""
    if not family(env_id)[1]:
        return ["gives no reward", *[""] * (len(HEADER) - 1)]
    if not rows:
        return ["not run", *[""] * (len(HEADER) - 1)]
    name, row = best(rows)
    tried = f", best of {len(rows)}" if len(rows) > 1 else ""
    reached = row["steps_to_0.9"]
    return [
        name.split(" in ")[0] + tried,  # the next column contains the steps
        f"{row['total_timesteps']:,}",
        "-" if reached is None else f"{reached:,}",
        f"{row['success_rate']:.3f}",
        f"{row['farama_success_rate']:.3f}",
    ]


def write_table(results, page):
    """Writes the results into the page's table."""
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
        if not line.startswith("| "):
            continue
        env_id = line.strip("| ").split(" | ")[0]
        if env_id == "id":
            new = HEADER
        elif env_id == "--":
            new = ["--"] * len(HEADER)
        else:
            new = cells(env_id, results.get(env_id, {}))
        lines[i] = "| " + " | ".join([env_id, *new]) + " |"
    page.write_text("\n".join(lines) + "\n")


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    ids = [env_id.removeprefix("MiniGrid-") for env_id in script.ENVIRONMENTS]
    ids = [env_id for env_id in ids if "NoCue" not in env_id]
    parser.add_argument("ids", nargs="*", help="for example MemoryS7-v0; default: all")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=512, help="episodes per evaluation")
    parser.add_argument("--flags", choices=SETS, help="set of flags; default: the family's")
    parser.add_argument("--total-timesteps", type=int, help="default: the family's")
    parser.add_argument("--weights", metavar="RUN", help="run whose weights are the initial ones")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, help="page with the table")
    folder = f"{tempfile.gettempdir()}/minigrid_ids"
    parser.add_argument("--folder", default=folder, help="folder for runs and videos")
    choice = parser.parse_args()
    if unknown := set(choice.ids) - set(ids):
        parser.error(f"unknown ids {unknown}; choose from {ids}")
    choice.cut = choice.img_obs = False
    choice.eval_mode = "greedy"

    def read():
        return json.loads(choice.out.read_text()) if choice.out.exists() else {}

    if choice.table:
        return write_table(read(), choice.page)
    before = ""
    if choice.weights:
        with minigrid_count_bonus.installed():  # the run may contain its flag
            smaller, params = script.load_run(choice.weights)
        before = f" after {smaller.env_id.removeprefix('MiniGrid-')}"
        weights = jax.tree.map(lambda x: x[0], params)
        script.init_agent = lambda args, key, env: weights
    for attempt in range(max(len(sets) for _, sets in FAMILIES.values())):
        for env_id in choice.ids or ids:
            steps, sets = family(env_id)
            sets = [choice.flags] if choice.flags else sets
            rows = read().get(env_id, {})
            if attempt >= len(sets) or rows and best(rows)[1]["success_rate"] >= GOOD:
                continue
            name, options = sets[attempt] + before, dict(SETS[sets[attempt]])
            if choice.total_timesteps:
                name += f" in {choice.total_timesteps:,} steps"
            if name in rows:
                continue
            options["total_timesteps"] = choice.total_timesteps or steps
            row = minigrid_learning.run(env_id, options, choice)
            del row["args"]
            results = read()  # again: other processes may have written
            results.setdefault(env_id, {})[name] = row
            choice.out.write_text(json.dumps(results, indent=1) + "\n")
            successes = f"{row['success_rate']:.3f}, in Farama's {row['farama_success_rate']:.3f}"
            print(f"{env_id}, {name}: {successes}", flush=True)
            write_table(results, choice.page)
            jax.clear_caches()


if __name__ == "__main__":
    main()
