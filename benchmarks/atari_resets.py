"""How often EnvPool merges two Atari games: one that ends within the no-ops after a lost life.

    python benchmarks/atari_resets.py  # all games, random actions, plain interface
    python benchmarks/atari_resets.py Breakout-v5 Pong-v5 --steps 10000

With `episodic_life` EnvPool plays up to 30 no-ops, or 29 and a FIRE, after every lost life. If the
game ends in them, it starts the next one and tells nobody: no step is `terminated`, and the step
counter of the time limit goes on. The script notices it, because a step that resets then has more
lives than the one before. Here the frames are counted too: the first observation of a game is one
frame four times (but so is any of a picture that stands still, as at times in Mr. Do!). The result
is benchmarks/results/atari_resets.json: of every game the numbers of games, of lost lives after
which a game went on, and of merged games by either sign.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib

import envpool
import numpy as np
from envpool.atari.registration import atari_game_list

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "atari_resets.json"
GAMES = ["".join(word.capitalize() for word in game.split("_")) + "-v5" for game in atari_game_list]


def count(game, num_envs, steps, noop_max):
    """Numbers of what happened in this many steps of `num_envs` environments."""
    envs = envpool.make(
        game,
        env_type="gymnasium",
        num_envs=num_envs,
        seed=1,
        episodic_life=True,
        noop_max=noop_max,
        use_fire_reset=True,
    )
    rng, num_actions = np.random.default_rng(1), int(envs.action_space.n)
    _, info = envs.reset()
    life_lost = np.zeros(num_envs, bool)  # by the step before: this one only resets
    counts = dict(games=0, lives_lost=0, merged_by_lives=0, merged_by_frames=0)
    for _ in range(steps):
        lives = info["lives"]
        obs, _, terminated, truncated, info = envs.step(rng.integers(num_actions, size=num_envs))
        begins = (obs == obs[:, :1]).all((1, 2, 3))
        counts["merged_by_lives"] += int((life_lost & (info["lives"] > lives)).sum())
        counts["merged_by_frames"] += int((life_lost & begins).sum())
        over = (info["terminated"] > 0) | truncated
        life_lost = terminated & ~over
        counts["games"] += int(((terminated | truncated) & over).sum())
        counts["lives_lost"] += int(life_lost.sum())
    return counts


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("games", nargs="*", default=GAMES, help="if none, all of EnvPool's")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2500, help="of each environment")
    parser.add_argument("--noop-max", type=int, default=30, help="more merge more games")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    choice = parser.parse_args()
    rows = json.loads(choice.out.read_text())["rows"] if choice.out.exists() else {}
    for game in choice.games:
        rows[game] = row = {"steps": choice.envs * choice.steps, "noop_max": choice.noop_max}
        row |= count(game, choice.envs, choice.steps, choice.noop_max)
        print(f"{game:24s} " + ", ".join(f"{key} {value}" for key, value in row.items()))
        lines = [f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
        header = {
            "command": "python benchmarks/atari_resets.py",
            "date": datetime.date.today().isoformat(),
            "envpool": importlib.metadata.version("envpool"),
        }
        body = json.dumps(header, indent=2)[:-2]
        choice.out.write_text(body + ',\n  "rows": {\n' + ",\n".join(lines) + "\n  }\n}\n")


if __name__ == "__main__":
    main()
