"""Trials of a sweep as run folders: how each command is told where to write, resumed and scored."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from mesotron.compare.kind import diverged_at
from mesotron.config import WatchSettings
from mesotron.runs import RunFolder
from mesotron.runs.files import read_rows
from mesotron.watch.engine import Engine

# The share of a run's last rows over which a metric is averaged.
LAST = 0.1


@dataclass(frozen=True)
class Command:
    """What a sweep must know of a command.

    Args:
        place: flags that say where the run is written; {parent} and {name} stand for its folder.
        threads: the flag of CPU threads, if it has one.
        usual: flags of a trial among others, which the sweep's own words win over.
        score: where its own score lies in result.json.
        variables: of its process, when it has one thread.
    """

    place: tuple[str, ...]
    score: tuple[str, ...]
    threads: str | None = None
    usual: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


XLA = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
COMMANDS = {
    "train": Command(("--out={parent}/{name}",), ("after", "value"), "--threads"),
    "vla train": Command(
        ("--out={parent}/{name}",), ("success",), "--threads", usual=("--workers=1",)
    ),
    "ppo snake": Command(
        ("--save-dir={parent}", "--run-name={name}"), ("greedy_fruit",), variables=XLA
    ),
}


def command_name(words: Sequence[str]) -> str:
    """Which command the words are.

    Example:
        >>> command_name(["ppo", "snake", "--use-muon"])
        'ppo snake'
    """
    for length in (1, 2):
        if " ".join(words[:length]) in COMMANDS:
            return " ".join(words[:length])
    known = ", ".join(COMMANDS)
    raise ValueError(f"mesotron {' '.join(words[:2])} cannot be swept; what can: {known}")


def start_words(words: Sequence[str], run: Path, threads: int) -> list[str]:
    """The words of a new run, with where it writes."""
    name = command_name(words).split()
    command = COMMANDS[" ".join(name)]
    place = [flag.format(parent=run.parent, name=run.name) for flag in command.place]
    given = [*name, *command.usual, *words[len(name) :]]
    return [*given, *place, *([f"{command.threads}={threads}"] if command.threads else [])]


def resume_words(words: Sequence[str], run: Path) -> list[str]:
    """The words that continue a run."""
    return [*command_name(words).split(), f"--resume={run}"]


def read_score(run: Path, metric: str | None, words: Sequence[str]) -> float | None:
    """The score of a run that has ended; None if it has not, or has no such metric.

    Args:
        run: its folder.
        metric: a name in metrics.jsonl or result.json, as here or as W&B has it
            (train/reward, eval/greedy_fruit); None is the command's own score.
        words: of its command.
    """
    if not (run / "config.json").is_file():
        return None
    folder = RunFolder(run)
    result = folder.result
    if result is None:
        return None
    if metric is None:
        return look_up(result, COMMANDS[command_name(words)].score)
    name = metric.removeprefix("train/")
    values = [row[name] for row in folder.rows("metrics") if name in row]
    if values:
        return fmean(values[-max(1, round(LAST * len(values))) :])
    return look_up(result, name.removeprefix("eval/").split("."))


def look_up(values: Any, path: Sequence[str]) -> float | None:
    """A number in nested dictionaries, if it is there."""
    for name in path:
        values = values.get(name) if isinstance(values, dict) else None
    return float(values) if isinstance(values, int | float) else None


class Pulse:
    """The watch on a run that another process writes.

    Args:
        run: its folder, which need not be there yet.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self._engine = Engine(WatchSettings())
        self._seen = 0

    def dead(self) -> str | None:
        """Why the run is dead, in a sentence, once it is; None while it lives."""
        rows = read_rows(self.run / "metrics.jsonl")
        fresh, self._seen = rows[self._seen :], len(rows)
        if (broken := diverged_at(fresh)) is not None:
            return f"the loss is not a number at step {broken}"
        events = [event for row in fresh for event in self._engine.update(row)]
        return next((e.sentence(False) for e in events if e.severity == "stop"), None)
