"""Code that is not ours, such as a reward, a tool or an import of them: what it may not change for
the rest of the process, and what its errors say."""

import logging
import os
import sys
import sysconfig
import threading
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from traceback import walk_tb
from types import ModuleType
from typing import Any

log = logging.getLogger("mesotron")
# What ends a step of a run, but no interrupt. Rewards turn classes of their own into ValueErrors.
FAILURES = (Exception, SystemExit, GeneratorExit, CancelledError)
SHOWN = 1000  # characters of an error's text
AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")  # folders of code that is no user's


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Surrounds a call of the user's code and sets back what it changed in the process: the output
    streams, the working folder, PyTorch's defaults, a hook of errors that it removed. A copy that
    it forked ends here."""
    process = os.getpid()
    folder = current_folder()
    defaults = torch_defaults()
    hooks = hooks_of_errors()

    try:
        with lend_streams():
            yield
    finally:
        end_copy(process)
        if current_folder() != folder and folder is not None:
            os.chdir(folder)
            warn_once(f"{name} changed the working folder; it is set back")

        for changed in reset_torch(defaults):
            warn_once(f"{name} changed torch's {changed}; it is set back")

        for removed in restore_hooks(hooks):
            warn_once(f"{name} removed {removed}; it is set back")


def end_copy(process: int) -> None:
    """End a forked copy of this process, which would write the same files and print twice."""
    if os.getpid() != process:
        os._exit(0)


def current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


@cache
def warn_once(message: str) -> None:
    log.warning(message)


# Output streams


class LentStream:
    """A stream whose `close` only flushes: the original stays open."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def close(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lend_streams() -> Iterator[None]:
    """Let the block close stdout and stderr, or their descriptors, without any harm."""
    streams = sys.stdout, sys.stderr
    spares = {number: duplicate(number) for number in (1, 2)}
    sys.stdout, sys.stderr = (stream and LentStream(stream) for stream in streams)

    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, spare in spares.items():
            if spare is not None:
                restore_descriptor(number, spare)


def duplicate(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:  # a service may have none
        return None


def restore_descriptor(number: int, spare: int) -> None:
    """Point a descriptor at its file again if it was closed or exchanged."""
    is_same = False
    with suppress(OSError):
        is_same = os.path.samestat(os.fstat(number), os.fstat(spare))

    if not is_same:
        os.dup2(spare, number)

    os.close(spare)


# Hooks of errors


def hooks_of_errors() -> dict[ModuleType, Any]:
    """What Python calls for an error that nothing catches, in the main thread and in others."""
    return {module: module.excepthook for module in (sys, threading)}


def restore_hooks(hooks: dict[ModuleType, Any]) -> list[str]:
    """Set back those that were removed: no thread can be made without them. Another hook stays."""
    restored = []
    for module, hook in hooks.items():
        if not callable(getattr(module, "excepthook", None)):
            setattr(module, "excepthook", hook)  # noqa: B010
            restored.append(f"{module.__name__}.excepthook")

    return restored


# PyTorch's defaults


def torch_defaults() -> dict[str, Any]:
    """Settings of the process that change what is computed; none before PyTorch is imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}

    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradient mode": torch.is_grad_enabled(),
        "number of threads": torch.get_num_threads(),
        "autocast": autocast_state(torch),
    }


def autocast_state(torch: Any) -> dict[str, Any]:
    """Whether autocast is on, its dtype, and the number of contexts that are open."""
    state: dict[str, Any] = {}
    for device in AUTOCAST_DEVICES:
        enabled = torch.is_autocast_enabled(device)
        state[device] = enabled, torch.get_autocast_dtype(device)

    torch.autocast_increment_nesting()  # nothing else reads it
    state["open"] = torch.autocast_decrement_nesting()
    state["cache"] = torch.is_autocast_cache_enabled()
    return state


def reset_torch(defaults: dict[str, Any]) -> list[str]:
    """Set them back; returns the names of those that had changed."""
    now = torch_defaults()
    changed = [name for name, value in defaults.items() if now[name] != value]
    if not changed:
        return []

    torch = sys.modules["torch"]
    device = defaults["default device"]
    torch.set_default_device(None if device.type == "cpu" else device)
    torch.set_default_dtype(defaults["default dtype"])
    torch.set_grad_enabled(defaults["gradient mode"])
    torch.set_num_threads(defaults["number of threads"])
    reset_autocast(torch, defaults["autocast"], now["autocast"])

    return changed


def reset_autocast(torch: Any, state: dict[str, Any], now: dict[str, Any]) -> None:
    for device in AUTOCAST_DEVICES:
        enabled, dtype = state[device]
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)

    torch.set_autocast_cache_enabled(state["cache"])
    for _ in range(now["open"] - state["open"]):
        torch.autocast_decrement_nesting()

    if not state["open"]:  # casts of weights that the next step changes
        torch.clear_autocast_cache()


# Errors


def describe(error: BaseException) -> str:
    """Type and text of any error."""
    return f"{type(error).__name__} ({text_of(error)})"


def text_of(error: BaseException) -> str:
    """The text of any error: it may be long, or fail to be made."""
    try:
        text = str(error)
    except BaseException as failure:  # the user's own __str__
        return f"its text cannot be read: {type(failure).__name__}"

    if len(text) > SHOWN:
        return f"{text[:SHOWN]} ... {len(text):,} characters"

    return text


def line_of(error: BaseException) -> str:
    """The last line of user code in a traceback, as " at FILE:LINE"."""
    folders = [f"{sysconfig.get_path(path)}{os.sep}" for path in INSTALLED]
    not_of_users = ("<", *folders)

    line_of_user = ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if not file.startswith(not_of_users) and package != "mesotron":
            line_of_user = f" at {file}:{line}"

    return line_of_user


def explain(error: BaseException) -> str | None:
    """What failed, in words: an error of ours is a sentence, and one of the user's code names its
    line. None for a bug of ours or of a library."""
    if isinstance(error, ValueError) and is_our_own(error):
        return str(error)

    if line := line_of(error):
        return f"your code raised {describe(error)}{line}"

    return None


def is_our_own(error: BaseException) -> bool:
    """Whether this package raised it: only the text of its own errors is meant for the user."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next

    return bool(trace) and trace.tb_frame.f_globals.get("__name__", "").startswith("mesotron.")
