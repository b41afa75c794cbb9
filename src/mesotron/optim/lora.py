"""LoRA as a product: A and B of W = W0 + s B A move so that the change of s B A is the spectral
step.

    A A^T = C C^T;  dB = -(e c / s) f(U_B C^-T) C^-1
    B^T B + (DAMPING e / s)^2 (A A^T)^-1 = E E^T;  dA = -(e c / s) E^-T f(E^-1 U_A)

U are the directions (momenta), f the filter, e the spectral norm of the step: lr scale(m, n), as
Muon's on W, times sqrt(min(m, n) / r) in the unit "rms", where r directions then change W by Muon's
RMS. To first order the product changes by -e c S with S = f(U_B C^-T) C^-1 A + B E^-T f(E^-1 U_A),
and c in [1/2, 1] gives it the spectral norm of a filtered matrix: S is twice Muon's step where the
two terms coincide (full rank) and one term alone at B = 0. Nothing changes under B -> B R,
A -> R^-1 A: a Cholesky factor differs from the symmetric root by a rotation, which f carries along.
The damping keeps the second-order term s dB dA below e / 2 where B is still small.

Legend: K pairs of one shape; W is m x n. A, dA, U_A are [K, r, n]; B, dB, U_B are [K, m, r]; C and
E are [K, r, r]; e and c are [K]. A view cuts the rows of B and the columns of A into blocks.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mesotron.optim.device import round_stochastically, rounding_seed, wide_dtype
from mesotron.optim.finite import gradients_finite, on_host
from mesotron.optim.matrix import Filtered, apply_filter
from mesotron.optim.norms import F_MAX, spectral_norm
from mesotron.optim.registry import Group
from mesotron.optim.state import momentum_of, whole
from mesotron.optim.stats import SAMPLE_WINDOWS, StepStats, move
from mesotron.optim.step import group_filter, update_momentum
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

DAMPING = 2.0
UNITS = ("rms", "direction")
_JITTER = 1e-10  # of a Gram matrix's mean diagonal, far below any adapter that still has its rank
_POWER_STEPS = 8
_TINY = torch.finfo(torch.float32).tiny


class Factors(NamedTuple):
    """Unit steps of K pairs: the weights change by -(e / s) times these."""

    dA: Tensor
    dB: Tensor
    moved: Tensor  # [K], squared Frobenius norm of the product's change over e^2
    filtered: Filtered  # of B's side, one entry per pair


def product_step(
    A: Tensor,
    B: Tensor,
    U_A: Tensor,
    U_B: Tensor,
    e: Tensor,
    s: float,
    group: Group,
) -> Factors:
    """The pair's step from its directions, by `group`'s filter, view and scale. All tensors are
    computed in float64 where the device has it: the square of A's condition number enters."""
    view = View.parse(group["view"] or "whole")
    named = getattr(torch, group["dtype"] or "", None)
    side = _Side(view, (B.shape[1], A.shape[2]), group, named or wide_dtype(U_A.dtype))

    exact = torch.float32 if A.device.type == "mps" else torch.float64
    A = A.to(exact)
    B = B.to(exact)
    U_A = U_A.to(exact)
    U_B = U_B.to(exact)

    # A A^T = C C^T;  B^T B + (DAMPING e / s)^2 (A A^T)^-1 = E E^T
    C = _root(A @ A.mT)
    identity = torch.eye(A.shape[1], dtype=exact, device=A.device).repeat(len(A), 1, 1)
    inverse = torch.linalg.solve_triangular(C, identity, upper=False)
    E = _root(B.mT @ B + (DAMPING * e / s) ** 2 * (inverse.mT @ inverse))

    # F_B = f(U_B C^-T), [K, m, r];  F_A = f(E^-1 U_A), [K, r, n]
    X_B = torch.linalg.solve_triangular(C, U_B.mT, upper=False).mT
    X_A = torch.linalg.solve_triangular(E, U_A, upper=False)
    F_B, seen = side.filter(X_B, "rows")
    F_A, _ = side.filter(X_A, "cols")

    # dB = F_B C^-1;  dA = E^-T F_A
    dB = torch.linalg.solve_triangular(C.mT, F_B.mT, upper=True).mT
    dA = torch.linalg.solve_triangular(E.mT, F_A, upper=True)

    c, moved = _fit(A, B, dA, dB, view)
    c3 = c[:, None, None]

    return Factors(dA * c3, dB * c3, moved * c * c, seen)


def _root(gram: Tensor) -> Tensor:
    """The Cholesky factor; a zero matrix gets a tiny one, which meets zero directions only."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    jitter = _JITTER * diagonal.mean(1, keepdim=True) + _TINY
    return torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand_as(diagonal)))[0]


def _fit(A: Tensor, B: Tensor, dA: Tensor, dB: Tensor, view: View) -> tuple[Tensor, Tensor]:
    """The factor c that gives the product's change S = dB A + B dA the spectral norm of its larger
    term, in each block (head), where the filter acts; and the squared Frobenius norm of S."""
    left = _blocks(torch.cat([dB, B], dim=2), view, "rows")
    right = _blocks(torch.cat([A, dA], dim=1), view, "cols")
    numbers = torch.stack([_norms(L, R) for L in left for R in right])  # [block pairs, K, 4]

    norm = numbers[..., 0].amax(0)
    reference = numbers[..., 1:3].amax((0, 2))
    c = torch.where(norm > 0, reference / norm, 1.0).clamp(0.5, 1.0)

    return c, numbers[..., 3].sum(0)


def _blocks(X: Tensor, view: View, axis: str) -> list[Tensor]:
    """The blocks of W that a factor holds, [K, blocks, rows, cols] for each size: B has the row
    cuts of the view, A its column cuts."""
    if view.axis != axis:
        return [X[:, None]]

    windows = replace(view, layout="stack", transposed=False).windows(X)
    return [w.strided.reshape(*w.strided.shape[:2], w.rows, w.cols) for w in windows]


@dataclass(frozen=True)
class _Side:
    """How the directions of B (along the rows of W) and of A (along its columns) are filtered."""

    view: View
    shape: tuple[int, int]  # m, n
    group: Group
    dtype: torch.dtype  # of the filter's products

    def filter(self, X: Tensor, axis: str) -> tuple[Tensor, Filtered]:
        """f of each block; X is overwritten. Blocks with another scale than the whole (fused
        projections of different height) are stepped in proportion."""
        cut = View("stack")
        if self.view.axis == axis:
            cut = replace(self.view, layout="stack", transposed=False)

        scale = self.group["scale"]
        reference = step_scale(scale, *self.shape)
        records = []
        for window in cut.windows(X):
            block = window.wide.reshape(-1, *window.block_shape).to(self.dtype)
            filtered = apply_filter(block, group_filter(self.group))

            rows, cols = self.shape
            if axis == "rows":
                rows = window.rows
            else:
                cols = window.cols

            ratio = step_scale(scale, rows, cols) / reference
            window.wide.copy_(filtered.X.view(window.wide.shape) * ratio)
            records.append(_mean_per_pair(filtered, X.shape[0]))

        norm, concentration, passed = torch.stack(records).mean(0)
        return X, Filtered(norm, norm, concentration, passed)


def _mean_per_pair(filtered: Filtered, K: int) -> Tensor:
    """Norm, concentration and passed directions, averaged over each pair's blocks, [3, K]."""
    numbers = (filtered.norm, filtered.concentration, filtered.passed)
    return torch.stack([x.view(K, -1).double().mean(1) for x in numbers])


def _norms(L: Tensor, R: Tensor) -> Tensor:
    """Of S = L R = dB A + B dA, over the blocks of each pair: the spectral norms of S and of its
    two terms, and the squared Frobenius norm of S, [K, 4].

    L is [K, blocks, rows, 2 r] and R [K, blocks, 2 r, cols]."""
    r = L.shape[-1] // 2
    left = L.mT @ L
    right = R @ R.mT

    # Vectors of the input space, so that the numbers do not depend on the gauge either.
    k = torch.arange(1, R.shape[-1] + 1, device=R.device, dtype=R.dtype)
    start = R @ torch.stack([(0.7 * k * k).sin(), (1.1 * k * k).cos()], dim=1)

    columns = []
    for part in (slice(None), slice(0, r), slice(r, None)):  # S, dB A, B dA
        norm = _power(left[..., part, part], right[..., part, part], start[..., part, :])
        columns.append(norm.amax(1))

    columns.append((left * right).sum((1, 2, 3)))
    return torch.stack(columns, dim=1)


def _power(left: Tensor, right: Tensor, z: Tensor) -> Tensor:
    """Spectral norm of L R, [K, blocks], from L^T L, R R^T and starts z = R v."""
    y = z
    for _ in range(_POWER_STEPS):
        y = left @ z
        y = y / y.abs().amax(-2, keepdim=True).clamp_min(_TINY)
        z = right @ y

    inner = (z * y).sum(-2)
    outer = (z * (left @ z)).sum(-2)

    squared = torch.where(inner > 0, outer / inner.clamp_min(_TINY), 0.0)
    return squared.amax(-1).clamp_min(0).sqrt()


class LoraPair(NamedTuple):
    A: Tensor
    B: Tensor
    s: float
    group: Group
    number: int  # of A in the optimizer
    start_norm: float | None  # of W0, for a leash

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.A, self.B

    @property
    def sharded(self) -> bool:
        return isinstance(self.A, DTensor) or isinstance(self.B, DTensor)


def find_pairs(groups: list[Group]) -> list[LoraPair]:
    """The adapters of groups with `pairs`, whose parameters are A, B, A, B, ..."""
    pairs = []
    first = 0
    for group in groups:
        params = group["params"]
        for k, s in enumerate(group["pairs"] or ()):
            norm = group["start_norms"][k] if group["start_norms"] else None
            A = params[2 * k]
            B = params[2 * k + 1]
            pairs.append(LoraPair(A, B, s, group, number=first + 2 * k, start_norm=norm))

        first += len(params)

    return pairs


def pair_up(model: nn.Module, group: Group, norms: bool) -> Group:
    """The keys of a routed group of LoRA factors, with A before its own B; with `norms`, also the
    spectral norms of the weights they adapt."""
    named = dict(zip(group["param_names"], group["params"], strict=True))
    names = []
    scalings = []
    start_norms = []

    for name in named:
        first = name.replace(".lora_B.", ".lora_A.")
        second = name.replace(".lora_A.", ".lora_B.")
        if first not in named or second not in named:
            raise ValueError(
                f"lora='product' steps A and B together, but {name} trains without its partner "
                "under the same rule and lr_scale: train both, or pass lora='B'"
            )
        if name == second:
            continue

        names += [first, second]
        place, _, leaf = first.partition(".lora_A.")
        adapter, _, _ = leaf.partition(".")
        layer: Any = model.get_submodule(place)
        scalings.append(float(layer.scaling[adapter]))
        if norms:
            start_norms.append(spectral_norm(_base_weight(layer).flatten(1)).item())

    view = group["view"].removeprefix("product").removeprefix("/") or "whole"
    keys = {
        "params": [named[name] for name in names],
        "param_names": names,
        "pairs": scalings,
        "view": view,
    }

    if norms:
        return keys | {"start_norms": start_norms}

    return keys


def _base_weight(layer: Any) -> Tensor:
    """The weights that a LoRA layer adapts, dequantized from 4 or 8 bits."""
    base = layer.get_base_layer()
    if base.weight.is_floating_point():
        return base.weight

    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(base)


def product_distances(group: Group) -> list[float]:
    """Spectral norms of s B A over those of W0."""
    far = []
    for pair, norm in zip(find_pairs([group]), group["start_norms"] or (), strict=False):
        if isinstance(pair.A, DTensor):
            continue

        A = pair.A.detach().flatten(1).double()
        B = pair.B.detach().flatten(1).double()
        start = A.sum(1)[None, None, :, None]
        product = _power((B.mT @ B)[None, None], (A @ A.mT)[None, None], start)
        far.append(pair.s * product.item() / max(norm, 1e-30))

    return far


def check_pairs(group: Group) -> None:
    pairs = group["pairs"]
    params = group["params"]
    if group["lora_unit"] not in UNITS:
        raise ValueError(f"lora_unit={group['lora_unit']!r} must be one of {', '.join(UNITS)}")
    if len(params) != 2 * len(pairs):
        raise ValueError(
            f"pairs={pairs!r} names {len(pairs)} LoRA scalings for {len(params)} parameters: give "
            "one per pair, with params=[A, B, A, B, ...]"
        )

    for A, B, s in zip(params[::2], params[1::2], pairs, strict=True):
        _check_pair(A, B, s)

    if group["leash"] is not None and len(group["start_norms"] or ()) != len(pairs):
        raise ValueError(
            "leash: give start_norms, the spectral norms of the weights that the pairs adapt (one "
            "per pair), or build the optimizer with mesotron.muon(model, lora='product')"
        )

    view = View.parse(group["view"] or "whole")
    if view.layout != "matrix":
        raise ValueError(f"view {group['view']!r} does not fit a LoRA product: use rows or cols")


def _check_pair(A: Tensor, B: Tensor, s: float) -> None:
    are_matrices = A.ndim >= 2 and B.ndim >= 2
    if not are_matrices or A.shape[0] != B.flatten(1).shape[1] or not s > 0:
        raise ValueError(
            f"A {tuple(A.shape)} and B {tuple(B.shape)} with scaling {s} are no LoRA pair: A "
            "is (rank, inputs), B (outputs, rank), the scaling above 0"
        )


@torch.no_grad()
def step_pairs(pairs: list[LoraPair], states: Any, stats: StepStats) -> None:
    """Step the pairs that have gradients; equal shapes of a group together."""
    buckets: dict[tuple, list[LoraPair]] = defaultdict(list)
    for order, pair in enumerate(pairs):
        if pair.sharded or (pair.A.grad is not None and pair.B.grad is not None):
            buckets[_bucket_key(pair, order)].append(pair)

    for bucket in buckets.values():
        _step_bucket(bucket, states, stats)


def _bucket_key(pair: LoraPair, order: int) -> tuple:
    A = pair.A
    B = pair.B
    alone = None if pair.group["batched"] else order
    return (
        pair.group["name"],
        A.shape,
        B.shape,
        A.dtype,
        B.dtype,
        A.device,
        pair.s,
        pair.sharded,
        alone,
    )


def _step_bucket(pairs: list[LoraPair], states: Any, stats: StepStats) -> None:
    group = pairs[0].group
    grads = [[_whole_gradient(p) for p in pair.sides] for pair in pairs]
    finite = gradients_finite(list(chain.from_iterable(grads))).view(-1, 2).all(1)
    stats.finite.append(([group["name"]] * len(pairs), finite))

    mask: Tensor | None = finite[:, None, None]
    if on_host(finite):
        flags = finite.tolist()
        pairs = list(compress(pairs, flags))
        grads = list(compress(grads, flags))
        mask = None

    if pairs:
        _step_alike(pairs, grads, mask, states, stats)


def _step_alike(
    pairs: list[LoraPair],
    grads: list[list[Tensor]],
    mask: Tensor | None,
    states: Any,
    stats: StepStats,
) -> None:
    """Step K pairs of one shape; `mask`, [K, 1, 1], is None if all gradients are finite."""
    group = pairs[0].group
    s = pairs[0].s
    wide = wide_dtype(pairs[0].A.dtype)

    old = []
    directions = []
    for side in (0, 1):
        params = [pair.sides[side] for pair in pairs]
        G = torch.stack([both[side].flatten(1) for both in grads])
        buffers = [momentum_of(states[p], p, group) for p in params]
        directions.append(_update_momenta(buffers, G, group, mask).to(wide))
        old.append(_stack(params).to(wide))

    A, B = old
    U_A, U_B = directions
    e, keep = _size(pairs, A, B)
    e3 = e[:, None, None]
    step = product_step(A, B, U_A, U_B, e3, s, group)

    # B alone decays: A would vanish where its directions do, and with it the step's inverse.
    new_A = 1.0 * A - (e3 / s) * (step.dA / keep).to(wide)
    new_B = keep * B - (e3 / s) * step.dB.to(wide)
    for side, new in enumerate((new_A, new_B)):
        if mask is not None:
            new = torch.where(mask, new, old[side])

        seed = rounding_seed(group["step"], pairs[0].number + side, 0)
        _write([pair.sides[side] for pair in pairs], new, seed)

    _, m, _ = B.shape
    _, _, n = A.shape
    names = [group["name"]] * len(pairs)
    stats.add_blocks(names, step.filtered._replace(passed=step.moved), e.double(), m * n)
    _sample_cosines(step, grads, mask, group["name"], stats)


def _update_momenta(buffers: list[Tensor], G: Tensor, group: Group, mask: Tensor | None) -> Tensor:
    """Update the momenta of one side of K pairs; returns the directions."""
    M = _stack(buffers)
    U = update_momentum(G, M, group, mask)
    _write(buffers, M, None)

    return U


def _size(pairs: list[LoraPair], A: Tensor, B: Tensor) -> tuple[Tensor, float | Tensor]:
    """The spectral norm e of each pair's step, [K], and the share of B that decay leaves."""
    group = pairs[0].group
    _, r, n = A.shape
    _, m, _ = B.shape

    scale = step_scale(group["scale"], m, n)
    if group["lora_unit"] == "rms":  # r directions change the product by Muon's RMS
        scale *= math.sqrt(min(m, n) / min(r, m, n))

    e = torch.as_tensor(group["lr"] * scale, dtype=A.dtype, device=A.device).expand(len(pairs))
    if group["leash"] is None:
        return e, 1 - group["lr"] * group["weight_decay"]

    norms = move(torch.tensor([pair.start_norm for pair in pairs], dtype=A.dtype), A.device)
    far = torch.where(norms > 0, group["leash"] * norms / F_MAX, torch.inf)
    e = torch.minimum(e, far / 2)  # a rate above that would not keep the leash

    return e, (1 - e / far)[:, None, None]


def _sample_cosines(
    step: Factors,
    grads: list[list[Tensor]],
    mask: Tensor | None,
    name: str,
    stats: StepStats,
) -> None:
    stride = -(-len(grads) // SAMPLE_WINDOWS)
    for k in range(0, len(grads), stride):
        gradient = grads[k][1]
        if mask is not None:
            gradient = torch.where(mask[k], gradient.flatten(1), 0.0)

        stats.add_sample(name, step.dB[k], gradient)


def _stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([whole(x).flatten(1) for x in tensors])


def _whole_gradient(p: Tensor) -> Tensor:
    # All ranks gather, with zeros where one has no gradient: it must not leave the others waiting.
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return whole(grad)


def _write(targets: list[Tensor], values: Tensor, seed: int | None) -> None:
    """Copy `values`, [K, ...], into the targets. Every rank computes whole pairs, which are small,
    and keeps its own part; bfloat16 weights are rounded at random with `seed`."""
    if seed is not None and targets[0].dtype == torch.bfloat16:
        rounded = torch.empty_like(values, dtype=torch.bfloat16)
        round_stochastically(values, rounded, seed)
        values = rounded

    local = []
    parts = []
    for p, value in zip(targets, values.unbind(), strict=True):
        part = value.view(p.shape)
        if isinstance(p, DTensor):
            local.append(p.to_local())
            parts.append(_own_part(p, part))
        else:
            local.append(p)
            parts.append(part)

    torch._foreach_copy_(local, parts)  # pyright: ignore


def _own_part(p: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has computed."""
    copies = [Replicate()] * p.device_mesh.ndim
    shared = DTensor.from_local(whole, p.device_mesh, copies, run_check=False)
    return shared.redistribute(placements=p.placements).to_local()
