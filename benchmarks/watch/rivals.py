"""The public runs as a small benchmark: addresses, labels, and what each tool says of every run.

    python -m venv tools && tools/bin/pip install rldoctor rlwatch
    python -m benchmarks.watch.rivals FOLDER --python tools/bin/python

FOLDER: see public_runs.py; without it, `rebuild.py` makes one where there is a network. Each tool
has its defaults. rldoctor reads the log itself; rlwatch is a callback, so it gets each row under
the names that it takes, as our reader finds them. Its `critical` and rldoctor's CRITICAL count as a
stop, a warning as a warning. Writes public.json, which holds no fetched data.
"""

import argparse
import gzip
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks._lib.results import read_json, write_json
from benchmarks.watch import public_runs
from mesotron.watch.detectors import wilson
from mesotron.watch.metrics import canonical

HERE = Path(__file__).parent
Says = Literal["stop", "warn", "unknown", "healthy"]
CONDITIONS: dict[str, Says] = {"dead": "stop", "drifting": "warn", "unknown": "unknown"}
SEVERITIES: dict[str, Says] = {"CRITICAL": "stop", "critical": "stop"}
SEVERITIES |= {"WARNING": "warn", "warning": "warn"}
KEPT = ("repository", "source", "found_in", "framework", "model", "rows", "reward_key")
LABELS = ("rescaled", "best", "end", "label", "clear")
# rlwatch's names of what its detectors take, and ours.
RLWATCH_NAMES = {
    "entropy": "entropy",
    "kl_divergence": "kl",
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "loss": "loss",
    "grad_norm": "grad_norm",
}
# What each tool does with all runs in one process, which a JSON list of [log, rows] tells it.
RLWATCH = """
import json, sys
from rlwatch.config import RLWatchConfig
from rlwatch.detectors import DetectorSuite

answers = []
for log, rows in json.load(sys.stdin):
    suite = DetectorSuite(RLWatchConfig())
    alerts = [alert for row in rows for alert in suite.check_step(**row)]
    answers.append([(alert.severity, alert.detector) for alert in alerts])
print(json.dumps(answers))
"""
RLDOCTOR = """
import io, json, sys
from contextlib import redirect_stdout
from rl_doctor.cli import main

answers = []
for log, rows in json.load(sys.stdin):
    report = io.StringIO()
    with redirect_stdout(report):
        code = main(["diagnose", log, "--format", "json"])
    if code:
        answers.append(None)
        continue

    text = report.getvalue()
    found = json.loads(text[text.find("{"):])["findings"]
    answers.append([(each["severity"], each["detector"]) for each in found])
print(json.dumps(answers))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Let other tools judge the public runs")
    parser.add_argument("folder", type=Path, help="with labels.json")
    parser.add_argument("--python", type=Path, required=True, help="of an environment with both")
    given = parser.parse_args()

    labels = read_json(given.folder / "labels.json")
    runs = []
    with tempfile.TemporaryDirectory() as logs:
        asked = []
        for number, run in enumerate(labels["runs"]):
            log = Path(logs) / f"{number}.jsonl"
            with gzip.open(given.folder / run["file"], "rb") as file:
                log.write_bytes(file.read())
            asked.append((str(log), rows_for_rlwatch(given.folder / run["file"])))

        rldoctor = answers(given.python, RLDOCTOR, asked)
        rlwatch = answers(given.python, RLWATCH, asked)

    for run, *others in zip(labels["runs"], rldoctor, rlwatch, strict=True):
        says = {"mesotron": ours(given.folder, run)}
        says |= {"rldoctor": worst_of(others[0]), "rlwatch": worst_of(others[1])}
        runs.append(entry_of(run) | {"says": says})

    table = summarize(runs)
    write_json({"rule": labels["rule"], "table": table, "runs": runs}, HERE / "public.json")
    print(json.dumps(table, indent=1))


def entry_of(run: dict[str, Any]) -> dict[str, Any]:
    """Where a run is, and its label."""
    kept = {key: run[key] for key in (*KEPT, *LABELS) if key in run}
    return kept | {"address": f"https://github.com/{run['repository']}/blob/HEAD/{run['source']}"}


def ours(folder: Path, run: dict[str, Any]) -> list[str]:
    """The watch's verdict, and its cause."""
    verdict = public_runs.judge(folder, run)
    says: Says = CONDITIONS.get(verdict.condition, "healthy")
    if verdict.stops:
        says = "stop"

    return [says, verdict.cause] if verdict.cause else [says]


def rows_for_rlwatch(path: Path) -> list[dict[str, float]]:
    """The rows of a log under the names that rlwatch takes."""
    rows = []
    for row in public_runs.read_rows(path):
        values = canonical(row)
        taken: dict[str, float] = {"step": int(row["step"])}
        for theirs, name in RLWATCH_NAMES.items():
            if name in values:
                taken[theirs] = values[name]
        rows.append(taken)

    return rows


def answers(python: Path, program: str, asked: Sequence[Any]) -> list[Any]:
    """Severity and detector of all that a tool found, for each run; None where it cannot read."""
    done = subprocess.run(
        [str(python), "-c", program],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def worst_of(found: Sequence[Sequence[str]] | None) -> list[str]:
    """The worst that was said, and the detectors that said so."""
    if found is None:
        return ["unknown"]

    for wanted in ("stop", "warn"):
        names = [name for severity, name in found if SEVERITIES.get(severity) == wanted]
        if names:
            return [wanted, *dict.fromkeys(names)]

    return ["healthy"]


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each tool: what it says of healthy, collapsed and starved runs."""
    table: dict[str, Any] = {}
    for tool in runs[0]["says"]:
        healthy = [run["says"][tool][0] for run in runs if run["label"] == "healthy"]
        starved = [run["says"][tool][0] for run in runs if run["label"] == "starved"]
        collapsed = []
        for run in runs:
            if run["label"] == "collapsed" and run.get("clear", True):
                collapsed.append(run["says"][tool][0])

        table[tool] = {
            "healthy stopped": share(healthy, ("stop",)),
            "healthy warned of": share(healthy, ("warn",)),
            "healthy unknown": share(healthy, ("unknown",)),
            "collapses stopped": share(collapsed, ("stop",)),
            "starved stopped or warned of": share(starved, ("stop", "warn")),
        }

    return table


def share(said: Sequence[str], wanted: Sequence[str]) -> str:
    right = sum(each in wanted for each in said)
    low, high = wilson(right, len(said) - right)
    return f"{right} of {len(said)} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
