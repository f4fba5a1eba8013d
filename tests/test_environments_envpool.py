"""Adapters of the Atari script: EnvPool families with float64, Gymnasium, all kinds of spaces."""

import functools
import random
import sqlite3
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MODULES, ROOT, arrays_of, environment, having, json_of, run_of, words_of

pytest.importorskip("envpool")
gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks" / "environments"))

import gymnasium_envs  # noqa: E402
import mujoco_envpool as control  # noqa: E402
import procgen_envpool  # noqa: E402

pytestmark = having("start_episodes")
script = next(module for module in MODULES if hasattr(module, "start_episodes"))
SMALL = dict(num_envs=2, num_steps=32, num_minibatches=2, update_epochs=1, eval_episodes=2)


@pytest.fixture(autouse=True)
def _restored(script, monkeypatch):
    """Restores what the adapters replace after each test."""
    for name in ("Args", "make_env", "init_agent", "forward", "learn", "NatureCNN"):
        monkeypatch.setattr(script, name, getattr(script, name))


def small_words(folder, **options):
    folders = {"runs_dir": folder / "runs", "videos_dir": folder / "videos"}
    return words_of(**SMALL | {"total_timesteps": 192} | folders | options)


def rolled(args, env_class=control.Vectors):
    """One rollout of a new agent of the adapter: (environments, state, trajectory [T, N, ...])."""
    script.make_env, env = env_class, env_class(args)
    script.init_agent, script.forward = control.init_agent, control.forward
    pool = env.make_pool(script.env_seeds(args, args.num_envs))
    state = script.start_episodes(args, env, pool, script.init_states(args))
    roll = jax.jit(functools.partial(script.rollout, args, env, pool))
    state, trajectory = jax.block_until_ready(roll(state))
    results = state._replace(key=None), trajectory
    return env, *jax.tree.map(lambda x: np.asarray(x[0]), results)


# --- EnvPool's families with float64 ---


@pytest.mark.parametrize("env_id", ["Hopper-v4", "MetaWorld/Reach-v3", "CheetahRun-v1"])
def test_float64_steps_equal_plain_steps(env_id):
    """Rollouts equal steps with NumPy arrays; actions are within their bounds."""
    args = control.Args(env_id=env_id, num_envs=2, num_steps=64, log_std_init=0.0)
    env, state, trajectory = rolled(args)
    space = env.action_space
    plain = env.make_pool(script.env_seeds(args, 2))
    obs, _ = plain.reset()
    valid, score, outside = np.ones(2, bool), np.zeros(2), 0
    for t in range(args.num_steps):
        leaves = [x.reshape(2, -1) for x in jax.tree.leaves(obs)]
        assert "float64" in {str(x.dtype) for x in leaves}
        np.testing.assert_array_equal(trajectory.obs[t], np.float32(np.hstack(leaves)))
        np.testing.assert_array_equal(trajectory.valid[t], valid)
        action = trajectory.action[t]
        outside += ((action < space.low) | (action > space.high)).sum()
        clipped = np.clip(action, space.low, space.high).astype(space.dtype)
        obs, reward, terminated, truncated, _ = plain.step(clipped)
        np.testing.assert_array_equal(trajectory.reward[t], np.float32(reward))
        np.testing.assert_array_equal(trajectory.terminated[t], terminated)
        np.testing.assert_array_equal(trajectory.truncated[t], truncated)
        over = valid & (terminated | truncated)
        score = np.where(over, 0, score + valid * reward)
        valid = ~(terminated | truncated)
    assert outside > 0 and trajectory.action.dtype == np.float32
    np.testing.assert_allclose(state.stats.running_return, score, 1e-5, 1e-5)


def test_unknown_ids():
    """One line with the id and similar names, also if the library of a family is missing."""
    for env_id in ("HalfChetah-v4", "VizdoomCustom-v1"):
        with pytest.raises(SystemExit, match=f"^error: --env-id {env_id}: .*similar names: "):
            control.main(["--env-id", env_id])
    with pytest.raises(SystemExit, match="^error: --env-id PointMaze_UMaze-v3: .*module:id"):
        gymnasium_envs.main(["--env-id", "PointMaze_UMaze-v3"])
    with pytest.raises(SystemExit, match="^error: --env-id TicTacToe-v1 has several players"):
        control.main(["--env-id", "TicTacToe-v1"])


def test_spaces_of_envpool():
    """Actions with two axes; one-hot vectors, also nested; Humanoid-v4's contact forces."""
    env = control.Vectors(control.Args(env_id="Jumanji/SearchAndRescue-v0"))
    pool = env.make_pool(np.arange(2))
    action = env.bounded(np.arange(8, dtype="f").reshape(2, 4) - 3)
    np.testing.assert_array_equal(action[0], [[-1, -1], [-1, 0]])
    obs, _ = env.start(*pool.reset())
    assert obs.shape == env.read((), True, pool.step(action))[0][0].shape
    env = control.Vectors(control.Args(env_id="FrozenLake-v1"))
    obs, _ = env.start(*env.make_pool(np.arange(3)).reset())
    np.testing.assert_array_equal(obs, np.eye(16)[[0, 0, 0]])
    env = control.Vectors(control.Args(env_id="Jumanji/Maze-v0"))
    obs, info = env.make_pool(np.arange(3)).reset()
    flat, _ = env.start(obs, info)
    # In the order of names: action_mask, agent_position (col, row), step_count, ...
    np.testing.assert_array_equal(flat[:, :4], obs["action_mask"])
    np.testing.assert_array_equal(flat[:, 4:14].argmax(1), obs["agent_position"]["col"])
    _, _, trajectory = rolled(control.Args(env_id="Humanoid-v4", num_envs=1, num_steps=16))
    assert np.abs(trajectory.obs[..., 292:]).max() > 100  # a foot touches down


def test_mujoco_envpool(tmp_path, capsys):
    """A Dict is concatenated; `--eval` with other sizes; `--resume`; no video, with a warning."""
    control.main(small_words(tmp_path, env_id="CartpoleBalance-v1"))
    run_dir = run_of(tmp_path)
    summary = json_of(run_dir)
    assert summary["eval_mode"] == "sampled" and "eval_protocol" not in summary
    assert 0 < summary["eval_return_mean"] <= summary["eval_length_mean"] == 1000
    assert "warning: no video: " in capsys.readouterr().err
    control.main(words_of(eval=run_dir, num_envs=5))
    assert json_of(run_dir, "eval")["per_seed"] == summary["per_seed"]
    page = (ROOT / "benchmarks" / "environments" / "README.md").read_text()
    code = page.split("```python\n")[1].split("```")[0].replace("runs/<run_name>", str(run_dir))
    exec(code, loaded := {})
    mean = loaded["evaluation"].episode_return.mean(1)
    np.testing.assert_allclose(mean, summary["per_seed"]["eval_return_mean"], rtol=1e-6)
    before = arrays_of(run_dir)
    control.main(words_of(resume=run_dir, total_timesteps=320, videos_dir=tmp_path))
    after = arrays_of(run_dir)
    assert (before["update"], after["update"]) == (3, 5)
    assert before["params/obs/count"] == 192 and after["params/obs/count"] == 320


def test_statistics_by_definition():
    """Only valid samples count, in several batches as in one; a batch may have none."""
    rng = np.random.default_rng(0)
    x, valid = rng.normal(3, 5, (4, 20, 3, 2)).astype("f"), rng.random((4, 20, 3)) < 0.7
    seen = {"count": jnp.zeros(()), "mean": jnp.zeros(2), "var": jnp.ones(2)}
    for piece, mask in zip(x, valid):
        seen = control.updated(seen, jnp.asarray(piece), jnp.asarray(mask))
        seen = control.updated(seen, jnp.asarray(piece), jnp.zeros_like(mask))
    np.testing.assert_allclose(seen["count"], valid.sum())
    np.testing.assert_allclose(seen["mean"], x[valid].mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen["var"], x[valid].var(0), rtol=1e-5)


def test_rewards_are_scaled_as_defined(monkeypatch):
    """The discounted sum continues over rollouts, ends with an episode, skips steps that reset."""
    args = control.Args(env_id="Hopper-v4", num_envs=2, num_steps=64)
    _, state, trajectory = rolled(args)
    seen = []
    learn = lambda args, state, steps: (seen.append(steps) or state, {})
    monkeypatch.setattr(control, "plain_learn", learn)
    first = np.float32([2.0, -1.0])
    state = state._replace(env_state=state.env_state._replace(memory=first))
    after, _ = control.learn(args, state, trajectory)
    running, sums = first.astype(float), []
    ended = trajectory.terminated | trajectory.truncated
    for reward, valid, end in zip(trajectory.reward, trajectory.valid, ended):
        running = np.where(valid, args.gamma * running + reward, running)
        sums += list(running[valid])
        running = np.where(end, 0.0, running)
    assert trajectory.terminated.any() and not trajectory.valid.all()
    expected = np.clip(trajectory.reward / np.sqrt(np.var(sums) + 1e-8), -10, 10)
    np.testing.assert_allclose(seen[0].reward, expected, rtol=1e-4)
    np.testing.assert_allclose(after.env_state.memory, running, rtol=1e-4)
    samples = trajectory.obs[trajectory.valid]
    np.testing.assert_allclose(after.params["obs"]["mean"], samples.mean(0), 1e-4, 1e-5)


# --- Environments in Python ---


class Corridor(gymnasium.Env):
    """Moves right if both components of an action are equal. Raises at step `fails_at` of all."""

    place = spaces.Box(0, 9, (1,), np.float64)
    observation_space = spaces.Dict(place=place, even=spaces.Discrete(2))
    action_space = spaces.MultiDiscrete([2, 2])
    steps, fails_at = 0, None

    def seen(self):
        return {"place": np.full(1, self.x, float), "even": self.x % 2}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x = int(self.np_random.integers(3))
        return self.seen(), {}

    def step(self, action):
        Corridor.steps += 1
        if Corridor.steps == Corridor.fails_at:
            raise ZeroDivisionError("of my own")
        self.x += int(action[0] == action[1])
        return self.seen(), float(action[0]), self.x == 9, False, {}


gymnasium.register("Corridor-v0", Corridor, max_episode_steps=15)


class Checked(gymnasium.Env):
    """An environment of any spaces, which checks its actions."""

    def __init__(self, action_space=None, observation_space=None, length=5):
        self.action_space = action_space or spaces.Discrete(2)
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,))
        self.length, self.actions = length, []

    def reset(self, seed=None, options=None):
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.actions.append(action)
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == self.length, False, {}


def checked(**options):
    """The id of a `Checked` environment with these options."""
    name = f"Checked{len(gymnasium.registry)}-v0"
    gymnasium.register(name, Checked, kwargs=options, disable_env_checker=True)
    return name


def test_gymnasium_steps_equal_plain_steps():
    """With a Dict and a MultiDiscrete, rollouts equal steps of single environments."""
    args = gymnasium_envs.Args(env_id="Corridor-v0", num_envs=3, num_steps=50)
    Corridor.fails_at = None
    _, _, trajectory = rolled(args, gymnasium_envs.Gymnasium)
    assert trajectory.action.shape == (50, 3, 2)
    ended = 0
    for n, seed in enumerate(script.env_seeds(args, 3).tolist()):
        env, over = gymnasium.make("Corridor-v0"), False
        obs, _ = env.reset(seed=seed)
        for t in range(50):
            seen = [*np.eye(2)[obs["even"]], *obs["place"]]
            np.testing.assert_array_equal(trajectory.obs[t, n], seen)
            assert trajectory.valid[t, n] == (not over)
            if over:
                (obs, _), over = env.reset(), False
                continue
            obs, reward, terminated, truncated, _ = env.step(trajectory.action[t, n])
            over = terminated or truncated
            assert trajectory.reward[t, n] == reward
            assert trajectory.terminated[t, n] == terminated
            assert trajectory.truncated[t, n] == truncated
            ended += over
    assert ended > 3


def test_environment_that_fails_in_the_middle(tmp_path, capsys):
    """Training until then is saved and can be resumed; the error keeps its traceback."""
    Corridor.steps, Corridor.fails_at = 0, 1500
    words = small_words(tmp_path, env_id="Corridor-v0", total_timesteps=3200)
    words += words_of(checkpoint_interval=1000, log_interval=2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: of my own"):
        gymnasium_envs.main(words)
    run_dir = run_of(tmp_path)
    # Of 64 steps an update some only reset, at most one in four.
    (saved,) = arrays_of(run_dir)["update"]
    assert 1500 // 64 - 2 <= saved < 1500 * 4 / 3 / 64
    assert f"saved update {saved}; to resume: --resume {run_dir}" in capsys.readouterr().out
    Corridor.fails_at = None
    gymnasium_envs.main(words_of(resume=run_dir))
    assert arrays_of(run_dir)["update"] == 50


def test_gymnasium_envs(tmp_path, capsys, monkeypatch):
    """Continuous and discrete actions with the adapter's agent; each pool is reset once."""
    resets, reset = [], gymnasium_envs.Pool.reset
    count = lambda pool: resets.append(pool) or reset(pool)
    monkeypatch.setattr(gymnasium_envs.Pool, "reset", count)
    gymnasium_envs.main(small_words(tmp_path / "0", env_id="Pendulum-v1", num_seeds=2))
    gymnasium_envs.main(small_words(tmp_path / "1", env_id="CartPole-v1"))
    for n, lengths in enumerate([(200, 200), (8, 500)]):
        summary = json_of(run_of(tmp_path / str(n)))
        assert lengths[0] <= summary["eval_length_mean"] <= lengths[1]
        assert len(summary["per_seed"]["eval_return_mean"]) == 2 - n
    assert len(resets) == len(set(map(id, resets))) == 6  # training, evaluation and video, twice


def both_steps(env_id, action, num_envs=3):
    """Actions that the environments receive from `rollout`'s step and from `evaluate`'s."""
    env = gymnasium_envs.Gymnasium(gymnasium_envs.Args(env_id=env_id))
    pool = env.make_pool(np.arange(num_envs))
    pool.reset()
    with jax.enable_x64(True):
        step = pool.xla()[3]
        jax.block_until_ready(jax.jit(lambda x: step((), env.bounded(x)))(jnp.asarray(action)))
    pool.step(env.bounded(action))
    received = [single.unwrapped.actions for single in pool.envs.envs]
    pool.close()
    return np.array([x[0] for x in received]), np.array([x[1] for x in received])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 3), (4, 1)])
def test_box_actions(shape):
    """They have the shape and dtype of the space and are clipped per component."""
    high = 0.1 * np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape)
    space = spaces.Box(-high, high, shape, np.float64)
    action = np.random.default_rng(0).normal(size=(3, high.size)).astype("f")
    expected = action.reshape(3, *shape).astype(float).clip(-high, high)
    for received in both_steps(checked(action_space=space), action):
        assert received.dtype == np.float64
        np.testing.assert_array_equal(received, expected)


def test_discrete_actions():
    """They begin at the start of the space."""
    for space, action, expected in [
        (spaces.Discrete(3, start=-1), [[0], [1], [2]], [-1, 0, 1]),
        (spaces.MultiDiscrete([2, 3], start=[5, -1]), [[0, 0], [1, 1], [1, 2]], None),
        (spaces.MultiBinary(2), [[0, 1], [1, 1], [0, 0]], [[0, 1], [1, 1], [0, 0]]),
    ]:
        expected = np.add(action, [5, -1]) if expected is None else expected
        for received in both_steps(checked(action_space=space), np.int32(action)):
            np.testing.assert_array_equal(received, expected)


def test_policy_of_several_choices():
    """A product of distributions, without the choices that a component does not have."""
    env_id = checked(action_space=spaces.MultiDiscrete([2, 4]))
    args = gymnasium_envs.Args(env_id=env_id)
    script.make_env = gymnasium_envs.Gymnasium
    params = control.init_agent(args, jax.random.key(0), script.make_env(args))
    dist, _ = control.forward(args, params, jnp.ones((5, 2)))
    grid = np.stack(np.meshgrid(range(2), range(4)), -1).reshape(-1, 1, 2)
    log_prob = jnp.stack([dist.log_prob(jnp.broadcast_to(pair, (5, 2))) for pair in grid])
    np.testing.assert_allclose(jnp.exp(log_prob).sum(0), 1, rtol=1e-5)
    entropy = -(jnp.exp(log_prob) * log_prob).sum(0)
    np.testing.assert_allclose(dist.entropy(), entropy, rtol=1e-5)
    sample = jax.vmap(dist.sample)(jax.random.split(jax.random.key(1), 100))
    assert sample.max((0, 1)).tolist() == [1, 3]


def test_flatten():
    """Discrete parts become one-hot vectors; parts of a Dict are in the order of their names."""
    space = spaces.Dict(
        b=spaces.Tuple((spaces.Discrete(3, start=1), spaces.Box(0, 9, (2, 1)))),
        a=spaces.MultiDiscrete([2, 3]),
        c=spaces.MultiBinary(2),
    )
    obs = {"b": (np.array([3]), np.array([[[5.0], [6.0]]])), "a": np.array([[1, 0]])}
    flat = control.flatten(space, obs | {"c": np.array([[0, 1]])})
    np.testing.assert_array_equal(flat[0], [0, 1, 1, 0, 0, 0, 0, 1, 5, 6, 0, 1])


def test_spaces_that_are_refused():
    """In one line that names the space."""
    box = spaces.Box(0, 1, (2,))
    for options, message in [
        (dict(observation_space=spaces.Text(4)), "observations .*Text"),
        (dict(observation_space=spaces.Sequence(box)), "observations .*Sequence"),
        (dict(observation_space=spaces.Graph(box, None)), "observations .*Graph"),
        (dict(observation_space=spaces.Box(0, 1, (0,))), r"observations .*\(0,\)"),
        (dict(action_space=spaces.Box(0, 3, (2,), int)), "actions .*Box"),
        (dict(action_space=spaces.Dict(x=box)), "actions .*Dict"),
    ]:
        with pytest.raises(SystemExit, match=f"^error: {message}"):
            gymnasium_envs.main(["--env-id", checked(**options)])


def test_large_float64_observations():
    """The cast to float32 keeps small changes of times; observations near zero do not change."""
    for offset in (0.0, 5e6, 1.7e9):
        space = spaces.Box(offset - 3, offset + 3, (2,), np.float64)
        env = gymnasium_envs.Gymnasium(gymnasium_envs.Args(env_id=checked(observation_space=space)))
        pool = env.make_pool(np.arange(20))
        obs, _ = pool.reset()
        exact = pool.envs._observations - offset
        assert obs.dtype == np.float32 and exact.dtype == np.float64
        np.testing.assert_allclose(obs - obs.mean(), exact - exact.mean(), atol=1e-4)
        if not offset:
            np.testing.assert_array_equal(obs, np.float32(exact))
        pool.close()


def test_episodes_of_one_step(tmp_path):
    """Every second batch has no valid sample; the statistics stay finite."""
    words = small_words(tmp_path, env_id=checked(length=1), num_steps=1, total_timesteps=12)
    gymnasium_envs.main(words)
    arrays = arrays_of(run_of(tmp_path))
    assert arrays["params/obs/count"] == 6
    assert all(np.isfinite(x).all() for name, x in arrays.items() if name.startswith("params"))


class Headless(Checked):
    """Cannot render, like MuJoCo without a display."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, render_mode=None):
        super().__init__()

    def render(self):
        raise RuntimeError("no display")


gymnasium.register("Headless-v0", Headless, disable_env_checker=True)


def test_video_without_a_display(tmp_path, capsys):
    """The warning names the environment variable that helps."""
    gymnasium_envs.main(small_words(tmp_path, env_id="Headless-v0"))
    warning = capsys.readouterr().err
    assert "no display" in warning and "MUJOCO_GL=egl" in warning


class Journal(Checked):
    """Observes global random numbers through sqlite3, which is bound to a thread."""

    def __init__(self):
        super().__init__()
        self.table = sqlite3.connect(":memory:")
        self.table.execute("create table noise (x real, y real)")

    def reset(self, seed=None, options=None):
        super().reset()
        return np.zeros(2, np.float32), {}

    def step(self, action):
        _, *rest = super().step(action)
        self.table.execute("insert into noise values (?, ?)", (np.random.random(), random.random()))
        row = self.table.execute("select * from noise order by rowid desc limit 1").fetchone()
        return np.float32(row), *rest


gymnasium.register("Journal-v0", Journal, disable_env_checker=True)


def test_environments_of_one_thread_and_with_global_random_numbers(tmp_path):
    """sqlite3 works in all updates, and two runs of a seed are equal."""
    runs = []
    for name in "ab":
        gymnasium_envs.main(small_words(tmp_path / name, env_id="Journal-v0"))
        runs.append(arrays_of(run_of(tmp_path / name)))
    for name, x in runs[0].items():
        np.testing.assert_array_equal(x, runs[1][name])


def test_async_steps_equal_sync_steps():
    """With both vectorizations the pools return the same, also for global random numbers."""
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        outcomes = []
        for vectorization in ("sync", "async"):
            args = gymnasium_envs.Args(env_id=env_id, vectorization=vectorization)
            env = gymnasium_envs.Gymnasium(args)
            pool = env.make_pool(np.arange(3))
            outcomes.append([pool.reset()[0]])
            for t in range(40):
                action = (np.arange(3)[:, None] + t) % 2
                outcomes[-1].append(pool.step(action)[:4])
            pool.close()
        jax.tree.map(np.testing.assert_array_equal, *outcomes)


def test_async_command(tmp_path):
    """A training with processes ends with exit code 0."""
    path = ROOT / "benchmarks" / "environments" / "gymnasium_envs.py"
    words = small_words(tmp_path, env_id="CartPole-v1", vectorization="async")
    command = [sys.executable, str(path), *words]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (run_of(tmp_path) / "summary.json").exists() and "Traceback" not in done.stderr


# --- Procgen ---


def test_procgen_envpool(tmp_path, capsys):
    """Images, a network with other strides, a video."""
    try:
        procgen_envpool.Procgen(procgen_envpool.Args())
    except script.UserError as problem:
        pytest.skip(str(problem))
    words = small_words(tmp_path, num_steps=4, total_timesteps=16, eval_episodes=1)
    procgen_envpool.main(words)
    summary = json_of(run_of(tmp_path))
    assert summary["eval_return_mean"] in (0, 10) and "video: " in capsys.readouterr().out
