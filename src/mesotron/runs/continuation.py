"""The settings of a run that is continued: its own, but for those that may be given anew.

A flag beside `--resume` that the run could not heed is refused: to drop it in silence would be
worse than a no. Which fields may be given anew is said by their metadata, `OVERRIDABLE_ON_RESUME`.
"""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mesotron.config.base import from_plain
from mesotron.runs.folder import RunFolder

Config = TypeVar("Config")


def saved_settings(config_type: type[Config], run: RunFolder) -> Config:
    """The settings that a run began with."""
    return from_plain(config_type, run.config, f"{run.path / 'config.json'}")


def settings_to_resume(config_type: type[Config], path: Path) -> Config:
    """What `--resume PATH` asks for by itself: the defaults of the flags beside it.

    A field that may be given anew and that nothing stands for unless it is, such as a budget, is
    left open: `continued_settings` then takes the run's.

    Args:
        config_type: of the command, with a field `resume`.
        path: the run's folder.

    Raises:
        ValueError: there is no run in that folder, or it is a checkpoint of one.
    """
    refuse_checkpoint(path)
    saved: Any = saved_settings(config_type, RunFolder(path))
    left_open = {item.name: None for item in anew(saved) if item.default is None}
    return replace(saved, **(left_open | {"resume": path}))


def refuse_checkpoint(path: Path) -> None:
    """Say which run a checkpoint is of: its config.json is the model's, and tells nothing here."""
    run = path.absolute().parent.parent
    if (run / "config.json").is_file() and path.absolute().parent == RunFolder(run).checkpoints:
        raise ValueError(
            f"{path} is a checkpoint of a run, which is continued from its newest one: give "
            f"--resume {path.parent.parent}"
        )


def continued_settings(config: Config, run: RunFolder, instead: str = "start a new run") -> Config:
    """The settings to continue a run with: its own, and what was given anew.

    Args:
        config: as asked for, see `settings_to_resume`.
        run: its folder.
        instead: what to do for other settings, for the error.

    Raises:
        ValueError: `config` differs from the run's settings where it may not.
    """
    saved: Any = saved_settings(type(config), run)
    for item, name, asked, own in differences(config, saved):
        raise ValueError(
            f"{run.path} began {'with' if own not in (None, ()) else 'without'} "
            f"{spell(item, name, own)} and goes on with its own settings: leave "
            f"{spell(item, name, asked)} out, or {instead}"
        )
    values = {item.name: getattr(config, item.name) for item in anew(saved)}
    return replace(saved, **{name: value for name, value in values.items() if value is not None})


def anew(config: Any) -> list[Field[Any]]:
    """The fields that may be given anew."""
    return [item for item in fields(config) if item.metadata.get("overridable_on_resume")]


def differences(
    asked: Any, own: Any, prefix: str = ""
) -> Iterator[tuple[Field[Any], str, Any, Any]]:
    """Where two configs differ though they may not: the field, its flag's name, both values."""
    for item in fields(asked):
        name = prefix + item.name.replace("_", "-")
        pair = getattr(asked, item.name), getattr(own, item.name)
        if is_dataclass(pair[0]):
            yield from differences(*pair, prefix=f"{name}.")
        elif not item.metadata.get("overridable_on_resume") and not are_alike(*pair):
            yield item, name, *pair


def are_alike(asked: Any, own: Any) -> bool:
    """Whether two values mean the same; paths do that lead to one place."""
    if isinstance(asked, Path) and isinstance(own, Path):
        return asked.resolve() == own.resolve()
    return asked == own


def spell(item: Field[Any], name: str, value: Any) -> str:
    """A setting as it is typed."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    flag = name if item.metadata.get("positional") else f"--{name}"
    return flag if words in (None, "") else f"{flag} {words}"
