"""Ctrl-C and SIGTERM as a request: finish the step, save, leave. A second Ctrl-C stops at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """While entered, remembers that somebody asked to stop.

    Args:
        say: told once, in a sentence, when a signal comes.
        how_to_continue: what a second Ctrl-C leaves the user with.

    Example:
        >>> import os
        >>> with StopRequest(print, "resume it") as stop:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     stop.requested
        SIGTERM: finishing this step, then saving; Ctrl-C again stops at once
        True
    """

    def __init__(self, say: Callable[[str], None], how_to_continue: str) -> None:
        self.requested = False
        self._say = say
        self._how_to_continue = how_to_continue
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt(self._how_to_continue)
        if not self.requested:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._say(f"{name}: finishing this step, then saving; Ctrl-C again stops at once")
        self.requested = True


@contextmanager
def told_when_interrupted(how_to_continue: str) -> Iterator[None]:
    """Where Ctrl-C stops at once, such as in an evaluation, say how to go on nevertheless.

    Args:
        how_to_continue: for an interrupt that tells nothing itself.

    Example:
        >>> with told_when_interrupted("resume it"):
        ...     pass
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*(stop.args or (how_to_continue,))) from stop
