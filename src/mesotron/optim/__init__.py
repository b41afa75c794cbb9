"""PyTorch optimizers: Muon, Pion and their relatives in one object that routes itself.

Where to start reading:

    build.py       a model -> its routing table -> param groups -> an optimizer
    optimizer.py   one step of all groups
    step.py        the step of matrices: momentum, filter, scale, apply

A new rule is one file: `rules/NAME.py` for matrices (see `rules/normuon.py`), `auxiliary/NAME.py`
for everything else. `matrix.py` applies a filter, `views.py` says which matrices a parameter holds.
"""

from collections.abc import Callable

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim.auxiliary.adamw import AdamW, adamw
from mesotron.optim.auxiliary.sgd import MuonSGD, muon_sgd
from mesotron.optim.build import builder
from mesotron.optim.matrix import Filtered, apply_filter
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.routing import RoutingTable, Row, route
from mesotron.optim.rules.muon import Muon, muon
from mesotron.optim.rules.normuon import NorMuon, normuon
from mesotron.optim.rules.pion import Pion, pion
from mesotron.optim.state_import import import_state
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

BUILDERS = {
    **{name: builder(SPECTRAL_RULES[name].optimizer) for name in SPECTRAL_RULES},
    "muon_sgd": muon_sgd,
    "adamw": adamw,
}
"""For each name of `mesotron.config.rules.optimizer_names` what builds it for a model."""


def find_builder(name: str) -> Callable[..., RoutedOptimizer]:
    """What builds the optimizer of a name for a model, also where a user's file registered it."""
    if name in BUILDERS:
        return BUILDERS[name]

    return builder(SPECTRAL_RULES[name].optimizer)


__all__ = [
    "BUILDERS",
    "AdamW",
    "Filtered",
    "Muon",
    "MuonSGD",
    "NorMuon",
    "Pion",
    "RoutedOptimizer",
    "RoutingTable",
    "Row",
    "View",
    "adamw",
    "apply_filter",
    "find_builder",
    "import_state",
    "muon",
    "muon_sgd",
    "normuon",
    "pion",
    "route",
    "step_scale",
]
