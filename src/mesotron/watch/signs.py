"""One piece of evidence: a metric that moved, against the run's own past.

A sign is data. Whether it is shown is a comparison of a few numbers of a `tracks.Look`: the
present, a reference and the doubt between them. Nothing here knows a failure.
"""

from dataclasses import dataclass
from typing import Literal

from mesotron.watch.tracks import Look, Since

Move = Literal["up", "down", "not_up", "still", "above", "below"]


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What one metric must show. Every limit that is given must hold, except `floor`.

    Args:
        metric: a name from `metrics.METRICS`.
        moved: up or down: by more than the limits and the noise. not_up: at most `by` above the
            reference, or no more than the noise. still: within `by` of the reference, or within
            `level` of zero. above or below: past `level`, wherever it started.
        by: change relative to the reference; 0.5 down is half lost, 1.0 up is doubled.
        change: change in the metric's own unit, for shares that start near zero.
        level: the present value must also be past this.
        floor: a present value past this suffices by itself: the backstop where the baseline was
            sick already.
        since: start is the run's first rows, best its highest plateau, usual its recent past.
        beside: share of the noise that it asks for; below 1 beside another sign that has nothing
            to do with it, since chance would have to move both.
        optional: in a run that never logs the metric the sign counts as shown.

    Example:
        >>> from mesotron.watch.tracks import Track
        >>> track = Track(warmup=2, window=1)
        >>> for reward in [0.4, 0.5, 0.6, 0.6, 0.2]:
        ...     track.add(reward)
        >>> half_lost = Sign(metric="reward", moved="down", by=0.5, since="best")
        >>> half_lost.shown(track.look(0), noise=0.0)
        True
    """

    metric: str
    moved: Move
    by: float = 0.0
    change: float = 0.0
    level: float | None = None
    floor: float | None = None
    since: Since = "start"
    optional: bool = False
    beside: float = 1.0

    def shown(self, look: Look, noise: float) -> bool:
        """Whether the look shows it.

        Args:
            look: the metric at one scale.
            noise: how many standard errors a change must be.
        """
        noise *= self.beside
        if self.moved in ("above", "below"):
            return self._past(look.now, self.level)
        if self.floor is not None and self._past(look.now, self.floor):
            return True
        reference = look.reference(self.since)
        if reference is None:
            return False
        distance = look.now - reference
        # A reward may be negative or near zero: relative to the larger of start and reference.
        enough = self.by * max(abs(reference), abs(look.reference("start") or 0.0))
        if self.moved == "still":
            near = self.level is not None and abs(look.now) <= self.level
            return near or abs(distance) <= enough
        if self.moved == "not_up":
            return distance <= enough or distance <= noise * look.doubt(self.since)
        gone = distance if self.moved == "up" else -distance
        if gone <= 0 or gone < max(enough, self.change) or not self._past(look.now, self.level):
            return False
        return gone >= noise * look.doubt(self.since)

    def _past(self, now: float, limit: float | None) -> bool:
        if limit is None:
            return True
        return now >= limit if self.moved in ("up", "above") else now <= limit
