"""The record of a tournament, FOLDER/tournament.json; the run of cell ID is in FOLDER/cells/ID."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mesotron.config.base import from_plain
from mesotron.runs.files import read_json, write_json

NAME = "tournament.json"

Stage = Literal["probe", "search", "final"]
State = Literal["waiting", "running", "done", "failed"]
Verdict = Literal["healthy", "drifting", "dead", "diverged"]


@dataclass(kw_only=True)
class Contender:
    name: str  # the optimizer's name, with "+objective" if several objectives are compared
    optim: str
    objective: str = ""  # empty if the kind of run has none
    about: str  # short description


@dataclass(kw_only=True)
class Cell:
    """One run: a contender at a rate with a seed."""

    id: str
    contender: str
    objective: str
    rate: float  # learning rate in AdamW's unit
    seed: int
    stage: Stage  # a probe measures the size of updates, a search chooses the rate, finals rank
    gain: float = 1.0  # the matrices' own rate / `rate`, for updates as large as AdamW's
    state: State = "waiting"
    why: str = ""  # error of a failed cell; when and how a done one diverged
    run: str = ""  # run folder, relative to the tournament's
    score: float | None = None  # mean of `per_problem`; a probe has none
    per_problem: list[float] | None = None  # in the order of `Tournament.problems[stage]`
    seconds: float | None = None  # time of the training steps, without start-up and evaluations
    wall: float | None = None  # time of the whole process
    tokens: float | None = None  # tokens, environment steps or frames used in training
    steps: int | None = None
    threshold_seconds: float | None = None  # training time until the curve passed the threshold
    threshold_tokens: float | None = None
    threshold_steps: int | None = None
    verdict: Verdict | None = None  # diverged: losses or weights that are not finite
    cause: str | None = None  # the watch's cause, such as entropy_collapse
    story: str = ""  # the watch's diagnosis in words
    update_ratio: float | None = None  # of a probe: median of update RMS / rate; 0.2 is usual


@dataclass(kw_only=True)
class Standing:
    rank: int
    contender: str
    rate: float  # the rate its search chose
    gain: float  # the matrices' own rate divided by that
    seeds: list[int]  # seeds of the final cells that have a score
    score: float | None  # mean over final seeds and problems
    low: float | None  # 95% bootstrap interval over seeds and problems
    high: float | None
    by_seed: list[float]
    behind: float | None = None  # difference to the best, paired by seed and problem
    behind_low: float | None = None
    behind_high: float | None = None
    p: float | None = None  # uncorrected p-value of the paired test against the best
    p_holm: float | None = None  # after Holm's correction for all pairs of contenders
    seconds: float | None  # means over the final cells
    tokens: float | None
    threshold_seconds: float | None  # median; null unless most of the cells got there
    trials: int  # number of search cells
    extended: int  # search cells beyond the first grid
    edge: Literal["low", "high"] | None  # end of the searched rates at which the best one lies
    dead: int  # final cells that are dead or diverged
    failed: int  # final cells that crashed: they have no score


def has_scores(rows: Sequence[Standing]) -> bool:
    """Whether any contender scored above 0; else there is nothing to rank by."""
    return any(row.score for row in rows)


@dataclass(kw_only=True)
class Threshold:
    metric: str  # name in metrics.jsonl; the mean of the last few steps counts
    value: float | None = None  # halfway from the curves' start to the best contender's end


@dataclass(kw_only=True)
class Tournament:
    recipe: str
    kind: str  # rlvr, ppo or vla
    measure: str  # what a score is, such as "greedy accuracy"
    rule: list[str]  # how the comparison is made fair, in sentences
    contenders: list[Contender]
    plan: dict[str, Any]  # settings of the command and the config of the recipe
    cells: list[Cell] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)  # stage -> ids of its problems
    start: dict[str, float] = field(default_factory=dict)  # stage -> score of the untrained start
    before: str = "before training"  # what that start is, in words
    threshold: Threshold | None = None
    standings: list[Standing] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # the conclusion in sentences
    environment: dict[str, Any] = field(default_factory=dict)  # versions, commit and machine
    workers: int = 1  # cells run at once by the last call
    wall: float = 0.0  # seconds of all calls together


def write_tournament(folder: Path, record: Tournament) -> None:
    write_json(folder / NAME, asdict(record))


def read_tournament(folder: Path) -> Tournament:
    path = folder / NAME
    if not path.is_file():
        raise ValueError(f"{folder} is not a folder of mesotron compare: it has no {NAME}")

    values = read_json(path)
    record = from_plain(Tournament, values, str(path))
    for name, kind in (("contenders", Contender), ("cells", Cell), ("standings", Standing)):
        setattr(record, name, [from_plain(kind, one, str(path)) for one in values.get(name, ())])

    for cell in record.cells:  # its folder is removed and made again
        is_name = cell.id == Path(cell.id).name and cell.id != ".."
        if cell.run != f"cells/{cell.id}" or not is_name:
            raise ValueError(f"{path}: the cell {cell.id!r} is not in cells/: {cell.run!r}")

    return record
