"""Votes: ties, abstention, who votes, and the filter of too certain trajectories."""

import numpy as np
import pytest
import torch

from mesotron.answers.verify import Verifier
from mesotron.rewards.votes import (
    Ballots,
    Vote,
    VoteRules,
    label_accuracy,
    label_by_vote,
    low_entropy_outliers,
    majority,
)

EVEN = ["9", "7", "7", "9", "3"]


@pytest.mark.parametrize(
    ("answers", "options", "vote"),
    [
        (["8", "7", None, "7", None], {}, Vote("7", 2 / 3, 3)),
        ([], {}, Vote(None, 0.0, 0)),
        ([None, None], {}, Vote(None, 0.0, 0)),
        (EVEN, {}, Vote("9", 2 / 5, 5)),
        (EVEN, {"tie": "abstain"}, Vote(None, 2 / 5, 5)),
        (["7", "7", "9"], {"tie": "abstain"}, Vote("7", 2 / 3, 3)),
        (["7", "7", "9", "3"], {"min_share": 0.5}, Vote("7", 0.5, 4)),
        (["7", "7", "9", "3"], {"min_share": 0.51}, Vote(None, 0.5, 4)),
    ],
)
def test_the_majority_of_those_who_answered(answers, options, vote):
    assert majority(answers, **options) == vote


def test_random_ties_depend_on_the_seed_alone():
    assert {majority(EVEN, tie="random", seed=k).label for k in range(40)} == {"9", "7"}
    assert len({majority(EVEN, tie="random", seed=(5, 1)).label for _ in range(5)}) == 1


def labels(name="mgrpo", *, policy, anchor=None, **options):
    anchor = anchor or [[] for _ in policy]
    ballots = Ballots(policy=policy, anchor=anchor, **options)
    return label_by_vote(ballots, VoteRules(anchor_alone=name == "corewarding"))


@pytest.mark.parametrize(
    ("name", "given", "votes", "rewards"),
    [
        (
            "mgrpo",
            {"policy": [["7", "8", "8"]], "anchor": [["7", "7"]]},
            [Vote("7", 3 / 5, 5)],
            [[1.0, 0.0, 0.0]],
        ),
        (
            "corewarding",
            {"policy": [["8", "8", "7"]], "anchor": [["7"]]},
            [Vote("7", 1.0, 1)],
            [[0.0, 0.0, 1.0]],
        ),
        # In evaluation there is no anchor.
        ("corewarding", {"policy": [["8", "8", "7"]]}, [Vote("8", 2 / 3, 3)], [[1.0, 1.0, 0.0]]),
        # Dropped completions neither vote nor are rewarded.
        (
            "mgrpo",
            {
                "policy": [["7", "7", "8"]],
                "anchor": [["8", "7"]],
                "dropped": [[True, False, False]],
                "anchor_dropped": [[False, True]],
            },
            [Vote("8", 2 / 3, 3)],
            [[None, 0.0, 1.0]],
        ),
    ],
)
def test_who_votes_and_who_is_rewarded(name, given, votes, rewards):
    result = labels(name, **given)
    assert (result.votes, result.rewards) == (votes, rewards)


def test_the_agreement_of_policy_and_anchor():
    result = labels(policy=[["7", "8", "8"]], anchor=[["7", "7"]])
    assert result.metrics["votes/agreement"] == 0

    # The merged variant rewards the anchor's completions too. The policy's own two are even, so
    # its label is the first: 8, where the anchor says 7.
    result = labels(policy=[["8", "7", "7"]], from_anchor=1)
    assert (result.rewards, result.metrics["votes/agreement"]) == ([[0.0, 1.0, 1.0]], 0)

    policy = [["7", None, "8", "8"], ["1", "2", "1", "2"]]
    assert labels("mgrpo", policy=policy) == labels("vote", policy=policy)


def test_an_abstention_gives_no_reward_and_is_counted():
    result = labels(policy=[[None, None], ["7", "7"]])
    assert result.rewards == [[0.0, 0.0], [1.0, 1.0]]
    assert result.metrics == {"votes/share": 1.0, "votes/abstained": 0.5}


def test_labels_are_graded_where_there_is_gold():
    result = labels(policy=[["7", "8", "8"], ["1", "1", "2"], ["5", "5", "5"]])
    correct = [[False, True, True], [False, False, True], [False] * 3]
    with Verifier() as verifier:
        metrics = label_accuracy(result, ["8.0", "2", None], correct, verifier)
        assert label_accuracy(labels(policy=[["7", "8"]]), [None], [[False] * 2], verifier) == {}

    assert metrics == {"votes/label_accuracy": 0.5, "votes/reward_accuracy": 0.5}


def test_the_filter_by_hand_and_by_numpy():
    H = torch.tensor([[0.2, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 9.0], [1.0] * 8])

    # Q1 = 1.075, Q3 = 1.425, so the bound is 1.075 - 0.75 * 0.35 = 0.8125.
    assert low_entropy_outliers(H, 0.75).tolist() == [[True] + [False] * 7, [False] * 8]

    # A trajectory without tokens is no outlier, nor is one of three; and the filter may be off.
    assert not low_entropy_outliers(torch.tensor([[torch.nan, 1.0, 1.1, 1.2, 1.3]]), 0.75).any()
    for size, k in ((3, 0.75), (8, None)):
        assert not low_entropy_outliers(torch.arange(float(size))[None] ** 3, k).any()

    # Four are enough: the quartiles of 0, 1, 1, 1 are 0.75 and 1.
    four = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    assert low_entropy_outliers(four, 0.75).tolist() == [[True, False, False, False]]

    H = torch.rand(50, 16, generator=torch.Generator().manual_seed(0))
    q1, q3 = np.quantile(H.numpy().astype(np.float64), [0.25, 0.75], axis=1, keepdims=True)
    assert np.array_equal(low_entropy_outliers(H, 0.75).numpy(), H.numpy() < q1 - 0.75 * (q3 - q1))


def test_in_a_tie_the_policys_own_answer_comes_before_the_anchors():
    ballots = Ballots(policy=[["7", "8"]], anchor=[["8", "7"]])
    assert label_by_vote(ballots, VoteRules()).rewards == [[1.0, 0.0]]
