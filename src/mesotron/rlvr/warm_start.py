"""Supervised training on TRL's SFTTrainer, with our optimizers, run folders and exact resume.

Overridden of Transformers 5.22: create_optimizer, _clip_grad_norm. The rows come tokenized and in
their order, so TRL prepares and shuffles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from transformers import PrinterCallback, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from mesotron.config import OptimConfig, SftConfig
from mesotron.optim import RoutedOptimizer
from mesotron.optim.device import choose_device, name_device
from mesotron.optim.groups import clip_gradients
from mesotron.rlvr.callbacks import GracefulStop, RunLog
from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.rlvr.dataset import make_demonstrations
from mesotron.rlvr.models import load_model, lora_config
from mesotron.rlvr.optimizer import OptimizerLog, build_optimizer, check_settings
from mesotron.rlvr.session import quiet_libraries, say
from mesotron.rlvr.spending import Spending, metered
from mesotron.rlvr.tasks.load import load_task
from mesotron.runs import RunFolder
from mesotron.runs.console import LiveView
from mesotron.runs.process import StopRequest
from mesotron.runs.resume import Plan
from mesotron.watch.budget import Meter

WATCHED = {"loss": "loss", "mean_token_accuracy": "tokens right", "entropy": "entropy"}
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


# Transformers' `train` has arguments for hyperparameter search, which the mixin passes on by name.
class WarmStart(SafeCheckpoints, SFTTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """TRL's SFTTrainer with a routed optimizer and checkpoints that resume exactly.

    Args:
        optim: the optimizer's config; the optimizer is built after LoRA wrapping.
        **kwargs: what `trl.SFTTrainer` takes.
    """

    def __init__(self, *, optim: OptimConfig, **kwargs: Any) -> None:
        self.optim_config = optim
        super().__init__(**kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that the config names, over the weights that train."""
        self.optimizer = build_optimizer(model or self.model, self.optim_config)
        return self.optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        matrices = self.optim_config.clip == "all"
        return clip_gradients(self._routed(), self.args.max_grad_norm, matrices).total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the optimizer's own statistics to a step's row."""
        if "loss" in logs:
            logs |= {f"optim/{name}": x for name, x in self._routed().stats().items()}
        super().log(logs, start_time)

    def own_state(self) -> dict[str, Any]:
        return {"num_tokens": self._total_train_tokens}

    def load_own_state(self, mine: dict[str, Any]) -> None:
        self._total_train_tokens = mine["num_tokens"]

    def _routed(self) -> RoutedOptimizer:
        found = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        assert isinstance(found, RoutedOptimizer)
        return found


def train(plan: Plan[SftConfig], began: float | None = None) -> int:
    """Carry out a plan; see `mesotron.rlvr.sft.run` for the exit codes.

    Args:
        plan: what to do.
        began: when the command began, on `time.monotonic`, which its limits count from.
    """
    quiet_libraries()
    config, console = plan.config, Console()
    for note in plan.notes:
        console.print(note, soft_wrap=True, highlight=False)
    check_settings(config.optim)
    device = choose_device(config.device, config.threads)
    task = load_task(config.task)
    model, tokenizer = load_model(config.model, device)
    rows = make_demonstrations(task, config, tokenizer)
    folder = plan.open_folder(name_device(device), torch.get_num_threads())
    with folder as run, metered(config, run, began) as meter:
        run.cut_after(plan.checkpoint.step if plan.checkpoint else 0)
        set_seed(config.seed)  # LoRA draws its start before the trainer seeds
        trainer = WarmStart(
            model=model,
            args=SFTConfig(**trainer_arguments(plan, device, model, run)),
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=lora_config(config.model),
            optim=config.optim,
        )
        return train_in(run, plan, trainer, meter, console)


def trainer_arguments(
    plan: Plan[SftConfig], device: torch.device, model: Any, run: RunFolder
) -> dict[str, Any]:
    """Every argument of TRL's `SFTConfig`."""
    config, on_cpu = plan.config, device.type == "cpu"
    return {
        "output_dir": str(run.checkpoints),
        "max_steps": config.steps,
        "per_device_train_batch_size": config.batch,
        "train_sampling_strategy": "sequential",  # the rows are in their order already
        "max_length": None,  # rows that are too long are not there
        "learning_rate": config.optim.lr,
        "lr_scheduler_type": SCHEDULES[config.optim.schedule],
        "warmup_steps": round(config.optim.warmup * config.steps),
        "max_grad_norm": config.optim.max_grad_norm,
        "seed": config.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a NaN is to be seen
        "save_steps": config.save_every or config.steps,
        "save_total_limit": config.keep,
        "use_cpu": on_cpu,
        "bf16": model.dtype == torch.bfloat16 or config.model.dtype == "mixed",
        "dataloader_pin_memory": not on_cpu,
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "report_to": "none",
        "disable_tqdm": True,
    }


def train_in(
    run: RunFolder, plan: Plan[SftConfig], trainer: WarmStart, meter: Meter, console: Console
) -> int:
    """Train until done or asked to stop, and say how to go on."""
    config, how = plan.config, f"mesotron sft --resume {plan.path}"
    trainer.remove_callback(PrinterCallback)
    reached = plan.checkpoint.step if plan.checkpoint else 0
    view = LiveView(config.steps, WATCHED, console)
    spending = Spending(meter, run, trainer)
    with view, StopRequest(view.say, f"continue with {how}") as stop:
        view.start_at(reached, run.rows("metrics"))
        trainer.add_callback(RunLog(run, view, trainer))
        trainer.add_callback(OptimizerLog(run))
        trainer.add_callback(GracefulStop(stop))
        trainer.add_callback(spending)
        if reached < config.steps:
            trainer.train(str(plan.checkpoint.path) if plan.checkpoint else None)
    step = max(reached, trainer.state.global_step)
    if step < config.steps:
        why = f": {spending.stopped_by}" if spending.stopped_by else ""
        say(console, f"stopped and saved at step {step}{why}; continue with {how}")
        return 0
    last = run.rows("metrics")[-1]
    found = {"steps": step, "loss": last["loss"], "token_accuracy": last["mean_token_accuracy"]}
    model = run.checkpoints / f"checkpoint-{step}"
    run.finish(found, report(plan, found))
    console.print(
        f"loss {found['loss']:.3f}, {found['token_accuracy']:.1%} of the tokens right; the model "
        f"is {model}; measure it with mesotron eval {run.path}",
        soft_wrap=True,
        highlight=False,
    )
    return 0


def report(plan: Plan[SftConfig], found: dict[str, float]) -> str:
    """How the run ended, as a page of Markdown."""
    config = plan.config
    return (
        f"# Warm start of {config.model.name} on {config.task.name}: {found['steps']} steps\n\n"
        f"Optimizer {config.optim.name} at learning rate {config.optim.lr:g}, {config.batch} "
        f"solved problems a step, seed {config.seed}. Last loss {found['loss']:.4f}, "
        f"{found['token_accuracy']:.1%} of the completion's tokens right.\n"
    )
