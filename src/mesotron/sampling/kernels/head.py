"""Triton kernels of the head and the draw: a token per row, without logits in memory.

One kernel multiplies hidden states with tiles of the head and keeps of each tile only its largest
score and the sum of its exponentials. A second one finds the tile in which a row's draw falls,
computes the scores of that tile again, and finds the token. So the token is the first whose
cumulative probability exceeds the draw, as in `decode.at_draw`, which is the plain form.

Shapes: B' rows, E width, V vocabulary, T tiles of the vocabulary; TP is T padded to a power of two.
Scores are logits in units of the temperature times log 2, for exp2.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NEVER = tl.constexpr(-1e30)  # a score that no softmax notices
# A draw below 1, times this and a sum of weights, is below the sum whatever the rounding.
BELOW_ONE = tl.constexpr(1 - 2.0**-22)
TILE_V = 128
TILE_BYTES = 128  # of a tile's rows: an operand in bfloat16 has 64 features
MAX_TILE_B = 128
LEAST_TILE_B = 16  # sides of a product on tensor cores are at least this long


@dataclass(frozen=True)
class Draws:
    """The numbers in [0, 1) that decide a batch's tokens, and where the next ones are."""

    numbers: Tensor  # (B, N)
    slots: Tensor  # (B',), the row of `numbers` of each row
    count: Tensor  # (1,), the column


@triton.jit
def _mass_kernel(
    x, head, highest, total, num_rows, V, E, T, scale,
    TILE_V: tl.constexpr, TILE_B: tl.constexpr, TILE_E: tl.constexpr,
):  # fmt: skip
    """highest, total (B', T): of the scores of x (B', E) by a tile of head (V, E).

    A product is (TILE_V, TILE_B). Neighbouring programs share a tile of the head.
    """
    b = tl.program_id(0) * TILE_B + tl.arange(0, TILE_B)
    tile = tl.program_id(1)
    v = tl.arange(0, TILE_V)
    head += tile.to(tl.int64) * TILE_V * E
    is_row = b < num_rows
    is_token = v < V - tile * TILE_V

    score = tl.zeros((TILE_V, TILE_B), tl.float32)
    for start in range(0, E, TILE_E):
        e = start + tl.arange(0, TILE_E)
        inside = e < E
        weight_at = head + v[:, None] * E + e[None, :]
        weight = tl.load(weight_at, mask=is_token[:, None] & inside[None, :], other=0.0)
        state_at = x + b[None, :] * E + e[:, None]
        state = tl.load(state_at, mask=inside[:, None] & is_row[None, :], other=0.0)
        score = tl.dot(weight, state, score, input_precision="ieee")

    score = tl.where(is_token[:, None], score * scale, NEVER)
    top = tl.max(score, 0)
    mass = tl.sum(tl.exp2(score - top[None, :]), 0)

    tl.store(highest + b * T + tile, top, mask=is_row)
    tl.store(total + b * T + tile, mass, mask=is_row)


@triton.jit
def _first_above(mass, target, TP: tl.constexpr):
    """The first place whose cumulative mass exceeds the target, else that of the largest mass."""
    place = tl.arange(0, TP)
    is_above = (tl.cumsum(mass, 0) > target) & (mass > 0)
    first = tl.min(tl.where(is_above, place, TP), 0)
    return tl.where(first < TP, first, tl.argmax(mass, 0))


@triton.jit
def _token_kernel(
    x, head, highest, total, draws, slots, count, tokens, logprobs, N, V, E, T, scale,
    TP: tl.constexpr, TILE_V: tl.constexpr, TILE_E: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """tokens, logprobs (B',): of each row the token at draws[slot, count], and its probability."""
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TP)
    v = tl.arange(0, TILE_V)

    # The tile.
    tops = tl.load(highest + b * T + t, mask=t < T, other=NEVER)
    mass = tl.load(total + b * T + t, mask=t < T, other=0.0)
    top = tl.max(tops, 0)
    mass *= tl.exp2(tops - top)
    whole = tl.sum(mass, 0)

    share = 0.0  # of the tile's mass that lies before the draw
    if GREEDY:
        tile = tl.argmax(tops, 0)
    else:
        draw = tl.load(draws + tl.load(slots + b) * N + tl.load(count)) * BELOW_ONE
        target = draw * whole
        tile = _first_above(mass, target, TP)
        of_tile = tl.sum(tl.where(t == tile, mass, 0.0), 0)
        before = tl.sum(tl.where(t < tile, mass, 0.0), 0)
        share = tl.minimum(tl.maximum((target - before) / of_tile, 0.0), BELOW_ONE)

    tile = tl.minimum(tile, T - 1)
    head += tile.to(tl.int64) * TILE_V * E
    is_token = v < V - tile * TILE_V

    # Its scores.
    score = tl.zeros((TILE_V,), tl.float32)
    for start in range(0, E, TILE_E):
        e = start + tl.arange(0, TILE_E)
        inside = e < E
        weight_at = head + v[:, None] * E + e[None, :]
        weight = tl.load(weight_at, mask=is_token[:, None] & inside[None, :], other=0.0)
        state = tl.load(x + b * E + e, mask=inside, other=0.0)
        score += tl.sum(weight.to(tl.float32) * state.to(tl.float32)[None, :], 1)

    score = tl.where(is_token, score * scale, NEVER)

    # The token.
    if GREEDY:
        place = tl.argmax(score, 0)
    else:
        weights = tl.exp2(score - tl.max(score, 0))
        place = _first_above(weights, share * tl.sum(weights, 0), TILE_V)

    place = tl.minimum(place, V - 1 - tile * TILE_V)
    chosen = tl.sum(tl.where(v == place, score, 0.0), 0)
    tl.store(tokens + b, (tile * TILE_V + place).to(tl.int64))
    tl.store(logprobs + b, (chosen - top - tl.log2(whole)) * 0.6931471805599453)


def tile_e_of(element_size: int) -> int:
    return TILE_BYTES // element_size


def warps_of(tile_b: int) -> int:
    return 8 if tile_b > 64 else 4


def draw(x: Tensor, head: Tensor, temperature: float, draws: Draws) -> tuple[Tensor, Tensor]:
    """Token ids and their log-probabilities (B',) of hidden states x (B', E), head (V, E).

    Args:
        x: after the last norm.
        temperature: 0 takes the most likely token, and probabilities are those at 1.
    """
    size, E = x.shape
    V = len(head)
    T = triton.cdiv(V, TILE_V)
    scale = 1 / ((temperature or 1.0) * math.log(2))

    tile_b = min(MAX_TILE_B, max(LEAST_TILE_B, triton.next_power_of_2(size)))
    highest = x.new_empty(size, T, dtype=torch.float32)
    total = torch.empty_like(highest)
    grid = (triton.cdiv(size, tile_b), T)
    tile_e = tile_e_of(x.element_size())
    _mass_kernel[grid](
        x,
        head,
        highest,
        total,
        size,
        V,
        E,
        T,
        scale,
        TILE_V,
        tile_b,
        tile_e,
        num_warps=warps_of(tile_b),
    )

    tokens = x.new_empty(size, dtype=torch.long)
    logprobs = x.new_empty(size, dtype=torch.float32)
    _token_kernel[(size,)](
        x,
        head,
        highest,
        total,
        draws.numbers,
        draws.slots,
        draws.count,
        tokens,
        logprobs,
        draws.numbers.shape[1],
        V,
        E,
        T,
        scale,
        triton.next_power_of_2(T),
        TILE_V,
        tile_e,
        temperature == 0,
        num_warps=8,
    )

    return tokens, logprobs
