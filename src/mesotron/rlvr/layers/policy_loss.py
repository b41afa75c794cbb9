"""The losses inside TRL's trainer: GMPO put in place of TRL's policy term, and what a loss saw.

TRL's `_compute_loss` is called for everything else (KL term, entropy bonus, router loss, metrics),
with advantages of zero where the policy term is ours, so that none of it is written twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mesotron.rlvr.anchor import Anchor
from mesotron.rlvr.layers.shared_prompts import SharedPrompts
from mesotron.rlvr.losses import LossInputs, correction_weight, gmpo_loss, policy_metrics


class PolicyLoss(SharedPrompts):
    """Third layer over TRL's trainer: `geometric` swaps the policy term for GMPO's."""

    geometric: bool = False
    _seen: tuple[Tensor, Tensor] | None = None

    @property
    def policy(self) -> nn.Module:
        """The model that trains, as TRL holds it."""
        assert self.model is not None
        return self.model

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's, which also takes an `Anchor` for a model and remembers what the loss asked for."""
        if isinstance(model, Anchor):
            with model.in_place_of(self.policy):
                return super()._get_per_token_logps_and_entropies(self.policy, *args, **kwargs)
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if found[1] is not None:
            self._seen = found[0], found[1]
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        weight, entropy = self.entropy_coef, self._last_world_entropy
        loss = self._geometric_loss(model, inputs) if self.geometric else None
        if loss is None:
            loss = super()._compute_loss(model, inputs)
        self._measure_loss(inputs)
        if self._last_world_entropy == 0 and entropy != 0:
            # No token has trained in this step: TRL took that for a policy without entropy.
            self.entropy_coef, self._last_world_entropy = weight, entropy
            self._metrics["train"]["entropy_coef"][-1] = weight
        self._seen = None  # it holds the graph
        return loss

    def _geometric_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        idle = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if not (self.beta and self.args.use_bias_correction_kl):  # else the KL term needs the ratio
            idle.pop("old_per_token_logps", None)
        rest = super()._compute_loss(model, idle)
        assert self._seen is not None
        logprobs, entropies = self._seen
        outputs = gmpo_loss(self._loss_inputs(inputs, logprobs, entropies), self._gather)
        metrics = self._metrics[self._mode()]
        for name, value in outputs.metrics.items():
            if name != "policy_loss":
                metrics[name][-1] = value
            elif self._entropy_bonus_enabled:
                metrics[name][-1] += value
        steps = self.current_gradient_accumulation_steps if self.policy.training else 1
        return rest + outputs.loss / steps

    def _loss_inputs(
        self, inputs: dict[str, Any], logprobs: Tensor, entropies: Tensor
    ) -> LossInputs:
        mask = loss_mask(inputs)
        old = inputs.get("old_per_token_logps")
        old = logprobs.detach() if old is None else old
        token_mask = weight = None
        if self.top_entropy_quantile < 1:
            share = 1 - self.top_entropy_quantile
            token_mask = self.get_high_entropy_mask(entropies, mask, share)
        if self.off_policy_mask_threshold is not None:
            weight = self.get_off_policy_mask(
                advantages=inputs["advantages"][:, None],
                per_token_logps=logprobs,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            ).squeeze(1)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            correction, alive = correction_weight(inputs["importance_sampling_ratio"], mask)
            weight = correction if weight is None else weight * correction
            token_mask = alive if token_mask is None else token_mask & alive
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=inputs["advantages"],
            mask=mask,
            epsilon=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=self.args.delta,
            token_mask=token_mask,
            sequence_weight=weight,
        )

    def _measure_loss(self, inputs: dict[str, Any]) -> None:
        assert self._seen is not None
        logprobs, entropies = (x.detach() for x in self._seen)
        old = inputs.get("old_per_token_logps")
        ratio = None if old is None else logprobs - old
        found = policy_metrics(entropies, ratio, loss_mask(inputs), self._gather)
        if not found:  # TRL has written 0 for means over no token, and leaves NaN out of its means
            written = self._metrics[self._mode()]
            for name in written.keys() & {"entropy", "kl"}:
                written[name][-1] = torch.nan
        self._note(found)

    def _leave_out(self, batch: dict[str, Any], out: Sequence[bool]) -> dict[str, Any]:
        """The batch without some completions: no policy term, no KL term, no entropy, no tokens.

        TRL's `tool_mask` marks the tokens that train. Unlike `completion_mask` it has no part in
        the attention, so the model reads what it read when the batch was scored.

        Args:
            batch: as scored, of this process.
            out: [rows of all processes] which to leave out.
        """
        mask = loss_mask(batch)
        start = self.accelerator.process_index * len(mask)
        kept = [not left for left in out[start : start + len(mask)]]
        batch = {**batch, "tool_mask": mask * mask.new_tensor(kept)[:, None]}
        return {**batch, "num_items_in_batch": self._gather(batch["tool_mask"].sum()).sum()}

    def _gather(self, x: Tensor) -> Tensor:
        """Every process's rows one after the other; each must have as many."""
        found = self.accelerator.gather(x)
        assert isinstance(found, Tensor)
        return found

    def _add_up(self, x: Tensor) -> Tensor:
        """The sum over processes."""
        found = self.accelerator.reduce(x, reduction="sum")
        assert isinstance(found, Tensor)
        return found

    def _group_size(self) -> int:
        """G: completions of each prompt, as TRL counts them."""
        found = self.num_generations if self.policy.training else self.num_generations_eval
        assert found is not None
        return found

    def _mode(self) -> str:
        return "train" if self.policy.training else "eval"

    def _note(self, metrics: dict[str, float]) -> None:
        """Add metrics to those that TRL averages at its next log."""
        for name, value in metrics.items():
            self._metrics[self._mode()][name].append(value)


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """[B, T], 1 on tokens that the policy wrote and that train."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
