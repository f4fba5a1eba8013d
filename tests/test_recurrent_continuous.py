"""The recurrent script with continuous actions: the pendulum's dynamics, memory, a training run."""

import functools
import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest
from conftest import ROOT, environment, words_of

sys.path.insert(0, str(ROOT / "benchmarks" / "environments"))
import recurrent_continuous as adapter

ppo = adapter.ppo
SIZES = dict(num_envs=2, num_steps=6, num_minibatches=1, rnn_hidden_dim=8, head_hidden_dim=8)


@pytest.fixture
def agent(monkeypatch):
    """The recurrent script with the parts of the adapter."""
    for name in "Args make_env encode action_dist embed_action init_agent_state".split():
        monkeypatch.setattr(ppo, name, getattr(adapter, name))
    return adapter.Args(**SIZES)


def test_pendulum_equals_gymnasium():
    """200 steps from the same state with the same torques: observations and rewards."""
    env, reference = adapter.Pendulum(), gymnasium.make("Pendulum-v1")
    reference.reset(seed=0)
    state = adapter.PendulumState(*np.float32(reference.unwrapped.state))
    step = jax.jit(functools.partial(env.step, None))
    for action in np.random.default_rng(0).uniform(-3, 3, (200, 1)).astype(np.float32):
        state, reward, terminated = step(state, action)
        obs, expected, _, _, _ = reference.step(np.clip(action, -2, 2))
        np.testing.assert_allclose(env.observe(state), obs, atol=2e-3)
        np.testing.assert_allclose(reward, expected, atol=2e-3)
        assert not terminated


def test_steps_equal_a_sequence(agent):
    """Without velocity, steps give what the sequence gives; a start ignores the past."""
    env, rng = ppo.make_env(agent), np.random.default_rng(0)
    state = adapter.PendulumState(np.float32(1.0), np.float32(5.0))
    np.testing.assert_allclose(env.observe(state), [np.cos(1.0), np.sin(1.0)], rtol=1e-6)
    params = ppo.init_agent(agent, jax.random.key(0), env)
    inputs = ppo.Inputs(
        obs=rng.normal(size=(6, 2, 2)).astype(np.float32),
        prev_action=rng.normal(size=(6, 2, 1)).astype(np.float32),
        prev_reward=rng.normal(size=(6, 2)).astype(np.float32),
        start=np.array([[True, True], *[[False, False]] * 2, [False, True], *[[False, False]] * 2]),
    )
    dist, value, _ = ppo.forward(agent, params, inputs, ppo.init_rnn_state(agent, 2))
    assert dist.mean.shape == (6, 2, 1)
    rnn_state = rng.normal(size=(2, 1, 8)).astype(np.float32)  # ignored: every episode starts
    for t in range(6):
        now = jax.tree.map(lambda x: x[t], inputs)  # noqa: B023
        if t == 3:  # what precedes a start does not matter
            rnn_state = rnn_state.at[1].set(7.0)
        one, one_value, rnn_state = ppo.forward_step(agent, params, now, rnn_state)
        np.testing.assert_allclose(one.mean, dist.mean[t], atol=1e-6)
        np.testing.assert_allclose(one_value, value[t], atol=1e-6)
    other = inputs._replace(prev_action=inputs.prev_action + 1.0)
    changed = ppo.forward(agent, params, other, ppo.init_rnn_state(agent, 2))[0].mean
    same = np.isclose(changed, dist.mean, atol=1e-9)[..., 0]
    np.testing.assert_array_equal(same[inputs.start], True)
    assert not same[1:3].any()


def test_a_run_of_the_smallest_size(tmp_path):
    script = ROOT / "benchmarks" / "environments" / "recurrent_continuous.py"
    words = [sys.executable, script, *words_of(**SIZES, total_timesteps=24, eval_episodes=2)]
    out = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "2 greedy episodes: return_mean -" in out.stdout, out.stderr
