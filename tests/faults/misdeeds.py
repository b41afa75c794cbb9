"""Rewards that raise, hang, or change the process: a run keeps its limit and loses no step."""

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.kills import (
    LIMIT,
    SMALL,
    Ended,
    Tally,
    contents,
    differences,
    run_command,
    say,
)

# The misdeed of a case happens once `due` rows are written, in a call of so many completions.
REWARD = """
import asyncio, concurrent.futures, hashlib, os, re, sys, threading, time
from pathlib import Path

class Own(BaseException):
    def __str__(self):
        raise RuntimeError

def even(completion_ids):
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]

def is_due(size):
    plan = Path(os.environ["PLAN"])
    if not plan.exists():
        return False
    out, rows, sizes, rank = plan.read_text().split()
    log = Path(out, "metrics.jsonl")
    done = len(log.read_text().splitlines()) if log.exists() else 0
    here = os.environ.get("RANK", "0") in rank
    return here and done == int(rows) and str(size) in sizes.split(",")

def swallow():
    try:
        time.sleep(400)
    except BaseException:
        pass

def earned(completion_ids, **_):
    scores = even(completion_ids)
    if is_due(len(completion_ids)):
        {misdeed}
    return scores

async def awaited(completion_ids, **_):
    if is_due(len(completion_ids)):
        {awaited}
    return even(completion_ids)
"""
# With --final best a checkpoint of step 2 is kept, which an evaluation that fails does not change.
FLAGS = """--save-every 100 --keep 1 --eval-every 2 --final last --guard off"""
MOST_OUTPUT = 20_000  # characters
ROLLOUT = "16"  # completions
EVALUATION = "3"
# Seconds from the limit to the end, beside half of the time that a whole run takes here.
OVER = {0: 4.0, 2: 4.0, -signal.SIGKILL: 12.0}


@dataclass(frozen=True)
class Case:
    """What a reward does, once two steps are done, and how the run must end."""

    name: str
    misdeed: str
    code: int = 2
    step: int = 2  # of the checkpoint that is left; 0 for none
    sizes: str = ROLLOUT
    flags: str = ""
    rows: int = 2
    hangs: bool = False  # then there is a time limit
    processes: int = 1
    rank: str = "0"
    loses_row: bool = False  # of the step whose evaluation was left behind

    def words(self, model: Path, out: Path) -> list[str]:
        reward = "awaited" if "await " in self.misdeed else "earned"
        own = SMALL.replace("earned:even", f"misdeed:{reward}").replace("--save-every 1", FLAGS)
        return f"train {own} --model {model} {self.flags} --out {out}".split()


RAISES = {
    "an error": 'raise ValueError("oops")',
    "a cancelled task": "raise asyncio.CancelledError",
    "the end of a generator": "raise GeneratorExit",
    "its own class without text": "raise Own",
    "ten megabytes": 'raise RuntimeError("x" * 10**7)',
    "an exit": "sys.exit(3)",
}
HANGS = {
    "sleeps": "time.sleep(400)",
    "swallows the interrupt and returns": "swallow()",
    "swallows every interrupt": "[swallow() for _ in range(9)]",
    "waits for threads": """
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(time.sleep, [400, 400]))""",
    "awaits": "await asyncio.sleep(400)",
    "backtracks": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "ignores every signal": """
        import signal
        for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(one, signal.SIG_IGN)
        time.sleep(400)""",
    "hangs in a compiler": """
        import torch
        torch.compile(lambda x: x + 1, backend=lambda *_: time.sleep(400))(torch.ones(2))""",
    "is in C": "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
}
CHANGES = {
    "closes stdout": "sys.stdout.close()",
    "closes descriptors": "os.close(1); os.close(2)",
    "changes the default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "changes the default device": "import torch; torch.set_default_device('meta')",
    "leaves autocast open": "import torch; torch.autocast('cpu', torch.bfloat16).__enter__()",
    "leaves the working folder": "os.chdir('/')",
    "forks and returns": "os.fork()",
    "removes the hook of errors": "sys.excepthook = None",
}


def make_cases() -> list[Case]:
    cases = [Case(f"raises {name}", misdeed) for name, misdeed in RAISES.items()]
    oops = RAISES["an error"]
    evaluation: dict[str, Any] = {"sizes": EVALUATION, "rows": 1}
    own = RAISES["its own class without text"]
    anchor = "--objective.name mgrpo --model tiny --max-tokens 40 --group 8"
    two: dict[str, Any] = {"processes": 2, "sizes": "8"}

    cases += [
        Case("raises in an evaluation", own, **evaluation),
        Case("raises in the first evaluation", oops, step=0, sizes=EVALUATION, rows=0),
        Case("raises in the last evaluation", oops, step=4, sizes=EVALUATION, rows=4),
        Case("raises under an anchor", own, flags=anchor, sizes="24"),
        Case("raises with averaged weights", oops, flags="--average 0.5", **evaluation),
        Case("raises in one of two processes", own, rank="1", **two),
        Case("raises in both of two processes", own, rank="01", **two),
        Case("raises in an evaluation of two", oops, rank="1", **(two | evaluation)),
        Case("raises in the first of two", oops, step=0, rows=0, sizes="3", processes=2, rank="1"),
    ]
    cases += [Case(name, misdeed, 0, hangs=True) for name, misdeed in HANGS.items()]

    sleeps = HANGS["sleeps"]
    ignores = HANGS["swallows every interrupt"]
    locked = "sum(range(10**15))"
    cases += [
        Case("sleeps in an evaluation", sleeps, 0, hangs=True, **evaluation),
        Case("swallows all in an evaluation", ignores, 0, hangs=True, loses_row=True, **evaluation),
        Case("sleeps in the first evaluation", sleeps, 2, 0, EVALUATION, rows=0, hangs=True),
        Case("sleeps when it is tried", sleeps, 2, 0, "2", rows=0, hangs=True),
        Case("sleeps under an anchor", sleeps, 0, flags=anchor, sizes="24", hangs=True),
        Case("sleeps in one of two processes", sleeps, 0, rank="1", hangs=True, **two),
        Case("holds Python's lock", locked, -signal.SIGKILL, flags="--save-every 2", hangs=True),
    ]
    return cases + [Case(name, misdeed, 0, step=4) for name, misdeed in CHANGES.items()]


class Course:
    """Runs of the cases beside runs that were left alone."""

    def __init__(self, place: Path, model: Path) -> None:
        self.place = place
        self.model = model
        self.log = place / "log"
        self.plan = place / "plan"
        self._whole: dict[tuple[str, int], tuple[dict[str, Any], float]] = {}

    def run(self, case: Case, words: list[str]) -> Ended:
        awaits = "await " in case.misdeed
        code = REWARD.replace("{misdeed}", "pass" if awaits else case.misdeed)
        code = code.replace("{awaited}", case.misdeed if awaits else "pass")
        (self.place / "misdeed.py").write_text(code)
        os.environ["PLAN"] = str(self.plan)

        return run_command(words, self.log, self.place, processes=case.processes)

    def whole(self, case: Case) -> tuple[dict[str, Any], float]:
        """Contents and seconds of the same run without a misdeed."""
        key = case.flags, case.processes
        if key not in self._whole:
            out = self.place / f"whole-{len(self._whole)}"
            self.plan.unlink(missing_ok=True)
            ended = self.run(case, case.words(self.model, out))
            assert ended.code == 0, ended.text[-2000:]

            self._whole[key] = contents(out), ended.seconds

        return self._whole[key]

    def failures(self, case: Case) -> list[str]:
        """What is wrong with a case; empty if it holds."""
        expected, seconds = self.whole(case)
        out = self.place / "out"
        shutil.rmtree(out, ignore_errors=True)
        self.plan.write_text(f"{out} {case.rows} {case.sizes} {case.rank}")

        limit = 3 * seconds + 5
        words = case.words(self.model, out)
        if case.hangs:
            words += ["--time-limit", f"{limit:.1f}s"]

        ended = self.run(case, words)
        latest = limit + seconds / 2 + OVER[case.code] if case.hangs else LIMIT
        wrong = faults_of(case, ended, latest)
        if case.code == 0 and not case.hangs:
            return wrong + unequal(expected, out)

        left = [path.name for path in (out / "checkpoints").glob("checkpoint-*")]
        if left != ([f"checkpoint-{case.step}"] if case.step else []):
            wrong.append(f"left {left}")

        self.plan.unlink()
        if not (out / "config.json").exists():
            again = self.run(case, case.words(self.model, out))
        else:
            again = self.run(case, ["train", "--resume", str(out), "--trust"])

        if again.code != 0:
            wrong.append(f"the resumed run ended with {again.code}: {again.text[-800:]}")

        if case.loses_row:  # the weights are those of the whole run all the same
            weights = [name for name in expected if name.endswith(".safetensors")]
            return wrong + unequal({name: expected[name] for name in weights}, out, weights)

        return wrong + unequal(expected, out)


def faults_of(case: Case, ended: Ended, latest: float) -> list[str]:
    """What is wrong with the end of the first process, which should come by `latest`."""
    wrong = []
    if ended.code != case.code:
        wrong.append(f"exit code {ended.code}")
    if "Traceback" in ended.text:
        wrong.append("a traceback")
    if len(ended.text) > MOST_OUTPUT:
        wrong.append(f"{len(ended.text)} characters of output")
    if case.step in (1, 2, 3) and "--resume" not in ended.text:
        wrong.append("no command to continue")
    if ended.seconds > latest:
        wrong.append(f"{ended.seconds - latest:.1f} s too late")

    return [f"{one}: {ended.text[-600:]}" for one in wrong]


def unequal(expected: dict[str, Any], out: Path, only: list[str] | None = None) -> list[str]:
    """The files that differ: all, or only these."""
    found = contents(out)
    if only is not None:
        found = {name: found.get(name) for name in only}

    names = differences(expected, found)
    return [f"unequal: {names[:6]}"] if names else []


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    """Each case once."""
    place = root / "misdeeds"
    place.mkdir()
    course = Course(place, model)
    tally = Tally()
    held = {}

    for case in make_cases():
        if args.cases and case.name not in args.cases:
            continue

        wrong = course.failures(case)
        held[case.name] = not wrong
        tally.add(not wrong, f"{case.name}: {wrong}")
        say(f"{'held' if not wrong else 'FAILED'}: {case.name} {wrong or ''}")

    return tally.record() | {"held": held}
