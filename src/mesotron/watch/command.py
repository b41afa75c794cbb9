"""`mesotron watch PATH`: diagnose a log, or follow a live run."""

import difflib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mesotron.config import WatchConfig, WatchSettings
from mesotron.runs.files import read_rows
from mesotron.watch.diagnosis import Diagnosis, diagnose
from mesotron.watch.events import Event
from mesotron.watch.guard import Monitor, merge_history
from mesotron.watch.metrics import METRICS, canonical, own_name
from mesotron.watch.readers import Log, Row, Stream, read_log

STYLES = {"healthy": "green", "drifting": "yellow", "dead": "red", "warn": "yellow", "stop": "red",
          "clear": "green", "unknown": "yellow"}  # fmt: skip


def run(config: WatchConfig) -> int:
    """Diagnose a run; the exit code is 1 if it is dead and `check` is set."""
    console = Console(highlight=False, soft_wrap=True)
    events = config.path / "events.jsonl"
    renames = parse_renames(config.rename)
    watcher = Watcher(config.settings, renames, events if events.is_file() else None)
    if config.follow:
        log = follow(config, watcher, console)
    else:
        log = read_log(config.path, config.kind)
        watcher.update(log.rows, log.actions)
    diagnosis = watcher.diagnosis(log)
    if config.out:
        config.out.write_text(json.dumps(diagnosis.record(), indent=2) + "\n", encoding="utf-8")
    show(diagnosis, console, with_events=not config.follow)
    return 1 if config.check and diagnosis.condition == "dead" else 0


class Watcher:
    """Feeds the rows of one log to a monitor; `renames` maps our names to those in the log, and
    `events` is the events.jsonl of a run folder, whose guard may have rolled back."""

    def __init__(
        self, settings: WatchSettings, renames: dict[str, str], events: Path | None = None
    ) -> None:
        self.settings, self.renames, self.path = settings, renames, events
        self.restart()

    def restart(self) -> None:
        """Forget every row, as when the run was resumed from before them."""
        self.monitor = Monitor(self.settings)

    def update(self, rows: Sequence[Row], actions: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take the next rows, and all actions so far if the log has them; returns new events."""
        fresh = [
            row | {own_name(ours): row[theirs] for ours, theirs in self.renames.items()
                   if theirs in row}
            for row in rows
        ]  # fmt: skip
        records = actions if self.path is None else read_rows(self.path)
        num_actions = sum(record.get("kind") == "guard" for record in records)
        if rows and num_actions > len(self.monitor.actions):
            # The guard has rolled back: replay the rows, now knowing when.
            history = merge_history([*self.monitor.rows, *fresh], records)
            self.restart()
            self.monitor.replay(history, ())
            return [event for event in self.monitor.events if event.step >= rows[0]["step"]]
        return [event for row in fresh for event in self.monitor.update(row)]

    def diagnosis(self, log: Log) -> Diagnosis:
        m = self.monitor
        names = {key for row in m.rows for key in row}
        for ours, theirs in self.renames.items():
            if theirs not in names:
                close = difflib.get_close_matches(theirs, names, n=3)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(f"--rename {ours}={theirs}: no row has {theirs}{hint}")
        if not any(canonical(row) for row in m.rows):
            some = ", ".join(sorted(names - {"step"})[:12]) or "no numbers"
            raise ValueError(
                f"{log.path} has no known metric (it has {some}): map them with --rename, as in "
                "--rename reward=my_score"
            )
        return diagnose(m.rows, m.engine, m.events, log.notes, m.actions)


def follow(config: WatchConfig, watcher: Watcher, console: Console) -> Log:
    """Read while the run writes, printing each event, until Ctrl-C or `idle` seconds of silence."""
    stream = Stream(config.path, config.kind)
    last_row = time.monotonic()

    def new_events(count: int) -> list[Event]:
        rows = stream.log.rows
        return watcher.update(rows[len(rows) - count :], stream.log.actions)

    try:
        while config.idle is None or time.monotonic() - last_row < config.idle:
            count = stream.poll()
            if count:
                last_row = time.monotonic()
            if stream.resumed:
                watcher.restart()
            for event in new_events(count):
                console.print(Text(event.sentence(), STYLES[event.severity]))
            time.sleep(config.every)
    except KeyboardInterrupt:
        console.print("stopped following; the diagnosis so far:")
    new_events(stream.finish())
    return stream.log


def parse_renames(pairs: Sequence[str]) -> dict[str, str]:
    out = {}
    for pair in pairs:
        ours, _, theirs = pair.partition("=")
        if not theirs:
            raise ValueError(f"--rename {pair} must have the form reward=my_score")
        if ours not in METRICS:
            raise ValueError(f"--rename {pair}: {ours!r} is not one of {', '.join(METRICS)}")
        out[ours] = theirs
    return out


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
