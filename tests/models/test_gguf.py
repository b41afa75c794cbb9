"""GGUF files of llama.cpp: their weights as the gguf package reads them, tied where they were."""

import math
from pathlib import Path

import gguf as library
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mesotron.models import gguf_header
from mesotron.models.gguf import convert_gguf, tie_if_same
from mesotron.models.gguf_header import ADD_BOS, read_header, read_setting
from mesotron.rlvr.plan.shapes import find_shape
from mesotron.tasks.prompts import plain_text, render

HIDDEN = 64
VOCABULARY = 260
ROUNDED = library.GGMLQuantizationType.Q8_0
COARSE = library.GGMLQuantizationType.Q4_0


def byte_tokens() -> list[str]:
    """The 256 bytes as GPT-2 writes them, a merged pair and three special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        characters.setdefault(byte, chr(256 + len(characters) - len(printable)))

    return [characters[byte] for byte in range(256)] + ["ab", "</s>", "<pad>", "<s>"]


def write_gguf(path: Path, head: str, adds_bos: bool = False) -> dict[str, np.ndarray]:
    """A Qwen2 of one layer; `head` is none, same (as the embedding) or own. Returns what the file
    holds, dequantized by the gguf package."""
    writer = library.GGUFWriter(path, "qwen2")
    writer.add_name("small")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(258)
    writer.add_bos_token_id(259)
    writer.add_add_bos_token(adds_bos)

    rng = np.random.default_rng(0)
    half = HIDDEN // 2
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (half, HIDDEN),
        "attn_v": (half, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (HIDDEN, HIDDEN),
        "ffn_up": (HIDDEN, HIDDEN),
        "ffn_down": (HIDDEN, HIDDEN),
    }
    held = {}

    def add(name: str, value: np.ndarray, kind: library.GGMLQuantizationType | None) -> None:
        value = value.astype(np.float32)
        if kind is None:
            writer.add_tensor(name, value)
            held[name] = value
        else:
            packed = library.quantize(value, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            held[name] = library.dequantize(packed, kind)

    embedding = rng.normal(size=(VOCABULARY, HIDDEN))
    add("token_embd.weight", embedding, COARSE)
    if head == "same":
        add("output.weight", embedding, ROUNDED)
    elif head == "own":
        add("output.weight", rng.normal(size=(VOCABULARY, HIDDEN)), ROUNDED)

    add("output_norm.weight", np.ones(HIDDEN), None)
    for name in ("attn_norm", "ffn_norm"):
        add(f"blk.0.{name}.weight", np.ones(HIDDEN), None)
    for name, shape in shapes.items():
        add(f"blk.0.{name}.weight", rng.normal(size=shape), ROUNDED)
    for name in ("attn_q", "attn_k", "attn_v"):
        add(f"blk.0.{name}.bias", np.zeros(shapes[name][0]), None)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize(("head", "is_tied"), [("none", True), ("same", True), ("own", False)])
def test_weights_are_those_of_the_file_and_tied_where_they_were(tmp_path, capfd, head, is_tied):
    file = tmp_path / "small.gguf"
    held = write_gguf(file, head)
    folder = convert_gguf(file, tmp_path / "cache")

    assert len(capfd.readouterr().err.splitlines()) == 1
    config = AutoConfig.from_pretrained(folder)
    assert config.tie_word_embeddings is is_tied

    weights = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in weights) is not is_tied
    kept = "output.weight" if head == "same" else "token_embd.weight"
    expected = {
        "model.embed_tokens.weight": held[kept],
        "model.layers.0.self_attn.q_proj.weight": held["blk.0.attn_q.weight"],
        "model.layers.0.mlp.down_proj.weight": held["blk.0.ffn_down.weight"],
    }
    for name, value in expected.items():
        assert np.array_equal(weights[name].numpy(), value), name


@pytest.mark.parametrize("adds_bos", [True, False])
def test_prompts_begin_as_the_file_asks(tmp_path, adds_bos):
    """Rendered prompts, which are encoded without special tokens, and TRL's own encoding agree."""
    file = tmp_path / "small.gguf"
    write_gguf(file, "none", adds_bos)
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(file, tmp_path / "cache"))
    chat = [{"role": "user", "content": "a"}]
    opening = [259] if adds_bos else []

    by_trl = tokenizer(plain_text(chat))["input_ids"]
    rendered = tokenizer(render(chat, tokenizer), add_special_tokens=False)["input_ids"]
    assert by_trl == rendered == opening + rendered[len(opening) :]
    assert 259 not in rendered[len(opening) :]


@pytest.mark.parametrize("damage", [b"", b"GGUF" + b"\xff" * 60])
def test_a_broken_header_is_refused(tmp_path, damage):
    file = tmp_path / "small.gguf"
    file.write_bytes(damage)
    with pytest.raises(ValueError, match="GGUF"):
        read_setting(file, ADD_BOS)


def test_the_sizes_are_read_from_the_header_alone(tmp_path):
    file = tmp_path / "small.gguf"
    write_gguf(file, "same")
    shape = find_shape(str(file))
    assert (shape.layers, shape.hidden, shape.kv_heads) == (1, HIDDEN, 1)
    assert (shape.vocabulary, shape.tied) == (VOCABULARY, True)

    whole = file.read_bytes()
    for length in (3, 20, 60, 150):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=file.name):
            read_header(file)


@pytest.mark.parametrize("size", [0, 2**40, -1, [1, 2], "wide"])
def test_a_size_that_is_none_leaves_the_shape_unknown(tmp_path, monkeypatch, size):
    values = {"general.architecture": "qwen2", "qwen2.embedding_length": size}
    values |= {"qwen2.block_count": 1, "qwen2.attention.head_count": 1}
    monkeypatch.setattr(gguf_header, "read_header", lambda file: values)
    assert "hidden_size" not in gguf_header.model_config(tmp_path)

    file = tmp_path / "odd.gguf"
    file.touch()
    assert find_shape(str(file)) is None


@pytest.mark.parametrize(
    ("noise", "is_tied"), [(0.0, True), (0.3, True), (2.0, False), (math.nan, False)]
)
def test_two_roundings_of_a_matrix_are_told_from_two_matrices(noise, is_tied):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    head = model.get_output_embeddings().weight.data.clone()
    spread = head.std() * noise
    model.get_input_embeddings().weight.data = head + spread * torch.randn_like(head)

    tie_if_same(model)

    is_one = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_one is is_tied
    assert torch.equal(model.get_output_embeddings().weight, head)
    assert model.config.tie_word_embeddings is is_tied
