"""Majority vote: a label for each prompt from the completions' own answers, without the gold.

TTRL (arXiv 2504.16084) and SRT (arXiv 2505.21444) train on such labels; M-GRPO and Co-rewarding-II
change who votes. Answers must be in canonical form: "1/2" and "0.5" would split a vote. A share of
votes is agreement of the policy with itself; it is never accuracy.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tie = Literal["first", "abstain", "random"]


@dataclass(frozen=True)
class Vote:
    """The outcome for one prompt.

    Args:
        label: the winning answer, or None where the vote abstains.
        share: votes for the leader over votes cast, 0 to 1; 0 if nobody voted.
        voters: how many had an answer.
    """

    label: str | None
    share: float
    voters: int


def majority(
    answers: Sequence[str | None], *, tie: Tie = "first", min_share: float = 0.0, seed: object = 0
) -> Vote:
    """The answer that most voters gave.

    Args:
        answers: one for each voter; None abstains and is not counted in the share.
        tie: what an even vote means: the answer that came first, no label, or a draw.
        min_share: a leader with less than this share gives no label.
        seed: of the draw, anything with a `repr`; the same seed and answers draw the same.

    Returns:
        The vote; its label is None if there were no answers, an even vote under "abstain", or too
        small a share.

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


def agree(answers: Sequence[str | None], label: str | None) -> list[float]:
    """The reward of each answer: 1 if it is the label, else 0; all 0 where the vote abstained.

    Equal rewards have no advantage, so a prompt without a label teaches nothing.

    Example:
        >>> agree(["7", None, "8"], "7")
        [1.0, 0.0, 0.0]
    """
    return [float(label is not None and answer == label) for answer in answers]


def describe_votes(votes: Sequence[Vote]) -> dict[str, float]:
    """votes/share, the mean share of the leader over prompts with voters, and votes/abstained, the
    share of prompts without a label.

    Example:
        >>> describe_votes([Vote("7", 0.5, 4), Vote(None, 0.0, 0)])
        {'votes/share': 0.5, 'votes/abstained': 0.5}
    """
    shares = [vote.share for vote in votes if vote.voters]
    return {
        "votes/share": sum(shares) / max(len(shares), 1),
        "votes/abstained": sum(vote.label is None for vote in votes) / max(len(votes), 1),
    }


def agreement(ours: Sequence[Vote], theirs: Sequence[Vote]) -> dict[str, float]:
    """votes/agreement: how often two electorates, such as the policy and its anchor, choose alike.

    Prompts where one of them has no label are left out; nothing is returned if that is all.

    Example:
        >>> seven, eight = Vote("7", 1.0, 2), Vote("8", 1.0, 2)
        >>> agreement([seven, seven], [seven, eight])
        {'votes/agreement': 0.5}
    """
    both = [
        (a.label, b.label)
        for a, b in zip(ours, theirs, strict=True)
        if None not in (a.label, b.label)
    ]
    return {"votes/agreement": sum(a == b for a, b in both) / len(both)} if both else {}


def grade_labels(
    right: Sequence[bool], rewards: Sequence[float], correct: Sequence[bool]
) -> dict[str, float]:
    """How good the labels are, where the gold is known: for the log alone, never for training.

    Args:
        right: for each prompt with a label and a gold, whether the label is the gold.
        rewards: of each completion of such prompts, 0 or 1.
        correct: of each such completion, whether its answer is the gold.

    Returns:
        votes/label_accuracy and votes/reward_accuracy (the share of completions that got the reward
        which the gold would have given); each is left out if there is nothing to count.

    Example:
        >>> grade_labels([True, False], [1.0, 0.0, 1.0, 0.0], [True, False, False, False])
        {'votes/label_accuracy': 0.5, 'votes/reward_accuracy': 0.75}
    """
    found = {}
    if right:
        found["votes/label_accuracy"] = sum(right) / len(right)
    if rewards:
        same = [bool(r) == c for r, c in zip(rewards, correct, strict=True)]
        found["votes/reward_accuracy"] = sum(same) / len(same)
    return found
