"""The diagnosis of a run: its phases, the cause of a failure, and what was spent after it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any, Literal

from mesotron.watch.detectors import Action, Detector, Event, Evidence, Severity
from mesotron.watch.engine import Engine, Monitor, is_sparse
from mesotron.watch.metrics import METRICS, Row, canonical
from mesotron.watch.tracks import MEMORY, SMOOTH, Since, Symptom, Track, is_finite

Condition = Literal["healthy", "drifting", "dead", "unknown"]
SEVERITIES: dict[Condition, Severity] = {"dead": "stop", "drifting": "warn"}

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
LATEST = 9  # rows that show which metrics are logged
# Rows after the first stop in which another stop may still be the cause: as many as a warning
# lasts. What a dead run does later (repeat itself, starve) did not kill it.
TOGETHER = 12
EVALUATIONS = 2  # for detectors that read evaluations, which wait that long
# A reward within 0 to 1 that stays below the floor and does not rise: starved after so many rows.
FLOOR = 0.05
FLOOR_ROWS = 50
NOT_UP = Symptom("bounded_reward", "not_up", by=0.1)
# A policy that follows the gradient of its own reward loses it if its steps are too large, or if
# the gradient is not that of the reward: what shows the second was looked for.
LARGE_STEPS = "; nothing else that is logged shows why, so the steps are probably too large"
UNEXPLAINED = {"reward_collapse": LARGE_STEPS, "accuracy_collapse": LARGE_STEPS}
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
ALWAYS_QUOTED = ("reward", "heldout")
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
    diagnosis: str = ""  # the cause's sentences, or why the verdict is unknown
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
        record = asdict(self)
        del record["actions"]
        record["events"] = [event.record() for event in self.events]

        return record | {
            "condition": self.condition,
            "text": self.text(),
            "acts": [action.record() for action in self.actions],
        }

    def text(self) -> str:
        text = self._phases_text()
        if self.condition == "unknown":
            return f"{text}: {self.diagnosis}"

        for action in self.actions:
            if action.is_rollback:
                text += f", rolled back from step {action.step} to {action.checkpoint}"

        if self.numbers:
            text += ": " + ", ".join(evidence.text() for evidence in self.numbers)

        if self.cause:
            text += f"; cause: {self.cause.replace('_', ' ')}"
            if self.confidence is None:
                text += " (uncalibrated)"
            else:
                text += f" (probability {self.confidence:.2f})"

        if self.wasted is not None:
            share = f"{self.wasted:.0%} of the {self.unit}"
            text += f"; {share} came after the last useful step, {self.useful_step}"

        return text

    def _phases_text(self) -> str:
        last = self.phases[-1]
        parts = [f"steps {each.first}-{each.last} {each.condition}" for each in self.phases]
        if last.condition == "dead":
            parts[-1] = f"dead after step {last.first}"

        return ", ".join(parts)

    def explanation(self) -> tuple[str, ...]:
        """What is known, what to do, and what to log to know more: up to three lines."""
        lines = []
        if self.cause:
            lines.append(f"why: {self.diagnosis}")
        if self.remedy:
            lines.append(f"what to do: {self.remedy}")

        if self.missing:
            names = ", ".join(f"{name} ({METRICS[name].meaning})" for name in self.missing)
            lines.append(f"to know more, log {names}: {len(self.blind)} checks lack a metric")

        return tuple(lines)


def diagnose_run(monitor: Monitor, notes: Sequence[str] = (), num_dropped: int = 0) -> Diagnosis:
    """Diagnose a run from what its monitor has seen."""
    return diagnose(
        monitor.rows,
        monitor.engine,
        monitor.events,
        notes,
        monitor.actions,
        num_dropped,
    )


def diagnose(
    rows: Sequence[Row],
    engine: Engine,
    events: Sequence[Event],
    notes: Sequence[str] = (),
    actions: Sequence[Action] = (),
    num_dropped: int = 0,
) -> Diagnosis:
    """Diagnose a run from its rows (at least one, each with its step), the engine that has read
    them, its events, the actions of a guard, and the number of rows that the log had before it
    began again."""
    events = [*events, *engine.ending()]
    harmful = harmful_events(events, engine)
    rollbacks = [action for action in actions if action.is_rollback]

    first = int(rows[0]["step"])
    last = int(rows[-1]["step"])
    phases = find_phases(harmful, first, last, rollbacks)
    condition = phases[-1].condition

    # Only what came after the last rollback ended the run.
    since = max((action.step for action in rollbacks), default=first - 1)
    after_rollback = [event for event in harmful if event.step > since]
    ending = _ending_events(after_rollback, condition, rows, engine)

    cause = find_cause(engine, ending, condition, rows)
    findings: dict[str, Any] = {}
    onset = first
    if cause:
        detector, alarm = cause
        onset = max(alarm.began or first, first)
        explained = detector.diagnosis
        if condition == "dead" and detector.role == "outcome":
            explained += UNEXPLAINED.get(detector.name, "")

        findings = {
            "cause": detector.name,
            "diagnosis": explained,
            "remedy": detector.remedy,
            "confidence": alarm.confidence,
            "onset": onset,
        }

    if cause and condition == "dead":
        rows_after_rollback = [row for row in rows if row["step"] > since]
        onset, useful = date_damage(rows_after_rollback, onset, first)
        phases = _dated(phases, onset)
        wasted, unit = _cost_after(rows, useful)
        findings |= {
            "onset": onset,
            "useful_step": useful,
            "wasted": wasted,
            "unit": unit,
        }

    if condition == "healthy":
        unknown = why_unknown(engine, len(rows), num_dropped)
        if unknown:
            phases = (Phase(condition="unknown", first=first, last=last),)
            findings = {"diagnosis": unknown[0], "remedy": unknown[1]}

    blind = engine.blind()
    return Diagnosis(
        phases=phases,
        numbers=_quoted_numbers(engine, condition == "healthy"),
        events=tuple(events),
        blind=blind,
        missing=_missing_metrics(engine, blind, rows),
        notes=tuple(notes),
        actions=tuple(actions),
        **findings,
    )


def _ending_events(
    events: Sequence[Event], condition: Condition, rows: Sequence[Row], engine: Engine
) -> list[Event]:
    """The events that may explain how the run ends, of those since the last rollback."""
    if condition == "dead":
        return _events_near_death(events, rows, engine)

    return _without_withdrawn(events, engine, math.inf)


def harmful_events(events: Sequence[Event], engine: Engine) -> list[Event]:
    by_name = {detector.name: detector for detector in engine.detectors}
    harmful = []
    for event in events:
        detector = by_name.get(event.detector)
        if detector is None or not detector.harmless:
            harmful.append(event)

    return harmful


def find_cause(
    engine: Engine, ending: Sequence[Event], condition: Condition, rows: Sequence[Row]
) -> tuple[Detector, Event] | None:
    """The detector that explains how the run ends, and its last event.

    Suspects are those that stopped the run, or still warn, and sources that warned before. The
    first source comes first, if it began before the rest; then the others in the order of the
    table, and last those that only say how every failure ends.
    """
    if condition not in SEVERITIES:
        return None

    suspects = _find_suspects(engine, ending, SEVERITIES[condition])
    if not suspects:
        return None

    # Onsets are known to within a few rows.
    others = [sign_of(event) for detector, event in suspects if detector.role != "source"]
    last = min(others, default=math.inf) + SMOOTH * _steps_per_row(rows)

    def order(suspect: tuple[Detector, Event]) -> tuple[int, float]:
        detector, event = suspect
        if detector.role == "source" and sign_of(event) <= last:
            return 0, sign_of(event)
        return (2, 0.0) if detector.role == "outcome" else (1, 0.0)

    return min(suspects, key=order)


def _find_suspects(
    engine: Engine, ending: Sequence[Event], severity: Severity
) -> list[tuple[Detector, Event]]:
    """Detectors with their last event, if that is as severe as the end, or may be its source."""
    latest = {event.detector: event for event in ending if event.severity != "clear"}
    suspects = []
    for detector in engine.detectors:
        event = latest.get(detector.name)
        if event is None:
            continue

        is_held_back = bool(detector.fatal) and not detector.may_stop  # uncalibrated
        is_source = detector.role == "source"
        if event.severity == severity or is_source or is_held_back:
            suspects.append((detector, event))

    return suspects


def sign_of(event: Event) -> float:
    """The first step at which an event's own metrics changed, rather than the score that any
    failure lowers."""
    began = event.step if event.began is None else event.began
    own = []
    for item in event.evidence:
        if item.began is not None and item.metric not in HEADLINES:
            own.append(item.began)

    return min(own, default=began)


def _steps_per_row(rows: Sequence[Row]) -> float:
    return (rows[-1]["step"] - rows[0]["step"]) / max(len(rows) - 1, 1)


# What is not known


def why_unknown(engine: Engine, num_rows: int, num_dropped: int = 0) -> tuple[str, str] | None:
    """What keeps the watch from calling a run without findings healthy, and what to do about it;
    None if nothing does."""
    tracks: dict[str, Track] = {}
    for name in HEADLINES:
        if name in engine.tracks:
            tracks[name] = engine.tracks[name]

    if not tracks:
        return (
            "no reward, accuracy or held-out score is logged",
            "log the reward, or name it with --rename reward=my_score",
        )

    needed = engine.settings.warmup + engine.settings.window
    most = max(track.num_seen for track in tracks.values())
    if not any(_is_seen(track, needed) for track in tracks.values()):
        return (
            f"{most} rewards are too few: a verdict needs {needed}, or two evaluations",
            "wait for more rows, or log every step",
        )

    if num_dropped >= num_rows:
        return (
            f"the log begins again after {num_dropped} rows, and only {num_rows} follow",
            "give each run a file of its own, or its name in a column run",
        )

    return _why_nothing_is_shown(engine, tracks)


def _is_seen(track: Track, needed: int) -> bool:
    """Whether it has a baseline and a present level, or two evaluations."""
    return track.num_seen >= (EVALUATIONS if track.sparse else needed)


def _why_nothing_is_shown(engine: Engine, tracks: Mapping[str, Track]) -> tuple[str, str] | None:
    """What is wrong with scores that are logged, but neither rise nor fall."""
    if all(track.is_constant for track in tracks.values()):
        name, track = next(iter(tracks.items()))
        return (
            f"the {METRICS[name].meaning} is {track.highest:g} in all {track.num_seen} rows",
            "log it before it is normalized, and try it on a correct and on a wrong completion",
        )

    bounded = engine.tracks.get("bounded_reward")
    window = engine.window("bounded_reward")
    if bounded is None or window is None or bounded.num_seen >= FLOOR_ROWS:
        return None

    heldout = engine.window("heldout")
    has_heldout = heldout is not None and not NOT_UP.is_present(heldout, engine.settings.noise)
    is_low = (window.best or 0.0) < FLOOR and NOT_UP.is_present(window, engine.settings.noise)
    if is_low and not has_heldout:
        return (
            f"the reward has not left {FLOOR:g} in {bounded.num_seen} rows: too few to tell a slow "
            "start from no signal",
            "wait for more rows, and log the share of groups with equal rewards",
        )

    return None


def _missing_metrics(
    engine: Engine, blind: Mapping[str, tuple[str, ...]], rows: Sequence[Row]
) -> tuple[str, ...]:
    """The most useful metrics that the run does not log."""
    lacking = set() if "heldout" in engine.tracks else {"heldout"}
    for names in blind.values():
        lacking.update(names)
    for row in rows[-LATEST:]:
        lacking.difference_update(canonical(row))  # logged, but of no use

    missing = [name for name in WANTED if name in lacking]
    return tuple(missing[:MOST_MISSING])


# Phases


def find_phases(
    events: Sequence[Event], first: int, last: int, rollbacks: Sequence[Action] = ()
) -> tuple[Phase, ...]:
    """Healthy, drifting from the onset of a warning and dead from that of a stop until all are
    cleared or the run is rolled back."""
    phases: list[Phase] = []
    condition: Condition = "healthy"
    start = first
    active: dict[str, Severity] = {}

    items: list[Event | Action] = sorted([*events, *rollbacks], key=lambda item: item.step)
    for item in items:
        at = item.step
        if isinstance(item, Action):
            active.clear()
        else:
            active[item.detector] = item.severity
            at = at if item.began is None else min(at, item.began)

        now = _condition_of(active)
        if now == condition:
            continue

        at = max(at, start)  # what began before an earlier change is dated by that
        if at > start:  # a run that fails at its first row has no healthy phase
            phases.append(Phase(condition=condition, first=start, last=at))
        elif phases and phases[-1].condition == now:  # nothing lies between the two
            at = phases.pop().first

        condition = now
        start = at

    phases.append(Phase(condition=condition, first=start, last=last))
    return tuple(phases)


def _condition_of(active: Mapping[str, Severity]) -> Condition:
    """The condition of a run by the severities of its detectors."""
    severities = active.values()
    if "stop" in severities:
        return "dead"
    if "warn" in severities:
        return "drifting"

    return "healthy"


def _dated(phases: Sequence[Phase], onset: int) -> tuple[Phase, ...]:
    """The phases of a dead run, with the last one from the onset of the damage on."""
    *earlier, dead = phases
    before = []
    for phase in earlier:
        if phase.first < onset:
            before.append(replace(phase, last=min(phase.last, onset)))

    if before:
        before[-1] = replace(before[-1], last=onset)

    return (*before, replace(dead, first=onset))


# The end of a dead run


def _events_near_death(events: Sequence[Event], rows: Sequence[Row], engine: Engine) -> list[Event]:
    """Events up to a few rows after the stop that is still in force, or of evaluations up to the
    second one, since that is how long their detectors wait; without warnings that were withdrawn,
    other than those of sources in the recent past."""
    death = _step_of_death(events)
    last, last_evaluation = _steps_after_death(rows, death)
    of_evaluations = {event.detector for event in events if _reads_evaluations(event)}
    symptoms = {each.name for each in engine.detectors if each.role == "symptom"}

    near = []
    for event in events:
        end = last
        if event.detector in of_evaluations:
            end = max(last, last_evaluation)

        is_later_stop = event.severity != "stop" or event.step >= death
        # What began before the death may explain it, even if it was only seen later.
        is_early = event.detector in symptoms and sign_of(event) <= death
        if (event.step <= end or is_early) and is_later_stop:
            near.append(event)

    return _without_withdrawn(near, engine, death - MEMORY * _steps_per_row(rows))


def _steps_after_death(rows: Sequence[Row], death: int) -> tuple[float, float]:
    """The last steps that are looked at: of rows, and of rows with an evaluation."""
    later: list[float] = []
    evaluations: list[float] = []
    for row in rows:
        if row["step"] > death:
            later.append(row["step"])
            if any(map(is_sparse, canonical(row))):
                evaluations.append(row["step"])

    last = max([death, *later[:TOGETHER]])
    last_evaluation = max([death, *evaluations[:EVALUATIONS]])
    return last, last_evaluation


def _without_withdrawn(events: Sequence[Event], engine: Engine, recent: float) -> list[Event]:
    """The events that are in force, and those of sources that were in the recent past."""
    sources = {each.name for each in engine.detectors if each.role == "source"}
    kept: dict[str, Event] = {}
    for event in events:
        if event.severity != "clear":
            kept[event.detector] = event
        elif event.detector not in sources or event.step < recent:
            kept.pop(event.detector, None)

    return [*kept.values()]


def _step_of_death(events: Sequence[Event]) -> int:
    """The first stop of those that are still in force."""
    active: set[str] = set()
    death = 0
    for event in events:
        if event.severity == "stop":
            if not active:
                death = event.step
            active.add(event.detector)
        elif event.severity == "clear":
            active.discard(event.detector)

    return death


def _reads_evaluations(event: Event) -> bool:
    return any(is_sparse(item.metric) for item in event.evidence)


def date_damage(rows: Sequence[Row], onset: int, first: int) -> tuple[int, int]:
    """The step at which the damage began, and the last useful one; the reward itself says when if
    it was lost."""
    curve = reward_curve(rows)
    if not curve or 1 - curve[-1][1] < LOST:
        return onset, max(onset, first)

    return _last_above(curve, 1 - DAMAGED), _last_above(curve, 1 - USEFUL)


def _last_above(curve: Sequence[tuple[int, float]], share: float) -> int:
    return max(step for step, value in curve if value >= share)


def reward_curve(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(step, share of its best that the smoothed reward has); the last is the mean of a tenth."""
    steps = []
    values = []
    for row in rows:
        reward = canonical(row).get("reward", math.nan)
        if is_finite(reward):
            steps.append(int(row["step"]))
            values.append(reward)

    if len(values) < SMOOTH:
        return []

    smooth = _running_mean(values, width=max(SMOOTH, len(values) // 20))
    smooth[-1] = mean(values[-max(SMOOTH, len(values) // 10) :])

    lowest_percent = sorted(values)[len(values) // 100]
    floor = min(0.0, lowest_percent)
    best = max(smooth) - floor
    if best <= 0:
        return []

    return [(step, (value - floor) / best) for step, value in zip(steps, smooth)]


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    half = width // 2
    means = []
    for k in range(len(values)):
        window = values[max(k - half, 0) : k + half + 1]
        means.append(mean(window))

    return means


# What it cost


def _cost_after(rows: Sequence[Row], step: int) -> tuple[float, str]:
    """Share of the cost after a step, and its unit: seconds if logged, else tokens, else steps."""
    total = 0.0
    after = 0.0
    times = _series(rows, "step_time")
    for at, seconds in times:
        total += seconds
        after += seconds if at > step else 0.0

    if len(times) * 2 > len(rows) and total > 0:
        return after / total, "time"

    share = _share_after(_series(rows, "tokens"), step)
    if share is not None:
        return share, "tokens"

    steps = [(row["step"], row["step"]) for row in rows]
    return _share_after(steps, step) or 0.0, "steps"


def _series(rows: Sequence[Row], metric: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have a metric."""
    series = []
    for row in rows:
        values = canonical(row)
        if metric in values:
            series.append((row["step"], values[metric]))

    return series


def _share_after(counts: Sequence[tuple[float, float]], step: int) -> float | None:
    """Share of a running count that came after a step; None without a count."""
    if not counts:
        return None

    begin = min(counts[0][1], 0.0)
    end = counts[-1][1]
    if end <= begin:
        return None

    before = max((count for at, count in counts if at <= step), default=0.0)
    return (end - before) / (end - begin)


# What is quoted


def _quoted_numbers(engine: Engine, healthy: bool) -> tuple[Evidence, ...]:
    numbers = []
    for metric, since in QUOTED:
        evidence = _quote(engine, metric, since, healthy)
        if evidence is not None and _is_worth_quoting(evidence, healthy):
            numbers.append(evidence)

    return tuple(numbers)


def _quote(engine: Engine, metric: str, since: Since, healthy: bool) -> Evidence | None:
    """How a metric moved from its reference, or from the start if it is at its best."""
    window = engine.window(metric)
    if window is None:
        return None

    before = window.reference(since)
    if before is None:
        return None

    is_at_best = since == "best" and window.now >= before
    if healthy or is_at_best:
        since = "start"
        before = window.reference("start") or 0.0

    return Evidence(
        metric=metric,
        since=since,
        before=before,
        now=window.now,
    )


def _is_worth_quoting(evidence: Evidence, healthy: bool) -> bool:
    if evidence.metric in ALWAYS_QUOTED:
        return True

    before = evidence.before or 0.0
    now = evidence.now
    if abs(now - before) <= MOVED * max(abs(before), abs(now)):
        return False

    # Worth a look in a healthy run, too.
    is_hint = evidence.metric == "truncated" and now >= 0.5
    return is_hint or not healthy
