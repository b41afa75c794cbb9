"""Where a run starts: in a new folder, or at a stopped run's checkpoint with its own settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from mesotron.config import EvalConfig, SftConfig, TrainConfig, VlaTrainConfig
from mesotron.config.base import flag_of, from_plain, spell
from mesotron.runs.checkpoints import Checkpoint, newest_whole
from mesotron.runs.folder import RunFolder, check_free, describe_environment
from mesotron.runs.own_runs import is_own, remember
from mesotron.runs.process import is_main
from mesotron.runs.trust import check_trusted, code_names, search_working_folder

C = TypeVar("C")
RunConfig = TypeVar("RunConfig", TrainConfig, SftConfig, VlaTrainConfig)


@dataclass(frozen=True)
class Plan(Generic[RunConfig]):
    """What to run: the settings, where, and from which checkpoint."""

    config: RunConfig
    path: Path
    folder: RunFolder | None = None  # to resume; a new one is made once everything is loaded
    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()  # for the user, such as which checkpoint was damaged
    is_longer: bool = False  # than the run was planned to be
    whole: "Plan[Any] | None" = None  # the run whose supervised start this is

    def open_folder(self, device: str, threads: int) -> RunFolder:
        if self.folder is not None:
            return self.folder
        environment = describe_environment(device, self.config.seed, threads=threads)
        folder = RunFolder.create(self.path, self.config, environment)
        remember(self.path, code_names(self.config))
        return folder


def plan_new(config: RunConfig, path: Path) -> Plan[RunConfig]:
    if is_main():  # by now it may have made the folder that the others see
        check_free(path)
    return Plan(config, path)


def plan_resume(config: RunConfig, evaluate: str, instead: str) -> Plan[RunConfig]:
    """The plan of a stopped run: its own settings, its newest intact checkpoint."""
    resume = config.resume
    assert resume is not None

    path = resume.resolve()  # runs/last may come to point at another run
    folder = RunFolder(path)
    planned = folder.config.get("steps")
    is_longer = isinstance(planned, int) and config.steps > planned
    if folder.result is not None and not is_longer:
        raise ValueError(
            f"{resume} has finished: use {evaluate} {resume}, train on with --steps above "
            f"{planned}, or start a new run"
        )

    if is_main():
        with folder:  # refuses a run that another process is writing
            pass

    settings = resumed_settings(config, RunFolder(resume), instead)
    if isinstance(planned, int) and config.steps < planned:
        raise ValueError(
            f"{resume} was planned for {planned} steps: --steps {config.steps} must be more, or "
            "leave it out"
        )
    checkpoint, damaged = newest_whole(folder.checkpoints)
    notes = [f"skipping a damaged checkpoint: {problem}" for problem in damaged]

    if checkpoint:
        start = f"step {checkpoint.step}"
    else:
        start = "the start: no intact checkpoint"

    notes.append(f"resuming {path} from {start}")

    if is_longer:
        notes.append(
            f"training on from {planned} to {settings.steps} steps; a falling rate now reaches 0 "
            f"at step {settings.steps}"
        )

    return Plan(settings, path, folder, checkpoint, tuple(notes), is_longer)


def settings_to_resume(config_type: type[C], path: Path) -> C:
    """The defaults of the flags beside `--resume PATH`."""
    run = path.absolute().parent.parent
    if (run / "config.json").is_file() and path.absolute().parent == RunFolder(run).checkpoints:
        raise ValueError(f"{path} is a checkpoint: give its run, --resume {path.parent.parent}")

    values = RunFolder(path).config
    for name, kind in (("train", TrainConfig), ("sft", SftConfig)):
        if kind is not config_type and {x.name for x in fields(kind)} <= {*values}:
            raise ValueError(f"{path} is a run of {name}: use mesotron {name} --resume {path}")

    saved: Any = from_plain(config_type, values, str(path / "config.json"))

    # A field such as a budget stays None unless given: `resumed_settings` then takes the run's.
    left_open: dict[str, Any] = {}
    for item in fields(saved):
        is_optional = item.default is None or item.name == "trust"  # no folder vouches for itself
        if item.metadata.get("overridable_on_resume") and is_optional:
            left_open[item.name] = item.default

    left_open["resume"] = path
    return replace(saved, **left_open)


def resumed_settings(config: C, run: RunFolder, instead: str = "start a new run") -> C:
    """A run's own settings with the overridable ones given now; other differences are refused."""
    source = run.path / "config.json"
    saved: Any = from_plain(type(config), run.config, str(source))
    names = code_names(saved)
    if is_own(run.path, names):
        search_working_folder()  # which holds the files that they meant when the run was started
    else:
        check_trusted(names, source, trust=getattr(config, "trust", False))

    for name, given, own in differences(config, saved):
        had = f"{'without' if own in (None, ()) else 'with'} {spell(name, own)}"
        raise ValueError(f"{run.path} started {had}: leave {spell(name, given)} out, or {instead}")

    return _override(saved, config)


def _override(saved: Any, given: Any) -> Any:
    values = {}
    for item in fields(saved):
        own = getattr(saved, item.name)
        new = getattr(given, item.name)
        if is_dataclass(own):
            values[item.name] = _override(own, new)
        elif item.metadata.get("overridable_on_resume") and new is not None:
            values[item.name] = new

    return replace(saved, **values)


def differences(given: Any, own: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields that differ and may not: name, given value, the run's value."""
    for item in fields(given):
        a = getattr(given, item.name)
        b = getattr(own, item.name)
        if is_dataclass(a):
            yield from differences(a, b, f"{prefix}{item.name}.")
        elif item.metadata.get("overridable_on_resume") or a == b:
            continue
        elif not (isinstance(a, Path) and isinstance(b, Path) and a.resolve() == b.resolve()):
            yield flag_of(item, prefix), a, b


def run_of(name: str) -> RunFolder | None:
    """The run behind the name of its folder or of one of its checkpoints; None if it is neither."""
    path = Path(name).expanduser()
    if (path / "checkpoints").is_dir():
        return RunFolder(path)
    if path.name.startswith("checkpoint-") and (path.parent.parent / "checkpoints").is_dir():
        return RunFolder(path.parent.parent)

    return None


def eval_defaults(name: str) -> EvalConfig:
    """The defaults of `mesotron eval NAME`: task and completion length of a run are its own."""
    run = run_of(name)
    saved = {} if run is None else run.config
    if run is None or not isinstance(saved.get("task"), Mapping):
        return EvalConfig(model=name)

    values = {"model": name, "task": saved["task"]}
    rollout = saved.get("rollout")
    if isinstance(rollout, Mapping) and "max_tokens" in rollout:
        values["max_tokens"] = rollout["max_tokens"]

    made = from_plain(EvalConfig, values, str(run.path / "config.json"))
    if made.task.env and not is_own(run.path, made.task.env):  # to be named again
        made = replace(made, task=replace(made.task, env=()))

    return replace(made, reward=own_reward(run))


def environments_of(name: str) -> list[str]:
    """The environments that a run was trained in; none for a model."""
    run = run_of(name)
    task = {} if run is None else run.config.get("task")
    return list(task.get("env") or ()) if isinstance(task, Mapping) else []


def own_reward(run: RunFolder) -> tuple[str, ...]:
    """The user's own reward of a run that they started; none of another's."""
    reward = run.config.get("reward")
    parts = reward.get("parts") if isinstance(reward, Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        return ()

    code = [part for part in parts if ":" in part]
    return tuple(parts) if code and is_own(run.path, code) else ()
