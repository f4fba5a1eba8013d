"""MuJoCo Playground's control suite in the swing-up's script.

    python benchmarks/environments/playground_control.py --env-id CartpoleBalance --seed 2
    python benchmarks/environments/playground_control.py --eval runs/<run_name>

Requires `pip install playground==0.2.0`. Its default engine, Warp, requires an NVIDIA GPU; "jax"
runs anywhere. To use it elsewhere, copy it next to ppo_swingup_jax.py and remove the line with
sys.path.
"""

import dataclasses
import difflib
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
from mujoco_playground import registry

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_swingup_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on MuJoCo Playground's control suite."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "CartpoleBalance"
    eval_episodes: int = 64
    total_timesteps: float = 5e5
    num_envs: int = 64
    num_steps: int = 64
    reward_scale: float = 0.1
    num_minibatches: int = 4


class Playground:
    """An environment of MuJoCo Playground, without its wrappers for resets and time limits."""

    def __init__(self, env_id):
        """Raises `UserError` for an unknown id."""
        if env_id not in registry.ALL_ENVS:
            near = difflib.get_close_matches(env_id, registry.ALL_ENVS, cutoff=0.3)
            raise ppo.UserError(f"--env-id {env_id}: not in Playground; similar names: {near}")
        with jax.ensure_compile_time_eval():  # JAX traces calls of `make_env`
            self.env = registry.load(env_id, config_overrides={"impl": "jax"})
        self.action_size = self.env.action_size
        self.max_episode_steps = registry.get_default_config(env_id).episode_length

    def reset(self, key):
        return self.env.reset(key)

    def step(self, key, state, action):
        state = self.env.step(state, jnp.clip(action, -1.0, 1.0))
        return state, state.reward, state.done > 0.5  # `done` is a float

    def observe(self, state):
        return state.obs


playground = functools.cache(Playground)  # reads the model's file


if __name__ == "__main__":
    ppo.Args, ppo.make_env = Args, lambda args: playground(args.env_id)
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
