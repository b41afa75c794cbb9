"""Completions in batches: prompts sorted by length, padded on the left, finished rows dropped.

A draw is a number in [0, 1) that belongs to its completion and position, not to its batch: the
same seed gives the same completions whatever the batch size, up to rounding in the model itself.

Shapes: B rows alive in a batch, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesotron.rlvr.wrapping import largest, reshard, smallest

# Rows are dropped from the batch when this share of it is finished: copying the cache costs about
# as much as a step, so doing it for every row would not pay.
DROP_SHARE = 0.25
LARGEST_BATCH = {"cpu": 256, "cuda": 1024}
MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt."""

    text: str
    ids: tuple[int, ...]
    """Tokens without the one that ended it."""
    truncated: bool
    """Whether the limit of tokens ended it, rather than the model."""


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """Complete each prompt once.

    Args:
        model: a causal language model of Transformers, in evaluation mode.
        tokenizer: its tokenizer, with tokens that pad and end.
        prompts: rendered texts, special tokens included; repeat one to sample it several times.
        max_tokens: longest completion.
        temperature: 0 takes the likeliest token, else softmax(logits / temperature) is sampled.
        seed: of the draws; prompt i uses row i of one table.
        batch: rows at once; what memory holds if None.
        progress: called with the number of completions that were just finished.

    Returns:
        One completion for each prompt, in the order of the prompts.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if temperature < 0:
        raise ValueError(f"temperature={temperature:g} must be 0 (greedy) or above")
    if batch is not None and batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    check_prompts(encoded, model, max_tokens)
    order = sorted(range(len(prompts)), key=lambda i: -len(encoded[i]))
    draws = table_of_draws(len(prompts), max_tokens, seed) if temperature else None
    longest = len(encoded[order[0]]) if order else 0
    size = smallest(batch or fitting_batch(model, longest + max_tokens), model)
    done: dict[int, Completion] = {}
    for start in range(0, len(order), size):
        # Longest first: if memory does not suffice, it is known at once.
        rows = order[start : start + size]
        picked = None if draws is None else draws[rows]
        ids = decode(model, tokenizer, [encoded[i] for i in rows], max_tokens, temperature, picked)
        done |= dict(zip(rows, finish(ids, tokenizer), strict=True))
        if progress is not None:
            progress(len(rows))
    reshard(model)
    return [done[i] for i in range(len(prompts))]


def check_prompts(encoded: Sequence[Sequence[int]], model: Any, max_tokens: int) -> None:
    """Refuse an empty prompt, and one that does not fit before the completion."""
    room = model.config.get_text_config().max_position_embeddings - max_tokens
    for i, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"prompt {i} is empty: there is nothing to complete")
        if len(ids) > room:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens and the model has room for {max(room, 0)} "
                f"beside a completion of {max_tokens}: lower --max-tokens or shorten the prompt"
            )


def table_of_draws(rows: int, max_tokens: int, seed: int) -> Tensor:
    """One uniform number for each completion and position, (rows, max_tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, max_tokens, generator=generator)


def decode(
    model: Any,
    tokenizer: Any,
    encoded: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    draws: Tensor | None,
) -> list[list[int]]:
    """The tokens that follow each prompt of one batch, the ending token included if it came."""
    device = model.get_input_embeddings().weight.device
    padded = tokenizer.pad({"input_ids": list(encoded)}, padding_side="left", return_tensors="pt")
    tokens, mask = padded["input_ids"].to(device), padded["attention_mask"].to(device)
    draws = None if draws is None else draws.to(device)
    written: list[list[int]] = [[] for _ in encoded]
    alive = torch.arange(len(encoded), device=device)  # (B,) the prompt of each row of the batch
    running = torch.ones(len(encoded), dtype=torch.bool, device=device)  # (B,)
    cache = None
    for position in range(max_tokens):
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        draw = None if draws is None else draws[alive, position]
        chosen = choose(out.logits[:, -1].float(), temperature, draw)  # (B,)
        for row, token, open_ in zip(alive.tolist(), chosen.tolist(), running.tolist()):
            if open_:
                written[row].append(token)
        running &= chosen != tokenizer.eos_token_id
        num_running = int(running.sum())
        if largest(num_running, model) == 0:
            break
        tokens, mask = chosen[:, None], torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if 0 < num_running <= (1 - DROP_SHARE) * len(alive):
            keep = running.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            tokens, mask, alive = tokens[keep], mask[keep], alive[keep]
            running = running[keep]
    return written


def choose(logits: Tensor, temperature: float, draw: Tensor | None) -> Tensor:
    """The next token of each row: the likeliest, or the one whose slice of [0, 1) holds the draw.

    Args:
        logits: (B, V), float32.
        temperature: divides the logits when there are draws.
        draw: (B,) numbers in [0, 1), or None for the likeliest.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        >>> choose(logits, 1.0, torch.tensor([0.2, 0.8])).tolist()
        [0, 1]
    """
    if draw is None:
        return logits.argmax(dim=-1)
    upper = (logits / temperature).softmax(dim=-1).cumsum(dim=-1)  # (B, V)
    # The last sum may miss 1 by rounding; scaling the draw keeps it inside.
    target = draw[:, None] * upper[:, -1:]
    return torch.searchsorted(upper, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def finish(ids: Sequence[list[int]], tokenizer: Any) -> list[Completion]:
    """Cut the ending token off and decode."""
    completions = []
    for row in ids:
        ended = bool(row) and row[-1] == tokenizer.eos_token_id
        body = row[:-1] if ended else row
        text = tokenizer.decode(body, skip_special_tokens=True)
        completions.append(Completion(text, tuple(body), not ended))
    return completions


def fitting_batch(model: Any, length: int) -> int:
    """How many rows of this many tokens fit in a share of the memory that is free.

    A row keeps keys and values of every layer, and needs the logits of its last token in float32
    a few times over.
    """
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().weight
    heads = config.num_key_value_heads or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * weight.element_size() * length
    row = 2 * cache + 6 * 4 * config.vocab_size
    fits = int(MEMORY_SHARE * free_memory(weight.device) / row)
    return max(1, min(fits, LARGEST_BATCH.get(weight.device.type, 256)))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
