"""Gradients that are not finite: their parameters keep weights and state.

On a CPU such a parameter is left out of the step. On other devices, where the host must not wait
for a flag, the step is masked.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from mesotron.optim.stats import StepStats

_log = logging.getLogger("mesotron")


def on_host(flags: Tensor) -> bool:
    """Whether reading the flags does not make the host wait for a device."""
    return flags.device.type == "cpu"


def gradients_finite(grads: Sequence[Tensor]) -> Tensor:
    largest = torch._foreach_norm(list(grads), float("inf"))  # pyright: ignore
    return torch.stack(list(largest)).isfinite()  # a float64 beyond float32's range is finite


def report_finite(name: str, grads: list[Tensor], stats: StepStats) -> Tensor:
    """The flags of a group's gradients, recorded, and logged where reading them does not wait."""
    finite = gradients_finite(grads)
    stats.finite.append(([name] * len(grads), finite))

    if finite.device.type == "cpu" and not finite.all():
        _log.warning(
            "%d of %d gradients in group %r are not finite: their parameters keep values and state",
            int((~finite).sum()),
            len(grads),
            name,
        )

    return finite
