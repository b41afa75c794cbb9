"""Leaves of a parameter tree: their paths as text, and the matrices that each array holds.

A view has one letter per axis: `o` outputs, `i` inputs, `s` separate matrices (layers of a scan,
experts, heads). A flax kernel is "io", an Equinox weight "oi", a query kernel (width, heads, head
width) "ioo" as one matrix and "iso" per head. Fused projections must have an axis of their own.
"""

from typing import Any, NamedTuple

import jax
from jax import Array
from jax.tree_util import GetAttrKey


def path_name(path: tuple[Any, ...]) -> str:
    """A key path with slashes, the same for dicts, flax, Equinox and dataclasses."""
    # flax.nnx wraps each array in a variable with this one field.
    wrapped = len(path) > 1 and path[-1] == GetAttrKey("value")
    return jax.tree_util.keystr(path[:-1] if wrapped else path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's own order, without masked and empty nodes."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in leaves]


def attribute_leaves(tree: Any) -> set[str]:
    """Paths that end in an attribute of a module, as in Equinox, and not in a dict key."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in leaves if path and isinstance(path[-1], GetAttrKey)]

    return set(map(path_name, paths))


class Matrices(NamedTuple):
    num: int
    rows: int  # outputs of each
    cols: int  # inputs


def default_view(ndim: int) -> str:
    """JAX's order (inputs, outputs) in the last two axes, with stacks before them: "sio"."""
    if ndim < 2:
        raise ValueError(
            f"an array of {ndim} dimensions is not a matrix: update vectors with Adam, as "
            "chain_with_muon and multi_transform_with_muon do"
        )

    return "s" * (ndim - 2) + "io"


def check_view(view: str, shape: tuple[int, ...], name: str = "an array") -> str:
    """The view itself, or a ValueError if it does not fit the shape."""
    if set(view) - set("sio") or not {"i", "o"} <= set(view) or len(view) != len(shape):
        raise ValueError(
            f"view {view!r} does not fit {name} of shape {shape}: write one letter per axis, o for "
            "outputs, i for inputs, s for separate matrices, with at least one o and one i"
        )

    return view


def read_view(view: str, shape: tuple[int, ...]) -> Matrices:
    """How many matrices of which size an array of this shape holds.

    Example:
        >>> read_view("iso", (64, 4, 16))
        Matrices(num=4, rows=16, cols=64)
    """
    sizes = {"s": 1, "o": 1, "i": 1}
    for letter, n in zip(view, shape):
        sizes[letter] *= n

    return Matrices(num=sizes["s"], rows=sizes["o"], cols=sizes["i"])


def to_wide(X: Array, view: str) -> Array:
    """The matrices as [num, short side, long side], since f(X^T) = f(X)^T for every filter."""
    num, rows, cols = read_view(view, X.shape)
    return X.transpose(_wide_axes(view, X.shape)).reshape(num, min(rows, cols), max(rows, cols))


def from_wide(X: Array, view: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_wide`: an array of `shape`."""
    axes = _wide_axes(view, shape)
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return X.reshape([shape[axis] for axis in axes]).transpose(back)


def _wide_axes(view: str, shape: tuple[int, ...]) -> list[int]:
    _, rows, cols = read_view(view, shape)
    order = "soi" if rows <= cols else "sio"
    axes = range(len(view))

    return sorted(axes, key=lambda axis: order.index(view[axis]))  # stable: equal letters keep it
