"""Units of numbers: "apples", "square feet", "cm^2", "miles per hour", "dollars each".

What follows a number is a unit only if it can name what is counted. Number words, operators and
alternatives ("5 or six", "5 plus two", "5 below zero") make the text something else.
"""

import re
import tomllib
from pathlib import Path

from mesotron.answers.number_words import NUMBER_WORDS

MAX_WORDS = 8

_TABLE = tomllib.loads(Path(__file__).with_name("units.toml").read_text(encoding="utf-8"))
_SPELLINGS = _TABLE["spellings"]
_SINGULARS = _TABLE["singulars"]
_TEXT_LETTERS = _TABLE["letters"]
_WORDS = {name: frozenset(words) for name, words in _TABLE["words"].items()}
_NOT_UNITS = _WORDS["not_units"] | NUMBER_WORDS

BARE_LETTERS = frozenset("mshgt")  # units without \text, too: those that math-verify drops
_POWERS_BEFORE = {"square": "^2", "cubic": "^3"}
_POWERS_BEHIND = {"squared": "^2", "cubed": "^3"}

_TOKEN = re.compile(r"[A-Za-z][A-Za-z']{0,23}(?:\^[23])?", re.ASCII)
_EXPONENT = re.compile(r" ?\^ ?\{? ?([23]) ?\}?", re.ASCII)
_IN_BRACKETS = re.compile(r" ?\(([A-Za-z][A-Za-z ./-]{1,40})\)", re.ASCII)
_TEXT_LETTER = re.compile(
    r"(?<=[\w})])((?: |~|\\[,;! ])*\\(?:text(?:rm|normal)?|mathrm|mbox) ?\{[ ~]*)"
    r"([mshgLNJWVK])(?=[ }/])",
    re.ASCII,
)
_LARGE_NUMBER = re.compile(r"[a-z]+(?:illi|illo|illia)(?:on|ons|onen|nes|rd|rds|rden)", re.I)
# Where the case of a letter is a factor: 5 MW is not 5 mW, and 5 Mb is not 5 MB.
_MEGA = re.compile(r"M(m|g|A|W|J|V|N|Hz|Pa|eV)", re.ASCII)
_BITS = re.compile(r"([kKMGT])b(ps)?", re.ASCII)
# Where a unit may begin after an expression: 25\pi square inches.
_AFTER_EXPRESSION = re.compile(r"(?<=[\w})\]]) (?=[A-Za-z][A-Za-z ./^{}23'-]*$)", re.ASCII)


def spell_text_letters(latex: str) -> str:
    r"""5\text{ m} as 5\text{ meter}: in text a letter is a unit, in mathematics a variable."""
    return _TEXT_LETTER.sub(lambda match: f"{match[1]}{_TEXT_LETTERS[match[2]]}", latex)


def read_unit(text: str) -> str | None:
    """What follows a number as a unit in one spelling; "" for nothing, None for anything else.

    >>> read_unit(" sq. ft"), read_unit(" meters/s"), read_unit("cm"), read_unit(" or six")
    ('foot^2', 'meter per second', 'centimeter', None)
    """
    in_brackets = _IN_BRACKETS.fullmatch(text)
    if in_brackets:
        text = f" {in_brackets[1]}"

    words = _split(text)
    if not words:
        return None if text else ""

    is_glued = text[0].isalpha()
    if is_glued and words[0].partition("^")[0] not in _WORDS["glued"] | BARE_LETTERS:
        return None

    if not _names_a_thing(words):
        return None

    return " ".join(_canonical(list(map(_fold, words))))


def split_unit(expression: str) -> tuple[str, str]:
    """An expression and the unit behind it, "" for none."""
    for match in _AFTER_EXPRESSION.finditer(expression):
        unit = read_unit(expression[match.start() :])
        is_letter = re.match(r"[A-Za-z](?![A-Za-z])", expression[match.end() :])
        if unit is not None and not is_letter:
            return expression[: match.start()], unit

    return expression, ""


def same_unit(first: str, second: str) -> bool:
    """Whether two units are the same, up to words such as "each", "more" and "in total".

    >>> same_unit("dollar each", "dollar"), same_unit("meter", "meter^2")
    (True, False)
    """
    if first == second:
        return True

    a = first.split()
    b = second.split()
    temperatures = _WORDS["temperatures"]
    is_degree = "degree" in (first, second) and not temperatures.isdisjoint((first, second))

    return is_degree or _without_extras(a) == b or _without_extras(b) == a


def _without_extras(words: list[str]) -> list[str]:
    return [word for word in words if word not in _WORDS["extras"]]


def _split(text: str) -> list[str]:
    """The words of a unit with their exponents; none if there is anything else in it."""
    text = re.sub(r"(?i)\b([ap])\.m\b\.?", r"\1m", _EXPONENT.sub(r"^\1 ", text))
    text = text.replace("/", " per ").replace("-", " ")
    words = re.sub(r"\.(?= |$)", "", text).split()
    if len(words) > MAX_WORDS or not all(map(_TOKEN.fullmatch, words)):
        return []

    return words


def _fold(word: str) -> str:
    """A word in lower case, which keeps prefixes and bits apart."""
    if _MEGA.fullmatch(word):
        return f"mega{word[1:].casefold()}"
    if _BITS.fullmatch(word):
        return f"{word[0].casefold()}bit{word[2:]}"

    return word.casefold()


def _names_a_thing(words: list[str]) -> bool:
    names = [word.partition("^")[0] for word in words]
    if names in (["per"], ["a"]) or names[0] in _POWERS_BEHIND:
        return False

    if names[-1].casefold() in _WORDS["not_last"]:
        return False

    for name in names:
        if name.casefold() in _NOT_UNITS or _LARGE_NUMBER.fullmatch(name):
            return False

    return all(_is_word_or_unit(names, place) for place in range(len(names)))


def _is_word_or_unit(names: list[str], place: int) -> bool:
    """A letter is a unit after the number and after "per": 5 m, 5 m/s. 5/x and 5 times x are
    algebra. In "a day" it is a word."""
    name = names[place]
    if len(name) > 1 or name == "a":
        return True

    if place == 0:
        return name in BARE_LETTERS

    return place > 1 and names[place - 1] == "per"


def _canonical(words: list[str]) -> list[str]:
    words = _name_of(words)
    spelled: list[str] = []
    for word in words:
        name, _, power = word.partition("^")
        is_rate = name in ("a", "an") and bool(spelled)
        spelled += ["per"] if is_rate else _spell(name).split()
        if power:
            spelled[-1] += f"^{power}"

    spelled = _with_powers(spelled)
    if spelled[0:1] == ["degree"] and spelled[1:2] and spelled[1] in _WORDS["temperatures"]:
        spelled = spelled[1:]

    return spelled


def _name_of(words: list[str]) -> list[str]:
    """The words up to "of", "in" and the like: cups of flour, dollars in total."""
    if len(words) > 1 and words[0] in ("a", "an"):  # 5 a day, but half of a day
        words = ["per", *words[1:]]

    while len(words) > 1 and words[0] in ("of", "a", "an", "the"):
        words = words[1:]

    for place, word in enumerate(words):
        is_inch = word == "in" and place == len(words) - 1
        if word in _WORDS["ends"] and not is_inch:
            return words[:place]

    return words


def _with_powers(words: list[str]) -> list[str]:
    """Square feet and feet squared as foot^2."""
    combined: list[str] = []
    prefix = ""
    for word in words:
        if word in _POWERS_BEHIND:
            combined[-1] += _POWERS_BEHIND[word]
        elif word in _POWERS_BEFORE:
            prefix = _POWERS_BEFORE[word]
        else:
            combined.append(word + prefix)
            prefix = ""

    return combined


def _spell(word: str) -> str:
    """One spelling of a word: singular, and not abbreviated."""
    if word in _SPELLINGS:
        return _SPELLINGS[word]

    singular = _singular(word)
    return _SPELLINGS.get(singular, _TEXT_LETTERS.get(singular, singular))


def _singular(word: str) -> str:
    """A common stem of singular and plural, such as "cooky" and "hous"."""
    if word in _SINGULARS:
        return _SINGULARS[word]

    stem = word
    if len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        stem = word[:-1]

    if stem.endswith(("xe", "che", "she", "se", "ze")) and len(stem) > 3:
        return stem[:-1]

    return f"{stem[:-2]}y" if stem.endswith("ie") and len(stem) > 3 else stem
