"""ppo_swingup_jax.py: physics, reward, Gaussian policy and video, and whether it learns."""

import dataclasses
import functools
import math

import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import LIGHT_COMPILATION, environment, finish, having, json_of, run_main

pytestmark = having("CartPoleSwingUp")

GRAVITY, CART, POLE, HALF, TAU = 9.8, 1.0, 0.1, 0.5, 0.02  # the task's constants, once more


def accelerations(state, force):
    """Float64 (x_acc, theta_acc) of a cart with a uniform rod, by Euler and Lagrange."""
    _, _, theta, theta_dot = state
    coupling = POLE * HALF * np.cos(theta)
    mass = np.array([[CART + POLE, coupling], [coupling, POLE * HALF**2 * 4 / 3]])
    push = force + POLE * HALF * np.sin(theta) * theta_dot**2
    return np.linalg.solve(mass, [push, POLE * GRAVITY * HALF * np.sin(theta)])


def reward(state, action):
    """The task's reward, spelled as in its specification; float64."""
    x, _, theta, theta_dot = state
    upright = np.cos(theta) > 0.95
    return (
        np.cos(theta)
        + 1.5 * np.exp(-10 * (1 - np.cos(theta)) ** 2)
        - 0.01 * x**2
        - 0.3 * x**2 * upright
        - 0.05 * theta_dot**2 * upright
        - 0.0005 * action**2
    )


@pytest.mark.quick
def test_step_equals_numpy(script):
    """10,000 random states and actions, also clipped ones: successor, reward, flag as in NumPy."""
    rng = np.random.default_rng(0)
    states = rng.uniform([-2.5, -4, -7, -10], [2.5, 4, 7, 10], (10_000, 4)).astype(np.float32)
    actions = rng.normal(0, 1.5, 10_000).astype(np.float32)
    step = jax.jit(jax.vmap(script.CartPoleSwingUp().step, (None, 0, 0)))
    result = step(None, script.SwingUpState(*states.T), actions[:, None])
    next_states, rewards, terminated = (np.asarray(x) for x in result)
    next_states = next_states.T
    upright = 0
    for i, (state, action) in enumerate(zip(states.astype(float), actions.astype(float))):
        x_acc, theta_acc = accelerations(state, 20 * min(max(action, -1), 1))
        expected = state + TAU * np.array([state[1], x_acc, state[3], theta_acc])  # explicit Euler
        np.testing.assert_allclose(next_states[i], expected, rtol=2e-6, atol=5e-6)
        if abs(np.cos(expected[2]) - 0.95) > 1e-5:
            assert rewards[i] == pytest.approx(reward(expected, action), abs=5e-5)
        if abs(abs(expected[0]) - 2.4) > 1e-5:
            assert terminated[i] == (abs(expected[0]) > 2.4)
        upright += np.cos(expected[2]) > 0.95
    assert upright > 500 and 100 < terminated.sum() < 9_000
    assert (np.abs(actions) > 1).sum() > 1_000


@pytest.mark.quick
def test_action_of_wrong_size(script):
    """Another number of actions than `action_size` says is an error, not ignored."""
    env = script.CartPoleSwingUp()
    state = env.reset(jax.random.key(0))
    with pytest.raises(ValueError, match="unpack"):
        env.step(None, state, jnp.zeros(env.action_size + 1))


@pytest.mark.quick
def test_starts_and_observation(script):
    """Random starts fill the circle, hanging ones lie within 0.05 rad of straight down."""
    ranges = {0.0: (-math.pi, math.pi), 1.0: (math.pi - 0.05, math.pi + 0.05)}
    keys = jax.random.split(jax.random.key(0), 10_000)
    for hanging, (low, high) in ranges.items():
        states = jax.vmap(script.CartPoleSwingUp(hanging=hanging).reset)(keys)
        x, x_dot, theta, theta_dot = np.asarray(states)
        for values, (lowest, highest) in [(x, (-1, 1)), (theta, (low, high))]:
            assert lowest - 1e-6 <= values.min() and values.max() <= highest + 1e-6
            counts = np.histogram(values, 20, (lowest, highest))[0]
            assert abs(counts - 500).max() < 110  # five standard deviations
        assert not x_dot.any() and not theta_dot.any()
    x, _, theta, _ = jax.vmap(script.CartPoleSwingUp(hanging=0.25, start_range=2).reset)(keys)
    assert 1.99 < np.abs(x).max() <= 2
    near = np.abs(theta - math.pi) <= 0.05
    share = 0.25 + 0.75 * 0.05 / (2 * math.pi)  # random angles lie in [-pi, pi]
    assert abs(near.mean() - share) < 0.022  # five standard deviations
    obs = script.CartPoleSwingUp().observe(script.SwingUpState(1.2, -1.0, 2.0, 6.0))
    np.testing.assert_allclose(obs, [0.5, -0.5, math.cos(2), math.sin(2), 2.0], rtol=1e-6)


@pytest.mark.quick
def test_deviation_stays_in_its_limits_and_comes_back(script):
    """It lies in [e^-2, e^0.5], starts at e^-0.5, and has a gradient on the way out and back."""
    args, env = script.Args(), script.CartPoleSwingUp()
    params = script.init_agent(args, jax.random.key(0), env)
    obs = jnp.ones((3, 5))

    def log_std(spread):
        dist, _ = script.forward(args, params | {"spread": jnp.array([spread])}, obs)
        return dist.log_std[0, 0]

    assert float(log_std(params["spread"][0])) == pytest.approx(-0.5, abs=1e-6)
    for spread in (-100.0, -5.0, 0.0, 5.0, 100.0):
        assert -2 <= log_std(spread) <= 0.5
    for spread in (-5.0, -1.0, 0.0, 1.0, 5.0):
        difference = (log_std(spread + 0.05) - log_std(spread - 0.05)) / 0.1
        slope = float(jax.grad(log_std)(spread))
        assert slope == pytest.approx(float(difference), rel=0.02) and slope > 1e-4


def test_success(script, monkeypatch):
    """On the track all the time, and upright in each of the last 100 steps."""
    states = np.zeros((501, 4, 6), np.float32)  # of six episodes
    states[:401, 2] = math.pi  # 401 states hanging, then 100 upright: a success
    states[401, 2, 1] = math.acos(0.94)  # upright for 99 steps only
    states[500, 2, 2] = -math.acos(0.94)  # falls at the end
    states[401:, 2, 3] = 2 * math.pi + math.acos(0.96)  # a whole turn further, and tilted
    states[200, 0, 4] = -2.41  # leaves the track
    states[500:, 0, 5] = 2.41  # leaves it with the last step

    class Replay:  # whatever the agent does, an episode of the table, drawn at its start
        action_size, max_episode_steps, success_steps = 1, 500, script.CartPoleSwingUp.success_steps

        def reset(self, key):
            return {"episode": jax.random.randint(key, (), 0, 6), "t": jnp.int32(0)}

        def step(self, key, state, action):
            state = state | {"t": state["t"] + 1}
            return state, jnp.float32(0), jnp.abs(self.replayed(state).x) > 2.4

        def observe(self, state):
            return jnp.zeros(5)

        def replayed(self, state):
            x = jnp.asarray(states)[state["t"], :, state["episode"]]
            return script.SwingUpState(*x)

        def succeeds(self, state):
            return script.CartPoleSwingUp().succeeds(self.replayed(state))

        def metrics(self, state):
            return {"episode": state["episode"]}

    monkeypatch.setattr(script, "make_env", lambda args: Replay())
    args = script.Args(eval_episodes=60)
    params = script.init_agent(args, jax.random.key(0), Replay())
    evaluation = jax.jit(functools.partial(script.evaluate, args))(params, jax.random.key(1))
    episode = np.asarray(evaluation.info["episode"] / evaluation.episode_length, int)[0]
    assert set(episode) == set(range(6))
    np.testing.assert_array_equal(evaluation.success["default"], (episode == 0) | (episode == 3))
    np.testing.assert_array_equal(evaluation.episode_length[0], np.where(episode == 4, 200, 500))


def test_a_pole_at_rest_upright_earns_the_maximum(script, monkeypatch):
    """Of an episode of 500 steps: 1,250."""
    monkeypatch.setattr(script.Gaussian, "sample", lambda dist, key: jnp.zeros_like(dist.mean))
    args = script.Args(train_episode_steps=500, num_envs=4, num_steps=501)
    state = jax.eval_shape(functools.partial(script.init_train_state, args), jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, (state.params, state.env_state, state.stats))
    rollout = jax.jit(functools.partial(script.rollout, args, script.make_env(args)))
    _, stats, steps = rollout(*zeros, jax.random.key(0))
    np.testing.assert_array_equal(stats.last_return, 1250.0)
    np.testing.assert_array_equal(np.asarray(steps.truncated).argmax(0), 499)


def test_arguments_that_follow_the_number_of_environments(script):
    """Minibatches of 2,048 samples, 16 at most, and 45 updates, unless the flags say otherwise."""
    args = script.Args()
    assert (args.batch_size, args.num_minibatches, args.total_timesteps) == (16_384, 8, 2_000_000)
    args = script.Args(num_envs=1024)
    assert (args.batch_size, args.num_minibatches, args.num_updates) == (131_072, 16, 45)
    assert args.total_timesteps <= 6_000_000
    args = script.Args(num_envs=1024, num_minibatches=4, total_timesteps=200_000)
    assert (args.num_minibatches, args.num_updates) == (4, 1)


def test_training_episodes_are_short(script):
    """`train_episode_steps` truncates in training, while an evaluation plays 500 steps."""
    sizes = dict(num_envs=8, num_steps=64, num_minibatches=1, eval_episodes=4)
    args = script.Args(train_episode_steps=10, **sizes)
    state = jax.jit(functools.partial(script.init_train_state, args))(jax.random.key(1))
    state, metrics = jax.jit(functools.partial(script.update, args))(state)
    assert np.max(state.stats.last_length) == 10 and metrics["charts/episodic_length"] <= 10
    evaluation = jax.jit(functools.partial(script.evaluate, args))(state.params, jax.random.key(2))
    assert evaluation.episode_length.shape == (2, 4) and (evaluation.episode_length > 10).any()
    assert evaluation.states.theta.shape == (501, 2)
    random, hanging = abs(np.asarray(evaluation.states.theta[0]))
    assert abs(hanging - math.pi) <= 0.05 < abs(random - math.pi)
    assert evaluation.success.keys() == {"random", "hanging"}


@pytest.mark.quick
def test_drawn_actions_of_an_evaluation(script, monkeypatch):
    """An actor that always says 0: the greedy cart stays, drawn actions push as NumPy has it."""

    class Short(script.CartPoleSwingUp):
        def evaluations(self):
            return {"hanging": dataclasses.replace(self, max_episode_steps=1, hanging=1.0)}

        def metrics(self, state):
            return {"x_dot": state.x_dot}

    args, env = script.Args(eval_episodes=4000), Short()
    monkeypatch.setattr(script, "make_env", lambda args: env)
    params = script.init_agent(args, jax.random.key(0), env)
    params["actor"] = jax.tree.map(jnp.zeros_like, params["actor"])
    for mode in ("greedy", "sampled"):
        args = dataclasses.replace(args, eval_mode=mode)
        play = jax.jit(functools.partial(script.evaluate, args))
        velocity = np.asarray(play(params, jax.random.key(1)).info["x_dot"])[0]
        if mode == "greedy":
            assert np.abs(velocity).max() < 0.001  # gravity pulls a little at the leaning pole
    deviation = float(jnp.exp(script.bounded_log_std(params["spread"]))[0])
    levels = np.clip(np.random.default_rng(0).normal(0, deviation, 4000), -1, 1)
    # Hanging, the pole adds a quarter of its mass: x_acc = F / (M - 3 m / 4).
    expected = env.tau * env.force * levels / (env.mass_cart + env.mass_pole / 4)
    assert scipy.stats.ks_2samp(velocity, expected).pvalue > 1e-3


@pytest.mark.quick
def test_kinds_of_start(script):
    """An evaluation plays the whole task from both, with constants as they are."""
    env = script.make_env(script.parse_args([]))
    assert (env.hanging, env.start_range, env.max_episode_steps) == (0.1, 1.5, 100)
    env = dataclasses.replace(env, gravity=3.7)
    envs = env.evaluations()
    assert [(name, env.hanging) for name, env in envs.items()] == [("random", 0), ("hanging", 1)]
    for env in envs.values():
        assert (env.max_episode_steps, env.start_range, env.gravity) == (500, 1, 3.7)


def test_environment_without_extras(script, monkeypatch, tmp_path, capsys):
    """Two actions; neither kinds of start nor success nor pictures: it trains all the same."""

    class Point:
        action_size = 2
        max_episode_steps = 20

        def reset(self, key):
            return jax.random.uniform(key, (2,))

        def step(self, key, state, action):
            return state + 0.1 * action, -(state**2).sum(), jnp.bool_(False)

        def observe(self, state):
            return state

    monkeypatch.setattr(script, "make_env", lambda args: Point())
    summary = json_of(run_main(script, tmp_path, total_timesteps=128))
    assert not any("success" in name for name in summary) and summary["eval_length_mean"] == 20
    assert summary["train_return_mean"] is None  # no episode has ended
    assert capsys.readouterr().err.startswith("warning: no video: AttributeError")


@pytest.mark.parametrize("x", [-2.4, 0.0, 2.4])
def test_frame(script, x):
    """The whole pole is in the picture at every angle, and its tip is where the angle says."""
    for theta in np.linspace(-math.pi, math.pi, 37):
        image = script.CartPoleSwingUp().render(script.SwingUpState(x, 0.0, theta, 0.0))
        assert image.shape == (300, 400, 3) and image.dtype == np.uint8
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert (border == 255).all()
        rows, columns = np.nonzero(np.abs(image.astype(int) - (204, 153, 102)).sum(-1) < 30)
        scale = 400 / (2.2 * 3.4)
        along = (columns - (200 + x * scale)) * math.sin(theta) - (rows - 150) * math.cos(theta)
        across = (columns - (200 + x * scale)) * math.cos(theta) + (rows - 150) * math.sin(theta)
        assert along.max() == pytest.approx(scale, abs=2.5)  # the pole is one metre long
        assert np.abs(across).max() < 4
    dark = np.nonzero((image < 60).all(-1))
    assert dark[1].min() <= 200 - 2.3 * scale and dark[1].max() >= 200 + 2.3 * scale  # the track


@pytest.mark.filterwarnings("ignore:os.fork")
def test_video(script, tmp_path):
    """Two panels of 400x300, 50 frames per second; an ended episode shows its last state."""
    args = script.Args(eval_episodes=2)
    params = script.init_agent(args, jax.random.key(0), script.make_env(args))
    evaluation = jax.jit(functools.partial(script.evaluate, args))(params, jax.random.key(3))
    lengths = evaluation.episode_length.at[:, 0].set(jnp.int32([5, 20]))
    evaluation = evaluation._replace(episode_length=lengths)
    evaluation = jax.tree.map(lambda x: x[None], evaluation)
    path = script.record_video(args, evaluation, tmp_path / "video")
    assert path == tmp_path / "video.mp4"
    with imageio.get_reader(path) as reader:
        frames = np.stack([frame for frame in reader])  # list() would trust its infinite length
        assert reader.get_meta_data()["fps"] == 50
    assert frames.shape == (21, 300, 800, 3)
    changes = np.abs(np.diff(frames.astype(int), axis=0)).max((1, 3))  # [time, column]
    assert changes[6:, :400].max() < 60 and changes[6:, 400:].max() > 60


@pytest.mark.parametrize("reads", ["", "cat > /dev/null", "cat > /dev/null; : > {}"])
def test_without_ffmpeg(script, reads, monkeypatch, tmp_path, capsys):
    """A video that cannot be written is a warning: its program ends with status 1."""
    args = script.Args(eval_episodes=1)
    params = script.init_agent(args, jax.random.key(0), script.make_env(args))
    evaluation = jax.jit(functools.partial(script.evaluate, args))(params, jax.random.key(3))
    evaluation = jax.tree.map(lambda x: x[None], evaluation)
    program, path = tmp_path / "ffmpeg", tmp_path / "run" / "video.mp4"
    program.write_text(f"#!/bin/sh\n{reads.format(path)}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))
    args = dataclasses.replace(args, videos_dir=str(tmp_path))
    script.try_video(args, evaluation, tmp_path / "run", "video")
    assert capsys.readouterr().err.startswith("warning: no video: ")


@pytest.mark.filterwarnings("ignore:os.fork")
def test_learns(script, tmp_path):
    """In half of the default steps the greedy policy succeeds from both starts."""
    run_dir = finish(script, tmp_path, env=environment(1, LIGHT_COMPILATION), total_timesteps="1e6")
    summary = json_of(run_dir)
    assert summary["eval_episodes"] == 1024 and summary["total_timesteps"] <= 1_000_000
    for start in ("random", "hanging"):
        assert summary[f"eval_success_rate_{start}"] >= 0.9  # of 24 seeds: 0.924 to 1.000
    assert summary["eval_return_mean"] <= 1250
    (video,) = tmp_path.glob("videos/*/*.mp4")
    with imageio.get_reader(video) as reader:
        assert reader.get_data(0).shape == (300, 800, 3)
