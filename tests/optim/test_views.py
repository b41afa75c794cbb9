"""Views: the matrices that a tensor holds, as windows that write through, for any storage order."""

import pytest
import torch
from torch import Tensor

from mesotron.optim.views import View, Window


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def matrices(window: Window) -> Tensor:
    """[num, rows, cols], a copy."""
    return window.strided.reshape(window.num, window.rows, window.cols)


def first(view: str, tensor: Tensor) -> Tensor:
    return matrices(View.parse(view).windows(tensor)[0])


def test_heads_and_fused_parts_are_cut_from_rows_or_columns():
    W = numbers(8, 6)
    assert torch.equal(first("whole", W), W[None])
    assert torch.equal(first("rows:4", W), W.view(4, 2, 6))
    assert torch.equal(first("cols:4", W.t()), W.view(4, 2, 6).mT)

    q, k, v = (matrices(w)[0] for w in View.parse("rows:4+2+2").windows(W))
    assert torch.equal(torch.cat([q, k, v]), W)
    assert (len(q), len(k), len(v)) == (4, 2, 2)

    parts = [matrices(w)[0] for w in View.parse("cols:4+2+2").windows(W.t())]
    assert torch.equal(torch.cat(parts, dim=1), W.t())


def test_parts_inside_groups_are_gathered_or_kept_apart():
    W = numbers(12, 5)

    # Two heads, each with its q, k, v of two rows: GPT-NeoX's order.
    by_head = W.view(2, 3, 2, 5)
    for part, found in enumerate(first("rows:2%3", W)):
        assert torch.equal(found, by_head[:, part].reshape(4, 5))

    # Two groups of four query rows, one key row, one value row: Falcon's order.
    groups = W.view(2, 6, 5)
    parts = groups[:, :4], groups[:, 4:5], groups[:, 5:]
    for text in ("2%4+1+1", "2*4+1+1"):
        rows = View.parse(f"rows:{text}").windows(W)
        cols = View.parse(f"cols:{text}").windows(W.t())
        for row, col, part in zip(rows, cols, parts, strict=True):
            expected = part if "*" in text else part.reshape(1, -1, 5)
            assert torch.equal(matrices(row), expected)
            assert torch.equal(matrices(col), expected.mT)


def test_stacks_and_transposed_storage_are_read_in_logical_order():
    W = numbers(2, 3, 4, 5)
    assert torch.equal(first("stack", W), W.view(6, 4, 5))
    assert torch.equal(first("stack/rows:2", W), W.view(12, 2, 5))

    W = numbers(6, 8)  # (in, out), as GPT-2 keeps it
    assert torch.equal(first("T", W)[0], W.t())
    assert torch.equal(first("T/rows:4", W), W.t().reshape(4, 2, 6))

    W = numbers(3, 5, 4)
    assert torch.equal(first("stack/T/rows:2", W), W.mT.reshape(6, 2, 5))


CASES = [
    ("whole", (4, 6)),
    ("whole", (6, 4)),
    ("rows:4", (8, 6)),
    ("cols:2", (8, 6)),
    ("rows:4+2+2", (8, 6)),
    ("cols:4+2", (8, 6)),
    ("rows:2%3", (12, 5)),
    ("cols:2%3", (5, 12)),
    ("rows:2%4+1+1", (12, 5)),
    ("rows:2*4+1+1", (12, 5)),
    ("cols:2*4+1+1", (5, 12)),
    ("conv", (6, 2, 3, 3)),
    ("stack", (2, 3, 4, 5)),
    ("stack/cols:2", (3, 5, 4)),
    ("T/rows:4", (6, 8)),
]


@pytest.mark.parametrize(("view", "shape"), CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_every_element_is_in_exactly_one_window_and_written_through(view, shape, strided):
    if strided:
        base = torch.zeros(*shape[:-1], shape[-1] * 2)
    else:
        base = torch.zeros(shape)

    tensor = base[..., ::2] if strided else base
    tensor.copy_(numbers(*shape))

    assert str(View.parse(view)) == view
    for window in View.parse(view).windows(tensor):
        m, n = window.block_shape
        assert m <= n

        plain = matrices(window)
        wide = window.wide.reshape(window.num, m, n)
        assert torch.equal(wide, plain if window.rows <= window.cols else plain.mT)

        window.wide.add_(1)
        assert window.strided.numel() == window.num * window.rows * window.cols
        assert window.strided.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()

    assert torch.equal(tensor, numbers(*shape) + 1)


@pytest.mark.parametrize(
    ("view", "shape", "word"),
    [
        ("rows:3", (8, 6), "rows:3"),
        ("cols:4+1", (8, 6), "exactly 5"),
        ("rows:2%4+1+1", (14, 5), "exactly 12"),
        ("conv/rows:2", (6, 2, 3, 3), "convolution"),
        ("whole", (2, 3, 4), "'stack'"),
        ("rows:2", (2, 3, 4), "'stack'"),
        *(
            (text, (8, 6), "rows:16")
            for text in ("row:4", "rows:0", "rows:", "conv:3", "rows:4 ", "")
        ),
    ],
)
def test_unknown_views_and_those_that_do_not_fit_are_rejected(view, shape, word):
    with pytest.raises(ValueError, match=word):
        View.parse(view).windows(numbers(*shape))


def test_a_transposed_convolution_maps_its_first_axis_to_the_others():
    kernel = torch.randn(16, 8, 2, 2)
    [window] = View.parse("conv/T").windows(kernel)
    assert (window.rows, window.cols) == (32, 16)
    assert torch.equal(window.strided.reshape(32, 16), kernel.flatten(1).T)
