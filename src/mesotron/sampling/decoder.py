"""A decoder of few kernels: layers of Llama, Qwen2 and Qwen3 as four products and little else.

Queries, keys and values are one product, gate and up another, residuals are added inside products,
and query heads that share a key are stacked instead of copying it. Each distinct prompt is read
once for all its rows, which share its keys with the kernels of `kernels`. For sampling only: no
gradient, no dropout.

Shapes: B rows, U distinct prompts, P padded prompt length, N longest completion, L >= P + N cache
length, H query heads, K key heads, R = H / K, D head size, E width, V vocabulary.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from mesotron.optim import triton
from mesotron.sampling.decode import round_up
from mesotron.sampling.graphs import Decoder, GraphSampler, Sampling, Shape, attention_obstacle

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Attention kernels copy a mask unless its rows start at a multiple of this.
ALIGNED = 16
# Completions longer than this have up to so many graphs, which read more and more of the cache.
SPAN = 128
MAX_SPANS = 4


@dataclass(frozen=True)
class Layer:
    """The weights of one layer; those that read the same input are one matrix."""

    first_norm: Tensor
    qkv: Tensor  # ((H + 2 K) D, E)
    bias: Tensor | None  # ((H + 2 K) D,), of Qwen2
    head_norms: Tensor | None  # (2, D): of queries and of keys, of Qwen3
    out: Tensor
    second_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FusedWeights:
    """A merged copy of a model's weights, LoRA's included; `refresh` updates it in place."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model = base_of(model)
        config = model.config
        self.heads = config.num_attention_heads
        self.keys = config.num_key_value_heads
        self.size = model.model.layers[0].self_attn.head_dim
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.kernels: Any = None

        if triton.available(model.device):
            self.kernels = import_module("mesotron.sampling.kernels")

        kinds = [0] * self.heads + [1] * self.keys
        self.kinds = torch.tensor(kinds, device=model.device)  # (H + K,) rows of `head_norms`

        with torch.no_grad():
            self.layers = [merge(layer, dtype) for layer in model.model.layers]
            self.ends = [x.to(dtype, copy=True) for x in self._outer()]
            self._parts = [self._split(layer) for layer in self.layers]

    def _outer(self) -> list[Tensor]:
        model = self.model
        parts = (model.get_input_embeddings(), model.model.norm, model.get_output_embeddings())
        return [part.weight for part in parts]

    @torch.no_grad()
    def refresh(self) -> None:  # every tensor keeps its address
        for parts, layer in zip(self._parts, self.model.model.layers, strict=True):
            torch._foreach_copy_(parts, weights_of(layer))  # pyright: ignore
        torch._foreach_copy_(self.ends, self._outer())  # pyright: ignore

    def _split(self, layer: Layer) -> list[Tensor]:
        # Views of a merged layer, in the order of `weights_of`.
        sizes = [self.heads * self.size, self.keys * self.size, self.keys * self.size]
        both = [layer.qkv] if layer.bias is None else [layer.qkv, layer.bias]
        views = [layer.first_norm, *(part for x in both for part in x.split(sizes)), layer.out]
        norms = [] if layer.head_norms is None else layer.head_norms.unbind()

        return [*views, layer.second_norm, *layer.gate_up.chunk(2), layer.down, *norms]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions, (B, T, 1, D) each."""
        cos, sin = self.model.model.rotary_emb(self.ends[0], positions)
        half = self.size // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

        return cos.to(self.dtype)[:, :, None], signed.to(self.dtype)[:, :, None]

    def for_each_head(self, bias: Tensor) -> Tensor:
        """Repeat a mask (B, 1, T, S) for the R query heads of a key."""
        return bias.repeat(1, 1, self.heads // self.keys, 1)

    def read(self, layer: Layer, x: Tensor) -> Tensor:
        """Queries, keys and values (B, T, (H + 2 K) D) of x (B, T, E)."""
        normed = rms_norm(x, x.shape[-1:], layer.first_norm, self.eps)
        return nn.functional.linear(normed, layer.qkv, layer.bias)

    def project(
        self, layer: Layer, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, T, H, D) and keys, and values (B, T, K, D), of x (B, T, E)."""
        cos, sin = angles
        both = self.read(layer, x).view(*x.shape[:2], -1, self.size)

        turning, value = both.split([self.heads + self.keys, self.keys], dim=2)
        if layer.head_norms is not None:  # `both` is contiguous, its part would be copied first
            turning = rms_norm(both, both.shape[-1:], eps=self.eps)[:, :, : len(self.kinds)]
            turning = turning * layer.head_norms[self.kinds]

        # The rotation (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves swapped by a roll.
        turned = torch.addcmul(turning * cos, turning.roll(self.size // 2, -1), sin)
        query, key = turned.split([self.heads, self.keys], dim=2)

        return query, key, value

    def finish(self, layer: Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's output (B, T, H D) and the MLP to x (B, T, E)."""
        shape = x.shape
        x = torch.addmm(x.reshape(-1, shape[-1]), mixed.reshape(-1, mixed.shape[-1]), layer.out.T)
        normed = rms_norm(x, shape[-1:], layer.second_norm, self.eps)
        gate, up = nn.functional.linear(normed, layer.gate_up).chunk(2, dim=-1)

        return torch.addmm(x, silu(gate) * up, layer.down.T).view(shape)

    def logits(self, x: Tensor) -> Tensor:
        """(B, V) of hidden states (B, E)."""
        return nn.functional.linear(rms_norm(x, x.shape[-1:], self.ends[1], self.eps), self.ends[2])


def base_of(model: Any) -> Any:
    return model.get_base_model() if is_peft_model(model) else model


def products_of(layer: Any) -> list[Any]:
    own = layer.self_attn
    mlp = layer.mlp
    attention = [own.q_proj, own.k_proj, own.v_proj, own.o_proj]

    return [*attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def weights_of(layer: Any) -> list[Tensor]:
    q, k, v, out, *mlp = (weight_of(one) for one in products_of(layer))
    three = products_of(layer)[:3]
    biases = [] if three[0].bias is None else [one.bias for one in three]
    first = layer.input_layernorm.weight
    second = layer.post_attention_layernorm.weight

    return [first, q, k, v, *biases, out, second, *mlp, *head_norms_of(layer)]


def head_norms_of(layer: Any) -> list[Tensor]:
    parts = dict(layer.self_attn.named_children())
    return [parts[name].weight for name in ("q_norm", "k_norm") if name in parts]


def weight_of(product: Any) -> Tensor:
    """The weight of a linear layer with its adapters, summed in the wider of their types."""
    if not isinstance(product, LoraLayer):
        return product.weight

    weight: Any = product.get_base_layer().weight
    names = () if product.merged or product.disable_adapters else product.active_adapters
    for name in names:
        weight = weight + product.get_delta_weight(name)  # pyright: ignore

    return weight


def merge(layer: Any, dtype: torch.dtype) -> Layer:
    def joined(*parts: Tensor) -> Tensor:
        return torch.cat(parts).to(dtype)

    norms = head_norms_of(layer)
    first, q, k, v, *biases, out, second, gate, up, down = weights_of(layer)[: -len(norms) or None]

    return Layer(
        first_norm=joined(first),
        qkv=joined(q, k, v),
        bias=joined(*biases) if biases else None,
        head_norms=torch.stack(norms).to(dtype) if norms else None,
        out=joined(out),
        second_norm=joined(second),
        gate_up=joined(gate, up),
        down=joined(down),
    )


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention with the R query heads of a key stacked; returns (B, T, H D). query (B, T, H, D),
    key and value (B, S, K, D), bias (B, 1, R T, S): 0 or -inf."""
    B, T, H, D = query.shape
    K = key.shape[2]

    # Head h reads key h // R, so the R heads of a key are neighbours.
    rows = (
        query.view(B, T, K, H // K, D)
        .permute(
            0,
            2,
            3,
            1,
            4,
        )
        .reshape(B, K, -1, D)
    )

    mixed = scaled_dot_product_attention(
        rows, key.transpose(1, 2), value.transpose(1, 2), attn_mask=bias
    )
    return (
        mixed.view(B, K, H // K, T, D)
        .permute(
            0,
            3,
            1,
            2,
            4,
        )
        .reshape(B, T, H * D)
    )


class FusedDecoder(Decoder):
    def __init__(
        self, weights: FusedWeights, shape: Shape, sampling: Sampling, eos: Tensor, pad: int
    ) -> None:
        super().__init__(shape, sampling, eos, pad)
        B, P, N = shape
        L = round_up(P + N, ALIGNED)

        # The kernel reads what is written, whatever the span.
        parts = 1 if weights.kernels is not None else min(MAX_SPANS, -(-N // SPAN))
        self.spans = [-(-N * k // parts) for k in range(1, parts + 1)]
        self.weights = weights
        new = {"dtype": weights.dtype, "device": eos.device}

        # Keys and values of each layer; unwritten places must be finite.
        self.cache = torch.zeros(
            len(weights.layers),
            2,
            B,
            L,
            weights.keys,
            weights.size,
            **new,
        )

        self.bias = torch.zeros(B, 1, 1, L, **new)
        self.rows = torch.zeros(B, dtype=torch.long, device=eos.device)  # the prompt of each row

    def begin(self, ids: Tensor, mask: Tensor, rows: Tensor) -> None:
        P = self.P
        weights = self.weights
        self.running.fill_(True)
        self.count.zero_()
        self.rows.copy_(rows)

        # A NaN left by broken weights would outlive them: masked, it is still NaN.
        self.cache.zero_()
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        self.positions.copy_(positions[rows, -1:])
        self.bias.fill_(-torch.inf)
        self.bias[:, 0, 0, :P].masked_fill_(mask[rows], 0.0)
        causal = torch.ones(P, P, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(P, dtype=torch.bool, device=ids.device)
        visible = (mask[:, None, None] & causal) | itself
        bias = weights.for_each_head(torch.where(visible, 0.0, -torch.inf).to(weights.dtype))
        x = nn.functional.embedding(ids, weights.ends[0])

        angles = weights.angles(positions)
        for layer, kept in zip(weights.layers, self.cache, strict=True):
            query, key, value = weights.project(layer, x, angles)
            x = weights.finish(layer, x, attend(query, key, value, bias))

            if weights.kernels is None:
                key = key[rows]
                value = value[rows]

            kept[0, : len(key), :P] = key
            kept[1, : len(key), :P] = value

        self.write(weights.logits(x[:, -1])[rows])

    def step(self, span: int) -> None:
        weights = self.weights
        place = self.P + self.count - 1
        S = round_up(self.P + span, ALIGNED)
        self.bias.index_fill_(3, place, 0.0)
        self.positions.add_(1)
        x = nn.functional.embedding(self.tokens, weights.ends[0])
        bias = self.bias if weights.kernels else weights.for_each_head(self.bias[..., :S])

        angles = weights.angles(self.positions)
        for layer, kept in zip(weights.layers, self.cache, strict=True):
            if weights.kernels is not None:
                mixed = weights.kernels.attend(
                    weights.read(layer, x),
                    kept,
                    self.P,
                    self.rows,
                    place,
                    bias,
                    angles,
                    layer.head_norms,
                    weights.eps,
                )
            else:
                query, key, value = weights.project(layer, x, angles)
                kept[0].index_copy_(1, place, key)
                kept[1].index_copy_(1, place, value)
                mixed = attend(query, kept[0, :, :S], kept[1, :, :S], bias)

            x = weights.finish(layer, x, mixed)

        self.write(weights.logits(x[:, -1]))


def _is_plain(product: Any) -> bool:
    """Whether it has LoRA without variants such as DoRA."""
    return (
        isinstance(product, LoraLayer)
        and not product.lora_variant
        and not any(product.lora_bias.values())
    )


class FusedSampler(GraphSampler):
    """`GraphSampler` with the fused decoder, for Llama, Qwen2 and Qwen3, also with LoRA."""

    name = "the fused decoder"
    weights: FusedWeights

    @staticmethod
    def obstacle(model: Any) -> str | None:
        model = base_of(model)
        kind = type(model).__name__
        if kind not in MODELS:
            return f"the model is a {kind}, not {' or '.join(MODELS)}"

        layers = [products_of(layer) for layer in model.model.layers]  # adapters may be in some
        products = [one.get_base_layer() if _is_plain(one) else one for x in layers for one in x]
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        wrapped = [
            type(x).__name__ for x in (*products, *ends) if type(x) not in (nn.Linear, nn.Embedding)
        ]
        if wrapped:
            return f"its layers are wrapped ({wrapped[0]})"

        biased = any(one.bias is not None for x in layers for one in x[3:])
        if biased or model.config.hidden_act != "silu":
            return "its layers have other biases or activations than Llama's"

        return attention_obstacle(model)

    def _prepare(self, dtype: torch.dtype) -> None:
        self.weights = FusedWeights(self.model, dtype)

    def refresh(self) -> None:
        self.weights.refresh()

    def make_decoder(self, shape: Shape) -> Decoder:
        return FusedDecoder(
            self.weights,
            shape,
            self.sampling,
            self.eos,
            self.pad,
        )
