"""The corpora of runs: their lists, the outcome rule, the baseline, the published numbers."""

import json
import math
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks._lib.results import read_json
from benchmarks.watch import (
    corpus,
    evaluate,
    gamed_rewards,
    labelled,
    public_runs,
    rebuild,
    rescues,
)
from benchmarks.watch.held_out_runs import held_out_runs, held_out_settings
from benchmarks.watch.labels import label
from benchmarks.watch.runs import RESCUE_SEEDS, RESCUES, rescue_runs, tuning_runs
from benchmarks.watch.static_thresholds import StaticThresholds
from mesotron.cli import COMMANDS, parse
from mesotron.config import TaskConfig, WatchConfig
from mesotron.tasks.load import load_task
from mesotron.watch import Engine
from mesotron.watch.alerts import Alerts
from mesotron.watch.callback import Watch
from mesotron.watch.command import watch_one
from mesotron.watch.detectors import TWO_PART

HERE = Path(__file__).parent
PUBLIC = HERE.parents[1].parent / "shared" / "data" / "public_runs"
needs_public_runs = pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public logs are not here")


def test_corpora_share_failures_but_no_run():
    tuning = tuning_runs()
    held_out = held_out_runs()
    for runs in (tuning, held_out):
        assert len(names_of(runs)) == len(runs) >= 60
        healthy = [run for run in runs if run.setting.kind == "healthy"]
        assert len(healthy) >= 25

    assert kinds_of(tuning) - {"truncation"} <= kinds_of(held_out)
    assert max(run.seed for run in tuning) < 100
    assert min(run.seed for run in held_out) >= 100


def test_every_rescue_has_a_run_that_fails_and_one_that_is_healthy():
    names = names_of(tuning_runs()) | names_of(held_out_runs())
    assert len(rescue_runs()) == len(RESCUES) * len(RESCUE_SEEDS)
    for run in rescue_runs():
        assert run.name in names
        assert f"{RESCUES[run.setting.name]}-{run.seed}" in names


def names_of(runs):
    return {run.name for run in runs}


def kinds_of(runs):
    return {run.setting.kind for run in runs}


@pytest.mark.slow
def test_every_run_is_a_valid_command():
    train = COMMANDS["train"]
    runs = {run.setting.name: run for run in (*tuning_runs(), *held_out_runs())}
    for run in runs.values():
        kind = "held_out" if run.seed >= 100 else "tuning"
        typed = corpus.command(kind, run, Path("nowhere"), "cpu")
        arguments = typed[typed.index("train") + 1 :]

        config = parse(train.config_type, arguments, "mesotron train", train.presets)
        for part in config.reward.parts:
            _, _, name = part.partition(":")
            assert not name or callable(getattr(gamed_rewards, name))


def test_label_problems_are_disjoint_from_evaluation():
    def levels_of(flags):
        words = flags.split()

        if "--task.levels" in words:
            after = words[words.index("--task.levels") + 1 :]
        else:
            after = []

        return tuple(int(word) for word in takewhile(str.isdigit, after))

    for levels in {levels_of(setting.flags) for setting in held_out_settings()}:
        seen = load_task(TaskConfig(levels=levels, num_train=1)).eval
        judged = labelled.label_problems(seen, levels)
        assert len(judged) == labelled.PROBLEMS >= 300
        assert not {p.question for p in judged} & {p.question for p in seen}


def made(greedy, *, correct=None, reward=None, unchanged=0.1, kind="x", **columns):
    """A packed run with the given curves."""
    n = len(greedy)
    correct = correct or greedy
    return {
        "kind": kind,
        "before": greedy[0],
        "prompts": 16,
        "unchanged": unchanged,
        "columns": {
            "step": list(range(1, n + 1)),
            "loss": [0.0] * n,
            "grad_norm": [0.5] * n,
            "reward": reward or correct,
            "facts/correct": correct,
            "eval/greedy": greedy,
            "groups/all_wrong": [0.2] * n,
            "time/step": [1.0] * n,
            **columns,
        },
    }


def rising(start, step, count=60):
    """A straight line."""
    return [start + step * k for k in range(count)]


FLAT = [0.3] * 60
SLOW = [1.0] * 30 + [5.0] * 30
FALLING = [0.4] * 20 + [0.05] * 40


@pytest.mark.parametrize(
    ("run", "outcome", "onset"),
    [
        (made(rising(0.2, 0.3 / 59)), "healthy", None),
        (made([0.4] * 30 + [0.29] * 30), "unclear", None),
        (made([0.4] * 60, correct=[0.4, 0.1] * 20 + [0.1] * 20), "unclear", None),
        (made(FALLING, reward=rising(0.0, 0.1)), "failed", None),
        (made(rising(0.3, -0.005), correct=[0.02] * 60), "failed", 7),
        (made(FLAT, unchanged=1.0), "failed", None),
        (made([0.02] * 60, **{"groups/all_wrong": [0.95] * 60}), "failed", None),
        (made(FLAT, reward=[0.4] * 30 + [0.0] * 30), "failed", None),
        (made(FLAT, loss=[0.0] * 30 + [math.nan] * 30), "failed", 31),
        (made(FLAT, kind="stall", **{"time/step": SLOW}), "stalled", 31),
        (made(FLAT, **{"time/step": SLOW}), "healthy", None),  # the machine was busy
    ],
)
def test_outcomes(run, outcome, onset):
    assert label(run).outcome == outcome
    assert onset is None or label(run).onset == onset


def test_losses_are_dated():
    truth = label(made([0.4] * 30 + rising(0.4, -0.4 / 29, 30)))
    assert truth.outcome == "failed"
    assert 28 <= truth.onset <= 36
    assert truth.lost_at(20) == pytest.approx(0.0, abs=1e-9)
    assert truth.lost_at(46) == pytest.approx(0.5, abs=0.06)
    assert label(made(FALLING)).reward_fell
    assert not label(made(FALLING, reward=rising(0.0, 0.1))).reward_fell


def test_own_labels_decide_alone():
    def labels(before, after):
        rows = []
        for step in range(0, 61, 10):
            correct = after if step > 30 else before
            rows.append({"step": step, "correct": correct, "unchanged": 0.2})
        return {"labels": rows}

    flat = [0.4] * 60
    falling = [0.4] * 30 + [0.1] * 30
    assert label(made(flat, correct=falling) | labels(0.4, 0.4)).outcome == "healthy"

    truth = label(made(flat) | labels(0.4, 0.1))
    assert (truth.outcome, truth.onset) == ("failed", 30)


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


def test_a_stop_long_before_the_onset_is_not_a_catch():
    assert verdict((45, "d")).caught
    assert verdict((30, "d")).caught
    assert not verdict((29, "d")).caught
    assert not verdict(None).caught

    healthy = verdict((9, "d"), None, "healthy")
    summary = evaluate.summarise([verdict((45, "d")), verdict(None), healthy])
    assert summary["caught"]["words"] == "1 of 2"
    assert summary["healthy runs stopped"]["words"] == "1 of 1"
    assert summary["right answers lost at the alarm, median"] == pytest.approx(0.6)

    gamed = [verdict((45, "d"), reward_lost=0.0, reward_fell=False)] * 3
    summary = evaluate.summarise([*gamed, verdict((45, "d"), reward_lost=0.7)])
    assert summary["the same where half of it went"] == {"runs": 1, "median": 0.7}


def test_missing_and_short_runs_are_listed():
    listed = tuning_runs()
    whole, short, *_ = [run for run in listed if run.setting.steps == 60]
    packed = [
        {"name": whole.name, "exit_code": 0, "columns": {"step": [1.0, 60.0]}},
        {"name": short.name, "exit_code": 1, "columns": {"step": [1.0, 7.0]}},
    ]
    record = evaluate.completeness("tuning", packed)
    assert set(record["ended early"]) == {short.name}
    assert len(record["not made"]) == len(listed) - 2


def rescue(rewards, alone, *, steps=110, changes=()):
    """A rescue that ends at this reward, next to the run alone and a healthy run at 0.5."""

    def packed(values):
        curve = [values[0], *values]
        run = made(curve, correct=curve)
        run["columns"]["step"] = rising(0.0, steps / len(values), len(curve))
        return run | {"setting": "sparse_collapse", "seed": 0, "name": "sparse_collapse-0"}

    runs = {"sparse_collapse-0": packed(alone), "sparse-0": packed([0.5] * 60)}
    act = {"step": 30, "action": "rollback", "detector": "d", "checkpoint": 0, "changes": changes}
    run = packed(FLAT)
    run["columns"]["reward"] = [rewards] * 61
    return rescues.compare(run | {"guarded": [act]}, runs, 110)


def test_a_rescue_reaches_its_end_on_the_reward_it_had():
    lost = [0.5] * 20 + [0.0] * 40
    assert rescue(0.46, lost)["rescued"]
    assert not rescue(0.44, lost)["rescued"]
    assert not rescue(0.46, lost, steps=40)["rescued"]

    change = {"field": TWO_PART.field, "old": 1, "new": 2}
    eased = rescue(0.9, lost, changes=[change])
    assert (eased["judged by"], eased["rescued"]) == ("facts/correct", False)

    sound = rescue(0.5, [0.5] * 60)
    fallen = rescue(0.5, lost) | {"run": "muon_x10-0"}

    assert rescues.count([sound, fallen], (0,)) == f"1 of {len(RESCUES) - 1}"


def test_wilson_interval_and_fixed_thresholds():
    share = evaluate.share([True] * 8 + [False] * 2)  # Wilson (1927)
    assert (share["low"], share["high"]) == pytest.approx((0.4902, 0.9433), abs=1e-3)

    row = {
        "step": 1.0,
        "reward": 0.5,
        "entropy": 0.5,
        "groups/spread": 0.3,
        "reward_std": 0.3,
        "completions/mean_length": 20.0,
        "completions/clipped_ratio": 0.0,
    }

    quiet = StaticThresholds()
    low = StaticThresholds()
    assert not any(quiet.update(row) for _ in range(100))

    alarms = [low.update({**row, "entropy": 0.05}) for _ in range(31)]
    assert (alarms[28], alarms[29]) == ([], [("entropy floor", "high")])


@pytest.mark.parametrize(
    ("name", "without", "every"),
    [
        ("held_out", "", 4),
        pytest.param("held_out", "", 1, marks=pytest.mark.slow),
        pytest.param("held_out", "eval/", 1, marks=pytest.mark.slow),
        pytest.param("tuning", "", 1, marks=pytest.mark.slow),
        pytest.param("tuning", "eval/", 1, marks=pytest.mark.slow),
    ],
)
def test_published_numbers_are_those_of_this_watch(name, without, every):
    runs = evaluate.load(name)
    listed = corpus.LISTS[name]()
    assert {run["name"] for run in runs} <= {run.name for run in listed}

    verdicts = evaluate.judge_all(runs[::every], evaluate.watch_alarm, without)
    published = read_json(HERE / f"{name}_verdicts{'_blind' if without else ''}.json.gz")
    assert every > 1 or evaluate.summarise(verdicts) == published["summary"]["watch"]

    known = published["verdicts"]["watch"][::every]
    for verdict, row in zip(verdicts, known, strict=True):
        assert verdict.run == row["run"]
        assert verdict.alarm == (row["alarm"] and tuple(row["alarm"]))


@pytest.mark.slow
@needs_public_runs
def test_the_public_runs_keep_their_verdicts():
    verdicts = []
    for half in ("tuning", "check"):
        for run in public_runs.runs_of(PUBLIC, half):
            verdicts.append(public_runs.judge(PUBLIC, run))

    by_label = {name: [v for v in verdicts if v.label == name] for name in public_runs.LABELS}
    healthy = by_label["healthy"]
    assert not [verdict.run for verdict in healthy if verdict.stops]
    assert sum(verdict.condition == "drifting" for verdict in healthy) <= 0.05 * len(healthy)
    assert {verdict.condition for verdict in by_label["collapsed"]} == {"dead"}
    assert {verdict.condition for verdict in by_label["starved"]} <= {"dead", "drifting"}


@needs_public_runs
def test_the_rule_of_the_labels_can_be_applied_again():
    for half in ("tuning", "check"):
        for run in public_runs.runs_of(PUBLIC, half):
            rows = public_runs.read_rows(PUBLIC / run["file"])
            rewards = [row[run["reward_key"]] for row in rows if run["reward_key"] in row]
            found = rebuild.label_of(rewards)

            assert found.label == run["label"]
            assert (found.best, found.end) == pytest.approx((run["best"], run["end"]), abs=2e-3)


def test_an_older_version_of_a_log_is_found(tmp_path):
    versions = {
        "new": [0.5 + k / 100 for k in range(30)],
        "old": [0.5 - k / 100 for k in range(30)],
    }
    for ref, rewards in versions.items():
        (tmp_path / ref).mkdir()
        lines = [json.dumps({"step": k, "prize": x}) for k, x in enumerate(rewards)]
        (tmp_path / ref / "log.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "commits.json").write_text(json.dumps([{"sha": "new"}, {"sha": "old"}]))

    label = rebuild.label_of(versions["old"])
    run = {
        "repository": "someone/something",
        "source": "log.jsonl",
        "reward_key": "prize",
        "label": label.label,
        "best": label.best,
        "end": label.end,
    }
    raw = f"file://{tmp_path}/{{ref}}/{{path}}"
    commits = f"file://{tmp_path}/commits.json"
    copy = tmp_path / "copy" / "log.jsonl"

    assert rebuild.rebuild(run, copy, raw, commits) == "as labelled"
    assert copy.read_bytes() == (tmp_path / "old" / "log.jsonl").read_bytes()
    assert "not found" in rebuild.rebuild(run | {"best": 0.9}, copy, raw, commits)
    assert not copy.exists()


@pytest.mark.parametrize(
    ("kind", "onset", "detectors"),
    [
        ("healthy", None, set()),
        ("quantized", None, set()),
        ("unsynced", 20, {"sampler_mismatch"}),
        ("stale", 1, {"sampler_mismatch", "stale_samples"}),
    ],
)
def test_a_sampler_with_other_weights_is_named(kind, onset, detectors):
    columns = read_json(HERE / "mismatched.json.gz")[kind]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    events = list(evaluate.events_of(rows, Engine()))

    assert {event.detector for event in events} == detectors
    if onset is not None:
        assert events[0].detector == "sampler_mismatch"
        assert onset <= (events[0].began or 0) <= events[0].step <= onset + 12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["held_out", "tuning"])
def test_live_equals_offline_on_every_run(tmp_path, name):
    different = []
    for run in evaluate.load(name):
        rows = evaluate.rows_of(run)
        if live(rows) != offline(rows, tmp_path / "metrics.jsonl"):
            different.append(run["name"])
    assert different == []


def live(rows):
    """The diagnosis of a run that is watched while it trains."""
    watch = Watch(guard="warn")
    for row in rows:
        state: Any = SimpleNamespace(global_step=row["step"], is_world_process_zero=True)
        logs = {}
        for key, value in row.items():
            if key != "step":
                logs[key] = value

        watch.on_log(None, state, SimpleNamespace(), logs=logs)  # type: ignore[arg-type]
    return watch.diagnosis().record() | {"notes": ()}


def offline(rows, log):
    """The diagnosis of the same run's log."""
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = watch_one(WatchConfig(path=log), log, Console(quiet=True), Alerts(()))
    return found.diagnosis.record() | {"notes": ()}
