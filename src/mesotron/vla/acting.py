"""A trained policy as the function that evaluation calls: observations in, actions out."""

from __future__ import annotations

import numpy as np
import torch

from mesotron.vla.interface import IMAGES, STATE, TASK, Act, Observation, stack_images
from mesotron.vla.policy import Inputs, Policy


def make_act(policy: Policy, device: torch.device | str = "cpu", bfloat16: bool = False) -> Act:
    """The policy as a function of B observations to actions (B, K, A), clipped to [-1, 1].

    Args:
        policy: on that device.
        device: where it runs.
        bfloat16: make products in bfloat16.
    """
    device = torch.device(device)

    def act(observations: list[Observation]) -> np.ndarray:
        seen = as_inputs(policy, observations, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            actions = policy.act(seen)
        return actions.float().clamp(-1, 1).cpu().numpy()

    return act


def as_inputs(policy: Policy, observations: list[Observation], device: torch.device) -> Inputs:
    """Observations as the policy takes them."""
    missing = [name for name in policy.body.cameras if IMAGES + name not in observations[0]]
    if missing:
        raise ValueError(
            f"the policy looks through a camera {missing[0]!r} that the world does not have: use "
            "the world of its demonstrations"
        )
    texts = [seen[TASK] for seen in observations]
    different = list(dict.fromkeys(texts))
    told = torch.tensor([different.index(text) for text in texts], device=device)
    images = None
    if policy.body.cameras:
        views = [torch.from_numpy(stack_images(observations, c)) for c in policy.body.cameras]
        images = torch.stack(views, dim=1).permute(0, 1, 4, 2, 3).to(device)
    state = torch.from_numpy(np.stack([seen[STATE] for seen in observations])).float()
    return Inputs(images, state.to(device), policy.language.encode(different).to(device), told)
