"""Is a step bit-identical, however often it is repeated and whatever else runs on the GPU?

    python -m benchmarks.optim_step.repeat --processes 12 --seconds 60 --out results/repeat.json

Each process makes one step of SmolLM2's matrices over and over from the same weights, momentum and
gradient, and compares weights and momentum with those of the first time. On a GPU the memory that a
step takes uninitialised is full of NaN every other time. Several processes share the GPU by MPS, so
that kernels interleave in every order: a race, or a read of uninitialized memory, shows as a
difference. On a CPU: --device cpu --layers 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._lib.mps import mps
from mesotron.optim import Muon, Pion

# Of a layer of SmolLM2-135M: queries, keys, values, output, gate, up, down.
SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
OPTIMIZERS = {"muon": (Muon, {}), "pion": (Pion, {"cutoff": "noise"})}
# Numbers of blocks of NaN that go back to the allocator, by their bytes: it keeps blocks of up to a
# mebibyte apart from larger ones, which it cuts out of one large block.
POISON = {2**19: 128, 2**31: 1}


def repeat(name: str, layers: int, device: str, seconds: float, seed: int) -> dict[str, Any]:
    """Make the same step until the time is up; count the times that anything differs."""
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in SHAPES * layers]

    # From all alike to a few large directions, as gradients are.
    grads = [torch.randn_like(p) * torch.rand(p.shape[1], device=device) ** 4 for p in params]
    kind, options = OPTIMIZERS[name]
    optimizer = kind(params, lr=1e-3, **options)

    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()

    optimizer.step()
    start = [x.clone() for x in tensors(optimizer, params)]

    def step() -> list[Tensor]:
        now = tensors(optimizer, params)
        for x, kept in zip(now, start, strict=True):
            x.copy_(kept)

        optimizer.step()
        return now

    # Twice: the first time the step's scale is still that of the momentum before.
    wanted = [[x.clone() for x in step()] for _ in range(2)][-1]
    found: dict[str, Any] = {
        "optimizer": name,
        "seed": seed,
        "steps": 0,
        "different": [],
    }

    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if found["steps"] % 2 and device == "cuda":
            poison()

        now = step()
        bad = [k for k, (a, b) in enumerate(zip(now, wanted, strict=True)) if not torch.equal(a, b)]
        if bad:
            one = now[bad[0]]
            right = wanted[bad[0]]
            found["different"].append(
                {
                    "step": found["steps"],
                    "tensors": bad,
                    "shape": list(one.shape),
                    "entries": int((one != right).sum()),
                    "nan": int(one.isnan().sum()),
                    "largest": float((one - right).abs().nan_to_num().max()),
                }
            )

        found["steps"] += 1

    return found


def poison() -> None:
    """Fill with NaN whatever memory is taken next.

    The allocator's free blocks are given up first: it would hand out one of the size that is asked
    for, which the step before has written, sooner than a piece of a larger one.
    """
    torch.cuda.empty_cache()
    sizes = [size for size, number in POISON.items() for _ in range(number)]
    blocks = [torch.full((size // 4,), torch.nan, device="cuda") for size in sizes]
    del blocks


def tensors(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> list[Tensor]:
    """Weights, then what the optimizer keeps of each."""
    kept = [x for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor)]
    return [*(p.detach() for p in params), *kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/repeat.json"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    names = [list(OPTIMIZERS)[k % 2] for k in range(given.processes)]
    cells = [(n, given.layers, given.device, given.seconds, k) for k, n in enumerate(names)]
    shares = given.device == "cuda" and given.processes > 1

    side_by_side = mps(given.out.parent, print) if shares else nullcontext()
    with side_by_side, mp.get_context("spawn").Pool(given.processes) as pool:
        found = pool.starmap(repeat, cells)

    given.out.write_text(json.dumps(found, indent=1))
    for name in OPTIMIZERS:
        mine = [one for one in found if one["optimizer"] == name]
        steps = sum(one["steps"] for one in mine)
        different = sum(len(one["different"]) for one in mine)
        print(f"{name}: {steps} steps by {len(mine)} processes, {different} of them different")


if __name__ == "__main__":
    main()
