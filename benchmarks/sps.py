"""Measures steady-state steps per second of the scripts and of other libraries.

    python benchmarks/sps.py                     # all scripts: default and comparison flags
    python benchmarks/sps.py --compare           # Rejax, Stable-Baselines3, SBX
    python benchmarks/sps.py --compare --purejaxrl FOLDER  # and a clone of PureJaxRL
    python benchmarks/sps.py --scaling num-envs  # 1 .. 65,536 environments; also: num-seeds
    python benchmarks/sps.py --env-only          # environments of MiniGrid and of its peers
    python benchmarks/sps.py --atari             # emulators alone, network alone, both

`--only WORD` selects candidates whose name contains WORD. Arguments like num_envs=16 set fields of
the scripts' Args. Libraries that are not installed (requirements.txt) are skipped.

All candidates are compiled without a cache and warmed up. They then run in alternation (with
--scaling one after the other). Reported are medians over the rounds and, for other libraries, the
median ratio within a round, which is robust to drift of the machine. A round ends with
`block_until_ready`. compare.py compares with an earlier commit.
"""

import argparse
import ast
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CARTPOLE, SWINGUP = "ppo_cartpole_jax", "ppo_swingup_jax"
MINIGRID, ATARI = "ppo_minigrid_rnn", "ppo_atari_envpool_xla_jax"
# Settings for comparisons: CartPole with everything that the other libraries compute (advantage
# normalization, value clipping, entropy), swing-up at 1,024 x 128, a small recurrent agent.
COMPARED = {
    CARTPOLE: dict(
        num_envs=64, num_steps=128, update_epochs=4, num_minibatches=4, learning_rate=2.5e-4,
        anneal_lr=False, gamma=0.99, gae_lambda=0.95, norm_adv=True, clip_coef=0.2,
        clip_vloss=True, ent_coef=0.01, adam_eps=1e-8,
    ),
    SWINGUP: dict(num_envs=1024, num_steps=128, update_epochs=4, num_minibatches=4),
    MINIGRID: dict(
        env_id="DoorKey-8x8", num_envs=1024, num_steps=16, update_epochs=1, num_minibatches=16,
        rnn_hidden_dim=64, head_hidden_dim=64,
    ),
}  # fmt: skip
# Ours -> xminigrid's most similar environment, or None. xminigrid observes through walls. NAVIX and
# EnvPool use the same names.
PEER_ENVIRONMENTS = {
    "Empty-6x6": "Empty-6x6",
    "Empty-8x8": "Empty-8x8",
    "DoorKey-8x8": "DoorKey-8x8",
    "FourRooms": "FourRooms",
    "KeyCorridorS3R3": None,
    "MemoryS9": "MemoryS8",
}
SECONDS = 1.0  # approximate length of a measurement, set by `--seconds`
PACKAGES = "jax flax optax envpool rejax gymnax stable-baselines3 sbx-rl xminigrid navix".split()


def version(package):
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_fields(words):
    """Parses words like num_envs=16; values that are not Python literals are strings."""
    fields = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            fields[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            fields[name] = text
    return fields


def prepare(script, wrap_pool=lambda envs: envs, **changes):
    """Returns (args, initial state, `update(args, state)`, envs).

    `envs` is Atari's pool of emulators, otherwise None. The caller must keep a reference to it,
    because a compiled function does not.
    """
    args = script.Args(**{"total_timesteps": 1e12, **changes})
    state = script.jit_function(args, script.init_states, level=0)(script.float_inputs(args))
    if not hasattr(script, "start_episodes"):
        return args, state, script.update_seeds, None
    env = script.make_env(args)
    pool = wrap_pool(env.make_pool(script.env_seeds(args, args.num_envs)))
    state = script.start_episodes(args, env, pool, state)
    return args, state, lambda args, state: script.update(args, env, pool, state), pool


def compiled(script, args, function, *inputs, **options):
    """Compiles function(args, ...) as the script's `main` does."""
    numbers = script.float_inputs(args)
    run = script.jit_function(args, function, **options).lower(numbers, *inputs).compile()
    return functools.partial(run, numbers)


def ours(name, wrap_pool=lambda envs: envs, **changes):
    """Returns (function that trains for SECONDS and returns steps per second, facts)."""
    script = importlib.import_module(name)
    args, state, update, envs = prepare(script, wrap_pool, **changes)
    donated = {"donate_argnums": 1} if envs is None else {}  # as in `main`
    start = time.perf_counter()
    run_update = compiled(script, args, update, state, **donated)
    facts = {"compile_seconds": time.perf_counter() - start}
    facts["kernels"] = run_update.func.as_text().count(" fusion(")
    carry, kept = [state], [envs]

    def run(updates):
        start = time.perf_counter()
        for _ in range(updates):
            carry[0], _ = run_update(carry[0])
        jax.block_until_ready(carry[0])
        assert kept  # a reference to the pool that the compiled function steps
        return time.perf_counter() - start

    if jax.default_backend() != "cpu":  # the first calls load kernels and build CUDA graphs
        run(3)
    updates = 1
    while (seconds := run(updates)) < SECONDS / 2:  # warm-up, finds the number of updates
        updates *= 2
    updates = max(1, round(updates * SECONDS / seconds))
    return lambda: updates * args.batch_size * args.num_seeds / run(updates), facts


def timed_steps(reset, step, num_envs, num_steps=64):
    """Returns (function that returns steps per second of `num_envs` environments, facts).

    `reset(keys)` returns (state, observation). `step(state, key)` takes random actions and returns
    (state, observation, (reward, done)). Every observation is written to memory.
    """

    def run_steps(carry, key):
        def one(carry, key):
            state, obs, outcome = step(carry[0], key)
            return (state, obs), outcome

        return jax.lax.scan(one, carry, jax.random.split(key, num_steps))

    carry = [jax.jit(reset)(jax.random.split(jax.random.key(0), num_envs))]
    start = time.perf_counter()
    compiled = jax.jit(run_steps).lower(carry[0], jax.random.key(0)).compile()
    facts = {"compile_seconds": time.perf_counter() - start}
    calls = [0]

    def run():
        start, first = time.perf_counter(), calls[0]
        while time.perf_counter() - start < SECONDS / 2:
            calls[0] += 1
            carry[0], _ = jax.block_until_ready(compiled(carry[0], jax.random.key(calls[0])))
        return (calls[0] - first) * num_steps * num_envs / (time.perf_counter() - start)

    return run, facts


def our_minigrid(env_id, num_envs):
    """`timed_steps` of an environment of the MiniGrid script."""
    script = importlib.import_module(MINIGRID)
    env = script.find_env(env_id)

    def step(state, key):
        action_key, step_key, reset_key = jax.random.split(key, 3)
        action = jax.random.randint(action_key, (num_envs,), 0, env.num_actions)
        step_keys = jax.random.split(step_key, num_envs)
        state, reward, terminated = jax.vmap(env.step)(step_keys, state, action)
        done = terminated | (state.step_count >= env.max_episode_steps)
        if jax.default_backend() == "cpu":  # as in the rollout
            state = script.reset_ended(env, reset_key, done, state)
        else:
            levels = jax.vmap(env.reset)(jax.random.split(reset_key, num_envs))
            state = script.select(done, levels, state)
        return state, jax.vmap(env.observe)(state), (reward, done)

    def reset(keys):
        state = jax.vmap(env.reset)(keys)
        return state, jax.vmap(env.observe)(state)

    return timed_steps(reset, step, num_envs)


def xminigrid_env(env_id, num_envs):
    """`timed_steps` of an environment of xminigrid."""
    import xminigrid
    from xminigrid.wrappers import GymAutoResetWrapper

    env, params = xminigrid.make(env_id)
    env = GymAutoResetWrapper(env)

    def step(timestep, key):
        action = jax.random.randint(key, (num_envs,), 0, env.num_actions(params))
        timestep = jax.vmap(env.step, (None, 0, 0))(params, timestep, action)
        return timestep, timestep.observation, (timestep.reward, timestep.step_type)

    def reset(keys):
        timestep = jax.vmap(env.reset, (None, 0))(params, keys)
        return timestep, timestep.observation

    return timed_steps(reset, step, num_envs)


def navix_env(env_id, num_envs):
    """`timed_steps` of an environment of NAVIX, with its auto-reset."""
    import navix

    # The default observation is the whole grid.
    first_person = navix.observations.symbolic_first_person
    env = navix.make(f"Navix-{env_id}-v0", observation_fn=first_person)

    def step(timestep, key):
        action = jax.random.randint(key, (num_envs,), 0, len(env.action_set))
        timestep = jax.vmap(env.step)(timestep, action)
        return timestep, timestep.observation, (timestep.reward, timestep.step_type)

    def reset(keys):
        timestep = jax.vmap(env.reset)(keys)
        return timestep, timestep.observation

    return timed_steps(reset, step, num_envs)


def envpool_env(env_id, num_envs):
    """Measures EnvPool's MiniGrid (C++, auto-reset, all cores) with actions sampled beforehand."""
    import envpool

    pool = envpool.make(f"MiniGrid-{env_id}-v0", env_type="gymnasium", num_envs=num_envs)
    pool.reset()
    actions = np.random.default_rng(0).integers(pool.action_space.n, size=(64, num_envs))

    def run():
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < SECONDS / 2:
            pool.step(actions[steps % 64])
            steps += 1
        return steps * num_envs / (time.perf_counter() - start)

    run()
    return run, {"compile_seconds": 0.0}


class StillPool:
    """A pool of emulators without games, to measure the network alone."""

    def __init__(self, envs):
        self.start = envs.reset()

    def reset(self):
        return self.start

    def xla(self):
        obs, info = self.start

        def step(handle, action):
            # Frames depend on the action, so that XLA cannot precompute them.
            frames = obs ^ action[:, None, None, None].astype(jnp.uint8)
            zeros, never = jnp.zeros(action.shape), action < 0
            after = {"reward": zeros, "terminated": never.astype(jnp.int32), "lives": info["lives"]}
            return handle, (frames, zeros, never, never, after)

        return jnp.zeros(8, jnp.uint8), None, None, step


def emulators_alone(**changes):
    """Returns (function that plays random actions and returns steps per second, facts)."""
    script = importlib.import_module(ATARI)
    args = script.Args(**changes)
    env = script.make_env(args)
    envs, num_actions = env.make_pool(script.env_seeds(args, args.num_envs)), env.action_space.n
    handle, _, _, step = envs.xla()
    envs.reset()

    @jax.jit
    def play(key):
        actions = jax.random.randint(key, (args.num_steps, args.num_envs), 0, num_actions)

        def one(handle, action):
            handle, (_, reward, *_) = step(handle, action)
            return handle, reward

        return jax.lax.scan(one, handle, actions)[1]

    start = time.perf_counter()
    play = play.lower(jax.random.key(0)).compile()
    facts = {"compile_seconds": time.perf_counter() - start}

    def run():
        start = time.perf_counter()
        play(jax.random.key(0)).block_until_ready()
        assert envs is not None  # a reference to the pool that the compiled function steps
        return args.num_steps * args.num_envs / (time.perf_counter() - start)

    run()
    return run, facts


def rejax_ppo():
    """Measures Rejax's PPO with the settings of COMPARED."""
    import rejax

    network = {"hidden_layer_sizes": (64, 64), "activation": "tanh"}
    algorithm = rejax.get_algo("ppo").create(
        env="CartPole-v1", num_envs=64, num_steps=128, num_epochs=4, num_minibatches=4,
        learning_rate=2.5e-4, total_timesteps=10**9, eval_freq=10**9, agent_kwargs=network,
    )  # fmt: skip
    iterations = 20

    @jax.jit
    def loop(state):
        step = lambda _, state: algorithm.train_iteration(state)
        return jax.lax.fori_loop(0, iterations, step, state)

    state = [algorithm.init_state(jax.random.key(0))]
    start = time.perf_counter()
    state[0] = jax.block_until_ready(loop(state[0]))
    facts = {"compile_seconds": time.perf_counter() - start}

    def run():
        start = time.perf_counter()
        state[0] = jax.block_until_ready(loop(state[0]))
        return iterations * 64 * 128 / (time.perf_counter() - start)

    return run, facts


def purejaxrl_ppo(folder):
    """Measures PureJaxRL's PPO with the settings of COMPARED.

    Empty modules replace brax and navix, which CartPole does not need. The time contains the
    initialization, which is short compared with 20 updates.
    """
    for name in "brax brax.envs brax.envs.wrappers brax.envs.wrappers.training navix".split():
        sys.modules[name] = unittest.mock.MagicMock()
    sys.path.insert(0, str(folder / "purejaxrl"))
    import ppo

    iterations = 20
    config = dict(
        LR=2.5e-4, NUM_ENVS=64, NUM_STEPS=128, TOTAL_TIMESTEPS=iterations * 64 * 128,
        UPDATE_EPOCHS=4, NUM_MINIBATCHES=4, GAMMA=0.99, GAE_LAMBDA=0.95, CLIP_EPS=0.2,
        ENT_COEF=0.01, VF_COEF=0.5, MAX_GRAD_NORM=0.5, ACTIVATION="tanh", ENV_NAME="CartPole-v1",
        ANNEAL_LR=False, DEBUG=False,
    )  # fmt: skip
    start = time.perf_counter()
    train = jax.jit(ppo.make_train(config)).lower(jax.random.key(0)).compile()
    facts = {"compile_seconds": time.perf_counter() - start}

    def run():
        start = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(0)))
        return iterations * 64 * 128 / (time.perf_counter() - start)

    run()
    return run, facts


def sb3_like(library):
    """Measures PPO of "stable_baselines3" or "sbx" with the settings of COMPARED."""
    from stable_baselines3.common.env_util import make_vec_env

    settings = dict(n_steps=128, batch_size=2048, n_epochs=4, learning_rate=2.5e-4)
    if library == "sbx":
        import flax.linen as nn
        import sbx as module
    else:
        import stable_baselines3 as module
        import torch.nn as nn

        settings["device"] = "cpu"
    activation = nn.tanh if library == "sbx" else nn.Tanh
    policy = dict(net_arch=dict(pi=[64, 64], vf=[64, 64]), activation_fn=activation)
    envs = make_vec_env("CartPole-v1", 64)
    model = module.PPO("MlpPolicy", envs, policy_kwargs=policy, **settings)
    start = time.perf_counter()
    model.learn(64 * 128)
    facts = {"compile_seconds": time.perf_counter() - start}

    def run():
        start = time.perf_counter()
        model.learn(2 * 64 * 128, reset_num_timesteps=False)
        return 2 * 64 * 128 / (time.perf_counter() - start)

    return run, facts


PEERS = {"rejax": rejax_ppo}
PEERS |= {name: functools.partial(sb3_like, name) for name in ("sbx", "stable_baselines3")}


def candidates(choice, fields):
    """Yields groups of (name, function that prepares it); the members of a group alternate."""

    def entry(name, label, **changes):
        return f"{name} {label}", functools.partial(ours, name, **changes | fields)

    if choice.compare:
        flags = COMPARED[CARTPOLE] | fields
        group = [(CARTPOLE, functools.partial(ours, CARTPOLE, **flags))]
        if choice.purejaxrl:
            group.append(("purejaxrl", functools.partial(purejaxrl_ppo, choice.purejaxrl)))
        for peer, make in PEERS.items():
            if importlib.util.find_spec(peer):
                group.append((peer, make))
            else:
                print(f"{peer} is not installed", file=sys.stderr)
        yield group
    elif choice.env_only:
        num_envs = fields.get("num_envs", 8192)
        for env_id, peer_id in PEER_ENVIRONMENTS.items():
            make = functools.partial(our_minigrid, env_id, num_envs)
            group = [(f"{MINIGRID} {env_id}", make)]
            if importlib.util.find_spec("xminigrid") and peer_id is not None:
                make = functools.partial(xminigrid_env, f"MiniGrid-{peer_id}", num_envs)
                group.append((f"xminigrid {peer_id}", make))
            if importlib.util.find_spec("navix"):
                import navix

                if f"Navix-{env_id}-v0" in navix.registry():
                    make = functools.partial(navix_env, env_id, num_envs)
                    group.append((f"navix {env_id}", make))
            if importlib.util.find_spec("envpool"):
                make = functools.partial(envpool_env, env_id, num_envs)
                group.append((f"envpool {env_id}", make))
            yield group
    elif choice.atari:
        many = fields | {"num_envs": 8 * fields.get("num_envs", 8)}
        label = f"emulators alone num_envs={many['num_envs']}"
        yield [
            entry(ATARI, "defaults"),
            ("emulators alone", functools.partial(emulators_alone, **fields)),
            (label, functools.partial(emulators_alone, **many)),
            ("network alone", functools.partial(ours, ATARI, StillPool, **fields)),
        ]
    elif choice.scaling:
        field = choice.scaling.replace("-", "_")
        largest = choice.largest or (65_536 if field == "num_envs" else 256)
        value = 1
        while value <= largest:
            changes = {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4, field: value}
            yield [entry(choice.script, f"{field}={value}", **changes)]
            value *= 4
    else:
        group = []
        for name in (path.stem for path in sorted(ROOT.glob("ppo_*.py"))):
            group.append(entry(name, "defaults"))
            if name in COMPARED:
                group.append(entry(name, "compared", **COMPARED[name]))
        yield group


def measure(group, num_rounds):
    """Returns {name: (steps per second of each round, facts)} of alternating candidates."""
    ready = {name: make() for name, make in group}
    rounds = {name: [] for name in ready}
    for _ in range(num_rounds):
        for name, (run, _) in ready.items():
            rounds[name].append(run())
    return {name: (rounds[name], ready[name][1]) for name in ready}


def parse_args():
    """Parses the command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    flag = functools.partial(parser.add_argument, action="store_true")
    flag("--compare", help="compare CartPole with other libraries")
    flag("--env-only", help="compare MiniGrid environments without training")
    flag("--atari", help="measure emulators and network separately")
    option = parser.add_argument
    option("--purejaxrl", type=pathlib.Path, help="with --compare: clone of PureJaxRL")
    option("--scaling", choices=["num-envs", "num-seeds"], help="vary a size by factors of four")
    option("--script", default=CARTPOLE, help="script for --scaling")
    option("--largest", type=int, help="largest size of --scaling")
    option("--only", default="", help="only candidates whose name contains this")
    option("--rounds", type=int, default=7)
    option("--seconds", type=float, default=SECONDS, help="approximate length of a measurement")
    option("--out", type=pathlib.Path, help="JSON file to write")
    option("fields", nargs="*", help="fields of the scripts' Args, name=value")
    return parser.parse_intermixed_args()


def main():
    global SECONDS
    choice = parse_args()
    SECONDS = choice.seconds
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    for group in candidates(choice, parse_fields(choice.fields)):
        group = [(name, make) for name, make in group if choice.only in name]
        measured = measure(group, choice.rounds)
        for name, (rounds, facts) in measured.items():
            row = {"name": name, "sps": statistics.median(rounds), "rounds": rounds, **facts}
            text = f"{name:36s} {row['sps']:14,.0f} SPS, compiled in {row['compile_seconds']:.1f} s"
            if choice.compare or choice.env_only:  # ratio to the first member of the group
                base, (base_rounds, _) = next(iter(measured.items()))
                factor = statistics.median(a / b for a, b in zip(base_rounds, rounds))
                row |= {"base": base, "base_is_faster": factor}
                text += f", {base} is {factor:.2f} x"
            rows.append(row)
            print(text, flush=True)
    versions = {name: version(name) for name in PACKAGES if version(name)}
    backend, kind = jax.default_backend(), jax.devices()[0].device_kind
    result = {
        "command": "python " + " ".join(["benchmarks/sps.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": f"{backend} {kind}, {platform.machine()}",
        "cpu_count": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version()} | versions,
        "rows": rows,
    }
    if choice.out:
        choice.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
