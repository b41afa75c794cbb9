"""`--lr auto` as a user runs it: the winner is a plain run at its rate, kills change nothing."""

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from mesotron import cli
from mesotron.rlvr import callbacks, heats, pocket
from mesotron.rlvr.session import Session
from mesotron.runs import RunFolder, checkpoints
from mesotron.watch.budget import Budget
from mesotron.watch.forecast import Interval, Limit, forecast
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


@slow
def test_adapters_search_too(run):
    assert run("--lr auto --lora 2 --out adapters") == 0
    (first, *_) = pocket.from_record(RunFolder(Path("adapters")).load("pocket"))
    assert len(first.forks) >= 4
