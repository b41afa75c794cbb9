"""Chance: hardly any flat run is stopped, and a real loss is still seen."""

import itertools
import random

import numpy as np
import pytest

from mesotron.watch import Engine

few_or_all = pytest.mark.parametrize("runs", [2, pytest.param(40, marks=pytest.mark.slow)])


def is_stopped(rows) -> bool:
    engine = Engine()
    for row in rows:
        for event in engine.update(row):
            if event.severity == "stop":
                return True

    return False


def evaluations(scores, problems=None):
    """A row for each score of an evaluation, every ten steps."""
    for k, score in enumerate(scores):
        row = {"step": 10 * k, "eval/greedy": float(score)}
        if problems is not None:
            row["eval/problems"] = float(problems)
        yield row


@few_or_all
def test_chance_in_evaluations_stops_hardly_any_flat_run(runs):
    draw = np.random.default_rng(0)
    stopped = []
    for problems in (100, 200):
        for accuracy in (0.2, 0.3, 0.4):
            # Independent draws: more noise than the same problems at a fixed policy have.
            right = draw.binomial(problems, accuracy, size=(runs, 200))
            scores = right / problems
            for run in scores:
                stopped.append(is_stopped(evaluations(run, problems)))
            for run in scores[: runs // 2]:
                stopped.append(is_stopped(evaluations(run[:50])))

    assert sum(stopped) <= 0.02 * len(stopped)


@pytest.mark.parametrize("known", [{}, {"eval/problems": 100.0}])
def test_chance_in_evaluations_of_a_reward_stops_hardly_any_flat_run(known):
    def rows(scores):  # no shares of right answers
        for k, score in enumerate(scores):
            yield {"step": 10 * k, "eval/reward": float(score)} | known

    draw = np.random.default_rng(0)
    num_stopped = 0
    for mean, deviation in ((-1, 0.15), (2, 0.3), (50, 5)):
        for _ in range(10):
            scores = draw.normal(mean, deviation, size=20)
            num_stopped += is_stopped(rows(scores))

    assert num_stopped <= 2
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
    stopped = []
    for prompts, accuracy in itertools.product((8, 16), (0.15, 0.3, 0.5)):
        for _ in range(runs):
            run = flat_run(draw, prompts, accuracy, rows)
            stopped.append(is_stopped(run))

    assert sum(stopped) <= 0.02 * len(stopped)


@pytest.mark.parametrize(("end", "low", "high"), [(0.5, 0, 1), (0.05, 9, 10)])
def test_rewards_of_two_prompts_per_step(end, low, high):
    """One row tells next to nothing: noise is ignored and a decline is seen."""
    stopped = 0
    for seed in range(10):
        draw = random.Random(seed)
        levels = [0.5] * 120 + [end] * 80
        rows = []
        for step, level in enumerate(levels):
            reward = level + draw.gauss(0, 0.25)
            rows.append({"step": step, "reward": min(max(reward, 0.0), 1.0)})

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
