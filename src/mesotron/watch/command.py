"""`mesotron watch PATH`: read a log, watch it row by row, tell the story; or follow a live run."""

import difflib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mesotron.config import WatchConfig, WatchSettings
from mesotron.runs.lines import read_rows
from mesotron.watch.events import Act, Event
from mesotron.watch.guard import Memory, merge
from mesotron.watch.metrics import METRICS, canonical, own_name
from mesotron.watch.readers import Log, Stream, read_log
from mesotron.watch.readers.parser import Row
from mesotron.watch.story import Story, tell

STYLES = {"healthy": "green", "drifting": "yellow", "dead": "red", "warn": "yellow", "stop": "red",
          "clear": "green"}  # fmt: skip
# A finished log of fewer rows is watched with a shorter warm-up.
SHORT = 60


def run(config: WatchConfig) -> int:
    """Tell the story of a run.

    Args:
        config: which log, and how to read it.

    Returns:
        0; 1 if `check` was asked for and the run is dead.
    """
    console = Console(highlight=False, soft_wrap=True)
    events = config.path / "events.jsonl"
    watcher = Watcher(
        config.settings, read_renames(config.rename), events if events.is_file() else None
    )
    log = follow(config, watcher, console) if config.follow else read_log(config.path, config.kind)
    if not config.follow:
        watcher.settings = suit(config.settings, len(log.rows))
        watcher.restart()
        watcher.watch(log.rows, log.acts)
    story = watcher.story(log)
    if config.out:
        config.out.write_text(json.dumps(story.record(), indent=2) + "\n", encoding="utf-8")
    show(story, console, with_events=not config.follow)
    return 1 if config.check and story.condition == "dead" else 0


class Watcher:
    """Rows of one log through one engine, and what came of them.

    Args:
        settings: of the engine.
        renames: our name -> the name in the log.
        events: the events.jsonl of a run folder, whose guard may have gone back.
    """

    def __init__(
        self, settings: WatchSettings, renames: dict[str, str], events: Path | None = None
    ) -> None:
        self.settings, self.renames, self.path = settings, renames, events
        self.restart()

    def restart(self) -> None:
        """Forget every row, as when a run was resumed from before them."""
        self.memory = Memory(self.settings)
        self.rows: list[Row] = []

    def watch(self, rows: Sequence[Row], acts: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Take in rows; returns the events that are new.

        Args:
            rows: the next ones.
            acts: everything that a guard did, where the log itself tells of it.
        """
        for row in rows:
            known = {own_name(ours): row[theirs] for ours, theirs in self.renames.items()
                     if theirs in row}  # fmt: skip
            self.rows.append(row | known)
        records = acts if self.path is None else read_rows(self.path)
        if rows and sum(record.get("kind") == "guard" for record in records) > len(self.acts):
            # It has gone back: live through it again, this time knowing when.
            self.memory = Memory(self.settings)
            self.memory.replay(merge(self.rows, records), ())
            return [event for event in self.memory.events if event.step >= rows[0]["step"]]
        fresh = self.rows[len(self.rows) - len(rows) :]
        return [event for row in fresh for event in self.memory.take(row)]

    @property
    def acts(self) -> list[Act]:
        """What a guard did."""
        return self.memory.acts

    def story(self, log: Log) -> Story:
        """The story so far, or a sentence where the rows say nothing."""
        names = {key for row in self.rows for key in row}
        for ours, theirs in self.renames.items():
            if theirs not in names:
                raise ValueError(f"--rename {ours}={theirs}: no row has it{hint(theirs, names)}")
        if not any(canonical(row) for row in self.rows):
            some = ", ".join(sorted(names - {"step"})[:12]) or "no numbers"
            raise ValueError(
                f"{log.path} has no metric that the watch knows (it has {some}): name them with "
                "--rename, as in --rename reward=my_score"
            )
        notes = list(log.notes)
        if self.settings.warmup < WatchSettings().warmup:
            notes.append(
                f"{len(self.rows)} rows are few: the first {self.settings.warmup} are the baseline"
            )
        memory = self.memory
        return tell(self.rows, memory.engine, memory.events, notes, self.acts)


def follow(config: WatchConfig, watcher: Watcher, console: Console) -> Log:
    """Read while the run writes, telling each event as it comes, until Ctrl-C or idleness."""
    stream = Stream(config.path, config.kind)
    fresh = time.monotonic()
    try:
        while config.idle is None or time.monotonic() - fresh < config.idle:
            count = stream.poll()
            if count:
                fresh = time.monotonic()
            if stream.resumed:
                watcher.restart()
            fresh_rows = stream.log.rows[len(stream.log.rows) - count :]
            for event in watcher.watch(fresh_rows, stream.log.acts):
                console.print(Text(event.sentence(), STYLES[event.severity]))
            time.sleep(config.every)
    except KeyboardInterrupt:
        console.print("no longer following; the story so far:")
    count = stream.finish()
    watcher.watch(stream.log.rows[len(stream.log.rows) - count :], stream.log.acts)
    return stream.log


def read_renames(words: Sequence[str]) -> dict[str, str]:
    """`reward=my_score` as our name -> theirs.

    Example:
        >>> read_renames(["reward=my_score"])
        {'reward': 'my_score'}
    """
    out = {}
    for word in words:
        ours, equals, theirs = word.partition("=")
        if not equals or not theirs:
            raise ValueError(f"--rename {word} is not of the form reward=my_score")
        if ours not in METRICS:
            known = ", ".join(METRICS)
            raise ValueError(f"--rename {word}: {ours!r} is none of the watch's names: {known}")
        out[ours] = theirs
    return out


def suit(settings: WatchSettings, num_rows: int) -> WatchSettings:
    """Settings for a finished log: a short one gets a shorter warm-up, window and patience."""
    if num_rows >= SHORT:
        return settings
    return replace(
        settings,
        warmup=min(settings.warmup, max(num_rows // 6, 2)),
        window=min(settings.window, max(num_rows // 12, 2)),
        patience=min(settings.patience, max(num_rows // 10, 1)),
    )


def show(story: Story, console: Console, with_events: bool) -> None:
    """Print the story; the events too unless they were printed as they came."""
    for event in story.events if with_events else ():
        console.print(Text(event.sentence(with_remedy=False), STYLES[event.severity]))
    for act in story.acts:
        console.print(
            Text(act.sentence(), STYLES["clear" if act.checkpoint is not None else "stop"])
        )
    console.print(Text(story.text(), f"bold {STYLES[story.condition]}"))
    if story.cause:
        console.print(f"why: {story.diagnosis}")
        console.print(f"what to do: {story.remedy}")
    for note in story.notes:
        console.print(f"note: {note}")
    if story.blind:
        console.print("could not look for, for lack of a metric:")
        for name, lacking in story.blind.items():
            console.print(f"  {name.replace('_', ' ')}: {', '.join(lacking)}")


def hint(word: str, names: set[str]) -> str:
    """What was perhaps meant."""
    close = difflib.get_close_matches(word, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
