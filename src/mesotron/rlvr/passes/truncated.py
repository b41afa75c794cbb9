"""Passes over the tokens that top-k and top-p left, which is what the sampler drew from.

A sampler that leaves tokens out divides by the probability of the others. A softmax over the whole
vocabulary does not, so its gradient and its ratio are those of a policy that never sampled. Here
the tokens that the old policy kept are the vocabulary of the old and the new policy alike: the
sampling mask of DeepSeek-V3.2 (arXiv 2512.02556).

The logits of a whole micro-batch are in memory, and one bit for each of them stays in the rollout.

Shapes: B rows, T tokens of a completion, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesotron.rlvr.grpo import Passed, Sequences
from mesotron.sampling.graphs import Sampling

BITS = 8


@dataclass(frozen=True)
class TruncatedPass:
    """Scores tokens among those that a sampler kept."""

    autocast: Callable[[], AbstractContextManager[Any]]
    entropy_gradient: bool = False  # as for an entropy bonus

    def begin(
        self, model: Any, sequences: Sequences, sampling: Sampling, size: int
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T) by the policy that sampled, `size` rows at a time, and what it
        kept, for the passes that train: (B, T, V / 8)."""
        logprobs = []
        kept = []
        with torch.no_grad():
            for start in range(0, len(sequences.ids), size):
                ids = sequences.ids[start : start + size]
                mask = sequences.mask[start : start + size]
                logits = self._logits(model, ids, mask, sequences.length, sampling.temperature)
                chosen = ids[:, -sequences.length :]

                keeps = kept_tokens(logits, chosen, sampling)
                logprobs.append(logprobs_among(logits, chosen, keeps))
                kept.append(pack(keeps))

        return torch.cat(logprobs), torch.cat(kept)

    def __call__(
        self, model: Any, sequences: Sequences, kept: Tensor, temperature: float
    ) -> Passed:
        """Log-probabilities among the kept tokens, and entropies over the whole vocabulary."""
        length = sequences.length
        logits = self._logits(model, sequences.ids, sequences.mask, length, temperature)
        keeps = unpack(kept, logits.shape[-1])
        logprobs = logprobs_among(logits, sequences.completion_ids, keeps)

        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropies = torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1)

        return Passed(logprobs, entropies)

    def _logits(
        self, model: Any, ids: Tensor, mask: Tensor, length: int, temperature: float
    ) -> Tensor:
        """(B, T, V)"""
        with self.autocast():
            output = model(input_ids=ids, attention_mask=mask, logits_to_keep=length + 1)

        return output.logits[:, :-1].float() / temperature


def kept_tokens(logits: Tensor, chosen: Tensor, sampling: Sampling) -> Tensor:
    """Which tokens (B, T, V) the sampler kept; always the one that it chose (B, T), which rounding
    may put just outside."""
    kept = torch.empty_like(logits, dtype=torch.bool)
    for row, own in zip(logits, kept, strict=True):  # a sort takes several times its row's memory
        own.copy_(sampling.truncate(row.softmax(dim=-1)) > 0)

    return kept.scatter_(-1, chosen[..., None], True)


def logprobs_among(logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
    """(B, T) log-probabilities of the chosen tokens in a softmax over the kept ones."""
    own = logits.gather(-1, chosen[..., None]).squeeze(-1)
    return own - logits.masked_fill(~kept, -torch.inf).logsumexp(dim=-1)


def pack(kept: Tensor) -> Tensor:
    """Booleans (..., V) as bits (..., V / 8, rounded up) of bytes."""
    missing = -kept.shape[-1] % BITS
    padded = torch.nn.functional.pad(kept.to(torch.uint8), (0, missing))
    weights = 2 ** torch.arange(BITS, dtype=torch.uint8, device=kept.device)

    return (padded.unflatten(-1, (-1, BITS)) * weights).sum(dim=-1, dtype=torch.uint8)


def unpack(packed: Tensor, size: int) -> Tensor:
    """The first `size` booleans of packed bits.

    Example:
        >>> unpack(pack(torch.tensor([True, False, True])), 3).tolist()
        [True, False, True]
    """
    places = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    bits = (packed[..., None] >> places) & 1
    return bits.flatten(-2)[..., :size].bool()
