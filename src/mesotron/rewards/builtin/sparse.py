"""A correct answer in its format, or nothing."""

from mesotron.rewards.registry import Judged, reward


@reward(
    "sparse",
    about="1 for a correct answer in its format, else 0",
    note="no signal until both are there; [better](choosing.md#reward) if the format is already "
    "known",
)
def sparse(completion: Judged) -> float:
    return float(completion.facts.correct)
