"""Writes the tables of the pages that follow from the package: python docs/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; `TABLES` makes it. A test
compares them.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesotron.config.registry import ADDRESSES, ENVIRONMENTS, OBJECTIVES, REWARDS, TASKS
from mesotron.config.rules import AUXILIARY_RULES, SPECTRAL_RULES
from mesotron.watch import DETECTORS
from mesotron.watch.find import by_rank

PAGES = Path(__file__).parent
TABLE = re.compile(r"(<!-- table: (\w+) -->\n\n).*?(<!-- end of table -->)", re.DOTALL)


def tasks() -> str:
    rows = []
    for name in TASKS:
        task = TASKS[name]
        rows.append([f"`{name}`", task.about, task.gold])

    return table(["task", "from", "gold"], rows)


def environments() -> str:
    rows = []
    for name in ENVIRONMENTS:
        kind = ENVIRONMENTS[name]
        rows.append([f"`{name}`", kind.about, f"`mesotron[{kind.extra}]`"])

    return table(["environment", "what it is", "extra"], rows)


def rewards() -> str:
    rows = []
    for name in REWARDS:
        reward = REWARDS[name]
        rows.append([f"`{name}`", reward.about, reward.note])

    return table(["part", "pays", "note"], rows)


def objectives() -> str:
    """Objectives with the values that they were published with."""
    rows = []
    for name in OBJECTIVES:
        each = OBJECTIVES[name]
        scaled = "nothing" if each.scale_rewards == "none" else each.scale_rewards
        row = [f"`{name}`", each.about, widths(each), f"{each.beta:g}", scaled, each.paper]
        rows.append(row)

    return table(["name", "loss", "clip", "KL weight", "rewards scaled by", "source"], rows)


def widths(objective: Any) -> str:
    low = objective.epsilon
    high = objective.epsilon_high
    if high is None:
        return "none"
    if low is None:
        return f"largest ratio {high:g}"

    return f"{low:g}" if low == high else f"{low:g}, {high:g}"


def optimizers() -> str:
    auxiliary = AUXILIARY_RULES["adamw"].about
    rows = []
    for name in SPECTRAL_RULES:
        rows.append([f"`{name}(model)`", SPECTRAL_RULES[name].about, auxiliary])

    fair = "AdamW with the same groups and statistics: the fair baseline"
    rows.append(["`muon_sgd(model)`", "as `muon`", AUXILIARY_RULES["sgd"].about])
    rows.append(["`adamw(model)`", fair, auxiliary])

    return table(["builder", "hidden matrices", "the rest"], rows)


def addresses() -> str:
    rows = []
    for name in ADDRESSES:
        scheme = ADDRESSES[name]
        rows.append([f"`{name}://{scheme.form}`", scheme.about, f"`{scheme.extra}`"])

    return table(["address", "what it reads", "extra"], rows)


def formats() -> str:
    """The formats of logs, in the order in which a folder is searched for them."""
    rows = [[f"`{each.kind}`", each.about] for each in by_rank()]
    return table(["`--kind`", "what it reads"], rows)


def detectors() -> str:
    rows = []
    for each in DETECTORS:
        reads = ", ".join(f"`{metric}`" for metric in each.metrics)
        rows.append([f"`{each.name}`", each.diagnosis, reads, each.source])

    return table(["detector", "what has happened", "reads", "source"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "tasks": tasks,
    "environments": environments,
    "rewards": rewards,
    "objectives": objectives,
    "optimizers": optimizers,
    "addresses": addresses,
    "formats": formats,
    "detectors": detectors,
}


def fill(page: str) -> str:
    """A page with its tables made again."""

    def make(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}{TABLES[name]()}\n{end}"

    return TABLE.sub(make, page)


def main() -> None:
    for path in sorted(PAGES.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        filled = fill(page)
        if filled != page:
            path.write_text(filled, encoding="utf-8")
            print(f"wrote the tables of {path.relative_to(PAGES)}")


if __name__ == "__main__":
    main()
