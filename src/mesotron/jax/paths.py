"""Paths of leaves as plain text, the same for dicts, flax, Equinox and dataclasses."""

from __future__ import annotations

from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def spell(path: tuple[Any, ...]) -> str:
    """A key path with slashes: "params/Dense_0/kernel".

    Example:
        >>> spell((DictKey("layers"), SequenceKey(0), GetAttrKey("weight")))
        'layers/0/weight'
    """
    # flax.nnx wraps each array in a variable with this one field.
    wrapped = len(path) > 1 and path[-1] == GetAttrKey("value")
    words = []
    for key in path[:-1] if wrapped else path:
        match key:
            case DictKey() | FlattenedIndexKey():
                words.append(str(key.key))
            case GetAttrKey():
                words.append(key.name)
            case SequenceKey():
                words.append(str(key.idx))
            case _:
                words.append(str(key))
    return "/".join(words)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in the tree's own order; masked and empty places are left out."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(spell(path), leaf) for path, leaf in leaves]


def attribute_leaves(tree: Any) -> set[str]:
    """Paths whose last word is an attribute of a module, as in Equinox, and not a key of a dict."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {spell(path) for path, _ in leaves if path and isinstance(path[-1], GetAttrKey)}
