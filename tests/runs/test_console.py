"""What a running training shows, on a terminal and elsewhere, and how it is asked to stop."""

import io
import os
import signal

import pytest
from rich.console import Console

from mesotron.runs import console as live
from mesotron.runs.console import LiveView, shorten, sparkline, spell_time
from mesotron.runs.signals import StopRequest

WATCHED = {"reward": "reward", "facts/formatted": "format"}


def output(view: LiveView) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


def make(steps: int, terminal: bool) -> LiveView:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    return LiveView(steps, WATCHED, console)


def test_without_a_terminal_there_are_a_few_plain_lines():
    view = make(100, terminal=False)
    with view:
        for step in range(1, 101):
            view.update(step, {"reward": step / 100, "loss": 0.0})
    lines = output(view).splitlines()
    assert len(lines) == live.PLAIN_LINES + 1  # the first step too
    assert lines[0].startswith("step 1/100  reward 0.010")
    assert lines[-1] == "step 100/100  reward 1.000"  # no format was logged, no time is left
    assert "\x1b" not in output(view)


def test_a_terminal_shows_progress_sparklines_and_the_transcript():
    view = make(4, terminal=True)
    with view:
        view.start_at(1, [{"step": 1, "reward": 0.0}])
        view.show_transcript("3 + 4 = 7\x1b[2J")
        view.update(2, {"reward": 1.0, "facts/formatted": 0.5})
    shown = output(view)
    assert "step 2/4" in shown
    assert "▁█" in shown
    assert "0.500" in shown
    assert "latest transcript" in shown
    assert "3 + 4 = 7\\x1b[2J" in shown  # shown, not obeyed


def test_the_last_alarm_stays_in_view_and_is_obeyed_by_no_terminal():
    view = make(4, terminal=True)
    with view:
        view.alarm("step 2 warn, entropy collapse\x1b[2J: lower the rate")
        view.update(3, {"reward": 1.0})
    shown = output(view)
    assert "last alarm: step 2 warn, entropy collapse\\x1b[2J: lower the rate" in shown
    plain = make(4, terminal=False)
    plain.alarm("step 2 stop, dead")
    assert output(plain) == "step 2 stop, dead\n"  # once, as a line


@pytest.mark.parametrize("terminal", [True, False])
def test_the_cost_is_shown_where_rows_have_one(terminal):
    view = make(4, terminal)
    with view:
        view.update(1, {"reward": 0.5})
        assert "$" not in output(view)
        view.update(2, {"reward": 0.5, "cost/spent": 1.25, "cost/projected": 2.5})
        assert "left  $1.25 of $2.50" in output(view)
        view.update(4, {"reward": 0.5, "cost/spent": 2.5})  # what was projected is remembered
    assert "$2.50 of $2.50" in output(view)


@pytest.mark.parametrize(("height", "shown"), [(40, 20), (16, 6), (5, 3)])
def test_a_low_terminal_keeps_the_end_of_a_transcript(height, shown):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=height)
    view = LiveView(4, WATCHED, console)
    view.show_transcript("\n".join(f"line {k}" for k in range(20)))
    assert view._fit(view._transcript).splitlines()[-1] == "line 19"
    assert len(view._fit(view._transcript).splitlines()) == shown


def test_a_narrow_terminal_gets_short_bars():
    console = Console(file=io.StringIO(), force_terminal=True, width=50, color_system=None)
    view = LiveView(400, WATCHED, console)
    with view:
        for step in range(1, 101):
            view.update(step, {"reward": step / 100})
    last = output(view).split("step 100/400")[-1]
    assert "1.000  (0.010 to 1.000)" in last  # on one line


def test_a_row_without_a_metric_keeps_its_last_value():
    view = make(2, terminal=False)
    view.update(1, {"reward": 0.25})
    view.update(2, {"loss": 0.0})
    assert output(view).splitlines()[1] == "step 2/2  reward 0.250"


def test_the_time_left_follows_the_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = make(10, terminal=False)
    assert view.seconds_left() is None
    for step in (1, 2, 3, 4):
        now[0] += 3.0
        view.update(step, {})
    assert view.seconds_left() == pytest.approx(18.0)
    now[0] += 1000.0
    view.start_at(8, [])  # a pause between two sessions is no pace
    now[0] += 5.0
    view.update(9, {})
    assert view.seconds_left() == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("values", "shown"),
    [([], ""), ([float("nan")], ""), ([2.0, 2.0], "▁▁"), ([0, 1], "▁█"), ([0, 0, 1, 1], "▁█")],
)
def test_sparklines(values, shown):
    assert sparkline(values, width=2) == shown


def test_long_text_is_cut_and_times_are_spelled():
    assert shorten("x" * 1000).endswith("x ...")
    assert spell_time(59.6) == "1m 0s"


def test_the_first_signal_asks_and_the_second_ctrl_c_stops():
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(said.append, "continue it") as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)  # a second word of another kind changes nothing
        with pytest.raises(KeyboardInterrupt, match="continue it"):
            os.kill(os.getpid(), signal.SIGINT)
    assert said == ["Ctrl-C: finishing this step, then saving; Ctrl-C again stops at once"]
    assert signal.getsignal(signal.SIGINT) is before
