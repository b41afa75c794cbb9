"""What a text is: words, unfinished arithmetic, mathematics for math-verify, or none of them.

Bounded patterns over a short text. Answers and golds are untrusted, and what these functions let
through is given to a parser.
"""

import re
from functools import lru_cache
from itertools import accumulate

from mesotron.answers.latex import TEXT, clean, simplify_latex
from mesotron.answers.units import spell_text_letters, split_unit

MAX_EXPRESSION = 256  # characters given to math-verify
MAX_DEPTH = 10  # of brackets; its parser takes exponentially long in them
MAX_DIGIT_RUN = 64

_DIGIT_RUN = re.compile(rf"\d{{{MAX_DIGIT_RUN}}}")
_WORDS = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_]+(?:[ ',.-]{1,2}[^\W\d_]+)*\.?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})", re.ASCII)
_ARITHMETIC = re.compile(r"(?:[\d\s.+*/(){}$%!-]|\\times|\\cdot|\\div|\\frac)+", re.ASCII)
_OPERATOR = re.compile(r"[+*/!]|\\times|\\cdot|\\div|(?<=[\d)}]) ?- ?(?=[\d({\\])", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}", re.ASCII)
_HEXADECIMAL = re.compile(r"(?=\w*[A-F])[\dA-F]{1,30}_\{?\d{1,2}\}?", re.ASCII)
# More digits than fit in memory, and no real answer: 9^9^9, 9^{9^{9}}, 99999!, 1e9999. And a
# product that would be read as a sum: 72 73.
_ABSURD = re.compile(
    r"\^\s*[{(]?\s*\d+\s*\^\s*[{(]?\s*\d|\d{4}\s*!|\d[eE][-+]?\d|(?<![_^\d])\d+\s+\d", re.ASCII
)
# Prose, which a grammar of mathematics takes for products of letters.
_PROSE = re.compile(
    r"(?<![\w\\])(?!(?:sin|cos|tan|log|exp|max|min|gcd|lcm|mod|and)\b)[A-Za-z]{3}|[?\"#@`]",
    re.ASCII,
)
# Mathematics without LaTeX: 2 pi, sqrt(2), √2.
_PLAIN_SYMBOLS = (
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(?i:infinity)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?:√|(?<![\\A-Za-z])sqrt) ?\(([^()]{1,80})\)"), r"\\sqrt{\1}"),
    (re.compile(r"√ ?(\d{1,40}(?:\.\d{1,40})?|[a-z])", re.ASCII), r"\\sqrt{\1}"),
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]{1,12}\*?\}")
_MATHEMATICS = re.compile(r"[^\d\s.+*/(){}$%=-]", re.ASCII)
# A whole number and powers of letters, as sympy writes them; E and I are numbers.
_LETTERS = re.compile(r"-?(?:\d+\*)?[a-z](?:\*\*\d+)?(?:\*[a-z](?:\*\*\d+)?)*", re.ASCII)
# What may take seconds: sums, products, integrals, factorials and large powers.
_COSTLY = re.compile(r"\\(?:sum|prod|i*int|lim|binom)|!|\^\s*\{?\s*-?\d{3}", re.ASCII)
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@lru_cache(maxsize=16_384)
def tidy(answer: str) -> str:
    return _with_latex_symbols(simplify_latex(clean(answer)))


def _with_latex_symbols(text: str) -> str:
    for pattern, latex in _PLAIN_SYMBOLS:
        text = pattern.sub(latex, text)

    return text.strip()


def expression_of(answer: str) -> str:
    r"""An answer in the one LaTeX spelling that is screened and then given to math-verify."""
    expression, _ = expression_and_unit(answer)
    return expression


@lru_cache(maxsize=16_384)
def expression_and_unit(answer: str) -> tuple[str, str]:
    r"""The LaTeX of 25\pi square inches, and its unit in one spelling."""
    text = simplify_latex(spell_text_letters(clean(answer)))
    text = _with_latex_symbols(text.replace("$", "").replace("**", "^"))
    bare, unit = split_unit(text)
    return (bare, unit) if "\\" in bare else (text, "")


def screened(expression: str) -> bool:
    r"""Whether an expression is short, complete, shallow and more than digits or prose."""
    if not 0 < len(expression) <= MAX_EXPRESSION or r"\boxed" in expression:
        return False

    if _DIGIT_RUN.search(expression) or _ABSURD.search(expression):
        return False

    bare = _ENVIRONMENT.sub("", without_escaped_braces(expression))
    if _PROSE.search(bare) or not _MATHEMATICS.search(bare):
        return False

    # Round and square brackets may stay open, as in the interval (0, 1]; braces may not.
    depths = accumulate(_BRACKETS.get(c, 0) for c in bare)
    return closes_its_braces(bare) and max(depths) <= MAX_DEPTH


def is_costly(expression: str) -> bool:
    """Whether an expression may take math-verify far longer than most."""
    return bool(_COSTLY.search(expression))


def without_escaped_braces(text: str) -> str:
    return re.sub(r"\\[{}]", "", text)


def closes_its_braces(text: str) -> bool:
    depths = list(accumulate(_BRACKETS[c] for c in text if c in "{}"))
    if not depths:
        return True

    return min(depths) >= 0 and depths[-1] == 0


def words(answer: str) -> str | None:
    """Words in lower case without a final period; None if the answer is something else. Math-verify
    would read a word as a product of letters, and take an anagram of the gold for correct."""
    text = tidy(answer)
    if _WORDS.fullmatch(text):
        return text.removesuffix(".").casefold()

    return None


def literal(answer: str) -> str | None:
    r"""The text itself, to compare as it stands; None if it is broken or has no letter or digit.

    >>> literal(r"12\!:\!00 \text{ P.M.}")
    '12:00P.M'
    """
    # 1 000 is 1000, but 7 2 is not 72, and 1. 5 is not 1.5.
    text = re.sub(r"(?<![\d.]) | (?![\d.])| (?=\d{3}(?!\d))", "", tidy(answer)).removesuffix(".")
    is_whole = closes_its_braces(without_escaped_braces(text)) and any(map(str.isalnum, text))
    return text if is_whole else None


def has_prose(text: str) -> bool:
    return bool(_PROSE.search(_ENVIRONMENT.sub("", TEXT.sub("", text))))


def is_date(answer: str) -> bool:
    """Math-verify would subtract 2024-05-06."""
    return bool(_DATE.fullmatch(tidy(answer)))


def is_hexadecimal(answer: str) -> bool:
    """Math-verify would overlook the base of A5_{12}."""
    return bool(_HEXADECIMAL.fullmatch(tidy(answer)))


def unfinished(answer: str) -> bool:
    """Whether an answer is arithmetic on plain numbers that was not carried out."""
    text = _THOUSANDS.sub("", tidy(answer))
    return bool(_ARITHMETIC.fullmatch(text) and _OPERATOR.search(text))


def letters(key: str) -> bool:
    """Whether a key is a product of letters, as math-verify reads a word: equal to no number."""
    return bool(_LETTERS.fullmatch(key))
