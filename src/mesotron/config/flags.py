"""The names that people type: the common flags with their help, and what others call them."""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from mesotron.config.aliases import SETTINGS, nest, upgrade_names
from mesotron.config.base import Setting, flags_of, removed_from, suggest, without_removed

# Flag -> value and help, in the order of the short help. They mean the same in every command.
COMMON = {
    "model": ("NAME", "tiny, smollm2, a folder, a .gguf file, or a hub name"),
    "data": ("FILE..", "your data: JSONL, CSV, Parquet, a folder or a hub name"),
    "reward": ("NAME..", "file.py:name, module:name, or such as two_part"),
    "optim": ("NAME", "muon, adamw, pion, normuon or muon_sgd"),
    "lr": ("RATE", "learning rate, in AdamW's unit for every optimizer"),
    "steps": ("N", "optimizer steps"),
    "batch": ("N", "prompts per step"),
    "group": ("N", "completions per prompt"),
    "max-tokens": ("N", "longest completion"),
    "lora": ("RANK", "train LoRA adapters of this rank (0: every weight)"),
    "vllm": ("[MODE]", "sample with vLLM: colocate or server"),
    "gpu": ("NAME", "h100, 4090, m4-max, ..: price per hour; in plan speed and memory"),
    "budget": ("DOLLARS", "stop before it costs more; needs --price or --gpu"),
    "guard": ("ACTION", "what the watch may do: off, warn, stop or rollback"),
    "seed": ("N", "seed of all random draws"),
    "out": ("FOLDER", "run folder (unset: runs/NAME-DATE)"),
}
# Commands that start other runs pass these and the common flags on to them.
PASSED_ON = {*COMMON, "task", "data.columns", "data.weights"}

# Flag -> what other libraries and habits call it.
SYNONYMS = {
    "model": "model-name model-name-or-path base-model pretrained checkpoint llm",
    "data": (
        "dataset datasets dataset-name dataset-path train-file train-data data-path data-file "
        "file path prompts input"
    ),
    "data.columns": "columns column prompt-column question-column answer-column gold-column",
    "reward": (
        "rewards reward-fn reward-func reward-funcs reward-function reward-functions "
        "reward-model reward-path scorer verifier grader"
    ),
    "optim": "optimizer optimiser optimizer-name",
    "lr": "learning-rate rate step-size actor-lr",
    "steps": (
        "max-steps num-steps train-steps total-steps iterations iters epochs num-epochs "
        "num-train-epochs total-epochs"
    ),
    "batch": (
        "batch-size bs train-batch-size per-device-train-batch-size rollout-batch-size "
        "prompts-per-step num-prompts"
    ),
    "group": (
        "group-size num-generations num-samples num-rollouts rollouts samples-per-prompt "
        "n-samples-per-prompt rollout-n generations"
    ),
    "max-tokens": (
        "max-completion-length max-new-tokens max-length max-response-length max-seq-length "
        "response-length completion-length"
    ),
    "lora": "lora-r lora-rank use-lora use-peft peft qlora adapter",
    "vllm": "use-vllm vllm-mode",
    "budget": "cost max-cost dollars max-dollars",
    "seed": "random-seed rng",
    "out": "output output-dir out-dir save-dir run-dir run-name name",
    "resume": "resume-from-checkpoint resume-from continue restart",
    "report-to": "wandb tensorboard trackio mlflow logger loggers log-with use-wandb",
    "eval-every": "eval-steps eval-interval evaluate-every",
    "save-every": "save-steps save-interval checkpoint-every",
    "objective.name": "objective algorithm algo loss loss-type advantage-estimator",
    "objective.beta": "beta kl kl-coef kl-beta init-kl-coef",
    "rollout.temperature": "temp sampling-temperature",
    "rollout.micro-batch": (
        "micro-batch-size mini-batch-size gradient-accumulation-steps gradient-accumulation "
        "grad-accum grad-accum-steps"
    ),
    "optim.schedule": "scheduler lr-scheduler lr-scheduler-type lr-schedule",
    "optim.warmup": "warmup-ratio warmup-steps lr-warmup",
    "model.dtype": "precision bf16 fp16 torch-dtype mixed-precision",
    "task.system": "system-prompt system",
    "time-limit": "timeout max-time walltime",
    "device": "cuda cpu gpu-id",
}
_MEANT = {word: name for name, words in SYNONYMS.items() for word in words.split()}


def find_setting(config_type: Any, name: str) -> Setting | None:
    """The setting of a flag such as batch, or of a place in a config such as rollout.prompts."""
    flags = flags_of(config_type)
    flag = "--" + name.replace("_", "-")
    if flag in flags:
        return flags[flag]

    path = name.replace("-", "_")
    return next((one for one in flags.values() if one.path == path), None)


def read_setting(config_type: Any, item: str) -> tuple[str, str]:
    """The place, and the text, of a setting NAME=VALUE; ValueError if there is none."""
    name, equals, text = item.partition("=")
    if not equals:
        raise ValueError(f"{item!r} must look like NAME=VALUE, such as steps=20")

    path = name.strip().replace("-", "_")
    if path in SETTINGS:
        ((path, value),) = upgrade_names({path: text}).items()
        text = value if isinstance(value, str) else json.dumps(value)

    setting = find_setting(config_type, path)
    if setting is not None:
        return setting.path, text
    if path.startswith("trl.") and "--trl" in flags_of(config_type):
        return path, text

    removed = removed_from(config_type).get(path)
    if removed is not None:
        raise ValueError(f"{item!r} is no longer a setting: {removed.instead}")

    raise ValueError(f"{item!r}: there is no such setting{suggest_flag(path, config_type)}")


def describe_unknown(flag: str, config_type: Any) -> str:
    """What to do about a flag that the command has not."""
    path = re.sub(r"(^|\.)no_", r"\1", flag.removeprefix("--").replace("-", "_"))
    removed = removed_from(config_type).get(path)
    if removed is not None:
        return f"{flag} is no longer a setting: {removed.instead}"

    return f"unknown flag {flag}{suggest_flag(flag, config_type)}; see --help"


def read_table(config_type: Any, table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A TOML table by the places of its settings: lr = 1e-5 stands for [optim] lr = 1e-5."""
    known = [one.path for one in flags_of(config_type).values()]
    sections = {path.partition(".")[0] for path in known if "." in path} | {"data"}
    places: dict[str, Any] = {}

    values = without_removed(config_type, upgrade_names(flatten(table, sections)), source)
    for name, value in values.items():
        if name in ("lr", "optim.lr") and value == "auto":
            places["lr_auto"] = True
            continue

        setting = find_setting(config_type, name)
        if setting is None and name in sections:
            raise ValueError(f"{source}: {name} = {value!r:.80} must be a table, [{name}]")
        if setting is None:
            hint = suggest(name, [*known, *SETTINGS])
            raise ValueError(f"{source} has an unknown key {name!r}{hint}")
        if setting.path in places:
            raise ValueError(f"{source} sets {setting.path} twice: keep one of them")

        places[setting.path] = value

    return nest(places)


def flatten(table: Mapping[str, Any], sections: Collection[str]) -> dict[str, Any]:
    """The keys of sections by dotted names; [trl] is the list of its options."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if not isinstance(value, Mapping):
            flat[name] = value
        elif name in sections:
            flat |= {f"{name}.{leaf.replace('-', '_')}": one for leaf, one in value.items()}
        elif name == "trl":
            flat[name] = [f"{option}={_to_text(one)}" for option, one in value.items()]
        else:
            flat[name] = value

    return flat


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value

    return json.dumps(value)


def suggest_flag(word: str, config_type: Any) -> str:
    """` (did you mean --batch?)` for a flag of the same meaning or a close name."""
    flags = flags_of(config_type)
    known = list(flags)
    places = {one.path.replace("_", "-"): flag for flag, one in flags.items()}
    name = word.lstrip("-").replace("_", "-").lower()
    leaf = name.rpartition(".")[2]

    meant = [f"--{_MEANT[name]}"] if name in _MEANT else []
    meant += [places[one] for one in difflib.get_close_matches(name, places, n=1, cutoff=0.85)]
    meant += difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.85)
    meant += [f"--{_MEANT[leaf]}"] if leaf in _MEANT else []
    meant += [flag for flag in known if re.split(r"[.]|--", flag)[-1] == leaf]
    if name not in COMMON:  # else a flag of other commands
        meant += difflib.get_close_matches(f"--{name}", known, n=1, cutoff=0.7)

    for flag in meant:
        if flag in known:
            return f" (did you mean {flag}?)"

    starter = passed_on_by(config_type)
    if starter:
        return f" (did you mean {starter} {name}=VALUE?)"

    return ""


def passed_on_by(config_type: Any) -> str | None:
    """The flag for settings of the runs that a command starts."""
    flags = flags_of(config_type)
    return next((flag for flag in ("--set", "--space") if flag in flags), None)


def short_help(config_type: Any, default: Any) -> str:
    """The common flags of a command, with the values of `default`."""
    flags = flags_of(config_type)
    lines = []

    for name, (value, about) in COMMON.items():
        setting = flags.get(f"--{name}")
        if setting is None:
            continue

        given = value_at(default, setting.path)

        if isinstance(given, tuple):
            shown = " ".join(map(str, given))
        else:
            shown = str(given)

        suffix = f" [{shown}]" if given not in (None, (), "") else ""
        lines.append(f"  {f'--{name} {value}':<20} {about}{suffix}")

    return "\n".join(lines)


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config
