"""This process: its rank (from the launcher's variables), stop signals, and access to the hub."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self
from urllib.parse import urlsplit

HUB = "https://huggingface.co"
HUB_TIMEOUT = 3.0  # seconds


def num_processes() -> int:
    return _read_number("WORLD_SIZE", 1)


def process_index() -> int:
    return _read_number("RANK", 0)


def local_index() -> int:
    """The rank of this process on its machine, from 0: which GPU it uses."""
    return _read_number("LOCAL_RANK", 0)


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


class StopRequest:
    """Makes Ctrl-C and SIGTERM requests to finish the step and save; a second Ctrl-C stops."""

    def __init__(self, say: Callable[[str], None], how_to_continue: str) -> None:
        self.requested, self._say, self._how_to_continue = False, say, how_to_continue
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
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
def explain_interrupt(how_to_continue: str) -> Iterator[None]:
    """Add how to continue to a Ctrl-C that stops at once, such as in an evaluation."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(*(stop.args or (how_to_continue,))) from stop


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
