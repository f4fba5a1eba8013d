"""Where people push: `train` under jit and vmap, jits that compile once, other environments."""

import dataclasses
import doctest
import functools
import gc
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    USUAL_COMPILATION,
    having,
    jit_args,
    json_of,
    once,
    quick_args,
    quick_words,
    run_main,
    run_of,
    scalars,
)

PLAYED = ("params", "env_state", "agent_state", "stats")  # what `rollout` takes of a state


def close(ours, expected, tolerance=1e-5):
    """Asserts that two trees, in which keys may be leaves, have nearly the same leaves."""

    def compare(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, tolerance, tolerance)

    jax.tree.map(compare, ours, expected)


def short_args(script, updates=1, **options):
    """`Args` of a run of a few updates."""
    args = quick_args(script, **options)
    return dataclasses.replace(args, total_timesteps=updates * args.batch_size)


# --- jit and vmap ---


@having("train")
def test_train_equals_its_steps(script):
    """State and metrics of `update` called three times, compiled once, which donates its input."""
    args, key = short_args(script, updates=3, anneal_lr=True), jax.random.key(0)
    state, metrics = jit_args(script.train, args)(key)
    expected = jit_args(script.init_train_state, args)(key)
    train_step = jax.jit(functools.partial(script.update, args), donate_argnums=0)
    for update in range(3):
        before = jax.tree.leaves(expected.params)
        expected, row = train_step(expected)
        assert all(leaf.is_deleted() for leaf in before)
        close({tag: value[update] for tag, value in metrics.items()}, row, 1e-4)
    close(state, expected, 1e-4)
    for _ in range(2):  # beyond the schedule nothing is learned, nor unlearned
        expected, row = train_step(expected)
        assert row["charts/learning_rate"] == 0
    assert train_step._cache_size() == 1


FLOATS = dict(  # value of the base run, another value
    learning_rate=(5e-4, 1e-3),  # no larger: Adam scales rounding by its rate
    gamma=(0.99, 0.5),
    gae_lambda=(0.95, 0.2),
    clip_coef=(0.1, 0.001),
    ent_coef=(0.01, 1.0),
    vf_coef=(0.5, 2.0),
    max_grad_norm=(0.5, 0.05),
    adam_eps=(1e-5, 1e-2),
    hanging_starts=(0.0, 1.0),  # the swing-up's
)


@having("train")
def test_sweep_over_every_float_and_seeds(script):
    """`jit(vmap(train))`: every agent equals a run of its own, and every float has an effect."""
    args = short_args(script, num_minibatches=2, clip_vloss=True, norm_adv=True)
    fields = [f.name for f in dataclasses.fields(args) if f.type in (float, "float")]
    fields = [name for name in fields if name != "total_timesteps"]  # a length of results
    others = {name: (getattr(args, name), 0.5 * getattr(args, name)) for name in fields}
    values = others | {name: both for name, both in FLOATS.items() if name in fields}
    assert FLOATS.keys() - {"hanging_starts"} <= set(fields)
    base = {name: value for name, (value, _) in values.items()}
    rows = [(base, 0)] + [(base | {name: other}, 0) for name, (_, other) in values.items()]
    other_rate = 1 + list(values).index("learning_rate")
    everything = {name: other for name, (_, other) in values.items()}
    rows += [(floats, 1) for floats in (base, rows[other_rate][0], everything)]

    def agent(floats, seed):
        return script.train(dataclasses.replace(args, **floats), jax.random.key(seed))

    columns = {name: jnp.array([floats[name] for floats, _ in rows]) for name in values}
    together = jax.jit(jax.vmap(agent))(columns, jnp.array([seed for _, seed in rows]))
    alone = jax.jit(agent)  # floats are tracers here too, but of one agent
    agents = [jax.tree.map(lambda x: x[i], together) for i in range(len(rows))]  # noqa: B023
    for (floats, seed), ours in zip(rows, agents, strict=True):
        floats = {name: jnp.float32(value) for name, value in floats.items()}
        close(ours, alone(floats, jnp.int32(seed)))
    assert alone._cache_size() == 1
    close(agents[-1], jax.jit(functools.partial(agent, everything))(jnp.int32(1)))
    norms = np.asarray(together[1]["losses/grad_norm"])
    assert len(np.unique(norms[[0, other_rate, -3, -2]])) == 4  # two rates, two seeds
    unchanged = jax.tree.leaves(agents[0][0].params)
    for name, ours in zip(values, agents[1:]):
        leaves = jax.tree.leaves(ours[0].params)
        assert any((x != y).any() for x, y in zip(unchanged, leaves, strict=True)), name


@having("train")
@pytest.mark.quick
def test_a_start_without_jit_can_be_donated(script):
    """No two arrays of it are the same memory."""
    state = script.init_train_state(short_args(script), jax.random.key(0))
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    places = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size]
    assert len(set(places)) == len(places)


@having("train")
def test_jitted_update_equals_op_by_op(script):
    """Fusions of XLA, some of which were wrong (jax-ml/jax#39103), against single operations."""
    args = short_args(script, num_envs=4, num_steps=2, num_minibatches=1, update_epochs=1)
    state = jit_args(script.init_train_state, args)(jax.random.key(0))
    update = functools.partial(script.update, args)
    together = jax.jit(update, compiler_options=USUAL_COMPILATION)(state)
    batched = jax.jit(jax.vmap(update))(jax.tree.map(lambda x: jnp.stack([x, x]), state))
    with jax.disable_jit(), jax.debug_nans(True):  # so that users can look for theirs
        expected = script.update(args, state)
    close(together, expected)
    close(jax.tree.map(lambda x: x[1], batched), expected)


@once("over_seeds")
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_seeds_equal_runs_of_their_own(script, backend, monkeypatch, tmp_path):
    """In turn on a CPU, batched elsewhere; one program serves new, own and loaded states."""
    args = short_args(script, updates=3, num_seeds=4, norm_adv=True)
    state = jax.jit(functools.partial(script.init_states, args))()
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    update = jax.jit(functools.partial(script.update_seeds, args), donate_argnums=0)
    for _ in range(2):
        state, _ = update(state)
    script.save_checkpoint(tmp_path, state)
    loaded = script.load_checkpoint(tmp_path, jax.eval_shape(lambda: state))
    close(loaded, state, 0)
    state, metrics = update(loaded)
    assert update._cache_size() == 1 and state.update.tolist() == [3] * 4
    train = jit_args(script.train, args)
    for k in range(4):
        expected, rows = train(jax.random.key(args.seed + k))
        close(jax.tree.map(lambda x: x[k], state), expected, 1e-4)  # noqa: B023
        ours = {tag: value[k] for tag, value in metrics.items()}
        close(ours, {tag: value[-1] for tag, value in rows.items()}, 1e-3)
    assert np.unique(metrics["losses/grad_norm"]).size == 4


@having("train")
@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["value", "log_prob", "entropy"])
def test_outputs_of_wrong_shape(script, wrong, monkeypatch):
    """With an axis too many they would be broadcast, to [N, N], or averaged over it."""
    name = "forward_step" if hasattr(script, "forward_step") else "forward"
    forward = getattr(script, name)

    def odd_forward(*inputs):
        dist, value, *rest = forward(*inputs)
        return dist, value[..., None], *rest

    if wrong == "value":
        monkeypatch.setattr(script, name, odd_forward)
    else:
        distribution = getattr(script, "Gaussian", None) or script.Categorical
        method = getattr(distribution, wrong)
        odd_method = lambda *inputs: method(*inputs)[..., None]
        monkeypatch.setattr(distribution, wrong, odd_method)
    args = short_args(script)
    with pytest.raises(ValueError, match=f"^{wrong} must have the shape"):
        jax.eval_shape(functools.partial(script.train, args), jax.random.key(0))


class Wrapped:
    """An environment of which subclasses change a part; a part of their state is its state."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        if name in ("evaluations", "succeeds"):  # the swing-up's, of its own states
            raise AttributeError(name)
        return getattr(self.env, name)

    def observe(self, state):
        return self.env.observe(state["env"] if isinstance(state, dict) else state)


class ChangesForm(Wrapped):
    """Its state has other fields at the start than after a step."""

    def reset(self, key):
        return {"env": self.env.reset(key), **self.at_start}

    def step(self, key, state, action):
        env_state, reward, terminated = self.env.step(key, state["env"], action)
        return {"env": env_state, **self.later}, reward, terminated


@having("train")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("at_start", "later", "reset", "step"),
    [
        ({"x": 0}, {"x": 0.5}, ["state['x']: int32 (8,)"], ["state['x']: float32 (8,)"]),
        ({}, {"x": [0]}, [], ["state['x']: int32 (8, 1)"]),
    ],
)
def test_states_keep_their_form(script, at_start, later, reset, step, tmp_path, monkeypatch):
    """Tracing raises an error that names the differing parts of the state."""
    env = ChangesForm(script.make_env(quick_args(script)))
    env.at_start, env.later = ({n: jnp.asarray(x) for n, x in f.items()} for f in (at_start, later))
    monkeypatch.setattr(script, "make_env", lambda args: env)
    message = f"`reset` returns {set(reset)}, `step` returns {set(step)}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        run_main(script, tmp_path)


@once("select")
@pytest.mark.quick
def test_states_of_any_shape_and_type(script):
    """`select` chooses whole states, whatever arrays they consist of."""
    rng = np.random.default_rng(0)

    def state(seed):
        parts = rng.integers(9, size=(3, 2, 4)), rng.random((3, 1)) < 0.5
        return {"a": parts, "key": jax.random.split(jax.random.key(seed), 3)}

    yes, no, mask = state(0), state(1), jnp.array([True, False, True])
    chosen = script.select(mask, yes, no)
    for n in range(3):
        expected = jax.tree.map(lambda x: x[n], yes if mask[n] else no)  # noqa: B023
        close(jax.tree.map(lambda x: x[n], chosen), expected, 0)  # noqa: B023


# --- What environments report ---


class CountsSteps(Wrapped):
    """It counts the steps of its episodes and reports them."""

    def reset(self, key):
        return {"env": self.env.reset(key), "steps": jnp.int32(0)}

    def step(self, key, state, action):
        env_state, reward, terminated = self.env.step(key, state["env"], action)
        return {"env": env_state, "steps": state["steps"] + 1}, reward, terminated

    def metrics(self, state):
        return {"steps": state["steps"], "first": state["steps"] == 1}


@having("env_metrics")
def test_what_an_environment_reports(script, tmp_path, monkeypatch):
    """Of every step of a rollout, its mean in the events, and that of episodes in the summary."""
    args, make_env = quick_args(script, num_steps=120), script.make_env  # of 100 the longest
    monkeypatch.setattr(script, "make_env", lambda args: CountsSteps(make_env(args)))
    state = jit_args(script.init_train_state, args)(jax.random.key(0))
    parts = [getattr(state, name) for name in state._fields if name in PLAYED]
    play = jax.jit(functools.partial(script.rollout, args, script.make_env(args)))
    results = play(*parts, jax.random.key(1))
    (trajectory,) = [part for part in results if isinstance(part, script.Transition)]
    steps, ended = np.zeros(args.num_envs, int), trajectory.terminated | trajectory.truncated
    for t in range(args.num_steps):
        steps += 1
        np.testing.assert_array_equal(trajectory.info["steps"][t], steps)
        np.testing.assert_array_equal(trajectory.info["first"][t], steps == 1)
        steps[ended[t]] = 0
    assert ended.any()

    run_dir = run_main(script, tmp_path)
    events = scalars(run_dir)
    assert [len(events[tag]) for tag in ("env/steps", "env/first")] == [20, 20]
    # In the first update no episode has more steps than a rollout.
    assert 1 <= events["env/steps"][0][1] <= (quick_args(script).num_steps + 1) / 2
    summary = json_of(run_dir)
    # Means over steps: of each episode, whose first step is one of so many.
    assert summary["eval_env_first"] == pytest.approx(1 / summary["eval_length_mean"], rel=1e-5)
    assert 1 < summary["eval_env_steps"] <= script.make_env(args).max_episode_steps


# --- Heavy environments ---


class Rounded(Wrapped):
    """Observations [2, 2] of whole numbers, three actions."""

    num_actions = 3

    def observe(self, state):
        return (100 * self.env.observe(state)).astype(jnp.int8).reshape(2, 2)


@once("init_mlp")
def test_observations_of_another_shape_and_three_actions(script, tmp_path, monkeypatch):
    """Only the environment changes."""
    make_env = script.make_env
    monkeypatch.setattr(script, "make_env", lambda args: Rounded(make_env(args)))
    args, params = script.load_run(run_main(script, tmp_path))
    params = jax.tree.map(lambda x: x[0], params)
    dist, value = script.forward(args, params, jnp.zeros((5, 2, 2), jnp.int8))
    assert dist.logits.shape == (5, 3) and value.shape == (5,)


class Numbered(Wrapped):
    """Each start state has a number of its own; episodes end at random."""

    def reset(self, key):
        return {"env": self.env.reset(key), "number": jax.random.bits(key)}

    def step(self, key, state, action):
        env_state, reward, _ = self.env.step(key, state["env"], action)
        return {**state, "env": env_state}, reward, jax.random.bernoulli(key, 0.2)

    def metrics(self, state):
        return {"number": state["number"]}


@having("env_metrics")
@pytest.mark.parametrize("pool_size", [None, 5])
def test_start_states_of_a_pool(script, pool_size, monkeypatch):
    """The episodes of a rollout take them one after the other, and then again from the first on."""
    make_env = script.make_env
    monkeypatch.setattr(script, "make_env", lambda args: Numbered(make_env(args)))
    args = quick_args(script, num_steps=16)
    env = script.make_env(args)
    if pool_size:
        env.starts_per_update = pool_size
    state = jit_args(script.init_train_state, args)(jax.random.key(0))
    parts = [getattr(state, name) for name in state._fields if name in PLAYED]
    results = jax.jit(functools.partial(script.rollout, args, env))(*parts, jax.random.key(1))
    (trajectory,) = [part for part in results if isinstance(part, script.Transition)]
    begins = np.asarray(trajectory.terminated | trajectory.truncated)[:-1]
    taken = np.asarray(trajectory.info["number"])[1:][begins]  # in the order of their steps
    assert len(taken) > 10
    if pool_size == 5:
        np.testing.assert_array_equal(taken, np.resize(taken[:5], len(taken)))
        assert len(set(taken[:5])) == 5
    else:
        assert len(set(taken)) == len(taken)


class Heavy(Wrapped):
    """A state of 30 kB, episodes of three steps where a thousand are allowed."""

    max_episode_steps = 1000

    def reset(self, key):
        return {"env": self.env.reset(key), "load": jax.random.uniform(key, (7500,)), "t": 0}

    def step(self, key, state, action):
        env_state, reward, _ = self.env.step(key, state["env"], action)
        state = {"env": env_state, "load": jnp.sin(state["load"]), "t": state["t"] + 1}
        jax.debug.callback(lambda: STEPS.append(1))
        return state, reward, state["t"] >= 3


STEPS = []  # that `Heavy` environments have made


@having("env_metrics")
def test_evaluation_of_heavy_states(script, monkeypatch):
    """1,024 episodes with states of 30 kB: those of the drawn ones are kept, up to the last end."""
    make_env = script.make_env
    monkeypatch.setattr(script, "make_env", lambda args: Heavy(make_env(args)))
    args = quick_args(script, eval_episodes=1024)
    state = jit_args(script.init_train_state, args)(jax.random.key(0))
    params = state.params
    evaluate = jax.jit(functools.partial(script.evaluate, args))
    memory = evaluate.lower(params, jax.random.key(0)).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 200e6
    STEPS.clear()
    args = dataclasses.replace(args, eval_episodes=2)
    evaluation = jax.jit(functools.partial(script.evaluate, args))(params, jax.random.key(0))
    jax.effects_barrier()
    assert evaluation.episode_length.ravel().tolist() == [3, 3] and len(STEPS) == 3
    # An environment that draws nothing keeps nothing.
    monkeypatch.delattr(type(make_env(args)), "render")
    evaluation = jax.eval_shape(functools.partial(script.evaluate, args), params, state.key)
    assert evaluation.states["t"].shape[0] == 1


@once("init_mlp")
@pytest.mark.quick
def test_initialisation_of_a_wide_input(script):
    """A picture of 64 x 64 x 3: no more numbers are drawn than three layers of 64 x 12,288."""
    sizes = (64 * 64 * 3, 64, 64, 2)
    traced = jax.make_jaxpr(lambda key: script.init_mlp(key, sizes, 0.01))(jax.random.key(0))
    largest = max(var.aval.size for eqn in traced.eqns for var in eqn.outvars)
    assert largest <= 3 * 64 * sizes[0]


# --- Types and shapes ---


@having("env_metrics", lacking="make_mesh")  # MiniGrid has a table of them
def test_name_of_an_environment_from_outside(script, tmp_path, monkeypatch):
    """A run has the name of its environment; who starts it without that is told in one line."""
    words = quick_words(script, tmp_path, env_id="Mine: a/b v3", total_timesteps=128)
    with pytest.raises(script.UserError, match="^unknown --env-id Mine: a/b v3"):
        script.main(words)
    make_env, args = script.make_env, quick_args(script)
    monkeypatch.setattr(script, "make_env", lambda _: make_env(args))
    script.main(words)
    assert run_of(tmp_path).name.startswith("Mine--a-b-v3__")
    assert json_of(run_of(tmp_path), "args")["env_id"] == "Mine: a/b v3"


@having("train")
@pytest.mark.quick
def test_with_64_bits(script):
    """JAX_ENABLE_X64=1: traced without an error, and nothing of the state is wider for it."""
    args, key = short_args(script, updates=2, num_seeds=2, target_kl=0.01), jax.random.key(0)
    expected = jax.eval_shape(functools.partial(script.train, args), key)[0]
    with jax.enable_x64(True):
        state, _ = jax.eval_shape(functools.partial(script.train, args), key)
        jax.eval_shape(functools.partial(script.evaluate, args), state.params, key)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, expected)


@pytest.mark.quick
def test_with_the_checks_of_jax(script):
    """JAX_CHECK_TRACER_LEAKS=1 and JAX_NUMPY_RANK_PROMOTION=raise: traced without an error."""
    args = short_args(script, num_seeds=2, norm_adv=True, target_kl=0.1, clip_vloss=True)
    init, envs = functools.partial(script.init_states, args), ()
    if hasattr(script, "num_uniforms"):
        script.num_uniforms.cache_clear()
    if hasattr(script, "start_episodes"):
        env = script.make_env(args)
        envs = env, env.make_pool(script.env_seeds(args, args.num_envs))
        init = lambda: script.start_episodes(args, *envs, script.init_states(args))
    update = getattr(script, "update_seeds", script.update)
    gc.freeze()  # each trace collects garbage: what earlier tests have left is not looked at
    try:
        with jax.check_tracer_leaks(True), jax.numpy_rank_promotion("raise"):
            state = jax.eval_shape(init)
            jax.eval_shape(functools.partial(update, args, *envs), state)
            if not envs:
                jax.eval_shape(functools.partial(script.evaluate_seeds, args), state.params)
    finally:
        gc.unfreeze()


# --- Texts ---


@pytest.mark.quick
def test_doctests(script):
    """The worked examples in the docstrings."""
    failed, attempted = doctest.testmod(script)
    assert failed == 0 and attempted > 0
