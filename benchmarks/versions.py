"""Speed of the scripts beside that of an earlier commit, alternated in one process; writes JSON.

    python benchmarks/versions.py --against 96b6b48                  # all of them
    python benchmarks/versions.py --against 96b6b48 --only cartpole  # or "cartpole_jax compared"
    python benchmarks/versions.py --against 96b6b48 --env-only       # MiniGrid's environments alone

Both versions compile and warm up, then train in turn, for `--seconds` each, `--pairs` times.
Reported are medians of steps per second and of the ratio new / old over the pairs, which a
drifting machine hardly touches. Compilations are alternated too, each in full, without a cache.
Words like num_envs=16 set fields of the scripts' arguments on top of everything else. With
--env-only they set `num_envs`, 8192 otherwise; see `sps.py --env-only`.
"""

import argparse
import concurrent.futures
import datetime
import functools
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import sps
from sps import COMPARED, PACKAGES, ROOT, our_minigrid, parse_fields, timed_steps, version

SCRIPTS = ("ppo_cartpole_jax", "ppo_swingup_jax", "ppo_minigrid_rnn", "ppo_atari_envpool_xla_jax")
ENVIRONMENTS = ("Empty-8x8", "DoorKey-8x8", "FourRooms", "MemoryS9")  # for --env-only


def load(path, name):
    """A script as a module with a name of its own, so that two versions fit into one process."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_old(commit, name, folder):
    """The script as it was at a commit."""
    show = ["git", "show", f"{commit}:{name}.py"]
    text = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    path = pathlib.Path(folder, f"old_{name}.py")
    path.write_text(text)
    return load(path, f"old_{name}")


class Trainer:
    """A version of a script with its compiled training program and state."""

    def __init__(self, script, options):
        self.args = script.Args(**{"total_timesteps": 10**12, "log_interval": 10, **options})
        if hasattr(script, "resolve_args"):
            self.args = script.resolve_args(self.args)
        self.pool = [script.make_env(self.args)] if hasattr(script, "make_pool") else []
        start = time.perf_counter()
        if hasattr(script, "init_agents") and not self.pool:
            self.start(script)
        else:
            self.state = self.first_state(script)
            chunk = script.make_train_chunk(self.args, *self.pool)
            self.chunk = chunk.lower(self.state, jnp.int32(1)).compile()
        self.compile_seconds = time.perf_counter() - start

    def start(self, script):
        """Compiles as `main` does: XLA works on training while Python initialises."""
        shapes = jax.eval_shape(functools.partial(script.init_states, self.args))
        lowered = script.make_train_chunk(self.args).lower(shapes, jnp.int32(1))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compilation = pool.submit(lowered.compile)
            self.state = script.init_agents(self.args)
            self.chunk = compilation.result()

    def first_state(self, script):
        """The state before the first update, of Atari's agents or of those of 96b6b48."""
        if hasattr(script, "init_agents"):
            return script.start_games(self.args, *self.pool, script.init_agents(self.args))
        state = script.init_train_state(self.args, script.seed_keys(self.args), *self.pool)
        return script.shard_state(self.args, state)

    def seconds(self, chunks):
        """Seconds for this many chunks of ten updates."""
        start = time.perf_counter()
        for _ in range(chunks):
            self.state, _ = self.chunk(self.state, jnp.int32(10))
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def sps(self, chunks):
        """Steps per second over this many chunks."""
        return chunks * 10 * self.args.batch_size * self.args.num_seeds / self.seconds(chunks)


def environment_before(script, env_id, num_envs):
    """`timed_steps` of an environment of the MiniGrid script of commit 96b6b48."""
    env = script.find_env(env_id)

    def step(state, key):
        action_key, reset_key = jax.random.split(key)
        action = jax.random.randint(action_key, (num_envs,), 0, env.num_actions)
        state, reward, terminated = jax.vmap(env.step)(state, action)
        done = terminated | (state.step_count >= env.max_steps)
        state = script.reset_ended(env, reset_key, done, state)
        return state, jax.vmap(env.observe)(state), (reward, done)

    def reset(keys):
        state = jax.vmap(env.reset)(keys)
        return state, jax.vmap(env.observe)(state)

    return timed_steps(reset, step, num_envs, stack=False)


def environment(script, env_id, num_envs):
    """`timed_steps` of an environment of a MiniGrid script of either version."""
    if not hasattr(script.find_env(env_id), "max_episode_steps"):
        return environment_before(script, env_id, num_envs)
    return our_minigrid(env_id, num_envs, False, script)


def compare_environments(new, old, env_id, options, pairs, compilations):
    """One row of the result: an environment of two scripts, random actions."""
    num_envs = options.get("num_envs", 8192)
    compile_seconds = []
    for _ in range(compilations):
        jax.clear_caches()
        ours, theirs = environment(new, env_id, num_envs), environment(old, env_id, num_envs)
        compile_seconds.append((ours[1]["compile_seconds"], theirs[1]["compile_seconds"]))
    ours, theirs = ours[0], theirs[0]
    ours(), theirs()  # both are warm now
    return row_of([(ours(), theirs()) for _ in range(pairs)], compile_seconds)


def compare_training(new, old, options, pairs, compilations):
    """One row of the result: training of two scripts with the same options."""
    compile_seconds = []
    for _ in range(compilations):
        jax.clear_caches()
        ours, theirs = Trainer(new, options), Trainer(old, options)
        compile_seconds.append((ours.compile_seconds, theirs.compile_seconds))
    seconds = max(min(ours.seconds(1) for _ in range(3)), 1e-3)
    chunks = max(1, round(sps.SECONDS / seconds))
    theirs.seconds(chunks)  # both are warm now
    return row_of([(ours.sps(chunks), theirs.sps(chunks)) for _ in range(pairs)], compile_seconds)


def row_of(rounds, compile_seconds):
    """The figures of a row, from pairs (new, old) of steps per second and of seconds."""
    return {
        "sps": statistics.median(a for a, _ in rounds),
        "sps_before": statistics.median(b for _, b in rounds),
        "ratio": statistics.median(a / b for a, b in rounds),
        "compile_seconds": statistics.median(a for a, _ in compile_seconds),
        "compile_seconds_before": statistics.median(b for _, b in compile_seconds),
        "rounds": rounds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, help="the commit to compare with")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--env-only", action="store_true", help="environments, not training")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--compilations", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=sps.SECONDS)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("fields", nargs="*", help="fields of the scripts' Args, name=value")
    choice = parser.parse_intermixed_args()
    sps.SECONDS = choice.seconds
    jax.config.update("jax_enable_compilation_cache", False)
    fields = parse_fields(choice.fields)
    rows = {}  # of earlier calls too, which measured other scripts
    if choice.out and choice.out.exists():
        earlier = json.loads(choice.out.read_text())["rows"]
        rows = {(row["name"], row["setting"]): row for row in earlier}
    counts = choice.pairs, choice.compilations
    with tempfile.TemporaryDirectory() as folder:
        for name, setting, compare in comparisons(choice, fields, folder):
            row = {"name": name, "setting": setting, "date": f"{datetime.date.today()}"}
            row |= compare(*counts)
            rows[name, setting] = row
            print(
                f"{name:26s} {setting:17s} {row['sps']:10,.0f} SPS, before "
                f"{row['sps_before']:10,.0f}, ratio {row['ratio']:.3f}; compiled in "
                f"{row['compile_seconds']:.1f} s, before {row['compile_seconds_before']:.1f} s",
                flush=True,
            )
            save(choice.out, list(rows.values()))


def comparisons(choice, fields, folder):
    """(script, setting, function of pairs and compilations) of each row that is asked for."""
    if choice.env_only:
        name = "ppo_minigrid_rnn"
        scripts = load(ROOT / f"{name}.py", name), load_old(choice.against, name, folder)
        for env_id in ENVIRONMENTS:
            if choice.only in env_id:
                compare = functools.partial(compare_environments, *scripts, env_id, fields)
                yield name, f"{env_id} alone", compare
        return
    for name in SCRIPTS:
        settings = {"default": fields}
        if name in COMPARED:
            settings["compared"] = COMPARED[name] | fields
        settings = {x: options for x, options in settings.items() if choice.only in f"{name} {x}"}
        if settings:
            scripts = load(ROOT / f"{name}.py", name), load_old(choice.against, name, folder)
        for setting, options in settings.items():
            yield name, setting, functools.partial(compare_training, *scripts, options)


def save(path, rows):
    """Writes what there is, so that an interrupted run has not been for nothing."""
    result = {
        "command": "python " + " ".join(["benchmarks/versions.py", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "versions": {package: version(package) for package in PACKAGES if version(package)},
        "rows": rows,
    }
    if path:
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
