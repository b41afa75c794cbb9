"""The diagnosis of a run: its phases, the cause of a failure, and what was spent after it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, Literal

from mesotron.watch.engine import Engine, is_sparse
from mesotron.watch.events import Action, Event, Evidence
from mesotron.watch.metrics import METRICS, canonical
from mesotron.watch.rows import Row
from mesotron.watch.tracks import SMOOTH, Since, is_finite

Condition = Literal["healthy", "drifting", "dead", "unknown"]

# The smoothed reward (5% of the run, or 5 rows): useful within this share of its best, damaged
# below that one, and lost, if the end is, below the third.
USEFUL = 0.05
DAMAGED = 0.1
LOST = 0.25
# What shows whether a run learns, and the most useful other metrics, in this order.
HEADLINES = ("reward", "correct", "heldout")
WANTED = (
    *HEADLINES,
    "reward_std",
    "length",
    "entropy",
    "grad_norm",
    "kl",
    "truncated",
    "formatted",
    "gap_logp",
)
MOST_MISSING = 3
# Rows after the first stop in which another stop may still be the cause: as many as a warning
# lasts. What a dead run does later (repeat itself, starve) did not kill it.
TOGETHER = 12
# The metrics to quote and their reference; all but the first two only if they moved.
QUOTED: tuple[tuple[str, Since], ...] = (
    ("reward", "best"),
    ("heldout", "best"),
    ("zero_signal", "start"),
    ("formatted", "best"),
    ("top_share", "start"),
    ("length", "start"),
    ("truncated", "start"),
    ("entropy", "start"),
    ("repetition", "start"),
)
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
    onset: int | None = None  # the step at which the damage began; None unless drifting or dead
    confidence: float | None = None  # of the cause: share of such alarms that were right
    missing: tuple[str, ...] = ()  # the most useful metrics that the run does not log
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
        last = self.phases[-1]
        parts = [f"steps {each.first}-{each.last} {each.condition}" for each in self.phases]
        if last.condition == "dead":
            parts[-1] = f"dead after step {last.first}"

        text = ", ".join(parts)
        if last.condition == "unknown":  # the only phase
            text = f"too few rewards are logged to tell how steps {last.first}-{last.last} went"

        for action in self.actions:
            if action.action == "rollback":
                text += f", rolled back from step {action.step} to {action.checkpoint}"

        if self.numbers:
            text += ": " + ", ".join(evidence.text() for evidence in self.numbers)

        if self.cause:
            text += f"; cause: {self.cause.replace('_', ' ')}"
            text += "" if self.confidence is None else f" (probability {self.confidence:.2f})"

        if self.wasted is not None:
            share = f"{self.wasted:.0%} of the {self.unit}"
            text += f"; {share} came after the last useful step, {self.useful_step}"

        return text

    def explanation(self) -> tuple[str, ...]:
        """What is known, what to do, and what to log to know more: up to three lines."""
        lines = [f"why: {self.diagnosis}", f"what to do: {self.remedy}"] if self.cause else []
        if self.missing:
            names = ", ".join(f"{name} ({METRICS[name].meaning})" for name in self.missing)
            lines.append(f"to know more, log {names}: {len(self.blind)} checks lack a metric")

        return tuple(lines)


def diagnose(
    rows: Sequence[Row],
    engine: Engine,
    events: Sequence[Event],
    notes: Sequence[str] = (),
    actions: Sequence[Action] = (),
) -> Diagnosis:
    """Diagnose a run from its rows (at least one, each with its step), the engine that has read
    them, its events, and the actions of a guard."""
    events = [*events, *engine.ending()]
    harmless = {detector.name for detector in engine.detectors if detector.harmless}
    harmful = [event for event in events if event.detector not in harmless]
    rollbacks = [action for action in actions if action.action == "rollback"]
    first = int(rows[0]["step"])
    last = int(rows[-1]["step"])
    phases = find_phases(harmful, first, last, rollbacks)
    condition = phases[-1].condition
    last_rollback = max((action.step for action in rollbacks), default=first - 1)

    ending = [event for event in harmful if event.step > last_rollback]
    if condition == "dead":
        ending = _events_near_death(ending, rows)

    # The first detector in table order among those that stopped the run, or still warn.
    severity = {"dead": "stop", "drifting": "warn"}.get(condition, "none")
    latest = {event.detector: event.severity for event in ending}
    cause = next((d for d in engine.detectors if latest.get(d.name) == severity), None)
    onset = useful = wasted = alarm = None
    unit = "steps"

    if cause:
        alarm = [e for e in ending if e.detector == cause.name and e.severity != "clear"][-1]
        onset = max(alarm.began or first, first)

    if cause and condition == "dead":
        curve = reward_curve([row for row in rows if row["step"] > last_rollback])
        useful = max(onset or first, first)
        if curve and 1 - curve[-1][1] >= LOST:  # the reward itself says when
            useful, onset = (
                max(step for step, value in curve if value >= 1 - share)
                for share in (USEFUL, DAMAGED)
            )

        phases = _dated(phases, onset or first)
        wasted, unit = _cost_after(rows, useful)

    tracks = [engine.tracks[name] for name in HEADLINES if name in engine.tracks]
    is_seen = any(track.start is not None and track.num_seen >= 2 for track in tracks)
    if condition == "healthy" and not is_seen:  # neither a baseline nor two evaluations
        phases = (
            Phase(
                condition="unknown",
                first=first,
                last=last,
            ),
        )

    blind = engine.blind()
    lacking = {"heldout"} - engine.tracks.keys() | {x for names in blind.values() for x in names}
    lacking -= {name for row in rows[-9:] for name in canonical(row)}  # logged, but of no use

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
        blind=blind,
        onset=onset,
        confidence=alarm.confidence if alarm else None,
        missing=tuple(name for name in WANTED if name in lacking)[:MOST_MISSING],
        notes=tuple(notes),
        actions=tuple(actions),
    )


def find_phases(
    events: Sequence[Event], first: int, last: int, rollbacks: Sequence[Action] = ()
) -> tuple[Phase, ...]:
    """Healthy, drifting from the onset of a warning and dead from that of a stop until all are
    cleared or the run is rolled back."""
    phases: list[Phase] = []
    condition: Condition = "healthy"
    start = first
    active = dict[str, str]()

    items: list[Event | Action] = sorted([*events, *rollbacks], key=lambda item: item.step)
    for item in items:
        at = item.step
        if isinstance(item, Action):
            active.clear()
        else:
            active[item.detector] = item.severity
            at = at if item.began is None else min(at, item.began)

        severities = active.values()
        now: Condition = "dead" if "stop" in severities else "healthy"
        if now == "healthy" and "warn" in severities:
            now = "drifting"

        if now != condition:
            at = max(at, start)  # what began before an earlier change is dated by that
            # A run that fails at its first row has no healthy phase.
            if at > start:
                phases.append(
                    Phase(
                        condition=condition,
                        first=start,
                        last=at,
                    )
                )
            elif phases and phases[-1].condition == now:  # nothing lies between the two
                at = phases.pop().first

            condition = now
            start = at

    return (
        *phases,
        Phase(
            condition=condition,
            first=start,
            last=last,
        ),
    )


def _dated(phases: Sequence[Phase], onset: int) -> tuple[Phase, ...]:
    """The phases of a dead run, with the last one from the onset of the damage on."""
    before = [
        replace(phase, last=min(phase.last, onset)) for phase in phases[:-1] if phase.first < onset
    ]
    if before:
        before[-1] = replace(before[-1], last=onset)

    return (*before, replace(phases[-1], first=onset))


def _events_near_death(events: Sequence[Event], rows: Sequence[Row]) -> list[Event]:
    """Events up to a few rows after the stop that is still in force, or of evaluations up to the
    second one, since that is how long their detectors wait."""
    active: dict[str, int] = {}
    death = 0
    for event in events:
        if event.severity == "stop":
            death = event.step if not active else death
            active[event.detector] = event.step
        elif event.severity == "clear":
            active.pop(event.detector, None)

    later = [row for row in rows if row["step"] > death]
    evaluations = [row for row in later if any(map(is_sparse, canonical(row)))]
    last, second = (
        max([death, *(row["step"] for row in soon)]) for soon in (later[:TOGETHER], evaluations[:2])
    )
    sparse = {
        event.detector for event in events if any(is_sparse(item.metric) for item in event.evidence)
    }
    ends = {e.detector: max(last, second) if e.detector in sparse else last for e in events}

    return [
        e
        for e in events
        if e.step <= ends[e.detector] and (e.severity != "stop" or e.step >= death)
    ]


def reward_curve(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(step, share of its best that the smoothed reward has); the last is the mean of a tenth."""
    numbers = [(int(row["step"]), canonical(row).get("reward", math.nan)) for row in rows]
    points = [point for point in numbers if is_finite(point[1])]
    values = [value for _, value in points]
    if len(values) < SMOOTH:
        return []

    half = max(SMOOTH, len(values) // 20) // 2
    windows = [values[max(k - half, 0) : k + half + 1] for k in range(len(values))]
    smooth = [mean(window) for window in windows]
    smooth[-1] = mean(values[-max(SMOOTH, len(values) // 10) :])
    floor = min(0.0, sorted(values)[len(values) // 100])
    best = max(smooth) - floor
    if best <= 0:
        return []

    return [(step, (value - floor) / best) for (step, _), value in zip(points, smooth)]


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
        window = engine.window(name)
        before = window.reference(since) if window else None
        if window is None or before is None:
            continue

        if healthy or (since == "best" and window.now >= before):
            since = "start"
            before = window.reference("start") or 0.0

        moved = abs(window.now - before) > MOVED * max(abs(before), abs(window.now))
        hint = name == "truncated" and window.now >= 0.5  # worth a look in a healthy run, too
        if place < 2 or (moved and (hint or not healthy)):
            out.append(
                Evidence(
                    metric=name,
                    since=since,
                    before=before,
                    now=window.now,
                )
            )

    return tuple(out)
