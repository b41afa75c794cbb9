"""The engine: rows of metrics in, events out, one row at a time.

It keeps a track for each metric and a count of rows for each detector, and decides nothing by
itself: every rule is in `detectors`. Its memory is JSON, so that it survives a checkpoint. It acts
on nothing; a guard does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mesotron.config import WatchSettings
from mesotron.watch.detectors import DETECTORS, Case, Detector
from mesotron.watch.events import Event, Evidence, Severity
from mesotron.watch.metrics import METRICS, STEP_NAMES, canonical
from mesotron.watch.onset import began
from mesotron.watch.signs import Sign
from mesotron.watch.tracks import Look, Track, is_finite

SCALES = (0, 1)
# A word may be wrong more often than a stop: it asks for this much of the settings' noise.
WARN, STOP = 0.75, 1.0
# The longer a run, the more chances has noise to look like a change: what is asked for, in shares
# of the settings' noise, grows with the logarithm of the values seen. Of runs of 2,000 rows or 200
# evaluations in which nothing changes, about 2 in 100 are stopped, 5 at worst
# (tests/watch/test_evaluations.py).
RARE, ROWS, GROWTH = 0.65, 0.55, 0.125
# A warning is over when nothing showed it for this many times its patience.
CLEAR = 4


class Engine:
    """Watches one run.

    Args:
        settings: warm-up, window, patience and noise.
        detectors: what to look for.

    Example:
        >>> engine = Engine()
        >>> rewards = [0.7] * 20 + [0.1] * 20
        >>> events = [event for r in rewards for event in engine.update({"reward": r})]
        >>> events[-1].severity, events[-1].detector
        ('stop', 'reward_collapse')
    """

    def __init__(
        self,
        settings: WatchSettings | None = None,
        detectors: Sequence[Detector] = DETECTORS,
    ) -> None:
        self.settings = check(settings or WatchSettings())
        self.detectors = tuple(detectors)
        self.tracks: dict[str, Track] = {}
        self.steps: dict[str, list[int]] = {}  # of the values that each track remembers
        self.counts = {detector.name: Counts(len(detector.cases)) for detector in detectors}
        self.step = -1
        self._due = {detector.name: [fresh_names(case) for case in detector.cases]
                     for detector in detectors}  # fmt: skip

    def update(self, row: Mapping[str, Any]) -> list[Event]:
        """Take in one row and tell what is new.

        Args:
            row: numbers by whatever name they were logged; what is not a number is passed over.
                Its step is under "step"; without one, rows are counted.

        Returns:
            The events of this row, seldom any.
        """
        numbers = {key: float(value) for key, value in row.items() if is_number(value)}
        self.step = next((int(numbers[n]) for n in STEP_NAMES
                          if n in numbers and is_finite(numbers[n])), self.step + 1)  # fmt: skip
        found = self._derive(canonical(numbers))
        for name, value in found.items():
            if is_finite(value):
                self._add(name, value)
        if found.get("heldout_problems", 0.0) > 0 and "heldout" in self.tracks:
            self.tracks["heldout"].trials = found["heldout_problems"]
        return [event for d in self.detectors for event in self._judge(d, found.keys())]

    def blind(self) -> dict[str, tuple[str, ...]]:
        """Detectors that cannot speak, and the metrics that the nearest of their cases lacks."""
        out = {}
        for detector in self.detectors:
            lacks = [[s.metric for s in case if not s.optional and s.metric not in self.tracks]
                     for case in detector.cases]  # fmt: skip
            least = min(lacks, key=len)
            if least:
                out[detector.name] = tuple(least)
        return out

    def active(self) -> dict[str, Severity]:
        """What was told and is not over: detector -> severity."""
        return {name: count.told for name, count in self.counts.items() if count.told != "clear"}

    def unwell_since(self) -> int | None:
        """The first step of anything harmful that was told and is not over; None in health."""
        active = [self.counts[d.name] for d in self.detectors if not d.harmless]
        found = [count.began for count in active if count.told != "clear"]
        return min((step for step in found if step is not None), default=None)

    def condemn(self, name: str) -> Event:
        """Let a detector speak at once, as fatal, whatever its patience.

        Args:
            name: of the detector, whose first case is quoted.
        """
        detector = next(d for d in self.detectors if d.name == name)
        self.counts[name].told = "stop"
        return self._event(detector, detector.cases[0], 0)

    def forget(self, metric: str) -> None:
        """Drop a metric's past, which is on another scale from now on, and what was made of it."""
        self.tracks.pop(metric, None)
        self.steps.pop(metric, None)
        for detector in self.detectors:
            if metric in detector.metrics:
                self.counts[detector.name] = Counts(len(detector.cases))

    def values(self) -> dict[str, Any]:
        """The engine's whole memory, for JSON."""
        return {
            "step": self.step,
            "tracks": {name: track.values() for name, track in self.tracks.items()},
            "steps": {name: list(steps) for name, steps in self.steps.items()},
            "counts": {name: count.values() for name, count in self.counts.items()},
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over what `values` gave; detectors it does not know start afresh."""
        self.step = values["step"]
        self.tracks = {}
        for name, kept in values["tracks"].items():
            self._track(name).load_values(kept)
        self.steps = {name: list(steps) for name, steps in values["steps"].items()}
        for detector in self.detectors:
            self.counts[detector.name] = count = Counts(len(detector.cases))
            if detector.name in values["counts"]:
                count.load_values(values["counts"][detector.name])

    def _derive(self, found: dict[str, float]) -> dict[str, float]:
        """Add the numbers that follow from others."""
        broken = sum(not is_finite(value) for value in found.values())
        skipped = found.get("skipped", 0.0) > 0
        out = found | {"nonfinite": float(broken + skipped)}
        if "update_rms" in found and found.get("lr", 0.0) > 0:
            out["update_ratio"] = found["update_rms"] / found["lr"]
        if "greedy" in found:
            sampled = found.get("sampled", self._now("correct"))
            if sampled is not None:
                out["greedy_gap"] = abs(found["greedy"] - sampled)
        return out

    def _now(self, name: str) -> float | None:
        look = self.tracks[name].look(0) if name in self.tracks else None
        return look.now if look else None

    def _add(self, name: str, value: float) -> None:
        track, steps = self._track(name), self.steps.setdefault(name, [])
        track.add(value)
        steps.append(self.step)
        del steps[: len(steps) - len(track.recent)]

    def _track(self, name: str) -> Track:
        if name not in self.tracks:
            metric, settings = METRICS[name], self.settings
            size = (1, 1) if metric.sparse else (settings.warmup, settings.window)
            self.tracks[name] = Track(*size, pooled=metric.sparse and bool(metric.names))
        return self.tracks[name]

    def _judge(self, detector: Detector, fresh: Collection[str]) -> list[Event]:
        """Count this row for or against each case of a detector, and tell of a change."""
        count = self.counts[detector.name]
        due = [k for k, names in enumerate(self._due[detector.name]) if not names.isdisjoint(fresh)]
        for k in due:
            scale = self._scale_of(detector.cases[k], WARN)
            fatal = None if scale is None else self._first_shown(detector.fatal)
            count.row(k, scale is not None, fatal is not None)
            signs = (*detector.cases[k], *(fatal or ()))
            severity = self._news(detector, count, k)
            if severity and scale is not None:
                count.told = severity
                return [self._event(detector, signs, scale)]
        if due:
            count.end_row()
        patience = max(self.settings.patience * detector.patience, 1)
        if due and count.told == "warn" and count.quiet >= CLEAR * patience:
            count.told = "clear"
            return [self._event(detector, (), 0)]
        return []

    def _news(self, detector: Detector, count: "Counts", k: int) -> Severity | None:
        """What case k has to tell that was not told yet."""
        patience = self.settings.patience
        if count.told != "stop" and 0 < count.fatal[k] >= patience * detector.fatal_patience:
            return "stop"
        if count.told == "clear" and 0 < count.shown[k] >= patience * detector.patience:
            return "warn"
        return None

    def _first_shown(self, cases: Sequence[Case]) -> Case | None:
        """The first case that is shown beyond doubt."""
        return next((case for case in cases if self._scale_of(case, STOP) is not None), None)

    def _scale_of(self, case: Case, caution: float) -> int | None:
        """The scale at which all signs of a case are shown, if there is one."""
        return next((k for k in SCALES if all(self._shown(s, k, caution) for s in case)), None)

    def _shown(self, sign: Sign, scale: int, caution: float) -> bool:
        if sign.metric not in self.tracks:
            return sign.optional
        look = self.tracks[sign.metric].look(scale)
        if look is None:
            return False
        return sign.shown(look, self.settings.noise * caution * surcharge(look.track))

    def _event(self, detector: Detector, signs: Case, scale: int) -> Event:
        seen: dict[str, Evidence] = {}
        since: list[int | None] = []
        for sign in signs:
            look = self.tracks[sign.metric].look(scale) if sign.metric in self.tracks else None
            if look is not None:
                seen.setdefault(sign.metric, evidence(sign, look))
                since.append(began(sign, look, self.steps[sign.metric]))
        count = self.counts[detector.name]
        # A stop goes back as far as the warning that it follows.
        since.append(count.began if signs else None)
        count.began = min((step for step in since if step is not None), default=None)
        return Event(
            step=self.step,
            detector=detector.name,
            severity=count.told,
            diagnosis=detector.diagnosis,
            remedy=detector.remedy,
            changes=tuple(asdict(change) for change in detector.changes),
            evidence=tuple(seen.values()),
            began=count.began,
        )


class Counts:
    """How many rows in a row have shown each case of a detector, and what was told.

    Args:
        cases: how many cases it has.
    """

    def __init__(self, cases: int) -> None:
        self.shown, self.fatal = [0] * cases, [0] * cases
        self.quiet = 0
        self.told: Severity = "clear"
        self.began: int | None = None  # the first step of what was told

    def row(self, case: int, shown: bool, fatal: bool) -> None:
        """Count one row for one case."""
        self.shown[case] = self.shown[case] + 1 if shown else 0
        self.fatal[case] = self.fatal[case] + 1 if fatal else 0

    def end_row(self) -> None:
        """All cases of a row have been counted: once more nothing was shown, or something was."""
        self.quiet = 0 if any(self.shown) else self.quiet + 1

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return {"shown": list(self.shown), "fatal": list(self.fatal),
                "quiet": self.quiet, "told": self.told, "began": self.began}  # fmt: skip

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over what `values` gave, if it was of as many cases."""
        if len(values["shown"]) == len(self.shown):
            self.shown, self.fatal = list(values["shown"]), list(values["fatal"])
            self.quiet, self.told = values["quiet"], values["told"]
            self.began = values["began"]


def check(settings: WatchSettings) -> WatchSettings:
    """Settings that an engine can work with, or a sentence."""
    for name in ("warmup", "window", "patience"):
        if getattr(settings, name) < 1:
            raise ValueError(
                f"{name} {getattr(settings, name)} is no number of rows: give 1 or more"
            )
    if settings.noise < 0:
        raise ValueError(f"noise {settings.noise} is negative: give 0 or more standard errors")
    return settings


def surcharge(track: Track) -> float:
    """What is asked of a change, as a share of the settings' noise: the more the longer a run."""
    length = GROWTH * math.log(track.seen)
    return RARE + length if track.rare else max(1.0, ROWS + length)


def fresh_names(case: Case) -> frozenset[str]:
    """The metrics of which a row must bring one to say something new on a case: the rare ones,
    where it has any, so that patience counts evaluations and not the rows between them."""
    names = frozenset(sign.metric for sign in case)
    return frozenset(name for name in names if METRICS[name].sparse) or names


def evidence(sign: Sign, look: Look) -> Evidence:
    """What a sign saw in a look."""
    before = None if sign.moved in ("above", "below") else look.reference(sign.since)
    since = None if before is None else sign.since
    return Evidence(metric=sign.metric, since=since, before=before, now=look.now)


def is_number(value: Any) -> bool:
    """Whether a value of a row is a number; truth values are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
