"""Chance: hardly any flat run is stopped, and a real loss is still seen."""

import random

import numpy as np
import pytest

from mesotron.watch import Engine

few_or_all = pytest.mark.parametrize("runs", [2, pytest.param(40, marks=pytest.mark.slow)])


def is_stopped(rows) -> bool:
    engine = Engine()
    return any(event.severity == "stop" for row in rows for event in engine.update(row))


def evaluations(scores, problems=None):
    known = {} if problems is None else {"eval/problems": float(problems)}
    return ({"step": 10 * k, "eval/greedy": float(x)} | known for k, x in enumerate(scores))


@few_or_all
def test_chance_in_evaluations_stops_hardly_any_flat_run(runs):
    draw = np.random.default_rng(0)
    stopped = []
    for problems in (100, 200):
        for accuracy in (0.2, 0.3, 0.4):
            # Independent draws: more noise than the same problems at a fixed policy have.
            scores = draw.binomial(problems, accuracy, size=(runs, 200)) / problems
            stopped += [is_stopped(evaluations(run, problems)) for run in scores]
            stopped += [is_stopped(evaluations(run)) for run in scores[: runs // 2, :50]]

    assert sum(stopped) <= 0.02 * len(stopped)


@pytest.mark.parametrize("known", [{}, {"eval/problems": 100.0}])
def test_chance_in_evaluations_of_a_reward_stops_hardly_any_flat_run(known):
    def rows(scores):  # no shares of right answers
        return [{"step": 10 * k, "eval/reward": float(x)} | known for k, x in enumerate(scores)]

    draw = np.random.default_rng(0)
    stopped = []
    for mean, deviation in ((-1, 0.15), (2, 0.3), (50, 5)):
        stopped += [is_stopped(rows(draw.normal(mean, deviation, size=20))) for _ in range(10)]

    assert sum(stopped) <= 2
    assert is_stopped(rows([2.0, 2.02, 1.99, 2.01, 2.0, 2.01, 0.4, 0.39, 0.41]))


def flat_run(draw, prompts, accuracy, rows):
    """Rows in which nothing changes but the prompts, easy and hard ones."""
    easy = draw.beta(1.2 * accuracy, 1.2 * (1 - accuracy), size=(rows, prompts))
    right = draw.binomial(8, easy) / 8
    correct = right.mean(1)
    wrong = (right == 0).mean(1)
    alike = ((right == 0) | (right == 1)).mean(1)

    top = draw.binomial(8 * prompts, 0.15, size=rows) / (8 * prompts)
    for k in range(rows):
        yield {
            "step": k,
            "reward": 0.1 + correct[k],
            "facts/correct": correct[k],
            "groups/zero_signal": alike[k],
            "groups/all_wrong": wrong[k],
            "answers/top_share": top[k],
        }


@pytest.mark.parametrize(
    ("runs", "rows"), [(1, 150), pytest.param(40, 2000, marks=pytest.mark.slow)]
)
def test_prompts_of_unequal_difficulty_stop_hardly_any_flat_run(runs, rows):
    draw = np.random.default_rng(0)
    kinds = [(prompts, accuracy) for prompts in (8, 16) for accuracy in (0.15, 0.3, 0.5)]
    stopped = [is_stopped(flat_run(draw, *kind, rows)) for kind in kinds for _ in range(runs)]

    assert sum(stopped) <= 0.02 * len(stopped)


@pytest.mark.parametrize(("end", "low", "high"), [(0.5, 0, 1), (0.05, 9, 10)])
def test_rewards_of_two_prompts_per_step(end, low, high):
    """One row tells next to nothing: noise is ignored and a decline is seen."""
    stopped = 0
    for seed in range(10):
        draw = random.Random(seed)
        levels = [0.5] * 120 + [end] * 80
        rows = [
            {"step": k, "reward": min(max(level + draw.gauss(0, 0.25), 0.0), 1.0)}
            for k, level in enumerate(levels)
        ]
        stopped += is_stopped(rows)

    assert low <= stopped <= high


@pytest.mark.parametrize("num_before", [5, 100])
def test_losing_half_of_the_accuracy_stops_a_run_of_any_length(num_before):
    draw = np.random.default_rng(0)
    for _ in range(10):
        before = draw.binomial(200, 0.4, size=num_before) / 200
        after = draw.binomial(200, 0.2, size=3) / 200
        assert is_stopped(evaluations([*before, *after], 200))


@pytest.mark.parametrize(("problems", "stopped"), [(20, False), (400, True)])
def test_a_few_problems_more_or_less_stop_no_run(problems, stopped):
    assert is_stopped(evaluations((0.4, 0.45, 0.45, 0.3), problems)) == stopped
