"""`GRPOTrainer`: TRL's, with routed optimizers, the objectives of this room, and what they measure.

With `optim`, `objective` and `judge` left out it is TRL's trainer to the last bit, except that
FSDP2 with bfloat16 keeps its log-probabilities in float32. This is the seam to TRL: `OVERRIDDEN`
names each method of TRL's that is replaced anywhere in this room's mixins, with the signature it
had in the version they were checked against.
"""

import copy
import time
from dataclasses import MISSING, fields
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer.grpo_config import GRPOConfig

from mesotron.config import ObjectiveConfig, OptimConfig
from mesotron.optim import RoutedOptimizer
from mesotron.optim.groups import clip_gradients
from mesotron.rlvr.anchor import Anchor
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.answers.verify import Verifier
from mesotron.rlvr.dataset import Batch, Rows
from mesotron.rlvr.layers.anchored import reference_in_memory
from mesotron.rlvr.layers.resampling import Resampling
from mesotron.rlvr.layers.rollouts import Engine
from mesotron.rlvr.layers.scoring import vote
from mesotron.rlvr.objectives import loss_arguments, resolve, warn_if_on_policy
from mesotron.rlvr.optimizer import build_optimizer, check_all_train
from mesotron.rlvr.wrapping import keep_float32_outputs

CHECKED_AGAINST = "1.16"
# Method -> its parameters in that version of TRL (and Transformers 5.22).
OVERRIDDEN = {
    "_calculate_rewards": "self, inputs, prompts, completions, completion_ids_list",
    "_clip_grad_norm": "self, model",
    "_compute_loss": "self, model, inputs",
    "_generate": "self, prompts",
    "_generate_and_score_completions": "self, inputs",
    "_generate_single_turn": (
        "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images"
    ),
    "_get_per_token_logps_and_entropies": (
        "self, model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, "
        "compute_aux_loss, pixel_values, image_grid_thw, num_images, pixel_attention_mask, "
        "spatial_shapes, num_tiles, image_sizes, token_type_ids, mm_token_type_ids, "
        "image_position_ids"
    ),
    "_tokenize_prompts": "self, prompts",
    "create_accelerator_and_postprocess": "self",
    "create_optimizer": "self, model",
    "log": "self, logs, start_time",
    "training_step": "self, model, inputs, num_items_in_batch",
}
# Functions of TRL's module that are exchanged while it scores a rollout (`layers/padding.py`).
EXCHANGED = {"pad": "tensors, padding_value, padding_side, pad_to_multiple_of"}


class GRPOTrainer(Resampling):
    """TRL's `GRPOTrainer` with an optimizer and an objective by name.

    Args:
        model: as TRL takes it: a name or a Transformers model.
        reward_funcs: as TRL takes them. With a `judge` they also get `facts`, `truncated` and `row`
            for each completion. Self-labelled objectives log them and do not train on them.
        args: a `trl.GRPOConfig`; its `num_generations` are the completions that train.
        train_dataset: has a column `prompt`; `gold` is read by the judge.
        optim: muon, pion, muon_sgd, adamw, or an `OptimConfig`; None is what `args` says. A name
            alone takes `args.learning_rate`.
        objective: a name or an `ObjectiveConfig`; None is what `args` says.
        engine: who samples: generate is TRL's own ways, graph a static cache and captured graphs,
            fused those with a decoder of few kernels (Llama and Qwen2, without LoRA).
        share_prompts: train on rows that hold a prompt once and its completions after it.
        record: make such rows of fixed shapes, and the passes over them CUDA graphs.
        judge: turns completions into facts; self-labelled objectives without one read \\boxed{}.
        **rest: anything else that TRL's trainer takes (`processing_class`, `peft_config`, ...).

    Example:
        trainer = GRPOTrainer(model, rewards, args, data, optim="pion", objective="mgrpo")
        trainer.train()

    References:
        Shao et al., DeepSeekMath, 2024, arXiv 2402.03300.
    """

    auxiliary_norm: torch.Tensor | None = None
    """Of the gradient of this step's auxiliary groups."""

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
        engine: Engine = "generate",
        share_prompts: bool = False,
        record: bool = False,
        **rest: Any,
    ) -> None:
        args = copy.copy(args) if args is not None else GRPOConfig("mesotron-grpo")
        self.objective = resolve_for(args, objective)
        self.optim = resolve_optim(args, optim, rest.get("optimizers"))
        self.judge, self.engine = judge, engine
        self.share_prompts, self.record = share_prompts, record
        self._token_ids = {}
        funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        funcs = [func for func in funcs if func is not None]
        if objective is not None:
            set_loss(args, self.objective)
        if self.self_labelled:
            funcs = self._put_vote_first(args, funcs)
        beta, own = args.beta, reference_in_memory(model, args, rest.get("peft_config"))
        args.beta = 0.0 if own or self.objective.name == "corewarding" else beta
        super().__init__(model, funcs, args, train_dataset, **rest)
        if isinstance(self.train_dataset, Rows):
            self.data_collator = Batch
        self._check_engine()
        self._check_sharing()
        args.beta = self.beta = beta
        warn_if_on_policy(self.objective, updates_per_rollout(args))
        if own:
            self.ref_model: Any = Anchor(dtype=None).start(self.policy)
        self.geometric = "gmpo" in (
            self.objective.name,
            self.objective.loss if self.self_labelled else "",
        )
        self._start_anchor()
        self._start_stream()
        self.add_callback(StepEnd(self))

    def _put_vote_first(self, args: GRPOConfig, funcs: list[Any]) -> list[Any]:
        """The rewards of a self-labelled objective: its votes train, all others are logged."""
        if args.reward_weights is not None:
            raise ValueError(
                f"args.reward_weights = {args.reward_weights}, but {self.objective.name} "
                "trains on its votes alone and only logs other rewards: leave them out"
            )
        self.judge = self.judge or Judge(FORMATS["boxed"], Verifier())
        args.reward_weights = [1.0, *(0.0 for _ in funcs)]
        return [vote, *funcs]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_float32_outputs(self.accelerator)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Build the optimizer, now that the model is wrapped; refuse one that misses a weight."""
        wrapped = self.policy if model is None else model
        if self.optimizer is None and self.optim is not None:
            self.optimizer = build_optimizer(wrapped, self.optim)
        optimizer = super().create_optimizer(model)
        check_all_train(wrapped, optimizer)
        return optimizer

    def _routed(self) -> RoutedOptimizer | None:
        found = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        return found if isinstance(found, RoutedOptimizer) else None

    def _clip_grad_norm(self, model: Any) -> Any:
        optimizer = self._routed()
        matrices = self.optim is not None and self.optim.clip == "all"
        if matrices and self.is_deepspeed_enabled:
            raise ValueError(
                "--optim.clip all cannot be kept with DeepSpeed, which clips all weights by one "
                "norm itself: leave it out, or use FSDP2"
            )
        if optimizer is None or self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        norms = clip_gradients(optimizer, self.args.max_grad_norm, matrices)
        self.auxiliary_norm = norms.auxiliary  # read at the step's end: looking now would wait
        return norms.total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        optimizer = self._routed()
        if optimizer is not None and "loss" in logs:
            self._note({f"optim/{name}": x for name, x in optimizer.stats().items()})
        super().log(logs, start_time)


class StepEnd(TrainerCallback):
    """Times a step and its optimizer, notes its norm, moves an anchor that follows each of them."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        self.began = self.paused = self.optimizer = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.paused = time.perf_counter()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.optimizer = time.perf_counter() - self.paused

    def on_step_end(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        if trainer.auxiliary_norm is not None:
            trainer._note({"grad_norm/auxiliary": trainer.auxiliary_norm.item()})
            trainer.auxiliary_norm = None
        if trainer.anchor is not None and trainer.objective.momentum_update == "optimizer_step":
            trainer._update_anchor()
        spent = time.perf_counter() - self.began
        trainer._note({"time/step": spent, "time/optimizer": self.optimizer})


def resolve_for(args: GRPOConfig, objective: str | ObjectiveConfig | None) -> ObjectiveConfig:
    """The objective for arguments whose `num_generations` are the completions that train."""
    if objective is None:
        return ObjectiveConfig()
    given = ObjectiveConfig(name=objective) if isinstance(objective, str) else objective  # pyright: ignore
    M = args.num_generations or 0
    apart = given.name == "mgrpo" and not given.loss_on_momentum
    N = given.momentum_generations
    # N is a quarter of M + N, so a third of M.
    return resolve(given, M + (max(1, M // 3) if N is None else N) if apart else M)


def updates_per_rollout(args: GRPOConfig) -> int:
    """Optimizer steps that TRL makes with each rollout batch."""
    assert args.steps_per_generation is not None  # TRL fills it in
    micro_batches = args.steps_per_generation * args.num_iterations
    return -(-micro_batches // args.gradient_accumulation_steps)


def resolve_optim(
    args: GRPOConfig, optim: str | OptimConfig | None, optimizers: Any
) -> OptimConfig | None:
    """The optimizer's config; a name alone takes the rates of the arguments."""
    if optim is not None and optimizers is not None and optimizers[0] is not None:
        raise ValueError("optim= and optimizers= both give an optimizer: leave one of them out")
    if isinstance(optim, str):
        rate, decay = args.learning_rate, args.weight_decay
        return OptimConfig(name=optim, lr=rate, weight_decay=decay)  # pyright: ignore
    return optim


def set_loss(args: GRPOConfig, objective: ObjectiveConfig) -> None:
    """Write the objective into TRL's arguments; one that says something else is refused."""
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(GRPOConfig)}
    for key, value in loss_arguments(objective).items():
        given = getattr(args, key)
        if given not in (value, defaults[key]):
            raise ValueError(
                f"args.{key} = {given!r}, but objective {objective.name!r} has {value!r}: leave "
                "it out of args, or give it in ObjectiveConfig"
            )
        setattr(args, key, value)
