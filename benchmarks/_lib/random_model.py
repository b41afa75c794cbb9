"""A stand-in for a model, to try a study on a CPU."""

from __future__ import annotations

from pathlib import Path


def random_model(folder: Path, tokenizer: str = "tiny") -> Path:
    """A folder with two layers of Llama with grouped heads and random weights.

    Args:
        folder: made if it has no model yet.
        tokenizer: the model whose tokenizer it gets.
    """
    if (folder / "config.json").exists():
        return folder

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mesotron.config import ModelConfig
    from mesotron.models.load import load_model

    _, words = load_model(ModelConfig(name=tokenizer, dtype="float32"))
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
