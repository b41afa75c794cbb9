"""The past of one metric in a few numbers: baseline, present, best plateau, noise.

A track sees one value at a time, keeps a bounded memory, and gives it as JSON, so that a resumed
run is watched as if it had never stopped. It is looked at on two scales: a short window sees a fast
collapse, a long one sees a slow decline through the noise of small batches. Medians throughout: one
wild row moves nothing.
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, Literal

Since = Literal["start", "best", "usual"]

# The long window is this many short ones.
LONG = 5
# Values before the long window from which the usual level is taken.
MEMORY = 64
# Medians of |x - 2y + z| and of n values have, in normal noise of deviation 1, these deviations.
SECOND_DIFFERENCE = 1.652
MEDIAN_ERROR = 1.25


class Look:
    """A track at one scale: the present value, what it may be compared with, and the doubt.

    References and doubts are worked out when they are asked for: most rows need few of them.

    Args:
        track: whose past.
        scale: 0 is the short window, 1 the long one.
    """

    def __init__(self, track: "Track", scale: int) -> None:
        self.track, self.scale = track, scale
        self.window = track.windows[scale]
        self.now = median(track.tail(self.window))

    def reference(self, since: Since) -> float | None:
        """The level to compare with; None while it is not known."""
        if since == "usual":
            before = self._before()
            return median(before) if before else None
        if len(self.track.first) < self.track.warmup:
            return None
        return self.track.start if since == "start" else self.track.best[self.scale]

    def doubt(self, since: Since) -> float:
        """The standard error of the present minus that reference."""
        counts = {"start": self.track.warmup, "best": self.window, "usual": len(self._before())}
        error = math.sqrt(1 / self.window + 1 / max(counts[since], 1)) * self.track.noise
        return error if self.window == 1 else error * MEDIAN_ERROR

    def _before(self) -> list[float]:
        """Values before the window, none where they are too few to tell what is usual."""
        before = list(self.track.recent)[: -self.window]
        return before if len(before) >= max(self.window, self.track.warmup) else []


class Track:
    """One metric's past.

    Args:
        warmup: values from which the baseline is taken.
        window: values whose median is the present; the long window is five times that.

    Example:
        >>> track = Track(warmup=4, window=2)
        >>> for value in [1.0, 1.0, 1.0, 1.0, 3.0, 3.0]:
        ...     track.add(value)
        >>> short, long = track.looks
        >>> short.now, short.reference("start"), long is None
        (3.0, 1.0, True)
    """

    def __init__(self, warmup: int, window: int) -> None:
        self.warmup = warmup
        # A rare metric has one scale, its last value.
        self.windows = (window, 1 if window == 1 else window * LONG)
        self.first: list[float] = []
        self.start: float | None = None
        self.recent: deque[float] = deque(maxlen=MEMORY + self.windows[1])
        self.best: list[float | None] = [None, None]
        self.looks: list[Look | None] = [None, None]
        self._noise: float | None = None

    def add(self, value: float) -> None:
        """Take in the next finite value."""
        self.recent.append(value)
        if len(self.first) < self.warmup:
            self.first.append(value)
        self._refresh()
        for scale, look in enumerate(self.looks):
            if look is not None:
                best = self.best[scale]
                self.best[scale] = look.now if best is None else max(best, look.now)

    def _refresh(self) -> None:
        self._noise = None
        self.start = median(self.first) if self.first else None
        full = [len(self.recent) >= window for window in self.windows]
        self.looks = [Look(self, scale) if full[scale] else None for scale in range(2)]

    @property
    def noise(self) -> float:
        """Standard deviation of the noise: the larger of the start's and the recent one.

        A collapsed run is often silent: its recent noise alone would be zero.
        """
        if self._noise is None:
            self._noise = max(deviation(self.first), deviation(self.recent))
        return self._noise

    def tail(self, count: int) -> list[float]:
        """The last values."""
        return list(self.recent)[-count:]

    def values(self) -> dict[str, Any]:
        """Everything it remembers, for JSON."""
        return {"first": list(self.first), "recent": list(self.recent), "best": list(self.best)}

    def load_values(self, values: dict[str, Any]) -> None:
        """Take over what `values` gave."""
        self.first, self.best = list(values["first"]), list(values["best"])
        self.recent = deque(values["recent"], maxlen=self.recent.maxlen)
        self._refresh()


def deviation(values: Iterable[float]) -> float:
    """Standard deviation of the noise, from second differences: neither level nor trend counts.

    Example:
        >>> deviation([1.0, 2.0, 3.0, 4.0]), deviation([1.0, 0.0, 1.0, 0.0]) > 1
        (0.0, True)
    """
    x = list(values)
    bends = [abs(a - 2 * b + c) for a, b, c in zip(x, x[1:], x[2:])]
    return median(bends) / SECOND_DIFFERENCE if bends else 0.0


def is_finite(value: float) -> bool:
    """Whether a track can take it in; 1e300 could not be compared without overflow."""
    return math.isfinite(value) and abs(value) < 1e150
