"""ppo_minigrid_rnn.py without MiniGrid, after the deletions listed in its section Environment."""

import ast
import builtins
import pathlib
import re
import symtable

import pytest
from conftest import finish, load

import ppo_minigrid_rnn as script

MEMORY_TASK = '''
class RepeatFirst:
    """POPGym's RepeatFirst, shorter: each step names the suit of the first card shown."""
    num_actions, max_episode_steps = 4, 16
    def reset(self, key):
        return jnp.full(2, jax.random.randint(key, (), 0, 4))  # the first card, the current one
    def step(self, key, state, action):
        reward = jnp.where(action == state[0], 1 / 16, -1 / 16)
        return state.at[1].set(jax.random.randint(key, (), 0, 4)), reward, jnp.bool_(False)
    def observe(self, state):
        return {"suit": state[1]}
def make_env(args):
    return Trials(RepeatFirst(), args.episodes_per_trial)
def encode(args, env, obs):
    return jax.nn.one_hot(obs["suit"].T, 4, axis=0)
'''


def names(node):
    """The names that a statement defines or imports."""
    targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
    found = {n.id for target in filter(None, targets) for n in ast.walk(target) if hasattr(n, "id")}
    named = [x for x in getattr(node, "names", [node]) if hasattr(x, "name")]
    return found | {getattr(x, "asname", None) or x.name for x in named}


def global_names(table):
    """The global names that a scope and the scopes inside it use."""
    used = {x.get_name() for x in table.get_symbols() if x.is_global() and x.is_referenced()}
    return used.union(*map(global_names, table.get_children()))


@pytest.mark.quick
def test_another_environment_after_the_deletions(tmp_path):
    """Each listed name exists. The rest of the script needs none of them, and trains."""
    text = pathlib.Path(script.__file__).read_text()
    listed = re.search(r"# To use your own.*\n((?:#    .*\n)+)# Rewrite: (.*?) \(", text)
    *parts, _ = re.split(r"[,;\n] *", re.sub(r"#     \w+ +", "", listed[1]))
    tree = ast.parse(text)
    scopes = [tree, *(node for node in tree.body if names(node) & {"Args", "main"})]
    nodes, deleted = [node for scope in scopes for node in scope.body], []
    for part in [*parts, *listed[2].split(", ")]:  # a name, "FIRST to LAST" or "...`CODE`"
        code = part.split("`")[-2] if "`" in part else None
        ends = [
            [n for n in nodes if end in names(n) or (code and f"if {code}:" in ast.unparse(n)[:99])]
            for end in part.split(" to ")
        ]
        assert [len(found) for found in ends] == [1] * len(ends), part
        deleted += nodes[nodes.index(ends[0][0]) : nodes.index(ends[-1][0]) + 1]
    for scope in scopes:
        scope.body = [node for node in scope.body if node not in deleted]
    tree.body[-1:-1] = ast.parse(MEMORY_TASK).body
    rest = ast.unparse(tree)
    top = symtable.symtable(rest, "rest.py", "exec")
    kept = {x.get_name() for x in top.get_symbols() if x.is_assigned() or x.is_imported()}
    used = global_names(top)
    assert not used - kept - vars(builtins).keys()
    assert not set().union(*map(names, deleted)) & set(re.findall(r"args\.(\w+)", rest))
    assert set().union(*(names(node) for node in tree.body if isinstance(node, ast.Import))) <= used
    (tmp_path / "rest.py").write_text(rest)
    sizes = dict(num_envs=8, num_steps=8, num_minibatches=2, rnn_hidden_dim=8)
    options = dict(total_timesteps=256, eval_episodes=4, episodes_per_trial=2)
    finish(load(tmp_path / "rest.py"), tmp_path / "run", **sizes, **options)
