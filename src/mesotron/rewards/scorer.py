"""Judges completions, and labels them by vote.

A vote needs whole groups, and a group may span processes, so facts are gathered before voting; a
plain TRL reward function would count a fragment.

Legend: P prompts, G completions per prompt by the policy, N by the anchor.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from torch import Tensor

from mesotron.answers.facts import Facts, Judge
from mesotron.rewards.call import completion_texts, is_unfinished
from mesotron.rewards.votes import Ballots, VoteRules, label_accuracy, label_by_vote
from mesotron.tasks.gym import regrade

log = logging.getLogger("mesotron")
Item = TypeVar("Item")
Row = dict[str, Any]

# The advantages are computed in float32: the squares of larger rewards leave nothing of others.
MAX_REWARD = 1e6
TOO_LARGE = f"rewards beyond +-{MAX_REWARD:g} are clipped to that: scale the reward function down"


@dataclass(frozen=True)
class Scorer:
    """Judges completions and labels them by vote."""

    judge: Judge | None = None  # None for plain TRL rewards
    end_ids: Sequence[int] = ()  # any other last token means that a completion was cut
    rules: VoteRules = field(default_factory=VoteRules)

    def truncated(self, completion_ids: Sequence[Sequence[int]]) -> list[bool]:
        return [not len(ids) or ids[-1] not in self.end_ids for ids in completion_ids]

    def annotate(
        self, rows: Sequence[Row], completions: Sequence[Any], completion_ids: Any
    ) -> tuple[list[Row], list[Facts]]:
        """Rows with the facts of their completions, for reward functions; and the facts."""
        if self.judge is None:
            return list(rows), []

        is_cut = []
        for cut, completion in zip(self.truncated(completion_ids), completions, strict=True):
            is_cut.append(cut or is_unfinished(completion))

        texts = completion_texts(completions)
        golds = [row.get("gold") for row in rows]
        facts = self.judge.judge(texts, golds, is_cut)
        facts = regrade(facts, texts, [row.get("columns") for row in rows], self.judge.format)

        annotated = []
        for row, fact in zip(rows, facts, strict=True):
            annotated.append({**row, "facts": fact, "truncated": fact.truncated, "row": row})

        return annotated, facts

    def judge_texts(
        self, texts: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> list[Facts]:
        """Facts of completions without a gold answer."""
        assert self.judge is not None
        return self.judge.judge(texts, [None] * len(texts), self.truncated(completion_ids))

    def vote(
        self,
        facts: Sequence[Facts],  # P G, of the completions that train
        golds: Sequence[str | None],  # P G, None where unknown; for metrics only
        G: int,
        voters: Sequence[Facts] = (),  # P N, of the anchor's completions that only vote
        dropped: tuple[list[bool], list[bool]] = ([], []),  # P G and P N, or empty
        from_anchor: int = 0,  # how many of each G the anchor sampled (merged variant)
        seed: object = 0,
    ) -> tuple[list[float | None], dict[str, float]]:
        """Rewards of all completions (None where dropped), and votes/* metrics."""
        assert self.judge is not None
        P = len(facts) // G
        N = len(voters) // P

        ballots = Ballots(
            policy=in_groups([fact.answer for fact in facts], G),
            anchor=in_groups([fact.answer for fact in voters], N) or [[]] * P,
            dropped=in_groups(dropped[0], G),
            anchor_dropped=in_groups(dropped[1], N),
            from_anchor=from_anchor,
        )
        labels = label_by_vote(ballots, self.rules, seed)

        known = [
            gold if fact.graded else None for gold, fact in zip(golds[::G], facts[::G], strict=True)
        ]
        correct = in_groups([fact.correct for fact in facts], G)
        accuracy = label_accuracy(labels, known, correct, self.judge.verifier)

        rewards = []
        for group in labels.rewards:
            for reward in group:
                rewards.append(reward)

        return rewards, labels.metrics | accuracy


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
    if size:
        return [list(items[k : k + size]) for k in range(0, len(items), size)]

    return []
