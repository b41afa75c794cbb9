"""Progress of a training run: a live view on a terminal, a plain line now and then elsewhere."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mesotron.runs.files import printable

BARS = " ▁▂▃▄▅▆▇█"
BAR_WIDTH = 40
CHART_HEIGHT = 4  # lines of the first metric's curve
PLAIN_LINES = 20  # per run, without a terminal
WINDOW = 20  # steps from which the time left is estimated
SHOWN_CHARACTERS = 600
SPENT = "cost/spent"
PROJECTED = "cost/projected"  # dollars


class SafeConsole(Console):
    """A console on which data cannot move the cursor or change colors: what is printed is filtered
    here, whatever it is part of."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        safe = (one if one.control else one._replace(text=printable(one.text)) for one in buffer)
        return super()._render_buffer(safe)


class LiveView:
    """Progress, time left, cost, and curves of `watched` metrics (name -> label), the first large.

    Attributes:
        notes: further lines, label -> text.
        watch_state: returns the watch's state in a few words.
    """

    def __init__(self, steps: int, watched: dict[str, str], console: Console | None = None) -> None:
        self.steps = steps
        self.console = console or SafeConsole()
        self._watched = watched
        self._history: dict[str, list[float]] = {name: [] for name in watched}
        self._times: deque[tuple[int, float]] = deque([(0, time.monotonic())], maxlen=WINDOW)
        self._transcript = ""
        self._alarm = ""
        self._spent: float | None = None  # dollars
        self._projected: float | None = None  # dollars
        self.notes: dict[str, str] = {}
        self.watch_state: Callable[[], str] | None = None
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def start_at(self, step: int, rows: Sequence[dict]) -> None:
        self._times.clear()
        self._times.append((step, time.monotonic()))

        for row in rows:
            self._remember(row)

    def update(self, step: int, row: dict) -> None:
        """Show one more row of metrics; a missing metric keeps its last value."""
        self._times.append((step, time.monotonic()))
        self._remember(row)

        if self.console.is_terminal:
            self._live.update(self._view(), refresh=True)
        elif step % max(1, self.steps // PLAIN_LINES) == 0 or step in (1, self.steps):
            self.say(self._plain_line(step))

    def _plain_line(self, step: int) -> str:
        parts = [f"step {step}/{self.steps}"]
        for label, values in self._known().items():
            parts.append(f"{label} {spell_number(values[-1])}")

        if step < self.steps:
            parts.append(f"{spell_time(self.seconds_left())} left")

        return "  ".join([*parts, *self._cost()])

    def show_transcript(self, text: str) -> None:
        self._transcript = shorten(text)

    def alarm(self, sentence: str) -> None:
        self._alarm = shorten(sentence)
        self.say(sentence)

    def say(self, sentence: str) -> None:
        if self.console.is_terminal:  # which would break a long line inside a word
            self.console.print(sentence, highlight=False, markup=False)
        else:
            print_line(self.console, sentence)

    def seconds_left(self) -> float | None:
        (first, began), (last, ended) = self._times[0], self._times[-1]
        if last == first:
            return None
        return (ended - began) / (last - first) * (self.steps - last)

    def _remember(self, row: dict) -> None:
        for name, values in self._history.items():
            if isinstance(row.get(name), int | float):
                values.append(float(row[name]))

        self._spent = row.get(SPENT, self._spent)
        self._projected = row.get(PROJECTED, self._projected)

    def _cost(self) -> list[str]:
        if self._spent is None:
            return []

        if self._projected is None:
            ahead = ""
        else:
            ahead = f" of ${self._projected:,.2f}"

        return [f"${self._spent:,.2f}{ahead}"]

    def _known(self) -> dict[str, list[float]]:
        """Label -> values of the watched metrics that have any."""
        known = {}
        for name, label in self._watched.items():
            if self._history[name]:
                known[label] = self._history[name]

        return known

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress()]
        if self._transcript:
            parts.append(self._latest_transcript())

        if self._alarm:
            parts.append(Text(f"last alarm: {self._alarm}", style="yellow"))

        return Group(*parts)

    def _progress(self) -> Table:
        """One line for the steps, one for each metric and each note."""
        table = Table.grid(padding=(0, 2))
        width = max(min(BAR_WIDTH, self.console.width - 40), 8)
        step, _ = self._times[-1]

        bar = ProgressBar(total=self.steps, completed=step, width=width)
        left = f"{spell_time(self.seconds_left())} left"
        table.add_row(f"step {step}/{self.steps}", bar, "  ".join([left, *self._cost()]))

        first = next(iter(self._watched.values()))
        for label, values in self._known().items():
            height = CHART_HEIGHT if label == first else 1
            curve = "\n".join(chart(values, width, height))
            table.add_row(label, curve, spell_number(values[-1]) + spell_range(values))

        for label, text in self.notes.items():
            table.add_row(label, text)
        if self.watch_state is not None:
            table.add_row("watch", self.watch_state())

        return table

    def _latest_transcript(self) -> Panel:
        used = len(self._watched) + CHART_HEIGHT + len(self.notes) + 8
        height = max(self.console.height - used, 3)  # of a low terminal
        lines = self._transcript.splitlines()[-height:]

        return Panel(Text("\n".join(lines)), title="latest transcript")


def print_line(console: Console, text: str) -> None:
    """Print one unwrapped line, so that paths in it can be copied."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def chart(values: Sequence[float], width: int = 40, height: int = 1) -> list[str]:
    """Numbers as bars in `height` lines of at most `width` columns, averaged if there are more."""
    finite = list(filter(math.isfinite, values))
    if not finite:
        return [""]

    means = []
    size = -(-len(finite) // width)
    for start in range(0, len(finite), size):
        chunk = finite[start : start + size]
        means.append(sum(chunk) / len(chunk))

    low = min(means)
    span = max(means) - low or 1.0
    levels = [1 + int((x - low) / span * (8 * height - 1)) for x in means]  # eighths of a line

    lines = []
    for below in reversed(range(height)):
        filled = [min(max(level - 8 * below, 0), 8) for level in levels]
        lines.append("".join(BARS[eighths] for eighths in filled))

    return lines


def spell_range(values: Sequence[float]) -> str:
    """`  (0.1 to 0.9)`, or nothing for fewer than two finite values."""
    finite = list(filter(math.isfinite, values))
    if len(finite) < 2:
        return ""

    return f"  ({spell_number(min(finite))} to {spell_number(max(finite))})"


def spell_number(x: float) -> str:
    """Three decimals; two significant digits if small, none if large."""
    if abs(x) >= 1000 or (abs(x) >= 100 and x == round(x)):
        return f"{x:,.0f}"
    if abs(x) >= 0.01 or x == 0:
        return f"{x:.3f}"

    return f"{x:.2g}"


def spell_time(seconds: float | None) -> str:
    """A duration in its two largest units."""
    if seconds is None:
        return "?"

    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h {minutes}m"
    if minutes:
        return f"{minutes}m {whole % 60}s"

    return f"{whole}s"


def shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    return printable(text[:limit]) + (" ..." if len(text) > limit else "")
