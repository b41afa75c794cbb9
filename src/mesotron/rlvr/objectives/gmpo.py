"""GMPO: the geometric mean of the token ratios instead of the arithmetic one.

An outlier moves it little, so the clip may be wide. At ratio 1 its gradient is GRPO's.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective

if TYPE_CHECKING:
    from torch import Tensor

    from mesotron.rlvr.grpo import LossInputs


@objective(
    "gmpo",
    about="geometric mean of the token ratios",
    paper="arXiv 2507.20673; clip widths in log space",
    trl_loss="grpo",
    epsilon=0.4,
    epsilon_high=0.4,
    one_update="equals grpo",
)
def gmpo(inputs: LossInputs) -> PolicyLoss:
    """The mean over sequences of -A exp(mean_t d'_t), for the log-ratio d of a token.

    d'_t = min(d_t, epsilon_high) where A > 0 and max(d_t, -epsilon) where A < 0. Clipped tokens
    stay in the mean and give no gradient.

    References:
        Zhao et al., Geometric-Mean Policy Optimization, 2025, arXiv 2507.20673.
    """
    settings = inputs.settings
    A = inputs.A
    d = (inputs.logprobs - inputs.old_logprobs).where(inputs.mask != 0, 0.0)  # [B, T]

    is_low = (A < 0) & (d < -settings.epsilon)
    is_high = (A > 0) & (d > settings.epsilon_high)

    if settings.delta is not None:
        d = d.clamp(max=log(settings.delta))

    bounded = d.clamp(max=settings.epsilon_high).where(A > 0, d.clamp(min=-settings.epsilon))
    correction, trains = sequence_weights(inputs)
    if trains is not None:
        bounded = bounded * trains

    mean = bounded.sum(dim=1) / inputs.mask.sum(dim=1).clamp(min=1.0)

    # A weight that overflows times an advantage of 0 would be NaN, so such rows get the weight 1.
    weight = mean.where(inputs.advantages != 0, 0.0).exp()
    if correction is not None:
        weight = weight * correction

    loss = inputs.mean_of_sequences(-inputs.advantages * weight)

    metrics = inputs.clip_metrics(is_low, is_high)
    clipped = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]

    return PolicyLoss(loss, metrics | {"clip_ratio/region_mean": clipped})


def sequence_weights(inputs: LossInputs) -> tuple[Tensor | None, Tensor | None]:
    """A factor for each sequence [B], and the tokens [B, T] with a gradient; None for all of 1."""
    weight = None if inputs.on_policy is None else inputs.on_policy.squeeze(1)
    trains = inputs.high_entropy

    if inputs.sampler_ratio is not None:
        correction, kept = correction_weight(inputs.sampler_ratio, inputs.mask)
        weight = correction if weight is None else weight * correction
        trains = kept if trains is None else trains & kept

    return weight, trains


def correction_weight(ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The correction for a sampler, [B, 1] or [B, T], as one factor for each sequence [B].

    Ratios of tokens become their geometric mean, as GMPO weighs its own. Tokens that were masked
    (ratio 0) are left out and give no gradient. Also returns the tokens [B, T] that remain.
    """
    if ratio.shape[1] == 1 and mask.shape[1] != 1:
        return ratio.squeeze(1), mask.new_ones(mask.shape).bool()

    kept = ratio > 0
    counted = kept & (mask != 0)
    logs = ratio.where(counted, 1.0).log()

    return (logs.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).exp(), kept
