"""What the watch says and does: events for failures seen, acts for what the guard did about them.

Both are plain data. They go to events.jsonl, to the story, and to whoever reads those.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Severity = Literal["warn", "stop", "clear"]
# Key of an act in a trainer's log_history, where a resumed run finds it, and a reader.
ACT = "mesotron/guard"


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
        changes: the remedy as data, see `remedies.Change`.
        evidence: the metrics that showed it.
        began: the first step of the change that showed it, see `onset`; None where it is over.
    """

    step: int
    detector: str
    severity: Severity
    diagnosis: str
    remedy: str
    changes: tuple[dict[str, Any], ...] = ()
    evidence: tuple[Evidence, ...] = ()
    began: int | None = None

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


@dataclass(frozen=True, kw_only=True)
class Act:
    """One thing that the guard did.

    Args:
        step: at which.
        action: rollback (gone back and on with a remedy) or stop (given up).
        detector: whose event it answers.
        attempt: how many times the run has now been gone back; of a stop, how many times it had.
        checkpoint: step of the checkpoint that was restored; None for a stop.
        changes: what was changed: {"field", "old", "new"} each.
        refused: what could not be changed in this trainer: {"field", "why"} each.
        reason: one sentence.
        evidence: of the event.
    """

    step: int
    action: Literal["rollback", "stop"]
    detector: str
    attempt: int
    checkpoint: int | None = None
    changes: tuple[dict[str, Any], ...] = ()
    refused: tuple[dict[str, Any], ...] = ()
    reason: str
    evidence: tuple[dict[str, Any], ...] = ()

    def record(self) -> dict[str, Any]:
        """The act as JSON holds it."""
        return asdict(self) | {"kind": "guard"}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Act":
        """The act that `record` wrote.

        Example:
            >>> act = Act(step=9, action="stop", detector="repetition", attempt=0, reason="why")
            >>> Act.from_record(act.record()) == act
            True
        """
        names = {item.name for item in fields(cls)}
        found: dict[str, Any] = {key: record[key] for key in names & record.keys()}
        if not isinstance(found.get("step"), int) or not {"action", "detector", "attempt",
                                                          "reason"} <= found.keys():  # fmt: skip
            raise ValueError(f"this is no act of a guard, which has a step and a reason: {record}")
        found |= {key: tuple(x) for key, x in found.items() if isinstance(x, list)}
        return cls(**found)

    def sentence(self) -> str:
        """The act in one line.

        Example:
            >>> change = {"field": "optim.lr", "old": 0.01, "new": 0.005}
            >>> print(Act(step=70, action="rollback", detector="repetition", attempt=1,
            ...     checkpoint=50, changes=(change,), reason="repetition").sentence())
            step 70 rollback 1 to step 50: repetition; optim.lr 0.01 to 0.005
        """
        where = f" {self.attempt} to step {self.checkpoint}" if self.action == "rollback" else ""
        done = [f"{one['field']} {show(one['old'])} to {show(one['new'])}" for one in self.changes]
        left = [f"{one['field']} not changed: {one['why']}" for one in self.refused]
        return "; ".join([f"step {self.step} {self.action}{where}: {self.reason}", *done, *left])


def show(value: Any) -> str:
    """A setting in a few letters."""
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
