"""A decoder of few kernels: layers of Llama and its kin as four products and little else.

Queries, keys and values are one product, gate and up another, residuals are added inside products,
and query heads that share a key are stacked instead of copying it. Each distinct prompt is read
once for all its rows, which share its keys with the kernels of `kernels`. What differs between
families is data, in `blocks`. For sampling only: no gradient, no dropout.

Shapes: B rows, B' rows that have not left, U distinct prompts, P padded prompt length, N longest
completion, L >= P + N cache length, H query heads, K key heads, R = H / K, D head size, E width, V
vocabulary.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import (
    embedding,
    gelu,
    linear,
    rms_norm,
    scaled_dot_product_attention,
    silu,
)

from mesotron.optim import triton
from mesotron.sampling.blocks import (
    FusedLayer,
    activation_of,
    base_of,
    block_obstacle,
    block_of,
    embedding_scale,
    layer_kinds,
    merge,
    outer_weights,
    rotation_of,
    weights_of,
)
from mesotron.sampling.draw import round_up
from mesotron.sampling.graphs import (
    Decoder,
    GraphSampler,
    Prompts,
    Sampling,
    Shape,
    implementation_obstacle,
    move,
    sizes_of,
)

# Attention kernels copy a mask unless its rows start at a multiple of this.
ALIGNED = 16
# Completions longer than this have up to so many graphs, which read more and more of the cache.
SPAN = 128
MAX_SPANS = 4
# Shorter completions end before rows that leave repay the graphs of smaller sizes.
SHRINKS_FROM = 32

Angles = dict[str, tuple[Tensor, Tensor]]  # cosines and signed sines, by rotation


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
        attention = model.model.layers[0].self_attn
        self.block = block_of(model)
        self.heads = config.num_attention_heads  # H
        self.keys = config.num_key_value_heads  # K
        self.size = attention.head_dim  # D
        self.scale = attention.scaling  # of attention's scores
        self.eps = config.rms_norm_eps
        self.residual = getattr(config, "residual_multiplier", 1.0)
        self.embedding_scale = embedding_scale(model)
        self.gelu = activation_of(model) != "silu"
        self.kinds = layer_kinds(model)
        self.dtype = dtype
        self.kernels: Any = None
        if triton.available(model.device):
            self.kernels = Kernels()

        # (H + K,), the row of `head_norms` for each head of queries and keys.
        norm_rows = [0] * self.heads + [1] * self.keys
        self.norm_rows = torch.tensor(norm_rows, device=model.device)

        # One more than a small weight has few digits in bfloat16.
        norm_dtype = torch.float32 if self.block.norm_offset else dtype
        self.layers: list[FusedLayer] = []
        self._views: list[list[Tensor]] = []
        with torch.no_grad():
            for layer in model.model.layers:
                merged, views = merge(weights_of(layer, self.block), dtype, norm_dtype)
                self.layers.append(merged)
                self._views.append(views)

            table, norm, head = outer_weights(model)
            self.embedding = table.to(dtype, copy=True)
            self.last_norm = norm.to(norm_dtype, copy=True)
            self.head = head.to(dtype, copy=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the model's present weights; every tensor keeps its address."""
        for views, layer in zip(self._views, self.model.model.layers, strict=True):
            weights = [part for parts in weights_of(layer, self.block).values() for part in parts]
            torch._foreach_copy_(views, weights)  # pyright: ignore

        outer = [self.embedding, self.last_norm, self.head]
        torch._foreach_copy_(outer, outer_weights(self.model))  # pyright: ignore

    def embed(self, ids: Tensor) -> Tensor:
        """(B, T, E) of ids (B, T)."""
        x = embedding(ids, self.embedding)
        if isinstance(self.embedding_scale, Tensor) or self.embedding_scale != 1:
            x *= self.embedding_scale

        return x

    def angles(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and signed sines of positions (B, T), as (B, T, 1, D) each, by rotation."""
        half = self.size // 2
        angles = {}
        for rotation in {kind.rotation for kind in self.kinds}:
            cos, sin = rotation_of(self.model, rotation, self.embedding, positions)
            signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
            angles[rotation] = (cos.to(self.dtype)[:, :, None], signed.to(self.dtype)[:, :, None])

        return angles

    def for_each_head(self, bias: Tensor) -> Tensor:
        """Repeat a mask (B, 1, T, S) for the R query heads of a key."""
        return bias.repeat(1, 1, self.heads // self.keys, 1)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """x (..., E) divided by its root mean square, times a weight (E,); None: x itself."""
        if weight is None:
            return x
        if weight.dtype == x.dtype:
            return rms_norm(x, x.shape[-1:], weight, self.eps)

        return rms_norm(x.to(weight.dtype), x.shape[-1:], weight, self.eps).to(x.dtype)

    def read(self, layer: FusedLayer, x: Tensor) -> Tensor:
        """Queries, keys and values (B, T, (H + 2 K) D) of x (B, T, E)."""
        qkv = linear(self.norm(x, layer.before_attention), layer.qkv, layer.bias)
        if layer.wide_norms is None:
            return qkv

        sizes = [self.heads * self.size, self.keys * self.size]
        query, key, value = qkv.split([*sizes, sizes[1]], dim=-1)
        query_norm, key_norm = layer.wide_norms.split(sizes)
        return torch.cat([self.norm(query, query_norm), self.norm(key, key_norm), value], dim=-1)

    def project(
        self, layer: FusedLayer, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, T, H, D) and keys, and values (B, T, K, D), of x (B, T, E)."""
        cos, sin = angles
        qkv = self.read(layer, x).view(*x.shape[:2], -1, self.size)  # (B, T, H + 2 K, D)

        turning, value = qkv.split([self.heads + self.keys, self.keys], dim=2)
        if layer.head_norms is not None:  # `qkv` is contiguous, its part would be copied first
            normed = rms_norm(qkv, qkv.shape[-1:], eps=self.eps)
            weights = layer.head_norms.view(2, -1)[self.norm_rows]
            turning = (normed[:, :, : len(self.norm_rows)] * weights).to(qkv.dtype)

        # The rotation (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the halves swapped by a roll.
        swapped = turning.roll(self.size // 2, -1)
        turned = torch.addcmul(turning * cos, swapped, sin)
        query, key = turned.split([self.heads, self.keys], dim=2)

        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend(query, key, value, bias, self.scale)

    def finish(self, layer: FusedLayer, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's output (B, T, H D) and the MLP to x (B, T, E), in place."""
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        self._add(x, mixed.reshape(-1, mixed.shape[-1]), layer.out, layer.after_attention)

        gate_up = linear(self.norm(x, layer.before_mlp), layer.gate_up)
        self._add(x, self.gated(gate_up), layer.down, layer.after_mlp)

        return x.view(shape)

    def _add(self, x: Tensor, y: Tensor, weight: Tensor, norm: Tensor | None) -> None:
        """Add the product of y with a weight to x, after a norm if there is one."""
        if norm is None:
            x.addmm_(y, weight.T, alpha=self.residual)
        else:
            x.add_(self.norm(linear(y, weight), norm), alpha=self.residual)

    def gated(self, both: Tensor) -> Tensor:
        """The activation (M, F) of gate and up (M, 2 F)."""
        if self.kernels is not None:
            return self.kernels.gate.gated(both, self.gelu)

        gate, up = both.chunk(2, dim=-1)
        active = gelu(gate, approximate="tanh") if self.gelu else silu(gate)
        return active * up

    def normed(self, x: Tensor) -> Tensor:
        """Hidden states (B, E), ready for the head."""
        return self.norm(x, self.last_norm)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attention with the R query heads of a key stacked; returns (B, T, H D). query (B, T, H, D),
    key and value (B, S, K, D), bias (B, 1, R T, S): 0 or -inf."""
    B, T, H, D = query.shape
    K = key.shape[2]
    R = H // K

    # Head h reads key h // R, so the R heads of a key are neighbours.
    stacked = query.view(B, T, K, R, D).permute(0, 2, 3, 1, 4).reshape(B, K, R * T, D)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    mixed = scaled_dot_product_attention(
        stacked, key, value, attn_mask=bias, scale=scale
    )  # (B, K, R T, D)

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
        if N >= SHRINKS_FROM:
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
        self.angles: dict[str, list[Tensor]] = {}
        for kind in weights.kinds:
            tables = [torch.zeros(L, 1, D, dtype=dtype, device=device) for _ in range(2)]
            self.angles.setdefault(kind.rotation, tables)

    def begin(self, prompts: Prompts, draws: Tensor | None = None) -> None:
        weights = self.weights
        rows = prompts.rows
        P = self.P
        positions = prompts.positions
        self.restart(draws)
        self.rows.copy_(rows)
        self.starts.copy_(P - prompts.mask.sum(1)[rows])
        self.positions.copy_(positions[rows, -1:])

        for rotation, angles in weights.angles(self.places[None]).items():
            for table, values in zip(self.angles[rotation], angles, strict=True):
                table.copy_(values[0])

        # A NaN left by broken weights would outlive them: masked, it is still NaN.
        self.cache.zero_()

        windows = {kind.window for kind in weights.kinds}
        biases = {window: self._prompt_bias(prompts, window) for window in windows}
        angles = weights.angles(positions)
        x = weights.embed(prompts.ids)
        for layer, kind, cache in zip(weights.layers, weights.kinds, self.cache, strict=True):
            query, key, value = weights.project(layer, x, angles[kind.rotation])
            x = weights.finish(layer, x, weights.attend(query, key, value, biases[kind.window]))

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

    def _prompt_bias(self, prompts: Prompts, window: int | None) -> Tensor:
        """(U, 1, R P, P), 0 where a token of a prompt looks: at itself and the ones before it,
        within its window."""
        device = prompts.ids.device
        P = self.P
        causal = torch.ones(P, P, dtype=torch.bool, device=device).tril()
        if window is not None:
            causal = causal.triu(1 - window)

        itself = torch.eye(P, dtype=torch.bool, device=device)
        visible = (prompts.mask[:, None, None] & causal) | itself

        bias = torch.where(visible, 0.0, -torch.inf).to(self.weights.dtype)
        return self.weights.for_each_head(bias)

    def step(self, span: int) -> None:
        weights = self.weights
        place = self.place
        self.positions.add_(1)

        x = weights.embed(self.tokens[: self.size])
        positions = self.positions[: self.size]
        angles = {}
        for rotation, (cos, sin) in self.angles.items():
            angles[rotation] = (cos[positions], sin[positions])

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

    def _layers_by_kernels(self, x: Tensor, angles: Angles, place: Tensor) -> Tensor:
        weights = self.weights
        attention = weights.kernels.attention
        prefix = attention.Prefix(self.P, self.rows, self.starts)
        for layer, kind, cache in zip(weights.layers, weights.kinds, self.cache, strict=True):
            mixed = attention.attend(
                weights.read(layer, x),
                cache,
                prefix,
                place,
                angles[kind.rotation],
                attention.HeadNorms(layer.head_norms, weights.eps),
                weights.scale,
                kind.window,
            )
            x = weights.finish(layer, x, mixed)

        return x

    def _layers(self, x: Tensor, angles: Angles, place: Tensor, span: int) -> Tensor:
        weights = self.weights
        S = round_up(self.P + span, ALIGNED)
        biases = {}
        for window in {kind.window for kind in weights.kinds}:
            biases[window] = self._bias(S, place, window)

        caches = self.cache[:, :, : self.size]
        for layer, kind, cache in zip(weights.layers, weights.kinds, caches, strict=True):
            query, key, value = weights.project(layer, x, angles[kind.rotation])
            cache[0].index_copy_(1, place, key)
            cache[1].index_copy_(1, place, value)
            bias = biases[kind.window]
            mixed = weights.attend(query, cache[0, :, :S], cache[1, :, :S], bias)
            x = weights.finish(layer, x, mixed)

        return x

    def _bias(self, S: int, place: Tensor, window: int | None) -> Tensor:
        """(B', 1, R, S), 0 where the token at a place looks."""
        places = self.places[:S]
        visible = (places >= self.starts[: self.size, None]) & (places <= place)  # (B', S)
        if window is not None:
            visible &= places > place - window

        bias = torch.where(visible, 0.0, -torch.inf).to(self.weights.dtype)
        return self.weights.for_each_head(bias[:, None, None])


class FusedSampler(GraphSampler):
    """`GraphSampler` with the fused decoder, for the families of `BLOCKS`, also with LoRA."""

    name = "the fused decoder"
    weights: FusedWeights

    @staticmethod
    def obstacle(model: Any) -> str | None:
        return block_obstacle(model) or implementation_obstacle(base_of(model).config)

    def _prepare(self, dtype: torch.dtype) -> None:
        self.weights = FusedWeights(self.model, dtype)

    def refresh(self) -> None:
        self.weights.refresh()

    def make_decoder(self, shape: Shape) -> Decoder:
        return FusedDecoder(self.weights, shape, self.sampling, self.eos, self.pad)
