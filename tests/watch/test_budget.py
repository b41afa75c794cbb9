"""Money and time: the step math, the meter on a clock of its own, and `mesotron plan`."""

import re
from dataclasses import replace

import pytest

from mesotron import cli
from mesotron.config import (
    PRICES,
    ObjectiveConfig,
    PlanConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
    parse_duration,
)
from mesotron.rlvr.cost import Pace, completions_per_update, estimate, find_pace, maths_of
from mesotron.rlvr.spending import metered, write_spent
from mesotron.runs import RunFolder
from mesotron.watch.budget import Limits, Meter, limits_of, step_math


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def meter_at(limits: Limits, *moments: float, before: float = 0.0) -> Meter:
    """A meter whose training began at 0 and whose steps ended at these moments."""
    clock = Clock()
    meter = Meter(limits, before=before, began=0.0, clock=clock)
    meter.start()
    for clock.now in moments:
        meter.step()
    return meter


def test_five_thousand_prompts_are_1250_updates_and_20000_completions():
    """Batches of one prompt, accumulated four times, four rollouts of each."""
    found = step_math(num_prompts=5000, prompts=1 * 4, generations=4)
    assert (found.updates_per_epoch, found.completions_per_epoch) == (1250, 20_000)
    assert (found.prompts_per_update, found.completions_per_update) == (4, 16)


def test_several_updates_share_a_rollout():
    found = step_math(num_prompts=100, prompts=8, generations=2, updates=4)
    assert found.updates_per_epoch == 12 * 4  # four prompts do not fill a batch
    assert found.completions_per_epoch == 12 * 16
    assert found.completions_per_update == 4


@pytest.mark.parametrize(("name", "completions"), [("grpo", 8), ("mgrpo", 8), ("corewarding", 16)])
def test_an_anchor_inside_the_group_costs_nothing_and_one_beside_it_does(name, completions):
    config = PlanConfig(
        objective=ObjectiveConfig(name=name), rollout=RolloutConfig(prompts=1, generations=8)
    )
    assert maths_of(config, 10).completions_per_update == completions


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h", 10800), ("90m", 5400), ("1h30m", 5400), ("45", 45), ("1.5h", 5400)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3 hours", "-1h", "0s", "1h30", "3x"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="--time-limit"):
        parse_duration(text)


def test_a_step_that_would_cross_the_time_limit_is_not_begun():
    assert meter_at(Limits(seconds=50), 10, 20, 30).refusal() is None
    assert "time limit of 50 s" in (meter_at(Limits(seconds=50), 10, 20, 30, 41).refusal() or "")


def test_the_slowest_recent_step_and_saving_count():
    limits = Limits(seconds=50)
    assert meter_at(limits, 2, 17, 19, 34).refusal() is None
    assert meter_at(limits, 2, 18, 19, 35).refusal()
    meter = meter_at(limits, 5, 10)
    meter.clock.now = 20  # pyright: ignore
    meter.saved()
    assert meter.slowest_save == 10
    meter.clock.now = 36  # pyright: ignore
    meter.step()
    assert "for saving" in (meter.refusal() or "")  # 36 + 26 + 10


def test_a_budget_counts_what_earlier_sessions_took():
    limits = Limits(dollars=1.0, price=3.6)  # 1000 seconds
    assert meter_at(limits, 100, 200).refusal() is None
    assert "budget of 1 dollars" in (meter_at(limits, 100, 200, before=701).refusal() or "")
    assert meter_at(Limits(seconds=1000), 100, 200, before=5000).refusal() is None


def test_a_resumed_run_does_not_begin_a_step_that_its_budget_has_no_room_for(tmp_path):
    config = TrainConfig(price=3.6, budget=1.0)  # 1000 seconds
    run = RunFolder.create(tmp_path / "run", config, {})
    run.save("spent", {"seconds": 990.0, "dollars": 0.99, "step": 12.0})
    with pytest.raises(ValueError, match="--budget"):
        metered(config, run, None).__enter__()
    with metered(replace(config, budget=1.1), run, None) as meter:
        assert meter.before == 990.0
    assert run.load("spent")["step"] == 12.0  # it made none itself
    run.save("spent", {"seconds": 1000.0, "dollars": 1.0})  # as older runs have it
    with pytest.raises(ValueError, match="--budget"):
        metered(config, run, None).__enter__()


def test_what_a_step_took_is_written_down_for_the_next_session(tmp_path):
    run = RunFolder.create(tmp_path / "run", TrainConfig(), {})
    write_spent(meter_at(Limits(), 10, 30, 35), run)
    assert run.load("spent")["step"] == 20.0


def test_earlier_sessions_cost_what_they_did_then():
    now = iter([3600.0])
    dear = Limits(price=8.0)
    meter = Meter(dear, before=3600.0, paid=2.0, began=0.0, clock=lambda: next(now))
    meter.start()
    assert meter.dollars(meter.before) == 2.0
    assert meter.dollars(meter.spent) == 10.0


def test_a_slow_evaluation_is_not_forgotten_between_two():
    now = [0.0]
    meter = Meter(Limits(seconds=500.0), began=0.0, clock=lambda: now[0])
    meter.start()
    with meter.evaluation():
        now[0] += 100
    for _ in range(40):  # more than are remembered
        now[0] += 10
        meter.step()
    # 500 seconds are gone.
    meter.limits = Limits(seconds=600.0)
    assert meter.refusal() is None
    assert "a step of up to 110 s" in (meter.refusal(evaluates=True) or "")


def test_a_projection_follows_the_pace():
    meter = meter_at(Limits(price=3600.0), 2, 4, before=10)
    assert meter.spent == 14
    assert meter.projected(5) == 24
    assert meter.dollars(2.0) == 2.0
    assert meter_at(Limits()).projected(5) is None


def test_a_budget_needs_a_price(monkeypatch):
    with pytest.raises(ValueError, match="--budget 45"):
        limits_of(TrainConfig(budget=45))
    assert limits_of(SftConfig(budget=45, gpu="h100")).price == PRICES["h100"] == 3.95
    assert limits_of(TrainConfig(price=2.0, gpu="h100")).price == 2.0
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert limits_of(TrainConfig(price=2.0)).price == 8.0
    with pytest.raises(ValueError, match="--price -1 must be above 0"):
        limits_of(TrainConfig(price=-1))


def test_what_a_budget_buys_of_an_epoch():
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4), steps=100,
                        budget=45, gpu="h100")  # fmt: skip
    found = estimate(config, 5000, Pace(10.0, 200.0, "as stated"))
    assert found.dollars(1250) == pytest.approx(1250 * 10 / 3600 * 3.95)
    assert found.affordable_steps == int(45 / 3.95 * 360)
    least, expected, most = found.tokens
    assert least < expected == 1600 * 200
    assert most == 1600 * config.rollout.max_tokens


def test_prompts_that_are_sampled_to_choose_from_cost_time_and_tokens():
    objective = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4, max_tokens=100), steps=10,
                        objective=objective, tokens_per_second=160)  # fmt: skip
    pace = find_pace(config, 5000)
    assert pace.seconds_per_step == 2 * 16 * 50 / 160
    found = estimate(config, 5000, pace)
    assert found.tokens == (320, 320 * 50, (320 + 2 * 160) * 100)  # and two further rounds at most
    one_round = replace(config, objective=replace(objective, dynamic_max_rounds=1))
    assert estimate(one_round, 5000, pace).tokens[2] == 320 * 100


@pytest.mark.parametrize(
    ("processes", "oversample", "prompts"), [("1", 1.1, 9), ("2", 1.1, 10), ("2", 1.4, 12)]
)
def test_a_plan_adds_whole_prompts_on_each_process(monkeypatch, processes, oversample, prompts):
    monkeypatch.setenv("WORLD_SIZE", processes)
    objective = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=oversample)
    config = PlanConfig(rollout=RolloutConfig(prompts=8, generations=4), objective=objective)
    assert completions_per_update(config, 5000) == prompts * 4


def test_the_last_rollout_is_sampled_whole_though_the_run_ends_within_it():
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4, updates=2), steps=3)
    assert estimate(config, 5000, Pace(None, 10.0, "unknown")).tokens[:2] == (32, 320)


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The cells of the printed table."""
    rows = re.findall(r"│ (.+?) +│ (.+?) +│", capsys.readouterr().out)
    return {name.strip(): value.strip() for name, value in rows}


def test_a_plan_as_typed(capsys):
    words = "plan --task.num-train 5000 --rollout.prompts 4 --rollout.generations 4 --steps 1250"
    assert cli.main(words.split()) == 0
    cells = shown(capsys)
    assert cells["updates per epoch"] == "1,250"
    assert cells["completions per epoch"] == "20,000"
    assert cells["completions per update"] == "16"
    assert "time of this run" not in cells
    chosen = "--objective.dynamic-sampling resample --objective.dynamic-oversample 3"
    assert cli.main([*words.split(), *chosen.split()]) == 0
    assert shown(capsys)["completions per update"] == "16, chosen from 48 or more"
    chosen += " --objective.dynamic-max-rounds 1"
    assert cli.main([*words.split(), *chosen.split()]) == 0
    assert shown(capsys)["completions per update"] == "16, chosen from 48"
    more = "--seconds-per-step 20 --gpu h100 --budget 20"
    assert cli.main([*words.split(), *more.split()]) == 0
    cells = shown(capsys)
    assert cells["time of this run"] == "6h 56m, 27.43 dollars"
    assert cells["20 dollars buy"] == "911 steps of it; 0.729 epochs"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seconds-per-step 2 --tokens-per-second 9", "--calibrate"),
        ("--seconds-per-step 0", "--seconds-per-step 0"),
        ("--tokens-per-second 0", "--tokens-per-second 0"),
        ("--budget 3", "--budget"),
        ("--task.num-train 3", "--task.num-train 3"),
        (
            "--objective.dynamic-sampling resample --objective.dynamic-oversample 3 "
            "--task.num-train 47",
            "--objective.dynamic-oversample 3",
        ),
        ("--time-limit soon", "'soon'"),
        ("absent_recipe", "unknown recipe 'absent_recipe'"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_one_sentence(capsys, words, told):
    assert cli.main(["plan", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_three_steps_give_a_pace(capsys):
    words = (
        "plan --calibrate --device cpu --rollout.prompts 2 --rollout.generations 2 "
        "--rollout.max-tokens 4 --task.num-train 40 --task.num-eval 2 --price 1000"
    )
    assert cli.main(words.split()) == 0
    cells = shown(capsys)
    assert "s per step" in cells["pace"]
    assert "dollars" in cells["time of this run"]
