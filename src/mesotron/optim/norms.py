"""The spectral norm of weights, and the one that a filtered step can have."""

import torch
from torch import Tensor

from mesotron.optim.matrix import largest_eigenvalue
from mesotron.optim.views import View

# The largest singular value that a filter leaves: Muon's steps map [0, 1] to at most 1.2024, and
# rounding adds up to 0.002 in float32 and bfloat16.
F_MAX = 1.21


def spectral_norm(W: Tensor, view: str = "whole") -> Tensor:
    """The largest singular value of a matrix, a convolution or all of a stack."""
    window = View(View.parse(view).layout).windows(W.detach().float())[0]
    X = window.wide.reshape(-1, *window.block_shape)

    unit = X.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    gram = torch.bmm(X / unit, (X / unit).mT)

    return largest_eigenvalue(gram).amax().sqrt() * unit
