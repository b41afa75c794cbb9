"""Whole updates: runs in pieces, runs side by side and resumed runs have the bits they should."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo import checkpoint  # noqa: E402
from mesotron.ppo.hyper import make_runs  # noqa: E402
from mesotron.ppo.seeds import make_program  # noqa: E402
from support.quick_jax import quick_compilation  # noqa: E402, F401

CONFIG = SnakeConfig(
    width=3,
    height=3,
    max_steps=12,
    num_envs=8,
    num_steps=12,
    num_minibatches=2,
    update_epochs=2,
    total_timesteps=5 * 96,
    d_model=8,
    num_heads=1,
    mlp_ratio=1,
    chunk=3,
)
RUNS = make_runs(CONFIG, [{"seed": 0, "lr": 0.01}, {"seed": 1, "lr": 0.01}, {"seed": 0, "lr": 0.0}])


@pytest.fixture(scope="module")
def program():
    return make_program(CONFIG, num_runs=3)


@pytest.fixture(scope="module")
def whole(program):
    """Five updates in chunks of three and two: the state at the end and all metrics."""
    states, first = program.advance(program.start(RUNS), RUNS, 3)
    states, second = program.advance(states, RUNS, 2)
    metrics = {name: np.concatenate([first[name], second[name][:, :2]], 1) for name in first}
    return jax.device_get(states), metrics


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_moves_are_scored_by_the_numbers_they_were_made_by(whole):
    """Before the first step on a rollout every probability ratio is 1, in every update."""
    _, metrics = whole
    assert np.abs(metrics["policy/mismatch"]).max() < 1e-6
    assert np.abs(metrics["policy/kl"]).max() > 1e-6  # and not any more after steps


def test_a_run_in_pieces_has_the_bits_of_a_run_in_one(program, whole):
    states = program.start(RUNS)
    for count in (1, 0, 2, 2):
        states, _ = program.advance(states, RUNS, count)
    assert states.update.tolist() == [5, 5, 5]
    assert_same_bits(jax.device_get(states), whole[0])


def test_a_run_resumed_from_a_checkpoint_has_the_same_bits(program, whole, tmp_path):
    states, _ = program.advance(program.start(RUNS), RUNS, 2)
    checkpoint.save(tmp_path, 2, states)
    restored, done, damaged = checkpoint.restore(tmp_path, program.start(RUNS))
    assert (done, damaged) == (2, [])
    states, _ = program.advance(restored, RUNS, 3)
    assert_same_bits(jax.device_get(states), whole[0])
    assert not list(tmp_path.rglob("*.pkl"))


def test_the_weights_of_a_checkpoint_start_another_run(program, whole, tmp_path):
    states, _ = program.advance(program.start(RUNS), RUNS, 1)
    checkpoint.save(tmp_path, 1, states)
    params = jax.tree.map(lambda x: x[0], states.params)
    assert_same_bits(checkpoint.load_params(tmp_path, params), params)
    other = jax.tree.map(lambda x: x[..., None], params)
    with pytest.raises(ValueError, match="other shapes"):
        checkpoint.load_params(tmp_path, other)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        checkpoint.load_params(tmp_path / "nothing", params)


def test_runs_side_by_side_are_their_own(whole):
    states, metrics = whole
    kernels = states.params["trunk"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])
    # Seeds alone decide the start: the first and the third run meet the same first games.
    finished = metrics["episode/finished"]
    assert finished[0, 0] == finished[2, 0]
    np.testing.assert_array_equal(metrics["episode/fruit"][0, 0], metrics["episode/fruit"][2, 0])


def test_a_rate_of_zero_moves_nothing_and_keeps_the_ratio_at_one(program, whole):
    """Also the proof that a step is scored as it was acted."""
    states, metrics = whole
    start = jax.device_get(program.start(RUNS))
    for before, after in zip(jax.tree.leaves(start.params), jax.tree.leaves(states.params)):
        np.testing.assert_array_equal(before[2], after[2])
        assert before.size < 40 or not np.array_equal(before[0], after[0])
    np.testing.assert_allclose(metrics["policy/ratio_max"][2], 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["policy/kl"][2], 0.0, atol=1e-6)
    assert (metrics["policy/ratio_max"][0] > 1.001).all()


def test_every_metric_is_finite_and_games_end(whole):
    _, metrics = whole
    for name, values in metrics.items():
        assert values.shape == (3, 5)
        assert np.isfinite(values).all(), name
    assert (metrics["episode/finished"] > 0).all()  # games last 12 steps at most
    assert (metrics["episode/length"] <= 12).all()


def test_the_logged_rate_falls_with_the_gradient_steps(whole):
    rates = whole[1]["optim/lr"][0]
    np.testing.assert_allclose(rates, 0.01 * (1 - np.arange(5) / 5), rtol=1e-5)


def test_the_config_alone_decides_the_compiled_program():
    """Hashable, so that it can be a static argument."""
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))
