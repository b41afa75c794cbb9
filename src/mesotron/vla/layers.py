"""Transformer layers of the policy: pre-norm, attention by PyTorch's SDPA, ReLU between matrices.

Nothing here is about robots. Every weight is a plain matrix with a name that routing knows.

Legend: B batch, T tokens, S tokens attended to, D width, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def hide(mask: Tensor) -> Tensor:
    """A bias that nobody looks past: 0 where `mask` is True, minus infinity where it is not."""
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)


class Attention(nn.Module):
    """Multi-head attention, to itself or to other tokens.

    Args:
        width: D.
        num_heads: H; must divide D.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"{num_heads} heads do not divide a width of {width}")
        self.num_heads = num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, X: Tensor, context: Tensor, bias: Tensor | None = None) -> Tensor:
        """X [B, T, D] looks at `context` [B, S, D]; `bias` [B, S] is added to the scores."""
        B, T, D = X.shape
        heads = (B, -1, self.num_heads, D // self.num_heads)
        Q = self.q(X).view(heads).transpose(1, 2)
        K, V = (part.reshape(heads).transpose(1, 2) for part in self.kv(context).chunk(2, dim=-1))
        added = None if bias is None else bias[:, None, None, :].to(Q.dtype)
        found = scaled_dot_product_attention(Q, K, V, attn_mask=added)
        return self.o(found.transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    """Two matrices and a ReLU; an exact GELU is many times slower on CPUs without vector math."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, X: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down(self.up(X).relu())


class Layer(nn.Module):
    """Attention to itself, then to other tokens if `cross`, then an MLP, each on a residual.

    Args:
        width: D.
        num_heads: H.
        mlp: hidden width of the MLP over D.
        cross: whether it also looks at a context.
    """

    def __init__(self, width: int, num_heads: int, mlp: int = 4, cross: bool = False) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm_cross = nn.LayerNorm(width) if cross else None
        self.cross = Attention(width, num_heads) if cross else None
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp * width)

    def forward(
        self,
        X: Tensor,
        bias: Tensor | None = None,
        context: Tensor | None = None,
        context_bias: Tensor | None = None,
    ) -> Tensor:
        """X [B, T, D] -> [B, T, D]; `bias` is of X's own tokens, `context_bias` of others."""
        Y = self.norm_self(X)
        X = X + self.attention(Y, Y, bias)
        if self.cross is not None and self.norm_cross is not None:
            assert context is not None
            X = X + self.cross(self.norm_cross(X), context, context_bias)
        return X + self.mlp(self.norm_mlp(X))


class Stack(nn.Module):
    """Layers one after another, and a norm at the end."""

    def __init__(
        self, width: int, num_heads: int, mlp: int, num_layers: int, cross: bool = False
    ) -> None:
        super().__init__()
        layers = [Layer(width, num_heads, mlp, cross) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)

    def forward(
        self,
        X: Tensor,
        bias: Tensor | None = None,
        context: Tensor | None = None,
        context_bias: Tensor | None = None,
    ) -> Tensor:
        """As `Layer.forward`."""
        for layer in self.layers:
            X = layer(X, bias, context, context_bias)
        return self.norm(X)
