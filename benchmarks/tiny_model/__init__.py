"""The network and tokenizer of the shipped tiny model (src/mesotron/models/tiny/weights)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mesotron.answers.formats import FORMATS
from mesotron.tasks.prompts import SYSTEM

VOCABULARY = 512
PAD = "<|pad|>"
END = "<|im_end|>"
ROLES = ("system", "user", "assistant")
# A role is one token, where ChatML has three: short prompts are fast.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The sentences that begin every prompt, one token each for the same reason.
SENTENCES = (SYSTEM, *(f" {form.instruction}" for form in FORMATS.values()))
# A word or a TeX command; one digit; one sign; each with the space before it; a line break. The
# first alternative that matches wins.
PIECES = r" ?\\?[A-Za-z]+\{?| ?\d| ?[^\sA-Za-z\d]|\s"


def build_network(tokenizer: Any, seed: int = 0) -> LlamaForCausalLM:
    # Wide and shallow: a decoding step on a CPU costs Python's time per layer, not for the width.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def build_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    r"""Train a byte-level BPE tokenizer in which every digit is a token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    core.decoder = decoders.ByteLevel()
    roles = [f"<|{role}|>" for role in ROLES]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, *roles],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(sentence, normalized=False) for sentence in SENTENCES])

    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=roles,
    )
