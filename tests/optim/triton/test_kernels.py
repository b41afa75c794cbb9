"""The Triton kernels against float64 and plain torch.

On a CUDA machine the compiled kernels run; elsewhere Triton's interpreter runs the same source on
the CPU, on small shapes, if Triton is installed.
"""

import pytest
import torch

ON_GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")
import mesotron  # noqa: E402
from mesotron.optim.triton import elementwise as ew  # noqa: E402
from mesotron.optim.triton import heads, symmetric  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALVES = [torch.float16, torch.bfloat16]
# The interpreter multiplies the bit patterns of bf16 matrices, so their products need a GPU.
PRODUCTS = HALVES if ON_GPU else [torch.float16]
# The interpreter truncates bf16 instead of rounding it, so the error may be a whole last place.
EPSILON = {torch.float16: 2**-11, torch.float32: 2**-22}
EPSILON[torch.bfloat16] = 2**-8 if ON_GPU else 2**-7
MUON = torch.tensor([[3.4445, -4.7750, 2.0315]] * 5)
LAYOUTS = ("rows", "transposed", "slice of rows", "slice of columns")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # in Triton's interpreter
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)


def window(m, n, layout, dtype=torch.float32, fill=None):
    def new(*shape):
        return torch.empty(*shape, device=DEVICE, dtype=dtype)

    view = {
        "rows": lambda: new(m, n),
        "transposed": lambda: new(n, m).T,
        "slice of rows": lambda: new(3 * m, n)[m : 2 * m],
        "slice of columns": lambda: new(m, 3 * n)[:, n : 2 * n],
    }[layout]()
    return view.copy_(randn(m, n) if fill is None else fill)


def bits(*values):
    return torch.tensor(values, device=DEVICE).view(torch.int32)


def scalar(value):
    return torch.tensor(value, device=DEVICE)


# Symmetric products


def exact_gram(X, scale=1.0):
    scale = scale[:, None, None] if isinstance(scale, torch.Tensor) else scale
    return scale * (X.double() @ X.double().mT)


def polynomial(R, a, b, c):
    a, b, c = (x[:, None, None] if isinstance(x, torch.Tensor) else x for x in (a, b, c))
    R = R.double()
    return a * torch.eye(R.shape[-1], device=R.device, dtype=R.dtype) + b * R + c * R @ R


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("shape", [(3, 48, 72), (2, 33, 37), (1, 7, 5), (1, 130, 100)])
def test_gram_equals_float64_and_is_symmetric(shape, dtype):
    X = randn(*shape, dtype=dtype)
    out = poisoned(shape[0], shape[1], shape[1], dtype=dtype)
    A = symmetric.gram(X, out, scale=0.25)

    assert A is out
    assert relative_error(A, exact_gram(X, 0.25)) < EPSILON[dtype]
    assert torch.equal(A, A.mT)

    full = symmetric.gram(X, poisoned(*A.shape, dtype=torch.float32))
    assert relative_error(full, exact_gram(X)) < 1e-6


def test_a_poisoned_block_leaves_its_neighbors_alone():
    # Panels past the last row of a block hold the next block's rows.
    X = randn(3, 40, 64, dtype=torch.float16)
    X[1] = torch.nan
    A = symmetric.gram(X)

    assert relative_error(A[::2], exact_gram(X[::2])) < EPSILON[torch.float16]
    assert A[1].isnan().all()


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("m", [16, 37, 100])
def test_one_launch_is_one_newton_schulz_polynomial(m, dtype):
    R = symmetric.gram(randn(2, m, 2 * m, dtype=dtype), scale=1 / (4 * m))
    for a, b, c in (MUON[0].tolist(), randn(3, 2)):  # numbers, or one per block
        Z = symmetric.symmetric_product(
            R,
            R,
            alpha=c,
            C=R,
            beta=b,
            diag=a,
        )

        assert relative_error(Z, polynomial(R, a, b, c)) < EPSILON[dtype]
        assert torch.equal(Z, Z.mT)

    mixed = symmetric.symmetric_product(R, R, alpha=c, diag=2.0)
    assert relative_error(mixed, polynomial(R, 2.0, 0.0, c)) < EPSILON[dtype]


@pytest.mark.parametrize("large", [False, True])
def test_a_product_of_two_commuting_matrices(large):
    R = symmetric.gram(randn(2, 80, 96, dtype=torch.float16), scale=1 / 400)
    S = symmetric.symmetric_product(R, R, alpha=0.5, diag=1.0)
    config = symmetric.TileConfig(
        16,
        32 if large else 16,
        32,
        num_warps=4,
        num_stages=2,
    )

    out = poisoned(2, 80, 80, dtype=torch.float16)
    product = symmetric._launch(
        S,
        R,
        None,
        out,
        (1.0, 0.0, 0.0),
        config,
    )

    # R and S are rounded polynomials of one matrix: they commute up to fp16's last place.
    assert relative_error(product, S.double() @ R.double()) < 2 * EPSILON[torch.float16]

    # Where a tile is too large to be transposed, 8 x 8 squares on the diagonal are not mirrored.
    square = torch.arange(80) // (8 if large else 1)
    mirrored = (square[:, None] != square[None, :]).to(product.device)
    assert torch.equal(product * mirrored, product.mT * mirrored)
    assert relative_error(product, product.mT.double()) < 2 * EPSILON[torch.float16]


# 140 blocks of 65 rows fill an H200 with large tiles; the interpreter takes 20 s for them.
FULL = pytest.param(140, 65, 64, marks=[] if ON_GPU else pytest.mark.slow)


@pytest.mark.parametrize(("num", "m", "n"), [(3, 70, 90), (1, 130, 160), FULL])
def test_gram_is_scaled_by_block_and_reports_its_sum_of_squares(num, m, n):
    X = randn(num, m, n, dtype=torch.float16)
    X[0] *= 100
    squares = poisoned(num, symmetric.num_parts(num, m, DEVICE), dtype=torch.float32)
    A = symmetric.gram(X, scale=1 / X.float().square().sum(dim=(1, 2)), squares=squares)
    trace = A.float().diagonal(dim1=1, dim2=2).sum(dim=1)

    assert torch.allclose(trace, torch.ones_like(trace), rtol=2 * EPSILON[torch.float16])
    assert torch.allclose(squares.double().sum(1), A.double().square().sum((1, 2)), rtol=1e-3)


@needs_gpu  # Gluon has no interpreter
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num", "m", "n"), [(400, 128, 72), (70, 384, 200), (48, 512, 512)])
def test_pingpong_computes_the_same(num, m, n, dtype):
    X = randn(num, m, n, dtype=dtype)
    out = poisoned(num, m, m, dtype=dtype)
    if not symmetric._takes_pingpong(X, X, None, out):
        pytest.skip("this version of Triton uses the other kernel")

    squares = poisoned(num, symmetric.num_parts(num, m, DEVICE), dtype=torch.float32)
    scale = torch.linspace(0.5, 1.0, num, device=DEVICE) / (4 * n)
    R = symmetric.gram(X, out, scale, squares)

    assert relative_error(R, exact_gram(X, scale)) < EPSILON[dtype]
    assert torch.equal(R, R.mT)
    assert torch.allclose(squares.sum(1), R.float().square().sum((1, 2)), rtol=1e-2)

    Z = symmetric.symmetric_product(
        R,
        R,
        alpha=2.0,
        C=R,
        beta=scale,
        diag=-1.0,
    )

    assert relative_error(Z, polynomial(R, -1.0, scale, 2.0)) < EPSILON[dtype]
    # Triton makes the integer 1 a constant of the kernel; the next alpha must not be ignored.
    for alpha in (1, 3.0):
        product = symmetric.symmetric_product(R, Z, alpha=alpha)
        assert relative_error(product, alpha * R.double() @ Z.double()) < 2 * EPSILON[dtype]
        assert torch.equal(product, product.mT)


@needs_gpu
@pytest.mark.parametrize("which", ["X", "out"])
def test_unaligned_tensors_take_the_other_kernel(which):
    # A slice of a buffer is contiguous, but the copy engine refuses it.
    def off(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view_as(x).copy_(x)

    X = randn(160, 128, 64, dtype=torch.float16)
    out = poisoned(160, 128, 128, dtype=torch.float16)
    X, out = (off(X), out) if which == "X" else (X, off(out))

    assert relative_error(symmetric.gram(X, out), exact_gram(X)) < 2**-11


# Gradients to packed updates


def peaks_of(views):
    found = [view.float().contiguous().view(torch.int32) & 0x7FFFFFFF for view in views]
    return torch.stack([x.max() for x in found])


def test_a_table_knows_alignment():
    assert ew.tabulate([randn(8, 16)]).aligned
    assert not ew.tabulate([randn(8, 18)]).aligned
    assert not ew.tabulate([randn(8, 16)[:, 1:9]]).aligned

    with pytest.raises(ValueError, match="contiguous"):
        ew.tabulate([randn(8, 16)[::2, ::2]])


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_finds_peaks_and_non_finite_values(layout, dtype):
    views = [window(70, 100, layout, dtype) for _ in range(4)]
    views[1].zero_()
    views[2][69, 99] = -torch.inf
    views[3][0, 0] = torch.nan
    peak = ew.inspect(ew.tabulate(views))

    assert torch.equal(peak[:3], peaks_of(views)[:3])  # a NaN has many patterns
    assert peak[1] == 0
    assert (peak < ew.INFINITY_BITS).tolist() == [True, True, False, False]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("g_dtype", "m_dtype", "x_dtype", "nesterov"),
    [
        (torch.float32, torch.float32, torch.float16, True),
        (torch.float16, torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_update_momentum_equals_plain_torch(g_dtype, m_dtype, x_dtype, nesterov, layout):
    m = 66
    n = 70
    mu = 0.9

    # The second block is transposed: one launch serves a shape and its transpose.

    if layout != "transposed":
        layouts = (layout, "transposed")
    else:
        layouts = ("transposed", "rows")

    grads = [window(m, n, kind, g_dtype) for kind in layouts]
    momenta = [window(m, n, kind, m_dtype) for kind in layouts]
    old = [view.float().clone() for view in momenta]
    G = ew.tabulate(grads)
    M = ew.tabulate(momenta)
    peak = ew.inspect(G)
    m_peak = ew.inspect(M)
    X = poisoned(2, m, n, dtype=x_dtype)

    packed = ew.update_momentum(
        G,
        M,
        X,
        scalar(mu),
        peak,
        m_peak,
        nesterov=nesterov,
    )
    for block, (gradient, before) in enumerate(zip(grads, old, strict=True)):
        want = before + (1 - mu) * (gradient.float() - before)
        assert relative_error(momenta[block], want) < EPSILON[m_dtype]

        if nesterov:
            U = gradient.float() + mu * (want - gradient.float())
        else:
            U = want

        factor = (X[block].float().norm() / U.norm()).log2().round().exp2()  # a power of two

        assert relative_error(X[block], U * factor) < EPSILON[x_dtype]

    assert X.abs().max() <= 1
    sumsq = X.float().square().sum(dim=(1, 2))
    for got, want in zip(packed, (sumsq, sumsq.sqrt(), 1 / sumsq), strict=True):
        assert torch.allclose(got, want, rtol=1e-5)

    assert torch.equal(m_peak, peaks_of(momenta))


def run_update(gradient, momentum, dtype=torch.float16):
    G = ew.tabulate([gradient])
    M = ew.tabulate([momentum])
    X = poisoned(1, *gradient.shape, dtype=dtype)

    packed = ew.update_momentum(
        G,
        M,
        X,
        scalar(0.95),
        ew.inspect(G),
        ew.inspect(M),
    )
    return X, packed.sumsq


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("exponent", [-100, 100])  # 1e-30 and 1e30, exactly
def test_gradients_of_any_scale_pack_to_the_same_bits(exponent, dtype):
    gradient = randn(32, 48)
    momentum = randn(32, 48)
    factor = 2.0**exponent

    scaled = run_update(gradient * factor, momentum * factor, dtype)
    for a, b in zip(run_update(gradient, momentum.clone(), dtype), scaled, strict=True):
        assert torch.equal(a, b)


def test_an_outlier_does_not_push_the_rest_below_fp16():
    gradient = randn(32, 48) * 1e-3
    gradient[0, 0] = 10.0
    X, _ = run_update(gradient.clone(), torch.zeros_like(gradient))
    rest = X[0, 1:]
    want = gradient[1:] * (X[0, 1, 1].double() / gradient[1, 1].double())

    assert relative_error(rest, want) < 2 * EPSILON[torch.float16]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_window_keeps_its_momentum_and_zero_stays_zero(poison):
    grads = [randn(70, 90) for _ in range(3)]
    momenta = [randn(70, 90) for _ in range(3)]
    grads[1][69, 3] = poison
    grads[2].zero_()
    momenta[2].zero_()
    before = [view.clone() for view in momenta]
    G = ew.tabulate(grads)
    M = ew.tabulate(momenta)
    peak = ew.inspect(G)
    m_peak = ew.inspect(M)
    X = poisoned(3, 70, 90, dtype=torch.float16)
    kept_peak = m_peak[1].item()

    packed = ew.update_momentum(
        G,
        M,
        X,
        scalar(0.95),
        peak,
        m_peak,
    )

    assert torch.equal(momenta[1], before[1])
    assert not torch.equal(momenta[0], before[0])
    assert not X[1:].any()
    assert (packed.sumsq > 0).tolist() == [True, False, False]
    assert packed.norm[1] == packed.inverse_square[1] == 1  # nothing divides by zero
    assert m_peak[1].item() == kept_peak


# Filtered updates to the weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_back_equals_plain_torch(layout, dtype):
    weights = [window(66, 100, kind, dtype) for kind in (layout, "transposed", layout)]
    old = [view.float().clone() for view in weights]
    F = randn(3, 66, 100, dtype=torch.float16)
    scale, gain = (torch.tensor(x, device=DEVICE) for x in ([1.0, 2.0, 3.0], [1.0, 4.0, 2.0]))
    decay = torch.tensor([0.0, 0.5, 0.5], device=DEVICE)
    peak = bits(1.0, 2.0, torch.inf)
    table = ew.tabulate(weights)

    energy = ew.write_back(
        table,
        F,
        scalar(0.1),
        decay,
        scale,
        peak,
        gain=gain,
    )

    assert torch.allclose(energy.sum(1), F.float().square().sum((1, 2)), rtol=1e-5)
    for k in range(2):
        want = (1 - 0.1 * decay[k]) * old[k] - 0.1 * scale[k] / gain[k] * F[k].float()
        assert relative_error(weights[k], want) < EPSILON[dtype]

    assert torch.equal(weights[2].float(), old[2])  # skipped: neither step nor decay


def round_stochastically(value, seed, layout="rows"):
    weight = window(
        128,
        128,
        layout,
        torch.bfloat16,
        fill=torch.tensor(1.0),
    )

    F = torch.ones(
        1,
        128,
        128,
        device=DEVICE,
        dtype=torch.float16,
    )

    lr = scalar(1 - value)
    one = torch.ones(1, device=DEVICE)
    table = ew.tabulate([weight])

    ew.write_back(
        table,
        F,
        lr,
        scalar(0.0),
        one,
        bits(1.0),
        scalar(seed),
        gain=one,
    )
    return weight


@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("value", [1 - 2**-10, 1 - 3 * 2**-10])
def test_stochastic_rounding_is_unbiased(value, layout):
    rounded = round_stochastically(value, 7, layout).double()
    grid = 2**-8  # bf16's step below 1
    assert set(rounded.unique().tolist()) <= {1.0, 1 - grid}

    p = (1 - value) / grid
    standard_error = grid * (p * (1 - p) / rounded.numel()) ** 0.5
    assert abs(rounded.mean().item() - value) < 4 * standard_error


def test_stochastic_rounding_follows_its_seed():
    first, again, other = (round_stochastically(1 - 2**-9, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)

    # Half of the entries go down in each draw; independent draws agree on half of them.
    assert abs((first == other).double().mean().item() - 0.5) < 0.02

    # Neighbors come from the same random words: they must not move together.
    down = (first < 1).double()
    for axis in (0, 1):
        together = (down == down.roll(1, axis)).double().mean().item()
        assert abs(together - 0.5) < 0.02


def test_alignment_is_the_cosine_of_update_and_gradient():
    grads = [window(70, 100, kind) for kind in ("rows", "transposed", "rows")]
    F = (torch.stack(grads) + randn(3, 70, 100)).half()
    want = torch.nn.functional.cosine_similarity(
        F.float().flatten(1), torch.stack(grads).flatten(1)
    )
    grads[1] *= 1e-25
    grads[2][0, 0] = torch.nan
    want[2] = 0

    G = ew.tabulate(grads)
    for fraction, tolerance in ((1.0, 1e-5), (0.5, 0.05)):
        sums = ew.sample_alignment(G, F, ew.inspect(G), fraction)
        assert torch.allclose(ew.alignment_cosine(sums), want, atol=tolerance)


# Small blocks, entirely on the chip


def spectra(m, n, dtype):
    X = randn(5, m, n)
    X[1] = X[1, :, :1] @ X[1, :1, :]
    X[2] = 0
    U, _, V = torch.linalg.svd(randn(m, n), full_matrices=False)
    X[3] = U @ V
    X[4] = U @ torch.diag(2.0 ** -torch.arange(float(min(m, n)), device=DEVICE)) @ V

    return (X / X.abs().amax((1, 2), keepdim=True).clamp(min=1e-9)).to(dtype)


def svd_filter(X):
    U, sigma, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    sigma = sigma / sigma.norm(dim=1, keepdim=True).clamp(min=1e-30)

    s = sigma
    for a, b, c in MUON.double().tolist():
        s = s * (a + b * s**2 + c * s**4)

    return U @ torch.diag_embed(s) @ Vh, sigma, s


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(("m", "n"), [(16, 40), (13, 37), (32, 150), (64, 64), (100, 130)])
def test_heads_equal_the_float64_filter(m, n, dtype):
    X = spectra(m, n, dtype)
    out, statistics = heads.filter_heads(X, MUON.to(DEVICE), gain=n**0.5)
    want, sigma, passed = svd_filter(X)

    assert not out[2].any()
    for block in (0, 1, 3, 4):
        assert relative_error(out[block], n**0.5 * want[block]) < EPSILON[dtype] + 8e-3

    energy = X.double().square().sum((1, 2))
    assert torch.allclose(statistics.energy.double(), energy, rtol=1e-5)
    assert torch.allclose(statistics.concentration.double(), sigma.pow(4).sum(1), rtol=1e-5)
    assert torch.allclose(statistics.passed.double(), passed.square().sum(1), rtol=2e-2)

    overwritten, _ = heads.filter_heads(X, MUON.to(DEVICE), gain=n**0.5, out=X)
    assert overwritten is X
    assert torch.equal(X, out)


@needs_gpu  # 9 GB
def test_offsets_past_two_to_the_31():
    X = torch.randn(
        520,
        2048,
        2048,
        device=DEVICE,
        dtype=torch.float16,
    )

    A = symmetric.gram(X, scale=1 / 2048)
    assert relative_error(A[-1:], exact_gram(X[-1:], 1 / 2048)) < EPSILON[torch.float16]


# AdamW


def adamw_steps(dtype, fused, steps=3, poison=None):
    """A matrix and two AdamW vectors, one long; the vectors and the optimizer after the steps."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((16, 24), (33,), (70, 65))
    params = [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(DEVICE, dtype)) for s in shapes
    ]
    groups = [{"params": params[:1], "rule": "muon"}, {"params": params[1:], "rule": "adamw"}]

    optimizer = mesotron.Muon(
        groups,
        lr=0.01,
        weight_decay=0.1,
        fused=fused,
    )
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)

        if step == poison:
            params[1].grad[3] = torch.nan

        optimizer.step()

    return params[1:], optimizer


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr("mesotron.optim.triton.available", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("everywhere")
def test_adamw_by_kernels_is_torchs_up_to_rounding(dtype):
    found, ours = adamw_steps(dtype, None)
    expected, plain = adamw_steps(dtype, False)
    for a, b in zip(found, expected, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        else:  # the same random bits round nearly all of them alike
            assert (a != b).float().mean() < 0.01

        state = ours.state[a]
        theirs = plain.state[b]
        assert state["step"] == theirs["step"] == 3

        # On a GPU PyTorch's 1 - 0.999 is that of float32, 1.3e-5 too small.
        torch.testing.assert_close(state["exp_avg_sq"], theirs["exp_avg_sq"], rtol=2e-5, atol=0.0)

    for key, value in plain.stats().items():
        if key.startswith("adamw"):
            assert ours.stats()[key] == pytest.approx(value, rel=0.05, abs=0.02), key


@pytest.mark.usefixtures("everywhere")
def test_a_nan_skips_adamws_whole_group():
    before, _ = adamw_steps(torch.float32, None, steps=1)
    after, optimizer = adamw_steps(torch.float32, None, steps=2, poison=1)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert [optimizer.state[p]["step"].item() for p in after] == [1, 1]
    assert optimizer.stats()["adamw/skipped"] == 1
