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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._lib.results import write_json
from benchmarks.watch.evaluate import share
from mesotron.watch.diagnosis import Diagnosis, diagnose
from mesotron.watch.engine import Engine
from mesotron.watch.metrics import canonical, own_name

HERE = Path(__file__).parent
ONSET_SHARE = 0.1  # of the run's length


@dataclass(frozen=True, kw_only=True)
class Verdict:
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
    return ("tuning", "check")[hashlib.sha256(repository.encode()).digest()[0] % 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the watch by public runs")
    parser.add_argument("folder", type=Path, help="with labels.json")
    parser.add_argument("--half", choices=("tuning", "check", "both"), default="tuning")
    parser.add_argument("--all", action="store_true", help="print every run")
    parser.add_argument("--write", action="store_true", help="also write public_runs.json.gz")
    given = parser.parse_args()
    runs = json.loads((given.folder / "labels.json").read_text())["runs"]
    halves = ("tuning", "check") if given.half == "both" else (given.half,)

    result = {}
    for half in halves:
        verdicts = [judge(given.folder, run) for run in runs if half_of(run["repository"]) == half]
        for verdict in verdicts:
            if given.all or not is_right(verdict):
                print(line(verdict))

        result[half] = {"summary": summarize(verdicts), "verdicts": [*map(asdict, verdicts)]}
        print(half, json.dumps(result[half]["summary"], indent=1))

    if given.write:
        write_json(result, HERE / "public_runs.json.gz")


def judge(folder: Path, run: dict[str, Any]) -> Verdict:
    rows = read_rows(folder / run["file"])
    key = run["reward_key"]

    unread = not any("reward" in canonical(row) for row in rows)
    if unread:  # judge the detectors all the same
        rows = [row | ({own_name("reward"): row[key]} if key in row else {}) for row in rows]

    diagnosis = watch(rows)
    label = run["label"]
    if label == "collapsed" and not run.get("clear", True):
        label = "noisy"

    first = rows[0]["step"]
    last = rows[-1]["step"]

    onset = found = None
    if label == "collapsed":
        points = [(row["step"], row[key]) for row in rows if key in row]
        onset = (labelled_onset(points) - first) / (last - first)
        ends = [p.first for p in diagnosis.phases if p.condition == "dead"]
        found = (ends[-1] - first) / (last - first) if ends else None

    events = diagnosis.events
    return Verdict(
        run=run["file"].removesuffix(".jsonl.gz"),
        label=label,
        condition=diagnosis.condition,
        cause=diagnosis.cause,
        stops=tuple((e.step, e.detector) for e in events if e.severity == "stop"),
        warnings=tuple(sorted({e.detector for e in events if e.severity == "warn"})),
        unread=unread,
        onset=onset,
        found=found,
    )


def read_rows(path: Path) -> list[dict[str, float]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(text) for text in file]

    names = ("step", "Step", "progress/batch", "system/step")
    step = next((name for name in names if all(name in row for row in rows)), None)
    return [row | {"step": float(k if step is None else row[step])} for k, row in enumerate(rows)]


def watch(rows: Sequence[dict[str, float]]) -> Diagnosis:
    """As `mesotron.Watch` and `mesotron watch` do: row by row, then the diagnosis."""
    engine = Engine()
    events = [event for row in rows for event in engine.update(row)]
    return diagnose(rows, engine, events)


def labelled_onset(points: Sequence[tuple[float, float]]) -> float:
    """The last step at which the reward, smoothed as by the rule, was within a tenth of its
    best."""
    values = [value for _, value in points]
    low = min(0.0, sorted(values)[len(values) // 100])
    half = max(len(values) // 20, 1) // 2
    windows = [values[max(k - half, 0) : k + half + 1] for k in range(len(values))]
    smooth = [sum(window) / len(window) - low for window in windows]
    best = max(smooth)

    return max(step for (step, _), value in zip(points, smooth) if value >= 0.9 * best)


def is_right(verdict: Verdict) -> bool:
    if verdict.label in ("collapsed", "starved"):
        return verdict.condition == "dead"
    return verdict.label != "healthy" or (verdict.condition == "healthy" and not verdict.stops)


def summarize(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    def those(label: str) -> list[Verdict]:
        return [one for one in verdicts if one.label == label]

    healthy = those("healthy")
    collapsed = those("collapsed")
    dated = [one for one in collapsed if one.found is not None and one.onset is not None]

    return {
        "collapses caught": share([one.condition == "dead" for one in collapsed]),
        "starved caught": share([one.condition == "dead" for one in those("starved")]),
        "noisy collapses": dict(Counter(one.condition for one in those("noisy"))),
        "healthy stopped": share([bool(one.stops) for one in healthy]),
        "healthy dead at the end": share([one.condition == "dead" for one in healthy]),
        "healthy ending with a warning": share([one.condition == "drifting" for one in healthy]),
        "unclear": dict(Counter(one.condition for one in those("unclear"))),
        "unread": sum(one.unread for one in verdicts),
        "onset within a tenth": share(
            [abs((one.found or 0) - (one.onset or 0)) <= ONSET_SHARE for one in dated]
        ),
    }


def line(one: Verdict) -> str:
    mark = "  " if is_right(one) else "X "
    dates = "" if one.onset is None else f" onset {one.onset:.2f} found {one.found}"

    return (
        f"{mark}{one.label:<9} {one.condition:<9} {one.run[:70]:<70} {one.cause or ''}{dates} "
        f"{list(one.stops)} {list(one.warnings)}{' unread' if one.unread else ''}"
    )


if __name__ == "__main__":
    main()
