"""One run of behavior cloning: folder, live view, watch, checkpoints, evaluation and report.

A killed and resumed run ends bit-equal to an uninterrupted one (on the CPU; GPU sums may differ).
"""

import dataclasses
import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mesotron.config import VlaTrainConfig, WorldConfig
from mesotron.optim.device import choose_device, name_device
from mesotron.runs import RunFolder, new_run_path
from mesotron.runs.console import LiveView, SafeConsole, print_line
from mesotron.runs.files import last_value, write_whole
from mesotron.runs.markdown import fill_template, training_table
from mesotron.runs.process import StopRequest
from mesotron.runs.resume import plan_new, plan_resume
from mesotron.vla import checkpoint
from mesotron.vla.demos import is_lerobot, load_demos, trusted_world
from mesotron.vla.evaluation import as_markdown, as_table, default_execute, measure
from mesotron.vla.interface import Demos
from mesotron.vla.optimizer import route_parts
from mesotron.vla.policy import PARTS, make_act
from mesotron.vla.training import Trainer
from mesotron.watch import Event
from mesotron.watch.guard import LoopWatch

SHOWN_METRICS = {
    "loss": "loss",
    "grad_norm": "gradient",
    "update_rms/action": "action update",
    "gradient/action/effective_rank": "action rank",
    "learning_rate": "lr",
}
REPORTED_METRICS = ("loss", *(f"update_rms/{part}" for part in PARTS))
REPORTED_METRICS += ("gradient/action/effective_rank", "gradient/action/snr")


def train(config: VlaTrainConfig) -> int:
    if config.resume is not None:
        plan = plan_resume(config, evaluate="mesotron vla eval", instead="start a new run")
    else:  # with an absolute path, so that it can be resumed from anywhere
        config = dataclasses.replace(config, demos=config.demos.resolve())
        plan = plan_new(config, config.out or new_run_path("vla"))

    config = plan.config
    device = choose_device(config.device, config.threads)
    console = SafeConsole()

    if not is_lerobot(config.demos):
        trusted_world(config.demos, config.trust)  # the evaluation at the end builds it

    demos = load_demos(config.demos, config.pixels)
    trainer = Trainer(config, demos, device)

    for note in plan.notes:
        print_line(console, note)

    size = f"{len(demos):,} observations, {len(demos.tasks)} instructions"
    print_line(console, f"{trainer.policy.describe()}; {size}{_auxiliary_note(config)}")
    table = route_parts(trainer.policy, config.optim)

    sizes: dict[tuple[str, str], list[int]] = {}
    for row in table:
        sizes.setdefault((row.name.split(".")[0], row.rule), []).append(row.numel)

    summary = Table(
        "part",
        "rule",
        "tensors",
        "parameters",
        box=None,
        pad_edge=False,
    )
    for (part, rule), each in sizes.items():
        summary.add_row(part, rule, str(len(each)), f"{sum(each):,}")

    console.print(summary)
    with plan.open_folder(name_device(device), torch.get_num_threads()) as run:
        write_whole(run.path / "routing.txt", table.to_text(full=True))
        if plan.checkpoint is not None:
            checkpoint.restore(trainer, plan.checkpoint.path, plan.checkpoint.step)

        run.cut_after(trainer.step)
        if plan.is_longer:
            run.extend(config.steps)

        stopped_by = _fit(run, trainer, demos, console)
        if trainer.step < config.steps:
            why = f": {stopped_by.sentence()}" if stopped_by else ""
            resume = f"resume with mesotron vla train --resume {run.path}"
            print_line(console, f"stopped and saved at step {trainer.step}{why}; {resume}")
            return 0

        _finish(run, trainer, demos, console)

    return 0


def _auxiliary_note(config: VlaTrainConfig) -> str:
    note = f"; auxiliary loss on the object's position, weight {config.where:g}"
    return note if config.where else ""


def _fit(run: RunFolder, trainer: Trainer, demos: Demos, console: Console) -> Event | None:
    """Train to the end, or until a signal or the guard, whose event is returned, stops the run."""
    config = trainer.config
    resume = f"resume with mesotron vla train --resume {run.path}"
    with (
        LiveView(config.steps, SHOWN_METRICS, console) as view,
        StopRequest(view.say, resume) as stop,
    ):
        watch = LoopWatch(run, config.guard, view.say)
        watch.replay()
        view.start_at(trainer.step, run.rows("metrics"))
        last_step = trainer.step

        last_time = time.perf_counter()
        while trainer.step < config.steps:
            probed = trainer.probe() if is_due(trainer.step, config.probe_every) else {}
            metrics = trainer.advance()

            step = trainer.step
            if probed or is_due(step, config.log_every) or step in (1, config.steps):
                row = make_row(trainer, metrics, probed)
                now = time.perf_counter()
                row["time/step"] = (now - last_time) / max(step - last_step, 1)
                last_step = step
                last_time = now

                run.append("metrics", row)
                view.update(step, row)
                watch.update(row)

            stop.announce()
            is_last = stop.requested or watch.stopped_by or step == config.steps
            if is_last or is_due(step, config.save_every):
                checkpoint.save(run.checkpoints, trainer, demos.world, config.keep)

            if is_last:
                break

    return watch.stopped_by


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps (0: never) is done now."""
    return every > 0 and step % every == 0


def make_row(
    trainer: Trainer, metrics: Mapping[str, Any], probed: Mapping[str, float]
) -> dict[str, Any]:
    """A row of the log."""
    row: dict[str, Any] = {"step": trainer.step}
    for name, value in metrics.items():
        row[name] = float(value)

    return row | trainer.statistics() | dict(probed)


def _finish(run: RunFolder, trainer: Trainer, demos: Demos, console: Console) -> None:
    config = trainer.config
    rows = run.rows("metrics")
    result: dict[str, Any] = {"steps": config.steps, "loss": last_value(rows, "loss")}

    missing = success = ""
    if reason := _why_not_evaluated(demos.world, config.episodes):
        command = f"mesotron vla eval {run.path}{' --world NAME' if demos.world is None else ''}"
        missing = f"not evaluated ({reason}): run {command}"
        print_line(console, missing)
    else:
        assert demos.world is not None
        results = measure(
            make_act(trainer.policy.eval(), trainer.device),
            demos.world,
            episodes=config.episodes,
            execute=config.execute or default_execute(config.policy.chunk),
            workers=config.workers,
        )

        run.save("evaluation", {name: column.to_json() for name, column in results.items()})
        result |= {name: column.success for name, column in results.items()}
        console.print(as_table(results))
        success = as_markdown(results)

    # Values that are not in every row are carried forward.
    last: dict[str, float] = {}
    filled = []
    for row in rows:
        last = last | {name: row[name] for name in REPORTED_METRICS if name in row}
        filled.append({"step": row["step"], **last})

    names = [name for name in REPORTED_METRICS if name in last]
    report = partial(
        fill_template,
        Path(__file__).with_name("report.md.j2"),
        policy=trainer.policy.describe(),
        config=config,
        rules=", ".join(f"{part} {getattr(config.optim, part)}" for part in PARTS),
        note=_auxiliary_note(config),
        missing=missing,
        success=success,
        curves="\n".join(training_table(filled, names, ".3g")),
    )

    run.finish(result, report)
    print_line(console, f"report: {run.path / 'report.md'}; more: mesotron vla eval {run.path}")


def _why_not_evaluated(world: WorldConfig | None, episodes: int) -> str:
    if episodes == 0:
        return "--episodes 0"
    if world is None:
        return "the demonstrations have no world"

    for package in ("mujoco", *(("metaworld",) if world.name == "metaworld" else ())):
        if find_spec(package) is None:
            return f"{package} is not installed"

    return ""
