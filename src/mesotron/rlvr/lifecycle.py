"""What GRPO and the warm start share of a run's life: open its folder, show it, train, stop."""

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from mesotron.config import SftConfig, TrainConfig
from mesotron.config.base import spell
from mesotron.optim.device import name_device
from mesotron.rlvr.callbacks import GiveUpAtLimit, NotContinued
from mesotron.runs import RunFolder, process
from mesotron.runs.checkpoints import newest_whole, prune
from mesotron.runs.console import LiveView, print_line
from mesotron.runs.deadline import LimitReached
from mesotron.runs.own_code import FAILURES, describe, explain
from mesotron.runs.own_runs import is_own
from mesotron.runs.resume import Plan
from mesotron.runs.trust import code_names, code_settings
from mesotron.watch.budget import Budget, why_over

log = logging.getLogger("mesotron")
GLOO_ERROR = re.compile(r"/gloo/\S*\] (.+?)(?:\. |\)$)")
LOUD_LIBRARIES = ("transformers", "trl", "accelerate", "peft", "datasets", "bitsandbytes")


def quiet_libraries() -> None:
    disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|trl|accelerate|peft)\b")

    for name in LOUD_LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def open_folder(plan: Plan[Any], device: torch.device) -> Iterator[RunFolder]:
    """The run's folder, made or cut after the checkpoint by the main process."""
    is_alone = process.num_processes() == 1
    if not is_alone and not process.is_main():
        PartialState().wait_for_everyone()
        yield RunFolder(plan.path)
        return

    with plan.open_folder(name_device(device), torch.get_num_threads()) as run:
        run.cut_after(first_step(plan))
        if plan.is_longer:
            run.extend(plan.config.steps)

        if not is_alone:
            PartialState().wait_for_everyone()

        yield run


def first_step(plan: Plan[Any]) -> int:
    """The step that training continues from; 0 for a new run."""
    return plan.checkpoint.step if plan.checkpoint else 0


def trainer_arguments(
    config: TrainConfig | SftConfig, device: torch.device, model: Any, run: RunFolder
) -> dict[str, Any]:
    """Arguments of Transformers' trainer that do not depend on what it trains."""
    on_cpu = device.type == "cpu"
    return {
        "output_dir": str(run.checkpoints),
        "run_name": run.path.name,
        "max_steps": config.steps,
        "seed": config.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a NaN must be visible
        "save_steps": config.save_every or config.steps,
        "save_total_limit": config.keep,
        "use_cpu": on_cpu,
        "bf16": model.dtype == torch.bfloat16 or config.model.dtype == "mixed",
        "dataloader_pin_memory": not on_cpu,
        checkpointing_argument(): config.model.gradient_checkpointing,
        "report_to": "none",
        "disable_tqdm": True,
    }


def checkpointing_argument() -> str:
    """What Transformers' arguments call it: renamed in 5.23, where the old name warns."""
    known = {field.name for field in fields(TrainingArguments)}
    if "activation_checkpointing" in known:
        return "activation_checkpointing"

    return "gradient_checkpointing"


# Showing


class ToView(logging.Handler):
    """Shows log records in the live view, the watch's as alarms."""

    def __init__(self, view: LiveView) -> None:
        super().__init__()
        self.view = view

    def emit(self, record: logging.LogRecord) -> None:
        is_alarm = record.name == "mesotron.watch"
        show = self.view.alarm if is_alarm else self.view.say
        show(record.getMessage())


@contextmanager
def live_view(
    run: RunFolder, plan: Plan[Any], console: Console, watched: dict[str, str]
) -> Iterator[tuple[LiveView, process.StopRequest]]:
    """A view of the running steps, and whether the user asked to stop."""
    view = LiveView(plan.config.steps, watched, console)
    handler = ToView(view)
    logger = logging.getLogger("mesotron")

    with view:
        logger.addHandler(handler)
        try:
            with process.StopRequest(view.say, f"continue with {resume_command(plan)}") as stop:
                view.start_at(first_step(plan), run.rows("metrics"))
                yield view, stop
        finally:
            logger.removeHandler(handler)


# Training


def fit(trainer: Any, plan: Plan[Any], budget: Budget) -> str | None:
    """Train to the last step, from the plan's checkpoint if it has one. Returns the limit, in
    words, that interrupted a step."""
    checkpoint = plan.checkpoint
    if checkpoint is not None and checkpoint.step >= plan.config.steps:
        load_finished(trainer, checkpoint.path, checkpoint.step)
        return None

    is_alone = process.num_processes() == 1
    deadline = budget.deadline
    # First of all callbacks, like the state that it keeps.
    trainer.callback_handler.callbacks.insert(0, GiveUpAtLimit(deadline))

    def can_give_up() -> bool:
        return is_alone and trainer.last_step is not None

    def leave() -> int:
        return leave_behind(trainer, plan, budget)

    with deadline.during(can_give_up, leave):
        try:
            trainer.train(str(checkpoint.path) if checkpoint else None)
        except NotContinued:  # all is saved
            deadline.obey()
        except LimitReached:
            deadline.obey()
            if trainer.state.global_step == 0:
                raise

            trainer.save_last_step()
            return why_over(budget)
        except FAILURES as error:  # such as a reward function that raised
            deadline.obey()
            if process.num_processes() == 1 or isinstance(error, process.SharedFailure):
                trainer.save_last_step()  # else the other processes would not take part
            raise

    return None


def leave_behind(trainer: Any, plan: Plan[Any], budget: Budget) -> int:
    """Save while the main thread hangs in code that ignores interrupts; returns the exit code."""
    if process.num_processes() == 1:
        trainer.save_last_step()

    saved, _ = newest_whole(plan.path / "checkpoints")
    step = saved.step if saved else 0
    print(
        f"mesotron: {why_over(budget)}; what ran ignored the interrupt and was left behind; "
        f"continue from step {step} with {resume_command(plan)}",
        file=sys.stderr,
        flush=True,
    )
    return 0 if step else 2


@contextmanager
def explain_failure(plan: Plan[Any]) -> Iterator[None]:
    """Add how to continue to an error, and make one sentence of what the user's code raised."""
    try:
        yield
    except FAILURES as error:
        if isinstance(error, process.SharedFailure) and process.num_processes() > 1:
            process.ignore_launcher()

        saved, _ = newest_whole(plan.path / "checkpoints")
        place = f"step {saved.step}" if saved else "the start"
        after = f"once that is fixed, continue from {place} with {resume_command(plan)}"

        if is_of_lost_process(error):
            sentence = f"another process or its machine was lost ({why_lost(error)})"
        else:
            sentence = explain(error)

        if sentence is None:
            log.error(after)  # the traceback of a bug follows
            raise

        kind = process.SharedFailure if isinstance(error, process.SharedFailure) else ValueError
        raise kind(f"{sentence}; {after}") from error


def is_of_lost_process(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone."""
    if process.num_processes() == 1:
        return False

    is_distributed = isinstance(error, torch.distributed.DistError)
    return is_distributed or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def why_lost(error: BaseException) -> str:
    """The first line of a collective's error, without gloo's place in its code and its advice."""
    line = describe(error).splitlines()[0]
    gloo = GLOO_ERROR.search(line)
    return gloo[1] if gloo else line


def load_finished(trainer: Any, checkpoint: Path, step: int) -> None:
    """Take over the weights and counters of a run that stopped after its last step."""
    trainer.take_weights(checkpoint)
    trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    trainer.take_best(checkpoint)

    if trainer.args.should_save:  # maybe killed before it had pruned
        keep = trainer.args.save_total_limit
        healthy = trainer.state.best_model_checkpoint if keep > 1 else None  # as `train` ends
        best = trainer.best.name if trainer.best is not None else None
        prune(checkpoint.parent, keep, step, healthy, best)


# Stopping


def say_stopped(
    console: Console, run: RunFolder, plan: Plan[Any], step: int, why: str | None
) -> None:
    # A guard that gives up on broken weights does not save them.
    is_saved = (run.checkpoints / f"checkpoint-{step}").exists()

    stopped = "stopped and saved" if is_saved else "stopped"
    reason = f": {why}" if why else ""
    print_line(console, f"{stopped} at step {step}{reason}; continue with {resume_command(plan)}")


def resume_command(plan: Plan[Any]) -> str:
    if plan.whole is not None:
        return resume_command(plan.whole)

    command = "sft" if isinstance(plan.config, SftConfig) else "train"
    words = [f"{process.launcher()}mesotron {command} --resume {plan.path}"]

    # Code of a run that was not noted is named again: the folder alone is not believed.
    if command == "train" and not is_own(plan.path, code_names(plan.config)):
        for name, values in code_settings(plan.config):
            flag = name.removesuffix(".parts")
            words.append(spell(flag, tuple(quote(value) for value in values)))

    if process.num_machines() > 1:
        words.append("on every machine")

    return " ".join(words)
