"""One row per prompt with its completions gives the numbers of one row per completion."""

import pytest
import torch
from trl.trainer.utils import split_tensor_dict

from mesotron.rlvr.passes.packing import (
    IGNORED,
    find_groups,
    keep_groups,
    pack_groups,
)
from support.rlvr_tiny import NETWORKS, make_groups, make_network


def logprobs(model, ids, seen, places, labels):
    """[rows, tokens] of the labels, 0 where nothing is scored."""
    logits = model(
        input_ids=ids,
        attention_mask=seen,
        position_ids=places,
    ).logits
    taken = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]

    return taken.masked_fill(labels == IGNORED, 0.0)


@pytest.mark.parametrize("kind", NETWORKS)
def test_log_probabilities_and_gradients_are_those_of_single_rows(kind):
    model, (ids, mask, T) = make_network(kind).double(), make_groups(2, groups=(3, 1, 4))
    weigh = torch.randn(len(ids), T, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    labels = ids[:, 1:].masked_fill(mask[:, 1:] == 0, IGNORED)

    plain = logprobs(
        model,
        ids[:, :-1],
        mask[:, :-1],
        None,
        labels,
    )[:, -T:]

    packed = pack_groups(ids, mask, T)
    assert packed is not None
    assert packed.ids.shape == (3, 9 - 1 + 4 * T)

    seen = packed.visible()
    places = packed.frame.positions(ids.device)
    unpacked = packed.unpack(
        logprobs(
            model,
            packed.ids,
            seen,
            places,
            packed.labels,
        )
    )

    torch.testing.assert_close(unpacked, plain, atol=1e-12, rtol=0)
    expected = torch.autograd.grad((weigh * plain).sum(), list(model.parameters()))

    gradients = torch.autograd.grad((weigh * unpacked).sum(), list(model.parameters()))
    for a, b in zip(gradients, expected, strict=True):
        # Norms and angles are float32 inside a float64 model.
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_rows_are_left_alone_where_packing_does_not_pay():
    assert pack_groups(*make_groups(2, groups=(1, 1, 1, 2))) is None
    # Long completions of a short prompt: fewer tokens, but many more pairs in attention.
    ids = torch.ones(8, 16 + 64, dtype=torch.long)
    assert pack_groups(ids, ids, 64) is None
    assert pack_groups(ids, ids, 4) is not None


def test_padding_is_no_token():
    """A prompt that begins with the padding's id differs from the shorter one."""
    ids = torch.tensor([[0, 5, 6], [0, 5, 6], [0, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 1, 1]])
    groups = find_groups(ids.masked_fill(mask == 0, -1))

    assert (len(groups.first), groups.largest) == (2, 2)
    assert sorted(groups.slots.tolist()) == [0, 1, 2]


def test_micro_batches_keep_groups_in_their_random_order():
    ids = torch.tensor([[7, 1], [5, 2], [7, 3], [0, 4], [5, 5], [0, 6]])
    mask = (ids[:, :1] > 0).long()
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask,
        "completion_ids": ids[:, 1:],
        "num_items": torch.tensor(6),
        "images": None,
    }

    parts = keep_groups(split_tensor_dict(batch, 3))
    assert [part["completion_ids"].flatten().tolist() for part in parts] == [[1, 3], [2, 5], [4, 6]]
    assert all(part["num_items"] == 6 and part["images"] is None for part in parts)
