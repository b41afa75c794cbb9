"""A client's session with `mesotron mcp`, from the list of tools to a diagnosis, as a transcript.

    python -m benchmarks.mcp.session

The client is that of the mcp package. Two runs of the tiny model train on this machine.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from benchmarks._lib.results import write_text

HERE = Path(__file__).parent
LONGEST = 100  # characters of a text that is shown
MOST = 4  # entries of a list that are shown
LIMIT = {"budget": 0.25, "price": 0.5}
PASSED_ON = ("PYTHONPATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")


class Session:
    """Calls tools and keeps what a reader needs of the answers."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lines: list[str] = []

    async def call(
        self, tool: str, keep: Sequence[str] = (), show: bool = True, **arguments: Any
    ) -> dict[str, Any]:
        began = time.monotonic()
        answer = await self.client.call_tool(tool, arguments)
        seconds = time.monotonic() - began

        if show:
            self.lines.append(f"> {tool}({spell(arguments)})   {seconds:.1f} s")
        if answer.is_error:
            self.lines += [f"refused: {answer.content[0].text}", ""]
            return {}

        record = answer.structured_content
        if show:
            kept = {key: record[key] for key in keep or record if key in record}
            self.lines += [json.dumps(shorten(kept), ensure_ascii=False, indent=1), ""]

        return record

    async def wait(self, run: str, step: float = math.inf) -> None:
        """Ask until a run is at a step, or has ended; the last answer is shown."""
        while True:
            now = await self.call("run_status", run=run, show=False)
            is_over = now["state"] not in ("starting", "running", "stopping")
            if is_over or now.get("step", 0) >= step:
                keep = ("state", "step", "steps", "reward", "heldout", "dollars", "limits")
                await self.call("run_status", keep, run=run)
                return

            await asyncio.sleep(1)


def spell(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        more = [] if len(value) <= MOST else [f"... {len(value)} in all"]
        return [*map(shorten, value[:MOST]), *more]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, str) and len(value) > LONGEST:
        return value[:LONGEST] + " ..."

    return value


async def converse(session: Session) -> None:
    tools = (await session.client.list_tools()).tools
    session.lines.append("> list tools")
    for tool in tools:
        hint = "reads" if tool.annotations.read_only_hint else "acts"
        session.lines.append(f"{tool.name:14} {hint}   {tool.description.split(chr(10))[0]}")
    session.lines.append("")

    await session.call("start_run")  # no limit
    await session.call("start_run", settings={"reward": "os:system"}, **LIMIT)
    await session.call("diagnose_log", path="../../etc")

    settings = {"steps": 24, "save_every": 4, "eval_every": 8}
    started = ("run", "state")
    await session.call("start_run", started, name="good", settings=settings, **LIMIT)
    await session.wait("good", 5)
    await session.call("stop_run", ("run", "state"), run="good")
    await session.wait("good")
    await session.call("resume_run", started, run="good", **LIMIT)
    await session.wait("good")

    settings = {"steps": 30, "guard": "warn"}
    await session.call(
        "start_run", started, recipe="arith_collapse", name="bad", settings=settings, **LIMIT
    )
    await session.wait("bad")

    await session.call("list_runs")
    await session.call("compare_runs", runs=["good", "bad"])
    verdict = ("verdict", "cause", "onset", "diagnosis", "remedy", "confidence", "phases")
    await session.call("diagnose_log", verdict, path="bad")
    await session.call("diagnose_log", verdict, path="good")
    await session.call("read_evidence", run="bad", what="samples", start=-1, count=1)
    await session.call("read_evidence", run="good")


async def record(folder: Path) -> list[str]:
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "mesotron", "mcp", "--runs", str(folder)],
        env=environment,
    )
    async with Client(server) as client:
        session = Session(client)
        await converse(session)

    return session.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "transcript.md")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        lines = asyncio.run(record(Path(folder) / "runs"))

    head = [
        "# A session with `mesotron mcp`",
        "",
        f"Written by `python -m benchmarks.mcp.session` with mcp {version('mcp')} on one CPU core;",
        f"answers are cut to {MOST} entries of a list and {LONGEST} characters of a text.",
        "",
        "```",
    ]
    write_text("\n".join([*head, *lines, "```", ""]), arguments.out)


if __name__ == "__main__":
    main()
