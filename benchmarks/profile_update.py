"""Where the time of one PPO update goes: XLA's operations with their total and single durations.

    python benchmarks/profile_update.py ppo_cartpole_jax --top 20
    python benchmarks/profile_update.py ppo_cartpole_jax num_steps=128 num_envs=256

The durations are busy time of one core or of the device's own clock; on a CPU several operations
run side by side, so their sum may exceed the wall time of an update.
"""

import argparse
import collections
import gzip
import importlib
import json
import pathlib
import re
import tempfile
import time

import jax
import jax.numpy as jnp
from sps import parse_fields, prepare

UPDATES = 5


def trace_events(folder):
    """Complete events of the newest trace in a folder, without the Python frames."""
    (path,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    return [event for event in events if not event["name"].startswith("$")]


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("script")
    parser.add_argument("fields", nargs="*", help="fields of the script's Args, name=value")
    parser.add_argument("--top", type=int, default=15, help="operations to list")
    choice = parser.parse_intermixed_args()
    jax.config.update("jax_enable_compilation_cache", False)  # Atari's programs hold addresses
    script = importlib.import_module(choice.script)
    intervals = {"log_interval": UPDATES, "checkpoint_interval": UPDATES}  # all in one chunk
    args, state, pool = prepare(script, **intervals | parse_fields(choice.fields))
    chunk = script.make_train_chunk(args, *pool).lower(state, jnp.int32(1)).compile()
    # Every line of the optimised program:
    # %name = shape operation(...), metadata={op_name="where it comes from"}
    pattern = re.compile(r"\s*(?:ROOT )?%(\S+) = (\S+) ")
    origin = {}
    for line in chunk.as_text().splitlines():
        if match := pattern.match(line):
            name, shape = match.groups()
            source = re.search(r'op_name="([^"]*)"', line)
            place = source[1].split("/", 3)[-1][-60:] if source else ""
            origin[name] = f"{shape.split('{')[0]} {place}"
    state, _ = jax.block_until_ready(chunk(state, jnp.int32(UPDATES)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            start = time.perf_counter()
            jax.block_until_ready(chunk(state, jnp.int32(UPDATES)))
            seconds = time.perf_counter() - start
        durations = collections.defaultdict(list)
        for event in trace_events(folder):
            durations[event["name"]].append(event["dur"])
    milliseconds, steps = 1e3 * seconds / UPDATES, args.batch_size * args.num_seeds
    print(f"{milliseconds:.2f} ms per update of {steps} steps (traced)")
    print(f"{'ms/update':>10} {'calls':>7} {'us/call':>9}  operation")
    by_time = sorted(durations.items(), key=lambda item: -sum(item[1]))
    for name, spent in by_time[: choice.top]:
        per_update = sum(spent) / UPDATES / 1e3, len(spent) / UPDATES, sum(spent) / len(spent)
        print("{:10.3f} {:7.1f} {:9.1f}  ".format(*per_update) + f"{name} {origin.get(name, '')}")


if __name__ == "__main__":
    main()
