"""The two ways to turn the action module into actions: L1 regression and flow matching.

A head is two functions of one predictor, `predict(noisy, time) -> [B, K, A]`: the loss of a chunk,
and the chunk to carry out. Actions here are normalised.

Legend: B batch, K actions of a chunk, A numbers of an action, t time from 1 (noise) to 0 (action).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mesotron.vla.draws import Draws

Predict = Callable[[Tensor | None, Tensor | None], Tensor]
"""(noisy actions [B, K, A], their time [B]) -> [B, K, A]; both None for a head without noise."""

# Every chunk starts from the same noise, so that a policy is a function of what it sees and an
# episode does not depend on those evaluated beside it.
NOISE_SEED = 20_260


class Head(Protocol):
    """What the policy asks of a head."""

    needs_noise: bool

    def loss(self, predict: Predict, actions: Tensor, real: Tensor, draws: Draws) -> Tensor:
        """The mean loss over the actions that are not padding.

        Args:
            predict: the action module on this batch's context.
            actions: [B, K, A].
            real: [B, K] bool, False where the episode was over.
            draws: of the noise.
        """
        ...

    def sample(self, predict: Predict, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """A chunk of actions [B, K, A] on the device of `like`."""
        ...


class Regression:
    """Predict the actions, judged by the mean absolute error.

    References: Kim et al., Fine-Tuning Vision-Language-Action Models, 2025, arXiv 2502.19645.
    """

    needs_noise = False

    def loss(self, predict: Predict, actions: Tensor, real: Tensor, draws: Draws) -> Tensor:
        """As in `Head`; |predicted - actions|."""
        return masked_mean((predict(None, None).float() - actions).abs(), real)

    def sample(self, predict: Predict, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """As in `Head`."""
        return predict(None, None).float()


class Flow:
    """Predict the velocity of a straight path from noise to actions; few Euler steps to act.

    x_t = t noise + (1 - t) actions; the target is noise - actions; t ~ Beta(1.5, 1), nearer noise.

    Args:
        num_steps: Euler steps when acting.

    References: Black et al., pi0, 2024, arXiv 2410.24164; Lipman et al., 2023, arXiv 2210.02747.
    """

    needs_noise = True

    def __init__(self, num_steps: int) -> None:
        if num_steps < 1:
            raise ValueError(f"--policy.flow-steps {num_steps} must be at least 1")
        self.num_steps = num_steps

    def loss(self, predict: Predict, actions: Tensor, real: Tensor, draws: Draws) -> Tensor:
        """As in `Head`; the squared error of the velocity."""
        noise = draws.normal(tuple(actions.shape))
        # The inverse of Beta(1.5, 1)'s distribution function, t^1.5.
        t = draws.uniform((len(actions),)) ** (1 / 1.5)
        x = t[:, None, None] * noise + (1 - t[:, None, None]) * actions
        return masked_mean((predict(x, t).float() - (noise - actions)).square(), real)

    def sample(self, predict: Predict, shape: tuple[int, int, int], like: Tensor) -> Tensor:
        """As in `Head`; from the same noise for every chunk."""
        generator = torch.Generator().manual_seed(NOISE_SEED)
        noise = torch.randn(shape[1:], generator=generator).to(like.device)
        x = noise.expand(shape)
        for k in range(self.num_steps):
            t = torch.full((shape[0],), 1 - k / self.num_steps, device=like.device)
            x = x - predict(x, t).float() / self.num_steps
        return x


def make_head(name: str, flow_steps: int) -> Head:
    """A head by name, "l1" or "flow"."""
    return Flow(flow_steps) if name == "flow" else Regression()


def masked_mean(errors: Tensor, real: Tensor) -> Tensor:
    """The mean of [B, K, A] over the actions that are not padding.

    Example:
        >>> errors = torch.tensor([[[1.0], [9.0]]])
        >>> masked_mean(errors, torch.tensor([[True, False]])).item()
        1.0
    """
    weights = real[..., None].to(errors.dtype).expand_as(errors)
    return (errors * weights).sum() / weights.sum().clamp_min(1)
