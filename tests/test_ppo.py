"""The algorithm against optax, NumPy written from the definitions, finite differences and statistics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats
from conftest import MODULES, having, once, quick_args


def close(ours, expected, rtol, atol=0.0):
    """Asserts that two trees have the same structure and nearly the same leaves."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), ours, expected)


def initial(script, args):
    """(params, env_state, episodes) of one untrained agent."""
    state = jax.tree.map(lambda x: x[0], script.init_train_state(args, script.seed_keys(args)))
    return state.params, state.env_state, state.episodes


# ----------------------------------------------------------------------------------------------------------------------
# Network and optimizer
# ----------------------------------------------------------------------------------------------------------------------


@having("init_mlp")
def test_initial_weights_are_orthogonal(script):
    """W W^T (or W^T W) = gain^2 I with gains sqrt(2), sqrt(2), 0.01 for the actor's head and 1 for the critic's."""
    params = script.init_params(jax.random.key(0), script.make_env(quick_args(script)))
    for name, head_gain in [("actor", 0.01), ("critic", 1.0)]:
        for i, gain in enumerate([2**0.5, 2**0.5, head_gain], start=1):
            w, b = params[name][f"w{i}"], params[name][f"b{i}"]
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5 * gain**2)
            assert not b.any()


@pytest.mark.parametrize(
    "script", MODULES[1:], ids=lambda module: module.__name__, indirect=True, scope="session"
)  # the first two share a text
def test_optimizer_equals_optax(script):
    """100 steps with an annealed learning rate; gradients small, large (clipped) and zero."""
    rng = np.random.default_rng(0)
    shapes = {"a": {"w": (5, 3), "b": (5, 1)}, "c": {"w": (2, 7)}}
    draw = lambda: jax.tree.map(lambda s: rng.normal(size=s).astype("f"), shapes, is_leaf=lambda s: type(s) is tuple)
    rate = lambda count: 1e-3 * (1 - count / 100)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))
    params = expected = draw()
    args = quick_args(script, max_grad_norm=0.5, adam_eps=1e-5)
    if hasattr(script, "adam_init"):
        state, step = script.adam_init(params), script.adam_update
    else:
        state, step = script.make_optimizer(args).init(params), script.optimizer_update
    optax_state = optimizer.init(params)
    ours, theirs = jax.jit(step, static_argnums=0), jax.jit(optimizer.update)
    clipped = 0
    for count, scale in enumerate(20 * [0.0, 1e-4, 1e-2, 1.0, 100.0]):
        grads = jax.tree.map(lambda x: scale * x, draw())  # noqa: B023
        params, state, norm = ours(args, grads, state, params, rate(count))
        updates, optax_state = theirs(grads, optax_state, expected)
        expected = optax.apply_updates(expected, updates)
        close(params, expected, rtol=1e-6, atol=1e-6)
        close(norm, optax.tree.norm(grads), rtol=1e-6)
        clipped += norm > 0.5
    assert clipped == 40


# ----------------------------------------------------------------------------------------------------------------------
# Advantages
# ----------------------------------------------------------------------------------------------------------------------


def definition_of_gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """sum_l (gamma lambda)^l delta_{t+l} up to and including the episode's last step."""
    advantages = np.zeros_like(values)
    for t, n in np.ndindex(values.shape):
        for later in range(t, len(values)):
            bootstrap = 0.0 if terminated[later, n] else gamma * next_values[later, n]
            delta = rewards[later, n] + bootstrap - values[later, n]
            advantages[t, n] += (gamma * gae_lambda) ** (later - t) * delta
            if terminated[later, n] or truncated[later, n]:
                break
    return advantages


@once("compute_gae")
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_gae_equals_definition(script, gae_lambda):
    """NumPy in float64, with terminations, truncations and both at once in the middle."""
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 50, 8))
    terminated, truncated = rng.random((2, 50, 8)) < 0.1
    truncated[20, :4] = terminated[20, :4] = True
    assert (terminated & ~truncated).any() and (truncated & ~terminated).any()
    expected = definition_of_gae(rewards, values, next_values, terminated, truncated, 0.99, gae_lambda)
    arrays = [jnp.asarray(x, jnp.float32) for x in (rewards, values, next_values)]
    ours = script.compute_gae(*arrays, jnp.asarray(terminated), jnp.asarray(truncated), 0.99, gae_lambda)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@once("compute_gae")
def test_gae_worked_example(script):
    """Three steps, then a termination; with lambda 0 the advantages are the deltas."""
    values = jnp.array([[1.0], [1.5], [0.8]])
    next_values = jnp.array([[1.5], [0.8], [123.0]])  # the last one must not be used
    terminated = jnp.array([[False], [False], [True]])
    arrays = (jnp.ones((3, 1)), values, next_values, terminated, jnp.zeros_like(terminated))
    deltas = script.compute_gae(*arrays, gamma=0.99, gae_lambda=0.0)
    np.testing.assert_allclose(deltas[:, 0], [1.485, 0.292, 0.2], rtol=1e-6)


@having("trajectory_values", "policy")  # without recurrence
@pytest.mark.parametrize("max_episode_steps", [3, 12, 500])
def test_bootstrap_values_are_those_of_true_successors(script, max_episode_steps):
    """`trajectory_values` against the critic evaluated on every observation and on every true next observation."""
    args = quick_args(script, num_steps=64, total_timesteps=10**6)
    env = dataclasses.replace(script.make_env(args), max_episode_steps=max_episode_steps)
    params, env_state, episodes = initial(script, args)
    rollout = jax.jit(script.rollout, static_argnums=(0, 1))
    _, _, steps = rollout(args, env, params, env_state, episodes, jax.random.key(0))
    assert steps.truncated.any() == (max_episode_steps < args.num_steps)
    critic = jax.vmap(script.value, (None, 0))
    values, next_values = script.trajectory_values(env, params, steps)
    close(values, critic(params, steps.obs), rtol=1e-5, atol=1e-6)
    expected = critic(params, steps.next_obs)
    used = ~np.asarray(steps.terminated)  # after a termination no value is used
    close(np.asarray(next_values)[used], np.asarray(expected)[used], rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Episode statistics
# ----------------------------------------------------------------------------------------------------------------------


@having("rollout", "policy")
@pytest.mark.parametrize("max_episode_steps", [12, 500])
def test_episode_statistics_equal_replay(script, max_episode_steps):
    """Two rollouts in a row; NumPy adds up the rewards of each environment and cuts at the flags."""
    args = quick_args(script, num_steps=50, total_timesteps=10**6)
    env = dataclasses.replace(script.make_env(args), max_episode_steps=max_episode_steps)
    params, env_state, episodes = initial(script, args)
    ret, length = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
    last_ret, last_length = np.full((2, args.num_envs), np.nan)
    rollout = jax.jit(script.rollout, static_argnums=(0, 1))
    for key in jax.random.split(jax.random.key(0), 2):
        env_state, episodes, steps = rollout(args, env, params, env_state, episodes, key)
        for reward, terminated, truncated in zip(
            *map(np.asarray, (steps.reward, steps.terminated, steps.truncated)), strict=True
        ):
            ret, length = ret + reward, length + 1
            np.testing.assert_array_equal(truncated, length == max_episode_steps)
            done = terminated | truncated
            last_ret, last_length = np.where(done, ret, last_ret), np.where(done, length, last_length)
            ret, length = np.where(done, 0, ret), np.where(done, 0, length)
        close(tuple(episodes), (ret, length, last_ret, last_length), rtol=1e-6)


@once("make_train_step")
def test_nothing_is_reported_before_an_episode_ends(script):
    """Updates of four steps: no return at first, then the mean of the last finished ones."""
    args = quick_args(script, num_steps=4)
    train_step = script.make_train_step(args)
    state = script.init_train_state(args, script.seed_keys(args))
    reported = []
    for _ in range(20):
        state, metrics = train_step(state)
        last = np.asarray(state.episodes.last_ret[0])
        expected = last[np.isfinite(last)].mean() if np.isfinite(last).any() else np.nan
        np.testing.assert_allclose(metrics["charts/episodic_return"][0], expected, rtol=1e-6)
        reported.append(expected)
    assert np.isnan(reported[0]) and np.isfinite(reported[-1])


# ----------------------------------------------------------------------------------------------------------------------
# Loss
# ----------------------------------------------------------------------------------------------------------------------


def loss_inputs(script, args, samples=64):
    """(params, batch) in float64: behaviour policy and old values differ from `params` enough for clipping."""
    params, *_ = initial(script, args)
    rng = np.random.default_rng(0)
    perturb = lambda scale: jax.tree.map(lambda p: jnp.asarray(p + scale * rng.normal(size=p.shape)), params)
    params, old_params = perturb(0.1), perturb(0.1)
    obs = jnp.asarray(rng.normal(size=(script.make_env(args).obs_size, samples)))
    old_policy = script.policy(old_params, obs)
    action = script.sample_action(old_policy, script.sample_noise(jax.random.key(0), (samples,)))
    logprob = script.action_logprob(old_policy, action)
    old_value = script.value(params, obs) + 0.3 * rng.normal(size=samples)
    advantage, ret = jnp.asarray(rng.normal(size=(2, samples)))
    return params, script.Batch(obs, action, logprob, 3 + 2 * advantage, ret, old_value)


def scipy_distribution(dist, action):
    """Log-probabilities [M] of actions and the mean entropy, of logits [A, M] or of (mean [M], log-deviation [])."""
    if isinstance(dist, tuple):
        normal = scipy.stats.norm(dist[0], np.exp(dist[1]))
        return normal.logpdf(action), normal.entropy().mean()
    probabilities = scipy.special.softmax(dist, axis=0)
    return np.log(probabilities[action, np.arange(action.size)]), scipy.stats.entropy(probabilities, axis=0).mean()


def normalized(advantage):
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def numpy_ppo_loss(logprob, entropy, value, batch, args):
    """The loss and metrics of PPO from the definition."""
    ratio = np.exp(logprob - batch.logprob)
    advantage = batch.advantage
    if args.norm_adv:
        advantage = normalized(advantage)
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    policy_loss = np.mean([-min(r * a, np.clip(r, low, high) * a) for r, a in zip(ratio, advantage, strict=True)])
    errors = (value - batch.ret) ** 2
    if args.clip_vloss:
        clipped = np.clip(value, batch.value - args.clip_coef, batch.value + args.clip_coef)
        errors = np.maximum(errors, (clipped - batch.ret) ** 2)
    value_loss = 0.5 * errors.mean()
    return policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": np.mean(ratio - 1 - np.log(ratio)),
        "losses/old_approx_kl": -np.mean(np.log(ratio)),
        "losses/clipfrac": np.mean((ratio < low) | (ratio > high)),
    }


CLIPPING = pytest.mark.parametrize("clip_vloss", [True, False])


@having("ppo_loss", "policy")
@CLIPPING
def test_loss_equals_definition(script, clip_vloss):
    """Loss and metrics against NumPy in float64."""
    args = quick_args(script, norm_adv=False, clip_vloss=clip_vloss, ent_coef=0.1)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args)
        ours = script.ppo_loss(params, batch, args)
        dist, value = (jax.tree.map(np.asarray, f(params, batch.obs)) for f in (script.policy, script.value))
    batch = jax.tree.map(np.asarray, batch)
    expected = numpy_ppo_loss(*scipy_distribution(dist, batch.action), value, batch, args)
    assert 0.1 < expected[1]["losses/clipfrac"] < 0.9
    close(ours, expected, rtol=1e-10)


@having("ppo_loss", "policy")
@CLIPPING
def test_loss_gradient_equals_finite_differences(script, clip_vloss):
    """Central differences in float64, along a random direction of each array of parameters."""
    args = quick_args(script, clip_vloss=clip_vloss, ent_coef=0.1)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args)
        loss = jax.jit(lambda params: script.ppo_loss(params, batch, args)[0])
        grads, structure = jax.tree.flatten(jax.grad(loss)(params))
        leaves = jax.tree.leaves(params)
        rng = np.random.default_rng(1)
        for i, grad in enumerate(grads):
            direction = rng.normal(size=grad.shape)
            along = lambda h: loss(structure.unflatten(leaves[:i] + [leaves[i] + h * direction] + leaves[i + 1 :]))  # noqa: B023
            difference = (along(1e-6) - along(-1e-6)) / 2e-6
            np.testing.assert_allclose((grad * direction).sum(), difference, rtol=1e-6, atol=1e-8)


@once("loss_gradient")
@pytest.mark.parametrize("samples", [64, 3 * 4096, 10_007])
def test_gradient_in_blocks_equals_the_whole(script, samples):
    """However many blocks a minibatch is cut into, metrics and gradients are those of the whole."""
    args = quick_args(script, ent_coef=0.1)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args, samples)
        metrics, grads = jax.jit(script.loss_gradient, static_argnums=2)(params, batch, args)
        expected_grads, expected_metrics = jax.grad(script.ppo_loss, has_aux=True)(params, batch, args)
    close((metrics, grads), (expected_metrics, expected_grads), rtol=1e-9, atol=1e-12)


@having("policy")
@pytest.mark.parametrize("norm_adv", [True, False])
def test_epoch_of_one_minibatch_equals_definition(script, norm_adv):
    """`update_epochs` takes optax's Adam step along the gradient of the loss of the whole batch; against float64."""
    args = quick_args(script, num_minibatches=1, update_epochs=1, norm_adv=norm_adv, ent_coef=0.1)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args)
        definite = batch._replace(advantage=normalized(batch.advantage)) if norm_adv else batch
        grads = jax.grad(lambda params: script.ppo_loss(params, definite, args)[0])(params)
        optimizer = optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optax.adam(0.1, eps=args.adam_eps))
        expected = optax.apply_updates(params, optimizer.update(grads, optimizer.init(params))[0])
    params, batch = jax.tree.map(lambda x: np.asarray(x).astype("f" if x.dtype == float else "i"), (params, batch))
    update = lambda batch: script.update_epochs(args, params, script.adam_init(params), batch, 0.1, jax.random.key(0))
    ours, _, metrics = jax.vmap(update, axis_name=script.AXIS)(jax.tree.map(lambda x: x[None], batch))
    close(jax.tree.map(lambda x: x[0], ours), expected, rtol=1e-3, atol=1e-3)  # of steps of 0.1
    close(metrics["losses/grad_norm"][0], optax.tree.norm(grads), rtol=1e-4)


@having("trajectory_values")
def test_update_learns_from_the_advantages_of_its_rollout(script, monkeypatch):
    """What `update` hands to its epochs: the steps of its rollout, their advantages by the definition, and targets."""
    args = quick_args(script, num_steps=64, total_timesteps=10**5)
    rollout, seen = script.rollout, {}

    def watched_rollout(*inputs):
        *others, seen["trajectory"] = rollout(*inputs)
        return *others, seen["trajectory"]

    def no_epochs(*inputs):  # learns nothing and hands on what it got as if it were metrics
        params, opt_state = inputs[-5:-3] if script.__name__ != "ppo_minigrid_rnn" else inputs[-6:-4]
        (batch,) = (x for x in inputs if isinstance(x, script.Batch))
        return params, opt_state, {"batch": batch, "trajectory": seen["trajectory"]}

    monkeypatch.setattr(script, "rollout", watched_rollout)
    monkeypatch.setattr(script, "update_epochs", no_epochs)
    state = script.init_train_state(args, script.seed_keys(args))
    params, metrics = jax.tree.map(lambda x: x[0], (state.params, script.make_train_step(args)(state)[1]))
    batch, trajectory = metrics["batch"], metrics["trajectory"]
    if hasattr(trajectory, "value"):
        values, next_values = (
            trajectory.value,
            script.trajectory_values(args, script.make_env(args), params, trajectory),
        )
    else:
        values, next_values = (
            jax.vmap(script.value, (None, 0))(params, x) for x in (trajectory.obs, trajectory.next_obs)
        )
    flags = np.asarray(trajectory.terminated), np.asarray(trajectory.truncated)
    assert flags[0].any() or flags[1].any()
    rewards = getattr(args, "reward_scale", 1.0) * np.asarray(trajectory.reward, float)
    arrays = rewards, np.asarray(values, float), np.asarray(next_values, float)
    advantages = definition_of_gae(*arrays, *flags, args.gamma, args.gae_lambda)
    by_step = lambda x: x.reshape(args.num_steps, args.num_envs)
    close(by_step(batch.advantage), advantages, rtol=1e-4, atol=1e-5)
    close(by_step(batch.ret), advantages + values, rtol=1e-4, atol=1e-5)
    close(by_step(batch.value), values, rtol=1e-5, atol=1e-5)
    close((by_step(batch.action), by_step(batch.logprob)), (trajectory.action, trajectory.logprob), rtol=0)
    if hasattr(batch, "obs"):
        close(batch.obs.reshape(-1, args.num_steps, args.num_envs).swapaxes(0, 1), trajectory.obs, rtol=0)


def one_update(script, **options):
    """State ({path: array}) and metrics after the first update of a quick run."""
    args = quick_args(script, **options)
    pool = [script.make_env(args)] if hasattr(script, "make_pool") else []
    state = script.init_train_state(args, script.seed_keys(args), *pool)
    state, metrics = script.make_train_step(args, *pool)(state)
    return jax.tree.map(np.asarray, (script.flatten_state(state), metrics))


@pytest.mark.parametrize(
    "script", [m for m in MODULES if m.__name__ != "ppo_swingup_jax"], ids=lambda m: m.__name__, indirect=True
)  # which has the first one's `update_epochs`
def test_target_kl_skips_the_remaining_epochs(script):
    """Beyond the limit after one epoch of three: as if it had been the only one."""
    np.testing.assert_equal(one_update(script, update_epochs=3, target_kl=1e-12), one_update(script, update_epochs=1))


@having("make_train_step", lacking="make_pool")
def test_no_key_is_used_twice(script):
    """JAX's checker of key reuse, while tracing a training step."""
    args = quick_args(script)
    with jax.debug_key_reuse(True):
        state = script.init_train_state(args, script.seed_keys(args))
        script.make_train_step(args).trace(state)


@once("update_epochs")
def test_target_kl_hides_no_losses_that_are_not_finite(script):
    """The second epoch diverges; a third would be skipped."""
    options = dict(update_epochs=3, num_minibatches=1, learning_rate=1e30, target_kl=1.0)
    assert not np.isfinite(one_update(script, **options)[1]["losses/grad_norm"])


# ----------------------------------------------------------------------------------------------------------------------
# Shuffling
# ----------------------------------------------------------------------------------------------------------------------


@once("random_permutation")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 31, 64, 100, 1000, 4096, 5000, 8192, 10_007])
def test_permutation_is_one(script, n):
    """Every index once, the same for the same key, another order for other keys."""
    permutation = jax.jit(script.random_permutation, static_argnums=1)
    orders = [np.asarray(permutation(jax.random.key(seed), n)) for seed in range(10)]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(n))
    np.testing.assert_array_equal(permutation(jax.random.key(0), n), orders[0])
    different = {order.tobytes() for order in orders}
    assert len(different) == 10 if n > 30 else len(different) > 1 or n == 1


@once("random_permutation")
@pytest.mark.parametrize("n", [5, 8, 16, 100, 128])
def test_permutation_is_uniform(script, n):
    """Chi-square tests over 50,000 keys: where each of three elements goes, and where pairs of neighbours go."""
    keys = jax.random.split(jax.random.key(0), 50_000)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: script.random_permutation(key, n)))(keys), int)
    for i in (0, n // 2, n - 1):
        assert scipy.stats.chisquare(np.bincount(orders[:, i], minlength=n)).pvalue > 1e-4
    for i, j in [(0, 1), (n - 2, n - 1)]:
        distance = (orders[:, j] - orders[:, i]) % n
        assert scipy.stats.chisquare(np.bincount(distance, minlength=n)[1:]).pvalue > 1e-4
