"""A run told in words: its phases, what killed it, and what was spent after it had died.

Made from the rows, the engine that read them and the events it gave; it judges nothing anew.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from mesotron.watch.detectors import Detector
from mesotron.watch.engine import Engine
from mesotron.watch.events import Act, Event, Evidence, describe
from mesotron.watch.metrics import METRICS, Row, canonical
from mesotron.watch.tracks import Since

Condition = Literal["healthy", "drifting", "dead"]

# A plateau still counts as the best one within this share of the best reward.
PLATEAU = 0.05
# Rows after the first stop in which another still counts as told at once with it: as many as a
# warning lasts. What a dead run does later (it repeats itself, it starves) did not kill it.
AT_ONCE = 12
# What the story quotes of a sick run's end, and against what; all but the first two if they moved.
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
class Story:
    """What happened in a run.

    Args:
        phases: in order, without gaps.
        cause: the detector that is called the cause, None in a healthy run.
        diagnosis: its sentence.
        remedy: its sentence.
        numbers: how the quoted metrics ended.
        useful_step: the last step that the run gained from, None unless it died.
        wasted: share of the cost that came after it.
        unit: what the cost was counted in: time, tokens or steps.
        events: everything that was told.
        blind: detectors that could not run -> metrics that they lack.
        notes: what else to know.
        acts: everything that the guard did.
    """

    phases: tuple[Phase, ...]
    cause: str | None = None
    diagnosis: str = ""
    remedy: str = ""
    numbers: tuple[Evidence, ...] = ()
    useful_step: int | None = None
    wasted: float | None = None
    unit: str = "steps"
    events: tuple[Event, ...] = ()
    blind: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    acts: tuple[Act, ...] = ()

    @property
    def condition(self) -> Condition:
        """How it ended."""
        return self.phases[-1].condition

    def record(self) -> dict[str, Any]:
        """The story as JSON holds it."""
        out = asdict(self) | {"condition": self.condition, "text": self.text()}
        told = {"events": [event.record() for event in self.events]}
        return out | told | {"acts": [act.record() for act in self.acts]}

    def text(self) -> str:
        """The story in one sentence."""
        parts = []
        for phase in self.phases:
            dead = phase.condition == "dead"
            span = f"steps {phase.first}-{phase.last} {phase.condition}"
            parts.append(f"dead after step {phase.first}" if dead else span)
        told = ", ".join(parts)
        told += "".join(f", gone back from step {act.step} to {act.checkpoint}"
                        for act in self.acts if act.action == "rollback")  # fmt: skip
        ends = ", ".join(map(describe, self.numbers))
        told += f": {ends}" if ends else ""
        if self.cause:
            told += f"; cause: {self.cause.replace('_', ' ')}"
        if self.wasted is not None:
            told += (
                f"; {self.wasted:.0%} of the {self.unit} came after the last useful step, "
                f"{self.useful_step}"
            )
        return told


def tell(
    rows: Sequence[Row],
    engine: Engine,
    events: Sequence[Event],
    notes: Sequence[str] = (),
    acts: Sequence[Act] = (),
) -> Story:
    """Tell a run.

    Args:
        rows: its rows in order, each with its step; at least one.
        engine: the engine that has read them.
        events: what it said.
        notes: what a reader noted.
        acts: what a guard did; from a rollback on the run is healthy until something new is said.

    Returns:
        The story.

    Example:
        >>> engine, rewards = Engine(), [0.7] * 30 + [0.1] * 30
        >>> rows = [{"step": k, "reward": r} for k, r in enumerate(rewards)]
        >>> events = [event for row in rows for event in engine.update(row)]
        >>> print(tell(rows, engine, events).text())
        steps 0-34 healthy, dead after step 34: reward 0.7 to 0.1; cause: reward collapse; 51% of \
the steps came after the last useful step, 29
    """
    detectors = {detector.name: detector for detector in engine.detectors}
    harmful = [event for event in events if not detectors[event.detector].harmless]
    phases = find_phases(harmful, int(rows[0]["step"]), int(rows[-1]["step"]), acts)
    back = max((act.step for act in acts if act.action == "rollback"), default=-1)
    harmful = [event for event in harmful if event.step > back]
    if phases[-1].condition == "dead":
        harmful = told_at_once(harmful, rows, phases[-1].first)
    cause = find_cause(harmful, engine.detectors, phases[-1].condition)
    useful = wasted = None
    unit = "steps"
    if cause and phases[-1].condition == "dead":
        useful = last_useful_step(rows, harmful, cause, phases[-1].first)
        wasted, unit = cost_after(rows, useful)
    return Story(
        phases=phases,
        cause=cause.name if cause else None,
        diagnosis=cause.diagnosis if cause else "",
        remedy=cause.remedy if cause else "",
        numbers=quoted(engine, phases[-1].condition == "healthy"),
        useful_step=useful,
        wasted=wasted,
        unit=unit,
        events=tuple(events),
        blind=engine.blind(),
        notes=tuple(notes),
        acts=tuple(acts),
    )


def find_phases(
    events: Sequence[Event], first: int, last: int, acts: Sequence[Act] = ()
) -> tuple[Phase, ...]:
    """Healthy until something is warned of, drifting until all of it is over, dead from a stop.

    A rollback makes the run healthy again; without one nothing does after a stop.
    """
    phases: list[Phase] = []
    condition: Condition = "healthy"
    start, warned = first, set()
    backs = [act for act in acts if act.action == "rollback"]
    both: list[Event | Act] = sorted([*events, *backs], key=lambda one: one.step)
    for one in both:
        now = after(one, condition, warned)
        if now != condition:
            # A run that goes wrong at its first row has no healthy phase.
            if one.step > start:
                phases.append(Phase(condition=condition, first=start, last=one.step))
            condition, start = now, one.step
    return (*phases, Phase(condition=condition, first=start, last=last))


def after(one: Event | Act, condition: Condition, warned: set[str]) -> Condition:
    """The condition after an event or a rollback; `warned` is brought up to date."""
    if isinstance(one, Act):
        warned.clear()
        return "healthy"
    (warned.discard if one.severity == "clear" else warned.add)(one.detector)
    if condition == "dead" or one.severity == "stop":
        return "dead"
    return "drifting" if warned else "healthy"


def told_at_once(events: Sequence[Event], rows: Sequence[Row], death: int) -> list[Event]:
    """Events up to a few rows after the first stop; of evaluations, which are rare, up to two of
    them, since that is what their detectors wait for."""
    later = [row for row in rows if row["step"] > death]
    evaluations = [row for row in later if any(METRICS[name].sparse for name in canonical(row))]
    soon, next_ones = later[:AT_ONCE], evaluations[:2]
    last = soon[-1]["step"] if soon else death
    last_rare = max(last, next_ones[-1]["step"] if next_ones else death)
    rare = {event.detector for event in events
            if any(METRICS[seen.metric].sparse for seen in event.evidence)}  # fmt: skip
    return [e for e in events if e.step <= (last_rare if e.detector in rare else last)]


def find_cause(
    events: Sequence[Event], detectors: Sequence[Detector], condition: Condition
) -> Detector | None:
    """The first detector, in their order, among those that called the run dead, or whose warning
    is not over."""
    if condition == "healthy":
        return None
    wanted = "stop" if condition == "dead" else "warn"
    latest = {event.detector: event.severity for event in events}
    named = {name for name, severity in latest.items() if severity == wanted}
    return next(detector for detector in detectors if detector.name in named)


def last_useful_step(
    rows: Sequence[Row], events: Sequence[Event], cause: Detector, death: int
) -> int:
    """The last step at which the reward stood on its best plateau, before the run died.

    Where the reward did not fall (it was hacked, or never meant anything), the step at which the
    cause was first told.
    """
    own = [event for event in events if event.detector == cause.name]
    fatal = [seen for event in own if event.severity == "stop" for seen in event.evidence]
    numbers = [(int(row["step"]), canonical(row)) for row in rows if row["step"] <= death]
    found = [(step, each["reward"]) for step, each in numbers if "reward" in each]
    fell = any(seen.metric == "reward" and seen.since == "best" for seen in fatal)
    if not fell or len(found) < 3:
        return min(event.step for event in own)
    values = [value for _, value in found]
    smooth = [median(values[max(k - 2, 0) : k + 3]) for k in range(len(values))]
    limit = max(smooth) - PLATEAU * abs(max(smooth))
    return max(step for (step, _), value in zip(found, smooth) if value >= limit)


def cost_after(rows: Sequence[Row], step: int) -> tuple[float, str]:
    """Share of the cost after a step, and its unit: seconds if logged, else tokens, else steps."""
    numbers = [(row["step"], canonical(row)) for row in rows]
    timed = [(at, found["step_time"]) for at, found in numbers if "step_time" in found]
    total = sum(cost for _, cost in timed)
    if len(timed) * 2 > len(rows) and total > 0:
        return sum(cost for at, cost in timed if at > step) / total, "time"
    for unit, series in (
        ("tokens", [(at, found["tokens"]) for at, found in numbers if "tokens" in found]),
        ("steps", [(at, at) for at, _ in numbers]),
    ):
        if series and series[-1][1] > min(series[0][1], 0.0):
            before = max((count for at, count in series if at <= step), default=0.0)
            return (series[-1][1] - before) / (series[-1][1] - min(series[0][1], 0.0)), unit
    return 0.0, "steps"


def quoted(engine: Engine, healthy: bool) -> tuple[Evidence, ...]:
    """How the metrics that a story quotes have ended, against their start or their best."""
    out = []
    for place, (name, since) in enumerate(QUOTED):
        look = engine.tracks[name].look(0) if name in engine.tracks else None
        before = look.reference("start" if healthy else since) if look else None
        if look is None or before is None:
            continue
        moved = abs(look.now - before) >= MOVED * max(abs(before), abs(look.now))
        if place < 2 or (moved and not healthy):
            since = "start" if healthy else since
            out.append(Evidence(metric=name, since=since, before=before, now=look.now))
    return tuple(out)
