"""Logged values as rows of numbers: nested names are joined, texts are read or left out."""

import json
from collections.abc import Container, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from mesotron.watch.metrics import STEP_NAMES, Row, plain_name

MAX_KEYS = 5000
MAX_DEPTH = 8
MAX_TEXT = 64  # letters of a number
NUMBERS = frozenset({float, int})
MAX_JSON = 2**20
MOST_STEPS = 2**53
# verl and others put a row's numbers under one of these next to its step.
WRAPPERS = {"data", "metrics", "logs"}
# Columns that name the run of a row (next to its seed).
RUN_COLUMNS = ("run_name", "run_id", "run", "experiment", "exp_name", "exp")
# Columns that name the metric whose value is in the column "value".
METRIC_COLUMNS = ("metric", "tag", "key", "metric_name")
# Bookkeeping of W&B.
IGNORED = {"_timestamp", "_runtime", "_wandb"}

CALLS = STEP_NAMES.index("_step")  # W&B's count of calls, the worst step
_STEP_RANKS: dict[str, int] = {}
for _rank, _name in enumerate(STEP_NAMES):
    _STEP_RANKS.setdefault(plain_name(_name), _rank)

StepName = tuple[str, int]  # a logged name and its rank among the names of steps; "" for none
NO_STEP: StepName = ("", len(STEP_NAMES))


def to_row(values: Mapping[str, Any]) -> Row:
    """The numbers of a logged row.

    Nested names are joined by /. The step is named "step", or "_step" where it is W&B's count of
    calls.
    """
    step = _plain_step(tuple(values))
    row = None if step is None else _plain_numbers(values)
    if step is None or row is None:
        row = {}
        step = _flatten("", values, row, MAX_DEPTH, NO_STEP)

    name, rank = step
    if not name:
        return row

    if name == "step" and "_step" not in row:
        return row

    step = row.pop(name)
    row.pop("_step", None)
    key = "_step" if rank == CALLS else "step"

    return {key: step} | row


def step_count(value: Any) -> float | None:
    """The planned steps of a run, as its config has them; None for anything else."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_count and 0 < value < MOST_STEPS else None


@lru_cache(maxsize=4096)
def _plain_step(names: tuple[str, ...]) -> StepName | None:
    """The best name of a step in a row of plain numbers; None if a name must be left out."""
    best = NO_STEP
    for name in names:
        known, rank = _known_key(name)
        if not known or len(names) > MAX_KEYS:
            return None
        if rank is not None and rank < best[1]:
            best = name, rank

    return best


def _plain_numbers(values: Mapping[str, Any]) -> Row | None:
    """A row of plain numbers, as most are; None if it has anything else."""
    if not NUMBERS.issuperset(map(type, values.values())):
        return None

    try:
        return dict(zip(values, map(float, values.values())))
    except OverflowError:  # an integer beyond the floats
        return None


def _flatten(
    prefix: str,
    values: Mapping[str, Any],
    row: Row,
    depth: int,
    best: StepName,
) -> StepName:
    """Put the numbers into `row`; returns the best name of a step."""
    for key, value in values.items():
        if type(value) is dict:
            if depth:
                inner = prefix if key in WRAPPERS else f"{prefix}{key}/"
                best = _flatten(inner, value, row, depth - 1, best)
            continue

        name, rank = _known_key(f"{prefix}{key}" if prefix else key)
        number = to_number(value) if rank is None else _step_number(value)
        if number is None or not name or len(row) >= MAX_KEYS:
            continue

        row[name] = number
        if rank is not None and rank < best[1]:
            best = name, rank

    return best


def _step_number(value: Any) -> float | None:
    if isinstance(value, str):  # ms-swift logs "5/100"
        value = value.partition("/")[0]
    return to_number(value)


@lru_cache(maxsize=65536)
def _known_key(key: str) -> tuple[str, int | None]:
    """One string for all equal keys ("" for those to ignore), and the rank as a step's name."""
    if len(key) >= MAX_TEXT:
        return key, None

    plain = key.lower()
    if plain in IGNORED:
        return "", None

    return key, _STEP_RANKS.get(plain_name(plain))


def to_number(value: Any) -> float | None:
    """A logged value as a number, None for text and booleans; "50%" is 0.5."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        return _parse_number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None

    try:
        return float(value)
    except OverflowError:  # an integer beyond the floats
        return float("inf") if value > 0 else float("-inf")


def _parse_number(text: str) -> float | None:
    if len(text) >= MAX_TEXT:
        return None

    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return float(text)
    except ValueError:
        return None


def parse_json(text: Any) -> Any:
    """A JSON text of a store; None if it is damaged or too long."""
    with suppress(RecursionError, TypeError, ValueError):
        if len(text) < MAX_JSON:
            return json.loads(text)
    return None


class RunNames:
    """The runs that columns of a table name, with their numbers of rows."""

    def __init__(self) -> None:
        self.num_rows: dict[str, int] = {}
        self.first_steps: dict[str, float | None] = {}  # of runs that only a seed names

    def add(self, names: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        """Count a row by what its columns name it; returns the name of its run."""
        given = []
        for name in names.values():
            if name not in (None, ""):
                given.append(str(name))

        run = "/".join(given)

        if run in self.num_rows:
            self.num_rows[run] += 1
        elif len(self.num_rows) < MAX_KEYS:
            by_seed = names.keys() == {"seed"}
            self.num_rows[run] = 1
            self.first_steps[run] = to_row(values).get("step") if by_seed else None

        return run

    def several(self) -> list[str]:
        """The names, if they are those of several runs."""
        # A run of one row is a config.
        names = []
        for run, count in self.num_rows.items():
            if run and count > 1:
                names.append(run)

        # Seeds that begin at different steps are of one run, which drew new ones or was resumed.
        beginnings = {self.first_steps[name] for name in names}
        return names if len(beginnings) < len(names) else []


@lru_cache(maxsize=4096)
def may_name_run(names: tuple[str, ...]) -> bool:
    """Whether a column may name the run of a row."""
    return not {"seed", *RUN_COLUMNS}.isdisjoint(names)


def run_columns(names: Container[str]) -> list[str]:
    """Which of the columns name the run of a row: the best name, and the seed."""
    columns = [name for name in RUN_COLUMNS if name in names][:1]
    if "seed" in names:
        columns.append("seed")

    return columns
