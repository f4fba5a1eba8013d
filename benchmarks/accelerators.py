"""Compiles the scripts for GPUs and TPUs without having one, and reads the compiled programs.

    python benchmarks/accelerators.py --target h100 --script cartpole --num-envs 4096
    python benchmarks/accelerators.py --target v5e --devices 4 --script minigrid --loops
    python benchmarks/accelerators.py --table --out FILE   # SETTINGS and PRESETS, h100 and v5e

XLA compiles for devices that are not there, with the same passes as if they were. What runs on a
chip can so be counted: kernels, loops, copies, sorts, collectives, memory. Times are estimates from
these counts, good for ratios; ASSUMPTIONS, printed with every report, says how they are made.

Each family of chips needs its plugin, and a virtual environment of its own, because the plugins
should not meet:

    python -m venv tpu && tpu/bin/pip install -r benchmarks/accelerators-tpu-requirements.txt
    python -m venv cuda && cuda/bin/pip install -r benchmarks/accelerators-cuda-requirements.txt

`--table` compiles what the environment at hand can and keeps the other rows of FILE, so run it once
in each, one after the other or side by side; it writes FILE after every setting.

Flags that are not listed below go to the script. `--scripts-dir FOLDER` compiles other versions of
the scripts, which must have the same functions in their section "Seeds and devices".
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

# There is no device: JAX itself runs on the CPU, and libtpu must not look for its machine.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")
os.environ.update(TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_ID="0")
os.environ.update(TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = ("ppo_cartpole_jax", "ppo_swingup_jax", "ppo_minigrid_rnn", "ppo_atari_envpool_xla_jax")
PROGRAMS = ("train", "init", "evaluate")
LAUNCH = 1.5e-6  # s from one kernel of a GPU to the next; assumed, not measured

ASSUMPTIONS = {
    "cuda": "A kernel takes 1.5 microseconds plus the longer of its bytes over the memory's "
    "bandwidth and its products over the peak below (roofline alone: without the 1.5 "
    "microseconds). Bytes are those of operands and results, of slices just the slice. Caches, "
    "occupancy and the host's share of loops and of data-dependent decisions are not counted; "
    "products are not autotuned. EnvPool's calls count as a kernel each, without emulation. All "
    "loops are driven by the host: XLA's CUDA graphs hold none unless it is told to.",
    "tpu": "An operation takes the cycles that the compiler estimates, at the clock below; one "
    "without an estimate (gathers, slices) its bytes over the bandwidth, asynchronous copies "
    "nothing. Roofline alone: the longer of bytes in the chip's main memory over its bandwidth and "
    "products over the peak.",
    "both": "Loops count as often as they are known to run, those whose length depends on data "
    "once, and of a conditional all branches. One update, the loop over updates counted once.",
}


# ==================================================================================================
# Chips
# ==================================================================================================


@dataclasses.dataclass(frozen=True)
class Chip:
    """What estimates need to know of a chip."""

    platform: str  # as jax.export and XLA's topologies name it
    bandwidth: float  # of main memory, bytes/s
    peak: float  # products, flops/s
    clock: float | None  # Hz of the compiler's cycles; None where it does not estimate any
    topologies: dict  # number of devices -> topology that has as many, or more


CUDA_TOPOLOGIES = {1: "1x1x1", 4: "1x1x4"}  # hosts x processes x GPUs
# Bandwidths and TPUs' peaks (bfloat16) are from data sheets. GPUs' peaks are what float32 products
# may reach in practice with their inputs rounded to TF32.
CHIPS = {
    "h100": Chip("cuda", 3350e9, 250e12, None, CUDA_TOPOLOGIES),
    "a100": Chip("cuda", 2039e9, 100e12, None, CUDA_TOPOLOGIES),
    "v5e": Chip("tpu", 819e9, 197e12, 1.5e9, {1: "v5e:2x2", 4: "v5e:2x2"}),
    "v6e": Chip("tpu", 1640e9, 918e12, 1.75e9, {1: "v6e:2x2", 4: "v6e:2x2"}),
    "v5p": Chip("tpu", 2765e9, 459e12, 1.75e9, {1: "v5p:2x2x1", 4: "v5p:2x2x1"}),
}
PLUGINS = {"cuda": "jax_cuda13_plugin", "tpu": "libtpu"}


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU as its data sheet and the tables of the CUDA programming guide describe it."""

    name: str
    capability: tuple  # compute capability, (major, minor)
    own_instructions: bool  # kernels may use instructions of this very generation (sm_90a)
    multiprocessors: int
    lanes: int  # float32 units of a multiprocessor
    clock: float  # GHz, boosted
    memory_clock: float  # GHz; two transfers a cycle
    memory_bus: int  # bits
    memory: int  # bytes
    cache: int  # L2, bytes
    shared_memory: int  # of a multiprocessor, bytes; a block may have all but 1 KiB


GPUS = {
    "h100": GPU(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        own_instructions=True,
        multiprocessors=132,
        lanes=128,
        clock=1.98,
        memory_clock=2.619,
        memory_bus=5120,
        memory=80 * 2**30,
        cache=50 * 2**20,
        shared_memory=228 * 2**10,
    ),
    "a100": GPU(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        own_instructions=False,
        multiprocessors=108,
        lanes=64,
        clock=1.41,
        memory_clock=1.593,
        memory_bus=5120,
        memory=80 * 2**30,
        cache=40 * 2**20,
        shared_memory=164 * 2**10,
    ),
}


def describe_gpu(gpu):
    """A `GPU` as the text of XLA's message GpuTargetConfigProto."""
    major, minor = gpu.capability
    capability = {"major": major, "minor": minor}
    if gpu.own_instructions:
        capability["feature_extension"] = "ACCELERATED_FEATURES"
    device = {
        # The same for all of NVIDIA's GPUs since 2020:
        "threads_per_warp": 32,
        "threads_per_block_limit": 1024,
        "threads_per_core_limit": 2048,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 * 2**10,  # without asking for more
        "device_address_bits": 64,
        "device_vendor": "NVIDIA Corporation",
        "ecc_enabled": True,
        "pcie_bandwidth": 32 * 2**30,  # bytes/s
        # This one:
        "name": gpu.name,
        "model_str": gpu.name,
        "cuda_compute_capability": capability,
        "core_count": gpu.multiprocessors,
        "fpus_per_core": gpu.lanes,
        "clock_rate_ghz": gpu.clock,
        "memory_bandwidth": round(2 * gpu.memory_clock * 1e9 * gpu.memory_bus / 8),
        "device_memory_size": gpu.memory,
        "l2_cache_size": gpu.cache,
        "shared_memory_per_core": gpu.shared_memory,
        "shared_memory_per_block_optin": gpu.shared_memory - 2**10,
        # The software that would be there:
        "driver_version": "13.0.0",
        "runtime_version": "13.0.0",
        "compile_time_toolkit_version": "13.0.0",
        "dnn_version": "9.10.0",
    }
    return text_proto(
        {
            "gpu_device_info": device,
            "platform_name": "CUDA",
            "dnn_version_info": {"major": 9, "minor": 10, "patch": 0},
            "device_description_str": gpu.name,
        }
    )


def text_proto(message):
    """Nested dicts in the text format of protocol buffers; upper-case words are enumerators."""
    lines = []
    for name, value in message.items():
        if isinstance(value, dict):
            lines.append(f"{name} {{\n{text_proto(value)}}}\n")
        elif isinstance(value, str) and not re.fullmatch(r"[A-Z]+_[A-Z_]+", value):
            lines.append(f'{name}: "{value}"\n')
        else:
            lines.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}\n")
    return "".join(lines)


def make_topology_mesh(target, num_devices, axis):
    """A mesh of devices that are not there, for compilation only."""
    from jax.experimental import topologies

    chip = CHIPS[target]
    shape = chip.topologies[num_devices]
    if chip.platform == "cuda":
        config = describe_gpu(GPUS[target])
        options = {"topology": shape, "target_config": config}
        topology = topologies.get_topology_desc("", platform="cuda", **options)
    else:
        topology = topologies.get_topology_desc(shape, platform="tpu")
    return jax.sharding.Mesh(np.array(topology.devices[:num_devices]), (axis,))


# ==================================================================================================
# Reading compiled programs: XLA's text format
# ==================================================================================================


ITEM_BITS = {"pred": 8, "token": 0}  # of types whose name does not end in their bits


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a computation: `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: list  # names
    arguments: str  # the text between the brackets, for constants
    attributes: str

    def attribute(self, name):
        """The name that an attribute like body=%name refers to, or None."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found and found[1]

    @property
    def target(self):
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]+)"', self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self):
        """JAX's path of names to the operation."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def kind(self):
        """The opcode, with what a custom call calls; pool addresses and the like left out."""
        if self.opcode != "custom-call":
            return self.opcode
        return f"custom-call {re.sub(r'[0-9]{6,}', '', self.target)}"


class Module:
    """A compiled program: computations of instructions, and where in Python these come from."""

    def __init__(self, text):
        self.computations = {}  # name -> [Instruction]
        self.entry = None
        self.types = {}  # instruction's name -> its type
        current = None
        for line in text.splitlines():
            start = re.match(r"(ENTRY )?%?([\w.\-<>]+) \(.*->.*\{\s*$", line)
            if current is None and start:
                current = self.computations[start[2]] = []
                if start[1]:
                    self.entry = start[2]
            elif line.startswith("}"):
                current = None
            elif current is not None:
                instruction = parse_instruction(line)
                if instruction:
                    current.append(instruction)
                    self.types[instruction.name] = instruction.type
        if self.entry is None:
            raise ValueError("no entry computation: is this the text of a compiled program?")
        self._read_stack_frames(text)

    def _read_stack_frames(self, text):
        """The tables behind stack_frame_id=...: frames name a location and the calling frame."""
        self._functions = dict(re.findall(r'^(\d+) "(.*)"$', section(text, "FunctionNames"), re.M))
        locations = section(text, "FileLocations")
        location = re.compile(r"^(\d+) \{.*function_name_id=(\d+)", re.M)
        self._locations = dict(location.findall(locations))
        frame = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.M)
        frames = frame.findall(section(text, "StackFrames"))
        self._frames = {number: (place, parent) for number, place, parent in frames}

    @functools.cache  # noqa: B019 (a module lives as long as the report on it)
    def stack(self, instruction):
        """Python functions that an instruction comes from, the outermost first."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        number, functions = found and found[1], []
        while number in self._frames and len(functions) < 200:
            place, parent = self._frames[number]
            functions.append(self._functions.get(self._locations.get(place), ""))
            # Parents are numbered from 1 for "none".
            number = str(int(parent or 1) - 1)
        return tuple(reversed(functions))

    def called(self, instruction):
        """Names of the computations that run as part of a loop, conditional or call."""
        if instruction.opcode == "while":
            return [instruction.attribute("body")]
        if instruction.opcode == "call":
            return [instruction.attribute("to_apply")]
        if instruction.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
            if branches:
                return re.findall(r"%?([\w.\-]+)", branches[1])
            names = "true_computation", "false_computation"
            return [instruction.attribute(name) for name in names]
        return []

    def trip_count(self, loop):
        """How often a while loop runs, None where that depends on data."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if found:
            return int(found[1])
        # The condition may still compare a counter with a constant, perhaps inside a fusion.
        condition = self.computations[loop.attribute("condition")]
        for instruction in condition[-1:]:
            if instruction.opcode == "fusion":
                condition = condition + self.computations[instruction.attribute("calls")]
        scalar = re.compile(r"s32\[\](\{[^}]*\})?$")
        constants = [x for x in condition if x.opcode == "constant" and scalar.match(x.type)]
        compares = [x for x in condition if x.opcode == "compare"]
        simple = {"parameter", "get-tuple-element", "constant", "compare", "fusion", "bitcast"}
        if len(constants) == 1 and len(compares) == 1 and {x.opcode for x in condition} <= simple:
            if "direction=LT" in compares[0].attributes:
                return int(constants[0].arguments)
        return None


def section(text, title):
    """The lines under a title in the head of a program's text."""
    found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
    return found[1] if found else ""


def matching_bracket(text, start):
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"a bracket stays open: {text[:80]}")


def parse_instruction(line):
    """The `Instruction` of a line, None where there is none."""
    found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)
    if not found:
        return None
    name, rest = found.groups()
    end = matching_bracket(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, rest = rest[:end], rest[end:].lstrip()
    opcode = re.match(r"([\w\-]+)\(", rest)
    if not opcode:
        return None
    close = matching_bracket(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : close]
    return Instruction(
        name=name,
        type=type_,
        opcode=opcode[1],
        operands=re.findall(r"%([\w.\-]+)", arguments),
        arguments=arguments,
        attributes=rest[close + 1 :],
    )


def arrays(type_):
    """[(element type, shape, layout)] of the arrays in a type."""
    found = re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?", type_)
    return [(item, tuple(int(n) for n in dims.split(",") if n), lay) for item, dims, lay in found]


def shape_of(type_):
    """Shape of the first array in a type."""
    return arrays(type_)[0][1]


class Bytes(NamedTuple):
    """Bytes in main memory, and in the memories on a TPU's chip."""

    main: float
    chip: float

    @property
    def total(self):
        return self.main + self.chip


def bytes_of(type_):
    """`Bytes` of all arrays in a type; S(1) and S(6) in a layout are memories on a TPU's chip."""
    main = chip = 0
    for item, shape, layout in arrays(type_):
        bits = re.search(r"\d+", item)
        bits = ITEM_BITS.get(item, int(bits[0]) if bits else 8)
        size = math.prod(shape) * max(bits, 8 if bits else 0) // 8
        if re.search(r"S\([16]\)", layout):
            chip += size
        else:
            main += size
    return Bytes(main, chip)


def add_bytes(parts):
    """Sum of some `Bytes`."""
    parts = list(parts)
    return Bytes(sum(part.main for part in parts), sum(part.chip for part in parts))


# ==================================================================================================
# Work of one instruction
# ==================================================================================================


class Work(NamedTuple):
    """What an instruction moves and computes when it runs once."""

    bytes: Bytes
    flops: float  # of matrix products
    convolution_flops: float


def numbers(text, pattern):
    """The whole numbers of the first match of a pattern's group."""
    found = re.search(pattern, text)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []


def product_flops(module, instruction):
    """Two for each multiplication with addition of a product; operands [..., k, ...]."""
    if instruction.opcode == "dot":
        axes = numbers(instruction.attributes, r"lhs_contracting_dims=\{([\d,]*)\}")
    elif re.search("gemm|cublas", instruction.target):
        axes = numbers(instruction.attributes, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
    else:
        return 0
    left = shape_of(module.types[instruction.operands[0]])
    return 2 * math.prod(shape_of(instruction.type)) * math.prod(left[axis] for axis in axes)


def convolution_flops(module, instruction):
    """Two for each multiplication with addition of a convolution, those with padding not counted.

    cuDNN's calls for gradients describe the forward convolution of the same arrays.
    """
    is_call = "conv" in instruction.target and "cudnn" in instruction.target
    if instruction.opcode != "convolution" and not is_call:
        return 0
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes).groups()
    image, kernel = [shape_of(module.types[name]) for name in instruction.operands[:2]]
    out = shape_of(instruction.type)
    if "BackwardInput" in instruction.target:
        image, out = out, image
    elif "BackwardFilter" in instruction.target:
        kernel, out = out, kernel
    image, kernel, out = [
        dict(zip(names, shape)) for names, shape in zip(labels, (image, kernel, out))
    ]
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(part.split("=") for part in window[1].split()) if window else {}
    flops = 2 * out["b"] * out["f"] * kernel["i"]
    for i, axis in enumerate(sorted(set(out) - {"b", "f"})):

        def setting(name, default, i=i):  # of this axis, like stride=4x4
            return window[name].split("x")[i] if name in window else default

        flops *= window_pairs(
            image[axis],
            kernel[axis],
            out[axis],
            stride=int(setting("stride", 1)),
            padding=int(setting("pad", "0_0").split("_")[0]),
            image_step=int(setting("lhs_dilate", 1)),
            kernel_step=int(setting("rhs_dilate", 1)),
        )
    return flops


def window_pairs(image, kernel, out, stride, padding, image_step, kernel_step):
    """Pairs of positions of output and kernel, along one axis, that meet an element of the image.

    Lengths of the three; `padding` in front; the elements of image and kernel are so many apart.
    """
    first = np.arange(out)[:, None] * stride - padding
    position = first + np.arange(kernel) * kernel_step
    meets = (position >= 0) & (position <= (image - 1) * image_step) & (position % image_step == 0)
    return int(meets.sum())


def work_of(module, instruction):
    """The `Work` of an instruction."""
    if instruction.opcode == "fusion":
        return fusion_work(module, instruction)
    if instruction.opcode == "dynamic-update-slice":  # in place
        part = bytes_of(module.types[instruction.operands[1]])
        moved = add_bytes([part, part])
    elif instruction.opcode == "dynamic-slice":
        part = bytes_of(instruction.type)
        moved = add_bytes([part, part])
    else:
        types = [module.types.get(name, "") for name in instruction.operands]
        moved = add_bytes(map(bytes_of, [instruction.type, *types]))
    flops = product_flops(module, instruction)
    return Work(moved, flops, convolution_flops(module, instruction))


def fusion_work(module, instruction):
    """The `Work` of a fusion, which reads just the slices that it takes of its operands."""
    body = module.computations[instruction.attribute("calls")]
    by_name = {x.name: x for x in body}
    users = collections.defaultdict(list)  # name -> [(instruction, which of its operands)]
    for x in body:
        for i, name in enumerate(x.operands):
            users[name].append((x, i))

    def read(name, depth=0):
        whole, parts = bytes_of(by_name[name].type), []
        for user, i in users[name]:
            if user.opcode in ("dynamic-slice", "gather", "slice") and i == 0:
                parts.append(bytes_of(user.type))
            elif user.opcode in ("bitcast", "reshape") and depth < 4:
                parts.append(read(user.name, depth + 1))
            elif user.opcode != "dynamic-update-slice" or i > 0:
                return whole
        return min(add_bytes(parts), whole, key=lambda part: part.total)

    def written(x, depth=0):
        if x.opcode == "dynamic-update-slice":
            return bytes_of(by_name[x.operands[1]].type)
        if x.opcode in ("bitcast", "copy") and depth < 3:
            source = by_name[x.operands[0]]
            if source.opcode in ("dynamic-update-slice", "bitcast", "copy"):
                if written(source, depth + 1).total < bytes_of(source.type).total:
                    return written(source, depth + 1)
        return bytes_of(x.type)

    results = [body[-1]]
    if body[-1].opcode == "tuple":
        results = [by_name[name] for name in body[-1].operands]
    moved = [read(x.name) for x in body if x.opcode == "parameter"] + [written(x) for x in results]
    flops = sum(product_flops(module, x) for x in body)
    convolutions = sum(convolution_flops(module, x) for x in body)
    for x in body:
        if x.opcode == "fusion":
            inner = fusion_work(module, x)
            flops, convolutions = flops + inner.flops, convolutions + inner.convolution_flops
    return Work(add_bytes(moved), flops, convolutions)


class Seconds(NamedTuple):
    """Estimated time of something."""

    estimate: float
    roofline: float
    without_convolutions: float  # the estimate, with convolutions' arithmetic for free

    def times(self, count):
        return Seconds(*[count * part for part in self])


def add_seconds(parts):
    """Sum of some `Seconds`."""
    return Seconds(*[sum(part) for part in zip(Seconds(0.0, 0.0, 0.0), *parts)])


def seconds_of(module, instruction, chip):
    """`Seconds` of an instruction that runs once on a chip; see ASSUMPTIONS."""
    work = work_of(module, instruction)
    flops = work.flops + work.convolution_flops
    if chip.clock is None:
        if not is_kernel(instruction):  # the host waits for one
            return Seconds(0.0, 0.0, 0.0)
        memory = work.bytes.total / chip.bandwidth
        roofline = max(memory, flops / chip.peak)
        without = LAUNCH + max(memory, work.flops / chip.peak)
        return Seconds(LAUNCH + roofline, roofline, without)
    roofline = max(work.bytes.main / chip.bandwidth, flops / chip.peak)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles:
        estimate = int(cycles[1]) / chip.clock
    elif re.search("-(start|done|update)$", instruction.opcode):
        return Seconds(0.0, 0.0, 0.0)
    else:
        on_chip = work.bytes.chip / 512 / chip.clock  # 512 bytes a cycle
        estimate = work.bytes.main / chip.bandwidth + on_chip
    return Seconds(estimate, roofline, estimate)


# ==================================================================================================
# The tree of loops
# ==================================================================================================


# What takes no time: it names values, or is part of something else.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id "
    "replica-id iota".split()
)
COLLECTIVES = re.compile("(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)")
# Functions of the scripts that mark the parts of an update.
PHASES = ("rollout", "trajectory_values", "compute_gae", "update_epochs")


@dataclasses.dataclass
class Loop:
    """A loop (or branch, or the whole program) with what one iteration runs itself."""

    label: str  # the Python function it is written in
    phase: str  # part of the update
    trips: int | None  # None: depends on data
    runs: float  # iterations per run of the program, the outermost dynamic loop counted once
    is_loop: bool
    ops: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    collective_bytes: float = 0.0
    own: Seconds = Seconds(0.0, 0.0, 0.0)
    inner: list = dataclasses.field(default_factory=list)

    @property
    def kernels(self):
        """Kernels that one iteration launches itself."""
        return sum(self.ops.values())

    @property
    def all_kernels(self):
        """Kernels of one iteration with all inner loops."""
        return self.kernels + sum((x.trips or 1) * x.all_kernels for x in self.inner)

    @property
    def seconds(self):
        """`Seconds` of one iteration with all inner loops."""
        return add_seconds([self.own, *[x.seconds.times(x.trips or 1) for x in self.inner]])

    def walk(self, depth=0):
        """This loop and all inner ones, with their depth."""
        yield self, depth
        for loop in self.inner:
            yield from loop.walk(depth + 1)


def is_kernel(instruction):
    """Whether an instruction is something that the device is told to run."""
    if instruction.opcode in FREE or instruction.opcode in ("while", "conditional", "call"):
        return False
    return not re.search("-(done|update)$", instruction.opcode)


def label_of(module, instruction):
    """The function an instruction is written in, and whether it belongs to its gradient."""
    names = [name for name in module.stack(instruction) if name and not name.startswith("<")]
    name = names[-1].replace(".<locals>", "") if names else instruction.op_name.split("/")[-1]
    return name + (" (backward)" if "transpose(" in instruction.op_name else "")


def phase_of(module, instruction, enclosing):
    """The part of the update that an instruction belongs to, that of the enclosing loop first."""
    if enclosing:
        return enclosing
    stack = " ".join(module.stack(instruction))
    found = [phase for phase in PHASES if re.search(rf"\b{phase}\b", stack)]
    return found[0] if found else ""


def loop_tree(module, chip, flat=None):
    """The `Loop` of the whole program. `flat` collects (seconds, count, Instruction, label)."""

    def walk(computation, loop):
        for instruction in module.computations[computation]:
            called = module.called(instruction)
            for name in called:
                trips = 1
                if instruction.opcode == "while":
                    trips = module.trip_count(instruction)
                inner = Loop(
                    label=label_of(module, instruction),
                    phase=phase_of(module, instruction, loop.phase),
                    trips=trips,
                    runs=loop.runs * (trips or 1),
                    is_loop=instruction.opcode == "while",
                )
                loop.inner.append(inner)
                walk(name, inner)
            if called or instruction.opcode in FREE:
                continue
            seconds = seconds_of(module, instruction, chip)
            loop.own = add_seconds([loop.own, seconds])
            if is_kernel(instruction):
                loop.ops[instruction.kind] += 1
            if COLLECTIVES.match(instruction.opcode) and is_kernel(instruction):
                loop.collective_bytes += bytes_of(instruction.type).total
            if flat is not None:
                flat.append((seconds.estimate * loop.runs, loop.runs, instruction, loop.label))

    program = Loop(label="program", phase="", trips=1, runs=1, is_loop=False)
    walk(module.entry, program)
    return program


def count_ops(loop, pattern, runs=False):
    """Kernels in a loop and all inner ones whose kind matches; with `runs` as often as they run."""
    total = 0
    for inner, _ in loop.walk():
        matching = sum(n for kind, n in inner.ops.items() if re.search(pattern, kind))
        total += matching * (inner.runs / loop.runs if runs else 1)
    return total


def count_sorts(module):
    """Sorts in all of a program, also those inside fusions."""
    instructions = [x for body in module.computations.values() for x in body]
    return sum(x.opcode == "sort" or "RadixSort" in x.target for x in instructions)


def loop_row(loop, depth):
    """A `Loop` for JSON; microseconds of one iteration."""
    return {
        "depth": depth,
        "loop": loop.label,
        "phase": loop.phase,
        "trips": loop.trips,
        "is_loop": loop.is_loop,
        "kernels": loop.kernels,
        "us": loop.own.estimate * 1e6,
        "us_with_inner": loop.seconds.estimate * 1e6,
        "ms_in_all": loop.seconds.estimate * loop.runs * 1e3,
        "ops": dict(loop.ops.most_common()),
    }


def analyze(text, chip, num_steps=None, minibatches=None):
    """What a compiled program consists of, as a dict for JSON.

    With `num_steps` per update and `minibatches` of all epochs it is a training program: a loop
    over updates, of which one is counted.
    """
    module, flat = Module(text), []
    program = loop_tree(module, chip, flat)
    unit = program
    if num_steps is not None:
        (unit,) = [x for x in program.inner if x.is_loop and x.trips is None]
    loops = [(loop, depth) for loop, depth in unit.walk() if loop is not unit]
    whiles = [loop for loop, _ in loops if loop.is_loop]
    seconds = unit.seconds
    result = {
        "ms": seconds.estimate * 1e3,
        "ms_roofline": seconds.roofline * 1e3,
        "ms_convolutions_free": seconds.without_convolutions * 1e3,
        "kernels": unit.all_kernels,
        "loops": len(whiles),
        "loop_iterations": sum(loop.runs for loop in whiles),
        "host_driven_loops": len(whiles) if chip.platform == "cuda" else 0,
        "host_driven_iterations": sum(x.runs for x in whiles) if chip.platform == "cuda" else 0,
        "data_dependent_loops": [x.label for x in whiles if x.trips is None],
        "data_dependent_runs": sum(x.runs for x in whiles if x.trips is None),
        "sorts": count_sorts(module),
        "copies": count_ops(unit, "^copy"),
        "copies_run": count_ops(unit, "^copy", runs=True),
        "collectives_run": count_ops(unit, COLLECTIVES.pattern, runs=True),
        "float64": len(re.findall(r"\bf64\[[1-9]", text)),
        "host_callbacks": len(re.findall(r"callback|infeed\(|outfeed\(", text)),
        "loop_tree": [loop_row(loop, depth - 1) for loop, depth in loops],
        "straight_line": loop_row(unit, 0),
    }
    if num_steps is not None:
        result |= per_part(unit, num_steps, minibatches)
    kernels, milliseconds = collections.Counter(), collections.Counter()
    for total, runs, instruction, label in flat:
        function = label_of(module, instruction), label
        kernels[function] += runs * is_kernel(instruction)
        milliseconds[function] += total * 1e3
    result["most_kernels"] = [
        {"written_in": name, "in_loop": label, "kernels": count, "ms": milliseconds[name, label]}
        for (name, label), count in kernels.most_common(12)
    ]
    longest = sorted(flat, key=lambda item: item[0], reverse=True)[:12]
    result["longest"] = [
        {
            "ms": total * 1e3,
            "runs": runs,
            "kind": instruction.kind,
            "type": instruction.type.split("{")[0][:48],
            "in_loop": label,
            "written_in": label_of(module, instruction),
        }
        for total, runs, instruction, label in longest
    ]
    return result


def per_part(unit, num_steps, minibatches):
    """Kernels per environment step and minibatch, milliseconds of the parts of an update.

    An environment step is one of all environments together: what the rollout's loops run, by the
    number of steps.
    """
    parts = collections.Counter()
    playing = [loop for loop in unit.inner if loop.phase == "rollout"]
    played = sum((loop.trips or 1) * loop.all_kernels for loop in playing)
    loops = [loop for loop, _ in unit.walk() if loop.is_loop and loop.phase == "update_epochs"]
    minibatch = next((loop for loop in loops if loop.runs == minibatches), None)
    for loop in unit.inner:
        parts[loop.phase or "other"] += loop.seconds.estimate * (loop.trips or 1) * 1e3
    parts["outside of loops"] = unit.own.estimate * 1e3
    result = {"ms_of_parts": dict(parts), "kernels_per_env_step": played / num_steps}
    if minibatch:
        result["kernels_per_minibatch"] = minibatch.all_kernels
        terms = [f"{minibatch.kernels}"]
        for loop, _ in minibatch.walk():
            if loop is not minibatch and loop.kernels:
                terms.append(f"{loop.runs / minibatch.runs:.0f} x {loop.kernels}")
        result["kernels_per_minibatch_terms"] = " + ".join(terms)
        collectives = count_ops(minibatch, COLLECTIVES.pattern, runs=True)
        result["collectives_per_minibatch"] = collectives
        result["collective_bytes_per_minibatch"] = sum(
            loop.collective_bytes * loop.runs / minibatch.runs for loop, _ in minibatch.walk()
        )
    return result


# ==================================================================================================
# Compiling the scripts
# ==================================================================================================


def find_script(word):
    """The full name of a script, from a part of it."""
    names = [name for name in SCRIPTS if word in name]
    if len(names) != 1:
        raise SystemExit(f"--script {word} is not one of {', '.join(SCRIPTS)}")
    return names[0]


def shapes_of(tree, shardings):
    """Shapes and types of a tree, placed by shardings that are a prefix of it."""

    def place(sharding, tree):
        def place_leaf(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(place_leaf, tree)

    is_sharding = lambda x: isinstance(x, jax.sharding.Sharding)
    return jax.tree.map(place, shardings, tree, is_leaf=is_sharding)


class Programs:
    """The programs of a script, traced for the devices of its mesh, which need not be there."""

    def __init__(self, script, args):
        self.script, self.args = script, args
        self.pool = [script.make_env(args)] if hasattr(script, "make_pool") else []
        self.mesh = script.make_mesh(args)
        shapes = jax.eval_shape(functools.partial(script.init_states, args))
        self.state = shapes_of(shapes, script.state_shardings(args))
        self.everywhere = jax.NamedSharding(self.mesh, jax.P())

    def prepare(self, program):
        """Returns the jitted "train", "init" or "evaluate" and the shapes of its arguments."""
        args, script = self.args, self.script
        if program == "train":
            count = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.everywhere)
            return script.make_train_chunk(args, *self.pool), (self.state, count)

        if program == "init":  # as `init_agents` compiles it, on one device
            first = jax.sharding.Mesh(self.mesh.devices.reshape(-1)[:1], self.mesh.axis_names)
            init = jax.jit(
                functools.partial(script.init_states, args),
                out_shardings=jax.NamedSharding(first, jax.P()),
                compiler_options={"xla_backend_optimization_level": 0},
            )
            return init, ()

        keys = jax.eval_shape(functools.partial(script.evaluation_keys, args))
        keys = shapes_of(keys, self.everywhere)
        if not self.pool:
            return script.make_evaluate(args), (self.state.params, keys)
        # The host steps the games; what is compiled chooses their actions.
        shape = (args.num_seeds, args.eval_episodes, *script.OBS_SHAPE)
        obs = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=self.everywhere)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=self.everywhere)
        return script.make_act(args), (self.state.params, obs, keys, step)


def memory_plan(compiled):
    """Megabytes of arguments, results, temporaries and code, of each device."""
    plan = compiled.memory_analysis()
    sizes = {name: getattr(plan, name) for name in dir(plan) if name.endswith("_in_bytes")}
    return {
        name.removesuffix("_in_bytes"): size / 1e6
        for name, size in sizes.items()
        if size and not name.startswith("host_")
    }


def compile_programs(name, words, target, num_devices, programs, folder, hlo=None):
    """Compiles programs of a script; yields a row for each. `words` are flags of the script."""
    sys.path.insert(0, str(folder))
    script = importlib.import_module(name)
    args = script.parse_args([*words, "--num-devices", str(num_devices)])
    mesh = make_topology_mesh(target, num_devices, script.DEVICES)
    script.make_mesh = lambda args: mesh
    prepared = Programs(script, args)
    for program in programs:
        start = time.perf_counter()
        function, inputs = prepared.prepare(program)
        lowered = function.trace(*inputs).lower()
        lowering, cpu = time.perf_counter(), time.process_time()
        compiled = lowered.compile()
        end, cpu_end = time.perf_counter(), time.process_time()
        text = compiled.as_text()
        if hlo:
            hlo.mkdir(parents=True, exist_ok=True)
            (hlo / f"{name}_{target}_{num_devices}_{program}.hlo").write_text(text)
        counts = {}
        if program == "train":
            counts = {
                "num_steps": args.num_steps,
                "minibatches": args.update_epochs * args.num_minibatches,
            }
        row = {
            "script": name,
            "flags": " ".join(words),
            "target": target,
            "devices": num_devices,
            "program": program,
            "trace_seconds": lowering - start,
            "compile_seconds": end - lowering,
            "compile_cpu_seconds": cpu_end - cpu,  # of all threads, on any busy machine the same
            "memory_mb": memory_plan(compiled),
            **analyze(text, CHIPS[target], **counts),
        }
        if program == "train":
            row["env_steps_per_update"] = args.num_seeds * args.batch_size
            row["predicted_sps"] = row["env_steps_per_update"] / row["ms"] * 1e3
        yield row


# ==================================================================================================
# The table
# ==================================================================================================


# Name -> script and flags. Longer runs than the defaults only because a run must hold one update;
# nothing that is compiled depends on it.
SETTINGS = {
    "CartPole 4,096 x 128": (
        "ppo_cartpole_jax",
        "--num-envs 4096 --num-steps 128 --total-timesteps 1e8",
    ),
    "swing-up 16,384 x 128": ("ppo_swingup_jax", "--num-envs 16384"),
    "MiniGrid default": ("ppo_minigrid_rnn", ""),
    # As `sps.py --compare` has it.
    "MiniGrid 1,024 x 16, GRU 64": (
        "ppo_minigrid_rnn",
        "--env-id DoorKey-8x8 --num-envs 1024 --num-steps 16 --update-epochs 1 "
        "--num-minibatches 16 --rnn-hidden-dim 64 --head-hidden-dim 64",
    ),
    # The notebook's setting, as the script's docstring has it.
    "MiniGrid 8,192 x 16, GRU 1,024": (
        "ppo_minigrid_rnn",
        "--env-id Empty-6x6 --total-timesteps 5e6 --num-envs 8192 --num-steps 16 "
        "--update-epochs 1 --num-minibatches 16 --gamma 0.99 --gae-lambda 0.95 --norm-adv "
        "--ent-coef 0.01 --target-kl None --adam-eps 1e-8 --rnn-hidden-dim 1024 "
        "--head-hidden-dim 256",
    ),
    "Atari 128 x 128": ("ppo_atari_envpool_xla_jax", "--num-envs 128"),
}
# One line for one large GPU, of each script; their docstrings and README have them.
PRESETS = {
    "CartPole, for a GPU": (
        "ppo_cartpole_jax",
        "--num-envs 4096 --num-minibatches 16 --total-timesteps 2e7",
    ),
    "swing-up, for a GPU": ("ppo_swingup_jax", "--num-envs 1024"),
    "MiniGrid, for a GPU": ("ppo_minigrid_rnn", "--num-envs 1024 --total-timesteps 2e6"),
    "Atari, for a GPU": (
        "ppo_atari_envpool_xla_jax",
        "--num-envs 64 --num-minibatches 16 --log-interval 2",
    ),
}
TABLE = SETTINGS | PRESETS
TABLE_TARGETS = ("h100", "v5e")
FAILED = "?"  # in place of the program in rows of what could not be compiled
COLUMNS = (
    "setting, program, target, compile s (CPU s), peak MB, ms [roofline], kernels, per env step, "
    "per minibatch, loops by host / on data, sorts, copies, collectives per minibatch"
).split(", ")


def table_row(row):
    """The cells of a row under COLUMNS."""
    setting = row.get("setting") or row["script"]
    if "error" in row:
        return [setting, row["program"], row["target"], row["error"], *[""] * (len(COLUMNS) - 4)]
    memory = row["memory_mb"]
    on_data = f"{len(row['data_dependent_loops'])}"
    if row["data_dependent_loops"]:
        on_data += f" ({row['data_dependent_runs']:,.0f} runs)"
    env_step, minibatch = row.get("kernels_per_env_step"), row.get("kernels_per_minibatch_terms")
    devices = f" x {row['devices']}" if row["devices"] > 1 else ""
    return [
        setting,
        row["program"],
        row["target"] + devices,
        f"{row['compile_seconds']:.0f} ({row['compile_cpu_seconds']:.0f})",
        f"{memory['peak_memory']:,.0f}",
        f"{row['ms']:,.1f} [{row['ms_roofline']:.2g}]",
        f"{row['kernels']:,.0f}",
        "" if env_step is None else f"{env_step:.1f}",
        minibatch or "",
        f"{row['host_driven_loops']} ({row['host_driven_iterations']:,.0f}) / {on_data}",
        f"{row['sorts']}",
        f"{row['copies']} ({row['copies_run']:,.0f} run)",
        f"{row.get('collectives_per_minibatch', 0):.0f}",
    ]


def print_table(rows):
    """All rows as a table in Markdown."""
    cells = [list(COLUMNS), *map(table_row, rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


def print_loops(row):
    """The tree of loops of a program, what has the most kernels, what takes longest."""
    straight = row["straight_line"]
    for part, ms in sorted(row.get("ms_of_parts", {}).items(), key=lambda item: -item[1]):
        print(f"{ms:9.3f} ms {part}")
    print(f"outside of loops: {straight['kernels']} kernels, {straight['us']:,.0f} us")
    for loop in row["loop_tree"]:
        trips = "?" if loop["trips"] is None else loop["trips"]
        ops = ", ".join(f"{n} {kind}" for kind, n in list(loop["ops"].items())[:6])
        kind = f"{trips} x" if loop["is_loop"] else "branch"
        print(
            f"{'  ' * loop['depth']}{kind} {loop['loop']}: {loop['kernels']} kernels, "
            f"{loop['us']:,.1f} us; with inner loops {loop['us_with_inner']:,.1f} us; "
            f"in all {loop['ms_in_all']:,.2f} ms ({ops})"
        )
    print("Functions with the most kernels:")
    for function in row["most_kernels"]:
        print(
            f"{function['kernels']:9,.0f} kernels, {function['ms']:9.3f} ms: "
            f"{function['written_in']} in {function['in_loop']}"
        )
    print("Longest operations:")
    for op in row["longest"]:
        print(
            f"{op['ms']:9.3f} ms = {op['runs']:.0f} x {op['kind']} {op['type']} of "
            f"{op['written_in']} in {op['in_loop']}"
        )


def write_results(path, rows):
    """Rows with versions, date and assumptions as JSON; without a path nothing happens."""
    if path is None:
        return
    result = {
        "command": "python " + " ".join(["benchmarks/accelerators.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "versions": {"jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "assumptions": ASSUMPTIONS
        | {
            name: {"bandwidth": chip.bandwidth, "peak": chip.peak, "clock": chip.clock}
            for name, chip in CHIPS.items()
        },
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: a later run goes on from this file.
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(result, indent=1) + "\n")
    whole.replace(path)


def read_rows(path):
    """Rows of an earlier run; none where there is no file."""
    return json.loads(path.read_text())["rows"] if path and path.is_file() else []


def key_of(row):
    """What a row is about: a later row of the same key takes its place."""
    return row.get("setting"), row["script"], row["target"], row["devices"], row["program"]


def has_plugin(target):
    """Whether this environment can compile for a target."""
    return importlib.util.find_spec(PLUGINS[CHIPS[target].platform]) is not None


def run_table(choice, rows):
    """Compiles TABLE, each in a process of its own, since XLA may end one that fails."""
    for setting, (script, flags) in TABLE.items():
        for target in [choice.target] if choice.target else TABLE_TARGETS:
            on_tpu = CHIPS[target].platform == "tpu"
            if not has_plugin(target) or (on_tpu and ("atari" in script or setting in PRESETS)):
                continue
            if choice.only not in setting:
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = pathlib.Path(folder, "out.json")
                words = ["--target", target, "--script", script, "--programs", choice.programs]
                words += ["--devices", str(choice.devices), "--out", str(out)]
                words += ["--scripts-dir", str(choice.scripts_dir)]
                if choice.hlo:
                    words += ["--hlo", str(choice.hlo / re.sub(r"\W+", "_", setting))]
                command = [sys.executable, __file__, *words, *flags.split()]
                process = subprocess.run(command, capture_output=True, text=True)
                new = read_rows(out)
            if process.returncode != 0:
                lines = process.stderr.strip().splitlines() or [f"exit {process.returncode}"]
                failed = {"script": script, "flags": flags, "target": target}
                failed |= {"devices": choice.devices, "program": FAILED, "error": lines[-1][:200]}
                new.append(failed)
            for row in new:
                row["setting"] = setting
            print_table(new)
            sys.stdout.flush()
            keys = {key_of(row) for row in new}
            keys.add((setting, script, target, choice.devices, FAILED))  # failed earlier
            rows = read_rows(choice.out) or rows  # the other environment's process may add to it
            rows = [row for row in rows if key_of(row) not in keys] + new
            rows.sort(key=lambda row: list(TABLE).index(row["setting"]))
            write_results(choice.out, rows)
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Flags that are not listed here go to the script.",
        allow_abbrev=False,
    )
    parser.add_argument("--target", choices=CHIPS, help="the chip to compile for")
    parser.add_argument("--devices", type=int, choices=[1, 4], default=1, help="how many of them")
    parser.add_argument("--script", type=find_script, help="a script, or a part of its name")
    parser.add_argument("--table", action="store_true", help="all of SETTINGS and PRESETS")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument(
        "--programs", default=",".join(PROGRAMS), help="which of train,init,evaluate"
    )
    parser.add_argument("--loops", action="store_true", help="also print the tree of loops")
    parser.add_argument("--scripts-dir", type=pathlib.Path, default=ROOT, help="their folder")
    parser.add_argument("--hlo", type=pathlib.Path, help="folder for the programs' text")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    choice, words = parser.parse_known_args()
    if not choice.table and not (choice.target and choice.script):
        parser.error("--table, or --target and --script")
    jax.config.update("jax_enable_compilation_cache", False)

    if choice.table:
        if words:
            parser.error(f"the table's settings are fixed: {' '.join(words)}")
        rows = run_table(choice, read_rows(choice.out))
    else:
        if not has_plugin(choice.target):
            platform = CHIPS[choice.target].platform
            needed = f"{PLUGINS[platform]}: see accelerators-{platform}-requirements.txt"
            parser.error(f"{choice.target} needs {needed}")
        rows = []
        words = [word for word in words if word != "--"]
        programs = choice.programs.split(",")
        compiled = compile_programs(
            choice.script,
            words,
            choice.target,
            choice.devices,
            programs,
            choice.scripts_dir,
            choice.hlo,
        )
        for row in compiled:
            rows.append(row)
            write_results(choice.out, rows)
    print_table(rows)
    if choice.loops:
        for row in rows:
            if "error" not in row:
                print(f"\n{row['script']}, {row['program']}")
                print_loops(row)
    print()
    for text in ASSUMPTIONS.values():
        print(text)


if __name__ == "__main__":
    main()
