"""AdamW, for every parameter that is not a hidden matrix, or for all of them.

PyTorch's own functional optimizer makes the step, so it is bit-equal to `torch.optim.AdamW`.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as functional_adamw

from mesotron.optim.build import Rate, build
from mesotron.optim.device import wide_dtype
from mesotron.optim.elementwise import new_counter, sample
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.options import OptimizerOptions, with_options
from mesotron.optim.registry import AuxiliaryBatch, AuxiliaryRule, State, auxiliary_rule


def adamw_state(p: Tensor) -> State:
    dtype = wide_dtype(p.dtype)
    return {
        "step": new_counter(p),
        "exp_avg": torch.zeros_like(p, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(p, dtype=dtype),
    }


def _update(batch: AuxiliaryBatch, fused: bool) -> None:
    group = batch.group
    beta1, beta2 = group["betas"]

    functional_adamw(
        batch.params,
        batch.grads,
        [state["exp_avg"] for state in batch.states],
        [state["exp_avg_sq"] for state in batch.states],
        [],
        [state["step"] for state in batch.states],
        # Without the fused kernels PyTorch asserts that there is no found_inf.
        found_inf=batch.found_inf if fused else None,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        beta1=beta1,
        beta2=beta2,
        amsgrad=False,
        maximize=False,
        fused=fused,
    )


def _direction(batch: AuxiliaryBatch, G: Tensor) -> Tensor:
    beta1, beta2 = batch.group["betas"]
    step = batch.states[0]["step"].clamp_min(1)  # 0 after a skipped first step

    m = sample([state["exp_avg"] for state in batch.states]) / (1 - beta1**step)
    v = sample([state["exp_avg_sq"] for state in batch.states]) / (1 - beta2**step)

    return m / (v.sqrt() + batch.group["eps"])


ADAMW = auxiliary_rule(
    AuxiliaryRule(
        name="adamw",
        about="AdamW",
        new_state=adamw_state,
        update=_update,
        direction=_direction,
        state_bytes=8,
    )
)


class AdamW(RoutedOptimizer):
    """AdamW with the groups and statistics of the others; bit-equal to `torch.optim.AdamW`."""

    rule = "adamw"


@with_options(AdamW)
def adamw(model: nn.Module, lr: Rate = 1e-3, **options: Unpack[OptimizerOptions]) -> AdamW:
    """AdamW for everything, with the same routing table, groups and statistics: the fair baseline.

    Example:
        >>> [g["rule"] for g in adamw(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))).param_groups]
        ['adamw', 'adamw']
    """
    return build(AdamW, model, lr, None, {**options})
