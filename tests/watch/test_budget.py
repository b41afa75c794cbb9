"""Money and time: the step math, and the meter on a clock of its own."""

import pytest

from mesotron.config import PRICES, SftConfig, TrainConfig, parse_duration
from mesotron.watch.budget import Limits, Meter, Spent, limits_of
from mesotron.watch.spending import sampling_time


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def meter_at(limits: Limits, *moments: float, before: float = 0.0) -> Meter:
    clock = Clock()
    meter = Meter(limits, before=before, began=0.0, clock=clock)
    meter.start()

    for clock.now in moments:
        meter.step()

    return meter


def test_durations():
    for text, seconds in {
        "3h": 10800,
        "90m": 5400,
        "1h30m": 5400,
        "45": 45,
        "1.5h": 5400,
    }.items():
        assert parse_duration(text) == seconds

    for text in ("", "3 hours", "-1h", "0s", "1h30"):
        with pytest.raises(ValueError, match=repr(text)):
            parse_duration(text)


def test_a_step_that_would_cross_the_time_limit_does_not_begin():
    limits = Limits(seconds=50)
    assert meter_at(limits, 10, 20, 30).refusal() is None
    assert meter_at(limits, 10, 20, 30, 41).refusal()

    # The slowest recent step counts.
    assert meter_at(limits, 2, 17, 19, 34).refusal() is None
    assert meter_at(limits, 2, 18, 19, 35).refusal()

    # So does saving.
    meter = meter_at(limits, 5, 10)
    meter.clock.now = 20  # pyright: ignore
    meter.saved()

    assert meter.slowest_save == 10
    meter.clock.now = 36  # pyright: ignore
    meter.step()

    assert meter.refusal()  # 36 + 26 + 10


def test_a_budget_counts_earlier_sessions_and_a_time_limit_does_not():
    limits = Limits(dollars=1.0, price=3.6)  # 1000 seconds
    assert meter_at(limits, 100, 200).refusal() is None
    assert meter_at(limits, 100, 200, before=701).refusal()
    assert meter_at(Limits(seconds=1000), 100, 200, before=5000).refusal() is None

    # Earlier sessions keep their price.
    meter = Meter(
        Limits(price=8.0),
        before=3600.0,
        paid=2.0,
        began=0.0,
        clock=lambda: 3600.0,
    )

    meter.start()
    assert (meter.dollars(meter.before), meter.dollars(meter.spent)) == (2.0, 10.0)


def test_a_slow_evaluation_is_remembered_and_no_part_of_a_step():
    clock = Clock()
    meter = Meter(Limits(seconds=600.0), began=0.0, clock=clock)
    with meter.evaluation():  # before training
        clock.now += 100

    meter.start()
    for _ in range(40):  # more steps than are remembered
        clock.now += 10
        meter.step()

    assert (meter.slowest_step, meter.slowest_evaluation) == (10, 100)
    assert meter.refusal() is None  # 500 + 10
    assert meter.refusal(evaluations=1)  # 500 + 110


def test_projection_and_price(monkeypatch):
    meter = meter_at(Limits(price=3600.0), 2, 4, before=10)
    assert (meter.spent, meter.projected(5), meter.dollars(2.0)) == (14, 24, 2.0)
    assert meter_at(Limits()).projected(5) is None

    with pytest.raises(ValueError, match="--budget 45"):
        limits_of(TrainConfig(budget=45))

    assert limits_of(SftConfig(budget=45, gpu="h100")).price == PRICES["h100"] == 3.95
    assert limits_of(TrainConfig(price=2.0, gpu="h100")).price == 2.0

    monkeypatch.setenv("WORLD_SIZE", "4")
    assert limits_of(TrainConfig(price=2.0)).price == 8.0


@pytest.mark.parametrize(
    ("known", "limits", "need", "refused"),
    [
        (Spent(), Limits(seconds=10.0), {}, False),  # nothing is known, nothing is over
        (Spent(), Limits(seconds=4.0), {"steps": 0}, True),  # over before the first step
        (Spent(step=6.0), Limits(seconds=10.0), {}, True),
        (Spent(step=6.0), Limits(seconds=12.0), {}, False),
        (Spent(step=6.0, evaluation=2.0), Limits(seconds=12.0), {"evaluations": 1}, True),
        (Spent(step=6.0, start=9.0), Limits(seconds=12.0), {"starts": True}, True),
        (Spent(step=6.0), Limits(dollars=10.0, price=3600.0), {}, True),
        (Spent(evaluation=6.0), Limits(dollars=10.0, price=3600.0), {"steps": 0}, False),
    ],
)
def test_limits_bind_before_the_first_step(known, limits, need, refused):
    meter = Meter(
        limits,
        known=known,
        began=0.0,
        clock=lambda: 5.0,
    )

    meter.start()
    assert (meter.refusal(**need) is not None) is refused


def test_what_is_known_before_the_first_step():
    assert sampling_time(10.0, problems=20, completions=8) == 4.0
    assert sampling_time(10.0, problems=4, completions=8) == 10.0  # at least as long

    meter = Meter(
        Limits(price=3600.0),
        before=2.0,
        paid=1.0,
        began=0.0,
        clock=lambda: 5.0,
    )

    meter.calibrate(4.0)
    meter.calibrate(9.0)  # the first is kept
    assert meter.record(ahead=1.0) == Spent(
        seconds=8.0,
        dollars=7.0,
        step=4.0,
    )
