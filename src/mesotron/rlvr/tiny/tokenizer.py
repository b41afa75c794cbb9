"""The tiny model's tokenizer: byte-level BPE whose merges are learned from arith's own problems.

Every digit is a token, so that columns line up and a number is never seen as one symbol; every
common word is one token, so that a problem is short. Bytes are the ground, so that any text can
be read, if not understood.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 512
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
# ChatML, as Qwen and SmolLM2 have it, so that what is tried here carries over to them.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A word or a TeX command; one digit; one sign; each with the space before it; a line break. The
# order matters: the first alternative that fits takes the text.
PIECES = r" ?\\?[A-Za-z]+\{?| ?\d| ?[^\sA-Za-z\d]|\s"


def build_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    r"""Learn a tokenizer from texts.

    Args:
        texts: what the merges are counted on: prompts and solutions.
        vocabulary: number of tokens, the 256 bytes and 3 special tokens included.

    Returns:
        A Transformers tokenizer with a chat template; pads on the left, ends with <|im_end|>.

    Example:
        >>> tokenizer = build_tokenizer(["Mia has 12 apples."] * 9)
        >>> tokenizer.tokenize("Mia has 12")
        ['Mia', 'Ġhas', 'Ġ1', '2']
        >>> tokenizer.decode(tokenizer.encode(r"\boxed{12}"))
        '\\boxed{12}'
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    pad, _, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        eos_token=end,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=["<|im_start|>"],
    )
