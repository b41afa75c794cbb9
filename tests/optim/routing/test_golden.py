"""Golden routing tables: small configs of real architectures against whole tables, kept in
golden/routing/.

Every view is also opened on a real tensor, so a table cannot name matrices that are not there.
After an intended change, regenerate with `python tests/optim/routing/test_golden.py` and read the
diff line by line.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim.routing import route
from mesotron.optim.views import View

transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parents[2] / "golden" / "routing"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "num_hidden_layers": 2,
}
TEXT = {**SIZES, "intermediate_size": 40}
FOUR_HEADS = {**TEXT, "num_attention_heads": 4}
GQA = {**FOUR_HEADS, "num_key_value_heads": 2}
MOE = {
    **GQA,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
VISION |= {
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
EXPERTS = {"moe_intermediate_size": 24}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
}
LATENT |= {"v_head_dim": 6, "num_key_value_heads": 4}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
}
DELTA_NET |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}

# The model's class and the fields of its config.
MODELS = {
    "qwen2": ("Qwen2ForCausalLM", {**GQA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**GQA, "head_dim": 8}),
    "llama": ("LlamaForCausalLM", GQA),
    "gemma3": ("Gemma3ForCausalLM", {**GQA, "head_dim": 8}),
    "gemma3_vision": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**GQA, "head_dim": 8},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 96,
            "n_embd": 16,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 32,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**GQA, "pad_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", {**GQA, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            **MOE,
            **EXPERTS,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **GQA,
            "head_dim": 8,
            "num_local_experts": 4,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", FOUR_HEADS),
    "vit": ("ViTForImageClassification", {**VISION, "num_labels": 5}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 96,
            "d_model": 16,
            "d_ff": 40,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 4,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {
            "text_config": {
                **GQA,
                "model_type": "llama",
                "pad_token_id": 0,
            },
            "vision_config": VISION,
            "scale_factor": 2,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": GQA,
            "vision_config": {
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 16,
                "num_heads": 2,
                "patch_size": 8,
            },
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **MOE,
            **EXPERTS,
            **DELTA_NET,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **FOUR_HEADS,
            **LATENT,
            **EXPERTS,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        {
            **SIZES,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
    ),
    "bert": ("BertForSequenceClassification", {**FOUR_HEADS, "num_labels": 5}),
    "mamba": ("MambaForCausalLM", {**SIZES, "time_step_rank": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        {
            **SIZES,
            "num_heads": 4,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
        },
    ),
}
# The base model and PEFT's settings.
LORA = {
    "qwen2_lora": (
        ("Qwen2ForCausalLM", {**GQA, "tie_word_embeddings": False}),
        {
            "r": 4,
            "target_modules": "all-linear",
            "modules_to_save": ["lm_head"],
            "use_dora": True,
        },
    ),
    "mixtral_lora": (
        MODELS["mixtral"],
        {
            "r": 2,
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "phi3_lora": (
        MODELS["phi3"],
        {
            "r": 4,
            "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"],
        },
    ),
}
PER_HEAD = (
    "qwen2 qwen3 phi3 gpt2 gpt_neox smolvlm t5 qwen3_next deepseek_v3 falcon bert qwen2_lora "
    "phi3_lora"
)
CASES = [(name, False) for name in (*MODELS, *LORA)] + [(name, True) for name in PER_HEAD.split()]


def construct(model: str, fields: dict) -> nn.Module:
    """A Transformers model from the fields of its config."""
    cls = getattr(transformers, model)
    return cls(cls.config_class(**fields))


def build(name: str) -> nn.Module:
    with torch.device("meta"):
        if name in MODELS:
            return construct(*MODELS[name])
        from peft import LoraConfig, get_peft_model

        base, settings = LORA[name]
        return get_peft_model(construct(*base), LoraConfig(**settings), low_cpu_mem_usage=True)


def golden_file(name: str, per_head: bool) -> Path:
    return GOLDEN / f"{name}{'_per_head' if per_head else ''}.txt"


@pytest.mark.parametrize(("name", "per_head"), CASES)
def test_table_equals_the_golden_one_and_views_tile_their_tensors(name: str, per_head: bool):
    model = build(name)
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
        golden_file(name, per_head).write_text(route(build(name), per_head=per_head).to_text())
