"""SGD with momentum, for every parameter that is not a hidden matrix: no second moment anywhere.

PyTorch's own functional optimizer makes the step, so it is bit-equal to `torch.optim.SGD`; weight
decay is decoupled.
"""

from typing import Unpack

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd as functional_sgd

from mesotron.optim.build import Rate, build
from mesotron.optim.device import wide_dtype
from mesotron.optim.elementwise import new_counter, sample
from mesotron.optim.options import OptimizerOptions, with_options
from mesotron.optim.registry import AuxiliaryBatch, AuxiliaryRule, State, auxiliary_rule
from mesotron.optim.rules.muon import Muon

# The step is the gradient itself, so the learning rate has another unit than Muon's and needs its
# own default; a sweep should include it.
SGD_LR = 0.1


def sgd_state(p: Tensor) -> State:
    wide = wide_dtype(p.dtype)
    momentum = torch.zeros_like(p, dtype=wide)
    if p.dtype == wide:
        return {"momentum_buffer": momentum}

    return {"step": new_counter(p), "momentum_buffer": momentum}


def _update(batch: AuxiliaryBatch, fused: bool) -> None:
    group = batch.group
    found_inf = batch.found_inf
    _decay(batch)

    functional_sgd(
        batch.params,
        batch.grads,
        [state["momentum_buffer"] for state in batch.states],
        found_inf=found_inf if fused else None,
        lr=group["lr"],
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=0.0,
        dampening=0.0,
        maximize=False,
        fused=fused,
    )

    counters = [state["step"] for state in batch.states if "step" in state]
    if counters:
        added = 1 if found_inf is None else 1 - found_inf
        torch._foreach_add_(counters, added)  # pyright: ignore


def _decay(batch: AuxiliaryBatch) -> None:
    keep = 1 - batch.group["lr"] * batch.group["weight_decay"]
    found_inf = batch.found_inf
    if found_inf is not None:
        keep = torch.where(found_inf > 0, 1.0, torch.as_tensor(keep, device=found_inf.device))

    if isinstance(keep, Tensor) or keep != 1:
        torch._foreach_mul_(batch.params, keep)  # pyright: ignore


def _direction(batch: AuxiliaryBatch, G: Tensor) -> Tensor:
    momentum = sample([state["momentum_buffer"] for state in batch.states])
    if batch.group["nesterov"]:
        return G + batch.group["momentum"] * momentum

    return momentum


SGD = auxiliary_rule(
    AuxiliaryRule(
        name="sgd",
        about="SGD with momentum: no second moment anywhere",
        new_state=sgd_state,
        update=_update,
        direction=_direction,
        state_bytes=4,
        lr=SGD_LR,
    )
)


class MuonSGD(Muon):
    """Muon with SGD with momentum as its auxiliary rule: no second moment anywhere."""

    default_aux = "sgd"


@with_options(MuonSGD)
def muon_sgd(
    model: nn.Module,
    lr: Rate = 1e-3,
    *,
    aux_lr: Rate | None = None,
    **options: Unpack[OptimizerOptions],
) -> MuonSGD:
    """Muon for the hidden matrices, SGD with momentum for the rest: no second moment anywhere.

    `aux_lr` is in SGD's unit, the gradient itself; None is 0.1. Other arguments as in `muon`.

    Example:
        >>> optimizer = muon_sgd(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), lr=3e-4)
    """
    return build(MuonSGD, model, lr, aux_lr, {**options})
