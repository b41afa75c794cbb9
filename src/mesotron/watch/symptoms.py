"""What one metric must show (`Symptom`), as in "reward down by 50% from its best"."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from mesotron.watch.noise import median
from mesotron.watch.tracks import Since, Track, TrackWindow

Move = Literal["up", "down", "not_up", "still", "above", "below", "absent"]

NOTHING = 1e-9  # share of a level that is only rounding
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
}


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
        if self.is_level:
            return self._is_past(self._present_level(window), self.level)
        if self.floor is not None and self._is_past(window.now, self.floor):
            return True
        if self.moved == "still" and self.since == "run":
            return window.now - window.track.lowest[0] <= self.by * abs(window.now)

        reference = window.reference(self.since)
        if reference is None or (self.since == "high" and reference <= 0):
            return False
        if self.moved == "still":
            return self._is_still(window, reference)

        noise *= self.noise_share
        if self.moved == "not_up":
            return self._is_not_up(window, reference, noise)
        if self.moved == "down":
            return self._is_down(window, reference, noise)

        required = self._relative(window, reference)
        return self._exceeds(window, reference, required, noise)

    def _present_level(self, window: TrackWindow) -> float:
        if self.since == "run":
            return window.track.total / window.track.num_seen
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
        required = self.by * (reference - window.track.floor)

        # A long window lags behind a rise and remembers what is over.
        latest = reference - window.track.windows[0].now
        if latest < max(required / 2, NOTHING * abs(reference)):
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
            return self.level, 1 if self.moved == "above" else -1, 0.0
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
