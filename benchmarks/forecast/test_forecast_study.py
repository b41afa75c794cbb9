"""The study's parts: outcomes by the rule, halves by source, fits that recover what was planted."""

import math
import random

import numpy as np
import pytest

from benchmarks.forecast.cases import cases_of, outcome_of
from benchmarks.forecast.fit import fit, quantile_regression, weighted_quantile
from benchmarks.forecast.judge import counted, figures, judge
from benchmarks.forecast.runs import KnownRun, half_of, rows_of, tens
from benchmarks.watch import public_runs


def noisy(levels, noise=0.01, seed=0):
    draws = random.Random(seed)
    return np.array([level + draws.gauss(0, noise) for level in levels])


@pytest.mark.parametrize(
    ("levels", "outcome"),
    [
        ([0.2 + 0.006 * k for k in range(100)], "learn"),
        ([0.5] * 100, "plateau"),
        ([0.6] * 50 + [0.1] * 50, "collapse"),
        ([0.5] * 90 + [0.53] * 10, "plateau"),  # less than a twentieth
        ([k / 10 for k in range(100)], "learn"),  # without bounds
        ([k / 10 - 20 for k in range(100)], "learn"),
    ],
)
def test_outcomes(levels, outcome):
    assert outcome_of(noisy(levels), 20) == outcome


def test_a_reward_with_nothing_to_lose_does_not_collapse():
    assert outcome_of(np.array([0.04, 0.02] * 25 + [0.0] * 50), 20) == "plateau"


def test_noise_is_no_learning():
    assert outcome_of(noisy([0.4] * 20 + [0.47] * 20, noise=0.3), 20) == "plateau"
    assert outcome_of(noisy([0.4] * 20 + [0.47] * 20, noise=0.01), 20) == "learn"


def test_halves_are_those_of_the_watch():
    assert half_of("watch/tuning") == "fit"
    assert half_of("watch/held_out") == "report"
    for source in ("a/b", "c/d", "e/f", "smollm2/results"):
        is_tuning = public_runs.half_of(source) == "tuning"
        assert half_of(source) == ("fit" if is_tuning else "report")


def test_rows_of_curves():
    rows = rows_of({"reward": tens([0.1, None, 0.3])}, [[0, 0.2], [20, 0.4]])

    assert rows == (
        {"step": 0.0, "eval/greedy": 0.2},
        {"step": 10.0, "reward": 0.1},
        {"step": 20.0, "eval/greedy": 0.4},
        {"step": 30.0, "reward": 0.3},
    )


def test_quantile_regression_recovers_quantiles():
    draws = np.random.default_rng(0)
    x = draws.uniform(0.5, 2, 2000)
    y = x * draws.normal(0.3, 1.0, 2000)
    weights = np.full(2000, 1 / 2000)

    (median,) = quantile_regression(x[:, None], y, weights, 0.5)
    (high,) = quantile_regression(x[:, None], y, weights, 0.9)
    assert median == pytest.approx(0.3, abs=0.1)
    assert high == pytest.approx(0.3 + 1.2816, abs=0.15)


def test_weighted_quantile():
    pairs = [(float(k), 1.0) for k in range(1, 11)]
    assert weighted_quantile(pairs, 0.89) == 9.0
    assert weighted_quantile([*pairs, (100.0, 90.0)], 0.5) == 100.0


def world(count=24):
    """Runs of several sources that rise, stay and fall."""
    runs = []
    for k in range(count):
        rise = (0.5 * (1 - math.exp(-step / 20)) for step in range(60))
        if k % 3 == 0:
            levels = [0.3 + gain for gain in rise]
        elif k % 3 == 1:
            levels = [0.4] * 60
        else:
            levels = [0.6] * 8 + [max(0.6 - 0.03 * step, 0.05) for step in range(52)]

        values = noisy(levels, seed=k)
        rows = []
        for step, value in enumerate(values, 1):
            rows.append({"step": float(step), "reward": float(value), "eval/greedy": float(value)})
        runs.append(
            KnownRun(source=f"s/{k // 4}", name=str(k), rows=tuple(rows), is_public=k % 2 == 0)
        )

    return runs


def test_fitted_forecasts_know_their_world():
    cases = [case for run in world() for case in cases_of(run, (0.2, 0.5))]
    model = fit(cases)
    judged = [judge(case, model) for case in cases]
    result = figures([one for one in judged if one.share == 0.5])

    assert result["runs"] == 24
    assert result["inside"]["value"] >= 0.7
    assert result["hits"]["value"] > result["naive hits"]["value"]
    assert set(model["gain"]) == {"low", "middle", "high", "widen_low", "widen_high"}


def test_counted():
    assert counted([]) is None
    share = counted([True, False, True, True])
    assert share["low"] < share["value"] == 0.75 < share["high"]
