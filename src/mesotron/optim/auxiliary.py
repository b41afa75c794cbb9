"""The auxiliary rules, for everything that is not a hidden matrix: AdamW, and SGD with momentum.

Both call PyTorch's own functional optimizers (fused where the device has them), so they are
bit-equal to `torch.optim.AdamW` and `torch.optim.SGD`; weight decay is decoupled in both. Weights
narrower than float32 are stepped as float32 copies with float32 state, and bfloat16 ones rounded
back at random: to the nearest, a step of 1e-6 would leave most of them unchanged.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def _counter(p: Tensor) -> Tensor:
    # A meta tensor has no value, and PyTorch's step reads the counter.
    device = "cpu" if p.device.type == "meta" else p.device
    return torch.zeros((), dtype=torch.float32, device=device)


def adamw_state(p: Tensor) -> State:
    m, v = (torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for _ in range(2))
    return {"step": _counter(p), "exp_avg": m, "exp_avg_sq": v}


def sgd_state(p: Tensor) -> State:
    momentum = {"momentum_buffer": torch.zeros_like(p, dtype=wide_dtype(p.dtype))}
    return momentum if p.dtype == wide_dtype(p.dtype) else {"step": _counter(p), **momentum}


class Batch(NamedTuple):
    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]  # an empty one is filled
    group: dict[str, Any]
    found_inf: Tensor | None  # a float tensor on the device; 1 leaves everything unchanged
    streams: Sequence[int]  # of the random rounding, from `rounding_seed`


def adamw_step(batch: Batch, stats: StepStats) -> None:
    grads = _step_widened(_adamw, adamw_state, batch)
    beta1, beta2 = batch.group["betas"]
    step = batch.states[0]["step"].clamp_min(1)  # 0 after a skipped first step
    m = _sample([s["exp_avg"] for s in batch.states]) / (1 - beta1**step)
    v = _sample([s["exp_avg_sq"] for s in batch.states]) / (1 - beta2**step)
    _record(batch, m / (v.sqrt() + batch.group["eps"]), _sample(grads), stats)


def sgd_step(batch: Batch, stats: StepStats) -> None:
    grads = _step_widened(_sgd, sgd_state, batch)
    update = _sample([s["momentum_buffer"] for s in batch.states])

    G = _sample(grads)
    if batch.group["nesterov"]:
        update = G + batch.group["momentum"] * update

    _record(batch, update, G, stats)


STEPS = {"adamw": adamw_step, "sgd": sgd_step}
NEW_STATE = {"adamw": adamw_state, "sgd": sgd_state}


def _adamw(batch: Batch, fused: bool) -> None:
    params, grads, states, group, found_inf, _ = batch
    m, v, steps = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
    options = {key: group[key] for key in ("lr", "weight_decay", "eps")}
    options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}

    options |= {
        "amsgrad": False,
        "maximize": False,
        "fused": fused,
    }

    # Without the fused kernels PyTorch asserts that there is no found_inf.
    adamw(
        params,
        grads,
        m,
        v,
        [],
        steps,
        found_inf=found_inf if fused else None,
        **options,
    )


def _sgd(batch: Batch, fused: bool) -> None:
    params, grads, states, group, found_inf, _ = batch
    keep = 1 - group["lr"] * group["weight_decay"]
    if found_inf is not None:
        keep = torch.where(found_inf > 0, 1.0, torch.as_tensor(keep, device=found_inf.device))

    if isinstance(keep, Tensor) or keep != 1:
        torch._foreach_mul_(params, keep)  # pyright: ignore

    momenta = [s["momentum_buffer"] for s in states]
    options = {key: group[key] for key in ("lr", "momentum", "nesterov")}
    options |= {
        "weight_decay": 0.0,
        "dampening": 0.0,
        "maximize": False,
        "fused": fused,
    }

    sgd(
        params,
        grads,
        momenta,
        found_inf=found_inf if fused else None,
        **options,
    )

    counters = [s["step"] for s in states if "step" in s]
    if counters:
        torch._foreach_add_(counters, 1 if found_inf is None else 1 - found_inf)  # pyright: ignore


def _step_widened(
    rule: Callable[[Batch, bool], None], new_state: Callable[[Tensor], State], batch: Batch
) -> list[Tensor]:
    """Step float32 and float64 weights in place, narrower ones as copies; returns the gradients,
    laid out like their parameters."""
    params = batch.params
    states = batch.states
    found_inf = batch.found_inf

    grads = []
    for p, grad, state in zip(params, batch.grads, states, strict=True):
        if not state:
            state |= new_state(p)
        elif "step" not in state and p.dtype != wide_dtype(p.dtype):  # SGD's, saved in float32
            state["step"] = _counter(p)

        same = grad.stride() == p.stride()
        grads.append(grad if same else torch.empty_like(p, dtype=grad.dtype).copy_(grad))

    def step(weights: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        # Fused kernels walk the memory of parameter, gradient and state side by side: in another
        # layout they would pair the wrong elements, on a CPU silently.
        fused = all(
            p.device.type in _FUSED_DEVICES
            and (p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride())
            and all(s.stride() == p.stride() for key, s in state.items() if key != "step")
            for p, state in zip(weights, states, strict=True)
        )
        # Only the fused kernels skip a step on the device; for the others the host must wait.
        if fused or found_inf is None or not bool(found_inf):
            rule(
                batch._replace(
                    params=weights,
                    grads=grads,
                    states=states,
                ),
                fused,
            )

    wide = [k for k, p in enumerate(params) if p.dtype == wide_dtype(p.dtype)]
    if wide:
        step(*([x[k] for k in wide] for x in (params, grads, states)))  # pyright: ignore

    # A few at a time, so that the copies of a large model do not double its memory.
    chunks: list[list[int]] = []
    size = 0
    for k in sorted(set(range(len(params))) - set(wide)):
        size += params[k].numel()
        if not chunks or size > _BATCH_ELEMENTS:
            chunks.append([])
            size = params[k].numel()

        chunks[-1].append(k)

    for chunk in chunks:
        copies, wide_grads = ([x[k].float() for k in chunk] for x in (params, grads))
        step(copies, wide_grads, [states[k] for k in chunk])

        for k, copy in zip(chunk, copies, strict=True):
            if params[k].dtype == torch.bfloat16:
                seed = step_seed(states[k]["step"], batch.streams[k])
                round_stochastically(copy, params[k], seed)
            else:
                params[k].copy_(copy)

    return grads


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    taken = []
    for t in tensors[:SAMPLE_TENSORS]:
        flat = t.flatten()
        taken.append(flat[:: max(1, flat.numel() // SAMPLE_ELEMENTS)][:SAMPLE_ELEMENTS].float())

    return torch.cat(taken)


def _record(batch: Batch, update: Tensor, G: Tensor, stats: StepStats) -> None:
    group = batch.group
    found_inf = batch.found_inf
    if found_inf is not None:  # nothing moved, and G may be non-finite
        update, G = (torch.where(found_inf > 0, 0.0, x) for x in (update, G))

    stats.add_update(group["name"], update * group["lr"])
    stats.add_sample(group["name"], update, G)
