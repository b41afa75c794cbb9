"""The past of one metric in a few numbers: baseline, present, best plateau, noise.

A track sees one value at a time, keeps a bounded memory, and gives it as JSON, so that a resumed
run is watched as if it had never stopped. It is looked at on two scales: a short window sees a fast
collapse, a long one sees a slow decline through the noise of small batches. Medians throughout: one
wild row moves nothing. Of a rare metric (an evaluation) each value counts by itself, and its best
is the median of the three best ones: the very best of many is the luckiest.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

Since = Literal["start", "best", "usual"]

# The long window is this many short ones.
LONG = 5
# Values before the long window from which the usual level is taken.
MEMORY = 64
# In normal noise of deviation 1, |x - 2y + z| has this mean once its largest tenth is left out...
TRIMMED_BEND = 1.611
# ... and the median of n values has this times the error of their mean.
MEDIAN_ERROR = 1.25
# Values whose median is the best of a rare metric.
TOP = 3
# Problems that a rare share is taken to be of where nothing says of how many.
ASSUMED_TRIALS = 100


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
        self.now = 0.0
        self.best: float | None = None  # the highest that the present ever was

    def refresh(self) -> None:
        """Take the track's newest values for the present."""
        self.now = middle(self.track.recent[-self.window :])
        self.best = self.now if self.best is None else max(self.best, self.now)

    def reference(self, since: Since) -> float | None:
        """The level to compare with; None while it is not known."""
        if since == "usual":
            before = self._before()
            return middle(before) if before else None
        start = self.track.start
        if since == "start" or start is None:
            return start
        # A fall in the first rows leaves no high plateau behind, but a high start.
        best = self.track.best_of_top if self.track.rare else self._plateau().best
        return start if best is None else max(best, start)

    def doubt(self, since: Since) -> float:
        """The standard error of the present minus that reference."""
        trials, reference = self.track.trials, self.reference(since)
        if trials and reference is not None:  # two shares, each of that many problems
            return math.sqrt((spread(self.now) + spread(reference)) / trials)
        counts = {"start": self.track.warmup, "best": self._plateau().window,
                  "usual": len(self._before())}  # fmt: skip
        error = math.sqrt(1 / self.window + 1 / max(counts[since], 1)) * self.track.noise
        return error if self.window == 1 else error * MEDIAN_ERROR

    def _plateau(self) -> "Look":
        """The look whose best counts: the long one, since the highest of many short windows is
        the luckiest, not the best."""
        return self.track.look(1) or self

    def _before(self) -> list[float]:
        """Values before the window, none where they are too few to tell what is usual."""
        before = self.track.recent[: -self.window]
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
        >>> short = track.look(0)
        >>> short.now, short.reference("start"), track.look(1) is None
        (3.0, 1.0, True)
    """

    def __init__(self, warmup: int, window: int) -> None:
        self.warmup = warmup
        # A rare metric has one scale, its last value.
        self.windows = (window, 1 if window == 1 else window * LONG)
        self.first: list[float] = []
        self.start: float | None = None
        self.recent: list[float] = []
        self.seen = 0
        self.top: list[float] = []  # of a rare metric: the highest ones, highest first
        self.looks = (Look(self, 0), Look(self, 1))
        self.trials: float | None = None  # of a share: how many problems each value is of
        self._noise: float | None = None

    def add(self, value: float) -> None:
        """Take in the next finite value."""
        self.seen += 1
        self.recent.append(value)
        if self.rare:
            self.top = sorted([*self.top, value], reverse=True)[:TOP]
        if len(self.recent) > MEMORY + self.windows[1]:
            del self.recent[0]
        if len(self.first) < self.warmup:
            self.first.append(value)
            self.start = middle(self.first) if len(self.first) == self.warmup else None
        self._noise = None
        for look in self.looks:
            if len(self.recent) >= look.window:
                look.refresh()

    def look(self, scale: int) -> Look | None:
        """The track at the short (0) or the long (1) scale; None before that window is full."""
        return self.looks[scale] if len(self.recent) >= self.windows[scale] else None

    @property
    def rare(self) -> bool:
        """Whether each value counts by itself."""
        return self.windows[0] == 1

    @property
    def best_of_top(self) -> float | None:
        """The best of a rare metric; None before there are enough to tell luck from it."""
        return middle(self.top) if len(self.top) == TOP else None

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of the values that are remembered."""
        if self._noise is None:
            self._noise = self._binomial(self.trials) if self.trials else deviation(self.recent)
            if self.rare and not self.trials and all(0 <= value <= 1 for value in self.recent):
                # The scatter of two or three values may be nothing by chance.
                self._noise = max(self._noise, self._binomial(ASSUMED_TRIALS))
        return self._noise

    def _binomial(self, trials: float) -> float:
        """Of a share of that many problems; the few values of it would give their trend instead."""
        return math.sqrt(max(map(spread, self.recent), default=0.0) / trials)

    def values(self) -> dict[str, Any]:
        """Everything it remembers, for JSON."""
        best = [look.best for look in self.looks]
        return {"first": list(self.first), "recent": list(self.recent), "best": best,
                "trials": self.trials, "seen": self.seen, "top": list(self.top)}  # fmt: skip

    def load_values(self, values: dict[str, Any]) -> None:
        """Take over what `values` gave."""
        self.first, self.recent = list(values["first"]), list(values["recent"])
        self.start = middle(self.first) if len(self.first) == self.warmup else None
        self.trials, self._noise = values["trials"], None
        self.seen, self.top = values["seen"], list(values["top"])
        for look, best in zip(self.looks, values["best"], strict=True):
            look.best = best
            if self.recent:
                look.now = middle(self.recent[-look.window :])


def spread(share: float) -> float:
    """The variance of one throw of a coin that falls so; 0 for what is no share."""
    return max(share * (1 - share), 0.0)


def middle(values: Sequence[float]) -> float:
    """The median; `statistics.median` does the same in twice the time.

    Example:
        >>> middle([3.0, 1.0, 2.0]), middle([1.0, 2.0])
        (2.0, 1.5)
    """
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the noise, from second differences: neither level nor trend counts.

    The mean of the differences without the largest tenth: steadier than their median, which ten
    values of a warm-up put wrong by half, and a sudden fall does not enter it. Few values get a
    surcharge for what they leave open.

    Example:
        >>> deviation([1.0, 2.0, 3.0, 4.0]), deviation([1.0, 0.0, 1.0, 0.0]) > 1
        (0.0, True)
    """
    bends = sorted(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:]))
    if not bends:
        return 0.0
    kept = bends[: len(bends) - len(bends) // 10]
    return sum(kept) / len(kept) / TRIMMED_BEND * (1 + 1 / math.sqrt(len(bends)))


def is_finite(value: float) -> bool:
    """Whether a track can take it in; 1e300 could not be compared without overflow."""
    return math.isfinite(value) and abs(value) < 1e150
