"""Batched completions for evaluation: prompts sorted by length, finished rows dropped.

Each completion has its own row of random numbers, so the same seed gives the same completions for
any batch size, up to rounding in the model itself.

Shapes: B running rows of a batch, T tokens so far, V vocabulary.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesotron.models.sharded import largest, reshard, smallest

# Rows are dropped from the batch when this share of it is finished: copying the cache costs about
# as much as a step.
DROP_SHARE = 0.25
MAX_BATCH = {"cpu": 256, "cuda": 1024}
MEMORY_SHARE = 0.4


@dataclass(frozen=True)
class Completion:
    text: str
    ids: tuple[int, ...]  # tokens without the end token
    truncated: bool  # whether the token limit ended it


@torch.inference_mode()
def generate(  # noqa: PLR0913  # settings by name
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
    """Complete each prompt once, in the order of the prompts.

    Args:
        prompts: rendered texts with special tokens; repeat one to sample it several times.
        temperature: 0 is greedy.
        batch: rows at once; None: what fits into memory.
        progress: called with the number of completions just finished.
    """
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    check_lengths(model, encoded, max_tokens)

    draws = None
    if temperature:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(len(prompts), max_tokens, generator=generator)

    # Longest first: if memory does not suffice, it fails at once.
    order = sorted(range(len(prompts)), key=lambda i: -len(encoded[i]))
    longest = len(encoded[order[0]]) if order else 0
    size = smallest(batch or fitting_batch(model, longest + max_tokens), model)

    completions: dict[int, Completion] = {}
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        written = _decode(
            model,
            tokenizer,
            [encoded[i] for i in rows],
            max_tokens,
            temperature,
            None if draws is None else draws[rows],
        )

        for i, ids in zip(rows, written, strict=True):
            completions[i] = to_completion(tokenizer, ids)

        if progress is not None:
            progress(len(rows))

    reshard(model)
    return [completions[i] for i in range(len(prompts))]


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


def _decode(
    model: Any,
    tokenizer: Any,
    encoded: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
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


def choose(logits: Tensor, temperature: float, draw: Tensor | None) -> Tensor:
    """Tokens (B,) from logits (B, V): the most likely ones, or those at draws (B,) in [0, 1)."""
    if draw is None:
        return logits.argmax(dim=-1)

    return at_draw((logits / temperature).softmax(dim=-1), draw)


def at_draw(probs: Tensor, draw: Tensor) -> Tensor:
    """Of each row of probs (B, V), the first token whose cumulative probability exceeds its draw
    (B,) in [0, 1)."""
    upper = probs.cumsum(dim=-1)
    whole = upper[:, -1:]

    # The last sum may miss 1 by rounding, and so may the product.
    target = torch.minimum(draw[:, None] * whole, whole.nextafter(whole.new_zeros(())))
    tokens = torch.searchsorted(upper, target, right=True)[:, 0]
    return tokens.clamp(max=probs.shape[-1] - 1)  # NaN


def fitting_batch(model: Any, length: int) -> int:
    """How many rows of `length` tokens fit into a share of the free memory: keys and values of
    every layer, and a few times the float32 logits of the last token."""
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().weight
    device = weight.device

    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    keys_and_values = 2 * num_heads * head_dim * weight.element_size()  # bytes of a token and layer

    cache = config.num_hidden_layers * keys_and_values * length
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


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
