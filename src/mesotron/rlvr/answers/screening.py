"""What an answer is before anybody reads it: words, a sum left standing, mathematics, or nothing.

Model output is hostile. Everything here is a bounded pattern over a short text; only what passes
`screened` is shown to math-verify, in its own process.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate

from mesotron.rlvr.answers.numbers import clean, simplify_latex

MAX_EXPRESSION = 256  # characters that math-verify is shown
MAX_DEPTH = 10  # of brackets; its parser takes exponentially long in them
MAX_DIGIT_RUN = 64

_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[ ',.-]{1,2}[^\W\d_]+)*\.?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})", re.ASCII)
_ARITHMETIC = re.compile(r"(?:[\d\s.+*/(){}$%-]|\\times|\\cdot|\\div|\\frac)+", re.ASCII)
_OPERATOR = re.compile(r"[+*/]|\\times|\\cdot|\\div|(?<=[\d)}]) ?- ?(?=[\d({\\])", re.ASCII)
# Nothing that anybody answers, and more digits than memory: 9^9^9, 9^{9^{9}}, 99999!, 1e9999. And
# a product that would be read as a sum: 72 73.
_ABSURD = re.compile(
    r"\^\s*[{(]?\s*\d+\s*\^\s*[{(]?\s*\d|\d{4}\s*!|\d[eE][-+]?\d|(?<![_^\d])\d+\s+\d",
    re.ASCII,
)
# Prose, which a grammar of mathematics takes for products of letters.
_PROSE = re.compile(
    r"(?<![\w\\])(?!(?:sin|cos|tan|log|exp|max|min|gcd|lcm|mod|and)\b)[A-Za-z]{3}|[?\"#@`]",
    re.ASCII,
)
# Units after mathematics: 25\pi square inches.
_UNITS = re.compile(r"(?<=[\w})\]])(?: [a-z]{2,24}){1,4}(?:\^\{?[23]\}?)?$", re.ASCII)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]{1,12}\*?\}")
_MATHEMATICS = re.compile(r"[^\d\s.+*/(){}$%=-]", re.ASCII)
# A whole number and powers of letters, as sympy writes them; E and I are numbers.
_LETTERS = re.compile(r"-?(?:\d+\*)?[a-z](?:\*\*\d+)?(?:\*[a-z](?:\*\*\d+)?)*", re.ASCII)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@lru_cache(maxsize=16_384)
def tidy(answer: str) -> str:
    """An answer without what Unicode, LaTeX and Markdown put around it."""
    return simplify_latex(clean(answer))


def expression_of(answer: str) -> str:
    r"""An answer in the one spelling of LaTeX that is screened and then shown to math-verify.

    Example:
        >>> expression_of(r"$25\pi \text{ square inches}$")
        '25\\pi'
    """
    text = tidy(answer).replace("$", "").replace("**", "^")
    bare = _UNITS.sub("", text)
    return bare if "\\" in bare else text


def screened(expression: str) -> bool:
    r"""Whether an expression is short, whole, shallow and more than digits or prose.

    Example:
        >>> screened("x^{2} + 1"), screened("9^{9^{9}}"), screened(r"\frac{1}{"), screened("so x")
        (True, False, False, True)
    """
    if not 0 < len(expression) <= MAX_EXPRESSION or r"\boxed" in expression:
        return False
    if re.search(rf"\d{{{MAX_DIGIT_RUN}}}", expression) or _ABSURD.search(expression):
        return False
    bare = _ENVIRONMENT.sub("", re.sub(r"\\[{}]", "", expression))
    if _PROSE.search(bare) or not _MATHEMATICS.search(bare):
        return False
    # Round and square brackets may stay open, as in the interval (0, 1]; braces may not.
    braces = list(accumulate(_BRACKETS[c] for c in bare if c in "{}"))
    depths = accumulate(_BRACKETS.get(c, 0) for c in bare)
    return min(braces, default=0) >= 0 == sum(braces[-1:]) and max(depths) <= MAX_DEPTH


def words(answer: str) -> str | None:
    """Words, in one case and without a last stop, or None if the answer is something else.

    They are not for math-verify, which reads a word as a product of letters: an anagram of the
    gold would be right.

    Example:
        >>> words("Monday, Tuesday."), words("x"), words("7 apples")
        ('monday, tuesday', None, None)
    """
    text = tidy(answer)
    return text.removesuffix(".").casefold() if _WORDS.fullmatch(text) else None


def unfinished(answer: str) -> bool:
    """Whether an answer is a sum, product or power of plain numbers that was left standing.

    Example:
        >>> unfinished("48 + 24"), unfinished("9**9**9"), unfinished("-7"), unfinished("x + 1")
        (True, True, False, False)
    """
    text = _THOUSANDS.sub("", tidy(answer))
    return bool(_ARITHMETIC.fullmatch(text) and _OPERATOR.search(text))


def letters(key: str) -> bool:
    """Whether a key is a product of letters, as math-verify reads a word: equal to no number.

    Example:
        >>> letters("2*b"), letters("-n**2*o"), letters("2"), letters("x + 1"), letters("2*E")
        (True, True, False, False, False)
    """
    return bool(_LETTERS.fullmatch(key))
