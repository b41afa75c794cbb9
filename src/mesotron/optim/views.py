"""Views: which matrices a parameter holds.

A weight tensor can be one matrix, one matrix per attention head, several fused projections, a stack
of experts or a convolution kernel, and may be stored transposed. Writes through a window land in
the tensor. A view has a short string form ("whole", "rows:16", "stack/rows:2") for checkpoints.

Legend: rows = outputs, cols = inputs of the logical matrix, whatever the storage order.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from torch import Tensor

FSDP2 = (
    "a spectral filter needs whole matrices: use FSDP2, accelerate launch --config_file "
    "examples/scaling/fsdp2.yaml, or --use_fsdp --fsdp_version 2 "
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
)


class Window(NamedTuple):
    """Equal-shaped matrices inside a tensor: `strided` is [stack, cut, r1, r2, c1, c2], rows r1*r2,
    cols c1*c2."""

    strided: Tensor
    num: int
    rows: int
    cols: int

    @property
    def wide(self) -> Tensor:
        # With the short side first: f(X^T) = f(X)^T for every odd spectral filter.
        if self.rows <= self.cols:
            return self.strided
        return self.strided.permute(0, 1, 4, 5, 2, 3)

    @property
    def block_shape(self) -> tuple[int, int]:
        return min(self.rows, self.cols), max(self.rows, self.cols)


_CUT = re.compile(r"(rows|cols):(?:([1-9]\d*)([%*]))?([1-9]\d*(?:\+[1-9]\d*)*)")


@dataclass(frozen=True)
class View:
    """How to read a parameter as matrices.

    Args:
        layout: "matrix" (2-D), "conv" (out, in, *kernel) or "stack" (any leading dims hold separate
            matrices).
        transposed: the storage is (in, out), as in GPT-2's Conv1D and in transposed convolutions.
        axis: the logical axis that `sizes` or `groups` cut, "rows" or "cols"; None leaves the
            matrix whole.
        num: that many equal contiguous blocks (attention heads, equal fused parts).
        sizes: uneven contiguous blocks (fused QKV under grouped-query attention).
        groups, parts: `groups` repetitions of `parts` adjacent sub-blocks; each part is gathered
            over all the groups into one matrix (per-head interleaved QKV, interleaved gate and up).
            With `sizes` instead of `parts` the sub-blocks are uneven: "rows:8%256+64+64".
        apart: uneven sub-blocks stay separate matrices, one per group: "rows:8*192+128".

    Example:
        >>> View.parse("rows:16") == View(axis="rows", num=16)
        True
        >>> str(View.parse("stack/T/rows:2"))
        'stack/T/rows:2'
    """

    layout: str = "matrix"
    transposed: bool = False
    axis: str | None = None
    num: int = 1
    sizes: tuple[int, ...] = ()
    groups: int = 0
    parts: int = 0
    apart: bool = False

    def __str__(self) -> str:
        parts = []
        if self.layout != "matrix":
            parts.append(self.layout)

        if self.transposed:
            parts.append("T")

        if self.axis is not None:
            parts.append(f"{self.axis}:{self._cut_text()}")

        return "/".join(parts) or "whole"

    def _cut_text(self) -> str:
        cut = "+".join(map(str, self.sizes)) or str(self.parts or self.num)
        if not self.groups:
            return cut

        sign = "*" if self.apart else "%"
        return f"{self.groups}{sign}{cut}"

    @staticmethod
    @cache
    def parse(text: str) -> "View":
        """Read a view from its string form; the inverse of `str`."""
        fields: dict = {}
        for word in text.split("/"):
            match = _CUT.fullmatch(word)
            if word in ("conv", "stack"):
                fields["layout"] = word
            elif word == "T":
                fields["transposed"] = True
            elif match:
                fields |= _cut_fields(*match.groups())
            elif word != "whole":
                raise ValueError(
                    f"unknown view {text!r}: use 'whole', 'rows:16', 'cols:8', 'rows:896+128+128', "
                    "'rows:32%3' or 'rows:8%256+64+64', after 'conv/', 'stack/' or 'T/' if needed"
                )

        return View(**fields)

    def windows(self, tensor: Tensor) -> list[Window]:
        """The matrices of `tensor` as strided windows, grouped by shape; no copy is made."""
        base = self._matrices(tensor)
        if self.axis is None:
            return [_window(base)]

        rows = self.axis == "rows"
        length = base.shape[3] if rows else base.shape[5]
        self._check(length, tuple(tensor.shape))

        matrices = base.squeeze((1, 2, 4))  # [stack, rows, cols]
        if self.sizes:
            return self._uneven(matrices, rows)

        groups = self.groups if self.parts else 1
        parts = self.parts or self.num
        fields = (groups, parts, length // (groups * parts))
        if rows:
            cut = matrices.unflatten(1, fields)  # [stack, groups, parts, inner, cols]
            strided = cut.transpose(1, 2).unsqueeze(4)
        else:
            cut = matrices.unflatten(2, fields)  # [stack, rows, groups, parts, inner]
            strided = cut.permute(0, 3, 1, 2, 4).unsqueeze(2)

        return [_window(strided)]

    def _uneven(self, matrices: Tensor, rows: bool) -> list[Window]:
        cut = matrices.unflatten(1 if rows else 2, (self.groups or 1, sum(self.sizes)))
        windows = []

        start = 0
        for size in self.sizes:
            part = cut.narrow(2 if rows else 3, start, size)
            start += size

            if rows and self.apart:  # [stack, groups, size, cols]
                strided = part[:, :, None, :, None]
            elif rows:
                strided = part[:, None, :, :, None]
            elif self.apart:  # [stack, rows, groups, size]
                strided = part.transpose(1, 2)[:, :, None, :, None]
            else:
                strided = part[:, None, None]

            windows.append(_window(strided))

        return windows

    def _matrices(self, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:  # replaced after the optimizer was built
            raise ValueError(f"{tuple(tensor.shape)} is flat, as with DeepSpeed ZeRO; {FSDP2}")

        if self.layout == "conv":
            # (in, kernel) stay two dims, so that channels_last weights are windows too.
            out, inputs = tensor.shape[:2]
            kernel = tensor.view(out, inputs, -1)[None, None, None]
            if self.transposed:
                return kernel.permute(0, 1, 4, 5, 2, 3)

            return kernel

        if self.layout == "matrix" and tensor.ndim != 2:
            raise ValueError(f"{tuple(tensor.shape)} is not one matrix: use view 'conv' or 'stack'")

        if tensor.ndim == 2:
            stacked = tensor[None]
        else:
            stacked = tensor.view(-1, *tensor.shape[-2:])

        if self.transposed:
            stacked = stacked.transpose(1, 2)

        b, m, n = stacked.shape
        x, y, z = stacked.stride()
        return stacked.as_strided((b, 1, 1, m, 1, n), (x, x, x, y, y, z))  # quicker than indexing

    def _check(self, length: int, shape: tuple[int, ...]) -> None:
        if self.layout == "conv":
            raise ValueError(f"view '{self}': a convolution cannot be cut into {self.axis}")

        whole = (self.groups or 1) * (sum(self.sizes) or self.parts or self.num)
        if self.sizes:
            needed = f"exactly {whole}"
            fits = length == whole
        else:
            needed = f"a multiple of {whole}"
            fits = length % whole == 0

        if not fits:
            raise ValueError(
                f"view '{self}' does not fit a tensor of shape {shape}: its {self.axis} number "
                f"{length}, the view needs {needed}"
            )


def _cut_fields(axis: str, groups: str | None, sign: str | None, cut: str) -> dict[str, object]:
    sizes = [int(size) for size in cut.split("+")]
    fields: dict[str, object] = {"axis": axis}
    if groups is not None:
        fields |= {"groups": int(groups), "apart": sign == "*"}

    if len(sizes) > 1 or sign == "*":
        return fields | {"sizes": tuple(sizes)}

    return fields | {"parts" if groups else "num": sizes[0]}


def _window(strided: Tensor) -> Window:
    b, k, r1, r2, c1, c2 = strided.shape
    return Window(strided, b * k, r1 * r2, c1 * c2)
