"""Instructions as numbers, without a download: a small vocabulary, and buckets for other words.

A word that the vocabulary lacks always gets the same bucket, so that it can be learned; two such
words share one by chance, once in a few hundred pairs. Case and punctuation are dropped.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

PADDING = 0
_COMMON = """
    a an the and to of in into on onto inside at from with up down left right behind front
    put place move take pick drop bring set push pull open close press turn reach insert grab
    lift slide lower carry leave lay it then please that this one some object thing item goal
    red green blue yellow purple orange white black grey brown pink cyan
    cube block box ball sphere cylinder can mug cup bowl plate bin tray basket bucket pad zone
    drawer door window button peg shelf hole target puck handle lever faucet wall table
"""
VOCABULARY = tuple(_COMMON.split())
NUM_BUCKETS = 384
NUM_WORDS = 1 + len(VOCABULARY) + NUM_BUCKETS
MAX_WORDS = 24
_KNOWN = {word: number for number, word in enumerate(VOCABULARY, 1)}


def number_of(word: str) -> int:
    """The number of one word, in the vocabulary or in a bucket.

    Example:
        >>> number_of("the") < len(VOCABULARY) < number_of("zeppelin") < NUM_WORDS
        True
    """
    bucket = 1 + len(VOCABULARY) + zlib.crc32(word.encode()) % NUM_BUCKETS
    return _KNOWN.get(word, bucket)


def encode_words(texts: Sequence[str]) -> Tensor:
    """Instructions as rows of word numbers.

    Args:
        texts: B instructions; words past the first 24 are left out.

    Returns:
        [B, L] int64, L the longest of them, filled up with `PADDING`; at least one word each.

    Example:
        >>> encode_words(["Put it down.", "lift"]).shape
        torch.Size([2, 3])
    """
    rows = [[number_of(word) for word in split(text)] or [number_of("")] for text in texts]
    length = max(map(len, rows))
    return torch.tensor([row + [PADDING] * (length - len(row)) for row in rows])


def split(text: str) -> list[str]:
    """The words of an instruction, in small letters.

    Example:
        >>> split("Put the RED cube, please!")
        ['put', 'the', 'red', 'cube', 'please']
    """
    return re.findall(r"[a-z0-9]+", text.lower())[:MAX_WORDS]
