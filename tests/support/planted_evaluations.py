"""Whole small runs whose held-out evaluations are planted."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mesotron import cli
from mesotron.rlvr import session
from support.rlvr_tiny import save_arith_model

# A random model has no right answer: this reward has a spread, so that the weights move.
REWARD = """
def even(completion_ids, **_):
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]
"""
WORDS = (
    "--reward earned:even --save-every 0 --keep 1 --lr 1e-2 --device cpu "
    "--batch 4 --group 4 --max-tokens 4 "
    "--task.num-eval 4 --task.num-train 14 --steps 5 --eval-every 1"
)


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


@pytest.fixture(scope="module", name="model")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_arith_model(folder)
    return folder


@pytest.fixture(name="run")
def small_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    (tmp_path / "earned.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def main(words: str) -> int:
        sys.modules.pop("earned", None)
        small = "--trust " if "--resume" in words else f"{WORDS} --model {model} "
        return cli.main(["train", *(small + words).split()])

    return main


def plant(monkeypatch: pytest.MonkeyPatch, right: dict[int, int]) -> dict[str, Any]:
    """Make evaluations answer so many problems; returns the weights that they saw, by name."""
    evaluate = session.evaluate_part
    seen: dict[str, Any] = {}

    def planted(parts: Any, model: Any, name: str) -> dict[str, Any]:
        is_fresh = parts.task.eval[0].id in seen.get("fresh problems", ())
        place = "fresh" if is_fresh else name
        seen[place] = {n: p.detach().clone() for n, p in model.named_parameters()}

        result = evaluate(parts, model, name)
        steps = {"before": 0, "after": max(right)}
        step = steps[name] if name in steps else int(name.removeprefix("step "))
        count = right.get(step, 0)
        for k, one in enumerate(result["transcripts"]):
            one["correct"] = k < count

        result["greedy"]["strict"]["value"] = count / len(result["transcripts"])
        return result

    def fresh(config: Any, task: Any) -> Any:
        problems = load_fresh(config, task)
        seen["fresh problems"] = {problem.id for problem in problems}
        assert not seen["fresh problems"] & {problem.id for problem in task.eval}
        return problems

    load_fresh = session.load_fresh
    monkeypatch.setattr(session, "evaluate_part", lambda *given: planted(*given))
    monkeypatch.setattr(session, "load_fresh", fresh)
    return seen


def checkpoints(name: str) -> set[int]:
    return {int(path.name.split("-")[1]) for path in Path(name, "checkpoints").iterdir()}


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)
