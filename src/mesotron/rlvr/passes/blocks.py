"""A training pass over ragged rows: blocks of Llama, Qwen2 and Qwen3 from few kernels.

Products are the model's own modules, so adapters and autocast work as ever. What lies between them
reads and writes memory once: the residual's addition with the norm behind it, the rotation, the
gated activation, and attention over sequences of several lengths.

Shapes: as in `ragged`, and E width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.utils.checkpoint import checkpoint

from mesotron.rlvr.passes.ragged import Ragged, Sight, flash_attend, lay_out, plain_attend

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LARGEST_HEAD = 256  # places of a head in flash attention, a multiple of the second number
HEAD_STEP = 8
# Columns of the logits computed at a time.
VOCABULARY_CHUNK = 32768


class Ops(NamedTuple):
    """What lies between the products."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate: Callable[..., Tensor]
    gated: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    score: Callable[..., tuple[Tensor, Tensor]]


def plain_add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    total = x if delta is None else x + delta
    normed = rms_norm(total, total.shape[-1:], weight.to(total.dtype), eps)
    return total, normed.to(dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    swapped = torch.cat([-b, a], dim=-1)
    return (x * cos[:, None] + swapped * sin[:, None]).to(dtype)


def plain_gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def tiled_score(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """TRL's head, which computes logits in tiles, and again for their gradient."""
    from trl.kernels import ChunkedLogProbFunction  # in TRL 1.15 it needs Triton

    logprobs, entropies, *_ = ChunkedLogProbFunction.apply(
        hidden,
        weight,
        bias,
        labels,
        temperature,
        VOCABULARY_CHUNK,
        None,
        1.0,
        ("entropy",),
    )
    return logprobs, entropies


PLAIN = Ops(plain_add_norm, plain_rotate, plain_gated, plain_attend, tiled_score)


def fused_ops(attend: Callable[..., Tensor] = flash_attend) -> Ops:
    """The kernels; only where Triton is installed."""
    kernels = "mesotron.rlvr.passes.kernels"
    head = import_module(f"{kernels}.head")

    def score(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        keeps = torch.is_grad_enabled() and head.fits(len(hidden), len(weight), hidden)
        return (head.score if keeps else tiled_score)(hidden, weight, *rest)

    return Ops(
        add_norm=import_module(f"{kernels}.norm").add_norm,
        rotate=import_module(f"{kernels}.rotary").rotate,
        gated=import_module(f"{kernels}.gate").gated,
        attend=attend,
        score=score,
    )


class RaggedPass:
    """Log-probabilities and entropies of completions from ragged rows."""

    def __init__(
        self,
        autocast: Callable[[], AbstractContextManager[Any]],
        entropy_gradient: bool = False,
        ops: Ops | None = None,
    ) -> None:
        self.autocast = autocast
        self.entropy_gradient = entropy_gradient
        self.ops = ops

    def __call__(
        self, model: Any, ids: Tensor, mask: Tensor, length: int, temperature: float
    ) -> tuple[Tensor, Tensor] | None:
        """Two tensors (B, T) of ids and mask (B, P + T), or None if a mask has holes."""
        ragged = lay_out(ids, mask, length)
        if ragged is None:
            return None

        self.ops = self.ops or fused_ops()
        base = model.get_base_model() if is_peft_model(model) else model

        with self.autocast():
            hidden = hidden_states(base, ragged, self.ops)
            head = base.get_output_embeddings()
            logprobs, entropies = self.ops.score(
                hidden[ragged.lead :], head.weight, head.bias, ragged.labels, temperature
            )

        if not self.entropy_gradient:
            entropies = entropies.detach()

        return ragged.unpack(logprobs), ragged.unpack(entropies)


def ragged_obstacle(model: Any) -> str | None:
    """Why a model's blocks are not those of `hidden_states`."""
    base = model.get_base_model() if is_peft_model(model) else model
    kind = type(base).__name__
    if kind not in MODELS:
        return f"the model is a {kind}, not {' or '.join(MODELS)}"

    if base.config.hidden_act != "silu":
        return f"its activation is {base.config.hidden_act}, not silu"

    size = base.model.layers[0].self_attn.head_dim
    if size > LARGEST_HEAD or size % HEAD_STEP:
        return f"its heads have {size} places"

    return None


def hidden_states(model: Any, ragged: Ragged, ops: Ops) -> Tensor:
    """(N, E), after the last norm."""
    backbone = model.model
    x = model.get_input_embeddings()(ragged.ids)
    cos, sin = backbone.rotary_emb(x[None], ragged.positions[None])
    angles = (cos[0], sin[0])

    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)

    context = PassContext(angles, ragged.sight, ops, dtype)
    delta = None
    for layer in backbone.layers:
        if layer.gradient_checkpointing and layer.training:
            x, delta = checkpoint(
                block, layer, x, delta, context, use_reentrant=False, preserve_rng_state=False
            )
        else:
            x, delta = block(layer, x, delta, context)

    return context.normed(x, delta, backbone.norm)[1]


class PassContext(NamedTuple):
    """What all blocks of a pass share."""

    angles: tuple[Tensor, Tensor]  # (N, D) each: cosines and sines
    sight: Sight
    ops: Ops
    dtype: torch.dtype  # of what products read

    def normed(self, x: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        return self.ops.add_norm(x, delta, norm.weight, norm.variance_epsilon, self.dtype)


def block(
    layer: Any, x: Tensor, delta: Tensor | None, context: PassContext
) -> tuple[Tensor, Tensor]:
    """The stream (N, E) in front of the block's MLP, and what the MLP adds to it."""
    x, read = context.normed(x, delta, layer.input_layernorm)
    delta = attention(layer.self_attn, read, context)

    x, read = context.normed(x, delta, layer.post_attention_layernorm)
    mlp = layer.mlp
    return x, mlp.down_proj(context.ops.gated(mlp.gate_proj(read), mlp.up_proj(read)))


def attention(module: Any, x: Tensor, context: PassContext) -> Tensor:
    """(N, E), of x (N, E)."""
    D = module.head_dim
    ops = context.ops
    query = module.q_proj(x).view(len(x), -1, D)
    key = module.k_proj(x).view(len(x), -1, D)
    value = module.v_proj(x).view(len(x), -1, D)

    if "q_norm" in dict(module.named_children()):  # Qwen3
        _, query = context.normed(query, None, module.q_norm)
        _, key = context.normed(key, None, module.k_norm)

    query = ops.rotate(query, *context.angles, context.dtype)
    key = ops.rotate(key, *context.angles, context.dtype)
    mixed = ops.attend(query, key, value, context.sight, module.scaling)

    return module.o_proj(mixed.flatten(1))
