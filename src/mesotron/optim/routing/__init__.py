"""Routing: who gets which rule, as a value.

`route(model)` walks the modules (`sites`), reads each parameter's role and the matrices it holds
(`roles`, with `attention`, `experts`, `mixers` and `lora` for their layouts) and returns a `table`.
`command` is `mesotron route`.
"""

from mesotron.optim.routing.route import route
from mesotron.optim.routing.table import RoutingTable, Row

__all__ = ["RoutingTable", "Row", "route"]
