"""A long run of the tiny model, killed now and then: memory and file handles must not grow."""

import os
import random
import time
from pathlib import Path
from typing import Any

from faults.kills import SMALL, Case, contents, differences, start_command, wait

GROWTH = 1.1  # of memory, from a fifth of the run to its end
MORE_FILES = 2
KILLS = 12


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    """One run left alone, whose memory is watched, and one with kills, which must equal it."""
    steps = args.steps
    flags = f"{SMALL} --steps {steps} --save-every {max(steps // 40, 1)} --model {model}"
    case = Case("soak", "train", flags)
    whole = root / "soak-whole"
    killed = root / "soak-killed"
    log = root / "soak.log"
    samples = watch(start_command(case.start(whole), log, root), whole)
    rng = random.Random(args.seed)
    done = 0

    seconds = samples[-1][0]
    for _ in range(KILLS):
        pid = start_command(case.start_or_resume(killed), log, root)
        ended = wait(pid, log, kill_after=rng.uniform(0.3, 2) * seconds / KILLS)
        done += ended.killed
        if not ended.killed:
            break

    if not (killed / "result.json").exists():
        os.waitpid(start_command(case.start_or_resume(killed), log, root), 0)

    different = differences(contents(whole), contents(killed))
    early = [sample for sample in samples if sample[1] >= steps // 5] or samples
    memory = early[-1][2] / early[0][2]
    files = early[-1][3] - early[0][3]

    return {
        "steps": steps,
        "kills": done,
        "different": different,
        "seconds": round(seconds, 1),
        "memory_mib": [round(one[2] / 1024) for one in (early[0], early[-1])],
        "files": [early[0][3], early[-1][3]],
        "good": not different and memory < GROWTH and files <= MORE_FILES,
    }


def watch(pid: int, out: Path) -> list[tuple[float, int, int, int]]:
    """Seconds, steps, KiB of memory and open files of a process until it ends."""
    began = time.monotonic()
    samples = []
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            memory = int(status.partition("VmRSS:")[2].split()[0])
            files = len(os.listdir(f"/proc/{pid}/fd"))
            rows = (out / "metrics.jsonl").read_bytes().count(b"\n")
            samples.append((time.monotonic() - began, rows, memory, files))
        except (OSError, IndexError, ValueError):
            pass  # not started yet, or just ended

        time.sleep(1.0)

    return samples or [(1.0, 0, 1, 0)]
