"""Checks that the scripts' results are bit-identical to those of an earlier commit.

    python benchmarks/compare_bits.py 76b0500
    python benchmarks/compare_bits.py 76b0500 --scripts ppo_cartpole_jax ppo_swingup_jax

Runs both versions of every script for 20 updates with default flags and compares all arrays of
checkpoint.npz and the evaluation in summary.json. Exits with status 1 if a value differs.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = {  # 20 updates
    "ppo_cartpole_jax": 20 * 64 * 32,
    "ppo_swingup_jax": 20 * 128 * 128,
    "ppo_minigrid_rnn": 20 * 64 * 64,
    "ppo_atari_envpool_xla_jax": 20 * 8 * 128,
}
# Few and short games, so that the evaluation finishes.
OPTIONS = {"ppo_atari_envpool_xla_jax": ["--eval-episodes=2", "--max-episode-steps=300"]}


def run(script, name, folder):
    """Runs a script's text; returns (checkpoint arrays, evaluation values)."""
    folder.mkdir()
    (folder / f"{name}.py").write_bytes(script)
    words = [f"--total-timesteps={STEPS[name]}", *OPTIONS.get(name, [])]
    subprocess.run([sys.executable, f"{name}.py", *words], cwd=folder, check=True)
    (run_dir,) = (folder / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    with np.load(run_dir / "checkpoint.npz") as file:
        return dict(file), {key: x for key, x in summary.items() if key.startswith("eval_")}


def differences(ours, theirs):
    """Returns the names of arrays and values that differ between two results of `run`."""
    (arrays, evaluation), (old_arrays, old_evaluation) = ours, theirs
    names = [
        name
        for name in arrays.keys() | old_arrays.keys()
        if name not in arrays
        or name not in old_arrays
        or arrays[name].tobytes() != old_arrays[name].tobytes()
    ]
    return names + [key for key, x in old_evaluation.items() if evaluation.get(key) != x]


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("commit")
    parser.add_argument("--scripts", nargs="+", default=list(STEPS))
    choice = parser.parse_args()
    failed = False
    for name in choice.scripts:
        show = ["git", "show", f"{choice.commit}:{name}.py"]
        old = subprocess.run(show, cwd=ROOT, check=True, capture_output=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            theirs = run(old, name, pathlib.Path(folder, "old"))
            ours = run((ROOT / f"{name}.py").read_bytes(), name, pathlib.Path(folder, "new"))
        names = differences(ours, theirs)
        print(f"{name}: {f'different: {names}' if names else 'equal'}, {len(ours[0])} arrays")
        failed |= bool(names)
    sys.exit(failed)


if __name__ == "__main__":
    main()
