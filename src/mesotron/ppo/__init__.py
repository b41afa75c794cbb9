"""PPO in pure JAX (Schulman et al. 2017, arXiv 1707.06347): Snake, a transformer, Muon and Pion.

To understand it, read `loop` top to bottom; `training` is the command around it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mesotron.config import SnakeConfig
from mesotron.runs.extras import require

if TYPE_CHECKING:
    from mesotron.ppo.evaluate import make_evaluation as make_evaluation
    from mesotron.ppo.loop import make_train as make_train
    from mesotron.ppo.optimizer import Hyper as Hyper
    from mesotron.ppo.program import make_program as make_program

_MODULES = {
    "Hyper": "mesotron.ppo.optimizer",
    "make_evaluation": "mesotron.ppo.evaluate",
    "make_program": "mesotron.ppo.program",
    "make_train": "mesotron.ppo.loop",
}

__all__ = [*_MODULES, "run"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mesotron.ppo' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def run(config: SnakeConfig) -> int:
    """The command `mesotron ppo snake`: train or resume; returns the exit code."""
    require("ppo", what="mesotron ppo snake")
    if config.wandb:
        require(None, ["wandb"], "--wandb")
    if config.tensorboard:
        require("tensorboard", ["tensorboard"], "--tensorboard")
    from mesotron.ppo.training import train_snake

    return train_snake(config)
