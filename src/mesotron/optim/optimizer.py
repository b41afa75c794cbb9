"""Muon and Pion, for groups made by hand: their arguments, units and defaults.

They filter matrices and hand everything else to an auxiliary rule inside the same object, and
differ by their filter alone; `routed` is what they share. To have a model routed, call
`mesotron.muon(model)` and its siblings.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from mesotron.optim.routed import RoutedOptimizer


class Muon(RoutedOptimizer):
    """Muon: momentum whose singular values are all brought to about 1, with an auxiliary rule for
    the rest.

    M <- mu M + (1 - mu) G;  U = (1 - mu) G + mu M (Nesterov);  W <- (1 - lr wd) W - lr scale f(U)

    Args:
        params: parameters or param groups. A group may set any argument below, `view` (see `View`),
            `name`, and `rule`: "muon", "pion", "adamw" or "sgd". In a group without `rule`, tensors
            of fewer than two dimensions go to `aux`; embeddings and heads look like any matrix
            here, so prefer `mesotron.muon(model)`.
        lr: RMS change of a weight per step over 0.2, for a full-rank step under scale="rms":
            AdamW's lr carries over.
        momentum: mu of the running mean of gradients.
        nesterov: look one step ahead.
        weight_decay: decoupled, applied as lr * weight_decay.
        scale: the unit of lr: "rms", "moonlight", "spectral" or a number (see `step_scale`).
        filter: "muon", "cubic", "polar_express", "pion" or "low_rank".
        steps: number of steps of the filter; None is the filter's own default.
        rank: of the low_rank filter.
        betas, eps: of the AdamW rule.
        aux: the rule for vectors in groups without one, "adamw" or "sgd".
        dtype: of the filter's products, by name ("float32", "bfloat16"); None measures which is
            faster.
        momentum_dtype: of the momentum buffer; None is float32.
        batched: filter equal shapes together. False makes a matrix's bits independent of its
            neighbours.
        fused: None takes the Triton kernels on a CUDA GPU where they are available; False never.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Muon(layer.parameters(), lr=0.01)
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> round(optimizer.stats()["muon/update_rms"], 4)  # one direction of four, brought to 0.7
        0.0007

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        scale: str | float = "rms",
        filter: str = "muon",
        steps: int | None = None,
        rank: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        aux: str = "adamw",
        dtype: str | None = None,
        momentum_dtype: str | None = None,
        batched: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            rule="muon",
            aux=aux,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            scale=scale,
            filter=filter,
            steps=steps,
            promote=0,
            cutoff=None,
            rank=rank,
            betas=betas,
            eps=eps,
            dtype=dtype,
            momentum_dtype=momentum_dtype,
            batched=batched,
            fused=fused,
        )


class Pion(RoutedOptimizer):
    """Pion: Muon with a high-pass filter. Strong directions go to 1, weak ones, which are mostly
    noise, to 0.

    Args:
        promote: of the filter's steps, how many raise all directions before the rest suppress the
            small ones. 0, the release's default, lets at most one direction of a block pass, and
            none if it holds less than about half of the energy: watch `dead_blocks` in `stats()`.
        cutoff: instead of `promote`, a continuous strength: a fraction of the largest singular
            value, "aligned" for sqrt(2) - 1 of it, or "noise" for the edge that pure noise of the
            block's shape would reach.
        steps: of the filter; with `cutoff`, the suppression steps.
        params, lr, momentum, nesterov, weight_decay, scale, betas, eps, aux, dtype, momentum_dtype,
            batched, fused: as in `Muon`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Pion(layer.parameters(), lr=0.01, cutoff="noise")

    References: Fan et al., "Pion", 2026, arXiv 2605.19282. (Not the orthogonal-equivalence
        optimizer of the same name, arXiv 2605.12492.)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        promote: int = 0,
        cutoff: float | str | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        scale: str | float = "rms",
        steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        aux: str = "adamw",
        dtype: str | None = None,
        momentum_dtype: str | None = None,
        batched: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            rule="pion",
            aux=aux,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            scale=scale,
            filter="pion",
            steps=steps,
            promote=promote,
            cutoff=cutoff,
            rank=None,
            betas=betas,
            eps=eps,
            dtype=dtype,
            momentum_dtype=momentum_dtype,
            batched=batched,
            fused=fused,
        )
