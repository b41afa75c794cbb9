"""From a task to what a GRPO trainer takes: rows with prompts, and a reward function.

A row has the columns prompt (chat messages, or text for a model without a chat template), gold and
id. The gold is for the reward and for metrics; self-labelled objectives do not read it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset

from mesotron.config import TaskConfig
from mesotron.rlvr.answers.facts import Facts
from mesotron.rlvr.prompts import build_prompt, plain_text
from mesotron.rlvr.rewards import Reward, Scores
from mesotron.rlvr.tasks.problem import Task


class Chat(list[dict[str, Any]]):
    """The messages of a prompt, which are never changed: a deep copy is a new list of the same.

    TRL copies all prompts of a rollout down to each letter, so that tools can add messages.

    Example:
        >>> from copy import deepcopy
        >>> chat = Chat([{"role": "user", "content": "1 + 1 ="}])
        >>> copied = deepcopy(chat)
        >>> copied == chat, copied is chat, copied[0] is chat[0]
        (True, False, True)
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chat":
        return Chat(self)


class Rows(Dataset):
    """A dataset that reads a row once for all its repetitions in a batch.

    A group's rows are dicts of their own around the same prompt: whoever copies or compares them
    sees at once that they are alike.
    """

    latest: Sequence[Any] = ()
    """Distinct prompts of the batch that was read last; a data loader reads one batch ahead."""

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        distinct = list(dict.fromkeys(keys))
        found = dict(zip(distinct, super().__getitems__(distinct), strict=True))
        for row in found.values():
            if isinstance(row.get("prompt"), list):
                row["prompt"] = Chat(row["prompt"])
        self.latest = [row["prompt"] for row in found.values() if "prompt" in row]
        return [dict(found[key]) for key in keys]


class Batch:
    """Rows on their way from a data loader to a trainer, as nothing that anybody looks into.

    They are text. A list of them would be searched for tensors to pin and to bring to the GPU, down
    to each message of each chat, and be built anew twice.

    Args:
        rows: of one batch.

    Example:
        >>> batch = Batch([{"gold": "7"}, {"gold": "8"}])
        >>> len(batch), batch[1], [row["gold"] for row in batch]
        (2, {'gold': '8'}, ['7', '8'])
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def make_rows(task: Task, config: TaskConfig, tokenizer: Any) -> Rows:
    """The training problems as a dataset.

    Args:
        task: problems and answer format.
        config: how they are asked.
        tokenizer: whether it has a chat template decides the kind of prompt.
    """
    messages = [build_prompt(p, config, task.format, task.examples) for p in task.train]
    prompts: Sequence[Any] = messages
    if tokenizer.chat_template is None:
        prompts = [plain_text(one) for one in messages]
    columns = {
        "prompt": prompts,
        "gold": [problem.gold for problem in task.train],
        "id": [problem.id for problem in task.train],
    }
    found = Rows.from_dict(columns)
    assert isinstance(found, Rows)
    return found


def as_reward_function(reward: Reward) -> Callable[..., Scores]:
    """A reward as TRL calls it, named "reward" in the metrics; the trainer's judge gives the facts.

    Args:
        reward: from `make_reward`.
    """

    def scores(
        completions: list[Any],
        completion_ids: list[list[int]],
        gold: list[str | None],
        facts: list[Facts],
        truncated: list[bool],
        row: list[dict[str, Any]],
        **_: Any,
    ) -> Scores:
        texts = [x if isinstance(x, str) else str(x[-1]["content"] or "") for x in completions]
        return reward(texts, completion_ids, gold, truncated, rows=row, facts=facts)

    scores.__name__ = "reward"
    return scores
