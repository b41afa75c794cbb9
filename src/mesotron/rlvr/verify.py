"""Whether two answers are the same: plain numbers exactly, all else by text for now."""

from __future__ import annotations

from collections.abc import Sequence

from mesotron.rlvr.numbers import clean, read_number, same_number


class Verifier:
    """Decides whether answers are the same."""

    def __init__(self, timeout: float = 5.0) -> None:
        self.timeout = timeout

    def same(self, answers: Sequence[str], golds: Sequence[str]) -> list[bool]:
        """Whether each answer is the same as its gold."""
        return [self._same(a, g) for a, g in zip(answers, golds, strict=True)]

    def parseable(self, gold: str) -> bool:
        """Whether a gold can be read."""
        return self.parseable_all([gold])[0]

    def parseable_all(self, golds: Sequence[str]) -> list[bool]:
        """Whether each gold can be read."""
        return [key is not None for key in self.keys(golds)]

    def canonical(self, answer: str) -> str:
        """One key for every way to write an answer."""
        return self.keys([answer])[0] or clean(answer)

    def keys(self, answers: Sequence[str]) -> list[str | None]:
        """The canonical key of each answer, None where it cannot be read."""
        return [n.key if (n := read_number(a)) else clean(a) or None for a in answers]

    def _same(self, answer: str, gold: str) -> bool:
        left, right = read_number(answer), read_number(gold)
        if left and right:
            return same_number(left, right)
        return bool(clean(gold)) and clean(answer) == clean(gold)
