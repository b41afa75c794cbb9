"""A baseline: the fixed thresholds for GRPO of microsoft/post-training-toolkit (January 2026).

Its published thresholds as data: each rule compares the mean of a metric over a window
with a number, whatever the run's own beginning was. A rule of severity high is what that toolkit
can stop a run for. Rules on metrics that TRL does not log (advantages, sampling ratios) are left
out, and so is its floor of 1 nat for entropy, below which every run of a tiny model starts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean
from typing import Literal

Severity = Literal["medium", "high"]
Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """The mean of the last `window` rows against a limit.

    Args:
        name: of the rule.
        metric: as the rows call it.
        window: rows; the rule is silent before there are as many (twice, with a baseline).
        above: alarm above this.
        below: alarm below this.
        relative: the mean is first divided by that of the first `window` rows.
        severity: the toolkit's.
    """

    name: str
    metric: str
    window: int
    above: float = math.inf
    below: float = -math.inf
    relative: bool = False
    severity: Severity


RULES = (
    Threshold(
        name="group reward std", metric="groups/spread", window=20, below=0.01, severity="high"
    ),
    Threshold(
        name="entropy floor",
        metric="entropy",
        window=30,
        below=0.1,
        severity="high",
    ),
    Threshold(
        name="entropy drop",
        metric="entropy",
        window=30,
        below=0.5,
        relative=True,
        severity="medium",
    ),
    Threshold(
        name="KL cap",
        metric="kl",
        window=1,
        above=0.3,
        severity="high",
    ),
    Threshold(
        name="length drift",
        metric="completions/mean_length",
        window=30,
        above=1.3,
        below=0.7,
        relative=True,
        severity="medium",
    ),
    Threshold(
        name="clip ratio", metric="clip_ratio/region_mean", window=20, above=0.25, severity="medium"
    ),
    Threshold(
        name="clip ratio, high",
        metric="clip_ratio/region_mean",
        window=20,
        above=0.375,
        severity="high",
    ),
    Threshold(
        name="truncation",
        metric="completions/clipped_ratio",
        window=1,
        above=0.3,
        severity="medium",
    ),
    Threshold(
        name="repetition", metric="completions/repetition", window=1, above=0.2, severity="medium"
    ),
)
CORRELATION_WINDOW = 50
CORRELATED: dict[Severity, float] = {"medium": 0.6, "high": 0.8}
SPIKE_WINDOWS = (10, 50)
SPIKE: dict[Severity, float] = {"medium": 2.5, "high": 3.75}


class StaticThresholds:
    """Reads a run row by row, as the watch does.

    Args:
        shrink: divide every window by this; runs of 60 steps are short for windows of 50.
    """

    def __init__(self, shrink: int = 1) -> None:
        self.shrink = shrink
        self.past: dict[str, list[float]] = {}

    def update(self, row: Row) -> list[tuple[str, Severity]]:
        """Take in one row; the rules that hold now, with their severity."""
        for name, value in row.items():
            if math.isfinite(value):  # the toolkit's comparisons with NaN are all false
                self.past.setdefault(name, []).append(value)

        found = []
        for rule in RULES:
            if self._holds(rule):
                found.append((rule.name, rule.severity))

        found += above("reward and length", self._correlation(), CORRELATED)
        return found + above("reward std spike", self._spike(), SPIKE)

    def _window(self, rows: int) -> int:
        return max(rows // self.shrink, 1)

    def _holds(self, rule: Threshold) -> bool:
        values = self.past.get(rule.metric, [])
        size = self._window(rule.window)
        enough = 2 * size if rule.relative else size
        if len(values) < enough:
            return False

        now = fmean(values[-size:])
        if rule.relative:
            first = fmean(values[:size])
            now = now / first if first > 0 else 1.0
        return now > rule.above or now < rule.below

    def _correlation(self) -> float:
        size = self._window(CORRELATION_WINDOW)
        rewards = self.past.get("reward", [])[-size:]
        lengths = self.past.get("completions/mean_length", [])[-size:]
        if len(rewards) < size:
            return 0.0

        try:
            return abs(correlation(rewards, lengths))
        except StatisticsError:  # one of them is constant
            return 0.0

    def _spike(self) -> float:
        """Spread of the recent reward_std against its spread over a longer past."""
        short, long = map(self._window, SPIKE_WINDOWS)
        values = self.past.get("reward_std", [])
        if len(values) < long // 2:
            return 0.0

        spread = deviation(values[-long:])
        if spread > 0:
            return deviation(values[-short:]) / spread

        return 0.0


def above(name: str, value: float, limits: dict[Severity, float]) -> list[tuple[str, Severity]]:
    """The severities whose limit a value exceeds."""
    return [(name, severity) for severity, limit in limits.items() if value > limit]


def deviation(values: list[float]) -> float:
    """The standard deviation of a sample; 0 for one value."""
    middle = fmean(values)
    squares = sum((value - middle) ** 2 for value in values)
    return math.sqrt(squares / max(len(values) - 1, 1))
