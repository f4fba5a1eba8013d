"""Compares the scripts with those of an earlier commit: speed and time of whole processes.

    python benchmarks/compare.py --against 5c746eb --script ppo_cartpole_jax
    python benchmarks/compare.py --against 5c746eb --script ppo_cartpole_jax --cache
    python benchmarks/compare.py --against 5c746eb --out pairs.json -- --total-timesteps 1e6

Flags after `--` go to both versions. Every pair runs each version once, in alternating order. A
ratio is ours divided by theirs within one pair; the median over pairs is robust to drift of the
machine. For `sps` a ratio above 1 is better, for seconds a ratio below 1.

- `start_seconds`: from the start of the process to the line "compiled in ..."
- `process_seconds`: the whole process
- all others: values of summary.json

Without `--cache` every process compiles; with it an uncounted process fills the cache before. The
JSON file is written after every pair and keeps the rows of other scripts.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
MEASURED = """sps start_seconds compile_seconds train_seconds wall_seconds
    process_seconds""".split()


def text_at(commit, name):
    """Returns the bytes of a file at a commit, or None if it does not exist there."""
    show = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True)
    return show.stdout if show.returncode == 0 else None


def run(path, flags, cache):
    """Runs a script in its folder; returns the MEASURED values and the evaluation's return."""
    env = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    if cache:
        env |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(cache)}
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # as in the scripts
    start, started, output = time.perf_counter(), None, []
    process = subprocess.Popen(
        [sys.executable, path.name, *flags],
        cwd=path.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        output.append(line)
        if ": compiled in " in line:
            started = time.perf_counter() - start
    if process.wait() != 0:
        raise SystemExit(
            f"error: {path} ended with {process.returncode}:\n{''.join(output)[-2000:]}"
        )
    seconds = time.perf_counter() - start
    newest = max(path.parent.glob("runs/*/summary.json"), key=lambda file: file.stat().st_mtime_ns)
    summary = json.loads(newest.read_text())
    summary |= {"start_seconds": started, "process_seconds": seconds}
    names = (*MEASURED, "eval_return_mean", "total_timesteps")
    return {name: summary[name] for name in names if name in summary}


def compare(name, choice, flags, folder, save):
    """Runs the pairs of a script, calls `save(row)` after each; returns the last row."""
    texts = {"ours": (ROOT / f"{name}.py").read_bytes()}
    texts["theirs"] = text_at(choice.against, f"{name}.py")
    if texts["theirs"] is None:
        raise SystemExit(f"error: git has no {name}.py at {choice.against}")
    paths, caches = {}, {}
    for side, text in texts.items():
        paths[side] = folder / name / side / f"{name}.py"
        paths[side].parent.mkdir(parents=True)
        paths[side].write_bytes(text)
        caches[side] = folder / name / f"{side}_cache" if choice.cache else None
        if choice.cache:
            run(paths[side], flags, caches[side])
    row = {"name": f"{name}, cached" if choice.cache else name}
    row |= {"against": choice.against, "flags": flags, "pairs": [], "medians": {}, "ratios": {}}
    for number in range(choice.pairs):
        order = ["ours", "theirs"] if number % 2 == 0 else ["theirs", "ours"]
        row["pairs"].append({side: run(paths[side], flags, caches[side]) for side in order})
        for key in MEASURED:
            if any(key not in side for pair in row["pairs"] for side in pair.values()):
                continue  # missing in an older summary
            sides = {side: [pair[side][key] for pair in row["pairs"]] for side in paths}
            row["medians"][key] = {side: statistics.median(x) for side, x in sides.items()}
            ratios = [ours / theirs for ours, theirs in zip(sides["ours"], sides["theirs"])]
            row["ratios"][key] = statistics.median(ratios)
        save(row)
        shown = ", ".join(f"{key} {value:.3f}" for key, value in row["ratios"].items())
        print(f"{row['name']}, {number + 1} pairs: {shown}", flush=True)
    return row


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--against", required=True, help="earlier commit")
    parser.add_argument("--script", action="append", help="may be repeated; default: all")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--cache", action="store_true", help="fill and use a compilation cache")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    choice, flags = parser.parse_args(own), sys.argv[len(own) + 2 :]
    result = {
        "command": " ".join(["python benchmarks/compare.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "rows": {},
    }
    if choice.out and choice.out.exists():
        result["rows"] = json.loads(choice.out.read_text())["rows"]

    def save(row):
        result["rows"][row["name"]] = row
        if choice.out:
            choice.out.write_text(json.dumps(result, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for name in choice.script or sorted(path.stem for path in ROOT.glob("ppo_*.py")):
            compare(name, choice, flags, pathlib.Path(folder), save)


if __name__ == "__main__":
    main()
