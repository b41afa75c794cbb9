"""Trains the forks of `--lr auto`, and continues the run from the winner's state.

A fork is a run folder inside the run's, RUN/pocket/STEP-xFACTOR, trained by the run's own trainer
from a checkpoint: exact resume makes the forks see the same prompts and draws. pocket.json is
written after each heat, so a killed search continues with the heat it was in. The winner's rows and
checkpoint then become the run's, as if it had had that rate from the start.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from mesotron.config import TrainConfig
from mesotron.config.rules import SPECTRAL_RULES
from mesotron.rlvr import pocket
from mesotron.rlvr.checkpoint import refuse_non_finite_weights
from mesotron.rlvr.lifecycle import fit
from mesotron.rlvr.optimizer import unwrap_optimizer
from mesotron.rlvr.pocket import Allowance, Choice, Condition, Fork, Heat, Sampled, Search
from mesotron.runs import RunFolder, checkpoints
from mesotron.runs.checkpoints import Checkpoint
from mesotron.runs.console import LiveView
from mesotron.runs.files import Row, append_row
from mesotron.runs.folder import STREAMS
from mesotron.runs.links import make_own_folder
from mesotron.runs.resume import Plan
from mesotron.watch.budget import Budget
from mesotron.watch.settings import scale_rates

# What a row says about drift, by our names in the record.
DRIFT = {
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clipped",
    "completions/clipped_ratio": "truncated",
    "grad_norm": "grad_norm",
}
OTHER_TRACKERS = "transformers.integrations"  # callbacks that send rows elsewhere

# What the session opens around a stretch of steps: its watch, limits and callbacks.
OpenSession = Callable[[RunFolder, Any, bool], Any]


@dataclass(frozen=True)
class Course:
    """What the stretches of a run share."""

    run: RunFolder
    plan: Plan[TrainConfig]
    trainer: Any
    budget: Budget
    view: LiveView
    open_session: OpenSession
    callbacks: tuple[Any, ...]  # the trainer's own

    @property
    def config(self) -> TrainConfig:
        return self.plan.config

    @property
    def forks(self) -> Path:
        return self.run.path / pocket.NAME


@dataclass(frozen=True)
class Stretch:
    """How some steps of a run ended."""

    session: Any
    limit: str | None  # in words, if one interrupted a step
    checkpoint: Checkpoint | None = None  # to continue from; None if the run stopped


class MuteView:
    """Stands for the live view while a fork trains."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}

    def update(self, step: int, row: Row) -> None:
        """Shows nothing."""

    def show_transcript(self, text: str) -> None:
        """Shows nothing."""


def train_searching(
    run: RunFolder,
    plan: Plan[TrainConfig],
    trainer: Any,
    budget: Budget,
    view: LiveView,
    open_session: OpenSession,
) -> tuple[Any, str | None]:
    """Train to the end, with a search at the start and looks later. Returns the last session and
    the limit that interrupted it."""
    own = tuple(trainer.callback_handler.callbacks)
    course = Course(run, plan, trainer, budget, view, open_session, own)
    allowance = pocket.allow(plan.config.steps)
    checkpoint = plan.checkpoint or save_start(course)

    for at in (0, *allowance.looks):
        if checkpoint.step < at:
            stretch = train_until(course, checkpoint, at)
            if stretch.checkpoint is None:
                return stretch.session, stretch.limit
            checkpoint = stretch.checkpoint

        if checkpoint.step == at:
            stretch = search(course, checkpoint, allowance)
            if stretch.checkpoint is None:
                return stretch.session, stretch.limit
            checkpoint = stretch.checkpoint

    stretch = train_until(course, checkpoint, plan.config.steps)
    return stretch.session, stretch.limit


# Stretches of the run itself


class StateSaved(BaseException):
    """Ends a training that was only to save its first state."""


class SaveStart(TrainerCallback):
    """Saves the state before the first step, and goes no further."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.save_now()
        raise StateSaved


class StopAt(TrainerCallback):
    """Saves and stops after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.step:
            control.should_save = control.should_training_stop = True


def save_start(course: Course) -> Checkpoint:
    trainer = course.trainer
    trainer.callback_handler.callbacks = [*course.callbacks, SaveStart(trainer)]
    with suppress(StateSaved):
        trainer.train()

    return Checkpoint(0, course.run.checkpoints / "checkpoint-0")


def train_until(course: Course, checkpoint: Checkpoint, step: int) -> Stretch:
    """Train the run itself to a step."""
    trainer = course.trainer
    trainer.forget_rollouts()
    trainer.args.output_dir = str(course.run.checkpoints)
    trainer.callback_handler.callbacks = [*course.callbacks]

    session = course.open_session(course.run, course.view, False)
    if step < course.config.steps:
        trainer.add_callback(StopAt(step))

    limit = fit(trainer, replace(course.plan, checkpoint=checkpoint), course.budget)
    reached = Checkpoint(step, course.run.checkpoints / f"checkpoint-{step}")
    is_there = trainer.state.global_step == step and reached.path.exists()
    if not is_there or limit or session.is_over():
        return Stretch(session, limit)

    return Stretch(session, limit, reached)


# A search


def search(course: Course, base: Checkpoint, allowance: Allowance) -> Stretch:
    """Train forks until one is chosen, and make it the run."""
    earlier, present = read_searches(course, base.step)
    is_look = base.step > 0
    session = None

    if is_look and present.choice is None:
        cost = 2 * allowance.look_heat
        if pocket.spent(earlier) + cost > allowance.most:
            return Stretch(None, None, base)

    while present.choice is None:
        if is_look:
            heat = pocket.next_look(present, allowance)
        else:
            heat = pocket.next_heat(present, allowance)

        if heat is None:
            choice = decide(course, present, earlier)
            present = replace(present, choice=choice)
        else:
            fork, stretch = run_heat(course, base, present, heat)
            session = stretch.session
            if fork is None:
                return stretch
            present = present.with_fork(fork)

        course.run.save(pocket.NAME, pocket.to_record([*earlier, present]))

    checkpoint = adopt(course, base, present)
    show(course, present, pocket.spent([*earlier, present]))
    return Stretch(session, None, checkpoint)


def read_searches(course: Course, step: int) -> tuple[list[Search], Search]:
    """Earlier searches, and the one at this step as far as its forks are still there."""
    record = course.run.load(pocket.NAME)
    known = () if record is None else pocket.from_record(record)
    earlier = [each for each in known if each.step < step]
    present = next((each for each in known if each.step == step), Search(step=step))

    for fork in present.forks:
        needs_state = present.choice is None or fork.factor == present.choice.factor
        state = checkpoint_of(course, step, fork)
        if needs_state and fork.has_state and checkpoints.damage(state) is not None:
            return earlier, Search(step=step)

    return earlier, present


def decide(course: Course, present: Search, earlier: Sequence[Search]) -> Choice:
    if present.step == 0:
        return pocket.choose(present.forks)

    rows = rows_until(course.run, present.step)
    travelled = sum(row.get("learning_rate", 0.0) for row in rows)
    reach = max([travelled, *(each.reach for each in earlier)])

    return pocket.look_again(present.forks, reach - travelled)


def rows_until(run: RunFolder, step: int) -> list[Row]:
    return [row for row in run.rows("metrics") if row["step"] <= step]


def folder_of(course: Course, step: int, factor: float) -> Path:
    return course.forks / f"{step}-x{factor:g}"


def checkpoint_of(course: Course, step: int, fork: Fork) -> Path:
    folder = folder_of(course, step, fork.factor)
    return folder / "checkpoints" / f"checkpoint-{fork.last}"


# A heat


class ScaleRates(TrainerCallback):
    """Multiplies all rates of the optimizer when training begins."""

    def __init__(self, trainer: Any, factor: float) -> None:
        self.trainer = trainer
        self.factor = factor

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        scale_rates(self.trainer, self.factor)


class HeatLog(TrainerCallback):
    """Collects what a fork samples, and ends its heat."""

    def __init__(self, trainer: Any, last: int, travelled: float) -> None:
        self.trainer = trainer
        self.last = last
        self.travelled = travelled  # before the present step
        self.sampled: list[Sampled] = []
        self.rows: list[Row] = []
        self.is_broken = False
        self.rate = 0.0
        self.left = 0.0  # distance to the end of the run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rate = matrix_base_rate(kwargs["optimizer"])
        self.left = self.rate * shape_left(kwargs["lr_scheduler"], state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        try:
            refuse_non_finite_weights(self.trainer.model, state.global_step)
        except ValueError:
            self.is_broken = True

        if self.is_broken or state.global_step >= self.last:
            control.should_training_stop = True
            control.should_save = not self.is_broken

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is None or "loss" not in logs:
            return

        row = {"step": state.global_step, **logs}
        self.rows.append(row)
        sampled = Sampled(
            step=state.global_step,
            travelled=self.travelled,
            rewards=group_rewards(self.trainer) if "reward" in logs else {},
            drift=drift_of(row),
        )
        self.sampled.append(sampled)
        self.travelled += float(logs.get("learning_rate") or 0.0)

        if pocket.judge([row]) == "not finite":
            self.is_broken = True
            control.should_training_stop = True
            control.should_save = False


def run_heat(
    course: Course, base: Checkpoint, present: Search, heat: Heat
) -> tuple[Fork | None, Stretch]:
    """Train a fork for a heat; None in its place if the run was stopped."""
    trainer = course.trainer
    begins = heat.first == present.step
    fork_run = open_fork(course, present.step, heat)
    before = None if begins else present.fork(heat.factor)

    start = base
    if before is not None:
        start = Checkpoint(heat.first, checkpoint_of(course, present.step, before))

    trainer.forget_rollouts()
    trainer.args.output_dir = str(fork_run.checkpoints)
    trainer.callback_handler.callbacks = own_callbacks(course)
    if begins:
        trainer.add_callback(ScaleRates(trainer, heat.factor))

    session = course.open_session(fork_run, MuteView(), True)
    travelled = 0.0 if before is None else travelled_after(fork_run, before, present.step)
    log = HeatLog(trainer, heat.last, travelled)
    trainer.add_callback(log)

    limit = fit(trainer, replace(course.plan, checkpoint=start), course.budget)
    is_whole = trainer.state.global_step >= heat.last and not session.is_interrupted()
    stretch = Stretch(session, limit)
    if limit or session.spending.stopped_by or not (is_whole or log.is_broken):
        return None, stretch

    condition = condition_after(course, fork_run, present.step, log)
    if before is None:
        fork = Fork(
            factor=heat.factor,
            rate=log.rate,
            planned=log.left,
            steps=tuple(log.sampled),
            conditions=(condition,),
        )
    else:
        fork = replace(
            before,
            steps=(*before.steps, *log.sampled),
            conditions=(*before.conditions, condition),
        )

    return fork, stretch


def condition_after(course: Course, fork: RunFolder, step: int, log: HeatLog) -> Condition:
    """What the watch says of a fork at the end of a heat; the forks began at `step`."""
    if log.is_broken:
        return "not finite"

    past = rows_until(course.run, step) if step else []
    return pocket.judge(fork_rows(fork, step), past)


def own_callbacks(course: Course) -> list[Any]:
    """The trainer's callbacks without those that send rows to other trackers."""
    kept = []
    for callback in course.callbacks:
        if not type(callback).__module__.startswith(OTHER_TRACKERS):
            kept.append(callback)

    return kept


def open_fork(course: Course, step: int, heat: Heat) -> RunFolder:
    """The folder of a fork as it was before the heat."""
    folder = folder_of(course, step, heat.factor)
    make_own_folder(course.forks)

    if heat.first == step:
        checkpoints.remove(folder)
        return RunFolder.create(folder, course.config, course.run.environment)

    fork = RunFolder(folder)
    fork.cut_after(heat.first)
    for each in checkpoints.list_checkpoints(fork.checkpoints):
        if each.step > heat.first:
            checkpoints.remove(each.path)

    return fork


def fork_rows(fork: RunFolder, step: int) -> list[Row]:
    return [row for row in fork.rows("metrics") if row["step"] > step]


def travelled_after(run: RunFolder, fork: Fork, step: int) -> float:
    """The distance after a fork's last step; summed as `HeatLog` does."""
    travelled = 0.0
    for row in fork_rows(run, step):
        if row["step"] <= fork.last:
            travelled += float(row.get("learning_rate") or 0.0)

    return travelled


def matrix_base_rate(optimizer: Any) -> float:
    """The unscheduled rate of the matrices, or of the first group that has one."""
    routed = unwrap_optimizer(optimizer)
    groups = optimizer.param_groups if routed is None else routed.param_groups
    for group in groups:
        if group.get("rule", "") in SPECTRAL_RULES:
            return float(group.get("initial_lr", group["lr"]))

    return float(max(group.get("initial_lr", group["lr"]) for group in groups))


def shape_left(scheduler: Any, state: Any) -> float:
    """The sum of the schedule's factors over the steps to come."""
    scheduler = getattr(scheduler, "scheduler", scheduler)
    steps = range(state.global_step, state.max_steps)
    if not isinstance(scheduler, LambdaLR):
        return float(len(steps))

    return float(sum(map(scheduler.lr_lambdas[0], steps)))


def group_rewards(trainer: Any) -> dict[str, float]:
    """Prompt -> mean reward of its group, of the latest rollout."""
    samples = trainer.samples()
    size = trainer.num_generations
    means: dict[str, float] = {}

    for first in range(0, len(samples) - size + 1, size):
        group = samples[first : first + size]
        means[f"{len(means)}:{group[0].prompt}"[:200]] = mean(each.reward for each in group)

    return means


def drift_of(row: Row) -> dict[str, float]:
    drift = {}
    for name, ours in DRIFT.items():
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            drift[ours] = float(value)

    return drift


# After the choice


def adopt(course: Course, base: Checkpoint, done: Search) -> Checkpoint:
    """Make the winner's rows and checkpoint the run's. Safe to repeat after a kill: the checkpoint
    moves last, and until then a resumed run comes back here."""
    assert done.choice is not None
    winner = done.fork(done.choice.factor)
    folder = folder_of(course, done.step, winner.factor)
    final = course.run.checkpoints / f"checkpoint-{winner.last}"

    if not winner.has_state:
        raise ValueError(
            f"--lr auto: {done.choice.why} ({winner.rate:.3g}), so there is no rate to continue "
            "with: start again with a far smaller --lr"
        )

    fork = RunFolder(folder)
    course.run.cut_after(done.step)
    append_rows(course.run, fork, done.step)

    routing = fork.load("routing")
    if routing is not None:
        course.run.save("routing", routing)

    for each in checkpoints.list_checkpoints(fork.checkpoints):  # the last one last
        place = course.run.checkpoints / each.path.name
        if done.step < each.step <= winner.last:
            checkpoints.remove(place)
            each.path.rename(place)

    checkpoints.sync(final.parent)

    for each in course.forks.glob(f"{done.step}-x*/checkpoints"):
        shutil.rmtree(each, ignore_errors=True)
    if base.step == 0 and course.config.guard != "rollback":
        checkpoints.remove(base.path)

    rows = [row for row in course.run.rows("metrics") if row["step"] > done.step]
    course.view.start_at(winner.last, rows)
    return Checkpoint(winner.last, final)


def append_rows(run: RunFolder, fork: RunFolder, step: int) -> None:
    """Add a fork's rows after a step to the run's, in every stream."""
    for stream in STREAMS:
        for row in fork.rows(stream):
            if row["step"] > step:
                append_row(run.path / f"{stream}.jsonl", row)


def show(course: Course, done: Search, cost: int) -> None:
    """One table on the console, and the choice in a sentence."""
    assert done.choice is not None
    title = f"--lr auto at step {done.step}: {done.trained} steps of {len(done.forks)} forks"
    table = Table(title=title)
    for head in ("rate", "steps", "reward", "went", "will go", "watch"):
        table.add_column(head, justify="right")

    for fork in sorted(done.forks, key=lambda each: each.rate):
        mark = " chosen" if fork.factor == done.choice.factor else ""
        reward = mean(fork.steps[-1].rewards.values()) if fork.steps[-1].rewards else math.nan
        table.add_row(
            f"{fork.rate:.3g}",
            str(len(fork.steps)),
            f"{reward:.3f}",
            f"{fork.travelled:.2g}",
            f"{fork.planned:.2g}",
            f"{fork.condition}{mark}",
        )

    course.view.console.print(table)
    share = cost / course.config.steps
    course.view.say(
        f"rate {done.choice.rate:.3g}: {done.choice.why}; the search has cost {cost} steps so far, "
        f"{share:.0%} of the run"
    )
