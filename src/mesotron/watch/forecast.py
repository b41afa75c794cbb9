"""What the rest of a run will bring, judged by its first part.

    present = see(...)             the level, trend and noise of the rewards so far
    gain = gain_interval(present)  linear in the logarithm of the time to come
    chances = outcome_chances(...) learn, plateau, collapse: two logistic regressions
    limits = find_limits(...)      what holds the run back, by its other metrics

Nothing is fitted here. The numbers of forecast.json are those of `python -m benchmarks.forecast`,
with how often they were right on runs that they were not fitted on. Signs of drift (entropy, KL,
gradient norm, clipped share, the watch's alarms) are not used: on runs of other sources they did
not make a collapse more predictable than the reward alone does.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mesotron.watch.metrics import Row, canonical

Outcome = Literal["learn", "plateau", "collapse", "unknown"]
Curve = NDArray[np.float64]  # [points, 2]: step, value
Terms = dict[str, float]

LEAST_REWARDS = 6
LEAST_LEVEL = 5  # rewards that a level is the mean of
# A gain counts from this share of the reward's range on, and from two standard errors.
LEAST_GAIN = 0.05
STANDARD_ERRORS = 2.0
# Of a reward that has left 0 to 1, what is left to gain is not known.
UNKNOWN_ROOM = 0.3
# Rewards that have been this high and never left 0 to 1 end at 1 at most; of lower ones some
# leave it later.
NEAR_TOP = 0.9
# A run is hopeless with at most this chance to learn, and a lasting cause or this chance of a
# collapse.
LEAST_CHANCE = 0.1
LIKELY_COLLAPSE = 0.5
# What limits a run, from these shares of groups or completions on. Chosen, not fitted.
SILENT_GROUPS = 0.5
TRUNCATED = 0.3
UNFORMATTED = 0.3
CLEARLY_BETTER = 0.1  # more outcomes right than by always saying plateau
MENDING = 0.05  # a share that falls by more is being mended by time


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and where it lies in four runs of five."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        return f"{self.value:.3g} at the end (80%: {self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What holds a run back, and what helps."""

    name: str  # signal, truncation, format or noise
    share: float  # of the groups or completions; of noise, its size beside the expected gain
    remedy: str
    is_mending: bool  # whether time alone improves it

    def text(self) -> str:
        if self.name == "noise":
            size = f"{self.share:.1f} times the expected gain"
        else:
            size = f"{self.share:.2f}"

        return f"{self.name} ({size}): {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How a run will end, seen from a step.

    Args:
        outcome: the most probable one, from the present level on.
        probabilities: of learn, plateau and collapse.
        step: the last one that was seen.
        steps: the planned end; a guess, twice the steps so far, if `is_guess`.
        present: level of the reward, or of the held-out score where no reward is logged.
        least_gain: what counts as learning.
        reward: mean reward of the last tenth of the run.
        heldout: the last held-out score.
        limits: what holds the run back, the worst first.
        hours: from the last step to the end.
        dollars: for them.
        why: why the outcome is unknown.
        record: how such forecasts did on runs that they were not fitted on.
    """

    outcome: Outcome
    step: float
    steps: float
    is_guess: bool = False
    probabilities: Mapping[str, float]
    present: float | None = None
    least_gain: float = 0.0
    reward: Interval | None = None
    heldout: Interval | None = None
    limits: tuple[Limit, ...] = ()
    hours: float | None = None
    dollars: float | None = None
    why: str = ""
    record: Mapping[str, float]

    @property
    def is_hopeless(self) -> bool:
        """Whether a gain is unlikely by interval and outcome alike, for a reason that lasts."""
        end = self.reward or self.heldout
        if self.outcome == "unknown" or end is None or self.present is None:
            return False
        if end.high - self.present >= self.least_gain:
            return False
        if self.probabilities["learn"] > LEAST_CHANCE:
            return False

        lasts = any(each.name != "noise" and not each.is_mending for each in self.limits)
        return lasts or self.probabilities["collapse"] >= LIKELY_COLLAPSE

    def to_record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"is_hopeless": self.is_hopeless, "text": self.text()}

    def text(self, with_record: bool = True) -> str:
        """One paragraph, with how often such forecasts were right."""
        end = f"{self.steps:.0f}"
        if self.is_guess:
            end += " (a guess, twice the steps so far: give --steps)"
        start = f"forecast at step {self.step:.0f} for step {end}"
        if self.outcome == "unknown":
            return f"{start}: unknown, {self.why}"

        chances = [f"{name} {chance:.2f}" for name, chance in self.probabilities.items()]
        sentences = [f"{start}: {self.outcome} ({', '.join(chances)})"]
        sentences += self._end_sentences()

        if self.limits:
            sentences.append("Limited by " + "; ".join(limit.text() for limit in self.limits))
        if self.hours is not None:
            price = "" if self.dollars is None else f" and ${self.dollars:,.2f}"
            hours = f"{self.hours:.2g}" if self.hours < 100 else f"{self.hours:,.0f}"
            sentences.append(f"To the end: {hours} hours{price}")
        if self.is_hopeless:
            sentences.append("Hopeless: no gain is likely, for a reason that time does not mend")
        if with_record:
            sentences.append(record_text(self.record))

        return ". ".join(sentences)

    def _end_sentences(self) -> list[str]:
        """Where the reward and the held-out score end."""
        now = f"{self.present:.3g} now, "
        sentences = []
        if self.reward is not None:
            sentences.append(f"Reward: {now}{self.reward.text()}")
            now = ""
        if self.heldout is not None:
            sentences.append(f"Held-out score: {now}{self.heldout.text()}")

        return sentences


def forecast(
    rows: Sequence[Mapping[str, Any]],
    steps: float | None = None,
    price: float | None = None,
) -> Forecast:
    """Forecast the rest of a run.

    Args:
        rows: those logged so far, under any names that the watch knows, each with its step.
        steps: the planned last step (None: twice as many as so far).
        price: dollars per hour.

    Example:
        >>> rows = [{"step": k, "reward": 0.2 + 0.01 * k} for k in range(1, 21)]
        >>> forecast(rows, steps=40).outcome
        'learn'
    """
    known = [_finite(row) for row in rows]
    rewards = curve_of(known, "reward")
    scores = curve_of(known, "heldout")
    main = rewards if len(rewards) or not len(scores) else scores

    step = max((row["step"] for row in known), default=0.0)
    begin = _begin(known)
    is_guess = steps is None
    if steps is None:
        steps = 2 * step - begin

    unknown = why_unknown(main, rows, step, steps)
    horizon = 0.0
    if step > begin:
        horizon = math.log(max((steps - begin) / (step - begin), 1.0))

    hours, dollars = _cost(known, steps - step, price)
    common: dict[str, Any] = {
        "step": step,
        "steps": steps,
        "is_guess": is_guess,
        "hours": hours,
        "dollars": dollars,
        "record": record_at(horizon),
    }
    if unknown:
        return Forecast(outcome="unknown", probabilities={}, why=unknown, **common)

    present = see(main[:, 1], horizon)
    gain = gain_interval(present)
    end = present.to_reward(gain)
    heldout = heldout_interval(scores, horizon, gain.value if len(rewards) else 0.0)
    chances = outcome_chances(present)

    return Forecast(
        outcome=max(OUTCOMES, key=lambda name: chances[name]),
        probabilities=chances,
        present=present.low + present.scale * present.level,
        least_gain=present.scale * present.least_gain,
        reward=end if len(rewards) else None,
        heldout=heldout if len(rewards) else end,
        limits=find_limits(known, present, gain),
        **common,
    )


OUTCOMES: tuple[Outcome, ...] = ("learn", "plateau", "collapse")


def _finite(row: Mapping[str, Any]) -> Row:
    """The finite numbers of a row by our names, with its step."""
    numbers: Row = {}
    for key, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[key] = float(value)

    known = {key: x for key, x in canonical(numbers).items() if math.isfinite(x)}
    return known | {"step": numbers["step"]}


def curve_of(rows: Sequence[Row], name: str) -> Curve:
    """Steps and values of a metric."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return np.array(points, dtype=float).reshape(-1, 2)


def _begin(rows: Sequence[Row]) -> float:
    """The step before the first one: runs may begin at 0, at 1 or where another one ended."""
    if len(rows) < 2:
        return 0.0

    spacing = (rows[-1]["step"] - rows[0]["step"]) / (len(rows) - 1)
    return rows[0]["step"] - spacing


def why_unknown(main: Curve, rows: Sequence[Mapping[str, Any]], step: float, steps: float) -> str:
    """Why there is no forecast; "" if there is one."""
    if len(main) < LEAST_REWARDS:
        return f"{len(main)} rewards or held-out scores are too few: {LEAST_REWARDS} are needed"
    if step >= steps:
        return f"step {step:.0f} is not before the planned end, step {steps:.0f}"
    if np.ptp(main[:, 1]) == 0:
        return f"the reward is {main[0, 1]:g} in all {len(main)} rows"
    if main[-1, 0] < step - (main[-1, 0] - main[0, 0]) / 2:
        return f"no finite reward after step {main[-1, 0]:.0f}"

    latest = canonical({k: x for k, x in rows[-1].items() if isinstance(x, float)})
    if not all(math.isfinite(latest.get(name, 0.0)) for name in ("reward", "loss")):
        return f"the numbers of step {step:.0f} are not finite"

    return ""


# What is seen


@dataclass(frozen=True, kw_only=True)
class Present:
    """The rewards so far, in units of their range.

    Args:
        low: the reward that counts as 0.
        scale: the reward's range.
        floor: the least reward that the end can have, in these units; -inf if not known.
        ceiling: the largest; inf if not known.
        level: mean of the last third.
        noise: standard deviation of one reward.
        error: standard error of the difference of two levels.
        horizon: logarithm of the whole run's length over the seen one.
        up: how clearly the rewards rise, 0 to 1.
        down: how clearly they fall.
        recent_up: the same of the last half.
        recent_down: of the last half.
        room: what is left to gain.
        fallen: share of the best level that was lost.
    """

    low: float
    scale: float
    floor: float
    ceiling: float
    level: float
    noise: float
    error: float
    horizon: float
    up: float
    down: float
    recent_up: float
    recent_down: float
    room: float
    fallen: float

    @property
    def least_gain(self) -> float:
        return max(LEAST_GAIN, STANDARD_ERRORS * self.error)

    def to_reward(self, gain: Interval) -> Interval:
        """The reward after a gain."""
        ends = []
        for x in (gain.value, gain.low, gain.high):
            end = min(max(self.level + x, self.floor), self.ceiling)
            ends.append(self.low + self.scale * end)

        return Interval(value=ends[0], low=ends[1], high=ends[2])


def reward_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """What counts as 0 and as 1: those themselves, or the 1st and 99th percentile of rewards that
    leave them."""
    if values.min() >= 0 and values.max() <= 1:
        return 0.0, 1.0

    low = min(0.0, float(np.sort(values)[len(values) // 100]))
    high = float(np.quantile(values, 0.99))
    return low, max(high - low, 1e-9)


def level_width(count: int) -> int:
    """Rewards that the present level is the mean of: a third, five at the least."""
    return min(max(LEAST_LEVEL, count // 3), count)


def see(rewards: NDArray[np.float64], horizon: float) -> Present:
    """Level, trend and noise of the rewards so far (at least four)."""
    low, scale = reward_range(rewards)
    is_bounded = (low, scale) == (0.0, 1.0)
    values = (rewards - low) / scale
    count = len(values)
    width = level_width(count)
    level = float(values[-width:].mean())

    steps = np.diff(values)
    noise = max(math.sqrt(float((steps**2).mean()) / 2), 1e-3)

    # Over the whole, learning is slower and slower: linear in the logarithm of time.
    whole = rise(np.log(np.arange(count) + 3.0), values, noise)
    half = max(count // 2, 3)
    recent = rise(np.arange(half, dtype=float), values[-half:], noise)

    smooth_width = min(max(LEAST_LEVEL, count // 20), count)
    smooth = np.convolve(values, np.ones(smooth_width) / smooth_width, "valid")
    best = float(smooth.max())

    return Present(
        low=low,
        scale=scale,
        floor=-low / scale if rewards.min() >= 0 else -math.inf,
        ceiling=1.0 if is_bounded and rewards.max() >= NEAR_TOP else math.inf,
        level=level,
        noise=noise,
        error=noise * math.sqrt(2 / width),
        horizon=horizon,
        up=math.tanh(max(whole, 0.0) / 4),
        down=math.tanh(max(-whole, 0.0) / 4),
        recent_up=math.tanh(max(recent, 0.0) / 3),
        recent_down=math.tanh(max(-recent, 0.0) / 3),
        room=1 - level if is_bounded else UNKNOWN_ROOM,
        fallen=min((best - level) / max(best, LEAST_GAIN), 1.0),
    )


def rise(x: NDArray[np.float64], y: NDArray[np.float64], noise: float) -> float:
    """The slope of a line, in standard errors."""
    centered = x - x.mean()
    return float((centered * y).sum()) / (noise * math.sqrt(float((centered**2).sum())))


# What follows from it


@lru_cache
def fitted() -> dict[str, Any]:
    """Coefficients and their track record, as the study wrote them."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def gain_terms(present: Present) -> Terms:
    """What the quantiles of the gain are linear in."""
    horizon = present.horizon
    return {
        "horizon": horizon,
        "room": horizon * present.room * present.up,
        "recent_down": horizon * present.recent_down,
        "error": present.error,
    }


def learn_terms(present: Present) -> Terms:
    """What the log-odds of learning, rather than a plateau, are linear in."""
    return {
        "one": 1.0,
        "log_horizon": log_horizon(present),
        "up": present.up,
        "down": present.down,
        "room": present.room,
        "recent_up": present.recent_up,
        "recent_down": present.recent_down,
    }


def collapse_terms(present: Present) -> Terms:
    """What the log-odds of a collapse are linear in."""
    return {
        "one": 1.0,
        "log_horizon": log_horizon(present),
        "fallen": present.fallen,
        "down": present.down,
        "recent_down": present.recent_down,
    }


def log_horizon(present: Present) -> float:
    return math.log(min(max(present.horizon, 0.05), 3.0))


def weigh(coefficients: Mapping[str, float], terms: Terms) -> float:
    return sum(coefficients[name] * value for name, value in terms.items())


def quantiles(model: Mapping[str, Any], terms: Terms) -> Interval:
    """The median, and an interval that was widened until it held what it says."""
    middle = weigh(model["middle"], terms)
    below = max(middle - weigh(model["low"], terms), 0.0)
    above = max(weigh(model["high"], terms) - middle, 0.0)

    return Interval(
        value=middle,
        low=middle - model["widen_low"] * below,
        high=middle + model["widen_high"] * above,
    )


def gain_interval(present: Present) -> Interval:
    """Gain of the reward from the present level to the end, in units of its range."""
    return quantiles(fitted()["gain"], gain_terms(present))


def outcome_chances(present: Present) -> dict[str, float]:
    collapse = chance(weigh(fitted()["collapse"], collapse_terms(present)))
    learn = chance(weigh(fitted()["learn"], learn_terms(present)))

    return {
        "learn": (1 - collapse) * learn,
        "plateau": (1 - collapse) * (1 - learn),
        "collapse": collapse,
    }


def chance(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


def heldout_terms(score: float, horizon: float, reward_gain: float) -> Terms:
    """What the quantiles of the held-out gain are linear in, in units of the scores' range."""
    return {
        "horizon": horizon,
        "reward": reward_gain,
        "spread": math.sqrt(max(score * (1 - score), 0.01)),
    }


def heldout_interval(scores: Curve, horizon: float, reward_gain: float) -> Interval | None:
    """The last held-out score; None without one so far."""
    if not len(scores):
        return None

    low, scale = reward_range(scores[:, 1])
    now = float(scores[-1, 1])
    terms = heldout_terms((now - low) / scale, horizon, reward_gain)
    gain = quantiles(fitted()["heldout"], terms)
    ends = [now + scale * gain.value, now + scale * gain.low, now + scale * gain.high]
    if (low, scale) == (0.0, 1.0):
        ends = [min(max(x, 0.0), 1.0) for x in ends]

    return Interval(value=ends[0], low=ends[1], high=ends[2])


# What limits it


def find_limits(rows: Sequence[Row], present: Present, gain: Interval) -> tuple[Limit, ...]:
    """What holds the run back, the worst first."""
    silent = ShareTrend.of(rows, "zero_signal")
    truncated = ShareTrend.of(rows, "truncated")
    formatted = ShareTrend.of(rows, "formatted")

    limits = []
    if silent is not None and silent.now >= SILENT_GROUPS:
        limits.append(silent.limit("signal", silent_remedy(rows, present)))
    if truncated is not None and truncated.now >= TRUNCATED:
        limits.append(truncated.limit("truncation", "allow more tokens"))
    if formatted is not None and 1 - formatted.now >= UNFORMATTED:
        missing = ShareTrend(now=1 - formatted.now, before=1 - formatted.before)
        remedy = "show the format in the prompt or by a supervised start"
        limits.append(missing.limit("format", remedy))

    limits.sort(key=lambda limit: -limit.share)
    expected = max(abs(gain.value), LEAST_GAIN)
    if STANDARD_ERRORS * present.error > expected:
        share = STANDARD_ERRORS * present.error / expected
        remedy = "a larger batch shows smaller gains"
        limits.append(Limit(name="noise", share=share, remedy=remedy, is_mending=True))

    return tuple(limits)


@dataclass(frozen=True)
class ShareTrend:
    """A share of groups or completions: medians of its first and last third."""

    now: float
    before: float

    @classmethod
    def of(cls, rows: Sequence[Row], name: str) -> "ShareTrend | None":
        values = [row[name] for row in rows if name in row]
        if not values:
            return None

        third = max(len(values) // 3, 1)
        return cls(now=median(values[-third:]), before=median(values[:third]))

    def limit(self, name: str, remedy: str) -> Limit:
        is_mending = self.before - self.now > MENDING
        return Limit(name=name, share=self.now, remedy=remedy, is_mending=is_mending)


def silent_remedy(rows: Sequence[Row], present: Present) -> str:
    right = ShareTrend.of(rows, "all_right")
    wrong = ShareTrend.of(rows, "all_wrong")
    if right is not None and wrong is not None:
        is_solved = right.now > wrong.now
    else:
        is_solved = present.level >= 0.5

    if is_solved:
        return "most groups are solved: take harder problems"
    return "most groups fail alike: easier problems, more samples of each or a supervised start"


# What it costs


def _cost(
    rows: Sequence[Row], steps_left: float, price: float | None
) -> tuple[float | None, float | None]:
    """Hours to the end, and dollars."""
    times = [row["step_time"] for row in rows if "step_time" in row]
    if not times or steps_left <= 0:
        return None, None

    hours = fmean(times[-level_width(len(times)) :]) * steps_left / 3600
    return hours, None if price is None else hours * price


# How good it is


def record_at(horizon: float) -> dict[str, float]:
    """The track record of forecasts from about the same share of the run."""
    share = math.exp(-horizon)
    records = fitted()["record"]
    return min(records, key=lambda each: abs(math.log(each["share"] / share)))


def record_text(record: Mapping[str, float]) -> str:
    def percent(name: str) -> str:
        return f"{record[name]:.0%}"

    advice = "trust both"
    if record["public_hits"] < record["public_naive_hits"] + CLEARLY_BETTER:
        advice = "trust the interval, not the outcome, of others' runs"

    return (
        f"Of {record['runs']:.0f} runs not used for fitting, asked at {percent('share')}, "
        f"{percent('inside')} ended inside the interval ({percent('naive_inside')} in that of "
        f'"it stays as it is"), and the outcome was right in {percent("hits")} '
        f"({percent('naive_hits')} were a plateau); of {record['public_runs']:.0f} by others, each "
        f"left out in turn, {percent('public_inside')} ({percent('public_naive_inside')}) and "
        f"{percent('public_hits')} ({percent('public_naive_hits')}): {advice}"
    )
