"""Tables of a tournament (tournament.json) for the terminal, Markdown and the HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from mesotron.runs.console import spell_time
from mesotron.runs.files import Row
from mesotron.runs.markdown import fill_template, make_table

ENDED_BADLY = ("dead", "diverged")
SIGNS = {
    "healthy": "",
    "drifting": " ~",
    "dead": " †",
    "diverged": " ×",
}
LEGEND = "~ drifting, † dead, × diverged, ! crashed, * chosen rate"
UNKNOWN = "–"
_STYLES = {
    "drifting": "yellow",
    "dead": "red",
    "diverged": "red",
    "failed": "magenta",
    "running": "cyan",
    "waiting": "dim",
}


class Entry(NamedTuple):
    text: str
    state: str = ""  # to style it by
    tip: str = ""  # a longer text


@dataclass(frozen=True)
class Table:
    """A table as plain data; the first column names the rows."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[Entry]]
    note: str = ""

    def select(self, title: str, *columns: str) -> Self:
        places = [self.columns.index(name) for name in columns]
        rows = [[row[place] for place in places] for row in self.rows]

        return replace(self, title=title, columns=columns, rows=rows)

    def to_markdown(self) -> list[str]:
        rows = [[entry.text.replace("|", "\\|") for entry in row] for row in self.rows]
        return make_table(self.columns, rows)

    def to_rich(self) -> RichTable:
        table = RichTable(
            title=self.title,
            caption=self.note or None,
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for k, name in enumerate(self.columns):
            table.add_column(name, no_wrap=k == 0)

        for row in self.rows:
            table.add_row(*(Text(one.text, style=_STYLES.get(one.state, "")) for one in row))

        return table


def standings(record: Row) -> Table:
    columns = (
        "contender",
        "rate",
        "score",
        "behind the best",
        "p (Holm)",
        "seeds",
        "halfway",
        "time",
        "tokens",
        "trials",
        "dead",
    )

    rows = [_standing(one) for one in record["standings"]]
    start = record["start"].get("final")
    since = "" if start is None else f"; {record['before']}: {start:.3f}"
    title = f"{record['recipe']}: {record['measure']}, 95% intervals{since}"

    return Table(title, columns, _entries(rows))


def _standing(one: Row) -> list[str]:
    """The cells of a contender, in the order of the columns of `standings`."""
    gain = "" if one["gain"] in (None, 1) else f" x{one['gain']:g}"
    edge = "" if one["edge"] is None else f" ({one['edge']}est tried)"
    best = "best" if one["rank"] == 1 and one["score"] else UNKNOWN
    extended = f" (+{one['extended']})" if one["extended"] else ""
    crashed = f", {one['failed']} crashed" if one["failed"] else ""

    return [
        one["contender"],
        f"{one['rate']:g}{gain}{edge}",
        with_interval(one["score"], one["low"], one["high"]) or UNKNOWN,
        with_interval(one["behind"], one["behind_low"], one["behind_high"]) or best,
        _known(one["p_holm"], "{:.2g}"),
        str(len(one["seeds"])),
        _known_time(one["threshold_seconds"] or None),
        _known_time(one["seconds"]),
        _known(one["tokens"], "{:,.0f}"),
        f"{one['trials']}{extended}",
        f"{one['dead']} of {len(one['seeds'])}{crashed}",
    ]


def rate_map(record: Row) -> Table:
    searched = [cell for cell in record["cells"] if cell["stage"] == "search"]
    rates = sorted({cell["rate"] for cell in searched})
    chosen = {(one["contender"], one["rate"]) for one in record["standings"]}

    by_place: dict[tuple[str, float], list[Row]] = {}
    for cell in searched:
        by_place.setdefault((cell["contender"], cell["rate"]), []).append(cell)

    rows = []
    for contender in record["contenders"]:
        name = contender["name"]
        entries = [Entry(name)]
        for rate in rates:
            place = (name, rate)
            entries.append(_map_entry(by_place.get(place, []), place in chosen))

        rows.append(entries)

    columns = ("contender", *(f"{rate:g}" for rate in rates))
    return Table("search: score by rate (AdamW's unit)", columns, rows, LEGEND)


def _map_entry(cells: Sequence[Row], chosen: bool) -> Entry:
    if not cells:
        return Entry("")

    unscored = _unscored_entry(cells)
    if unscored is not None:
        return unscored

    worst = max(cells, key=lambda cell: list(SIGNS).index(cell["verdict"] or "healthy"))
    verdict = worst["verdict"] or "healthy"
    scores = [cell["score"] for cell in cells if cell["score"] is not None]
    mean = f"{sum(scores) / len(scores):.3f}" if scores else UNKNOWN
    star = "*" if chosen else ""

    state = verdict
    if verdict == "healthy":
        state = "best" if chosen else ""

    return Entry(f"{mean}{star}{SIGNS[verdict]}", state, worst["story"])


def _unscored_entry(cells: Sequence[Row]) -> Entry | None:
    """A sign in place of the score, if a cell failed or has not ended."""
    states = {cell["state"] for cell in cells}
    if "failed" in states:
        return Entry("!", "failed", next(c["why"] for c in cells if c["state"] == "failed"))
    if "running" in states:
        return Entry("…", "running")
    if "waiting" in states:
        return Entry("·", "waiting")

    return None


def speed(record: Row) -> Table | None:
    """Median time, steps and tokens to the threshold over the final cells that reached it."""
    threshold = record["threshold"]
    finals = final_cells(record)
    if not threshold or threshold["value"] is None or not finals:
        return None

    rows = []
    for contender in record["contenders"]:
        cells = [cell for cell in finals if cell["contender"] == contender["name"]]
        reached = [cell for cell in cells if cell["threshold_steps"] is not None]
        row = [contender["name"], f"{len(reached)} of {len(cells)}"]

        if reached:
            seconds = median(cell["threshold_seconds"] for cell in reached)
            steps = median(cell["threshold_steps"] for cell in reached)
            tokens = median(cell["threshold_tokens"] for cell in reached)
            row += [spell_time(seconds), f"{steps:g}", f"{tokens:,.0f}"]
        else:
            row += ["never", UNKNOWN, UNKNOWN]

        rows.append(row)

    title = f"training until {threshold['metric']} reaches {threshold['value']:.3g}, median"
    return Table(title, ("contender", "reached", "time", "steps", "tokens"), _entries(rows))


def failures(record: Row) -> Table:
    rows = []
    for cell in record["cells"]:
        has_failed = cell["state"] == "failed"
        if not has_failed and cell["verdict"] not in ENDED_BADLY:
            continue

        outcome = "failed" if has_failed else cell["verdict"]
        reason = cell["why"] or cell["story"] or cell["cause"] or ""
        rate = f"{cell['rate']:g}"
        rows.append([cell["id"], cell["contender"], rate, str(cell["seed"]), outcome, reason])

    columns = ("cell", "contender", "rate", "seed", "outcome", "reason")
    return Table("cells that crashed, diverged or died", columns, _entries(rows))


def final_cells(record: Row) -> list[Row]:
    """Final cells, without those at a rate that an extended search gave up."""
    chosen = {one["contender"]: one["rate"] for one in record["standings"]}
    finals = []
    for cell in record["cells"]:
        if cell["stage"] == "final":
            finals.append(cell)

    return [one for one in finals if chosen.get(one["contender"], one["rate"]) == one["rate"]]


def to_markdown(record: Row) -> str:
    ranking = standings(record)
    rates = rate_map(record)
    bad = failures(record)

    return fill_template(
        Path(__file__).with_name("assets") / "standings.md.j2",
        record=record,
        ranking="\n".join(ranking.to_markdown()),
        rates="\n".join(rates.to_markdown()),
        legend=LEGEND,
        wall=spell_time(record["wall"]),
        failures="\n".join(bad.to_markdown()) if bad.rows else "",
    )


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    if None in (value, low, high):
        return ""

    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _known(value: float | None, spec: str) -> str:
    return UNKNOWN if value is None else spec.format(value)


def _known_time(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN

    return spell_time(seconds)


def _entries(rows: Sequence[Sequence[str]]) -> list[list[Entry]]:
    return [[Entry(text) for text in row] for row in rows]
