"""Attention weights: which projection a matrix is, its heads, and the layout of fused ones.

Query, key and value projections hold their heads in rows, the output projection in columns; under
grouped-query attention keys and values have fewer heads. Fused weights come in sections (q | k | v)
or interleaved head by head. The shape does not show which, so the layouts are listed by attention
class, as read in each forward pass. A head count that does not fit is reported, never guessed.

Legend: H query heads, G key-value heads, d rows of one head.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from mesotron.optim.routing.sites import NAMES, ModuleSite, find_int
from mesotron.spectral.routing import Role, matrix, unclear, words

PROJECTIONS = {part: words(names) for part, names in NAMES["projections"].items()}
_LONG_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
}
# BERT and its relatives keep the output projection in a module next to the one with q, k and v.
_OUTPUT_MODULES = ("SelfOutput", "CrossOutput", "AttentionOutput")
_INTERLEAVED = words(NAMES["classes"]["interleaved"])
# Names that mean a fused QKV in one class only ("in_proj" is a Mamba mixer's elsewhere).
_FUSED_BY_CLASS = {"DisentangledSelfAttention": "in_proj"}
_NUM_HEADS = NAMES["counts"]["heads"].split()
_NUM_KV_HEADS = NAMES["counts"]["kv_heads"].split()
_HEAD_DIM = NAMES["counts"]["head_dim"].split()


class _Heads(NamedTuple):
    """H, G and d of an attention block; None if neither the block nor its config has it."""

    num: int | None
    num_kv: int | None
    dim: int | None


def is_attention(module: nn.Module) -> bool:
    """Whether the module holds attention projections, by the names of its children."""
    if isinstance(module, nn.MultiheadAttention) or type(module).__name__ in _FUSED_BY_CLASS:
        return True

    names = set(module._modules)
    separate = names & PROJECTIONS["q"] and names & (PROJECTIONS["k"] | PROJECTIONS["kv"])
    return bool(separate or names & PROJECTIONS["qkv"] or "kv_b_proj" in names)


def _find_projection(site: ModuleSite) -> tuple[str, nn.Module] | None:
    """(part, block): part is "q", "k", "v", "o", "qkv", "kv", "mla_kv_a" or "mla_kv_b"."""
    block = site.parent
    name = site.owner_name
    if name.isdigit() and len(site.path) > 1:  # `to_out.0`: a Sequential around the projection
        name = site.path[-2]
        block = site.modules[-3]

    if name in PROJECTIONS["o"] and type(site.parent).__name__.endswith(_OUTPUT_MODULES):
        block = next((m for m in site.modules[-3].children() if is_attention(m)), block)

    if not is_attention(block):
        return None
    if name in ("kv_a_proj_with_mqa", "kv_b_proj"):
        return "mla_" + name[:4], block
    if _FUSED_BY_CLASS.get(type(block).__name__) == name:
        return "qkv", block

    for part, names in PROJECTIONS.items():
        if name in names:
            return part, block

    return None


def attention_role(
    site: ModuleSite,
    rows: int,
    cols: int,
    *,
    per_head: bool,
    num: int | None,
) -> Role | None:
    """The role of an attention projection of logical shape (rows, cols); None if the weight is not
    one. `num` is the number of heads if the user gave it; None reads the model."""
    if isinstance(site.parent, nn.MultiheadAttention):  # its other projections are raw parameters
        if not per_head:
            return matrix("attention o", "output projection")
        count = num or site.parent.num_heads
        return matrix("attention o", f"output projection, {count} heads", f"cols:{count}")

    found = _find_projection(site)
    if found is None:
        return _possible_output(site) if per_head else None

    part, block = found
    heads = _find_heads(site, block)
    if num is not None and part in ("qkv", "kv", "mla_kv_b"):
        heads = heads._replace(num=num, num_kv=heads.num_kv or num)

    projection = _Projection(site, block, heads, rows, cols, per_head)
    role = _role_of_part(projection, part, num)

    if role.unclear:
        return replace(role, name=f"attention {part}", is_matrix=True)

    return role


def _find_heads(site: ModuleSite, block: nn.Module) -> _Heads:
    # The block's own attributes first, which its forward pass uses.
    sources = (block, site.config)
    own = find_int(sources, _NUM_HEADS)
    own_kv = find_int(sources, _NUM_KV_HEADS)

    new_falcon = getattr(block, "new_decoder_architecture", False)
    if getattr(block, "multi_query", False) and not new_falcon:
        own_kv = 1

    return _Heads(own, own_kv or own, find_int(sources, _HEAD_DIM))


class _Projection(NamedTuple):
    """A weight of logical shape (rows, cols) in an attention block."""

    site: ModuleSite
    block: nn.Module
    heads: _Heads
    rows: int
    cols: int
    per_head: bool


def _role_of_part(projection: _Projection, part: str, num: int | None) -> Role:
    if part == "qkv":
        return _qkv_role(projection)
    if part == "kv":
        return _kv_role(projection)
    if part == "mla_kv_a":
        return _mla_a_role(projection)
    if part == "mla_kv_b":
        return _mla_b_role(projection)

    return _single_role(projection, part, num)


def _possible_output(site: ModuleSite) -> Role | None:
    """An unknown layer in a block without a known output projection: leaving it whole would be a
    silent exception to `per_head`."""
    block = site.parent
    siblings = site.modules[-3].children() if len(site.modules) > 2 else ()
    elsewhere = any(type(module).__name__.endswith(_OUTPUT_MODULES) for module in siblings)
    if not is_attention(block) or set(block._modules) & PROJECTIONS["o"] or elsewhere:
        return None

    problem = (
        f"per_head=True: {site.name} is in an attention block without a known output projection; "
        f"if it is the output projection, pass overrides={{'{site.name}': "
        "{'view': 'cols:NUM_HEADS'}}, else {'view': 'whole'}"
    )
    return replace(unclear(problem), name="linear", is_matrix=True)


def _single_role(projection: _Projection, part: str, given: int | None) -> Role:
    """A query, key, value or output projection of its own."""
    heads = projection.heads
    num = given or (heads.num if part in "qo" else heads.num_kv)
    gated = part == "q" and _is_gated(projection, num)
    if not projection.per_head:
        return _whole_role(part, num if gated else None)
    if num is None:
        return _no_count(projection.site)

    axis, length = ("cols", projection.cols) if part == "o" else ("rows", projection.rows)
    blocks = num
    what = f"{num} heads"
    if gated:
        blocks = 2 * num
        what += ", each a query and a gate"

    is_known = part in "qk" and given is None
    if not _fits(length, blocks, heads.dim if is_known else None):
        return _misfit(projection.site, num, axis, length, heads.dim)

    return matrix(
        f"attention {part}", f"{_LONG_NAMES[part]} projection, {what}", f"{axis}:{blocks}"
    )


def _fits(length: int, blocks: int, dim: int | None) -> bool:
    """Whether blocks of `dim` lines, if that is known, make up the length."""
    return length % blocks == 0 and (not dim or length == blocks * dim)


def _is_gated(projection: _Projection, num: int | None) -> bool:
    """Whether a query projection has a gate of the same size in each head."""
    dim = projection.heads.dim
    return num is not None and dim is not None and projection.rows == 2 * num * dim


def _whole_role(part: str, gates: int | None) -> Role:
    """The role without `per_head`; `gates` is the number of heads that have a gate."""
    name = f"attention {part}"
    if gates is None:
        return matrix(name, f"{_LONG_NAMES[part]} projection")

    return matrix(name, f"query and gate, interleaved over {gates} heads", f"rows:{gates}%2")


def _qkv_role(projection: _Projection) -> Role:
    """Fused query, key and value; or key and value only, in GPT-2's cross-attention."""
    site, block, heads, rows, cols, per_head = projection
    H = heads.num
    G = heads.num_kv
    if H is None or G is None:
        if per_head:
            return _no_count(site)
        if rows != 3 * cols or "query_key_value" in block._modules:
            return unclear(
                f"{site.name} looks like a fused QKV of shape {rows}x{cols}, but neither its "
                "module nor a config has its number of heads and their layout; pass "
                f"overrides={{'{site.name}': {{'view': 'rows:Q+K+V'}}}}"
            )

        return matrix("attention qkv", "query | key | value in three sections", "rows:3")

    if "q_attn" in block._modules:
        return _kv_role(projection)
    if rows % (H + 2 * G):
        return _misfit(site, H + 2 * G, "rows", rows, heads.dim)
    if per_head:
        return matrix("attention qkv", f"fused {H}+{G}+{G} heads", f"rows:{H + 2 * G}")

    return _fused_layout(site, block, H, G, rows // (H + 2 * G))


def _fused_layout(site: ModuleSite, block: nn.Module, H: int, G: int, d: int) -> Role:
    """The whole q, k and v inside a fused weight, by the attention class's own layout."""
    classes = {cls.__name__ for cls in type(block).__mro__}
    name = "attention qkv"
    if "CodeGenAttention" in classes:  # with the 4 tensor-parallel shards of its TPU training
        return matrix(name, "query | value | key in each of 4 shards", "rows:4%3")
    if classes & _INTERLEAVED and H == G:
        return matrix(name, f"query, key, value interleaved over {H} heads", f"rows:{H}%3")

    if getattr(block, "new_decoder_architecture", False):
        cut = f"rows:{G}%{H // G * d}+{d}+{d}"
        return matrix(name, f"{H // G} queries, key, value in each of {G} groups", cut)

    if "query_key_value" in block._modules and not classes & _INTERLEAVED:
        return unclear(
            f"{site.name} is a fused query_key_value of an unknown attention class "
            f"({type(block).__name__}), in sections or interleaved; pass "
            f"overrides={{'{site.name}': {{'view': 'rows:3'}}}} or {{'view': 'rows:{H}%3'}}, or "
            "per_head=True"
        )
    if H == G:
        return matrix(name, "query | key | value in three sections", "rows:3")

    return matrix(name, "query | key | value in sections", f"rows:{H * d}+{G * d}+{G * d}")


def _kv_role(projection: _Projection) -> Role:
    site, _, heads, rows, _, per_head = projection
    G = heads.num_kv
    if not per_head:
        return matrix("attention kv", "key | value in two sections", "rows:2")
    if G is None:
        return _no_count(site)
    if rows % (2 * G):
        return _misfit(site, 2 * G, "rows", rows, heads.dim)

    return matrix("attention kv", f"fused {G}+{G} heads", f"rows:{2 * G}")


def _mla_a_role(projection: _Projection) -> Role:
    """Multi-head latent attention: the shared latent, and the one rotary key next to it."""
    site, block, _, rows, _, _ = projection
    latent = getattr(block, "kv_lora_rank", None)
    if not isinstance(latent, int) or not 0 < latent < rows:
        return unclear(
            f"{site.name}: its module has no kv_lora_rank to separate latent from rotary rows; "
            f"pass overrides={{'{site.name}': {{'view': 'rows:LATENT+ROTARY'}}}}"
        )

    return matrix("attention kv", "latent | rotary key", f"rows:{latent}+{rows - latent}")


def _mla_b_role(projection: _Projection) -> Role:
    """Multi-head latent attention: per head, the key's rows and then the value's."""
    site, block, heads, rows, _, per_head = projection
    H = heads.num
    value = getattr(block, "v_head_dim", None)
    if H is None or not isinstance(value, int) or rows % H or not 0 < value < rows // H:
        return unclear(
            f"{site.name}: {rows} rows do not split into heads of key and value rows (num_heads "
            f"{H}, v_head_dim {value}); pass overrides={{'{site.name}': {{'view': 'whole'}}}}"
        )

    key = rows // H - value
    even = key == value
    if per_head:
        cut = f"{2 * H}" if even else f"{H}*{key}+{value}"
        return matrix("attention kv", f"key and value of {H} heads", f"rows:{cut}")

    cut = f"{H}%2" if even else f"{H}%{key}+{value}"
    return matrix("attention kv", f"key, value interleaved over {H} heads", f"rows:{cut}")


def _no_count(site: ModuleSite) -> Role:
    return unclear(
        f"per_head=True: neither the module nor a config has the number of heads of {site.name}; "
        f"pass per_head={{'{site.name}': NUM_HEADS}} (a glob matches many), or per_head=False"
    )


def _misfit(site: ModuleSite, num: int, axis: str, length: int, dim: int | None) -> Role:
    size = f" of {dim}" if dim else ""
    return unclear(
        f"{site.name}: {num} heads{size} do not fit its {length} {axis}; pass "
        f"per_head={{'{site.name}': NUM_HEADS}} with the right count, or "
        f"overrides={{'{site.name}': {{'view': 'whole'}}}}"
    )
