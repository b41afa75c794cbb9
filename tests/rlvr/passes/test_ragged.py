"""Where the tokens of a batch lie in one line."""

import numpy as np
import torch

from mesotron.rlvr.passes.ragged import bounds, lay_out, plain_attend, runs
from support.rlvr_tiny import make_groups


def test_prompts_stand_once_and_completions_after_them():
    ids = torch.tensor([[0, 7, 8, 1, 2, 3], [5, 6, 9, 4, 0, 0], [0, 7, 8, 2, 2, 0]])
    ragged = lay_out(ids, (ids > 0).long(), length=3)

    lines = ragged.ids.split(ragged.sight.queries.diff().tolist())
    prompts = {tuple(line.tolist()) for line in lines[:2]}
    assert prompts == {(7,), (5, 6)}
    assert [line.tolist() for line in lines[2:]] == [[8, 1, 2], [9], [8, 2]]

    assert ragged.lead == 3
    assert ragged.labels.tolist() == [1, 2, 3, 4, 2, 2]
    assert ragged.positions[3:].tolist() == [1, 2, 3, 2, 1, 2]
    assert ragged.unpack(ragged.labels).tolist() == [[1, 2, 3], [4, 0, 0], [2, 2, 0]]

    # A segment sees its prompt and itself.
    keys = ragged.ids[ragged.sight.index].split(ragged.sight.keys.diff().tolist())
    assert [key.tolist() for key in keys[2:]] == [[7, 8, 1, 2], [5, 6, 9], [7, 8, 2]]
    assert (ragged.sight.longest_query, ragged.sight.longest_key) == (3, 4)


def test_no_padding_is_computed():
    ids, mask, T = make_groups(3, P=14, groups=(4, 1, 3, 2))
    ragged = lay_out(ids, mask, T)
    scored = mask[:, -T:].sum().item()
    rows = {tuple(row) for row in (ids * mask)[:, :-T].tolist()}
    prompts = sum(sum(token > 0 for token in row) - 1 for row in rows)

    assert len(ragged.ids) == scored + prompts


def test_masks_with_holes_are_left_alone():
    ids = torch.tensor([[7, 8, 1, 2, 3], [7, 8, 4, 5, 6]])
    mask = torch.ones_like(ids)
    assert lay_out(ids, mask, 3) is not None

    for place in ((0, 3), (1, 2)):  # inside a completion, before it
        holed = mask.clone()
        holed[place] = 0
        assert lay_out(ids, holed, 3) is None

    empty = mask.clone()
    empty[:, 2:] = 0
    assert lay_out(ids, empty, 3) is None


def test_runs_and_bounds():
    lengths = np.array([2, 0, 3])
    assert runs(np.array([5, 9, 1]), lengths).tolist() == [5, 6, 1, 2, 3]
    assert bounds(lengths).tolist() == [0, 2, 2, 5]


def test_gradients_of_shared_keys_are_added_up():
    ids, mask, T = make_groups(1, groups=(3, 2))
    sight = lay_out(ids, mask, T).sight
    N = int(sight.queries[-1])
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(N, k, 8, dtype=torch.double, generator=draw) for k in (4, 2, 2)]

    inputs = tuple(x.requires_grad_() for x in heads)
    assert torch.autograd.gradcheck(lambda *x: plain_attend(*x, sight, 0.3), inputs, fast_mode=True)
