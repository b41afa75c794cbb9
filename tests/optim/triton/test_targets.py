"""The kernels compile for GPUs that are not here, and fit into their shared memory. Triton compiles
for any target on any machine, but not where it interprets: TRITON_INTERPRET=0."""

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles with TRITON_INTERPRET=0", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from mesotron.optim.triton import adamw, elementwise, heads, symmetric  # noqa: E402
from mesotron.rlvr.passes.kernels import gate, norm, rotary  # noqa: E402
from mesotron.rlvr.passes.kernels import head as training_head  # noqa: E402
from mesotron.sampling.kernels import attention, head  # noqa: E402

# Compute capability: shared memory that a program may take, in bytes.
TARGETS = {
    80: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}


def shared_bytes(kernel, target, types, constants, **options):
    """Compile as for aligned operands, for which Triton pipelines the loads."""
    names = kernel.arg_names
    aligned = [i for i, name in enumerate(names) if types.get(name, "").startswith(("*", "i"))]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )

    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return compiled.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_filters_of_small_blocks_fit(target):
    rows = 128 if heads._SHARED_BYTES[128] <= TARGETS[target] else 64
    config = dict(heads._CONFIGS[rows])
    types = dict(
        X="*fp16",
        out="*fp16",
        coefficients="*fp32",
        statistics="*fp32",
        m="i32",
        n="i32",
    )

    types |= dict(num_steps="i32", gain="fp32")
    constants = {"P": rows, "TILE_N": config.pop("TILE_N")}
    assert (
        shared_bytes(
            heads._heads_kernel,
            target,
            types,
            constants,
            **config,
        )
        <= TARGETS[target]
    )

    assert TARGETS[target] < heads._SHARED_BYTES[128] or rows == 128


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", [symmetric._SMALL, symmetric._LARGE], ids=["small", "large"])
def test_symmetric_products_fit(target, config):
    types = {name: "*fp16" for name in ("A", "B", "C", "out")} | {"squares": "*fp32"}
    types |= dict(
        alpha="fp32",
        beta="fp32",
        diag="fp32",
        num_blocks="i32",
        m="i32",
        n="i32",
    )

    constants = dict(
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        TILE_K=config.tile_k,
        TMA=False,
    )

    constants |= dict(
        ALPHAS=False,
        BETAS=False,
        DIAGS=False,
        PERSISTENT=config.persistent > 0,
    )

    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    found = shared_bytes(
        symmetric._symmetric_kernel,
        target,
        types,
        constants,
        **options,
    )

    assert 0 < found <= TARGETS[target]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_elementwise_kernels_compile(target):
    bf16 = elementwise.tl.bfloat16
    types = dict(
        grads="*i64",
        table="*i64",
        chunks="*i32",
        peak="*i32",
        factors="*fp32",
    )

    types |= dict(
        corrections="*fp32",
        seeds="*i32",
        sums="*fp32",
    )

    constants = dict(
        W_DTYPE=bf16,
        G_DTYPE=bf16,
        ALIGNED=True,
        CHUNK=adamw.CHUNK,
    )

    shared_bytes(
        adamw._adamw_kernel,
        target,
        types,
        constants,
        num_warps=8,
    )

    types = dict(
        G="*i64",
        M="*i64",
        X="*fp16",
        mu_at="*fp32",
        gradient_peak="*i32",
    )

    types |= dict(
        momentum_peak="*i32",
        next_momentum_peak="*i32",
        energies="*fp32",
    )

    types |= dict(m="i32", n="i32")
    constants = dict(
        G_DTYPE=bf16,
        M_DTYPE=elementwise.tl.float32,
        NESTEROV=True,
        ALIGNED=True,
    )

    constants |= dict(TILE=elementwise.TILE)
    found = shared_bytes(
        elementwise._update_kernel,
        target,
        types,
        constants,
        num_warps=4,
    )

    assert found <= TARGETS[target]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("H", "K", "D"), [(9, 3, 64), (16, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_decoder_kernels_fit(target, H, K, D, dtype):
    pointers = ("query", "keys", "values", "out", "both", "cache", "cos", "sin", "norms")
    types = {name: f"*{dtype}" for name in pointers}
    types |= {name: "*i64" for name in ("place", "prompt_rows", "starts")}
    types |= {name: "i32" for name in ("prompt_size", "length", "num_rows", "window")}
    types |= {"scale": "fp32", "eps": "fp32"}
    HP, DP, RP = (triton.next_power_of_2(n) for n in (H + 2 * K, D, max(H // K, 16)))

    constants = {
        "H": H,
        "K": K,
        "D": D,
        "DP": DP,
        "RP": RP,
        "TILE": attention.TILE,
    }

    found = shared_bytes(
        attention._attend_kernel,
        target,
        types,
        constants,
        num_warps=attention.WARPS if D <= attention.LARGE_HEAD else attention.LARGE_WARPS,
    )

    assert found <= TARGETS[target]
    constants = {
        "H": H,
        "K": K,
        "D": D,
        "HP": HP,
        "HALF": DP // 2,
        "NORMS": True,
    }

    assert shared_bytes(attention._turn_kernel, target, types, constants) <= TARGETS[target]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_head_kernels_fit(target, rows, dtype):
    types = {name: f"*{dtype}" for name in ("x", "head")}
    types |= {name: "*fp32" for name in ("highest", "total", "draws", "logprobs")}
    types |= {name: "*i64" for name in ("slots", "count", "tokens")}
    types |= {name: "i32" for name in ("num_rows", "V", "E", "T", "N")} | {"scale": "fp32"}
    tile_e = head.tile_e_of(4 if dtype == "fp32" else 2)

    for kernel, constants, warps in (
        (head._mass_kernel, {"TILE_B": rows}, head.warps_of(rows)),
        (head._token_kernel, {"TP": 2048, "GREEDY": False}, 8),
    ):
        constants |= {"TILE_V": head.TILE_V, "TILE_E": tile_e}
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        found = shared_bytes(kernel, target, own, constants, num_warps=warps)

        assert found <= TARGETS[target]


STREAM = {"x": "*fp32", "total": "*fp32", "grad_x": "*fp32", "grad_total": "*fp32"}
FULL = ("weight", "scales", "grad_weight", "cos", "sin", "log_z", "entropies", "logprobs")
FULL += ("grad_logprobs", "grad_entropies")
HALF = ("delta", "normed", "grad_normed", "grad_delta", "gate", "up", "out", "grad", "logits")
HALF += ("grad_gate", "grad_up")
BLOCK_TYPES = STREAM | dict.fromkeys(FULL, "*fp32") | dict.fromkeys(HALF, "*bf16")
BLOCK_TYPES |= dict.fromkeys(("N", "E", "H", "D", "V", "size"), "i32")
BLOCK_TYPES |= {"labels": "*i64", "eps": "fp32", "inverse_t": "fp32"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("E", [128, 576, 896, 2048])
def test_kernels_of_a_training_pass_fit(target, E):
    tile = norm.sizes(E)
    warps = tile.pop("num_warps")
    kernels = [
        (norm._forward_kernel, {"ADDS": True, **tile}, warps),
        (norm._backward_kernel, {"ROUNDS": True, "HAS_TOTAL": True, **tile}, warps),
        (rotary._kernel, {"BACK": True, "HP": 16, "HALF": 64}, 4),
        (gate._forward_kernel, {"BLOCK": gate.BLOCK}, gate.WARPS),
        (gate._backward_kernel, {"BLOCK": gate.BLOCK}, gate.WARPS),
        (training_head._measure_kernel, {"BLOCK": training_head.BLOCK}, training_head.WARPS),
    ]
    constants = {"HAS_ENTROPIES": True, "BLOCK": training_head.BLOCK}
    kernels.append((training_head._gradient_kernel, constants, training_head.WARPS))

    for kernel, constants, warps in kernels:
        types = {}
        for name in kernel.arg_names:
            if name in BLOCK_TYPES:
                types[name] = BLOCK_TYPES[name]

        found = shared_bytes(kernel, target, types, constants, num_warps=warps)
        assert found <= TARGETS[target]
