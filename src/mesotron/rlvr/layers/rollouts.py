"""Who samples inside TRL's trainer: TRL's own ways, or captured graphs (`rollout.engine`)."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.rlvr.dataset import Rows
from mesotron.rlvr.layers.padding import quick_padding
from mesotron.rlvr.sampling.draw import Sampling
from mesotron.rlvr.sampling.fused_decoder import FusedSampler, check_decoder
from mesotron.rlvr.sampling.graph_sampler import GraphSampler, check_attention

Engine = Literal["generate", "graph", "fused"]
# Prompts whose tokens are remembered: 256 chats took 39 ms of each step on an H200's host.
KEPT_PROMPTS = 16_384


class ExactResume(SafeCheckpoints):
    """Mixin for TRL's GRPO trainer: also its rollout buffer, its counters and its order of prompts.

    `class GRPOTrainer(ExactResume, trl.GRPOTrainer)`.
    """

    _epochs_read: int = 0

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(self._newest_checkpoint())
        if resume_from_checkpoint:
            path = Path(resume_from_checkpoint) / "trainer_state.json"
            self._epochs_read = int(json.loads(path.read_text())["epoch"])
        return super().train(resume_from_checkpoint, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler after as many shuffles as the run has begun epochs."""
        sampler = super()._get_train_sampler(dataset)
        if self.shuffle_dataset:
            for _ in range(self._epochs_read):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def own_state(self) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        used_up = self._step % every == 0  # then the next step samples anew
        state: dict[str, Any] = {
            "step": self._step,
            "buffer": None if used_up else self._buffered_inputs,
            "metrics": {name: list(found) for name, found in self._metrics["train"].items()},
        }
        if self.use_adaptive_entropy:
            state["entropy"] = [self.entropy_coef, self._last_world_entropy]
        return state

    def load_own_state(self, mine: dict[str, Any]) -> None:
        self._step = mine["step"]
        buffer = mine["buffer"]
        if buffer is not None:
            buffer = [to_device(batch, self.accelerator.device) for batch in buffer]
        self._buffered_inputs = buffer
        for name, found in mine["metrics"].items():
            self._metrics["train"][name].extend(found)
        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = mine["entropy"]


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}


class Rollouts(ExactResume, GRPOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """First layer over TRL's trainer: `engine` graph or fused samples with a `GraphSampler`."""

    engine: Engine = "generate"
    usual_rows: int = 0
    """Rows of a whole rollout where other numbers are sampled too; see `GraphSampler.sample`."""
    _sampler: GraphSampler | None = None
    _token_ids: dict[str, list[int]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's, with a padding of few steps."""
        with quick_padding():
            return super()._generate_and_score_completions(inputs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """TRL's; then, while a GPU still goes back through the layers, the next prompts' tokens."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.engine != "generate" and isinstance(self.train_dataset, Rows):
            self._tokenize_prompts(list(self.train_dataset.latest))
            self.train_dataset.latest = ()
        return loss

    def _tokenize_prompts(self, prompts: list) -> Any:
        """TRL's; where graphs sample, which is text alone, once for each prompt of a run."""
        if self.engine == "generate":
            return super()._tokenize_prompts(prompts)
        keys: list[str] = []
        for k, prompt in enumerate(prompts):
            alike = k > 0 and (prompt is prompts[k - 1] or prompt == prompts[k - 1])
            keys.append(keys[-1] if alike else repr(prompt))
        if len(self._token_ids) > KEPT_PROMPTS:
            self._token_ids = {}
        fresh = {key: p for key, p in zip(keys, prompts, strict=True) if key not in self._token_ids}
        if fresh:
            found, _, _ = super()._tokenize_prompts(list(fresh.values()))
            self._token_ids |= dict(zip(fresh, found, strict=True))
        return [self._token_ids[key] for key in keys], None, {}

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        """TRL's, unless graphs sample."""
        if self.engine == "generate":
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        sampling = Sampling(self.temperature, self.top_k or 0, self.top_p)
        if self._sampler is None or self._sampler.sampling != sampling:  # a remedy may cool it
            self._sampler = self._make_sampler(sampling)
        longest = self.max_completion_length
        return self._sampler.sample(prompt_ids, longest, self.usual_rows), None

    def _check_engine(self) -> None:
        """Refuse what graphs cannot sample; call it once the trainer is built."""
        if self.engine == "generate":
            return
        args = self.args
        odd = {
            "use_vllm": self.use_vllm,
            "use_transformers_continuous_batching": args.use_transformers_continuous_batching,
            "tools": bool(self.tools),
            "rollout_func": self.rollout_func is not None,
            "min_p": bool(self.min_p),
            "repetition_penalty": self.repetition_penalty != 1.0,
            "generation_kwargs": bool(args.generation_kwargs),
            "images": self._is_vlm,
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
        }
        asked = [name for name, is_asked in odd.items() if is_asked]
        if asked:
            raise ValueError(
                f"rollout.engine {self.engine} does not go with {', '.join(asked)}: use "
                "rollout.engine generate"
            )
        check_engine(self.engine, self.model)

    def _make_sampler(self, sampling: Sampling) -> GraphSampler:
        """A sampler of the policy as TRL's arguments say."""
        args = self.args
        half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        assert self.model is not None
        sampler = FusedSampler if self.engine == "fused" else GraphSampler
        return sampler(
            self.model,
            eos=self.eos_token_ids,
            pad=self._tokenizer.pad_token_id,
            sampling=sampling,
            dtype=half,
        )


def check_engine(engine: Engine, model: Any) -> None:
    """Refuse a model that an engine cannot sample from.

    Args:
        engine: of `rollout.engine`.
        model: of Transformers, or PEFT's around one.
    """
    if engine == "fused":
        if is_peft_model(model):
            raise ValueError(
                "rollout.engine fused does not go with LoRA: use rollout.engine graph or generate"
            )
        check_decoder(model)
    elif engine == "graph":
        check_attention(model)
