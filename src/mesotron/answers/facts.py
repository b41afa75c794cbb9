"""Named facts of a completion. A correct answer outside its format (`correct_unformatted`) is the
signature of structural collapse, which a single reward would hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mesotron.answers.formats import AnswerFormat
from mesotron.answers.lenient import lenient_answer
from mesotron.answers.numbers import Number, read_number
from mesotron.answers.screen import literal
from mesotron.answers.verify import Comparison, Verifier


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
        answer=None,
        parsed=False,
        formatted=False,
        correct=False,
        correct_unformatted=False,
        truncated=truncated,
        gold_unparseable=False,
        graded=False,
    )


class Reading(NamedTuple):
    """What was read in a completion."""

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
        readings = {text: self._read(*text) for text in dict.fromkeys(texts)}
        cases = [(readings[text], gold) for text, gold in zip(texts, golds, strict=True)]
        facts = self._judge(list(dict.fromkeys(cases)))

        return [facts[case] for case in cases]

    def _read(self, text: str, truncated: bool) -> Reading:
        strict = self.format.extract(text, complete=not truncated)
        if strict is not None:
            return Reading(strict, formatted=True, truncated=truncated)

        lenient = lenient_answer(text, complete=not truncated)
        return Reading(lenient, formatted=False, truncated=truncated)

    def _judge(self, cases: Sequence[Case]) -> dict[Case, Facts]:
        """Facts of distinct cases; the verifier gets them all at once."""
        answers = [reading.answer or "" for reading, _ in cases]
        golds = [gold or "" for _, gold in cases]
        comparisons = self.verifier.compare(answers, golds)

        return {case: facts_of(case, found) for case, found in zip(cases, comparisons, strict=True)}


def facts_of(case: Case, found: Comparison) -> Facts:
    """Facts of a reading, from how its answer compares with the gold."""
    reading, gold = case
    key, gold_key, is_right = found
    formatted = reading.formatted
    has_gold = gold is not None
    is_readable = bool(gold_key or literal(gold or ""))

    number = None
    if formatted:
        number = _read_value(reading.answer or "", key or "")

    return Facts(
        answer=key if formatted else None,
        parsed=key is not None or is_right,
        formatted=formatted,
        correct=is_right and formatted,
        correct_unformatted=is_right and not formatted,
        truncated=reading.truncated,
        gold_unparseable=has_gold and not is_readable,
        graded=has_gold and is_readable,
        number=number,
    )


def _read_value(answer: str, key: str) -> Number | None:
    """As written, or what math-verify made of it: sqrt(64) is 8."""
    return read_number(answer) or read_number(key)


def summarise(facts: Sequence[Facts]) -> dict[str, float]:
    """The share of completions for which each fact holds; of graded ones for correctness."""
    graded = [fact for fact in facts if fact.graded]
    shares = {}
    for name in ("parsed", "formatted", "truncated", "gold_unparseable"):
        shares |= share_of(name, facts)

    for name in ("correct", "correct_unformatted"):
        shares |= share_of(name, graded)

    return shares


def share_of(name: str, facts: Sequence[Facts]) -> dict[str, float]:
    if not facts:
        return {}

    count = sum(getattr(fact, name) for fact in facts)
    return {f"facts/{name}": count / len(facts)}
