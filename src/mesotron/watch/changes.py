"""Sudden changes in the metrics of a long log, around which every row is kept.

A change is sudden if two stretches of 8, 32 or 128 rows are all above, or all below, two others
just before them, by more than their noise.
"""

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from mesotron.watch.metrics import Row, sources
from mesotron.watch.tracks import deviation

STRETCH = 8  # rows of the shortest stretches, whose highest and lowest value do not count
LONGER = 4  # times as long are the next ones
SCALES = 3
SUDDEN = 5.0  # standard errors between the stretches; detectors ask for about as much
LEAST_CHANGE = 0.05  # share of the level: a schedule has next to no noise
BEFORE = 16  # rows kept before a change, and after it: longer than a detector's patience
AFTER = 64
NOT_READ = {"tokens"}  # a count that only grows


def near_changes(rows: Sequence[Row]) -> list[bool]:
    """Whether each row is near a sudden change of a metric that the watch knows."""
    near = np.zeros(len(rows), dtype=bool)
    for column in columns_of(rows):
        is_finite = np.isfinite(column)
        mark_changes(near, (~is_finite).astype(float))  # such as a loss that is not a number
        mark_changes(near, fill(column, is_finite))

    return near.tolist()


def columns_of(rows: Sequence[Row]) -> list[np.ndarray]:
    """The known metrics that most rows have; all metrics if no reward is known."""
    names = set().union(*rows)
    by_metric = sources(sorted(names))
    if "reward" in by_metric:
        names = set()
        for metric in by_metric.keys() - NOT_READ:
            names.update(by_metric[metric])

    columns = []
    for name in sorted(names - {"step"}):
        try:
            columns.append(np.array([*map(itemgetter(name), rows)]))
        except KeyError:
            values = [row.get(name) for row in rows]
            if values.count(None) * 2 < len(values):
                columns.append(with_last(values))

    return columns


def with_last(values: list[float | None]) -> np.ndarray:
    """The values, with the one before where there is none."""
    last = next(value for value in values if value is not None)
    filled = []
    for value in values:
        last = last if value is None else value
        filled.append(last)

    return np.array(filled)


def fill(column: np.ndarray, is_finite: np.ndarray) -> np.ndarray:
    """The column with the last finite value where one is not; zeros if none is."""
    if is_finite.all():
        return column
    if not is_finite.any():
        return np.zeros_like(column)

    places = np.where(is_finite, np.arange(len(column)), np.argmax(is_finite))
    return column[np.maximum.accumulate(places)]


def mark_changes(near: np.ndarray, column: np.ndarray) -> None:
    """Mark the rows near the sudden changes of a column; the shortest stretches that show one tell
    best where it is."""
    count = len(column) // STRETCH
    if (column == column[0]).all():
        return

    stretches = np.sort(column[: count * STRETCH].reshape(count, STRETCH), axis=1)
    levels = stretches[:, 1:-1].mean(axis=1)

    size = STRETCH
    for _ in range(SCALES):
        if len(levels) < 6:
            return

        for first in np.flatnonzero(is_sudden(levels)):
            start = first * size
            stop = (first + 5) * size
            if size == STRETCH or not near[start:stop].any():
                near[max(start - BEFORE, 0) : stop + AFTER] = True

        size *= LONGER
        count = len(levels) // LONGER
        levels = levels[: count * LONGER].reshape(count, LONGER).mean(axis=1)


def is_sudden(levels: np.ndarray) -> np.ndarray:
    """Whether two of five levels and the last two of them lie apart, for each five in a row."""
    lower = np.minimum(levels[1:], levels[:-1])
    upper = np.maximum(levels[1:], levels[:-1])
    rise = lower[3:] - upper[:-3]
    fall = lower[:-3] - upper[3:]

    change = np.maximum(rise, fall)
    height = np.maximum(np.abs(upper[3:]), np.abs(upper[:-3]))
    noise = deviation(levels.tolist())

    return (change > SUDDEN * noise) & (change > LEAST_CHANGE * height)
