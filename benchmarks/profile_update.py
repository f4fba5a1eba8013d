"""Where the time of one PPO update goes: XLA's operations with their total and single durations.

    python benchmarks/profile_update.py ppo_cartpole_jax --top 20
    python benchmarks/profile_update.py ppo_cartpole_jax num_steps=128 num_envs=256

The durations are busy time of one core or of the device's own clock; on a CPU several operations run side by side, so
their sum may exceed the wall time of an update.
"""

import argparse
import ast
import collections
import gzip
import importlib
import json
import pathlib
import re
import sys
import tempfile
import time

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

UPDATES = 5


def trace_events(folder):
    """Complete events of the newest trace in a folder, without the Python frames."""
    (path,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and not event["name"].startswith("$")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("fields", nargs="*", help="fields of the script's Args, name=value")
    parser.add_argument("--top", type=int, default=15, help="operations to list")
    choice = parser.parse_args()
    script = importlib.import_module(choice.script)
    changes = {name: ast.literal_eval(text) for name, text in (field.split("=") for field in choice.fields)}
    args = script.Args(**{"total_timesteps": 10**12, **changes})
    pool = [script.make_env(args)] if hasattr(script, "make_pool") else []  # Atari's emulators
    state = script.init_train_state(args, script.seed_keys(args), *pool)
    chunk = script.make_train_chunk(args, *pool).lower(state, jnp.int32(1)).compile()
    # Every line of the optimised program: %name = shape operation(...), metadata={op_name="where it comes from"}
    lines = (re.match(r"\s*(?:ROOT )?%(\S+) = (\S+) ", line) and line for line in chunk.as_text().splitlines())
    origin = {}
    for line in filter(None, lines):
        name, shape = re.match(r"\s*(?:ROOT )?%(\S+) = (\S+) ", line).groups()
        source = re.search(r'op_name="([^"]*)"', line)
        origin[name] = f"{shape.split('{')[0]} {source[1].split('/', 3)[-1][-60:] if source else ''}"
    state, _ = jax.block_until_ready(chunk(state, jnp.int32(UPDATES)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            start = time.perf_counter()
            jax.block_until_ready(chunk(state, jnp.int32(UPDATES)))
            seconds = time.perf_counter() - start
        durations = collections.defaultdict(list)
        for event in trace_events(folder):
            durations[event["name"]].append(event["dur"])
    print(f"{1e3 * seconds / UPDATES:.2f} ms per update of {args.batch_size * args.num_seeds} steps (traced)")
    print(f"{'ms/update':>10} {'calls':>7} {'us/call':>9}  operation")
    for name, spent in sorted(durations.items(), key=lambda item: -sum(item[1]))[: choice.top]:
        per_update = sum(spent) / UPDATES / 1e3, len(spent) / UPDATES, sum(spent) / len(spent)
        print("{:10.3f} {:7.1f} {:9.1f}  ".format(*per_update) + f"{name} {origin.get(name, '')}")


if __name__ == "__main__":
    main()
