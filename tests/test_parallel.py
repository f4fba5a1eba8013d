"""Many seeds and many devices against one agent on one device."""

import collections
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import MODULES, each_text, environment, finish, having, once, quick_args, words_of


@functools.cache
def runs_of_their_own(script):
    """The same of four agents for one update, one agent at a time by `make_train_step`."""
    args = quick_args(script, norm_adv=True)
    init = jax.jit(script.init_train_state, static_argnums=0)
    train_step = script.make_train_step(args)
    agents = []
    for k in range(4):
        state, metrics = train_step(init(args, jax.random.key(args.seed + k)))
        metrics = {tag: value[None] for tag, value in metrics.items()}  # of the first update
        agents.append(jax.tree.map(np.asarray, (script.flatten_state(state), metrics)))
    states, metrics = zip(*agents, strict=True)
    states = {name: np.stack([state[name] for state in states]) for name in states[0]}
    return states, {tag: np.stack([m[tag] for m in metrics], axis=1) for tag in metrics[0]}


def check_parts(args, state):
    """Asserts that devices hold agents where their number allows it, environments if not."""
    agents, devices = args.num_seeds, args.num_devices
    for leaf in jax.tree.leaves((state.env_state, state.stats)):
        expected = (agents, args.num_envs // devices)
        if agents % devices == 0:
            expected = (agents // devices, args.num_envs)
        shapes = [shard.data.shape[:2] for shard in leaf.addressable_shards]
        assert shapes == [expected] * devices
    for leaf in jax.tree.leaves(state.params):
        held = agents // devices if agents % devices == 0 else agents
        assert [len(shard.data) for shard in leaf.addressable_shards] == [held] * devices


# --------------------------------------------------------------------------------------------------
# Agents and devices
# --------------------------------------------------------------------------------------------------

LAYOUTS = {  # agents, devices, how agents of one device are mapped
    "ppo_cartpole_jax": [
        (2, 1, "cpu"),
        (2, 1, "gpu"),
        (1, 4, "cpu"),  # the environments of one agent
        (2, 4, "cpu"),  # of two
        (2, 4, "gpu"),
        (2, 2, "cpu"),  # an agent each
        (4, 2, "gpu"),  # two agents each
    ],
    # The same text divides agents in all scripts: how environments lie is what they differ in.
    "ppo_swingup_jax": [(2, 4, "gpu")],
    "ppo_minigrid_rnn": [(2, 1, "gpu"), (1, 4, "cpu"), (2, 4, "cpu")],
}
WITH_LAYOUTS = [
    pytest.param(module, *layout, id=f"{module.__name__}-{layout}")
    for module in MODULES
    for layout in LAYOUTS.get(module.__name__, [])
]


@pytest.mark.parametrize("script, agents, devices, platform", WITH_LAYOUTS, indirect=["script"])
def test_first_update_equals_single_runs(script, agents, devices, platform, monkeypatch):
    """All that each agent has learned, seen and drawn after one update, to 1e-5.

    On a CPU agents take turns; `vmap` is the way of accelerators. Before and after, each device
    holds its part, and a second update needs no second program.
    """
    over_agents = script.over_agents
    monkeypatch.setattr(script, "over_agents", lambda function, _: over_agents(function, platform))
    options = dict(num_seeds=agents, num_devices=devices, norm_adv=True, log_interval=1)
    args = quick_args(script, **options)
    train_chunk, state = script.make_train_chunk(args), script.init_agents(args)
    check_parts(args, state)
    state, metrics = train_chunk(state, jnp.int32(1))
    check_parts(args, state)
    ours = jax.tree.map(np.asarray, (script.flatten_state(state), metrics))
    expected, expected_metrics = runs_of_their_own(script)
    for name, x in expected.items():
        np.testing.assert_allclose(ours[0][name], x[:agents], 1e-5, 1e-5, err_msg=name)
    for tag, x in expected_metrics.items():
        np.testing.assert_allclose(ours[1][tag], x[:, :agents], 1e-5, 1e-5, err_msg=tag)
    assert ours[0].keys() == expected.keys() and ours[1].keys() == expected_metrics.keys()
    assert np.unique(ours[1]["losses/grad_norm"][0]).size == agents  # none is there twice
    state, _ = train_chunk(state, jnp.int32(1))
    check_parts(args, state)
    assert train_chunk._cache_size() == 1


def collectives(text):
    """{depth: Counter} of the collective instructions in an optimised HLO module.

    Depth 0 is outside of all loops, 1 inside the loop over updates, 2 in a loop inside of that ...
    """
    bodies, name = collections.defaultdict(list), None
    entry = None
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%(\S+) \(", line)
        if start and line.endswith("{"):
            name = start[2]
            entry = name if start[1] else entry
        elif name:
            bodies[name].append(line)
    counts = collections.defaultdict(collections.Counter)

    def visit(name, depth):
        for line in bodies[name]:
            kind = re.search(
                r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
                r"(?:-start)?\(",
                line,
            )
            if kind:
                counts[depth][kind[1]] += 1
            loop = " while(" in line
            for callee in re.findall(
                r"(?:body|calls|to_apply|branch_computations=\{)=?%(\S+?)[,} ]", line + " "
            ):
                visit(callee, depth + loop)

    visit(entry, 0)
    return {depth: dict(counter) for depth, counter in counts.items()}


@once("make_train_chunk")
def test_what_moves_between_devices(script):
    """One agent on four devices: what the compiled program sends around.

    Today: in the loop over minibatches (depth 3: updates, epochs, minibatches) one reduction, of
    the gradients with the metrics; once an update (depth 1) five gathers, of the batch's five
    arrays that the loss reads (obs, action, log_prob, advantage, target), and four reductions of
    numbers for the metrics. Steps of the environments (depth 2) send nothing.
    """
    args = quick_args(script, num_devices=4)
    lowered = script.make_train_chunk(args).lower(script.init_agents(args), jnp.int32(1))
    moved = collectives(lowered.compile().as_text())
    assert moved == {1: {"all-gather": 5, "all-reduce": 4}, 3: {"all-reduce": 1}}


@once("make_train_chunk")
def test_nothing_moves_between_agents(script):
    """Four agents on four devices: only the metrics are gathered, outside of all loops."""
    args = quick_args(script, num_devices=4, num_seeds=4)
    train_chunk, state = script.make_train_chunk(args), script.init_agents(args)
    lowered = train_chunk.lower(state, jnp.int32(1))
    moved = collectives(lowered.compile().as_text())
    assert moved == {0: {"all-gather": len(lowered.out_info[1])}}


@having("CartPole")
def test_four_devices_train_and_solve(script, tmp_path):
    """Three fifths of the default steps on four virtual devices, in a process of its own."""
    options = dict(num_devices=4, total_timesteps=300_000)
    run_dir = finish(script, tmp_path, env=environment(4, flags=""), **options)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["num_devices"], summary["eval_return_mean"]) == (4, 500.0)


@each_text("place", lacking="make_pool")
def test_run_of_many_devices_resumes_on_one(script, tmp_path):
    """`--num-devices` may change."""
    args = quick_args(script, videos_dir=str(tmp_path / "videos"), num_devices=4, num_seeds=2)
    args = dataclasses.replace(args, total_timesteps=4 * args.batch_size)
    script.write_json(tmp_path / "args.json", vars(args))
    script.save_checkpoint(tmp_path, script.init_agents(args))
    script.main(words_of(resume=tmp_path, num_devices=1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["num_devices"], summary["status"]) == (1, "finished")


@each_text("place", lacking="make_pool")
def test_run_of_many_devices_is_evaluated_where_there_are_others(script, tmp_path, monkeypatch):
    """Trained on four: `load_run` and `--eval` work on any machine."""
    args = quick_args(script, videos_dir=str(tmp_path / "videos"), num_devices=4)
    script.write_json(tmp_path / "args.json", vars(args))
    script.save_checkpoint(tmp_path, script.init_agents(args))
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    monkeypatch.setattr(jax, "local_devices", lambda **_: jax.devices()[:3])  # 8 environments
    _, state = script.load_run(tmp_path)
    assert np.asarray(state.update).tolist() == [0]
    script.main(words_of(eval=tmp_path, videos_dir=tmp_path / "videos"))
    assert (tmp_path / "eval.json").is_file()


@each_text("state_shardings")
@pytest.mark.quick
def test_fields_that_are_added_are_placed(script, monkeypatch):
    """A `TrainState` with one more: whole on every device."""
    args = quick_args(script, num_devices=1 if hasattr(script, "make_pool") else 4)
    fields = [*script.TrainState._fields, "mine"]
    monkeypatch.setattr(script, "TrainState", collections.namedtuple("TrainState", fields))
    layout = script.state_shardings(args)
    assert layout.mine == layout.params == layout.key and layout.mine.is_fully_replicated
    assert layout.stats == layout.env_state != layout.mine


# --------------------------------------------------------------------------------------------------
# Seeds
# --------------------------------------------------------------------------------------------------


@once("over_agents")
def test_later_returns_have_the_distribution_of_single_runs(script, monkeypatch):
    """Twenty agents together (`vmap`) and twenty others alone, after ten updates.

    A Kolmogorov-Smirnov test.
    """
    sizes = dict(num_envs=8, num_steps=64, total_timesteps=10 * 8 * 64)
    args = quick_args(script, checkpoint_interval=10, log_interval=10, num_seeds=20, **sizes)
    others = dataclasses.replace(args, seed=100)  # in turn

    def last_returns(args):
        _, metrics = script.make_train_chunk(args)(script.init_agents(args), jnp.int32(10))
        return np.asarray(metrics["charts/episodic_return"][9])

    expected = last_returns(others)
    monkeypatch.setattr(script, "over_agents", lambda function, _: jax.vmap(function))
    together = last_returns(args)
    assert np.unique(together).size > 15
    assert scipy.stats.ks_2samp(together, expected).pvalue > 0.01


@once("Logger")
def test_seed_with_nan_is_named_and_others_go_on(script, tmp_path, capsys):
    """Three seeds resume from a checkpoint in which the second one's parameters are NaN."""
    args = quick_args(script, num_seeds=3, videos_dir=str(tmp_path))
    state = script.init_agents(args)
    params = jax.tree.map(lambda p: p.at[1].set(jnp.nan), state.params)
    script.save_checkpoint(tmp_path, state._replace(params=params))
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(args)))
    script.main(words_of(resume=tmp_path))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert "seed 2 " in line
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["failed_seeds"]) == ("finished", [2])
    _, state = script.load_run(tmp_path)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
    alive = [all(np.isfinite(leaf[k]).all() for leaf in leaves) for k in range(3)]
    assert alive == [True, False, True] and (np.asarray(state.update) == args.num_updates).all()
    returns = summary["per_seed"]["eval_return_mean"]
    expected = pytest.approx(np.mean([returns[0], returns[2]]))  # of those alive
    assert summary["eval_return_mean"] == expected
