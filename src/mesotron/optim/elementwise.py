"""The step of everything that is not a hidden matrix, by an auxiliary rule.

Weights narrower than float32 are stepped as float32 copies with float32 state, and bfloat16 ones
rounded back at random: to the nearest, a step of 1e-6 would leave most of them unchanged.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mesotron.config.rules import AUXILIARY_RULES
from mesotron.optim.device import round_stochastically, step_seed, wide_dtype
from mesotron.optim.registry import AuxiliaryBatch, AuxiliaryRule, State
from mesotron.optim.stats import SAMPLE_ELEMENTS, SAMPLE_TENSORS, StepStats

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")
# Narrow weights that are widened together; their copies take 8 bytes each.
_BATCH_ELEMENTS = 2**26


def step_auxiliary(batch: AuxiliaryBatch, stats: StepStats) -> None:
    rule = AUXILIARY_RULES[batch.group["rule"]]
    batch = batch._replace(grads=_prepare(rule, batch))

    wide: list[int] = []
    narrow: list[int] = []
    for k, p in enumerate(batch.params):
        numbers = wide if p.dtype == wide_dtype(p.dtype) else narrow
        numbers.append(k)

    if wide:
        _update(rule, batch.pick(wide))

    for numbers in _chunks(batch.params, narrow):
        _step_as_copies(rule, batch.pick(numbers))

    G = sample(batch.grads)
    _record(batch, rule.direction(batch, G), G, stats)


def new_counter(p: Tensor) -> Tensor:
    """A count of steps beside a parameter."""
    # A meta tensor has no value, and PyTorch's step reads the counter.
    device = "cpu" if p.device.type == "meta" else p.device
    return torch.zeros((), dtype=torch.float32, device=device)


def sample(tensors: Sequence[Tensor]) -> Tensor:
    """Some elements of some of the tensors, as one float32 vector."""
    taken = []
    for t in tensors[:SAMPLE_TENSORS]:
        flat = t.flatten()
        stride = max(1, flat.numel() // SAMPLE_ELEMENTS)
        taken.append(flat[::stride][:SAMPLE_ELEMENTS].float())

    return torch.cat(taken)


def _prepare(rule: AuxiliaryRule, batch: AuxiliaryBatch) -> list[Tensor]:
    """Fill empty states; returns the gradients, laid out like their parameters."""
    grads = []
    for p, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
        if not state:
            state |= rule.new_state(p)
        elif "step" not in state and p.dtype != wide_dtype(p.dtype):  # SGD's, saved in float32
            state["step"] = new_counter(p)

        if grad.stride() != p.stride():
            grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)

        grads.append(grad)

    return grads


def _update(rule: AuxiliaryRule, batch: AuxiliaryBatch) -> None:
    fused = all(map(_can_fuse, batch.params, batch.states))

    # Only the fused kernels skip a step on the device; for the others the host must wait.
    if fused or batch.found_inf is None or not bool(batch.found_inf):
        rule.update(batch, fused)


def _can_fuse(p: Tensor, state: State) -> bool:
    """Fused kernels walk the memory of parameter, gradient and state side by side: in another
    layout they would pair the wrong elements, on a CPU silently."""
    if p.device.type not in _FUSED_DEVICES:
        return False

    dense = p.is_contiguous() or torch.empty_like(p, device="meta").stride() == p.stride()
    return dense and all(s.stride() == p.stride() for key, s in state.items() if key != "step")


def _chunks(params: list[Tensor], narrow: list[int]) -> Iterator[list[int]]:
    """A few at a time, so that the copies of a large model do not double its memory."""
    chunk: list[int] = []
    size = 0
    for k in narrow:
        if chunk and size + params[k].numel() > _BATCH_ELEMENTS:
            yield chunk
            chunk = []
            size = 0

        chunk.append(k)
        size += params[k].numel()

    if chunk:
        yield chunk


def _step_as_copies(rule: AuxiliaryRule, batch: AuxiliaryBatch) -> None:
    copies = [p.float() for p in batch.params]
    grads = [grad.float() for grad in batch.grads]
    _update(rule, batch._replace(params=copies, grads=grads))

    for k, p in enumerate(batch.params):
        if p.dtype == torch.bfloat16:
            seed = step_seed(batch.states[k]["step"], batch.streams[k])
            round_stochastically(copies[k], p, seed)
        else:
            p.copy_(copies[k])


def _record(batch: AuxiliaryBatch, update: Tensor, G: Tensor, stats: StepStats) -> None:
    group = batch.group
    found_inf = batch.found_inf
    if found_inf is not None:  # nothing moved, and G may be non-finite
        update = torch.where(found_inf > 0, 0.0, update)
        G = torch.where(found_inf > 0, 0.0, G)

    stats.add_update(group["name"], update * group["lr"])
    stats.add_sample(group["name"], update, G)
