"""What a comparison needs to know about a kind of run: `Kind`, and what it reads: `Outcome`.

The kinds are `language.Language`, `games.Games` and `robots.Robots`; `kinds` finds one by a
recipe's name.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mesotron.compare.health import Health, diverged_at, health_of, is_not_finite
from mesotron.compare.record import Contender
from mesotron.config.base import suggest
from mesotron.config.flags import read_setting
from mesotron.runs import RunFolder
from mesotron.runs.files import Row

Scores = dict[str, float]  # by problem
# Settings of a cell that runs side by side with others and is evaluated at its end.
CELL_SETTINGS = ("guard=warn", "save_every=0", "keep=1")
XLA_ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}


class Outcome(NamedTuple):
    scores: Scores  # after training
    start: Scores  # before training; empty if it was not measured
    seconds: float  # time of the training steps
    tokens: float
    steps: int
    health: Health
    update_ratio: float | None  # median RMS of an update / rate; None if it is not logged


@dataclass(frozen=True)
class OptimChoice:
    """An optimizer that can be compared, by the settings in which it differs from the default."""

    about: str  # one line for the tables
    settings: Mapping[str, Any] = field(default_factory=dict)


class Kind(ABC):
    """A kind of run: sets up the config of a cell and reads its folder."""

    name: ClassVar[str]
    config_type: ClassVar[type]
    extra: ClassVar[str]  # whose packages a run needs
    measure: str  # what a score is, in words
    unit: ClassVar[str]  # what a rate means for the contenders, in a sentence
    curve: str  # the metric whose curve is timed against the threshold
    falls: ClassVar[bool] = False  # whether that curve falls as the run learns
    floor: ClassVar[float] = 0.0  # score of every problem for a diverged run
    before: ClassVar[str] = "before training"  # what the scores at the start are
    problems_setting: ClassVar[str]  # the setting for the number of problems
    contested: ClassVar[Sequence[str]]  # settings that differ between contenders
    placed: ClassVar[Sequence[str]] = ("seed", "out", "resume")  # settings that differ between runs
    usual: ClassVar[Sequence[str]]  # default optimizers
    optims: ClassVar[Mapping[str, OptimChoice]]

    recipe: str  # name of the recipe
    config: Any  # the recipe's config with the changes: shared by all runs
    base_rate: float  # the recipe's learning rate in AdamW's unit

    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None:
        self.recipe = recipe
        for item in changes:
            name, _ = read_setting(self.config_type, item)
            if name in self.contested:
                raise ValueError(f"--{name} is each contender's own: use --optims and --rates")
            if name in self.placed:
                raise ValueError(f"--set {name}: every run gets its own, leave it out")

    @staticmethod
    @abstractmethod
    def run(config: Any) -> int:
        """Train with a config, as the command would; returns its exit code."""

    @abstractmethod
    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> Any:
        """The config of one cell."""

    @abstractmethod
    def evaluations(self, run: RunFolder) -> tuple[Scores, Scores]:
        """Scores before and after training; the second is empty for unfinished runs."""

    @abstractmethod
    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Training seconds and tokens spent up to each row."""

    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        if objectives:
            raise ValueError(f"there is no objective {objectives[0]!r} here: remove --objectives")

        contenders = []
        for name in optims:
            check_known("optimizer", name, self.optims)
            about = self.optims[name].about
            contenders.append(Contender(name=name, optim=name, about=about))

        return contenders

    def probe(self, contender: Contender, seed: int, run: Path) -> Any | None:
        """A short run that measures the size of a contender's updates; None if not needed."""
        return None

    @property
    def num_problems(self) -> int:
        """Requested problems for choosing and ranking together; data may have fewer."""
        return attrgetter(self.problems_setting)(self.config)

    def environment(self, threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads)}

    def update_ratio(self, run: RunFolder, rows: Sequence[Row]) -> float | None:
        return None

    def outcome(self, path: Path, last_line: str = "") -> Outcome | None:
        """Results of a run; None if it has neither finished nor diverged (to the floor's score)."""
        if not (path / "config.json").is_file():
            return None

        run = RunFolder(path)
        rows = run.rows("metrics")
        is_finished = run.result is not None

        if not is_finished and is_not_finite(last_line):
            error = last_line
        else:
            error = ""

        has_diverged = diverged_at(rows) is not None or bool(error)

        if not rows or not (is_finished or has_diverged):
            return None

        start, scores = self.evaluations(run)
        if has_diverged and not scores:
            lowest = min([self.floor, *start.values()])  # rewards may be below 0
            scores = dict.fromkeys(start, lowest)

        seconds, tokens = self.cost(rows)
        return Outcome(
            scores=scores,
            start=start,
            seconds=seconds[-1],
            tokens=tokens[-1],
            steps=int(rows[-1]["step"]),
            health=health_of(rows, error),
            update_ratio=self.update_ratio(run, rows),
        )


def check_known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = suggest(name, known)
        raise ValueError(f"unknown {what} {name!r}{hint}: choose from {', '.join(known)}")


def is_for_choosing(problem: str) -> bool:
    """Whether a problem is of the half that chooses rates; the other half ranks."""
    return hashlib.sha256(problem.encode()).digest()[0] % 2 == 0
