"""Triton kernels of a decoding step: rotation with the write to the cache, and attention.

They take the place of a dozen small kernels. Import it only where Triton is installed.

Shapes: as in `decoder`; HP, DP and RP are H + 2 K, D and R padded to powers of two. Offsets into
tensors end in `_at`; a mask says which places of a padded tile exist.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

NEVER = tl.constexpr(-1e30)  # a score that no softmax notices
TILE = 16  # places of the cache that a program reads at a time; one warp each is fastest
WARPS = 1  # of a program
LARGE_HEAD = 128  # places of a head; beyond, one warp has too few registers
LARGE_WARPS = 4
LEAST = 16  # sides of a product on tensor cores are at least this long


@dataclass(frozen=True)
class Prefix:
    """The prompts at the beginning of the cache, which rows share."""

    size: int  # P
    rows: Tensor  # (B,), the row of the cache that holds a row's prompt
    starts: Tensor  # (B,), the place where a row's prompt begins


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the heads before they are rotated, as in Qwen3."""

    weights: Tensor | None  # (2 D,): of queries and of keys
    eps: float


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turn_kernel(
    both, query, cache, place, cos, sin, norms, eps, num_rows, length, H: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Rotate the queries and keys of a row; keys and values go to the cache.

    both (B, H + 2 K, D) is read; query (B, H, D) and cache (2, B, L, K, D) are written. Tiles are
    (HP, HALF): heads by the first or the second half of their places.
    """
    b = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)
    d = tl.arange(0, HALF)
    inside_half = (d < D // 2)[None, :]
    inside = (head < H + 2 * K)[:, None] & inside_half

    # x and y are the halves of each head.
    both_at = both + b * (H + 2 * K) * D + head[:, None] * D + d[None, :]
    x = _load(both_at, inside)
    y = _load(both_at + D // 2, inside)

    # Queries and keys are normed and turned, values are not.
    turns = (head < H + K)[:, None]
    if NORMS:
        mean_square = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D
        scale = tl.rsqrt(mean_square + eps)[:, None]
        is_key = (head >= H).to(tl.int32)
        norm_at = norms + is_key[:, None] * D + d[None, :]
        x *= tl.where(turns, scale * _load(norm_at, inside & turns), 1.0)
        y *= tl.where(turns, scale * _load(norm_at + D // 2, inside & turns), 1.0)

    # The sines are signed: the first half's are negative.
    angle_at = (b * D + d)[None, :]
    turned_x = x * _load(cos + angle_at, inside_half)
    turned_x += y * _load(sin + angle_at, inside_half)
    turned_y = y * _load(cos + angle_at + D // 2, inside_half)
    turned_y += x * _load(sin + angle_at + D // 2, inside_half)

    dtype = query.dtype.element_ty
    first = tl.where(turns, turned_x, x).to(dtype)
    second = tl.where(turns, turned_y, y).to(dtype)

    is_query = inside & (head < H)[:, None]
    query_at = query + (b * H + head)[:, None] * D + d[None, :]
    tl.store(query_at, first, mask=is_query)
    tl.store(query_at + D // 2, second, mask=is_query)

    # The cache has the keys of all rows, then their values.
    is_kept = inside & (head >= H)[:, None]
    is_value = (head >= H + K).to(tl.int64)
    kept_head = head - H - is_value * K
    row = (is_value * num_rows + b) * length + tl.load(place)
    cache_at = cache + (row * K + kept_head)[:, None] * D + d[None, :]
    tl.store(cache_at, first, mask=is_kept)
    tl.store(cache_at + D // 2, second, mask=is_kept)


@triton.jit
def _attend_kernel(
    query, keys, values, prompt_size, prompt_rows, starts, place, out, length, window, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The R query heads of one key head of one row, over its part of the cache: from the beginning
    of its prompt or its window to the token written last.

    A running softmax: `highest`, `total` and `mixed` (RP,), (RP,), (RP, DP) hold the largest score,
    the sum of the weights and the weighted values up to here.
    """
    b = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    R: tl.constexpr = H // K
    r = tl.arange(0, RP)
    d = tl.arange(0, DP)
    s = tl.arange(0, TILE)
    inside_head = (d < D)[None, :]

    query_mask = (r < R)[:, None] & inside_head
    query_at = (b * H + k * R + r)[:, None] * D + d[None, :]
    q = tl.load(query + query_at, mask=query_mask, other=0.0)

    prompt_row = tl.load(prompt_rows + b)
    end = tl.load(place) + 1
    first = tl.maximum(tl.load(starts + b), end - window)
    highest = tl.full((RP,), NEVER, tl.float32)
    total = tl.zeros((RP,), tl.float32)
    mixed = tl.zeros((RP, DP), tl.float32)

    for start in range(first, end, TILE):
        at = start + s  # places of the cache
        is_written = at < end
        inside = is_written[:, None] & inside_head

        row = tl.where(at < prompt_size, prompt_row, b)
        key_at = ((row * length + at) * K + k)[:, None] * D + d[None, :]
        key = tl.load(keys + key_at, mask=inside, other=0.0)
        value = tl.load(values + key_at, mask=inside, other=0.0)

        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(is_written[None, :], score, NEVER)

        higher = tl.maximum(highest, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weight, 1)
        weighted = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        mixed = mixed * fade[:, None] + weighted
        highest = higher

    result = mixed / total[:, None]
    tl.store(out + query_at, result.to(out.dtype.element_ty), mask=query_mask)


def attend(
    both: Tensor,
    cache: Tensor,
    prefix: Prefix,
    place: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: HeadNorms,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention of one new token for each of the first B' rows, (B', 1, H D).

    Args:
        both: its queries, keys and values (B', 1, (H + 2 K) D).
        cache: (2, B, L, K, D), gets the keys and values at `place`.
        prefix: the first places of the cache, which are those of each row's prompt.
        place: (1,).
        angles: cosines and signed sines (B', 1, 1, D), as in `FusedWeights.angles`.
        norms: of the heads.
        scale: of the scores.
        window: places that the token sees, its own included; None: all.
    """
    _, B, L, K, D = cache.shape
    size = len(both)  # B'
    H = both.shape[-1] // D - 2 * K
    HP = triton.next_power_of_2(H + 2 * K)
    DP = triton.next_power_of_2(max(D, LEAST))
    RP = triton.next_power_of_2(max(H // K, LEAST))

    query = both.new_empty(size, 1, H * D)
    out = both.new_empty(size, 1, H * D)
    has_norms = norms.weights is not None
    norm_weights = norms.weights if has_norms else both  # a pointer that is not read

    _turn_kernel[(size,)](
        both,
        query,
        cache,
        place,
        *angles,
        norm_weights,
        norms.eps,
        B,
        L,
        H,
        K,
        D,
        HP,
        DP // 2,
        has_norms,
    )

    base_two = scale / math.log(2)  # scores for exp2
    warps = WARPS if DP <= LARGE_HEAD else LARGE_WARPS
    _attend_kernel[(size, K)](
        query,
        *cache,
        prefix.size,
        prefix.rows,
        prefix.starts,
        place,
        out,
        L,
        window or L,
        base_two,
        H,
        K,
        D,
        DP,
        RP,
        TILE,
        num_warps=warps,
    )

    return out
