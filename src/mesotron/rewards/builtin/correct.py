"""A correct answer, in the format or not."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "correct",
    about="1 for a correct answer wherever it stands",
    note="with `format`: pays the two separately",
)
def correct(completion: Judged) -> float:
    facts = completion.facts
    return float(facts.correct or facts.correct_unformatted)
