"""`mesotron ppo snake`: flags, run folder, guard, mirrors, resume and the result."""

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_metrics_docs import DOCS, table

from mesotron.config import SnakeConfig, WatchConfig
from mesotron.ppo import training
from mesotron.ppo.evaluate import Games
from mesotron.ppo.loop import make_train
from mesotron.ppo.program import Program, read_runs
from mesotron.runs import RunFolder
from mesotron.runs.console import LiveView
from mesotron.runs.resume import settings_to_resume
from mesotron.watch.command import run as watch_run
from mesotron.watch.diagnosis import diagnose_run
from mesotron.watch.log import read_log

TINY = SnakeConfig(
    width=3,
    height=3,
    num_envs=8,
    num_steps=8,
    num_minibatches=2,
    update_epochs=1,
    total_timesteps=6 * 64,
    d_model=8,
    num_heads=1,
    mlp_ratio=1,
    chunk=2,
    eval_episodes=4,
    optim="muon",
    gif=False,
)
GAMES = Games(*(np.full((1, 4), value) for value in (5, 20, False, False)))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", TINY, {})


def test_chunks_end_at_every_due_update():
    config = replace(
        TINY,
        chunk=10,
        eval_freq=4,
        save_freq=6,
        total_timesteps=64 * 15,
    )

    done = 0
    stops = []
    while done < config.num_updates:
        done += training.next_chunk(config, done)
        stops.append(done)

    assert stops == [4, 6, 8, 12, 15]


def row(step: int, fruit: float) -> dict[str, float]:
    return {
        "step": step,
        "episode/fruit": fruit,
        "policy/entropy": 0.5,
        "time/step": 0.1,
    }


def collapse() -> list[dict[str, float]]:
    rng = np.random.default_rng(0)
    fruit = [7 + rng.normal(0, 0.2) for _ in range(25)] + [1 + rng.normal(0, 0.1)] * 25
    return [row(k + 1, value) for k, value in enumerate(fruit)]


def open_session(folder, **changes):
    config = replace(TINY, **changes)
    view = LiveView(config.num_updates, {})
    program = Program(start=lambda runs: None, advance=lambda *_: None)
    evaluate = lambda params, seed: {"greedy": GAMES, "sampled": GAMES}  # noqa: E731
    guard = training.Guard(config, folder, view.say)
    mirrors = training.Mirrors(config, folder.path)

    return training.SnakeSession(
        config, folder, read_runs(config), program, evaluate, view, mirrors, guard
    )


@pytest.mark.parametrize(("guard", "seeds"), [("off", 1), ("warn", 1), ("stop", 1), ("stop", 3)])
def test_guard_writes_prints_and_stops_as_configured(folder, guard, seeds):
    messages = []
    watch = training.Guard(replace(TINY, guard=guard, num_seeds=seeds), folder, messages.append)
    for each in collapse():
        watch.update(each)

    events = folder.rows("events")
    assert (events[-1]["detector"], events[-1]["severity"]) == ("reward_collapse", "stop")
    assert len(messages) == (0 if guard == "off" else len(events))

    # Runs side by side are never stopped.
    assert (watch.stopped_by is not None) == (guard == "stop" and seeds == 1)
    assert diagnose_run(watch.monitor).condition not in ("healthy", None)


def test_guard_reports_a_mismatch_once(folder):
    messages = []
    watch = training.Guard(replace(TINY, guard="off"), folder, messages.append)
    for step, mismatch in enumerate([2e-4, 0.03, 0.04]):
        watch.update(row(step + 1, 5.0) | {"policy/mismatch": mismatch})

    (message,) = messages
    assert "policy/mismatch" in message


def test_resumed_guard_judges_all_rows_and_repeats_no_event(folder, capsys):
    rows = collapse()
    messages = []

    whole = training.Guard(TINY, folder, lambda message: None)
    for each in rows[:27]:
        folder.append("metrics", each)
        whole.update(each)

    before = folder.rows("events")
    resumed = training.Guard(replace(TINY, guard="stop"), folder, messages.append)
    resumed.replay()

    assert not messages
    assert folder.rows("events") == before

    for each in rows[27:]:
        folder.append("metrics", each)
        resumed.update(each)
        whole.update(each)

    assert resumed.stopped_by == whole.monitor.events[-1]
    assert watch_run(WatchConfig(path=folder.path, check=True)) == 1
    assert "reward collapse" in capsys.readouterr().out


def test_metrics_equal_the_documented_ones(folder):
    config = replace(TINY, pretrained_model=folder.path, total_timesteps=64)
    _, metrics = jax.eval_shape(make_train(config), jax.random.PRNGKey(0))
    names = {*metrics, "policy/kl_pretrained"}  # which needs weights
    ones = {name: np.ones((1, 1), np.float32) for name in names}

    training.write_chunk(
        open_session(folder),
        ones,
        0,
        1,
        0.0,
        1.0,
    )

    (written,) = folder.rows("metrics")
    rows = table(DOCS / "api" / "metrics.md", "PPO metric")
    documented = [cells[0] for cells in rows]

    assert len(set(documented)) == len(documented)
    assert set(written) - {"step"} == set(documented)
    assert all(len(cells) == 4 and all(cells) for cells in rows)


def test_tensorboard_mirrors_the_run_folder(folder):
    session = open_session(folder, report_to=("tensorboard",))
    metrics = {"episode/finished": np.ones((1, 3)), "episode/fruit": np.array([[1.0, 2.5, 4.0]])}
    with session.mirrors:
        training.write_chunk(session, metrics, 0, 3, 0.0, 1.5)
        training.write_evaluation(session, {"greedy": GAMES, "sampled": GAMES}, 3)

    mirrored = read_log(folder.path / "tensorboard").rows
    assert [r["episode/fruit"] for r in mirrored] == [1.0, 2.5, 4.0]
    assert [r["time/env_steps"] for r in mirrored] == [64, 128, 192]
    assert mirrored[-1]["eval/greedy_fruit"] == 5


def test_result_is_the_final_policy_and_not_a_mean_over_training(folder, monkeypatch):
    session = open_session(folder)
    for step, fruit in enumerate([0.0, 1.0, 8.0]):
        session.guard.update(row(step + 1, fruit))
        times = {
            "time/env_steps": 32.0,
            "time/seconds": 1.0,
            "time/steps_per_second": 9.0,
        }
        folder.append("metrics", row(step + 1, fruit) | times)

    baselines = {
        "maximum": 8.0,
        "random_masked": 3.0,
        "random_unmasked": 0.1,
    }

    monkeypatch.setattr(training.evaluate, "measure_baselines", lambda config: baselines)
    states = SimpleNamespace(params=None)  # not used without a GIF
    text = training.finish(session, states, training.final_evaluation(session, states))
    result = json.loads((folder.path / "result.json").read_text())

    assert result["greedy_fruit"] == 5.0
    assert result["greedy_games"] == [[5, 5, 5, 5]]
    assert result["condition"] == "unknown"  # three rows are too few for a verdict
    assert "5.00" in text

    (last,) = folder.rows("samples")
    assert (last["step"], last["greedy_fruit"]) == (TINY.num_updates, 5.0)


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """Runs of one config compile once."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]

    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0)):
        jax.config.update(name, value)

    yield
    for name, value in zip(names, before):
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    training.run(replace(TINY, save_dir=folder, run_name="run"))
    return RunFolder(folder / "run")


def assert_same_metrics(a: RunFolder, b: RunFolder) -> None:
    for one, other in zip(a.rows("metrics"), b.rows("metrics"), strict=True):
        for name in one:
            assert name.startswith("time/") or one[name] == other[name], name


@pytest.mark.slow
def test_signals_save_and_the_resumed_run_ends_the_same(whole, tmp_path, monkeypatch, capsys):
    config = replace(TINY, save_dir=tmp_path, run_name="stopped")
    write_chunk = training.write_chunk
    for number, done in ((signal.SIGTERM, 2), (signal.SIGINT, 4)):

        def write_and_signal(*arguments, number=number):
            write_chunk(*arguments)
            os.kill(os.getpid(), number)

        monkeypatch.setattr(training, "write_chunk", write_and_signal)
        assert training.run(config) == 0
        assert f"stopped at update {done} of 6" in capsys.readouterr().out
        assert (tmp_path / "stopped" / "checkpoints" / f"checkpoint-{done}").is_dir()

        config = settings_to_resume(SnakeConfig, tmp_path / "stopped")

    monkeypatch.undo()
    assert training.run(config) == 0

    resumed = RunFolder(tmp_path / "stopped")
    assert_same_metrics(whole, resumed)
    assert whole.result["greedy_games"] == resumed.result["greedy_games"]


@pytest.mark.slow
def test_guard_stops_a_broken_run(tmp_path, capsys):
    wild = replace(
        TINY,
        save_dir=tmp_path,
        run_name="wild",
        chunk=1,
        guard="stop",
    )

    wild = replace(wild, muon_lr=1e38, aux_adam_lr=1e38)
    assert training.run(wild) == 0

    folder = RunFolder(tmp_path / "wild")
    events = folder.rows("events")
    assert (events[-1]["detector"], events[-1]["severity"]) == ("nonfinite", "stop")

    last = folder.rows("metrics")[-1]["step"]
    assert last < wild.num_updates
    assert "nonfinite" in capsys.readouterr().out
    assert (folder.checkpoints / f"checkpoint-{last}").is_dir()
    assert folder.result is None


@pytest.mark.slow
def test_resume_after_a_damaged_checkpoint_ends_the_same(tmp_path):
    config = replace(
        TINY,
        save_dir=tmp_path,
        run_name="whole",
        eval_freq=6,
        num_seeds=2,
    )

    training.run(config)
    training.run(replace(config, run_name="cut", save_freq=4))
    folder = tmp_path / "cut"
    saved = sorted(p.name for p in (folder / "checkpoints").iterdir())

    assert saved == ["checkpoint-4", "checkpoint-6"]
    (folder / "checkpoints" / "checkpoint-6" / "manifest.json").unlink()
    training.run(replace(settings_to_resume(SnakeConfig, folder), chunk=2))
    a = RunFolder(tmp_path / "whole")
    b = RunFolder(folder)
    assert_same_metrics(a, b)

    for key in ("greedy_fruit_each", "sampled_fruit_each", "greedy_won"):
        assert a.result[key] == b.result[key]

    last = a.rows("samples")[-1]
    assert last["step"] == 6
    assert a.result["greedy_fruit"] == pytest.approx(last["greedy_fruit"])
    assert len((folder / "runs.jsonl").read_text().splitlines()) == 6 * 2
    assert a.result["baselines"]["maximum"] == 8
    assert (folder / "curves.png").stat().st_size > 5000


@pytest.mark.slow
def test_new_run_from_pretrained_weights(whole, tmp_path):
    second = replace(TINY, save_dir=tmp_path, run_name="second")
    training.run(replace(second, pretrained_model=whole.path, kl_coef=1.0))
    rows = RunFolder(tmp_path / "second").rows("metrics")

    assert rows[0]["policy/kl_pretrained"] < 0.01
    assert "policy/kl_pretrained" not in whole.rows("metrics")[0]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adam", "muon", "pion"])
def test_learns_four_by_four(optim, tmp_path):
    """Masked random play gets 7.33 fruit of 15; two CPU minutes bring a policy far beyond it."""
    training.run(
        SnakeConfig(
            optim=optim,
            save_dir=tmp_path,
            run_name=optim,
            gif=False,
        )
    )

    result = RunFolder(tmp_path / optim).result
    assert 7.0 < result["baselines"]["random_masked"] < 7.7
    assert result["sampled_fruit"] > 11.0, result
