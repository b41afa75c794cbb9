r"""Mesotron and math-verify on the same pairs of an answer and a gold.

    python -m benchmarks.answers.against_math_verify

Both get `\boxed{answer}` and the gold. The verdict of a careful person is that of `pairs`; the
table counts where math-verify differs from it, by the kind of the pair.
"""

import argparse
import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks._lib.results import write_json
from benchmarks.answers.pairs import Pair, make_pairs
from mesotron.answers.facts import Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier

OUT = Path(__file__).with_name("against_math_verify.json")


@dataclass
class Kind:
    """Counts of one kind of pairs."""

    pairs: int = 0
    mesotron_right: int = 0
    math_verify_right: int = 0
    accepts_wrong: int = 0  # by math-verify: a wrong answer taken for right
    rejects_right: int = 0
    wrongly_accepted: str = ""  # the first of each
    wrongly_rejected: str = ""


def by_mesotron(pairs: list[Pair]) -> list[bool]:
    texts = [rf"\boxed{{{pair.answer}}}" for pair in pairs]
    with Verifier() as verifier:
        judge = Judge(FORMATS["boxed"], verifier)
        facts = judge.judge(texts, [pair.gold for pair in pairs], [False] * len(pairs))

    return [fact.correct for fact in facts]


def by_math_verify(pair: Pair) -> bool:
    """As its README shows it: the default settings on the text and on the gold."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${pair.gold}$"), parse(rf"\boxed{{{pair.answer}}}")))


def compare(pairs: list[Pair]) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for pair, verdict in zip(pairs, by_mesotron(pairs), strict=True):
        kind = kinds.setdefault(pair.kind, Kind())
        other = by_math_verify(pair)
        kind.pairs += 1
        kind.mesotron_right += verdict == pair.strict
        kind.math_verify_right += other == pair.strict

        shown = f"{pair.answer} for {pair.gold}"
        if other and not pair.strict:
            kind.accepts_wrong += 1
            kind.wrongly_accepted = kind.wrongly_accepted or shown
        elif pair.strict and not other:
            kind.rejects_right += 1
            kind.wrongly_rejected = kind.wrongly_rejected or shown

    return kinds


def table(kinds: dict[str, Kind]) -> str:
    """In Markdown, with the sums in the last row."""
    lines = [
        "| kind | pairs | Mesotron right | math-verify right | accepts wrong | rejects right |",
        "|---|---|---|---|---|---|",
    ]
    sums: Counter[str] = Counter()
    for name, kind in kinds.items():
        numbers = [value for value in asdict(kind).values() if isinstance(value, int)]
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
        sums.update({str(place): value for place, value in enumerate(numbers)})

    lines.append(f"| all | {' | '.join(map(str, sums.values()))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()

    logging.disable()  # math-verify warns of each text that it cannot read
    kinds = compare(make_pairs(options.seed))
    print(table(kinds))
    for name, kind in kinds.items():
        for what, shown in (("accepts", kind.wrongly_accepted), ("rejects", kind.wrongly_rejected)):
            if shown:
                print(f"{name}: math-verify {what} {shown}")

    write_json({name: asdict(kind) for name, kind in kinds.items()}, options.out, indent=1)


if __name__ == "__main__":
    main()
