"""The model folder that all cells load: made once from a GGUF file, or a small stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._lib.random_model import random_model

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
        tokenizer.eos_token = CHAT_END
        tokenizer.pad_token = CHAT_END
        tokenizer.save_pretrained(folder)
