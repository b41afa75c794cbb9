"""Counts how often each detector was right, for the probabilities that its alarms carry.

    python -m benchmarks.watch.calibrate FOLDER        FOLDER: see public_runs.py

Tuning halves only: our tuning corpus, with and without evaluations, and the tuning half of the
public runs. A detector is right if it speaks in a run that failed, collapsed or starved, and wrong
in a healthy one; unclear runs count for neither.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.watch import evaluate, public_runs
from benchmarks.watch.labels import label
from mesotron.watch import DETECTORS, Engine, detectors

RIGHT = {"failed", "collapsed", "starved"}
HARMLESS = {detector.name for detector in DETECTORS if detector.harmless}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count right and wrong alarms of each detector")
    parser.add_argument("folder", type=Path, help="public runs, with labels.json")
    folder = parser.parse_args().folder

    names = ["any", *(detector.name for detector in DETECTORS)]
    counts = {name: {"warn": [0, 0], "stop": [0, 0]} for name in names}
    for rows, outcome in labelled_runs(folder):
        for name, severity in spoken(rows):
            counts[name][severity][outcome not in RIGHT] += 1

    for detector in DETECTORS:  # one without an alarm keeps the trust that it names
        is_silent = not any(map(sum, counts[detector.name].values()))
        if detector.trust < 1 and is_silent:
            del counts[detector.name]

    lines = [f" {json.dumps(name)}: {json.dumps(count)}" for name, count in counts.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    Path(detectors.__file__).with_name("record.json").write_text(text, encoding="utf-8")
    print(text)


def labelled_runs(folder: Path) -> Iterator[tuple[Sequence[evaluate.Row], str]]:
    """Rows and outcome of every run whose outcome is clear."""
    for run in evaluate.load("tuning"):
        outcome = label(run).outcome
        if outcome in RIGHT or outcome == "healthy":
            yield evaluate.rows_of(run), outcome
            yield evaluate.rows_of(run, without="eval/"), outcome

    for run in public_runs.runs_of(folder, "tuning"):
        outcome = run["label"]
        is_known = outcome in RIGHT or outcome == "healthy"
        if is_known and run.get("clear", True):
            yield public_runs.read_rows(folder / run["file"]), outcome


def spoken(rows: Sequence[evaluate.Row]) -> set[tuple[str, str]]:
    """Who warned and who stopped in a run, by name and as any."""
    said: set[tuple[str, str]] = set()
    for event in evaluate.events_of(rows, Engine()):
        if event.severity == "clear":
            continue

        severities = [event.severity]
        if event.severity == "stop":  # without a warning before it would have been one too
            severities.append("warn")
        for severity in severities:
            said.add((event.detector, severity))
            if event.detector not in HARMLESS:
                said.add(("any", severity))
    return said


if __name__ == "__main__":
    main()
