"""One run of the tournament in a worker process, by the library's own trainer and evaluation.

A worker loads each task's start once and copies it for each run. No checkpoint is written.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import shutil
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

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


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    given = argparse.Namespace(**settings)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch

    torch.set_num_threads(given.threads)
    torch.set_float32_matmul_precision("high")  # for what autocast does not cover

    try:
        return train(cell, given, deadline)
    finally:
        gc.collect()  # trainer and callbacks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@cache
def start_of(task: str, folder: str, state: Path) -> tuple[Any, Any]:
    """A task's model and tokenizer; in the CPU's memory, since runs fill the GPU's."""
    return warm.start(folder, None if folder == "tiny" else warm.adapter_of(task, state), "cpu")


# (task, use) -> the evaluation of the start, which is the same for all runs of a process.
starts: dict[tuple[str, str], dict[str, Any]] = {}


def config_of(cell: Cell, given: Any, run: Path) -> Any:
    from mesotron.compare.kinds import change
    from mesotron.config import TrainConfig

    on_gpu = given.device == "cuda"
    use = cell["use"]
    split = "test" if cell["use"] == "reporting" else "validation"
    num_eval = min(SIZES[split], given.held_out or SIZES[split])
    task = warm.task_config(cell["task"], given.state, use, num_eval)

    config = replace(
        TrainConfig(),
        task=task,
        out=run,
        seed=cell["seed"],
        steps=given.steps,
    )

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

    from mesotron.answers.facts import Judge
    from mesotron.models.load import choose_speed
    from mesotron.rewards.call import make_reward
    from mesotron.rlvr.objectives import trl_arguments
    from mesotron.rlvr.session import Parts
    from mesotron.tasks.load import load_task

    model, tokenizer = start_of(cell["task"], given.folder, given.state)
    task = load_task(config.task)
    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, config.rollout.max_tokens)
    arguments = trl_arguments(config.objective, config.rollout, config.optim, 1)
    config = choose_speed(config, given.device == "cuda", model.num_parameters())
    device = torch.device(given.device)
    model = copy.deepcopy(model).to(device)

    return Parts(
        config,
        device,
        model,
        tokenizer,
        task,
        judge,
        reward,
        arguments,
    )


def train(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """Train and evaluate; None if time was up before the end."""
    from transformers import TrainerCallback

    from benchmarks.smollm2.training import build
    from mesotron.answers.verify import Verifier
    from mesotron.compare.kinds import diverged_at, health_of, is_not_finite
    from mesotron.models.load import as_loaded
    from mesotron.probes.forgetting import read_text, text_blocks, text_nll
    from mesotron.rlvr.session import evaluate_part, quiet_libraries
    from mesotron.runs import RunFolder

    began = time.time()
    quiet_libraries()
    path = given.state / "runs" / f"{key_of(cell)}-{time.time_ns():x}"
    config = config_of(cell, given, path)
    run = RunFolder.create(path, config, {})

    looks: list[tuple[int, dict[str, Any]]] = []
    with Verifier(config.reward.timeout) as verifier:
        parts = load(config, given, cell, verifier)
        blocks = text_blocks(parts.tokenizer, read_text())
        nll_before = text_nll(parts.model, blocks)

        place = (cell["task"], cell["use"])
        if place not in starts:
            starts[place] = evaluate_part(parts, parts.model, "start")

        trainer, kept = build(parts, run, given, deadline)
        every = max(1, min(LOOK_EVERY, given.steps // 4))

        class Look(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % every == 0 and not kept.late:
                    looks.append((state.global_step, evaluate_part(parts, trainer.model, "look")))

        looks.append((0, starts[place]))
        trainer.add_callback(Look())

        broken = False
        try:
            trainer.train()
        except RuntimeError as error:
            broken = is_not_finite(str(error))
            if not broken:
                raise

        if kept.late:
            return None

        with as_loaded(trainer.model):
            nll = text_nll(trainer.model, blocks)

    shutil.rmtree(path, ignore_errors=True)
    broken |= diverged_at(kept.rows) is not None or len(kept.rows) < given.steps
    curve = [(step, look["greedy"]["strict"]["value"]) for step, look in looks]
    final = 0.0 if broken else curve[-1][1]
    solved = "".join(str(int(one["correct"])) for one in looks[-1][1]["transcripts"])
    adapter = warm.adapter_of(cell["task"], given.state)
    health = health_of(kept.rows)

    return cell | {
        "protocol": given.protocol,
        "accuracy": final,
        "area": area(curve, given.steps, final),
        "forgetting": nll - nll_before,
        "diverged": broken,
        "stable": not broken and final >= STABLE * max(value for _, value in curve),
        "curve": curve,
        "solved": "0" * len(solved) if broken else solved,
        "formatted": looks[-1][1]["greedy"]["rates"]["facts/formatted"],
        "verdict": health.verdict,
        "cause": health.cause,
        "steps": given.steps,
        "rewards": tens(kept.rows, "reward"),
        "entropies": tens(kept.rows, "entropy"),
        "step_seconds": tens(kept.rows, "time/step"),
        "rollout_seconds": tens(kept.rows, "time/rollout"),
        "start_hash": warm.hash_of(adapter) if adapter.exists() else None,
        "seconds": time.time() - began,
        "ended": time.strftime("%FT%TZ", time.gmtime()),
    }


def area(curve: list[tuple[int, float]], steps: int, final: float) -> float:
    """Mean of the piecewise linear curve; what follows a break is zero."""
    points = curve if curve[-1][0] >= steps else [*curve, (curve[-1][0] + 1, 0.0), (steps, final)]
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(points)) / steps


def tens(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Means of ten steps each, to four digits."""
    values = [row[name] for row in rows if name in row]
    blocks = [values[k : k + 10] for k in range(0, len(values), 10)]
    return [float(f"{sum(block) / len(block):.4g}") for block in blocks]
