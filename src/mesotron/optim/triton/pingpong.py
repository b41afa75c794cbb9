"""The products of `symmetric` for whole tiles of 128: loading, multiplying and storing at once.

One warp loads panels into a ring in shared memory; two groups of four warps alternate on tiles.
While one group adds C and stores, the other has the tensor cores and the whole ring, so neither
waits for memory ("ping-pong", as in CUTLASS). Written in Gluon, Triton's lower level, which no
interpreter runs. `symmetric` decides when it is used.

Legend: B blocks of m x n; a task is a tile (i, j), i >= j, of one block's m x m result. A slot of
the ring holds a panel of A and one of B, TILE x DEPTH each, or one TILE x TILE tile of C. Each slot
has two barriers, full and empty, which alternate between phases 0 and 1; waiting for the phase
before the first passes at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE = gl.constexpr(128)
DEPTH = gl.constexpr(64)
STAGES = gl.constexpr(6)  # with the buffer for stores all of the 227 KB of a multiprocessor


@gluon.jit
def _lower_tile(index, tile_rows):
    """As in `symmetric`, for square tiles: number `index` of those on and below the diagonal."""
    height = tile_rows + 0.5
    j = (height - gl.sqrt(height * height - 2.0 * index)).to(gl.int32)
    j = gl.where(j * tile_rows - j * (j - 1) // 2 > index, j - 1, j)
    j = gl.where((j + 1) * tile_rows - (j + 1) * j // 2 <= index, j + 1, j)

    return index - (j * tile_rows - j * (j - 1) // 2) + j, j


@gluon.jit
def _advance(slot, phase):
    """The next slot; the phase turns over with the ring."""
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load(A, B, C, ring, shape, SAME: gl.constexpr, HAS_C: gl.constexpr):
    """The loading warp: for every task the panels of A and B, step by step, then C's tile."""
    panels, tiles, full, empty = ring
    num_tasks, tasks_per_block, m, steps = shape
    slot = 0

    phase = 1
    for task in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        i, j = _lower_tile(task % tasks_per_block, m // TILE)
        top = task // tasks_per_block * m

        # On the diagonal of X X^T both panels are the same.
        apart = i != j if SAME else True
        for step in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, A.block_type.nbytes + B.block_type.nbytes, pred=apart)

            if SAME:
                mbarrier.expect(ready, A.block_type.nbytes, pred=i == j)

            at = step * DEPTH
            tma.async_copy_global_to_shared(A, [top + i * TILE, at], ready, panels.index(2 * slot))
            tma.async_copy_global_to_shared(
                B,
                [top + j * TILE, at],
                ready,
                panels.index(2 * slot + 1),
                pred=apart,
            )
            slot, phase = _advance(slot, phase)

        if HAS_C:
            mbarrier.wait(empty.index(slot), phase)
            ready = full.index(slot)
            mbarrier.expect(ready, C.block_type.nbytes)
            tma.async_copy_global_to_shared(C, [top + i * TILE, j * TILE], ready, tiles.index(slot))
            slot, phase = _advance(slot, phase)


@gluon.jit
def _multiply(ring, slot, phase, steps, second, LAYOUT: gl.constexpr):
    """Start the products of all steps; a slot goes back one step late, when it has been read.
    Returns the sums, of which the last step may still run, and that step's slot and phase."""
    panels, _, full, empty = ring
    mbarrier.wait(full.index(slot), phase)
    sums = warpgroup_mma_init(gl.zeros((TILE, TILE), gl.float32, LAYOUT))
    b = panels.index(2 * slot + second).permute((1, 0))

    sums = warpgroup_mma(
        panels.index(2 * slot),
        b,
        sums,
        use_acc=False,
        is_async=True,
    )
    for _ in range(1, steps):
        last = slot
        slot, phase = _advance(slot, phase)
        mbarrier.wait(full.index(slot), phase)
        b = panels.index(2 * slot + second).permute((1, 0))
        sums = warpgroup_mma(panels.index(2 * slot), b, sums, is_async=True)
        sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[sums]))
        mbarrier.arrive(empty.index(last), count=1)

    return sums, slot, phase


@gluon.jit
def _write(result, out, buffer, top, i, j, LAYOUT: gl.constexpr):
    """Store a tile and its mirror image; one on the diagonal is made of its lower half."""
    buffer.store(result)
    if i == j:
        rows = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        mirrored = buffer.permute((1, 0)).load(LAYOUT)
        gl.thread_barrier()
        buffer.store(gl.where(columns[None, :] <= rows[:, None], result, mirrored))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [top + i * TILE, j * TILE], buffer)
    else:
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [top + i * TILE, j * TILE], buffer)
        tma.store_wait(0)
        gl.thread_barrier()
        buffer.permute((1, 0)).store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [top + j * TILE, i * TILE], buffer)

    tma.store_wait(0)


@gluon.jit
def _factor(value, block, TABLE: gl.constexpr):
    """As in `symmetric`: one number, or the block's entry of a table."""
    if TABLE:
        factor = gl.load(value + block)
    else:
        factor = value

    return factor


@gluon.jit
def _compute(
    out,
    squares,
    factors,
    ring,
    buffer,
    barriers,
    shape,
    WHO: gl.constexpr,
    SAME: gl.constexpr,
    HAS_C: gl.constexpr,
    SQUARES: gl.constexpr,
    ALPHAS: gl.constexpr,
    BETAS: gl.constexpr,
    DIAGS: gl.constexpr,
):
    """One of the two groups that multiply: every second task of this program. A group waits for its
    turn before it waits for a slot: a barrier knows only two phases, and those of tasks that the
    other group has yet to do look the same."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    _, tiles, full, empty = ring
    num_tasks, tasks_per_block, m, steps = shape
    alpha, beta, diag = factors
    turns, exits = barriers

    programs = gl.num_programs(0)
    for task in range(gl.program_id(0) + WHO * programs, num_tasks, 2 * programs):
        block = task // tasks_per_block
        i, j = _lower_tile(task % tasks_per_block, m // TILE)
        number = task // programs  # of this task among both groups'
        my_phase = (number // 2 & 1) ^ (1 - WHO)
        position = number * (steps + HAS_C)
        slot = position % STAGES
        phase = (position // STAGES) & 1
        second = gl.where(i == j, 0, 1) if SAME else 1
        mbarrier.wait(turns.index(WHO), my_phase)

        sums, slot, phase = _multiply(
            ring,
            slot,
            phase,
            steps,
            second,
            LAYOUT,
        )

        last = slot
        if HAS_C:
            slot, phase = _advance(slot, phase)
            mbarrier.wait(full.index(slot), phase)

        mbarrier.arrive(turns.index(1 - WHO), count=1)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(last), count=1)

        sums = sums * _factor(alpha, block, ALPHAS)
        if HAS_C:
            c = tiles.index(slot).load(LAYOUT)
            fence_async_shared()  # the next load into the slot comes after this read of it
            mbarrier.arrive(empty.index(slot), count=1)
            sums += _factor(beta, block, BETAS) * c.to(gl.float32)

        rows = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
        columns = j * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        on_diagonal = rows[:, None] == columns[None, :]
        sums += gl.where(on_diagonal, _factor(diag, block, DIAGS), 0.0)

        if SQUARES:
            above = rows[:, None] < columns[None, :]
            weight = gl.where(above, 0.0, gl.where(on_diagonal, 1.0, 2.0))
            gl.store(squares + task, gl.sum(gl.sum(weight * sums * sums, 1), 0))

        mbarrier.wait(exits.index(WHO), my_phase)
        _write(
            sums.to(out.dtype),
            out,
            buffer,
            block * m,
            i,
            j,
            LAYOUT,
        )

        mbarrier.arrive(exits.index(1 - WHO), count=1)


@gluon.jit(do_not_specialize=["num_blocks"])
def _pingpong_kernel(
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
    SAME: gl.constexpr,
    HAS_C: gl.constexpr,
    SQUARES: gl.constexpr,
    ALPHAS: gl.constexpr,
    BETAS: gl.constexpr,
    DIAGS: gl.constexpr,
):
    panels = gl.allocate_shared_memory(A.dtype, [2 * STAGES, TILE, DEPTH], A.layout)

    # The same memory: two panels of 64 columns lie in it as a tile of 128 does.
    tiles = panels._reinterpret(A.dtype, [STAGES, TILE, 2 * DEPTH], out.layout)
    buffer = gl.allocate_shared_memory(out.dtype, [TILE, TILE], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    exits = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())

    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)

    for k in gl.static_range(2):
        mbarrier.init(turns.index(k), count=1)
        mbarrier.init(exits.index(k), count=1)

    fence_async_shared()
    tile_rows = m // TILE
    tasks_per_block = tile_rows * (tile_rows + 1) // 2
    shape = (num_blocks * tasks_per_block, tasks_per_block, m, gl.cdiv(n, DEPTH))
    ring = (panels, tiles, full, empty)
    factors = (alpha, beta, diag)
    barriers = (turns, exits)

    # Registers: 168 for each of 12 warps at the start, which become 232, 232 and 40.
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    out,
                    squares,
                    factors,
                    ring,
                    buffer,
                    barriers,
                    shape,
                    0,
                    SAME,
                    HAS_C,
                    SQUARES,
                    ALPHAS,
                    BETAS,
                    DIAGS,
                ),
            ),
            (
                _compute,
                (
                    out,
                    squares,
                    factors,
                    ring,
                    buffer,
                    barriers,
                    shape,
                    1,
                    SAME,
                    HAS_C,
                    SQUARES,
                    ALPHAS,
                    BETAS,
                    DIAGS,
                ),
            ),
            (_load, (A, B, C, ring, shape, SAME, HAS_C)),
        ],
        [4, 1],
        [232, 40],
    )


# Kernels by everything that Triton compiles for. Triton's own lookup costs the host more than the
# launch: it writes out four descriptors' layouts each time.
_compiled: dict = {}


def launch(
    A: Tensor,
    B: Tensor,
    C: Tensor | None,
    out: Tensor,
    factors: tuple[float | Tensor, float | Tensor, float | Tensor],
    num_programs: int,
    squares: Tensor | None = None,
) -> Tensor:
    """alpha A B^T + beta C + diag I into `out`, as in `symmetric`; exactly symmetric. All matrices
    are contiguous and of one dtype, bf16 or fp16; m is a multiple of 128, n of 8. At most one
    program for each multiprocessor."""
    num_blocks, m, n = A.shape
    dtype = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[A.dtype]
    tile = TILE.value
    depth = DEPTH.value
    panel_layout = gl.NVMMASharedLayout.get_default_for([tile, depth], dtype)
    tile_layout = gl.NVMMASharedLayout.get_default_for([tile, tile], dtype)

    def describe(X: Tensor, width: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
        columns = X.shape[-1]
        return TensorDescriptor(
            X,
            [num_blocks * m, columns],
            [columns, 1],
            [tile, width],
            layout,
        )

    result = describe(out, tile, tile_layout)

    # Triton compiles an integer of 1 in, which a key that tells numbers from tables would not show.
    pointers = (squares, *(x if isinstance(x, Tensor) else float(x) for x in factors))
    tables = tuple(isinstance(factor, Tensor) for factor in factors)
    flags = (A.data_ptr() == B.data_ptr(), C is not None, squares is not None, *tables)

    arguments = (
        describe(A, depth, panel_layout),
        describe(B, depth, panel_layout),
        result if C is None else describe(C, tile, tile_layout),
        result,
        *pointers,
        num_blocks,
        m,
        n,
        *flags,
    )

    aligned = tuple(isinstance(x, Tensor) and x.data_ptr() % 16 == 0 for x in pointers)
    key = (A.device, A.dtype, m, n, flags, aligned)
    if key in _compiled:
        _compiled[key][(num_programs, 1, 1)](*arguments)
    else:
        launched = _pingpong_kernel[(num_programs,)](*arguments, num_warps=4, maxnreg=168)
        _compiled[key] = launched

    return out
