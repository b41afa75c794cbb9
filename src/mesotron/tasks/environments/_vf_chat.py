"""The harness of `vf:` environments: a chat in this process, with the tools of the task.

Verifiers loads it by its module's name. The model is asked at the address that the harness is
given, so that limits, stops and the record of the episode are those of verifiers.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # the signature of verifiers
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask the model until it calls no tool."""
        messages = self._opening(data)
        addresses = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }

        async with AsyncExitStack() as stack:
            tools, names, servers = await connect_mcp({"mcpServers": addresses}, stack)
            client = await stack.enter_async_context(local_client())
            while True:
                body: dict[str, Any] = {"model": ctx.model, "messages": messages}
                if tools:
                    body["tools"] = tools

                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)

                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")

                for call in calls:
                    result = await self._call(call, names, servers)
                    messages.append({"role": "tool", "tool_call_id": call["id"], **result})

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages = []
        if system is not None:
            messages.append({"role": "system", "content": system})

        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]

        return messages

    async def _call(self, call: Any, names: Any, servers: Any) -> dict[str, Any]:
        """The message with a tool's result, or with its error, which the model reads."""
        name = call["function"]["name"]
        try:
            if name not in names:
                raise ValueError(f"there is no tool {name}")

            arguments = json_object(call["function"]["arguments"])
            content = await call_mcp(servers, names, name, arguments)
        except Exception as error:
            content = f"error: {error}"

        return {"name": name, "content": content}


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text or "{}")
    if not isinstance(value, dict):
        raise ValueError("the arguments are no JSON object")

    return value


def local_client() -> httpx.AsyncClient:
    """For an address of this machine: no proxy, no deadline of its own, no certificates to load."""
    return httpx.AsyncClient(timeout=None, trust_env=False, verify=False)
