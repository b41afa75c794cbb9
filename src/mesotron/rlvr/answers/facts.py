"""What is true of a completion, as named facts: parsed, formatted, correct, truncated.

A reward is one number and hides why; the facts keep the reasons apart. An answer that is right
outside its format (`correct_unformatted`) is the signature of structural collapse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesotron.rlvr.answers.formats import AnswerFormat, lenient_answer
from mesotron.rlvr.answers.verify import Verifier


@dataclass(frozen=True)
class Facts:
    """One completion, judged."""

    answer: str | None
    """The strict answer as one key for every way to write it; None if there is none, or if
    nobody can read it: such an answer has no vote."""
    parsed: bool
    """An answer was found, in the format or not, and it reads as a number or as mathematics."""
    formatted: bool
    """The answer is written as the prompt asked."""
    correct: bool
    """Formatted, and the same as the gold."""
    correct_unformatted: bool
    """Not formatted, yet a lenient reader finds the gold."""
    truncated: bool
    """Cut at the length limit."""
    gold_unparseable: bool
    """There is a gold and nobody can read it: never rewarded, to be skipped."""
    graded: bool
    """There is a gold that can be read; without one `correct` says nothing."""


class Judge:
    r"""Scores completions of one format into facts.

    Args:
        format: the format that the prompt asked for.
        verifier: decides whether two answers are the same.

    Example:
        >>> from mesotron.rlvr.answers.formats import FORMATS
        >>> judge = Judge(FORMATS["boxed"], Verifier())
        >>> facts = judge.judge([r"\boxed{7}", "It is 7"], ["7", "7"], [False, False])
        >>> [(f.correct, f.correct_unformatted) for f in facts]
        [(True, False), (False, True)]
    """

    def __init__(self, format: AnswerFormat, verifier: Verifier) -> None:
        self.format = format
        self.verifier = verifier

    def judge(
        self,
        completions: Sequence[str],
        golds: Sequence[str | None],
        truncated: Sequence[bool],
    ) -> list[Facts]:
        """Facts of each completion.

        Args:
            completions: the texts that were sampled, without special tokens.
            golds: the right answer of each, None where there is none.
            truncated: whether each was cut at the length limit.
        """
        _check_lengths(completions, golds, truncated)
        # Short answers are often alike, the better the policy the more: each is judged once.
        asked = list(zip(completions, golds, map(bool, truncated)))
        distinct = list(dict.fromkeys(asked))
        found = self._judge(
            [text for text, _, _ in distinct],
            [gold for _, gold, _ in distinct],
            [cut for _, _, cut in distinct],
        )
        known = dict(zip(distinct, found))
        return [known[case] for case in asked]

    def _judge(
        self,
        completions: Sequence[str],
        golds: Sequence[str | None],
        truncated: Sequence[bool],
    ) -> list[Facts]:
        """Facts of completions that differ."""
        strict = [
            self.format.extract(text, complete=not cut) for text, cut in zip(completions, truncated)
        ]
        found = [
            answer if answer is not None else lenient_answer(text, complete=not cut)
            for answer, text, cut in zip(strict, completions, truncated)
        ]
        keys = self.verifier.keys([answer or "" for answer in found])
        readable = self.verifier.parseable_all([gold or "" for gold in golds])
        right = self.verifier.same([a or "" for a in found], [gold or "" for gold in golds])
        return [
            Facts(
                answer=None if strict[i] is None else keys[i],
                parsed=keys[i] is not None,
                formatted=strict[i] is not None,
                correct=right[i] and strict[i] is not None,
                correct_unformatted=right[i] and strict[i] is None,
                truncated=truncated[i],
                gold_unparseable=golds[i] is not None and not readable[i],
                graded=golds[i] is not None and readable[i],
            )
            for i in range(len(completions))
        ]


def summarise(facts: Sequence[Facts]) -> dict[str, float]:
    """Shares of the completions, by name, as they are logged.

    Returns:
        `facts/<name>` for parsed, formatted, truncated and gold_unparseable, as shares of all;
        `facts/correct` and `facts/correct_unformatted` as shares of the graded ones, and absent
        if none is.

    Example:
        >>> summarise([])
        {}
    """
    if not facts:
        return {}
    names = ("parsed", "formatted", "truncated", "gold_unparseable")
    shares = {f"facts/{name}": _share(facts, name) for name in names}
    graded = [fact for fact in facts if fact.graded]
    if graded:
        names = ("correct", "correct_unformatted")
        shares |= {f"facts/{name}": _share(graded, name) for name in names}
    return shares


def _share(facts: Sequence[Facts], name: str) -> float:
    return sum(getattr(fact, name) for fact in facts) / len(facts)


def _check_lengths(
    completions: Sequence[str], golds: Sequence[str | None], truncated: Sequence[bool]
) -> None:
    if not len(completions) == len(golds) == len(truncated):
        raise ValueError(
            f"{len(completions)} completions, {len(golds)} golds and {len(truncated)} truncated "
            "flags: give one of each for every completion"
        )
