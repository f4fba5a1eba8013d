"""Which default flags solve MiniGrid's levels soonest: a grid of flags, level by level.

    python benchmarks/minigrid_flags.py            # steps until a return of 0.9, seed by seed
    python benchmarks/minigrid_flags.py --speed    # on a quiet machine: seconds of an update
    python benchmarks/minigrid_flags.py --table    # of both: seconds of training until 0.9

A run ends when the mean return of the last finished episodes of all environments is 0.9, as in
time_to_solve.py, or after so many steps as LEVELS has; the learning rate falls as in a run of that
length. Results go to benchmarks/results/minigrid_flags.json after every run; runs that stand there
are not repeated.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import time

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sps import compiled  # noqa: E402

import ppo_minigrid_rnn as script  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "minigrid_flags.json"
LEVELS = {"Empty-8x8": 300_000, "DoorKey-6x6": 800_000, "LavaGapS7": 600_000, "Unlock": 1_000_000}
THRESHOLD = 0.9
SPEED_UPDATES = 5
SETS = [  # environments x steps, epochs x minibatches, learning rate
    "64x128, 4x16, 1e-3",
    "64x128, 4x16, 2e-3",
    "64x128, 2x16, 1e-3",
    "64x128, 2x16, 2e-3",
    "128x64, 4x16, 1e-3",
    "128x64, 2x16, 2e-3",
    "64x64, 4x16, 1e-3",
    "64x64, 3x16, 1e-3",
    "64x64, 2x16, 1e-3",
    "64x64, 2x16, 2e-3",
    "64x32, 4x16, 1e-3",
]


def flags_of(words):
    """{flag: value} of such a set; further flags, which are floats, may follow: ", gamma=0.99"."""
    shape, passes, rate, *others = words.split(", ")
    num_envs, num_steps = map(int, shape.split("x"))
    epochs, minibatches = map(int, passes.split("x"))
    flags = dict(num_envs=num_envs, num_steps=num_steps, update_epochs=epochs)
    flags |= dict(num_minibatches=minibatches, learning_rate=float(rate))
    return flags | {name: float(value) for name, value in (x.split("=") for x in others)}


def prepare(args):
    """(init, update), compiled."""
    init = compiled(script, args, script.init_train_state, jax.random.key(0), level=0)
    state = init(jax.random.key(0))
    return init, compiled(script, args, script.update, state, donate_argnums=1)


def measure_seconds(sets, rounds=5):
    """Seconds of an update with each set of flags: medians, in turn."""
    programs = {}
    for words in sets:
        args = script.Args(**flags_of(words))
        init, update = prepare(args)
        programs[words] = update, [init(jax.random.key(1))]
        print(f"compiled {words}", flush=True)
    seconds = {words: [] for words in sets}
    for _ in range(rounds):
        for words, (update, carry) in programs.items():
            start = time.perf_counter()
            for _ in range(SPEED_UPDATES):
                carry[0], _ = update(carry[0])
            jax.block_until_ready(carry[0])
            seconds[words].append((time.perf_counter() - start) / SPEED_UPDATES)
    return {words: statistics.median(row) for words, row in seconds.items()}


def steps_to_threshold(args, update, state):
    """Trains until THRESHOLD; returns the steps, or None if it was not reached."""
    limit = script.make_env(args).max_episode_steps  # before it only lucky episodes have ended
    for number in range(1, int(args.num_updates) + 1):
        state, metrics = update(state)
        is_solved = float(metrics["charts/episodic_return"]) >= THRESHOLD
        if is_solved and number * args.num_steps >= limit:
            return number * args.batch_size
    return None


def run(level, words, total_timesteps, seeds, save):
    """Trains each seed; calls `save(seed, row)` after each."""
    args = script.Args(env_id=level, total_timesteps=total_timesteps, **flags_of(words))
    init, update = prepare(args)
    for seed in seeds:
        start = time.perf_counter()
        steps = steps_to_threshold(args, update, init(jax.random.key(seed)))
        row = {"steps": steps, "seconds": time.perf_counter() - start}
        save(seed, row | {"date": datetime.date.today().isoformat(), "jax": jax.__version__})


def print_table(results):
    """A line for each set of flags: seconds of training until 0.9, and seeds that reach it."""
    speed, runs = results["seconds_of_an_update"], results["runs"]
    for words, seconds in speed.items():
        flags = flags_of(words)
        batch, texts = flags["num_envs"] * flags["num_steps"], []
        for level in LEVELS:
            rows = [row for name, row in runs.items() if name.startswith(f"{level}; {words}; ")]
            if not rows:
                continue
            times = [(row["steps"] or float("inf")) / batch * seconds for row in rows]
            solved = sum(row["steps"] is not None for row in rows)
            texts.append(f"{level} {statistics.median(times):5.1f} s, {solved} of {len(rows)}")
        print(f"{words:30} {batch / seconds:7,.0f} SPS | {' | '.join(texts)}")


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--sets", nargs="+", default=SETS, help='such as "64x128, 4x16, 1e-3"')
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=list(LEVELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-timesteps", type=int, help="instead of those in LEVELS")
    parser.add_argument("--speed", action="store_true", help="seconds of an update instead")
    parser.add_argument("--table", action="store_true", help="print the results instead")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    device = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"

    def read():
        if choice.out.exists():
            return json.loads(choice.out.read_text())
        return {"seconds_of_an_update": {}, "runs": {}}

    def write(results):
        choice.out.write_text(json.dumps(results, indent=1) + "\n")

    if choice.table:
        return print_table(read())
    if choice.speed:
        results = read()
        results["seconds_of_an_update"] |= measure_seconds(choice.sets)
        return write(results | {"speed_device": device})
    for words in choice.sets:
        for level in choice.levels:
            name = f"{level}; {words}; seed "
            seeds = [n for n in range(1, choice.seeds + 1) if f"{name}{n}" not in read()["runs"]]

            def save(seed, row, name=name):
                results = read()
                results["runs"][f"{name}{seed}"] = row
                write(results)
                print(f"{name}{seed}: {row['steps']}, {row['seconds']:.0f} s", flush=True)

            if seeds:
                run(level, words, choice.total_timesteps or LEVELS[level], seeds, save)


if __name__ == "__main__":
    main()
