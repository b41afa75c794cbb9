"""Reads a logged name by its words: `train/avg_completion_len` has those of a length.

words.toml has the words of each metric. A name stands for a metric if it has all of its words, and
none that would make it another number.
"""

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


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
