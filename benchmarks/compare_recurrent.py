"""Compares recurrent.py with sb3-contrib's RecurrentPPO on three tasks without velocities.

    python3.11 -m venv VENV && VENV/bin/pip install sb3-contrib "gymnasium[box2d]==1.4.0"
    python benchmarks/compare_recurrent.py --sb3-python VENV/bin/python --seeds 1 2 3
    python benchmarks/compare_recurrent.py --tasks CartPole-v1 --only ours --seeds 1 --out FILE

Our Python also needs gymnasium[box2d].

| name           | program                                                                     |
| -------------- | --------------------------------------------------------------------------- |
| ours           | recurrent.py, a GRU                                                         |
| sb3-contrib    | RecurrentPPO, an LSTM, with RL Baselines3 Zoo's settings of ppo_lstm.yml    |
| without memory | gymnasium_envs.py, an MLP; its other flags are those of "ours"              |
| ours in JAX    | recurrent_continuous.py with its default flags, Pendulum only               |

All see the same observations: hidden components are removed. (The zoo sets them to zero.)

Each run is a process on one core. The clock starts with the process, so imports and compilation
count; nothing comes from a cache. A run ends after its steps, or after `--limit` seconds. The
programs alternate seed by seed. The return is the mean over the last training episode of each of
our environments, or over as many last episodes of RecurrentPPO. Actions are sampled. Every program
prints it once per update; a task is solved at the first mean that reaches the threshold.

Writes benchmarks/results/recurrent.json after every process and prints a table: medians over the
seeds that solved the task, and the last return of every seed. Rows of other tasks and programs are
kept.
"""

import argparse
import ast
import datetime
import functools
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import gymnasium
from time_to_solve import MEAN

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "recurrent.json"
HIDDEN = {"CartPole-v1": (1, 3), "Pendulum-v1": (2,), "LunarLander-v3": (2, 3, 5)}
THRESHOLDS = {"CartPole-v1": 475, "Pendulum-v1": -250, "LunarLander-v3": 150}
LIMITS = {"CartPole-v1": 300, "Pendulum-v1": 600, "LunarLander-v3": 1800}  # seconds
NUM_ENVS = {"CartPole-v1": 64, "Pendulum-v1": 32, "LunarLander-v3": 64}  # ours
FLAGS = {  # in Pendulum, a rollout is an episode with its reset
    "CartPole-v1": "--total-timesteps 150_000 --num-steps 32 --num-minibatches 4 "
    "--update-epochs 10 --learning-rate 1e-3 --gamma 0.99 --gae-lambda 0.95 --ent-coef 0",
    "Pendulum-v1": "--total-timesteps 200_000 --num-steps 201 --num-minibatches 16 "
    "--update-epochs 10 --learning-rate 1e-3 --gamma 0.9 --gae-lambda 0.95 --ent-coef 0",
    "LunarLander-v3": "--total-timesteps 1_000_000 --num-steps 128 --num-minibatches 16 "
    "--update-epochs 6 --learning-rate 1e-3 --gamma 0.999 --gae-lambda 0.98 --ent-coef 0",
}
ZOO = {  # (environments, steps, settings) of ppo_lstm.yml at 22e3ff2; LunarLander's are for -v2
    "CartPole-v1": (8, 100_000, dict(
        n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
        learning_rate=lambda left: 0.001 * left, clip_range=lambda left: 0.2 * left,
    )),
    "Pendulum-v1": (4, 100_000, dict(
        n_steps=1024, gae_lambda=0.95, gamma=0.9, n_epochs=10, ent_coef=0.0, learning_rate=1e-3,
        clip_range=0.2, use_sde=True, sde_sample_freq=4,
    )),
    "LunarLander-v3": (32, 5_000_000, dict(
        n_steps=512, batch_size=128, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01
    )),
}  # fmt: skip


def make_hidden(task, **options):
    """The environment of a task without the components HIDDEN of its observations."""
    env = gymnasium.make(task, **options)
    space = env.observation_space
    kept = [i for i in range(space.shape[0]) if i not in HIDDEN[task]]
    space = gymnasium.spaces.Box(space.low[kept], space.high[kept], dtype=space.dtype)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[kept], space)


def hidden_id(task):
    """The id of `make_hidden`, CartPoleNoVel-v1 for CartPole-v1."""
    return task.replace("-", "NoVel-")


for task in HIDDEN:
    make = functools.partial(make_hidden, task)
    gymnasium.register(hidden_id(task), make, order_enforce=False, disable_env_checker=True)


def sb3_worker(task, seed):
    """Runs RecurrentPPO and prints mean returns like our scripts."""
    import torch
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    window = NUM_ENVS[task]

    class Show(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            returns = [episode["r"] for episode in self.model.ep_info_buffer][-window:]
            if len(returns) == window:
                mean = statistics.mean(returns)
                print(f"{self.num_timesteps} steps, return {mean:.3f}", flush=True)

    num_envs, total_timesteps, settings = ZOO[task]
    envs = VecNormalize(make_vec_env(hidden_id(task), num_envs, seed), gamma=settings["gamma"])
    network = dict(
        ortho_init=False, activation_fn=torch.nn.ReLU, lstm_hidden_size=64,
        enable_critic_lstm=True, net_arch=dict(pi=[64], vf=[64]),
    )  # fmt: skip
    options = dict(policy_kwargs=network, seed=seed, device="cpu", **settings)
    RecurrentPPO("MlpLstmPolicy", envs, **options).learn(total_timesteps, callback=Show())


def commands(choice, task, seed):
    """Returns {name: command} for a task."""
    flags = f"--seed {seed} --num-envs {NUM_ENVS[task]} --log-interval 1 {FLAGS[task]}".split()
    flags += "--clip-coef 0.2 --no-clip-vloss --eval-episodes 1".split()
    scripts = FOLDER / "environments"
    ours = [sys.executable, scripts / "recurrent.py", "--env-id", task, "--hide"]
    ours += [*map(str, HIDDEN[task]), *flags]
    plain = [sys.executable, scripts / "gymnasium_envs.py", *flags]
    plain += ["--env-id", f"compare_recurrent:{hidden_id(task)}"]
    sb3 = [choice.sb3_python, __file__, "--worker", "--tasks", task, "--seeds", str(seed)]
    found = {"ours": ours, "sb3-contrib": sb3, "without memory": plain}
    if task == "Pendulum-v1":
        words = f"--seed {seed} --log-interval 1".split()
        found["ours in JAX"] = [sys.executable, scripts / "recurrent_continuous.py", *words]
    return {name: command for name, command in found.items() if name in choice.only}


def clocked(command, core, limit, threshold):
    """Runs a command on a core until it ends or for `limit` seconds; returns a row."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command, curve, output = ["taskset", "-c", str(core), *command], [], []
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, cwd=folder, env=env, **pipes) as process,
    ):
        clock = threading.Timer(limit, process.kill)
        clock.start()
        for line in process.stdout:
            output.append(line)
            if match := MEAN.match(line):  # not if the mean is nan
                seconds = round(time.perf_counter() - start, 2)
                curve.append((seconds, int(match[1].replace(",", "")), float(match[2])))
        clock.cancel()
        seconds = time.perf_counter() - start
        if process.wait() != 0 and seconds < limit:
            raise SystemExit(f"error: {command} failed:\n{''.join(output[-20:])}")
    first = next((point for point in curve if point[2] >= threshold), None)
    row = {"solved": first is not None, "seconds": first and first[0], "steps": first and first[1]}
    row["end"] = curve[-1] if curve else (seconds, None, None)
    return row | {"curve": [*curve[:: max(1, len(curve) // 100)], *curve[-1:]]}


def versions_of(python, names):
    """Returns {name: version} of the packages that an interpreter has."""
    code = "import importlib.metadata as m; print({x.name: x.version for x in m.distributions()})"
    found = ast.literal_eval(subprocess.check_output([python, "-c", code], text=True))
    return {name: found[name] for name in names.split() if name in found}


def median(numbers):
    """Returns the median of the numbers that are not None, as text."""
    numbers = [x for x in numbers if x is not None]
    return f"{statistics.median(numbers):,.0f}" if numbers else "-"


def show(rows):
    """Prints a table with a line per task and program."""
    print("| task | program | solved | seconds | steps | return at the end | steps at the end |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for task, name in dict.fromkeys((row["task"], row["name"]) for row in rows):
        of = [row for row in rows if (row["task"], row["name"]) == (task, name)]
        ends = ", ".join("-" if row["end"][2] is None else f"{row['end'][2]:,.0f}" for row in of)
        parts = [task, name, f"{sum(row['solved'] for row in of)} of {len(of)}"]
        parts += [median([row[key] for row in of]) for key in ("seconds", "steps")]
        print("|", " | ".join([*parts, ends, median([row["end"][1] for row in of])]), "|")


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    names = ["ours", "sb3-contrib", "without memory", "ours in JAX"]
    parser.add_argument("--tasks", nargs="+", default=list(HIDDEN), choices=list(HIDDEN))
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--sb3-python", default=sys.executable, help="Python with sb3-contrib")
    parser.add_argument("--core", type=int, default=0, help="number of the core")
    parser.add_argument("--limit", type=float, help=f"seconds of a run, default {LIMITS}")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    choice = parser.parse_args()
    choice.sb3_python = os.path.abspath(shutil.which(choice.sb3_python) or choice.sb3_python)
    if choice.worker:
        return sb3_worker(*choice.tasks, *choice.seeds)
    conditions = {
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()}, one of {os.cpu_count()} cores",
        "command": " ".join(["python", "benchmarks/compare_recurrent.py", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": versions_of(sys.executable, "jax flax envpool gymnasium Box2D"),
        "sb3_versions": versions_of(choice.sb3_python, "sb3_contrib torch gymnasium"),
    }
    earlier = json.loads(choice.out.read_text()) if choice.out.exists() else {"tasks": {}}
    repeated = lambda row: row["task"] in choice.tasks and row["name"] in choice.only
    rows = [row for row in earlier.get("rows", []) if not repeated(row)]
    tasks = earlier["tasks"]
    for task in choice.tasks:
        limit = choice.limit or LIMITS[task]
        tasks[task] = conditions | {"flags": FLAGS[task], "threshold": THRESHOLDS[task]}
        tasks[task]["limit_seconds"] = limit
        for seed in choice.seeds:
            for name, command in commands(choice, task, seed).items():
                row = clocked(command, choice.core, limit, THRESHOLDS[task])
                rows.append({"task": task, "name": name, "seed": seed} | row)
                text = json.dumps({"tasks": tasks, "rows": rows}, indent=1)
                text = re.sub(r"\n {4,}(?=[-\d\[\]])", " ", text)  # one line per curve
                choice.out.write_text(text + "\n")
                print(f"{task}, {name}, seed {seed}: end {row['end']}", file=sys.stderr)
    show(rows)


if __name__ == "__main__":
    main()
