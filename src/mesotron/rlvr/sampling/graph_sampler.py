"""Completions at the speed of the GPU: a static cache, and one captured graph that makes a token.

`generate` of Transformers launches every kernel of every layer from Python, and for a model of less
than a billion weights the GPU mostly waits. Here the work of one token is captured once for a shape
(rows, prompt length, completion length) and replayed. Where there is no CUDA the same steps run
without a graph. Full attention only; nothing sharded.

Shapes: B rows, P padded prompt length, N longest completion, L = P + N cache length, V vocabulary.
"""

import copy
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import StaticCache

from mesotron.rlvr.sampling.draw import Sampling
from mesotron.rlvr.wrapping import as_loaded

# Prompts are padded up to a multiple of this, so that few shapes serve a whole data set.
PROMPT_STEP = 32
# Shapes whose graphs and caches are kept: the sizes below for two lengths of prompts, and two more.
KEPT_SHAPES = 8
# A call of fewer rows than usual has a graph of a quarter, a half or all of them: with an eighth
# and so on, dynamic sampling's rounds threw graphs away and captured them again.
PARTS_OF_USUAL = (4, 2, 1)
# Tokens between two looks at whether all rows have ended: a look waits for the GPU.
LOOK_EVERY = 8
# Capture needs every lazy initialisation to have happened.
WARM_UPS = 2


class Slate(ABC):
    """The fixed tensors of one shape, and the work of one token on them.

    Args:
        shape: B, P and N.
        sampling: how tokens are drawn.
        eos: tokens that end a completion.
        pad: what a row gets after its end.
    """

    def __init__(
        self, shape: tuple[int, int, int], sampling: Sampling, eos: Tensor, pad: int
    ) -> None:
        B, P, N = shape
        device = eos.device
        self.sampling, self.eos, self.pad = sampling, eos, pad
        self.P, self.N = P, N
        self.tokens = torch.zeros(B, 1, dtype=torch.long, device=device)
        self.places = torch.zeros(B, 1, dtype=torch.long, device=device)
        self.running = torch.ones(B, dtype=torch.bool, device=device)
        self.written = torch.zeros(B, N, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)  # tokens written
        self.replay: Callable[[], None] = self.step

    @abstractmethod
    def begin(self, ids: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Read the prompts and draw the first token of each row.

        Args:
            ids: (U, P) distinct prompts padded on the left.
            mask: (U, P) booleans, false on the padding.
            rows: (B,) the prompt of each row.
        """

    @abstractmethod
    def step(self) -> None:
        """One more token for every row; all on the device, nothing allocated by the caller."""

    def write(self, logits: Tensor) -> None:
        """Draw a token for each row that runs and note it."""
        chosen = torch.where(self.running, self.sampling.draw(logits), self.pad)
        self.written.index_copy_(1, self.count, chosen[:, None])
        self.tokens.copy_(chosen[:, None])
        self.running &= torch.isin(chosen, self.eos, invert=True)
        self.count.add_(1)

    def capture(self, pool: Any) -> None:
        """Make `replay` a graph of `step`; what was begun must be begun again."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.step()
        self.replay = graph.replay

    def rows(self) -> list[list[int]]:
        """The tokens of each row up to its end, the ending token included."""
        length = int(self.count)
        tokens = self.written[:, :length]
        ends = torch.isin(tokens, self.eos)
        # Positions up to the first end: no end before this one.
        before = ends.long().cumsum(dim=1) - ends.long()
        kept = (before == 0).sum(dim=1).tolist()
        return [row[:n] for row, n in zip(tokens.tolist(), kept, strict=True)]


class ModelSlate(Slate):
    """A slate whose tokens come from a model of Transformers and a static cache.

    Args:
        model: answers `model(input_ids, attention_mask, position_ids, past_key_values)`.
        shape: B, P and N.
        sampling: how tokens are drawn.
        eos: tokens that end a completion.
        pad: what a row gets after its end.
    """

    def __init__(
        self, model: Any, shape: tuple[int, int, int], sampling: Sampling, eos: Tensor, pad: int
    ) -> None:
        super().__init__(shape, sampling, eos, pad)
        B, P, N = shape
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=P + N)
        self.seen = torch.zeros(B, 1, 1, P + N, dtype=torch.bool, device=eos.device)

    def begin(self, ids: Tensor, mask: Tensor, rows: Tensor) -> None:
        """Read every row's prompt: the cache's first call decides its number of rows."""
        P, N = self.P, self.N
        ids, mask = ids[rows], mask[rows]
        self.cache.reset()
        self.running.fill_(True)
        self.count.zero_()
        self.seen.zero_()
        self.seen[:, 0, 0, :P] = mask
        causal = torch.ones(P, P + N, dtype=torch.bool, device=ids.device).tril()
        # A padded query attends to itself: with nothing to attend to it would give NaN, which
        # survives being masked.
        itself = torch.eye(P, P + N, dtype=torch.bool, device=ids.device)
        seen = (self.seen & causal) | itself  # (B, 1, P, L)
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)
        self.places.copy_(places[:, -1:])
        self.write(self.logits(ids, seen, places))

    def step(self) -> None:
        """One token through every layer."""
        self.seen.index_fill_(3, self.P + self.count - 1, True)
        self.places.add_(1)
        self.write(self.logits(self.tokens, self.seen, self.places))

    def logits(self, ids: Tensor, seen: Tensor, places: Tensor) -> Tensor:
        """(B, V) of the last position."""
        out = self.model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=places,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


class GraphSampler:
    """Samples completions of a model whose weights change in place between calls.

    Each shape that is kept, 8 at most, holds a cache of its own: 2 x layers x rows x
    (prompt + completion) x key heads x head size numbers, for as long as the sampler lives.

    Args:
        model: a causal language model of Transformers with full attention in every layer.
        eos: ids that end a completion.
        pad: the id that pads.
        sampling: how tokens are drawn; PyTorch's own generator of the device draws.
        dtype: in which to sample. If it is not the weights' own, a copy of them in this type is
            kept beside the model and brought up to date at each call.

    Example:
        sampler = GraphSampler(model, eos=[2], pad=0, dtype=torch.bfloat16)
        completions = sampler.sample([[5, 6, 7], [8]], max_tokens=32)
    """

    def __init__(
        self,
        model: nn.Module,
        eos: Sequence[int],
        pad: int,
        sampling: Sampling | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_attention(model)
        weight = next(model.parameters())
        self.model, self.pad, self.sampling = model, pad, sampling or Sampling()
        self.eos = torch.tensor(list(eos), device=weight.device)
        self.on_gpu = weight.device.type == "cuda"
        own = dtype is not None and dtype != weight.dtype
        self.copy = narrow_copy(model, dtype) if own and dtype is not None else None
        self.slates: OrderedDict[tuple[int, int, int], Slate] = OrderedDict()
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, usual: int = 0
    ) -> list[list[int]]:
        """Complete each prompt once.

        Args:
            prompts: token ids, none empty.
            max_tokens: longest completion.
            usual: rows of most calls; fewer are filled up to a quarter, a half or all of it, so
                that calls of any size need three graphs. 0 has one for every number of rows.

        Returns:
            The tokens after each prompt, with the one that ended it if it ended.
        """
        trains = self.model.training
        self.model.eval()
        try:
            self.follow()
            idle = filled_up(len(prompts), usual) - len(prompts)
            ids, mask, rows = self.pad_left([*prompts, *[prompts[-1]] * idle])
            slate = self.slate(ids, mask, rows, max_tokens)
            slate.begin(ids, mask, rows)
            for n in range(1, max_tokens):
                if n % LOOK_EVERY == 0 and not bool(slate.running.any()):
                    break
                slate.replay()
            return slate.rows()[: len(prompts)]
        finally:
            self.model.train(trains)

    def follow(self) -> None:
        """Take the model's present weights, where a copy of them samples."""
        if self.copy is not None:
            refresh(self.copy, self.model)

    def pad_left(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Distinct prompts as (U, P) ids and booleans, P a multiple of `PROMPT_STEP`, and (B,)
        which of them each row has."""
        distinct: dict[tuple[int, ...], int] = {}
        # A group's rows are mostly one list, which is then looked at once.
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

    def slate(self, ids: Tensor, mask: Tensor, rows: Tensor, max_tokens: int) -> Slate:
        """The tensors and the graph of this shape, kept for the next call."""
        shape = (len(rows), ids.shape[1], max_tokens)
        if shape not in self.slates:
            while len(self.slates) >= KEPT_SHAPES:
                self.slates.popitem(last=False)
            slate = self.make_slate(shape)
            if self.on_gpu and max_tokens > WARM_UPS + 1:
                # Warming up draws: the same numbers must follow whether a graph was made or not.
                state = torch.cuda.get_rng_state()
                slate.begin(ids, mask, rows)
                slate.capture(self.pool)
                torch.cuda.set_rng_state(state)
            self.slates[shape] = slate
        self.slates.move_to_end(shape)
        return self.slates[shape]

    def make_slate(self, shape: tuple[int, int, int]) -> Slate:
        """A new slate of the model, or of its copy."""
        return ModelSlate(self.copy or self.model, shape, self.sampling, self.eos, self.pad)


def filled_up(rows: int, usual: int) -> int:
    """The least of usual / 4, usual / 2 and usual (rounded up) that holds the rows.

    Example:
        >>> [filled_up(rows, 250) for rows in (250, 126, 125, 63, 9, 300)], filled_up(9, 0)
        ([250, 250, 125, 63, 63, 300], 9)
    """
    sizes = (-(-usual // part) for part in PARTS_OF_USUAL)
    return next((size for size in sizes if size >= rows), rows)


def check_attention(
    model: nn.Module,
    asked: str = "rollout.engine graph",
    instead: str = "use rollout.engine generate, or vLLM",
) -> None:
    """Refuse models whose cache is not one static block of keys and values per layer, and attention
    that does not read a mask of booleans: eager attention would add it.

    Args:
        model: of Transformers.
        asked: the setting that needs this.
        instead: what to do where it cannot be had.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if config._attn_implementation != "sdpa":
        raise ValueError(
            f"{asked} needs attention sdpa, and this model has {config._attn_implementation}: load "
            f"it with attn_implementation='sdpa', or {instead}"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        odd = ", ".join(sorted(kinds - {"full_attention"})) or "a sliding window"
        raise ValueError(
            f"{asked} needs full attention in every layer, and this model has {odd}: {instead}"
        )


def narrow_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that computes in another type, without what a trainer hung on the model's forward."""
    with as_loaded(model):
        made = copy.deepcopy(model)
    for p in made.parameters():  # buffers stay: rotary angles are worthless in bfloat16
        p.data = p.data.to(dtype)
    return made.eval().requires_grad_(False)


def refresh(made: nn.Module, model: nn.Module) -> None:
    """Bring a copy's weights and buffers up to date."""
    mine, theirs = ([*one.parameters(), *one.buffers()] for one in (made, model))
    torch._foreach_copy_(mine, theirs)  # pyright: ignore
