"""The Snake studies: equal trials per optimizer, curves, a resumable result, ratios."""

import json

import numpy as np
import pytest

pytest.importorskip("jumanji")
pytest.importorskip("jax")
pytest.importorskip("stable_baselines3")
from benchmarks.ppo import snake, speed
from mesotron.config import SnakeConfig
from support.quick_jax import quick_compilation  # noqa: F401

TINY = {
    "num_envs": 8,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 1,
}
TINY |= {"d_model": 8, "num_layers": 1, "num_heads": 2}


def test_equal_trials_per_optimizer():
    assert len({len(trials) for trials in snake.TRIALS.values()}) == 1
    for trials in snake.TRIALS.values():
        assert len({tuple(trial.items()) for trial in trials}) == len(trials)


def test_curves_weigh_games_not_updates():
    fruit = np.array([[9.0, 1.0] * 200])
    ended = np.array([[1.0, 3.0] * 200])
    config = SnakeConfig(num_envs=4, num_steps=8)
    curve = snake.thin_curve(fruit, ended, list(range(400)), config)

    assert len(curve["steps"]) <= 150
    assert curve["steps"][-1] == 400 * 32
    assert np.mean(curve["fruit"]) == pytest.approx(3.0, abs=0.2)


@pytest.mark.slow
def test_study_runs_and_resumes(tmp_path, capsys):
    out = tmp_path / "study.json"
    config = snake.Config(
        boards=(3,), optims=("adam", "muon"), seeds=2, steps=256, eval_episodes=4, out=out, **TINY
    )
    assert snake.run(config) == 0

    board = json.loads(out.read_text())["boards"]["3x3"]
    assert set(board["baselines"]) == {"maximum", "random_masked", "random_unmasked"}

    for rule, cell in board["cells"].items():
        assert cell["steps_per_seed"] == 256
        assert len(cell["trials"]) == len(cell["greedy_fruit"]) == len(cell["curve"]["fruit"]) == 2
        best = max(cell["trials"], key=lambda trial: trial["sampled_fruit"])

        assert cell["rates"].items() <= best.items()
        assert set(cell["rates"]) == set(snake.TRIALS[rule][0])

    assert (tmp_path / "study_3x3.png").stat().st_size > 5000
    capsys.readouterr()
    assert snake.run(config) == 0  # nothing left to do
    assert capsys.readouterr().out == ""
    assert json.loads(out.read_text())["boards"]["3x3"] == board


def test_ratios_and_shares():
    speeds = {
        "mesotron_adam": 90.0,
        "mesotron_muon": 81.0,
        "sb3_adam": 30.0,
    }

    rows = [
        {
            "kind": k,
            "num_envs": 8,
            "speed": value,
        }
        for k, value in speeds.items()
    ]

    rows += [
        {
            "kind": "mesotron_adam",
            "num_envs": 64,
            "speed": 600.0,
        }
    ]

    assert speed.ratios(rows, "speed") == {
        "ours_over_sb3@8": 3.0,
        "muon_share_of_step@8": pytest.approx(0.1),
        "fastest_ours_over_fastest_sb3": 20.0,
    }


def test_bad_values_are_refused(tmp_path):
    for contender in ("sb3_addam", "sb3_adam@many"):
        with pytest.raises(ValueError, match=contender):
            speed.run(speed.Config(contenders=(contender,)))

    with pytest.raises(ValueError, match="--repeats"):
        speed.run(speed.Config(repeats=0))

    with pytest.raises(ValueError, match="seeds"):
        snake.run(snake.Config(seeds=7, out=tmp_path / "study.json"))


@pytest.mark.slow
def test_every_contender_is_timed(tmp_path):
    out = tmp_path / "result.json"
    assert (
        speed.run(
            speed.Config(
                board=3,
                updates=2,
                repeats=1,
                out=out,
                **TINY,
            )
        )
        == 0
    )

    result = json.loads(out.read_text())
    assert [row["name"] for row in result["contenders"]] == list(speed.CONTENDERS)
    assert all(row["steps_per_second"] > 0 for row in result["contenders"])
    assert {"ours_over_sb3@8", "ours_over_plain_jax@8"} <= set(result["ratios"])
