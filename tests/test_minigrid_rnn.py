"""The recurrent part of ppo_minigrid_rnn.py: replay, truncation values, resets, loss, gradients."""

import dataclasses
import functools
import types
from typing import NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    cached,
    close,
    jit_args,
    json_of,
    numpy_ppo_loss,
    run_main,
    scalars,
    scipy_categorical,
)
from PIL import Image

import ppo_minigrid_rnn as script

SMALL = dict(num_envs=16, num_steps=24, num_minibatches=2)
SMALL |= dict(rnn_hidden_dim=16, head_hidden_dim=16, action_emb_dim=4)


def short_env(monkeypatch, env_id="MiniGrid-Empty-5x5-v0", limit=7):
    """Makes an id's episodes so short that most are truncated."""
    env = dataclasses.replace(script.ENVIRONMENTS[env_id], max_episode_steps=limit)
    monkeypatch.setitem(script.ENVIRONMENTS, env_id, env)
    return env


@cached
def jitted_forward(args):
    return jit_args(script.forward, args)


def forward(args, params, inputs, rnn_state):
    return jitted_forward(args)(params, inputs, rnn_state)


class Roll(NamedTuple):
    """An agent with weights that matter and what its second rollout gave."""

    env: script.MiniGrid
    params: dict
    agent_state: script.AgentState  # before it
    trajectory: script.Transition
    last_state: tuple  # (env_state, agent_state) after it
    truncated_state: tuple
    env_states: script.GridState  # (or `TrialState`) of [T, N], in which the agent acted


def roll(args, key=0, platform="cpu"):
    """Two rollouts with truncated episodes, as on a platform; the second one as a `Roll`."""
    return roll_in(script.make_env(args), args, key, platform)


@cached  # several tests begin with the same
def roll_in(env, args, key, platform):
    state = jit_args(script.init_train_state, args)(jax.random.key(1))
    noise = lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape)
    params = jax.tree.map(noise, state.params)
    seen = []

    def watched_inputs(env, env_state, agent_state):
        jax.debug.callback(seen.append, env_state, ordered=True)
        return make_inputs(env, env_state, agent_state)

    make_inputs = script.make_inputs
    with mock.patch.object(script, "make_inputs", watched_inputs):
        play = jax.jit(functools.partial(script.rollout, args, env, params))
        carry = state.env_state, state.agent_state, state.stats
        with mock.patch.object(jax, "default_backend", lambda: platform):
            carry = play(*carry, jax.random.key(key))[:3]
        jax.effects_barrier()
        seen.clear()
        results = jax.block_until_ready(play(*carry, jax.random.key(key + 1)))
        jax.effects_barrier()
    env_states = jax.tree.map(lambda *steps: np.stack(steps), *seen)
    env_state, agent_state, _, trajectory, truncated_state = results
    last_state = (env_state, agent_state)
    return Roll(env, params, carry[1], trajectory, last_state, truncated_state, env_states)


def successors(args, rolled):
    """(env_state, agent_state) of [T, N] after each step, before any reset: stepped once more."""
    trajectory = rolled.trajectory
    step = jax.vmap(jax.vmap(functools.partial(rolled.env.step, jax.random.key(0))))
    env_state, _, _ = jax.device_get(jax.jit(step)(rolled.env_states, trajectory.action))
    before = rolled.agent_state.rnn_state
    _, _, rnn_states = forward(args, rolled.params, trajectory.inputs, before)
    nobody = jnp.zeros(trajectory.reward.shape, bool)
    agent_state = script.AgentState(rnn_states, trajectory.action, trajectory.reward, nobody)
    return env_state, agent_state


def successor_values(args, rolled):
    """Values [T, N] of what comes after each step, were the episode not over."""

    def value_after(env_state, agent_state):  # of all environments, without any reset
        obs = jax.vmap(rolled.env.observe)(env_state)
        inputs = script.Inputs(obs, *agent_state[1:])
        inputs = jax.tree.map(lambda x: x[None], inputs)
        return forward(args, rolled.params, inputs, agent_state.rnn_state)[1][0]

    return np.asarray(jax.jit(jax.vmap(value_after))(*successors(args, rolled)))


@pytest.mark.parametrize(
    "options",
    [{}, {"episodes_per_trial": 3}, {"rnn_num_layers": 2}, {"img_obs": True, "num_steps": 10}],
    ids=["one-layer", "trials", "two-layers", "pixels"],
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

    before = script.init_rnn_state(args, args.num_envs)
    step = jax.jit(lambda inputs: script.forward_step(args, {"params": params}, inputs, before))
    change = step(inputs)[2] - step(swapped)[2]  # of the recurrent state
    assert (jnp.abs(change).max(axis=(1, 2)) > 1e-3).all()

    other = dataclasses.replace(args, env_id="MiniGrid-Empty-5x5-v0")
    init = functools.partial(script.init_agent, other, env=script.make_env(other))
    without = jax.eval_shape(init, jax.random.key(0))["params"]
    assert without.keys() == params.keys() - {"mission"}
    size, size_without = (p["gru0"]["input"]["w"].shape[1] for p in (params, without))
    assert size == size_without + script.MISSION_FEATURES


def test_memory_ends_with_the_episode(monkeypatch):
    """The first step of an episode is the same whatever was before it. (With trials: see below.)"""
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", **SMALL)
    rolled = roll(args)
    params, trajectory = rolled.params, rolled.trajectory
    inputs = jax.device_get(trajectory.inputs)
    done = np.asarray(trajectory.terminated | trajectory.truncated)[:-1]
    np.testing.assert_array_equal(inputs.prev_action[1:], trajectory.action[:-1])
    np.testing.assert_array_equal(inputs.prev_reward[1:], trajectory.reward[:-1])
    np.testing.assert_array_equal(inputs.start[1:], done)
    t, n = np.argwhere(done)[0] + (1, 0)
    first = jax.tree.map(lambda x: x[t : t + 1, n : n + 1], inputs)
    other = first._replace(prev_action=first.prev_action + 1, prev_reward=first.prev_reward + 1)
    _, value, _ = forward(args, params, other, jnp.ones((1, 1, args.rnn_hidden_dim)))
    assert abs(value[0, 0] - trajectory.value[t, n]) < 1e-5


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_successor_values_against_brute_force(monkeypatch, platform):
    short_env(monkeypatch)
    args = script.Args(env_id="Empty-5x5", **SMALL)
    rolled = roll(args, platform=platform)
    env, params, trajectory = rolled.env, rolled.params, rolled.trajectory
    assert (np.asarray(trajectory.truncated).sum(0) >= 3).all()  # several windows of the limit
    value, next_value = script.trajectory_values(
        args, env, params, trajectory, rolled.last_state, rolled.truncated_state
    )
    np.testing.assert_array_equal(value, trajectory.value)

    expected = successor_values(args, rolled)
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


@pytest.mark.parametrize(
    "env_id, episodes", [("Empty-Random-5x5", 1), ("Dynamic-Obstacles-5x5", 2)]
)
def test_levels_on_demand_equal_those_made_beforehand(monkeypatch, env_id, episodes):
    """A CPU and an accelerator play the same episodes with the same key."""
    short_env(monkeypatch, f"MiniGrid-{env_id}-v0")
    args = script.Args(env_id=env_id, episodes_per_trial=episodes, **SMALL)
    on_demand, beforehand = roll(args, platform="cpu"), roll(args, platform="gpu")
    done = on_demand.trajectory.terminated | on_demand.trajectory.truncated
    assert done.sum() * episodes >= 3 * args.num_envs

    def equal(x, y):
        if jnp.issubdtype(x.dtype, jnp.floating):  # two programs may round differently
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(x, y)

    jax.tree.map(equal, on_demand[1:], beforehand[1:])  # all but the environment


@pytest.mark.parametrize("num_envs, scans", [(64, 1), (32_800, 2)])
def test_levels_made_beforehand(monkeypatch, num_envs, scans):
    """All at once or, of a large batch, step by step: always the levels of the same keys."""

    def play_at_random(args, params, inputs, rnn_state):
        zeros = jnp.zeros(inputs.start.shape)
        return script.Categorical(logits=zeros[..., None] + jnp.zeros(7)), zeros, rnn_state[None]

    monkeypatch.setattr(script, "forward", play_at_random)
    env = short_env(monkeypatch, "MiniGrid-DoorKey-8x8-v0", limit=1)  # each step ends all episodes
    args = script.Args(env_id="DoorKey-8x8", **SMALL | dict(num_envs=num_envs, num_steps=2))
    state = jit_args(script.init_train_state, args)(jax.random.key(1))
    carry = state.env_state, state.agent_state, state.stats, jax.random.key(2)
    play = functools.partial(script.rollout, args, env, state.params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    names = [equation.primitive.name for equation in jax.make_jaxpr(play)(*carry).eqns]
    assert names.count("scan") == scans
    env_state, _, _, trajectory, _ = jax.jit(play)(*carry)

    keys = jax.random.split(carry[-1], (2, 2 + num_envs))[:, 1]
    level_keys = jax.vmap(script.level_keys, (0, None))(keys, jnp.arange(num_envs))
    levels = jax.jit(jax.vmap(jax.vmap(env.reset)))(level_keys)
    for ours, expected in zip(jax.tree.leaves(env_state), jax.tree.leaves(levels), strict=True):
        np.testing.assert_array_equal(ours, expected[1])
    seen = jax.jit(jax.vmap(env.observe))(jax.tree.map(lambda x: x[0], levels))
    for name, expected in seen.items():
        np.testing.assert_array_equal(trajectory.inputs.obs[name][1], expected)
    assert len(np.unique(levels.grid.reshape(2 * num_envs, -1), axis=0)) > 20


def encode_by_convolutions(layers, code_sizes, params, x):
    """What `Encoder` computes from x [F, Y, X, M, T], by XLA's own convolutions."""
    x = x.reshape(*x.shape[:3], -1)
    for i in range(len(params)):
        features, size, stride = layers[i]
        w, b = params[f"conv{i}"]["w"], params[f"conv{i}"]["b"]
        blocks = [w]
        if i == 0 and code_sizes:  # the patches' codes, one after the other
            blocks = jnp.split(w, size**2 * np.cumsum(code_sizes)[:-1], axis=1)
            codes = [jax.nn.one_hot(x[n], size, axis=0) for n, size in enumerate(code_sizes)]
            x = jnp.concatenate(codes)
        elif i == 0:
            x = x / 255
        kernel = [block.reshape(features, size, size, -1) for block in blocks]
        x = jax.lax.conv_general_dilated(
            x.astype(jnp.float32),
            jnp.concatenate(kernel, axis=-1),
            window_strides=(stride, stride),
            padding="VALID",
            dimension_numbers=("CHWN", "OHWI", "CHWN"),
        )
        x = jax.nn.relu(x + b[:, :, None, None])
    return x


@pytest.mark.quick
@pytest.mark.parametrize("sides, pixels", [((7, 7), False), ((3, 5), False), ((56, 56), True)])
def test_products_equal_convolutions(sides, pixels):
    """The encoder and its gradient."""
    keys = jax.random.split(jax.random.key(0), 3)
    limits = (256, 256, 256) if pixels else script.CODE_SIZES
    shape = (4, 3, *sides, 3)
    image = (jax.random.uniform(keys[0], shape) * np.array(limits)).astype(jnp.uint8)
    encoder = script.Encoder(pixels)
    params = encoder.init(keys[1], image)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(keys[2], x.shape), params)
    layers, code_sizes = (script.PIXEL_LAYERS, None) if pixels else (script.CODE_LAYERS, limits)

    def by_products(params):
        features = encoder.apply(params, image)  # [F, M, T]
        return (features**2).mean(), features

    def by_convolutions(params):
        x = image.transpose(4, 2, 3, 1, 0)
        x = encode_by_convolutions(layers, code_sizes, params["params"], x)
        features = x.reshape(-1, *image.shape[1::-1])
        return (features**2).mean(), features

    ours, theirs = (
        jax.jit(jax.value_and_grad(encode, has_aux=True))(params)
        for encode in (by_products, by_convolutions)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), ours, theirs)


# --- Trials ---


@pytest.mark.quick
def test_trials_of_an_environment_of_ones_own(monkeypatch):
    """A `make_env` that makes none is a problem; what has no `render` has none in trials either."""
    monkeypatch.setattr(script, "make_env", lambda args: script.find_env(args.env_id))
    with pytest.raises(script.UserError, match="^--episodes-per-trial: "):
        script.main(["--episodes-per-trial=2"])
    assert hasattr(script.Trials(script.find_env("Empty-5x5"), 2), "render")
    assert not hasattr(script.Trials(object(), 2), "render")


@pytest.mark.quick
def test_what_the_environment_of_a_trial_reports(monkeypatch):
    """`Trials` hands on what its environment says of every step, of the last of an episode too."""
    env = script.Trials(script.find_env("Empty-5x5"), 2)
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 3))
    assert script.env_metrics(env, states) == {}
    metrics = lambda self, state: {"position": state.position}
    monkeypatch.setattr(script.MiniGrid, "metrics", metrics, raising=False)
    state, seen = env.reset(jax.random.key(0)), []
    for action in [script.FORWARD, script.FORWARD, script.RIGHT, script.FORWARD, script.FORWARD]:
        state, reward, _ = env.step(jax.random.key(0), state, action)
        seen.append(int(env.metrics(state)["position"]))
    assert reward > 0 and state.restarted  # in the top left corner; the goal was at the bottom
    assert seen == [7, 8, 8, 13, 18] and state.env_state.position == 6


@pytest.fixture(scope="module")
def trials():
    """(args, `Roll`) of trials of three episodes, which lava ends or the time limit."""
    with pytest.MonkeyPatch.context() as patch:
        short_env(patch, "MiniGrid-LavaGapS6-v0", limit=6)
        args = script.Args(
            env_id="MiniGrid-LavaGapS6-v0",
            episodes_per_trial=3,
            gae_lambda=0.9,
            **SMALL | dict(num_steps=40),
        )
        yield args, jax.device_get(roll(args))


def ends_of_trials(args, rolled):
    """By the definition, from the step counts: (ended, done) [T - 1, N], of episodes, of trials."""
    ended = np.asarray(rolled.env_states.env_state.step_count)[1:] == 0
    count = rolled.env_states.episode[0] + np.cumsum(ended, axis=0)  # since before the rollout
    return ended, ended & (count % args.episodes_per_trial == 0)


def test_memory_and_level_end_with_the_trial(trials):
    """Only there the agent starts anew; at the other ends it is told, and its memory matters."""
    args, rolled = trials
    inputs, trajectory = rolled.trajectory.inputs, rolled.trajectory
    ended, done = ends_of_trials(args, rolled)
    assert (ended & ~done).sum() > done.sum() >= 2 * args.num_envs
    level = rolled.env_states.start_state.grid
    is_new = (level[1:] != level[:-1]).any(-1)
    assert is_new[done].mean() > 0.5 and not is_new[~done].any()
    restarted = inputs.obs["restarted"][1:]
    np.testing.assert_array_equal(inputs.start[1:], done)
    np.testing.assert_array_equal(restarted, ended & ~done)
    np.testing.assert_array_equal(inputs.prev_action[1:], trajectory.action[:-1])
    np.testing.assert_array_equal(inputs.prev_reward[1:], trajectory.reward[:-1])

    # Every step as a sequence of its own, with other inputs or without the memory before it.
    steps = jax.tree.map(lambda x: x[1:].reshape(1, -1, *x.shape[2:]), inputs)
    _, _, states = forward(args, rolled.params, inputs, rolled.agent_state.rnn_state)
    states = states[:-1].reshape(-1, *states.shape[2:])
    untold = {**steps.obs, "restarted": jnp.zeros_like(steps.obs["restarted"])}
    others = {
        "hidden state": (steps, 0 * states),
        "action": (steps._replace(prev_action=(steps.prev_action + 1) % 7), states),
        "reward": (steps._replace(prev_reward=steps.prev_reward + 1), states),
        "end": (steps._replace(obs=untold), states),
    }
    _, value, _ = forward(args, rolled.params, steps, states)
    for name, other in others.items():
        change = np.asarray(abs(forward(args, rolled.params, *other)[1] - value))
        change = change.reshape(ended.shape)
        assert change[done].max() < 1e-5 < 1e-3 < change[ended & ~done].max(), name


def test_advantages_across_the_episodes_of_a_trial(trials):
    """A_t = sum_k (gamma lambda)^k delta_{t+k} up to the trial's end, by lava or the time limit."""
    args, rolled = trials
    trajectory, states = rolled.trajectory, rolled.env_states.env_state
    values = jax.jit(functools.partial(script.trajectory_values, args, rolled.env))
    value, next_value = jax.device_get(
        values(rolled.params, trajectory, rolled.last_state, rolled.truncated_state)
    )
    ours = script.compute_gae(
        args, trajectory.reward, value, next_value, trajectory.terminated, trajectory.truncated
    )
    ended, done = ends_of_trials(args, rolled)
    limit = states.step_count[:-1] == rolled.env.env.max_episode_steps - 1
    step = jax.vmap(jax.vmap(functools.partial(rolled.env.env.step, jax.random.key(0))))
    _, _, lava = jax.device_get(jax.jit(step)(states, trajectory.action))  # or the goal
    assert (ended == lava[:-1] | limit).all()
    np.testing.assert_array_equal(trajectory.terminated[:-1], done)
    for end in (lava[:-1], limit & ~lava[:-1]):
        assert (end & done).sum() >= 3 < (end & ~done).sum()  # all four kinds of ends are met
    last = np.where(done, 0.0, value[1:])
    delta = trajectory.reward[:-1] + args.gamma * last - value[:-1]
    T = args.num_steps
    for n in range(args.num_envs):
        bounds = [0, *(np.flatnonzero(done[:, n]) + 1)]
        for first, end in zip(bounds, bounds[1:]):  # whole trials, and the rest of one before
            weights = (args.gamma * args.gae_lambda) ** np.arange(T)
            expected = [weights[: end - t] @ delta[t:end, n] for t in range(first, end)]
            np.testing.assert_allclose(ours[first:end, n], expected, atol=2e-5)


def test_evaluation_plays_trials(monkeypatch):
    """All episodes of eight trials, step by step in Python, as `evaluate` has them."""
    short_env(monkeypatch, "MiniGrid-LavaGapS6-v0", limit=12)
    options = SMALL | dict(episodes_per_trial=3, eval_episodes=8, eval_mode="sampled")
    args = script.Args(env_id="MiniGrid-LavaGapS6-v0", **options)
    env = script.make_env(args)
    params = jax.jit(lambda key: script.init_agent(args, key, env))(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(1), x.shape), params)
    key = jax.random.key(2)
    evaluation = jit_args(script.evaluate, args)(params, key)
    reset_key, action_key, _ = jax.random.split(key, 3)
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(reset_key, 8))

    @jax.jit
    def step(state, agent_state, key):
        inputs = script.make_inputs(env, state, agent_state)
        dist, _, rnn_state = script.forward_step(args, params, inputs, agent_state.rnn_state)
        action = dist.sample(key)
        state, reward, terminated = jax.vmap(env.step)(jax.random.split(key, 8), state, action)
        return state, reward, terminated, script.agent_state_after(rnn_state, action, reward)

    agent_state = script.init_agent_state(args, 8)
    episode, returns, lengths = np.zeros(8, int), np.zeros((8, 4)), np.zeros(8)
    for t in range(3 * 12):
        restart = state.restarted
        drawing_key = jax.random.fold_in(action_key, t)
        state, reward, terminated, agent_state = step(state, agent_state, drawing_key)
        episode = np.minimum(episode + restart, 3)  # 3: after the trial
        returns[np.arange(8), episode] += reward
        lengths += episode < 3
    np.testing.assert_allclose(evaluation.trial_returns, returns[:, :3], rtol=1e-6)
    np.testing.assert_allclose(evaluation.episode_return, returns[:, :3].sum(1), rtol=1e-6)
    np.testing.assert_array_equal(evaluation.episode_length, lengths)
    assert 2 <= (lengths < 36).sum()  # lava and time limit


def test_trials_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A short run: success by episode."""
    monkeypatch.setattr(script, "record_video", lambda *_: None)  # takes seconds
    options = dict(episodes_per_trial=2, env_id="MiniGrid-Empty-5x5-v0", total_timesteps=256)
    run_dir = run_main(script, tmp_path, **options)
    summary = json_of(run_dir)
    assert summary["eval_episodes"] == 4
    assert len(scalars(run_dir)["losses/grad_norm"]) == 4
    rates = [summary[f"eval_success_rate_{episode}"] for episode in (1, 2)]
    out = capsys.readouterr().out
    assert all(f"success_rate_{n} {rate:.4g}" in out for n, rate in enumerate(rates, 1))
    assert len(rates) == 2 and max(rates) <= summary["eval_success_rate"] <= sum(rates)
    words = ["--eval", str(run_dir), "--videos-dir", str(tmp_path / "videos")]
    script.main([*words, "--episodes-per-trial", "3"])  # trials are trials
    assert "eval_success_rate_3" in json_of(run_dir, "eval")


# --- Loss ---

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
    value, batch = jax.device_get((value, batch))
    log_prob, entropy = scipy_categorical(dist.logits, batch.action)
    expected = numpy_ppo_loss(args, log_prob, entropy, value, batch)
    assert 0.1 < expected[1]["losses/clipfrac"] < 0.9
    close(loss(params), expected, rtol=1e-4)


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


# --- Seams ---


def test_a_missing_axis_is_an_error():
    args = script.Args(env_id="Empty-5x5", **SMALL)
    env = script.make_env(args)
    state = jax.eval_shape(functools.partial(script.init_train_state, args), jax.random.key(0))
    inputs = jax.eval_shape(  # [N], not [T, N]
        functools.partial(script.make_inputs, env), state.env_state, state.agent_state
    )
    forward = functools.partial(script.forward, args)
    with pytest.raises(ValueError, match=r"\[T, M, ...\]"):
        jax.eval_shape(forward, state.params, inputs, state.agent_state.rnn_state)


def test_video_has_the_colours_of_its_frames(tmp_path):
    """Exactly, in a level that has more of them than others."""
    args = script.Args(env_id="ObstructedMaze-Full-v1", **SMALL)
    env = script.make_env(args)
    start = jax.jit(env.reset)(jax.random.key(1))
    moments = [start, start._replace(direction=(start.direction + 1) % 4)]
    states = jax.tree.map(lambda *x: jnp.stack(x)[None], *moments)
    ones = jnp.ones((1, 1), int)
    evaluation = script.Evaluation(ones, ones, {}, states, trial_returns=())
    with Image.open(script.record_video(args, evaluation, tmp_path / "video")) as video:
        assert video.n_frames == 2
        for number, state in enumerate(moments):
            video.seek(number)
            expected = env.render(state, 320 // env.width)
            np.testing.assert_array_equal(video.convert("RGB"), expected)
            assert len(np.unique(expected.reshape(-1, 3), axis=0)) > 64
