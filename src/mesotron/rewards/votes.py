"""Majority-vote pseudo-labels: rewards from the completions' own answers, without the gold.

Plain voting (TTRL, arXiv 2504.16084; SRT, arXiv 2505.21444), M-GRPO (arXiv 2512.13070: policy and
anchor vote together, low-entropy outliers are dropped) and Co-rewarding-II (arXiv 2508.00410: the
anchor votes alone) are one rule with different voters. Answers must be canonical.

Legend: P prompts, G completions per prompt by the policy, N by the anchor.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mesotron.answers.majority import leaders
from mesotron.answers.verify import Verifier

Tie = Literal["first", "abstain", "random"]
Answers = Sequence[Sequence[str | None]]
Marks = Sequence[Sequence[bool]]


@dataclass(frozen=True)
class Vote:
    label: str | None  # the winning answer; None where the vote abstains
    share: float  # votes for the leader over votes cast; 0 without voters
    voters: int  # completions with an answer


@dataclass(frozen=True, kw_only=True)
class VoteRules:
    """Who votes, and what makes a majority."""

    tie: Tie = "first"
    min_share: float = 0.0  # a leader with a smaller share gives no label
    anchor_alone: bool = False  # the policy's completions do not vote if the anchor's do


@dataclass(frozen=True, kw_only=True)
class Ballots:
    """The answers of a rollout; completions marked as dropped do not count."""

    policy: Answers  # [P][G], of the completions that are rewarded
    anchor: Answers  # [P][N], only vote; N may be 0
    dropped: Marks = ()  # [P][G], or empty for none
    anchor_dropped: Marks = ()  # [P][N]
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
    winners, votes = leaders(answers)
    if not winners:
        return Vote(None, 0.0, 0)

    voters = sum(answer is not None for answer in answers)
    share = votes / voters

    label: str | None = winners[0]
    if len(winners) > 1 and tie == "abstain":
        label = None
    elif len(winners) > 1 and tie == "random":
        label = random.Random(repr(seed)).choice(winners)

    if share < min_share:
        label = None

    return Vote(label, share, voters)


def vote(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """The reward function, as TRL calls it, whose column `grpo.score` fills with the votes."""
    return [0.0] * len(completions)


def elect(electorates: Answers, rules: VoteRules, seed: object = 0) -> list[Vote]:
    """One vote for each group of answers."""
    votes = []
    for number, answers in enumerate(electorates):
        chosen = majority(answers, tie=rules.tie, min_share=rules.min_share, seed=(seed, number))
        votes.append(chosen)

    return votes


def label_by_vote(ballots: Ballots, rules: VoteRules, seed: object = 0) -> Labels:
    """Label each prompt by majority vote and reward the completions that agree.

    A prompt without a label gives equal rewards, hence no advantage. `seed` is of random ties.

    Example:
        >>> ballots = Ballots(policy=[["7", "8", None]], anchor=[["8"]])
        >>> label_by_vote(ballots, VoteRules()).rewards
        [[0.0, 1.0, 0.0]]
    """
    policy = without_dropped(ballots.policy, ballots.dropped)
    anchor = without_dropped(ballots.anchor, ballots.anchor_dropped)

    if rules.anchor_alone and any(map(len, anchor)):
        votes = elect(anchor, rules, seed)
    else:
        votes = elect(joined(policy, anchor), rules, seed)

    rewards: list[list[float | None]] = []
    for answers, vote in zip(ballots.policy, votes, strict=True):
        agrees = [vote.label is not None and answer == vote.label for answer in answers]
        rewards.append([float(agreed) for agreed in agrees])

    for group, dropped in zip(rewards, ballots.dropped, strict=False):
        for place, is_out in enumerate(dropped):
            if is_out:
                group[place] = None

    shares = [vote.share for vote in votes if vote.voters]
    num_abstained = sum(vote.label is None for vote in votes)

    metrics = {
        "votes/share": sum(shares) / max(len(shares), 1),
        "votes/abstained": num_abstained / max(len(votes), 1),
        **agreement(policy, anchor, ballots.from_anchor, rules, seed),
    }
    return Labels(rewards=rewards, votes=votes, metrics=metrics)


def joined(first: Answers, second: Answers) -> list[list[str | None]]:
    return [[*a, *b] for a, b in zip(first, second, strict=True)]


def agreement(
    policy: Answers, anchor: Answers, from_anchor: int, rules: VoteRules, seed: object
) -> dict[str, float]:
    """votes/agreement: how often policy and anchor alone choose the same label, if any."""
    by_policy = [answers[: len(answers) - from_anchor] for answers in policy]
    by_anchor = [answers[len(answers) - from_anchor :] for answers in policy]
    by_anchor = joined(by_anchor, anchor)
    if not any(map(len, by_anchor)):
        return {}

    same = []
    for a, b in zip(elect(by_policy, rules, seed), elect(by_anchor, rules, seed), strict=True):
        if a.label is not None and b.label is not None:
            same.append(a.label == b.label)

    if same:
        return {"votes/agreement": sum(same) / len(same)}

    return {}


def without_dropped(answers: Answers, dropped: Marks) -> list[list[str | None]]:
    """Dropped completions abstain."""
    kept = [list(group) for group in answers]
    for group, marks in zip(kept, dropped, strict=False):
        for place, is_out in enumerate(marks):
            if is_out:
                group[place] = None

    return kept


def label_accuracy(
    labels: Labels,
    golds: Sequence[str | None],
    correct: Sequence[Sequence[bool]],
    verifier: Verifier,
) -> dict[str, float]:
    """votes/label_accuracy and votes/reward_accuracy, where golds are known; for the log only."""
    known = []
    for place, (vote, gold) in enumerate(zip(labels.votes, golds, strict=True)):
        if gold is not None and vote.label is not None:
            known.append(place)

    chosen = [labels.votes[place].label or "" for place in known]
    is_right = verifier.same(chosen, [golds[place] or "" for place in known])

    agrees = []
    for place in known:
        for reward, hit in zip(labels.rewards[place], correct[place], strict=True):
            if reward is not None:
                agrees.append(bool(reward) == hit)

    shares = {"votes/label_accuracy": is_right, "votes/reward_accuracy": agrees}
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
