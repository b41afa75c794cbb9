"""PyTorch optimizers: Muon, Pion and their auxiliary rules in one object that routes itself."""

from mesotron.optim.matrix import Filtered, apply_filter
from mesotron.optim.optimizers import (
    BUILDERS,
    AdamW,
    Muon,
    MuonSGD,
    NorMuon,
    Pion,
    RoutedOptimizer,
    adamw,
    muon,
    muon_sgd,
    normuon,
    pion,
)
from mesotron.optim.routing import RoutingTable, Row, route
from mesotron.optim.state_import import import_state
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

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
    "import_state",
    "muon",
    "muon_sgd",
    "normuon",
    "pion",
    "route",
    "step_scale",
]
