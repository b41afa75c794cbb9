"""Verdicts on runs as others log them: cold starts, floors, dips, drift, blind runs; live equals
offline; detectors of the user's own."""

import json
import logging
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mesotron.config import WatchConfig
from mesotron.watch import DETECTORS, Engine, Event
from mesotron.watch.alerts import Alerts
from mesotron.watch.callback import Watch
from mesotron.watch.command import watch_one
from mesotron.watch.detectors import Detector, explain, load_detectors, with_own
from mesotron.watch.diagnosis import LARGE_STEPS
from mesotron.watch.guard import choose_event
from mesotron.watch.tracks import Symptom
from support.watch_streams import FAILURES, diagnosis_of, failing, healthy

NOISE = random.Random(0)
QUIET = Console(quiet=True)


def trl(level, *, steps=120, noise=0.03, **columns):
    """Rows of TRL: the reward at `level(step)`, other columns as numbers or functions of the
    step."""
    shown = {
        "reward_std": 0.3,
        "grad_norm": 0.2,
        "completions/mean_length": 100.0,
        "entropy": 0.7,
    }

    rows = []
    for k in range(steps):
        values = {name.replace("__", "/"): value for name, value in (shown | columns).items()}
        row = {name: value(k) if callable(value) else value for name, value in values.items()}
        reward = level(k) + (NOISE.gauss(0, noise) if noise else 0)

        rows.append(
            {
                "step": k,
                "loss": 0.0,
                "reward": reward,
                **row,
            }
        )

    return rows


def silent(reward: float, **columns):
    columns = {"reward_std": 0.0, "grad_norm": 0.0} | columns
    return trl(lambda k: reward, steps=60, noise=0, **columns)


def fall(k, turn=60, over=20, high=0.74, low=0.1):
    return high + (low - high) * min(max(k - turn, 0) / over, 1)


def rise(k, high=0.9):
    return 0.3 + (high - 0.3) * min(k / 80, 1)


def rise_and_fall(k):
    return min(rise(k), fall(k, 80, 16, 0.9, 0.0))


def near_zero(level, steps=120, **columns):
    """A reward within 0 to 1, close to 0; evaluations in every tenth row."""
    rows = trl(level, noise=0, steps=steps, **columns)
    for row in rows:
        row["reward"] = max(row["reward"] + NOISE.gauss(0, 0.004), 0.0)
        if row["step"] % 10:
            row.pop("eval/accuracy", None)

    return rows


def rare(low, high, *, share=0.02, logged=()):
    """Of 64 completions a small share earns `high`, the others `low`; `logged` are the columns that
    show it."""
    rows = []
    for k in range(150):
        p = sum(NOISE.random() < share for _ in range(64)) / 64
        columns = {
            "reward": low + (high - low) * p,
            "reward_std": (high - low) * math.sqrt(p * (1 - p)),
            "critic/rewards/max": high,
            "critic/rewards/min": low,
        }
        rows.append({"step": k} | {name: columns[name] for name in ("reward", *logged)})

    return rows


def cold(until):
    return trl(
        lambda k: 0.0 if k < until else min(0.05 + 0.01 * (k - until), 0.7),
        noise=0,
        reward_std=lambda k: 0.3 * (k >= until),
        grad_norm=lambda k: 0.4 * (k >= until),
        frac_reward_zero_std=lambda k: 1.0 if k < until else 0.3,
    )


def only(rows, *names):
    return [{name: row[name] for name in ("step", *names) if name in row} for row in rows]


def dip(k):
    return 0.1 if 50 <= k < 75 else 0.7


def near_end(k):
    return max(1 - k / 80, 0.13)


def with_sets(*sets):
    """Evaluations of (name, score, first step), as rows of their own, every tenth step."""
    return [
        row
        for k, row in enumerate(trl(rise))
        for row in (
            row,
            *({"step": k} | score for score, start in sets if k % 10 == 0 and k >= start),
        )
    ]


def reward_model(k):
    return {
        "step": k,
        "min_reward": -1 - k / 30,
        "mean_reward": 0.4 - k / 60,
        "max_reward": 1.0,
        "margin": k / 60,
        "accuracy": 0.5 + k / 300,
    }


# (rows, condition at the end, cause, detectors and severities that may not occur)
CASES: dict[str, tuple[list[dict[str, float]], str, str | None, set[str]]] = {
    "long cold start": (cold(60), "healthy", None, {"update_explosion"}),
    "no signal": (silent(0.0), "dead", "constant_reward", {"reward_starvation"}),
    "few labels": (
        trl(lambda k: 0.2, frac_reward_zero_std=0.9, votes__abstained=0.75),
        "healthy",
        None,
        {"reward_starvation", "no_labels"},
    ),
    "few labels, no signal": (
        silent(0.05, frac_reward_zero_std=1.0, votes__abstained=0.75),
        "dead",
        "no_labels",
        set(),
    ),
    "floor, only a reward": (only(silent(-0.1), "reward"), "unknown", None, {"warn"}),
    "solved at once": (
        trl(lambda k: min(0.6 + 0.1 * k, 1.0), noise=0, reward_std=lambda k: 0.2 * (k < 4)),
        "healthy",
        None,
        {"constant_reward", "reward_starvation"},
    ),
    "normalized reward": (trl(lambda k: 0.0625, noise=0), "unknown", None, {"warn"}),
    "dip": (trl(dip), "healthy", None, {"nonfinite"}),
    "loss scaling": (
        trl(rise, grad_norm=lambda k: math.inf if k < 6 else 0.3),
        "healthy",
        None,
        {"stop"},
    ),
    "loss lost": (
        trl(rise, loss=lambda k: math.nan if k > 60 else 0.0),
        "dead",
        "nonfinite",
        set(),
    ),
    "solving": (
        trl(
            rise,
            entropy=lambda k: 0.7 * near_end(k),
            frac_reward_zero_std=lambda k: 0.1 + 0.8 * min(k / 80, 1),
        ),
        "healthy",
        None,
        {"entropy_collapse"},
    ),
    "certain too early": (
        trl(
            lambda k: 0.3,
            entropy=lambda k: 0.68 * near_end(k),
            frac_reward_zero_std=lambda k: 0.2 + 0.61 * min(k / 60, 1),
        ),
        "drifting",
        "entropy_collapse",
        set(),
    ),
    "certain where few votes agree": (
        trl(
            lambda k: 0.3,
            entropy=lambda k: 0.68 * near_end(k),
            votes__abstained=0.7,
            frac_reward_zero_std=lambda k: 0.2 + 0.61 * min(k / 60, 1),
        ),
        "healthy",
        None,
        {"entropy_collapse"},
    ),
    "longer": (
        trl(lambda k: 0.5, completions__mean_length=lambda k: 100 + 2.0 * k),
        "healthy",
        None,
        {"length_explosion"},
    ),
    "part without a verdict": (
        trl(rise, rewards__accuracy__mean=math.nan),
        "healthy",
        None,
        {"nonfinite"},
    ),
    "parser drift": (
        trl(
            fall,
            reward_std=lambda k: max(fall(k) / 2, 0.01),
            completions__mean_length=lambda k: 100 + 2.0 * max(k - 60, 0),
            rewards__accuracy_reward__mean=fall,
        ),
        "dead",
        "parser_drift",
        set(),
    ),
    "no update before the first reward": (
        [
            row
            | {
                "optim/muon/update_rms": 1e-5 * (row["step"] >= 20),
                "learning_rate": 1e-4,
                "optim/muon/dead_blocks": float(row["step"] < 20),
            }
            for row in cold(20)
        ],
        "healthy",
        None,
        {"dead_optimizer", "update_explosion", "stop"},
    ),
    "solved in percent": (
        trl(
            lambda k: min(30 + k, 97),
            noise=1,
            entropy=lambda k: 0.7 * near_end(k),
            frac_reward_zero_std=lambda k: 0.1 + 0.8 * min(k / 80, 1),
        ),
        "healthy",
        None,
        {"entropy_collapse"},
    ),
    "ends in a fall": (
        trl(lambda k: 0.7 if k < 61 else 0.1, steps=64),
        "dead",
        "reward_collapse",
        set(),
    ),
    # TRL logs every tenth step: 300 steps are 30 rows.
    "few rows": (
        [{"step": 10 * k, "reward": 0.7 if k < 18 else 0.05} for k in range(30)],
        "dead",
        "reward_collapse",
        set(),
    ),
    "starved, then learns": (
        trl(
            lambda k: 0.0 if k < 20 else 0.02 * (k - 20),
            steps=50,
            noise=0,
            frac_reward_zero_std=lambda k: 0.95 if k < 28 else 0.2,
        ),
        "healthy",
        None,
        {"stop"},
    ),
    "frozen weights": (trl(lambda k: 0.4, grad_norm=0.0), "drifting", "zero_gradient", {"stop"}),
    "huge rewards": (
        trl(
            lambda k: 1e38,
            noise=0,
            reward_std=3e37,
            grad_norm=0.0,
        ),
        "drifting",
        "zero_gradient",
        {"stop"},
    ),
    "a norm that is always 0": (trl(rise, grad_norm=0.0), "healthy", None, {"stop"}),
    "floor with a KL gradient": (
        only(trl(lambda k: -1.0, noise=0), "reward", "grad_norm"),
        "unknown",
        None,
        {"warn"},
    ),
    "starved, only a reward": (
        only(near_zero(lambda k: 0.03), "reward"),
        "drifting",
        "reward_starvation",
        {"stop"},
    ),
    "starved, and the held-out score with it": (
        near_zero(lambda k: 0.03, eval__accuracy=lambda k: 0.02 + 0.001 * (k % 3)),
        "drifting",
        "reward_starvation",
        {"stop"},
    ),
    "starved, -1 or 1": (rare(-1, 1), "drifting", "reward_starvation", {"stop"}),
    "starved, 0 or 10 by the spread": (
        rare(0, 10, logged=["reward_std"]),
        "drifting",
        "reward_starvation",
        {"stop"},
    ),
    "starved, -2 or 8 by what is logged": (
        rare(-2, 8, logged=["critic/rewards/max", "critic/rewards/min"]),
        "drifting",
        "reward_starvation",
        {"stop"},
    ),
    "no starvation, -1 or 1": (rare(-1, 1, share=0.3), "healthy", None, {"warn"}),
    "normalized reward with the noise of 32 bits": (
        trl(lambda k: 0.0, noise=1e-9),
        "unknown",
        None,
        {"warn"},
    ),
    "near zero, but the held-out score rises": (
        near_zero(lambda k: 0.03, eval__accuracy=lambda k: 0.1 + k / 150),
        "healthy",
        None,
        {"reward_starvation"},
    ),
    "a slow start": (
        near_zero(lambda k: 0.01 + 0.04 * k / 120, steps=120),
        "healthy",
        None,
        {"reward_starvation"},
    ),
    "near zero, too few rows": (near_zero(lambda k: 0.03, steps=30), "unknown", None, {"warn"}),
    "negative, unbounded": (
        trl(lambda k: -0.5, noise=0.01),
        "healthy",
        None,
        {"reward_starvation"},
    ),
    "gradients grow from a tiny start": (
        trl(
            lambda k: rise(k),
            grad_norm=lambda k: 0.2 * 30 ** (k / 120),
            eval__accuracy=lambda k: 0.28 + 0.4 * k / 120,
        ),
        "healthy",
        None,
        {"update_explosion"},
    ),
    "gradients jump to what is still small": (
        trl(lambda k: 0.2 + 0.6 * k / 120, grad_norm=lambda k: 0.03 if k < 60 else 0.43),
        "healthy",
        None,
        {"update_explosion"},
    ),
    "gradients grow and nothing rises": (
        trl(lambda k: 0.4, grad_norm=lambda k: 0.2 * 1000 ** (k / 120)),
        "drifting",
        "update_explosion",
        {"stop"},
    ),
    "a format that was never learned": (
        trl(rise, rewards__format__mean=lambda k: 0.0123 if k < 40 else 0.001),
        "healthy",
        None,
        {"structural_collapse"},
    ),
    "solved where 0 is the most": (
        trl(
            lambda k: min(-0.6 + 0.015 * k, 0.0),
            noise=0,
            frac_reward_zero_std=lambda k: min(k / 40, 1.0),
            groups__all_wrong=lambda k: min(k / 40, 1.0),
        ),
        "healthy",
        None,
        {"reward_starvation", "constant_reward", "stop"},
    ),
    "gradients first, then the reward, then the length": (
        trl(
            lambda k: fall(k, 166, 8, low=0.02),
            steps=260,
            grad_norm=lambda k: 0.2 if not 85 <= k < 130 else 9600.0,
            completions__mean_length=lambda k: 100.0 if k < 170 else 8.0,
        ),
        "dead",
        "update_explosion",
        set(),
    ),
    "answers that end and are not read": (
        trl(
            lambda k: fall(k, low=0.06),
            completions__mean_length=lambda k: 100 + 5.0 * min(max(k - 60, 0), 20),
            completions__clipped_ratio=lambda k: 0.02 + 0.009 * min(max(k - 60, 0), 20),
            kl=0.02,
        ),
        "dead",
        "parser_drift",
        {"length_explosion"},
    ),
    "the same after an explosion of the gradients": (
        trl(
            lambda k: fall(k, low=0.06),
            completions__mean_length=lambda k: 100 + 5.0 * min(max(k - 60, 0), 20),
            completions__clipped_ratio=lambda k: 0.02 + 0.009 * min(max(k - 60, 0), 20),
            grad_norm=lambda k: 0.2 if k < 55 else 20.0,
        ),
        "dead",
        "update_explosion",
        {"parser_drift"},
    ),
    "answers without an end": (
        trl(
            lambda k: fall(k, low=0.06),
            completions__mean_length=lambda k: 100 + 5.0 * min(max(k - 60, 0), 20),
            completions__clipped_ratio=lambda k: 0.02 + 0.045 * min(max(k - 60, 0), 20),
        ),
        "dead",
        "length_explosion",
        {"parser_drift"},
    ),
    "blind": (only(trl(rise), "loss", "grad_norm"), "unknown", None, set()),
    "sets under one name": (
        with_sets(
            ({"eval_reward": 0.85, "eval_gsm8k_runtime": 3.0}, 0),
            ({"eval_reward": 0.12, "eval_aime_runtime": 3.0}, 0),
        ),
        "healthy",
        None,
        {"stop"},
    ),
    "a further set": (
        with_sets(({"eval/gsm8k/accuracy": 0.85}, 0), ({"eval/aime/accuracy": 0.12}, 110)),
        "healthy",
        None,
        {"stop"},
    ),
    "accuracy in percent": (
        trl(rise, eval__accuracy=lambda k: 60.1 - k / 80),
        "healthy",
        None,
        {"stop"},
    ),
    "truncated in percent": (
        trl(rise, truncated_pct=lambda k: 1 + k / 100),
        "healthy",
        None,
        {"warn"},
    ),
    "zeros between evaluations": (
        trl(rise, eval__accuracy=lambda k: 0.28 + k / 300 if k % 20 == 0 else 0.0),
        "healthy",
        None,
        {"warn"},
    ),
    "zeros before the first evaluation": (
        trl(rise, eval__accuracy=lambda k: 0.28 + k / 300 if k % 20 == 19 else 0.0),
        "healthy",
        None,
        {"warn"},
    ),
    "accuracy falls to zero": (
        trl(rise, eval__accuracy=lambda k: 0.5 if k < 60 else 0.0),
        "dead",
        "self_reward_hacking",
        set(),
    ),
    "accuracy falls to zero between zeros": (
        trl(rise, eval__accuracy=lambda k: 0.5 if k < 60 and k % 10 == 0 else 0.0),
        "dead",
        "self_reward_hacking",  # as above: the training reward rises
        set(),
    ),
    "a denser share beside a sparse reward": (
        with_sets(
            ({"val/reward": 4.0}, 0),
            ({"eval/accuracy": 0.4}, 0),
        ),
        "healthy",
        None,
        {"stop"},
    ),
    "a reward model": ([reward_model(k) for k in range(150)], "healthy", None, {"stop"}),
    "too short": (trl(rise, steps=4), "unknown", None, set()),
    "never correct, shorter": (
        trl(rise, facts__correct=0.0, completions__mean_length=lambda k: 100 - 70 * min(k / 40, 1)),
        "healthy",
        None,
        {"warn"},
    ),
    "without an end": (
        trl(rise, completions__clipped_ratio=lambda k: min(k / 60, 1.0)),
        "drifting",
        "length_explosion",
        {"stop"},
    ),
    "accuracy is lost, and the reward holds": (
        trl(lambda k: 0.4, eval__accuracy=lambda k: 0.45 if k < 60 else max(0.45 - k / 250, 0.02)),
        "dead",
        "self_reward_hacking",
        set(),
    ),
    "the same of correct answers in training": (
        trl(lambda k: 0.4, facts__correct=lambda k: 0.3 if k < 60 else 0.05),
        "dead",
        "self_reward_hacking",
        set(),
    ),
    "accuracy is lost, and the reward with it": (
        trl(lambda k: 0.4 if k < 60 else 0.0, noise=0.02, facts__correct=0.3),
        "dead",
        "reward_collapse",
        {"self_reward_hacking"},
    ),
    "sampling is much worse than greedy answers": (
        trl(
            lambda k: 0.01 + k / 1000,
            noise=0.002,
            facts__correct=0.02,
            eval__greedy=lambda k: 0.3 - k / 500,
        ),
        "dead",
        "temperature_trap",
        set(),
    ),
    "reward and accuracy fall together": (
        trl(rise_and_fall, eval__accuracy=rise_and_fall),
        "dead",
        "reward_collapse",
        set(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name):
    rows, condition, cause, forbidden = CASES[name]
    found = diagnosis_of(rows)
    assert (found.condition, found.cause) == (condition, cause)
    assert not forbidden & {x for e in found.events for x in (e.detector, e.severity)}
    assert all(0.3 < (e.confidence or 1) <= 1 for e in found.events)
    assert len(found.explanation()) <= 3


def test_a_fall_that_nothing_explains_is_said_to_be_unexplained():
    alone = diagnosis_of(only(trl(fall), "reward"))
    explained = diagnosis_of(trl(fall, loss=lambda k: math.nan if k > 60 else 0.0))
    assert alone.diagnosis.endswith(LARGE_STEPS)
    assert LARGE_STEPS not in explained.diagnosis


def test_equal_rewards_are_not_called_correct():
    rows = trl(lambda k: min(0.2 + k / 100, 0.4), noise=0, frac_reward_zero_std=0.95)
    (event,) = diagnosis_of(rows).events
    assert event.detector == "reward_saturation"
    assert "correct" not in event.diagnosis


@pytest.mark.parametrize(("turn", "over"), [(60, 3), (60, 30), (100, 60)])
@pytest.mark.parametrize("column", [{}, {"grad_norm": lambda k: 0.2 if k < 90 else 40.0}])
def test_the_onset_is_when_the_damage_began(turn, over, column):
    rows = trl(lambda k: fall(k, turn, over), steps=200, **column)
    found = diagnosis_of(rows)
    assert found.condition == "dead"
    assert found.phases[-1].first == found.onset == pytest.approx(turn, abs=20)

    useful = []
    for row in rows:
        if abs(row["step"] - found.useful_step) <= 5:
            useful.append(row["reward"])

    assert sum(useful) / len(useful) >= 0.93 * 0.74


STATE: Any = SimpleNamespace(global_step=0, is_world_process_zero=True)


def watched(rows) -> Watch:
    watch = Watch(guard="warn")
    control = SimpleNamespace()
    for row in rows:
        STATE.global_step = row["step"]
        logs = {}
        for name, value in row.items():
            if name != "step":
                logs[name] = value

        watch.on_log(None, STATE, control, logs=logs)  # type: ignore[arg-type]

    return watch


@pytest.mark.parametrize("name", ["parser_drift", "nonfinite", "accuracy_collapse", "short"])
def test_live_equals_offline(tmp_path, name):
    rows = FAILURES.get(name, healthy)(2)
    rows = only(rows[60:95], "reward", "loss") if name == "short" else rows
    live = watched(rows).diagnosis()
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    offline = watch_one(WatchConfig(path=log), log, QUIET, Alerts(())).diagnosis

    assert live.record() | {"notes": ()} == offline.record() | {"notes": ()}


def test_a_healthy_run_ends_with_one_line(caplog):
    watch = watched(healthy(0, steps=30))
    with caplog.at_level(logging.INFO, logger="mesotron.watch"):
        watch.on_train_end(None, STATE, None)

    (line,) = caplog.messages
    assert "healthy" in line
    assert "\n" not in line


def test_the_guard_acts_only_above_its_precision():
    events = [
        Event(
            step=9,
            detector=name,
            severity="stop",
            diagnosis="",
            remedy="",
            confidence=p,
        )
        for name, p in (("repetition", 0.8), ("nonfinite", 0.97))
    ]
    for precision, chosen in ((0.5, "repetition"), (0.95, "nonfinite")):
        event = choose_event(events, DETECTORS, precision)
        assert event.detector == chosen

    assert choose_event(events, DETECTORS, 0.99) is None


SYMPTOM = '{metric = "tools/failed", moved = "above", level = 0.3}'
TOML = f"""
[[detector]]
name = "tool_errors"
cases = [[{SYMPTOM}]]
fatal = [[{{metric = "reward", moved = "down", by = 0.2, since = "best"}}]]
diagnosis = "a third of the tool calls fail"
remedy = "look at the sandbox"
changes = [{{field = "optim.lr", act = "multiply", value = 0.5}}]
trust = 0.8
"""


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ('"above"', '"over"', "over"),
        ('"above", level = 0.3', '"above"', "level"),
        ("level = 0.3", 'level = "0.3"', "level"),
        ("[[detector]]", "[detector]", "detectors"),
        ('name = "tool_errors"', "name = 3", "name"),
        ("trust", "thrust", "thrust"),
        ("by = 0.2", 'by = "a fifth"', "by"),
        ('"multiply"', '"double"', "act"),
        ("trust = 0.8", 'patience = "long"', "patience"),
        ('diagnosis = "a third of the tool calls fail"', "diagnosis = 3", "diagnosis"),
        (f"cases = [[{SYMPTOM}]]", "cases = []", "cases"),
    ],
)
def test_a_broken_detector_is_refused_not_inverted(tmp_path, old, new, match):
    path = tmp_path / "mine.toml"
    path.write_text(TOML.replace(old, new))

    with pytest.raises(ValueError, match=match):
        load_detectors(path)


def test_a_logged_metric_is_not_asked_for():
    """Gradients of rows without a signal are 0 and tell nothing, but they are in the log."""
    rows = silent(0.0, frac_reward_zero_std=1.0)
    assert "grad_norm" not in diagnosis_of(rows).missing
    bare = [{name: x for name, x in row.items() if name != "grad_norm"} for row in rows]

    assert "grad_norm" in diagnosis_of(bare).missing


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    return path


def test_a_detector_of_ones_own(own_file):
    (own,) = load_detectors(own_file)
    assert own.fatal == ((Symptom("reward", "down", by=0.2, since="best"),),)
    assert Watch(detectors=own_file).engine.detectors[0] == own

    engine = Engine(detectors=with_own([own]))
    events = []
    for row in failing(0, {}):
        failed = 0.1 if row["step"] < 60 else 0.6
        events += engine.update(row | {"tools/failed": failed})

    (event,) = events
    assert (event.detector, event.severity, event.confidence) == ("tool_errors", "warn", 0.8)
    assert "tool calls" in explain("tool_errors", engine.detectors)


def test_a_detector_of_ones_own_replaces_ours_of_that_name():
    own = Detector(
        name="nonfinite",
        cases=(),
        diagnosis="",
        remedy="",
    )
    assert [each for each in with_own([own]) if each.name == "nonfinite"] == [own]


def test_a_file_of_detectors_may_use_names(own_file):
    (own,) = load_detectors(own_file)
    named = TOML.replace(SYMPTOM, '"calls_fail", "reward_lost"')
    named = named.replace('{field = "optim.lr", act = "multiply", value = 0.5}', '"smaller_step"')
    own_file.write_text(f"[symptoms]\ncalls_fail = {SYMPTOM}\n{named}")

    (by_name,) = load_detectors(own_file)
    assert by_name.metrics == ("tools/failed", "reward")
    assert by_name.changes == own.changes

    own_file.write_text(named.replace("calls_fail", "gone"))
    with pytest.raises(ValueError, match="gone"):
        load_detectors(own_file)


def test_a_detector_that_does_not_exist():
    with pytest.raises(ValueError, match="nonfinit"):
        explain("nonfinit")
