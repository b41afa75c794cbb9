"""Mesotron: spectral optimizers (Muon, Pion) for PyTorch and JAX that route themselves.

The public names load on first use: `import mesotron` imports neither torch nor jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesotron import jax as jax
    from mesotron import optim as optim
    from mesotron import spectral as spectral
    from mesotron.optim import Muon as Muon
    from mesotron.optim import Pion as Pion
    from mesotron.optim import RoutingTable as RoutingTable
    from mesotron.optim import adamw as adamw
    from mesotron.optim import import_state as import_state
    from mesotron.optim import muon as muon
    from mesotron.optim import muon_sgd as muon_sgd
    from mesotron.optim import pion as pion
    from mesotron.optim import route as route
    from mesotron.rlvr.trainer import GRPOTrainer as GRPOTrainer

__version__ = "0.1.0"

# Public name -> the module that defines it. A room (a sub-package) maps to itself.
_HOME = {
    "GRPOTrainer": "mesotron.rlvr.trainer",
    "Muon": "mesotron.optim",
    "Pion": "mesotron.optim",
    "RoutingTable": "mesotron.optim",
    "Watch": "mesotron.watch.callback",
    "adamw": "mesotron.optim",
    "import_state": "mesotron.optim",
    "jax": "mesotron.jax",
    "muon": "mesotron.optim",
    "muon_sgd": "mesotron.optim",
    "optim": "mesotron.optim",
    "pion": "mesotron.optim",
    "route": "mesotron.optim",
    "spectral": "mesotron.spectral",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, and remember it."""
    if name not in _HOME:
        raise AttributeError(f"module 'mesotron' has no attribute {name!r}")
    home = import_module(_HOME[name])
    value = home if home.__name__ == f"mesotron.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
