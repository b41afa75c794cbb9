"""Facts of completions, one by one; hostile completions do not affect others."""

import re
from pathlib import Path

import pytest

from mesotron.rlvr.answers.facts import Facts, summarise


def one(judge, completion, gold, truncated=False) -> Facts:
    return judge.judge([completion], [gold], [truncated])[0]


GOOD = "parsed formatted correct graded"
# completion, gold, truncated -> the facts that are true, and the answer
CASES = [
    (r"3+4 = \boxed{7}", "7", False, GOOD, "7"),
    (r"\boxed{7.0}", "7", False, GOOD, "7"),
    ("\\boxed{7\u200b2}", "72", False, GOOD, "72"),
    ("\\boxed{\uff17\uff12}", "72", False, GOOD, "72"),
    (r"\boxed{8}", "7", False, "parsed formatted graded", "8"),
    ("The answer is 7.", "7", False, "parsed correct_unformatted graded", None),
    ("The answer is 8.", "7", False, "parsed graded", None),
    ("#### 7", "7", False, "parsed correct_unformatted graded", None),
    ("I do not know", "7", False, "graded", None),
    ("", "7", False, "graded", None),
    (r"\boxed{?!}", "7", False, "formatted graded", None),
    (r"\boxed{7", "7", True, "truncated graded", None),
    (r"\boxed{7} and on and on", "7", True, GOOD + " truncated", "7"),
    (r"\boxed{7}", r"\frac{1}{", False, "parsed formatted gold_unparseable", "7"),
    (r"\boxed{\frac{1}{}", r"\frac{1}{", False, "parsed gold_unparseable", None),
    (r"\boxed{}", "", False, "gold_unparseable", None),
    (r"\boxed{7}", None, False, "parsed formatted", "7"),
]


@pytest.mark.parametrize(("completion", "gold", "truncated", "true", "answer"), CASES)
def test_each_fact_by_its_name(judge, completion, gold, truncated, true, answer):
    facts = one(judge, completion, gold, truncated)
    names = [name for name in Facts.__dataclass_fields__ if getattr(facts, name) is True]
    assert set(names) == set(true.split())
    assert facts.answer == answer


def test_hostile_completions_do_not_affect_the_batch(judge):
    hostile = [
        "[" * 1_000_000, r"\boxed{" * 100_000, r"\boxed{9**9**9**9}", r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{" + r"\frac{" * 60 + "}" * 60 + "}", "\x00" * 1000, r"\boxed{\x00}",
        "\u202e\u2067" * 1000, "\ud800", r"\boxed{__import__('os').abort()}",
    ]  # fmt: skip
    good = r"\boxed{7}"
    batch = [text for bad in hostile for text in (bad, good)]
    facts = judge.judge(batch, ["7"] * len(batch), [False] * len(batch))
    assert [fact.correct for fact in facts] == [False, True] * len(hostile)
    assert not any(fact.correct_unformatted for fact in facts)


def test_summary_shares(judge):
    completions = [r"\boxed{7}", "7", r"\boxed{8}", r"\boxed{1}"]
    golds = ["7", "7", "7", r"\frac{"]
    shares = summarise(judge.judge(completions, golds, [False, True, False, False]))
    assert shares == {
        "facts/parsed": 0.75,  # the bare 7 touches the cut
        "facts/formatted": 0.75,
        "facts/truncated": 0.25,
        "facts/gold_unparseable": 0.25,
        "facts/correct": pytest.approx(1 / 3),
        "facts/correct_unformatted": 0.0,
    }


def test_shares_are_documented_and_need_a_gold(judge):
    page = (Path(__file__).parents[2] / "docs" / "api" / "metrics.md").read_text()
    documented = re.findall(r"^\| `(facts/\w+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(summarise([one(judge, "", "7")]))
    shares = summarise([one(judge, r"\boxed{7}", None)])
    assert shares["facts/formatted"] == 1.0
    assert "facts/correct" not in shares
    assert summarise([]) == {}
