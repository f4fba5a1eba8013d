"""README's Python snippets, run as they stand beside the scripts, but for the videos."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import LIGHT_COMPILATION, QUICK_COMPILATION, ROOT, scalars

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def snippet(*words):
    """The only snippet that contains all of these words."""
    (block,) = [block for block in BLOCKS if all(word in block for word in words)]
    return block


def run(block, folder, flags=LIGHT_COMPILATION):
    """Runs a snippet on one device in a folder with copies of the scripts; returns its output."""
    for script in ROOT.glob("ppo_*.py"):
        shutil.copy(script, folder)
    env = os.environ | {"XLA_FLAGS": flags}
    (script,) = re.findall(r"import (ppo_\w+) as ppo", block)
    no_video = f"import {script}\n{script}.record_video = lambda *_: None\n"  # takes seconds
    command = [sys.executable, "-c", no_video + block]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def summary_of(folder):
    """summary.json of the only run in a folder."""
    (path,) = folder.glob("runs/*/summary.json")
    return json.loads(path.read_text())


def test_every_snippet_is_run():
    """The snippets that the tests below pick, and one that test_cartpole.py runs, are all."""
    assert len(BLOCKS) == len(SOLVED) + len(LEARNED) + len(OTHERS) + 1


SOLVED = {  # words of the snippet: the lowest greedy return
    "class Gymnax:": 500,
    "class ActorCritic(nn.Module)": 500,
    "class Catch:": 1,
    "losses/ratio_max": 500,
    "class Pendulum:": -200,
}
LEARNED = {"def t_maze_level": 0.95, "class ResetLSTM": 0.95}  # the lowest success rate
OTHERS = """class Args(ppo.Args)|over_keys = jax.vmap|jax.sharding.Mesh|gymnasium.make
    |print(jax.eval_shape""".split("|")


@pytest.mark.parametrize("words", SOLVED)
def test_snippet_solves_its_task(words, tmp_path):
    """Default flags; the return of the greedy policy over 100 episodes."""
    run(snippet(words), tmp_path)
    assert summary_of(tmp_path)["eval_return_mean"] >= SOLVED[words]
    if words == "losses/ratio_max":
        (run_dir,) = tmp_path.glob("runs/*")
        values = [value for _, value in scalars(run_dir)["losses/ratio_max"]]
        # The mean of a ratio is about 1, its maximum over thousands of samples is not.
        assert len(values) == 244 and min(values) > 1 and max(values) > 1.2


@pytest.mark.parametrize("words", LEARNED)
def test_snippet_learns_its_level(words, tmp_path):
    """Success of the greedy policy of the recurrent agent."""
    run(snippet(words), tmp_path)
    assert summary_of(tmp_path)["success_rate"] >= LEARNED[words]


def test_new_flags(tmp_path):
    """They are parsed, used, saved and read again on resume."""
    run(snippet("class Args(ppo.Args)"), tmp_path, QUICK_COMPILATION)
    assert summary_of(tmp_path)["args"]["hidden"] == [32, 32]
    (run_dir,) = tmp_path.glob("runs/*")
    resume = f'ppo.main(["--resume", "{run_dir}"])\n'
    block = re.sub(r"ppo\.main\(.*\)\n", resume, snippet("class Args(ppo.Args)"))
    assert "is finished" in run(block, tmp_path, QUICK_COMPILATION)


def test_sweep(tmp_path):
    """Twelve agents; of the four learning rates the smallest is the worst."""
    numbers = re.findall(r"\d+\.\d*", run(snippet("over_keys = jax.vmap"), tmp_path))
    returns = [float(number) for number in numbers]
    assert len(returns) == 4 and min(returns) == returns[0] and max(returns) > 300


def test_policy_in_faramas_environment(tmp_path):
    """An agent that was trained in the script's own Empty-5x5 solves Farama's."""
    words = "--env-id Empty-5x5 --num-envs 32 --total-timesteps 1e5"
    run(f"import ppo_minigrid_rnn as ppo\nppo.main({words.split()})", tmp_path)
    (run_dir,) = tmp_path.glob("runs/*")
    block = snippet("gymnasium.make").replace("runs/<run_name>", str(run_dir))
    assert run(block, tmp_path) == "success 1.00\n"


def test_shapes_without_compilation(tmp_path):
    """Every shape of an evaluation is printed."""
    block = snippet("print(jax.eval_shape")
    assert "episode_return=ShapeDtypeStruct(shape=(100,)" in run(block, tmp_path)


def test_seeds_over_devices(tmp_path):
    """Eight seeds on four devices."""
    flags = LIGHT_COMPILATION + " --xla_force_host_platform_device_count=4"
    returns = re.findall(r"\d+\.\d*", run(snippet("jax.sharding.Mesh"), tmp_path, flags))
    assert len(returns) == 8 and min(map(float, returns)) > 100
