"""The norms of a packed bucket, which packing finds and filtering and writing use."""

from typing import NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    """Three numbers for each block, float32 [B].

    Args:
        sumsq: sum of X^2.
        norm: its root, the Frobenius norm; 1 for a zero block.
        inverse_square: 1 / norm^2, which gives X X^T a trace of 1.
    """

    sumsq: Tensor
    norm: Tensor
    inverse_square: Tensor
