"""Matrix products whose result is known to be symmetric, at half the arithmetic: one Triton kernel.

Computes alpha A B^T + beta C + diag I for the tiles on and below the diagonal only, and writes each
twice, as it is and transposed; `pingpong` does the same for many large blocks. `gram` is A = B = X;
`symmetric_product` is A = S, B = T with S and T symmetric and commuting, so that S T^T = S T is
symmetric too. Newton-Schulz is these two and a plain product.

Legend: B blocks of m x n, m <= n. A tile of the result is TILE_M x TILE_N, TILE_N = RATIO TILE_M.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mesotron.optim.triton import capability


@triton.jit
def _lower_tile(index, tile_rows, RATIO: tl.constexpr):
    """Turn a running number into (i, j) among the tiles that touch the lower triangle, by columns.
    Column j holds the tiles i >= RATIO j, so the first j columns hold j tile_rows - RATIO j (j - 1)
    / 2 of them. The square root inverts that; the two corrections undo its rounding. Neighbours in
    this order share a panel of B and run together, so that it comes from L2."""
    height = tile_rows + 0.5 * RATIO
    j = ((height - tl.sqrt(height * height - 2.0 * RATIO * index)) / RATIO).to(tl.int32)
    j = tl.where(j * tile_rows - RATIO * (j * (j - 1) // 2) > index, j - 1, j)
    j = tl.where((j + 1) * tile_rows - RATIO * ((j + 1) * j // 2) <= index, j + 1, j)
    before = j * tile_rows - RATIO * (j * (j - 1) // 2)

    return index - before + RATIO * j, j


@triton.jit
def _load_panel(
    source,
    block,
    row,
    k,
    m,
    n,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows [row, row + ROWS) and columns [k, k + DEPTH) of one block of a [B m, n] operand. Columns
    past n are zero; rows past m are arbitrary and only reach results that are never stored."""
    if TMA:
        panel = source.load([block * m + row, k])
    else:
        rows = tl.minimum(row + tl.arange(0, ROWS), m - 1)
        columns = k + tl.arange(0, DEPTH)
        at = source + (block.to(tl.int64) * m + rows)[:, None] * n + columns[None, :]
        panel = tl.load(at, mask=(columns < n)[None, :], other=0.0)

    return panel


@triton.jit
def _factor(value, block, TABLE: tl.constexpr):
    """A factor that is one number, or the block's entry of a table."""
    if TABLE:
        factor = tl.load(value + block)
    else:
        factor = value

    return factor


@triton.jit(do_not_specialize=["num_blocks"])
def _symmetric_kernel(
    A,
    B,
    C,
    out,
    squares,
    alpha,
    beta,
    diag,
    num_blocks,
    m,
    n,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    TMA: tl.constexpr,
    ALPHAS: tl.constexpr,
    BETAS: tl.constexpr,
    DIAGS: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    RATIO: tl.constexpr = TILE_N // TILE_M

    # A small tile can afford a transpose in float32, and needs it: with the squares on its diagonal
    # left as they came (see below), the noise cutoff at 64 x 896 was off by 2e-2 instead of 2e-3.
    EVEN: tl.constexpr = RATIO == 1 and not PERSISTENT
    tile_rows = tl.cdiv(m, TILE_M)
    tile_columns = tl.cdiv(m, TILE_N)
    tiles = tile_columns * tile_rows - RATIO * (tile_columns * (tile_columns - 1) // 2)

    steps = tl.cdiv(n, TILE_K)
    # A persistent program flattens both loops: it fetches the next tile while it stores this one.
    for task in tl.range(
        tl.program_id(0), num_blocks * tiles, tl.num_programs(0), flatten=PERSISTENT
    ):
        block = task // tiles
        i, j = _lower_tile(task % tiles, tile_rows, RATIO)

        sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for step in range(steps):
            a = _load_panel(
                A,
                block,
                i * TILE_M,
                step * TILE_K,
                m,
                n,
                TILE_M,
                TILE_K,
                TMA,
            )
            b = _load_panel(
                B,
                block,
                j * TILE_N,
                step * TILE_K,
                m,
                n,
                TILE_N,
                TILE_K,
                TMA,
            )
            sums = tl.dot(a, b.T, sums)

        if EVEN:
            sums = tl.where(i == j, 0.5 * (sums + sums.T), sums)

        rows = i * TILE_M + tl.arange(0, TILE_M)
        columns = j * TILE_N + tl.arange(0, TILE_N)
        base = block.to(tl.int64) * m * m

        # Rounding leaves S T a little unsymmetric, and each step would amplify that part, so the
        # lower triangle is stored twice, as it stands and mirrored. The cut goes around squares of
        # 8 x 8 on the diagonal, not through them: stores stay 16 bytes wide and no large tile needs
        # a transpose in float32. Every element has one writer.
        row_group = rows // 8
        column_group = columns // 8
        keep = (column_group[None, :] <= row_group[:, None]) & (rows < m)[:, None]
        keep &= (columns < m)[None, :]
        mirror = (column_group[:, None] < row_group[None, :]) & (rows < m)[None, :]
        sums *= _factor(alpha, block, ALPHAS)

        if C is not None:
            c = tl.load(C + base + rows[:, None] * m + columns[None, :], mask=keep, other=0.0)
            sums += _factor(beta, block, BETAS) * c.to(tl.float32)

        on_diagonal = rows[:, None] == columns[None, :]
        sums += tl.where(on_diagonal, _factor(diag, block, DIAGS), 0.0)

        if squares is not None:
            # What is also stored mirrored counts twice.
            twice = (column_group[None, :] < row_group[:, None]) & (rows < m)[:, None]
            weight = tl.where(keep, 1.0, 0.0) + tl.where(twice, 1.0, 0.0)
            tl.store(squares + task, tl.sum(weight * sums * sums))

        result = sums.to(out.dtype.element_ty)
        tl.store(out + base + rows[:, None] * m + columns[None, :], result, mask=keep)
        tl.store(out + base + columns[:, None] * m + rows[None, :], result.T, mask=mirror)


@dataclass(frozen=True)
class TileConfig:
    """Tiling: powers of two, tile_n = tile_m or 2 tile_m. `num_stages` panels are in flight;
    `persistent` programs per multiprocessor share all tiles (0: one program per tile)."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    persistent: int = 0

    def num_tiles(self, m: int) -> int:
        """Tiles that touch the lower triangle of an m x m result."""
        rows = triton.cdiv(m, self.tile_m)
        columns = triton.cdiv(m, self.tile_n)
        return columns * rows - self.tile_n // self.tile_m * (columns * (columns - 1) // 2)


# Measured on an H200 in fp16 (benchmarks/optim_step): two programs on a multiprocessor, which hide
# each other's stores, won or tied at every size that fills the chip; small tiles fill it otherwise.
_SMALL = TileConfig(64, 64, 64, num_warps=4, num_stages=4)
_LARGE = TileConfig(
    128,
    128,
    64,
    num_warps=4,
    num_stages=3,
    persistent=2,
)
# `pingpong` does the same as _LARGE and is quicker. Gluon, in which it is written, is experimental:
# its names change with Triton's minor versions.
_PINGPONG_WITH = "3.6."


def _choose_tiles(num_blocks: int, m: int, device: torch.device) -> TileConfig:
    fills = num_blocks * _LARGE.num_tiles(m) >= _num_processors(device)
    return _LARGE if m > 64 and fills else _SMALL


def _takes_pingpong(A: Tensor, B: Tensor, C: Tensor | None, out: Tensor) -> bool:
    num_blocks, m, n = A.shape

    # The copy engine moves all four, and wants them to start on 16 bytes.
    aligned = all(x is None or x.data_ptr() % 16 == 0 for x in (A, B, C, out))
    alike = out.dtype == A.dtype and (C is None or C.dtype == A.dtype)
    whole = (
        m % _LARGE.tile_m == 0 and n % 8 == 0 and _choose_tiles(num_blocks, m, A.device) is _LARGE
    )
    if not (whole and alike and aligned and A.is_cuda):
        return False

    return capability(A.device) == 9 and triton.__version__.startswith(_PINGPONG_WITH)


@lru_cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H200's, in Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    A: Tensor,
    B: Tensor,
    C: Tensor | None,
    out: Tensor,
    factors: tuple[float | Tensor, float | Tensor, float | Tensor],
    config: TileConfig | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    num_blocks, m, n = A.shape
    if config is None and _takes_pingpong(A, B, C, out):
        from . import pingpong

        programs = min(num_blocks * _LARGE.num_tiles(m), _num_processors(A.device))
        return pingpong.launch(A, B, C, out, factors, programs, squares)

    config = config or _choose_tiles(num_blocks, m, A.device)
    programs = num_blocks * config.num_tiles(m)
    if config.persistent and A.is_cuda:  # Triton's interpreter has no processors to count
        programs = min(programs, config.persistent * _num_processors(A.device))

    # The copy engine wants rows that start on 16 bytes; other shapes take ordinary loads.
    tma = (
        capability(A.device) >= 9
        and n % 8 == 0
        and A.data_ptr() % 16 == 0
        and B.data_ptr() % 16 == 0
    )

    first = A
    second = B
    if tma:
        flat = [num_blocks * m, n]
        strides = [n, 1]
        first = TensorDescriptor(A, flat, strides, [config.tile_m, config.tile_k])
        second = TensorDescriptor(B, flat, strides, [config.tile_n, config.tile_k])

    alpha, beta, diag = factors
    _symmetric_kernel[(programs,)](
        first,
        second,
        C,
        out,
        squares,
        alpha,
        beta,
        diag,
        num_blocks,
        m,
        n,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        TILE_K=config.tile_k,
        TMA=tma,
        ALPHAS=isinstance(alpha, Tensor),
        BETAS=isinstance(beta, Tensor),
        DIAGS=isinstance(diag, Tensor),
        PERSISTENT=config.persistent > 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

    return out


def gram(
    X: Tensor,
    out: Tensor | None = None,
    scale: float | Tensor = 1.0,
    squares: Tensor | None = None,
) -> Tensor:
    """scale * X X^T, computing half of it. X is [B, m, n] contiguous, bf16 or fp16; fastest when n
    is a multiple of 8. `out` may have any dtype. `scale`, a number or float32 [B] on the device, is
    applied to the float32 sums: 1 / (sum of X^2) gives trace 1 without another pass over X.
    `squares`, float32 [B, num_parts(B, m)], is filled with sums of squares of the result."""
    num_blocks, m, _ = X.shape
    out = X.new_empty(num_blocks, m, m) if out is None else out
    return _launch(X, X, None, out, (scale, 0.0, 0.0), squares=squares)


def num_parts(num_blocks: int, m: int, device: torch.device) -> int:
    """How many partial sums `gram` writes for each of B blocks of m rows."""
    return _choose_tiles(num_blocks, m, device).num_tiles(m)


def symmetric_product(
    S: Tensor,
    T: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    C: Tensor | None = None,
    beta: float | Tensor = 0.0,
    diag: float | Tensor = 0.0,
) -> Tensor:
    """alpha S T + beta C + diag I for symmetric S, T, C with S T = T S, computing half of it. One
    launch is one step's polynomial: S = T = C = R, alpha = c, beta = b, diag = a. S and T are
    trusted to commute; the result is exactly symmetric, except for the 8 x 8 squares on its
    diagonal where large tiles are used. Matrices are contiguous, S and T bf16 or fp16; each factor
    is a number, or float32 [B] contiguous on the device."""
    return _launch(S, T, C, torch.empty_like(S), (alpha, beta, diag))
