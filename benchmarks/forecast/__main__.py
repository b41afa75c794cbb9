"""Fit the forecasts on one half of the runs and judge them on the other.

python -m benchmarks.forecast ../shared/data/public_runs --write     minutes; writes the page's
                              result.json.gz and the package's watch/forecast.json
"""

import argparse
import json
from pathlib import Path

from benchmarks._lib.results import write_json
from benchmarks.forecast.cases import cases_of
from benchmarks.forecast.fit import SHARES, fit
from benchmarks.forecast.judge import ASKED, Judged, judge, record_of, summarize
from benchmarks.forecast.runs import load_runs
from mesotron.watch import forecast

HERE = Path(__file__).parent
PACKAGE = Path(forecast.__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit and judge the forecasts")
    parser.add_argument("public", type=Path, help="the folder of the public logs")
    parser.add_argument("--write", action="store_true", help="write the result and the package's")
    given = parser.parse_args()

    runs = load_runs(given.public)
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
        write_json(result, HERE / "result.json.gz")
        write_json(model | {"record": record_of(summary)}, PACKAGE, indent=1)


if __name__ == "__main__":
    main()
