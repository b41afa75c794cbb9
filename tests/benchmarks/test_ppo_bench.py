"""`mesotron bench snake`: the same trials and seeds for each optimizer, a result that can go on."""

import json

import numpy as np
import pytest

pytest.importorskip("jumanji")
pytest.importorskip("jax")
from mesotron.bench import snake
from mesotron.config import BenchSnakeConfig, SnakeConfig
from support.quick_jax import quick_compilation  # noqa: F401


def test_every_optimizer_has_the_same_number_of_trials():
    assert len({len(trials) for trials in snake.TRIALS.values()}) == 1
    for trials in snake.TRIALS.values():
        assert len({tuple(trial.items()) for trial in trials}) == len(trials)


def test_as_many_seeds_as_there_are_trials_at_most(tmp_path):
    with pytest.raises(ValueError, match="seeds=7"):
        snake.run(BenchSnakeConfig(seeds=7, out=tmp_path / "study.json"))


def test_a_curve_counts_games_and_not_updates():
    """An update in which one game ended weighs a third of one in which three did."""
    fruit = np.array([[9.0, 1.0] * 200])
    ended = np.array([[1.0, 3.0] * 200])
    config = SnakeConfig(num_envs=4, num_steps=8)
    curve = snake.thin_curve(fruit, ended, list(range(400)), config)
    assert len(curve["steps"]) <= 150
    assert curve["steps"][-1] == 400 * 32
    assert curve["seconds"][-1] == 399
    assert np.mean(curve["fruit"]) == pytest.approx(3.0, abs=0.2)


@pytest.mark.slow
def test_bench_snake_makes_a_study_and_goes_on_with_it(tmp_path, capsys):
    out = tmp_path / "study.json"
    config = BenchSnakeConfig(
        boards=(3,), optims=("adam", "muon"), seeds=2, steps=256, num_envs=8, num_steps=8,
        num_minibatches=2, update_epochs=1, d_model=8, num_layers=1, num_heads=2, eval_episodes=4,
        out=out,
    )  # fmt: skip
    assert snake.run(config) == 0
    said = capsys.readouterr().out
    assert said.count("greedy") == 2
    board = json.loads(out.read_text())["boards"]["3x3"]
    assert set(board["baselines"]) == {"maximum", "random_masked", "random_unmasked"}
    for rule, cell in board["cells"].items():
        assert cell["steps_per_seed"] == 256
        assert len(cell["trials"]) == len(cell["greedy_fruit"]) == len(cell["curve"]["fruit"]) == 2
        best = max(cell["trials"], key=lambda trial: trial["sampled_fruit"])
        assert cell["rates"].items() <= best.items()
        assert set(cell["rates"]) == set(snake.TRIALS[rule][0])
    assert (tmp_path / "study_3x3.png").stat().st_size > 5000
    assert snake.run(config) == 0  # nothing is left to do
    assert "greedy" not in capsys.readouterr().out
    assert json.loads(out.read_text())["boards"]["3x3"] == board
