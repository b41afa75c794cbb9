"""From a task to what a GRPO trainer takes: rows with prompts, and a reward function.

A row has the columns prompt (chat messages, or text for a model without a chat template), gold and
id. The gold is for the reward and for metrics; self-labelled objectives do not read it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset

from mesotron.config import RolloutConfig, TaskConfig
from mesotron.rlvr.answers.facts import Facts
from mesotron.rlvr.prompts import build_prompt, plain_text
from mesotron.rlvr.rewards import Reward, Scores
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
