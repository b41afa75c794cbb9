"""Log-probabilities inside TRL's trainer from packed rows (`rollout.share_prompts`).

Every pass that the losses ask for, with a gradient or without, reads each distinct prompt of its
batch once; `packed_groups` has the packing.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mesotron.rlvr.layers.packed_groups import pack_groups
from mesotron.rlvr.layers.rollouts import Rollouts
from mesotron.rlvr.sampling.graph_sampler import check_attention

Found = tuple[Tensor, Tensor | None, Tensor | None]


class SharedPrompts(Rollouts):
    """Second layer over TRL's trainer: `share_prompts` packs a prompt's completions together."""

    share_prompts: bool = False

    def _check_sharing(self) -> None:
        """Refuse a model that cannot read packed rows; call it once the trainer is built."""
        if not self.share_prompts:
            return
        assert self.model is not None
        check_packing(self.model)
        if self._is_vlm or self.aux_loss_enabled:
            what = "images" if self._is_vlm else "the routers' balance of a mixture of experts"
            raise ValueError(f"rollout.share_prompts does not go with {what}: leave it out")

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
        packed = pack_groups(ids, mask, length)
        if packed is None:
            return super()._get_per_token_logps_and_entropies(model, ids, mask, length, **settings)
        with self.accelerator.autocast():
            out = model(
                input_ids=packed.ids,
                attention_mask=packed.seen,
                position_ids=packed.places,
                shift_labels=packed.labels,
                fused_lm_head=True,
            )
        entropies = packed.unpack(out.entropy) if settings["compute_entropy"] else None
        return packed.unpack(out.log_probs), entropies, None


def check_packing(model: nn.Module) -> None:
    """Refuse a model whose attention cannot read packed rows."""
    check_attention(model, "rollout.share_prompts", "leave it out")
