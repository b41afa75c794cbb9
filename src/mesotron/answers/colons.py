"""Texts with colons: times of day such as 3:05 p.m., and ratios such as 2:3 or 2 to 3.

Math-verify divides the two sides of a colon, so 10:05 would be 2.
"""

import re
from fractions import Fraction
from math import gcd, lcm

from mesotron.answers.numbers import read_number
from mesotron.answers.screen import tidy

_TIME = re.compile(
    r"(?P<hour>\d{1,2}) ?: ?(?P<minute>[0-5]\d)(?: ?: ?(?P<second>[0-5]\d))?"
    r"(?: ?(?P<half>[ap])\.?m\.?| o'clock)?",
    re.ASCII | re.IGNORECASE,
)
_HOUR = re.compile(
    r"(?P<hour>\d{1,2})(?: ?(?P<half>[ap])\.?m\.?| o'clock)", re.ASCII | re.IGNORECASE
)
_RATIO = re.compile(r"[^:]{1,40}(?: ?(?::|\\colon| to ) ?[^:]{1,40}){1,4}")
_BETWEEN = re.compile(r" ?(?::|\\colon(?![a-z])| to ) ?")
_FRACTION = re.compile(r"-?(?:\\frac.*|[\d,.]+ ?/ ?[\d,.]+)", re.ASCII)

Time = tuple[int, int, bool]  # minutes and seconds of a day; whether the half of the day is known


def compare_colons(answer: str, gold: str) -> bool | None:
    """Whether two texts are the same time or ratio; None if there is neither in them."""
    answer_time = read_time(answer)
    gold_time = read_time(gold)
    if answer_time and gold_time:
        return answer_time == gold_time

    answer_ratio = read_ratio(answer)
    gold_ratio = read_ratio(gold)
    if answer_ratio and gold_ratio:
        return answer_ratio == gold_ratio

    if ":" not in answer + gold:
        return None

    if answer_ratio:
        return _is_fraction(gold, answer_ratio)
    if gold_ratio:
        return _is_fraction(answer, gold_ratio)

    return False if answer_time or gold_time else None


def _is_fraction(text: str, ratio: tuple[int, ...]) -> bool:
    """Whether a text is a ratio of two as a fraction: 3:4 is 3/4, but 3:1 is not 3."""
    number = read_number(text)
    if len(ratio) != 2 or number is None or not _FRACTION.fullmatch(tidy(text)):
        return False

    return number.value == Fraction(*ratio)


def read_time(text: str) -> Time | None:
    r"""A time of day: 3:05, 15:05, 3:05 p.m., 3 p.m. and 5 o'clock."""
    match = _TIME.fullmatch(tidy(text)) or _HOUR.fullmatch(tidy(text))
    if match is None or int(match["hour"]) > 23:
        return None

    parts = match.groupdict()
    hour = int(match["hour"])
    half = (parts["half"] or "").casefold()
    if half and 1 <= hour <= 12:
        hour = hour % 12 + 12 * (half == "p")

    is_known = bool(half) or not 1 <= hour <= 12
    minutes = 60 * hour + int(parts.get("minute") or 0)
    return minutes, int(parts.get("second") or 0), is_known


def is_clock_time(text: str) -> bool:
    """A time with its minutes. Without them, 3 p.m. may be read as a number with a unit."""
    return ":" in text and read_time(text) is not None


def read_ratio(text: str) -> tuple[int, ...] | None:
    """A ratio of plain numbers in lowest terms: 10:15 as 2:3. 10:05 is a time."""
    plain = tidy(text)
    if not _RATIO.fullmatch(plain):
        return None

    parts = _BETWEEN.split(plain)
    numbers = [read_number(part) for part in parts]
    is_time = any(re.match(r"0\d", part) for part in parts[1:])
    values = [number.value for number in numbers if number and not number.unit]
    if is_time or len(values) < len(parts) or not all(values):
        return None

    whole = lcm(*(value.denominator for value in values))
    terms = [int(value * whole) for value in values]
    common = gcd(*terms)
    return tuple(term // common for term in terms)
