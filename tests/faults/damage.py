"""Damage between two sessions of a run, full disks, a second process, a blocked pipe.

After each the run must be finished with the bytes of an unharmed one, or refuse in one sentence.
"""

import fcntl
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from faults import kills
from faults.kills import Ended, Tally, Victim, run_command

CHECKPOINT_FILES = "checkpoints/checkpoint-*/*"
OTHERS = (
    "config.json",
    "before.json",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "spent.json",
    "env.json",
    "routing.json",
)


# "archive" moves the whole checkpoint and links to it. Links among a run's own files are refused.
LINKS = ("link to nothing", "loop", "archive")
DAMAGE = ("truncate", "flip", "remove", "link to nothing", "loop", "make folder", "archive")


def damage(kind: str, path: Path, rng: random.Random) -> None:
    if kind == "archive":
        folder = path.parent
        away = folder.parent.parent.parent / f"archive-{rng.random()}"
        folder.rename(away)
        folder.symlink_to(away)
        return

    data = bytearray(path.read_bytes())
    path.unlink()

    if kind == "truncate":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "flip":
        data = data or bytearray(b" ")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "make folder":
        path.mkdir()
    elif kind != "remove":
        path.symlink_to(path if kind == "loop" else path.parent / "nothing")


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    tally = Tally()
    rng = random.Random(args.seed)
    cases = {case.name: case for case in kills.make_cases(model, None)}
    victim = Victim(cases["grpo off"], root / "damage", root)
    block_pipe(victim, tally)
    run_twice(victim, tally)

    for limit in (600, 3000, 9000, 20_000):
        fill_disk(victim, limit, tally)

    damage_files(victim, rng, args.damage, tally)
    return tally.record()


def judge(
    victim: Victim,
    out: Path,
    ended: Ended,
    tally: Tally,
    what: str,
    harmless: bool,
    lost: Collection[str] = (),
) -> None:
    """Equal but for what was lost, or one sentence where the damage cannot be made good."""
    sentence = ended.code == 2 and "Traceback" not in ended.text
    found = kills.contents(out) if ended.code == 0 else victim.whole[0]
    left = set(kills.differences(victim.whole[0], found)).difference(lost)
    good = (ended.code == 0 and not left) or (sentence and not harmless)
    tally.add(good, f"{what}: {ended.code} {sorted(left)[:5]} {ended.text[-1500:]}")


def stopped(victim: Victim) -> Path:
    """A run that was killed when its third checkpoint was about to appear."""
    out = victim.root / "template"
    numbers = []
    for n, text in enumerate(victim.whole[1], 1):
        if text.endswith("checkpoint-3"):
            numbers.append(n)

    ended = victim.run(out, before=kills.kill_at(out, numbers[-1], 0.0))

    assert ended.killed, ended
    return out


def damage_files(victim: Victim, rng: random.Random, times: int, tally: Tally) -> None:
    """Damage one random file of a stopped run, then resume it."""
    template = stopped(victim)
    for number in range(times):
        out = victim.root / f"damaged-{number}"
        shutil.copytree(template, out, symlinks=True)
        kind = DAMAGE[number % len(DAMAGE)]
        in_checkpoint = kind == "archive" or rng.random() < 0.6

        files = sorted(path for path in out.glob(CHECKPOINT_FILES) if path.is_file())
        if not in_checkpoint:
            files = [path for path in (out / name for name in OTHERS) if path.is_file()]

        path = rng.choice(files)
        damage(kind, path, rng)

        ended = run_command(victim.case.resume(out), victim.log, victim.cwd)
        # Rows that no checkpoint has cannot be made again; flipped text may still be text.
        if kind in ("flip", "truncate") and not in_checkpoint and ended.code == 0:
            ended = Ended(2, 0.0, "")

        # The report names the machine, which is in env.json alone.
        lost = {"report.md"} if path.name == "env.json" else set()
        judge(
            victim,
            out,
            ended,
            tally,
            f"{kind} {path.relative_to(out)}",
            in_checkpoint and kind not in LINKS,
            lost,
        )

        shutil.rmtree(out)


def fill_disk(victim: Victim, limit: int, tally: Tally) -> None:
    """Files may have so many bytes (as `ulimit -f`): one sentence, and the rest can be resumed."""
    out = victim.root / f"full-{limit}"

    def restrict() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    ended = victim.run(out, before=restrict)
    if ended.code != 2 or "Traceback" in ended.text:
        tally.add(False, f"files of {limit} bytes: {ended.code} {ended.text[-1500:]}")
        return

    if not (out / "config.json").exists():
        shutil.rmtree(out)

    ended = victim.run(out)
    judge(
        victim,
        out,
        ended,
        tally,
        f"files of {limit} bytes, resumed",
        harmless=True,
    )


def wait_for_file(path: Path, pid: int) -> None:
    while not path.exists():
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            raise RuntimeError(f"the run ended before it wrote {path}")
        time.sleep(0.02)


def run_twice(victim: Victim, tally: Tally) -> None:
    """A second process resumes the run while the first one trains."""
    out = victim.root / "twice"
    log = victim.root / "first.log"
    first = kills.start_command(victim.case.start(out), log, victim.cwd)
    wait_for_file(out / "before.json", first)
    second = run_command(victim.case.resume(out), victim.log, victim.cwd)
    third = run_command(victim.case.start(out), victim.log, victim.cwd)

    ended = kills.wait(first, log)
    if second.code != 2 or third.code != 2 or "Traceback" in second.text + third.text:
        ended = Ended(70, 0.0, f"{second} {third}")

    judge(
        victim,
        out,
        ended,
        tally,
        "two processes",
        harmless=True,
    )


def block_pipe(victim: Victim, tally: Tally) -> None:
    """SIGTERM arrives while the run is blocked, because its output is not read."""
    out = victim.root / "blocked"
    log = victim.root / "blocked.log"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)

    def print_there() -> None:
        os.close(reader)
        os.dup2(writer, 1)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115

    first = kills.start_command(victim.case.start(out), log, victim.cwd, before=print_there)
    wait_for_file(out / "metrics.jsonl", first)

    # Fill it: the next line that the run prints waits.
    filler = os.open(f"/proc/self/fd/{writer}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while os.write(filler, b"x"):
            pass

    time.sleep(1.0)
    os.kill(first, signal.SIGTERM)
    time.sleep(0.5)
    os.close(writer), os.close(filler)

    with os.fdopen(reader, "rb") as file:
        file.read()

    ended = kills.wait(first, log)
    if ended.code == 0 and not (out / "result.json").exists():
        ended = victim.run(out)

    judge(
        victim,
        out,
        ended,
        tally,
        "SIGTERM with a full pipe",
        harmless=True,
    )
