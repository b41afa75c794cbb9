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
        self._epoch = -1
        self._order: list[int] = []  # of this epoch

    def take(self, number: int) -> list[int]:
        rows = []
        for _ in range(number):
            epoch, place = divmod(self.taken, self.num_prompts)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = self._shuffle(epoch)

            rows.append(self._order[place])
            self.taken += 1

        return rows

    def _shuffle(self, epoch: int) -> list[int]:
        # Not the seed itself, from which the batches draw their order of these prompts.
        generator = torch.Generator().manual_seed((self.seed + 1) * 1_000_003 + epoch)
        return torch.randperm(self.num_prompts, generator=generator).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": {}, "values": json.dumps({"taken": self.taken})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken = json.loads(state_dict["values"])["taken"]


class Resampled(NamedTuple):
    batch: Batch  # put together from several rounds
    silent: list[bool]  # which of its P groups have no signal
    rounds: int


class Round(NamedTuple):
    """What a round sampled."""

    batch: Batch  # of this process
    spreads: list[float]  # of the rewards of every group of all processes


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
        size = len(inputs)

        # Blocks do not exchange groups: processes, or single groups where one spans processes.
        blocks = self.world
        if size % G:
            blocks = size * self.world // G

        rounds = self._first_round(inputs, blocks, score)
        num_rounds = 1
        chosen = self._choose(rounds, blocks)

        while missing_places(chosen, blocks) and num_rounds < self.objective.dynamic_max_rounds:
            rows = self._further(missing_places(chosen, blocks), blocks)
            rounds.append(Round(*score(rows)))
            num_rounds += 1
            chosen = self._choose(rounds, blocks)

        batch = self._merge(rounds, chosen, size)
        return Resampled(batch, [source is None for source in chosen], num_rounds)

    def _choose(self, rounds: list[Round], blocks: int) -> list[Source | None]:
        spreads = [each.spreads for each in rounds]
        return fill_places(spreads, blocks, widest=self.objective.dynamic_choice == "widest")

    def _merge(self, rounds: list[Round], chosen: list[Source | None], size: int) -> Batch:
        """This process's rows of the chosen groups; an empty place keeps its first group."""
        rows = []
        for row in range(self.rank * size, (self.rank + 1) * size):
            place, offset = divmod(row, self.group_size)
            source = chosen[place] or Source(0, place)

            own_rows = len(rounds[source.round].batch.advantages)
            own_row = source.place * self.group_size + offset - self.rank * own_rows
            rows.append((source.round, own_row))

        return merge_rows([each.batch for each in rounds], rows)

    def _first_round(self, inputs: list[Row], blocks: int, score: ScoreRound) -> list[Round]:
        """With oversampling, extra prompts are sampled with the batch's own and then split off."""
        G = self.group_size
        size = len(inputs)
        first = first_round_rows(size, G, self.objective.dynamic_oversample)
        if first == size:
            return [Round(*score(inputs))]

        own_groups = size // G
        groups = first // G  # per process
        self.added = groups - own_groups
        batch, spreads = score([*inputs, *self._further(self.added, blocks)])

        own: list[float] = []
        extra: list[float] = []
        for start in range(0, len(spreads), groups):
            own += spreads[start : start + own_groups]
            extra += spreads[start + own_groups : start + groups]

        return [
            Round(batch.rows(slice(size)), own),
            Round(batch.rows(slice(size, None)), extra),
        ]

    def ahead(self) -> list[Row]:
        """The rows that the next first round will add; they stay in the stream."""
        taken = self.stream.taken
        rows = self._further(self.added, self.world)
        self.stream.taken = taken

        return rows

    def _further(self, number: int, blocks: int) -> list[Row]:
        """This process's rows of `number` further prompts per block."""
        rows = []
        for prompt in self.stream.take(number * blocks):
            rows += [prompt] * self.group_size

        share = len(rows) // self.world
        own = rows[self.rank * share :][:share]

        distinct = list(dict.fromkeys(own))
        read = dict(zip(distinct, self.dataset.__getitems__(distinct), strict=True))
        return [dict(read[row]) for row in own]


def fill_places(
    rounds: Sequence[Sequence[float]], blocks: int, widest: bool = False
) -> list[Source | None]:
    """Give each of P places a group with a signal from its own block; None where none is left.

    Args:
        rounds: the spread of each group's rewards, 0 for no signal; the first round has P groups,
            later ones may have fewer.
        blocks: parts that do not exchange groups: W of them where each process holds whole groups,
            P where a group spans processes.
        widest: prefer groups with the largest spread.
    """
    size = len(rounds[0]) // blocks
    chosen: list[Source | None] = []
    for block in range(blocks):
        candidates = with_signal(rounds, block, blocks)
        if widest:  # a stable sort: of equals the first
            candidates.sort(key=lambda source: -rounds[source.round][source.place])

        candidates = candidates[:size]
        stays = {source.place for source in candidates if source.round == 0}
        further = [source for source in candidates if source.round > 0]

        # A group of the first round keeps its place, so nothing moves when nothing is missing.
        for place in range(block * size, (block + 1) * size):
            if place in stays:
                chosen.append(Source(0, place))
            else:
                chosen.append(further.pop(0) if further else None)

    return chosen


def with_signal(rounds: Sequence[Sequence[float]], block: int, blocks: int) -> list[Source]:
    """The groups of a block whose rewards differ, in the order in which they were sampled."""
    sources = []
    for number, spreads in enumerate(rounds):
        share = len(spreads) // blocks
        for place in range(block * share, (block + 1) * share):
            if spreads[place] > 0:
                sources.append(Source(number, place))

    return sources


def missing_places(chosen: Sequence[Source | None], blocks: int) -> int:
    """The most empty places of any block: how many groups each block samples next."""
    size = len(chosen) // blocks
    missing = []
    for start in range(0, len(chosen), size):
        missing.append(list(chosen[start : start + size]).count(None))

    return max(missing)


def merge_rows(rounds: Sequence[Batch], rows: Sequence[tuple[int, int]]) -> Batch:
    """One batch, padded to one length, of (round, row) pairs; scalars are the first round's."""
    if rounds[0].images:
        raise ValueError("dynamic_sampling='resample' does not support images: use 'drop'")

    used = sorted({number for number, _ in rows})
    starts = {}
    start = 0
    for number in used:
        starts[number] = start
        start += len(rounds[number].advantages)

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
