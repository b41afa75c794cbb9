r"""The lenient reader: an answer that is not in the requested format.

It serves evaluation and `correct_unformatted`, never the strict reward. Every pattern is bounded,
so reading is linear in the text.
"""

import re

from mesotron.answers.formats import FORMATS, MAX_ANSWER, MAX_TAIL
from mesotron.answers.numbers import read_number
from mesotron.answers.verify import expression_of, has_prose, screened, unfinished

MAX_PHRASES = 32  # the last ones of a text that are read

_PHRASE = re.compile(r"(?i)\banswer\s*(?:is|:|=)")
# Mathematics between delimiters. A dollar sign before a digit opens an amount.
_INSIDE = r"(?>\\text\s*\{[^{}]{0,200}\}|\\.|[^$\\])"
_FORMULA = re.compile(
    rf"\$\$(?P<display>{_INSIDE}{{1,{MAX_ANSWER}}}+)\$\$"
    rf"|(?<!\\)\$(?P<inline>{_INSIDE}{{1,{MAX_ANSWER}}}+)\$(?!\d)"
    rf"|\\\[(?P<square>(?>(?!\\[\[\]]).){{1,{MAX_ANSWER}}}+)\\\]"
    rf"|\\\((?P<round>(?>(?!\\[()]).){{1,{MAX_ANSWER}}}+)\\\)",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"(?:(?<![\w)}\]])-|(?<![\w)}\]])\+)?(?:\$|\\\$)?(?:"  # a sign, not a minus; currency
    r"(?:\d{1,9} ?)?\\[dtc]?frac ?(?:\{ ?-?[\d.,]{1,40} ?\}|\d) ?(?:\{ ?-?[\d.,]{1,40} ?\}|\d)"
    r"|(?<!\d)(?<!\d\.)(?:\d{1,3}(?:(?:,|\{,\}|,\\! ?)\d{3})+(?!\d)|\d{1,200})(?:\.\d{1,200})?"
    r"(?:/\d{1,200})?"  # 1,080 or 1{,}080 or 10.80 or 3/4
    r"|(?<![\w.)])\.\d{1,200})(?:\\?%)?",
    re.ASCII,
)
# Words before the value: "therefore", "a total of".
_LEAD = re.compile(r"[\s*_`:=]*(?:(?:[A-Za-z][a-z']+|a(?= ?[a-z]{2}| \d))[,:]?[\s*_`:]+)*")
# The end of a value: of its sentence, or where prose begins.
_STOP = re.compile(
    r"[.;]\s|\s\((?=[A-Za-z]{2})|[.,;:]?\s+(?!(?:and|or|mod)\b)[A-Za-z][a-z']+(?![\w\\(])"
)
_ASIDE = re.compile(r"\s\((?!mod\b)[a-z]{2,}\s")  # "12 (as 3*4)"
_ALSO = re.compile(r"\s*,?\s*(?:or|and)\s+")  # one more formula
_TRAILING = " \t*_`.,;:"


def lenient_answer(text: str, *, complete: bool = True) -> str | None:
    r"""The last answer in any known format; else what follows the last "answer is": a formula, a
    number, an expression, or words if the text ends with them; else the last formula or number. An
    answer at the cut of a truncated (not complete) text is not taken.

    >>> lenient_answer("So the answer is $1,080 for 3 days.")
    '$1,080'
    >>> lenient_answer(r"The final answer is $\frac{3}{4}$. I hope it is correct.")
    '\\frac{3}{4}'
    """
    text = text[-MAX_TAIL:]
    formatted = [found for form in FORMATS.values() if (found := form.find(text, complete))]
    if formatted:
        return max(formatted)[1]

    end = len(text)
    for phrase in reversed(list(_PHRASE.finditer(text))[-MAX_PHRASES:]):
        if answer := _after_phrase(text, phrase.end(), end, complete):
            return answer
        end = phrase.start()

    return _last(text, complete)


def _after_phrase(text: str, start: int, end: int, complete: bool) -> str | None:
    lead = _LEAD.match(text, start, end)
    first = lead.end() if lead else start
    if "\n" in text[start:first].strip():  # the words of another line
        first = start

    if formula := _formula_at(text, first, end):
        return formula

    line_end = text.find("\n", first, end)
    line_end = end if line_end < 0 else line_end
    answer, stop = _value(text, first, line_end)
    if answer:
        return answer if complete or stop < len(text) else None

    formulas = [(m.start(), _content(m)) for m in _FORMULA.finditer(text, first, line_end)]
    formula = next((one for one in formulas if one[1]), None)
    number = _NUMBER.search(text, first, line_end)
    if formula and (number is None or formula[0] <= number.start()):
        return formula[1]
    if number:
        return number[0] if complete or number.end() < len(text) else None

    # Words count only where the text ends with them: "the answer is as follows" is none.
    words = text[start:].strip(_TRAILING + "\n")
    is_short = "\n" not in words and len(words) <= 80

    return words if words and is_short and complete and end == len(text) else None


def _value(text: str, start: int, end: int) -> tuple[str | None, int]:
    """A value that starts here and ends before prose, and where it ends."""
    rest = _ASIDE.split(text[start : min(end, start + MAX_ANSWER)])[0]
    heads = (rest[: m.start()] for m in _STOP.finditer(rest))

    stops = [len(x) for x in heads if all(x.count(a) <= x.count(b) for a, b in ("{}", "()", "[]"))]
    for stop in (len(rest), *stops[:1]):
        answer = rest[:stop].strip(_TRAILING.replace(".", "")).removesuffix(".")
        if answer and (_readable(answer) or (" or " in answer and read_number(answer.split()[0]))):
            return answer, start + stop

    return None, start


def _readable(answer: str) -> bool:
    return bool(read_number(answer) or unfinished(answer) or screened(expression_of(answer)))


def _formula_at(text: str, start: int, end: int) -> str | None:
    found: list[str] = []
    while (match := _FORMULA.match(text, start, end)) and (content := _content(match)):
        found.append(content)
        also = _ALSO.match(text, match.end(), end)
        if also is None:
            break

        start = also.end()

    return ", ".join(found) or None  # several are compared as several: a guess is not an answer


def _content(match: re.Match[str]) -> str | None:
    content = (match[match.lastgroup or 0] or "").strip()
    # "$5 and pays 3$" is two amounts.
    is_amounts = match["inline"] and content[:1].isdigit() and has_prose(content)
    return None if is_amounts else content or None


def _last(text: str, complete: bool) -> str | None:
    numbers = [m for m in _NUMBER.finditer(text) if complete or m.end() < len(text)]
    if not numbers:
        return None

    number = numbers[-1]
    for match in _FORMULA.finditer(text):
        if match.start() <= number.start() and number.end() <= match.end():
            content = _content(match)
            # After the last equals sign: 2x = 3\sqrt{2}.
            value = content.rpartition("=")[2].strip() if content else ""
            return value if _readable(value) else number[0]

    return number[0]
