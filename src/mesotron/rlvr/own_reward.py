"""Reward functions of the user's own, given as `module:function`: imported, called and checked.

The function gets, by keyword, those of completions, completion_ids, golds, truncated, facts,
rows, max_tokens and the dataset's columns that it names (all of them if it takes **kwargs), and
returns one number or None for each completion. TRL's reward functions fit.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import sysconfig
from collections.abc import Callable
from importlib import import_module
from traceback import walk_tb
from typing import Any

OwnReward = Callable[..., Any]
INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")  # places, as sysconfig names them


def import_own(name: str) -> OwnReward:
    """The function that `module:function` names; the working folder is looked in too.

    Raises:
        ValueError: if the module cannot be imported or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file here must not hide an installed module
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        # A module of a stranger may raise anything while it is imported; a script ends by itself.
        raise ValueError(
            f"the reward {name!r} cannot be imported: {type(error).__name__}: {error}"
            f"{_where(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"the module {module_name} has no function {function_name!r}")
    return function


def call_own(
    name: str, function: OwnReward, given: dict[str, list[Any]], max_tokens: int
) -> list[float | None]:
    """Scores of one batch, checked.

    Raises:
        ValueError: if the function raises, or returns anything but one finite number or None for
            each completion; it names the function, the index of the completion and, of what is
            raised, the file and the line.
    """
    try:
        scores = function(**_arguments(function, given, max_tokens))
    except (Exception, SystemExit) as error:  # sys.exit in it would end the run without a word
        index = _guilty(function, given, max_tokens)
        raise ValueError(
            f"the reward {name} raised {type(error).__name__} ({error}) on {index}"
            f"{_where(error, function)}"
        ) from error
    num_completions = len(given["completions"])
    if not isinstance(scores, list | tuple) or len(scores) != num_completions:
        listed = isinstance(scores, list | tuple)
        size = f"{len(scores)} scores" if listed else f"a {type(scores).__name__}"
        raise ValueError(
            f"the reward {name} returned {size} for {num_completions} completions: return a list "
            "with one number or None for each"
        )
    return [_checked(name, i, score) for i, score in enumerate(scores)]


def _arguments(function: OwnReward, given: dict[str, list[Any]], max_tokens: int) -> dict[str, Any]:
    rows = given["rows"]
    columns = {key: [row.get(key) for row in rows] for key in (rows[0] if rows else {})}
    prompts = {"prompts": columns.pop("prompt")} if "prompt" in columns else {}
    known = {**columns, **prompts, **given, "max_tokens": max_tokens}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known
    return {p.name: known[p.name] for p in parameters if p.name in known}


def _guilty(function: OwnReward, given: dict[str, list[Any]], max_tokens: int) -> str:
    """Which completion makes the function raise, found by giving it one at a time."""
    for i in range(len(given["completions"])):
        one = {key: values[i : i + 1] for key, values in given.items()}
        try:
            function(**_arguments(function, one, max_tokens))
        except (Exception, SystemExit):
            return f"completion {i}"
    return f"the batch of {len(given['completions'])} completions, though on none of them alone"


def _where(error: BaseException, function: OwnReward | None = None) -> str:
    """The last line of the user's own that an error passed, as ` at FILE:LINE`.

    Where no such line ran (an argument that nobody gives, a reward of an installed library) it is
    the line where the function begins; nothing if that cannot be told either.
    """
    lines = [
        f" at {frame.f_code.co_filename}:{line}"
        for frame, line in walk_tb(error.__traceback__)
        if _is_users(frame.f_code.co_filename, frame.f_globals.get("__name__", ""))
    ]
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    begins = f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
    return lines[-1] if lines else begins


def _is_users(file: str, module: str) -> bool:
    """Whether code is neither Python's, nor an installed package's, nor ours."""
    installed = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in INSTALLED)
    return not (file.startswith(("<", *installed)) or module.partition(".")[0] == "mesotron")


def _checked(name: str, index: int, score: Any) -> float | None:
    if score is None:
        return None
    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the reward {name} returned {score!r:.80} for completion {index}, not a number that "
            "a float holds"
        ) from error
    if not math.isfinite(value):
        raise ValueError(
            f"the reward {name} returned {value} for completion {index}: return None to skip it"
        )
    return value
