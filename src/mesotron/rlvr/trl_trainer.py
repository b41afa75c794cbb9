"""`GRPOTrainer`: TRL's, with routed optimizers, more objectives, and exact checkpoints.

With `optim`, `objective`, `judge` and `fast` left out it is TRL's trainer to the last bit, except
that FSDP2 with bfloat16 keeps its log-probabilities in float32. In a step
`_generate_and_score_completions` samples and scores a rollout, `_compute_loss` turns micro-batches
of it into gradients, `_clip_grad_norm` and the optimizer update the weights. The work is done by
plain objects: a sampler (`fast`), `scorer`, `anchor`, `dynamic` and `losses`. `overrides.toml` has
the methods of TRL that are overridden, and the versions they were tested with.
"""

import copy
import json
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as TrlGRPOTrainer
from trl.trainer.utils import pad

from mesotron.answers.facts import Facts, Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import SELF_LABELED, ObjectiveConfig, OptimConfig
from mesotron.optim.clipping import clip_gradients
from mesotron.probes import repetition, trajectory_entropy
from mesotron.rewards.call import is_unfinished
from mesotron.rewards.scorer import Scored, Scorer, bound_rewards, vote
from mesotron.rewards.votes import low_entropy_outliers
from mesotron.rlvr import objectives
from mesotron.rlvr.anchor import (
    Anchor,
    AnchoredSampler,
    TokenRows,
    Voters,
    check_anchorable,
    momentum_at,
    reference_in_memory,
    refuse_flat_shards,
)
from mesotron.rlvr.callbacks import StepEnd
from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.rlvr.dynamic import PromptStream, Resampler
from mesotron.rlvr.fast_paths import FastPaths, choose_fast_paths
from mesotron.rlvr.losses import LossInputs, correction_weight, own_loss, policy_metrics
from mesotron.rlvr.optimizer import (
    build_optimizer,
    check_all_train,
    matrix_rate,
    resolve_optim,
    unwrap_optimizer,
)
from mesotron.rlvr.passes.packing import keep_groups, quick_padding
from mesotron.rlvr.passes.recording import SharedPromptPass
from mesotron.sampling.graphs import GraphSampler, Sampling
from mesotron.tasks.rows import Curriculum, RowBatch, Rows

# Prompts whose tokens are cached: tokenizing 256 chats took 39 ms per step on an H200's host.
MAX_CACHED_PROMPTS = 16_384


# Transformers' `train` has arguments for hyperparameter search, which the mixin passes on by name.
class GRPOTrainer(SafeCheckpoints, TrlGRPOTrainer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """TRL's `GRPOTrainer` with an optimizer and an objective by name.

    Args:
        model: as for TRL: a name or a Transformers model.
        reward_funcs: as for TRL. With a `judge` they also get `facts`, `truncated` and `row` per
            completion. Self-labeled objectives log them and do not train on them.
        args: a `trl.GRPOConfig`; its `num_generations` are the completions that train.
        train_dataset: has a column `prompt`; `gold` is read by the judge.
        optim: muon, pion, normuon, muon_sgd, adamw, or an `OptimConfig`; None: TRL's, as in `args`.
            A name alone takes `args.learning_rate`.
        objective: a name or an `ObjectiveConfig`; None for the loss that `args` names.
        judge: turns completions into facts; self-labeled objectives without one read \\boxed{}.
        fast: sample with CUDA graphs and a fused decoder, and train on shared prompts and recorded
            passes, as far as model and hardware support them; a log line names what is left out.
        average: decay of an average of the weights that replaces them after the last step;
            `averaged` evaluates it before that.
        **rest: anything else that TRL's trainer takes (`processing_class`, `peft_config`, ...).

    Example:
        trainer = GRPOTrainer(model, rewards, args, data, optim="muon", objective="dr_grpo")
        trainer.train()

    References:
        Shao et al., DeepSeekMath, 2024, arXiv 2402.03300.
    """

    anchor: Anchor | None = None
    average: Anchor | None = None
    sampler: GraphSampler | None = None
    shared_prompts: SharedPromptPass | None = None
    resampler: Resampler | None = None
    curriculum: Curriculum | None = None
    scored: Scored  # the last round of sampling, over all processes
    usual_rows: int = 0  # of a whole rollout; see `GraphSampler.sample`
    auxiliary_norm: Tensor | None = None  # of this step's gradients
    silent: bool = False  # no group of this update's rollouts has a signal
    update_start: int = 0  # the number of its first micro-batch; epochs may end inside an update

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        *,
        optim: str | OptimConfig | None = None,
        objective: str | ObjectiveConfig | None = None,
        judge: Judge | None = None,
        fast: bool = False,
        average: float = 0.0,
        **rest: Any,
    ) -> None:
        args = copy.copy(args) if args is not None else GRPOConfig("mesotron-grpo")
        self.objective = objectives.resolve_objective(args, objective)
        self.optim = resolve_optim(args, optim, rest.get("optimizers"))
        self.geometric = objectives.is_geometric(self.objective)
        self.own_loss = own_loss(self.objective.name, self.geometric)
        self.self_labeled = self.objective.name in SELF_LABELED
        self._token_ids: dict[str, Any] = {}  # arrays become tensors faster than lists
        self._prompt_ids: TokenRows = []
        self._voters = Voters()
        self._last_pass: Any = None  # log-probabilities and entropies that TRL's loss computed
        funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        funcs = [func for func in funcs if func is not None]

        if objective is not None:
            objectives.set_loss(args, self.objective)

        if self.self_labeled:  # the votes train, all other rewards are logged
            if args.reward_weights is not None:
                raise ValueError(f"args.reward_weights: {self.objective.name} trains on votes")

            judge = judge or Judge(FORMATS["boxed"], Verifier())
            args.reward_weights = [1.0, *(0.0 for _ in funcs)]
            funcs = [vote, *funcs]

        beta = args.beta
        own = reference_in_memory(model, args, rest.get("peft_config"))
        args.beta = 0.0 if own or self.objective.name == "corewarding" else beta

        super().__init__(
            model,
            funcs,
            args,
            train_dataset,
            **rest,
        )

        args.beta = self.beta = beta
        head = self.model.get_output_embeddings()
        if head is not None and any("lora_" in name for name, _ in head.named_parameters()):
            raise ValueError("TRL's fused head ignores LoRA on lm_head: leave it out")
        if self.objective.dynamic_sampling == "skip" and self.is_deepspeed_enabled:
            raise ValueError("dynamic_sampling='skip' does not work with DeepSpeed: use FSDP2")

        if self.self_labeled:
            self.reward_weights[1:] = 0  # an environment's own reward too

        if isinstance(self.train_dataset, Rows):
            self.data_collator = RowBatch

        micro_batches = (args.steps_per_generation or 1) * args.num_iterations  # TRL fills it in
        updates = -(-micro_batches // args.gradient_accumulation_steps)
        objectives.check_updates(self.objective, updates)
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        self.scorer = Scorer(self.objective, judge, ends)

        if self.use_vllm:
            # vLLM knows the end tokens of the folder it read, not those of the tokenizer in use.
            self.vllm_generation.generation_kwargs.setdefault("stop_token_ids", self.eos_token_ids)

        if own:
            self.ref_model: Any = Anchor(dtype=None).start(self.policy)

        if self.objective.name in objectives.ANCHORED:
            check_anchorable(self, self._group_size())
            self.anchor = self.stateful["anchor"] = Anchor()

            if self.objective.name == "corewarding" and self.beta:
                self.ref_model = self.anchor

        if not 0 <= average < 1:
            raise ValueError(f"average = {average} is not a decay: give one below 1, 0 for none")

        self.average_decay = average
        if average:
            refuse_flat_shards(self, "average")
            self.average = self.stateful["average"] = Anchor()

        if self.objective.dynamic_sampling == "resample":
            self.stream = PromptStream(len(self.train_dataset), args.seed)  # pyright: ignore
            self.stateful["prompts"] = self.stream
            G = self.num_generations
            place = (args.process_index, args.world_size)
            data = copy.copy(self.train_dataset)  # its `latest` is not the data loader's

            self.resampler = Resampler(
                data,
                self.stream,
                self.objective,
                G,
                *place,
            )

            # Further rounds have any number of rows.
            rows = args.per_device_train_batch_size * (args.steps_per_generation or 1)
            oversample = self.objective.dynamic_oversample
            self.usual_rows = objectives.first_round_rows(rows, G, oversample)

        self.fast = choose_fast_paths(self) if fast else FastPaths()
        if self.fast.share_prompts:
            self.shared_prompts = SharedPromptPass(
                self.policy,
                self.accelerator.autocast,
                self.num_generations,
                self.max_completion_length,
                record=self.fast.record,
                entropy_gradient=self._entropy_bonus_enabled,
            )

        self.add_callback(StepEnd(self))

    def use_curriculum(self, curriculum: Curriculum) -> None:
        """Raise the difficulty of the prompts with success; before `train`."""
        self.curriculum = self.stateful["curriculum"] = curriculum

    @property
    def policy(self) -> nn.Module:
        assert self.model is not None
        return self.model

    # The rollout

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        known = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        self.last_step = None
        steps = self.args.steps_per_generation or 1
        number = math.gcd(steps, self.args.gradient_accumulation_steps)  # of one update
        fresh = self._buffered_inputs is not known
        by_part = self.loss_type == "bnpo" or self.objective.cov_share  # means over a micro-batch
        bound = by_part or self._entropy_bonus_enabled or self.top_entropy_quantile < 1
        if bound or not (fresh and number > 1 and self.shared_prompts):
            return inputs

        # TRL shuffled the rows, after which few of a micro-batch share a prompt.
        parts = [self._buffered_inputs[k : k + number] for k in range(0, steps, number)]
        self._buffered_inputs = [batch for part in parts for batch in keep_groups(part)]

        return self._buffered_inputs[self._step % steps]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.policy.training:
            return self._score_round(inputs)

        start = time.perf_counter()
        self._move_anchor()

        if self.resampler is not None:
            done = self.resampler(
                inputs, lambda rows: (self._score_round(rows), self.scored.spreads())
            )
            batch = done.batch
            silent = done.silent
            self._note({"dynamic/rounds": float(done.rounds)})
        else:
            batch = self._score_round(inputs)
            silent = [spread == 0 for spread in self.scored.spreads()]

        self.silent |= self._step == self.update_start
        self.silent &= all(silent) and self.multi_objective_aggregation == "sum_then_normalize"

        if silent and self.objective.dynamic_sampling in ("drop", "resample"):
            self._note({"dynamic/filled": 1 - sum(silent) / len(silent)})
            G = self._group_size()
            batch = self._drop_rows(batch, [out for out in silent for _ in range(G)])

        self._note({"time/rollout": time.perf_counter() - start})
        return batch

    def _score_round(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.curriculum is not None and self.policy.training:
            inputs = self.curriculum.place(inputs)

        with quick_padding():
            batch = super()._generate_and_score_completions(inputs)

        if self.curriculum is not None and self.policy.training:
            self._note({"curriculum/level": float(self.curriculum.level)})
            facts = self.scored.facts
            self.curriculum.update(sum(fact.correct for fact in facts) / max(1, len(facts)))

        if self.scored.dropped:
            batch = self._drop_rows(batch, self.scored.dropped)

        metrics = self.scored.metrics()
        if "importance_sampling_ratio" in batch:
            ratio = batch["importance_sampling_ratio"]  # 1 on padding
            sizes = batch["completion_mask"][:, : ratio.shape[1]].sum(dim=1).clamp(min=1)
            masked = self._gather((ratio == 0).sum(dim=1) / sizes)
            metrics["sampling/masked"] = masked.mean().item()

        self._note(metrics)
        by_group = self.multi_objective_aggregation == "sum_then_normalize"
        if self.scale_rewards == "batch" or not by_group:
            # TRL computed it from the spread of the batch, which says nothing about groups.
            self._metrics[self._mode()]["frac_reward_zero_std"][-1] = metrics["groups/zero_signal"]

        return batch

    def _drop_rows(self, batch: dict[str, Any], dropped: Sequence[bool]) -> dict[str, Any]:
        """Take completions (numbered over all processes) out of every term of the loss."""
        # TRL's `tool_mask` marks the tokens that train. Unlike `completion_mask` it is not part of
        # the attention mask, so the model still reads what it read when the batch was scored.
        mask = loss_mask(batch)
        start = self.accelerator.process_index * len(mask)
        kept = [not out for out in dropped[start : start + len(mask)]]
        mask = mask * mask.new_tensor(kept)[:, None]

        return {
            **batch,
            "tool_mask": mask,
            "num_items_in_batch": self._gather(mask.sum()).sum(),
        }

    # Sampling

    def _tokenize_prompts(self, prompts: list) -> Any:
        if self.fast.sampler is None:
            return super()._tokenize_prompts(prompts)

        # A fast sampler takes text only; each prompt of a run is tokenized once.
        keys: list[str] = []
        for k, prompt in enumerate(prompts):
            repeated = k > 0 and (prompt is prompts[k - 1] or prompt == prompts[k - 1])
            keys.append(keys[-1] if repeated else repr(prompt))

        if len(self._token_ids) > MAX_CACHED_PROMPTS:
            self._token_ids = {}

        new = {key: p for key, p in zip(keys, prompts, strict=True) if key not in self._token_ids}
        if new:
            ids, _, _ = super()._tokenize_prompts(list(new.values()))
            self._token_ids |= dict(zip(new, map(np.array, ids), strict=True))

        return [self._token_ids[key] for key in keys], None, {}

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        self._prompt_ids = prompt_ids
        self._voters = Voters()
        N = self._anchor_generations()
        if N and self.objective.loss_on_momentum:
            return self._anchored().merged(prompt_ids, num_generations, N)

        sampled = self._sample(
            prompt_ids, images, multimodal_fields, num_generations, has_tool_images
        )
        if N:
            prompts = gather_object(prompt_ids)[:: self._group_size()]
            self._voters = self._anchored().voters(prompts, N, even=self.use_vllm)

        return sampled

    def _sample(
        self, prompt_ids: Any, images: Any, fields: Any, generations: int, tool_images: bool = False
    ) -> Any:
        if self.fast.sampler is None:
            return super()._generate_single_turn(
                prompt_ids, images, fields, generations, tool_images
            )

        sampling = Sampling(self.temperature, self.top_k or 0, self.top_p)
        if self.sampler is None or self.sampler.sampling != sampling:  # a guard may change it
            args = self.args
            self.sampler = self.fast.sampler(
                self.policy,
                eos=self.eos_token_ids,
                pad=self._tokenizer.pad_token_id,
                dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
                sampling=sampling,
            )

        return self.sampler.sample(prompt_ids, self.max_completion_length, self.usual_rows), None

    def _anchor_generations(self) -> int:  # N in this mode
        samples = self.anchor is not None and self.policy.training
        return (self.objective.momentum_generations or 0) if samples else 0

    def _anchored(self) -> AnchoredSampler:
        def sample(rows: TokenRows, number: int) -> Any:
            return self._sample(rows, None, {}, number)

        def synced() -> None:
            self._last_loaded_step = -1  # vLLM then loads the weights again

        assert self.anchor is not None
        rank = self.args.process_index
        world = self.args.world_size

        return AnchoredSampler(
            self.anchor,
            self.policy,
            sample,
            synced,
            rank,
            world,
        )

    # Scoring

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rows, facts = self.scorer.annotate(inputs, completions, completion_ids_list)
        rewards = super()._calculate_rewards(rows, prompts, completions, completion_ids_list)
        rewards = bound_rewards(rewards)
        facts = gather_object(facts)

        dropped = []
        if self.self_labeled:
            golds = gather_object([row.get("gold") for row in inputs])
            dropped = self._fill_votes(rewards, facts, golds, completion_ids_list)

        # The total as TRL will compute it.
        total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = torch.nan
        self.scored = Scored(
            rewards=total.view(-1, self._group_size()),
            facts=facts if self.scorer.judge is None or self.scorer.judge.reads else (),
            tolerance=self.objective.dynamic_tolerance,
            dropped=dropped,
        )

        own = repetition(completion_ids_list)["completions/repetition"]
        mean = self._gather(torch.tensor([own], device=rewards.device)).mean().item()
        self._note({"completions/repetition": mean})

        if self.tools:
            turns = [sum(m.get("role") == "assistant" for m in one) for one in completions]
            ends = [is_unfinished(one) for one in completions]
            x = torch.tensor([turns, ends], device=rewards.device, dtype=torch.float32)
            mean_turns, unfinished = self._gather(x.T.contiguous()).mean(dim=0).tolist()
            self._note({"tools/turns": mean_turns, "tools/unfinished": unfinished})

        return rewards

    def _fill_votes(
        self, rewards: Tensor, facts: list[Facts], golds: list[str | None], completion_ids: Any
    ) -> list[bool]:
        """Write the votes to the first column; dropped completions, returned, get no reward."""
        N = self._anchor_generations()
        G = self._group_size()
        ids = self._voters.completion_ids
        voters = []

        count = 0
        if ids:
            count = N * len(facts) // G
            texts = self.processing_class.batch_decode(ids, skip_special_tokens=True)  # pyright: ignore
            judged = self.scorer.judge.judge(texts, [None] * len(ids), self.scorer.truncated(ids))  # pyright: ignore
            voters = gather_object(judged)[:count]

        dropped = self._entropy_outliers(completion_ids, count)
        merged = N if self.objective.loss_on_momentum else 0
        seed = (self.args.seed, self._step)

        votes, metrics = self.scorer.vote(
            facts,
            golds,
            G,
            voters,
            dropped,
            merged,
            seed,
        )

        self._note(metrics)
        rewards[:, 0] = rewards.new_tensor([torch.nan if x is None else x for x in votes])
        rewards[rewards[:, 0].isnan()] = torch.nan

        return dropped[0]

    def _entropy_outliers(self, completion_ids: Any, count: int) -> tuple[list[bool], list[bool]]:
        k = self.objective.entropy_filter
        if self.objective.name != "mgrpo" or k == "off" or not self.policy.training:
            return [], []

        own = list(completion_ids)
        voters = self._voters
        H = self._trajectory_entropies(
            self._prompt_ids + voters.prompt_ids, own + voters.completion_ids
        )
        G = self._group_size()
        policy = self._gather(H[: len(own)])

        anchor = H[:0]
        if voters.completion_ids:
            anchor = self._gather(H[len(own) :])[:count]

        groups = len(policy) // G
        table = torch.cat([policy.view(groups, G), anchor.view(groups, -1)], dim=1)
        out = low_entropy_outliers(table, k)
        self._note({"anchor/dropped": out.float().mean().item()})

        return out[:, :G].flatten().tolist(), out[:, G:].flatten().tolist()

    def _trajectory_entropies(self, prompt_ids: TokenRows, completion_ids: TokenRows) -> Tensor:
        device = self.accelerator.device
        padding = self._tokenizer.pad_token_id

        def padded(rows: TokenRows, side: str) -> tuple[Tensor, Tensor]:
            ids = [torch.tensor(row) for row in rows]
            masks = [torch.ones_like(row) for row in ids]
            return pad(ids, padding, side).to(device), pad(masks, 0, side).to(device)

        prompts = padded(prompt_ids, "left")
        completions = padded(completion_ids, "right")
        ids, mask = (torch.cat(pair, dim=1) for pair in zip(prompts, completions, strict=True))

        off = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), off:
            T = completions[0].shape[1]
            size = self.args.per_device_train_batch_size
            passed = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                mask,
                T,
                size,
                True,
            )

        self._last_pass = None
        return trajectory_entropy(passed[1], completions[1])  # pyright: ignore

    # The loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        coef = self.entropy_coef
        entropy = self._last_world_entropy
        compute = super()._compute_loss if self.own_loss is None else self._with_own_loss
        loss = compute(model, inputs)
        logprobs, entropies = self._last_pass
        old = inputs.get("old_per_token_logps")
        log_ratio = None if old is None else logprobs.detach() - old
        metrics = policy_metrics(entropies.detach(), log_ratio, loss_mask(inputs), self._gather)
        self._note(metrics)

        if not metrics:  # TRL logs 0 for a mean over no tokens; NaN is left out of its averages
            logged = self._metrics[self._mode()]
            for name in logged:
                if name in ("entropy", "kl") or "clip_ratio" in name:
                    logged[name][-1] = torch.nan

        if self._last_world_entropy == 0 and entropy != 0:
            # No token trained in this step, which TRL took for a policy without entropy.
            self.entropy_coef = coef
            self._last_world_entropy = entropy
            self._metrics["train"]["entropy_coef"][-1] = coef

        self._last_pass = None  # it holds the graph
        return loss

    def _with_own_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # TRL's loss with zero advantages is every term but the policy's.
        others = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
        if not (self.beta and self.args.use_bias_correction_kl):  # else the KL term needs the ratio
            others.pop("old_per_token_logps", None)

        loss = super()._compute_loss(model, others)
        assert self.own_loss is not None

        policy = self.own_loss(self._loss_inputs(inputs), self._gather)
        logged = self._metrics[self._mode()]
        for name, value in policy.metrics.items():
            if name.startswith("clip_ratio/"):
                logged[name][-1] = value
            elif name != "policy_loss":
                self._note({name: value})
            elif self._entropy_bonus_enabled:  # TRL's has the KL term
                logged[name][-1] += value

        steps = self.current_gradient_accumulation_steps if self.policy.training else 1
        return loss + policy.loss / steps

    def _loss_inputs(self, inputs: dict[str, Any]) -> LossInputs:
        (logprobs, entropies), mask = self._last_pass, loss_mask(inputs)
        old = inputs.get("old_per_token_logps")
        old = logprobs.detach() if old is None else old

        token_mask = weight = token_weight = None
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

        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        if corrects and not self.geometric:
            token_weight = inputs["importance_sampling_ratio"]
        elif corrects:
            correction, kept = correction_weight(inputs["importance_sampling_ratio"], mask)
            weight = correction if weight is None else weight * correction
            token_mask = kept if token_mask is None else token_mask & kept

        # As for dapo: the tokens of the rollout, divided over processes and micro-batches.
        passes = (self.args.steps_per_generation or 1) if self.policy.training else 1
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
            token_weight=token_weight,
            num_tokens=inputs["num_items_in_batch"].clamp(min=1) / self.args.world_size / passes,
            cov_share=self.objective.cov_share or 0.0,
        )

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        batch_size: Any = None,
        compute_entropy: Any = False,
        **rest: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if isinstance(model, Anchor):  # as the reference
            trains = self.policy.training
            with model.in_place_of(self.policy):
                self.policy.eval()  # without dropout, as TRL's
                passed = self._get_per_token_logps_and_entropies(
                    self.policy, input_ids, attention_mask, logits_to_keep, batch_size, **rest
                )
                self.policy.train(trains)

            return passed

        rest["compute_entropy"] = compute_entropy
        if self.shared_prompts is None:
            logprobs, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **rest
            )
        else:
            parts = []
            size = batch_size or len(input_ids)
            aux_loss = None

            for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
                part = self.shared_prompts(
                    model, ids, mask, logits_to_keep, self.temperature, compute_entropy
                )
                if part is None:
                    part = super()._get_per_token_logps_and_entropies(
                        model, ids, mask, logits_to_keep, **rest
                    )

                parts.append(part)

            logprobs = torch.cat([part[0] for part in parts])
            entropies = torch.cat([part[1] for part in parts]) if compute_entropy else None

        if entropies is not None:
            self._last_pass = logprobs, entropies

        return logprobs, entropies, aux_loss

    # The anchor, and averaged weights

    def _move_anchor(self) -> None:
        if self.anchor is None:
            return

        follow = bool(self.anchor.weights) and self.objective.momentum_update == "rollout"
        self.anchor.start(self.policy)

        if follow:
            self.update_anchor()

        moved = self.anchor.moved
        if self.is_fsdp_enabled:
            moved = self.accelerator.reduce(moved.to(self.accelerator.device), reduction="sum")

        away, size = moved.tolist()  # pyright: ignore
        self._note({"anchor/distance": (away / size) ** 0.5 if size else 0.0})

    def update_anchor(self) -> None:
        assert self.anchor is not None
        progress = self.state.global_step / max(self.state.max_steps, 1)
        schedule = self.objective.momentum_schedule or "constant"
        self.anchor.update(self.policy, momentum_at(progress, self.objective.momentum, schedule))

    def averaged(self) -> AbstractContextManager[None]:
        """The averaged weights, if there are any, in place of the policy's: to evaluate them."""
        average = self.average
        return average.in_place_of(self.policy) if average and average.updates else nullcontext()

    def end_with_average(self) -> None:
        if self.average and self.average.updates and self.state.global_step >= self.state.max_steps:
            self.average.write(self.policy, self.average.weights)

    def restore_policy(self, checkpoint: Path) -> None:
        super().restore_policy(checkpoint)
        self.end_with_average()

    # The optimizer

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()

        # Accelerate's mixed precision rounds a sharded model's outputs to bfloat16, and TRL's
        # log-probabilities with them, by about 0.01; with one process it does not.
        plugin = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin is not None and plugin.mixed_precision_policy is not None:
            policy = replace(plugin.mixed_precision_policy, output_dtype=None)
            plugin.mixed_precision_policy = policy

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        wrapped = self.policy if model is None else model
        if self.optimizer is None and self.optim is not None:
            self.optimizer = build_optimizer(wrapped, self.optim)

        optimizer = super().create_optimizer(model)
        check_all_train(wrapped, optimizer)

        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        optimizer = unwrap_optimizer(self.optimizer)
        matrices = self.optim is not None and self.optim.clip == "all"
        if matrices and self.is_deepspeed_enabled:
            raise ValueError("--optim.clip all does not work with DeepSpeed: use FSDP2")
        if optimizer is None or self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)

        self.accelerator.unscale_gradients()
        norms = clip_gradients(optimizer, self.args.max_grad_norm, matrices)
        self.auxiliary_norm = norms.auxiliary  # read at the end of the step: reading it now waits

        return norms.total

    # Metrics and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        optimizer = unwrap_optimizer(self.optimizer)
        if optimizer is not None and "loss" in logs:
            self._note({f"optim/{name}": x for name, x in optimizer.stats().items()})
        super().log(logs, start_time)

    def _get_learning_rate(self) -> float:
        return matrix_rate(self.optimizer, super()._get_learning_rate())

    def _note(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[self._mode()][name].append(value)

    def _mode(self) -> str:
        return "train" if self.policy.training else "eval"

    def _group_size(self) -> int:
        return self.num_generations if self.policy.training else self.num_generations_eval  # pyright: ignore

    def _gather(self, x: Tensor) -> Tensor:
        return self.accelerator.gather(x)  # pyright: ignore

    def own_state(self) -> dict[str, Any]:
        every = (self.args.steps_per_generation or 1) * self.num_iterations
        used_up = self._step % every == 0  # then the next step samples again

        state: dict[str, Any] = {
            "step": self._step,
            "buffer": None if used_up else self._buffered_inputs,
            "silent": self.silent,
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
        }
        if self.use_adaptive_entropy:
            state["entropy"] = [self.entropy_coef, self._last_world_entropy]

        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._buffered_inputs = send_to_device(state["buffer"], self.accelerator.device)
        self.silent = state.get("silent", False)

        for name, values in state["metrics"].items():
            self._metrics["train"][name].extend(values)

        if self.use_adaptive_entropy:
            self.entropy_coef, self._last_world_entropy = state["entropy"]

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler after as many shuffles as the resumed run has started epochs."""
        sampler = super()._get_train_sampler(dataset)
        if self.shuffle_dataset and self.resumed_from is not None:
            state = json.loads((self.resumed_from / "trainer_state.json").read_text())
            for _ in range(int(state["epoch"])):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

        return sampler


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """[B, T], 1 on tokens that the policy wrote and that train."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
