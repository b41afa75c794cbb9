r"""A user's own data: which columns hold prompt and gold, and how both are written.

Prompts are strings or chat messages. A gold is the text itself, what follows `####` (GSM8K), or the
last `\boxed{}` (MATH). Every column reaches the reward by its name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mesotron.answers.formats import FORMATS, MAX_ANSWER
from mesotron.config import TaskConfig
from mesotron.config.base import suggest
from mesotron.config.train import data_name
from mesotron.tasks.problem import Problem, first_ranked, hold_out, log, ranked
from mesotron.tasks.table import TableRow, read_splits

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "conversations")
# The last one is verl's: a field of a column.
GOLD_COLUMNS = ("answer", "solution", "gold", "response", "reward_model.ground_truth")
HELD_OUT_SHARE = 5  # at most one row in five of a file without a test split is held out
MAX_SHOWN = 12  # columns that a message lists
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
CALCULATOR_MARK = re.compile(r"<<[^<>\n]{0,200}>>")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
SWITCHES = {"True": True, "true": True, "False": False, "false": False}

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One file, folder or hub dataset with its columns and problems."""

    name: str
    prompt: str
    gold: str | None
    names: tuple[str, ...]  # of all columns
    train: list[Problem]
    test: list[Problem] | None  # None without a split of its own

    def describe(self) -> str:
        """What was read, in one line."""
        text = f"{self.name}: {len(self.train):,} rows, prompt = {self.prompt}"
        text += f", gold = {self._describe_gold()}"

        used = (self.prompt, self.gold)
        other_columns = []
        for name in self.names:
            if name not in used:
                other_columns.append(name)

        if other_columns:
            text += f", other columns: {', '.join(other_columns)}"

        return text

    def _describe_gold(self) -> str:
        if self.gold is None:
            return "none"

        first = self.train[0].gold
        if first is None:
            return f"{self.gold} (text for the reward only: no short answer to check)"

        return f"{self.gold}, such as {first!r:.40}"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns of a table are read, and as what."""

    prompt: str
    gold: str | None
    names: tuple[str, ...]  # of all columns
    named: Mapping[str, str]  # further names for the reward, and their columns

    def for_reward(self) -> list[str]:
        return [name for name in self.names if name not in (self.prompt, self.gold)]


def read_own(config: TaskConfig) -> tuple[list[Problem], list[Problem], list[DataSource]]:
    """Training and held-out problems of all sources, by their weights."""
    sources = read_sources(config)
    sizes = [len(source.train) for source in sources]
    weights = config.weights or sizes

    train: list[Problem] = []
    held_out: list[Problem] = []
    for source, weight in zip(sources, weights, strict=True):
        share = weight / sum(weights)
        count = round(config.num_eval * share)
        problems, test = split_source(source, count, config)

        if config.weights:  # as many rows as before in all
            problems = repeat_to(problems, round(sum(sizes) * share), config.seed)

        train += problems
        held_out += test

    return train, held_out, sources


def read_sources(config: TaskConfig) -> list[DataSource]:
    if len(config.data) == 1:
        return [read_source(config.data[0], config)]

    return [read_source(path, config, str(k)) for k, path in enumerate(config.data, start=1)]


def split_source(
    source: DataSource, num_eval: int, config: TaskConfig
) -> tuple[list[Problem], list[Problem]]:
    """Training problems, and up to `num_eval` held-out ones."""
    train = source.train
    test = source.test
    if test is None:
        most = max(1, len(train) // HELD_OUT_SHARE) if config.num_eval else 0
        num_eval = min(num_eval, most)
        train, test = hold_out(train, num_eval, config.seed)

    return train, first_ranked(test, num_eval, config.seed)


def repeat_to(problems: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """As many problems as wanted; a small file repeats."""
    if not problems:
        return []

    order = ranked(problems, seed)
    return [order[i % len(order)] for i in range(count)]


def read_source(path: str, config: TaskConfig, number: str = "") -> DataSource:
    """One of the user's files, folders or hub datasets; `number` tells several of them apart."""
    return _read_source(path, config.columns, number, _stamp(path))


def _stamp(path: str) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file, or one of a folder, does; nothing for a dataset on the hub."""
    place = Path(path).expanduser()
    files = [place]
    if place.is_dir():
        files = sorted(place.rglob("*"))

    stamps = []
    for file in files:
        if file.is_file():
            facts = file.stat()
            stamps.append((str(file), facts.st_size, facts.st_mtime_ns))

    return tuple(stamps)


@lru_cache(maxsize=4)  # a command checks its data, and then loads them
def _read_source(
    path: str, column_names: str, number: str, stamp: tuple[tuple[str, int, int], ...]
) -> DataSource:
    train, test = read_splits(*parse_location(path))
    if not train:
        raise ValueError(f"{path} has no rows: check --data")

    rows = [*train, *(test or ())]
    columns = choose_columns(rows, path, column_names)
    parse_switches(rows, columns.for_reward())

    stem = f"{data_name(path)}{number}"
    problems = make_problems(train, f"{stem}-train", columns)

    if test is None:
        test_problems = []
    else:
        test_problems = make_problems(test, f"{stem}-test", columns)

    # Texts to compare with are for the reward: no answer in them can be checked.
    if has_prose(rows, [*problems, *test_problems]):
        problems = [without_gold(problem) for problem in problems]
        test_problems = [without_gold(problem) for problem in test_problems]

    gold = columns.gold
    if gold is None and (problems[0].gold or problems[0].solution):
        gold = f"the last reply of {columns.prompt}"

    return DataSource(
        name=path,
        prompt=columns.prompt,
        gold=gold,
        names=columns.names,
        train=problems,
        test=None if test is None else test_problems,
    )


def parse_location(path: str) -> tuple[str, str | None]:
    """A path, or a hub dataset and its subset."""
    if ":" not in path or Path(path).expanduser().exists():
        return path, None

    location, _, subset = path.partition(":")
    return location, subset


def choose_columns(rows: Sequence[TableRow], path: str, column_names: str) -> Columns:
    """The columns that --data.columns names, else the first known ones of the table."""
    given = dict(item.split("=", 1) for item in column_names.split(",") if item)
    add_fields(rows, [*given.values(), *GOLD_COLUMNS])

    first = rows[0]
    names = tuple(first.values)
    shown = ", ".join(map(str, names[:MAX_SHOWN]))
    for column in given.values():
        if column and column not in names:
            raise ValueError(
                f"{first.place}: no column {column!r}{suggest(column, names)}; columns: {shown}: "
                f"check --data.columns {column_names}"
            )

    prompt = given.pop("prompt", None) or first_known(PROMPT_COLUMNS, names)
    if prompt is None:
        raise ValueError(
            f"{path} has no column {', '.join(PROMPT_COLUMNS)}, but {shown}: name the prompt's "
            "with --data.columns prompt=NAME"
        )

    other_names = [name for name in names if name != prompt]
    gold = given.pop("gold", first_known(GOLD_COLUMNS, other_names))

    return Columns(prompt=prompt, gold=gold or None, names=names, named=given)


def first_known(known: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in known if name in names), None)


def add_fields(rows: Sequence[TableRow], names: Sequence[str]) -> None:
    """Make columns of fields of other columns, such as reward_model.ground_truth."""
    for name in names:
        column, dot, field = name.partition(".")
        if not dot:
            continue

        for row in rows:
            outer = row.values.get(column)
            if isinstance(outer, dict) and field in outer:
                row.values[name] = outer[field]


def parse_switches(rows: Sequence[TableRow], columns: Sequence[str]) -> None:
    """Make booleans of the columns of CSV that hold True and False: both texts are true in `if`."""
    for name in columns:
        is_switch = all(not row.typed and row.values.get(name) in SWITCHES for row in rows)
        if not is_switch:
            continue

        for row in rows:
            row.values[name] = SWITCHES[row.values[name]]


def make_problems(rows: Sequence[TableRow], stem: str, columns: Columns) -> list[Problem]:
    problems = []
    for number, row in enumerate(rows):
        name = f"{stem}-{number}"
        problem = make_problem(row, name, columns.prompt, columns.gold, columns.named)
        problems.append(problem)

    return problems


def make_problem(
    row: TableRow, name: str, prompt: str, gold: str | None, named: Mapping[str, str] | None = None
) -> Problem:
    """A row as a problem.

    Args:
        name: the problem's id.
        prompt: its column.
        gold: its column; None without one.
        named: further names for the reward, and their columns.
    """
    value = row.values.get(prompt)
    messages = None
    reply = None
    if isinstance(value, list):
        messages, reply = read_messages(value, f"{row.place}: column {prompt!r}")
        question = spell_messages(messages)
    else:
        question = row.text(prompt)

    text = reply
    if gold is not None and not isinstance(row.values.get(gold), list | dict | bool):
        text = row.text(gold)

    answer, solution = read_gold(text) if text else (None, None)
    columns = dict(row.values)
    for key, column in (named or {}).items():
        columns[key] = row.values[column]

    return Problem(
        question=question,
        gold=answer,
        id=name,
        solution=solution,
        messages=messages,
        columns=columns,
        reply=reply if gold is None else None,
    )


def spell_messages(messages: Sequence[Message]) -> str:
    """A conversation as one text: the question itself if there is nothing else."""
    if len(messages) == 1:
        return messages[0]["content"]

    return "\n".join(f"{one['role']}: {one['content']}" for one in messages)


def read_gold(text: str) -> tuple[str, str | None]:
    r"""The answer in a gold's text, and the text as a worked solution.

    >>> read_gold("6 + 1 = <<6+1=7>>7\n#### 7"), read_gold("7")
    (('7', '6 + 1 = 7'), ('7', None))
    """
    steps, mark, last = text.rpartition("####")
    answer = last.strip()
    if mark and answer and "\n" not in answer:
        if "<<" in steps:
            steps = CALCULATOR_MARK.sub("", steps)
        if "," in answer:
            answer = THOUSANDS.sub("", answer)

        return answer, steps.strip() or None

    boxed = FORMATS["boxed"].extract(text)
    if boxed is not None:
        return boxed, text

    return text, None if is_checkable(text) else text


def is_checkable(gold: str) -> bool:
    return len(gold) <= MAX_ANSWER and "\n" not in gold


def has_prose(rows: Sequence[TableRow], problems: Sequence[Problem]) -> bool:
    """Whether any row has no short answer; a warning says so if most rows have one."""
    prose = []
    for row, problem in zip(rows, problems, strict=True):
        if problem.gold is None or not is_checkable(problem.gold):
            prose.append(row.place)

    if prose and 2 * len(prose) < len(rows):
        message = "no row is graded, for %d of %d have no short answer, first %s: remove them"
        log.warning(message, len(prose), len(rows), prose[0])

    return bool(prose)


def without_gold(problem: Problem) -> Problem:
    return replace(problem, gold=None, solution=problem.solution or problem.gold)


def read_messages(value: Sequence[Any], place: str) -> tuple[list[Message], str | None]:
    """Chat messages up to the last question, and the reply after it if there is one."""
    messages = [read_message(one, place) for one in value]

    reply = None
    if messages and messages[-1]["role"] == "assistant":
        reply = messages.pop()["content"]

    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{place}: there is no question, a last message that is not a reply")

    return messages, reply


def read_message(value: Any, place: str) -> Message:
    fields = value if isinstance(value, dict) else {}
    role = fields.get("role", fields.get("from"))
    content = fields.get("content", fields.get("value"))
    if isinstance(content, list):
        content = join_parts(content)

    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"{place}: a message needs role and content (text), not {value!r:.60}")

    return {"role": ROLES.get(role, role), "content": content}


def join_parts(parts: Sequence[Any]) -> str | None:
    """The text of a message in parts, as of multimodal models; None if a part is no text."""
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if None in texts:
        return None

    return "".join(map(str, texts))
