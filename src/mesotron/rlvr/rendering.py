"""Prompts as the text that a model reads: its chat template, or plain text if it has none.

Supervised training, evaluation and sampling read one text, so a model is never measured on
another prompt than it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesotron.config import TaskConfig
from mesotron.rlvr.answers.formats import FORMATS
from mesotron.rlvr.prompts import Message, build_prompt, plain_text
from mesotron.rlvr.tasks.problem import Problem


def render(messages: Sequence[Message], tokenizer: Any) -> str:
    """Messages as text, up to where the answer starts, special tokens included.

    Args:
        messages: from `build_prompt`.
        tokenizer: its chat template is used if it has one.
    """
    if tokenizer.chat_template is None:
        return plain_text(messages)
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)


def render_prompts(
    problems: Sequence[Problem],
    task: TaskConfig,
    tokenizer: Any,
    examples: Sequence[Problem] = (),
) -> list[str]:
    """The text that asks each problem.

    Args:
        problems: what is asked.
        task: format, system prompt and few-shot examples.
        tokenizer: of the model that is asked.
        examples: `Task.examples`, if the task has few-shot examples.
    """
    form = FORMATS[task.format]
    return [render(build_prompt(p, task, form, examples), tokenizer) for p in problems]


def demonstrate(prompt: str, completion: str, tokenizer: Any) -> list[list[int]]:
    """A solved problem as the tokens of its prompt and those of its completion.

    The two are tokenized apart, as they are when a model continues a prompt; the completion ends
    with the token that ends a turn.
    """
    space = "" if tokenizer.chat_template else " "  # after "Answer:"
    parts = prompt, space + completion
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    return [ids[0], [*ids[1], tokenizer.eos_token_id]]
