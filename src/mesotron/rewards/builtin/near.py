"""Wrong numbers are paid by their distance, so a group without a correct answer has a signal."""

from functools import lru_cache

from mesotron.answers.numbers import Number, distance, other_unit, read_number
from mesotron.rewards.registry import Judged, reward


@reward(
    "near",
    about="1 for a correct answer, 1 / (1 + distance) for a wrong number, both in "
    "the format; nothing if the unit differs from the gold's",
    note="wrong numbers still teach; keep `two_part` too",
)
def near(completion: Judged) -> float:
    """51% and 0.51 are one away from 50%. Answers that are no plain number are correct or get 0."""
    facts = completion.facts
    if facts.correct or not facts.formatted:
        return float(facts.correct)

    return closeness(facts.number, completion.gold)


@lru_cache(maxsize=2**12)  # few pairs are distinct
def closeness(answer: Number | None, gold: str) -> float:
    gold_number = read_number(gold)
    if answer is None or gold_number is None or other_unit(answer, gold_number):
        return 0.0

    # Exact fractions: a number with a thousand digits does not fit a float.
    return float(1 / (1 + distance(answer, gold_number)))
