"""The scripts agree with each other: other tests run what is one text in several in one."""

import ast
import io
import math
import re
import sys
import tokenize
import tomllib

import pytest
from conftest import QUICK, ROOT, having

pytestmark = pytest.mark.quick

# Functions and classes that have one name and several texts: which of the four scripts of QUICK
# have the same text, and why the others differ. "AAB-" means one text in the first two, another one
# in the third, none in the fourth.
DIFFERENT = {
    "Args": ("ABCD", "each script has its own environment and defaults"),
    "make_env": ("ABCD", "of that environment"),
    "init_agent": ("ABCD", "networks and action distributions"),
    "forward": ("ABCD", "networks and action distributions, recurrence"),
    "Transition": ("AABC", "recurrence, steps of EnvPool that only reset"),
    "Batch": ("AABC", "samples or whole sequences, masked steps"),
    "rollout": ("AABC", "recurrence, a pool of environments for all agents"),
    "trajectory_values": ("AABC", "recurrence, successors that EnvPool hands out"),
    "optimizer_update": ("--AB", "few parameters, as one vector, or many"),
    "ppo_loss": ("ABCD", "metrics of a Gaussian, recurrence, masked steps"),
    "update_epochs": ("AABC", "manual Adam or optax, sequences, masked steps"),
    "TrainState": ("ABCD", "the environment's state, recurrence, optax"),
    "init_train_state": ("AABC", "recurrence, optax, games that begin later"),
    "update": ("ABCD", "scaled rewards, recurrence, a pool for all agents"),
    "Evaluation": ("ABCD", "kinds of start, trials, emulators on the host"),
    "evaluate": ("ABCD", "kinds of start, recurrence, emulators on the host"),
    "record_video": ("ABCD", "a GIF, three panels in an MP4, or a game played again in colour"),
    "save_checkpoint": ("AABA", "one process or several"),
    "check_args": ("ABCD", "each script has flags of its own"),
    "stop_signals": ("AAAB", "workers of Gymnasium's vector environments inherit the handler"),
    "evaluation_scores": ("ABCD", "success rates, games that report nothing else"),
    "evaluation_summary": ("AAAB", "protocols of evaluation"),
    "try_video": ("AABA", "only the first of several processes writes"),
    "evaluate_run": ("AAAB", "emulators on the host"),
    "start_run": ("AABC", "several devices and processes, a pool of emulators"),
    "run_updates": ("AABC", "several processes, exceptions of environments on the host"),
    "finish_run": ("AABA", "several processes"),
    "main": ("AABC", "several processes, a pool of emulators"),
}
# Names in backticks that a script need not have itself.
ELSEWHERE = {
    "init_mlp": "of CartPole and the swing-up, where the others use flax",
    "adam_update": "of CartPole and the swing-up, where the others use optax",
    "starts_per_update": "of environments whose reset takes long",
    "connect_all": "of Farama's MiniGrid",
    "RGBImgPartialObsWrapper": "of Farama's MiniGrid",
}
BANNERS = ["Args", "Environment", "Agent", "Optimizer", "PPO", "Training", "Evaluation", "Running"]
THIRD_PARTY = {"jax", "flax", "optax", "numpy", "tyro", "tensorboard", "imageio", "PIL", "envpool"}


def source(name):
    """The text of a script."""
    return (ROOT / f"{name}.py").read_text()


def definitions(name):
    """{name: whole lines} of the functions and classes at the top level, decorators included."""
    lines, nodes = source(name).splitlines(), ast.parse(source(name)).body
    texts = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(part.lineno for part in [node, *node.decorator_list])
            texts[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return texts


def letters(texts):
    """Which of several texts are the same: "AB-A" for a first, a second, none, the first again."""
    different = [text for text in dict.fromkeys(texts) if text is not None]
    return "".join("-" if text is None else "ABCD"[different.index(text)] for text in texts)


def test_all_scripts_are_compared():
    """Each script has its row in QUICK."""
    assert sorted(QUICK) == sorted(path.stem for path in ROOT.glob("ppo_*.py"))


def test_same_name_same_text():
    """Functions and classes of one name are textually identical, or listed with a reason."""
    scripts = [definitions(name) for name in QUICK]
    drifted = {}
    for name in DIFFERENT.keys() | {name for script in scripts for name in script}:
        pattern = letters([script.get(name) for script in scripts])
        expected = pattern.replace("B", "A").replace("C", "A").replace("D", "A")
        if name in DIFFERENT:
            expected = DIFFERENT[name][0]
        if pattern != expected:
            drifted[name] = pattern
    assert not drifted, f"make them equal, or list them with a reason: {drifted}"


def test_same_last_lines():
    """What a command runs, after all definitions."""
    ends = {source(name).partition('\nif __name__ == "__main__":\n')[2] for name in QUICK}
    assert len(ends) == 1 and "        main(" in ends.pop()


def test_banner_sections(script):
    """The same sections in the same order, between rules of 100 columns."""
    rule = "# " + "=" * 98
    found = re.findall(rf"^{rule}\n# (.+)\n{rule}$", source(script.__name__), re.MULTILINE)
    more = ["Catalogue"] if hasattr(script, "ENVIRONMENTS") else []
    assert [banner.partition(":")[0] for banner in found] == BANNERS + more


@having("train")  # Atari's pool of emulators plays for all agents
def test_reinforcement_learning_needs_no_services(script):
    """Nothing above "Running" refers to what is below it, but for its exception."""
    tree = ast.parse(source(script.__name__))
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    text = source(script.__name__)
    border = text[: text.index("\n# Running")].count("\n")
    below = {node.name for node in named if node.lineno > border}
    above = [node for node in named if node.lineno <= border]
    catalogue = text.find("\n# Catalogue")  # MiniGrid's levels stand behind all else
    last = text[:catalogue].count("\n") if catalogue > 0 else math.inf
    in_catalogue = {node.name for node in named if node.lineno > last}
    assert "train" in {node.name for node in above} and "main" in below
    for node in above:
        names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
        own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        used = {name.id for name in names} - own
        assert not used & below - {"UserError"} - in_catalogue, node.name


def test_public_docstrings(script):
    """Every function and class at the top level says what it is."""
    tree = ast.parse(source(script.__name__))
    named = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert not [node.name for node in named if not ast.get_docstring(node)]


def test_names_in_texts_exist(script):
    """What docstrings and comments name in backticks is in the same script, or listed."""
    names, texts = set(), []
    for token in tokenize.generate_tokens(io.StringIO(source(script.__name__)).readline):
        if token.type == tokenize.NAME:
            names.add(token.string)
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            texts.append(token.string)
    named = set(re.findall(r"`([A-Za-z_]\w*)(?:\([^`]*\))?`", "\n".join(texts)))
    assert len(named) > 30 and not named - names - ELSEWHERE.keys()


def test_imports(script):
    """The packages allowed; the PEP 723 metadata has those it needs as in requirements.txt."""
    tree = ast.parse(source(script.__name__))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert packages(top) <= THIRD_PARTY
    optional = {"wandb"}  # imported where a flag asks for it
    assert packages(everywhere) <= THIRD_PARTY | optional
    block = r"^# /// script\n(.*?)^# ///$"
    block = re.search(block, source(script.__name__), re.MULTILINE | re.DOTALL)[1]
    metadata = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    declared = {re.match(r"[\w-]+", line)[0]: line for line in metadata["dependencies"]}
    needed = packages(everywhere) - optional
    assert declared.keys() == {{"PIL": "pillow"}.get(package, package) for package in needed}
    requirements = (ROOT / "requirements.txt").read_text()
    listed = re.findall(r"^[\w-].*?(?= *[#;]|$)", requirements, re.MULTILINE)
    assert set(declared.values()) <= set(listed)  # the same bounds


def packages(nodes):
    """The packages that import statements name, without the standard library."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    relative = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {"." * node.level + (node.module or "") for node in relative}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names
