"""A tournament shown: the ranking and the map of rates, for a terminal and as Markdown."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mesotron.compare.record import Cell, Standing, Tournament
from mesotron.runs.console import spell_time

MARKS = {"healthy": "", "drifting": " ~", "dead": " †", "diverged": " ×"}
STYLES = {"healthy": "", "drifting": "yellow", "dead": "red", "diverged": "red"}
LEGEND = "~ drifting, † dead by the watch, × diverged, ! crashed, * the rate that was chosen"
RANKING = ("contender", "rate", "score", "behind the best", "p (Holm)")
COSTS = ("contender", "half way", "seconds", "tokens", "trials", "dead")


def show(record: Tournament, console: Console) -> None:
    """Ranking, costs, map and conclusion on a terminal."""
    title = f"{record.recipe}: {record.measure}, 95 % intervals"
    console.print(table_of(title, RANKING, [ranking_row(row) for row in record.standings]))
    console.print(
        table_of(
            "one final run: time until half way, training time, tokens; trials of the search",
            COSTS,
            [cost_row(row) for row in record.standings],
        )
    )
    console.print(map_view(record))
    for sentence in record.words:
        console.print(sentence, highlight=False, markup=False)


def table_of(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table that fits into 80 columns where its words do."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=heading == "contender")
    for row in rows:
        table.add_row(*row)
    return table


def ranking_row(row: Standing) -> list[str]:
    """One contender's place."""
    return [
        row.contender,
        f"{row.rate:g}{'' if row.gain == 1 else f' x{row.gain:g}'}"
        + ("" if row.edge is None else f" ({row.edge} end)"),
        spell(row.score, row.low, row.high),
        spell(row.behind, row.behind_low, row.behind_high),
        "" if row.p_holm is None else f"{row.p_holm:.2g}",
    ]


def cost_row(row: Standing) -> list[str]:
    """What one contender has cost, and what became of its runs."""
    return [
        row.contender,
        "–" if row.threshold_seconds is None else spell_time(row.threshold_seconds),
        "" if row.seconds is None else f"{row.seconds:.0f}",
        "" if row.tokens is None else f"{row.tokens:,.0f}",
        str(row.trials) + (f" (+{row.extended})" if row.extended else ""),
        f"{row.dead} of {len(row.seeds)}" + (f", {row.failed} crashed" if row.failed else ""),
    ]


def spell(value: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, such as "0.410 [0.380, 0.440]"."""
    if value is None or low is None or high is None:
        return ""
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def rates_of(cells: Sequence[Cell]) -> list[float]:
    """Every rate that was searched, in order."""
    return sorted({cell.rate for cell in cells if cell.stage == "search"})


def cells_at(record: Tournament, contender: str, rate: float) -> list[Cell]:
    """The search cells of a contender at a rate."""
    return [
        cell
        for cell in record.cells
        if cell.stage == "search" and cell.contender == contender and cell.rate == rate
    ]


def entry(record: Tournament, contender: str, rate: float) -> tuple[str, str]:
    """A place on the map: what stands there, and its style."""
    cells = cells_at(record, contender, rate)
    if not cells:
        return "", ""
    states = {cell.state for cell in cells}
    if "failed" in states:
        return "!", "magenta"
    if states != {"done"}:
        return ("…", "cyan") if "running" in states else ("·", "dim")
    known = [cell.score for cell in cells if cell.score is not None]
    worst = max(cells, key=lambda cell: list(MARKS).index(cell.verdict or "healthy"))
    verdict = worst.verdict or "healthy"
    chosen = any(r.contender == contender and r.rate == rate for r in record.standings)
    star = "*" if chosen else ""
    return f"{sum(known) / len(known):.3f}{star}{MARKS[verdict]}", STYLES[verdict]


def map_view(record: Tournament) -> RenderableType:
    """Rates across, contenders down; what died is marked."""
    table = Table(
        title="search: score by rate (AdamW's unit)",
        caption=LEGEND,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("contender", no_wrap=True)
    rates = rates_of(record.cells)
    for rate in rates:
        table.add_column(f"{rate:g}", justify="right")
    for one in record.contenders:
        places = [entry(record, one.name, rate) for rate in rates]
        table.add_row(one.name, *(Text(words, style=style) for words, style in places))
    return table


def progress_view(record: Tournament, done: int, total: int, seconds: float | None) -> Group:
    """What a terminal shows while cells run."""
    running = [cell for cell in record.cells if cell.state == "running"]
    now = ", ".join(f"{cell.contender} {cell.rate:g} s{cell.seed} ({cell.stage})"
                    for cell in running)  # fmt: skip
    line = f"{done} of {total} runs, about {spell_time(seconds)} left; running: {now or 'none'}"
    return Group(map_view(record), Text(line))


def ended_line(cell: Cell, done: int, total: int, seconds: float | None) -> str:
    """A cell that has ended, on one line."""
    left = f"; about {spell_time(seconds)} left" if done < total else ""
    what = f"{cell.contender} at {cell.rate:g}, seed {cell.seed}, {cell.stage}"
    took = "" if cell.wall is None else f", {spell_time(cell.wall)}"
    if cell.state == "failed":
        return f"{done}/{total} {what}: failed, {cell.why}{left}"
    if cell.score is None:
        ratio = "is not logged" if cell.update_ratio is None else f"{cell.update_ratio:.3g}"
        return f"{done}/{total} {what}: RMS of updates over rate {ratio}{took}{left}"
    return f"{done}/{total} {what}: {cell.score:.3f}, {cell.verdict}{took}{left}"


def markdown(record: Tournament) -> str:
    """The whole as a page of Markdown."""
    rates = rates_of(record.cells)
    failed = [cell for cell in record.cells if cell.state == "failed"]
    lines = [
        f"# Tournament: {record.recipe}",
        "",
        *(f"- {sentence}" for sentence in record.words),
        "",
        f"## Ranking: {record.measure}",
        "",
        *grid_lines(
            [*RANKING, *COSTS[1:]],
            [[*ranking_row(row), *cost_row(row)[1:]] for row in record.standings],
        ),
        "",
        "## Rates: score of the search",
        "",
        *grid_lines(
            ["contender", *(f"{rate:g}" for rate in rates)],
            [[c.name, *(entry(record, c.name, r)[0] for r in rates)] for c in record.contenders],
        ),
        "",
        LEGEND,
        "",
        f"{len(record.cells)} runs, {record.workers} at once, {spell_time(record.wall)} in all.",
        "",
        "## How it was compared",
        "",
        *(f"- {sentence}" for sentence in record.rule),
        "",
        "## Who took part",
        "",
        *(f"- {one.name}: {one.about}." for one in record.contenders),
        *(["", "## What crashed", ""] if failed else []),
        *(f"- {cell.id}: {cell.why}" for cell in failed),
    ]
    return "\n".join(lines) + "\n"


def grid_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of Markdown."""
    shown = [[word.replace("|", "\\|") for word in row] for row in (headings, *rows)]
    body = ["| " + " | ".join(row) + " |" for row in shown]
    return [body[0], "|---" * len(headings) + "|", *body[1:]]
