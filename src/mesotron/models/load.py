"""Load a causal language model and its tokenizer, ready to generate and to train.

`names` says what a name stands for, `precision` which dtype its weights get, `gguf` converts files
of llama.cpp, `adapters` adds LoRA. Loaded files are untrusted: safetensors only, no pickle, no
remote code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesotron.config import ModelConfig
from mesotron.models.messages import first_sentence, is_panic, no_progress_bars
from mesotron.models.names import UNREADABLE, locate
from mesotron.models.precision import choose_dtype
from mesotron.runs.extras import require

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CHAT_END = "<|im_end|>"


def load_model(
    config: ModelConfig, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate and to train.

    The model is in evaluation mode, the tokenizer pads on the left, and both agree on pad and end
    tokens. LoRA is applied by the trainer (`lora_config`). ValueError if the name cannot be read.

    Example:
        >>> model, tokenizer = load_model(ModelConfig(name="tiny"))
        >>> tokenizer.decode(tokenizer.encode("3 + 4 = 7"))
        '3 + 4 = 7'
    """
    import torch

    device = torch.device(device)
    dtype = choose_dtype(config.dtype, device)

    options: dict[str, Any] = {"dtype": dtype}
    is_rounded = config.load != "full"
    if is_rounded:
        options |= _rounding(config, dtype, device)

    model, tokenizer = _read(config.name, options)
    _unify_special_tokens(model, tokenizer, config.name)

    if not is_rounded:  # bitsandbytes puts a rounded model on the device itself
        model = model.to(device)

    return model.eval(), tokenizer


def _rounding(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Options that round the weights to 4 or 8 bits while they are loaded."""
    require("quant", ["bitsandbytes"], f"--model.load {config.load}")
    from transformers import BitsAndBytesConfig

    rounding = BitsAndBytesConfig(
        load_in_4bit=config.load == "4bit",
        load_in_8bit=config.load == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": rounding, "device_map": {"": device}}


def _read(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    place = locate(name)
    require("rlvr", ["transformers"], "a language model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    is_folder = Path(place).is_dir()
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": is_folder}
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, **safe)
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                place, use_safetensors=True, **safe, **options
            )
    except BaseException as error:  # an untrusted folder can break the libraries anywhere
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        if isinstance(error, OSError) and not is_folder:
            raise ValueError(f"{name} {UNREADABLE}") from error

        why = first_sentence(error)
        raise ValueError(f"{name}: Transformers cannot load this model: {why}") from error

    return model, tokenizer


def _unify_special_tokens(model: Any, tokenizer: Any, name: str) -> None:
    longest = tokenizer.model_max_length  # compared with at every encoding
    if not isinstance(longest, int | float):
        raise ValueError(f"{name}: model_max_length in tokenizer_config.json must be a number")

    has_chat_end = CHAT_END in (tokenizer.chat_template or "")
    if has_chat_end and CHAT_END in tokenizer.get_vocab():
        # A base model's own end token closes a document; a chat turn closes with this one.
        tokenizer.eos_token = CHAT_END

    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name} has no end-of-text token: set eos_token in tokenizer_config.json")

    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token

    vocabulary = model.get_input_embeddings().weight.shape[0]
    if max(tokenizer.eos_token_id, tokenizer.pad_token_id) >= vocabulary:
        raise ValueError(f"{name}: the tokenizer exceeds the model's vocabulary of {vocabulary}")

    tokenizer.padding_side = "left"
    for holder in (model.config, model.generation_config):
        holder.pad_token_id = tokenizer.pad_token_id
        holder.eos_token_id = tokenizer.eos_token_id
