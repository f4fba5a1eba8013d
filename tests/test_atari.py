"""ppo_atari_envpool_xla_jax.py: EnvPool through XLA against its plain interface, masked transitions, the network."""

import dataclasses
import functools
import json
import re
import signal
import subprocess
import sys

import flax.linen as nn
import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MODULES, ROOT, having, quick_args, run_of

pytestmark = having("make_pool")
script = next((module for module in MODULES if hasattr(module, "make_pool")), None)


@pytest.fixture(autouse=True)
def _script(script):
    """All tests of this file are of one script."""


def play(args):
    """One rollout of fresh agents: (state before it, env_state and episodes after it, trajectory), each of K agents."""
    envs = script.make_env(args)
    state = script.init_train_state(args, script.seed_keys(args), envs)
    keys = script.seed_keys(args)
    roll = jax.jit(lambda state: script.rollout(args, envs, state.params, state.env_state, state.episodes, keys))
    return state, *jax.tree.map(np.asarray, roll(state))


# ----------------------------------------------------------------------------------------------------------------------
# EnvPool
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["Breakout-v5", "Pong-v5", "Seaquest-v5"])
def test_xla_steps_equal_plain_steps(game):
    """The same seeds and actions for 5,000 steps: identical frames, rewards, flags and information."""
    args = quick_args(script, env_id=game, max_episode_steps=27_000)
    pools = [script.make_pool(args, np.array([7]), training=True) for _ in range(2)]
    actions = np.random.default_rng(0).integers(pools[0].action_space.n, size=(20, 250, 1), dtype=np.int32)
    obs, plain = pools[0].reset(), pools[1]
    np.testing.assert_array_equal(obs[0], plain.reset()[0])
    handle, _, _, step = pools[0].xla()
    steps = jax.jit(lambda actions: jax.lax.scan(step, handle, actions)[1])
    ended = 0
    for chunk in actions:
        ours = jax.tree.map(np.asarray, steps(chunk))
        for t, action in enumerate(chunk):
            theirs = plain.step(action)
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[t], ours), theirs)  # noqa: B023
            ended += theirs[2][0]
    assert ended > 3


@pytest.mark.parametrize("limit", [20, 27_000, "life"])
def test_rollout_equals_replay(limit):
    """The actions of a rollout again through the plain interface: frames, flags, masks, statistics of games, lives.

    With the limit "life" a game is truncated by the very step that loses its first life.
    """
    args = quick_args(script, num_envs=2, num_steps=300, total_timesteps=600, max_episode_steps=27_000)
    if limit == "life":
        limit = int(play(args)[3].terminated[0, :, 0].argmax()) + 1
    args = dataclasses.replace(args, max_episode_steps=limit)
    _, env_state, episodes, trajectory = play(args)
    steps = jax.tree.map(lambda x: x[0], trajectory)
    plain = script.make_env(args)
    obs, info = plain.reset()
    valid, ret, length, last_ret, last_length = (
        np.ones(2, bool),
        np.zeros(2),
        np.zeros(2, int),
        *np.full((2, 2), np.nan),
    )
    truncations = lost_lives = both = 0
    for t in range(args.num_steps):
        np.testing.assert_array_equal(steps.obs[t], obs)
        np.testing.assert_array_equal(steps.valid[t], valid)
        lives = info["lives"]
        obs, reward, terminated, truncated, info = plain.step(steps.action[t])
        lost = truncated & ((info["lives"] < lives) | (info["terminated"] > 0))  # EnvPool does not call it terminated
        flags = reward, terminated | lost, truncated
        np.testing.assert_array_equal((steps.reward[t], steps.terminated[t], steps.truncated[t]), flags)
        both += lost.sum()
        assert not (~valid & (terminated | truncated | (info["reward"] != 0))).any()  # a reset step tells nothing
        ret, length = ret + valid * info["reward"], length + valid
        over = valid & ((info["terminated"] > 0) | truncated)
        last_ret, last_length = np.where(over, ret, last_ret), np.where(over, length, last_length)
        ret, length = np.where(over, 0, ret), np.where(over, 0, length)
        valid = ~(terminated | truncated)
        truncations, lost_lives = (
            truncations + truncated.sum(),
            lost_lives + (terminated & (info["terminated"] == 0)).sum(),
        )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x[0], y), tuple(episodes), (ret, length, last_ret, last_length)
    )
    np.testing.assert_array_equal(env_state.obs[0], obs)
    np.testing.assert_array_equal((env_state.done[0], env_state.lives[0]), (~valid, info["lives"]))
    if limit == 20:
        assert truncations == 2 * (300 // 21)
    else:
        assert lost_lives > 4 and (truncations, both) == (0, 0) if limit == 27_000 else both > 0
    assert (length <= limit).all() and np.isfinite(last_ret).all()


def test_agents_share_a_pool_but_not_their_games():
    """Two agents in one pool: after one update the second one equals a run of its own."""
    results = []
    for args in (quick_args(script, num_seeds=2), quick_args(script, seed=2)):
        envs = script.make_env(args)
        state, metrics = script.make_train_step(args, envs)(script.init_train_state(args, script.seed_keys(args), envs))
        results.append(jax.tree.map(np.asarray, (script.flatten_state(state), metrics)))
    together, alone = results
    assert (together[0]["env_state/obs"][0] != together[0]["env_state/obs"][1]).any()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y[0], 1e-5, 1e-5), together, alone)


# ----------------------------------------------------------------------------------------------------------------------
# Network
# ----------------------------------------------------------------------------------------------------------------------


class PlainNatureCNN(nn.Module):
    """The network as one would write it, with flax's own convolutions."""

    @nn.compact
    def __call__(self, obs):
        x = obs.transpose(0, 2, 3, 1) / 255.0
        for i, (features, extent, stride) in enumerate([(32, 8, 4), (64, 4, 2), (64, 3, 1)]):
            x = nn.relu(nn.Conv(features, (extent, extent), stride, "VALID", name=f"conv{i}")(x))
        x = nn.relu(nn.Dense(512, name="dense")(x.reshape(len(x), -1)))
        return nn.Dense(4, name="actor")(x), nn.Dense(1, name="critic")(x)[:, 0]


@pytest.mark.parametrize("by_products", [False, True])
def test_network_equals_plain_convolutions(by_products):
    """The same weights, outputs and gradients, whichever way the convolutions are computed."""
    key = jax.random.key(0)
    ours = script.init_params(key, 4)["params"]
    biases = {name: jax.random.normal(key, x.shape) for name, x in ours.items() if name.endswith("_bias")}
    ours = ours | biases
    convolutions = {f"conv{i}": {"kernel": ours[f"conv{i}"], "bias": ours[f"conv{i}_bias"]} for i in range(3)}
    plain = {name: ours[name] for name in ("dense", "actor", "critic")} | convolutions
    obs = jax.random.randint(key, (3, 4, 84, 84), 0, 256).astype(jnp.uint8)
    results = []
    for model, params in [(script.NatureCNN(4, by_products), ours), (PlainNatureCNN(), plain)]:
        outputs = lambda params: model.apply({"params": params}, obs)  # noqa: B023
        loss = lambda params: sum((x**2).sum() for x in outputs(params))  # noqa: B023
        results.append((outputs(params), jax.grad(loss)(params)))
    (ours, grads), (expected, plain_grads) = results
    close = lambda x, y: np.testing.assert_allclose(x, y, 1e-3, 1e-5 * float(jnp.abs(y).max()))
    jax.tree.map(close, ours, expected)
    for i in range(3):
        plain_grads[f"conv{i}_bias"], plain_grads[f"conv{i}"] = (
            plain_grads[f"conv{i}"]["bias"],
            plain_grads[f"conv{i}"]["kernel"],
        )
    jax.tree.map(close, dict(grads), dict(plain_grads))


def test_initial_weights_are_orthogonal():
    """Gains sqrt(2), 0.01 for the actor's head and 1 for the critic's; zero biases."""
    params = script.init_params(jax.random.key(0), 4)["params"]
    for name, gain in [*((f"conv{i}", 2**0.5) for i in range(3)), ("dense", 2**0.5), ("actor", 0.01), ("critic", 1)]:
        w = np.asarray(params[name] if name.startswith("conv") else params[name]["kernel"])
        w = w.reshape(-1, w.shape[-1])
        np.testing.assert_allclose(w.T @ w, gain**2 * np.eye(w.shape[1]), atol=1e-5 * gain**2)
        assert not np.any(params[f"{name}_bias"] if name.startswith("conv") else params[name]["bias"])


# ----------------------------------------------------------------------------------------------------------------------
# Masked transitions
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truncated_games():
    """(args, params, trajectory [T, N], last values [N]) of games of at most 7 steps; one ends with the rollout."""
    args = quick_args(script, num_envs=4, num_steps=24, total_timesteps=960, max_episode_steps=7, clip_vloss=True)
    state, _, _, trajectory = play(args)
    params = jax.tree.map(lambda x: x[0], state.params)
    trajectory = jax.tree.map(lambda x: jnp.asarray(x[0]), trajectory)
    assert not trajectory.valid[-1].any() and trajectory.truncated[-2].all()  # 24 = 3 * (7 + 1)
    return args, params, trajectory, jnp.arange(4.0)


@functools.cache
def loss_and_gradients(args):
    """The jitted loss of a batch in one to four shards, reduced over these as over devices, with its gradients."""
    loss = jax.value_and_grad(script.ppo_loss, has_aux=True)
    reduced = lambda params, batch: jax.lax.pmean(loss(params, batch, args), script.AXIS)
    shards = jax.jit(jax.vmap(reduced, (None, 0), axis_name=script.AXIS))

    def call(params, batch, number=1):
        split = jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), batch)
        return jax.tree.map(lambda x: np.asarray(x[0]), shards(params, split))

    return call


def gradients(args, params, trajectory, last_value):
    """Bytes of loss, metrics and gradients of a whole rollout."""
    results = loss_and_gradients(args)(params, script.make_batch(args, trajectory, last_value))
    return [x.tobytes() for x in jax.tree.leaves(results)]


def test_masked_transitions_change_no_gradient(truncated_games):
    """Action, log-probability, reward, flags and successor of masked ones: gradients are the same bit for bit."""
    args, params, trajectory, last_value = truncated_games
    expected = gradients(*truncated_games)
    masked, rng = ~trajectory.valid, np.random.default_rng(0)
    noise = jnp.asarray(rng.normal(size=masked.shape), jnp.float32)
    changes = {
        "action": (trajectory.action + 1) % 4,
        "logprob": trajectory.logprob + noise,
        "reward": trajectory.reward + 10 * noise,
        "terminated": ~trajectory.terminated,
        "truncated": ~trajectory.truncated,
    }
    for name, changed in changes.items():
        everywhere = trajectory._replace(**{name: changed})
        masked_only = trajectory._replace(**{name: jnp.where(masked, changed, getattr(trajectory, name))})
        assert gradients(args, params, masked_only, last_value) == expected, name
        assert gradients(args, params, everywhere, last_value) != expected, name
    assert gradients(args, params, trajectory, last_value + 5) == expected  # what follows the last, masked, step


def test_truncated_games_are_bootstrapped_with_their_last_frame(truncated_games):
    """Targets by the definition; the value of the frame before a reset counts after truncation only."""
    args, params, trajectory, last_value = truncated_games
    batch = script.make_batch(args, trajectory, last_value)
    np.testing.assert_array_equal(batch.ret, batch.advantage + batch.value)
    np.testing.assert_array_equal(batch.value, trajectory.value.reshape(-1))
    advantage = batch.advantage.reshape(trajectory.reward.shape)
    values, _ = script.forward(params, trajectory.obs[8])[::-1]
    step = lambda x: np.asarray(x[6])  # the seventh of every game's steps is its last
    assert trajectory.truncated[6].all() and not trajectory.valid[7].any()
    final = script.forward(params, trajectory.obs[7])[1]
    expected = step(trajectory.reward) + args.gamma * np.asarray(final) - step(trajectory.value)
    np.testing.assert_allclose(advantage[6], expected, rtol=1e-4, atol=1e-6)
    ended = trajectory._replace(terminated=trajectory.truncated, truncated=jnp.zeros_like(trajectory.truncated))
    for steps, counts in [(trajectory, True), (ended, False)]:
        changed = steps._replace(value=jnp.where(steps.valid, steps.value, steps.value + 1))
        same = gradients(args, params, steps, last_value) == gradients(args, params, changed, last_value)
        assert same != counts


@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_loss_equals_definition_over_valid_samples(truncated_games, norm_adv, clip_vloss):
    """NumPy, without the masked samples, on one device and on four that have different numbers of valid ones."""
    args, params, trajectory, last_value = truncated_games
    args = quick_args(script, norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.1)
    batch, rng = script.make_batch(args, trajectory, last_value), np.random.default_rng(0)
    valid = rng.random(96) < np.repeat([0.2, 0.4, 0.8, 1.0], 24)
    logprob, value, advantage = (
        x + 0.3 * rng.normal(size=96).astype("f") for x in (batch.logprob, batch.value, batch.advantage)
    )
    batch = batch._replace(valid=jnp.asarray(valid), logprob=logprob, value=value, advantage=advantage)

    one, four = (loss_and_gradients(args)(params, batch, number) for number in (1, 4))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-3, 1e-6 + 1e-4 * np.abs(y).max()), four, one)
    logits, new_value = (np.asarray(x)[valid] for x in script.forward(params, batch.obs))
    kept = jax.tree.map(lambda x: np.asarray(x)[valid], batch._replace(obs=batch.action))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    ratio = p[np.arange(len(p)), kept.action] / np.exp(kept.logprob)
    adv = (kept.advantage - kept.advantage.mean()) / (kept.advantage.std() + 1e-8) if norm_adv else kept.advantage
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    errors = (new_value - kept.ret) ** 2
    if clip_vloss:
        near = np.clip(new_value, kept.value - args.clip_coef, kept.value + args.clip_coef)
        errors = np.maximum(errors, (near - kept.ret) ** 2)
    policy_loss = -np.minimum(ratio * adv, np.clip(ratio, low, high) * adv).mean()
    expected = policy_loss + args.vf_coef * 0.5 * errors.mean() + 0.1 * (p * np.log(p)).sum(1).mean()
    (loss, metrics), _ = one
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["losses/clipfrac"], np.mean((ratio < low) | (ratio > high)), atol=1e-6)


def test_minibatch_without_valid_samples(truncated_games):
    """Nothing to learn from: the gradients are zero, not NaN."""
    args, params, trajectory, last_value = truncated_games
    batch = script.make_batch(args, trajectory._replace(valid=jnp.zeros_like(trajectory.valid)), last_value)
    (value, _), grads = loss_and_gradients(args)(params, batch)
    assert value == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))


# ----------------------------------------------------------------------------------------------------------------------
# Services
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_evaluation_plays_whole_games_and_films_the_first(mode, tmp_path):
    """The recorded actions again, in colour: the same score and length, all lives; twice the same."""
    args = quick_args(script, max_episode_steps=150, eval_mode=mode)
    envs = script.make_env(args)
    params = script.init_train_state(args, script.seed_keys(args), envs).params
    results = [script.evaluate(args, params, script.evaluation_keys(args)) for _ in range(2)]
    (returns, lengths, actions), _ = results
    np.testing.assert_equal(*results)
    seeds, look = script.env_seeds(args, args.eval_episodes, 1)[0, :1], dict(img_height=210, img_width=160)
    colour = script.make_pool(args, seeds, gray_scale=False, **look)
    colour.reset()
    played = [colour.step(np.array([action])) for action in actions]
    assert sum(step[4]["reward"][0] for step in played) == returns[0, 0]
    assert [bool(step[2][0] | step[3][0]) for step in played] == [False] * (lengths[0, 0] - 1) + [True]
    assert played[-1][3][0] or played[-1][4]["lives"][0] == 0
    script.record_video(args, tmp_path / "game.mp4", (returns, lengths, actions[:10]))
    with imageio.get_reader(tmp_path / "game.mp4") as reader:
        frames = np.stack([frame for frame in reader])
    expected = np.stack([step[0][0, -3:].transpose(1, 2, 0).astype(int) for step in played[:10]])
    assert frames.shape == (11, 210, 160, 3) and np.abs(frames[1:] - expected).mean() < 8


def test_interrupted_run_goes_on_with_new_games(tmp_path, monkeypatch, capsys):
    """Parameters, optimiser, schedule, key and counters go on where they were; the games do not, which is said."""
    evaluate = script.evaluate

    def stopping(*args):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    folders = {"runs_dir": str(tmp_path / "runs"), "videos_dir": str(tmp_path / "videos")}
    args = quick_args(script, capture_video=True, video_interval=3, total_timesteps=192, **folders)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(script, "evaluate", stopping)
        script.main(args)
    run_dir = run_of(tmp_path)
    _, stopped = script.load_run(run_dir)
    assert (stopped.update == 3).all() and "games start anew" not in capsys.readouterr().out
    fresh = script.init_train_state(args, script.seed_keys(args), script.make_env(args))
    resumed = script.with_new_games(stopped, fresh)
    ours, expected = script.flatten_state(resumed), script.flatten_state(stopped)
    for name in expected:
        if not name.startswith(("env_state", "episodes")):
            np.testing.assert_array_equal(ours[name], expected[name])
    np.testing.assert_array_equal(resumed.episodes.last_ret, stopped.episodes.last_ret)
    assert not resumed.episodes.length.any() and stopped.episodes.length.any()
    script.main(script.Args(resume=str(run_dir), videos_dir=folders["videos_dir"], video_interval=1000))
    assert "games start anew" in capsys.readouterr().out
    _, final = script.load_run(run_dir)
    _, key = jax.random.split(script.seed_keys(args)[0])  # the first one is for the parameters
    for _ in range(6):
        key, *_ = jax.random.split(key, 3)
    assert (final.update == 6).all() and (final.key[0] == jax.random.key_data(key)).all()
    assert (final.opt_state[1].count == 6 * args.update_epochs * args.num_minibatches).all()
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"


def test_unknown_game_lists_near_names():
    with pytest.raises(script.UsageError, match="Breakuot-v5.*Breakout-v5"):
        quick_args(script, env_id="Breakuot-v5")


def test_several_devices_are_refused():
    with pytest.raises(script.UsageError, match="--num-devices 2.*--distributed"):
        quick_args(script, num_devices=2)


def test_tpu_is_refused(monkeypatch):
    args = quick_args(script)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(script.RunError, match="needs a CPU or CUDA GPU"):
        script.make_env(args)


def test_machine_without_envpool():
    """Importing works; running is wrong usage and says how to install EnvPool."""
    name, rest = f"{script.__name__}.py", "sys.argv = ['script']; runpy.run_path(name, run_name='__main__')"
    code = f"import sys, runpy; sys.modules['envpool'] = None; name = {name!r}; runpy.run_path(name); {rest}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    message = " ".join(re.findall(r"[^\s│]+", result.stderr))  # tyro breaks lines in its box
    assert result.returncode == 2 and "pip install envpool" in message and "Traceback" not in message
