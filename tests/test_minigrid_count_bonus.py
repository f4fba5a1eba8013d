"""benchmarks/minigrid_count_bonus.py: the bonus by its definition, what it counts, and resume."""

import dataclasses
import functools
import itertools
import sys
from collections import Counter

import gymnasium
import jax
import numpy as np
import pytest
from conftest import ROOT, arrays_of, jit_args, run_main, scalars, words_of
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX
from test_minigrid_env import choose_action, new_episode, state_of

import ppo_minigrid_rnn as script

sys.path.insert(0, str(ROOT / "benchmarks"))
import minigrid_count_bonus as bonus  # noqa: E402

SMALL = dict(num_envs=16, num_steps=24, num_minibatches=2)
SMALL |= dict(rnn_hidden_dim=16, head_hidden_dim=16, action_emb_dim=4)


def test_what_is_at_hand():
    """What Farama's agent carries and what its grid has in front of it; in codes and in pixels."""
    env = script.find_env("BlockedUnlockPickup")
    reference = gymnasium.make(env.env_id).unwrapped
    in_pixels = dataclasses.replace(env, pixels=True)
    observe = jax.jit(lambda state: bonus.at_hand(env, env.observe(state)))
    observe_pixels = jax.jit(lambda state: bonus.at_hand(in_pixels, in_pixels.observe(state)))
    rng, code_of_picture = np.random.default_rng(0), {}
    nothing = (script.EMPTY // 8, 0, 0)
    code = lambda thing: nothing if thing is None else thing.encode()
    for _ in range(30):
        new_episode(reference, rng, wild=True)
        for _ in range(8):
            _, _, terminated, *_ = reference.step(choose_action(reference, rng))
            if terminated:
                break
            state = state_of(reference)
            front = code(reference.grid.get(*reference.front_pos))
            expected = np.array([front, code(reference.carrying)])
            np.testing.assert_array_equal(observe(state), expected)
            picture = np.asarray(observe_pixels(state)).tobytes()
            assert code_of_picture.setdefault(picture, expected.tolist()) == expected.tolist()
    assert len(code_of_picture) == len({str(x) for x in code_of_picture.values()}) >= 20


def bonus_by_definition(coef, rollouts):
    """The bonus [T, N] of each rollout, from its things (bytes) and starts, both of [T + 1, N].

    The first row of a rollout is the last one of the rollout before. What is met in a rollout is
    counted before the bonus is given, except in the very first row.
    """
    episodes, met, bonuses = Counter(), {}, []
    for things, start in rollouts:
        bonus, earned = np.zeros((len(things) - 1, len(things[0]))), []
        for t, row in enumerate(things):
            for n, x in enumerate(row):
                if start[t][n]:
                    met[n] = set()
                if t > 0 and x not in met[n]:
                    episodes[x] += 1
                    if not start[t][n]:
                        earned.append((t - 1, n, x))
                met[n].add(x)
        for t, n, x in earned:
            bonus[t, n] = coef / np.sqrt(episodes[x])
        bonuses.append(bonus)
    return bonuses


def as_bytes(obs):
    """Trees of [T, N, ...] as lists of lists of bytes."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(obs)]
    T, N = leaves[0].shape[:2]
    return [[b"".join(x[t, n].tobytes() for x in leaves) for n in range(N)] for t in range(T)]


def test_count_bonus_equals_definition():
    """Three rollouts of made-up things that come back often."""
    args = bonus.Args(num_envs=5, num_steps=40, int_coef=0.5)
    rng = np.random.default_rng(0)
    curiosity, rollouts, ours = bonus.init_episode_stats(5), [], []
    last = None
    count = jax.jit(functools.partial(bonus.count_bonus, args))
    for _ in range(3):
        number = rng.integers(30, size=(41, 5))
        start = rng.random((41, 5)) < 0.1
        if last is None:
            start[0] = True
        else:
            number[0], start[0] = last
        last = number[-1], start[-1]
        things = np.stack([number % 3, number // 3], -1).astype(np.uint8)
        curiosity, given = count(curiosity, things, start)
        ours.append(given)
        rollouts.append((as_bytes(things), start))
    expected = bonus_by_definition(0.5, rollouts)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    given = np.asarray(expected) > 0
    assert 0.1 < given.mean() < 0.9 and np.unique(expected).size > 10


@pytest.mark.parametrize("episodes", [1, 3], ids=["episodes", "trials"])
def test_the_bonus_is_in_the_advantages_only(monkeypatch, episodes):
    """Three updates: rewards of GAE by the definition (a trial is an episode), reports without."""
    env_id = "MiniGrid-LavaGapS6-v0"
    env = dataclasses.replace(script.ENVIRONMENTS[env_id], max_episode_steps=6)
    monkeypatch.setitem(script.ENVIRONMENTS, env_id, env)
    args = bonus.Args(**SMALL | dict(env_id=env_id, episodes_per_trial=episodes, int_coef=0.5))
    plain_rollout, compute_gae, seen = bonus.plain_rollout, script.compute_gae, {}

    def watched_rollout(*inputs):
        outputs = plain_rollout(*inputs)
        seen["trajectory"] = outputs[3]
        seen["last"] = script.make_inputs(script.make_env(args), outputs[0], outputs[1])
        return outputs

    def watched_gae(args, reward, *inputs):
        seen["reward"] = reward
        return compute_gae(args, reward, *inputs)

    def watched_update(state):
        return *script.update(args, state), dict(seen)

    monkeypatch.setattr(bonus, "plain_rollout", watched_rollout)
    monkeypatch.setattr(script, "compute_gae", watched_gae)
    rollouts, extra, returns, running = [], [], np.full(16, np.nan), np.zeros(16)
    with bonus.installed():
        state = jit_args(script.init_train_state, args)(jax.random.key(0))
        update = jax.jit(watched_update)
        for _ in range(3):
            state, metrics, now = jax.device_get(update(state))
            trajectory, last = now["trajectory"], now["last"]
            with_last = lambda x, y: np.concatenate([x, y[None]])
            inputs = jax.tree.map(with_last, trajectory.inputs, last)
            at_hand = inputs.obs["image"][..., 3, 5:, :]  # Farama's columns, rows: the last two
            rollouts.append((as_bytes(at_hand), inputs.start))
            extra.append(now["reward"] - trajectory.reward)
            logged = metrics["charts/intrinsic_reward"]
            assert logged == pytest.approx(extra[-1].mean(), rel=1e-4)
            np.testing.assert_array_equal(inputs.prev_reward[1:], trajectory.reward)
            for reward, end in zip(trajectory.reward, inputs.start[1:], strict=True):
                running = running + reward
                returns, running = np.where(end, running, returns), np.where(end, 0, running)
            reported = metrics["charts/episodic_return"]
            np.testing.assert_allclose(reported, np.nanmean(returns), atol=1e-6)
    np.testing.assert_allclose(extra, bonus_by_definition(0.5, rollouts), atol=1e-6)
    starts = np.stack([start[1:] for _, start in rollouts])
    assert starts.sum() >= 16 and (np.asarray(extra)[starts] == 0).all()


def test_hashes_of_what_is_at_hand_all_differ():
    """Of what a MiniGrid agent may face with what it may carry, as codes."""
    kind = lambda name, colours, states=(0,): [
        (OBJECT_TO_IDX[name], COLOR_TO_IDX[colour], state) for colour in colours for state in states
    ]
    things = [kind(name, COLOR_TO_IDX) for name in ("key", "ball", "box")]
    things = [(OBJECT_TO_IDX["empty"], 0, 0), *itertools.chain(*things)]
    fixed = kind("wall", ["grey"]) + kind("goal", ["green"]) + kind("lava", ["red"])
    faced = things + fixed + kind("floor", COLOR_TO_IDX) + kind("door", COLOR_TO_IDX, range(3))
    pairs = np.array(list(itertools.product(faced, things)), np.uint8)
    hashes = np.asarray(bonus.hash_things(pairs[None]))[0]
    assert np.unique(hashes >> (32 - bonus.HASH_BITS)).size == len(pairs) == 874


def test_a_run_with_the_bonus_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Two updates and two more from their checkpoint: what four in one go give, counts included."""
    monkeypatch.setattr(script, "record_video", lambda *_: None)  # takes seconds
    options = dict(env_id="MiniGrid-DoorKey-5x5-v0", int_coef=0.1, anneal_lr=False)
    options |= dict(SMALL, eval_episodes=4, log_interval=1)  # one program for runs of any length
    with bonus.installed():
        whole = run_main(script, tmp_path / "whole", **options, total_timesteps=4 * 16 * 24)
        part = run_main(script, tmp_path / "part", **options, total_timesteps=2 * 16 * 24)
        words = words_of(resume=part, total_timesteps=4 * 16 * 24, videos_dir=tmp_path / "videos")
        bonus.main(words)
    expected, ours = arrays_of(whole), arrays_of(part)
    assert expected.keys() == ours.keys() >= {"stats/visits", "stats/last_episode"}
    for name, x in expected.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
    assert ours["stats/visits"].sum() > 2 * 16  # each of 16 environments met several things
    logged = [scalars(run)["charts/intrinsic_reward"] for run in (whole, part)]
    assert logged[0] == logged[1] and len(logged[0]) == 4
