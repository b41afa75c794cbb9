"""The policy: a transformer over the cells of the board, in plain JAX.

Tokens are cells; the outputs are read from the token of the snake's head and the mean token. Every
projection is a 2-D matrix and layers are stacked, so a spectral optimizer sees batches of matrices.

Legend: B observations, T cells, F features, d width of a token, L layers, H heads.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mesotron.config import SnakeConfig
from mesotron.ppo.env import HEAD, NUM_ACTIONS, NUM_FEATURES, Observation

Params = dict[str, Any]
# `mesotron.jax.label` cannot see from the tree that this layer is between tokens and heads.
HIDDEN = {"trunk/kernel": "matrix"}
# Nearly uniform over the moves at the start (Andrychowicz et al. 2021, arXiv 2006.05990).
_ACTOR_GAIN = 0.01


def init_policy(key: Array, config: SnakeConfig) -> Params:
    """Float32 weights; `mesotron.jax.label(params, overrides=HIDDEN)` prints them."""
    d = config.d_model
    L = config.num_layers
    hidden = config.d_model * config.mlp_ratio
    residual = 1 / math.sqrt(2 * L)
    inner = {name: _Spec((d,), d, L) for name in ("query", "key", "value")}

    inner |= {
        "out": _Spec((d,), d, L, residual),
        "up": _Spec((d,), hidden, L),
        "down": _Spec((hidden,), d, L, residual),
    }

    inputs = NUM_FEATURES
    outer = {}
    if config.use_cnn:
        outer["conv"] = _Spec((3, 3, NUM_FEATURES), config.cnn_features)
        inputs = config.cnn_features + (NUM_FEATURES if config.cnn_mode == "append" else 0)

    outer |= {
        "input": _Spec((inputs,), d),
        "trunk": _Spec((2 * d,), d),
        "actor": _Spec((d,), NUM_ACTIONS, gain=_ACTOR_GAIN),
        "critic": _Spec((d,), 1),
    }

    drawn = _init_layers(key, {**outer, **inner})
    gains = {"attention_norm": {"scale": jnp.ones((L, d))}, "mlp_norm": {"scale": jnp.ones((L, d))}}

    return {
        **{name: drawn[name] for name in outer},
        "position": {"rows": waves(config.height, d), "columns": waves(config.width, d)},
        "layers": gains | {name: drawn[name] for name in inner},
        "final_norm": {"scale": jnp.ones(d)},
    }


def apply_policy(
    params: Params, observation: Observation, config: SnakeConfig, dropout_keys: Array | None = None
) -> tuple[Array, Array]:
    """Logits [B, 4], very small for illegal moves, and values [B]; `dropout_keys` are [B, 2]."""
    X = _embed(params, observation.cells, config)

    def block(X: Array, scanned: tuple[Params, Array], tokens: Array | None = None) -> Array:
        layer, number = scanned
        drop = _make_dropout(dropout_keys, number, config.dropout)
        X = X + drop(_attend(layer, X, config, tokens), 0)
        Y = _apply(layer["up"], rms_norm(X, layer["mlp_norm"]["scale"]))

        return X + drop(_apply(layer["down"], jax.nn.gelu(Y)), 1)

    layers = (params["layers"], jnp.arange(config.num_layers))
    over_all = config.num_layers - (config.readout == "head")
    first = jax.tree.map(lambda x: x[:over_all], layers)

    # Unrolled: a loop made the gradient of two layers 1.8 times slower on an H200.
    X, _ = jax.lax.scan(lambda X, layer: (block(X, layer), None), X, first, unroll=True)

    # The readout must start from a materialized array: XLA's Triton emitter (jax 0.11) fuses tiles
    # of several boards with the last layer and reads wrong rows of a flat product for all but the
    # first of them, unless the number of cells is a power of two.
    X = jax.lax.optimization_barrier(X)
    at_head = observation.cells[..., HEAD, None].astype(X.dtype)

    head = (at_head * X).sum(1, keepdims=True)
    if over_all < config.num_layers:
        head = block(head, jax.tree.map(lambda x: x[-1], layers), X)

    scale = params["final_norm"]["scale"]
    mean = rms_norm(X, scale).astype(jnp.float32).mean(1)
    read = jnp.concatenate([rms_norm(head, scale).astype(jnp.float32)[:, 0], mean], axis=-1)
    features = jax.nn.gelu(_apply(params["trunk"], read))

    logits = mask_logits(_apply(params["actor"], features), observation.mask)
    return logits, _apply(params["critic"], features)[..., 0]


def mask_logits(logits: Array, mask: Array) -> Array:
    """Forbid illegal moves. If none is legal all stay allowed: any of them ends the game."""
    return jnp.where(mask | ~mask.any(-1, keepdims=True), logits, -1e9)


def log_probs(logits: Array, actions: Array) -> Array:
    """Log-probability of each action: [B, 4], [B] -> [B]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], axis=-1)[..., 0]


def entropy(logits: Array) -> Array:
    """Entropy over the moves, in nats: [B, 4] -> [B]; forbidden moves add nothing."""
    normal = jax.nn.log_softmax(logits)
    return -(jnp.exp(normal) * normal).sum(-1)


def rms_norm(X: Array, scale: Array) -> Array:
    wide = X.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(X.dtype)


def waves(length: int, width: int) -> Array:
    """Initial position table [length, width]: sines and cosines along one side of the board."""
    places = jnp.arange(length)[:, None] / length
    frequencies = jnp.pi * jnp.exp2(jnp.arange(width // 2) % 4)[None]
    angles = places * frequencies + jnp.arange(width // 2)[None]

    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1) / math.sqrt(2)


class _Spec(NamedTuple):
    """A layer to initialize; a convolution has several input axes."""

    inputs: tuple[int, ...]
    outputs: int
    stack: int | None = None
    gain: float = 1.0


def _init_layers(key: Array, specs: dict[str, _Spec]) -> Params:
    """Kernels of variance gain^2 / inputs and zero biases; a single draw compiles faster."""
    stacks = {name: () if s.stack is None else (s.stack,) for name, s in specs.items()}
    shapes = {name: (*stacks[name], *s.inputs, s.outputs) for name, s in specs.items()}
    sizes = [math.prod(shape) for shape in shapes.values()]
    pieces = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])

    layers = {}
    for (name, s), piece in zip(specs.items(), pieces):
        kernel = piece.reshape(shapes[name]) * (s.gain / math.sqrt(math.prod(s.inputs)))
        layers[name] = {"kernel": kernel, "bias": jnp.zeros((*stacks[name], s.outputs))}

    return layers


def _apply(layer: Params, X: Array) -> Array:
    # With three axes XLA's CPU gradient copies a transposed factor and is 1.2 times slower.
    rows = X.reshape(-1, X.shape[-1]) if jax.default_backend() == "cpu" else X
    Y = rows @ layer["kernel"].astype(X.dtype) + layer["bias"].astype(X.dtype)
    return Y.reshape(*X.shape[:-1], -1)


def _embed(params: Params, cells: Array, config: SnakeConfig) -> Array:
    """Cells [B, T, F] as tokens [B, T, d]."""
    if config.use_cnn:
        board = cells.reshape(-1, config.height, config.width, NUM_FEATURES)
        kernel = params["conv"]["kernel"]
        maps = jax.lax.conv_general_dilated(
            board, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        maps = jax.nn.gelu(maps + params["conv"]["bias"]).reshape(*cells.shape[:2], -1)

        if config.cnn_mode == "append":
            cells = jnp.concatenate([cells, maps], axis=-1)
        else:
            cells = maps

    rows = params["position"]["rows"]
    columns = params["position"]["columns"]
    positions = (rows[:, None] + columns[None]).reshape(-1, config.d_model)

    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"

    return (_apply(params["input"], cells) + positions).astype(dtype)


def _attend(layer: Params, X: Array, config: SnakeConfig, tokens: Array | None = None) -> Array:
    """Attend from X to X, or to `tokens`; q, k and v come from as few matmuls as possible."""
    qkv = ("query", "key", "value")
    parts = [(qkv, X)] if tokens is None else [(qkv[:1], X), (qkv[1:], tokens)]

    projected = []
    for names, Y in parts:
        Y = rms_norm(Y, layer["attention_norm"]["scale"])
        fused = {
            leaf: jnp.concatenate([layer[name][leaf] for name in names], -1)
            for leaf in ("kernel", "bias")
        }
        projected += jnp.split(_apply(fused, Y), len(names), axis=-1)

    Q, K, V = (Y.reshape(*Y.shape[:2], config.num_heads, -1) for Y in projected)
    return _apply(layer["out"], _attention(Q, K, V, config).reshape(X.shape))


def _attention(Q: Array, K: Array, V: Array, config: SnakeConfig) -> Array:
    """softmax(Q K^T / sqrt(d / H)) V of [B, T, H, d / H] each; there may be fewer queries. On a
    CPU, an axis order that keeps a head's rows together takes 0.6x the time. On an H200 cuDNN takes
    0.74x the time of XLA for a gradient on 10x10 and 1.4x on 6x6; it does not help one query."""
    if jax.default_backend() != "cpu":
        chosen = config.attention
        num = Q.shape[1]
        if chosen == "auto":
            fused = jax.default_backend() == "gpu" and Q.dtype == jnp.bfloat16
            chosen = "cudnn" if fused and num >= 64 and num % 2 == 0 else "xla"

        chosen = chosen if num > 1 else "xla"
        return jax.nn.dot_product_attention(Q, K, V, implementation=chosen)

    Q, K, V = (jnp.swapaxes(Y, 1, 2) for Y in (Q, K, V))
    scores = jnp.einsum("bhsk,bhtk->bhst", Q / math.sqrt(Q.shape[-1]), K)
    Y = jnp.einsum("bhst,bhtk->bhsk", jax.nn.softmax(scores), V)

    return jnp.swapaxes(Y, 1, 2)


def _make_dropout(keys: Array | None, number: Array, rate: float) -> Callable[[Array, int], Array]:
    """Dropout of one layer, reproducible from each observation's own key."""
    if keys is None or rate == 0:
        return lambda X, sublayer: X

    def drop(X: Array, sublayer: int) -> Array:
        def keep(key: Array) -> Array:
            key = jax.random.fold_in(key, 2 * number + sublayer)
            return jax.random.bernoulli(key, 1 - rate, X.shape[1:])

        return jnp.where(jax.vmap(keep)(keys), X / (1 - rate), 0).astype(X.dtype)

    return drop
