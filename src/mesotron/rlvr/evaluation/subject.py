"""What is evaluated: a run, one of its checkpoints, a model folder or a model's name.

A run brings the model that it started from, so that `mesotron eval runs/last` compares the two;
its task comes with the defaults of the command, see `run_defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesotron.config import ModelConfig
from mesotron.config.base import from_plain
from mesotron.rlvr.models import check_name
from mesotron.rlvr.run_defaults import run_of
from mesotron.runs import RunFolder, newest_whole

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, and what its run says of it."""

    name: str
    model: ModelConfig
    adapter: Path | None = None
    """A folder with LoRA weights to put on the model."""
    start: ModelConfig | None = None
    """What the run started from; None if this is no run."""

    def load(self, device: torch.device) -> tuple[Any, Any]:
        """The model and its tokenizer, LoRA weights merged into it."""
        from mesotron.rlvr.models import load_model  # torch: a wrong name is refused without it

        model, tokenizer = load_model(self.model, device)
        return (add_adapter(model, self.adapter) if self.adapter else model), tokenizer


def find_subject(name: str) -> Subject:
    """Find out what a name means.

    Args:
        name: a run folder, a checkpoint in one, a model folder, or a model's name.

    Raises:
        ValueError: a run without a checkpoint, or of another kind than language models.
    """
    path = Path(name).expanduser()
    if name.rstrip("/") == "runs/last" and not path.exists():
        raise ValueError(
            "there is no run in runs/last yet: train one with mesotron train, or name a model, "
            "such as mesotron eval tiny"
        )
    run = run_of(name)
    if run is None:
        check_name(name)
        return Subject(name, ModelConfig(name=name))
    if path.name.startswith("checkpoint-"):
        return of_run(run, path, name)
    found, damaged = newest_whole(run.checkpoints)
    if found is None:
        raise ValueError(f"{name} has no whole checkpoint: {'; '.join(damaged) or 'none yet'}")
    return of_run(run, found.path, name)


def of_run(run: RunFolder, checkpoint: Path, name: str) -> Subject:
    """A run's checkpoint with what the run's config says."""
    config = run.config
    source = str(run.path / "config.json")
    if not isinstance(config.get("task"), Mapping) or not isinstance(config.get("model"), Mapping):
        raise ValueError(f"{run.path} is no run of a language model on a task: {source} names none")
    start = from_plain(ModelConfig, config["model"], source)
    with_adapter = (checkpoint / "adapter_config.json").is_file()
    return Subject(
        name=name,
        model=start if with_adapter else replace(start, name=str(checkpoint)),
        adapter=checkpoint if with_adapter else None,
        start=start,
    )


def add_adapter(model: Any, folder: Path) -> Any:
    """Merge LoRA weights, read from safetensors alone, into a model."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from safetensors.torch import load_file

    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{folder} has an adapter_config.json but no {weights.name}")
    wrapped = get_peft_model(model, LoraConfig.from_pretrained(str(folder)))
    found = set_peft_model_state_dict(wrapped, load_file(weights))
    if found.unexpected_keys:
        raise ValueError(
            f"{folder} holds LoRA weights of another model: {found.unexpected_keys[0]} is not in "
            "this one"
        )
    return wrapped.merge_and_unload().eval()
