"""Labels without gold: who votes, who is left out, and what each completion earns by it.

Plain voting (TTRL, arXiv 2504.16084), M-GRPO (arXiv 2512.13070: policy and anchor vote together,
too certain trajectories are left out) and Co-rewarding-II (arXiv 2508.00410: the anchor votes
alone) are one rule with different electorates. The gold is read for the log alone.

Legend: P prompts, G completions of each by the policy, N by the anchor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mesotron.config.training import ObjectiveConfig
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.objectives.vote import (
    Vote,
    agree,
    agreement,
    describe_votes,
    grade_labels,
    majority,
)

Answers = Sequence[Sequence[str | None]]


@dataclass(frozen=True, kw_only=True)
class Ballots:
    """The answers of a rollout batch.

    Args:
        policy: [P][G], answers of the completions that are rewarded.
        anchor: [P][N], answers that only vote; N may be 0.
        dropped: [P][G], rewarded completions that are left out; all False if empty.
        anchor_dropped: [P][N], the same for the anchor's.
        from_anchor: how many of each G, at the end, the anchor sampled (the merged variant).
    """

    policy: Answers
    anchor: Answers
    dropped: Sequence[Sequence[bool]] = ()
    anchor_dropped: Sequence[Sequence[bool]] = ()
    from_anchor: int = 0


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What a vote gave.

    Args:
        rewards: [P][G], 1 or 0; None for a completion that was left out.
        votes: one for each prompt.
        metrics: votes/share, votes/abstained and, with an anchor, votes/agreement.
    """

    rewards: list[list[float | None]]
    votes: list[Vote]
    metrics: dict[str, float] = field(default_factory=dict)


def label_by_vote(ballots: Ballots, objective: ObjectiveConfig, seed: object = 0) -> Labels:
    """Label each prompt by majority and reward the completions that agree.

    Args:
        ballots: all processes' answers, whole groups.
        objective: `tie`, `min_vote_share`, and its name, which says who votes.
        seed: of random ties; give another one for each batch.

    Example:
        >>> ballots = Ballots(policy=[["7", "8", None]], anchor=[["8"]])
        >>> label_by_vote(ballots, ObjectiveConfig(name="mgrpo")).rewards
        [[0.0, 1.0, 0.0]]
    """
    ours = _without(ballots.policy, ballots.dropped)
    theirs = _without(ballots.anchor, ballots.anchor_dropped)
    split = len(ours[0]) - ballots.from_anchor if ballots.from_anchor else None

    def elect(electorates: Answers) -> list[Vote]:
        options = {"tie": objective.tie, "min_share": objective.min_vote_share}
        return [majority(a, seed=(seed, k), **options) for k, a in enumerate(electorates)]

    alone = objective.name == "corewarding" and any(map(len, theirs))
    votes = elect(theirs if alone else [[*a, *b] for a, b in zip(ours, theirs, strict=True)])
    metrics = describe_votes(votes)
    anchors = [[*a[split:], *b] if split else b for a, b in zip(ours, theirs, strict=True)]
    if any(map(len, anchors)):
        metrics |= agreement(elect([a[:split] for a in ours]), elect(anchors))
    rewards: list[list[float | None]] = [
        list(agree(answers, vote.label))
        for answers, vote in zip(ballots.policy, votes, strict=True)
    ]
    for row, out in zip(rewards, ballots.dropped):
        row[:] = [None if left else reward for reward, left in zip(row, out, strict=True)]
    return Labels(rewards=rewards, votes=votes, metrics=metrics)


def grade(
    labels: Labels,
    golds: Sequence[str | None],
    correct: Sequence[Sequence[bool]],
    verifier: Verifier,
) -> dict[str, float]:
    """votes/label_accuracy and votes/reward_accuracy, where golds are known; never for training.

    Args:
        labels: of the batch.
        golds: [P], None where it is not known.
        correct: [P][G], whether the strict answer is the gold.
        verifier: decides whether label and gold are the same.
    """
    known = [
        k
        for k, (gold, vote) in enumerate(zip(golds, labels.votes, strict=True))
        if gold is not None
    ]
    labelled = [k for k in known if labels.votes[k].label is not None]
    right = verifier.same(
        [labels.votes[k].label or "" for k in labelled], [golds[k] or "" for k in labelled]
    )
    pairs = [
        (reward, hit)
        for k in labelled
        for reward, hit in zip(labels.rewards[k], correct[k], strict=True)
        if reward is not None
    ]
    return grade_labels(right, [r for r, _ in pairs], [hit for _, hit in pairs])


def _without(answers: Answers, dropped: Sequence[Sequence[bool]]) -> list[list[str | None]]:
    """The answers with None, an abstention, where a completion was left out."""
    if not dropped:
        return [list(row) for row in answers]
    return [
        [None if left else answer for answer, left in zip(row, out, strict=True)]
        for row, out in zip(answers, dropped, strict=True)
    ]
