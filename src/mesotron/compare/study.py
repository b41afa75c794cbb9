"""A sweep's study in Optuna: which trial is next, and what came of it.

Kept in a journal file that the processes of one machine share, or in a database that machines
share. A trial that nobody works on any more is taken up by whoever finds it.

References: Akiba et al., "Optuna", 2019, arXiv 1907.10902.
"""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from mesotron.compare.space import Dimension, Space, Value
from mesotron.config import SweepConfig
from mesotron.runs.files import append_row, read_rows

ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
COUNTED = (*ENDED, TrialState.RUNNING)


@dataclass
class Trial:
    """A trial that this process works on.

    Args:
        number: in the study.
        values: of the dimensions.
        run: its run folder.
        claim: a locked file: while it is held, by us or by the trial's process, the trial is ours.
    """

    number: int
    values: dict[str, Value]
    run: Path
    claim: IO[str]


class Study:
    """The study of a sweep.

    Args:
        space: what is searched.
        config: where it is kept.
        folder: of the trials' runs.
    """

    def __init__(self, space: Space, config: SweepConfig, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self.config, self.folder = space, config, folder
        storage: Any = config.storage
        if storage is None:
            storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
        self.study = optuna.create_study(
            study_name=config.study or space.name,
            storage=storage,
            direction=config.goal or space.goal,
            load_if_exists=True,
        )
        self._refuse_another_aim()

    @property
    def metric(self) -> str | None:
        """What is searched for; None is the run's own score."""
        return self.config.metric or self.space.metric

    def _refuse_another_aim(self) -> None:
        """Scores of one study must mean the same, and be wanted in the same direction."""
        wanted = {"goal": self.config.goal or self.space.goal, "metric": self.metric or "score"}
        attributes = self.study.user_attrs
        held = {"goal": self.study.direction.name.lower()}
        held["metric"] = attributes.get("metric", wanted["metric"])
        for name, value in wanted.items():
            if held[name] != value:
                raise ValueError(
                    f"the study {self.study.study_name} has the {name} {held[name]}, not {value}: "
                    "give --study or --out another name"
                )
        if "metric" not in attributes:
            self.study.set_user_attr("metric", wanted["metric"])

    def next(self) -> Trial | None:
        """A trial that was left by its worker, or a new one; None if there are enough."""
        found = self.study.get_trials(deepcopy=False)
        for trial in found:
            if trial.state == TrialState.RUNNING and (taken := self._take_up(trial)):
                return taken
        if sum(trial.state in COUNTED for trial in found) >= self.config.trials:
            return None
        trial = self.study.ask()
        claim = self._claim(trial.number)
        assert claim is not None  # the number is new
        # By the number: workers that begin together do not draw the same values.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.config.seed * 1_000_003 + trial.number, multivariate=False
        )
        values = {one.name: suggest(trial, one) for one in self.space.dimensions}
        return Trial(trial.number, values, self._run(trial.number), claim)

    def _run(self, number: int) -> Path:
        return self.folder / "trials" / f"trial-{number:04d}"

    def _claim(self, number: int) -> IO[str] | None:
        """Lock a trial's file; None if somebody holds it."""
        path = self._run(number).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def _take_up(self, trial: FrozenTrial) -> Trial | None:
        """A running trial of this folder whose worker is gone."""
        if not self._run(trial.number).with_suffix(".lock").exists():
            return None  # another machine's
        if any(one.name not in trial.params for one in self.space.dimensions):
            return None  # its worker is about to draw them, or died there: one trial fewer
        claim = self._claim(trial.number)
        if claim is None:
            return None
        now = self.study.get_trials(deepcopy=False)[trial.number]
        if now.state != TrialState.RUNNING:  # it ended between the look and the claim
            claim.close()
            return None
        return Trial(trial.number, dict(trial.params), self._run(trial.number), claim)

    def complete(self, trial: Trial, score: float) -> None:
        """A trial that ended with a score."""
        self.study.tell(trial.number, score)
        trial.claim.close()

    def prune(self, trial: Trial, why: str) -> None:
        """A trial that the watch calls dead."""
        self._end(trial, TrialState.PRUNED, why)

    def fail(self, trial: Trial, why: str) -> None:
        """A trial that crashed: it does not count."""
        self._end(trial, TrialState.FAIL, why)

    def _end(self, trial: Trial, state: TrialState, why: str) -> None:
        append_row(self._reasons, {"trial": trial.number, "state": state.name, "why": why})
        self.study.tell(trial.number, state=state)
        trial.claim.close()

    @property
    def _reasons(self) -> Path:
        return self.folder / "reasons.jsonl"

    def reasons(self) -> dict[int, str]:
        """Why the trials of this folder that have no score have none."""
        return {row["trial"]: row["why"] for row in read_rows(self._reasons)}

    def leave(self, trial: Trial) -> None:
        """Let go of a trial that was stopped: it goes on when somebody takes it up."""
        trial.claim.close()

    def ended(self) -> list[FrozenTrial]:
        """Trials with a score, best first, then those that were pruned."""
        found = [one for one in self.study.get_trials(deepcopy=False) if one.state in ENDED]
        sign = 1 if self.study.direction == optuna.study.StudyDirection.MINIMIZE else -1
        return sorted(
            found,
            key=lambda one: (one.value is None, 0.0 if one.value is None else sign * one.value),
        )


def suggest(trial: optuna.Trial, one: Dimension) -> Value:
    """Draw a value of a dimension."""
    if one.choices:
        chosen = trial.suggest_categorical(one.name, one.choices)
        assert chosen is not None  # no file offers it
        return chosen
    if one.whole:
        return trial.suggest_int(one.name, int(one.low), int(one.high), log=one.log)
    return trial.suggest_float(one.name, one.low, one.high, log=one.log)
