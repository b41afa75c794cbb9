"""What a tournament writes: FOLDER/tournament.json, replaced whole whenever a cell starts or ends.

The report draws it and a later call continues from it; each cell's run folder is FOLDER/cells/ID.
Only numbers, words and lists: a number that is not known yet, or cannot be, is null.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mesotron.config.base import from_plain
from mesotron.runs.files import write_json

NAME = "tournament.json"

Stage = Literal["probe", "search", "final"]
State = Literal["waiting", "running", "done", "failed"]
Verdict = Literal["healthy", "drifting", "dead", "diverged"]


@dataclass(kw_only=True)
class Contender:
    """Who takes part: an optimizer with its settings, and an objective."""

    name: str
    """As in the table: the optimizer's, with "+objective" where several objectives are compared."""
    optim: str
    objective: str
    """Empty where the kind of run has none."""
    about: str
    """What it is, in a few words."""


@dataclass(kw_only=True)
class Cell:
    """One run: a contender at a rate with a seed."""

    id: str
    contender: str
    objective: str
    rate: float
    """Learning rate in AdamW's unit."""
    seed: int
    stage: Stage
    """A probe is a short run that measures the size of a contender's updates; search cells choose
    its rate; final cells, with other seeds, judge it."""
    gain: float = 1.0
    """What the matrices' own rate is over `rate`, so that their updates are as large as AdamW's."""
    state: State = "waiting"
    why: str = ""
    """Of a failed cell what it said last; of a done one that it diverged and when."""
    run: str = ""
    """Its run folder, relative to the tournament's."""
    score: float | None = None
    """Mean of `per_problem`; a probe has none."""
    per_problem: list[float] | None = None
    """One number for each of the stage's problems, in the order of `Tournament.problems[stage]`."""
    seconds: float | None = None
    """Time of the training steps, without start-up and evaluations."""
    wall: float | None = None
    """Time of the whole process."""
    tokens: float | None = None
    """Tokens, environment steps or frames that training has read."""
    steps: int | None = None
    threshold_seconds: float | None = None
    """Training time until the curve has passed `Tournament.threshold`; null if it never did."""
    threshold_tokens: float | None = None
    threshold_steps: int | None = None
    verdict: Verdict | None = None
    """How the watch says it ended; diverged are losses or weights that are not numbers."""
    cause: str | None = None
    """The watch's word for what went wrong, such as entropy_collapse."""
    story: str = ""
    """The watch's sentence."""
    update_ratio: float | None = None
    """Of a probe: median over steps of the update's RMS over the rate; AdamW's usual one is about
    0.2."""


@dataclass(kw_only=True)
class Standing:
    """One contender's line of the ranking, best first."""

    rank: int
    contender: str
    rate: float
    """The rate that its search chose."""
    gain: float
    """What its matrices' own rate is over that."""
    seeds: list[int]
    """Those of its final cells that count."""
    score: float | None
    """Mean over final seeds and problems."""
    low: float | None
    """95 % bootstrap interval over seeds and problems."""
    high: float | None
    by_seed: list[float]
    behind: float | None
    """How far behind the best, paired by seed and problem; null for the best."""
    behind_low: float | None
    behind_high: float | None
    p: float | None
    """Of the paired test against the best, as it is."""
    p_holm: float | None
    """The same after Holm's correction for all pairs of contenders: any might have been best."""
    seconds: float | None
    """Means over the final cells."""
    tokens: float | None
    threshold_seconds: float | None
    """Median over the final cells; null if less than half of them got there."""
    trials: int
    """Search cells that were run for it."""
    extended: int
    """Of these, how many lie beyond the first grid."""
    edge: Literal["low", "high"] | None
    """The end of the searched rates at which the best one lies, if it does: it may not be best."""
    dead: int
    """Final cells that the watch calls dead, or that diverged."""
    failed: int
    """Final cells that crashed: they have no score."""


def anybody_scored(rows: Sequence[Standing]) -> bool:
    """Whether any contender has more than 0; else there is nothing to rank by."""
    return any(row.score for row in rows)


@dataclass(kw_only=True)
class Threshold:
    """What time-to-threshold is measured by."""

    metric: str
    """Name in metrics.jsonl; the mean of the last few steps counts."""
    value: float | None = None
    """Half way from the curves' start to the best contender's end; null until that is known, and
    if no contender's curve got better."""


@dataclass(kw_only=True)
class Tournament:
    """The whole record."""

    recipe: str
    kind: str
    """rlvr, ppo or vla: what kind of run a cell is."""
    measure: str
    """What a score is, such as "greedy accuracy"."""
    rule: list[str]
    """How it was made fair, in sentences."""
    contenders: list[Contender]
    plan: dict[str, Any]
    """The command's own settings, and the recipe's that were changed: see `CompareConfig`."""
    cells: list[Cell] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    """Stage -> ids of the problems that its scores are taken from; no problem is in both."""
    start: dict[str, float] = field(default_factory=dict)
    """Stage -> score of the untrained start on the same problems."""
    before: str = "before training"
    """What that start is, in words."""
    threshold: Threshold | None = None
    standings: list[Standing] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """The conclusion in sentences."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions, commit and machine."""
    workers: int = 1
    """Cells run at once by the last call."""
    wall: float = 0.0
    """Seconds that the whole has taken, over all calls."""


def write_tournament(folder: Path, record: Tournament) -> None:
    """Replace the record of a folder; a reader finds the old or the new one, never a part."""
    write_json(folder / NAME, asdict(record))


def read_tournament(folder: Path) -> Tournament:
    """The record of a folder.

    Raises:
        ValueError: there is none, or another version of mesotron wrote it.

    Example:
        >>> import tempfile
        >>> cell = Cell(id="a", contender="muon", objective="", rate=1e-3, seed=0, stage="search")
        >>> record = Tournament(recipe="arith", kind="rlvr", measure="accuracy", rule=[],
        ...     contenders=[], plan={}, cells=[cell])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_tournament(Path(folder), record)
        ...     read_tournament(Path(folder)) == record
        True
    """
    path = folder / NAME
    if not path.is_file():
        raise ValueError(
            f"{folder} is no tournament: it has no {NAME}; name a folder of mesotron compare"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    record = from_plain(Tournament, values, str(path))
    for name, kind in (("contenders", Contender), ("cells", Cell), ("standings", Standing)):
        setattr(record, name, [from_plain(kind, one, str(path)) for one in values[name]])
    return record
