"""The adapter to XLand-MiniGrid against xminigrid itself: steps, tasks, trials, usage errors."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, environment, run_main, words_of

import ppo_minigrid_rnn as script

xminigrid = pytest.importorskip("xminigrid")
sys.path.insert(0, str(ROOT / "benchmarks" / "environments"))
import xland_minigrid as adapter  # noqa: E402
from xland_tasks import write_tasks  # noqa: E402

SMALL = dict(num_envs=16, num_steps=16, num_minibatches=2, rnn_hidden_dim=8, head_hidden_dim=8)
ROOM = "XLand-MiniGrid-R1-9x9"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Replaces the parts of the script that the adapter replaces."""
    monkeypatch.setattr(script, "Args", adapter.Args)
    monkeypatch.setattr(script, "make_env", adapter.make_env)


@pytest.fixture(scope="module")
def task_file(tmp_path_factory):
    """A file with ten tasks."""
    path = tmp_path_factory.mktemp("xland") / "ten"
    write_tasks(path, 10)
    return str(path)


def equal(ours, theirs):
    """Asserts that two trees have equal arrays."""
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_steps_equal_xminigrid(task_file):
    """Random actions from many starts, some of them just before the time limit."""
    num_envs, ours = 128, adapter.XLand(ROOM, task_file)
    theirs, params = xminigrid.make(ROOM)
    assert (ours.num_actions, ours.max_episode_steps) == (6, params.max_steps)
    keys = jax.random.split(jax.random.key(0), num_envs)
    state = jax.jit(jax.vmap(ours.reset))(keys)
    step_num = jnp.where(jnp.arange(num_envs) < 32, params.max_steps - 10, 0)
    state = state.replace(state=state.state.replace(step_num=step_num))
    timestep, running = state, np.ones(num_envs, bool)
    our_step = jax.jit(jax.vmap(lambda key, *x: (*ours.step(key, *x), ours.observe(x[0]))))
    their_step = jax.jit(jax.vmap(functools.partial(theirs.step, params)))
    for t in range(30):
        action = jnp.asarray(np.random.default_rng(t).integers(6, size=num_envs))
        obs_before, direction = timestep.observation, timestep.state.agent.direction
        timestep = their_step(timestep, action)
        state, reward, terminated, obs = jax.device_get(our_step(keys, state, action))
        equal(obs, {"image": obs_before, "direction": direction})
        equal(reward, timestep.reward)
        assert ((reward > 0) == terminated).all()
        truncated = state.state.step_num >= ours.max_episode_steps
        equal((terminated | truncated)[running], np.asarray(timestep.last())[running])
        running &= ~terminated & ~truncated
    assert truncated.any() and running.sum() < num_envs - truncated.sum()


def test_tasks(task_file):
    """Each level has a random task of the file, or always the same one, with its objects."""
    benchmark = xminigrid.benchmarks.load_benchmark_from_path(task_file)
    rulesets = [benchmark.get_ruleset(i) for i in range(10)]
    keys = jax.random.split(jax.random.key(0), 200)
    levels = jax.device_get(jax.jit(jax.vmap(adapter.XLand(ROOM, task_file).reset))(keys)).state
    found = set()
    for goal, grid in zip(levels.goal_encoding, levels.grid):
        (number,) = [i for i in range(10) if (rulesets[i].goal == goal).all()]
        found.add(number)
        tiles = {tuple(tile) for tile in grid.reshape(-1, 2).tolist()}
        assert {tuple(tile) for tile in rulesets[number].init_tiles.tolist()} <= tiles
    assert found == set(range(10))
    assert len(np.unique(levels.grid, axis=0)) > 190

    levels = jax.jit(jax.vmap(adapter.XLand(ROOM, task_file, 7).reset))(keys[:20])
    assert (levels.state.goal_encoding == rulesets[7].goal).all()


def test_a_trial_keeps_its_task(task_file):
    """Level and task of all episodes of a trial are the same; the next trial has new ones."""
    args = script.Args(env_id=ROOM, benchmark_id=task_file, episodes_per_trial=3, **SMALL)
    single = adapter.XLand(ROOM, task_file)
    single.max_episode_steps = 5
    env = script.Trials(single, args.episodes_per_trial)
    key = jax.random.key(0)
    params = jax.jit(lambda key: script.init_agent(args, key, env))(key)
    sizes = 13 + 12  # kinds of objects and colors, of each of four cells
    assert params["params"]["encoder"]["conv0"]["w"].shape == (16, 4 * sizes)

    start = jax.jit(jax.vmap(env.reset))(jax.random.split(key, args.num_envs))
    play = jax.jit(functools.partial(script.rollout, args, env, params))
    agent_state = script.init_agent_state(args, args.num_envs)
    stats = script.init_episode_stats(args.num_envs)
    trial, _, stats, trajectory, _ = jax.device_get(play(start, agent_state, stats, key))
    level, goal = trial.start_state.state.grid, trial.start_state.state.goal_encoding
    equal(trial.env_state.state.goal_encoding, goal)
    done = trajectory.terminated
    once = ~done[:14].any(0)  # no success: it ends after three episodes of five steps each
    assert once.mean() > 0.5 and done[14, once].all() and (done[:, once].sum(0) == 1).all()
    assert (level != start.start_state.state.grid).any((1, 2, 3))[once].all()
    assert (goal != start.start_state.state.goal_encoding)[once].any()
    first = stats.running_length == 0
    equal(*jax.tree.map(lambda x: x[first], (trial.env_state, trial.start_state)))


def test_a_port_from_the_command_line(tmp_path, monkeypatch):
    """Training, evaluation and video of the environment with the smallest view, 3x3."""
    run_dir = run_main(
        script, tmp_path, env_id="XLand-MiniGrid-MemoryS8", total_timesteps=256, eval_episodes=2
    )
    assert (run_dir / "summary.json").is_file() and list(tmp_path.glob("videos/*/*.gif"))
    args, params = script.load_run(run_dir)
    assert params["params"]["encoder"].keys() == {"conv0", "conv1"}
    monkeypatch.undo()
    with pytest.raises(script.UserError, match="is not a run of this script"):
        script.main(["--eval", str(run_dir)])


def test_first_use_while_jax_traces():
    """Arrays that xminigrid creates at its import are no tracers."""
    code = """
import sys
sys.path.insert(0, "benchmarks/environments")
import jax, xland_minigrid as adapter
args = adapter.Args(env_id="XLand-MiniGrid-MemoryS8")
reset = jax.jit(jax.vmap(lambda key: adapter.make_env(args).reset(key)))
jax.eval_shape(reset, jax.random.split(jax.random.key(0), 2))
reset(jax.random.split(jax.random.key(0), 3))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)


def test_arguments_are_parsed_before_jax_starts(task_file):
    """`jax.distributed.initialize` must run before JAX starts; xminigrid creates arrays."""
    words = ["--env-id", ROOM, "--benchmark-id", task_file]
    code = f"""
import sys
sys.path.insert(0, "benchmarks/environments")
import xland_minigrid as adapter
from jax._src import xla_bridge
adapter.ppo.Args, adapter.ppo.make_env = adapter.Args, adapter.make_env
args = adapter.ppo.parse_args({words})
assert not xla_bridge.backends_are_initialized()
adapter.make_env(args)
assert xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)


def test_usage_errors(task_file, tmp_path):
    """One line each, with similar names of xminigrid."""
    (tmp_path / "damaged").write_bytes(b"BZh9")
    for options, message in [
        (dict(env_id="XLand-MiniGrid-R1"), "--env-id XLand-MiniGrid-R1: not in .*R1-9x9"),
        (dict(env_id=ROOM), "needs --benchmark-id"),
        (dict(env_id=ROOM, ruleset_id=1), "--ruleset-id needs --benchmark-id"),
        (dict(env_id=ROOM, benchmark_id="nothing"), "--benchmark-id nothing: .*trivial-21k"),
        (dict(env_id=ROOM, benchmark_id=tmp_path / "damaged"), "damaged: neither"),
        (dict(env_id=ROOM, benchmark_id=task_file, ruleset_id=10), "--ruleset-id 10: .* 0 to 9"),
        (dict(env_id=ROOM, benchmark_id=task_file, img_obs=True), "--img-obs"),
        (dict(env_id="XLand-MiniGrid-Empty-5x5", benchmark_id=task_file), "has no rulesets"),
        (dict(env_id="Empty-5x5"), "--env-id MiniGrid-Empty-5x5-v0: not in xminigrid"),
    ]:
        with pytest.raises(script.UserError, match=message) as error:
            script.main(words_of(**options))
        assert "\n" not in str(error.value)


def test_a_file_of_the_generator(task_file, tmp_path, capsys):
    """It also has flags, no arrays; of a large one the first tasks are used, or --ruleset-id."""
    from xminigrid.benchmarks import load_bz2_pickle, save_bz2_pickle

    tasks = load_bz2_pickle(task_file)
    count = adapter.MAX_RULESETS + 5
    many = {name: np.resize(x, (count, *x.shape[1:])) for name, x in tasks.items()}
    many["goals"] = np.array(many["goals"])
    many["goals"][-1] = 7
    many["generation_config"] = {"chain_depth": 0, "random_seed": 42, "prune_prob": 0.0}
    save_bz2_pickle(many, str(tmp_path / "many"))
    part = adapter.load_rulesets(str(tmp_path / "many"), None)
    assert part.num_rulesets() == adapter.MAX_RULESETS
    assert "of the 10,005 rulesets of " in (out := capsys.readouterr().out)
    assert out.endswith(" the first 10,000 are used\n")
    equal(part.goals[:10], tasks["goals"])
    last = adapter.XLand(ROOM, str(tmp_path / "many"), adapter.MAX_RULESETS + 4)
    level = jax.jit(last.reset)(jax.random.key(0))
    assert (level.state.goal_encoding == 7).all()
