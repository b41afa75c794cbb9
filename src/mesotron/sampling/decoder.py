"""A decoder of few kernels: layers of Llama, Qwen2 and Qwen3 as four products and little else.

Queries, keys and values are one product, gate and up another, residuals are added inside products,
and query heads that share a key are stacked instead of copying it. Each distinct prompt is read
once for all its rows, which share its keys with the kernels of `kernels`. For sampling only: no
gradient, no dropout.

Shapes: B rows, B' rows that have not left, U distinct prompts, P padded prompt length, N longest
completion, L >= P + N cache length, H query heads, K key heads, R = H / K, D head size, E width, V
vocabulary.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from mesotron.optim import triton
from mesotron.sampling.draw import round_up
from mesotron.sampling.graphs import (
    Decoder,
    GraphSampler,
    Prompts,
    Sampling,
    Shape,
    attention_obstacle,
    move,
    sizes_of,
)

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Attention kernels copy a mask unless its rows start at a multiple of this.
ALIGNED = 16
# Completions longer than this have up to so many graphs, which read more and more of the cache.
SPAN = 128
MAX_SPANS = 4


@dataclass(frozen=True)
class FusedLayer:
    """The weights of one layer; those that read the same input are one matrix."""

    first_norm: Tensor  # (E,)
    qkv: Tensor  # ((H + 2 K) D, E)
    bias: Tensor | None  # ((H + 2 K) D,), of Qwen2
    head_norms: Tensor | None  # (2, D): of queries and of keys, of Qwen3
    out: Tensor  # (E, H D)
    second_norm: Tensor  # (E,)
    gate_up: Tensor
    down: Tensor


class Kernels:
    """The modules of `kernels`, imported only where Triton is installed."""

    def __init__(self) -> None:
        folder = "mesotron.sampling.kernels"
        self.attention: Any = import_module(f"{folder}.attention")
        self.gate: Any = import_module(f"{folder}.gate")
        self.head: Any = import_module(f"{folder}.head")


class FusedWeights:
    """A merged copy of a model's weights, LoRA's included; `refresh` updates it in place."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.model = model = base_of(model)
        config = model.config
        self.heads = config.num_attention_heads  # H
        self.keys = config.num_key_value_heads  # K
        self.size = model.model.layers[0].self_attn.head_dim  # D
        self.eps = config.rms_norm_eps
        self.dtype = dtype
        self.kernels: Any = None
        if triton.available(model.device):
            self.kernels = Kernels()

        kinds = [0] * self.heads + [1] * self.keys
        self.kinds = torch.tensor(kinds, device=model.device)  # (H + K,) rows of `head_norms`

        with torch.no_grad():
            self.layers = [merge(layer, dtype) for layer in model.model.layers]
            self.embedding, self.last_norm, self.head = (
                weight.to(dtype, copy=True) for weight in outer_weights(model)
            )

        self._views = [self._split(layer) for layer in self.layers]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's present weights; every tensor keeps its address."""
        for views, layer in zip(self._views, self.model.model.layers, strict=True):
            torch._foreach_copy_(views, weights_of(layer))  # pyright: ignore

        outer = [self.embedding, self.last_norm, self.head]
        torch._foreach_copy_(outer, outer_weights(self.model))  # pyright: ignore

    def _split(self, layer: FusedLayer) -> list[Tensor]:
        """Views of a merged layer, in the order of `weights_of`."""
        sizes = [self.heads * self.size, self.keys * self.size, self.keys * self.size]
        views = [layer.first_norm, *layer.qkv.split(sizes)]
        if layer.bias is not None:
            views += layer.bias.split(sizes)

        views += [layer.out, layer.second_norm, *layer.gate_up.chunk(2), layer.down]
        if layer.head_norms is not None:
            views += layer.head_norms.unbind()

        return views

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T, E) of ids (B, T)."""
        return embedding(ids, self.embedding)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions (B, T), as (B, T, 1, D) each."""
        cos, sin = self.model.model.rotary_emb(self.embedding, positions)
        half = self.size // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

        return cos.to(self.dtype)[:, :, None], signed.to(self.dtype)[:, :, None]

    def for_each_head(self, bias: Tensor) -> Tensor:
        """Repeat a mask (B, 1, T, S) for the R query heads of a key."""
        return bias.repeat(1, 1, self.heads // self.keys, 1)

    def read(self, layer: FusedLayer, x: Tensor) -> Tensor:
        """Queries, keys and values (B, T, (H + 2 K) D) of x (B, T, E)."""
        normed = rms_norm(x, x.shape[-1:], layer.first_norm, self.eps)
        return linear(normed, layer.qkv, layer.bias)

    def project(
        self, layer: FusedLayer, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, T, H, D) and keys, and values (B, T, K, D), of x (B, T, E)."""
        cos, sin = angles
        qkv = self.read(layer, x).view(*x.shape[:2], -1, self.size)  # (B, T, H + 2 K, D)

        turning, value = qkv.split([self.heads + self.keys, self.keys], dim=2)
        if layer.head_norms is not None:  # `qkv` is contiguous, its part would be copied first
            normed = rms_norm(qkv, qkv.shape[-1:], eps=self.eps)
            turning = normed[:, :, : len(self.kinds)] * layer.head_norms[self.kinds]

        # The rotation (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves swapped by a roll.
        swapped = turning.roll(self.size // 2, -1)
        turned = torch.addcmul(turning * cos, swapped, sin)
        query, key = turned.split([self.heads, self.keys], dim=2)

        return query, key, value

    def finish(self, layer: FusedLayer, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's output (B, T, H D) and the MLP to x (B, T, E), in place."""
        shape = x.shape
        E = shape[-1]
        x = x.reshape(-1, E)
        mixed = mixed.reshape(-1, mixed.shape[-1])
        x.addmm_(mixed, layer.out.T)

        normed = rms_norm(x, (E,), layer.second_norm, self.eps)
        x.addmm_(self.gated(linear(normed, layer.gate_up)), layer.down.T)

        return x.view(shape)

    def gated(self, both: Tensor) -> Tensor:
        """The activation (M, F) of gate and up (M, 2 F)."""
        if self.kernels is not None:
            return self.kernels.gate.gated(both)

        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up

    def normed(self, x: Tensor) -> Tensor:
        """Hidden states (B, E), ready for the head."""
        return rms_norm(x, x.shape[-1:], self.last_norm, self.eps)


def base_of(model: Any) -> Any:
    if is_peft_model(model):
        return model.get_base_model()

    return model


def outer_weights(model: Any) -> list[Tensor]:
    """The weights of the embedding, the last norm and the head."""
    modules = (model.get_input_embeddings(), model.model.norm, model.get_output_embeddings())
    return [module.weight for module in modules]


def products_of(layer: Any) -> list[Any]:
    """The linear modules of a layer: attention's four, then the MLP's three."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]


def biases_of(layer: Any) -> list[Tensor]:
    """Of queries, keys and values; none in most models."""
    q, k, v = products_of(layer)[:3]
    return [] if q.bias is None else [q.bias, k.bias, v.bias]


def head_norms_of(layer: Any) -> list[Tensor]:
    """Of queries and keys; none in most models."""
    modules = dict(layer.self_attn.named_children())
    return [modules[name].weight for name in ("q_norm", "k_norm") if name in modules]


def weights_of(layer: Any) -> list[Tensor]:
    """Every weight of a layer, in the order in which a merged layer is split."""
    q, k, v, out, gate, up, down = (weight_of(product) for product in products_of(layer))
    first_norm = layer.input_layernorm.weight
    second_norm = layer.post_attention_layernorm.weight
    return [
        first_norm,
        q,
        k,
        v,
        *biases_of(layer),
        out,
        second_norm,
        gate,
        up,
        down,
        *head_norms_of(layer),
    ]


def weight_of(product: Any) -> Tensor:
    """The weight of a linear layer with its adapters, summed in the wider of their types."""
    if not isinstance(product, LoraLayer):
        return product.weight

    weight: Any = product.get_base_layer().weight
    if product.merged or product.disable_adapters:
        return weight

    for name in product.active_adapters:
        weight = weight + product.get_delta_weight(name)  # pyright: ignore

    return weight


def merge(layer: Any, dtype: torch.dtype) -> FusedLayer:
    def joined(*weights: Tensor) -> Tensor:
        return torch.cat(weights).to(dtype)

    q, k, v, out, gate, up, down = (weight_of(product) for product in products_of(layer))
    biases = biases_of(layer)
    norms = head_norms_of(layer)

    return FusedLayer(
        first_norm=joined(layer.input_layernorm.weight),
        qkv=joined(q, k, v),
        bias=joined(*biases) if biases else None,
        head_norms=torch.stack(norms).to(dtype) if norms else None,
        out=joined(out),
        second_norm=joined(layer.post_attention_layernorm.weight),
        gate_up=joined(gate, up),
        down=joined(down),
    )


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Attention with the R query heads of a key stacked; returns (B, T, H D). query (B, T, H, D),
    key and value (B, S, K, D), bias (B, 1, R T, S): 0 or -inf."""
    B, T, H, D = query.shape
    K = key.shape[2]
    R = H // K

    # Head h reads key h // R, so the R heads of a key are neighbours.
    stacked = query.view(B, T, K, R, D).permute(0, 2, 3, 1, 4).reshape(B, K, R * T, D)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    mixed = scaled_dot_product_attention(stacked, key, value, attn_mask=bias)  # (B, K, R T, D)

    return mixed.view(B, K, R, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H * D)


class FusedDecoder(Decoder):
    def __init__(
        self, weights: FusedWeights, shape: Shape, sampling: Sampling, eos: Tensor, pad: int
    ) -> None:
        super().__init__(shape, sampling, eos, pad)
        B, P, N = shape
        L = round_up(P + N, ALIGNED)
        K = weights.keys
        D = weights.size
        num_layers = len(weights.layers)
        device = eos.device
        dtype = weights.dtype
        self.weights = weights
        self.sizes = sizes_of(B)

        # The kernel reads what is written, whatever the span.

        if weights.kernels is not None:
            parts = 1
        else:
            parts = min(MAX_SPANS, -(-N // SPAN))

        self.spans = [-(-N * k // parts) for k in range(1, parts + 1)]

        # Keys and values of each layer; unwritten places must be finite.
        self.cache = torch.zeros(num_layers, 2, B, L, K, D, dtype=dtype, device=device)
        self.rows = torch.zeros(B, dtype=torch.long, device=device)  # the prompt of each row
        self.starts = torch.zeros_like(self.rows)  # the place where it begins
        self.places = torch.arange(L, device=device)

        # Cosines and sines of every position of a row, (L, 1, D) each.
        self.angles = [torch.zeros(L, 1, D, dtype=dtype, device=device) for _ in range(2)]

    def begin(self, prompts: Prompts, draws: Tensor | None = None) -> None:
        weights = self.weights
        rows = prompts.rows
        P = self.P
        positions = prompts.positions
        self.restart(draws)
        self.rows.copy_(rows)
        self.starts.copy_(P - prompts.mask.sum(1)[rows])
        self.positions.copy_(positions[rows, -1:])

        for table, values in zip(self.angles, weights.angles(self.places[None]), strict=True):
            table.copy_(values[0])

        # A NaN left by broken weights would outlive them: masked, it is still NaN.
        self.cache.zero_()

        bias = self._prompt_bias(prompts)
        angles = weights.angles(positions)
        x = weights.embed(prompts.ids)
        for layer, cache in zip(weights.layers, self.cache, strict=True):
            query, key, value = weights.project(layer, x, angles)
            x = weights.finish(layer, x, attend(query, key, value, bias))

            if weights.kernels is None:  # with kernels the rows share the keys of their prompt
                key = key[rows]
                value = value[rows]

            cache[0, : len(key), :P] = key
            cache[1, : len(key), :P] = value

        self.write(self.next_tokens(x[:, -1][rows]))

    def next_tokens(self, x: Tensor) -> Tensor:
        """Token ids (B',) that follow hidden states x (B', E)."""
        weights = self.weights
        x = weights.normed(x)
        if weights.kernels is None or not self.sampling.is_plain:
            return self.draw(linear(x, weights.head))

        head = weights.kernels.head
        draws = head.Draws(self.draws, self.slots, self.count)
        tokens, _ = head.draw(x, weights.head, self.sampling.temperature, draws)
        return tokens

    def _prompt_bias(self, prompts: Prompts) -> Tensor:
        """(U, 1, R P, P), 0 where a token of a prompt looks: at itself and the ones before it."""
        device = prompts.ids.device
        P = self.P
        causal = torch.ones(P, P, dtype=torch.bool, device=device).tril()
        itself = torch.eye(P, dtype=torch.bool, device=device)
        visible = (prompts.mask[:, None, None] & causal) | itself

        bias = torch.where(visible, 0.0, -torch.inf).to(self.weights.dtype)
        return self.weights.for_each_head(bias)

    def step(self, span: int) -> None:
        weights = self.weights
        place = self.place
        self.positions.add_(1)

        x = weights.embed(self.tokens[: self.size])
        cos, sin = (table[self.positions[: self.size]] for table in self.angles)
        angles = (cos, sin)
        if weights.kernels is not None:
            x = self._layers_by_kernels(x, angles, place)
        else:
            x = self._layers(x, angles, place, span)

        self.write(self.next_tokens(x[:, -1]))

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        move(self.rows, rows)
        move(self.starts, rows)

        # With kernels, the first places keep the prompts, which rows share.
        start = 0 if self.weights.kernels is None else self.P
        for keys_and_values in self.cache.flatten(0, 1):  # one at a time: a move takes a copy
            move(keys_and_values[:, start:], rows)

    def _layers_by_kernels(self, x: Tensor, angles: tuple[Tensor, Tensor], place: Tensor) -> Tensor:
        weights = self.weights
        attention = weights.kernels.attention
        prefix = attention.Prefix(self.P, self.rows, self.starts)
        for layer, cache in zip(weights.layers, self.cache, strict=True):
            mixed = attention.attend(
                weights.read(layer, x),
                cache,
                prefix,
                place,
                angles,
                attention.HeadNorms(layer.head_norms, weights.eps),
            )
            x = weights.finish(layer, x, mixed)

        return x

    def _layers(self, x: Tensor, angles: tuple[Tensor, Tensor], place: Tensor, span: int) -> Tensor:
        weights = self.weights
        S = round_up(self.P + span, ALIGNED)
        places = self.places[:S]
        visible = (places >= self.starts[: self.size, None]) & (places <= place)  # (B', S)
        bias = torch.where(visible, 0.0, -torch.inf).to(weights.dtype)
        bias = weights.for_each_head(bias[:, None, None])

        for layer, cache in zip(weights.layers, self.cache[:, :, : self.size], strict=True):
            query, key, value = weights.project(layer, x, angles)
            cache[0].index_copy_(1, place, key)
            cache[1].index_copy_(1, place, value)
            mixed = attend(query, cache[0, :, :S], cache[1, :, :S], bias)
            x = weights.finish(layer, x, mixed)

        return x


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

        wrapped = wrapped_modules(model)
        if wrapped:
            return f"its layers are wrapped ({wrapped[0]})"

        has_other_biases = any(
            product.bias is not None
            for layer in model.model.layers
            for product in products_of(layer)[3:]
        )
        if has_other_biases or model.config.hidden_act != "silu":
            return "its layers have other biases or activations than Llama's"

        return attention_obstacle(model)

    def _prepare(self, dtype: torch.dtype) -> None:
        self.weights = FusedWeights(self.model, dtype)

    def refresh(self) -> None:
        self.weights.refresh()

    def make_decoder(self, shape: Shape) -> Decoder:
        return FusedDecoder(self.weights, shape, self.sampling, self.eos, self.pad)


def wrapped_modules(model: Any) -> list[str]:
    """The types of products that are neither linear layers nor plain LoRA around one."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer in model.model.layers:  # adapters may be in some
        for product in products_of(layer):
            modules.append(product.get_base_layer() if is_plain_lora(product) else product)

    return [type(one).__name__ for one in modules if type(one) not in (nn.Linear, nn.Embedding)]


def is_plain_lora(product: Any) -> bool:
    """Whether it has LoRA without variants such as DoRA."""
    if not isinstance(product, LoraLayer) or product.lora_variant:
        return False

    return not any(product.lora_bias.values())
