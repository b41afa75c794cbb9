"""The blocks of the models that the fused decoder takes: a row of `BLOCKS` for each family.

A row names the norms around attention and MLP. What has a number, a model says itself: windows,
scales, whether queries and keys have norms, which layers rotate.

Shapes: H query heads, K key heads, D head size, E width, F features of the MLP.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderBlock:
    """Names of a layer's norms, None where there is none. The defaults are Llama's."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm_offset: float = 0.0  # added to the weight of every norm

    @property
    def norms(self) -> dict[str, str | None]:
        return {
            "before_attention": self.before_attention,
            "after_attention": self.after_attention,
            "before_mlp": self.before_mlp,
            "after_mlp": self.after_mlp,
        }


LLAMA = DecoderBlock()
GEMMA = DecoderBlock(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
)
OLMO = DecoderBlock(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
BLOCKS = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": LLAMA,
    "GraniteForCausalLM": LLAMA,
    "Gemma3ForCausalLM": GEMMA,
    "Olmo2ForCausalLM": OLMO,
    "Olmo3ForCausalLM": OLMO,
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ATTENTION = {"full_attention", "sliding_attention"}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
NO_ROTATION = "none"  # the kind of a layer that does not rotate


@dataclass(frozen=True)
class LayerKind:
    """How a layer's attention differs from another layer's."""

    rotation: str  # a kind of the model's rotary embedding, or `NO_ROTATION`
    window: int | None  # places that a token sees, itself included; None: all


@dataclass(frozen=True, kw_only=True)
class FusedLayer:
    """The weights of one layer; those that read the same input are one matrix."""

    qkv: Tensor  # ((H + 2 K) D, E)
    out: Tensor  # (E, H D)
    gate_up: Tensor  # (2 F, E)
    down: Tensor  # (E, F)
    bias: Tensor | None = None  # ((H + 2 K) D,)
    head_norms: Tensor | None = None  # (2 D,): of each head of queries and of keys
    wide_norms: Tensor | None = None  # ((H + K) D,): of all queries and of all keys
    before_attention: Tensor | None = None  # (E,)
    after_attention: Tensor | None = None
    before_mlp: Tensor | None = None
    after_mlp: Tensor | None = None


def base_of(model: Any) -> Any:
    if is_peft_model(model):
        return model.get_base_model()

    return model


def block_of(model: Any) -> DecoderBlock:
    return BLOCKS[type(model).__name__]


def block_obstacle(model: Any) -> str | None:
    """Why the fused decoder cannot take a model."""
    model = base_of(model)
    kind = type(model).__name__
    if kind not in BLOCKS:
        families = ", ".join(name.removesuffix("ForCausalLM") for name in BLOCKS)
        return f"the model is a {kind}, of none of the families {families}"

    wrapped = wrapped_modules(model)
    if wrapped:
        return f"its layers are wrapped ({wrapped[0]})"

    has_other_biases = any(
        product.bias is not None
        for layer in model.model.layers
        for product in products_of(layer)[3:]
    )
    if has_other_biases or activation_of(model) not in ACTIVATIONS:
        return "its layers have other biases or activations than Llama's or Gemma's"

    return config_obstacle(model.config)


def config_obstacle(config: Any) -> str | None:
    """What of the settings in a model's config the fused decoder does not know."""
    capped = [name for name in CAPS if getattr(config, name, None)]
    if capped:
        return f"it has {capped[0]}"

    other_types = sorted(set(getattr(config, "layer_types", None) or []) - ATTENTION)
    if other_types or getattr(config, "use_bidirectional_attention", None):
        return f"its attention is {', '.join(other_types) or 'bidirectional'}"

    return None


def activation_of(model: Any) -> str:
    config = model.config
    return getattr(config, "hidden_activation", None) or config.hidden_act


def layer_kinds(model: Any) -> list[LayerKind]:
    """Of each layer."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    by_type = "layer_type" in inspect.signature(model.model.rotary_emb.forward).parameters

    kinds = []
    for number, layer in enumerate(model.model.layers):
        kind = "sliding_attention" if types is None else types[number]
        rotation = "all"
        if not getattr(layer.self_attn, "use_rope", True):
            rotation = NO_ROTATION
        elif by_type:
            rotation = kind

        slides = kind == "sliding_attention"
        kinds.append(LayerKind(rotation, window if slides else None))

    return kinds


def rotation_of(model: Any, kind: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (B, T), (B, T, D) each, in the type of x."""
    rotary = model.model.rotary_emb
    if kind == NO_ROTATION:
        cos, sin = rotary(x, positions)
        return torch.ones_like(cos), torch.zeros_like(sin)

    if kind == "all":
        return rotary(x, positions)

    return rotary(x, positions, kind)


def embedding_scale(model: Any) -> float | Tensor:
    module = model.get_input_embeddings()
    scale = getattr(module, "embed_scale", None)
    if scale is not None:
        return scale.to(module.weight.dtype)

    return getattr(model.config, "embedding_multiplier", 1.0)


def weights_of(layer: Any, block: DecoderBlock) -> dict[str, list[Tensor]]:
    """The weights of a layer by field of `FusedLayer`: those of a field are joined."""
    q, k, v, out, gate, up, down = products_of(layer)
    weights = {
        "qkv": [weight_of(q), weight_of(k), weight_of(v)],
        "out": [weight_of(out)],
        "gate_up": [weight_of(gate), weight_of(up)],
        "down": [weight_of(down)],
    }
    if q.bias is not None:
        weights["bias"] = [q.bias, k.bias, v.bias]

    attention = dict(layer.self_attn.named_children())
    if "q_norm" in attention:
        norms = [norm_weight(attention[name], block) for name in ("q_norm", "k_norm")]
        is_wide = len(norms[0]) != layer.self_attn.head_dim
        weights["wide_norms" if is_wide else "head_norms"] = norms

    for field, name in block.norms.items():
        if name is not None:
            weights[field] = [norm_weight(getattr(layer, name), block)]

    return weights


def norm_weight(norm: Any, block: DecoderBlock) -> Tensor:
    if not block.norm_offset:
        return norm.weight

    return norm.weight.float() + block.norm_offset


def merge(weights: dict[str, list[Tensor]], dtype: torch.dtype, norm_dtype: torch.dtype) -> Any:
    """A `FusedLayer`, and views of its fields in the order of the weights."""
    fields = {}
    views: list[Tensor] = []
    for field, parts in weights.items():
        is_norm = field.endswith("norms") or field in LLAMA.norms
        joined = torch.cat(parts).to(norm_dtype if is_norm else dtype)
        fields[field] = joined
        views += joined.split([len(part) for part in parts])

    return FusedLayer(**fields), views


def outer_weights(model: Any) -> list[Tensor]:
    """The weights of the embedding, the last norm and the head. Where the logits are divided by a
    number, the norm is."""
    norm = norm_weight(model.model.norm, block_of(model))
    scale = getattr(model.config, "logits_scaling", 1.0)
    if scale != 1:
        norm = norm / scale

    return [model.get_input_embeddings().weight, norm, model.get_output_embeddings().weight]


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


def wrapped_modules(model: Any) -> list[str]:
    """The types of products that are neither linear layers nor plain LoRA around one."""
    modules = [model.get_output_embeddings()]
    for layer in model.model.layers:  # adapters may be in some
        for product in products_of(layer):
            modules.append(product.get_base_layer() if is_plain_lora(product) else product)

    names = [type(one).__name__ for one in modules if type(one) is not nn.Linear]
    embeddings = model.get_input_embeddings()
    is_scaled = "embed_scale" in dict(embeddings.named_buffers())
    if type(embeddings) is not nn.Embedding and not is_scaled:
        names.append(type(embeddings).__name__)

    return names


def is_plain_lora(product: Any) -> bool:
    """Whether it has LoRA without variants such as DoRA."""
    if not isinstance(product, LoraLayer) or product.lora_variant:
        return False

    return not any(product.lora_bias.values())
