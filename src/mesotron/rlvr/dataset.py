"""From a task to what a GRPO trainer takes: rows with prompts, and a reward function.

A row has the columns prompt (chat messages, or text for a model without a chat template), gold and
id. The gold is for the reward and for metrics; self-labelled objectives do not read it.
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from mesotron.config import RolloutConfig, TaskConfig
from mesotron.rlvr.prompts import build_prompt, plain_text
from mesotron.rlvr.tasks.problem import Task


def make_rows(task: Task, config: TaskConfig, tokenizer: Any) -> Dataset:
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
    return Dataset.from_dict(columns)


def check_enough(task: Task, rollout: RolloutConfig) -> None:
    """Refuse fewer problems than one rollout batch asks: TRL would train on none, in silence."""
    if len(task.train) < rollout.prompts:
        raise ValueError(
            f"{len(task.train)} training problems are fewer than the {rollout.prompts} prompts of "
            "one rollout batch: give more problems or a smaller --rollout.prompts"
        )
