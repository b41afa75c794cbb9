"""The cells of the VLA study, most valuable first in case time runs out.

A cell is one training and its episodes. For each head: rates on one seed at the small budget (a
best rate at the edge of its grid extends the grid), the best two at the full budget, then the
other seeds of both budgets. After the first head's finals the best contender trains longer; last
come Pion's strengths. Knows no torch: cells in, cells out.
"""

from __future__ import annotations

from typing import Any

from benchmarks._lib.rows import where

Cell = dict[str, Any]
PARTS = ("vision", "language", "fusion", "action")
CONTENDERS = {
    "adamw": dict.fromkeys(PARTS, "adamw"),
    "muon": dict.fromkeys(PARTS, "muon"),
    "muon_pion": dict.fromkeys(PARTS, "muon") | {"action": "pion"},
    "pion": dict.fromkeys(PARTS, "pion"),
    "muon_low_rank": dict.fromkeys(PARTS, "muon") | {"action": "low_rank"},
}
# An exact SVD of every action matrix at every step is many times slower: it takes Muon's best rate.
SLOW = "muon_low_rank"
# Where the losses of a first study after 400 steps had their middle (benchmarks/LOG.md).
RATES = {
    "adamw": (2.5e-4, 5e-4, 1e-3),
    "muon": (2.5e-3, 5e-3, 1e-2),
    "muon_pion": (2.5e-3, 5e-3, 1e-2),
    "pion": (2.5e-3, 5e-3, 1e-2),
}
MOST_RATES = 6
# Success below this is mostly luck (chance is 0.02 to 0.05): the training loss then chooses.
TRUSTED = 0.2
# A best contender that is as good as this needs no longer training.
ENOUGH = 0.97
STRENGTHS = ("k_p=0", "k_p=1", "k_p=2", "k_p=3", "k_p=4", "noise")


def key_of(cell: Cell) -> str:
    """A cell's name; a finished cell has the name that it was planned under."""
    names = ("head", "contender", "rate", "strength", "steps", "seed")
    words = [str(cell[name]) for name in names]
    scale = cell.get("action_scale", 1)
    if scale != 1:
        words.append(f"x{scale}")
    return "/".join(words)


def make_cell(head: str, contender: str, rate: float, steps: int, seed: int = 0) -> Cell:
    """A cell with the default strength, the noise edge."""
    return {
        "head": head,
        "contender": contender,
        "rate": rate,
        "strength": "noise",
        "steps": steps,
        "seed": seed,
        "action_scale": 1,
    }


def plan(given: Any, done: dict[str, Cell]) -> list[Cell]:
    """All cells that are known by now, in order.

    Args:
        given: with heads, contenders, small, full, long and seeds.
        done: finished cells by name; what comes later depends on them.
    """
    cells: list[Cell] = []
    for place, head in enumerate(given.heads):
        quick = [name for name in given.contenders if name != SLOW]
        for name in quick:
            rates = grid(given, done, head, name)
            cells += [make_cell(head, name, rate, given.small) for rate in rates]

        for name in quick:
            cells += finals(given, done, head, name)

        if place == 0:
            cells += longer(given, done, head) + low_rank(given, done, head)

    return cells + strengths(given, done, given.heads[0])


def grid(given: Any, done: dict[str, Cell], head: str, name: str) -> list[float]:
    """The rates of a contender so far: once all are done, an edge that is best is extended."""
    rates = sorted(given.rates or RATES[name])
    while len(rates) < MOST_RATES:
        best = best_rate(done, head, name, given.small, rates)
        if best == rates[0]:
            rates.insert(0, rates[0] / 2)
        elif best == rates[-1]:
            rates.append(rates[-1] * 2)
        else:
            break

    return rates


def of(done: dict[str, Cell], head: str, name: str, steps: int, seed: int = 0) -> dict[float, Cell]:
    """Finished cells with the default strength, by rate."""
    cells = where(done.values(), head=head, contender=name, steps=steps, seed=seed)
    return {cell["rate"]: cell for cell in where(cells, strength="noise", action_scale=1)}


def best_rate(
    done: dict[str, Cell], head: str, name: str, steps: int, rates: list[float]
) -> float | None:
    """The rate that validation scenes like best if one of them has a success that can be trusted,
    else the one with the smallest loss; None while some are missing."""
    found = of(done, head, name, steps)
    if any(rate not in found for rate in rates):
        return None

    cells = [found[rate] for rate in rates]
    return max(cells, key=preference(cells))["rate"]


def preference(cells: list[Cell]) -> Any:
    """By what cells are compared: success on validation scenes and then the loss, or the loss."""
    if max(cell["validation"] for cell in cells) >= TRUSTED:
        return lambda cell: (cell["validation"], -cell["loss"])
    return lambda cell: -cell["loss"]


def small_rate(given: Any, done: dict[str, Cell], head: str, name: str) -> float | None:
    """The best rate at the small budget, once its grid is done."""
    return best_rate(done, head, name, given.small, grid(given, done, head, name))


def full_rate(given: Any, done: dict[str, Cell], head: str, name: str) -> float | None:
    """What the full budget chose of the small budget's best rate and half of it: a longer training
    often likes a smaller one."""
    best = small_rate(given, done, head, name)
    if best is None:
        return None
    return best_rate(done, head, name, given.full, [best, best / 2])


def finals(given: Any, done: dict[str, Cell], head: str, name: str) -> list[Cell]:
    """A contender's two rates at the full budget, and the other seeds of both budgets."""
    best = small_rate(given, done, head, name)
    if best is None:
        return []

    cells = [make_cell(head, name, rate, given.full) for rate in (best, best / 2)]
    chosen = full_rate(given, done, head, name)
    for seed in range(1, given.seeds):
        cells.append(make_cell(head, name, best, given.small, seed))
        if chosen is not None:
            cells.append(make_cell(head, name, chosen, given.full, seed))
    return cells


def longer(given: Any, done: dict[str, Cell], head: str) -> list[Cell]:
    """The best contender trained longer, unless the full budget was enough for it."""
    quick = [name for name in given.contenders if name != SLOW]
    found = []
    for name in quick:
        chosen = full_rate(given, done, head, name)
        if chosen is not None:
            found.append(of(done, head, name, given.full)[chosen])

    if not given.long or len(found) < len(quick):
        return []

    best = max(found, key=preference(found))
    if best["validation"] >= ENOUGH:
        return []

    name = best["contender"]
    return [make_cell(head, name, best["rate"], given.long, seed) for seed in range(given.seeds)]


def low_rank(given: Any, done: dict[str, Cell], head: str) -> list[Cell]:
    """Low-rank Muon on the action module at Muon's best rate, small budget, all seeds."""
    if SLOW not in given.contenders or "muon" not in given.contenders:
        return []

    best = small_rate(given, done, head, "muon")
    if best is None:
        return []

    return [make_cell(head, SLOW, best, given.small, seed) for seed in range(given.seeds)]


def strengths(given: Any, done: dict[str, Cell], head: str) -> list[Cell]:
    """Pion's strengths on the action module at one rate, and each again with the factor that makes
    its action step as large as Muon's, beside the step of vision."""
    if "muon_pion" not in given.contenders:
        return []

    rate = small_rate(given, done, head, "muon_pion")
    if rate is None:
        return []

    plain = [make_cell(head, "muon_pion", rate, given.full) | {"strength": s} for s in STRENGTHS]
    muon = of(done, head, "muon", given.full)

    if "muon" in given.contenders:
        best = full_rate(given, done, head, "muon")
    else:
        best = None

    if best is None:
        return plain

    matched = []
    for cell in plain:
        finished = done.get(key_of(cell))
        if finished is not None:
            scale = match(finished, muon[best])
            matched.append(cell | {"action_scale": scale})

    return plain + matched


def match(cell: Cell, muon: Cell) -> float:
    """The factor on the action module's rate at which its step is to vision's as under Muon; at
    most 16, for a step that is nothing cannot be matched."""
    own, wanted = (one["half"]["action_to_vision"] for one in (cell, muon))
    return round(min(max(wanted / max(own, 1e-9), 0.25), 16.0), 2)
