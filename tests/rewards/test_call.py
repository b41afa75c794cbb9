"""Rewards: hand-worked values of every part, their sum, and user functions."""

import json
import math

import pytest

from mesotron.config import RewardConfig
from mesotron.rewards.call import (
    MAX_UNSCORED,
    as_reward_function,
    make_reward,
    part_metrics,
    try_reward,
)
from mesotron.tasks.problem import Problem

RIGHT = r"\boxed{7}"
WRONG = r"\boxed{8}"
BARE = "It is 7"
NOTHING = "no idea"


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
def test_each_part(judge, part, values):
    assert score(judge, FOUR, parts=(part,), format_share=0.2) == values


@pytest.mark.parametrize(
    ("gold", "rewards"),
    [
        (
            "7",
            {
                "7": 1,
                "5": 1 / 3,
                r"\frac{15}{2}": 2 / 3,
                "-1": 1 / 9,
                "3" * 100: 0,
                "1e999": 0,
                "x + 1": 0,
                "50%": 2 / 15,
                r"\sqrt{81}": 1 / 3,
            },
        ),
        (
            "50%",
            {
                "50%": 1,
                "0.5": 1,
                "1/2": 1,
                "50": 1,
                "51%": 0.5,
                "0.51": 0.5,
                "51": 0.5,
                "0.48": 1 / 3,
            },
        ),
        (
            "0.5",
            {
                "50%": 1,
                "0.5": 1,
                "150%": 0.5,
                "1.5": 0.5,
            },
        ),
        # Another unit is wrong, though the numbers are 0 apart.
        (
            "5 km",
            {
                "5 cm": 0,
                "5 km": 1,
                "5": 1,
                "6 km": 0.5,
                "6": 0.5,
            },
        ),
        ("Paris", {"5": 0}),
    ],
)
def test_near_decreases_with_distance(judge, gold, rewards):
    answers = [rf"\boxed{{{answer}}}" for answer in rewards]
    scores = score(
        judge,
        answers,
        golds=[gold] * len(rewards),
        parts=("near",),
    )

    assert scores == pytest.approx(list(rewards.values()))


def test_an_unreadable_gold_is_skipped_and_never_rewarded(judge, caplog):
    broken = r"\frac{1}{"
    completions = [rf"\boxed{{{broken}}}}}", RIGHT, NOTHING]
    for part in ("two_part", "sparse", "correct", "length"):
        assert score(judge, completions, golds=[broken] * 3, parts=(part,)) == [None] * 3

    caplog.clear()
    assert score(judge, [RIGHT, RIGHT], golds=["", "7"], parts=("format", "sparse")) == [None, 2.0]
    assert not caplog.text

    score(judge, [RIGHT, NOTHING], golds=["", ""])
    assert "none of 2 completions" in caplog.text


def test_a_truncated_completion_is_paid_for_what_it_finished(judge):
    cut = [r"\boxed{7} and on", r"\boxed{7"]
    assert score(judge, cut, truncated=[True, True]) == [1.1, 0.0]


def test_parts_that_depend_on_length(judge):
    ids = [[0] * n for n in (1, 5, 10, 12, 1)]
    short = score(judge, [RIGHT] * 4 + [WRONG], ids=ids, parts=("length",))
    assert short == pytest.approx([0.9, 0.5, 0, 0, 0])

    # Seven equal tokens have four 4-grams, three of them repeated.
    ids = [[1, 2, 3, 4, 5, 6], [1] * 7, [1, 2, 3], []]
    assert score(judge, FOUR, ids=ids, parts=("repetition",)) == [0.0, -0.75, 0.0, 0.0]

    ids = [[0] * n for n in (5, 6, 8, 10, 11, 3)]
    cut = [False] * 5 + [True]
    overlong = {"parts": ("overlong",), "overlong_buffer": 4}

    assert score(
        judge,
        [RIGHT] * 6,
        ids=ids,
        truncated=cut,
        **overlong,
    ) == [0, 0, -0.5, -1, -1, -1]


def test_parts_are_weighted_and_summed(judge):
    weighted = score(judge, FOUR, parts=("format", "correct"), weights=(0.25, 2.0))
    assert weighted == [2.25, 0.25, 2.0, 0.0]


OWN = """
import asyncio, json, numpy

def by_columns(prompts, hard, max_tokens, rows):
    return [h + 10 * max_tokens + len(row) for h, row in zip(hard, rows)]

def by_facts(facts, golds):
    return [None if gold is None else float(fact.correct) for fact, gold in zip(facts, golds)]

async def later(completions, prompts):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]

class Scaled:
    def __init__(self, factor=2.0, *, plus=0.0):
        self.factor, self.plus = factor, plus
    def __call__(self, completions, prompts, **kwargs):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        return [self.factor * len(text) + self.plus for text in completions]

def of_chats(completions, **kwargs):
    return [len(chat[0]["content"]) for chat in completions]

def of_plain_prompts(completions, prompts):
    return [float(len(prompt.split())) for prompt in prompts]

def as_array(completions):
    return numpy.ones(len(completions))

def busy(completions, calls=[]):
    calls.append(1)
    key = "busy" if len(calls) == 2 else "choices"
    return [{"choices": len(text)}[key] for text in completions]

def raises_on_second(completions):
    return [1 / len(text) for text in completions]

def fails_in_a_library(completions):
    return [json.loads(text) for text in completions]

def skips_all(completions):
    return [None for _ in completions]

def skips_bare(completions):
    return [1.0 if "boxed" in text else None for text in completions]

too_few = lambda completions: [1.0]
not_numbers = lambda completions: ["good" for _ in completions]
nan_on_second = lambda completions: [0.0, float("nan")]
exits_on_second = lambda completions: [1.0 if text else exit(3) for text in completions]
too_large_on_second = lambda completions: [0, 10**400]

class Own(BaseException):
    def __str__(self):
        raise RuntimeError

def raises_its_own(completions):
    raise Own

def is_cancelled(completions):
    raise asyncio.CancelledError

async def ends_a_generator(completions):
    raise GeneratorExit("x" * 10**7)

def empties(completions, completion_ids, rows, **_):
    completions.clear(), completion_ids[0].clear(), rows[0].clear()
    return [1e300, -1e300]

SCORE = 3
"""
PROMPT = [{"role": "user", "content": "P"}]
THOUGHT = r"<think>6 + 1</think> \boxed{7}"


def rows_of(*columns):
    return [{"prompt": PROMPT, "columns": json.dumps(one)} for one in columns]


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "script_rewards.py").write_text("raise SystemExit('usage: ...')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("own_rewards:by_columns", [22, 23]),
        ("own_rewards:by_facts", [1, None]),
        ("own_rewards.py:later", [30, 9]),
        ("own_rewards.py:Scaled", [60, 18]),
        ("own_rewards.py:Scaled(3, plus=0.5)", [90.5, 27.5]),
        ("own_rewards.py:of_chats", [30, 9]),
        ("own_rewards.py:as_array", [1, 1]),
        ("trl.rewards:think_format_reward", [1, 0]),
        ("trl.rewards:get_cosine_scaled_reward(max_len=4)", [0.5, -0.5]),
        (
            "trl.rewards:get_soft_overlong_punishment("
            "max_completion_len=100, soft_punish_cache=20)",
            [0, 0],
        ),
    ],
)
def test_user_functions_and_those_of_trl(judge, name, scores):
    rows = rows_of({"hard": 0, "solution": "$7$"}, {"hard": 1, "solution": "$7$"})
    reward = make_reward(RewardConfig(parts=(name,)), judge, 2)
    assert (
        reward(
            [THOUGHT, WRONG],
            [[1] * 4] * 2,
            ["7", None],
            [False] * 2,
            rows,
        )
        == scores
    )


@pytest.mark.usefixtures("own")
def test_a_passing_failure_does_not_change_what_a_reward_reads(judge):
    reward = make_reward(RewardConfig(parts=("own_rewards.py:busy",)), judge, 8)
    arguments = ["a", "ab"], [[1], [1]], ["7", "7"], [False, False]
    assert reward(*arguments) == [1.0, 2.0]

    with pytest.raises(ValueError, match="KeyError"):
        reward(*arguments)

    assert reward(*arguments) == [1.0, 2.0]


def log_of_calls(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("own")
def test_a_reward_is_tried_with_chats_and_then_with_plain_prompts(tmp_path):
    code = """
import json
from pathlib import Path

def only_plain(completions, prompts):
    with Path("calls.jsonl").open("a") as calls:
        calls.write(json.dumps([completions, prompts]) + "\\n")
    return [float(len(prompt.split())) for prompt in prompts]

def never(completions, prompts):
    return [prompt["absent"] for prompt in prompts]
"""
    (tmp_path / "tried.py").write_text(code)
    problem = Problem("2 + 3", "5", "x")
    try_reward(RewardConfig(parts=("sparse", "tried.py:only_plain")), problem, 8)

    calls = log_of_calls(tmp_path / "calls.jsonl")
    texts, prompts = calls[-1]
    assert "5" in texts[0]
    assert texts[1] == ""  # a group of two, so that a wrong number of scores shows
    assert prompts == ["2 + 3"] * 2
    assert calls[0][1][0][0]["role"] == "user"

    # The error is that of the chats, which most models have.
    with pytest.raises(ValueError, match="TypeError"):
        try_reward(RewardConfig(parts=("tried.py:never",)), problem, 8)


@pytest.mark.usefixtures("own")
def test_a_reward_that_never_gives_a_verdict_stops_the_run(judge, caplog):
    def call(function, text):
        return function(
            [text] * 2,
            [[1]] * 2,
            gold=["7"] * 2,
            truncated=[False] * 2,
            row=[{}] * 2,
            facts=judge.judge([text] * 2, ["7"] * 2, [False] * 2),
        )

    silent = make_reward(RewardConfig(parts=("own_rewards:skips_all",)), judge, 8)
    function = as_reward_function(silent)
    for _ in range(MAX_UNSCORED - 1):
        assert call(function, RIGHT) == [None, None]

    warned = [record for record in caplog.records if "own_rewards:skips_all" in str(record.args)]
    assert len(warned) == 1  # not once for each call

    with pytest.raises(ValueError, match="own_rewards:skips_all"):
        call(function, RIGHT)

    # One reward is enough: batches of None before and after it are no reason to stop.
    some = as_reward_function(
        make_reward(RewardConfig(parts=("own_rewards:skips_bare",)), judge, 8)
    )
    assert call(some, BARE) == [None, None]
    assert call(some, RIGHT) == [1.0, 1.0]
    for _ in range(2 * MAX_UNSCORED):
        assert call(some, BARE) == [None, None]


@pytest.mark.usefixtures("own")
def test_a_batch_without_rewards_does_not_hide_the_next(judge):
    reward = make_reward(RewardConfig(parts=("own_rewards:skips_bare", "format")), judge, 8)
    for text, scores in ((BARE, [None]), (RIGHT, [2.0]), (BARE, [None]), (WRONG, [2.0])):
        assert reward([text], [[1]], ["7"], [False]) == scores


def test_shares_of_the_variance_are_those_of_the_parts(judge):
    """By hand: the total's variance is the sum of its covariances with the weighted parts."""
    reward = make_reward(RewardConfig(parts=("format", "correct"), weights=(0.5, 2)), judge, 8)
    totals = reward(FOUR, [[1]] * 4, ["7"] * 4, [False] * 4)
    assert totals == [2.5, 0.5, 2.0, 0.0]

    # Means 0.5, 0.5 and 1.25; the products with the totals average 0.75 and 1.125.
    variance = (2.5**2 + 0.5**2 + 2**2) / 4 - 1.25**2
    metrics = part_metrics(reward, totals)
    assert metrics["reward/part/format"] == metrics["reward/part/correct"] == 0.5
    share = 0.5 * (0.75 - 0.5 * 1.25) / variance
    assert metrics["reward/part/format/variance_share"] == pytest.approx(share)
    assert metrics["reward/part/correct/variance_share"] == pytest.approx(1 - share)
    assert metrics["reward/largest_part"] == pytest.approx(1 - share)

    # Nothing is explained where all totals are equal, and one part is all there is.
    equal = reward([RIGHT] * 2, [[1]] * 2, ["7"] * 2, [False] * 2)
    assert set(part_metrics(reward, equal)) == {"reward/part/format", "reward/part/correct"}
    alone = make_reward(RewardConfig(parts=("sparse",)), judge, 8)
    assert part_metrics(alone, alone(FOUR, [[1]] * 4, ["7"] * 4, [False] * 4)) == {}


@pytest.mark.usefixtures("own")
def test_a_user_function_can_neither_empty_its_arguments_nor_overflow(judge):
    config = RewardConfig(parts=("own_rewards:empties", "own_rewards:by_columns"), weights=(1e9, 1))
    ids = [[1], [1]]
    rows = rows_of({"hard": 0}, {"hard": 1})

    scores = make_reward(config, judge, 2)(
        [RIGHT, BARE],
        ids,
        ["7", "7"],
        [False, False],
        rows,
    )

    assert (scores[0] > 1e20, scores[1] < -1e20, math.isfinite(sum(scores))) == (True, True, True)
    assert (ids, len(rows[0])) == ([[1], [1]], 2)


def line_of(code):
    line = next(i for i, text in enumerate(OWN.splitlines(), 1) if code in text)
    return rf"at /.*/own_rewards\.py:{line}$"


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "keyword"),
    [
        ("zzz", "sparse, two_part"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("broken_rewards:f", r"ZeroDiv.* at /.*/broken_rewards\.py:1$"),
        ("script_rewards:f", "SystemExit: usage"),
        ("own_rewards:absent", "'absent'"),
        ("own_rewards:SCORE", "'SCORE'"),
        ("own_rewards:raises_on_second", "ZeroDivisionError.* " + line_of("1 / len(text)")),
        ("own_rewards:fails_in_a_library", "JSONDecodeError.* " + line_of("json.loads(text)")),
        ("own_rewards:exits_on_second", "SystemExit"),
        ("own_rewards:raises_its_own", "Own .*RuntimeError"),
        ("own_rewards:is_cancelled", "CancelledError"),
        ("own_rewards:ends_a_generator", "GeneratorExit .*10,000,000 characters"),
        ("own_rewards:too_few", "1 for 2 completions"),
        ("own_rewards:not_numbers", "completion 0"),
        ("own_rewards:nan_on_second", "completion 1"),
        ("own_rewards:too_large_on_second", "completion 1"),
    ],
)
def test_an_unknown_or_broken_reward_is_named_with_its_line(judge, name, keyword):
    with pytest.raises(ValueError, match=f"(?s){keyword}") as error:
        make_reward(RewardConfig(parts=(name,)), judge, 10)(
            ["1", ""], [[1], [1]], ["7", "7"], [False, False]
        )

    assert name.partition(":")[0] in str(error.value)
