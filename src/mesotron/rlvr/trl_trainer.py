"""`GRPOTrainer`: TRL's, with routed optimizers, more objectives, and exact checkpoints.

This file knows TRL's private methods and hands over to `grpo`, where the step is to be read:

    _generate_and_score_completions   sample, score, advantages: a `grpo.Batch` for TRL's buffer
    _compute_loss                     the loss of one micro-batch of that buffer
    _clip_grad_norm                   gradients of the routed optimizer

TRL keeps the loop, the data loader, the buffer, and what `TRL_PLAYS` names. With `optim`,
`objective`, `judge` and `fast` left out the weights are those of TRL's trainer to the last bit,
except that FSDP2 with bfloat16 keeps its log-probabilities in float32. `tests/rlvr/test_overrides`
compares every method that is used here with the supported versions of TRL.
"""

import copy
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model, send_to_device
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer as TrlGRPOTrainer
from trl.trainer.utils import add_fused_lm_head, use_adapter

from mesotron.answers.facts import Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import ObjectiveConfig, OptimConfig
from mesotron.optim.clipping import clip_gradients
from mesotron.probes import trajectory_entropy
from mesotron.rewards.votes import VoteRules, vote
from mesotron.rlvr import grpo, objectives
from mesotron.rlvr.ahead import (
    SAVING_WAITS,
    Ahead,
    RolloutAhead,
    SampleAhead,
    copy_policy,
    plain_or_none,
    rollout_of,
    take_weights,
)
from mesotron.rlvr.anchor import (
    Anchor,
    AnchoredSampler,
    check_anchorable,
    momentum_at,
    reference_in_memory,
    refuse_flat_shards,
)
from mesotron.rlvr.callbacks import (
    EndAhead,
    KeepLastStep,
    LogAuxiliaryNorm,
    MoveAverages,
    SkipSilentBatch,
    StepTimer,
    TokenizeAhead,
)
from mesotron.rlvr.checkpoint import SafeCheckpoints
from mesotron.rlvr.dynamic import PromptStream, Resampler
from mesotron.rlvr.entropy_bonus import EntropyBonus
from mesotron.rlvr.fast_paths import FastPaths, PromptTokens, choose_fast_paths
from mesotron.rlvr.grpo import Batch, Rollout, Scored, Sequences
from mesotron.rlvr.optimizer import (
    build_optimizer,
    check_all_train,
    matrix_rate,
    resolve_optim,
    unwrap_optimizer,
)
from mesotron.rlvr.passes.blocks import RaggedPass
from mesotron.rlvr.passes.packing import keep_groups
from mesotron.rlvr.passes.recording import SharedPromptPass
from mesotron.rlvr.passes.truncated import TruncatedPass
from mesotron.rlvr.trl_arguments import (
    check_updates,
    first_round_rows,
    resolve_objective,
    set_loss,
)
from mesotron.runs.best import AVERAGED
from mesotron.runs.files import read_json
from mesotron.sampling.graphs import GraphSampler, Sampling
from mesotron.sampling.turns import TokenLists, TurnEpisode, TurnSampler, Written, episode_metrics
from mesotron.tasks.prompts import rendering
from mesotron.tasks.rows import Curriculum, RowBatch, Rows

TRL_PLAYS = "tools, environments, images and a rollout_func"

# Fields of `grpo.Batch` under TRL's names, which its buffer and checkpoints have. TRL's `tool_mask`
# marks the tokens that train; unlike `completion_mask` it is not part of the attention mask.
TRL_NAMES = {
    "prompt_ids": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "completion_ids": "completion_ids",
    "completion_mask": "completion_mask",
    "sampler_logprobs": "sampling_per_token_logps",
    "loss_mask": "tool_mask",
    "advantages": "advantages",
    "num_tokens": "num_items_in_batch",
    "old_logprobs": "old_per_token_logps",
    "reference_logprobs": "ref_per_token_logps",
    "sampler_ratio": "importance_sampling_ratio",
    "kept_tokens": "kept_tokens",
}


def to_trl(batch: Batch) -> dict[str, Any]:
    """A batch as TRL shuffles, splits and buffers it."""
    named = {theirs: getattr(batch, ours) for ours, theirs in TRL_NAMES.items()}
    return {name: value for name, value in named.items() if value is not None} | dict(batch.images)


def from_trl(inputs: dict[str, Any]) -> Batch:
    named: dict[str, Any] = {ours: inputs.get(theirs) for ours, theirs in TRL_NAMES.items()}
    mask = inputs["completion_mask"]
    named["loss_mask"] = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    images = {}
    for name, x in inputs.items():
        if name not in TRL_NAMES.values():
            images[name] = x

    return Batch(**named, images=images)


def all_processes(accelerator: Any) -> grpo.Processes:
    """The processes of an accelerator."""

    def gather_ragged(x: Tensor) -> Tensor:
        padded = accelerator.pad_across_processes(x, dim=0, pad_index=torch.nan)
        gathered = accelerator.gather(padded)
        return gathered[~gathered.isnan()]

    return grpo.Processes(
        rank=accelerator.process_index,
        size=accelerator.num_processes,
        gather=accelerator.gather,
        gather_ragged=gather_ragged,
        gather_objects=gather_object,
    )


@dataclass(frozen=True)
class Sample:
    """A completion of the latest rollout, as TRL's table has it."""

    prompt: Any  # a text or a chat
    completion: Any  # a text or messages
    reward: float  # the weighted sum of what reward functions gave
    advantage: float


class RowPrompt(str):
    """A prompt that carries its row through TRL, which hands prompts alone to a `rollout_func`."""

    row: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowPrompt":
        return self


class Episodes(list):
    """Rows whose episodes TRL plays; it hands them to `_calculate_rewards`, which scores them."""

    scored: Scored


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
        max_staleness: 1 samples and scores the next rollout while a step trains, from weights that
            are one rollout old; needs `fast`. 0: from the weights of now.
        turns: plays rows that belong to environments (`--env`).
        average: decay of an average of the weights that replaces them after the last step;
            `averaged` evaluates it before that.
        **rest: anything else that TRL's trainer takes (`processing_class`, `peft_config`, ...).

    Example:
        trainer = GRPOTrainer(model, rewards, args, data, optim="muon", objective="dr_grpo")
        trainer.train()

    References:
        Shao et al., DeepSeekMath, 2024, arXiv 2402.03300.
    """

    sampler: GraphSampler | None = None
    behind: "GRPOTrainer | None" = None  # this trainer over a copy of its weights, to sample ahead
    own_draws: torch.Generator | None = None  # in place of torch's, where another thread samples
    curriculum: Curriculum | None = None

    def __init__(  # noqa: PLR0913  # TRL's arguments, and ours by name
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
        max_staleness: int = 0,
        turns: TurnSampler | None = None,
        **rest: Any,
    ) -> None:
        if args is not None:
            args = copy.copy(args)
        else:
            args = GRPOConfig("mesotron-grpo")

        self.objective = resolve_objective(args, objective)
        self.kind = objectives.get(self.objective.name)
        self.self_labeled = self.kind.is_self_labeled
        self.optim = resolve_optim(args, optim, rest.get("optimizers"))
        if objective is not None:
            set_loss(args, self.objective)

        if self.self_labeled and judge is None:
            judge = Judge(FORMATS["boxed"], Verifier())

        funcs = self._with_votes(reward_funcs, args)
        beta = args.beta
        in_memory = reference_in_memory(model, args, rest.get("peft_config"))
        if in_memory or self.kind.anchor_labels:  # then TRL need not load one
            args.beta = 0.0

        super().__init__(model, funcs, args, train_dataset, **rest)

        args.beta = beta
        self.beta = beta
        self._check_model()
        if self.self_labeled:
            self.reward_weights[1:] = 0  # an environment's own reward too

        self.turns = turns
        if turns is not None:
            self.rollout_func = self._play_environments

        self.world = all_processes(self.accelerator)
        self.loss_objective = self._choose_loss(args, objective)
        self.bonus = EntropyBonus.of(args)
        self.judge = judge
        self.end_ids = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        self.prompt_tokens = PromptTokens(self._render)
        self.vote_rules = self._make_vote_rules()
        self.entropy_filter = self._make_entropy_filter()
        self._prepare_sampling()

        if in_memory:
            self.ref_model: Any = Anchor(dtype=None).start(self.policy)

        self.anchor = self._make_anchor()
        self.average_decay = average
        self.average = self._make_average(average)
        self.usual_rows = self._first_round_rows(args)
        self.resampler = self._make_resampler(args)
        self.fast = choose_fast_paths(self) if fast else FastPaths()
        self.shared_prompts = self._make_shared_prompts()
        self.truncated = self._make_truncated_pass()
        self.ahead = self._make_ahead(max_staleness)
        self._add_callbacks()

    # Builders, each called once

    @property
    def policy(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def _with_votes(self, reward_funcs: Any, args: GRPOConfig) -> list[Any]:
        """Reward functions; with self-labels the votes train, and all others are logged."""

        if isinstance(reward_funcs, list | tuple):
            funcs = list(reward_funcs)
        else:
            funcs = [reward_funcs]

        funcs = [func for func in funcs if func is not None]
        if not self.self_labeled:
            return funcs

        if args.reward_weights is not None:
            raise ValueError(f"args.reward_weights: {self.objective.name} trains on votes")

        args.reward_weights = [1.0, *(0.0 for _ in funcs)]
        return [vote, *funcs]

    def _check_model(self) -> None:
        head = self.model.get_output_embeddings()
        if head is not None and any("lora_" in name for name, _ in head.named_parameters()):
            raise ValueError("TRL's fused head ignores LoRA on lm_head: leave it out")
        if self.objective.dynamic_sampling == "skip" and self.is_deepspeed_enabled:
            raise ValueError("dynamic_sampling='skip' does not work with DeepSpeed: use FSDP2")

    def _choose_loss(self, args: GRPOConfig, objective: Any) -> objectives.Objective:
        """The loss that trains: the objective's, or without one that of `args`."""
        if objective is None:
            return objectives.get(args.loss_type)

        micro_batches = (args.steps_per_generation or 1) * args.num_iterations  # TRL fills it in
        check_updates(self.objective, -(-micro_batches // args.gradient_accumulation_steps))

        return objectives.get_loss(self.objective)

    def _make_vote_rules(self) -> VoteRules | None:
        if not self.self_labeled:
            return None

        return VoteRules(
            tie=self.objective.tie,
            min_share=self.objective.min_vote_share,
            anchor_alone=self.kind.anchor_labels,
        )

    def _make_entropy_filter(self) -> grpo.EntropyFilter | None:
        k = self.objective.entropy_filter
        if k == "off" or not self.kind.shares_group:
            return None

        return grpo.EntropyFilter(k=k, entropies=self._trajectory_entropies)

    def _prepare_sampling(self) -> None:
        if isinstance(self.train_dataset, Rows):
            self.data_collator = RowBatch

        if self.use_vllm:
            # vLLM knows the end tokens of the folder it read, not those of the tokenizer in use.
            self.vllm_generation.generation_kwargs.setdefault("stop_token_ids", self.eos_token_ids)

    def _make_anchor(self) -> Anchor | None:
        if not self.kind.is_anchored:
            return None

        check_anchorable(self, self._group_size())
        anchor = self.stateful["anchor"] = Anchor()
        if self.kind.anchor_labels and self.beta:
            self.ref_model = anchor

        return anchor

    def _make_average(self, decay: float) -> Anchor | None:
        if not 0 <= decay < 1:
            raise ValueError(f"average = {decay} is not a decay: give one below 1, 0 for none")
        if not decay:
            return None

        refuse_flat_shards(self, "average")
        average = self.stateful["average"] = Anchor()

        return average

    def _first_round_rows(self, args: GRPOConfig) -> int:
        """Rows of a first round, for graphs of that size; 0 where every round has as many."""
        if self.objective.dynamic_sampling != "resample":
            return 0

        rows = args.per_device_train_batch_size * (args.steps_per_generation or 1)
        return first_round_rows(rows, self.num_generations, self.objective.dynamic_oversample)

    def _make_resampler(self, args: GRPOConfig) -> Resampler | None:
        """Samples further prompts for groups without a signal."""
        if self.objective.dynamic_sampling != "resample":
            return None

        stream = PromptStream(len(self.train_dataset), args.seed)  # pyright: ignore
        self.stateful["prompts"] = stream

        return Resampler(
            copy.copy(self.train_dataset),  # its `latest` is not the data loader's
            stream,
            self.objective,
            self.num_generations,
            args.process_index,
            args.world_size,
        )

    def _make_shared_prompts(self) -> SharedPromptPass | None:
        if not self.fast.share_prompts:
            return None

        autocast = self.accelerator.autocast
        entropy = self.bonus is not None

        return SharedPromptPass(
            self.policy,
            autocast,
            self.num_generations,
            self.max_completion_length,
            record=self.fast.record,
            entropy_gradient=entropy,
            ragged=RaggedPass(autocast, entropy) if self.fast.ragged else None,
        )

    def _make_truncated_pass(self) -> TruncatedPass | None:
        """For the ratio of what top-k and top-p left."""
        if not self.objective.sampling_mask:
            return None

        truncates = self.top_p < 1 or self.top_k
        obstacles = {
            "needs top_p below 1 or top_k": not truncates,
            "does not know min_p or a repetition penalty": self.min_p or self._penalizes(),
            "needs beta 0: the reference keeps other tokens": self.beta,
            f"does not work with {TRL_PLAYS}": self._trl_plays(),
            "does not know the replies of environments": self.turns is not None,
            "does not work with vLLM": self.use_vllm,
            "does not work with a router loss": self.aux_loss_enabled,
        }
        for why, holds in obstacles.items():
            if holds:
                raise ValueError(f"objective.sampling_mask {why}")

        return TruncatedPass(self.accelerator.autocast, entropy_gradient=self.bonus is not None)

    def _make_ahead(self, max_staleness: int) -> Ahead | None:
        if max_staleness == 0:
            return None

        obstacles = {
            "is 0 or 1": max_staleness != 1,
            "does not work with vLLM: TRL has AsyncGRPOTrainer for it": self.use_vllm,
            f"does not work with {TRL_PLAYS}": self._trl_plays(),
            f"does not work with {self.objective.name}, whose anchor samples": self.anchor,
            "does not work with dynamic_sampling='resample'": self.resampler,
            "does not work with objective.sampling_mask": self.truncated,
            "does not work with several processes": self.accelerator.num_processes > 1,
            "needs the fast sampler, which this run lacks": self.fast.sampler is None,
        }
        for why, holds in obstacles.items():
            if holds:
                raise ValueError(f"max_staleness = {max_staleness} {why}")

        return Ahead(self._prepare_ahead, self.accelerator.device)

    def _penalizes(self) -> bool:
        return self.repetition_penalty != 1.0

    def _add_callbacks(self) -> None:
        self.timer = StepTimer(self.note)
        self.silence = SkipSilentBatch(self)
        self.auxiliary_norm = LogAuxiliaryNorm(self.note)

        if self.ahead is not None:
            self.add_callback(EndAhead(self.ahead))

        self.add_callback(KeepLastStep(self))
        self.add_callback(self.silence)
        self.add_callback(TokenizeAhead(self))
        self.add_callback(self.auxiliary_norm)
        self.add_callback(MoveAverages(self))
        self.add_callback(self.timer)

    def use_curriculum(self, curriculum: Curriculum) -> None:
        """Raise the difficulty of the prompts with success; before `train`."""
        self.curriculum = self.stateful["curriculum"] = curriculum

    # The rollout

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self.policy.training:
            return to_trl(self._round(inputs)[0])

        start = time.perf_counter()
        self._move_anchor()

        if self.resampler is None:
            batch, spreads = self._round(inputs)
            silent = [spread == 0 for spread in spreads]
        else:
            done = self.resampler(inputs, self._round)
            batch = done.batch
            silent = done.silent
            self.note({"dynamic/rounds": float(done.rounds)})

        by_group = self.multi_objective_aggregation == "sum_then_normalize"
        self.silence.observe(all(silent) and by_group)

        if silent and self.objective.dynamic_sampling in ("drop", "resample"):
            self.note({"dynamic/filled": 1 - sum(silent) / len(silent)})
            dropped = np.repeat(silent, self._group_size()).tolist()
            batch = grpo.without_rows(batch, dropped, self.world)

        self.note({"time/rollout": time.perf_counter() - start})
        return to_trl(batch)

    def _round(self, inputs: Any) -> tuple[Batch, list[float]]:
        """One round of sampling and scoring: the batch, and the spread of each group's rewards."""
        trains = self.policy.training
        if self.ahead is not None and not trains:
            self.ahead.settle()

        rows = list(inputs)
        if self.curriculum is not None and trains:
            rows = self.curriculum.place(rows)

        batch, scored = self._play(rows) if self._trl_plays() else self._sample_and_score(rows)

        if self.curriculum is not None and trains:
            self.note({"curriculum/level": float(self.curriculum.level)})
            correct = [fact.correct for fact in scored.facts]
            self.curriculum.update(sum(correct) / max(1, len(correct)))

        signal = scored.group_metrics()
        self.note(scored.metrics | signal | grpo.masked_metrics(batch, self.world))

        by_group = self.multi_objective_aggregation == "sum_then_normalize"
        if self.scale_rewards == "batch" or not by_group:
            # TRL computes it from the spread of the batch, which says nothing about groups.
            self._logged()["frac_reward_zero_std"][-1] = signal["groups/zero_signal"]

        return batch, scored.spreads()

    def _trl_plays(self) -> bool:
        """Whether TRL runs its own step, for what `TRL_PLAYS` names: it alone prepares these."""
        plays = self.tools or self.environment_factories is not None
        has_own_rollout = self.rollout_func is not None and self.turns is None
        return bool(plays or self.reads_images or has_own_rollout)

    @property
    def reads_images(self) -> bool:
        return self._is_vlm

    def _play(self, rows: list[dict[str, Any]]) -> tuple[Batch, Scored]:
        episodes = Episodes(rows)
        batch = from_trl(super()._generate_and_score_completions(episodes))
        return batch, episodes.scored

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        """Called by TRL's own step."""
        rollout = Rollout(
            prompts=prompts,
            completions=completions,
            prompt_tokens=(),
            completion_tokens=completion_ids_list,
        )
        scored = self._score(rollout, inputs)
        inputs.scored = scored

        assert scored.by_function is not None
        return scored.by_function

    def _sample_and_score(self, rows: list[dict[str, Any]]) -> tuple[Batch, Scored]:
        ready = self._sampled_ahead(rows)
        if self.turns is not None:
            rollout, rows = self._rollout_in_turns(rows)
        elif ready is not None:
            rollout = ready.rollout
        else:
            rollout = self._rollout(rows)

        sequences = self._pad(rollout)

        old, reference = self._before_update(sequences)
        kept = None
        if self.truncated is not None:
            size = self._pass_size()
            old, kept = self.truncated.begin(self.model, sequences, self._sampling(), size)

        ratio = self._sampler_ratio(old, sequences)

        scored = self._score(rollout, rows) if ready is None else ready.scored
        advantages = grpo.compute_advantages(scored, self._scaling())
        batch = grpo.make_batch(sequences, scored, advantages, old, reference, ratio, self.world)
        batch = replace(batch, kept_tokens=kept)

        names = self.reward_func_names
        self.note(grpo.reward_metrics(scored, advantages, names))
        if ratio is not None:
            assert old is not None
            self.note(grpo.sampler_metrics(batch, ratio, old, self.world))

        self._log_completions(rollout, scored, advantages)

        return batch, scored

    # A rollout ahead

    def _sampled_ahead(self, rows: list[dict[str, Any]]) -> RolloutAhead | None:
        """The rollout that another thread has sampled, with what it logged."""
        if self.ahead is None or not self.policy.training:
            return None

        every = (self.args.steps_per_generation or 1) * self.num_iterations
        last = self.state.max_steps * self.args.gradient_accumulation_steps
        ready = self.ahead.next(rows, goes_on=self._step + every < last)

        for name, values in ready.metrics.items():
            self._metrics["train"][name].extend(values)
        for name, values in ready.columns.items():
            self._pending_extra_logs[name].extend(values)

        self.state.num_input_tokens_seen += ready.tokens
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        self.note({"sample/staleness_mean": float(self.state.global_step - ready.step)})

        return ready

    def _prepare_ahead(self, rows: list[dict[str, Any]]) -> SampleAhead:
        """Takes over the weights and settings of now; what is returned runs in another thread."""
        before = self.behind
        behind = self.behind = copy.copy(self)
        if before is None:
            behind.model = self._copy_with_head()
            behind.sampler = None
        else:
            behind.model = before.model
            behind.sampler = before.sampler
            take_weights(before.policy, self.policy)

        if self.shared_prompts is not None:
            behind.shared_prompts = replace(
                self.shared_prompts, model=behind.model, record=False, recorder=None
            )

        behind.state = copy.copy(self.state)
        behind._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        behind._pending_extra_logs = defaultdict(list)
        behind._pending_metrics = defaultdict(list)

        assert self.fast.sampler is not None
        behind._current_sampler(self.fast.sampler)
        seed = random.Random(f"{self.args.seed} {self._step}").getrandbits(63)
        behind.own_draws = torch.Generator().manual_seed(seed)

        return partial(behind._sample_behind, rows)

    def _copy_with_head(self) -> Any:
        copied = copy_policy(self.policy)
        add_fused_lm_head(
            copied.get_base_model() if is_peft_model(copied) else copied,
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
        )
        return copied

    def _sample_behind(
        self, rows: list[dict[str, Any]], has_sampled: Callable[[], None]
    ) -> RolloutAhead:
        """Runs in another thread, on the trainer that `_prepare_ahead` made for it."""
        before = self.state.num_input_tokens_seen
        rollout = self._rollout(rows)
        rollout = replace(rollout, sampler_logprobs=self._logprobs_behind(rollout))
        has_sampled()
        scored = self._score(rollout, rows)

        for name, values in self._pending_metrics.items():
            self._metrics["train"][name].append(sum(values) / len(values))

        metrics = dict(self._metrics["train"])
        metrics.pop("num_tokens", None)
        on_host = {"rewards": scored.rewards.cpu()}
        if scored.by_function is not None:
            on_host["by_function"] = scored.by_function.cpu()

        return RolloutAhead(
            rows=rows,
            rollout=rollout,
            scored=replace(scored, **on_host),
            metrics=metrics,
            columns=dict(self._pending_extra_logs),
            step=self.state.global_step,
            micro_batches=self._step,
            tokens=self.state.num_input_tokens_seen - before,
        )

    def _logprobs_behind(self, rollout: Rollout) -> list[list[float]]:
        padding = grpo.Padding(self._tokenizer.pad_token_id, self.accelerator.device)  # pyright: ignore
        sequences = grpo.pad(rollout, padding)
        size = self._pass_size()

        self.policy.eval()
        passed = self._get_per_token_logps_and_entropies(
            self.model, sequences.ids, sequences.mask, sequences.length, size
        )
        self.policy.train()

        logprobs = []
        for row, tokens in zip(passed[0].tolist(), rollout.completion_tokens, strict=True):
            logprobs.append(row[: len(tokens)])

        return logprobs

    def _sampled_before(self, plain: dict[str, Any]) -> RolloutAhead:
        """The rollout ahead of a checkpoint."""
        rollout = rollout_of(plain)
        rewards = plain["rewards"]
        known = replace(
            self._scoring(),
            call=lambda *_: rewards,
            weights=self.reward_weights.to(rewards.device),
            seed=(self.args.seed, plain["micro_batches"]),
        )
        return RolloutAhead(
            rows=plain["rows"],
            rollout=rollout,
            scored=grpo.score(rollout, plain["rows"], known),
            metrics=plain["metrics"],
            columns=plain["columns"],
            step=plain["step"],
            micro_batches=plain["micro_batches"],
            tokens=plain["tokens"],
        )

    def _rollout(self, rows: list[dict[str, Any]]) -> Rollout:
        prompts = [row["prompt"] for row in rows]
        prompt_tokens, tokens, _, completions, logprobs, *_ = self._generate(prompts)

        rollout = Rollout(
            prompts=prompts,
            completions=completions,
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            sampler_logprobs=logprobs,
        )
        return replace(rollout, voters=self._sample_voters(rollout))

    def _rollout_in_turns(self, rows: list[dict[str, Any]]) -> tuple[Rollout, list[dict[str, Any]]]:
        """Episodes of environments, and the rows with what each earned."""
        prompts = []
        for row in rows:
            prompt = RowPrompt(row["id"])
            prompt.row = row
            prompts.append(prompt)

        prompt_tokens, tokens, written, _, logprobs, extra, *_ = self._generate(prompts)
        episodes: list[TurnEpisode] = extra["episodes"]
        self.note(episode_metrics(episodes))

        rollout = Rollout(
            prompts=[one.messages[: one.opening] for one in episodes],
            completions=[one.messages[one.opening :] for one in episodes],
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            written=written,
            sampler_logprobs=logprobs,
        )
        earned = [row | {"played": one.played} for row, one in zip(rows, episodes, strict=True)]
        return rollout, earned

    def _play_environments(self, prompts: list[RowPrompt], _: Any) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        assert self.turns is not None
        episodes = self.turns.sample(
            [prompt.row for prompt in prompts], self._write_turns, self.max_completion_length
        )
        has_logprobs = self.use_vllm

        return {
            "prompt_ids": [one.prompt_ids for one in episodes],
            "completion_ids": [one.ids for one in episodes],
            "logprobs": [one.logprobs for one in episodes] if has_logprobs else None,
            "env_mask": [one.written for one in episodes],
            "episodes": episodes,
        }

    def _write_turns(self, contexts: TokenLists, left: int) -> Written:
        """One turn of the episodes that wait for the model."""
        longest = self.generation_config.max_new_tokens
        self.generation_config.max_new_tokens = left  # vLLM has its own limit: what is more is cut
        try:
            tokens, logprobs = super()._generate_single_turn(list(contexts), None, {}, 1)[:2]
        finally:
            self.generation_config.max_new_tokens = longest

        return tokens, logprobs

    def _pad(self, rollout: Rollout) -> Sequences:
        padding = grpo.Padding(
            self._tokenizer.pad_token_id,  # pyright: ignore
            self.accelerator.device,
            self.pad_to_multiple_of,
        )
        sequences = grpo.pad(rollout, padding)
        if not self.mask_truncated_completions:
            return sequences

        is_cut = grpo.truncated(rollout.completion_tokens, self.end_ids)
        return grpo.without_truncated(sequences, is_cut)

    def _before_update(self, sequences: Sequences) -> tuple[Tensor | None, Tensor | None]:
        """Log-probabilities by the policy that sampled, if it will have changed, and by the
        reference."""
        old = reference = None
        every = (self.args.steps_per_generation or 1) * self.num_iterations
        changes = self.args.gradient_accumulation_steps % every != 0

        with torch.no_grad(), self._without_checkpointing():
            if self.truncated is None and (changes or self._corrects_sampler()):
                old = self._logprobs(self.model, sequences)

            if self.beta and self.ref_model is not None:
                reference = self._logprobs(self.ref_model, sequences)
            elif self.beta:
                with self._without_adapter():
                    reference = self._logprobs(self.model, sequences)

        return old, reference

    def _without_checkpointing(self) -> AbstractContextManager[Any]:
        return disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)

    def _without_adapter(self) -> AbstractContextManager[Any]:
        """The reference below LoRA: the base model, or the adapter that training began with."""
        model: Any = self.accelerator.unwrap_model(self.model)
        return use_adapter(model, "ref" if "ref" in model.peft_config else None)

    def _logprobs(self, model: Any, sequences: Sequences) -> Tensor:
        logprobs, _, _ = self._get_per_token_logps_and_entropies(
            model,
            sequences.ids,
            sequences.mask,
            sequences.length,
            self._pass_size(),
        )
        return logprobs

    def _pass_size(self) -> int:
        """Rows of a forward pass."""
        if self.policy.training:
            return self.args.per_device_train_batch_size

        return self.args.per_device_eval_batch_size

    def _corrects_sampler(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    def _sampler_ratio(self, old: Tensor | None, sequences: Sequences) -> Tensor | None:
        correction = self._correction()
        if correction is None or old is None:
            return None

        assert sequences.sampler_logprobs is not None
        mask = sequences.completion_mask
        return grpo.correct_sampler(old, sequences.sampler_logprobs, mask, correction)

    def _correction(self) -> grpo.Correction | None:
        if not self.vllm_importance_sampling_correction:
            return None
        if not self.use_vllm and (self.ahead is None or not self.policy.training):
            return None

        return grpo.Correction(
            mode=self.vllm_importance_sampling_mode,
            low=self.vllm_importance_sampling_clip_min,
            high=self.vllm_importance_sampling_clip_max,
        )

    # Sampling

    def _tokenize_prompts(self, prompts: list) -> Any:
        if self.fast.sampler is None:
            return self._render(prompts)

        return self.prompt_tokens(prompts), None, {}  # a fast sampler takes text only

    def tokenize_ahead(self, prompts: list) -> None:
        """Tokenize prompts of a later rollout, which are then known."""
        if self.fast.sampler is not None:
            self.prompt_tokens(prompts)

    def _render(self, prompts: list) -> Any:
        with rendering(self.processing_class, len(prompts)):
            return super()._tokenize_prompts(prompts)

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        N = self._anchor_generations()
        if N and self.objective.loss_on_momentum:
            return self._anchored().merged(prompt_ids, num_generations, N)

        return self._sample(prompt_ids, images, multimodal_fields, num_generations, has_tool_images)

    def _sample(
        self, prompt_ids: Any, images: Any, fields: Any, generations: int, tool_images: bool = False
    ) -> Any:
        if self.fast.sampler is None:
            return super()._generate_single_turn(
                prompt_ids, images, fields, generations, tool_images
            )

        sampler = self._current_sampler(self.fast.sampler)
        length = self.max_completion_length
        draws = None
        if self.own_draws is not None:
            draws = torch.rand(len(prompt_ids), length, generator=self.own_draws)

        return sampler.sample(prompt_ids, length, self.usual_rows, draws), None

    def _current_sampler(self, kind: type[GraphSampler]) -> GraphSampler:
        sampling = self._sampling()
        if self.sampler is not None and self.sampler.sampling == sampling:
            return self.sampler

        dtype = None
        if self.args.bf16:
            dtype = torch.bfloat16
        elif self.args.fp16:
            dtype = torch.float16

        self.sampler = kind(  # anew: a guard changed the temperature
            self.policy,
            eos=self.eos_token_ids,
            pad=self._tokenizer.pad_token_id,  # pyright: ignore
            dtype=dtype,
            sampling=sampling,
        )
        return self.sampler

    def _sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k or 0, self.top_p)

    def _anchor_generations(self) -> int:  # N in this mode
        samples = self.anchor is not None and self.policy.training
        if samples:
            return self.objective.momentum_generations or 0

        return 0

    def _anchored(self) -> AnchoredSampler:
        def sample(rows: Any, number: int) -> Any:
            return self._sample(rows, None, {}, number)

        def synced() -> None:
            self._last_loaded_step = -1  # vLLM then loads the weights again

        assert self.anchor is not None
        return AnchoredSampler(
            self.anchor,
            self.policy,
            sample,
            synced,
            self.args.process_index,
            self.args.world_size,
        )

    def _sample_voters(self, rollout: Rollout) -> grpo.Voters:
        """The anchor's completions that only vote."""
        N = self._anchor_generations()
        if not N or self.objective.loss_on_momentum:
            return grpo.Voters()

        prompts = gather_object(rollout.prompt_tokens)[:: self._group_size()]
        return grpo.Voters(*self._anchored().voters(prompts, N, even=self.use_vllm))

    # Scoring

    def _score(self, rollout: Rollout, rows: Any) -> Scored:
        scored = grpo.score(rollout, rows, self._scoring())
        device = self.accelerator.device
        takes_turns = bool(self.tools) or self.turns is not None
        self.note(grpo.rollout_metrics(rollout, device, self.world, with_tools=takes_turns))

        return scored

    def _scoring(self) -> grpo.Scoring:
        N = self._anchor_generations()
        merged = self.objective.loss_on_momentum

        return grpo.Scoring(
            call=self._call_rewards,
            weights=self.reward_weights,
            group_size=self._group_size(),
            judge=self.judge,
            end_ids=self.end_ids,
            decode=partial(self.processing_class.batch_decode, skip_special_tokens=True),  # pyright: ignore
            votes=self.vote_rules,
            num_voters=0 if merged else N,
            from_anchor=N if merged else 0,
            entropy_filter=self.entropy_filter if self.policy.training else None,
            tolerance=self.objective.dynamic_tolerance,
            seed=(self.args.seed, self._step),
            world=self.world,
        )

    def _call_rewards(self, rows: list[dict[str, Any]], rollout: Rollout) -> Tensor:
        return super()._calculate_rewards(
            rows, rollout.prompts, rollout.completions, rollout.completion_tokens
        )

    def _scaling(self) -> grpo.Scaling:
        return grpo.Scaling(
            by=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
            weights=self.reward_weights,
        )

    def _trajectory_entropies(self, rollout: Rollout) -> Tensor:
        """[rows], the mean entropy of each completion; voters are among them."""
        padding = grpo.Padding(self._tokenizer.pad_token_id, self.accelerator.device)  # pyright: ignore
        sequences = grpo.pad(replace(rollout, sampler_logprobs=None), padding)

        with torch.no_grad(), self._without_checkpointing():
            _, entropies, _ = self._get_per_token_logps_and_entropies(
                self.model,
                sequences.ids,
                sequences.mask,
                sequences.length,
                self.args.per_device_train_batch_size,
                compute_entropy=True,
            )

        assert entropies is not None
        return trajectory_entropy(entropies, sequences.completion_mask)

    def _log_completions(
        self, rollout: Rollout, scored: Scored, advantages: grpo.Advantages
    ) -> None:
        """Fills TRL's table of completions."""
        assert scored.by_function is not None
        self._logs["prompt"].extend(gather_object(rollout.prompts))
        self._logs["completion"].extend(gather_object(rollout.completions))
        self._logs["advantages"].extend(advantages.values.tolist())
        for name, column in zip(self.reward_func_names, scored.by_function.T, strict=True):
            self._logs["rewards"][name].extend(column.tolist())

        self._take_logged(len(rollout.prompts))

    def _take_logged(self, number: int) -> None:
        """Takes what reward functions logged of this process's completions."""
        # Sorted, so that all processes gather in the same order.
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            values = self._pending_extra_logs.get(column, [None] * number)
            self._logs["extra"][column].extend(gather_object(values))

        for name in sorted(set(gather_object(list(self._pending_metrics)))):
            values = self._pending_metrics.get(name, [])
            sums = torch.tensor([[sum(values), len(values)]], device=self.accelerator.device)
            total, count = self.world.gather(sums.float()).sum(dim=0).tolist()
            self.note({name: total / count})

        self._pending_extra_logs.clear()
        self._pending_metrics.clear()

    # The loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        self._release_anchor()
        if self._buffered_inputs is before or not self._may_reorder():
            return inputs

        # TRL shuffled the rows, after which few of a micro-batch share a prompt.
        steps = self.args.steps_per_generation or 1
        number = math.gcd(steps, self.args.gradient_accumulation_steps)  # of one update
        reordered = []
        buffer: Any = self._buffered_inputs
        for k in range(0, steps, number):
            reordered += keep_groups(buffer[k : k + number])

        self._buffered_inputs = reordered
        return reordered[self._step % steps]

    def _may_reorder(self) -> bool:
        """Whether rows may change places within an update, and gain from it."""
        steps = self.args.steps_per_generation or 1
        number = math.gcd(steps, self.args.gradient_accumulation_steps)
        if number == 1 or self.shared_prompts is None:
            return False

        # Means over a micro-batch would change.
        by_part = self.loss_type == "bnpo" or self.objective.cov_share
        return not (by_part or self.bonus is not None or self.top_entropy_quantile < 1)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        output = self.loss_of(model, inputs)
        self.note(output.metrics)

        if self.bonus is not None and self.policy.training:
            self.bonus.observe(output.entropy_sums)
            if self.accelerator.sync_gradients:
                self.bonus.end_update(self.world.gather)
                self.note({"entropy_coef": self.bonus.coef})

        return output.loss

    def loss_of(self, model: Any, inputs: dict[str, Any]) -> grpo.LossOutput:
        """The loss of a micro-batch; nothing is logged or changed."""
        batch = from_trl(inputs)
        passed = self._pass(model, batch)
        return grpo.compute_loss(passed, batch, self._loss_settings(), self.world)

    def _pass(self, model: Any, batch: Batch) -> grpo.Passed:
        if batch.kept_tokens is not None:
            assert self.truncated is not None
            return self.truncated(model, batch, batch.kept_tokens, self.temperature)

        logprobs, entropies, router_loss = self._get_per_token_logps_and_entropies(
            model,
            batch.ids,
            batch.mask,
            batch.length,
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
            **batch.images,
        )
        return grpo.Passed(logprobs, entropies, router_loss)

    def _loss_settings(self) -> grpo.LossSettings:
        trains = self.policy.training
        args = self.args
        kind = self.loss_objective

        return grpo.LossSettings(
            objective=kind,
            level=self.importance_sampling_level,
            options={key: getattr(args, f"{kind.name}_{key}") for key in kind.options},
            epsilon=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            delta=args.delta,
            cov_share=self.objective.cov_share or 0.0,
            beta=self.beta,
            bias_corrected_kl=args.use_bias_correction_kl,
            entropy_coef=None if self.bonus is None else self.bonus.weight(),
            high_entropy_share=self.top_entropy_quantile,
            off_policy_threshold=self.off_policy_mask_threshold,
            router_coef=self.router_aux_loss_coef if self.aux_loss_enabled else 0.0,
            correction=self._correction(),
            max_length=self.max_completion_length,
            micro_batches=self.current_gradient_accumulation_steps if trains else 1,
            rollout_batches=(args.steps_per_generation or 1) if trains else 1,
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
    ) -> tuple[Any, Any, Any]:
        """Log-probabilities [B, T], and maybe entropies [B, T] and the router's loss."""
        tokens = (input_ids, attention_mask, logits_to_keep)
        if isinstance(model, Anchor):
            return self._pass_of_anchor(model, *tokens, batch_size, **rest)

        if self.shared_prompts is None:
            return super()._get_per_token_logps_and_entropies(
                model, *tokens, batch_size, compute_entropy, **rest
            )

        size = batch_size or len(input_ids)
        parts = []
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            part = self.shared_prompts(
                model, ids, mask, logits_to_keep, self.temperature, compute_entropy
            )
            if part is None:
                part = super()._get_per_token_logps_and_entropies(
                    model, ids, mask, logits_to_keep, compute_entropy=compute_entropy, **rest
                )

            parts.append(part)

        logprobs = torch.cat([part[0] for part in parts])
        entropies = None
        if compute_entropy:
            entropies = torch.cat([part[1] for part in parts])

        return logprobs, entropies, None

    def _pass_of_anchor(self, anchor: Anchor, *tokens: Any, **rest: Any) -> tuple[Any, Any, Any]:
        """The pass of a reference whose weights take the policy's place; without dropout, as
        TRL's."""
        trains = self.policy.training
        with anchor.in_place_of(self.policy):
            self.policy.eval()
            passed = self._get_per_token_logps_and_entropies(self.policy, *tokens, **rest)
            self.policy.train(trains)

        return passed

    # The anchor, and averaged weights

    def _move_anchor(self) -> None:
        if self.anchor is None:
            return

        follow = bool(self.anchor.weights) and self.objective.momentum_update == "rollout"
        self.anchor.start(self.policy)

        if follow:
            self.anchor.copy_weights()  # if this rollout fails, those of the last step are saved
            self.update_anchor()

        self.note({"anchor/distance": self.anchor.distance(self._sum_of_shards)})

    def _sum_of_shards(self, x: Tensor) -> Tensor:
        if not self.is_fsdp_enabled:
            return x

        return self.accelerator.reduce(x.to(self.accelerator.device), reduction="sum")  # pyright: ignore

    def _release_anchor(self) -> None:
        """Free what `last_step` holds of an anchor before it moved, once the step has sampled."""
        every = (self.args.steps_per_generation or 1) * self.num_iterations
        if self.anchor is not None and every >= self.args.gradient_accumulation_steps:
            self.last_step = None

    def update_anchor(self) -> None:
        assert self.anchor is not None
        progress = self.state.global_step / max(self.state.max_steps, 1)
        schedule = self.kind.momentum_schedule
        self.anchor.update(self.policy, momentum_at(progress, self.objective.momentum, schedule))

    def averaged(self) -> AbstractContextManager[None]:
        """The averaged weights, if there are any, in place of the policy's: to evaluate them."""
        if self.average is None or not self.average.updates:
            return nullcontext()
        return self.average.in_place_of(self.policy)

    def end_with_average(self) -> None:
        if self.average is not None and self.average.updates and self._is_over():
            self.average.write(self.policy, self.average.weights)

    def _is_over(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    def _write(self, draft: Path) -> None:
        if self.ahead is not None and self.last_step is None:
            self.ahead.settle(SAVING_WAITS)

        super()._write(draft)
        if self.average is None or not self.average.updates or self._is_over():
            return

        with self.averaged():
            weights = self._gathered_weights() if self.is_fsdp_enabled else None
            if self.args.should_save:
                self._save(str(draft / AVERAGED), weights)

    def save_last_step(self) -> None:
        for average in (self.anchor, self.average, self.ref_model):
            if isinstance(average, Anchor):
                average.put_back(self.policy)

        super().save_last_step()

    def restore_policy(self, checkpoint: Path) -> None:
        super().restore_policy(checkpoint)
        self.end_with_average()
        if self.ahead is not None:
            self.ahead.drop()  # the failed policy sampled it

    # The optimizer

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()

        # Accelerate's mixed precision rounds a sharded model's outputs to bfloat16, and TRL's
        # log-probabilities with them, by about 0.01; with one process it does not.
        if self.accelerator.is_fsdp2:
            plugin = self.accelerator.state.fsdp_plugin
        else:
            plugin = None

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
        self.auxiliary_norm.observe(norms.auxiliary)

        return norms.total

    # Metrics and checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        optimizer = unwrap_optimizer(self.optimizer)
        if optimizer is not None and "loss" in logs:
            self.note({f"optim/{name}": x for name, x in optimizer.stats().items()})
        super().log(logs, start_time)

    def _get_learning_rate(self) -> float:
        return matrix_rate(self.optimizer, super()._get_learning_rate())

    def _logged(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.policy.training else "eval"]

    def note(self, metrics: dict[str, float]) -> None:
        """Put metrics into the row of the step, or of the evaluation that runs."""
        logged = self._logged()
        for name, value in metrics.items():
            logged[name].append(value)

    def _group_size(self) -> int:
        return self.num_generations if self.policy.training else self.num_generations_eval  # pyright: ignore

    def samples(self, number: int | None = None) -> list[Sample]:
        """The first completions of the latest rollout, or all, of all processes."""
        logs = self._logs
        weights = self.reward_weights.tolist()
        columns = [list(values) for values in logs["rewards"].values()]

        samples = []
        for k in range(min(number or len(logs["completion"]), len(logs["completion"]))):
            reward = 0.0
            for weight, column in zip(weights, columns, strict=True):
                if column[k] is not None and not math.isnan(column[k]):
                    reward += weight * column[k]

            sample = Sample(logs["prompt"][k], logs["completion"][k], reward, logs["advantages"][k])
            samples.append(sample)

        return samples

    @property
    def micro_batches_done(self) -> int:
        return self._step

    def last_micro_batches(self, number: int) -> list[dict[str, Any]]:
        """The inputs of the last passes, oldest first."""
        buffer: Any = self._buffered_inputs
        return [buffer[(self._step - k) % len(buffer)] for k in range(number, 0, -1)]

    def forget_rollouts(self) -> None:
        """Drop what a checkpoint does not replace: rows and samples of another run."""
        self._metrics["train"].clear()
        for column in ("prompt", "completion", "advantages"):
            self._logs[column].clear()
        for name in ("rewards", "extra"):
            self._logs[name].clear()

        self._buffered_inputs = None
        self._last_loaded_step = -1  # vLLM then loads the weights again
        self.last_step = None
        if self.ahead is not None:
            self.ahead.drop()

    def own_state(self) -> dict[str, Any]:
        every = (self.args.steps_per_generation or 1) * self.num_iterations
        used_up = self._step % every == 0  # then the next step samples again

        state: dict[str, Any] = {
            "step": self._step,
            "buffer": None if used_up else self._buffered_inputs,
            "silent": self.silence.is_silent,
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
        }
        if self.ahead is not None:
            state["ahead"] = self.ahead.pending
        if self.bonus is not None:
            state["entropy"] = [self.bonus.coef, self.bonus.entropy]

        return state

    def plain_state(self, state: dict[str, Any]) -> dict[str, Any]:
        if "ahead" not in state:
            return state

        return state | {"ahead": plain_or_none(state["ahead"])}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._buffered_inputs = send_to_device(state["buffer"], self.accelerator.device)
        self.silence.is_silent = state.get("silent", False)

        for name, values in state["metrics"].items():
            self._metrics["train"][name].extend(values)

        if self.ahead is not None:
            plain = state.get("ahead")
            self.ahead.load(None if plain is None else self._sampled_before(plain))

        if self.bonus is not None and "entropy" in state:
            self.bonus.coef, self.bonus.entropy = state["entropy"]

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler after as many shuffles as the resumed run has started epochs."""
        sampler = super()._get_train_sampler(dataset)
        if self.shuffle_dataset and self.resumed_from is not None:
            state = read_json(self.resumed_from / "trainer_state.json")
            for _ in range(int(state["epoch"])):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

        return sampler
