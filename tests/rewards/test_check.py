"""`mesotron check` finds planted exploits and passes sound rewards."""

import json

import pytest

from mesotron.cli import main
from mesotron.config import RewardConfig
from mesotron.rewards.call import make_reward
from mesotron.rewards.check import check
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
