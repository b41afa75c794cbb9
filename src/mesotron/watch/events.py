"""What the watch reports (`Event`) and what the guard does about it (`Action`): the rows of
events.jsonl, where their fields are the keys."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Severity = Literal["warn", "stop", "clear"]
# Key of an action in a trainer's log_history, where a resumed run and the readers look for it.
ACTION_KEY = "mesotron/guard"
AS_FACTOR = ("length", "grad_norm", "entropy", "step_time")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """How one metric of an event moved."""

    metric: str
    since: str | None  # the reference: start, best or usual; None for a level
    before: float | None  # its value
    now: float

    def text(self) -> str:
        name = self.metric.replace("_", " ")
        if self.before is None:
            return f"{name} {self.now:.3g}"
        if self.metric in AS_FACTOR and self.before > 0:
            return f"{name} x{self.now / self.before:.2g}"

        return f"{name} {self.before:.3g} to {self.now:.3g}"


@dataclass(frozen=True, kw_only=True)
class Event:
    """One finding of the watch.

    Args:
        step: the step of the row that showed it.
        detector: the detector's name.
        severity: warn, stop (the run is dead), or clear (a warning is over).
        diagnosis: one sentence.
        remedy: one sentence.
        changes: the remedy as data, see `detectors.Change`.
        evidence: the metrics that showed it.
        began: the first step of the change that showed it; None for a clear.
        confidence: share of such alarms that were right in the corpora; None for a clear.
    """

    step: int
    detector: str
    severity: Severity
    diagnosis: str
    remedy: str
    changes: tuple[dict[str, Any], ...] = ()
    evidence: tuple[Evidence, ...] = ()
    began: int | None = None
    confidence: float | None = None

    @property
    def title(self) -> str:
        """The detector's name in words."""
        return self.detector.replace("_", " ")

    def record(self) -> dict[str, Any]:
        """The event as a row of events.jsonl."""
        return asdict(self) | {"kind": "watch"}

    def sentence(self, with_remedy: bool = True) -> str:
        """The event in one line: "step 512 stop, reward collapse: ... (reward 0.71 to 0.14)"."""
        where = f"step {self.step} {self.severity}, {self.title}"
        if self.severity == "clear":
            return f"{where}: no longer present"

        text = f"{where}: {self.diagnosis}"
        if self.evidence:
            evidence = ", ".join(item.text() for item in self.evidence)
            text += f" ({evidence})"

        if with_remedy:
            return f"{text}; {self.remedy}"

        return text


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action of the guard in answer to an event."""

    step: int
    action: Literal["rollback", "stop"]
    detector: str
    attempt: int  # number of rollbacks so far, this one included
    checkpoint: int | None = None  # step of the restored checkpoint; None for a stop
    changes: tuple[dict[str, Any], ...] = ()  # {"field", "old", "new"} each
    refused: tuple[dict[str, Any], ...] = ()  # not possible in this trainer: {"field", "why"} each
    reason: str
    evidence: tuple[dict[str, Any], ...] = ()

    @property
    def is_rollback(self) -> bool:
        return self.action == "rollback"

    def record(self) -> dict[str, Any]:
        """The action as a row of events.jsonl."""
        return asdict(self) | {"kind": "guard"}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Action":
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in record:
                value = record[field.name]
                values[field.name] = tuple(value) if isinstance(value, list) else value

        wrong = f"not a guard action (it needs a step and a reason): {record}"
        try:
            action = cls(**values)
            action.sentence()  # reads what it changed
        except (KeyError, TypeError) as error:
            raise ValueError(wrong) from error

        if not isinstance(action.step, int) or not isinstance(action.checkpoint, int | None):
            raise ValueError(wrong)

        return action

    def sentence(self) -> str:
        """The action in one line: "step 70 rollback 1 to step 50: ...; optim.lr 0.01 to 0.005"."""

        if self.is_rollback:
            where = f" {self.attempt} to step {self.checkpoint}"
        else:
            where = ""

        parts = [f"step {self.step} {self.action}{where}: {self.reason}"]
        for change in self.changes:
            old = _text(change["old"])
            new = _text(change["new"])
            parts.append(f"{change['field']} {old} to {new}")

        for refusal in self.refused:
            parts.append(f"{refusal['field']} not changed: {refusal['why']}")

        return "; ".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"

    return str(value)
