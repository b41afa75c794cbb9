"""What is evaluated, chatted with or exported: a run, a checkpoint, a model folder or a name."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesotron.config import ModelConfig
from mesotron.config.base import from_plain
from mesotron.models.names import check_name
from mesotron.runs.best import Chosen, choose_checkpoint
from mesotron.runs.checkpoints import damage, newest_whole
from mesotron.runs.folder import START
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
    chosen: Chosen | None = None  # the checkpoint of a run that was named without one

    def at_start(self, mark: str) -> Subject | None:
        """The model that the run started from, named with a mark; None if this is no run."""
        if self.start is None:
            return None

        return replace(
            self, name=f"{self.start.name} ({mark})", model=self.start, adapter=None, chosen=None
        )

    def say_which(self) -> None:
        """Say in a line which checkpoint of a run was chosen."""
        if self.chosen is not None and self.chosen.note is not None:
            print(self.chosen.note, file=sys.stderr, flush=True)

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

    if path.name.startswith("checkpoint-"):
        chosen = Chosen(_whole(path))
    else:
        chosen = choose_checkpoint(run, name)

    config = run.config
    source = str(run.path / "config.json")
    if not isinstance(config.get("task"), Mapping) or not isinstance(config.get("model"), Mapping):
        raise ValueError(f"{run.path} is not a run of a language model: {source} has no task")

    start = from_plain(ModelConfig, config["model"], source)
    supervised, _ = newest_whole(run.path / START / "checkpoints")
    if supervised is not None:  # reinforcement learning started from there
        start = replace(start, name=str(supervised.path))

    template = _template_variables(config)
    weights = chosen.weights
    if (weights / "adapter_config.json").is_file():
        return Subject(name, start, weights, start, template, chosen)

    trained = replace(start, name=str(weights))
    return Subject(name, trained, None, start, template, chosen)


def _whole(checkpoint: Path) -> Path:
    problem = damage(checkpoint)
    if problem is not None:
        raise ValueError(f"{checkpoint} is damaged: {problem}; name another one, or its run")

    return checkpoint


def _template_variables(config: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that a run set with --trl."""
    settings = dict(item.split("=", 1) for item in config.get("trl") or ())
    return json.loads(settings.get("chat_template_kwargs", "{}"))
