"""The recurrent part of ppo_minigrid_rnn.py: replay, truncation values, resets, loss, gradients."""

import dataclasses
import functools
import json
import types
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import ppo_minigrid_rnn as script

SMALL = dict(
    num_envs=16,
    num_steps=24,
    num_minibatches=2,
    rnn_hidden_dim=16,
    head_hidden_dim=16,
    action_emb_dim=4,
)


def short_env(monkeypatch, env_id="MiniGrid-Empty-5x5-v0", limit=7):
    """Makes an id's episodes so short that most are truncated."""
    env = dataclasses.replace(script.ENVIRONMENTS[env_id], max_episode_steps=limit)
    monkeypatch.setitem(script.ENVIRONMENTS, env_id, env)
    return env


@functools.partial(jax.jit, static_argnums=0)
def forward(args, params, inputs, rnn_state):
    return script.forward(args, params, inputs, rnn_state)


class Roll(NamedTuple):
    """An agent with weights that matter and what its second rollout gave."""

    env: script.MiniGrid
    params: dict
    agent_state: script.AgentState  # before it
    trajectory: script.Transition
    last_state: tuple  # (env_state, agent_state) after it
    truncated_state: tuple
    env_states: script.GridState  # of [T, N], in which the agent acted


def roll(args, key=0, platform=None):
    """Two rollouts with truncated episodes; the second one as a `Roll`."""
    env = script.make_env(args)
    state = jax.jit(script.init_train_state, static_argnums=0)(args, jax.random.key(1))
    noise = lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape)
    params = jax.tree.map(noise, state.params)
    seen = []

    def watched_inputs(env, env_state, agent_state):
        jax.debug.callback(seen.append, env_state, ordered=True)
        return make_inputs(env, env_state, agent_state)

    make_inputs, script.make_inputs = script.make_inputs, watched_inputs
    try:
        play = functools.partial(script.rollout, args, env, params, platform=platform)
        play = jax.jit(play)
        carry = state.env_state, state.agent_state, state.stats
        carry = play(*carry, jax.random.key(key))[:3]
        jax.effects_barrier()
        seen.clear()
        env_state, agent_state, _, trajectory, truncated_state = jax.block_until_ready(
            play(*carry, jax.random.key(key + 1))
        )
        jax.effects_barrier()
    finally:
        script.make_inputs = make_inputs
    env_states = jax.tree.map(lambda *steps: np.stack(steps), *seen)
    last_state = (env_state, agent_state)
    return Roll(env, params, carry[1], trajectory, last_state, truncated_state, env_states)


def successors(args, rolled):
    """(env_state, agent_state) of [T, N] after each step, before any reset: stepped once more."""
    trajectory = rolled.trajectory
    step = jax.vmap(jax.vmap(functools.partial(rolled.env.step, jax.random.key(0))))
    env_state, _, _ = step(rolled.env_states, trajectory.action)
    before = rolled.agent_state.rnn_state
    _, _, rnn_states = forward(args, rolled.params, trajectory.inputs, before)
    nobody = jnp.zeros(trajectory.reward.shape, bool)
    return env_state, script.AgentState(rnn_states, trajectory.action, trajectory.reward, nobody)


@pytest.mark.parametrize(
    "options",
    [{}, {"reset_hidden": False}, {"rnn_num_layers": 2}, {"img_obs": True, "num_steps": 10}],
    ids=["reset", "no-reset", "two-layers", "pixels"],
)
def test_replay_reproduces_the_rollout(monkeypatch, options):
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", **SMALL | options)
    rolled = roll(args)
    params, trajectory = rolled.params, rolled.trajectory
    done = np.asarray(trajectory.terminated | trajectory.truncated)
    assert done.any(0).all()
    before = rolled.agent_state.rnn_state
    dist, value, rnn_states = forward(args, params, trajectory.inputs, before)
    near = functools.partial(np.testing.assert_allclose, atol=2e-5)
    near(value, trajectory.value)
    goes_on = ~done[-1]
    near(rnn_states[-1][goes_on], rolled.last_state[1].rnn_state[goes_on])
    near(dist.log_prob(trajectory.action), trajectory.log_prob)
    # Whole environments in another order are the same sequences.
    some = np.array([5, 2, 11])
    inputs = jax.tree.map(lambda x: x[:, some], trajectory.inputs)
    near(forward(args, params, inputs, before[some])[1], trajectory.value[:, some])
    # And the hidden state matters: forgetting it is seen, but for agents that start anew.
    going_on = ~np.asarray(trajectory.inputs.start[0])
    change = abs(forward(args, params, trajectory.inputs, before * 0)[1] - trajectory.value)[0]
    assert change[going_on].max() > 1e-3 and change[~going_on].max(initial=0) < 1e-5


def test_gru_equals_flax():
    """One layer of `GRU`, step by step, against `flax.linen.GRUCell` with the same weights."""
    size, num_features, num_steps, num_envs = 5, 3, 6, 4
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_features, num_envs, num_steps)), jnp.float32)
    h = jnp.asarray(rng.normal(size=(size, num_envs)), jnp.float32)
    start = jnp.asarray(rng.random((num_steps, num_envs)) < 0.3)
    gru = script.GRU(size, num_steps)
    params = gru.init(jax.random.key(0), x, h, start)
    params = jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape).astype(np.float32), params)
    ours = gru.apply(params, x, h, start)
    p = params["params"]
    w, b = (np.split(p["input"][name], 3) for name in ("w", "b"))
    theirs = {
        "hr": {"kernel": p["u_reset"].T},
        "hz": {"kernel": p["u_keep"].T},
        "hn": {"kernel": p["u_new"].T, "bias": p["c"][:, 0]},
    }
    for i, name in enumerate(("ir", "iz", "in")):
        theirs[name] = {"kernel": w[i].T, "bias": b[i][:, 0]}
    cell, carry = nn.GRUCell(size), h.T
    for t in range(num_steps):
        carry = jnp.where(start[t][:, None], 0, carry)
        carry, _ = cell.apply({"params": theirs}, carry, x[:, :, t].T)
        np.testing.assert_allclose(ours[:, :, t].T, carry, atol=1e-5)


def test_gru_gradient_equals_autodiff():
    """The backward pass by hand against JAX's of the same steps, for all arguments; vmapped too."""
    size, num_steps, num_envs = 5, 7, 4
    rng = np.random.default_rng(0)
    shapes = [(3 * size, size), (size, 1), (num_steps, 3 * size, num_envs), (size, num_envs)]
    arguments = [rng.normal(size=shape) for shape in shapes]  # u, c, from_x, h
    weights = rng.normal(size=(num_steps, size, num_envs))
    start = rng.random((num_steps, num_envs)) < 0.3
    assert start[0].any() and not start[0].all() and start[1:].any()

    def gradient(run):
        def loss(*arguments):
            return (weights * run(*arguments, start) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))

    ours = gradient(script.run_gru)
    theirs = gradient(script.run_gru.fun)  # without the rule of its gradient
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    with jax.enable_x64(True):
        jax.tree.map(close, ours(*arguments), theirs(*arguments))
        batch = [np.stack([x, 2 * x]) for x in arguments]
        jax.tree.map(close, jax.vmap(ours)(*batch), jax.vmap(theirs)(*batch))


def test_gradients_go_back_to_the_start_of_an_episode():
    """What an output depends on: everything since the last start, nothing before it."""
    args = script.Args(env_id="Empty-5x5", **SMALL)
    rolled = roll(args)
    params, agent_state, trajectory = rolled.params, rolled.agent_state, rolled.trajectory
    start = jnp.zeros((args.num_steps, args.num_envs), bool).at[10, 3:].set(True)
    inputs = trajectory.inputs._replace(start=start)

    def last_values(rnn_state, prev_reward):
        changed = inputs._replace(prev_reward=prev_reward)
        return script.forward(args, params, changed, rnn_state)[1][-1].sum()

    grad = jax.jit(jax.grad(last_values, argnums=(0, 1)))
    by_state, by_reward = grad(agent_state.rnn_state, inputs.prev_reward)
    assert (np.abs(by_state[:3]).max((1, 2)) > 0).all() and (by_state[3:] == 0).all()
    assert (by_reward[:, :3] != 0).all()
    assert (by_reward[:11, 3:] == 0).all() and (by_reward[11:, 3:] != 0).all()


def test_the_mission_reaches_the_agent():
    """Each word has an embedding for each of its places; without missions there is none."""
    args = script.Args(env_id="PutNear-6x6-N2", **SMALL)
    env = script.make_env(args)
    params = jax.jit(lambda key: script.init_agent(args, key, env))(jax.random.key(0))["params"]
    assert params["mission"]["w"].shape == (script.MISSION_FEATURES, 4 * len(script.WORDS))
    keys = jax.random.split(jax.random.key(1), args.num_envs)
    env_state = jax.jit(jax.vmap(env.reset))(keys)
    inputs = script.make_inputs(env, env_state, script.init_agent_state(args, args.num_envs))
    mission = inputs.obs["mission"]
    np.testing.assert_array_equal(mission, env_state.mission)
    swapped = inputs._replace(obs={**inputs.obs, "mission": mission[:, jnp.array([2, 3, 0, 1])]})

    @jax.jit
    def change(params):  # of the recurrent state, where all first steps come together
        before = script.init_rnn_state(args, args.num_envs)
        first, second = (
            script.forward_step(args, {"params": params}, x, before)[2] for x in (inputs, swapped)
        )
        return jnp.abs(first - second).max(axis=(1, 2))

    assert (change(params) > 1e-3).all()
    deaf = {**params, "mission": jax.tree.map(jnp.zeros_like, params["mission"])}
    assert (change(deaf) == 0).all()

    other = dataclasses.replace(args, env_id="MiniGrid-Empty-5x5-v0")
    init = functools.partial(script.init_agent, other, env=script.make_env(other))
    without = jax.eval_shape(init, jax.random.key(0))["params"]
    assert without.keys() == params.keys() - {"mission"}
    size, size_without = (p["gru0"]["input"]["w"].shape[1] for p in (params, without))
    assert size == size_without + script.MISSION_FEATURES


@pytest.mark.parametrize("reset", [True, False])
def test_memory_across_episode_ends(monkeypatch, reset):
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", reset_hidden=reset, **SMALL)
    rolled = roll(args)
    params, trajectory = rolled.params, rolled.trajectory
    inputs = jax.device_get(trajectory.inputs)
    done = np.asarray(trajectory.terminated | trajectory.truncated)[:-1]
    np.testing.assert_array_equal(inputs.prev_action[1:], trajectory.action[:-1])
    np.testing.assert_array_equal(inputs.prev_reward[1:], trajectory.reward[:-1])
    np.testing.assert_array_equal(inputs.start[1:], done & reset)
    # The first step of an episode is the same whatever was before it, only with resets.
    t, n = np.argwhere(done)[0] + (1, 0)
    first = jax.tree.map(lambda x: x[t : t + 1, n : n + 1], inputs)
    other = first._replace(prev_action=first.prev_action + 1, prev_reward=first.prev_reward + 1)
    _, value, _ = forward(args, params, other, jnp.ones((1, 1, args.rnn_hidden_dim)))
    assert (abs(value[0, 0] - trajectory.value[t, n]) < 1e-5) == reset


@pytest.mark.parametrize("reset", [True, False])
def test_consecutive_evaluation_episodes(monkeypatch, reset):
    """With resets a second episode is played like the first; without, memories matter."""
    short_env(monkeypatch, limit=60)
    options = dict(eval_consecutive_episodes=2, eval_episodes=64, eval_mode="sampled")
    args = script.Args(env_id="Empty-5x5", reset_hidden=reset, **SMALL | options)
    params = roll(args).params
    # The same random numbers in both episodes.
    split = lambda key, num=2: jnp.stack([key] * num)
    monkeypatch.setattr(script.jax.random, "split", split)
    evaluation = jax.jit(script.evaluate, static_argnums=0)(args, params, jax.random.key(0))
    lengths = evaluation.episode_length
    assert lengths.shape == (2, 64) and evaluation.states.position.shape == (2, 61)
    assert (lengths[0] == lengths[1]).all() == reset


@pytest.mark.parametrize("platform", ["cpu", None])
@pytest.mark.parametrize("reset", [True, False])
def test_successor_values_against_brute_force(monkeypatch, reset, platform):
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", reset_hidden=reset, **SMALL)
    rolled = roll(args, platform=platform)
    env, params, trajectory = rolled.env, rolled.params, rolled.trajectory
    assert (np.asarray(trajectory.truncated).sum(0) >= 3).all()  # several windows of the limit
    value, next_value = script.trajectory_values(
        args, env, params, trajectory, rolled.last_state, rolled.truncated_state
    )
    np.testing.assert_array_equal(value, trajectory.value)

    def value_after(env_state, agent_state):  # of all environments, without any reset
        obs = jax.vmap(env.observe)(env_state)
        inputs = script.Inputs(obs, *agent_state[1:])
        inputs = jax.tree.map(lambda x: x[None], inputs)
        return forward(args, params, inputs, agent_state.rnn_state)[1][0]

    expected = np.asarray(jax.vmap(value_after)(*successors(args, rolled)))
    terminated = np.asarray(trajectory.terminated)  # these have no successor
    np.testing.assert_allclose(next_value[~terminated], expected[~terminated], atol=2e-5)
    truncated = np.asarray(trajectory.truncated)[:-1]
    wrong = np.asarray(trajectory.value)[1:][truncated]  # a bootstrap from the next episode
    assert abs(wrong - expected[:-1][truncated]).max() > 1e-2


def test_truncation_follows_the_step_count(monkeypatch):
    env = short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", **SMALL)
    rolled = roll(args)
    trajectory = rolled.trajectory
    count = np.asarray(successors(args, rolled)[0].step_count)
    assert ((count == env.max_episode_steps) == np.asarray(trajectory.truncated)).all()
    assert count.max() == env.max_episode_steps
    done = np.asarray(trajectory.terminated | trajectory.truncated)
    assert (count[1:][done[:-1]] == 1).all()


@pytest.mark.parametrize("env_id", ["Empty-Random-5x5", "Dynamic-Obstacles-5x5"])
def test_levels_on_demand_equal_those_made_beforehand(monkeypatch, env_id):
    """A CPU and an accelerator play the same episodes with the same key."""
    short_env(monkeypatch, f"MiniGrid-{env_id}-v0")
    args = script.Args(env_id=env_id, **SMALL)
    on_demand, beforehand = roll(args, platform="cpu"), roll(args, platform="gpu")
    done = on_demand.trajectory.terminated | on_demand.trajectory.truncated
    assert done.sum() >= 3 * args.num_envs

    def equal(x, y):
        if jnp.issubdtype(x.dtype, jnp.floating):  # two programs may round differently
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(x, y)

    jax.tree.map(equal, on_demand[1:], beforehand[1:])  # all but the environment


# Loss -----------------------------------------------------------------------------------------

CLIPPED = pytest.mark.parametrize("clip_vloss", [True, False])


def loss_of_rollout(clip_vloss, monkeypatch):
    """(args, params, batch, loss): policy and values differ enough from the rollout's to clip."""
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", clip_vloss=clip_vloss, ent_coef=0.1, **SMALL)
    rolled = roll(args)
    params, agent_state, trajectory = rolled.params, rolled.agent_state, rolled.trajectory
    rng = np.random.default_rng(0)
    noise = lambda p: p + jnp.asarray(0.1 * rng.normal(size=p.shape), p.dtype)
    params = jax.tree.map(noise, params)
    shape, dtype = trajectory.value.shape, trajectory.value.dtype
    batch = script.Batch(
        inputs=trajectory.inputs,
        rnn_state=agent_state.rnn_state[None],
        action=trajectory.action,
        dist=trajectory.dist,
        log_prob=trajectory.log_prob,
        value=trajectory.value,
        advantage=3 + 2 * jnp.asarray(rng.normal(size=shape), dtype),
        target=jnp.asarray(rng.normal(size=shape), dtype),
    )
    loss = jax.jit(lambda params: script.ppo_loss(args, params, batch))
    return args, params, batch, loss


@CLIPPED
def test_loss_equals_definition(monkeypatch, clip_vloss):
    """Loss and metrics of whole sequences against NumPy, given the replay's logits and values."""
    args, params, batch, loss = loss_of_rollout(clip_vloss, monkeypatch)
    dist, value, _ = forward(args, params, batch.inputs, batch.rnn_state[0])
    probabilities = scipy.special.softmax(np.asarray(dist.logits, float), axis=-1)
    entropy = scipy.stats.entropy(probabilities, axis=-1).mean()
    chosen = np.take_along_axis(probabilities, np.asarray(batch.action)[..., None], -1)[..., 0]
    old, value = jax.device_get((batch, value))
    ratio = chosen / np.exp(old.log_prob)
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    gain = np.minimum(ratio * old.advantage, np.clip(ratio, low, high) * old.advantage)
    error = (value - old.target) ** 2
    if clip_vloss:
        held = np.clip(value, old.value - args.clip_coef, old.value + args.clip_coef)
        error = np.maximum(error, (held - old.target) ** 2)
    expected = {
        "losses/policy_loss": -gain.mean(),
        "losses/value_loss": 0.5 * error.mean(),
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio - 1 - np.log(ratio)).mean(),
        "losses/old_approx_kl": -np.log(ratio).mean(),
        "losses/clipfrac": ((ratio < low) | (ratio > high)).mean(),
    }
    assert 0.1 < expected["losses/clipfrac"] < 0.9
    total, metrics = loss(params)
    assert metrics.keys() == expected.keys()
    for tag, metric in metrics.items():
        np.testing.assert_allclose(metric.value, expected[tag], rtol=1e-4, err_msg=tag)
    parts = -gain.mean() + args.vf_coef * 0.5 * error.mean() - args.ent_coef * entropy
    np.testing.assert_allclose(total, parts, rtol=1e-4)


@CLIPPED
def test_loss_gradient_equals_finite_differences(monkeypatch, clip_vloss):
    """Central differences in float64, in the direction of each array's own gradient."""
    args, params, batch, _ = loss_of_rollout(clip_vloss, monkeypatch)
    doubles = types.SimpleNamespace(**vars(jnp) | {"float32": jnp.float64})
    monkeypatch.setattr(script, "jnp", doubles)

    def in_float64(x):
        return x.astype(jnp.float64) if x.dtype == jnp.float32 else x

    with jax.enable_x64(True):
        params, batch = jax.tree.map(in_float64, (params, batch))
        loss = jax.jit(lambda params: script.ppo_loss(args, params, batch))
        grads = jax.tree.leaves(jax.grad(lambda params: loss(params)[0])(params))
        leaves, structure = jax.tree.flatten(params)

        def loss_at(i, shift):  # with one array shifted
            return loss(structure.unflatten([*leaves[:i], leaves[i] + shift, *leaves[i + 1 :]]))[0]

        for i, grad in enumerate(grads):
            norm = jnp.linalg.norm(grad)
            h = 1e-6 * grad / norm
            slope = (loss_at(i, h) - loss_at(i, -h)) / 2e-6
            np.testing.assert_allclose(slope, norm, rtol=1e-6, atol=1e-9)


def test_four_devices_equal_one():
    """Two updates with normalised advantages, environments on four devices or on one."""
    options = SMALL | dict(num_minibatches=4, norm_adv=True, total_timesteps=16 * 24 * 2)
    results = []
    for num_devices in (1, 4):
        args = script.Args(env_id="DoorKey-5x5", num_devices=num_devices, **options)
        state = script.init_agents(args)
        results.append(jax.device_get(script.make_train_chunk(args)(state, jnp.int32(2))))
    (one, one_metrics), (four, four_metrics) = results
    assert (one.update == 2).all()
    plain = lambda state: script.flatten_state(state._replace(key=jax.random.key(0)))
    for name, x in plain(one).items():
        np.testing.assert_allclose(plain(four)[name], x, rtol=1e-3, atol=2e-4, err_msg=name)
    for tag, x in one_metrics.items():
        np.testing.assert_allclose(four_metrics[tag], x, rtol=1e-3, atol=1e-4, err_msg=tag)


# Seams ----------------------------------------------------------------------------------------


def test_an_lstm_needs_three_functions(monkeypatch):
    """A recurrent state that is a pair: only init_rnn_state, init_agent and forward change."""

    def init_rnn_state(args, num_envs):
        zeros = jnp.zeros((num_envs, args.rnn_hidden_dim))
        return zeros, zeros

    class Network(nn.Module):
        size: int
        num_actions: int

        @nn.compact
        def __call__(self, inputs, rnn_state):
            image = inputs.obs["image"]
            x = nn.Dense(self.size)(image.reshape(*image.shape[:2], -1) / 10)
            cell = nn.OptimizedLSTMCell(self.size)
            states = []
            for t in range(len(x)):
                start = inputs.start[t][:, None]
                rnn_state = jax.tree.map(lambda s, start=start: jnp.where(start, 0, s), rnn_state)
                rnn_state, _ = cell(rnn_state, x[t])
                states.append(rnn_state)
            states = jax.tree.map(lambda *s: jnp.stack(s), *states)
            logits = nn.Dense(self.num_actions)(states[1])
            return logits, nn.Dense(1)(states[1])[..., 0], states

    def init_agent(args, key, env):
        obs = {"image": jnp.zeros((1, 1, 7, 7, 3)), "direction": jnp.zeros((1, 1), jnp.int32)}
        zeros = jnp.zeros((1, 1))
        inputs = script.Inputs(obs, zeros, zeros, zeros == 0)
        network = Network(args.rnn_hidden_dim, env.num_actions)
        return network.init(key, inputs, init_rnn_state(args, 1))

    def forward(args, params, inputs, rnn_state):
        num_actions = script.make_env(args).num_actions
        network = Network(args.rnn_hidden_dim, num_actions)
        logits, value, states = network.apply(params, inputs, rnn_state)
        return script.Categorical(logits), value, states

    monkeypatch.setattr(script, "init_rnn_state", init_rnn_state)
    monkeypatch.setattr(script, "init_agent", init_agent)
    monkeypatch.setattr(script, "forward", forward)
    options = SMALL | dict(num_envs=4, num_steps=5, total_timesteps=40, eval_episodes=2)
    args = script.Args(env_id="Empty-5x5", **options)
    state, metrics = jax.jit(script.train, static_argnums=0)(args, jax.random.key(0))
    assert state.agent_state.rnn_state[1].shape == (4, 16)
    assert np.isfinite(metrics["losses/grad_norm"]).all()
    evaluate = jax.jit(script.evaluate, static_argnums=0)
    assert evaluate(args, state.params, jax.random.key(1)).episode_return.shape == (1, 2)


def test_a_missing_axis_is_an_error():
    args = script.Args(env_id="Empty-5x5", **SMALL)
    env = script.make_env(args)
    params = script.init_agent(args, jax.random.key(0), env)
    agent_state = script.init_agent_state(args, 1)
    env_state = jax.vmap(env.reset)(jax.random.key(0)[None])
    inputs = script.make_inputs(env, env_state, agent_state)  # [N], not [T, N]
    with pytest.raises(ValueError, match=r"\[T, M, ...\]"):
        script.forward(args, params, inputs, agent_state.rnn_state)


def test_learns_to_reach_the_goal(tmp_path):
    """A short run on the smallest level: the greedy policy reaches the goal."""
    words = "--env-id Empty-5x5 --total-timesteps 6e4 --num-envs 64 --num-steps 32".split()
    script.main([*words, "--runs-dir", f"{tmp_path}/runs", "--videos-dir", f"{tmp_path}/videos"])
    summary = json.loads(next(tmp_path.glob("runs/*/summary.json")).read_text())
    assert summary["eval_episodes"] == 256 and summary["success_rate"] > 0.95
    assert summary["eval_return_mean"] > 0.9  # the shortest way gives 0.955


def test_unknown_environment_names_the_nearest():
    with pytest.raises(script.UsageError, match="MiniGrid-DoorKey-6x6-v0"):
        script.parse_args(["--env-id", "DorKey-6x6"])
    assert script.parse_args(["--env-id", "MemoryS9"]).env_id == "MiniGrid-MemoryS9-v0"
