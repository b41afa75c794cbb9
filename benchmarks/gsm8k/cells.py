"""One run of the study in a worker: `mesotron train` as users type it, then its numbers.

A run that time ends is saved and goes on the next time. Its checkpoints are removed once its
samples at temperature 1 are drawn.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._lib.results import read_json
from benchmarks._lib.rows import values
from benchmarks.gsm8k.plan import Cell, Places, key_of, train_flags
from mesotron.runs.checkpoints import newest_whole
from mesotron.runs.files import read_rows

LEAST = 40.0  # seconds in which a run can do anything
CAP = 25 * 60.0  # seconds of a run, all sessions together
GRACE = 60.0  # seconds for saving when the time is up
SAMPLED_PROBLEMS = 200
TRANSCRIPTS = 10
# A trial: everything is tiny.
DRY = (
    "--steps 2 --eval-every 1 --task.num-eval 4 --batch 2 --group 2 --max-tokens 16 "
    "--rollout.micro-batch 2 --device cpu --no-rollout.fast"
)


def run_cell(cell: Cell, settings: dict[str, Any], deadline: float) -> Cell | None:
    """The finished cell; None if time was up, and it goes on the next time."""
    given = Namespace(**settings)
    path = given.state / "runs" / key_of(cell)
    began = time.time()

    if not (path / "result.json").exists():
        left = min(deadline - began, CAP - spent(path))
        if left < LEAST and spent(path) < CAP - LEAST:
            return None
        if left >= LEAST:
            train(cell, given, path, left)

    is_over = spent(path) >= CAP - LEAST
    if not (path / "result.json").exists() and not is_over:
        if time.time() < deadline - LEAST:
            raise RuntimeError(f"mesotron train ended early, see {path}.log")
        return None

    sampled = sample(cell, given, path)
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    finished = cell | numbers(path) | {"sampled": sampled, "seconds": spent(path)}
    return finished | {
        "protocol": given.protocol,
        "finished": not is_over,
        "ended": time.strftime("%FT%TZ", time.gmtime()),
    }


def spent(path: Path) -> float:
    """Seconds of a run in all its sessions."""
    file = path / "spent.json"
    return read_json(file)["seconds"] if file.exists() else 0.0


def train(cell: Cell, given: Namespace, path: Path, left: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = ["--time-limit", f"{left - LEAST / 2:.0f}s", "--threads", str(given.threads)]
    if (path / "config.json").exists():
        words = ["--resume", str(path), *limit]
    else:
        places = Places(given.models, str(given.report), str(given.tuning))
        more = DRY if given.dry else f"--device {given.device}"
        words = [*train_flags(cell, places, dry_flags(cell, more)), "--out", str(path), *limit]

    call(["train", *words], path, left + GRACE)


def dry_flags(cell: Cell, more: str) -> str:
    """A trial keeps the two stages of a run that has them, in two steps."""
    if "--steps 2" in more and (cell["part"] == "smollm2" or "--sft-steps" in cell["flags"]):
        return f"{more} --sft-steps 2 --sft.batch 2"

    return more


def sample(cell: Cell, given: Namespace, path: Path) -> Any:
    """pass@8 before and after, on fewer problems; None where it was not possible."""
    if cell["use"] == "tuning" or cell["part"] == "tools" or not given.samples:
        return None

    out = path / "sampled.json"
    last, _ = newest_whole(path / "checkpoints")  # not the run's best: the study reports the end
    if not out.exists() and last is not None:
        problems = 4 if given.dry else SAMPLED_PROBLEMS
        words = f"--task.num-eval {problems} --samples {given.samples} --out {out}"
        words += f" --device {given.device}"
        call(["eval", str(last.path), *words.split()], path, 15 * 60.0)

    if not out.exists():
        return None

    kept = []
    for result in read_json(out):
        kept.append({"model": result["model"], "sampled": result["sampled"]})

    return kept


def call(words: list[str], path: Path, seconds: float) -> None:
    """Run a command of ours; what it prints goes to a log beside the run."""
    with path.with_name(f"{path.name}.log").open("a") as log:
        try:
            subprocess.run(
                [sys.executable, "-m", "mesotron", *words],
                stdout=log,
                stderr=log,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            log.write(f"ended after {seconds:.0f} s\n")


# What is kept of a run


def numbers(path: Path) -> Cell:
    rows = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    events = read_rows(path / "events.jsonl") if (path / "events.jsonl").exists() else []
    found: Cell = {
        "steps": rows[-1]["step"] if rows else 0,
        "curve": [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row],
        "step_seconds": tens(rows, "time/step"),
        "rewards": tens(rows, "reward"),
        "lengths": tens(rows, "completions/mean_length"),
        "calls": tens(rows, "tools/turns"),
        "events": [[row["step"], row["kind"]] for row in events],
        "accuracy": 0.0,
    }
    for name in ("before", "after"):
        if (path / f"{name}.json").exists():
            found[name] = evaluation(read_json(path / f"{name}.json"))

    if "after" in found:
        found["accuracy"] = found["after"]["strict"]

    return found


def evaluation(result: dict[str, Any]) -> Cell:
    """Scores, what was solved problem by problem, and a few transcripts."""
    greedy = result["greedy"]
    transcripts = result["transcripts"]
    return {
        "strict": greedy["strict"]["value"],
        "lenient": greedy["lenient"]["value"],
        "truncated": greedy["rates"]["facts/truncated"],
        "formatted": greedy["rates"]["facts/formatted"],
        "tokens": greedy["mean_tokens"],
        "solved": "".join(str(int(one["correct"])) for one in transcripts),
        "solved_anywhere": "".join(str(int(one["correct_unformatted"])) for one in transcripts),
        "transcripts": transcripts[:TRANSCRIPTS],
    }


def tens(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Means of ten steps each, to four digits."""
    logged = values(rows, name)
    return [float(f"{fmean(logged[k : k + 10]):.4g}") for k in range(0, len(logged), 10)]
