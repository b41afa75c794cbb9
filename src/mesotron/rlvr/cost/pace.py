"""How fast a run is, as it was measured or stated: what `mesotron plan` counts with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """How fast a run is taken to be.

    Args:
        seconds_per_step: of one optimizer step; None if nobody knows.
        completion_tokens: of a usual completion.
        source: where both are from, in words.
    """

    seconds_per_step: float | None
    completion_tokens: float
    source: str
