"""The corpora of runs: their lists, the outcome rule, the labels, the baseline, the figures."""

import json
import math
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from mesotron.arguments import parse
from mesotron.cli import COMMANDS
from mesotron.config import TaskConfig
from mesotron.rlvr.objectives import trl_arguments
from mesotron.rlvr.tasks.load import load_task
from mesotron.rlvr.train import check

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "watch"
sys.path.insert(0, str(HERE))

import corpus  # noqa: E402
import evaluate  # noqa: E402
import gamed_rewards  # noqa: E402
import labelled  # noqa: E402
import rescues  # noqa: E402
from held_out_runs import NEW_FAILING, NEW_HEALTHY, held_out_runs, held_out_settings  # noqa: E402
from labels import label  # noqa: E402
from runs import RESCUE_SEEDS, RESCUES, SETTINGS, rescue_runs, tuning_runs  # noqa: E402
from static_thresholds import StaticThresholds  # noqa: E402

# --- the list -----------------------------------------------------------------------------


def test_the_corpora_are_large_and_share_every_failure_but_no_run():
    tuning, held_out = tuning_runs(), held_out_runs()
    for runs in (tuning, held_out):
        assert len({run.name for run in runs}) == len(runs) >= 60
        assert sum(run.setting.kind == "healthy" for run in runs) >= 25
        assert sum(run.setting.kind != "healthy" for run in runs) >= 30
    assert {run.setting.kind for run in tuning} - {"truncation"} <= {
        run.setting.kind for run in held_out
    }
    assert max(run.seed for run in tuning) < 100 <= min(run.seed for run in held_out)


@pytest.mark.parametrize(
    "setting",
    [*SETTINGS, *NEW_HEALTHY, *NEW_FAILING],
    ids=lambda setting: setting.name,
)
def test_every_run_can_be_typed(setting):
    run = next(run for run in (*tuning_runs(), *held_out_runs()) if run.setting == setting)
    kind = "held_out" if run.seed >= 100 else "tuning"
    typed = corpus.command(kind, run, Path("nowhere"), "cpu")
    command = COMMANDS["train"]
    words = typed[typed.index("train") + 1 :]
    config = parse(command.config_type, words, "mesotron train", command.presets)
    check(config)
    trl_arguments(config.objective, config.rollout, config.optim)
    for part in config.reward.parts:
        module, _, name = part.partition(":")
        assert not name or (module == "gamed_rewards" and callable(getattr(gamed_rewards, name)))


def test_a_rescue_has_itself_alone_and_a_healthy_run_to_be_compared_with():
    names = {run.name for run in (*tuning_runs(), *held_out_runs())}
    runs = rescue_runs()
    assert len(runs) == len(RESCUES) * len(RESCUE_SEEDS)
    for run in runs:
        assert {run.name, f"{RESCUES[run.setting.name]}-{run.seed}"} <= names


def test_labels_come_from_problems_that_the_watch_never_sees():
    for levels in {parse_levels(setting.flags) for setting in held_out_settings()}:
        seen = load_task(TaskConfig(levels=levels, num_train=1)).eval
        judged = labelled.label_problems(seen, levels)
        assert len(judged) == labelled.PROBLEMS >= 300
        assert not {p.question for p in judged} & {p.question for p in seen}


def parse_levels(flags):
    words = flags.split()
    after = words[words.index("--task.levels") + 1 :] if "--task.levels" in words else []
    return tuple(int(word) for word in takewhile(str.isdigit, after))


# --- the outcome rule ---------------------------------------------------------------------


def made(greedy, *, correct=None, reward=None, unchanged=0.1, kind="x", **columns):
    """A packed run with given curves; it begins at the first held-out accuracy."""
    n = len(greedy)
    correct = correct or greedy
    return {
        "kind": kind, "before": greedy[0], "prompts": 16, "unchanged": unchanged,
        "columns": {
            "step": list(range(1, n + 1)), "loss": [0.0] * n, "grad_norm": [0.5] * n,
            "reward": reward or correct, "facts/correct": correct, "eval/greedy": greedy,
            "groups/all_wrong": [0.2] * n, "time/step": [1.0] * n, **columns,
        },
    }  # fmt: skip


def test_a_run_that_gains_is_healthy_and_one_that_loses_half_has_failed():
    rising = [0.2 + 0.3 * k / 59 for k in range(60)]
    assert label(made(rising)).outcome == "healthy"
    falling = [0.4] * 30 + [0.4 - 0.4 * k / 29 for k in range(30)]
    truth = label(made(falling))
    assert truth.outcome == "failed"
    assert 28 <= truth.onset <= 36
    assert truth.lost_at(20) == pytest.approx(0.0, abs=1e-9)
    assert truth.lost_at(46) == pytest.approx(0.5, abs=0.06)
    assert label(made([0.4] * 30 + [0.29] * 30)).outcome == "unclear"


def test_a_gamed_reward_does_not_hide_a_loss():
    falling = [0.4] * 20 + [0.05] * 40
    assert label(made(falling, reward=[0.1 * k for k in range(60)])).outcome == "failed"


def test_held_out_problems_decide_and_training_dates():
    noisy = [0.4, 0.1] * 20 + [0.1] * 20
    assert label(made([0.4] * 60, correct=noisy)).outcome == "unclear"
    hot = label(made([0.3 - 0.005 * k for k in range(60)], correct=[0.02] * 60))
    assert (hot.outcome, hot.onset) == ("failed", 7)
    late = label(made([0.4] * 20 + [0.1] * 40, correct=[0.4] * 30 + [0.05] * 30))
    assert 28 <= late.onset <= 32


def test_runs_in_which_nothing_happens_have_failed():
    assert label(made([0.3] * 60, unchanged=1.0)).why == "nothing changed"
    starved = made([0.02] * 60, **{"groups/all_wrong": [0.95] * 60})
    assert label(starved).why == "nearly every group all wrong"
    broken = made([0.3] * 60, reward=[0.4] * 30 + [0.0] * 30)
    assert label(broken).why == "reward lost"
    sick = made([0.3] * 60, loss=[0.0] * 30 + [math.nan] * 30)
    assert (label(sick).outcome, label(sick).onset) == ("failed", 31)


def test_labels_of_their_own_decide_alone():
    falling, flat = [0.4] * 30 + [0.1] * 30, [0.4] * 60
    rows = [{"step": k, "correct": 0.4, "unchanged": 0.2} for k in range(0, 61, 10)]
    assert label(made(flat, correct=falling) | {"labels": rows}).outcome == "healthy"
    sinking = [row | {"correct": 0.1 if row["step"] > 30 else 0.4} for row in rows]
    truth = label(made(flat) | {"labels": sinking})
    assert (truth.outcome, truth.onset) == ("failed", 30)
    assert label(made(flat) | {"labels": [row | {"unchanged": 1.0} for row in rows]}).why == (
        "nothing changed"
    )


def test_a_stall_is_no_collapse():
    slow = [1.0] * 30 + [5.0] * 30
    stalled = label(made([0.3] * 60, kind="stall", **{"time/step": slow}))
    assert stalled.outcome == "stalled"
    assert stalled.onset == 31
    # The machine was busy: no fault of the run.
    assert label(made([0.3] * 60, **{"time/step": slow})).outcome == "healthy"


# --- judging ------------------------------------------------------------------------------


def verdict(alarm, onset=40, outcome="failed", reward_lost=0.1, reward_fell=True):
    return evaluate.Verdict(
        run="a",
        kind="x",
        outcome=outcome,
        why="",
        onset=onset,
        alarm=alarm,
        lossy=True,
        lost=0.2,
        reward_lost=reward_lost,
        reward_fell=reward_fell,
    )


def test_a_stop_long_before_the_onset_catches_nothing():
    assert verdict((45, "d")).caught
    assert verdict((30, "d")).caught
    assert not verdict((29, "d")).caught
    assert not verdict(None).caught
    found = evaluate.summarise(
        [verdict((45, "d")), verdict(None), verdict((9, "d"), None, "healthy")]
    )
    assert found["caught"]["words"] == "1 of 2"
    assert found["healthy runs stopped"]["words"] == "1 of 1"
    assert found["right answers lost at the alarm, median"] == pytest.approx(
        0.6
    )  # a miss has lost all


def test_gamed_rewards_do_not_make_the_alarm_look_early():
    gamed = [verdict((45, "d"), reward_lost=0.0, reward_fell=False)] * 3
    found = evaluate.summarise([*gamed, verdict((45, "d"), reward_lost=0.7)])
    assert found["reward lost at the alarm, median"] == 0.0
    assert found["the same where half of it went"] == {"runs": 1, "median": 0.7}


def test_a_reward_has_fallen_where_half_of_its_peak_is_gone():
    falling = [0.4] * 20 + [0.05] * 40
    assert label(made(falling)).reward_fell
    assert not label(made(falling, reward=[0.1 * k for k in range(60)])).reward_fell
    assert label(made(falling, reward=[0.0] * 60)).reward_fell  # lost before the first row


def test_what_was_not_made_or_ended_early_is_said():
    listed = tuning_runs()
    whole, short, *_ = [run for run in listed if run.setting.steps == 60]
    packed = [
        {"name": whole.name, "exit_code": 0, "columns": {"step": [1.0, 60.0]}},
        {"name": short.name, "exit_code": 1, "columns": {"step": [1.0, 7.0]}},
    ]
    found = evaluate.completeness("tuning", packed)
    assert found["runs"] == f"2 of {len(listed)}"
    assert found["ended early"] == {short.name: "step 7, exit 1"}
    assert len(found["not made"]) == len(listed) - 2


def rescue(rewards, alone, *, steps=110, changes=()):
    """A rescue whose reward ends so, beside itself alone and a healthy run at 0.5."""

    def packed(values):
        run = made([*values[:1], *values], correct=[*values[:1], *values])
        run["columns"]["step"] = [steps * k / len(values) for k in range(len(values) + 1)]
        return run | {"setting": "sparse_collapse", "seed": 0, "name": "sparse_collapse-0"}

    corpus_runs = {"sparse_collapse-0": packed(alone), "sparse-0": packed([0.5] * 60)}
    act = {"step": 30, "action": "rollback", "detector": "d", "checkpoint": 0, "changes": changes}
    run = packed([0.3] * 60)
    run["columns"]["reward"] = [rewards] * 61
    return rescues.compare(run | {"guarded": [act]}, corpus_runs, 110)


def test_a_rescue_comes_to_its_end_on_the_reward_it_had():
    lost = [0.5] * 20 + [0.0] * 40
    assert rescue(0.46, lost)["rescued"]
    assert not rescue(0.44, lost)["rescued"]
    assert not rescue(0.46, lost, steps=40)["rescued"]  # it crashed, or was given up
    eased = rescue(0.9, lost, changes=[{"field": "reward.parts", "old": 1, "new": 2}])
    assert (eased["judged by"], eased["rescued"]) == ("facts/correct", False)


def test_a_run_that_does_not_collapse_alone_is_no_rescue():
    sound = rescue(0.5, [0.5] * 60)
    fallen = rescue(0.5, [0.5] * 20 + [0.0] * 40) | {"run": "muon_x10-0"}
    assert rescues.count([sound, fallen], (0,)) == f"1 of {len(RESCUES) - 1}"


def test_wilson_intervals():
    # By hand from Wilson (1927): 8 of 10.
    found = evaluate.share([True] * 8 + [False] * 2)
    assert (found["low"], found["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-3)


def test_fixed_thresholds_hold_where_they_should():
    row = {"step": 1.0, "reward": 0.5, "entropy": 0.5, "groups/spread": 0.3, "reward_std": 0.3,
           "completions/mean_length": 20.0, "completions/clipped_ratio": 0.0}  # fmt: skip
    quiet = StaticThresholds()
    assert not any(quiet.update(row) for _ in range(100))
    low = StaticThresholds()
    seen = [low.update({**row, "entropy": 0.05}) for _ in range(31)]
    assert seen[28] == []
    assert seen[29] == [("entropy floor", "high")]
    assert StaticThresholds(3).update({**row, "kl": 0.4}) == [("KL cap", "high")]
    drift = StaticThresholds()
    lengths = [drift.update({**row, "completions/mean_length": 20.0 + k}) for k in range(60)]
    assert ("length drift", "medium") in lengths[-1]


@pytest.mark.parametrize("without", ["", "eval/"])
@pytest.mark.parametrize(
    "name", [name for name in ("tuning", "held_out") if (HERE / f"{name}.json.gz").exists()]
)
def test_the_published_figures_are_those_of_this_watch(name, without):
    runs, listed = evaluate.load(name), corpus.LISTS[name]()
    assert {run["name"] for run in runs} <= {run.name for run in listed}
    found = evaluate.judge_all(runs, evaluate.watch_alarm, without)
    published = json.loads((HERE / f"{name}{'_blind' if without else ''}.json").read_text())
    assert evaluate.summarise(found) == published["summary"]["watch"]
    assert [(one.run, one.alarm) for one in found] == [
        (one["run"], one["alarm"] and tuple(one["alarm"])) for one in published["verdicts"]["watch"]
    ]
