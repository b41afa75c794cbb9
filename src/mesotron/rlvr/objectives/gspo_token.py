"""GSPO-token: GSPO's ratio, with a gradient that each token weighs on its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mesotron.rlvr.objectives import PolicyLoss, objective
from mesotron.rlvr.objectives.grpo import grpo

if TYPE_CHECKING:
    from mesotron.rlvr.grpo import LossInputs


@objective(
    "gspo_token",
    about="`gspo`'s, with a gradient that token masks and weights act on",
    paper="arXiv 2507.18071, equation 14",
    trl_loss="grpo",
    epsilon=3e-4,
    epsilon_high=4e-4,
    one_update="equals grpo",
)
def gspo_token(inputs: LossInputs) -> PolicyLoss:
    """GRPO's loss with the ratio sg[s] p_t / sg[p_t], for the ratio s of the whole sequence.

    Its value is GSPO's. So is its gradient, unless tokens are weighted: by the share of high
    entropy, or by a correction for the sampler.

    References:
        Zheng et al., Group Sequence Policy Optimization, 2025, arXiv 2507.18071.
    """
    logprobs = inputs.logprobs
    mask = inputs.mask
    d = (logprobs.detach() - inputs.old_logprobs).where(mask != 0, 0.0)  # [B, T]

    sizes = mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    sequence = (d.sum(dim=1, keepdim=True) / sizes).exp()  # [B, 1]
    ratio = sequence * (logprobs - logprobs.detach()).exp()

    return grpo(replace(inputs, ratio=ratio))
