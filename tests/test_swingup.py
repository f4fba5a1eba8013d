"""ppo_swingup_jax.py: the physics, the reward, the Gaussian policy and the video, and whether it learns."""

import dataclasses
import json
import math

import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import having

pytestmark = having("CartPoleSwingUp")

GRAVITY, CART, POLE, HALF, TAU = 9.8, 1.0, 0.1, 0.5, 0.02  # the task's constants, written down once more


def accelerations(state, force):
    """Float64 (x_acc, theta_acc) of a cart with a uniform rod, from its Euler-Lagrange equations.

    Lagrangian: CART x'^2 / 2 + POLE |v|^2 / 2 + (POLE HALF^2 / 3) theta'^2 / 2 - POLE GRAVITY HALF cos(theta), with
    v = (x' + HALF theta' cos(theta), -HALF theta' sin(theta)) the velocity of the rod's centre.
    """
    _, _, theta, theta_dot = state
    coupling = POLE * HALF * np.cos(theta)
    mass = np.array([[CART + POLE, coupling], [coupling, POLE * HALF**2 * 4 / 3]])
    forces = [force + POLE * HALF * np.sin(theta) * theta_dot**2, POLE * GRAVITY * HALF * np.sin(theta)]
    return np.linalg.solve(mass, forces)


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


def test_step_equals_numpy(script):
    """10,000 random states and actions, clipped ones too: successor, reward and flag as NumPy computes them."""
    rng = np.random.default_rng(0)
    states = rng.uniform([-2.5, -4, -7, -10], [2.5, 4, 7, 10], (10_000, 4)).astype(np.float32)
    actions = rng.normal(0, 1.5, 10_000).astype(np.float32)
    result = jax.jit(jax.vmap(script.CartPoleSwingUp().step))(states, actions)
    next_states, rewards, terminated = (np.asarray(x) for x in result)
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
    assert upright > 500 and 100 < terminated.sum() < 9_000 and (np.abs(actions) > 1).sum() > 1_000


def energy(state):
    """Mechanical energy of cart and rod, float64."""
    _, x_dot, theta, theta_dot = np.asarray(state, float)
    centre = (x_dot + HALF * theta_dot * np.cos(theta)) ** 2 + (HALF * theta_dot * np.sin(theta)) ** 2
    kinetic = CART * x_dot**2 + POLE * centre + POLE * HALF**2 / 3 * theta_dot**2
    return kinetic / 2 + POLE * GRAVITY * HALF * np.cos(theta)


def test_energy_drift_is_first_order(script):
    """One second without force conserves mechanical energy but for a drift that halves with the step size."""

    def drift(tau):
        env = script.CartPoleSwingUp(tau=tau)
        step = lambda state, _: (env.step(state, 0.0)[0], None)
        start = jnp.array([0.0, 0.3, 2.0, 1.0])
        return energy(jax.lax.scan(step, start, length=round(1 / tau))[0]) - energy(start)

    drifts = [drift(tau) for tau in (4e-3, 2e-3, 1e-3)]
    assert abs(drifts[0]) > 1e-3
    assert drifts[0] / drifts[1] == pytest.approx(2, rel=0.1) and drifts[1] / drifts[2] == pytest.approx(2, rel=0.1)


def test_starts_and_observation(script):
    """Random starts fill the circle, hanging ones lie within 0.05 rad of straight down; observations as specified."""
    for start, low, high in [("random", -math.pi, math.pi), ("hanging", math.pi - 0.05, math.pi + 0.05)]:
        x, x_dot, theta, theta_dot = np.asarray(script.CartPoleSwingUp(start=start).reset(jax.random.key(0), (10_000,)))
        for values, (lowest, highest) in [(x, (-1, 1)), (theta, (low, high))]:
            assert lowest - 1e-6 <= values.min() and values.max() <= highest + 1e-6
            counts = np.histogram(values, 20, (lowest, highest))[0]
            assert abs(counts - 500).max() < 110  # five standard deviations
        assert not x_dot.any() and not theta_dot.any()
    obs = script.CartPoleSwingUp().observe(jnp.array([1.2, -1.0, 2.0, 6.0]))
    np.testing.assert_allclose(obs, [0.5, -0.5, math.cos(2), math.sin(2), 2.0], rtol=1e-6)


def test_gaussian(script):
    """Log-probability and entropy against jax.scipy and the integral; sampled and greedy actions."""
    norm = jax.scipy.stats.norm
    mean, action = jax.random.normal(jax.random.key(0), (2, 1000))
    for log_std in (-2.0, -0.5, 0.5):
        dist = mean, jnp.float32(log_std)
        logprob = script.action_logprob(dist, action)
        np.testing.assert_allclose(logprob, norm.logpdf(action, mean, math.exp(log_std)), rtol=1e-4, atol=1e-4)
        grid = np.linspace(-20, 20, 400_001)
        p = np.exp(-0.5 * (grid / math.exp(log_std)) ** 2) / (math.exp(log_std) * math.sqrt(2 * math.pi))
        integral = -np.sum(p * np.log(np.maximum(p, 1e-300))) * (grid[1] - grid[0])
        assert float(script.entropy(dist)) == pytest.approx(integral, abs=1e-5)
        noise = script.sample_noise(jax.random.key(1), 100_000)
        sample = script.sample_action((jnp.full(100_000, 0.3), dist[1]), noise)
        assert float(sample.mean()) == pytest.approx(0.3, abs=5 * math.exp(log_std) / 316)
        assert float(sample.std()) == pytest.approx(math.exp(log_std), rel=0.02)
        np.testing.assert_array_equal(script.greedy_action(dist), mean)


def test_log_std_is_clipped(script):
    """The policy's deviation stays in [e^-2, e^0.5]; the parameter's gradient is right inside and zero outside."""
    params = script.init_params(jax.random.key(0), script.CartPoleSwingUp())
    assert float(params["log_std"]) == -0.5
    obs, action = jnp.ones((5, 3)), jnp.array([0.5, -1.0, 2.0])

    def loss(log_std):
        return script.action_logprob(script.policy(params | {"log_std": log_std}, obs), action).sum()

    mean, _ = script.policy(params, obs)
    for log_std in (-3.0, -1.9, -0.5, 0.4, 0.7):
        used = float(script.policy(params | {"log_std": jnp.float32(log_std)}, obs)[1])
        assert used == pytest.approx(min(max(log_std, -2), 0.5))
        slope = (((action - mean) / math.exp(log_std)) ** 2 - 1).sum()  # d logprob / d log_std
        expected = float(slope) if -2 < log_std < 0.5 else 0.0
        assert float(jax.grad(loss)(jnp.float32(log_std))) == pytest.approx(expected, rel=1e-4)


def test_success(script):
    """On hand-made trajectories: on the track all the time, and upright in each of the last 100 steps."""
    states = np.zeros((501, 4, 6), np.float32)
    states[:401, 2] = math.pi  # 401 states hanging, then 100 upright: a success
    states[401, 2, 1] = math.acos(0.94)  # upright for 99 steps only
    states[500, 2, 2] = -math.acos(0.94)  # falls at the end
    states[401:, 2, 3] = 2 * math.pi + math.acos(0.96)  # a whole turn further, and tilted
    states[200, 0, 4] = -2.41  # leaves the track
    states[500:, 0, 5] = 2.41  # leaves it with the last step
    np.testing.assert_array_equal(script.CartPoleSwingUp().succeeded(states), [True, False, False, True, False, False])


def test_rollout_truncates_and_never_exceeds_the_maximum(script, monkeypatch):
    """Episodes end after 500 steps, also across rollouts, and no reported return exceeds 1,250."""
    sizes = dict(num_envs=64, num_steps=80, total_timesteps=200 * 64 * 80, num_minibatches=4, update_epochs=1)
    args = script.Args(train_episode_steps=500, **sizes)
    state, train_step = script.init_train_state(args, script.seed_keys(args)), script.make_train_step(args)
    for _ in range(20):
        state, metrics = train_step(state)
        episodes = jax.tree.map(np.asarray, state.episodes)
        assert (episodes.length < 500).all()
        finished = np.isfinite(episodes.last_ret)
        assert (episodes.last_ret[finished] <= 2.5 * episodes.last_length[finished]).all()
        assert (episodes.last_length[finished] <= 500).all() and not metrics["charts/episodic_return"] > 1250
    assert finished.all()
    # A pole that rests upright in the centre earns exactly the maximum: nothing may be lost or counted twice.
    monkeypatch.setattr(script, "sample_noise", lambda key, shape: jnp.zeros(shape))
    params = jax.tree.map(lambda x: jnp.zeros_like(x[0]), state.params)
    episodes = jax.tree.map(lambda x: jnp.zeros_like(x[0]), state.episodes)
    args = dataclasses.replace(args, num_steps=501)
    rollout = jax.jit(script.rollout, static_argnums=(0, 1))
    _, episodes, steps = rollout(args, script.make_env(args), params, jnp.zeros((4, 64)), episodes, jax.random.key(0))
    np.testing.assert_array_equal(episodes.last_ret, 1250.0)
    np.testing.assert_array_equal(np.asarray(steps.truncated).argmax(0), 499)


def test_arguments_that_follow_the_number_of_environments(script):
    """Minibatches of 2,048 samples and at least 45 updates, unless the flags say otherwise."""
    args = script.Args()
    assert (args.batch_size, args.num_minibatches, args.total_timesteps) == (16_384, 8, 2_000_000)
    args = script.Args(num_envs=1024)
    assert (args.batch_size, args.num_minibatches, args.num_updates) == (131_072, 64, 45)
    assert args.total_timesteps <= 6_000_000
    args = script.Args(num_envs=1024, num_minibatches=4, total_timesteps=200_000)
    assert (args.num_minibatches, args.num_updates) == (4, 1)


def test_training_episodes_are_short(script):
    """`train_episode_steps` truncates in training, while an evaluation plays 500 steps."""
    args = script.Args(num_envs=8, num_steps=64, num_minibatches=1, train_episode_steps=10, eval_episodes=4)
    state, metrics = script.make_train_step(args)(script.init_train_state(args, script.seed_keys(args)))
    assert np.nanmax(state.episodes.last_length) == 10 and metrics["charts/episodic_length"] <= 10
    states = script.evaluate(args, state.params, script.evaluation_keys(args))[3]
    assert states.shape[1] == 501
    angles = np.asarray(states[0, 0, 2])  # of two episodes from each kind of start
    assert script.STARTS == ("random", "hanging") and (abs(angles[1] - math.pi) <= 0.05).all()
    assert (abs(abs(angles[0]) - math.pi) > 0.05).any()


@pytest.mark.parametrize("x", [-2.4, 0.0, 2.4])
def test_frame(script, x):
    """The whole pole is in the picture at every angle and its tip is where the angle says, to scale with the cart."""
    is_pole = lambda image: (np.abs(image.astype(int) - (204, 153, 102)).sum(-1)) < 30
    for theta in np.linspace(-math.pi, math.pi, 37):
        image = script.CartPoleSwingUp().render(np.array([x, 0.0, theta, 0.0]))
        assert image.shape == (300, 400, 3) and image.dtype == np.uint8
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert (border == 255).all()
        rows, columns = np.nonzero(is_pole(image))
        scale = 400 / (2.2 * 3.4)
        along = (columns - (200 + x * scale)) * math.sin(theta) - (rows - 150) * math.cos(theta)
        across = (columns - (200 + x * scale)) * math.cos(theta) + (rows - 150) * math.sin(theta)
        assert along.max() == pytest.approx(scale, abs=2.5)  # the pole is one metre long
        assert np.abs(across).max() < 4
    dark = np.nonzero((image < 60).all(-1))
    assert (dark[1].min() <= 200 - 2.3 * scale) and (dark[1].max() >= 200 + 2.3 * scale)  # the track


@pytest.mark.filterwarnings("ignore:os.fork")
def test_video(script, tmp_path):
    """Three panels of 400x300 with white spacers, 50 frames a second; a panel whose episode has ended stands still."""
    args = script.Args(num_seeds=1, eval_episodes=2)
    params = script.init_params(jax.random.key(0), script.make_env(args))
    evaluation = script.evaluate(args, jax.tree.map(lambda x: x[None], params), script.evaluation_keys(args))
    returns, lengths, successes, states = evaluation
    lengths = jnp.full_like(lengths, 20).at[0, 0, 0].set(5)
    states = states.at[:, 6:, :, 0, 0].set(states[:, 5:6, :, 0, 0])  # the first panel's, frozen as `evaluate` does
    script.record_video(args, tmp_path / "new" / "video.mp4", (returns, lengths, successes, states))
    with imageio.get_reader(tmp_path / "new" / "video.mp4") as reader:
        frames = np.stack([frame for frame in reader])  # list() would trust its length, which is infinite
        assert reader.get_meta_data()["fps"] == 50
    assert frames.shape == (21, 300, 1240, 3)
    for spacer in (slice(402, 418), slice(822, 838)):
        assert (frames[:, :, spacer] > 250).all()
    changes = np.abs(np.diff(frames.astype(int), axis=0)).max((1, 3))  # [time, column]
    assert changes[6:, :400].max() < 60 and changes[6:, 840:].max() > 60


@pytest.mark.filterwarnings("ignore:os.fork")
def test_default_flags_learn(script, default_run):
    """The greedy policy of a default run succeeds from both starts; nothing earns more than is possible."""
    summary = json.loads((default_run / "summary.json").read_text())
    assert summary["eval_episodes"] == 1024 and summary["total_timesteps"] <= 2_000_000
    assert min(summary["success_rate"].values()) >= 0.99  # an untrained policy: 0.00
    assert summary["eval_return_mean"] <= 1250
    (video,) = default_run.parent.parent.glob("videos/*/*.mp4")
    with imageio.get_reader(video) as reader:
        assert reader.get_data(0).shape == (300, 1240, 3)
