"""benchmarks/environments/: each program at its smallest; gymnax's rules step by step.

Programs whose package is not installed are skipped; benchmarks/environments/README.md says when they ran
last.
"""

import functools
import importlib.util
import json
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MODULES, ROOT, run_of, words_of

FOLDER = ROOT / "benchmarks" / "environments"
sys.path.insert(0, str(FOLDER))
SMALL = dict(num_envs=4, num_steps=8, num_minibatches=1, update_epochs=1, total_timesteps=64)
SMALL |= dict(eval_episodes=2, log_interval=1)
PACKAGES = {  # that each program imports
    "brax_physics": "brax",
    "craftax_classic": "craftax",
    "craftax_classic_rnn": "craftax",
    "gymnax_minatar": "gymnax",
    "jumanji_games": "jumanji",
    "navix_gridworlds": "navix",
    "pgx_minatar": "pgx",
    "playground_control": "mujoco_playground",
}


def needs(program):
    if importlib.util.find_spec(PACKAGES[program]) is None:
        pytest.skip(f"{PACKAGES[program]} is not installed")


def run(program, folder, monkeypatch, **options):
    """Runs a program as from a shell, but in this process: what it replaces comes back."""
    needs(program)
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [program, *words_of(**options)])
        for script in MODULES:
            for name, value in list(vars(script).items()):
                patch.setattr(script, name, value)
        runpy.run_path(str(FOLDER / f"{program}.py"), run_name="__main__")
    return run_of(folder)


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize("program", [name for name in PACKAGES if name != "gymnax_minatar"])
def test_command(program, tmp_path, monkeypatch):
    """Two updates and an evaluation; the run is called after its environment."""
    run_dir = run(program, tmp_path, monkeypatch, **SMALL)
    summary = summary_of(run_dir)
    assert run_dir.name.startswith(f"{summary['args']['env_id']}__{program}__1__")
    assert summary["total_timesteps"] == 64 and summary["failed_seeds"] == []
    assert summary["eval_length_mean"] > 0


def test_run_is_resumed(tmp_path, monkeypatch):
    """By the program itself, with another id than its default one."""
    game = {"env_id": "SpaceInvaders-MinAtar", "seed": 2}
    run_dir = run("gymnax_minatar", tmp_path, monkeypatch, **SMALL | game)
    assert run_dir.name.startswith("SpaceInvaders-MinAtar__gymnax_minatar__2__")
    run("gymnax_minatar", tmp_path, monkeypatch, resume=run_dir, total_timesteps=96)
    assert summary_of(run_dir)["total_timesteps"] == 96


@pytest.fixture
def world():
    """The program for gymnax's MinAtar; to import it changes nothing."""
    needs("gymnax_minatar")
    import gymnax_minatar

    return gymnax_minatar


def test_gymnax_step_by_step(world):
    """Rewards, observations and ends are the library's; its limit and its reset are not there."""
    import gymnax

    env = world.Gymnax("Breakout-MinAtar")
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
        if done:  # the library has begun the next episode
            assert next_state.time == 0 and state.time > 0
            state = env.reset(key)
        else:
            np.testing.assert_array_equal(observe(state), obs)
    assert ends > 5 and limits > 2


def test_convolution():
    """Patches and a product are XLA's convolution of pictures [M, Y, X, C]."""
    needs("pgx_minatar")
    import pgx_minatar as world

    key, args = jax.random.key(1), world.Args()
    params = world.init_agent(args, key, world.Pgx("minatar-breakout"))
    obs = jax.random.uniform(key, (5, 10, 10, 4))
    kernel = params["conv"]["w"].reshape(16, 3, 3, 4).transpose(1, 2, 3, 0)
    axes = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(obs, kernel, (1, 1), "VALID", dimension_numbers=axes)
    x = jax.nn.relu(x).transpose(3, 1, 2, 0).reshape(1024, 5)
    dist, value = world.forward(args, params, obs)
    logits = world.ppo.mlp(params["actor"], x).T
    np.testing.assert_allclose(dist.logits, logits, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, world.ppo.mlp(params["critic"], x)[0], rtol=1e-4, atol=1e-5)


def test_programs():
    """Each is there."""
    assert PACKAGES.keys() <= {path.stem for path in FOLDER.glob("*.py")}
