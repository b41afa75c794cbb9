"""Behaviour cloning: one step at a time, each a function of the seed and its number.

Data order, noise and learning rate follow from the step, so that weights and optimizer state are
all that a checkpoint must hold. On a GPU they are read from tables there by the step's number, and
the step is a replayed graph. The run around it (folder, view, watch) is `session`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mesotron.config import PartsOptimConfig, VlaTrainConfig
from mesotron.optim.groups import clip_gradients
from mesotron.vla.draws import Draws
from mesotron.vla.frames import Frames, Order, body_of, mix
from mesotron.vla.gradients import GradientProbe
from mesotron.vla.interface import Demos
from mesotron.vla.optimizer import build_optimizer, part_steps
from mesotron.vla.policy import PARTS, Policy
from mesotron.vla.replay import Replay


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

    Example: see `mesotron.vla.session.train`, and benchmarks/vla/study.py for a bare loop.
    """

    def __init__(
        self,
        config: VlaTrainConfig,
        demos: Demos,
        device: torch.device,
        frames: Frames | None = None,
    ) -> None:
        self.config, self.device = config, device
        torch.manual_seed(config.seed)
        self.policy = Policy(config.policy, body_of(demos), where=config.where > 0).to(device)
        self.policy.fit(demos)
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
        self._place = torch.zeros(1, dtype=torch.long, device=device)  # the step, for the device
        self._noise_seed = mix(config.seed, -1 % 2**32) << 31
        self._step = 0
        self._replay: Replay | None = None
        if uses_graph(config, self.frames):
            self._tables = Tables(config, self.order, self._rates, device)
            self._replay = Replay(self._step_by_tables, device)

    @property
    def step(self) -> int:
        """Optimizer steps made; may be set, to go on from a checkpoint."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._place.fill_(step)

    def advance(self) -> dict[str, Tensor]:
        """Make one step.

        Returns:
            The losses and the norms of the gradient, still on the device: reading them waits, and
            the next step may overwrite them.
        """
        found = self._step_plainly() if self._replay is None else self._replay()
        self._set_rates()  # numbers, which a checkpoint can hold
        self._step += 1
        for group in self.optimizer.param_groups:
            group["step"] = self._step  # a replay counts on the device alone
        return found

    def _step_plainly(self) -> dict[str, Tensor]:
        self._set_rates()
        return self._step_on(self.order.rows(self._step, self.config.batch))

    def _step_by_tables(self) -> dict[str, Tensor]:
        """The same step; nothing in it is decided on the host."""
        rates = self._tables.rates.index_select(0, self._place)[0]
        for group, rate in zip(self.optimizer.param_groups, rates.unbind(), strict=True):
            group["lr"] = rate
        return self._step_on(self._tables.rows.index_select(0, self._place)[0])

    def _set_rates(self) -> None:
        factor = rate_factor(self.config.optim, self._step, self.config.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def _step_on(self, rows: Tensor) -> dict[str, Tensor]:
        self._clear_gradients()
        found = self.losses_of(rows)
        found["loss"].backward()
        limit = self.config.optim.max_grad_norm or math.inf
        norms = clip_gradients(self.optimizer, limit)
        self.optimizer.step()
        self._place.add_(1)
        found = {name: value.detach() for name, value in found.items()}
        return found | {"grad_norm": norms.total, "grad_norm/auxiliary": norms.auxiliary}

    def _clear_gradients(self) -> None:
        """A recorded step must find its gradients where they were."""
        grads = [p.grad for p in self.policy.parameters() if p.grad is not None]
        if self._replay is None:
            self.optimizer.zero_grad()
        elif grads:
            torch._foreach_zero_(grads)  # pyright: ignore

    def losses_of(self, rows: Tensor) -> dict[str, Tensor]:
        """The losses of some rows at this step, and their weighted sum under "loss"."""
        seen, targets = self.frames.batch(rows)
        draws = Draws(self._place + self._noise_seed)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            found = self._losses(seen, targets, draws)
        total = found["loss/action"]
        if "loss/where" in found:
            total = total + self.config.where * found["loss/where"]
        return {"loss": total, **found}

    def statistics(self) -> dict[str, float]:
        """What the last step did, by group and by part; waits for the device."""
        stats = self.optimizer.stats()
        rate = rate_factor(self.config.optim, max(self._step - 1, 0), self.config.steps)
        named = {f"optim/{name}": value for name, value in stats.items()}
        steps = part_steps(self.optimizer, stats)
        return {"learning_rate": self.config.optim.lr * rate, **steps, **named}

    def probe(self) -> dict[str, float]:
        """The gradient at the present weights, on the rows of the next step."""
        if self._probe is None:
            return {}
        rows = self.order.rows(self._step, self.config.batch)

        def loss(some: Tensor) -> Tensor:
            return self.losses_of(some)["loss"]

        kept = [p.grad for p in self.policy.parameters()]
        found = self._probe.measure(loss, rows, self.optimizer.zero_grad)
        for p, grad in zip(self.policy.parameters(), kept, strict=True):
            p.grad = grad
        return found


class Tables:
    """What every step of a run reads, on the device.

    Args:
        config: of the run; steps, batch and schedule count.
        order: of the rows.
        peaks: highest learning rate of each of G groups.
        device: where the tables lie.

    Attributes:
        rows: int64 [steps, batch].
        rates: float32 [steps, G].
    """

    def __init__(
        self, config: VlaTrainConfig, order: Order, peaks: list[float], device: torch.device
    ) -> None:
        rows = [order.rows(step, config.batch) for step in range(config.steps)]
        factors = [rate_factor(config.optim, step, config.steps) for step in range(config.steps)]
        self.rows = torch.stack(rows).to(device)
        self.rates = torch.outer(torch.tensor(factors), torch.tensor(peaks)).to(device)


def uses_graph(config: VlaTrainConfig, frames: Frames) -> bool:
    """Whether a run's step is recorded: on a GPU that holds the images, unless something in the
    step must ask the host (an SVD) or may (a pretrained tower)."""
    wanted = config.graph
    exact = "low_rank" in (getattr(config.optim, part) for part in PARTS)
    towers = config.policy.vision_tower or config.policy.language_tower
    able = frames.device.type == "cuda" and frames.is_on_device
    if wanted and (exact or not able):
        why = "low_rank's SVD cannot be recorded" if exact else "the images are not on a GPU"
        raise ValueError(f"--graph was asked for, and {why}: leave it out")
    return wanted if wanted is not None else able and not exact and not towers


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
