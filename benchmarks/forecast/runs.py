"""The runs that forecasts are fitted on and judged by: public logs and our own, split by source.

python -m benchmarks.forecast.runs FOLDER      counts of both halves
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks._lib.results import read_json
from benchmarks.watch import evaluate, public_runs
from mesotron.watch.metrics import Row, canonical, own_name

BENCHMARKS = Path(__file__).parent.parent
LEAST_REWARDS = 20
Half = Literal["fit", "report"]
ROLES: dict[str, Half] = {"watch/tuning": "fit", "watch/held_out": "report"}


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run whose end is known.

    Args:
        source: a repository, or a result file of ours: what the halves are split by.
        name: unique in its source.
        rows: each with a step.
        is_public: whether it is somebody else's.
    """

    source: str
    name: str
    rows: tuple[Row, ...]
    is_public: bool = False

    @property
    def half(self) -> Half:
        return half_of(self.source)


def half_of(source: str) -> Half:
    """The half of a source: the watch's corpora keep their roles, a hash of its name decides on
    any other."""
    if source in ROLES:
        return ROLES[source]

    return "fit" if public_runs.half_of(source) == "tuning" else "report"


def load_runs(public: Path | None) -> list[KnownRun]:
    """All runs with enough rewards; `public` is the folder of other people's logs."""
    runs = [*corpora(), *smollm2(), *self_labelled(), *default_runs()]
    if public is not None:
        runs += public_logs(public)

    return [run for run in runs if num_rewards(run.rows) >= LEAST_REWARDS]


def scores_alone(runs: Iterable[KnownRun]) -> Iterator[KnownRun]:
    """The runs with enough held-out scores, as if these were their rewards."""
    for run in runs:
        rows = []
        for row in run.rows:
            score = canonical(row).get("heldout")
            if score is not None:
                rows.append({"step": row["step"], "reward": score})

        if len(rows) >= LEAST_REWARDS:
            yield replace(run, rows=tuple(rows))


def num_rewards(rows: Sequence[Row]) -> int:
    return sum("reward" in canonical(row) for row in rows)


def public_logs(folder: Path) -> Iterator[KnownRun]:
    """Other people's logs; a reward whose name the watch does not know is named, as by --rename."""
    for run in read_json(folder / "labels.json")["runs"]:
        rows = public_runs.read_rows(folder / run["file"])
        key = run["reward_key"]
        if not num_rewards(rows):
            for row in rows:
                if key in row:
                    row[own_name("reward")] = row[key]

        yield KnownRun(
            source=run["repository"],
            name=run["file"].removesuffix(".jsonl.gz"),
            rows=tuple(rows),
            is_public=True,
        )


def corpora() -> Iterator[KnownRun]:
    for corpus in ("tuning", "held_out"):
        for run in evaluate.load(corpus):
            rows = tuple(evaluate.rows_of(run))
            yield KnownRun(source=f"watch/{corpus}", name=run["name"], rows=rows)


def smollm2() -> Iterator[KnownRun]:
    for result in ("results", "earlier"):
        cells = read_json(BENCHMARKS / f"smollm2/{result}.json.gz")["cells"]
        for number, cell in enumerate(cells):
            if "rollback" in cell.get("stage", "") or not cell.get("rows"):
                continue

            rows = rows_of(cell["rows"], cell.get("curve", ()))
            name = f"{number} {cell['part']} {cell['stage']}"
            yield KnownRun(source=f"smollm2/{result}", name=name, rows=rows)


def self_labelled() -> Iterator[KnownRun]:
    for result in ("result", "open", "skip", "open_skip", "smollm2"):
        cells = read_json(BENCHMARKS / f"self_labelled/{result}.json.gz")
        for number, cell in enumerate(cells):
            curves = {name: tens(means) for name, means in cell["logged"].items()}
            rows = rows_of(curves, cell["greedy"])
            name = f"{number} {cell['contender']}"
            yield KnownRun(source=f"self_labelled/{result}", name=name, rows=rows)


def default_runs() -> Iterator[KnownRun]:
    for result in ("result", "arith_collapse_warn"):
        for run in read_json(BENCHMARKS / f"default_run/{result}.json.gz"):
            rows = rows_of(run["curves"], ())
            yield KnownRun(source=f"default_run/{result}", name=str(run["seed"]), rows=rows)


def tens(means: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """A curve of means of ten steps, each at the last of its steps."""
    return [(10.0 * (k + 1), value) for k, value in enumerate(means)]


def rows_of(curves: dict[str, Any], greedy: Sequence[Sequence[float]]) -> tuple[Row, ...]:
    """Rows of curves, each a list of steps and values; `greedy` is the held-out one."""
    rows: dict[float, Row] = {}
    for name, curve in (curves | {"eval/greedy": greedy}).items():
        for step, value in curve:
            if value is not None:
                rows.setdefault(float(step), {"step": float(step)})[name] = float(value)

    return tuple(rows[step] for step in sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the runs of both halves")
    parser.add_argument("public", type=Path, help="the folder of the public logs")
    given = parser.parse_args()

    counts = Counter((run.half, run.source) for run in load_runs(given.public))
    for (half, source), count in sorted(counts.items()):
        print(f"{half:<7} {count:>4} {source}")


if __name__ == "__main__":
    main()
