"""Behaviour cloning: one step at a time, each a function of the seed and its number.

Data order, noise and learning rate follow from the step, so that weights and optimizer state are
all that a checkpoint must hold. The run around it (folder, view, watch) is `session`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mesotron.config.vla_training import PartsOptimConfig, VlaTrainConfig
from mesotron.rlvr.optimizer import clip_auxiliary
from mesotron.vla.frames import Frames, Order, body_of, mix
from mesotron.vla.gradients import GradientProbe
from mesotron.vla.interface import Demos
from mesotron.vla.normalise import fit_all
from mesotron.vla.optimizer import build_optimizer, part_steps
from mesotron.vla.policy import Policy


class Trainer:
    """A policy in training.

    Args:
        config: of the run.
        demos: to learn from.
        device: to train on.
        frames: the same demonstrations as tensors, where several trainings share them.

    Attributes:
        policy: with float32 weights.
        optimizer: one for all parts.
        step: optimizer steps made.

    Example: see `mesotron.vla.session.train`, and benchmarks/vla/study.py for a bare loop.
    """

    def __init__(
        self,
        config: VlaTrainConfig,
        demos: Demos,
        device: torch.device,
        frames: Frames | None = None,
    ) -> None:
        self.config, self.device, self.step = config, device, 0
        torch.manual_seed(config.seed)
        self.policy = Policy(config.policy, body_of(demos), where=config.where > 0).to(device)
        fit_all(self.policy.units, demos)
        self.optimizer = build_optimizer(self.policy, config.optim)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        encode = self.policy.language.encode
        self.frames = frames or Frames(demos, config.policy.chunk, encode, device)
        self.order = Order(len(self.frames), config.seed)
        self._probe = GradientProbe(self.policy) if config.probe_every else None
        self._bfloat16 = uses_bfloat16(config.dtype, device)
        self._losses: Any = self.policy.losses
        if config.compile:
            self._losses = torch.compile(self.policy.losses, dynamic=False)
        if config.where and not self.frames.has_where:
            raise ValueError(
                f"--where {config.where:g} needs demonstrations that say where the named object "
                "is, which a simulator's do and recordings do not: leave it out"
            )

    def advance(self) -> dict[str, Tensor]:
        """Make one step.

        Returns:
            The losses and the norms of the gradient, still on the device: reading them waits.
        """
        config = self.config
        rows = self.order.rows(self.step, config.batch)
        self.optimizer.zero_grad()
        found = self.losses_of(rows)
        found["loss"].backward()
        limit = config.optim.max_grad_norm or math.inf
        norms = clip_auxiliary(self.optimizer, limit)
        factor = rate_factor(config.optim, self.step, config.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.step += 1
        found = {name: value.detach() for name, value in found.items()}
        return found | {"grad_norm": norms.total, "grad_norm/auxiliary": norms.auxiliary}

    def losses_of(self, rows: Tensor) -> dict[str, Tensor]:
        """The losses of some rows at this step, and their weighted sum under "loss"."""
        seen, targets = self.frames.batch(rows)
        generator = torch.Generator(self.device).manual_seed(mix(self.config.seed, self.step))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            found = self._losses(seen, targets, generator)
        total = found["loss/action"]
        if "loss/where" in found:
            total = total + self.config.where * found["loss/where"]
        return {"loss": total, **found}

    def statistics(self) -> dict[str, float]:
        """What the last step did, by group and by part; waits for the device."""
        stats = self.optimizer.stats()
        rate = rate_factor(self.config.optim, max(self.step - 1, 0), self.config.steps)
        named = {f"optim/{name}": value for name, value in stats.items()}
        steps = part_steps(self.optimizer, stats)
        return {"learning_rate": self.config.optim.lr * rate, **steps, **named}

    def probe(self) -> dict[str, float]:
        """The gradient at the present weights, on the rows of the next step."""
        if self._probe is None:
            return {}
        rows = self.order.rows(self.step, self.config.batch)

        def loss(some: Tensor) -> Tensor:
            return self.losses_of(some)["loss"]

        return self._probe.measure(loss, rows, self.optimizer.zero_grad)


def rate_factor(config: PartsOptimConfig, step: int, steps: int) -> float:
    """What the learning rate is multiplied with at a step, counted from 0.

    Example:
        >>> [rate_factor(PartsOptimConfig(schedule="linear"), k, 4) for k in range(4)]
        [1.0, 0.75, 0.5, 0.25]
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    gone = (step - warmup) / max(steps - warmup, 1)
    shapes = {"constant": 1.0, "linear": 1 - gone, "cosine": 0.5 * (1 + math.cos(math.pi * gone))}
    return shapes[config.schedule]


def uses_bfloat16(name: str, device: torch.device) -> bool:
    """Whether products are made in bfloat16."""
    able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bfloat16" and not able:
        raise ValueError(f"--dtype bfloat16 needs a GPU that has it, not {device}: use auto")
    return able and name != "float32"
