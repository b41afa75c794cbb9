"""Our names for the numbers of a run, and what other trainers call them.

A logged name is looked up in two ways. metrics.toml lists names of TRL, verl, prime-rl, OpenRLHF,
NeMo-RL, slime, SkyRL, AReaL, ms-swift, ART, tinker and others. `_RULES` reads any other name by
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
    "baseline_reward/pct_0": lambda percent: percent / 100,
    "baseline_reward/pct_1": lambda percent: percent / 100,
    "token_mult_prob_error": lambda x: math.log(x) if x > 0 else math.nan,  # mean of exp(abs gap)
    "entropy_loss": abs,  # some log the entropy under this name, some its negative
    "actor/entropy_loss": abs,
    "optim/kl_sample_train_v1": abs,  # signed estimates
    "vllm_kl": abs,
    "rollout_corr/kl": abs,
    "rollout_correction/kl": abs,
}

STEP_NAMES = (
    "step", "global_step", "training/global_step", "train/global_step", "rollout/step",
    "global_step/max_steps", "steps", "global_steps", "training_step", "train_step",
    "optimizer_step", "update_step", "step_idx", "iteration", "training_iteration", "iter",
    "update", "num_updates", "progress/batch", "batch_idx", "episode", "_step",
)  # fmt: skip
# Matching a pattern with two * against a name of a million letters would take minutes.
MAX_NAME = 500
# Loggers prefix training metrics with the phase.
_PHASES = {"train", "trainer", "training", "metrics", "ppo_actor"}
_EVALUATION = {"eval", "evaluation", "val", "valid", "validation", "test", "heldout", "holdout",
               "dev"}  # fmt: skip
# Words that do not change what a number is, next to those that name it.
_NEUTRAL = (
    "mean avg average train trainer training overall all batch step per global policy actor model "
    "current agg effective agent stat metric log chart summary main rl rlvr rlhf grpo ppo rloo "
    "dapo gspo drgrpo reinforce "
)
_REWARD_WORDS = (
    "total env ep eps episode episodic task raw rollout group outcome final combined sum "
    "trajectory traj critic sample sampled completion response objective generation selected fn "
    "func function verifier rule weighted runner ema running moving smoothed smooth rolling ma "
    "epoch environment rm judge normalized shaped"
)
_SHARE = "rate ratio frac fraction share is pct "
_TEXT = "completion response generation generated gen output answer ac"


@dataclass(frozen=True)
class Rule:
    """Names that stand for a metric: a word of each of `needs`, and no word beyond `also`."""

    metric: str
    needs: tuple[str, ...]  # each with alternatives, the best first
    also: str = ""  # beside the neutral words


_RULES = (
    Rule("reward", ("reward rew score return ret",), _REWARD_WORDS),
    Rule("reward_std", ("reward rew score return", "std stddev stdev deviation spread"),
         f"{_REWARD_WORDS} standard within"),
    Rule("length", ("length len", _TEXT), "token rollout sample num env"),
    Rule("length", ("length len", "mean avg average"), "sequence seq token"),
    Rule("length", ("token", _TEXT, "mean avg average per num"),
         "sample turn env rollout sequence length"),
    Rule("entropy", ("entropy",),
         "token loss approx optim update rollout response action completion generation logit"),
    Rule("update_kl", ("kl kld", "approx ppo old new update"), "loss div"),
    Rule("update_kl", ("approxkl",), "loss"),
    Rule("gap_kl", ("kl kld", "mismatch vllm sampler sample sampling rollout behave behavior infer "
                    "inference"), "corr correction error v1 v2 k1 k2 k3"),
    Rule("kl", ("kl kld",), "div divergence ref reference loss penalty initial init start base to "
                            "from vs token estimate k1 k2 k3"),
    Rule("grad_norm", ("grad gradient", "norm"), "optim optimizer l2 total pre clip before update"),
    Rule("grad_norm", ("gradnorm gnorm",), "total"),
    Rule("lr", ("lr",), "optim optimizer pg 0 group scheduler last"),
    Rule("lr", ("learning", "rate"), "optim optimizer scheduler last"),
    Rule("loss", ("loss",), "pg total final objective surrogate optim update"),
    Rule("clipped", ("clipfrac",), "pg token ratio"),
    Rule("clipped", ("clip clipped clipping", "frac fraction"), "pg token ratio"),
    Rule("truncated", ("truncated truncation truncate overlong",),
         f"{_SHARE} completion response generation rollout length env sample"),
    Rule("truncated", ("clip clipped", "completion response length", "rate ratio frac fraction")),
    Rule("zero_signal", ("zero", "std variance var advantage adv signal spread",
                         "rate ratio frac fraction share"), "reward group prompt"),
    Rule("correct", ("accuracy acc correct correctness",),
         f"{_SHARE} reward fn func answer task env match score pass@1"),
    Rule("correct", ("success solve solved pass win", "rate ratio frac fraction"),
         "reward task env"),
    Rule("correct", ("pass@1",), "task env"),
    Rule("formatted", ("format formatted formatting",), f"{_SHARE} reward fn func score env"),
    Rule("repetition", ("repetition",), f"{_SHARE} completion response penalty"),
    Rule("step_time", ("time", "step iteration iter"), "total s sec second"),
)  # fmt: skip
_HELDOUT = "accuracy acc correct pass success solve solved score reward return"
_NOT_HELDOUT = (
    "std min max var median num count loss kl entropy length len token time runtime second format "
    "formatted truncated clipped sample step epoch problem norm lr mixed good bad ob ac turn "
    "sampled best worst maj"
)
_STATISTICS = "std min max var median stddev stdev"
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
    parts = [key for key in names if {"reward", "score"} & _words(key) and not _is_evaluation(key)
             and not _words(key) & {*_STATISTICS.split()}]  # fmt: skip
    return found.get("correct", []) or parts


def suggest_names(unknown: Iterable[str], metric: str = "reward") -> list[str]:
    """The names most like those of a metric, the best first."""
    known = {word for rule in _RULES if rule.metric == metric for word in rule.needs[0].split()}
    known |= {word for name in METRICS[metric].names for word in _words(name)}
    known -= {*_NEUTRAL.split(), *_REWARD_WORDS.split()}
    scores = {
        key: max((difflib.SequenceMatcher(None, word[:40], other).ratio()
                  for word in list(_words(key))[:20] for other in known), default=0.0)
        for key in list(unknown)[:500]
    }  # fmt: skip
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
    if plain.lower().rpartition("/")[2] in _STATISTICS.split():  # rewards/my_format/std
        ranks = {name: rank for name, rank in ranks.items() if name not in _PARTS}
    ranks = ranks or _by_words(key)
    return tuple((name, rank, _UNITS.get(plain.lower())) for name, rank in ranks.items())


def _by_words(key: str) -> dict[str, int]:
    words = _words(key)
    if _is_evaluation(key):
        known = _HELDOUT.split()
        place = next((k for k, word in enumerate(known) if word in words), None)
        scored = any(word.startswith(("mean@", "avg@", "pass@")) for word in words)
        if (place is None and not scored) or words & {*_NOT_HELDOUT.split()}:
            return {}
        # Accuracy before reward; names of several problem sets are averaged.
        return {"heldout": _LISTED + 50 * (place is not None and place >= known.index("score"))}
    for rule in _RULES:
        rest, rank = set(words), _LISTED
        for alternatives in rule.needs:
            options = alternatives.split()
            place = next((k for k, word in enumerate(options) if word in words), None)
            if place is None:
                break
            rank += 20 * place if alternatives is rule.needs[0] else 0
            rest -= set(options)
        else:
            if rest <= {*_NEUTRAL.split(), *rule.also.split()}:
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
        word[:-3] + "y" if word.endswith("ies")
        else word[:-2] if word.endswith("sses")
        else word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2
        else word for word in words
    )  # fmt: skip


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
