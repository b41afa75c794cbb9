"""A policy measured in its world, with its controls: what `vla train` and `vla eval` print.

Columns: success, success when told a wrong instruction (what remains without language), the
scripted expert (what could be had), and named perturbations. Scenes are never those of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from mesotron.config import WorldConfig
from mesotron.rlvr.scores import Score, wilson
from mesotron.vla.interface import EVAL_SEED, Act, EvalResult
from mesotron.vla.rollout import evaluate, evaluate_expert

SUCCESS, WRONG, EXPERT = "success", "wrong instruction", "expert"
MEAN = "all tasks"


def measure(
    act: Act,
    world: WorldConfig,
    *,
    episodes: int,
    execute: int,
    workers: int | None = None,
    controls: bool = True,
    perturb: Sequence[str] = (),
    first_seed: int = EVAL_SEED,
    gifs: int = 0,
) -> dict[str, EvalResult]:
    """Play the same seeded episodes in every column.

    Args:
        act: the policy.
        world: of its demonstrations.
        episodes: of each task.
        execute: actions of a chunk between two looks.
        workers: processes that simulate; None for as many as there are processors.
        controls: also a wrong instruction, and the expert.
        perturb: names of perturbations, a column each.
        first_seed: of the scenes.
        gifs: record so many episodes of each task in the first column.

    Returns:
        Column to result, "success" first.

    Example:
        >>> import numpy as np
        >>> still = lambda seen: np.zeros((len(seen), 4, 4))
        >>> world = WorldConfig(name="blocks_state")
        >>> found = measure(still, world, episodes=1, execute=4, workers=1)
        >>> {name: result.success for name, result in found.items()}
        {'success': 0.0, 'wrong instruction': 0.0, 'expert': 1.0}
    """
    seeds = range(first_seed, first_seed + episodes)
    found = {SUCCESS: evaluate(act, world, seeds, execute=execute, workers=workers, frames=gifs)}
    if controls:
        found[WRONG] = evaluate(act, world, seeds, execute=execute, workers=workers, wrong=True)
        found[EXPERT] = evaluate_expert(world, seeds, workers=workers)
    for name in perturb:
        changed = replace(world, perturbation=name)
        found[name] = evaluate(act, changed, seeds, execute=execute, workers=workers)
    return found


def as_rows(found: dict[str, EvalResult]) -> list[list[str]]:
    """A heading, a row for each task, and one for all; shares with 95 % intervals (Wilson)."""
    first = found[SUCCESS]
    tasks = list(first.by_task)
    rows = [["task", *found]]
    for task in tasks:
        cells = []
        for result in found.values():
            right, total = result.by_task[task]
            score = wilson(right, total)
            cells.append(f"{right}/{total} [{score.low:.2f}, {score.high:.2f}]")
        rows.append([task, *cells])
    return [*rows, [MEAN, *(short(result.score) for result in found.values())]]


def short(score: Score) -> str:
    """A score with two digits: 0.94 [0.84, 0.98]."""
    return f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]"


def as_table(found: dict[str, EvalResult]) -> Table:
    """The same for a terminal."""
    head, *rows = as_rows(found)
    count = len(found[SUCCESS].episodes)
    table = Table(title=f"success over {count} episodes, 95 % intervals")
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    return table


def as_markdown(found: dict[str, EvalResult]) -> str:
    """The same for a page."""
    head, *rows = as_rows(found)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def as_json(found: dict[str, EvalResult]) -> dict[str, Any]:
    """Column to what `EvalResult.to_json` gives."""
    return {name: result.to_json() for name, result in found.items()}


def default_execute(chunk: int) -> int:
    """Actions to carry out before looking again: two thirds of a chunk.

    Example:
        >>> default_execute(6), default_execute(8), default_execute(1)
        (4, 5, 1)
    """
    return max(1, 2 * chunk // 3)
