"""Parameters with gradients for a timed step, and the optimizers built over them.

All contenders share the same weights and gradients; only their states are their own.
"""

from __future__ import annotations

import torch
from torch import nn

from mesotron.bench.peers import PEERS, Peer, auxiliary
from mesotron.bench.shapes import Projection

MEMORY_SHARE = 0.5  # of the free GPU memory, for the states that are held at one time


class Built:
    """One contender's optimizers, stepped together."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """One whole step."""
        for optimizer in self.optimizers:
            optimizer.step()


class Workbench:
    """Parameters with gradients on a device, and the optimizers built over them.

    Args:
        shapes: the hidden matrices, float32.
        embedding: (rows, cols) of an embedding to step as well, or None.
        device: where they live.
    """

    def __init__(
        self, shapes: list[Projection], embedding: tuple[int, int] | None, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self.shapes = shapes
        self.device = device
        sizes = [(p.rows, p.cols) for p in shapes] + ([embedding] if embedding else [])
        params = [nn.Parameter(torch.randn(size, device=device) * 0.02) for size in sizes]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        self.matrices = params[: len(shapes)]
        self.embedding = params[-1] if embedding else None

    @property
    def num_parameters(self) -> int:
        """Of all tensors that are stepped."""
        tensors = self.matrices + ([] if self.embedding is None else [self.embedding])
        return sum(p.numel() for p in tensors)

    def build(self, peer: Peer) -> Built:
        """A peer's optimizer over the matrices, and one over the embedding if there is one."""
        optimizers = [peer.build(list(self.matrices), self.shapes)]
        if self.embedding is not None:
            optimizers.append(auxiliary(peer, self.embedding))
        return Built(optimizers)

    def num_at_once(self) -> int:
        """How many optimizers' states may be held together, at up to 8 bytes a parameter."""
        if self.device.type != "cuda":
            return len(PEERS)
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, int(MEMORY_SHARE * free // (8 * self.num_parameters)))
