"""The recurrent part of ppo_minigrid_rnn.py: replay, truncation values, resets, loss."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_ppo import close, numpy_ppo_loss, scipy_distribution

import ppo_minigrid_rnn as script

SMALL = dict(num_envs=16, num_steps=24, num_minibatches=2, rnn_hidden_dim=16, head_hidden_dim=16, action_emb_dim=4)


def short_env(monkeypatch, env_id="MiniGrid-Empty-5x5-v0", max_steps=7):
    """Makes an id's episodes so short that most are truncated."""
    env = script.dataclasses.replace(script.ENVIRONMENTS[env_id], max_steps=max_steps)
    monkeypatch.setitem(script.ENVIRONMENTS, env_id, env)
    return env


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(args, env, params, inputs, hidden):
    return script.forward(args, env, params, inputs, hidden)


def roll(args, key=0):
    """An agent with weights that matter and two rollouts: (env, params, memory before, trajectory) of the second."""
    env = script.make_env(args)
    state = jax.tree.map(lambda x: x[0], script.init_train_state(args, script.seed_keys(args)))
    noise = lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape)
    params = jax.tree.map(noise, state.params)
    rollout = jax.jit(lambda *carry: script.rollout(args, env, params, *carry))
    carry = rollout(state.env_state, state.memory, state.episodes, jax.random.key(key))[:3]
    return env, params, carry[1], rollout(*carry, jax.random.key(key + 1))[3]


@pytest.mark.parametrize(
    "options",
    [{}, {"reset_hidden": False}, {"rnn_num_layers": 2}, {"img_obs": True, "num_steps": 10}],
    ids=["reset", "no-reset", "two-layers", "pixels"],
)
def test_replay_reproduces_the_rollout(monkeypatch, options):
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", **SMALL | options)
    env, params, memory, trajectory = roll(args)
    done = np.asarray(trajectory.terminated | trajectory.truncated)
    assert done.any(0).all()
    logits, values, hidden = forward(args, env, params, trajectory.inputs, memory.hidden)
    np.testing.assert_allclose(values, trajectory.value, atol=2e-5)
    np.testing.assert_allclose(hidden, trajectory.successor[1].hidden, atol=2e-5)
    np.testing.assert_allclose(script.action_logprob(logits, trajectory.action), trajectory.logprob, atol=2e-5)
    # whole environments in another order are the same sequences
    some = np.array([5, 2, 11])
    inputs = jax.tree.map(lambda x: x[:, some], trajectory.inputs)
    part = forward(args, env, params, inputs, memory.hidden[some])[1]
    np.testing.assert_allclose(part, trajectory.value[:, some], atol=2e-5)
    # and the hidden state matters: forgetting it is seen
    forgotten = forward(args, env, params, trajectory.inputs, memory.hidden * 0)[1]
    assert abs(forgotten - trajectory.value)[0].max() > 1e-3


def test_bfloat16_is_close_to_float32(monkeypatch):
    """The same weights: values and log-probabilities differ by the rounding of products; all else is float32."""
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", **SMALL)
    env, params, memory, trajectory = roll(args)
    half = script.dataclasses.replace(args, bf16=True)
    outputs = [forward(a, env, params, trajectory.inputs, memory.hidden) for a in (args, half)]
    for exact, rounded in zip(*outputs, strict=True):
        assert rounded.dtype == exact.dtype == jnp.float32
        error = abs(exact - rounded).mean() / abs(exact).mean()
        assert 1e-5 < error < 0.05


@pytest.mark.parametrize("reset", [True, False])
def test_memory_across_episode_ends(monkeypatch, reset):
    env = short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", reset_hidden=reset, **SMALL)
    env, params, _, trajectory = roll(args)
    inputs, done = trajectory.inputs, np.asarray(trajectory.terminated | trajectory.truncated)[:-1]
    before, after = np.asarray(trajectory.successor[1].action)[:-1], np.asarray(inputs.action)[1:]
    assert (after[~done] == before[~done]).all()
    assert (after[done] == (env.num_actions if reset else before[done])).all()
    assert (np.asarray(inputs.reward)[1:][done] == (0 if reset else np.asarray(trajectory.reward)[:-1][done])).all()
    assert ((np.asarray(inputs.action) == env.num_actions)[1:] == (done & reset)).all()
    # a first step of an episode gives what a fresh memory gives, only with resets
    t, n = np.argwhere(done)[0] + (1, 0)
    first = jax.tree.map(lambda x: x[t : t + 1, n : n + 1], inputs)
    fresh = forward(args, env, params, first, jnp.zeros_like(trajectory.successor[1].hidden[0, :1]))[1][0, 0]
    assert (abs(fresh - trajectory.value[t, n]) < 1e-5) == reset


@pytest.mark.parametrize("reset", [True, False])
def test_consecutive_evaluation_episodes(monkeypatch, reset):
    """With resets a second episode is played as if it were the first; without, what was remembered matters."""
    short_env(monkeypatch, max_steps=20)
    options = dict(eval_consecutive_episodes=2, eval_episodes=64, eval_mode="sampled")
    args = script.Args(env_id="Empty-5x5", reset_hidden=reset, **SMALL | options)
    params = jax.tree.map(lambda x: x[None], roll(args)[1])
    # The same random numbers in both episodes.
    monkeypatch.setattr(script.jax.random, "split", lambda key, num=2: jnp.stack([key] * num))
    lengths = script.evaluate(args, params, script.evaluation_keys(args))[1][0]
    assert (lengths[0] == lengths[1]).all() == reset


@pytest.mark.parametrize("reset", [True, False])
def test_successor_values_against_brute_force(monkeypatch, reset):
    env = short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", reset_hidden=reset, **SMALL)
    env, params, _, trajectory = roll(args)
    assert (np.asarray(trajectory.truncated).sum(0) >= 3).all()  # several windows of max_steps
    next_values = np.asarray(script.trajectory_values(args, env, params, trajectory))

    def value_after(env_state, memory):  # of all environments, without any reset
        return forward(args, env, params, script.see(args, env, env_state, memory), memory.hidden)[1][0]

    expected = np.asarray(jax.vmap(value_after)(*trajectory.successor))
    terminated = np.asarray(trajectory.terminated)  # these have no successor
    np.testing.assert_allclose(next_values[~terminated], expected[~terminated], atol=2e-5)
    truncated = np.asarray(trajectory.truncated)[:-1]
    wrong = np.asarray(trajectory.value)[1:][truncated]  # what a bootstrap from the next episode would use
    assert abs(wrong - expected[:-1][truncated]).max() > 1e-2


def test_truncation_follows_the_step_count(monkeypatch):
    env = short_env(monkeypatch)
    _, _, _, trajectory = roll(script.Args(env_id="Empty-5x5", **SMALL))
    count = np.asarray(trajectory.successor[0].step_count)
    assert ((count == env.max_steps) == np.asarray(trajectory.truncated)).all() and count.max() == env.max_steps
    done = np.asarray(trajectory.terminated | trajectory.truncated)
    assert (count[1:][done[:-1]] == 1).all()


LOSSES = pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])


def loss_of_rollout(norm_adv, clip_vloss, monkeypatch):
    """(args, env, params, batch, hidden, loss): policy and values differ from the rollout's enough for clipping."""
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.1, **SMALL)
    env, params, memory, trajectory = roll(args)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + jnp.asarray(0.1 * rng.normal(size=p.shape), p.dtype), params)
    advantage, ret = jnp.asarray(rng.normal(size=(2, *trajectory.reward.shape)), trajectory.value.dtype)
    steps = trajectory.inputs, trajectory.action, trajectory.logprob
    batch = script.Batch(*steps, 3 + 2 * advantage, ret, trajectory.value)
    ppo_loss = lambda params: script.ppo_loss(params, batch, memory.hidden, args, env)

    @jax.jit
    def loss(params):  # on a mesh of one device
        one_device = jax.vmap(ppo_loss, axis_name=script.AXIS)(jax.tree.map(lambda x: x[None], params))
        return jax.tree.map(lambda x: x[0], one_device)

    return args, env, params, batch, memory.hidden, loss


@LOSSES
def test_loss_equals_definition(monkeypatch, norm_adv, clip_vloss):
    """Loss and metrics of whole sequences against NumPy, given the logits and values of the replay."""
    args, env, params, batch, hidden, loss = loss_of_rollout(norm_adv, clip_vloss, monkeypatch)
    logits, value, _ = forward(args, env, params, batch.inputs, hidden)
    logits = np.asarray(logits, float).reshape(-1, env.num_actions).T
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1), batch._replace(inputs=()))
    expected = numpy_ppo_loss(*scipy_distribution(logits, flat.action), np.asarray(value).reshape(-1), flat, args)
    assert 0.1 < expected[1]["losses/clipfrac"] < 0.9
    close(loss(params), expected, rtol=1e-4)


@LOSSES
def test_loss_gradient_equals_finite_differences(monkeypatch, norm_adv, clip_vloss):
    """Central differences in float64, in the direction of each array's own gradient."""
    monkeypatch.setattr(script, "jnp", types.SimpleNamespace(**vars(jnp) | {"float32": jnp.float64}))
    with jax.enable_x64(True):
        *_, params, _, _, loss = loss_of_rollout(norm_adv, clip_vloss, monkeypatch)
        grads, structure = jax.tree.flatten(jax.grad(lambda params: loss(params)[0])(params))
        leaves = jax.tree.leaves(params)
        for i, grad in enumerate(grads):
            norm = jnp.linalg.norm(grad)
            along = lambda h: loss(structure.unflatten(leaves[:i] + [leaves[i] + h * grad / norm] + leaves[i + 1 :]))[0]  # noqa: B023
            np.testing.assert_allclose((along(1e-6) - along(-1e-6)) / 2e-6, norm, rtol=1e-6, atol=1e-9)


def test_sampled_actions_follow_the_policy():
    logits = jnp.array([0.0, 1.0, -2.0, 0.5])
    uniforms = (jnp.arange(100_000) + 0.5) / 100_000
    share = np.bincount(script.sample_action(logits, uniforms), minlength=4) / 100_000
    np.testing.assert_allclose(share, jax.nn.softmax(logits), atol=2e-5)
    assert script.sample_action(logits, jnp.float32(0.99999994)) == 3


def test_advantages_are_normalised_over_all_devices(monkeypatch):
    """A minibatch on four devices, whose advantages differ in mean and spread: the gradient is that of the whole."""
    args, env, params, batch, hidden, _ = loss_of_rollout(True, True, monkeypatch)
    scale = jnp.repeat(jnp.arange(1.0, 5.0), args.num_envs // 4)
    batch = batch._replace(advantage=scale * (batch.advantage + scale))

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(devices):
        split = lambda x, axis: jnp.moveaxis(x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :]), axis, 0)
        shards = jax.tree.map(lambda x: split(x, 1), batch), split(hidden, 0)
        loss = lambda params, batch, hidden: script.ppo_loss(params, batch, hidden, args, env)[0]
        grads = jax.vmap(jax.grad(loss), (None, 0, 0), axis_name=script.AXIS)(params, *shards)
        return jax.tree.map(lambda x: x.mean(0), grads)

    close(gradient(4), gradient(1), rtol=1e-3, atol=1e-5)


def test_learns_to_reach_the_goal(tmp_path):
    """A short run on the smallest level: the greedy policy reaches the goal where an untrained one does not."""
    options = dict(
        env_id="Empty-5x5", total_timesteps=60_000, num_envs=64, num_steps=32, runs_dir=str(tmp_path / "runs")
    )
    script.main(script.Args(**options, videos_dir=str(tmp_path / "videos")))
    summary = json.loads(next(tmp_path.glob("runs/*/summary.json")).read_text())
    assert summary["eval_episodes"] == 256 and summary["success_rate"] > 0.95
    assert summary["eval_return_mean"] > 0.9  # the shortest way gives 0.955


def test_unknown_environment_names_the_nearest():
    with pytest.raises(script.UsageError, match="MiniGrid-DoorKey-6x6-v0"):
        script.Args(env_id="DorKey-6x6")
    assert script.Args(env_id="MemoryS9").env_id == "MiniGrid-MemoryS9-v0"
