"""Learning curves and human-normalized scores of Atari runs.

    python benchmarks/atari_curves.py runs/Pong-v5__* runs/Breakout-v5__*
    python benchmarks/atari_curves.py runs/<run_name> --out curves --commit 96b6b48

Writes <out>.png with one panel per game: smoothed training returns over steps, labeled by seed and
by the flags that differ, and published scores of random play, a human tester and CleanRL
(atari_scores.json). Writes <out>.json with the last evaluation, the human-normalized score, hours,
number of processes and curve of every run.

A resumed run has one curve, without the points that a process logged after its last checkpoint.
Hours include evaluations and lost updates, but not the time between two processes.
"""

import argparse
import datetime
import json
import pathlib

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "atari_curves"
SCORES = json.loads((ROOT / "benchmarks" / "atari_scores.json").read_text())["games"]
LINES = {  # label, line style
    "random": ("random play, published", "dotted"),
    "human": ("human tester, published", "dashed"),
    "cleanrl": ("CleanRL's documentation, 10 million steps", "dashdot"),
}


def human_normalized(env_id, score):
    """0: random play, 1: human tester; None for games without published scores."""
    published = SCORES.get(env_id.removesuffix("-v5"))
    if published is None:
        return None
    return (score - published["random"]) / (published["human"] - published["random"])


def read_curve(folder, tag="charts/episodic_return"):
    """Returns ([(steps, hours, value)], number of processes) of one agent.

    `folder` contains one event file per process.
    """
    curve, seconds_before, processes = [], 0.0, 0
    for path in sorted(folder.glob("events.out.tfevents.*")):  # names contain the start time
        start = None
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.HasField("session_log"):  # training starts after this step
                start = event.wall_time
                processes += 1
                curve = [point for point in curve if point[0] <= event.step]
            if start is None:
                continue
            seconds = seconds_before + event.wall_time - start
            for value in event.summary.value:
                if value.tag == tag:
                    curve.append((event.step, seconds / 3600, value.simple_value))
        if start is not None:
            seconds_before = seconds
    return curve, processes


def read_run(run_dir):
    """Returns the entry of a run in <out>.json, with the curves of all its agents."""
    args = json.loads((run_dir / "args.json").read_text())
    summary = {}
    if (run_dir / "summary.json").is_file():
        summary = json.loads((run_dir / "summary.json").read_text())
    names = "eval_return_mean eval_return_std eval_episodes eval_mode eval_protocol per_seed"
    evaluation = {name: summary[name] for name in names.split() if name in summary}
    if "eval_return_mean" in evaluation:
        score = human_normalized(args["env_id"], evaluation["eval_return_mean"])
        evaluation["human_normalized_score"] = score
    curves = {}
    for seed in range(args["seed"], args["seed"] + args["num_seeds"]):
        folder = run_dir / f"seed_{seed}" if args["num_seeds"] > 1 else run_dir
        curves[seed], processes = read_curve(folder)
        if not curves[seed]:
            raise SystemExit(f"error: no finished game in {folder}")
    steps, hours, _ = curves[args["seed"]][-1]
    return {
        "env_id": args["env_id"],
        "total_timesteps": args["total_timesteps"],
        "timesteps": steps,
        "hours": hours,
        "resumed": processes - 1,
        "finished": bool(summary),
        "args": {name: x for name, x in args.items() if name not in ("runs_dir", "videos_dir")},
        **evaluation,
        "curve": "steps, hours, mean return of the last finished games",
        "curves": curves,
    }


def smooth(values, width):
    """Moving average over the last `width` values."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - width, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)


def draw(runs, path):
    """Plots return over steps, one panel per game."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    games = list(dict.fromkeys(run["env_id"] for run in runs))
    plt.style.use(pathlib.Path(__file__).with_name("plots.mplstyle"))
    figure, panels = plt.subplots(len(games), figsize=(7, 4 * len(games)), squeeze=False)
    for game, axes in zip(games, panels.flat):
        of_game = [run for run in runs if run["env_id"] == game]
        names = [name for name in of_game[0]["args"] if name != "seed"]
        names = [n for n in names if len({str(run["args"].get(n)) for run in of_game}) > 1]
        for run in of_game:
            flags = "".join(f"{name} {run['args'].get(name)}, " for name in names)
            for seed, curve in run["curves"].items():
                steps, _, values = np.array(curve).T
                values = smooth(values, max(1, len(values) // 100))
                axes.plot(steps / 1e6, values, label=f"{flags}seed {seed}")
        low, high = axes.get_ylim()
        for name, value in SCORES.get(game.removesuffix("-v5"), {}).items():
            label, linestyle = LINES[name]
            line = dict(color="gray", linestyle=linestyle, linewidth=1)
            axes.plot([], [], label=f"{label}: {value:,.1f}", **line)
            if value < high + 3 * (high - low):  # a higher line would flatten the curve
                axes.axhline(value, **line)
        axes.set(xlabel="million environment steps", ylabel="return", title=game)
        axes.legend()
    figure.savefig(path)
    plt.close(figure)


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="run folders")
    parser.add_argument("--commit", help="commit of the script, stored in the JSON file")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="path without suffix")
    choice = parser.parse_args()
    runs = {run_dir.resolve().name: read_run(run_dir) for run_dir in choice.runs}
    draw(list(runs.values()), choice.out.with_suffix(".png"))
    for name, run in runs.items():
        text = f"{name}: {run['timesteps']:,} steps, {run['hours']:.1f} hours"
        text += f", resumed {run['resumed']} times"
        if "eval_return_mean" in run:
            text += f", {run['eval_mode']} return {run['eval_return_mean']:.2f}"
        if run.get("human_normalized_score") is not None:
            text += f", human-normalized {run['human_normalized_score']:.2f}"
        print(text)
        for seed, curve in run["curves"].items():
            kept = curve[:: max(1, len(curve) // 100)]
            rows = [[step, round(hours, 4), round(value, 2)] for step, hours, value in kept]
            run["curves"][seed] = json.dumps(rows)
    result = {"commit": choice.commit, "date": datetime.date.today().isoformat(), "runs": runs}
    text = json.dumps(result, indent=2).replace('"[[', "[[").replace(']]"', "]]")  # compact
    choice.out.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
