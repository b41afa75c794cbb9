"""Thins a long log to rows that still show what happened.

Where nothing changes, one row stands for `stride` neighbors and has the last value of each metric:
rows as they were logged, with the noise of single rows, on which the detectors rest. Around each
sudden change, and at the end, every row is kept, so that a collapse of a few rows is seen as in a
short log. What counts as sudden is in `changes.py`; a slower change shows in the thinned rows.
"""

from collections.abc import Sequence

from mesotron.watch.metrics import Row

# Shares of the rows that may be kept.
END = 1 / 8
STEADY = 1 / 4
SUDDENLY = 1 / 4

IN_FULL = 0  # weight of a row that is kept for itself


class Thinned:
    """What the first rows of a long log stand for."""

    def __init__(self) -> None:
        self.stride = 1  # neighbors that one row stands for, where nothing changes
        self.num_lost = 0  # rows around changes that were too many to keep
        self._weights: list[int] = []  # of the first rows: how many each stands for, or IN_FULL
        self._next: list[bool] = []  # of the rows after them: whether they are near a change

    def cut(self, num_rows: int) -> None:
        """Forget the rows from this one on, which were dropped."""
        if num_rows < len(self._weights):
            del self._weights[num_rows:]
            self._next = []

    def thin(self, rows: list[Row], most: int) -> None:
        """Thin rows in place, to about half of `most` or less."""
        from mesotron.watch.changes import near_changes  # imports NumPy, for long logs only

        start = len(self._weights)
        end = max(len(rows) - int(most * END), start)
        near = near_changes(rows[start:])
        for place, is_near in enumerate(self._next[: len(near)]):
            near[place] |= is_near

        num_new = end - start
        weights = [*self._weights, *(IN_FULL if is_near else 1 for is_near in near[:num_new])]
        self._next = near[num_new:]
        self._limit_full(weights, int(most * SUDDENLY))

        kept, weights = merge(rows[:end], weights, self.stride)
        while sum(map(bool, weights)) > most * STEADY:
            self.stride *= 2
            kept, weights = merge(kept, weights, self.stride)

        rows[:end] = kept
        self._weights = weights

    def _limit_full(self, weights: list[int], most: int) -> None:
        """Let the oldest rows around changes be thinned where there are too many."""
        places = [place for place, weight in enumerate(weights) if weight == IN_FULL]
        for place in places[: max(len(places) - most, 0)]:
            weights[place] = 1
            self.num_lost += 1


def merge(rows: Sequence[Row], weights: Sequence[int], stride: int) -> tuple[list[Row], list[int]]:
    """Let one row stand for neighbors of together at most `stride`, with their last values."""
    kept: list[Row] = []
    sums: list[int] = []
    for row, weight in zip(rows, weights, strict=True):
        if sums and weight and sums[-1] and sums[-1] + weight <= stride:
            kept[-1] = kept[-1] | row
            sums[-1] += weight
        else:
            kept.append(row)
            sums.append(weight)

    return kept, sums
