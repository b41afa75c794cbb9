"""bfloat16 on a GPU, imitated in float32: every operation's result is rounded, on any CPU.

The sampler computes in bfloat16 throughout; training passes run in autocast, where products are
bfloat16 and norms, the residual stream and its sums stay float32. Llama's layers alone.

Legend: B rows, S tokens, H query heads, K key heads, D numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    return Imitation(model, sampling).logprobs(ids, mask, last)


@dataclass(frozen=True)
class Places:
    """What attention needs to know of the tokens' positions."""

    seen: Tensor  # [B, 1, S, S], which tokens a token attends to
    cos: Tensor  # [B, 1, S, D]
    sin: Tensor


class Imitation:
    """A model whose operations are rounded as on a GPU."""

    def __init__(self, model: Any, sampling: bool) -> None:
        self.config = model.config
        self.rotary = model.model.rotary_emb
        self.sampling = sampling
        self.outside = rounded if sampling else same  # what autocast leaves in float32

        exact = dict(model.named_parameters())
        self.weights = {name: rounded(p) for name, p in exact.items()}  # of products
        self.kept = self.weights if sampling else exact  # of norms and the embedding

    def logprobs(self, ids: Tensor, mask: Tensor, last: int) -> Tensor:
        embeddings = "model.embed_tokens.weight"
        x = embedding(ids, self.kept[embeddings])  # [B, S, H * D]
        places = self.places(x, mask)
        for k in range(self.config.num_hidden_layers):
            x = self.add(x, self.attend(x, f"layers.{k}", places))
            x = self.add(x, self.transform(x, f"layers.{k}"))

        normed = self.norm(x, "norm")[:, -last:]
        logits = rounded(linear(normed, self.weights[embeddings]))
        return logits.log_softmax(-1)

    def places(self, x: Tensor, mask: Tensor) -> Places:
        S = mask.shape[1]
        causal = torch.ones(S, S, dtype=torch.bool).tril()
        seen = mask[:, None, None] & causal | torch.eye(S).bool()

        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        cos, sin = self.rotary(x, positions)
        return Places(seen, self.outside(cos)[:, None], self.outside(sin)[:, None])

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """The residual stream after a block."""
        if self.sampling:
            return rounded(x + change)

        return x + rounded(change)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.kept[f"model.{name}.weight"]
        return rounded(rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps))

    def product(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"model.{name}.weight"])

    def attend(self, x: Tensor, at: str, places: Places) -> Tensor:
        normed = self.norm(x, f"{at}.input_layernorm")
        query = self.turn(self.heads(normed, f"{at}.self_attn.q_proj"), places)
        key = self.turn(self.heads(normed, f"{at}.self_attn.k_proj"), places)
        value = self.heads(normed, f"{at}.self_attn.v_proj")

        share = self.config.num_attention_heads // self.config.num_key_value_heads
        key = key.repeat_interleave(share, dim=1)
        value = value.repeat_interleave(share, dim=1)

        mixed = rounded(scaled_dot_product_attention(query, key, value, attn_mask=places.seen))
        return self.product(mixed.transpose(1, 2).flatten(2), f"{at}.self_attn.o_proj")

    def heads(self, x: Tensor, name: str) -> Tensor:
        """[B, heads, S, D]."""
        flat = rounded(self.product(x, name))
        return flat.unflatten(2, (-1, self.config.head_dim)).transpose(1, 2)

    def turn(self, x: Tensor, places: Places) -> Tensor:
        """Rotary embedding."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1) * places.sin
        return rounded(self.outside(x * places.cos) + turned)

    def transform(self, x: Tensor, at: str) -> Tensor:
        """The layer's MLP."""
        normed = self.norm(x, f"{at}.post_attention_layernorm")
        gate = rounded(self.product(normed, f"{at}.mlp.gate_proj"))
        up = rounded(self.product(normed, f"{at}.mlp.up_proj"))
        return self.product(rounded(rounded(silu(gate)) * up), f"{at}.mlp.down_proj")
