"""Numbers in English words, alone or after digits: "five hundred and two", "2.5 million", "5 and a
half", "two thirds", "3 dozen".

    number   = (whole | fraction | whole "and" fraction) [scale] | "half" ["a"] scale
    whole    = group {[","] ["and"] group}, each with a smaller scale than the one before
    group    = (small | numeral) ["hundred" [["and"] small]] [scale]
    fraction = "half" | "a third" | "two thirds" | a numeral below 1

A sequence that is no number, such as "five six" or "twenty and two", is not read to its end; the
caller then finds a number word where a unit should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Token = str | Fraction  # a word in lower case, a comma, or a number in digits

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    *("ten", "eleven", "twelve", "thirteen", "fourteen"),
    *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_UNITS = {word: value for value, word in enumerate(_ONES)}
_SMALL = _UNITS | {word: 10 + k for k, word in enumerate(_TEENS)}
_TENS_VALUES = {word: 20 + 10 * k for k, word in enumerate(_TENS)} | {"fourty": 40}

_HUNDRED = ("hundred", "hundreds")
_SCALES = {
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
    "quintillion": 10**18,
    "sextillion": 10**21,
    "septillion": 10**24,
}
_SCALES |= {f"{word}s": value for word, value in _SCALES.items()}
_COUNTS = {"dozen": 12, "dozens": 12, "tens": 10}  # no smaller number follows them

_DENOMINATORS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "eleventh": 11,
    "twelfth": 12,
    "hundredth": 100,
    "thousandth": 1000,
    "millionth": 10**6,
    "billionth": 10**9,
}
_DENOMINATORS |= {f"{word}th": 10 + k for k, word in enumerate(_TEENS) if k >= 3}
_DENOMINATORS |= {f"{word[:-1]}ieth": 20 + 10 * k for k, word in enumerate(_TENS)}
_PLURALS = {f"{word}s": value for word, value in _DENOMINATORS.items()} | {"halves": 2}
_OTHERS = (
    *("first", "ones", "twice", "thrice", "double", "triple"),
    *("halved", "doubled", "tripled", "quadrupled"),
)

NUMBER_WORDS = frozenset(
    (*_SMALL, *_TENS_VALUES, *_HUNDRED, *_SCALES, *_COUNTS, *_DENOMINATORS, *_PLURALS, *_OTHERS)
)
SCALE_WORDS = frozenset([*_HUNDRED, *_SCALES, *_COUNTS])


@dataclass
class _Reader:
    """A position in the tokens of a text."""

    tokens: Sequence[Token]
    at: int = 0

    def word(self, ahead: int = 0) -> str:
        """The word here or some tokens ahead; "" for a numeral and at the end."""
        place = self.at + ahead
        token = self.tokens[place] if place < len(self.tokens) else ""
        return token if isinstance(token, str) else ""

    def take(self, *words: str) -> bool:
        """Move past one of these words if it stands here."""
        if self.word() in words and self.word():
            self.at += 1
            return True

        return False

    def take_value(self, values: dict[str, int]) -> int | None:
        """The value of the word here, if it has one."""
        value = values.get(self.word())
        if value is not None:
            self.at += 1

        return value

    def take_numeral(self) -> Fraction | None:
        if self.at < len(self.tokens) and isinstance(self.tokens[self.at], Fraction):
            self.at += 1
            return Fraction(self.tokens[self.at - 1])

        return None


def read_number_words(tokens: Sequence[Token]) -> tuple[Fraction, int] | None:
    """The number at the start of the tokens, and how many of them it takes; None without one."""
    reader = _Reader(tokens)
    value = _read_fraction(reader)
    if value is not None:
        value = _times_scale_of(reader, value)
    else:
        value = _read_mixed(reader)

    if value is None:
        return None

    if _takes_count(tokens[: reader.at]):
        value *= reader.take_value(_COUNTS) or 1

    return value, reader.at


def _takes_count(number: Sequence[Token]) -> bool:
    """Two dozen, two and a half dozen, two hundred dozen; not three hundred four tens."""
    return len(number) <= 2 or not SCALE_WORDS.intersection(number)


def _times_scale_of(reader: _Reader, fraction: Fraction) -> Fraction:
    """Half a million, half a dozen, three quarters of a million; half an hour, too."""
    start = reader.at
    reader.take("of")
    reader.take("a", "an")
    scale = reader.take_value({**_SCALES, **_COUNTS, "hundred": 100})
    if scale is not None:
        return fraction * scale

    reader.at = start
    if fraction == Fraction(1, 2) and not reader.take("a"):
        reader.take("an")

    return fraction


def _read_mixed(reader: _Reader) -> Fraction | None:
    """A whole number, and a fraction after it: five and a half, 2 and 1/2 million."""
    whole = _read_whole(reader)
    if whole is None:
        return None

    # "2 million and a half" has two meanings.
    last = reader.tokens[reader.at - 1]
    if last in SCALE_WORDS or whole.denominator != 1 or reader.word() != "and":
        return whole

    before = reader.at
    reader.at += 1
    fraction = _read_fraction(reader)
    if fraction is None or fraction >= 1:
        reader.at = before
        return whole

    value = whole + fraction
    scale = reader.take_value(_SCALES) if whole < 1000 else None
    return value * (scale or 1)


def _read_fraction(reader: _Reader) -> Fraction | None:
    """Half, a half, one third, two thirds, 25 hundredths, two twenty-fifths, 3/4."""
    start = reader.at
    if reader.take("half"):
        return Fraction(1, 2)

    if reader.take("a", "an", "one"):
        below = reader.take_value(_DENOMINATORS)
        if below is not None:
            return Fraction(1, below)
        reader.at = start

    parts = _read_parts(reader)
    if parts is not None:
        return parts

    # In digits after "and": 2 and 1/2.
    reader.at = start
    numeral = reader.take_numeral()
    if start and numeral is not None and numeral.denominator > 1 and 0 < numeral < 1:
        return numeral

    reader.at = start
    return None


def _read_parts(reader: _Reader) -> Fraction | None:
    """A number of equal parts: two thirds, 25 hundredths, two twenty-fifths."""
    above = _read_small(reader)
    if above is None or above.denominator != 1:
        return None

    tens = reader.take_value(_TENS_VALUES) or 0
    below = reader.take_value(_PLURALS)
    if below is None and above == 1:
        below = reader.take_value(_DENOMINATORS)
    if below is None or (tens and below >= 10):
        return None

    return above / (tens + below)


def _read_whole(reader: _Reader) -> Fraction | None:
    """Groups with falling scales: two million three hundred thousand and five."""
    total: Fraction | None = None
    lowest: int | None = None  # scale of the group before
    while True:
        start = reader.at
        has_comma = total is not None and reader.take(",")
        if total is not None:
            reader.take("and")

        group = _read_group(reader, is_first=total is None)
        if group is None:
            reader.at = start
            return total

        scale = reader.take_value(_SCALES)
        value = group * (scale or 1)
        is_next_of_list = has_comma and value < 100
        if not _is_below(value, group, lowest) or is_next_of_list:
            reader.at = start
            return total

        total = (total or 0) + value
        lowest = scale
        if scale is None or group.denominator != 1:
            return total


def _is_below(value: Fraction, group: Fraction, lowest: int | None) -> bool:
    """Whether a group may follow the one before, whose scale was the lowest so far."""
    return lowest is None or (group.denominator == 1 and value < lowest)


def _read_group(reader: _Reader, is_first: bool) -> Fraction | None:
    """What stands before a scale: five hundred and twenty, 2.5, two point five."""
    start = reader.at
    if is_first and reader.take("a", "an"):
        value: Fraction | None = Fraction(1)
        if reader.word() not in SCALE_WORDS:
            reader.at = start
            return None
    else:
        value = _read_small(reader)

    if value is None:
        return None

    if is_first and reader.word() == "point":
        return value + _read_decimals(reader)

    if value == 0 or not reader.take(*_HUNDRED):
        return value

    value *= 100
    if value.denominator != 1:
        return value

    return value + _read_below_hundred(reader)


def _read_below_hundred(reader: _Reader) -> Fraction:
    """What follows a hundred: and twenty; 0 if no whole number below 100 follows."""
    before = reader.at
    reader.take("and")
    rest = _read_small(reader)
    if rest is None or rest.denominator != 1 or not 0 < rest < 100:
        reader.at = before
        return Fraction(0)

    return rest


def _read_small(reader: _Reader) -> Fraction | None:
    """A number below 100 in words, or any in digits."""
    numeral = reader.take_numeral()
    if numeral is not None:
        return numeral

    value = reader.take_value(_SMALL)
    if value is not None:
        return Fraction(value)

    tens = reader.take_value(_TENS_VALUES)
    if tens is None:
        return None

    ones = reader.take_value(_UNITS) if reader.word() != "zero" else None
    return Fraction(tens + (ones or 0))


def _read_decimals(reader: _Reader) -> Fraction:
    """Point two five; 0 if no digit follows."""
    start = reader.at
    reader.at += 1
    digits = ""
    while (digit := reader.take_value(_UNITS)) is not None:
        digits += str(digit)

    if not digits:
        reader.at = start
        return Fraction(0)

    return Fraction(int(digits), 10 ** len(digits))
