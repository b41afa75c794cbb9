"""The engine: rows of metrics in, events out, one row at a time.

It keeps a track for each metric and counts rows for each detector; every rule is data in
`detectors`. Its state is JSON, so it survives a checkpoint. It acts on nothing; a guard does.
`Monitor` is an engine with the past of its run.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from mesotron.config import WatchSettings
from mesotron.watch.detectors import (
    DETECTORS,
    TWO_PART,
    Action,
    Case,
    Detector,
    Event,
    Evidence,
    Severity,
)
from mesotron.watch.metrics import METRICS, STEP_NAMES, Row, canonical, names_of, sources
from mesotron.watch.tracks import (
    WINDOWS,
    Symptom,
    Track,
    TrackWindow,
    bernoulli_variance,
    is_finite,
)

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
# Less than the usual patience is for evaluations only: one row says next to nothing.
LEAST_PATIENCE = 2 / 3
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
# Of a silent batch, the update is zero, or that of the KL term: no measure of what is usual.
OF_THE_UPDATE = ("grad_norm", "update_rms", "dead_blocks")
# The variance of two rewards is this many times that of the batch they come from (n / (n - 1)).
SMALL_GROUPS = 2
# A lower greedy accuracy is too noisy for a share of it.
LEAST_GREEDY = 0.2
# Held-out scores that make a series, and how many times as many another must have to be replaced.
LEAST_SCORES = 3
DENSER = 1.5
RUNTIME = re.compile(r"eval[/_].+_runtime")  # TRL logs it for each problem set
MOST_SHAPES = 256  # sets of names of rows, each with the cases that it is about


# How the range of a reward is known: means within 0 to 1, logged extremes, means within -1 to 1, or
# the spread of rewards that are never negative.
RangeKind = Literal["share", "logged", "signed", "spread"]


class DueCases(NamedTuple):
    """A detector that a row is about."""

    detector: Detector
    cases: list[int]  # that the row is about
    possible: list[int]  # of these, those whose metrics are logged


Needed = tuple[Symptom, Track, float]  # a symptom, where to look, and the required standard errors


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
        num_cases = len(detector.cases)
        return cls([0] * num_cases, [0] * num_cases)


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
        self.counts: dict[str, Counts] = {}
        self.step = -1
        self._triggers: dict[str, list[set[str]]] = {}
        self._due: dict[frozenset[str], list[DueCases]] = {}
        self._tracked: set[str] = set()  # metrics that `_due` knows to be logged
        self._own_names: list[str] = []  # of the user's detectors

        for detector in self.detectors:
            self.counts[detector.name] = Counts.of(detector)
            self._triggers[detector.name] = [trigger_of(case) for case in detector.cases]
            for name in detector.metrics:
                if name not in METRICS and name not in self._own_names:
                    self._own_names.append(name)

    # One row

    def update(self, row: Mapping[str, Any]) -> list[Event]:
        """Take one row of numbers by their logged names and return the new events, usually none.

        Values that are not numbers are ignored. Without a "step", rows are counted.
        """
        numbers = {key: float(value) for key, value in row.items() if is_number(value)}
        self.step = self._step_of(numbers)

        values = self._with_derived(canonical(numbers))
        for name in self._own_names:
            if name in numbers:
                values[name] = numbers[name]

        for name, value in values.items():
            if is_finite(value):
                self._track(name).add(value, self.step)

        self._set_trials(numbers, values)
        events: list[Event] = []
        for due in self._cases_due(frozenset(values)):
            events += self._check(due)

        return events

    def _step_of(self, numbers: Mapping[str, float]) -> int:
        for name in STEP_NAMES:
            if name in numbers and is_finite(numbers[name]):
                return int(numbers[name])

        return self.step + 1

    def _set_trials(self, numbers: Mapping[str, float], values: Mapping[str, float]) -> None:
        """Give held-out accuracy the noise of as many coin tosses as there are problems."""
        problems = values.get("heldout_problems", 0.0)
        is_share = "eval/reward" not in numbers
        if is_share and problems > 0 and "heldout" in self.tracks:
            self.tracks["heldout"].trials = problems

    # Numbers that follow from others

    def _with_derived(self, values: Row) -> Row:
        derived = values | {"nonfinite": self._num_not_finite(values)}
        if "zero_signal" not in values and "reward" in values:
            derived["zero_signal"] = float(self._is_silent(values))

        share = self._share_of_range(values)
        if share is not None:
            derived["bounded_reward"] = share
        if derived.get("zero_signal", 0.0) >= SILENT:
            for name in OF_THE_UPDATE:
                derived.pop(name, None)

        if "update_rms" in derived and values.get("lr", 0.0) > 0:
            derived["update_ratio"] = values["update_rms"] / values["lr"]

        sampled = self._sampled(values)
        if sampled is not None:
            derived["greedy_gap"] = abs(values["greedy"] - sampled)
            if values["greedy"] >= LEAST_GREEDY:
                derived["sampled_share"] = sampled / values["greedy"]

        return derived

    def _num_not_finite(self, values: Mapping[str, float]) -> float:
        num = float(values.get("skipped", 0.0) > 0)
        for name in MUST_BE_FINITE & values.keys():
            if not is_finite(values[name]):
                num += 1

        return num

    def _is_silent(self, values: Mapping[str, float]) -> bool:
        """Whether a batch had no signal, in a log without the share of such groups."""
        if "reward_std" in values:
            return values["reward_std"] <= NOTHING

        reward = values["reward"]
        track = self.tracks.get("reward")
        if track is None or not track.recent or track.recent[-1] != reward:
            return False

        if values.get("grad_norm", 1.0) <= NOTHING:
            return True

        # The same mean to the last digit, where a failure is paid. A reward that has never moved
        # may as well be one that was normalized.
        return reward <= 0 and not track.is_constant

    def _share_of_range(self, values: Mapping[str, float]) -> float | None:
        """The place of the reward between its floor and the most that can be earned; None if that
        is not known, or the reward has not varied. What was said of another range is dropped."""
        reward = values.get("reward", math.nan)
        track = self.tracks.get("reward")
        if track is None or not track.lowest or not is_finite(reward):
            return None

        low = min(reward, track.lowest[0])
        high = max(reward, track.highest)
        kind = self._kind_of_range(low, high)
        if kind != self._kind_of_range(track.lowest[0], track.highest):
            self.tracks.pop("bounded_reward", None)
        if track.is_constant:
            return None

        if kind == "share":
            return reward
        if kind == "logged":
            floor = self.tracks["reward_min"].lowest[0]
            return (reward - floor) / (self.tracks["reward_max"].highest - floor)
        if kind == "signed":
            return (reward + 1) / 2
        if kind == "spread" and "reward_std" in values:
            # If a share p of the completions earns the same, std / reward is sqrt((1 - p) / p).
            squares = reward**2 + values["reward_std"] ** 2
            return reward**2 / squares if squares > 0 else 0.0

        return None

    def _kind_of_range(self, low: float, high: float) -> RangeKind | None:
        """How the range of a reward is known whose means lay between two values."""
        least = self.tracks.get("reward_min")
        most = self.tracks.get("reward_max")
        if least and most and (least.lowest[0] < 0 or most.highest > 1):
            return "logged" if most.highest > least.lowest[0] else None

        if low >= 0 and high <= 1 and not self._is_spread_wider():
            return "share"
        if low >= 0 and "reward_std" in self.tracks:
            return "spread"
        if low >= -1 and high <= 1:
            return "signed"

        return None

    def _is_spread_wider(self) -> bool:
        """Whether rewards differ more than any within 0 to 1 of the same mean could."""
        reward = self.tracks.get("reward")
        spread = self.tracks.get("reward_std")
        if reward is None or spread is None:
            return False

        mean = reward.total / reward.num_seen
        variance = (spread.total / spread.num_seen) ** 2
        return variance > SMALL_GROUPS * bernoulli_variance(mean)

    def _sampled(self, values: Mapping[str, float]) -> float | None:
        """The accuracy of sampling beside a greedy one: in the evaluation, or else in training."""
        if "greedy" not in values:
            return None
        if "sampled" in values:
            return values["sampled"]

        correct = self.window("correct")
        return correct.now if correct else None

    # Tracks

    def window(self, metric: str, scale: int = 0) -> TrackWindow | None:
        """The short (0) to long window of a metric; None until it is full."""
        track = self.tracks.get(metric)
        return None if track is None else track.window(scale)

    def _track(self, name: str) -> Track:
        if name not in self.tracks:
            if is_sparse(name):
                has_names = bool(METRICS[name].names)
                self.tracks[name] = Track(1, 1, pooled=has_names)
            else:
                self.tracks[name] = Track(self.settings.warmup, self.settings.window)

        return self.tracks[name]

    # Detectors

    def _cases_due(self, fresh: frozenset[str]) -> list[DueCases]:
        """The detectors that a row with these metrics is about, with their cases."""
        if self._tracked != self.tracks.keys() or len(self._due) > MOST_SHAPES:
            self._tracked = set(self.tracks)
            self._due = {}

        if fresh not in self._due:
            self._due[fresh] = [*self._find_due(fresh)]

        return self._due[fresh]

    def _find_due(self, fresh: frozenset[str]) -> Iterator[DueCases]:
        for detector in self.detectors:
            count = self.counts[detector.name]
            triggers = self._triggers[detector.name]
            due = [k for k, names in enumerate(triggers) if not names.isdisjoint(fresh)]

            possible = []
            for k in due:
                if self._needed(detector.cases[k], WARN) is not None:
                    possible.append(k)
                else:
                    count.present[k] = 0
                    count.fatal[k] = 0

            if due:
                yield DueCases(detector, due, possible)

    def _check(self, due: DueCases) -> list[Event]:
        """Count this row for or against each case of a detector; return an event on a change."""
        detector = due.detector
        for k in due.possible:
            event = self._count(detector, k)
            if event is not None:
                return [event]

        if self.counts[detector.name].severity == "clear":
            return []

        triggers = self._triggers[detector.name]
        is_sparse_case = any(
            is_sparse(name) and name != "nonfinite" for name in triggers[due.cases[0]]
        )
        return self._count_quiet(detector, is_sparse_case)

    def _count(self, detector: Detector, k: int) -> Event | None:
        """Count this row for or against the k-th case; an event if its patience is over."""
        count = self.counts[detector.name]
        case = detector.cases[k]
        scale = self._scale_of(case, WARN)
        if scale is None:
            count.present[k] = 0
            count.fatal[k] = 0
            return None

        fatal = self._fatal_case(detector)
        count.present[k] += 1
        count.fatal[k] = 0 if fatal is None else count.fatal[k] + 1

        severity = self._new_severity(detector, k)
        if severity is None:
            return None

        count.severity = severity
        count.quiet = 0
        return self._event(detector, (*case, *(fatal or ())), scale)

    def _fatal_case(self, detector: Detector) -> Case | None:
        for case in detector.fatal:
            if self._scale_of(case, STOP) is not None:
                return case
        return None

    def _new_severity(self, detector: Detector, k: int) -> Severity | None:
        count = self.counts[detector.name]
        to_stop = self._patience(detector, k, detector.fatal_patience)
        if count.severity != "stop" and 0 < count.fatal[k] >= to_stop and detector.may_stop:
            return "stop"

        to_warn = self._patience(detector, k, detector.patience)
        if count.severity == "clear" and 0 < count.present[k] >= to_warn:
            return "warn"

        return None

    def _patience(self, detector: Detector, k: int, share: float) -> float:
        """Rows that must show the k-th case."""
        trigger = self._triggers[detector.name][k]
        least = 0 if any(map(is_sparse, trigger)) else LEAST_PATIENCE
        return max(share, least) * self.settings.patience

    def _count_quiet(self, detector: Detector, is_sparse_case: bool) -> list[Event]:
        """Count this row toward the end of a warning or a stop."""
        count = self.counts[detector.name]
        if count.severity == "stop":
            lasts = any(self._is_shown(case, 0, 0.0) for case in detector.cases)
        else:
            lasts = any(count.present)

        rows = CLEAR * self.settings.patience
        if is_sparse_case:
            rows = CLEAR_SPARSE * max(self.settings.patience * detector.patience, 1)

        count.quiet = 0 if lasts else count.quiet + 1
        if count.quiet < rows:
            return []

        # Where longer windows still remember it, a stop becomes a warning first.
        left: Case = ()
        for case, num_present in zip(detector.cases, count.present):
            if num_present:
                left = case
                break

        count.severity = "warn" if left else "clear"
        count.quiet = 0
        scale = self._scale_of(left, WARN) or 0

        return [self._event(detector, left, scale)]

    def _scale_of(self, case: Case, caution: float) -> int | None:
        """The window in which all symptoms of a case are present, if there is one."""
        needed = self._needed(case, caution)
        if needed is None:
            return None

        for scale in range(len(WINDOWS)):
            if are_present(needed, scale):
                return scale

        return None

    def _is_shown(self, case: Case, scale: int, caution: float) -> bool:
        needed = self._needed(case, caution)
        return needed is not None and are_present(needed, scale)

    def _needed(self, case: Case, caution: float) -> list[Needed] | None:
        """What the symptoms of a case are looked for in; None if a metric is not logged that one of
        them needs, or is logged that must be absent."""
        noise = self.settings.noise * caution
        needed = []
        for symptom in case:
            track = self.tracks.get(symptom.metric)
            if track is not None and symptom.moved != "absent":
                required = noise * length_factor(track.num_seen, track.sparse)
                needed.append((symptom, track, required))
            elif track is not None or not (symptom.optional or symptom.moved == "absent"):
                return None

        return needed

    # Events

    def _event(self, detector: Detector, symptoms: Case, scale: int) -> Event:
        count = self.counts[detector.name]
        count.began = self._onset(symptoms, scale, count.began)

        confidence = None
        if count.severity != "clear":
            confidence = detector.confidence(count.severity)

        return Event(
            step=self.step,
            detector=detector.name,
            severity=count.severity,
            diagnosis=detector.diagnosis,
            remedy=detector.remedy,
            changes=tuple(asdict(change) for change in detector.changes),
            evidence=self._evidence(symptoms, scale),
            began=count.began,
            confidence=confidence,
        )

    def _evidence(self, symptoms: Case, scale: int) -> tuple[Evidence, ...]:
        """How the metrics moved, each by its first symptom."""
        evidence: dict[str, Evidence] = {}
        for symptom in symptoms:
            window = self.window(symptom.metric, scale)
            if window is None or symptom.metric in evidence:
                continue

            if symptom.is_level:
                before = None
            else:
                before = window.reference(symptom.since)

            evidence[symptom.metric] = Evidence(
                metric=symptom.metric,
                since=None if before is None else symptom.since,
                before=before,
                now=window.now,
                began=symptom.onset(window),
            )

        return tuple(evidence.values())

    def _onset(self, symptoms: Case, scale: int, before: int | None) -> int | None:
        """The first step of what the symptoms show, or of the warning before it."""
        if not symptoms:
            return None

        onsets = [] if before is None else [before]
        oldest: list[int] = []  # steps, for symptoms that were all there from the start
        for symptom in symptoms:
            window = self.window(symptom.metric, scale)
            if window is None:
                continue

            onset = symptom.onset(window)
            if onset is not None:
                onsets.append(onset)
            if symptom.is_level:
                oldest += window.track.steps[:1]

        return min(onsets or oldest, default=None)

    # The state of the run

    def blind(self) -> dict[str, tuple[str, ...]]:
        """Detectors that cannot run -> the metrics that the case nearest to running lacks."""
        blind = {}
        for detector in self.detectors:
            lacking = min((self._lacking(case) for case in detector.cases), key=len)
            if lacking:
                blind[detector.name] = lacking

        return blind

    def _lacking(self, case: Case) -> tuple[str, ...]:
        names = []
        for symptom in case:
            is_needed = not (symptom.optional or symptom.moved == "absent")
            if is_needed and symptom.metric not in self.tracks:
                names.append(symptom.metric)

        return tuple(names)

    def active(self) -> dict[str, Severity]:
        """Detectors whose warning or stop is not cleared -> severity."""
        active: dict[str, Severity] = {}
        for name, count in self.counts.items():
            if count.severity != "clear":
                active[name] = count.severity

        return active

    def unhealthy_since(self) -> int | None:
        """The earliest onset of an active harmful detector; None in a healthy run."""
        onsets = []
        for detector in self.detectors:
            count = self.counts[detector.name]
            is_active = count.severity != "clear" and not detector.harmless
            if is_active and count.began is not None:
                onsets.append(count.began)

        return min(onsets, default=None)

    def force_stop(self, name: str) -> Event:
        """Let a detector stop at once, whatever its patience; its first case is the evidence."""
        detector = next(d for d in self.detectors if d.name == name)
        self.counts[name].severity = "stop"
        return self._event(detector, detector.cases[0], 0)

    def ending(self) -> list[Event]:
        """Stops that the last rows show for half of their patience, if the run ends here; the
        state stays as it is."""
        kept = self.counts
        self.counts = deepcopy(kept)
        events = []

        for detector in self.detectors:
            count = self.counts[detector.name]
            num = max(count.fatal, default=0)
            enough = int(self.settings.patience * detector.fatal_patience / 2)

            if count.severity != "stop" and 0 < num >= enough and detector.may_stop:
                count.severity = "stop"
                case = detector.cases[count.fatal.index(num)]
                scale = self._scale_of(case, WARN) or 0
                events.append(self._event(detector, case, scale))

        self.counts = kept
        return events

    def forget(self, metric: str) -> None:
        """Drop the past of a metric whose scale has changed, and every count based on it."""
        self.tracks.pop(metric, None)
        for detector in self.detectors:
            if metric in detector.metrics:
                self.counts[detector.name] = Counts.of(detector)

    def refill(self, metric: str, values: Sequence[tuple[int, float]]) -> None:
        """Give a metric another past: (step, value)."""
        self.forget(metric)
        for step, value in values:
            if is_finite(value):
                self._track(metric).add(value, step)

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


class Series:
    """One logged held-out score, and the cadence at which it is not zero."""

    def __init__(self) -> None:
        self.values: dict[float, float] = {}  # step -> as logged
        self.is_bounded = True
        self.last = -math.inf  # step at which it was logged, zeros included
        self.last_score: float | None = None  # step at which it was not zero
        self.gap = math.inf  # smallest number of steps between two such values

    def add(self, key: str, value: float, step: float, previous: float) -> bool:
        """Whether a value is a score: a zero between evaluations fills its row. `previous` is the
        step of the row before."""
        if not math.isfinite(value):
            return True

        is_score = value != 0 or not self._is_filler(step, previous)
        self.last = step
        if value != 0:
            if self.last_score is not None and step > self.last_score:
                self.gap = min(self.gap, step - self.last_score)
            self.last_score = step

        if is_score:
            self.values[step] = value
            score = canonical({key: value}).get("heldout", math.nan)
            self.is_bounded = self.is_bounded and 0 <= score <= 1

        return is_score

    def _is_filler(self, step: float, previous: float) -> bool:
        """Whether a zero came sooner than an evaluation is due."""
        if self.last_score is None or math.isinf(self.gap):
            return math.isfinite(self.last) and self.last == previous  # logged in every row

        is_early = step - self.last < self.gap
        return is_early and (step - self.last_score) % self.gap != 0


class JudgedScores:
    """Chooses the held-out scores by which a run is judged.

    They are those of the first evaluation: a mean over other problem sets is no fall. Another score
    replaces them if it is a share and they are not, or if it is logged clearly more often. Zeros
    that fill the rows between evaluations are left out.
    """

    def __init__(self) -> None:
        self.chosen: frozenset[str] = frozenset()
        self.sets: set[str] = set()  # of the first evaluation: TRL logs their runtimes
        self.series: dict[str, Series] = {}
        self.step = -math.inf  # of the latest row, and of the one before
        self.previous = -math.inf

    def choose(self, row: Row) -> Row:
        """The row without scores that are not judged."""
        step = row.get("step", self.step + 1)
        if step != self.step:
            self.previous = self.step
            self.step = step

        keys = names_of("heldout", tuple(row))
        if not keys:
            return row

        sets = {key for key in row if RUNTIME.fullmatch(key)}
        is_first = not self.chosen
        if is_first:
            self.sets = sets

        if sets - self.sets:  # another set under the same name
            return {key: value for key, value in row.items() if key not in keys}

        kept = dict(row)
        for key in keys:
            if not self._series(key).add(key, row[key], step, self.previous):
                del kept[key]

        if is_first:
            self.chosen = frozenset(sources(kept).get("heldout", ()))
        else:
            self._choose_better(keys)

        for key in keys:
            if key not in self.chosen:
                kept.pop(key, None)

        return kept

    def replaced(self, row: Row) -> Row:
        """An earlier row with the scores that are judged now."""
        known = names_of("heldout", tuple(row))
        kept = {key: value for key, value in row.items() if key not in known}
        for key in self.chosen:
            values = self._series(key).values
            if row.get("step") in values:
                kept[key] = values[row["step"]]

        return kept

    def _series(self, key: str) -> Series:
        return self.series.setdefault(key, Series())

    def _choose_better(self, keys: Iterable[str]) -> None:
        chosen = [self._series(key) for key in self.chosen]
        is_bounded = all(each.is_bounded for each in chosen)
        num_values = max((len(each.values) for each in chosen), default=0)

        for key in keys:
            series = self._series(key)
            is_denser = len(series.values) > DENSER * num_values
            is_known = len(series.values) >= LEAST_SCORES and series.is_bounded
            if key not in self.chosen and is_known and (is_denser or not is_bounded):
                self.chosen = frozenset({key})
                return


class Monitor:
    """An engine with its rows, events and actions, and its state at each checkpoint.

    After a rollback the run is judged from the state at the checkpoint, so old rows raise no alarm
    and the same failure is caught again. A resumed run rebuilds all of it.
    """

    def __init__(
        self, settings: WatchSettings | None = None, detectors: Sequence[Detector] = DETECTORS
    ) -> None:
        self.engine = Engine(settings, detectors)
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.heldout = JudgedScores()
        self.snapshots: dict[int, dict[str, Any]] = {}  # by the checkpoint's step

    @property
    def num_rollbacks(self) -> int:
        return sum(action.is_rollback for action in self.actions)

    def update(self, row: Row) -> list[Event]:
        earlier = self.heldout.chosen
        row = self.heldout.choose(row)
        if earlier and self.heldout.chosen != earlier:
            self._judge_by_other_scores()

        self.rows.append(row)
        new = self.engine.update(row)
        self.events += new

        return new

    def _judge_by_other_scores(self) -> None:
        """Let the past have the scores that are now judged."""
        self.rows = [self.heldout.replaced(row) for row in self.rows]

        scores: list[tuple[int, float]] = []
        for row in self.rows:
            if "heldout" in (values := canonical(row)):
                scores.append((int(row.get("step", 0)), values["heldout"]))
        self.engine.refill("heldout", scores)

    def save(self, step: int) -> None:
        self.snapshots[step] = self.engine.state()

    def restore(self, step: int) -> None:
        """Go back to the state at a checkpoint and drop the later ones."""
        self.engine.load_state(self.snapshots[step])
        self.snapshots = {at: state for at, state in self.snapshots.items() if at <= step}

    def replay(self, history: Iterable[Row | Action], checkpoints: Collection[int]) -> None:
        """Rebuild the state from the rows and actions of a run, and its existing checkpoints."""
        past = list(history)
        steps = set(checkpoints)
        for item in past:
            if isinstance(item, Action) and item.checkpoint is not None:
                steps.add(item.checkpoint)

        to_save = sorted(steps)
        for item in past:
            while to_save and to_save[0] < int(step_of(item)):  # written after the rows of its step
                self.save(to_save.pop(0))

            if isinstance(item, Action):
                self.add_action(item)
            else:
                self.update(item)

        for step in to_save:
            self.save(step)

    def add_action(self, action: Action) -> None:
        """Record an action; after a rollback continue from the state at its checkpoint."""
        if action.checkpoint is not None and action.checkpoint not in self.snapshots:
            raise ValueError(
                f"a rollback from step {action.step} to {action.checkpoint} does not go back: "
                "events.jsonl belongs to another run"
            )

        self.actions.append(action)
        if action.checkpoint is None:
            return

        self.restore(action.checkpoint)
        if any(change["field"] == TWO_PART.field for change in action.changes):
            self._forget_reward()

    def _forget_reward(self) -> None:
        """Another reward has another scale: no snapshot may compare the two."""
        for step in sorted(self.snapshots):  # the last is the one that was restored
            self.engine.load_state(self.snapshots[step])
            self.engine.forget("reward")
            self.save(step)


def merge_history(rows: Sequence[Row], events: Iterable[Mapping[str, Any]]) -> list[Row | Action]:
    """Rows of metrics.jsonl and actions of events.jsonl, each after the rows of its step."""
    items: list[Row | Action] = [*rows]
    for record in events:
        if record.get("kind") == "guard":
            items.append(Action.from_record(record))

    return sorted(items, key=step_of)


def step_of(item: Row | Action) -> float:
    if isinstance(item, Action):
        return item.step
    return item["step"]


def trigger_of(case: Case) -> set[str]:
    """Metrics of which a row must have one for a case to be checked: the sparse ones, if there are
    any, so that patience counts evaluations and not the rows between them."""
    metrics = {symptom.metric for symptom in case}
    sparse = {each.metric for each in case if is_sparse(each.metric) and not each.optional}
    return sparse or metrics


@lru_cache(maxsize=65536)
def length_factor(num_seen: int, is_sparse: bool) -> float:
    """The required share of the noise setting, which grows with the length of the run."""
    growth = math.log(num_seen)
    if is_sparse:
        return SPARSE_BASE + SPARSE_GROWTH * growth
    return ROW_BASE + ROW_GROWTH * growth + FEW / num_seen


def are_present(needed: Sequence[Needed], scale: int) -> bool:
    """Whether the windows of one size show every symptom."""
    for symptom, track, noise in needed:
        window = track.window(scale)
        if window is None or not symptom.is_present(window, noise):
            return False

    return True


def is_sparse(name: str) -> bool:
    """Whether each value counts by itself; a name of the user's own is logged in every row."""
    return name in METRICS and METRICS[name].sparse


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
