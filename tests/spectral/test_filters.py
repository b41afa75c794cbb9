"""The filters as numbers: published coefficients, invariants of the scalar map, costs, errors."""

import numpy as np
import pytest

from mesotron.spectral import (
    SYMMETRIC,
    Segment,
    cheapest_plan,
    cubic,
    filters,
    gram_plan,
    high_pass,
    limit_cutoff,
    low_rank,
    make_filter,
    muon,
    noise_edge,
    pion,
    plan_flops,
    polar_express,
    response,
    slope_at_zero,
    standard_flops,
    threshold,
)
from mesotron.spectral.filters import FIXED_POINT, PROMOTE, SUPPRESS, aim

# Amsel et al., arXiv 2505.16932: five steps on [1e-3, 1], without the safety factor.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
CUTOFFS = (0.01, 0.05, 0.3, 0.5, 0.7, 0.8)
GRID = np.linspace(0, 1, 4001)


def test_polar_express_is_the_published_one_divided_by_its_safety():
    plain = polar_express(5, safety=1.0).steps
    safe = polar_express(5, safety=1.02).steps
    np.testing.assert_allclose(plain, PUBLISHED, atol=1e-3)
    divisors = np.array([1.02, 1.02**3, 1.02**5])
    np.testing.assert_allclose(safe[:-1], np.array(plain[:-1]) / divisors)
    np.testing.assert_allclose(safe[-1], plain[-1])
    sigma = np.geomspace(1e-3, 1, 999)
    errors = [np.abs(response(polar_express(k, safety=1.0), sigma) - 1).max() for k in (2, 4, 6, 8)]

    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


def test_muon_and_cubic_land_near_one_and_rounding_above_it_does_not_diverge():
    out = response(muon(), np.linspace(0.02, 1, 999))
    assert 0.68 < out.min() < out.max() < 1.21
    np.testing.assert_allclose(response(cubic(), [0.05, 0.3, 1.0]), 1, atol=1e-3)

    for filter in (muon(), cubic(), polar_express(), polar_express(12), *map(pion, range(6))):
        assert 0.6 < response(filter, 1.01) < 1.25


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 12])
def test_every_length_of_every_schedule_keeps_the_sign(steps):
    # A short list that is cycled can send sigma = 1, that is a rank-one gradient, backward.
    filters = [muon(steps), cubic(steps), polar_express(steps)]
    for filter in (*filters, *(pion(k, steps) for k in range(steps + 1))):
        assert len(filter.steps) == steps
        assert response(filter, 1.0) > 0.2  # two steps of Polar Express have come no further
        assert (response(filter, np.linspace(0, 1, 501)) >= 0).all()


# promote: limit cutoff; sigma giving 0.1, 0.5, 0.9.
TABLE = {
    0: (0.8165, 0.771, 0.798, 0.824),
    1: (0.5230, 0.450, 0.492, 0.536),
    2: (0.2957, 0.220, 0.263, 0.310),
    3: (0.1605, 0.093, 0.131, 0.174),
    4: (0.0860, 0.029, 0.060, 0.098),
    5: (None, 0.004, 0.023, 0.057),
}


@pytest.mark.parametrize("promote", TABLE)
def test_pion_is_monotone_and_cuts_at_the_tabulated_values(promote):
    out = response(pion(promote), GRID)
    assert (np.diff(out) >= -1e-15).all()
    assert (out[0], out[-1]) == (0, pytest.approx(1))

    cutoff, *levels = TABLE[promote]
    found = limit_cutoff(pion(promote))
    assert found is None if cutoff is None else found == pytest.approx(cutoff, abs=6e-5)

    for level, sigma in zip((0.1, 0.5, 0.9), levels, strict=True):
        assert threshold(pion(promote), level) == pytest.approx(sigma, abs=6e-4)


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_cutoff_filter_is_a_sharp_monotone_edge(cutoff):
    filter = high_pass(cutoff)
    out = response(filter, GRID)
    assert (np.diff(out) >= -1e-12).all()
    assert out.max() <= 1 + 1e-12
    assert response(filter, cutoff) == pytest.approx(FIXED_POINT)
    assert response(filter, min(1.15 * cutoff, 1)) > 0.9
    assert response(filter, 0.7 * cutoff) < 0.1


def test_a_cutoff_takes_three_steps_of_suppression_unless_told():
    for cutoff in CUTOFFS:
        assert high_pass(cutoff) == high_pass(cutoff, suppress=3) != high_pass(cutoff, suppress=4)


def test_aligned_is_where_a_second_direction_begins_to_help():
    # By the cosine of the step with the gradient, for two directions.
    filter = make_filter("pion", cutoff="aligned")
    assert filter == high_pass(2**0.5 - 1)

    for second in (0.9, 1.1):
        s = second * filter.cutoff
        helps = (1 + s) / 2**0.5 > 1
        assert helps == (response(filter, s) > FIXED_POINT)


@pytest.mark.parametrize("t", [1e-3, 0.05, 0.3, 0.6, 0.8])
def test_aim_moves_the_threshold_where_it_says(t):
    (a, b, c), place = aim(np.float64(t))
    assert a * t + b * t**3 + c * t**5 == pytest.approx(place)
    assert a + b + c == pytest.approx(1)
    assert a + 3 * b + 5 * c == pytest.approx(0, abs=1e-12)
    assert -1.5 <= c <= 0.375

    np.testing.assert_allclose(aim(np.float64(1e-3))[0], PROMOTE)
    np.testing.assert_allclose(aim(np.float64(FIXED_POINT))[0], SUPPRESS, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (64, 4096), (2048, 2048), (12288, 49152)])
@pytest.mark.parametrize("cutoff", [0.001, 0.3, "noise"])
def test_a_cutoff_filter_has_steps_enough_for_the_lowest_threshold(cutoff, shape):
    m, n = shape
    t = np.float64(noise_edge(m, n) if cutoff == "noise" else cutoff * min(m, n) ** -0.125)

    filter = high_pass(cutoff)
    for _ in range(filter.num_steps(m, n) - filter.suppress):
        t = aim(t)[1]

    assert t >= FIXED_POINT - 1e-6


def test_noise_edge_is_where_noise_ends():
    X = np.random.default_rng(0).normal(size=(128, 1024))
    found = np.linalg.norm(X, 2) / np.linalg.norm(X)
    assert found == pytest.approx(noise_edge(128, 1024), rel=0.02)


def test_slope_is_the_derivative_at_zero():
    for filter in (muon(), cubic(), polar_express(), pion(3), high_pass(0.3)):
        assert response(filter, 1e-9) / 1e-9 == pytest.approx(slope_at_zero(filter), abs=1e-6)


def test_gram_form_wins_for_wide_matrices_and_loses_for_square_ones():
    for alpha, units in ((1, 30), (2, 50), (4, 90), (8, 170)):
        assert standard_flops(64, 64 * alpha, muon().steps) == units * 64**3

    square = cheapest_plan(512, 512, muon().steps, 2**-24)
    wide = cheapest_plan(512, 4096, muon().steps, 2**-24)
    assert [s.form for s in square] == ["standard"]
    assert [s.form for s in wide] == ["gram"]

    standard = (Segment("standard", muon().steps),)
    assert plan_flops(512, 4096, wide) < plan_flops(512, 4096, standard)
    assert plan_flops(512, 4096, wide, SYMMETRIC) < plan_flops(512, 4096, wide)


@pytest.mark.parametrize("roundoff", [2**-8, 2**-11, 2**-24, 2**-53])
def test_gram_segments_hold_every_step_once(roundoff):
    for filter in (muon(), polar_express(), cubic(), pion(5)):
        plan = gram_plan(filter.steps, roundoff)
        assert tuple(t for segment in plan for t in segment.steps) == filter.steps
    assert len(gram_plan(muon().steps, 2**-8)) > len(gram_plan(muon().steps, 2**-53)) == 1


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: make_filter("muon", promote=1), "promote=1"),
        (lambda: make_filter("muon", steps=0), "0"),
        (lambda: make_filter("muon", rank=8), "rank=8"),
        (lambda: make_filter("low_rank", steps=3), "steps=3"),
        (lambda: pion(6), "promote=6"),
        (lambda: high_pass(0.0), "cutoff=0.0"),
        (lambda: high_pass(0.9), "0.8165"),
        (lambda: high_pass("edge"), "'noise'"),
        (lambda: low_rank(0), "0"),
        (lambda: response(low_rank(), 0.5), "low_rank"),
        (lambda: response(high_pass("noise"), 0.5), "shape"),
        (lambda: threshold(pion(), 1.5), "1.5"),
    ],
)
def test_bad_values_are_rejected_by_name(call, word):
    with pytest.raises(ValueError, match=word):
        call()


@pytest.mark.parametrize("s", [0.5, 1.0, 1.7])
def test_a_quintic_about_one_point_is_flat_there(s):
    a, b, c = filters._best_quintic(s, s)
    assert a * s + b * s**3 + c * s**5 == pytest.approx(1.0)
    assert a + 3 * b * s**2 + 5 * c * s**4 == pytest.approx(0.0, abs=1e-9)
    assert 6 * b * s + 20 * c * s**3 == pytest.approx(0.0, abs=1e-9)
