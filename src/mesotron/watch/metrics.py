"""Our names for the numbers of a run, and what other trainers call them.

A logged name is looked up in two ways. metrics.toml lists names of TRL, verl, prime-rl, OpenRLHF,
NeMo-RL, slime, SkyRL, AReaL, ms-swift, ART, tinker and others. words.toml reads any other name by
its words: `train/avg_completion_len` has those of a length, and none of another number.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Row = Mapping[str, float]
Convert = Callable[[float], float]  # of a unit


@dataclass(frozen=True)
class Metric:
    """A number that detectors read."""

    name: str
    meaning: str
    names: tuple[str, ...] = ()  # in logs, the best source first; * matches anything
    combine: Literal["mean", "max"] = "mean"  # several matches of one name with a *
    sparse: bool = False  # logged a few times per run (an evaluation): each value counts by itself


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
METRICS = {
    name: Metric(name, **table | {"names": tuple(table.get("names", ()))})
    for name, table in _TABLES.items()
}
_STANDARD = {name: next(iter(metric.names), name) for name, metric in METRICS.items()}
_STANDARD["heldout"] = "eval/accuracy"  # not known to be greedy
_NATIVE = {*_STANDARD.values(), "eval/greedy"}

# Other units, by plain name.
_UNITS: dict[str, Convert] = {
    "token_mult_prob_error": lambda x: math.log(x) if x > 0 else math.nan,  # mean of exp(abs gap)
    **dict.fromkeys(("baseline_reward/pct_0", "baseline_reward/pct_1"), lambda x: x / 100),
    # The entropy or its negative, and signed estimates.
    **dict.fromkeys(
        (
            "entropy_loss",
            "actor/entropy_loss",
            "optim/kl_sample_train_v1",
            "vllm_kl",
            "rollout_corr/kl",
            "rollout_correction/kl",
        ),
        abs,
    ),
}

_WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
STEP_NAMES = tuple(_WORDS["steps"].split())
# Matching a pattern with two * against a name of a million letters would take minutes.
MAX_NAME = 500
_PHASES, _EVALUATION, _NEUTRAL, _REWARD_WORDS, _NOT_REWARD, _NOT_HELDOUT, _STATISTICS = (
    frozenset(_WORDS[key].split())
    for key in (
        "phases",
        "evaluation",
        "neutral",
        "reward",
        "not_reward",
        "not_heldout",
        "statistics",
    )
)
_HELDOUT = _WORDS["heldout"].split()


@dataclass(frozen=True)
class Rule:
    """Names that stand for a metric: a word of each of `needs`, and no word beyond `also`."""

    metric: str
    needs: tuple[tuple[str, ...], ...]  # each with alternatives, the best first
    also: frozenset[str]


def _read_rule(metric: str, needs: list[str], also: str = "") -> Rule:
    words = frozenset(also.replace("$reward", _WORDS["reward"]).split())
    return Rule(metric, tuple(tuple(each.split()) for each in needs), _NEUTRAL | words)


_RULES = [_read_rule(**table) for table in _WORDS["rule"]]
_LISTED = 100  # rank of the best rule: a listed name is a better source
_PARTS = {"correct", "formatted"}  # from single reward functions


def canonical(row: Row) -> dict[str, float]:
    """The numbers of a row by our names, non-finite ones included; unknown names are left out.

    Example:
        >>> canonical({"train/reward": 0.5, "completions / mean_length": 80.0, "my/thing": 1.0})
        {'reward': 0.5, 'length': 80.0}
    """
    out: dict[str, float] = {}
    for name, keys in _sources(tuple(row)).items():
        values = [convert(row[key]) if convert else row[key] for key, convert in keys]
        if name in _PARTS:  # TRL logs NaN for a reward function that judged no completion
            values = [value for value in values if math.isfinite(value)]

        if values:
            largest = METRICS[name].combine == "max"
            out[name] = max(values) if largest else sum(values) / len(values)

    if "train_runtime" in row:  # Trainer's last row: train_loss is the mean over the run
        out.pop("loss", None)

    if {"min_reward", "mean_reward", "max_reward", "margin"} <= row.keys():
        out.pop("reward", None)  # TRL's reward model: its scale is free

    return _derive(out) if {"mixed", "sequence_length", "all_wrong"} & out.keys() else out


def _derive(values: dict[str, float]) -> dict[str, float]:
    """Shares from counts of groups, and what is the difference of two logged numbers."""
    counts = {name: values.get(name, 0.0) for name in ("mixed", "all_right", "all_wrong")}
    total = sum(counts.values())
    if "mixed" in values and total > 1.01:  # rllm counts groups
        values |= {name: count / total for name, count in counts.items()}
    elif max(counts.values()) > 1:  # counts, out of an unknown number
        values = {name: value for name, value in values.items() if name not in counts}

    if "mixed" in values and "zero_signal" not in values:
        values["zero_signal"] = 1 - values["mixed"]

    if "sequence_length" in values and "prompt_length" in values and "length" not in values:
        values["length"] = values["sequence_length"] - values["prompt_length"]

    return values


def standard_row(row: Row) -> dict[str, float]:
    """A row under the names of our own logs, for charts; unknown names are kept.

    Example:
        >>> standard_row({"rewards_avg": 0.5, "response_length/mean": 80.0, "train/thing": 1.0})
        {'thing': 1.0, 'reward': 0.5, 'completions/mean_length': 80.0}
    """
    used = sources(row)
    foreign = {name for name, keys in used.items() if not _NATIVE & set(keys)}
    taken = {key for name in foreign for key in used[name] if key not in _NATIVE}

    out = {plain_name(key): value for key, value in row.items() if key not in taken}
    for name, value in canonical(row).items():
        if name in foreign or name not in used:
            out.setdefault(_STANDARD[name], value)

    return out


def is_known(name: str) -> bool:
    """Whether a logged name stands for a metric."""
    return bool(_matches(name))


def sources(names: Iterable[str]) -> dict[str, list[str]]:
    """Which of the logged names each metric is read from."""
    return {name: [key for key, _ in keys] for name, keys in _sources(tuple(names)).items()}


@lru_cache(maxsize=256)
def _sources(names: tuple[str, ...]) -> dict[str, list[tuple[str, Convert | None]]]:
    best: dict[str, tuple[int, list[tuple[str, Convert | None]]]] = {}
    for key in names:
        for name, rank, convert in _matches(key):
            if name not in best or rank < best[name][0]:
                best[name] = (rank, [])
            if rank == best[name][0]:
                best[name][1].append((key, convert))

    return {name: keys for name, (_, keys) in best.items()}


def guess_reward(names: Iterable[str]) -> list[str]:
    """Names to read the reward from where none is known: the accuracy, or else reward parts."""
    names = list(names)
    found = sources(names)
    if "reward" in found:
        return []

    parts = [
        key
        for key in names
        if {"reward", "score"} & _words(key)
        and not _is_evaluation(key)
        and not _words(key) & (_STATISTICS | _NOT_REWARD)
    ]
    return found.get("correct", []) or parts


def suggest_names(unknown: Iterable[str], metric: str = "reward") -> list[str]:
    """The names most like those of a metric, the best first."""
    known = {word for rule in _RULES if rule.metric == metric for word in rule.needs[0]}
    known |= {word for name in METRICS[metric].names for word in _words(name)}
    known -= _NEUTRAL | _REWARD_WORDS

    scores = {
        key: max(
            (
                difflib.SequenceMatcher(None, word[:40], other).ratio()
                for word in list(_words(key))[:20]
                for other in known
            ),
            default=0.0,
        )
        for key in list(unknown)[:500]
    }

    close = [key for key, score in scores.items() if score >= 0.6]
    return sorted(close, key=lambda key: -scores[key])[:3]


@lru_cache(maxsize=65536)
def _matches(key: str) -> tuple[tuple[str, int, Convert | None], ...]:
    """The metrics that a logged name stands for, with the rank of the source (0 is best)."""
    if len(key) > MAX_NAME:
        return ()

    plain = plain_name(key)
    ranks = dict(_LISTED_NAMES.get(plain.lower(), ()))
    for name, rank, pattern in _PATTERNS:
        if rank < ranks.get(name, _LISTED) and pattern.fullmatch(plain):
            ranks[name] = rank

    if plain.lower().rpartition("/")[2] in _STATISTICS:  # rewards/my_format/std
        ranks = {name: rank for name, rank in ranks.items() if name not in _PARTS}

    ranks.pop("correct" if "formatted" in ranks else "", None)  # rewards/correct_format/mean
    ranks = ranks or _by_words(key)
    is_percent = _words(key) & {"pct", "percent", "percentage"}
    unit = _UNITS.get(plain.lower()) or ((lambda x: x / 100) if is_percent else None)

    return tuple((name, rank, unit) for name, rank in ranks.items())


def _by_words(key: str) -> dict[str, int]:
    words = _words(key)
    if _is_evaluation(key):
        place = next((k for k, word in enumerate(_HELDOUT) if word in words), None)
        scored = any(word.startswith(("mean@", "avg@", "pass@")) for word in words)
        if (place is None and not scored) or {x.partition("@")[0] for x in words} & _NOT_HELDOUT:
            return {}

        # Accuracy before reward; names of several problem sets are averaged.
        return {"heldout": _LISTED + 50 * (place is not None and place >= _HELDOUT.index("score"))}

    for rule in _RULES:
        rest = set(words)
        rank = _LISTED
        for options in rule.needs:
            place = next((k for k, word in enumerate(options) if word in words), None)
            if place is None:
                break

            rank += 20 * place if options is rule.needs[0] else 0
            rest -= set(options)
        else:
            if rest <= rule.also:
                return {rule.metric: rank + len(rest)}

    return {}


def _is_evaluation(key: str) -> bool:
    parts = [re.split(r"[^a-z0-9]+", part)[0] for part in plain_name(key).lower().split("/")]
    return parts[0] not in ("reward", "rewards") and not _EVALUATION.isdisjoint(parts)


def _words(key: str) -> frozenset[str]:
    """The words of a name, singular: `rewardsAvg` and `rewards / avg` are reward and avg."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", plain_name(key[:MAX_NAME]))
    words = (word for word in re.split(r"[^a-z0-9@]+", spaced.lower()) if word)

    return frozenset(
        word[:-3] + "y"
        if word.endswith("ies")
        else word[:-2]
        if word.endswith("sses")
        else word[:-1]
        if word.endswith("s") and not word.endswith("ss") and len(word) > 2
        else word
        for word in words
    )


def plain_name(key: str) -> str:
    """A logged name without what loggers add: `run-7 - train / reward` is `reward`."""
    plain = key.rsplit(" - ", 1)[-1].strip()
    if " " in plain:  # a notebook's table
        plain = re.sub(r"\s*/\s*", "/", plain).replace(" ", "_")

    plain = plain.removeprefix("train-")
    while True:
        phase, slash, rest = plain.partition("/")
        if not slash or phase.lower() not in _PHASES:
            return plain
        plain = rest


def own_name(name: str) -> str:
    """The logged name that takes precedence over all others of a metric."""
    return f"watch/{name}"


_LISTED_NAMES: dict[str, dict[str, int]] = {}  # plain name -> metric -> rank
_PATTERNS: list[tuple[str, int, re.Pattern[str]]] = []
for _metric in METRICS.values():
    for _rank, _name in enumerate((own_name(_metric.name), *_metric.names)):
        _plain = plain_name(_name).lower()
        if "*" in _plain:
            _parts = map(re.escape, _plain.split("*"))
            _PATTERNS.append((_metric.name, _rank, re.compile(".*".join(_parts), re.IGNORECASE)))
        else:
            _LISTED_NAMES.setdefault(_plain, {}).setdefault(_metric.name, _rank)
