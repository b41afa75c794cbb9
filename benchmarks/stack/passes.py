"""Seconds of the training passes alone, by kind of rows, and their share of the chip.

    python -m benchmarks.stack.passes --out results/passes.json --seconds 100
    python -m benchmarks.stack.passes --small --out results/passes.json     # on a CPU

32 prompts x 8 completions of random tokens go forward and backward through models with random
weights. Kinds of rows:

    padded    a padded row per completion: TRL's pass
    shared    a prompt once with its completions where that pays, recorded as CUDA graphs
    ragged    the tokens one after another, between the products a few kernels

`full` completions have 256 tokens, `real` ones the lengths of answers to GSM8K (mean 92, longest
240). The share of the chip counts 6 operations a weight for each prompt once and each token of a
completion, against one large product on the same chip. Before that, `error` compares
log-probabilities and gradients of 32 completions with float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from benchmarks._lib.console import describe
from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import table as markdown
from benchmarks._lib.timing import peak_flops
from benchmarks.stack.plan import GENERATIONS, MODELS, PROMPTS
from mesotron.rlvr.passes.blocks import PLAIN, RaggedPass
from mesotron.rlvr.passes.recording import SharedPromptPass

KINDS = ("padded", "shared", "ragged")
LENGTHS = ("full", "real")
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
}
NETWORKS = MODELS | {"smollm2": ("Llama", SMOLLM2)}
MICRO = {"smollm2": 128, "qwen0.5b": 64, "qwen1.7b": 32, "small": 8}
RECORD_BELOW = 1e9
# Prompt lengths, and completions' gamma distribution with its bounds.
PROMPT_TOKENS = (50, 110)
TOKENS = 256
ANSWER_SHAPE = 4.0
ANSWER_SCALE = 23.0
ANSWER_BOUNDS = (12, 240)
CHECKED = 32

Cell = dict[str, Any]
Scores = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """A rollout as the trainer pads it, [rows, P + T]."""

    ids: Tensor
    mask: Tensor
    length: int  # T

    def first(self, number: int) -> Rows:
        return Rows(self.ids[:number], self.mask[:number], self.length)

    def split(self, size: int) -> list[Rows]:
        pairs = zip(self.ids.split(size), self.mask.split(size), strict=True)
        return [Rows(ids, mask, self.length) for ids, mask in pairs]


def make_rows(lengths: str, vocabulary: int, device: torch.device, small: bool) -> Rows:
    """Groups of completions of random tokens, prompts padded on the left."""
    draw = torch.Generator().manual_seed(0)
    prompts = 4 if small else PROMPTS
    G = 4 if small else GENERATIONS
    scale = 16 if small else 1
    low, high = PROMPT_TOKENS
    B = prompts * G

    sizes = torch.randint(low, high, (prompts,), generator=draw) // scale
    sizes = sizes.repeat_interleave(G)
    if lengths == "full":
        own = torch.full((B,), TOKENS // scale)
    else:
        gamma = torch.distributions.Gamma(ANSWER_SHAPE, 1 / ANSWER_SCALE)
        torch.manual_seed(0)
        own = gamma.sample((B,)).round().long().clamp(*ANSWER_BOUNDS) // scale
        own = own.clamp(min=1)

    P = int(sizes.max())
    T = int(own.max())
    place = torch.arange(P + T)
    mask = (place >= P - sizes[:, None]) & (place < P + own[:, None])
    ids = torch.randint(1, vocabulary, (B, P + T), generator=draw)
    ids[:, :P] = ids[::G, :P].repeat_interleave(G, dim=0)

    rows = Rows((ids * mask).to(device), mask.long().to(device), T)
    return rows


def make_model(name: str, device: torch.device) -> Any:
    """Random weights in float32, with TRL's head."""
    kind, settings = NETWORKS[name]
    config = AutoConfig.for_model(kind.lower(), **settings)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def make_pass(kind: str, model: Any, autocast: Callable[..., Any]) -> Callable[[Rows], Scores]:
    """Log-probabilities and entropies [rows, T] of rows."""

    def padded(rows: Rows) -> Scores:
        labels = rows.ids.masked_fill(rows.mask == 0, -100)
        labels[:, : -rows.length] = -100
        with autocast():
            out = model(
                input_ids=rows.ids,
                attention_mask=rows.mask,
                labels=labels,
                fused_lm_head=True,
            )
        return out.log_probs[:, -rows.length :], out.entropy[:, -rows.length :]

    if kind == "padded":
        return padded

    on_gpu = model.device.type == "cuda"
    ragged = RaggedPass(autocast, ops=None if on_gpu else PLAIN)
    shared = SharedPromptPass(
        model,
        autocast,
        group_size=GENERATIONS,
        max_length=TOKENS,
        record=on_gpu and model.num_parameters() < RECORD_BELOW,
        ragged=ragged if kind == "ragged" else None,
    )

    def run(rows: Rows) -> Scores:
        scores = shared(model, rows.ids, rows.mask, rows.length, 1.0, entropy=True)
        return padded(rows) if scores is None else scores

    return run


def loss_of(rows: Rows, logprobs: Tensor) -> Tensor:
    """A policy loss with advantages of both signs, as a sum over the rollout."""
    sign = torch.where(torch.arange(len(logprobs), device=logprobs.device) % 2 == 0, 1.0, -1.0)
    ratio = torch.exp(logprobs - logprobs.detach())
    scored = rows.mask[:, -rows.length :]
    return -(ratio * sign[:, None] * scored).sum() / TOKENS


def step(model: Any, run: Callable[[Rows], Scores], parts: list[Rows]) -> Cell:
    """Milliseconds of the forward and backward passes of a rollout."""
    spent = {"forward": 0.0, "backward": 0.0}
    model.zero_grad()
    for rows in parts:
        began = now()
        logprobs, _ = run(rows)
        loss = loss_of(rows, logprobs)
        between = now()
        loss.backward()
        spent["forward"] += 1e3 * (between - began)
        spent["backward"] += 1e3 * (now() - between)

    return spent


def score(run: Callable[[Rows], Scores], parts: list[Rows]) -> float:
    """Milliseconds of a pass without gradient."""
    began = now()
    with torch.no_grad():
        for rows in parts:
            run(rows)

    return 1e3 * (now() - began)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def operations(model: Any, rows: Rows) -> float:
    """Of the weights' products, forward and backward, with each prompt once."""
    head = model.get_output_embeddings().weight.numel()
    body = 0
    for name, p in model.named_parameters():
        if p.ndim == 2 and "layers" in name:
            body += p.numel()

    P = rows.ids.shape[1] - rows.length
    prompts = rows.ids[:, :P].unique(dim=0, return_inverse=True)[1]
    seen = rows.mask[:, :P].sum(1)
    once = sum(int(seen[prompts == k][0]) for k in range(int(prompts.max()) + 1))
    scored = int(rows.mask[:, P:].sum())

    return 6.0 * (body * (once + scored) + head * scored)


def measure(kind: str, name: str, rows: Rows, model: Any, given: argparse.Namespace) -> Cell:
    """Medians of a kind of rows."""
    run = make_pass(kind, model, autocast_on(model.device))
    on_gpu = model.device.type == "cuda"
    parts = rows.split(given.micro or MICRO[name])
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    steps = [step(model, run, parts) for _ in range(given.warm + given.count)][given.warm :]
    cell: Cell = {"kind": kind, "micro": len(parts[0].ids)}
    for phase in ("forward", "backward"):
        cell[phase] = statistics.median(one[phase] for one in steps)

    cell["scoring"] = statistics.median(score(run, parts) for _ in range(2))
    if on_gpu:
        cell["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if given.profile and kind in given.profile:
            cell["kernels"] = profiled(model, run, parts[0])

    return cell


def profiled(model: Any, run: Callable[[Rows], Scores], rows: Rows) -> list[Cell]:
    """The kernels of one micro-batch that take the most time."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step(model, run, [rows])

    kernels = []
    for event in profile.key_averages():
        on_device = getattr(event, "self_device_time_total", 0)
        if on_device and "CUDA" in str(getattr(event, "device_type", "")):
            cell = {"name": event.key[:90], "ms": on_device / 1e3, "count": event.count}
            kernels.append(cell)

    return sorted(kernels, key=lambda kernel: -kernel["ms"])[:40]


def autocast_on(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if device.type == "cuda":
        return partial(torch.autocast, "cuda", torch.bfloat16)
    return nullcontext


def errors(model: Any, rows: Rows) -> Cell:
    """Of padded and ragged rows in bfloat16 against padded rows in float32."""
    few = rows.first(CHECKED)
    exact = gradients(model, make_pass("padded", model, nullcontext), few)
    found: Cell = {}
    for kind in ("padded", "ragged"):
        logprobs, flat = gradients(model, make_pass(kind, model, autocast_on(model.device)), few)
        gap = (logprobs - exact[0]).abs()
        found[kind] = {
            "logprob_mean": float(gap.mean()),
            "logprob_max": float(gap.max()),
            "gradient": float((flat - exact[1]).norm() / exact[1].norm()),
        }

    model.zero_grad()
    return found


def gradients(model: Any, run: Callable[[Rows], Scores], rows: Rows) -> Scores:
    """Log-probabilities, and all gradients in one line."""
    model.zero_grad()
    logprobs, _ = run(rows)
    loss_of(rows, logprobs).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return logprobs.detach().clone(), flat


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("results/passes.json"))
    add("--seconds", type=float, default=100, help="start nothing after this")
    add("--models", nargs="+", default=["qwen0.5b", "smollm2"], choices=list(NETWORKS))
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    add("--lengths", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    add("--micro", type=int, default=None, help="completions of a pass")
    add("--warm", type=int, default=2)
    add("--count", type=int, default=3)
    add("--profile", nargs="*", choices=KINDS, help="kernels of a micro-batch of these kinds")
    add("--small", action="store_true", help="a tiny model on a CPU")
    add("--show", type=Path, help="print the table of this file")
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    if given.show:
        print(table(read_json(given.show)))
        return

    deadline = time.perf_counter() + given.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = peak_flops(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    result: Cell = {**describe(device), "peak_tflops": peak / 1e12, "cells": [], "errors": {}}

    for name in ["small"] if given.small else given.models:
        model = make_model(name, device)
        vocabulary = model.config.vocab_size
        for lengths in given.lengths:
            rows = make_rows(lengths, vocabulary, device, given.small)
            if lengths == given.lengths[0]:
                result["errors"][name] = errors(model, rows)

            floor = operations(model, rows) / peak
            for kind in given.kinds:
                if time.perf_counter() > deadline:
                    break
                result["cells"].append(one_cell(kind, (name, lengths), rows, model, given, floor))
                write_json(result, given.out, indent=1)

        del model

    print(table(result))


def one_cell(
    kind: str,
    row: tuple[str, str],
    rows: Rows,
    model: Any,
    given: argparse.Namespace,
    floor: float,
) -> Cell:
    cell = {"model": row[0], "lengths": row[1]}
    try:
        cell |= measure(kind, row[0], rows, model, given)
    except Exception as error:  # the next kind may run
        return cell | {"kind": kind, "failed": f"{type(error).__name__}: {error}"[:300]}

    spent = cell["forward"] + cell["backward"]
    return cell | {"share_of_chip": 1e3 * floor / spent}


def table(result: Cell) -> str:
    """Markdown of a result."""
    rows = []
    for cell in result["cells"]:
        start = [cell["model"], cell["lengths"], cell["kind"]]
        if "failed" in cell:
            rows.append([*start, cell["failed"], "", "", ""])
            continue

        times = [f"{cell[phase]:.1f}" for phase in ("forward", "backward", "scoring")]
        rows.append([*start, *times, f"{cell['share_of_chip']:.1%}"])

    head = ["model", "lengths", "rows", "forward ms", "backward ms", "scoring ms", "of the chip"]
    lines = [markdown(head, rows)]
    for name, kinds in result["errors"].items():
        lines += [f"{name}, {kind}, against float32: {gaps}" for kind, gaps in kinds.items()]

    return "\n".join(lines)


if __name__ == "__main__":
    main()
