"""Text that every Python has without a network: the language reference that `help()` shows.

`pydoc_data.topics` is a few hundred kilobytes of English prose and code. It changes a little from
one Python to the next, so a result names the Python version and the hash of the text, and losses
are compared inside one result only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 128  # ASCII; what lies outside is replaced
HELD_OUT_EVERY = 8  # each eighth topic, in alphabetical order, is never trained on
SAMPLING_SEED = 20260


@dataclass(frozen=True)
class Corpus:
    """Training and held-out bytes, [length] int64 below VOCABULARY, and the hash of the text."""

    train: Tensor
    held_out: Tensor
    sha256: str

    def batches(self, seed: int, steps: int, batch: int, context: int) -> Tensor:
        """Random windows for a whole run, [steps, batch, context]; equal for equal seeds."""
        return _windows(self.train, seed, steps * batch, context).view(steps, batch, context)

    def evaluation(self, batch: int, context: int) -> Tensor:
        """The held-out windows that every run is judged by, [batch, context]."""
        return _windows(self.held_out, SAMPLING_SEED, batch, context)


def read_corpus() -> Corpus:
    """The text, split by topic so that nothing held out is seen in training.

    Example:
        >>> corpus = read_corpus()
        >>> len(corpus.train) > 5 * len(corpus.held_out) > 0
        True
    """
    names = sorted(topics)
    held_out = names[::HELD_OUT_EVERY]
    parts = [[n for n in names if n not in held_out], held_out]
    train, rest = ("\n\n".join(topics[n] for n in part) for part in parts)
    digest = hashlib.sha256((train + "\0" + rest).encode()).hexdigest()
    return Corpus(_encode(train), _encode(rest), digest)


def _encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.int64)


def _windows(text: Tensor, seed: int, count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]
