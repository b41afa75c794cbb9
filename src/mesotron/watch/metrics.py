"""Our names for the numbers of a run, and what other trainers call them.

A logged name is looked up in two ways. metrics.toml lists names of TRL, verl, prime-rl, OpenRLHF,
NeMo-RL, slime, SkyRL, AReaL, ms-swift, ART, tinker and others. `words` reads any other name by its
words.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from mesotron.watch.rows import Row
from mesotron.watch.words import (
    LISTED,
    MAX_NAME,
    NEUTRAL,
    NOT_REWARD,
    REWARD_WORDS,
    RULES,
    STATISTICS,
    by_words,
    is_evaluation,
    plain_name,
    words_of,
)

Convert = Callable[[float], float]  # of a unit


@dataclass(frozen=True)
class Metric:
    """A number that detectors read."""

    name: str
    meaning: str
    names: tuple[str, ...] = ()  # in logs, the best source first; * matches anything
    combine: Literal["mean", "max"] = "mean"  # several matches of one name with a *
    sparse: bool = False  # logged a few times per run (an evaluation): each value counts by itself


def _read_metrics() -> dict[str, Metric]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    metrics = {}
    for name, table in tomllib.loads(text).items():
        names = tuple(table.pop("names", ()))
        metrics[name] = Metric(name, names=names, **table)

    return metrics


METRICS = _read_metrics()
_STANDARD = {name: next(iter(metric.names), name) for name, metric in METRICS.items()}
_STANDARD["heldout"] = "eval/accuracy"  # not known to be greedy
_NATIVE = {*_STANDARD.values(), "eval/greedy"}
_PARTS = {"correct", "formatted"}  # from single reward functions
GROUPS = ("mixed", "all_right", "all_wrong")
REWARD_MODEL = {"min_reward", "mean_reward", "max_reward", "margin"}  # logged by TRL's
PERCENT = {"pct", "percent", "percentage"}


# From a row to our names


def canonical(row: Mapping[str, float]) -> Row:
    """The numbers of a row by our names, non-finite ones included; unknown names are left out.

    Example:
        >>> canonical({"train/reward": 0.5, "completions / mean_length": 80.0, "my/thing": 1.0})
        {'reward': 0.5, 'length': 80.0}
    """
    values: Row = {}
    for name, keys in _sources(tuple(row)).items():
        numbers = [convert(row[key]) if convert else row[key] for key, convert in keys]
        if name in _PARTS:  # TRL logs NaN for a reward function that judged no completion
            numbers = [number for number in numbers if math.isfinite(number)]

        if numbers:
            values[name] = _combine(name, numbers)

    if "train_runtime" in row:  # Trainer's last row: train_loss is the mean over the run
        values.pop("loss", None)
    if row.keys() >= REWARD_MODEL:
        values.pop("reward", None)  # its scale is free

    return _derive(values)


def _combine(name: str, numbers: list[float]) -> float:
    if METRICS[name].combine == "max":
        return max(numbers)
    return sum(numbers) / len(numbers)


def _derive(values: Row) -> Row:
    """Shares from counts of groups, and what is the difference of two logged numbers."""
    if "mixed" in values or "all_wrong" in values:
        _count_to_share(values)

    if "mixed" in values:
        values.setdefault("zero_signal", 1 - values["mixed"])
    if values.keys() >= {"sequence_length", "prompt_length"}:
        values.setdefault("length", values["sequence_length"] - values["prompt_length"])

    return values


def _count_to_share(values: Row) -> None:
    """Some log how many groups are all right, all wrong or mixed, in place of their share."""
    groups = {name: values.get(name, 0.0) for name in GROUPS}
    total = sum(groups.values())
    if "mixed" in values and total > 1.01:  # rllm
        for name, count in groups.items():
            values[name] = count / total
    elif max(groups.values()) > 1:  # out of an unknown number
        for name in GROUPS:
            values.pop(name, None)


def standard_row(row: Row) -> Row:
    """A row under the names of our own logs, for charts; unknown names are kept.

    Example:
        >>> standard_row({"rewards_avg": 0.5, "response_length/mean": 80.0, "train/thing": 1.0})
        {'thing': 1.0, 'reward': 0.5, 'completions/mean_length': 80.0}
    """
    used = sources(row)
    foreign = {name for name, keys in used.items() if _NATIVE.isdisjoint(keys)}
    taken: set[str] = set()
    for name in foreign:
        taken.update(used[name])

    standard: Row = {}
    for key, value in row.items():
        if key not in taken or key in _NATIVE:
            standard[plain_name(key)] = value

    for name, value in canonical(row).items():
        if name in foreign or name not in used:
            standard.setdefault(_STANDARD[name], value)

    return standard


# What a logged name stands for


def is_known(name: str) -> bool:
    """Whether a logged name stands for a metric."""
    return bool(_matches(name))


def sources(names: Iterable[str]) -> dict[str, list[str]]:
    """Which of the logged names each metric is read from."""
    by_metric = _sources(tuple(names))
    return {metric: [key for key, _ in keys] for metric, keys in by_metric.items()}


@lru_cache(maxsize=256)
def _sources(names: tuple[str, ...]) -> dict[str, list[tuple[str, Convert | None]]]:
    """The best of the logged names for each metric, and how to convert its unit."""
    ranks: dict[str, int] = {}
    best: dict[str, list[tuple[str, Convert | None]]] = {}
    for name in names:
        for match in _matches(name):
            metric = match.metric
            if metric not in ranks or match.rank < ranks[metric]:
                ranks[metric] = match.rank
                best[metric] = []
            if match.rank == ranks[metric]:
                best[metric].append((name, match.convert))

    return best


class Match(NamedTuple):
    """A metric that a logged name stands for."""

    metric: str
    rank: int  # of the source, 0 is best
    convert: Convert | None  # its unit


@lru_cache(maxsize=65536)
def _matches(name: str) -> tuple[Match, ...]:
    """The metrics that a logged name stands for."""
    if len(name) > MAX_NAME:
        return ()

    plain = plain_name(name)
    ranks = _listed_ranks(plain) or by_words(name)
    unit = _unit_of(name, plain)

    return tuple(Match(metric, rank, unit) for metric, rank in ranks.items())


def _listed_ranks(plain: str) -> dict[str, int]:
    """The metrics whose tables list a name, each with its place in the table."""
    lower = plain.lower()
    ranks = dict(_LISTED_NAMES.get(lower, ()))
    for metric, rank, pattern in _PATTERNS:
        if rank < ranks.get(metric, LISTED) and pattern.fullmatch(plain):
            ranks[metric] = rank

    if lower.rpartition("/")[2] in STATISTICS:  # rewards/my_format/std
        for metric in _PARTS:
            ranks.pop(metric, None)

    if "formatted" in ranks:  # rewards/correct_format/mean
        ranks.pop("correct", None)

    return ranks


def own_name(metric: str) -> str:
    """The logged name that takes precedence over all others of a metric."""
    return f"watch/{metric}"


def _index_names() -> tuple[dict[str, dict[str, int]], list[tuple[str, int, re.Pattern[str]]]]:
    """The tables by plain name -> metric -> rank, and the patterns with their metrics and ranks."""
    listed: dict[str, dict[str, int]] = {}
    patterns = []
    for metric in METRICS.values():
        for rank, name in enumerate((own_name(metric.name), *metric.names)):
            plain = plain_name(name).lower()
            if "*" not in plain:
                listed.setdefault(plain, {}).setdefault(metric.name, rank)
                continue

            parts = map(re.escape, plain.split("*"))
            pattern = re.compile(".*".join(parts), re.IGNORECASE)
            patterns.append((metric.name, rank, pattern))

    return listed, patterns


_LISTED_NAMES, _PATTERNS = _index_names()


# Other units


def _percent(value: float) -> float:
    return value / 100


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


_UNITS: dict[str, Convert] = {
    "token_mult_prob_error": _log,  # mean of exp(abs gap)
    "baseline_reward/pct_0": _percent,
    "baseline_reward/pct_1": _percent,
    # The entropy or its negative.
    "entropy_loss": abs,
    "actor/entropy_loss": abs,
    # Signed estimates.
    "optim/kl_sample_train_v1": abs,
    "vllm_kl": abs,
    "rollout_corr/kl": abs,
    "rollout_correction/kl": abs,
}


def _unit_of(name: str, plain: str) -> Convert | None:
    unit = _UNITS.get(plain.lower())
    if unit is None and words_of(name) & PERCENT:
        return _percent
    return unit


# Names that are not known


def guess_reward(names: Iterable[str]) -> list[str]:
    """Names to read the reward from where none is known: the accuracy, or else reward parts."""
    names = list(names)
    known = sources(names)
    if "reward" in known:
        return []
    if "correct" in known:
        return known["correct"]

    return [name for name in names if _is_reward_part(name)]


def _is_reward_part(name: str) -> bool:
    words = words_of(name)
    if words.isdisjoint({"reward", "score"}) or is_evaluation(name):
        return False
    return words.isdisjoint(STATISTICS | NOT_REWARD)


def suggest_names(unknown: Iterable[str], metric: str = "reward") -> list[str]:
    """The names most like those of a metric, the best first."""
    known: set[str] = set()
    for rule in RULES:
        if rule.metric == metric:
            known.update(rule.needs[0])
    for name in METRICS[metric].names:
        known.update(words_of(name))

    known -= NEUTRAL | REWARD_WORDS
    scores = {name: _likeness(name, known) for name in list(unknown)[:500]}
    close = [name for name, score in scores.items() if score >= 0.6]

    return sorted(close, key=lambda name: -scores[name])[:3]


def _likeness(name: str, known: set[str]) -> float:
    """How much the most similar word of a name is like one of the known words."""
    best = 0.0
    for word in list(words_of(name))[:20]:
        for other in known:
            ratio = difflib.SequenceMatcher(None, word[:40], other).ratio()
            best = max(best, ratio)

    return best
