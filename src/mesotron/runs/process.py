"""This process: its rank (from the launcher's variables), stop signals, and access to the hub."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self
from urllib.parse import urlsplit

from mesotron.runs.deadline import LimitReached

HUB = "https://huggingface.co"
HUB_TIMEOUT = 3.0  # seconds


def num_processes() -> int:
    return _read_number("WORLD_SIZE", 1)


def process_index() -> int:
    return _read_number("RANK", 0)


def local_index() -> int:
    """The rank of this process on its machine, from 0: which GPU it uses."""
    return _read_number("LOCAL_RANK", 0)


def num_machines() -> int:
    return _read_number("GROUP_WORLD_SIZE", 1)


def launcher() -> str:
    """What started several processes, as the begin of a command; "" for one process alone."""
    if num_processes() == 1:
        return ""

    name = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "torchrun"
    return f"{name} <the same flags> -m "


def tell_launcher(message: str) -> None:
    """Leave the reason of a failure where torchrun and Accelerate look for it: they end with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return

    details = {"py_callstack": message, "timestamp": str(int(time.time()))}
    failure = {"message": {"message": message, "extraInfo": details}}
    with suppress(OSError):
        Path(path).write_text(json.dumps(failure))


def is_main() -> bool:
    """Whether this process writes the run folder and prints."""
    return process_index() == 0


def asks_for_sharding() -> bool:
    """Whether the launcher requested FSDP; Accelerate may still not use it."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def _read_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"the variable {name}={text!r} is not a number: unset it for one process")
    return int(text)


class SharedFailure(ValueError):
    """A failure that is raised in every process; only the main one prints it."""


def ignore_launcher() -> None:
    """A launcher ends the other processes when the first one ends; after a shared failure each is
    to end by itself, with 2."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class StopRequest:
    """Makes Ctrl-C and SIGTERM requests to finish the step and save; a second Ctrl-C stops, and so
    does the first inside `waiting_for` something that hangs.

    The handlers only set flags: the loop prints, by `announce`. A handler that printed while the
    loop is printing would raise, and with it the step would be lost.
    """

    def __init__(self, say: Callable[[str], None], how_to_continue: str) -> None:
        self.requested = False
        self._say = say
        self._how_to_continue = how_to_continue
        self._before: dict[int, Any] = {}
        self._signal: int | None = None  # not announced yet
        self._hangs = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._hangs or (self.requested and number == signal.SIGINT):
            raise KeyboardInterrupt(self._how_to_continue)

        if not self.requested:
            self.requested = True
            self._signal = number

    def announce(self) -> None:
        """Print, once, that a stop was requested; called by the loop."""
        number = self._signal
        self._signal = None

        if number is not None:
            if number == signal.SIGINT:
                name = "Ctrl-C"
            else:
                name = signal.Signals(number).name

            self._say(f"{name}: finishing this step, then saving; Ctrl-C again stops at once")

    @contextmanager
    def waiting_for(self, name: str, seconds: float) -> Iterator[None]:
        """After so many seconds inside, say what the run waits for; from then on one signal, also
        an earlier one, stops it."""
        main = threading.get_ident()
        lock = threading.Lock()
        over = False

        def complain() -> None:
            with lock:
                if over:
                    return

                self._hangs = True
                if self.requested:
                    signal.pthread_kill(main, signal.SIGINT)

            self._say(f"{name} has not returned for {seconds:g} s; Ctrl-C stops here, unsaved")

        timer = threading.Timer(seconds, complain)
        timer.daemon = True
        timer.start()

        try:
            yield
        finally:
            timer.cancel()
            with lock:
                over = True
                self._hangs = False


@contextmanager
def cpu_allowance(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once it has used so much CPU time; in another thread than the
    main one, which no signal reaches, there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.thread_time()
    over = False

    def stop(number: int, frame: FrameType | None) -> None:
        left = seconds - (time.thread_time() - began)  # the timer counts the other threads too
        if left > 0:
            signal.setitimer(signal.ITIMER_VIRTUAL, left)
        elif not over:
            raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def time_allowance(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once so much time has passed, in which it may have waited; in
    another thread than the main one there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def explain_interrupt(how_to_continue: str) -> Iterator[None]:
    """Add how to continue to a Ctrl-C or SIGTERM that stops at once, such as in an evaluation."""
    catches = threading.current_thread() is threading.main_thread()

    if catches:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    else:
        before = None

    try:
        yield
    except LimitReached:
        raise
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*(stop.args or (how_to_continue,))) from stop
    finally:
        if catches:
            signal.signal(signal.SIGTERM, before)


_started: float | None = None  # on the monotonic clock


def mark_start() -> None:
    """This process is one command: count its time from the start of the process."""
    global _started
    _started = time.monotonic() - process_age()


def started() -> float:
    """When the command began, on the monotonic clock; now, if it is not a process of its own."""
    return time.monotonic() if _started is None else _started


def process_age() -> float:
    """Seconds since this process began, imports included; 0 where the system does not say."""
    try:
        with open("/proc/self/stat") as file:
            ticks = float(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def go_offline_without_network() -> None:
    """Set HF_HUB_OFFLINE if the hub is unreachable, before Transformers is imported."""
    # The hub's client would retry for half a minute. Behind a proxy nothing is decided.
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    if "HF_HUB_OFFLINE" in os.environ or any(os.environ.get(name) for name in proxies):
        return

    address = os.environ.get("HF_ENDPOINT") or HUB
    url = urlsplit(address)

    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or address, port), HUB_TIMEOUT).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
