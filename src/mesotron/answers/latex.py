r"""One spelling of the text of an answer: characters first, then LaTeX and Markdown.

Compatibility forms, zero-width and bidirectional controls and LaTeX spacing go. Nothing is
evaluated.
"""

import re
import unicodedata

MAX_LENGTH = 512  # characters of an answer that are read

_OTHER_DIGITS = re.compile(r"[^\x00-\x7f\D]")  # decimal digits beyond ASCII
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
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u2208": r"\in ",
        "\u222a": r"\cup ",
        "\u066b": ".",  # Arabic decimal point, separator of thousands and percent sign
        "\u066c": ",",
        "\u066a": "%",
        "\u03c0": r"\pi ",
    }
)

# Not after another backslash, which ends a row of a matrix.
_NO_SPACE = re.compile(r"(?<!\\)\\(?:[,!]|left(?![a-z])|right(?![a-z]))")
_SPACE = re.compile(r"(?<!\\)\\(?:[;: ]|q?quad(?![a-z]))|~")
TEXT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal)?|math(?:rm|bf|it)|mbox|underline|fbox|emph|bm)\s*\{([^{}]*)\}"
)
_FORMULA_AND_TEXT = re.compile(r"^\$([^$]{1,80})\$( [^$]*)$")  # $5$ apples
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def clean(text: str) -> str:
    """Normalize characters: NFKC, no control or invisible ones, single spaces."""
    # First, since NFKC alone would turn 5² into 52 and 1½ into 11/2.
    text = _SUPERSCRIPTS.sub(_as_exponent, text[:MAX_LENGTH])
    text = "".join(map(_separate_fraction, text))

    text = ascii_digits(unicodedata.normalize("NFKC", text)).translate(_SYMBOLS)
    visible = "".join(map(_visible, text))
    return " ".join(visible.split())[:MAX_LENGTH]


def ascii_digits(text: str) -> str:
    """The text with the decimal digits of all scripts, such as Arabic-Indic, as 0 to 9."""
    if text.isascii():
        return text

    return _OTHER_DIGITS.sub(lambda match: str(unicodedata.decimal(match[0])), text)


def _as_exponent(match: re.Match[str]) -> str:
    digits = match[0].translate(_FROM_SUPERSCRIPT)
    return f"^{{{digits}}}"


def _separate_fraction(c: str) -> str:
    """A vulgar fraction such as ½ gets a space before it."""
    is_fraction = unicodedata.decomposition(c).startswith("<fraction>")
    return f" {c}" if is_fraction else c


def _visible(c: str) -> str:
    if c.isspace():
        return " "

    # Cc, Cf, Cs, Co, Cn: controls, zero-width and bidirectional marks, surrogates, unassigned.
    is_hidden = unicodedata.category(c).startswith("C") or "\ufe00" <= c <= "\ufe0f"
    return "" if is_hidden else c


def simplify_latex(text: str) -> str:
    r"""Remove LaTeX and Markdown around an answer, and spell fractions one way."""
    text = text.replace(r"\$", "$").replace(r"\%", "%").replace("{,}", ",").replace(r",\! ", ",")
    text = without_braces(text.removeprefix(r"\boxed") if text.endswith("}") else text)

    text = re.sub(r"\\[dtc]frac", lambda _: r"\frac", text)
    text = _NO_SPACE.sub("", text)
    text = _SPACE.sub(" ", text)
    text = TEXT.sub(r" \1", text)

    text = without_period(text.strip(" *`"))
    for left, right in DELIMITERS:
        is_longer = len(text) > len(left + right)
        if is_longer and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)]

    text = _FORMULA_AND_TEXT.sub(r"\1\2", text)
    return without_braces(" ".join(without_period(text).split()))


def without_period(text: str) -> str:
    """The text without the end of its sentence. Dots go on: 0.33... is not 0.33."""
    return text if text.endswith("..") else text.removesuffix(".")


def without_braces(text: str) -> str:
    """The text without the braces around all of it: {{7}} is 7."""
    while text.startswith("{") and closing_place(text) == len(text) - 1:
        text = text[1:-1].strip()

    return text


def closing_place(text: str) -> int | None:
    """Where the bracket that opens a text closes; None if it does not."""
    pairs = {"{": "}", "(": ")", "[": "]"}
    left = text[0]
    depth = 0
    for place, c in enumerate(text):
        is_escaped = text[place - 1 : place] == "\\"
        if c == left and not is_escaped:
            depth += 1
        elif c == pairs[left] and not is_escaped:
            depth -= 1

        if depth == 0:
            return place

    return None
