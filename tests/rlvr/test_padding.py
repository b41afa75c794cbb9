"""Padding at once against TRL's row by row, and when TRL's trainer uses it."""

import inspect

import numpy as np
import pytest
import torch
from trl.trainer import grpo_trainer
from trl.trainer.utils import pad

from mesotron.rlvr.layers.padding import as_arrays, pad_rows, quick_padding
from mesotron.rlvr.trainer import EXCHANGED
from support.rlvr_tiny import make_trainer

SIZES = [3, 1, 7, 7, 2]


def ids() -> list[torch.Tensor]:
    return [torch.arange(1, n + 1) * n for n in SIZES]


ROWS = {
    "ids": ids,
    "masks": lambda: [torch.ones_like(x) for x in ids()],
    "logprobs": lambda: [-0.1 * x.float() for x in ids()],
    "types_that_differ": lambda: [ids()[0], *(x.int() for x in ids()[1:])],
    "one_length": lambda: [torch.arange(4), torch.arange(4) + 9],
    "one_row": lambda: [torch.arange(5)],
    "an_empty_row": lambda: [torch.arange(2), torch.arange(0)],
    "two_dimensions": lambda: [torch.ones(2, 3), torch.ones(1, 2)],
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [None, 1, 4, 7])
@pytest.mark.parametrize("kind", ROWS)
def test_it_is_trls_padding_to_the_bit(kind, side, multiple):
    wanted = pad(ROWS[kind](), -5, side, multiple)
    found = pad_rows(ROWS[kind](), -5, side, multiple)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_a_side_that_is_none_is_refused_as_by_trl():
    with pytest.raises(ValueError, match="padding_side must be"):
        pad_rows([torch.arange(2)], padding_side="above")


def test_it_takes_what_trls_takes():
    ours, theirs = (inspect.signature(f).parameters for f in (pad_rows, grpo_trainer.pad))
    assert ", ".join(theirs) == EXCHANGED["pad"]
    assert {k: x.default for k, x in ours.items()} == {k: x.default for k, x in theirs.items()}


def test_trl_has_its_own_padding_back_after_an_error():
    with pytest.raises(ValueError, match="padding_side"), quick_padding():
        grpo_trainer.pad([torch.arange(2)], padding_side="above")
    assert grpo_trainer.pad is pad


def test_a_rollout_is_padded_at_once_and_nothing_else_is(tmp_path, monkeypatch):
    seen = []
    trainer = make_trainer(tmp_path, max_steps=1)
    score, loss = trainer._calculate_rewards, trainer._compute_loss
    monkeypatch.setattr(
        trainer, "_calculate_rewards", lambda *a: (seen.append(grpo_trainer.pad), score(*a))[1]
    )
    monkeypatch.setattr(
        trainer, "_compute_loss", lambda *a: (seen.append(grpo_trainer.pad), loss(*a))[1]
    )
    trainer.train()
    assert seen == [pad_rows, pad]


def test_rows_that_are_one_object_become_one_array():
    row = [4, 5, 6]
    found = as_arrays([row, [7], row])
    assert [x.tolist() for x in found] == [row, [7], row]
    assert found[0] is found[2]
    assert all(x.dtype == np.int64 for x in found)
