"""What the tools of the server read from a run or a log."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mesotron.agents.children import Children
from mesotron.agents.folder import MAX_TEXT, Folder
from mesotron.config import WatchConfig
from mesotron.report.read import Run, read_runs
from mesotron.report.summary import cost_of, verdict_of
from mesotron.runs import RunFolder
from mesotron.runs.console import SafeConsole
from mesotron.runs.files import Row, last_value, read_rows
from mesotron.runs.links import open_own
from mesotron.watch.alerts import Alerts
from mesotron.watch.command import watch_many, watch_one
from mesotron.watch.find import find_runs

Evidence = Literal["report", "config", "result", "events", "metrics", "samples", "log"]
FEW_ROWS = 10
MOST_ROWS = 100
MOST_LOGS = 50
MOST_COMPARED = 20
LIMITS = ("budget", "price", "gpu", "time_limit")
# Texts in the answer of `mesotron watch --json` that the log has written.
FROM_LOG = ("metrics", "unknown_names", "samples")


# Runs


def list_runs(folder: Folder, children: Children) -> list[Row]:
    rows = []
    for path in folder.runs():
        try:
            rows.append(brief(path, children))
        except (ValueError, OSError) as error:  # the others are listed all the same
            rows.append({"run": path.name, "state": "damaged", "untrusted": {"error": str(error)}})

    return rows


def brief(path: Path, children: Children) -> Row:
    run = RunFolder(path)
    config = run.config
    rows = run.rows("metrics")

    return {
        "run": path.name,
        "state": children.state(path.name),
        "step": rows[-1]["step"] if rows else 0,
        "steps": config.get("steps"),
        "reward": last_value(rows, "reward"),
        "heldout": last_value(rows, "eval/greedy"),
        "dollars": last_value(rows, "cost/spent"),
    }


def status(folder: Folder, children: Children, name: str) -> Row:
    path = folder.inside(name)
    state = children.state(path.name)
    log = children.last_lines(path.name)
    if not (path / "config.json").is_file():
        if not log:
            folder.run(name)  # raises
        return {"run": path.name, "state": state, "untrusted": {"log": log}}

    run = RunFolder(folder.run(name))
    config = run.config
    rows = run.rows("metrics")
    limits = {key: config[key] for key in LIMITS if config.get(key) is not None}

    return {
        **brief(path, children),
        "state": state,
        "limits": limits,
        "spent": run.load("spent") or {},
        "untrusted": {"metrics": rows[-1] if rows else {}, "log": log},
    }


# The watch


def diagnose(folder: Folder, name: str, rename: tuple[str, ...] = ()) -> Row:
    return watch(folder, WatchConfig(path=folder.inside(name), rename=rename))


def forecast(folder: Folder, name: str, steps: int | None, price: float | None) -> Row:
    path = folder.inside(name)
    record = watch(folder, WatchConfig(path=path, forecast=True, steps=steps, price=price))
    kept = ("path", "verdict", "last_step", "forecast", "untrusted")

    forecasts = []
    for one in record.get("runs", [record]):
        forecasts.append({key: one[key] for key in kept if key in one})

    return {"runs": forecasts}


def watch(folder: Folder, config: WatchConfig) -> Row:
    """The answer of `mesotron watch --json`, with what the log itself says under `untrusted`."""
    console = SafeConsole(quiet=True)
    paths = find_runs(config.path)
    for path in paths:
        folder.inside(str(path))  # a file in a folder may be a link
    if len(paths) > MOST_LOGS:
        raise ValueError(f"{len(paths)} logs are too many: name a folder inside, or one run")

    if len(paths) == 1:
        return quote(folder, watch_one(config, paths[0], console, Alerts(())).record())

    _, record = watch_many(config, paths, console)
    return {
        "verdict": record["verdict"],
        "path": within(folder, record["path"]),
        "runs": [quote(folder, one) for one in record["runs"]],
        "unread": {within(folder, path): why for path, why in record["unread"].items()},
    }


def quote(folder: Folder, record: Row) -> Row:
    own = {key: value for key, value in record.items() if key not in FROM_LOG}
    own["path"] = within(folder, record["path"])

    return {**own, "untrusted": {key: record[key] for key in FROM_LOG}}


def within(folder: Folder, path: str) -> str:
    return str(path).removeprefix(f"{folder.root}/")


# Several runs


def compare(folder: Folder, names: Sequence[str]) -> Row:
    if not 2 <= len(set(names)) <= MOST_COMPARED:
        raise ValueError(f"give 2 to {MOST_COMPARED} different runs to compare, not {len(names)}")

    runs = read_runs([folder.run(name) for name in names])
    configs = [flat(run.config) for run in runs]
    keys = sorted(set().union(*configs) - {"out", "resume"})

    differing = {}
    for key in keys:
        values = [config.get(key) for config in configs]
        if any(value != values[0] for value in values):
            differing[key] = values

    return {
        "runs": [compared(run) for run in runs],
        "untrusted": {"settings_that_differ": differing},
        "note": "single runs: a difference may be the noise of one seed; `mesotron compare` "
        "measures optimizers with a rate search, several seeds and intervals",
    }


def compared(run: Run) -> Row:
    rewards = run.finite("reward")
    best = None
    if run.best is not None:
        best = {"step": run.best.step, "score": run.best.value}

    return {
        "run": run.name,
        "verdict": verdict_of(run),
        "steps": run.last_step,
        "first_reward": mean(rewards[:5]),
        "last_reward": mean(rewards[-5:]),
        "best_heldout": best,
        "before": score(run.before),
        "after": score(run.after),
        "cost": cost_of(run),
    }


def mean(values: Sequence[float]) -> float | None:
    if not values:
        return None

    return sum(values) / len(values)


def score(evaluation: Row | None) -> float | None:
    """Greedy accuracy of an evaluation before or after training."""
    greedy = (evaluation or {}).get("greedy", {})
    return greedy.get("strict", {}).get("value")


def flat(values: Row, prefix: str = "") -> Row:
    """Nested settings under dotted names."""
    plain = {}
    for key, value in values.items():
        if isinstance(value, dict):
            plain |= flat(value, f"{prefix}{key}.")
        else:
            plain[f"{prefix}{key}"] = value

    return plain


# Files of a run


def evidence(
    folder: Folder, children: Children, name: str, what: Evidence, start: int, count: int
) -> Row:
    path = folder.inside(name)
    if what == "log":
        return rows_of(what, path, children.last_lines(path.name), start, count)

    path = folder.run(name)
    if what in ("config", "result"):
        value = RunFolder(path).load(what)
        if value is None:
            raise ValueError(f"{path.name} has no {what} yet: it has not ended")
        return {"run": path.name, "what": what, "untrusted": {what: value}}

    if what == "report":
        return report_of(path, start)

    return rows_of(what, path, read_rows(path / f"{what}.jsonl"), start, count)


def report_of(path: Path, start: int) -> Row:
    """A part of report.md."""
    file = path / "report.md"
    if not file.exists():
        raise ValueError(f"{path.name} has no report yet: it has not ended; run_status says more")

    with open_own(file) as text:
        whole = text.read()

    part = whole[max(start, 0) :][:MAX_TEXT]
    return {
        "run": path.name,
        "what": "report",
        "total_characters": len(whole),
        "untrusted": {"report": part},
    }


def rows_of(what: str, path: Path, rows: Sequence[Any], start: int, count: int) -> Row:
    """Some of the rows, with the number of the first."""
    first = max(len(rows) + start, 0) if start < 0 else start
    last = first + min(max(count, 1), MOST_ROWS)

    return {
        "run": path.name,
        "what": what,
        "total": len(rows),
        "start": first,
        "untrusted": {what: list(rows[first:last])},
    }
