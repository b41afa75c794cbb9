"""Ends a run at its limit, whatever it is doing: an import, an evaluation, a reward that hangs.

1. At the limit the main thread is interrupted (`LimitReached`), so that the run saves and stops.
2. Code that ignores the interrupt, or the signal, is left behind: a thread saves and ends the
   process.
3. Code that holds Python's lock leaves a thread no turn: a second process interrupts, and kills.

Standard library only: this file is also the script of the second process.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

SIGNAL = signal.SIGVTALRM  # rewards use SIGALRM, schedulers SIGUSR1, background programs no SIGINT
GRACE = 3.0  # seconds for an interrupted run to begin its end
SECOND = 1.0  # seconds by which the second process is later than the thread
KILL = 10.0  # seconds from its interrupt to its kill
LOOK = 0.2
MOST_SIGNALS = 2  # to a main thread that may be interrupted and does not notice


class LimitReached(KeyboardInterrupt):
    """An interrupt of the main thread by the run's own limit."""


class Deadline:
    """Interrupts the main thread after so many seconds, None for never, and sees to the end.

    Args:
        seconds: from entering the context on.
        account: called before the process is ended.
        record: (file, values) that the second process adds to a JSON file before it kills.
    """

    any_passed = False  # in this process

    def __init__(
        self,
        seconds: float | None = None,
        account: Callable[[], None] = lambda: None,
        record: tuple[Path, dict[str, Any]] | None = None,
    ) -> None:
        self.seconds = seconds
        self.has_passed = False
        self._account = account
        self._record = record
        self._is_interrupted = False
        self._is_obeyed = False
        self._in_own_code = False
        self._can_give_up: Callable[[], bool] = lambda: True
        self._leave: Callable[[], int] = lambda: 2
        self._second: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._ending = threading.Lock()  # held by whoever ends the run: the main thread or ours
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if self.seconds is None or not is_main:  # only the main thread can be interrupted
            return self

        self._handler = signal.signal(SIGNAL, self._interrupt)
        self._second = start_second(self.seconds + SECOND, self._record)
        try:
            self._thread.start()
        except LimitReached:  # already: `with` would not leave what it has not entered
            self.__exit__()
            raise

        return self

    def __exit__(self, *_: object) -> None:
        self.obey()
        self._over.set()
        if self._second is not None:
            self._stop_second()
            self._thread.join()
            signal.signal(SIGNAL, self._handler)

    # What the run says about itself

    @contextmanager
    def during(self, can_give_up: Callable[[], bool], leave: Callable[[], int]) -> Iterator[None]:
        """Training. `can_give_up`: whether the last whole step can be saved at this moment, else
        what has begun is finished; `leave`: saves it, from another thread, and returns the exit
        code of the process."""
        before = self._can_give_up, self._leave
        self._can_give_up, self._leave = can_give_up, leave
        try:
            yield
        finally:
            self._can_give_up, self._leave = before

    @contextmanager
    def own_code(self) -> Iterator[None]:
        """A call of the user's code, which may always be given up, and may swallow an interrupt."""
        self._in_own_code = True
        try:
            yield
        finally:
            self.check()
            self._in_own_code = False

    def check(self) -> None:
        """Raise LimitReached if the limit was reached and what runs can be given up."""
        if self.has_passed and self._may_interrupt():
            self._is_interrupted = True
            self._in_own_code = False
            raise LimitReached

    def obey(self) -> None:
        """The main thread ends the run by itself, from here on without an interrupt."""
        if not self._is_obeyed:
            self._is_obeyed = True
            self._ending.acquire()

    # What happens at the limit

    def _may_interrupt(self) -> bool:
        return not self._is_obeyed and (self._in_own_code or self._can_give_up())

    def _interrupt(self, *_: object) -> None:
        """Runs in the main thread."""
        self.has_passed = Deadline.any_passed = True
        self._stop_second()  # Python's lock is free
        if not self._is_interrupted:
            self.check()

    def _watch(self) -> None:
        """Runs in a thread of its own."""
        if self._over.wait(self.seconds):
            return

        self.has_passed = Deadline.any_passed = True  # no handler runs if the signal is ignored
        self._stop_second()
        self._signal_main()
        signals_left = MOST_SIGNALS - 1

        while not self._over.wait(GRACE):
            if not self._may_interrupt():
                continue  # a step or a save that has begun is finished

            if not self._is_interrupted and signals_left > 0:
                self._signal_main()
                signals_left -= 1
            elif self._ending.acquire(blocking=False):
                self._end_process()
            else:
                return

    def _signal_main(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)

    def _end_process(self) -> None:
        code = 2
        with suppress(Exception):
            code = self._leave()
        with suppress(Exception):
            self._account()

        os._exit(code)

    def _stop_second(self) -> None:
        if self._second is not None:
            self._second.kill()
            self._second.wait()


# The second process


def start_second(
    seconds: float, record: tuple[Path, dict[str, Any]] | None
) -> subprocess.Popen[bytes]:
    path, values = record or (os.devnull, {})
    words = [str(os.getpid()), str(seconds), str(KILL), str(path), json.dumps(values)]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch_from_outside(
    run: int, seconds: float, kill: float, path: Path, values: dict[str, Any]
) -> None:
    """Interrupt a process that Python's lock holds up, then kill it."""
    wait_for(run, seconds)
    os.kill(run, SIGNAL)
    wait_for(run, kill)

    with suppress(OSError, ValueError):
        add_values(path, values)

    print(
        "mesotron: the limit was reached in code that nothing can interrupt; the run was killed. "
        "Continue from its last checkpoint with --resume",
        file=sys.stderr,
    )
    os.kill(run, signal.SIGKILL)


def add_values(path: Path, values: dict[str, Any]) -> None:
    """Replace a file of a run, without following links."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        spent = json.loads(file.read())

    draft = path.with_name(f".{path.name}.limit")
    draft.unlink(missing_ok=True)
    with draft.open("x") as file:
        file.write(json.dumps(spent | values, indent=2) + "\n")

    draft.replace(path)


def wait_for(run: int, seconds: float) -> None:
    """Wait so long; ends this process if the run has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != run:
            sys.exit()
        time.sleep(LOOK)


if __name__ == "__main__":
    _run, _seconds, _kill, _path, _values = sys.argv[1:]
    watch_from_outside(int(_run), float(_seconds), float(_kill), Path(_path), json.loads(_values))
