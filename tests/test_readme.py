"""Every number among README's results, and in the caption of its picture, is in a data file."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)")


def read(name: str) -> Any:
    from benchmarks._lib.results import read_json

    return read_json(ROOT / "benchmarks" / name)


def spell(*values: float, decimals: int = 3) -> set[str]:
    return {f"{value:.{decimals}f}" for value in values}


def default_run() -> set[str]:
    rows = read("default_run/result.json.gz")
    shown = {str(rows[0]["problems"])}
    for scores in (rows, [row["lenient"] for row in rows]):
        ends = [row["after"]["value"] for row in scores]
        shown |= spell(min(ends), max(ends), *(row["before"]["value"] for row in scores))

    seconds = [row["seconds"]["processor"] for row in rows]
    return shown | spell(min(seconds), max(seconds), decimals=0)


def rescue() -> set[str]:
    guarded, warned = (
        read(f"default_run/arith_collapse_{guard}.json.gz") for guard in ("rollback", "warn")
    )
    values = [row[when]["value"] for row in guarded + warned for when in ("before", "after")]
    seconds = [row["seconds"]["processor"] for row in guarded]

    return spell(*values) | spell(*seconds, decimals=0)


def watch() -> set[str]:
    seen, blind = (
        read(f"watch/held_out_{name}.json.gz") for name in ("verdicts", "verdicts_blind")
    )
    numbers = [seen["corpus"]["runs"]]
    for made in (seen, blind):
        numbers += [
            made["summary"]["watch"][key]["words"] for key in ("caught", "healthy runs stopped")
        ]

    public = read("watch/public_runs.json.gz")
    numbers.append(public["check"]["summary"]["collapses caught"]["words"])
    stopped = [public[half]["summary"]["healthy stopped"]["words"] for half in ("tuning", "check")]
    counts = [list(map(int, re.findall(r"\d+", words))) for words in stopped]
    numbers.append(" of ".join(str(sum(pair)) for pair in zip(*counts, strict=True)))

    return {number for words in numbers for number in re.findall(r"\d+", words)}


def claim(name: str, *groups: tuple[str, ...]) -> set[str]:
    """The start that the runs share, and the ends of each group of them."""
    runs = read(f"claims/{name}.json.gz")
    shown = spell(runs[0]["curve"][0][1]) | {str(runs[0]["steps"])}
    for names in groups:
        ends = []
        for run in runs:
            if run["name"] in names:
                ends.append(run["accuracy"])

        shown |= spell(min(ends), max(ends))

    return shown


def tournament() -> set[str]:
    from benchmarks.tournament.analyse import grid, read_cells, reported
    from benchmarks.tournament.plan import scores_of
    from benchmarks.tournament.tasks import TASKS

    done = read_cells([ROOT / "benchmarks/tournament/cells.json.gz"])
    cells = reported(done)
    starts = [cell["curve"][0][1] for cell in cells["adamw"].values()]
    shown = spell(mean(starts), *(grid(mine, "accuracy").mean() for mine in cells.values()))
    muon, adamw = (max(scores_of(tuple(TASKS), name, done).values()) for name in ("muon", "adamw"))
    steps = next(iter(done.values()))["steps"]

    return shown | spell(muon - adamw, decimals=2) | {str(steps)}


def training() -> set[str]:
    made = read("training/result.json.gz")
    losses = {row["optimizer"]: row["mean"] for row in made["summary"]}
    shown = spell(*(losses[name] for name in ("muon", "adamw_split", "pion")))

    return shown | {str(made["steps"]), "0.4"}  # million weights, as the page says


def ppo() -> set[str]:
    cells = read("ppo/study.json.gz")["boards"]["6x6"]["cells"]
    fruit = [mean(cell["greedy_fruit"]) for cell in cells.values()]
    return spell(*fruit, cells["muon"]["steps_per_seed"] / 1e6, decimals=1) | {"35"}


def vla() -> set[str]:
    shown = {"64"}  # pixels, which `settings.world` stands for
    for name, steps, decimals in (("", 600, 3), ("_adamw", 600, 3), ("_1600", 1600, 2)):
        scores = defaultdict(list)
        for cell in read(f"vla/object10{name}.json.gz")["cells"]:
            if cell["steps"] == steps and cell["contender"] in ("muon", "adamw"):
                scores[cell["contender"], cell["rate"]].append(cell["test"])

        means = (mean(found) for found in scores.values() if len(found) > 1)
        shown |= spell(*means, decimals=decimals)
        shown.add(f"{steps:,}")

    return shown


SOURCES: dict[str, Callable[[], set[str]]] = {
    "default_run/README.md#the-rescue)": rescue,
    "claims/README.md#the-guard-on-smollm2)": lambda: claim("guard", ("off",), ("rollback",)),
    "claims/README.md#rates-of-the-tiny-model)": lambda: claim(
        "rates", ("adamw 0.004", "adamw 0.008"), ("muon 0.004", "muon 0.008")
    ),
}
SOURCES |= {
    f"{source.__name__}/README.md)": source
    for source in (default_run, watch, tournament, training, ppo, vla)
}


@pytest.mark.parametrize("link", SOURCES)
def test_results_come_from_files(link):
    rows = []
    for line in README.splitlines():
        if line.startswith("| [") and link in line:
            rows.append(line)

    assert len(rows) == 1

    _, _, result, limits, _ = rows[0].split("|")
    numbers = set(NUMBER.findall(re.sub(r"\]\([^)]*\)", "", result + limits)))
    assert len(numbers) > 1
    assert numbers - SOURCES[link]() == set()


def test_the_pictured_run_is_the_kept_one():
    run = ROOT / "tests" / "golden" / "runs" / "rescued"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (undone,) = [event for event in events if event.get("action") == "rollback"]
    began = min(event["began"] for event in events if event.get("severity") == "stop")
    (rate,) = [change for change in undone["changes"] if change["field"] == "optim.lr"]
    caption = README.split("*`mesotron train arith_collapse")[1].split("*\n")[0]

    assert NUMBER.findall(caption) == [str(began), str(undone["checkpoint"])]
    assert "8e-3" in caption
    assert rate["old"] == 8e-3
    assert round(rate["old"] / rate["new"]) == 6  # "a sixth"


def test_the_page_is_short():
    assert len(README.splitlines()) <= 120
    cells = [
        cell for line in README.splitlines() if line.startswith("|") for cell in line.split("|")
    ]
    assert max(len(cell.split()) for cell in cells) <= 45
