"""One training session: load, evaluate, train until done or asked to stop, evaluate again, report.

The trainer is built after the first evaluation, and seeds everything: a resumed run, which skips
that evaluation, draws the same numbers.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PrinterCallback, set_seed
from transformers.utils.logging import disable_progress_bar
from trl.trainer.grpo_config import GRPOConfig

from mesotron.config import TrainConfig
from mesotron.optim.device import choose_device, name_device
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.callbacks import WATCHED, EvalEvery, GracefulStop, RunLog, SnrProbe
from mesotron.rlvr.dataset import make_rows
from mesotron.rlvr.finish import compare, measure, show, write_report
from mesotron.rlvr.layers.fixed_pass import check_fixed
from mesotron.rlvr.layers.rollouts import check_engine
from mesotron.rlvr.layers.shared_prompts import check_packing
from mesotron.rlvr.live_settings import live_settings
from mesotron.rlvr.models import load_model, lora_config
from mesotron.rlvr.objectives import resolve, trl_arguments
from mesotron.rlvr.optimizer import OptimizerLog, check_settings
from mesotron.rlvr.rewards import Reward, as_reward_function, make_reward
from mesotron.rlvr.spending import Spending, metered
from mesotron.rlvr.tasks.load import load_task
from mesotron.rlvr.tasks.problem import Task
from mesotron.rlvr.train import check_enough
from mesotron.rlvr.trainer import GRPOTrainer
from mesotron.rlvr.wrapping import as_loaded
from mesotron.runs import RunFolder
from mesotron.runs.console import LiveView
from mesotron.runs.process import (
    StopRequest,
    asks_for_sharding,
    explain_interrupt,
    is_main,
    num_processes,
)
from mesotron.runs.resume import Plan
from mesotron.watch.budget import Meter
from mesotron.watch.callback import Watch

log = logging.getLogger("mesotron")
# An alarm may come three checkpoints late, and there must be one from before its evidence.
KEPT_FOR_ROLLBACK = 4


@dataclass
class Parts:
    """What a run is made of, loaded."""

    config: TrainConfig
    device: torch.device
    model: Any
    tokenizer: Any
    task: Task
    judge: Judge
    reward: Reward
    objective_arguments: dict[str, Any]
    """The part of `GRPOConfig` that objective, rollout and optimizer decide."""


def train(plan: Plan[TrainConfig], began: float | None = None) -> int:
    """Carry out a plan; see `mesotron.rlvr.train.run` for the exit codes.

    Args:
        plan: what to do.
        began: when the command began, on `time.monotonic`, which its limits count from.
    """
    quiet_libraries()
    console = Console(quiet=not is_main())
    for note in plan.notes:
        say(console, note)
    with Verifier(plan.config.reward.timeout) as verifier:
        parts = load(plan.config, verifier)
        with (
            open_folder(plan, parts.device) as run,
            metered(plan.config, run, began) as meter,
            explain_interrupt(f"continue with {how_to_resume(plan)}"),
        ):
            return train_in(run, plan, parts, meter, console)


def how_to_resume(plan: Plan[TrainConfig]) -> str:
    """The command that goes on with a run."""
    return f"mesotron train --resume {plan.path}"


def load(config: TrainConfig, verifier: Verifier) -> Parts:
    """Model, tokenizer, problems and judge; whatever cannot be used is refused here."""
    device = choose_device(config.device, config.threads)
    arguments = trl_arguments(config.objective, config.rollout, config.optim, num_processes())
    check_settings(config.optim)
    task = load_task(config.task)
    check_enough(len(task.train), config)
    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, config.rollout.max_tokens)
    model, tokenizer = load_model(config.model, device)
    return Parts(config, device, model, tokenizer, task, judge, reward, arguments)


def fast_options(config: TrainConfig, model: Any) -> dict[str, Any]:
    """The trainer's options behind `rollout.fast`: all that the model and the run support."""
    options: dict[str, Any] = {"engine": "generate", "share_prompts": False, "record": False}
    if not config.rollout.fast:
        return options
    left_out = []
    if asks_for_sharding():
        left_out.append("everything (FSDP)")
    else:
        for engine in ("fused", "graph"):
            if engine == "fused" and config.model.lora:
                continue
            try:
                check_engine(engine, model)
            except ValueError as error:
                left_out.append(f"{engine} sampling ({error})")
            else:
                options["engine"] = engine
                break
        try:
            check_packing(model)
            options["share_prompts"] = True
            if num_processes() > 1 or config.model.gradient_checkpointing:
                raise ValueError("several processes or gradient checkpointing")
            check_fixed(model, "recording", "left out")
            options["record"] = True
        except ValueError as error:
            what = "recorded passes" if options["share_prompts"] else "shared prompts"
            left_out.append(f"{what} ({error})")
    if left_out:
        log.warning("rollout.fast leaves out: %s", "; ".join(left_out))
    return options


@contextmanager
def open_folder(plan: Plan[TrainConfig], device: torch.device) -> Iterator[RunFolder]:
    """The run's folder, made if it is new; the main process holds its lock and makes it first."""
    if num_processes() > 1 and not is_main():
        PartialState().wait_for_everyone()
        yield RunFolder(plan.path)
        return
    with plan.open_folder(name_device(device), torch.get_num_threads()) as run:
        run.cut_after(plan.checkpoint.step if plan.checkpoint else 0)
        if num_processes() > 1:
            PartialState().wait_for_everyone()
        yield run


def train_in(
    run: RunFolder, plan: Plan[TrainConfig], parts: Parts, meter: Meter, console: Console
) -> int:
    """Evaluate, train, evaluate, report."""
    config, how = plan.config, how_to_resume(plan)
    before = run.load("before")
    if before is None:
        say(console, f"{run.path}: evaluating {config.model.name} first")
        before = evaluate_part(parts, parts.model, "before")
        if is_main():  # two writers of one file would take each other's draft away
            run.save("before", before)
    trainer = build_trainer(parts, run)
    reached = plan.checkpoint.step if plan.checkpoint else 0
    view = LiveView(config.steps, WATCHED, console)
    watch = make_watch(trainer, parts, run)
    spending = Spending(meter, run, trainer, config.eval_every)
    with view, remarks_to(view), StopRequest(view.say, f"continue with {how}") as stop:
        view.start_at(reached, run.rows("metrics"))
        if config.guard != "rollback":  # it sees a loss that is no number before it is refused
            trainer.add_callback(watch)
        add_callbacks(trainer, parts, run, view, stop, before, meter)
        trainer.add_callback(spending)
        if config.guard == "rollback":  # the row is written before what it tells of is undone
            trainer.add_callback(watch)
        fit(trainer, plan)
    step = trainer.state.global_step
    if step < config.steps:
        why = why_stopped(watch) or spending.stopped_by
        reason = f": {why}" if why else ""
        # A guard that gives up on spoiled weights does not save them.
        saved = " and saved" * (run.checkpoints / f"checkpoint-{step}").exists()
        say(console, f"stopped{saved} at step {step}{reason}; continue with {how}")
        return 0
    after = evaluate_part(parts, trainer.model, "after")
    found = compare(before, after)
    if trainer.is_world_process_zero():
        report = write_report(run, config, before, after, found)
        run.save("after", after)
        run.finish({"steps": config.steps, **found}, report)
        show(before, after, found, console)
    say(console, f"report: {run.path / 'report.md'}; more: mesotron eval {run.path}")
    return 0


def make_watch(trainer: GRPOTrainer, parts: Parts, run: RunFolder) -> Watch:
    """The watch of a run, which can change what this kind of run can be told on its way."""
    config = parts.config
    return Watch(
        config.guard,
        run.path,
        trainer=trainer,
        tries=config.watch.tries,
        more=live_settings(trainer, config, parts.judge, parts.device),
    )


def why_stopped(watch: Watch) -> str | None:
    """What the watch ended a run for, one sentence; None if it did not."""
    if watch.stopped_by is None:
        return None
    return watch.actions[-1].sentence() if watch.actions else watch.stopped_by.sentence()


def evaluate_part(parts: Parts, model: Any, name: str) -> dict[str, Any]:
    """An evaluation as JSON, by the weights in their own precision, whatever trains them."""
    with as_loaded(model):
        found = measure(model, parts.tokenizer, parts.task, parts.config, parts.judge, name)
    return found.to_json()


def build_trainer(parts: Parts, run: RunFolder) -> GRPOTrainer:
    """The trainer of a run, everything seeded."""
    config = parts.config
    set_seed(config.seed)  # LoRA draws its start before the trainer seeds
    trainer = GRPOTrainer(
        model=parts.model,
        reward_funcs=as_reward_function(parts.reward),
        args=GRPOConfig(**trainer_arguments(parts, run)),
        train_dataset=make_rows(parts.task, config.task, parts.tokenizer),
        processing_class=parts.tokenizer,
        peft_config=lora_config(config.model),
        optim=config.optim,
        objective=resolve(config.objective, config.rollout.generations),
        judge=parts.judge,
        **fast_options(config, parts.model),
    )
    if asks_for_sharding() and not trainer.is_fsdp_enabled:
        raise ValueError(
            f"the launcher asks for FSDP, which Accelerate does not take up on {parts.device}: use "
            "examples/scaling/ddp.yaml, or GPUs"
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_arguments(parts: Parts, run: RunFolder) -> dict[str, Any]:
    """Every argument of `GRPOConfig`: the objective's, and those of the run."""
    config, on_cpu = parts.config, parts.device.type == "cpu"
    return parts.objective_arguments | {
        "output_dir": str(run.checkpoints),
        "max_steps": config.steps,
        "seed": config.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a NaN is to be seen
        "save_steps": config.save_every or config.steps,
        "save_total_limit": max(config.keep, KEPT_FOR_ROLLBACK * (config.guard == "rollback")),
        "use_cpu": on_cpu,
        "bf16": parts.model.dtype == torch.bfloat16 or config.model.dtype == "mixed",
        "dataloader_pin_memory": not on_cpu,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "report_to": list(config.report_to) or "none",
        "disable_tqdm": True,
    }


def add_callbacks(
    trainer: GRPOTrainer,
    parts: Parts,
    run: RunFolder,
    view: LiveView,
    stop: StopRequest,
    before: dict[str, Any],
    meter: Meter,
) -> None:
    """The run's log and view, the polite stop and, if asked for, evaluations on the way."""
    refuse = parts.config.guard != "rollback"
    trainer.add_callback(RunLog(run, view, trainer, refuse=refuse))
    trainer.add_callback(OptimizerLog(run))
    trainer.add_callback(GracefulStop(stop))
    if parts.config.watch.snr_every:
        # Before all others: the trainer's own callback times the optimizer from here.
        probe = SnrProbe(parts.config.watch.snr_every, trainer)
        trainer.callback_handler.callbacks.insert(0, probe)
    every = parts.config.eval_every
    if every:

        def accuracy() -> float:
            with meter.evaluation():
                found = evaluate_part(parts, trainer.model, "on the way")
            return found["greedy"]["strict"]["value"]

        start, problems = before["greedy"]["strict"]["value"], before["problems"]
        evaluations = EvalEvery(every, trainer, accuracy, start=start, problems=problems)
        trainer.add_callback(evaluations)


def fit(trainer: GRPOTrainer, plan: Plan[TrainConfig]) -> None:
    """Train from the checkpoint on; a run that was stopped after its last step is loaded alone."""
    checkpoint = plan.checkpoint
    if checkpoint is None:
        trainer.train()
    elif checkpoint.step < plan.config.steps:
        trainer.train(resume_from_checkpoint=str(checkpoint.path))
    else:
        trainer._load_from_checkpoint(str(checkpoint.path))
        trainer.state.global_step = checkpoint.step


@contextmanager
def remarks_to(view: LiveView) -> Iterator[None]:
    """Let what the package logs, such as the watch's warnings, appear in the view."""

    class ToView(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            tell = view.alarm if record.name == "mesotron.watch" else view.say
            tell(record.getMessage())

    handler, logger = ToView(), logging.getLogger("mesotron")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def say(console: Console, sentence: str) -> None:
    """A sentence on one line, however narrow the terminal: paths in it can be copied."""
    console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def quiet_libraries() -> None:
    """Keep other libraries' remarks out of the live view; their errors still come."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(torch|transformers|trl|accelerate|peft)\b")
    for name in ("transformers", "trl", "accelerate", "peft", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
