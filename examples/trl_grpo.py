"""TRL's `GRPOTrainer` with Muon per attention head, on a model and a tokenizer made here.

The reward is the share of even digits in what the model writes: a few steps raise it.

Run: python examples/trl_grpo.py
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import mesotron

WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789", "+", "="]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()

    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def even_digits(completions: list[str], **_: object) -> list[float]:
    words = [text.split() for text in completions]
    return [sum(word in "02468" for word in row) / max(len(row), 1) for row in words]


def main(steps: int = 12) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = mesotron.muon(model, lr=1e-2, per_head=True)

    prompts = [f"{a} + {b} =" for a in range(10) for b in range(10)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )

        trainer = GRPOTrainer(
            model=model,
            reward_funcs=even_digits,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=make_tokenizer(),
            optimizers=(optimizer, None),
        )

        trainer.train()

    rewards = [float(row["reward"]) for row in trainer.state.log_history if "reward" in row]
    print(f"reward from {rewards[0]:.2f} to {rewards[-1]:.2f} in {steps} steps")

    for key, value in optimizer.stats().items():
        if key.startswith("muon"):
            print(f"{key:32s} {value:.4g}")


if __name__ == "__main__":
    main()
