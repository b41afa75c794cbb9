"""What every process of a run does: a failure in one is raised in all, so that none waits."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from mesotron.runs.deadline import LimitReached
from mesotron.runs.own_code import FAILURES, describe, explain
from mesotron.runs.process import SharedFailure, num_processes

log = logging.getLogger("mesotron")
Result = TypeVar("Result")
LIMIT = "limit"


def meet_others(device: str) -> None:
    """Join the processes of a run. On CPUs Accelerate sees only its own until the trainer is built,
    unless it is told so: a failure in one would not reach the others before."""
    if num_processes() > 1:
        PartialState(cpu=device == "cpu")


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
    if any(failures):
        wait_for_the_others()
    if LIMIT in failures:
        raise LimitReached from error

    for number, failure in enumerate(failures):
        if failure is not None:
            raise SharedFailure(f"process {number}: {failure}") from error

    return result  # pyright: ignore[reportReturnType]


def wait_for_the_others() -> None:
    """A process that ends now would take what it has said from those that are still reading it."""
    with suppress(RuntimeError):  # one has ended already, after it had read
        PartialState().wait_for_everyone()


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
