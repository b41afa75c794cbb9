"""Behavior cloning: one step at a time, each a function of the seed and the step number.

Data order, noise and learning rate follow from the step; on a GPU they are read from tables on the
device and the step is a replayed CUDA graph. `session` is the run around it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mesotron.config import PartsOptimConfig, VlaTrainConfig
from mesotron.optim.clipping import clip_gradients
from mesotron.vla.data import Frames, RowOrder, body_of, mix_seed
from mesotron.vla.interface import Demos
from mesotron.vla.optimizer import GradientProbe, build_optimizer, part_updates
from mesotron.vla.policy import PARTS, KeyedRandom, Policy

MAX_GRAD_NORM = 1.0  # of the auxiliary groups


class Trainer:
    """A policy in training; trainers on the same demonstrations can share their `frames`."""

    def __init__(
        self,
        config: VlaTrainConfig,
        demos: Demos,
        device: torch.device,
        frames: Frames | None = None,
    ) -> None:
        self.config = config
        self.device = device
        torch.manual_seed(config.seed)
        self.policy = Policy(config.policy, body_of(demos), where=config.where > 0).to(device)
        self.policy.fit(demos)
        self.optimizer = build_optimizer(self.policy, config.optim)
        self._peak_lrs = [group["lr"] for group in self.optimizer.param_groups]
        encode = self.policy.language.encode
        self.frames = frames or Frames(demos, config.policy.chunk, encode, device)
        self.order = RowOrder(len(self.frames), config.seed)
        self._probe = GradientProbe(self.policy)
        self._bfloat16 = uses_bfloat16(config.dtype, device)
        self._losses: Any = self.policy.losses

        if config.where and demos.where is None:
            raise ValueError(f"--where {config.where:g} needs demonstrations of a simulator")

        self._device_step = torch.zeros(1, dtype=torch.long, device=device)
        self._noise_seed = mix_seed(config.seed, -1 % 2**32) << 31
        self._step = 0
        self._replay: GraphReplay | None = None

        if uses_graph(config, self.frames):
            self._make_tables()
            self._replay = GraphReplay(self._step_from_tables, device)

    @property
    def step(self) -> int:
        """Optimizer steps taken; set it to continue from a checkpoint."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._device_step.fill_(step)

    def advance(self) -> dict[str, Tensor]:
        if self._replay is None:
            self._set_learning_rates()
            metrics = self._step_on(self.order.rows(self._step, self.config.batch))
        else:
            metrics = self._replay()
            self._set_learning_rates()  # as numbers, for checkpoints

        self._step += 1
        for group in self.optimizer.param_groups:
            group["step"] = self._step  # a replay counts only on the device

        return metrics

    def _make_tables(self) -> None:
        """Rows [steps, batch] and learning rates [steps, groups] of all steps, on the device."""
        config = self.config
        steps = range(self.config.steps)
        rows = [self.order.rows(step, config.batch) for step in steps]
        factors = torch.tensor([lr_factor(config.optim, step, config.steps) for step in steps])
        self._rows = torch.stack(rows).to(self.device)
        self._lrs = torch.outer(factors, torch.tensor(self._peak_lrs)).to(self.device)

    def _step_from_tables(self) -> dict[str, Tensor]:
        """The same step without any decision on the host."""
        lrs = self._lrs.index_select(0, self._device_step)[0]
        for group, lr in zip(self.optimizer.param_groups, lrs.unbind(), strict=True):
            group["lr"] = lr
        return self._step_on(self._rows.index_select(0, self._device_step)[0])

    def _set_learning_rates(self) -> None:
        factor = lr_factor(self.config.optim, self._step, self.config.steps)
        for group, lr in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = lr * factor

    def _step_on(self, rows: Tensor) -> dict[str, Tensor]:
        grads = []
        for p in self.policy.parameters():
            if p.grad is not None:
                grads.append(p.grad)

        if self._replay is None:
            self.optimizer.zero_grad()
        elif grads:  # a graph needs its gradients in place
            torch._foreach_zero_(grads)  # pyright: ignore

        losses = self.losses_of(rows)
        losses["loss"].backward()
        norms = clip_gradients(self.optimizer, MAX_GRAD_NORM)
        self.optimizer.step()
        self._device_step.add_(1)
        metrics = {name: value.detach() for name, value in losses.items()}

        return metrics | {"grad_norm": norms.total, "grad_norm/auxiliary": norms.auxiliary}

    def losses_of(self, rows: Tensor) -> dict[str, Tensor]:
        """The losses of some rows at this step, and their weighted sum, "loss"."""
        inputs, targets = self.frames.batch(rows)
        random = KeyedRandom(self._device_step + self._noise_seed)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            losses = self._losses(inputs, targets, random)

        total = losses["loss/action"]
        if "loss/where" in losses:
            total = total + self.config.where * losses["loss/where"]

        return {"loss": total, **losses}

    def statistics(self) -> dict[str, float]:
        """Optimizer metrics of the last step, by group and part; synchronizes."""
        stats = self.optimizer.stats()
        factor = lr_factor(self.config.optim, max(self._step - 1, 0), self.config.steps)

        return {
            "learning_rate": self.config.optim.lr * factor,
            **part_updates(self.optimizer, stats),
            **{f"optim/{name}": value for name, value in stats.items()},
        }

    def probe(self) -> dict[str, float]:
        """Gradient metrics at the current weights, on the next step's rows."""
        rows = self.order.rows(self._step, self.config.batch)
        kept = [p.grad for p in self.policy.parameters()]
        metrics = self._probe.measure(
            lambda some: self.losses_of(some)["loss"], rows, self.optimizer.zero_grad
        )

        for p, grad in zip(self.policy.parameters(), kept, strict=True):
            p.grad = grad

        return metrics


class GraphReplay:
    """Runs the same work repeatedly, from the fourth call on as a CUDA graph, without Python's time
    between kernels. The work reads and writes tensors that stay in place."""

    WARMUP_CALLS = 3  # allocate state, choose kernels and compile them

    def __init__(self, work: Callable[[], dict[str, Tensor]], device: torch.device) -> None:
        self._work = work
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: dict[str, Tensor] = {}
        self._num_calls = 0

    def __call__(self) -> dict[str, Tensor]:
        """Do the work once; the next call overwrites the returned tensors."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)

        with torch.cuda.stream(self._stream):
            if self._num_calls == self.WARMUP_CALLS:
                with torch.cuda.graph(self._graph, stream=self._stream):
                    self._outputs = self._work()

            if self._num_calls < self.WARMUP_CALLS:
                self._outputs = self._work()
            else:
                self._graph.replay()

        current.wait_stream(self._stream)
        self._num_calls += 1

        return self._outputs


def uses_graph(config: VlaTrainConfig, frames: Frames) -> bool:
    """Whether steps are CUDA graphs: not with an SVD or a tower, which synchronize the host."""
    has_svd = "low_rank" in (getattr(config.optim, part) for part in PARTS)
    has_tower = config.policy.vision_tower or config.policy.language_tower

    is_able = frames.device.type == "cuda" and frames.is_on_device and not has_svd
    if config.graph and not is_able:
        if has_svd:
            why = "low_rank needs an SVD"
        else:
            why = "the images are not on a GPU"

        raise ValueError(f"--graph is not possible: {why}")

    if config.graph is not None:
        return config.graph

    return is_able and not has_tower


def lr_factor(config: PartsOptimConfig, step: int, steps: int) -> float:
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)

    done = (step - warmup) / max(steps - warmup, 1)
    if config.schedule == "linear":
        return 1 - done
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))

    return 1.0


def uses_bfloat16(dtype: str, device: torch.device) -> bool:
    is_able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16" and not is_able:
        raise ValueError(f"--dtype bfloat16 is not supported on {device}: use auto")
    return is_able and dtype != "float32"
