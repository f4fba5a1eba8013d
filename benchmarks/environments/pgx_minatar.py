"""Pgx's MinAtar, which has the sticky actions of the original, in CartPole's script.

    python benchmarks/environments/pgx_minatar.py --env-id minatar-breakout --seed 2
    python benchmarks/environments/pgx_minatar.py --eval runs/<run_name>

Requires `pip install pgx==2.6.0`. Games of several players are refused: they need self-play. To use
it elsewhere, copy it next to ppo_cartpole_jax.py and remove the line with sys.path.
"""

import dataclasses
import difflib
import pathlib
import sys

import jax
import jax.numpy as jnp
import pgx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_cartpole_jax as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """PPO on Pgx's MinAtar."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "minatar-breakout"
    total_timesteps: float = 1e6
    learning_rate: float = 3e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int = 8
    norm_adv: bool = True
    clip_coef: float = 0.2
    ent_coef: float = 0.01


class Pgx:
    """A game of Pgx for one player. It does not reset itself."""

    max_episode_steps = 2500  # minatar-freeway's limit, before it would end itself

    def __init__(self, env_id):
        """Raises `UserError` for an unknown id, and for a game of several players."""
        if env_id not in pgx.available_envs():
            near = difflib.get_close_matches(env_id, pgx.available_envs(), cutoff=0.3)
            raise ppo.UserError(f"--env-id {env_id}: not in Pgx; similar names: {near}")
        with jax.ensure_compile_time_eval():  # JAX traces calls of `make_env`
            self.env = pgx.make(env_id)
        if self.env.num_players > 1:
            raise ppo.UserError(f"--env-id {env_id} has {self.env.num_players} players, not one")
        self.num_actions = self.env.num_actions

    def reset(self, key):
        return self.env.init(key)

    def step(self, key, state, action):
        state = self.env.step(state, action, key)
        return state, state.rewards[0], state.terminated  # rewards are of all players

    def observe(self, state):
        return state.observation


def init_agent(args, key, env):
    """A convolution, shared by actor and critic, and a hidden layer for each."""
    height, width, channels = jax.eval_shape(lambda: env.observe(env.reset(key))).shape
    features = 16 * (height - 2) * (width - 2)
    conv_key, actor_key, critic_key = jax.random.split(key, 3)
    return {
        "conv": ppo.init_mlp(conv_key, (9 * channels, 16), head_gain=2**0.5)[0],
        "actor": ppo.init_mlp(actor_key, (features, 64, env.num_actions), head_gain=0.01),
        "critic": ppo.init_mlp(critic_key, (features, 64, 1), head_gain=1.0),
    }


def forward(args, params, obs):
    """Multiplies 3x3 patches of images [M, Y, X, C]: the gradient of that is fast on a CPU."""
    x = obs.transpose(3, 1, 2, 0).astype(jnp.float32)  # [C, Y, X, M]
    _, height, width, samples = x.shape
    shifts = [(i, j) for i in range(3) for j in range(3)]
    x = jnp.concatenate([x[:, i : i + height - 2, j : j + width - 2] for i, j in shifts])
    x = params["conv"]["w"] @ x.reshape(x.shape[0], -1) + params["conv"]["b"]
    x = jax.nn.relu(x).reshape(-1, samples)  # [F, M]
    logits, value = ppo.mlp(params["actor"], x), ppo.mlp(params["critic"], x)
    return ppo.Categorical(logits=logits.T), value[0]


if __name__ == "__main__":
    ppo.Args, ppo.init_agent, ppo.forward = Args, init_agent, forward
    ppo.make_env = lambda args: Pgx(args.env_id)
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
