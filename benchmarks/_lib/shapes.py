"""The hidden matrices of real models, as data: what an optimizer step is timed on.

Numbers come from the models' public configs; weights are never loaded. Fused projections are
listed as the q, k and v they hold, so that every optimizer is given the same matrices.

Legend: rows = outputs, cols = inputs, heads = blocks along `axis` in per-head mode (0: none).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mesotron.spectral import muon, standard_flops


class Projection(NamedTuple):
    """One weight matrix of a layer."""

    rows: int
    cols: int
    heads: int = 0
    axis: str = "rows"

    @property
    def wide(self) -> tuple[int, int]:
        """(short side, long side)."""
        return min(self.rows, self.cols), max(self.rows, self.cols)

    @property
    def plain_flops(self) -> int:
        """FLOPs of Muon's five steps in the standard form: the yardstick for every optimizer."""
        return standard_flops(*self.wide, muon().steps)

    def view(self, per_head: bool) -> str:
        """The view of `mesotron.optim` under which this matrix is filtered."""
        if per_head and self.heads:
            return f"{self.axis}:{self.heads}"

        return "whole"


@dataclass(frozen=True)
class ModelShapes:
    """A model: equal layers, and the size of its embedding (rows, cols)."""

    layers: int
    layer: tuple[Projection, ...]
    embedding: tuple[int, int]

    def matrices(self, layers: int | None = None) -> list[Projection]:
        """All hidden matrices, or those of the first `layers` layers."""
        return list(self.layer) * (self.layers if layers is None else min(layers, self.layers))

    def layers_within(self, flops: float) -> int:
        """How many layers stay below this many plain FLOPs; at least one."""
        one = sum(p.plain_flops for p in self.layer)
        return max(1, min(self.layers, int(flops // one)))


def _decoder(  # noqa: PLR0913  # the sizes of a decoder, all by name
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocabulary: int,
    gated: bool = True,
) -> ModelShapes:
    """A decoder-only transformer; gated means gate and up projections beside down."""
    q = heads * head_dim
    kv = kv_heads * head_dim
    attention = (
        Projection(q, hidden, heads),
        Projection(kv, hidden, kv_heads),
        Projection(kv, hidden, kv_heads),
        Projection(hidden, q, heads, "cols"),
    )

    ups = (Projection(intermediate, hidden),) * (2 if gated else 1)
    layer = (*attention, *ups, Projection(hidden, intermediate))

    return ModelShapes(layers, layer, (vocabulary, hidden))


SHAPES = {
    # 12 attention-sized matrices of a toy model: launch overhead shows here.
    "micro_192x576": ModelShapes(12, (Projection(576, 192, 9),), (256, 192)),
    "gpt_30m": _decoder(
        layers=8,
        hidden=512,
        intermediate=2048,
        heads=8,
        kv_heads=8,
        head_dim=64,
        vocabulary=8192,
        gated=False,
    ),
    "gpt2_124m": _decoder(
        layers=12,
        hidden=768,
        intermediate=3072,
        heads=12,
        kv_heads=12,
        head_dim=64,
        vocabulary=50257,
        gated=False,
    ),
    "smollm2_135m": _decoder(
        layers=30,
        hidden=576,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocabulary=49152,
    ),
    "qwen2_5_0_5b": _decoder(
        layers=24,
        hidden=896,
        intermediate=4864,
        heads=14,
        kv_heads=2,
        head_dim=64,
        vocabulary=151936,
    ),
    "qwen3_1_7b": _decoder(
        layers=28,
        hidden=2048,
        intermediate=6144,
        heads=16,
        kv_heads=8,
        head_dim=128,
        vocabulary=151936,
    ),
    "llama3_8b": _decoder(
        layers=32,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocabulary=128256,
    ),
}


def find_shapes(name: str) -> ModelShapes:
    """The shapes of a model by name; an unknown one is refused with the choices.

    Example:
        >>> sum(p.rows * p.cols for p in find_shapes("qwen2_5_0_5b").matrices())
        357826560
    """
    if name not in SHAPES:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(SHAPES)}")
    return SHAPES[name]
