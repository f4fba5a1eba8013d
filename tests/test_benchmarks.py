"""The programs of benchmarks/, each at its smallest size in a process of its own."""

import functools
import importlib
import importlib.util
import json
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import tyro
from conftest import QUICK, ROOT, arrays_of, environment, json_of, scalars, words_of
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER = ROOT / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))


def run(program, *words):
    """Runs a program with these words to its end; returns its standard output."""
    command = [sys.executable, str(FOLDER / f"{program}.py"), *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, env=environment(1), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.quick
def test_help():
    """Every program can be imported and describes itself; all in one process."""
    for package in ("minigrid", "matplotlib", "envpool"):
        pytest.importorskip(package)
    code = """
import runpy, sys
folder, *programs = sys.argv[1:]
sys.path.insert(0, folder)
for program in programs:
    sys.argv = [f"{program}.py", "--help"]
    try:
        runpy.run_path(f"{folder}/{program}.py", run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
"""
    command = [sys.executable, "-c", code, str(FOLDER), *PROGRAMS]
    result = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    usages = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("usage:")]
    assert [usage.split("/")[-1] for usage in usages] == [f"{name}.py" for name in PROGRAMS]


# --- Speed ---


def test_sps(tmp_path):
    """A script's sizes grow by factors of four up to the largest one."""
    sizes = "num_envs=4 num_steps=8 num_minibatches=1 update_epochs=1".split()
    words = "--rounds 1 --seconds 0.1 --scaling num-seeds --largest 4".split()
    run("sps", *words, *sizes, "--out", tmp_path / "out.json")
    rows = json_of(tmp_path, "out")["rows"]
    names = [row["name"] for row in rows]
    assert names == ["ppo_cartpole_jax num_seeds=1", "ppo_cartpole_jax num_seeds=4"]
    assert all(row["sps"] > 0 and row["compile_seconds"] > 0 for row in rows)


def test_gpu_program(tmp_path):
    """On a CPU, without tyro, what can be short; a later failure takes no result's place."""
    out = tmp_path / "out.json"
    (tmp_path / "tyro.py").write_text("raise ImportError")
    env = environment(1) | {"PYTHONPATH": str(tmp_path)}
    program = [sys.executable, str(FOLDER / "gpu.py"), "--out", str(out)]
    unroll = "unroll ppo_cartpole_jax 1, GAE 1"  # as a script has it on a CPU
    start, solve = "start CartPole", "solve CartPole-v1 ours"
    stages = ["correctness ppo_cartpole", "learning swing-up 1", unroll, start, solve]
    stages += ["solve CartPole-v1 purejaxrl", "environments brax"]
    command = [*program, "--smoke", "--only", *stages]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert "jax" in rows["device"]["versions"] and len(rows) == 8
    correctness = rows["correctness ppo_cartpole_jax"]
    assert correctness["passed"] and len(correctness["params_differ"]) == 3
    assert rows["learning swing-up 1,024"]["points"][-1][0] == 128
    assert rows[unroll]["sps"] > 0 and rows[unroll]["kernels"] > 0
    assert min(rows[start]["seconds"][kind] for kind in ("cold", "cached")) > 0
    for kind in ("cold", "cached"):
        assert rows[start]["points"][kind]["kernels_update"] == rows[unroll]["kernels"]
        assert rows[solve][kind]["steps"] == 128 and not rows[solve][kind]["solved"]
    assert "skipped" in rows["solve CartPole-v1 purejaxrl"]
    if importlib.util.find_spec("brax") is None:
        assert rows["environments brax_physics"]["skipped"] == "brax is not installed"
    subprocess.run([*command, "--minutes", "0"], env=env, check=True)
    later = json.loads(out.read_text())["rows"]
    assert all(later[name] == row or "skipped" in row for name, row in rows.items())
    assert subprocess.run(program, env=env, capture_output=True).returncode == 3  # no GPU


@pytest.mark.quick
def test_trainings_on_a_gpu_end(monkeypatch):
    """Each of gpu.py has a length of its own, not the one of measurements of speed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    gpu = importlib.import_module("gpu")

    def prepare(script, **flags):  # without the environments
        raise StopIteration(script.Args(**{"total_timesteps": 1e12} | flags))

    monkeypatch.setattr(gpu.sps, "prepare", prepare)
    for name, flags, aim in gpu.LEARNING.values():
        with pytest.raises(StopIteration) as prepared:
            gpu.learning(types.SimpleNamespace(smoke=False), name, flags, aim)
        args = prepared.value.value
        assert 10 <= args.num_updates <= 10_000 and args.total_timesteps <= 20e6


def test_environment_on_a_gpu(monkeypatch):
    """A row of gpu.py's `environments`, which of a program that fails says how."""
    pytest.importorskip("gymnax")
    monkeypatch.syspath_prepend(str(FOLDER))
    gpu = importlib.import_module("gpu")
    choice = types.SimpleNamespace(smoke=True, stage_end=time.time() + 300)
    row = gpu.environment_row(choice, "gymnax_minatar", "gymnax", {})
    assert row["sps"] > 0 and row["total_timesteps"] == 128 and row["eval_return_mean"] >= 0
    with pytest.raises(RuntimeError, match="No such file"):
        gpu.environment_row(choice, "tetris", "gymnax", {})


@pytest.mark.quick
@pytest.mark.parametrize("name", QUICK)
def test_flags_without_tyro(name, monkeypatch):
    """What stands in for tyro reads the flags of benchmarks and tests as tyro does."""
    if "atari" in name:
        pytest.importorskip("envpool")
    path = FOLDER / "without_tyro" / "tyro.py"
    spec = importlib.util.spec_from_file_location("without_tyro", path)
    without_tyro = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without_tyro)
    kind = importlib.import_module(name).Args
    words = [*words_of(**QUICK[name]), "--no-anneal-lr", "--norm-adv", "--learning-rate", "1e-3"]
    words += ["--target-kl=0.1", "--runs-dir", "/tmp/a=b", "--clip-coef=1", "--seed", "3"]
    saved = kind(seed=7, gamma=0.5, anneal_lr=False)
    resumed = ["--eval-mode", "sampled", "--anneal-lr", "--resume", "runs/x-y"]
    for flags in ([], words, resumed):
        for default in (None, saved):
            expected = tyro.cli(kind, args=flags, default=default or kind())
            assert repr(without_tyro.cli(kind, flags, default)) == repr(expected)
    monkeypatch.setattr(sys, "argv", ["x.py", "--seed", "4"])
    assert without_tyro.cli(kind) == kind(seed=4)


def test_compare(tmp_path):
    """A pair of short runs of a script and of the last commit's: medians and ratios."""
    if subprocess.run(["git", "show", "HEAD"], cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("no history")  # an unpacked archive
    out = tmp_path / "out.json"
    words = ["--against", "HEAD", "--script", "ppo_cartpole_jax", "--pairs", 1, "--out", out]
    run("compare", *words, "--", *words_of(**QUICK["ppo_cartpole_jax"]))
    (row,) = json.loads(out.read_text())["rows"].values()
    for name in ("sps", "start_seconds", "process_seconds"):
        ours, theirs = row["medians"][name].values()
        assert row["ratios"][name] == pytest.approx(ours / theirs)
    ours, theirs = (row["pairs"][0][side] for side in ("ours", "theirs"))
    assert ours["total_timesteps"] == theirs["total_timesteps"] == 2560


# --- Learning ---


def test_default_runs(tmp_path):
    """Two seeds of a quick run: their evaluations, the curve and its picture."""
    pytest.importorskip("matplotlib")
    quick = words_of(**QUICK["ppo_swingup_jax"])
    words = ["ppo_swingup_jax", "--seeds", 2, "--cache", "--out", tmp_path / "out"]
    run("default_runs", *words, "--", *quick)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["seed"] for row in result["runs"]] == [1, 2]
    assert {"eval_success_rate_random", "eval_success_rate_hanging"} < set(result["runs"][0])
    assert len(result["curve"]["steps"]) == len(result["curve"]["mean_return"]) > 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_minigrid_learning(tmp_path):
    """Success in both programs' environments after a very short training in trials."""
    pytest.importorskip("minigrid")
    num_episodes = 2  # of a trial
    small = dict(episodes_per_trial=num_episodes)
    small |= dict(num_envs=8, num_steps=16, num_minibatches=2, rnn_hidden_dim=8, head_hidden_dim=8)
    words = ["Empty-8x8", "--cut", "--total-timesteps", "128", "--episodes", "6"]
    words += ["--eval-mode", "sampled", "--folder", tmp_path, "--out", tmp_path / "out.json"]
    run("minigrid_learning", *words, "--", *words_of(**small))
    (result,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert result["total_timesteps"] == 128 and result["eval_episodes"] == 6
    assert result["args"]["env_id"] == "MiniGrid-Empty-8x8-v0"
    for name in ("trial_success_rates", "farama_trial_success_rates"):
        successes = np.array(result[name]) * 6
        assert successes.shape == (num_episodes,)
        assert successes == pytest.approx(successes.round())


def test_minigrid_ids(tmp_path):
    """The first set of flags stands in the results and was not enough; the table has the better."""
    pytest.importorskip("minigrid")
    env_id, out, page = "Fetch-5x5-N2-v0", tmp_path / "out.json", tmp_path / "page.md"
    page.write_text((FOLDER / "minigrid_ids.md").read_text())
    first = {"success_rate": -1.0, "train_seconds": 60.0}
    steps = " in 16,384 steps"
    out.write_text(json.dumps({env_id: {"mission" + steps: first}}))
    words = [env_id, "--total-timesteps", 16384, "--episodes", 8, "--folder", tmp_path]
    words += ["--out", out, "--page", page]
    run("minigrid_ids", *words, "--flags", "mission")  # which stand there already
    assert json.loads(out.read_text()) == {env_id: {"mission" + steps: first}}
    run("minigrid_ids", *words)
    rows = json.loads(out.read_text())[env_id]
    assert list(rows) == ["mission" + steps, "long mission" + steps]
    assert rows["mission" + steps] == first
    table = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert len(table) == 2 + 76 and len({line.count("|") for line in table}) == 1
    (line,) = (line for line in table if f"| {env_id} |" in line)
    success = rows["long mission" + steps]["success_rate"]
    assert f"| long mission, best of 2 | 16,384 | - | {success:.3f} |" in line


def test_minigrid_ids_begins_with_weights(tmp_path, monkeypatch):
    """Those of a run in another id are the agent's; the row is called so."""
    pytest.importorskip("minigrid")
    monkeypatch.syspath_prepend(str(FOLDER))
    program = importlib.import_module("minigrid_ids")
    script = program.script
    monkeypatch.setattr(script, "init_agent", script.init_agent)  # is put back
    args = script.Args(env_id="MiniGrid-Empty-5x5-v0", num_envs=16, rnn_hidden_dim=8)
    run_dir, began = tmp_path / "run", []
    run_dir.mkdir()
    script.save_checkpoint(run_dir, jax.jit(functools.partial(script.init_states, args))())
    script.write_json(run_dir / "args.json", vars(args))

    def trained(env_id, options, choice):
        args = script.Args(env_id=env_id, rnn_hidden_dim=8)
        began.append(script.init_agent(args, jax.random.key(5), script.make_env(args)))
        row = dict(args={}, total_timesteps=1, train_seconds=1.0, device="cpu", success_rate=1.0)
        return row | {"farama_success_rate": 1.0, "steps_to_0.9": None}

    monkeypatch.setattr(program.minigrid_learning, "run", trained)
    page = tmp_path / "page.md"
    page.write_text(program.PAGE.read_text())
    words = ["DoorKey-5x5-v0", "--weights", run_dir, "--out", tmp_path / "out.json", "--page", page]
    monkeypatch.setattr(sys, "argv", ["minigrid_ids.py", *map(str, words)])
    program.main()
    saved = {name: x for name, x in arrays_of(run_dir).items() if name.startswith("params/")}
    (params,) = began
    leaves = script.named_arrays({"params": params})
    assert leaves.keys() == saved.keys()
    for name, (x,) in saved.items():
        np.testing.assert_array_equal(leaves[name], x)
    assert "| DoorKey-5x5-v0 | default after Empty-5x5-v0 | 1 |" in page.read_text()


def test_cut_recurrence():
    """The agent's outputs depend on what it sees now only: not on its state, nor on the past."""
    pytest.importorskip("minigrid")
    code = """
import sys
import jax, jax.numpy as jnp
sys.path.insert(0, "benchmarks")
import minigrid_learning
from minigrid_learning import script

def outputs():
    args = script.Args(rnn_hidden_dim=8)
    state = jax.jit(lambda key: script.init_train_state(args, key))(jax.random.key(0))
    env = script.make_env(args)
    inputs = script.make_inputs(env, state.env_state, state.agent_state)
    inputs = inputs._replace(start=jnp.zeros(args.num_envs, bool))
    state_of = lambda x: jnp.full((args.num_envs, 1, 8), x)
    once = lambda x: script.forward_step(args, state.params, inputs, state_of(x))[1]
    return once(0.0), once(0.5)

zero, half = outputs()
assert (zero != half).any()
minigrid_learning.cut_recurrence()
cut_zero, cut_half = outputs()
assert (cut_zero == cut_half).all()
assert jnp.allclose(cut_zero, zero)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=environment(1), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def write_events(path, first_step, start, values, tag="charts/episodic_return"):
    """An event file of one process: it begins after a step, and logs {step: (seconds, value)}."""
    events = [event_pb2.Event(wall_time=start, file_version="brain.Event:2")]
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    events.append(event_pb2.Event(wall_time=start, step=first_step + 1, session_log=session))
    for step, (seconds, value) in values.items():
        summary = {"value": [{"tag": tag, "simple_value": value}]}
        events.append(event_pb2.Event(wall_time=start + seconds, step=step, summary=summary))
    writer = RecordWriter(open(path, "wb"))
    for event in events:
        writer.write(event.SerializeToString())
    writer.close()


def test_atari_curves(tmp_path):
    """A run killed half an hour after its last checkpoint: the points of TensorBoard's reader."""
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    folder.mkdir()
    args = {"env_id": "Pong-v5", "seed": 3, "num_seeds": 1, "total_timesteps": 40, "hide": []}
    (folder / "args.json").write_text(json.dumps(args))
    summary = {"eval_return_mean": -3.05, "eval_mode": "sampled"}
    (folder / "summary.json").write_text(json.dumps(summary))
    first = {10: (1800, -21.0), 20: (3600, -20.0), 30: (5400, -19.0)}
    write_events(folder / "events.out.tfevents.1000.a", 0, 1e9, first)
    write_events(folder / "events.out.tfevents.2000.a", 20, 2e9, {30: (1800, 7.0), 40: (3600, 8.0)})
    run("atari_curves", folder, "--out", tmp_path / "out")
    (result,) = json.loads((tmp_path / "out.json").read_text())["runs"].values()
    curve = result["curves"]["3"]
    assert curve == [[10, 0.5, -21.0], [20, 1.0, -20.0], [30, 2.0, 7.0], [40, 2.5, 8.0]]
    expected = scalars(folder)["charts/episodic_return"]
    assert [(step, value) for step, _, value in curve] == expected
    assert result["resumed"] == 1 and result["hours"] == 2.5 and result["timesteps"] == 40
    assert result["human_normalized_score"] == pytest.approx(0.5)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_time_to_solve(tmp_path):
    """CartPole by our script; the rows of another task stay, those of this one do not."""
    pytest.importorskip("matplotlib")
    out, conditions = tmp_path / "out.json", {"Pendulum-v1": {"date": "1"}, "CartPole-v1": {}}
    other, own = ({"task": task, "name": "x", "curve": [[1, 2, 3]]} for task in conditions)
    medians = {f"{task}, x": {} for task in conditions}
    earlier = {"conditions": conditions, "rows": [other, own], "medians": medians}
    out.write_text(json.dumps(earlier))
    run("time_to_solve", "--tasks", "CartPole-v1", "--only", "ours", "--seeds", 1, "--out", out)
    result = json.loads(out.read_text())
    kept, row = result["rows"]
    assert kept == other and result["conditions"]["Pendulum-v1"] == {"date": "1"}
    assert list(result["medians"]) == ["Pendulum-v1, x", "CartPole-v1, ours"]
    assert row["solved"] and row["curve"][-1][2] >= 475 and row["curve"][-1][1] == row["steps"]
    assert 0 < row["first_seconds"] < row["seconds"] and row["steps"] <= 500_000
    assert result["medians"]["CartPole-v1, ours"]["solved"] == "1 of 1"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_time_to_solve_reads_what_others_print(tmp_path):
    """The mean of the last 64 episodes counts, once there are as many."""
    program = """
cleanrl = "global_step={0}, episodic_return=[{0}.]"
purejaxrl = "global step={0}, episodic return={0}.0"
for i in range(100):
    print((cleanrl if i % 2 else purejaxrl).format(i))
"""
    sys.path.insert(0, str(FOLDER))
    import time_to_solve

    row = time_to_solve.clocked([sys.executable, "-c", program], tmp_path, 50, 60, None)
    # 64 returns that end with n have the mean n - 31.5.
    assert row["solved"] and row["steps"] == 82 and row["curve"][0][1:] == [63, 31.5]
    row = time_to_solve.clocked([sys.executable, "-c", program], tmp_path, 500, 60, None)
    assert not row["solved"] and row["steps"] == 99
    means = "for i in range(9): print(f'{i},000 steps (3%), 5 s left, 7 SPS, return {i}')"
    row = time_to_solve.clocked([sys.executable, "-c", means], tmp_path, 6, 60, None, lines=4)
    assert row["solved"] and row["steps"] == 8000 and row["curve"][0][1:] == [3000, 1.5]
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]  # is stopped at the limit
    row = time_to_solve.clocked(silent, tmp_path, 1, 0.5, None)
    assert not row["solved"] and 0.5 <= row["seconds"] < 30 and row["curve"] == []
