"""PPO on Snake with the flags and defaults that Snake trainers in JAX are known by.

    python examples/train_snake_purejaxrl.py --optim muon --muon-lr 0.03 --aux-adam-lr 0.0003 \
        --d-model 128 --num-layers 4 --num-heads 8 --total-timesteps 20000000

The same training as `mesotron ppo snake`, with defaults for a GPU. Flags may be written with
hyphens or underscores, and switches turned off: --no-anneal-lr, --anneal_lr=False.
"""

import sys
from dataclasses import dataclass

from mesotron.cli import parse
from mesotron.config import SnakeConfig
from mesotron.ppo import run


@dataclass(frozen=True, kw_only=True)
class Arguments(SnakeConfig):
    """Train a transformer to play Snake with PPO, wholly inside jax.jit."""

    width: int = 10
    """Columns of the board."""

    height: int = 10
    """Rows of the board."""

    num_envs: int = 2048
    """Games played side by side."""

    num_steps: int = 128
    """Steps of each game in one rollout."""

    num_minibatches: int = 32
    """Gradient steps in one pass."""

    total_timesteps: int = 5_000_000
    """Environment steps of a run; rounded up to whole updates."""

    lr: float = 1e-3
    """Adam's learning rate where Adam trains everything."""

    aux_adam_lr: float = 1e-3
    """Adam's learning rate for all that Muon or Pion leave: embeddings, norms, biases, heads."""

    d_model: int = 64
    """Width of a token."""

    num_layers: int = 2
    """Transformer layers."""

    num_heads: int = 4
    """Attention heads."""


if __name__ == "__main__":
    try:
        run(parse(Arguments, sys.argv[1:], prog="train_snake_purejaxrl.py"))
    except ValueError as error:
        sys.exit(str(error))
