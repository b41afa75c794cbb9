"""Ragged rows: the tokens of a batch one after another, without padding, each prompt once.

First come all prompts without their last token, then a segment for each completion: the prompt's
last token and the completion without its own last token, so that every token of a segment predicts
a scored one. A segment attends to its prompt and to itself. Its keys are gathered, which is cheap:
they are few where query heads share them.

Shapes: B completions of up to T tokens, U prompts of up to P; N tokens in U + B sequences, the last
M of them in segments; H query heads, K key heads of D places; S gathered keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mesotron.rlvr.passes.packing import find_groups


@dataclass(frozen=True)
class Sight:
    """What each sequence attends to: some keys before it, and its own tokens up to each."""

    queries: Tensor  # (U + B + 1,) int32: where each sequence begins
    keys: Tensor  # (U + B + 1,) int32: the same in the gathered keys
    index: Tensor  # (S,): the token of each gathered key
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class Ragged:
    ids: Tensor  # (N,)
    positions: Tensor  # (N,): as if each completion stood alone
    labels: Tensor  # (M,): what the tokens of the segments predict
    cells: Tensor  # (M,): their place in (B, T)
    shape: tuple[int, int]  # B, T
    sight: Sight

    @property
    def lead(self) -> int:
        """Tokens of prompts, N - M."""
        return len(self.ids) - len(self.labels)

    def unpack(self, values: Tensor) -> Tensor:
        """(M,) values of scored tokens as (B, T), 0 elsewhere."""
        B, T = self.shape
        return values.new_zeros(B * T).index_copy(0, self.cells, values).view(B, T)


def lay_out(ids: Tensor, mask: Tensor, length: int) -> Ragged | None:
    """Lay the tokens of a batch in one line; None if a mask has holes or a prompt has no token.

    ids and mask are (B, P + T), prompts padded on the left and completions on the right; `length`
    is T.

    Example:
        >>> ids = torch.tensor([[7, 8, 1, 2], [7, 8, 3, 0]])
        >>> ragged = lay_out(ids, (ids > 0).long(), length=2)
        >>> ragged.ids.tolist(), ragged.labels.tolist()
        ([7, 8, 1, 8], [1, 2, 3])
    """
    B, width = ids.shape
    P = width - length
    device = ids.device
    seen = mask != 0
    groups = find_groups(ids[:, :P].masked_fill(~seen[:, :P], -1))
    U = len(groups.first)
    kind = groups.slots // groups.largest  # (B,): the prompt of each completion

    # Tokens in front of the first segment, (U,), and of each segment, (B,).
    before = seen[groups.first, :P].sum(1) - 1
    own = seen[:, P:].sum(1)

    # A completion without a token needs no prompt.
    shared = before[kind].masked_fill(own == 0, 0)

    place = torch.arange(width, device=device)
    expected = (place >= P - 1 - before[kind, None]) & (place < P + own[:, None])
    whole = (expected == seen).all() & (before >= 0).all()

    sizes = [before.sum(), own.sum(), shared.sum(), before.max(), own.max(), (shared + own).max()]
    lead, M, copied, *longest, is_whole = torch.stack([*sizes, whole]).tolist()
    if not is_whole or M == 0:
        return None

    N = lead + M
    row = torch.arange(B, device=device)
    lengths = torch.cat([before, own])
    first = torch.cat([groups.first * width + P - 1 - before, row * width + P - 1])
    tokens = runs(first, lengths, N)

    begin = lengths.cumsum(0) - lengths
    front = begin[:U][kind]
    key_begin = torch.cat([begin[:U], torch.stack([front, begin[U:]], 1).flatten()])
    key_lengths = torch.cat([before, torch.stack([shared, own], 1).flatten()])

    sight = Sight(
        queries=bounds(lengths),
        keys=bounds(torch.cat([before, shared + own])),
        index=runs(key_begin, key_lengths, N + copied),
        longest_query=max(longest[:2]),
        longest_key=max(longest[0], longest[2]),
    )

    flat = ids.flatten()
    return Ragged(
        ids=flat[tokens],
        positions=runs(torch.cat([torch.zeros_like(before), before[kind]]), lengths, N),
        labels=flat[tokens[lead:] + 1],
        cells=runs(row * length, own, M),
        shape=(B, length),
        sight=sight,
    )


def runs(first: Tensor, lengths: Tensor, total: int) -> Tensor:
    """(total,): for each run as many integers as its length, from its first one on."""
    shift = first - (lengths.cumsum(0) - lengths)
    steps = torch.arange(total, device=first.device)
    return steps + shift.repeat_interleave(lengths, output_size=total)


def bounds(lengths: Tensor) -> Tensor:
    """(n + 1,): where each of n sequences begins, and where the last one ends."""
    ends = lengths.cumsum(0, dtype=torch.int32)
    return torch.cat([ends.new_zeros(1), ends])


class FlashAttention(torch.autograd.Function):
    """PyTorch's flash attention over sequences of several lengths. Its causal mask is aligned with
    the last token of queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sight: Sight, scale: float
    ) -> Tensor:
        out, lse, *states = torch.ops.aten._flash_attention_forward(
            query,
            key[sight.index],
            value[sight.index],
            sight.queries,
            sight.keys,
            sight.longest_query,
            sight.longest_key,
            0.0,  # dropout
            True,  # causal
            False,
            scale=scale,
        )

        ctx.save_for_backward(query, key, value, out, lse, *states[:2])
        ctx.sight = sight
        ctx.scale = scale

        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *states = ctx.saved_tensors
        sight = ctx.sight

        grad_query, *gathered = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            key[sight.index],
            value[sight.index],
            out,
            lse,
            sight.queries,
            sight.keys,
            sight.longest_query,
            sight.longest_key,
            0.0,
            True,
            *states,
            scale=ctx.scale,
        )

        grads = []
        for one in gathered:
            total = torch.zeros(key.shape, dtype=torch.float32, device=key.device)
            total.index_add_(0, sight.index, one.float())
            grads.append(total.to(key.dtype))

        return grad_query, *grads, None, None


def flash_attend(query: Tensor, key: Tensor, value: Tensor, sight: Sight, scale: float) -> Tensor:
    """(N, H, D) of queries (N, H, D), keys and values (N, K, D)."""
    return FlashAttention.apply(query, key, value, sight, scale)  # pyright: ignore


def plain_attend(query: Tensor, key: Tensor, value: Tensor, sight: Sight, scale: float) -> Tensor:
    """The same, one sequence after another."""
    query_lengths = sight.queries.diff().tolist()
    key_lengths = sight.keys.diff().tolist()
    parts = zip(
        query.split(query_lengths),
        key[sight.index].split(key_lengths),
        value[sight.index].split(key_lengths),
        strict=True,
    )

    mixed = []
    for q, k, v in parts:
        seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        seen = seen.tril(len(k) - len(q))
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        mixed.append(out[0].transpose(0, 1))

    return torch.cat(mixed)
