"""The programs of benchmarks/, each at its smallest size in a process of its own."""

import json
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import MODULES, QUICK, ROOT, environment, quick_args, scalars, words_of
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER = ROOT / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
SHORT = ["--rounds", "1", "--seconds", "0.1"]
ONCE = "--pairs 1 --compilations 1 --seconds 0.1".split()
SMALL = "num_envs=4 num_steps=8 num_minibatches=1 update_epochs=1".split()
SMALL_ATARI = [*SMALL, "num_envs=2", "num_steps=2"]  # emulators take a tenth of a second each
SMALL_MINIGRID = [*SMALL, "rnn_hidden_dim=8", "head_hidden_dim=8"]


def run(program, *words):
    """Runs a program with these words to its successful end; returns its standard output."""
    if program == "default_runs":
        pytest.importorskip("matplotlib")
    env = environment(1)
    command = [sys.executable, str(FOLDER / f"{program}.py"), *map(str, words)]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def measured(program, folder, *words):
    """The rows of a program's JSON file, by name."""
    out = folder / "out.json"
    run(program, *words, "--out", out)
    return {row["name"]: row for row in json.loads(out.read_text())["rows"]}


def needs_history(commit="HEAD"):
    """Skips where git does not know the scripts, say in an unpacked archive or shallow clone."""
    show = ["git", "show", f"{commit}:ppo_cartpole_jax.py"]
    if subprocess.run(show, cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("no history")


@pytest.mark.quick
def test_help():
    """Every program can be imported and describes itself; all in one process."""
    for package in ("minigrid", "matplotlib"):
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
    assert usages == [f"{program}.py" for program in PROGRAMS]


# --------------------------------------------------------------------------------------------------
# sps.py
# --------------------------------------------------------------------------------------------------


def test_sps_of_a_script(tmp_path):
    """Training is timed, and its products are a share of the machine's peak; others see below."""
    words = [*SHORT, "--only", "ppo_swingup_jax defaults", *SMALL]
    rows = measured("sps", tmp_path, *words)
    (row,) = rows.values()
    assert row["sps"] > 0 and row["compile_seconds"] > 0 and 0 < row["mfu"] < 1


def test_sps_scaling(tmp_path):
    """Sizes grow by factors of four up to the largest one."""
    words = "--scaling num-seeds --largest 4".split()
    rows = measured("sps", tmp_path, *SHORT, *words, *SMALL)
    assert list(rows) == ["ppo_cartpole_jax num_seeds=1", "ppo_cartpole_jax num_seeds=4"]
    flops = [row["product_flops_per_step"] for row in rows.values()]
    assert flops[0] == flops[1]


def test_sps_large(tmp_path):
    """The notebook's setting, made small."""
    rows = measured("sps", tmp_path, *SHORT, "--large", "--only", "rnn", *SMALL_MINIGRID)
    (row,) = rows.values()
    assert row["sps"] > 0 and 0 < row["mfu"] < 1


@pytest.mark.parametrize("flags", [[], ["--stack"]])
def test_sps_env_only(flags, tmp_path):
    """One of ours, the first time with those peers beside it that are installed."""
    only = "ppo_minigrid_rnn FourRooms" if flags else "FourRooms"
    words = [*SHORT, "--env-only", *flags, "--only", only, "num_envs=16"]
    rows = measured("sps", tmp_path, *words)
    assert rows["ppo_minigrid_rnn FourRooms"]["base_is_faster"] == 1


def test_sps_compare(tmp_path):
    """Peers that are not installed are left out. Products of the CartPole script, counted by hand:

    A rollout passes the actor once, the values pass the critic and a quarter more (one more step
    in eight, and one for truncations). An epoch passes both forwards and nearly twice backwards.
    """
    rows = measured("sps", tmp_path, *SHORT, "--compare", "--only", "ppo_", *SMALL)
    assert list(rows) == ["ppo_cartpole_jax"]
    flops = rows["ppo_cartpole_jax"]["product_flops_per_step"]
    actor, critic = (4 * 64 + 64 * 64 + 64 * outputs for outputs in (2, 1))
    first_layers = 2 * 4 * 64  # no gradient reaches the observations
    play = actor + critic * (1 + 2 / 8)
    learn = 3 * (actor + critic) - first_layers
    assert flops == 2 * (play + learn)


def test_sps_atari(tmp_path):
    """The parts of an Atari step; the first of them is all of it."""
    pytest.importorskip("envpool")
    rows = measured("sps", tmp_path, *SHORT, "--atari", *SMALL_ATARI)
    assert len(rows) == 6 and all(row["sps"] > 0 for row in rows.values())
    row = rows["ppo_atari_envpool_xla_jax defaults"]
    assert row["compile_seconds"] > 0 and 0 < row["mfu"] < 1


# --------------------------------------------------------------------------------------------------
# The others
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_minigrid_rnn", "ppo_atari_envpool_xla_jax"])
def test_profile(name):
    """The operations of an update, the longest first."""
    if "atari" in name:
        pytest.importorskip("envpool")
    fields = SMALL_MINIGRID if "minigrid" in name else SMALL
    title, header, *lines = run("profile_update", name, *fields, "--top", "3").splitlines()
    assert "ms per update of 32 steps" in title and "operation" in header
    durations = [float(line.split()[0]) for line in lines]
    assert len(durations) == 3 and durations == sorted(durations, reverse=True)


@pytest.mark.parametrize("row", ["cartpole_jax compared", "atari"])
def test_versions(row, tmp_path):
    """A script beside itself as it was committed last."""
    needs_history()
    if row == "atari":
        pytest.importorskip("envpool")
    small = SMALL_ATARI if row == "atari" else SMALL
    words = ["--against", "HEAD", "--only", row, *ONCE, *small]
    (row,) = measured("versions", tmp_path, *words).values()
    assert row["sps"] > 0 and row["sps_before"] > 0 and len(row["rounds"]) == 1


def test_versions_of_environments(tmp_path):
    """An environment beside that of the commit which figures are compared with."""
    needs_history("96b6b48")
    words = ["--against", "96b6b48", "--env-only", "--only", "Empty", "num_envs=4"]
    rows = measured("versions", tmp_path, *words, *ONCE)
    (row,) = rows.values()
    assert row["setting"] == "Empty-8x8 alone" and row["sps"] > 0 and row["sps_before"] > 0


def test_changes(tmp_path):
    """Of README's changes the one of a network, beside the script, in the same rounds."""
    rows = measured("changes", tmp_path, *SHORT, "--only", "flax", *SMALL)
    assert list(rows) == ["the script as it is", "flax module"]
    assert rows["the script as it is"]["ratio"] == 1
    assert all(row["sps"] > 0 for row in rows.values())


@pytest.mark.quick
def test_code_lines():
    """A line for each script and version."""
    assert len(run("code_lines").splitlines()) == len(QUICK)
    needs_history()
    assert len(run("code_lines", "--against", "HEAD").splitlines()) == 2 * len(QUICK)


def test_default_runs(tmp_path):
    """Two seeds of a quick run: their evaluations, the curve and its picture."""
    quick = words_of(**QUICK["ppo_swingup_jax"])
    words = ["ppo_swingup_jax", "--seeds", "2", "--cache", "--out", tmp_path / "out", "--", *quick]
    run("default_runs", *words)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [row["seed"] for row in result["runs"]] == [1, 2]
    assert set(result["runs"][0]["success_rate"]) == {"random", "hanging"}
    assert len(result["curve"]["steps"]) == len(result["curve"]["mean_return"]) > 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_minigrid_learning(tmp_path):
    """Success in both programs' environments after a very short training in trials."""
    pytest.importorskip("minigrid")
    num_episodes = 2  # of a trial
    small = dict(episodes_per_trial=num_episodes)
    small |= dict(num_envs=8, num_steps=16, num_minibatches=2, rnn_hidden_dim=8, head_hidden_dim=8)
    words = ["Empty-8x8", "--cut", "--img-obs", "--total-timesteps", "128", "--episodes", "6"]
    words += ["--eval-mode", "sampled", "--folder", tmp_path, "--out", tmp_path / "out.json"]
    run("minigrid_learning", *words, "--", *words_of(**small))
    (result,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert result["total_timesteps"] == 128 and result["eval_episodes"] == 6
    assert result["args"]["env_id"] == "MiniGrid-Empty-8x8-v0"
    for name in ("success_rate", "farama_success_rate"):
        successes = result[name] * 6 * num_episodes
        assert successes == pytest.approx(round(successes))
        by_episode = result[name.replace("success", "trial_success") + "s"]
        assert np.mean(by_episode) == pytest.approx(result[name])
        assert len(by_episode) == num_episodes


def test_minigrid_ids():
    """The table of all ids says what the tests compare and what was learned."""
    pytest.importorskip("minigrid")
    pytest.importorskip("envpool")
    command = [sys.executable, "-c", "import minigrid_ids as m; print(m.make_table(), end='')"]
    env = environment(1) | {"PYTHONPATH": str(ROOT / "benchmarks")}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == (ROOT / "benchmarks" / "minigrid_ids.md").read_text()


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


def test_atari_learning(tmp_path):
    """Random play and a very short training on the same emulators."""
    pytest.importorskip("envpool")
    quick = QUICK["ppo_atari_envpool_xla_jax"] | {"total_timesteps": 128}
    del quick["eval_episodes"]
    words = ["--episodes", "2", "--folder", tmp_path / "runs", "--out", tmp_path / "out.json"]
    run("atari_learning", *words, "--", *words_of(**quick))
    result = json.loads((tmp_path / "out.json").read_text())["Breakout-v5"]
    (trained,) = result["runs"]
    assert trained["total_timesteps"] == 128 and trained["eval_protocol"] == "training"
    assert result["random_return_mean"] >= 0 and trained["curve"]
    score = (trained["eval_return_mean"] - 1.7) / (30.5 - 1.7)  # published: random play, human
    assert trained["human_normalized_score"] == pytest.approx(score)


def test_atari_protocols(tmp_path):
    """A checkpoint under both protocols; with games of at most 20 steps both are the same."""
    pytest.importorskip("envpool")
    script = next(module for module in MODULES if hasattr(module, "make_pool"))
    args = quick_args(script)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    script.write_json(tmp_path / "run" / "args.json", vars(args))
    state = jax.eval_shape(lambda: script.flatten_state(script.init_states(args)))
    zeros = {name: np.zeros(x.shape, x.dtype) for name, x in state.items()}
    np.savez(tmp_path / "run" / "checkpoints" / "000000000.npz", **zeros)
    words = [tmp_path / "run", "--episodes", "3", "--modes", "sampled", "--out"]
    run("atari_protocols", *words, tmp_path / "out.json")
    (result,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert result["env_id"] == args.env_id and result["timesteps"] == 0
    rows = result["rows"]
    assert list(rows) == ["sampled training", "sampled whole-games", "sampled difference"]
    for row in list(rows.values())[:2]:
        assert row["truncated_games"] == 3 and row["lengths"] == [20] * 3
    assert rows["sampled difference"]["return"] == 0


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
    """A run whose first process was killed half an hour after its last checkpoint, after step 20.

    TensorBoard's reader leaves out the same points.
    """
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    folder.mkdir()
    args = {"env_id": "Pong-v5", "seed": 3, "num_seeds": 1, "total_timesteps": 40}
    (folder / "args.json").write_text(json.dumps(args))
    summary = {"status": "finished", "eval_return_mean": -3.05, "eval_mode": "sampled"}
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


def test_atari_resets(tmp_path):
    """With long no-ops some games end within them; lives and frames tell the same of each."""
    pytest.importorskip("envpool")
    words = ["Atlantis-v5", "--envs", "2", "--steps", "150", "--noop-max", "1500", "--out"]
    run("atari_resets", *words, tmp_path / "out.json")
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"].values()
    assert row["merged_by_lives"] == row["merged_by_frames"] > 0


CLEANRL_LIKE = """
import sys
import envpool
import gym
assert "--num-envs 2" in " ".join(sys.argv) and "Breakout-v5" in sys.argv
envs = envpool.make("Breakout-v5", env_type="gym", num_envs=2, episodic_life=True, seed=1)
envs.num_envs, envs.single_action_space = 2, envs.action_space
assert isinstance(envs.single_action_space, gym.spaces.Discrete)
"""
LIKE_ENVPOOL = """
import numpy as np
envs = gym.Wrapper(envs)
assert envs.reset().shape == (2, 4, 84, 84)
for _ in range(9):
    obs, reward, done, info = envs.step(np.ones(2, int))
    assert obs.shape == (2, 4, 84, 84) and done.dtype == info["TimeLimit.truncated"].dtype == bool
    print("SPS: 7")
"""
LIKE_SCAN = """
import flax
import jax
import jax.numpy as jnp
from flax.training.train_state import TrainState
import optax

@flax.struct.dataclass
class Params:
    x: jnp.ndarray

state = TrainState.create(apply_fn=None, params=Params(jnp.ones(3)), tx=optax.sgd(1.0))
assert state.apply_gradients(grads=jax.tree_map(jnp.ones_like, state.params)).params.x.sum() == 0
handle, _, _, step = envs.xla()
def once(handle, _):
    handle, (obs, reward, done, info) = step(handle, jnp.ones(2, jnp.int32))
    return handle, reward * (1 - info["TimeLimit.truncated"]) * (1 - done)
assert envs.reset().shape == (2, 4, 84, 84)
_, rewards = jax.lax.scan(once, handle, length=5)
assert rewards.shape == (5, 2)
for _ in range(9):
    print("SPS: 7", flush=True)
import time; time.sleep(60)  # until it is ended
"""


def test_atari_styles(tmp_path):
    """Programs that use their libraries as CleanRL's do, where neither that nor PyTorch is."""
    pytest.importorskip("envpool")
    (tmp_path / "cleanrl").mkdir()
    scripts = {
        "ppo_atari_envpool.py": CLEANRL_LIKE + LIKE_ENVPOOL,
        "ppo_atari_envpool_xla_jax_scan.py": CLEANRL_LIKE + LIKE_SCAN,
    }
    for name, text in scripts.items():
        (tmp_path / "cleanrl" / name).write_text(text)
    small = "--num-envs 2 --num-steps 4 --updates 1 --warmup 1 --rounds 1 --only".split()
    words = ["--cleanrl", tmp_path, "--python", sys.executable, *small, *scripts]
    table = run("atari_styles", *words, "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert list(rows) == list(scripts)
    for name, row in rows.items():
        assert row["sps"] > 0 and row["peak_memory_mb"] > 50 and f"| `{name}` |" in table
    theirs = rows["ppo_atari_envpool.py"]
    assert theirs["code_lines"] == 14 and theirs["packages"] == ["envpool", "gym", "numpy"]


# --------------------------------------------------------------------------------------------------
# gpu.py
# --------------------------------------------------------------------------------------------------


def test_gpu_program(tmp_path):
    """Stages of a small run on a CPU; a process that crashes in one of them costs that alone.

    Beside what JAX has here it needs PureJaxRL and gymnax: these abort the process.
    """
    (tmp_path / "gymnax").mkdir()
    (tmp_path / "gymnax" / "__init__.py").write_text("")
    (tmp_path / "purejaxrl").mkdir()
    (tmp_path / "purejaxrl" / "ppo.py").write_text("import os\nos.abort()\n")
    out = tmp_path / "out.json"
    words = [
        "--small",
        "--minutes",
        "60",
        "--out",
        str(out),
        "--purejaxrl",
        str(tmp_path),
        "--only",
    ]
    words += ["ppo_cartpole_jax like", "without the flag", "speed CartPole 4,096"]
    words += ["learning CartPole 4,096", "graphs CartPole 4,096 x 128, off", "purejaxrl"]
    env = environment(1) | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(FOLDER / "gpu.py"), *words]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(out.read_text())
    assert content["small"] and content["commands"][0]["status"] == "finished"

    stages = content["stages"]
    (crash,) = stages.pop("purejaxrl").values()
    assert "ended with status -6" in crash["error"] and any("Abort" in x for x in crash["log"])
    assert list(stages) == "device correctness speed learning graphs resume".split()
    rows = {stage: list(measured.values())[-1] for stage, measured in stages.items()}
    assert all(not {"error", "missing", "skipped"} & set(row) for row in rows.values()), rows
    assert "jax" in rows["device"]["versions"]
    correctness = rows["correctness"]
    assert correctness["passed"] and len(correctness["params_differ"]) == 3
    largest = max(correctness["params_differ"][0], correctness["metrics_differ"][0])
    assert max(correctness["furthest"].values()) == largest
    assert rows["resume"]["passed"] and rows["resume"]["arrays"] > 10
    speed = rows["speed"]
    assert speed["sps"] > 0 and speed["fields"]["num_envs"] == 8
    assert speed["ms_per_update"] == pytest.approx(64e3 / speed["sps"])
    assert speed["estimated_ms_h100"]["accelerators_before"] > 0
    assert not rows["learning"]["solved"] and rows["learning"]["points"][-1][0] == 512
    assert rows["graphs"]["off"]["sps"] > 0 and rows["graphs"]["as it is"]["faster_by"] == 1


def test_gpu_program_interrupted(tmp_path):
    """Ctrl-C keeps what was measured; a later command adds to the file."""
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--small", "--out", str(out), "--only"]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers may ignore it
    process = subprocess.Popen([*command, "launches", "correctness"], env=environment(1))
    signal.signal(signal.SIGINT, previous)
    rows = {}
    while "launches" not in rows and process.poll() is None:
        time.sleep(0.2)
        if out.exists():
            rows = json.loads(out.read_text())["stages"].get("device", {})
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    content = json.loads(out.read_text())
    assert content["commands"][-1]["status"] == "interrupted"
    assert content["stages"]["device"]["launches"]["straight"]["us_of_eight"] > 0

    # Nothing runs without time, and nothing that is there is lost.
    subprocess.run([*command, "purejaxrl", "--minutes", "0"], env=environment(1), check=True)
    stages = json.loads(out.read_text())["stages"]
    assert stages["device"]["launches"]["straight"]["us_of_eight"] > 0
    assert stages["purejaxrl"]["ppo_cartpole_jax"] == {"skipped": "no time was left", "command": 1}


def test_gpu_program_after_errors_of_the_device(tmp_path):
    """The error is that of its own measurement; it takes no place of an earlier success."""
    (tmp_path / "gymnax").mkdir()
    (tmp_path / "gymnax" / "__init__.py").write_text("")
    (tmp_path / "purejaxrl").mkdir()
    lost = "import jax\nraise jax.errors.JaxRuntimeError('the device is lost')\n"
    (tmp_path / "purejaxrl" / "ppo.py").write_text(lost)
    out = tmp_path / "out.json"
    success = {"ours_sps": 1.0, "command": 0}
    before = {"small": True, "commands": [{}], "stages": {"purejaxrl": {}}}
    command = [sys.executable, str(FOLDER / "gpu.py"), "--small", "--out", str(out)]
    command += ["--purejaxrl", str(tmp_path), "--only", "purejaxrl"]
    env = environment(1) | {"PYTHONPATH": str(tmp_path)}
    for expected in ({}, success):
        before["stages"]["purejaxrl"] = {"ppo_cartpole_jax": expected} if expected else {}
        out.write_text(json.dumps(before))
        subprocess.run(command, env=env, check=True)
        row = json.loads(out.read_text())["stages"]["purejaxrl"]["ppo_cartpole_jax"]
        if expected:
            (failure,) = row.pop("failed_later")
            assert row == success
        else:
            failure = row
        assert "the device is lost" in failure["error"]


def test_kernels_of_a_trace():
    """Of a GPU's trace the streams count, not the lines that repeat them, nor the host."""
    code = """
from profile_update import kernel_events

def line(process, thread, name):
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}

def event(process, thread, name):
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "dur": 1.0}

def process(number, name):
    return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}

host = [process(1, "/host:CPU"), line(1, 1, "Stream of thoughts"), event(1, 1, "launch")]
python = [event(1, 2, "$file.py:1 f")]
gpu = [line(2, 1, "Stream #13(Compute)"), event(2, 1, "fusion_1"), process(2, "/device:GPU:0")]
gpu += [line(2, 2, "XLA Ops"), event(2, 2, "fusion.1")]
assert [event["name"] for event in kernel_events(host + python + gpu)] == ["fusion_1"]
assert [event["name"] for event in kernel_events(host + python)] == ["launch"]
try:
    kernel_events(host + python, needs_streams=True)
except RuntimeError:
    pass
else:
    raise AssertionError("a GPU's trace without its streams")
"""
    command = [sys.executable, "-c", code]
    env = environment(1) | {"PYTHONPATH": str(FOLDER)}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
