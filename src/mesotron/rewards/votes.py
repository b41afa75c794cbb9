"""Majority-vote pseudo-labels: rewards from the completions' own answers, without the gold.

Plain voting (TTRL, arXiv 2504.16084; SRT, arXiv 2505.21444), M-GRPO (arXiv 2512.13070: policy and
anchor vote together, low-entropy outliers are dropped) and Co-rewarding-II (arXiv 2508.00410: the
anchor votes alone) are one rule with different voters. Answers must be canonical.

Legend: P prompts, G completions per prompt by the policy, N by the anchor.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mesotron.answers.verify import Verifier
from mesotron.config import ObjectiveConfig

Tie = Literal["first", "abstain", "random"]
Answers = Sequence[Sequence[str | None]]


@dataclass(frozen=True)
class Vote:
    label: str | None  # the winning answer; None where the vote abstains
    share: float  # votes for the leader over votes cast; 0 without voters
    voters: int  # completions with an answer


@dataclass(frozen=True, kw_only=True)
class Ballots:
    """The answers of a rollout batch; completions marked as dropped do not count."""

    policy: Answers  # [P][G], of the completions that are rewarded
    anchor: Answers  # [P][N], only vote; N may be 0
    dropped: Sequence[Sequence[bool]] = ()  # [P][G], or empty for none
    anchor_dropped: Sequence[Sequence[bool]] = ()  # [P][N]
    from_anchor: int = 0  # how many of each G, at the end, the anchor sampled (merged variant)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Rewards [P][G] (1, 0, or None where dropped), one vote per prompt, and votes/* metrics."""

    rewards: list[list[float | None]]
    votes: list[Vote]
    metrics: dict[str, float]


def majority(
    answers: Sequence[str | None], *, tie: Tie = "first", min_share: float = 0.0, seed: object = 0
) -> Vote:
    """The most frequent answer.

    Args:
        answers: one per voter; None abstains and does not count in the share.
        tie: a tie gives the answer that came first, no label, or a random leader.
        min_share: a leader with a smaller share gives no label.
        seed: of a random tie, anything with a `repr`.

    Example:
        >>> majority(["7", None, "8", "7"])
        Vote(label='7', share=0.6666666666666666, voters=3)
        >>> majority(["7", "8"], tie="abstain").label is None
        True
    """
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return Vote(None, 0.0, 0)

    votes = max(counts.values())
    leaders = [answer for answer, number in counts.items() if number == votes]
    share = votes / counts.total()

    label: str | None = leaders[0]
    if len(leaders) > 1 and tie == "abstain":
        label = None
    elif len(leaders) > 1 and tie == "random":
        label = random.Random(repr(seed)).choice(leaders)

    return Vote(label if share >= min_share else None, share, counts.total())


def label_by_vote(ballots: Ballots, objective: ObjectiveConfig, seed: object = 0) -> Labels:
    """Label each prompt by majority vote and reward the completions that agree.

    A prompt without a label gives equal rewards, hence no advantage. `seed` is of random ties.

    Example:
        >>> ballots = Ballots(policy=[["7", "8", None]], anchor=[["8"]])
        >>> label_by_vote(ballots, ObjectiveConfig(name="mgrpo")).rewards
        [[0.0, 1.0, 0.0]]
    """
    policy = _mask_dropped(ballots.policy, ballots.dropped)
    anchor = _mask_dropped(ballots.anchor, ballots.anchor_dropped)
    split = len(policy[0]) - ballots.from_anchor if ballots.from_anchor else None

    def elect(electorates: Answers) -> list[Vote]:
        options = {"tie": objective.tie, "min_share": objective.min_vote_share}
        return [majority(a, seed=(seed, k), **options) for k, a in enumerate(electorates)]

    anchor_alone = objective.name == "corewarding" and any(map(len, anchor))
    votes = elect(
        anchor if anchor_alone else [[*a, *b] for a, b in zip(policy, anchor, strict=True)]
    )
    shares = [vote.share for vote in votes if vote.voters]

    metrics = {
        "votes/share": sum(shares) / max(len(shares), 1),
        "votes/abstained": sum(vote.label is None for vote in votes) / max(len(votes), 1),
    }

    by_anchor = [[*a[split:], *b] if split else b for a, b in zip(policy, anchor, strict=True)]
    if any(map(len, by_anchor)):
        # How often the two electorates choose the same label, where both have one.
        both = zip(elect([a[:split] for a in policy]), elect(by_anchor), strict=True)
        same = [a.label == b.label for a, b in both if None not in (a.label, b.label)]
        metrics |= {"votes/agreement": sum(same) / len(same)} if same else {}

    rewards: list[list[float | None]] = [
        [float(vote.label is not None and answer == vote.label) for answer in answers]
        for answers, vote in zip(ballots.policy, votes, strict=True)
    ]
    for row, dropped in zip(rewards, ballots.dropped):
        row[:] = [None if out else reward for reward, out in zip(row, dropped, strict=True)]

    return Labels(rewards=rewards, votes=votes, metrics=metrics)


def _mask_dropped(answers: Answers, dropped: Sequence[Sequence[bool]]) -> list[list[str | None]]:
    dropped = dropped or [[False] * len(row) for row in answers]
    return [
        [None if out else answer for answer, out in zip(row, outs, strict=True)]
        for row, outs in zip(answers, dropped, strict=True)
    ]


def label_accuracy(
    labels: Labels,
    golds: Sequence[str | None],
    correct: Sequence[Sequence[bool]],
    verifier: Verifier,
) -> dict[str, float]:
    """votes/label_accuracy and votes/reward_accuracy, where golds are known; for the log only."""
    chosen = [vote.label for vote in labels.votes]
    known = [k for k, gold in enumerate(golds) if gold is not None and chosen[k] is not None]
    right = verifier.same([chosen[k] or "" for k in known], [golds[k] or "" for k in known])

    same = [
        bool(reward) == hit
        for k in known
        for reward, hit in zip(labels.rewards[k], correct[k], strict=True)
        if reward is not None
    ]

    shares = {"votes/label_accuracy": right, "votes/reward_accuracy": same}
    return {name: sum(hits) / len(hits) for name, hits in shares.items() if hits}


def low_entropy_outliers(H: Tensor, k: float | None) -> Tensor:
    """M-GRPO's IQR filter: trajectories whose entropy is below Q1 - k IQR of their group, [P, G].

    High outliers stay; at least three quarters of a group survive, and all of fewer than 4.

    Args:
        H: [P, G], mean entropy over tokens in nats; NaN (no tokens) is never an outlier.
        k: width in interquartile ranges, at least 0; None drops nothing.

    Example:
        >>> low_entropy_outliers(torch.tensor([[0.1, 1.0, 1.1, 1.2, 1.3]]), k=0.75)
        tensor([[ True, False, False, False, False]])

    References:
        Bai et al., M-GRPO: Stabilizing Self-Supervised Reinforcement Learning with
        Momentum-Anchored Policy Optimization, 2025, arXiv 2512.13070.
    """
    if k is None or H.shape[1] < 4:  # quartiles of fewer are meaningless
        return torch.zeros_like(H, dtype=torch.bool)

    levels = torch.tensor([0.25, 0.75], dtype=torch.float64, device=H.device)
    q1, q3 = torch.nanquantile(H.double(), levels, dim=1, keepdim=True)
    return H.double() < q1 - k * (q3 - q1)
