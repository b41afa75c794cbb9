"""`mesotron vla eval`, and success tables of a policy with its controls, also for `vla train`.

Columns: success, also with a wrong instruction, of the scripted expert, and named perturbations.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from mesotron.config import VlaEvalConfig, WorldConfig
from mesotron.evaluate.scores import wilson
from mesotron.optim.device import choose_device
from mesotron.runs.checkpoints import outside
from mesotron.runs.console import SafeConsole
from mesotron.runs.extras import require
from mesotron.runs.files import write_json
from mesotron.runs.links import make_own_folder, open_own
from mesotron.runs.markdown import make_table
from mesotron.runs.trust import check_trusted, code_names
from mesotron.vla.checkpoint import Saved, load_policy
from mesotron.vla.interface import EVAL_SEED, VALIDATION_SEED, Act, EvalResult
from mesotron.vla.policy import make_act
from mesotron.vla.rollout import evaluate, evaluate_expert
from mesotron.vla.worlds import build_world

SUCCESS = "success"
WRONG = "wrong instruction"
EXPERT = "expert"
FRAME_MILLISECONDS = 80
LAST_FRAME_MILLISECONDS = 960


def run(config: VlaEvalConfig) -> int:
    device = choose_device(config.device, config.threads)
    saved = load_policy(config.run, device)
    unseen = {"camera", "light", "noise"}.intersection(config.perturb)
    if unseen and not saved.policy.body.cameras:
        raise ValueError(f"--perturb {unseen.pop()} needs a camera: use position or wording")

    results = measure(
        make_act(saved.policy, device),
        choose_world(saved, config.world, config.trust),
        episodes=config.episodes,
        execute=config.execute or saved.execute or default_execute(saved.policy.config.chunk),
        workers=config.workers,
        controls=config.controls,
        perturb=config.perturb,
        first_seed=VALIDATION_SEED if config.validation else EVAL_SEED,
        gifs=config.gifs,
    )

    console = SafeConsole()
    console.print(f"{saved.policy.describe()}, step {saved.step}", highlight=False)
    console.print(as_table(results))
    out = config.out or outside(config.run) / "eval"
    if config.out is None:
        make_own_folder(out)
    else:
        out.mkdir(parents=True, exist_ok=True)

    write_json(out / "evaluation.json", {name: x.to_json() for name, x in results.items()})

    if config.gifs:
        write_gifs(results[SUCCESS], out / "gifs")

    console.print(f"written to {out}", soft_wrap=True, markup=False)
    return 0


def choose_world(saved: Saved, name: str | None, trust: bool = False) -> WorldConfig:
    """The world of a policy's demonstrations, or another one by name if the policy fits it."""
    if saved.world is not None and name in (None, saved.world.name):
        check_trusted(code_names(saved.world), saved.path, trust or name is not None)
        return saved.world  # with its own tasks

    if name is None:
        raise ValueError(f"{saved.path} is from recordings without a world: give --world NAME")

    body = saved.policy.body

    if body.cameras:
        images = {"pixels": body.pixels, "wrist": "wrist" in body.cameras}
    else:
        images = {}

    config = WorldConfig(name=name, **images)

    world = build_world(config)
    for field in ("cameras", "state_dim", "action_dim"):
        needed = getattr(body, field)
        given = getattr(world, field)
        if needed != given:
            raise ValueError(f"--world {name} has {field} {given}, but the policy has {needed}")

    return config


def measure(  # noqa: PLR0913  # settings by name
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
    for name in perturb:  # refuse what the world lacks before hours of episodes
        build_world(replace(world, perturbation=name))

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

    table = Table(*header, title=f"success over {count} episodes, 95% intervals")
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

    make_own_folder(folder)
    success = {(episode.task, episode.seed): episode.success for episode in result.episodes}

    paths = []
    for (task, seed), frames in result.frames.items():
        outcome = "success" if success[task, seed] else "failure"
        path = folder / f"{task}-{seed}-{outcome}.gif"
        first, *rest = map(Image.fromarray, frames)
        durations = [FRAME_MILLISECONDS] * len(rest) + [LAST_FRAME_MILLISECONDS]

        with open_own(path, "wb") as file:
            first.save(file, "gif", save_all=True, append_images=rest, duration=durations, loop=0)

        paths.append(path)

    return paths
