"""Evaluates the watch on a packed corpus: collapses caught, healthy runs stopped, how early.

    python -m benchmarks.watch.evaluate                       the tuning corpus, while tuning
    python -m benchmarks.watch.evaluate held_out --write      the held-out one, once, at the end

Every run goes through the engine row by row, as it was logged, and through the fixed thresholds of
`static_thresholds`. A collapse is caught by a stop at or after its onset, less ten steps.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.watch.corpus import LISTS, TUNING_PROBLEMS
from benchmarks.watch.labels import Label, label
from benchmarks.watch.static_thresholds import StaticThresholds
from mesotron.watch import Engine

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
    parser.add_argument(
        "corpus",
        nargs="?",
        choices=("tuning", "held_out"),
        default="tuning",
    )

    parser.add_argument("--without", default="", help="leave out metrics that begin so (eval/)")
    parser.add_argument(
        "--judges",
        nargs="+",
        default=list(JUDGES),
        help="which ones to ask",
    )

    parser.add_argument(
        "--write", action="store_true", help="also write the verdicts beside the corpus"
    )
    given = parser.parse_args()
    runs = load(given.corpus)

    found = {
        name: judge_all(runs, judge, given.without)
        for name, judge in JUDGES.items()
        if name in given.judges
    }
    for verdict in found["watch"]:
        print(line(verdict))

    result = {name: summarise(verdicts) for name, verdicts in found.items()}
    made = completeness(given.corpus, runs)
    print(json.dumps(result | {"corpus": made}, indent=1))

    if given.write:
        verdicts = {name: [asdict(verdict) for verdict in found[name]] for name in found}
        ending = "verdicts_blind" if given.without else "verdicts"
        path = HERE / f"{given.corpus}_{ending}.json.gz"

        written = {
            "corpus": made,
            "summary": result,
            "verdicts": verdicts,
        }

        write_json(written, path)


def completeness(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Which runs of the list are not in the corpus, and which of those in it ended before their
    last step: a figure over the runs that happen to be there could be of the easy ones."""
    listed = {run.name: run for run in LISTS[name]()}
    here = {run["name"]: run for run in runs}
    short = {
        known: f"step {run['columns']['step'][-1]:.0f}, exit {run['exit_code']}"
        for known, run in here.items()
        if run["exit_code"] or run["columns"]["step"][-1] < listed[known].setting.steps
    }

    return {
        "runs": f"{len(here)} of {len(listed)}",
        "not made": sorted(listed.keys() - here.keys()),
        "ended early": short,
    }


def load(name: str) -> list[dict[str, Any]]:
    """The runs of a packed corpus."""
    return read_json(HERE / f"{name}.json.gz")


def rows_of(run: dict[str, Any], without: str = "") -> list[Row]:
    """The rows as they were logged, but for metrics that begin with `without`."""
    columns = {
        name: values
        for name, values in (run["columns"] | first_evaluation(run)).items()
        if not (without and name.startswith(without))
    }
    return [
        {name: values[k] for name, values in columns.items() if values[k] is not None}
        for k in range(len(columns["step"]))
    ]


def first_evaluation(run: dict[str, Any]) -> dict[str, list[float | None]]:
    """What runs of the tuning corpus did not log yet: their first evaluation, in the row of step 1,
    and of how many problems each was."""
    if "eval/problems" in run["columns"]:
        return {}

    greedy = [run["before"], *run["columns"]["eval/greedy"][1:]]
    problems = [None if value is None else float(TUNING_PROBLEMS) for value in greedy]
    return {"eval/greedy": greedy, "eval/problems": problems}


def watch_alarm(rows: Sequence[Row]) -> Alarm | None:
    """The first stop of the watch."""
    engine = Engine()
    for row in rows:
        for event in engine.update(row):
            if event.severity == "stop":
                return event.step, event.detector

    return None


def static_alarm(rows: Sequence[Row], severities: Sequence[str], shrink: int = 1) -> Alarm | None:
    """The first row at which a fixed threshold of these severities holds."""
    thresholds = StaticThresholds(shrink)
    for row in rows:
        found = [name for name, severity in thresholds.update(row) if severity in severities]
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
    well = [one for one in verdicts if one.outcome == "healthy"]
    lossy = [one for one in failed if one.lossy]
    fell = [one for one in lossy if one.reward_fell]
    kinds = sorted({one.kind for one in failed})

    return {
        "caught": share([one.caught for one in failed]),
        "healthy runs stopped": share([one.alarm is not None for one in well]),
        "reward lost at the alarm, median": middle(lossy, [one.reward_lost for one in lossy]),
        "the same where half of it went": {
            "runs": len(fell),
            "median": middle(fell, [one.reward_lost for one in fell]),
        },
        "right answers lost at the alarm, median": middle(lossy, [one.lost for one in lossy]),
        "unclear": sum(one.outcome == "unclear" for one in verdicts),
        "caught by kind": {
            kind: share([one.caught for one in failed if one.kind == kind])["words"]
            for kind in kinds
        },
        "missed": [one.run for one in failed if not one.caught],
        "stopped in vain": [one.run for one in well if one.alarm is not None],
    }


def middle(verdicts: Sequence[Verdict], lost: Sequence[float | None]) -> float | None:
    """The median; a missed collapse has lost everything."""
    shares = [x if one.caught and x is not None else 1.0 for one, x in zip(verdicts, lost)]
    return round(median(shares), 4) if shares else None


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
        return {
            "words": words,
            "value": None,
            "low": None,
            "high": None,
        }

    z = 1.96
    middle = (k + z * z / 2) / (n + z * z)
    wide = z * math.sqrt(k * (n - k) / n + z * z / 4)
    low = middle - wide / (n + z * z)
    high = middle + wide / (n + z * z)

    numbers = {
        "value": k / n,
        "low": max(low, 0.0),
        "high": min(high, 1.0),
    }
    return {"words": words} | {name: round(number, 4) for name, number in numbers.items()}


def line(one: Verdict) -> str:
    """One run as a table row."""
    alarm = f"stop at {one.alarm[0]} by {one.alarm[1]}" if one.alarm else "no stop"
    lost = "" if one.lost is None else f", {one.lost:.0%} lost ({one.reward_lost:.0%} of reward)"
    good = one.caught if one.outcome == "failed" else one.alarm is None
    mark = "  " if good or one.outcome in ("unclear", "stalled") else "X "

    return f"{mark}{one.run:<20} {one.outcome:<8} ({one.why}, onset {one.onset}): {alarm}{lost}"


if __name__ == "__main__":
    main()
