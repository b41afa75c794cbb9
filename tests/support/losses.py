"""Inputs of objectives, written by hand."""

from typing import Any

import torch

from mesotron.rlvr import objectives
from mesotron.rlvr.grpo import LossInputs, LossSettings, importance_ratio
from mesotron.rlvr.objectives import PolicyLoss


def make_inputs(
    d: Any,
    advantages: Any,
    mask: Any = None,
    *,
    old: Any = None,
    objective: str = "gmpo",
    num_tokens: float = 1.0,
    terms: dict[str, torch.Tensor] | None = None,
    **settings: Any,
) -> LossInputs:
    """Log-ratios d [B, T] over an old policy of zeros, in float64."""
    d = torch.as_tensor(d, dtype=torch.float64)

    if old is None:
        old = torch.zeros_like(d)
    else:
        old = torch.as_tensor(old, dtype=torch.float64)

    logprobs = (d + old).detach().requires_grad_()
    mask = torch.ones_like(d) if mask is None else torch.as_tensor(mask)

    published = objectives.get(objective)
    widths = {"epsilon": published.epsilon or 0.0, "epsilon_high": published.epsilon_high or 0.0}
    chosen = LossSettings(objective=published, **(widths | settings))

    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        mask=mask,
        ratio=importance_ratio(logprobs - old, mask, chosen.level),
        settings=chosen,
        num_tokens=torch.tensor(num_tokens),
        **(terms or {}),
    )


def loss_of(inputs: LossInputs) -> PolicyLoss:
    return inputs.settings.objective.loss(inputs)


def value_of(inputs: LossInputs) -> float:
    return loss_of(inputs).mean.value.item()


def gradient(inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss_of(inputs).mean.value, inputs.logprobs)[0]
