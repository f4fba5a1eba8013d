"""The scripts agree with each other and with the anatomy that DESIGN.md gives them; they are parsed, not run."""

import ast
import itertools
import re
import sys
import tomllib

import pytest
from conftest import ROOT

# Functions and classes that have one name and two texts, with the reason.
DIFFERENT = {
    "Args": "each script has its own environment and defaults",
    "make_env": "of that environment",
    "init_params": "sizes of the networks and parameters of the action distribution",
    "policy": "logits or a Gaussian",
    "sample_noise": "uniform or Gaussian",
    "sample_action": "categorical or Gaussian",
    "greedy_action": "categorical or Gaussian",
    "action_logprob": "categorical or Gaussian",
    "entropy": "categorical or Gaussian",
    "Trajectory": "recurrence, steps of EnvPool that only reset",
    "Batch": "samples or whole sequences, masked steps",
    "rollout": "recurrence, a pool for all agents",
    "forward": "recurrence, how to convolve",
    "trajectory_values": "recurrence",
    "ppo_loss": "recurrence, masked steps",
    "update_epochs": "minibatches of samples or of whole sequences, manual Adam or optax",
    "TrainState": "recurrence, optax, a pool of emulators outside of the state",
    "init_train_state": "recurrence, optax, a pool of emulators",
    "update": "scaled rewards, recurrence, a pool for all agents",
    "flatten_state": "arrays that are spread over processes",
    "shard_state": "one process or several",
    "make_train_step": "a pool of emulators outside of the program",
    "make_train_chunk": "a pool of emulators outside of the program",
    "evaluate": "kinds of start and success, recurrence, a pool of emulators",
    "summarize_evaluation": "success rates, modes and consecutive episodes",
    "record_video": "a GIF, three panels in an MP4, or a game played again in colour",
    "describe": "success rates, modes of evaluation",
    "evaluate_run": "modes of evaluation",
    "load_run": "a pool of emulators outside of the program",
    "train": "a pool of emulators outside of the program, games that start anew",
    "main": "the list of environments, several processes",
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
NAMES = sorted(path.stem for path in ROOT.glob("ppo_*.py"))
PAIRS = list(itertools.combinations(NAMES, 2))


def source(name):
    return (ROOT / f"{name}.py").read_text()


def definitions(name):
    """{name: source} of the functions and classes at the top level of a script."""
    text = source(name)
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {
        node.name: "\n".join(ast.get_source_segment(text, part) for part in [*node.decorator_list, node])
        for node in nodes
    }


@pytest.mark.parametrize("first, second", PAIRS)
def test_same_name_same_text(first, second):
    """Functions and classes of one name in two scripts are textually identical, unless listed with a reason."""
    ours, theirs = definitions(first), definitions(second)
    drifted = [name for name in ours.keys() & theirs.keys() - DIFFERENT.keys() if ours[name] != theirs[name]]
    assert not drifted, f"{drifted} differ between {first} and {second}: make them equal or list them with a reason"


def test_list_of_differences_is_current():
    """Every listed name does differ somewhere."""
    texts = [definitions(name) for name in NAMES]
    for name in DIFFERENT:
        assert len({text[name] for text in texts if name in text}) > 1, name


def test_banner_sections(script):
    """The same sections in the same order, between rules of 120 columns."""
    rule = "# " + "=" * 118
    assert re.findall(rf"^{rule}\n# (.+)\n{rule}$", source(script.__name__), re.MULTILINE) == BANNERS


def test_imports(script):
    """Only the standard library and the packages that DESIGN.md allows; PEP 723 metadata names those it needs."""
    tree = ast.parse(source(script.__name__))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert packages(top) <= THIRD_PARTY
    assert packages(everywhere) <= THIRD_PARTY | {"wandb"}
    block = re.search(r"^# /// script\n(.*?)^# ///$", source(script.__name__), re.MULTILINE | re.DOTALL)[1]
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    declared = {re.match(r"[\w-]+", requirement)[0] for requirement in metadata["dependencies"]}
    needed = {{"PIL": "pillow"}.get(package, package) for package in packages(everywhere) - {"wandb"}}
    assert declared == needed


def packages(nodes):
    """The packages that import statements name, without the standard library."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names
