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
Row = dict[str, Any]


class Chat(list[dict[str, Any]]):
    """The messages of a prompt; shallow deepcopy, since TRL deep-copies every prompt."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chat":
        return Chat(self)


class Rows(Dataset):
    """A dataset that reads a row once for all its repetitions in a batch. The rows of a group are
    separate dicts around one prompt object, so copying and comparing them is cheap."""

    # Distinct rows of the batch read last; a data loader reads one batch ahead.
    latest: Sequence[Row] = ()

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        distinct = list(dict.fromkeys(keys))
        read = dict(zip(distinct, super().__getitems__(distinct), strict=True))
        for row in read.values():
            if isinstance(row.get("prompt"), list):
                row["prompt"] = Chat(row["prompt"])

        self.latest = [row for row in read.values() if "prompt" in row]
        return [dict(read[key]) for key in keys]


class Batch:
    """A batch of rows that Accelerate passes on untouched; it would search a plain list for tensors
    down to each chat message, and rebuild it twice."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class Curriculum:
    """Replaces each row by that of the present level in the same place.

    Rows are replaced when they are used, not when the data loader reads ahead, and the level and
    the rates behind it are saved in checkpoints: a resumed run sees the same prompts.

    Args:
        pools: the rows of each level, easiest first, equally many of each.
        bound: success rate at which the level rises.
    """

    def __init__(self, pools: Sequence[Sequence[Row]], bound: float) -> None:
        size = min(map(len, pools))
        self.pools = [pool[:size] for pool in pools]
        self.bound = bound
        self.level = 0
        self.rates: deque[float] = deque(maxlen=ROLLOUTS)
        self._places = {row["id"]: k for k, row in enumerate(pools[0])}

    def place(self, rows: Sequence[Row]) -> list[Row]:
        pool = self.pools[self.level]
        return [{**row, **pool[self._places[row["id"]] % len(pool)]} for row in rows]

    def update(self, success: float) -> None:
        self.rates.append(success)
        is_sure = len(self.rates) == ROLLOUTS and sum(self.rates) / ROLLOUTS >= self.bound
        if is_sure and self.level < len(self.pools) - 1:
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
    messages = [prompts.build_prompt(p, config, task.format, task.examples) for p in task.train]
    chat = tokenizer.chat_template is not None

    columns = {
        "prompt": messages if chat else [prompts.plain_text(one) for one in messages],
        "gold": [problem.gold for problem in task.train],
        "id": [problem.id for problem in task.train],
    }
    if any(problem.columns for problem in task.train):
        # As JSON: Arrow would force one type on a column, and TRL takes some names for images.
        columns["columns"] = [json.dumps(p.columns, default=str) for p in task.train]

    return Rows.from_dict(columns)  # pyright: ignore


def first_level(task: Task, config: TaskConfig) -> Task:
    """The problems that a run starts with: with a curriculum, those of the lowest level."""
    return task if config.curriculum is None else replace(task, train=_by_level(task)[0])


def make_curriculum(task: Task, config: TaskConfig, tokenizer: Any) -> Curriculum:
    pools: list[list[Any]] = [
        list(make_rows(replace(task, train=problems), config, tokenizer))
        for problems in _by_level(task)
    ]
    return Curriculum(pools, config.curriculum or 1.0)


def _by_level(task: Task) -> list[list[Problem]]:
    levels = sorted({problem.level or 0 for problem in task.train})
    return [[one for one in task.train if (one.level or 0) == level] for level in levels]


def make_demonstrations(task: Task, config: SftConfig, tokenizer: Any) -> Dataset:
    """Solved problems as tokens with labels on the completion, in the order the whole run reads."""
    problems = [one for one in task.train if one.gold is not None or one.solution]
    has_replies = bool(problems) and all(one.reply is not None for one in problems)
    plain = has_replies and config.task.system is None  # replies are in no format to ask for
    settings = replace(config.task, system="") if plain else config.task
    rendered = prompts.render_prompts(problems, settings, tokenizer, task.examples)

    texts = []
    for problem, prompt in zip(problems, rendered, strict=True):
        # The question itself decides whether its answer stands outside the format.
        loose = digest(problem.question, "loose") / 2**64 < config.loose
        texts.append((prompt, prompts.solved_text(problem, None if loose else task.format)))

    pairs = prompts.demonstrate(texts, tokenizer) if texts else []
    fitting = [pair for pair in pairs if sum(map(len, pair)) <= config.max_tokens]
    if not fitting:
        raise ValueError(
            f"none of the {len(task.train)} training problems has a gold answer and fits in "
            f"{config.max_tokens} tokens: raise --max-tokens or check the data"
        )

    if len(fitting) < len(task.train):
        message = "%d of %d problems train: the others have no answer or exceed --max-tokens %d"
        log.warning(message, len(fitting), len(task.train), config.max_tokens)

    ids = [prompt + completion for prompt, completion in fitting]
    labels = [[IGNORED] * len(prompt) + completion for prompt, completion in fitting]
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels})

    return rows.select(reading_order(len(fitting), config.steps * config.batch, config.seed))


def reading_order(rows: int, count: int, seed: int) -> Sequence[int]:
    """Row numbers in reading order: one shuffle after another until `count` are read."""
    rng = random.Random(f"sft {seed}")
    order: list[int] = []
    while len(order) < count:
        epoch = list(range(rows))
        rng.shuffle(epoch)
        order += epoch

    return order[:count]
