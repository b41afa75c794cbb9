"""Who won: the ranking, how far behind the others are, and when each got half way.

From the finished cells alone. Search cells choose rates and are not counted here.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median

import numpy as np

from mesotron.compare.grid import Search
from mesotron.compare.inference import bootstrap, holm, paired_test, pool_seeds
from mesotron.compare.kind import Kind, Row
from mesotron.compare.record import Cell, Standing, Tournament, anybody_scored

# Steps whose mean is a point of the smoothed training curve.
WINDOW = 5


def rank(record: Tournament, searches: Mapping[str, Search], rates: Mapping[str, float]) -> None:
    """Fill in `record.standings`, best first; contenders without a score come last.

    Where every score is 0 all share the first place, and nobody is compared.

    Args:
        record: with its cells.
        searches: of each contender, finished ones.
        rates: the rate that each search has chosen.
    """
    rows = [line(record, name, searches[name], rates[name]) for name in rates]
    rows.sort(key=lambda row: (row.score is None, -(row.score or 0.0)))
    scored = anybody_scored(rows)
    for place, row in enumerate(rows, 1):
        row.rank = place if scored else 1
    if scored:
        compare_with_best(record, rows)
    record.standings = rows


def line(record: Tournament, name: str, search: Search, rate: float) -> Standing:
    """One contender's line, without its place and its comparison with the best."""
    cells = final_cells(record, name, rate)
    scored = [cell for cell in cells if cell.per_problem is not None]
    interval = bootstrap(scores(scored)) if scored else None
    reached = [cell.threshold_seconds for cell in scored if cell.threshold_seconds is not None]
    return Standing(
        rank=0,
        contender=name,
        rate=rate,
        gain=cells[0].gain if cells else 1.0,
        seeds=[cell.seed for cell in scored],
        score=interval.value if interval else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        by_seed=[fmean(cell.per_problem or ()) for cell in scored],
        behind=None,
        behind_low=None,
        behind_high=None,
        p=None,
        p_holm=None,
        seconds=mean([cell.seconds for cell in scored]),
        tokens=mean([cell.tokens for cell in scored]),
        threshold_seconds=median(reached) if 2 * len(reached) > len(scored) else None,
        trials=sum(cell.contender == name and cell.stage == "search" for cell in record.cells),
        extended=search.extended * record.plan["search_seeds"],
        edge=search.edge,
        dead=sum(cell.verdict in ("dead", "diverged") for cell in scored),
        failed=sum(cell.state == "failed" for cell in cells),
    )


def compare_with_best(record: Tournament, rows: Sequence[Standing]) -> None:
    """The paired test of every other contender against the first, corrected for all pairs, from
    which the noise of seeds is taken too: the first was chosen by the same scores, and any pair
    might have been the one with the largest lead.
    """
    pairs = [
        (first, second, D)
        for first, second in combinations(rows, 2)
        if (D := difference(record, first, second)) is not None
    ]
    if not pairs:
        return
    pooled = pool_seeds([D for *_, D in pairs])
    tests = [paired_test(D, pooled) for *_, D in pairs]
    corrected = holm([found.p for found in tests])
    for (first, row, _), found, p in zip(pairs, tests, corrected, strict=True):
        if first is rows[0]:
            row.behind, row.behind_low, row.behind_high = found.value, found.low, found.high
            row.p, row.p_holm = found.p, p


def difference(record: Tournament, first: Standing, second: Standing) -> np.ndarray | None:
    """The first's lead over the second, [S, P], over the seeds that both have a score of."""
    pairs = [
        {
            cell.seed: cell
            for cell in final_cells(record, row.contender, row.rate)
            if cell.per_problem is not None
        }
        for row in (first, second)
    ]
    seeds = sorted(pairs[0].keys() & pairs[1].keys())
    if not seeds:
        return None
    better, worse = (scores([cells[seed] for seed in seeds]) for cells in pairs)
    return better - worse


def final_cells(record: Tournament, name: str, rate: float) -> list[Cell]:
    """A contender's cells of the last stage that have ended, by seed.

    Of the chosen rate alone: a search that went on later may have left cells at another.
    """
    found = [
        cell
        for cell in record.cells
        if (cell.contender, cell.rate, cell.stage) == (name, rate, "final")
        and cell.state in ("done", "failed")
    ]
    return sorted(found, key=lambda cell: cell.seed)


def scores(cells: Sequence[Cell]) -> np.ndarray:
    """[S, P] of cells that have a score."""
    return np.array([cell.per_problem for cell in cells], dtype=np.float64)


def mean(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def time_to_threshold(kind: Kind, record: Tournament, curves: Mapping[str, list[Row]]) -> None:
    """Set the threshold from the final cells' curves, and when each cell has passed it.

    Half way from the mean of all curves' first steps to the mean of the best contender's last ones;
    of a curve that falls, downward. If nobody's got better there is no half way.

    Args:
        kind: names the metric, and counts seconds and tokens.
        record: its threshold and its cells are filled in.
        curves: id of a cell -> its rows of metrics, of final cells of chosen rates that have ended.
    """
    assert record.threshold is not None
    name = record.threshold.metric
    sign = -1.0 if kind.falls else 1.0
    smooth = {id: smoothed(rows, name, sign) for id, rows in curves.items()}
    known = [cell for cell in record.cells if smooth.get(cell.id)]
    record.threshold.value = None
    for cell in record.cells:
        cell.threshold_seconds = cell.threshold_tokens = cell.threshold_steps = None
    if not known:
        return
    ends: dict[str, list[float]] = {}
    for cell in known:
        ends.setdefault(cell.contender, []).append(smooth[cell.id][-1][1])
    start = fmean(smooth[cell.id][0][1] for cell in known)
    end = max(map(fmean, ends.values()))
    if not end > start:
        return
    value = (start + end) / 2
    record.threshold.value = sign * value
    for cell in known:
        place = next((k for k, point in smooth[cell.id] if point >= value), None)
        if place is not None:
            seconds, tokens = kind.cost(curves[cell.id])
            cell.threshold_seconds, cell.threshold_tokens = seconds[place], tokens[place]
            cell.threshold_steps = int(curves[cell.id][place]["step"])


def smoothed(rows: Sequence[Row], name: str, sign: float = 1.0) -> list[tuple[int, float]]:
    """(index of the row, mean of the last few values up to it), for rows that have the metric as a
    finite number. It begins with the first whole window: one lucky step passes no threshold.

    Example:
        >>> smoothed([{"x": 1.0}, {}, {"x": 3.0}], "x")  # fewer than a window: all of them
        [(2, 2.0)]
    """
    found = [
        (k, sign * row[name])
        for k, row in enumerate(rows)
        if name in row and math.isfinite(row[name])
    ]
    if not found:
        return []
    window = min(WINDOW, len(found))
    return [
        (found[last][0], fmean(value for _, value in found[last + 1 - window : last + 1]))
        for last in range(window - 1, len(found))
    ]
