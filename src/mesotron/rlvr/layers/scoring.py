"""Scoring a rollout inside TRL's trainer: facts of every completion, and labels by vote.

A vote needs whole groups, and a group may span processes, so answers are gathered before anybody
counts; a plain TRL reward function would count a fragment.
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from mesotron.config import SELF_LABELED
from mesotron.rlvr.answers.facts import Facts, Judge
from mesotron.rlvr.labels import Ballots, label_accuracy, label_by_vote, low_entropy_outliers
from mesotron.rlvr.layers.anchored import AnchoredRollouts
from mesotron.rlvr.layers.measure import Scored, in_groups, measure_repetition


class Scoring(AnchoredRollouts):
    """Fifth layer: `judge` turns completions into facts, `scored` keeps the last round's.

    `filtered` says which of the last round's completions, over all processes, the entropy filter
    has left out; it is empty where there is no filter.
    """

    judge: Judge | None
    scored: Scored
    filtered: list[bool]

    @property
    def self_labelled(self) -> bool:
        """Whether labels come from votes; the gold is then read for the log alone."""
        return self.objective.name in SELF_LABELED

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        facts: list[Facts] = []
        self.filtered = []
        rows, cut = inputs, self._truncated(completion_ids_list)
        if self.judge is not None:
            golds = [row.get("gold") for row in inputs]
            facts = self.judge.judge(texts(completions), golds, cut)
            rows = [
                {**row, "facts": fact, "truncated": end, "row": row}
                for row, fact, end in zip(inputs, facts, cut, strict=True)
            ]
        rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids_list)
        facts = gather_object(facts)
        if self.self_labelled:
            golds = gather_object([row.get("gold") for row in inputs])
            self._fill_in_votes(rewards, facts, golds, completion_ids_list)
        self._remember(rewards, facts)
        own = torch.tensor([measure_repetition(completion_ids_list)], device=rewards.device)
        self._note({"completions/repetition": self._gather(own).mean().item()})
        return rewards

    def _remember(self, rewards: Tensor, facts: Sequence[Facts]) -> None:
        """Keep what the batch earned, as TRL will add it up, for metrics and dynamic sampling."""
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = torch.nan
        tolerance = self.objective.dynamic_tolerance
        table = total.view(-1, self._group_size())
        self.scored = Scored(rewards=table, facts=facts, tolerance=tolerance)

    def _truncated(self, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        return [not ids or ids[-1] not in ends for ids in completion_ids]

    def _fill_in_votes(
        self, rewards: Tensor, facts: list[Facts], golds: list[str | None], completion_ids: Any
    ) -> None:
        """Write the votes' rewards to the first column; dropped completions have none at all."""
        G, judge = self._group_size(), self.judge
        assert judge is not None
        number = (self.objective.momentum_generations or 0) if self._anchor_rows[1] else 0
        wanted = number * len(facts) // G
        theirs = self._judge_voters(judge)[:wanted]
        dropped, anchor_dropped = self._outliers(completion_ids, wanted)
        self.filtered = dropped
        prompts = len(facts) // G
        ballots = Ballots(
            policy=in_groups([fact.answer for fact in facts], G),
            anchor=in_groups([fact.answer for fact in theirs], number) or [[]] * prompts,
            dropped=in_groups(dropped, G),
            anchor_dropped=in_groups(anchor_dropped, number),
            from_anchor=self._anchor_share(),
        )
        labels = label_by_vote(ballots, self.objective, seed=(self.args.seed, self._step))
        self._note(labels.metrics)
        graded = [g if f.graded else None for g, f in zip(golds, facts, strict=True)][::G]
        correct = in_groups([fact.correct for fact in facts], G)
        self._note(label_accuracy(labels, graded, correct, judge.verifier))
        flat = [x for row in labels.rewards for x in row]
        rewards[:, 0] = rewards.new_tensor([torch.nan if x is None else x for x in flat])
        rewards[rewards[:, 0].isnan()] = torch.nan

    def _judge_voters(self, judge: Judge) -> list[Facts]:
        """Facts of every process's completions by the anchor, without gold."""
        ids = self._anchor_rows[1]
        if not ids:
            return []
        found = self.processing_class.batch_decode(ids, skip_special_tokens=True)  # pyright: ignore
        return gather_object(judge.judge(found, [None] * len(found), self._truncated(ids)))

    def _outliers(self, completion_ids: Any, wanted: int) -> tuple[list[bool], list[bool]]:
        """Which of the batch's and of the anchor's completions the entropy filter leaves out."""
        k = self.objective.entropy_filter
        if self.objective.name != "mgrpo" or k == "off" or not self.policy.training:
            return [], []
        prompts, voters = self._anchor_rows
        H = self._trajectory_entropies(self._prompt_ids + prompts, list(completion_ids) + voters)
        mine = self._gather(H[: len(completion_ids)])
        theirs = self._gather(H[len(completion_ids) :])[:wanted] if voters else H[:0]
        G = self._group_size()
        groups = len(mine) // G
        table = torch.cat([mine.view(groups, -1), theirs.view(groups, -1)], dim=1)
        out = low_entropy_outliers(table, k)
        self._note({"anchor/dropped": out.float().mean().item()})
        return out[:, :G].flatten().tolist(), out[:, G:].flatten().tolist()


def vote(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """The column that votes are written to once every process's answers are there."""
    return [0.0] * len(completions)


def texts(completions: Sequence[Any]) -> list[str]:
    """The texts of completions, which TRL holds as texts or as lists of messages."""
    return [x if isinstance(x, str) else str(x[-1]["content"] or "") for x in completions]
