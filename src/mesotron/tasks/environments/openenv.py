"""Environments of OpenEnv (BSD-3): a server that answers reset and step over a WebSocket.

    --env openenv:http://localhost:8000

A problem is a seed. The model's message is the action and the next observation is the reply to it;
the reward of an episode is the sum of those of its steps.
"""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mesotron.tasks.environment import (
    NUM_DRAWN,
    Played,
    Start,
    Writer,
    environment,
    make_columns,
)
from mesotron.tasks.problem import Problem, log

SECONDS = 30.0  # for one answer of the server
MEGABYTES = 1.0  # of one answer
MAX_STEPS = 64
INVALID = "VALIDATION_ERROR"  # the code of an answer
SHOWN = 80  # characters of an action in an error
BESIDE = ("done", "reward", "metadata")  # fields of an observation that are not shown
NUMBERS = {"integer": int, "number": float, "boolean": lambda text: text.strip().lower() == "true"}


@environment(
    "openenv",
    about="`openenv:URL`, a running OpenEnv server; a problem is a seed",
    needs=("openenv",),
    extra="openenv",
)
class OpenEnv:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = f"openenv:{url}"
        self.action = ActionFields(read_schema(self.url))
        self.idle: list[Any] = []  # connections that no episode uses

    def problems(self, count: int | None) -> list[Problem]:
        return asyncio.run(self._draw(count or NUM_DRAWN))

    async def _draw(self, count: int) -> list[Problem]:
        """The first observation of each seed, for lists and lengths."""
        problems = []
        async with connect(self.url) as client:
            for seed in range(count):
                result = await client.reset(seed=seed)
                question = spell(result.observation)
                columns = make_columns(self.name, seed)
                problems.append(Problem(question, None, f"openenv-{seed}", columns=columns))

            again = await client.reset(seed=0)

        if spell(again.observation) != problems[0].question:
            message = "%s begins differently with the same seed: a group compares unlike episodes"
            log.warning(message, self.name)

        return problems

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for client in self.idle:
                await client.close()

            self.idle.clear()

    async def play(self, start: Start, writer: Writer) -> Played:
        client = self.idle.pop() if self.idle else await make_client(self.url).connect()
        try:
            played = await self._play(client, start, writer)
        except BaseException:
            await client.close()  # in an unknown state
            raise

        self.idle.append(client)
        return played

    async def _play(self, client: Any, seed: int, writer: Writer) -> Played:
        result = await client.reset(seed=seed)
        reward = float(result.reward or 0.0)
        steps = 0
        refused = 0

        text = spell(result.observation)
        while not result.done and steps < MAX_STEPS:
            message = await writer.reply({"role": "user", "content": text})
            if message is None:
                break

            steps += 1
            try:
                result = await self._step(client, str(message.get("content") or ""))
            except RefusedAction as error:  # the model reads it
                refused += 1
                text = f"error: {error}"
                continue

            reward += float(result.reward or 0.0)
            text = spell(result.observation)

        return Played(
            reward=reward,
            metrics={"steps": steps, "done": float(result.done), "refused": refused},
        )

    async def _step(self, client: Any, text: str) -> Any:
        action = self.action.read(text)
        try:
            return await client.step(action)
        except RuntimeError as error:
            if INVALID not in str(error):
                raise
            raise RefusedAction(f"the action does not fit its schema: {text[:SHOWN]}") from error


class RefusedAction(Exception):
    """What the model wrote is no action."""


class ActionFields:
    """Makes actions of what a model writes: the text is the only field, or a JSON object of all."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        fields = schema.get("properties", {})
        self.fields = {name: one for name, one in fields.items() if name not in ("metadata",)}

    def read(self, text: str) -> dict[str, Any]:
        if len(self.fields) != 1:
            return self._read_object(text)

        (name, field) = next(iter(self.fields.items()))
        convert = NUMBERS.get(field.get("type"), str)
        try:
            return {name: convert(text)}
        except ValueError:
            raise RefusedAction(f"write one {field['type']}") from None

    def _read_object(self, text: str) -> dict[str, Any]:
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None

        if not isinstance(action, dict):
            raise RefusedAction(f"write a JSON object with {', '.join(self.fields)}")

        return action


def read_schema(url: str) -> Mapping[str, Any]:
    """The JSON schema of a server's actions."""
    address = url.replace("ws://", "http://").replace("wss://", "https://")
    with urllib.request.urlopen(f"{address}/schema", timeout=SECONDS) as answer:
        return json.loads(answer.read(int(MEGABYTES * 2**20)))["action"]


def spell(observation: Any) -> str:
    """An observation as text: its only text, or all of it as JSON."""
    if not isinstance(observation, dict):
        return str(observation)

    shown = {name: value for name, value in observation.items() if name not in BESIDE}
    texts = [value for value in shown.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(shown)


def make_client(url: str) -> Any:
    from openenv.core.generic_client import GenericEnvClient

    return GenericEnvClient(
        base_url=url,
        connect_timeout_s=SECONDS,
        message_timeout_s=SECONDS,
        max_message_size_mb=MEGABYTES,
        mode="simulation",
    )


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[Any]:
    client = await make_client(url).connect()
    try:
        yield client
    finally:
        await client.close()
