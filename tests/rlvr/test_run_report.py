"""The comparison of a run's two evaluations, and the lines of its report."""

from typing import Any

import pytest
from rich.console import Console

from mesotron.rlvr.run_report import (
    best_lines,
    compare,
    curve_lines,
    explain_best,
    headline,
    indented,
    score_rows,
    show,
    watch_lines,
)


def transcript(number: int, correct: bool, reward: float | None = None) -> dict[str, Any]:
    return {
        "id": str(number),
        "question": f"What is {number}?",
        "gold": "7",
        "completion": "seven",
        "answer": "7",
        "correct": correct,
        "correct_unformatted": correct,
        "truncated": False,
        "reward": reward,
    }


def evaluation(right: list[bool], measure: str = "accuracy", lenient: bool = True) -> Any:
    value = sum(right) / len(right)
    score = {"value": value, "low": value - 0.125, "high": value + 0.125}
    transcripts = [transcript(k, is_right, float(is_right)) for k, is_right in enumerate(right)]
    greedy = {"strict": score, "reward": score, "lenient": score if lenient else None}
    return {
        "problems": len(right),
        "measure": measure,
        "findings": ["a finding"],
        "transcripts": transcripts,
        "greedy": greedy,
    }


BEFORE = evaluation([True, False, False, False])
AFTER = evaluation([False, True, True, True])


def test_problems_are_compared_one_by_one():
    result = compare(BEFORE, AFTER)
    assert (result["gained"], result["lost"]) == (3, 1)
    assert result["gain"]["value"] == 0.5
    assert result["before"]["value"] == 0.25
    assert result["after"]["value"] == 0.75
    assert result["lenient"]["after"]["value"] == 0.75
    assert (result["problems"], result["findings"]) == (4, ["a finding"])

    turned = {**AFTER, "transcripts": AFTER["transcripts"][::-1]}
    assert compare(BEFORE, turned)["gained"] == 3  # by their names, not their order


def test_a_reward_has_no_gains_and_losses():
    old, new = ([True, False], [True, True])
    result = compare(evaluation(old, "reward", False), evaluation(new, "reward", False))
    assert (result["measure"], result["gain"]["value"]) == ("reward", 0.5)
    assert not {"lenient", "gained", "lost"} & result.keys()


def test_without_a_score_there_is_no_result():
    unknown = {**AFTER, "greedy": {**AFTER["greedy"], "strict": None}}
    for old, new in ((BEFORE, unknown), (unknown, AFTER)):
        result = compare(old, new)
        assert "gain" not in result
        assert score_rows(result) == []
        assert headline(result).startswith("No result")


@pytest.mark.parametrize(
    ("measure", "count", "text"),
    [
        ("accuracy", 4, "Greedy accuracy on 4 held-out problems"),
        ("reward", 1, "Mean reward on 1 held-out problem"),
    ],
)
def test_the_headline_names_measure_and_problems(measure, count, text):
    assert headline({"gain": {}, "measure": measure, "problems": count}) == text


def test_lines_of_the_table():
    strict, lenient = score_rows(compare(BEFORE, AFTER))
    assert strict[1:3] == ["0.250 [0.125, 0.375]", "0.750 [0.625, 0.875]"]
    assert strict[3].startswith("0.500 [")
    assert lenient[1:] == ["0.250 [0.125, 0.375]", "0.750 [0.625, 0.875]", ""]

    old, new = evaluation([False], "reward", False), evaluation([True], "reward", False)
    (line,) = score_rows(compare(old, new))
    assert line[0] == "mean reward"


def best(evaluations: int = 3, score: float = 0.75, **more: Any) -> dict[str, Any]:
    return {
        "step": 6,
        "evaluations": evaluations,
        "problems": 4,
        "score": score,
        "measure": "accuracy",
        **more,
    }


def test_the_best_checkpoint_stands_beside_the_last_and_the_start():
    fresh = {"value": 0.5, "low": 0.25, "high": 0.75, "problems": 9}
    text = "\n".join(best_lines(best(fresh=fresh), compare(BEFORE, AFTER), 8))
    assert "step 6, the best of 3" in text
    assert "4, which chose it" in text
    assert "9 others" in text
    assert "0.500 [0.250, 0.750]" in text
    assert "step 8, the last" in text
    assert "the start" in text
    assert "others" not in "\n".join(best_lines(best(), {"problems": 4}, 8))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (best(evaluations=1), "only one"),
        (best(fresh={"value": 0.5}), "that on the others is not"),
        (best(), "no other held-out problems"),
        (best(score=0.25), "better than the start (0.250)"),
    ],
)
def test_what_a_chosen_score_means(record, said):
    result = compare(BEFORE, AFTER)
    assert said in explain_best(record, result)
    others = {"only one", "is not", "no other", "than the start"} - {said}
    text = explain_best(best(evaluations=1), {})
    assert not any(other in text for other in others - {"only one"})


def test_a_better_score_than_the_start_is_not_doubted():
    assert "than the start" not in explain_best(best(), compare(BEFORE, AFTER))


def test_only_columns_that_a_run_has_are_shown():
    assert curve_lines([{"loss": 1.0}]) == []
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "entropy": 1.0}, {"step": 3}]
    text = "\n".join(curve_lines(rows))
    assert "0.750" in text
    assert "entropy" in text
    assert "formatted" not in text


def test_the_watchs_lines_have_its_verdict_and_the_forecast():
    assert watch_lines([], []) == []
    rows = [{"step": k, "reward": 0.5, "loss": 0.1} for k in range(1, 12)]
    event = {"kind": "forecast", "text": "it will learn", "step": 5}
    lines = watch_lines(rows, [event, {"kind": "other", "text": "no", "step": 6}])
    assert "## The watch" in lines
    assert "\nit will learn" in lines
    assert "\nno" not in lines


def test_texts_are_indented_as_code():
    assert indented("a\nb") == "    a\n    b"
    assert indented("") == "    (nothing)"


@pytest.mark.parametrize(("number", "is_share"), [(4, False), (5, True)])
def test_shown_problems_stand_for_more(number, is_share):
    old = evaluation([False] * number)
    new = evaluation([True] * number)
    console = Console(record=True, width=200)
    show(old, new, compare(old, new), console)
    text = console.export_text()
    assert ("in these proportions" in text) is is_share
    assert "note: a finding" in text
    assert "Greedy accuracy" in text


def test_rewards_have_no_sentence_of_right_answers():
    old = evaluation([False] * 9, "reward", False)
    console = Console(record=True, width=200)
    show(old, old, compare(old, old), console)
    text = console.export_text()
    assert "proportions" not in text
    assert "mean reward" in text
