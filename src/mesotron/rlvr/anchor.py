"""The anchor: a slow average of the policy's weights that votes or is the KL reference.

M-GRPO (arXiv 2512.13070): theta_k <- m theta_k + (1 - m) theta_q, kept in float32, since at a
learning rate of 1e-6 a bfloat16 average would never move. Only trainable weights are averaged. With
LoRA these are the adapters, an approximation: the mean of A and of B is not the mean of BA. Sharded
weights are averaged shard by shard.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import cos, pi
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mesotron.rlvr.wrapping import reshard

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
    """An average of a model's trainable weights that can temporarily replace them.

    It starts as a copy at its first use, when the model is wrapped, sharded and on its device, or
    from a checkpoint. Flat shards (FSDP1, ZeRO-3) look like ordinary vectors here, so the caller
    must refuse them.

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
        """Squared distance to the model after the last update, and the model's squared norm."""
        self._ready = False

    def start(self, model: nn.Module) -> "Anchor":
        """Copy the model, unless that was done before or a checkpoint was loaded."""
        if self._ready:
            return self
        now = {
            name: local(p).to(dtype=self.dtype or p.dtype, copy=True)
            for name, p in trainable(model)
        }
        if not now:
            raise ValueError("the model has no trainable weights to anchor")
        if self.weights:  # from a checkpoint
            shapes, loaded = ({n: w.shape for n, w in x.items()} for x in (now, self.weights))
            wrong = [n for n in (*loaded, *shapes) if loaded.get(n) != shapes.get(n)]
            if wrong:
                raise ValueError(
                    f"the checkpoint's anchor does not fit this model (see {wrong[0]!r}): resume "
                    "with the model and the LoRA settings that the run was started with"
                )
            now = {name: now[name].copy_(mean) for name, mean in self.weights.items()}
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
        """Give the model the anchor's weights inside the block.

        The tensors stay the same objects at the same addresses, so optimizers, inference engines
        and shards that hold them need not know.
        """
        self.start(model)
        own = {name: local(p).clone() for name, p in trainable(model)}
        self._write(model, self.weights)
        try:
            yield
        finally:
            self._write(model, own)

    @staticmethod
    @torch.no_grad()
    def _write(model: nn.Module, weights: dict[str, Tensor]) -> None:
        for name, p in trainable(model):
            local(p).copy_(weights[name])

    # For checkpoints (`checkpoint.Stateful`); of a sharded model each process has its shards.

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.weights, self._ready = dict(tensors), False

    def values(self) -> dict[str, Any]:
        return {"updates": self.updates, "moved": self.moved.tolist()}

    def load_values(self, values: dict[str, Any]) -> None:
        self.updates = int(values["updates"])
        self.moved = torch.tensor(values["moved"])


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable weights by name, each once; of a sharded model its shards."""
    reshard(model)
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def local(p: Tensor) -> Tensor:
    """This process's part of a weight, detached, sharing its memory."""
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p
