"""What a run keeps of its optimizer besides numbers: the routing table, and spectra now and then.

A plain Transformers callback: spectra.jsonl gets the singular values of a few blocks, before and
after the filter, at five steps of a run; routing.json says who is trained by which rule and why.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesotron.optim import RoutedOptimizer
from mesotron.optim.spectra import Block, choose_blocks, measure_spectrum
from mesotron.runs import RunFolder

MOMENTS = 5


class OptimizerLog(TrainerCallback):
    """Writes routing.json at the start and rows of spectra.jsonl at five steps of the run.

    Args:
        run: its folder. With an optimizer that is not ours nothing is written.
    """

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.blocks: list[Block] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the table, and choose the blocks."""
        optimizer = routed(kwargs["optimizer"])
        if optimizer is None or not state.is_world_process_zero:
            return
        self.blocks = choose_blocks(optimizer)
        if optimizer.table is not None:
            self.run.save("routing", {"rows": [asdict(row) for row in optimizer.table.merged()]})

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure, while the gradients of the step are still there."""
        step = state.global_step + 1  # counted when the step is over
        optimizer = routed(kwargs["optimizer"])
        if optimizer is None or step not in moments(state.max_steps):
            return
        for block in self.blocks:
            found = measure_spectrum(optimizer, block)
            if found is not None:
                self.run.append("spectra", {"step": step, **found})


def routed(optimizer: Any) -> RoutedOptimizer | None:
    """Our optimizer, also where Accelerate has wrapped it; None for anybody else's."""
    found = getattr(optimizer, "optimizer", optimizer)
    return found if isinstance(found, RoutedOptimizer) else None


def moments(steps: int) -> set[int]:
    """The first step, the last, and three between.

    Example:
        >>> sorted(moments(60))
        [1, 16, 31, 45, 60]
    """
    return {1 + round(k * (steps - 1) / (MOMENTS - 1)) for k in range(MOMENTS)}
