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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from sps import parse_fields, prepare

UPDATES = 5


class Operation(NamedTuple):
    """What an operation of XLA, or a kernel of a GPU, took in an update."""

    name: str
    milliseconds: float  # of all its calls
    calls: float
    origin: str  # shape of the result and the place in the program


def trace_events(folder):
    """Complete events of the newest trace in a folder, without the Python frames.

    Of a GPU only its streams: what the host does meanwhile is traced too, and each kernel is shown
    again under the operation and the module that it belongs to.
    """
    (path,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
    on_gpu = jax.default_backend() == "gpu"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return kernel_events(events, needs_streams=on_gpu)


def kernel_events(events, needs_streams=False):
    """See `trace_events`; of the events of a trace. RuntimeError without the streams it needs."""
    streams = set()
    processes = {}  # number -> name
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
    for event in events:
        on_device = "/device:" in processes.get(event.get("pid"), "")
        if on_device and event.get("name") == "thread_name":
            if event["args"]["name"].startswith("Stream"):
                streams.add((event["pid"], event["tid"]))
    if needs_streams and not streams:
        raise RuntimeError("the trace has no kernels of the GPU, only what the host did")
    events = [event for event in events if event.get("ph") == "X"]
    if streams:
        return [event for event in events if (event["pid"], event["tid"]) in streams]
    return [event for event in events if not event["name"].startswith("$")]


def profile(name, updates=UPDATES, **changes):
    """Traces some updates of a script whose `Args` have these changes; too many fill the trace.

    Returns (milliseconds per update, steps per update, `Operation`s, the longest first).
    """
    script = importlib.import_module(name)
    intervals = {"log_interval": updates, "checkpoint_interval": updates}  # all in one chunk
    args, state, pool = prepare(script, **intervals | changes)
    chunk = script.make_train_chunk(args, *pool).lower(state, jnp.int32(1)).compile()
    # Every line of the optimised program:
    # %name = shape operation(...), metadata={op_name="where it comes from"}
    pattern = re.compile(r"\s*(?:ROOT )?%(\S+) = (\S+) ")
    origin = {}
    for line in chunk.as_text().splitlines():
        if match := pattern.match(line):
            instruction, shape = match.groups()
            source = re.search(r'op_name="([^"]*)"', line)
            place = source[1].split("/", 3)[-1][-60:] if source else ""
            origin[instruction] = f"{shape.split('{')[0]} {place}"
    state, _ = jax.block_until_ready(chunk(state, jnp.int32(updates)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            start = time.perf_counter()
            jax.block_until_ready(chunk(state, jnp.int32(updates)))
            seconds = time.perf_counter() - start
        events = trace_events(folder)
    durations, instruction_of = collections.defaultdict(list), {}
    for event in events:
        durations[event["name"]].append(event["dur"])
        # A GPU's kernel says which operation it computes; on a CPU the event is the operation.
        instruction_of[event["name"]] = event.get("args", {}).get("hlo_op", event["name"])
    operations = [
        Operation(
            name=kernel,
            milliseconds=sum(spent) / updates / 1e3,
            calls=len(spent) / updates,
            origin=origin.get(instruction_of[kernel], ""),
        )
        for kernel, spent in durations.items()
    ]
    operations.sort(key=lambda operation: -operation.milliseconds)
    return 1e3 * seconds / updates, args.batch_size * args.num_seeds, operations


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("script")
    parser.add_argument("fields", nargs="*", help="fields of the script's Args, name=value")
    parser.add_argument("--top", type=int, default=15, help="operations to list")
    choice = parser.parse_intermixed_args()
    jax.config.update("jax_enable_compilation_cache", False)  # Atari's programs hold addresses
    milliseconds, steps, operations = profile(choice.script, **parse_fields(choice.fields))
    print(f"{milliseconds:.2f} ms per update of {steps} steps (traced)")
    print(f"{'ms/update':>10} {'calls':>7} {'us/call':>9}  operation")
    for operation in operations[: choice.top]:
        each = 1e3 * operation.milliseconds / operation.calls
        numbers = f"{operation.milliseconds:10.3f} {operation.calls:7.1f} {each:9.1f}"
        print(f"{numbers}  {operation.name} {operation.origin}")


if __name__ == "__main__":
    main()
