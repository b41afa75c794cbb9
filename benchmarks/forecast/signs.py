"""Do signs of drift make a collapse more predictable than the reward alone does?

    python -m benchmarks.forecast.signs FOLDER

On the fitting half: every sixth of the sources is left out in turn, and the log loss of "collapse"
on what was left out is compared between the terms of the package and those with more. Prints a
table; the sources and cases are those of `fit`.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.forecast.cases import Case, cases_of
from benchmarks.forecast.fit import SHARES, fit_odds, folds, weights_of
from benchmarks.forecast.runs import load_runs
from mesotron.watch import Engine
from mesotron.watch.forecast import Present, Terms, chance, collapse_terms, weigh
from mesotron.watch.metrics import canonical

SIGNS: dict[str, tuple[str, ...]] = {
    "the reward alone": (),
    "and entropy": ("entropy_fell", "entropy_rose"),
    "and gradient norm": ("gradient_rose",),
    "and KL": ("kl",),
    "and clipped share": ("clipped",),
    "and all four": ("entropy_fell", "entropy_rose", "gradient_rose", "kl", "clipped"),
    "and the watch's warnings and stops": ("warning", "stop"),
}


@dataclass(frozen=True)
class Signs:
    """A case with the signs of drift that a forecast could have read."""

    case: Case
    signs: Terms

    @property
    def present(self) -> "Signs":
        return self

    @property
    def outcome(self) -> str:
        return self.case.outcome

    @property
    def run(self) -> object:
        return self.case.run


def signs_of(case: Case) -> Terms:
    """Logarithms of last third over first third, levels, and what the watch says; 0 without."""
    rows = case.seen()
    entropy = log_ratio(rows, "entropy")
    gradient = log_ratio(rows, "grad_norm")
    kl = thirds(rows, "kl")
    clipped = thirds(rows, "clipped")

    engine = Engine()
    for row in rows:
        engine.update(row)
    harmless = {detector.name for detector in engine.detectors if detector.harmless}
    alarms = {severity for name, severity in engine.active().items() if name not in harmless}

    return {
        "entropy_fell": max(-entropy, 0.0),
        "entropy_rose": max(entropy, 0.0),
        "gradient_rose": max(gradient, 0.0),
        "kl": math.tanh(kl[1]) if kl else 0.0,
        "clipped": min(clipped[1] / 0.05, 2.0) if clipped else 0.0,
        "warning": float("warn" in alarms),
        "stop": float("stop" in alarms),
    }


def log_ratio(rows: Sequence[dict[str, float]], name: str) -> float:
    ends = thirds(rows, name)
    if ends is None or min(ends) <= 0:
        return 0.0

    return min(max(math.log(ends[1] / ends[0]), -2.0), 2.0)


def thirds(rows: Sequence[dict[str, float]], name: str) -> tuple[float, float] | None:
    """Medians of a metric's first and last third; None with fewer than four values."""
    values = []
    for row in rows:
        value = canonical(row).get(name, math.nan)
        if math.isfinite(value):
            values.append(value)
    if len(values) < 4:
        return None

    third = max(len(values) // 3, 2)
    first = sorted(values[:third])[third // 2]
    last = sorted(values[-third:])[third // 2]
    return first, last


def terms_of(names: Sequence[str], one: Signs) -> Terms:
    present: Present = one.case.present
    return collapse_terms(present) | {name: one.signs[name] for name in names}


def left_out_loss(cases: Sequence[Signs], names: Sequence[str]) -> float:
    """Weighted log loss of the chance of a collapse on sources that were left out."""
    terms = partial(terms_of, names)
    weights = dict(zip(map(id, cases), weights_of(cases), strict=True))  # type: ignore[arg-type]
    total = 0.0
    for inside, outside in folds(cases):  # type: ignore[arg-type]
        model = fit_odds(inside, terms, "collapse")
        for one in outside:
            collapse = min(max(chance(weigh(model, terms(one))), 1e-6), 1 - 1e-6)
            right = collapse if one.outcome == "collapse" else 1 - collapse
            total -= weights[id(one)] * math.log(right)

    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare signs of a collapse")
    parser.add_argument("public", type=Path, help="the folder of the public logs")
    given = parser.parse_args()

    cases = []
    for run in load_runs(given.public):
        if run.half == "fit":
            cases += [Signs(case, signs_of(case)) for case in cases_of(run, SHARES)]

    for title, names in SIGNS.items():
        print(f"{left_out_loss(cases, names):.4f} {title}", flush=True)


if __name__ == "__main__":
    main()
