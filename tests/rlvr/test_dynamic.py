"""Dynamic sampling: which groups are silent, what replaces them, and the order of prompts."""

import pytest
import torch

from mesotron.probes import group_spreads
from mesotron.rlvr import dynamic
from mesotron.rlvr.grpo import Batch
from mesotron.rlvr.trl_arguments import first_round_rows

NAN = torch.nan


def test_the_spread_of_a_group_ignores_missing_rewards():
    rewards = torch.tensor(
        [
            [1.0, 0.0, 1.0, 0.0],
            [0.3, 0.3, 0.3, 0.3 + 1e-7],
            [NAN, 2.0, NAN, 0.0],
            [1.0, NAN, NAN, NAN],
            [NAN] * 4,
        ]
    )

    assert group_spreads(rewards, 1e-6).tolist() == [0.5, 0.0, 1.0, 0.0, 0.0]
    assert (group_spreads(rewards, 1e-9) == 0).tolist() == [False, False, False, True, True]
    assert group_spreads(torch.tensor([[0.0, 1e-30]]), 0.0).item() > 0


@pytest.mark.parametrize(
    ("rows", "oversample", "expected"),
    [(8, 1.0, 8), (2, 1.0, 2), (8, 2.0, 16), (8, 1.25, 12), (8, 1.1, 12), (16, 2.5, 40)],
)
def test_oversampling_adds_whole_groups(rows, oversample, expected):
    assert first_round_rows(rows, 4, oversample) == expected


def sources(*places):
    """`(round, place)` or None for each place."""
    return [place and dynamic.Source(*place) for place in places]


# Spreads of the groups of each round (True: has a signal), the number of processes, and sources.
@pytest.mark.parametrize(
    ("rounds", "blocks", "expected"),
    [
        ([[True, True]], 1, sources((0, 0), (0, 1))),
        ([[False, True, False, True], [False, True]], 1, sources((1, 1), (0, 1), None, (0, 3))),
        # Processes do not exchange groups: here the second one needs none,
        ([[False, True, True, True], [True, True]], 2, sources((1, 0), (0, 1), (0, 2), (0, 3))),
        # and here the spare group of the first one is no help.
        ([[True, True, False, True], [True, False]], 2, sources((0, 0), (0, 1), None, (0, 3))),
        # A group that spans processes stays in its place.
        (
            [[False, True, False], [True, True, False], [True, True, True]],
            3,
            sources((1, 0), (0, 1), (2, 2)),
        ),
        ([[0.1, 0.5, 0.0, 0.3], [0.4, 0.2, 0.5]], 1, sources((0, 0), (0, 1), (1, 0), (0, 3))),
    ],
)
def test_later_groups_replace_silent_ones(rounds, blocks, expected):
    assert dynamic.fill_places(rounds, blocks=blocks) == expected


def test_the_widest_groups_train_and_those_of_the_batch_keep_their_places():
    for rounds, blocks, expected in (
        ([[0.1, 0.5, 0.0, 0.3], [0.4, 0.2, 0.5]], 1, sources((1, 2), (0, 1), (1, 0), (0, 3))),
        ([[0.0, 0.1, 0.0], [0.9, 0.0, 0.0]], 1, sources((1, 0), (0, 1), None)),
        ([[0.1, 0.2], [0.9, 0.1]], 2, sources((1, 0), (0, 1))),
    ):
        assert dynamic.fill_places(rounds, blocks=blocks, widest=True) == expected


def test_as_many_are_sampled_as_the_neediest_process_lacks():
    assert dynamic.missing_places(sources(None, None, None, (0, 3)), blocks=2) == 2
    assert dynamic.missing_places(sources((0, 0), (0, 1)), blocks=2) == 0


def make_batch(rows: int, prompt: int, completion: int, fill: int, **columns) -> Batch:
    ones = torch.ones(rows, completion, dtype=torch.long)
    return Batch(
        prompt_ids=torch.full((rows, prompt), fill),
        prompt_mask=torch.ones(rows, prompt, dtype=torch.long),
        completion_ids=torch.full((rows, completion), fill),
        completion_mask=ones,
        loss_mask=ones,
        advantages=torch.full((rows,), float(fill)),
        num_tokens=torch.tensor(rows * completion),
        **columns,
    )


def test_rows_of_two_rounds_are_padded_to_one_length():
    ratio = {"sampler_ratio": torch.full((2, 1), 0.5)}
    rounds = [make_batch(2, 3, 2, 7, **ratio), make_batch(2, 2, 4, 8, **ratio)]
    merged = dynamic.merge_rows(rounds, [(1, 0), (0, 1)])

    assert merged.prompt_ids.tolist() == [[0, 8, 8], [7, 7, 7]]
    assert merged.prompt_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert merged.completion_ids.tolist() == [[8, 8, 8, 8], [7, 7, 0, 0]]
    assert merged.completion_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert merged.loss_mask.tolist() == merged.completion_mask.tolist()
    assert merged.advantages.tolist() == [8.0, 7.0]
    assert merged.sampler_ratio.tolist() == [[0.5], [0.5]]
    assert merged.num_tokens == 4


def test_the_ratio_of_a_padding_token_is_1():
    rounds = [make_batch(1, 1, n, 7, sampler_ratio=torch.full((1, n), 0.5)) for n in (1, 2)]
    merged = dynamic.merge_rows(rounds, [(0, 0), (1, 0)])
    assert merged.sampler_ratio.tolist() == [[0.5, 1.0], [0.5, 0.5]]


def test_images_are_not_resampled():
    batch = make_batch(1, 1, 1, 7, images={"pixel_values": torch.zeros(1)})
    with pytest.raises(ValueError, match="images"):
        dynamic.merge_rows([batch], [(0, 0)])


def test_each_pass_over_the_data_has_all_of_it_in_another_order():
    stream = dynamic.PromptStream(20, seed=3)
    first = stream.take(20)
    second = stream.take(20)

    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert dynamic.PromptStream(20, seed=3).take(40) == first + second
    assert dynamic.PromptStream(20, seed=4).take(20) != first

    resumed = dynamic.PromptStream(20, seed=3)
    stream.take(10)
    resumed.load_state_dict(stream.state_dict())

    assert resumed.take(19) == stream.take(19)
