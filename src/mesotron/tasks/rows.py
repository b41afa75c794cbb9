"""Datasets: rows with prompt, gold and id for GRPO, and tokenized demonstrations for SFT.

The gold is for rewards and metrics; self-labeled objectives do not train on it.
"""

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from mesotron.config import SftConfig, TaskConfig
from mesotron.tasks import prompts
from mesotron.tasks.problem import Problem, Task, digest, log

IGNORED = -100  # the label that the loss skips
ROLLOUTS = 4  # rollout batches whose mean success rate decides about the next level
DatasetRow = dict[str, Any]


class PromptMessages(list[dict[str, Any]]):
    """The messages of a prompt; shallow deepcopy, since TRL deep-copies every prompt."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "PromptMessages":
        return PromptMessages(self)


class Rows(Dataset):
    """A dataset that reads a row once for all its repetitions in a batch. The rows of a group are
    separate dicts around one prompt object, so copying and comparing them is cheap."""

    # Distinct rows of the batch read last; a data loader reads one batch ahead.
    latest: Sequence[DatasetRow] = ()

    def __getitems__(self, keys: list[int]) -> list[DatasetRow]:
        distinct = list(dict.fromkeys(keys))
        read = dict(zip(distinct, super().__getitems__(distinct), strict=True))
        for row in read.values():
            prompt = row.get("prompt")
            if isinstance(prompt, list):
                row["prompt"] = PromptMessages(prompt)

        self.latest = [row for row in read.values() if "prompt" in row]
        return [dict(read[key]) for key in keys]


class RowBatch:
    """A batch of rows that Accelerate passes on untouched; it would search a plain list for tensors
    down to each chat message, and rebuild it twice."""

    def __init__(self, rows: list[DatasetRow]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> DatasetRow:
        return self.rows[number]

    def __iter__(self) -> Iterator[DatasetRow]:
        return iter(self.rows)


class Curriculum:
    """Replaces each row by that of the present level in the same place.

    Rows are replaced when they are used, not when the data loader reads ahead, and the level and
    the rates behind it are saved in checkpoints: a resumed run sees the same prompts.

    Args:
        pools: the rows of each level, easiest first, equally many of each.
        bound: success rate at which the level rises.
    """

    def __init__(self, pools: Sequence[Sequence[DatasetRow]], bound: float) -> None:
        size = min(map(len, pools))
        self.pools = [pool[:size] for pool in pools]
        self.bound = bound
        self.level = 0
        self.rates: deque[float] = deque(maxlen=ROLLOUTS)
        self._places = {row["id"]: k for k, row in enumerate(pools[0])}

    def place(self, rows: Sequence[DatasetRow]) -> list[DatasetRow]:
        pool = self.pools[self.level]
        placed = []
        for row in rows:
            place = self._places[row["id"]]
            placed.append(row | pool[place % len(pool)])

        return placed

    def update(self, success: float) -> None:
        """Note the success rate of a rollout batch, and raise the level if they suffice."""
        self.rates.append(success)
        if len(self.rates) < ROLLOUTS or self.level == len(self.pools) - 1:
            return

        if sum(self.rates) / ROLLOUTS >= self.bound:
            self.level += 1
            self.rates.clear()

    def state_dict(self) -> dict[str, Any]:
        values = {"level": self.level, "rates": list(self.rates)}
        return {"tensors": {}, "values": json.dumps(values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values = json.loads(state_dict["values"])
        self.level = values["level"]
        self.rates = deque(values["rates"], maxlen=ROLLOUTS)


def make_rows(task: Task, config: TaskConfig, tokenizer: Any) -> Rows:
    """The training problems as TRL reads them."""
    problems = task.train
    chats = [prompts.build_prompt(one, config, task.format, task.examples) for one in problems]
    has_template = tokenizer.chat_template is not None

    columns = {
        "prompt": chats if has_template else [prompts.plain_text(chat) for chat in chats],
        "gold": [problem.gold for problem in problems],
        "id": [problem.id for problem in problems],
    }
    if any(problem.columns for problem in problems):
        # As JSON: Arrow would force one type on a column, and TRL takes some names for images.
        columns["columns"] = [json.dumps(problem.columns, default=str) for problem in problems]

    return Rows.from_dict(columns)  # pyright: ignore


def first_level(task: Task, config: TaskConfig) -> Task:
    """The problems that a run starts with: with a curriculum, those of the lowest level."""
    if config.curriculum is None:
        return task

    return replace(task, train=_by_level(task)[0])


def make_curriculum(task: Task, config: TaskConfig, tokenizer: Any) -> Curriculum:
    pools: list[list[Any]] = []
    for problems in _by_level(task):
        rows = make_rows(replace(task, train=problems), config, tokenizer)
        pools.append(list(rows))

    return Curriculum(pools, config.curriculum or 1.0)


def _by_level(task: Task) -> list[list[Problem]]:
    by_level: dict[int, list[Problem]] = {}
    for problem in task.train:
        by_level.setdefault(problem.level or 0, []).append(problem)

    return [by_level[level] for level in sorted(by_level)]


def make_demonstrations(task: Task, config: SftConfig, tokenizer: Any) -> Dataset:
    """Solved problems as tokens with labels on the completion, in the order the whole run reads."""
    texts = _demonstrations(task, config, tokenizer)
    pairs = prompts.demonstrate(texts, tokenizer) if texts else []
    fitting = []
    for pair in pairs:
        if sum(map(len, pair)) <= config.max_tokens:
            fitting.append(pair)

    _check_fitting(len(fitting), task, config)

    ids = []
    labels = []
    for prompt, completion in fitting:
        ids.append(prompt + completion)
        labels.append([IGNORED] * len(prompt) + completion)

    rows = Dataset.from_dict({"input_ids": ids, "labels": labels})
    order = reading_order(len(fitting), config.steps * config.batch, config.seed)
    return rows.select(order)


def _demonstrations(task: Task, config: SftConfig, tokenizer: Any) -> list[tuple[str, str]]:
    """Prompts and their solutions, as text."""
    problems = [one for one in task.train if one.gold is not None or one.solution]
    settings = config.task
    if settings.system is None and all(one.reply is not None for one in problems):
        settings = replace(settings, system="")  # replies are in no format to ask for

    rendered = prompts.render_prompts(problems, settings, tokenizer, task.examples)
    texts = []
    for problem, prompt in zip(problems, rendered, strict=True):
        # The question itself decides whether its answer stands outside the format.
        is_loose = digest(problem.question, "loose") / 2**64 < config.loose
        format = None if is_loose else task.format
        texts.append((prompt, prompts.solved_text(problem, format)))

    return texts


def _check_fitting(num_fitting: int, task: Task, config: SftConfig) -> None:
    num_problems = len(task.train)
    if num_fitting == 0:
        raise ValueError(
            f"none of the {num_problems} training problems has a gold answer and fits in "
            f"{config.max_tokens} tokens: raise --max-tokens or check the data"
        )

    if num_fitting < num_problems:
        message = "%d of %d problems train: the others have no answer or exceed --max-tokens %d"
        log.warning(message, num_fitting, num_problems, config.max_tokens)


def reading_order(rows: int, count: int, seed: int) -> Sequence[int]:
    """Row numbers in reading order: one shuffle after another until `count` are read."""
    rng = random.Random(f"sft {seed}")
    order: list[int] = []
    while len(order) < count:
        epoch = list(range(rows))
        rng.shuffle(epoch)
        order += epoch

    return order[:count]
