r"""XLand-MiniGrid in the recurrent script: tasks whose rules the agent must discover.

    python benchmarks/environments/xland_minigrid.py --benchmark-id trivial-21k \
        --episodes-per-trial 4
    python benchmarks/environments/xland_minigrid.py --env-id XLand-MiniGrid-DoorKey-8x8

Requires `pip install xminigrid==0.9.3`. `--benchmark-id` is the name of a benchmark, which is
downloaded, or a file that XLand-MiniGrid's generator or xland_tasks.py wrote. "XLand-" before a
MiniGrid id selects XLand-MiniGrid's port. To use it elsewhere, copy it next to ppo_minigrid_rnn.py
and remove the line with sys.path.
"""

import dataclasses
import difflib
import functools
import pathlib
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_minigrid_rnn as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """Recurrent PPO on XLand-MiniGrid."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "XLand-MiniGrid-R1-9x9"
    benchmark_id: str | None = None
    """name of a benchmark of XLand-MiniGrid, or a file with tasks"""
    ruleset_id: int | None = None
    """number of a task of the benchmark; by default each level samples one of the first 10,000"""


class XLand:
    """An environment of XLand-MiniGrid in the form of `ppo.MiniGrid`.

    A task is a ruleset: a goal, the objects of the level, and rules that replace objects when they
    are close to each other or to the agent. The agent observes neither the rules nor the goal. In a
    trial the agent can discover both in the first episode. All episodes of a trial have the same
    positions; XLand-MiniGrid's trainer samples new ones.
    https://github.com/dunnolab/xland-minigrid

    - observation: {"image": uint8 [view, view, 2], codes of object and color; "direction"}
    - action: 0 forward, 1 right, 2 left, 3 pick up, 4 put down, 5 toggle
    - reward: 1 - 0.9 * step_count / max_episode_steps at the goal, else 0
    """

    def __init__(self, env_id, benchmark_id=None, ruleset_id=None):
        import xminigrid  # creates arrays, so only after `jax.distributed.initialize`
        from xminigrid.core import constants

        known = xminigrid.registered_environments()
        name = env_id if env_id in known else env_id.removeprefix("XLand-")
        if name not in known:
            near = difflib.get_close_matches(env_id, known, cutoff=0.3)
            raise ppo.UserError(f"--env-id {env_id}: not in xminigrid; similar names: {near}")
        self.env, self.params = xminigrid.make(name)
        self.benchmark = None
        has_rulesets = hasattr(self.params, "ruleset")
        if has_rulesets != (benchmark_id is not None):
            needs = "needs" if has_rulesets else "has no rulesets, so no"
            raise ppo.UserError(f"--env-id {env_id} {needs} --benchmark-id")
        if has_rulesets:
            self.benchmark = load_rulesets(benchmark_id, ruleset_id)
        self.num_actions = self.env.num_actions(self.params)
        self.observes_mission = False
        self.max_episode_steps = self.params.max_steps
        self.width = self.params.width
        self.code_sizes = (constants.NUM_TILES, constants.NUM_COLORS)

    def reset(self, key):
        ruleset_key, places_key = jax.random.split(key)
        params = self.params
        if self.benchmark is not None:
            ruleset = self.benchmark.sample_ruleset(ruleset_key)
            params = params.replace(ruleset=ruleset)
        start = self.env.reset(params, places_key)
        return start.replace(state=start.state.replace(key=()))  # only for xminigrid's own resets

    def step(self, key, state, action):
        after = self.env.step(self.params, state, action)  # the ruleset is in the state
        return after, after.reward, after.discount == 0

    def observe(self, state):
        return {"image": state.observation, "direction": state.state.agent.direction}

    def render(self, state):
        from xminigrid.rendering.rgb_render import render

        return render(state.state.grid, state.state.agent, self.params.view_size, 320 // self.width)


MAX_RULESETS = 10_000  # constants of compiled functions, which a million would slow down


def load_rulesets(benchmark_id, ruleset_id):
    """The task `ruleset_id` of a benchmark or file, or the first MAX_RULESETS tasks.

    Raises `UserError`. Unpickles the file, so the file must come from someone you trust.
    """
    from xminigrid import benchmarks

    known = benchmarks.registered_benchmarks()
    is_name = benchmark_id in known
    load = benchmarks.load_benchmark if is_name else benchmarks.load_benchmark_from_path
    try:
        rulesets = load(benchmark_id)
    except Exception as error:  # damaged bytes raise nearly anything
        what = f"neither one of {', '.join(known)} nor a file of rulesets"
        if is_name:
            what = "cannot be downloaded or read"
        raise ppo.UserError(f"--benchmark-id {benchmark_id}: {what} ({error})") from error
    count = rulesets.num_rulesets()
    chosen = slice(MAX_RULESETS)
    if ruleset_id is None and count > MAX_RULESETS:
        print(f"of the {count:,} rulesets of {benchmark_id} the first {MAX_RULESETS:,} are used")
    if ruleset_id is not None:
        if not 0 <= ruleset_id < count:
            raise ppo.UserError(f"--ruleset-id {ruleset_id}: {benchmark_id} has 0 to {count - 1}")
        chosen = slice(ruleset_id, ruleset_id + 1)
    return jax.tree.map(lambda x: x[chosen], rulesets)


@functools.cache
def find_xland(env_id, benchmark_id, ruleset_id):
    """The `XLand` of these flags."""
    # JAX may trace the first call; arrays that xminigrid keeps must not be tracers.
    with jax.ensure_compile_time_eval():
        return XLand(env_id, benchmark_id, ruleset_id)


def make_env(args):
    """The environment of the flags; raises `UserError`."""
    if args.img_obs:
        raise ppo.UserError("--img-obs: XLand-MiniGrid's environments have codes only")
    if args.ruleset_id is not None and args.benchmark_id is None:
        raise ppo.UserError("--ruleset-id needs --benchmark-id")
    env = find_xland(args.env_id, args.benchmark_id, args.ruleset_id)
    return ppo.Trials(env, args.episodes_per_trial) if args.episodes_per_trial > 1 else env


if __name__ == "__main__":
    ppo.Args, ppo.make_env = Args, make_env
    try:
        ppo.main()
    except ppo.UserError as problem:
        sys.exit(f"error: {problem}")
