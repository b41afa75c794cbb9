"""Who samples inside TRL's trainer: TRL's own ways, or captured graphs (`rollout.engine`)."""

from typing import Any, Literal

import torch
from accelerate.utils import is_peft_model
from trl.trainer.grpo_trainer import GRPOTrainer

from mesotron.rlvr.checkpoints.resume import ExactResume
from mesotron.rlvr.dataset import Rows
from mesotron.rlvr.layers.padding import quick_padding
from mesotron.rlvr.sampling.draw import Sampling
from mesotron.rlvr.sampling.fused_decoder import FusedSampler, check_decoder
from mesotron.rlvr.sampling.graph_sampler import GraphSampler, check_attention

Engine = Literal["generate", "graph", "fused"]
# Prompts whose tokens are remembered: 256 chats took 39 ms of each step on an H200's host.
KEPT_PROMPTS = 16_384


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
