"""The past of one metric in a few numbers: baseline, present, best plateau, noise.

A track sees one value at a time, keeps a bounded memory, and gives it as JSON, so that a resumed
run is watched as if it had never stopped. It is looked at on two scales: a short window sees a fast
collapse, a long one sees a slow decline through the noise of small batches. The level of a window
is its mean without the highest and the lowest fifth: one wild row moves nothing, and less is lost
to noise than by a median. Of a rare metric (an evaluation) the windows are one value and the mean
of three.
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
# ... and the trimmed mean of 5 values has this times the error of their mean; of more, less.
TRIMMED_ERROR = 1.07
# Left out at each end of a window.
TRIM = 0.2
# Evaluations whose mean is a rare share's long window.
POOLED = 3
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
        self.now = level(self.track.recent[-self.window :])
        self.best = self.now if self.best is None else max(self.best, self.now)

    def reference(self, since: Since) -> float | None:
        """The level to compare with; None while it is not known."""
        if since == "usual":
            before = self._before()
            return level(before) if before else None
        start = self.track.start
        if since == "start" or start is None:
            return start
        # A fall in the first rows leaves no high plateau behind, but a high start.
        best = self._plateau()
        return start if best is None else max(best, start)

    def doubt(self, since: Since) -> float:
        """The standard error of the present minus that reference."""
        rows = 1 / self.window + 1 / max(self._behind(since), 1)
        trials, reference = self.track.trials, self.reference(since)
        if not trials or reference is None:
            error = math.sqrt(rows) * self.track.noise
            return error if self.track.rare else error * TRIMMED_ERROR
        # Two shares of so many problems each, if nothing has changed: both are of one coin.
        behind = self._behind(since)
        both = (self.window * self.now + behind * reference) / (self.window + behind)
        return math.sqrt(spread(both) * rows / trials)

    def _behind(self, since: Since) -> int:
        """How many values a reference rests on."""
        if since == "usual":
            return len(self._before())
        best, start = self._plateau(), self.track.start
        higher = best is not None and start is not None and best >= start
        return self.track.windows[1] if since == "best" and higher else self.track.warmup

    def _plateau(self) -> float | None:
        """The best long window; None before there is one: the highest of many short windows is
        the luckiest, not the best."""
        long = self.track.look(1)
        return long.best if long else None

    def _before(self) -> list[float]:
        """Values before the window, none where they are too few to tell what is usual."""
        before = self.track.recent[: -self.window]
        return before if len(before) >= max(self.window, self.track.warmup) else []


class Track:
    """One metric's past.

    Args:
        warmup: values from which the baseline is taken.
        window: values whose level is the present; the long window is five times that.
        pooled: of a rare share: the long window is three values.

    Example:
        >>> track = Track(warmup=4, window=2)
        >>> for value in [1.0, 1.0, 1.0, 1.0, 3.0, 3.0]:
        ...     track.add(value)
        >>> short = track.look(0)
        >>> short.now, short.reference("start"), track.look(1) is None
        (3.0, 1.0, True)
    """

    def __init__(self, warmup: int, window: int, *, pooled: bool = False) -> None:
        self.warmup = warmup
        self.windows = (window, window * (POOLED if pooled else LONG if window > 1 else 1))
        self.first: list[float] = []
        self.start: float | None = None
        self.recent: list[float] = []
        self.seen = 0
        self.looks = (Look(self, 0), Look(self, 1))
        self.trials: float | None = None  # of a share: how many problems each value is of
        self._noise: float | None = None

    def add(self, value: float) -> None:
        """Take in the next finite value."""
        self.seen += 1
        self.recent.append(value)
        if len(self.recent) > MEMORY + self.windows[1]:
            del self.recent[0]
        if len(self.first) < self.warmup:
            self.first.append(value)
            self.start = level(self.first) if len(self.first) == self.warmup else None
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
                "trials": self.trials, "seen": self.seen}  # fmt: skip

    def load_values(self, values: dict[str, Any]) -> None:
        """Take over what `values` gave."""
        self.first, self.recent = list(values["first"]), list(values["recent"])
        self.start = level(self.first) if len(self.first) == self.warmup else None
        self.trials, self._noise = values["trials"], None
        self.seen = values["seen"]
        for look, best in zip(self.looks, values["best"], strict=True):
            look.best = best
            if len(self.recent) >= look.window:
                look.now = level(self.recent[-look.window :])


def spread(share: float) -> float:
    """The variance of one throw of a coin that falls so; 0 for what is no share."""
    return max(share * (1 - share), 0.0)


def level(values: Sequence[float]) -> float:
    """The mean without the highest and the lowest fifth.

    Example:
        >>> level([1.0, 2.0, 3.0, 4.0, 100.0]), level([1.0, 2.0])
        (3.0, 1.5)
    """
    cut = int(TRIM * len(values))
    kept = sorted(values)[cut : len(values) - cut] if cut else values
    return sum(kept) / len(kept)


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
