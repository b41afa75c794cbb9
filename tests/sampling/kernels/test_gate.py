"""The gated activation as a kernel, against PyTorch's."""

import os

import pytest
import torch
from torch.nn.functional import gelu, silu

gate = pytest.importorskip("mesotron.sampling.kernels.gate")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU or TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize("features", [8, 1500])
def test_equals_the_plain_form(features):
    both = 3 * torch.randn(5, 2 * features, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    first, up = both.chunk(2, dim=-1)

    torch.testing.assert_close(gate.gated(both), silu(first) * up)
    by_tanh = gelu(first, approximate="tanh") * up
    torch.testing.assert_close(gate.gated(both, gelu=True), by_tanh)
