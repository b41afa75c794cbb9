"""The picture of a search by `--lr auto`: rate against gain, the admitted rates shaded."""

import math

from mesotron.report.data import Chart, Line
from mesotron.report.page import Block, table
from mesotron.report.read import Column, Run
from mesotron.rlvr import pocket
from mesotron.rlvr.pocket import Fork, Search
from mesotron.runs.files import read_json

ERRORS = 2.0  # standard errors of a band


def searches_of(run: Run) -> tuple[Search, ...]:
    """The finished searches in a run's folder."""
    file = run.path / f"{pocket.NAME}.json"
    if run.kind != "train" or not file.is_file():
        return ()

    found = pocket.from_record(read_json(file))
    return tuple(search for search in found if search.choice is not None)


def make_charts(searches: tuple[Search, ...]) -> list[Chart]:
    return [make_chart(search) for search in searches]


def make_chart(search: Search) -> Chart:
    assert search.choice is not None
    forks = sorted(search.forks, key=lambda fork: fork.rate)
    healthy = [fork for fork in forks if fork.is_healthy]
    sick = [fork for fork in forks if not fork.is_healthy]
    slowest = forks[0]

    lines = []
    if healthy:
        lines.append(gain_line(healthy, slowest))
    if sick:
        rates = [fork.rate for fork in sick]
        gains: Column = [pocket.compare(fork, slowest).mean for fork in sick]
        lines.append(Line(0, "drifting or dead", 1, gains, x=rates, dots="crosses"))

    admitted = [fork.rate for fork in forks if fork.factor in search.choice.admitted]
    if admitted and lines:
        lines.append(shade(admitted, lines))

    note = f"Rate {search.choice.rate:.3g}: {search.choice.why}."
    return Chart(
        f"Gain by rate, forks from step {search.step}",
        lines,
        note,
        log_x=True,
        x_name="rate",
    )


def gain_line(forks: list[Fork], slowest: Fork) -> Line:
    """Reward above the smallest rate's, on the same prompts."""
    gains = [pocket.compare(fork, slowest) for fork in forks]
    means: Column = [gain.mean for gain in gains]
    errors = []
    for gain in gains:
        errors.append(ERRORS * gain.error if math.isfinite(gain.error) else 0.0)

    low: Column = [gain.mean - error for gain, error in zip(gains, errors, strict=True)]
    high: Column = [gain.mean + error for gain, error in zip(gains, errors, strict=True)]
    rates = [fork.rate for fork in forks]

    return Line(0, "gain in the heat", 0, means, low=low, high=high, x=rates, dots="dots")


def shade(admitted: list[float], lines: list[Line]) -> Line:
    """The pocket: a band over the admitted rates, as high as the picture."""
    heights = []
    for line in lines:
        for column in (line.mean, line.low or (), line.high or ()):
            heights += [y for y in column if y is not None]

    edges = [min(admitted) / math.sqrt(2), max(admitted) * math.sqrt(2)]
    low: Column = [min(heights)] * 2
    high: Column = [max(heights)] * 2
    return Line(0, "pocket: admitted rates", 2, [None, None], low=low, high=high, x=edges)


def forks_table(searches: tuple[Search, ...]) -> Block:
    rows = []
    for search in searches:
        assert search.choice is not None
        for fork in sorted(search.forks, key=lambda each: each.rate):
            is_chosen = fork.factor == search.choice.factor
            cells = [
                str(search.step),
                f"{fork.rate:.3g}",
                str(len(fork.steps)),
                f"{fork.travelled:.2g}",
                f"{fork.planned:.2g}",
                fork.condition,
                "chosen" if is_chosen else "",
            ]
            rows.append(cells)

    head = ["from step", "rate", "steps", "went", "will go", "watch", ""]
    return table(head, rows, f"Forks; {pocket.spent(searches)} steps were not kept")
