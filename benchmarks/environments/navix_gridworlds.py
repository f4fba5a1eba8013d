"""NAVIX's grid environments in the recurrent script, with the agent's partial view.

    python benchmarks/environments/navix_gridworlds.py --env-id Navix-DoorKey-5x5-v0 --seed 2
    python benchmarks/environments/navix_gridworlds.py --eval runs/<run_name>

Requires `pip install navix==0.7.4`. NAVIX's reward for the goal is 1, independent of the number of
steps. To use it elsewhere, copy it next to ppo_minigrid_rnn.py and remove the line with sys.path.
"""

import dataclasses
import difflib
import pathlib
import sys

import jax
import navix

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_minigrid_rnn as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """Recurrent PPO on NAVIX."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Navix-DoorKey-5x5-v0"
    total_timesteps: float = 5e5


class Navix:
    """An environment of NAVIX, without its own reset."""

    def __init__(self, env_id):
        """Raises `UserError` for an unknown id."""
        if env_id not in (known := navix.registry()):
            near = difflib.get_close_matches(env_id, known, cutoff=0.3)
            raise ppo.UserError(f"--env-id {env_id}: not in NAVIX; similar names: {near}")
        see = navix.observations.symbolic_first_person
        with jax.ensure_compile_time_eval():  # JAX traces calls of `make_env`
            self.env = navix.make(env_id, observation_fn=see)
        self.num_actions = len(self.env.action_set)
        self.max_episode_steps = self.env.max_steps

    def reset(self, key):
        timestep = self.env.reset(key)
        # Without the cache for images, 80 kB per 5x5 environment.
        return timestep.replace(state=timestep.state.replace(cache=None), info={})

    def step(self, key, timestep, action):
        # `env.step` would also reset. `info` is empty after a reset.
        timestep = self.env._step(timestep, action).replace(info={})
        return timestep, timestep.reward, timestep.is_termination()

    def observe(self, timestep):
        return timestep.observation


def encode(args, env, obs):
    """Features [F, M, T] of views [T, M, 7, 7, 3]: kind, color and state of each cell."""
    return ppo.Encoder(pixels=False, code_sizes=(11, 6, 4), name="encoder")(obs)


if __name__ == "__main__":
    ppo.Args, ppo.encode, ppo.make_env = Args, encode, lambda args: Navix(args.env_id)
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
