"""Routing: which rule updates each parameter of a PyTorch model.

`route` walks the modules (`sites`), finds each parameter's role and the matrices it holds (`roles`
and `attention`) and returns a `RoutingTable`. `command` is `mesotron optim route`.
"""

from mesotron.optim.routing.route import route
from mesotron.spectral.routing import RoutingTable, Row

__all__ = ["RoutingTable", "Row", "route"]
