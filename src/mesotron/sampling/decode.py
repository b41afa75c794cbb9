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
    """Complete each prompt once, in the order of the prompts: rendered texts with special tokens;
    repeat one to sample it several times. Temperature 0 is greedy. `batch` rows at once, or what
    fits into memory; `progress` is called with the number of completions just finished."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    limit = (context or sys.maxsize) - max_tokens
    for i, ids in enumerate(encoded):
        if not 0 < len(ids) <= limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens; the model takes 1 to {max(limit, 0)} beside a "
                f"completion of {max_tokens}: lower --max-tokens or change the prompt"
            )

    order = sorted(range(len(prompts)), key=lambda i: -len(encoded[i]))
    draws = None
    if temperature:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(len(prompts), max_tokens, generator=generator)

    longest = len(encoded[order[0]]) if order else 0
    size = smallest(batch or fitting_batch(model, longest + max_tokens), model)

    done: dict[int, Completion] = {}
    for start in range(0, len(order), size):
        # Longest first: if memory does not suffice, it fails at once.
        rows = order[start : start + size]
        picked = None if draws is None else draws[rows]

        ids = _decode(
            model,
            tokenizer,
            [encoded[i] for i in rows],
            max_tokens,
            temperature,
            picked,
        )
        for i, row in zip(rows, ids, strict=True):
            ended = bool(row) and row[-1] == tokenizer.eos_token_id
            body = row[:-1] if ended else row
            text = tokenizer.decode(body, skip_special_tokens=True)
            done[i] = Completion(text, tuple(body), not ended)

        if progress is not None:
            progress(len(rows))

    reshard(model)
    return [done[i] for i in range(len(prompts))]


def _decode(
    model: Any,
    tokenizer: Any,
    encoded: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    draws: Tensor | None,
) -> list[list[int]]:
    device = model.get_input_embeddings().weight.device
    padded = tokenizer.pad({"input_ids": list(encoded)}, padding_side="left", return_tensors="pt")
    tokens = padded["input_ids"].to(device)
    mask = padded["attention_mask"].to(device)
    draws = None if draws is None else draws.to(device)
    written: list[list[int]] = [[] for _ in encoded]
    alive = torch.arange(len(encoded), device=device)  # (B,) the prompt of each row of the batch
    running = torch.ones(len(encoded), dtype=torch.bool, device=device)  # (B,)

    cache = None
    for position in range(max_tokens):
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

        cache = out.past_key_values
        draw = None if draws is None else draws[alive, position]

        chosen = choose(out.logits[:, -1].float(), temperature, draw)  # (B,)
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
            keep = running.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            tokens = tokens[keep]
            mask = mask[keep]
            alive = alive[keep]
            running = running[keep]

    return written


def choose(logits: Tensor, temperature: float, draw: Tensor | None) -> Tensor:
    if draw is None:
        return logits.argmax(dim=-1)

    upper = (logits / temperature).softmax(dim=-1).cumsum(dim=-1)  # (B, V)

    # The last sum may miss 1 by rounding; scaling the draw keeps it inside.
    target = draw[:, None] * upper[:, -1:]
    return torch.searchsorted(upper, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def fitting_batch(model: Any, length: int) -> int:
    """How many rows of `length` tokens fit into a share of the free memory: keys and values of
    every layer, and a few times the float32 logits of the last token."""
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().weight
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * weight.element_size() * length
    row = 2 * cache + 6 * 4 * config.vocab_size

    if weight.device.type == "cuda":
        free = torch.cuda.mem_get_info(weight.device)[0]
    else:  # macOS does not say what is free
        pages = {"SC_AVPHYS_PAGES", "SC_PHYS_PAGES"} & os.sysconf_names.keys()
        free = os.sysconf(min(pages)) * os.sysconf("SC_PAGE_SIZE")

    fits = int(MEMORY_SHARE * free / row)
    return max(1, min(fits, MAX_BATCH.get(weight.device.type, 256)))


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
