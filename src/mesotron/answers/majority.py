"""Which answer most agree on: for labels by vote, and for the score of a majority."""

from collections import Counter
from collections.abc import Iterable


def leaders(answers: Iterable[str | None]) -> tuple[list[str], int]:
    """The most frequent answers, in the order in which they came first, and how often each came.

    Example:
        >>> leaders(["8", None, "7", "7", "8", "9"])
        (['8', '7'], 2)
    """
    counts = Counter(answer for answer in answers if answer is not None)
    most = max(counts.values(), default=0)

    return [answer for answer, count in counts.items() if count == most], most
