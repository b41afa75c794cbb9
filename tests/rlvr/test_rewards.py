"""Rewards: hand-worked values of every part, their sum, and functions of one's own."""

import re
from pathlib import Path

import pytest

from mesotron.config import RewardConfig
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.rewards import PARTS, make_reward

RIGHT, WRONG, BARE, NOTHING = r"\boxed{7}", r"\boxed{8}", "It is 7", "no idea"


@pytest.fixture(scope="module")
def judge():
    return Judge(FORMATS["boxed"], Verifier(num_workers=1))


def score(judge, completions, *, golds=None, ids=None, truncated=None, max_tokens=10, **config):
    count = len(completions)
    return make_reward(RewardConfig(**config), judge, max_tokens)(
        completions, ids or [[1]] * count, golds or ["7"] * count, truncated or [False] * count
    )


FOUR = [RIGHT, WRONG, BARE, NOTHING]


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("sparse", [1, 0, 0, 0]),
        ("two_part", [1.2, 0.2, 0, 0]),
        ("near", [1, 0.5, 0, 0]),
        ("correct", [1, 0, 1, 0]),
        ("format", [1, 1, 0, 0]),
    ],
)
def test_what_each_part_pays(judge, part, values):
    assert score(judge, FOUR, parts=(part,), format_share=0.2) == values


def test_near_pays_by_distance_and_survives_every_number(judge):
    boxes = ["7", "5", r"\frac{15}{2}", "-1", "3" * 100, "1e999", "x + 1", "50%"]
    far = score(judge, [rf"\boxed{{{box}}}" for box in boxes], parts=("near",), near_unit=2.0)
    assert far == [1, 0.5, 0.8, 0.2, pytest.approx(0), 0, 0, pytest.approx(4 / 17)]
    same = score(judge, [r"\boxed{1/2}"], golds=["50%"], parts=("near",))
    assert same == [1]  # the same number, though 1/2 is far from 50
    words = score(judge, [r"\boxed{5}"], golds=["Paris"], parts=("near",))
    assert words == [0]


@pytest.mark.parametrize(
    ("gold", "unit", "paid"),
    [("50%", 1.0, {"50%": 1, "0.5": 1, "50": 1, "51%": 0.5, "0.51": 0.5, "51": 0.5, "0.48": 1 / 3}),
     ("0.5", 0.01, {"50%": 1, "0.5": 1, "51%": 0.5, "0.51": 0.5, "49 percent": 0.5})],
)  # fmt: skip
def test_near_pays_alike_for_every_way_to_write_a_percentage(judge, gold, unit, paid):
    answers = [rf"\boxed{{{box}}}" for box in paid]
    found = score(judge, answers, golds=[gold] * len(paid), parts=("near",), near_unit=unit)
    assert found == pytest.approx(list(paid.values()))


def test_near_pays_nothing_for_another_unit(judge):
    """5 cm is wrong where the gold is 5 km, and the numbers alone would be 0 apart."""
    answers = [rf"\boxed{{{box}}}" for box in ("5 cm", "5 km", "5", "6 km", "6")]
    paid = score(judge, answers, golds=["5 km"] * 5, parts=("near",))
    assert paid == [0, 1, 1, 0.5, 0.5]


def test_near_reads_an_answer_that_only_mathematics_makes_a_number(judge):
    assert score(judge, [r"\boxed{\sqrt{64}}"], parts=("near",)) == [0.5]


def test_every_part_is_documented_and_every_documented_one_exists():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    rows = page.split("| part |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", rows, re.MULTILINE) == list(PARTS)


def test_a_gold_that_cannot_be_read_is_skipped_and_never_rewarded(judge):
    """Were it compared, both sides would parse to nothing, and nothing equals nothing."""
    broken = r"\frac{1}{"
    completions = [rf"\boxed{{{broken}}}}}", RIGHT, NOTHING]
    for part in ("two_part", "sparse", "correct", "length"):
        assert score(judge, completions, golds=[broken] * 3, parts=(part,)) == [None] * 3
    assert score(judge, [RIGHT, RIGHT], golds=["", "7"], parts=("format", "sparse")) == [None, 2.0]


def test_a_round_without_any_reward_is_told(judge, caplog):
    score(judge, [RIGHT, NOTHING], golds=["", ""], parts=("format", "sparse"))
    assert "none of 2 completions" in caplog.text
    caplog.clear()
    score(judge, [RIGHT, NOTHING], golds=["", "7"], parts=("format", "sparse"))
    assert not caplog.text


def test_a_truncated_completion_earns_what_it_finished(judge):
    cut = [r"\boxed{7} and on", r"\boxed{7"]
    assert score(judge, cut, truncated=[True, True]) == [1.1, 0.0]


def test_length_pays_short_right_answers_alone(judge):
    ids = [[0] * 1, [0] * 5, [0] * 10, [0] * 12, [0] * 1]
    texts = [RIGHT] * 4 + [WRONG]
    assert score(judge, texts, ids=ids, parts=("length",)) == pytest.approx([0.9, 0.5, 0, 0, 0])


def test_repetition_is_the_share_of_ngrams_said_before(judge):
    ids = [[1, 2, 3, 4, 5, 6], [1] * 7, [1, 2, 3], []]
    # Seven equal tokens have four 4-grams, three of them said before.
    assert score(judge, FOUR, ids=ids, parts=("repetition",)) == [0.0, -0.75, 0.0, 0.0]


def test_overlong_grows_over_its_buffer(judge):
    ids = [[0] * n for n in (5, 6, 8, 10, 11, 3)]
    scores = score(
        judge,
        [RIGHT] * 6,
        ids=ids,
        truncated=[False] * 5 + [True],
        parts=("overlong",),
        overlong_buffer=4,
    )
    assert scores == [0, 0, -0.5, -1, -1, -1]


def test_parts_are_weighed_and_summed(judge):
    scores = score(judge, FOUR, parts=("format", "correct"), weights=(0.25, 2.0))
    assert scores == [2.25, 0.25, 2.0, 0.0]


def test_parts_can_be_read_one_by_one(judge):
    reward = make_reward(RewardConfig(parts=("format", "correct")), judge, 10)
    parts = reward.score_parts(FOUR, [[1]] * 4, ["7"] * 4, [False] * 4)
    assert parts == {"format": [1, 1, 0, 0], "correct": [1, 0, 1, 0]}


def test_given_facts_are_not_judged_again(judge, monkeypatch):
    facts = judge.judge([RIGHT], ["7"], [False])
    reward = make_reward(RewardConfig(), judge, 10)
    monkeypatch.setattr(judge, "judge", None)
    assert reward([NOTHING], [[1]], ["7"], [False], facts=facts) == [1.1]


OWN = """
import json

def by_length(completions, **kwargs):
    return [float(len(text)) for text in completions]

def by_columns(prompts, hard, max_tokens):
    return [len(prompt) + 10 * h + 100 * max_tokens for prompt, h in zip(prompts, hard)]

def by_facts(facts, golds):
    return [None if gold is None else float(fact.correct) for fact, gold in zip(facts, golds)]

def raises_on_second(completions):
    return [1 / len(text) for text in completions]

def too_few(completions):
    return [1.0]

def a_number(completions):
    return 1.0

def not_numbers(completions):
    return ["good" for _ in completions]

def nan_on_second(completions):
    return [0.0, float("nan")]

def leaves_on_second(completions):
    return [1.0 if text else exit(3) for text in completions]

def too_large_on_second(completions):
    return [0, 10**400]

def fails_in_a_library(completions):
    return [json.loads(text) for text in completions]

def wants_what_nobody_gives(completions, length):
    return [0.0 for _ in completions]

SCORE = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "script_rewards.py").write_text("raise SystemExit('usage: ...')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_functions_of_ones_own(judge):
    rows = [{"prompt": "ab", "hard": 0}, {"prompt": "abc", "hard": 1}]

    def call(name):
        reward = make_reward(RewardConfig(parts=(f"own_rewards:{name}",)), judge, 2)
        return reward([RIGHT, BARE], [[1], [1]], ["7", None], [False, False], rows)

    assert call("by_length") == [9.0, 7.0]
    assert call("by_columns") == [202.0, 213.0]
    assert call("by_facts") == [1.0, None]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("raises_on_second", "raised ZeroDivisionError"),
        ("too_few", "1 for 2 completions"),
        ("a_number", "float for 2 completions"),
        ("not_numbers", "completion 0"),
        ("nan_on_second", "completion 1"),
        ("leaves_on_second", "raised SystemExit"),
        ("too_large_on_second", "completion 1"),
    ],
)
def test_a_function_that_fails_is_named(judge, name, keyword):
    reward = make_reward(RewardConfig(parts=(f"own_rewards:{name}",)), judge, 10)
    with pytest.raises(ValueError, match=f"own_rewards:{name} .*{keyword}"):
        reward(["text", ""], [[1], [1]], ["7", "7"], [False, False])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("raises_on_second", "1 / len(text)"),
        ("fails_in_a_library", "json.loads(text)"),
        ("wants_what_nobody_gives", "def wants_what_nobody_gives"),
    ],
)
def test_a_function_that_raises_is_named_with_the_line_of_ones_own(judge, name, code):
    line = next(i for i, text in enumerate(OWN.splitlines(), 1) if code in text)
    reward = make_reward(RewardConfig(parts=(f"own_rewards:{name}",)), judge, 10)
    with pytest.raises(ValueError, match=rf" at /.*/own_rewards\.py:{line}$"):
        reward(["1", ""], [[1], [1]], ["7", "7"], [False, False])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"parts": ("two_parts",)}, "did you mean two_part,"),
        ({"parts": ("zzz",)}, "two_part, sparse"),
        ({"parts": ()}, "parts"),
        ({"parts": ("format", "format")}, "parts"),
        ({"parts": ("no_such_module:f",)}, "ModuleNotFoundError"),
        ({"parts": ("broken_rewards:f",)}, r"ZeroDiv.* at /.*/broken_rewards\.py:1$"),
        ({"parts": ("script_rewards:f",)}, "SystemExit: usage"),
        ({"parts": ("own_rewards:nobody",)}, "'nobody'"),
        ({"parts": ("own_rewards:SCORE",)}, "'SCORE'"),
        ({"weights": (1.0, 2.0)}, "weights"),
        ({"weights": (float("nan"),)}, "weights"),
        ({"parts": ("format", "near"), "weights": (0.0, 0.0)}, "weights"),
        ({"format_share": 1.0}, "format_share"),
        ({"near_unit": 0.0}, "near_unit"),
        ({"near_unit": float("nan")}, "near_unit"),
        ({"parts": ("overlong",), "overlong_buffer": 11}, "overlong_buffer"),
        ({"parts": ("overlong",), "overlong_buffer": 0}, "overlong_buffer"),
    ],
)
def test_a_reward_that_makes_no_sense_is_refused(judge, config, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_reward(RewardConfig(**config), judge, 10)


def test_lists_of_different_lengths_are_refused(judge):
    reward = make_reward(RewardConfig(), judge, 10)
    with pytest.raises(ValueError, match="'completion_ids': 1"):
        reward([RIGHT, RIGHT], [[1]], ["7", "7"], [False, False])
