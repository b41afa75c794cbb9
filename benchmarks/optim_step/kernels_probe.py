"""Time every optimizer kernel beside cuBLAS or a plain copy, as JSON and as a table, on a CUDA GPU.

    python benchmarks/optim_step/kernels_probe.py --out kernels.json

Device time only: each job is captured into a CUDA graph, so launch gaps do not count. Rates are
effective, by the FLOPs or bytes of the plain operation. Correctness is tests/test_kernels.py's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench

from mesotron.optim.kernels import heads, pack, symmetric, windows, writeback

# The buckets of real models (GPT-2 124M, Qwen2.5-0.5B, Qwen3-1.7B, an 8B) and a few small ones.
PRODUCTS = [
    (768, 64, 896), (48, 128, 896), (512, 128, 1024), (16, 256, 1024), (128, 256, 1024),
    (1, 512, 512), (16, 512, 512), (64, 512, 1536), (1, 768, 3072), (12, 768, 768), (24, 768, 3072),
    (48, 768, 768), (2, 896, 4864), (48, 896, 896), (72, 896, 4864), (4, 1024, 4096),
    (56, 1024, 2048), (1, 2048, 2048), (56, 2048, 2048), (28, 2048, 6144), (8, 4096, 4096),
    (4, 4096, 14336),
]  # fmt: skip
HEADS = [(336, 16, 896), (336, 32, 2048), (768, 64, 896), (48, 128, 896), (1344, 128, 2048)]
BUCKETS = [(48, 768, 768), (768, 64, 896), (72, 896, 4864)]
MUON = [(3.4445, -4.7750, 2.0315)] * 5
Row = dict[str, str | int | float]


def microseconds(job: Callable[[], object], repeats: int = 4) -> float:
    """Median device time of one job."""
    job()  # compiles, and warms cuBLAS, outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            job()
    return do_bench(graph.replay, warmup=20, rep=60, return_mode="median") * 1e3 / repeats


def time_products() -> list[Row]:
    """X X^T and a I + b R + c R^2, ours and cuBLAS's, in TFLOP/s of the full product."""
    rows: list[Row] = []
    for num_blocks, m, n in PRODUCTS:
        X = torch.randn(num_blocks, m, n, device="cuda", dtype=torch.float16)
        R = symmetric.gram(X, scale=1 / (4 * n))
        out = torch.empty_like(R)
        flops = 2 * num_blocks * m * m
        # Bound as defaults: the loop goes on while the graph still knows these tensors.
        jobs = {
            "gram": (n, lambda X=X, out=out: symmetric.gram(X, out, 0.1)),
            "gram, cuBLAS": (n, lambda X=X, out=out: torch.bmm(X, X.mT, out=out)),
            "polynomial": (m, lambda R=R, out=out: polynomial(R, out)),
            "polynomial, cuBLAS": (m, lambda R=R, out=out: plain_polynomial(R, out)),
        }
        for name, (depth, job) in jobs.items():
            us = microseconds(job)
            rows.append(row(name, num_blocks, m, n, us, "TFLOP/s", flops * depth / us / 1e6))
    return rows


def polynomial(R: Tensor, out: Tensor) -> Tensor:
    a, b, c = MUON[0]
    return symmetric.symmetric_product(R, R, out, alpha=c, C=R, beta=b, diag=a)


def plain_polynomial(R: Tensor, out: Tensor) -> None:
    a, b, c = MUON[0]
    torch.baddbmm(R, R, R, beta=b, alpha=c, out=out)
    out.diagonal(dim1=1, dim2=2).add_(a)


def time_heads() -> list[Row]:
    """The whole five-step filter on chip and as batched products, by 6 bytes an element."""
    rows: list[Row] = []
    coefficients = torch.tensor(MUON, device="cuda")
    for num_blocks, m, n in HEADS:
        X = torch.randn(num_blocks, m, n, device="cuda").bfloat16() / (m * n) ** 0.5
        out = torch.empty_like(X)
        jobs = {
            "heads": lambda X=X, out=out: heads.filter_heads(X, coefficients, out),
            "heads, batched products": lambda X=X: plain_filter(X),
        }
        for name, job in jobs.items():
            us = microseconds(job)
            rows.append(row(name, num_blocks, m, n, us, "GB/s", 6 * X.numel() / us / 1e3))
    return rows


def plain_filter(X: Tensor) -> Tensor:
    for a, b, c in MUON:
        A = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def time_buckets() -> list[Row]:
    """The passes over a bucket, half of it transposed, by the bytes they must move."""
    big = torch.randn(1 << 28, device="cuda")
    us = microseconds(lambda: torch.neg(big[1 << 27 :], out=big[: 1 << 27]))  # a copy by a kernel
    rows = [row("plain copy", 1, 1, 1 << 27, us, "GB/s", (1 << 30) / us / 1e3)]
    for shape in BUCKETS:
        for dtype in (torch.float32, torch.bfloat16):
            rows += time_bucket(*shape, dtype)
    return rows


def time_bucket(num_blocks: int, m: int, n: int, dtype: torch.dtype) -> list[Row]:
    """One bucket: gradients and weights of this dtype, momentum in fp32, stochastic if bf16."""
    grads, weights = (half_transposed(num_blocks, m, n, dtype) for _ in range(2))
    momenta = half_transposed(num_blocks, m, n, torch.float32)
    G, W, M = (windows.tabulate(views) for views in (grads, weights, momenta))
    X = torch.empty(num_blocks, m, n, device="cuda", dtype=torch.float16)
    peak, momentum_peak = pack.inspect(G), pack.inspect(M)
    mu, lr, decay = torch.tensor([0.95, 1e-3, 0.1], device="cuda").unbind()
    ones = torch.ones(num_blocks, device="cuda")
    seed = torch.tensor(1, device="cuda") if dtype == torch.bfloat16 else None
    width = dtype.itemsize
    jobs = {
        "inspect": (width, lambda: pack.inspect(G, peak)),
        "update": (width + 10, lambda: pack.update_momentum(G, M, X, mu, peak, momentum_peak)),
        "write back": (
            2 * width + 2,
            lambda: writeback.write_back(W, X, lr, decay, ones, peak, seed),
        ),
        "alignment": ((width + 2) / 64, lambda: writeback.sample_alignment(G, X, peak)),
        "normalise": (4, lambda: pack.normalise(X, ones)),
    }
    rows = []
    for name, (nbytes, job) in jobs.items():
        us = microseconds(job)
        rate = X.numel() * nbytes / us / 1e3
        rows.append(row(f"{name}, {str(dtype)[6:]}", num_blocks, m, n, us, "GB/s", rate))
    return rows


def half_transposed(num_blocks: int, m: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.randn(m, n, device="cuda").to(dtype)
        if block % 2
        else torch.randn(n, m, device="cuda").to(dtype).T
        for block in range(num_blocks)
    ]


def row(job: str, num_blocks: int, m: int, n: int, us: float, unit: str, rate: float) -> Row:
    return dict(job=job, B=num_blocks, m=m, n=n, us=round(us, 1), unit=unit, rate=round(rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("kernels.json"), help="JSON to write")
    out: Path = parser.parse_args().out
    rows = time_products() + time_heads() + time_buckets()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    for r in rows:
        print(
            f"{r['job']:24} {r['B']:5} {r['m']:5} {r['n']:6} {r['us']:8} us", r["rate"], r["unit"]
        )


if __name__ == "__main__":
    main()
