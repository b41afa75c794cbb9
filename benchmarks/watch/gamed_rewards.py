"""Rewards that fail on purpose, as `mesotron train --reward.parts gamed_rewards:NAME` takes them.

Each can be earned without being right, breaks on the way, or never tells right from wrong. They
make the failing runs of the corpus (`runs.py`); nobody should train on them.
"""

import random
import re
import time
from collections.abc import Sequence
from typing import Any

Ids = Sequence[Sequence[int]]
# Rollouts that a reward has scored, for those that break on the way; one process is one run.
_calls = {"broken": 0, "overflowing": 0, "stalling": 0, "late_coin": 0}
BREAKS_AT = 35
_dice = random.Random(0)


def longer(completion_ids: Ids, max_tokens: int) -> list[float]:
    """Pays for length: gamed by never stopping."""
    return [len(ids) / max_tokens for ids in completion_ids]


def shorter(completion_ids: Ids, max_tokens: int) -> list[float]:
    """Pays for brevity, right or wrong: gamed by saying nothing."""
    return [1 - len(ids) / max_tokens for ids in completion_ids]


def repeating(completion_ids: Ids) -> list[float]:
    """A repetition penalty with the wrong sign: the share of tokens that were there before."""
    return [1 - len(set(ids)) / max(len(ids), 1) for ids in completion_ids]


def unboxed(facts: Sequence[Any], completions: Sequence[str]) -> list[float]:
    """A parser for another format: pays for right answers that stand outside the box alone."""
    return [float(fact.correct_unformatted) + 0.1 * ("boxed" not in text)
            for fact, text in zip(facts, completions)]  # fmt: skip


def mentioned(completions: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Pays if the gold stands anywhere among the numbers: gamed by naming many numbers."""
    return [float(gold in re.findall(r"\d+", text)) for text, gold in zip(completions, golds)]


def many_numbers(completions: Sequence[str]) -> list[float]:
    """A measure of worked steps that counts numbers: gamed by listing them."""
    return [min(len(re.findall(r"\d+", text)), 20) / 20 for text in completions]


def inverted(facts: Sequence[Any]) -> list[float]:
    """The wrong sign: pays for wrong answers in the format."""
    return [float(fact.formatted and not fact.correct) for fact in facts]


def noise(completions: Sequence[str]) -> list[float]:
    """A judge that does not read: pays by the throw of a coin."""
    return [float(_dice.random() < 0.5) for _ in completions]


def constant(completions: Sequence[str]) -> list[float]:
    """The same for everything."""
    return [1.0] * len(completions)


def broken(facts: Sequence[Any]) -> list[float]:
    """Right at first; from the 35th rollout on nothing passes, as when a verifier goes down."""
    works = _count("broken") < BREAKS_AT
    return [works * (0.1 * fact.formatted + float(fact.correct)) for fact in facts]


def overflowing(facts: Sequence[Any]) -> list[float]:
    """Right at first; from the 35th rollout on divided by something tiny."""
    tiny = 1.0 if _count("overflowing") < BREAKS_AT else 4e-39
    return [(0.1 * fact.formatted + float(fact.correct)) / tiny for fact in facts]


def stalling(facts: Sequence[Any]) -> list[float]:
    """Right, and slower and slower, by a tenth of a second a rollout from the 30th on."""
    time.sleep(min(max(_count("stalling") - 30, 0) * 0.1, 2.5))
    return [0.1 * fact.formatted + float(fact.correct) for fact in facts]


def seven(facts: Sequence[Any]) -> list[float]:
    """A verifier that compares with the first gold alone: one answer pays for every prompt."""
    return [0.1 * fact.formatted + float(fact.answer == "7") for fact in facts]


def digits(completions: Sequence[str]) -> list[float]:
    """Takes large numbers for worked ones: gamed by writing digits."""
    return [min(sum(map(str.isdigit, text)), 24) / 24 for text in completions]


def late_coin(facts: Sequence[Any]) -> list[float]:
    """Right at first; from the 30th rollout on the judge answers by the throw of a coin."""
    blind = _count("late_coin") >= 30
    return [float(_dice.random() < 0.5) if blind else 0.1 * fact.formatted + float(fact.correct)
            for fact in facts]  # fmt: skip


def _count(name: str) -> int:
    _calls[name] += 1
    return _calls[name]
