"""Limits in time and money: how far runs go beyond them, by the clock of another process."""

import json
import shutil
from pathlib import Path
from typing import Any

from faults.kills import SMALL, Tally, run_command

# A second in each step besides the computation, so that a step is not noise.
SLOW = """
import time
def even(completion_ids, **_):
    time.sleep(0.5)
    return [sum(int(token) % 2 == 0 for token in ids) / 4 for ids in completion_ids]
"""
PRICE = 3600  # dollars per hour: a dollar is a second
# Shares of the time that a whole run takes.
SHARES = {
    "fresh": (0.1, 0.25, 0.5, 0.9),
    "beside": (0.1, 0.4, 0.8),
    "resumed": (0.05, 0.3, 0.6),
}
FLAGS = ("--time-limit", "--budget")
SETTINGS = [(state, flag, share) for state in SHARES for flag in FLAGS for share in SHARES[state]]


def attack(args: Any, root: Path, model: Path) -> dict[str, Any]:
    """Run under each limit, which may be exceeded by a step."""
    tally = Tally()
    place = root / "budgets"
    place.mkdir()
    (place / "earned.py").write_text(SLOW)
    flags = f"{SMALL} --steps 6 --price {PRICE} --model {model}".split()
    known = place / "known"
    whole = run_command(["train", *flags, "--out", str(known / "whole")], place / "log", place)

    assert whole.code == 0, whole

    # The start of a process and its exit cannot be refused.
    words = ["train", *flags, "--out", str(known / "none"), "--time-limit", "0.001s"]
    refusals = [run_command(words, place / "log", place) for _ in range(3)]
    assert all(one.code == 2 for one in refusals), refusals

    least = max(one.seconds for one in refusals)
    found = []
    for number, (state, flag, share) in enumerate(SETTINGS):
        parent = known if state == "beside" else place / f"alone-{number}"
        out = parent / f"run-{number}"
        limit = share * whole.seconds
        before = 0.0

        words = ["train", *flags, "--out", str(out)]
        if state == "resumed":
            first = run_command(words, place / "log", place, kill_after=whole.seconds * 0.6)
            words = ["train", "--resume", str(out), "--trust"]
            if not first.killed or not (out / "config.json").exists():
                words = ["train", *flags, "--out", str(out)]
                shutil.rmtree(out, ignore_errors=True)
            elif flag == "--budget":
                before = first.seconds
                limit += before

        spelled = f"{limit:.3f}s" if flag == "--time-limit" else f"{limit:.3f}"
        rows = count_rows(out)
        ended = run_command([*words, flag, spelled], place / "log", place)

        if (out / "metrics.jsonl").exists():
            steps = count_rows(out) - rows
        else:
            steps = 0

        spent = out / "spent.json"
        step = json.loads(spent.read_text())["step"] if spent.exists() else 0.0
        over = before + ended.seconds - limit
        allowed = step if steps > 0 else max(before + least - limit, 0.0)
        good = ended.code in (0, 2) and "Traceback" not in ended.text and over <= allowed

        times = {
            "limit": limit,
            "step_seconds": step,
            "over": over,
            "refusal_seconds": least,
        }

        one = {
            "state": state,
            "flag": flag,
            "steps": steps,
            "code": ended.code,
        }

        one |= {name: round(value, 3) for name, value in times.items()}
        found.append(one)
        tally.add(good, f"{one} {ended.text[-800:]}")

    beyond = [one["over"] / one["step_seconds"] for one in found if one["steps"] > 0]
    before = [one["over"] for one in found if one["steps"] <= 0]

    return tally.record() | {
        "settings": found,
        "most_steps_over": round(max([*beyond, 0.0]), 2),
        "most_seconds_over_before_the_first_step": round(max([*before, 0.0]), 3),
    }


def count_rows(out: Path) -> int:
    path = out / "metrics.jsonl"
    if path.exists():
        return len(path.read_text().splitlines())

    return 0
