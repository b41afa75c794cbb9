"""How a run of behaviour cloning ends: an evaluation where there is a simulator, and a report."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rich.console import Console

from mesotron.config import VlaTrainConfig, WorldConfig
from mesotron.runs import RunFolder
from mesotron.vla.acting import make_act
from mesotron.vla.checkpoint import describe
from mesotron.vla.interface import Demos
from mesotron.vla.measure import as_json, as_markdown, as_table, default_execute, measure
from mesotron.vla.training import Trainer

_TOLD = ("loss", "update_rms/vision", "update_rms/language", "update_rms/fusion")
_TOLD += ("update_rms/action", "gradient/action/effective_rank", "gradient/action/snr")


def finish(run: RunFolder, trainer: Trainer, demos: Demos, console: Console) -> None:
    """Evaluate if that is possible and wanted, write result and report, say where they are."""
    config, rows = trainer.config, run.rows("metrics")
    result: dict[str, Any] = {"steps": config.steps, "loss": rows[-1]["loss"]}
    lines = [f"# {describe(trainer.policy)}: {config.steps} steps", "", *settings(config), ""]
    elsewhere = cannot_simulate(demos.world, config.episodes)
    if elsewhere:
        how = f"mesotron vla eval {run.path}" + (" --world NAME" if demos.world is None else "")
        sentence = f"not evaluated: {elsewhere}; evaluate with {how}"
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
        lines += [sentence, ""]
    else:
        assert demos.world is not None
        found = measure(
            make_act(trainer.policy.eval(), trainer.device),
            demos.world,
            episodes=config.episodes,
            execute=config.execute or default_execute(config.policy.chunk),
            workers=config.workers,
        )
        run.save("evaluation", as_json(found))
        result |= {name: score.success for name, score in found.items()}
        console.print(as_table(found))
        lines += [f"Success over {config.episodes} episodes of each task, never trained on, with "
                  "95 % intervals:", "", as_markdown(found), ""]  # fmt: skip
    run.finish(result, "\n".join([*lines, *curve(rows), ""]))
    last = f"report: {run.path / 'report.md'}; more: mesotron vla eval {run.path}"
    console.print(last, soft_wrap=True, highlight=False, markup=False)


def cannot_simulate(world: WorldConfig | None, episodes: int) -> str:
    """Why there is no evaluation here, or nothing."""
    if episodes == 0:
        return "--episodes 0"
    if world is None:
        return "the demonstrations name no world"
    for package in ("mujoco", *(("metaworld",) if world.name == "metaworld" else ())):
        if find_spec(package) is None:
            return f"this machine has no {package}"
    return ""


def settings(config: VlaTrainConfig) -> list[str]:
    """Optimizer and data in words."""
    optim = config.optim
    rules = ", ".join(f"{part} {getattr(optim, part)}"
                      for part in ("vision", "language", "fusion", "action"))  # fmt: skip
    aid = f" An auxiliary loss (weight {config.where:g}) told where the named object is."
    return [
        f"{rules}; learning rate {optim.lr:g}, {optim.schedule} schedule, batch {config.batch}, "
        f"seed {config.seed}.{aid if config.where else ''}"
    ]


def curve(rows: list[dict[str, Any]]) -> list[str]:
    """A few points of the training as a table; probes were not made at every row."""
    last: dict[str, float] = {}
    filled = []
    for row in rows:
        last = last | {name: row[name] for name in _TOLD if name in row}
        filled.append({"step": row["step"], **last})
    places = sorted({round(k * (len(filled) - 1) / 9) for k in range(10)})
    names = [name for name in _TOLD if name in last]
    head = [
        "## Training",
        "",
        "| step | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    body = []
    for place in places:
        cells = [f"{filled[place][n]:.3g}" if n in filled[place] else "" for n in names]
        body.append("| " + " | ".join([str(filled[place]["step"]), *cells]) + " |")
    return [*head, *body]
