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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Integers = npt.NDArray[np.integer[Any]]


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
    # On the host: many small steps, for which a GPU would wait.
    host_ids, seen = torch.stack([ids, mask.to(ids.dtype)]).cpu().numpy()
    seen = seen != 0
    B, width = host_ids.shape
    P = width - length
    first, kind = find_prompts(np.where(seen[:, :P], host_ids[:, :P], -1))
    U = len(first)

    # Tokens in front of the first segment, (U,), and of each segment, (B,).
    before = seen[first, :P].sum(1) - 1
    own = seen[:, P:].sum(1)

    # A completion without a token needs no prompt.
    shared = np.where(own > 0, before[kind], 0)

    place = np.arange(width)
    expected = (place >= P - 1 - before[kind, None]) & (place < P + own[:, None])
    if (expected != seen).any() or before.min() < 0 or not own.any():
        return None

    lead = before.sum()
    row = np.arange(B)
    lengths = np.concatenate([before, own])
    start = np.concatenate([first * width + P - 1 - before, row * width + P - 1])
    tokens = runs(start, lengths)
    flat = host_ids.ravel()

    begin = lengths.cumsum() - lengths
    key_start = np.stack([begin[:U][kind], begin[U:]], 1).ravel()
    key_start = np.concatenate([begin[:U], key_start])
    key_lengths = np.concatenate([before, np.stack([shared, own], 1).ravel()])
    seen_lengths = np.concatenate([before, shared + own])

    on_device = moved(
        flat[tokens],
        runs(np.concatenate([np.zeros_like(before), before[kind]]), lengths),
        flat[tokens[lead:] + 1],
        runs(row * length, own),
        bounds(lengths),
        bounds(seen_lengths),
        runs(key_start, key_lengths),
        device=ids.device,
    )
    queries, keys = (x.to(torch.int32) for x in on_device[4:6])
    sight = Sight(queries, keys, on_device[6], int(lengths.max()), int(seen_lengths.max()))

    return Ragged(*on_device[:4], shape=(B, length), sight=sight)


def find_prompts(rows: Integers) -> tuple[Integers, Integers]:
    """The first of each kind of equal rows (B, P), (U,), and the kind of each row, (B,)."""
    kinds: dict[bytes, int] = {}
    kind = []
    first = []
    for number, row in enumerate(rows):
        key = row.tobytes()
        if key not in kinds:
            kinds[key] = len(kinds)
            first.append(number)

        kind.append(kinds[key])

    return np.array(first), np.array(kind)


def runs(first: Integers, lengths: Integers) -> Integers:
    """For each run as many integers as its length, from its first one on."""
    shift = first - (lengths.cumsum() - lengths)
    return np.repeat(shift, lengths) + np.arange(lengths.sum())


def bounds(lengths: Integers) -> Integers:
    """(n + 1,): where each of n sequences begins, and where the last one ends."""
    return np.concatenate([[0], lengths.cumsum()])


def moved(*arrays: Integers, device: torch.device) -> tuple[Tensor, ...]:
    """Arrays as tensors of a device, in one copy."""
    together = torch.from_numpy(np.concatenate(arrays)).to(device)
    return together.split([len(array) for array in arrays])


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
