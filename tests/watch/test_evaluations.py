"""Chance under the watch: it stops hardly any flat run, and what is really lost is still seen."""

import json
import math

import numpy as np
import pytest

from mesotron.watch import Engine
from mesotron.watch.tracks import Track

RUNS, EVALUATIONS, ROWS = 40, 200, 2000


def is_stopped(scores, problems=None):
    """Whether a run with these evaluations, ten steps apart, is stopped."""
    engine = Engine()
    known = {} if problems is None else {"eval/problems": float(problems)}
    rows = ({"step": 10 * k, "eval/greedy": float(x)} | known for k, x in enumerate(scores))
    return any(event.severity == "stop" for row in rows for event in engine.update(row))


def test_chance_stops_hardly_any_flat_run():
    # Each evaluation throws anew: more noise than the same problems at a fixed policy have.
    draw, stopped, blind = np.random.default_rng(0), [], []
    for problems in (100, 200):
        for accuracy in (0.2, 0.3, 0.4):
            scores = draw.binomial(problems, accuracy, size=(RUNS, EVALUATIONS)) / problems
            stopped += [is_stopped(run, problems) for run in scores]
            # Where nothing says of how many problems.
            blind += [is_stopped(run) for run in scores[:20, :50]]
    assert sum(stopped) <= 0.02 * len(stopped)
    assert sum(blind) <= 0.02 * len(blind)


def is_flat_run_stopped(draw, prompts, accuracy):
    """Whether a run is stopped in which nothing changes but the prompts, easy ones and hard."""
    easy = draw.beta(1.2 * accuracy, 1.2 * (1 - accuracy), size=(ROWS, prompts))
    right = draw.binomial(8, easy) / 8
    correct, wrong, alike = (
        right.mean(1),
        (right == 0).mean(1),
        ((right == 0) | (right == 1)).mean(1),
    )
    top = draw.binomial(8 * prompts, 0.15, size=ROWS) / (8 * prompts)
    engine = Engine()
    for k in range(ROWS):
        row = {
            "step": k, "reward": 0.1 + correct[k], "facts/correct": correct[k],
            "groups/zero_signal": alike[k], "groups/all_wrong": wrong[k],
            "answers/top_share": top[k],
        }  # fmt: skip
        if any(event.severity == "stop" for event in engine.update(row)):
            return True
    return False


@pytest.mark.parametrize("runs", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_prompts_of_unequal_difficulty_stop_hardly_any_flat_run(runs):
    draw = np.random.default_rng(0)
    kinds = [(prompts, accuracy) for prompts in (8, 16) for accuracy in (0.15, 0.3, 0.5)]
    stopped = [is_flat_run_stopped(draw, *kind) for kind in kinds for _ in range(runs)]
    assert sum(stopped) <= max(0.02 * len(stopped), 1)


@pytest.mark.parametrize("evaluations", [5, 100])
def test_half_of_the_accuracy_lost_stops_a_run_however_long(evaluations):
    draw = np.random.default_rng(0)
    for _ in range(20):
        before = draw.binomial(200, 0.4, size=evaluations) / 200
        assert is_stopped([*before, *draw.binomial(200, 0.2, size=3) / 200], 200)


def test_the_best_evaluation_alone_is_luck():
    track = Track(warmup=1, window=1, pooled=True)
    for score in (0.3, 0.32, 0.5, 0.31, 0.3):
        track.add(score)
    assert track.window(0).reference("best") == pytest.approx((0.32 + 0.5 + 0.31) / 3)
    assert track.window(1).now == pytest.approx((0.5 + 0.31 + 0.3) / 3)
    again = Track(warmup=1, window=1, pooled=True)
    again.load_state(json.loads(json.dumps(track.state())))
    for scale in (0, 1):
        assert again.window(scale).reference("best") == track.window(scale).reference("best")
        assert again.window(scale).now == track.window(scale).now
    assert again.num_seen == 5


def test_the_noise_of_an_evaluation_is_that_of_its_problems():
    track = Track(warmup=1, window=1)
    for accuracy in (0.26, 0.45, 0.44):  # learning is no noise
        track.add(accuracy)
    assert track.noise > 0.1
    engine = Engine()
    for step, accuracy in enumerate((0.26, 0.45, 0.44)):
        engine.update({"step": step, "eval/greedy": accuracy, "eval/problems": 100})
    assert engine.tracks["heldout"].noise == pytest.approx(math.sqrt(0.45 * 0.55 / 100))
    again = Engine()
    again.load_state(json.loads(json.dumps(engine.state())))
    assert again.tracks["heldout"].noise == engine.tracks["heldout"].noise


@pytest.mark.parametrize(("problems", "stopped"), [(20, False), (400, True)])
def test_a_few_problems_more_or_less_stop_no_run(problems, stopped):
    engine, found = Engine(), []
    for step, accuracy in enumerate((0.4, 0.45, 0.45, 0.3)):
        found += engine.update({"step": step, "eval/greedy": accuracy, "eval/problems": problems})
    assert [event.severity for event in found if event.detector == "accuracy_collapse"] == (
        ["stop"] if stopped else []
    )


def test_a_fall_in_the_first_rows_is_not_forgotten():
    track = Track(warmup=10, window=5)
    for value in [0.4] * 10 + [0.0] * 60:
        track.add(value)
    long = track.window(1)
    assert long.best < 0.4
    assert long.reference("best") == pytest.approx(0.4)
