r"""How often the strict and the lenient reader are right about answers to mathematics.

    python -m benchmarks.answers.run                                    # the generated set alone
    python -m benchmarks.answers.run --golds MATH_test.jsonl            # and real golds
    python -m benchmarks.answers.run --solutions example_model_solutions.jsonl   # labelled GSM8K

The generated set has MATH-style golds of twenty kinds, each with other spellings that are equal
to it and near misses that are not. Real golds come from JSONL files with a column `answer`; each is
also compared with itself after one digit was changed. Labelled solutions are those of
openai/grade-school-math.
"""

import argparse
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._lib.results import write_json
from mesotron.answers.facts import Facts, Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.runs.files import read_rows

OUT = Path(__file__).parent / "result.json"
TEMPLATES = (
    "The final answer is $%s$",
    "The final answer is $%s$. I hope it is correct.",
    "We add them up. Therefore, the answer is: $$%s$$",
    r"So the answer is \(%s\).",
    "**Answer:** %s",
)


@dataclass(frozen=True)
class Case:
    kind: str
    gold: str
    equal: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()


def make_cases(count: int, seed: int) -> list[Case]:
    """`count` draws, the kinds in turn; a gold that came before is left out."""
    rng = random.Random(f"answers {seed}")
    cases: dict[str, Case] = {}
    for k in range(count):
        kind = list(KINDS)[k % len(KINDS)]
        gold, equal, unequal = KINDS[kind](rng)
        cases.setdefault(gold, Case(kind, gold, tuple(equal), tuple(unequal)))

    return list(cases.values())


Made = tuple[str, list[str], list[str]]  # a gold, equal spellings, near misses
Counts = dict[str, int]


def fraction(rng: random.Random) -> Made:
    a = rng.randint(1, 60)
    b = rng.choice([3, 7, 11, 13, 17, 19, 23])
    a += a % b == 0
    sign = rng.choice(["", "-"])

    equal = [
        rf"{sign}\dfrac{{{a}}}{{{b}}}",
        f"{sign}{a}/{b}",
        rf"{sign}\frac{{{2 * a}}}{{{2 * b}}}",
    ]
    return rf"{sign}\frac{{{a}}}{{{b}}}", equal, [f"{sign}{a}", rf"\frac{{{b}}}{{{a}}}", f"{a + b}"]


def decimal(rng: random.Random) -> Made:
    n = rng.randint(1, 999)
    equal = [f"0.{n:03d}", f".{n:03d}0", rf"\frac{{{n}}}{{1000}}"]
    return f".{n:03d}", equal, [str(n), f"0.{n:03d}1", f"{n}.0"]


def thousands(rng: random.Random) -> Made:
    n = rng.randint(1_000, 9_999_999)
    equal = [f"{n:,}", str(n), f"{n:,}".replace(",", r",\!"), f"{n}.00"]
    return f"{n:,}".replace(",", "{,}"), equal, [str(n // 1000), str(n % 1000 + 10**8), str(n + 1)]


def interval(rng: random.Random) -> Made:
    a = rng.randint(-30, 20)
    b = a + rng.randint(1, 20)
    left = rng.choice("([")
    right = rng.choice(")]")
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    equal = [f"{left}{a}, {b}{right}", rf"\left{left} {a}, {b} \right{right}"]
    unequal = [f"{other[left]}{a},{b}{right}", f"{left}{a},{b + 1}{right}", str(a), str(b)]

    return f"{left}{a},{b}{right}", equal, unequal


def union(rng: random.Random) -> Made:
    a = rng.randint(-30, 10)
    b = a + rng.randint(1, 30)
    equal = [rf"\left(-\infty, {a}\right) \cup \left({b}, \infty\right)"]
    unequal = [rf"(-\infty,{b})\cup({b + 1},\infty)", rf"(-\infty,{a}]\cup[{b},\infty)", str(a)]

    return rf"(-\infty,{a})\cup({b},\infty)", equal, unequal


def matrix(rng: random.Random) -> Made:
    a, b, c, d = (rng.randint(-9, 9) for _ in range(4))

    def made(a: int, b: int, c: int, d: int) -> str:
        return rf"\begin{{pmatrix}} {a} & {b} \\ {c} & {d} \end{{pmatrix}}"

    equal = [made(a, b, c, d).replace(" ", "")]
    return made(a, b, c, d), equal, [made(a, b, c, d + 1), made(a + 1, b, c, d), str(a)]


def point(rng: random.Random) -> Made:
    a, b = rng.sample(range(-40, 40), 2)
    equal = [f"({a}, {b})", rf"\left( {a}, {b} \right)"]
    return f"({a},{b})", equal, [f"({b},{a})", f"({a},{b + 1})", str(a), f"{a}, {b}, {a + b}"]


def units(rng: random.Random) -> Made:
    n = rng.randint(1, 500)
    short, long, power = rng.choice(
        [("m", "meters", 2), ("cm", "centimeters", 2), ("ft", "feet", 3), ("m", "meters", 1)]
    )
    sup = f"^{power}" if power > 1 else ""
    word = {1: "", 2: "square ", 3: "cubic "}[power]
    gold = rf"{n}\text{{ {short}}}{sup}"
    equal = [str(n), rf"{n}\text{{ {word}{long}}}", rf"{n}\,\mathrm{{{short}}}{sup}"]
    unequal = [rf"{n + 1}\text{{ {short}}}{sup}", rf"{n}\text{{ kg}}", str(n * 10)]

    return gold, equal, unequal


def text(rng: random.Random) -> Made:
    names = ["Evelyn", "Tuesday", "ellipse", "even", "undefined", "Friday", "hyperbola", "Briana"]
    first, other = rng.sample(names, 2)
    second = rng.choice(["", " and Karl", " or circle", " point"])

    equal = [
        first + second,
        rf"\text{{{(first + second).lower()}}}",
        rf"\textbf{{{first + second}}}",
    ]
    return rf"\text{{{first + second}}}", equal, [rf"\text{{{other}}}", first[::-1], "7"]


def members(rng: random.Random) -> Made:
    a, b, c = rng.sample(range(-30, 60), 3)
    unequal = [rf"\{{{a},{b}\}}", rf"\{{{a},{b},{c + 100}\}}", str(c)]
    return rf"\{{{a},{b},{c}\}}", [rf"\{{{c}, {a}, {b}\}}"], unequal


def degrees(rng: random.Random) -> Made:
    n = rng.randint(1, 359)
    equal = [rf"{n}^{{\circ}}", str(n), rf"{n}\text{{ degrees}}", f"{n}°"]
    return rf"{n}^\circ", equal, [rf"{n + 1}^\circ", str(n * 10), f"{n}0"]


def radical(rng: random.Random) -> Made:
    a = rng.randint(2, 30)
    b = rng.choice([2, 3, 5, 6, 7, 10, 11, 13])
    equal = [rf"{a} \sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"{a}\cdot\sqrt{{{b}}}"]

    return rf"{a}\sqrt{{{b}}}", equal, [str(a), str(b), rf"{a}\sqrt{{{b + 1}}}", f"{a}{b}"]


def percent(rng: random.Random) -> Made:
    n = rng.randint(1, 99)
    return rf"{n}\%", [f"{n}%", str(n), f"{n}.0%"], [f"{n + 1}%", f"{n}0%", f"0.{n:02d}%"]


def base(rng: random.Random) -> Made:
    b = rng.randint(5, 9)
    n = "".join(str(rng.randint(1, b - 1)) for _ in range(rng.randint(3, 5)))
    other = n[:-1] + str((int(n[-1]) + 1) % b)

    return f"{n}_{b}", [f"{n}_{{{b}}}"], [f"{other}_{b}", f"{n}_{b + 1}", str(b)]


def equation(rng: random.Random) -> Made:
    n = rng.randint(-50, 99)
    name = rng.choice("xykn")
    return f"{name}={n}", [f"{name} = {n}", str(n)], [f"{name}={n + 1}", str(n + 1), name]


def choice(rng: random.Random) -> Made:
    letter, other = rng.sample("ABCDE", 2)
    equal = [letter, f"({letter})", rf"\textbf{{({letter})}}", rf"\text{{{letter}}}"]
    return rf"\text{{({letter})}}", equal, [other, f"({other})", rf"\text{{({other})}}", "2"]


def clock(rng: random.Random) -> Made:
    h = rng.randint(1, 12)
    m = rng.randint(0, 59)
    if rng.random() < 0.5:
        equal = [f"{h} : {m:02d}", rf"{h}\!:\!{m:02d}"]
        return f"{h}:{m:02d}", equal, [f"{h}", f"{h}:{(m + 1) % 60:02d}"]

    gold = rf"{h}:{m:02d}\text{{ p.m.}}"
    return gold, [rf"{h}\!:\!{m:02d} \text{{ p.m.}}"], [rf"{h}:{m:02d}\text{{ a.m.}}", str(h)]


def money(rng: random.Random) -> Made:
    n = rng.randint(1, 9999)
    cents = rng.choice(["", ".50", ".25"])
    plain = f"{n}{cents}"
    equal = [f"${plain}", plain, f"{plain}$", rf"{plain}\text{{ dollars}}"]

    return rf"\${plain}", equal, [f"${n + 1}{cents}", f"{plain}€", rf"\${n}0{cents}"]


def algebra(rng: random.Random) -> Made:
    a, b, c = (rng.randint(2, 15) for _ in range(3))
    equal = [f"{c} + {b}x + {a}x^2", f"{a}x^{{2}}+{b}x+{c}"]
    unequal = [f"{a}x^2+{b}x-{c}", str(a), str(c), f"{a}x^2+{b + 1}x+{c}"]
    return f"{a}x^2 + {b}x + {c}", equal, unequal


def unfinished(rng: random.Random) -> Made:
    a = rng.randint(2, 90)
    b = rng.randint(2, 90)

    unequal = [f"{a} + {b}", rf"{a + b - 1} + 1", f"{a}, {a + b}", f"{a + b} or {a + b + 1}"]
    if a + b in (6, 24, 120):
        unequal.append({6: "3!", 24: "4!", 120: "5!"}[a + b])

    wrapped = [rf"\underline{{{a + b}}}", rf"\mathbf{{{a + b}}}", f"{a} + {b} = {a + b}"]
    return str(a + b), wrapped, unequal


KINDS: dict[str, Callable[[random.Random], Made]] = {
    "fraction": fraction,
    "decimal": decimal,
    "thousands": thousands,
    "interval": interval,
    "union": union,
    "matrix": matrix,
    "point": point,
    "units": units,
    "text": text,
    "members": members,
    "degrees": degrees,
    "radical": radical,
    "percent": percent,
    "base": base,
    "equation": equation,
    "choice": choice,
    "clock": clock,
    "money": money,
    "algebra": algebra,
    "unfinished": unfinished,
}


def changed_digit(gold: str, rng: random.Random) -> str | None:
    """A gold with another digit in one place; None if it has no digit."""
    spots = [match.start() for match in re.finditer(r"[0-9]", gold)]
    if not spots:
        return None

    spot = rng.choice(spots)
    digit = rng.choice(sorted(set("123456789") - {gold[spot]}))
    return gold[:spot] + digit + gold[spot + 1 :]


class Pair(NamedTuple):
    """What a reader compares."""

    answer: str
    gold: str


class Readers:
    """Counts of right verdicts and the first wrong ones."""

    def __init__(self, judge: Judge, show: int) -> None:
        self.judge = judge
        self.show = show

    def strict(self, pairs: list[Pair]) -> list[bool]:
        """Answers in a box."""
        facts = self.facts([rf"\boxed{{{pair.answer}}}" for pair in pairs], pairs)
        return [fact.correct for fact in facts]

    def lenient(self, template: str, pairs: list[Pair]) -> list[bool]:
        """Answers in a sentence."""
        facts = self.facts([template.replace("%s", pair.answer) for pair in pairs], pairs)
        return [fact.correct_unformatted for fact in facts]

    def facts(self, texts: list[str], pairs: list[Pair]) -> list[Facts]:
        golds = [pair.gold for pair in pairs]
        return self.judge.judge(texts, golds, [False] * len(texts))

    def count(self, name: str, verdicts: list[bool], pairs: list[Pair], right: bool) -> Counts:
        """How many verdicts are right, if they all should be the same."""
        judged = zip(pairs, verdicts, strict=True)
        wrong = [pair for pair, verdict in judged if verdict != right]
        num_right = len(pairs) - len(wrong)
        print(f"{name:<58} {num_right:>6} of {len(pairs)}")
        for pair in wrong[: self.show]:
            print(f"    answer {pair.answer!r} gold {pair.gold!r}")
        return {"right": num_right, "of": len(pairs)}

    def measure(self, equal: list[Pair], unequal: list[Pair]) -> dict[str, Counts]:
        """Both readers on answers that equal their gold and on some that do not."""
        found = {"strict": self.count("strict", self.strict(equal), equal, True)}
        for template in TEMPLATES:
            verdicts = self.lenient(template, equal)
            found[template] = self.count(template, verdicts, equal, True)

        name = "strict, unequal"
        found[name] = self.count(name, self.strict(unequal), unequal, False)
        name = "lenient, unequal"
        verdicts = self.lenient(TEMPLATES[0], unequal)
        found[name] = self.count(name, verdicts, unequal, False)
        return found


def generated(readers: Readers, count: int, seed: int) -> dict[str, Counts]:
    cases = make_cases(count, seed)
    print(f"generated: {len(cases)} golds")

    equal = []
    unequal = []
    for case in cases:
        equal += [Pair(answer, case.gold) for answer in (case.gold, *case.equal)]
        unequal += [Pair(answer, case.gold) for answer in case.unequal]
    return readers.measure(equal, unequal)


def of_golds(readers: Readers, path: Path, rng: random.Random) -> dict[str, Counts]:
    """Golds against themselves, and with one digit changed."""
    equal = []
    unequal = []
    for row in read_rows(path):
        if not row.get("answer"):
            continue

        gold = str(row["answer"])
        changed = changed_digit(gold, rng)
        equal.append(Pair(gold, gold))
        if changed:
            unequal.append(Pair(changed, gold))

    print(f"{path.name}: {len(equal)} golds")
    return readers.measure(equal, unequal)


def labelled(readers: Readers, path: Path) -> Counts:
    """Solutions by four models, each with a label that the readers should repeat."""
    judge = Judge(FORMATS["hashes"], readers.judge.verifier)
    counts: Counter[str] = Counter()
    for row in read_rows(path):
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        for solution in row.values():
            if not isinstance(solution, dict):
                continue

            text = "####".join(solution["solution"].rsplit("A:", 1))
            (facts,) = judge.judge([text], [gold], [False])
            lenient = facts.correct or facts.correct_unformatted
            counts["solutions"] += 1
            counts["strict_wrong"] += facts.correct != solution["is_correct"]
            counts["lenient_wrong"] += lenient != solution["is_correct"]

    print(f"{path.name}: {dict(counts)}")
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--count", type=int, default=2000, help="generated golds")
    add("--seed", type=int, default=0)
    add("--golds", type=Path, nargs="*", default=[])
    add("--solutions", type=Path, nargs="*", default=[])
    add("--show", type=int, default=5, help="wrong verdicts to print of each kind")
    add("--out", type=Path, default=OUT)
    options = parser.parse_args()

    rng = random.Random(options.seed)
    start = time.process_time()
    with Verifier() as verifier:
        readers = Readers(Judge(FORMATS["boxed"], verifier), options.show)
        result: dict[str, Any] = {"generated": generated(readers, options.count, options.seed)}
        for path in options.golds:
            result[path.stem] = of_golds(readers, path, rng)
        for path in options.solutions:
            result[path.stem] = labelled(readers, path)

    print(f"{time.process_time() - start:.0f} s of CPU time without the workers'")
    write_json(result, options.out, indent=1)


if __name__ == "__main__":
    main()
