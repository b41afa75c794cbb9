"""SAPO: a soft gate on the ratio instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "sapo",
    about="soft gate instead of a clip",
    paper="arXiv 2511.20347",
    options={"temperature_pos": 1.0, "temperature_neg": 1.05},
)
def sapo(
    inputs: LossInputs, temperature_pos: float = 1.0, temperature_neg: float = 1.05
) -> PolicyLoss:
    import torch

    temperature = torch.where(inputs.A > 0, temperature_pos, temperature_neg)  # [B, 1]
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    values = inputs.weigh(-gate * inputs.A)

    return PolicyLoss(inputs.mean_over_sequences(values), {})
