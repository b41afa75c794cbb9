"""Roles: what each leaf of a parameter tree is, told by its path, its shape and its neighbours.

A tree has no module types, so the names that flax, Equinox and common code give decide, from the
small tables below; a layer's bias tells a stack from a kernel of three dimensions. What cannot be
told is a doubt, never a guess. Where a network begins and ends is the business of `ends`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Leaves that hold a layer's matrix; "w1" is one too.
_MATRIX_LEAVES = _words("kernel w weight")
_VECTOR_LEAVES = _words("bias b beta gamma scale offset log_std logstd")
_BIASES = ("bias", "b")
_EMBEDDINGS = _words("wte wpe tok vocab lookup")
_INPUTS = _words(
    "input input_proj input_projection input_layer in_layer patch_proj stem obs_proj obs_layer"
)
_HEADS = _words(
    "head heads lm_head classifier logits readout output_layer output_projection actor critic "
    "policy action actor_mean actor_out critic_out policy_out value_out"
)
_QUERIES = _words("query key value q k v q_proj k_proj v_proj query_proj key_proj value_proj")
_FUSED = _words("qkv qkv_proj in_proj")
_OUTS = _words("out o o_proj out_proj output_proj output")
_TABLE_WORDS = _words("pos position positional cls token tokens latent latents codebook")
# An input this narrow is raw channels, not features.
_MAX_RAW_CHANNELS = 4


@dataclass(frozen=True)
class Site:
    """A leaf in its place.

    Args:
        path: with slashes.
        shape: of the array.
        attribute: the leaf is a field of a module (Equinox) and not an entry of a dict.
        bias: shape of the bias beside it, or None.
        siblings: names of the modules beside this one.
        stacked: the user says that the first axis holds separate layers.
    """

    path: str
    shape: tuple[int, ...]
    attribute: bool = False
    bias: tuple[int, ...] | None = None
    siblings: frozenset[str] = frozenset()
    stacked: bool = False

    @property
    def leaf(self) -> str:
        """The last word of the path."""
        return self.path.rpartition("/")[2]

    @property
    def layer(self) -> tuple[str, ...]:
        """The words that name the layer: without the leaf, unless it is numbered itself ("w1")."""
        words = tuple(self.path.split("/"))
        return words if re.search(r"\d", words[-1]) else words[:-1]

    @property
    def name(self) -> str:
        """The layer's own name without its number, in lower case."""
        return base_name(self.layer[-1]) if self.layer else ""


@dataclass(frozen=True)
class Reading:
    """What a leaf is.

    Args:
        role: in a word or two.
        reason: why.
        view: the matrices it holds (`mesotron.jax.views`); None for what is not a hidden matrix.
        doubt: a sentence about what could not be told.
    """

    role: str
    reason: str
    view: str | None = None
    doubt: str | None = None


def make_sites(shapes: dict[str, tuple[int, ...]], attributes: set[str]) -> dict[str, Site]:
    """Every leaf with its neighbours.

    Args:
        shapes: path -> shape.
        attributes: the paths that end in a field of a module.
    """
    children: dict[str, set[str]] = {}
    for path in shapes:
        words = path.split("/")
        for k in range(len(words)):
            children.setdefault("/".join(words[:k]), set()).add(words[k])
    sites = {}
    for path, shape in shapes.items():
        module = path.rpartition("/")[0]
        around = module.rpartition("/")[0] if module else ""
        beside = (f"{module}/{name}".lstrip("/") for name in _BIASES)
        bias = next((shapes[name] for name in beside if name in shapes), None)
        siblings = frozenset(base_name(name) for name in children[around])
        sites[path] = Site(path, shape, path in attributes, bias, siblings)
    return sites


def base_name(word: str) -> str:
    """A module's name without its number: "Dense_0" and "fc1" are "dense" and "fc".

    Example:
        >>> base_name("TransformerBlock_12"), base_name("7")
        ('transformerblock', '')
    """
    return re.sub(r"_?\d+$", "", word).lower()


def read(site: Site) -> Reading:
    """The role of a leaf by its own name and place; a plain layer is a "matrix"."""
    words = set(re.split(r"[_\W]+", f"{site.name}_{base_name(site.leaf)}"))
    if base_name(site.leaf) in _VECTOR_LEAVES or len(site.shape) < 2:
        norm = "norm" in site.name or words & {"ln", "scale", "gamma"}
        return Reading("norm", "a gain") if norm else Reading("bias", "a vector per layer")
    if "norm" in site.name:
        return Reading("norm", "a gain")
    if words & _TABLE_WORDS or "pos" in site.name.split("_"):
        return Reading("position or token", "a table, looked up and not multiplied")
    if _is_embedding(site):
        return Reading("embedding", "a table, or the layer that takes its place")
    if base_name(site.leaf) not in _MATRIX_LEAVES:
        return _doubt(site, f"a leaf called {site.leaf!r} is no layer's matrix that is known here")
    if site.name in _INPUTS:
        return Reading("input", "the layer that meets the raw input")
    if site.name in ("router", "gating"):
        return Reading("router", "its outputs choose; they are not features")
    if _is_head(site):
        return Reading("head", "an output layer")
    return _read_matrix(site)


def _is_embedding(site: Site) -> bool:
    names = (site.name, base_name(site.leaf))
    return any(n in _EMBEDDINGS or n.startswith("embed") or "embed" in n.split("_") for n in names)


def _is_head(site: Site) -> bool:
    if site.name == "value":
        return not _in_attention(site)
    return site.name in _HEADS or site.name.endswith(("_head", "_logits"))


def _in_attention(site: Site) -> bool:
    return len(site.siblings & _QUERIES) > 1 or bool(site.siblings & _FUSED)


def _read_matrix(site: Site) -> Reading:
    """A layer's matrix: its storage order, its stacks, its heads."""
    stacks = _num_stacks(site)
    if stacks is None:
        return _doubt(
            site,
            f"{len(site.shape)} dimensions may be heads or a stack of layers, and no bias tells",
        )
    kernel = site.shape[stacks:]
    stack = "s" * stacks
    if "conv" in site.name and len(kernel) > 2:
        return _read_convolution(site, stack, kernel)
    if len(kernel) == 2:
        order = "oi" if site.attribute and site.leaf == "weight" else "io"
        where = "(out, in)" if order == "oi" else "(in, out)"
        what = "a stack of hidden layers" if stack else "hidden"
        return Reading(_kind(site), f"{what} {where}", stack + order)
    whole = {("queries", 3): "ioo", ("outs", 3): "iio", ("fused", 4): "isoo"}
    view = whole.get((_attention_part(site), len(kernel)))
    if view is None:
        return _doubt(site, f"{len(kernel)} dimensions are not known for a layer of this name")
    return Reading("attention", "projection with an axis of heads", stack + view)


def _read_convolution(site: Site, stack: str, kernel: tuple[int, ...]) -> Reading:
    torch_like = site.attribute and site.leaf == "weight"
    num_inputs = kernel[1] if torch_like else kernel[-2]
    num_outputs = kernel[0] if torch_like else kernel[-1]
    if num_inputs == 1 and num_outputs > 1:
        return Reading("depthwise", "one channel each: there is no matrix in it")
    if num_inputs <= _MAX_RAW_CHANNELS:
        return Reading("input", "a convolution of raw channels")
    view = "o" + "i" * (len(kernel) - 1) if torch_like else "i" * (len(kernel) - 1) + "o"
    return Reading("convolution", "(inputs and offsets) to outputs", stack + view)


def _attention_part(site: Site) -> str:
    for part, names in (("queries", _QUERIES), ("fused", _FUSED), ("outs", _OUTS)):
        if site.name in names:
            return part
    return ""


def _kind(site: Site) -> str:
    if _in_experts(site):
        return "expert"
    return "attention" if _attention_part(site) and _in_attention(site) else "matrix"


def _in_experts(site: Site) -> bool:
    return any(base_name(word) in ("experts", "expert") for word in site.layer)


def _num_stacks(site: Site) -> int | None:
    """How many leading axes hold separate layers; None if that cannot be told."""
    shape, part = site.shape, _attention_part(site)
    if site.stacked or (_in_experts(site) and len(shape) > 2):
        return 1
    if site.bias is not None:
        # A bias has an axis for each stack, and then those of the outputs.
        for num in range(len(shape) - 1):
            outputs = site.bias[num:]
            first = site.attribute and site.leaf == "weight"
            rest = shape[num:]
            fits = rest[: len(outputs)] == outputs if first else rest[-len(outputs) :] == outputs
            most = 2 if part == "queries" else 3 if part == "fused" else 1
            if fits and site.bias[:num] == shape[:num] and 1 <= len(outputs) <= most:
                return num
        return None
    if len(shape) == 2 or "conv" in site.name:
        return 0
    usual = {"queries": 3, "outs": 3, "fused": 4}
    # flax's own names have an axis of heads; q_proj of three dimensions may be either.
    if part and {"query", "out"} <= site.siblings and len(shape) >= usual[part]:
        return len(shape) - usual[part]
    return None


def _doubt(site: Site, why: str) -> Reading:
    return Reading("unknown", why, doubt=f"{site.path} {site.shape}: {why}")
