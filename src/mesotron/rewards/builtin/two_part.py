"""A little for the format, and 1 more for the correct answer in it."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "two_part",
    about="`format_share` (0.1) for the format, 1 more for a correct answer in it",
    note="a group without a correct answer still has a gradient",
)
def two_part(completion: Judged) -> float:
    facts = completion.facts
    return completion.config.format_share * facts.formatted + float(facts.correct)
