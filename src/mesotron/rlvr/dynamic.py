"""Dynamic sampling (DAPO, arXiv 2503.14476): replace groups whose rewards are all equal.

Such groups give no gradient. `resample` replaces them by groups of further prompts; with
oversampling the groups whose rewards differ most can be kept (learnability, arXiv 2502.12272).
Every process decides from the gathered rewards, so no completion moves between processes.

Legend: P prompts of a rollout batch, G completions per prompt, W processes, B = P G / W rows of
one process. A place is one of the P groups of the batch that trains.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mesotron.config import ObjectiveConfig
from mesotron.rlvr.grpo import Batch, Row
from mesotron.rlvr.trl_arguments import first_round_rows

# Padded on the left; the others on the right.
LEFT_PADDED = ("prompt_ids", "prompt_mask")
# Padding values other than 0.
PADDING = {"sampler_ratio": 1.0}

ScoreRound = Callable[[list[Row]], tuple[Batch, list[float]]]
"""Samples and scores rows: this process's batch, and the spread of rewards of every group."""


class Source(NamedTuple):
    round: int
    place: int


class PromptStream:
    """Further prompts in an order of their own, shared by all processes and kept in checkpoints."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.num_prompts = num_prompts
        self.seed = seed
        self.taken = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, number: int) -> list[int]:
        rows = []
        for _ in range(number):
            epoch, place = divmod(self.taken, self.num_prompts)
            if self._order[0] != epoch:
                # Not the seed itself, from which the batches draw their order of these prompts.
                generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + epoch)
                order = torch.randperm(self.num_prompts, generator=generator).tolist()
                self._order = epoch, order

            rows.append(self._order[1][place])
            self.taken += 1

        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": {}, "values": json.dumps({"taken": self.taken})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = json.loads(state_dict["values"])["taken"]


class Resampled(NamedTuple):
    batch: Batch  # put together from several rounds
    silent: list[bool]  # which of its P groups have no signal
    rounds: int


@dataclass
class Resampler:
    """Samples further prompts until every place has a group with a signal, or the cap."""

    dataset: Any
    stream: PromptStream
    objective: ObjectiveConfig
    group_size: int  # G
    rank: int = 0
    world: int = 1  # W
    added: int = 0  # prompts per process by which the latest first round was larger

    def __call__(self, inputs: list[Row], score: ScoreRound) -> Resampled:
        G = self.group_size
        own = len(inputs)

        # Blocks do not exchange groups: processes, or single groups where one spans processes.
        blocks = self.world if own % G == 0 else own * self.world // G
        batches, spreads = self._first_round(inputs, blocks, score)
        widest = self.objective.dynamic_choice == "widest"
        chosen = fill_places(spreads, blocks, widest)

        rounds = 1
        while missing_places(chosen, blocks) and rounds < self.objective.dynamic_max_rounds:
            batch, spread = score(self._further(missing_places(chosen, blocks), blocks))
            batches.append(batch)
            spreads.append(spread)
            chosen = fill_places(spreads, blocks, widest)
            rounds = rounds + 1

        sizes = [len(batch.advantages) for batch in batches]
        rows = []
        for row in range(self.rank * own, (self.rank + 1) * own):
            place, offset = divmod(row, G)
            number, source = chosen[place] or Source(0, place)
            rows.append((number, source * G + offset - self.rank * sizes[number]))

        return Resampled(merge_rows(batches, rows), [one is None for one in chosen], rounds)

    def _first_round(
        self, inputs: list[Row], blocks: int, score: ScoreRound
    ) -> tuple[list[Batch], list[list[float]]]:
        # With oversampling the extra prompts are sampled with the batch's own, then split off.
        G = self.group_size
        first = first_round_rows(len(inputs), G, self.objective.dynamic_oversample)
        if first == len(inputs):
            batch, spread = score(inputs)
            return [batch], [spread]

        own = len(inputs) // G
        each = first // G  # groups per process
        self.added = each - own
        batch, spread = score([*inputs, *self._further(self.added, blocks)])
        by_process = [spread[k : k + each] for k in range(0, len(spread), each)]

        spreads = [
            [x for groups in by_process for x in groups[part]]
            for part in (slice(own), slice(own, None))
        ]

        split = [batch.rows(slice(len(inputs))), batch.rows(slice(len(inputs), None))]
        return split, spreads

    def ahead(self) -> list[Row]:
        """The rows that the next first round will add; they stay in the stream."""
        taken = self.stream.taken
        rows = self._further(self.added, self.world)
        self.stream.taken = taken

        return rows

    def _further(self, number: int, blocks: int) -> list[Row]:
        # This process's rows of `number` further prompts per block.
        rows = []
        for r in self.stream.take(number * blocks):
            for _ in range(self.group_size):
                rows.append(r)

        share = len(rows) // self.world
        own = rows[self.rank * share :][:share]
        distinct = list(dict.fromkeys(own))
        read = dict(zip(distinct, self.dataset.__getitems__(distinct), strict=True))

        return [dict(read[row]) for row in own]


def fill_places(
    rounds: Sequence[Sequence[float]], blocks: int, widest: bool = False
) -> list[Source | None]:
    """Give each of P places a group with a signal from its own block; None where none is left.
    `rounds` has the spread of each group's rewards, 0 for no signal; the first has P groups, later
    ones may have fewer. `blocks` do not exchange groups: W of them where each process holds whole
    groups, P where a group spans processes. `widest` prefers groups with the largest spread."""
    size = len(rounds[0]) // blocks
    chosen: list[Source | None] = []
    for block in range(blocks):
        candidates: list[Source] = []
        for number, groups in enumerate(rounds):
            share = len(groups) // blocks
            places = range(block * share, (block + 1) * share)
            candidates += [Source(number, place) for place in places if groups[place] > 0]

        if widest:  # a stable sort: of equals the first
            candidates.sort(key=lambda source: -rounds[source.round][source.place])

        candidates = candidates[:size]
        own = {source.place: source for source in candidates if source.round == 0}
        rest = iter(source for source in candidates if source.round > 0)

        # A group of the first round keeps its place, so nothing moves when nothing is missing.
        places = range(block * size, (block + 1) * size)
        chosen += [own[place] if place in own else next(rest, None) for place in places]

    return chosen


def missing_places(chosen: Sequence[Source | None], blocks: int) -> int:
    """The most empty places of any block: how many groups each block samples next."""
    size = len(chosen) // blocks
    starts = range(0, len(chosen), size)
    return max(sum(source is None for source in chosen[k : k + size]) for k in starts)


def merge_rows(rounds: Sequence[Batch], rows: Sequence[tuple[int, int]]) -> Batch:
    """One batch, padded to one length, of (round, row) pairs; scalars are the first round's."""
    if rounds[0].images:
        raise ValueError("dynamic_sampling='resample' does not support images: use 'drop'")

    used = sorted({number for number, _ in rows})
    sizes = [len(rounds[number].advantages) for number in used]
    starts = dict(zip(used, [0, *accumulate(sizes)], strict=False))
    places = torch.tensor([starts[number] + row for number, row in rows])

    merged = {}
    for name, column in rounds[0].columns().items():
        parts = [getattr(rounds[number], name) for number in used]
        merged[name] = join(parts, name)[places.to(column.device)]

    return replace(rounds[0], **merged)


def join(parts: Sequence[Tensor], name: str) -> Tensor:
    """Rows of several rounds, padded to the longest."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))

    width = max(part.shape[1] for part in parts)
    padded = []
    for part in parts:
        missing = width - part.shape[1]
        sides = (missing, 0) if name in LEFT_PADDED else (0, missing)
        padded.append(torch.nn.functional.pad(part, sides, value=PADDING.get(name, 0)))

    return torch.cat(padded)
