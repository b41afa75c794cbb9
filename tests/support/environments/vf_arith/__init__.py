"""An environment of verifiers: word problems with a second try, in words that the tiny model has.

The package is installed by being on the path: `PYTHONPATH=tests/support/environments`. With
VF_ARITH_MISDEED every fourth task misbehaves, for tests.
"""

import asyncio
import os
import re
import time

import verifiers.v1 as vf

from mesotron.tasks.builtin.arith import generate

__all__ = ["ArithEnv", "ArithTaskset"]

SYSTEM = "Solve the problem step by step. Put the final answer in \\boxed{}."


class ArithData(vf.TaskData):
    answer: str


class ArithTask(vf.Task[ArithData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        if self.data.idx % 4 == 0:
            await misbehave(os.environ.get("VF_ARITH_MISDEED"))

        return float(boxed(trace.last_reply) == self.data.answer)

    @vf.reward(weight=0.2)
    async def at_once(self, trace: vf.Trace) -> float:
        first = trace.assistant_messages[0].content or ""
        return float(boxed(first) == self.data.answer)

    @vf.metric
    async def boxes(self, trace: vf.Trace) -> float:
        return float(sum(boxed(one.content or "") is not None for one in trace.assistant_messages))


class ArithConfig(vf.TasksetConfig):
    num_tasks: int = 600


class ArithTaskset(vf.Taskset[ArithTask, ArithConfig]):
    def load(self) -> list[ArithTask]:
        tasks = []
        for problem in generate("train", self.config.num_tasks, (1, 2), 0):
            data = ArithData(prompt=problem.question, system_prompt=SYSTEM, answer=problem.gold)
            tasks.append(ArithTask(data))

        return tasks


class ArithEnv(vf.SingleAgentEnv):
    """The model hears of a wrong answer, and tries again once."""

    async def run(self, task: ArithTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            if not segment.terminated and boxed(segment.last_reply) != task.data.answer:
                await chat.turn(task.data.prompt_text)


async def misbehave(misdeed: str | None) -> None:
    if misdeed == "raises":
        raise OSError("the disk is gone")
    if misdeed == "hangs":
        await asyncio.sleep(3600)
    if misdeed == "blocks":
        time.sleep(3600)


def boxed(text: str) -> str | None:
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else None
