"""Rewards that fail on purpose, as `mesotron train --reward.parts gamed_rewards:NAME` takes them.

Each can be earned without being right, breaks during training, or never separates right from wrong.
They make the failing runs of the corpus (`runs.py`) and are not meant for training.
"""

import random
import re
import time
from collections.abc import Sequence
from typing import Any

Ids = Sequence[Sequence[int]]
# Rollouts scored so far, for rewards that break during training; one process is one run.
_calls = {
    "broken": 0,
    "overflowing": 0,
    "stalling": 0,
    "late_coin": 0,
}
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
    """A parser for another format: pays only for right answers outside the box."""
    return [
        float(fact.correct_unformatted) + 0.1 * ("boxed" not in text)
        for fact, text in zip(facts, completions)
    ]


def mentioned(completions: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Pays if the gold is anywhere among the numbers: gamed by listing many numbers."""
    return [float(gold in re.findall(r"\d+", text)) for text, gold in zip(completions, golds)]


def many_numbers(completions: Sequence[str]) -> list[float]:
    """A measure of worked steps that counts numbers: gamed by listing them."""
    return [min(len(re.findall(r"\d+", text)), 20) / 20 for text in completions]


def inverted(facts: Sequence[Any]) -> list[float]:
    """The wrong sign: pays for wrong answers in the format."""
    return [float(fact.formatted and not fact.correct) for fact in facts]


def noise(completions: Sequence[str]) -> list[float]:
    """A judge that does not read: pays at random."""
    return [float(_dice.random() < 0.5) for _ in completions]


def constant(completions: Sequence[str]) -> list[float]:
    """The same for everything."""
    return [1.0] * len(completions)


def broken(facts: Sequence[Any]) -> list[float]:
    """Correct at first; from the 35th rollout nothing passes, as if the verifier were down."""
    works = _count("broken") < BREAKS_AT
    return [works * (0.1 * fact.formatted + float(fact.correct)) for fact in facts]


def overflowing(facts: Sequence[Any]) -> list[float]:
    """Correct at first; from the 35th rollout divided by a tiny number."""
    tiny = 1.0 if _count("overflowing") < BREAKS_AT else 4e-39
    return [(0.1 * fact.formatted + float(fact.correct)) / tiny for fact in facts]


def stalling(facts: Sequence[Any]) -> list[float]:
    """Correct, but slower by a tenth of a second per rollout from the 30th on."""
    time.sleep(min(max(_count("stalling") - 30, 0) * 0.1, 2.5))
    return [0.1 * fact.formatted + float(fact.correct) for fact in facts]


def seven(facts: Sequence[Any]) -> list[float]:
    """A verifier that always compares with the first gold: one answer pays for every prompt."""
    return [0.1 * fact.formatted + float(fact.answer == "7") for fact in facts]


def digits(completions: Sequence[str]) -> list[float]:
    """Mistakes large numbers for worked steps: gamed by writing digits."""
    return [min(sum(map(str.isdigit, text)), 24) / 24 for text in completions]


def late_coin(facts: Sequence[Any]) -> list[float]:
    """Correct at first; from the 30th rollout the judge answers at random."""
    blind = _count("late_coin") >= 30
    return [
        float(_dice.random() < 0.5) if blind else 0.1 * fact.formatted + float(fact.correct)
        for fact in facts
    ]


def _count(name: str) -> int:
    _calls[name] += 1
    return _calls[name]
