r"""Plain numbers in answers, read exactly: 1,080, \$18.00, 50\%, 1 1/2, \frac{3}{4}, 2.5e3, 5 cm, 2
million people, five and a half.

Text is normalized first (`latex`), then read from the left: a variable and "=", signs and currency,
the number in digits or words (`number_words`), and a unit (`units`), which has to take all that is
left. The value is a `Fraction`. Nothing is evaluated.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from mesotron.answers.latex import MAX_LENGTH, clean, closing_place, simplify_latex
from mesotron.answers.number_words import SCALE_WORDS, Token, read_number_words
from mesotron.answers.units import read_unit, same_unit, spell_text_letters

_MAX_DIGITS = 100  # of one number; more is not a plain answer
_MAX_TOKENS = 24  # words and numerals of one number

# Each pattern is bounded and has one way to match, so a hostile string fails fast.
_DIGITS = rf"(?:\d{{1,3}}(?:,\d{{3}})+(?![\d,])|\d{{1,{_MAX_DIGITS}}})"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d{{0,{_MAX_DIGITS}}})?|\.\d{{1,{_MAX_DIGITS}}})"
_ARGUMENT = rf"(?:\{{ ?-?{_DECIMAL} ?\}}|\d)"  # of \frac: braced, or one bare digit
_EXPONENT = r"\{?(?P<exponent>[-+]?\d{1,3})\}?"
_SCIENTIFIC = re.compile(
    rf"(?P<mantissa>{_DECIMAL})(?:[eE]| ?(?:\\times|\\cdot|\*|x) ?10 ?(?:\^|\*\*) ?){_EXPONENT}",
    re.ASCII,
)
_FRACTION = re.compile(
    rf"(?:(?P<whole>{_DIGITS}) ?(?:(?<= )|(?=\\)))?"  # 1 1/2, 1\frac{1}{2}
    rf"(?:\\frac ?(?P<above>{_ARGUMENT}) ?(?P<below>{_ARGUMENT})"
    rf"|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL}))",
    re.ASCII,
)
_REPEATING = re.compile(
    r"(?P<whole>\d{0,20})\.(?P<once>\d{0,20})\\overline ?\{ ?(?P<again>\d{1,20}) ?\}", re.ASCII
)
_PLAIN = re.compile(_DECIMAL, re.ASCII)
_NUMERAL_ENDS = re.compile(r"(?![\d.,]*\d)", re.ASCII)
_WORD = re.compile(r"(?P<gap>[ -]?)(?P<word>[A-Za-z]+|,(?= ))", re.ASCII)
_GAP = re.compile(" ?")

_BASE = re.compile(r"_ ?\{? ?(\d{1,2}) ?\}?", re.ASCII)
_PERCENT = re.compile(r" ?%| per ?cent(?![a-z])| pct\.?(?![a-z])", re.ASCII | re.IGNORECASE)
_DEGREES = re.compile(
    r"(?: ?(?:\^ ?\{? ?\\circ ?\}?|\\degree|°)|(?<=\d) degrees?) ?([CF]?)$", re.ASCII
)
_ORDINAL = re.compile(r"(?<=\d) ?\^ ?\{? ?(st|nd|rd|th) ?\}?", re.ASCII)
_SCALES = {"C": "celsius", "F": "fahrenheit"}
# What stands before the last = of "x = 5" or "48 + 24 = 72".
_BEFORE = re.compile(
    r"(?:(?P<name>[A-Za-z]) ?=|(?:[\d .,+*/()$%-]|\\times|\\cdot|\\div)*=)+ ?", re.ASCII
)
_BEHIND = re.compile(r"([^= ](?:[^=]*[^= ])?) ?= ?([A-Za-z])", re.ASCII)  # 5 = x
_CURRENCIES = {
    "$": "dollar",
    "€": "euro",
    "£": "pound",
    "¥": "yen",
    "₹": "rupee",
    "₩": "won",
    "¢": "cent",
}
_CODES = {
    "usd": "dollar",
    "us$": "dollar",
    "eur": "euro",
    "gbp": "pound",
    "inr": "rupee",
    "rs": "rupee",
    "jpy": "yen",
    "cny": "yuan",
}
# Signs, also beside that of an amount: -$5, $-5, minus five. It matches anything.
_SIGNS = re.compile(
    r"(?P<before>[-+]|(?i:minus|negative)(?= ))? ?"
    r"(?P<currency>[$€£¥₹₩]|(?i:USD|US\$|EUR|GBP|INR|Rs\.?|JPY|CNY)(?= ?\d))? ?"
    r"(?P<behind>[-+])? ?"
)
_CURRENCY_BEHIND = re.compile(r" ?([$€£¥₹₩¢])(?=/|$)")
_SUFFIX = re.compile(r" ?(k|m|mm|mn|mln|b|bn|t|tn)(?![a-z])", re.ASCII | re.IGNORECASE)
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Number:
    """A plain number: its exact value as written, whether it had a % sign, its unit, and the
    variable it was assigned to."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    variable: str = ""

    @property
    def key(self) -> str:
        return str(self.value)


class Amount(NamedTuple):
    """A number at the start of a text, and what follows it."""

    value: Fraction
    rest: str


@lru_cache(maxsize=16_384)
def read_number(answer: str) -> Number | None:
    """A plain number, exactly, or None if the text is anything else."""
    if len(answer) > MAX_LENGTH:
        return None

    text, variable = _right_side(answer)
    signs = _match_signs(text)
    if signs is None:
        return None

    amount = _read_amount(text[signs.end() :])
    if amount is None:
        return None

    value, rest = amount
    currency = _currency_of(signs["currency"] or "")
    if currency:
        value, rest = _with_suffix(value, rest)

    percent = _PERCENT.match(rest)
    unit = _unit_of(rest[percent.end() :] if percent else rest, currency)
    if unit is None:
        return None

    is_negative = (signs["before"] or signs["behind"] or "+") != "+"
    return Number(-value if is_negative else value, percent is not None, unit, variable)


def _match_signs(text: str) -> re.Match[str] | None:
    """The sign and currency before a number; None if it has two signs."""
    signs = _SIGNS.match(text)
    assert signs is not None  # every part is optional
    return None if signs["before"] and signs["behind"] else signs


def read_abbreviated(answer: str) -> Number | None:
    """5k as 5000. In algebra it is five times k, so it is read only where the other is a number."""
    text = clean(answer).strip("$. ")
    if re.fullmatch(rf"-?{_DECIMAL}(?:[kKMB]|bn)", text, re.ASCII):
        number = read_number(f"${text}")
        return Number(number.value) if number else None

    return None


def _right_side(answer: str) -> tuple[str, str]:
    """The simplified text behind the last = of an answer, and the variable before it."""
    text = simplify_latex(spell_text_letters(clean(answer)))
    text = _BEHIND.sub(r"\2 = \1", text) if _BEHIND.fullmatch(text) else text
    before = _BEFORE.match(text)
    variable = (before["name"] or "").casefold() if before else ""
    text = text[before.end() :] if before else text

    while text.startswith("(") and closing_place(text) == len(text) - 1:
        text = text[1:-1].strip()

    text = _ORDINAL.sub(r"\1", text)
    return _DEGREES.sub(_as_degrees, text), variable


def _as_degrees(match: re.Match[str]) -> str:
    return f" {_SCALES.get(match[1], 'degrees')}"


def _currency_of(sign: str) -> str:
    sign = sign.casefold().removesuffix(".")
    return _CURRENCIES.get(sign) or _CODES.get(sign, "")


def _with_suffix(value: Fraction, rest: str) -> tuple[Fraction, str]:
    """$5k, $2.5 M, €3bn."""
    suffix = _SUFFIX.match(rest)
    if suffix is None:
        return value, rest

    return value * _SUFFIXES[suffix[1][0].casefold()], rest[suffix.end() :]


def _unit_of(rest: str, currency: str) -> str | None:
    """The unit that the rest of a text names, with the sign of a currency; None if it is none."""
    base = _BASE.fullmatch(rest)
    if base:  # the base is a unit: 12_8 is not 12_9
        return f"base {base[1]}"

    behind = _CURRENCY_BEHIND.match(rest)
    if behind and not currency:
        currency = _CURRENCIES[behind[1]]
        rest = rest[behind.end() :]

    unit = read_unit(rest)
    if unit is None or not currency or unit.split()[:1] == [currency]:
        return unit

    is_other_currency = unit in _CURRENCIES.values()
    return None if is_other_currency else f"{currency} {unit}".rstrip()


def same_number(answer: Number, gold: Number) -> bool:
    """Whether two plain numbers are equal, exactly. A unit that only one of them has is ignored.
    50% equals 50 and 1/2 if the other one has no % sign, and x = 5 is not y = 5."""
    if other_unit(answer, gold) or other_variable(answer, gold):
        return False

    return gold.value in _on_scale_of(gold, answer)


def distance(answer: Number, gold: Number) -> Fraction:
    """Distance of two plain numbers with comparable units, on the gold's scale. If only one has a %
    sign it is read both ways: 0.51 and 51 are 1 away from 50%, and 51% is 1/100 away from 1/2."""
    return min(abs(value - gold.value) for value in _on_scale_of(gold, answer))


def _on_scale_of(gold: Number, answer: Number) -> tuple[Fraction, ...]:
    """Possible values of an answer: as written, or with one's % sign applied to both."""
    if answer.percent == gold.percent:
        return (answer.value,)

    scaled = answer.value * 100 if gold.percent else answer.value / 100
    return answer.value, scaled


def other_unit(answer: Number, gold: Number) -> bool:
    return bool(answer.unit and gold.unit) and not same_unit(answer.unit, gold.unit)


def other_variable(answer: Number, gold: Number) -> bool:
    """x = 5 is not y = 5."""
    return bool(answer.variable and gold.variable) and answer.variable != gold.variable


def _read_amount(text: str) -> Amount | None:
    """The longest number at the start of a text, in digits, in words or in both."""
    tokens: list[Token] = []
    ends: list[int] = []
    for token, end in _tokens(text):
        tokens.append(token)
        ends.append(end)

    found = read_number_words(tokens)
    if found is None:
        return None

    value, count = found
    return Amount(value, text[ends[count - 1] :])


def _tokens(text: str) -> Iterator[tuple[Token, int]]:
    """Numerals and words from the start of a text, each with the place where it ends."""
    place = 0
    for _ in range(_MAX_TOKENS):
        gap = _GAP.match(text, place)
        numeral = _numeral_at(text, gap.end() if gap else place)
        if numeral is not None:
            value, place = numeral
            yield value, place
            continue

        match = _WORD.match(text, place)
        if match is None:
            return

        # 5million is read, 5x is not.
        word = match["word"].casefold()
        is_glued = place > 0 and not match["gap"]
        if is_glued and word not in SCALE_WORDS and word != ",":
            return

        place = match.end()
        yield word, place


def _numeral_at(text: str, place: int) -> tuple[Fraction, int] | None:
    """A number in digits, and where it ends."""
    for pattern, read in _NUMERALS:
        match = pattern.match(text, place)
        if match is None or not _NUMERAL_ENDS.match(text, match.end()):
            continue

        value = read(match)
        return None if value is None else (value, match.end())

    return None


def _read_scientific(match: re.Match[str]) -> Fraction:
    return _fraction(match["mantissa"]) * Fraction(10) ** int(match["exponent"])


def _read_plain(match: re.Match[str]) -> Fraction:
    return _fraction(match[0])


def _read_fraction(match: re.Match[str]) -> Fraction | None:
    above = _fraction(match["above"] or match["top"])
    below = _fraction(match["below"] or match["bottom"])
    whole = _fraction(match["whole"] or "0")

    # -1 3/4 has its sign in front; a sign inside a mixed number is not read.
    has_inner_sign = bool(match["whole"]) and (above < 0 or below < 0)
    if not below or has_inner_sign:
        return None

    return whole + above / below


def _read_repeating(match: re.Match[str]) -> Fraction:
    # 0.1\overline{6}: 16 - 1 over 90.
    whole = match["whole"] or "0"
    once = match["once"]
    again = match["again"]
    above = int(whole + once + again) - int(whole + once)
    below = 10 ** len(once) * (10 ** len(again) - 1)

    return Fraction(above, below)


def _fraction(digits: str) -> Fraction:
    text = digits.strip("{} ").replace(",", "")
    if not text.strip("."):
        return Fraction(0)

    return Fraction(text.removesuffix("."))


_NUMERALS = (
    (_SCIENTIFIC, _read_scientific),
    (_REPEATING, _read_repeating),
    (_FRACTION, _read_fraction),
    (_PLAIN, _read_plain),
)
