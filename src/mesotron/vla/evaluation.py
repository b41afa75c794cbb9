"""Success tables of a policy with its controls, as `vla train` and `vla eval` print them.

Columns: success, also with a wrong instruction, of the scripted expert, and named perturbations.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from mesotron.config import WorldConfig
from mesotron.rlvr.scores import wilson
from mesotron.runs.extras import require
from mesotron.runs.markdown import make_table
from mesotron.vla.interface import EVAL_SEED, Act, EvalResult
from mesotron.vla.rollout import evaluate, evaluate_expert

SUCCESS, WRONG, EXPERT = "success", "wrong instruction", "expert"
FRAME_MILLISECONDS = 80
LAST_FRAME_MILLISECONDS = 960


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
    """Play the same seeded episodes in every column; see `evaluate` for the shared arguments."""
    seeds = range(first_seed, first_seed + episodes)
    options: dict[str, Any] = {"execute": execute, "workers": workers}
    results = {SUCCESS: evaluate(act, world, seeds, frames=gifs, **options)}
    if controls:
        results[WRONG] = evaluate(act, world, seeds, wrong=True, **options)
        results[EXPERT] = evaluate_expert(world, seeds, workers=workers)
    for name in perturb:
        results[name] = evaluate(act, replace(world, perturbation=name), seeds, **options)
    return results


def default_execute(chunk: int) -> int:
    return max(1, 2 * chunk // 3)


def _table_rows(results: dict[str, EvalResult]) -> list[list[str]]:
    rows = [["task", *results]]
    for task in results[SUCCESS].by_task:
        cells = []
        for result in results.values():
            successes, total = result.by_task[task]
            score = wilson(successes, total)
            cells.append(f"{successes}/{total} [{score.low:.2f}, {score.high:.2f}]")
        rows.append([task, *cells])
    scores = [result.score for result in results.values()]
    return [*rows, ["all tasks", *(f"{s.value:.2f} [{s.low:.2f}, {s.high:.2f}]" for s in scores)]]


def as_table(results: dict[str, EvalResult]) -> Table:
    header, *rows = _table_rows(results)
    count = len(results[SUCCESS].episodes)
    table = Table(*header, title=f"success over {count} episodes, 95 % intervals")
    for row in rows:
        table.add_row(*row)
    return table


def as_markdown(results: dict[str, EvalResult]) -> str:
    header, *rows = _table_rows(results)
    return "\n".join(make_table(header, rows))


def write_gifs(result: EvalResult, folder: Path) -> list[Path]:
    """Write a GIF per episode recorded by `frames`, such as `red-cube-1000000-success.gif`."""
    require("vla", ["PIL"], "--gifs")
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    success = {(episode.task, episode.seed): episode.success for episode in result.episodes}
    paths = []
    for (task, seed), frames in result.frames.items():
        path = folder / f"{task}-{seed}-{'success' if success[task, seed] else 'failure'}.gif"
        first, *rest = [Image.fromarray(frame) for frame in frames]
        durations = [FRAME_MILLISECONDS] * len(rest) + [LAST_FRAME_MILLISECONDS]
        first.save(path, save_all=True, append_images=rest, duration=durations, loop=0)
        paths.append(path)
    return paths
