"""What is measured: rows (model and completion length) times contenders, and the longer parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RECIPE = "arith_smollm2"
PROMPTS = 32
GENERATIONS = 8
# Prompt and completion of the longest row; the share of the GPU's memory is the row's.
VLLM: dict[str, Any] = {"vllm_max_model_length": 1024}
# Of the memory and of completions per pass, in runs that share the GPU with others.
LITTLE = 0.1
MICRO = 128


@dataclass(frozen=True)
class Row:
    model: str  # a key of `MODELS`
    tokens: int
    micro: int  # completions per forward pass: what an H200 holds beside vLLM
    share: float = 0.3  # of the GPU's memory for vLLM: TRL's default
    own_micro: int | None = None  # the same for our own passes without vLLM beside them


@dataclass(frozen=True)
class Contender:
    stock: bool = False  # plain TRL with its AdamW
    settings: dict[str, Any] = field(default_factory=dict)  # of ours
    trl: dict[str, Any] = field(default_factory=dict)  # arguments of `make_stock`

    def micro(self, row: Row) -> int:
        """Completions per pass: ragged rows take half the memory of padded ones."""
        is_alone = not self.stock and not self.uses_vllm
        return row.own_micro or row.micro if is_alone else row.micro

    @property
    def uses_vllm(self) -> bool:
        return "vllm" in self.trl or self.settings.get("rollout.vllm") == "colocate"


ROWS = {
    "smollm2-10": Row("smollm2", 10, 256),
    "smollm2-256": Row("smollm2", 256, 128, own_micro=256),
    "qwen0.5b-256": Row("qwen0.5b", 256, 64, own_micro=256),
    "qwen0.5b-512": Row("qwen0.5b", 512, 64, own_micro=128),
    "qwen1.7b-256": Row("qwen1.7b", 256, 32, own_micro=64),
    "qwen1.7b-512": Row("qwen1.7b", 512, 32, 0.2),  # TRL does not fit beside 0.3
}
SMALL = {"small-6": Row("small", 6, 8)}
CONTENDERS = {
    "TRL": Contender(stock=True),
    "TRL + vLLM": Contender(stock=True, trl={"vllm": True}),
    "fast": Contender(settings={"rollout.fast": True}),
    "vLLM": Contender(settings={"rollout.fast": False, "rollout.vllm": "colocate"}),
    "vLLM, fast passes": Contender(settings={"rollout.fast": True, "rollout.vllm": "colocate"}),
}
# Configs of the published models; their weights are random, which changes neither time nor memory.
QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen0.5b": (
        "Qwen2",
        QWEN
        | {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen1.7b": (
        "Qwen3",
        QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "head_dim": 128,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40960,
        },
    ),
    "small": (
        "Qwen2",
        QWEN
        | {
            "vocab_size": 512,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        },
    ),
}
SEEDS = (0, 1, 2)
LORA = [
    "--lora",
    "16",
    "--optim",
    "muon",
    "--no-rollout.fast",
    "--rollout.micro-batch",
    str(MICRO),
]
# Whole runs of `mesotron train arith_smollm2`, by part and name.
RUNS: dict[str, dict[str, list[str]]] = {
    "accuracy": {
        "fast": [],
        "vllm": [
            "--no-rollout.fast",
            "--vllm",
            "colocate",
            "--rollout.micro-batch",
            str(MICRO),
            "--trl.vllm_gpu_memory_utilization",
            str(LITTLE),
        ],
    },
    "qlora": {
        "bf16": [*LORA],
        "4bit": [*LORA, "--model.load", "4bit"],
    },
}
STALE_FROM = 20  # step after which the provoked run no longer passes its weights to vLLM
