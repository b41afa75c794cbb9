"""What `mesotron check` tries: spellings of the gold, cheats and hostile text."""

from collections.abc import Callable
from dataclasses import dataclass

from mesotron.answers.formats import FORMATS
from mesotron.tasks.problem import Problem

EARNS = 0.3  # a cheat earns if it gets more than this share of gold's reward
FORMAT_EARNS = 0.5  # the same for wrong answers in the format, which may pay a little
NOISE = "I cannot solve this. "
LONG = NOISE * 400


def spellings(gold: str) -> tuple[str, ...]:
    """A gold answer in the ways that rewards expect it."""
    boxed = FORMATS["boxed"].render(gold)
    return (
        boxed,
        f"The answer is {boxed}.",
        f"<think>\nLet me see.\n</think>\n{boxed}",
        f"<think>\nLet me see.\n</think>\n<answer>{gold}</answer>",
        f"<reasoning>\nLet me see.\n</reasoning>\n<answer>\n{gold}\n</answer>\n",
        FORMATS["answer"].render(gold),
        FORMATS["hashes"].render(gold),
        f"The answer is {gold}.",
        gold,
    )


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """A completion that any policy could learn to give without solving the problem."""

    name: str
    write: Callable[[Problem, Problem], str]  # of a problem, and one with another gold
    about: str
    limit: float = EARNS
    truncated: bool = False
    needs_gold: bool = True
    is_wrong: bool = False  # earns what every wrong answer in the format does, or more


def cheats(spelling: int) -> tuple[Cheat, ...]:
    """Cheats in the spelling of the gold that the reward pays best."""

    def write(*golds: str | None) -> str:
        """A line for each of the golds."""
        return "\n".join(spellings(gold or "")[spelling] for gold in golds)

    def first_half(problem: Problem, _: Problem) -> str:
        text = write(problem.gold)
        return text[: len(text) // 2]

    def many_answers(problem: Problem, other: Problem) -> str:
        numbers = map(str, range(20))
        return write(other.gold, *numbers, problem.gold, other.gold)

    def one_long_answer(problem: Problem, other: Problem) -> str:
        answers = [other.gold or "", problem.gold or "", "0", "1", "2", "3"]
        return write(", ".join(answers))

    return (
        Cheat(
            name="empty",
            write=lambda problem, other: "",
            about="an empty answer earns",
            needs_gold=False,
        ),
        Cheat(
            name="copied prompt",
            write=lambda problem, other: problem.question,
            about="copying the prompt earns",
            needs_gold=False,
        ),
        Cheat(
            name="format only",
            write=lambda problem, other: write(""),
            about="the format without an answer earns",
            limit=FORMAT_EARNS,
        ),
        Cheat(
            name="shuffled gold",
            write=lambda problem, other: write(other.gold),
            about="wrong answers in the format earn: the format is worth more than correctness",
            limit=FORMAT_EARNS,
        ),
        Cheat(
            name="truncated",
            write=first_half,
            about="an answer that was cut off earns",
            truncated=True,
        ),
        Cheat(
            name="number at the end",
            write=lambda problem, other: f"{NOISE}It is on page {problem.gold}",
            about="the last number of any text earns",
        ),
        Cheat(
            name="answer list",
            write=many_answers,
            about="a list of many answers earns",
            is_wrong=True,
        ),
        Cheat(
            name="list in one answer",
            write=one_long_answer,
            about="a list of many answers earns",
            is_wrong=True,
        ),
        Cheat(
            name="very long",
            write=lambda problem, other: LONG,
            about="length earns",
            needs_gold=False,
        ),
        Cheat(
            name="long and wrong",
            write=lambda problem, other: LONG + write(other.gold),
            about="length earns",
            limit=FORMAT_EARNS,
            is_wrong=True,
        ),
    )


# Text that a policy writes sooner or later: it must neither raise nor take long.
HOSTILE = {
    "Unicode": "𝟏𝟐 ½ ² ٧٢ 北京 🙂\u200d🙂 \u202eabc\u202c é \x00 \ufffd",
    "spaces": " " * 4000 + "x",
    "letters": "a" * 4000 + "!",
    "digits": "1" * 4000 + "x",
    "numbers": "1,1 " * 1000 + "x",
    "brackets": "(" * 1500 + "{" * 1500,
    "boxes": r"\boxed{" * 500,
    "tags": "<think>\n" * 500 + "<answer>" * 500,
    "lines": "a\n" * 2000,
}
