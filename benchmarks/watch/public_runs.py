"""Evaluates the watch on other people's runs: public logs, labelled by their training reward.

    python -m benchmarks.watch.public_runs FOLDER              the tuning half
    python -m benchmarks.watch.public_runs FOLDER --half check --write

FOLDER holds labels.json and one JSONL.gz per run with the original metric names. The logs belong
to their repositories and are not part of this one; the rule, the split and the verdicts are.

The rule: smooth the reward by a moving mean of 5% of the run; best is its maximum, end the mean of
the last 10%. Collapsed: end <= 0.5 best and best >= 0.1. Healthy: end >= 0.85 best. Starved: best
< 0.05. Else unclear. A reward outside 0 to 1 is first rescaled from min(0, 1st percentile) to its
99th percentile. Clear collapses are still collapsed with a window of 20% and 30 or more points.
"""

import argparse
import gzip
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.watch.evaluate import events_of, share
from mesotron.watch.diagnosis import Diagnosis, diagnose
from mesotron.watch.engine import Engine
from mesotron.watch.metrics import canonical, own_name

HERE = Path(__file__).parent
LABELS = ("healthy", "unclear", "collapsed", "noisy", "starved")
ONSET_SHARE = 0.1  # of the run's length
STEP_NAMES = ("step", "Step", "progress/batch", "system/step")
Row = dict[str, float]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class PublicVerdict:
    """The watch's verdict on one public run next to its label."""

    run: str
    label: str  # healthy, unclear, collapsed, noisy (collapsed, but not clearly) or starved
    condition: str
    cause: str | None
    stops: tuple[tuple[int, str], ...]  # every stop: step, detector
    warnings: tuple[str, ...]
    unread: bool  # the reward's name is not in our table
    onset: float | None = None  # of the label, as a share of the run
    found: float | None = None  # of the watch


def half_of(repository: str) -> str:
    """The split, fixed before tuning: by repository, never by run."""
    first = hashlib.sha256(repository.encode()).digest()[0]
    return ("tuning", "check")[first % 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the watch by public runs")
    parser.add_argument("folder", type=Path, help="with labels.json")
    parser.add_argument("--half", choices=("tuning", "check", "both"), default="tuning")
    parser.add_argument("--all", action="store_true", help="print every run")
    parser.add_argument("--write", action="store_true", help="also write public_runs.json.gz")
    given = parser.parse_args()

    result = {}
    for half in ("tuning", "check") if given.half == "both" else (given.half,):
        verdicts = [judge(given.folder, run) for run in runs_of(given.folder, half)]
        for verdict in verdicts:
            if given.all or not is_right(verdict):
                print(line(verdict))

        summary = summarize(verdicts)
        print(half, json.dumps(summary, indent=1))
        result[half] = {"summary": summary, "verdicts": [asdict(one) for one in verdicts]}

    if given.write:
        write_json(result, HERE / "public_runs.json.gz")


def runs_of(folder: Path, half: str) -> list[dict[str, Any]]:
    """The labelled runs of a half."""
    runs = read_json(folder / "labels.json")["runs"]
    return [run for run in runs if half_of(run["repository"]) == half]


def judge(folder: Path, run: dict[str, Any]) -> PublicVerdict:
    rows = read_rows(folder / run["file"])
    key = run["reward_key"]

    unread = not any("reward" in canonical(row) for row in rows)
    if unread:  # judge the detectors all the same
        for row in rows:
            if key in row:
                row[own_name("reward")] = row[key]

    label = run["label"]
    if label == "collapsed" and not run.get("clear", True):
        label = "noisy"

    diagnosis = watch(rows)
    onset = None
    found = None
    if label == "collapsed":
        points = [(row["step"], row[key]) for row in rows if key in row]
        onset = share_of(labelled_onset(points), rows)
        found = share_of(dead_from(diagnosis), rows)

    stops = [event for event in diagnosis.events if event.severity == "stop"]
    warnings = {event.detector for event in diagnosis.events if event.severity == "warn"}
    return PublicVerdict(
        run=run["file"].removesuffix(".jsonl.gz"),
        label=label,
        condition=diagnosis.condition,
        cause=diagnosis.cause,
        stops=tuple((event.step, event.detector) for event in stops),
        warnings=tuple(sorted(warnings)),
        unread=unread,
        onset=onset,
        found=found,
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a log, each with a step: its own, or its number."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(text) for text in file]

    names = []
    for name in STEP_NAMES:
        if all(name in row for row in rows):
            names.append(name)

    for k, row in enumerate(rows):
        row["step"] = float(row[names[0]] if names else k)
    return rows


def watch(rows: Sequence[Row]) -> Diagnosis:
    """As `mesotron.Watch` and `mesotron watch` do: row by row, then the diagnosis."""
    engine = Engine()
    events = list(events_of(rows, engine))
    return diagnose(rows, engine, events)


def share_of(step: float | None, rows: Sequence[Row]) -> float | None:
    """Where a step lies in the run."""
    if step is None:
        return None

    first = rows[0]["step"]
    last = rows[-1]["step"]
    return (step - first) / (last - first)


def dead_from(diagnosis: Diagnosis) -> float | None:
    """The step from which the watch calls the run dead."""
    starts = []
    for phase in diagnosis.phases:
        if phase.condition == "dead":
            starts.append(phase.first)

    return starts[-1] if starts else None


def labelled_onset(points: Points) -> float:
    """The last step at which the reward, smoothed as by the rule, was within a tenth of its
    best."""
    values = [value for _, value in points]
    low = min(0.0, sorted(values)[len(values) // 100])
    half = max(len(values) // 20, 1) // 2

    smooth = []
    for k in range(len(values)):
        around = values[max(k - half, 0) : k + half + 1]
        smooth.append(sum(around) / len(around) - low)

    best = max(smooth)
    pairs = zip(points, smooth, strict=True)
    return max(step for (step, _), value in pairs if value >= 0.9 * best)


def is_right(verdict: PublicVerdict) -> bool:
    if verdict.label == "collapsed":
        return verdict.condition == "dead"
    if verdict.label == "starved":
        return verdict.condition in ("dead", "drifting")
    if verdict.label == "healthy":
        return verdict.condition in ("healthy", "unknown") and not verdict.stops
    return True


def summarize(verdicts: Sequence[PublicVerdict]) -> dict[str, Any]:
    by_label: dict[str, list[PublicVerdict]] = defaultdict(list)
    for one in verdicts:
        by_label[one.label].append(one)

    healthy = by_label["healthy"]
    collapsed = by_label["collapsed"]
    return {
        "collapses caught": share(are(collapsed, "dead")),
        "starved caught": share([is_right(one) for one in by_label["starved"]]),
        "noisy collapses": dict(Counter(one.condition for one in by_label["noisy"])),
        "healthy stopped": share([bool(one.stops) for one in healthy]),
        "healthy dead at the end": share(are(healthy, "dead")),
        "healthy ending with a warning": share(are(healthy, "drifting")),
        "healthy unknown": share(are(healthy, "unknown")),
        "unclear": dict(Counter(one.condition for one in by_label["unclear"])),
        "unread": sum(one.unread for one in verdicts),
        "onset within a tenth": share(dated_well(collapsed)),
    }


def are(verdicts: Sequence[PublicVerdict], condition: str) -> list[bool]:
    return [one.condition == condition for one in verdicts]


def dated_well(verdicts: Sequence[PublicVerdict]) -> list[bool]:
    """Whether the watch dates a collapse as the label does, where both do."""
    hits = []
    for one in verdicts:
        if one.found is not None and one.onset is not None:
            hits.append(abs(one.found - one.onset) <= ONSET_SHARE)
    return hits


def line(one: PublicVerdict) -> str:
    mark = "  " if is_right(one) else "X "

    if one.onset is None:
        dates = ""
    else:
        dates = f" onset {one.onset:.2f} found {one.found}"

    unread = " unread" if one.unread else ""
    return (
        f"{mark}{one.label:<9} {one.condition:<9} {one.run[:70]:<70} {one.cause or ''}{dates} "
        f"{list(one.stops)} {list(one.warnings)}{unread}"
    )


if __name__ == "__main__":
    main()
