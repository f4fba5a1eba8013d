"""The command line: flags, errors, damaged and foreign files, NaN; and the files of a run."""

import concurrent.futures
import dataclasses
import errno
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import signal
import struct
import sys
import time
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    QUICK,
    contents,
    each_text,
    edited_copy,
    having,
    newest_checkpoint,
    once,
    quick_args,
    quick_words,
    run_main,
    run_of,
    scalars,
    start,
    words_of,
)

SUMMARY_KEYS = set(
    """script env_id seed num_seeds num_envs num_steps total_timesteps sps compile_seconds
    train_seconds wall_seconds eval_episodes eval_mode eval_return_mean eval_return_std
    eval_length_mean per_seed backend device_kind num_devices jax_version status args""".split()
)
TAGS = set(
    """charts/episodic_return charts/episodic_length charts/learning_rate charts/SPS
    losses/policy_loss losses/value_loss losses/entropy losses/approx_kl losses/old_approx_kl
    losses/clipfrac losses/explained_variance losses/grad_norm eval/episodic_return""".split()
)


def refusal(error, function, *args, **options):
    """The message of the error that a call raises; it is one line, as users will see it."""
    with pytest.raises(error) as info:
        function(*args, **options)
    assert type(info.value) is error and len(str(info.value).splitlines()) == 1
    return str(info.value)


def edit_saved_args(run_dir, **changes):
    """Changes flags in a run's args.json; returns those it had."""
    saved = json.loads((run_dir / "args.json").read_text())
    (run_dir / "args.json").write_text(json.dumps(saved | changes))
    return saved


# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    "flag, value",
    [
        ("num_envs", 0),
        ("num_steps", -1),
        ("num_minibatches", 7),
        ("num_minibatches", 0),
        ("update_epochs", 0),
        ("total_timesteps", 1),
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("gamma", 1.5),
        ("gae_lambda", -0.1),
        ("clip_coef", -0.2),
        ("ent_coef", -0.1),
        ("vf_coef", float("nan")),
        ("max_grad_norm", 0.0),
        ("target_kl", -1.0),
        ("adam_eps", 0.0),
        ("num_seeds", 0),
        ("num_devices", 3),
        ("num_devices", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("log_interval", 0),
        ("checkpoint_interval", 0),
        ("video_interval", 0),
        ("eval_interval", -1),
        ("eval_episodes", 0),
        ("exp_name", "../../x"),
        ("exp_name", ""),
    ],
)
def test_bad_flags_are_refused(script, flag, value):
    """`Args` takes anything; `check_args` and the command line name the flag."""
    name = f"--{flag.replace('_', '-')}"
    assert name in refusal(
        script.UsageError, script.check_args, quick_args(script, **{flag: value})
    )
    words = words_of(**QUICK[script.__name__] | {flag: value})
    assert name in refusal(script.UsageError, script.parse_args, words)
    assert name in refusal(script.UsageError, script.main, words)


@pytest.mark.quick
@pytest.mark.parametrize("words", [["--num-envs", "many"], ["--no-such-flag"], ["--seed=1.5"]])
def test_words_that_are_no_flags(script, words, capsys):
    """Wrong usage as tyro reports it: exit status 2, no traceback."""
    with pytest.raises(SystemExit) as exit:
        script.main(words)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and words[0].partition("=")[0] in error
    assert "Traceback" not in error


@pytest.mark.quick
def test_help_names_every_flag(script, capsys):
    """And exits with status 0."""
    with pytest.raises(SystemExit) as exit:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    for field in dataclasses.fields(script.Args):
        assert f"--{field.name.replace('_', '-')}" in text


@pytest.mark.quick
def test_notations_of_counts(script):
    """Whole numbers in decimal notation, exactly."""
    notations = {"1e6": 10**6, "25e5": 2500000, "2.5e6": 2500000, "500000": 500000}
    notations |= {"500_000": 500000, str(2**53 - 1): 2**53 - 1, "2.5e7": 25000000}
    for text, expected in notations.items():
        args = script.parse_args(["--total-timesteps", text])
        assert args.total_timesteps == expected and type(args.total_timesteps) is int
    small = words_of(**QUICK[script.__name__] | {"total_timesteps": "2.5e3"})
    assert script.parse_args(small).total_timesteps == 2500


@pytest.mark.quick
@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "many", "1e-1", ""])
def test_counts_that_are_not_whole(script, text, capsys):
    """Exit status 2 with the flag's name."""
    with pytest.raises(SystemExit) as exit:
        script.parse_args([f"--total-timesteps={text}"])
    assert exit.value.code == 2 and "--total-timesteps" in capsys.readouterr().err


@having("join_processes")
@pytest.mark.quick
def test_flags_of_processes_need_distributed(script):
    """Without it they would be ignored, and every process would train alone."""
    for flag in (dict(num_processes=2), dict(process_id=1), dict(coordinator_address="x:1")):
        words = words_of(**QUICK[script.__name__] | flag)
        assert "needs --distributed" in refusal(script.UsageError, script.parse_args, words)


@having("make_mesh", lacking="make_pool")
@pytest.mark.quick
def test_more_devices_than_there_are(script, tmp_path):
    """Eight devices where JAX sees four: wrong usage, and no run folder is left behind."""
    words = quick_words(script, tmp_path, num_devices=8, num_envs=16)
    assert "--num-devices" in refusal(script.UsageError, script.main, words)
    assert not list(tmp_path.iterdir())


@each_text("update_epochs", lacking="make_pool")
def test_devices_that_do_not_divide_a_minibatch(script):
    """Ten samples on four devices: refused with a flag's name, or trained."""
    sizes = dict(num_envs=4, num_steps=5, num_minibatches=2, total_timesteps=40)
    args = quick_args(script, num_devices=4, **sizes)
    try:
        script.check_args(args)
    except script.UsageError as error:
        assert "--num-" in str(error)
        return
    _, metrics = script.make_train_chunk(args)(script.init_agents(args), jnp.int32(1))
    assert np.isfinite(metrics["losses/grad_norm"][0]).all()


@pytest.mark.quick
def test_track_without_wandb(script, tmp_path, monkeypatch):
    """Wrong usage, with the command that installs it, and no run folder is left behind."""
    find_spec = script.importlib.util.find_spec

    def without_wandb(name, *others):
        return None if name == "wandb" else find_spec(name, *others)

    monkeypatch.setattr(script.importlib.util, "find_spec", without_wandb)
    message = refusal(script.UsageError, script.main, quick_words(script, tmp_path, track=True))
    assert "--track" in message and "pip install wandb" in message
    assert not list(tmp_path.iterdir())


@once("Logger")
@pytest.mark.quick
def test_track_where_runs_left_a_folder(script, tmp_path, monkeypatch):
    """W&B makes a folder wandb/ beside the script, which Python takes for a package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    message = refusal(script.UsageError, script.main, quick_words(script, tmp_path, track=True))
    assert "pip install wandb" in message


FAKE_WANDB = """
calls = []

def init(**options):
    calls.append(("init", options["id"]))

def finish():
    calls.append("finish")

class tensorboard:
    def patch(root_logdir, save):
        assert calls[-1:] in ([], ["unpatch"]), "already patched"
        calls.append("patch")

    def unpatch():
        calls.append("unpatch")
"""


@once("Logger")
@pytest.mark.quick
def test_track_twice_in_a_process(script, tmp_path, monkeypatch):
    """Each run is a run of W&B's, which refuses to be patched again before it is unpatched."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        script.Logger(quick_args(script, track=True), tmp_path / name, 0).close()
    once = ["finish", "unpatch", "patch"]
    calls = sys.modules["wandb"].calls
    assert calls == ["patch", ("init", "first"), *once, ("init", "second"), *once[:2]]


@once("StopSignals")
@pytest.mark.quick
def test_signals_outside_of_the_main_thread(script):
    """Python has handlers in its main thread only: there is nothing to remember, and no error."""

    def enter():
        with script.StopSignals() as signals:
            return signals.received

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert pool.submit(enter).result() is None


@once("create_run_folder")
@pytest.mark.quick
@pytest.mark.parametrize("folder", ["runs_dir", "videos_dir"])
def test_unwritable_folder(script, folder, tmp_path):
    """Its parent is a file, which stops root too."""
    (tmp_path / "file").touch()
    args = quick_args(script, **{folder: str(tmp_path / "file" / "folder")})
    create, *inputs = {
        "runs_dir": (script.create_run_folder, args),
        "videos_dir": (script.create_video_folder, args, tmp_path / "run"),
    }[folder]
    assert "file" in refusal(script.RunError, create, *inputs)


@pytest.mark.quick
def test_folders_of_runs_that_start_in_one_second(script, tmp_path, monkeypatch):
    """Each has folders of its own, also where the first run's have been filled."""
    monkeypatch.setattr(time, "time", lambda: 1234567890.5)
    folders = {"runs_dir": str(tmp_path / "runs"), "videos_dir": str(tmp_path / "videos")}
    args = quick_args(script, **folders)
    run_dirs = [script.create_run_folder(args) for _ in range(3)]
    video_dirs = [script.create_video_folder(args, run_dir) for run_dir in run_dirs]
    assert len(set(run_dirs)) == len(set(video_dirs)) == 3
    for run_dir, video_dir in zip(run_dirs, video_dirs):
        assert run_dir.name.startswith(
            f"{args.env_id}__{args.exp_name}__1__1234567890".split("/")[-1]
        )
        assert run_dir.name == video_dir.name and run_dir.is_dir() and video_dir.is_dir()
    elsewhere = dataclasses.replace(args, runs_dir=str(tmp_path / "others"))
    assert script.create_run_folder(elsewhere).name not in [folder.name for folder in video_dirs]


@once("UsageError")
def test_exit_statuses(script, tmp_path):
    """Of processes: 2 and one line for wrong usage, 1 and one line for files."""
    cases = [
        ({"num_minibatches": 7}, 2, "--num-minibatches"),
        ({"resume": "missing"}, 1, "missing"),
    ]
    processes = [start(script, tmp_path, **options) for options, _, _ in cases]
    for process, (_, code, text) in zip(processes, cases, strict=True):
        _, stderr = process.communicate()
        (line,) = stderr.splitlines()
        assert process.returncode == code and line.startswith("error: ") and text in line
    assert not (tmp_path / "runs").exists()


@each_text("main", lacking="make_pool")  # Atari's environments are not of its file
def test_errors_of_users_code_keep_their_traceback(script, tmp_path, monkeypatch):
    """An environment whose `step` raises OSError, as damaged files do: not mistaken for one."""

    def step(self, key, state, action):
        raise OSError("of my own")

    monkeypatch.setattr(type(script.make_env(quick_args(script))), "step", step)
    with pytest.raises(OSError, match="of my own") as info:
        script.main(quick_words(script, tmp_path))
    assert "step" in [entry.name for entry in info.traceback]
    assert not list(tmp_path.iterdir())


@once("Logger")
def test_nobody_reads_the_output(script, tmp_path):
    """As in `python script.py | head -1`: the run goes on to its successful end."""
    process = start(script, tmp_path, **QUICK[script.__name__] | dict(log_interval=1))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == ""
    assert json.loads((run_of(tmp_path) / "summary.json").read_text())["status"] == "finished"


class Broken:
    """A terminal that is gone, as after `disown` when its window is closed."""

    def isatty(self):
        return True

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")

    flush = write


@once("Logger")
@pytest.mark.parametrize("output", [None, Broken()], ids=["closed", "terminal"])
def test_output_that_cannot_be_written(script, output, tmp_path, monkeypatch):
    """`>&-` leaves Python without `sys.stdout`: the run goes on to its successful end."""
    monkeypatch.setattr(sys, "stdout", output)
    run_dir = run_main(script, tmp_path)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"


@once("RunError")
def test_traceback_of_a_process(script, tmp_path):
    """The same in a process of its own: the traceback is printed, exit status 1."""
    code = f"""import runpy, sys, pathlib
text = pathlib.Path("{script.__name__}.py").read_text()
changed = text.replace("def make_env(args):\\n", "def make_env(args):\\n    open('no/file')\\n")
assert changed != text
pathlib.Path("mine.py").write_text(changed)
runpy.run_path("mine.py", run_name="__main__")"""
    process = start(script, tmp_path, code=code, **QUICK[script.__name__])
    _, stderr = process.communicate()
    assert process.returncode == 1
    assert "Traceback" in stderr and "in make_env" in stderr and "FileNotFoundError" in stderr


# --------------------------------------------------------------------------------------------------
# Output
# --------------------------------------------------------------------------------------------------


def test_summary_and_events_are_complete(script, finished_run):
    """A run of the script alone in an empty folder leaves a summary, events and a video."""
    summary = json.loads((finished_run / "summary.json").read_text())
    assert SUMMARY_KEYS <= set(summary)
    assert (summary["script"], summary["status"]) == (script.__name__, "finished")
    assert summary["total_timesteps"] == QUICK[script.__name__]["total_timesteps"]
    assert summary["args"] == json.loads((finished_run / "args.json").read_text())
    assert len(list((finished_run.parents[1] / "videos" / finished_run.name).iterdir())) == 1
    assert re.fullmatch(rf".+__{script.__name__}__1__\d+", finished_run.name)
    logged = scalars(finished_run)
    assert TAGS <= set(logged)
    assert all(np.isfinite(value) for events in logged.values() for _, value in events)
    expected = pytest.approx(summary["total_timesteps"] / summary["train_seconds"])
    assert summary["sps"] == expected
    assert summary["compile_seconds"] + summary["train_seconds"] < summary["wall_seconds"]
    checkpoints = [path.stem for path in sorted(finished_run.glob("checkpoints/*"))]
    assert checkpoints == ["000000010", "000000015", "000000020"]


def test_every_update_is_logged(script, finished_run):
    """Not only the last of a chunk: the steps are those of consecutive updates."""
    args, logged = script.load_args(finished_run), scalars(finished_run)
    every = [args.batch_size * update for update in range(1, args.num_updates + 1)]
    assert args.log_interval > 1
    for tag in TAGS - {"charts/SPS", "eval/episodic_return"}:
        steps = [step for step, _ in logged[tag]]
        first = every.index(steps[0])  # nothing is logged before an episode ends
        assert steps == every[first:] and (first == 0 or tag.startswith("charts/episodic"))
    assert [step for step, _ in logged["eval/episodic_return"]] == every[-1:]


def test_logged_values_belong_to_their_steps(script, finished_run):
    """The annealed learning rate of each update, the last return: that of the last checkpoint."""
    args, logged = script.load_args(finished_run), scalars(finished_run)
    for step, rate in logged["charts/learning_rate"]:
        done = step / args.batch_size - 1  # updates before the logged one
        left = 1 - done / args.num_updates * args.anneal_lr
        assert rate == pytest.approx(args.learning_rate * left, rel=1e-5)
    with np.load(newest_checkpoint(finished_run)) as file:
        last = file["stats/last_return"]
    expected = pytest.approx(last[np.isfinite(last)].mean(), rel=1e-5)
    assert logged["charts/episodic_return"][-1][1] == expected


@each_text("main", lacking="make_pool")
def test_logged_metrics_are_those_of_training(script, finished_run):
    """Against the same updates one at a time, in this process, where rounding has not grown yet."""
    args, logged = script.load_args(finished_run), scalars(finished_run)
    key, train_step = jax.random.key(args.seed), script.make_train_step(args)
    state = jax.jit(script.init_train_state, static_argnums=0)(args, key)
    for update in range(3):
        state, metrics = train_step(state)
        for tag, value in metrics.items():
            written = dict(logged[tag]).get(args.batch_size * (update + 1), -np.inf)
            np.testing.assert_allclose(written, value, rtol=1e-3, atol=1e-5, err_msg=tag)


@once("Logger")
def test_hyperparameters_are_logged_as_text(script, finished_run):
    """A Markdown table of every flag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run)).Reload()
    (tag,) = [tag for tag in events.Tags()["tensors"] if "hyperparameters" in tag]
    table = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    for field in dataclasses.fields(script.Args):
        assert f"|{field.name}|" in table


@once("Logger")
def test_metric_of_a_user_reaches_tensorboard(script, tmp_path, monkeypatch):
    """`Max(...)` added to `ppo_loss`: each update's value is the greatest of its minibatches."""
    original, seen = script.ppo_loss, []

    def ppo_loss(args, params, batch):
        loss, metrics = original(args, params, batch)
        dist, _ = script.forward(args, params, batch.obs)
        ratio = jnp.exp(dist.log_prob(batch.action) - batch.log_prob)
        jax.debug.callback(lambda ratio: seen.append(float(ratio.max())), ratio)
        return loss, metrics | {"losses/ratio_max": script.Max(ratio.max())}

    monkeypatch.setattr(script, "ppo_loss", ppo_loss)
    args = quick_args(script)
    run_dir = run_main(script, tmp_path, total_timesteps=4 * args.batch_size)
    jax.effects_barrier()
    expected = np.reshape(seen, (4, args.update_epochs * args.num_minibatches)).max(1)
    steps, values = zip(*scalars(run_dir)["losses/ratio_max"], strict=True)
    assert steps == tuple(args.batch_size * update for update in (1, 2, 3, 4))
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert len(set(expected)) == 4 and expected.min() > 1


@each_text("main", lacking="make_pool")
def test_evaluations_during_training(script, tmp_path, capsys, monkeypatch):
    """`--eval-interval 5`: logged as a checkpoint's own evaluation says, without more videos.

    Before the checkpoint: a run that is killed and resumed does not evaluate that update again.
    """
    save_checkpoint, logged_before = script.save_checkpoint, []

    def save(run_dir, state):
        logged_before.append(len(scalars(run_dir).get("eval/episodic_return", [])))
        save_checkpoint(run_dir, state)

    monkeypatch.setattr(script, "save_checkpoint", save)
    run_dir = run_main(script, tmp_path, eval_interval=5, checkpoint_interval=5)
    assert logged_before == [1, 2, 3, 3]  # the last one is evaluated when it is safe
    args, logged = script.load_args(run_dir), scalars(run_dir)["eval/episodic_return"]
    assert [step for step, _ in logged] == [args.batch_size * n for n in (5, 10, 15, 20)]
    (video,) = (tmp_path / "videos" / run_dir.name).iterdir()
    lines = capsys.readouterr().out.splitlines()
    assert f"run: {run_dir}" in lines and f"video: {video}" in lines
    newest_checkpoint(run_dir).unlink()  # that of update 20
    script.main(words_of(eval=run_dir, videos_dir=tmp_path / "others"))
    evaluation = json.loads((run_dir / "eval.json").read_text())
    assert logged[2][1] == pytest.approx(evaluation["eval_return_mean"], rel=1e-5)


@each_text("main", lacking="make_pool")
def test_videos_during_training(script, tmp_path):
    """`--capture-video --video-interval 8`: after updates 8, 16 and the last one, 20."""
    run_dir = run_main(script, tmp_path, capture_video=True, video_interval=8)
    videos = {path.stem for path in (tmp_path / "videos" / run_dir.name).iterdir()}
    batch_size = quick_args(script).batch_size
    assert videos == {f"step_{batch_size * update}" for update in (8, 16, 20)}
    args = script.load_args(run_dir)
    logged = scalars(run_dir)["losses/policy_loss"]
    assert [step for step, _ in logged] == [args.batch_size * n for n in range(1, 21)]


@each_text("main", lacking="make_pool")
def test_error_while_drawing_costs_no_result(script, tmp_path, monkeypatch):
    """`render` raises: with its traceback, and the finished summary is there already."""

    def render(self, *args, **options):
        raise ZeroDivisionError("of my own")

    monkeypatch.setattr(type(script.make_env(quick_args(script))), "render", render)
    with pytest.raises(ZeroDivisionError, match="of my own"):
        run_main(script, tmp_path)
    run_dir = run_of(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "finished" and SUMMARY_KEYS <= set(summary)
    assert "eval/episodic_return" in scalars(run_dir)


@each_text("main", lacking="make_pool")
def test_environment_without_render(script, tmp_path, monkeypatch, capsys):
    """Has no video; everything else is there, also with `--capture-video` and `--eval`."""
    monkeypatch.delattr(type(script.make_env(quick_args(script))), "render")
    run_dir = run_main(script, tmp_path, capture_video=True, video_interval=8)
    script.main(words_of(eval=run_dir, videos_dir=tmp_path / "videos"))
    assert "video" not in capsys.readouterr().out.replace("videos", "")
    assert not [path for path in (tmp_path / "videos").rglob("*") if path.is_file()]
    assert (run_dir / "eval.json").is_file() and (run_dir / "summary.json").is_file()


@once("Logger")
def test_folder_of_several_seeds(script, tmp_path):
    """A TensorBoard run and values of every result for each seed; an interval of their mean."""
    steps = 2 * quick_args(script).batch_size
    run_dir = run_main(script, tmp_path, num_seeds=2, seed=5, total_timesteps=steps)
    folders = [run_dir / f"seed_{seed}" for seed in (5, 6)]
    logged = [scalars(folder)["eval/episodic_return"][-1][1] for folder in folders]
    summary = json.loads((run_dir / "summary.json").read_text())
    returns = summary["per_seed"]["eval_return_mean"]
    assert returns == pytest.approx(logged, rel=1e-5)
    assert summary["eval_return_mean"] == pytest.approx(np.mean(returns))
    assert summary["eval_return_ci95"] == [min(returns), max(returns)]  # of two values


@once("bootstrap_interval")
@pytest.mark.quick
def test_bootstrap_interval_equals_scipy(script):
    """The percentile interval of the mean."""
    import scipy.stats

    values = np.random.default_rng(1).normal(size=12)
    expected = scipy.stats.bootstrap(
        [values], np.mean, n_resamples=10_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    np.testing.assert_allclose(script.bootstrap_interval(values), expected, atol=0.03)
    assert script.bootstrap_interval(values[:1]) is None


@once("write_json")
@pytest.mark.quick
def test_numbers_that_are_not_finite_become_null(script, tmp_path):
    """What other programs read is JSON as its standard has it."""
    path = tmp_path / "summary.json"
    content = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": np.float64("-inf"), "e": 2}}
    script.write_json(path, content)

    def forbidden(name):
        raise AssertionError(name)

    read = json.loads(path.read_text(), parse_constant=forbidden)
    assert read == {"a": None, "b": [1.5, None], "c": {"d": None, "e": 2}}
    assert list(tmp_path.iterdir()) == [path]


@once("use_compilation_cache")
def test_second_start_loads_programs(script, tmp_path):
    """The cache lies in the user's cache folder; a second run adds no program to it."""
    cache, options = tmp_path / "cache", QUICK[script.__name__]

    def run():
        env = {"XDG_CACHE_HOME": str(cache), "JAX_COMPILATION_CACHE_DIR": None}
        process = start(script, tmp_path / "work", env=env, **options)
        stdout, stderr = process.communicate()
        assert process.returncode == 0 and not stderr, stdout + stderr

    def programs():
        return {name for name in contents(cache) if "train_chunk" in name and "atime" not in name}

    run()
    first = programs()
    assert len(first) == 1
    run()
    assert programs() == first


@once("use_compilation_cache")
@pytest.mark.quick
def test_cache_folder_that_cannot_be_written(script, tmp_path, monkeypatch):
    """It stops no run: there is no cache, then."""
    (tmp_path / "file").touch()
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        script.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "folder"))
        script.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path / "folder"))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@once("use_compilation_cache")
@pytest.mark.quick
def test_cache_has_a_limit(script, tmp_path, monkeypatch):
    """The oldest files of more than a gigabyte go; folders stay."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        script.use_compilation_cache()
        cache = pathlib.Path(jax.config.jax_compilation_cache_dir)
        (cache / "autotuning").mkdir()
        ages = {"new": 0, "autotuning/newer": 1, "old": 2, "autotuning/oldest": 3}
        for name, age in ages.items():
            with open(cache / name, "wb") as file:
                file.truncate(2**29)  # half a gigabyte, of nothing
            os.utime(cache / name, (1e9 - age, 1e9 - age))
        jax.config.update("jax_compilation_cache_dir", None)
        script.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(cache)
        left = {path.name for path in cache.rglob("*")}
        assert left == {"new", "autotuning", "newer"}
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# --------------------------------------------------------------------------------------------------
# A renamed copy
# --------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_name_of_a_renamed_copy(script, tmp_path):
    """Its own, for runs and summaries."""
    mine = edited_copy(script, tmp_path / "my_experiment.py")
    assert mine.SCRIPT == "my_experiment" and mine.Args().exp_name == "my_experiment"
    mine = edited_copy(script, tmp_path / "ppo (1).py")  # a second download
    assert mine.SCRIPT == mine.Args().exp_name == "ppo__1_"
    mine.check_args(mine.Args())


@once("load_run")
def test_renamed_copy(script, finished_run, run_copy, tmp_path):
    """It logs under its own name, and loads, evaluates and resumes runs of the original.

    It has a flag more, which is infinite. Its seconds begin with `main`, not with its import.
    """
    field = "    seed: int = 1\n"
    edit = (field, "    limit: float = math.inf\n" + field)
    mine = edited_copy(script, tmp_path / "my_experiment.py", edit)
    time.sleep(1)
    begin = time.time()
    run_dir = run_main(mine_as(mine, script), tmp_path / "mine")
    assert "__my_experiment__" in run_dir.name
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["script"] == "my_experiment" and summary["args"]["limit"] is None
    assert summary["wall_seconds"] <= time.time() - begin
    assert mine.load_run(run_dir)[0].limit == math.inf

    args, state = mine.load_run(finished_run)
    expected_args, expected = script.load_run(finished_run)
    assert vars(args) == vars(expected_args) | {"limit": math.inf}
    ours, expected = mine.flatten_state(state), script.flatten_state(expected)
    assert ours.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(ours[name], expected[name])
    mine.main(words_of(eval=run_copy, videos_dir=tmp_path / "videos"))
    summary = json.loads((run_copy / "summary.json").read_text())
    evaluation = json.loads((run_copy / "eval.json").read_text())
    assert evaluation == {key: summary[key] for key in evaluation}


def mine_as(mine, script):
    """The copy under the name that QUICK knows."""
    mine.__name__ = script.__name__
    return mine


# --------------------------------------------------------------------------------------------------
# Evaluation of a saved run
# --------------------------------------------------------------------------------------------------


def test_eval_repeats_the_evaluation(script, run_copy, tmp_path):
    """`--eval` gives the summary's evaluation and changes nothing else in the run's folder."""
    before = contents(run_copy)
    script.main(words_of(eval=run_copy, videos_dir=tmp_path / "videos"))
    after = contents(run_copy)
    evaluation, summary = json.loads(after.pop("eval.json")), json.loads(after["summary.json"])
    assert after == before
    assert {"eval_return_mean", "eval_episodes"} <= set(evaluation)
    assert evaluation == {key: summary[key] for key in evaluation}
    assert len(list((tmp_path / "videos" / run_copy.name).iterdir())) == 1


@each_text("parse_args")
def test_eval_takes_episodes_and_folder_alone(script, run_copy, tmp_path):
    """Flags that an evaluation would ignore are refused, whatever the script's defaults are."""
    before = contents(run_copy)
    refused = [("seed", 5), ("num_seeds", 2), ("log_interval", 10), ("learning_rate", 0.5)]
    refused += [("total_timesteps", 5000), ("runs_dir", "elsewhere"), ("capture_video", True)]
    for flag, value in refused:
        words = words_of(eval=run_copy, videos_dir=tmp_path / "videos", **{flag: value})
        message = refusal(script.UsageError, script.main, words)
        assert f"--{flag.replace('_', '-')}" in message
    words = words_of(eval=run_copy, resume=run_copy)
    assert "exclude" in refusal(script.UsageError, script.main, words)
    assert contents(run_copy) == before
    script.main(words_of(eval=run_copy, videos_dir=tmp_path / "videos", eval_episodes=7))
    assert json.loads((run_copy / "eval.json").read_text())["eval_episodes"] == 7


@once("write_json")
@pytest.mark.quick
def test_links_are_not_followed(script, tmp_path):
    """Temporary files that lie there already, in a stranger's folder, lead nowhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    for link in ("eval.tmp", "checkpoints/000000000.tmp"):
        (tmp_path / link).symlink_to(victim)
    script.write_json(tmp_path / "eval.json", {"x": 1})
    state = script.init_states(quick_args(script))
    script.save_checkpoint(tmp_path, state)
    assert json.loads((tmp_path / "eval.json").read_text()) == {"x": 1}
    assert np.load(newest_checkpoint(tmp_path)).files and victim.read_text() == "mine"


@once("write_json")
@pytest.mark.quick
def test_what_cannot_be_written(script, tmp_path):
    """Files that cannot be made are errors of a line, not of the code."""
    (tmp_path / "eval.json").mkdir()
    (tmp_path / "checkpoints").write_text("")
    message = refusal(script.RunError, script.write_json, tmp_path / "eval.json", {})
    assert "eval.json cannot be written" in message
    state = script.init_states(quick_args(script))
    assert "cannot be written" in refusal(script.RunError, script.save_checkpoint, tmp_path, state)


@each_text("parse_args")
def test_eval_of_a_tracked_run_needs_no_wandb(script, run_copy, tmp_path, monkeypatch):
    """Evaluation logs nothing."""
    edit_saved_args(run_copy, track=True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    script.main(words_of(eval=run_copy, videos_dir=tmp_path / "videos"))
    assert (run_copy / "eval.json").is_file()


@once("evaluate_run")
def test_interrupt_ends_an_evaluation(script, run_copy, tmp_path, monkeypatch):
    """Ctrl-C during `--eval`: Python's own exception, and nothing is written."""
    before = contents(run_copy)
    monkeypatch.setattr(script, "evaluate", lambda *args: signal.raise_signal(signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            script.main(words_of(eval=run_copy, videos_dir=tmp_path / "videos"))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert contents(run_copy) == before


# --------------------------------------------------------------------------------------------------
# Damaged and foreign files
# --------------------------------------------------------------------------------------------------


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("no checkpoint")


def foreign_archive(path):
    np.savez(path, weights=np.zeros(3))


def bare_array(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))


def pickle_payload(path):
    """Replaces one array by an object whose unpickling would run code."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    name = max(arrays, key=lambda name: arrays[name].nbytes)
    np.savez(path, **arrays | {name: np.array([Bomb()], dtype=object)})


def raw_pickle(path):
    path.write_bytes(pickle.dumps(Bomb()))


def other_dtype(path):
    """One array in float64."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    name = max(arrays, key=lambda name: arrays[name].nbytes)
    np.savez(path, **arrays | {name: arrays[name].astype(float)})


class Bomb:
    """Ends the process when it is unpickled."""

    def __reduce__(self):
        return sys.exit, (99,)


DAMAGES = [truncated, empty, text, foreign_archive, bare_array, pickle_payload, raw_pickle]


@once("load_checkpoint")
@pytest.mark.parametrize("damage", [*DAMAGES, other_dtype], ids=lambda f: f.__name__)
def test_damaged_checkpoint(script, run_copy, damage):
    """The newest checkpoint is damaged or foreign: a line that names it."""
    path = newest_checkpoint(run_copy)
    damage(path)
    args = script.load_args(run_copy)
    assert path.name in refusal(script.RunError, script.load_checkpoint, args, run_copy)


@each_text("main")
@pytest.mark.parametrize("use", ["resume", "eval"])
def test_damaged_checkpoint_ends_the_command(script, run_copy, use, tmp_path):
    """The same from the command line, and nothing is written."""
    path = newest_checkpoint(run_copy)
    pickle_payload(path)
    before = contents(run_copy)
    words = words_of(**{use: run_copy}, videos_dir=tmp_path / "videos")
    assert path.name in refusal(script.RunError, script.main, words)
    assert contents(run_copy) == before


@once("load_checkpoint")
@pytest.mark.quick
def test_small_file_of_much(script, tmp_path):
    """Three hundred million zeros in a few hundred kilobytes are not unpacked."""
    args = quick_args(script)
    script.save_checkpoint(tmp_path, script.init_states(args))
    path = newest_checkpoint(tmp_path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("more.npy", "w") as member:
            for _ in range(300):
                member.write(bytes(10**6))
    assert path.stat().st_size < 10**6
    message = refusal(script.RunError, script.load_checkpoint, args, tmp_path)
    assert path.name in message and "unpacks" in message


@once("load_checkpoint")
@pytest.mark.quick
def test_files_among_the_checkpoints(script, tmp_path):
    """Copies under other names are neither loaded nor removed."""
    args = quick_args(script)
    state = script.init_states(args)
    own = {"best.npz", "000000001_good.npz"}
    for update in range(1, 6):
        script.save_checkpoint(tmp_path, state._replace(update=jnp.full(1, update)))
        if update == 1:
            for name in own:
                shutil.copy(newest_checkpoint(tmp_path), tmp_path / "checkpoints" / name)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == own | {f"{update:09d}.npz" for update in (3, 4, 5)}
    assert np.asarray(script.load_checkpoint(args, tmp_path).update) == 5


def middles_of_members(path):
    """Positions in an uncompressed archive at which the data of its arrays have their middles."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        middles = set()
        for member in archive.infolist():
            file.seek(member.header_offset + 26)  # lengths of the name and of the extra field
            lengths = struct.unpack("<HH", file.read(4))
            middles.add(file.tell() + sum(lengths) + member.file_size // 2)
    return middles


@once("load_checkpoint")
@pytest.mark.quick
def test_checkpoint_of_bfloat16(script, tmp_path, monkeypatch):
    """NumPy saves them as bytes without a type."""
    args, init_agent = quick_args(script), script.init_agent
    to_bfloat16 = lambda x: x.astype(jnp.bfloat16)
    monkeypatch.setattr(
        script, "init_agent", lambda *inputs: jax.tree.map(to_bfloat16, init_agent(*inputs))
    )
    state = script.init_states(args)
    script.save_checkpoint(tmp_path, state)
    loaded = script.load_checkpoint(args, tmp_path)
    assert jax.tree.leaves(loaded.params)[0].dtype == jnp.bfloat16
    ours, saved = script.flatten_state(loaded), script.flatten_state(state)
    for name, x in saved.items():
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(x), err_msg=name)


@once("load_checkpoint")
def test_flipped_bits_never_go_unnoticed(script, run_copy):
    """One bit flipped in each array and all over the file: an error, or else the same state.

    The same where the byte has no meaning.
    """
    path = newest_checkpoint(run_copy)
    original = path.read_bytes()
    with np.load(path) as file:
        arrays = {name: file[name].tobytes() for name in file.files}
    args = script.load_args(run_copy)
    middles = middles_of_members(path)
    everywhere = set(np.random.default_rng(0).integers(len(original), size=60))
    tail = set(range(len(original) - 100, len(original)))  # the archive's directory
    errors = 0
    for position in sorted(middles | everywhere | tail):
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            state = script.load_checkpoint(args, run_copy)
        except script.RunError:
            errors += 1
            continue
        assert position not in middles
        state = script.flatten_state(state)
        assert {name: np.asarray(x).tobytes() for name, x in state.items()} == arrays, position
    assert errors >= len(middles)


def test_checkpoint_of_other_shapes(script, run_copy, tmp_path):
    """args.json says twice as many environments as the checkpoint has."""
    edit_saved_args(run_copy, num_envs=2 * QUICK[script.__name__]["num_envs"])
    words = words_of(resume=run_copy, videos_dir=tmp_path)
    assert "does not fit" in refusal(script.RunError, script.main, words)


@pytest.mark.quick
@pytest.mark.parametrize("use", ["resume", "eval"])
def test_folder_that_is_no_run(script, use, tmp_path):
    """One line and nothing written: a folder is missing, empty, or its args.json broken."""
    broken = {"broken": '{"seed": ', "list": "[]", "bytes": "\0", "unknown": '{"nothing": 1}'}
    for name in ["missing", "empty", *broken]:
        folder = tmp_path / name
        if name != "missing":
            folder.mkdir()
        if name in broken:
            (folder / "args.json").write_text(broken[name])
        before = contents(tmp_path)
        words = words_of(**{use: folder}, videos_dir=tmp_path / "videos")
        assert str(folder) in refusal(script.RunError, script.main, words)
        assert contents(tmp_path) == before


@pytest.mark.quick
def test_run_without_checkpoint(script, tmp_path):
    """Stopped before its first one."""
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(quick_args(script))))
    message = refusal(script.RunError, script.main, words_of(resume=tmp_path))
    assert "no checkpoint" in message


@pytest.mark.quick
@pytest.mark.parametrize(
    "changed",
    [
        {"num_steps": "8"},
        {"num_steps": 8.0},
        {"num_steps": [8]},
        {"num_steps": None},
        {"anneal_lr": 1},
        {"exp_name": None},
        {"runs_dir": 5},
        {"gamma": 5.0},
        {"no_such_flag": 1},
    ],
)
def test_saved_values_that_cannot_be(script, changed, tmp_path):
    """Of the wrong type, out of range, unknown: refused in a saved args.json."""
    saved = dataclasses.asdict(quick_args(script))
    (tmp_path / "args.json").write_text(json.dumps(saved))
    assert script.load_args(tmp_path) == quick_args(script)
    (tmp_path / "args.json").write_text(json.dumps(saved | changed))
    assert str(tmp_path) in refusal(script.RunError, script.load_args, tmp_path)


@pytest.mark.quick
def test_flags_of_the_parser_are_no_saved_values(script, tmp_path):
    """tyro has flags of its own, one of which writes a file wherever it is told to."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("tyro-write-completion", "tyro_write_completion"):
        (tmp_path / "args.json").write_text(json.dumps({name: ["bash", str(victim)]}))
        assert "unknown" in refusal(script.RunError, script.load_args, tmp_path)
        assert victim.read_text() == "mine"


@having("join_processes")
@pytest.mark.quick
def test_saved_processes_count_for_nothing(script, tmp_path):
    """What a stranger's args.json names is not connected to."""
    saved = dataclasses.asdict(quick_args(script))
    saved |= dict(distributed=True, coordinator_address="10.0.0.1:1234", num_processes=2)
    (tmp_path / "args.json").write_text(json.dumps(saved))
    for use in ("resume", "eval"):
        args = script.parse_args(words_of(**{use: tmp_path}))
        assert not args.distributed and args.coordinator_address is args.num_processes is None


@pytest.mark.quick
@pytest.mark.parametrize(
    "options",
    [
        {"vf_coef": 1},  # JSON, like Python, tells 1 from 1.0
        {"target_kl": 0.05, "track": True, "anneal_lr": False},
        {"runs_dir": "a folder/with = and 'quotes'", "videos_dir": "--odd"},
        {"wandb_project": "None", "resume": "5"},
        {"wandb_project": "", "runs_dir": "True"},
        {"learning_rate": 1e-30, "total_timesteps": 10**15},
    ],
)
def test_every_value_survives_saving(script, options, tmp_path):
    """`args.json` gives back what was saved."""
    args = quick_args(script, **options)
    script.write_json(tmp_path / "args.json", vars(args))
    assert script.load_args(tmp_path) == args


# --------------------------------------------------------------------------------------------------
# Resume
# --------------------------------------------------------------------------------------------------


@having("train")
def test_resuming_a_finished_run_changes_nothing(script, run_copy, tmp_path, capsys):
    """It says so and leaves every file byte for byte."""
    before = contents(run_copy)
    script.main(words_of(resume=run_copy, videos_dir=tmp_path / "videos"))
    out = capsys.readouterr().out
    assert "finished" in out and f"--eval {run_copy}" in out
    assert contents(run_copy) == before and not (tmp_path / "videos").exists()


@each_text("main", lacking="make_pool")
def test_resuming_a_run_that_lacks_only_its_summary(script, run_copy, tmp_path):
    """Killed after its last checkpoint: it gets the evaluation it would have had."""
    expected = json.loads((run_copy / "summary.json").read_text())
    (run_copy / "summary.json").unlink()
    script.main(words_of(resume=run_copy, videos_dir=tmp_path / "videos"))
    summary = json.loads((run_copy / "summary.json").read_text())
    assert summary["per_seed"] == expected["per_seed"] and summary["status"] == "finished"
    assert summary["total_timesteps"] == expected["total_timesteps"]


@once("is_finished")
def test_resuming_a_run_whose_summary_is_damaged(script, run_copy, tmp_path):
    """It is no text, so it does not say that the run is finished; it is written again."""
    expected = json.loads((run_copy / "summary.json").read_text())
    (run_copy / "summary.json").write_bytes(b"\xff\xfe")
    script.main(words_of(resume=run_copy, videos_dir=tmp_path / "videos"))
    summary = json.loads((run_copy / "summary.json").read_text())
    assert summary["per_seed"] == expected["per_seed"] and summary["status"] == "finished"


@pytest.mark.quick
def test_defaults_of_a_resumed_run_are_its_own(script, tmp_path):
    """A flag given now counts even where it equals the script's default."""
    default = script.Args()
    saved = quick_args(script, num_envs=4, num_steps=10, num_minibatches=1, anneal_lr=False)
    saved = dataclasses.replace(saved, total_timesteps=400, learning_rate=0.5)
    assert default.log_interval != saved.log_interval and default.learning_rate != 0.5
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(saved)))

    def resumed(**options):
        return script.parse_args(words_of(resume=tmp_path, **options))

    expected = dataclasses.replace(saved, resume=str(tmp_path))
    assert resumed() == expected
    again = dataclasses.replace(expected, log_interval=default.log_interval)
    assert resumed(log_interval=default.log_interval) == again
    assert resumed(learning_rate=0.5) == expected  # the run's own value
    words = dict(learning_rate=default.learning_rate)
    assert "--learning-rate" in refusal(script.UsageError, resumed, **words)


@pytest.mark.quick
def test_flags_that_resume_may_change(script, tmp_path):
    """They and no others; they are checked with the run's own flags, not with the defaults."""
    options = dict(num_envs=3, num_steps=10, num_minibatches=1, total_timesteps=300)
    saved = quick_args(script, anneal_lr=False, **options)
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(saved)))

    def resumed(**options):
        return script.parse_args(words_of(resume=tmp_path, **options))

    given = dict(total_timesteps=90, eval_episodes=7, log_interval=3, videos_dir="elsewhere")
    given |= dict(track=True, eval_interval=4, checkpoint_interval=9, capture_video=True)
    given |= dict(video_interval=6, wandb_project="mine")
    if not hasattr(script, "make_pool"):
        given |= {"num_devices": 3}
    assert resumed(**given) == dataclasses.replace(saved, resume=str(tmp_path), **given)
    assert "--total-timesteps" in refusal(script.UsageError, resumed, total_timesteps=20)
    changed = dict(learning_rate=0.5, num_envs=16, seed=7, gamma=0.5, num_seeds=2, num_steps=5)
    changed |= dict(exp_name="other", anneal_lr=True, norm_adv=not saved.norm_adv, target_kl=1.0)
    changed |= dict(runs_dir="others")  # it goes on in its own folder
    for flag, value in changed.items():
        message = refusal(script.UsageError, resumed, **{flag: value})
        name = f"--{flag.replace('_', '-')}"
        assert name in message or name.replace("--", "--no-") in message

    annealed = dataclasses.replace(saved, anneal_lr=True)
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(annealed)))
    assert "--total-timesteps" in refusal(script.UsageError, resumed, total_timesteps=90)


@once("load_run")
def test_longer_run_equals_resumed_run(script, tmp_path):
    """10 updates, resumed to 20, with another log interval: the run of 20 updates, bit for bit."""
    batch_size = quick_args(script).batch_size
    long = run_main(script, tmp_path / "long", anneal_lr=False)
    short = run_main(script, tmp_path / "short", anneal_lr=False, total_timesteps=10 * batch_size)
    steps = 20 * batch_size
    script.main(words_of(resume=short, total_timesteps=steps, log_interval=3))
    shutil.rmtree(short / "seed_1", ignore_errors=True)
    with np.load(newest_checkpoint(short)) as ours, np.load(newest_checkpoint(long)) as expected:
        assert ours.files == expected.files
        for name in expected.files:
            assert ours[name].tobytes() == expected[name].tobytes(), name
    logged, expected = scalars(short), scalars(long)
    for tag in expected.keys() - {"charts/SPS", "eval/episodic_return"}:
        assert logged[tag] == expected[tag]
    summary = json.loads((short / "summary.json").read_text())
    assert summary["total_timesteps"] == summary["args"]["total_timesteps"] == steps
    before = contents(short)
    words = words_of(resume=short, total_timesteps=10 * batch_size)
    assert "more steps already" in refusal(script.UsageError, script.main, words)
    assert contents(short) == before


@once("seed_keys")
@pytest.mark.quick
def test_all_seeds_have_keys(script):
    """Up to the largest that is allowed, and each seed's key is that of JAX."""
    keys = script.seed_keys(quick_args(script, seed=2**32 - 2, num_seeds=2))
    expected = [jax.random.key(np.uint32(seed)) for seed in (2**32 - 2, 2**32 - 1)]
    data = [jax.random.key_data(key) for key in expected]
    np.testing.assert_array_equal(jax.random.key_data(keys), data)


@each_text("main")
def test_losses_that_are_not_finite(script, run_copy, tmp_path):
    """Resumed with an absurd learning rate: one line; the good checkpoints stay."""
    total_timesteps = 4 * QUICK[script.__name__]["total_timesteps"]
    edit_saved_args(run_copy, learning_rate=1e30, total_timesteps=total_timesteps)
    before = contents(run_copy / "checkpoints")
    words = words_of(resume=run_copy, videos_dir=tmp_path)
    message = refusal(script.RunError, script.main, words)
    assert "not finite" in message and "seed 1 " in message
    assert contents(run_copy / "checkpoints") == before
