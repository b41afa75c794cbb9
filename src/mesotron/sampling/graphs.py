"""Sampling with CUDA graphs: a static cache, and one captured graph that makes one token.

Below a billion weights the GPU mostly waits for Python to launch kernels. Here the work of one
token is captured once per shape (rows, prompt length, completion length) and replayed. Without CUDA
the same steps run without a graph. Rows that have ended leave: when those that still run fit into a
smaller size, they move to the front of every tensor, and the graph of that size takes over. Full
attention only; no sharding.

    sampler = GraphSampler(model, ...)     one for a run
    decoder = sampler.decoder(shape, ...)  the tensors and graphs of one shape, kept
    decoder.begin(prompts)                 reads the prompts and draws the first tokens
    decoder.advance(n)                     writes the token after n, by a graph on a GPU
    decoder.drop_ended()                   lets rows leave that have ended
    decoder.completions()                  what was written

Shapes: B rows, B' rows that have not left, U distinct prompts, P padded prompt length, N longest
completion, L = P + N cache length, V vocabulary.
"""

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import StaticCache

from mesotron.models.sharded import as_loaded
from mesotron.sampling.draw import at_draw, cache_bytes, round_up

Shape = tuple[int, int, int]  # B, P, N
# Prompts are padded to a multiple of this, so that few shapes serve a whole dataset.
PROMPT_STEP = 32
# Shapes whose graphs and caches are kept: three sizes at two prompt lengths, and two more.
MAX_SHAPES = 8
# A call with fewer rows than usual uses a graph of a quarter, a half or all of them; with finer
# steps dynamic sampling's rounds evicted graphs and captured them again.
PARTS_OF_USUAL = (4, 2, 1)
# Tokens between checks which rows have ended: a check waits for the GPU.
CHECK_EVERY = 8
# A batch shrinks to these sixteenths of it, in rows that fill the tiles of matrix products.
SIXTEENTHS = (16, 12, 8, 6, 4, 3, 2, 1)
ROW_STEP = 8
# Steps before a capture: every lazy initialization must have happened.
WARM_UPS = 2
# Of a GPU's memory, for the cache of one batch; more rows are sampled in several batches.
CACHE_SHARE = 0.3
# Held during a capture.
CAPTURING = threading.Lock()


@contextmanager
def captured(graph: Any, pool: Any) -> Iterator[None]:
    """Capture what is launched inside. Another thread may use the GPU meanwhile, in a stream of its
    own, but not capture: captures share one stream, and each waits for the device before."""
    with CAPTURING, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from softmax(logits / temperature), without a look from the host."""

    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # only the k most likely tokens; 0 for all
    top_p: float = 1.0  # only the most likely tokens that together have this probability

    @property
    def is_plain(self) -> bool:
        """Whether every token can be drawn."""
        return not self.top_k and self.top_p >= 1

    def draw(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Token ids (B',) from logits (B', V), at draws (B',) in [0, 1)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)

        probs = (logits.float() / self.temperature).softmax(dim=-1)
        if not self.is_plain:
            probs = self.truncate(probs)

        return at_draw(probs, draws)

    def truncate(self, probs: Tensor) -> Tensor:
        """Probabilities (B, V) with 0 for the tokens that top_k or top_p leaves out."""
        ordered, places = probs.sort(dim=-1, descending=True)
        if self.top_k:
            ordered[:, self.top_k :] = 0.0
            ordered = ordered / ordered.sum(dim=-1, keepdim=True)

        outside = ordered.cumsum(dim=-1) - ordered >= self.top_p
        outside[:, 0] = False
        kept = ordered.masked_fill(outside, 0.0)

        return torch.zeros_like(probs).scatter(-1, places, kept)


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts, padded on the left, and the rows that continue them."""

    ids: Tensor  # (U, P)
    mask: Tensor  # (U, P), True on tokens
    rows: Tensor  # (B,), the prompt of each row

    @property
    def positions(self) -> Tensor:
        """(U, P), the place of each token in its own prompt."""
        return (self.mask.long().cumsum(-1) - 1).clamp(min=0)


class Decoder(ABC):
    """The fixed tensors of one shape (B, P, N), and the work of one token on them.

    A step works on the first `size` rows of every tensor. `slots` says where their tokens belong
    in `written`, which keeps the order of the prompts. Each of its places has a number in `draws`
    that decides its token, so a row's tokens do not depend on the other rows.
    """

    def __init__(self, shape: Shape, sampling: Sampling, eos: Tensor, pad: int) -> None:
        self.B, self.P, self.N = shape
        self.sampling = sampling
        self.eos = eos
        self.pad = pad
        B = self.B

        integers = {"dtype": torch.long, "device": eos.device}
        self.tokens = torch.zeros(B, 1, **integers)
        self.positions = torch.zeros(B, 1, **integers)
        self.slots = torch.arange(B, **integers)
        self.running = torch.ones(B, dtype=torch.bool, device=eos.device)
        self.written = torch.zeros(B, self.N, **integers)
        self.draws = torch.zeros(B, self.N, device=eos.device)
        self.count = torch.zeros(1, **integers)  # tokens written

        # Numbers of rows, descending: a batch shrinks to them.
        self.sizes = [B]
        self.size = B

        # Numbers of tokens, ascending: until a span is written, a step need not look beyond it.
        self.spans = [self.N]
        self.graphs: dict[tuple[int, int], Any] = {}  # by size and span

    @abstractmethod
    def begin(self, prompts: Prompts, draws: Tensor | None = None) -> None:
        """Read the prompts, and draw the first token of each row; `draws` are those of the first
        rows."""

    @abstractmethod
    def step(self, span: int) -> None:
        """One more token for the first `size` rows, the last of at most `span`, entirely on the
        device."""

    @property
    def place(self) -> Tensor:
        """(1,), where the cache keeps the token that was written last."""
        return self.P + self.count - 1

    def restart(self, draws: Tensor | None) -> None:
        """`draws` (B, N) are needed unless the temperature is 0."""
        self.size = self.B
        torch.arange(self.B, out=self.slots)
        self.running.fill_(True)
        self.written.fill_(self.pad)
        self.count.zero_()
        if draws is not None:
            self.draws[: len(draws)] = draws

    def advance(self, n: int) -> None:
        """Write the token after n."""
        span = next(span for span in self.spans if n < span)
        graph = self.graphs.get((self.size, span))
        if graph is not None:
            graph.replay()
        else:
            self.step(span)

    def drop_ended(self) -> int:
        """Let rows leave that have ended, if a smaller size holds the others; returns how many run.
        It waits for the device."""
        running = self.running[: self.size]
        num_running = int(running.sum())
        size = min(size for size in self.sizes if size >= num_running)
        if num_running and size < self.size:
            order = running.to(torch.uint8).argsort(descending=True, stable=True)
            self.keep(order[:size])
            self.size = size

        return num_running

    def keep(self, rows: Tensor) -> None:
        """Move these rows (B',) to the front."""
        for tensor in (self.tokens, self.positions, self.slots, self.running):
            move(tensor, rows)

    def draw(self, logits: Tensor) -> Tensor:
        """Token ids (B',) from logits (B', V)."""
        slots = self.slots[: self.size]
        draws = self.draws[slots, self.count.expand(self.size)]
        return self.sampling.draw(logits, draws)

    def write(self, drawn: Tensor) -> None:
        """Append the tokens drawn (B',); rows that have ended get padding."""
        slots = self.slots[: self.size]
        running = self.running[: self.size]

        chosen = torch.where(running, drawn, self.pad)
        self.written.index_put_((slots, self.count.expand(self.size)), chosen)
        self.tokens[: self.size] = chosen[:, None]
        running &= torch.isin(chosen, self.eos, invert=True)
        self.count.add_(1)

    def capture(self, pool: Any) -> None:
        """Capture a graph for each size and span; afterwards `begin` must be called again."""
        for size in self.sizes:
            self.size = size
            for span in self.spans:
                self.graphs[size, span] = self._capture(span, pool)

    def _capture(self, span: int, pool: Any) -> Any:
        self.count.fill_(1)  # warm-ups must not write beyond the cache
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.step(span)

        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with captured(graph, pool):
            self.step(span)

        return graph

    def completions(self) -> list[list[int]]:
        """The tokens of each row, up to its first end token."""
        tokens = self.written[:, : int(self.count)]
        ends = torch.isin(tokens, self.eos)
        ends_before = ends.long().cumsum(dim=1) - ends.long()
        lengths = (ends_before == 0).sum(dim=1).tolist()

        return [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]


class ModelDecoder(Decoder):
    """Decodes by calling the model itself."""

    def __init__(self, model: Any, shape: Shape, sampling: Sampling, eos: Tensor, pad: int) -> None:
        super().__init__(shape, sampling, eos, pad)
        B, P, N = shape
        L = P + N
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=L)
        self.visible = torch.zeros(B, 1, 1, L, dtype=torch.bool, device=eos.device)

    def begin(self, prompts: Prompts, draws: Tensor | None = None) -> None:
        # Every row reads its prompt: the cache's first call decides its number of rows.
        rows = prompts.rows
        P = self.P
        L = P + self.N
        self.restart(draws)
        self.cache.reset()
        self.visible.zero_()
        self.visible[:, 0, 0, :P] = prompts.mask[rows]

        device = rows.device
        causal = torch.ones(P, L, dtype=torch.bool, device=device).tril()
        # A padded query attends to itself: with nothing to attend to it would give NaN, which
        # survives being masked.
        itself = torch.eye(P, L, dtype=torch.bool, device=device)
        visible = (self.visible & causal) | itself  # (B, 1, P, L)

        positions = prompts.positions[rows]
        self.positions.copy_(positions[:, -1:])
        self.write(self.draw(self.logits(prompts.ids[rows], visible, positions)))

    def step(self, span: int) -> None:
        self.visible.index_fill_(3, self.place, True)
        self.positions.add_(1)
        self.write(self.draw(self.logits(self.tokens, self.visible, self.positions)))

    def logits(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """(B, V) of the last position."""
        output = self.model(
            input_ids=ids,
            attention_mask=visible,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


class GraphSampler:
    """Samples completions of a model whose weights change in place between calls.

    Each kept shape, 8 at most, holds a cache of its own. If `dtype` differs from the weights', a
    copy of them in this type is kept and refreshed at each call. Prompts are padded to
    `prompt_length` at least: calls with prompts of many lengths then share their graphs.

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
        prompt_length: int = 0,
    ) -> None:
        reason = self.obstacle(model)
        if reason:
            raise ValueError(f"{self.name} cannot be used: {reason}")

        weight = next(model.parameters())
        self.model = model
        self.pad = pad
        self.sampling = sampling or Sampling()
        self.prompt_length = prompt_length
        self.eos = torch.tensor(list(eos), device=weight.device)
        self.on_gpu = weight.device.type == "cuda"
        self.decoders: OrderedDict[Shape, Decoder] = OrderedDict()
        self.copy: nn.Module | None = None
        self._pool: Any = None
        self.dtype = dtype or weight.dtype
        self._prepare(self.dtype)

    @staticmethod
    def obstacle(model: Any) -> str | None:
        return attention_obstacle(model)

    def _prepare(self, dtype: torch.dtype) -> None:
        if dtype == next(self.model.parameters()).dtype:
            return

        with as_loaded(self.model):
            self.copy = copy.deepcopy(self.model).eval().requires_grad_(False)

        for weight in self.copy.parameters():  # not buffers: rotary angles are useless in bfloat16
            weight.data = weight.data.to(dtype)

    def refresh(self) -> None:
        """Take over the model's present weights."""
        if self.copy is not None:
            new = [*self.model.parameters(), *self.model.buffers()]
            old = [*self.copy.parameters(), *self.copy.buffers()]
            torch._foreach_copy_(old, new)  # pyright: ignore

    def make_decoder(self, shape: Shape) -> Decoder:
        model = self.copy or self.model
        return ModelDecoder(model, shape, self.sampling, self.eos, self.pad)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        usual: int = 0,
        draws: Tensor | None = None,
    ) -> list[list[int]]:
        """Complete each prompt once; returns the new tokens, with the end token if there is one.

        Args:
            prompts: their token ids.
            max_tokens: the longest completion.
            usual: the rows of most calls; smaller calls are padded to a quarter, a half or all of
                it, so that calls of any size need three graphs. 0 makes one per number of rows.
            draws: (len(prompts), max_tokens) numbers in [0, 1), each decides a token; None draws
                them from the device's generator.
        """
        if self.sampling.temperature == 0:
            draws = None
        elif draws is None:
            draws = torch.rand(len(prompts), max_tokens, device=self.eos.device)
        else:
            draws = draws.to(self.eos.device)

        longest = max(self.prompt_length, *map(len, prompts))
        size = self.rows_at_once(max(usual, len(prompts)), longest + max_tokens)
        completions: list[list[int]] = []
        was_training = self.model.training
        self.model.eval()

        try:
            self.refresh()
            for start in range(0, len(prompts), size):
                rows = slice(start, start + size)
                batch = prompts[rows]
                own = None if draws is None else draws[rows]
                completions += self._sample_batch(batch, max_tokens, min(usual, size), own)
        finally:
            self.model.train(was_training)

        return completions

    def _sample_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, usual: int, draws: Tensor | None
    ) -> list[list[int]]:
        num_padding = padded_rows(len(prompts), usual) - len(prompts)
        padded = self.pad_left([*prompts, *[prompts[-1]] * num_padding])
        decoder = self.decoder(padded, max_tokens)
        decoder.begin(padded, draws)
        decoder.running[len(prompts) :] = False  # those that only fill up the size

        for n in range(1, max_tokens):
            if n % CHECK_EVERY == 0 and decoder.drop_ended() == 0:
                break
            decoder.advance(n)

        return decoder.completions()[: len(prompts)]

    def rows_at_once(self, rows: int, longest: int) -> int:
        """The rows of a batch: all, or equal parts whose caches, `longest` tokens a row, fit into
        their share of memory."""
        if not self.on_gpu:
            return rows

        row = cache_bytes(self.model, self.dtype) * (longest + PROMPT_STEP)
        memory = torch.cuda.mem_get_info(self.eos.device)[1]
        num_batches = math.ceil(rows * row / (CACHE_SHARE * memory))

        return min(rows, round_up(-(-rows // num_batches), ROW_STEP))

    def pad_left(self, prompts: Sequence[Sequence[int]]) -> Prompts:
        """Distinct prompts, P a multiple of `PROMPT_STEP`."""
        distinct: dict[tuple[int, ...], int] = {}  # to the number of the prompt

        # The rows of a group mostly share one list, which is then read once.
        numbers: dict[int, int] = {}  # by the identity of a list
        for prompt in prompts:
            if id(prompt) not in numbers:
                numbers[id(prompt)] = distinct.setdefault(tuple(prompt), len(distinct))

        lengths = np.array([len(prompt) for prompt in distinct])
        P = round_up(max(self.prompt_length, int(lengths.max())), PROMPT_STEP)
        ids = np.full((len(distinct), P), self.pad, dtype=np.int64)
        for prompt, number in distinct.items():
            ids[number, P - len(prompt) :] = prompt

        mask = np.arange(P) >= P - lengths[:, None]
        rows = np.array([numbers[id(prompt)] for prompt in prompts])

        device = self.eos.device
        return Prompts(
            ids=torch.from_numpy(ids).to(device),
            mask=torch.from_numpy(mask).to(device),
            rows=torch.from_numpy(rows).to(device),
        )

    def decoder(self, prompts: Prompts, max_tokens: int) -> Decoder:
        """The decoder of the prompts' shape; the shapes used last are kept."""
        shape = (len(prompts.rows), prompts.ids.shape[1], max_tokens)
        if shape not in self.decoders:
            while len(self.decoders) >= MAX_SHAPES:
                self.decoders.popitem(last=False)

            decoder = self.make_decoder(shape)
            if self.on_gpu and max_tokens > WARM_UPS + 1:
                self._capture(decoder, prompts)

            self.decoders[shape] = decoder

        self.decoders.move_to_end(shape)
        return self.decoders[shape]

    def _capture(self, decoder: Decoder, prompts: Prompts) -> None:
        has_graphs = any(kept.graphs for kept in self.decoders.values())
        if not has_graphs:
            # The allocator retires a pool with its last graph, and its handle with it.
            self._pool = torch.cuda.graph_pool_handle()

        decoder.begin(prompts)
        decoder.capture(self._pool)


def sizes_of(B: int) -> list[int]:
    """The numbers of rows to which a batch of B shrinks, descending from B."""
    sizes = {min(B, round_up(-(-B * part // 16), ROW_STEP)) for part in SIXTEENTHS}
    return sorted(sizes, reverse=True)


def move(tensor: Tensor, rows: Tensor) -> None:
    """Bring rows of a tensor to its front."""
    tensor[: len(rows)] = tensor[rows]


def padded_rows(count: int, usual: int) -> int:
    """The rows of the smallest graph that holds `count`: a part of the usual number if it can."""
    for part in PARTS_OF_USUAL:
        size = -(-usual // part)
        if size >= count:
            return size

    return count


def attention_obstacle(model: Any) -> str | None:
    """Why a model cannot use a static cache with boolean masks, which eager attention would add."""
    config = model.config.get_text_config()
    reason = implementation_obstacle(config)
    if reason:
        return reason

    layer_types = set(getattr(config, "layer_types", None) or [])
    other_types = sorted(layer_types - {"full_attention"})
    if other_types:
        return f"it has {', '.join(other_types)}, not full attention"

    if getattr(config, "sliding_window", None):
        return "it has a sliding window, not full attention"

    return None


def implementation_obstacle(config: Any) -> str | None:
    if config._attn_implementation != "sdpa":
        return f"attention is {config._attn_implementation}, load with attn_implementation='sdpa'"

    return None
