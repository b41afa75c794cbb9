"""What each part's gradient is like: how many directions it has, and how much of it is signal.

The two measures that the Pion paper argues with (arXiv 2605.19282): effective rank, and the ratio
of signal to noise. They cost another pass over the batch in quarters, and singular values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mesotron.optim import route
from mesotron.optim.groups import SPECTRAL_RULES
from mesotron.probes import effective_rank, snr_from_norms
from mesotron.vla.policy import PARTS

NUM_QUARTERS = 4
# Singular values of more matrices than this would take longer than the steps between two probes.
MOST_MATRICES = 6


class GradientProbe:
    """Measures the gradients of a policy's hidden matrices, part by part.

    Args:
        policy: its matrices are found by the routing table, whatever rule trains them, so that
            runs of all optimizers can be compared.
    """

    def __init__(self, policy: nn.Module) -> None:
        named = dict(policy.named_parameters())
        self._matrices: dict[str, list[nn.Parameter]] = defaultdict(list)
        for row in route(policy, matrix="muon"):
            part = row.name.split(".")[0]
            if row.rule in SPECTRAL_RULES and part in PARTS and len(row.shape) == 2:
                self._matrices[part].append(named[row.name])

    def measure(
        self, loss: Callable[[Tensor], Tensor], rows: Tensor, clear: Callable[[], None]
    ) -> dict[str, float]:
        """Gradients of the quarters of a batch, described.

        Args:
            loss: of some rows.
            rows: int64 [B], of the whole batch.
            clear: takes all gradients away.

        Returns:
            gradient/PART/effective_rank, /rank_share (of the largest possible), /top_share (of the
            energy, in the largest singular value) and /snr of one quarter.
        """
        quarters = rows.chunk(NUM_QUARTERS)
        squares: dict[str, list[float]] = defaultdict(list)
        sums: dict[str, list[Tensor]] = {}
        for quarter in quarters:
            clear()
            loss(quarter).backward()
            for part, matrices in self._matrices.items():
                grads = [p.grad.detach().clone() for p in matrices if p.grad is not None]
                squares[part].append(squared_norm(grads))
                before = sums.get(part, [torch.zeros_like(g) for g in grads])
                sums[part] = [a + b for a, b in zip(before, grads, strict=True)]
        clear()
        found: dict[str, float] = {}
        for part, grads in sums.items():
            snr = snr_from_norms(squares[part], squared_norm(grads))["gradient/snr"]
            found |= {f"gradient/{part}/snr": snr, **shape_of(part, grads)}
        return found


def shape_of(part: str, grads: Sequence[Tensor]) -> dict[str, float]:
    """Mean effective rank, its share of the possible, and mean share of the top direction."""
    stride = max(1, -(-len(grads) // MOST_MATRICES))
    # On the CPU: one core finds singular values as fast as a GPU, which has other work. A matrix of
    # zeros or of numbers that are not finite has none.
    there = [g.cpu() for g in grads[::stride]]
    picked = [g for g in there if bool(g.any()) and bool(torch.isfinite(g).all())]
    if not picked:
        return {}
    ranks = [effective_rank(g) for g in picked]
    effective = [rank["gradient/effective_rank"] for rank in ranks]
    shares = [e / min(g.shape) for e, g in zip(effective, picked, strict=True)]
    tops = [1 / rank["gradient/stable_rank"] for rank in ranks]
    return {
        f"gradient/{part}/effective_rank": sum(effective) / len(effective),
        f"gradient/{part}/rank_share": sum(shares) / len(shares),
        f"gradient/{part}/top_share": sum(tops) / len(tops),
    }


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The squared norm of all together."""
    return float(sum(t.double().square().sum() for t in tensors))
