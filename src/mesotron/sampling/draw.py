"""Drawing a token at a number in [0, 1), and what a token costs in memory: shared by all samplers.

Shapes: B rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor


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


def cache_bytes(model: Any, dtype: torch.dtype) -> int:
    """Of the keys and values of one token in every layer."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads

    return config.num_hidden_layers * 2 * num_heads * head_dim * dtype.itemsize


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step
