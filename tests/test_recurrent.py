"""The recurrent adapter of the Atari script: hidden states, resets, evaluation."""

import functools
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, run_main
from scipy.special import expit

sys.path.insert(0, str(ROOT / "benchmarks" / "environments"))
gymnasium = pytest.importorskip("gymnasium")
recurrent = pytest.importorskip("recurrent")
ppo = recurrent.ppo

SIZES = dict(env_id="Short-v0", num_envs=4, num_steps=14, num_minibatches=2, hidden_size=8)


class Short(gymnasium.Env):
    """Episodes of five steps; the agent sees the seed's number in the first observation only."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.number = 0, self.np_random.normal()
        return np.float32([self.number, 0.0]), {}

    def step(self, action):
        self.t += 1
        return np.float32([0.0, self.t]), float(action[0] * self.number), self.t == 5, False, {}


if "Short-v0" not in gymnasium.registry:
    gymnasium.register("Short-v0", Short)


@pytest.fixture(scope="module")
def agent():
    """The Atari script with the parts of the recurrent adapter, as in `recurrent.main`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in "Args make_env init_agent forward learn update_epochs".split():
            patch.setattr(ppo, name, getattr(recurrent, name))
        yield recurrent.Args(**SIZES)


def played(args):
    """(params, NumPy state after, NumPy trajectory, state after) of the second of two rollouts."""
    env = ppo.make_env(args)
    pool = env.make_pool(ppo.env_seeds(args, args.num_envs))
    state = ppo.start_episodes(args, env, pool, ppo.init_states(args))
    rollout = jax.jit(functools.partial(ppo.rollout, args, env, pool))
    state, _ = rollout(state)
    after, trajectory = jax.block_until_ready(rollout(state))
    pool.close()
    params, after, trajectory = jax.tree.map(lambda x: x[0], (state.params, after, trajectory))
    return *jax.device_get((params, after._replace(key=()), trajectory)), after


def numpy_gru(params, x, h):
    """One step of flax's GRUCell, by its definition."""
    gate = lambda name, z, part: z @ part[name]["kernel"] + part[name].get("bias", 0.0)
    r = expit(gate("ir", x, params) + gate("hr", h, params))
    z = expit(gate("iz", x, params) + gate("hz", h, params))
    n = np.tanh(gate("in", x, params) + r * gate("hn", h, params))
    return (1 - z) * n + z * h


def test_rollout_equals_a_numpy_loop(agent):
    """Hidden states, values and log-probabilities, with episodes that end in the middle."""
    params, after, trajectory, _ = played(agent)
    net, hidden = params["network"]["params"], trajectory.obs["hidden"][0]
    assert np.abs(hidden).max() > 0  # the state continues over rollouts
    started = trajectory.obs["start"][1:]
    assert started.any() and (started == ~trajectory.valid[:-1]).all()
    for t in range(agent.num_steps):
        hidden = np.where(trajectory.obs["start"][t][:, None], 0.0, hidden)
        np.testing.assert_allclose(trajectory.obs["hidden"][t], hidden, atol=1e-5)
        x = np.clip(trajectory.obs["obs"][t] / np.sqrt(1 + 1e-8), -10, 10)
        x = np.tanh(x @ net["features"]["kernel"] + net["features"]["bias"])
        hidden = numpy_gru(net["gru"], x, hidden)
        value = hidden @ net["critic"]["kernel"] + net["critic"]["bias"]
        np.testing.assert_allclose(trajectory.value[t], value[:, 0], atol=1e-5)
        mean = hidden @ net["actor"]["kernel"] + net["actor"]["bias"]
        squares = (trajectory.action[t] - mean) ** 2
        log_prob = -0.5 * (squares + np.log(2 * np.pi)).sum(-1)  # log_std is 0
        np.testing.assert_allclose(trajectory.log_prob[t], log_prob, atol=1e-4)
    kept = np.where(after.env_state.obs["start"][:, None], 0.0, hidden)
    np.testing.assert_allclose(after.env_state.obs["hidden"], kept, atol=1e-5)


def test_loss_sees_the_sequences_of_the_rollout(agent, monkeypatch):
    """With unchanged parameters all ratios are 1, although minibatches are shuffled."""
    *_, trajectory, after = played(agent)
    seen = []

    def ppo_loss(args, params, batch):
        dist, value = ppo.forward(args, params, batch.obs)
        ratio = dist.log_prob(batch.action) - batch.log_prob
        jax.debug.callback(lambda *x: seen.append(x), ratio, value - batch.value)
        return 0.0 * value.mean(), {}

    monkeypatch.setattr(ppo, "ppo_loss", ppo_loss)
    jax.block_until_ready(jax.jit(functools.partial(ppo.learn, agent))(after, trajectory))
    jax.effects_barrier()
    assert len(seen) == agent.update_epochs * agent.num_minibatches
    for ratio, value in seen:
        assert ratio.shape == (agent.num_envs // agent.num_minibatches, agent.num_steps)
        np.testing.assert_allclose(ratio, 0.0, atol=1e-4)
        np.testing.assert_allclose(value, 0.0, atol=1e-5)


def evaluated(args, params):
    """The `Evaluation` of a policy."""
    act = functools.partial(ppo.jit_function(args, ppo.evaluation_actions), ppo.float_inputs(args))
    return ppo.evaluate(args, act, params)


def test_evaluation_equals_a_replay(agent):
    """Returns of `evaluate` are those of its actions in the same environments."""
    args = recurrent.Args(**SIZES, eval_episodes=3, eval_mode="greedy")
    params = ppo.init_states(args).params
    evaluation = evaluated(args, params)
    assert (evaluation.episode_length == 5).all() and len(evaluation.actions) == 5
    env, net = gymnasium.make("Short-v0"), jax.tree.map(np.asarray, params)["network"]["params"]
    net = jax.tree.map(lambda x: x[0], net)
    seed = int(ppo.env_seeds(args, 3, ppo.EVALUATION)[0])
    obs, total, hidden = env.reset(seed=seed)[0], 0.0, np.zeros(8)
    for action in evaluation.actions:
        x = np.tanh(obs @ net["features"]["kernel"] + net["features"]["bias"])
        hidden = numpy_gru(net["gru"], x, hidden)
        mean = hidden @ net["actor"]["kernel"] + net["actor"]["bias"]
        np.testing.assert_allclose(action, mean, atol=1e-5)
        obs, reward, *_ = env.step(np.clip(action, -1, 1))
        total += reward
    assert evaluation.episode_return[0, 0] == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("flags", [{"num_minibatches": 8}, {"hide": (2,)}])
def test_flags_that_do_not_fit(flags):
    """Minibatches of less than an environment; a component that the observation lacks."""
    with pytest.raises(ppo.UserError, match=next(iter(flags)).replace("_", "-")):
        recurrent.make_env(recurrent.Args(**SIZES | flags))


def test_policy_of_the_page(agent, tmp_path):
    """The steps of the page's `act` are those of the evaluation's first episode."""
    sizes = SIZES | dict(total_timesteps=112, eval_episodes=3)
    run_dir = run_main(ppo, tmp_path, **sizes, eval_mode="greedy")
    page = (ROOT / "benchmarks" / "environments" / "README.md").read_text()
    code = page.split("```python\n")[2].split("```")[0]
    exec(code.replace("runs/<run_name>", str(run_dir)), page := {})
    env, total = gymnasium.make("Short-v0"), 0.0
    obs, _ = env.reset(seed=int(ppo.env_seeds(page["args"], 3, ppo.EVALUATION)[0]))
    hidden, start, done = np.zeros((1, 8), np.float32), np.ones(1, bool), False
    while not done:
        action, hidden = page["act"](obs[None], hidden, start)
        obs, reward, done, _, _ = env.step(np.clip(action[0], -1, 1))
        total, start = total + reward, np.zeros(1, bool)
    evaluation = evaluated(*ppo.load_run(run_dir))
    assert evaluation.episode_return[0, 0] == pytest.approx(total, abs=1e-4)


def test_single_frames(agent, tmp_path):
    """A short training in Pong; the GRU reads the features of the Atari script's network."""
    args, params = ppo.load_run(run_main(ppo, tmp_path, env_id="Pong-v5", hidden_size=8))
    params = jax.tree.map(lambda x: x[0], params)
    obs = ppo.make_env(args).observation_space.sample()[None]
    inputs = {"obs": obs, "hidden": np.ones((1, 8)), "start": np.zeros(1, bool)}
    policy, _ = recurrent.forward(args, params, inputs)
    net = params["network"]["params"]
    x = ppo.NatureCNN(num_actions=0).apply({"params": net["features"]}, obs)
    assert obs.shape == (1, 1, 84, 84) and x.shape == (1, 512)
    np.testing.assert_allclose(policy.hidden, numpy_gru(net["gru"], x, np.ones(8)), atol=1e-5)
