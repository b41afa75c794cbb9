"""Rewards of users: loading `file.py:name` or `module:name`, and calling it safely.

Your function receives by keyword what it names of completions, completion_ids, golds, truncated,
facts, rows, prompts, max_tokens and the dataset's columns (all of them with **kwargs), and returns
one number or None per completion. It may be async. TRL's rewards work as they are.
"""

import ast
import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from typing import Any

from mesotron.answers.facts import Facts, no_facts
from mesotron.runs.own_code import calling, describe, line_of
from mesotron.runs.trust import import_named
from mesotron.tasks.gym import OutOfTime
from mesotron.tasks.problem import Problem, own_row

Scores = list[float | None]
# What a function of texts raises when TRL's chat messages were meant, and the other way around.
MESSAGE_ERRORS = (TypeError, AttributeError, KeyError)


class MissingColumn(ValueError):
    """A reward names a parameter that the data cannot fill."""


@dataclass(frozen=True, kw_only=True)
class ToScore:
    """Completions and what is known of each; the names are those of a reward's parameters."""

    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    golds: Sequence[str | None]
    truncated: Sequence[bool]
    facts: Sequence[Facts]
    rows: Sequence[Mapping[str, Any]]  # of the dataset
    max_tokens: int


class OwnReward:
    """A user's function, class or factory by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.function = import_reward(name)
        # Whether it reads completions as TRL's chat messages, [{"role": ..., "content": ...}]. If
        # unknown (None), the first call that works tells.
        self.takes_messages = True if name.startswith("trl.") else None

    def __call__(self, batch: ToScore) -> Scores:
        """One finite number or None per completion; ValueError if the function fails."""
        texts = batch.completions
        arguments = fill_parameters(self.name, self.function, batch)
        try:
            with calling(f"the reward {self.name}"):
                scores = self._call(arguments)
        except (KeyboardInterrupt, OutOfTime):
            raise
        except BaseException as error:  # also GeneratorExit, CancelledError, or a class of its own
            shown = " or ".join(f"{text!r:.60}" for text in texts)
            example = f" on the completion {shown}" if len(texts) <= 2 else ""
            raise ValueError(
                f"the reward {self.name} raised {describe(error)}{example}{line_of(error)}"
            ) from error

        return check_scores(self.name, scores, len(texts))

    def _call(self, arguments: dict[str, Any]) -> Any:
        if self.takes_messages:
            return finish(self.function(**as_messages(arguments)))

        try:
            scores = finish(self.function(**arguments))
        except MESSAGE_ERRORS as error:
            if self.takes_messages is False:
                raise

            scores = self._call_with_messages(arguments, error)
            self.takes_messages = True
        else:
            self.takes_messages = False

        return scores

    def _call_with_messages(self, arguments: dict[str, Any], error: Exception) -> Any:
        """Try once more what failed on texts; if it fails again, the first error counts."""
        try:
            return finish(self.function(**as_messages(arguments)))
        except (KeyboardInterrupt, OutOfTime):
            raise
        except BaseException:
            raise error from None


def as_messages(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments whose completions are chats of one message."""
    if "completions" not in arguments:
        return arguments

    texts = arguments["completions"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    return arguments | {"completions": chats}


def fill_parameters(name: str, function: Callable[..., Any], batch: ToScore) -> dict[str, Any]:
    """The arguments that a function names, or all with **kwargs."""
    rows = [with_columns(row) for row in batch.rows]
    columns = columns_of(rows)
    known = {
        **columns,
        # Copies: a function may empty its arguments, which others still read.
        "completions": list(batch.completions),
        "completion_ids": [copy(ids) for ids in batch.completion_ids],
        "golds": list(batch.golds),
        "truncated": list(batch.truncated),
        "facts": list(batch.facts),
        "rows": rows,
        "max_tokens": batch.max_tokens,
    }

    prompts = [row["prompt"] for row in batch.rows if "prompt" in row]
    if prompts:
        known["prompts"] = prompts

    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if is_required(parameter) and parameter.name not in known:
            column = parameter.name
            names = ", ".join(["completions", "golds", *map(str, columns)])
            raise MissingColumn(
                f"the reward {name} needs the column {column!r}, but the data has {names}: add "
                f"--data FILE that has it, map one with --data.columns {column}=COLUMN, or rename "
                "the parameter"
            )

    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return known

    named = [parameter.name for parameter in parameters]
    return {key: known[key] for key in named if key in known}


def is_required(parameter: inspect.Parameter) -> bool:
    is_rest = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return parameter.default is parameter.empty and not is_rest


def with_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the user's columns under their own names."""
    columns = row.get("columns") or {}
    if isinstance(columns, str):  # as datasets hold them
        columns = json.loads(columns)

    kept = {}
    for key, value in row.items():
        if key not in ("columns", "prompt"):
            kept[key] = value

    return kept | columns


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every key of the rows with its values, None where a row has none."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)

    return {name: [row.get(name) for row in rows] for name in names}


def finish(scores: Any) -> Any:
    """Await an async reward, in a thread of its own: this one may have a running event loop."""
    if inspect.iscoroutine(scores):
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(asyncio.run, scores).result()

    to_list = getattr(scores, "tolist", None)  # of an array or tensor
    return scores if to_list is None else to_list()


def check_scores(name: str, scores: Any, count: int) -> Scores:
    is_list = isinstance(scores, list | tuple)
    if not is_list or len(scores) != count:
        size = len(scores) if is_list else type(scores).__name__
        raise ValueError(
            f"the reward {name} must return a list with one number or None per completion, got "
            f"{size} for {count} completions"
        )

    return [check_score(name, i, score) for i, score in enumerate(scores)]


def check_score(name: str, index: int, score: Any) -> float | None:
    if score is None:
        return None

    try:
        value = float(score)
    except Exception:  # of a class of the user's
        value = math.nan

    if not math.isfinite(value):
        raise ValueError(
            f"the reward {name} returned {score!r:.80} for completion {index}: return a finite "
            "number, or None to skip it"
        )

    return value


def import_reward(name: str) -> Callable[..., Any]:
    """The function, class or factory of `file.py:name` or `module:name`; a class is made with the
    arguments behind it, as in `trl.rewards:get_soft_overlong_punishment(100, 20)`."""
    place, parenthesis, _ = name.partition("(")
    try:
        named = import_named(place, "reward")
    except ValueError as error:
        line = line_of(error.__cause__) if error.__cause__ else ""
        raise ValueError(f"{error}{line}") from error.__cause__

    if not parenthesis and not inspect.isclass(named):
        return named

    arguments = name.removeprefix(place) or "()"
    try:
        with calling(f"the reward {name}"):
            made = make_with(named, arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = f"{describe(error)}{line_of(error)}"
        raise ValueError(f"the reward {name} cannot be made: {reason}") from error

    if not callable(made):
        raise ValueError(f"the reward {name} is a {type(made).__name__}: give it a __call__ method")

    return made


def make_with(factory: Callable[..., Any], arguments: str) -> Any:
    """Call a class or factory with literals such as "(100, scale=0.5)"."""
    call: Any = ast.parse(f"factory{arguments}", mode="eval").body
    values = [ast.literal_eval(one) for one in call.args]
    named = {one.arg: ast.literal_eval(one.value) for one in call.keywords}

    return factory(*values, **named)


def try_own(name: str, problem: Problem, max_tokens: int) -> None:
    """Call a user's reward on one row with a group of two: its gold and an empty completion. One
    completion would not show a wrong number of scores."""
    reward = OwnReward(name)
    row = own_row(problem)
    plain_row = row | {"prompt": problem.question}  # text for a model without a chat template

    try:
        reward(pair_to_try(problem, row, max_tokens))
    except MissingColumn:
        raise
    except ValueError as error:
        try:
            reward(pair_to_try(problem, plain_row, max_tokens))
        except ValueError:
            raise error from error.__cause__


def pair_to_try(problem: Problem, row: Mapping[str, Any], max_tokens: int) -> ToScore:
    texts = [rf"The answer is \boxed{{{problem.gold or 0}}}.", ""]
    return ToScore(
        completions=texts,
        completion_ids=[[1] * len(text.split()) for text in texts],
        golds=[problem.gold] * 2,
        truncated=[False] * 2,
        facts=[no_facts(truncated=False)] * 2,
        rows=[row] * 2,
        max_tokens=max_tokens,
    )
