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

Legend: K pairs of one shape; A is [K, r, n], B is [K, m, r]; W is m x n.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from mesotron.optim.device import round_stochastically, rounding_seed, wide_dtype
from mesotron.optim.leash import F_MAX, spectral_norm
from mesotron.optim.matrix import Filtered, apply_filter
from mesotron.optim.stats import SAMPLE_WINDOWS, StepStats, move
from mesotron.optim.step import (
    Group,
    gradients_finite,
    group_filter,
    momentum_of,
    on_host,
    update_momentum,
)
from mesotron.optim.views import View
from mesotron.spectral.scale import step_scale

DAMPING = 2.0
UNITS = ("rms", "direction")
_JITTER = 1e-10  # of a Gram matrix's mean diagonal, far below any adapter that still has its rank
_POWER_STEPS = 8


class Factors(NamedTuple):
    """Unit steps of K pairs: the weights change by -(e / s) times these."""

    dA: Tensor
    dB: Tensor
    moved: Tensor  # [K], squared Frobenius norm of the product's change over e^2
    filtered: Filtered  # of B's side, one entry per pair


def product_step(
    A: Tensor, B: Tensor, U_A: Tensor, U_B: Tensor, e: Tensor, s: float, group: Group
) -> Factors:
    """The pair's step from its directions, by `group`'s filter, view and scale. All tensors are
    computed in float64 where the device has it: the square of A's condition number enters."""
    view = View.parse(group["view"] or "whole")
    exact = torch.float32 if A.device.type == "mps" else torch.float64
    work = getattr(torch, group["dtype"] or "", None) or wide_dtype(U_A.dtype)
    A, B, U_A, U_B = (x.to(exact) for x in (A, B, U_A, U_B))
    C = _root(A @ A.mT)
    identity = torch.eye(A.shape[1], dtype=exact, device=A.device).repeat(len(A), 1, 1)
    inverse = torch.linalg.solve_triangular(C, identity, upper=False)
    E = _root(B.mT @ B + (DAMPING * e / s) ** 2 * (inverse.mT @ inverse))
    shape = (B.shape[1], A.shape[2])
    X_B = torch.linalg.solve_triangular(C, U_B.mT, upper=False).mT
    X_A = torch.linalg.solve_triangular(E, U_A, upper=False)
    F_B, seen = _filter(X_B, view, "rows", shape, group, work)
    F_A, _ = _filter(X_A, view, "cols", shape, group, work)
    dB = torch.linalg.solve_triangular(C.mT, F_B.mT, upper=True).mT
    dA = torch.linalg.solve_triangular(E.mT, F_A, upper=True)

    # Spectral norms per block (head), where the filter acts.
    left = _blocks(torch.cat([dB, B], dim=2), view, "rows")
    right = _blocks(torch.cat([A, dA], dim=1), view, "cols")
    numbers = torch.stack([_norms(L, R) for L in left for R in right])
    norm = numbers[..., 0].amax(0)
    reference = numbers[..., 1:3].amax((0, 2))
    c = torch.where(norm > 0, reference / norm, 1.0).clamp(0.5, 1.0)
    c3 = c[:, None, None]

    return Factors(dA * c3, dB * c3, numbers[..., 3].sum(0) * c * c, seen)


def _root(gram: Tensor) -> Tensor:
    """The Cholesky factor; a zero matrix gets a tiny one, which meets zero directions only."""
    diagonal = gram.diagonal(dim1=1, dim2=2)
    jitter = _JITTER * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    return torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand_as(diagonal)))[0]


def _blocks(X: Tensor, view: View, axis: str) -> list[Tensor]:
    """The blocks of W that a factor holds, [K, blocks, rows, cols] for each size: B has the row
    cuts of the view, A its column cuts."""
    if view.axis != axis:
        return [X[:, None]]
    windows = replace(view, layout="stack", transposed=False).windows(X)
    return [w.strided.reshape(*w.strided.shape[:2], w.rows, w.cols) for w in windows]


def _filter(
    X: Tensor, view: View, axis: str, shape: tuple[int, int], group: Group, work: torch.dtype
) -> tuple[Tensor, Filtered]:
    """f of each block; X is overwritten. Blocks with another scale than the whole (fused
    projections of different height) are stepped in proportion."""
    cut = replace(view, layout="stack", transposed=False) if view.axis == axis else View("stack")
    K = X.shape[0]
    records = []

    reference = step_scale(group["scale"], *shape)
    for window in cut.windows(X):
        m, n = window.block_shape
        filtered = apply_filter(window.wide.reshape(-1, m, n).to(work), group_filter(group))
        rows, cols = (window.rows, shape[1]) if axis == "rows" else (shape[0], window.cols)
        ratio = step_scale(group["scale"], rows, cols) / reference
        window.wide.copy_(filtered.X.view(window.wide.shape) * ratio)
        records.append([x.view(K, -1).double().mean(1) for x in filtered[1:]])

    norm, concentration, passed = (torch.stack(x).mean(0) for x in zip(*records, strict=True))
    return X, Filtered(norm, norm, concentration, passed)


def _norms(L: Tensor, R: Tensor) -> Tensor:
    """Of S = L R = dB A + B dA, over the blocks of each pair: the spectral norms of S and of its
    two terms, and the squared Frobenius norm of S, [K, 4]."""
    r = L.shape[-1] // 2
    left = L.mT @ L
    right = R @ R.mT

    # Vectors of the input space, so that the numbers do not depend on the gauge either.
    k = torch.arange(1, R.shape[-1] + 1, device=R.device, dtype=R.dtype)
    start = R @ torch.stack([(0.7 * k * k).sin(), (1.1 * k * k).cos()], dim=1)
    parts = [slice(None), slice(0, r), slice(r, None)]
    norms = [_power(left[..., x, x], right[..., x, x], start[..., x, :]).amax(1) for x in parts]

    return torch.stack([*norms, (left * right).sum((1, 2, 3))], dim=1)


def _power(left: Tensor, right: Tensor, z: Tensor) -> Tensor:
    """Spectral norm of L R, [K, blocks], from L^T L, R R^T and starts z = R v."""
    tiny = torch.finfo(torch.float32).tiny
    y = z
    for _ in range(_POWER_STEPS):
        y = left @ z
        y = y / y.abs().amax(-2, keepdim=True).clamp_min(tiny)
        z = right @ y

    inner = (z * y).sum(-2)
    outer = (z * (left @ z)).sum(-2)

    return torch.where(inner > 0, outer / inner.clamp_min(tiny), 0.0).amax(-1).clamp_min(0).sqrt()


class Pair(NamedTuple):
    A: Tensor
    B: Tensor
    s: float
    group: Group
    number: int  # of A in the optimizer
    start_norm: float | None  # of W0, for a leash

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.A, self.B


def find_pairs(groups: list[dict[str, Any]]) -> list[Pair]:
    """The adapters of groups with `pairs`, whose parameters are A, B, A, B, ..."""
    pairs = []
    number = 0
    for group in groups:
        params = group["params"]
        for k, s in enumerate(group["pairs"] or ()):
            norm = group["start_norms"][k] if group["start_norms"] else None
            pairs.append(
                Pair(
                    params[2 * k],
                    params[2 * k + 1],
                    s,
                    group,
                    number + 2 * k,
                    norm,
                )
            )

        number += len(params)

    return pairs


def pair_up(model: nn.Module, group: dict[str, Any], norms: bool) -> dict[str, Any]:
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
        layer: Any = model.get_submodule(place)
        scalings.append(float(layer.scaling[leaf.partition(".")[0]]))

        if norms:
            base = layer.get_base_layer()
            weight = base.weight
            if not weight.is_floating_point():  # 4 or 8 bits
                from peft.utils.integrations import dequantize_module_weight

                weight = dequantize_module_weight(base)

            start_norms.append(spectral_norm(weight.flatten(1)).item())

    view = group["view"].removeprefix("product").removeprefix("/") or "whole"
    params = [named[name] for name in names]
    keys = {
        "params": params,
        "param_names": names,
        "pairs": scalings,
        "view": view,
    }

    return keys | {"start_norms": start_norms} if norms else keys


def product_distances(group: dict[str, Any]) -> list[float]:
    """Spectral norms of s B A over those of W0."""
    far = []
    for pair, norm in zip(find_pairs([group]), group["start_norms"] or (), strict=False):
        if not isinstance(pair.A, DTensor):
            A = pair.A.detach().flatten(1).double()
            B = pair.B.detach().flatten(1).double()
            product = _power(
                (B.mT @ B)[None, None], (A @ A.mT)[None, None], A.sum(1)[None, None, :, None]
            )
            far.append(pair.s * product.item() / max(norm, 1e-30))

    return far


def check_pairs(group: dict[str, Any]) -> None:
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
        if A.ndim < 2 or B.ndim < 2 or A.shape[0] != B.flatten(1).shape[1] or not s > 0:
            raise ValueError(
                f"A {tuple(A.shape)} and B {tuple(B.shape)} with scaling {s} are no LoRA pair: A "
                "is (rank, inputs), B (outputs, rank), the scaling above 0"
            )

    if group["leash"] is not None and len(group["start_norms"] or ()) != len(pairs):
        raise ValueError(
            "leash: give start_norms, the spectral norms of the weights that the pairs adapt (one "
            "per pair), or build the optimizer with mesotron.muon(model, lora='product')"
        )

    view = View.parse(group["view"] or "whole")
    if view.layout != "matrix":
        raise ValueError(f"view {group['view']!r} does not fit a LoRA product: use rows or cols")


@torch.no_grad()
def step_pairs(pairs: list[Pair], states: Any, stats: StepStats) -> None:
    """Step the pairs that have gradients; equal shapes of a group together."""
    buckets: dict[tuple, list[Pair]] = defaultdict(list)
    for order, pair in enumerate(pairs):
        sharded = isinstance(pair.A, DTensor) or isinstance(pair.B, DTensor)
        if not sharded and (pair.A.grad is None or pair.B.grad is None):
            continue

        A = pair.A
        B = pair.B
        group = pair.group
        alone = None if group["batched"] else order
        key = (group["name"], A.shape, B.shape, A.dtype, B.dtype, A.device, pair.s, sharded, alone)
        buckets[key].append(pair)

    for bucket in buckets.values():
        _step_bucket(bucket, states, stats)


def _step_bucket(pairs: list[Pair], states: Any, stats: StepStats) -> None:
    group = pairs[0].group
    s = pairs[0].s
    grads = [[_whole_gradient(p) for p in pair.sides] for pair in pairs]
    finite = gradients_finite([g for pair in grads for g in pair]).view(-1, 2).all(1)
    stats.finite.append(([group["name"]] * len(pairs), finite))

    mask: Tensor | None = finite[:, None, None]
    if on_host(finite):
        kept = [k for k, ok in enumerate(finite.tolist()) if ok]
        if not kept:
            return

        pairs = [pairs[k] for k in kept]
        grads = [grads[k] for k in kept]
        mask = None

    wide = wide_dtype(pairs[0].A.dtype)
    old = []

    directions = []
    for side in (0, 1):
        params = [pair.sides[side] for pair in pairs]
        buffers = [momentum_of(states[p], p, group) for p in params]
        M = torch.stack([_whole(x).flatten(1) for x in buffers])
        G = torch.stack([both[side].flatten(1) for both in grads])
        directions.append(update_momentum(G, M, group, mask).to(wide))
        _write(buffers, M, None)
        old.append(torch.stack([_whole(p).flatten(1) for p in params]).to(wide))

    (A, B), (U_A, U_B) = old, directions
    m = B.shape[1]
    n = A.shape[2]

    scale = step_scale(group["scale"], m, n)
    if group["lora_unit"] == "rms":  # r directions change the product by Muon's RMS
        scale *= math.sqrt(min(m, n) / min(A.shape[1], m, n))

    e = torch.as_tensor(group["lr"] * scale, dtype=wide, device=A.device).expand(len(pairs))
    keep = 1 - group["lr"] * group["weight_decay"]
    if group["leash"] is not None:
        norms = move(torch.tensor([pair.start_norm for pair in pairs], dtype=wide), A.device)
        far = torch.where(norms > 0, group["leash"] * norms / F_MAX, torch.inf)
        e = torch.minimum(e, far / 2)  # a rate above that would not keep the leash
        keep = (1 - e / far)[:, None, None]

    size = e.double()
    e = e[:, None, None]

    step = product_step(A, B, U_A, U_B, e, s, group)
    # B alone decays: A would vanish where its directions do, and with it the step's inverse.
    for side, (unit, old_share) in enumerate(((step.dA / keep, 1.0), (step.dB, keep))):
        new = old_share * old[side] - (e / s) * unit.to(wide)
        if mask is not None:
            new = torch.where(mask, new, old[side])

        seed = rounding_seed(group["step"], pairs[0].number + side, 0)
        _write([pair.sides[side] for pair in pairs], new, seed)

    names = [group["name"]] * len(pairs)
    stats.add_blocks(names, step.filtered._replace(passed=step.moved), size, m * n)

    for k in range(0, len(pairs), -(-len(pairs) // SAMPLE_WINDOWS)):
        seen = grads[k][1] if mask is None else torch.where(mask[k], grads[k][1].flatten(1), 0.0)
        stats.add_sample(group["name"], step.dB[k], seen)


def _whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def _whole_gradient(p: Tensor) -> Tensor:
    # All ranks gather, with zeros where one has no gradient: it must not leave the others waiting.
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    if isinstance(p, DTensor) and isinstance(grad, DTensor) and grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    return _whole(grad)


def _write(targets: list[Tensor], values: Tensor, seed: int | None) -> None:
    """Copy `values`, [K, ...], into the targets. Every rank computes whole pairs, which are small,
    and keeps its own part; bfloat16 weights are rounded at random with `seed`."""
    if seed is not None and targets[0].dtype == torch.bfloat16:
        rounded = torch.empty_like(values, dtype=torch.bfloat16)
        round_stochastically(values, rounded, seed)
        values = rounded

    parts = [x.view(p.shape) for x, p in zip(values.unbind(), targets, strict=True)]
    for k, p in enumerate(targets):
        if isinstance(p, DTensor):
            copies = [Replicate()] * p.device_mesh.ndim
            shared = DTensor.from_local(parts[k], p.device_mesh, copies, run_check=False)
            parts[k] = shared.redistribute(placements=p.placements).to_local()

    local = [p.to_local() if isinstance(p, DTensor) else p for p in targets]
    torch._foreach_copy_(local, parts)  # pyright: ignore
