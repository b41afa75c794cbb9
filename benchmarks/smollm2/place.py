"""The model folder that all cells load: made once from a GGUF file, or a small stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_END = "<|im_end|>"


def model_folder(given: Any) -> Path:
    """The folder of the model that the study starts from.

    Args:
        given: `model` is a folder with a .gguf file, a model folder, or "random": two small layers
            with random weights and the shipped tokenizer, which prove the study and nothing else.
    """
    if given.model == "random":
        return random_model(given.state / "random")

    found = sorted(Path(given.model).expanduser().glob("*.gguf"))
    if not found:
        return Path(given.model).expanduser()
    from mesotron.models.gguf import convert_gguf

    folder = convert_gguf(found[0], given.state / "models")
    name_tokens(folder)

    return folder


def name_tokens(folder: Path) -> None:
    """Name the tokens that end and pad: Transformers 5.17 reads none from a GGUF file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if tokenizer.eos_token is None or tokenizer.pad_token is None:
        tokenizer.eos_token = tokenizer.pad_token = CHAT_END
        tokenizer.save_pretrained(folder)


def random_model(folder: Path) -> Path:
    """Two layers of Llama with grouped heads."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mesotron.config import ModelConfig
    from mesotron.models.load import load_model

    _, tokenizer = load_model(ModelConfig(name="tiny"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )

    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    return folder
