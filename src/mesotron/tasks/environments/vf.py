"""Environments of verifiers (MIT): installed packages with tasks, tools, turns and rewards.

    --env vf:gsm8k-v1

An episode is verifiers' own `run_episode`, with its limits, hooks, tool servers and scores. The
model that it asks is an address on this machine, where each request waits for `Writer.reply`.
"""

import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from importlib import import_module
from itertools import islice
from typing import Any
from uuid import uuid4

from mesotron.tasks.environment import (
    NUM_DRAWN,
    ChatMessage,
    Played,
    Start,
    Writer,
    environment,
    make_columns,
)
from mesotron.tasks.problem import Problem

HARNESS = "mesotron_vf_chat"  # verifiers finds it as an installed module without dots
MAX_REQUEST = 2**22  # bytes of a conversation
SESSION = "X-Session-ID"  # the header that carries the trace's id
ERROR = 400


@environment(
    "vf",
    about="`vf:NAME`, an installed package of verifiers, with its tools, turns and rewards",
    needs=("verifiers", "aiohttp"),
    extra="verifiers",
)
class Verifiers:
    def __init__(self, name: str) -> None:
        import verifiers.v1 as vf

        self.name = f"vf:{name}"
        self.env = vf.load_environment(make_config(name))
        self.seats: dict[str, Seat] = {}  # by the id of a trace
        self.address = ""

    @cached_property
    def tasks(self) -> list[Any]:
        taskset = self.env.taskset
        return list(taskset if taskset.bounded else islice(taskset, 10 * NUM_DRAWN))

    def problems(self, count: int | None) -> list[Problem]:
        problems = []
        for number, task in enumerate(self.tasks[:count]):
            question = task.data.prompt_text or task.data.name or f"task {number}"
            columns = make_columns(self.name, number)
            problems.append(Problem(question, None, f"vf-{number}", columns=columns))

        return problems

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        from aiohttp import web

        app = web.Application(client_max_size=MAX_REQUEST)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.address = f"http://{host}:{port}/v1"
            async with self.env.serving():
                yield
        finally:
            await runner.cleanup()

    async def _complete(self, request: Any) -> Any:
        """One model call of an episode."""
        from aiohttp import web

        body = await request.json()
        seat = self.seats.get(request.headers.get(SESSION, ""))
        if seat is None or body.get("stream"):
            return web.json_response({"error": "unknown session, or a stream"}, status=ERROR)

        try:
            return web.json_response(await seat.answer(body["messages"], body.get("tools") or ()))
        except ValueError as error:
            seat.error = str(error)
            return web.json_response({"error": str(error)}, status=ERROR)

    async def play(self, start: Start, writer: Writer) -> Played:
        import verifiers.v1 as vf

        seat = Seat(writer)
        mine = []

        def take_seat(trace: Any) -> None:
            mine.append(trace.id)
            self.seats[trace.id] = seat

        client = vf.EvalClientConfig(base_url=self.address, api_key_var="MESOTRON_HAS_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        try:
            episode = await self.env.run_episode(self.tasks[start], context, on_trace=take_seat)
        finally:
            for one in mine:
                self.seats.pop(one, None)

        trace = episode.traces[0] if episode.traces else None
        if trace is None or not episode.ok:
            errors = [*episode.errors, *(trace.errors if trace is not None else ())]
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else "it failed"
            raise RuntimeError(seat.error or why)

        parts = {name: one.value for name, one in trace.rewards.items() if one is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Played(reward=trace.reward, parts=parts, metrics=metrics)


class Seat:
    """The model's place in one episode: requests come in whole, the writer takes what is new."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.known: list[ChatMessage] = []
        self.error = ""

    async def answer(
        self, wire: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        messages = [plain_message(one) for one in wire]
        if not follows(messages, self.known):
            raise ValueError("the environment rewrites its conversation, which cannot be trained")

        reply = await self.writer.reply(*messages[len(self.known) :], tools=tools)
        if reply is None:
            return completion({"role": "assistant", "content": ""}, "length")

        self.known = [*messages, reply]
        calls = [wire_call(call) for call in reply.get("tool_calls") or ()]
        message = {"role": "assistant", "content": reply.get("content") or ""}
        if calls:
            message["tool_calls"] = calls
            return completion(message, "tool_calls")

        return completion(message, "stop")


def make_config(name: str) -> Any:
    """The environment's own settings; its model plays in this process, unless it says how."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    given: dict[str, Any] = {"taskset": {"id": name}}
    config = vf.resolve_env_config(given)
    roles = agent_config_fields(config)
    if len(roles) != 1:
        raise ValueError(f"it has {len(roles)} agents ({', '.join(roles)}); one can be trained")

    (role, agent) = next(iter(roles.items()))
    changes: dict[str, Any] = {}
    if agent.harness is None and vf.default_harness_id(name) == "bash":
        sys.modules[HARNESS] = import_module("mesotron.tasks.environments._vf_chat")
        changes["harness"] = vf.load_harness(vf.HarnessConfig(id=HARNESS)).config
    if agent.runtime == vf.AgentConfig().runtime:  # a sandbox in the cloud
        changes["runtime"] = vf.SubprocessConfig()

    return config.model_copy(update={role: agent.model_copy(update=changes)})


def plain_message(wire: Mapping[str, Any]) -> ChatMessage:
    """A message as chat templates read it: text, and the arguments of calls as objects."""
    content = wire.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content)

    message = {"role": wire["role"], "content": content}
    if wire.get("name"):
        message["name"] = wire["name"]

    calls = []
    for call in wire.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        calls.append({"type": "function", "function": {**function, "arguments": arguments}})

    if calls:
        message["tool_calls"] = calls

    return message


def follows(messages: Sequence[ChatMessage], known: Sequence[ChatMessage]) -> bool:
    """Whether a conversation goes on where it was."""
    if len(messages) <= len(known):
        return False

    for new, old in zip(messages, known):
        if new["role"] != old["role"] or new["content"] != (old.get("content") or ""):
            return False

    return True


def wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function.get("arguments") or {})
    return {
        "id": f"call_{uuid4().hex}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def completion(message: Mapping[str, Any], finish: str) -> dict[str, Any]:
    """A completion in the form of OpenAI's API."""
    return {
        "id": "mesotron",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
