"""What the scripts ask of GPUs and TPUs, lowered without one; how compiled programs are read."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, having, quick_args

sys.path.insert(0, str(ROOT / "benchmarks"))
import accelerators

# --------------------------------------------------------------------------------------------------
# Programs of the scripts, lowered for devices that are not there
# --------------------------------------------------------------------------------------------------


class MemoryKind(str):
    """A memory as JAX asks for it."""

    kind = property(str)


class PretendedDevice:
    """A CPU that says it were another device; programs can be lowered for it, but not compiled."""

    def __init__(self, number, platform):
        self.id = number
        self.platform = platform
        self._cpu = jax.devices("cpu")[0]

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def default_memory(self):
        return MemoryKind("device")

    def addressable_memories(self):
        return [self.default_memory()]


def pretended_mesh(platform, num_devices, axis):
    """A mesh of `PretendedDevice`s."""
    devices = [PretendedDevice(i, platform) for i in range(num_devices)]
    return jax.sharding.Mesh(np.array(devices), (axis,))


def inner_equations(jaxpr):
    """All equations of a program, those of its loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for leaf in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield from inner_equations(inner)


def names_of_program(jaxpr):
    """Names of all primitives of a program, as often as they are in it."""
    return [equation.primitive.name for equation in inner_equations(jaxpr)]


def export(script, args, platform, monkeypatch, program):
    """(jaxpr, StableHLO text) of a program for "tpu" or "gpu".

    jax.export itself refuses calls into the host: all custom calls but those that are allowed here,
    EnvPool's.
    """
    mesh = pretended_mesh(platform, args.num_devices, script.DEVICES)
    monkeypatch.setattr(script, "make_mesh", lambda args: mesh)
    function, inputs = accelerators.Programs(script, args).prepare(program)
    jaxpr = function.trace(*inputs).jaxpr
    calls = []
    if hasattr(script, "make_pool"):
        equations = inner_equations(jaxpr)
        calls = [x.params["target_name"] for x in equations if x.primitive.name == "ffi_call"]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
    names = {"tpu": "tpu", "gpu": "cuda"}
    exporting = jax.export.export(function, platforms=[names[platform]], disabled_checks=allowed)
    return jaxpr, exporting(*inputs).mlir_module()


def large_args(script, **options):
    """Sizes whose shuffles need no walk (a power of two, at least 256); nothing of it is run.

    Emulators take a tenth of a second each to create; with eight samples of each, 32 will do.
    """
    num_envs = 32 if hasattr(script, "make_pool") else 256
    return quick_args(script, num_envs=num_envs, **options)


@pytest.mark.parametrize("platform, num_devices", [("gpu", 1), ("tpu", 4)])
def test_training(script, platform, num_devices, monkeypatch):
    """Only the loop over updates is as long as data say; nothing calls into the host or sorts."""
    if hasattr(script, "make_pool"):
        pytest.importorskip("envpool")
        if platform == "tpu":
            pytest.skip("EnvPool has no calls for TPUs")
    args = large_args(script, num_devices=num_devices, total_timesteps=10**6)
    jaxpr, text = export(script, args, platform, monkeypatch, "train")
    names = names_of_program(jaxpr)
    assert "scan" in names  # of known length
    loops_on_data = names.count("while")
    assert loops_on_data == 1
    assert not [name for name in names if name in ("sort", "top_k", "approx_top_k")]
    assert not [name for name in names if "callback" in name or "infeed" in name]
    assert "f64" not in text and "stablehlo.while" in text


@having("make_pool")
def test_agents_learn_one_after_the_other(script, monkeypatch):
    """Batched over agents, convolutions would become grouped ones, with slow gradients on GPUs."""
    pytest.importorskip("envpool")
    args = quick_args(script, num_seeds=2)
    envs = script.make_env(args)
    state = jax.eval_shape(functools.partial(script.init_states, args))
    played = functools.partial(script.rollout, args, envs, platform="gpu")
    after, trajectory = jax.eval_shape(played, state)

    def learn(state, trajectory):
        monkeypatch.setattr(script, "rollout", lambda *_, **__: (state, trajectory))
        return script.update(args, envs, state, platform="gpu")

    equations = list(inner_equations(jax.make_jaxpr(learn)(after, trajectory).jaxpr))
    convolutions = [x.params for x in equations if x.primitive.name == "conv_general_dilated"]
    assert len(convolutions) >= 2 * 3 + 2  # forward, backward for kernels, for all images but one
    assert {x["feature_group_count"] * x["batch_group_count"] for x in convolutions} == {1}


@pytest.mark.parametrize("program", ["init", "evaluate"])
def test_other_programs(script, program, monkeypatch):
    """Initialisation and evaluation can be lowered, too."""
    if hasattr(script, "make_pool"):
        pytest.importorskip("envpool")
    jaxpr, text = export(script, quick_args(script), "gpu", monkeypatch, program)
    assert not [name for name in names_of_program(jaxpr) if "callback" in name]
    assert "f64" not in text


@having("Encoder")
def test_convolutions_of_each_platform(script, monkeypatch):
    """MiniGrid's encoder: convolutions on accelerators, products on a CPU."""
    args = large_args(script, total_timesteps=10**6)
    _, text = export(script, args, "gpu", monkeypatch, "train")
    assert text.count("stablehlo.convolution") >= 3 + 3 + 2  # forward, backward
    step = jax.jit(functools.partial(script.update, args, platform="cpu"))
    state = jax.eval_shape(functools.partial(script.init_train_state, args), jax.random.key(0))
    assert "stablehlo.convolution" not in step.lower(state).as_text()


@pytest.mark.quick
def test_presets_are_documented():
    """The lines for a GPU that predictions are made for are those of the scripts and of README."""
    for name, flags in accelerators.PRESETS.values():
        line = f"python {name}.py {flags}"
        assert line in (ROOT / f"{name}.py").read_text()
        assert line in (ROOT / "README.md").read_text()


# --------------------------------------------------------------------------------------------------
# Reading compiled programs
# --------------------------------------------------------------------------------------------------


# Shaped like a training program for a GPU: a loop over updates, in it one of T = 8 steps, unrolled
# four times, with a loop that data end, and a loop of six minibatches.
PROGRAM = """HloModule jit_train_chunk, is_scheduled=true

FileNames
1 "script.py"

FunctionNames
1 "main"
2 "rollout"
3 "reset_ended"
4 "update_epochs.<locals>.one_epoch"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=1 function_name_id=2 line=2 end_line=2 column=1 end_column=2}
3 {file_name_id=1 function_name_id=3 line=3 end_line=3 column=1 end_column=2}
4 {file_name_id=1 function_name_id=4 line=4 end_line=4 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}

%slice_computation (p0: f32[8,16], p1: s32[]) -> f32[1,16] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,16]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,16}
}

%not_done (a: (s32[], f32[8,16])) -> pred[] {
  %a = (s32[], f32[8,16]{1,0}) parameter(0)
  %a0 = s32[] get-tuple-element(%a), index=0
  %five = s32[] constant(5)
  %twice = s32[] multiply(%a0, %a0)
  ROOT %less = pred[] compare(%twice, %five), direction=LT
}

%reset (b: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %b = (s32[], f32[8,16]{1,0}) parameter(0)
  %b0 = s32[] get-tuple-element(%b), index=0
  %b1 = f32[8,16]{1,0} get-tuple-element(%b), index=1
  %sorted = f32[8,16]{1,0} sort(%b1), dimensions={1}, to_apply=%order
  ROOT %b2 = (s32[], f32[8,16]{1,0}) tuple(%b0, %sorted)
}

%before_two (c: (s32[], f32[8,16])) -> pred[] {
  %c = (s32[], f32[8,16]{1,0}) parameter(0)
  %c0 = s32[] get-tuple-element(%c), index=0
  %two = s32[] constant(2)
  ROOT %c1 = pred[] compare(%c0, %two), direction=LT
}

%env_step (d: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %d = (s32[], f32[8,16]{1,0}) parameter(0)
  %d0 = s32[] get-tuple-element(%d), index=0
  %d1 = f32[8,16]{1,0} get-tuple-element(%d), index=1
  %row = f32[1,16]{1,0} fusion(%d1, %d0), kind=kLoop, calls=%slice_computation
  %copied = f32[8,16]{1,0} copy(%d1)
  %d2 = (s32[], f32[8,16]{1,0}) tuple(%d0, %copied)
  ROOT %until = (s32[], f32[8,16]{1,0}) while(%d2), condition=%not_done, body=%reset, metadata={op_name="jit(f)/while" stack_frame_id=3}
}

%minibatch (e: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %e = (s32[], f32[8,16]{1,0}) parameter(0)
  %e0 = s32[] get-tuple-element(%e), index=0
  %e1 = f32[8,16]{1,0} get-tuple-element(%e), index=1
  %product = (f32[8,8]{1,0}, s8[64]{0}) custom-call(%e1, %e1), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  %e2 = f32[8,8]{1,0} get-tuple-element(%product), index=0
  %sum-start = f32[8,8]{1,0} all-reduce-start(%e2), to_apply=%add
  %sum-done = f32[8,8]{1,0} all-reduce-done(%sum-start)
  ROOT %e3 = (s32[], f32[8,16]{1,0}) tuple(%e0, %e1)
}

%updates (g: (s32[], f32[8,16], s32[])) -> pred[] {
  %g = (s32[], f32[8,16]{1,0}, s32[]) parameter(0)
  %g0 = s32[] get-tuple-element(%g), index=0
  %g2 = s32[] get-tuple-element(%g), index=2
  ROOT %g3 = pred[] compare(%g0, %g2), direction=LT
}

%update (h: (s32[], f32[8,16], s32[])) -> (s32[], f32[8,16], s32[]) {
  %h = (s32[], f32[8,16]{1,0}, s32[]) parameter(0)
  %h0 = s32[] get-tuple-element(%h), index=0
  %h1 = f32[8,16]{1,0} get-tuple-element(%h), index=1
  %h2 = s32[] get-tuple-element(%h), index=2
  %h3 = (s32[], f32[8,16]{1,0}) tuple(%h0, %h1)
  %played = (s32[], f32[8,16]{1,0}) while(%h3), condition=%before_two, body=%env_step, metadata={op_name="jit(f)/while" stack_frame_id=2}
  %learned = (s32[], f32[8,16]{1,0}) while(%played), condition=%before_two, body=%minibatch, metadata={op_name="jit(f)/while" stack_frame_id=4}, backend_config={"known_trip_count":{"n":"6"}}
  %h4 = f32[8,16]{1,0} get-tuple-element(%learned), index=1
  ROOT %h5 = (s32[], f32[8,16]{1,0}, s32[]) tuple(%h0, %h4, %h2)
}

ENTRY %main (i: f32[8,16], n: s32[]) -> (s32[], f32[8,16], s32[]) {
  %i = f32[8,16]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %first = s32[] constant(0)
  %i1 = (s32[], f32[8,16]{1,0}, s32[]) tuple(%first, %i, %n)
  ROOT %i2 = (s32[], f32[8,16]{1,0}, s32[]) while(%i1), condition=%updates, body=%update, metadata={op_name="jit(f)/while" stack_frame_id=1}
}
"""  # noqa: E501


@pytest.mark.quick
def test_training_program_by_hand():
    """Every count of a program short enough to count by hand."""
    chip = accelerators.CHIPS["h100"]
    found = accelerators.analyze(PROGRAM, chip, num_steps=8, minibatches=6)
    # Two iterations of a slice, a copy and, once, a sort; six of a product and an all-reduce.
    assert found["kernels"] == 2 * (2 + 1) + 6 * 2
    assert found["kernels_per_env_step"] == (2 + 1) / 4  # four steps an iteration
    assert found["kernels_per_minibatch"] == 2 and found["collectives_per_minibatch"] == 1
    assert found["collective_bytes_per_minibatch"] == 8 * 8 * 4
    assert found["loops"] == found["host_driven_loops"] == 3
    assert found["data_dependent_loops"] == ["reset_ended"] and found["data_dependent_runs"] == 2
    assert found["sorts"] == 1 and found["copies"] == 1 and found["copies_run"] == 2
    assert found["float64"] == found["host_callbacks"] == 0
    phases = [(row["depth"], row["phase"], row["trips"]) for row in found["loop_tree"]]
    assert phases == [(0, "rollout", 2), (1, "rollout", None), (0, "update_epochs", 6)]
    # Bytes: of the slice it reads a row, the counter's four bytes and writes a row; everything else
    # is read and written whole. Products take no longer than their bytes here.
    array, row, product = 8 * 16 * 4, 16 * 4, 8 * 8 * 4
    moved = 2 * (2 * row + 4 + 2 * array + 2 * array)
    moved += 6 * (2 * array + product + 64 + 2 * product)
    assert math.isclose(found["ms_roofline"], moved / chip.bandwidth * 1e3)
    assert math.isclose(found["ms"], found["ms_roofline"] + 18 * 1.5e-3)
    most = found["most_kernels"][0]  # these instructions do not say what they are written in
    assert most["in_loop"] == "update_epochs.one_epoch" and most["kernels"] == 12
    (gemm,) = [op for op in found["longest"] if "gemm" in op["kind"]]
    assert gemm["runs"] == 6 and gemm["in_loop"] == "update_epochs.one_epoch"


def compiled_work(function, *shapes):
    """(flops as we count them, as XLA does) of a program on the CPU."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*shapes).compile()
    module = accelerators.Module(compiled.as_text())
    flops = 0
    for name in module.computations:
        for instruction in module.computations[name]:
            if instruction.opcode in ("dot", "convolution"):
                work = accelerators.work_of(module, instruction)
                flops += work.flops + work.convolution_flops
    return flops, compiled.cost_analysis()["flops"]


@pytest.mark.quick
def test_products():
    """Products of matrices and of batches of them have as many operations as XLA counts."""
    ours, theirs = compiled_work(jnp.matmul, (96, 64), (64, 32))
    assert ours == theirs == 2 * 96 * 64 * 32
    ours, theirs = compiled_work(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (3, 9, 5), (3, 5, 7)
    )
    assert ours == theirs == 2 * 3 * 9 * 5 * 7


def convolve(stride, padding, x, kernel):
    """Images [B, Y, X, C] convolved with a kernel [Y, X, C, F]."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, stride, padding, dimension_numbers=layout)


@pytest.mark.quick
@pytest.mark.parametrize("stride, padding", [((4, 4), "VALID"), ((2, 3), "SAME"), ((1, 1), "SAME")])
@pytest.mark.parametrize("what", ["forward", "of the images", "of the kernel"])
def test_convolutions(stride, padding, what):
    """Convolutions and their two gradients have as many operations as XLA counts.

    Those are at most as many as in a full window, and as many without padding.
    """
    forward = functools.partial(convolve, stride, padding)
    x, kernel = (5, 20, 21, 3), (8, 5, 3, 6)
    out = jax.eval_shape(forward, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in (x, kernel)])

    def gradient(x, kernel, seed):
        _, pullback = jax.vjp(forward, x, kernel)
        return pullback(seed)[0 if what == "of the images" else 1]

    if what == "forward":
        ours, theirs = compiled_work(forward, x, kernel)
    else:
        ours, theirs = compiled_work(gradient, x, kernel, out.shape)
    assert ours == theirs
    full = 2 * out.size * math.prod(kernel[:3])
    assert ours == full if padding == "VALID" else 0.5 * full < ours < full


@pytest.mark.quick
def test_compiled_loops():
    """Loops that XLA compiled for the CPU: their lengths, nesting, functions and sorts."""

    def halve(x):
        return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: jnp.sort(x) / 2, x)

    def tick(x, _):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), halve(x), length=7)[0], None

    def program(x):
        return jax.lax.scan(tick, x, length=5)[0]

    text = jax.jit(program).lower(jnp.ones((8, 8))).compile().as_text()
    found = accelerators.analyze(text, accelerators.CHIPS["h100"])
    shape = sorted(
        (row["depth"], row["trips"] or 0) for row in found["loop_tree"] if row["is_loop"]
    )
    assert shape == [(0, 5), (1, 0), (1, 7)]
    assert [name.split(".")[-1] for name in found["data_dependent_loops"]] == ["halve"]
    assert found["data_dependent_runs"] == 5 and found["sorts"] == 1


@pytest.mark.quick
def test_gpu_descriptions():
    """Bandwidths from the memories' clocks are those of the data sheets."""
    for name, gpu in accelerators.GPUS.items():
        bandwidth = 2 * gpu.memory_clock * 1e9 * gpu.memory_bus / 8
        assert math.isclose(bandwidth, accelerators.CHIPS[name].bandwidth, rel_tol=1e-3)
        text = accelerators.describe_gpu(gpu)
        assert f"memory_bandwidth: {round(bandwidth)}\n" in text
        assert text.count("{") == text.count("}") == 3
