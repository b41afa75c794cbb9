"""Mesotron: Muon and Pion optimizers for PyTorch and JAX, RL training, and a watch over the runs.

Public names load on first use: `import mesotron` imports neither torch nor jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesotron import jax, optim, spectral
    from mesotron.optim import (
        AdamW,
        Muon,
        MuonSGD,
        NorMuon,
        Pion,
        RoutingTable,
        adamw,
        import_state,
        muon,
        muon_sgd,
        normuon,
        pion,
        route,
    )
    from mesotron.rlvr.trl_trainer import GRPOTrainer
    from mesotron.watch.callback import Watch

__version__ = "0.2.0"
__all__ = [
    "AdamW",
    "GRPOTrainer",
    "Muon",
    "MuonSGD",
    "NorMuon",
    "Pion",
    "RoutingTable",
    "Watch",
    "__version__",
    "adamw",
    "import_state",
    "jax",
    "muon",
    "muon_sgd",
    "normuon",
    "optim",
    "pion",
    "route",
    "spectral",
]

_MODULES = {"GRPOTrainer": "mesotron.rlvr.trl_trainer", "Watch": "mesotron.watch.callback"}


def __getattr__(name: str) -> Any:
    if name not in __all__ and not _is_rule(name):
        raise AttributeError(f"module 'mesotron' has no attribute {name!r}")

    if name not in __all__:  # a rule without a function of its own
        value: Any = import_module("mesotron.optim").BUILDERS[name]
    elif name in ("jax", "optim", "spectral"):
        value = import_module(f"mesotron.{name}")
    else:
        value = getattr(import_module(_MODULES.get(name, "mesotron.optim")), name)

    globals()[name] = value
    return value


def _is_rule(name: str) -> bool:
    from mesotron.config.rules import SPECTRAL_RULES

    return name in SPECTRAL_RULES


def __dir__() -> list[str]:
    return sorted(__all__)
