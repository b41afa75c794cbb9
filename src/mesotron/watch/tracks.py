"""The past of one metric (`Track`), and the windows of it that show where it stands.

A short window sees a fast collapse, a long one a slow decline through the noise of small batches.
Their level is a trimmed mean, so one outlier moves nothing. For a sparse metric (an evaluation)
they are one value and the mean of three.
"""

import math
from bisect import insort
from typing import Any, Literal, NamedTuple

from mesotron.watch.noise import (
    BEND_VARIANCE,
    TRIMMED_ERROR,
    bernoulli_variance,
    deviation,
    expected_maximum,
    slow_deviation,
    trimmed_mean,
)

Since = Literal["start", "best", "usual", "high", "run"]

WINDOWS = (1, 2, 5)  # sizes of the windows, in short ones
MEMORY = 100  # values before the long window, for the usual level
LASTING = 0.4  # fits noise that decays by 0.3 or by 0.6 per row
SURE = 2.0  # standard errors by which a best level may be too high
HIGH = 0.9  # share of the earlier values below the high level
LOWEST = 32  # values remembered for the floor
PERCENT = 100  # the floor is the lowest value of each hundred
MANY = 20
OUTLIER = 100  # values before a square is limited to this multiple of the usual one
POOLED = 3  # values in the long window of a sparse metric
MIN_SCATTER = 5  # values that tell the noise of a sparse metric that is not a share
ASSUMED_TRIALS = 100  # problems per evaluation where the log does not say


class Reference(NamedTuple):
    """A level to compare with."""

    level: float | None  # None while it is unknown
    num_values: int  # behind it


class TrackWindow:
    """The latest values of a track: their level, the references to compare with, and the error."""

    def __init__(self, track: "Track", size: int) -> None:
        self.track = track
        self.size = size
        self.now = 0.0
        self.best: float | None = None  # the highest level so far

    def refresh(self) -> None:
        self.now = trimmed_mean(self.track.recent[-self.size :])
        if self.best is None:
            self.best = self.now
        else:
            self.best = max(self.best, self.now)

    def reference(self, since: Since) -> float | None:
        """The level to compare with; None while it is unknown."""
        return self._reference(since).level

    def standard_error(self, since: Since) -> float:
        """Of the present level minus that reference."""
        reference, count = self._reference(since)
        inverse = 1 / self.size + 1 / max(count, 1)

        trials = self.track.trials
        if trials and reference is not None:
            # Two shares of `trials` problems each: under no change both come from the pooled share.
            pooled = (self.size * self.now + count * reference) / (self.size + count)
            return math.sqrt(bernoulli_variance(pooled) * inverse / trials)

        error = math.sqrt(inverse) * self.track.noise
        if self.track.sparse:
            return error

        return error * TRIMMED_ERROR

    def _reference(self, since: Since) -> Reference:
        track = self.track
        if since in ("usual", "high"):
            return self._recent_reference(since)
        if since == "start" or track.start is None:
            return Reference(track.start, track.warmup)

        return self._best_reference(track.start)

    def _recent_reference(self, since: Since) -> Reference:
        """The level before this window, or what nine of ten values stayed below."""
        before = self.track.recent[: -self.size]
        if len(before) < max(self.size, self.track.warmup):
            return Reference(None, 0)  # too few values do not tell what is usual

        if since == "usual":
            return Reference(trimmed_mean(before), len(before))

        high = int(HIGH * len(before))
        return Reference(sorted(before)[high], len(before))

    def _best_reference(self, start: float) -> Reference:
        """The highest plateau: of a high level of few values and a lower one of many, the one that
        is surer to be high."""
        track = self.track
        noise = track.noise
        best = Reference(start, track.warmup)  # a fall in the first rows leaves no other plateau
        surest = start - SURE * noise / math.sqrt(track.warmup)

        windows = track.windows[-1:] if track.sparse else track.windows
        for window in windows:
            if window.best is None:
                continue

            # The highest of many windows is the luckiest: take off the luck to expect.
            num_windows = 1 if track.sparse else track.num_seen // window.size
            luck = expected_maximum(num_windows) / math.sqrt(window.size) * noise
            level = window.best - luck

            sure = level - SURE * noise / math.sqrt(window.size)
            if sure > surest:
                surest = sure
                best = Reference(level, window.size)

        return best


class Track:
    """The past of one metric. The first `warmup` values are the baseline; the short window has
    `window` values, the others two and five times as many; of a sparse share (`pooled`) three."""

    def __init__(self, warmup: int, window: int, *, pooled: bool = False) -> None:
        self.warmup = warmup
        if window == 1:
            self.sizes = (1, POOLED if pooled else 1)
        else:
            self.sizes = tuple(window * k for k in WINDOWS)

        self.first: list[float] = []
        self.start: float | None = None
        self.recent: list[float] = []
        self.steps: list[int] = []  # of the recent values
        self.num_seen = 0
        self.windows = tuple(TrackWindow(self, size) for size in self.sizes)
        self.trials: float | None = None  # for a share: number of problems behind each value
        self.lowest: list[float] = []  # in order
        self.total = 0.0
        self.bends = 0.0  # sum of the squares of second differences
        self._noise: float | None = None

    def add(self, value: float, step: int = 0) -> None:
        self.num_seen += 1
        self.total += value
        self.recent.append(value)
        self.steps.append(step)
        self._add_bend()

        if len(self.recent) > MEMORY + self.sizes[-1]:
            del self.recent[0]
            del self.steps[0]

        insort(self.lowest, value)
        del self.lowest[LOWEST:]

        if len(self.first) < self.warmup:
            self.first.append(value)
            self._set_start()

        self._noise = None
        for window in self.windows:
            if len(self.recent) >= window.size:
                window.refresh()

    def _add_bend(self) -> None:
        if self.num_seen <= 2:
            return

        x, y, z = self.recent[-3:]
        square = (z - 2 * y + x) ** 2
        if self.num_seen >= MANY:
            # One outlier must not hide everything that follows.
            usual = self.bends / max(self.num_seen - 3, 1)
            square = min(square, OUTLIER * usual)

        self.bends += square

    def _set_start(self) -> None:
        is_complete = len(self.first) == self.warmup
        self.start = trimmed_mean(self.first) if is_complete else None

    def window(self, scale: int) -> TrackWindow | None:
        """The short (0) to the long (-1) window; None until it is full."""
        if len(self.recent) < self.sizes[scale]:
            return None
        return self.windows[scale]

    @property
    def sparse(self) -> bool:
        return self.sizes[0] == 1

    @property
    def floor(self) -> float:
        """The value of a policy that has lost everything: 0, or the lowest percent if negative."""
        place = min(self.num_seen // PERCENT, len(self.lowest) - 1)
        return min(0.0, self.lowest[place])

    @property
    def noise(self) -> float:
        """Standard deviation of the noise of one value."""
        if self._noise is None:
            if self.trials:
                self._noise = self._binomial(self.trials)
            elif self.sparse:
                self._noise = self._noise_of_evaluations()
            else:
                self._noise = self._noise_of_rows()

        return self._noise

    def _noise_of_rows(self) -> float:
        variance = self.bends / max(self.num_seen - 2, 1) / BEND_VARIANCE
        fast = max(math.sqrt(variance), deviation(self.recent))

        slow = slow_deviation(self.recent)
        if slow > fast > 0:  # blocks see only a part of what lasts longer than they do
            slow *= (slow / fast) ** LASTING

        return max(fast, slow)

    def _noise_of_evaluations(self) -> float:
        """The scatter of two or three values may be zero by chance."""
        scatter = self._noise_of_rows()
        if all(0 <= value <= 1 for value in self.recent):
            return max(scatter, self._binomial(ASSUMED_TRIALS))
        if self.num_seen < MIN_SCATTER:
            return max(map(abs, self.recent))  # so that no change exceeds it

        return scatter

    def _binomial(self, trials: float) -> float:
        """From the number of problems: the scatter of a few values would mostly be their trend."""
        variances = map(bernoulli_variance, self.recent)
        return math.sqrt(max(variances, default=0.0) / trials)

    def state(self) -> dict[str, Any]:
        return {
            "first": list(self.first),
            "recent": list(self.recent),
            "steps": list(self.steps),
            "best": [window.best for window in self.windows],
            "trials": self.trials,
            "seen": self.num_seen,
            "lowest": list(self.lowest),
            "total": self.total,
            "bends": self.bends,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
        self._set_start()

        self.recent = list(state["recent"])
        self.steps = list(state["steps"])
        self.num_seen = state["seen"]
        self.trials = state["trials"]
        self.lowest = list(state["lowest"])
        self.total = state["total"]
        self.bends = state["bends"]
        self._noise = None

        for window, best in zip(self.windows, state["best"]):
            window.best = best
            if len(self.recent) >= window.size:
                window.now = trimmed_mean(self.recent[-window.size :])
