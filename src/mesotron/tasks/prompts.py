"""A problem as chat messages and as text: the same for training, evaluation and warm starts."""

from collections.abc import Sequence
from heapq import nlargest
from typing import Any

from mesotron.answers.formats import FORMATS, AnswerFormat
from mesotron.config import TaskConfig
from mesotron.tasks.problem import Problem, Task

Message = dict[str, str]

SYSTEM = "Solve the problem step by step."


def build_prompt(
    problem: Problem, config: TaskConfig, format: AnswerFormat, examples: Sequence[Problem] = ()
) -> list[Message]:
    if len(examples) < config.few_shot:
        raise ValueError(f"few_shot={config.few_shot} needs as many examples, got {len(examples)}")

    system = f"{SYSTEM} {format.instruction}" if config.system is None else config.system
    given = problem.messages or [{"role": "user", "content": problem.question}]
    has_own = given[0]["role"] == "system"

    messages = [{"role": "system", "content": system}] if system and not has_own else []
    for example in examples[: config.few_shot]:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": solved_text(example, format)})

    return [*messages, *given]


def solved_text(problem: Problem, format: AnswerFormat | None) -> str:
    """The solution of a problem: its steps, then the gold, in a sentence or the format."""
    text = problem.reply or (problem.solution if problem.gold is None else None)
    if text:
        return text
    if problem.gold is None:
        raise ValueError(f"the problem {problem.id} has no gold answer")

    answer = format.render(problem.gold) if format else f"The answer is {problem.gold}."
    return f"{problem.solution}\n{answer}" if problem.solution else answer


def plain_text(messages: Sequence[Message]) -> str:
    names = {
        "user": "Question: ",
        "assistant": "Answer: ",
        "system": "",
    }
    parts = [names.get(one["role"], f"{one['role']}: ") + one["content"] for one in messages]

    return "\n\n".join(parts).replace("\n\nAnswer: ", "\nAnswer: ") + "\nAnswer:"


def render(messages: Sequence[Message], tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return plain_text(messages)

    how = {"tokenize": False, "add_generation_prompt": True}
    how |= getattr(tokenizer, "template_kwargs", {})

    try:
        return tokenizer.apply_chat_template(list(messages), **how)
    except Exception as error:  # a template is the model author's code, in a sandbox
        name = tokenizer.name_or_path
        raise ValueError(f"the chat template of {name} fails: {error}; correct it") from error


def render_prompts(
    problems: Sequence[Problem], task: TaskConfig, tokenizer: Any, examples: Sequence[Problem] = ()
) -> list[str]:
    form = FORMATS[task.format]
    return [render(build_prompt(p, task, form, examples), tokenizer) for p in problems]


def demonstrate(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> list[list[list[int]]]:
    """Token ids of prompts and completions, tokenized apart as when a model continues a prompt."""
    space = "" if tokenizer.chat_template else " "  # after "Answer:"
    texts = [text for prompt, completion in pairs for text in (prompt, space + completion)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]

    return [[ids[k], [*ids[k + 1], tokenizer.eos_token_id]] for k in range(0, len(ids), 2)]


def check_prompts(task: Task, config: TaskConfig, tokenizer: Any, model: Any, tokens: int) -> None:
    """Refuse training problems that leave too little of the model's context for a completion."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for problem in nlargest(32, task.train, key=lambda problem: len(problem.question.encode())):
        prompt = render(build_prompt(problem, config, task.format, task.examples), tokenizer)
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        if context is not None and length + tokens > context:
            raise ValueError(
                f"the prompt of {problem.id} has {length} tokens; beside a completion of {tokens} "
                f"(--rollout.max-tokens) the model takes {context}: lower that or drop the row"
            )
