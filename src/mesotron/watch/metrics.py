"""Our names for the numbers of a run, and what other trainers call them.

A logged name is looked up in three ways. `Names` has those that a user has mapped (`--rename
reward=my_score`); a file beside the log remembers them. metrics.toml lists names of TRL, verl,
prime-rl, OpenRLHF, NeMo-RL, slime, SkyRL, AReaL, ms-swift, ART, tinker and others. Any other name
is read by its words, as words.toml has them: `train/avg_completion_len` has those of a length. It
stands for a metric if it has all of its words, and none that would make it another number.
"""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from mesotron.config.base import suggest
from mesotron.runs.files import write_whole

Row = dict[str, float]
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


# Names by their words

_TABLE = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def _words_under(key: str) -> frozenset[str]:
    return frozenset(_TABLE[key].split())


STEP_NAMES = tuple(_TABLE["steps"].split())
# Matching a pattern with two * against a name of a million letters would take minutes.
MAX_NAME = 500
PHASES = _words_under("phases")
EVALUATION = _words_under("evaluation")
NEUTRAL = _words_under("neutral")
REWARD_WORDS = _words_under("reward")
NOT_REWARD = _words_under("not_reward")
STATISTICS = _words_under("statistics")

HELDOUT = _TABLE["heldout"].split()  # the best first
NOT_HELDOUT = _words_under("not_heldout")
SCORES = ("mean@", "avg@", "pass@")  # of several attempts

LISTED = 100  # rank of the best rule: a listed name is a better source
WORSE_WORD = 20  # added for each better word that a name does not have
REWARD_FOR_ACCURACY = 50


@dataclass(frozen=True)
class NameRule:
    """Names that stand for a metric: a word of each of `needs`, and no word beyond `also`."""

    metric: str
    needs: tuple[tuple[str, ...], ...]  # each with alternatives, the best first
    also: frozenset[str]

    def rank(self, words: frozenset[str]) -> int | None:
        """How good a source a name is (0 is best); None if it is another number."""
        rest = set(words)
        places = []
        for options in self.needs:
            place = first_place(options, words)
            if place is None:
                return None

            places.append(place)
            rest -= set(options)

        if not rest <= self.also:
            return None

        return LISTED + WORSE_WORD * places[0] + len(rest)


def _read_rule(metric: str, needs: list[str], also: str = "") -> NameRule:
    words = also.replace("$reward", _TABLE["reward"]).split()
    options = [tuple(each.split()) for each in needs]
    return NameRule(metric, tuple(options), NEUTRAL.union(words))


RULES = [_read_rule(**table) for table in _TABLE["rule"]]


def by_words(name: str) -> dict[str, int]:
    """The metric that the words of a name stand for, if they do, and the rank of the source."""
    words = words_of(name)
    if is_evaluation(name):
        rank = _heldout_rank(words)
        return {} if rank is None else {"heldout": rank}

    for rule in RULES:
        rank = rule.rank(words)
        if rank is not None:
            return {rule.metric: rank}

    return {}


def _heldout_rank(words: frozenset[str]) -> int | None:
    """Accuracy before reward; names of several problem sets are averaged."""
    stems = {word.partition("@")[0] for word in words}
    if stems & NOT_HELDOUT:
        return None

    place = first_place(HELDOUT, words)
    if place is not None:
        is_reward = place >= HELDOUT.index("score")
        return LISTED + REWARD_FOR_ACCURACY * is_reward

    is_score = any(word.startswith(SCORES) for word in words)
    return LISTED if is_score else None


def is_evaluation(name: str) -> bool:
    """Whether a name has the phase of an evaluation in front of one of its parts."""
    parts = []
    for part in plain_name(name).lower().split("/"):
        parts.append(re.split(r"[^a-z0-9]+", part)[0])

    is_reward = parts[0] in ("reward", "rewards")
    return not is_reward and not EVALUATION.isdisjoint(parts)


def words_of(name: str) -> frozenset[str]:
    """The words of a name, singular: `rewardsAvg` and `rewards / avg` are reward and avg."""
    plain = plain_name(name[:MAX_NAME])
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", plain)
    words = re.split(r"[^a-z0-9@]+", spaced.lower())

    return frozenset(singular(word) for word in words if word)


def singular(word: str) -> str:
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith("sses"):
        return word[:-2]
    if word.endswith("s") and not word.endswith("ss") and len(word) > 2:
        return word[:-1]

    return word


def plain_name(name: str) -> str:
    """A logged name without what loggers add: `run-7 - train / reward` is `reward`."""
    plain = name.rsplit(" - ", 1)[-1].strip()
    if " " in plain:  # a notebook's table
        plain = re.sub(r"\s*/\s*", "/", plain).replace(" ", "_")

    plain = plain.removeprefix("train-")
    while True:
        phase, slash, rest = plain.partition("/")
        if not slash or phase.lower() not in PHASES:
            return plain
        plain = rest


def first_place(options: Sequence[str], words: Collection[str]) -> int | None:
    """The place of the first option that is among the words."""
    for place, word in enumerate(options):
        if word in words:
            return place
    return None


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


@lru_cache(maxsize=256)
def names_of(metric: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the logged names that stand for a metric, the worse sources included."""
    chosen = []
    for name in names:
        if any(match.metric == metric for match in _matches(name)):
            chosen.append(name)

    return tuple(chosen)


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
    "kl_ref": abs,
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


# Names that a user has mapped

NAMES_FILE = "mesotron_names.json"  # {our name: name in the log}
MAX_NAMES_BYTES = 2**20


def remembered_names(path: Path) -> dict[str, str]:
    """Names from the file beside a log, or else in the working folder."""
    for folder in _folders(path):
        file = folder / NAMES_FILE
        if file.is_file():
            return _read_names(file)

    return {}


def _read_names(file: Path) -> dict[str, str]:
    try:
        values = json.loads(file.read_bytes()[:MAX_NAMES_BYTES])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: fix or delete it") from error

    if not isinstance(values, dict) or not all(isinstance(x, str) for x in values.values()):
        raise ValueError(f'{file} must be an object such as {{"reward": "my_score"}}')

    return {ours: theirs for ours, theirs in values.items() if ours in METRICS}


def remember_names(path: Path, names: Mapping[str, str]) -> Path | None:
    """Add names to the file beside a log, or in the working folder; None if neither is writable."""
    merged = remembered_names(path) | dict(names)
    text = json.dumps(merged, indent=2) + "\n"

    for folder in _folders(path):
        with suppress(OSError):
            write_whole(folder / NAMES_FILE, text)
            return folder / NAMES_FILE

    return None


def _folders(path: Path) -> tuple[Path, Path]:
    folder = path if path.is_dir() else path.parent
    return folder, Path()


def parse_renames(pairs: Sequence[str]) -> dict[str, str]:
    """The values of --rename as our name -> name in the log."""
    names = {}
    for pair in pairs:
        ours, _, theirs = pair.partition("=")
        if not theirs:
            raise ValueError(f"--rename {pair} must have the form reward=my_score")

        if ours not in METRICS:
            known = f"{', '.join(METRICS)}{suggest(ours, METRICS)}"
            raise ValueError(f"--rename {pair}: {ours!r} is not one of {known}")

        names[ours] = theirs

    return names


class Names:
    """Adds our names to the rows of one log.

    They are those that were mapped. The reward is also added if the log has none by that name but
    an accuracy, or rewards of single functions.
    """

    def __init__(self, path: Path, pairs: Sequence[str] = ()) -> None:
        self.given = parse_renames(pairs)
        self.mapped = remembered_names(path) | self.given
        self.seen: set[str] = set()  # names in the log
        self.reward_from: list[str] = []

    def learn(self, names: Collection[str]) -> bool:
        """Take the names of new rows; True if the reward is now read from elsewhere."""
        if self.seen.issuperset(names):
            return False

        before = self.reward_from
        self.seen = self.seen | set(names)
        if self.mapped.get("reward") in self.seen:
            self.reward_from = []
        else:
            self.reward_from = guess_reward(sorted(self.seen))

        return self.reward_from != before

    def check(self) -> None:
        """Refuse a given name that no row has."""
        for ours, theirs in self.given.items():
            if theirs not in self.seen:
                close = suggest(theirs, self.seen)
                raise ValueError(f"--rename {ours}={theirs}: no row has {theirs}{close}")

    def require_known(self, path: Path, rows: Iterable[Mapping[str, float]]) -> None:
        """Refuse rows without any metric that we know."""
        unknown = sorted(self.seen - {"step"})
        if not unknown:
            raise ValueError(f"{path} has no numbers other than steps: check its values")

        if any(map(canonical, rows)):
            return

        close = suggest_names(unknown)
        best = close[0] if close else "my_score"
        listed = ", ".join(close or unknown[:12])
        raise ValueError(
            f"{path} has no known metric (it has {listed}): map them with --rename, as in "
            f"--rename reward={best}"
        )

    def apply(self, row: Mapping[str, float]) -> Row:
        named = dict(row)
        for ours, theirs in self.mapped.items():
            if theirs in row:
                named[own_name(ours)] = row[theirs]

        rewards = []
        for name in self.reward_from:
            if name in row:
                rewards.append(row[name])

        if rewards:
            named[own_name("reward")] = sum(rewards) / len(rewards)

        return named
