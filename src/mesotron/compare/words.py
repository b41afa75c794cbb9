"""The conclusion of a tournament in sentences: what was told apart, what was not, what broke."""

from collections import Counter
from collections.abc import Sequence

from mesotron.compare.inference import LEVEL
from mesotron.compare.record import Cell, Standing, Tournament, anybody_scored
from mesotron.runs.console import spell_time


def conclude(record: Tournament) -> list[str]:
    """What the standings say; empty without any score."""
    rows = [row for row in record.standings if row.score is not None]
    if not rows:
        return ["No contender has a score: see why in the cells.", *not_measured(record.cells)]
    return [
        *(order(record, rows) if anybody_scored(rows) else [nobody(record)]),
        *(sentence for row in record.standings for sentence in trouble(row)),
        *not_measured(record.cells),
        *dead_rates(record.cells),
        f"This holds for {record.recipe} at this length and size; it says nothing of others.",
    ]


def order(record: Tournament, rows: Sequence[Standing]) -> list[str]:
    """Who is where, and who might be elsewhere at another rate."""
    return [
        *leading(record, rows),
        *tied(rows),
        *(sentence for row in rows for sentence in behind(row)),
        *quickest(rows),
        *(f"{row.contender}: {edge_words(record.cells, row)}" for row in rows if row.edge),
    ]


def nobody(record: Tournament) -> str:
    """Where every score is 0, nothing is told of anybody: neither a place nor a best rate."""
    start = record.start.get("final")
    since = "" if start is None else f", against {start:.3f} {record.before}"
    return (
        f"Nobody scored: no contender has more than 0{since} ({record.measure}), so there is no "
        "order: take longer runs, or an easier task."
    )


def leading(record: Tournament, rows: Sequence[Standing]) -> list[str]:
    """The first, and what it started from."""
    best = rows[0]
    start = record.start.get("final")
    since = "" if start is None else f", against {start:.3f} {record.before}"
    return [
        f"{best.contender} is first: {best.score:.3f} [{best.low:.3f}, {best.high:.3f}] at rate "
        f"{best.rate:g}{since} ({record.measure}, {count(len(best.seeds), 'seed')}).",
        *(["One seed tells nothing of other seeds: take three or more."] if len(best.seeds) < 2
          else []),
    ]  # fmt: skip


def tied(rows: Sequence[Standing]) -> list[str]:
    """Those that the test cannot tell from the first."""
    same = [row for row in rows[1:] if row.p_holm is not None and row.p_holm >= LEVEL]
    if not same:
        return []
    shown = [f"{row.contender} (behind by {row.behind:.3f}, p = {row.p_holm:.2g})" for row in same]
    verb = "is" if len(same) == 1 else "are"
    return [f"{listing(shown)} {verb} not told apart from {rows[0].contender}."]


def behind(row: Standing) -> list[str]:
    """A contender that is worse than the first beyond doubt."""
    if row.behind is None or row.p_holm is None or row.p_holm >= LEVEL:
        return []
    return [
        f"{row.contender} is behind by {row.behind:.3f} [{row.behind_low:.3f}, "
        f"{row.behind_high:.3f}] (p = {row.p_holm:.2g})."
    ]


def quickest(rows: Sequence[Standing]) -> list[str]:
    """Who was half way first by the clock."""
    timed = [(row.threshold_seconds, row) for row in rows if row.threshold_seconds is not None]
    if not timed:
        return []
    seconds, row = min(timed, key=lambda pair: pair[0])
    slow, last = max(timed, key=lambda pair: pair[0])
    if seconds == slow:
        return []
    return [
        f"{row.contender} was half way after {spell_time(seconds)} of training, the first of all; "
        f"{last.contender} after {spell_time(slow)}."
    ]


def trouble(row: Standing) -> list[str]:
    """Final cells that died or crashed."""
    found = []
    if row.dead:
        found.append(
            f"{row.contender}: the watch calls {count(row.dead, 'final run')} of "
            f"{len(row.seeds)} dead."
        )
    if row.failed:
        found.append(f"{row.contender}: {count(row.failed, 'final run')} crashed, without a score.")
    return found


def not_measured(cells: Sequence[Cell]) -> list[str]:
    """Contenders that do not take part, since nobody knows how large their steps are."""
    return [
        f"{cell.contender} does not take part: the run that was to measure its updates failed "
        f"({cell.why})."
        for cell in cells
        if cell.stage == "probe" and cell.state == "failed"
    ]


def dead_rates(cells: Sequence[Cell]) -> list[str]:
    """At which rates the searches have found the end, by contender."""
    sentences = []
    for name in dict.fromkeys(cell.contender for cell in cells):
        own = [cell for cell in cells if cell.contender == name and cell.stage == "search"]
        dead = [cell for cell in own if cell.verdict in ("dead", "diverged")]
        if dead:
            rates = sorted({cell.rate for cell in dead})
            causes = Counter(cell.cause or cell.verdict or "" for cell in dead)
            why = causes.most_common(1)[0][0].replace("_", " ")
            shown = listing([f"{rate:g}" for rate in rates])
            sentences.append(f"{name} died in its search at rate {shown} ({why}).")
    return sentences


def edge_words(cells: Sequence[Cell], row: Standing) -> str:
    """What it means that the best rate lies at an end."""
    own = (cell for cell in cells if cell.contender == row.contender and cell.stage == "search")
    tried = len({cell.rate for cell in own})
    end, other = ("largest", "larger") if row.edge == "high" else ("smallest", "smaller")
    if tried == 1:
        return f"no rate but {row.rate:g} was tried; others may be better."
    return (
        f"its best rate, {row.rate:g}, is the {end} of the {tried} tried, so a {other} one "
        "may be better still."
    )


def count(number: int, noun: str) -> str:
    """A number and its noun.

    Example:
        >>> count(1, "seed"), count(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listing(parts: Sequence[str]) -> str:
    """Words in a row.

    Example:
        >>> listing(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
