"""Fit the forecasts on one half of the runs and judge them on the other.

python -m benchmarks.forecast FOLDER --write     minutes; writes the page's
                              result.json.gz and the package's watch/forecast.json
python -m benchmarks.forecast FOLDER --crossed   leaves each source out in turn
python -m benchmarks.forecast FOLDER --scores    held-out scores alone
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._lib.results import read_json, write_json
from benchmarks.forecast.cases import cases_of
from benchmarks.forecast.fit import SHARES, fit, folds
from benchmarks.forecast.judge import ASKED, Judged, figures, judge, record_of, summarize
from benchmarks.forecast.runs import KnownRun, load_runs, scores_alone
from mesotron.watch import forecast

HERE = Path(__file__).parent
RESULT = HERE / "result.json.gz"
CROSSED = HERE / "crossed.json"
PACKAGE = Path(forecast.__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit and judge the forecasts")
    parser.add_argument("public", type=Path, help="the folder of the public logs")
    parser.add_argument("--crossed", action="store_true", help="leave out each source in turn")
    parser.add_argument("--scores", action="store_true", help="judge by held-out scores alone")
    parser.add_argument("--write", action="store_true", help="write the result and the package's")
    given = parser.parse_args()

    runs = load_runs(given.public)
    if given.scores:
        print_scores(runs)
        return

    if given.crossed:
        summary = crossed(runs)
        print(json.dumps(summary, indent=1))
        write_json(summary, CROSSED, indent=1)
        write_package()
        return

    fitting = [case for run in runs if run.half == "fit" for case in cases_of(run, SHARES)]
    model = fit(fitting)

    judged: list[Judged] = []
    for run in runs:
        if run.half == "report":
            judged += [judge(case, model) for case in cases_of(run, ASKED)]

    summary = summarize(judged)
    print(json.dumps(model | summary, indent=1))

    if given.write:
        cases = [case.to_record() for case in judged]
        result = {"model": model, "summary": summary, "cases": cases}
        write_json(result, RESULT)
        write_package()


def print_scores(runs: Sequence[KnownRun]) -> None:
    """How the package does on the reporting half's held-out scores, as in a log of nothing else."""
    reporting = [run for run in scores_alone(runs) if run.half == "report"]
    model = forecast.fitted()
    judged = [judge(case, model) for run in reporting for case in cases_of(run, ASKED)]
    for share in ASKED:
        some = [one for one in judged if one.share == share]
        print(share, json.dumps(figures(some), indent=1))


def write_package() -> None:
    """The numbers of the package: those of both results."""
    result = read_json(RESULT)
    record = record_of(result["summary"], read_json(CROSSED))
    write_json(result["model"] | {"record": record}, PACKAGE, indent=1)


def crossed(runs: Sequence[KnownRun]) -> dict[str, Any]:
    """All runs of both halves, each judged by numbers that were fitted without its source; but
    the factors by which intervals are widened are the package's."""
    judged: list[Judged] = []
    fitting = [case for run in runs for case in cases_of(run, SHARES)]
    for inside, outside in folds(fitting):
        model = fit(inside, widths=forecast.fitted())
        for case in outside:
            if case.share in ASKED:
                judged.append(judge(case, model))

    return summarize(judged)


if __name__ == "__main__":
    main()
