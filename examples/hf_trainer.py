"""Transformers `Trainer` with Muon: build the optimizer from the model and hand it over.

Run: python examples/hf_trainer.py
"""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

import mesotron


class Counting(Dataset):
    """Rows that count upward by one."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) + row) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )

    model = Qwen2ForCausalLM(config)
    optimizer = mesotron.muon(model, lr=5e-3, per_head=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=30,
            per_device_train_batch_size=16,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )

        # None: the Trainer makes its usual schedule over our optimizer.
        trainer = Trainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, None))
        trainer.train()

    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    print(f"loss from {losses[0]:.2f} to {losses[-1]:.2f}")

    for key, value in optimizer.stats().items():
        print(f"{key:32s} {value:.4g}")


if __name__ == "__main__":
    main()
