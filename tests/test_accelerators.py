"""The scripts for accelerators: their programs are lowered, not compiled, for GPUs and TPUs."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import having, once, quick_args


def lowered(function, *inputs, platform, monkeypatch):
    """(jaxpr, StableHLO) of a function traced as on this platform; EnvPool's calls are allowed."""
    monkeypatch.setattr(jax, "default_backend", lambda: {"cuda": "gpu"}.get(platform, platform))
    jitted = jax.jit(lambda *inputs: function(*inputs))  # traced anew
    jaxpr = jitted.trace(*inputs).jaxpr
    calls = [x.params["target_name"] for x in equations(jaxpr) if x.primitive.name == "ffi_call"]
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
    exported = jax.export.export(jitted, platforms=[platform], disabled_checks=allowed)(*inputs)
    return jaxpr, exported.mlir_module()


def equations(jaxpr):
    """All equations of a program, those inside of loops and functions too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for leaf in jax.tree.leaves(list(eqn.params.values())):
            inner = getattr(leaf, "jaxpr", leaf)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def update_of(script):
    """(update of K agents, shapes of its state, emulators that must stay alive)."""
    args = quick_args(script, num_envs=8, num_steps=64, num_seeds=2)  # shuffled without a sort
    states = jax.eval_shape(functools.partial(script.init_states, args))
    if not hasattr(script, "start_episodes"):
        return functools.partial(script.update_seeds, args), states, None
    env = script.make_env(args)
    pool = env.make_pool(script.env_seeds(args, args.num_envs))
    start = lambda: script.start_episodes(args, env, pool, script.init_states(args))
    return functools.partial(script.update, args, env, pool), jax.eval_shape(start), pool


@pytest.mark.quick
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_update(script, platform, monkeypatch):
    """No loop is as long as data say, nothing calls into the host, nothing is float64."""
    if hasattr(script, "start_episodes"):
        pytest.importorskip("envpool")
        if platform == "tpu":
            pytest.skip("EnvPool has no calls for TPUs")
    update, states, envs = update_of(script)
    jaxpr, text = lowered(update, states, platform=platform, monkeypatch=monkeypatch)
    names = [equation.primitive.name for equation in equations(jaxpr)]
    assert "scan" in names and "while" not in names
    assert names.count("sort") == (not hasattr(script, "random_permutations"))  # of the shuffle
    assert names.count("top_k") <= 1  # of a rollout's truncations
    assert not [name for name in names if "callback" in name or "infeed" in name]
    assert "f64" not in text and "stablehlo.while" in text
    del envs


@pytest.mark.quick
@having("over_seeds", lacking="start_episodes")
def test_evaluation(script, monkeypatch):
    """Evaluation can be lowered, too."""
    args = quick_args(script, num_seeds=2)
    states = jax.eval_shape(functools.partial(script.init_states, args))
    evaluate = functools.partial(script.evaluate_seeds, args)
    jaxpr, text = lowered(evaluate, states.params, platform="cuda", monkeypatch=monkeypatch)
    assert not [x for x in equations(jaxpr) if "callback" in x.primitive.name]
    assert "f64" not in text


@having("init_states")
def test_all_platforms_begin_with_the_same_bits(script, monkeypatch):
    """Two agents, initialized in sequence as on a CPU, and together as on a GPU."""
    init = functools.partial(script.init_states, quick_args(script, num_seeds=2))
    expected = jax.tree.leaves(script.named_arrays(jax.jit(lambda: init())()))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ours = jax.tree.leaves(script.named_arrays(jax.jit(lambda: init())()))
    for x, y in zip(ours, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@once("jit_function")
@pytest.mark.quick
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_compiler_options(script, platform, monkeypatch):
    """XLA knows the option by this name; XLA_FLAGS has priority."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setenv("XLA_FLAGS", "")
    seen = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **options: seen.append(options) or jit(f, **options))
    args = quick_args(script)
    run = script.jit_function(args, lambda args: jnp.float32(args.learning_rate))
    run.lower(script.float_inputs(args)).compile()
    name = "xla_backend_optimization_level"
    assert list(seen[0].get("compiler_options", {})) == [name] * (platform == "cpu")
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=1")
    script.jit_function(args, lambda args: 0)
    assert not seen[1]
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jit(lambda: 0, compiler_options={"xla_gpu_no_such_level": 0}).lower().compile()
