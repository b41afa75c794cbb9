r"""The lenient reader: an answer that is not in the requested format.

It serves evaluation and `correct_unformatted`, never the strict reward. Every pattern is bounded,
so reading is linear in the text.
"""

import re

from mesotron.answers.formats import FORMATS, MAX_ANSWER, MAX_TAIL
from mesotron.answers.latex import ascii_digits
from mesotron.answers.number_words import NUMBER_WORDS
from mesotron.answers.numbers import read_number
from mesotron.answers.screen import expression_of, has_prose, screened, unfinished

MAX_PHRASES = 32  # the last ones of a text that are read
MAX_WORDS = 80  # characters of an answer in words
PAIRS = ("{}", "()", "[]")

_PHRASE = re.compile(r"(?i)\banswer\s*(?:is(?!\s+not\b|n't)|:|=)")
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
    r"(?=[-+$\\.\d])"  # nothing else begins one: most places are passed over here
    r"(?:(?<![\w)}\]])-|(?<![\w)}\]])\+)?(?:\$|\\\$)?(?:"  # a sign, not a minus; currency
    r"(?:\d{1,9} ?)?\\[dtc]?frac ?(?:\{ ?-?[\d.,]{1,40} ?\}|\d) ?(?:\{ ?-?[\d.,]{1,40} ?\}|\d)"
    r"|(?<!\d)(?<!\d\.)(?:\d{1,3}(?:(?:,|\{,\}|,\\! ?)\d{3})+(?!\d)|\d{1,200})(?:\.\d{1,200})?"
    r"(?:/\d{1,200}|(?::\d{1,9}){1,2})?"  # 1,080 or 1{,}080 or 10.80 or 3/4 or 3:05
    r"|(?<![\w.)])\.\d{1,200})(?:\\?%)?",
    re.ASCII,
)
# Words that carry a value on: 2 million, 5 and a half, 5 plus two, 5 squared, 5 May.
_OPERATORS = (
    "plus|minus|times|squared|cubed|over|divided|multiplied|point|to|through|versus|vs|remainder"
    "|mil|mln|mn|bn"
)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_NUMBERS = "|".join(sorted(NUMBER_WORDS))
_ON = rf"(?:{_NUMBERS}|{_OPERATORS}|{_MONTHS})\b"
# Words before the value: "therefore", "a total of". Those of a number are not among them.
_BEGINS_NUMBER = rf"(?:an? )?(?i:{_NUMBERS}|minus|negative)\b|{_MONTHS}"
_LEAD = re.compile(
    rf"[\s*_`:=]*(?:(?!{_BEGINS_NUMBER})(?:[A-Za-z][a-z']+|a(?= ?[a-z]{{2}}| \d))[,:]?[\s*_`:]+)*"
)
# The end of a value: of its sentence, or where prose begins.
_PROSE_WORD = r"(?:I(?=[ '])|[A-Za-z][a-z']+(?![\w\\(]))"
_STOP = re.compile(
    rf"[.;]\s|\s\((?=[A-Za-z]{{2}})|[.,;:]\s+(?!(?:and|or|mod)\b){_PROSE_WORD}"
    rf"|\s+(?!(?:and|or|mod)\b|{_ON}){_PROSE_WORD}"
)
_BEGINS = re.compile(rf"[-+$]?[\d\\.(]|{_BEGINS_NUMBER}")
_DATE = re.compile(rf"(?:{_MONTHS})\s+\d")
_GOES_ON = re.compile(
    rf"[\s-]+(?:(?:and|or)\s+)?(?:an?\s+)?{_ON}|\s+\d|[.:/]\d"
    rf"|['\"]\s?\d|\s*[-–~]\s*[$€£]?\d|\s+out\s+of\b|\s+(?:degrees\s+)?below\b"
    rf"|(?:th|st|nd|rd)?\s+of\s+(?:{_MONTHS})\b|\s+(?:less|more|fewer)\s+than\b"
    # Two amounts: 5 apples and three pears, 5 feet 3 inches.
    rf"|\s+(?:[a-z]+\s+){{1,2}}(?:and|or)\s+(?:\d|{_ON})"
    rf"|\s+(?:feet|foot|hours?|minutes?|pounds?|years?|days?|weeks?|dollars?)\s+(?:\d|{_ON})"
)
# Words before a number that is not the value: at least 5, not 5, see page 5.
_NOT = r"(?:\b(?:not|never|neither|nor|cannot\s+be)|n't(?:\s+be)?)(?:\s+(?:an?|the|equal\s+to))?"
_PLACES = "pages?|sections?|chapters?|paragraphs?|figures?|tables?|equations?|lines?|steps?"
_OTHER = re.compile(rf"(?i)(?:\b(?:than|least|most|{_PLACES})|{_NOT})\s*$")
_NEGATED = re.compile(rf"(?i){_NOT}\s*$")
MAX_NEGATION = 40  # characters
_CLAUSE_END = re.compile(r"[.;,]\s|\n|[.;,]?$")
_ASIDE = re.compile(r"\s\((?!mod\b)[a-z]{2,}\s")  # "12 (as 3*4)"
_ALSO = re.compile(r"\s*,?\s*(?:or|and)\s+")  # one more formula
_AND = re.compile(r"\s*,?\s+and$")  # and prose behind it
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
    text = ascii_digits(text[-MAX_TAIL:])
    formatted = [form.find(text, complete) for form in FORMATS.values()]
    places = [found for found in formatted if found]
    if places:
        _, answer = max(places)
        return answer

    end = len(text)
    phrases = list(_PHRASE.finditer(text))[-MAX_PHRASES:]
    for phrase in reversed(phrases):
        answer = _after_phrase(text, phrase.end(), end, complete)
        if answer:
            return answer
        end = phrase.start()

    return _last(text, complete)


def _after_phrase(text: str, start: int, end: int, complete: bool) -> str | None:
    """What follows "answer is" at `start`, up to the next such phrase at `end`."""
    first = _skip_lead(text, start, end)
    if _OTHER.search(text[start:first]):
        return _clause(text, start, first)

    formula = _formula_at(text, first, end)
    if formula:
        return formula

    line_end = _end_of_line(text, first, end)
    answer, stop = _value(text, first, line_end)
    if answer:
        if complete or stop < len(text):
            return answer

        return None

    number = _NUMBER.search(text, first, line_end)
    formula = _first_formula(text, first, line_end, before=number)
    if formula:
        return formula

    if number:
        if complete or number.end() < len(text):
            return _whole_number(text, number)

        return None

    # Words count only where the text ends with them: "the answer is as follows" is none.
    if complete and end == len(text):
        return _few_words(text[start:])

    return None


def _end_of_line(text: str, start: int, end: int) -> int:
    line_end = text.find("\n", start, end)
    return end if line_end < 0 else line_end


def _few_words(text: str) -> str | None:
    """A short text in one line, without what trails it."""
    words = text.strip(_TRAILING + "\n")
    is_short = len(words) <= MAX_WORDS and "\n" not in words
    return words if words and is_short else None


def _skip_lead(text: str, start: int, end: int) -> int:
    """Where words such as "therefore" end, unless they are those of another line."""
    lead = _LEAD.match(text, start, end)
    if lead is None or "\n" in text[start : lead.end()].strip():
        return start

    return lead.end()


def _first_formula(text: str, start: int, end: int, before: re.Match[str] | None) -> str | None:
    """The first formula in a range, if it begins before a number does."""
    for match in _FORMULA.finditer(text, start, end):
        if before is not None and match.start() > before.start():
            return None

        content = _content(match)
        if content:
            return content

    return None


def _value(text: str, start: int, end: int) -> tuple[str | None, int]:
    """A value that starts here and ends before prose, and where it ends."""
    rest = _ASIDE.split(text[start : min(end, start + MAX_ANSWER)])[0]
    for stop in (len(rest), *_first_stop(rest)):
        answer = rest[:stop].strip(_TRAILING.replace(".", "")).removesuffix(".")
        answer = _AND.sub("", answer)
        if not answer:
            continue

        if _readable(answer) and not _GOES_ON.match(rest, stop):
            return answer, start + stop

        if _goes_on(answer):
            return answer, start + stop

    return None, start


def _first_stop(text: str) -> list[int]:
    """The first place outside of brackets where a sentence ends or prose begins, if any."""
    for match in _STOP.finditer(text):
        head = text[: match.start()]
        is_outside = all(head.count(left) <= head.count(right) for left, right in PAIRS)
        if is_outside:
            return [len(head)]

    return []


def _readable(answer: str) -> bool:
    return bool(read_number(answer) or unfinished(answer) or screened(expression_of(answer)))


def _goes_on(answer: str) -> bool:
    """Such as "3 or 4" or "5 plus two": compared as a whole, since its first number is none."""
    number = _NUMBER.match(answer)
    if number is None:
        is_date = _DATE.match(answer) is not None
        return is_date or (bool(_BEGINS.match(answer)) and bool(re.search(rf"\s{_ON}", answer)))

    is_choice = " or " in answer and read_number(answer.split()[0]) is not None
    return is_choice or bool(_GOES_ON.match(answer, number.end()))


def _whole_number(text: str, number: re.Match[str]) -> str:
    """A number, with the words that carry it on: 2 million people, but 3.50 of "3.50 each"."""
    if not _GOES_ON.match(text, number.end()):
        return number[0]

    line_end = text.find("\n", number.end())
    answer, _ = _value(text, number.start(), line_end if line_end >= 0 else len(text))
    if answer:
        return answer

    return _clause(text, number.start(), number.end())


def _clause(text: str, start: int, middle: int) -> str:
    """The text from a place to the end of the clause around another one."""
    end = _CLAUSE_END.search(text, middle)
    return text[start : end.start() if end else len(text)].strip()


def _formula_at(text: str, start: int, end: int) -> str | None:
    """The formulas that begin here. Several are compared as several: a guess is not an answer."""
    formulas: list[str] = []
    while True:
        match = _FORMULA.match(text, start, end)
        content = _content(match) if match else None
        if match is None or content is None:
            break

        formulas.append(content)
        also = _ALSO.match(text, match.end(), end)
        if also is None:
            break

        start = also.end()

    return ", ".join(formulas) or None


def _content(match: re.Match[str]) -> str | None:
    """What is between the delimiters of a formula; None if it is none."""
    content = (match[match.lastgroup or 0] or "").strip()

    # "$5 and pays 3$" is two amounts.
    is_amounts = match["inline"] and content[:1].isdigit() and has_prose(content)
    return None if is_amounts else content or None


def _is_negated(text: str, place: int) -> bool:
    return _NEGATED.search(text[max(0, place - MAX_NEGATION) : place]) is not None


def _last(text: str, complete: bool) -> str | None:
    """The last number of a text, or the value of the formula that it ends."""
    number = None
    for match in _NUMBER.finditer(text):
        if complete or match.end() < len(text):
            number = match

    if number is None or _is_negated(text, number.start()):
        return None

    for match in _FORMULA.finditer(text):
        if match.start() <= number.start() and number.end() <= match.end():
            # After the last equals sign: 2x = 3\sqrt{2}.
            content = _content(match) or ""
            value = content.rpartition("=")[2].strip()
            return value if _readable(value) else number[0]

    return _whole_number(text, number)
