r"""A user's own data: which columns hold prompt and gold, and how both are written.

Prompts are strings or chat messages. A gold is the text itself, what follows `####` (GSM8K), or the
last `\boxed{}` (MATH). Every column reaches the reward by its name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesotron.answers.formats import FORMATS, MAX_ANSWER
from mesotron.config import TaskConfig
from mesotron.config.base import suggest
from mesotron.config.train import data_name
from mesotron.tasks.problem import Problem, digest, hold_out, log
from mesotron.tasks.table import Row, read_splits

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "conversations")
# The last one is verl's: a field of a column.
GOLD_COLUMNS = ("answer", "solution", "gold", "response", "reward_model.ground_truth")
HELD_OUT_SHARE = 5  # at most one row in five of a file without a test split is held out
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
CALCULATOR_MARK = re.compile(r"<<[^<>\n]{0,200}>>")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names

Message = dict[str, str]


@dataclass(frozen=True)
class Source:
    """One file, folder or hub dataset with its columns and problems."""

    name: str
    prompt: str
    gold: str | None
    names: tuple[str, ...]  # of all columns
    train: list[Problem]
    test: list[Problem] | None  # None without a split of its own

    def describe(self) -> str:
        golds = [problem.gold for problem in self.train]
        kind = "none" if self.gold is None else f"{self.gold}, such as {golds[0]!r:.40}"
        if self.gold is not None and golds[0] is None:
            kind = f"{self.gold} (text for the reward only: no short answer to check)"

        others = [name for name in self.names if name not in (self.prompt, self.gold)]
        more = f", other columns: {', '.join(others)}" if others else ""

        return f"{self.name}: {len(golds):,} rows, prompt = {self.prompt}, gold = {kind}{more}"


def read_own(config: TaskConfig) -> tuple[list[Problem], list[Problem], list[Source]]:
    sources = [
        read_source(path, config, "" if len(config.data) == 1 else str(k))
        for k, path in enumerate(config.data, start=1)
    ]

    sizes = [float(len(source.train)) for source in sources]
    weights = config.weights or sizes
    train: list[Problem] = []

    held_out: list[Problem] = []
    for source, weight in zip(sources, weights, strict=True):
        share = weight / sum(weights)
        rows = source.train
        test = source.test

        count = round(config.num_eval * share)
        if test is None:
            count = min(count, max(1, len(rows) // HELD_OUT_SHARE)) if config.num_eval else 0
            rows, test = hold_out(rows, count, config.seed)

        if config.weights:  # as many rows as before in all; a small file repeats
            ranked = sorted(rows, key=lambda problem: digest(problem.question, config.seed))
            rows = [ranked[i % len(rows)] for i in range(round(sum(sizes) * share)) if rows]

        train += rows
        held_out += sorted(test, key=lambda p: digest(p.question, config.seed))[:count]

    return train, held_out, sources


def read_source(path: str, config: TaskConfig, number: str = "") -> Source:
    location = path
    subset = None
    if not Path(path).expanduser().exists() and ":" in path:  # a hub dataset and its subset
        location, _, subset = path.partition(":")

    if path == "openai/gsm8k":  # which has no default subset
        subset = "main"

    train, test = read_splits(location, subset)
    if not train:
        raise ValueError(f"{path} has no rows: check --data")

    given = dict(item.split("=", 1) for item in config.columns.split(",") if item)
    add_fields([*train, *(test or ())], [*given.values(), *GOLD_COLUMNS])

    names = tuple(train[0].values)
    for column in filter(None, given.values()):
        if column not in names:
            raise ValueError(
                f"{train[0].place}: no column {column!r}{suggest(column, names)}; columns: "
                f"{', '.join(map(str, names[:12]))}: check --data.columns {config.columns}"
            )

    prompt = given.get("prompt") or next((x for x in PROMPT_COLUMNS if x in names), None)
    if prompt is None:
        raise ValueError(
            f"{path} has no column {', '.join(PROMPT_COLUMNS)}, but {', '.join(names[:12])}: name "
            "the prompt's with --data.columns prompt=NAME"
        )

    gold = next((x for x in GOLD_COLUMNS if x in names and x != prompt), None)
    gold = given.get("gold", gold) or None
    stem = f"{data_name(path)}{number}"
    named = {key: value for key, value in given.items() if key not in ("prompt", "gold")}
    parse_switches([*train, *(test or ())], [name for name in names if name not in (prompt, gold)])

    def make(rows: Sequence[Row], split: str) -> list[Problem]:
        return [
            make_problem(
                row,
                f"{stem}-{split}-{i}",
                prompt,
                gold,
                named,
            )
            for i, row in enumerate(rows)
        ]

    made = make(train, "train")
    tested = None if test is None else make(test, "test")

    # Texts to compare with are for the reward: no answer in them can be checked.
    every = [*zip(train, made), *zip(test or (), tested or ())]
    prose = [row.place for row, one in every if one.gold is None or not is_checkable(one.gold)]
    if prose:
        if 2 * len(prose) < len(every):
            message = "no row is graded, for %d of %d have no short answer, first %s: remove them"
            log.warning(message, len(prose), len(every), prose[0])

        made = [replace(one, gold=None, solution=one.solution or one.gold) for one in made]
        tested = None if tested is None else [replace(one, gold=None) for one in tested]

    replied = made[0].gold or made[0].solution
    shown = gold or (f"the last reply of {prompt}" if replied else None)

    return Source(path, prompt, shown, names, made, tested)


def add_fields(rows: Sequence[Row], names: Sequence[str]) -> None:
    """Make columns of fields of other columns, such as reward_model.ground_truth."""
    for column, _, field in (name.partition(".") for name in names if "." in name):
        for row in rows:
            if isinstance(outer := row.values.get(column), dict) and field in outer:
                row.values[f"{column}.{field}"] = outer[field]


def parse_switches(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Make booleans of the columns of CSV that hold True and False: both texts are true in `if`."""
    values = {
        "True": True,
        "true": True,
        "False": False,
        "false": False,
    }
    for name in columns:
        if all(not row.typed and row.values.get(name) in values for row in rows):
            for row in rows:
                row.values[name] = values[row.values[name]]


def make_problem(
    row: Row, name: str, prompt: str, gold: str | None, named: dict[str, str] | None = None
) -> Problem:
    """A row as a problem; `named` maps further names for the reward to columns."""
    messages = None
    response = None

    value = row.values.get(prompt)
    if isinstance(value, list):
        messages, response = read_messages(value, f"{row.place}: column {prompt!r}")
        question = messages[0]["content"]
        if len(messages) > 1:
            question = "\n".join(f"{one['role']}: {one['content']}" for one in messages)
    else:
        question = row.text(prompt)

    if gold is not None and not isinstance(row.values.get(gold), list | dict | bool):
        response = row.text(gold)

    answer, solution = read_gold(response) if response else (None, None)
    columns = dict(row.values)
    columns |= {key: columns[column] for key, column in (named or {}).items()}
    reply = response if messages and gold is None else None

    return Problem(
        question,
        answer,
        name,
        None,
        solution,
        messages,
        columns,
        reply,
    )


def read_gold(text: str) -> tuple[str, str | None]:
    r"""The answer in a gold's text, and the text as a worked solution.

    >>> read_gold("6 + 1 = <<6+1=7>>7\n#### 7"), read_gold("7")
    (('7', '6 + 1 = 7'), ('7', None))
    """
    steps, mark, last = text.rpartition("####")
    if mark and last.strip() and "\n" not in last.strip():
        return THOUSANDS.sub("", last.strip()), CALCULATOR_MARK.sub("", steps).strip() or None

    boxed = FORMATS["boxed"].extract(text)
    if boxed is not None:
        return boxed, text

    return text, None if is_checkable(text) else text


def is_checkable(gold: str) -> bool:
    return len(gold) <= MAX_ANSWER and "\n" not in gold


def read_messages(value: list[Any], place: str) -> tuple[list[Message], str | None]:
    """Chat messages up to the last question, and the reply after it if there is one."""
    messages: list[Message] = []
    for one in value:
        role = one.get("role", one.get("from")) if isinstance(one, dict) else None
        content = one.get("content", one.get("value")) if isinstance(one, dict) else None
        if isinstance(content, list):  # parts, as of multimodal models
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = None if None in texts else "".join(map(str, texts))

        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"{place}: a message needs role and content (text), not {one!r:.60}")

        messages.append({"role": ROLES.get(role, role), "content": content})

    reply = messages.pop()["content"] if messages and messages[-1]["role"] == "assistant" else None
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{place}: there is no question, a last message that is not a reply")

    return messages, reply
