"""The Triton kernels against float64 and against their plain torch references.

On a CUDA machine the compiled kernels run; elsewhere Triton's interpreter runs the same source on
the CPU, if Triton is installed at all. What needs the real device says so.
"""

import os
import subprocess
import sys

import numpy
import pytest
import torch

ON_GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is absent: the plain torch path is what runs here")
if not ON_GPU and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0":
    pytest.skip(
        "Triton's interpreter makes scalars in a way numpy 2.4 refuses; use numpy < 2.4",
        allow_module_level=True,
    )

import triton  # noqa: E402

from mesotron.optim import triton as kernels  # noqa: E402
from mesotron.optim.triton import heads, pack, symmetric, windows, writeback  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALVES = [torch.float16, torch.bfloat16]
# The interpreter multiplies the bit patterns of bf16 matrices, so their products wait for a GPU.
PRODUCTS = [
    torch.float16,
    pytest.param(
        torch.bfloat16, marks=pytest.mark.skipif(not ON_GPU, reason="bf16 products need a GPU")
    ),
]
# The interpreter cuts bf16 off instead of rounding it, so there an error may be a whole last place.
EPSILON = {
    torch.float16: 2**-11,
    torch.bfloat16: 2**-8 if ON_GPU else 2**-7,
    torch.float32: 2**-22,
}
MUON = torch.tensor([[3.4445, -4.7750, 2.0315]] * 5)
LAYOUTS = ("rows", "transposed", "slice of rows", "slice of columns")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"  # the interpreter's own habit
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def relative_error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def poisoned(*shape, dtype):
    """An output that shows every element the kernel forgot."""
    return torch.full(shape, torch.nan, device=DEVICE, dtype=dtype)


def window(m, n, layout, dtype=torch.float32, fill=None):
    """An m x n view with the memory layout of a real parameter's window, filled with noise."""
    view = {
        "rows": lambda: torch.empty(m, n, device=DEVICE, dtype=dtype),
        "transposed": lambda: torch.empty(n, m, device=DEVICE, dtype=dtype).T,
        "slice of rows": lambda: torch.empty(3 * m, n, device=DEVICE, dtype=dtype)[m : 2 * m],
        "slice of columns": lambda: torch.empty(m, 3 * n, device=DEVICE, dtype=dtype)[:, n : 2 * n],
    }[layout]()
    return view.copy_(randn(m, n) if fill is None else fill)


def bits(*values):
    return torch.tensor(values, device=DEVICE).view(torch.int32)


def scalar(value):
    return torch.tensor(value, device=DEVICE)


# --- symmetric products ---------------------------------------------------------------------------

SHAPES = [(3, 48, 72), (2, 33, 37), (1, 7, 5), (2, 130, 200), (1, 65, 64)]


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_equals_float64_and_is_symmetric(shape, dtype):
    X = randn(*shape, dtype=dtype)
    out = poisoned(shape[0], shape[1], shape[1], dtype=dtype)
    A = symmetric.gram(X, out, scale=0.25)
    assert A is out
    assert relative_error(A, symmetric.gram_reference(X.double(), scale=0.25)) < EPSILON[dtype]
    assert torch.equal(A, A.mT)


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_gram_scaled_by_the_energy_has_trace_one(dtype):
    X = randn(3, 40, 64, dtype=dtype)
    X[1] *= 100
    X[2] = X[2, :, :1] @ X[2, :1, :]
    A = symmetric.gram(X, scale=1 / X.float().square().sum(dim=(1, 2)))
    trace = A.float().diagonal(dim1=1, dim2=2).sum(dim=1)
    assert torch.allclose(trace, torch.ones_like(trace), rtol=2 * EPSILON[dtype])


def test_gram_can_keep_float32():
    X = randn(2, 40, 64, dtype=torch.float16)
    A = symmetric.gram(X, poisoned(2, 40, 40, dtype=torch.float32))
    assert relative_error(A, symmetric.gram_reference(X.double())) < 1e-6


def test_a_poisoned_block_leaves_its_neighbours_alone():
    """Panels past the last row of a block hold the next block's rows."""
    X = randn(3, 40, 64, dtype=torch.float16)
    X[1] = torch.nan
    A = symmetric.gram(X)
    want = symmetric.gram_reference(X[::2].double())
    assert relative_error(A[::2], want) < EPSILON[torch.float16]
    assert A[1].isnan().all()


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize("m", [16, 48, 130, 37])
def test_one_launch_is_one_newton_schulz_polynomial(m, dtype):
    R = symmetric.gram(randn(2, m, 2 * m, dtype=dtype), scale=1 / (4 * m))
    a, b, c = 3.4445, -4.7750, 2.0315
    Z = symmetric.symmetric_product(R, R, alpha=c, C=R, beta=b, diag=a)
    want = symmetric.symmetric_product_reference(
        R.double(), R.double(), alpha=c, C=R, beta=b, diag=a
    )
    assert relative_error(Z, want) < EPSILON[dtype]
    assert torch.equal(Z, Z.mT)


def test_coefficients_may_differ_by_block():
    R = symmetric.gram(randn(3, 40, 64, dtype=torch.float16), scale=1 / 160)
    a, b, c = randn(3, 3)
    Z = symmetric.symmetric_product(R, R, alpha=c, C=R, beta=b, diag=a)
    W = R.double()
    want = symmetric.symmetric_product_reference(W, W, alpha=c, C=W, beta=b, diag=a)
    assert relative_error(Z, want) < EPSILON[torch.float16]
    mixed = symmetric.symmetric_product(R, R, alpha=c, diag=2.0)
    want = symmetric.symmetric_product_reference(W, W, alpha=c, diag=2.0)
    assert relative_error(mixed, want) < EPSILON[torch.float16]


@pytest.mark.parametrize("large", [False, True])
def test_a_product_of_two_commuting_matrices(large):
    R = symmetric.gram(randn(2, 80, 96, dtype=torch.float16), scale=1 / 400)
    S = symmetric.symmetric_product(R, R, alpha=0.5, diag=1.0)
    config = symmetric.TileConfig(16, 32 if large else 16, 32, num_warps=4, num_stages=2)
    out = poisoned(2, 80, 80, dtype=torch.float16)
    product = symmetric._launch(S, R, None, out, (1.0, 0.0, 0.0), config)
    want = S.double() @ R.double()
    # R and S are rounded polynomials of one matrix: they commute up to fp16's last place.
    assert relative_error(product, want) < 2 * EPSILON[torch.float16]
    # Where a tile is too large to be transposed, 8 x 8 squares on the diagonal stay as they came.
    square = torch.arange(80) // (8 if large else 1)
    mirrored = (square[:, None] != square[None, :]).to(product.device)
    assert torch.equal(product * mirrored, product.mT * mirrored)
    assert relative_error(product, product.mT.double()) < 2 * EPSILON[torch.float16]


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("m", [16, 31, 64, 100, 144])
def test_the_tiles_cover_the_result_whatever_their_shape(m, ratio):
    config = symmetric.TileConfig(16, 16 * ratio, 32, num_warps=4, num_stages=2)
    X = randn(2, m, 40, dtype=torch.float16)
    out = symmetric._launch(X, X, None, poisoned(2, m, m, dtype=X.dtype), (1.0, 0.0, 0.0), config)
    assert relative_error(out, symmetric.gram_reference(X.double())) < EPSILON[torch.float16]
    rows, columns = range(0, m, 16), range(0, m, 16 * ratio)
    assert config.num_tiles(m) == sum(row + 15 >= column for row in rows for column in columns)


def test_products_refuse_what_they_would_get_wrong():
    X = randn(2, 16, 32, dtype=torch.float16)
    with pytest.raises(ValueError, match="contiguous"):
        symmetric.gram(X.mT)
    with pytest.raises(ValueError, match="float32"):
        symmetric.gram(X.float())
    R = symmetric.gram(X)
    with pytest.raises(ValueError, match="another tensor"):
        symmetric.symmetric_product(R, R, out=R)


@pytest.mark.parametrize(("num", "m", "n"), [(3, 70, 90), (2, 130, 160), (140, 65, 64)])
def test_gram_reports_its_sum_of_squares(num, m, n):
    X = randn(num, m, n, dtype=torch.float16)
    squares = poisoned(num, symmetric.num_parts(num, m), dtype=torch.float32)
    A = symmetric.gram(X, scale=1 / n, squares=squares)
    want = A.double().square().sum((1, 2))
    assert torch.allclose(squares.double().sum(1), want, rtol=1e-3)


@pytest.mark.skipif(not ON_GPU, reason="Gluon has no interpreter")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("num", "m", "n"), [(400, 128, 72), (70, 384, 200), (48, 512, 512)])
def test_groups_that_take_turns_compute_the_same(num, m, n, dtype):
    X = randn(num, m, n, dtype=dtype)
    out = poisoned(num, m, m, dtype=dtype)
    if not symmetric._takes_pingpong(X, X, None, out):
        pytest.skip("this version of Triton takes the other kernel")
    squares = poisoned(num, symmetric.num_parts(num, m), dtype=torch.float32)
    scale = torch.linspace(0.5, 1.0, num, device=DEVICE) / (4 * n)
    R = symmetric.gram(X, out, scale, squares)
    assert relative_error(R, symmetric.gram_reference(X.double(), scale=scale)) < EPSILON[dtype]
    assert torch.equal(R, R.mT)
    assert torch.allclose(squares.sum(1), R.float().square().sum((1, 2)), rtol=1e-2)
    Z = symmetric.symmetric_product(R, R, alpha=2.0, C=R, beta=scale, diag=-1.0)
    W = R.double()
    want = symmetric.symmetric_product_reference(W, W, alpha=2.0, C=W, beta=scale, diag=-1.0)
    assert relative_error(Z, want) < EPSILON[dtype]
    product = symmetric.symmetric_product(R, Z)
    assert relative_error(product, W @ Z.double()) < 2 * EPSILON[dtype]
    assert torch.equal(product, product.mT)


@pytest.mark.skipif(not ON_GPU, reason="Gluon has no interpreter")
@pytest.mark.parametrize("which", ["X", "out"])
def test_what_does_not_start_on_sixteen_bytes_takes_the_other_kernel(which):
    """A slice of a buffer is as contiguous as any tensor, and the copy engine refuses it."""

    def off(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view_as(x).copy_(x)

    X, out = randn(160, 128, 64, dtype=torch.float16), poisoned(160, 128, 128, dtype=torch.float16)
    X, out = (off(X), out) if which == "X" else (X, off(out))
    assert relative_error(symmetric.gram(X, out), X.double() @ X.double().mT) < 2**-11


class Compiles:
    """A kernel that keeps the arguments which it was compiled for, and those of later launches."""

    def __init__(self):
        self.compiled, self.launched = [], []

    def __getitem__(self, grid):
        def first(*arguments, **_):
            self.compiled.append(arguments)
            return {(grid[0], 1, 1): lambda *later: self.launched.append(later)}

        return first


def test_a_kept_kernel_has_no_number_compiled_in(monkeypatch):
    """Triton makes the integer 1 a constant of the kernel; the next alpha would be ignored."""
    if not triton.__version__.startswith(symmetric._PINGPONG_WITH):
        pytest.skip("this version of Triton takes the other kernel")
    from mesotron.optim.triton import pingpong

    kernel = Compiles()
    monkeypatch.setattr(pingpong, "_pingpong_kernel", kernel)
    monkeypatch.setattr(pingpong, "_compiled", {})
    X = torch.zeros(2, 128, 128, dtype=torch.float16)
    for alpha in (1, 2.0):
        pingpong.launch(X, X, None, torch.empty_like(X), (alpha, 0, 0), num_programs=1)
    assert [type(x) for x in kernel.compiled[0][5:8]] == [float] * 3
    assert [arguments[5] for arguments in kernel.launched] == [2.0]


COMPILE_PINGPONG = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from mesotron.optim.triton.pingpong import _pingpong_kernel as kernel

def box(width):
    layout = gl.NVMMASharedLayout.get_default_for([128, width], gl.float16)
    return f"tensordesc<fp16[128, {width}],{layout!r}>"

constants = dict(SAME=True, HAS_C=True, SQUARES=True, ALPHAS=True, BETAS=False, DIAGS=False)
kinds = dict(A=box(64), B=box(64), C=box(128), out=box(128), squares="*fp32", alpha="*fp32")
kinds |= dict(beta="fp32", diag="fp32", num_blocks="i32", m="i32", n="i32")
kinds |= dict.fromkeys(constants, "constexpr")
places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
source = GluonASTSource(kernel, {name: kinds[name] for name in kernel.arg_names}, places)
done = compile(source, GPUTarget("cuda", 90, 32), dict(num_warps=4, maxnreg=168))
print(done.metadata.shared, done.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.slow
def test_the_kernel_that_no_interpreter_runs_compiles_for_hopper(tmp_path):
    if not triton.__version__.startswith(symmetric._PINGPONG_WITH):
        pytest.skip("this version of Triton takes the other kernel")
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE_PINGPONG]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024  # what a multiprocessor has
    assert products == 2 * 2 * 8  # two groups; the first step and the loop; 2 halves of 4 slices


# --- tables of windows ----------------------------------------------------------------------------


def test_a_table_refuses_mixed_or_scattered_windows():
    with pytest.raises(ValueError, match="at least one"):
        windows.tabulate([])
    with pytest.raises(ValueError, match="split the bucket"):
        windows.tabulate([randn(2, 2)] * 65536)
    with pytest.raises(ValueError, match="one kind of window"):
        windows.tabulate([randn(4, 8), randn(4, 6)])
    with pytest.raises(ValueError, match="contiguous along one axis"):
        windows.tabulate([randn(8, 16)[::2, ::2]])
    with pytest.raises(ValueError, match="kernels take"):
        windows.triton_dtype(torch.float64)


def test_a_table_knows_what_is_aligned():
    assert windows.tabulate([randn(8, 16)]).aligned
    assert not windows.tabulate([randn(8, 18)]).aligned
    assert not windows.tabulate([randn(8, 16)[:, 1:9]]).aligned


def test_a_table_can_be_pointed_at_fresh_gradients():
    old, new = window(6, 10, "transposed"), window(6, 10, "transposed")
    table = windows.tabulate([old])
    table.rebase([new.data_ptr()])
    assert torch.equal(pack.inspect(table), pack.inspect_reference([new]))
    with pytest.raises(ValueError, match="one for each"):
        table.rebase([1, 2])


# --- gradients to packed updates ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_finds_peaks_and_everything_that_is_not_finite(layout, dtype):
    views = [window(70, 100, layout, dtype) for _ in range(4)]
    views[1].zero_()
    views[2][69, 99] = -torch.inf
    views[3][0, 0] = torch.nan
    peak = pack.inspect(windows.tabulate(views))
    assert torch.equal(peak[:3], pack.inspect_reference(views)[:3])  # a NaN has many patterns
    assert peak[1] == 0
    assert pack.is_finite(peak).tolist() == [True, True, False, False]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("g_dtype", "m_dtype", "x_dtype"),
    [
        (torch.float32, torch.float32, torch.float16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float16),
    ],
)
def test_update_equals_its_reference(g_dtype, m_dtype, x_dtype, layout, nesterov):
    m, n = 66, 100
    # Odd blocks lie the other way: one launch serves a shape and its transpose.
    layouts = (layout, "transposed") if layout != "transposed" else ("transposed", "rows")
    grads = [window(m, n, kind, g_dtype) for kind in layouts]
    momenta = [window(m, n, kind, m_dtype) for kind in layouts]
    plain = [view.clone() for view in momenta]
    G, M = windows.tabulate(grads), windows.tabulate(momenta)
    peak, m_peak = pack.inspect(G), pack.inspect(M)
    plain_peak, X = m_peak.clone(), poisoned(2, m, n, dtype=x_dtype)
    plain_X = X.clone()
    mu = scalar(0.9)
    packed = pack.update_momentum(G, M, X, mu, peak, m_peak, nesterov=nesterov)
    expected = pack.update_momentum_reference(
        grads, plain, plain_X, mu, peak, plain_peak, nesterov=nesterov
    )
    assert relative_error(X, plain_X) < EPSILON[x_dtype]
    assert X.abs().max() <= 1
    assert torch.allclose(packed.sumsq, X.float().square().sum(dim=(1, 2)), rtol=1e-5)
    for got, want in zip(packed, expected, strict=True):
        assert torch.allclose(got, want, rtol=10 * EPSILON[x_dtype])
    for got, want in zip(momenta, plain, strict=True):
        assert relative_error(got, want) < EPSILON[m_dtype]
    assert torch.equal(m_peak, pack.inspect_reference(momenta))


def run_update(gradient, momentum, dtype=torch.float16):
    G, M = windows.tabulate([gradient]), windows.tabulate([momentum])
    X = poisoned(1, *gradient.shape, dtype=dtype)
    momentum_peak = pack.inspect(M)
    packed = pack.update_momentum(G, M, X, scalar(0.95), pack.inspect(G), momentum_peak)
    return X, packed.sumsq


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("exponent", [-100, -20, 20, 100])
def test_gradients_of_any_scale_pack_to_the_same_bits(exponent, dtype):
    """2^-100 to 2^100 is 1e-30 to 1e30; powers of two, so that equality can be exact."""
    gradient, momentum = randn(32, 48), randn(32, 48)
    X, sumsq = run_update(gradient, momentum.clone(), dtype)
    factor = 2.0**exponent
    scaled_X, scaled_sumsq = run_update(gradient * factor, momentum * factor, dtype)
    assert torch.equal(X, scaled_X)
    assert torch.equal(sumsq, scaled_sumsq)


def test_an_outlier_does_not_push_the_rest_below_fp16():
    gradient = randn(32, 48) * 1e-3
    gradient[0, 0] = 10.0
    X, _ = run_update(gradient.clone(), torch.zeros_like(gradient))
    rest, want = X[0, 1:], gradient[1:] * (X[0, 1, 1].double() / gradient[1, 1].double())
    assert relative_error(rest, want) < 2 * EPSILON[torch.float16]


def test_zero_gradients_pack_to_zero():
    X, sumsq = run_update(torch.zeros(16, 32, device=DEVICE), torch.zeros(16, 32, device=DEVICE))
    assert not X.any()
    assert sumsq.item() == 0


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_window_that_is_not_finite_keeps_its_momentum(poison):
    grads, momenta = [randn(70, 90) for _ in range(3)], [randn(70, 90) for _ in range(3)]
    grads[1][69, 3] = poison
    before = [view.clone() for view in momenta]
    G, M = windows.tabulate(grads), windows.tabulate(momenta)
    peak, m_peak, X = pack.inspect(G), pack.inspect(M), poisoned(3, 70, 90, dtype=torch.float16)
    kept_peak = m_peak[1].item()
    packed = pack.update_momentum(G, M, X, scalar(0.95), peak, m_peak)
    assert torch.equal(momenta[1], before[1])
    assert not torch.equal(momenta[0], before[0])
    assert not X[1].any()
    assert (packed.sumsq > 0).tolist() == [True, False, True]
    assert packed.norm[1] == packed.inverse_square[1] == 1  # nothing divides by zero
    assert m_peak[1].item() == kept_peak


def test_momentum_laid_out_against_its_gradient_is_refused():
    G, M = windows.tabulate([randn(8, 16)]), windows.tabulate([randn(16, 8).T])
    peak = bits(1.0)
    with pytest.raises(ValueError, match="transposed against its gradient"):
        pack.update_momentum(G, M, randn(1, 8, 16).half(), scalar(0.9), peak, peak.clone())


# --- the filtered update to the weights -----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_back_equals_its_reference(layout, dtype):
    weights = [window(66, 100, kind, dtype) for kind in (layout, "transposed", layout)]
    plain = [view.clone() for view in weights]
    F = randn(3, 66, 100, dtype=torch.float16)
    lr, scale = scalar(0.1), torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    decay = torch.tensor([0.0, 0.5, 0.5], device=DEVICE)
    peak, gain = bits(1.0, 2.0, torch.inf), torch.tensor([1.0, 4.0, 2.0], device=DEVICE)
    table = windows.tabulate(weights)
    energy = writeback.write_back(table, F, lr, decay, scale, peak, gain=gain)
    want = writeback.write_back_reference(plain, F, lr, decay, scale, peak, gain=gain)
    assert torch.allclose(energy.sum(1), want.sum(1), rtol=1e-5)
    for got, expected in zip(weights, plain, strict=True):
        assert relative_error(got, expected) < EPSILON[dtype]
    assert torch.equal(weights[2], plain[2])  # skipped: neither step nor decay


def round_stochastically(value, seed, write_back=writeback.write_back, layout="rows"):
    """A bf16 weight of 1 after the step 1 - value, 16384 times over."""
    weights = [window(128, 128, layout, torch.bfloat16, fill=torch.tensor(1.0))]
    given = windows.tabulate(weights) if write_back is writeback.write_back else weights
    F = torch.ones(1, 128, 128, device=DEVICE, dtype=torch.float16)
    lr, one = scalar(1 - value), torch.ones(1, device=DEVICE)
    write_back(given, F, lr, scalar(0.0), one, bits(1.0), scalar(seed), gain=one)
    return weights[0]


@pytest.mark.parametrize("write_back", [writeback.write_back, writeback.write_back_reference])
@pytest.mark.parametrize("layout", ["rows", "transposed"])
@pytest.mark.parametrize("value", [1 - 2**-10, 1 - 2**-11, 1 - 3 * 2**-10])
def test_stochastic_rounding_is_unbiased(value, layout, write_back):
    rounded = round_stochastically(value, 7, write_back, layout).double()
    grid = 2**-8  # bf16's step below 1
    assert set(rounded.unique().tolist()) <= {1.0, 1 - grid}
    p = (1 - value) / grid
    standard_error = grid * (p * (1 - p) / rounded.numel()) ** 0.5
    assert abs(rounded.mean().item() - value) < 4 * standard_error


def test_stochastic_rounding_follows_its_seed():
    value = 1 - 2**-9
    first, again, other = (round_stochastically(value, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    # Half of the entries go down in each draw; independent draws agree on half of them.
    agreement = (first == other).double().mean().item()
    assert abs(agreement - 0.5) < 0.02
    # Neighbours come from the same random words: they must not move together.
    down = (first < 1).double()
    for axis in (0, 1):
        together = (down == down.roll(1, axis)).double().mean().item()
        assert abs(together - 0.5) < 0.02


def test_stochastic_rounding_is_refused_for_float32():
    table = windows.tabulate([randn(8, 16)])
    F, one = randn(1, 8, 16).half(), torch.ones(1, device=DEVICE)
    with pytest.raises(ValueError, match="bfloat16"):
        writeback.write_back(
            table, F, scalar(0.1), scalar(0.0), one, bits(1.0), scalar(1), gain=one
        )


def test_the_alignment_of_update_and_gradient():
    grads = [window(70, 100, "rows"), window(70, 100, "transposed"), window(70, 100, "rows")]
    F = (torch.stack(grads) + randn(3, 70, 100)).half()
    grads[1] *= 1e-25
    grads[2][0, 0] = torch.nan
    G = windows.tabulate(grads)
    peak = pack.inspect(G)
    want = writeback.alignment_cosine(writeback.sample_alignment_reference(grads, F, peak))
    everything = writeback.alignment_cosine(writeback.sample_alignment(G, F, peak, 1.0))
    sampled = writeback.alignment_cosine(writeback.sample_alignment(G, F, peak, 0.5))
    assert torch.allclose(everything.double(), want, atol=1e-5)
    assert torch.allclose(sampled.double(), want, atol=0.05)
    assert abs(want[0].item() - 0.5**0.5) < 0.02
    assert want[2] == 0
    with pytest.raises(ValueError, match="share"):
        writeback.sample_alignment(G, F, peak, 0.0)


# --- small blocks, wholly on the chip -------------------------------------------------------------


def spectra(m, n, dtype):
    """Random, rank 1, zero, orthogonal, and geometrically decaying blocks with peak 1."""
    X = randn(5, m, n)
    X[1] = X[1, :, :1] @ X[1, :1, :]
    X[2] = 0
    U, _, V = torch.linalg.svd(randn(m, n), full_matrices=False)
    X[3] = U @ V
    X[4] = U @ torch.diag(2.0 ** -torch.arange(float(min(m, n)), device=DEVICE)) @ V
    return (X / X.abs().amax((1, 2), keepdim=True).clamp(min=1e-9)).to(dtype)


@pytest.mark.parametrize("dtype", PRODUCTS)
@pytest.mark.parametrize(("m", "n"), [(16, 40), (13, 37), (32, 300), (64, 64), (100, 130)])
def test_heads_equal_the_float64_filter(m, n, dtype):
    X = spectra(m, n, dtype)
    out, statistics = heads.filter_heads(X, MUON.to(DEVICE), gain=n**0.5)
    want, expected = heads.filter_heads_reference(X.double(), MUON, gain=n**0.5)
    assert not out[2].any()
    for block in (0, 1, 3, 4):
        # Against float64 on the same 16-bit input. The plain fp16 iteration is 0.14 off on rank 1.
        assert relative_error(out[block], want[block]) < EPSILON[dtype] + 8e-3
    assert torch.allclose(statistics.energy.double(), expected.energy, rtol=1e-5)
    assert torch.allclose(statistics.concentration.double(), expected.concentration, rtol=1e-5)
    assert torch.allclose(statistics.passed.double(), expected.passed, rtol=2e-2)


def test_heads_equal_the_singular_value_oracle():
    X = spectra(24, 40, torch.float16)
    out, _ = heads.filter_heads(X, MUON.to(DEVICE))
    U, sigma, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    sigma = sigma / sigma.norm(dim=1, keepdim=True).clamp(min=1e-30)
    for a, b, c in MUON.double().tolist():
        sigma = sigma * (a + b * sigma**2 + c * sigma**4)
    want = U @ torch.diag_embed(sigma) @ Vh
    for block in (0, 1, 3, 4):
        assert relative_error(out[block], want[block]) < 8e-3


def round_to(dtype, x):
    return x.to(dtype).float()


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_heads_are_closer_to_float64_than_the_plain_iteration(dtype):
    X = spectra(48, 64, dtype)
    out, _ = heads.filter_heads(X, MUON.to(DEVICE))
    want, _ = heads.filter_heads_reference(X.double(), MUON)
    norm = X.float().square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-9)
    plain = round_to(dtype, X.float() / norm)
    for a, b, c in MUON.tolist():  # every product summed in fp32 and rounded, as tensor cores do
        A = round_to(dtype, plain @ plain.mT)
        Z = round_to(dtype, b * A + c * (A @ A))
        plain = round_to(dtype, a * plain + Z @ plain)
    for block in (0, 1, 3, 4):
        ours, theirs = (relative_error(x[block], want[block]) for x in (out, plain))
        assert ours < 0.6 * theirs


def test_heads_may_write_over_their_input():
    X = randn(2, 16, 200, dtype=torch.float16) / 4
    want, _ = heads.filter_heads(X, MUON.to(DEVICE))
    out, _ = heads.filter_heads(X, MUON.to(DEVICE), out=X)
    assert out is X
    assert torch.equal(X, want)


def test_heads_refuse_large_blocks():
    with pytest.raises(ValueError, match="m <= 128, got 129"):
        heads.filter_heads(randn(1, 129, 200, dtype=torch.float16), MUON.to(DEVICE))


# --- only on the device ---------------------------------------------------------------------------


@pytest.mark.skipif(not ON_GPU, reason="needs 9 GB on a GPU")
def test_offsets_past_two_to_the_31():
    X = torch.randn(520, 2048, 2048, device=DEVICE, dtype=torch.float16)
    A = symmetric.gram(X, scale=1 / 2048)
    want = symmetric.gram_reference(X[-1:].double(), scale=1 / 2048)
    assert relative_error(A[-1:], want) < EPSILON[torch.float16]


@pytest.mark.skipif(not ON_GPU, reason="needs CUDA graphs")
def test_a_captured_step_follows_its_device_scalars():
    assert kernels.available(DEVICE)
    gradient, momentum, weight = randn(64, 96), torch.zeros(64, 96, device=DEVICE), randn(64, 96)
    G, M, W = (windows.tabulate([view]) for view in (gradient, momentum, weight))
    X = torch.empty(1, 64, 96, device=DEVICE, dtype=torch.float16)
    mu, lr, zero, one = scalar(0.9), scalar(0.0), scalar(0.0), torch.ones(1, device=DEVICE)
    coefficients, m_peak = MUON.to(DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def step():
        peak = pack.inspect(G)
        pack.update_momentum(G, M, X, mu, peak, m_peak)
        F, _ = heads.filter_heads(X, coefficients)
        A = symmetric.gram(F)
        writeback.write_back(W, F, lr, zero, one, peak, gain=one)
        return A

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        A = step()
    before = weight.clone()
    graph.replay()
    assert torch.equal(weight, before)  # lr is still 0
    lr.fill_(0.5)
    graph.replay()
    want, _ = heads.filter_heads_reference(X.double(), MUON)
    assert relative_error(before - weight, 0.5 * want[0]) < 1e-3
    assert relative_error(A, want @ want.mT) < 2e-3
