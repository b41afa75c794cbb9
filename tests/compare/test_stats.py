"""Intervals and tests: known values, and their level where nothing differs."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from mesotron.compare.standings import compare_with_best
from mesotron.compare.stats import bootstrap, holm, paired_test, pool_seeds
from support.report_worlds import make_final, make_record, make_standing


def answers(rng, seeds, problems, seed_spread, shift=0.0, contenders=2):
    """[K, S, P] answers; chances differ by problem and seed, the second contender by `shift`."""
    hardness = rng.normal(0.0, 1.5, problems)
    moved = rng.normal(0.0, seed_spread, (contenders, seeds, 1))
    moved[1] -= shift
    chance = 1 / (1 + np.exp(-hardness - moved))

    return (rng.random(chance.shape) < chance).astype(float)


@pytest.mark.parametrize("seed_spread", [0.0, 0.8])
def test_level_without_a_difference(seed_spread):
    rng = np.random.default_rng(0)
    times = 600
    pairs = (answers(rng, 3, 200, seed_spread) for _ in range(times))
    false = sum(paired_test(a - b).p < 0.05 for a, b in pairs) / times

    assert 0.01 < false < 0.075


def test_a_real_difference_is_found_and_its_interval_covers_it():
    rng = np.random.default_rng(0)
    tests = [
        paired_test(a - b)
        for a, b in (
            answers(
                rng,
                3,
                300,
                0.1,
                1.0,
            )
            for _ in range(200)
        )
    ]

    assert np.mean([one.p < 0.05 for one in tests]) > 0.8
    truth = np.mean([one.value for one in tests])
    assert np.mean([one.low <= truth <= one.high for one in tests]) > 0.9


def test_one_seed_is_scipys_t_test_over_problems():
    D = np.random.default_rng(0).normal(0.3, 1.0, (1, 100))
    test = paired_test(D)
    expected = stats.ttest_1samp(D[0], 0.0)

    assert test.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (test.low, test.high) == pytest.approx((interval.low, interval.high))
    assert (paired_test(np.zeros((3, 10))).p, paired_test(np.ones((3, 10))).p) == (1.0, 0.0)


def test_bootstrap_covers_seeds_and_problems():
    rng = np.random.default_rng(0)
    by_seed = np.repeat(rng.random((3, 1)), 50, axis=1)

    by_problem = np.repeat(rng.random((1, 50)), 3, axis=0)
    for X in (by_seed, by_problem):
        interval = bootstrap(X)
        assert interval.low < X.mean() - 0.02 < X.mean() + 0.02 < interval.high

    assert bootstrap(by_seed) == bootstrap(by_seed)


def rank_scores(scores):
    cells = [
        make_final(str(k), seed, per_problem=one.tolist())
        for k, of_seeds in enumerate(scores)
        for seed, one in enumerate(of_seeds)
    ]

    order = np.argsort(-scores.mean((1, 2)))
    rows = [
        make_standing(
            rank=i,
            contender=str(k),
            rate=1.0,
        )
        for i, k in enumerate(order, 1)
    ]

    compare_with_best(make_record(cells), rows)
    return rows


def test_family_level_of_six_equal_contenders():
    # The first is chosen by the scores that rank it, so all pairs are corrected for; fifteen pairs
    # reach further into the tail than the few seeds of one of them can estimate.
    rng = np.random.default_rng(0)
    times = 60
    false = 0

    unpooled = 0
    for _ in range(times):
        scores = answers(rng, 3, 200, 0.4, contenders=6)
        false += any(row.p_holm < 0.05 for row in rank_scores(scores)[1:])
        unpooled += min(holm([paired_test(a - b).p for a, b in combinations(scores, 2)])) < 0.05

    assert false / times <= 0.05
    assert false < unpooled


def test_pooled_seed_noise_is_the_residual_of_randomized_blocks():
    X = np.random.default_rng(0).random((4, 3, 50))
    M = X.mean(2)
    residual = M - M.mean(1, keepdims=True) - M.mean(0, keepdims=True) + M.mean()
    pooled = pool_seeds([a - b for a, b in combinations(X, 2)])

    assert pooled.freedom == 6
    assert pooled.variance == pytest.approx(2 * (residual**2).sum() / 6)

    D = X[0] - X[1]
    assert paired_test(D, pool_seeds([D])) == paired_test(D)  # a family of one pair


def test_pairs_with_one_seed_do_not_enter_the_pool():
    rng = np.random.default_rng(0)
    full = [a - b for a, b in combinations(rng.random((3, 2, 50)), 2)]
    begun = [rng.random((1, 50)) - 0.5 for _ in range(3)]
    pooled = pool_seeds([*full, *begun])

    assert pooled == pool_seeds(full)
    assert pooled.freedom == 2

    for D in begun:
        alone = paired_test(D)
        among = paired_test(D, pooled)
        assert among.high - among.low > alone.high - alone.low
        assert paired_test(D, pool_seeds(begun)) == alone


def test_holm_by_hand():
    assert holm([0.01, 0.02, 0.03, 0.04]) == [0.04, 0.06, 0.06, 0.06]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
