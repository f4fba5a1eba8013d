"""ppo_minigrid_rnn.py with a bonus for what is new, for levels where random play hardly succeeds.

    python benchmarks/minigrid_count_bonus.py --env-id KeyCorridorS4R3 --total-timesteps 8e6 \
        --num-envs 1024 --num-steps 64 --num-minibatches 8 --update-epochs 2 --gamma 0.99 \
        --gae-lambda 0.95 --norm-adv --ent-coef 0.01

All flags of the script work, and `--int-coef`. `installed` replaces four names of the script: the
flags, the statistics (which also hold the counts), `rollout` (whose rewards get the bonus) and
`update` (which logs it as charts/intrinsic_reward).
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

# Of the hashes of things. A table is 32 KiB for each environment, also in a checkpoint, and holds a
# few hundred things in an episode.
HASH_BITS = 13


@dataclasses.dataclass
class Args(script.Args):
    """Recurrent PPO on pure-JAX MiniGrid, with a bonus for what is new."""

    int_coef: float = 0.05
    """weight of the bonus; in a whole episode it should stay below the reward of success"""


class Curiosity(NamedTuple):
    """The script's `EpisodeStats`, and what the agent has met.

    Where only a long chain of right actions is rewarded, random play never meets the reward, and
    there is nothing to learn from. A bonus for what is new gives it something to do until then:

        bonus_t = int_coef / sqrt(n(x_{t+1}))   where x_{t+1} is new in this episode, else 0

    x is what the agent has at hand (`at_hand`), what it carries and what it faces: a wall, a closed
    red door, with a key in its hands an open one. n(x) is in how many episodes it has met x, in all
    environments and all of training. 1 / sqrt(n) is how the uncertainty about something falls with
    the number of samples, so what is seldom met is worth a try, and what has been met a thousand
    times is not: the bonus leads from the first door to the first key and to the first lock that
    opens, fades behind itself, and in the end the reward alone counts (Bellemare et al.,
    arXiv:1606.01868). Only the first time in an episode counts: that something is rare makes it no
    better to meet it ten times in one level, by turning to and fro in front of it (Raileanu &
    Rocktaeschel, arXiv:2002.12292; Henaff et al., arXiv:2306.03236, compare counts of both kinds).

    Levels are drawn at random, so nearly every view is new, and things to carry and doors to shut
    make new ones without end. Counts of whole views would hardly fade, and reward looking around as
    much as opening a lock.

    Success ends the episode, with all that is still new in it. Were that worth more, the agent
    would shun its goal, so what an episode can still earn by the bonus should stay below the reward
    of success. n counts the episodes of the update itself too, so many environments make the bonus
    smaller from the first update on.

    The bonus is the reward of the action that led there, added for the learner only: the agent does
    not observe it, and returns and success are without it. The observation after the last step of
    an episode is the first of the next one: nobody's merit, so no bonus. In trials, "in this
    episode" means in this trial.
    """

    running_return: jax.Array
    running_length: jax.Array
    last_return: jax.Array
    last_length: jax.Array
    visits: jax.Array  # [2^HASH_BITS] int32, how many episodes have met each thing
    last_episode: jax.Array  # [N, 2^HASH_BITS] int32, the last episode that met it
    episode: jax.Array  # [N] int32, a number that no episode (or trial) before had
    mean_bonus: jax.Array  # [N], of the last rollout


def init_episode_stats(num_envs):
    """The `Curiosity` of N environments before the first step."""
    return Curiosity(
        *plain_init_episode_stats(num_envs),
        visits=jnp.zeros(2**HASH_BITS, jnp.int32),
        last_episode=jnp.zeros((num_envs, 2**HASH_BITS), jnp.int32),
        episode=jnp.zeros(num_envs, jnp.int32),
        mean_bonus=jnp.zeros(num_envs, jnp.float32),
    )


def at_hand(env, obs):
    """What counts of an observation: the cell in front of the agent and its own.

    Farama shows what the agent carries in its own cell; XLand-MiniGrid does not. Codes [2, any], or
    with --img-obs their picture [16, 8, 3].
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
    """Numbers uint32 [T, N] of arrays [T, N, ...], the same for the same ones.

    The sum of all entries, each times a random constant of its own, modulo 2^32. Its upper bits are
    a hash, however many of them (Dietzfelbinger et al., 1997, "multiply-shift"). Things that share
    one are taken for the same.
    """
    # Checkpoints hold counts by these hashes, so the constants may never change: NumPy promises
    # that for this old generator. With this seed no two of the 874 pairs of cells that a MiniGrid
    # agent can have at hand share their HASH_BITS.
    rng = np.random.RandomState(109)
    things = things.astype(jnp.uint32).reshape(*things.shape[:2], -1)
    constants = rng.randint(2**32, size=things.shape[2], dtype=np.uint32)
    return (things * constants).sum(2, dtype=jnp.uint32)


def count_bonus(args, curiosity, things, start):
    """The bonus [T, N] of T steps in N environments, see `Curiosity`; returns (curiosity, bonus).

    `things` [T + 1, N, ...] are what is counted, before each step and after the last one; `start`
    [T + 1, N] tells which of them begin an episode (or trial). The next rollout begins with the
    last ones: to meet them again there changes nothing.
    """
    places = hash_things(things) >> (32 - HASH_BITS)

    def look(carry, thing):  # of one environment, one step
        last_episode, episode = carry
        place, start = thing
        episode = episode + start
        is_new = last_episode[place] != episode
        return (last_episode.at[place].set(episode), episode), is_new

    carry = (curiosity.last_episode, curiosity.episode)
    (last_episode, episode), is_new = jax.lax.scan(jax.vmap(look), carry, (places, start))
    places, is_new, start = places[1:], is_new[1:], start[1:]  # what an action led to
    visits = curiosity.visits.at[places].add(is_new)
    visits = jnp.maximum(visits, curiosity.visits)  # stays at 2^31 - 1 instead of turning negative
    n = jnp.maximum(visits[places], 1)  # 0 of what only the start of training met
    bonus = args.int_coef * (is_new & ~start) / jnp.sqrt(n)
    curiosity = curiosity._replace(
        visits=visits, last_episode=last_episode, episode=episode, mean_bonus=bonus.mean(0)
    )
    return curiosity, bonus


def rollout(args, env, params, env_state, agent_state, stats, key):
    """The script's `rollout`; the rewards of its trajectory contain the bonus."""
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
    """The script's `update`; the metrics contain the mean bonus."""
    state, metrics = plain_update(args, state, **options)
    return state, metrics | {"charts/intrinsic_reward": state.stats.mean_bonus.mean()}


plain_init_episode_stats = script.init_episode_stats
plain_rollout = script.rollout
plain_update = script.update


@contextlib.contextmanager
def installed():
    """Inside `with`, the script trains with the bonus."""
    names = [Args, init_episode_stats, rollout, update]
    with mock.patch.multiple(script, **{thing.__name__: thing for thing in names}):
        yield


def main(words=None):
    """The command line of the script with one more flag."""
    with installed():
        script.main(words)


if __name__ == "__main__":
    try:
        main()
    except script.UserError as problem:
        sys.exit(f"error: {problem}")
