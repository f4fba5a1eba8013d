"""Other worlds in the Atari script: EnvPool families with float64, Gymnasium, any spaces."""

import functools
import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MODULES, ROOT, arrays_of, having, run_of, words_of

pytest.importorskip("envpool")
gymnasium = pytest.importorskip("gymnasium")
sys.path.insert(0, str(ROOT / "benchmarks" / "environments"))

import gymnasium_envs  # noqa: E402
import mujoco_envpool as control  # noqa: E402
import procgen_envpool  # noqa: E402

pytestmark = having("start_episodes")
script = next(module for module in MODULES if hasattr(module, "start_episodes"))
SMALL = dict(num_envs=2, num_steps=32, num_minibatches=2, update_epochs=1, eval_episodes=2)


@pytest.fixture(autouse=True)
def _restored(script, monkeypatch):
    """What the programs replace is put back after each test."""
    for name in ("Args", "make_env", "init_agent", "forward", "learn", "NatureCNN"):
        monkeypatch.setattr(script, name, getattr(script, name))


def small_words(folder, **options):
    folders = {"runs_dir": folder / "runs", "videos_dir": folder / "videos"}
    return words_of(**SMALL | {"total_timesteps": 192} | folders | options)


def rolled(args, env):
    """One rollout of fresh agents of the first program: trajectory [T, N, ...] of the first."""
    pool = env.make_pool(script.env_seeds(args, args.num_envs))
    state = script.start_episodes(args, env, pool, script.init_states(args))
    roll = jax.jit(functools.partial(script.rollout, args, env, pool))
    state, trajectory = jax.block_until_ready(roll(state))
    return jax.tree.map(lambda x: np.asarray(x[0]), (state._replace(key=None), trajectory))


# --------------------------------------------------------------------------------------------------
# EnvPool's families with float64
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["Hopper-v4", "MetaWorld/Reach-v3", "CheetahRun-v1"])
def test_float64_steps_equal_plain_steps(env_id):
    """Through XLA as through NumPy: observations, rewards, ends; actions within their bounds."""
    args = control.Args(env_id=env_id, num_envs=2, num_steps=64)
    script.make_env, script.init_agent, script.forward = (
        control.Vectors,
        control.init_agent,
        control.forward,
    )
    env = script.make_env(args)
    state, trajectory = rolled(args, env)
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
        obs, reward, terminated, truncated, _ = plain.step(
            np.clip(action, space.low, space.high).astype(space.dtype)
        )
        np.testing.assert_array_equal(trajectory.reward[t], np.float32(reward))
        np.testing.assert_array_equal(trajectory.terminated[t], terminated)
        np.testing.assert_array_equal(trajectory.truncated[t], truncated)
        over = valid & (terminated | truncated)
        score = np.where(over, 0, score + valid * reward)
        valid = ~(terminated | truncated)
    assert outside > 0 and trajectory.action.dtype == np.float32
    np.testing.assert_allclose(state.stats.running_return, score, 1e-5, 1e-5)


def test_ids_that_cannot_be_had(capsys):
    """One line that names the id and near ones; so does a family whose library is missing."""
    for words in (["--env-id", "HalfChetah-v4"], ["--env-id", "VizdoomCustom-v1"]):
        with pytest.raises(SystemExit, match=f"^error: --env-id {words[1]}: .*near it: "):
            control.main(words)
    with pytest.raises(SystemExit, match="^error: --env-id Missing-v0: "):
        gymnasium_envs.main(["--env-id", "Missing-v0"])
    with pytest.raises(SystemExit, match=r"^error: actions are .*, not MultiDiscrete\(\[2 2\]\)"):
        gymnasium_envs.main(["--env-id", "Corridor-v0"])


def test_mujoco_envpool(tmp_path, capsys):
    """A Dict joined, no video and no word of one, `--eval` with other sizes, `--resume`."""
    control.main(small_words(tmp_path, env_id="CartpoleBalance-v1"))
    run_dir = run_of(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval_mode"] == "sampled" and "eval_protocol" not in summary
    assert 0 < summary["eval_return_mean"] <= summary["eval_length_mean"] == 1000
    assert not (tmp_path / "videos").exists()
    control.main(words_of(eval=run_dir, num_envs=5))
    evaluation = json.loads((run_dir / "eval.json").read_text())
    assert evaluation["per_seed"] == summary["per_seed"]
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
    assert "video" not in "".join(capsys.readouterr()).replace("videos", "")


def test_statistics_by_definition():
    """Those of valid samples alone, in pieces as at once; rewards over the deviation of sums."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 5, size=(4, 20, 3, 2)).astype("f")
    valid = rng.random((4, 20, 3)) < 0.7
    seen = {"count": jnp.zeros(()), "mean": jnp.zeros(2), "var": jnp.ones(2)}
    for piece, mask in zip(x, valid):
        seen = control.updated(seen, jnp.asarray(piece), jnp.asarray(mask))
    np.testing.assert_allclose(seen["count"], valid.sum())
    np.testing.assert_allclose(seen["mean"], x[valid].mean(0), rtol=1e-5)
    np.testing.assert_allclose(seen["var"], x[valid].var(0), rtol=1e-5)


def test_rewards_are_scaled_as_defined(monkeypatch):
    """The discounted sum goes on over rollouts, ends with an episode, skips steps that reset."""
    args = control.Args(env_id="Hopper-v4", num_envs=2, num_steps=64)
    script.make_env, script.init_agent, script.forward = (
        control.Vectors,
        control.init_agent,
        control.forward,
    )
    state, trajectory = rolled(args, script.make_env(args))
    seen = []
    monkeypatch.setattr(
        control, "plain_learn", lambda args, state, steps: (seen.append(steps) or state, {})
    )
    first = np.float32([2.0, -1.0])
    state = state._replace(env_state=state.env_state._replace(memory=first))
    after, _ = control.learn(args, state, trajectory)
    running, sums = first.astype(float), []
    for reward, valid, terminated, truncated in zip(
        trajectory.reward, trajectory.valid, trajectory.terminated, trajectory.truncated
    ):
        running = np.where(valid, args.gamma * running + reward, running)
        sums += list(running[valid])
        running = np.where(terminated | truncated, 0.0, running)
    assert trajectory.terminated.any() and not trajectory.valid.all()
    expected = np.clip(trajectory.reward / np.sqrt(np.var(sums) + 1e-8), -10, 10)
    np.testing.assert_allclose(seen[0].reward, expected, rtol=1e-4)
    np.testing.assert_allclose(after.env_state.memory, running, rtol=1e-4)
    samples = trajectory.obs[trajectory.valid]
    np.testing.assert_allclose(after.params["obs"]["mean"], samples.mean(0), 1e-4, 1e-5)


# --------------------------------------------------------------------------------------------------
# Environments in Python
# --------------------------------------------------------------------------------------------------


class Corridor(gymnasium.Env):
    """Walk right; the two numbers of an action must agree to move. Fails at a step of all."""

    observation_space = gymnasium.spaces.Dict(
        place=gymnasium.spaces.Box(0, 9, (1,), np.float64), even=gymnasium.spaces.Discrete(2)
    )
    action_space = gymnasium.spaces.MultiDiscrete([2, 2])
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


class Pairs(NamedTuple):
    """Two independent choices."""

    logits: jax.Array  # [..., 2, A]

    def choice(self):
        return script.Categorical(logits=self.logits)

    def sample(self, key):
        return self.choice().sample(key)

    def mode(self):
        return self.choice().mode()

    def log_prob(self, action):
        return self.choice().log_prob(action).sum(-1)

    def entropy(self):
        return self.choice().entropy().sum(-1)


class Walk(gymnasium_envs.Gymnasium):
    """Observations stay a tree."""

    start, read = script.World.start, script.World.read


def walk_agent(args, key, env):
    return {"logits": jnp.zeros((2, 2)), "value": jnp.zeros(2)}


def walk_forward(args, params, obs):
    x = jnp.stack([obs["place"][:, 0], obs["even"]], axis=1) / 9
    logits = jnp.broadcast_to(params["logits"], (len(x), 2, 2)) + 0 * x[:, :, None]
    return Pairs(logits=logits), x @ params["value"]


WALK = (walk_agent, walk_forward, script.learn)


def test_gymnasium_steps_equal_plain_steps():
    """A Dict and a MultiDiscrete, kept as they are: the same as the environments stepped alone."""
    args = gymnasium_envs.Args(env_id="Corridor-v0", num_envs=3, num_steps=50)
    script.make_env, script.init_agent, script.forward = Walk, *WALK[:2]
    Corridor.fails_at = None
    _, trajectory = rolled(args, Walk(args))
    assert trajectory.action.shape == (50, 3, 2)
    ended = 0
    for n, seed in enumerate(script.env_seeds(args, 3).tolist()):
        env, over = gymnasium.make("Corridor-v0"), False
        obs, _ = env.reset(seed=seed)
        for t in range(50):
            np.testing.assert_array_equal(trajectory.obs["place"][t, n], obs["place"])
            assert trajectory.obs["even"][t, n] == obs["even"]
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
    """What was learned until then is saved, and is gone on with; the error keeps its traceback."""
    Corridor.steps, Corridor.fails_at = 0, 1500
    words = small_words(tmp_path, env_id="Corridor-v0", total_timesteps=3200)
    words += words_of(checkpoint_interval=1000, log_interval=2)
    options = dict(args=gymnasium_envs.Args, world=Walk, agent=WALK)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: of my own"):
        control.main(words, **options)
    run_dir = run_of(tmp_path)
    # Of 64 steps an update some only reset, at most one in four.
    (saved,) = arrays_of(run_dir)["update"]
    assert 1500 // 64 - 2 <= saved < 1500 * 4 / 3 / 64
    assert f"saved update {saved}; to go on: --resume {run_dir}" in capsys.readouterr().out
    Corridor.fails_at = None
    control.main(words_of(resume=run_dir), **options)
    assert arrays_of(run_dir)["update"] == 50


def test_gymnasium_envs(tmp_path, capsys, monkeypatch):
    """Continuous and discrete actions, with the agent of the program; a pool is reset once."""
    resets, reset = [], gymnasium_envs.Pool.reset
    count = lambda pool: resets.append(pool) or reset(pool)
    monkeypatch.setattr(gymnasium_envs.Pool, "reset", count)
    gymnasium_envs.main(small_words(tmp_path / "0", env_id="Pendulum-v1", num_seeds=2))
    gymnasium_envs.main(small_words(tmp_path / "1", env_id="CartPole-v1"))
    for n, lengths in enumerate([(200, 200), (8, 500)]):
        summary = json.loads((run_of(tmp_path / str(n)) / "summary.json").read_text())
        assert lengths[0] <= summary["eval_length_mean"] <= lengths[1]
        assert len(summary["per_seed"]["eval_return_mean"]) == 2 - n
    assert len(resets) == len(set(map(id, resets))) == 6  # training, evaluation and video, twice


# --------------------------------------------------------------------------------------------------
# Procgen
# --------------------------------------------------------------------------------------------------


def test_procgen_envpool(tmp_path, capsys):
    """Pictures, a network with other strides, a video of them."""
    try:
        procgen_envpool.Procgen(procgen_envpool.Args())
    except script.UserError as problem:
        pytest.skip(str(problem))
    words = small_words(tmp_path, num_steps=4, total_timesteps=16, eval_episodes=1)
    procgen_envpool.main(words)
    summary = json.loads((run_of(tmp_path) / "summary.json").read_text())
    assert summary["eval_return_mean"] in (0, 10) and "video of seed 1: " in capsys.readouterr().out
