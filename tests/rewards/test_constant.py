"""A reward that pays every answer the same is explained by what it compares with the data."""

import json

import pytest

from mesotron.cli import main
from mesotron.rewards.constant import explain_constant
from mesotron.tasks.problem import Problem


def make_score(pays):
    """A reward of one problem's column by `pays(last word of the text, value of the column)`."""

    def score(texts, problems):
        scores = []
        for text, problem in zip(texts, problems, strict=True):
            last = (text.split() or [""])[-1].rstrip(".")
            scores.append(float(pays(last, problem.columns["answer"])))

        return scores

    return score


def as_text(last, gold):
    return last == gold


def as_number(last, gold):
    return last.isdigit() and int(last) == gold


@pytest.mark.parametrize(
    ("pays", "value", "fix"),
    [(as_text, 13, "str(answer)"), (as_number, "13", "float(answer)")],
)
def test_types_that_are_never_equal_are_named_with_the_fix(pays, value, fix):
    problem = Problem("How many?", "13", columns={"hard": True, "answer": value})
    assert fix in explain_constant(make_score(pays), problem)


def test_a_reward_that_pays_for_gold_needs_no_explanation():
    problem = Problem("How many?", "13", columns={"answer": "13"})
    assert explain_constant(make_score(as_text), problem) is None


def test_without_gold_the_columns_are_offered():
    problem = Problem("How many?", None, columns={"question": "How many?", "label": "13"})
    assert "--data.columns gold=label" in explain_constant(make_score(as_text), problem)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Data whose answers are integers, and a reward that compares them with text."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"What is {k} + 2?", "answer": k + 2} for k in range(40)]
    labels = [{"question": row["question"], "label": str(row["answer"])} for row in rows]
    for name, table in (("mine", rows), ("labels", labels)):
        text = "".join(json.dumps(row) + "\n" for row in table)
        (tmp_path / f"{name}.jsonl").write_text(text)

    (tmp_path / "my_rewards.py").write_text(
        "def score(completions, answer, **kwargs):\n"
        "    return [float(text.split()[-1:] == [gold]) for text, gold in zip(completions, answer)]"
        "\n\n\n"
        "def by_label(completions, label, **kwargs):\n"
        "    return [float(text.split()[-1:] == [gold]) for text, gold in zip(completions, label)]"
        "\n"
    )


@pytest.mark.usefixtures("own")
def test_check_names_the_cause(capsys):
    assert main(["check", "my_rewards.py:score", "--data", "mine.jsonl"]) == 1
    assert "str(answer)" in capsys.readouterr().out

    assert main(["check", "my_rewards.py:by_label", "--data", "labels.jsonl"]) == 1
    shown = capsys.readouterr().out
    assert "gold=label" in shown
    assert "not sound" not in shown


@pytest.mark.usefixtures("own")
def test_training_names_the_cause_after_the_first_evaluation(capsys):
    words = "train --model tiny --data mine.jsonl --reward my_rewards.py:score --steps 1 --batch 2"
    small = "--group 2 --max-tokens 8 --task.num-eval 4 --device cpu"
    assert main([*words.split(), *small.split()]) == 0

    before_the_steps = capsys.readouterr().out.split("step 1/1")[0]
    assert "str(answer)" in before_the_steps
