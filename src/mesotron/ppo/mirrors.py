"""Mirrors of the metrics: Weights & Biases and TensorBoard, if asked for.

The run folder is the source of truth; nothing is read back from here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mesotron.config import SnakeConfig


class Mirrors:
    """Send each row of metrics to the services that the config names.

    Args:
        config: `wandb`, `wandb_project`, `wandb_entity`, `run_name`, `tensorboard`.
        path: the run folder; its name is the run's.

    Raises:
        ValueError: a service's package is not installed.
    """

    def __init__(self, config: SnakeConfig, path: Path) -> None:
        self._wandb: Any = _start_wandb(config, path) if config.wandb else None
        self._board: Any = _start_tensorboard(path) if config.tensorboard else None

    def write(self, row: dict[str, Any]) -> None:
        """Send one row; `step` is its place."""
        values = {name: value for name, value in row.items() if name != "step"}
        if self._wandb is not None:
            self._wandb.log(values, step=row["step"])
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, row["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        if self._board is not None:
            self._board.close()


def _start_wandb(config: SnakeConfig, path: Path) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ValueError("--wandb needs its package: pip install wandb") from error
    values = {name: str(value) if isinstance(value, Path) else value
              for name, value in dataclasses.asdict(config).items()}  # fmt: skip
    return wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity,
        name=path.name,
        config=values,
        dir=str(path),
    )


def _start_tensorboard(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ValueError("--tensorboard needs its package: pip install tensorboard") from error
    return SummaryWriter(str(path / "tensorboard"))
