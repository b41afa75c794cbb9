r"""Pairs of an answer and a gold with the verdict of a careful person, from a grammar of numbers.

Each pair is made from a value and a way to write it, so the verdict follows from the values, not
from the code that is tested: numbers in words come from a speller of their own.
"""

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = "- ten twenty thirty forty fifty sixty seventy eighty ninety"
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
NOUNS = (
    "people",
    "dollars",
    "km",
    "apples",
    "square feet",
    "years",
    "widgets",
    "meters per second",
)
PARTS = {"thirds": 3, "quarters": 4, "fifths": 5, "sixths": 6, "eighths": 8, "tenths": 10}
ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
PERSIAN = str.maketrans("0123456789", "۰۱۲۳۴۵۶۷۸۹")
FULLWIDTH = str.maketrans("0123456789", "０１２３４５６７８９")


class Pair(NamedTuple):
    kind: str
    answer: str
    gold: str
    strict: bool  # \boxed{answer}
    lenient: bool  # The answer is `answer`.


def spell(n: int, joint: str = " ", hyphen: str = "-") -> str:
    """A whole number below 10^15 in English words; `joint` stands behind "hundred"."""
    for scale in ("trillion", "billion", "million", "thousand"):
        if n >= SCALES[scale]:
            whole, rest = divmod(n, SCALES[scale])
            head = f"{spell(whole, joint, hyphen)} {scale}"
            return f"{head} {spell(rest, joint, hyphen)}" if rest else head

    if n >= 100:
        hundreds, rest = divmod(n, 100)
        head = f"{spell(hundreds)} hundred"
        return f"{head}{joint}{spell(rest, joint, hyphen)}" if rest else head

    if n >= 20:
        tens, rest = divmod(n, 10)
        head = TENS.split()[tens]
        return f"{head}{hyphen}{spell(rest)}" if rest else head

    return SMALL.split()[n]


def make_pairs(seed: int = 0, rounds: int = 6) -> list[Pair]:
    """Distinct pairs of all kinds."""
    rng = random.Random(f"pairs {seed}")
    pairs: dict[tuple[str, str], Pair] = {}
    for _ in range(rounds):
        for make in KINDS:
            for answer, gold, right, *lenient in make(rng):
                kind = make.__name__.replace("_", " ")
                pair = Pair(kind, answer, gold, right, lenient[0] if lenient else right)
                pairs.setdefault((answer, gold), pair)

    return list(pairs.values())


Made = Iterator[tuple]  # answer, gold, whether it is right, and whether leniently if that differs


def digits(value: Fraction | int) -> str:
    """A value in LaTeX."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)

    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def whole_numbers_in_words(rng: random.Random) -> Made:
    n = rng.choice([rng.randint(2, 99), rng.randint(100, 999), rng.randint(1000, 10**9)])
    hyphen = rng.choice(["-", " "])
    text = spell(n, rng.choice([" ", " and "]), hyphen)
    yield text, str(n), True
    yield text.capitalize(), f"{n:,}", True
    yield f"{text} {rng.choice(NOUNS)}", str(n), True
    yield text, str(n + 1), False
    yield text, str(n * 10), False
    yield str(n), text, True
    yield f"{spell(n % 9 + 1)} {spell(n % 7 + 1)}", str(n % 9 + n % 7 + 2), False


def scales_before_a_noun(rng: random.Random) -> Made:
    for scale, factor in SCALES.items():
        n = rng.randint(2, 12)
        noun = rng.choice(NOUNS)
        yield f"{n} {scale} {noun}", str(n * factor), True
        yield f"{n} {scale} {noun}", str(n), False
        yield f"{n} {scale}", f"{n * factor * 10}", False
        yield f"{n}.5 {scale}", digits(Fraction(2 * n + 1, 2) * factor), True
        yield f"{n}.5 {scale} {noun}", f"{n}.5", False
        yield rf"{n}\text{{ {scale} }}", f"{n * factor:,}", True


def several_scales(rng: random.Random) -> Made:
    n = rng.randint(2, 9)
    rest = rng.randint(11, 99)
    yield f"{n} hundred {spell(rest)}", str(100 * n + rest), True
    yield f"{n} hundred {spell(rest)}", str(n), False
    yield f"{n} hundred {spell(rest)}", str(100 * n), False
    yield f"{n} thousand {rest}", str(1000 * n + rest), True
    yield f"{n} hundred thousand", str(100_000 * n), True
    yield f"{n} hundred thousand", str(100 * n), False
    yield f"{n} million {rest} thousand", str(10**6 * n + 1000 * rest), True
    yield f"{n} thousand million {rest} hundred", str(n), False


def mixed_numbers(rng: random.Random) -> Made:
    n = rng.randint(1, 30)
    parts, below = rng.choice(list(PARTS.items()))
    above = rng.randint(2, below - 1)
    written = rng.choice([str(n), spell(n)])
    noun = rng.choice(["hours", "cups", "miles"])
    yield f"{written} and a half", digits(n + Fraction(1, 2)), True
    yield f"{written} and a half {noun}", f"{n}.5", True
    yield f"{written} and a half", str(n), False
    yield f"{written} and {spell(above)} {parts}", digits(n + Fraction(above, below)), True
    yield f"{written} and {spell(above)} {parts}", str(n), False
    yield f"{n} and {above}/{below}", digits(n + Fraction(above, below)), True
    yield f"{n} {above}/{below}", digits(n + Fraction(above, below)), True
    yield f"{written} and a half million", str(n * 10**6 + 500_000), True


def fractions_in_words(rng: random.Random) -> Made:
    parts, below = rng.choice(list(PARTS.items()))
    above = rng.randint(2, 9)
    written = rng.choice([str(above), spell(above)])
    yield f"{written} {parts}", digits(Fraction(above, below)), True
    yield f"{written} {parts}", str(above), False
    yield f"{spell(above)}-{parts}", digits(Fraction(above, below)), True
    yield f"a {parts[:-1]}", digits(Fraction(1, below)), True
    yield f"one {parts[:-1]}", f"1/{below}", True
    yield "half", "0.5", True
    yield f"half a {rng.choice(['million', 'dozen'])}", "1/2", False


def alternatives(rng: random.Random) -> Made:
    a, b = rng.sample(range(2, 13), 2)
    for word in ("or", "and", "to", "through", "versus"):
        written = rng.choice([str(b), spell(b)])
        yield f"{a} {word} {written}", str(a), False
        yield f"{a} {word} {written}", str(b), False

    yield f"{a} or so", str(a + 1), False
    yield f"{a} apples and {spell(b)} pears", str(a), False
    yield f"between {a} and {b}", str(b), False
    yield f"{a}, {b}", str(a), False
    yield f"{a}; {b}", str(b), False
    yield f"{a}-{b}", str(a), False


def operators_in_words(rng: random.Random) -> Made:
    a, b = rng.sample(range(2, 13), 2)
    for word, value in (("plus", a + b), ("minus", a - b), ("times", a * b)):
        yield f"{a} {word} {spell(b)}", str(a), False
        yield f"{a} {word} {spell(b)}", str(value), False

    yield f"{a} squared", str(a), False
    yield f"{a} cubed", str(a), False
    yield f"{a} divided by {spell(b)}", str(a), False
    yield f"{a} over {spell(b)}", str(a), False
    yield f"{a} to the power of {spell(b)}", str(a), False
    yield f"{a} times x", str(a), False
    yield f"{a} pi", str(a), False
    yield f"{a} pi", rf"{a}\pi", True


def times_and_ratios(rng: random.Random) -> Made:
    hour = rng.randint(1, 11)
    minute = rng.randint(0, 59)
    time = f"{hour}:{minute:02d}"
    yield time, str(hour), False
    yield f"{hour}:0{minute % 9 + 1}", digits(Fraction(hour, minute % 9 + 1)), False
    yield time, f"{hour}:{(minute + 1) % 60:02d}", False
    yield f"{time} p.m.", f"{time} PM", True
    yield f"{time} p.m.", rf"{time}\text{{ a.m.}}", False
    yield f"{hour} p.m.", f"{hour}:00 PM", True
    yield f"{hour + 12}:{minute:02d}", f"{time} pm", True

    a = rng.randint(2, 8)
    b = a + 1
    yield f"{a}:{b}", f"{3 * a}:{3 * b}", True
    yield f"{a} : {b}", f"{a} to {b}", True
    yield f"{a}:{b}", f"{b}:{a}", False
    yield f"{a}:{b}", digits(Fraction(a, b)), True
    yield f"{a}:1", str(a), False


def brackets_and_signs(rng: random.Random) -> Made:
    n = rng.randint(2, 99)
    yield f"{{{n}}}", str(n), True
    yield f"{{{{{n}}}}}", str(n), True
    yield f"(-{n})", f"-{n}", True
    yield f"(-{n})", str(n), False
    yield f"({n})", str(n), True
    for sign in ("-", "−", "–", "minus ", "negative "):
        yield f"{sign}{n}", f"-{n}", True
        yield f"{sign}{n}", str(n), False

    yield f"minus {spell(n)}", f"-{n}", True
    yield rf"\pm {n}", str(n), False
    yield f"--{n}", str(n), False


def intervals(rng: random.Random) -> Made:
    low = rng.randint(-9, 5)
    high = low + rng.randint(2, 9)
    for left, right in ((r"\le", "<"), ("<", r"\leq"), ("<", "<"), (r"\le", r"\le")):
        gold = f"{'(' if left == '<' else '['}{low},{high}{')' if right == '<' else ']'}"
        other = f"{'[' if left == '<' else '('}{low},{high}{')' if right == '<' else ']'}"
        yield f"{low} {left} x {right} {high}", gold, True
        yield f"{low} {left} x {right} {high}", other, False
        yield f"{low} {left} x {right} {high + 1}", gold, False

    yield f"{low}<x<{high}", f"({low}, {high})", True
    yield f"x > {low}", rf"({low}, \infty)", True
    yield f"x > {low}", rf"[{low}, \infty)", False
    yield rf"x \ge {low}", rf"[{low},\infty)", True
    yield f"x ≥ {low}", rf"\left[{low}, \infty\right)", True
    yield rf"[{low},\infty)", rf"x \ge {low}", True
    yield rf"{low} \le x", rf"x \ge {low}", True
    yield rf"x \le {low}", rf"x \ge {low}", False
    yield rf"x < {low} \text{{ or }} x > {high}", rf"(-\infty,{low})\cup({high},\infty)", True
    yield rf"x < {low} \text{{ or }} x > {high}", f"({low},{high})", False


def abbreviations(rng: random.Random) -> Made:
    n = rng.randint(2, 99)
    yield f"{n}k", str(n * 1000), True
    yield f"{n}K", f"{n},000", True
    yield f"{n}k", str(n), False
    yield f"${n}k", rf"\${n * 1000}", True
    yield f"${n}.5M", str(n * 10**6 + 500_000), True
    yield f"${n}M", str(n), False
    yield f"{n}x", str(n), False
    yield f"{n}k", f"{n}x", False


def digits_of_other_scripts(rng: random.Random) -> Made:
    n = rng.randint(10, 99_999)
    for script in (ARABIC, PERSIAN, FULLWIDTH):
        yield str(n).translate(script), str(n), True
        yield str(n + 1).translate(script), str(n), False

    yield f"{n}٫5".translate(ARABIC), f"{n}.5", True
    yield f"{n}½", digits(n + Fraction(1, 2)), True
    yield f"{n}²", str(n), False


UNITS = (
    ("cm", "centimeters", "mm"),
    ("km", "kilometers", "m"),
    ("kg", "kilograms", "g"),
    ("ft", "feet", "inches"),
    ("hr", "hours", "minutes"),
    ("mph", "miles per hour", "km/h"),
    ("m^2", "square meters", "meters"),
    ("sq. ft", "square feet", "ft"),
    ("cm^3", "cubic centimeters", "square centimeters"),
    ("lbs", "pounds", "ounces"),
)


def units(rng: random.Random) -> Made:
    n = rng.randint(2, 500)
    for short, long, other in rng.sample(UNITS, 4):
        yield f"{n} {short}", f"{n} {long}", True
        yield f"{n} {long}", str(n), True
        yield f"{n} {short}", f"{n} {other}", False
        yield f"{n + 1} {short}", f"{n} {long}", False
        yield rf"{n}\text{{ {long}}}", f"{n} {short}", True
        yield rf"{n}\pi \text{{ {long}}}", rf"{n}\pi", True
        yield rf"{n}\pi \text{{ {long}}}", rf"{n}\pi \text{{ {other}}}", False

    yield f"{n}°", f"{n} degrees", True
    yield f"{n}°", f"{n} radians", False
    yield f"{n} feet six inches", str(n), False
    yield rf"\sqrt{{{n}}} million", rf"\sqrt{{{n}}}", False
    yield rf"\sqrt{{{n}}} and a half", rf"\sqrt{{{n}}}", False


def money(rng: random.Random) -> Made:
    n = rng.randint(2, 500)
    yield f"${n}", str(n), True
    yield rf"\${n}.00", f"{n} dollars", True
    yield f"USD {n}", f"${n}", True
    yield f"€{n}", f"{n} euros", True
    yield f"€{n}", f"${n}", False
    yield f"{n} cents", f"${n}", False
    yield f"£{n}", f"{n} pounds", True
    yield f"-${n}", f"-{n}", True
    yield f"${n} million", f"${n}", False
    yield f"${n} each", f"${n}", True
    yield f"${n:,}.50", f"{n}.5", True


def percent(rng: random.Random) -> Made:
    n = rng.randint(2, 99)
    for text in (f"{n}%", rf"{n}\%", f"{n} percent", f"{n} per cent", f"{n}% chance"):
        yield text, str(n), True
        yield text, digits(Fraction(n, 100)), True
        yield text, f"{n}0", False

    yield f"{spell(n)} percent", f"{n}%", True
    yield f"{n}%", f"{n}0%", False


def dates_and_places(rng: random.Random) -> Made:
    n = rng.randint(2, 28)
    month = rng.choice(["January", "May", "August"])
    yield f"{n} {month}", str(n), False
    yield f"{n} {month}", f"{n} {month}", True
    yield f"{month} {n}", str(n), False
    yield f"2024-05-{n:02d}", str(2024 - 5 - n), False
    yield f"2024-05-{n:02d}", f"2024-05-{n:02d}", True
    yield f"{n}th", str(n), True
    yield f"{n}^{{\\text{{th}}}}", str(n), True
    yield f"{n}.{n}.{n}", f"{n}.{n}", False


def variables(rng: random.Random) -> Made:
    n = rng.randint(2, 99)
    yield f"x = {n}", str(n), True
    yield f"x = {n}", f"x={n}", True
    yield f"y = {n}", f"x = {n}", False
    yield f"x = {n}", str(n + 1), False
    yield f"{n} = {n + 1}", str(n), False
    yield f"x = {n} or x = {n + 1}", str(n), False


def words_before(rng: random.Random) -> Made:
    """A sentence may say more than a box."""
    n = rng.randint(2, 99)
    yield f"equal to {n}", str(n), False, True
    yield f"exactly {n} apples", str(n), False, True
    yield f"{n} because that is all", str(n), False, True
    yield f"{n}, which is prime", str(n), False, True
    yield f"clearly {spell(n)}", str(n), False, True


KINDS = (
    whole_numbers_in_words,
    scales_before_a_noun,
    several_scales,
    mixed_numbers,
    fractions_in_words,
    alternatives,
    operators_in_words,
    times_and_ratios,
    brackets_and_signs,
    intervals,
    abbreviations,
    digits_of_other_scripts,
    units,
    money,
    percent,
    dates_and_places,
    variables,
    words_before,
)
