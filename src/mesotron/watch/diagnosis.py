"""The diagnosis of a run: its phases, the cause of a failure, and what was spent after it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from mesotron.watch.detectors import Detector
from mesotron.watch.engine import Engine
from mesotron.watch.events import Action, Event, Evidence
from mesotron.watch.metrics import METRICS, Row, canonical
from mesotron.watch.tracks import Since

Condition = Literal["healthy", "drifting", "dead"]

PLATEAU = 0.05  # within this share of the best reward
# Rows after the first stop in which another stop may still be the cause: as many as a warning
# lasts. What a dead run does later (repeat itself, starve) did not kill it.
TOGETHER = 12
# The metrics to quote and their reference; all but the first two only if they moved.
QUOTED: tuple[tuple[str, Since], ...] = (
    ("reward", "best"), ("heldout", "best"), ("zero_signal", "start"), ("formatted", "best"),
    ("top_share", "start"), ("length", "start"), ("entropy", "start"), ("repetition", "start"),
)  # fmt: skip
MOVED = 0.25


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps first to last in one condition."""

    condition: Condition
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What happened in a run."""

    phases: tuple[Phase, ...]  # in order, without gaps
    cause: str | None = None  # a detector; None in a healthy run
    diagnosis: str = ""  # the cause's sentences
    remedy: str = ""
    numbers: tuple[Evidence, ...] = ()  # how the quoted metrics ended
    useful_step: int | None = None  # the last step that improved the model; None unless it died
    wasted: float | None = None  # share of the cost after it
    unit: str = "steps"  # of the cost: time, tokens or steps
    events: tuple[Event, ...] = ()
    blind: dict[str, tuple[str, ...]]  # detectors that could not run -> metrics that they lack
    notes: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()

    @property
    def condition(self) -> Condition:
        return self.phases[-1].condition

    def record(self) -> dict[str, Any]:
        out = asdict(self) | {"condition": self.condition, "text": self.text()}
        del out["actions"]
        events = [event.record() for event in self.events]
        return out | {"events": events, "acts": [action.record() for action in self.actions]}

    def text(self) -> str:
        text = ", ".join(
            f"dead after step {phase.first}" if phase.condition == "dead"
            else f"steps {phase.first}-{phase.last} {phase.condition}" for phase in self.phases
        )  # fmt: skip
        for action in self.actions:
            if action.action == "rollback":
                text += f", rolled back from step {action.step} to {action.checkpoint}"
        if self.numbers:
            text += ": " + ", ".join(evidence.text() for evidence in self.numbers)
        if self.cause:
            text += f"; cause: {self.cause.replace('_', ' ')}"
        if self.wasted is not None:
            share = f"{self.wasted:.0%} of the {self.unit}"
            text += f"; {share} came after the last useful step, {self.useful_step}"
        return text


def diagnose(
    rows: Sequence[Row],
    engine: Engine,
    events: Sequence[Event],
    notes: Sequence[str] = (),
    actions: Sequence[Action] = (),
) -> Diagnosis:
    """Diagnose a run from its rows (at least one, each with its step), the engine that has read
    them, its events, and the actions of a guard."""
    detectors = {detector.name: detector for detector in engine.detectors}
    harmful = [event for event in events if not detectors[event.detector].harmless]
    rollbacks = [action for action in actions if action.action == "rollback"]
    phases = find_phases(harmful, int(rows[0]["step"]), int(rows[-1]["step"]), rollbacks)
    condition, death = phases[-1].condition, phases[-1].first
    last_rollback = max((action.step for action in rollbacks), default=-1)
    harmful = [event for event in harmful if event.step > last_rollback]
    if condition == "dead":
        harmful = _events_near_death(harmful, rows, death)
    cause = _find_cause(harmful, engine.detectors, condition)
    useful, wasted, unit = None, None, "steps"
    if cause and condition == "dead":
        useful = _last_useful_step(rows, harmful, cause, death)
        wasted, unit = _cost_after(rows, useful)
    return Diagnosis(
        phases=phases,
        cause=cause.name if cause else None,
        diagnosis=cause.diagnosis if cause else "",
        remedy=cause.remedy if cause else "",
        numbers=_quoted_numbers(engine, condition == "healthy"),
        useful_step=useful,
        wasted=wasted,
        unit=unit,
        events=tuple(events),
        blind=engine.blind(),
        notes=tuple(notes),
        actions=tuple(actions),
    )


def find_phases(
    events: Sequence[Event], first: int, last: int, rollbacks: Sequence[Action] = ()
) -> tuple[Phase, ...]:
    """Healthy until a warning, drifting until all warnings are cleared, dead from a stop to a
    rollback."""
    phases: list[Phase] = []
    condition: Condition = "healthy"
    start, warned = first, set[str]()
    items: list[Event | Action] = sorted([*events, *rollbacks], key=lambda item: item.step)
    for item in items:
        if isinstance(item, Action):
            warned.clear()
            now: Condition = "healthy"
        else:
            (warned.discard if item.severity == "clear" else warned.add)(item.detector)
            is_dead = condition == "dead" or item.severity == "stop"
            now = "dead" if is_dead else "drifting" if warned else "healthy"
        if now != condition:
            # A run that fails at its first row has no healthy phase.
            if item.step > start:
                phases.append(Phase(condition=condition, first=start, last=item.step))
            condition, start = now, item.step
    return (*phases, Phase(condition=condition, first=start, last=last))


def _events_near_death(events: Sequence[Event], rows: Sequence[Row], death: int) -> list[Event]:
    """Events up to a few rows after the first stop, or of evaluations up to the second one, since
    that is how long their detectors wait."""
    later = [row for row in rows if row["step"] > death]
    evaluations = [row for row in later if any(METRICS[name].sparse for name in canonical(row))]
    soon, next_evaluations = later[:TOGETHER], evaluations[:2]
    last = soon[-1]["step"] if soon else death
    last_sparse = max(last, next_evaluations[-1]["step"] if next_evaluations else death)
    sparse = {event.detector for event in events
              if any(METRICS[item.metric].sparse for item in event.evidence)}  # fmt: skip
    return [e for e in events if e.step <= (last_sparse if e.detector in sparse else last)]


def _find_cause(
    events: Sequence[Event], detectors: Sequence[Detector], condition: Condition
) -> Detector | None:
    """The first detector in table order among those that stopped the run, or still warn."""
    if condition == "healthy":
        return None
    severity = "stop" if condition == "dead" else "warn"
    latest = {event.detector: event.severity for event in events}
    return next(detector for detector in detectors if latest.get(detector.name) == severity)


def _last_useful_step(
    rows: Sequence[Row], events: Sequence[Event], cause: Detector, death: int
) -> int:
    """The last step before death at which the reward was on its best plateau; where the reward did
    not fall (it was hacked, or never meant anything), the first event of the cause."""
    own = [event for event in events if event.detector == cause.name]
    fatal = [item for event in own if event.severity == "stop" for item in event.evidence]
    numbers = [(int(row["step"]), canonical(row)) for row in rows if row["step"] <= death]
    rewards = [(step, values["reward"]) for step, values in numbers if "reward" in values]
    fell = any(item.metric == "reward" and item.since == "best" for item in fatal)
    if not fell or len(rewards) < 3:
        return min(event.step for event in own)
    values = [value for _, value in rewards]
    smooth = [median(values[max(k - 2, 0) : k + 3]) for k in range(len(values))]
    limit = max(smooth) - PLATEAU * abs(max(smooth))
    return max(step for (step, _), value in zip(rewards, smooth) if value >= limit)


def _cost_after(rows: Sequence[Row], step: int) -> tuple[float, str]:
    """Share of the cost after a step, and its unit: seconds if logged, else tokens, else steps."""
    numbers = [(row["step"], canonical(row)) for row in rows]
    timed = [(at, values["step_time"]) for at, values in numbers if "step_time" in values]
    total = sum(cost for _, cost in timed)
    if len(timed) * 2 > len(rows) and total > 0:
        return sum(cost for at, cost in timed if at > step) / total, "time"
    for unit, series in (
        ("tokens", [(at, values["tokens"]) for at, values in numbers if "tokens" in values]),
        ("steps", [(at, at) for at, _ in numbers]),
    ):
        if series and series[-1][1] > min(series[0][1], 0.0):
            before = max((count for at, count in series if at <= step), default=0.0)
            return (series[-1][1] - before) / (series[-1][1] - min(series[0][1], 0.0)), unit
    return 0.0, "steps"


def _quoted_numbers(engine: Engine, healthy: bool) -> tuple[Evidence, ...]:
    out = []
    for place, (name, since) in enumerate(QUOTED):
        since = "start" if healthy else since
        window = engine.window(name)
        before = window.reference(since) if window else None
        if window is None or before is None:
            continue
        moved = abs(window.now - before) >= MOVED * max(abs(before), abs(window.now))
        if place < 2 or (moved and not healthy):
            out.append(Evidence(metric=name, since=since, before=before, now=window.now))
    return tuple(out)
