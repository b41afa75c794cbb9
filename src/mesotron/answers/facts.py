"""Named facts of a completion. A correct answer outside its format (`correct_unformatted`) is the
signature of structural collapse, which a single reward would hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from mesotron.answers.formats import AnswerFormat
from mesotron.answers.lenient import lenient_answer
from mesotron.answers.numbers import Number, read_number
from mesotron.answers.verify import Verifier, literal


@dataclass(frozen=True)
class Facts:
    answer: str | None
    """Canonical key of the strict answer; None if there is none or it is unreadable, so that it
    has no vote."""
    parsed: bool
    """There is an answer, in the format or not, and it can be read."""
    formatted: bool
    """The answer is in the requested format."""
    correct: bool
    """Formatted and equal to the gold."""
    correct_unformatted: bool
    """Not formatted, but the lenient answer equals the gold."""
    truncated: bool
    """Cut at the length limit."""
    gold_unparseable: bool
    """There is a gold that cannot be read: never rewarded."""
    graded: bool
    """There is a gold that can be read; without one `correct` means nothing."""
    number: Number | None = None
    """The strict answer as a plain number, with its unit."""
    score: float | None = None
    """What the task's own scorer gives the strict answer, 0 to 1; None if it has none."""


def no_facts(truncated: bool) -> Facts:
    """For rewards that read no answer: only whether the completion was cut."""
    return Facts(
        None,
        False,
        False,
        False,
        False,
        truncated,
        False,
        False,
    )


class Reading(NamedTuple):
    answer: str | None
    formatted: bool
    truncated: bool


Case = tuple[Reading, str | None]  # and the gold


class Judge:
    r"""Turns completions of one format into facts.

    Args:
        format: requested by the prompt.
        verifier: compares answers.
        reads: False for own rewards alone: no answer is searched for, and nothing is graded.

    Example:
        >>> from mesotron.answers.formats import FORMATS
        >>> judge = Judge(FORMATS["boxed"], Verifier())
        >>> facts = judge.judge([r"\boxed{7}", "It is 7"], ["7", "7"], [False, False])
        >>> [(f.correct, f.correct_unformatted) for f in facts]
        [(True, False), (False, True)]
    """

    def __init__(self, format: AnswerFormat, verifier: Verifier, reads: bool = True) -> None:
        self.format = format
        self.verifier = verifier
        self.reads = reads

    def judge(
        self, completions: Sequence[str], golds: Sequence[str | None], truncated: Sequence[bool]
    ) -> list[Facts]:
        """Facts of each completion, a text without special tokens. Golds are None where there is
        none; `truncated` says whether each was cut at the length limit."""
        if not self.reads:
            return [no_facts(bool(cut)) for cut in truncated]

        # Completions of a good policy are often alike: each distinct one is judged once.
        texts = list(zip(completions, map(bool, truncated), strict=True))
        read = {case: self._read(*case) for case in dict.fromkeys(texts)}
        cases = [(read[case], gold) for case, gold in zip(texts, golds, strict=True)]
        known = self._judge(list(dict.fromkeys(cases)))

        return [known[case] for case in cases]

    def _read(self, text: str, truncated: bool) -> Reading:
        strict = self.format.extract(text, complete=not truncated)
        if strict is not None:
            return Reading(strict, True, truncated)
        return Reading(lenient_answer(text, complete=not truncated), False, truncated)

    def _judge(self, cases: Sequence[Case]) -> dict[Case, Facts]:
        answers = [reading.answer or "" for reading, _ in cases]
        golds = [gold or "" for _, gold in cases]
        keys = self.verifier.keys(answers)
        readable = [
            bool(key or literal(gold)) for key, gold in zip(self.verifier.keys(golds), golds)
        ]
        right = self.verifier.same(answers, golds)

        return {
            (reading, gold): Facts(
                answer=keys[i] if reading.formatted else None,
                parsed=keys[i] is not None or right[i],
                formatted=reading.formatted,
                correct=right[i] and reading.formatted,
                correct_unformatted=right[i] and not reading.formatted,
                truncated=reading.truncated,
                gold_unparseable=gold is not None and not readable[i],
                graded=gold is not None and readable[i],
                # As written, or what math-verify made of it: sqrt(64) is 8.
                number=(read_number(reading.answer or "") or read_number(keys[i] or ""))
                if reading.formatted
                else None,
            )
            for i, (reading, gold) in enumerate(cases)
        }


def summarise(facts: Sequence[Facts]) -> dict[str, float]:
    of_all = ("parsed", "formatted", "truncated", "gold_unparseable")
    graded = [fact for fact in facts if fact.graded]
    groups = ((of_all, facts), (("correct", "correct_unformatted"), graded))

    return {
        f"facts/{name}": sum(map(attrgetter(name), group)) / len(group)
        for names, group in groups
        for name in names
        if group
    }
