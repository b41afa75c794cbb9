"""What a tournament and a sweep must know of a kind of run: how one is set up, started and read.

A kind is met through this class alone. Nothing here loads a model: everything is read from run
folders, so it works on runs that another process has made.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mesotron.compare.record import Contender, Verdict
from mesotron.config import WatchSettings
from mesotron.runs import RunFolder
from mesotron.watch.diagnosis import diagnose
from mesotron.watch.engine import Engine, scale_to_run_length

Row = dict[str, Any]

# Last words of a run whose weights were not numbers any more though every loss that it had logged
# was one: what refuses to save them, and what PyTorch says when it is to sample from such a model.
SPOILED = ("weights are not finite", "probability tensor contains either `inf`, `nan`")


class Health(NamedTuple):
    """What the watch says of a run: how it ended, why, and its sentence."""

    verdict: Verdict
    cause: str | None
    story: str


@dataclass(frozen=True)
class Outcome:
    """What a finished run has shown."""

    scores: dict[str, float]
    """Of each problem of the evaluation by its id, after training."""
    start: dict[str, float]
    """The same before training; empty if it was not measured."""
    seconds: float
    """Time of the training steps."""
    tokens: float
    steps: int
    health: Health
    update_ratio: float | None
    """Median RMS of an update over the rate; None if the run does not tell."""


class Kind(ABC):
    """One kind of run, set up for one recipe.

    Args:
        recipe: the recipe's name.
        changes: NAME=VALUE settings that differ from it, see `changes.change`.
    """

    name: ClassVar[str]
    measure: ClassVar[str]
    """What a score is, in words."""
    unit: ClassVar[str]
    """What a rate means to the contenders, in a sentence for the page."""
    curve: ClassVar[str]
    """The metric whose curve is timed against the threshold."""
    falls: ClassVar[bool] = False
    """Whether that curve falls as the run learns."""
    floor: ClassVar[float] = 0.0
    """Score of every problem for a run that has diverged."""
    before: ClassVar[str] = "before training"
    """What the scores are that a run starts from."""
    problems_setting: ClassVar[str]
    """The setting of the recipe that says how many problems there are."""
    usual: ClassVar[tuple[str, ...]]
    """Optimizers of a tournament that names none."""

    recipe: str
    config: Any
    """The recipe's config with the changes: what every run shares."""

    @abstractmethod
    def __init__(self, recipe: str, changes: Sequence[str] = ()) -> None: ...

    @property
    @abstractmethod
    def base_rate(self) -> float:
        """The recipe's learning rate in AdamW's unit."""

    @abstractmethod
    def contenders(self, optims: Sequence[str], objectives: Sequence[str]) -> list[Contender]:
        """Those who take part; a name that is not known is refused with the known ones."""

    @abstractmethod
    def settings(
        self, contender: Contender, rate: float, seed: int, run: Path, gain: float = 1.0
    ) -> Any:
        """The whole config of one run.

        Args:
            contender: one of `contenders`.
            rate: in AdamW's unit.
            seed: of everything that is drawn.
            run: the folder that it writes.
            gain: the matrices' own rate over `rate`.
        """

    def check(self, settings: Any) -> None:  # noqa: B027
        """Refuse what the kind's own command would refuse beyond the config's own checks."""

    def probe(self, contender: Contender, seed: int, run: Path) -> Any | None:
        """A short run that measures how large a contender's updates are; None if none is needed."""
        return None

    @abstractmethod
    def resuming(self, run: Path) -> Any:
        """The config that continues a run that was stopped."""

    @property
    @abstractmethod
    def num_problems(self) -> int:
        """Problems that choose and judge together, as asked for; data may hold fewer."""

    @abstractmethod
    def evaluations(self, run: RunFolder) -> tuple[dict[str, float], dict[str, float]]:
        """Scores by problem before and after training; the second is empty if it has not ended."""

    @abstractmethod
    def cost(self, rows: Sequence[Row]) -> tuple[list[float], list[float]]:
        """Training seconds and tokens that were spent up to each row."""

    def uses_gpu(self) -> bool:
        """Whether a run takes a GPU if there is one."""
        return True

    def environment(self, threads: int) -> dict[str, str]:
        """Variables of the process of a run."""
        return {"OMP_NUM_THREADS": str(threads)}

    def update_ratio(self, run: RunFolder, rows: Sequence[Row]) -> float | None:
        """Median over steps of an update's RMS over its rate; None if the run does not tell."""
        return None

    def outcome(self, path: Path, last_line: str = "") -> Outcome | None:
        """What a run has shown; None if it has neither ended nor diverged.

        A run whose loss, or whose weights, are not numbers has ended: every problem then has the
        floor's score.

        Args:
            path: its folder.
            last_line: the last that its process wrote, which may tell of spoiled weights.
        """
        if not (path / "config.json").is_file():
            return None
        run = RunFolder(path)
        rows = run.rows("metrics")
        start, scores = self.evaluations(run)
        ending = last_line if run.result is None and is_spoiled(last_line) else ""
        broken = diverged_at(rows) is not None or bool(ending)
        if broken and not scores:
            scores = dict.fromkeys(start, self.floor)
        if not rows or (run.result is None and not broken):
            return None
        seconds, tokens = self.cost(rows)
        return Outcome(
            scores=scores,
            start=start,
            seconds=seconds[-1],
            tokens=tokens[-1],
            steps=int(rows[-1]["step"]),
            health=health_of(rows, ending),
            update_ratio=self.update_ratio(run, rows),
        )


def diverged_at(rows: Sequence[Row]) -> int | None:
    """The first step whose loss is not a number.

    Example:
        >>> diverged_at([{"step": 1, "loss": 0.5}, {"step": 2, "loss": math.nan}])
        2
    """
    losses = (
        (int(row["step"]), [v for k, v in row.items() if k == "loss" or k.startswith("loss/")])
        for row in rows
    )
    return next((step for step, each in losses if not all(map(math.isfinite, each))), None)


def is_spoiled(last_line: str) -> bool:
    """Whether a process's last line says that the weights were not numbers any more.

    Example:
        >>> is_spoiled("ValueError: weights are not finite after step 4, so training has stopped")
        True
    """
    return any(words in last_line for words in SPOILED)


def health_of(rows: Sequence[Row], ending: str = "") -> Health:
    """What the watch says of a run's rows, by the settings that suit their number.

    Args:
        rows: of metrics.
        ending: last words of a run with spoiled weights.
    """
    engine = Engine(scale_to_run_length(WatchSettings(), len(rows)))
    events = [event for row in rows for event in engine.update(row)]
    story = diagnose(rows, engine, events)
    broken = diverged_at(rows)
    if broken is not None:
        return Health("diverged", story.cause, f"diverged at step {broken}: {story.text()}")
    if ending:
        step = int(rows[-1]["step"])
        return Health("diverged", story.cause, f"diverged after step {step}: {ending}")
    return Health(story.condition, story.cause, story.text())


def is_for_choosing(problem: str) -> bool:
    """Whether a problem's score helps to choose rates; the others judge. By a hash of its id, so
    that it is the same for every contender, seed and machine."""
    return hashlib.sha256(problem.encode()).digest()[0] % 2 == 0
