"""Milliseconds of sampling on one GPU: rows that leave, the head and the draw, evaluation.

    python -m benchmarks.stack.sampling --out results/sampling.json --seconds 100
    python -m benchmarks.stack.sampling --out results/small.json --small     tries it on a CPU

Weights are random and no row writes an end token: a row ends at a length drawn beforehand. "full":
at the limit. "smollm2" and "qwen": as long as answers to GSM8K of SmolLM2 after a supervised start
(mean 92, longest 240) and of Qwen2.5-0.5B (mean 355 of 512 tokens).

Ways: "before" carries every row to the end and writes the logits to memory; "head" draws in the
head's tiles; "now" also lets rows leave. The file is written after each cell.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks._lib.results import write_json
from benchmarks._lib.rows import table
from benchmarks.stack.plan import GENERATIONS, MODELS
from mesotron.sampling import decode, decoder
from mesotron.sampling.decoder import FusedDecoder, FusedSampler, FusedWeights
from mesotron.sampling.graphs import Decoder, Sampling

NEVER = 2**40  # an end token that no row writes
PROMPT_TOKENS = (80, 150)
WAYS = ("before", "head", "now")
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
KINDS = MODELS | {"smollm2": ("Llama", SMOLLM2)}


@dataclass(frozen=True)
class Case:
    """What is sampled."""

    model: str  # a key of `KINDS`
    rows: int
    tokens: int
    lengths: str  # a key of `LENGTHS`


# Mean and longest; None for the limit.
LENGTHS = {"full": None, "smollm2": (92, 240), "qwen": (355, 512), "short": (9, 24)}
CASES = [
    Case("qwen0.5b", 256, 256, "full"),
    Case("qwen0.5b", 256, 256, "smollm2"),
    Case("qwen0.5b", 256, 512, "qwen"),
    Case("qwen0.5b", 256, 512, "full"),
    Case("smollm2", 256, 256, "smollm2"),
    Case("qwen1.7b", 256, 256, "full"),
]
LARGE = Case("qwen0.5b", 512, 1024, "full")
SMALL_CASES = [Case("small", 32, 24, "full"), Case("small", 32, 24, "short")]
SMALL_LARGE = Case("small", 64, 32, "full")


class Report:
    """Named cells in a file; what fails is a cell too."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.end = time.perf_counter() + seconds
        self.cells: dict[str, Any] = {"versions": versions()}

    def add(self, name: str, measure: Callable[[], Any]) -> None:
        if time.perf_counter() > self.end:
            self.cells[name] = {"failed": "no time left"}
        else:
            start = time.perf_counter()
            try:
                self.cells[name] = measure()
            except Exception:
                self.cells[name] = {"failed": traceback.format_exc()[-1500:]}
            self.cells[name]["cell_s"] = round(time.perf_counter() - start, 1)

        print(name, str(self.cells[name])[:400], flush=True)
        write_json(self.cells, self.path, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/sampling.json"))
    parser.add_argument("--seconds", type=float, default=100, help="start no cell after this")
    parser.add_argument("--models", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--count", type=int, default=2, help="measured calls of a cell")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--tune", action="store_true", help="time sizes of the kernels' tiles too")
    given = parser.parse_args()

    report = Report(given.out, given.seconds)
    cases = SMALL_CASES if given.small else CASES
    chosen = [case for case in cases if case.model in given.models or given.small]
    first = chosen[0]
    large = SMALL_LARGE if given.small else LARGE

    def add_case(case: Case, ways: Sequence[str]) -> None:
        model = make_model(case.model)
        for way in ways:
            name = f"{case.model}/{case.rows}x{case.tokens}/{case.lengths}/{way}"
            report.add(name, lambda way=way: sampling_time(model, case, way, given.count))

    report.add("equal", equal_tokens)
    for case in chosen:
        if case.model == first.model:
            add_case(case, given.ways)

    model = make_model(first.model)
    report.add("sizes", lambda: time_by_size(model, first))
    report.add("kernels", lambda: kernels_of_a_token(model, first))
    report.add("evaluation", lambda: evaluation_time(model, given.small))
    if large.model == first.model:
        add_case(large, ["now"])
    if given.tune:
        report.add("tiles", lambda: time_tiles(model))

    for case in chosen:
        if case.model != first.model:
            add_case(case, given.ways)

    print(show(report.cells))


def versions() -> dict[str, str]:
    known = {"torch": torch.__version__}
    if torch.cuda.is_available():
        import triton

        known |= {"triton": triton.__version__, "gpu": torch.cuda.get_device_name()}

    return known


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


MADE: dict[str, Any] = {}  # the model made last


def make_model(name: str) -> Any:
    """A model with random weights, in bfloat16 on a GPU."""
    if name not in MADE:
        MADE.clear()
        kind, settings = KINDS[name]
        config = AutoConfig.for_model(kind.lower(), **settings)
        dtype = torch.bfloat16 if device() == "cuda" else torch.float32
        torch.manual_seed(0)

        with torch.device(device()):
            MADE[name] = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    return MADE[name]


def make_prompts(rows: int, vocabulary: int) -> list[list[int]]:
    """Groups of `GENERATIONS` rows that share a prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = []
    for _ in range(-(-rows // GENERATIONS)):
        size = int(torch.randint(*PROMPT_TOKENS, (1,), generator=generator))
        prompt = torch.randint(2, vocabulary, (size,), generator=generator).tolist()
        prompts += [prompt] * GENERATIONS

    return prompts[:rows]


def make_lengths(kind: str, rows: int, tokens: int) -> Tensor:
    """(rows,) lengths: of a gamma distribution of shape 4, stretched until their mean is right."""
    goal = LENGTHS[kind]
    if goal is None:
        return torch.full((rows,), tokens)

    mean, longest = goal
    torch.manual_seed(1)
    draws = torch.distributions.Gamma(4.0, 4.0).sample((rows,))
    low, high = 0.1 * mean, 10.0 * mean
    for _ in range(40):
        middle = (low + high) / 2
        if (draws * middle).clamp(4, longest).mean() < mean:
            low = middle
        else:
            high = middle

    return (draws * low).clamp(4, longest).long()


# Ways to sample


@contextmanager
def as_way(way: str, lengths: Tensor | None) -> Iterator[None]:
    """Sample in this way inside the block; rows end at their lengths."""
    write = Decoder.write

    def write_and_end(self: Decoder, drawn: Tensor) -> None:
        write(self, drawn)
        if lengths is not None:
            slots = self.slots[: self.size]
            self.running[: self.size] &= self.count < lengths[slots]

    with ExitStack() as stack:
        stack.enter_context(patch.object(Decoder, "write", write_and_end))
        if way != "now":
            stack.enter_context(patch.object(decoder, "sizes_of", lambda B: [B]))
        if way == "before":
            stack.enter_context(patch.object(Sampling, "draw", draw_of_before))
            stack.enter_context(patch.object(FusedDecoder, "next_tokens", tokens_of_before))

        yield


def draw_of_before(self: Sampling, logits: Tensor, draws: Tensor) -> Tensor:
    if self.temperature == 0:
        return logits.argmax(dim=-1)

    probs = (logits.float() / self.temperature).softmax(dim=-1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


@torch.no_grad()
def tokens_of_before(self: FusedDecoder, x: Tensor) -> Tensor:
    return self.draw(torch.nn.functional.linear(self.weights.normed(x), self.weights.head))


def wait() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def sampling_time(model: Any, case: Case, way: str, count: int) -> dict[str, Any]:
    """Seconds of the first call, and milliseconds of later ones."""
    prompts = make_prompts(case.rows, model.config.vocab_size)
    lengths = make_lengths(case.lengths, case.rows, case.tokens).to(device())
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    times = []
    with as_way(way, lengths):
        sampler = FusedSampler(model, [NEVER], 0)
        for _ in range(count + 1):
            wait()
            start = time.perf_counter()
            sampler.sample(prompts, case.tokens, usual=case.rows)
            wait()
            times.append(time.perf_counter() - start)

    cell = {
        "first_s": round(times[0], 2),
        "ms": round(1e3 * statistics.median(times[1:]), 1),
        "ms_a_token": round(1e3 * statistics.median(times[1:]) / int(lengths.max()), 3),
        "mean_length": round(lengths.float().mean().item(), 1),
        "longest": int(lengths.max()),
    }
    if device() == "cuda":
        cell["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)

    return cell


def equal_tokens() -> dict[str, Any]:
    """The same draws give the same tokens on this device, on the CPU, and with rows that leave."""
    torch.manual_seed(0)
    settings = MODELS["small"][1] | {"initializer_range": 0.2}
    config = AutoConfig.for_model("qwen2", **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 8 + k // 4] for k in range(64)]
    lengths = make_lengths("short", 64, 24)
    draws = torch.rand(64, 24, generator=torch.Generator().manual_seed(1))

    written = {}
    for place, way in (("cpu", "head"), (device(), "head"), (device(), "now")):
        with as_way(way, lengths.to(place)):
            sampler = FusedSampler(model.to(place), [NEVER], 0)
            rows = sampler.sample(prompts, 24, draws=draws)
        written[place, way] = [row[:n] for row, n in zip(rows, lengths.tolist(), strict=True)]

    cpu, head, now = (
        written[key] for key in (("cpu", "head"), (device(), "head"), (device(), "now"))
    )
    return {
        "rows": len(prompts),
        "equal_to_cpu": sum(a == b for a, b in zip(cpu, head, strict=True)),
        "equal_when_rows_leave": sum(a == b for a, b in zip(head, now, strict=True)),
    }


def begun(model: Any, case: Case) -> Any:
    """A sampler's decoder after the first token of every row."""
    prompts = make_prompts(case.rows, model.config.vocab_size)
    sampler = FusedSampler(model, [NEVER], 0)
    padded = sampler.pad_left(prompts)
    with torch.no_grad():
        one = sampler.decoder(padded, case.tokens)
        one.begin(padded, torch.rand(case.rows, case.tokens, device=device()))

    return one


@torch.no_grad()
def time_by_size(model: Any, case: Case) -> dict[str, Any]:
    """Milliseconds of a token for each number of rows, in the middle of the completions."""
    one = begun(model, case)
    middle = case.tokens // 2
    repeats = 20 if device() == "cuda" else 2
    times = {}
    for size in one.sizes:
        one.size = size
        one.count.fill_(middle)
        one.advance(middle)
        wait()

        start = time.perf_counter()
        for _ in range(repeats):
            one.count.fill_(middle)
            one.advance(middle)
        wait()
        times[str(size)] = round(1e3 * (time.perf_counter() - start) / repeats, 3)

    return {"ms_a_token": times}


@torch.no_grad()
def kernels_of_a_token(model: Any, case: Case) -> dict[str, Any]:
    """Microseconds of a token by kernel, at the largest and a small size."""
    if device() != "cuda":
        return {}

    one = begun(model, case)
    repeats = 8
    shown = {}
    for size in (one.sizes[0], one.sizes[len(one.sizes) // 2]):
        one.size = size
        with torch.profiler.profile() as profiler:
            for _ in range(repeats):
                one.count.fill_(case.tokens // 2)
                one.advance(case.tokens // 2)
            torch.cuda.synchronize()

        rows = [
            (event.device_time_total / repeats, event.count / repeats, event.key[:90])
            for event in profiler.key_averages()
            if event.device_time_total
        ]
        rows.sort(reverse=True)
        shown[str(size)] = [
            {"us": round(us, 1), "calls": calls, "kernel": name} for us, calls, name in rows[:24]
        ]

    return {"by_size": shown}


class PlainTokenizer:
    """Texts are numbers."""

    eos_token_id = NEVER
    pad_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return ""


def evaluation_time(model: Any, small: bool) -> dict[str, Any]:
    """Seconds of greedy answers to 1,000 problems, 300 tokens at most, mean 92."""
    number = 24 if small else 1000
    tokens = 24 if small else 300
    generator = torch.Generator().manual_seed(2)
    texts = []
    for _ in range(number):
        size = int(torch.randint(60, 200, (1,), generator=generator))
        ids = torch.randint(2, model.config.vocab_size, (size,), generator=generator)
        texts.append(" ".join(map(str, ids.tolist())))

    lengths = make_lengths("short" if small else "smollm2", 1024, tokens).to(device())
    times = []
    with as_way("now", lengths), patch.object(decode, "on_gpu", lambda model: True):
        for _ in range(2):
            start = time.perf_counter()
            decode.generate(model, PlainTokenizer(), texts, max_tokens=tokens)
            wait()
            times.append(round(time.perf_counter() - start, 2))

    return {"seconds": times}


@torch.no_grad()
def time_tiles(model: Any) -> dict[str, Any]:
    """Microseconds of attention and of the head for other sizes of tiles."""
    weights = FusedWeights(model, torch.bfloat16)
    times: dict[str, float | str] = {}
    for rows in (256, 64, 16):
        times |= attention_times(weights, rows)
        times |= head_times(weights, rows)

    return {"us": times}


def clock(work: Callable[[], Any]) -> float | str:
    from triton.testing import do_bench_cudagraph

    try:
        return round(1e3 * do_bench_cudagraph(work, rep=10), 1)
    except Exception as error:  # tiles that do not fit
        return repr(error)[:80]


def attention_times(weights: FusedWeights, rows: int, L: int = 640) -> dict[str, float | str]:
    """At 400 places of a cache of L."""
    from mesotron.sampling.kernels import attention

    heads = {"device": device(), "dtype": torch.bfloat16}
    cache = torch.randn(2, rows, L, weights.keys, weights.size, **heads)
    both = torch.randn(rows, 1, (weights.heads + 2 * weights.keys) * weights.size, **heads)
    angles = torch.randn(2, rows, 1, 1, weights.size, **heads).unbind()

    numbers = torch.arange(rows, device=device())
    prefix = attention.Prefix(128, numbers // GENERATIONS, torch.zeros_like(numbers))
    place = torch.full((1,), 400, device=device())
    norms = attention.HeadNorms(None, 1e-6)

    times = {}
    for tile, warps in ((16, 1), (32, 1), (64, 1), (32, 2), (64, 2), (64, 4), (128, 4)):
        with patch.object(attention, "TILE", tile), patch.object(attention, "WARPS", warps):
            work = partial(attention.attend, both, cache, prefix, place, angles, norms, 0.1, None)
            times[f"attention {rows} rows, tile {tile}, {warps} warps"] = clock(work)

    return times


def head_times(weights: FusedWeights, rows: int) -> dict[str, float | str]:
    from mesotron.sampling.kernels import head

    x = torch.randn(rows, weights.head.shape[1], device=device(), dtype=torch.bfloat16)
    slots = torch.arange(rows, device=device())
    draws = head.Draws(torch.rand(rows, 4, device=device()), slots, slots[:1])
    logits = partial(torch.nn.functional.linear, x, weights.head)

    times = {f"logits {rows} rows": clock(logits)}
    for tile_v in (64, 128, 256):
        for tile_bytes in (128, 256):
            with (
                patch.object(head, "TILE_V", tile_v),
                patch.object(head, "TILE_BYTES", tile_bytes),
            ):
                work = partial(head.draw, x, weights.head, 1.0, draws)
                times[f"head {rows} rows, tile {tile_v} x {tile_bytes} bytes"] = clock(work)

    return times


def show(cells: dict[str, Any]) -> str:
    rows = []
    for name, cell in cells.items():
        if "ms" in cell:
            where, _, way = name.rpartition("/")
            rows.append([where, way, f"{cell['ms']:.0f}", f"{cell['ms_a_token']:.2f}"])

    return table(["sampled", "way", "ms", "ms a token"], rows)


if __name__ == "__main__":
    main()
