"""Money and time: limits, prices and projections, on a clock that only the test moves."""

import pytest

from mesotron.config import GPUS, SftConfig, TrainConfig, parse_duration
from mesotron.watch.budget import Budget, Limits, Spent, limits_of, sampling_time


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def budget_at(limits: Limits, *moments: float, before: float = 0.0) -> tuple[Budget, Clock]:
    """A budget of a run whose steps ended at these moments."""
    clock = Clock()
    budget = Budget(limits, earlier=Spent(seconds=before), began=0.0, clock=clock)
    budget.start()

    for moment in moments:
        clock.now = moment
        budget.step()

    return budget, clock


def refusal_at(limits: Limits, *moments: float, before: float = 0.0) -> str | None:
    budget, _ = budget_at(limits, *moments, before=before)
    return budget.refusal()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h", 10800), ("90m", 5400), ("1h30m", 5400), ("45", 45), ("1.5h", 5400)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "3 hours", "-1h", "0s", "1h30"])
def test_other_durations_are_refused(text):
    with pytest.raises(ValueError, match=repr(text)):
        parse_duration(text)


def test_a_step_that_would_cross_the_time_limit_does_not_begin():
    limits = Limits(seconds=50)
    assert refusal_at(limits, 10, 20, 30) is None
    assert refusal_at(limits, 10, 20, 30, 41)

    # The slowest recent step counts.
    assert refusal_at(limits, 2, 17, 19, 34) is None
    assert refusal_at(limits, 2, 18, 19, 35)


def test_saving_counts_toward_the_next_step():
    budget, clock = budget_at(Limits(seconds=50), 5, 10)

    clock.now = 20
    budget.saved()
    assert budget.slowest_save == 10

    clock.now = 36
    budget.step()
    assert budget.refusal()  # 36 + 26 + 10


def test_a_budget_counts_earlier_sessions_and_a_time_limit_does_not():
    limits = Limits(dollars=1.0, price=3.6)  # 1000 seconds
    assert refusal_at(limits, 100, 200) is None
    assert refusal_at(limits, 100, 200, before=701)
    assert refusal_at(Limits(seconds=1000), 100, 200, before=5000) is None


def test_earlier_sessions_keep_their_price():
    budget = Budget(
        Limits(price=8.0),
        earlier=Spent(seconds=3600.0, dollars=2.0),
        began=0.0,
        clock=lambda: 3600.0,
    )
    budget.start()

    assert budget.dollars(3600.0) == 2.0
    assert budget.dollars(budget.spent) == 10.0


def test_a_slow_evaluation_is_remembered_and_no_part_of_a_step():
    clock = Clock()
    budget = Budget(Limits(seconds=600.0), began=0.0, clock=clock)
    with budget.evaluation():  # before training
        clock.now += 100

    budget.start()
    for _ in range(40):  # more steps than are remembered
        clock.now += 10
        budget.step()

    assert budget.slowest_step == 10
    assert budget.slowest_evaluation == 100
    assert budget.refusal() is None  # 500 + 10
    assert budget.refusal(evaluations=1)  # 500 + 110


def test_projection_and_dollars():
    budget, _ = budget_at(Limits(price=3600.0), 2, 4, before=10)
    assert budget.spent == 14
    assert budget.projected(5) == 24
    assert budget.dollars(2.0) == 2.0

    budget, _ = budget_at(Limits())
    assert budget.projected(5) is None


def test_prices(monkeypatch):
    with pytest.raises(ValueError, match="--budget 45"):
        limits_of(TrainConfig(budget=45))

    assert limits_of(SftConfig(budget=45, gpu="h100")).price == GPUS["h100"].price == 3.95
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
    budget = Budget(limits, known=known, began=0.0, clock=lambda: 5.0)
    budget.start()
    assert (budget.refusal(**need) is not None) is refused


def test_an_evaluation_bounds_the_time_of_a_step():
    assert sampling_time(10.0, problems=20, completions=8) == 4.0
    assert sampling_time(10.0, problems=4, completions=8) == 10.0  # at least as long


def test_what_is_known_before_the_first_step():
    budget = Budget(
        Limits(price=3600.0),
        earlier=Spent(seconds=2.0, dollars=1.0),
        began=0.0,
        clock=lambda: 5.0,
    )
    budget.calibrate(4.0)
    budget.calibrate(9.0)  # the first is kept

    assert budget.record(ahead=1.0) == Spent(seconds=8.0, dollars=7.0, step=4.0)
