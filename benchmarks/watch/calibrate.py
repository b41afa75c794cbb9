"""Counts how often each detector was right, for the probabilities that its alarms carry.

    python -m benchmarks.watch.calibrate FOLDER        FOLDER: see public_runs.py

Tuning halves only: our tuning corpus, with and without evaluations, and the tuning half of the
public runs. A detector is right if it speaks in a run that failed, collapsed or starved, and wrong
in a healthy one; unclear runs count for neither.
"""

import argparse
import json
from pathlib import Path

from benchmarks.watch import evaluate, public_runs
from benchmarks.watch.labels import label
from mesotron.watch import DETECTORS, Engine, detectors

RIGHT = {"failed", "collapsed", "starved"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count right and wrong alarms of each detector")
    parser.add_argument("folder", type=Path, help="public runs, with labels.json")
    folder = parser.parse_args().folder

    runs = [
        (evaluate.rows_of(run, without), label(run).outcome)
        for run in evaluate.load("tuning")
        for without in ("", "eval/")
    ]
    for run in json.loads((folder / "labels.json").read_text())["runs"]:
        if public_runs.half_of(run["repository"]) == "tuning":
            outcome = run["label"] if run.get("clear", True) else "unclear"
            runs.append((public_runs.read_rows(folder / run["file"]), outcome))

    names = ["any", *(detector.name for detector in DETECTORS)]
    counts = {name: {"warn": [0, 0], "stop": [0, 0]} for name in names}

    harmless = {detector.name for detector in DETECTORS if detector.harmless}
    for rows, outcome in runs:
        if outcome not in RIGHT | {"healthy"}:
            continue

        engine = Engine()
        spoken = {(e.detector, e.severity) for row in rows for e in engine.update(row)}

        # A stop without a warning before it would have been a warning too.
        spoken |= {(name, "warn") for name, severity in spoken if severity == "stop"}
        spoken |= {("any", severity) for name, severity in spoken if name not in harmless}

        for name, severity in spoken:
            if severity != "clear":
                counts[name][severity][outcome not in RIGHT] += 1

    for detector in DETECTORS:  # one without an alarm keeps the trust that it names
        if detector.trust < 1 and not any(map(sum, counts[detector.name].values())):
            del counts[detector.name]

    lines = [f" {json.dumps(name)}: {json.dumps(count)}" for name, count in counts.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    Path(detectors.__file__).with_name("record.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
