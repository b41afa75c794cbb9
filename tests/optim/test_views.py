"""Views: the matrices that a tensor holds, as windows that write through, for any storage order."""

import pytest
import torch
from torch import Tensor

from mesotron.optim.views import View, Window

STRINGS = [
    "whole", "rows:4", "cols:4", "rows:4+2+2", "cols:4+2+2", "rows:2%3", "rows:2%4+1+1",
    "rows:2*4+1+1", "cols:2%4+1+1", "cols:2*4+1+1", "conv", "stack", "stack/rows:2", "T",
    "T/rows:4", "stack/T/rows:2",
]  # fmt: skip


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def matrices(window: Window) -> Tensor:
    """[num, rows, cols], a copy."""
    return window.strided.reshape(window.num, window.rows, window.cols)


def first(view: str, tensor: Tensor) -> Tensor:
    return matrices(View.parse(view).windows(tensor)[0])


@pytest.mark.parametrize("text", STRINGS)
def test_strings_round_trip(text):
    assert str(View.parse(text)) == text


@pytest.mark.parametrize("text", ["row:4", "rows:0", "rows:", "rows:a", "conv:3", "rows:4 ", ""])
def test_unknown_strings_are_rejected(text):
    with pytest.raises(ValueError, match="rows:16"):
        View.parse(text)


def test_whole_is_the_tensor():
    W = numbers(4, 6)
    assert torch.equal(first("whole", W), W[None])


def test_heads_are_rows_of_q_and_columns_of_o():
    W = numbers(8, 6)
    assert torch.equal(first("rows:4", W), W.view(4, 2, 6))
    O = numbers(6, 8)
    assert torch.equal(first("cols:4", O), torch.stack(O.chunk(4, dim=1)))


def test_fused_parts_are_cut_by_size():
    W = numbers(8, 6)
    q, k, v = (matrices(w)[0] for w in View.parse("rows:4+2+2").windows(W))
    assert torch.equal(torch.cat([q, k, v]), W)
    assert (len(q), len(k), len(v)) == (4, 2, 2)
    parts = [matrices(w)[0] for w in View.parse("cols:4+2+2").windows(W.t())]
    assert torch.equal(torch.cat(parts, dim=1), W.t())


def test_interleaved_parts_are_gathered_over_the_groups():
    # Two heads, each with its q, k, v of two rows: GPT-NeoX's order.
    W = numbers(12, 5)
    q, k, v = first("rows:2%3", W)
    by_head = W.view(2, 3, 2, 5)
    for found, part in zip((q, k, v), range(3), strict=True):
        assert torch.equal(found, by_head[:, part].reshape(4, 5))


def test_uneven_parts_inside_groups_are_gathered_or_kept_apart():
    # Two groups of four query rows, one key row, one value row: Falcon's order.
    W = numbers(12, 5)
    groups = W.view(2, 6, 5)
    q, k, v = View.parse("rows:2%4+1+1").windows(W)
    assert torch.equal(matrices(q)[0], groups[:, :4].reshape(8, 5))
    assert torch.equal(matrices(k)[0], groups[:, 4:5].reshape(2, 5))
    assert torch.equal(matrices(v)[0], groups[:, 5:].reshape(2, 5))
    q, k, _ = View.parse("rows:2*4+1+1").windows(W)
    assert torch.equal(matrices(q), groups[:, :4])
    assert torch.equal(matrices(k), groups[:, 4:5])
    for text in ("cols:2%4+1+1", "cols:2*4+1+1"):
        for w, t in zip(
            View.parse(text).windows(W.t()),
            View.parse(text.replace("cols", "rows")).windows(W),
            strict=True,
        ):
            assert torch.equal(matrices(w), matrices(t).mT)


def test_convolutions_are_outputs_by_the_rest_in_any_memory_format():
    W = numbers(6, 2, 3, 3)
    assert torch.equal(first("conv", W)[0], W.reshape(6, 18))
    last = W.contiguous(memory_format=torch.channels_last)
    assert torch.equal(first("conv", last)[0], W.reshape(6, 18))
    assert torch.equal(first("conv", numbers(6, 2, 3))[0], numbers(6, 6))


def test_stacks_keep_their_matrices_apart():
    W = numbers(2, 3, 4, 5)
    assert torch.equal(first("stack", W), W.view(6, 4, 5))
    assert torch.equal(first("stack/rows:2", W), W.view(12, 2, 5))


def test_transposed_storage_is_read_in_logical_order():
    W = numbers(6, 8)  # (in, out), as GPT-2 keeps it
    assert torch.equal(first("T", W)[0], W.t())
    assert torch.equal(first("T/rows:4", W), W.t().reshape(4, 2, 6))
    assert torch.equal(
        first("stack/T/rows:2", numbers(3, 5, 4)), numbers(3, 5, 4).mT.reshape(6, 2, 5)
    )


CASES = [
    ("whole", (4, 6)), ("whole", (6, 4)), ("rows:4", (8, 6)), ("cols:2", (8, 6)),
    ("rows:4+2+2", (8, 6)), ("cols:4+2", (8, 6)), ("rows:2%3", (12, 5)), ("cols:2%3", (5, 12)),
    ("rows:2%4+1+1", (12, 5)), ("rows:2*4+1+1", (12, 5)), ("cols:2*4+1+1", (5, 12)),
    ("conv", (6, 2, 3, 3)), ("stack", (2, 3, 4, 5)), ("stack/cols:2", (3, 5, 4)),
    ("T/rows:4", (6, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("view", "shape"), CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_every_element_is_in_exactly_one_window_and_written_through(view, shape, strided):
    base = torch.zeros(*shape[:-1], shape[-1] * 2) if strided else torch.zeros(shape)
    tensor = base[..., ::2] if strided else base
    for k, window in enumerate(View.parse(view).windows(tensor)):
        window.wide.add_(1)
        assert window.strided.numel() == window.num * window.rows * window.cols, k
        assert window.strided.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert torch.equal(tensor, torch.ones(shape))


@pytest.mark.parametrize(("view", "shape"), CASES)
def test_wide_puts_the_short_side_first(view, shape):
    for window in View.parse(view).windows(numbers(*shape)):
        m, n = window.block_shape
        assert m <= n
        wide = window.wide.reshape(window.num, m, n)
        plain = matrices(window)
        assert torch.equal(wide, plain if window.rows <= window.cols else plain.mT)


@pytest.mark.parametrize(
    ("view", "shape", "word"),
    [
        ("rows:3", (8, 6), "rows:3"),
        ("cols:4+1", (8, 6), "exactly 5"),
        ("rows:2%4+1+1", (14, 5), "exactly 12"),
        ("conv/rows:2", (6, 2, 3, 3), "convolution"),
        ("whole", (2, 3, 4), "'stack'"),
        ("rows:2", (2, 3, 4), "'stack'"),
    ],
)
def test_views_that_do_not_fit_are_rejected(view, shape, word):
    with pytest.raises(ValueError, match=word):
        View.parse(view).windows(numbers(*shape))
