"""The tiny model's tokenizer: byte-level BPE whose merges are learned from arith's own problems.

Every digit is a token, so that a number is never seen as one symbol; every common word and each
sentence that opens a prompt is one too, so that a problem is short. Bytes are the ground, so that
any text can be read, if not understood.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.prompts import SYSTEM

VOCABULARY = 512
PAD, END = "<|pad|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
# A role is one token, where ChatML has three: a short prompt is a fast one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The sentences that open every prompt, one token each for the same reason.
SENTENCES = (SYSTEM, *(f" {form.instruction}" for form in FORMATS.values()))
# A word or a TeX command; one digit; one sign; each with the space before it; a line break. The
# order matters: the first alternative that fits takes the text.
PIECES = r" ?\\?[A-Za-z]+\{?| ?\d| ?[^\sA-Za-z\d]|\s"


def build_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    r"""Learn a tokenizer from texts.

    Args:
        texts: what the merges are counted on: prompts and solutions.
        vocabulary: number of tokens, the 256 bytes and the special tokens included; the opening
            sentences are added to it.

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
