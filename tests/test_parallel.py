"""Many seeds and many devices against one agent on one device."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import MODULES, finish, having, once, quick_args


def train(script, args, train_step, keys, updates=1):
    """Trains the agents with these keys; returns ({path: array}, metrics) after the last update."""
    state = script.shard_state(args, script.init_train_state(args, keys))
    for _ in range(updates):
        state, metrics = train_step(state)
    return jax.tree.map(np.asarray, (script.flatten_state(state), metrics))


# ----------------------------------------------------------------------------------------------------------------------
# Seeds
# ----------------------------------------------------------------------------------------------------------------------

ACCELERATED = [(module, "gpu") for module in MODULES if not hasattr(module, "make_pool")]


@pytest.mark.parametrize(
    "script, backend", [(MODULES[0], "cpu"), *ACCELERATED], indirect=["script"], ids=lambda x: getattr(x, "__name__", x)
)
def test_first_update_equals_single_runs(script, backend, monkeypatch):
    """All that each of two agents on two devices has learned, seen and drawn after one update, to 1e-5.

    On a CPU agents take turns, one program for all scripts; `vmap` is the way of accelerators.
    """
    args = quick_args(script, num_seeds=2, num_devices=2)
    keys, alone = script.seed_keys(args), dataclasses.replace(args, num_seeds=1)
    train_step = script.make_train_step(alone)
    single = [train(script, alone, train_step, keys[k : k + 1]) for k in range(2)]
    monkeypatch.setattr(script.jax, "default_backend", lambda: backend)
    together = train(script, args, script.make_train_step(args), keys)
    expected = jax.tree.map(lambda *x: np.concatenate(x), *single)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), together, expected)
    assert np.unique(together[1]["losses/grad_norm"]).size == 2  # two agents, not one twice


@once("over_seeds")
def test_later_returns_have_the_distribution_of_single_runs(script, monkeypatch):
    """Twenty agents together (`vmap`) and twenty others alone, after ten updates: a Kolmogorov-Smirnov test."""
    args = quick_args(script, num_envs=16, num_steps=64, total_timesteps=10 * 16 * 64, num_seeds=20)
    others, alone = script.seed_keys(dataclasses.replace(args, seed=100)), dataclasses.replace(args, num_seeds=1)
    returns = lambda *inputs: train(script, *inputs, updates=10)[1]["charts/episodic_return"]
    train_step = script.make_train_step(alone)
    expected = np.concatenate([returns(alone, train_step, others[k : k + 1]) for k in range(20)])
    monkeypatch.setattr(script.jax, "default_backend", lambda: "gpu")
    together = returns(args, script.make_train_step(args), script.seed_keys(args))
    assert np.unique(together).size > 15 and scipy.stats.ks_2samp(together, expected).pvalue > 0.01


@once("Logger")
def test_seed_with_nan_is_named_and_others_go_on(script, tmp_path, capsys):
    """A run of three seeds resumes from a checkpoint in which the second one's parameters are NaN."""
    args = quick_args(script, num_seeds=3, videos_dir=str(tmp_path))
    state = script.init_train_state(args, script.seed_keys(args))
    params = jax.tree.map(lambda p: p.at[1].set(jnp.nan), state.params)
    script.save_checkpoint(tmp_path, state._replace(params=params))
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    script.main(script.Args(resume=str(tmp_path)))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert "seed 2 " in line
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["failed_seeds"]) == ("finished", [2])
    _, state = script.load_run(tmp_path)
    alive = [all(np.isfinite(leaf[k]).all() for leaf in jax.tree.leaves(state.params)) for k in range(3)]
    assert alive == [True, False, True] and (state.update == args.num_updates).all()
    returns = summary["per_seed"]["eval_return_mean"]
    assert summary["eval_return_mean"] == pytest.approx(np.mean([returns[0], returns[2]]))  # of those alive


# ----------------------------------------------------------------------------------------------------------------------
# Devices
# ----------------------------------------------------------------------------------------------------------------------


@having("update_epochs", "Batch", "adam_init")
def test_reduction_over_devices_equals_one_device(script):
    """One epoch of one minibatch: four shards with their gradients and advantages reduced, against all of it at once.

    The shards' advantages have different means and spreads, so that normalising each by itself would show.
    """
    args = quick_args(script, num_minibatches=1, update_epochs=1, max_grad_norm=1e9, norm_adv=True)
    rng = np.random.default_rng(0)
    env, samples = script.make_env(args), 128
    params = script.init_params(jax.random.key(0), env)
    obs = jnp.asarray(rng.normal(size=(env.obs_size, samples)), jnp.float32)
    action = jnp.asarray(rng.integers(2, size=samples), jnp.int32)
    logprob, advantage, ret, old_value = jnp.asarray(rng.normal(size=(4, samples)), jnp.float32)
    scale = jnp.repeat(jnp.arange(1.0, 5.0), samples // 4)
    batch = script.Batch(obs, action, 0.1 * logprob - 0.7, scale * (advantage + scale), ret, old_value)

    def run(shards):
        split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(*x.shape[:-1], shards, -1), -2, 0), batch)
        update = lambda batch: script.update_epochs(
            args, params, script.adam_init(params), batch, args.learning_rate, jax.random.key(0)
        )
        return jax.jit(jax.vmap(update, axis_name=script.AXIS))(split)

    (_, one, _), (_, four, metrics) = run(1), run(4)
    for k in range(4):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[k], y[0], rtol=1e-4, atol=1e-6), four.m, one.m)  # noqa: B023
    assert np.unique(metrics["losses/grad_norm"]).size == 1


@having("CartPole")
def test_four_devices_train_and_solve(script, tmp_path):
    """The default flags on four virtual devices, in a process of its own."""
    summary = json.loads((finish(script, tmp_path, devices=4, num_devices=4) / "summary.json").read_text())
    assert (summary["num_devices"], summary["eval_return_mean"]) == (4, 500.0)
