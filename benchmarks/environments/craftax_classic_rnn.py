"""Craftax Classic in the recurrent script: besides the environment it only needs `encode`.

    python benchmarks/environments/craftax_classic_rnn.py --seed 2
    python benchmarks/environments/craftax_classic_rnn.py --eval runs/<run_name>

Requires `pip install craftax==1.6.1`. The return is the number of achievements, of 22, plus a tenth
of the change of health. To use it elsewhere, copy it, craftax_classic.py and the two scripts into
one folder and remove the lines with sys.path.
"""

import dataclasses
import math
import pathlib
import sys
from typing import Literal

import flax.linen as nn
from craftax_classic import craftax
from craftax_classic import ppo as cartpole

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
import ppo_minigrid_rnn as ppo  # noqa: E402


@dataclasses.dataclass
class Args(ppo.Args):
    """Recurrent PPO on Craftax Classic."""

    exp_name: str = pathlib.Path(__file__).stem
    env_id: str = "Craftax-Classic-Symbolic-v1"
    eval_mode: Literal["greedy", "sampled"] = "sampled"  # greedy actions get stuck
    rnn_hidden_dim: int = 128
    head_hidden_dim: int = 128
    total_timesteps: float = 1e6
    learning_rate: float = 5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.8
    num_minibatches: int = 8
    update_epochs: int = 4
    norm_adv: bool = True
    ent_coef: float = 0.01


def encode(args, env, obs):
    """Features [F, M, T] of observations [T, M, 1345]."""
    return nn.relu(ppo.Dense(256, math.sqrt(2), name="encoder")(obs.transpose(2, 1, 0)))


if __name__ == "__main__":
    ppo.Args, ppo.encode, ppo.make_env = Args, encode, lambda args: craftax(args.env_id)
    try:
        ppo.main()
    except (ppo.UserError, cartpole.UserError) as problem:
        sys.exit(f"error: {problem}")
