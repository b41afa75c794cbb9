"""Tools and environments: functions that a model calls in a completion, and what they return.

TRL plays the episodes of training; `Toolbox.play` plays those of the evaluations around it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getmembers, isfunction
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema
from trl import chat_template_utils as templates

from mesotron.config import TrainConfig
from mesotron.runs.trust import import_named
from mesotron.sampling.decode import Completion, generate
from mesotron.tasks.prompts import Message

Tool = Callable[..., Any]
NOT_TOOLS = ("reset", "get_reward")  # methods of an environment that the model cannot call


@dataclass
class Episode:
    """One conversation; `messages` grow with every turn."""

    messages: list[Any]
    tools: list[Any]
    prompt: str = ""  # what the next turn continues
    ids: tuple[int, ...] = ()  # all that followed the first prompt, results included
    truncated: bool = False

    def call(self, function: dict[str, Any]) -> Message:
        name = function["name"]
        try:
            tool = {tool.__name__: tool for tool in self.tools}[name]
            result = tool(**function["arguments"])
        except Exception as error:  # the model reads it, as in training
            result = {"error": str(error)}

        return {
            "role": "tool",
            "name": name,
            "content": str(result),
        }


@dataclass(frozen=True)
class Toolbox:
    """What a run's model may call."""

    tools: list[Any]
    environment: Callable[[], Any] | None = None

    def prepare(self, tokenizer: Any, model: str) -> Any:
        """The tokenizer, able to read calls."""
        if getattr(tokenizer, "response_template", None) is not None:
            return tokenizer

        try:
            return templates.add_response_schema(tokenizer)
        except ValueError as error:
            cure = "use Qwen/Qwen3-0.6B or the like, or set a response_template (see examples)"
            raise ValueError(f"TRL cannot read tool calls of {model}: {cure}") from error

    def start(self, chat: Sequence[Message], row: dict[str, Any]) -> Episode:
        messages = list(chat)
        tools = list(self.tools)
        if self.environment is not None:
            world = self.environment()
            columns = {"columns": json.dumps(row["columns"], default=str)} if row["columns"] else {}
            observation = world.reset(
                **{
                    **row,
                    "prompt": messages,
                    **columns,
                }
            )  # as in training

            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + (observation or "")}
            tools += public_methods(world)

        return Episode(messages, tools)

    def play(
        self,
        model: Any,
        tokenizer: Any,
        chats: Sequence[Sequence[Message]],
        rows: Sequence[dict[str, Any]],
        *,
        max_tokens: int,
        seed: int = 0,
        **how: Any,
    ) -> list[Completion]:
        """One completion per chat: the text of its last message, the tokens of all turns. An
        episode whose turns and results exceed `max_tokens` is truncated."""
        keeps = templates.is_chat_template_prefix_preserving(tokenizer)
        template = None if keeps else templates.get_training_chat_template(tokenizer)
        context = model.config.get_text_config().max_position_embeddings

        shape = {
            "chat_template": template,
            "tokenize": False,
            "add_generation_prompt": True,
        }

        encode = partial(tokenizer.encode, add_special_tokens=False)
        render = partial(tokenizer.apply_chat_template, **shape)

        episodes = [self.start(chat, row) for chat, row in zip(chats, rows, strict=True)]
        for one in episodes:
            one.prompt = render(one.messages, tools=one.tools)

        starts = [len(encode(one.prompt)) for one in episodes]
        running = list(range(len(episodes)))
        while running:
            prompts = [encode(episodes[k].prompt) for k in running]
            left = max_tokens - min(len(ids) - starts[k] for k, ids in zip(running, prompts))
            left = max(1, min(left, context - max(map(len, prompts))))
            texts = [episodes[k].prompt for k in running]

            written = generate(
                model,
                tokenizer,
                texts,
                max_tokens=left,
                seed=seed,
                **how,
            )

            going = []
            seed = seed + 1

            for k, prompt, completion in zip(running, prompts, written, strict=True):
                one = episodes[k]
                end = [] if completion.truncated else [tokenizer.eos_token_id]
                message = templates.parse_response(
                    tokenizer, [*completion.ids, *end], prefix=prompt, tools=one.tools
                )
                one.messages.append(message)
                one.ids = (*prompt[starts[k] :], *completion.ids)
                one.truncated = completion.truncated or len(one.ids) > max_tokens

                calls = message.get("tool_calls") or ()
                if calls and not one.truncated:
                    results = [one.call(call["function"]) for call in calls]
                    one.prompt = render([*one.messages, *results], tools=one.tools)
                    one.truncated = len(encode(one.prompt)) - starts[k] >= max_tokens

                    if not one.truncated:
                        one.messages += results
                        going.append(k)

            running = going

        return [
            Completion(str(one.messages[-1].get("content") or ""), one.ids, one.truncated)
            for one in episodes
        ]


def public_methods(world: Any) -> list[Tool]:
    names = [name for name, _ in getmembers(type(world), isfunction)]
    return [getattr(world, name) for name in names if name not in NOT_TOOLS and name[0] != "_"]


def load_toolbox(config: TrainConfig) -> Toolbox | None:
    """The tools and the environment that a config names; ValueError if one cannot be used."""
    if not (config.tools or config.environment):
        return None

    tools = [import_named(name, "tool") for name in config.tools]
    make = None

    methods = []
    if config.environment:
        make = import_named(config.environment, "environment")
        try:
            world = make()
            methods = public_methods(world) if callable(world.reset) else []
        except Exception as error:
            need = "must be a class without arguments that has a method reset"
            raise ValueError(f"--environment {config.environment} {need}: {error}") from error

    for tool in (*tools, *methods):
        try:
            get_json_schema(tool)
        except Exception as error:
            need = "needs type hints, and a docstring with a line for each argument under Args:"
            raise ValueError(f"the tool {tool.__name__} {need} {error}") from error

    return Toolbox(tools, make)
