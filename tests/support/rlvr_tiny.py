"""A tiny random Llama over digits and boxed digits, and trainers around it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig

from mesotron.answers.formats import FORMATS
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.tasks.builtin import arith
from mesotron.tasks.prompts import solved_text
from mesotron.watch.budget import Budget, Limits

BOXES = [f"\\boxed{{{digit}}}" for digit in range(10)]
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "=", *BOXES]
EOS = 1
NETWORKS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
TIMES = {"step_time", "time/step", "time/rollout", "time/optimizer", "train_runtime"}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_arith_model(folder: Path) -> None:
    """A Llama with one layer of 16 features and a tokenizer for the arithmetic task."""
    from benchmarks.tiny_model import build_tokenizer  # other processes do without this folder

    problems = arith.generate("train", 200, (), 0)
    texts = [f"{p.question} {solved_text(p, FORMATS['boxed'])}" for p in problems]
    tokenizer = build_tokenizer(texts)

    model = make_model(
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_model(**changed: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": EOS,
        "bos_token_id": EOS,
        **changed,
    }

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def make_network(kind: str = "llama", **changed: Any) -> Any:
    """A network of 50 tokens with grouped-query attention."""
    torch.manual_seed(0)
    config, network = NETWORKS[kind]
    settings = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **changed,
    }

    return network(config(**settings))


def make_groups(
    seed: int, P: int = 9, T: int = 5, groups: tuple[int, ...] = (4, 4, 4), device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Shuffled rows of groups, prompts and completions of several lengths: ids, mask and T."""
    draw = torch.Generator().manual_seed(seed)
    ids = []

    mask = []
    for number, size in enumerate(groups):
        prompt = torch.randint(1, 50, (P,), generator=draw)
        for k in range(size):
            ids.append(torch.cat([prompt, torch.randint(1, 50, (T,), generator=draw)]))
            seen = torch.ones(P + T, dtype=torch.long)
            seen[:number] = 0
            seen[P + T - k % T :] = 0
            mask.append(seen)

    order = torch.randperm(len(ids), generator=draw)
    return torch.stack(ids)[order].to(device), torch.stack(mask)[order].to(device), T


def make_data(size: int = 24) -> Dataset:
    pairs = [(a % 5, a // 5 % 5) for a in range(size)]
    return Dataset.from_dict(
        {"prompt": [f"{a} + {b} =" for a, b in pairs], "gold": [str(a + b) for a, b in pairs]}
    )


def long_sums() -> Dataset:
    """Prompts longer than their completions, so that sharing them pays off."""
    return make_data().map(lambda row: {"prompt": f"{row['gold']} + 1 + 2 + {row['prompt']}"})


def small_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that needs no judge: the share of words with a digit below 5."""
    words = [text.split() for text in completions]
    return [sum(any(d in w for d in "01234") for w in row) / max(len(row), 1) for row in words]


def make_trainer(
    folder: Path, cls: type = GRPOTrainer, *, parts: dict[str, Any] | None = None, **changed: Any
) -> Any:
    """`parts` go to the trainer (optim, objective, model, ...), the rest to its arguments."""
    parts = {
        "model": make_model(),
        "reward_funcs": small_digits,
        "train_dataset": make_data(),
        "processing_class": make_tokenizer(),
        **(parts or {}),
    }

    settings: dict[str, Any] = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **changed,
    }
    return cls(args=GRPOConfig(str(folder), **settings), **parts)


def train(folder: Path, cls: type = GRPOTrainer, **settings: Any) -> Any:
    trainer = make_trainer(folder, cls, **settings)
    trainer.train()
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def initial_weights() -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in make_model().named_parameters()}


def rows(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def assert_same_steps(one: Any, other: Any, logged: Sequence[str] = ("loss", "entropy")) -> None:
    """Equal up to rounding."""
    for a, b in zip(rows(one), rows(other), strict=True):
        for name in logged:
            assert a[name] == pytest.approx(b[name], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)

    first = weights(one)
    second = weights(other)

    # AdamW divides a gradient by its size: rounding alone can flip the sign of a tiny one.
    far = [(first[name] - second[name]).abs().gt(1e-4).float().mean() for name in first]
    assert max(far) < 0.02


class SlowBudget(Budget):
    """A budget on a clock that moves 100 seconds at each step, and only then."""

    def __init__(self, limits: Limits, *, began: float, **earlier: Any) -> None:
        self.time = 0.0
        super().__init__(
            limits,
            **earlier,
            began=0.0,
            clock=lambda: self.time,
        )

    def step(self) -> None:
        self.time += 100
        super().step()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def spy(trainer: Any) -> list[dict[str, Any]]:
    """Every rollout batch the trainer makes from now on."""
    kept = []
    make = trainer._generate_and_score_completions

    def keep(inputs):
        kept.append(make(inputs))
        return kept[-1]

    trainer._generate_and_score_completions = keep
    return kept
