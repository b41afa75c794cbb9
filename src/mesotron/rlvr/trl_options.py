"""`--trl.KEY VALUE`: any field of TRL's `GRPOConfig`, except those that a run sets itself
(`trl_options.toml`) and what would be silently wrong.

The fields are read from the sources of TRL and Transformers, since importing these takes seconds.
"""

import ast
import json
import re
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mesotron.config import TrainConfig
from mesotron.config.base import suggest
from mesotron.rlvr.trl_arguments import check_updates
from mesotron.runs.extras import require

SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)
OWN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
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
    if config.objective.name == "kl_cov":
        check_updates(config.objective, updates)  # before anything is loaded

    for key, why in _traps(config, options, updates):
        if options.get(key):
            raise ValueError(f"--trl.{key} {options[key]} {why}")

    if options.get("use_liger_kernel"):
        require(None, ["liger_kernel"], "--trl.use_liger_kernel")

    return options


@cache
def grpo_fields() -> dict[str, str]:
    found: dict[str, str] = {}
    for package, file, name in SOURCES:
        origin = getattr(find_spec(package), "origin", "")
        source = (Path(origin).parent / file).read_text(encoding="utf-8")

        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        for node in next(one for one in classes if one.name == name).body:
            if isinstance(node, ast.AnnAssign):
                found[ast.unparse(node.target)] = ast.unparse(node.annotation)

    return {name: kind for name, kind in found.items() if not name.startswith("_")}


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
    corrected = vllm and options.get("vllm_importance_sampling_correction", True)
    modes = MODES[:2] if name == "vespo" else MODES
    mode = "vllm_importance_sampling_mode"
    quantile = options.get("top_entropy_quantile", 1.0)
    penalized = options.get("repetition_penalty", 1) != 1
    biased = "biases the importance ratio to vLLM's samples: leave it out, or add "
    biased += "--trl.vllm_importance_sampling_correction false"
    unused = "has no effect with one update per rollout and without --vllm"
    patched = "replaces layers that --rollout.fast reads itself: add --no-rollout.fast"
    unclipped = name in ("cispo", "sapo", "vespo", "clip_cov", "kl_cov")

    traps = [
        *((key, corrected, biased) for key in ("top_k", "min_p")),
        ("repetition_penalty", corrected and penalized, biased),
        (mode, options.get(mode, MODES[0]) not in modes, f"must be one of {', '.join(modes)}"),
        *((key, not vllm, "needs --vllm") for key in options if key.startswith("vllm_")),
        ("off_policy_mask_threshold", updates == 1 and not vllm, unused),
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
