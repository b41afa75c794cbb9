"""How much of a step's gradient is signal: measured every so many steps, from the step's own rows.

The batch of an optimizer step is cut into parts, whose gradients are taken apart at the same
weights (`probes.snr_from_norms`). It costs about one more forward and backward pass, logged as
time/snr; training is not moved by a bit. With several processes each looks at its own rows and the
main one's numbers are logged.
"""

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import split_tensor_dict

from mesotron.probes import snr_from_norms
from mesotron.rlvr.checkpoints.state import random_state, restore_random_state

log = logging.getLogger("mesotron.watch")

# Parts of a step that is one forward pass; a step of several has a part for each.
PARTS = 4
# What TRL's loss moves for an entropy target, each time that it is asked for.
MOVED_BY_LOSS = ("entropy_coef", "_last_world_entropy", "_entropy_window_stats")


class SnrProbe(TrainerCallback):
    """Puts gradient/snr, gradient/signal and gradient/noise into the row of every n-th step.

    Args:
        every: how many steps apart, 1 or more.
        trainer: TRL's GRPO trainer or a kind of it.
    """

    def __init__(self, every: int, trainer: Any) -> None:
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            raise ValueError(
                f"--watch.snr-every {every} needs whole gradients, and DeepSpeed and FSDP keep "
                "them in shards: leave it out"
            )
        self.every, self.trainer = every, trainer
        self._told = False

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure, if this step is one of them."""
        if (state.global_step + 1) % self.every == 0:
            began = time.perf_counter()
            found = measure_snr(self.trainer)
            spent = {"time/snr": time.perf_counter() - began}
            for name, value in (found | spent).items():
                self.trainer._metrics["train"][name].append(value)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Say once what it costs."""
        row = logs or {}
        if self._told or not {"time/snr", "time/step"} <= row.keys():
            return
        self._told = True
        if state.is_world_process_zero:
            probe = row["time/snr"]
            share = probe / self.every / max(row["time/step"] - probe, 1e-9)
            log.warning(
                "measuring the gradient's signal took %.2g s; every %d steps that is %.1f%% of "
                "the run's time", probe, self.every, 100 * share,
            )  # fmt: skip


def measure_snr(trainer: Any) -> dict[str, float]:
    """The signal-to-noise ratio of the step that is about to be made.

    Args:
        trainer: between the backward pass and the optimizer's step.

    Returns:
        What `snr_from_norms` returns; nothing if the step has one row alone.
    """
    parts = list(step_parts(trainer))
    if len(parts) < 2:
        return {}
    params = [p for p in trainer.model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    squares: list[float] = []
    metrics, draws = trainer._metrics["train"], random_state()
    logged = {name: list(values) for name, values in metrics.items()}
    for part in parts:
        gradients = gradient_of(trainer, part, params)
        squares.append(squared_norm(gradients))
        for sum_of, gradient in zip(total, gradients, strict=True):
            sum_of += gradient
    restore_random_state(draws)
    # The loss notes what it sees: here for the second time.
    metrics.clear()
    metrics.update(logged)
    return snr_from_norms(squares, squared_norm(total))


def step_parts(trainer: Any) -> Iterator[dict[str, Any]]:
    """The micro-batches of the present step; of one alone, equal parts of it."""
    number = trainer.current_gradient_accumulation_steps
    buffer = trainer._buffered_inputs
    taken = [buffer[(trainer._step - k) % len(buffer)] for k in range(number, 0, -1)]
    if number > 1:
        yield from taken
        return
    rows = len(taken[0]["completion_ids"])
    count = next((k for k in range(min(PARTS, rows), 1, -1) if rows % k == 0), 1)
    yield from split_tensor_dict(taken[0], count)


def gradient_of(trainer: Any, part: dict[str, Any], params: list[Tensor]) -> list[Tensor]:
    """The gradient of a part's loss; `p.grad` and the weight of a bonus are left alone."""
    kept = {name: getattr(trainer, name) for name in MOVED_BY_LOSS}
    with trainer.compute_loss_context_manager():
        loss = trainer._compute_loss(trainer.model, part)
    for name, value in kept.items():
        setattr(trainer, name, value)
    found = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]


def squared_norm(tensors: list[Tensor]) -> float:
    """The squared norm of all together; one synchronisation on a GPU."""
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum())
