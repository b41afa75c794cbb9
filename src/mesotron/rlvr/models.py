"""Language models by name: the shipped tiny one, smollm2, a folder, a .gguf file, the hub.

What is loaded is untrusted: safetensors only, no pickle, no remote code. A missing package, hub or
pad token is one sentence. LoRA is described here and applied by the trainer, after which the
optimizer is built.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mesotron.config import ModelConfig
from mesotron.rlvr.converted import without_bars
from mesotron.rlvr.places import locate

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHAT_END = "<|im_end|>"


def load_model(
    config: ModelConfig, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, ready to generate and to train.

    Args:
        config: its `name` and `dtype` are used here; see `lora_config` for the rest.
        device: where the weights go.

    Returns:
        The model in evaluation mode and its tokenizer, which pads on the left. The tokens that
        pad and end agree between tokenizer, model and generation config.

    Raises:
        ValueError: the name cannot be found or read, in one sentence.

    Example:
        >>> model, tokenizer = load_model(ModelConfig(name="tiny"))
        >>> tokenizer.decode(tokenizer.encode("3 + 4 = 7"))
        '3 + 4 = 7'
    """
    device = torch.device(device)
    dtype = choose_dtype(config.dtype, device)
    place = locate(config.name)
    model, tokenizer = read(place, dtype, source=config.name)
    agree_on_tokens(model, tokenizer, source=config.name)
    return model.to(device).eval(), tokenizer  # type: ignore[arg-type]


def read(place: str, dtype: torch.dtype, source: str) -> tuple[Any, Any]:
    """Model and tokenizer from a folder or from the hub, with one sentence for what goes wrong."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError(
            "language models need Transformers, which is not installed: pip install "
            "'mesotron[rlvr]'"
        ) from error
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": Path(place).is_dir()}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **safe)
        with without_bars():
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, use_safetensors=True, **safe
            )
    except OSError as error:
        raise ValueError(missing(place, source, error)) from error
    except Exception as error:
        # A stranger's folder can break the libraries anywhere; each break is about that folder.
        sentence = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise ValueError(f"{source}: Transformers cannot load this model: {sentence}") from error
    return model, tokenizer


def missing(place: str, source: str, error: OSError) -> str:
    """Why a folder or the hub did not give a model, and the way out."""
    if Path(place).is_dir():
        sentence = " ".join(str(error).split()).split(". ")[0]
        return f"{source} is not a whole model folder: {sentence}"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    reason = (
        "HF_HUB_OFFLINE is set, or there is no network"
        if offline
        else "no such name, or no permission"
    )
    return (
        f"{source} is no local folder and could not be read from the hub ({reason}): download it "
        "and give its folder, or use --model.name tiny or smollm2"
    )


def agree_on_tokens(model: Any, tokenizer: Any, source: str) -> None:
    """Make tokenizer, model and generation config use the same tokens to pad and to end a turn."""
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template or ""
    if CHAT_END in template and CHAT_END in vocabulary:
        # A base model's own end token closes a document; a chat turn closes with this one.
        tokenizer.eos_token = CHAT_END
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{source}: its tokenizer names no token that ends a text, so that generation could "
            "not stop; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if max(tokenizer.eos_token_id, tokenizer.pad_token_id) >= rows(model):
        raise ValueError(
            f"{source}: token {tokenizer.eos_token!r} or {tokenizer.pad_token!r} is outside of the "
            f"model's vocabulary of {rows(model)}; tokenizer and weights do not belong together"
        )
    tokenizer.padding_side = "left"
    for holder in (model.config, model.generation_config):
        holder.pad_token_id = tokenizer.pad_token_id
        holder.eos_token_id = tokenizer.eos_token_id


def rows(model: PreTrainedModel) -> int:
    """How many tokens a model has embeddings for."""
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[return-value]


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of the weights: what was asked for, or what the device is good at."""
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name in ("bfloat16", "mixed") and not has_bfloat16:
        where = "this GPU has no bfloat16" if device.type == "cuda" else f"the device is {device}"
        raise ValueError(
            f"--model.dtype {name} needs a GPU with bfloat16, and {where}: use float32 or auto"
        )
    if name == "auto":
        return torch.bfloat16 if has_bfloat16 else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def lora_config(config: ModelConfig) -> LoraConfig | None:
    """What PEFT needs to know of a config's LoRA: rank and alpha, on all linear layers.

    Args:
        config: a rank of 0 trains every weight.

    Returns:
        A `peft.LoraConfig` for the trainer's `peft_config`, or None.
    """
    if config.lora < 0:
        raise ValueError(f"--model.lora {config.lora} must be a rank of at least 1, or 0 for none")
    if config.lora == 0:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("--model.lora needs PEFT: pip install 'mesotron[rlvr]'") from error
    return LoraConfig(
        r=config.lora,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
