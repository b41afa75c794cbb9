"""Forecasts: what is said of runs whose end is plain, and when nothing is."""

import json
import math
import random
from pathlib import Path

import pytest

from mesotron.watch.forecast import OUTCOMES, Interval, fitted, forecast, quantiles

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rows_of(rewards, name="reward", **more):
    """A row for each reward, from step 1 on, with the same other numbers in all of them."""
    return [{"step": k + 1, name: reward, **more} for k, reward in enumerate(rewards)]


def noisy(levels, noise=0.02, seed=0):
    draws = random.Random(seed)
    return [level + draws.gauss(0, noise) for level in levels]


def rising(count=30, start=0.2, gain=0.01):
    return noisy([start + gain * k for k in range(count)])


def falling(count=30):
    high = [0.7] * (count // 2)
    return noisy(high + [max(0.7 - 0.06 * k, 0.05) for k in range(count - len(high))])


# What is plain


def test_a_run_that_rises_will_learn():
    given = forecast(rows_of(rising()), steps=150)

    assert given.outcome == "learn"
    assert given.reward.low < given.reward.value < given.reward.high
    assert given.reward.value > given.present
    assert not given.is_hopeless


def test_a_flat_run_stays_on_its_plateau():
    given = forecast(rows_of(noisy([0.5] * 60)), steps=90)

    assert given.outcome == "plateau"
    assert given.reward.low < 0.5 < given.reward.high
    assert abs(given.reward.value - 0.5) < 0.05


def test_a_run_that_falls_collapses():
    given = forecast(rows_of(falling()), steps=60)

    assert given.outcome == "collapse"
    assert given.reward.value < given.present + given.least_gain


def test_chances_are_of_all_outcomes():
    given = forecast(rows_of(rising()), steps=150)

    assert set(given.probabilities) == set(OUTCOMES)
    assert sum(given.probabilities.values()) == pytest.approx(1)


def test_the_interval_narrows_toward_the_end():
    rows = rows_of(noisy([0.5] * 60))
    widths = []
    for steps in (65, 120, 600):
        end = forecast(rows, steps=steps).reward
        widths.append(end.high - end.low)

    assert widths == sorted(widths)
    assert widths[0] < widths[2]


# Scales


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_rewards_without_bounds_scale(factor):
    rewards = [3 * reward for reward in rising()]
    one = forecast(rows_of(rewards), steps=150)
    other = forecast(rows_of([factor * reward + 0.0 for reward in rewards]), steps=150)

    if factor > 1:  # one that stays within 0 to 1 may be a share
        assert other.outcome == one.outcome
        assert other.reward.value == pytest.approx(factor * one.reward.value)
        assert other.reward.high == pytest.approx(factor * one.reward.high)
    assert other.reward.low >= 0  # nothing below 0 was seen


def test_negative_rewards():
    rewards = [reward - 5 for reward in rising()]
    given = forecast(rows_of(rewards), steps=150)

    assert given.present < 0
    assert given.reward.low < given.reward.value < given.reward.high


@pytest.mark.parametrize(("level", "is_bounded"), [(0.97, True), (0.6, False), (1.07, False)])
def test_rewards_near_1_end_at_1_at_most(level, is_bounded):
    rows = [{"step": k, "reward": level + 0.01 * (-1) ** k} for k in range(20)]
    end = forecast(rows, steps=200).reward

    assert end.low <= end.value <= end.high
    assert (end.high <= 1) == is_bounded


# What is not known


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_rewards(count):
    given = forecast(rows_of(rising(count)), steps=100)

    assert given.outcome == "unknown"
    assert given.reward is None
    assert given.why
    assert not given.is_hopeless


def test_the_planned_end_is_reached():
    assert forecast(rows_of(rising(30)), steps=30).outcome == "unknown"


def test_a_constant_reward():
    given = forecast(rows_of([0.0] * 40, **{"groups/zero_signal": 1.0}), steps=400)

    assert given.outcome == "unknown"
    assert not given.is_hopeless


def test_rows_that_are_not_finite_are_left_out():
    rewards = rising()
    whole = forecast(rows_of(rewards), steps=150)
    rewards[7] = math.nan
    rewards[11] = math.inf
    given = forecast(rows_of(rewards), steps=150)

    assert given.outcome == whole.outcome
    assert given.reward.value == pytest.approx(whole.reward.value, abs=0.05)


@pytest.mark.parametrize("count", [1, 20])
def test_a_run_that_ends_in_nan_is_unknown(count):
    rewards = [*rising(), *[math.nan] * count]

    assert forecast(rows_of(rewards), steps=150).outcome == "unknown"


def test_without_a_planned_end_it_is_guessed():
    given = forecast(rows_of(rising(30)))

    assert given.is_guess
    assert given.steps == 60
    assert not forecast(rows_of(rising(30)), steps=60).is_guess


# Held-out scores


def test_a_log_of_evaluations_only():
    given = forecast(rows_of(rising(), name="eval/accuracy"), steps=150)

    assert given.outcome == "learn"
    assert given.reward is None
    assert given.heldout.value > given.present
    assert given.heldout.high <= 1


def test_held_out_scores_beside_rewards():
    rows = rows_of(rising())
    rows[9]["eval/greedy"] = 0.3
    rows[29]["eval/greedy"] = 0.4
    given = forecast(rows, steps=150)

    assert given.heldout.low < given.heldout.value < given.heldout.high
    assert given.heldout.value > 0.4
    assert forecast(rows_of(rising()), steps=150).heldout is None


# What limits it, and what it costs


def test_groups_without_a_signal():
    rewards = noisy([0.05] * 60, noise=0.01)
    wrong = {"groups/zero_signal": 0.9, "groups/all_wrong": 0.9, "groups/all_right": 0.0}
    right = {"groups/zero_signal": 0.9, "groups/all_wrong": 0.0, "groups/all_right": 0.9}

    hard = forecast(rows_of(rewards, **wrong), steps=90).limits[0]
    easy = forecast(rows_of(rewards, **right), steps=90).limits[0]
    assert hard.name == easy.name == "signal"
    assert hard.remedy != easy.remedy


@pytest.mark.parametrize(
    ("metric", "value", "name"),
    [("facts/truncated", 0.9, "truncation"), ("facts/formatted", 0.2, "format")],
)
def test_limits_by_share(metric, value, name):
    given = forecast(rows_of(rising(), **{metric: value}), steps=90)
    assert name in [limit.name for limit in given.limits]

    given = forecast(rows_of(rising(), **{metric: 1 - value}), steps=90)
    assert name not in [limit.name for limit in given.limits]


def test_hours_and_dollars_to_the_end():
    rows = rows_of(rising(30), **{"time/step": 36.0})

    given = forecast(rows, steps=130, price=2.0)
    assert given.hours == pytest.approx(1.0)
    assert given.dollars == pytest.approx(2.0)
    assert forecast(rows, steps=130).dollars is None
    assert forecast(rows_of(rising(30)), steps=130, price=2.0).hours is None

    long = forecast(rows_of(rising(30), **{"time/step": 3600.0}), steps=1530, price=2.0)
    assert "1,500 hours and $3,000.00" in long.text()


# Hopeless


def hopeless_rows(**more):
    return rows_of(noisy([0.3] * 200, noise=0.004), **more)


def test_hopeless_without_a_signal():
    rows = hopeless_rows(**{"groups/zero_signal": 0.95})

    assert forecast(rows, steps=205).is_hopeless
    assert not forecast(rows, steps=2000).is_hopeless  # the interval reaches a gain


def test_a_flat_run_without_a_lasting_cause_is_not_hopeless():
    assert not forecast(hopeless_rows(), steps=205).is_hopeless


def test_a_cause_that_time_mends_is_not_hopeless():
    rows = hopeless_rows()
    for k, row in enumerate(rows):
        row["facts/truncated"] = 0.9 - 0.002 * k

    assert not forecast(rows, steps=205).is_hopeless


# Its numbers


def test_records_are_plain_json():
    rows = rows_of(rising(), **{"groups/zero_signal": 0.9, "eval/greedy": 0.3})
    record = json.loads(json.dumps(forecast(rows, steps=150).to_record(), allow_nan=False))

    assert record["outcome"] == "learn"
    assert record["record"]["runs"] >= 60
    assert f"{record['record']['hits']:.0%}" in record["text"]


def test_quantiles_never_cross():
    crossed = {"low": {"x": 1.0}, "middle": {"x": 0.0}, "high": {"x": -1.0}}
    model = crossed | {"widen_low": 1.0, "widen_high": 1.0}

    assert quantiles(model, {"x": 1.0}) == Interval(value=0.0, low=0.0, high=0.0)


def test_the_package_has_the_numbers_of_the_study():
    from benchmarks._lib.results import read_json
    from benchmarks.forecast.judge import record_of

    result = read_json(BENCHMARKS / "forecast/result.json.gz")
    crossed = read_json(BENCHMARKS / "forecast/crossed.json")
    record = record_of(result["summary"], crossed)
    assert fitted() == result["model"] | {"record": record}
