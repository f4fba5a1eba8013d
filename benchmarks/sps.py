"""Steady-state steps per second of every script, of peers, and how they scale; writes JSON.

    python benchmarks/sps.py                       # every script with its own defaults, and in a setting to compare
    python benchmarks/sps.py --compare             # beside Rejax, Stable-Baselines3 and SBX (see requirements.txt)
    python benchmarks/sps.py --compare --purejaxrl FOLDER    # and PureJaxRL, in a clone of its repository
    python benchmarks/sps.py --scaling num-envs    # 1 .. 65,536 environments; also: num-seeds
    python benchmarks/sps.py --env-only            # MiniGrid's environments alone, beside xminigrid; also: --stack
    python benchmarks/sps.py --atari               # Atari: emulators alone, network alone, the whole
    python benchmarks/sps.py --large               # sizes that fill a GPU

Everything is compiled and warmed up first; then the candidates take turns (sizes of one script, with --scaling and
--large, are measured one after the other), and medians over the rounds are reported; with peers also by how much ours
is faster in the median round, because machines drift. A round ends with `block_until_ready`.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
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

# Settings to compare with other programs: CartPole with all that the peers compute (normalised advantages, clipped
# values, entropy), the 1,024 x 128 swing-up, a recurrent agent of moderate size.
COMPARED = {
    "ppo_cartpole_jax": dict(
        num_envs=64, num_steps=128, update_epochs=4, num_minibatches=4, learning_rate=2.5e-4, anneal_lr=False,
        gae_lambda=0.95, norm_adv=True, clip_coef=0.2, clip_vloss=True, ent_coef=0.01, adam_eps=1e-8,
    ),
    "ppo_swingup_jax": dict(num_envs=1024, num_steps=128, update_epochs=4, num_minibatches=4),
    "ppo_minigrid_rnn": dict(
        env_id="DoorKey-8x8", num_envs=1024, num_steps=16, update_epochs=1, num_minibatches=16, rnn_hidden_dim=64,
        head_hidden_dim=64,
    ),
}  # fmt: skip
# Ours -> the environment of xminigrid that comes closest (which sees through walls, ours only in Empty).
PEER_ENVIRONMENTS = {name: name for name in ("Empty-6x6", "DoorKey-8x8", "FourRooms")} | {"MemoryS9": "MemoryS8"}
# Sizes that fill a GPU; the last ones are the setting of the notebook that the MiniGrid script succeeds.
LARGE = [
    (name, dict(num_envs=num_envs, num_steps=128, update_epochs=4, num_minibatches=4))
    for name in ("ppo_cartpole_jax", "ppo_swingup_jax")
    for num_envs in (1024, 16_384, 65_536)
] + [
    ("ppo_minigrid_rnn", dict(
        env_id="DoorKey-8x8", num_envs=8192, num_steps=16, update_epochs=1, num_minibatches=16, rnn_hidden_dim=1024,
        head_hidden_dim=256, bf16=bf16,
    ))
    for bf16 in (False, True)
]  # fmt: skip


PACKAGES = "jax flax optax envpool rejax gymnax stable-baselines3 sbx-rl xminigrid".split()


def version(package):
    """Version of an installed package, None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def matrix_peak(dtype=jnp.float32):
    """Floating-point operations per second of a large product, the best of ten."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        product(a).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def product_flops(jaxpr):
    """Floating-point operations of all matrix products and convolutions of a program, loops included."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(list(eqn.params.values()))]
        inner = [product_flops(sub) for sub in inner if hasattr(sub, "eqns")]
        match eqn.primitive.name:
            case "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                lengths = [eqn.invars[0].aval.shape[axis] for axis in contracted]
                total += 2 * eqn.outvars[0].aval.size * math.prod(lengths)
            case "conv_general_dilated":
                kernel, out_axis = eqn.invars[1].aval, eqn.params["dimension_numbers"].rhs_spec[0]
                total += 2 * eqn.outvars[0].aval.size * kernel.size // kernel.shape[out_axis]
            case "scan":
                total += eqn.params["length"] * sum(inner)
            case "while":
                assert not any(inner), "how often a while loop runs is not known"
            case "cond":
                total += max(inner)
            case _:
                total += sum(inner)
    return total


def ours(name, wrap_pool=lambda envs: envs, **changes):
    """A script with these arguments: a function that trains for a second and returns steps per second, and facts."""
    script = importlib.import_module(name)
    args = script.Args(**{"total_timesteps": 10**12, **changes})
    pool = [wrap_pool(script.make_env(args))] if hasattr(script, "make_pool") else []
    state = script.init_train_state(args, script.seed_keys(args), *pool)
    carry, updates = [script.shard_state(args, state)], 1
    start = time.perf_counter()
    chunk = script.make_train_chunk(args, *pool).lower(carry[0], jnp.int32(1)).compile()
    facts = {"compile_seconds": time.perf_counter() - start, "product_dtype": "float32"}
    if getattr(args, "bf16", False):
        facts["product_dtype"] = "bfloat16"
    flops = product_flops(jax.make_jaxpr(script.make_train_step(args, *pool))(state).jaxpr)
    facts["product_flops_per_step"] = flops / (args.batch_size * args.num_seeds)

    def run(updates):
        start = time.perf_counter()
        carry[0] = jax.block_until_ready(chunk(carry[0], jnp.int32(updates))[0])
        assert pool is not None  # the compiled program steps it: it has to live as long
        return time.perf_counter() - start

    while (seconds := run(updates)) < 0.5:  # warms up and finds how many updates make a second
        updates *= 2
    updates = max(1, round(updates / seconds))
    return lambda: updates * args.batch_size * args.num_seeds / run(updates), facts


def timed_steps(reset, step, num_envs, stack, num_steps=64):
    """Steps per second of `num_envs` environments and the seconds of compilation.

    `reset(keys)` gives (state, observation), `step(state, key)` takes a random action everywhere and gives (state,
    observation, (reward, done)). Every observation is written to memory, where an agent would read it. With `stack`
    those of all steps are also put into one array, as rollouts do; that XLA does on one core.
    """

    def run_steps(carry, key):
        def one(carry, key):
            state, obs, outcome = step(carry[0], key)
            return (state, obs), (outcome, carry[1]) if stack else outcome

        return jax.lax.scan(one, carry, jax.random.split(key, num_steps))

    carry = [jax.jit(reset)(jax.random.split(jax.random.key(0), num_envs))]
    start = time.perf_counter()
    compiled = jax.jit(run_steps).lower(carry[0], jax.random.key(0)).compile()
    facts = {"compile_seconds": time.perf_counter() - start}
    calls = [0]

    def run():
        start, first = time.perf_counter(), calls[0]
        while time.perf_counter() - start < 0.5:
            calls[0] += 1
            carry[0], _ = jax.block_until_ready(compiled(carry[0], jax.random.key(calls[0])))
        return (calls[0] - first) * num_steps * num_envs / (time.perf_counter() - start)

    return run, facts


def our_minigrid(env_id, num_envs, stack):
    import ppo_minigrid_rnn as script

    env = script.find_env(env_id)

    def step(state, key):
        action_key, reset_key = jax.random.split(key)
        state, reward, terminated = jax.vmap(env.step)(
            state, jax.random.randint(action_key, (num_envs,), 0, env.num_actions)
        )
        done = terminated | (state.step_count >= env.max_steps)
        state = script.reset_ended(env, reset_key, done, state)
        return state, jax.vmap(env.observe)(state), (reward, done)

    def reset(keys):
        state = jax.vmap(env.reset)(keys)
        return state, jax.vmap(env.observe)(state)

    return timed_steps(reset, step, num_envs, stack)


def rollout_alone(num_pools, num_steps=128):
    """A function that plays with an untrained agent and returns steps per second.

    With two pools of half the size the network decides for one of them while the emulators of the other one work.
    """
    script = importlib.import_module("ppo_atari_envpool_xla_jax")
    args = script.Args()
    size = args.num_envs // num_pools
    pools = [script.make_pool(args, np.arange(size) + i * size, training=True) for i in range(num_pools)]
    params, handles, calls = script.init_params(jax.random.key(0), pools[0].action_space.n), [], []
    for pool in pools:
        pool.async_reset()
        handle, *receive_and_send, _ = pool.xla()
        handles.append(handle)
        calls.append(receive_and_send)

    @jax.jit
    def play(handles, key):
        def one(handles, noises):
            handles, frames = list(handles), []
            for i, (receive, send) in enumerate(calls):
                handles[i], (obs, *_) = receive(handles[i])
                action = script.sample_action(script.forward(params, obs)[0], noises[i])
                handles[i] = send(handles[i], action, jnp.arange(size, dtype=jnp.int32))
                handles = list(jax.lax.optimization_barrier(tuple(handles)))  # in this order
                frames.append(obs)
            return tuple(handles), frames

        return jax.lax.scan(one, handles, script.sample_noise(key, (num_steps, num_pools, size)))

    carry = [tuple(handles)]
    start = time.perf_counter()
    play = play.lower(carry[0], jax.random.key(0)).compile()
    facts = {"compile_seconds": time.perf_counter() - start}

    def run():
        start = time.perf_counter()
        carry[0], _ = jax.block_until_ready(play(carry[0], jax.random.key(0)))
        assert pools is not None  # the compiled program steps them: they have to live as long
        return num_steps * args.num_envs / (time.perf_counter() - start)

    run()
    return run, facts


def xminigrid_env(env_id, num_envs, stack):
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

    return timed_steps(reset, step, num_envs, stack)


class StillPool:
    """A pool of emulators that stand still: all of a script's time but theirs."""

    def __init__(self, envs):
        self.action_space, self.start = envs.action_space, envs.reset()

    def reset(self):
        return self.start

    def xla(self):
        obs, info = self.start

        def step(handle, action):  # the frames depend on the action, so that nothing can be computed ahead
            zeros, flags = jnp.zeros(action.shape), action < 0
            info_of_step = {"reward": zeros, "terminated": flags.astype(jnp.int32), "lives": info["lives"]}
            return handle, (obs ^ action[:, None, None, None].astype(jnp.uint8), zeros, flags, flags, info_of_step)

        return jnp.zeros(8, jnp.uint8), None, None, step


def emulators_alone(num_steps=128, **changes):
    """A function that steps EnvPool through XLA with random actions and returns steps per second."""
    script = importlib.import_module("ppo_atari_envpool_xla_jax")
    args = script.Args(total_timesteps=10**12, **changes)
    envs = script.make_env(args)
    handle, _, _, step = envs.xla()
    envs.reset()

    @jax.jit
    def play(key):
        actions = jax.random.randint(key, (num_steps, args.num_envs), 0, envs.action_space.n)

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
        return num_steps * envs.config["num_envs"] / (time.perf_counter() - start)

    run()
    return run, facts


def rejax_ppo():
    import rejax

    network = {"hidden_layer_sizes": (64, 64), "activation": "tanh"}
    algorithm = rejax.get_algo("ppo").create(
        env="CartPole-v1", num_envs=64, num_steps=128, num_epochs=4, num_minibatches=4, learning_rate=2.5e-4,
        total_timesteps=10**9, eval_freq=10**9, agent_kwargs=network,
    )  # fmt: skip
    iterations = 20
    loop = jax.jit(lambda s: jax.lax.fori_loop(0, iterations, lambda _, s: algorithm.train_iteration(s), s))
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
    """PureJaxRL is in no package index; of its imports brax and navix serve other environments than CartPole.

    Its program trains from scratch, so the time contains the initialisation, little beside 20 updates.
    """
    for name in "brax brax.envs brax.envs.wrappers brax.envs.wrappers.training navix".split():
        sys.modules[name] = unittest.mock.MagicMock()
    sys.path.insert(0, str(folder / "purejaxrl"))
    import ppo

    iterations = 20
    config = dict(
        LR=2.5e-4, NUM_ENVS=64, NUM_STEPS=128, TOTAL_TIMESTEPS=iterations * 64 * 128, UPDATE_EPOCHS=4,
        NUM_MINIBATCHES=4, GAMMA=0.99, GAE_LAMBDA=0.95, CLIP_EPS=0.2, ENT_COEF=0.01, VF_COEF=0.5, MAX_GRAD_NORM=0.5,
        ACTIVATION="tanh", ENV_NAME="CartPole-v1", ANNEAL_LR=False, DEBUG=False,
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
    model = module.PPO("MlpPolicy", make_vec_env("CartPole-v1", 64), policy_kwargs=policy, **settings)
    start = time.perf_counter()
    model.learn(64 * 128)
    facts = {"compile_seconds": time.perf_counter() - start}

    def run():
        start = time.perf_counter()
        model.learn(2 * 64 * 128, reset_num_timesteps=False)
        return 2 * 64 * 128 / (time.perf_counter() - start)

    return run, facts


def candidates(choice):
    scripts = [path.stem for path in sorted(ROOT.glob("ppo_*.py"))]
    if choice.compare:
        yield "ppo_cartpole_jax", lambda: ours("ppo_cartpole_jax", **COMPARED["ppo_cartpole_jax"])
        yield "rejax", rejax_ppo
        if choice.purejaxrl:
            yield "purejaxrl", lambda: purejaxrl_ppo(choice.purejaxrl)
        yield "sbx", lambda: sb3_like("sbx")
        yield "stable-baselines3", lambda: sb3_like("stable_baselines3")
    elif choice.env_only:
        for ours_id, theirs in PEER_ENVIRONMENTS.items():
            yield f"ppo_minigrid_rnn {ours_id}", lambda env_id=ours_id: our_minigrid(env_id, 8192, choice.stack)
            if importlib.util.find_spec("xminigrid"):
                yield (
                    f"xminigrid {theirs}",
                    lambda env_id=theirs: xminigrid_env(f"MiniGrid-{env_id}", 8192, choice.stack),
                )
    elif choice.large:
        for name, changes in LARGE:
            shape = "num_envs num_steps rnn_hidden_dim bf16".split()
            label = " ".join(f"{field}={changes[field]}" for field in shape if field in changes)
            yield f"{name} {label}", lambda name=name, changes=changes: ours(name, **changes)
    elif choice.atari:
        name = "ppo_atari_envpool_xla_jax"
        yield f"{name} defaults", lambda: ours(name)
        yield "emulators alone", emulators_alone
        yield "emulators alone num_envs=64", lambda: emulators_alone(num_envs=64)
        yield "network alone", lambda: ours(name, StillPool)
        yield "rollout alone", lambda: rollout_alone(1)
        yield "rollout alone, two half-pools", lambda: rollout_alone(2)
    elif choice.scaling:
        field = choice.scaling.replace("-", "_")
        largest = choice.largest or (65_536 if field == "num_envs" else 256)
        name = choice.script
        value = 1
        while value <= largest:
            changes = {"num_steps": 128, "num_minibatches": 4, "update_epochs": 4, field: value}
            yield f"{name} {field}={value}", lambda changes=changes: ours(name, **changes)
            value *= 4
    else:
        for name in scripts:
            yield f"{name} defaults", lambda name=name: ours(name)
            if name in COMPARED:
                yield f"{name} compared", lambda name=name: ours(name, **COMPARED[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="measure the peers beside ppo_cartpole_jax")
    parser.add_argument("--purejaxrl", type=pathlib.Path, help="with --compare: a clone of PureJaxRL's repository")
    parser.add_argument("--env-only", action="store_true", help="MiniGrid without training, beside xminigrid")
    parser.add_argument("--stack", action="store_true", help="with --env-only: keep all observations in one array")
    parser.add_argument("--atari", action="store_true", help="measure what an Atari step's time consists of")
    parser.add_argument("--large", action="store_true", help="sizes that fill a GPU, one after the other")
    parser.add_argument("--scaling", choices=["num-envs", "num-seeds"], help="grow one number by factors of four")
    parser.add_argument("--script", default="ppo_cartpole_jax", help="the script whose scaling is measured")
    parser.add_argument("--largest", type=int, help="where the scaling ends")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    choice = parser.parse_args()

    def measure(entries):
        ready = {name: make() for name, make in entries}
        rounds = {name: [] for name in ready}
        for _ in range(choice.rounds):
            for name, (run, _) in ready.items():
                rounds[name].append(run())
        return {name: (rounds[name], ready[name][1]) for name in ready}

    peaks, entries = {dtype: matrix_peak(dtype) for dtype in ("float32", "bfloat16")}, list(candidates(choice))
    # Large sizes are measured one after the other: all at once would not fit into memory.
    size = 1 if choice.scaling or choice.large else len(entries)
    if choice.env_only:  # one of ours and its peer
        size = len(entries) // len(PEER_ENVIRONMENTS)
    groups = [entries[i : i + size] for i in range(0, len(entries), size)]
    measured = {}
    for group in groups:
        measured |= measure(group)
    rows = []
    for name, (rounds, facts) in measured.items():
        row = {"name": name, "sps": statistics.median(rounds), "rounds": rounds, **facts}
        if choice.compare or choice.env_only:  # how much faster the first of the group is
            base = next(group[0][0] for group in groups if name in dict(group))
            row |= {"base": base, "base_is_faster": statistics.median(a / b for a, b in zip(measured[base][0], rounds))}
        if "product_flops_per_step" in row:  # model FLOP/s utilisation, against the peak measured above
            row["mfu"] = row["sps"] * row["product_flops_per_step"] / peaks[row["product_dtype"]]
        rows.append(row)
        print(f"{name:36s} {row['sps']:14,.0f} SPS, compiled in {row['compile_seconds']:.1f} s"
              + (f", {row['base']} is {row['base_is_faster']:.2f} x" if "base" in row else "")
              + (f", MFU {row['mfu']:.0%}" if "mfu" in row else ""), flush=True)  # fmt: skip
    result = {
        "command": "python " + " ".join([f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.default_backend()} {jax.devices()[0].device_kind}, {platform.machine()}",
        "cpu_count": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES if version(name)},
        "matrix_peak_gflops": {dtype: peak / 1e9 for dtype, peak in peaks.items()},
        "rows": rows,
    }
    if choice.out:
        choice.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
