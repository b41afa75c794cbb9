r"""Plain numbers in answers, read exactly: 1,080, \$18.00, 50\%, 1 1/2, \frac{3}{4}, 2.5e3, 5 cm.

Text is normalized first (`latex`), then matched by bounded patterns and turned into a `Fraction`.
Nothing is evaluated.
"""

import re
import tomllib
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from mesotron.answers.latex import MAX_LENGTH, clean, simplify_latex

_MAX_DIGITS = 100  # of one number; more is not a plain answer

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
_UNIT = re.compile(
    r"(?P<core>.*?[\d.}%])(?:"
    r" (?P<word>[a-z]{2,24}\.?(?:[ /][a-z]{1,24}\.?){0,3})"
    r"|(?P<short>cm|mm|km|kg|mg|ml|ft|lbs?|oz|mph|hrs?|mins?|secs?|am|pm|st|nd|rd|th)"
    r"| ?(?P<letter>[ap]\.m\.?|(?-i:[mshgt])$))(?: ?\^ ?\{?(?P<power>[23])\}?)?",
    re.ASCII | re.IGNORECASE,
)
_BASE = re.compile(rf"({_DIGITS})_ ?\{{? ?(\d{{1,2}}) ?\}}?", re.ASCII)
_AMOUNT = re.compile(r"([^$]*[\d.}]) ?[$€£¥]")  # the sign may stand behind: 12€, 12$
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
}
_POWERS = {"square": "2", "cubic": "3"}
_UNITS = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))
_SPELLINGS = _UNITS["spellings"]
_LETTER_UNITS = _UNITS["letters"]
_TEXT_LETTER = re.compile(
    r"(?<=[\d}])((?: |~|\\[,;! ])*\\(?:text(?:rm|normal)?|mathrm|mbox) ?\{[ ~]*)"
    r"([mshgLNJWVK])(?=[ }/])",
    re.ASCII,
)
_DEGREES = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree|°)$")
# What stands before the last = of "x = 5" or "48 + 24 = 72".
_BEFORE = re.compile(r"(?:[A-Za-z] ?=|(?:[\d .,+*/()$%-]|\\times|\\cdot|\\div)*=)+ ?", re.ASCII)
_SIGNS = re.compile(r"([-+]?) ?[$€£¥]? ?([-+]?) ?")  # also with an amount's sign; matches anything


@dataclass(frozen=True)
class Number:
    """A plain number: its exact value as written, whether it had a % sign, and its unit."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    @property
    def key(self) -> str:
        return str(self.value)


@lru_cache(maxsize=16_384)
def read_number(answer: str) -> Number | None:
    """A plain number, exactly, or None if the text is anything else."""
    if len(answer) > MAX_LENGTH:
        return None

    core, unit = _split_unit(_right_side(answer))
    percent = core.endswith("%") or unit == "percent"
    core = core.removesuffix("%").rstrip()

    signs = _SIGNS.match(core)
    assert signs is not None  # every part is optional
    sign = signs[1] + signs[2]
    if len(sign) > 1:
        return None

    value = _read_value(core[signs.end() :])
    if value is None:
        return None

    if sign == "-":
        value = -value

    if unit in _SCALES:
        return Number(value * _SCALES[unit], percent)

    return Number(value, percent, "" if unit == "percent" else unit)


def _right_side(answer: str) -> str:
    """The simplified text behind the last = of an answer, without degrees."""
    text = _TEXT_LETTER.sub(lambda m: f"{m[1]}{_LETTER_UNITS[m[2]]}", clean(answer))
    text = _DEGREES.sub("", simplify_latex(text))
    before = _BEFORE.match(text)
    return text[before.end() :] if before else text


def same_number(answer: Number, gold: Number) -> bool:
    """Whether two plain numbers are equal, exactly. A unit that only one of them has is ignored.
    50% equals 50 and 1/2 if the other one has no % sign."""
    return not other_unit(answer, gold) and gold.value in _on_scale_of(gold, answer)


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
    return bool(answer.unit and gold.unit) and answer.unit != gold.unit


def _split_unit(text: str) -> tuple[str, str]:
    """A number's text, and its unit in one spelling."""
    match = _UNIT.fullmatch(text)
    if match is not None:
        return match["core"].rstrip(), _spell_unit(match)

    base = _BASE.fullmatch(text)
    if base:  # the base is a unit: 12_8 is not 12_9
        return base[1], f"base {base[2]}"

    amount = _AMOUNT.fullmatch(text)
    return (amount[1], "") if amount else (text, "")


def _spell_unit(match: re.Match[str]) -> str:
    """Such as foot^2 for square feet."""
    named = (match["word"] or match["short"] or match["letter"]).casefold()
    words = [_spell(word) for word in re.split("([ /])", named)]
    power = match["power"] or _POWERS.get(words[0], "")
    unit = "".join(words).removeprefix("square ").removeprefix("cubic ")

    return f"{unit}^{power}" if power else unit


def _spell(word: str) -> str:
    word = word.removesuffix(".")
    if len(word) > 2:
        word = word.removesuffix("s")

    return _SPELLINGS.get(word, _LETTER_UNITS.get(word, word))


def _read_value(core: str) -> Fraction | None:
    if _PLAIN.fullmatch(core):
        return _fraction(core)

    scientific = _SCIENTIFIC.fullmatch(core)
    if scientific:
        return _fraction(scientific["mantissa"]) * Fraction(10) ** int(scientific["exponent"])

    fraction = _FRACTION.fullmatch(core)
    if fraction:
        return _read_fraction(fraction)

    repeating = _REPEATING.fullmatch(core)
    return _read_repeating(repeating) if repeating else None


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
