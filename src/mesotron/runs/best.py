"""The best model of a run, not the last: which evaluated checkpoint is the run's model.

    for each held-out evaluation, in the order of the steps:
        keep its checkpoint instead of the kept one
        if it is better by more than one standard error

The standard error is that of the difference between the two models, problem by problem: problems
that both solve or both miss add no noise to it. Noise lets an equal model replace the kept one at
most once in six evaluations, and a slow rise counts once its sum is clear. Of checkpoints that do
not differ the earliest stays: it is the closest to the model that the run started from.

One checkpoint is kept at a time, whatever the pruning. The choice is part of every checkpoint, so a
run that was killed and resumed chooses as if it had never stopped. `best.json` in the run's folder
names the checkpoint for `mesotron export`, `chat` and `eval`; without it they take the newest one.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesotron.runs.checkpoints import damage, newest_whole
from mesotron.runs.files import Row
from mesotron.runs.folder import RunFolder

NAME = "best"  # of the file, without its ending
AVERAGED = "averaged"  # the model that was evaluated, in a checkpoint of a run with --average


# The rule


@dataclass(frozen=True)
class HeldOut:
    """A held-out evaluation of one step."""

    step: int
    score: float
    outcomes: tuple[float, ...]  # of the problems, always in the same order; NaN where unknown
    measure: str = "accuracy"  # or reward


def is_better(new: HeldOut, kept: HeldOut) -> bool:
    """Whether it is better by more than one standard error of the mean paired difference.

    With S the sum of the differences and Q that of their squares, S / n exceeds the standard error
    sqrt((Q - S^2 / n) / (n (n - 1))) exactly if S > 0 and S^2 > Q. Of right and wrong answers that
    is (gained - lost)^2 > gained + lost: one problem alone is never enough.

    Example:
        >>> kept = HeldOut(10, 0.25, (1.0, 0.0, 0.0, 0.0))
        >>> is_better(HeldOut(20, 0.5, (1.0, 1.0, 0.0, 0.0)), kept)
        False
        >>> is_better(HeldOut(30, 0.75, (1.0, 1.0, 1.0, 0.0)), kept)
        True
    """
    differences = []
    for a, b in zip(new.outcomes, kept.outcomes, strict=True):
        if math.isfinite(a - b):
            differences.append(a - b)

    total = math.fsum(differences)
    squares = math.fsum(each * each for each in differences)
    return total > 0 and total * total > squares


class BestCheckpoint:
    """The evaluation whose checkpoint is kept, and the one whose checkpoint is about to be written.

    Example:
        >>> best = BestCheckpoint()
        >>> best.observe(HeldOut(10, 0.5, (1.0, 0.0)))
        True
        >>> best.written(10)
        >>> best.kept.step
        10
    """

    def __init__(self) -> None:
        self.kept: HeldOut | None = None
        self.evaluations = 0
        self.since = 0  # evaluations after the last one that was better
        self._candidate: HeldOut | None = None

    def observe(self, evaluated: HeldOut) -> bool:
        """Take an evaluation; whether its checkpoint must be written, to replace the kept one."""
        self.evaluations += 1
        self.since += 1
        if not math.isfinite(evaluated.score):
            return False

        if self.kept is not None and not is_better(evaluated, self.kept):
            return False

        self._candidate = evaluated
        self.since = 0
        return True

    def written(self, step: int) -> None:
        """A checkpoint of a step is complete, or about to be."""
        if self._candidate is not None and self._candidate.step == step:
            self.kept = self._candidate

        self._candidate = None

    def undone(self) -> None:
        """The weights that were just evaluated are gone: a guard went back to earlier ones."""
        self._candidate = None

    @property
    def name(self) -> str | None:
        """The folder of the kept checkpoint."""
        return None if self.kept is None else f"checkpoint-{self.kept.step}"

    def state(self) -> Row:
        """What a checkpoint holds of the choice."""
        kept = None if self.kept is None else asdict(self.kept)
        return {"kept": kept, "evaluations": self.evaluations, "since": self.since}

    def load(self, state: Row | None, root: Path) -> None:
        """Go on as a checkpoint in `root` did; None if it was written before there was a choice."""
        self._candidate = None
        self.kept = None
        self.evaluations = state["evaluations"] if state else 0
        self.since = state["since"] if state else 0

        kept = state["kept"] if state else None
        if kept and (root / f"checkpoint-{kept['step']}").is_dir():
            self.kept = HeldOut(**{**kept, "outcomes": tuple(kept["outcomes"])})

    def record(self) -> Row:
        """What `best.json` holds; no step where nothing is kept."""
        if self.kept is None:
            return {"step": None, "evaluations": self.evaluations}

        return {
            "step": self.kept.step,
            "score": self.kept.score,
            "measure": self.kept.measure,
            "problems": len(self.kept.outcomes),
            "evaluations": self.evaluations,
        }


# The run's model, for those who read its folder


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that stands for a run."""

    checkpoint: Path
    note: str | None = None  # why this one, in a line; None where there was no choice
    record: Row | None = None  # of best.json, if it chose

    @property
    def weights(self) -> Path:
        """The folder of the model that was evaluated."""
        averaged = self.checkpoint / AVERAGED
        return averaged if averaged.is_dir() else self.checkpoint


def choose_checkpoint(run: RunFolder, name: str) -> Chosen:
    """The best evaluated checkpoint of a run, or the newest one where there is none; ValueError
    without an intact checkpoint."""
    newest, damaged = newest_whole(run.checkpoints)
    if newest is None:
        why = "; ".join(damaged) or "none yet"
        raise ValueError(f"{name} has no complete checkpoint: {why}")

    record = read_record(run)
    if record is None:
        return Chosen(newest.path)

    best = run.checkpoints / f"checkpoint-{record['step']}"
    problem = damage(best)
    if problem is not None:
        return Chosen(newest.path, f"{name}: {newest.path.name}, the newest; the best: {problem}")

    return Chosen(best, f"{name}: {describe(record, newest.step)}", record)


def read_record(run: RunFolder) -> Row | None:
    """best.json, if it names a step."""
    record = run.load(NAME)
    if record is None or record.get("step") is None:
        return None

    numbers = [record.get(key) for key in ("step", "score", "problems", "evaluations")]
    is_valid = all(type(number) in (int, float) for number in numbers)
    if not is_valid or type(record["step"]) is not int:
        raise ValueError(f"{run.path / 'best.json'} names no checkpoint: remove it")

    return record


def describe(record: Row, last: int) -> str:
    """Which checkpoint was chosen and how good it is, in a line."""
    step = record["step"]
    measure = "mean reward" if record.get("measure") == "reward" else "accuracy"
    score = f"{measure} {record['score']:.3f} on {record['problems']} problems"
    text = f"checkpoint-{step}, the best of {record['evaluations']} evaluations ({score}"

    fresh = record.get("fresh")
    if fresh:
        text += f", {fresh['value']:.3f} on {fresh['problems']} others"

    where = "and the last" if step == last else f"the last is checkpoint-{last}"
    return f"{text}); {where}"


def outcomes_of(evaluation: Row) -> tuple[float, ...]:
    """The score of each problem in an `Evaluation.to_json()`."""
    transcripts: Sequence[dict[str, Any]] = evaluation["transcripts"]
    by_reward = evaluation.get("measure") == "reward"
    outcomes = []
    for one in transcripts:
        value = one["reward"] if by_reward else one["correct"]
        outcomes.append(math.nan if value is None else float(value))

    return tuple(outcomes)
