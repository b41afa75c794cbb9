"""Golden routing tables: small configs of real architectures against whole tables, kept in
golden/routing/.

Every view is also opened on a real tensor, so a table cannot name matrices that are not there.
After an intended change, regenerate with `python tests/optim/routing/test_routing_golden.py` and
read the diff line by line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mesotron.optim.routing import route
from mesotron.optim.views import View
from mesotron.spectral.routing import SPECTRAL_RULES

transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[2] / "golden" / "routing"
TEXT = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
GQA = {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {**GQA, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def build(model: str, config: str, **fields) -> nn.Module:
    """A Transformers model from a config alone, on the meta device."""
    settings = getattr(transformers, config)(**fields)
    with torch.device("meta"):
        return getattr(transformers, model)(settings)


def qwen2(**fields) -> nn.Module:
    return build("Qwen2ForCausalLM", "Qwen2Config", **GQA, tie_word_embeddings=True, **fields)


def qwen2_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        lora = LoraConfig(
            r=4, target_modules="all-linear", modules_to_save=["lm_head"], use_dora=True
        )
        untied = build("Qwen2ForCausalLM", "Qwen2Config", **GQA, tie_word_embeddings=False)
        return get_peft_model(untied, lora, low_cpu_mem_usage=True)


def phi3_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        lora = LoraConfig(r=4, target_modules=["qkv_proj", "o_proj", "gate_up_proj"])
        return get_peft_model(phi3(), lora, low_cpu_mem_usage=True)


def mixtral_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    with torch.device("meta"):
        lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=stacks)
        return get_peft_model(MODELS["mixtral"](), lora, low_cpu_mem_usage=True)


def phi3() -> nn.Module:
    return build("Phi3ForCausalLM", "Phi3Config", **GQA, pad_token_id=0)


MODELS = {
    "qwen2": qwen2,
    "qwen3": lambda: build("Qwen3ForCausalLM", "Qwen3Config", **GQA, head_dim=8),
    "llama": lambda: build("LlamaForCausalLM", "LlamaConfig", **GQA),
    "gemma3": lambda: build("Gemma3ForCausalLM", "Gemma3TextConfig", **GQA, head_dim=8),
    "gemma3_vision": lambda: build(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        text_config={**GQA, "head_dim": 8},
        vision_config=VISION,
        mm_tokens_per_image=4,
    ),
    "gpt2": lambda: build(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=96,
        n_embd=16,
        n_head=4,
        n_layer=2,
        n_positions=32,
    ),
    "phi3": phi3,
    "mixtral": lambda: build("MixtralForCausalLM", "MixtralConfig", **GQA, num_local_experts=4),
    "qwen3_moe": lambda: build(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **MOE,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
    ),
    "gpt_oss": lambda: build(
        "GptOssForCausalLM", "GptOssConfig", **GQA, head_dim=8, num_local_experts=4
    ),
    "gpt_neox": lambda: build("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT, num_attention_heads=4),
    "vit": lambda: build("ViTForImageClassification", "ViTConfig", **VISION, num_labels=5),
    "t5": lambda: build(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=96,
        d_model=16,
        d_ff=40,
        d_kv=8,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    ),
    "smolvlm": lambda: build(
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        text_config={**GQA, "model_type": "llama", "pad_token_id": 0},
        vision_config=VISION,
        scale_factor=2,
    ),
    "qwen2_vl": lambda: build(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        text_config=GQA,
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "patch_size": 8,
        },
    ),
    "qwen3_next": lambda: build(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **MOE,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "deepseek_v3": lambda: build(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **TEXT,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    ),
    "falcon": lambda: build(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=96,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "bert": lambda: build(
        "BertForSequenceClassification", "BertConfig", **TEXT, num_attention_heads=4, num_labels=5
    ),
    "mamba": lambda: build(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=96,
        hidden_size=16,
        num_hidden_layers=2,
        time_step_rank=4,
    ),
    "mamba2": lambda: build(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=96,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=8,
        state_size=8,
        n_groups=2,
    ),
    "qwen2_lora": qwen2_lora,
    "mixtral_lora": mixtral_lora,
    "phi3_lora": phi3_lora,
}
PER_HEAD = [
    "qwen2",
    "qwen3",
    "phi3",
    "gpt2",
    "gpt_neox",
    "smolvlm",
    "t5",
    "qwen3_next",
    "deepseek_v3",
    "falcon",
    "bert",
    "qwen2_lora",
    "phi3_lora",
]
CASES = [(name, False) for name in MODELS] + [(name, True) for name in PER_HEAD]


def golden_file(name: str, per_head: bool) -> Path:
    return GOLDEN / f"{name}{'_per_head' if per_head else ''}.txt"


@pytest.mark.parametrize(("name", "per_head"), CASES)
def test_table_equals_the_golden_one_and_views_tile_their_tensors(name: str, per_head: bool):
    model = MODELS[name]()
    table = route(model, per_head=per_head)
    assert table.to_text() == golden_file(name, per_head).read_text()
    for row in table:
        if row.rule in SPECTRAL_RULES:
            counts = torch.zeros(row.shape)
            for window in View.parse(row.view).windows(counts):
                window.strided.add_(1)
                assert min(window.rows, window.cols) > 1, row
            assert torch.equal(counts, torch.ones(row.shape)), row
    grouped = [id(p) for group in table.groups(model) for p in group["params"]]
    assert sorted(grouped) == sorted({id(p) for p in model.parameters() if p.requires_grad})


if __name__ == "__main__":
    for name, per_head in CASES:
        table = route(MODELS[name](), per_head=per_head)
        golden_file(name, per_head).write_text(table.to_text())
