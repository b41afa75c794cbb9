"""Sampling with CUDA graphs: a static cache, and one captured graph that makes one token.

Below a billion weights the GPU mostly waits for Python to launch kernels. Here the work of one
token is captured once per shape (rows, prompt length, completion length) and replayed. Without CUDA
the same steps run without a graph. Full attention only; no sharding.

Shapes: B rows, U distinct prompts, P padded prompt length, N longest completion, L = P + N cache
length, V vocabulary.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import StaticCache

from mesotron.models.sharded import as_loaded

Shape = tuple[int, int, int]
# Prompts are padded to a multiple of this, so that few shapes serve a whole dataset.
PROMPT_STEP = 32
# Shapes whose graphs and caches are kept: three sizes at two prompt lengths, and two more.
MAX_SHAPES = 8
# A call with fewer rows than usual uses a graph of a quarter, a half or all of them; with finer
# steps dynamic sampling's rounds evicted graphs and captured them again.
PARTS_OF_USUAL = (4, 2, 1)
# Tokens between checks whether all rows have ended: a check waits for the GPU.
CHECK_EVERY = 8
# Steps before a capture: every lazy initialization must have happened.
WARM_UPS = 2


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from softmax(logits / temperature), without a look from the host."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # only the k most likely tokens; 0 for all
    top_p: float = 1.0  # only the most likely tokens that together have this probability

    def draw(self, logits: Tensor) -> Tensor:
        """Token ids (B,) from logits (B, V)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)

        probs = (logits.float() / self.temperature).softmax(dim=-1)
        if self.top_k or self.top_p < 1:
            probs = self.truncate(probs)

        # The smallest of exponentials with rates p_i has index i with probability p_i; unlike
        # torch.multinomial this never reads a value on the host.
        return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)

    def truncate(self, probs: Tensor) -> Tensor:
        ordered, places = probs.sort(dim=-1, descending=True)
        if self.top_k:
            ordered[:, self.top_k :] = 0.0
            ordered = ordered / ordered.sum(dim=-1, keepdim=True)

        outside = ordered.cumsum(dim=-1) - ordered >= self.top_p
        outside[:, 0] = False

        return torch.zeros_like(probs).scatter(-1, places, ordered.masked_fill(outside, 0.0))


class Decoder(ABC):
    """The fixed tensors of one shape (B, P, N), and the work of one token on them."""

    def __init__(self, shape: Shape, sampling: Sampling, eos: Tensor, pad: int) -> None:
        B, self.P, self.N = shape
        self.sampling = sampling
        self.eos = eos
        self.pad = pad
        new = {"dtype": torch.long, "device": eos.device}
        self.tokens = torch.zeros(B, 1, **new)
        self.positions = torch.zeros(B, 1, **new)
        self.written = torch.zeros(B, self.N, **new)
        self.count = torch.zeros(1, **new)  # tokens written
        self.running = torch.ones(B, dtype=torch.bool, device=eos.device)

        # Numbers of tokens, ascending: until a span is written, a step need not look beyond it.
        self.spans = [self.N]
        self.graphs: dict[int, Any] = {}  # by span

    @abstractmethod
    def begin(self, ids: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Read distinct prompts (U, P), padded on the left; `rows` (B,) is the prompt of each row.
        Draws the first token of each row."""

    @abstractmethod
    def step(self, span: int) -> None:
        """One more token for every row, the last of at most `span`, entirely on the device."""

    def advance(self, n: int) -> None:
        """Write the token after n."""
        span = next(span for span in self.spans if n < span)
        self.graphs[span].replay() if span in self.graphs else self.step(span)

    def write(self, logits: Tensor) -> None:
        chosen = torch.where(self.running, self.sampling.draw(logits), self.pad)
        self.written.index_copy_(1, self.count, chosen[:, None])
        self.tokens.copy_(chosen[:, None])
        self.running &= torch.isin(chosen, self.eos, invert=True)
        self.count.add_(1)

    def capture(self, pool: Any) -> None:
        # Afterwards `begin` must be called again.
        for span in self.spans:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())

            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self.step(span)

            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.step(span)

            self.graphs[span] = graph

    def completions(self) -> list[list[int]]:
        tokens = self.written[:, : int(self.count)]
        ends = torch.isin(tokens, self.eos)
        before = ends.long().cumsum(dim=1) - ends.long()  # end tokens before each position
        kept = (before == 0).sum(dim=1).tolist()

        return [row[:n] for row, n in zip(tokens.tolist(), kept, strict=True)]


class ModelDecoder(Decoder):
    def __init__(self, model: Any, shape: Shape, sampling: Sampling, eos: Tensor, pad: int) -> None:
        super().__init__(shape, sampling, eos, pad)
        B, P, N = shape
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=P + N)

        self.visible = torch.zeros(
            B,
            1,
            1,
            P + N,
            dtype=torch.bool,
            device=eos.device,
        )

    def begin(self, ids: Tensor, mask: Tensor, rows: Tensor) -> None:
        P = self.P
        N = self.N
        ids = ids[rows]
        mask = mask[rows]  # the cache's first call decides its number of rows
        self.cache.reset()
        self.running.fill_(True)
        self.count.zero_()
        self.visible.zero_()
        self.visible[:, 0, 0, :P] = mask
        causal = torch.ones(P, P + N, dtype=torch.bool, device=ids.device).tril()

        # A padded query attends to itself: with nothing to attend to it would give NaN, which
        # survives being masked.
        itself = torch.eye(P, P + N, dtype=torch.bool, device=ids.device)
        visible = (self.visible & causal) | itself  # (B, 1, P, L)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        self.positions.copy_(positions[:, -1:])
        self.write(self.logits(ids, visible, positions))

    def step(self, span: int) -> None:
        self.visible.index_fill_(3, self.P + self.count - 1, True)
        self.positions.add_(1)
        self.write(self.logits(self.tokens, self.visible, self.positions))

    def logits(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """(B, V) of the last position."""
        out = self.model(
            input_ids=ids,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


class GraphSampler:
    """Samples completions of a model whose weights change in place between calls.

    Each kept shape, 8 at most, holds a cache of its own. If `dtype` differs from the weights', a
    copy of them in this type is kept and refreshed at each call.

    Example:
        sampler = GraphSampler(model, eos=[2], pad=0, dtype=torch.bfloat16)
        completions = sampler.sample([[5, 6, 7], [8]], max_tokens=32)
    """

    name = "CUDA-graph sampling"

    def __init__(
        self,
        model: nn.Module,
        eos: Sequence[int],
        pad: int,
        sampling: Sampling | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if reason := self.obstacle(model):
            raise ValueError(f"{self.name} cannot be used: {reason}")

        weight = next(model.parameters())
        self.model = model
        self.pad = pad
        self.sampling = sampling or Sampling()
        self.eos = torch.tensor(list(eos), device=weight.device)
        self.on_gpu = weight.device.type == "cuda"
        self.decoders: OrderedDict[Shape, Decoder] = OrderedDict()
        self.copy: nn.Module | None = None
        self._pool: Any = None
        self._prepare(dtype or weight.dtype)

    @staticmethod
    def obstacle(model: Any) -> str | None:
        return attention_obstacle(model)

    def _prepare(self, dtype: torch.dtype) -> None:
        if dtype == next(self.model.parameters()).dtype:
            return

        with as_loaded(self.model):
            self.copy = copy.deepcopy(self.model).eval().requires_grad_(False)

        for p in self.copy.parameters():  # not buffers: rotary angles are useless in bfloat16
            p.data = p.data.to(dtype)

    def refresh(self) -> None:
        if self.copy is not None:
            new, old = ([*m.parameters(), *m.buffers()] for m in (self.model, self.copy))
            torch._foreach_copy_(old, new)  # pyright: ignore

    def make_decoder(self, shape: Shape) -> Decoder:
        return ModelDecoder(
            self.copy or self.model,
            shape,
            self.sampling,
            self.eos,
            self.pad,
        )

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, usual: int = 0
    ) -> list[list[int]]:
        """Complete each prompt once; returns the new tokens, with the end token if there is one.
        `usual` are the rows of most calls; smaller calls are padded to a quarter, a half or all of
        it, so that calls of any size need three graphs. 0 makes one per number of rows."""
        trains = self.model.training
        self.model.eval()

        try:
            self.refresh()
            sizes = [-(-usual // part) for part in PARTS_OF_USUAL]
            size = min((x for x in sizes if x >= len(prompts)), default=len(prompts))
            extra = size - len(prompts)
            ids, mask, rows = self.pad_left([*prompts, *[prompts[-1]] * extra])
            decoder = self.decoder(ids, mask, rows, max_tokens)
            decoder.begin(ids, mask, rows)

            for n in range(1, max_tokens):
                if n % CHECK_EVERY == 0 and not bool(decoder.running.any()):
                    break
                decoder.advance(n)

            return decoder.completions()[: len(prompts)]
        finally:
            self.model.train(trains)

    def pad_left(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Distinct prompts as (U, P) ids and mask, P a multiple of `PROMPT_STEP`, and (B,) the
        prompt of each row."""
        distinct: dict[tuple[int, ...], int] = {}

        # The rows of a group mostly share one list, which is then read once.
        numbers = {
            key: distinct.setdefault(tuple(prompt), len(distinct))
            for key, prompt in {id(prompt): prompt for prompt in prompts}.items()
        }

        sizes = np.array([len(prompt) for prompt in distinct])
        P = -(-int(sizes.max()) // PROMPT_STEP) * PROMPT_STEP

        ids = np.full((len(distinct), P), self.pad, dtype=np.int64)
        for prompt, number in distinct.items():
            ids[number, P - len(prompt) :] = prompt

        mask = np.arange(P) >= P - sizes[:, None]
        rows = np.array([numbers[id(prompt)] for prompt in prompts])
        ids, mask, rows = (torch.from_numpy(x).to(self.eos.device) for x in (ids, mask, rows))

        return ids, mask, rows

    def decoder(self, ids: Tensor, mask: Tensor, rows: Tensor, max_tokens: int) -> Decoder:
        shape = (len(rows), ids.shape[1], max_tokens)
        if shape not in self.decoders:
            while len(self.decoders) >= MAX_SHAPES:
                self.decoders.popitem(last=False)

            decoder = self.make_decoder(shape)
            if self.on_gpu and max_tokens > WARM_UPS + 1:
                if not any(kept.graphs for kept in self.decoders.values()):
                    # The allocator retires a pool with its last graph. A capture with the retired
                    # handle fails, and leaves the device's generator in capture mode for good.
                    self._pool = torch.cuda.graph_pool_handle()

                # Warm-ups draw: the same numbers must follow with and without a capture.
                state = torch.cuda.get_rng_state()
                decoder.begin(ids, mask, rows)
                decoder.capture(self._pool)
                torch.cuda.set_rng_state(state)

            self.decoders[shape] = decoder

        self.decoders.move_to_end(shape)
        return self.decoders[shape]


def attention_obstacle(model: Any) -> str | None:
    """Why a model cannot use a static cache with boolean masks, which eager attention would add."""
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa":
        return f"attention is {config._attn_implementation}, load with attn_implementation='sdpa'"

    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None):
        return f"it has {', '.join(sorted(kinds)) or 'a sliding window'}, not full attention"

    return None
