"""What an hour of a rented GPU costs, as data; the standard library only.

About what on-demand providers ask without a contract; none is a quotation. They move: give --price
for your own.
"""

from typing import Literal

GpuName = Literal["b200", "h200", "h100", "a100", "l40s", "a10", "l4", "t4"]

PRICES_AS_OF = "November 2025"
# Dollars for an hour of one GPU; an a100 has 80 GB.
PRICES: dict[GpuName, float] = {
    "b200": 6.25,
    "h200": 4.54,
    "h100": 3.95,
    "a100": 2.50,
    "l40s": 1.95,
    "a10": 1.10,
    "l4": 0.80,
    "t4": 0.59,
}
