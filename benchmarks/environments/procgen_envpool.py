"""Procgen in Atari's script: another family of EnvPool with images.

    apt-get install libqt5gui5  # EnvPool's Procgen needs Qt 5; this is for Debian and Ubuntu
    python benchmarks/environments/procgen_envpool.py --env-id CoinrunEasy-v0 --seed 2

Training uses 200 levels, evaluation all of them. Sizes and rates are those of the Procgen paper
(https://arxiv.org/abs/1912.01588), whose PPO trains for 25 million steps. The network is Atari's
with other strides. A coin gives a reward of 10, too much for the critic, so rewards are divided by
10.
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

    spec_options = {"num_levels": 200}  # an environment of another family does not have it
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
    """Atari's `main` with this environment and Atari's agent."""
    layers = ((32, 4, 4), (64, 4, 2), (64, 3, 1))  # features, kernel size, stride
    ppo.NatureCNN = functools.partial(ppo.NatureCNN, layers=layers)
    mujoco_envpool.main(words, Args, Procgen, (ppo.init_agent, ppo.forward, ppo.learn))


if __name__ == "__main__":
    main()
