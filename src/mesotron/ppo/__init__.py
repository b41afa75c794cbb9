"""PPO in pure JAX (Schulman et al. 2017, arXiv 1707.06347): Snake, a transformer, Muon and Pion.

Needs the extra `ppo` (jax, optax, jumanji, orbax). The public names load on first use, so that the
command can say what is missing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesotron.ppo.evaluate import make_evaluation as make_evaluation
    from mesotron.ppo.hyper import Hyper as Hyper
    from mesotron.ppo.loop import make_train as make_train
    from mesotron.ppo.seeds import make_program as make_program

_HOME = {
    "Hyper": "mesotron.ppo.hyper",
    "make_evaluation": "mesotron.ppo.evaluate",
    "make_program": "mesotron.ppo.seeds",
    "make_train": "mesotron.ppo.loop",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'mesotron.ppo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
