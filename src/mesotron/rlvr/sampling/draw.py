"""How a token is drawn from logits, without a look from the host: a captured graph can hold it.

Shapes: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from softmax(logits / temperature)."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together hold this much."""

    def draw(self, logits: Tensor) -> Tensor:
        """One token for each row.

        Args:
            logits: (B, V), any floating type.

        Returns:
            (B,) token ids.

        Example:
            >>> Sampling(temperature=0.0).draw(torch.tensor([[0.1, 0.7]])).tolist()
            [1]
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        probs = (logits.float() / self.temperature).softmax(dim=-1)
        if self.top_k or self.top_p < 1:
            probs = self.cut(probs)
        # The smallest of exponentials with rates p_i has index i with probability p_i; unlike
        # torch.multinomial this never looks at a value from the host.
        return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)

    def cut(self, probs: Tensor) -> Tensor:
        """Zero outside of the k likeliest, and of the nucleus of what they hold, as `generate` has
        it; the likeliest always stays."""
        ordered, places = probs.sort(dim=-1, descending=True)
        if self.top_k:
            ordered[:, self.top_k :] = 0.0
            ordered = ordered / ordered.sum(dim=-1, keepdim=True)
        outside = ordered.cumsum(dim=-1) - ordered >= self.top_p
        outside[:, 0] = False
        return torch.zeros_like(probs).scatter(-1, places, ordered.masked_fill(outside, 0.0))
