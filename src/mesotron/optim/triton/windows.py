"""Tables of windows: many m x n pieces of many parameters, read and written by one kernel launch.

A window is a strided 2-D view of a tensor (a whole matrix, one head's rows, a transpose). A kernel
cannot take a list of tensors, so a table holds each window's address and strides on the device.
Does not keep the tensors alive: their owner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Legend: B windows, all m x n with m <= n and of one dtype. Strides count elements; at least one of
# the two is 1. A window whose column stride is 1 is called row-major.

LARGEST_GRID = 65535  # CUDA's limit on the second axis of a grid, which counts the windows


@dataclass(frozen=True)
class WindowTable:
    """Where the B windows of a bucket lie in memory. Build with `tabulate`."""

    entries: Tensor
    """int64 [B, 3] on the windows' device: address in bytes, row stride, column stride."""
    strides: Tensor
    """int64 [B, 2] on the host: row stride, column stride."""
    shape: tuple[int, int]
    """(m, n)."""
    dtype: torch.dtype
    aligned: bool
    """Every window and every line of it starts on 16 bytes: kernels may load 16 bytes at once."""

    def __len__(self) -> int:
        return len(self.strides)

    @property
    def device(self) -> torch.device:
        """Where the windows are."""
        return self.entries.device

    def rebase(self, addresses: Sequence[int]) -> Tensor:
        """Point the windows at new memory of the same strides (fresh gradients), in place.

        Args:
            addresses: B first-element addresses in bytes, in the table's order.

        Returns:
            The host's copy of the table; keep it if the call is captured in a graph, whose replays
            read it again.
        """
        if len(addresses) != len(self):
            raise ValueError(
                f"got {len(addresses)} addresses for {len(self)} windows; pass one for each"
            )
        if self.aligned and any(address % 16 for address in addresses):
            raise ValueError("an aligned table got an unaligned address; call tabulate again")
        source = _on_host(addresses, self.strides, self.device)
        self.entries.copy_(source, non_blocking=True)
        return source


def tabulate(views: Sequence[Tensor]) -> WindowTable:
    """Put the addresses and strides of same-shaped 2-D views into a table on their device.

    Args:
        views: B tensors [m, n] of one dtype on one device, each contiguous along at least one axis
            (`p`, `p.T`, `p[:64]` and `p[:, 64:128]` of a contiguous `p` all are).

    Returns:
        The table. Valid as long as the views' storage is neither freed nor moved.

    Example:
        >>> table = tabulate([torch.zeros(4, 8), torch.zeros(8, 4).T])
        >>> len(table), table.shape, table.strides.tolist()
        (2, (4, 8), [[8, 1], [1, 4]])
    """
    if not views:
        raise ValueError("tabulate needs at least one view; leave an empty bucket out")
    if len(views) > LARGEST_GRID:
        raise ValueError(
            f"one launch takes {LARGEST_GRID} windows, got {len(views)}; split the bucket"
        )
    first = views[0]
    for view in views:
        if view.shape != first.shape or view.dtype != first.dtype or view.device != first.device:
            raise ValueError(
                f"one table holds one kind of window, got {tuple(view.shape)} {view.dtype} on "
                f"{view.device} after {tuple(first.shape)} {first.dtype} on {first.device}; "
                "build a table for each"
            )
    strides = torch.tensor([_strides(view) for view in views], dtype=torch.int64)
    addresses = [view.data_ptr() for view in views]
    lines_aligned = strides.amax(dim=1) % (16 // first.element_size()) == 0
    rows, columns = first.shape
    return WindowTable(
        entries=_on_host(addresses, strides, first.device).to(first.device, non_blocking=True),
        strides=strides,
        shape=(rows, columns),
        dtype=first.dtype,
        aligned=bool(lines_aligned.all()) and not any(address % 16 for address in addresses),
    )


def _on_host(addresses: Sequence[int], strides: Tensor, device: torch.device) -> Tensor:
    """[B, 3] in memory the GPU can fetch on its own, so that the host need not wait."""
    entries = torch.cat([torch.tensor(addresses, dtype=torch.int64)[:, None], strides], dim=1)
    return entries.pin_memory() if device.type == "cuda" else entries


def _strides(view: Tensor) -> tuple[int, int]:
    """The two strides; the stride of an axis of length 1 is never used and becomes 1."""
    row, column = (
        1 if size == 1 else step for size, step in zip(view.shape, view.stride(), strict=True)
    )
    if row != 1 and column != 1:
        raise ValueError(
            f"a window must be contiguous along one axis, got strides {(row, column)}; "
            "pass a contiguous copy"
        )
    return row, column


@triton.jit
def is_row_major(table, block):
    """Whether one window's rows are contiguous; if not, its columns are."""
    return tl.load(table + 3 * block + 2) == 1


@triton.jit
def window_pointers(
    table, block, rows, columns,
    DTYPE: tl.constexpr, ROW_MAJOR: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Pointers to elements (rows, columns) of one window, as a tile whose LAST axis is contiguous.

    That is [rows, columns] when ROW_MAJOR and [columns, rows] otherwise. The unit stride is a
    literal and the alignment a promise, since the compiler can see neither in a table; without them
    every load would be one element wide.
    """
    pointer = tl.load(table + 3 * block).to(tl.pointer_type(DTYPE))
    if ROW_MAJOR:
        stride = tl.load(table + 3 * block + 1)
        slow, fast = rows, columns
    else:
        stride = tl.load(table + 3 * block + 2)
        slow, fast = columns, rows
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        stride = tl.multiple_of(stride, 8 if DTYPE.primitive_bitwidth == 16 else 4)
    return pointer + slow.to(tl.int64)[:, None] * stride + fast[None, :]


@triton.jit
def window_mask(rows, columns, m, n, ROW_MAJOR: tl.constexpr):
    """Which elements of a tile laid out as `window_pointers` lays it are inside the window."""
    if ROW_MAJOR:
        inside = (rows < m)[:, None] & (columns < n)[None, :]
    else:
        inside = (columns < n)[:, None] & (rows < m)[None, :]
    return inside


@triton.jit
def tile_axes(tile, n, TILE: tl.constexpr):
    """Row and column indices of the tile with this running number."""
    tiles_across = tl.cdiv(n, TILE)
    rows = (tile // tiles_across) * TILE + tl.arange(0, TILE)
    columns = (tile % tiles_across) * TILE + tl.arange(0, TILE)
    return rows, columns


def num_tiles(shape: tuple[int, int], tile: int) -> int:
    """How many square tiles cover a window.

    Example:
        >>> num_tiles((65, 128), 64)
        4
    """
    return triton.cdiv(shape[0], tile) * triton.cdiv(shape[1], tile)


_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for a dtype the kernels take.

    Example:
        >>> triton_dtype(torch.bfloat16) is tl.bfloat16
        True
    """
    if dtype not in _TRITON_DTYPES:
        raise ValueError(f"kernels take float32, bfloat16 or float16, got {dtype}; cast it first")
    return _TRITON_DTYPES[dtype]
