"""Whole updates: chunked, side-by-side and resumed runs are bit-equal to the plain run."""

import dataclasses

import jax
import numpy as np
import pytest

from mesotron.cli import main
from mesotron.config import SnakeConfig
from mesotron.ppo.program import (
    load_params,
    make_program,
    make_runs,
    over_runs,
    read_runs,
    restore_states,
    save_states,
)

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
    states, first = program.advance(program.start(RUNS), RUNS, 3)
    states, second = program.advance(states, RUNS, 2)
    metrics = {name: np.concatenate([first[name], second[name][:, :2]], 1) for name in first}

    return jax.device_get(states), metrics


def assert_bit_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_chunks_are_bit_equal_to_one_piece(program, whole):
    states = program.start(RUNS)
    for count in (1, 0, 2, 2):
        states, _ = program.advance(states, RUNS, count)

    assert states.update.tolist() == [5, 5, 5]
    assert_bit_equal(jax.device_get(states), whole[0])


def test_resume_from_a_checkpoint_is_bit_equal(program, whole, tmp_path):
    states, _ = program.advance(program.start(RUNS), RUNS, 2)
    save_states(tmp_path, 2, states)
    params = jax.tree.map(lambda x: x[0], states.params)
    restored, done, damaged = restore_states(tmp_path, program.start(RUNS))

    assert (done, damaged) == (2, [])
    states, _ = program.advance(restored, RUNS, 3)
    assert_bit_equal(jax.device_get(states), whole[0])

    assert not list(tmp_path.rglob("*.pkl"))
    assert_bit_equal(load_params(tmp_path, params), params)

    with pytest.raises(ValueError, match="shapes"):
        load_params(tmp_path, jax.tree.map(lambda x: x[..., None], params))

    with pytest.raises(ValueError, match="checkpoint"):
        load_params(tmp_path / "nothing", params)


def test_side_by_side_runs_are_independent(program, whole):
    states, metrics = whole

    # The third run has a rate of zero: it keeps its weights, and a probability ratio of one.
    start = jax.device_get(program.start(RUNS))
    for before, after in zip(jax.tree.leaves(start.params), jax.tree.leaves(states.params)):
        np.testing.assert_array_equal(before[2], after[2])
        assert before.size < 40 or not np.array_equal(before[0], after[0])

    np.testing.assert_allclose(metrics["policy/ratio_max"][2], 1.0, atol=1e-5)
    np.testing.assert_allclose(metrics["policy/kl"][2], 0.0, atol=1e-6)
    assert (metrics["policy/ratio_max"][0] > 1.001).all()

    kernels = states.params["trunk"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])

    # The seed alone decides the start: the first and the third run play the same first games.
    np.testing.assert_array_equal(metrics["episode/fruit"][0, 0], metrics["episode/fruit"][2, 0])
    for name, values in metrics.items():
        assert values.shape == (3, 5)
        assert np.isfinite(values).all(), name

    assert (metrics["episode/finished"] > 0).all()  # games last 12 steps at most
    assert (metrics["episode/length"] <= 12).all()

    np.testing.assert_allclose(metrics["optim/lr"][0], 0.01 * (1 - np.arange(5) / 5), rtol=1e-5)

    # Before the first gradient step on a rollout every probability ratio is 1.
    assert np.abs(metrics["policy/mismatch"]).max() < 1e-6
    assert np.abs(metrics["policy/kl"]).max() > 1e-6


def test_runs_are_every_combination_of_sweep_values_and_seeds():
    config = SnakeConfig(
        sweep=("lr=0.1,0.2", "ent-coef=0,0.5,1"),
        num_seeds=2,
        seed=7,
    )

    runs = read_runs(config)
    assert len(runs.values) == len({tuple(run.items()) for run in runs.values}) == 12

    np.testing.assert_allclose(runs.hyper.lr, [0.1] * 6 + [0.2] * 6)
    assert {run["seed"] for run in runs.values} == {7, 8}
    assert len({tuple(key) for key in np.asarray(runs.keys).tolist()}) == 2


@pytest.mark.parametrize(
    ("sweep", "optim", "name"),
    [
        *((text, None, "--sweep") for text in ("lr", "lr=", "width=4,5", "num_gradient_steps=3")),
        ("muon_lr=0.1", "adam", "muon_lr"),
        ("aux-adam-lr=0.1", None, "aux_adam_lr"),
        ("lr=0.1,0.2", "pion", "lr"),
        ("lr=0.1 ent-coef=0,1 lr=0.2", None, "lr=0.2 names one twice"),
        ("kl_coef=0,0.1", None, "--kl-coef 0.1"),
        ("gamma=0.9,2", None, "--gamma 2"),
    ],
)
def test_sweeps_that_are_malformed_or_without_effect_are_refused(
    sweep, optim, name, tmp_path, capsys
):
    words = ["ppo", "snake", "--sweep", *sweep.split(), *(["--optim", optim] if optim else [])]
    assert main([*words, "--save-dir", str(tmp_path)]) == 2
    assert name in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # before there is a run folder


def test_a_swept_kl_coefficient_has_a_reference(program):
    config = dataclasses.replace(CONFIG, pretrained_model="x", sweep=("kl_coef=0,0.5",))
    runs = read_runs(config)
    params = jax.tree.map(lambda x: x[0], program.start(RUNS).params)
    swept = make_program(config, 2, params)
    _, metrics = jax.eval_shape(lambda: swept.advance(swept.start(runs), runs, 1))

    assert "policy/kl_pretrained" in metrics


def test_a_single_run_is_mapped_like_several():
    for num_runs in (1, 3):
        x = np.arange(4.0 * num_runs).reshape(num_runs, 4)
        numbers = 2.0 + np.arange(num_runs)
        halves = over_runs(lambda tree, number: {"half": tree["x"] / number})({"x": x}, numbers)
        np.testing.assert_allclose(halves["half"], x / numbers[:, None], rtol=1e-6)


@pytest.mark.slow
def test_a_single_run_equals_the_same_run_beside_another():
    """Up to rounding, which has not grown yet after the first update."""
    config = dataclasses.replace(
        CONFIG,
        num_envs=4,
        num_steps=8,
        chunk=1,
    )

    results = []
    for values in ([{"seed": 3}], [{"seed": 3}, {"seed": 4}]):
        runs = make_runs(config, values)
        program = make_program(config, len(values))
        _, metrics = program.advance(program.start(runs), runs, 1)
        results.append({name: x[:1] for name, x in metrics.items()})

    for name, values in results[0].items():
        np.testing.assert_allclose(values, results[1][name], rtol=1e-4, atol=2e-6)
