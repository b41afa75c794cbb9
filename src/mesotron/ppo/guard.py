"""The watch inside a PPO run: every row goes through the engine, and the guard may end the run.

It reads fruit as the reward, and entropy, KL divergence, gradient, weight change, games cut off and
time by the names in `mesotron.watch.metrics`. It rolls nothing back.
"""

from __future__ import annotations

from collections.abc import Callable

from mesotron.config import SnakeConfig
from mesotron.runs import RunFolder
from mesotron.runs.lines import Row
from mesotron.watch import Engine, Event
from mesotron.watch.diagnosis import Diagnosis, diagnose

# Rounding to bfloat16 makes a few ten thousandths.
MOST_MISMATCH = 0.01


class Guard:
    """Watches the rows of a run, writes events, and says when the run is to end.

    A resumed run is judged by all of its rows: those from before are taken in at the start.

    Args:
        config: its `guard`; runs side by side are judged by their means and never ended, since one
            bad rate of a sweep says nothing of the others.
        folder: of the run; its events.jsonl gets every event.
        say: told of each event, unless the guard is off.

    Attributes:
        stopped_by: the event that ends the run, or None.
    """

    def __init__(self, config: SnakeConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        self.config, self.folder, self.say = config, folder, say
        self.engine = Engine()
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.stopped_by: Event | None = None
        self._doubted = False

    def take_up(self) -> None:
        """Take in what the run has written before; what was told then is not told again."""
        for row in self.folder.rows("metrics"):
            self._judge(row)

    def take(self, row: Row) -> None:
        """Take in a new row and tell what is new."""
        self._doubt(row)
        for event in self._judge(row):
            self.folder.append("events", event.record())
            if self.config.guard != "off":
                self.say(event.sentence())
            ends = self.config.guard == "stop" and event.severity == "stop"
            if ends and self.config.is_single and self.stopped_by is None:
                self.stopped_by = event

    def story(self) -> Diagnosis:
        """The run so far in words; it has at least one row."""
        return diagnose(self.rows, self.engine, self.events)

    def _doubt(self, row: Row) -> None:
        """Say once that the device or its compiler cannot be trusted, whatever the guard."""
        mismatch = row.get("policy/mismatch", 0.0)
        if mismatch > MOST_MISMATCH and not self._doubted:
            self._doubted = True
            self.say(
                f"policy/mismatch is {mismatch:.2g} at update {row['step']}: moves are scored by "
                "other numbers than they were made by. The device or its compiler is at fault: "
                "try another --dtype, --attention xla or another version of jax"
            )

    def _judge(self, row: Row) -> list[Event]:
        self.rows.append(row)
        new = self.engine.update(row)
        self.events += new
        return new
