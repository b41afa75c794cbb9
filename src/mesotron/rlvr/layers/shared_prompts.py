"""Log-probabilities inside TRL's trainer from packed rows (`rollout.share_prompts`).

Every pass that the losses ask for, with a gradient or without, reads each distinct prompt of its
batch once; `packed_groups` has the packing. `rollout.record` makes the rows of few fixed shapes and
records the pass; `recorded_pass` has the graphs.
"""

from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from mesotron.rlvr.layers.fixed_pass import FixedPass, check_fixed
from mesotron.rlvr.layers.packed_groups import pack_groups
from mesotron.rlvr.layers.recorded_pass import Recorder
from mesotron.rlvr.layers.rollouts import Rollouts
from mesotron.rlvr.sampling.graph_sampler import check_attention

Found = tuple[Tensor, Tensor | None, Tensor | None]


class SharedPrompts(Rollouts):
    """Second layer over TRL's trainer: `share_prompts` packs a prompt's completions together.

    `record` replays that pass as CUDA graphs.
    """

    share_prompts: bool = False
    record: bool = False
    _recorder: Recorder | None = None

    def _check_sharing(self) -> None:
        """Refuse a model that cannot read packed rows; call it once the trainer is built."""
        if not self.share_prompts:
            if self.record:
                raise ValueError("rollout.record needs rollout.share_prompts: give both or neither")
            return
        assert self.model is not None
        check_packing(self.model)
        if self._is_vlm or self.aux_loss_enabled:
            what = "images" if self._is_vlm else "the routers' balance of a mixture of experts"
            raise ValueError(f"rollout.share_prompts does not go with {what}: leave it out")
        if self.record:
            self._check_recording()

    def _check_recording(self) -> None:
        """Refuse what graphs of fixed shapes cannot hold."""
        args = self.args
        odd = {
            "several processes": self.accelerator.num_processes > 1,
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
            "gradient checkpointing": args.gradient_checkpointing,
            "torch_compile": args.torch_compile,
            "cast_lm_head_to_fp32": args.cast_lm_head_to_fp32,
        }
        asked = [name for name, is_asked in odd.items() if is_asked]
        if asked:
            raise ValueError(f"rollout.record does not go with {', '.join(asked)}: leave it out")
        check_fixed(self.model, "rollout.record", "leave it out")

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        batch_size: Any = None,
        compute_entropy: Any = False,
        **rest: Any,
    ) -> Found:
        """TRL's, or the same numbers from packed rows."""
        settings = {"compute_entropy": compute_entropy, **rest}
        if not self.share_prompts:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **settings
            )
        size = batch_size or len(input_ids)
        parts = [
            self._part(model, ids, mask, logits_to_keep, settings)
            for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True)
        ]
        logprobs = torch.cat([part[0] for part in parts])
        entropies = [part[1] for part in parts if part[1] is not None]
        return logprobs, torch.cat(entropies) if entropies else None, None

    def _part(
        self, model: Any, ids: Tensor, mask: Tensor, length: int, settings: dict[str, Any]
    ) -> Found:
        """One forward pass."""
        if self.record:
            found = self._recorded(model, ids, mask, length)
            if found is not None:
                return found[0], found[1] if settings["compute_entropy"] else None, None
        packed = pack_groups(ids, mask, length, self.num_generations)
        if packed is None:
            return super()._get_per_token_logps_and_entropies(model, ids, mask, length, **settings)
        with self.accelerator.autocast():
            out = model(
                input_ids=packed.ids,
                attention_mask=packed.seen(),
                position_ids=packed.frame.places(ids.device),
                shift_labels=packed.labels,
                fused_lm_head=True,
            )
        entropies = packed.unpack(out.entropy) if settings["compute_entropy"] else None
        return packed.unpack(out.log_probs), entropies, None

    def _recorded(
        self, model: Any, ids: Tensor, mask: Tensor, length: int
    ) -> tuple[Tensor, Tensor] | None:
        """Log-probabilities and entropies from a pass of a fixed shape, where there is one."""
        longest = self.max_completion_length
        # Without gradient LoRA may be switched off, which a recording would not notice.
        adapted = is_peft_model(model) and not torch.is_grad_enabled()
        if model is not self.model or adapted or length > longest:
            return None
        packed = pack_groups(ids, mask, length, self.num_generations, longest)
        if packed is None:
            return None
        if self._recorder is None:
            work = FixedPass(model, self.accelerator.autocast, self._entropy_bonus_enabled)
            self._recorder = Recorder(work)
        found = self._recorder(packed, self.temperature)
        return packed.pick(found.logprobs), packed.pick(found.entropies)


def check_packing(model: nn.Module) -> None:
    """Refuse a model whose attention cannot read packed rows."""
    check_attention(model, "rollout.share_prompts", "leave it out")
