"""Roles: what each parameter of a PyTorch model is, by module type, identity and config.

Attention is in `attention`. Names decide only where a type cannot, by names.toml.
What cannot be determined is reported as unclear, never guessed: routing then needs an override.
"""

import math
from dataclasses import dataclass, replace

from torch import nn

from mesotron.optim.routing.attention import attention_role, is_attention
from mesotron.optim.routing.sites import NAMES, ModuleSite, find_int, is_a
from mesotron.optim.views import View
from mesotron.spectral.routing import MAX_RAW_CHANNELS, Role, matrix, unclear, words

_HEADS = words(NAMES["heads"])
_STATE_NAMES = words(NAMES["state"])
_FUSED_EXPERTS = words(NAMES["fused_experts"])
_PRETRAINED = ("transformers.modeling_utils", "PreTrainedModel")  # declares its own head
_TABLE_WORDS = NAMES["tables"].split()
# Raw parameters that are matrices, with the storage order their forward passes use.
_RAW_MATRICES = {"mm_input_projection_weight": "T"}

_PLAIN_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVS = (*_PLAIN_CONVS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS)
_GATES = {
    nn.LSTM: 4,
    nn.LSTMCell: 4,
    nn.GRU: 3,
    nn.GRUCell: 3,
    nn.RNN: 1,
    nn.RNNCell: 1,
}


@dataclass(frozen=True)
class ModelFacts:
    """Parameter ids of the model's embeddings, heads and input layers."""

    embeddings: frozenset[int]
    heads: frozenset[int]
    inputs: frozenset[int]


def survey(model: nn.Module) -> ModelFacts:
    embeddings = set()
    heads = set()
    inputs = set()

    submodels = [m for m in model.modules() if is_a(m, *_PRETRAINED)]
    for module in submodels:
        embeddings |= _ids(_declared(module, "get_input_embeddings"))
        heads |= _ids(_declared(module, "get_output_embeddings"))

    for module in [model, *submodels]:
        kinds = (nn.Linear, nn.Embedding, *_PLAIN_CONVS)
        first = next((m for m in module.modules() if isinstance(m, kinds)), None)
        if isinstance(first, _PLAIN_CONVS):
            inputs |= _ids(first)

    heads |= _ids(_last_layer(model))
    return ModelFacts(frozenset(embeddings), frozenset(heads), frozenset(inputs))


def _declared(model: nn.Module, method: str) -> nn.Module | nn.Parameter | None:
    try:
        return getattr(model, method)()
    except (NotImplementedError, AttributeError):  # it has none, or that part is disabled
        return None


def _ids(layer: nn.Module | nn.Parameter | None) -> set[int]:
    if isinstance(layer, nn.Module):
        return {id(param) for param in layer.parameters()}
    if layer is None:
        return set()

    return {id(layer)}


def _last_layer(model: nn.Module) -> nn.Module | None:
    """The output layer of a plain model: the linear layer registered last, or last in its last
    Sequential, looking through wrappers."""
    module = model
    while True:
        trained = []
        for m in module.children():
            if next(m.parameters(), None) is not None:
                trained.append(m)

        # An attention block ends in its own projection.
        if not trained or is_a(module, *_PRETRAINED) or is_attention(module):
            return None

        is_wrapper = len(trained) == 1
        module = trained[-1]
        if "original_module" in module._modules:  # PEFT's modules_to_save
            module = list(module.get_submodule("modules_to_save").children())[-1]

        if isinstance(module, nn.Linear):
            return module
        if not (is_wrapper or isinstance(module, nn.Sequential)):
            return None


def role_of(site: ModuleSite, facts: ModelFacts, *, per_head: bool, num_heads: int | None) -> Role:
    """What the parameter at `site` is. With `per_head`, attention projections are split into heads,
    `num_heads` of them if the user gave it."""
    lora = _lora_role(site, facts, per_head, num_heads)
    role = lora or _declared_role(site, facts) or _small_role(site) or _router_role(site)
    if role is not None:
        return role

    owner = site.owner
    if isinstance(owner, nn.MultiheadAttention):
        return _multihead_role(site, num_heads or owner.num_heads, per_head)
    if isinstance(owner, _CONVS):
        return _conv_role(site, facts, owner.groups, owner.in_channels)
    if isinstance(owner, tuple(_GATES)):
        return _recurrent_role(site)

    transposed = is_a(owner, "transformers.pytorch_utils", "Conv1D")
    if transposed or _is_linear_weight(site):
        return _linear_role(site, transposed, per_head, num_heads)

    return _expert_role(site) or _raw_role(site)


def _is_linear_weight(site: ModuleSite) -> bool:
    # Library linears that do not inherit from nn.Linear have class names that end in it.
    linear = isinstance(site.owner, nn.Linear) or type(site.owner).__name__.endswith("Linear")
    return linear and site.leaf == "weight" and len(site.shape) == 2


def _declared_role(site: ModuleSite, facts: ModelFacts) -> Role | None:
    """Embeddings and heads: declared by the model, by type, then by name."""
    owner = site.owner
    kind = type(site.owner).__name__
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return Role("embedding", f"{kind}: a lookup table")
    if len(site.shape) < 2:
        return None

    view = "conv" if isinstance(owner, _CONVS) else "whole"  # for an override to a spectral rule
    if id(site.param) in facts.embeddings:
        return Role("embedding", "the model's input embedding", view)
    if id(site.param) in facts.heads:
        return Role("head", "the model's output layer", view)
    if not isinstance(owner, (nn.Linear, *_PLAIN_CONVS)):
        return None
    if site.owner_name in _HEADS:
        return Role("head", f"output layer by its name '{site.owner_name}'", view)
    if _ends_head(site):
        return Role("head", "the output layer of a module with the name of a head", view)
    if isinstance(owner, nn.Linear) and _is_vocabulary(site):
        return Role("head", f"{site.shape[0]} outputs, one per vocabulary entry")

    return None


def _ends_head(site: ModuleSite) -> bool:
    """The last layer of a head of several, or one of several heads, outside the layers."""
    for name, module in zip(site.path, site.modules[1:], strict=True):
        if name.isdigit():
            return False

        several = isinstance(module, (nn.Sequential, nn.ModuleList))
        several = several or type(module).__name__.endswith("ClassificationHead")
        if several and name in _HEADS and name.endswith(("head", "heads", "classifier")):
            if isinstance(module, nn.ModuleList) and site.parent is module:
                return True

            kinds = (nn.Linear, *_PLAIN_CONVS)
            layers = []
            for layer in module.modules():
                if isinstance(layer, kinds):
                    layers.append(layer)

            return layers[-1] is site.owner

    return False


def _is_vocabulary(site: ModuleSite) -> bool:
    """One output per vocabulary entry, outside the numbered layers, where that is a coincidence."""
    if any(name.isdigit() for name in site.path):
        return False

    vocab = find_int((site.config,), ("vocab_size",))
    widths = {find_int((site.config,), (name,)) for name in ("hidden_size", "intermediate_size")}
    return vocab is not None and site.shape[0] == vocab and vocab not in widths


def _small_role(site: ModuleSite) -> Role | None:
    kind = type(site.owner).__name__
    leaf = site.leaf.lower()
    if isinstance(site.owner, _NORMS) or "Norm" in kind:
        return Role("norm", f"{kind} {site.leaf}")
    if leaf.endswith(("bias", "biases", "bias_table")) or leaf.startswith("bias"):
        return Role("bias", "added, not multiplied")
    if len(site.shape) == 0:
        return Role("scalar", "one number")
    if 0 in site.shape:
        return Role("vector", "empty")
    if _is_vector(site):
        return Role("vector", "a vector: a filter would only normalize it")

    if "." in site.leaf:
        view = "conv" if isinstance(site.owner, _CONVS) else "whole"
        return Role("vector", "one factor of a reparametrized weight", view)

    return None


def _is_vector(site: ModuleSite) -> bool:
    """At most one dimension above 1, or a linear map or convolution with a single input or
    output."""
    if sum(size > 1 for size in site.shape) < 2:
        return True

    is_map = len(site.shape) == 2 or isinstance(site.owner, _CONVS)
    return is_map and 1 in (site.shape[0], math.prod(site.shape[1:]))


def _router_role(site: ModuleSite) -> Role | None:
    if len(site.shape) != 2:
        return None

    kinds = type(site.owner).__name__ + type(site.parent).__name__
    experts = _num_experts(site)
    named = site.owner_name in ("gate", "wg", "gating") and site.shape[0] == experts
    if "Router" in kinds or site.owner_name == "router" or named:
        return Role("router", f"chooses among {site.shape[0]} experts")

    return None


def _multihead_role(site: ModuleSite, heads: int, per_head: bool) -> Role:
    """torch's own attention: a fused (3E, E) weight, or one per input if the widths differ."""
    fused = site.leaf == "in_proj_weight"
    blocks = 3 if fused else 1
    reason = "nn.MultiheadAttention"
    if per_head:
        blocks *= heads
        reason = f"{heads} heads of nn.MultiheadAttention"

    if site.shape[0] % blocks:
        return unclear(
            f"{site.name}: {blocks} blocks do not fit its {site.shape[0]} rows; "
            f"pass per_head={{'{site.name}': NUM_HEADS}} with the right count"
        )

    part = "qkv" if fused else site.leaf[0]
    view = f"rows:{blocks}" if blocks > 1 else "whole"

    return matrix(f"attention {part}", reason, view)


def _conv_role(site: ModuleSite, facts: ModelFacts, groups: int, channels: int) -> Role:
    """(out, in * kernel) is the matrix, unless channels are separate or the input is raw."""
    if groups == channels > 1:
        return Role("conv", "depthwise convolution: separate small maps")
    if groups > 1:
        return Role("conv", f"grouped ({groups}) convolution: separate small maps")

    is_plain = isinstance(site.owner, _PLAIN_CONVS)
    view = "conv" if is_plain else "conv/T"
    if id(site.param) in facts.inputs or channels <= MAX_RAW_CHANNELS:
        return Role("conv", f"first layer: reads {channels} raw channels", view)

    if not is_plain:
        return matrix("conv", "(outputs * kernel) x inputs", view)

    return matrix("conv", "outputs x (inputs * kernel)", view)


def _recurrent_role(site: ModuleSite) -> Role:
    kind = type(site.owner).__name__
    gates = next(n for cls, n in _GATES.items() if isinstance(site.owner, cls))
    if site.leaf.startswith("weight_hr") or gates == 1:
        return matrix("recurrent", f"{kind} {site.leaf}")

    return matrix("recurrent", f"{gates} gates of {kind}", f"rows:{gates}")


def _linear_role(site: ModuleSite, transposed: bool, per_head: bool, num: int | None) -> Role:
    rows, cols = reversed(site.shape) if transposed else site.shape
    role = attention_role(site, rows, cols, per_head=per_head, num=num)
    role = role or _mixer_role(site, rows) or _plain_role(site, rows)
    if not transposed:
        return role

    if role.view == "whole":
        return replace(role, view="T")

    return replace(role, view=f"T/{role.view}")


def _plain_role(site: ModuleSite, rows: int) -> Role:
    sections = NAMES["fused_sections"].get(site.owner_name, 1)
    if sections == 1 or rows % sections:
        return matrix("linear", "hidden matrix")

    return matrix("linear", f"{sections} fused projections", f"rows:{sections}")


def _raw_role(site: ModuleSite) -> Role:
    if site.leaf in _RAW_MATRICES:
        return matrix("linear", "hidden matrix, a bare parameter", _RAW_MATRICES[site.leaf])
    if site.leaf in _STATE_NAMES:
        return Role("state", "state-space parameter, not a map between layers")

    kind = type(site.owner).__name__
    leaf = site.leaf.lower()
    if any(word in leaf for word in _TABLE_WORDS) or "Embed" in kind:
        return Role("table", f"'{site.leaf}' holds learned rows, not a map")
    if len(site.shape) > 2 and site.shape[0] == 1:
        return Role("table", "leading dim 1, broadcast over the batch: learned rows, not a map")

    return unclear(
        f"{site.name} is a bare parameter of shape {site.shape} in a {kind}, which may be a "
        f"matrix, a stack or a table; pass overrides={{'{site.name}': 'adamw'}} or "
        f"{{'{site.name}': {{'rule': 'muon', 'view': 'whole'}}}}"
    )


# Stacked experts: one parameter that holds a matrix per expert, in Transformers' storage orders.


def _num_experts(site: ModuleSite) -> int | None:
    count = find_int((site.owner, site.parent, site.config), NAMES["counts"]["experts"].split())
    if count is not None:
        return count

    siblings = site.parent._modules.get("experts")
    if isinstance(siblings, nn.ModuleList):
        return len(siblings)

    return None


def _expert_role(site: ModuleSite) -> Role | None:
    """A 3-D stack (experts, out, in) or (experts, in, out); None if the parameter is not one."""
    if type(site.owner).__name__ == "DbrxExpertGLU":
        # DBRX concatenates its experts in a 2-D weight; w2 is stored (in, out).
        count = _num_experts(site)
        view = f"rows:{count}"
        if site.leaf == "w2":
            view = f"T/cols:{count}"

        return matrix("expert", f"{count} experts, concatenated", view)

    if len(site.shape) != 3 or "Expert" not in type(site.owner).__name__:
        return None

    transposed = _experts_transposed(site)
    if transposed is None:
        return unclear(
            f"{site.name} is an expert stack of shape {site.shape} that may be "
            "(experts, out, in) or (experts, in, out); pass "
            f"overrides={{'{site.name}': {{'view': 'stack'}}}} or {{'view': 'stack/T'}}"
        )

    view = "stack/T" if transposed else "stack"
    experts = f"{site.shape[0]} experts"
    if site.leaf not in _FUSED_EXPERTS and site.owner_name not in _FUSED_EXPERTS:
        return matrix("expert", experts, view)
    if getattr(site.owner, "is_concatenated", True):
        return matrix("expert", f"{experts}, gate | up", f"{view}/rows:2")

    rows = site.shape[2 if transposed else 1]
    return matrix("expert", f"{experts}, gate and up interleaved", f"{view}/rows:{rows // 2}%2")


def _experts_transposed(site: ModuleSite) -> bool | None:
    """Whether a stack is (experts, in, out): by Transformers' own flag, else by the hidden size."""
    flag = getattr(site.owner, "is_transposed", None)
    if isinstance(flag, bool):
        return flag

    _, second, third = site.shape
    if "Parallel" in type(site.owner).__name__:  # JetMoe: documented as (experts, out, in)
        return False

    width = find_int((site.config,), ("hidden_size",))
    if second == third or width not in (second, third):
        return None

    reads_hidden = "down" not in site.leaf and site.leaf != "w2"
    return (second == width) == reads_hidden


# Mixers: state-space and linear-attention layers pack queries, keys, values, gates and time steps
# into one weight. Layouts follow Transformers' forward passes; sizes come from the mixer's own
# attributes, and a layout that does not add up is filtered whole, with that reason.


def _mixer_role(site: ModuleSite, rows: int) -> Role | None:
    mixer = site.parent
    kind = type(site.parent).__name__
    if kind.endswith("GatedDeltaNet"):
        cut = _delta_net_cut(mixer, site.owner_name)
    elif kind.endswith("ShortConv"):
        cut = "3" if site.owner_name == "in_proj" else ""
    elif kind.endswith("Mixer") and "A_log" in mixer._parameters:
        cut = _state_space_cut(mixer, site.owner_name)
    else:
        return None

    if not cut:
        return matrix("mixer", f"{site.owner_name} of {kind}")

    if not cut.isdigit():
        groups, _, sizes = cut.rpartition("%")
        if int(groups or 1) * sum(map(int, sizes.split("+"))) != rows or "+0" in cut:
            return matrix("mixer", f"fused inputs of {kind}, unknown layout: filtered whole")

    return matrix("mixer", f"fused inputs of {kind}, split by part", f"rows:{cut}")


def _delta_net_cut(mixer: nn.Module, name: str) -> str:
    """Gated delta nets (Qwen3-Next, Qwen3.5): sections, or the same parts for every key head."""
    groups = _int(mixer, "num_k_heads")
    values = _int(mixer, "num_v_heads")
    key = _int(mixer, "head_k_dim")
    ratio = values // max(groups, 1)
    value = _int(mixer, "head_v_dim") * ratio

    return {
        "in_proj_qkvz": f"{groups}%{key}+{key}+{value}+{value}",
        "in_proj_ba": f"{groups}%{ratio}+{ratio}",
        "in_proj_qkv": f"{groups * key}+{groups * key}+{groups * value}",
    }.get(name, "")


def _state_space_cut(mixer: nn.Module, name: str) -> str:
    """Mamba: hidden | gate, then time step | B | C. Mamba-2: gate | hidden | B | C | time step."""
    inner = _int(mixer, "intermediate_size")
    state = _int(mixer, "ssm_state_size")
    if "x_proj" in mixer._modules:
        x_proj = f"{_int(mixer, 'time_step_rank')}+{state}+{state}"
        return {"in_proj": "2", "x_proj": x_proj}.get(name, "")

    shared = _int(mixer, "n_groups") * state
    heads = _int(mixer, "num_heads")

    if name != "in_proj":
        return ""

    return f"{inner}+{inner}+{shared}+{shared}+{heads}"


def _int(module: nn.Module, name: str) -> int:
    value = getattr(module, name, 0)
    return value if isinstance(value, int) else 0


# LoRA factors of PEFT: W + B A, with B (out, rank) filtered and A (rank, in) auxiliary by default.
# B starts at zero and carries the update's output side, so it takes its base weight's row cuts
# (heads, fused sections); A takes the column cuts. Stepped as a product, both share its view.
# Adapters of embeddings and DoRA's magnitudes are auxiliary.


def _lora_role(
    site: ModuleSite,
    facts: ModelFacts,
    per_head: bool,
    num_heads: int | None,
) -> Role | None:
    at = _find_lora(site)
    if at is None:
        return None

    layer = site.modules[at]
    kind = site.path[at]
    if kind == "lora_magnitude_vector":
        return Role(kind, "DoRA magnitudes, one per output")
    if kind not in ("lora_A", "lora_B"):
        return Role(kind, "adapter of an embedding")
    if len(site.shape) < 2:  # of PEFT's lora_bias
        return Role("bias", "added, not multiplied")

    stacked = is_a(layer, "peft.tuners.lora.layer", "ParamWrapper")
    experts = getattr(layer, "num_experts", 1) if stacked else 1
    if experts > 1:
        return _lora_experts(kind, site.shape, experts)

    if len(site.shape) > 2:
        role = matrix(kind, "LoRA factor of a convolution", "conv")
        return replace(role, product="product")

    base = _base_site(site, at)
    if base is None:
        return replace(matrix(kind, "LoRA factor"), product="product")

    role = role_of(base, facts, per_head=per_head, num_heads=num_heads)
    return _factor_role(kind, role)


def _find_lora(site: ModuleSite) -> int | None:
    """The place of the innermost LoRA layer among the modules around a parameter."""
    at = None
    for k, module in enumerate(site.modules[:-1]):
        if k > 0 and is_a(module, "peft.tuners.lora.layer", "LoraLayer"):
            at = k

    return at


def _lora_experts(kind: str, shape: tuple[int, ...], experts: int) -> Role:
    """A is (experts, rank, in) by rows, B is (out, rank, experts) by columns."""
    cut = f"rows:{experts}"
    if kind == "lora_B":
        cut = f"cols:{shape[1] // experts}%{experts}"

    return matrix(kind, f"LoRA factors of {experts} experts", cut)


def _base_site(site: ModuleSite, at: int) -> ModuleSite | None:
    """The site of the weight that a LoRA layer adapts."""
    base = getattr(site.modules[at], "base_layer", None)
    weight = getattr(base, "weight", None)
    if not isinstance(base, nn.Module) or not isinstance(weight, nn.Parameter):
        return None

    return ModuleSite(
        name=site.name,
        shape=tuple(weight.shape),
        leaf="weight",
        param=weight,
        owner=base,
        path=site.path[:at],
        modules=(*site.modules[:at], base),
    )


def _factor_role(kind: str, base: Role) -> Role:
    """The role of a factor of an adapter, from that of the weight it adapts."""
    if base.unclear:
        return replace(base, name=kind)

    view = View.parse(base.view)
    own = str(replace(view, transposed=False))
    is_cut = view.axis is not None and view.layout == "matrix"
    product = f"product/{own}" if is_cut else "product"

    own_axis = "rows" if kind == "lora_B" else "cols"
    if view.axis != own_axis or view.layout != "matrix":
        return replace(matrix(kind, f"LoRA factor of {base.name}"), product=product)

    reason = f"LoRA factor of {base.name}: {base.reason}"
    return replace(matrix(kind, reason, own), product=product)
