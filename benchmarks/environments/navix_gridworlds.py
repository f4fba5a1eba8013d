"""NAVIX's grid worlds in the recurrent script, with the agent's partial view.

    python benchmarks/environments/navix_gridworlds.py --env-id Navix-DoorKey-5x5-v0 --seed 2
    python benchmarks/environments/navix_gridworlds.py --eval runs/<run_name>

Needs `pip install navix`. NAVIX gives 1 for the goal, however late it is reached. To use it
elsewhere, copy it beside ppo_minigrid_rnn.py and leave out the line with sys.path.
"""

import dataclasses
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
    """A grid world of NAVIX, without its own reset."""

    def __init__(self, env_id):
        see = navix.observations.symbolic_first_person
        with jax.ensure_compile_time_eval():  # `make_env` is called while a program is traced
            self.env = navix.make(env_id, observation_fn=see)
        self.num_actions = len(self.env.action_set)
        self.max_episode_steps = self.env.max_steps

    def reset(self, key):
        timestep = self.env.reset(key)
        # Without what only pictures need, 80 kB for each of 5x5 worlds.
        return timestep.replace(state=timestep.state.replace(cache=None), info={})

    def step(self, key, timestep, action):
        # `env.step` would begin the next episode itself; `info` is empty after a reset.
        timestep = self.env._step(timestep, action).replace(info={})
        return timestep, timestep.reward, timestep.is_termination()

    def observe(self, timestep):
        return timestep.observation


def encode(args, env, obs):
    """Features [F, M, T] of views [T, M, 7, 7, 3]: kind, colour and state of each cell."""
    return ppo.Encoder(pixels=False, code_sizes=(11, 6, 4), name="encoder")(obs)


if __name__ == "__main__":
    ppo.Args, ppo.encode, ppo.make_env = Args, encode, lambda args: Navix(args.env_id)
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
