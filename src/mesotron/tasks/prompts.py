"""A problem as chat messages and as text: the same for training, evaluation and warm starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from typing import Any

from mesotron.answers.formats import FORMATS, AnswerFormat
from mesotron.config import TaskConfig
from mesotron.runs.process import cpu_allowance
from mesotron.tasks.problem import Problem, Task

Message = dict[str, str]

SYSTEM = "Solve the problem step by step."
LABELS = {"user": "Question: ", "assistant": "Answer: ", "system": ""}  # by role
NUM_CHECKED = 32  # of the longest prompts
# CPU time that rendering prompts may take; a usual template needs less than a millisecond each.
RENDERING_SECONDS = 10.0
SECONDS_PER_PROMPT = 0.2  # with its tokens, and images if it has some


def build_prompt(
    problem: Problem, config: TaskConfig, format: AnswerFormat, examples: Sequence[Problem] = ()
) -> list[Message]:
    """The system prompt, the examples and the question."""
    if len(examples) < config.few_shot:
        raise ValueError(f"few_shot={config.few_shot} needs as many examples, got {len(examples)}")

    question = problem.messages or [{"role": "user", "content": problem.question}]
    has_own_system = question[0]["role"] == "system"
    system = config.system
    if system is None:
        system = f"{SYSTEM} {format.instruction}"

    messages = []
    if system and not has_own_system:
        messages.append({"role": "system", "content": system})

    for example in examples[: config.few_shot]:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": solved_text(example, format)})

    return [*messages, *question]


def solved_text(problem: Problem, format: AnswerFormat | None) -> str:
    """The solution of a problem: its steps, then the gold, in a sentence or the format."""
    if problem.reply:
        return problem.reply

    if problem.gold is None:
        if not problem.solution:
            raise ValueError(f"the problem {problem.id} has no gold answer")
        return problem.solution

    if format:
        answer = format.render(problem.gold)
    else:
        answer = f"The answer is {problem.gold}."

    if problem.solution:
        return f"{problem.solution}\n{answer}"

    return answer


def plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a chat template; the model continues the last line."""
    parts = []
    for message in messages:
        role = message["role"]
        label = LABELS.get(role, f"{role}: ")
        parts.append(label + message["content"])

    text = "\n\n".join(parts).replace("\n\nAnswer: ", "\nAnswer: ")
    return f"{text}\nAnswer:"


@contextmanager
def rendering(tokenizer: Any, prompts: int = 1) -> Iterator[None]:
    """Limit a chat template, which is the model author's code in a sandbox, and name its model."""
    name = getattr(tokenizer, "name_or_path", "the model")
    allowance = RENDERING_SECONDS + prompts * SECONDS_PER_PROMPT
    try:
        with cpu_allowance(allowance):
            yield
    except TimeoutError as error:
        raise ValueError(
            f"the chat template of {name} takes more than {allowance:.3g} s of CPU time for "
            f"{prompts} prompts: correct its loops"
        ) from error
    except Exception as error:
        raise ValueError(f"the chat template of {name} fails: {error}; correct it") from error


def render(messages: Sequence[Message], tokenizer: Any) -> str:
    """Messages as the text that a model continues."""
    return render_all([messages], tokenizer)[0]


def render_all(chats: Sequence[Sequence[Message]], tokenizer: Any) -> list[str]:
    if tokenizer.chat_template is None:
        opening = own_opening(tokenizer)
        return [opening + plain_text(chat) for chat in chats]

    options = {"tokenize": False, "add_generation_prompt": True}
    options |= getattr(tokenizer, "template_kwargs", {})

    with rendering(tokenizer, len(chats)):
        return [tokenizer.apply_chat_template(list(chat), **options) for chat in chats]


def own_opening(tokenizer: Any) -> str:
    """The token that the tokenizer itself puts before every text, such as Gemma's <bos>, or none.

    Rendered prompts are encoded without special tokens, since chat templates write their own.
    """
    begin = tokenizer.bos_token_id
    if begin is None or tokenizer("a")["input_ids"][0] != begin:
        return ""

    return tokenizer.bos_token


def render_prompts(
    problems: Sequence[Problem], task: TaskConfig, tokenizer: Any, examples: Sequence[Problem] = ()
) -> list[str]:
    form = FORMATS[task.answer_format]
    prompts = [build_prompt(problem, task, form, examples) for problem in problems]
    return render_all(prompts, tokenizer)


def demonstrate(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> list[list[list[int]]]:
    """Token ids of prompts and completions, tokenized apart as when a model continues a prompt."""
    space = "" if tokenizer.chat_template else " "  # after "Answer:"
    texts = []
    for prompt, completion in pairs:
        texts.append(prompt)
        texts.append(space + completion)

    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    prompts = ids[::2]
    completions = ids[1::2]

    return [[prompt, [*completion, end]] for prompt, completion in zip(prompts, completions)]


def check_prompts(task: Task, config: TaskConfig, tokenizer: Any, model: Any, tokens: int) -> None:
    """Refuse training problems that leave too little of the model's context for a completion."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = nlargest(NUM_CHECKED, task.train, key=lambda one: len(one.question.encode()))
    for problem in longest:
        prompt = render(build_prompt(problem, config, task.format, task.examples), tokenizer)
        length = len(tokenizer.encode(prompt, add_special_tokens=False))
        if context is not None and length + tokens > context:
            raise ValueError(
                f"the prompt of {problem.id} has {length} tokens; beside a completion of {tokens} "
                f"(--max-tokens) the model takes {context}: lower that or drop the row"
            )
