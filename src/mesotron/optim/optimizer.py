"""The optimizers: one `torch.optim.Optimizer` in which each param group names its rule.

`Muon` and `Pion` filter matrices and hand everything else to an auxiliary rule inside the same
object: one state_dict, one scheduler, one step. They differ by their filter alone. To have a model
    routed, call `mesotron.muon(model)` and its
siblings; the classes here are for groups made by hand.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from mesotron.optim import kernels
from mesotron.optim.auxiliary import STEPS
from mesotron.optim.fused.plan import Member
from mesotron.optim.fused.step import FusedStep
from mesotron.optim.groups import (
    check_group,
    check_same_rules,
    default_view,
    own_filter,
    split_by_rank,
)
from mesotron.optim.rules import AUXILIARY_RULES
from mesotron.optim.spectral_step import (
    LocalJob,
    filter_and_apply,
    gradients_finite,
    update_momentum,
)
from mesotron.optim.stats import StepStats

_log = logging.getLogger("mesotron")


class RoutedOptimizer(torch.optim.Optimizer):
    """Runs each param group by its own rule. Use `Muon` or `Pion`, or a builder; see there for the
    arguments."""

    def __init__(self, params: ParamsT, *, rule: str, aux: str, **defaults: Any) -> None:
        if aux not in AUXILIARY_RULES:
            raise ValueError(f"aux={aux!r} must be one of {', '.join(AUXILIARY_RULES)}")
        self._stats = StepStats()
        self._aux = aux
        self._fused: dict[torch.device, FusedStep] = {}
        groups = split_by_rank(params, rule=rule, aux=aux)
        super().__init__(groups, {"rule": rule, "view": None, "name": None, "step": 0, **defaults})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its missing values come from the constructor, its name and view are filled
        in."""
        for part in split_by_rank([param_group], rule=self.defaults["rule"], aux=self._aux):
            super().add_param_group(own_filter(part, self.defaults))
            group = self.param_groups[-1]
            try:
                check_group(group)
                group["view"] = group["view"] or default_view(group)
                group["name"] = self._unused_name(group)
            except ValueError:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_aux": self._aux}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After a copy, an unpickling or a load: no step has been made yet."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch's own, which no rule here reads
        for group in self.param_groups:  # a checkpoint may be older than an option
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._stats = StepStats()
        self._fused = {}

    def _unused_name(self, group: dict[str, Any]) -> str:
        base = group["name"] or group["rule"]
        taken = Counter(g["name"] for g in self.param_groups[:-1])
        number = 2
        name = base
        while taken[name]:
            name, number = f"{base}_{number}", number + 1
        return name

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore
        """One step for every parameter that has a gradient; `closure` re-evaluates the loss
        first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
        stats = StepStats()
        whole, sharded = self._sort_parameters(stats)
        for device, members in whole.items():
            if kernels.available(device):
                members = self._fused_step(device, members, stats)
            filter_and_apply(self._momentum_step(members, stats), stats)
        if sharded:
            from mesotron.optim.sharding.step import sharded_step

            sharded_step(self, sharded, stats)
        self._stats = stats
        return loss

    def _sort_parameters(
        self, stats: StepStats
    ) -> tuple[dict[torch.device, list[Member]], list[tuple[Tensor, dict[str, Any]]]]:
        """Step the auxiliary groups; sort the spectral parameters by device. Sharded ones of every
        rule, with a gradient or without, are for `sharded_step`."""
        spectral: dict[torch.device, list[Member]] = defaultdict(list)
        sharded: list[tuple[Tensor, dict[str, Any]]] = []
        stepped = 0
        for group in self.param_groups:
            # Ranks may differ in which gradients they have, so they agree on that together.
            shards = [p for p in group["params"] if isinstance(p, DTensor) and p.requires_grad]
            sharded += [(p, group) for p in shards if p.numel()]
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            stepped += len(params)
            whole = [p for p in params if not isinstance(p, DTensor)]
            if not whole:
                continue
            if group["rule"] in AUXILIARY_RULES:
                self._auxiliary_step(group, whole, stats)
                continue
            for p in whole:
                member = Member(p, dense_grad(p), self.momentum_of(p, group), group)
                spectral[p.device].append(member)
        if not stepped:
            self._refuse_frozen()
        return spectral, sharded

    def _fused_step(
        self, device: torch.device, members: list[Member], stats: StepStats
    ) -> list[Member]:
        """Step by the kernels what they can take; returns the rest."""
        plan = self._fused.get(device)
        if plan is None or not plan.fits(members):
            plan = self._fused[device] = FusedStep(members)
        plan.run(members, stats)
        return plan.left(members)

    def stats(self) -> dict[str, float]:
        """What the last step did, as "<group>/<statistic>": update_rms, concentration, passed_rank,
        dead_blocks, cosine, skipped (docs/metrics.md has the formulas). Waits for the device; call
        it when you log."""
        return self._stats.read()

    def momentum_of(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The momentum buffer of a matrix parameter, made on first use; like the parameter, DTensor
        or not."""
        state = self.state[p]
        if not state:
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            dtype = getattr(torch, group["momentum_dtype"]) if group["momentum_dtype"] else wide
            state["momentum_buffer"] = torch.zeros_like(p, dtype=dtype)
        return state["momentum_buffer"]

    def _momentum_step(self, members: list[Member], stats: StepStats) -> list[LocalJob]:
        masks: dict[int, Tensor | None] = {}
        for group in self.param_groups:
            mine = [m.param for m in members if m.group is group]
            masks |= self._finite_masks(group, mine, stats)
        jobs = []
        for number, (p, grad, momentum, group) in enumerate(members):
            if id(p) in masks:
                finite = masks[id(p)]
                update_momentum(grad, momentum, group["momentum"], finite)
                jobs.append(LocalJob(p, grad, momentum, group, number, finite))
        return jobs

    def _finite_masks(
        self, group: dict[str, Any], params: list[Tensor], stats: StepStats
    ) -> dict[int, Tensor | None]:
        """The parameters to step by id, each with a device mask, or None where the host knows that
        all is finite."""
        if not params:
            return {}
        finite = gradients_finite([dense_grad(p) for p in params])
        stats.add_finite([group["name"]] * len(params), finite)
        if finite.device.type != "cpu":
            return {id(p): ok for p, ok in zip(params, finite.unbind(), strict=True)}
        kept: dict[int, Tensor | None] = {
            id(p): None for p, ok in zip(params, finite.tolist(), strict=True) if ok
        }
        if len(kept) < len(params):
            _log.warning(
                "%d of %d gradients in group %r are not finite: their parameters keep values and "
                "state",
                len(params) - len(kept),
                len(params),
                group["name"],
            )
        return kept

    def _auxiliary_step(self, group: dict, params: list[Tensor], stats: StepStats) -> None:
        """AdamW or SGD, elementwise.

        On the CPU a parameter with a non-finite gradient is left out alone; on other devices, where
        nothing may wait for the host, the whole group skips the step."""
        grads = [dense_grad(p) for p in params]
        finite = gradients_finite(grads)
        stats.add_finite([group["name"]] * len(params), finite)
        found_inf = None
        kept = list(range(len(params)))
        if finite.device.type == "cpu":
            kept = [i for i, ok in enumerate(finite.tolist()) if ok]
        else:
            found_inf = (~finite.all()).float()
        if kept:
            STEPS[group["rule"]](
                [params[i] for i in kept],
                [grads[i] for i in kept],
                [self.state[params[i]] for i in kept],
                group,
                found_inf,
                stats,
            )

    def _refuse_frozen(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if params and not any(p.requires_grad for p in params):
            raise ValueError(
                f"none of the optimizer's {len(params)} parameters requires a gradient: it was "
                "probably built before the model was wrapped (LoRA) or frozen; build it after that"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, but state keeps the dtype it was saved in (PyTorch would round fp32
        momentum to bf16), and the state of another rule is refused."""
        check_same_rules(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)
        self._fused.clear()  # its plans point at the buffers that were just replaced
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [p for g in self.param_groups for p in g["params"]]
        for index, p in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.state[p][key].dtype:
                    self.state[p][key] = value.to(device=self.state[p][key].device, copy=True)


class Muon(RoutedOptimizer):
    """Muon: momentum whose singular values are all brought to about 1, with an auxiliary rule for
    the rest.

    M <- mu M + (1 - mu) G;  U = (1 - mu) G + mu M (Nesterov);  W <- (1 - lr wd) W - lr scale f(U)

    Args:
        params: parameters or param groups. A group may set any argument below, `view` (see `View`),
            `name`, and `rule`: "muon", "pion", "adamw" or "sgd". In a group without `rule`, tensors
            of fewer than two dimensions go to `aux`; embeddings and heads look like any matrix
            here, so prefer `mesotron.muon(model)`.
        lr: RMS change of a weight per step over 0.2, for a full-rank step under scale="rms":
            AdamW's lr carries over.
        momentum: mu of the running mean of gradients.
        nesterov: look one step ahead.
        weight_decay: decoupled, applied as lr * weight_decay.
        scale: the unit of lr: "rms", "moonlight", "spectral" or a number (see `step_scale`).
        filter: "muon", "cubic", "polar_express", "pion" or "low_rank".
        steps: number of steps of the filter; None is the filter's own default.
        rank: of the low_rank filter.
        betas, eps: of the AdamW rule.
        aux: the rule for vectors in groups without one, "adamw" or "sgd".
        dtype: of the filter's products, by name ("float32", "bfloat16"); None measures which is
            faster.
        momentum_dtype: of the momentum buffer; None is float32.
        batched: filter equal shapes together. False makes a matrix's bits independent of its
            neighbours.
        fused: None takes the Triton kernels on a CUDA GPU where they are available; False never.

    Example:
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Muon(layer.parameters(), lr=0.01)
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> round(optimizer.stats()["muon/update_rms"], 4)  # one direction of four, brought to 0.7
        0.0007

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        scale: str | float = "rms",
        filter: str = "muon",
        steps: int | None = None,
        rank: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        aux: str = "adamw",
        dtype: str | None = None,
        momentum_dtype: str | None = None,
        batched: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            rule="muon",
            aux=aux,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            scale=scale,
            filter=filter,
            steps=steps,
            promote=0,
            cutoff=None,
            rank=rank,
            betas=betas,
            eps=eps,
            dtype=dtype,
            momentum_dtype=momentum_dtype,
            batched=batched,
            fused=fused,
        )


class Pion(RoutedOptimizer):
    """Pion: Muon with a high-pass filter. Strong directions go to 1, weak ones, which are mostly
    noise, to 0.

    Args:
        promote: of the filter's steps, how many raise all directions before the rest suppress the
            small ones. 0, the release's default, lets at most one direction of a block pass, and
            none if it holds less than about half of the energy: watch `dead_blocks` in `stats()`.
        cutoff: instead of `promote`, a continuous strength: a fraction of the largest singular
            value, or "noise" for the edge that pure noise of the block's shape would reach.
        steps: of the filter; with `cutoff`, the suppression steps.
        params, lr, momentum, nesterov, weight_decay, scale, betas, eps, aux, dtype, momentum_dtype,
            batched, fused: as in `Muon`.

    Example:
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Pion(layer.parameters(), lr=0.01, cutoff="noise")

    References: Fan et al., "Pion", 2026, arXiv 2605.19282. (Not the orthogonal-equivalence
        optimizer of the same name,
    arXiv 2605.12492.)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        promote: int = 0,
        cutoff: float | str | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        scale: str | float = "rms",
        steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        aux: str = "adamw",
        dtype: str | None = None,
        momentum_dtype: str | None = None,
        batched: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            rule="pion",
            aux=aux,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            scale=scale,
            filter="pion",
            steps=steps,
            promote=promote,
            cutoff=cutoff,
            rank=None,
            betas=betas,
            eps=eps,
            dtype=dtype,
            momentum_dtype=momentum_dtype,
            batched=batched,
            fused=fused,
        )


def dense_grad(p: Tensor) -> Tensor:
    """The gradient, refused with a sentence if it is sparse."""
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has a sparse gradient: build its "
            "embedding with sparse=False"
        )
    return p.grad
