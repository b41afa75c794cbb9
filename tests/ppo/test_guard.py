"""What a PPO run writes besides its weights: rows, events of the watch, mirrors, a result."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("jumanji")
jax = pytest.importorskip("jax")
from test_metrics_docs import DOCS, table  # noqa: E402

from mesotron.config import SnakeConfig  # noqa: E402
from mesotron.ppo import training  # noqa: E402
from mesotron.ppo.evaluate import Games  # noqa: E402
from mesotron.ppo.guard import Guard  # noqa: E402
from mesotron.ppo.hyper import read_runs  # noqa: E402
from mesotron.ppo.loop import make_train  # noqa: E402
from mesotron.ppo.mirrors import Mirrors  # noqa: E402
from mesotron.ppo.records import Session, write_chunk, write_evaluation  # noqa: E402
from mesotron.ppo.seeds import Program  # noqa: E402
from mesotron.runs import RunFolder  # noqa: E402
from mesotron.runs.console import LiveView  # noqa: E402
from mesotron.watch.readers import read_log  # noqa: E402

CONFIG = SnakeConfig(
    width=3, height=3, num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=32 * 60,
    d_model=8, num_heads=1, gif=False,
)  # fmt: skip
GAMES = Games(*(np.full((1, 4), value) for value in (5, 20, False, False)))


def row(step: int, fruit: float) -> dict[str, float]:
    return {"step": step, "episode/fruit": fruit, "policy/entropy": 0.5, "time/step": 0.1}


def collapse() -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    fruit = [7 + rng.normal(0, 0.2) for _ in range(25)] + [1 + rng.normal(0, 0.1)] * 25
    return [row(k + 1, value) for k, value in enumerate(fruit)]


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", CONFIG, {})


def open_session(folder, config=CONFIG, **mirrors):
    config = replace(config, **mirrors)
    view = LiveView(config.num_updates, {})
    nothing = Program(start=lambda runs: None, advance=lambda *words: None)
    played = lambda params, seed: {"greedy": GAMES, "sampled": GAMES}  # noqa: E731
    guard = Guard(config, folder, view.say)
    mirror = Mirrors(config, folder.path)
    return Session(config, folder, read_runs(config), nothing, played, view, mirror, guard)


def names_of(config) -> set[str]:
    """Every metric that an update of this config makes, without running one."""
    _, metrics = jax.eval_shape(make_train(config), jax.random.PRNGKey(0))
    return set(metrics)


@pytest.mark.parametrize("guard", ["off", "warn", "stop"])
def test_the_guard_writes_says_and_stops_as_it_is_told(folder, guard):
    heard = []
    watch = Guard(replace(CONFIG, guard=guard), folder, heard.append)
    for each in collapse():
        watch.take(each)
    events = folder.rows("events")
    assert (events[-1]["detector"], events[-1]["severity"]) == ("reward_collapse", "stop")
    assert len(heard) == (0 if guard == "off" else len(events))
    assert (watch.stopped_by is not None) == (guard == "stop")
    assert "dead after step" in watch.story().text()


def test_a_device_that_scores_moves_otherwise_than_it_made_them_is_doubted_once(folder):
    heard = []
    watch = Guard(replace(CONFIG, guard="off"), folder, heard.append)
    for step, mismatch in enumerate([2e-4, 0.03, 0.04]):
        watch.take(row(step + 1, 5.0) | {"policy/mismatch": mismatch})
    assert len(heard) == 1
    assert "policy/mismatch is 0.03 at update 2" in heard[0]


def test_runs_side_by_side_are_warned_of_and_go_on(folder):
    watch = Guard(replace(CONFIG, guard="stop", num_seeds=3), folder, lambda words: None)
    for each in collapse():
        watch.take(each)
    assert folder.rows("events")[-1]["severity"] == "stop"
    assert watch.stopped_by is None


def test_a_resumed_run_is_judged_by_all_of_its_rows_and_told_nothing_twice(folder):
    rows, heard = collapse(), []
    whole = Guard(CONFIG, folder, lambda words: None)
    for each in rows[:27]:
        folder.append("metrics", each)
        whole.take(each)
    before = folder.rows("events")
    resumed = Guard(replace(CONFIG, guard="stop"), folder, heard.append)
    resumed.take_up()
    assert not heard
    assert folder.rows("events") == before
    for each in rows[27:]:
        resumed.take(each)
    assert resumed.stopped_by is not None
    for each in rows[27:]:
        whole.take(each)
    assert resumed.stopped_by == whole.events[-1]


def test_the_watch_command_tells_the_story_of_a_ppo_run(folder, capsys):
    from mesotron.config import WatchConfig
    from mesotron.watch.command import run

    for each in collapse():
        folder.append("metrics", each)
    assert run(WatchConfig(path=folder.path, check=True)) == 1
    told = capsys.readouterr().out
    assert "cause: reward collapse" in told
    assert "reward has fallen from its best" in told


def test_every_metric_of_a_run_is_documented_and_every_documented_one_is_written(folder):
    config = replace(CONFIG, num_envs=4, pretrained_model=folder.path, total_timesteps=32)
    names = names_of(config) | {"policy/kl_pretrained"}  # needs weights; see test_ppo_command
    session = open_session(folder, config)
    zeros = {name: np.ones((1, 1), np.float32) for name in names}
    write_chunk(session, zeros, 0, 1, 0.0, 1.0)
    (written,) = folder.rows("metrics")
    rows = table(DOCS / "metrics.md", "PPO metric")
    documented = [row[0] for row in rows]
    assert len(set(documented)) == len(documented)
    assert set(written) - {"step"} == set(documented)
    for cells in rows:
        assert len(cells) == 4
        assert all(cells), cells[0]


def test_tensorboard_mirrors_what_the_folder_holds(folder):
    pytest.importorskip("tensorboard")
    session = open_session(folder, tensorboard=True)
    metrics = {"episode/finished": np.ones((1, 3)), "episode/fruit": np.array([[1.0, 2.5, 4.0]])}
    with session.mirrors:
        write_chunk(session, metrics, 0, 3, 0.0, 1.5)
        write_evaluation(session, {"greedy": GAMES, "sampled": GAMES}, 3)
    mirrored = read_log(folder.path / "tensorboard").rows
    own = folder.rows("metrics")
    assert [r["episode/fruit"] for r in mirrored] == [r["episode/fruit"] for r in own]
    assert [r["time/env_steps"] for r in mirrored] == [32, 64, 96]
    assert mirrored[-1]["eval/greedy_fruit"] == 5


def test_defect_11_the_score_of_a_run_is_its_last_policys_and_not_a_mean_over_training(
    folder, monkeypatch
):
    """What sweeps maximise once was the mean return of the whole run."""
    session = open_session(folder)
    for step, fruit in enumerate([0.0, 1.0, 8.0]):
        session.guard.take(row(step + 1, fruit))
        times = {"time/env_steps": 32.0, "time/seconds": 1.0, "time/steps_per_second": 9.0}
        folder.append("metrics", row(step + 1, fruit) | times)
    monkeypatch.setattr(training, "measure_baselines", lambda config: {"maximum": 8.0,
                        "random_masked": 3.0, "random_unmasked": 0.1})  # fmt: skip
    states = SimpleNamespace(params=None)  # without a picture of a game nothing looks at them
    words = training.finish(session, states, training.evaluate_end(session, states))
    result = json.loads((folder.path / "result.json").read_text())
    assert result["greedy_fruit"] == 5.0
    assert result["greedy_games"] == [[5, 5, 5, 5]]
    assert result["condition"] == "healthy"
    assert "greedy   5.00 fruit of 8" in words
    (last,) = folder.rows("samples")
    assert (last["step"], last["greedy_fruit"]) == (CONFIG.num_updates, 5.0)


def test_defect_11_sweeps_maximise_that_score_and_ask_for_no_logarithm_of_a_penalty():
    files = list((DOCS.parent / "sweeps").glob("snake*.yaml"))
    assert files
    yaml = pytest.importorskip("yaml")
    for path in files:
        sweep = yaml.safe_load(path.read_text())
        assert sweep["metric"] == {"name": "eval/greedy_fruit", "goal": "maximize"}
        for name, space in sweep["parameters"].items():
            if "log" in space.get("distribution", ""):
                assert space["min"] > 0, f"{path.name}: {name}"
