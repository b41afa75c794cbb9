"""Import the state of another Muon in the middle of a run.

All keep one momentum buffer per matrix: `torch.optim.Muon` and KellerJordan's as a running mean,
Moonlight's and dion's as a sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim.auxiliary.sgd import sgd_state
from mesotron.optim.device import wide_dtype
from mesotron.optim.optimizer import RoutedOptimizer
from mesotron.optim.state import momentum_dtype


def import_state(
    optimizer: RoutedOptimizer,
    source: torch.optim.Optimizer | Mapping[str, Any],
    params: Sequence[Tensor] | None = None,
    *,
    form: str = "mean",
) -> int:
    """Copy momentum (and AdamW moments) from another optimizer into this one.

    Args:
        optimizer: a Mesotron optimizer over the parameters of `source`.
        source: the other optimizer, or its state_dict.
        params: with a state_dict, the parameters in the order the other optimizer held them.
        form: "mean" if its momentum is mu M + (1 - mu) G (torch.optim.Muon, KellerJordan), "sum"
            if it is mu M + G (Moonlight, dion): the sum is then multiplied by 1 - mu.

    Returns:
        The number of parameters whose state was imported.

    Example:
        >>> layer = torch.nn.Linear(4, 4, bias=False)
        >>> from mesotron.optim import Muon
        >>> import_state(Muon(layer.parameters()), torch.optim.Muon(layer.parameters()))
        0
    """
    if form not in ("mean", "sum"):
        raise ValueError(f"form={form!r} must be 'mean' (mu M + (1 - mu) G) or 'sum' (mu M + G)")

    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    imported = 0
    for p, state in _states(source, params):
        if p not in groups:
            raise ValueError("the source holds other parameters: build both from the same model")

        if state:
            optimizer.state[p].update(_translate(p, state, groups[p], form))
            imported += 1

    return imported


def _states(
    source: torch.optim.Optimizer | Mapping[str, Any], params: Sequence[Tensor] | None
) -> list[tuple[Tensor, Mapping[str, Any]]]:
    if isinstance(source, torch.optim.Optimizer):
        held = [p for group in source.param_groups for p in group["params"]]
        return [(p, source.state.get(p, {})) for p in held]

    indices = [i for group in source["param_groups"] for i in group["params"]]
    if params is None or len(params) != len(indices):
        raise ValueError(f"pass params= with the {len(indices)} parameters of the state_dict")

    return [(p, source["state"].get(i, {})) for p, i in zip(params, indices, strict=True)]


def _translate(
    p: Tensor,
    state: Mapping[str, Any],
    group: dict[str, Any],
    form: str,
) -> dict[str, Tensor]:
    if group["rule"] == "adamw":
        moments = {key: _like(p, state, key) for key in ("exp_avg", "exp_avg_sq")}
        step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
        return {"step": step.clone(), **moments}

    momentum = _like(p, state, "momentum" if "momentum" in state else "momentum_buffer")
    if group["rule"] in SPECTRAL_RULES:
        momentum = momentum.to(momentum_dtype(group, p.dtype))
        if form == "sum":
            momentum = momentum * (1 - group["momentum"])
        return {"momentum_buffer": momentum}

    return {**sgd_state(p), "momentum_buffer": momentum}


def _like(p: Tensor, state: Mapping[str, Any], key: str) -> Tensor:
    if key not in state:
        raise ValueError(
            f"the source's state for a parameter of shape {tuple(p.shape)} has {sorted(state)} and "
            f"no {key!r}: the two optimizers route it to different rules"
        )
    if state[key].numel() != p.numel():
        raise ValueError(f"{key} has shape {tuple(state[key].shape)}, not {tuple(p.shape)}")

    dtype = wide_dtype(p.dtype)
    return (
        state[key]
        .detach()
        .to(
            device=p.device,
            dtype=dtype,
            copy=True,
        )
        .view(p.shape)
    )
