"""The momentum policy of M-GRPO (arXiv 2512.13070): a slow average of the weights that also votes.

theta_k <- m theta_k + (1 - m) theta_q, kept in float32: at a learning rate of 1e-6 a bfloat16
average would never move. Only trainable weights are averaged (with LoRA the adapters: the mean of A
and of B is not the mean of BA, an approximation). Sharded weights are averaged shard by shard.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import cos, pi
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mesotron.rlvr.shards import let_go

# Where Co-rewarding-II's annealing ends (arXiv 2508.00410): the anchor then hardly moves.
LAST_MOMENTUM = 1 - 1e-5


def momentum_at(
    progress: float, momentum: float, schedule: Literal["constant", "cosine"] = "constant"
) -> float:
    """The momentum at a point of the run.

    Args:
        progress: share of the run that is done, 0 to 1.
        momentum: at the start.
        schedule: constant, or a cosine that ends at 1 - 1e-5 (never below `momentum`).

    Example:
        >>> momentum_at(0.0, 0.99, "cosine"), round(momentum_at(1.0, 0.99, "cosine"), 6)
        (0.99, 0.99999)
    """
    if not 0 <= momentum <= 1:
        raise ValueError(f"objective.momentum = {momentum} must be between 0 and 1; 0.99 is usual")
    if schedule == "constant":
        return momentum
    last = max(LAST_MOMENTUM, momentum)
    return last - (last - momentum) * (1 + cos(pi * min(max(progress, 0.0), 1.0))) / 2


class Anchor:
    """An average of a model's trainable weights that can take their place for a while.

    It starts as a copy at its first use, when the model is where it trains (on its device, wrapped,
    sharded), or from a checkpoint. Flat shards (FSDP1, ZeRO-3) must be refused by whoever prepared
    the model: they cannot be told from real vectors here.

    Args:
        dtype: of the copy; float32 for an average that moves, None to keep each weight's own.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> anchor = Anchor().start(model)
        >>> start = model.weight.item()
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1.0)
        >>> anchor.update(model, momentum=0.75)
        >>> with anchor.in_place_of(model):
        ...     print(round(model.weight.item() - start, 6))
        0.25
    """

    def __init__(self, dtype: torch.dtype | None = torch.float32) -> None:
        self.dtype = dtype
        self.weights: dict[str, Tensor] = {}
        self.updates = 0
        self.moved = torch.zeros(2)
        self._ready = False

    def start(self, model: nn.Module) -> "Anchor":
        """Copy the model, unless this was done before or a checkpoint was loaded."""
        if self._ready:
            return self
        now = {
            name: local(p).to(dtype=self.dtype or p.dtype, copy=True)
            for name, p in trainable(model)
        }
        if not now:
            raise ValueError("no weight of the model trains, so there is nothing to anchor")
        if self.weights:
            now = _fit(self.weights, now)
        self.weights, self._ready = now, True
        return self

    @torch.no_grad()
    def update(self, model: nn.Module, momentum: float) -> None:
        """Move the average toward the model: m = 0 copies it, m = 1 stays."""
        self.start(model)  # a run resumed inside a rollout updates before it samples
        sums = []
        for name, p in trainable(model):
            mean, now = self.weights[name], local(p)
            away = now.to(mean.dtype) - mean
            sums.append(torch.stack([away.square().sum(), now.float().square().sum()]))
            # At m = 0 exactly the model, which mean + (now - mean) is not to the last bit.
            mean.copy_(now) if momentum == 0 else mean.add_(away, alpha=1 - momentum)
        total = torch.stack(sums).sum(dim=0)
        self.moved = total * torch.tensor([momentum**2, 1.0], device=total.device)
        self.updates += 1

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give the model the anchor's weights inside the block, and its own back after it.

        The tensors stay the same objects at the same addresses: whatever points at them (an
        optimizer, an inference engine, a shard) need not know.
        """
        self.start(model)
        own = {name: local(p).clone() for name, p in trainable(model)}
        with torch.no_grad():
            for name, p in trainable(model):
                local(p).copy_(self.weights[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in trainable(model):
                    local(p).copy_(own[name])

    def tensors(self) -> dict[str, Tensor]:
        """The average, for a checkpoint: this process's shards where the model is sharded."""
        return dict(self.weights)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the average of a checkpoint over; it is fitted to the model at the next use."""
        self.weights, self._ready = dict(tensors), False

    def values(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights."""
        return {"updates": self.updates, "moved": self.moved.tolist()}

    def load_values(self, values: dict[str, Any]) -> None:
        """Take over what `values` gave."""
        self.updates = int(values["updates"])
        self.moved = torch.tensor(values["moved"])


def _fit(loaded: dict[str, Tensor], now: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's average where the model's weights are; another model's is refused."""
    odd = [name for name in (*loaded, *now) if not _alike(loaded.get(name), now.get(name))]
    if odd:
        raise ValueError(
            f"the checkpoint's anchor does not fit this model (see {odd[0]!r}): resume with the "
            "model and the LoRA settings that the run was started with"
        )
    return {name: now[name].copy_(mean) for name, mean in loaded.items()}


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that train, each once, by name; of a sharded model its shards."""
    let_go(model)
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def local(p: Tensor) -> Tensor:
    """This process's part of a weight, without gradient, sharing its memory."""
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p
