"""The engine: rows of metrics in, events out, one row at a time.

It keeps a track for each metric and counts rows for each detector; every rule is data in
`detectors`. Its state is JSON, so it survives a checkpoint. It acts on nothing; a guard does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from mesotron.config import WatchSettings
from mesotron.watch.detectors import DETECTORS, Case, Detector
from mesotron.watch.events import Event, Evidence, Severity
from mesotron.watch.metrics import METRICS, canonical
from mesotron.watch.tracks import WINDOWS, Symptom, Track, Window, is_finite
from mesotron.watch.words import STEP_NAMES

# A warning may be wrong more often than a stop: it needs this share of the noise setting.
WARN = 0.9
STOP = 1.0
# The longer a run, the more chances noise has to look like a change: the required share of the
# noise setting grows with the logarithm of the number of values. Of runs of 2,000 rows or 200
# evaluations in which nothing changes, about 2 in 100 are stopped, 5 at worst
# (tests/watch/test_false_alarms.py).
SPARSE_BASE = 0.65
SPARSE_GROWTH = 0.125
ROW_BASE = 0.5
ROW_GROWTH = 0.1
FEW = 5.0
# A warning is cleared after this many times the patience without a symptom; a stop after as many
# rows in which the short window has recovered, whatever the noise. Fewer evaluations are enough.
CLEAR = 4
CLEAR_SPARSE = 2
# A number that is not finite is a failure in these; a part of the reward may have no verdict.
MUST_BE_FINITE = frozenset(
    {
        "loss",
        "grad_norm",
        "reward",
        "kl",
        "entropy",
        "ratio_high",
        "update_rms",
        "gap_logp",
        "gap_kl",
        "gap_ratio",
    }
)
# A batch without a signal: this share of its groups silent, or rewards and gradient as small.
SILENT = 0.999
NOTHING = 1e-9


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
        names = (name for detector in self.detectors for name in detector.metrics)
        self._own_names = [name for name in dict.fromkeys(names) if name not in METRICS]

        # Of these a row must have one for a case to be checked: the sparse metrics, if it has any,
        # so that patience counts evaluations and not the rows between them.
        cases = {d.name: [{s.metric for s in case} for case in d.cases] for d in detectors}
        self._triggers = {
            name: [{*filter(is_sparse, metrics)} or metrics for metrics in each]
            for name, each in cases.items()
        }

    def update(self, row: Mapping[str, Any]) -> list[Event]:
        """Take one row of numbers by their logged names and return the new events, usually none.

        Values that are not numbers are ignored. Without a "step", rows are counted.
        """
        numbers = {key: float(value) for key, value in row.items() if is_number(value)}
        steps = (int(numbers[n]) for n in STEP_NAMES if n in numbers and is_finite(numbers[n]))
        self.step = next(steps, self.step + 1)
        values = self._with_derived(canonical(numbers))
        values |= {name: numbers[name] for name in self._own_names if name in numbers}

        for name, value in values.items():
            if is_finite(value):
                self._track(name).add(value, self.step)

        is_share = "eval/reward" not in numbers  # whose noise is not that of coin tosses
        if is_share and values.get("heldout_problems", 0.0) > 0 and "heldout" in self.tracks:
            self.tracks["heldout"].trials = values["heldout_problems"]

        return [event for d in self.detectors for event in self._check(d, values.keys())]

    def blind(self) -> dict[str, tuple[str, ...]]:
        """Detectors that cannot run -> the metrics that the case nearest to running lacks."""
        missing = {
            d.name: [
                tuple(
                    s.metric
                    for s in case
                    if s.metric not in self.tracks and not (s.optional or s.moved == "absent")
                )
                for case in d.cases
            ]
            for d in self.detectors
        }

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

    def ending(self) -> list[Event]:
        """Stops that the last rows show for half of their patience, if the run ends here; the
        state stays as it is."""
        kept = self.counts
        events = []
        self.counts = deepcopy(kept)

        for detector in self.detectors:
            count = self.counts[detector.name]
            enough = int(self.settings.patience * detector.fatal_patience / 2)

            k, num = max(enumerate(count.fatal), key=lambda each: each[1], default=(0, 0))
            if count.severity != "stop" and 0 < num >= enough:
                count.severity = "stop"
                case = detector.cases[k]
                events.append(self._event(detector, case, self._scale_of(case, WARN) or 0))

        self.counts = kept
        return events

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
        self.step = state["step"]
        self.tracks = {}

        for name, kept in state["tracks"].items():
            self._track(name).load_state(kept)

        self.counts = {name: Counts(**deepcopy(kept)) for name, kept in state["counts"].items()}

    def _with_derived(self, values: dict[str, float]) -> dict[str, float]:
        broken = sum(not is_finite(values[name]) for name in MUST_BE_FINITE & values.keys())
        skipped = values.get("skipped", 0.0) > 0

        out = values | {"nonfinite": float(broken + skipped)}
        if "zero_signal" not in values and "reward" in values:
            out["zero_signal"] = float(self._is_silent(values))

        if out.get("zero_signal", 0.0) >= SILENT:
            # Its update is zero, or that of the KL term: no measure of what is usual.
            for name in ("grad_norm", "update_rms", "dead_blocks"):
                out.pop(name, None)

        if "update_rms" in out and values.get("lr", 0.0) > 0:
            out["update_ratio"] = values["update_rms"] / values["lr"]

        if "greedy" in values:
            correct = self.window("correct")
            sampled = values.get("sampled", correct.now if correct else None)
            if sampled is not None:
                out["greedy_gap"] = abs(values["greedy"] - sampled)

        return out

    def _is_silent(self, values: Mapping[str, float]) -> bool:
        """Whether a batch had no signal, in a log without the share of such groups."""
        if "reward_std" in values:
            return values["reward_std"] <= NOTHING

        track = self.tracks.get("reward")
        gradient = values.get("grad_norm")
        if track is None or not track.recent or track.recent[-1] != values["reward"]:
            return False

        # The same mean to the last digit: where a failure is paid, or without a gradient.
        return values["reward"] <= 0 or (gradient is not None and gradient <= NOTHING)

    def window(self, metric: str, scale: int = 0) -> Window | None:
        """The short (0) to long window of a metric; None until it is full."""
        track = self.tracks.get(metric)
        return track and track.window(min(scale, len(track.sizes) - 1))

    def _track(self, name: str) -> Track:
        if name not in self.tracks:
            sparse = is_sparse(name)
            settings = self.settings
            size = (1, 1) if sparse else (settings.warmup, settings.window)
            self.tracks[name] = Track(*size, pooled=sparse and bool(METRICS[name].names))

        return self.tracks[name]

    def _check(self, detector: Detector, fresh: Collection[str]) -> list[Event]:
        """Count this row for or against each case of a detector; return an event on a change."""
        count = self.counts[detector.name]
        triggers = self._triggers[detector.name]

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
                count.quiet = 0
                return [self._event(detector, (*case, *(fatal or ())), scale)]

        if not due or count.severity == "clear":
            return []

        if count.severity == "stop":
            lasts = any(self._is_shown(case, 0, 0.0) for case in detector.cases)
        else:
            lasts = any(count.present)

        count.quiet = 0 if lasts else count.quiet + 1
        rows = CLEAR * self.settings.patience
        if any(is_sparse(name) and name != "nonfinite" for name in triggers[due[0]]):
            rows = CLEAR_SPARSE * max(self.settings.patience * detector.patience, 1)

        if count.quiet >= rows:
            # Where longer windows still remember it, a stop becomes a warning first.
            left = next((case for case, num in zip(detector.cases, count.present) if num), ())
            count.severity = "warn" if left else "clear"
            count.quiet = 0
            return [self._event(detector, left, self._scale_of(left, WARN) or 0)]

        return []

    def _new_severity(self, detector: Detector, count: "Counts", k: int) -> Severity | None:
        # Less than the usual patience is for evaluations only: one row says next to nothing.
        least = 0 if any(map(is_sparse, self._triggers[detector.name][k])) else 2 / 3
        patience, fatal_patience = (
            max(share, least) * self.settings.patience
            for share in (detector.patience, detector.fatal_patience)
        )

        if count.severity != "stop" and 0 < count.fatal[k] >= fatal_patience:
            return "stop"
        if count.severity == "clear" and 0 < count.present[k] >= patience:
            return "warn"

        return None

    def _scale_of(self, case: Case, caution: float) -> int | None:
        """The window in which all symptoms of a case are present, if there is one."""
        scales = range(len(WINDOWS))
        return next((scale for scale in scales if self._is_shown(case, scale, caution)), None)

    def _is_shown(self, case: Case, scale: int, caution: float) -> bool:
        return all(self._is_present(symptom, scale, caution) for symptom in case)

    def _is_present(self, symptom: Symptom, scale: int, caution: float) -> bool:
        track = self.tracks.get(symptom.metric)
        if track is None or symptom.moved == "absent":
            return track is None and (symptom.optional or symptom.moved == "absent")

        window = self.window(symptom.metric, scale)
        noise = self.settings.noise * caution

        return window is not None and symptom.is_present(window, noise * length_factor(track))

    def _event(self, detector: Detector, symptoms: Case, scale: int) -> Event:
        seen: dict[str, Evidence] = {}
        onsets: list[int | None] = []

        oldest: list[int] = []  # steps, for symptoms that were all there from the start
        for symptom in symptoms:
            window = self.window(symptom.metric, scale)
            if window is not None:
                name = symptom.metric
                is_level = symptom.moved in ("above", "below")
                before = None if is_level else window.reference(symptom.since)
                since = None if before is None else symptom.since

                found = Evidence(
                    metric=name,
                    since=since,
                    before=before,
                    now=window.now,
                )

                seen.setdefault(name, found)
                onsets.append(symptom.onset(window))
                oldest += window.track.steps[:1] if is_level else []

        count = self.counts[detector.name]

        # A stop begins no later than the warning before it.
        onsets.append(count.began if symptoms else None)
        count.began = min([s for s in onsets if s is not None] or oldest, default=None)

        return Event(
            step=self.step,
            detector=detector.name,
            severity=count.severity,
            diagnosis=detector.diagnosis,
            remedy=detector.remedy,
            changes=tuple(asdict(change) for change in detector.changes),
            evidence=tuple(seen.values()),
            began=count.began,
            confidence=None if count.severity == "clear" else detector.confidence(count.severity),
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


def length_factor(track: Track) -> float:
    """The required share of the noise setting, which grows with the length of the run."""
    if track.sparse:
        return SPARSE_BASE + SPARSE_GROWTH * math.log(track.num_seen)
    return ROW_BASE + ROW_GROWTH * math.log(track.num_seen) + FEW / track.num_seen


def is_sparse(name: str) -> bool:
    """Whether each value counts by itself; a name of the user's own is logged in every row."""
    return name in METRICS and METRICS[name].sparse


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
