"""The command line: flags, what a run writes, videos, files that do not fit, NaN, full disks."""

import dataclasses
import json
import math
import os
import pathlib
import pwd
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    QUICK,
    arrays_of,
    contents,
    each_text,
    finish,
    having,
    json_of,
    once,
    quick_args,
    quick_words,
    report_maximum,
    run_main,
    run_of,
    scalars,
    start,
    words_of,
)

SUMMARY_KEYS = set(
    """args total_timesteps failed_seeds train_return_mean eval_episodes eval_return_mean
    eval_return_std eval_length_mean per_seed sps compile_seconds train_seconds wall_seconds device
    jax_version""".split()
)
TAGS = set(
    """charts/reward_mean charts/value_mean
    charts/episodic_return charts/episodic_length charts/learning_rate charts/SPS
    losses/policy_loss losses/value_loss losses/entropy losses/approx_kl losses/old_approx_kl
    losses/clipfrac losses/explained_variance losses/grad_norm eval/episodic_return""".split()
)


def refusal(script, function, *args, **options):
    """The message of the `UserError` that a call raises; it is one line, as users will see it."""
    with pytest.raises(script.UserError) as info:
        function(*args, **options)
    assert len(str(info.value).splitlines()) == 1
    return str(info.value)


# --- Flags ---


BAD_FLAGS = """--num-envs=0 --num-steps=-1 --num-minibatches=7 --num-minibatches=0 --update-epochs=0
    --total-timesteps=1 --total-timesteps=nan --total-timesteps=-inf --num-seeds=0 --log-interval=0
    --checkpoint-interval=0 --eval-episodes=0 --learning-rate=nan --target-kl=nan""".split()


@pytest.mark.quick
@pytest.mark.parametrize("word", BAD_FLAGS)
def test_bad_flags_are_refused(script, word, tmp_path):
    """In one line that names the flag, before anything is compiled or written."""
    message = refusal(script, script.main, [*quick_words(script, tmp_path), word])
    assert word.partition("=")[0] in message
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
def test_flags_that_were_deleted_are_not_asked_for(script):
    """Each of the fields that `check_args` only compares with limits may go."""
    args = quick_args(script)
    for name in "log_interval eval_episodes update_epochs gamma clip_coef adam_eps".split():
        fields = vars(args) | {"batch_size": args.batch_size, "num_updates": args.num_updates}
        del fields[name]
        script.check_args(types.SimpleNamespace(**fields))


@pytest.mark.quick
def test_help_names_every_flag_in_a_line(script, capsys):
    """And exits with status 0. Texts of more than a line break apart there."""
    with pytest.raises(SystemExit) as exit:
        script.main(["--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    for field in dataclasses.fields(script.Args):
        assert f"--{field.name.replace('_', '-')}" in text


def error_of(process):
    """The only line on stderr of a process that ends with status 1."""
    (line,) = process.communicate()[1].splitlines()
    assert process.returncode == 1 and line.startswith("error: ")
    return line


def limited(script, limit):
    """Code that runs the script with a limit of the operating system."""
    return f"""import resource, runpy, sys
sys.argv[0] = "{script.__name__}.py"
resource.setrlimit(resource.{limit})
runpy.run_path(sys.argv[0], run_name="__main__")"""


@once("Logger")
def test_exit_statuses(script, tmp_path):
    """Of processes: 1 for an error of the script, 2 for a word that is no flag, as tyro has it."""
    assert "--num-minibatches" in error_of(start(script, tmp_path, num_minibatches=7))
    process = start(script, tmp_path, no_such_flag=1)
    error = process.communicate()[1]
    assert process.returncode == 2 and "--no-such-flag" in error and "Traceback" not in error
    assert not (tmp_path / "runs").exists()


@once("main")
def test_what_the_machine_refuses(script, tmp_path):
    """Too little memory: one line, not a traceback."""
    options = QUICK[script.__name__] | dict(total_timesteps=128, eval_episodes=10**8)
    limit = limited(script, "RLIMIT_AS, (2**34, 2**34)")  # 16 GiB
    assert "Out of memory" in error_of(start(script, tmp_path, 1, code=limit, **options))


@each_text("main", lacking="start_episodes")  # Atari's environments are not of its file
@pytest.mark.quick
def test_errors_of_users_code_keep_their_traceback(script, tmp_path, monkeypatch):
    """An environment whose `step` raises OSError, as damaged files do: not mistaken for one."""

    def step(self, key, state, action):
        raise OSError("of my own")

    monkeypatch.setattr(type(script.make_env(quick_args(script))), "step", step)
    with pytest.raises(OSError, match="of my own") as info:
        script.main(quick_words(script, tmp_path))
    assert "step" in [entry.name for entry in info.traceback]
    assert not list(tmp_path.iterdir())


@having("jit_function")
@pytest.mark.quick
def test_wrong_evaluation_is_noticed_before_compilation(script, tmp_path, monkeypatch):
    """All programs are traced before the update is compiled, and before a folder is made."""

    def wrong(*inputs):
        raise TypeError("of my own")

    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    name = "evaluation_actions" if hasattr(script, "evaluation_actions") else "evaluate"
    monkeypatch.setattr(script, name, wrong)
    with pytest.raises(TypeError, match="of my own"):
        script.main(quick_words(script, tmp_path))
    assert not list(tmp_path.iterdir())


# --- Numbers that need no compiling ---


@having("update_seeds")
@pytest.mark.quick
def test_other_numbers_are_the_same_programs(script):
    """Word for word, as they go to the compiler; other sizes are other programs."""
    args = script.parse_args(words_of(**QUICK[script.__name__]))
    every = {name: 0.5 for name, value in vars(args).items() if isinstance(value, float)}
    every["total_timesteps"] = 2.0 * args.total_timesteps

    def texts(args):
        numbers = script.float_inputs(args)
        init = script.jit_function(args, script.init_states)
        state = jax.eval_shape(init, numbers)
        lowered = [
            init.lower(numbers),
            script.jit_function(args, script.update_seeds).lower(numbers, state),
            script.jit_function(args, script.evaluate_seeds).lower(numbers, state.params),
        ]
        return [program.as_text() for program in lowered]

    first = texts(args)
    assert len(every) > 8 and texts(dataclasses.replace(args, seed=2, **every)) == first
    others = texts(dataclasses.replace(args, update_epochs=2, eval_episodes=2))
    assert [ours == theirs for ours, theirs in zip(others, first)] == [True, False, False]


@once("main")
def test_other_numbers_are_found_in_the_cache(script, tmp_path):
    """A second process with other numbers writes no program, not even a tiny one."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    quick, programs = QUICK[script.__name__], []
    others = dict(seed=2, learning_rate=1e-4, gamma=0.9, clip_coef=0.3, ent_coef=0.02)
    others |= dict(total_timesteps=2 * quick["total_timesteps"])
    for name, options in [("first", {}), ("second", others)]:
        finish(script, tmp_path / name, env=cache, **quick | options)
        programs.append({path.name for path in (tmp_path / "cache").glob("*-cache")})
    assert programs[0] == programs[1] and len(programs[0]) >= 3


@once("use_compilation_cache")
@pytest.mark.quick
def test_folder_of_the_cache(script, tmp_path, monkeypatch):
    """In the user's home; a user whom the system does not know, without HOME, has none."""

    def unknown(uid):
        raise KeyError(uid)

    before = jax.config.jax_compilation_cache_dir
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    try:
        script.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("HOME", str(tmp_path))
        script.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == f"{tmp_path}/.cache/jax-ppo"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


# --- What a run writes ---


def test_summary_and_events_are_complete(script, finished_run):
    """A run of the script alone in an empty folder leaves a summary, events and a video."""
    summary = json_of(finished_run)
    assert SUMMARY_KEYS <= set(summary)
    assert summary["total_timesteps"] == QUICK[script.__name__]["total_timesteps"]
    assert summary["args"] == json_of(finished_run, "args")
    assert len(list((finished_run.parents[1] / "videos" / finished_run.name).iterdir())) == 1
    assert re.fullmatch(rf".+__{script.__name__}__1__\d+_[0-9a-f]{{6}}", finished_run.name)
    logged = scalars(finished_run)
    assert TAGS <= set(logged)
    assert all(np.isfinite(value) for events in logged.values() for _, value in events)
    expected = pytest.approx(summary["total_timesteps"] / summary["train_seconds"])
    assert summary["sps"] == expected
    assert summary["compile_seconds"] + summary["train_seconds"] < summary["wall_seconds"]
    files = sorted(path.name.partition(".out")[0] for path in finished_run.iterdir())
    assert files == ["args.json", "checkpoint.npz", "events", "summary.json"]


def test_every_update_is_logged(script, finished_run):
    """The steps are those of consecutive updates; values belong to their steps."""
    args, logged = script.load_args(finished_run), scalars(finished_run)
    every = [args.batch_size * update for update in range(1, int(args.num_updates) + 1)]
    for tag in TAGS - {"charts/SPS", "eval/episodic_return"}:
        steps = [step for step, _ in logged[tag]]
        first = every.index(steps[0])  # nothing is logged before an episode ends
        assert steps == every[first:] and (first == 0 or tag.startswith("charts/episodic"))
    assert [step for step, _ in logged["eval/episodic_return"]] == every[-1:]
    for step, rate in logged["charts/learning_rate"]:
        done = step / args.batch_size - 1  # updates before the logged one
        left = 1 - done / args.num_updates * args.anneal_lr
        assert rate == pytest.approx(args.learning_rate * left, rel=1e-5)
    last = arrays_of(finished_run)["stats/last_return"]
    expected = pytest.approx(last[np.isfinite(last)].mean(), rel=1e-5)
    assert logged["charts/episodic_return"][-1][1] == expected


@once("Logger")
def test_metric_of_a_user_reaches_tensorboard(script, tmp_path, monkeypatch):
    """A tag in _max added to `ppo_loss`: each update's value is the greatest of its minibatches."""
    seen = report_maximum(script, monkeypatch)
    args = quick_args(script)
    run_dir = run_main(script, tmp_path, total_timesteps=4 * args.batch_size)
    jax.effects_barrier()
    expected = np.reshape(seen, (4, args.update_epochs * args.num_minibatches)).max(1)
    steps, values = zip(*scalars(run_dir)["losses/ratio_max"], strict=True)
    assert steps == tuple(args.batch_size * update for update in (1, 2, 3, 4))
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert len(set(expected)) == 4 and expected.min() > 1


@once("Logger")
@pytest.mark.quick
def test_two_updates_are_under_way_at_most(script, tmp_path, monkeypatch):
    """The third one is begun after the first one's end: a stop waits for two."""
    waited_for = []
    monkeypatch.setattr(jax, "block_until_ready", waited_for.extend)
    logger = script.Logger(quick_args(script, log_interval=100), tmp_path, 0)
    for update in (1, 2, 3, 4):
        logger.log(update, dict.fromkeys(TAGS, np.ones(1)))
        assert [number for number, _ in waited_for] == list(range(1, update))
    logger.close()


@once("Logger")
def test_first_line_of_progress_comes_after_the_first_update(script, tmp_path, capsys):
    """Whatever the log interval."""
    args = quick_args(script)
    run_main(script, tmp_path, log_interval=1000, checkpoint_interval=1000)
    lines = [line for line in capsys.readouterr().out.splitlines() if " left, " in line]
    starts = [f"{args.batch_size} steps (5%)", f"{int(args.total_timesteps):,} steps (100%)"]
    assert len(lines) == 2
    assert [line.startswith(start) for line, start in zip(lines, starts)] == [True, True]


@once("write_json")
@pytest.mark.quick
def test_json_is_strict(script, tmp_path):
    """Infinity, say `--max-grad-norm inf`, is read back; NaN becomes null, but not in words."""
    run_dir = run_main(script, tmp_path, max_grad_norm="inf", total_timesteps=256)
    assert script.load_args(run_dir).max_grad_norm == math.inf
    content = {"a": math.nan, "b": [1.0, math.nan], "c": "NaNs", "d": math.inf}
    script.write_json(tmp_path / "x.json", content)

    def strict(name):
        raise ValueError(f"{name} is no JSON")

    loaded = json.loads((tmp_path / "x.json").read_text(), parse_constant=strict)
    assert loaded == {"a": None, "b": [1.0, None], "c": "NaNs", "d": math.inf}


@each_text("main", lacking="start_episodes")
def test_evaluations_and_videos_during_training(script, tmp_path, capsys):
    """`--eval-interval 5 --capture-video`; the last evaluation is what `--eval` repeats."""
    run_dir = run_main(script, tmp_path, eval_interval=5, capture_video=True)
    args, logged = script.load_args(run_dir), scalars(run_dir)
    steps = [args.batch_size * n for n in (5, 10, 15, 20)]
    assert [step for step, _ in logged["eval/episodic_return"]] == steps
    videos = {path.stem for path in (tmp_path / "videos" / run_dir.name).iterdir()}
    assert videos == {f"step_{step}" for step in steps}
    assert f"run: {run_dir}" in capsys.readouterr().out.splitlines()
    before = contents(run_dir)
    script.main(words_of(eval=run_dir))
    summary, evaluation = json_of(run_dir), json_of(run_dir, "eval")
    assert evaluation.pop("args") == summary["args"] | {"eval": str(run_dir)}
    assert evaluation == {name: summary[name] for name in evaluation}
    assert logged["eval/episodic_return"][-1][1] == pytest.approx(summary["eval_return_mean"])
    (run_dir / "eval.json").unlink()
    assert contents(run_dir) == before
    assert "eval" in {path.stem for path in (tmp_path / "videos" / run_dir.name).iterdir()}
    script.main(words_of(eval=run_dir, eval_episodes=7, seed=5, num_envs=2, learning_rate=1.0))
    evaluation = json_of(run_dir, "eval")
    assert evaluation["eval_episodes"] == 7 and evaluation["args"]["seed"] == 5


@once("try_video")
def test_video_that_fails_is_a_warning(script, tmp_path, monkeypatch, capsys):
    """During training, at the end and by `--eval`: everything else is there, the result too."""

    def record_video(*args, **options):
        raise ZeroDivisionError("of my own")

    monkeypatch.setattr(script, "record_video", record_video)
    run_dir = run_main(script, tmp_path, capture_video=True, eval_interval=10)
    script.main(words_of(eval=run_dir))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 3 and set(lines) == {"warning: no video: ZeroDivisionError: of my own"}
    assert out.count(" episodes: return_mean") == 2
    assert SUMMARY_KEYS <= set(json_of(run_dir))
    assert (run_dir / "eval.json").exists() and arrays_of(run_dir)


@once("finish_run")
@pytest.mark.parametrize("mode, bias", [("greedy", 0), ("sampled", 0), ("greedy", 99)])
def test_hint_at_sampled_actions(script, mode, bias, tmp_path, monkeypatch, capsys):
    """A greedy evaluation far below training prints the hint; others do not."""
    scores = script.evaluation_scores
    biased = lambda evaluation: {name: 0 * x + bias for name, x in scores(evaluation).items()}
    monkeypatch.setattr(script, "evaluation_scores", biased)
    run_dir = run_main(script, tmp_path, eval_mode=mode)
    summary = json_of(run_dir)
    logged = scalars(run_dir)["charts/episodic_return"][-1][1]
    assert summary["train_return_mean"] == pytest.approx(logged) and logged > 8
    out = capsys.readouterr().out
    assert f"last episodes of training (sampled actions): return_mean {logged:.4g}\n" in out
    hint = "greedy actions are far worse: try --eval-mode sampled" in out
    assert hint == (mode == "greedy" and bias == 0)


@once("main")
@pytest.mark.quick
def test_metrics_are_scalars(script, tmp_path, monkeypatch):
    """A vector, of the loss or of the environment, is an error that names it."""
    ppo_loss, cls = script.ppo_loss, type(script.make_env(quick_args(script)))

    def with_vector(*inputs):
        loss, metrics = ppo_loss(*inputs)
        return loss, metrics | {"mine": jnp.ones(2)}

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="^mine must have"):
        patch.setattr(script, "ppo_loss", with_vector)
        run_main(script, tmp_path)
    vector = lambda self, state: {"wide": jnp.ones(3)}
    monkeypatch.setattr(cls, "metrics", vector, raising=False)
    with pytest.raises(ValueError, match="^wide must have"):
        run_main(script, tmp_path)


@once("main")
@pytest.mark.quick
def test_a_metric_of_the_same_name(script, tmp_path, monkeypatch):
    """An environment may call one return_mean."""
    cls = type(script.make_env(quick_args(script)))
    metrics = lambda self, state: {"return_mean": jnp.float32(-7)}
    monkeypatch.setattr(cls, "metrics", metrics, raising=False)
    summary = json_of(run_main(script, tmp_path, total_timesteps=128))
    assert summary["eval_env_return_mean"] == -7 and summary["eval_return_mean"] > 0


@once("Logger")
def test_folder_of_several_seeds(script, tmp_path):
    """A TensorBoard run and the numbers of every result for each seed."""
    steps = 2 * quick_args(script).batch_size
    run_dir = run_main(script, tmp_path, num_seeds=2, seed=5, total_timesteps=steps)
    folders = [run_dir / f"seed_{seed}" for seed in (5, 6)]
    logged = [scalars(folder)["eval/episodic_return"][-1][1] for folder in folders]
    summary = json_of(run_dir)
    assert summary["per_seed"]["eval_return_mean"] == pytest.approx(logged)
    assert summary["eval_return_mean"] == pytest.approx(np.mean(logged))
    args, params = script.load_run(run_dir)
    assert args.seed == 5 and {len(leaf) for leaf in jax.tree.leaves(params)} == {2}


@once("start_tracking")
@pytest.mark.quick
def test_tracking(script, tmp_path, monkeypatch):
    """Every number goes to Weights & Biases under the run's name."""
    calls, rows = [], {}
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **options: calls.append(options)
    wandb.log = lambda values, step: rows.setdefault(step, {}).update(values)
    wandb.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run_dir = run_main(script, tmp_path, track=True)
    assert calls[0]["id"] == run_dir.name and calls[0]["config"]["track"]
    assert calls[1:] == ["finish"]
    logged = scalars(run_dir)
    for tag in TAGS:
        tracked = [(step, row[tag]) for step, row in rows.items() if tag in row]
        np.testing.assert_allclose(tracked, logged[tag], rtol=1e-6)


@having("start_tracking")
@pytest.mark.quick
@pytest.mark.parametrize("fault", ["not installed", "no login"])
def test_tracking_that_cannot_start(script, fault, tmp_path, monkeypatch):
    """One line before the update is compiled, and no folder."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    wandb = None  # `import wandb` fails
    if fault == "no login":
        wandb = types.ModuleType("wandb")

        def init(**options):
            raise RuntimeError("api_key not configured (no-tty)")

        wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    message = refusal(script, script.main, quick_words(script, tmp_path, track=True))
    assert message.startswith("--track: ") and not list(tmp_path.iterdir())


# --- Other ways to start ---


@once("train")
def test_without_jit(script, tmp_path):
    """`JAX_DISABLE_JIT=1`, with which people debug."""
    sizes = dict(num_envs=2, num_steps=2, num_minibatches=1, update_epochs=1, eval_episodes=1)
    code = f"""import dataclasses, sys, {script.__name__} as script
make_env = script.make_env
class Short:
    max_episode_steps = 3
    def __init__(self, env): self.env = env
    def __getattr__(self, name): return getattr(self.env, name)
script.make_env = lambda args: Short(make_env(args))
script.main(sys.argv[1:])"""
    options = QUICK[script.__name__] | sizes | dict(total_timesteps=8)
    finish(script, tmp_path, 1, code=code, env={"JAX_DISABLE_JIT": "1"}, **options)


# --- Files that do not fit ---


class Bomb:
    """Ends the process when it is unpickled."""

    def __reduce__(self):
        return sys.exit, (99,)


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) * 5 // 6] ^= 1  # among the parameters
    path.write_bytes(content)


def change_all(path, change):
    np.savez(path, **{name: change(x) for name, x in arrays_of(path.parent).items()})


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "flipped bit": flip_bit,
    "foreign arrays": lambda path: np.savez(path, weights=np.zeros(3)),
    "other shapes": lambda path: change_all(path, lambda x: x[None]),
    "pickled objects": lambda path: change_all(path, lambda x: np.array([Bomb()], object)),
}


@each_text("main")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(script, run_copy, damage, tmp_path):
    """A line that names the file; nothing is written."""
    path = run_copy / "checkpoint.npz"
    DAMAGES[damage](path)
    before = contents(tmp_path)
    for use in ("resume", "eval"):
        words = words_of(**{use: run_copy}, videos_dir=tmp_path / "videos")
        assert path.name in refusal(script, script.main, words)
        assert contents(tmp_path) == before


@once("load_args")
@pytest.mark.quick
@pytest.mark.parametrize("use", ["resume", "eval"])
@pytest.mark.parametrize("text", [None, "", "[]", '{"num_envs": "many"}', '{"num_envs": 0}'])
def test_folder_that_is_no_run(script, use, text, tmp_path):
    """No args.json, or one with other contents: one line, nothing is written."""
    if text is not None:
        (tmp_path / "args.json").write_text(text)
    assert str(tmp_path) in refusal(script, script.main, words_of(**{use: tmp_path}))
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"] * (text is not None)


@each_text("main")
def test_resume_changes_flags(script, run_copy, tmp_path, capsys):
    """Most may change, and the run says which; of one that cannot, nothing is written."""
    batch_size = quick_args(script).batch_size
    options = dict(resume=run_copy, learning_rate=1e-5, total_timesteps=22 * batch_size)
    script.main(words_of(**options, videos_dir=tmp_path / "videos"))
    out = capsys.readouterr().out
    assert "--learning-rate: " in out and "becomes 1e-05" in out
    assert script.load_args(run_copy).learning_rate == 1e-5
    assert arrays_of(run_copy)["update"] == 22
    logged = [step for step, _ in scalars(run_copy)["losses/policy_loss"]]
    assert logged == [batch_size * n for n in range(1, 23)]
    before = contents(run_copy)
    changes = ["--num-envs=2", "--seed=2", "--num-seeds=2"]
    other_id = {"ppo_minigrid_rnn": "Empty-5x5", "ppo_atari_envpool_xla_jax": "Pong-v5"}
    if script.__name__ in other_id:  # which has the same arrays
        changes.append(f"--env-id={other_id[script.__name__]}")
    words = words_of(resume=run_copy, total_timesteps=50 * batch_size)
    for change in changes:
        message = refusal(script, script.main, [*words, change])
        assert change.partition("=")[0] in message and "cannot change" in message
    assert contents(run_copy) == before


@once("main")
def test_resuming_a_finished_run(script, run_copy):
    """Changes nothing; where only the summary is missing, it is made up for."""
    before = contents(run_copy)
    assert "is finished" in refusal(script, script.main, words_of(resume=run_copy))
    assert contents(run_copy) == before
    expected = json_of(run_copy)
    (run_copy / "summary.json").unlink()
    script.main(words_of(resume=run_copy, videos_dir=run_copy.parent))
    summary = json_of(run_copy)
    assert summary["eval_return_mean"] == expected["eval_return_mean"] and summary["sps"] is None


@once("load_args")
@pytest.mark.quick
def test_run_of_a_program_with_its_own_environment(script, tmp_path):
    """The stock script says who can load it."""
    script.write_json(tmp_path / "args.json", vars(quick_args(script)) | {"my_flag": 1})
    assert "my_flag" in refusal(script, script.load_args, tmp_path)


@once("named_arrays")
@pytest.mark.quick
def test_fields_that_users_add(script, tmp_path, monkeypatch):
    """A tuple among the flags, keys and structures among the state: saved and loaded alike."""

    @dataclasses.dataclass
    class Args(script.Args):
        sizes: tuple[int, ...] = (64, 64)

    monkeypatch.setattr(script, "Args", Args)
    args = Args(sizes=(3, 4, 5))
    script.write_json(tmp_path / "args.json", vars(args))
    assert script.load_args(tmp_path) == args
    keys = [jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 2)]
    types = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4]
    arrays = {"z": jnp.ones(2), "a": [jnp.arange(3).astype(dtype) for dtype in types]}
    state = {"update": jnp.zeros(1, jnp.int32), "more": [*keys, arrays]}
    script.save_checkpoint(tmp_path, state)
    loaded = script.load_checkpoint(tmp_path, jax.eval_shape(lambda: state))
    for ours, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert ours.dtype == expected.dtype and (ours == expected).all()
    names = ["update", "more/0", "more/1", "more/2/z", *(f"more/2/a/{i}" for i in range(3))]
    assert set(arrays_of(tmp_path)) == set(names)


@once("load_checkpoint")
@pytest.mark.quick
def test_order_of_a_state(script, tmp_path):
    """Fields in an order that is not alphabetical, and another type than the saved one."""
    state = script.EpisodeStats(*(jnp.full(3, n, jnp.bfloat16) for n in (4, 3, 2, 1)))
    script.save_checkpoint(tmp_path, state)
    loaded = script.load_checkpoint(tmp_path, state)
    assert [float(x[0]) for x in loaded] == [4, 3, 2, 1]
    message = refusal(script, script.load_checkpoint, tmp_path, script.init_episode_stats(3))
    assert "running_return is |V2 (3,), not float32 (3,)" in message


@once("check_args")
@pytest.mark.quick
@pytest.mark.parametrize("value", [pathlib.Path("x"), ((1, 2), (3,))])
def test_flags_that_cannot_be_saved(script, value):
    """The message names the flag."""
    args = quick_args(script)
    args.my_flag = value
    assert refusal(script, script.check_args, args).startswith("--my-flag: args.json cannot store")
    args.my_flag = (1, 2)
    script.check_args(args)


# --- NaN and full disks ---


@having("init_mlp")
@pytest.mark.parametrize("part", ["observations", "rewards", "parameters"])
def test_source_of_nan_is_named(script, part, run_copy, tmp_path, monkeypatch, capsys):
    """One line for the seed, one for the end. The last good checkpoint stays."""
    cls = type(script.make_env(quick_args(script)))
    observe, step = cls.observe, cls.step

    def nan_step(*inputs):
        state, reward, terminated = step(*inputs)
        return state, reward + jnp.nan, terminated

    if part == "observations":
        monkeypatch.setattr(cls, "observe", lambda self, state: observe(self, state) + jnp.nan)
    if part == "rewards":
        monkeypatch.setattr(cls, "step", nan_step)
    before = (run_copy / "checkpoint.npz").read_bytes()
    rate = dict(learning_rate=1e30) if part == "parameters" else {}
    steps = 4 * QUICK[script.__name__]["total_timesteps"]
    words = words_of(resume=run_copy, total_timesteps=steps, checkpoint_interval=3, **rate)
    message = refusal(script, script.main, [*words, f"--videos-dir={tmp_path}"])
    assert message.startswith(f"all seeds have failed: NaN in {part}")
    line = rf"^seed 1 failed at update \d+: NaN in {part}"
    assert len(re.findall(line, capsys.readouterr().out, re.MULTILINE)) == 1
    assert (run_copy / "checkpoint.npz").read_bytes() == before


@once("Logger")
def test_seed_with_nan_is_named_and_others_go_on(script, tmp_path, capsys):
    """Three seeds resume from a checkpoint in which the second one's parameters are NaN."""
    args = quick_args(script, num_seeds=3, videos_dir=str(tmp_path))
    state = script.init_states(args)
    params = jax.tree.map(lambda p: p.at[1].set(jnp.nan), state.params)
    script.save_checkpoint(tmp_path, state._replace(params=params))
    script.write_json(tmp_path / "args.json", vars(args))
    script.main(words_of(resume=tmp_path))
    named = re.findall(r"^seed (\d+) failed", capsys.readouterr().out, re.MULTILINE)
    assert named == ["2"]
    summary = json_of(tmp_path)
    assert summary["failed_seeds"] == [2]
    mean = np.mean(summary["per_seed"]["eval_return_mean"])
    assert summary["eval_return_mean"] == pytest.approx(mean)
    _, params = script.load_run(tmp_path)
    finite = [np.isfinite(leaf).reshape(3, -1).all(1) for leaf in jax.tree.leaves(params)]
    assert np.array(finite).all(0).tolist() == [True, False, True]


@each_text("main")
@pytest.mark.quick
def test_unwritable_runs_folder(script, tmp_path):
    """One line that names it."""
    (tmp_path / "file").write_text("")
    words = quick_words(script, tmp_path, runs_dir=tmp_path / "file" / "runs")
    assert str(tmp_path / "file") in refusal(script, script.main, words)


@once("Logger")
def test_full_disk_for_events(script, tmp_path):
    """Nothing more fits into the event file: one line that names it; the checkpoint stays."""
    code = f"""import io, sys, {script.__name__} as script
class Full(io.FileIO):
    def write(self, content):
        if self.tell() > 8000:
            raise OSError(28, "No space left on device")
        return super().write(content)
script.open = lambda path, *options, **more: Full(path, "a")
try:
    script.main(sys.argv[1:])
except script.UserError as error:
    sys.exit(f"error: {{error}}")"""
    options = QUICK[script.__name__] | dict(total_timesteps=10**6)
    line = error_of(start(script, tmp_path, code=code, **options))
    run_dir = run_of(tmp_path)
    assert "events" in line and "No space left" in line
    assert run_dir.name in line and arrays_of(run_dir)["update"][0] > 3


@once("write_file")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of processes are POSIX's")
def test_limit_of_file_sizes(script, tmp_path):
    """`ulimit -f 12`: the checkpoint cannot be written; one line, no traceback."""
    options = QUICK[script.__name__] | dict(total_timesteps=64_000)
    limit = limited(script, "RLIMIT_FSIZE, (12288, 12288)")
    env = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    line = error_of(start(script, tmp_path, code=limit, env=env, **options))
    assert run_of(tmp_path).name in line
    assert not list(run_of(tmp_path).glob("checkpoint.*"))  # a part would keep the disk full
