"""An answer in the format, correct or not."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "format",
    about="1 for the format, right or wrong",
    note="needs no gold",
    needs_gold=False,
)
def format(completion: Judged) -> float:
    return float(completion.facts.formatted)
