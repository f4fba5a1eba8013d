"""gymnax's MinAtar in CartPole's script, which flattens the images of 10 x 10 cells.

    python benchmarks/environments/gymnax_minatar.py --env-id Breakout-MinAtar --seed 2
    python benchmarks/environments/gymnax_minatar.py --eval runs/<run_name>

Requires `pip install gymnax==0.0.9 six`. Games are Breakout, Freeway, SpaceInvaders and Asterix.
Other environments of gymnax with discrete actions also work if their observation depends on the
state alone. The flags are those of PureJaxRL's notebook on MinAtar. pgx_minatar.py has a
convolution. To use it elsewhere, copy it next to ppo_cartpole_jax.py and remove the line with
sys.path.
"""

import dataclasses
import difflib
import pathlib
import sys
from typing import Literal

import gymnax
import jax
from gymnax.environments.spaces import Discrete

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_cartpole_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on gymnax's MinAtar."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Breakout-MinAtar"
    # Some games are deterministic: all greedy episodes would be the same.
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
        """Raises `UserError` for an unknown id, and for an environment that does not fit."""
        if env_id not in gymnax.registered_envs:
            near = difflib.get_close_matches(env_id, gymnax.registered_envs, cutoff=0.3)
            raise ppo.UserError(f"--env-id {env_id}: not in gymnax; similar names: {near}")
        with ppo.user_errors(f"--env-id {env_id}", OSError, TypeError):
            self.env, params = gymnax.make(env_id)
        if not isinstance(self.env.action_space(params), Discrete):
            raise ppo.UserError(f"--env-id {env_id}: its actions are not discrete")
        self.num_actions = self.env.num_actions
        self.max_episode_steps = params.max_steps_in_episode
        # `rollout` applies the time limit, to distinguish truncation from termination.
        self.params = params.replace(max_steps_in_episode=2**30)
        with ppo.user_errors(f"--env-id {env_id}", TypeError):
            jax.eval_shape(lambda: self.observe(self.reset(jax.random.key(0))))

    def reset(self, key):
        return self.env.reset_env(key, self.params)[1]

    def step(self, key, state, action):
        # `env.step` would also reset.
        _, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        return state, reward, terminated

    def observe(self, state):
        return self.env.get_obs(state)


def mlp(layers, x):
    """The script's MLP with relu: at this learning rate tanh saturates."""
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
