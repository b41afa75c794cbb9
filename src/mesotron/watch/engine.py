"""The engine: rows of metrics in, events out, one row at a time.

It keeps a track for each metric and counts rows for each detector; every rule is data in
`detectors`. Its state is JSON, so it survives a checkpoint. It acts on nothing; a guard does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

from mesotron.config import WatchSettings
from mesotron.watch.detectors import DETECTORS, Case, Detector
from mesotron.watch.events import Event, Evidence, Severity
from mesotron.watch.metrics import METRICS, STEP_NAMES, canonical
from mesotron.watch.tracks import Symptom, Track, Window, is_finite

SCALES = (0, 1)  # the short window, the long window
# A warning may be wrong more often than a stop: it needs this share of the noise setting.
WARN, STOP = 0.75, 1.0
# The longer a run, the more chances noise has to look like a change: the required share of the
# noise setting grows with the logarithm of the number of values. Of runs of 2,000 rows or 200
# evaluations in which nothing changes, about 2 in 100 are stopped, 5 at worst
# (tests/watch/test_false_alarms.py).
SPARSE_BASE, ROW_BASE, GROWTH = 0.65, 0.55, 0.125
# A warning is cleared after this many times its patience without a symptom.
CLEAR = 4
SHORT_LOG = 60  # rows


class Engine:
    """Watches one run for the failures that `detectors` describe.

    Example:
        >>> engine = Engine()
        >>> rewards = [0.7] * 20 + [0.1] * 20
        >>> events = [event for r in rewards for event in engine.update({"reward": r})]
        >>> events[-1].severity, events[-1].detector
        ('stop', 'reward_collapse')
    """

    def __init__(
        self, settings: WatchSettings | None = None, detectors: Sequence[Detector] = DETECTORS
    ) -> None:
        self.settings = settings or WatchSettings()
        self.detectors = tuple(detectors)
        self.tracks: dict[str, Track] = {}
        self.counts = {detector.name: Counts.of(detector) for detector in detectors}
        self.step = -1
        self._triggers = {d.name: [trigger_metrics(case) for case in d.cases] for d in detectors}

    def update(self, row: Mapping[str, Any]) -> list[Event]:
        """Take one row of numbers by their logged names and return the new events, usually none.

        Values that are not numbers are ignored. Without a "step", rows are counted.
        """
        numbers = {key: float(value) for key, value in row.items() if is_number(value)}
        steps = (int(numbers[n]) for n in STEP_NAMES if n in numbers and is_finite(numbers[n]))
        self.step = next(steps, self.step + 1)
        values = self._with_derived(canonical(numbers))
        for name, value in values.items():
            if is_finite(value):
                self._track(name).add(value, self.step)
        if values.get("heldout_problems", 0.0) > 0 and "heldout" in self.tracks:
            self.tracks["heldout"].trials = values["heldout_problems"]
        return [event for d in self.detectors for event in self._check(d, values.keys())]

    def blind(self) -> dict[str, tuple[str, ...]]:
        """Detectors that cannot run -> the metrics that the case nearest to running lacks."""
        missing = {
            d.name: [tuple(s.metric for s in case if not s.optional and s.metric not in self.tracks)
                     for case in d.cases] for d in self.detectors
        }  # fmt: skip
        fewest = {name: min(cases, key=len) for name, cases in missing.items()}
        return {name: metrics for name, metrics in fewest.items() if metrics}

    def active(self) -> dict[str, Severity]:
        """Detectors whose warning or stop is not cleared -> severity."""
        return {name: c.severity for name, c in self.counts.items() if c.severity != "clear"}

    def unhealthy_since(self) -> int | None:
        """The earliest onset of an active harmful detector; None in a healthy run."""
        counts = [self.counts[d.name] for d in self.detectors if not d.harmless]
        onsets = [count.began for count in counts if count.severity != "clear"]
        return min((step for step in onsets if step is not None), default=None)

    def force_stop(self, name: str) -> Event:
        """Let a detector stop at once, whatever its patience; its first case is the evidence."""
        detector = next(d for d in self.detectors if d.name == name)
        self.counts[name].severity = "stop"
        return self._event(detector, detector.cases[0], 0)

    def forget(self, metric: str) -> None:
        """Drop the past of a metric whose scale has changed, and every count based on it."""
        self.tracks.pop(metric, None)
        for detector in self.detectors:
            if metric in detector.metrics:
                self.counts[detector.name] = Counts.of(detector)

    def state(self) -> dict[str, Any]:
        """Everything the engine remembers, for JSON."""
        return {
            "step": self.step,
            "tracks": {name: track.state() for name, track in self.tracks.items()},
            "counts": {name: asdict(count) for name, count in self.counts.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.step, self.tracks = state["step"], {}
        for name, kept in state["tracks"].items():
            self._track(name).load_state(kept)
        self.counts = {name: Counts(**deepcopy(kept)) for name, kept in state["counts"].items()}

    def _with_derived(self, values: dict[str, float]) -> dict[str, float]:
        broken = sum(not is_finite(value) for value in values.values())
        skipped = values.get("skipped", 0.0) > 0
        out = values | {"nonfinite": float(broken + skipped)}
        if "update_rms" in values and values.get("lr", 0.0) > 0:
            out["update_ratio"] = values["update_rms"] / values["lr"]
        if "greedy" in values:
            correct = self.window("correct")
            sampled = values.get("sampled", correct.now if correct else None)
            if sampled is not None:
                out["greedy_gap"] = abs(values["greedy"] - sampled)
        return out

    def window(self, metric: str, scale: int = 0) -> Window | None:
        """The short (0) or long (1) window of a metric; None until it is full."""
        return self.tracks[metric].window(scale) if metric in self.tracks else None

    def _track(self, name: str) -> Track:
        if name not in self.tracks:
            metric, settings = METRICS[name], self.settings
            size = (1, 1) if metric.sparse else (settings.warmup, settings.window)
            self.tracks[name] = Track(*size, pooled=metric.sparse and bool(metric.names))
        return self.tracks[name]

    def _check(self, detector: Detector, fresh: Collection[str]) -> list[Event]:
        """Count this row for or against each case of a detector; return an event on a change."""
        count, triggers = self.counts[detector.name], self._triggers[detector.name]
        due = [k for k, names in enumerate(triggers) if not names.isdisjoint(fresh)]
        for k in due:
            case = detector.cases[k]
            scale = self._scale_of(case, WARN)
            shown = (c for c in detector.fatal if self._scale_of(c, STOP) is not None)
            fatal = None if scale is None else next(shown, None)
            count.present[k] = 0 if scale is None else count.present[k] + 1
            count.fatal[k] = 0 if fatal is None else count.fatal[k] + 1
            severity = self._new_severity(detector, count, k)
            if severity and scale is not None:
                count.severity = severity
                return [self._event(detector, (*case, *(fatal or ())), scale)]
        if due:
            count.quiet = 0 if any(count.present) else count.quiet + 1
        patience = max(self.settings.patience * detector.patience, 1)
        if due and count.severity == "warn" and count.quiet >= CLEAR * patience:
            count.severity = "clear"
            return [self._event(detector, (), 0)]
        return []

    def _new_severity(self, detector: Detector, count: "Counts", k: int) -> Severity | None:
        patience = self.settings.patience
        if count.severity != "stop" and 0 < count.fatal[k] >= patience * detector.fatal_patience:
            return "stop"
        if count.severity == "clear" and 0 < count.present[k] >= patience * detector.patience:
            return "warn"
        return None

    def _scale_of(self, case: Case, caution: float) -> int | None:
        """The window in which all symptoms of a case are present, if there is one."""
        return next((k for k in SCALES if all(self._is_present(s, k, caution) for s in case)), None)

    def _is_present(self, symptom: Symptom, scale: int, caution: float) -> bool:
        track = self.tracks.get(symptom.metric)
        if track is None:
            return symptom.optional
        window, noise = track.window(scale), self.settings.noise * caution
        return window is not None and symptom.is_present(window, noise * length_factor(track))

    def _event(self, detector: Detector, symptoms: Case, scale: int) -> Event:
        seen: dict[str, Evidence] = {}
        onsets: list[int | None] = []
        for symptom in symptoms:
            window = self.window(symptom.metric, scale)
            if window is not None:
                seen.setdefault(symptom.metric, evidence(symptom, window))
                onsets.append(symptom.onset(window))
        count = self.counts[detector.name]
        # A stop begins no later than the warning before it.
        onsets.append(count.began if symptoms else None)
        count.began = min((step for step in onsets if step is not None), default=None)
        return Event(
            step=self.step,
            detector=detector.name,
            severity=count.severity,
            diagnosis=detector.diagnosis,
            remedy=detector.remedy,
            changes=tuple(asdict(change) for change in detector.changes),
            evidence=tuple(seen.values()),
            began=count.began,
        )


@dataclass
class Counts:
    """Consecutive rows that showed each case of a detector, and its last severity."""

    present: list[int]
    fatal: list[int]
    quiet: int = 0
    severity: Severity = "clear"
    began: int | None = None  # onset of what was last reported

    @classmethod
    def of(cls, detector: Detector) -> "Counts":
        return cls([0] * len(detector.cases), [0] * len(detector.cases))


def scale_to_run_length(settings: WatchSettings, num_rows: int) -> WatchSettings:
    """Settings for a finished log: a short one gets a shorter warmup, window and patience."""
    if num_rows >= SHORT_LOG:
        return settings
    return replace(
        settings,
        warmup=min(settings.warmup, max(num_rows // 6, 2)),
        window=min(settings.window, max(num_rows // 12, 2)),
        patience=min(settings.patience, max(num_rows // 10, 1)),
    )


def length_factor(track: Track) -> float:
    """The required share of the noise setting, which grows with the length of the run."""
    growth = GROWTH * math.log(track.num_seen)
    return SPARSE_BASE + growth if track.sparse else max(1.0, ROW_BASE + growth)


def trigger_metrics(case: Case) -> frozenset[str]:
    """The metrics of which a row must have one for a case to be checked: the sparse ones, if it
    has any, so that patience counts evaluations and not the rows between them."""
    names = frozenset(symptom.metric for symptom in case)
    return frozenset(name for name in names if METRICS[name].sparse) or names


def evidence(symptom: Symptom, window: Window) -> Evidence:
    is_level = symptom.moved in ("above", "below")
    before = None if is_level else window.reference(symptom.since)
    since = None if before is None else symptom.since
    return Evidence(metric=symptom.metric, since=since, before=before, now=window.now)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
