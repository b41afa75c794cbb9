"""The ranking of a tournament from its final cells, and its conclusion in sentences."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, median

import numpy as np

from mesotron.compare.kinds import Kind, Row
from mesotron.compare.record import Cell, Standing, Tournament, has_scores
from mesotron.compare.search import Search
from mesotron.compare.stats import LEVEL, bootstrap, holm, paired_test, pool_seeds
from mesotron.runs.console import spell_time

WINDOW = 5  # steps averaged for a point of the smoothed training curve


def rank(record: Tournament, searches: Mapping[str, Search], rates: Mapping[str, float]) -> None:
    """Fill in `record.standings`, best first; if every score is 0, all share rank 1."""
    rows = [_standing(record, name, searches[name], rates[name]) for name in rates]
    rows.sort(key=lambda row: (row.score is None, -(row.score or 0.0)))

    scored = has_scores(rows)
    for place, row in enumerate(rows, 1):
        row.rank = place if scored else 1

    if scored:
        compare_with_best(record, rows)

    record.standings = rows


def _standing(record: Tournament, name: str, search: Search, rate: float) -> Standing:
    cells = _final_cells(record, name, rate)
    scored = [cell for cell in cells if cell.per_problem is not None]
    interval = bootstrap(_scores(scored)) if scored else None
    times = [cell.threshold_seconds for cell in scored]
    halfway = median([math.inf if x is None else x for x in times] or [math.inf])

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
        seconds=fmean(cell.seconds or 0.0 for cell in scored) if scored else None,
        tokens=fmean(cell.tokens or 0.0 for cell in scored) if scored else None,
        threshold_seconds=halfway if halfway < math.inf else None,
        trials=sum(cell.contender == name and cell.stage == "search" for cell in record.cells),
        extended=search.extended * record.plan["search_seeds"],
        edge=search.edge,
        dead=sum(cell.verdict in ("dead", "diverged") for cell in scored),
        failed=sum(cell.state == "failed" for cell in cells),
    )


def compare_with_best(record: Tournament, rows: Sequence[Standing]) -> None:
    """The paired test of every contender against the first, corrected and pooled over all pairs."""
    pairs = [
        (first, second, D)
        for first, second in combinations(rows, 2)
        if (D := _difference(record, first, second)) is not None
    ]

    pooled = pool_seeds([D for *_, D in pairs])
    tests = [paired_test(D, pooled) for *_, D in pairs]

    corrected = holm([test.p for test in tests])
    for (first, row, _), test, p in zip(pairs, tests, corrected, strict=True):
        if first is rows[0]:
            row.behind = test.value
            row.behind_low = test.low
            row.behind_high = test.high
            row.p = test.p
            row.p_holm = p


def _difference(record: Tournament, first: Standing, second: Standing) -> np.ndarray | None:
    finals = [_final_cells(record, row.contender, row.rate) for row in (first, second)]
    by_seed = [{c.seed: c for c in cells if c.per_problem is not None} for cells in finals]
    if not (seeds := sorted(by_seed[0].keys() & by_seed[1].keys())):
        return None

    better, worse = (_scores([cells[seed] for seed in seeds]) for cells in by_seed)
    return better - worse


def _final_cells(record: Tournament, name: str, rate: float) -> list[Cell]:
    """Finished final cells by seed; an extended search may have left some at another rate."""
    ended = [cell for cell in record.cells if cell.state in ("done", "failed")]
    own = [c for c in ended if (c.contender, c.rate, c.stage) == (name, rate, "final")]
    return sorted(own, key=lambda cell: cell.seed)


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
        if (place := next((k for k, point in smooth[cell.id] if point >= value), None)) is not None:
            seconds, tokens = kind.cost(curves[cell.id])
            cell.threshold_seconds = seconds[place]
            cell.threshold_tokens = tokens[place]
            cell.threshold_steps = int(curves[cell.id][place]["step"])


def smoothed(rows: Sequence[Row], name: str, sign: float = 1.0) -> list[tuple[int, float]]:
    """(row index, mean of the last few finite values), from the first full window on."""
    logged = [(k, row[name]) for k, row in enumerate(rows) if name in row]
    points = [(k, sign * value) for k, value in logged if math.isfinite(value)]
    window = min(WINDOW, len(points))
    windows = [points[end - window : end] for end in range(window or 1, len(points) + 1)]

    return [(part[-1][0], fmean(value for _, value in part)) for part in windows]


def conclude(record: Tournament) -> list[str]:
    cells = record.cells
    rows = [row for row in record.standings if row.score is not None]
    not_measured = [
        f"{cell.contender} is left out: the run that measures its updates failed ({cell.why})."
        for cell in cells
        if cell.stage == "probe" and cell.state == "failed"
    ]

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
    best = rows[0]
    sentences = [
        f"{best.contender} is first: {best.score:.3f} [{best.low:.3f}, {best.high:.3f}] at rate "
        f"{best.rate:g}{since}, {record.measure}, {count(len(best.seeds), 'seed')}."
    ]
    if len(best.seeds) < 2:
        sentences.append("One seed says nothing about other seeds: use three or more.")

    if tied := [row for row in rows[1:] if row.p_holm is not None and row.p_holm >= LEVEL]:
        names = [
            f"{row.contender} (behind by {row.behind:.3f}, p = {row.p_holm:.2g})" for row in tied
        ]
        sentences.append(f"No significant difference from {best.contender}: {', '.join(names)}.")

    sentences += [
        f"{row.contender} is behind by {row.behind:.3f} [{row.behind_low:.3f}, "
        f"{row.behind_high:.3f}] (p = {row.p_holm:.2g})."
        for row in rows[1:]
        if row.p_holm is not None and row.p_holm < LEVEL
    ]

    timed = [(t, row.contender) for row in rows if (t := row.threshold_seconds) is not None]
    if timed and (first := min(timed))[0] < (last := max(timed))[0]:
        sentences.append(
            f"{first[1]} was halfway first, after {spell_time(first[0])} of training; "
            f"{last[1]} last, after {spell_time(last[0])}."
        )

    for row in rows:
        if row.edge:
            own = (c for c in record.cells if c.contender == row.contender and c.stage == "search")
            tried = len({cell.rate for cell in own})
            ends = {"high": ("largest", "a larger"), "low": ("smallest", "a smaller")}
            end, other = ends[row.edge] if tried > 1 else ("only", "another")

            sentences.append(
                f"{row.contender}: its rate, {row.rate:g}, is the {end} one of {tried} tried; "
                f"{other} one may be better."
            )

    return sentences


def _dead_rates(cells: Sequence[Cell]) -> list[str]:
    sentences = []
    for name in dict.fromkeys(cell.contender for cell in cells):
        own = [cell for cell in cells if cell.contender == name and cell.stage == "search"]
        if dead := [cell for cell in own if cell.verdict in ("dead", "diverged")]:
            rates = ", ".join(f"{rate:g}" for rate in sorted({cell.rate for cell in dead}))
            causes = Counter(cell.cause or cell.verdict or "" for cell in dead)
            cause = causes.most_common(1)[0][0].replace("_", " ")
            sentences.append(f"{name} died in its search at rate {rates} ({cause}).")

    return sentences


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
