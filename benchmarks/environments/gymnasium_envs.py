"""Gymnasium's environments, and your own in Python, in Atari's script.

    python benchmarks/environments/gymnasium_envs.py --env-id LunarLander-v3 --seed 2
    PYTHONPATH=. python benchmarks/environments/gymnasium_envs.py --env-id my_module:Mine-v0

Install Gymnasium with what the environment needs: `pip install "gymnasium[box2d]"`. A class of your
own, a `gymnasium.Env`, gets in by a name that its module registers. That module, of the current
folder, is named as above, or

    import gymnasium
    import gymnasium_envs

    gymnasium.register("Mine-v0", Mine, max_episode_steps=200)
    gymnasium_envs.main(["--env-id", "Mine-v0"])

with this folder in PYTHONPATH. Let it have a time limit: an evaluation waits for the end of its
episodes. The agent, with running statistics of observations and returns, is `mujoco_envpool.py`'s:
for a Discrete action or a Box of floats, and for observations that are numbers, which are joined.
`gymnasium.wrappers.FlattenObservation` makes Discrete ones one-hot.
"""

import dataclasses
import functools

import gymnasium
import jax
import mujoco_envpool as control
import numpy as np
from jax.experimental import io_callback


@dataclasses.dataclass
class Args(control.Args):
    """PPO on Gymnasium's environments."""

    env_id: str = "LunarLander-v3"
    """environment, as it is registered; module:name imports the module first"""
    exp_name: str = "gymnasium_envs"
    num_envs: int = 16
    num_steps: int = 128
    gamma: float = 0.999


class Pool:
    """Gymnasium environments with EnvPool's interface. They reset late, as EnvPool's do."""

    def __init__(self, make, seeds):
        self.envs = gymnasium.vector.SyncVectorEnv([make] * len(seeds), autoreset_mode="NextStep")
        self.seeds = seeds.tolist()

    def reset(self):
        return jax.tree.map(np.float32, self.envs.reset(seed=self.seeds)[0]), {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.envs.step(np.asarray(action))
        return jax.tree.map(np.float32, obs), np.float32(reward), terminated, truncated, {}

    def close(self):
        self.envs.close()

    def xla(self):
        obs = jax.tree.map(np.float32, self.envs.observation_space.sample())
        done = np.zeros(len(self.seeds), bool)
        step = functools.partial(io_callback, self.step, (obs, np.float32(done), done, done, {}))
        return (), None, None, lambda handle, action: (handle, step(action, ordered=True))


example_of = functools.cache(gymnasium.make)  # a run asks for its spaces several times


class Gymnasium(control.Vectors):
    """The environments that are registered under a name."""

    video_options = {"render_mode": "rgb_array"}

    def __init__(self, args):
        self.make = functools.partial(gymnasium.make, args.env_id)
        try:
            env = example_of(args.env_id)
        except (gymnasium.error.Error, ImportError) as error:
            raise control.ppo.UserError(f"--env-id {args.env_id}: {error}") from error
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.video_fps = env.metadata.get("render_fps", 15)
        if "rgb_array" in env.metadata.get("render_modes", ()):
            self.render = lambda pool, obs: pool.envs.envs[0].render()

    def make_pool(self, seeds, evaluation=False, **options):
        return Pool(functools.partial(self.make, **options), seeds)


main = functools.partial(control.main, args=Args, world=Gymnasium)

if __name__ == "__main__":
    main()
