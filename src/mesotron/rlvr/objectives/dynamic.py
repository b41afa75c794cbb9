"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all alike teach nothing.

They can be dropped from the loss, or replaced by groups of further prompts; where there are more
groups than places, those can be taken whose rewards differ most (learnability, arXiv 2502.12272).
Which group takes which place is decided from the gathered rewards by every process alike, so no
process waits for another and no completion moves between processes. Here are the rules; the trainer
samples.

Legend: P prompts of a rollout batch, G completions of each, W processes, B = P G / W rows of one.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Rows of these are padded on the left; of the others on the right.
LEFT_PADDED = ("prompt_ids", "prompt_mask")
# What stands where a row is shorter than the longest; 0 if not named here.
PADDING = {"tool_mask": 1.0, "importance_sampling_ratio": 1.0}
PICTURES = ("pixel_values", "num_images", "image_grid_thw")


class Source(NamedTuple):
    """Where a place of the batch takes its group from: a round, and a place in that round."""

    round: int
    place: int


def fill_places(
    rounds: Sequence[Sequence[float]], blocks: int, widest: bool = False
) -> list[Source | None]:
    """Give each place of the batch a group with a signal that its process has.

    Args:
        rounds: for each round the spread of the groups that were sampled in it, 0 where there is
            no signal. The first round has P groups; later ones may have fewer, in the same blocks.
        blocks: number of equal parts that do not exchange groups: W where each process holds whole
            groups, P where a group spans processes and can only stay in its place.
        widest: take the groups of the largest spread if there are more than places, not the first.

    Returns:
        P entries; None where there is no group with a signal left.

    Example:
        >>> fill_places([[0.5, 0.0], [0.1, 0.2]], blocks=1)
        [Source(round=0, place=0), Source(round=1, place=0)]
        >>> fill_places([[0.5, 0.0], [0.1, 0.2]], blocks=1, widest=True)
        [Source(round=0, place=0), Source(round=1, place=1)]
    """
    size = len(rounds[0]) // blocks
    chosen: list[Source | None] = []
    for block in range(blocks):
        found = list(_signals(rounds, block, blocks))
        if widest:  # of equals the first
            found.sort(key=lambda source: -rounds[source.round][source.place])
        found = found[:size]
        own = {source.place: source for source in found if source.round == 0}
        rest = iter(source for source in found if source.round > 0)
        # A group of the first round keeps its place, so that nothing moves when nothing is missing.
        places = range(block * size, (block + 1) * size)
        chosen += [own[place] if place in own else next(rest, None) for place in places]
    return chosen


def _signals(rounds: Sequence[Sequence[float]], block: int, blocks: int) -> Iterator[Source]:
    for number, groups in enumerate(rounds):
        size = len(groups) // blocks
        for place in range(block * size, (block + 1) * size):
            if groups[place] > 0:
                yield Source(number, place)


def missing_places(chosen: Sequence[Source | None], blocks: int) -> int:
    """The most empty places that a block has: how many groups each must sample next.

    Example:
        >>> missing_places([None, Source(0, 1), None, None], blocks=2)
        2
    """
    size = len(chosen) // blocks
    starts = range(0, len(chosen), size)
    return max(sum(source is None for source in chosen[k : k + size]) for k in starts)


def merge_rows(rounds: Sequence[dict[str, Any]], rows: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """One batch out of several: rows that are named by round and number, padded to one length.

    Args:
        rounds: TRL's scored batches of one process; all have the same keys.
        rows: (round, row of that round) for each row of the result.

    Returns:
        A batch like the others. Scalars are taken from the first round.

    Example:
        >>> a, b = {"advantages": torch.tensor([1.0, 2.0])}, {"advantages": torch.tensor([3.0])}
        >>> merge_rows([a, b], [(1, 0), (0, 1)])
        {'advantages': tensor([3., 2.])}
    """
    if any(key in rounds[0] for key in PICTURES):
        raise ValueError(
            "dynamic_sampling='resample' cannot exchange prompts with pictures: use 'drop' or 'off'"
        )
    used = sorted({number for number, _ in rows})
    sizes = [_num_rows(rounds[number]) for number in used]
    starts = dict(zip(used, [0, *accumulate(sizes)], strict=False))
    places = torch.tensor([starts[number] + row for number, row in rows])
    merged = {}
    for key, first in rounds[0].items():
        if first.ndim == 0:
            merged[key] = first
            continue
        parts = [rounds[number][key] for number in used]
        width = max(part.shape[1] for part in parts) if first.ndim > 1 else 0
        merged[key] = torch.cat([_pad(part, width, key) for part in parts])[places.to(first.device)]
    return merged


def split_rows(batch: dict[str, Any], first: int) -> list[dict[str, Any]]:
    """Two batches out of one: its first rows, and the others. Both keep its scalars.

    Example:
        >>> split_rows({"advantages": torch.tensor([1.0, 2.0, 3.0])}, 2)
        [{'advantages': tensor([1., 2.])}, {'advantages': tensor([3.])}]
    """
    parts = (slice(first), slice(first, None))
    return [{key: x[part] if x.ndim else x for key, x in batch.items()} for part in parts]


def _num_rows(batch: dict[str, Any]) -> int:
    return next(len(x) for x in batch.values() if x.ndim)


def _pad(rows: Tensor, width: int, key: str) -> Tensor:
    short = width - rows.shape[1] if rows.ndim > 1 else 0
    if not short:
        return rows
    end = (short, 0) if key in LEFT_PADDED else (0, short)
    return torch.nn.functional.pad(rows, end, value=PADDING.get(key, 0))


class PromptStream:
    """Further prompts, in an order of their own that all processes share and a checkpoint keeps.

    Args:
        num_prompts: size of the dataset.
        seed: of the order; each pass over the data has another one.

    Example:
        >>> stream = PromptStream(3, seed=0)
        >>> sorted(stream.take(3)), stream.values()
        ([0, 1, 2], {'taken': 3})
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.num_prompts = num_prompts
        self.seed = seed
        self.taken = 0
        self._kept: tuple[int, list[int]] = (-1, [])

    def take(self, number: int) -> list[int]:
        """The next rows of the dataset, by number."""
        rows = []
        for _ in range(number):
            turn, place = divmod(self.taken, self.num_prompts)
            rows.append(self._order(turn)[place])
            self.taken += 1
        return rows

    def _order(self, turn: int) -> list[int]:
        if self._kept[0] != turn:
            # Never the seed itself, from which the batches draw their order of the same prompts.
            generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + turn)
            self._kept = turn, torch.randperm(self.num_prompts, generator=generator).tolist()
        return self._kept[1]

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: a place in an order is a number."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Nothing to take over."""

    def values(self) -> dict[str, int]:
        """How far the order was used, for a checkpoint."""
        return {"taken": self.taken}

    def load_values(self, values: dict[str, int]) -> None:
        """Go on where `values` was written."""
        self.taken = int(values["taken"])
