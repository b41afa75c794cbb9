"""What every process of a run does; the other process is what it reports."""

import json
from typing import Any, ClassVar

import pytest

from mesotron.rlvr import together as module
from mesotron.rlvr.together import LIMIT, meet_others, sentence_of, together
from mesotron.runs.deadline import LimitReached
from mesotron.runs.process import SharedFailure


class State:
    """Stands for Accelerate's, and notes what was asked of it."""

    made: ClassVar[list[Any]] = []
    waits: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        State.made.append(options)

    def wait_for_everyone(self) -> None:
        State.waits += 1
        raise RuntimeError("the other one has ended")


@pytest.fixture
def other(monkeypatch):
    """The failure that a second process reports; None for none."""

    class Other:
        failure: str | None = None

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(module, "gather_object", lambda own: [*own, Other.failure])
    monkeypatch.setattr(module, "PartialState", State)
    State.made.clear()
    State.waits = 0
    return Other


def fail(error: BaseException) -> Any:
    raise error


def test_a_single_process_raises_its_own_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(module, "gather_object", pytest.fail)
    assert together(lambda: 7) == 7
    with pytest.raises(KeyError):
        together(lambda: fail(KeyError("a")))


def test_the_result_is_this_processes_own(other):
    assert together(lambda: 7) == 7
    assert State.waits == 0


def test_a_failure_anywhere_is_raised_everywhere_with_its_process(other):
    with pytest.raises(SharedFailure, match=r"^process 0: .*oops"):
        together(lambda: fail(ValueError("oops")))

    other.failure = "the reward raised"
    with pytest.raises(SharedFailure, match=r"^process 1: the reward raised$"):
        together(lambda: 7)

    with pytest.raises(SharedFailure, match="process 0"):  # the first of both
        together(lambda: fail(SystemExit(3)))
    assert State.waits == 3  # until all have read it


def test_a_limit_in_one_process_is_one_in_all(other):
    with pytest.raises(LimitReached):
        together(lambda: fail(LimitReached()))

    other.failure = LIMIT
    with pytest.raises(LimitReached):
        together(lambda: 7)
    with pytest.raises(LimitReached):
        together(lambda: fail(ValueError("oops")))


def test_an_interrupt_is_shared_with_nobody(other, monkeypatch):
    monkeypatch.setattr(module, "gather_object", pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        together(lambda: fail(KeyboardInterrupt()))


def test_a_bug_is_named_and_its_traceback_logged(caplog):
    assert sentence_of(None) is None
    assert sentence_of(LimitReached()) == LIMIT
    assert caplog.records == []

    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")

    caught.value.__traceback__ = None  # not of the user's code
    assert "JSONDecodeError" in (sentence_of(caught.value) or "")
    assert caplog.records[0].exc_info


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_processes_meet_before_anything_can_fail(other, monkeypatch, device):
    meet_others(device)
    assert State.made == [{"cpu": device == "cpu"}]

    monkeypatch.setenv("WORLD_SIZE", "1")
    meet_others(device)
    assert len(State.made) == 1
