"""What README's changes of CartPole's algorithm and network cost, in turn with the plain script.

    python benchmarks/changes.py --out benchmarks/results/changes_cpu.json

Runs the snippets of README's "Change it" as they stand, up to the call of `main`, each with a copy
of the script of its own, then trains with all of them in turn. Reported are medians of steps per
second and of the ratio to the script as it is. Words like num_envs=16 set fields of its arguments.
"""

import argparse
import datetime
import json
import pathlib
import re
import statistics
import sys

import jax
from sps import PACKAGES, ROOT, parse_fields, version
from versions import Trainer, load

SCRIPT = "ppo_cartpole_jax"
CHANGES = {  # what is changed: words that only its snippet has
    "KL penalty instead of clipping": "losses/ratio_max",
    "symlog targets": "def symlog",
    "shared trunk, 128 relu units": '"trunk":',
    "flax module": "class ActorCritic(nn.Module)",
}


def snippet(words):
    """The only Python snippet of the README with these words."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if words in block]
    return block


def changed(words):
    """A copy of the script after a snippet has replaced what it replaces."""
    script = load(ROOT / f"{SCRIPT}.py", SCRIPT)  # the module that the snippet imports
    script.main = lambda argv: None
    exec(compile(snippet(words), words, "exec"), {})
    del sys.modules[SCRIPT]
    return script


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a measurement, about")
    parser.add_argument("--only", default="", help="changes whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("fields", nargs="*", help="fields of the script's Args, name=value")
    choice = parser.parse_intermixed_args()
    jax.config.update("jax_enable_compilation_cache", False)
    scripts = {"the script as it is": load(ROOT / f"{SCRIPT}.py", "plain")}
    chosen = {what: words for what, words in CHANGES.items() if choice.only in what}
    scripts |= {what: changed(words) for what, words in chosen.items()}
    fields = parse_fields(choice.fields)
    trainers = {what: Trainer(script, fields) for what, script in scripts.items()}
    seconds = {what: max(trainer.seconds(1), 1e-3) for what, trainer in trainers.items()}
    chunks = max(1, round(choice.seconds / min(seconds.values())))
    rounds = []
    for _ in range(choice.rounds):
        rounds.append({what: trainer.sps(chunks) for what, trainer in trainers.items()})

    plain = next(iter(scripts))
    rows = []
    for what, trainer in trainers.items():
        row = {
            "name": what,
            "sps": statistics.median(measured[what] for measured in rounds),
            "ratio": statistics.median(measured[what] / measured[plain] for measured in rounds),
            "compile_seconds": trainer.compile_seconds,
        }
        rows.append(row)
        print(f"{what:32s} {row['sps']:10,.0f} SPS, {row['ratio']:.3f} of {plain}", flush=True)
    if choice.out:
        result = {
            "command": "python " + " ".join(["benchmarks/changes.py", *sys.argv[1:]]),
            "date": f"{datetime.date.today()}",
            "device": jax.devices()[0].device_kind,
            "versions": {package: version(package) for package in PACKAGES if version(package)},
            "rows": rows,
            "rounds": rounds,
        }
        choice.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
