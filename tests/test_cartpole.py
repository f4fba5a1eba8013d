"""ppo_cartpole_jax.py against Gymnasium's CartPole-v1, and whether it learns."""

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
from conftest import ROOT, environment, finish, having, jit_args, json_of, quick_args

pytestmark = having("CartPole")


def balancing(script, params):
    """`params` with an actor that pushes to where the pole falls, and back to the centre."""
    actor = jax.tree.map(jnp.zeros_like, params["actor"])
    actor[0]["w"] = actor[0]["w"].at[0].set(jnp.array([0.02, 0.04, 1.0, 0.3]))
    actor[1]["w"] = actor[1]["w"].at[0, 0].set(1.0)
    actor[2]["w"] = actor[2]["w"].at[1, 0].set(1e6)
    return params | {"actor": actor}


@pytest.mark.quick
@pytest.mark.parametrize("integrator", ["euler", "semi-implicit"])
@pytest.mark.parametrize("skill", ["random", "balancing"])
def test_rollout_equals_gymnasium(script, skill, integrator):
    """12,000 steps of `rollout`, each taken again by Gymnasium from the same state."""
    args = script.Args(num_envs=8, num_steps=1500, kinematics_integrator=integrator)
    state = script.init_train_state(args, jax.random.key(1))
    params = balancing(script, state.params) if skill == "balancing" else state.params
    rollout = jit_args(script.rollout, args, script.make_env(args))
    _, stats, steps = rollout(params, state.env_state, state.stats, jax.random.key(1))
    steps = jax.tree.map(np.asarray, steps)
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.kinematics_integrator = integrator
    for n in range(args.num_envs):
        done = True
        for t in range(args.num_steps):
            if done:
                env.reset()
                assert np.abs(steps.obs[t, n]).max() <= 0.05
            else:
                np.testing.assert_array_equal(steps.obs[t, n], steps.next_obs[t - 1, n])
            env.unwrapped.state = steps.obs[t, n].astype(np.float64)
            obs, reward, terminated, truncated, _ = env.step(int(steps.action[t, n]))
            np.testing.assert_allclose(steps.next_obs[t, n], obs, rtol=1e-6, atol=1e-6)
            flags = (steps.reward[t, n], steps.terminated[t, n], steps.truncated[t, n])
            assert flags == (reward, terminated, truncated)
            done = terminated or truncated
    if skill == "balancing":
        assert steps.truncated.sum() == 3 * args.num_envs and not steps.terminated.any()
        np.testing.assert_array_equal(stats.last_return, 500.0)
    else:
        assert steps.terminated.sum() > 100 and set(steps.action.flat) == {0, 1}


@pytest.mark.quick
def test_start_states_are_uniform(script):
    """Kolmogorov-Smirnov test of 10,000 start states against uniform ones on [-0.05, 0.05]."""
    states = jax.vmap(script.CartPole().reset)(jax.random.split(jax.random.key(0), 10_000))
    for component in np.asarray(states):
        assert scipy.stats.kstest(component, scipy.stats.uniform(-0.05, 0.1).cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(np.asarray(states)) - np.eye(4)).max() < 0.05  # four draws, not one


@pytest.mark.quick
def test_drawn_actions_of_an_evaluation(script):
    """Sampled actions of an untrained policy are Gymnasium with random play, greedy ones not."""
    args = script.Args(eval_episodes=1000, eval_mode="sampled")
    state = script.init_train_state(args, jax.random.key(1))
    evaluation = jit_args(script.evaluate, args)(state.params, jax.random.key(2))
    lengths = np.asarray(evaluation.episode_length)
    env, theirs = gymnasium.make("CartPole-v1"), []
    env.action_space.seed(0)
    for seed in range(1000):
        env.reset(seed=seed)
        theirs.append(1)
        while not env.step(env.action_space.sample())[2]:
            theirs[-1] += 1
    assert scipy.stats.ks_2samp(lengths, theirs).pvalue > 1e-3
    greedy = script.Args(eval_episodes=1000)
    evaluation = jit_args(script.evaluate, greedy)(state.params, jax.random.key(2))
    lengths = np.asarray(evaluation.episode_length)
    assert scipy.stats.ks_2samp(lengths, theirs).pvalue < 1e-9


@pytest.mark.quick
def test_constants(script):
    """Limits are Gymnasium's own."""
    env, ours = gymnasium.make("CartPole-v1").unwrapped, script.CartPole()
    assert ours.x_limit == env.x_threshold
    assert ours.theta_limit == pytest.approx(env.theta_threshold_radians, rel=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("width, height", [(300, 200), (600, 400), (101, 77)])
def test_drawing_is_to_scale(script, width, height):
    """Cart and pole lie where a state says and inside the picture, wherever an episode may go."""
    env = script.CartPole()
    scale = width / (2.2 * env.x_limit)
    for x, theta in [(0, 0), (-2.4, 0.2), (2.4, -0.2), (1.0, 0.15)]:
        state = script.CartPoleState(x=x, x_dot=0.0, theta=theta, theta_dot=0.0)
        image = env.render(state, width, height)
        assert image.shape == (height, width, 3) and image.dtype == np.uint8
        rows, columns = np.nonzero((image == (204, 153, 102)).all(-1))  # the pole
        tip, lean = rows.argmin(), np.sin(theta)
        assert columns[tip] == pytest.approx(width / 2 + scale * (x + lean), abs=0.08 * scale + 2)
        length = 0.75 * height - rows[tip]
        assert length == pytest.approx(scale * np.cos(theta), abs=0.08 * scale + 2)
        assert rows[tip] > 0
        _, columns = np.nonzero((image == (40, 40, 40)).all(-1))  # the cart
        if abs(x) < 2:
            assert columns.mean() == pytest.approx(width / 2 + scale * x, abs=0.05 * scale + 1)


def test_evaluation_equals_gymnasium(script):
    """Each greedy episode, played again in Gymnasium from the same start: return and length."""
    args = quick_args(script, eval_episodes=10)
    params = script.init_train_state(args, jax.random.key(3)).params
    *hidden, head = params["actor"]
    params = params | {"actor": [*hidden, head | {"w": 100 * head["w"]}]}
    evaluation = jit_args(script.evaluate, args)(params, jax.random.key(4))
    reset_key, _ = jax.random.split(jax.random.key(4))
    starts = jax.vmap(script.CartPole().reset)(jax.random.split(reset_key, 10))
    act = jax.jit(lambda obs: script.forward(args, params, obs)[0].mode())
    env = gymnasium.make("CartPole-v1")
    for episode, start in enumerate(np.asarray(starts).T):
        env.reset()
        env.unwrapped.state = start.astype(np.float64)
        obs, score, length, done = start, 0.0, 0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(int(act(np.float32(obs)[None])[0]))
            score, length, done = score + reward, length + 1, terminated or truncated
            if episode == 0:
                state = jax.tree.map(lambda x: x[length], evaluation.states)  # noqa: B023
                np.testing.assert_allclose(state, obs, rtol=1e-3, atol=1e-3)
        assert evaluation.episode_return[episode] == score
        assert evaluation.episode_length[episode] == length


@pytest.fixture(scope="module")
def default_run(script, tmp_path_factory):
    """Folder of a run with the default flags, compiled as users compile it."""
    return finish(script, tmp_path_factory.mktemp("default"), env=environment(1, flags=""))


def test_default_flags_solve_it(script, default_run):
    """The greedy policy of a default run reaches the maximum in every evaluation episode."""
    summary = json_of(default_run)
    assert summary["eval_episodes"] == 100
    assert (summary["eval_return_mean"], summary["eval_return_std"]) == (500.0, 0.0)


def test_policy_scores_500_in_gymnasium(script, default_run):
    """The trained policy, played greedily in Gymnasium's own environment, scores 500 each time."""
    args, params = script.load_run(default_run)
    params = jax.tree.map(lambda x: x[0], params)
    act = jax.jit(lambda obs: script.forward(args, params, obs[None])[0].mode()[0])
    env = gymnasium.make("CartPole-v1")
    for seed in range(10):
        (obs, _), score, done = env.reset(seed=seed), 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(int(act(obs)))
            score, done = score + reward, terminated or truncated
        assert score == 500.0


def test_readme_snippet_plays_a_policy(script, default_run, tmp_path):
    """README's snippet, run with another run folder, prints the return 500."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    snippet = next(block for block in blocks if "load_run" in block and script.__name__ in block)
    assert "runs/<run_name>" in snippet
    shutil.copy(script.__file__, tmp_path)
    program = [sys.executable, "-c", snippet.replace("runs/<run_name>", str(default_run))]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.search(r"\b500(\.0*)?\b", result.stdout), result.stdout
