"""What is true of a completion, as named facts: parsed, formatted, correct, truncated.

A reward is one number and hides why; the facts keep the reasons apart. An answer that is right
outside its format (`correct_unformatted`) is the signature of structural collapse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from mesotron.rlvr.answers.formats import AnswerFormat, lenient_answer
from mesotron.rlvr.answers.numbers import Number, read_number
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
    number: Number | None = None
    """The strict answer as a plain number, with the unit that its key leaves out."""


class Reading(NamedTuple):
    """What stands in one completion, before anybody knows what is right."""

    answer: str | None
    formatted: bool
    truncated: bool


Case = tuple[Reading, str | None]  # and the gold


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
        # Short texts are often alike, and their answers the better the policy: each is looked at
        # once.
        texts = list(zip(completions, map(bool, truncated)))
        read = {case: self._read(*case) for case in dict.fromkeys(texts)}
        cases = [(read[case], gold) for case, gold in zip(texts, golds)]
        known = self._judge(list(dict.fromkeys(cases)))
        return [known[case] for case in cases]

    def _read(self, text: str, truncated: bool) -> Reading:
        """What stands in one completion."""
        strict = self.format.extract(text, complete=not truncated)
        if strict is not None:
            return Reading(strict, True, truncated)
        return Reading(lenient_answer(text, complete=not truncated), False, truncated)

    def _judge(self, cases: Sequence[Case]) -> dict[Case, Facts]:
        """Facts of readings that differ, or whose golds do."""
        answers = [reading.answer or "" for reading, _ in cases]
        golds = [gold or "" for _, gold in cases]
        keys = self.verifier.keys(answers)
        readable = self.verifier.parseable_all(golds)
        right = self.verifier.same(answers, golds)
        return {
            (reading, gold): Facts(
                answer=keys[i] if reading.formatted else None,
                parsed=keys[i] is not None,
                formatted=reading.formatted,
                correct=right[i] and reading.formatted,
                correct_unformatted=right[i] and not reading.formatted,
                truncated=reading.truncated,
                gold_unparseable=gold is not None and not readable[i],
                graded=gold is not None and readable[i],
                number=_number(reading, keys[i]),
            )
            for i, (reading, gold) in enumerate(cases)
        }


def _number(reading: Reading, key: str | None) -> Number | None:
    """The strict answer as a number: as written, or what math-verify made of it (sqrt(64) is 8)."""
    if not reading.formatted:
        return None
    return read_number(reading.answer or "") or read_number(key or "")


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
    return sum(map(attrgetter(name), facts)) / len(facts)


def _check_lengths(
    completions: Sequence[str], golds: Sequence[str | None], truncated: Sequence[bool]
) -> None:
    if not len(completions) == len(golds) == len(truncated):
        raise ValueError(
            f"{len(completions)} completions, {len(golds)} golds and {len(truncated)} truncated "
            "flags: give one of each for every completion"
        )
