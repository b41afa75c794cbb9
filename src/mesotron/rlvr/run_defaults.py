"""What `mesotron eval RUN` takes from the run: its task and its longest completion.

They are the defaults that flags win over, so that `--task.num-eval 500` changes that one value.
Read before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mesotron.config import EvalConfig, TaskConfig
from mesotron.config.base import from_plain
from mesotron.runs import RunFolder


def run_of(name: str) -> RunFolder | None:
    """The run that a name means: its folder, or one of its checkpoints; None if it is no run."""
    path = Path(name).expanduser()
    if (path / "checkpoints").is_dir():
        return RunFolder(path)
    if path.name.startswith("checkpoint-") and (path.parent.parent / "checkpoints").is_dir():
        return RunFolder(path.parent.parent)
    return None


def eval_defaults(name: str) -> EvalConfig:
    """The defaults of an evaluation: a run's own, else those of the config.

    Args:
        name: what is to be evaluated.

    Example:
        >>> eval_defaults("tiny").task.name
        'arith'
    """
    run = run_of(name)
    if run is None:
        return EvalConfig(model=name)
    config, source = run.config, str(run.path / "config.json")
    if not isinstance(config.get("task"), Mapping):
        return EvalConfig(model=name)
    return EvalConfig(
        model=name,
        task=from_plain(TaskConfig, config["task"], source),
        max_tokens=(config.get("rollout") or {}).get("max_tokens", EvalConfig.max_tokens),
    )


def describe_defaults() -> str:
    """For the help: where an evaluation's defaults come from."""
    return "The task and the longest completion of a run are its own, unless a flag says otherwise."
