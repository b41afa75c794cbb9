"""Cost of a run: the estimate of `mesotron plan`, and what earlier sessions spent."""

import math
import re
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from mesotron import cli
from mesotron.config import ObjectiveConfig, PlanConfig, RolloutConfig, TrainConfig
from mesotron.rlvr import spending
from mesotron.rlvr.cost import Estimator, Pace, estimate, find_pace, maths_of
from mesotron.rlvr.spending import Account
from mesotron.runs import RunFolder
from mesotron.runs.resume import Plan
from support.rlvr_tiny import SlowMeter


@pytest.mark.parametrize(("name", "completions"), [("grpo", 8), ("mgrpo", 8), ("corewarding", 16)])
def test_completions_of_an_anchor(name, completions):
    config = PlanConfig(
        objective=ObjectiveConfig(name=name), rollout=RolloutConfig(prompts=1, generations=8)
    )
    assert maths_of(config, 10).completions_per_update == completions


def test_step_math():
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4))
    assert maths_of(config, 5000) == (4, 16, 1250, 20_000)
    config = PlanConfig(rollout=RolloutConfig(prompts=8, generations=2, updates=4))
    # Four of the prompts do not fill a batch.
    assert maths_of(config, 100) == (2, 4, 12 * 4, 12 * 16)


SPENT = {"seconds": 990.0, "dollars": 0.99}


@pytest.mark.parametrize(
    ("spent", "budget", "named"),
    [
        ({"seconds": 1001.0}, 1.0, "budget"),  # an older run: without the time of a step
        (SPENT | {"step": 12.0}, 1.0, "budget"),
        (SPENT | {"step": 12.0}, 1.1, None),
        (SPENT, 0.9905, "budget"),  # half a second is too little to start and exit
        (SPENT | {"step": 12.0, "start": 60.0, "evaluation": 50.0}, 1.1, "budget"),
        (SPENT | {"step": "12", "dollars": None}, 1.1, None),
        ({"dollars": 0.1}, 1.0, "spent.json"),
        ({"seconds": math.nan}, 1.0, "spent.json"),
    ],
)
def test_a_resumed_run_begins_only_what_its_budget_allows(
    tmp_path, monkeypatch, spent, budget, named
):
    monkeypatch.setattr(spending, "Meter", SlowMeter)
    config = TrainConfig(price=3.6, budget=budget)  # 1000 seconds per dollar
    run = RunFolder.create(tmp_path / "run", config, {})
    run.save("spent", spent)
    plan = Plan(config, run.path, run)
    if named is not None:
        with pytest.raises(ValueError, match=named):
            Account(plan, 0.0).__enter__()
        return
    with Account(plan, 0.0):
        assert run.load("spent")["seconds"] == 991.0  # before any work: a kill counts too
    kept = run.load("spent")
    assert kept["seconds"] == 990.0
    assert kept["step"] == (12.0 if spent["step"] == 12.0 else 0.0)  # it made none itself


def test_what_crosses_a_limit_before_the_first_step_is_interrupted(tmp_path):
    config = TrainConfig(time_limit="1.4s")
    run = RunFolder.create(tmp_path / "run", config, {})

    def load() -> None:  # an import, or the first evaluation
        with suppress(KeyboardInterrupt):  # as callbacks of the garbage collector do
            time.sleep(60)
        time.sleep(60)

    with (
        pytest.raises(ValueError, match="time limit"),
        Account(Plan(config, run.path, run), time.monotonic()),
    ):
        load()
    assert run.load("spent")["seconds"] > 0


def test_what_a_budget_buys():
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4), steps=100,
                        budget=45, gpu="h100")  # fmt: skip
    found = estimate(config, 5000, Pace(10.0, 200.0, "as stated"))
    assert found.dollars(1250) == pytest.approx(1250 * 10 / 3600 * 3.95)
    assert found.affordable_steps == int(45 / 3.95 * 360)
    least, expected, most = found.tokens
    assert least < expected == 1600 * 200
    assert most == 1600 * config.rollout.max_tokens
    # The last of two rollouts is complete.
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4, updates=2), steps=3)
    assert estimate(config, 5000, Pace(None, 10.0, "unknown")).tokens[:2] == (32, 320)


def test_oversampled_prompts_cost_time_and_tokens():
    objective = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=2)
    config = PlanConfig(rollout=RolloutConfig(prompts=4, generations=4, max_tokens=100), steps=10,
                        objective=objective, tokens_per_second=160)  # fmt: skip
    pace = find_pace(config, 5000, Estimator(config, 60))
    assert pace.seconds_per_step == 2 * 16 * 50 / 160
    found = estimate(config, 5000, pace)
    assert found.tokens == (320, 320 * 50, (320 + 2 * 160) * 100)  # and two further rounds at most
    one_round = replace(config, objective=replace(objective, dynamic_max_rounds=1))
    assert estimate(one_round, 5000, pace).tokens[2] == 320 * 100


def plan_table(capsys, *words: str) -> dict[str, str]:
    assert cli.main(["plan", *" ".join(words).split()]) == 0
    rows = re.findall(r"│ (.+?) +│ (.+?) +│", capsys.readouterr().out)
    return {name.strip(): value.strip() for name, value in rows}


def test_plan_tables(capsys):
    """Beside those of the quickstart, which test_estimate.py runs."""
    words = "--task.num-train 5000 --rollout.prompts 4 --rollout.generations 4"
    chosen = "--objective.dynamic-sampling resample --objective.dynamic-oversample 3"
    cells = plan_table(capsys, words, chosen, "--model.name me/unknown")
    assert cells["completions per epoch"] == "20,000"
    assert cells["completions per update"] == "16, chosen from 48 or more"
    assert "time of this run" not in cells
    cells = plan_table(capsys, words, "--steps 1250 --seconds-per-step 20 --gpu h100 --budget 20")
    assert cells["20 dollars buy"] == "911 steps of it; 0.729 epochs"
    cells = plan_table(capsys, "--model meta-llama/Llama-3.1-8B-Instruct --gpu 4090")
    assert cells["memory of one 4090"].startswith("does not fit")  # not of this machine


def test_a_plan_advises_only_what_is_faster(capsys):
    words = "plan --model Qwen/Qwen2.5-0.5B-Instruct --lora 16 --gpu h200 --max-tokens 512"
    assert cli.main(words.split()) == 0
    assert "--rollout.fast" not in capsys.readouterr().out
    assert cli.main([*words.split(), "--rollout.no-fast"]) == 0
    assert "--rollout.fast" in capsys.readouterr().out


def test_calibration_measures_the_pace(capsys):
    words = "--calibrate --device cpu --rollout.prompts 2 --rollout.generations 2 --price 1000"
    size = "--rollout.max-tokens 4 --task.num-train 40 --task.num-eval 2"
    cells = plan_table(capsys, words, size)
    assert "s per step" in cells["pace"]
    assert "dollars" in cells["time of this run"]
