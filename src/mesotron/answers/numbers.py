r"""Plain numbers in answers, read exactly: 1,080, \$18.00, 50\%, 1 1/2, \frac{3}{4}, 2.5e3, 5 cm.

Text is normalized first (compatibility forms, zero-width and bidirectional controls, LaTeX
spacing), then matched by bounded patterns and turned into a `Fraction`. Nothing is evaluated.
"""

import re
import tomllib
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

MAX_LENGTH = 512  # characters of an answer that are read
_MAX_DIGITS = 100  # of one number; more is not a plain answer

_SUPERSCRIPTS = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_FROM_SUPERSCRIPT = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_SYMBOLS = str.maketrans(
    {
        "\u2044": "/",
        "\u2215": "/",
        "\u2212": "-",
        "\u2013": "-",
        "\u2014": "-",
        "\u2010": "-",
        "\u00d7": r"\times ",
        "\u22c5": r"\cdot ",
        "\u00b7": r"\cdot ",
        "\u00f7": "/",
        "\u221e": r"\infty ",
        "\u03c0": r"\pi ",
    }
)


@dataclass(frozen=True)
class Number:
    """A plain number: its exact value as written, whether it had a % sign, and its unit."""

    value: Fraction
    percent: bool = False
    unit: str = ""

    @property
    def key(self) -> str:
        return str(self.value)


def clean(text: str) -> str:
    """Normalize text: NFKC, no control or invisible characters, single spaces. Superscripts and
    vulgar fractions are expanded first: NFKC alone would turn 5² into 52 and 1½ into 11/2."""
    text = _SUPERSCRIPTS.sub(
        lambda m: "^{" + m[0].translate(_FROM_SUPERSCRIPT) + "}", text[:MAX_LENGTH]
    )
    text = "".join(
        " " + c if unicodedata.decomposition(c).startswith("<fraction>") else c for c in text
    )
    text = unicodedata.normalize("NFKC", text).translate(_SYMBOLS)

    return " ".join("".join(map(_visible, text)).split())[:MAX_LENGTH]


def _visible(c: str) -> str:
    if c.isspace():
        return " "
    # Cc, Cf, Cs, Co, Cn: controls, zero-width and bidirectional marks, surrogates, unassigned.
    hidden = unicodedata.category(c).startswith("C") or "\ufe00" <= c <= "\ufe0f"
    return "" if hidden else c


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
_UNITS = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))
_SPELLINGS = _UNITS["spellings"]
_LETTER_UNITS = _UNITS["letters"]
_TEXT_LETTER = re.compile(
    r"(?<=[\d}])((?: |~|\\[,;! ])*\\(?:text(?:rm|normal)?|mathrm|mbox) ?\{[ ~]*)"
    r"([mshgLNJWVK])(?=[ }/])",
    re.ASCII,
)
# Not after another backslash, which ends a row of a matrix.
_NO_SPACE = re.compile(r"(?<!\\)\\(?:[,!]|left(?![a-z])|right(?![a-z]))")
_SPACE = re.compile(r"(?<!\\)\\(?:[;: ]|q?quad(?![a-z]))|~")
_TEXT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal)?|math(?:rm|bf|it)|mbox|underline|fbox|emph|bm)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree|°)$")
# What stands before the last = of "x = 5" or "48 + 24 = 72".
_BEFORE = re.compile(r"(?:[A-Za-z] ?=|(?:[\d .,+*/()$%-]|\\times|\\cdot|\\div)*=)+ ?", re.ASCII)


def simplify_latex(text: str) -> str:
    r"""Remove LaTeX and Markdown around an answer, and spell fractions one way."""
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace("{,}", ",").replace(r",\! ", ",")
    if text.startswith(r"\boxed{") and text.endswith("}"):
        text = text[len(r"\boxed{") : -1]

    text = re.sub(r"\\[dtc]frac", lambda _: r"\frac", text)
    text = _TEXT.sub(r" \1", _SPACE.sub(" ", _NO_SPACE.sub("", text)))

    text = text.strip(" *`").removesuffix(".")
    for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)]

    return " ".join(text.removesuffix(".").split())


@lru_cache(maxsize=16_384)
def read_number(answer: str) -> Number | None:
    """A plain number, exactly, or None if the text is anything else."""
    if len(answer) > MAX_LENGTH:
        return None

    text = _TEXT_LETTER.sub(lambda m: f"{m[1]}{_LETTER_UNITS[m[2]]}", clean(answer))
    text = _DEGREES.sub("", simplify_latex(text))
    text = text[before.end() :] if (before := _BEFORE.match(text)) else text
    core, unit = _split_unit(text)
    percent = core.endswith("%") or unit == "percent"
    core = core.removesuffix("%").rstrip()
    match = re.match(r"([-+]?) ?[$€£¥]? ?([-+]?) ?", core)

    assert match is not None  # every part is optional
    signs = match[1] + match[2]
    value = _value(core[match.end() :]) if len(signs) < 2 else None
    if value is None:
        return None

    value *= _SCALES.get(unit, 1)
    named = "" if unit in _SCALES or unit == "percent" else unit

    return Number(-value if signs == "-" else value, percent, named)


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
    return answer.value, answer.value * 100 if gold.percent else answer.value / 100


def other_unit(answer: Number, gold: Number) -> bool:
    return bool(answer.unit and gold.unit) and answer.unit != gold.unit


def _split_unit(text: str) -> tuple[str, str]:
    match = _UNIT.fullmatch(text)
    if match is None:
        if base := _BASE.fullmatch(text):  # the base is a unit: 12_8 is not 12_9
            return base[1], f"base {base[2]}"
        amount = _AMOUNT.fullmatch(text)
        return (amount[1], "") if amount else (text, "")

    named = (match["word"] or match["short"] or match["letter"]).casefold()
    words = [_spell(word) for word in re.split("([ /])", named)]
    power = match["power"] or {"square": "2", "cubic": "3"}.get(words[0], "")
    unit = "".join(words).removeprefix("square ").removeprefix("cubic ")

    return match["core"].rstrip(), f"{unit}^{power}" if power else unit


def _spell(word: str) -> str:
    word = word.removesuffix(".")
    word = word.removesuffix("s") if len(word) > 2 else word
    return _SPELLINGS.get(word, _LETTER_UNITS.get(word, word))


def _value(core: str) -> Fraction | None:
    if _PLAIN.fullmatch(core):
        return _fraction(core)
    if match := _SCIENTIFIC.fullmatch(core):
        return _fraction(match["mantissa"]) * Fraction(10) ** int(match["exponent"])

    if match := _FRACTION.fullmatch(core):
        above = _fraction(match["above"] or match["top"])
        below = _fraction(match["below"] or match["bottom"])
        whole = _fraction(match["whole"] or "0")

        # -1 3/4 has its sign in front; a sign inside a mixed number is not read.
        if below and not (match["whole"] and (above < 0 or below < 0)):
            return whole + above / below

    if match := _REPEATING.fullmatch(core):
        # 0.1\overline{6}: 16 - 1 over 90.
        whole = match["whole"] or "0"
        once = match["once"]
        again = match["again"]
        above = int(whole + once + again) - int(whole + once)
        return Fraction(above, 10 ** len(once) * (10 ** len(again) - 1))

    return None


def _fraction(digits: str) -> Fraction:
    text = digits.strip("{} ").replace(",", "")
    return Fraction(text.removesuffix(".")) if text.strip(".") else Fraction(0)
