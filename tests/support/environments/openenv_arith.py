"""An OpenEnv server with word problems and a second try: `python openenv_arith.py PORT`.

Other worlds of the same server misbehave, for tests: `python openenv_arith.py PORT hangs`.
"""

import random
import re
import sys
import time
from functools import partial

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from mesotron.tasks.builtin.arith import LEVELS, write_problem

SESSIONS = 512


class Answer(Action):
    message: str


class Words(Observation):
    text: str = ""


class Arith(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, misdeed: str = "") -> None:
        super().__init__()
        self.misdeed = misdeed
        self.tries = 0
        self.gold = ""
        self.question = ""
        self.seed = 0

    def reset(self, seed: int | None = None, **_: object) -> Words:
        self.seed = seed or 0
        rng = random.Random(self.seed)
        self.question, steps = write_problem(rng, LEVELS[1 + self.seed % 2])
        self.gold = steps.rsplit(" ", 1)[-1]
        self.tries = 0
        return Words(text=self.question)

    def step(self, action: Answer, **_: object) -> Words:
        if self.seed % 4 == 0:
            self.misbehave()

        self.tries += 1
        found = re.findall(r"\\boxed\{([^{}]*)\}", action.message)
        is_correct = bool(found) and found[-1].strip() == self.gold
        if is_correct or self.tries == 2:
            return Words(text="", reward=float(is_correct), done=True)

        again = self.question
        if self.misdeed == "floods" and self.seed % 4 == 0:
            again = "x" * 10_000_000

        return Words(text=again, reward=0.0)

    def misbehave(self) -> None:
        if self.misdeed == "raises":
            raise OSError("the disk is gone")
        if self.misdeed == "hangs":
            time.sleep(3600)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


def main(port: int, misdeed: str = "") -> None:
    make = partial(Arith, misdeed)
    app = create_fastapi_app(make, Answer, Words, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
