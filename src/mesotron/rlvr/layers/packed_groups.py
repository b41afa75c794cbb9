"""A prompt's completions in one row: what a training pass need not read again.

TRL gives the model a row for each completion, so a prompt with G completions is read G times. Here
each distinct prompt is one row, its completions stand after it one by one, and a mask keeps them
from seeing each other. Log-probabilities and gradients are the same up to rounding; nothing of the
model changes. Full attention only.

Shapes: B completions of up to T tokens, U rows, each a prompt padded to P and at most G completions
of it; a packed row has S = P - 1 + G T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100  # the label that is not scored
# Pairs of tokens that attention may look at in packed rows, over those of the rows as they are. The
# mask of packed rows is written out, a byte for each pair.
MOST_PAIRS = 2
# The tokens of a row of a fixed shape are a multiple of this: few shapes serve a data set, and
# attention's kernels want the rows of a mask to start on such a multiple.
STEP = 8


@dataclass(frozen=True)
class Frame:
    """The shape of packed rows."""

    rows: int
    """U."""
    lead: int
    """P - 1: tokens before the first segment."""
    segments: int
    """G."""
    length: int
    """T: tokens of a segment."""

    @property
    def tokens(self) -> int:
        """S."""
        return self.lead + self.segments * self.length

    def rounded(self, fewest: int, longest: int) -> "Frame":
        """A frame that also holds other batches like this one.

        Args:
            fewest: U of a batch whose groups are whole; others have a quarter of it more, or two.
            longest: T for all batches.

        Example:
            >>> Frame(4, lead=81, segments=8, length=7).rounded(fewest=4, longest=10)
            Frame(rows=4, lead=88, segments=8, length=10)
        """
        rows = fewest + round_up(self.rows - fewest, max(fewest // 4, 1))
        end = self.segments * longest
        return Frame(rows, round_up(self.lead + end, STEP) - end, self.segments, longest)

    def places(self, device: torch.device) -> Tensor:
        """(1, S): positions as they would be if each completion stood alone."""
        step = torch.arange(self.lead + self.length, device=device)
        return torch.cat([step[: self.lead], step[self.lead :].repeat(self.segments)])[None]


@dataclass(frozen=True)
class PackedGroups:
    """Inputs of one forward pass over packed rows, and the way back to the completions."""

    frame: Frame
    ids: Tensor
    """(U, S): a prompt without its last token, then G segments; each segment is that last token and
    the completion without its own last, so that every position predicts the label beside it."""
    prompt: Tensor
    """(U, P - 1) booleans, false on the padding."""
    labels: Tensor
    """(U, S): the token that each position predicts, `IGNORED` where nothing is scored."""
    slots: Tensor
    """(B,): where each completion stands among the U G segments."""
    length: int
    """Tokens of the longest completion; a segment may be longer."""

    def seen(self) -> Tensor:
        """(U, 1, S, S) booleans: what each token attends to."""
        return who_sees_whom(self.prompt, self.frame.segments, self.frame.length)

    def unpack(self, values: Tensor) -> Tensor:
        """(U, S) values of the tokens as (B, T), a row for each completion."""
        return self.pick(values[:, self.frame.lead :].reshape(-1, self.frame.length))

    def pick(self, values: Tensor) -> Tensor:
        """(U G, T) values of the segments as (B, T), a row for each completion."""
        return values[self.slots, : self.length]


def pack_groups(
    ids: Tensor, mask: Tensor, length: int, most: int | None = None, longest: int | None = None
) -> PackedGroups | None:
    """Pack the completions of each prompt into one row.

    Args:
        ids: (B, P + T), prompts padded on the left and completions on the right.
        mask: (B, P + T), 0 on the padding.
        length: T.
        most: completions of one row; a prompt with more, as when the same problem was drawn twice,
            has several rows. No limit if not given.
        longest: T of a fixed shape that many batches have in common, at least `length`; the rows
            are then padded (`Frame.rounded`). If not given they are as short as they can be.

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
    B, P, T = len(ids), ids.shape[1] - length, length
    groups = find_groups(ids[:, :P].masked_fill(mask[:, :P] == 0, -1), most)
    frame = Frame(len(groups.first), P - 1, groups.largest, T)
    if longest is not None:
        frame = frame.rounded(-(-B // frame.segments), longest)
    U, S = frame.rows, frame.tokens
    if U * S >= B * (P + T) or U * S**2 > MOST_PAIRS * B * (P + T) ** 2:
        return None
    packed, labels = ids.new_zeros(U, S), ids.new_full((U, S), IGNORED)
    prompt = torch.zeros(U, frame.lead, dtype=torch.bool, device=ids.device)
    place = slice(frame.lead - (P - 1), frame.lead)  # prompts end where the first segment begins
    packed[: len(groups.first), place] = ids[groups.first, : P - 1]
    prompt[: len(groups.first), place] = mask[groups.first, : P - 1] != 0
    segments = ids.new_zeros(U * frame.segments, frame.length)
    segments[groups.slots, :T] = ids[:, P - 1 : -1]
    packed[:, frame.lead :] = segments.view(U, -1)
    segments.fill_(IGNORED)
    segments[groups.slots, :T] = ids[:, P:].masked_fill(mask[:, P:] == 0, IGNORED)
    labels[:, frame.lead :] = segments.view(U, -1)
    return PackedGroups(frame, packed, prompt, labels, groups.slots, T)


@dataclass(frozen=True)
class Groups:
    """Rows that are alike, at most G together: the first of each group and each row's slot."""

    first: Tensor
    """(U,): a row of each group."""
    largest: int
    """G: rows of the largest group."""
    slots: Tensor
    """(B,): group x G + the row's number within its group."""


def find_groups(rows: Tensor, most: int | None = None) -> Groups:
    """Which rows are alike.

    Args:
        rows: (B, P) integers.
        most: rows of one group; more that are alike make several groups.

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
    largest = counts.max().clamp(max=most or len(rows))
    parts = (counts + largest - 1) // largest  # groups of each kind
    before = parts.cumsum(0) - parts
    G, U = torch.stack([largest, parts.sum()]).tolist()  # the one look at the GPU
    of = torch.arange(len(counts), device=rows.device).repeat_interleave(parts, output_size=U)
    part = torch.arange(U, device=rows.device) - before[of]
    slots = (before[kind] + number // G) * G + number % G
    return Groups(first=order[starts[of] + part * G], largest=G, slots=slots)


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
    segment = ((place - lead) // T).clamp(min=-1)
    allowed = (segment[:, None] == segment[None]) | (segment[None] == -1)
    allowed &= place[:, None] >= place[None]
    visible = torch.cat([prompt, prompt.new_ones(U, G * T)], dim=1)
    # A padded token sees itself: with nothing to attend to it would give NaN, which survives.
    itself = torch.eye(S, dtype=torch.bool, device=device)
    return ((allowed & visible[:, None]) | itself)[:, None]


def round_up(number: int, step: int) -> int:
    """The next multiple of a step.

    Example:
        >>> round_up(81, 8), round_up(8, 8)
        (88, 8)
    """
    return -(-number // step) * step
