"""Procgen in Atari's script: another family of EnvPool with pictures.

    apt-get install libqt5gui5  # which EnvPool's Procgen needs, here of Debian and Ubuntu
    python benchmarks/environments/procgen_envpool.py --env-id CoinrunEasy-v0 --seed 2

Training is on 200 levels, evaluation on all. Sizes and rates are those of the Procgen paper
(https://arxiv.org/abs/1912.01588), in which PPO has 25 million steps; the network is Atari's with
other strides. A coin is worth 10, which is too much for the critic: rewards are divided by it.
"""

import dataclasses
import functools

import mujoco_envpool

ppo = mujoco_envpool.ppo  # ppo_atari_envpool_xla_jax


@dataclasses.dataclass
class Args(mujoco_envpool.PoolArgs):
    """PPO on Procgen through EnvPool's XLA interface."""

    env_id: str = "CoinrunEasy-v0"
    exp_name: str = "procgen_envpool"
    num_envs: int = 64
    num_steps: int = 256
    num_minibatches: int = 8
    update_epochs: int = 3
    learning_rate: float = 5e-4
    gamma: float = 0.999
    clip_coef: float = 0.2


class Procgen(mujoco_envpool.Vectors):
    """Images [3, 64, 64]."""

    video_options = {}
    video_fps = 15

    def make_pool(self, seeds, evaluation=False, **options):
        return super().make_pool(seeds, num_levels=0 if evaluation else 200, **options)

    def start(self, obs, info):
        return obs, ()

    def read(self, memory, valid, outcome):
        obs, reward, terminated, truncated, _ = outcome
        ended = valid & (terminated | truncated)
        return (obs, reward / 10, terminated, truncated), reward, ended, memory

    def render(self, pool, obs):
        return obs[0].transpose(1, 2, 0)


def main(words=None):
    """Atari's `main` with this world and Atari's agent."""
    layers = ((32, 4, 4), (64, 4, 2), (64, 3, 1))  # features, size of the kernel, stride
    ppo.NatureCNN = functools.partial(ppo.NatureCNN, layers=layers)
    mujoco_envpool.main(words, Args, Procgen, (ppo.init_agent, ppo.forward, ppo.learn))


if __name__ == "__main__":
    main()
