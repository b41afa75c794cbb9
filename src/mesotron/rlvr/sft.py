"""Supervised warm start: TRL's SFTTrainer with our optimizers, run folders and exact resume.

The rows come tokenized and in reading order, so TRL prepares and shuffles nothing.
"""

from typing import Any

import torch
from rich.console import Console
from transformers import PrinterCallback, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from mesotron.config import OptimConfig, SftConfig
from mesotron.models.adapters import lora_config
from mesotron.models.load import load_model
from mesotron.models.precision import choose_precision, supports_bfloat16
from mesotron.optim import RoutedOptimizer
from mesotron.optim.clipping import clip_gradients
from mesotron.optim.device import choose_device, use_one_thread_if_small
from mesotron.rlvr.callbacks import GracefulStop, KeepLastStep, RunLog, Spending
from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.rlvr.lifecycle import (
    explain_failure,
    fit,
    live_view,
    open_folder,
    quiet_libraries,
    resume_command,
    say_stopped,
    trainer_arguments,
)
from mesotron.rlvr.optimizer import (
    OptimizerLog,
    build_optimizer,
    check_settings,
    matrix_rate,
    unwrap_optimizer,
)
from mesotron.runs import RunFolder
from mesotron.runs.console import SafeConsole, print_line
from mesotron.runs.files import last_value
from mesotron.runs.process import explain_interrupt
from mesotron.runs.resume import Plan
from mesotron.tasks.load import load_task
from mesotron.tasks.rows import make_demonstrations
from mesotron.watch.budget import Budget

WATCHED = {
    "loss": "loss",
    "mean_token_accuracy": "tokens right",
    "entropy": "entropy",
}
SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
}


# Transformers' `train` has arguments for hyperparameter search, which the mixin passes on by name.
class WarmStart(SafeCheckpoints, SFTTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """TRL's SFTTrainer with a routed optimizer and checkpoints that resume exactly."""

    def __init__(self, *, optim: OptimConfig, **kwargs: Any) -> None:
        self.optim_config = optim
        super().__init__(**kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = build_optimizer(model or self.model, self.optim_config)
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        matrices = self.optim_config.clip == "all"
        return clip_gradients(self._routed(), self.args.max_grad_norm, matrices).total

    def note(self, metrics: dict[str, float]) -> None:
        """Put metrics into the row of the step."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            for name, value in self._routed().stats().items():
                logs[f"optim/{name}"] = value

        super().log(logs, start_time)

    def _get_learning_rate(self) -> float:
        return matrix_rate(self.optimizer, super()._get_learning_rate())

    def own_state(self) -> dict[str, Any]:
        return {"num_tokens": self._total_train_tokens}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._total_train_tokens = state["num_tokens"]

    def _routed(self) -> RoutedOptimizer:
        optimizer = unwrap_optimizer(self.optimizer)
        assert optimizer is not None
        return optimizer


def train(plan: Plan[SftConfig], budget: Budget) -> int:
    quiet_libraries()
    console = SafeConsole()
    for note in plan.notes:
        print_line(console, note)

    check_settings(plan.config.optim)
    device = choose_device(plan.config.device, plan.config.threads)
    config = choose_precision(plan.config, supports_bfloat16(device))

    task = load_task(config.task)
    model, tokenizer = load_model(config.model, device)
    use_one_thread_if_small(model, device, config.threads)
    rows = make_demonstrations(task, config, tokenizer)

    how_to_continue = f"continue with {resume_command(plan)}"
    with (
        open_folder(plan, device) as run,
        explain_interrupt(how_to_continue),
        explain_failure(plan),
    ):
        budget.loaded(run)
        arguments = trainer_arguments(config, device, model, run) | own_arguments(config)

        set_seed(config.seed)  # LoRA is initialized before the trainer seeds
        trainer = WarmStart(
            model=model,
            args=SFTConfig(**arguments),
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=lora_config(config.model),
            optim=config.optim,
        )
        trainer.remove_callback(PrinterCallback)

        trainer.add_callback(KeepLastStep(trainer))
        spending = Spending(budget, trainer)
        with live_view(run, plan, console, WATCHED) as (view, stop):
            log = RunLog(run, view, trainer)
            for callback in (log, OptimizerLog(run), GracefulStop(stop), spending):
                trainer.add_callback(callback)

            limit = fit(trainer, plan, budget)

        step = trainer.state.global_step
        if step < config.steps:
            say_stopped(console, run, plan, step, limit or spending.stopped_by)
        else:
            budget.deadline.obey()
            report(run, config, step, console)

    return 0


def own_arguments(config: SftConfig) -> dict[str, Any]:
    """Arguments of TRL's trainer that only a warm start sets."""
    return {
        "per_device_train_batch_size": config.batch,
        "train_sampling_strategy": "sequential",  # the rows are in reading order
        "max_length": None,  # rows that are too long were removed
        "learning_rate": config.optim.lr,
        "lr_scheduler_type": SCHEDULES[config.optim.schedule],
        "warmup_steps": round(config.optim.warmup * config.steps),
        "max_grad_norm": config.optim.max_grad_norm,
    }


def report(run: RunFolder, config: SftConfig, step: int, console: Console) -> None:
    metrics = run.rows("metrics")
    loss = last_value(metrics, "loss")
    accuracy = last_value(metrics, "mean_token_accuracy")

    text = (
        f"# Warm start of {config.model.name} on {config.task.title}: {step} steps\n\n"
        f"Optimizer {config.optim.name} at learning rate {config.optim.lr:g}, {config.batch} "
        f"solved problems per step, seed {config.seed}. Last loss {loss:.4f}, token accuracy "
        f"{accuracy:.1%}.\n"
    )
    result = {"steps": step, "loss": loss, "token_accuracy": accuracy}
    run.finish(result, lambda: text)

    numbers = f"loss {loss:.3f}, token accuracy {accuracy:.1%}"
    print_line(console, f"{numbers}; evaluate it with mesotron eval {run.path}")
