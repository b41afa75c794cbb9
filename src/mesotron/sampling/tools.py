"""Tools and environments: functions that a model calls in a completion, and what they return.

TRL plays the episodes of training; `Toolbox.play` plays those of the evaluations around it.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import getmembers, iscoroutinefunction, isfunction, signature
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema
from trl import chat_template_utils as templates

from mesotron.config import TrainConfig
from mesotron.runs.own_code import calling, text_of, warn_once
from mesotron.runs.process import time_allowance
from mesotron.runs.trust import import_named
from mesotron.sampling.decode import Completion, generate
from mesotron.tasks.prompts import Message, rendering

Tool = Callable[..., Any]
NOT_TOOLS = ("reset", "get_reward")  # methods of an environment that the model cannot call
SECONDS = 60.0  # for one call
CHARACTERS = 100_000  # of a result


@dataclass
class ToolEpisode:
    """One episode; `messages` grow with every turn."""

    messages: list[Any]
    tools: list[Any]
    prompt: str = ""  # what the next turn continues
    start: int = 0  # tokens of the first prompt
    ids: tuple[int, ...] = ()  # all that followed the first prompt, results included
    truncated: bool = False

    def call(self, function: dict[str, Any]) -> Message:
        """The message with a call's result, or with its error."""
        name = function["name"]
        try:
            by_name = {tool.__name__: tool for tool in self.tools}
            with calling(f"the tool {name}"):
                result = by_name[name](**function["arguments"])
        except Exception as error:  # the model reads it, as in training
            result = {"error": text_of(error)}

        return {"role": "tool", "name": name, "content": str(result)}

    def completion(self) -> Completion:
        text = str(self.messages[-1].get("content") or "")
        return Completion(text, self.ids, self.truncated)


@dataclass(frozen=True)
class ChatText:
    """Renders and encodes chats with tools, and reads the calls in a reply."""

    tokenizer: Any
    template: str | None  # the training template, if the model's own changes earlier turns

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatText":
        with rendering(tokenizer):
            keeps_turns = templates.is_chat_template_prefix_preserving(tokenizer)

        if keeps_turns:
            return cls(tokenizer, None)

        return cls(tokenizer, templates.get_training_chat_template(tokenizer))

    def render(
        self, messages: Sequence[Any], tools: Sequence[Tool], *, prompts: bool = True
    ) -> str:
        """A chat as text; `prompts`: up to where the model goes on."""
        options = getattr(self.tokenizer, "template_kwargs", {})
        with rendering(self.tokenizer):
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompts,
                **options,
            )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, completion: Completion, prompt: list[int], tools: list[Any]) -> dict[str, Any]:
        """The message of a completion, with its calls."""
        end = [] if completion.truncated else [self.tokenizer.eos_token_id]
        ids = [*completion.ids, *end]

        # TRL 1.15 has no argument for them.
        known = signature(templates.parse_response).parameters
        described: dict[str, Any] = {"tools": tools} if "tools" in known else {}

        return templates.parse_response(self.tokenizer, ids, prefix=prompt, **described)


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

    def start(self, chat: Sequence[Message], row: dict[str, Any]) -> ToolEpisode:
        """An episode up to its question; an environment may add to it."""
        messages = list(chat)
        if self.environment is None:
            return ToolEpisode(messages, list(self.tools))

        arguments = row | {"prompt": messages}
        if row["columns"]:  # as in training
            arguments["columns"] = json.dumps(row["columns"], default=str)

        with calling("the environment"):
            world = self.environment()
            observation = world.reset(**arguments) or ""
        last = messages[-1]
        messages[-1] = {**last, "content": last["content"] + observation}

        return ToolEpisode(messages, [*self.tools, *public_methods(world)])

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
        text = ChatText.of(tokenizer)
        context = model.config.get_text_config().max_position_embeddings

        episodes = [self.start(chat, row) for chat, row in zip(chats, rows, strict=True)]
        for one in episodes:
            one.prompt = text.render(one.messages, one.tools)
            one.start = len(text.encode(one.prompt))

        running = episodes
        while running:
            prompts = [text.encode(one.prompt) for one in running]
            completions = generate(
                model,
                tokenizer,
                [one.prompt for one in running],
                max_tokens=tokens_left(running, prompts, max_tokens, context),
                seed=seed,
                **how,
            )
            seed += 1

            going = []
            for one, prompt, completion in zip(running, prompts, completions, strict=True):
                if take_turn(one, prompt, completion, text, max_tokens):
                    going.append(one)

            running = going

        return [one.completion() for one in episodes]


def tokens_left(
    running: Sequence[ToolEpisode],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    context: int,
) -> int:
    """The longest turn that the shortest episode may still take, within the context."""
    written = [len(prompt) - one.start for one, prompt in zip(running, prompts)]
    left = max_tokens - min(written)
    fitting = context - max(map(len, prompts))

    return max(1, min(left, fitting))


def take_turn(
    one: ToolEpisode,
    prompt: list[int],
    completion: Completion,
    text: ChatText,
    max_tokens: int,
) -> bool:
    """Add a completion and the results of its calls; whether the episode goes on."""
    message = text.read(completion, prompt, one.tools)
    one.messages.append(message)
    one.ids = (*prompt[one.start :], *completion.ids)
    one.truncated = completion.truncated or len(one.ids) > max_tokens

    calls = message.get("tool_calls") or ()
    if not calls or one.truncated:
        return False

    results = [one.call(call["function"]) for call in calls]
    one.prompt = text.render([*one.messages, *results], one.tools)
    one.truncated = len(text.encode(one.prompt)) - one.start >= max_tokens
    if one.truncated:
        return False

    one.messages += results
    return True


def public_methods(world: Any) -> list[Tool]:
    """The methods of an environment that the model may call."""
    names = [name for name, _ in getmembers(type(world), isfunction)]
    return [getattr(world, name) for name in names if name not in NOT_TOOLS and name[0] != "_"]


def guarded(tool: Tool) -> Tool:
    """A tool whose calls end, and whose results fit: else it raises, which the model reads."""
    if iscoroutinefunction(tool):

        @wraps(tool)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return check_size(await asyncio.wait_for(tool(*args, **kwargs), SECONDS))

        return call_async

    @wraps(tool)
    def call(*args: Any, **kwargs: Any) -> Any:
        with calling(f"the tool {tool.__name__}"), time_allowance(SECONDS):
            return check_size(tool(*args, **kwargs))

    return call


def check_size(result: Any) -> Any:
    characters = len(str(result))
    if characters > CHARACTERS:
        raise ValueError(f"the result has {characters:,} characters, more than {CHARACTERS:,}")

    return result


def guarded_class(environment: type) -> type:
    """An environment whose methods are guarded. A `reset` that fails adds nothing to the prompt,
    and a `get_reward` that fails gives none: both cost that completion alone."""
    changed: dict[str, Any] = {}
    for name, method in getmembers(environment, isfunction):
        if name in NOT_TOOLS:
            changed[name] = without_errors(guarded(method), environment.__name__)
        elif name[0] != "_":
            changed[name] = guarded(method)

    return type(environment.__name__, (environment,), changed)


def without_errors(method: Tool, name: str) -> Tool:
    """None in place of an error, which is logged."""
    if iscoroutinefunction(method):
        return method

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            warn_once(f"{name}.{method.__name__} failed: {text_of(error)}")
            return None

    return call


def load_toolbox(config: TrainConfig) -> Toolbox | None:
    """The tools and the environment that a config names; ValueError if one cannot be used."""
    if not config.tools and not config.environment:
        return None

    tools = [guarded(import_named(name, "tool")) for name in config.tools]
    environment = None
    methods = []
    if config.environment:
        environment = import_named(config.environment, "environment")
        methods = try_environment(config.environment, environment)
        if isinstance(environment, type):
            environment = guarded_class(environment)

    for tool in (*tools, *methods):
        try:
            get_json_schema(tool)
        except Exception as error:
            need = "needs type hints, and a docstring with a line for each argument under Args:"
            raise ValueError(f"the tool {tool.__name__} {need} {text_of(error)}") from error

    return Toolbox(tools, environment)


def try_environment(name: str, environment: Callable[[], Any]) -> list[Tool]:
    """The tools of an environment, which is made once to see that it can be."""
    try:
        world = environment()
        if callable(world.reset):
            return public_methods(world)

        return []
    except Exception as error:
        need = "must be a class without arguments that has a method reset"
        raise ValueError(f"--environment {name} {need}: {text_of(error)}") from error
