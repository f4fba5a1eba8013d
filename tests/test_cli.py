"""Robustness: wrong arguments, damaged and foreign files, NaN; and the files that a run leaves."""

import dataclasses
import json
import pickle
import re
import signal
import struct
import sys
import zipfile

import jax
import numpy as np
import pytest
import tyro
from conftest import QUICK, having, newest_checkpoint, once, quick_args, scalars

SUMMARY_KEYS = set(
    """script env_id seed num_seeds num_envs num_steps total_timesteps sps compile_seconds train_seconds wall_seconds
    eval_episodes eval_mode eval_return_mean eval_return_std eval_length_mean per_seed backend device_kind num_devices
    jax_version status""".split()
)
TAGS = set(
    """charts/episodic_return charts/episodic_length charts/learning_rate charts/SPS losses/policy_loss
    losses/value_loss losses/entropy losses/approx_kl losses/old_approx_kl losses/clipfrac losses/explained_variance
    losses/grad_norm eval/episodic_return""".split()
)


def failure(script, args, capsys):
    """Runs `main` until it exits; returns the exit code and what it wrote to standard error: one line."""
    with pytest.raises(SystemExit) as exit:
        script.main(args)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return exit.value.code, lines[0]


def contents(folder):
    """{relative path: bytes} of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag, value",
    [
        ("num_envs", 0),
        ("num_steps", -1),
        ("num_minibatches", 7),
        ("total_timesteps", 1),
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("gamma", 1.5),
        ("gae_lambda", -0.1),
        ("clip_coef", -0.2),
        ("num_seeds", 0),
        ("num_devices", 3),
        ("seed", -1),
        ("exp_name", "../../x"),
        ("exp_name", ""),
    ],
)
def test_bad_arguments_are_refused(script, flag, value, capsys):
    """`Args` raises a ValueError that names the flag; on the command line that is exit code 2 without a traceback."""
    name = f"--{flag.replace('_', '-')}"
    with pytest.raises(ValueError, match=name):
        quick_args(script, **{flag: value})
    quick = {**QUICK[script.__name__], flag: value}
    words = [f"--{key.replace('_', '-')}={value}" for key, value in quick.items()]
    with pytest.raises(SystemExit) as exit:
        tyro.cli(script.Args, args=words)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and name in error and "Traceback" not in error


@having(lacking="make_pool")
def test_more_devices_than_there_are(script, tmp_path, capsys):
    """Eight devices where JAX sees four: wrong usage, and no run folder is left behind."""
    args = quick_args(
        script, num_devices=8, num_envs=16, runs_dir=str(tmp_path / "runs"), videos_dir=str(tmp_path / "videos")
    )
    code, error = failure(script, args, capsys)
    assert code == 2 and "--num-devices" in error
    assert not list(tmp_path.rglob("*__*"))


def test_track_without_wandb(script, tmp_path, monkeypatch, capsys):
    """Wrong usage, with the command that installs it, and no run folder is left behind."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    args = quick_args(script, track=True, runs_dir=str(tmp_path / "runs"), videos_dir=str(tmp_path / "videos"))
    code, error = failure(script, args, capsys)
    assert code == 2 and "--track" in error and "pip install wandb" in error
    assert not list(tmp_path.rglob("*__*"))


def test_unwritable_runs_folder(script, tmp_path, capsys):
    """The folder's parent is a file, which stops root too."""
    (tmp_path / "file").touch()
    args = quick_args(script, runs_dir=str(tmp_path / "file" / "runs"), videos_dir=str(tmp_path / "videos"))
    assert failure(script, args, capsys)[0] == 1


# ----------------------------------------------------------------------------------------------------------------------
# Output
# ----------------------------------------------------------------------------------------------------------------------


def test_summary_and_events_are_complete(script, finished_run):
    """A run of the script alone in an empty folder leaves a complete summary, events and a video."""
    summary = json.loads((finished_run / "summary.json").read_text())
    assert SUMMARY_KEYS <= set(summary)
    assert (summary["script"], summary["status"]) == (script.__name__, "finished")
    assert summary["total_timesteps"] == QUICK[script.__name__]["total_timesteps"]
    assert list((finished_run.parents[1] / "videos" / finished_run.name).iterdir())
    assert re.fullmatch(rf".+__{script.__name__}__1__\d+", finished_run.name)
    logged = scalars(finished_run)
    assert TAGS <= set(logged)
    assert all(np.isfinite(value) for events in logged.values() for _, value in events)
    steps = [step for step, _ in logged["losses/policy_loss"]]
    assert steps == sorted(set(steps)) and steps[-1] == summary["total_timesteps"]
    assert summary["sps"] == pytest.approx(summary["total_timesteps"] / summary["train_seconds"])
    assert summary["compile_seconds"] + summary["train_seconds"] < summary["wall_seconds"]
    assert [path.stem for path in sorted(finished_run.glob("checkpoints/*"))] == ["000000010", "000000015", "000000020"]


def test_logged_values_belong_to_their_steps(script, finished_run):
    """The annealed learning rate of each logged update; the last return is that of the last checkpoint's episodes."""
    args, logged = script.load_args(finished_run), scalars(finished_run)
    for step, rate in logged["charts/learning_rate"]:
        done = step / args.batch_size - 1  # updates before the logged one
        assert rate == pytest.approx(args.learning_rate * (1 - done / args.num_updates * args.anneal_lr), rel=1e-5)
    with np.load(newest_checkpoint(finished_run)) as file:
        assert logged["charts/episodic_return"][-1][1] == pytest.approx(np.nanmean(file["episodes/last_ret"]), rel=1e-5)


@once("Logger")
def test_folder_of_several_seeds(script, tmp_path):
    """A TensorBoard run and a value of every result for each seed, and an interval of their mean."""
    folders = {"runs_dir": str(tmp_path / "runs"), "videos_dir": str(tmp_path / "videos")}
    steps = 2 * quick_args(script).batch_size
    script.main(quick_args(script, num_seeds=2, seed=5, total_timesteps=steps, **folders))
    (run_dir,) = tmp_path.glob("runs/*")
    logged = [scalars(run_dir / f"seed_{seed}")["eval/episodic_return"][-1][1] for seed in (5, 6)]
    summary = json.loads((run_dir / "summary.json").read_text())
    returns = summary["per_seed"]["eval_return_mean"]
    assert returns == pytest.approx(logged, rel=1e-5)
    assert summary["eval_return_mean"] == pytest.approx(np.mean(returns))
    assert summary["eval_return_ci95"] == [min(returns), max(returns)]  # of two values


@having("load_run")
def test_eval_repeats_the_evaluation(script, run_copy, tmp_path):
    """`--eval` of the same run gives the summary's evaluation and changes nothing else in the run's folder."""
    before = contents(run_copy)
    episodes = QUICK[script.__name__]["eval_episodes"]
    script.main(script.Args(eval=str(run_copy), eval_episodes=episodes, videos_dir=str(tmp_path / "videos")))
    after = contents(run_copy)
    evaluation, summary = json.loads(after.pop("eval.json")), json.loads(after["summary.json"])
    assert after == before
    assert {"eval_return_mean", "eval_episodes"} <= set(evaluation)
    assert evaluation == {key: summary[key] for key in evaluation}


@having("load_run")
def test_interrupt_ends_an_evaluation(script, run_copy, tmp_path, monkeypatch):
    """Ctrl-C during `--eval`: Python's own exception, and nothing is written."""
    before = contents(run_copy)
    monkeypatch.setattr(script, "evaluate", lambda *args: signal.raise_signal(signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            script.main(script.Args(eval=str(run_copy), videos_dir=str(tmp_path / "videos")))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert contents(run_copy) == before


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------------


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


class Bomb:
    """Ends the process when it is unpickled."""

    def __reduce__(self):
        return sys.exit, (99,)


@having("load_checkpoint")
@pytest.mark.parametrize(
    "damage",
    [truncated, empty, text, foreign_archive, bare_array, pickle_payload, raw_pickle],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("use", ["resume", "eval"])
def test_damaged_checkpoint(script, run_copy, damage, use, tmp_path, capsys):
    """The newest checkpoint is damaged or foreign: exit code 1, one line that names the file."""
    path = newest_checkpoint(run_copy)
    damage(path)
    args = script.Args(**{use: str(run_copy)}, videos_dir=str(tmp_path / "videos"))
    code, error = failure(script, args, capsys)
    assert code == 1 and path.name in error


def middles_of_members(path):
    """The positions in an uncompressed archive at which the data of its arrays have their middles."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        middles = set()
        for member in archive.infolist():
            file.seek(member.header_offset + 26)  # lengths of the name and of the extra field, then these two
            lengths = struct.unpack("<HH", file.read(4))
            middles.add(file.tell() + sum(lengths) + member.file_size // 2)
    return middles


@once("load_checkpoint")
def test_flipped_bits_never_go_unnoticed(script, run_copy):
    """One bit flipped in each array and all over the file: an error, or (in bytes without meaning) the same state."""
    path = newest_checkpoint(run_copy)
    original = path.read_bytes()
    with np.load(path) as file:
        arrays = {name: file[name].tobytes() for name in file.files}
    args = script.load_args(run_copy)
    template = script.init_train_state(args, script.seed_keys(args))
    middles = middles_of_members(path)
    everywhere = set(np.random.default_rng(0).integers(len(original), size=60))
    tail = set(range(len(original) - 100, len(original)))  # the archive's directory
    for position in sorted(middles | everywhere | tail):
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            state = script.load_checkpoint(run_copy, template)
        except script.RunError:
            continue
        assert position not in middles
        loaded = {name: np.asarray(x).tobytes() for name, x in script.flatten_state(state).items()}
        assert loaded == {name: arrays[name] for name in loaded}, position


@having("load_run")
def test_checkpoint_of_other_shapes(script, run_copy, tmp_path, capsys):
    """args.json says twice as many environments as the checkpoint has."""
    saved = json.loads((run_copy / "args.json").read_text())
    (run_copy / "args.json").write_text(json.dumps(saved | {"num_envs": 2 * saved["num_envs"]}))
    code, error = failure(script, script.Args(resume=str(run_copy), videos_dir=str(tmp_path)), capsys)
    assert code == 1 and "does not fit" in error


@pytest.mark.parametrize("use", ["resume", "eval"])
def test_folder_that_is_no_run(script, use, tmp_path, capsys):
    """Exit code 1 and nothing written, for a missing folder, an empty one and one with a broken args.json."""
    for name, saved in [("missing", None), ("empty", None), ("broken", '{"seed": '), ("list", "[]"), ("bytes", "\0")]:
        folder = tmp_path / name
        if name != "missing":
            folder.mkdir()
        if saved:
            (folder / "args.json").write_text(saved)
        before = contents(tmp_path)
        args = script.Args(**{use: str(folder)}, videos_dir=str(tmp_path / "videos"))
        code, error = failure(script, args, capsys)
        assert code == 1 and str(folder) in error
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "changed", [{"num_steps": "8"}, {"num_steps": 8.0}, {"anneal_lr": 1}, {"exp_name": None}, {"runs_dir": 5}]
)
def test_values_of_the_wrong_type(script, changed, run_copy):
    """Refused from Python and in a saved args.json."""
    with pytest.raises(script.UsageError, match="wrong type"):
        quick_args(script, **changed)
    saved = json.loads((run_copy / "args.json").read_text())
    (run_copy / "args.json").write_text(json.dumps(saved | changed))
    with pytest.raises(script.RunError, match="wrong type"):
        script.load_args(run_copy)


def test_whole_numbers_are_fine_where_fractions_are(script, run_copy):
    """JSON, like Python, tells 1 from 1.0; a run of `Args(vf_coef=1)` can be loaded."""
    saved = json.loads((run_copy / "args.json").read_text())
    (run_copy / "args.json").write_text(json.dumps(saved | {"vf_coef": 1}))
    assert script.load_args(run_copy).vf_coef == 1


@pytest.mark.parametrize(
    "flag, value", [("learning_rate", 0.5), ("num_envs", 16), ("seed", 7), ("gamma", 0.5), ("total_timesteps", 10**6)]
)
def test_resume_with_another_flag(script, run_copy, flag, value, tmp_path, capsys):
    """A flag that is part of the run must not change: wrong usage."""
    args = script.Args(resume=str(run_copy), videos_dir=str(tmp_path / "videos"), **{flag: value})
    code, error = failure(script, args, capsys)
    assert code == 2 and f"--{flag.replace('_', '-')}" in error


def test_flags_that_resume_may_change(script):
    """They and no others change; they are checked with the run's own flags, not with the defaults."""
    saved = quick_args(script, num_envs=3, num_steps=10, num_minibatches=1, total_timesteps=300, anneal_lr=False)
    given = dict(total_timesteps=90, eval_episodes=7, log_interval=3, videos_dir="elsewhere", track=True)
    if not hasattr(script, "make_pool"):
        given |= {"num_devices": 3}
    merged = script.merge_args(script.Args(resume="run", **given), saved)
    assert merged == dataclasses.replace(saved, **given)
    with pytest.raises(script.UsageError, match="--total-timesteps"):
        script.merge_args(script.Args(resume="run", total_timesteps=20), saved)


@once("seed_keys")
def test_all_seeds_have_keys(script):
    """Up to the largest that `Args` takes, and each seed's key is that of JAX."""
    keys = script.seed_keys(quick_args(script, seed=2**32 - 2, num_seeds=2))
    expected = [jax.random.key(np.uint32(seed)) for seed in (2**32 - 2, 2**32 - 1)]
    np.testing.assert_array_equal(jax.random.key_data(keys), [jax.random.key_data(key) for key in expected])


def test_losses_that_are_not_finite(script, run_copy, tmp_path, capsys):
    """Resumed with an absurd learning rate: exit code 1, one line; the good checkpoints stay."""
    saved = json.loads((run_copy / "args.json").read_text())
    changes = {"learning_rate": 1e30, "total_timesteps": 4 * saved["total_timesteps"]}
    (run_copy / "args.json").write_text(json.dumps(saved | changes))
    before = contents(run_copy / "checkpoints")
    code, error = failure(script, script.Args(resume=str(run_copy), videos_dir=str(tmp_path)), capsys)
    assert code == 1 and "not finite" in error
    assert contents(run_copy / "checkpoints") == before
