"""benchmarks/environments/: each adapter whose package is installed in its shortest run."""

import functools
import importlib.util
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MODULES, ROOT, json_of, run_of, words_of

FOLDER = ROOT / "benchmarks" / "environments"
sys.path.insert(0, str(FOLDER))
SMALL = dict(num_envs=4, num_steps=8, num_minibatches=1, update_epochs=1, total_timesteps=64)
SMALL |= dict(eval_episodes=2, log_interval=1)
PACKAGES = {  # that each adapter imports
    "brax_physics": "brax",
    "craftax_classic": "craftax",
    "craftax_classic_rnn": "craftax",
    "gymnax_minatar": "gymnax",
    "jumanji_games": "jumanji",
    "navix_gridworlds": "navix",
    "pgx_minatar": "pgx",
    "playground_control": "mujoco_playground",
}


def needs(adapter):
    if importlib.util.find_spec(PACKAGES[adapter]) is None:
        pytest.skip(f"{PACKAGES[adapter]} is not installed")


def run(adapter, folder, monkeypatch, **options):
    """Runs an adapter as a command in this process; restores what it replaces in the scripts."""
    needs(adapter)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [adapter, *words_of(**options)])
        for script in MODULES:
            for name, value in list(vars(script).items()):
                patch.setattr(script, name, value)
        runpy.run_path(str(FOLDER / f"{adapter}.py"), run_name="__main__")
    return run_of(folder)


@pytest.mark.parametrize("adapter", [name for name in PACKAGES if name != "gymnax_minatar"])
def test_command(adapter, tmp_path, monkeypatch):
    """Two updates and an evaluation; the name of the run begins with the environment."""
    run_dir = run(adapter, tmp_path, monkeypatch, **SMALL)
    summary = json_of(run_dir)
    assert run_dir.name.startswith(f"{summary['args']['env_id']}__{adapter}__1__")
    assert summary["total_timesteps"] == 64 and summary["failed_seeds"] == []
    assert summary["eval_length_mean"] > 0


def test_run_is_resumed(tmp_path, monkeypatch):
    """By the adapter, with another id than its default."""
    game = {"env_id": "SpaceInvaders-MinAtar", "seed": 2}
    run_dir = run("gymnax_minatar", tmp_path, monkeypatch, **SMALL | game)
    assert run_dir.name.startswith("SpaceInvaders-MinAtar__gymnax_minatar__2__")
    run("gymnax_minatar", tmp_path, monkeypatch, resume=run_dir, total_timesteps=96)
    assert json_of(run_dir)["total_timesteps"] == 96


@pytest.fixture
def gymnax_adapter():
    """The adapter for gymnax's MinAtar."""
    needs("gymnax_minatar")
    import gymnax_minatar

    return gymnax_minatar


def test_gymnax_step_by_step(gymnax_adapter):
    """Rewards, observations and ends equal the library's, without its time limit and reset."""
    import gymnax

    env = gymnax_adapter.Gymnax("Breakout-MinAtar")
    library, params = gymnax.make("Breakout-MinAtar")
    step, observe = jax.jit(env.step), jax.jit(env.observe)
    library_step = jax.jit(functools.partial(library.step, params=params))
    rng, ends, limits = np.random.default_rng(0), 0, 0
    state = env.reset(jax.random.key(0))
    for t in range(400):
        key, action = jax.random.key(t), jnp.int32(rng.integers(3))
        if t % 50 == 7:  # one step before the library's limit
            state = state.replace(time=jnp.int32(999))
        obs, next_state, reward, done, _ = library_step(key, state, action)
        at_limit = state.time == 999
        state, own_reward, terminated = step(jax.random.split(key)[0], state, action)
        assert own_reward == reward and (at_limit or terminated == done)
        ends, limits = ends + terminated, limits + (done & ~terminated)
        if done:  # the library has reset
            assert next_state.time == 0 and state.time > 0
            state = env.reset(key)
        else:
            np.testing.assert_array_equal(observe(state), obs)
    assert ends > 5 and limits > 2


def test_convolution():
    """The product with patches equals XLA's convolution of images [M, Y, X, C]."""
    needs("pgx_minatar")
    import pgx_minatar

    key, args = jax.random.key(1), pgx_minatar.Args()
    params = pgx_minatar.init_agent(args, key, pgx_minatar.Pgx("minatar-breakout"))
    obs = jax.random.uniform(key, (5, 10, 10, 4))
    kernel = params["conv"]["w"].reshape(16, 3, 3, 4).transpose(1, 2, 3, 0)
    axes = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(obs, kernel, (1, 1), "VALID", dimension_numbers=axes)
    x = jax.nn.relu(x).transpose(3, 1, 2, 0).reshape(1024, 5)
    dist, value = pgx_minatar.forward(args, params, obs)
    mlp = pgx_minatar.ppo.mlp
    np.testing.assert_allclose(dist.logits, mlp(params["actor"], x).T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, mlp(params["critic"], x)[0], rtol=1e-4, atol=1e-5)


BAD_IDS = [  # adapter, --env-id, message
    ("brax_physics", "reachr", "not in Brax; similar names: .'reacher'"),
    ("craftax_classic", "Craftax-Classic-Pixels-v1", "not one of Craftax-Classic-Symbolic-v1"),
    ("craftax_classic_rnn", "Craftax", "not one of Craftax-Classic-Symbolic-v1"),
    ("gymnax_minatar", "Breakot-MinAtar", "not in gymnax; similar names: .'Breakout-MinAtar'"),
    ("gymnax_minatar", "Pendulum-v1", "its actions are not discrete"),
    ("gymnax_minatar", "UmbrellaChain-bsuite", ".* missing .* arguments"),
    ("jumanji_games", "Snak-v1", "this adapter supports Game2048-v1, Snake-v1"),
    ("navix_gridworlds", "Navix-DorKey-5x5-v0", "not in NAVIX; similar names: .'Navix-DoorKey-5x5"),
    ("pgx_minatar", "minatar-breakot", "not in Pgx; similar names: .'minatar-breakout'"),
    ("pgx_minatar", "go_9x9", "has 2 players"),
    ("playground_control", "CartpolBalance", "not in Playground; similar names: .'Cartpole"),
]


@pytest.mark.parametrize("adapter, env_id, message", BAD_IDS)
def test_bad_ids(adapter, env_id, message, tmp_path, monkeypatch):
    """One line for an unknown id, and for an environment that does not fit the adapter."""
    with pytest.raises(SystemExit, match=f"^error: --env-id {env_id}:? {message}") as error:
        run(adapter, tmp_path, monkeypatch, env_id=env_id)
    assert "\n" not in str(error.value)


def test_jumanji_terminations():
    """The last step of 2048 and of Snake has the discount 0, as `step` returns it."""
    needs("jumanji_games")
    import jumanji_games

    for name in ("Game2048-v1", "Snake-v1"):
        env = jumanji_games.Jumanji(name)
        step, library_step = jax.jit(env.step), jax.jit(env.env.step)
        state, ends = env.reset(jax.random.key(0)), 0
        for t in range(400):
            action = jax.random.randint(jax.random.key(t), (), 0, 4)
            _, timestep = library_step(state[0], action)
            state, reward, terminated = step(jax.random.key(t), state, action)
            assert terminated == timestep.last() and reward == timestep.reward
            if terminated:
                state, ends = env.reset(jax.random.key(t)), ends + 1
        assert ends > 0
