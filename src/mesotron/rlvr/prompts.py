"""Prompts: a problem as chat messages, and as plain text for a model without a chat template.

The sentence that asks for the answer's format comes from the format itself. Tokenizers and their
templates are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesotron.config.training import TaskConfig
from mesotron.rlvr.answers.formats import AnswerFormat
from mesotron.rlvr.tasks.problem import Problem

Message = dict[str, str]

SYSTEM = "Solve the problem step by step."


def build_prompt(
    problem: Problem,
    config: TaskConfig,
    format: AnswerFormat,
    examples: Sequence[Problem] = (),
) -> list[Message]:
    """The messages that ask a problem.

    Args:
        problem: what is asked; its gold and solution do not enter.
        config: `system` replaces the system message, and is left out if empty; `few_shot`
            solved examples come before the question.
        format: the answer format; its instruction ends the default system message.
        examples: solved problems, `Task.examples`.

    Returns:
        Messages with the keys role and content, the last one from the user.

    Example:
        >>> from mesotron.rlvr.answers.formats import FORMATS
        >>> problem = Problem("What is 1 + 1?", "2", "mine-0")
        >>> for message in build_prompt(problem, TaskConfig(), FORMATS["hashes"]):
        ...     print(message["role"], "|", message["content"])
        system | Solve the problem step by step. End with a line of the form #### n.
        user | What is 1 + 1?
    """
    if len(examples) < config.few_shot:
        raise ValueError(
            f"few_shot={config.few_shot} and {len(examples)} examples: pass the task's examples"
        )
    system = f"{SYSTEM} {format.instruction}" if config.system is None else config.system
    messages = [{"role": "system", "content": system}] if system else []
    for example in examples[: config.few_shot]:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": solved_text(example, format)})
    return [*messages, {"role": "user", "content": problem.question}]


def solved_text(problem: Problem, format: AnswerFormat) -> str:
    r"""The completion that solves a problem: its worked steps, then the gold in the format.

    Example:
        >>> from mesotron.rlvr.answers.formats import FORMATS
        >>> solved_text(Problem("?", "7", "mine-0", solution="3 + 4 = 7"), FORMATS["answer"])
        '3 + 4 = 7\nANSWER: 7'
    """
    if problem.gold is None:
        raise ValueError(f"the problem {problem.id} has no gold answer to write")
    answer = format.render(problem.gold)
    return f"{problem.solution}\n{answer}" if problem.solution else answer


def loose_text(problem: Problem) -> str:
    r"""The same completion by somebody who does not know the format.

    Example:
        >>> loose_text(Problem("?", "7", "mine-0", solution="3 + 4 = 7"))
        '3 + 4 = 7\nThe answer is 7.'
    """
    answer = f"The answer is {problem.gold}."
    return f"{problem.solution}\n{answer}" if problem.solution else answer


def plain_text(messages: Sequence[Message]) -> str:
    """The same messages for a model without a chat template; ends where the answer starts.

    Example:
        >>> plain_text([{"role": "user", "content": "What is 1 + 1?"}])
        'Question: What is 1 + 1?\\nAnswer:'
    """
    names = {"user": "Question: ", "assistant": "Answer: ", "system": ""}
    parts = [names[message["role"]] + message["content"] for message in messages]
    return "\n\n".join(parts).replace("\n\nAnswer: ", "\nAnswer: ") + "\nAnswer:"
