"""Three styles of PPO on Atari side by side: CleanRL's scripts and ours, in turn on one machine.

    git clone https://github.com/vwxyzjn/cleanrl
    python benchmarks/atari_styles.py --cleanrl cleanrl --venv styles  # makes the environment once
    python benchmarks/atari_styles.py --cleanrl cleanrl --venv styles --rounds 3 --updates 20

    ppo_atari.py                       Gymnasium's emulators in turn; PyTorch, call after call
    ppo_atari_envpool.py               EnvPool's threads; PyTorch, call after call
    ppo_atari_envpool_xla_jax_scan.py  EnvPool inside XLA; three programs of JAX an update
    ppo_atari_envpool_xla_jax.py       ours: EnvPool and all the rest inside one program

All play the same game with the same numbers of environments, steps and minibatches, each in a
process of its own, which this program ends after the last update. CleanRL's files are run from the
clone as they are: `ADAPTER` below gives them the names that libraries have dropped since. They and
ours run in one virtual environment, made with atari-styles-requirements.txt; on Linux PyTorch comes
with CUDA libraries (7 GB in all), unless the environment has a PyTorch for CPUs beforehand.

Steps per second are of the updates after the first ones (--warmup), by the times at which their
lines are printed. Start-up is all before that: from the start of the process to the line of the
first update, less what a later update takes. The result is written after every process.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time

from code_lines import code_lines

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "atari_styles.json"
REQUIREMENTS = ROOT / "benchmarks" / "atari-styles-requirements.txt"
OURS = "ppo_atari_envpool_xla_jax.py"
WRAPPERS = "cleanrl_utils/atari_wrappers.py"
CLEANRL = {  # script: the name of the game, flags, what else of the clone it runs
    "ppo_atari.py": ("{}NoFrameskip-v4", ["--no-clip-vloss"], [WRAPPERS]),
    "ppo_atari_envpool.py": ("{}-v5", ["--no-clip-vloss"], []),
    "ppo_atari_envpool_xla_jax_scan.py": ("{}-v5", [], []),
}
PACKAGES = ("torch", "gymnasium", "ale-py", "envpool", "jax", "jaxlib", "flax", "optax", "numpy")

# Runs the script named by the first argument as `python script.py` would, with what it expects of
# its libraries.
ADAPTER = '''
import runpy, sys
import gymnasium, numpy

script, *words = sys.argv[1:]
sys.argv = [script, *words]
numpy.bool8 = numpy.bool_  # dropped by NumPy 2, Gymnasium 0.29 asks for it
if script.endswith("ppo_atari.py"):
    from ale_py.registration import register_v0_v4_envs

    register_v0_v4_envs()  # ale-py registers by itself with newer Gymnasiums only
else:
    import envpool

    sys.modules["gym"] = gymnasium  # gym is not maintained; only its Wrapper and Discrete are used
    if "jax" in script:
        import flax, jax

        jax.tree_map = jax.tree.map
        flax_dataclass = flax.struct.dataclass

        def dataclass(cls):
            cls.__contains__ = lambda self, name: False  # flax asks parameters, as if a dict
            return flax_dataclass(cls)

        flax.struct.dataclass = dataclass
    make = envpool.make

    class Pool(gymnasium.Env):
        """EnvPool with the interface of gym, which it had until version 0.8."""

        def __init__(self, envs):
            self.envs = envs
            self.observation_space = envs.observation_space
            self.action_space = envs.action_space

        def reset(self, **options):  # those that gymnasium.Wrapper hands on, all None
            return self.envs.reset()[0]

        def outcome(self, obs, reward, terminated, truncated, info):
            return obs, reward, terminated | truncated, {**info, "TimeLimit.truncated": truncated}

        def step(self, action):
            return self.outcome(*self.envs.step(action))

        def xla(self):
            handle, receive, send, step = self.envs.xla()

            def step_once(handle, action):
                handle, outcome = step(handle, action)
                return handle, self.outcome(*outcome)

            return handle, receive, send, step_once

    envpool.make = lambda *args, **options: Pool(make(*args, **options))
runpy.run_path(script, run_name="__main__")
'''


def make_environment(folder):
    """The Python of the virtual environment in `folder`, which is made if it is not there."""
    python = folder.resolve() / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if subprocess.run(
        [python, "-c", "import torch, ale_py, envpool, imageio"], capture_output=True
    ).returncode:
        subprocess.run([python, "-m", "pip", "install", "-r", str(REQUIREMENTS)], check=True)
    return python


def versions_of(python):
    """{package: version} of those PACKAGES that a Python has."""
    command = [python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    output = subprocess.run(command, capture_output=True, text=True).stdout or "[]"
    return {x["name"]: x["version"] for x in json.loads(output) if x["name"] in PACKAGES}


def command_of(name, python, choice):
    """The command line of a program and the files it consists of."""
    updates = choice.warmup + choice.updates
    flags = ["--num-envs", choice.num_envs, "--num-steps", choice.num_steps]
    # One update more than it will be allowed to make: none must have ended when it is looked at.
    flags += ["--total-timesteps", (updates + 1) * choice.num_envs * choice.num_steps]
    if name == OURS:
        words = [python, ROOT / OURS, "--env-id", f"{choice.game}-v5", *flags]
        return [*words, "--log-interval", 1], [ROOT / OURS]
    game, own_flags, others = CLEANRL[name]
    path = choice.cleanrl.resolve() / "cleanrl" / name
    words = [python, "-c", ADAPTER, path, "--env-id", game.format(choice.game), *flags, *own_flags]
    return words, [path, *(choice.cleanrl.resolve() / other for other in others)]


def run(name, command, folder, choice):
    """Runs a program until its last update; returns its row of this round.

    Raises RuntimeError with the end of its output if it ends before.
    """
    updates, batch = choice.warmup + choice.updates, choice.num_envs * choice.num_steps
    env = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if name != OURS:
        env["PYTHONPATH"] = str(choice.cleanrl.resolve())
    log = folder / f"{name}.log"
    times, lines = [], []
    start = time.perf_counter()
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            for line in process.stdout:
                lines.append(line)
                if re.match(r"SPS: |[\d,]+ steps ", line):  # one of CleanRL's, one of ours
                    times.append(time.perf_counter() - start)
                if len(times) == updates:
                    memory = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                    break
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    if len(times) < updates:
        raise RuntimeError(
            f"{name} ended too soon:\n{''.join(lines[-5:])}{log.read_text()[-3000:]}"
        )
    per_update = (times[-1] - times[choice.warmup - 1]) / choice.updates
    return {
        "sps": batch / per_update,
        "startup_seconds": times[0] - per_update,
        "peak_memory_mb": int(re.search(r"VmHWM:\s+(\d+)", memory)[1]) / 1024,
    }


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--cleanrl", type=pathlib.Path, required=True, help="a clone of CleanRL")
    folder = pathlib.Path(".venv-styles")
    parser.add_argument("--venv", type=pathlib.Path, default=folder, help="made if not there")
    parser.add_argument("--python", help="one that has all it takes, instead of --venv's")
    parser.add_argument("--game", default="Breakout")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--updates", type=int, default=10, help="that are timed")
    parser.add_argument("--warmup", type=int, default=2, help="updates before these, at least 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of programs")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    python = choice.python or make_environment(choice.venv)
    git = ["git", "-C", str(choice.cleanrl), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    names = [name for name in (*CLEANRL, OURS) if any(part in name for part in choice.only)]
    rows = {}
    for name in names:
        _, files = command_of(name, python, choice)
        code = sum(len(code_lines(path.read_text())) for path in files)
        rows[name] = {"code_lines": code, "rounds": []}
    settings = ("game", "num_envs", "num_steps", "updates", "warmup")
    result = {
        "command": "python benchmarks/atari_styles.py --cleanrl FOLDER "
        + f"--rounds {choice.rounds} --updates {choice.updates} --warmup {choice.warmup}",
        "date": datetime.date.today().isoformat(),
        "device": f"cpu, {platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "cleanrl": commit or "unknown",
        "versions": {"python": platform.python_version()} | versions_of(python),
        "settings": {name: getattr(choice, name) for name in settings},
        "rows": rows,
    }
    for number in range(1, choice.rounds + 1):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                command, _ = command_of(name, python, choice)
                measured = run(name, command, pathlib.Path(folder), choice)
            row = rows[name]
            row["rounds"].append(measured)
            for key in measured:
                row[key] = statistics.median(part[key] for part in row["rounds"])
            choice.out.write_text(json.dumps(result, indent=2) + "\n")
            print(
                f"round {number} {name:34s} {measured['sps']:8,.0f} SPS, start-up "
                f"{measured['startup_seconds']:5.1f} s, {measured['peak_memory_mb']:6,.0f} MB",
                flush=True,
            )
    print("\n| program | SPS | start-up, s | memory, MB | code lines |")
    print("| --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        print(
            f"| `{name}` | {row['sps']:,.0f} | {row['startup_seconds']:.1f} "
            f"| {row['peak_memory_mb']:,.0f} | {row['code_lines']:,} |"
        )


if __name__ == "__main__":
    main()
