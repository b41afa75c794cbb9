"""Old names of commands, recipes and settings, which keep working, and settings that became
constants.

A command of an old name runs with a note for one release. A setting is named by its place in a
config, such as rollout.engine; its old flag is that name with dashes. Old flags, TOML files and
the config.json of old runs are all read through `upgrade`. The standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COMMANDS = {
    "reward check": "check",
    "sweep": "compare sweep",
    "route": "optim route",
    "spectrum": "optim spectrum",
}


RECIPES = {
    "qwen05_boxed_muon_sgd": "gsm8k_qwen05_muon_sgd",
    "qwen15_gsm8k_v1": "gsm8k_qwen15_sparse",
    "qwen15_gsm8k_v2": "gsm8k_qwen15",
}


@dataclass(frozen=True)
class Alias:
    """What became of a setting."""

    new: str
    convert: Callable[[Any], Any] = lambda value: value  # old to new; None says nothing


def is_fast_engine(engine: Any) -> bool:
    engines = {
        "generate": False,
        "graph": True,
        "fused": True,
    }
    if engine not in list(engines):
        raise ValueError(f"--rollout.engine {engine} must be one of {', '.join(engines)}")

    return engines[engine]


def column(kind: str, usual: str) -> Callable[[str], str | None]:
    """The old name of a column, as `--data.columns` has it; None for the usual one."""
    return lambda name: None if name == usual else f"{kind}={name}"


SETTINGS = {
    "data.files": Alias("task.data"),
    "task.path": Alias("task.data", lambda path: [path] if path else None),
    "task.question_column": Alias("task.columns", column("prompt", "question")),
    "task.answer_column": Alias("task.columns", column("gold", "answer")),
    "guard.precision": Alias("watch.precision"),
    "rollout.engine": Alias("rollout.fast", is_fast_engine),
    "rollout.share_prompts": Alias("rollout.fast", bool),
    "rollout.record": Alias("rollout.fast", bool),
    "use_muon": Alias("optim", lambda on: "muon" if on else None),
    "wandb": Alias("report_to", lambda on: ["wandb"] if on else None),
    "tensorboard": Alias("report_to", lambda on: ["tensorboard"] if on else None),
}


@dataclass(frozen=True)
class Removed:
    """A setting that became a constant."""

    value: Any  # the constant; files of old runs may still say it
    instead: str  # what a user does now


LORA_ALPHA = Removed(32.0, "LoRA's alpha is 32; change --lr instead")
# By the class of the config.
REMOVED: dict[str, dict[str, Removed]] = {
    "ModelConfig": {"lora_alpha": LORA_ALPHA},
    "RewardConfig": {
        "near_unit": Removed(1.0, "near pays half at an error of 1; rescale in a reward of yours"),
    },
    "ObjectiveConfig": {
        "momentum_schedule": Removed(None, "the objective's own is taken"),
    },
    "EvalConfig": {
        "batch": Removed(None, "evaluation samples as many completions at once as fit in memory"),
    },
    "RewardCheckConfig": {"limit": Removed(2.0, "a completion may take 2 CPU seconds")},
    "SweepConfig": {"every": Removed(2.0, "trials are looked at all the time")},
    "ReportConfig": {"every": Removed(10.0, "a live page is written every 10 seconds")},
    "PolicyConfig": {
        "flow_steps": Removed(5, "the flow head makes 5 steps"),
        "lora_alpha": LORA_ALPHA,
    },
    "VlaTrainConfig": {"compile": Removed(False, "a step is a CUDA graph where one is possible")},
    "PartsOptimConfig": {
        "momentum": Removed(0.95, "the spectral rules have momentum 0.95"),
        "scale": Removed("rms", "rates are in AdamW's unit"),
        "rank": Removed(8, "low_rank keeps 8 directions"),
        "max_grad_norm": Removed(1.0, "gradients are clipped to a norm of 1"),
    },
    "SnakeConfig": {
        "action_mask": Removed(True, "illegal moves are always masked"),
        "muon_momentum": Removed(0.95, "Muon and Pion have momentum 0.95 on Snake"),
        "muon_nesterov": Removed(True, "Muon and Pion have Nesterov momentum on Snake"),
        "pion_cutoff": Removed("noise", "Pion cuts at the noise edge on Snake"),
    },
}


def upgrade_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names, old ones replaced; a value under today's name wins."""
    upgraded = {name: value for name, value in values.items() if name not in SETTINGS}
    for new, value in values_of_old_names(values).items():
        if not upgraded.get(new):
            upgraded[new] = value

    if values.get("task.path") and values.get("task.data"):  # own data in place of the task's
        upgraded["task.name"] = "file"

    return upgraded


def values_of_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """What old names stand for. Texts and lists of several are joined; one switch turns it on."""
    converted: dict[str, Any] = {}
    for name, old_value in values.items():
        if name not in SETTINGS:
            continue

        new = SETTINGS[name].new
        value = SETTINGS[name].convert(old_value)
        earlier = converted.get(new)

        if value is None:
            continue
        if isinstance(earlier, str):
            converted[new] = f"{earlier},{value}"
        elif isinstance(earlier, list):
            converted[new] = [*earlier, *value]
        elif not earlier:
            converted[new] = value

    return converted


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain values, with sections, in today's names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}".replace("-", "_"): one for key, one in value.items()}
        else:
            flat[name.replace("-", "_")] = value

    if flat.keys() & SETTINGS.keys():
        return nest(upgrade_names(flat))

    return dict(values)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as sections: {"optim.lr": 1} becomes {"optim": {"lr": 1}}."""
    sections: dict[str, Any] = {}
    for path, value in values.items():
        section, dot, name = path.partition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
        else:
            sections[path] = value

    return sections
