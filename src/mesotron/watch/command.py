"""`mesotron watch PATH`: diagnose a log or a folder of runs, or follow a live run.

One log goes this way; one that an address names comes here first (`address`).

    runs = find_runs(path)                 find: which format, which files
    log = read_log(run)                    log: rows of numbers in the order of their steps
    watcher.update(log.rows)               metrics: our names; engine: what is wrong, row by row
    diagnosis = watcher.diagnosis(log)     diagnosis: what happened, when, why, and what to do
    show(diagnosis)
"""

import json
import math
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from mesotron.config import WatchConfig, WatchSettings
from mesotron.runs.console import SafeConsole
from mesotron.runs.files import read_rows
from mesotron.runs.markdown import as_plain, make_table
from mesotron.watch import address
from mesotron.watch.alerts import Alerts
from mesotron.watch.detectors import DETECTORS, Detector, Event, explain, load_detectors, with_own
from mesotron.watch.diagnosis import Condition, Diagnosis, diagnose_run
from mesotron.watch.engine import Monitor, merge_history
from mesotron.watch.find import find_runs
from mesotron.watch.log import Log, Stream, read_log
from mesotron.watch.metrics import (
    Names,
    Row,
    canonical,
    is_known,
    own_name,
    remember_names,
    sources,
    suggest_names,
)

if TYPE_CHECKING:
    from mesotron.watch.forecast import Forecast

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
SUMMARY = "GITHUB_STEP_SUMMARY"  # names the file of a job's summary
COLUMNS = ("verdict", "run", "steps", "reward", "cause", "onset")
MANY_RUNS = 50  # from which on it pays to start processes
RUNS_AT_ONCE = 8
# Causes that samples show: what the policy writes to earn the reward.
HACKED = ("self_reward_hacking", "one_part_gain", "constant_answer")
MOST_SAMPLES = 3
MOST_SHOWN = 400  # characters of one


def run(config: WatchConfig) -> int:
    """Diagnose runs; the exit code is that of the worst verdict with `json`, that of `check_code`
    with `check`, else 0."""
    if config.explain is not None:
        print(explain(config.explain, own_detectors(config)))
        return 0

    console = SafeConsole(
        highlight=False,
        soft_wrap=True,
        stderr=config.json,
        quiet=config.json and not config.follow,
    )

    if config.follow and address.split(config.path):
        raise ValueError(f"--follow reads a log on this machine, not {address.spell(config.path)}")

    with address.fetched(config.path) as place:
        results, record = watch_place(replace(config, path=place), console)
        if place != config.path:
            record = address.rename(record, place, config.path)

    if config.check and SUMMARY in os.environ:
        append_summary(Path(os.environ[SUMMARY]), config.path, results)
    if config.out:
        config.out.write_text(to_json(record), encoding="utf-8")

    if config.json:
        print(to_json(record), end="")
        return record["exit_code"]

    if config.check:
        return check_code([result.diagnosis.condition for result in results])

    return 0


def watch_place(
    config: WatchConfig, console: Console
) -> tuple[list["WatchResult"], dict[str, Any]]:
    """Diagnose the runs at a path of this machine; returns them and the JSON of all."""
    notes: list[str] = []
    if config.follow:
        runs = [config.path]
    else:
        runs = find_runs(config.path, config.kind, notes)

    if config.alerts and len(runs) > 1:
        raise ValueError(f"--alerts needs one run of {config.path}, such as {runs[0]}")

    if len(runs) > 1:
        results, record = watch_many(config, runs, console)
    else:
        results = [watch_with_alerts(config, runs[0], console)]
        record = results[0].record()

    for note in notes:
        console.print(f"note: {note}")

    record["notes"] = [*record.get("notes", ()), *notes]
    return results, record


def check_code(conditions: Collection[Condition]) -> int:
    """The exit code of --check: 1 for a dead run, else 4 if one is unknown, else 0."""
    if "dead" in conditions:
        return 1
    if "unknown" in conditions:
        _, code = VERDICTS["unknown"]
        return code

    return 0


def own_detectors(config: WatchConfig) -> tuple[Detector, ...]:
    own = load_detectors(config.detectors) if config.detectors else ()
    return with_own(own)


# One log


@dataclass(frozen=True)
class WatchResult:
    log: Log
    diagnosis: Diagnosis
    names: set[str]  # in the log, ours added
    samples: tuple[dict[str, Any], ...] = ()  # that show how a reward was hacked
    forecast: "Forecast | None" = None  # with --forecast

    def record(self) -> dict[str, Any]:
        """The JSON of --json and --out: docs/AGENTS.md describes it."""
        verdict, code = VERDICTS[self.diagnosis.condition]
        unknown = sorted(name for name in self.names if name != "step" and not is_known(name))

        record = {
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
            "samples": [*self.samples],
        } | self.diagnosis.record()
        if self.forecast is not None:
            record["forecast"] = self.forecast.to_record()

        return record


def watch_with_alerts(config: WatchConfig, path: Path, console: Console) -> WatchResult:
    folder = config.path.resolve()
    alerts = Alerts(
        config.alerts,
        run=folder.name,
        link=config.link or str(folder / "report.html"),
        price=config.price,
    )
    try:
        return watch_one(config, path, console, alerts)
    finally:
        alerts.close()


def watch_one(config: WatchConfig, path: Path, console: Console, alerts: Alerts) -> WatchResult:
    """Read a log, judge it and print the diagnosis."""
    names = Names(path, config.rename)
    events = path / "events.jsonl"
    watcher = Watcher(
        config.settings,
        names,
        events if events.is_file() else None,
        own_detectors(config),
    )

    if config.follow:
        log = Follower(config, watcher, console, alerts).run()
        diagnosis = watcher.diagnosis(log)
    else:
        log = read_log(path, config.kind)
        watcher.update(log.rows, log.actions)
        diagnosis = watcher.diagnosis(log)
        send_cause(diagnosis, alerts)

    show(diagnosis, console, with_events=not config.follow)
    samples = hacked_samples(path, diagnosis)
    for sample in samples:
        console.print(
            f"sample of step {sample['step']}, reward {sample['reward']:.3g}:", style="bold"
        )
        console.print(Text(str(sample["completion"])[:MOST_SHOWN]))

    given = forecast_of(config, log, watcher)
    if given is not None:
        console.print(Text(given.text()))

    if names.given and not address.is_fetched(path):
        file = remember_names(path, names.given)
        if file:
            console.print(f"note: --rename is remembered in {file}")

    return WatchResult(log, diagnosis, names.seen, samples, given)


def forecast_of(config: WatchConfig, log: Log, watcher: "Watcher") -> "Forecast | None":
    """How the run will end; None unless that is asked for."""
    if not config.forecast:
        return None

    from mesotron.watch.forecast import forecast  # imports NumPy

    steps = config.steps or log.planned_steps
    return forecast(watcher.monitor.rows, steps, config.price)


def hacked_samples(path: Path, diagnosis: Diagnosis) -> tuple[dict[str, Any], ...]:
    """Of a run folder whose reward was hacked, the samples since the onset that earned most."""
    file = path / "samples.jsonl"
    if diagnosis.cause not in HACKED or diagnosis.onset is None or not file.is_file():
        return ()

    since = []
    for sample in read_rows(file):
        is_whole = sample.keys() >= {"step", "reward", "completion"}
        if is_whole and sample["step"] >= diagnosis.onset:
            since.append(sample)

    since.sort(key=lambda sample: (-sample["reward"], -sample["step"]))
    return tuple(since[:MOST_SAMPLES])


def send_cause(diagnosis: Diagnosis, alerts: Alerts) -> None:
    """Send the last event of the detector that explains the run."""
    events = []
    for event in diagnosis.events:
        if event.detector == diagnosis.cause:
            events.append(event)

    if events:
        alerts.send(events[-1])


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
        self.events = events
        self.detectors = detectors
        self.restart()

    def restart(self) -> None:
        """Forget every row, as when the run was resumed from before them."""
        self.monitor = Monitor(self.settings, self.detectors)

    def update(self, rows: Sequence[Row], actions: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take the next rows, and all actions so far if the log has them; returns new events."""
        if not rows:
            return []

        first = rows[0]["step"]
        rows = self._with_earlier_rows(rows)
        rows = [self.names.apply(row) for row in rows]

        records = actions if self.events is None else read_rows(self.events)
        num_actions = sum(record.get("kind") == "guard" for record in records)
        if num_actions > len(self.monitor.actions):
            # The guard has rolled back: replay the rows, now knowing when.
            history = merge_history([*self.monitor.rows, *rows], records)
            self.restart()
            self.monitor.replay(history, ())
        else:
            for row in rows:
                self.monitor.update(row)

        return [event for event in self.monitor.events if event.step >= first]

    def _with_earlier_rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows, with all earlier ones if the reward is now read from elsewhere."""
        names = {key for row in rows for key in row}
        if not self.names.learn(names) or not self.monitor.rows:
            return rows

        own = own_name("reward")
        before = [{key: x for key, x in row.items() if key != own} for row in self.monitor.rows]
        self.restart()

        return [*before, *rows]

    def diagnosis(self, log: Log) -> Diagnosis:
        self.names.check()
        self.names.require_known(log.path, self.monitor.rows)

        note = self._reward_note()
        notes = [*log.notes, note] if note else log.notes
        return diagnose_run(self.monitor, notes, log.num_dropped)

    def _reward_note(self) -> str:
        """What is unusual about the reward of this log; "" if it is logged throughout."""
        if self.names.reward_from:
            return f"no reward is logged: it is read from {', '.join(self.names.reward_from[:3])}"

        rows = self.monitor.rows
        rewarded = []
        for k, row in enumerate(rows):
            if "reward" in canonical(row):
                rewarded.append(k)

        if not rewarded:
            unknown = sorted(self.names.seen - {"step"})
            close = suggest_names(name for name in unknown if not is_known(name))
            hint = f"; perhaps --rename reward={close[0]}" if close else ""
            return f"no reward is logged under a known name{hint}"

        last = rewarded[-1]
        usual_distance = len(rows) / len(rewarded)
        if len(rows) - last > max(10, 3 * usual_distance):
            return f"no reward is logged after step {rows[last]['step']:.0f}"

        return ""


class Follower:
    """Reads while the run writes, printing each event."""

    def __init__(
        self, config: WatchConfig, watcher: Watcher, console: Console, alerts: Alerts
    ) -> None:
        self.config = config
        self.watcher = watcher
        self.console = console
        self.alerts = alerts
        self.stream = Stream(config.path, config.kind)
        self.reported = -math.inf  # the step up to which events were printed
        self.problem = ""  # last printed

    def run(self) -> Log:
        """Follow until Ctrl-C or `idle` seconds of silence."""
        last_row = time.monotonic()
        idle = self.config.idle
        try:
            while idle is None or time.monotonic() - last_row < idle:
                count = self._poll()
                if count:
                    last_row = time.monotonic()
                if count is not None:
                    self._report(self._new_events(count), printing=True)

                time.sleep(self.config.every)
        except KeyboardInterrupt:
            self.console.print("stopped following; the diagnosis so far:")

        count = self.stream.finish()
        self._report(self._new_events(count), printing=False)

        return self.stream.log

    def _poll(self) -> int | None:
        """The number of new rows; None where the log was removed, or has a broken line."""
        try:
            return self.stream.poll()
        except (ValueError, OSError) as error:
            if not self.stream.log.rows:
                raise

            if str(error) != self.problem:
                self.console.print(f"still following: {error}")
            self.problem = str(error)

        return None

    def _new_events(self, count: int) -> list[Event]:
        end = self.stream.num_ready
        rows = self.stream.log.rows[end - count : end]
        if self.stream.resumed:
            self.watcher.restart()
            if not rows or rows[-1]["step"] < self.reported:
                self.reported = -math.inf

        events = self.watcher.update(rows, self.stream.log.actions)
        new = [event for event in events if event.step > self.reported]
        if rows:
            self.reported = max(self.reported, rows[-1]["step"])

        return new

    def _report(self, events: Sequence[Event], printing: bool) -> None:
        for event in events:
            if printing:
                self.console.print(Text(event.sentence(), STYLES[event.severity]))
            self.alerts.send(event)


# Several logs


def watch_many(
    config: WatchConfig, runs: Sequence[Path], console: Console
) -> tuple[list[WatchResult], dict[str, Any]]:
    """Diagnose each run of a folder and print one line for each, the worst first."""
    results: list[WatchResult] = []
    unread: dict[str, str] = {}
    for path, result in zip(runs, watch_each(config, runs)):
        if isinstance(result, WatchResult):
            results.append(result)
        else:
            unread[str(path)] = result

    if not results:
        first = next(iter(unread.values()))
        raise ValueError(f"{config.path}: none of {len(runs)} logs can be read; {first}")

    results.sort(key=_badness)
    show_many(results, config.path, console)
    for result in results:
        if result.forecast is not None:
            name = _short(result.log.path, config.path)
            console.print(Text(f"{name}: {result.forecast.text(with_record=False)}"))
    for path, error in unread.items():
        console.print(f"unread   {_short(Path(path), config.path)}: {error}")

    records = [result.record() for result in results]
    worst = {key: records[0][key] for key in ("schema", "verdict", "exit_code")}

    return results, worst | {
        "path": str(config.path),
        "runs": records,
        "unread": unread,
    }


def watch_each(config: WatchConfig, runs: Sequence[Path]) -> list[WatchResult | str]:
    """The result of each run, or why it cannot be read; many runs share the cores."""
    watch = partial(watch_quietly, config)
    if len(runs) < MANY_RUNS:
        return [watch(path) for path in runs]

    # Spawned: a process that has threads, such as JAX's, must not be forked.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return [*pool.map(watch, runs, chunksize=RUNS_AT_ONCE)]


def watch_quietly(config: WatchConfig, path: Path) -> WatchResult | str:
    try:
        return watch_one(config, path, SafeConsole(quiet=True), Alerts(()))
    except (ValueError, OSError) as error:
        return str(error)


def _badness(result: WatchResult) -> tuple[int, str]:
    """The order in which results are shown: the worst first."""
    place = [*VERDICTS].index(result.diagnosis.condition)
    return place, str(result.log.path)


def _short(path: Path, folder: Path) -> str:
    return str(path).removeprefix(f"{folder}/").removeprefix(f"{folder.parent}/")


# Printing


def show(diagnosis: Diagnosis, console: Console, with_events: bool) -> None:
    for event in diagnosis.events if with_events else ():
        console.print(Text(event.sentence(with_remedy=False), STYLES[event.severity]))

    for action in diagnosis.actions:
        style = STYLES["clear" if action.is_rollback else "stop"]
        console.print(Text(action.sentence(), style))

    console.print(Text(diagnosis.text(), f"bold {STYLES[diagnosis.condition]}"))
    for line in diagnosis.explanation():
        console.print(line)
    for note in diagnosis.notes:
        console.print(f"note: {note}")


def show_many(results: Sequence[WatchResult], folder: Path, console: Console) -> None:
    """A table with a line for each run."""
    rows = [COLUMNS]
    rows += [table_row(result, _short(result.log.path, folder)) for result in results]
    widths = [max(map(len, column)) for column in zip(*rows)]

    styles = ["bold", *(STYLES[result.diagnosis.condition] for result in results)]
    for row, style in zip(rows, styles):
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths)]
        console.print(Text("  ".join(cells).rstrip(), style))


def table_row(result: WatchResult, name: str) -> tuple[str, ...]:
    diagnosis = result.diagnosis
    verdict, _ = VERDICTS[diagnosis.condition]
    rows = result.log.rows

    reward = ""
    for evidence in diagnosis.numbers:
        if evidence.metric == "reward" and evidence.before is not None:
            reward = f"{evidence.before:.3g} -> {evidence.now:.3g}"

    return (
        verdict,
        name,
        f"{rows[0]['step']:.0f}-{rows[-1]['step']:.0f}",
        reward,
        (diagnosis.cause or "").replace("_", " "),
        "" if diagnosis.onset is None else str(diagnosis.onset),
    )


def append_summary(file: Path, path: Path, results: Sequence[WatchResult]) -> None:
    """Add the verdicts to the page of a GitHub job, as Markdown."""
    rows = []
    details = []
    for result in sorted(results, key=_badness):
        row = [as_plain(cell) for cell in table_row(result, _short(result.log.path, path))]
        rows.append(row)

        diagnosis = result.diagnosis
        for line in (diagnosis.text(), *diagnosis.explanation()[:2]):  # why, and what to do
            details.append(f"- {row[1]}: {as_plain(line)}")

    lines = ["### mesotron watch", "", *make_table(COLUMNS, rows), "", *details, ""]
    with file.open("a", encoding="utf-8") as summary:
        summary.write("\n".join(lines))


def to_json(record: dict[str, Any]) -> str:
    """JSON that every parser reads: numbers that are not finite are null."""
    finite = json.loads(json.dumps(record), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2) + "\n"
