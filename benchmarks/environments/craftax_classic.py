"""Craftax Classic in CartPole's script: a reset that takes far longer than a step.

    python benchmarks/environments/craftax_classic.py --seed 2
    python benchmarks/environments/craftax_classic.py --eval runs/<run_name>

Requires `pip install craftax==1.6.1`. The return is the number of achievements, of 22, plus a tenth
of the change of health. A new map takes far longer than a step, so `starts_per_update` asks for a
few start states per update instead of one per step. To use it elsewhere, copy it next to
ppo_cartpole_jax.py and remove the line with sys.path.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Literal

import jax
from craftax.craftax_env import make_craftax_env_from_name

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_cartpole_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on Craftax Classic."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Craftax-Classic-Symbolic-v1"
    eval_mode: Literal["greedy", "sampled"] = "sampled"  # greedy actions get stuck
    total_timesteps: float = 1e6
    num_steps: int = 64
    learning_rate: float = 5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.8
    num_minibatches: int = 8
    norm_adv: bool = True
    clip_coef: float = 0.2
    ent_coef: float = 0.01


class Craftax:
    """An environment of Craftax, without its own reset and time limit."""

    env_ids = ("Craftax-Classic-Symbolic-v1", "Craftax-Symbolic-v1")
    starts_per_update = 64

    def __init__(self, env_id):
        """Raises `UserError` for an unknown id, and for an environment with images."""
        if env_id not in self.env_ids:
            raise ppo.UserError(f"--env-id {env_id}: not one of {', '.join(self.env_ids)}")
        with jax.ensure_compile_time_eval():  # JAX traces calls of `make_env`
            self.env = make_craftax_env_from_name(env_id, auto_reset=False)
        self.num_actions = self.env.num_actions
        self.max_episode_steps = self.env.default_params.max_timesteps
        # `rollout` applies the time limit, to distinguish truncation from termination.
        self.params = self.env.default_params.replace(max_timesteps=2**30)

    def reset(self, key):
        return self.env.reset_env(key, self.params)[1]

    def step(self, key, state, action):
        _, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        return state, reward, terminated

    def observe(self, state):
        return self.env.get_obs(state)


def init_agent(args, key, env):
    """Wider networks than CartPole's: an observation has 1,345 numbers."""
    (obs_size,) = jax.eval_shape(lambda: env.observe(env.reset(key))).shape
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": ppo.init_mlp(actor_key, (obs_size, 256, 256, env.num_actions), head_gain=0.01),
        "critic": ppo.init_mlp(critic_key, (obs_size, 256, 256, 1), head_gain=1.0),
    }


craftax = functools.cache(Craftax)  # loads textures


if __name__ == "__main__":
    ppo.Args, ppo.init_agent, ppo.make_env = Args, init_agent, lambda args: craftax(args.env_id)
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
