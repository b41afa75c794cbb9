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
from mesotron.models.variables import set_library_variables
from mesotron.runs.console import SafeConsole
from mesotron.runs.process import go_offline_without_network
from mesotron.runs.resume import eval_defaults
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import Message, build_prompt, render

NEW = "/new"


class Conversation:
    """One model and its side of the conversation."""

    def __init__(self, subject: Subject, system: Sequence[Message], config: ChatConfig) -> None:
        from mesotron.optim.device import choose_device

        self.name = subject.name
        self.config = config
        self.system = system
        self.messages = list(system)

        device = choose_device(config.device, config.threads)
        self.model, self.tokenizer = subject.load(device)

    def restart(self) -> None:
        self.messages = list(self.system)

    def answer(self, prompt: str) -> str:
        from mesotron.sampling.decode import generate

        self.messages.append({"role": "user", "content": prompt})
        (completion,) = generate(
            self.model,
            self.tokenizer,
            [render(self.messages, self.tokenizer)],
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            seed=self.config.seed,
        )
        self.messages.append({"role": "assistant", "content": completion.text})

        if completion.truncated:
            return f"{completion.text} [cut off: --max-tokens]"

        return completion.text


def run(config: ChatConfig) -> int:
    subject = find_subject(config.model)
    subjects = [subject]
    if config.compare:
        start = subject.at_start("before")
        if start is None:
            raise ValueError(
                f"--compare needs a run, which knows its start: {config.model} is none"
            )
        subjects = [start, subject]

    subject.say_which()
    console = SafeConsole(highlight=False)
    set_library_variables(TaskConfig(), subject.model.name)
    go_offline_without_network()

    system = system_of(config, subject)
    conversations = [Conversation(one, system, config) for one in subjects]
    if config.prompt is not None:
        say(conversations, config.prompt, console)
    else:
        talk(conversations, console)

    return 0


def talk(conversations: Sequence[Conversation], console: SafeConsole) -> None:
    """Answer what is typed until it ends."""
    is_typed = sys.stdin.isatty()
    asks = "you> " if is_typed else ""
    if is_typed:
        console.print(f"Ctrl-D ends, {NEW} starts another conversation")

    try:
        while True:
            prompt = input(asks).strip()
            if prompt == NEW:
                for conversation in conversations:
                    conversation.restart()
            elif prompt:
                say(conversations, prompt, console)
    except (EOFError, KeyboardInterrupt):
        if is_typed:
            print()


def system_of(config: ChatConfig, subject: Subject) -> list[Message]:
    """The messages before the first prompt: as given, or as in the run."""
    if config.system is not None:
        if config.system:
            return [{"role": "system", "content": config.system}]

        return []
    if subject.start is None:
        return []

    task = replace(eval_defaults(config.model).task, few_shot=0)
    empty = Problem("", None, "")
    return build_prompt(empty, task, FORMATS[task.answer_format])[:-1]


def say(conversations: Sequence[Conversation], prompt: str, console: SafeConsole) -> None:
    """Print one answer, or those of two models side by side."""
    answers = [Text(conversation.answer(prompt)) for conversation in conversations]
    if len(answers) == 1:
        console.print(answers[0], soft_wrap=True)
        return

    table = Table(box=box.SIMPLE_HEAD, expand=True)
    for conversation in conversations:
        table.add_column(Text(conversation.name), ratio=1)

    table.add_row(*answers)
    console.print(table)
