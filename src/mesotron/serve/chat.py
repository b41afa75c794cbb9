"""`mesotron chat`: a conversation with a trained model, or one answer, beside the start model."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.table import Table
from rich.text import Text

from mesotron.answers.formats import FORMATS
from mesotron.config import ChatConfig, TaskConfig
from mesotron.evaluate.subject import Subject, find_subject
from mesotron.models.library import set_library_variables
from mesotron.runs.console import SafeConsole
from mesotron.runs.process import go_offline_without_network
from mesotron.runs.resume import eval_defaults
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import Message, build_prompt, render

NEW = "/new"


class Chat:
    """One model and its side of the conversation."""

    def __init__(self, subject: Subject, system: Sequence[Message], config: ChatConfig) -> None:
        from mesotron.optim.device import choose_device

        device = choose_device(config.device, config.threads)
        self.name = subject.name
        self.config = config
        self.messages = list(system)
        self.model, self.tokenizer = subject.load(device)

    def answer(self, prompt: str) -> str:
        from mesotron.sampling.decode import generate

        settings = self.config
        self.messages.append({"role": "user", "content": prompt})

        (completion,) = generate(
            self.model,
            self.tokenizer,
            [render(self.messages, self.tokenizer)],
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        )

        self.messages.append({"role": "assistant", "content": completion.text})
        return completion.text + (" [cut off: --max-tokens]" if completion.truncated else "")


def run(config: ChatConfig) -> int:
    subject = find_subject(config.model)
    console = SafeConsole(highlight=False)
    if config.compare and subject.start is None:
        raise ValueError(f"--compare needs a run, which knows its start: {config.model} is none")

    set_library_variables(TaskConfig(), subject.model.name)
    go_offline_without_network()

    subjects = [subject]
    if config.compare and subject.start is not None:
        name = f"{subject.start.name} (before)"
        subjects.insert(
            0,
            replace(
                subject,
                name=name,
                model=subject.start,
                adapter=None,
            ),
        )

    system = system_of(config, subject)
    chats = [Chat(one, system, config) for one in subjects]
    if config.prompt is not None:
        say(chats, config.prompt, console)
        return 0

    asks = "you> " if sys.stdin.isatty() else ""
    if asks:
        console.print(f"Ctrl-D ends, {NEW} starts another conversation")

    try:
        while True:
            prompt = input(asks).strip()
            if prompt == NEW:
                for chat in chats:
                    chat.messages = list(system)
            elif prompt:
                say(chats, prompt, console)
    except (EOFError, KeyboardInterrupt):
        print(end="\n" if asks else "")

    return 0


def system_of(config: ChatConfig, subject: Subject) -> list[Message]:
    if config.system is not None:
        return [{"role": "system", "content": config.system}] if config.system else []
    if subject.start is None:
        return []

    task = replace(eval_defaults(config.model).task, few_shot=0)
    return build_prompt(Problem("", None, ""), task, FORMATS[task.answer_format])[:-1]


def say(chats: Sequence[Chat], prompt: str, console: SafeConsole) -> None:
    answers = [Text(chat.answer(prompt)) for chat in chats]
    if len(chats) == 1:
        console.print(answers[0], soft_wrap=True)
        return

    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for chat in chats:
        table.add_column(Text(chat.name), ratio=1)

    table.add_row(*answers)
    console.print(table)
