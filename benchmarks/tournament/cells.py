"""One run of the tournament in a worker process, by the library's own trainer and evaluation.

A worker loads each task's start once and copies it for each run. No checkpoint is written.
"""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.crew import torch_process
from benchmarks._lib.rows import values
from benchmarks.tournament import warm
from benchmarks.tournament.plan import CONTENDERS, Cell, key_of
from benchmarks.tournament.tasks import SIZES, TASKS

GRACE = 30.0  # seconds for what is being evaluated when the time is up
LOOK_EVERY = 25
LOGITS = 256 * 14  # tokens whose logits a run may hold at once
STABLE = 0.8  # of the curve's best point that the last one must have
COMMON = (
    "reward.parts=two_part",
    "objective.beta=0",
    "optim.clip=all",
    "optim.schedule=linear",
    "optim.warmup=0.05",
    "optim.fused=false",
    "save_every=0",
)

Curve = list[tuple[int, float]]


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    with torch_process(settings) as given:
        return train(cell, given, deadline)


@cache
def start_of(task: str, folder: str, state: Path) -> tuple[Any, Any]:
    """A task's model and tokenizer; in the CPU's memory, since runs fill the GPU's."""
    adapter = None if folder == "tiny" else warm.adapter_of(task, state)
    return warm.start(folder, adapter, "cpu")


# (task, use) -> the evaluation of the start, which is the same for all runs of a process.
starts: dict[tuple[str, str], dict[str, Any]] = {}


def config_of(cell: Cell, given: Any, run: Path) -> Any:
    from mesotron.compare.change import change
    from mesotron.config import TrainConfig

    on_gpu = given.device == "cuda"
    split = "test" if cell["use"] == "reporting" else "validation"
    num_eval = min(SIZES[split], given.held_out or SIZES[split])
    task = warm.task_config(cell["task"], given.state, cell["use"], num_eval)
    plain = TrainConfig()
    config = replace(plain, task=task, out=run, seed=cell["seed"], steps=given.steps)

    changes = [
        *COMMON,
        f"model.name={given.folder}",
        f"device={given.device}",
        f"model.dtype={'mixed' if on_gpu else 'float32'}",
        f"rollout.fast={on_gpu}",
        f"rollout.prompts={given.prompts}",
        "rollout.generations=8",
        f"rollout.micro_batch={micro_batch(given.prompts * 8, cell['task'])}",
        f"rollout.max_tokens={TASKS[cell['task']].max_tokens}",
        *CONTENDERS[cell["contender"]].changes,
        f"optim.lr={cell['rate']}",
    ]
    return change(config, changes)


def micro_batch(rows: int, task: str) -> int:
    """Completions of a pass: the logits of several runs must fit into the GPU's memory."""
    fitting = LOGITS // TASKS[task].max_tokens
    return next(k for k in range(min(rows, fitting), 0, -1) if rows % k == 0)


def load(config: Any, given: Any, cell: Cell, verifier: Any) -> Any:
    """The session's parts around a copy of the start that this worker has."""
    import torch

    from benchmarks._lib.parts import parts_around
    from mesotron.models.speed import choose_speed

    start, tokenizer = start_of(cell["task"], given.folder, given.state)
    device = torch.device(given.device)
    model = copy.deepcopy(start).to(device)

    parts = parts_around(model, tokenizer, config, device, verifier)
    config = choose_speed(config, given.device == "cuda", model.num_parameters())
    return replace(parts, config=config)


class Looks:
    """Evaluations of a run, the start first.

    Args:
        parts: of the session.
        place: (task, use), whose start is evaluated once in a process.
    """

    def __init__(self, parts: Any, place: tuple[str, str]) -> None:
        from mesotron.rlvr.parts import evaluate_part

        if place not in starts:
            starts[place] = evaluate_part(parts, parts.model, "start")

        self.parts = parts
        self.found: list[tuple[int, dict[str, Any]]] = [(0, starts[place])]

    def look(self, step: int, model: Any) -> None:
        from mesotron.rlvr.parts import evaluate_part

        self.found.append((step, evaluate_part(self.parts, model, "look")))

    @property
    def curve(self) -> Curve:
        return [(step, look["greedy"]["strict"]["value"]) for step, look in self.found]

    @property
    def last(self) -> dict[str, Any]:
        return self.found[-1][1]


def train(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """Train and evaluate; None if time was up before the end."""
    from benchmarks.smollm2.training import build
    from mesotron.answers.verify import Verifier
    from mesotron.compare.health import diverged_at
    from mesotron.rlvr.lifecycle import quiet_libraries
    from mesotron.runs import RunFolder

    began = time.time()
    quiet_libraries()
    path = given.state / "runs" / f"{key_of(cell)}-{time.time_ns():x}"
    config = config_of(cell, given, path)
    run = RunFolder.create(path, config, {})

    with Verifier(config.reward.timeout) as verifier:
        parts = load(config, given, cell, verifier)
        nll_before = nll_of(parts.model, parts.tokenizer)
        looks = Looks(parts, (cell["task"], cell["use"]))

        trainer, kept = build(parts, run, given, deadline)
        every = max(1, min(LOOK_EVERY, given.steps // 4))
        broken = not train_with_looks(trainer, kept, looks, every)
        if kept.late:
            return None

        forgetting = nll_of(trainer.model, parts.tokenizer) - nll_before

    shutil.rmtree(path, ignore_errors=True)
    broken |= diverged_at(kept.rows) is not None or len(kept.rows) < given.steps
    adapter = warm.adapter_of(cell["task"], given.state)

    finished = cell | outcome(looks, broken, given.steps) | course(kept.rows)
    return finished | {
        "protocol": given.protocol,
        "forgetting": forgetting,
        "steps": given.steps,
        "start_hash": warm.hash_of(adapter) if adapter.exists() else None,
        "seconds": time.time() - began,
        "ended": time.strftime("%FT%TZ", time.gmtime()),
    }


def nll_of(model: Any, tokenizer: Any) -> float:
    """Nats per token of general text, with the weights as they were loaded (LoRA merged)."""
    from mesotron.models.sharded import as_loaded
    from mesotron.probes.forgetting import read_text, text_blocks, text_nll

    blocks = text_blocks(tokenizer, read_text())
    with as_loaded(model):
        return text_nll(model, blocks)


def train_with_looks(trainer: Any, kept: Any, looks: Looks, every: int) -> bool:
    """Train and evaluate on the way; False if a number was not finite."""
    from transformers import TrainerCallback

    from mesotron.compare.health import is_not_finite

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % every == 0 and not kept.late:
                looks.look(state.global_step, trainer.model)

    trainer.add_callback(Look())
    try:
        trainer.train()
    except RuntimeError as error:
        if not is_not_finite(str(error)):
            raise
        return False
    return True


def outcome(looks: Looks, broken: bool, steps: int) -> Cell:
    """What the run came to; one that broke has solved nothing."""
    curve = looks.curve
    solved = "".join(str(int(one["correct"])) for one in looks.last["transcripts"])
    final = 0.0 if broken else curve[-1][1]
    best = max(value for _, value in curve)

    return {
        "accuracy": final,
        "area": area(curve, steps, final),
        "diverged": broken,
        "stable": not broken and final >= STABLE * best,
        "curve": curve,
        "solved": "0" * len(solved) if broken else solved,
        "formatted": looks.last["greedy"]["rates"]["facts/formatted"],
    }


def course(rows: list[dict[str, Any]]) -> Cell:
    """What was logged on the way, and what the watch says of it."""
    from mesotron.compare.health import health_of

    health = health_of(rows)
    return {
        "verdict": health.verdict,
        "cause": health.cause,
        "rewards": tens(rows, "reward"),
        "entropies": tens(rows, "entropy"),
        "step_seconds": tens(rows, "time/step"),
        "rollout_seconds": tens(rows, "time/rollout"),
    }


def area(curve: Curve, steps: int, final: float) -> float:
    """Mean of the piecewise linear curve; what follows a break is zero."""
    points = list(curve)
    if curve[-1][0] < steps:
        points += [(curve[-1][0] + 1, 0.0), (steps, final)]

    total = sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(points))
    return total / steps


def tens(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Means of ten steps each, to four digits."""
    logged = values(rows, name)
    means = []
    for first in range(0, len(logged), 10):
        mean = fmean(logged[first : first + 10])
        means.append(float(f"{mean:.4g}"))
    return means
