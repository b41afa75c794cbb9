"""The kernels of a block against the plain functions beside it.

Without a GPU, Triton's interpreter runs them on the CPU.
"""

import numpy
import pytest
import torch

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton")
if not ON_GPU and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter needs numpy < 2.4", allow_module_level=True)

from mesotron.rlvr.passes.blocks import (  # noqa: E402
    PLAIN,
    RaggedPass,
    fused_ops,
)
from mesotron.rlvr.passes.kernels import head  # noqa: E402
from mesotron.rlvr.passes.ragged import (  # noqa: E402
    flash_attend,
    lay_out,
    plain_attend,
)
from support.rlvr_tiny import NETWORKS, make_groups, make_network  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FUSED = fused_ops(plain_attend)
FLOAT = torch.float32
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter truncates bfloat16
CLOSE = {FLOAT: {"atol": 1e-5, "rtol": 1e-5}, HALF: {"atol": 2e-2, "rtol": 2e-2}}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # in Triton's interpreter
)


def randn(*shape, dtype=FLOAT):
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def same(function, oracle, inputs, *rest, close):
    """Outputs, and gradients of random sums of them; the oracle computes in float64."""
    torch.manual_seed(1)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    results = []
    for call, given, last in ((function, inputs, rest), (oracle, exact, wide(rest))):
        out = call(*given, *last)
        outputs = out if isinstance(out, tuple) else (out,)
        results.append(outputs)

    weights = [torch.randn(x.shape, device=DEVICE) for x in results[0]]
    gradients = []
    for outputs, given in zip(results, (inputs, exact), strict=True):
        total = sum((w.to(x.dtype) * x).sum() for w, x in zip(weights, outputs, strict=True))
        gradients.append(torch.autograd.grad(total, [x for x in given if x is not None]))

    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b.double(), **close)
    for a, b, x in zip(*gradients, [x for x in inputs if x is not None], strict=True):
        assert a.dtype == x.dtype
        scale = b.abs().max()
        torch.testing.assert_close(a.double() / scale, b.double() / scale, **close)


def wide(rest):
    return [torch.double if isinstance(x, torch.dtype) else x for x in rest]


@pytest.mark.parametrize("shape", [(3, 40), (17, 128), (5, 1030), (4, 3, 16)])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("types", [(FLOAT, FLOAT), (FLOAT, HALF), (HALF, HALF)])
def test_norms(shape, adds, types):
    torch.manual_seed(0)
    stream, block = types
    x = randn(*shape, dtype=stream)
    delta = randn(*shape, dtype=block) if adds else None
    weight = randn(shape[-1], dtype=stream)
    close = CLOSE[block]

    same(FUSED.add_norm, PLAIN.add_norm, (x, delta, weight), 1e-6, block, close=close)


@pytest.mark.parametrize("shape", [(3, 4, 16), (5, 3, 20), (2, 1, 128)])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_rotations(shape, dtype):
    torch.manual_seed(0)
    angle = torch.randn(shape[0], shape[2] // 2, device=DEVICE).repeat(1, 2)
    x = randn(*shape, dtype=dtype)

    same(FUSED.rotate, PLAIN.rotate, (x,), angle.cos(), angle.sin(), dtype, close=CLOSE[dtype])


@pytest.mark.parametrize("size", [7, 4096, 5000])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_gates(size, dtype):
    torch.manual_seed(0)
    both = (randn(1, size, dtype=dtype), randn(1, size, dtype=dtype))
    same(FUSED.gated, PLAIN.gated, both, close=CLOSE[dtype])


def exact_head(hidden, weight, bias, labels, temperature):
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    logprobs = (logits / temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)

    return logprobs.gather(-1, labels[:, None])[:, 0], entropies


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("V", [50, 5000])
def test_heads(dtype, biased, V, monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 4)
    torch.manual_seed(0)
    hidden = randn(9, 16, dtype=dtype)
    weight = randn(V, 16, dtype=FLOAT) if dtype == FLOAT else randn(V, 16, dtype=dtype)
    bias = randn(V, dtype=weight.dtype) if biased else None
    labels = torch.randint(V, (9,), device=DEVICE)
    labels[0] = V - 1

    close = {"atol": 5e-2, "rtol": 5e-2} if dtype == HALF else {"atol": 2e-5, "rtol": 2e-5}
    same(head.score, exact_head, (hidden, weight, bias), labels, 0.7, close=close)


def test_only_log_probabilities_have_a_gradient_and_only_once():
    torch.manual_seed(0)
    hidden = randn(3, 16)
    weight = randn(30, 16)
    labels = torch.tensor([3, 0, 29], device=DEVICE)
    logprobs, _ = head.score(hidden, weight, None, labels, 1.0)
    expected = exact_head(hidden, weight, None, labels, 1.0)[0]

    (a,) = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
    (b,) = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    with pytest.raises(ValueError, match="second"):
        torch.autograd.grad(logprobs.sum(), hidden)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_whole_pass(kind):
    from contextlib import nullcontext

    model = make_network(kind).to(DEVICE)
    ids, mask, T = make_groups(1, groups=(3, 2), device=str(DEVICE))
    gradients = []
    for ops in (FUSED, PLAIN):
        scores = RaggedPass(nullcontext, True, ops)(model, ids, mask, T, 0.7)
        assert scores is not None
        total = scores[0].sum() + scores[1].sum()
        gradients.append([total, *torch.autograd.grad(total, list(model.parameters()))])

    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not ON_GPU, reason="flash attention needs a GPU")
@pytest.mark.parametrize("heads", [(4, 2, 64), (14, 2, 64), (16, 8, 128), (9, 3, 64)])
def test_flash_attention_sees_the_prompt_and_itself(heads):
    H, K, D = heads
    ids, mask, T = make_groups(1, P=40, T=33, groups=(4, 3, 1), device="cuda")
    sight = lay_out(ids, mask, T).sight
    N = int(sight.queries[-1])
    inputs = [randn(N, k, D, dtype=HALF) for k in (H, K, K)]

    same(flash_attend, plain_attend, inputs, sight, D**-0.5, close=CLOSE[HALF])
