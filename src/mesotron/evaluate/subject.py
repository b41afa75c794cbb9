"""What is evaluated, chatted with or exported: a run, a checkpoint, a model folder or a name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesotron.config import ModelConfig
from mesotron.config.base import from_plain
from mesotron.models.names import check_name
from mesotron.runs import RunFolder, newest_whole
from mesotron.runs.checkpoints import damage
from mesotron.runs.resume import run_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Subject:
    """A model, and if it comes from a run, the model that the run started from."""

    name: str
    model: ModelConfig
    adapter: Path | None = None  # folder with LoRA weights to merge into the model
    start: ModelConfig | None = None  # the model that the run started from; None if not a run
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template

    def at_start(self, mark: str) -> Subject | None:
        """The model that the run started from, named with a mark; None if this is no run."""
        if self.start is None:
            return None

        return replace(self, name=f"{self.start.name} ({mark})", model=self.start, adapter=None)

    def load(self, device: torch.device) -> tuple[Any, Any]:
        """The model in evaluation mode, its adapter merged, and its tokenizer."""
        from mesotron.models.load import load_model

        config = self.model
        if device.type == "cpu":  # a run on a GPU may have had another precision
            config = replace(config, dtype="float32")

        model, tokenizer = load_model(config, device)
        tokenizer.template_kwargs = self.template
        if self.adapter is not None:
            model = self._merge_adapter(model, self.adapter)

        return model, tokenizer

    def _merge_adapter(self, model: Any, folder: Path) -> Any:
        from peft import get_peft_model

        from mesotron.models.adapters import load_adapter, lora_config

        lora = lora_config(self.model)  # as the run made it: no other file is believed
        if lora is None:
            raise ValueError(f"{folder} has LoRA weights, but the run has --lora 0")

        wrapped: Any = get_peft_model(model, lora)
        load_adapter(wrapped, folder)

        # Merged into rounded weights, a small update would be lost.
        is_rounded = self.model.load != "full"
        merged = wrapped if is_rounded else wrapped.merge_and_unload()
        return merged.eval()


def find_subject(name: str) -> Subject:
    """Resolve a run folder, a checkpoint in one, a model folder, or a model's name."""
    path = Path(name).expanduser()
    if name.rstrip("/") == "runs/last" and not path.exists():
        raise ValueError("there is no run in runs/last: make one with mesotron train, or name it")

    run = run_of(name)
    if run is None:
        check_name(name)
        return Subject(name, ModelConfig(name=name))

    is_checkpoint = path.name.startswith("checkpoint-")
    checkpoint = _whole(path) if is_checkpoint else _newest_checkpoint(run, name)

    config = run.config
    source = str(run.path / "config.json")
    if not isinstance(config.get("task"), Mapping) or not isinstance(config.get("model"), Mapping):
        raise ValueError(f"{run.path} is not a run of a language model: {source} has no task")

    start = from_plain(ModelConfig, config["model"], source)
    template = _template_variables(config)
    if (checkpoint / "adapter_config.json").is_file():
        return Subject(name, start, checkpoint, start, template)

    trained = replace(start, name=str(checkpoint))
    return Subject(name, trained, None, start, template)


def _whole(checkpoint: Path) -> Path:
    problem = damage(checkpoint)
    if problem is not None:
        raise ValueError(f"{checkpoint} is damaged: {problem}; name another one, or its run")

    return checkpoint


def _newest_checkpoint(run: RunFolder, name: str) -> Path:
    newest, damaged = newest_whole(run.checkpoints)
    if newest is None:
        why = "; ".join(damaged) or "none yet"
        raise ValueError(f"{name} has no complete checkpoint: {why}")

    return newest.path


def _template_variables(config: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that a run set with --trl."""
    settings = dict(item.split("=", 1) for item in config.get("trl") or ())
    return json.loads(settings.get("chat_template_kwargs", "{}"))
