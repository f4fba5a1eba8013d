"""The algorithm against optax, NumPy from the definitions, finite differences, statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
import scipy.special
import scipy.stats
from conftest import (
    USUAL_COMPILATION,
    close,
    having,
    jit_args,
    numpy_ppo_loss,
    once,
    quick_args,
    report_maximum,
    scipy_categorical,
)


def initial(script, args):
    """The state of one untrained agent."""
    return jit_args(script.init_train_state, args)(jax.random.key(args.seed))


def jitted_update(script, args):
    """One update of one agent as a program."""
    return jax.jit(functools.partial(script.update, args))


def with_time_limit(script, args, max_episode_steps):
    """The script's environment with another time limit."""
    return dataclasses.replace(script.make_env(args), max_episode_steps=max_episode_steps)


# --- Network, distribution and optimizer ---


@having("init_mlp")
@pytest.mark.quick
def test_initial_weights_are_orthogonal(script):
    """W W^T (or W^T W) = gain^2 I: gains sqrt(2), sqrt(2), then 0.01 (actor) or 1 (critic)."""
    args = quick_args(script)
    params = script.init_agent(args, jax.random.key(0), script.make_env(args))
    for name, head_gain in [("actor", 0.01), ("critic", 1.0)]:
        assert len(params[name]) == 3
        for layer, gain in zip(params[name], [2**0.5, 2**0.5, head_gain], strict=True):
            w, b = layer["w"], layer["b"]
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-5 * gain**2)
            assert not b.any()


@once("orthogonalized")
@pytest.mark.quick
@pytest.mark.parametrize("shape", [(64, 64), (64, 4), (2, 64), (1, 64), (3, 3)])
def test_orthogonalized_equals_scipy(script, shape):
    """The polar factor, of which SciPy takes the singular values apart."""
    noise = jax.random.normal(jax.random.key(0), shape)
    expected, _ = scipy.linalg.polar(np.asarray(noise, np.float64))
    np.testing.assert_allclose(script.orthogonalized(noise), expected, atol=1e-4)


@once("init_mlp")
@pytest.mark.quick
def test_network_equals_numpy(script):
    """Values of a batch by rows and products in NumPy, in float64."""
    args = quick_args(script)
    env = script.make_env(args)
    params = script.init_agent(args, jax.random.key(0), env)
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases too
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), 7))
    obs = jax.vmap(env.observe)(states)
    _, value = script.forward(args, params, obs)
    x = np.asarray(obs, np.float64).reshape(7, -1)
    *hidden, head = jax.tree.map(lambda p: np.asarray(p, np.float64), params["critic"])
    for layer in hidden:
        x = np.tanh(x @ layer["w"].T + layer["b"][:, 0])
    expected = (x @ head["w"].T + head["b"][:, 0])[:, 0]
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


@once("Categorical")
@pytest.mark.quick
def test_categorical_equals_scipy(script):
    """Log-probabilities, entropies, modes, and how often each action is drawn."""
    logits = 2 * np.random.default_rng(0).normal(size=(3, 5, 4)).astype("f")
    dist = script.Categorical(logits=jnp.asarray(logits))
    probabilities = scipy.special.softmax(logits.astype(float), axis=-1)
    action = np.arange(15).reshape(3, 5) % 4
    expected = np.log(np.take_along_axis(probabilities, action[..., None], -1)[..., 0])
    np.testing.assert_allclose(dist.log_prob(jnp.asarray(action)), expected, rtol=1e-5)
    entropy = scipy.stats.entropy(probabilities, axis=-1)
    np.testing.assert_allclose(dist.entropy(), entropy, rtol=1e-5)
    np.testing.assert_array_equal(dist.mode(), probabilities.argmax(-1))

    keys = jax.random.split(jax.random.key(0), 20_000)
    samples = np.asarray(jax.jit(jax.vmap(dist.sample))(keys))  # [20,000, 3, 5]
    assert samples.dtype == np.int32 and dist.mode().dtype == np.int32
    for index in np.ndindex(3, 5):
        counts = np.bincount(samples[:, *index], minlength=4)
        expected = len(keys) * probabilities[index]
        assert scipy.stats.chisquare(counts, expected).pvalue > 1e-4


@once("Gaussian")
@pytest.mark.quick
def test_gaussian_equals_scipy(script):
    """Log-probabilities and entropies of vectors of two numbers, modes, and what is drawn."""
    rng = np.random.default_rng(0)
    mean, log_std = rng.normal(size=(3, 5, 2)).astype("f"), np.float32([-2.0, 0.5])
    dist = script.Gaussian(mean=jnp.asarray(mean), log_std=jnp.asarray(log_std))
    normal = scipy.stats.norm(mean.astype(float), np.exp(log_std.astype(float)))
    action = rng.normal(size=(3, 5, 2)).astype("f")
    log_prob = dist.log_prob(jnp.asarray(action))
    np.testing.assert_allclose(log_prob, normal.logpdf(action).sum(-1), rtol=1e-4, atol=1e-5)
    entropy = jnp.broadcast_to(dist.entropy(), (3, 5))
    np.testing.assert_allclose(entropy, normal.entropy().sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(dist.mode(), mean)
    samples = np.asarray(jax.vmap(dist.sample)(jax.random.split(jax.random.key(0), 5000)))
    for index in np.ndindex(3, 5, 2):
        marginal = scipy.stats.norm(mean[index], np.exp(log_std[index[-1]]))
        assert scipy.stats.kstest(samples[:, *index], marginal.cdf).pvalue > 1e-4


@once("adam_update")
@pytest.mark.quick
def test_optimizer_equals_optax(script):
    """100 steps with an annealed learning rate; gradients small, large (clipped) and zero."""
    rng = np.random.default_rng(0)
    shapes = {"a": {"w": (5, 3), "b": (5, 1)}, "c": {"w": (2, 7)}}

    def draw(scale=1.0):
        def normal(shape):
            return np.float32(scale) * rng.normal(size=shape).astype("f")

        return jax.tree.map(normal, shapes, is_leaf=lambda s: type(s) is tuple)

    def rate(count):
        return 1e-3 * (1 - count / 100)

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))
    params = expected = draw()
    args = quick_args(script, max_grad_norm=0.5, adam_eps=1e-5)
    state, optax_state = script.adam_init(params), optimizer.init(params)
    ours = jit_args(script.adam_update, args)
    theirs = jax.jit(optimizer.update)
    clipped = 0
    for count, scale in enumerate(20 * [0.0, 1e-4, 1e-2, 1.0, 100.0]):
        grads = draw(scale)
        params, state, norm = ours(grads, state, params, rate(count))
        updates, optax_state = theirs(grads, optax_state, expected)
        expected = optax.apply_updates(expected, updates)
        close(params, expected, rtol=1e-6, atol=1e-6)
        close(norm, optax.tree.norm(grads), rtol=1e-6)
        clipped += norm > 0.5
    assert clipped == 40


# --- Advantages ---


def definition_of_gae(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    """sum_l (gamma lambda)^l delta_{t+l} up to and including the episode's last step."""
    advantage = np.zeros_like(value)
    for t, n in np.ndindex(value.shape):
        for later in range(t, len(value)):
            bootstrap = 0.0 if terminated[later, n] else gamma * next_value[later, n]
            delta = reward[later, n] + bootstrap - value[later, n]
            advantage[t, n] += (gamma * gae_lambda) ** (later - t) * delta
            if terminated[later, n] or truncated[later, n]:
                break
    return advantage


@once("compute_gae")
@pytest.mark.quick
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_gae_equals_definition(script, gae_lambda):
    """NumPy in float64, with terminations, truncations and both at once in the middle."""
    rng = np.random.default_rng(0)
    reward, value, next_value = rng.normal(size=(3, 50, 8))
    terminated, truncated = rng.random((2, 50, 8)) < 0.1
    truncated[20, :4] = terminated[20, :4] = True
    assert (terminated & ~truncated).any() and (truncated & ~terminated).any()
    flags = terminated, truncated
    expected = definition_of_gae(reward, value, next_value, *flags, 0.99, gae_lambda)
    arrays = [jnp.asarray(x, jnp.float32) for x in (reward, value, next_value)]
    args = quick_args(script, gamma=0.99, gae_lambda=gae_lambda)
    ours = script.compute_gae(args, *arrays, *map(jnp.asarray, flags))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@once("trajectory_values")  # one text in the scripts without recurrence
@pytest.mark.parametrize("max_episode_steps", [3, 12, 500])
def test_bootstrap_values_are_those_of_true_successors(script, max_episode_steps):
    """`trajectory_values` against the critic on every observation and every true successor."""
    args = quick_args(script, num_steps=64, total_timesteps=10**6)
    env, state = with_time_limit(script, args, max_episode_steps), initial(script, args)
    rollout = jit_args(script.rollout, args, env)
    key = jax.random.key(0)
    _, _, steps = rollout(state.params, state.env_state, state.stats, key)
    assert steps.truncated.any() == (max_episode_steps < args.num_steps)
    values = script.trajectory_values(args, env, state.params, steps)

    @jax.jit
    def critic(obs):  # one time step at a time
        return jax.lax.map(lambda x: script.forward(args, state.params, x)[1], obs)

    close(values[0], critic(steps.obs), rtol=1e-5, atol=1e-6)
    used = ~np.asarray(steps.terminated)  # after a termination no value is used
    expected = np.asarray(critic(steps.next_obs))
    close(np.asarray(values[1])[used], expected[used], rtol=1e-5, atol=1e-6)
    assert np.unique(expected).size > 100


# --- Episode statistics ---


@once("rollout")  # one text in the scripts without recurrence
@pytest.mark.parametrize("max_episode_steps", [12, 500])
def test_episode_statistics_equal_replay(script, max_episode_steps):
    """Two rollouts in a row; NumPy adds up each environment's rewards and cuts at the flags."""
    args = quick_args(script, num_steps=50, total_timesteps=10**6)
    env, state = with_time_limit(script, args, max_episode_steps), initial(script, args)
    env_state, stats = state.env_state, state.stats
    running_return = np.zeros(args.num_envs)
    running_length = np.zeros(args.num_envs, int)
    last_return, last_length = np.full((2, args.num_envs), -np.inf)
    rollout = jit_args(script.rollout, args, env)
    for key in jax.random.split(jax.random.key(0), 2):
        env_state, stats, steps = rollout(state.params, env_state, stats, key)
        steps = jax.tree.map(np.asarray, steps)
        for t in range(args.num_steps):
            running_return = running_return + steps.reward[t]
            running_length = running_length + 1
            np.testing.assert_array_equal(steps.truncated[t], running_length == max_episode_steps)
            done = steps.terminated[t] | steps.truncated[t]
            last_return = np.where(done, running_return, last_return)
            last_length = np.where(done, running_length, last_length)
            running_return = np.where(done, 0, running_return)
            running_length = np.where(done, 0, running_length)
        close(stats.running_return, running_return, rtol=1e-6)
        close(stats.running_length, running_length, rtol=0)
        close(stats.last_return, last_return, rtol=1e-6)
        close(stats.last_length, last_length, rtol=0)


@once("train")
def test_nothing_is_reported_before_an_episode_ends(script):
    """Updates of four steps: no return at first, then the mean of the last finished ones."""
    args = quick_args(script, num_steps=4)
    train_step, state = jitted_update(script, args), initial(script, args)
    reported = []
    for _ in range(20):
        state, metrics = train_step(state)
        last = np.asarray(state.stats.last_return)
        expected = last[np.isfinite(last)].mean() if np.isfinite(last).any() else -np.inf
        np.testing.assert_allclose(metrics["charts/episodic_return"], expected, rtol=1e-6)
        reported.append(expected)
    assert reported[0] == -np.inf and np.isfinite(reported[-1])


# --- Loss ---


def loss_inputs(script, args, samples=64):
    """(params, batch) in float64: old policy and values differ enough for clipping."""
    state, env = initial(script, args), script.make_env(args)
    rng = np.random.default_rng(0)

    def perturb(tree, scale):
        return jax.tree.map(lambda p: jnp.asarray(p + scale * rng.normal(size=p.shape)), tree)

    params = perturb(state.params, 0.1)
    old_params = perturb(params, 0.1)
    shape = jax.eval_shape(lambda key: env.observe(env.reset(key)), jax.random.key(0)).shape
    obs = jnp.asarray(rng.normal(size=(samples, *shape)).astype("f"))
    old_dist, _ = script.forward(args, old_params, obs)
    action = old_dist.sample(jax.random.key(0))
    advantage, target = rng.normal(size=(2, samples))
    _, value = script.forward(args, params, obs)
    return params, script.Batch(
        obs=obs,
        action=action,
        log_prob=old_dist.log_prob(action),
        value=value + 0.3 * rng.normal(size=samples),
        advantage=jnp.asarray(3 + 2 * advantage),
        target=jnp.asarray(target),
    )


def scipy_distribution(dist, action):
    """Log-probabilities [M] of actions and the mean entropy, of a `Categorical` or a `Gaussian`."""
    if type(dist).__name__ != "Gaussian":
        return scipy_categorical(dist.logits, action)
    normal = scipy.stats.norm(np.asarray(dist.mean), np.exp(np.asarray(dist.log_std)))
    entropy = np.broadcast_to(normal.entropy(), dist.mean.shape).sum(-1).mean()
    return normal.logpdf(np.asarray(action)).sum(-1), entropy


CLIPPING = pytest.mark.parametrize("clip_vloss", [True, False])


@having("ppo_loss", "init_mlp")
@CLIPPING
@pytest.mark.quick
def test_loss_equals_definition(script, clip_vloss):
    """Loss and metrics against NumPy in float64."""
    args = quick_args(script, clip_vloss=clip_vloss, ent_coef=0.1)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args)
        loss, metrics = script.ppo_loss(args, params, batch)
        dist, value = script.forward(args, params, batch.obs)
        log_prob, entropy = scipy_distribution(dist, batch.action)
    batch = jax.tree.map(np.asarray, batch)
    expected = numpy_ppo_loss(args, log_prob, entropy, np.asarray(value), batch)
    assert 0.1 < expected[1]["losses/clipfrac"] < 0.9
    assert metrics.keys() - expected[1].keys() <= {"charts/action_std"}
    ours = loss, {tag: metrics[tag] for tag in expected[1]}
    close(ours, expected, rtol=1e-9)


@having("ppo_loss", "init_mlp")
@pytest.mark.quick
def test_approx_kl_of_small_steps(script):
    """Where a policy has moved by a millionth, it is 1e-12 and not the rounding of the ratio."""
    args = quick_args(script)
    single = lambda x: np.asarray(x, "f" if x.dtype == np.float64 else x.dtype)
    with jax.enable_x64(True):
        params, batch = jax.tree.map(single, loss_inputs(script, args))
    log_prob = np.asarray(script.forward(args, params, batch.obs)[0].log_prob(batch.action))
    batch = batch._replace(log_prob=log_prob + np.float32(2e-6))
    _, metrics = script.ppo_loss(args, params, batch)
    log_ratio = np.asarray(log_prob - batch.log_prob, float)  # exact: they are nearly the same
    expected = (np.expm1(log_ratio) - log_ratio).mean()
    assert 1e-12 < expected < 1e-11
    np.testing.assert_allclose(metrics["losses/approx_kl"], expected, rtol=0.1)


@having("ppo_loss", "init_mlp")
@CLIPPING
def test_loss_gradient_equals_finite_differences(script, clip_vloss):
    """Central differences in float64, along a random direction of each array of parameters."""
    args = quick_args(script, clip_vloss=clip_vloss, ent_coef=0.1)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args)
        loss = jax.jit(lambda params: script.ppo_loss(args, params, batch)[0])
        grads, structure = jax.tree.flatten(jax.grad(loss)(params))
        leaves = jax.tree.leaves(params)
        rng = np.random.default_rng(1)

        def moved(i, direction):
            changed = [*leaves[:i], leaves[i] + direction, *leaves[i + 1 :]]
            return loss(structure.unflatten(changed))

        for i, grad in enumerate(grads):
            direction = rng.normal(size=grad.shape)
            difference = (moved(i, 1e-6 * direction) - moved(i, -1e-6 * direction)) / 2e-6
            np.testing.assert_allclose((grad * direction).sum(), difference, 1e-6, 1e-8)


@once("loss_gradient")
@pytest.mark.parametrize("samples", [64, 4096, 3 * 4096, 10_007])
def test_gradient_in_blocks_equals_the_whole(script, samples, monkeypatch):
    """However many blocks a minibatch is cut into, metrics and gradients are those of the whole."""
    args = quick_args(script, ent_coef=0.1)
    seen = report_maximum(script, monkeypatch)
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args, samples)
        gradient = jit_args(script.loss_gradient, args)
        grads, metrics = jax.block_until_ready(gradient(params, batch))
        jax.effects_barrier()
        blocks = len(seen)
        gradient = jit_args(jax.grad(script.ppo_loss, 1, has_aux=True), args)
        whole, expected = gradient(params, batch)
    assert blocks == {64: 1, 4096: 1, 3 * 4096: 3, 10_007: 1}[samples]
    close(grads, whole, rtol=1e-9, atol=1e-12)
    close(metrics, expected, rtol=1e-9, atol=1e-12)


# --- Updates ---


@once("update_epochs")  # one text in the scripts without recurrence
@pytest.mark.parametrize("norm_adv", [True, False])
def test_epoch_of_one_minibatch_equals_definition(script, norm_adv):
    """`update_epochs` takes optax's Adam step along the gradient of the whole batch; in float64."""
    options = dict(num_minibatches=1, update_epochs=1, norm_adv=norm_adv, ent_coef=0.1)
    args = quick_args(script, num_envs=8, num_steps=8, **options)  # 64 samples
    with jax.enable_x64(True):
        params, batch = loss_inputs(script, args)
        definite = batch
        if norm_adv:
            advantage = batch.advantage
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            definite = batch._replace(advantage=advantage)
        grads = jax.grad(lambda params: script.ppo_loss(args, params, definite)[0])(params)
        clip = optax.clip_by_global_norm(args.max_grad_norm)
        optimizer = optax.chain(clip, optax.adam(0.1, eps=args.adam_eps))
        steps, _ = optimizer.update(grads, optimizer.init(params))
        expected, norm = optax.apply_updates(params, steps), optax.tree.norm(grads)
    single = lambda x: np.asarray(x, "f" if x.dtype == np.float64 else x.dtype)
    params, batch = jax.tree.map(single, (params, batch))
    epochs = jit_args(script.update_epochs, args)
    opt_state, key = script.adam_init(params), jax.random.key(0)
    ours, _, metrics = epochs(params, opt_state, batch, 0.1, key)
    close(ours, expected, rtol=1e-3, atol=1e-3)  # of steps of 0.1
    close(metrics["losses/grad_norm"], norm, rtol=1e-4)


@having("trajectory_values", "init_mlp")
def test_update_learns_from_the_advantages_of_its_rollout(script, monkeypatch):
    """What `update` hands to its epochs: its rollout's steps, their advantages, and targets."""
    args = quick_args(script, num_steps=128, total_timesteps=10**5)  # some episodes end
    rollout, seen = script.rollout, {}

    def watched_rollout(*inputs):
        *others, seen["trajectory"] = rollout(*inputs)
        return *others, seen["trajectory"]

    def no_epochs(args, params, opt_state, batch, *others):
        # Learns nothing and hands on what it got as if it were metrics.
        return params, opt_state, {"batch": batch, "trajectory": seen["trajectory"]}

    monkeypatch.setattr(script, "rollout", watched_rollout)
    monkeypatch.setattr(script, "update_epochs", no_epochs)
    state, metrics = jitted_update(script, args)(initial(script, args))
    batch, trajectory = metrics["batch"], metrics["trajectory"]

    @jax.jit
    def values(obs):  # one time step at a time
        return jax.lax.map(lambda x: script.forward(args, state.params, x)[1], obs)

    def critic(obs):
        return np.asarray(values(obs), float)

    value, next_value = critic(trajectory.obs), critic(trajectory.next_obs)
    flags = np.asarray(trajectory.terminated), np.asarray(trajectory.truncated)
    assert flags[0].any() or flags[1].any()
    reward = getattr(args, "reward_scale", 1.0) * np.asarray(trajectory.reward, float)
    arrays = reward, value, next_value, *flags
    advantage = definition_of_gae(*arrays, args.gamma, args.gae_lambda)

    def by_step(x):
        return x.reshape(args.num_steps, args.num_envs, *x.shape[1:])

    close(by_step(batch.advantage), advantage, rtol=1e-4, atol=1e-5)
    close(by_step(batch.target), advantage + value, rtol=1e-4, atol=1e-5)
    close(by_step(batch.value), value, rtol=1e-5, atol=1e-5)
    for name in ("obs", "action", "log_prob"):
        ours = jax.tree.map(by_step, getattr(batch, name))
        close(ours, getattr(trajectory, name), rtol=0)


@having("train")
def test_target_kl_skips_the_remaining_steps(script, monkeypatch):
    """As many steps are taken as there are minibatches before the first one above the limit."""
    args = quick_args(script, num_minibatches=2, update_epochs=2, learning_rate=0.01)
    state, seen = initial(script, args), []
    ppo_loss = script.ppo_loss

    def watched_loss(args, params, batch):
        loss, metrics = ppo_loss(args, params, batch)
        jax.debug.callback(lambda kl: seen.append(float(kl)), metrics["losses/approx_kl"])
        return loss, metrics

    monkeypatch.setattr(script, "ppo_loss", watched_loss)
    expected, _ = jitted_update(script, args)(state)
    jax.effects_barrier()
    kl = list(seen)
    assert len(kl) == 4 and kl[0] < min(kl[1:])  # nothing has changed yet in the first one
    limits = [-1.0, (kl[0] + min(kl[1:])) / 2, 1.0]
    monkeypatch.setattr(script, "ppo_loss", ppo_loss)

    def update(target_kl):
        return script.update(dataclasses.replace(args, target_kl=target_kl), state)[0]

    limited = jax.jit(jax.vmap(update))(jnp.array(limits))
    none, _, free = (jax.tree.map(lambda x: x[i], limited.params) for i in range(3))  # noqa: B023
    close(none, state.params, 0.0)
    close(free, expected.params, 1e-4, 1e-5)
    arrays = script.named_arrays(limited.opt_state)
    counts = [x.tolist() for name, x in arrays.items() if "count" in name]
    assert counts and all(count == [0, 1, 4] for count in counts)


@having("train")
def test_no_key_is_used_twice(script):
    """JAX's checker of key reuse, while tracing a start, a training step and an evaluation."""
    args = quick_args(script)
    if hasattr(args, "rnn_hidden_dim"):  # MiniGrid: a level whose steps draw numbers too
        args = dataclasses.replace(args, env_id="MiniGrid-Dynamic-Obstacles-5x5-v0")
    with jax.debug_key_reuse(True):
        state = initial(script, args)
        jitted_update(script, args).trace(state)
        jax.make_jaxpr(lambda key: script.evaluate(args, state.params, key))(jax.random.key(0))


# --- Shuffling ---


@once("random_permutations")
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 31, 100, 256, 257, 512, 1000, 4096, 5000, 10_007])
def test_permutation_is_one(script, n):
    """Every index once, the same for the same key, another order for other keys and in a batch."""
    permutations = jax.jit(script.random_permutations, static_argnums=(1, 2))
    orders = [np.asarray(permutations(jax.random.key(seed), 2, n)) for seed in [*range(5), 0]]
    assert all(order.shape == (2, n) for order in orders)
    orders = [*np.concatenate(orders[:-1]), orders[-1][0]]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(n))
    np.testing.assert_array_equal(orders.pop(), orders[0])
    different = {order.tobytes() for order in orders}
    assert len(different) == 10 if n > 30 else len(different) > 1 or n == 1


@once("random_permutations")
@pytest.mark.parametrize("n", [5, 16, 100, 257, 300, 512])  # up to 256 by sorting
def test_permutation_is_uniform(script, n):
    """Chi-square tests over 50,000 keys: where three elements go, and where neighbours go."""
    keys = jax.random.split(jax.random.key(0), 50_000)
    some = np.array([0, 1, n // 2, n - 2, n - 1])
    permutations = jax.vmap(lambda key: script.random_permutations(key, 1, n)[0, some])
    permutations = jax.jit(permutations, compiler_options=USUAL_COMPILATION)  # much to compute
    orders = dict(zip(some, np.asarray(permutations(keys), int).T))
    for i in (0, n // 2, n - 1):
        assert scipy.stats.chisquare(np.bincount(orders[i], minlength=n)).pvalue > 1e-4
    for i, j in [(0, 1), (n - 2, n - 1)]:
        distance = (orders[j] - orders[i]) % n
        assert scipy.stats.chisquare(np.bincount(distance, minlength=n)[1:]).pvalue > 1e-4
