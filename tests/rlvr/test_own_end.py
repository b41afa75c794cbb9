"""A run that ends by itself: the rule, and what a kill around its end costs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesotron.cli import parse
from mesotron.config import SftConfig, TrainConfig
from mesotron.rlvr import own_end, session, train
from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.runs import RunFolder
from mesotron.runs.best import BestCheckpoint, HeldOut
from mesotron.runs.doctor import Gpu
from mesotron.watch.forecast import forecast
from support.planted_evaluations import (
    Killed,
    checkpoints,
    model_of,
    plant,
    small_model,  # noqa: F401  # fixtures
    small_run,  # noqa: F401
)
from support.rlvr_tiny import same

# Better until step 2; without a better one at 3, 4 and 5.
DONE_AT_5 = {1: 1, 2: 3, 3: 3, 4: 2, 5: 3}
NOISE = (0.02, -0.03, 0.01, 0.03, -0.02, -0.01)


def rewards(*levels: float) -> list[dict[str, float]]:
    return [{"step": k, "reward": x + NOISE[k % 6]} for k, x in enumerate(levels, start=1)]


def observed(*right: int) -> BestCheckpoint:
    best = BestCheckpoint()
    for step, count in enumerate(right, start=1):
        if best.observe(HeldOut(step, count / 8, tuple([1.0] * count + [0.0] * (8 - count)))):
            best.written(step)

    return best


@pytest.mark.parametrize(
    ("right", "levels", "ends"),
    [
        ((1, 4, 4, 4, 4), [0.5] * 60, True),  # nothing rises
        ((1, 4, 4, 4), [0.5] * 60, False),  # too early to say
        ((1, 4, 4, 4, 8), [0.5] * 60, False),  # the last one is better
        ((1, 4, 4, 4, 4), [k / 80 for k in range(60)], False),  # the reward still rises
        ((1, 4, 4, 4, 4), [1 - k / 60 for k in range(60)], True),  # it has collapsed
        ((1, 4, 4, 4, 4), [0.5] * 3, False),  # no forecast yet
    ],
)
def test_a_run_ends_when_neither_evaluations_nor_rewards_rise(right, levels, ends):
    rows = rewards(*levels)
    why = own_end.why_end(observed(*right), rows, len(rows))
    assert (why is not None) == ends


@pytest.fixture
def plateau(monkeypatch):
    """Every forecast is that of rewards that stay."""
    flat = forecast(rewards(*[0.5] * 60), steps=90)
    assert flat.outcome == "plateau"
    monkeypatch.setattr(own_end, "forecast", lambda *_: flat)


AUTO = "--steps auto --save-every 1 --keep 2"  # up to ten times the five steps


def test_a_run_ends_by_itself_and_reports(run, plateau, monkeypatch, capsys):
    plant(monkeypatch, DONE_AT_5)
    assert run(f"--out a {AUTO}") == 0
    assert "ended at step 5" in capsys.readouterr().out

    folder = RunFolder(Path("a"))
    assert folder.result["steps"] == folder.config["steps"] == 5
    assert folder.load("best")["step"] == 2
    assert folder.config["optim"]["schedule"] == "constant"
    assert checkpoints("a") == {2, 4, 5}


def test_a_run_that_ended_by_itself_trains_on_to_a_given_step(run, plateau, monkeypatch):
    plant(monkeypatch, DONE_AT_5 | dict.fromkeys((6, 7, 8), 3))
    assert run(f"--out a {AUTO}") == 0
    assert run("--resume a --steps 8") == 0

    folder = RunFolder(Path("a"))
    assert folder.result["steps"] == folder.config["steps"] == 8
    assert folder.config["steps_auto"] is False


@pytest.mark.parametrize("words", ["", "--average 0.5"])
@pytest.mark.parametrize("place", ["before the checkpoint", "before the report"])
def test_killed_around_its_end_ends_there_all_the_same(
    run,
    plateau,
    monkeypatch,
    place,
    words,
):
    plant(monkeypatch, DONE_AT_5)
    assert run(f"--out whole {AUTO} {words}") == 0

    def kill(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if place == "before the report":
            patch.setattr(session, "report", kill)
        else:
            save = SafeCheckpoints._save_checkpoint
            patch.setattr(
                SafeCheckpoints,
                "_save_checkpoint",
                lambda self, *given: kill() if self.state.global_step == 5 else save(self, *given),
            )

        with pytest.raises(Killed):
            run(f"--out killed {AUTO} {words}")

    assert run("--resume killed") == 0
    assert RunFolder(Path("killed")).result["steps"] == 5
    assert RunFolder(Path("killed")).load("best") == RunFolder(Path("whole")).load("best")
    last = "checkpoints/checkpoint-5"
    assert same(model_of(Path("whole", last)), model_of(Path("killed", last)))


def test_auto_is_a_word_for_steps(capsys):
    config = parse(TrainConfig, ["--steps", "auto"], "train")
    assert (config.steps_auto, config.steps) == (True, TrainConfig().steps)
    with pytest.raises(ValueError, match="--steps auto"):
        parse(SftConfig, ["--steps", "auto"], "sft")
    with pytest.raises(ValueError, match="--final"):
        TrainConfig(steps_auto=True, final="last")


def test_settings_of_a_run_that_ends_by_itself():
    given = parse(TrainConfig, ["--steps", "auto", "--optim.warmup", "0.1"], "train")
    config, notes = train.resolve_steps(given)

    assert (config.steps, config.eval_every) == (10 * given.steps, given.steps // 10)
    assert config.optim.warmup * config.steps == pytest.approx(0.1 * given.steps)
    assert len(notes) == 1
    assert train.resolve_steps(TrainConfig()) == (TrainConfig(), [])


@pytest.mark.parametrize(
    ("name", "flags", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", ["--budget", "5"], "h100"),
        ("NVIDIA GeForce RTX 3090", ["--budget", "5"], None),  # nobody rents it
        ("NVIDIA H100 80GB HBM3", [], None),
        ("NVIDIA H100 80GB HBM3", ["--budget", "5", "--price", "2"], None),
        ("NVIDIA H100 80GB HBM3", ["--budget", "5", "--device", "cpu"], None),
    ],
)
def test_a_budget_takes_the_price_of_the_machines_gpu(monkeypatch, name, flags, gpu):
    seen = Gpu(name=name, memory=80.0, used=0.0, driver="1", capability=(9, 0))
    monkeypatch.setattr(train, "list_gpus", lambda: (seen,))
    config, notes = train.with_price(parse(TrainConfig, flags, "train"))
    assert (config.gpu, len(notes)) == (gpu, int(gpu is not None))


def ending(tmp_path: Path) -> tuple[Any, ...]:
    run = RunFolder.create(tmp_path / "run", {"steps": 40}, {})
    watch: Any = SimpleNamespace(monitor=SimpleNamespace(rows=[]), actions=[])
    trainer: Any = SimpleNamespace(best=BestCheckpoint(), end_with_average=lambda: ended.append(1))
    ended: list[int] = []
    state = SimpleNamespace(global_step=8, max_steps=40, is_world_process_zero=True)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    return own_end.OwnEnd(4, trainer, watch, run), state, control, ended


def test_the_step_of_an_end_becomes_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(own_end, "why_end", lambda best, rows, step: f"enough at {step}")
    ends, state, control, ended = ending(tmp_path)
    ends.on_log(None, state, control, {"loss": 0.1})
    assert ends.reason == "enough at 8"
    assert (state.max_steps, ends.run.config["steps"], ended) == (8, 8, [1])
    assert control.should_save
    assert control.should_training_stop


@pytest.mark.parametrize(
    "other",
    ["a step between", "the last step", "no row", "is stopping", "undone", "no best", "not yet"],
)
def test_nothing_else_ends_a_run(tmp_path, monkeypatch, other):
    monkeypatch.setattr(own_end, "why_end", lambda *_: None if other == "not yet" else "enough")
    ends, state, control, ended = ending(tmp_path)
    logs = {"loss": 0.1}
    if other == "a step between":
        state.global_step = 7
    elif other == "the last step":
        state.global_step = 40
    elif other == "no row":
        logs = {"train_runtime": 1.0}
    elif other == "is stopping":
        control.should_training_stop = True
    elif other == "undone":
        ends.watch.actions = [SimpleNamespace(step=8)]
    elif other == "no best":
        ends.trainer.best = None

    ends.on_log(None, state, control, logs)
    assert ends.reason is None
    assert (state.max_steps, ends.run.config["steps"], ended) == (40, 40, [])
    assert not control.should_save
