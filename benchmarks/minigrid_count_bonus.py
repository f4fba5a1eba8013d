"""ppo_minigrid_rnn.py with a count-based exploration bonus, for levels with very sparse rewards.

    python benchmarks/minigrid_count_bonus.py --env-id KeyCorridorS4R3 --total-timesteps 8e6 \
        --num-envs 1024 --num-steps 64 --num-minibatches 8 --update-epochs 2 --gamma 0.99 \
        --gae-lambda 0.95 --norm-adv --ent-coef 0.01

Accepts all flags of the script and `--int-coef`. charts/intrinsic_reward is the mean bonus.
"""

import contextlib
import dataclasses
import pathlib
import sys
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import ppo_minigrid_rnn as script  # noqa: E402

HASH_BITS = 13  # a table of 32 KiB per environment, also in checkpoints


@dataclasses.dataclass
class Args(script.Args):
    """Recurrent PPO on pure-JAX MiniGrid with a count-based exploration bonus."""

    int_coef: float = 0.05
    """weight of the bonus; its sum per episode should stay below the reward of a success"""


class Curiosity(NamedTuple):
    """The script's `EpisodeStats` with visit counts.

        bonus_t = int_coef / sqrt(n(x_{t+1}))   if x_{t+1} is new in this episode, else 0

    x is the cell in front of the agent and the object it carries (`at_hand`). Counts of whole views
    would not work: levels are random, so nearly every view is new. n(x) is the number of episodes
    with x in all environments since the start of training. The factor 1 / sqrt(n) is that of
    Bellemare et al., arXiv:1606.01868. Only the first visit in an episode counts (arXiv:2002.12292,
    arXiv:2306.03236). Otherwise the agent would turn back and forth in front of a rare object.

    - n includes the episodes of the current update, so more environments reduce the bonus.
    - The agent does not observe the bonus. Returns and success rates exclude it.
    - The first observation of an episode has no bonus, because no action led to it.
    - In trials, "episode" means trial.
    """

    running_return: jax.Array
    running_length: jax.Array
    last_return: jax.Array
    last_length: jax.Array
    visits: jax.Array  # [2^HASH_BITS] int32, number of episodes with each entry
    last_episode: jax.Array  # [N, 2^HASH_BITS] int32, last episode with the entry
    episode: jax.Array  # [N] int32, number of the current episode
    mean_bonus: jax.Array  # [N], in the last rollout


def init_episode_stats(num_envs):
    """The initial `Curiosity` of N environments."""
    return Curiosity(
        *plain_init_episode_stats(num_envs),
        visits=jnp.zeros(2**HASH_BITS, jnp.int32),
        last_episode=jnp.zeros((num_envs, 2**HASH_BITS), jnp.int32),
        episode=jnp.zeros(num_envs, jnp.int32),
        mean_bonus=jnp.zeros(num_envs, jnp.float32),
    )


def at_hand(env, obs):
    """The cell in front of the agent and the agent's cell: [2, codes], with --img-obs [16, 8, 3].

    In MiniGrid the agent's cell shows the carried object, in XLand-MiniGrid it does not.
    """
    image = obs["image"]
    middle = image.shape[1] // 2
    if getattr(env, "pixels", False):  # rows, columns
        tile = script.TILE
        column = tile * (script.VIEW // 2)
        return image[-2 * tile :, column : column + tile]
    if isinstance(env, script.MiniGrid):  # columns, rows
        return image[middle, -2:]
    return image[-2:, middle]  # rows, columns


def hash_things(things):
    """Hashes [T, N] uint32 of arrays [T, N, ...]: sums with random weights, modulo 2^32.

    The upper bits are also a hash (multiply-shift, Dietzfelbinger et al., 1997).
    """
    # NumPy guarantees that the weights never change: checkpoints contain counts by hash. With this
    # seed the upper bits of MiniGrid's 874 possible pairs of cells differ.
    rng = np.random.RandomState(109)
    things = things.astype(jnp.uint32).reshape(*things.shape[:2], -1)
    constants = rng.randint(2**32, size=things.shape[2], dtype=np.uint32)
    return (things * constants).sum(2, dtype=jnp.uint32)


def count_bonus(args, curiosity, things, start):
    """Returns (curiosity, bonus [T, N]) of T steps in N environments.

    `things` [T + 1, N, ...] are from `at_hand`, before each step and after the last one. `start`
    [T + 1, N] marks the first observation of an episode.
    """
    places = hash_things(things) >> (32 - HASH_BITS)

    def look(carry, thing):  # one environment, one step
        last_episode, episode = carry
        place, start = thing
        episode = episode + start
        is_new = last_episode[place] != episode
        return (last_episode.at[place].set(episode), episode), is_new

    carry = (curiosity.last_episode, curiosity.episode)
    (last_episode, episode), is_new = jax.lax.scan(jax.vmap(look), carry, (places, start))
    places, is_new, start = places[1:], is_new[1:], start[1:]  # the results of actions
    visits = curiosity.visits.at[places].add(is_new)
    visits = jnp.maximum(visits, curiosity.visits)  # does not overflow
    n = jnp.maximum(visits[places], 1)  # 0 for the first observation of training
    bonus = args.int_coef * (is_new & ~start) / jnp.sqrt(n)
    curiosity = curiosity._replace(
        visits=visits, last_episode=last_episode, episode=episode, mean_bonus=bonus.mean(0)
    )
    return curiosity, bonus


def rollout(args, env, params, env_state, agent_state, stats, key):
    """The script's `rollout`, with the bonus added to the rewards."""
    env_state, agent_state, stats, trajectory, truncated_state = plain_rollout(
        args, env, params, env_state, agent_state, stats, key
    )
    last = script.make_inputs(env, env_state, agent_state)  # after the last step
    inputs = jax.tree.map(
        lambda steps, x: jnp.concatenate([steps, x[None]]), trajectory.inputs, last
    )
    single = getattr(env, "env", env) if args.episodes_per_trial > 1 else env
    things = jax.vmap(jax.vmap(lambda obs: at_hand(single, obs)))(inputs.obs)
    stats, bonus = count_bonus(args, stats, things, inputs.start)
    trajectory = trajectory._replace(reward=trajectory.reward + bonus)
    return env_state, agent_state, stats, trajectory, truncated_state


def update(args, state, **options):
    """The script's `update`, with the mean bonus as a metric."""
    state, metrics = plain_update(args, state, **options)
    return state, metrics | {"charts/intrinsic_reward": state.stats.mean_bonus.mean()}


plain_init_episode_stats = script.init_episode_stats
plain_rollout = script.rollout
plain_update = script.update


@contextlib.contextmanager
def installed():
    """In this context the script trains with the bonus."""
    names = [Args, init_episode_stats, rollout, update]
    with mock.patch.multiple(script, **{thing.__name__: thing for thing in names}):
        yield


def main(words=None):
    """The script's command line with one more flag."""
    with installed():
        script.main(words)


if __name__ == "__main__":
    try:
        main()
    except script.UserError as problem:
        sys.exit(f"error: {problem}")
