"""Rewards: a weighted sum of named parts, each a number per completion, or None for no verdict.

A part reads the completion's facts and tokens (`PARTS`) or is your own function or class, given as
`file.py:name` or `module:name`. A completion whose gold answer cannot be read gets None: skipped.

Your function receives by keyword whichever of completions, completion_ids, golds, truncated, facts,
rows, max_tokens and the dataset's columns it names (all of them with **kwargs), and returns one
number or None per completion. It may be async. TRL's rewards work as they are.
"""

import ast
import asyncio
import inspect
import json
import logging
import math
import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import fmean, pvariance
from traceback import walk_tb
from typing import Any

from mesotron.answers.facts import Facts, Judge, no_facts
from mesotron.answers.numbers import Number, distance, other_unit, read_number
from mesotron.config import SELF_LABELED, RewardConfig, TrainConfig
from mesotron.config.base import suggest
from mesotron.runs.trust import import_named
from mesotron.tasks.problem import Problem, own_row

log = logging.getLogger("mesotron")
Scores = list[float | None]
HUGE = 1e30
MAX_UNSCORED = 3  # calls at the start without one reward, after which a run stops
OwnReward = Callable[..., Any]
# Whether an own reward reads completions as TRL's chat messages, [{"role": ..., "content": ...}];
# the first call that works tells.
_takes_messages: dict[str, bool] = {}


class MissingColumn(ValueError):
    """A reward names a parameter that the data cannot fill."""


@dataclass(frozen=True)
class Completion:
    facts: Facts
    ids: Sequence[int]
    gold: str | None
    config: RewardConfig
    max_tokens: int

    def graded(self, score: float) -> float | None:
        return score if self.facts.graded else None


def sparse(completion: Completion) -> float | None:
    """1 for a correct answer in the format, else 0."""
    return completion.graded(float(completion.facts.correct))


def two_part(completion: Completion) -> float | None:
    """`format_share` for the format, correct or not, plus 1 for a correct answer in it."""
    facts = completion.facts
    share = completion.config.format_share
    return completion.graded(share * facts.formatted + float(facts.correct))


def near(completion: Completion) -> float | None:
    """1 for a correct answer, 1 / (1 + distance / near_unit) for a wrong number in the format. So a
    group without a correct answer still gives a signal. 51% and 0.51 are one away from 50%. Answers
    that are no plain number, or have another unit than the gold, are correct or get 0."""
    facts = completion.facts
    if facts.correct or not facts.formatted:
        return completion.graded(float(facts.correct))

    unit = completion.config.near_unit
    return completion.graded(closeness(facts.number, completion.gold or "", unit))


@lru_cache(maxsize=2**12)  # few pairs are distinct
def closeness(answer: Number | None, gold: str, unit: float) -> float:
    known = read_number(gold)
    if answer is None or known is None or other_unit(answer, known):
        return 0.0
    # Exact fractions: a number with a thousand digits does not fit a float.
    return float(1 / (1 + distance(answer, known) / Fraction(unit)))


def scorer(completion: Completion) -> float | None:
    """What the task's own scorer gives the answer in the format (0 to 1, partly right answers
    between); of a task without one, 1 for a correct answer."""
    facts = completion.facts
    return completion.graded(float(facts.correct) if facts.score is None else facts.score)


def correct(completion: Completion) -> float | None:
    """1 for a correct answer, in the format or not."""
    facts = completion.facts
    return completion.graded(float(facts.correct or facts.correct_unformatted))


def format(completion: Completion) -> float | None:
    """1 for an answer in the format, correct or not; needs no gold."""
    return float(completion.facts.formatted)


def length(completion: Completion) -> float | None:
    """1 - tokens / max_tokens for a correct answer, 0 for a wrong one: a linear form of the length
    reward of Yeo et al., 2025 (arXiv 2502.03373)."""
    share = min(1.0, len(completion.ids) / completion.max_tokens)
    return completion.graded(float(completion.facts.correct) * (1 - share))


def repetition(completion: Completion) -> float | None:
    """Minus the share of repeated token 4-grams, from 0 to nearly -1 (arXiv 2502.03373)."""
    from mesotron.probes import repetition  # imports torch, which config checks must not wait for

    return 0.0 - repetition([completion.ids])["completions/repetition"]


def overlong(completion: Completion) -> float | None:
    """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): 0 to -1 over the last tokens."""
    if completion.facts.truncated:
        return -1.0

    buffer = completion.config.overlong_buffer
    excess = len(completion.ids) - (completion.max_tokens - buffer)
    return -min(1.0, max(0.0, excess / buffer)) or 0.0  # not -0.0


PARTS: dict[str, Callable[[Completion], float | None]] = {
    part.__name__: part
    for part in (two_part, sparse, near, scorer, correct, format, length, repetition, overlong)
}
WITHOUT_GOLD = ("format", "repetition", "overlong")


class Reward:
    """A reward ready to be called; `make_reward` builds it from a config."""

    def __init__(self, config: RewardConfig, judge: Judge, max_tokens: int) -> None:
        check_reward(config)
        self.config = config
        self.judge = judge
        self.max_tokens = max_tokens
        self.weights = dict(zip(config.parts, config.weights or [1.0] * len(config.parts)))

        # Surrounds each call of a user's function, with its name.
        self.waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._own = {name: import_reward(name) for name in config.parts if name not in PARTS}
        self.latest: dict[str, Scores] = {}  # of the last call, by part
        self.unscored = 0.0  # calls up to now if none gave a reward

    def __call__(
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        golds: Sequence[str | None],
        truncated: Sequence[bool],
        rows: Sequence[Mapping[str, Any]] | None = None,
        facts: Sequence[Facts] | None = None,
    ) -> Scores:
        """The reward of each completion; None where any part has no verdict. `completion_ids` are
        without padding, `golds` None where unknown, `truncated` True where cut at `max_tokens`.
        `rows` of the dataset are for your own functions; `facts` are the judge's if not given.
        ValueError if your function raised, or did not return one finite number or None each."""
        if facts is None:
            facts = self.judge.judge(completions, golds, truncated)

        scored = [
            Completion(
                fact,
                ids,
                gold,
                self.config,
                self.max_tokens,
            )
            for fact, ids, gold in zip(facts, completion_ids, golds, strict=True)
        ]

        batch: dict[str, list[Any]] = {
            "completions": list(completions),
            "completion_ids": list(completion_ids),
            "golds": list(golds),
            "truncated": list(truncated),
            "facts": list(facts),
            "rows": list(rows) if rows is not None else [{} for _ in completions],
        }

        parts: dict[str, Scores] = {}
        for name in self.weights:
            if name in PARTS:
                parts[name] = [PARTS[name](completion) for completion in scored]
            else:
                with self.waiting(f"the reward {name}"):
                    parts[name] = call_reward(name, self._own[name], batch, self.max_tokens)

        self.latest = parts
        totals: Scores = []
        for i in range(len(completions)):
            scores = [(weight, parts[name][i]) for name, weight in self.weights.items()]
            # Sums stay finite; the trainer narrows further, and warns.
            values = [max(-HUGE, min(HUGE, w * score)) for w, score in scores if score is not None]
            totals.append(math.fsum(values) if len(values) == len(scores) else None)

        if any(total is not None for total in totals):
            self.unscored = -math.inf
        elif totals:
            self.unscored += 1
            without = ", ".join(name for name, scores in parts.items() if None in scores)
            fix = "" if ":" in without else ": check that the gold answers can be parsed"
            message = "none of %d completions has a reward: %s gave no verdict%s"
            log.warning(message, len(totals), without, fix)

        return totals


def make_reward(config: RewardConfig, judge: Judge, max_tokens: int) -> Reward:
    r"""Build the reward that a config describes, for completions of up to `max_tokens`.

    Example:
        >>> from mesotron.answers.formats import FORMATS
        >>> from mesotron.answers.verify import Verifier
        >>> reward = make_reward(RewardConfig(), Judge(FORMATS["boxed"], Verifier()), 48)
        >>> texts = [r"\boxed{7}", r"\boxed{8}", "7"]
        >>> reward(texts, [[1], [1], [1]], ["7", "7", "7"], [False, False, False])
        [1.1, 0.1, 0.0]
    """
    return Reward(config, judge, max_tokens)


def as_reward_function(reward: Reward) -> Callable[..., Scores]:
    """A `Reward` as TRL calls reward functions, named "reward" in the metrics."""

    def scores(completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> Scores:
        golds, truncated, rows, facts = (columns[x] for x in ("gold", "truncated", "row", "facts"))
        texts = completion_texts(completions)
        totals = reward(
            texts,
            completion_ids,
            golds,
            truncated,
            rows,
            facts,
        )

        own = [name for name in reward._own if set(reward.latest[name]) == {None}]
        if own and reward.unscored >= MAX_UNSCORED:
            raise ValueError(
                f"the reward {', '.join(own)} returned None for every completion so far: return "
                "numbers, and None only to skip a completion"
            )

        for name, value in part_metrics(reward, totals).items() if "log_metric" in columns else ():
            columns["log_metric"](name, value)

        return totals

    scores.__name__ = "reward"
    return scores


def part_metrics(reward: Reward, totals: Scores) -> dict[str, float]:
    """Mean of every part of the last call, the share of the total's variance that it explains
    (covariance with the total over the total's variance; shares add up to 1), and the largest."""
    whole = [i for i, total in enumerate(totals) if total is not None]
    if len(reward.weights) < 2 or not whole:
        return {}

    total = [totals[i] or 0.0 for i in whole]
    variance = pvariance(total)
    metrics: dict[str, float] = {}

    shares = []
    for name, weight in reward.weights.items():
        part = [reward.latest[name][i] or 0.0 for i in whole]
        metrics[f"reward/part/{name}"] = fmean(part)

        if variance > 0:
            shares.append(weight * fmean(x * y for x, y in zip(part, total)) / variance)
            shares[-1] -= weight * fmean(part) * fmean(total) / variance
            metrics[f"reward/part/{name}/variance_share"] = shares[-1]

    return metrics | ({"reward/largest_part": max(shares)} if shares else {})


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """What the model wrote last. An episode may end with a tool's result, which is no answer."""
    ends = [{"content": x} if isinstance(x, str) else x[-1] for x in completions]
    return ["" if m.get("role") == "tool" else str(m.get("content") or "") for m in ends]


def is_unfinished(completion: str | list[dict[str, Any]]) -> bool:
    """Whether an episode ends before the model's answer: with a call, or with its result."""
    last = {} if isinstance(completion, str) else completion[-1]
    return last.get("role") == "tool" or bool(last.get("tool_calls"))


def check_reward(config: RewardConfig) -> None:
    for name in config.parts:
        if name not in PARTS and ":" not in name:
            hint = suggest(name, PARTS) or f" (known: {', '.join(PARTS)})"
            raise ValueError(f"--reward {name!r} is unknown{hint}; or give file.py:name")


def is_own(config: RewardConfig) -> bool:
    """Whether every part is the user's own, so that no answer format is needed."""
    return not any(name in PARTS for name in config.parts)


def needs_gold(config: RewardConfig) -> bool:
    return any(name in PARTS and name not in WITHOUT_GOLD for name in config.parts)


def try_reward(config: RewardConfig, problem: Problem, max_tokens: int) -> None:
    """Call the user's own parts on one row with a group of two: its gold and an empty completion.
    One completion would not show a wrong number of scores."""
    texts = [rf"The answer is \boxed{{{problem.gold or 0}}}.", ""]
    row = own_row(problem)

    rows = (row, row | {"prompt": problem.question})  # text for a model without a chat template
    for name in config.parts:
        if name in PARTS:
            continue

        errors = []
        for one in rows:
            batch = {
                "completions": texts,
                "completion_ids": [[1] * len(text.split()) for text in texts],
                "golds": [problem.gold] * 2,
                "truncated": [False] * 2,
                "rows": [one] * 2,
                "facts": [no_facts(truncated=False)] * 2,
            }
            try:
                call_reward(name, import_reward(name), batch, max_tokens)
                break
            except MissingColumn:
                raise
            except ValueError as error:
                errors.append(error)
        else:
            raise errors[0]


def import_reward(name: str) -> OwnReward:
    """The function, class or factory of `file.py:name` or `module:name`; a class is made with the
    arguments behind it, as in `trl.rewards:get_soft_overlong_punishment(100, 20)`."""
    place, parenthesis, _ = name.partition("(")
    try:
        found = import_named(place, "reward")
    except ValueError as error:
        where = _where(error.__cause__) if error.__cause__ else ""
        raise ValueError(f"{error}{where}") from error.__cause__

    if not parenthesis and not inspect.isclass(found):
        return found

    try:
        call: Any = ast.parse(f"made{name[len(place) :] or '()'}", mode="eval").body
        values = [ast.literal_eval(one) for one in call.args]
        made = found(*values, **{one.arg: ast.literal_eval(one.value) for one in call.keywords})
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__} ({error}){_where(error)}"
        raise ValueError(f"the reward {name} cannot be made: {reason}") from error

    if not callable(made):
        raise ValueError(f"the reward {name} is a {type(made).__name__}: give it a __call__ method")

    return made


def call_reward(
    name: str, function: OwnReward, batch: dict[str, list[Any]], max_tokens: int
) -> Scores:
    rows = [_with_columns(row) for row in batch["rows"]]
    keys = dict.fromkeys(key for row in rows for key in row)
    columns: dict[str, Any] = {key: [row.get(key) for row in rows] for key in keys}

    prompts = [row["prompt"] for row in batch["rows"] if "prompt" in row]
    if prompts:
        columns["prompts"] = prompts

    # Copies: a function may empty its arguments, which the other parts and the trainer still read.
    copies = {key: list(map(copy, values)) for key, values in batch.items()}
    known = {
        **columns,
        **copies,
        "rows": rows,
        "max_tokens": max_tokens,
    }

    parameters = inspect.signature(function).parameters.values()
    for one in parameters:
        is_rest = one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if one.default is one.empty and not is_rest and one.name not in known:
            known_names = ", ".join(["completions", "golds", *map(str, keys)])
            raise MissingColumn(
                f"the reward {name} needs the column {one.name!r}, but the data has {known_names}: "
                f"add --data FILE that has it, map one with --data.columns {one.name}=COLUMN, or "
                "rename the parameter"
            )

    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = {p.name: known[p.name] for p in parameters if p.name in known}

    texts = batch["completions"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    if name.startswith("trl.") or _takes_messages.get(name):
        known |= {"completions": messages} if "completions" in known else {}

    try:
        scores = _finish(function(**known))
        _takes_messages.setdefault(name, False)
    except (Exception, SystemExit) as error:
        try:  # one written for TRL's chat messages
            is_known = name in _takes_messages
            if is_known or not isinstance(error, TypeError | AttributeError | KeyError):
                raise error

            scores = _finish(function(**{**known, "completions": messages}))
            _takes_messages[name] = True
        except (Exception, SystemExit):
            shown = " or ".join(f"{text!r:.60}" for text in texts)
            shown = f" on the completion {shown}" if len(texts) <= 2 else ""
            raise ValueError(
                f"the reward {name} raised {type(error).__name__} ({error}){shown}{_where(error)}"
            ) from error

    count = len(texts)
    if not isinstance(scores, list | tuple) or len(scores) != count:
        size = len(scores) if isinstance(scores, list | tuple) else type(scores).__name__
        raise ValueError(
            f"the reward {name} must return a list with one number or None per completion, got "
            f"{size} for {count} completions"
        )

    return [_check_score(name, i, score) for i, score in enumerate(scores)]


def _finish(scores: Any) -> Any:
    """Await an async reward, in a thread of its own: this one may have a running event loop."""
    if inspect.iscoroutine(scores):
        with ThreadPoolExecutor(1) as pool:
            scores = pool.submit(asyncio.run, scores).result()
    return getattr(scores, "tolist", lambda: scores)()  # an array or tensor


def _with_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the user's columns under their own names."""
    columns = row.get("columns") or {}
    own = json.loads(columns) if isinstance(columns, str) else dict(columns)
    kept = {key: value for key, value in row.items() if key not in ("columns", "prompt")}

    return {**kept, **own}


def _check_score(name: str, index: int, score: Any) -> float | None:
    if score is None:
        return None

    try:
        value = float(score)
    except (TypeError, ValueError, OverflowError):
        value = math.nan

    if not math.isfinite(value):
        raise ValueError(
            f"the reward {name} returned {score!r:.80} for completion {index}: return a finite "
            "number, or None to skip it"
        )

    return value


def _where(error: BaseException) -> str:
    # The last line of user code in the traceback.
    paths = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = ("<", *(f"{sysconfig.get_path(path)}{os.sep}" for path in paths))
    lines = [
        f" at {frame.f_code.co_filename}:{line}"
        for frame, line in walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(installed)
        and frame.f_globals.get("__name__", "").partition(".")[0] != "mesotron"
    ]

    return lines[-1] if lines else ""


def reads_answers(config: TrainConfig) -> bool:
    """Whether answers are searched for in completions; own rewards alone do not need them."""
    is_self_labeled = config.objective.name in SELF_LABELED
    return is_self_labeled or not (config.task.data and is_own(config.reward))
