"""Notes which functions of the package each test runs, in its own process and those it starts.

A line of the file that REACH_FILE names is a test, a source file and a function in it.
"""

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_PACKAGE = f"{os.sep}src{os.sep}mesotron{os.sep}"
_seen: set[int] = set()


def start() -> None:
    if "REACH_FILE" in os.environ:
        threading.settrace(_on_call)
        sys.settrace(_on_call)


def begin(test: str) -> None:
    """Note what runs from here on as run by `test`, in new processes too."""
    os.environ["REACH_TEST"] = test
    _seen.clear()


def _on_call(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    if id(code) not in _seen:
        _seen.add(id(code))
        _note(code)


def _note(code: CodeType) -> None:
    _, inside, path = code.co_filename.rpartition(_PACKAGE)
    if not inside:
        return

    line = f"{os.environ.get('REACH_TEST', '')}\t{path}\t{code.co_qualname}\n"
    file = os.open(os.environ["REACH_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
