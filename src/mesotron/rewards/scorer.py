"""Scores a rollout: facts of every completion, majority-vote pseudo-labels, metrics of the groups.

A vote needs whole groups, and a group may span processes, so the trainer gathers facts before
voting; a plain TRL reward function would count a fragment.

Legend: P prompts, G completions per prompt by the policy, N by the anchor.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from torch import Tensor

from mesotron.answers.facts import Facts, Judge, summarise
from mesotron.config import ObjectiveConfig
from mesotron.probes import answer_diversity, group_signal, group_spreads
from mesotron.rewards.call import completion_texts, is_unfinished
from mesotron.rewards.votes import Ballots, label_accuracy, label_by_vote
from mesotron.tasks.gym import regrade

log = logging.getLogger("mesotron")
Item = TypeVar("Item")
Row = dict[str, Any]
# The advantages are computed in float32: the squares of larger rewards leave nothing of others.
MAX_REWARD = 1e6
TOO_LARGE = f"rewards beyond +-{MAX_REWARD:g} are clipped to that: scale the reward function down"


@dataclass(frozen=True, kw_only=True)
class Scored:
    rewards: Tensor  # [P, G], weighted totals; NaN where a completion was dropped
    facts: Sequence[Facts]  # P G; empty without a judge
    tolerance: float  # rewards closer than this are equal
    dropped: Sequence[bool] = ()  # P G, by the entropy filter; empty without one

    def spreads(self) -> list[float]:
        return group_spreads(self.rewards, self.tolerance).tolist()

    def metrics(self) -> dict[str, float]:
        """groups/*, and with facts also facts/* and answers/*."""
        facts = self.facts
        size = self.rewards.shape[1]
        if not facts:
            return group_signal(self.rewards, self.tolerance)

        graded = any(fact.graded for fact in facts)
        correct = in_groups([fact.correct for fact in facts], size) if graded else None
        answers = in_groups([fact.answer for fact in facts], size)
        signal = group_signal(self.rewards, self.tolerance, correct)

        return signal | summarise(facts) | answer_diversity(answers)


@dataclass
class Scorer:
    """Judges completions and labels them by vote."""

    objective: ObjectiveConfig  # resolved
    judge: Judge | None = None  # None for plain TRL rewards
    end_ids: Sequence[int] = ()  # any other last token means that a completion was cut

    def truncated(self, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
        return [not len(ids) or ids[-1] not in self.end_ids for ids in completion_ids]

    def annotate(
        self, rows: Sequence[Row], completions: Sequence[Any], completion_ids: Any
    ) -> tuple[list[Row], list[Facts]]:
        if self.judge is None:
            return list(rows), []

        cut = self.truncated(completion_ids)
        golds = [row.get("gold") for row in rows]
        cut = [a or is_unfinished(one) for a, one in zip(cut, completions, strict=True)]
        texts = completion_texts(completions)
        facts = self.judge.judge(texts, golds, cut)
        facts = regrade(facts, texts, [row.get("columns") for row in rows], self.judge.format)
        pairs = zip(rows, facts, strict=True)

        return [
            {
                **r,
                "facts": f,
                "truncated": f.truncated,
                "row": r,
            }
            for r, f in pairs
        ], facts

    def vote(
        self,
        facts: Sequence[Facts],  # P G, of the completions that train
        golds: Sequence[str | None],  # P G, None where unknown; for metrics only
        G: int,
        voters: Sequence[Facts],  # P N, of the anchor's completions that only vote
        dropped: tuple[list[bool], list[bool]],  # P G and P N, by the entropy filter, or empty
        from_anchor: int = 0,  # how many of each G the anchor sampled (merged variant)
        seed: object = 0,
    ) -> tuple[list[float | None], dict[str, float]]:
        """Rewards of all completions (None where dropped), and votes/* metrics."""
        assert self.judge is not None
        prompts = len(facts) // G
        N = len(voters) // prompts

        ballots = Ballots(
            policy=in_groups([fact.answer for fact in facts], G),
            anchor=in_groups([fact.answer for fact in voters], N) or [[]] * prompts,
            dropped=in_groups(dropped[0], G),
            anchor_dropped=in_groups(dropped[1], N),
            from_anchor=from_anchor,
        )

        labels = label_by_vote(ballots, self.objective, seed)
        pairs = zip(golds, facts, strict=True)
        known = [gold if fact.graded else None for gold, fact in pairs][::G]
        correct = in_groups([fact.correct for fact in facts], G)
        metrics = labels.metrics | label_accuracy(labels, known, correct, self.judge.verifier)

        return [reward for row in labels.rewards for reward in row], metrics


def bound_rewards(rewards: Tensor) -> Tensor:
    """Rewards within +-MAX_REWARD, with a warning if one was not; NaN stays."""
    if bool((rewards.abs() > MAX_REWARD).any()):
        warn_once(TOO_LARGE)
    return rewards.clamp(-MAX_REWARD, MAX_REWARD)


@cache
def warn_once(message: str) -> None:
    log.warning(message)


def vote(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """The reward function whose column the votes fill once all answers are gathered."""
    return [0.0] * len(completions)


def in_groups(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[k : k + size]) for k in range(0, len(items), size)] if size else []
