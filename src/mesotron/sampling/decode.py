"""Batched completions for evaluation and chat: prompts sorted by length, finished rows dropped.

Each completion has its own row of random numbers, so the same seed gives the same completions for
any batch size, up to rounding in the model itself. On a GPU the fused decoder of `decoder` writes
them, as in training, if memory has room for its copy of the weights; elsewhere, and for models that
it does not take, the loop of this file.

Shapes: B running rows of a batch, T tokens so far, V vocabulary.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mesotron.models.sharded import is_sharded, largest, reshard, smallest
from mesotron.sampling.draw import cache_bytes, choose

# Rows are dropped from the batch when this share of it is finished: copying the cache costs about
# as much as a step.
DROP_SHARE = 0.25
MAX_BATCH = {"cpu": 256, "cuda": 1024}
MEMORY_SHARE = 0.4
# Of the free memory, for the fused decoder's copy of the weights: the rest holds the batch.
COPY_SHARE = 0.5


@dataclass(frozen=True)
class Completion:
    text: str
    ids: tuple[int, ...]  # tokens without the end token
    truncated: bool  # whether the token limit ended it
    played: Any = None  # what an environment paid, `tasks.environment.Played`


def generate(model: Any, tokenizer: Any, prompts: Sequence[str], **how: Any) -> list[Completion]:
    """Complete each rendered text with special tokens; `how` is `generate_ids`'."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    return generate_ids(model, tokenizer, encoded, **how)


@torch.inference_mode()
def generate_ids(  # noqa: PLR0913  # settings by name
    model: Any,
    tokenizer: Any,
    encoded: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Complete each prompt once, in the order of the prompts.

    Args:
        encoded: their tokens; repeat one to sample it several times.
        temperature: 0 is greedy.
        batch: rows at once; None: what fits into memory.
        progress: called with the number of completions just finished.
    """
    check_lengths(model, encoded, max_tokens)

    draws = None
    if temperature:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(len(encoded), max_tokens, generator=generator)

    # Longest first: if memory does not suffice, it fails at once.
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
    longest = len(encoded[order[0]]) if order else 0
    size = smallest(batch or fitting_batch(model, longest + max_tokens), model)

    write = writer(model, tokenizer, longest, max_tokens, temperature)

    completions: dict[int, Completion] = {}
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        own = None if draws is None else draws[rows]
        written = write([list(encoded[i]) for i in rows], own)

        for i, ids in zip(rows, written, strict=True):
            completions[i] = to_completion(tokenizer, ids)

        if progress is not None:
            progress(len(rows))

    reshard(model)
    return [completions[i] for i in range(len(encoded))]


def check_lengths(model: Any, encoded: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Refuse prompts that leave too little of the model's context for a completion."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limit = (context or sys.maxsize) - max_tokens
    for i, ids in enumerate(encoded):
        if not 0 < len(ids) <= limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens; the model takes 1 to {max(limit, 0)} beside a "
                f"completion of {max_tokens}: lower --max-tokens or change the prompt"
            )


def to_completion(tokenizer: Any, ids: Sequence[int]) -> Completion:
    has_ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    body = ids[:-1] if has_ended else ids
    text = tokenizer.decode(body, skip_special_tokens=True)

    return Completion(text, tuple(body), truncated=not has_ended)


def writer(
    model: Any, tokenizer: Any, longest: int, max_tokens: int, temperature: float
) -> Callable[[list[list[int]], Tensor | None], list[list[int]]]:
    """A function of prompts, `longest` at most, and draws that returns what follows them."""
    if not on_gpu(model) or is_sharded(model):
        return partial(_decode, model, tokenizer, max_tokens, temperature)

    # Its imports take a second that a CPU need not wait for.
    from mesotron.sampling.decoder import FusedSampler
    from mesotron.sampling.graphs import Sampling

    dtype = compute_dtype(model)
    if FusedSampler.obstacle(model) or not copy_fits(model, dtype):
        return partial(_decode, model, tokenizer, max_tokens, temperature)

    sampler = FusedSampler(
        model,
        eos=[tokenizer.eos_token_id],
        pad=tokenizer.pad_token_id,
        sampling=Sampling(temperature),
        dtype=dtype,
        prompt_length=longest,
    )
    return lambda prompts, draws: sampler.sample(prompts, max_tokens, draws=draws)


def on_gpu(model: Any) -> bool:
    return model.get_input_embeddings().weight.device.type == "cuda"


def copy_fits(model: Any, dtype: torch.dtype) -> bool:
    """Whether a copy of the weights leaves room for a batch."""
    device = model.get_input_embeddings().weight.device
    free = free_memory(device)
    if device.type == "cuda":  # what PyTorch holds without using it is free as well
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    weights = sum(weight.numel() for weight in model.parameters())
    return weights * dtype.itemsize <= COPY_SHARE * free


def compute_dtype(model: Any) -> torch.dtype:
    """In which a model multiplies: inside a trainer its weights may be wider."""
    dtypes = []
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    handle = linear.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))

    try:
        token = torch.zeros(1, 1, dtype=torch.long, device=linear.weight.device)
        model(input_ids=token, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()

    return dtypes[0]


def _decode(
    model: Any,
    tokenizer: Any,
    max_tokens: int,
    temperature: float,
    encoded: Sequence[Sequence[int]],
    draws: Tensor | None,
) -> list[list[int]]:
    """The tokens that follow each prompt, with the end token; `draws` has a row for each."""
    device = model.get_input_embeddings().weight.device
    padded = tokenizer.pad({"input_ids": list(encoded)}, padding_side="left", return_tensors="pt")
    tokens = padded["input_ids"].to(device)  # (B, T), later (B, 1)
    mask = padded["attention_mask"].to(device)  # (B, T)
    if draws is not None:
        draws = draws.to(device)

    written: list[list[int]] = [[] for _ in encoded]
    alive = torch.arange(len(encoded), device=device)  # (B,) the prompt of each row of the batch
    running = torch.ones(len(encoded), dtype=torch.bool, device=device)  # (B,)

    cache = None
    for position in range(max_tokens):
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        output = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position_ids[:, -tokens.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values

        draw = None if draws is None else draws[alive, position]
        chosen = choose(output.logits[:, -1].float(), temperature, draw)  # (B,)
        for row, token, is_running in zip(alive.tolist(), chosen.tolist(), running.tolist()):
            if is_running:
                written[row].append(token)

        running &= chosen != tokenizer.eos_token_id
        num_running = int(running.sum())
        if largest(num_running, model) == 0:
            break

        tokens = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if 0 < num_running <= (1 - DROP_SHARE) * len(alive):
            kept = running.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            tokens = tokens[kept]
            mask = mask[kept]
            alive = alive[kept]
            running = running[kept]

    return written


def fitting_batch(model: Any, length: int) -> int:
    """How many rows of `length` tokens fit into a share of the free memory: keys and values of
    every layer, and a few times the float32 logits of the last token."""
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().weight
    device = weight.device

    cache = cache_bytes(model, weight.dtype) * length
    logits = 4 * config.vocab_size
    row = 2 * cache + 6 * logits

    fits = int(MEMORY_SHARE * free_memory(device) / row)
    return max(1, min(fits, MAX_BATCH.get(device.type, 256)))


def free_memory(device: torch.device) -> int:
    """Bytes that a device has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]

    # macOS does not say what is free.
    pages = {"SC_AVPHYS_PAGES", "SC_PHYS_PAGES"} & os.sysconf_names.keys()
    return os.sysconf(min(pages)) * os.sysconf("SC_PAGE_SIZE")
