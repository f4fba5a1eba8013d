r"""Jumanji's 2048 and Snake in CartPole's script: an observation tree with an action mask.

    python benchmarks/environments/jumanji_games.py --env-id Game2048-v1 --seed 2
    python benchmarks/environments/jumanji_games.py --env-id Snake-v1 --reward-scale 1 \
        --gamma 0.97 --eval-mode sampled
    python benchmarks/environments/jumanji_games.py --eval runs/<run_name>

Requires `pip install jumanji==1.1.2`. Another game with discrete actions needs its own `features`.
To use it elsewhere, copy it next to ppo_cartpole_jax.py and remove the line with sys.path.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import jumanji

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_cartpole_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on Jumanji's games."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Game2048-v1"
    total_timesteps: float = 1e6
    num_steps: int = 64
    learning_rate: float = 1e-3
    reward_scale: float = 0.01
    """factor of the rewards in the loss; reported returns are not scaled"""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 8
    norm_adv: bool = True
    clip_coef: float = 0.2
    ent_coef: float = 0.01


class Jumanji:
    """A game of Jumanji. The state is the pair (Jumanji's state, its observation)."""

    max_episode_steps = 4000

    def __init__(self, env_id):
        """Raises `UserError` for a game that has no `features`."""
        games = sorted(jumanji.registered_environments())
        games = [name for name in games if name.startswith(("Game2048", "Snake"))]
        if env_id not in games:
            raise ppo.UserError(f"--env-id {env_id}: this adapter supports {', '.join(games)}")
        # `rollout` applies the time limit, to distinguish truncation from termination.
        options = {"time_limit": 2**30} if "Snake" in env_id else {}
        with jax.ensure_compile_time_eval():  # JAX traces calls of `make_env`
            self.env = jumanji.make(env_id, **options)
            self.num_actions = int(self.env.action_spec.num_values)

    def reset(self, key):
        state, timestep = self.env.reset(key)
        return state, timestep.observation

    def step(self, key, state, action):
        state, timestep = self.env.step(state[0], action)
        return (state, timestep.observation), timestep.reward, timestep.discount == 0

    def observe(self, state):
        return state[1]


def features(obs):
    """Inputs [F, M] of the networks for a tree of M observations."""
    # The exponents of 2048's tiles become one-hot vectors.
    x = jax.nn.one_hot(obs.board, 16) if hasattr(obs, "board") else obs.grid
    return x.reshape(x.shape[0], -1).T


def init_agent(args, key, env):
    seen = jax.eval_shape(lambda: features(env.observe(jax.vmap(env.reset)(key[None]))))
    obs_size = len(seen)
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": ppo.init_mlp(actor_key, (obs_size, 128, 128, env.num_actions), head_gain=0.01),
        "critic": ppo.init_mlp(critic_key, (obs_size, 128, 128, 1), head_gain=1.0),
    }


def forward(args, params, obs):
    x = features(obs)
    logits, value = ppo.mlp(params["actor"], x).T, ppo.mlp(params["critic"], x)
    return ppo.Categorical(logits=jnp.where(obs.action_mask, logits, -1e9)), value[0]


compute_gae = ppo.compute_gae


def compute_scaled_gae(args, reward, *rest):
    """Scales the rewards of the loss, not those of the episode statistics."""
    return compute_gae(args, args.reward_scale * reward, *rest)


if __name__ == "__main__":
    ppo.Args, ppo.init_agent, ppo.forward = Args, init_agent, forward
    ppo.make_env = lambda args: Jumanji(args.env_id)
    ppo.compute_gae = compute_scaled_gae
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
