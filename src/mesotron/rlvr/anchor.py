"""The anchor: a slow average of the policy's weights that votes or is the KL reference.

M-GRPO (arXiv 2512.13070): theta_k <- m theta_k + (1 - m) theta_q, kept in float32, since at a
learning rate of 1e-6 a bfloat16 average would never move. Only trainable weights are averaged. With
LoRA these are the adapters, an approximation: the mean of A and of B is not the mean of BA. Sharded
weights are averaged shard by shard.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mesotron.models.adapters import trainable
from mesotron.runs.process import asks_for_sharding

# Where Co-rewarding-II's annealing ends (arXiv 2508.00410): the anchor then hardly moves.
LAST_MOMENTUM = 1 - 1e-5


def momentum_at(
    progress: float, momentum: float, schedule: Literal["constant", "cosine"] = "constant"
) -> float:
    """Constant, or a cosine over the run (`progress` 0 to 1) that ends at 1 - 1e-5."""
    if schedule == "constant":
        return momentum

    last = max(LAST_MOMENTUM, momentum)
    progress = min(max(progress, 0.0), 1.0)
    left = (1 + cos(pi * progress)) / 2  # 1 at the start, 0 at the end

    return last - (last - momentum) * left


class Anchor:
    """An average of a model's trainable weights that can temporarily replace them.

    It starts as a copy at its first use, when the model is wrapped, sharded and on its device, or
    from a checkpoint. The caller must refuse flat shards (FSDP1, ZeRO-3).

    Args:
        dtype: of the copy; float32 for an average that moves, None to keep each weight's own.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> anchor = Anchor().start(model)
        >>> start = model.weight.item()
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1.0)
        >>> anchor.update(model, momentum=0.75)
        >>> with anchor.in_place_of(model):
        ...     print(round(model.weight.item() - start, 6))
        0.25
    """

    def __init__(self, dtype: torch.dtype | None = torch.float32) -> None:
        self.dtype = dtype
        self.weights: dict[str, Tensor] = {}
        self.updates = 0

        # Squared distance to the model after the last update, and the model's squared norm.
        self.moved = torch.zeros(2)
        self._ready = False
        self._displaced: dict[str, Tensor] | None = None  # the model's own weights, while replaced

    def start(self, model: nn.Module) -> "Anchor":
        """Copy the model, unless that was done before or a checkpoint was loaded."""
        if self._ready:
            return self

        copies = {}
        for name, p in trainable(model):
            copies[name] = local(p).to(self.dtype or p.dtype, copy=True)

        if self.weights:  # from a checkpoint
            refuse_other_shapes(self.weights, copies)
            for name, mean in self.weights.items():
                copies[name].copy_(mean)

        self.weights = copies
        self._ready = True

        return self

    @torch.no_grad()
    def update(self, model: nn.Module, momentum: float) -> None:
        """Move the average toward the model: m = 0 copies it, m = 1 stays."""
        self.start(model)  # a run resumed inside a rollout updates before it samples
        sums = []
        for name, p in trainable(model):
            mean = self.weights[name]
            now = local(p)
            away = now.to(mean.dtype) - mean
            sums.append(torch.stack([away.square().sum(), now.float().square().sum()]))

            # At m = 0 exactly the model, which mean + (now - mean) is not to the last bit.
            if momentum == 0:
                mean.copy_(now)
            else:
                mean.add_(away, alpha=1 - momentum)

        total = torch.stack(sums).sum(dim=0)
        self.moved = total * torch.tensor([momentum**2, 1.0], device=total.device)
        self.updates += 1

    def distance(self, total: Callable[[Tensor], Tensor]) -> float:
        """To the model after the last update, relative to it; `total` sums over shards."""
        away, size = total(self.moved).tolist()
        if not size:
            return 0.0

        return (away / size) ** 0.5

    @torch.no_grad()
    def add(self, model: nn.Module, decay: float) -> None:
        """Add the model to the mean of all so far, after 1 / (1 - decay) of them a moving one."""
        self.start(model)
        weight = max(1 - decay, 1 / (self.updates + 1))
        for name, p in trainable(model):
            mean = self.weights[name]
            mean.lerp_(local(p).to(mean.dtype), weight)

        self.updates += 1

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give the model the anchor's weights inside the block; tensors keep their addresses."""
        self.start(model)
        self._displaced = {name: local(p).clone() for name, p in trainable(model)}
        self.write(model, self.weights)

        try:
            yield
        finally:
            self.put_back(model)

    def put_back(self, model: nn.Module) -> None:
        """Give the model its own weights again, if they are replaced now."""
        if self._displaced is not None:
            self.write(model, self._displaced)
            self._displaced = None

    def copy_weights(self) -> None:
        """Let the next update leave the tensors alone that `state_dict` returned before."""
        self.weights = {name: mean.clone() for name, mean in self.weights.items()}

    @staticmethod
    @torch.no_grad()
    def write(model: nn.Module, weights: dict[str, Tensor]) -> None:
        for name, p in trainable(model):
            local(p).copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:  # of a sharded model each process has its shards
        values = {"updates": self.updates, "moved": self.moved.tolist()}
        return {"tensors": self.weights, "values": json.dumps(values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights = dict(state_dict["tensors"])
        self._ready = False
        values = json.loads(state_dict["values"])
        self.updates = values["updates"]
        self.moved = torch.tensor(values["moved"])


def refuse_other_shapes(loaded: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
    for name in (*loaded, *copies):
        fits = name in loaded and name in copies and loaded[name].shape == copies[name].shape
        if not fits:
            raise ValueError(f"the checkpoint's anchor does not fit the model: {name!r}")


TokenRows = list[Sequence[int]]  # lists or arrays
Sample = Callable[[TokenRows, int], tuple[Any, Any]]
"""Samples one completion per prompt: token ids and log-probabilities (or None)."""


@dataclass
class AnchoredSampler:
    """Samples some completions of each prompt from the anchor, which takes the policy's place
    meanwhile: no second module, and with vLLM one more weight transfer per rollout."""

    anchor: Anchor
    model: nn.Module
    sample: Sample
    synced: Callable[[], None]  # called when weights were exchanged, for an engine that copies them
    rank: int = 0
    world: int = 1

    def _from_anchor(self, prompt_ids: TokenRows, number: int) -> tuple[Any, Any]:
        with self.anchor.in_place_of(self.model):
            self.synced()
            result = self.sample(prompt_ids, number)

        self.synced()
        return result

    def voters(
        self, prompts: TokenRows, number: int, even: bool = False
    ) -> tuple[TokenRows, TokenRows]:
        """This process's share of `number` completions of each prompt by the anchor, after their
        prompts."""
        rows = [ids for ids in prompts for _ in range(number)]
        share = -(-len(rows) // self.world)
        if even and share * self.world != len(rows):
            raise ValueError(
                f"vLLM cannot split {len(rows)} anchor completions evenly among {self.world} "
                "processes: change objective.momentum_generations"
            )

        rows += rows[-1:] * (share * self.world - len(rows))
        own = rows[self.rank * share :][:share]
        completion_ids, _ = self._from_anchor(own, number)

        return own, completion_ids

    def merged(self, prompt_ids: TokenRows, generations: int, number: int) -> tuple[Any, Any]:
        """Completions of which the last `number` of each group are the anchor's."""
        first = self.rank * len(prompt_ids)  # groups may begin in another process
        own = generations - number

        by_policy = []
        by_anchor = []
        for k in range(len(prompt_ids)):
            if (first + k) % generations < own:
                by_policy.append(k)
            else:
                by_anchor.append(k)

        completions: dict[int, Any] = {}
        logprobs: dict[int, Any] = {}
        sources = ((by_policy, self.sample, own), (by_anchor, self._from_anchor, number))
        for rows, sample, count in sources:
            if not rows:
                continue

            tokens, scores = sample([prompt_ids[k] for k in rows], count)
            completions |= dict(zip(rows, tokens, strict=True))
            if scores:
                logprobs |= dict(zip(rows, scores, strict=True))

        places = range(len(prompt_ids))
        in_order = [completions[k] for k in places]
        if not logprobs:
            return in_order, None

        return in_order, [logprobs[k] for k in places]


def refuse_flat_shards(trainer: Any, name: str) -> None:
    flat = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    if trainer.is_deepspeed_enabled or flat:
        raise ValueError(f"{name} cannot average the flat shards of DeepSpeed and FSDP1: use FSDP2")


def check_anchorable(trainer: Any, group_size: int) -> None:
    name = trainer.objective.name
    args = trainer.args
    refuse_flat_shards(trainer, name)

    if trainer.tools or trainer.rollout_func is not None or trainer.reads_images:
        raise ValueError(
            f"{name} does not support tools, images or a rollout_func: use grpo or vote with those"
        )

    rows = args.per_device_train_batch_size * args.steps_per_generation
    if (trainer.is_fsdp_enabled or trainer.use_vllm) and rows % group_size:
        raise ValueError(
            f"{rows} completions per process are not whole groups of {group_size}, which {name} "
            "needs with FSDP or vLLM: change per_device_train_batch_size"
        )


def reference_in_memory(model: Any, args: Any, peft_config: Any) -> bool:
    """Whether the KL term should refer to a copy of the model as it was given: TRL loads the
    reference from disk, where a model made in memory is not. Sharded models keep TRL's way."""
    from accelerate.utils import is_peft_model  # not installed for vla, which imports this file

    if isinstance(model, str) or not args.beta or args.sync_ref_model:
        return False
    if peft_config is not None or is_peft_model(model):
        return False
    if not (args.fsdp or args.deepspeed or asks_for_sharding()):
        return True
    if not model.config._name_or_path:
        raise ValueError(
            f"beta = {args.beta:g}: sharded runs load the reference from disk: pass a model folder"
        )

    return False


def local(p: Tensor) -> Tensor:
    p = p.detach()
    return p.to_local() if isinstance(p, DTensor) else p
