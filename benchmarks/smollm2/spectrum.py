"""The spectrum of gradients: how many directions, how much signal, and which cutoff keeps it.

At frozen weights the gradients of independent batches are taken apart. Half of them (A) says which
directions a filter would keep; the other half (B), of other noise, says what these are worth:
u_i^T B v_i is an unbiased estimate of the signal along A's i-th direction. A filter that passes the
first k takes a step of size sqrt(k) and goes down by the sum of their worth, so its cosine with B,
the sum over sqrt(k) ||B||, is how much a step of a given size gains.

Legend: G [K, m, n] gradients of K batches of one block, m <= n; sigma [m] of A, falling.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from benchmarks.smollm2.plan import PROJECTIONS, Cell, subject
from benchmarks.smollm2.supervised import RATE, Supervised
from benchmarks.smollm2.training import build, config_of, quiet_libraries
from mesotron.answers.verify import Verifier
from mesotron.probes import snr_from_norms
from mesotron.rlvr.parts import load
from mesotron.runs import RunFolder
from mesotron.spectral.filters import noise_edge

BATCHES = 16
LAYERS = 6  # evenly spaced; an SVD of every layer would take minutes
# Pion's limit cutoffs for k_p = 0 to 4, as fractions of the Frobenius norm.
PROMOTED = (0.8165, 0.5230, 0.2957, 0.1605, 0.0860)
MARGIN = 1.1  # of two samples of the same noise one has the larger largest direction
POINTS = 96  # singular values kept of a block
RELATIVE = (0.3, 0.4, 0.5)  # cutoffs as fractions of the largest singular value


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Projections of a few layers by their short name, such as 12.q_proj."""
    found = {
        f"{name.split('.')[2]}.{name.split('.')[-2]}": p
        for name, p in model.named_parameters()
        if name.split(".")[-2] in PROJECTIONS
    }

    layers = sorted({int(name.split(".")[0]) for name in found})
    places = {round(k * (len(layers) - 1) / max(LAYERS - 1, 1)) for k in range(LAYERS)}
    chosen = {layers[place] for place in places}

    return {name: p for name, p in found.items() if int(name.split(".")[0]) in chosen}


class Tap(TrainerCallback):
    """After `steps` steps freezes the weights and keeps the gradients of the steps that follow."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = trainer
        self.steps = steps
        self.kept: dict[str, list[Tensor]] = {name: [] for name in matrices(trainer.model)}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.steps:
            scheduler = self.trainer.lr_scheduler
            scheduler.base_lrs = [0.0 for _ in scheduler.base_lrs]

            for group in self.trainer.optimizer.param_groups:
                group["lr"] = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.steps:
            for name, p in matrices(self.trainer.model).items():
                if p.grad is not None:  # a batch without a signal
                    self.kept[name].append(p.grad.detach().float().clone())


def spectrum_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """The spectra of one source (rlvr or sft) after so many steps."""
    began = time.time()
    quiet_libraries()
    usual: Cell = {
        "optim": "muon",
        "objective": "grpo",
        "rate": 1e-4,
        "gain": 1.0,
        "set": [],
    }

    full = usual | cell | {"steps": cell["steps"] + BATCHES, "part": subject(cell)}
    gather = from_rlvr if cell["stage"] == "rlvr" else from_sft
    kept, heads, reached = gather(full, cell["steps"], given, deadline)
    if kept is None:
        return None

    blocks = []
    for name, gradients in kept.items():
        G = torch.stack(gradients)
        blocks.append(
            {
                "block": name,
                "view": "whole",
                **measure(G[:, None]),
            }
        )

        number = heads.get(name.split(".")[1])
        if number:
            blocks.append(
                {
                    "block": name,
                    "view": "heads",
                    **measure(cut(G, name, number)),
                }
            )

    prompts = config_of(full, given, Path("unused")).rollout.prompts
    found = {
        "blocks": blocks,
        "prompts": prompts,
        "accuracy": reached,
    }

    return cell | found | {"seconds": time.time() - began}


def from_rlvr(full: Cell, steps: int, given: Any, deadline: float) -> tuple[Any, Any, float | None]:
    """Gradients of GRPO, as the trainer makes them."""
    path = given.state / "runs" / f"spectrum-{time.time_ns():x}"
    config = config_of(full, given, path)

    run = RunFolder.create(path, config, {})
    with Verifier(config.reward.timeout) as verifier:
        parts = load(config, verifier)
        trainer, kept = build(parts, run, given, deadline)
        tap = Tap(trainer, steps)
        trainer.add_callback(tap)
        trainer.train()

    rewarded = [row["facts/correct"] for row in kept.rows[steps:] if "facts/correct" in row]
    reached = sum(rewarded) / len(rewarded) if rewarded else None

    return None if kept.late else tap.kept, heads_of(parts.model), reached


def from_sft(full: Cell, steps: int, given: Any, deadline: float) -> tuple[Any, Any, float | None]:
    """Gradients of the likelihood of solutions, one batch of as many prompts each."""
    config = config_of(full | {"optim": "adamw", "rate": RATE}, given, Path("unused"))
    made = Supervised(config, steps + BATCHES)
    if steps:
        made.train(lambda step: step >= steps or time.time() > deadline)

    kept: dict[str, list[Tensor]] = {name: [] for name in matrices(made.model)}
    for number, batch in enumerate(made.batches()):
        if number >= steps:
            made.model.zero_grad()
            made.backward(batch)

            for name, p in matrices(made.model).items():
                assert p.grad is not None
                kept[name].append(p.grad.detach().float().clone())

    late = time.time() > deadline
    return None if late else kept, heads_of(made.model), made.accuracy()


def heads_of(model: Any) -> dict[str, int]:
    """How many heads the projections of attention have."""
    queries = model.config.num_attention_heads
    keys = model.config.num_key_value_heads

    return {
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "o_proj": queries,
    }


def cut(G: Tensor, name: str, number: int) -> Tensor:
    """[K, heads, m, n]: heads lie along the rows of q, k, v and along the columns of o."""
    if name.endswith("o_proj"):
        return G.unflatten(2, (number, -1)).transpose(1, 2)
    return G.unflatten(1, (number, -1))


def measure(G: Tensor) -> dict[str, Any]:
    """Numbers of one parameter, averaged over its blocks.

    Args:
        G: [K, blocks, m, n].

    Returns:
        shape, and for one batch and for eight ("1", "8"; eight is what momentum sees at best):
        effective rank, share of the energy in the largest direction, the largest singular value of
        noise alone over its own norm and over the whole gradient's, how many directions each filter
        passes and its cosine; and the signal-to-noise ratio.
    """
    if G.shape[2] > G.shape[3]:
        G = G.transpose(2, 3)

    m, n = G.shape[2:]
    squares = [float(g.double().square().sum()) for g in G]
    snr = snr_from_norms(squares, float(G.double().sum(0).square().sum()))["gradient/snr"]
    half = len(G) // 2
    B = G[half:].mean(0)
    A = G[:half].mean(0)
    parts = G[:half].unflatten(0, (2, -1)).mean(1)

    found = {
        "1": directions(G[0], B, (G[0] - G[1]) / 2**0.5),
        str(half): directions(A, B, (parts[0] - parts[1]) / 2),
    }
    return {
        "shape": [m, n],
        "snr": snr,
        "edge": noise_edge(m, n),
        **found,
    }


def directions(A: Tensor, B: Tensor, noise: Tensor) -> dict[str, Any]:
    """Spectrum of A, what its directions are worth by B, and the edge of the noise; [blocks, m, n].

    `noise` is as large as A's own, without the signal: both halves of a difference share that, and
    each brings its noise. Its largest direction is the filter "measured", which passes what rises
    above the noise that there is and at least one direction; B has no part in it.
    """
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
    worth = torch.einsum("bmi,bmn,bin->bi", U, B, Vh)
    norm = sigma.square().sum(1, keepdim=True).sqrt().clamp_min(1e-30)
    share = sigma / norm
    p = sigma / sigma.sum(1, keepdim=True).clamp_min(1e-30)
    rank = torch.exp(-torch.xlogy(p, p).sum(1))
    m, n = A.shape[1:]
    edges = dict(zip((f"k_p={k}" for k in range(5)), PROMOTED, strict=True))
    edges |= {"noise": noise_edge(m, n), "muon": 0.0}
    counts = torch.arange(1, m + 1, device=A.device)
    size = torch.linalg.matrix_norm(B).clamp_min(1e-30)
    cosines = worth.cumsum(1) / counts.sqrt() / size[:, None]  # of the first k directions
    top = torch.linalg.matrix_norm(noise, 2)

    passed = {name: (share > edge).sum(1) for name, edge in edges.items()}
    for cutoff in RELATIVE:
        passed[f"cutoff={cutoff}"] = (sigma > cutoff * sigma[:, :1]).sum(1)

    # The first k whose step is most like the gradient that it was made of.
    passed["aligned"] = (sigma.cumsum(1) / counts.sqrt()).argmax(1) + 1
    passed["measured"] = (sigma > MARGIN * top[:, None]).sum(1).clamp_min(1)
    found = {
        name: torch.where(
            number > 0, cosines.gather(1, (number - 1).clamp_min(0)[:, None])[:, 0], 0.0
        )
        for name, number in passed.items()
    }

    found |= {"gradient": (A * B).sum((1, 2)) / norm[:, 0] / size, "best": cosines.amax(1)}
    alone = torch.linalg.matrix_norm(noise).clamp_min(1e-30)
    places = torch.linspace(0, m - 1, min(m, POINTS)).round().long()

    return {
        "effective_rank": float(rank.mean()),
        "top_share": float(share[:, 0].square().mean()),
        "noise_top": float((top / alone).mean()),
        "noise_over_all": float((top / norm[:, 0]).mean()),
        "best_rank": float((cosines.argmax(1) + 1).float().mean()),
        "passed": {name: float(number.float().mean()) for name, number in passed.items()},
        "cosine": {name: float(x.mean()) for name, x in found.items()},
        "rank": (places + 1).tolist(),
        "sigma": rounded(share.mean(0).cpu()[places]),
        "worth": rounded((worth / norm).mean(0).cpu()[places]),
    }


def rounded(x: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in x.tolist()]
