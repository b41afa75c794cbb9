"""The optimizer: param groups in, one step of all of them by their own rules.

One step, in the order of `RoutedOptimizer.step`:

    kernels.py       repeat the captured launches of the last step, if nothing has changed
    groups.py        sort the parameters: matrices, elements, shards; LoRA products apart
    step.py          matrices: momentum, filter, scale, apply (as Triton kernels on an NVIDIA GPU)
    elementwise.py   everything else, by AdamW or SGD
    lora.py          products B A
    sharding/        DTensors: each matrix is filtered by one rank
    stats.py         what the step did, read on demand

Each param group names its rule, so one object has one state_dict, one scheduler and one step.
"""

from collections.abc import Callable, Iterable
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from mesotron.config.rules import AUXILIARY_RULES
from mesotron.optim import triton
from mesotron.optim.device import rounding_seed, tensors_on_host, without_autocast
from mesotron.optim.elementwise import step_auxiliary
from mesotron.optim.finite import on_host, report_finite
from mesotron.optim.groups import (
    Work,
    check_group,
    check_same_rules,
    default_filter,
    default_view,
    own_filter,
    sort_parameters,
    split_by_rank,
)
from mesotron.optim.kernels import KernelSteps
from mesotron.optim.leash import distances, keep_start, pull_to_start
from mesotron.optim.lora import find_pairs, step_pairs
from mesotron.optim.registry import AuxiliaryBatch, Group
from mesotron.optim.sharding.step import sharded_step
from mesotron.optim.state import ParamStep, loaded_dtype
from mesotron.optim.stats import StepStats
from mesotron.optim.step import LocalBlocks, filter_and_apply
from mesotron.spectral.routing import RoutingTable


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

    def __init__(  # noqa: PLR0913  # the public signature names every option
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
        if maximize:
            raise ValueError("maximize=True is not supported: negate the loss")
        if differentiable:
            raise ValueError(
                "differentiable=True is not supported: a step here is never part of a graph"
            )

        self._aux = aux or self.default_aux
        if self._aux not in AUXILIARY_RULES:
            raise ValueError(f"aux={aux!r} must be one of {', '.join(AUXILIARY_RULES)}")

        self._stats = StepStats()
        self._kernels = KernelSteps()

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
            "filter": filter or default_filter(self.rule),
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

        super().__init__(split_by_rank(params, rule=self.rule, aux=self._aux), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for part in split_by_rank([param_group], rule=self.defaults["rule"], aux=self._aux):
            super().add_param_group(own_filter(part, self.defaults))
            group = self.param_groups[-1]
            if group["leash"] is not None:
                _leash_in_place_of_decay(group)

            try:
                check_group(group)
                group["view"] = group["view"] or default_view(group)
            except ValueError:
                self.param_groups.pop()
                raise

            taken = {other["name"] for other in self.param_groups[:-1]}
            group["name"] = _free_name(group["name"] or group["rule"], taken)

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
        self._kernels = KernelSteps()

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
        with tensors_on_host(), without_autocast():
            if not self._kernels.try_replay(self.param_groups, self.state, stats):
                self._step_all(stats)

        self._stats = stats
        return loss

    def _step_all(self, stats: StepStats) -> None:
        work = sort_parameters(self.param_groups, self.state)
        pairs = find_pairs(self.param_groups)
        if not any(work) and not pairs:
            self._check_some_train()

        for device, steps in work.spectral.items():
            self._step_matrices(device, steps, work, stats)

        self._kernels.keep_replay(self.param_groups, self.state, work)
        for steps in work.auxiliary.values():
            _step_elements(steps, stats)

        step_pairs(pairs, self.state, stats)
        if work.sharded:
            names = [group["name"] for group in self.param_groups]
            sharded_step(work.sharded, names, stats)

    def _check_some_train(self) -> None:
        params = self._params()
        if params and not any(p.requires_grad for p in params):
            raise ValueError(
                f"none of the optimizer's {len(params)} parameters requires a gradient: build "
                "it after the model is wrapped (LoRA) or frozen"
            )

    def _step_matrices(
        self,
        device: torch.device,
        steps: list[ParamStep],
        work: Work,
        stats: StepStats,
    ) -> None:
        for step in steps:
            step.prepare()
            keep_start(step.state, step.param, step.group)

        with torch.cuda.device(device if device.type == "cuda" else -1):  # for the kernels
            left = steps
            if triton.available(device):
                left = self._kernels.step(device, steps, work, stats)

            bounds = filter_and_apply(_blocks_of(left, stats), stats)

        pull_to_start([step for step in steps if step.group["leash"] is not None], bounds)

    def stats(self) -> dict[str, float]:
        """What the last step did, as "<group>/<statistic>": update_rms, concentration, passed_rank,
        dead_blocks, cosine, skipped (formulas in docs/api/metrics.md). Waits for the device: call
        it when you log. Groups with a leash report `distance`, the largest spectral distance to
        the starting weights over their norm."""
        with tensors_on_host(), without_autocast():
            return self._read_stats()

    def _read_stats(self) -> dict[str, float]:
        stats = self._stats.read()
        for group in self.param_groups:
            if group["leash"] is None:
                continue

            far = distances(group, self.state)
            if far:
                stats[f"{group['name']}/distance"] = max(far)

        return stats

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in PyTorch, but state gets the dtype that a rule keeps beside these weights (PyTorch
        would round fp32 momentum to bf16), whatever the dtype of the saved weights; counters go to
        the parameter's device too, where fused kernels need them, and the state of another rule is
        refused."""
        check_same_rules(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)

        saved: list[int] = []
        for group in state_dict["param_groups"]:
            saved += group["params"]

        members = ((p, group) for group in self.param_groups for p in group["params"])
        for index, (p, group) in zip(saved, members, strict=True):
            # Reading the state of a parameter would make an empty one, which stays behind when
            # FSDP2 replaces the parameter.
            if index in state_dict["state"]:
                self._load_state(p, group, state_dict["state"][index])

    def _params(self) -> list[Tensor]:
        params: list[Tensor] = []
        for group in self.param_groups:
            params += group["params"]

        return params

    def _load_state(self, p: Tensor, group: Group, saved: dict[str, Any]) -> None:
        state = self.state[p]
        for key, value in saved.items():
            if isinstance(value, Tensor):
                dtype = loaded_dtype(key, value, p, group)
                if state[key].dtype != dtype or state[key].device != p.device:
                    state[key] = value.to(device=p.device, dtype=dtype, copy=True)
            elif key == "step":  # a number, as PyTorch once saved it
                state[key] = torch.tensor(float(value), device=p.device)


def _leash_in_place_of_decay(group: dict[str, Any]) -> None:
    if group["rule"] in AUXILIARY_RULES:
        group["leash"] = None
    else:
        group["weight_decay"] = 0.0


def _free_name(name: str, taken: Iterable[str]) -> str:
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number += 1

    return free


def _blocks_of(steps: list[ParamStep], stats: StepStats) -> list[LocalBlocks]:
    """Parameters with a gradient that is not finite are dropped on the CPU; on other devices,
    where the host must not wait, they are masked."""
    blocks = []
    for _, same_group in groupby(steps, key=lambda step: id(step.group)):
        members = list(same_group)
        finite = report_finite(members[0].group["name"], [step.grad for step in members], stats)

        if on_host(finite):
            flags = finite.tolist()
            blocks += [LocalBlocks(step, None) for step in compress(members, flags)]
        else:
            blocks += [LocalBlocks(step, ok) for step, ok in zip(members, finite)]

    return blocks


def _step_elements(steps: list[ParamStep], stats: StepStats) -> None:
    """An auxiliary rule on parameters of one group and one device. On the CPU a parameter with a
    non-finite gradient is skipped alone; elsewhere the whole group skips the step."""
    group = steps[0].group
    finite = report_finite(group["name"], [step.grad for step in steps], stats)

    found_inf = None
    if finite.device.type == "cpu":
        steps = list(compress(steps, finite.tolist()))
    elif finite.device.type != "meta":
        found_inf = (~finite.all()).float()

    if not steps:
        return

    batch = AuxiliaryBatch(
        params=[step.param for step in steps],
        grads=[step.grad for step in steps],
        states=[step.state for step in steps],
        group=group,
        found_inf=found_inf,
        streams=[rounding_seed(0, step.number, 0) for step in steps],
    )
    step_auxiliary(batch, stats)
