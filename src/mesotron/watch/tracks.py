"""The past of one metric (`Track`), a window of it (`Window`), and what it may show (`Symptom`).

A short window sees a fast collapse, a long one a slow decline through the noise of small batches.
Their level is a trimmed mean, so one outlier moves nothing. For a sparse metric (an evaluation)
they are one value and the mean of three.
"""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal, get_args

Since = Literal["start", "best", "usual", "high", "run"]
Move = Literal["up", "down", "not_up", "still", "above", "below", "absent"]

WINDOWS = (1, 2, 5)  # sizes of the windows, in short ones
MEMORY = 100  # values before the long window, for the usual level
# In normal noise of deviation 1, |x - 2y + z| has this mean once its largest tenth is left out...
TRIMMED_BEND = 1.611
# ... and the trimmed mean of 5 values has this times the error of their mean; of more, less.
TRIMMED_ERROR = 1.07
TRIM = 0.2  # share of a window at each end
BLOCK = 5
MIN_BLOCKS = 12  # rows per block, blocks: for noise that lasts longer than one row
LASTING = 0.4  # fits noise that decays by 0.3 or by 0.6 per row
MEDIAN_BEND = 1.652  # median of |x - 2y + z| in normal noise of deviation 1
SURE = 2.0  # standard errors by which a best level may be too high
HIGH = 0.9  # share of the earlier values below the high level
NOTHING = 1e-9  # share of a level that is only rounding
LOWEST = 32  # values remembered for the floor
MANY = 20
OUTLIER = 100  # values before a square is limited to this multiple of the usual one
POOLED = 3  # values in the long window of a sparse metric
MIN_SCATTER = 5  # values that tell the noise of a sparse metric that is not a share
ASSUMED_TRIALS = 100  # problems per evaluation where the log does not say
# Onset: a value is healthy if it has moved less than this share of the way from its reference,
# by a running median, so that one lucky row in a decline does not count.
HEALTHY_SHARE = 0.25
SMOOTH = 5


class Window:
    """The latest values of a track: their level, the references to compare with, and the error."""

    def __init__(self, track: "Track", size: int) -> None:
        self.track = track
        self.size = size
        self.now = 0.0
        self.best: float | None = None  # the highest level so far

    def refresh(self) -> None:
        self.now = level(self.track.recent[-self.size :])
        self.best = self.now if self.best is None else max(self.best, self.now)

    def reference(self, since: Since) -> float | None:
        """The level to compare with; None while it is unknown."""
        return self._reference(since)[0]

    def standard_error(self, since: Since) -> float:
        """Of the present level minus that reference."""
        reference, count = self._reference(since)
        inverse = 1 / self.size + 1 / max(count, 1)

        trials = self.track.trials
        if not trials or reference is None:
            error = math.sqrt(inverse) * self.track.noise
            return error if self.track.sparse else error * TRIMMED_ERROR

        # Two shares of `trials` problems each: under no change both come from the pooled share.
        pooled = (self.size * self.now + count * reference) / (self.size + count)
        return math.sqrt(bernoulli_variance(pooled) * inverse / trials)

    def _reference(self, since: Since) -> tuple[float | None, int]:
        """The level to compare with and the number of values behind it."""
        track = self.track
        if since in ("usual", "high"):
            before = track.recent[: -self.size]
            if len(before) < max(self.size, track.warmup):
                return None, 0  # too few values do not tell what is usual

            high = int(HIGH * len(before))
            return level(before) if since == "usual" else sorted(before)[high], len(before)

        if since == "start" or track.start is None:
            return track.start, track.warmup

        # A fall in the first rows leaves no high plateau behind, but a high start.
        levels = [(track.start, track.warmup)]
        for window in track.windows[-1:] if track.sparse else track.windows:
            if window.best is not None:
                # The highest of many windows is the luckiest: take off the luck to expect.
                num = 1 if track.sparse else track.num_seen // window.size
                luck = expected_maximum(num) / math.sqrt(window.size) * track.noise
                levels.append((window.best - luck, window.size))

        # Of a high level of few values and a lower one of many, the one that is surer to be high.
        return max(levels, key=lambda each: each[0] - SURE * track.noise / math.sqrt(each[1]))


class Track:
    """The past of one metric. The first `warmup` values are the baseline; the short window has
    `window` values, the others two and five times as many; of a sparse share (`pooled`) three."""

    def __init__(self, warmup: int, window: int, *, pooled: bool = False) -> None:
        self.warmup = warmup
        sizes = (1, POOLED if pooled else 1) if window == 1 else [window * k for k in WINDOWS]
        self.sizes = tuple(sizes)
        self.first: list[float] = []
        self.start: float | None = None
        self.recent: list[float] = []
        self.steps: list[int] = []  # of the recent values
        self.num_seen = 0
        self.windows = tuple(Window(self, size) for size in self.sizes)
        self.trials: float | None = None  # for a share: number of problems behind each value
        self.lowest: list[float] = []  # in order
        self.total = 0.0
        self.bends = 0.0  # sum of the squares of second differences
        self._noise: float | None = None

    def add(self, value: float, step: int = 0) -> None:
        self.num_seen += 1
        self.total += value
        self.recent.append(value)

        if self.num_seen > 2:
            bend = (value - 2 * self.recent[-2] + self.recent[-3]) ** 2
            usual = self.bends / max(self.num_seen - 3, 1)
            # One outlier must not hide everything that follows.
            self.bends += bend if self.num_seen < MANY else min(bend, OUTLIER * usual)

        self.steps.append(step)
        if len(self.recent) > MEMORY + self.sizes[-1]:
            del self.recent[0], self.steps[0]

        insort(self.lowest, value)
        del self.lowest[LOWEST:]

        if len(self.first) < self.warmup:
            self.first.append(value)
            self.start = level(self.first) if len(self.first) == self.warmup else None

        self._noise = None
        for window in self.windows:
            if len(self.recent) >= window.size:
                window.refresh()

    def window(self, scale: int) -> Window | None:
        """The short (0) to the long (-1) window; None until it is full."""
        return self.windows[scale] if len(self.recent) >= self.sizes[scale] else None

    @property
    def sparse(self) -> bool:
        return self.sizes[0] == 1

    @property
    def floor(self) -> float:
        """The value of a policy that has lost everything: 0, or the lowest percent if negative."""
        return min(0.0, self.lowest[min(self.num_seen // 100, len(self.lowest) - 1)])

    @property
    def noise(self) -> float:
        if self._noise is None:
            if self.trials:
                self._noise = self._binomial(self.trials)
            else:
                rms = math.sqrt(self.bends / max(self.num_seen - 2, 1) / 6)
                fast = max(rms, deviation(self.recent))

                slow = slow_deviation(self.recent)
                if slow > fast > 0:  # blocks see only a part of what lasts longer than they do
                    slow *= (slow / fast) ** LASTING

                self._noise = max(fast, slow)

            if self.sparse and not self.trials:
                # The scatter of two or three values may be zero by chance.
                if all(0 <= value <= 1 for value in self.recent):
                    self._noise = max(self._noise, self._binomial(ASSUMED_TRIALS))
                elif self.num_seen < MIN_SCATTER:
                    self._noise = max(map(abs, self.recent))  # so that no change exceeds it

        return self._noise

    def _binomial(self, trials: float) -> float:
        # From the number of problems: the scatter of a few values would mostly be their trend.
        return math.sqrt(max(map(bernoulli_variance, self.recent), default=0.0) / trials)

    def state(self) -> dict[str, Any]:
        best = [window.best for window in self.windows]
        return {
            "first": list(self.first),
            "recent": list(self.recent),
            "steps": list(self.steps),
            "best": best,
            "trials": self.trials,
            "seen": self.num_seen,
            "lowest": list(self.lowest),
            "total": self.total,
            "bends": self.bends,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.first = list(state["first"])
        self.recent = list(state["recent"])
        self.start = level(self.first) if len(self.first) == self.warmup else None
        self.steps = list(state["steps"])
        self.trials = state["trials"]
        self._noise = None
        self.num_seen = state["seen"]
        self.lowest = [*state["lowest"]]
        self.total = state["total"]
        self.bends = state["bends"]

        for window, best in zip(self.windows, state["best"]):
            window.best = best
            if len(self.recent) >= window.size:
                window.now = level(self.recent[-window.size :])


@dataclass(frozen=True)
class Symptom:
    """What one metric must show. Every limit that is set must hold, except `floor`.

    Args:
        metric: a name from `metrics.METRICS`.
        moved: up or down: by more than the limits and the noise. not_up: at most `by` above the
            reference, or no more than the noise. still: within `by` of the reference, or within
            `level` of zero. above or below: past `level`, wherever it started. absent: the run
            does not log it.
        by: change relative to the reference; 0.5 down is half lost, 1.0 up is doubled. What can be
            lost of a reward that may be negative is its distance from its lowest values.
        change: change in the metric's own unit, for shares that start near zero.
        level: the present value must also be past this.
        floor: a present value past this is enough: the backstop for a bad baseline.
        since: start is the run's first rows, best its highest plateau, usual its recent past, high
            what nine of ten recent values stayed below, run all of it: with above or below the
            mean of all values counts, with still the lowest of them.
        noise_share: share of the required noise margin; below 1 next to an independent symptom,
            since chance would have to move both.
        optional: counts as present in a run that never logs the metric.
    """

    metric: str
    moved: Move
    _: KW_ONLY
    by: float = 0.0
    change: float = 0.0
    level: float | None = None
    floor: float | None = None
    since: Since = "start"
    optional: bool = False
    noise_share: float = 1.0

    def __post_init__(self) -> None:
        for name, value, known in (("moved", self.moved, Move), ("since", self.since, Since)):
            if value not in get_args(known):
                raise ValueError(f"{name} = {value!r} is not one of {', '.join(get_args(known))}")

        if self.moved in ("above", "below") and not isinstance(self.level, int | float):
            raise ValueError(f"moved = {self.moved!r} needs a number as level, not {self.level!r}")

    def is_present(self, window: Window, noise: float) -> bool:
        """Whether the window shows it, by more than `noise` standard errors."""
        noise *= self.noise_share
        if self.moved in ("above", "below"):
            mean = window.track.total / window.track.num_seen
            now = mean if self.since == "run" else window.now
            return self._is_past(now, self.level)

        if self.floor is not None and self._is_past(window.now, self.floor):
            return True
        if self.moved == "still" and self.since == "run":
            return window.now - window.track.lowest[0] <= self.by * abs(window.now)

        reference = window.reference(self.since)
        if reference is None or (self.since == "high" and reference <= 0):
            return False

        distance = window.now - reference

        # A reward may be negative or near zero: relative to the larger of start and reference.
        required = self.by * max(abs(reference), abs(window.reference("start") or 0.0))
        if self.moved == "down":
            required = self.by * (reference - window.track.floor)
            short = reference - window.track.windows[0].now
            if short < max(required / 2, NOTHING * abs(reference)):
                return False  # a long window lags behind a rise and remembers what is over

        if self.moved == "still":
            near_zero = self.level is not None and abs(window.now) <= self.level
            if self.since == "best":  # a long window remembers what is over
                distance = window.track.windows[0].now - reference
            return near_zero or abs(distance) <= required

        if self.moved == "not_up":  # what a longer window shows has risen, too
            return distance <= required or not any(
                (before := each.reference(self.since)) is not None
                and each.now - before > noise * each.standard_error(self.since)
                for each in window.track.windows
                if len(window.track.recent) >= each.size
            )

        moved = distance if self.moved == "up" else -distance

        # Accuracy in percent: a change of a share is one of its level.
        unit = max(abs(reference), 1.0) if window.track.sparse else 1.0
        large = moved > 0 and moved >= max(required, self.change * unit)
        if not large or not self._is_past(window.now, self.level):
            return False

        return moved >= noise * window.standard_error(self.since)

    def text(self) -> str:
        """The symptom in a few words: "reward down by 50% from its best"."""
        since = {
            "start": "its start",
            "best": "its best",
            "usual": "its recent past",
            "high": "the highest tenth of its recent past",
            "run": "the whole run",
        }[self.since]

        name = self.metric.replace("_", " ")
        share = f"{self.by:.0%}"
        if self.moved in ("above", "below"):
            out = f"{name} {self.moved} {self.level:g}"
            out += " on average over the whole run" if self.since == "run" else ""
        elif self.moved == "absent":
            out = f"{name} is not logged"
        elif self.moved in ("up", "down"):
            limits = [share] * (self.by > 0) + [f"{self.change:g}"] * (self.change > 0)
            out = f"{name} {self.moved} by {' and '.join(limits)} from {since}"
            out += "" if self.level is None else f", past {self.level:g}"
        else:
            moved = "not up" if self.moved == "not_up" else "still"
            out = f"{name} {moved} (within {share} of {since})"

        return f"{out} (if logged)" if self.optional else out

    def onset(self, window: Window) -> int | None:
        """The first step of the change: the one after the last healthy value, or the oldest
        remembered; None for a symptom that is no change (not_up, still, a level from the start)."""
        if self.moved in ("above", "below") and self.level is not None:
            base = self.level
            sign = 1 if self.moved == "above" else -1
            margin = 0.0
        elif self.moved in ("up", "down") and (base := window.reference(self.since)) is not None:
            change = window.now - base
            sign = 1 if change > 0 else -1
            margin = HEALTHY_SHARE * abs(change)
        else:
            return None

        values = window.track.recent
        steps = window.track.steps
        width = 1 if window.track.sparse else SMOOTH
        medians = (median(values[max(k + 1 - width, 0) : k + 1]) for k in range(len(values)))
        healthy = (k for k, value in enumerate(medians) if (value - base) * sign < margin)
        last = max(healthy, default=-1)
        if last < 0 and self.moved in ("above", "below"):
            return None
        if width == 1 and last >= 0:  # the change came some time after the last good evaluation
            return steps[last] + 1

        # The first bad row is at most half a window before the first bad median.
        return steps[min(max(last + 1 - width // 2, 0), len(steps) - 1)]

    def _is_past(self, now: float, limit: float | None) -> bool:
        return limit is None or (now >= limit if self.moved in ("up", "above") else now <= limit)


def bernoulli_variance(share: float) -> float:
    return max(share * (1 - share), 0.0)  # 0 for what is not a share


def level(values: Sequence[float]) -> float:
    """The mean without the highest and the lowest fifth."""
    cut = int(TRIM * len(values))
    kept = sorted(values)[cut : len(values) - cut] if cut else values
    return sum(kept) / len(kept)


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(values) // 2  # twice as fast as statistics.median
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the noise, from second differences without the largest tenth, so that
    neither level, trend nor a sudden fall counts; few values get a surcharge."""
    bends = sorted(abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:]))
    if not bends:
        return 0.0

    kept = bends[: len(bends) - len(bends) // 10]
    return sum(kept) / len(kept) / TRIMMED_BEND * (1 + 1 / math.sqrt(len(bends)))


@lru_cache(maxsize=4096)
def expected_maximum(num: int) -> float:
    """Of so many normal values of deviation 1 (Blom 1958)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def slow_deviation(values: Sequence[float]) -> float:
    """The same from the means of blocks of rows, times the root of their size: larger than
    `deviation` where the noise lasts longer than one row, as with a curriculum. The median of
    their bends, since a fall may be as long as some blocks."""
    num = len(values) // BLOCK
    if num < MIN_BLOCKS:
        return 0.0

    last = values[-num * BLOCK :]
    means = [sum(last[k : k + BLOCK]) / BLOCK for k in range(0, num * BLOCK, BLOCK)]
    bends = [abs(a - 2 * b + c) for a, b, c in zip(means, means[1:], means[2:])]

    return median(bends) / MEDIAN_BEND * math.sqrt(BLOCK)


def is_finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < 1e150  # larger ones overflow in comparisons
