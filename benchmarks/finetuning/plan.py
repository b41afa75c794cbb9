"""Which cells the study has, and which come next: pure functions of what is finished.

A cell is a dictionary of plain values. All contenders search the same rates on the same tuning
seeds; the rate with the best mean is then run on other seeds, which are the ones reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from statistics import fmean
from typing import Any

Cell = dict[str, Any]
PARTS = ("rates", "supervised")
RANK = 16  # of LoRA in the comparisons
TUNING_SEEDS = (0,)
FINAL_SEEDS = (10, 11, 12)
RATES = tuple(1e-5 * 2**k for k in range(11))
SEARCHED = RATES[2:9]  # of the comparison; the curves show that no rule is best outside
LEASHES = (0.003, 0.01)

# name -> optimizer, LoRA rule (None trains the matrices themselves), leash
CONTENDERS: dict[str, tuple[str, str | None, float | None]] = {
    "full adamw": ("adamw", None, None),
    "full muon": ("muon", None, None),
    "full normuon": ("normuon", None, None),
    "full pion": ("pion", None, None),
    **{f"full muon, leash {x:g}": ("muon", None, x) for x in LEASHES},
    "lora adamw": ("adamw", "B", None),
    "lora muon on B": ("muon", "B", None),
    "lora product": ("muon", "product", None),
    "lora product, pion": ("pion", "product", None),
    **{f"lora product, leash {x:g}": ("muon", "product", x) for x in LEASHES},
}
CURVES = ("lora product", "lora muon on B", "lora adamw")


def make(contender: str, rank: int, rate: float, seed: int) -> Cell:
    lora = CONTENDERS[contender][1] is not None
    return {"contender": contender, "rank": rank if lora else 0, "rate": rate, "seed": seed}


def key_of(cell: Cell) -> str:
    return f"{cell['contender']}/{cell['rank']}/{cell['rate']:g}/{cell['seed']}"


def plan(given: Any, done: dict[str, Cell]) -> Iterator[Cell]:
    """The cells of the parts in the order they are named, each part's most telling ones first."""
    for part in given.parts:
        if part == "rates":
            yield from rates(given)
        else:
            yield from supervised(done)


def rates(given: Any) -> Iterator[Cell]:
    """Held-out loss against the rate, for each rank and for the whole matrices."""
    curves = [*product(CURVES, given.ranks), ("full muon", 0), ("full adamw", 0)]
    if given.only:
        curves = [(name, rank) for name, rank in curves if name in given.only]

    grid = [1e-5 * 2**k for k in range(given.first, given.last + 1)]
    for seed in TUNING_SEEDS:
        for rate in (*grid[::2], *grid[1::2]):
            for name, rank in curves:
                yield make(name, rank, rate, seed)


def supervised(done: dict[str, Cell]) -> Iterator[Cell]:
    for seed in TUNING_SEEDS:
        for rate in SEARCHED:
            for name in CONTENDERS:
                yield make(name, RANK, rate, seed)

    for seed in FINAL_SEEDS:
        for name in CONTENDERS:
            rate = best_rate(name, done)
            if rate is not None:
                yield make(name, RANK, rate, seed)


def score(cell: Cell) -> float:
    """What the search minimizes: the held-out loss."""
    if math.isfinite(cell["loss"]):
        return cell["loss"]

    return 99.0


def best_rate(name: str, done: dict[str, Cell]) -> float | None:
    """The rate with the best mean over the tuning seeds; None before the search is finished."""
    means = {}
    for rate in SEARCHED:
        cells = [done.get(key_of(make(name, RANK, rate, seed))) for seed in TUNING_SEEDS]
        found = [score(cell) for cell in cells if cell is not None]
        if len(found) == len(TUNING_SEEDS):
            means[rate] = fmean(found)

    if len(means) < len(SEARCHED):
        return None
    return min(means, key=means.__getitem__)
