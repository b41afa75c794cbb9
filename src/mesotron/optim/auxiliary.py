"""The auxiliary rules, for everything that is not a hidden matrix: AdamW, and SGD with momentum.

Both call PyTorch's own functional optimizers (fused where the device has them), so they are
bit-equal to `torch.optim.AdamW` and `torch.optim.SGD`; weight decay is decoupled in both. Weights
narrower than float32 are stepped as float32 copies with float32 state, and bfloat16 ones rounded
back at random: to the nearest, a step of 1e-6 would leave most of them where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mesotron.optim.device import round_stochastically, step_seed, wide_dtype
from mesotron.optim.stats import SAMPLE_ELEMENTS, SAMPLE_TENSORS, StepStats

State = dict[str, Any]
_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Narrow weights that are widened together; their copies take 8 bytes each.
_BATCH_ELEMENTS = 2**26


def adamw_state(p: Tensor) -> State:
    """What AdamW keeps for a parameter before its first step; sharded like the parameter."""
    dtype = wide_dtype(p.dtype)
    moments = {key: torch.zeros_like(p, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": _counter(p), **moments}


def sgd_state(p: Tensor) -> State:
    """What SGD keeps for a parameter before its first step; sharded like the parameter."""
    dtype = wide_dtype(p.dtype)
    momentum = {"momentum_buffer": torch.zeros_like(p, dtype=dtype)}
    return momentum if p.dtype == dtype else {"step": _counter(p), **momentum}


def _counter(p: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=p.device)


def adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    found_inf: Tensor | None,
    stats: StepStats,
    streams: Sequence[int],
) -> None:
    """One AdamW step.

    Args:
        params, grads, states: of one group and one device; an empty state is filled.
        group: its hyper-parameters.
        found_inf: a float tensor on the device; 1 leaves everything as it is.
        stats: receives what was done.
        streams: of the random rounding, one for each parameter, from `rounding_seed`.
    """
    for p, state in zip(params, states, strict=True):
        if not state:
            state |= adamw_state(p)
    grads = [_laid_out_like(p, g) for p, g in zip(params, grads, strict=True)]
    _step_widened(_adamw, params, grads, states, group, found_inf, streams)
    _sample_adamw(grads, states, group, found_inf, stats)


def sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    found_inf: Tensor | None,
    stats: StepStats,
    streams: Sequence[int],
) -> None:
    """One step of SGD with momentum, M <- mu M + G, and decoupled weight decay; see `adamw_step`
    for the arguments."""
    for p, state in zip(params, states, strict=True):
        if not state:
            state |= sgd_state(p)
    grads = [_laid_out_like(p, g) for p, g in zip(params, grads, strict=True)]
    _step_widened(_sgd, params, grads, states, group, found_inf, streams)
    _sample_sgd(grads, states, group, found_inf, stats)


STEPS = {"adamw": adamw_step, "sgd": sgd_step}
NEW_STATE = {"adamw": adamw_state, "sgd": sgd_state}


def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    found_inf: Tensor | None,
) -> None:
    fused = _fused(params, states)
    if _skipped_by_host(fused, found_inf):
        return
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [],
        [s["step"] for s in states],
        fused=fused,
        found_inf=found_inf if fused else None,  # the others assert that there is none
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _sgd(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    found_inf: Tensor | None,
) -> None:
    fused = _fused(params, states)
    if _skipped_by_host(fused, found_inf):
        return
    keep = 1 - group["lr"] * group["weight_decay"]
    if found_inf is not None:
        keep = torch.where(found_inf > 0, 1.0, torch.as_tensor(keep, device=found_inf.device))
    if isinstance(keep, Tensor) or keep != 1:
        torch._foreach_mul_(params, keep)  # pyright: ignore
    momenta: list[Tensor | None] = [s["momentum_buffer"] for s in states]
    sgd(
        params,
        grads,
        momenta,
        fused=fused,
        found_inf=found_inf if fused else None,  # the others assert that there is none
        weight_decay=0.0,
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
    )
    counters = [s["step"] for s in states if "step" in s]
    if counters:
        torch._foreach_add_(counters, 1 if found_inf is None else 1 - found_inf)  # pyright: ignore


def _step_widened(
    rule: Callable[..., None],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[State],
    group: dict[str, Any],
    found_inf: Tensor | None,
    streams: Sequence[int],
) -> None:
    """Step weights of float32 and float64 where they lie, narrower ones as copies."""
    narrow = [k for k, p in enumerate(params) if p.dtype != wide_dtype(p.dtype)]
    wide = [k for k in range(len(params)) if k not in set(narrow)]
    if wide:
        picked = ([part[k] for k in wide] for part in (params, grads, states))
        rule(*picked, group, found_inf)
    for batch in _batches(narrow, params):
        copies, wide_grads = ([x[k].float() for k in batch] for x in (params, grads))
        rule(copies, wide_grads, [states[k] for k in batch], group, found_inf)
        for k, copy in zip(batch, copies, strict=True):
            if params[k].dtype == torch.bfloat16:
                seed = step_seed(states[k]["step"], streams[k])
                round_stochastically(copy, params[k], seed)
            else:
                params[k].copy_(copy)


def _batches(numbers: list[int], params: list[Tensor]) -> Iterator[list[int]]:
    """Some parameters at a time, so that the copies of a large model do not double its memory."""
    batch, size = [], 0
    for k in numbers:
        if batch and size + params[k].numel() > _BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
        batch.append(k)
        size += params[k].numel()
    if batch:
        yield batch


def _fused(params: list[Tensor], states: list[State]) -> bool:
    """Fused kernels walk the memory of parameter, gradient and state side by side: in another
    layout they would pair the wrong elements, on a CPU without a word."""
    return all(
        p.device.type in _FUSED_DEVICES
        and (p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride())
        and all(s.stride() == p.stride() for key, s in state.items() if key != "step")
        for p, state in zip(params, states, strict=True)
    )


def _skipped_by_host(fused: bool, found_inf: Tensor | None) -> bool:
    """Only the fused kernels skip a step on the device; for the others the host must ask."""
    return not fused and found_inf is not None and bool(found_inf)


def _laid_out_like(p: Tensor, grad: Tensor) -> Tensor:
    return (
        grad if grad.stride() == p.stride() else torch.empty_like(p, dtype=grad.dtype).copy_(grad)
    )


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    """A few elements of the first few tensors, evenly spaced, in one flat float32 tensor."""
    taken = []
    for t in tensors[:SAMPLE_TENSORS]:
        flat = t.flatten() if t.is_contiguous() else t.reshape(-1)
        taken.append(flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)][:SAMPLE_ELEMENTS].float())
    return torch.cat(taken)


def _sample_adamw(
    grads: list[Tensor],
    states: list[State],
    group: dict,
    found_inf: Tensor | None,
    stats: StepStats,
) -> None:
    beta1, beta2 = group["betas"]
    step = states[0]["step"].clamp_min(1)  # 0 after a skipped first step
    m = _sample([s["exp_avg"] for s in states]) / (1 - beta1**step)
    v = _sample([s["exp_avg_sq"] for s in states]) / (1 - beta2**step)
    update = m / (v.sqrt() + group["eps"])
    _add(group, update, _sample(grads), found_inf, stats)


def _sample_sgd(
    grads: list[Tensor],
    states: list[State],
    group: dict,
    found_inf: Tensor | None,
    stats: StepStats,
) -> None:
    update, G = _sample([s["momentum_buffer"] for s in states]), _sample(grads)
    if group["nesterov"]:
        update = G + group["momentum"] * update
    _add(group, update, G, found_inf, stats)


def _add(
    group: dict, update: Tensor, G: Tensor, found_inf: Tensor | None, stats: StepStats
) -> None:
    if found_inf is not None:  # nothing moved, and G may hold what was not finite
        update, G = (torch.where(found_inf > 0, 0.0, x) for x in (update, G))
    stats.add_update(group["name"], update * group["lr"])
    stats.add_sample(group["name"], update, G)
