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
