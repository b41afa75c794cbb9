"""`mesotron watch PATH`: diagnose a log or a folder of runs, or follow a live run."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mesotron.config import WatchConfig, WatchSettings
from mesotron.runs.console import SafeConsole
from mesotron.runs.files import read_rows
from mesotron.watch.alerts import Alerts
from mesotron.watch.detectors import DETECTORS, Detector, explain, load_detectors, with_own
from mesotron.watch.diagnosis import Diagnosis
from mesotron.watch.events import Event
from mesotron.watch.find import find_runs
from mesotron.watch.guard import Monitor, merge_history
from mesotron.watch.log import Log, Stream, read_log
from mesotron.watch.metrics import canonical, is_known, own_name, sources, suggest_names
from mesotron.watch.names import Names, remember_names
from mesotron.watch.rows import Row

SCHEMA = "mesotron.watch/1"
STYLES = {
    "healthy": "green",
    "drifting": "yellow",
    "dead": "red",
    "unknown": "cyan",
    "warn": "yellow",
    "stop": "red",
    "clear": "green",
}
# Condition -> verdict and exit code with --json, the worst first.
VERDICTS = {
    "dead": ("dead", 3),
    "drifting": ("warning", 1),
    "unknown": ("unknown", 4),
    "healthy": ("healthy", 0),
}
MOST_UNKNOWN = 50  # names in the JSON


def run(config: WatchConfig) -> int:
    """Diagnose runs; the exit code is that of the worst verdict with `json`, 1 for a dead run with
    `check`, else 0."""
    if config.explain is not None:
        print(explain(config.explain, own_detectors(config)))
        return 0

    quiet = config.json and not config.follow
    console = SafeConsole(
        highlight=False,
        soft_wrap=True,
        stderr=config.json,
        quiet=quiet,
    )

    notes: list[str] = []
    runs = [config.path] if config.follow else find_runs(config.path, config.kind, notes)
    if config.alerts and len(runs) > 1:
        raise ValueError(f"--alerts needs one run of {config.path}, such as {runs[0]}")

    path = config.path.resolve()
    link = config.link or str(path / "report.html")

    alerts = Alerts(
        config.alerts,
        run=path.name,
        link=link,
        price=config.price,
    )
    try:
        if len(runs) > 1:
            results, record = watch_many(config, runs, console)
        else:
            results = [watch_one(config, runs[0], console, alerts)]
            record = results[0].record()
    finally:
        alerts.close()

    for note in notes:
        console.print(f"note: {note}")

    record["notes"] = [*record.get("notes", ()), *notes]
    if config.out:
        config.out.write_text(to_json(record), encoding="utf-8")

    if config.json:
        print(to_json(record), end="")
        return record["exit_code"]

    return int(config.check and any(each.diagnosis.condition == "dead" for each in results))


@dataclass(frozen=True)
class Result:
    log: Log
    diagnosis: Diagnosis
    names: set[str]  # in the log, ours added

    def record(self) -> dict[str, Any]:
        """The JSON of --json and --out: docs/AGENTS.md describes it."""
        verdict, code = VERDICTS[self.diagnosis.condition]
        unknown = sorted(name for name in self.names if name != "step" and not is_known(name))

        return {
            "schema": SCHEMA,
            "path": str(self.log.path),
            "kind": self.log.kind,
            "verdict": verdict,
            "exit_code": code,
            "rows": len(self.log.rows),
            "first_step": self.log.rows[0]["step"],
            "last_step": self.log.rows[-1]["step"],
            "metrics": sources(sorted(self.names)),
            "unknown_names": unknown[:MOST_UNKNOWN],
        } | self.diagnosis.record()


def watch_one(config: WatchConfig, path: Path, console: Console, alerts: Alerts) -> Result:
    names = Names(path, config.rename)
    events = path / "events.jsonl"
    detectors = own_detectors(config)

    watcher = Watcher(config.settings, names, events if events.is_file() else None, detectors)
    if config.follow:
        log = follow(config, watcher, console, alerts)
    else:
        log = read_log(path, config.kind)
        watcher.update(log.rows, log.actions)

    diagnosis = watcher.diagnosis(log)
    if not config.follow:
        for event in [e for e in diagnosis.events if e.detector == diagnosis.cause][-1:]:
            alerts.send(event)

    show(diagnosis, console, with_events=not config.follow)
    if names.given and (file := remember_names(path, names.given)):
        console.print(f"note: --rename is remembered in {file}")

    return Result(log, diagnosis, names.seen)


def watch_many(
    config: WatchConfig, runs: Sequence[Path], console: Console
) -> tuple[list[Result], dict[str, Any]]:
    """Diagnose each run of a folder and print one line for each, the worst first."""
    results: list[Result] = []
    unread: dict[str, str] = {}
    for path in runs:
        try:
            results.append(watch_one(config, path, SafeConsole(quiet=True), Alerts(())))
        except (ValueError, OSError) as error:
            unread[str(path)] = str(error)

    if not results:
        first = next(iter(unread.values()))
        raise ValueError(f"{config.path}: none of {len(runs)} logs can be read; {first}")

    order = [*VERDICTS]
    results.sort(key=lambda each: (order.index(each.diagnosis.condition), str(each.log.path)))

    names = [_short(each.log.path, config.path) for each in results]
    for found, name in zip((each.diagnosis for each in results), names):
        verdict, _ = VERDICTS[found.condition]
        line = f"{verdict:8} {name:{max(map(len, names))}}  {found.text()}"
        console.print(Text(line, STYLES[found.condition]))

    for path, error in unread.items():
        console.print(f"unread   {_short(Path(path), config.path)}: {error}")

    records = [each.record() for each in results]
    worst = {key: records[0][key] for key in ("schema", "verdict", "exit_code")}

    return results, worst | {
        "path": str(config.path),
        "runs": records,
        "unread": unread,
    }


def _short(path: Path, folder: Path) -> str:
    return str(path).removeprefix(f"{folder}/").removeprefix(f"{folder.parent}/")


class Watcher:
    """Feeds the rows of one log to a monitor; `events` is the events.jsonl of a run folder, whose
    guard may have rolled back."""

    def __init__(
        self,
        settings: WatchSettings,
        names: Names,
        events: Path | None = None,
        detectors: Sequence[Detector] = DETECTORS,
    ) -> None:
        self.settings = settings
        self.names = names
        self.path = events
        self.detectors = detectors
        self.restart()

    def restart(self) -> None:
        """Forget every row, as when the run was resumed from before them."""
        self.monitor = Monitor(self.settings, self.detectors)

    def update(self, rows: Sequence[Row], actions: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take the next rows, and all actions so far if the log has them; returns new events."""
        first = rows[0]["step"] if rows else math.inf
        if self.names.learn({key for row in rows for key in row}) and self.monitor.rows:
            own = own_name("reward")  # the reward is read from elsewhere now: begin again
            before = [{key: x for key, x in row.items() if key != own} for row in self.monitor.rows]
            rows = [*before, *rows]
            self.restart()

        fresh = [self.names.apply(row) for row in rows]
        records = actions if self.path is None else read_rows(self.path)

        num_actions = sum(record.get("kind") == "guard" for record in records)
        if rows and num_actions > len(self.monitor.actions):
            # The guard has rolled back: replay the rows, now knowing when.
            history = merge_history([*self.monitor.rows, *fresh], records)
            self.restart()
            self.monitor.replay(history, ())
        else:
            for row in fresh:
                self.monitor.update(row)

        return [event for event in self.monitor.events if event.step >= first]

    def diagnosis(self, log: Log) -> Diagnosis:
        m = self.monitor
        names = self.names
        names.check()
        names.require_known(log.path, m.rows)
        notes = list(log.notes)

        rewarded = [k for k, row in enumerate(m.rows) if "reward" in canonical(row)]
        if names.reward_from:
            notes.append(f"no reward is logged: it is read from {', '.join(names.reward_from[:3])}")
        elif not rewarded:
            unknown = sorted(names.seen - {"step"})
            close = suggest_names(name for name in unknown if not is_known(name))
            hint = f"; perhaps --rename reward={close[0]}" if close else ""
            notes.append(f"no reward is logged under a known name{hint}")
        elif len(m.rows) - rewarded[-1] > max(10, 3 * len(m.rows) / len(rewarded)):
            notes.append(f"no reward is logged after step {m.rows[rewarded[-1]]['step']:.0f}")

        return m.diagnosis(notes)


def follow(config: WatchConfig, watcher: Watcher, console: Console, alerts: Alerts) -> Log:
    """Read while the run writes, printing each event, until Ctrl-C or `idle` seconds of silence."""
    stream = Stream(config.path, config.kind)
    last_row = time.monotonic()
    reported = -math.inf
    problem = ""  # step, text: last printed

    def new_events(count: int) -> list[Event]:
        nonlocal reported
        end = stream.num_ready

        rows = stream.log.rows[end - count : end]
        if stream.resumed:
            watcher.restart()
            reported = reported if rows and rows[-1]["step"] >= reported else -math.inf

        events = [e for e in watcher.update(rows, stream.log.actions) if e.step > reported]
        reported = max([reported, *(row["step"] for row in rows[-1:])])

        return events

    try:
        while config.idle is None or time.monotonic() - last_row < config.idle:
            try:
                count = stream.poll()
            except (ValueError, OSError) as error:  # it was removed, or has a broken line
                if not stream.log.rows:
                    raise

                if str(error) != problem:
                    console.print(f"still following: {error}")

                count = None
                problem = str(error)

            if count:
                last_row = time.monotonic()

            for event in [] if count is None else new_events(count):
                console.print(Text(event.sentence(), STYLES[event.severity]))
                alerts.send(event)

            time.sleep(config.every)
    except KeyboardInterrupt:
        console.print("stopped following; the diagnosis so far:")

    for event in new_events(stream.finish()):
        alerts.send(event)

    return stream.log


def own_detectors(config: WatchConfig) -> tuple[Detector, ...]:
    return with_own(load_detectors(config.detectors) if config.detectors else ())


def show(diagnosis: Diagnosis, console: Console, with_events: bool) -> None:
    for event in diagnosis.events if with_events else ():
        console.print(Text(event.sentence(with_remedy=False), STYLES[event.severity]))

    for action in diagnosis.actions:
        style = STYLES["stop" if action.checkpoint is None else "clear"]
        console.print(Text(action.sentence(), style))

    console.print(Text(diagnosis.text(), f"bold {STYLES[diagnosis.condition]}"))
    for line in diagnosis.explanation():
        console.print(line)

    for note in diagnosis.notes:
        console.print(f"note: {note}")


def to_json(record: dict[str, Any]) -> str:
    """JSON that every parser reads: numbers that are not finite are null."""
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2) + "\n"
