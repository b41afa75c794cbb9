"""The ranking of a tournament from its final cells, and its conclusion in sentences."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Literal

import numpy as np

from mesotron.compare.kind import Kind
from mesotron.compare.record import Cell, Standing, Tournament, has_scores
from mesotron.compare.search import GridSearch
from mesotron.compare.stats import LEVEL, bootstrap, holm, paired_test, pool_seeds
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row

WINDOW = 5  # steps averaged for a point of the smoothed training curve


def rank(
    record: Tournament, searches: Mapping[str, GridSearch], rates: Mapping[str, float]
) -> None:
    """Fill in `record.standings`, best first; if every score is 0, all share rank 1."""
    rows = [_standing(record, name, searches[name], rates[name]) for name in rates]
    rows.sort(key=lambda row: (row.score is None, -(row.score or 0.0)))

    scored = has_scores(rows)
    for place, row in enumerate(rows, 1):
        row.rank = place if scored else 1

    if scored:
        compare_with_best(record, rows)

    record.standings = rows


def _standing(record: Tournament, name: str, search: GridSearch, rate: float) -> Standing:
    cells = _final_cells(record, name, rate)
    scored = [cell for cell in cells if cell.per_problem is not None]
    row = Standing(
        rank=0,
        contender=name,
        rate=rate,
        gain=cells[0].gain if cells else 1.0,
        seeds=[cell.seed for cell in scored],
        score=None,
        low=None,
        high=None,
        by_seed=[fmean(cell.per_problem or ()) for cell in scored],
        seconds=None,
        tokens=None,
        threshold_seconds=None,
        trials=sum(cell.contender == name and cell.stage == "search" for cell in record.cells),
        extended=search.extended * record.plan["search_seeds"],
        edge=search.edge,
        dead=sum(cell.verdict in ("dead", "diverged") for cell in scored),
        failed=sum(cell.state == "failed" for cell in cells),
    )
    if not scored:
        return row

    interval = bootstrap(_scores(scored))
    row.score = interval.value
    row.low = interval.low
    row.high = interval.high
    _add_costs(row, scored)

    return row


def _add_costs(row: Standing, cells: Sequence[Cell]) -> None:
    row.seconds = fmean(cell.seconds or 0.0 for cell in cells)
    row.tokens = fmean(cell.tokens or 0.0 for cell in cells)
    row.threshold_seconds = _median_threshold(cells)


def _median_threshold(cells: Sequence[Cell]) -> float | None:
    """When half of the cells had passed the threshold; None if fewer ever did."""
    times = []
    for cell in cells:
        times.append(math.inf if cell.threshold_seconds is None else cell.threshold_seconds)

    middle = median(times)
    return middle if middle < math.inf else None


def compare_with_best(record: Tournament, rows: Sequence[Standing]) -> None:
    """The paired test of every contender against the first, corrected and pooled over all pairs."""
    pairs = []
    differences = []
    for first, second in combinations(rows, 2):
        D = _difference(record, first, second)
        if D is not None:
            pairs.append((first, second))
            differences.append(D)

    pooled = pool_seeds(differences)
    tests = [paired_test(D, pooled) for D in differences]
    corrected = holm([test.p for test in tests])

    for (first, row), test, p in zip(pairs, tests, corrected, strict=True):
        if first is rows[0]:
            row.behind = test.value
            row.behind_low = test.low
            row.behind_high = test.high
            row.p = test.p
            row.p_holm = p


def _difference(record: Tournament, first: Standing, second: Standing) -> np.ndarray | None:
    """[S, P], scores of the first minus those of the second on the seeds that both have."""
    ours = _scored_by_seed(record, first)
    theirs = _scored_by_seed(record, second)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None

    return _scores([ours[seed] for seed in seeds]) - _scores([theirs[seed] for seed in seeds])


def _scored_by_seed(record: Tournament, row: Standing) -> dict[int, Cell]:
    cells = _final_cells(record, row.contender, row.rate)
    return {cell.seed: cell for cell in cells if cell.per_problem is not None}


def _final_cells(record: Tournament, name: str, rate: float) -> list[Cell]:
    """Finished final cells by seed; an extended search may have left some at another rate."""
    cells = []
    for cell in record.cells:
        is_own = cell.contender == name and cell.rate == rate
        if is_own and cell.stage == "final" and cell.state in ("done", "failed"):
            cells.append(cell)

    return sorted(cells, key=lambda cell: cell.seed)


def _scores(cells: Sequence[Cell]) -> np.ndarray:
    return np.array([cell.per_problem for cell in cells], dtype=np.float64)


def time_to_threshold(kind: Kind, record: Tournament, curves: Mapping[str, list[Row]]) -> None:
    """Set the threshold, halfway from the mean start of the final cells' curves to the best
    contender's mean end, and when each cell passed it. There is none if no curve improved."""
    assert record.threshold is not None
    name = record.threshold.metric
    sign = -1.0 if kind.falls else 1.0
    smooth = {id: smoothed(rows, name, sign) for id, rows in curves.items()}
    known = [cell for cell in record.cells if smooth.get(cell.id)]

    record.threshold.value = None
    for cell in record.cells:
        cell.threshold_seconds = None
        cell.threshold_tokens = None
        cell.threshold_steps = None

    value = halfway(known, smooth)
    if value is None:
        return

    record.threshold.value = sign * value
    for cell in known:
        place = next((k for k, point in smooth[cell.id] if point >= value), None)
        if place is not None:
            seconds, tokens = kind.cost(curves[cell.id])
            cell.threshold_seconds = seconds[place]
            cell.threshold_tokens = tokens[place]
            cell.threshold_steps = int(curves[cell.id][place]["step"])


def halfway(
    cells: Sequence[Cell], curves: Mapping[str, Sequence[tuple[int, float]]]
) -> float | None:
    """Halfway from the mean start of the curves to the best contender's mean end."""
    if not cells:
        return None

    ends: dict[str, list[float]] = {}
    for cell in cells:
        _, last = curves[cell.id][-1]
        ends.setdefault(cell.contender, []).append(last)

    start = fmean(curves[cell.id][0][1] for cell in cells)
    end = max(map(fmean, ends.values()))

    return (start + end) / 2 if end > start else None


def smoothed(rows: Sequence[Row], name: str, sign: float = 1.0) -> list[tuple[int, float]]:
    """(row index, mean of the last few finite values), from the first full window on."""
    points = []
    for k, row in enumerate(rows):
        if name in row and math.isfinite(row[name]):
            points.append((k, sign * row[name]))

    smooth = []
    window = min(WINDOW, len(points))
    for end in range(window or 1, len(points) + 1):
        last, _ = points[end - 1]
        smooth.append((last, fmean(value for _, value in points[end - window : end])))

    return smooth


def conclude(record: Tournament) -> list[str]:
    """What the ranking says, in sentences."""
    cells = record.cells
    rows = [row for row in record.standings if row.score is not None]
    not_measured = []
    for cell in cells:
        if cell.stage == "probe" and cell.state == "failed":
            not_measured.append(
                f"{cell.contender} is left out: the run that measures its updates failed "
                f"({cell.why})."
            )

    if not rows:
        return ["No contender has a score: see the cells.", *not_measured]

    start = record.start.get("final")
    since = "" if start is None else f" ({record.before}: {start:.3f})"
    if has_scores(rows):
        order = _conclude_order(record, rows, since)
    else:
        order = [
            f"All contenders score 0{since} by {record.measure}, so there is no ranking: use "
            "longer runs or an easier task."
        ]

    trouble = []
    for row in record.standings:
        if row.dead:
            runs = count(row.dead, "final run")
            trouble.append(f"{row.contender}: {runs} of {len(row.seeds)} died or diverged.")

        if row.failed:
            trouble.append(f"{row.contender}: {count(row.failed, 'final run')} crashed.")

    return [
        *order,
        *trouble,
        *not_measured,
        *_dead_rates(cells),
        f"This holds for {record.recipe} at this length and size only.",
    ]


def _conclude_order(record: Tournament, rows: Sequence[Standing], since: str) -> list[str]:
    best, *others = rows
    sentences = [
        f"{best.contender} is first: {best.score:.3f} [{best.low:.3f}, {best.high:.3f}] at rate "
        f"{best.rate:g}{since}, {record.measure}, {count(len(best.seeds), 'seed')}."
    ]
    if len(best.seeds) < 2:
        sentences.append("One seed says nothing about other seeds: use three or more.")

    tied = [row for row in others if row.p_holm is not None and row.p_holm >= LEVEL]
    if tied:
        names = []
        for row in tied:
            names.append(f"{row.contender} (behind by {row.behind:.3f}, p = {row.p_holm:.2g})")

        sentences.append(f"No significant difference from {best.contender}: {', '.join(names)}.")

    for row in others:
        if row.p_holm is not None and row.p_holm < LEVEL:
            sentences.append(
                f"{row.contender} is behind by {row.behind:.3f} [{row.behind_low:.3f}, "
                f"{row.behind_high:.3f}] (p = {row.p_holm:.2g})."
            )

    sentences += _conclude_times(rows)
    for row in rows:
        if row.edge:
            sentences.append(_conclude_edge(record, row, row.edge))

    return sentences


def _conclude_times(rows: Sequence[Standing]) -> list[str]:
    """Who was halfway first and who last, if that differs."""
    timed = []
    for row in rows:
        if row.threshold_seconds is not None:
            timed.append((row.threshold_seconds, row.contender))

    if not timed:
        return []

    first_time, first = min(timed)
    last_time, last = max(timed)
    if first_time == last_time:
        return []

    return [
        f"{first} was halfway first, after {spell_time(first_time)} of training; "
        f"{last} last, after {spell_time(last_time)}."
    ]


def _conclude_edge(record: Tournament, row: Standing, edge: Literal["low", "high"]) -> str:
    """That the best rate is at an end of those that were tried."""
    rates = set()
    for cell in record.cells:
        if cell.contender == row.contender and cell.stage == "search":
            rates.add(cell.rate)

    if len(rates) == 1:
        end, other = "only", "another"
    elif edge == "high":
        end, other = "largest", "a larger"
    else:
        end, other = "smallest", "a smaller"

    return (
        f"{row.contender}: its rate, {row.rate:g}, is the {end} one of {len(rates)} tried; "
        f"{other} one may be better."
    )


def _dead_rates(cells: Sequence[Cell]) -> list[str]:
    sentences = []
    dead_by_name: dict[str, list[Cell]] = {cell.contender: [] for cell in cells}
    for cell in cells:
        if cell.stage == "search" and cell.verdict in ("dead", "diverged"):
            dead_by_name[cell.contender].append(cell)

    for name, dead in dead_by_name.items():
        if dead:
            rates = ", ".join(f"{rate:g}" for rate in sorted({cell.rate for cell in dead}))
            causes = Counter(cell.cause or cell.verdict or "" for cell in dead)
            cause = causes.most_common(1)[0][0].replace("_", " ")
            sentences.append(f"{name} died in its search at rate {rates} ({cause}).")

    return sentences


def count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "s"
    return f"{number} {noun}{plural}"
