"""A prompt's completions in one row: what a training pass need not read again.

TRL gives the model a row for each completion, so a prompt with G completions is read G times. Here
each distinct prompt is one row, its completions stand after it one by one, and a mask keeps them
from seeing each other. Log-probabilities and gradients are the same up to rounding; nothing of the
model changes. Full attention only.

Shapes: B completions of up to T tokens, U distinct prompts padded to P, at most G completions of
one; a packed row has S = P - 1 + G T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label that is not scored
# Pairs of tokens that attention may look at in packed rows, over those of the rows as they are. The
# mask of packed rows is written out, a byte for each pair.
MOST_PAIRS = 2


@dataclass(frozen=True)
class PackedGroups:
    """Inputs of one forward pass over packed rows, and the way back to the completions."""

    ids: Tensor
    """(U, S): a prompt without its last token, then G segments; each segment is that last token and
    the completion without its own last, so that every position predicts the label beside it."""
    seen: Tensor
    """(U, 1, S, S) booleans: what each token attends to."""
    places: Tensor
    """(1, S): positions as they would be if each completion stood alone."""
    labels: Tensor
    """(U, S): the token that each position predicts, `IGNORED` where nothing is scored."""
    slots: Tensor
    """(B,): where each completion stands among the U G segments."""
    lead: int
    """P - 1: tokens before the first segment."""
    length: int
    """T: tokens of a segment."""

    def unpack(self, values: Tensor) -> Tensor:
        """(U, S) values of the tokens as (B, T), a row for each completion."""
        return values[:, self.lead :].reshape(-1, self.length)[self.slots]


def pack_groups(ids: Tensor, mask: Tensor, length: int) -> PackedGroups | None:
    """Pack the completions of each prompt into one row.

    Args:
        ids: (B, P + T), prompts padded on the left and completions on the right.
        mask: (B, P + T), 0 on the padding.
        length: T.

    Returns:
        The packed rows; None if they would hold no fewer tokens than the rows as they are, as when
        few completions of a batch share a prompt, or if attention would look at far more pairs, as
        when completions are much longer than their prompt.

    Example:
        >>> ids = torch.tensor([[7, 8, 1, 2], [7, 8, 3, 4]])
        >>> packed = pack_groups(ids, torch.ones_like(ids), length=2)
        >>> packed.ids.tolist(), packed.labels.tolist()
        ([[7, 8, 1, 8, 3]], [[-100, 1, 2, 3, 4]])
    """
    B, T = len(ids), length
    P = ids.shape[1] - T
    groups = find_groups(ids[:, :P].masked_fill(mask[:, :P] == 0, -1))
    U, G = len(groups.first), groups.largest
    S = P - 1 + G * T
    if U * S >= B * (P + T) or U * S**2 > MOST_PAIRS * B * (P + T) ** 2:
        return None
    segments = ids.new_zeros(U * G, T)
    segments[groups.slots] = ids[:, P - 1 : -1]
    scored = ids.new_full((U * G, T), IGNORED)
    scored[groups.slots] = ids[:, P:].masked_fill(mask[:, P:] == 0, IGNORED)
    prompts = ids[groups.first, : P - 1]
    step = torch.arange(P - 1 + T, device=ids.device)
    return PackedGroups(
        ids=torch.cat([prompts, segments.view(U, -1)], dim=1),
        seen=who_sees_whom(mask[groups.first, : P - 1] != 0, G, T),
        places=torch.cat([step[: P - 1], step[P - 1 :].repeat(G)])[None],
        labels=torch.cat([torch.full_like(prompts, IGNORED), scored.view(U, -1)], dim=1),
        slots=groups.slots,
        lead=P - 1,
        length=T,
    )


@dataclass(frozen=True)
class Groups:
    """Rows that are alike: the first of each kind, the largest kind, and each row's slot."""

    first: Tensor
    """(U,): a row of each kind."""
    largest: int
    """G: rows of the most frequent kind."""
    slots: Tensor
    """(B,): kind x G + the row's number within its kind."""


def find_groups(rows: Tensor) -> Groups:
    """Which rows are alike.

    Args:
        rows: (B, P) integers.

    Example:
        >>> found = find_groups(torch.tensor([[5], [4], [5]]))
        >>> found.first.tolist(), found.largest, found.slots.tolist()
        ([1, 0], 2, [2, 0, 3])
    """
    _, kind, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    order = kind.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    number = torch.empty_like(kind)
    number[order] = torch.arange(len(rows), device=rows.device) - starts[kind[order]]
    G = int(counts.max())
    return Groups(first=order[starts], largest=G, slots=kind * G + number)


def who_sees_whom(prompt: Tensor, G: int, T: int) -> Tensor:
    """(U, 1, S, S): each token sees its prompt, and what is before it in its own segment.

    Args:
        prompt: (U, P - 1), false on the padding.
        G: segments of a row.
        T: tokens of a segment.
    """
    U, lead = prompt.shape
    S, device = lead + G * T, prompt.device
    place = torch.arange(S, device=device)
    # -1 for the prompt, then the segment's number: only equal ones see each other.
    segment = torch.where(place < lead, -1, (place - lead) // T)
    allowed = (segment[:, None] == segment[None]) | (segment[None] == -1)
    allowed &= place[:, None] >= place[None]
    visible = torch.cat([prompt, prompt.new_ones(U, G * T)], dim=1)
    # A padded token sees itself: with nothing to attend to it would give NaN, which survives.
    itself = torch.eye(S, dtype=torch.bool, device=device)
    return ((allowed & visible[:, None]) | itself)[:, None]
