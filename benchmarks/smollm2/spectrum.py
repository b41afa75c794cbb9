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
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from benchmarks._lib.rows import values
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
TINY = 1e-30
RELATIVE = (0.3, 0.4, 0.5)  # cutoffs as fractions of the largest singular value


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Projections of a few layers by their short name, such as 12.q_proj."""
    by_layer: dict[int, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, p in model.named_parameters():
        words = name.split(".")
        if words[-2] in PROJECTIONS:
            by_layer[int(words[2])][f"{words[2]}.{words[-2]}"] = p

    last = len(by_layer) - 1
    places = {round(k * last / max(LAYERS - 1, 1)) for k in range(LAYERS)}
    found: dict[str, nn.Parameter] = {}
    for place, layer in enumerate(sorted(by_layer)):
        if place in places:
            found |= by_layer[layer]
    return found


class Tap(TrainerCallback):
    """After `steps` steps freezes the weights and keeps the gradients of the steps that follow."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = trainer
        self.steps = steps
        self.kept: dict[str, list[Tensor]] = {name: [] for name in matrices(trainer.model)}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.steps:
            scheduler = self.trainer.lr_scheduler
            scheduler.base_lrs = [0.0] * len(scheduler.base_lrs)
            for group in self.trainer.optimizer.param_groups:
                group["lr"] = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.steps:
            keep_gradients(self.trainer.model, self.kept)


def keep_gradients(model: nn.Module, kept: dict[str, list[Tensor]]) -> None:
    """Add the gradients that there are; a batch without a signal has none."""
    for name, p in matrices(model).items():
        if p.grad is not None:
            kept[name].append(p.grad.detach().float().clone())


def spectrum_cell(cell: Cell, given: Any, deadline: float) -> Cell | None:
    """The spectra of one source (rlvr or sft) after so many steps."""
    began = time.time()
    quiet_libraries()
    usual: Cell = {"optim": "muon", "objective": "grpo", "rate": 1e-4, "gain": 1.0, "set": []}
    full = usual | cell | {"steps": cell["steps"] + BATCHES, "part": subject(cell)}
    gather = from_rlvr if cell["stage"] == "rlvr" else from_sft
    kept, heads, reached = gather(full, cell["steps"], given, deadline)
    if kept is None:
        return None

    blocks = []
    for name, gradients in kept.items():
        G = torch.stack(gradients)
        blocks.append({"block": name, "view": "whole", **measure(G[:, None])})

        number = heads.get(name.split(".")[1])
        if number:
            blocks.append({"block": name, "view": "heads", **measure(cut(G, name, number))})

    return cell | {
        "blocks": blocks,
        "prompts": config_of(full, given, Path("unused")).rollout.prompts,
        "accuracy": reached,
        "seconds": time.time() - began,
    }


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

    correct = values(kept.rows[steps:], "facts/correct")
    reached = sum(correct) / len(correct) if correct else None
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
            keep_gradients(made.model, kept)

    late = time.time() > deadline
    return None if late else kept, heads_of(made.model), made.accuracy()


def heads_of(model: Any) -> dict[str, int]:
    """How many heads the projections of attention have."""
    queries = model.config.num_attention_heads
    keys = model.config.num_key_value_heads
    return {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}


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
    half = len(G) // 2
    A = G[:half].mean(0)
    B = G[half:].mean(0)
    two = G[:half].unflatten(0, (2, -1)).mean(1)  # the means of two quarters

    squares = [float(g.double().square().sum()) for g in G]
    snr = snr_from_norms(squares, float(G.double().sum(0).square().sum()))
    return {
        "shape": [m, n],
        "snr": snr["gradient/snr"],
        "edge": noise_edge(m, n),
        "1": directions(G[0], B, (G[0] - G[1]) / 2**0.5),
        str(half): directions(A, B, (two[0] - two[1]) / 2),
    }


def directions(A: Tensor, B: Tensor, noise: Tensor) -> dict[str, Any]:
    """Spectrum of A, what its directions are worth by B, and the edge of the noise.

    `noise` is as large as A's own, without the signal: both halves of a difference share that, and
    each brings its noise. Its largest direction is the filter "measured", which passes what rises
    above the noise that there is and at least one direction; B has no part in it.

    Args:
        A: [blocks, m, n].
        B: [blocks, m, n].
        noise: [blocks, m, n].
    """
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)  # sigma: [blocks, m]
    worth = torch.einsum("bmi,bmn,bin->bi", U, B, Vh)
    norm = sigma.square().sum(1, keepdim=True).sqrt().clamp_min(TINY)
    share = sigma / norm
    top = torch.linalg.matrix_norm(noise, 2)  # [blocks]

    m, n = A.shape[1:]
    counts = torch.arange(1, m + 1, device=A.device)
    B_norm = torch.linalg.matrix_norm(B).clamp_min(TINY)
    cosines = worth.cumsum(1) / counts.sqrt() / B_norm[:, None]  # of the first k directions

    passed = passed_by(sigma, share, top, n)
    cosine = {name: cosine_after(cosines, number) for name, number in passed.items()}
    cosine["gradient"] = (A * B).sum((1, 2)) / norm[:, 0] / B_norm
    cosine["best"] = cosines.amax(1)

    p = sigma / sigma.sum(1, keepdim=True).clamp_min(TINY)
    rank = torch.exp(-torch.xlogy(p, p).sum(1))
    noise_norm = torch.linalg.matrix_norm(noise).clamp_min(TINY)
    places = torch.linspace(0, m - 1, min(m, POINTS)).round().long()
    return {
        "effective_rank": float(rank.mean()),
        "top_share": float(share[:, 0].square().mean()),
        "noise_top": float((top / noise_norm).mean()),
        "noise_over_all": float((top / norm[:, 0]).mean()),
        "best_rank": float((cosines.argmax(1) + 1).float().mean()),
        "passed": {name: float(number.float().mean()) for name, number in passed.items()},
        "cosine": {name: float(x.mean()) for name, x in cosine.items()},
        "rank": (places + 1).tolist(),
        "sigma": rounded(share.mean(0).cpu()[places]),
        "worth": rounded((worth / norm).mean(0).cpu()[places]),
    }


def passed_by(sigma: Tensor, share: Tensor, top: Tensor, n: int) -> dict[str, Tensor]:
    """How many of the largest directions each filter passes, [blocks].

    Args:
        sigma: [blocks, m], falling.
        share: of the norm.
        top: [blocks], the largest singular value of the noise.
        n: columns.
    """
    m = sigma.shape[1]
    passed = {f"k_p={k}": (share > edge).sum(1) for k, edge in enumerate(PROMOTED)}
    passed["noise"] = (share > noise_edge(m, n)).sum(1)
    passed["muon"] = (share > 0).sum(1)
    for cutoff in RELATIVE:
        passed[f"cutoff={cutoff}"] = (sigma > cutoff * sigma[:, :1]).sum(1)

    # The first k whose step is most like the gradient that it was made of.
    counts = torch.arange(1, m + 1, device=sigma.device)
    passed["aligned"] = (sigma.cumsum(1) / counts.sqrt()).argmax(1) + 1
    passed["measured"] = (sigma > MARGIN * top[:, None]).sum(1).clamp_min(1)
    return passed


def cosine_after(cosines: Tensor, number: Tensor) -> Tensor:
    """The cosine of a step of the first directions; zero where there is none."""
    last = (number - 1).clamp_min(0)[:, None]
    return torch.where(number > 0, cosines.gather(1, last)[:, 0], 0.0)


def rounded(x: Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in x.tolist()]
