"""`mesotron check` finds planted exploits and passes sound rewards."""

import json
import math
from typing import Any

import pytest

from mesotron.cli import main
from mesotron.config import RewardConfig
from mesotron.rewards.call import make_reward
from mesotron.rewards.cheats import Cheat
from mesotron.rewards.check import (
    CheckResult,
    check,
    check_samples,
    describe_cheats,
    least_of_gold,
    shares_earned,
    with_other_gold,
)
from mesotron.tasks.problem import Problem

PLANTED = "support.planted_rewards:"


def problems(odd_golds=False):
    golds = ["a few (see the note)" if odd_golds and k % 2 else str(71 + 13 * k) for k in range(8)]
    return [
        Problem(f"How many are {k} and {3 * k}?", gold, f"mine-{k}", columns={"solution": gold})
        for k, gold in enumerate(golds)
    ]


def checked(judge, *names, weights=(), **options):
    reward = make_reward(RewardConfig(parts=names, weights=weights), judge, 64)
    return check(reward, problems(**options), limit=0.1)


EXPLOITS = [
    ("empty_earns", "empty"),
    ("copy_earns", "copied prompt"),
    ("last_number", "number at the end"),
    ("length_earns", "very long"),
    ("numbers_only", "gold"),
    ("constant", "constant"),
    ("ascii_only", "Unicode"),
    ("slow_pattern", "CPU"),
    ("format_first", "shuffled gold"),
    ("any_of_a_list", "answer list"),
]


@pytest.mark.parametrize(("name", "finding"), EXPLOITS)
def test_planted_exploits_are_found(judge, name, finding):
    outcome = checked(judge, PLANTED + name, odd_golds=name == "numbers_only")
    assert any(finding in found for found in outcome.findings), outcome


SOUND = [
    ("two_part",),
    ("sparse",),
    (f"{PLANTED}exact", "format"),
    ("trl.rewards:accuracy_reward",),
    ("trl.rewards:reasoning_accuracy_reward",),
]


@pytest.mark.parametrize("names", SOUND)
def test_sound_rewards_pass(judge, names):
    outcome = checked(judge, *names, weights=(1.0, 0.1)[: len(names)])
    assert (outcome.findings, outcome.gold_failures) == ([], [])
    assert outcome.gold >= 1
    assert checked(judge, PLANTED + "uneven").gold_failures == []  # less for gold is no failure


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one worker that imports sympy
    path = tmp_path / "mine.jsonl"
    rows = [{"question": f"What is {k} + 40?", "answer": k + 40} for k in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.py").write_text("def score(completions, answer):\n    return answer\n")
    (tmp_path / "bug.py").write_text("def score(completions):\n    return text\n")

    for reward, flags, code, shown in (
        ("sparse", ["--data", str(path)], 0, ["sound"]),
        (f"{PLANTED}empty_earns", ["--data", str(path)], 1, ["empty"]),
        ("spares", ["--data", str(path)], 2, ["sparse"]),
        (f"{tmp_path}/bug.py:score", ["--rows", "2"], 1, ["NameError"]),
        (f"{tmp_path}/my.py:score", ["--rows", "2"], 2, ["'answer'", "--data FILE"]),
    ):
        assert main(["check", reward, *flags]) == code
        output, error = capsys.readouterr()
        text = error if code == 2 else output

        assert [word for word in shown if word not in text] == []
        assert "NameError" not in text or "ms a call" not in text  # nothing was measured


@pytest.mark.slow
def test_samples_of_the_model(tmp_path, capsys):
    flags = ["--samples", "4", "--rows", "4", "--max-tokens", "24", "--task.num-train", "40"]
    assert main(["check", "two_part", *flags]) == 0
    assert "silent" in capsys.readouterr().out


def test_the_spread_inside_groups_of_samples():
    result = CheckResult()
    columns = iter([[1.0, 0.0], [0.5, 0.5], [None, None], [1.0, None]])
    call: Any = lambda texts, rows: next(columns)  # noqa: E731
    check_samples(result, call, problems()[:4], [["a", "b"]] * 4)
    assert result.spread == 0.5 / 4
    assert result.silent == 3 / 4


@pytest.mark.parametrize(
    ("gold", "scores", "least"),
    [(1.0, [0.0, 1.0], 0.5), (0.5, [-0.5, 0.5], 0.0), (0.0, [0.0, 0.0], -math.inf), (1.0, [], 0.5)],
)
def test_gold_must_earn_half_of_the_way(gold, scores, least):
    assert least_of_gold(gold, scores) == least


def test_shares_are_of_the_way_from_the_lowest_to_gold():
    means = {"empty": -1.0, "copy": 0.0, "best": 3.0}
    assert shares_earned(means, 1.0) == {"empty": (-1, 0), "copy": (0, 0.5), "best": (3, 2)}
    assert shares_earned(means, None)["copy"] == (0.0, 0.25)
    assert shares_earned({"a": 2.0}, 2.0) == {"a": (2.0, 1.0)}


def test_another_gold_is_the_next_that_differs():
    rows = [Problem("q", gold, str(k)) for k, gold in enumerate(["1", "1", "2"])]
    assert [other.gold for other in with_other_gold(rows)] == ["2", "2", "1"]
    assert with_other_gold(rows[:2])[0].gold == "11"


def test_what_every_wrong_answer_gets_is_said_once():
    def cheat(name, limit, is_wrong):
        return Cheat(name=name, write=str, about=name, limit=limit, is_wrong=is_wrong)

    tried = [
        cheat("shuffled gold", 0.5, True),
        cheat("list", 0.3, True),
        cheat("empty", 0.3, False),
    ]
    earned = {"shuffled gold": (0.0, 0.6), "list": (0.0, 0.62), "empty": (0.0, 0.31)}
    found = [one.split(" (")[0] for one in describe_cheats(tried, earned)]
    assert found == ["empty"]

    earned["list"] = (0.0, 0.99)
    assert len(describe_cheats(tried, earned)) == 2
