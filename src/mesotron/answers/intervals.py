r"""Inequalities in one variable as intervals: 0 < x \le 1 as (0,1].

Math-verify compares an inequality with an inequality, and an interval with an interval.
"""

import re

from mesotron.answers.latex import closing_place
from mesotron.answers.screen import expression_of

_LESS = {r"\leqslant": "<=", r"\leq": "<=", r"\le": "<=", "<=": "<=", r"\lt": "<", "<": "<"}
_MORE = {r"\geqslant": ">=", r"\geq": ">=", r"\ge": ">=", ">=": ">=", r"\gt": ">", ">": ">"}
_UNEQUAL = (r"\neq", r"\ne", "!=")
_SIGN = re.compile(
    "("
    + "|".join(
        re.escape(sign) + ("(?![a-z])" if sign.startswith("\\") else "")
        for sign in (*_LESS, *_MORE, *_UNEQUAL)
    )
    + ")"
)
_VARIABLE = re.compile(r"[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu|phi)(?![a-z])")
_OR = re.compile(r" ?(?:, ?)?(?:\bor\b|\\lor(?![a-z])|\\vee(?![a-z])) ?|, ?(?=[^,]*[<>\\])")
_BUILDER = re.compile(r"\\\{ ?[a-z](?: ?\\in ?\\mathbb\{?R\}?)? ?(?:\||\\mid|:) ?(.*)\\\}")
_SET = re.compile(r"\\\{[^|:(\[{}]*\\\}")  # by its elements
_INTERVAL = re.compile(r"(?:[a-zA-Z] ?\\in(?![a-z]) ?)?(?P<set>[(\[].*[)\]])")


def in_one_notation(answer: str, gold: str) -> tuple[str, str]:
    """Both as intervals if one is an inequality and the other an interval; else as they are."""
    if is_interval(expression_of(gold)):
        return as_interval(expression_of(answer)) or answer, gold

    if is_interval(expression_of(answer)):
        return answer, as_interval(expression_of(gold)) or gold

    return answer, gold


def is_set_and_tuple(answer: str, gold: str) -> bool:
    r"""Whether one is a set such as \{1, 2\} and the other a pair such as (1, 2)."""
    first = expression_of(answer)
    second = expression_of(gold)
    return (_is_set(first) and _is_tuple(second)) or (_is_tuple(first) and _is_set(second))


def _is_set(expression: str) -> bool:
    return _SET.fullmatch(expression) is not None


def _is_tuple(expression: str) -> bool:
    is_whole = expression.startswith("(") and closing_place(expression) == len(expression) - 1
    return is_whole and "," in expression


def as_interval(expression: str) -> str | None:
    r"""An inequality in the notation of intervals; None if it is none.

    >>> as_interval(r"0 < x \le 1"), as_interval(r"x < 1 or x \ge 2")
    ('(0,1]', '(-\\infty,1)\\cup[2,\\infty)')
    """
    builder = _BUILDER.fullmatch(expression)
    text = builder[1].strip() if builder else expression
    if not _SIGN.search(text):
        return None

    variables: set[str] = set()
    intervals: list[str] = []
    for part in _OR.split(text):
        found = _one_interval(part.strip())
        if found is None:
            return None

        variable, interval = found
        variables.add(variable)
        intervals.append(interval)

    return r"\cup".join(intervals) if len(variables) == 1 else None


def is_interval(expression: str) -> bool:
    """Whether an expression is an interval or a union of them."""
    match = _INTERVAL.fullmatch(expression)
    if match is None:
        return False

    return r"\cup" in expression or closing_place(match["set"]) in (None, len(match["set"]) - 1)


def _one_interval(text: str) -> tuple[str, str] | None:
    """The variable and the interval of x < 1, 1 > x, or 0 < x < 1."""
    parts = [part.strip() for part in _SIGN.split(text)]
    if not all(parts):
        return None

    if len(parts) == 3:
        return _half_line(*parts)

    if len(parts) == 5:
        low, first, variable, second, high = parts
        if first in _MORE and second in _MORE:
            low, first, second, high = high, second, first, low
        elif not (first in _LESS and second in _LESS):
            return None

        if _VARIABLE.fullmatch(variable):
            return variable, f"{_left(first)}{low},{high}{_right(second)}"

    return None


def _half_line(left: str, sign: str, right: str) -> tuple[str, str] | None:
    if _VARIABLE.fullmatch(left):
        variable, bound, is_below = left, right, sign in _LESS
    elif _VARIABLE.fullmatch(right):
        variable, bound, is_below = right, left, sign in _MORE
    else:
        return None

    if sign in _UNEQUAL:
        return variable, rf"(-\infty,{bound})\cup({bound},\infty)"

    if is_below:
        return variable, rf"(-\infty,{bound}{_right(sign)}"

    return variable, rf"{_left(sign)}{bound},\infty)"


def _is_strict(sign: str) -> bool:
    return (_LESS | _MORE)[sign] in ("<", ">")


def _left(sign: str) -> str:
    return "(" if _is_strict(sign) else "["


def _right(sign: str) -> str:
    return ")" if _is_strict(sign) else "]"
