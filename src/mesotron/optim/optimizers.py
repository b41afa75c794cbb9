"""Muon, Pion, NorMuon, MuonSGD and AdamW, and the builders that route a model to them.

Each param group names its rule, so one object has one state_dict, one scheduler and one step.
`step` filters matrices (`triton` on NVIDIA GPUs), `auxiliary` is AdamW and SGD for everything else,
`sharding` handles DTensors.
"""

import logging
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from mesotron.optim import triton
from mesotron.optim.auxiliary import STEPS, Batch, adamw_state
from mesotron.optim.device import rounding_seed
from mesotron.optim.groups import (
    AUXILIARY_RULES,
    SPECTRAL_RULES,
    Place,
    Work,
    check_group,
    check_same_rules,
    default_view,
    own_filter,
    sort_parameters,
    split_by_rank,
)
from mesotron.optim.leash import distance, keep_start, pull
from mesotron.optim.lora import find_pairs, pair_up, product_distances, step_pairs
from mesotron.optim.routing import RoutingTable, route
from mesotron.optim.routing.params import model_behind
from mesotron.optim.sharding.step import sharded_step
from mesotron.optim.stats import StepStats
from mesotron.optim.step import (
    LocalJob,
    Member,
    dense_grad,
    filter_and_apply,
    gradients_finite,
    lines_of,
    momentum_of,
    on_host,
)

if TYPE_CHECKING:
    from mesotron.optim.triton.step import FusedStep, Replay

_log = logging.getLogger("mesotron")


class RoutedOptimizer(torch.optim.Optimizer):
    """Steps each param group by its own rule; the base of `Muon`, `Pion`, `MuonSGD` and `AdamW`.

    Spectral rules: M <- mu M + (1 - mu) G;  U = (1 - mu) G + mu M (Nesterov);
    W <- (1 - lr wd) W - lr scale f(U).

    Args:
        params: parameters or param groups. A group may set any argument below, `view` (see `View`),
            `name`, and `rule`: "muon", "pion", "normuon", "adamw" or "sgd"; `pairs`, LoRA's
            scalings, makes its params [A, B, A, B, ...] products (`mesotron.optim.lora`). In a
            group without `rule`, tensors of fewer than two dimensions go to `aux`; embeddings and
            heads look like any matrix here, so prefer `mesotron.muon(model)`.
        lr: RMS change of a weight per step over 0.2, for a full-rank step under scale="rms":
            AdamW's lr carries over.
        momentum: mu of the running mean of gradients.
        nesterov: look one step ahead.
        weight_decay: decoupled, applied as lr * weight_decay.
        scale: the unit of lr: "rms", "moonlight", "spectral" or a number (see `step_scale`).
        filter: "muon", "cubic", "polar_express", "pion" or "low_rank"; None is the rule's own.
        steps: number of filter steps (with `cutoff`, of suppression steps); None is the filter's
            default.
        promote: Pion only: how many of the steps raise all directions before the rest suppress the
            small ones. 0, the release's default, lets at most one direction of a block pass, and
            none if it holds less than about half of the energy: watch `dead_blocks` in `stats()`.
        cutoff: Pion only, instead of `promote`: a continuous strength. A fraction of the largest
            singular value, "aligned" for sqrt(2) - 1 of it, or "noise" for the edge that pure noise
            of the block's shape would reach.
        rank: of the low_rank filter.
        betas, eps: of AdamW.
        beta2: decay of NorMuon's second moments.
        leash: decay matrices toward their starting weights, in place of `weight_decay`, so that no
            filtered block ends further from its start than this share of the start's spectral norm
            (`mesotron.optim.leash`). Keeps a copy of the weights, except for LoRA products.
        lora_unit: of a LoRA product's rate: "rms" changes B A by full Muon's RMS at every rank,
            "direction" each of its directions as full Muon would.
        aux: the rule for vectors in groups without one, "adamw" or "sgd"; None is the class's own.
        dtype: of the filter's products ("float32", "bfloat16", "float64"); None picks the fastest.
        momentum_dtype: of the momentum buffer; None is float32.
        batched: filter equal shapes together. False makes a matrix's bits independent of its
            neighbors.
        fused: None uses the Triton kernels on a CUDA GPU where available; False never.
        foreach, capturable: PyTorch's words, accepted and ignored: steps are always batched and
            can always be captured.
    """

    rule: str
    default_aux = "adamw"
    table: RoutingTable | None = None
    """The routing table a builder made the groups from; None for hand-made groups and copies."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        weight_decay: float | Tensor = 0.01,
        scale: str | float = "rms",
        filter: str | None = None,
        steps: int | None = None,
        promote: int = 0,
        cutoff: float | str | None = None,
        rank: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        beta2: float = 0.95,
        leash: float | None = None,
        lora_unit: str = "rms",
        aux: str | None = None,
        dtype: str | None = None,
        momentum_dtype: str | None = None,
        batched: bool = True,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        if maximize or differentiable:
            word = "maximize" if maximize else "differentiable"
            fix = "negate the loss" if maximize else "a step here is never part of a graph"
            raise ValueError(f"{word}=True is not supported: {fix}")

        self._aux = aux = aux or self.default_aux
        if aux not in AUXILIARY_RULES:
            raise ValueError(f"aux={aux!r} must be one of {', '.join(AUXILIARY_RULES)}")

        self._stats = StepStats()
        self._fused: dict[torch.device, tuple[FusedStep, int]] = {}
        self._replay: Replay | None = None

        defaults = {
            "rule": self.rule,
            "view": None,
            "name": None,
            "pairs": None,
            "step": 0,
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "scale": scale,
            "filter": filter or ("pion" if self.rule == "pion" else "muon"),
            "steps": steps,
            "promote": promote,
            "cutoff": cutoff,
            "rank": rank,
            "betas": betas,
            "eps": eps,
            "beta2": beta2,
            "leash": leash,
            "start_norms": None,
            "lora_unit": lora_unit,
            "dtype": dtype,
            "momentum_dtype": momentum_dtype,
            "batched": batched,
            "fused": fused,
        }

        super().__init__(split_by_rank(params, rule=self.rule, aux=aux), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for part in split_by_rank([param_group], rule=self.defaults["rule"], aux=self._aux):
            super().add_param_group(own_filter(part, self.defaults))
            group = self.param_groups[-1]
            if group["leash"] is not None:  # toward the start instead of toward zero
                spectral = group["rule"] not in AUXILIARY_RULES
                group |= {"weight_decay": 0.0} if spectral else {"leash": None}

            try:
                check_group(group)
                group["view"] = group["view"] or default_view(group)
            except ValueError:
                self.param_groups.pop()
                raise

            name = group["name"] or group["rule"]
            taken = self.param_groups[:-1]
            number = 2
            group["name"] = name

            while any(other["name"] == group["name"] for other in taken):
                group["name"], number = f"{name}_{number}", number + 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_aux": self._aux}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch's own, which no rule here reads

        for group in self.param_groups:  # a checkpoint may be older than an option
            for key, value in self.defaults.items():
                group.setdefault(key, value)

        # Kernel plans would point at buffers that were replaced.
        self._stats = StepStats()
        self._fused = {}
        self._replay = None

    @_disable_dynamo  # a compiled step runs as it is: tracing would not end
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore
        """Step every parameter that has a gradient; `closure` re-evaluates the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for group in self.param_groups:
            group["step"] += 1

        stats = StepStats()
        if self._replay is not None and self._replay.run(self.param_groups, self.state, stats):
            self._stats = stats
            return loss

        self._replay = None
        work = sort_parameters(self.param_groups)

        pairs = find_pairs(self.param_groups)
        if not any(work) and not pairs:
            params = [p for group in self.param_groups for p in group["params"]]
            if params and not any(p.requires_grad for p in params):
                raise ValueError(
                    f"none of the optimizer's {len(params)} parameters requires a gradient: build "
                    "it after the model is wrapped (LoRA) or frozen"
                )

        for device, places in work.spectral.items():
            members = [
                Member(
                    p,
                    dense_grad(p),
                    momentum_of(self.state[p], p, group),
                    group,
                    number,
                    lines_of(self.state[p], p, group),
                )
                for p, group, number in places
            ]
            for member in members:
                keep_start(self.state[member.param], member.param, member.group)

            leashed = [m for m in members if m.group["leash"] is not None]
            with torch.cuda.device(device if device.type == "cuda" else -1):  # for the kernels
                if triton.available(device):
                    members = self._fused_step(device, members, work, stats)
                filter_and_apply(self._jobs(members, stats), stats)

            self._pull_to_start(leashed)

        plans = [self._fused[device][0] for device in work.spectral if device in self._fused]
        beside = work.auxiliary or work.sharded or pairs

        beside = beside or any(group["leash"] is not None for group in self.param_groups)
        if len(work.spectral) == len(plans) == 1 and not beside:
            self._replay = plans[0].replayed(self.param_groups, self.state)

        for places in work.auxiliary.values():
            self._auxiliary_step(places, stats)

        step_pairs(pairs, self.state, stats)
        if work.sharded:
            names = [group["name"] for group in self.param_groups]
            sharded_step(self.state, names, work.sharded, stats)

        self._stats = stats
        return loss

    def stats(self) -> dict[str, float]:
        """What the last step did, as "<group>/<statistic>": update_rms, concentration, passed_rank,
        dead_blocks, cosine, skipped (formulas in docs/api/metrics.md). Waits for the device: call
        it when you log. Groups with a leash report `distance`, the largest spectral distance to
        the starting weights over their norm."""
        stats = self._stats.read()
        for group in self.param_groups:
            if group["leash"] is None:
                continue

            if group["pairs"] is not None:
                far = product_distances(group)
            else:
                each = (distance(p, self.state[p], group) for p in group["params"])
                far = [value for value in each if value is not None]

            if far:
                stats[f"{group['name']}/distance"] = max(far)

        return stats

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, but state keeps the dtype it was saved in (PyTorch would round fp32
        momentum to bf16), counters go to the parameter's device too, where fused kernels need them,
        and the state of another rule is refused."""
        check_same_rules(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]

        params = [p for g in self.param_groups for p in g["params"]]
        for index, p in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if key == "step" and not isinstance(value, Tensor):  # as PyTorch once saved it
                    self.state[p][key] = torch.tensor(float(value), device=p.device)

                if isinstance(value, Tensor):
                    loaded = self.state[p][key]
                    if value.dtype != loaded.dtype or loaded.device != p.device:
                        self.state[p][key] = value.to(device=p.device, copy=True)

    def _pull_to_start(self, members: list[Member]) -> None:
        finite = gradients_finite([m.grad for m in members]) if members else ()
        for member, ok in zip(members, finite, strict=True):
            state = self.state[member.param]
            group = member.group
            if not on_host(ok) or ok:
                seed = rounding_seed(group["step"], member.number, 2**31)
                pull(
                    member.param,
                    state,
                    group,
                    None if on_host(ok) else ok,
                    seed,
                )

    def _fused_step(
        self, device: torch.device, members: list[Member], work: Work, stats: StepStats
    ) -> list[Member]:
        """Step by the kernels what they take, AdamW's groups on the device too, and remove these
        from `work`; returns the other members."""
        from mesotron.optim.triton.adamw import Vector  # needs Triton
        from mesotron.optim.triton.step import FusedStep

        keys = [key for key in work.auxiliary if key[1] == device]

        beside = []
        for key in keys:
            for p, group, _ in work.auxiliary[key]:
                if group["rule"] == "adamw" and not self.state[p]:
                    self.state[p] = adamw_state(p)

            beside.append(
                [
                    Vector(
                        p,
                        dense_grad(p),
                        self.state[p],
                        g,
                        number,
                    )
                    for p, g, number in work.auxiliary[key]
                ]
            )

        plan, made = self._fused.get(device, (None, 0))
        if plan is None or not plan.fits(members, beside):
            # A capture pays if plans last: wait twice as long for it after each new one.
            plan = FusedStep(members, beside, patience=2 ** min(made, 16))
            self._fused[device] = plan, made + 1

        members = plan.run(members, beside, stats)
        for key, taken in zip(keys, plan.beside, strict=True):
            if taken:
                del work.auxiliary[key]

        return members

    def _jobs(self, members: list[Member], stats: StepStats) -> list[LocalJob]:
        """Parameters with a gradient that is not finite are dropped on the CPU; on other devices,
        where the host must not wait, they are masked."""
        jobs = []
        for _, same_group in groupby(members, key=lambda member: id(member.group)):
            batch = list(same_group)
            finite = _report_finite(batch[0].group["name"], [m.grad for m in batch], stats)
            pairs = zip(batch, finite.tolist() if on_host(finite) else finite, strict=True)
            jobs += [LocalJob(m, None if ok is True else ok) for m, ok in pairs if ok is not False]

        return jobs

    def _auxiliary_step(self, places: list[Place], stats: StepStats) -> None:
        """AdamW or SGD on parameters of one group and one device. On the CPU a parameter with a
        non-finite gradient is skipped alone; elsewhere the whole group skips the step."""
        group = places[0].group
        finite = _report_finite(group["name"], [dense_grad(x.param) for x in places], stats)

        found_inf = None
        if finite.device.type == "cpu":
            places = [place for place, ok in zip(places, finite.tolist(), strict=True) if ok]
        elif finite.device.type != "meta":
            found_inf = (~finite.all()).float()

        if places:
            params = [place.param for place in places]
            grads = [dense_grad(p) for p in params]
            states = [self.state[p] for p in params]
            streams = [rounding_seed(0, place.number, 0) for place in places]

            batch = Batch(
                params,
                grads,
                states,
                group,
                found_inf,
                streams,
            )

            STEPS[group["rule"]](batch, stats)


class Muon(RoutedOptimizer):
    """Muon: momentum whose singular values are all brought to about 1; AdamW for the rest.

    Arguments as in `RoutedOptimizer`, without `promote` and `cutoff`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Muon(layer.parameters(), lr=0.01)
        >>> layer(torch.ones(1, 8)).sum().backward()
        >>> optimizer.step()
        >>> round(optimizer.stats()["muon/update_rms"], 4)  # one direction of four, brought to 0.7
        0.0007

    References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    rule = "muon"


class Pion(RoutedOptimizer):
    """Pion: Muon with a high-pass filter. Strong directions go to 1, weak ones, which are mostly
    noise, to 0.

    The strength is `promote` or `cutoff`; other arguments as in `RoutedOptimizer`, without `filter`
    and `rank`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Pion(layer.parameters(), lr=0.01, cutoff="aligned")

    References: Fan et al., "Pion", 2026, arXiv 2605.19282. (Not the orthogonal-equivalence
        optimizer of the same name, arXiv 2605.12492.)
    """

    rule = "pion"


class NorMuon(RoutedOptimizer):
    """NorMuon: Muon whose filtered momentum is then normalized neuron by neuron.

    Each line of a matrix's longer side (its neurons; the lines of the shorter side have equal norms
    already) is divided by the root of a running mean of its squares, with decay `beta2`. The size
    of the step stays Muon's; the state grows by one vector per matrix. Arguments as in `Muon`.

    Example:
        >>> import torch
        >>> optimizer = NorMuon(torch.nn.Linear(8, 4).parameters(), lr=0.01)

    References: Li et al., "NorMuon", 2025, arXiv 2510.05491.
    """

    rule = "normuon"


class MuonSGD(Muon):
    """Muon with SGD with momentum as its auxiliary rule: no second moment anywhere."""

    default_aux = "sgd"


class AdamW(RoutedOptimizer):
    """AdamW with the groups and statistics of the others; bit-equal to `torch.optim.AdamW`."""

    rule = "adamw"


def _report_finite(name: str, grads: list[Tensor], stats: StepStats) -> Tensor:
    finite = gradients_finite(grads)
    stats.finite.append(([name] * len(grads), finite))

    if finite.device.type == "cpu" and not finite.all():  # elsewhere reading it would wait
        text = (
            "%d of %d gradients in group %r are not finite: their parameters keep values and state"
        )
        _log.warning(text, int((~finite).sum()), len(grads), name)

    return finite


Lr = float | Tensor
# SGD's step is the gradient itself, so its learning rate has another unit than Muon's and needs its
# own default; a sweep should include it.
SGD_LR = 0.1


def muon(model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any) -> Muon:
    """Muon for the hidden matrices of a model, AdamW for the rest.

    Args:
        model: a torch module, including Transformers, PEFT and FSDP2-sharded ones; or, as trainers
            pass it, its `parameters()` or (name, parameter) pairs.
        lr: RMS change of a weight per step over 0.2; AdamW's learning rate carries over.
        aux_lr: learning rate of the auxiliary rule; None is `lr`.
        **options: routing (`per_head`, `overrides`, `modalities`, `lora`: see `mesotron.route`)
            and anything `mesotron.Muon` takes.

    Returns:
        A `torch.optim.Optimizer` with `stats()`. One-dimensional tensors have no weight decay.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
        >>> [(g["name"], len(g["params"])) for g in muon(model).param_groups]
        [('adamw', 2), ('adamw_vectors', 2), ('muon', 1)]
    """
    return _build(Muon, model, lr, aux_lr, options)


def pion(model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any) -> Pion:
    """Pion for the hidden matrices of a model, AdamW for the rest.

    The strength is `promote=` or `cutoff=`, as in `mesotron.Pion`; `per_head=True` filters
    attention projections head by head, as the paper does for language models;
    `modalities={"vision": "muon", "action_head": "pion"}` is its recipe for
    vision-language-action models. Other arguments as in `muon`.

    Example:
        >>> optimizer = pion(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), cutoff="aligned")
    """
    return _build(Pion, model, lr, aux_lr, options)


def normuon(
    model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any
) -> NorMuon:
    """NorMuon for the hidden matrices of a model, AdamW for the rest; arguments as in `muon`.

    Example:
        >>> optimizer = normuon(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), lr=3e-4)
    """
    return _build(NorMuon, model, lr, aux_lr, options)


def muon_sgd(
    model: nn.Module, lr: Lr = 1e-3, *, aux_lr: Lr | None = None, **options: Any
) -> MuonSGD:
    """Muon for the hidden matrices, SGD with momentum for the rest: no second moment anywhere.

    `aux_lr` is in SGD's unit, the gradient itself; None is 0.1. Other arguments as in `muon`.

    Example:
        >>> optimizer = muon_sgd(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), lr=3e-4)
    """
    return _build(MuonSGD, model, lr, aux_lr, options)


def adamw(model: nn.Module, lr: Lr = 1e-3, **options: Any) -> AdamW:
    """AdamW for everything, with the same routing table, groups and statistics: the fair baseline.

    Example:
        >>> [g["rule"] for g in adamw(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))).param_groups]
        ['adamw', 'adamw']
    """
    return _build(AdamW, model, lr, None, options)


BUILDERS = {
    "muon": muon,
    "pion": pion,
    "normuon": normuon,
    "muon_sgd": muon_sgd,
    "adamw": adamw,
}
_ROUTING_OPTIONS = ("per_head", "overrides", "modalities", "lora")


def _build(
    cls: type[RoutedOptimizer], model: nn.Module, lr: Lr, aux_lr: Lr | None, options: dict[str, Any]
) -> Any:
    routing = {key: options[key] for key in _ROUTING_OPTIONS if key in options}
    rest = {key: value for key, value in options.items() if key not in _ROUTING_OPTIONS}
    aux = rest.get("aux") or cls.default_aux
    model = model_behind(model)

    if aux_lr is None and aux == "sgd":
        aux_lr = SGD_LR

    table = route(model, matrix=cls.rule, aux=aux, **routing)
    if rest.get("leash") is not None:
        alone = [r for r in table if r.rule in SPECTRAL_RULES and r.role in ("lora_A", "lora_B")]
        if any(not row.view.startswith("product") for row in alone):
            raise ValueError("leash: a LoRA factor has no start to stay near; pass lora='product'")
        if not any(row.rule in SPECTRAL_RULES for row in table):
            raise ValueError(
                "leash needs matrices under a spectral rule: AdamW's steps are not bounded"
            )

    groups = []
    for group in table.groups(model):
        # aux_lr is in the unit of the auxiliary rule; a matrix of another rule keeps lr.
        rate = lr if group["rule"] != aux or aux_lr is None else aux_lr
        scale = group.pop("lr_scale")
        group["lr"] = rate if scale == 1 else rate * scale

        if group["view"].startswith("product"):
            group |= pair_up(model, group, norms=rest.get("leash") is not None)

        for vectors in (False, True):  # norm weights and biases apart, without weight decay
            picked = [i for i, p in enumerate(group["params"]) if (p.ndim < 2) == vectors]
            if picked:
                half = {k: [group[k][i] for i in picked] for k in ("params", "param_names")}
                if vectors:
                    half |= {"name": f"{group['name']}_vectors", "weight_decay": 0.0}
                groups.append({**group, **half})

    optimizer = cls(groups, lr=lr, **rest)
    optimizer.table = table

    return optimizer
