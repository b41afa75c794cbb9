"""A random Llama whose words are digits and boxed digits, and trainers around it, for the tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from mesotron.rlvr.trainer import GRPOTrainer

BOXES = [f"\\boxed{{{digit}}}" for digit in range(10)]
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", *BOXES]
EOS = 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(layers: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=EOS, bos_token_id=EOS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_data(size: int = 24) -> Dataset:
    pairs = [(a % 5, a // 5 % 5) for a in range(size)]
    return Dataset.from_dict(
        {"prompt": [f"{a} + {b} =" for a, b in pairs], "gold": [str(a + b) for a, b in pairs]}
    )


def make_arguments(folder: Path, **changed: Any) -> GRPOConfig:
    settings: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 4, "learning_rate": 1e-2, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "dataloader_pin_memory": False,
        **changed,
    }  # fmt: skip
    return GRPOConfig(str(folder), **settings)


def small_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that needs no judge: the share of words that hold a digit below 5."""
    words = [text.split() for text in completions]
    return [sum(any(d in w for d in "01234") for w in row) / max(len(row), 1) for row in words]


def make_trainer(folder: Path, cls: type = GRPOTrainer, *, parts: dict[str, Any] | None = None,
                 **changed: Any) -> Any:  # fmt: skip
    """`parts` go to the trainer (optim, objective, model, ...), the rest to its arguments."""
    given = {
        "model": make_model(), "reward_funcs": small_digits, "train_dataset": make_data(),
        "processing_class": make_tokenizer(), **(parts or {}),
    }  # fmt: skip
    return cls(args=make_arguments(folder, **changed), **given)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def rows(trainer: Any) -> list[dict[str, float]]:
    """The log rows of training steps."""
    return [row for row in trainer.state.log_history if "loss" in row]


def assert_same_steps(one: Any, other: Any) -> None:
    """Two trainers have come the same way, up to rounding."""
    for a, b in zip(rows(one), rows(other), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["entropy"] == pytest.approx(b["entropy"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    first, second = weights(one), weights(other)
    # AdamW divides a gradient by its size: rounding alone can turn the sign of a tiny one.
    far = [(first[name] - second[name]).abs().gt(1e-4).float().mean() for name in first]
    assert max(far) < 0.02


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spy(trainer: Any) -> list[dict[str, Any]]:
    """Every rollout batch that the trainer makes from now on."""
    kept, make = [], trainer._generate_and_score_completions

    def keep(inputs):
        kept.append(make(inputs))
        return kept[-1]

    trainer._generate_and_score_completions = keep
    return kept
