"""The Python snippets, tables and links of README.md and benchmarks/recipes.md."""

import ast
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import (
    LIGHT_COMPILATION,
    PLAIN_FUSIONS,
    QUICK_COMPILATION,
    ROOT,
    arrays_of,
    json_of,
    run_of,
    scalars,
)

import ppo_cartpole_jax
import ppo_minigrid_rnn
import ppo_swingup_jax

LEARNERS = ppo_cartpole_jax, ppo_swingup_jax, ppo_minigrid_rnn
README, RECIPES = ROOT / "README.md", ROOT / "benchmarks" / "recipes.md"
TEXT = README.read_text() + RECIPES.read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def snippet(*words):
    """The only snippet that contains all of these words."""
    (block,) = [block for block in BLOCKS if all(word in block for word in words)]
    return block


def run(block, folder, flags=None, fails=False):
    """Runs a snippet without videos in a folder with copies of the scripts; returns its output."""
    if flags is None:  # the swing-up's physics are slow without fusions through MLIR
        flags = LIGHT_COMPILATION + ("" if "swingup" in block else PLAIN_FUSIONS)
    for script in ROOT.glob("ppo_*.py"):
        shutil.copy(script, folder)
    env = os.environ | {"XLA_FLAGS": flags}
    for script in re.findall(r"import (ppo_\w+) as ppo", block):  # videos take seconds
        block = f"import {script}\n{script}.try_video = lambda *_: None\n{block}"
    command = [sys.executable, "-c", block]
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert (result.returncode != 0) == fails, result.stdout + result.stderr
    return result.stderr if fails else result.stdout


def farama_snippet(run_dir):
    """The snippet that plays a run's policy in Farama's environment, with absolute paths."""
    block = snippet("farama_success").replace("runs/<run_name>", str(run_dir))
    return block.replace('"benchmarks"', f'"{ROOT}/benchmarks"')


def test_every_snippet_is_run():
    """The tests below run every snippet except one, which test_cartpole.py runs."""
    assert len(BLOCKS) == len(SOLVED) + len(LEARNED) + len(OTHERS) + 1


SOLVED = {  # words of the snippet: the smallest allowed greedy return
    "class Catch:": 1,
    "class ActorCritic(nn.Module)": 500,
    "losses/ratio_max": 500,
    "class Pendulum:": -200,
    "class Spread:": 11,
}
LEARNED = {  # words of the snippet: the smallest allowed success rate
    "def t_maze_level": 0.95,
    "class MemoryChain": 1.0,
}
OTHERS = """class Args(ppo.Args)|over_keys = jax.vmap|jax.sharding.Mesh|farama_success
    |init_with_statistics|warm_start""".split("|")


@pytest.mark.parametrize("words", SOLVED)
def test_snippet_solves_its_task(words, tmp_path):
    """Default flags; the return of the greedy policy over 100 episodes."""
    run(snippet(words), tmp_path)
    assert json_of(run_of(tmp_path))["eval_return_mean"] >= SOLVED[words]
    if words == "losses/ratio_max":
        values = [value for _, value in scalars(run_of(tmp_path))["losses/ratio_max"]]
        # The mean of the ratios is about 1, their maximum over thousands of samples is not.
        assert len(values) == 244 and min(values) > 1 and max(values) > 1.2


@pytest.mark.parametrize("words", LEARNED)
def test_snippet_learns_its_level(words, tmp_path):
    """The success rate of the greedy recurrent agent."""
    run(snippet(words), tmp_path)
    assert json_of(run_of(tmp_path))["eval_success_rate"] >= LEARNED[words]


def test_new_flags(tmp_path):
    """New flags are parsed, used, saved and loaded on resume."""
    run(snippet("class Args(ppo.Args)"), tmp_path, QUICK_COMPILATION)
    assert json_of(run_of(tmp_path))["args"]["hidden"] == [32, 32]
    run_dir = run_of(tmp_path)
    resume = f'ppo.main(["--resume", "{run_dir}"])\n'
    block = re.sub(r"ppo\.main\(.*\)\n", resume, snippet("class Args(ppo.Args)"))
    assert "is finished" in run(block, tmp_path, QUICK_COMPILATION, fails=True)


def test_sweep(tmp_path):
    """Twelve agents are trained; the smallest of four learning rates is the worst."""
    numbers = re.findall(r"\d+\.\d*", run(snippet("over_keys = jax.vmap"), tmp_path))
    returns = [float(number) for number in numbers]
    assert len(returns) == 4 and min(returns) == returns[0] and max(returns) > 300


def test_policy_in_faramas_environment(tmp_path):
    """An agent that was trained in the script's own Empty-5x5 solves Farama's."""
    words = "--env-id Empty-5x5 --num-envs 32 --total-timesteps 3e4"
    run(f"import ppo_minigrid_rnn as ppo\nppo.main({words.split()})", tmp_path)
    assert run(farama_snippet(run_of(tmp_path)), tmp_path) == "success 1.00\n"


def test_seeds_over_devices(tmp_path):
    """Eight seeds on four devices."""
    flags = LIGHT_COMPILATION + " --xla_force_host_platform_device_count=4"
    returns = re.findall(r"\d+\.\d*", run(snippet("jax.sharding.Mesh"), tmp_path, flags))
    assert len(returns) == 8 and min(map(float, returns)) > 100


def test_policy_with_a_mission_and_pixels_in_faramas_environment(tmp_path):
    """An untrained agent with a mission and pixel observations plays in Farama's environment."""
    words = "--env-id Fetch-5x5-N2 --img-obs --num-envs 4 --num-steps 8 --num-minibatches 1"
    words += " --total-timesteps 32 --eval-episodes 2 --rnn-hidden-dim 8 --head-hidden-dim 8"
    run(f"import ppo_minigrid_rnn as ppo\nppo.main({words.split()})", tmp_path, QUICK_COMPILATION)
    block = farama_snippet(run_of(tmp_path)).replace("episodes=100", "episodes=3")
    out = run(block, tmp_path, QUICK_COMPILATION)
    assert re.fullmatch(r"success [01]\.\d\d\n", out)


def test_observation_normalization(tmp_path):
    """The statistics equal NumPy's; they are resumed bit for bit and evaluated with the agent."""
    sizes = "--num-envs 8 --num-steps 16 --num-minibatches 2 --eval-episodes 4 --no-anneal-lr"
    spy = """
import sys, numpy as np
seen = []
def spy(args, params, opt_state, batch, *rest):
    jax.debug.callback(lambda x: seen.append(np.asarray(x)), batch.obs)
    return update_epochs_and_statistics(args, params, opt_state, batch, *rest)
ppo.update_epochs = spy
"""
    block = re.sub(r"ppo\.main\(.*\)\n", "", snippet("init_with_statistics"))
    whole = f"{sizes} --total-timesteps 1024 --runs-dir whole".split()
    half = f"{sizes} --total-timesteps 512 --runs-dir half".split()
    play = functools.partial(run, folder=tmp_path, flags=QUICK_COMPILATION)
    play(f"{block}{spy}ppo.main({whole})\nnp.save('seen', np.concatenate(seen))")
    play(f"{block}ppo.main({half})")
    (half_run,), (whole_run,) = tmp_path.glob("half/*"), tmp_path.glob("whole/*")
    resume = ["--resume", str(half_run), "--total-timesteps", "1024"]
    play(f"{block}ppo.main({resume})\nppo.main(['--eval', {str(half_run)!r}])")
    ours, expected = arrays_of(half_run), arrays_of(whole_run)
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(ours[name], array)
    seen = np.load(tmp_path / "seen.npy").astype(np.float64)
    assert len(seen) == ours["params/obs/count"] == 1024
    np.testing.assert_allclose(ours["params/obs/mean"][0], seen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours["params/obs/var"][0], seen.var(0), rtol=1e-4)
    assert json_of(half_run)["per_seed"] == json_of(half_run, "eval")["per_seed"]


def test_warm_start(tmp_path):
    """With a learning rate of 0 and fewer environments, the parameters do not change."""
    words = "--total-timesteps 8192 --eval-episodes 4".split()
    run(f"import ppo_cartpole_jax as ppo\nppo.main({words})", tmp_path, QUICK_COMPILATION)
    before = run_of(tmp_path)
    block = snippet("warm_start").replace("runs/<run_name>", str(before))
    run(block.replace('"1e5"', '"512", "--learning-rate", "0"'), tmp_path, QUICK_COMPILATION)
    (after,) = tmp_path.glob("runs/*warm_start*")
    after, before = arrays_of(after), arrays_of(before)
    assert after["stats/running_return"].shape == (1, 16) and after["update"] == 1
    for name in before:
        if name.startswith("params/"):
            np.testing.assert_array_equal(after[name], before[name])


def test_sweep_file_of_weights_and_biases():
    """The sweep's values are valid flags, in the form in which W&B writes them."""
    (line,) = re.findall(r"`parameters: \{(.*?)\}`", TEXT)
    grid = re.findall(r"([\w-]+): \{values: \[(.*?)\]\}", line)
    assert "${args_no_boolean_flags}" in TEXT and len(grid) == 2
    seen = set()
    for values in itertools.product(*(values.split(", ") for _, values in grid)):
        words = []
        for (name, _), value in zip(grid, values):
            words += {"true": [f"--{name}"], "false": []}.get(value, [f"--{name}={value}"])
        args = ppo_cartpole_jax.parse_args(words)
        seen.add((args.learning_rate, args.anneal_lr))
    assert seen == {(0.001, False), (0.001, True), (0.003, False), (0.003, True)}


def table_rows(first):
    """The cells of the table whose header begins with `first`, one list per row."""
    (table,) = re.findall(rf"^\| {first} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_table_of_defaults():
    """The columns of the scripts equal the defaults of their flags."""
    for names, *cells in table_rows(r"flag \| CleanRL, PureJaxRL.*"):
        for script, cell in zip(LEARNERS, cells[1:], strict=True):
            for name, value in zip(names.split(" x "), cell.split(" x "), strict=True):
                default = getattr(script.Args(), name.strip("`"))
                assert default == ast.literal_eval(value), (script.__name__, name)


def test_table_of_metrics():
    """The table contains every tag that training logs, and no other."""
    tags = set()
    for cell, *_ in table_rows("tag"):
        first, *others = re.findall(r"`([\w/]+)`", cell)
        group = first.split("/")[0]
        tags |= {first, *(tag if "/" in tag else f"{group}/{tag}" for tag in others)}
    logged = {"charts/SPS"}
    for script in LEARNERS:
        key = jax.random.key(0)
        _, metrics = jax.eval_shape(functools.partial(script.train, script.Args()), key)
        logged |= {tag for tag in metrics if not tag.startswith("env/")}
    assert tags == logged


def anchors(page):
    """The anchors of a page's headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [README, RECIPES], ids=lambda page: page.name)
def test_links(page):
    """Relative links and images exist, and so do the headings that links point to."""
    targets = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text())
    targets = [a or b for a, b in targets if not (a or b).startswith("http")]
    assert len(targets) > 10
    for target in targets:
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.is_file(), target
        assert not anchor or anchor in anchors(other), target


def test_length():
    """The front page has at most 250 lines."""
    assert len(README.read_text().splitlines()) <= 250
