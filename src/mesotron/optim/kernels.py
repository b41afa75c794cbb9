"""The steps that run as Triton kernels: a plan for each GPU, and its replay once it is captured.

`triton` has the plans and the kernels; this file can be imported without Triton.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mesotron.config.rules import AUXILIARY_RULES
from mesotron.optim.groups import Work
from mesotron.optim.registry import Group, State
from mesotron.optim.state import ParamStep
from mesotron.optim.stats import StepStats

if TYPE_CHECKING:
    from mesotron.optim.triton.step import FusedStep, StepReplay

States = MutableMapping[Tensor, State]


class KernelSteps:
    """The plans of one optimizer."""

    def __init__(self) -> None:
        self.plans: dict[torch.device, FusedStep] = {}
        self.replay: StepReplay | None = None
        self._num_made: dict[torch.device, int] = {}

    def try_replay(self, groups: list[Group], states: States, stats: StepStats) -> bool:
        """Repeat the last step, if it is captured as a whole and nothing has changed since."""
        if self.replay is not None and self.replay.run(groups, states, stats):
            return True

        self.replay = None
        return False

    def step(
        self,
        device: torch.device,
        steps: list[ParamStep],
        work: Work,
        stats: StepStats,
    ) -> list[ParamStep]:
        """Step by the kernels what they take, AdamW's groups on the device too, and remove these
        from `work`; returns the other parameters."""
        keys = [key for key in work.auxiliary if key[1] == device]
        beside = [work.auxiliary[key] for key in keys]
        for vectors in beside:
            _fill_adamw_states(vectors)

        plan = self._plan(device, steps, beside)
        left = plan.run(steps, beside, stats)

        for key, taken in zip(keys, plan.beside, strict=True):
            if taken:
                del work.auxiliary[key]

        return left

    def keep_replay(self, groups: list[Group], states: States, work: Work) -> None:
        """Keep the next steps' replay, if one plan has made all of this step."""
        if len(work.spectral) != 1:
            return

        (device,) = work.spectral
        only = self.plans.get(device)
        alone = not work.auxiliary and not work.sharded
        plain = all(group["leash"] is None and group["pairs"] is None for group in groups)

        if only is not None and alone and plain:
            self.replay = only.replayed(groups, states)

    def _plan(
        self,
        device: torch.device,
        steps: list[ParamStep],
        beside: list[list[ParamStep]],
    ) -> FusedStep:
        from mesotron.optim.triton.step import FusedStep  # needs Triton

        plan = self.plans.get(device)
        if plan is not None and plan.fits(steps, beside):
            return plan

        # A capture pays if plans last: wait twice as long for it after each new one.
        made = self._num_made.get(device, 0)
        plan = FusedStep(steps, beside, patience=2 ** min(made, 16))
        self.plans[device] = plan
        self._num_made[device] = made + 1

        return plan


def _fill_adamw_states(steps: list[ParamStep]) -> None:
    for step in steps:
        if step.group["rule"] == "adamw" and not step.state:
            step.state.update(AUXILIARY_RULES["adamw"].new_state(step.param))
