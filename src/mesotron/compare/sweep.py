"""`mesotron sweep FILE`: trials side by side, each a run; one that the watch calls dead ends early.

Several of these may work on one study at once. W&B's own way is `wandb sweep FILE`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mesotron.compare.kind import is_spoiled
from mesotron.compare.space import Space, read_space
from mesotron.compare.trials import (
    COMMANDS,
    Pulse,
    command_name,
    read_score,
    resume_words,
    start_words,
)
from mesotron.compare.words import count
from mesotron.config import SweepConfig
from mesotron.runs.console import spell_time
from mesotron.runs.files import write_json
from mesotron.runs.process import StopRequest
from mesotron.runs.workers import CommandPool, Job, default_num_workers, list_gpus

if TYPE_CHECKING:
    from mesotron.compare.study import Study, Trial

# Trials in a row that may crash before the fault is the sweep's own.
PATIENCE = 3
SHOWN = 10


def run(config: SweepConfig) -> int:
    """Search, or go on searching.

    Returns:
        0 when the study has its trials.

    Raises:
        KeyboardInterrupt: somebody stopped it; it says how to go on.
    """
    space = read_space(config.file, config.space)
    command_name(space.command)
    try:
        from mesotron.compare.study import Study
    except ModuleNotFoundError as error:
        raise ValueError(
            f"mesotron sweep needs {error.name}: pip install 'mesotron[sweep]'"
        ) from error
    folder = (config.out or Path("runs") / f"sweep-{space.name}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    study = Study(space, config, folder)
    Search(study, space, config, console).play()
    finish(study, space, folder, console)
    return 0


class Search:
    """The trials of this process, watched until the study has enough.

    Args:
        study: gives trials and takes their scores.
        space: the command.
        config: how many at once, and how often to look.
        console: where it is told.
    """

    def __init__(self, study: "Study", space: Space, config: SweepConfig, console: Console) -> None:
        self.study, self.space, self.config, self.console = study, space, config, console
        on_cpu = any("device=cpu" in word for word in space.command)
        gpus = [] if on_cpu else list_gpus()
        self.pool = CommandPool(config.workers or default_num_workers(config.threads, gpus), gpus)
        self.trials: dict[str, Trial] = {}
        self.pulses: dict[str, Pulse] = {}
        self.doomed: dict[str, str] = {}
        self.crashes = 0

    def play(self) -> None:
        """Run trials until there are enough."""
        how = f"the same command goes on with {self.study.folder}"
        with StopRequest(self.say, how) as stop:
            try:
                self._loop(stop)
            finally:
                self.pool.kill()
                for trial in self.trials.values():
                    self.study.leave(trial)
        if stop.requested:
            raise KeyboardInterrupt(how)

    def _loop(self, stop: StopRequest) -> None:
        while True:
            for job in self.pool.take_ended():
                self._end(job, stop.requested)
            if stop.requested:
                self.pool.terminate()
            while not stop.requested and self.pool.has_free_slot and self._start():
                continue
            if not self.pool.jobs:
                return
            if self.config.prune and not stop.requested:
                self._feel_pulses()
            time.sleep(self.config.every)

    def _start(self) -> bool:
        """Start a trial; False if there is none to start."""
        trial = self.study.next()
        if trial is None:
            return False
        key = str(trial.number)
        words = self.space.words(trial.values)
        if (trial.run / "config.json").is_file():
            words = resume_words(words, trial.run)
        else:
            words = start_words(words, trial.run, self.config.threads)
        command = COMMANDS[command_name(self.space.command)]
        variables = {"OMP_NUM_THREADS": str(self.config.threads)}
        variables |= command.variables if self.config.threads == 1 else {}
        log = trial.run.with_suffix(".log")
        self.pool.start(
            key, process_words(words), log, variables, keep_open=(trial.claim.fileno(),)
        )
        self.trials[key], self.pulses[key] = trial, Pulse(trial.run)
        return True

    def _feel_pulses(self) -> None:
        """Ask the processes of dead trials to leave."""
        for job in self.pool.jobs:
            if job.key not in self.doomed and (why := self.pulses[job.key].dead()):
                self.doomed[job.key] = why
                job.process.terminate()

    def _end(self, job: Job, stopping: bool) -> None:
        """Tell the study what came of a trial."""
        trial, pulse = self.trials.pop(job.key), self.pulses.pop(job.key)
        why = self.doomed.pop(job.key, None) or (pulse.dead() if self.config.prune else None)
        score = read_score(trial.run, self.study.metric, self.space.command)
        told = job.failure
        if score is None and why is None and is_spoiled(told):
            why = told
        took = spell_time(time.monotonic() - job.start)
        names = [one.name for one in self.space.dimensions if one.varies]
        shown = " ".join(f"{name}={spell(trial.values[name])}" for name in names)
        if why is not None:
            self.study.prune(trial, why)
            self.say(f"trial {trial.number} {shown}: pruned, {why} ({took})")
        elif score is not None:
            self.study.complete(trial, score)
            self.say(f"trial {trial.number} {shown}: {score:.4g} ({took})")
        elif stopping:
            self.study.leave(trial)
        else:
            self._crash(trial, told, shown)
            return
        self.crashes = 0

    def _crash(self, trial: "Trial", why: str, shown: str) -> None:
        """A trial without a score: the study goes on, unless every trial ends so."""
        self.study.fail(trial, why)
        self.say(f"trial {trial.number} {shown}: failed, {why}")
        self.crashes += 1
        if self.crashes >= PATIENCE:
            raise ValueError(
                f"{self.crashes} trials in a row have failed, the last with: {why}; see "
                f"{trial.run.with_suffix('.log')}"
            )

    def say(self, sentence: str) -> None:
        """A line of its own."""
        self.console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def process_words(words: Sequence[str]) -> list[str]:
    """How a command of ours is started, without asking the PATH."""
    return [sys.executable, "-m", "mesotron", *words]


def spell(value: object) -> str:
    """A value in a few digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def finish(study: "Study", space: Space, folder: Path, console: Console) -> None:
    """The best trials on the terminal, and all of them in sweep.json."""
    found, reasons = study.ended(), study.reasons()
    rows = [
        {
            "number": one.number,
            "score": one.value,
            "values": one.params,
            "why": reasons.get(one.number, ""),
        }
        for one in found
    ]
    write_json(folder / "sweep.json", {"name": space.name, "metric": study.metric, "trials": rows})
    names = [one.name for one in space.dimensions if one.varies]
    counted = count(len(found), "trial")
    table = Table(title=f"{space.name}: {counted}, the best first", box=SIMPLE_HEAD)
    for heading in ("trial", study.metric or "score", *names, "why pruned"):
        table.add_column(heading)
    for row in rows[:SHOWN]:
        score = "" if row["score"] is None else f"{row['score']:.4g}"
        values = [spell(row["values"].get(name, "")) for name in names]
        table.add_row(str(row["number"]), score, *values, row["why"])
    console.print(table)
    if rows and rows[0]["score"] is not None:
        words = space.words(rows[0]["values"])
        console.print(f"the best: mesotron {' '.join(words)}", soft_wrap=True, highlight=False)
    console.print(f"{folder / 'sweep.json'}", soft_wrap=True, highlight=False)
