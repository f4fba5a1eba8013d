"""ppo_cartpole_jax.py against Gymnasium's CartPole-v1, and whether it learns."""

import json
import re
import shutil
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import ROOT, having

pytestmark = having("CartPole")


def agent(state):
    """The first agent's part of a `TrainState`, whose leaves have a leading seed axis."""
    return jax.tree.map(lambda x: x[0], state)


def balancing(script, params):
    """`params` with an actor that never drops the pole: push to where it falls, and lean it back to the centre."""
    actor = jax.tree.map(jnp.zeros_like, params["actor"])
    actor["w1"] = actor["w1"].at[0].set(jnp.array([0.02, 0.04, 1.0, 0.3]))
    actor["w2"] = actor["w2"].at[0, 0].set(1.0)
    actor["w3"] = actor["w3"].at[1, 0].set(1e6)
    return params | {"actor": actor}


@pytest.mark.parametrize("integrator", ["euler", "semi-implicit"])
@pytest.mark.parametrize("skill", ["random", "balancing"])
def test_rollout_equals_gymnasium(script, integrator, skill):
    """12,000 steps of `rollout`, each taken again by Gymnasium from the same state: all it returns is the same.

    The random policy's episodes all end by termination, the balancing one's all by truncation.
    """
    args = script.Args(num_envs=8, num_steps=1500, kinematics_integrator=integrator)
    state = agent(script.init_train_state(args, script.seed_keys(args)))
    params = balancing(script, state.params) if skill == "balancing" else state.params
    rollout = jax.jit(script.rollout, static_argnums=(0, 1))
    _, episodes, steps = rollout(
        args, script.make_env(args), params, state.env_state, state.episodes, jax.random.key(1)
    )
    steps = jax.tree.map(np.asarray, steps)
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.kinematics_integrator = integrator
    for n in range(args.num_envs):
        done = True
        for t in range(args.num_steps):
            if done:
                env.reset()
                assert np.abs(steps.obs[t, :, n]).max() <= 0.05
            else:
                np.testing.assert_array_equal(steps.obs[t, :, n], steps.next_obs[t - 1, :, n])
            env.unwrapped.state = steps.obs[t, :, n].astype(np.float64)
            obs, reward, terminated, truncated, _ = env.step(int(steps.action[t, n]))
            np.testing.assert_allclose(steps.next_obs[t, :, n], obs, rtol=1e-6, atol=1e-6)
            flags = (steps.reward[t, n], steps.terminated[t, n], steps.truncated[t, n])
            assert flags == (reward, terminated, truncated)
            done = terminated or truncated
    if skill == "balancing":
        assert steps.truncated.sum() == 3 * args.num_envs and not steps.terminated.any()
        np.testing.assert_array_equal(episodes.last_ret, 500.0)
    else:
        assert steps.terminated.sum() > 100 and set(steps.action.flat) == {0, 1}


def test_start_states_are_uniform(script):
    """Kolmogorov-Smirnov test of 10,000 start states against the uniform distribution on [-0.05, 0.05]."""
    for states in np.asarray(script.CartPole().reset(jax.random.key(0), (10_000,))):
        assert scipy.stats.kstest(states, scipy.stats.uniform(-0.05, 0.1).cdf).pvalue > 1e-3


def test_frozen_limits(script):
    """The limits are Gymnasium's own: just inside goes on, just outside ends."""
    env = gymnasium.make("CartPole-v1").unwrapped
    ours = script.CartPole()
    assert ours.x_limit == env.x_threshold and ours.theta_limit == pytest.approx(env.theta_threshold_radians, rel=1e-12)
    assert ours.max_episode_steps == gymnasium.spec("CartPole-v1").max_episode_steps


def test_default_flags_solve_it(script, default_run):
    """The greedy policy of a default run reaches the possible maximum in every evaluation episode."""
    summary = json.loads((default_run / "summary.json").read_text())
    assert summary["eval_episodes"] == 100
    assert (summary["eval_return_mean"], summary["eval_return_std"]) == (500.0, 0.0)


def test_policy_scores_500_in_gymnasium(script, default_run):
    """The trained policy, played greedily in Gymnasium's own environment, scores 500 in ten episodes."""
    _, state = script.load_run(default_run)
    act = jax.jit(lambda obs: script.policy(agent(state.params), obs[:, None]).argmax())
    env = gymnasium.make("CartPole-v1")
    for seed in range(10):
        (obs, _), ret, done = env.reset(seed=seed), 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(int(act(obs)))
            ret, done = ret + reward, terminated or truncated
        assert ret == 500.0


def test_readme_snippet_plays_a_policy(script, default_run, tmp_path):
    """README's snippet, run as it is but for the name of the run, prints the return 500."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    snippet = next(block for block in blocks if "load_run" in block and script.__name__ in block)
    assert "runs/<run_name>" in snippet
    shutil.copy(script.__file__, tmp_path)
    code = snippet.replace("runs/<run_name>", str(default_run))
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\b500(\.0*)?\b", result.stdout), result.stdout
