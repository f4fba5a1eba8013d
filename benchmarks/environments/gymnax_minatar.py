"""gymnax's MinAtar in CartPole's script, which flattens the pictures of ten by ten cells.

    python benchmarks/environments/gymnax_minatar.py --env-id Breakout-MinAtar --seed 2
    python benchmarks/environments/gymnax_minatar.py --eval runs/<run_name>

Needs `pip install gymnax six`. Breakout, Freeway, SpaceInvaders and Asterix; other environments
of gymnax with discrete actions, too, whose `get_obs` needs a state alone. The flags are those of
PureJaxRL's notebook on MinAtar. pgx_minatar.py has a convolution. To use it elsewhere, copy it
beside ppo_cartpole_jax.py and leave out the line with sys.path.
"""

import dataclasses
import pathlib
import sys
from typing import Literal

import gymnax
import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_cartpole_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on gymnax's MinAtar."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Breakout-MinAtar"
    # Some of gymnax's games leave nothing to chance: greedy play would be one episode.
    eval_mode: Literal["greedy", "sampled"] = "sampled"
    total_timesteps: float = 1e6
    num_steps: int = 128
    learning_rate: float = 5e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 8
    norm_adv: bool = True
    clip_coef: float = 0.2
    clip_vloss: bool = True
    ent_coef: float = 0.01


class Gymnax:
    """An environment of gymnax with discrete actions, without its own reset and time limit."""

    def __init__(self, env_id):
        self.env, params = gymnax.make(env_id)
        self.num_actions = self.env.num_actions
        self.max_episode_steps = params.max_steps_in_episode
        # `rollout` keeps the time limit, as it tells a truncation from a termination.
        self.params = params.replace(max_steps_in_episode=2**30)

    def reset(self, key):
        return self.env.reset_env(key, self.params)[1]

    def step(self, key, state, action):
        # `env.step` would begin the next episode itself.
        _, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        return state, reward, terminated

    def observe(self, state):
        return self.env.get_obs(state)


def mlp(layers, x):
    """As the script's, but with relu: so large a learning rate would drive tanh into its limits."""
    for layer in layers[:-1]:
        x = jax.nn.relu(layer["w"] @ x + layer["b"])
    return layers[-1]["w"] @ x + layers[-1]["b"]


if __name__ == "__main__":
    ppo.Args, ppo.mlp = Args, mlp
    ppo.make_env = lambda args: Gymnax(args.env_id)
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
