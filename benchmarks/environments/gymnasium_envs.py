"""Gymnasium's environments, and your own in Python, in Atari's script.

    python benchmarks/environments/gymnasium_envs.py --env-id LunarLander-v3 --seed 2
    PYTHONPATH=. python benchmarks/environments/gymnasium_envs.py --env-id my_module:Mine-v0

Install Gymnasium with the packages of the environment: `pip install "gymnasium[box2d]"`. Your own
`gymnasium.Env` needs an id that its module registers. The second command imports my_module.py of
the current folder. Or start the training in your own script, with this folder in PYTHONPATH:

    import gymnasium
    import gymnasium_envs

    gymnasium.register("Mine-v0", Mine, max_episode_steps=200)
    gymnasium_envs.main(["--env-id", "Mine-v0"])

The environment needs a time limit, because an evaluation waits for the end of its episodes. A video
needs its render mode rgb_array; on a machine without a display, set MUJOCO_GL=egl for MuJoCo.
`--vectorization async` steps each environment in its own process, for slow environments.

The agent is that of mujoco_envpool.py. The README of this folder lists the supported spaces.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import random
import signal
import warnings
from typing import Literal

import gymnasium
import jax
import mujoco_envpool as control
import numpy as np
from jax.experimental import io_callback


@dataclasses.dataclass
class Args(control.Args):
    """PPO on Gymnasium's environments."""

    env_id: str = "LunarLander-v3"
    """id of a registered environment; module:id imports the module first"""
    exp_name: str = "gymnasium_envs"
    vectorization: Literal["sync", "async"] = "sync"
    """step the environments in sequence, or each in its own process"""
    num_envs: int = 16
    num_steps: int = 128
    num_minibatches: int = 32
    gamma: float = 0.999
    ent_coef: float = 0.0
    critic_size: int = 64
    activation: Literal["tanh", "relu"] = "tanh"
    log_std_init: float = 0.0


def make_seeded(env_id, seed, in_worker=False, **options):
    """An environment; seeds the global generators, which some environments use."""
    random.seed(seed)
    np.random.seed(seed)
    if in_worker:
        with contextlib.suppress(ValueError):  # the parent also makes one, in a thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    return gymnasium.make(env_id, **options)


class Pool:
    """A vector environment of Gymnasium with EnvPool's interface.

    All calls run in one thread: JAX calls `step` from several threads, but objects of sqlite3 and
    OpenGL belong to the thread that created them. The statistics of observations are float32. To
    keep small changes of large float64 observations, such as times in seconds since 1970, `origin`
    is subtracted before the cast. It is the first observation with seed 0, rounded to thousands, so
    observations below 500 do not change.
    """

    def __init__(self, env, seeds, **options):
        self.seeds, self.origin, self.bounded = seeds.tolist(), env.origin, env.clipped
        self.thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        in_worker = env.args.vectorization == "async"
        kind = gymnasium.vector.AsyncVectorEnv if in_worker else gymnasium.vector.SyncVectorEnv
        make = functools.partial(make_seeded, env.args.env_id, in_worker=in_worker, **options)
        makes = [functools.partial(make, seed) for seed in self.seeds]
        with warnings.catch_warnings():
            # JAX warns about forks; the workers do not use JAX.
            warnings.simplefilter("ignore", RuntimeWarning)
            self.envs = self.call(kind, makes, autoreset_mode="NextStep")

    def call(self, function, *inputs, **options):
        return self.thread.submit(function, *inputs, **options).result()

    def to_float32(self, obs):
        return jax.tree.map(lambda x, origin: np.float32(x - origin), obs, self.origin)

    def reset(self):
        return self.to_float32(self.call(self.envs.reset, seed=self.seeds)[0]), {}

    def step(self, action):
        # Clipped here and not in `xla`, because JAX passes float64 to a callback as float32.
        outcome = self.call(self.envs.step, self.bounded(np.asarray(action)))
        obs, reward, terminated, truncated, _ = outcome
        return self.to_float32(obs), np.float32(reward), terminated, truncated, {}

    def close(self):
        self.call(self.envs.close)
        self.thread.shutdown()

    def xla(self):
        obs = self.to_float32(self.envs.observation_space.sample())
        done = np.zeros(len(self.seeds), bool)
        step = functools.partial(io_callback, self.step, (obs, np.float32(done), done, done, {}))
        return (), None, None, lambda handle, action: (handle, step(action, ordered=True))


@functools.cache  # a run needs it several times
def example_of(env_id):
    """A vector environment of one environment, and the origin of its observations."""
    envs = gymnasium.vector.SyncVectorEnv([functools.partial(make_seeded, env_id, 0)])
    is_float64 = lambda x: getattr(x, "dtype", None) == np.float64
    first, _ = envs.reset(seed=0)
    return envs, jax.tree.map(lambda x: np.round(x, -3) if is_float64(x) else 0, first)


class Gymnasium(control.Vectors):
    """The environments of an id in Gymnasium's registry."""

    video_options = {"render_mode": "rgb_array"}

    def __init__(self, args):
        """Raises `UserError` for an unknown id."""
        self.args = args
        try:
            example, self.origin = example_of(args.env_id)
        except (gymnasium.error.Error, ImportError) as error:
            hint = "an id of your own has the form module:id, with its folder in PYTHONPATH"
            raise control.ppo.UserError(f"--env-id {args.env_id}: {error} ({hint})") from error
        self.observation_space = example.single_observation_space
        self.action_space = example.single_action_space
        self.video_fps = example.metadata.get("render_fps", 15)

    def make_pool(self, seeds, evaluation=False, **options):
        return Pool(self, seeds, **options)

    clipped = control.Vectors.bounded

    def bounded(self, action):
        """Actions as sampled; `Pool.step` clips them."""
        return action

    def render(self, pool, obs):
        """The image of the first environment."""
        try:
            return pool.call(pool.envs.render)[0]
        except Exception as error:
            hint = "on a machine without a display, set MUJOCO_GL=egl for MuJoCo"
            raise RuntimeError(f"{error!r} ({hint})") from error


main = functools.partial(control.main, args=Args, env=Gymnasium)

if __name__ == "__main__":
    main()
