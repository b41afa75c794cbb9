"""What every process of a run does: a failure in one is raised in all, so that none waits."""

import logging
from collections.abc import Callable
from typing import TypeVar

from accelerate.utils import gather_object

from mesotron.runs.deadline import LimitReached
from mesotron.runs.own_code import FAILURES, describe, explain
from mesotron.runs.process import SharedFailure, num_processes

log = logging.getLogger("mesotron")
Result = TypeVar("Result")
LIMIT = "limit"


def together(action: Callable[[], Result]) -> Result:
    """The result of an action that every process carries out now. If it fails in one, all raise
    `SharedFailure` with its sentence; a single process raises the error itself."""
    if num_processes() == 1:
        return action()

    error: BaseException | None = None
    result: Result | None = None
    try:
        result = action()
    except (*FAILURES, LimitReached) as raised:  # raised below, once the other processes know
        error = raised

    failures = gather_object([sentence_of(error)])
    if LIMIT in failures:
        raise LimitReached from error

    for number, failure in enumerate(failures):
        if failure is not None:
            raise SharedFailure(f"process {number}: {failure}") from error

    return result  # pyright: ignore[reportReturnType]


def sentence_of(error: BaseException | None) -> str | None:
    """What failed in this process, in words."""
    if error is None:
        return None
    if isinstance(error, LimitReached):
        return LIMIT

    sentence = explain(error)
    if sentence is None:
        log.error("a bug in one process stops all of them", exc_info=error)
        return describe(error)

    return sentence
