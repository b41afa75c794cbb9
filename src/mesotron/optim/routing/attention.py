"""Attention weights: which projection a matrix is, how many heads it has, and how fused ones are
laid out.

Query, key and value projections hold their heads in rows, the output projection in columns; under
grouped-query attention keys and values have fewer heads. Fused weights come in sections (q | k | v)
or interleaved head by head, and nothing in the shape tells which, so the layouts are listed by
attention class, as read in each forward pass.

Legend: H query heads, G key-value heads, d rows of one head. It does not guess: a count that does
not fit is a doubt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from mesotron.optim.routing.reading import Reading, doubt, matrix
from mesotron.optim.routing.sites import Site, find_int, words

# What libraries call the projections. Short names count only next to their siblings.
NAMES: dict[str, frozenset[str]] = {
    "q": words("q_proj query q wq w_q q_lin to_q query_proj linear_q q_attn q_b_proj project_q"),
    "k": words("k_proj key k wk w_k k_lin to_k key_proj linear_k project_k"),
    "v": words("v_proj value v wv w_v v_lin to_v value_proj linear_v project_v"),
    "qkv": words("c_attn qkv qkv_proj Wqkv wqkv query_key_value att_proj to_qkv"),
    "kv": words("kv to_kv"),
    "o": words(
        "o_proj out_proj o wo w_o Wo out_lin to_out dense c_proj proj projection "
        "projection_layer linear_out attention_out output"
    ),
}
# BERT and its kin keep the output projection in a module of its own, beside the one with q, k and
# v.
_OUTPUT_MODULES = ("SelfOutput", "CrossOutput", "AttentionOutput")

# Attention classes whose fused weight repeats (q, k, v) head by head; the others lay q, k and v in
# three sections.
_INTERLEAVED = words(
    "GPTNeoXAttention GPTNeoXJapaneseAttention BloomAttention PersimmonAttention FalconAttention "
    "GPTBigCodeAttention MiniMaxLightningAttention DisentangledSelfAttention"
)
# Names that mean a fused QKV in one class only ("in_proj" is a Mamba mixer's elsewhere).
_FUSED_BY_CLASS = {"DisentangledSelfAttention": "in_proj"}
_CODEGEN_SHARDS = (
    4  # CodeGen keeps the 4 tensor-parallel shards of its TPU training, each (q | v | k)
)

# Where modules and configs keep their head counts, most specific first.
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_HEAD_DIM = (
    "qk_head_dim",
    "head_dim",
    "attention_head_size",
    "head_size",
    "key_value_proj_dim",
    "dim_head",
)


@dataclass(frozen=True)
class Heads:
    """H, G and d of one attention block; None where neither the block nor its config says."""

    num: int | None
    num_kv: int | None
    dim: int | None


def find_heads(block: nn.Module, config: object | None) -> Heads:
    """Head counts of an attention block: its own attributes, which its forward pass uses, then its
    config.

    Args:
        block: the module that holds the projections.
        config: the nearest Transformers config, or None.

    Returns:
        `Heads`; `num_kv` equals `num` when nothing says otherwise.
    """
    num = find_int((block, config), _NUM_HEADS)
    num_kv = find_int((block, config), _NUM_KV_HEADS)
    if getattr(block, "multi_query", False) and not getattr(
        block, "new_decoder_architecture", False
    ):
        num_kv = 1
    return Heads(num, num_kv or num, find_int((block, config), _HEAD_DIM))


def find_projection(site: Site) -> tuple[str, nn.Module] | None:
    """Which projection of which attention block this weight is, or None if it is not one.

    Returns:
        (part, block) with part one of "q", "k", "v", "o", "qkv", "kv", "mla_kv_a", "mla_kv_b".
    """
    block, called = site.parent, site.called
    if called.isdigit() and len(site.path) > 1:  # `to_out.0`: a Sequential around the projection
        called, block = site.path[-2], site.modules[-3]
    if called in NAMES["o"] and type(site.parent).__name__.endswith(_OUTPUT_MODULES):
        block = next((m for m in site.modules[-3].children() if is_block(m)), block)
    if not is_block(block):
        return None
    if called in ("kv_a_proj_with_mqa", "kv_b_proj"):
        return "mla_" + called[:4], block
    if _FUSED_BY_CLASS.get(type(block).__name__) == called:
        return "qkv", block
    part = next((part for part, names in NAMES.items() if called in names), None)
    return (part, block) if part else None


def is_block(module: nn.Module) -> bool:
    """Whether the module holds attention projections, by the names of its children."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    names = set(module._modules)
    if type(module).__name__ in _FUSED_BY_CLASS:
        return True
    separate = names & NAMES["q"] and names & (NAMES["k"] | NAMES["kv"])
    return bool(separate or names & NAMES["qkv"] or "kv_b_proj" in names)


def read_attention(
    site: Site, rows: int, cols: int, *, per_head: bool, num: int | None
) -> Reading | None:
    """Read an attention projection, or None if the weight is not one.

    Args:
        site: where the weight is stored.
        rows, cols: its logical shape (outputs, inputs), whatever the storage order.
        per_head: cut q, k, v by rows and o by columns, one matrix a head.
        num: heads of this very matrix, when the caller was told; None asks the model.
    """
    found = find_projection(site)
    if found is None:
        return _perhaps_output(site) if per_head else None
    part, block = found
    heads = find_heads(block, site.config)
    if num is not None and part in (
        "qkv",
        "kv",
        "mla_kv_b",
    ):  # as many keys as queries, if not said
        heads = replace(heads, num=num, num_kv=heads.num_kv or num)
    if part in ("qkv", "kv", "mla_kv_a", "mla_kv_b"):
        read = {"qkv": _read_qkv, "kv": _read_kv, "mla_kv_a": _read_mla_a, "mla_kv_b": _read_mla_b}
        reading = read[part](site, block, heads, rows, cols, per_head)
    else:
        reading = _read_plain(site, part, heads, rows, cols, per_head, num)
    if reading.doubt:
        return replace(reading, role=f"attention {part}", matrix=True)
    return reading


def _perhaps_output(site: Site) -> Reading | None:
    """An unknown layer in a block whose output projection was not found: leaving it whole would be
    a silent exception to `per_head`."""
    block, beside = site.parent, site.modules[-3].children() if len(site.modules) > 2 else ()
    elsewhere = any(type(module).__name__.endswith(_OUTPUT_MODULES) for module in beside)
    if not is_block(block) or set(block._modules) & NAMES["o"] or elsewhere:
        return None
    sentence = (
        f"per_head=True: {site.name} lies in an attention block without a known output projection; "
        f"if it is one, write overrides={{'{site.name}': {{'view': 'cols:NUM_HEADS'}}}}, else "
        "{'view': 'whole'}"
    )
    return replace(doubt(sentence), role="linear", matrix=True)


def _read_plain(
    site: Site, part: str, heads: Heads, rows: int, cols: int, per_head: bool, told: int | None
) -> Reading:
    """q, k, v or o by itself."""
    num = told or (heads.num if part in "qo" else heads.num_kv)
    role = f"attention {part}"
    gated = part == "q" and None not in (num, heads.dim) and rows == 2 * num * heads.dim  # type: ignore
    if gated and not per_head:
        return matrix(role, f"query and gate, alternating over {num} heads", f"rows:{num}%2")
    if not per_head:
        return matrix(role, f"{_WORDS[part]} projection")
    if num is None:
        return _no_count(site)
    axis, length = ("cols", cols) if part == "o" else ("rows", rows)
    blocks = 2 * num if gated else num
    if length % blocks or (
        part in "qk" and heads.dim and told is None and length != blocks * heads.dim
    ):
        return _misfit(site, num, axis, length, heads.dim)
    what = f"{num} heads" + (", each a query and a gate" if gated else "")
    return matrix(role, f"{_WORDS[part]} projection, {what}", f"{axis}:{blocks}")


_WORDS = {"q": "query", "k": "key", "v": "value", "o": "output"}


def _read_qkv(
    site: Site, block: nn.Module, heads: Heads, rows: int, cols: int, per_head: bool
) -> Reading:
    """Fused query, key and value; or key and value only, in GPT-2's cross-attention."""
    H, G = heads.num, heads.num_kv
    if H is None or G is None:
        if per_head:
            return _no_count(site)
        if rows != 3 * cols or "query_key_value" in block._modules:
            return doubt(
                f"{site.name} looks like a fused QKV of shape {rows}x{cols}, but neither its "
                "module nor a config says how many heads it has and how they lie; write "
                f"overrides={{'{site.name}': {{'view': 'rows:Q+K+V'}}}}"
            )
        return matrix("attention qkv", "query | key | value in three sections", "rows:3")
    if "q_attn" in block._modules:
        return _read_kv(site, block, heads, rows, cols, per_head)
    if rows % (H + 2 * G):
        return _misfit(site, H + 2 * G, "rows", rows, heads.dim)
    if per_head:
        return matrix("attention qkv", f"fused {H}+{G}+{G} heads", f"rows:{H + 2 * G}")
    return _sections(site, block, H, G, rows // (H + 2 * G))


def _sections(site: Site, block: nn.Module, H: int, G: int, d: int) -> Reading:
    """The whole q, k and v inside a fused weight, by the attention class's own layout."""
    classes = {cls.__name__ for cls in type(block).__mro__}
    role = "attention qkv"
    if "CodeGenAttention" in classes:
        return matrix(role, "query | value | key in each of 4 shards", f"rows:{_CODEGEN_SHARDS}%3")
    if classes & _INTERLEAVED and H == G:
        return matrix(role, f"query, key, value alternating over {H} heads", f"rows:{H}%3")
    if getattr(block, "new_decoder_architecture", False):
        cut = f"rows:{G}%{H // G * d}+{d}+{d}"
        return matrix(role, f"{H // G} queries, key, value in each of {G} groups", cut)
    if "query_key_value" in block._modules and not classes & _INTERLEAVED:
        return doubt(
            f"{site.name} is a fused query_key_value of an attention class "
            f"({type(block).__name__}) whose layout, sectioned or interleaved, is not known here; "
            f"write overrides={{'{site.name}': {{'view': 'rows:3'}}}} or "
            f"{{'view': 'rows:{H}%3'}}, or pass per_head=True"
        )
    if H == G:
        return matrix(role, "query | key | value in three sections", "rows:3")
    return matrix(role, "query | key | value in sections", f"rows:{H * d}+{G * d}+{G * d}")


def _read_kv(
    site: Site, block: nn.Module, heads: Heads, rows: int, cols: int, per_head: bool
) -> Reading:
    """Fused key and value, in two sections."""
    if not per_head:
        return matrix("attention kv", "key | value in two sections", "rows:2")
    if heads.num_kv is None:
        return _no_count(site)
    if rows % (2 * heads.num_kv):
        return _misfit(site, 2 * heads.num_kv, "rows", rows, heads.dim)
    return matrix(
        "attention kv", f"fused {heads.num_kv}+{heads.num_kv} heads", f"rows:{2 * heads.num_kv}"
    )


def _read_mla_a(
    site: Site, block: nn.Module, heads: Heads, rows: int, cols: int, per_head: bool
) -> Reading:
    """Multi-head latent attention: the shared latent, and the one rotary key beside it."""
    latent = getattr(block, "kv_lora_rank", None)
    if not isinstance(latent, int) or not 0 < latent < rows:
        return doubt(
            f"{site.name}: its module does not say kv_lora_rank, so latent and rotary rows cannot "
            f"be told apart; write overrides={{'{site.name}': {{'view': 'rows:LATENT+ROTARY'}}}}"
        )
    return matrix("attention kv", "latent | rotary key", f"rows:{latent}+{rows - latent}")


def _read_mla_b(
    site: Site, block: nn.Module, heads: Heads, rows: int, cols: int, per_head: bool
) -> Reading:
    """Multi-head latent attention: per head, the key's rows and then the value's."""
    H, value = heads.num, getattr(block, "v_head_dim", None)
    if H is None or not isinstance(value, int) or rows % H or not 0 < value < rows // H:
        return doubt(
            f"{site.name}: {rows} rows do not split into heads of key and value rows (num_heads "
            f"{H}, v_head_dim {value}); write overrides={{'{site.name}': {{'view': 'whole'}}}}"
        )
    key = rows // H - value
    if per_head:
        cut = f"{2 * H}" if key == value else f"{H}*{key}+{value}"
        return matrix("attention kv", f"key and value of {H} heads", f"rows:{cut}")
    cut = f"{H}%2" if key == value else f"{H}%{key}+{value}"
    return matrix("attention kv", f"key, value alternating over {H} heads", f"rows:{cut}")


def _no_count(site: Site) -> Reading:
    return doubt(
        f"per_head=True: neither the module nor a config says how many heads {site.name} has; pass "
        f"per_head={{'{site.name}': NUM_HEADS}} (a glob matches many), or per_head=False"
    )


def _misfit(site: Site, num: int, axis: str, length: int, dim: int | None) -> Reading:
    known = f" of {dim}" if dim else ""
    return doubt(
        f"{site.name}: {num} heads{known} do not fit its {length} {axis}; pass "
        f"per_head={{'{site.name}': NUM_HEADS}} "
        f"with the right count, or overrides={{'{site.name}': {{'view': 'whole'}}}}"
    )
