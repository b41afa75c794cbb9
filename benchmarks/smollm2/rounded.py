"""bfloat16 on a GPU, imitated in float32: every operation's result is rounded, on any CPU.

The sampler computes in bfloat16 throughout; training passes run in autocast, where products are
bfloat16 and norms, the residual stream and its sums stay float32. Llama's layers alone.

Legend: B rows, S tokens, H query heads, K key heads, D numbers of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu


def rounded(x: Tensor) -> Tensor:
    """To the nearest bfloat16."""
    return x.to(torch.bfloat16).float()


def same(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def imitate(model: Any, ids: Tensor, mask: Tensor, last: int, sampling: bool) -> Tensor:
    """[B, last, V] log-probabilities after the last tokens.

    Args:
        model: a float32 Llama with tied embeddings.
        ids: [B, S], padded on the left.
        mask: [B, S] booleans.
        last: how many positions.
        sampling: as the sampler computes; else as a training pass in autocast.
    """
    config = model.config
    r = rounded
    outside = r if sampling else same  # what autocast leaves in float32
    weights = {name: r(p) for name, p in model.named_parameters()}
    kept = weights if sampling else dict(model.named_parameters())
    B, S = ids.shape
    D = config.head_dim
    share = config.num_attention_heads // config.num_key_value_heads
    seen = mask[:, None, None] & torch.ones(S, S, dtype=torch.bool).tril() | torch.eye(S).bool()
    x = embedding(ids, kept["model.embed_tokens.weight"])
    places = (mask.long().cumsum(1) - 1).clamp(min=0)
    cos, sin = (outside(angle)[:, None] for angle in model.model.rotary_emb(x, places))

    def norm(x: Tensor, name: str) -> Tensor:
        return r(rms_norm(x, x.shape[-1:], kept[f"model.{name}.weight"], config.rms_norm_eps))

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return r(outside(x * cos) + torch.cat([-second, first], dim=-1) * sin)

    for k in range(config.num_hidden_layers):
        at = f"layers.{k}"

        def product(x: Tensor, name: str, at: str = at) -> Tensor:
            return linear(x, weights[f"model.{at}.{name}.weight"])

        normed = norm(x, f"{at}.input_layernorm")
        query, key, value = (
            r(product(normed, f"self_attn.{one}_proj")).view(B, S, -1, D).transpose(1, 2)
            for one in "qkv"
        )

        key, value = (y.repeat_interleave(share, dim=1) for y in (turn(key), value))
        mixed = r(scaled_dot_product_attention(turn(query), key, value, attn_mask=seen))
        found = product(mixed.transpose(1, 2).reshape(B, S, -1), "self_attn.o_proj")
        x = r(x + found) if sampling else x + r(found)
        normed = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (r(product(normed, f"mlp.{one}_proj")) for one in ("gate", "up"))
        found = product(r(r(silu(gate)) * up), "mlp.down_proj")
        x = r(x + found) if sampling else x + r(found)

    logits = r(linear(norm(x, "norm")[:, -last:], weights["model.embed_tokens.weight"]))
    return logits.log_softmax(-1)
