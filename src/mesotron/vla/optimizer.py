"""One optimizer for all parts of a policy, a rule for each part, and probes of their gradients.

The Pion paper (arXiv 2605.19282) uses Muon for vision and language and Pion for the action module.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mesotron.config import PartsOptimConfig
from mesotron.config.rules import SPECTRAL_RULES
from mesotron.optim import Pion, RoutedOptimizer, RoutingTable, route
from mesotron.probes.gradients import effective_rank, snr_from_norms, squared_norm
from mesotron.spectral.routing import Row
from mesotron.vla.policy import PARTS

_RULES = {"muon": "muon", "pion": "pion", "low_rank": "muon", "adamw": "adamw"}
_LOW_RANK = {"filter": "low_rank", "rank": 8, "steps": None, "promote": 0, "cutoff": None}
NUM_MICRO_BATCHES = 4
MAX_MATRICES = 6  # whose singular values are found by a probe


def route_parts(policy: nn.Module, config: PartsOptimConfig) -> RoutingTable:
    """Routing of a policy: each part's matrices by its own rule, everything else by AdamW."""
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    parts = [part for part in PARTS if any(name.startswith(f"{part}.") for name in names)]
    rules = {part: _RULES[getattr(config, part)] for part in parts}

    return route(policy, matrix="adamw", modalities=rules)


def build_optimizer(policy: nn.Module, config: PartsOptimConfig) -> RoutedOptimizer:
    """The optimizer of a policy (with its LoRA adapters in place), in groups named PART/RULE."""
    table = route_parts(policy, config)

    if config.promote is None and config.cutoff is None:
        cutoff = "noise"
    else:
        cutoff = config.cutoff

    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, routed in enumerate(table.groups(policy)):
        for name, p in zip(routed["param_names"], routed["params"], strict=True):
            kind = describe_leaf(table.row(name), p, routed["rule"])
            key = (number, kind)
            if key not in groups:
                groups[key] = make_group(routed, kind, config)

            groups[key]["params"].append(p)
            groups[key]["param_names"].append(name)

    return Pion(
        list(groups.values()),
        lr=config.lr,
        weight_decay=config.weight_decay,
        promote=config.promote or 0,
        cutoff=cutoff,
    )


class LeafKind(NamedTuple):
    """What the parameters of one group have in common, besides their routing."""

    part: str
    is_matrix: bool  # a hidden one, whatever its rule
    is_vector: bool


def describe_leaf(row: Row, p: nn.Parameter, rule: str) -> LeafKind:
    is_hidden = row.role.startswith(("attention", "linear", "lora_B"))
    is_matrix = rule in SPECTRAL_RULES or (is_hidden and len(row.shape) >= 2)
    part, _, _ = row.name.partition(".")

    return LeafKind(part, is_matrix, is_vector=p.ndim < 2)


def make_group(
    routed: Mapping[str, Any], kind: LeafKind, config: PartsOptimConfig
) -> dict[str, Any]:
    """An empty group with the settings of its part."""
    rule = routed["rule"]
    suffix = ""
    if rule not in SPECTRAL_RULES and kind.is_vector:
        suffix = "_vectors"
    elif rule not in SPECTRAL_RULES and kind.is_matrix:
        suffix = " matrices"

    lr = config.lr if config.aux_lr is None else config.aux_lr
    if kind.is_matrix:
        lr = config.lr * (config.action_scale if kind.part == "action" else 1.0)

    group = {
        "params": [],
        "param_names": [],
        "rule": rule,
        "view": routed["view"],
        "lr": lr,
        "name": f"{kind.part}/{routed['name']}{suffix}",
    }
    if kind.is_vector:
        group["weight_decay"] = 0.0
    if getattr(config, kind.part, "") == "low_rank" and rule == "muon":
        group |= _LOW_RANK

    return group


def part_updates(optimizer: RoutedOptimizer, stats: Mapping[str, float]) -> dict[str, float]:
    """RMS update of each part's hidden matrices, "update_rms/<part>", from `stats()`."""
    squares: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for group in optimizer.param_groups:
        name = group["name"]
        rms = stats.get(f"{name}/update_rms")
        is_matrix = group["rule"] in SPECTRAL_RULES or name.endswith(" matrices")
        if not is_matrix or rms is None:
            continue

        part, _, _ = name.partition("/")
        count = sum(p.numel() for p in group["params"])
        squares[part] += rms**2 * count
        counts[part] += count

    updates = {}
    for part, count in counts.items():
        if count:
            updates[f"update_rms/{part}"] = (squares[part] / count) ** 0.5

    return updates


class GradientProbe:
    """Effective rank and signal-to-noise ratio of each part's gradient, as in the Pion paper, for
    hidden matrices whatever their rule. Costs another pass over the batch, and singular values."""

    def __init__(self, policy: nn.Module) -> None:
        params = dict(policy.named_parameters())
        self._matrices: dict[str, list[nn.Parameter]] = defaultdict(list)

        for row in route(policy, matrix="muon"):
            part = row.name.split(".")[0]
            if row.rule in SPECTRAL_RULES and part in PARTS and len(row.shape) == 2:
                self._matrices[part].append(params[row.name])

    def measure(
        self, loss: Callable[[Tensor], Tensor], rows: Tensor, zero_grad: Callable[[], None]
    ) -> dict[str, float]:
        """Measure the gradient of `loss` over the rows of a batch, int64 [B]."""
        squares: dict[str, list[float]] = defaultdict(list)
        sums: dict[str, list[Tensor]] = {}
        for micro_batch in rows.chunk(NUM_MICRO_BATCHES):
            zero_grad()
            loss(micro_batch).backward()

            for part, matrices in self._matrices.items():
                grads = []
                for p in matrices:
                    if p.grad is not None:
                        grads.append(p.grad.detach().clone())

                squares[part].append(squared_norm(grads))
                before = sums.get(part, [torch.zeros_like(g) for g in grads])
                sums[part] = [a + b for a, b in zip(before, grads, strict=True)]

        zero_grad()
        metrics: dict[str, float] = {}
        for part, grads in sums.items():
            snr = snr_from_norms(squares[part], squared_norm(grads))["gradient/snr"]
            metrics[f"gradient/{part}/snr"] = snr
            for name, value in _rank_metrics(grads).items():
                metrics[f"gradient/{part}/{name}"] = value

        return metrics


def _rank_metrics(grads: Sequence[Tensor]) -> dict[str, float]:
    """Means over some of the matrices; empty if none has a finite, nonzero gradient."""
    stride = max(1, -(-len(grads) // MAX_MATRICES))

    # On the CPU: one core finds singular values as fast as a GPU, which has other work.
    columns: dict[str, list[float]] = defaultdict(list)
    for g in (grad.cpu() for grad in grads[::stride]):
        if not bool(g.any()) or not bool(torch.isfinite(g).all()):
            continue

        rank = effective_rank(g)
        effective = rank["gradient/effective_rank"]
        columns["effective_rank"].append(effective)
        columns["rank_share"].append(effective / min(g.shape))
        columns["top_share"].append(1 / rank["gradient/stable_rank"])

    return {name: sum(values) / len(values) for name, values in columns.items()}
