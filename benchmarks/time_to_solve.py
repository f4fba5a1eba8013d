r"""Measures seconds and steps until a task is solved, compared with other libraries.

    python benchmarks/time_to_solve.py --purejaxrl FOLDER --xland FOLDER --cleanrl FOLDER \
        --cleanrl-python PYTHON
    python benchmarks/time_to_solve.py --tasks CartPole-v1 --only ours rejax --seeds 1 --out FILE
    python benchmarks/time_to_solve.py --tasks Hopper-v4 LunarLander-v3 --seeds 1 \
        --cleanrl FOLDER --cleanrl-python PYTHON

Clock: starts with the process, so imports and compilation count. `first_seconds` is the time of the
first printed return. Only "ours, from the cache" uses compiled functions of an earlier run. The
libraries alternate seed by seed. A process is stopped after ten times our first seed's time, or
after `--limit` seconds. A library that did not solve a task is not started with other seeds.

A task is solved if the mean return of the last training episodes reaches the threshold:

| library               | episodes of the mean                                                     |
| --------------------- | ------------------------------------------------------------------------ |
| ours                  | last episode of each environment (64 in CartPole, 128 in Pendulum)       |
| ours, MuJoCo          | last 64 printed returns of 8 environments                                |
| ours, LunarLander     | last 4 printed returns of 16 environments                                |
| Rejax, XLand-MiniGrid | 128 evaluation episodes every `eval_freq` steps, 80 after every update   |
| all others            | last 64 episodes                                                         |

Settings: Rejax's configurations, the defaults of PureJaxRL, XLand-MiniGrid and CleanRL, and RL
Baselines3 Zoo for Stable-Baselines3 and SBX (for MuJoCo those of -v3). MuJoCo's thresholds are the
returns after a million steps in CleanRL's documentation ("tuned": RL Zoo's greedy ones, ours
trains for three million steps). CleanRL plays LunarLander-v2.

MiniGrid: each library plays its own port of a level, Stable-Baselines3 Farama's. The return is
Farama's, 1 - 0.9 steps / limit, so 0.9 requires success in nearly all episodes. It counts once
64 episodes of full length could have ended, because short episodes end first. In NAVIX, which Rejax
plays, episodes end after 100 steps. Rejax's configurations are those of Empty-Random-8x8 and
DoorKey-8x8, except for the evaluation interval and the length in DoorKey; Stable-Baselines3's are
the zoo's for other levels.

Libraries that are not installed (requirements.txt) or not given are skipped. `--purejaxrl` and
`--xland` require distrax, `--cleanrl-python` is a Python with torch and gymnasium 0.29. Results and
curves are written to benchmarks/results/time_to_solve.json and .png after every process. Other
tasks in the file are kept.
"""

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import importlib.util
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

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "time_to_solve.json"
THRESHOLDS = {"CartPole-v1": 475, "Pendulum-v1": -200, "Empty-8x8": 0.9, "DoorKey-6x6": 0.9}
WORLDS = {  # our adapter script, lines of the mean, CleanRL's script and environment id
    "HalfCheetah-v4": ("mujoco_envpool", 64, "ppo_continuous_action.py", "HalfCheetah-v4"),
    "Hopper-v4": ("mujoco_envpool", 64, "ppo_continuous_action.py", "Hopper-v4"),
    "Walker2d-v4": ("mujoco_envpool", 64, "ppo_continuous_action.py", "Walker2d-v4"),
    "LunarLander-v3": ("gymnasium_envs", 4, "ppo.py", "LunarLander-v2"),
}
WORLDS |= {f"{task} tuned": WORLDS[task] for task in ("HalfCheetah-v4", "Walker2d-v4")}
THRESHOLDS |= {"HalfCheetah-v4": 1443, "Hopper-v4": 2383, "Walker2d-v4": 2288}
THRESHOLDS |= {"HalfCheetah-v4 tuned": 5819, "Walker2d-v4 tuned": 3479, "LunarLander-v3": 200}
LIMITS = {"Empty-8x8": 256, "DoorKey-6x6": 360}  # time limits in Farama's MiniGrid
WINDOW = 64  # episodes of the mean
# Printed lines: the mean return at a step, or the return of one episode.
MEAN = re.compile(r"^([\d,]+) steps\b.*return (-?[\d.]+)")
EPISODE = re.compile(r"^global.step=(\d+), episodic.return=\[?(-?[\d.]+)")


# --- Workers: a library in its own process that prints such lines ---


def rejax_worker(task, seed):
    """Runs Rejax's PPO with its configuration of this task, except for the length in DoorKey."""
    import jax
    import rejax

    configurations = {
        "CartPole-v1": dict(
            agent_kwargs={"activation": "tanh"}, num_envs=5, num_steps=100, num_epochs=5,
            num_minibatches=5, learning_rate=0.00075, max_grad_norm=0.5, total_timesteps=100_000,
            eval_freq=1000, gamma=0.99, gae_lambda=0.95, clip_eps=0.2, ent_coef=0.01, vf_coef=0.5,
        ),
        "Pendulum-v1": dict(
            agent_kwargs={"activation": "swish"}, num_envs=100, num_steps=100, num_epochs=10,
            num_minibatches=10, learning_rate=0.001, max_grad_norm=10, total_timesteps=150_000,
            eval_freq=2000, gamma=0.995, gae_lambda=0.95, clip_eps=0.2, ent_coef=0.0, vf_coef=0.5,
            normalize_observations=True,
        ),
        "Empty-8x8": dict(
            agent_kwargs={"activation": "swish"}, num_envs=64, num_steps=128, num_epochs=8,
            num_minibatches=1, learning_rate=0.0003, max_grad_norm=10, total_timesteps=1_048_576,
            eval_freq=32_768, gamma=0.99, gae_lambda=0.8, clip_eps=0.2, ent_coef=0.01, vf_coef=0.5,
            normalize_observations=True,
        ),
        "DoorKey-6x6": dict(
            agent_kwargs={"activation": "swish"}, num_envs=128, num_steps=32, num_epochs=2,
            num_minibatches=32, learning_rate=0.0003, max_grad_norm=10, total_timesteps=20_000_000,
            eval_freq=32_768, gamma=0.95, gae_lambda=0.9, clip_eps=0.2, ent_coef=0.01, vf_coef=0.5,
            normalize_observations=True,
        ),
    }  # fmt: skip
    env = f"navix/Navix-{task}-v0" if task in LIMITS else task
    ppo = rejax.get_algo("ppo").create(env=env, **configurations[task])
    evaluate = ppo.eval_callback

    def show(step, lengths, returns):
        if task in LIMITS:  # NAVIX's own limit is shorter
            returns = (returns > 0) * (1 - 0.9 * lengths / LIMITS[task])
        print(f"{step} steps, return {returns.mean():.3f}", flush=True)

    def evaluate_and_show(ppo, state, key):
        lengths, returns = evaluate(ppo, state, key)
        jax.debug.callback(show, state.global_step, lengths, returns)
        return lengths, returns

    ppo = ppo.replace(eval_callback=evaluate_and_show)
    jax.block_until_ready(jax.jit(ppo.train)(jax.random.key(seed)))
    jax.effects_barrier()


def sb3_worker(library, task, seed):
    """Runs PPO of "stable_baselines3" or "sbx" with the zoo's settings (MiniGrid: other levels)."""
    import importlib

    import jax
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    wrapper_class, env_id = None, task.split()[0]
    if task in LIMITS:
        import minigrid  # registers its environments

        wrapper_class, env_id = minigrid.wrappers.FlatObsWrapper, f"MiniGrid-{task}-v0"
        num_envs, total_timesteps = 8, 10_000_000
        settings = dict(
            n_steps=128, batch_size=64, gae_lambda=0.95, gamma=0.99, n_epochs=10, ent_coef=0.0,
            learning_rate=2.5e-4, clip_range=0.2,
        )  # fmt: skip
    elif task == "CartPole-v1":
        num_envs, total_timesteps = 8, 100_000
        settings = dict(
            n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
            learning_rate=lambda left: 0.001 * left, clip_range=lambda left: 0.2 * left,
        )  # fmt: skip
    elif task == "LunarLander-v3":
        num_envs, total_timesteps = 16, 1_000_000
        settings = dict(
            n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01
        )
    elif task in WORLDS:
        num_envs, total_timesteps = 1, 1_000_000
        large = dict(policy_kwargs=dict(
            log_std_init=-2, ortho_init=False, net_arch=dict(pi=[256, 256], vf=[256, 256]),
            activation_fn=jax.nn.relu if library == "sbx" else torch.nn.ReLU,
        ))  # fmt: skip
        settings = dict(n_steps=512) | {
            "HalfCheetah-v4": large | dict(
                batch_size=64, gamma=0.98, learning_rate=2.0633e-05, ent_coef=0.000401762,
                clip_range=0.1, n_epochs=20, gae_lambda=0.92, max_grad_norm=0.8, vf_coef=0.58096,
            ),
            "Hopper-v4": large | dict(
                batch_size=32, gamma=0.999, learning_rate=9.80828e-05, ent_coef=0.00229519,
                clip_range=0.2, n_epochs=5, gae_lambda=0.99, max_grad_norm=0.7, vf_coef=0.835671,
            ),
            "Walker2d-v4": dict(
                batch_size=32, gamma=0.99, learning_rate=5.05041e-05, ent_coef=0.000585045,
                clip_range=0.1, n_epochs=20, gae_lambda=0.95, max_grad_norm=1.0, vf_coef=0.871923,
            ),
        }[env_id]  # fmt: skip
    else:
        num_envs, total_timesteps = 4, 100_000
        settings = dict(
            n_steps=1024, gae_lambda=0.95, gamma=0.9, n_epochs=10, ent_coef=0.0,
            learning_rate=1e-3, clip_range=0.2, use_sde=True, sde_sample_freq=4,
        )  # fmt: skip
    if library == "stable_baselines3":
        settings["device"] = "cpu"

    class Show(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            returns = [episode["r"] for episode in self.model.ep_info_buffer][-WINDOW:]
            if len(returns) == WINDOW:
                mean = statistics.mean(returns)
                print(f"{self.num_timesteps} steps, return {mean:.3f}", flush=True)

    ppo = importlib.import_module(library).PPO
    envs = make_vec_env(env_id, num_envs, seed=seed, wrapper_class=wrapper_class)
    if task in LIMITS or env_id.endswith("-v4"):
        envs = VecNormalize(envs)
    model = ppo("MlpPolicy", envs, seed=seed, **settings)
    model.learn(total_timesteps, callback=Show())


def purejaxrl_worker(folder, seed):
    """Runs PureJaxRL's `ppo.py` with the settings of its main block."""
    import unittest.mock

    for name in "brax brax.envs brax.envs.wrappers brax.envs.wrappers.training navix".split():
        sys.modules[name] = unittest.mock.MagicMock()  # for other environments
    sys.path[:0] = [str(folder), str(folder / "purejaxrl")]
    import jax
    import ppo

    config = dict(
        LR=2.5e-4, NUM_ENVS=4, NUM_STEPS=128, TOTAL_TIMESTEPS=5e5, UPDATE_EPOCHS=4,
        NUM_MINIBATCHES=4, GAMMA=0.99, GAE_LAMBDA=0.95, CLIP_EPS=0.2, ENT_COEF=0.01, VF_COEF=0.5,
        MAX_GRAD_NORM=0.5, ACTIVATION="tanh", ENV_NAME="CartPole-v1", ANNEAL_LR=True, DEBUG=True,
    )  # fmt: skip
    jax.block_until_ready(jax.jit(ppo.make_train(config))(jax.random.key(seed)))
    jax.effects_barrier()


def xland_worker(folder, task, seed):
    """Runs XLand-MiniGrid's single-task trainer with its settings, except DoorKey's length."""
    import unittest.mock

    for name in ("wandb", "pyrallis"):  # for logging and for flags
        sys.modules[name] = unittest.mock.MagicMock()
    sys.path.insert(0, str(folder / "training"))
    import jax
    import jax.numpy as jnp
    import xminigrid.wrappers  # noqa: F401, before the patch

    # Its dataclasses have arrays as default values, an error since Python 3.11.
    with unittest.mock.patch.object(jnp, "asarray", lambda number: number):
        import train_single_task as trainer
    from flax.jax_utils import replicate

    steps = 5_000_000 if task == "DoorKey-6x6" else trainer.TrainConfig.total_timesteps
    config = trainer.TrainConfig(env_id=f"MiniGrid-{task}", seed=seed, total_timesteps=steps)
    play, returns = trainer.rollout, []

    def show(episode_return):  # one evaluation episode
        returns.append(float(episode_return))
        evaluation, rest = divmod(len(returns), config.eval_episodes)
        if rest == 0:
            step = evaluation * config.num_envs * config.num_steps
            mean = statistics.mean(returns[-config.eval_episodes :])
            print(f"{step} steps, return {mean:.3f}", flush=True)

    def rollout(*words):
        stats = play(*words)
        jax.debug.callback(show, stats.reward)
        return stats

    trainer.rollout = rollout
    rng, env, env_params, hidden, train_state = trainer.make_states(config)
    train = trainer.make_train(env, env_params, config)
    rng = jax.random.split(rng, num=1)
    jax.block_until_ready(train(rng, replicate(train_state), replicate(hidden)))
    jax.effects_barrier()


# --- The clock ---


def commands(choice, task, seed, folder):
    """Returns {name: command} for this task; the processes write to `folder`."""
    python, worker = sys.executable, [sys.executable, __file__, "--task", task, "--seed", str(seed)]
    for script in ROOT.glob("ppo_*.py"):
        shutil.copy(script, folder)
    if task in LIMITS:
        ours = [python, "ppo_minigrid_rnn.py", "--env-id", task, "--seed", str(seed)]
        ours += ["--total-timesteps", "8e5"] if task == "DoorKey-6x6" else []
        found = {"ours": ours, "ours, from the cache": ours}
        if choice.xland:
            found["xminigrid"] = [*worker, "--worker", "xminigrid"]
            found["xminigrid"] += ["--xland", str(choice.xland.resolve())]
    elif task == "CartPole-v1":
        ours = [python, "ppo_cartpole_jax.py", "--seed", str(seed)]
        compared = "--num-steps 128 --learning-rate 2.5e-4 --no-anneal-lr --gamma 0.99"
        compared += " --gae-lambda 0.95 --norm-adv --clip-coef 0.2 --clip-vloss --ent-coef 0.01"
        compared += " --adam-eps 1e-8 --total-timesteps 5e6"
        found = {"ours": ours, "ours, from the cache": ours}
        found["ours, as compared for speed"] = [*ours, *compared.split()]
        if choice.purejaxrl:
            found["purejaxrl"] = [*worker, "--worker", "purejaxrl"]
            found["purejaxrl"] += ["--purejaxrl", str(choice.purejaxrl.resolve())]
        if choice.cleanrl:
            script = choice.cleanrl.resolve() / "cleanrl" / "ppo.py"
            found["cleanrl"] = [choice.cleanrl_python, str(script), "--seed", str(seed)]
    elif task in WORLDS:
        program, _, script, env_id = WORLDS[task]
        path = ROOT / "benchmarks" / "environments" / f"{program}.py"
        ours = [python, str(path), "--env-id", task.split()[0]]
        ours += ["--seed", str(seed), "--log-interval", "1"]
        ours += ["--total-timesteps", "3e6"] if "tuned" in task else []
        found = {"ours": ours, "ours, from the cache": ours}
        if choice.cleanrl:
            script = choice.cleanrl.resolve() / "cleanrl" / script
            found["cleanrl"] = [choice.cleanrl_python, str(script), "--seed", str(seed)]
            found["cleanrl"] += ["--env-id", env_id]
    else:  # README's recipe
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        (block,) = [block for block in blocks if "class Pendulum:" in block]
        ours = [python, "-c", block.replace("ppo.main([", f'ppo.main(["--seed", "{seed}", ')]
        found = {"ours": ours, "ours, from the cache": ours}
    for name in ("rejax", "sbx", "stable_baselines3"):
        if name == "sbx" and task in LIMITS or name == "rejax" and task in WORLDS:
            continue  # no published settings
        if choice.only and name not in choice.only:
            continue
        if importlib.util.find_spec(name):
            found[name] = [*worker, "--worker", name]
        else:
            print(f"{name} is not installed", file=sys.stderr)
    return {name: x for name, x in found.items() if not choice.only or name in choice.only}


def clocked(command, folder, threshold, limit, cache, min_steps=0, lines=1):
    """Runs a command until it solves the task, ends or exceeds `limit` seconds; returns a row.

    The return is the mean of the last `lines` printed means, or of the last WINDOW episodes.
    """
    env = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    if cache is None:
        env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    last = {MEAN: collections.deque(maxlen=lines), EPISODE: collections.deque(maxlen=WINDOW)}
    points, solved = [], False
    output = collections.deque(maxlen=20)  # for the error message
    start = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        clock = threading.Timer(limit, process.kill)  # also if nothing is printed
        clock.start()
        for line in process.stdout:
            output.append(line)
            seconds = time.perf_counter() - start
            pattern = next((pattern for pattern in last if pattern.match(line)), None)
            if pattern is None:
                continue
            step, value = pattern.match(line).groups()
            last[pattern].append(float(value))
            if len(last[pattern]) < last[pattern].maxlen:
                continue
            point = seconds, int(step.replace(",", "")), statistics.mean(last[pattern])
            points.append(point)
            solved = point[2] >= threshold and point[1] >= min_steps
            if solved:
                process.kill()
                break
        clock.cancel()
        seconds = time.perf_counter() - start
        if not solved and process.wait() != 0 and seconds < limit:
            raise SystemExit(f"error: {command[:4]} failed:\n{''.join(output)}")
    stride = max(1, len(points) // 100)
    return {
        "solved": solved,
        "seconds": points[-1][0] if solved else seconds,
        "steps": points[-1][1] if points else None,
        "first_seconds": points[0][0] if points else None,
        "curve": [[round(x, 2) for x in point] for point in [*points[::stride], *points[-1:]]],
    }


def median(numbers):
    """Returns the median, or None if a process has not printed a return."""
    return None if None in numbers else statistics.median(numbers)


def draw(result, path):
    """Plots return over seconds, one panel per task; solved runs end at the threshold."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [task for task in THRESHOLDS if any(row["task"] == task for row in result["rows"])]
    names = dict.fromkeys(row["name"] for row in result["rows"] if row["curve"])
    plt.style.use(ROOT / "benchmarks" / "plots.mplstyle")
    colors = dict(zip(names, plt.colormaps["tab10"].colors))
    columns = min(2, len(tasks))
    size = (4.5 * columns, 3.2 * -(-len(tasks) // columns) + 0.7)
    figure, panels = plt.subplots(-(-len(tasks) // columns), columns, figsize=size, squeeze=False)
    for axes, task in zip(panels.flat, tasks):
        for row in result["rows"]:
            if row["task"] == task and row["curve"]:
                seconds, _, returns = zip(*row["curve"])
                axes.plot(seconds, returns, color=colors[row["name"]], linewidth=1.0)
        axes.axhline(THRESHOLDS[task], color="gray", linestyle=":")
        axes.set(xscale="log", xlabel="seconds since the start", ylabel="return", title=task)
        axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
    for axes in panels.flat[len(tasks) :]:
        axes.set_axis_off()
    lines = [plt.Line2D([], [], color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=4)
    figure.savefig(path)


def draw_front_page():
    """Plots four tasks without the runs from a filled cache, for README."""
    names = {"ours": "this repository", "purejaxrl": "PureJaxRL", "cleanrl": "CleanRL"}
    names |= {"rejax": "Rejax", "sbx": "SBX", "stable_baselines3": "Stable-Baselines3"}
    tasks = "CartPole-v1", "Pendulum-v1", "DoorKey-6x6", "HalfCheetah-v4"
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if row["task"] in tasks and row["name"] in names]
    for row in rows:  # Rejax prints a final line with step 0
        row |= {"name": names[row["name"]], "curve": [x for x in row["curve"] if x[1] > 0]}
    draw({"rows": rows}, RESULTS.with_name("time_to_solve_readme.png"))


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--tasks", nargs="+", default=list(THRESHOLDS), choices=list(THRESHOLDS))
    parser.add_argument("--only", nargs="+", help="names of libraries")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--purejaxrl", type=pathlib.Path, help="clone of PureJaxRL")
    parser.add_argument("--xland", type=pathlib.Path, help="clone of XLand-MiniGrid")
    parser.add_argument("--cleanrl", type=pathlib.Path, help="clone of CleanRL")
    parser.add_argument("--cleanrl-python", default=sys.executable)
    parser.add_argument("--limit", type=float, help="seconds; default: ten times our first seed's")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--front-page", action="store_true", help="only plot README's figure")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    choice = parser.parse_args()
    if choice.front_page:
        return draw_front_page()
    if choice.worker == "rejax":
        return rejax_worker(choice.task, choice.seed)
    if choice.worker == "purejaxrl":
        return purejaxrl_worker(choice.purejaxrl, choice.seed)
    if choice.worker == "xminigrid":
        return xland_worker(choice.xland, choice.task, choice.seed)
    if choice.worker:
        return sb3_worker(choice.worker, choice.task, choice.seed)

    names = "jax rejax gymnax navix xminigrid sbx-rl stable-baselines3 torch gymnasium minigrid"
    versions = {"python": platform.python_version()}
    for name in names.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    conditions = {
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": versions,
    }
    result = {"command": "python benchmarks/time_to_solve.py", "thresholds": THRESHOLDS}
    result |= {"conditions": {}, "rows": [], "medians": {}}
    if choice.out.exists():  # keeps other tasks
        earlier = json.loads(choice.out.read_text())
        others = [task for task in earlier["conditions"] if task not in choice.tasks]
        result["conditions"] = {task: earlier["conditions"][task] for task in others}
        result["rows"] = [row for row in earlier["rows"] if row["task"] in others]
        result["medians"] = {
            name: row for name, row in earlier["medians"].items() if name.split(",")[0] in others
        }
    result["conditions"] |= dict.fromkeys(choice.tasks, conditions)
    cache = pathlib.Path(tempfile.mkdtemp())
    for task in choice.tasks:
        ours = []
        for seed in range(1, choice.seeds + 1):
            folder = pathlib.Path(tempfile.mkdtemp())
            for name, command in commands(choice, task, seed, folder).items():
                rows = [r for r in result["rows"] if (r["task"], r["name"]) == (task, name)]
                if any(not row["solved"] for row in rows):
                    continue
                cached = cache if "cache" in name else None
                limit = choice.limit or (10 * statistics.median(ours) if ours else 600)
                min_steps = WINDOW * LIMITS.get(task, 0)  # before, only short episodes have ended
                lines = WORLDS[task][1] if name.startswith("ours") and task in WORLDS else 1
                words = command, folder, THRESHOLDS[task], limit, cached, min_steps, lines
                if cached and seed == 1:
                    clocked(*words)  # fills the cache
                row = clocked(*words)
                if name == "ours" and row["solved"]:
                    ours.append(row["seconds"])
                rows.append({"task": task, "name": name, "seed": seed} | row)
                result["rows"].append(rows[-1])
                keys = ("seconds", "steps", "first_seconds")
                medians = {key: median([r[key] for r in rows]) for key in keys}
                medians["solved"] = f"{sum(r['solved'] for r in rows)} of {len(rows)}"
                result["medians"][f"{task}, {name}"] = medians
                text = re.sub(r"\n {4,}(?=[-\d\[\]])", " ", json.dumps(result, indent=1))
                choice.out.write_text(text + "\n")  # one line per curve
                print(f"{task}, {name}, seed {seed}: {row['seconds']:.1f} s", end="", flush=True)
                print(f", {row['steps'] or 0:,} steps" + ("" if row["solved"] else ", not solved"))
            shutil.rmtree(folder)
    shutil.rmtree(cache)
    draw(result, choice.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
