"""Intervals and tests of a tournament: known values, and their level where nothing differs."""

from itertools import combinations

import numpy as np
import pytest

from mesotron.compare.inference import (
    bootstrap,
    holm,
    paired_test,
    pool_seeds,
    t_quantile,
    t_tail,
)
from mesotron.compare.record import Cell, Tournament
from mesotron.compare.standings import compare_with_best
from support.report_worlds import make_standing


def answers(rng, seeds, problems, seed_spread, shift=0.0):
    """[2, S, P] of two contenders whose chances differ by problem and, in logits, by seed."""
    hardness = rng.normal(0.0, 1.5, problems)
    moved = rng.normal(0.0, seed_spread, (2, seeds, 1)) - np.array([0.0, shift])[:, None, None]
    return (rng.random((2, seeds, problems)) < 1 / (1 + np.exp(-hardness - moved))).astype(float)


# From tables of Student's t.
@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042), (1e6, 1.960)]
)
def test_student_s_t(freedom, t):
    assert t_quantile(0.975, freedom) == pytest.approx(t, abs=1e-3)
    assert t_tail(t, freedom) == pytest.approx(0.05, abs=1e-4)
    assert t_tail(-0.0, freedom) == 1.0


@pytest.mark.parametrize("seed_spread", [0.0, 0.2, 0.8])
def test_without_a_difference_few_are_called_different(seed_spread):
    """Seeds that do not matter, and seeds that do: the level is kept, and is not wasted either."""
    rng, times = np.random.default_rng(0), 600
    pairs = (answers(rng, 3, 200, seed_spread) for _ in range(times))
    false = sum(paired_test(a - b).p < 0.05 for a, b in pairs) / times
    assert 0.01 < false < 0.075


def test_problems_alone_would_be_fooled_where_seeds_matter():
    """What the clusters are for: pooled over seeds and problems, every third null is rejected."""
    rng, times, fooled = np.random.default_rng(0), 300, 0
    for _ in range(times):
        a, b = answers(rng, 3, 200, 0.8)
        D = (a - b).ravel()
        fooled += abs(D.mean()) > 1.96 * D.std(ddof=1) / np.sqrt(D.size)
    assert fooled / times > 0.3


def test_a_real_difference_is_found_and_its_interval_covers_it():
    rng = np.random.default_rng(0)
    found = [paired_test(a - b) for a, b in (answers(rng, 3, 300, 0.1, 1.0) for _ in range(200))]
    assert np.mean([one.p < 0.05 for one in found]) > 0.8
    truth = np.mean([one.value for one in found])
    assert np.mean([one.low <= truth <= one.high for one in found]) > 0.9


def test_equal_scores_are_equal_and_constant_leads_are_certain():
    assert paired_test(np.zeros((3, 10))).p == 1.0
    assert paired_test(np.ones((3, 10))).p == 0.0


def test_one_seed_is_judged_by_its_problems_alone():
    D = np.random.default_rng(0).normal(0.3, 1.0, (1, 100))
    x = D[0]
    t = x.mean() / (x.std(ddof=1) / 10)
    assert paired_test(D).p == pytest.approx(t_tail(t, 99))


def test_the_bootstrap_sees_both_seeds_and_problems():
    rng = np.random.default_rng(0)
    by_seed = np.repeat(rng.random((3, 1)), 50, axis=1)
    by_problem = np.repeat(rng.random((1, 50)), 3, axis=0)
    for X in (by_seed, by_problem):
        found = bootstrap(X)
        assert found.low < X.mean() - 0.02 < X.mean() + 0.02 < found.high
    assert bootstrap(by_seed) == bootstrap(by_seed)


def judged(scores):
    """Standings, best first, of contenders with these scores [K, S, P]."""
    cells = [
        Cell(id="", contender=str(k), objective="", rate=1.0, seed=s, stage="final", state="done",
             per_problem=one.tolist())
        for k, of_seeds in enumerate(scores) for s, one in enumerate(of_seeds)
    ]  # fmt: skip
    record = Tournament(recipe="", kind="", measure="", rule=[], contenders=[], plan={},
                        cells=cells)  # fmt: skip
    order = np.argsort(-scores.mean((1, 2)))
    rows = [make_standing(rank=i, contender=str(k), rate=1.0) for i, k in enumerate(order, 1)]
    compare_with_best(record, rows)
    return rows


@pytest.mark.parametrize(("seeds", "seed_spread"), [(3, 0.2), (3, 0.4), (5, 0.8)])
def test_of_six_equals_the_best_is_rarely_called_better_than_any(seeds, seed_spread):
    """The first is chosen by the scores that judge it: it is every pair that must be corrected for,
    and fifteen pairs reach further into the tail than the few seeds of one of them can tell."""
    rng, times, false, alone = np.random.default_rng(0), 200, 0, 0
    for _ in range(times):
        hardness, moved = rng.normal(0.0, 1.5, 200), rng.normal(0.0, seed_spread, (6, seeds, 1))
        chance = 1 / (1 + np.exp(-hardness - moved))
        scores = (rng.random(chance.shape) < chance).astype(float)
        false += any(row.p_holm < 0.05 for row in judged(scores)[1:])
        by_itself = [paired_test(a - b).p for a, b in combinations(scores, 2)]
        alone += min(holm(by_itself)) < 0.05
    assert false / times <= 0.05
    assert false < alone, "seeds of all pairs together are what keeps the level"


def test_a_pair_by_itself_is_its_own_family():
    a, b = answers(np.random.default_rng(0), 3, 100, 0.4)
    assert paired_test(a - b, pool_seeds([a - b])) == paired_test(a - b)


def test_the_noise_of_seeds_is_the_residual_of_contenders_and_seeds():
    """Against the textbook's randomized blocks: twice the mean square of the residual."""
    X = np.random.default_rng(0).random((4, 3, 50))
    M = X.mean(2)
    residual = M - M.mean(1, keepdims=True) - M.mean(0, keepdims=True) + M.mean()
    pooled = pool_seeds([a - b for a, b in combinations(X, 2)])
    assert pooled.freedom == 6
    assert pooled.variance == pytest.approx(2 * (residual**2).sum() / 6)


def test_pairs_that_have_one_seed_so_far_leave_the_noise_to_the_others():
    """As on the way of a comparison: three contenders have two seeds, the fourth has one."""
    rng = np.random.default_rng(0)
    full = [a - b for a, b in combinations(rng.random((3, 2, 50)), 2)]
    begun = [rng.random((1, 50)) - 0.5 for _ in range(3)]
    pooled = pool_seeds([*full, *begun])
    assert pooled == pool_seeds(full)
    assert pooled.freedom == 2
    for D in full:
        assert 0 <= paired_test(D, pooled).p <= 1
    for D in begun:
        alone, among = paired_test(D), paired_test(D, pooled)
        assert among.high - among.low > alone.high - alone.low
        assert paired_test(D, pool_seeds(begun)) == alone


def test_holm_by_hand():
    assert holm([0.01, 0.02, 0.03, 0.04]) == [0.04, 0.06, 0.06, 0.06]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
