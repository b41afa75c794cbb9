"""Views: which matrices a JAX array holds, written as one letter for each of its axes.

`o` is an axis of outputs, `i` of inputs, `s` of separate matrices (layers of a scan, experts,
heads). A flax kernel is "io", an Equinox weight "oi", a query kernel (width, heads, head width)
"ioo" as one matrix and "iso" head by head. Fused axes must be axes of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jax import Array


class Matrices(NamedTuple):
    """The matrices of a view.

    Args:
        num: how many.
        rows: outputs of each.
        cols: inputs of each.
    """

    num: int
    rows: int
    cols: int

    @property
    def block_shape(self) -> tuple[int, int]:
        """(short side, long side) of one matrix."""
        return min(self.rows, self.cols), max(self.rows, self.cols)


def default_view(ndim: int) -> str:
    """JAX's order (inputs, outputs) in the last two axes; axes before them are stacks.

    Example:
        >>> default_view(3)
        'sio'
    """
    if ndim < 2:
        raise ValueError(
            f"an array of {ndim} dimensions is not a matrix: give vectors to Adam, as "
            "chain_with_muon and multi_transform_with_muon do"
        )
    return "s" * (ndim - 2) + "io"


def check_view(view: str, shape: tuple[int, ...], name: str = "an array") -> str:
    """The view, refused with a sentence if it does not fit the shape."""
    if set(view) - set("sio") or not {"i", "o"} <= set(view) or len(view) != len(shape):
        raise ValueError(
            f"view {view!r} does not fit {name} of shape {shape}: write one letter for each axis, "
            "o for outputs, i for inputs, s for separate matrices, with at least one o and one i"
        )
    return view


def read_view(view: str, shape: tuple[int, ...]) -> Matrices:
    """How many matrices of which size an array of this shape holds.

    Example:
        >>> read_view("iso", (64, 4, 16))
        Matrices(num=4, rows=16, cols=64)
    """
    sizes = [math.prod(n for n, axis in zip(shape, view) if axis == kind) for kind in "soi"]
    return Matrices(*sizes)


def to_wide(X: Array, view: str) -> Array:
    """The matrices as [num, short side, long side], since f(X^T) = f(X)^T for every filter."""
    num, rows, cols = read_view(view, X.shape)
    order = "soi" if rows <= cols else "sio"
    axes = [axis for kind in order for axis, letter in enumerate(view) if letter == kind]
    return X.transpose(axes).reshape(num, min(rows, cols), max(rows, cols))


def from_wide(X: Array, view: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_wide`: an array of `shape`."""
    _, rows, cols = read_view(view, shape)
    order = "soi" if rows <= cols else "sio"
    axes = [axis for kind in order for axis, letter in enumerate(view) if letter == kind]
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return X.reshape([shape[axis] for axis in axes]).transpose(back)
