"""What all optimizers here share: a `torch.optim.Optimizer` in which each group names its rule.

One state_dict, one scheduler, one step. How a parameter is stepped stands elsewhere:
`spectral_step` and `fused` filter matrices, `auxiliary` is AdamW and SGD, `sharding` is for
DTensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mesotron.optim import kernels
from mesotron.optim.auxiliary import STEPS
from mesotron.optim.fused.step import FusedStep
from mesotron.optim.groups import (
    Place,
    check_group,
    check_same_rules,
    default_view,
    own_filter,
    sort_parameters,
    split_by_rank,
)
from mesotron.optim.precision import rounding_seed
from mesotron.optim.rules import AUXILIARY_RULES
from mesotron.optim.sharding.step import sharded_step
from mesotron.optim.spectral_step import (
    LocalJob,
    Member,
    filter_and_apply,
    gradients_finite,
    momentum_of,
    update_momentum,
)
from mesotron.optim.stats import StepStats

if TYPE_CHECKING:
    from mesotron.optim.routing import RoutingTable

_log = logging.getLogger("mesotron")


class RoutedOptimizer(torch.optim.Optimizer):
    """Runs each param group by its own rule. Use `Muon` or `Pion`, or a builder; see there for the
    arguments."""

    table: RoutingTable | None = None
    """What a builder made the groups from; None for groups made by hand, and in a copy."""

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
        """After a copy, an unpickling or a load: no step has been made yet, and plans for the
        kernels would point at buffers that were replaced."""
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
        found = sort_parameters(self.param_groups)
        if found.idle:
            self._refuse_frozen()
        for places in found.auxiliary.values():
            self._auxiliary_step(places, stats)
        for device, places in found.spectral.items():
            members = [self._member(place) for place in places]
            with torch.cuda.device(device if device.type == "cuda" else -1):  # where kernels go
                if kernels.available(device):
                    members = self._fused_step(device, members, stats)
                filter_and_apply(self._momentum_step(members, stats), stats)
        if found.sharded:
            names = [group["name"] for group in self.param_groups]
            sharded_step(self.state, names, found.sharded, stats)
        self._stats = stats
        return loss

    def _member(self, place: Place) -> Member:
        p, group, number = place
        return Member(p, dense_grad(p), momentum_of(self.state[p], p, group), group, number)

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

    def _momentum_step(self, members: list[Member], stats: StepStats) -> list[LocalJob]:
        """Update the momentum of those whose gradient is finite; the rest is for the filter. On the
        CPU the others are left out, on other devices, where nothing may wait, masked."""
        jobs = []
        for _, same_group in groupby(members, key=lambda member: id(member.group)):
            mine = list(same_group)
            finite = _report_finite(mine[0].group["name"], [m.grad for m in mine], stats)
            masks: list[Tensor | None] = list(finite.unbind())
            if finite.device.type == "cpu":
                mine = [m for m, ok in zip(mine, finite.tolist(), strict=True) if ok]
                masks = [None] * len(mine)
            for member, mask in zip(mine, masks, strict=True):
                update_momentum(member.grad, member.momentum, member.group["momentum"], mask)
                jobs.append(LocalJob(member, mask))
        return jobs

    def _auxiliary_step(self, places: list[Place], stats: StepStats) -> None:
        """AdamW or SGD, elementwise, on parameters of one group and one device.

        On the CPU a parameter with a non-finite gradient is left out alone; on other devices, where
        nothing may wait for the host, all of them skip the step."""
        group = places[0].group
        params = [place.param for place in places]
        finite = _report_finite(group["name"], [dense_grad(p) for p in params], stats)
        found_inf = None
        if finite.device.type == "cpu":
            places = [place for place, ok in zip(places, finite.tolist(), strict=True) if ok]
            params = [place.param for place in places]
        else:
            found_inf = (~finite.all()).float()
        if params:
            grads, states = [dense_grad(p) for p in params], [self.state[p] for p in params]
            streams = [rounding_seed(0, place.number, 0) for place in places]
            STEPS[group["rule"]](params, grads, states, group, found_inf, stats, streams)

    def _refuse_frozen(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if params and not any(p.requires_grad for p in params):
            raise ValueError(
                f"none of the optimizer's {len(params)} parameters requires a gradient: it was "
                "probably built before the model was wrapped (LoRA) or frozen; build it after that"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, but state keeps the dtype it was saved in (PyTorch would round fp32
        momentum to bf16), all of it goes to the parameter's device (PyTorch leaves counters where
        they were saved from, and fused kernels then refuse them), and the state of another rule
        is refused."""
        check_same_rules(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [p for g in self.param_groups for p in g["params"]]
        for index, p in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    loaded = self.state[p][key]
                    if value.dtype != loaded.dtype or loaded.device != p.device:
                        self.state[p][key] = value.to(device=p.device, copy=True)


def dense_grad(p: Tensor) -> Tensor:
    """The gradient, refused with a sentence if it is sparse."""
    assert p.grad is not None
    if p.grad.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} has a sparse gradient: build its "
            "embedding with sparse=False"
        )
    return p.grad


def _report_finite(name: str, grads: list[Tensor], stats: StepStats) -> Tensor:
    """Which gradients of a group are finite, one bool each on the device; recorded, and on the CPU,
    where asking is free, said."""
    finite = gradients_finite(grads)
    stats.add_finite([name] * len(grads), finite)
    if finite.device.type == "cpu" and not finite.all():
        _log.warning(
            "%d of %d gradients in group %r are not finite: their parameters keep values and state",
            int((~finite).sum()),
            len(grads),
            name,
        )
    return finite
