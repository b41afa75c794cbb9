"""Triton kernels of a decoding step: rotation with the write to the cache, and attention.

They take the place of a dozen small kernels. Import it only where Triton is installed.

Shapes: as in `decoder`; HP, DP and RP are H + 2 K, D and R padded to powers of two.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

NEVER = tl.constexpr(-1e30)  # a score that no softmax notices
TILE = 16  # places of the cache that a program reads at a time; one warp each is fastest


@triton.jit
def _load(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turn_kernel(
    both, query, cache, place, cos, sin, norms, eps, num_rows, length, H: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Rotate the queries and keys of a row; keys and values go to the cache."""
    b = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HP)
    d = tl.arange(0, HALF)
    inside = (head < H + 2 * K)[:, None] & (d < D // 2)[None, :]
    at = both + b * (H + 2 * K) * D + head[:, None] * D + d[None, :]
    x = _load(at, inside)
    y = _load(at + D // 2, inside)

    turns = (head < H + K)[:, None]
    if NORMS:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        own = norms + (head >= H).to(tl.int32)[:, None] * D + d[None, :]
        x *= tl.where(turns, scale * _load(own, inside & turns), 1.0)
        y *= tl.where(turns, scale * _load(own + D // 2, inside & turns), 1.0)

    angle = (b * D + d)[None, :]
    half = (d < D // 2)[None, :]
    first = x * _load(cos + angle, half) + y * _load(sin + angle, half)
    second = y * _load(cos + angle + D // 2, half) + x * _load(sin + angle + D // 2, half)
    dtype = query.dtype.element_ty
    first = tl.where(turns, first, x).to(dtype)
    second = tl.where(turns, second, y).to(dtype)
    is_query = (head < H)[:, None]
    asked = query + (b * H + head)[:, None] * D + d[None, :]
    tl.store(asked, first, mask=inside & is_query)
    tl.store(asked + D // 2, second, mask=inside & is_query)
    is_value = (head >= H + K).to(tl.int64)
    row = (is_value * num_rows + b) * length + tl.load(place)
    kept = cache + (row * K + head - H - is_value * K)[:, None] * D + d[None, :]
    tl.store(kept, first, mask=inside & (head >= H)[:, None])
    tl.store(kept + D // 2, second, mask=inside & (head >= H)[:, None])


@triton.jit
def _attend_kernel(
    query, keys, values, prompt_size, prompt_rows, bias, place, out, length, scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The R query heads of one key head of one row, over the written part of the cache."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1)
    R: tl.constexpr = H // K
    r = tl.arange(0, RP)
    d = tl.arange(0, DP)
    s = tl.arange(0, TILE)
    at = (b * H + k * R + r)[:, None] * D + d[None, :]
    known = (r < R)[:, None] & (d < D)[None, :]
    q = tl.load(query + at, mask=known, other=0.0)
    prompt = tl.load(prompt_rows + b)
    end = tl.load(place) + 1
    most = tl.full((RP,), NEVER, tl.float32)
    total = tl.zeros((RP,), tl.float32)

    mixed = tl.zeros((RP, DP), tl.float32)
    for start in range(0, end, TILE):
        there = start + s < end
        row = tl.where(start + s < prompt_size, prompt, b)
        offset = ((row * length + start + s) * K + k)[:, None] * D + d[None, :]
        inside = there[:, None] & (d < D)[None, :]
        key = tl.load(keys + offset, mask=inside, other=0.0)
        value = tl.load(values + offset, mask=inside, other=0.0)
        seen = tl.load(bias + b * length + start + s, mask=there, other=-1.0).to(tl.float32) == 0
        score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, NEVER)
        higher = tl.maximum(most, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(most - higher)
        total = total * fade + tl.sum(p, 1)
        weighed = tl.dot(p.to(value.dtype), value, input_precision="ieee")
        mixed = mixed * fade[:, None] + weighed
        most = higher

    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=known)


def attend(
    both: Tensor, cache: Tensor, prompt_size: int, prompt_rows: Tensor, place: Tensor,
    bias: Tensor, angles: tuple[Tensor, Tensor], norms: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Attention of one new token per row, (B, 1, H D), from its queries, keys and values `both`
    (B, 1, (H + 2 K) D); the latter two are written to `cache` (2, B, L, K, D) at `place` (1,). The
    first `prompt_size` places of row b are those of row prompt_rows[b] (B,). bias (B, 1, 1, L) is 0
    where a row looks; angles (B, 1, 1, D) and norms (2, D) as in `project`."""
    _, B, L, K, D = cache.shape
    H = both.shape[-1] // D - 2 * K
    query, out = (both.new_empty(B, 1, H * D) for _ in range(2))

    # A product on tensor cores has sides of at least 16.
    HP, DP, RP = (triton.next_power_of_2(n) for n in (H + 2 * K, max(D, 16), max(H // K, 16)))
    _turn_kernel[(B,)](
        both, query, cache, place, *angles, both if norms is None else norms, eps, B, L,
        H, K, D, HP, DP // 2, norms is not None,
    )  # fmt: skip

    _attend_kernel[(B, K)](
        query, *cache, prompt_size, prompt_rows, bias, place, out, L, D**-0.5 / math.log(2),
        H, K, D, DP, RP, TILE, num_warps=1,
    )  # fmt: skip
    return out
