"""Rewards that fail on purpose, as `mesotron train --reward gamed_rewards:NAME` takes them.

Each can be earned without being right, breaks during training, or never separates right from wrong.
They make the failing runs of the corpus (`runs.py`) and are not meant for training.
"""

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Ids = Sequence[Sequence[int]]
Facts = Sequence[Any]
Texts = Sequence[str]

BREAKS_AT = 35
# Rollouts scored so far, for rewards that break during training; one process is one run.
_calls: Counter[str] = Counter()
_dice = random.Random(0)


def _count(name: str) -> int:
    _calls[name] += 1
    return _calls[name]


def _coin() -> float:
    return float(_dice.random() < 0.5)


def _usual(fact: Any) -> float:
    """What a sensible reward pays."""
    return 0.1 * fact.formatted + float(fact.correct)


def _each(score: Callable[[Any], float], items: Sequence[Any]) -> list[float]:
    return [score(item) for item in items]


def longer(completion_ids: Ids, max_tokens: int) -> list[float]:
    """Pays for length: gamed by never stopping."""
    return _each(lambda ids: len(ids) / max_tokens, completion_ids)


def shorter(completion_ids: Ids, max_tokens: int) -> list[float]:
    """Pays for brevity, right or wrong: gamed by saying nothing."""
    return _each(lambda ids: 1 - len(ids) / max_tokens, completion_ids)


def repeating(completion_ids: Ids) -> list[float]:
    """A repetition penalty with the wrong sign: the share of tokens that were there before."""
    return _each(lambda ids: 1 - len(set(ids)) / max(len(ids), 1), completion_ids)


def unboxed(facts: Facts, completions: Texts) -> list[float]:
    """A parser for another format: pays only for right answers outside the box."""
    scores = []
    for fact, text in zip(facts, completions, strict=True):
        no_box = "boxed" not in text
        scores.append(float(fact.correct_unformatted) + 0.1 * no_box)
    return scores


def mentioned(completions: Texts, golds: Texts) -> list[float]:
    """Pays if the gold is anywhere among the numbers: gamed by listing many numbers."""
    scores = []
    for text, gold in zip(completions, golds, strict=True):
        scores.append(float(gold in re.findall(r"\d+", text)))
    return scores


def many_numbers(completions: Texts) -> list[float]:
    """A measure of worked steps that counts numbers: gamed by listing them."""
    return _each(lambda text: min(len(re.findall(r"\d+", text)), 20) / 20, completions)


def digits(completions: Texts) -> list[float]:
    """Mistakes large numbers for worked steps: gamed by writing digits."""
    return _each(lambda text: min(sum(map(str.isdigit, text)), 24) / 24, completions)


def inverted(facts: Facts) -> list[float]:
    """The wrong sign: pays for wrong answers in the format."""
    return _each(lambda fact: float(fact.formatted and not fact.correct), facts)


def seven(facts: Facts) -> list[float]:
    """A verifier that always compares with the first gold: one answer pays for every prompt."""
    return _each(lambda fact: 0.1 * fact.formatted + float(fact.answer == "7"), facts)


def noise(completions: Texts) -> list[float]:
    """A judge that does not read: pays at random."""
    return _each(lambda text: _coin(), completions)


def constant(completions: Texts) -> list[float]:
    """The same for everything."""
    return [1.0] * len(completions)


def broken(facts: Facts) -> list[float]:
    """Correct at first; from the 35th rollout nothing passes, as if the verifier were down."""
    if _count("broken") < BREAKS_AT:
        return _each(_usual, facts)
    return [0.0] * len(facts)


def overflowing(facts: Facts) -> list[float]:
    """Correct at first; from the 35th rollout divided by a tiny number."""
    tiny = 1.0 if _count("overflowing") < BREAKS_AT else 4e-39
    return _each(lambda fact: _usual(fact) / tiny, facts)


def stalling(facts: Facts) -> list[float]:
    """Correct, but slower by a tenth of a second per rollout from the 30th on."""
    late = max(_count("stalling") - 30, 0)
    time.sleep(min(late * 0.1, 2.5))
    return _each(_usual, facts)


def late_coin(facts: Facts) -> list[float]:
    """Correct at first; from the 30th rollout the judge answers at random."""
    if _count("late_coin") < 30:
        return _each(_usual, facts)
    return _each(lambda fact: _coin(), facts)
