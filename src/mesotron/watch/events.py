"""What the watch says: one event for each failure seen, with the evidence for it.

Events are plain data. They go to events.jsonl, to the story, and to whoever acts on them.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["warn", "stop", "clear"]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One metric of an event: where it came from and where it is.

    Args:
        metric: our name.
        since: what it is compared with: start, best or usual; None for a level alone.
        before: that reference.
        now: the present value.
    """

    metric: str
    since: str | None
    before: float | None
    now: float


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that the watch saw.

    Args:
        step: the step of the row that showed it.
        detector: the detector's name.
        severity: warn, stop (the run is dead), or clear (what was warned of is over).
        diagnosis: one sentence.
        remedy: one sentence.
        changes: the remedy as data, see `detectors.Change`.
        evidence: the metrics that showed it.
    """

    step: int
    detector: str
    severity: Severity
    diagnosis: str
    remedy: str
    changes: tuple[dict[str, Any], ...] = ()
    evidence: tuple[Evidence, ...] = ()

    def record(self) -> dict[str, Any]:
        """The event as JSON holds it."""
        return asdict(self) | {"kind": "watch"}

    def sentence(self, with_remedy: bool = True) -> str:
        """The event in one line.

        Example:
            >>> seen = Evidence(metric="reward", since="best", before=0.71, now=0.14)
            >>> print(Event(step=512, detector="reward_collapse", severity="stop", diagnosis="it "
            ...     "fell", remedy="go back", evidence=(seen,)).sentence())
            step 512 stop, reward collapse: it fell (reward 0.71 to 0.14); go back
        """
        where = f"step {self.step} {self.severity}, {self.detector.replace('_', ' ')}"
        if self.severity == "clear":
            return f"{where}: it is over"
        shown = ", ".join(map(describe, self.evidence))
        told = f"{where}: {self.diagnosis}{f' ({shown})' if shown else ''}"
        return f"{told}; {self.remedy}" if with_remedy else told


def describe(evidence: Evidence) -> str:
    """A metric and how it moved, in a few words.

    Example:
        >>> describe(Evidence(metric="length", since="start", before=100.0, now=230.0))
        'length x2.3'
    """
    name, before, now = evidence.metric.replace("_", " "), evidence.before, evidence.now
    if before is None:
        return f"{name} {now:.3g}"
    if evidence.metric in ("length", "grad_norm", "entropy", "step_time") and before > 0:
        return f"{name} x{now / before:.2g}"
    return f"{name} {before:.3g} to {now:.3g}"
