"""Verdicts on pairs from a grammar of numbers and units, which a careful person would give."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.answers.pairs import KINDS, make_pairs, spell
from mesotron.answers.numbers import read_number

PAIRS = make_pairs()


def test_the_table_is_large_and_even():
    assert len(PAIRS) >= 300
    kinds = Counter(pair.kind for pair in PAIRS)
    assert len(kinds) == len(KINDS)
    assert min(kinds.values()) >= 10

    share = sum(pair.strict for pair in PAIRS) / len(PAIRS)
    assert 0.3 < share < 0.7


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_verdicts_are_those_of_a_careful_person(judge, strict):
    texts = []
    for pair in PAIRS:
        texts.append(rf"\boxed{{{pair.answer}}}" if strict else f"The answer is {pair.answer}.")

    golds = [pair.gold for pair in PAIRS]
    wrong = []
    for pair, facts in zip(PAIRS, judge.judge(texts, golds, [False] * len(texts)), strict=True):
        is_right = facts.correct if strict else facts.correct_unformatted
        expected = pair.strict if strict else pair.lenient
        if is_right != expected:
            wrong.append((pair.kind, pair.answer, pair.gold, is_right))

    assert wrong == []


@pytest.mark.parametrize("name", ["boxed", "endings"])
def test_odd_but_plausible_answers(judge, name):
    """Written by hand: what stands in a box, and how completions end without one."""
    wrong = []
    lines = Path(__file__).with_name(f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    texts = [rf"\boxed{{{text}}}" if name == "boxed" else text for text, *_ in rows]

    facts = judge.judge(texts, [gold for _, gold, _ in rows], [False] * len(rows))
    for row, fact in zip(rows, facts, strict=True):
        is_right = fact.correct or fact.correct_unformatted
        if is_right != (row[2] == "1"):
            wrong.append(row)

    assert len(rows) > 150
    assert wrong == []


def test_spelled_numbers_are_read_exactly():
    values = [*range(1, 1300), *(7**k for k in range(4, 17)), *(10**k + 1 for k in range(3, 15))]
    for value in values:
        for joint, hyphen in ((" ", "-"), (" and ", " ")):
            text = spell(value, joint, hyphen)
            assert read_number(text).value == value, text
            assert read_number(f"{text} apples").value == value, text
