"""ppo_atari_envpool_xla_jax.py: EnvPool through XLA and plainly, masks, network, services."""

import dataclasses
import functools
import math
import os
import signal

import flax.linen as nn
import imageio.v2 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    MODULES,
    arrays_of,
    cached,
    close,
    having,
    jit_args,
    json_of,
    numpy_ppo_loss,
    quick_args,
    run_main,
    run_of,
    scalars,
    scipy_categorical,
    words_of,
)

pytestmark = having("start_episodes")
script = next((module for module in MODULES if hasattr(module, "start_episodes")), None)


@pytest.fixture(autouse=True)
def _script(script):
    """All tests of this file are of one script."""


def training_pool(args):
    """(environments, pool) of a training."""
    env = script.make_env(args)
    return env, env.make_pool(script.env_seeds(args, args.num_envs))


def new_state(args, env, pool):
    """The state of fresh agents that have begun to play."""
    return script.start_episodes(args, env, pool, initial_agents(args))


@cached
def initial_agents(args):
    """The state of fresh agents."""
    return jit_args(script.init_states, args)()


def play(args):
    """One rollout of fresh agents: (state after it, trajectory), both of K agents."""
    env, pool = training_pool(args)
    roll = jax.jit(functools.partial(script.rollout, args, env, pool))
    return jax.block_until_ready(roll(new_state(args, env, pool)))  # the pool must outlive it


def first_agent(tree):
    return jax.tree.map(lambda x: x[0], tree)


# --- EnvPool ---


@pytest.mark.parametrize("limit", [20, 27_000, "life"])
def test_rollout_equals_replay(limit):
    """A rollout's actions again, through the plain interface: frames, flags, masks, statistics."""
    sizes = dict(num_envs=2, num_steps=300, total_timesteps=600, max_episode_steps=27_000)
    args = quick_args(script, **sizes)
    if limit == "life":  # truncated by the very step that loses the first one
        _, trajectory = play(args)
        limit = int(trajectory.terminated[0, :, 0].argmax()) + 1
    args = dataclasses.replace(args, max_episode_steps=limit)
    state, trajectory = first_agent(play(args))
    trajectory = jax.tree.map(np.asarray, trajectory)
    _, plain = training_pool(args)
    obs, info = plain.reset()
    valid = np.ones(2, bool)
    score, length = np.zeros(2), np.zeros(2, int)
    last_score, last_length = np.full(2, -np.inf), np.full(2, -np.inf)
    truncations = lost_lives = both = 0
    for t in range(args.num_steps):
        np.testing.assert_array_equal(trajectory.obs[t], obs)
        np.testing.assert_array_equal(trajectory.valid[t], valid)
        lives = info["lives"]
        obs, reward, terminated, truncated, info = plain.step(trajectory.action[t])
        game_over = info["terminated"] > 0
        lost = truncated & ((info["lives"] < lives) | game_over)  # not terminated to EnvPool
        np.testing.assert_array_equal(trajectory.reward[t], reward)
        np.testing.assert_array_equal(trajectory.terminated[t], terminated | lost)
        np.testing.assert_array_equal(trajectory.truncated[t], truncated)
        tells = terminated | truncated | (info["reward"] != 0)
        assert not (~valid & tells).any()  # a step that resets tells nothing
        score = score + valid * info["reward"]
        length = length + valid
        over = valid & (game_over | truncated)
        last_score = np.where(over, score, last_score)
        last_length = np.where(over, length, last_length)
        score, length = np.where(over, 0, score), np.where(over, 0, length)
        valid = ~(terminated | truncated)
        truncations += truncated.sum()
        lost_lives += (terminated & ~game_over).sum()
        both += lost.sum()
    np.testing.assert_allclose(state.stats.running_return, score)
    np.testing.assert_allclose(state.stats.running_length, length)
    np.testing.assert_allclose(state.stats.last_return, last_score)
    np.testing.assert_allclose(state.stats.last_length, last_length)
    np.testing.assert_array_equal(state.env_state.obs, obs)
    np.testing.assert_array_equal(state.env_state.done, ~valid)
    np.testing.assert_array_equal(state.env_state.memory, info["lives"])
    if limit == 20:
        assert truncations == 2 * (300 // 21)
    elif limit == 27_000:
        assert lost_lives > 4 and (truncations, both) == (0, 0)
    else:
        assert both > 0
    assert (length <= limit).all() and np.isfinite(last_score).all()


def invaders(evaluation):
    """(args, world, pool) with no-ops so long that some games end in those after a lost life."""
    sizes = dict(num_envs=2, num_steps=200, max_episode_steps=27_000)
    args = quick_args(script, env_id="SpaceInvaders-v5", **sizes)
    env, seeds = script.make_env(args), script.env_seeds(args, 2)
    env.options["noop_max"] = 1500
    return args, env, env.make_pool(seeds, evaluation)


def is_new_game(obs):
    """Which observations are a game's first: one frame four times, as there is no older one."""
    return (obs == obs[:, :1]).all((1, 2, 3))


def test_statistics_of_games_that_end_unnoticed():
    """EnvPool begins the next game in silence: a plain replay notices it by the frames."""
    args, env, pool = invaders(evaluation=False)
    blank = jax.eval_shape(functools.partial(script.init_states, args))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank._replace(key=None))
    state = zeros._replace(key=script.seed_keys(args))  # plays at random
    roll = jax.jit(functools.partial(script.rollout, args, env, pool))
    state = script.start_episodes(args, env, pool, state)
    state, trajectory = jax.block_until_ready(roll(state))
    _, _, plain = invaders(evaluation=False)
    plain.reset()
    running, last = np.zeros((2, 2)), np.zeros((2, 2))  # of each game: score, length
    valid, unnoticed = np.ones(2, bool), 0
    for action in np.asarray(trajectory.action[0]):
        obs, _, terminated, _, info = plain.step(action)
        running += valid * [info["reward"], np.ones(2)]
        new = ~valid & is_new_game(obs) & (running[1] > 0)
        over = new | (info["terminated"] > 0)
        last, running = np.where(over, running, last), np.where(over, 0, running)
        valid, unnoticed = ~terminated, unnoticed + new.sum()
    assert unnoticed > 0
    ours = first_agent(state.stats)
    np.testing.assert_array_equal([ours.running_return, ours.running_length], running)
    np.testing.assert_array_equal([ours.last_return, ours.last_length], last)


def test_evaluation_of_games_that_end_unnoticed(monkeypatch):
    """The score and the length are those of the first game alone."""
    args, env, _ = invaders(evaluation=True)
    seeds = script.env_seeds(args, 2)
    monkeypatch.setattr(script, "env_seeds", lambda *purpose: seeds)
    monkeypatch.setattr(script, "make_env", lambda args: env)
    rng, played = np.random.default_rng(0), []

    def act(params, obs, memory, step):
        played.append(rng.integers(6, size=2))
        return played[-1][None], memory

    evaluation = script.evaluate(args, act, {"w": np.zeros((1, 1))})
    _, _, plain = invaders(evaluation=True)
    plain.reset()
    score, length, running, valid = np.zeros(2), np.zeros(2), np.ones(2, bool), np.ones(2, bool)
    unnoticed = 0
    for action in played:
        obs, _, terminated, _, info = plain.step(action)
        score, length = score + running * info["reward"], length + (running & valid)
        new = running & ~valid & is_new_game(obs)
        running = running & ~new & (info["terminated"] == 0)
        valid, unnoticed = ~terminated, unnoticed + new.sum()
    assert unnoticed > 0 and not running.any()
    np.testing.assert_array_equal(evaluation.episode_return[0], score)
    np.testing.assert_array_equal(evaluation.episode_length[0], length)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_agents_share_a_pool_but_not_their_games(backend, monkeypatch):
    """Two agents in one pool: after one update the second one equals a run of its own."""
    results = []
    for agents in (dict(num_seeds=2), dict(seed=2)):
        args = quick_args(script, **agents)
        env, pool = training_pool(args)
        state = new_state(args, env, pool)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: backend)
            update = jax.jit(functools.partial(script.update, args, env, pool))
            state, metrics = jax.block_until_ready(update(state))
        results.append(jax.tree.map(np.asarray, (script.named_arrays(state), metrics)))
    together, alone = results
    assert (together[0]["env_state/obs"][0] != together[0]["env_state/obs"][1]).any()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y[0], 1e-5, 1e-5), together, alone)


def test_options_reach_the_emulators():
    """Sticky actions change games; the full set has 18 actions."""
    args = quick_args(script, num_envs=1, num_steps=64, max_episode_steps=27_000)
    sticky = dataclasses.replace(args, repeat_action_probability=0.9)
    frames = []
    for flags in (args, args, sticky):
        _, pool = training_pool(flags)
        pool.reset()
        frames.append(np.stack([pool.step(np.array([t % 4]))[0] for t in range(64)]))
    assert (frames[0] == frames[1]).all() and (frames[0] != frames[2]).any()
    assert script.make_env(args).action_space.n == 4
    full = dataclasses.replace(args, full_action_space=True)
    assert script.make_env(full).action_space.n == training_pool(full)[1].action_space.n == 18


# --- Network ---


class PlainNatureCNN(nn.Module):
    """The network as one would write it, with flax's own convolutions."""

    @nn.compact
    def __call__(self, obs):
        x = obs.transpose(0, 2, 3, 1) / 255.0
        for i, (features, size, stride) in enumerate([(32, 8, 4), (64, 4, 2), (64, 3, 1)]):
            x = nn.relu(nn.Conv(features, (size, size), stride, "VALID", name=f"conv{i}")(x))
        x = nn.relu(nn.Dense(512, name="dense")(x.reshape(len(x), -1)))
        return nn.Dense(4, name="actor")(x), nn.Dense(1, name="critic")(x)[:, 0]


@cached
def initial_params():
    """{name: array} of a network for four actions."""
    args = script.Args()  # Breakout
    init = functools.partial(script.init_agent, args, env=script.make_env(args))
    return jax.jit(init)(jax.random.key(0))["params"]


def random_frames(num):
    return jax.random.randint(jax.random.key(1), (num, 4, 84, 84), 0, 256).astype(jnp.uint8)


def test_network_equals_plain_convolutions():
    """The same weights, outputs and gradients."""
    ours = dict(initial_params())
    for name, x in ours.items():
        if name.endswith("_bias"):
            ours[name] = jax.random.normal(jax.random.key(0), x.shape)
    plain = {name: ours[name] for name in ("dense", "actor", "critic")}
    for i in range(3):
        plain[f"conv{i}"] = {"kernel": ours[f"conv{i}"], "bias": ours[f"conv{i}_bias"]}
    obs = random_frames(3)

    def outputs_and_gradients(model, params):
        def loss(params):
            outputs = model.apply({"params": params}, obs)
            return sum((x**2).sum() for x in outputs), outputs

        grads, outputs = jax.grad(loss, has_aux=True)(params)
        return outputs, grads

    network = script.NatureCNN(num_actions=4)
    outputs, grads = outputs_and_gradients(network, ours)
    expected, plain_grads = outputs_and_gradients(PlainNatureCNN(), plain)
    for i in range(3):
        conv = plain_grads.pop(f"conv{i}")
        plain_grads |= {f"conv{i}": conv["kernel"], f"conv{i}_bias": conv["bias"]}

    def close(x, y):
        np.testing.assert_allclose(x, y, 1e-3, 1e-5 * float(jnp.abs(y).max()))

    jax.tree.map(close, outputs, expected)
    jax.tree.map(close, dict(grads), plain_grads)
    features = script.NatureCNN(num_actions=0).apply({"params": ours}, obs)
    close(features @ ours["actor"]["kernel"] + ours["actor"]["bias"], expected[0])


def test_initial_weights_are_orthogonal():
    """Gains sqrt(2), 0.01 for the actor's head and 1 for the critic's; zero biases."""
    params = initial_params()
    gains = {f"conv{i}": 2**0.5 for i in range(3)} | {"dense": 2**0.5, "actor": 0.01, "critic": 1}
    for name, gain in gains.items():
        is_convolution = name.startswith("conv")
        w = np.asarray(params[name] if is_convolution else params[name]["kernel"])
        w = w.reshape(-1, w.shape[-1])
        np.testing.assert_allclose(w.T @ w, gain**2 * np.eye(w.shape[1]), atol=1e-5 * gain**2)
        assert not np.any(params[f"{name}_bias"] if is_convolution else params[name]["bias"])


def test_strides_that_products_do_not_support_are_refused():
    with pytest.raises(ValueError, match="stride 2 must divide the sizes 3, 84 and 84"):
        script.convolve(jnp.zeros((4, 84, 84, 2)), jnp.zeros((3, 3, 4, 8)), 2)


# --- Masked transitions ---


@pytest.fixture(scope="module")
def truncated_games():
    """(args, state, trajectory [T, N]) of games of at most 7 steps; one ends with the rollout."""
    args = quick_args(script, num_steps=24, total_timesteps=960, max_episode_steps=7)
    args = dataclasses.replace(args, update_epochs=1, ent_coef=0.1, clip_vloss=True)
    state, trajectory = first_agent(play(args))
    assert not trajectory.valid[-1].any() and trajectory.truncated[-2].all()  # 24 = 3 * (7 + 1)
    return args, state, trajectory


@cached
def jitted_learn(args):
    return jax.jit(functools.partial(script.learn, args))


def learned(args, state, trajectory):
    """Bytes of all that `learn` gives."""
    state, metrics = jitted_learn(args)(state, trajectory)
    leaves = jax.tree.leaves((state._replace(key=None, env_state=None), metrics))
    return [np.asarray(x).tobytes() for x in leaves]


def test_masked_transitions_teach_nothing(truncated_games):
    """Action, log-probability, reward, flags, successor of masked steps: bit for bit the same."""
    args, state, trajectory = truncated_games
    expected = learned(args, state, trajectory)
    masked = ~trajectory.valid
    noise = jax.random.normal(jax.random.key(0), masked.shape)
    changes = {
        "action": (trajectory.action + 1) % 4,
        "log_prob": trajectory.log_prob + noise,
        "reward": trajectory.reward + 10 * noise,
        "terminated": ~trajectory.terminated,
        "truncated": ~trajectory.truncated,
    }
    for name, changed in changes.items():
        everywhere = trajectory._replace(**{name: changed})
        masked_only = jnp.where(masked, changed, getattr(trajectory, name))
        assert learned(args, state, trajectory._replace(**{name: masked_only})) == expected, name
        assert learned(args, state, everywhere) != expected, name
    # What follows the last step, which is masked, does not matter either.
    later = state._replace(env_state=state.env_state._replace(obs=255 - state.env_state.obs))
    assert learned(args, later, trajectory) == expected


def test_truncated_games_are_bootstrapped_with_their_last_frame(truncated_games):
    """Advantages by definition; a last frame's value counts after truncation only."""
    args, state, trajectory = truncated_games
    value, next_value = script.trajectory_values(
        args, state.params, state.env_state.obs, trajectory
    )
    advantage = script.compute_gae(
        args, trajectory.reward, value, next_value, trajectory.terminated, trajectory.truncated
    )
    # The seventh of every game's steps is its last, the eighth of all only resets.
    assert trajectory.truncated[6].all() and not trajectory.valid[7].any()
    _, last = script.forward(args, state.params, trajectory.obs[7])
    expected = trajectory.reward[6] + args.gamma * last - trajectory.value[6]
    np.testing.assert_allclose(advantage[6], expected, rtol=1e-4, atol=1e-6)

    nowhere = jnp.zeros_like(trajectory.truncated)
    terminated = trajectory._replace(terminated=trajectory.truncated, truncated=nowhere)
    for steps, counts in [(trajectory, True), (terminated, False)]:
        changed = jnp.where(steps.valid, steps.value, steps.value + 1)
        same = learned(args, state, steps) == learned(args, state, steps._replace(value=changed))
        assert same != counts


@cached
def loss_and_gradients(args):
    """The jitted ((loss, metrics), gradients) of params and a batch."""

    def call(params, batch):
        if args.norm_adv:
            advantage = script.normalize(batch.advantage, batch.valid)
            batch = batch._replace(advantage=advantage)
        loss = functools.partial(script.ppo_loss, args, batch=batch)
        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(call)


def random_batch(valid):
    """A batch of random frames, actions and values; log-probabilities are near those of four."""
    rng = np.random.default_rng(0)
    num = len(valid)
    numbers = [jnp.asarray(rng.normal(size=num), jnp.float32) for _ in range(4)]
    return script.Batch(
        obs=random_frames(num),
        action=jnp.asarray(rng.integers(4, size=num), jnp.int32),
        log_prob=np.log(0.25) + 0.3 * numbers[0],
        value=numbers[1],
        advantage=numbers[2],
        target=numbers[3],
        valid=jnp.asarray(valid),
    )


@pytest.mark.parametrize("norm_adv, clip_vloss", [(True, True), (False, False)])
def test_loss_equals_definition_over_valid_samples(norm_adv, clip_vloss):
    """NumPy without the masked samples."""
    args = quick_args(script, norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.1)
    params = {"params": initial_params()}
    valid = np.random.default_rng(0).random(96) < 0.6
    batch = random_batch(valid)
    (loss, metrics), _ = loss_and_gradients(args)(params, batch)
    dist, new_value = script.forward(args, params, batch.obs)
    logits, new_value = np.asarray(dist.logits)[valid], np.asarray(new_value)[valid]
    kept = jax.tree.map(lambda x: np.asarray(x)[valid], batch)
    if norm_adv:
        advantage = kept.advantage
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        kept = kept._replace(advantage=advantage)
    log_prob, entropy = scipy_categorical(logits, kept.action)
    expected = numpy_ppo_loss(args, log_prob, entropy, new_value, kept)
    close((loss, metrics), expected, rtol=1e-4, atol=1e-5)
    clipfrac = expected[1]["losses/clipfrac"]
    np.testing.assert_allclose(metrics["losses/clipfrac"], clipfrac, atol=1e-6)


def test_minibatch_without_valid_samples():
    """Nothing to learn from: the gradients are zero, not NaN."""
    args = quick_args(script, norm_adv=True, clip_vloss=True, ent_coef=0.1)
    batch = random_batch(np.zeros(96, bool))
    (loss, _), grads = loss_and_gradients(args)({"params": initial_params()}, batch)
    assert loss == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))


def test_batch_without_valid_steps_changes_no_parameters(truncated_games):
    """Adam's running means would still move them."""
    args, state, trajectory = truncated_games
    learn = jitted_learn(dataclasses.replace(args, anneal_lr=False))
    state, _ = learn(state, trajectory)
    after, _ = learn(state, trajectory._replace(valid=jnp.zeros_like(trajectory.valid)))
    for ours, expected in zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params)):
        np.testing.assert_array_equal(ours, expected)


def test_learning_rates_under_vmap(truncated_games):
    """`learn` with a traced learning rate for two agents at once: each equals one of its own."""
    args, state, trajectory = truncated_games

    def learn(rate):
        return script.learn(dataclasses.replace(args, learning_rate=rate), state, trajectory)

    rates = jnp.array([1e-3, 1e-4])
    together, _ = jax.jit(jax.vmap(learn))(rates)
    for k, rate in enumerate(rates):
        changed = dataclasses.replace(args, learning_rate=float(rate))
        alone, _ = jitted_learn(changed)(state, trajectory)
        ours = jax.tree.map(lambda x: x[k], together.params)  # noqa: B023
        close(ours, alone.params, 1e-4, 1e-5)


def test_target_kl_stops_at_the_first_minibatch_that_exceeds_it(truncated_games):
    """As many steps as there were minibatches before it; a limit that none exceeds changes none."""
    args, state, trajectory = truncated_games
    args = dataclasses.replace(args, update_epochs=2, learning_rate=1e-2)

    def steps(target_kl):
        limited = dataclasses.replace(args, target_kl=target_kl)
        after, metrics = jitted_learn(limited)(state, trajectory)
        return int(after.opt_state[1].count), after.params, metrics

    def same(params, others):
        return jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), params, others))

    count, free, metrics = steps(None)
    assert count == 4 and metrics["losses/approx_kl"] > 1e-3
    count, params, _ = steps(1e9)
    assert count == 4 and same(params, free)
    # The first minibatch, which the policy that played sees, is within 1e-6; the second is not.
    count, first, metrics = steps(1e-6)
    assert count == 1 and not same(first, free) and not same(first, state.params)
    assert np.isfinite(metrics["losses/grad_norm"])


# --- Services ---


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize(
    "mode, protocol, sticky, limit",
    [
        ("greedy", "whole-games", 0.0, 150),
        ("sampled", "training", 0.25, 150),
        ("sampled", "training", 0.0, 27_000),
    ],
)
def test_evaluation_equals_replay_of_its_first_game(mode, protocol, sticky, limit, tmp_path):
    """Its recorded actions again, in colour: the same score and length; twice the same."""
    options = dict(eval_mode=mode, eval_protocol=protocol, repeat_action_probability=sticky)
    args = quick_args(script, max_episode_steps=limit, **options)
    params = initial_agents(args).params
    actions = script.jit_function(args, script.evaluation_actions)
    act = functools.partial(actions, script.float_inputs(args))
    evaluation, again = (script.evaluate(args, act, params) for _ in range(2))
    np.testing.assert_equal(tuple(evaluation), tuple(again))
    seeds = script.env_seeds(args, args.eval_episodes, script.EVALUATION)[:1]
    look = dict(gray_scale=False, img_height=210, img_width=160)
    colour = script.make_env(args).make_pool(seeds, evaluation=True, **look)
    colour.reset()
    played = [colour.step(np.array([action])) for action in evaluation.actions]
    ends = np.array([step[2][0] | step[3][0] for step in played])
    over = np.array([(step[4]["terminated"][0] > 0) | step[3][0] for step in played])
    resets = np.concatenate([[False], ends[:-1]])
    assert over.tolist() == [False] * (len(over) - 1) + [True]
    assert evaluation.episode_length[0, 0] == (~resets).sum() <= limit
    assert sum(step[4]["reward"][0] for step in played) == evaluation.episode_return[0, 0]
    if protocol == "whole-games":
        assert not ends[:-1].any()
    elif limit == 27_000:
        assert ends.sum() == 5 and resets.sum() == 4  # Breakout's lives

    short = evaluation._replace(actions=evaluation.actions[:10])
    path = script.record_video(args, short, tmp_path / "game")
    with imageio.get_reader(path) as reader:
        frames = np.stack([frame for frame in reader])
    expected = np.stack([step[0][0, -3:].transpose(1, 2, 0).astype(int) for step in played[:10]])
    assert frames.shape == (11, 210, 160, 3) and np.abs(frames[1:] - expected).mean() < 8


def test_interrupted_run_goes_on_with_new_games(tmp_path, monkeypatch, capsys):
    """Parameters, optimizer, schedule, key, counters go on where they were; games do not."""
    evaluate = script.evaluate

    def stopping(*args):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(script, "evaluate", stopping)
        run_main(script, tmp_path, eval_interval=3, total_timesteps=96)
    run_dir = run_of(tmp_path)
    said = capsys.readouterr().out
    assert stopped.value.code == 143 and f"to resume: --resume {run_dir}" in said
    args = script.load_args(run_dir)
    like = jax.eval_shape(functools.partial(script.init_states, args))
    stopped = script.load_checkpoint(run_dir, like)
    assert (stopped.update == 3).all()
    assert stopped.env_state is None and "env_state" not in str(list(arrays_of(run_dir)))
    resumed = script.start_episodes(args, *training_pool(args), stopped)
    ours, expected = script.named_arrays(resumed), script.named_arrays(stopped)
    for name in expected:
        if not name.startswith("stats"):
            np.testing.assert_array_equal(ours[name], expected[name])
    np.testing.assert_array_equal(resumed.stats.last_return, stopped.stats.last_return)
    assert not resumed.stats.running_length.any() and stopped.stats.running_length.any()
    script.main(words_of(resume=run_dir, eval_interval=0))
    final = script.load_checkpoint(run_dir, like)
    _, key = jax.random.split(script.seed_keys(args)[0])  # the first one is for the parameters
    for _ in range(6):  # each update plays and learns
        _, key = jax.random.split(jax.random.split(key, args.num_steps + 1)[-1])
    assert (final.update == 6).all() and final.key[0] == key
    assert (final.opt_state[1].count == 6 * args.update_epochs * args.num_minibatches).all()
    assert (run_dir / "summary.json").exists()


def test_results_of_two_seeds_tell_mode_and_protocol(tmp_path, capsys):
    """In summary.json, eval.json and the line of the result; `--eval` repeats the last one."""
    options = dict(eval_mode="greedy", eval_protocol="whole-games", total_timesteps=32)
    run_dir = run_main(script, tmp_path, num_seeds=2, eval_interval=1, **options)
    script.main(words_of(eval=run_dir, videos_dir=tmp_path / "videos"))
    out = capsys.readouterr().out
    assert out.count("2 greedy episodes: return_mean ") == 2
    summary, evaluation = json_of(run_dir), json_of(run_dir, "eval")
    assert evaluation.pop("args")["eval_mode"] == "greedy"
    assert evaluation == {name: summary[name] for name in evaluation}
    assert evaluation["eval_mode"] == "greedy" and evaluation["eval_protocol"] == "whole-games"
    for k, scores in enumerate(zip(*evaluation["per_seed"].values(), strict=True)):
        logged = scalars(run_dir / f"seed_{1 + k}")["eval/episodic_return"]
        assert [step for step, _ in logged] == [16, 32]
        assert logged[-1][1] == pytest.approx(scores[0])
    videos = {path.name for path in (tmp_path / "videos" / run_dir.name).iterdir()}
    assert videos == {"step_32.mp4", "eval.mp4"}


def test_compilation_cache_is_off_for_pools(tmp_path, monkeypatch):
    """While the program that steps a pool is compiled, none takes long enough to be written."""
    compile_lowered, name = jax.stages.Lowered.compile, "jax_persistent_cache_min_compile_time_secs"
    limits = []

    def recorded(lowered):
        limits.append(getattr(jax.config, name))
        return compile_lowered(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", recorded)
    run_main(script, tmp_path, total_timesteps=16)
    assert limits == [math.inf] and getattr(jax.config, name) < 1


def test_unknown_game_lists_near_names():
    with pytest.raises(script.UserError, match="Breakuot-v5.*Breakout-v5"):
        script.make_env(quick_args(script, env_id="Breakuot-v5"))
    with pytest.raises(script.UserError, match="HalfCheetah-v4"):
        script.make_env(script.Args(env_id="HalfCheetah-v4"))


@pytest.mark.filterwarnings("ignore:os.fork")
def test_pools_of_a_resumed_run(tmp_path, monkeypatch):
    """Other seeds than before, which depend on the update. All pools are closed once."""
    made, closed, make_pool = [], [], script.Atari.make_pool

    def recorded(env, seeds, *inputs, **options):
        pool = make_pool(env, seeds, *inputs, **options)
        pool.close = functools.partial(closed.append, len(made))
        made.append(seeds.tolist())
        return pool

    monkeypatch.setattr(script.Atari, "make_pool", recorded)
    monkeypatch.setattr(script.Atari, "video_fps", 30)
    run_dir = run_main(script, tmp_path, total_timesteps=16)  # one update
    (video,) = tmp_path.glob("videos/*/*.mp4")
    with imageio.get_reader(video) as reader:
        assert reader.get_meta_data()["fps"] == 30
    for updates in (2, 3):
        words = words_of(resume=run_dir, total_timesteps=16 * updates)
        script.main([*words, f"--videos-dir={tmp_path}"])
    trained = [set(seeds) for seeds in made[::3]]  # training, evaluation, video
    assert len(set.union(*trained)) == sum(map(len, trained)) == 12
    assert made[1::3] == [made[1]] * 3
    assert sorted(closed) == list(range(9)) == list(range(len(made)))


@pytest.mark.parametrize("use", ["env_id", "eval"])
def test_errors_of_make_env_keep_their_traceback(use, tmp_path, monkeypatch):
    """In a new run and in --eval; the error does not become one of the run's folder."""

    def make_env(args):
        raise ValueError("of my own")

    script.write_json(tmp_path / "args.json", vars(quick_args(script)))
    monkeypatch.setattr(script, "make_env", make_env)
    with pytest.raises(ValueError, match="of my own"):
        script.main(words_of(**{use: tmp_path}, runs_dir=tmp_path))


@pytest.mark.filterwarnings("ignore:.*fork")
def test_forked_workers_end_at_sigterm():
    """The handler of the parent process does not keep them alive."""
    with script.stop_signals() as signals:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)  # the handler returned
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM and not signals
