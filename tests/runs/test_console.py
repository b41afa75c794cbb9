"""What a training run shows, on a terminal and elsewhere."""

import io
import re

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesotron.runs import console as live
from mesotron.runs.console import LiveView, SafeConsole, chart, shorten, spell_time

WATCHED = {"reward": "reward", "facts/formatted": "format"}


def output(view: LiveView) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


def make(steps: int, terminal: bool, **options) -> LiveView:
    options = {"width": 80, "color_system": None} | options
    console = Console(
        file=io.StringIO(),
        force_terminal=terminal,
        **options,
    )

    return LiveView(steps, WATCHED, console)


def test_without_a_terminal_there_are_a_few_plain_lines():
    view = make(100, terminal=False)
    with view:
        for step in range(1, 101):
            view.update(step, {"reward": step / 100} if step < 100 else {"loss": 0.0})

    lines = output(view).splitlines()
    assert len(lines) == live.PLAIN_LINES + 1  # the first step too
    assert lines[0].startswith("step 1/100  reward 0.010")
    assert lines[-1] == "step 100/100  reward 0.990"  # a missing metric keeps its last value
    assert "\x1b" not in output(view)


def test_a_terminal_shows_progress_sparklines_transcript_and_alert():
    view = make(4, terminal=True)
    with view:
        view.start_at(1, [{"step": 1, "reward": 0.0}])
        view.show_transcript("3 + 4 = 7\x1b[2J")
        view.alarm("step 2 warn, entropy collapse\x1b[2J: lower the rate")
        view.notes["greedy accuracy"] = "0.225 before"
        view.watch_state = lambda: "warn: entropy collapse"

        view.update(
            2,
            {
                "reward": 1.0,
                "facts/formatted": 0.5,
                "cost/projected": 2.5,
            },
        )

        view.update(3, {"cost/spent": 1.25})  # the projection is remembered

    shown = output(view)
    for text in (
        "step 2/4",
        "$1.25 of $2.50",
        "▁█",
        "0.500",
        "7\\x1b[2J",
        "collapse\\x1b[2J",
        "0.225 before",
        "warn: entropy",
    ):
        assert text in shown  # escape sequences are shown, not obeyed

    plain = make(4, terminal=False)
    plain.alarm("step 2 stop, dead")
    assert output(plain) == "step 2 stop, dead\n"


def test_the_time_left_follows_the_recent_speed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = make(10, terminal=False)

    assert view.seconds_left() is None
    for step in (1, 2, 3, 4):
        now[0] += 3.0
        view.update(step, {})

    assert view.seconds_left() == pytest.approx(18.0)
    now[0] += 1000.0
    view.start_at(8, [])  # a pause between two sessions does not count
    now[0] += 5.0
    view.update(9, {})

    assert view.seconds_left() == pytest.approx(5.0)


def test_curves_text_and_durations():
    for values, shown in (([], ""), ([float("nan")], ""), ([2.0, 2.0], "▁▁"), ([0, 0, 1, 1], "▁█")):
        assert chart(values, width=2) == [shown]

    assert chart([0, 1, 0.5], width=3, height=2) == [" █ ", "▁██"]
    assert shorten("x" * 1000).endswith("x ...")
    assert spell_time(59.6) == "1m 0s"


def test_data_cannot_control_the_terminal_through_any_renderable():
    output = io.StringIO()
    console = SafeConsole(
        file=output,
        force_terminal=True,
        color_system="truecolor",
        width=80,
    )

    table = Table("column")
    table.add_row("\x1b[2Jcell\x07")

    for thing in (table, Text("a\x9b31mb", style="red"), "plain\x1b]0;title\x07"):
        console.print(thing, markup=False)

    left = re.sub(r"\x1b\[[0-9;]*m", "", output.getvalue())  # the console's own colors
    assert not set(left) & {"\x1b", "\x07", "\x9b"}
    assert "\x1b[31m" in output.getvalue()
