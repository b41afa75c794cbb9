"""The diagnosis: phases, cause, last useful step and wasted cost."""

from dataclasses import replace

import pytest

from mesotron.watch import Event
from mesotron.watch.diagnosis import find_phases
from support.watch_streams import FAILURES, STEPS, TURN, diagnosis_of, healthy


def test_phases_and_waste():
    found = diagnosis_of(FAILURES["parser_drift"](3))
    assert TURN - 15 <= (found.useful_step or 0) <= TURN + 5
    assert found.wasted == pytest.approx(0.5, abs=0.08)
    assert found.unit == "time"

    for a, b in zip(found.phases, found.phases[1:]):
        assert a.last == b.first

    healthy_run = diagnosis_of(healthy(0))
    assert [(p.condition, p.last) for p in healthy_run.phases] == [("healthy", STEPS - 1)]
    assert healthy_run.wasted is None


def test_neither_later_failures_nor_cleared_warnings_are_the_cause():
    # Accuracy goes first; repetition, which is higher in the table, comes later.
    rows = [
        {
            "step": k,
            "reward": 0.6 if k < 70 else 0.1,
            "facts/correct": 0.6 if k < 40 else 0.1,
            "repetition": 0.0 if k < 70 else 0.7,
        }
        for k in range(100)
    ]

    found = diagnosis_of(rows)
    assert "repetition" in {event.detector for event in found.events if event.severity == "stop"}
    assert found.cause == "accuracy_collapse"

    lengths = [100.0] * 30 + [20.0] * 10 + [100.0] * 60
    rows = [
        {
            "step": k,
            "completions/mean_length": x,
            "kl": 0.01 if k < 70 else 3.5,
        }
        for k, x in enumerate(lengths)
    ]

    found = diagnosis_of(rows)
    assert [(event.detector, event.severity) for event in found.events] == [
        ("length_collapse", "warn"),
        ("length_collapse", "clear"),
        ("update_explosion", "warn"),
    ]

    assert (found.condition, found.cause) == ("drifting", "update_explosion")


def test_what_was_so_from_the_start_does_not_date_a_failure():
    rows = [
        {
            "step": k,
            "reward": 0.3,
            "entropy": 0.7 if k < 40 else 0.1,
            "repetition": 0.0,
            "groups/zero_signal": 0.4 if k < 40 else 0.9,
            "groups/all_right": 0.1,
        }
        for k in range(80)
    ]

    found = diagnosis_of(rows)
    assert found.cause == "entropy_collapse"
    assert [(p.condition, p.first) for p in found.phases] == [("healthy", 0), ("drifting", 40)]
    assert "repetition" not in {evidence.metric for evidence in found.numbers}


def test_phases_of_one_condition_are_joined():
    warn = Event(
        step=20,
        detector="x",
        severity="warn",
        diagnosis="",
        remedy="",
        began=10,
    )

    clear = replace(warn, step=30, severity="clear", began=None)
    events = [warn, clear, replace(warn, step=50)]
    phases = find_phases(events, 0, 60)

    assert [(p.condition, p.first, p.last) for p in phases] == [
        ("healthy", 0, 10),
        ("drifting", 10, 60),
    ]


@pytest.mark.parametrize(
    ("unit", "column", "wasted"),
    [
        ("steps", {}, 0.5),
        # Completions of the second half are three times as long.
        ("tokens", {"num_tokens": lambda k: k if k < 50 else 50 + 3.0 * (k - 50)}, 0.75),
        ("time", {"step_time": lambda k: 1.0 if k < 50 else 9.0}, 0.9),
    ],
)
def test_the_unit_of_cost(unit, column, wasted):
    rows = [{"step": k, "reward": 0.7 if k < 50 else 0.1} for k in range(100)]
    rows = [row | {name: value(row["step"]) for name, value in column.items()} for row in rows]
    found = diagnosis_of(rows)

    assert found.unit == unit
    assert found.wasted == pytest.approx(wasted, abs=0.03)


@pytest.mark.parametrize(("end", "quoted"), [(0.75, True), (0.3, False)])
def test_a_healthy_run_that_ends_cut_off_says_so(end, quoted):
    rows = [
        {
            "step": k,
            "reward": 0.3 + k / 250,
            "truncated": 0.07 + (end - 0.07) * k / 99,
        }
        for k in range(100)
    ]

    found = diagnosis_of(rows)
    assert (found.condition, found.events) == ("healthy", ())
    assert ("truncated" in found.text()) == quoted
