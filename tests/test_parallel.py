"""Many seeds and many devices against one agent on one device."""

import collections
import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import MODULES, environment, finish, having, once, quick_args, words_of

ONE_AGENT = "train"  # what scripts define whose `update` is of one agent


def first_updates(script, args, updates=1):
    """({path: array}, metrics {tag: [U, K]}) of K agents after their first updates."""
    train_chunk = script.make_train_chunk(dataclasses.replace(args, log_interval=updates))
    state, metrics = train_chunk(script.init_agents(args), jnp.int32(updates))
    return jax.tree.map(np.asarray, (script.flatten_state(state), metrics))


def runs_of_their_own(script, args):
    """The same for one update, from one agent at a time by `make_train_step`."""
    init = jax.jit(script.init_train_state, static_argnums=0)
    train_step = script.make_train_step(args)
    agents = []
    for k in range(args.num_seeds):
        state, metrics = train_step(init(args, jax.random.key(args.seed + k)))
        metrics = {tag: value[None] for tag, value in metrics.items()}  # of the first update
        agents.append(jax.tree.map(np.asarray, (script.flatten_state(state), metrics)))
    states, metrics = zip(*agents, strict=True)
    states = {name: np.stack([state[name] for state in states]) for name in states[0]}
    return states, {tag: np.stack([m[tag] for m in metrics], axis=1) for tag in metrics[0]}


def close(ours, expected):
    """Asserts equality to 1e-5."""
    for x, y in zip(ours, expected, strict=True):
        assert x.keys() == y.keys()
        for name in y:
            first = x[name][: len(y[name])] if y is expected[1] else x[name]
            np.testing.assert_allclose(first, y[name], 1e-5, 1e-5, err_msg=name)


# --------------------------------------------------------------------------------------------------
# Agents and devices
# --------------------------------------------------------------------------------------------------

LAYOUTS = [  # agents, devices, how agents of one device are mapped
    (2, 1, "gpu"),
    (1, 4, "cpu"),  # the environments of one agent
    (2, 4, "cpu"),  # of two
]
MORE_LAYOUTS = LAYOUTS + [  # for the first script: the same text divides agents in all of them
    (2, 1, "cpu"),
    (2, 2, "cpu"),  # an agent each
    (4, 2, "gpu"),  # two agents each
    (2, 4, "gpu"),
]
LEARNERS = [module for module in MODULES if hasattr(module, ONE_AGENT)]


def with_layouts(first, others):
    """[(script, *layout)]: `first` are the layouts of the first script, `others` of the others."""
    pairs = []
    for module in LEARNERS:
        layouts = first if module is LEARNERS[0] else others
        pairs += [
            pytest.param(module, *layout, id=f"{module.__name__}-{layout}") for layout in layouts
        ]
    return pairs


@pytest.mark.parametrize(
    "script, agents, devices, platform", with_layouts(MORE_LAYOUTS, LAYOUTS), indirect=["script"]
)
def test_first_update_equals_single_runs(script, agents, devices, platform, monkeypatch):
    """All that each agent has learned, seen and drawn after one update, to 1e-5.

    On a CPU agents take turns; `vmap` is the way of accelerators.
    """
    over_agents = script.over_agents
    monkeypatch.setattr(script, "over_agents", lambda function, _: over_agents(function, platform))
    args = quick_args(script, num_seeds=agents, num_devices=devices, norm_adv=True)
    together, expected = first_updates(script, args), runs_of_their_own(script, args)
    close(together, expected)
    assert np.unique(together[1]["losses/grad_norm"][0]).size == agents  # none is there twice


@pytest.mark.parametrize(
    "script, agents, devices", with_layouts([(4, 4), (1, 4), (2, 4)], [(2, 4)]), indirect=["script"]
)
def test_devices_hold_their_parts(script, agents, devices):
    """Agents are spread where their number allows it, environments if not; also after an update."""
    args = quick_args(script, num_seeds=agents, num_devices=devices)
    train_chunk, state = script.make_train_chunk(args), script.init_agents(args)
    for _ in range(2):
        for leaf in jax.tree.leaves((state.env_state, state.stats)):
            expected = (agents, args.num_envs // devices)
            if agents % devices == 0:
                expected = (agents // devices, args.num_envs)
            shapes = [shard.data.shape[:2] for shard in leaf.addressable_shards]
            assert shapes == [expected] * devices
        for leaf in jax.tree.leaves(state.params):
            held = agents // devices if agents % devices == 0 else agents
            assert [len(shard.data) for shard in leaf.addressable_shards] == [held] * devices
        state, _ = train_chunk(state, jnp.int32(1))
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
    arrays that the loss reads (obs, action, log_prob, advantage, target), and three reductions of
    numbers for the metrics. Steps of the environments (depth 2) send nothing.
    """
    args = quick_args(script, num_devices=4)
    lowered = script.make_train_chunk(args).lower(script.init_agents(args), jnp.int32(1))
    moved = collectives(lowered.compile().as_text())
    assert moved == {1: {"all-gather": 5, "all-reduce": 3}, 3: {"all-reduce": 1}}


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
    """The default flags on four virtual devices, in a process of its own."""
    run_dir = finish(script, tmp_path, env=environment(4, flags=""), num_devices=4)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["num_devices"], summary["eval_return_mean"]) == (4, 500.0)


@having("load_run", ONE_AGENT)
def test_run_of_many_devices_resumes_on_one(script, tmp_path):
    """`--num-devices` may change."""
    args = quick_args(script, videos_dir=str(tmp_path / "videos"), num_devices=4, num_seeds=2)
    script.write_json(tmp_path / "args.json", vars(args))
    script.save_checkpoint(tmp_path, script.init_agents(args))
    script.main(words_of(resume=tmp_path, num_devices=1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["num_devices"], summary["status"]) == (1, "finished")


@having("load_run", ONE_AGENT)
def test_run_of_many_devices_is_evaluated_where_there_is_one(script, tmp_path, monkeypatch):
    """Trained on four: `load_run` and `--eval` work on any machine."""
    args = quick_args(script, videos_dir=str(tmp_path / "videos"), num_devices=4)
    script.write_json(tmp_path / "args.json", vars(args))
    script.save_checkpoint(tmp_path, script.init_agents(args))
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_devices", lambda **_: jax.devices()[:1])
    _, state = script.load_run(tmp_path)
    assert np.asarray(state.update).tolist() == [0]
    script.main(words_of(eval=tmp_path))
    assert (tmp_path / "eval.json").is_file()


# --------------------------------------------------------------------------------------------------
# Seeds
# --------------------------------------------------------------------------------------------------


@once("over_agents")
def test_later_returns_have_the_distribution_of_single_runs(script, monkeypatch):
    """Twenty agents together (`vmap`) and twenty others alone, after ten updates.

    A Kolmogorov-Smirnov test.
    """
    sizes = dict(num_envs=16, num_steps=64, total_timesteps=10 * 16 * 64)
    args = quick_args(script, checkpoint_interval=10, num_seeds=20, **sizes)
    others = dataclasses.replace(args, seed=100)  # in turn
    expected = first_updates(script, others, 10)[1]["charts/episodic_return"][9]
    monkeypatch.setattr(script, "over_agents", lambda function, _: jax.vmap(function))
    together = first_updates(script, args, 10)[1]["charts/episodic_return"][9]
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
