"""The tiny model's network: a Llama small enough to train in minutes on two CPU cores.

Wide and shallow, since a step of generation costs Python's time for each layer and little for
the width. It is an ordinary Transformers model: whatever holds for it is run with the same code
on a large one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MAX_POSITIONS = 1024


def tiny_config(vocabulary: int) -> LlamaConfig:
    """The sizes of the shipped model.

    Args:
        vocabulary: number of tokens.

    Example:
        >>> tiny_config(512).hidden_size
        128
    """
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        attention_dropout=0.0,
    )


def build_network(tokenizer: Any, seed: int = 0) -> LlamaForCausalLM:
    """A tiny model with random weights for this tokenizer, the same for the same seed.

    Args:
        tokenizer: its length is the vocabulary, its pad and end tokens go into the configs.
        seed: of the random weights; torch's global generator is left as it was.

    Returns:
        The model in float32 on the CPU.
    """
    config = tiny_config(len(tokenizer))
    config.pad_token_id = tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.bos_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
