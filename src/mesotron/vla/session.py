"""One run of behaviour cloning: folder, live view, watch, checkpoints, evaluation at the end.

Killed and resumed, it ends with the bits of a run left alone (on the CPU; GPU sums may differ).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mesotron.config import VlaTrainConfig
from mesotron.optim import RoutingTable
from mesotron.optim.device import choose_device, name_device
from mesotron.runs import RunFolder, new_run_path
from mesotron.runs.console import LiveView
from mesotron.runs.plan import Plan, begin, go_on
from mesotron.runs.signals import StopRequest
from mesotron.vla import checkpoint
from mesotron.vla.demos import load_demos
from mesotron.vla.finish import finish
from mesotron.vla.interface import Demos
from mesotron.vla.optimizer import route_parts
from mesotron.vla.training import Trainer
from mesotron.watch import Engine, Event

WATCHED = {
    "loss": "loss",
    "grad_norm": "gradient",
    "update_rms/action": "action step",
    "gradient/action/effective_rank": "action rank",
    "learning_rate": "rate",
}


def train(config: VlaTrainConfig) -> int:
    """Train, or continue a run.

    Returns:
        The exit code: 0 when finished, and also when stopped by Ctrl-C or SIGTERM and saved.
    """
    start = plan(config)
    config = start.config
    device = choose_device(config.device, config.threads)
    console = Console()
    demos = load_demos(config.demos, config.pixels)
    trainer = Trainer(config, demos, device)
    for note in (*start.notes, introduce(trainer, demos)):
        say(console, note)
    table = route_parts(trainer.policy, config.optim)
    console.print(by_part(table))
    with start.open_folder(name_device(device), torch.get_num_threads()) as run:
        (run.path / "routing.txt").write_text(table.to_text(full=True))
        if start.checkpoint is not None:
            checkpoint.restore(trainer, start.checkpoint.path, start.checkpoint.step)
        run.cut_after(trainer.step)
        stopped_by = fit(run, trainer, demos, console)
        if trainer.step < config.steps:
            why = f": {stopped_by.sentence()}" if stopped_by else ""
            how = f"continue with mesotron vla train --resume {run.path}"
            say(console, f"stopped and saved at step {trainer.step}{why}; {how}")
            return 0
        finish(run, trainer, demos, console)
    return 0


def plan(config: VlaTrainConfig) -> Plan[VlaTrainConfig]:
    """A new run, or the one to resume with the settings that it began with."""
    if config.resume is not None:
        return go_on(config, evaluate="mesotron vla eval", instead="start a new run")
    # Whole, so that it can be resumed from anywhere.
    config = dataclasses.replace(config, demos=config.demos.resolve())
    return begin(config, config.out or new_run_path("vla"))


def introduce(trainer: Trainer, demos: Demos) -> str:
    """What is trained on what, in a sentence."""
    helped = trainer.config.where
    aid = (
        f"; an auxiliary loss (weight {helped:g}) tells where the named object is" if helped else ""
    )
    return (
        f"{checkpoint.describe(trainer.policy)}; {len(demos):,} observations, "
        f"{len(demos.tasks)} instructions{aid}"
    )


def by_part(table: RoutingTable) -> Table:
    """The routing table in few rows: each part's rules and what they train."""
    counts: dict[tuple[str, str], list[int]] = {}
    for row in table:
        count = counts.setdefault((row.name.split(".")[0], row.rule), [0, 0])
        count[0] += 1
        count[1] += row.numel
    shown = Table("part", "rule", "tensors", "parameters", box=None, pad_edge=False)
    for (part, rule), (tensors, parameters) in counts.items():
        shown.add_row(part, rule, str(tensors), f"{parameters:,}")
    return shown


def fit(run: RunFolder, trainer: Trainer, demos: Demos, console: Console) -> Event | None:
    """Step to the end, or until somebody or the watch stops the run; returns what stopped it."""
    config = trainer.config
    log = Log(run, LiveView(config.steps, WATCHED, console), config.guard)
    how = f"continue with mesotron vla train --resume {run.path}"
    with log.view as view, StopRequest(view.say, how) as stop:
        log.take_up(trainer.step)
        while trainer.step < config.steps:
            advance(trainer, log)
            ends = stop.requested or log.stopped_by is not None
            due = config.save_every and trainer.step % config.save_every == 0
            if due or ends or trainer.step == config.steps:
                checkpoint.save(run.checkpoints, trainer, demos.world, config.keep)
            if ends:
                break
    return log.stopped_by


def advance(trainer: Trainer, log: Log) -> None:
    """One step, and its row of metrics if one is due."""
    config = trainer.config
    probed: dict[str, float] = {}
    if config.probe_every and trainer.step % config.probe_every == 0:
        probed = trainer.probe()
    found = trainer.advance()
    step = trainer.step
    if step % config.log_every == 0 or step in (1, config.steps) or probed:
        numbers = {name: float(value) for name, value in found.items()}
        log.write(step, {**numbers, **trainer.statistics(), **probed})


class Log:
    """Rows of metrics to the folder, the view and the watch.

    Args:
        run: the folder.
        view: entered by the caller.
        guard: what to do with what the watch sees: "off", "warn" or "stop".

    Attributes:
        stopped_by: the event at which a guard stops the run, or None.
    """

    def __init__(self, run: RunFolder, view: LiveView, guard: str) -> None:
        self.run, self.view, self.guard = run, view, guard
        self.engine = Engine()
        self.stopped_by: Event | None = None
        self._last = (0, time.perf_counter())

    def take_up(self, step: int) -> None:
        """Read what the run has logged before, so that view and watch go on as if never stopped."""
        rows = self.run.rows("metrics")
        for row in rows:
            self.engine.update(row)
        self.view.start_at(step, rows)
        self._last = (step, time.perf_counter())

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Write one row, show it, and tell of what the watch sees in it."""
        now = time.perf_counter()
        seconds = (now - self._last[1]) / max(step - self._last[0], 1)
        self._last = (step, now)
        row: dict[str, Any] = {"step": step, **numbers, "time/step": seconds}
        self.run.append("metrics", row)
        self.view.update(step, row)
        for event in self.engine.update(row):
            self.run.append("events", event.record())
            if self.guard != "off":
                self.view.say(event.sentence())
            if event.severity == "stop" and self.guard == "stop":
                self.stopped_by = event


def say(console: Console, sentence: str) -> None:
    """A sentence on one line, however narrow the terminal: paths in it can be copied."""
    console.print(sentence, soft_wrap=True, highlight=False, markup=False)
