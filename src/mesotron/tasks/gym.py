"""Datasets of reasoning-gym, and the verdicts of their scorers.

Problems follow from the seed, so a problem is kept as its address (dataset, settings, seed, index)
and made again to be scored.
"""

import ast
import contextlib
import json
import logging
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

from mesotron.answers.facts import Facts
from mesotron.answers.formats import AnswerFormat
from mesotron.config import TaskConfig
from mesotron.config.base import suggest

log = logging.getLogger("mesotron")

SCORER_SECONDS = 2.0  # of CPU time for one answer
MAX_SCORED = 4_096  # characters of an answer
KEY = "reasoning_gym"  # the column that holds a problem's address
Address = tuple[str, str, int, int]  # dataset, settings as JSON, seed, index


class OutOfTime(BaseException):  # which no `except Exception` of a scorer or reward catches
    """A call used more CPU time than it may."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` after so much CPU time. No limit outside the main thread.

    CPU time, because math-verify and others use the alarm on the clock themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def settings_of(config: TaskConfig, name: str) -> dict[str, Any]:
    """`min_terms=2,chain_sum.max_terms=4` as the settings of one dataset of a mixture."""
    from reasoning_gym.factory import DATASETS

    _, config_type = DATASETS[name]
    known = {field.name for field in fields(config_type)} - {"seed", "size"}

    settings: dict[str, Any] = {}
    for item in config.settings_items():
        path, _, text = item.partition("=")
        dataset, _, key = path.rpartition(".")
        if dataset not in ("", name):
            continue

        if key not in known:
            raise ValueError(
                f"--task.settings {key!r} is no setting of {name}{suggest(key, known)}; it has "
                f"{', '.join(sorted(known))}"
            )

        settings[key] = _read_literal(text)

    return settings


def _read_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def num_levels(name: str) -> int:
    from reasoning_gym.factory import CURRICULA

    if name not in CURRICULA:
        return 1

    make_curriculum: Any = CURRICULA[name]
    attributes = make_curriculum().attributes.values()
    return max((len(attribute.levels) for attribute in attributes), default=1)


@lru_cache(maxsize=256)
def make_dataset(name: str, settings: str, seed: int) -> Any:
    """A dataset; `settings` are JSON with its size; `difficulty` is a level of its curriculum."""
    from reasoning_gym.factory import DATASETS

    given = json.loads(settings)
    level = given.pop("difficulty", None)
    make, config_type = DATASETS[name]

    try:
        if level is None:
            values = {}
        else:
            values = _values_of_level(name, level, seed, given["size"])

        values |= given
        values["seed"] = seed

        config = config_type(**values)
        validate = getattr(config, "validate", None)  # two datasets have none
        if validate is not None:
            validate()

        return make(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        reason = f" ({error})" if str(error) else ""
        raise ValueError(f"--task rg:{name} does not take {settings}{reason}") from error


def _values_of_level(name: str, level: int, seed: int, size: int) -> dict[str, Any]:
    """The settings of a level of a dataset's curriculum, or of the highest below it."""
    from reasoning_gym.factory import CURRICULA

    if name not in CURRICULA:
        return {}

    make_curriculum: Any = CURRICULA[name]
    curriculum = make_curriculum()
    for key, attribute in curriculum.attributes.items():
        highest = len(attribute.levels) - 1
        curriculum.set_attr_level(key, min(level, highest))

    config = curriculum.generate_configuration({"seed": seed, "size": size})
    return {field.name: getattr(config, field.name) for field in fields(config)}


@lru_cache(maxsize=65_536)
def entry_of(address: Address) -> dict[str, Any]:
    name, settings, seed, index = address
    return make_dataset(name, settings, seed)[index]


def score(answer: str, address: Address) -> float:
    """The scorer's verdict from 0 to 1; 0 if it raises, hangs or returns anything else."""
    name, settings, seed, _ = address

    # Outside the limit: an import that is interrupted leaves broken modules behind.
    dataset = make_dataset(name, settings, seed)
    entry = entry_of(address)
    try:
        with cpu_limit(SCORER_SECONDS):
            value = float(dataset.score_answer(answer[:MAX_SCORED], entry))
    except (Exception, OutOfTime) as error:  # any of a hundred scorers on untrusted text
        log.debug("the scorer of rg:%s failed on %r: %r", name, answer[:80], error)
        return 0.0

    if math.isnan(value):
        return 0.0

    return min(1.0, max(0.0, value))


def regrade(
    facts: Sequence[Facts],
    texts: Sequence[str],
    rows: Sequence[Mapping[str, Any] | str | None],
    format: AnswerFormat,
) -> list[Facts]:
    """Facts whose verdict is the task's own scorer's, where the rows have one."""
    graded = []
    for fact, text, row in zip(facts, texts, rows, strict=True):
        address = _address_in(row)
        if address is None:
            graded.append(fact)
            continue

        answer = format.extract(text, complete=not fact.truncated)
        value = 0.0 if answer is None else score(answer, address)
        regraded = replace(
            fact,
            score=value,
            correct=value >= 1,
            graded=True,
            gold_unparseable=False,
        )
        graded.append(regraded)

    return graded


def _address_in(row: Mapping[str, Any] | str | None) -> Address | None:
    """The address in a row's columns, which datasets hold as JSON."""
    columns = json.loads(row) if isinstance(row, str) and row else row
    if not columns or KEY not in columns:
        return None

    name, settings, seed, index = columns[KEY]  # pyright: ignore
    return name, settings, seed, index
