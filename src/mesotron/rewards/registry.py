"""What a built-in reward is: a name for `--reward` and a function that scores one completion.

    @reward("sparse", about="1 for a correct answer in its format, else 0")
    def sparse(completion: Judged) -> float: ...

In a file of `builtin/` that is called like the reward, that is all it takes: the command line, the
docs and the tests find it there. In any other file the name works once the file is imported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesotron.answers.facts import Facts
from mesotron.config import RewardConfig
from mesotron.config.registry import REWARDS
from mesotron.tasks.environment import Played


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A completion, and what is known about it."""

    facts: Facts
    ids: Sequence[int]  # its tokens, without padding
    gold: str  # empty without one
    config: RewardConfig
    max_tokens: int
    played: Played | None = None  # what its environment paid; None without one, or if it failed


Score = Callable[[Judged], float | None]


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A registered reward."""

    name: str
    score: Score
    about: str
    """What it pays; a cell of the docs."""
    note: str
    """What else to know; a cell of the docs."""
    needs_gold: bool
    """It has no verdict where the gold answer is missing or unreadable."""


def reward(
    name: str, *, about: str, note: str = "", needs_gold: bool = True
) -> Callable[[Score], Score]:
    """Register a function that scores one completion as the reward `name`.

    Args:
        name: what `--reward` calls it.
        about: what it pays.
        note: what else to know.
        needs_gold: whether it compares with the gold answer.
    """

    def register(score: Score) -> Score:
        entry = BuiltIn(name=name, score=score, about=about, note=note, needs_gold=needs_gold)
        REWARDS.add(name, entry, score.__module__)
        return score

    return register
