"""What a rule sees: the past of a metric (`Track`), its noise, and what it shows (`Symptom`).

A short window sees a fast collapse, a long one a slow decline through the noise of small batches.
Their level is a trimmed mean, so one outlier moves nothing. For a sparse metric (an evaluation)
they are one value and the mean of three. The noise is measured by second differences x - 2y + z,
in which neither a level nor a trend shows.
"""

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

Since = Literal["start", "best", "usual", "high", "run", "range"]

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

# Noise
# In normal noise of deviation 1, |x - 2y + z| has this mean once its largest tenth is left out...
TRIMMED_BEND = 1.611
# ... and the trimmed mean of 5 values has this times the error of their mean; of more, less.
TRIMMED_ERROR = 1.07
TRIM = 0.2  # share of a window at each end
MEDIAN_BEND = 1.652  # median of |x - 2y + z| in normal noise of deviation 1
BEND_VARIANCE = 6  # variance of x - 2y + z: 1 + 4 + 1
# Rows per block and blocks, for noise that lasts longer than one row.
BLOCK = 5
MIN_BLOCKS = 12
LARGEST = 1e150  # larger numbers overflow in comparisons

# Symptoms
Move = Literal["up", "down", "not_up", "still", "above", "below", "absent"]

ROUNDING = 1e-9  # share of a level
FLOAT32 = 1e-6  # the same of means that were computed in 32 bits
NOTHING = 1e-7  # the mean of rewards that were normalized, in 32 bits
# Onset: a value is healthy if it has moved less than this share of the way from its reference,
# by a running median, so that one lucky row in a decline does not count.
HEALTHY_SHARE = 0.25
SMOOTH = 5
REFERENCES: dict[Since, str] = {
    "start": "its start",
    "best": "its best",
    "usual": "its recent past",
    "high": "the highest tenth of its recent past",
    "run": "the whole run",
    "range": "its range, 0 its lowest and 1 its highest value",
}


# The level of a few noisy values, and how large their noise is


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the highest and the lowest fifth."""
    cut = int(TRIM * len(values))
    if not cut:
        return sum(values) / len(values)

    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


def median(values: Sequence[float]) -> float:
    """As statistics.median, in half the time."""
    ordered = sorted(values)
    half = len(values) // 2
    if len(values) % 2:
        return ordered[half]

    return (ordered[half - 1] + ordered[half]) / 2


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of the noise, whatever the level and the trend.

    The largest tenth of the bends is left out, so that a sudden fall does not count; few values get
    a surcharge.
    """
    sizes = sorted(_bends(values))
    if not sizes:
        return 0.0

    num_large = len(sizes) // 10
    kept = sizes[: len(sizes) - num_large]
    surcharge = 1 + 1 / math.sqrt(len(sizes))

    return sum(kept) / len(kept) / TRIMMED_BEND * surcharge


def slow_deviation(values: Sequence[float]) -> float:
    """The same from the means of blocks of rows, times the root of their size.

    It is larger than `deviation` where the noise lasts longer than one row, as with a curriculum.
    It takes the median of the bends, since a fall may be as long as some blocks.
    """
    num = len(values) // BLOCK
    if num < MIN_BLOCKS:
        return 0.0

    last = values[-num * BLOCK :]
    means = []
    for start in range(0, num * BLOCK, BLOCK):
        means.append(sum(last[start : start + BLOCK]) / BLOCK)

    return median(_bends(means)) / MEDIAN_BEND * math.sqrt(BLOCK)


def _bends(values: Sequence[float]) -> list[float]:
    return [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:])]


@lru_cache(maxsize=4096)
def expected_maximum(num: int) -> float:
    """Of so many normal values of deviation 1 (Blom 1958)."""
    if num <= 1:
        return 0.0

    share = (num - 0.375) / (num + 0.25)
    return NormalDist().inv_cdf(share)


def bernoulli_variance(share: float) -> float:
    return max(share * (1 - share), 0.0)  # 0 for what is not a share


def is_finite(value: float) -> bool:
    return math.isfinite(value) and abs(value) < LARGEST


# The past of one metric


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
        self._references: dict[Since, Reference] = {}  # since the last value

    def refresh(self) -> None:
        self._references = {}
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
        reference = self._references.get(since)
        if reference is None:
            reference = self._find_reference(since)
            self._references[since] = reference

        return reference

    def _find_reference(self, since: Since) -> Reference:
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

        self.sparse = window == 1
        self.longest = len(self.sizes) - 1
        self.first: list[float] = []
        self.start: float | None = None
        self.recent: list[float] = []
        self.steps: list[int] = []  # of the recent values
        self.num_seen = 0
        self.windows = tuple(TrackWindow(self, size) for size in self.sizes)
        self.trials: float | None = None  # for a share: number of problems behind each value
        self.lowest: list[float] = []  # in order
        self.highest = -math.inf
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
        self.highest = max(self.highest, value)

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
        """The short (0) to the long window; None until it is full."""
        window = self.windows[min(scale, self.longest)]
        if len(self.recent) < window.size:
            return None

        return window

    @property
    def floor(self) -> float:
        """The value of a policy that has lost everything: 0, or the lowest percent if negative."""
        place = min(self.num_seen // PERCENT, len(self.lowest) - 1)
        return min(0.0, self.lowest[place])

    @property
    def spread(self) -> float:
        """The highest value so far less the lowest."""
        if not self.lowest:
            return 0.0
        return self.highest - self.lowest[0]

    @property
    def is_constant(self) -> bool:
        """Whether every value was the same, up to rounding."""
        largest = max(map(abs, (self.highest, *self.lowest[:1])))
        return self.spread <= max(FLOAT32 * largest, NOTHING)

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
            "highest": self.highest,
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
        self.highest = state["highest"]
        self.total = state["total"]
        self.bends = state["bends"]
        self._noise = None

        for window, best in zip(self.windows, state["best"]):
            window.best = best
            if len(self.recent) >= window.size:
                window.now = trimmed_mean(self.recent[-window.size :])


# What one metric must show


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
            mean of all values counts, with still all of them. With above or below, best is about
            the highest level so far, and range about the place between the lowest value so far (0)
            and the highest (1).
        rows: values that must have been seen.
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
    rows: int = 0
    optional: bool = False
    noise_share: float = 1.0

    def __post_init__(self) -> None:
        _require_one_of("moved", self.moved, get_args(Move))
        _require_one_of("since", self.since, get_args(Since))
        if self.is_level and not isinstance(self.level, int | float):
            raise ValueError(f"moved = {self.moved!r} needs a number as level, not {self.level!r}")

    @property
    def is_level(self) -> bool:
        """Whether it is about a level, wherever the metric started."""
        return self.moved in ("above", "below")

    # Is it there?

    def is_present(self, window: TrackWindow, noise: float) -> bool:
        """Whether the window shows it, by more than `noise` standard errors."""
        if window.track.num_seen < self.rows:
            return False
        if self.is_level:
            return self._is_past(self._present_level(window), self.level)
        if self.floor is not None and self._is_past(window.now, self.floor):
            return True
        if self.moved == "still" and self.since == "run":
            return window.track.spread <= self.by * abs(window.now)

        reference = window.reference(self.since)
        if reference is None or (self.since == "high" and reference <= 0):
            return False
        if self.moved == "still":
            return self._is_still(window, reference)

        return self._has_moved(window, reference, noise * self.noise_share)

    def _has_moved(self, window: TrackWindow, reference: float, noise: float) -> bool:
        """Whether the window differs from the reference in the way of `moved`."""
        if self.moved == "not_up":
            return self._is_not_up(window, reference, noise)
        if self.moved == "down":
            return self._is_down(window, reference, noise)

        if window.now <= reference:
            return False

        required = self._relative(window, reference)
        return self._exceeds(window, reference, required, noise)

    def _present_level(self, window: TrackWindow) -> float:
        """What is compared with `level`; NaN, which is never past it, where there is nothing."""
        track = window.track
        if self.since == "run":
            return track.total / track.num_seen
        if self.since == "best":
            return window.now if window.best is None else window.best
        if self.since == "range":
            return math.nan if track.is_constant else (window.now - track.lowest[0]) / track.spread

        return window.now

    def _relative(self, window: TrackWindow, reference: float) -> float:
        """The change that `by` asks for; a reward may be negative or near zero."""
        start = window.reference("start") or 0.0
        return self.by * max(abs(reference), abs(start))

    def _is_still(self, window: TrackWindow, reference: float) -> bool:
        if self.level is not None and abs(window.now) <= self.level:
            return True

        now = window.now
        if self.since == "best":  # a long window remembers what is over
            now = window.track.windows[0].now

        return abs(now - reference) <= self._relative(window, reference)

    def _is_not_up(self, window: TrackWindow, reference: float, noise: float) -> bool:
        if window.now - reference <= self._relative(window, reference):
            return True

        # What a longer window shows has risen, too.
        return not any(self._has_risen(each, noise) for each in window.track.windows)

    def _has_risen(self, window: TrackWindow, noise: float) -> bool:
        if len(window.track.recent) < window.size:
            return False

        before = window.reference(self.since)
        if before is None:
            return False

        return window.now - before > noise * window.standard_error(self.since)

    def _is_down(self, window: TrackWindow, reference: float, noise: float) -> bool:
        if window.now >= reference:
            return False

        required = self.by * (reference - window.track.floor)

        # A long window lags behind a rise and remembers what is over.
        latest = reference - window.track.windows[0].now
        if latest < max(required / 2, ROUNDING * abs(reference)):
            return False

        return self._exceeds(window, reference, required, noise)

    def _exceeds(
        self, window: TrackWindow, reference: float, required: float, noise: float
    ) -> bool:
        """Whether a move up or down is as large as is required, and larger than the noise."""
        moved = window.now - reference
        if self.moved == "down":
            moved = -moved

        # Accuracy in percent: a change of a share is one of its level.
        unit = max(abs(reference), 1.0) if window.track.sparse else 1.0
        if moved <= 0 or moved < max(required, self.change * unit):
            return False
        if not self._is_past(window.now, self.level):
            return False

        return moved >= noise * window.standard_error(self.since)

    def _is_past(self, now: float, limit: float | None) -> bool:
        if limit is None:
            return True
        if self.moved in ("up", "above"):
            return now >= limit

        return now <= limit

    # In words

    def text(self) -> str:
        """The symptom in a few words: "reward down by 50% from its best"."""
        text = f"{self.metric.replace('_', ' ')} {self._move_text()}"
        if self.optional:
            return f"{text} (if logged)"

        return text

    def _move_text(self) -> str:
        since = REFERENCES[self.since]
        if self.moved == "absent":
            return "is not logged"

        if self.is_level:
            text = f"{self.moved} {self.level:g}"
            if self.since == "run":
                return f"{text} on average over {since}"
            if self.since == "range":
                return f"{text} of {since}"
            if self.since == "best":
                return f"{text} at {since}"

            return text

        if self.moved in ("not_up", "still"):
            moved = self.moved.replace("_", " ")
            return f"{moved} (within {self.by:.0%} of {since})"

        limits = []
        if self.by > 0:
            limits.append(f"{self.by:.0%}")
        if self.change > 0:
            limits.append(f"{self.change:g}")

        text = f"{self.moved} by {' and '.join(limits)} from {since}"
        if self.level is None:
            return text

        return f"{text}, past {self.level:g}"

    # When did it begin?

    def onset(self, window: TrackWindow) -> int | None:
        """The first step of the change: the one after the last healthy value, or the oldest
        remembered; None for a symptom that is no change (not_up, still, a level from the start)."""
        change = self._change(window)
        if change is None:
            return None

        last = _last_healthy(window.track, *change)
        if last is None and self.is_level:
            return None

        steps = window.track.steps
        if window.track.sparse:
            # The change came some time after the last good evaluation.
            if last is None:
                return steps[0]

            return steps[last] + 1

        # The first bad row is at most half a window before the first bad median.
        first = 0 if last is None else last + 1
        place = max(first - SMOOTH // 2, 0)
        return steps[min(place, len(steps) - 1)]

    def _change(self, window: TrackWindow) -> tuple[float, int, float] | None:
        """Where the change starts from, its sign, and how far a healthy value may have moved."""
        if self.is_level and self.level is not None:
            level = self.level
            if self.since == "range":
                level = window.track.lowest[0] + self.level * window.track.spread
            return level, 1 if self.moved == "above" else -1, 0.0
        if self.moved not in ("up", "down"):
            return None

        reference = window.reference(self.since)
        if reference is None:
            return None

        change = window.now - reference
        return reference, 1 if change > 0 else -1, HEALTHY_SHARE * abs(change)


def _last_healthy(track: Track, base: float, sign: int, margin: float) -> int | None:
    """The place of the last value that had not moved by `margin` from `base`."""
    width = 1 if track.sparse else SMOOTH
    for place in reversed(range(len(track.recent))):
        values = track.recent[max(place + 1 - width, 0) : place + 1]
        if (median(values) - base) * sign < margin:
            return place

    return None


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} = {value!r} is not one of {', '.join(known)}")
