"""`--lr auto` as a user runs it: the winner is a plain run at its rate, kills change nothing."""

import json
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

from mesotron import cli
from mesotron.config import TrainConfig
from mesotron.optim import Muon
from mesotron.rlvr import callbacks, heats, pocket
from mesotron.rlvr.pocket import Fork, Heat, Sampled, Search
from mesotron.rlvr.session import Session
from mesotron.runs import RunFolder, checkpoints
from mesotron.runs.checkpoints import Checkpoint, writing
from mesotron.watch.budget import Budget
from mesotron.watch.forecast import Interval, Limit, forecast
from support.fake_trainer import FakeTrainer
from support.rlvr_tiny import same, save_arith_model

slow = pytest.mark.slow
TIMES = ("time", "step_time", "cost")
REWARD = """
def even(completion_ids, **_):
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]
"""
HOPELESS = {
    "probabilities": {"learn": 0.0, "plateau": 1.0, "collapse": 0.0},
    "present": 0.5,
    "least_gain": 0.1,
    "reward": Interval(value=0.5, low=0.5, high=0.5),
    "limits": (Limit(name="signal", share=1.0, remedy="none", is_mending=False),),
}
SMALL = (
    "--steps 40 --save-every 7 --keep 3 --reward earned:even --lr 1e-3 --device cpu --batch 4 "
    "--group 4 --max-tokens 4 --task.num-eval 3 --task.num-train 14 --eval-every 4"
)


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_arith_model(folder)
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "earned.py").write_text(REWARD)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)

        def main(words: str) -> int:
            sys.modules.pop("earned", None)
            small = "--trust " if "--resume" in words else f"{SMALL} --model {model} "
            return cli.main(["train", *(small + words).split()])

        yield main

    sys.modules.pop("earned", None)


@pytest.fixture(scope="module")
def searched(run: Callable[..., int]) -> Path:
    assert run("--lr auto --out searched") == 0
    return Path("searched").resolve()


def rows(path: Path, name: Any = "metrics") -> list[dict[str, Any]]:
    kept = []
    for row in RunFolder(path).rows(name):
        kept.append({key: row[key] for key in row if not key.startswith(TIMES)})

    return kept


def last_weights(path: Path, step: int = 40) -> dict[str, Any]:
    return load_file(path / f"checkpoints/checkpoint-{step}/model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert same(last_weights(one), last_weights(other))
    for name in ("metrics", "samples", "events"):
        assert rows(one, name) == rows(other, name)


def test_the_run_is_a_plain_run_at_the_chosen_rates(run, searched):
    searches = pocket.from_record(RunFolder(searched).load("pocket"))
    first, *later = searches
    assert first.step == 0
    assert [row["step"] for row in rows(searched)] == list(range(1, 41))
    assert pocket.spent(searches) <= pocket.COST * 40
    assert all(search.choice is not None for search in searches)

    rate = first.choice.rate
    assert run(f"--lr {rate!r} --out plain") == 0
    until = min([search.step for search in later if search.choice.factor != 1], default=40)

    for mine, theirs in zip(rows(searched)[:until], rows(Path("plain")), strict=False):
        assert mine == theirs
    if until == 40:
        assert RunFolder(searched).load("best") == RunFolder(Path("plain")).load("best")
        assert same(last_weights(searched), last_weights(Path("plain")))


def test_forks_leave_rows_and_no_weights(searched):
    forks = sorted((searched / "pocket").iterdir())
    assert len(forks) >= 4
    assert not any(searched.glob("pocket/*/checkpoints/checkpoint-*"))
    assert all(RunFolder(fork).rows("metrics") for fork in forks)
    assert "checkpoint-0" not in [path.name for path in (searched / "checkpoints").iterdir()]


def kill_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Raise at the n-th of the instants at which the search changes its folder."""
    left = [number]

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():  # not that of spent.json
                left[0] -= 1
            if left[0] == 0:
                left[0] = -1
                raise Killed
            return original(*args, **kwargs)

        patch.setattr(owner, name, spy)

    counted(heats, "append_row")
    counted(checkpoints, "publish")
    counted(checkpoints, "prune")
    counted(RunFolder, "save")
    counted(RunFolder, "append")


@pytest.mark.parametrize("number", [9, *(pytest.param(k, marks=slow) for k in (30, 60, 90, 120))])
def test_a_killed_search_ends_with_the_same_bits(run, searched, number):
    out = f"killed-{number}"
    with pytest.MonkeyPatch.context() as patch:
        kill_at(number, patch)
        with pytest.raises(Killed):
            run(f"--lr auto --out {out}")

    assert run(f"--resume {out}") == 0
    assert_same_run(searched, Path(out).resolve())

    mine, theirs = (
        json.dumps((RunFolder(path).load("pocket") or {})["searches"])
        for path in (searched, Path(out).resolve())
    )
    assert mine == theirs


def test_a_verdict_at_the_step_of_a_look_ends_the_run(run, monkeypatch, capsys):
    def hopeless(rows: Any, steps: Any, price: Any) -> Any:
        return replace(forecast(rows, steps, price), outcome="plateau", **HOPELESS)

    monkeypatch.setattr(callbacks, "forecast", hopeless)
    assert run("--lr auto --verdict-after 10 --stop-if hopeless --out hopeless") == 0
    assert "stopped and saved at step 10" in capsys.readouterr().out

    folder = RunFolder(Path("hopeless"))
    assert folder.rows("metrics")[-1]["step"] == 10
    assert [each.step for each in pocket.from_record(folder.load("pocket"))] == [0]


def test_a_limit_between_two_heats_stops_the_run(run, monkeypatch, capsys):
    starts: list[Budget] = []
    start = Budget.start

    def count(self: Budget) -> None:
        starts.append(self)
        start(self)

    def refuse(*_: Any, **__: Any) -> str | None:
        return "no time is left" if len(starts) == 2 else None

    monkeypatch.setattr(Budget, "start", count)
    monkeypatch.setattr(Budget, "refusal", refuse)

    assert run("--lr auto --out limited") == 0
    assert "no time is left" in capsys.readouterr().out
    newest, damaged = checkpoints.newest_whole(Path("limited/checkpoints"))
    assert newest is not None
    assert (newest.step, damaged) == (0, [])

    (search,) = pocket.from_record(RunFolder(Path("limited")).load("pocket"))
    assert [fork.factor for fork in search.forks] == [1.0]


@pytest.mark.parametrize("part", ["watch", "spending", "verdict"])
def test_whatever_stops_a_stretch_ends_the_run(part):
    reasons = {name: SimpleNamespace(stopped_by=None) for name in ("watch", "spending", "verdict")}
    parts: Any = dict.fromkeys(("run", "parts", "trainer", "budget"))
    going = Session(**parts, **reasons, stop=SimpleNamespace(requested=False))

    assert not going.is_over()
    assert replace(going, stop=SimpleNamespace(requested=True)).is_over()
    assert replace(going, own_end=SimpleNamespace(reason="enough")).is_over()
    assert replace(going, **{part: SimpleNamespace(stopped_by="a reason")}).is_over()


# The parts of a search


def a_course(tmp_path: Path, *modules: str, **config: Any) -> heats.Course:
    """A course of a run that is only a folder."""
    run = RunFolder.create(tmp_path / "run", {}, {"device": "x"})
    own = tuple(type("Own", (), {"__module__": module})() for module in modules)
    settings = TrainConfig(**{"steps": 40, "guard": "off"} | config)  # pyright: ignore
    starts: list[Any] = []
    view: Any = SimpleNamespace(
        start_at=lambda *seen: starts.append(seen), say=starts.append, console=Console(quiet=True)
    )
    view.starts = starts
    plan: Any = SimpleNamespace(config=settings)
    return heats.Course(run, plan, None, None, view, None, own)  # pyright: ignore


def a_fork(factor: float = 1.0, last: int = 2, condition: Any = "healthy") -> Fork:
    sampled = []
    for step in range(1, last + 1):
        sampled.append(Sampled(step=step, travelled=0.1 * step, rewards={"a": 0.5}, drift={}))

    return Fork(
        factor=factor,
        rate=1e-3 * factor,
        planned=4.0,
        steps=tuple(sampled),
        conditions=(condition,),
    )


class Schedule(LambdaLR):
    """Halves the rate from the third step on."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 1.0 if step < 2 else 0.5)


def log_of(trainer: Any, last: int = 2, travelled: float = 0.0) -> heats.HeatLog:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.5)
    log = heats.HeatLog(trainer, last, travelled)
    state = SimpleNamespace(global_step=0, max_steps=4)
    log.on_train_begin(None, state, None, optimizer=optimizer, lr_scheduler=Schedule(optimizer))
    return log


def sampling_trainer(weight: float = 1.0) -> Any:
    logs = {
        "prompt": ["p", "p", "q", "q"],
        "completion": ["a"] * 4,
        "advantages": [0.0] * 4,
        "rewards": {"right": [1.0, 0.0, 1.0, 1.0], "short": [math.nan, 0.5, None, 1.0]},
    }
    return FakeTrainer(
        _logs=logs,
        reward_weights=torch.tensor([1.0, 2.0]),
        num_generations=2,
        model=torch.nn.Linear(1, 1).requires_grad_(False).apply(lambda m: m.weight.fill_(weight)),
    )


def test_a_heat_collects_what_its_fork_samples_and_ends_after_its_last_step():
    log = log_of(sampling_trainer(), travelled=1.0)
    assert (log.rate, log.left) == (0.5, 0.5 * (1 + 1 + 0.5 + 0.5))

    for step, rate in ((1, 0.25), (2, 0.125)):
        control = SimpleNamespace(should_training_stop=False, should_save=False)
        logs = {"loss": 0.1, "learning_rate": rate, "reward": 1.0, "kl": 0.5, "entropy": math.nan}
        state = SimpleNamespace(global_step=step)
        log.on_step_end(None, state, control)
        log.on_log(None, state, control, logs)
        assert control.should_training_stop is control.should_save is (step == 2)

    log.on_log(None, state, control, {"train_runtime": 3.0})
    first, second = log.sampled
    assert first.rewards == {"0:p": (1.0 + 1.0) / 2, "1:q": (1.0 + 3.0) / 2}
    assert (first.travelled, second.travelled, log.travelled) == (1.0, 1.25, 1.375)
    assert first.drift == {"kl": 0.5}
    assert not log.is_broken


def test_a_step_that_reused_a_rollout_has_no_rewards():
    log = log_of(sampling_trainer())
    log.on_log(None, SimpleNamespace(global_step=1), None, {"loss": 0.1})
    assert log.sampled[0].rewards == {}
    assert log.travelled == 0.0


@pytest.mark.parametrize(("weight", "loss"), [(math.nan, 0.1), (1.0, math.nan), (1.0, math.inf)])
def test_a_fork_that_breaks_ends_and_is_not_saved(weight, loss):
    log = log_of(sampling_trainer(weight), last=9)
    control = SimpleNamespace(should_training_stop=False, should_save=True)
    state = SimpleNamespace(global_step=1)
    log.on_step_end(None, state, control)
    log.on_log(None, state, control, {"loss": loss})
    assert log.is_broken
    assert control.should_training_stop
    assert not control.should_save


def test_the_rate_of_a_fork_is_that_of_its_matrices():
    def parameter() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.ones(2, 2))

    groups = [
        {"params": [parameter()], "rule": "adamw", "lr": 0.5},
        {"params": [parameter()], "rule": "muon", "lr": 0.25},
    ]
    assert heats.matrix_base_rate(Muon(groups)) == 0.25

    plain = torch.optim.SGD([{"params": [parameter()], "lr": 0.1}, {"params": [parameter()]}], 0.3)
    assert heats.matrix_base_rate(plain) == 0.3
    plain.param_groups[0]["initial_lr"] = 0.7  # before its schedule
    assert heats.matrix_base_rate(plain) == 0.7


def test_a_schedule_of_another_kind_counts_whole_steps():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.5)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    state = SimpleNamespace(global_step=1, max_steps=4)
    assert heats.shape_left(constant, state) == 3.0
    assert heats.shape_left(SimpleNamespace(scheduler=Schedule(optimizer)), state) == 2.0


def test_nothing_of_another_fork_is_left_in_the_trainer():
    columns = {name: [1] for name in ("prompt", "completion", "advantages")}
    trainer = FakeTrainer(
        _metrics={"train": {"reward": [1.0]}},
        _logs={**columns, "rewards": {"a": [1]}, "extra": {"b": [1]}},
        _buffered_inputs=[1],
        _last_loaded_step=7,
        last_step={"rng": 1},
    )
    trainer.forget_rollouts()
    assert trainer._metrics["train"] == {}
    assert not any(trainer._logs.values())
    assert (trainer._buffered_inputs, trainer._last_loaded_step, trainer.last_step) == (
        None,
        -1,
        None,
    )


def test_rows_of_forks_are_not_sent_to_other_trackers(tmp_path):
    course = a_course(tmp_path, "transformers.integrations.wandb", "transformers.trainer_callback")
    assert heats.own_callbacks(course) == [course.callbacks[1]]


def write_checkpoint(run: RunFolder, step: int) -> Path:
    with writing(run.checkpoints, step) as draft:
        (draft / "model").write_text(f"{run.path.name} {step}")
    return run.checkpoints / f"checkpoint-{step}"


def test_a_fork_begins_anew_or_goes_on_after_its_last_heat(tmp_path):
    course = a_course(tmp_path)
    fork = heats.open_fork(course, 0, Heat(factor=2.0, first=0, last=2))
    assert fork.path == course.forks / "0-x2"
    assert fork.environment == {"device": "x"}
    for step in (1, 2, 3, 4):
        fork.append("metrics", {"step": step})
        write_checkpoint(fork, step)

    again = heats.open_fork(course, 0, Heat(factor=2.0, first=2, last=5))
    assert [row["step"] for row in again.rows("metrics")] == [1, 2]
    assert [one.step for one in checkpoints.list_checkpoints(again.checkpoints)] == [1, 2]

    anew = heats.open_fork(course, 0, Heat(factor=2.0, first=0, last=2))
    assert anew.rows("metrics") == []
    assert checkpoints.list_checkpoints(anew.checkpoints) == []


def test_the_distance_of_a_fork_is_that_of_its_own_steps(tmp_path):
    run = RunFolder.create(tmp_path / "fork", {}, {})
    for step, rate in ((1, 8.0), (2, 0.5), (3, None), (4, 0.25), (5, 4.0)):
        run.append("metrics", {"step": step, "learning_rate": rate})

    assert heats.travelled_after(run, a_fork(last=4), 1) == 0.75


def test_searches_are_read_up_to_a_fork_whose_state_is_gone(tmp_path):
    course = a_course(tmp_path)
    assert heats.read_searches(course, 0) == ([], Search(step=0))

    first = Search(step=0, forks=(a_fork(),), choice=pocket.choose([a_fork()]))
    second = Search(step=8, forks=(a_fork(0.5, 10), a_fork(2.0, 10, "not finite")))
    course.run.save(pocket.NAME, pocket.to_record([first, second]))
    assert heats.read_searches(course, 8) == ([first], Search(step=8))

    state = heats.open_fork(course, 8, Heat(factor=0.5, first=8, last=10))
    write_checkpoint(state, 10)
    assert heats.read_searches(course, 8) == ([first], second)

    # Of a search that has chosen, only the winner's state is needed.
    chosen = replace(second, choice=replace(pocket.choose([a_fork()]), factor=0.5))
    chosen = replace(chosen, forks=(*chosen.forks, a_fork(4.0, 10)))
    course.run.save(pocket.NAME, pocket.to_record([first, chosen]))
    assert heats.read_searches(course, 8) == ([first], chosen)

    later = Search(step=16)
    assert heats.read_searches(course, 16) == ([first, chosen], later)


@pytest.mark.parametrize("guard", ["off", "rollback"])
def test_the_winners_rows_and_checkpoints_become_the_runs(tmp_path, guard):
    course = a_course(tmp_path, guard=guard)
    base = Checkpoint(0, write_checkpoint(course.run, 0))
    for factor in (1.0, 2.0):
        fork = heats.open_fork(course, 0, Heat(factor=factor, first=0, last=3))
        fork.save("routing", {"rows": [factor]})
        for step in (1, 2, 3):
            fork.append("metrics", {"step": step, "x": factor})
            fork.append("samples", {"step": step, "x": factor})
            write_checkpoint(fork, step)

    course.run.append("metrics", {"step": 1, "x": "left by a kill"})
    forks = (a_fork(1.0, 3), a_fork(2.0, 2))
    choice = replace(pocket.choose(forks), factor=2.0)
    done = heats.adopt(course, base, Search(step=0, forks=forks, choice=choice))

    assert done == Checkpoint(2, course.run.checkpoints / "checkpoint-2")
    assert (done.path / "model").read_text() == "0-x2 2"
    kept = [one.step for one in checkpoints.list_checkpoints(course.run.checkpoints)]
    assert kept == ([0, 1, 2] if guard == "rollback" else [1, 2])
    assert [row["x"] for row in course.run.rows("metrics")] == [2.0] * 3
    assert [row["x"] for row in course.run.rows("samples")] == [2.0] * 3
    assert course.run.load("routing") == {"rows": [2.0]}
    assert not any(course.forks.glob("*/checkpoints"))
    (step, rows), *_ = course.view.starts  # pyright: ignore
    assert (step, [row["step"] for row in rows]) == (2, [1, 2, 3])


def test_there_is_no_rate_to_continue_with_if_the_winner_broke(tmp_path):
    forks = (a_fork(1.0, 2, "not finite"),)
    done = Search(step=0, forks=forks, choice=pocket.choose(forks))
    with pytest.raises(ValueError, match="--lr"):
        heats.adopt(a_course(tmp_path), Checkpoint(0, tmp_path), done)


def test_a_search_is_shown_with_its_rate_and_cost(tmp_path):
    course = a_course(tmp_path)
    console = Console(record=True, width=120)
    view: Any = course.view
    view.console = console
    forks = (a_fork(2.0, 2), a_fork(0.5, 3))
    choice = replace(pocket.choose(forks), factor=0.5, rate=5e-4)
    heats.show(course, Search(step=0, forks=forks, choice=choice), 10)

    lines = [line for line in console.export_text().splitlines() if "0.500" in line]
    assert ["chosen" in line for line in lines] == [True, False]  # the smaller rate first
    assert [line.split()[1] for line in lines] == ["0.0005", "0.002"]
    assert "0.0005" in view.starts[-1]
    assert "10 steps" in view.starts[-1]
    assert "25%" in view.starts[-1]


@slow
def test_adapters_search_too(run):
    assert run("--lr auto --lora 2 --out adapters") == 0
    (first, *_) = pocket.from_record(RunFolder(Path("adapters")).load("pocket"))
    assert len(first.forks) >= 4
