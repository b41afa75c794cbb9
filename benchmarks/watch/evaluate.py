"""Evaluates the watch on a packed corpus: collapses caught, healthy runs stopped, how early.

    python -m benchmarks.watch.evaluate                       the tuning corpus, while tuning
    python -m benchmarks.watch.evaluate held_out --write      the held-out one, once, at the end

Every run goes through the engine row by row, as it was logged, and through the fixed thresholds of
`static_thresholds`. A collapse is caught by a stop at or after its onset, less ten steps.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.watch.corpus import LISTS, TUNING_PROBLEMS
from benchmarks.watch.labels import Label, label
from benchmarks.watch.static_thresholds import StaticThresholds
from mesotron.watch import Engine, Event

HERE = Path(__file__).parent
# A stop up to this many steps before the onset counts as a catch; an earlier one does not.
EARLY = 10
Alarm = tuple[int, str]  # the step and what spoke
Row = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict of a detector on one run.

    Args:
        run: its name.
        kind: what it was made to be.
        outcome: what it came to.
        why: the clause of the rule that said so.
        onset: the step from which it went wrong.
        alarm: the first stop; None if there was none.
        lossy: whether there was something to lose; a run that never began has nothing.
        lost: share of the right answers (or of a broken reward) that was gone at the alarm.
        reward_lost: share of the training reward's peak that was.
        reward_fell: whether half of that was gone in the end.
    """

    run: str
    kind: str
    outcome: str
    why: str
    onset: int | None
    alarm: Alarm | None
    lossy: bool
    lost: float | None
    reward_lost: float | None
    reward_fell: bool

    @property
    def caught(self) -> bool:
        """Whether a failed run was stopped in time."""
        in_time = self.alarm is not None and self.alarm[0] >= (self.onset or 0) - EARLY
        return self.outcome == "failed" and in_time


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the watch by the corpus")
    add = parser.add_argument
    add("corpus", nargs="?", choices=("tuning", "held_out"), default="tuning")
    add("--without", default="", help="leave out metrics that begin so (eval/)")
    add("--judges", nargs="+", default=list(JUDGES), help="which ones to ask")
    add("--write", action="store_true", help="also write the verdicts beside the corpus")
    given = parser.parse_args()

    runs = load(given.corpus)
    verdicts: dict[str, list[Verdict]] = {}
    for name, judge in JUDGES.items():
        if name in given.judges:
            verdicts[name] = judge_all(runs, judge, given.without)

    for verdict in verdicts["watch"]:
        print(line(verdict))

    summary = {name: summarise(found) for name, found in verdicts.items()}
    made = completeness(given.corpus, runs)
    print(json.dumps(summary | {"corpus": made}, indent=1))

    if given.write:
        ending = "verdicts_blind" if given.without else "verdicts"
        rows = {name: [asdict(verdict) for verdict in found] for name, found in verdicts.items()}
        written = {"corpus": made, "summary": summary, "verdicts": rows}
        write_json(written, HERE / f"{given.corpus}_{ending}.json.gz")


def completeness(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Which runs of the list are not in the corpus, and which of those in it ended before their
    last step: a figure over the runs that happen to be there could be of the easy ones."""
    listed = {run.name: run for run in LISTS[name]()}
    names = {run["name"] for run in runs}

    short = {}
    for run in runs:
        last = run["columns"]["step"][-1]
        if run["exit_code"] or last < listed[run["name"]].setting.steps:
            short[run["name"]] = f"step {last:.0f}, exit {run['exit_code']}"

    return {
        "runs": f"{len(runs)} of {len(listed)}",
        "not made": sorted(listed.keys() - names),
        "ended early": short,
    }


def load(name: str) -> list[dict[str, Any]]:
    """The runs of a packed corpus."""
    return read_json(HERE / f"{name}.json.gz")


def rows_of(run: dict[str, Any], without: str = "") -> list[Row]:
    """The rows as they were logged, but for metrics that begin with `without`."""
    rows: list[Row] = [{} for _ in run["columns"]["step"]]
    for name, column in (run["columns"] | first_evaluation(run)).items():
        if without and name.startswith(without):
            continue
        for row, value in zip(rows, column, strict=True):
            if value is not None:
                row[name] = value
    return rows


def first_evaluation(run: dict[str, Any]) -> dict[str, list[float | None]]:
    """What runs of the tuning corpus did not log yet: their first evaluation, in the row of step 1,
    and of how many problems each was."""
    if "eval/problems" in run["columns"]:
        return {}

    greedy = [run["before"], *run["columns"]["eval/greedy"][1:]]
    problems = [None if value is None else float(TUNING_PROBLEMS) for value in greedy]
    return {"eval/greedy": greedy, "eval/problems": problems}


def events_of(rows: Iterable[Row], engine: Engine) -> Iterator[Event]:
    """What the watch says, row by row."""
    for row in rows:
        yield from engine.update(row)


def watch_alarm(rows: Sequence[Row]) -> Alarm | None:
    """The first stop of the watch."""
    for event in events_of(rows, Engine()):
        if event.severity == "stop":
            return event.step, event.detector
    return None


def static_alarm(rows: Sequence[Row], severities: Sequence[str], shrink: int = 1) -> Alarm | None:
    """The first row at which a fixed threshold of these severities holds."""
    thresholds = StaticThresholds(shrink)
    for row in rows:
        found = []
        for name, severity in thresholds.update(row):
            if severity in severities:
                found.append(name)

        if found:
            return int(row["step"]), found[0]
    return None


JUDGES: dict[str, Callable[[Sequence[Row]], Alarm | None]] = {
    "watch": watch_alarm,
    "static, high": lambda rows: static_alarm(rows, ("high",)),
    "static, any": lambda rows: static_alarm(rows, ("medium", "high")),
    "static, any, windows of a third": lambda rows: static_alarm(rows, ("medium", "high"), 3),
}


def judge_all(
    runs: Sequence[dict[str, Any]],
    judge: Callable[[Sequence[Row]], Alarm | None],
    without: str = "",
) -> list[Verdict]:
    """Verdicts on every run; labels read all metrics, the detector those that are left."""
    return [verdict(run, label(run), judge(rows_of(run, without))) for run in runs]


def verdict(run: dict[str, Any], truth: Label, alarm: Alarm | None) -> Verdict:
    """An alarm next to the true outcome."""
    return Verdict(
        run=run["name"],
        kind=run["kind"],
        outcome=truth.outcome,
        why=truth.why,
        onset=truth.onset,
        alarm=alarm,
        lossy=bool(truth.curve),
        lost=truth.lost_at(alarm[0]) if alarm else None,
        reward_lost=truth.reward_lost_at(alarm[0]) if alarm else None,
        reward_fell=truth.reward_fell,
    )


def summarise(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The numbers of the page, each share with its 95% interval."""
    failed = [one for one in verdicts if one.outcome == "failed"]
    healthy = [one for one in verdicts if one.outcome == "healthy"]
    unclear = [one for one in verdicts if one.outcome == "unclear"]
    lossy = [one for one in failed if one.lossy]
    fell = [one for one in lossy if one.reward_fell]

    caught_by_kind = {}
    for kind in sorted({one.kind for one in failed}):
        of_kind = [one.caught for one in failed if one.kind == kind]
        caught_by_kind[kind] = share(of_kind)["words"]

    return {
        "caught": share([one.caught for one in failed]),
        "healthy runs stopped": share([one.alarm is not None for one in healthy]),
        "reward lost at the alarm, median": median_loss(lossy, "reward_lost"),
        "the same where half of it went": {
            "runs": len(fell),
            "median": median_loss(fell, "reward_lost"),
        },
        "right answers lost at the alarm, median": median_loss(lossy, "lost"),
        "unclear": len(unclear),
        "caught by kind": caught_by_kind,
        "missed": [one.run for one in failed if not one.caught],
        "stopped in vain": [one.run for one in healthy if one.alarm is not None],
    }


def median_loss(verdicts: Sequence[Verdict], name: str) -> float | None:
    """The median of what was lost; a missed collapse has lost everything."""
    if not verdicts:
        return None

    losses = []
    for one in verdicts:
        loss = getattr(one, name)
        losses.append(loss if one.caught and loss is not None else 1.0)
    return round(median(losses), 4)


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """A share with Wilson's 95% interval.

    Example:
        >>> share([True, True, False, True])["words"]
        '3 of 4'
    """
    n = len(hits)
    k = sum(hits)
    words = f"{k} of {n}"
    if not n:
        return {"words": words, "value": None, "low": None, "high": None}

    z = 1.96
    middle = (k + z * z / 2) / (n + z * z)
    wide = z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return {
        "words": words,
        "value": round(k / n, 4),
        "low": round(max(middle - wide, 0.0), 4),
        "high": round(min(middle + wide, 1.0), 4),
    }


def line(one: Verdict) -> str:
    """One run as a table row."""

    if one.alarm:
        alarm = f"stop at {one.alarm[0]} by {one.alarm[1]}"
    else:
        alarm = "no stop"

    if one.lost is None:
        lost = ""
    else:
        lost = f", {one.lost:.0%} lost ({one.reward_lost:.0%} of reward)"

    is_wrong = False
    if one.outcome == "failed":
        is_wrong = not one.caught
    elif one.outcome == "healthy":
        is_wrong = one.alarm is not None

    mark = "X " if is_wrong else "  "
    return f"{mark}{one.run:<20} {one.outcome:<8} ({one.why}, onset {one.onset}): {alarm}{lost}"


if __name__ == "__main__":
    main()
