"""One parameter in one step, and the state that a rule for matrices keeps for it.

A momentum M of the parameter's shape, and for rules that need it one number for each line of the
longer side of every block.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim.device import wide_dtype
from mesotron.optim.registry import Group, State
from mesotron.optim.views import View

# Counters, and the start of a leash: rounding it would move the place that weights are held to.
_AS_SAVED = ("step", "start", "start_norm")


class ParamStep(NamedTuple):
    """What a step needs of one parameter."""

    param: Tensor
    group: Group
    state: State
    number: int  # the parameter's index in the optimizer

    @property
    def grad(self) -> Tensor:
        return dense_grad(self.param)

    @property
    def momentum(self) -> Tensor:
        return self.state["momentum_buffer"]

    @property
    def lines(self) -> Tensor | None:
        rule = SPECTRAL_RULES[self.group["rule"]]
        if rule.finish is None:
            return None

        return self.state[rule.line_state]

    def prepare(self) -> None:
        """Make the state of a matrix before its first step."""
        momentum_of(self.state, self.param, self.group)

        rule = SPECTRAL_RULES[self.group["rule"]]
        if rule.finish is not None and rule.line_state not in self.state:
            self.state[rule.line_state] = _new_lines(self.param, self.group)


def whole(p: Tensor) -> Tensor:
    """A tensor of all ranks, gathered."""
    return p.full_tensor() if isinstance(p, DTensor) else p


def local_part(p: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return p.to_local() if isinstance(p, DTensor) else p


def dense_grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise ValueError("a parameter has a sparse gradient: build its embedding with sparse=False")
    return p.grad


def momentum_dtype(group: Group, weights: torch.dtype) -> torch.dtype:
    named = group["momentum_dtype"]
    if named:
        return getattr(torch, named)

    return torch.promote_types(weights, torch.float32)


def momentum_of(state: State, p: Tensor, group: Group) -> Tensor:
    """The momentum buffer in a matrix parameter's state, created on first use; a DTensor if the
    parameter is one."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(p, dtype=momentum_dtype(group, p.dtype))
    return state["momentum_buffer"]


def loaded_dtype(key: str, saved: Tensor, p: Tensor, group: Group) -> torch.dtype:
    """The dtype that a state from a checkpoint gets, which may be of weights of another dtype."""
    if key in _AS_SAVED or not saved.is_floating_point():
        return saved.dtype
    if key == "momentum_buffer" and group["rule"] in SPECTRAL_RULES:
        return momentum_dtype(group, p.dtype)

    return wide_dtype(p.dtype)


def _new_lines(p: Tensor, group: Group) -> Tensor:
    """One vector for all blocks of a parameter."""
    size = 0
    for window in View.parse(group["view"]).windows(p):
        _, long_side = window.block_shape
        size += window.num * long_side

    return torch.zeros(size, dtype=wide_dtype(p.dtype), device=p.device)
