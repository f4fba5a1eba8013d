"""Brax in the swing-up's script, with normalized observations.

    python benchmarks/environments/brax_physics.py --env-id reacher --seed 2
    python benchmarks/environments/brax_physics.py --eval runs/<run_name>

Requires `pip install brax==0.14.2`. To use it elsewhere, copy it next to ppo_swingup_jax.py and
remove the line with sys.path.
"""

import dataclasses
import difflib
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
from brax import envs

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_swingup_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on Brax."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "reacher"
    backend: str = "positional"
    """Brax's engine: positional, spring, generalized or mjx"""
    eval_episodes: int = 64
    total_timesteps: float = 1e6
    num_steps: int = 64
    reward_scale: float = 1.0
    gamma: float = 0.97
    gae_lambda: float = 0.95
    num_minibatches: int = 8
    update_epochs: int = 4
    ent_coef: float = 0.001
    max_grad_norm: float = 0.5


class Brax:
    """An environment of Brax. `envs.create` would add a reset and a time limit to it."""

    max_episode_steps = 1000

    def __init__(self, env_id, backend):
        """Raises `UserError` for an unknown id."""
        if env_id not in envs._envs:
            near = difflib.get_close_matches(env_id, envs._envs, cutoff=0.3)
            raise ppo.UserError(f"--env-id {env_id}: not in Brax; similar names: {near}")
        with jax.ensure_compile_time_eval():  # JAX traces calls of `make_env`
            self.env = envs.get_environment(env_id, backend=backend)
        self.action_size = self.env.action_size

    def reset(self, key):
        return self.env.reset(key)

    def step(self, key, state, action):
        state = self.env.step(state, jnp.clip(action, -1.0, 1.0))
        return state, state.reward, state.done > 0.5  # `done` is a float

    def observe(self, state):
        return state.obs


# --- Normalized observations: the statistics are part of the parameters, without gradients ---

init_agent, forward, update_epochs = ppo.init_agent, ppo.forward, ppo.update_epochs


def init_with_statistics(args, key, env):
    seen = jax.eval_shape(lambda: env.observe(env.reset(key)))
    zeros = jnp.zeros(seen.shape)
    statistics = {"count": jnp.float32(0), "mean": zeros, "var": zeros + 1}
    return init_agent(args, key, env) | {"obs": statistics}


def forward_normalized(args, params, obs):
    seen = jax.lax.stop_gradient(params["obs"])
    obs = (obs - seen["mean"]) / jnp.sqrt(seen["var"] + 1e-8)
    return forward(args, params, jnp.clip(obs, -10, 10))


def update_epochs_and_statistics(args, params, opt_state, batch, learning_rate, key):
    # After the epochs: both policies of a ratio need the same normalization.
    params, *rest = update_epochs(args, params, opt_state, batch, learning_rate, key)
    old, mean, var = params["obs"], batch.obs.mean(0), batch.obs.var(0)
    count = old["count"] + args.batch_size
    share = args.batch_size / count  # of the new observations among all
    new = {
        "count": count,
        "mean": old["mean"] + share * (mean - old["mean"]),
        "var": (1 - share) * (old["var"] + share * (mean - old["mean"]) ** 2) + share * var,
    }
    return params | {"obs": new}, *rest


brax = functools.cache(Brax)  # reads the model's file


if __name__ == "__main__":
    ppo.Args, ppo.make_env = Args, lambda args: brax(args.env_id, args.backend)
    ppo.init_agent, ppo.forward = init_with_statistics, forward_normalized
    ppo.update_epochs = update_epochs_and_statistics
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
