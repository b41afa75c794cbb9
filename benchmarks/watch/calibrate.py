"""Counts how often each detector was right, for the probabilities that its alarms carry.

    python -m benchmarks.watch.calibrate FOLDER        FOLDER: see public_runs.py

It pools all labeled runs: our tuning and held-out corpora, both halves of the public runs, and the
runs with a sampler of other weights. Each run counts once, as it was logged. A detector is right if
it speaks in a run that failed, collapsed or starved, and wrong in a healthy one; unclear runs count
for neither. It writes the watch's record.json, and reliability.json with reliability.svg: for every
alarm, the probability fitted without its corpus, against the share that was right.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.watch import evaluate, public_runs
from benchmarks.watch.labels import label
from mesotron.watch import DETECTORS, Engine, detectors
from mesotron.watch.detectors import share_right, wilson

HERE = Path(__file__).parent
RIGHT = {"failed", "collapsed", "starved"}
HARMLESS = {detector.name for detector in DETECTORS if detector.harmless}
# A detector without a record may not stop, so it would never get one.
FREE = tuple(replace(detector, trust=1.0) for detector in DETECTORS)
MISMATCHED = {"unsynced": "failed", "stale": "failed", "healthy": "healthy", "quantized": "healthy"}
BINS = (0.0, 0.5, 0.8, 0.9, 0.95, 1.0)

Counts = dict[str, dict[str, tuple[int, int]]]  # detector or any -> severity -> right, wrong


@dataclass(frozen=True)
class Alarm:
    """A detector that spoke in a labeled run."""

    corpus: str
    detector: str
    severity: str
    is_right: bool


def main() -> None:
    parser = argparse.ArgumentParser(description="Count right and wrong alarms of each detector")
    parser.add_argument("folder", type=Path, help="public runs, with labels.json")
    folder = parser.parse_args().folder

    alarms = [*all_alarms(folder)]
    counts = count(alarms)
    lines = [f" {json.dumps(name)}: {json.dumps(counts[name])}" for name in counts]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    Path(detectors.__file__).with_name("record.json").write_text(text, encoding="utf-8")
    print(text)

    bins = reliability(alarms)
    write_json(bins, HERE / "reliability.json")
    draw(bins, HERE / "reliability.svg")


def all_alarms(folder: Path) -> Iterator[Alarm]:
    for corpus, rows, outcome in labelled_runs(folder):
        for name, severity in sorted(spoken(rows)):
            yield Alarm(corpus, name, severity, outcome in RIGHT)


def labelled_runs(folder: Path) -> Iterator[tuple[str, Sequence[evaluate.Row], str]]:
    """Corpus, rows and outcome of every run whose outcome is clear."""
    for corpus in ("tuning", "held_out"):
        for run in evaluate.load(corpus):
            outcome = label(run).outcome
            if outcome in RIGHT or outcome == "healthy":
                yield corpus, evaluate.rows_of(run), outcome

    for kind, columns in read_json(HERE / "mismatched.json.gz").items():
        rows = zip(*columns.values(), strict=True)
        yield "mismatched", [dict(zip(columns, row)) for row in rows], MISMATCHED[kind]

    for half in ("tuning", "check"):
        for run in public_runs.runs_of(folder, half):
            outcome = run["label"]
            is_known = outcome in RIGHT or outcome == "healthy"
            if is_known and run.get("clear", True):
                rows = public_runs.read_rows(folder / run["file"])
                yield f"public, {half}", rows, outcome


def spoken(rows: Sequence[evaluate.Row]) -> set[tuple[str, str]]:
    """Who warned and who stopped in a run, by name and as any."""
    said: set[tuple[str, str]] = set()
    for event in evaluate.events_of(rows, Engine(detectors=FREE)):
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


def count(alarms: Iterable[Alarm]) -> Counts:
    """Right and wrong alarms of every detector, in the order of their table."""
    names = ["any", *(detector.name for detector in DETECTORS)]
    counts: Counts = {name: {"warn": (0, 0), "stop": (0, 0)} for name in names}
    for alarm in alarms:
        right, wrong = counts[alarm.detector][alarm.severity]
        right += alarm.is_right
        wrong += not alarm.is_right
        counts[alarm.detector][alarm.severity] = (right, wrong)

    return counts


def reliability(alarms: Sequence[Alarm]) -> list[dict[str, Any]]:
    """Of the alarms in each bin of predicted probability, the share that was right. A probability
    is fitted on all corpora but that of its alarm."""
    pairs: dict[tuple[float, float], list[tuple[float, bool]]] = defaultdict(list)
    uncalibrated = 0
    for corpus in sorted({alarm.corpus for alarm in alarms}):
        fitted = count(alarm for alarm in alarms if alarm.corpus != corpus)
        for alarm in alarms:
            if alarm.corpus != corpus or alarm.detector in HARMLESS | {"any"}:
                continue

            predicted = predict(fitted, alarm)
            if predicted is None:
                uncalibrated += 1
                continue

            pairs[bin_of(predicted)].append((predicted, alarm.is_right))

    bins = []
    for edges in sorted(pairs):
        right = sum(is_right for _, is_right in pairs[edges])
        wrong = len(pairs[edges]) - right
        low, high = wilson(right, wrong)
        bins.append(
            {
                "from": edges[0],
                "to": edges[1],
                "predicted": sum(x for x, _ in pairs[edges]) / len(pairs[edges]),
                "right": right,
                "wrong": wrong,
                "low": low,
                "high": high,
            }
        )

    return [*bins, {"uncalibrated": uncalibrated}]


def predict(fitted: Mapping[str, Any], alarm: Alarm) -> float | None:
    own = fitted[alarm.detector][alarm.severity]
    return share_right(own, fitted["any"][alarm.severity])


def bin_of(share: float) -> tuple[float, float]:
    for low, high in pairwise(BINS):
        if share < high:
            return low, high
    return BINS[-2], BINS[-1]


def draw(bins: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The reliability diagram."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "reliability"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(4.2, 3.6), constrained_layout=True)
    axis.plot([0, 1], [0, 1], color="grey", lw=0.8, ls=":")
    for each in bins:
        if "predicted" not in each:
            continue

        num = each["right"] + each["wrong"]
        share = each["right"] / num
        errors = [[share - each["low"]], [each["high"] - share]]
        axis.errorbar(each["predicted"], share, yerr=errors, fmt="o", color="black", capsize=3)
        axis.annotate(f"{num}", (each["predicted"], share), (5, -12), textcoords="offset points")

    axis.set_xlabel("predicted, fitted on the other corpora")
    axis.set_ylabel("share of the alarms that were right")
    axis.set_xlim(0, 1.02)
    axis.set_ylim(0, 1.02)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
