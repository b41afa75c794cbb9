"""Dynamic sampling inside TRL's trainer (DAPO, arXiv 2503.14476): drop or replace silent groups.

A silent group is one whose rewards are all alike. `mesotron.rlvr.dynamic` has the rules;
here further rounds are sampled and batches are put together.
"""

import time
from typing import Any

from mesotron.probes import group_spreads
from mesotron.rlvr.dynamic import (
    PromptStream,
    Source,
    fill_places,
    merge_rows,
    missing_places,
    split_rows,
)
from mesotron.rlvr.layers.measure import in_groups, measure_rollout
from mesotron.rlvr.layers.scoring import Scoring
from mesotron.rlvr.objectives import first_round_rows


class Resampling(Scoring):
    """Sixth layer: a rollout is one round of sampling, or several."""

    stream: PromptStream

    def _start_stream(self) -> None:
        """Give resampling its further prompts; call it once the trainer is built."""
        if self.objective.dynamic_sampling != "resample":
            return
        self.stream = PromptStream(len(self.train_dataset), self.args.seed)  # pyright: ignore
        self.stateful["prompts"] = self.stream
        # Further rounds have any number of rows.
        own = self.args.per_device_train_batch_size * (self.args.steps_per_generation or 1)
        more = self.objective.dynamic_oversample
        self.usual_rows = first_round_rows(own, self.num_generations, more)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.policy.training:
            return self._score_round(inputs)
        started = time.perf_counter()
        self._move_anchor()
        if self.objective.dynamic_sampling == "resample":
            batch, silent = self._resample(inputs)
            batch = self._drop(batch, silent)
        else:
            batch = self._score_round(inputs)
        if self.objective.dynamic_sampling == "drop":
            silent = [spread == 0 for spread in self._spreads()]
            self._note({"dynamic/filled": 1 - sum(silent) / len(silent)})
            batch = self._drop(batch, silent)
        self._note({"time/rollout": time.perf_counter() - started})
        return batch

    def _score_round(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample and score one batch, and measure it."""
        batch = super()._generate_and_score_completions(inputs)
        if self.filtered:
            batch = self._leave_out(batch, self.filtered)
        found = measure_rollout(self.scored)
        self._note(found)
        if (
            self.scale_rewards == "batch"
            or self.multi_objective_aggregation != "sum_then_normalize"
        ):
            # TRL computed it from the spread of the batch, which says nothing about groups.
            self._metrics[self._mode()]["frac_reward_zero_std"][-1] = found["groups/zero_signal"]
        return batch

    def _resample(self, inputs: list[dict[str, Any]]) -> tuple[dict[str, Any], list[bool]]:
        """Sample further prompts until every place has a group with a signal, or the cap.

        Returns:
            The batch, and which of its groups are silent nevertheless.
        """
        own, G, W = len(inputs), self._group_size(), self.accelerator.num_processes
        blocks = W if own % G == 0 else own * W // G
        batches, found = self._first_round(inputs, blocks)
        widest = self.objective.dynamic_choice == "widest"
        chosen, rounds = fill_places(found, blocks, widest), 1
        while missing_places(chosen, blocks) and rounds < self.objective.dynamic_max_rounds:
            batches.append(self._score_round(self._further(missing_places(chosen, blocks), blocks)))
            found.append(self._spreads())
            chosen, rounds = fill_places(found, blocks, widest), rounds + 1
        silent = [source is None for source in chosen]
        filled = 1 - sum(silent) / len(silent)
        self._note({"dynamic/rounds": float(rounds), "dynamic/filled": filled})
        rows = self._rows(chosen, [len(batch["completion_ids"]) for batch in batches])
        return merge_rows(batches, rows), silent

    def _first_round(
        self, inputs: list[dict[str, Any]], blocks: int
    ) -> tuple[list[dict[str, Any]], list[list[float]]]:
        """The batch's own prompts, and those sampled beside them as a round of their own; with the
        spreads of their groups."""
        G = self._group_size()
        first = first_round_rows(len(inputs), G, self.objective.dynamic_oversample)
        if first == len(inputs):
            return [self._score_round(inputs)], [self._spreads()]
        own, each = len(inputs) // G, first // G  # groups of a process
        batch = self._score_round([*inputs, *self._further(each - own, blocks)])
        by_process = in_groups(self._spreads(), each)
        found = [
            [spread for groups in by_process for spread in groups[part]]
            for part in (slice(own), slice(own, None))
        ]
        return split_rows(batch, len(inputs)), found

    def _further(self, number: int, blocks: int) -> list[dict[str, Any]]:
        """This process's rows of so many further prompts in each block."""
        G, W = self._group_size(), self.accelerator.num_processes
        rows = [row for row in self.stream.take(number * blocks) for _ in range(G)]
        share = len(rows) // W
        mine = rows[self.accelerator.process_index * share :][:share]
        read = {row: self.train_dataset[row] for row in dict.fromkeys(mine)}  # pyright: ignore
        return [dict(read[row]) for row in mine]

    def _spreads(self) -> list[float]:
        """How much the rewards of each group of the round just scored differ; 0 is no signal."""
        return group_spreads(self.scored.rewards, self.scored.tolerance).tolist()

    def _rows(self, chosen: list[Source | None], sizes: list[int]) -> list[tuple[int, int]]:
        """For each of this process's rows the round and the row that it comes from."""
        G, rank = self._group_size(), self.accelerator.process_index
        rows = []
        for row in range(rank * sizes[0], (rank + 1) * sizes[0]):
            place, offset = divmod(row, G)
            number, source = chosen[place] or Source(0, place)
            rows.append((number, source * G + offset - rank * sizes[number]))
        return rows

    def _drop(self, batch: dict[str, Any], silent: list[bool]) -> dict[str, Any]:
        """Take groups out of the loss."""
        G = self._group_size()
        return self._leave_out(batch, [out for out in silent for _ in range(G)])
