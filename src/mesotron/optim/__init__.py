"""PyTorch optimizers: Muon, Pion and their auxiliary rules in one object that routes itself."""

from mesotron.optim.build import BUILDERS, adamw, muon, muon_sgd, pion
from mesotron.optim.importing import import_state
from mesotron.optim.matrix import Filtered, apply_filter
from mesotron.optim.optimizer import Muon, Pion
from mesotron.optim.routed import RoutedOptimizer
from mesotron.optim.routing import route
from mesotron.optim.routing.table import RoutingTable, Row
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

__all__ = [
    "BUILDERS",
    "Filtered",
    "Muon",
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
    "pion",
    "route",
    "step_scale",
]
