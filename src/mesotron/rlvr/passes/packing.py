"""Shared prompts: a training row holds a prompt once, followed by all its completions.

TRL gives the model a row per completion, so a prompt with G completions is read G times. Here a
mask keeps the completions of one row from seeing each other. Log-probabilities and gradients are
the same up to rounding. Full attention only.

Shapes: B completions of up to T tokens, U rows, each a prompt padded to P and at most G completions
of it; a packed row has S = P - 1 + G T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from mesotron.sampling.draw import round_up

IGNORED = -100  # the label that is not scored
# Largest ratio of attention's token pairs in packed rows to those in unpacked rows. The mask of
# packed rows is materialized, a byte per pair.
MAX_PAIRS = 2
# Rows of a fixed shape are a multiple of this: few shapes serve a dataset, and attention kernels
# want mask rows to start at such a multiple.
STEP = 8


@dataclass(frozen=True)
class Frame:
    rows: int  # U
    lead: int  # P - 1: tokens before the first segment
    segments: int  # G
    length: int  # T: tokens of a segment

    @property
    def tokens(self) -> int:
        return self.lead + self.segments * self.length

    def rounded(self, fewest: int, longest: int) -> "Frame":
        """A frame that also fits similar batches: `fewest` is U of a batch of whole groups (others
        get steps of a quarter of it more), `longest` T for all of them."""
        rows = fewest + round_up(self.rows - fewest, max(fewest // 4, 1))
        end = self.segments * longest
        return Frame(rows, round_up(self.lead + end, STEP) - end, self.segments, longest)

    def positions(self, device: torch.device) -> Tensor:
        """(1, S): positions as if each completion stood alone."""
        step = torch.arange(self.lead + self.length, device=device)
        return torch.cat([step[: self.lead], step[self.lead :].repeat(self.segments)])[None]


@dataclass(frozen=True)
class PackedGroups:
    """Inputs of a forward pass over packed rows, and how to get back to the completions."""

    frame: Frame
    # A prompt without its last token, then G segments of that last token and the completion without
    # its own last token, so that every position predicts its label.
    ids: Tensor  # (U, S)
    prompt: Tensor  # (U, P - 1) booleans, false on the padding
    labels: Tensor  # (U, S): the token that each position predicts, or `IGNORED`
    slots: Tensor  # (B,): the segment of each completion, of U G
    length: int  # of the longest completion; a segment may be longer

    def visible(self) -> Tensor:
        """(U, 1, S, S) booleans: what each token attends to."""
        return attention_mask(self.prompt, self.frame.segments, self.frame.length)

    def unpack(self, values: Tensor) -> Tensor:
        """(U, S) values of tokens as (B, T) of completions."""
        return self.pick(values[:, self.frame.lead :].reshape(-1, self.frame.length))

    def pick(self, values: Tensor) -> Tensor:
        """(U G, T) values of segments as (B, T) of completions."""
        return values[self.slots, : self.length]


def pack_groups(
    ids: Tensor, mask: Tensor, length: int, most: int | None = None, longest: int | None = None
) -> PackedGroups | None:
    """Pack the completions of each prompt into one row; None if that saves no tokens, or costs far
    more attention pairs (completions much longer than the prompt).

    ids and mask are (B, P + T), prompts padded on the left; `most` limits the completions of a row;
    `longest` is T of a fixed shape that many batches share (`Frame.rounded`).

    Example:
        >>> ids = torch.tensor([[7, 8, 1, 2], [7, 8, 3, 4]])
        >>> packed = pack_groups(ids, torch.ones_like(ids), length=2)
        >>> packed.ids.tolist(), packed.labels.tolist()
        ([[7, 8, 1, 8, 3]], [[-100, 1, 2, 3, 4]])
    """
    B = len(ids)
    P = ids.shape[1] - length
    T = length
    groups = find_groups(ids[:, :P].masked_fill(mask[:, :P] == 0, -1), most)

    frame = Frame(len(groups.first), P - 1, groups.largest, T)
    if longest is not None:
        frame = frame.rounded(-(-B // frame.segments), longest)

    U = frame.rows
    S = frame.tokens
    saves_tokens = U * S < B * (P + T)
    few_pairs = U * S**2 <= MAX_PAIRS * B * (P + T) ** 2
    if not (saves_tokens and few_pairs):
        return None

    # Prompts end where the first segment begins.
    place = slice(frame.lead - (P - 1), frame.lead)
    used = slice(len(groups.first))

    prompt = torch.zeros(U, frame.lead, dtype=torch.bool, device=ids.device)
    prompt[used, place] = mask[groups.first, : P - 1] != 0

    packed = ids.new_zeros(U, S)
    packed[used, place] = ids[groups.first, : P - 1]
    packed[:, frame.lead :] = in_segments(ids[:, P - 1 : -1], groups.slots, frame, padding=0)

    labels = ids.new_full((U, S), IGNORED)
    scored = ids[:, P:].masked_fill(mask[:, P:] == 0, IGNORED)
    labels[:, frame.lead :] = in_segments(scored, groups.slots, frame, padding=IGNORED)

    return PackedGroups(
        frame=frame,
        ids=packed,
        prompt=prompt,
        labels=labels,
        slots=groups.slots,
        length=T,
    )


def in_segments(values: Tensor, slots: Tensor, frame: Frame, padding: int) -> Tensor:
    """(U, G T) from (B, T) values of completions, each in its segment."""
    segments = values.new_full((frame.rows * frame.segments, frame.length), padding)
    segments[slots, : values.shape[1]] = values

    return segments.view(frame.rows, -1)


@dataclass(frozen=True)
class Groups:
    """Groups of equal rows, at most G each."""

    first: Tensor  # (U,): one row of each group
    largest: int  # G: size of the largest group
    slots: Tensor  # (B,): group x G + the row's number in its group


def find_groups(rows: Tensor, most: int | None = None) -> Groups:
    """Group equal rows of (B, P) integers; more than `most` equal ones make several groups."""
    device = rows.device
    _, kind, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)

    # Rows by kind, and the number of each row among those of its kind.
    order = kind.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    number = torch.empty_like(kind)
    number[order] = torch.arange(len(rows), device=device) - starts[kind[order]]

    # A kind with more rows than the largest group is split into several groups.
    largest = counts.max().clamp(max=most or len(rows))
    parts = (counts + largest - 1) // largest
    before = parts.cumsum(0) - parts  # groups of the kinds in front
    G, U = torch.stack([largest, parts.sum()]).tolist()  # the only synchronization

    kinds = torch.arange(len(counts), device=device).repeat_interleave(parts, output_size=U)
    part = torch.arange(U, device=device) - before[kinds]

    return Groups(
        first=order[starts[kinds] + part * G],
        largest=G,
        slots=(before[kind] + number // G) * G + number % G,
    )


def keep_groups(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of shuffled micro-batches in an order that keeps a prompt's completions together;
    groups stay in their random order."""
    prompts = [x["prompt_ids"].masked_fill(x["prompt_mask"] == 0, -1) for x in batches]
    groups = find_groups(torch.cat(prompts))
    order = groups.first[groups.slots // groups.largest].argsort(stable=True)

    columns = {}
    for name, value in batches[0].items():
        has_rows = value is not None and value.ndim > 0
        columns[name] = torch.cat([batch[name] for batch in batches])[order] if has_rows else value

    return split_tensor_dict(columns, len(batches))


def attention_mask(prompt: Tensor, G: int, T: int) -> Tensor:
    """(U, 1, S, S): each token sees its prompt (U, P - 1), and what precedes it in its segment."""
    U, lead = prompt.shape
    S = lead + G * T
    device = prompt.device
    place = torch.arange(S, device=device)

    # -1 for the prompt, then the segment's number; only equal ones see each other.
    segment = ((place - lead) // T).clamp(min=-1)
    allowed = (segment[:, None] == segment[None]) | (segment[None] == -1)
    allowed &= place[:, None] >= place[None]

    visible = torch.cat([prompt, prompt.new_ones(U, G * T)], dim=1)

    # A padded token sees itself: with nothing to attend to it would give NaN, which survives.
    itself = torch.eye(S, dtype=torch.bool, device=device)
    return ((allowed & visible[:, None]) | itself)[:, None]
