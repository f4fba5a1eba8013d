"""The scripts agree with each other: one anatomy, and one text for what has one name. They are parsed, not run."""

import ast
import re
import sys
import tomllib

from conftest import ROOT

NAMES = "ppo_cartpole_jax ppo_swingup_jax ppo_minigrid_rnn ppo_atari_envpool_xla_jax".split()
# Functions and classes that have one name and several texts: which of the scripts NAMES have the same text, and why the
# others differ. "AAB-" means one text in the first two, another one in the third, none in the fourth.
DIFFERENT = {
    "Args": ("ABCD", "each script has its own environment and defaults"),
    "make_env": ("ABCD", "of that environment"),
    "init_params": ("ABCD", "sizes of the networks and parameters of the action distribution"),
    "policy": ("AB--", "logits or a Gaussian"),
    "sample_noise": ("ABCC", "uniform or Gaussian"),
    "sample_action": ("ABCC", "categorical or Gaussian, batch last or first"),
    "greedy_action": ("ABCC", "categorical or Gaussian, batch last or first"),
    "action_logprob": ("ABCC", "categorical or Gaussian, batch last or first"),
    "entropy": ("ABCD", "categorical or Gaussian, batch last or first, means or masked ones"),
    "Trajectory": ("AABC", "recurrence, steps of EnvPool that only reset"),
    "Batch": ("AABC", "samples or whole sequences, masked steps"),
    "rollout": ("AABC", "recurrence, a pool for all agents"),
    "forward": ("--AB", "recurrence, how to convolve"),
    "trajectory_values": ("AAB-", "recurrence"),
    "ppo_loss": ("AABC", "recurrence, masked steps"),
    "update_epochs": ("AABC", "minibatches of samples or of whole sequences, manual Adam or optax"),
    "TrainState": ("AABC", "recurrence, optax, a pool of emulators outside of the state"),
    "init_train_state": ("AABC", "recurrence, optax, a pool of emulators"),
    "update": ("ABCD", "scaled rewards, recurrence, a pool for all agents"),
    "flatten_state": ("AABB", "arrays that are spread over processes"),
    "shard_state": ("AABB", "one process or several"),
    "make_train_step": ("AAAB", "a pool of emulators outside of the program"),
    "make_train_chunk": ("AAAB", "a pool of emulators outside of the program"),
    "evaluate": ("ABCD", "kinds of start and success, recurrence, a pool of emulators"),
    "summarize_evaluation": ("ABCD", "success rates, modes and consecutive episodes"),
    "record_video": ("ABCD", "a GIF, three panels in an MP4, or a game played again in colour"),
    "describe": ("ABCD", "success rates, modes of evaluation"),
    "open_run": ("AABB", "the flags of its processes are not the run's"),
    "evaluate_run": ("AABC", "modes of evaluation"),
    "load_run": ("AAAB", "a pool of emulators outside of the program"),
    "train": ("AAAB", "a pool of emulators outside of the program, games that start anew"),
    "main": ("AABC", "the list of environments, several processes"),
}
BANNERS = [
    "Arguments",
    "Environment",
    "Networks",
    "Optimizer",
    "PPO",
    "Training step",
    "Evaluation, video, checkpoints, logging",
    "Main",
]
THIRD_PARTY = {"jax", "flax", "optax", "numpy", "tyro", "tensorboard", "imageio", "PIL", "envpool"}


def source(name):
    return (ROOT / f"{name}.py").read_text()


def definitions(name):
    """{name: whole lines} of the functions and classes at the top level of a script, decorators included."""
    lines, nodes = source(name).splitlines(), ast.parse(source(name)).body
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    first = lambda node: min(part.lineno for part in [node, *node.decorator_list])
    return {node.name: "\n".join(lines[first(node) - 1 : node.end_lineno]) for node in named}


def test_all_scripts_are_compared():
    assert sorted(NAMES) == sorted(path.stem for path in ROOT.glob("ppo_*.py"))


def test_same_name_same_text():
    """Functions and classes of one name are textually identical, unless listed with a reason, and just as listed."""
    scripts = [definitions(name) for name in NAMES]
    drifted = {}
    for name in {name for script in scripts for name in script}:
        texts = list(dict.fromkeys(script[name] for script in scripts if name in script))
        pattern = "".join("ABCD"[texts.index(script[name])] if name in script else "-" for script in scripts)
        if pattern != DIFFERENT.get(name, [re.sub("[BCD]", "A", pattern)])[0]:
            drifted[name] = pattern
    assert not drifted, f"make them equal, or list them with a reason: {drifted}"
    assert DIFFERENT.keys() <= {name for script in scripts for name in script}


def test_banner_sections(script):
    """The same sections in the same order, between rules of 120 columns."""
    rule = "# " + "=" * 118
    assert re.findall(rf"^{rule}\n# (.+)\n{rule}$", source(script.__name__), re.MULTILINE) == BANNERS


def test_imports(script):
    """Only the standard library and the packages allowed; PEP 723 metadata names those it needs, bounded as in
    requirements.txt."""
    tree = ast.parse(source(script.__name__))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert packages(top) <= THIRD_PARTY
    assert packages(everywhere) <= THIRD_PARTY | {"wandb"}
    block = re.search(r"^# /// script\n(.*?)^# ///$", source(script.__name__), re.MULTILINE | re.DOTALL)[1]
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    declared = {re.match(r"[\w-]+", requirement)[0]: requirement for requirement in metadata["dependencies"]}
    needed = {{"PIL": "pillow"}.get(package, package) for package in packages(everywhere) - {"wandb"}}
    assert declared.keys() == needed
    listed = re.findall(r"^[\w-].*?(?= *[#;]|$)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert set(declared.values()) <= set(listed)  # the same bounds


def packages(nodes):
    """The packages that import statements name, without the standard library."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names
