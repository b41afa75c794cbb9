"""`--trl.KEY VALUE`: any field of TRL's `GRPOConfig`, except those that a run sets itself
(`OWN`) and what would be silently wrong.
"""

import json
import re
from dataclasses import fields
from functools import cache
from typing import Any

from mesotron.config import TrainConfig
from mesotron.config.base import suggest
from mesotron.rlvr import objectives
from mesotron.rlvr.trl_arguments import check_updates
from mesotron.runs.extras import require

# Fields that a run sets itself, under the flag to use instead.
OWN = {
    "--lr": ("learning_rate",),
    "--optim": (
        "optim",
        "optim_args",
        "optim_target_modules",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
    ),
    "--optim.weight-decay": ("weight_decay",),
    "--optim.schedule": ("lr_scheduler_type",),
    "--optim.warmup": (
        "warmup_steps",
        "warmup_ratio",
    ),
    "--optim.max-grad-norm": ("max_grad_norm",),
    "--batch": ("generation_batch_size",),
    "--group": ("num_generations",),
    "--rollout.micro-batch": (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "auto_find_batch_size",
    ),
    "--rollout.updates": ("steps_per_generation",),
    "--max-tokens": ("max_completion_length",),
    "--rollout.temperature": ("temperature",),
    "--rollout.top-p": ("top_p",),
    "--vllm": (
        "use_vllm",
        "vllm_mode",
    ),
    "--objective.name": (
        "loss_type",
        "importance_sampling_level",
    ),
    "--objective.beta": ("beta",),
    "--objective.epsilon": ("epsilon",),
    "--objective.epsilon-high": ("epsilon_high",),
    "--objective.scale-rewards": ("scale_rewards",),
    "--objective.entropy-bonus": (
        "entropy_coef",
        "entropy_coef_max",
    ),
    "--objective.entropy-target": (
        "use_adaptive_entropy",
        "entropy_target",
    ),
    # The reference of a KL term is a copy in memory, which TRL's callback does not know.
    "--objective.name corewarding": (
        "sync_ref_model",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
    ),
    # The parts of a reward are one function here.
    "--reward.weights": (
        "reward_weights",
        "multi_objective_aggregation",
    ),
    "--out": (
        "output_dir",
        "run_name",
        "logging_dir",
    ),
    "--steps": (
        "max_steps",
        "num_train_epochs",
    ),
    "--seed": (
        "seed",
        "data_seed",
    ),
    "--resume": (
        "resume_from_checkpoint",
        "ignore_data_skip",
    ),
    "--save-every": (
        "save_steps",
        "save_strategy",
        "save_only_model",
    ),
    "--keep": ("save_total_limit",),
    "--eval-every": (
        "do_eval",
        "eval_strategy",
        "eval_steps",
        "eval_on_start",
    ),
    "--final": ("load_best_model_at_end",),
    "--device": ("use_cpu",),
    "--model.dtype": (
        "bf16",
        "fp16",
        "bf16_full_eval",
        "fp16_full_eval",
    ),
    "--model.gradient-checkpointing": ("gradient_checkpointing", "activation_checkpointing"),
    # Loaded files are untrusted.
    "--model": (
        "model_init_kwargs",
        "trust_remote_code",
    ),
    "--report-to": ("report_to",),
    "mesotron export --push": (
        "push_to_hub",
        "hub_model_id",
        "hub_token",
        "hub_strategy",
        "hub_always_push",
        "log_completions_hub_repo",
    ),
    # No flag: the run's log and its data need them as they are.
    "": (
        "logging_steps",
        "logging_strategy",
        "logging_first_step",
        "logging_nan_inf_filter",
        "disable_tqdm",
        "dataloader_pin_memory",
        "remove_unused_columns",
        "do_train",
        "do_predict",
    ),
}
INSTEAD = {key: flag for flag, keys in OWN.items() for key in keys}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def trl_options(config: TrainConfig) -> dict[str, Any]:
    """The keyword arguments of `trl.GRPOConfig` that `config.trl` gives, or a ValueError."""
    options: dict[str, Any] = {}
    if config.trl:
        require("rlvr", ["trl", "transformers"], "--trl")

    for item in config.trl:
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--trl {item!r} must look like KEY=VALUE, such as top_k=20")

        if key in INSTEAD:
            instead = f"use {INSTEAD[key]}" if INSTEAD[key] else "leave it out"
            raise ValueError(f"--trl.{key} is set by the run: {instead}")

        known = grpo_fields()
        if key not in known:
            raise ValueError(f"--trl.{key} is no field of TRL's GRPOConfig{suggest(key, known)}")

        options[key] = _typed(key, text, known[key])

    updates = config.rollout.updates * options.get("num_iterations", 1)
    if objectives.get_loss(config.objective).one_update == "has no effect":
        check_updates(config.objective, updates)  # before anything is loaded

    for key, why in _traps(config, options, updates):
        if options.get(key):
            raise ValueError(f"--trl.{key} {options[key]} {why}")

    if options.get("use_liger_kernel"):
        require(None, ["liger_kernel"], "--trl.use_liger_kernel")

    return options


@cache
def grpo_fields() -> dict[str, str]:
    """The types of the fields of TRL's `GRPOConfig`, as they are written."""
    from trl.trainer.grpo_config import GRPOConfig  # takes seconds

    kinds: dict[str, str] = {}
    for each in fields(GRPOConfig):
        kind: Any = each.type
        kinds[each.name] = kind.__name__ if isinstance(kind, type) else str(kind)

    return {name: kind for name, kind in kinds.items() if not name.startswith("_")}


def _typed(key: str, text: str, annotation: str) -> Any:
    kinds = set(re.findall(r"\w+", annotation))
    if "None" in kinds and text.lower() in ("none", "null"):
        return None

    try:
        value = json.loads({"True": "true", "False": "false"}.get(text, text))
    except ValueError:
        value = text

    if type(value) is int and "int" not in kinds:
        value = float(value)

    if type(value).__name__ in kinds:
        return value
    if kinds <= {"bool", "int", "float", "dict", "list", "None", "Any"}:
        raise ValueError(f"--trl.{key} {text!r} is not of type {annotation}")

    return text  # a string, or a value of one of Transformers' enumerations


def _traps(config: TrainConfig, options: dict[str, Any], updates: int) -> list[tuple[str, str]]:
    """Options that would be silently wrong or without effect in this run, and why."""
    name = config.objective.name
    vllm = config.rollout.vllm != "off"
    ahead = config.rollout.max_staleness > 0
    corrected = vllm and options.get("vllm_importance_sampling_correction", True)
    modes = MODES[:2] if objectives.get(name).weighs_sequences else MODES
    mode = "vllm_importance_sampling_mode"
    quantile = options.get("top_entropy_quantile", 1.0)
    penalized = options.get("repetition_penalty", 1) != 1
    biased = "biases the importance ratio to vLLM's samples: leave it out, or add "
    biased += "--trl.vllm_importance_sampling_correction false"
    unused = "has no effect with one update per rollout and without --vllm"
    patched = "replaces layers that --rollout.fast reads itself: add --no-rollout.fast"
    loss = objectives.get_loss(config.objective)
    unclipped = loss.epsilon is None or loss.cov_share is not None

    traps = [
        *((key, corrected, biased) for key in ("top_k", "min_p")),
        ("repetition_penalty", corrected and penalized, biased),
        (mode, options.get(mode, MODES[0]) not in modes, f"must be one of {', '.join(modes)}"),
        *(
            (key, not (vllm or (ahead and "sampling" in key)), "needs --vllm")
            for key in options
            if key.startswith("vllm_")
        ),
        ("off_policy_mask_threshold", updates == 1 and not vllm and not ahead, unused),
        ("delta", unclipped, f"has no effect on {name}"),
        *(
            (key, not key.startswith(f"{name}_"), f"has no effect on {name}")
            for key in options
            if key.startswith(("sapo_", "vespo_"))
        ),
        ("top_entropy_quantile", not 0 <= quantile <= 1, "must be between 0 and 1"),
        ("use_liger_kernel", config.rollout.fast is not False, patched),
    ]
    return [(key, why) for key, holds, why in traps if holds]
