"""Dynamic sampling: which groups are silent, who takes their places, and the order of prompts."""

import pytest
import torch

from mesotron.probes import group_spreads
from mesotron.rlvr.dynamic import (
    PromptStream,
    Source,
    fill_places,
    merge_rows,
    missing_places,
    split_rows,
)
from mesotron.rlvr.objectives import first_round_rows

NAN = torch.nan


def test_silent_groups():
    rewards = torch.tensor(
        [[1.0, 0.0, 1.0], [0.3, 0.3, 0.3 + 1e-7], [NAN, NAN, NAN], [1.0, NAN, NAN], [0.0, NAN, 1.0]]
    )
    assert (group_spreads(rewards, 1e-6) == 0).tolist() == [False, True, True, True, False]
    assert (group_spreads(rewards, 1e-9) == 0).tolist() == [False, False, True, True, False]


def test_the_spread_of_a_group_is_that_of_the_rewards_it_has():
    rewards = torch.tensor(
        [[1.0, 0.0, 1.0, 0.0], [0.3, 0.3, 0.3, 0.3 + 1e-7], [NAN, 2.0, NAN, 0.0], [NAN] * 4]
    )
    assert group_spreads(rewards, 1e-6).tolist() == [0.5, 0.0, 1.0, 0.0]
    faint = torch.tensor([[0.0, 1e-30]])
    assert group_spreads(faint, 0.0).item() > 0, "what is a signal has a spread"


@pytest.mark.parametrize(
    ("rows", "oversample", "wanted"),
    [(8, 1.0, 8), (2, 1.0, 2), (8, 2.0, 16), (8, 1.25, 12), (8, 1.1, 12), (16, 2.5, 40)],
)
def test_whoever_asks_for_more_prompts_gets_whole_groups_of_them(rows, oversample, wanted):
    assert first_round_rows(rows, 4, oversample) == wanted


@pytest.mark.parametrize("rows", [2, 6])
def test_prompts_cannot_be_added_where_groups_span_processes(rows):
    with pytest.raises(ValueError, match=f"has {rows} completions in groups of 4"):
        first_round_rows(rows, 4, 2.0)


def test_a_batch_split_and_merged_is_the_batch():
    batch = {
        "completion_ids": torch.arange(12).view(4, 3),
        "advantages": torch.arange(4.0),
        "num_items_in_batch": torch.tensor(9),
    }
    parts = split_rows(batch, 3)
    assert [len(part["advantages"]) for part in parts] == [3, 1]
    again = merge_rows(parts, [(0, 0), (0, 1), (0, 2), (1, 0)])
    assert all(torch.equal(again[name], batch[name]) for name in batch)


def test_nothing_moves_when_nothing_is_missing():
    assert fill_places([[True, True]], blocks=1) == [Source(0, 0), Source(0, 1)]


def test_later_groups_fill_the_places_of_silent_ones():
    rounds = [[False, True, False, True], [False, True]]
    assert fill_places(rounds, blocks=1) == [
        Source(1, 1),
        Source(0, 1),
        None,
        Source(0, 3),
    ]


def test_the_widest_groups_train_and_those_of_the_batch_keep_their_places():
    rounds = [[0.1, 0.5, 0.0, 0.3], [0.4, 0.2, 0.5]]
    assert fill_places(rounds, blocks=1) == [
        Source(0, 0), Source(0, 1), Source(1, 0), Source(0, 3),
    ]  # fmt: skip
    assert fill_places(rounds, blocks=1, widest=True) == [
        Source(1, 2), Source(0, 1), Source(1, 0), Source(0, 3),
    ]  # fmt: skip
    few = [[0.0, 0.1, 0.0], [0.9, 0.0, 0.0]]
    assert fill_places(few, blocks=1, widest=True) == [Source(1, 0), Source(0, 1), None]
    parted = [[0.1, 0.2], [0.9, 0.1]]  # each process has its own
    assert fill_places(parted, blocks=2, widest=True) == [Source(1, 0), Source(0, 1)]


def test_processes_do_not_exchange_groups():
    rounds = [[False, True, True, True], [True, True]]  # two processes: the second needs none
    assert fill_places(rounds, blocks=2) == [Source(1, 0), *(Source(0, k) for k in (1, 2, 3))]
    rounds = [[True, True, False, True], [True, False]]  # what the first has is no help
    assert fill_places(rounds, blocks=2)[2] is None


def test_a_group_that_spans_processes_stays_in_its_place():
    rounds = [[False, True, False], [True, True, False], [True, True, True]]
    assert fill_places(rounds, blocks=3) == [Source(1, 0), Source(0, 1), Source(2, 2)]


def test_the_neediest_block_says_how_many_to_sample():
    assert missing_places([None, None, None, Source(0, 3)], blocks=2) == 2
    assert missing_places([Source(0, 0), Source(0, 1)], blocks=2) == 0


def scored(rows: int, prompt: int, completion: int, fill: int) -> dict:
    return {
        "prompt_ids": torch.full((rows, prompt), fill),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": torch.full((rows, completion), fill),
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "advantages": torch.full((rows,), float(fill)),
        "importance_sampling_ratio": torch.full((rows, 1), 0.5),
        "num_items_in_batch": torch.tensor(rows * completion),
    }


def test_rows_of_two_rounds_are_padded_to_one_length():
    merged = merge_rows([scored(2, 3, 2, 7), scored(2, 2, 4, 8)], [(1, 0), (0, 1)])
    assert merged["prompt_ids"].tolist() == [[0, 8, 8], [7, 7, 7]]
    assert merged["prompt_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]
    assert merged["completion_ids"].tolist() == [[8, 8, 8, 8], [7, 7, 0, 0]]
    assert merged["completion_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert merged["advantages"].tolist() == [8.0, 7.0]
    assert merged["importance_sampling_ratio"].tolist() == [[0.5], [0.5]]


def test_tokens_that_are_not_there_weigh_one():
    a, b = ({"importance_sampling_ratio": torch.full((1, n), 0.5)} for n in (1, 2))
    merged = merge_rows([a, b], [(0, 0), (1, 0)])
    assert merged["importance_sampling_ratio"].tolist() == [[0.5, 1.0], [0.5, 0.5]]


def test_pictures_are_refused():
    with pytest.raises(ValueError, match="images"):
        merge_rows([{"pixel_values": torch.zeros(1)}], [(0, 0)])


def test_each_pass_over_the_data_has_all_of_it_in_another_order():
    stream = PromptStream(20, seed=3)
    first, second = stream.take(20), stream.take(20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert PromptStream(20, seed=3).take(40) == first + second
    assert PromptStream(20, seed=4).take(20) != first


def test_it_goes_on_from_a_checkpoint():
    stream, resumed = PromptStream(7, seed=0), PromptStream(7, seed=0)
    stream.take(10)
    resumed.load_values(stream.values())
    resumed.load_tensors(stream.tensors())
    assert resumed.take(9) == stream.take(9)
