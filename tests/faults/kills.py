"""Kills of real training: at file operations, in checkpoints and at any time, then a resume.

Children are forked from one process that has imported everything, so that a run takes seconds. A
child counts the operations on its run folder with an audit hook and ends itself by SIGKILL at the
chosen one, or a moment later, inside the write. What is left is resumed by the command line, maybe
killed again, and at the end every file must have the bytes of a run that was left alone.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from mesotron.config.registry import OBJECTIVES

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "shutil.rmtree"}
KILLS = {-signal.SIGKILL, -signal.SIGPROF}  # exit codes of a process that was killed
MOMENTS = (0.0, 0.0, 0.0002, 0.001, 0.004)  # CPU seconds from an operation to the kill
CURRICULUM = "--task rg:chain_sum --task.settings min_terms=2,max_terms=2 --task.curriculum 0.01"
LIMIT = 300.0  # seconds that a child may take
SELDOM = 4  # PPO compiles for a minute: only in each fourth round
TIMES = ("time", "step_time", "cost", "seconds", "steps_per_second", "train_")
# These hold times, versions and paths; pages and plots are made from the files that are compared.
LEFT_OUT = {
    "env.json",
    "spent.json",
    "lock",
    "report.html",
    "manifest.json",
    "config.json",
    "curves.png",
}
SPEED = r"took \w+( \d+[ms])?|[\d,]+ steps/s, \w+ \w+|\d+% of the time"  # in report.md
REWARD = """
def even(completion_ids, **_):
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]
"""
SMALL = """--steps 4 --save-every 1 --reward earned:even --lr 1e-2 --device cpu
    --threads 1 --batch 4 --group 4 --max-tokens 4 --task.num-eval 3
    --task.num-train 14"""


@dataclass(frozen=True)
class Case:
    """One kind of run: the command and its flags."""

    name: str
    command: str
    flags: str
    processes: int = 1

    def start(self, out: Path) -> list[str]:
        place = f"--save-dir {out.parent} --run-name {out.name}"
        place = place if self.command == "ppo snake" else f"--out {out}"
        return [*self.command.split(), *self.flags.split(), *place.split()]

    def resume(self, out: Path) -> list[str]:
        trust = ["--trust"] if self.command == "train" else []
        return [*self.command.split(), "--resume", str(out), *trust]

    def start_or_resume(self, out: Path) -> list[str]:
        if (out / "config.json").exists():
            return self.resume(out)

        return self.start(out)


def make_cases(model: Path, demos: Path | None) -> list[Case]:
    """Every objective and guard, the optimizers, SFT, VLA (with demonstrations) and PPO."""
    names = (
        "grpo",
        "dr_grpo",
        "dapo",
        "bnpo",
        "cispo",
        "gspo",
        "sapo",
        "gmpo",
        "vote",
        "mgrpo",
        "corewarding",
    )

    guards = ("off", "warn", "stop", "rollback")
    more = {
        f"{name} {guard}": f"--objective.name {name} --guard {guard}"
        for name, guard in zip(names, guards * 3, strict=False)
    }

    more |= {
        "curriculum": f"--model tiny --max-tokens 32 {CURRICULUM}",
        "two updates": "--rollout.updates 2 --save-every 1",
        "lora": "--lora 2 --optim adamw",
        "pion": "--optim pion --guard rollback",
        "drop": "--objective.dynamic-sampling drop --batch 2 --eval-every 2",
        "resample": "--objective.dynamic-sampling resample --save-every 2",
        "anchor": "--objective.name mgrpo --objective.momentum-update optimizer_step --keep 1",
    }

    # A random model writes no answer to vote on.
    votes = "--model tiny --max-tokens 40 --group 8 "
    voting = [name for name in OBJECTIVES if OBJECTIVES[name].is_self_labeled]
    cases = []
    for name, flags in more.items():
        labels = any(f"--objective.name {one}" in flags for one in voting)
        own = votes if labels else f"--model {model} "
        cases.append(Case(name, "train", f"{SMALL} {own}{flags}"))

    sft = f"""--steps 4 --save-every 1 --batch 4 --model {model} --device cpu --threads 1
        --task.num-train 14 --task.num-eval 3"""
    cases += [Case("sft", "sft", sft), Case("sft lora", "sft", sft + " --lora 2")]

    if demos is not None:
        vla = f"""{demos} --steps 6 --batch 8 --episodes 0 --device cpu --threads 1 --log-every 1
            --probe-every 4 --save-every 2 --policy.size ci --policy.chunk 6 --policy.head flow"""
        cases += [Case("vla", "vla train", vla)]
        cases += [Case("vla pion", "vla train", vla + " --optim.action pion --keep 1")]

    for name, flags in {"two": "", "two lora": "--lora 2 --optim adamw"}.items():
        cases.append(Case(name, "train", f"{SMALL} --model {model} {flags}", processes=2))

    snake = """--width 3 --height 3 --num-envs 8 --num-steps 8 --num-minibatches 2
        --update-epochs 1 --total-timesteps 384 --d-model 8 --num-heads 1 --mlp-ratio 1 --chunk 2
        --eval-episodes 4 --use-muon --no-gif --save-freq 2"""
    return [*cases, Case("ppo", "ppo snake", snake)]


def make_demos(folder: Path) -> Path:
    from mesotron.config import DemosConfig, WorldConfig
    from mesotron.vla.demos import write_demos

    world = WorldConfig(name="blocks", pixels=8)
    write_demos(
        DemosConfig(
            world=world,
            out=folder,
            episodes=4,
            starts=8,
            workers=1,
        ),
        log=None,
    )

    return folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Children


@dataclass
class Ended:
    """How a child ended: its exit code, negative for a signal, and what it printed."""

    code: int
    seconds: float
    text: str

    @property
    def killed(self) -> bool:
        return self.code < 0


def fork(work: Callable[[], int], log: Path, cwd: Path) -> int:
    """Run `work` in a child whose output goes to a file; returns the process id."""
    pid = os.fork()
    if pid:
        with suppress(OSError):  # whoever of the two comes first
            os.setpgid(pid, pid)
        return pid

    code = 70
    try:
        os.setpgid(0, 0)  # so that its own children can be killed with it
        os.chdir(cwd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1), os.dup2(handle, 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def wait(pid: int, log: Path, kill_after: float | None = None) -> Ended:
    began = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        passed = time.monotonic() - began
        if done:
            return Ended(os.waitstatus_to_exitcode(status), passed, log.read_text(errors="replace"))

        if passed > min(LIMIT, kill_after or LIMIT):
            os.killpg(pid, signal.SIGKILL)

        time.sleep(0.005)


def start_command(
    args: list[str],
    log: Path,
    cwd: Path,
    *,
    before: Callable[[], None] | None = None,
    own_folder: bool = True,
    processes: int = 1,
) -> int:
    """`mesotron ARGS` in a child, or in several; `before` runs there first. Modules in its own
    folder are found there, as with PYTHONPATH."""

    def work() -> int:
        from mesotron import cli
        from mesotron.runs.process import mark_start

        mark_start()  # as the program does, which this process stands for

        if own_folder:
            sys.path.append(str(cwd))

        if before is not None and os.environ.get("RANK", "0") == "0":
            before()

        return cli.main(args)

    if processes > 1:
        return fork(lambda: run_ranks(work, processes), log, cwd)

    return fork(work, log, cwd)


def run_ranks(work: Callable[[], int], processes: int) -> int:
    """Do the work in so many ranks, as a launcher does: a rank that fails ends the others. Returns
    the largest exit code; dies of a signal if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    running = {start_rank(work, rank, processes, port) for rank in range(processes)}
    codes = []
    while running:
        pid, status = os.wait()
        running.discard(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] != 0:
            end = signal.SIGTERM if codes[-1] > 0 else signal.SIGKILL
            for other in running:
                os.kill(other, end)

    if not KILLS.isdisjoint(codes):
        os.kill(os.getpid(), signal.SIGKILL)

    return max(map(abs, codes))


def start_rank(work: Callable[[], int], rank: int, processes: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid

    code = 70
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def run_command(
    args: list[str], log: Path, cwd: Path, *, kill_after: float | None = None, **how: Any
) -> Ended:
    return wait(start_command(args, log, cwd, **how), log, kill_after)


def on_operations(folder: Path, act: Callable[[int, str], None]) -> None:
    """Call `act` with the number and name of each operation that changes a folder, before it."""
    seen = 0
    root = str(folder)
    sync = os.fsync

    def note(name: str, path: Any) -> None:
        nonlocal seen
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(root):
            seen += 1
            act(seen, f"{name} {os.fspath(path)}")

    def see(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS or (event == "open" and args[2] and args[2] & WRITES):
            note(event, args[0])

    def sync_and_note(handle: int) -> None:
        note("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    sys.addaudithook(see)
    os.fsync = sync_and_note


def kill_at(folder: Path, number: int, moment: float) -> Callable[[], None]:
    def act(seen: int, name: str) -> None:
        if seen == number and moment:
            signal.setitimer(signal.ITIMER_PROF, moment)  # SIGPROF ends the process
        elif seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: on_operations(folder, act)


# Comparison


def contents(run: Path) -> dict[str, Any]:
    """Every file of a run by its name: bytes, or the values of JSON without times."""
    found: dict[str, Any] = {}

    # A checkpoint may have been moved away, with a link in its place.
    paths = [
        Path(root, name)
        for root, folders, files in os.walk(run, followlinks=True)
        for name in (*folders, *files)
    ]
    for path in sorted(paths):
        name = str(path.relative_to(run))
        if path.name in LEFT_OUT or path.name.startswith("."):
            continue

        if path.name == "state" and path.is_dir():
            found[name] = arrays_of(path)
        elif not path.is_dir() and f"{os.sep}state{os.sep}" not in name:
            try:
                found[name] = read(path, run)
            except (OSError, ValueError) as error:
                found[name] = f"unreadable: {error}"

    return found


def read(path: Path, run: Path) -> Any:
    if path.suffix == ".json":
        return clean(json.loads(path.read_text()), run)

    if path.suffix == ".jsonl":
        rows = [clean(json.loads(line), run) for line in path.read_text().splitlines()]
        return [row for row in rows if row.get("detector") != "stalled_throughput"]  # times again

    if path.suffix == ".md":
        return re.sub(SPEED, "", path.read_text().replace(str(run), "RUN"))

    return path.read_bytes()


def arrays_of(state: Path) -> Any:
    """Hashes of the arrays that Orbax saved; its files differ from run to run."""
    hashes = state.parent.parent.parent / "hashes"

    def work() -> int:
        import jax
        import numpy as np
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            leaves = jax.tree.leaves(checkpointer.restore(state.absolute()))

        found = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in leaves]
        hashes.write_text(json.dumps(found))

        return 0

    log = state.parent.parent.parent.parent / "log"
    if wait(fork(work, log, state.parent), log).code != 0:
        return f"unreadable: {log.read_text()[-300:]}"

    found = json.loads(hashes.read_text())
    hashes.unlink()

    return found


def clean(value: Any, run: Path) -> Any:
    if isinstance(value, dict):
        return {k: clean(v, run) for k, v in value.items() if not k.startswith(TIMES)}
    if isinstance(value, list):
        return [clean(one, run) for one in value]
    if isinstance(value, float) and value != value:
        return "NaN"

    if isinstance(value, str):
        return value.replace(str(run), "RUN")

    return value


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


# Chains of kills


@dataclass
class Tally:
    kills: int = 0
    runs: int = 0
    equal: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)  # cases whose weights never move

    def add(self, good: bool, failure: str) -> None:
        self.runs += 1
        self.equal += good
        self.failures += [] if good else [failure]

    def record(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "equal": self.equal,
            "failures": self.failures,
            "good": not self.failures,
        }


class Victim:
    """A case with its unharmed run, made when first needed."""

    def __init__(self, case: Case, root: Path, cwd: Path) -> None:
        self.case = case
        self.root = root / case.name.replace(" ", "-")
        self.cwd = cwd
        self.root.mkdir(parents=True)
        self.log = self.root / "log"

    @cached_property
    def whole(self) -> tuple[dict[str, Any], list[str], float]:
        """Contents, file operations and seconds of a run that is left alone."""
        out = self.root / "whole"
        trace = self.root / "trace"

        def record() -> None:
            file = trace.open("w", buffering=1)
            on_operations(out, lambda seen, name: print(name, file=file))

        ended = self.run(out, before=record)
        if ended.code != 0:
            raise RuntimeError(f"{self.case.name} does not run: {ended.text[-2000:]}")

        return contents(out), trace.read_text().splitlines(), ended.seconds

    @property
    def is_still(self) -> bool:
        files = self.whole[0].items()
        weights = []
        for name, value in files:
            if name.endswith("model.safetensors"):
                weights.append(value)

        return len(weights) > 1 == len(set(weights))

    def attack(self, rng: random.Random, kills: int, tally: Tally) -> None:
        """One run with up to so many kills, resumed to its end and compared."""
        expected, operations, seconds = self.whole
        out = self.root / "killed"
        ended = None
        history = []
        shutil.rmtree(out, ignore_errors=True)

        for _ in range(kills):
            kind = rng.choice(("operation", "checkpoint", "time"))
            history.append(kind)

            # What was resumed has less to do: a kill after its end would be none.
            most = 1.0 if len(history) == 1 else 0.5
            if kind == "time":
                ended = self.run(out, kill_after=rng.uniform(0, seconds * most))
            else:
                early = operations[: round(len(operations) * most)]
                numbers = []
                for n, text in enumerate(early, 1):
                    if kind == "operation" or "checkpoint-" in text:
                        numbers.append(n)

                at = rng.choice(numbers)
                moment = rng.choice(MOMENTS)
                history[-1] += f" {at} +{moment:g} s ({operations[at - 1].rpartition('/')[2]})"
                ended = self.run(out, before=kill_at(out, at, moment))

            if not ended.killed:
                break

            tally.kills += 1
            tally.by_kind[kind] = tally.by_kind.get(kind, 0) + 1

        if ended is None or ended.killed:
            ended = self.run(out)

        # A kill between the result and its report leaves a finished run.
        finished = ended.code == 2 and (out / "result.json").exists()
        found = contents(out) if out.exists() else {}
        left = []
        for name in differences(expected, found):
            if not (finished and name == "report.md"):
                left.append(name)

        good = (ended.code == 0 or finished) and not left
        tail = ended.text[-1500:] if ended.code else ""
        tally.add(good, f"{self.case.name}: {history}: {ended.code} {left[:5]} {tail}")

        if not good:
            say(tally.failures[-1])
            shutil.copytree(out, self.root / f"failure-{len(tally.failures)}", symlinks=True)

    def run(self, out: Path, **how: Any) -> Ended:
        """Start or resume it."""
        words = self.case.start_or_resume(out)
        return run_command(words, self.log, self.cwd, processes=self.case.processes, **how)


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    """Attack the cases in turn until there are enough kills."""
    rng = random.Random(args.seed)
    tally = Tally()
    end = time.monotonic() + args.minutes * 60

    demos = root / "demos"
    cases = [
        case
        for case in make_cases(model, demos if demos.exists() else None)
        if not args.cases or case.name in args.cases
    ]

    victims = [Victim(case, root / "runs", root) for case in cases]
    for turn, victim in ((turn, victim) for turn in count() for victim in victims):
        if tally.kills >= args.kills or time.monotonic() > end:
            break

        if victim.case.command != "ppo snake" or turn % SELDOM == 0:
            victim.attack(rng, rng.choice((1, 2, 4, 6, 8)), tally)
            tally.still += [victim.case.name] * (turn == 0 and victim.is_still)
            name = victim.case.name
            say(f"{tally.kills} kills, {tally.equal} of {tally.runs} runs equal ({name})")

    counts = {
        "kills": tally.kills,
        "by_kind": tally.by_kind,
        "still": tally.still,
    }
    return tally.record() | counts | {"cases": len(cases)}
