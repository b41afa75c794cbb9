"""Votes: ties, abstention, who votes, and the filter of too certain trajectories."""

import numpy as np
import pytest
import torch

from mesotron.config import ObjectiveConfig
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.labels import (
    Ballots,
    Vote,
    label_accuracy,
    label_by_vote,
    low_entropy_outliers,
    majority,
    vote_metrics,
)


def test_the_majority_of_those_who_answered():
    assert majority(["8", "7", None, "7", None]) == Vote("7", 2 / 3, 3)


@pytest.mark.parametrize("answers", [[], [None, None]])
def test_nobody_answered(answers):
    assert majority(answers) == Vote(None, 0.0, 0)


def test_an_even_vote():
    even = ["9", "7", "7", "9", "3"]
    assert majority(even).label == "9"
    assert majority(even, tie="abstain") == Vote(None, 2 / 5, 5)
    drawn = {majority(even, tie="random", seed=seed).label for seed in range(40)}
    assert drawn == {"9", "7"}
    again = [majority(even, tie="random", seed=(5, 1)).label for _ in range(5)]
    assert len(set(again)) == 1


def test_a_clear_vote_is_no_tie():
    assert majority(["7", "7", "9"], tie="abstain").label == "7"


def test_a_share_below_the_least_gives_no_label():
    assert majority(["7", "7", "9", "3"], min_share=0.5).label == "7"
    assert majority(["7", "7", "9", "3"], min_share=0.51) == Vote(None, 0.5, 4)


def test_figures_of_votes():
    votes = [Vote("7", 1.0, 4), Vote(None, 0.4, 5), Vote(None, 0.0, 0)]
    assert vote_metrics(votes) == {"votes/share": 0.7, "votes/abstained": 2 / 3}


def labels(name="mgrpo", *, policy, anchor=None, **options):
    anchor = anchor or [[] for _ in policy]
    ballots = Ballots(policy=policy, anchor=anchor, **options)
    return label_by_vote(ballots, ObjectiveConfig(name=name))


def test_policy_and_anchor_vote_together_in_mgrpo():
    found = labels(policy=[["7", "8", "8"]], anchor=[["7", "7"]])
    assert found.votes == [Vote("7", 3 / 5, 5)]
    assert found.rewards == [[1.0, 0.0, 0.0]]
    assert found.metrics["votes/agreement"] == 0


def test_the_anchor_votes_alone_in_corewarding():
    found = labels("corewarding", policy=[["8", "8", "7"]], anchor=[["7"]])
    assert found.rewards == [[0.0, 0.0, 1.0]]


def test_in_evaluation_there_is_no_anchor_and_the_policy_votes():
    assert labels("corewarding", policy=[["8", "8", "7"]]).rewards == [[1.0, 1.0, 0.0]]


def test_dropped_completions_neither_vote_nor_are_rewarded():
    found = labels(
        policy=[["7", "7", "8"]],
        anchor=[["8", "7"]],
        dropped=[[True, False, False]],
        anchor_dropped=[[False, True]],
    )
    assert found.votes == [Vote("8", 2 / 3, 3)]
    assert found.rewards == [[None, 0.0, 1.0]]


def test_one_survivor_labels_itself():
    found = labels(policy=[["7", "8"]], dropped=[[True, False]])
    assert found.rewards == [[None, 1.0]]


def test_without_an_anchor_mgrpo_is_a_plain_vote():
    policy = [["7", None, "8", "8"], ["1", "2", "1", "2"]]
    assert labels("mgrpo", policy=policy) == labels("vote", policy=policy)


def test_the_merged_variant_rewards_the_anchors_completions_too():
    found = labels(policy=[["8", "7", "7"]], from_anchor=1)
    assert found.rewards == [[0.0, 1.0, 1.0]]
    # The policy's own two are even, so its label is the first: 8, where the anchor says 7.
    assert found.metrics["votes/agreement"] == 0


def test_an_abstention_rewards_nobody_and_is_counted():
    found = labels(policy=[[None, None], ["7", "7"]])
    assert found.rewards == [[0.0, 0.0], [1.0, 1.0]]
    assert found.metrics == {"votes/share": 1.0, "votes/abstained": 0.5}


def test_labels_are_graded_where_there_is_gold():
    found = labels(policy=[["7", "8", "8"], ["1", "1", "2"], ["5", "5", "5"]])
    correct = [[False, True, True], [False, False, True], [False] * 3]
    with Verifier() as verifier:
        figures = label_accuracy(found, ["8.0", "2", None], correct, verifier)
    assert figures == {"votes/label_accuracy": 0.5, "votes/reward_accuracy": 0.5}


def test_no_gold_no_grade():
    with Verifier() as verifier:
        assert label_accuracy(labels(policy=[["7", "8"]]), [None], [[False, False]], verifier) == {}


def test_the_filter_by_hand():
    H = torch.tensor([[0.2, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 9.0], [1.0] * 8])
    # Q1 = 1.075, Q3 = 1.425, so the bound is 1.075 - 0.75 * 0.35 = 0.8125.
    found = low_entropy_outliers(H, 0.75)
    assert found.tolist() == [[True] + [False] * 7, [False] * 8]


def test_the_filter_agrees_with_numpy():
    H = torch.rand(50, 16, generator=torch.Generator().manual_seed(0))
    q1, q3 = np.quantile(H.numpy().astype(np.float64), [0.25, 0.75], axis=1, keepdims=True)
    assert np.array_equal(low_entropy_outliers(H, 0.75).numpy(), H.numpy() < q1 - 0.75 * (q3 - q1))


def test_the_filter_keeps_three_quarters():
    H = torch.randn(200, 8, generator=torch.Generator().manual_seed(0)).exp()
    assert low_entropy_outliers(H, 0.0).float().mean(dim=1).max() <= 0.25


@pytest.mark.parametrize(("size", "k"), [(3, 0.75), (8, None)])
def test_the_filter_can_be_off(size, k):
    assert not low_entropy_outliers(torch.arange(float(size))[None] ** 3, k).any()


def test_a_trajectory_without_tokens_is_no_outlier():
    H = torch.tensor([[torch.nan, 1.0, 1.1, 1.2, 1.3]])
    assert not low_entropy_outliers(H, 0.75).any()


def test_a_negative_width_is_refused():
    with pytest.raises(ValueError, match="negative"):
        low_entropy_outliers(torch.zeros(1, 8), -1.0)
