"""What the watch looks for (`Detector`), what it reports (`Event`), and what the guard does
about it (`Action`).

Detectors are data: detectors.toml has every failure the watch knows.
Rules are relative to the run's own first rows or its best plateau; absolute levels are backstops.
Each detector names the public run or paper behind it. `engine` evaluates the rules. The limits that
decide on a stop were fitted on the tuning corpus of benchmarks/watch. A file of a user's own has
the same form.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from mesotron.config.base import from_plain
from mesotron.watch.tracks import Symptom

T = TypeVar("T")
Case = tuple[Symptom, ...]

PRIOR = 4  # alarms that a detector's record is mixed with
LEAST_ALARMS = 3  # that say how often it is right: the interval of 2 of 2 begins at 0.34
Z = 1.96  # of a 95% interval
Role = Literal["source", "symptom", "outcome"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part of a remedy: a change of a field of the training config, such as optim.lr."""

    field: str
    act: Literal["multiply", "set", "at_least"]
    value: Any

    def applied_to(self, old: Any) -> Any:
        if self.act == "multiply":
            return old * self.value
        if self.act == "at_least":
            return max(old, self.value)

        return self.value


SMALLER_STEP = Change(
    field="optim.lr",
    act="multiply",
    value=0.5,
)
KL_TO_START = Change(
    field="objective.beta",
    act="at_least",
    value=0.01,
)
TWO_PART = Change(
    field="reward.parts",
    act="set",
    value=("two_part",),
)
CO_REWARDING = Change(
    field="objective.name",
    act="set",
    value="corewarding",
)
COOLER = Change(
    field="rollout.temperature",
    act="multiply",
    value=0.8,
)
# Names that a file of detectors may use.
CHANGES = {
    "smaller_step": SMALLER_STEP,
    "kl_to_start": KL_TO_START,
    "two_part": TWO_PART,
    "co_rewarding": CO_REWARDING,
    "cooler": COOLER,
}


@dataclass(frozen=True, kw_only=True)
class Detector:
    """One failure.

    Args:
        name: also used in events and on the command line.
        cases: it warns when every symptom of any case is present.
        fatal: it stops when every symptom of any of these is present too; () never, ((),) always.
        diagnosis: what has happened, one sentence.
        remedy: what to do, one sentence.
        changes: the remedy as data.
        source: the public run, thread or paper behind it.
        patience: consecutive rows before a warning, in multiples of the patience setting.
        fatal_patience: the same before a stop.
        harmless: worth reporting, but the run still counts as healthy.
        role: a source damages the weights, so it explains what fails after it; an outcome is how
            any failure ends, so it is named as the cause only if nothing else was found.
        trust: probability that an alarm is right; None: its record in the corpora. Without one
            it is uncalibrated: it may warn, but not stop.
    """

    name: str
    cases: tuple[Case, ...]
    fatal: tuple[Case, ...] = ()
    diagnosis: str
    remedy: str
    changes: tuple[Change, ...] = ()
    source: str = ""
    patience: float = 1
    fatal_patience: float = 1
    harmless: bool = False
    role: Role = "symptom"
    trust: float | None = 1.0

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric it reads, in order."""
        names: dict[str, None] = {}
        for case in (*self.cases, *self.fatal):
            names |= dict.fromkeys(symptom.metric for symptom in case)

        return tuple(names)

    @property
    def may_stop(self) -> bool:
        return self.confidence("stop") is not None

    def confidence(self, severity: str) -> float | None:
        """The probability that an alarm is right; None if it is uncalibrated."""
        if self.trust is not None:
            return self.trust

        return share_right(alarms(self.name, severity), alarms("any", severity))


@cache
def record() -> dict[str, dict[str, tuple[int, int]]]:
    """Detector (or any) -> severity -> failed and healthy runs of the corpora in which it spoke,
    as `benchmarks/watch/calibrate.py` counted them."""
    return json.loads(Path(__file__).with_name("record.json").read_text(encoding="utf-8"))


def alarms(name: str, severity: str) -> tuple[int, int]:
    """Right and wrong alarms of a detector in the corpora."""
    right, wrong = record().get(name, {}).get(severity, (0, 0))
    return right, wrong


def share_right(own: tuple[int, int], of_all: tuple[int, int]) -> float | None:
    """Share of a detector's alarms that were right; None with fewer than `LEAST_ALARMS`. A short
    record counts together with `PRIOR` alarms that were right as often as those of all."""
    right, wrong = own
    if right + wrong < LEAST_ALARMS:
        return None

    all_right, all_wrong = of_all
    usual = (all_right + 1) / (all_right + all_wrong + 2)
    share = (right + PRIOR * usual) / (right + wrong + PRIOR)

    return round(share, 3)


def wilson(right: int, wrong: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    num = right + wrong
    middle = (right + Z**2 / 2) / (num + Z**2)
    half = Z / (num + Z**2) * math.sqrt(right * wrong / num + Z**2 / 4)

    return max(middle - half, 0.0), min(middle + half, 1.0)


def load_detectors(path: Path) -> tuple[Detector, ...]:
    """Detectors of a TOML file: tables [[detector]] with the fields of `Detector`, where a case is
    a list of tables with the fields of `Symptom`; metrics by our names or as they are logged.

    Example:
        [[detector]]
        name = "tool_errors"
        cases = [[{metric = "tools/failed", moved = "above", level = 0.3}]]
        diagnosis = "a third of the tool calls fail"
        remedy = "look at the sandbox"
    """
    try:
        return _read(path, dict(_SYMPTOMS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # TOML's among them
        raise ValueError(f"{path} does not hold detectors: {error}") from None


def _read(path: Path, symptoms: dict[str, Symptom]) -> tuple[Detector, ...]:
    """The detectors of a file; the symptoms that it names are added to `symptoms`."""
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, table in file.get("symptoms", {}).items():
        symptoms[name] = _named(table, Symptom, {})

    return tuple(_read_detector(table, symptoms) for table in file["detector"])


def _read_detector(table: dict[str, Any], symptoms: Mapping[str, Symptom]) -> Detector:
    cases = _read_cases(table.pop("cases", ()), symptoms)
    fatal = _read_cases(table.pop("fatal", ()), symptoms)
    changes = [_named(change, Change, CHANGES) for change in table.pop("changes", ())]
    if not cases:
        raise ValueError("a detector needs cases")

    plain = from_plain(Detector, table | {"cases": ()}, "a detector")
    return replace(
        plain,
        cases=cases,
        fatal=fatal,
        changes=tuple(changes),
    )


def _read_cases(cases: Sequence[Any], symptoms: Mapping[str, Symptom]) -> tuple[Case, ...]:
    read: list[Case] = []
    for case in cases:
        parts = [_named(symptom, Symptom, symptoms) for symptom in case]
        read.append(tuple(parts))

    return tuple(read)


def _named(value: Any, kind: type[T], names: Mapping[str, T]) -> T:
    """An entry that is given by its name or by its fields."""
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{value!r} is not one of {', '.join(names)}")
        return names[value]

    fields = dict(value)
    for key, item in value.items():
        if isinstance(item, list):
            fields[key] = tuple(item)

    return from_plain(kind, fields, f"a {kind.__name__.lower()}")


_SYMPTOMS: dict[str, Symptom] = {}
_BUILT_IN = _read(Path(__file__).with_suffix(".toml"), _SYMPTOMS)
DETECTORS = tuple(replace(detector, trust=None) for detector in _BUILT_IN)


def with_own(own: Sequence[Detector]) -> tuple[Detector, ...]:
    """The user's detectors, before ours; one with the name of ours replaces it."""
    detectors = list(own)
    names = {detector.name for detector in own}
    for detector in DETECTORS:
        if detector.name not in names:
            detectors.append(detector)

    return tuple(detectors)


def explain(name: str, detectors: Sequence[Detector] = DETECTORS) -> str:
    """Rule, corpus record, remedy and source of a detector, as `watch --explain` prints them."""
    by_name = {detector.name: detector for detector in detectors}
    if name not in by_name:
        raise ValueError(f"{name!r} is not a detector: choose one of {', '.join(by_name)}")

    detector = by_name[name]
    lines = [f"{name}: {detector.diagnosis}"]
    for case in detector.cases:
        lines.append(f"  warns if {_rule_text(case)}")
    for case in detector.fatal:
        lines.append(f"  stops in that case also if {_rule_text(case)}")

    changes = [f"{change.field} {change.act} {change.value}" for change in detector.changes]
    lines += [
        *_record_lines(detector),
        f"remedy: {detector.remedy}",
        f"automatic: {', '.join(changes) or 'nothing'}",
        f"source: {detector.source or 'your own'}",
    ]

    return "\n".join(lines)


def _rule_text(case: Case) -> str:
    return " and ".join(symptom.text() for symptom in case) or "always"


def _record_lines(detector: Detector) -> Iterator[str]:
    if detector.trust is not None:
        yield f"corpora: no record, trusted with {detector.trust:.2f}"
        return

    for severity in ("warn", "stop"):
        right, wrong = alarms(detector.name, severity)
        if severity == "stop" and not detector.fatal:
            yield "corpora: stop never, by its rule"
            continue

        share = detector.confidence(severity)
        record = f"corpora: {severity} in {right} failed and {wrong} healthy runs"
        if share is None:
            consequence = "it may not stop a run" if severity == "stop" else "take it as a hint"
            yield f"{record}, uncalibrated: {consequence}"
        else:
            low, high = wilson(right, wrong)
            yield f"{record}, probability {share:.2f}, 95% interval {low:.2f} to {high:.2f}"


# Rows of events.jsonl, whose keys are these fields

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
    began: int | None = None  # the first step of the change; None for what is no change

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
