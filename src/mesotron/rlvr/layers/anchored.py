"""Sampling from the momentum policy inside TRL's trainer, and the model a KL term refers to.

M-GRPO's anchor (arXiv 2512.13070) takes the policy's place while it samples: no second module, and
with vLLM one more transfer of weights for each rollout. Its completions vote; in the merged variant
they also train. Engines that hold flat shards are refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from mesotron.config import ObjectiveConfig
from mesotron.probes import trajectory_entropy
from mesotron.rlvr.anchor import Anchor, momentum_at
from mesotron.rlvr.layers.padding import as_arrays, pad_rows
from mesotron.rlvr.layers.policy_loss import PolicyLoss
from mesotron.rlvr.objectives import ANCHORED
from mesotron.runs.process import asks_for_sharding

Tokens = list[list[int]]


class AnchoredRollouts(PolicyLoss):
    """Fourth layer: an anchor that moves, samples and can be the model of the KL term."""

    objective: ObjectiveConfig
    anchor: Anchor | None = None
    _prompt_ids: Tokens
    _anchor_rows: tuple[Tokens, Tokens]

    def _start_anchor(self) -> None:
        """Give an anchored objective its anchor; call it once the trainer is built."""
        self._prompt_ids, self._anchor_rows = [], ([], [])
        if self.objective.name not in ANCHORED:
            return
        self._refuse_what_cannot_be_anchored()
        self.anchor = self.stateful["anchor"] = Anchor()
        if self.objective.name == "corewarding" and self.beta:
            self.ref_model = self.anchor

    def _refuse_what_cannot_be_anchored(self) -> None:
        name = self.objective.name
        flat = self.is_fsdp_enabled and not self.accelerator.is_fsdp2
        if self.is_deepspeed_enabled or flat:
            raise ValueError(
                f"{name} averages weights, which DeepSpeed and FSDP1 keep in flat shards: use "
                "FSDP2 (fsdp_version: 2) or plain data parallelism"
            )
        if self.tools or self.rollout_func is not None or self._is_vlm:
            raise ValueError(
                f"{name} samples text from its anchor and cannot run tools, pictures or a "
                "rollout_func: use grpo or vote with those"
            )
        rows = self.args.per_device_train_batch_size * self.args.steps_per_generation
        if (self.is_fsdp_enabled or self.use_vllm) and rows % self._group_size():
            raise ValueError(
                f"{rows} completions of one process are not whole groups of "
                f"{self._group_size()}, which {name} needs with FSDP or vLLM: change "
                "per_device_train_batch_size"
            )

    def _move_anchor(self) -> None:
        """At each rollout: copy the policy the first time, then follow it."""
        if self.anchor is None:
            return
        follow = bool(self.anchor.weights) and self.objective.momentum_update == "rollout"
        self.anchor.start(self.policy)
        if follow:
            self._update_anchor()
        moved = self.anchor.moved
        if self.is_fsdp_enabled:
            moved = self._add_up(moved.to(self.accelerator.device))
        away, size = moved.tolist()
        self._note({"anchor/distance": (away / size) ** 0.5 if size else 0.0})

    def _update_anchor(self) -> None:
        assert self.anchor is not None
        progress = self.state.global_step / max(self.state.max_steps, 1)
        schedule = self.objective.momentum_schedule or "constant"
        momentum = momentum_at(progress, self.objective.momentum, schedule)
        self.anchor.update(self.policy, momentum)

    @contextmanager
    def _as_anchor(self) -> Iterator[None]:
        """Sample as the anchor inside the block; vLLM gets the weights anew on both sides."""
        assert self.anchor is not None
        with self.anchor.in_place_of(self.policy):
            self._last_loaded_step = -1
            yield
        self._last_loaded_step = -1

    def _anchor_share(self) -> int:
        """How many of each group's trained completions the anchor samples: the merged variant."""
        merged = self.anchor is not None and self.objective.loss_on_momentum
        return (self.objective.momentum_generations or 0) if merged and self.policy.training else 0

    def _generate(self, prompts: list) -> Any:
        found = super()._generate(prompts)
        self._prompt_ids, self._anchor_rows = found[0], ([], [])
        number = self.objective.momentum_generations or 0
        apart = self.anchor is not None and self.policy.training and not self._anchor_share()
        if apart and number:
            self._anchor_rows = self._sample_voters(found[0], number)
        # TRL makes a tensor of each row of these, a prompt's as often as it has completions.
        return as_arrays(found[0]), *found[1:]

    def _sample_voters(self, prompt_ids: Tokens, number: int) -> tuple[Tokens, Tokens]:
        """This process's share of `number` completions of each prompt by the anchor.

        All processes get the same number, so that none waits alone in a sharded forward pass; what
        is sampled beyond need is cut off after the gathering.
        """
        prompts = gather_object(prompt_ids)[:: self._group_size()]
        rows = [ids for ids in prompts for _ in range(number)]
        share = -(-len(rows) // self.accelerator.num_processes)
        if self.use_vllm and share * self.accelerator.num_processes != len(rows):
            raise ValueError(
                f"{len(rows)} completions of the anchor cannot be shared evenly by "
                f"{self.accelerator.num_processes} processes, which vLLM needs: change "
                "objective.momentum_generations"
            )
        rows += rows[-1:] * (share * self.accelerator.num_processes - len(rows))
        start = self.accelerator.process_index * share
        mine = rows[start : start + share]
        with self._as_anchor():
            completion_ids, _ = super()._generate_single_turn(mine, None, {}, number)
        return mine, completion_ids

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        """TRL's; in the merged variant the last rows of each group come from the anchor."""
        theirs = self._anchor_share()
        if not theirs:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        start, ours = self.accelerator.process_index * len(prompt_ids), num_generations - theirs
        places = [(start + k) % num_generations for k in range(len(prompt_ids))]
        own = [k for k, place in enumerate(places) if place < ours]
        rest = [k for k, place in enumerate(places) if place >= ours]
        found: dict[int, Any] = {}
        if own:
            found |= self._sample_rows(prompt_ids, own, ours)
        if rest:
            with self._as_anchor():
                found |= self._sample_rows(prompt_ids, rest, theirs)
        completion_ids = [found[k][0] for k in range(len(prompt_ids))]
        logprobs = [found[k][1] for k in range(len(prompt_ids))]
        return completion_ids, None if logprobs[0] is None else logprobs

    def _sample_rows(self, prompt_ids: Tokens, rows: list[int], number: int) -> dict[int, Any]:
        ids, logprobs = super()._generate_single_turn(
            [prompt_ids[k] for k in rows], None, {}, number
        )
        return dict(zip(rows, zip(ids, logprobs or [None] * len(rows), strict=True), strict=True))

    def _trajectory_entropies(self, prompt_ids: Tokens, completion_ids: Tokens) -> Tensor:
        """[rows] in nats, by the policy as it is: one forward pass without gradient."""
        prompts = self._pad(prompt_ids, "left")
        completions = self._pad(completion_ids, "right")
        ids, mask = (torch.cat(pair, dim=1) for pair in zip(prompts, completions, strict=True))
        off = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), off:
            _, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                mask,
                completions[0].shape[1],
                batch_size=self.args.per_device_train_batch_size,
                compute_entropy=True,
            )
        self._seen = None
        assert entropies is not None
        return trajectory_entropy(entropies, completions[1])

    def _pad(self, rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
        ids = [torch.from_numpy(row) for row in as_arrays(rows)]
        masks = [torch.ones_like(row) for row in ids]
        found = [
            pad_rows(x, padding_value=value, padding_side=side).to(self.accelerator.device)
            for x, value in ((ids, self._tokenizer.pad_token_id), (masks, 0))
        ]
        return found[0], found[1]


def reference_in_memory(model: Any, args: Any, peft_config: Any) -> bool:
    """Whether the KL term should refer to a copy of the model as it was given.

    TRL loads the reference anew from where the model came from: for a model made in memory there is
    no such place, and for one changed since it was loaded it is the wrong model. Sharded models
    keep TRL's way.
    """
    if isinstance(model, str) or not args.beta:
        return False
    if peft_config is not None or is_peft_model(model):
        return False
    if not (args.fsdp or args.deepspeed or asks_for_sharding()):
        return True
    if not model.config._name_or_path:
        raise ValueError(
            f"beta = {args.beta:g} needs the model as it was, which sharded runs load anew, and "
            "this one was made in memory: save it and give the trainer its folder, or beta = 0"
        )
    return False
