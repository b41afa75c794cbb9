"""Roles: what every parameter of a model is, told by module type, identity and config.

`read` answers for one parameter: embedding, head, norm, bias, router, convolution, expert stack,
attention projection or plain matrix, with the view that shows its matrices and the reason. Names
decide only where a type cannot, from the small tables below. What cannot be told is a doubt, never
a guess: routing then asks for an override.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from mesotron.optim.routing.attention import is_block, read_attention
from mesotron.optim.routing.experts import num_experts, read_experts
from mesotron.optim.routing.lora import find_lora_factor, read_lora
from mesotron.optim.routing.mixers import read_mixer
from mesotron.optim.routing.reading import Reading, doubt, matrix
from mesotron.optim.routing.sites import Site, find_int, is_a, words

# Output layers of modules that declare none.
_HEADS = words(
    "lm_head head heads classifier score qa_outputs embed_out output_projection action_net "
    "value_net policy_head value_head actor_head critic_head reward_head v_head mu log_std"
)
# Raw parameters that are tables or tokens, by a word of their name.
_TABLE_WORDS = ("pos", "emb", "token", "queries", "latent", "codebook", "codevector", "prompt")
# Raw parameters that are matrices, with the storage order read in their forward passes.
_RAW_MATRICES = {"mm_input_projection_weight": "T"}
# State-space parameters: matrices in shape only.
_STATE_NAMES = words("A_log A D dt_bias time_decay time_first time_maa")
# Fused matrices outside attention, by what their module is called; the number of equal sections.
_FUSED_SECTIONS = {"gate_up_proj": 2, "Wi": 2, "w12": 2, "w13": 2, "gate_and_up_proj": 2}
# Raw channels of an image, a video or a depth map.
_MAX_RAW_CHANNELS = 4

_Conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ConvTranspose = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_Norms = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
)
_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1}


@dataclass(frozen=True)
class Facts:
    """What the model as a whole says: parameter ids of its embeddings, heads and input layers."""

    embeddings: frozenset[int]
    heads: frozenset[int]
    inputs: frozenset[int]


def survey(model: nn.Module) -> Facts:
    """Collect the embeddings and heads that the model declares, and the layers that structure alone
    makes so."""
    embeddings: set[int] = set()
    heads: set[int] = set()
    inputs: set[int] = set()
    submodels = [
        m for m in model.modules() if is_a(m, "transformers.modeling_utils", "PreTrainedModel")
    ]
    for module in submodels:
        embeddings |= _ids(_declared(module, "get_input_embeddings"))
        heads |= _ids(_declared(module, "get_output_embeddings"))
    for module in [model, *submodels]:
        first = next(
            (m for m in module.modules() if isinstance(m, (nn.Linear, nn.Embedding, *_Conv))), None
        )
        if isinstance(first, _Conv):
            inputs |= _ids(first)
    if not submodels:
        heads |= _ids(_last_layer(model))
    return Facts(frozenset(embeddings), frozenset(heads), frozenset(inputs))


def _declared(model: nn.Module, method: str) -> nn.Module | nn.Parameter | None:
    """A Transformers model's own word on its embeddings, a module or a bare table.

    Models without any raise NotImplementedError, or AttributeError where that part is switched off.
    """
    try:
        return getattr(model, method)()
    except (NotImplementedError, AttributeError):
        return None


def _ids(found: nn.Module | nn.Parameter | None) -> set[int]:
    if isinstance(found, nn.Module):
        return {id(param) for param in found.parameters()}
    return set() if found is None else {id(found)}


def _last_layer(model: nn.Module) -> nn.Module | None:
    """The linear layer that a plain model registers last, under a Sequential or directly: its
    output layer."""
    module = model
    while True:
        trained = [m for m in module.children() if next(m.parameters(), None) is not None]
        if not trained or is_block(module):  # an attention block ends in its own projection
            return None
        module = trained[-1]
        if isinstance(module, nn.Linear):
            return module
        if not isinstance(module, nn.Sequential):
            return None


def read(site: Site, facts: Facts, *, per_head: bool, num_heads: int | None) -> Reading:
    """What the parameter at `site` is.

    Args:
        site: one stored occurrence of the parameter.
        facts: the model's declarations, from `survey`.
        per_head: cut attention projections into heads.
        num_heads: heads of this very matrix when the caller was told, else None.

    Returns:
        A `Reading`, possibly a doubtful one.
    """
    factor = find_lora_factor(site)
    if factor is not None:
        base = factor.base_site and read(
            factor.base_site, facts, per_head=per_head, num_heads=num_heads
        )
        return read_lora(factor, base)
    steps = (_read_declared, _read_small, _read_router)
    for step in steps:
        reading = step(site, facts)
        if reading is not None:
            return reading
    if isinstance(site.owner, nn.MultiheadAttention):
        return _read_multihead(site, num_heads or site.owner.num_heads, per_head)
    if isinstance(site.owner, (*_Conv, *_ConvTranspose)):
        return _read_conv(site, facts, site.owner.groups, site.owner.in_channels)
    if isinstance(site.owner, tuple(_GATES)):
        return _read_recurrent(site)
    if _is_linear(site) or is_a(site.owner, "transformers.pytorch_utils", "Conv1D"):
        return _read_linear(site, per_head, num_heads)
    return read_experts(site) or _read_raw(site)


def _read_declared(site: Site, facts: Facts) -> Reading | None:
    """Embeddings, heads and norms: by the model's own word, by type, then by name."""
    kind = type(site.owner).__name__
    if isinstance(site.owner, (nn.Embedding, nn.EmbeddingBag)):
        return Reading("embedding", f"{kind}: rows are looked up, not multiplied")
    if site.param.ndim < 2:
        return None
    if id(site.param) in facts.embeddings:
        return Reading("embedding", "the model's input embedding", _raw_view(site))
    if id(site.param) in facts.heads:
        return Reading("head", "the model's output layer", _raw_view(site))
    if isinstance(site.owner, _Norms) or "Norm" in kind:
        return Reading("norm", f"{kind} scale")
    if not isinstance(site.owner, (nn.Linear, *_Conv)):
        return None
    if site.called in _HEADS:
        return Reading("head", f"output layer by its name '{site.called}'", _raw_view(site))
    if isinstance(site.owner, nn.Linear) and _is_vocabulary(site):
        return Reading("head", f"{site.param.shape[0]} outputs, one per vocabulary entry")
    return None


def _is_vocabulary(site: Site) -> bool:
    """Outputs equal the vocabulary, outside the numbered layers, where equality is a
    coincidence."""
    if any(segment.isdigit() for segment in site.path):
        return False
    vocab = find_int((site.config,), ("vocab_size",))
    widths = {find_int((site.config,), (name,)) for name in ("hidden_size", "intermediate_size")}
    return vocab is not None and site.param.shape[0] == vocab and vocab not in widths


def _read_small(site: Site, facts: Facts) -> Reading | None:
    """Scalars, vectors, biases, and tensors that are vectors but for dims of one."""
    kind, shape = type(site.owner).__name__, site.param.shape
    words = site.leaf.lower()
    if isinstance(site.owner, _Norms) or "Norm" in kind:
        return Reading("norm", f"{kind} {site.leaf}")
    if words.endswith(("bias", "biases", "bias_table")) or words.startswith("bias"):
        return Reading("bias", "added, not multiplied")
    if len(shape) == 0:
        return Reading("scalar", "one number")
    if 0 in shape:
        return Reading("vector", "empty: nothing to train")
    if sum(size > 1 for size in shape) < 2 or _one_sided(site):
        return Reading("vector", "a vector: a filter would only normalise it")
    if len(site.leaf.split(".")) > 1:
        return Reading("vector", "one factor of a reparametrised weight", _raw_view(site))
    return None


def _one_sided(site: Site) -> bool:
    """A linear map or a convolution from one input or to one output."""
    if isinstance(site.owner, (*_Conv, *_ConvTranspose)):
        return min(site.param.shape[0], math.prod(site.param.shape[1:])) == 1
    return site.param.ndim == 2 and min(site.param.shape) == 1


def _read_router(site: Site, facts: Facts) -> Reading | None:
    """A mixture-of-experts gate: one output per expert."""
    if site.param.ndim != 2:
        return None
    kinds = type(site.owner).__name__ + type(site.parent).__name__
    experts = num_experts(site)
    named = site.called in ("gate", "router", "wg", "gating")
    if "Router" in kinds or (named and experts is not None and site.param.shape[0] == experts):
        return Reading("router", f"chooses among {site.param.shape[0]} experts")
    return None


def _read_multihead(site: Site, heads: int, per_head: bool) -> Reading:
    """torch's own attention: a fused (3E, E) weight, or one per input when the widths differ."""
    sections = 3 if site.leaf == "in_proj_weight" else 1
    cut = sections * heads if per_head else sections
    if site.param.shape[0] % cut:
        return doubt(
            f"{site.name}: {cut} blocks do not fit its {site.param.shape[0]} rows; "
            f"pass per_head={{'{site.name}': NUM_HEADS}} with the right count"
        )
    part = "qkv" if sections == 3 else site.leaf[0]
    reason = f"{heads} heads of nn.MultiheadAttention" if per_head else "nn.MultiheadAttention"
    return matrix(f"attention {part}", reason, f"rows:{cut}" if cut > 1 else "whole")


def _read_conv(site: Site, facts: Facts, groups: int, channels: int) -> Reading:
    """Convolutions: (out, in * kernel) is the matrix, except where each channel has its own or
    inputs are raw."""
    if groups > 1:
        kind = "depthwise" if groups == channels else f"grouped ({groups})"
        return Reading("conv", f"{kind} convolution: its groups are separate small maps")
    if id(site.param) in facts.inputs or channels <= _MAX_RAW_CHANNELS:
        return Reading("conv", f"first layer: reads {channels} raw channels", "conv")
    return matrix("conv", "outputs x (inputs * kernel)", "conv")


def _read_recurrent(site: Site) -> Reading:
    """RNN weights stack their gates in rows."""
    gates = next(n for cls, n in _GATES.items() if isinstance(site.owner, cls))
    if site.leaf.startswith("weight_hr") or gates == 1:
        return matrix("recurrent", f"{type(site.owner).__name__} {site.leaf}")
    return matrix("recurrent", f"{gates} gates of {type(site.owner).__name__}", f"rows:{gates}")


def _is_linear(site: Site) -> bool:
    """nn.Linear and its kin; library linears that do not inherit from it carry the word at the end
    of their name."""
    named = type(site.owner).__name__.endswith("Linear")
    return (
        site.leaf == "weight"
        and site.param.ndim == 2
        and (isinstance(site.owner, nn.Linear) or named)
    )


def _read_linear(site: Site, per_head: bool, num: int | None) -> Reading:
    """A linear layer: an attention projection, a fused pair, or a plain matrix."""
    stored_transposed = is_a(site.owner, "transformers.pytorch_utils", "Conv1D")
    rows, cols = reversed(site.param.shape) if stored_transposed else site.param.shape
    reading = _read_torch_output(site, per_head, num)
    reading = reading or read_attention(site, rows, cols, per_head=per_head, num=num)
    reading = reading or read_mixer(site, rows) or _read_sections(site, rows)
    if not stored_transposed:
        return reading
    view = "T" if reading.view == "whole" else f"T/{reading.view}"
    return replace(reading, view=view)


def _read_torch_output(site: Site, per_head: bool, num: int | None) -> Reading | None:
    """`out_proj` of nn.MultiheadAttention, whose siblings are raw parameters."""
    if not isinstance(site.parent, nn.MultiheadAttention):
        return None
    if not per_head:
        return matrix("attention o", "output projection")
    heads = num or site.parent.num_heads
    return matrix("attention o", f"output projection, {heads} heads", f"cols:{heads}")


def _read_sections(site: Site, rows: int) -> Reading:
    """Fused gate and up projections, and everything else."""
    sections = _FUSED_SECTIONS.get(site.called, 1)
    if sections == 1 or rows % sections:
        return matrix("linear", "hidden matrix")
    return matrix("linear", f"{sections} projections fused in sections", f"rows:{sections}")


def _raw_view(site: Site) -> str:
    """The view an override would want, should it send an auxiliary tensor to a filter."""
    if isinstance(site.owner, (*_Conv, *_ConvTranspose)):
        return "conv"
    return "whole"


def _read_raw(site: Site) -> Reading:
    """A bare nn.Parameter with two or more real dims in a module that says nothing about it."""
    leaf = site.leaf.lower()
    if site.leaf in _RAW_MATRICES:
        return matrix("linear", "hidden matrix, kept as a bare parameter", _RAW_MATRICES[site.leaf])
    if site.leaf in _STATE_NAMES:
        return Reading("state", "state-space parameter, not a map between layers")
    kind, shape = type(site.owner).__name__, tuple(site.param.shape)
    if any(word in leaf for word in _TABLE_WORDS) or "Embed" in kind:
        return Reading("table", f"'{site.leaf}' holds learned rows, not a map")
    if len(shape) > 2 and shape[0] == 1:
        return Reading("table", "a leading 1 is spread over the batch: learned rows, not a map")
    return doubt(
        f"{site.name} is a bare parameter of shape {shape} in a {kind}, and nothing tells whether "
        "it is a matrix, a stack or a table; write "
        f"overrides={{'{site.name}': 'adamw'}} or "
        f"{{'{site.name}': {{'rule': 'muon', 'view': 'whole'}}}}"
    )
