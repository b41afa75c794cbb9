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
import multiprocessing as mp
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._lib.mps import mps
from benchmarks._lib.results import write_json
from mesotron.optim import Muon, Pion

# Of a layer of SmolLM2-135M: queries, keys, values, output, gate, up, down.
SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
OPTIMIZERS = {"muon": (Muon, {}), "pion": (Pion, {"cutoff": "noise"})}
# Numbers of blocks of NaN that go back to the allocator, by their bytes: it keeps blocks of up to a
# mebibyte apart from larger ones, which it cuts out of one large block.
POISON = {2**19: 128, 2**31: 1}


class Step:
    """One step of an optimizer that starts from the same state each time."""

    def __init__(self, name: str, layers: int, device: str) -> None:
        params = [torch.nn.Parameter(torch.randn(s, device=device)) for s in SHAPES * layers]
        kind, options = OPTIMIZERS[name]
        self.params = params
        self.optimizer = kind(params, lr=1e-3, **options)

        # From all alike to a few large directions, as gradients are.
        for p in params:
            p.grad = torch.randn_like(p) * torch.rand(p.shape[1], device=device) ** 4

        self.optimizer.step()
        self.start = copies(self.tensors())

    def tensors(self) -> list[Tensor]:
        """Weights, then what the optimizer keeps of each."""
        kept = []
        for p in self.params:
            state = self.optimizer.state[p].values()
            kept += [x for x in state if isinstance(x, Tensor)]
        return [*(p.detach() for p in self.params), *kept]

    def run(self) -> list[Tensor]:
        """The state after a step from the start."""
        now = self.tensors()
        for x, kept in zip(now, self.start, strict=True):
            x.copy_(kept)
        self.optimizer.step()
        return now


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def repeat(name: str, layers: int, device: str, seconds: float, seed: int) -> dict[str, Any]:
    """Make the same step until the time is up; count the times that anything differs."""
    torch.manual_seed(seed)
    step = Step(name, layers, device)
    step.run()  # its scale is still that of the momentum before
    wanted = copies(step.run())

    different = []
    count = 0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        if count % 2 and device == "cuda":
            poison()

        found = compare(step.run(), wanted)
        if found:
            different.append({"step": count, **found})
        count += 1

    return {"optimizer": name, "seed": seed, "steps": count, "different": different}


def compare(now: list[Tensor], wanted: list[Tensor]) -> dict[str, Any]:
    """Which tensors differ, and how the first of them does; empty if all are equal."""
    pairs = list(zip(now, wanted, strict=True))
    bad = []
    for k, (a, b) in enumerate(pairs):
        if not torch.equal(a, b):
            bad.append(k)

    if not bad:
        return {}

    one, right = pairs[bad[0]]
    return {
        "tensors": bad,
        "shape": list(one.shape),
        "entries": int((one != right).sum()),
        "nan": int(one.isnan().sum()),
        "largest": float((one - right).abs().nan_to_num().max()),
    }


def poison() -> None:
    """Fill with NaN whatever memory is taken next.

    The allocator's free blocks are given up first: it would hand out one of the size that is asked
    for, which the step before has written, sooner than a piece of a larger one.
    """
    torch.cuda.empty_cache()
    blocks = []
    for size, number in POISON.items():
        for _ in range(number):
            blocks.append(torch.full((size // 4,), torch.nan, device="cuda"))
    del blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/repeat.json"))
    given = parser.parse_args()

    cells = []
    for seed in range(given.processes):
        name = list(OPTIMIZERS)[seed % 2]
        cells.append((name, given.layers, given.device, given.seconds, seed))

    folder = given.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    shares = given.device == "cuda" and given.processes > 1
    make_pool = mp.get_context("spawn").Pool
    with mps(folder, print, wanted=shares), make_pool(given.processes) as pool:
        found = pool.starmap(repeat, cells)

    write_json(found, given.out, indent=1)
    for name in OPTIMIZERS:
        mine = [one for one in found if one["optimizer"] == name]
        steps = sum(one["steps"] for one in mine)
        different = sum(len(one["different"]) for one in mine)
        print(f"{name}: {steps} steps by {len(mine)} processes, {different} of them different")


if __name__ == "__main__":
    main()
