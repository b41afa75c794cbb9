"""Which evaluated checkpoint is a run's model: the rule, its state, and what readers take."""

import math
import random

import pytest

from mesotron.runs import RunFolder
from mesotron.runs.best import (
    AVERAGED,
    BestCheckpoint,
    HeldOut,
    choose_checkpoint,
    describe,
    is_better,
    outcomes_of,
)
from mesotron.runs.checkpoints import writing


def held_out(step: int, *outcomes: float) -> HeldOut:
    known = [each for each in outcomes if not math.isnan(each)]
    return HeldOut(step, sum(known) / len(known) if known else math.nan, outcomes)


def right(step: int, count: int, total: int = 20) -> HeldOut:
    return held_out(step, *([1.0] * count + [0.0] * (total - count)))


def choose(best: BestCheckpoint, *evaluations: HeldOut) -> int | None:
    for one in evaluations:
        if best.observe(one):
            best.written(one.step)

    return None if best.kept is None else best.kept.step


def test_the_rule_is_one_standard_error_of_the_paired_difference():
    rng = random.Random(0)
    num_better = 0
    for _ in range(300):
        n = rng.randint(2, 30)
        new = held_out(2, *(rng.random() for _ in range(n)))
        kept = held_out(1, *(rng.random() for _ in range(n)))

        changes = [a - b for a, b in zip(new.outcomes, kept.outcomes, strict=True)]
        mean = sum(changes) / n
        variance = sum((x - mean) ** 2 for x in changes) / (n - 1)
        expected = mean > math.sqrt(variance / n)

        assert is_better(new, kept) == expected
        num_better += expected

    assert 20 < num_better < 280


@pytest.mark.parametrize(
    ("gained", "lost", "expected"),
    [(0, 0, False), (1, 0, False), (2, 0, True), (2, 1, False), (3, 1, False), (4, 1, True)],
)
def test_ties_keep_the_earlier_one(gained, lost, expected):
    before = [0.0] * gained + [1.0] * lost + [1.0, 0.0]
    after = [1.0] * gained + [0.0] * lost + [1.0, 0.0]
    assert is_better(held_out(2, *after), held_out(1, *before)) == expected


def test_a_slow_rise_counts_once_its_sum_is_clear_and_a_fall_never_does():
    rise = [right(step, step) for step in range(5, 12)]
    assert choose(BestCheckpoint(), *rise[:2]) == 5
    assert choose(BestCheckpoint(), *rise) == 11

    fall = [right(20 - step, step) for step in range(15, 5, -1)]
    assert choose(BestCheckpoint(), *fall) == 5


def test_scores_that_are_not_known_are_never_chosen():
    nan = math.nan
    best = BestCheckpoint()
    assert choose(best, held_out(1, nan, nan, nan)) is None
    assert best.record()["step"] is None

    assert choose(best, held_out(2, 0.0, nan, 0.5), held_out(3, nan, nan, nan)) == 2
    assert choose(best, held_out(4, 1.0, 1.0, nan)) == 2  # one problem in common
    assert choose(best, held_out(5, 1.0, nan, 1.5)) == 5
    assert best.evaluations == 5


def test_noise_of_an_equal_model_is_seldom_better():
    rng = random.Random(1)
    replaced = 0
    for _ in range(1000):
        pair = [held_out(k, *(float(rng.random() < 0.5) for _ in range(100))) for k in (1, 2)]
        replaced += is_better(pair[1], pair[0])

    assert 100 < replaced < 180  # one standard error: 16 in 100


def test_the_choice_is_made_when_its_checkpoint_is_written():
    best = BestCheckpoint()
    choose(best, right(1, 2))

    assert best.observe(right(2, 9))
    assert best.name == "checkpoint-1"
    best.undone()  # a rollback: the weights of step 2 are gone
    best.written(2)
    assert best.name == "checkpoint-1"

    assert best.observe(right(3, 9))
    best.written(3)
    assert best.name == "checkpoint-3"


def test_a_resumed_choice_goes_on_as_if_never_stopped(tmp_path):
    evaluations = [right(1, 2), held_out(2, *[math.nan] * 20), right(3, 9), right(4, 8)]
    whole = BestCheckpoint()
    choose(whole, *evaluations)

    for stop in range(5):
        first = BestCheckpoint()
        choose(first, *evaluations[:stop])
        for step in range(1, 5):
            (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)

        again = BestCheckpoint()
        again.load(first.state(), tmp_path)
        assert choose(again, *evaluations[stop:]) == 3
        assert again.state() == whole.state()

    (tmp_path / "checkpoint-3").rmdir()
    again.load(whole.state(), tmp_path)
    assert (again.kept, again.evaluations) == (None, 4)
    again.load(None, tmp_path)  # a checkpoint of an older version
    assert again.state() == BestCheckpoint().state()


def test_outcomes_are_right_answers_or_rewards():
    rows = [{"correct": True, "reward": 0.5}, {"correct": False, "reward": None}]
    assert outcomes_of({"transcripts": rows}) == (1.0, 0.0)
    reward, unknown = outcomes_of({"transcripts": rows, "measure": "reward"})
    assert reward == 0.5
    assert math.isnan(unknown)


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "a", {"steps": 3}, {})
    for step in (1, 2, 3):
        with writing(run.checkpoints, step) as draft:
            (draft / "weights").write_text(str(step))

    return run


def test_readers_take_the_best_else_the_newest_and_say_so(run):
    assert choose_checkpoint(run, "a").checkpoint.name == "checkpoint-3"  # an older run
    assert choose_checkpoint(run, "a").note is None

    run.save("best", {"step": None, "evaluations": 1})
    assert choose_checkpoint(run, "a").checkpoint.name == "checkpoint-3"

    best = BestCheckpoint()
    choose(best, right(1, 2), right(2, 9), right(3, 1))
    run.save("best", best.record())
    chosen = choose_checkpoint(run, "a")
    assert chosen.weights.name == "checkpoint-2"
    for shown in ("checkpoint-2", "0.450", "3 evaluations", "checkpoint-3"):
        assert shown in chosen.note

    (run.checkpoints / "checkpoint-2" / "weights").write_text("changed")
    damaged = choose_checkpoint(run, "a")
    assert (damaged.checkpoint.name, damaged.record) == ("checkpoint-3", None)
    assert "weights" in damaged.note


def test_of_an_averaged_run_the_average_is_taken(run):
    with writing(run.checkpoints, 2) as draft:
        (draft / AVERAGED).mkdir()
        (draft / AVERAGED / "weights").write_text("mean")

    run.save("best", {"step": 2, "score": 0.5, "problems": 4, "evaluations": 3})
    assert choose_checkpoint(run, "a").weights.name == AVERAGED


@pytest.mark.parametrize("step", ["../../elsewhere", 2.5, True, [2]])
def test_a_record_of_others_names_no_other_place(run, step):
    run.save("best", {"step": step, "score": 0.5, "problems": 4, "evaluations": 3})
    with pytest.raises(ValueError, match=r"best\.json"):
        choose_checkpoint(run, "a")


@pytest.mark.parametrize(
    ("record", "last", "text"),
    [
        (
            {},
            9,
            "checkpoint-6, the best of 3 evaluations (accuracy 0.500 on 40 problems); "
            "the last is checkpoint-9",
        ),
        (
            {"measure": "reward", "fresh": {"value": 0.25, "problems": 8}},
            6,
            "checkpoint-6, the best of 3 evaluations (mean reward 0.500 on 40 problems, "
            "0.250 on 8 others); and the last",
        ),
    ],
)
def test_a_choice_in_a_line(record, last, text):
    chosen = {"step": 6, "score": 0.5, "problems": 40, "evaluations": 3, **record}
    assert describe(chosen, last) == text
