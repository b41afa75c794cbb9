"""Detectors on synthetic runs: each speaks on its failure, all are silent on healthy noise."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mesotron.config import WatchSettings
from mesotron.watch import DETECTORS, Engine, Event
from mesotron.watch.callback import Watch
from mesotron.watch.detectors import Detector
from mesotron.watch.diagnosis import diagnose
from mesotron.watch.metrics import METRICS, canonical
from mesotron.watch.tracks import Symptom, Track, deviation
from support.watch_streams import FAILURES, HEALTHY, ONLY_WARN, STEPS, TURN, Row, failing, healthy

NAMES = [detector.name for detector in DETECTORS]


def watch(rows: list[Row], settings: WatchSettings | None = None) -> list[Event]:
    engine = Engine(settings)
    return [event for row in rows for event in engine.update(row)]


def story(rows: list[Row]):
    engine = Engine()
    events = [event for row in rows for event in engine.update(row)]
    return diagnose(rows, engine, events)


# failures ----------------------------------------------------------------------------------------


def test_every_detector_has_a_stream_and_every_stream_a_detector():
    assert set(FAILURES) == set(NAMES)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES)
def test_a_detector_speaks_on_its_failure(name, seed):
    wanted = "warn" if name in ONLY_WARN else "stop"
    found = [event for event in watch(FAILURES[name](seed)) if event.detector == name]
    assert wanted in [event.severity for event in found]
    told = next(event for event in found if event.severity == wanted)
    assert told.evidence
    assert all(math.isfinite(seen.now) for seen in told.evidence)
    pinned_from_the_start = name in ("dead_optimizer", "reward_starvation", "constant_reward")
    assert told.step < TURN if pinned_from_the_start else told.step >= TURN


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("lying_loss", *ONLY_WARN)])
def test_the_cause_is_named(name):
    told = story(FAILURES[name](1))
    assert told.condition == "dead"
    assert told.cause == name


@pytest.mark.parametrize("seed", range(6))
def test_healthy_noise_is_met_with_silence(seed):
    assert watch(healthy(seed)) == []


def test_hardly_any_noisy_healthy_run_is_stopped():
    """Two prompts a step: the reward of one row says next to nothing."""
    stopped = 0
    for seed in range(40):
        draw = random.Random(seed)
        rows = [{"step": k, "reward": min(max(0.5 + draw.gauss(0, 0.25), 0.0), 1.0)}
                for k in range(300)]  # fmt: skip
        stopped += any(event.severity == "stop" for event in watch(rows))
    assert stopped <= 1


def test_a_decline_is_seen_through_the_noise_of_small_batches():
    caught = 0
    for seed in range(20):
        draw = random.Random(seed)
        level = [0.6] * 120 + [0.05] * 80
        rows = [{"step": k, "reward": min(max(m + draw.gauss(0, 0.25), 0), 1)}
                for k, m in enumerate(level)]  # fmt: skip
        caught += any(event.severity == "stop" for event in watch(rows))
    assert caught >= 19


def test_learning_a_task_whole_is_not_a_collapse():
    """Entropy, spread and signal all vanish when everything is right, and that is success."""
    rows = []
    for row in healthy(0, steps=300):
        share = min(row["step"] / 150, 1.0)
        rows.append(row | {
            "reward": 0.35 + 0.65 * share, "entropy": 0.9 - 0.85 * share,
            "groups/zero_signal": 0.2 + 0.8 * share, "groups/all_right": share,
            "groups/all_wrong": 0.2 * (1 - share), "grad_norm": 0.5 * (1.02 - share),
        })  # fmt: skip
    assert {event.detector for event in watch(rows)} == {"reward_saturation"}
    assert story(rows).condition == "healthy"


def test_silence_is_no_matter_while_groups_with_a_signal_are_found():
    """Chosen from many, the places of a batch teach though most groups that were sampled do not."""
    silent = {"groups/zero_signal": 0.85, "groups/all_right": 0.8, "reward": 1.9}
    assert {e.detector for e in watch(failing(3, silent))} == {"reward_saturation"}
    filled = [row | {"dynamic/filled": 0.9} for row in failing(3, silent)]
    assert watch(filled) == []
    empty = [row | {"dynamic/filled": 0.2} for row in failing(3, silent)]
    assert {e.detector for e in watch(empty)} == {"reward_saturation"}


def test_reasoning_longer_for_more_reward_is_not_an_explosion():
    rows = failing(2, {"completions/mean_length": 150.0, "reward": 1.0, "facts/correct": 0.95})
    assert watch(rows) == []


def test_warming_up_the_learning_rate_is_not_an_explosion():
    rows = [row | {"learning_rate": 1e-5 * min(1, (row["step"] + 1) / 50),
                   "optim/muon/update_rms": 2e-6 * min(1, (row["step"] + 1) / 50)}
            for row in healthy(4)]  # fmt: skip
    assert watch(rows) == []


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_a_reward_may_have_any_unit_and_sign(scale, shift):
    rows = [{"step": k, "reward": scale * ((0.7 if k < 60 else 0.1) + shift)} for k in range(100)]
    assert [e.severity for e in watch(rows)] == ["stop"]
    assert watch([{**row, "reward": -0.3 * scale} for row in rows]) == []


def test_a_warning_ends_when_its_cause_does():
    rows = failing(0, {"entropy": 4.0})
    for row in rows[TURN + 30 :]:
        row["entropy"] = 0.7
    severities = [e.severity for e in watch(rows) if e.detector == "entropy_explosion"]
    assert severities == ["warn", "clear"]
    conditions = [phase.condition for phase in story(rows).phases]
    assert conditions == ["healthy", "drifting", "healthy"]


def test_half_of_the_reward_is_not_yet_lost_when_a_slow_collapse_is_told():
    rows = failing(5, {"reward": 0.0, "facts/correct": 0.0}, over=60)
    first = next(event for event in watch(rows) if event.detector == "reward_collapse")
    seen = next(e for e in first.evidence if e.metric == "reward")
    assert seen.before is not None
    assert seen.now > seen.before / 2


# properties --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["parser_drift", "self_reward_hacking", "nonfinite"])
def test_the_order_of_names_and_unknown_metrics_change_nothing(name):
    rows = FAILURES[name](0)
    draw = random.Random(0)
    shuffled = []
    for row in rows:
        items = [*row.items(), ("my/own", draw.random()), ("text", "hello"), ("flag", True)]
        draw.shuffle(items)
        shuffled.append(dict(items))
    assert watch(shuffled) == watch(rows)


@pytest.mark.parametrize("missing", sorted(HEALTHY)[::2])
def test_a_missing_metric_blinds_and_never_breaks(missing):
    rows = [{k: v for k, v in row.items() if k != missing} for row in FAILURES["parser_drift"](0)]
    engine = Engine()
    events = [event for row in rows for event in engine.update(row)]
    for name in engine.blind():
        assert name not in {event.detector for event in events}
    assert diagnose(rows, engine, events).phases


def test_blind_detectors_name_what_they_lack():
    engine = Engine()
    for row in [{"reward": 0.5, "loss": 0.0}] * 3:
        engine.update(row)
    blind = engine.blind()
    assert blind["repetition"] == ("repetition",)
    assert blind["entropy_collapse"] == ("entropy",)
    assert "reward_collapse" not in blind
    assert "lying_loss" not in blind
    for row in healthy(0, steps=20):
        engine.update(row)
    assert engine.blind() == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, -1e308])
def test_numbers_that_cannot_be_compared_are_told_and_forgotten(bad):
    rows = healthy(0)
    rows[100] = dict.fromkeys(rows[100], bad)
    events = watch(rows)
    assert [(e.detector, e.severity) for e in events] == [
        ("nonfinite", "warn"), ("nonfinite", "clear"),
    ]  # fmt: skip


def test_rows_without_a_step_or_without_anything_are_counted():
    engine = Engine()
    for row in [
        {},
        {"reward": 0.1},
        {"step": None},
        {"step": 7},
        {"step": "9"},
        {"step": math.nan},
    ]:
        assert engine.update(row) == []
    assert engine.step == 9


def test_rows_without_a_reward_do_not_count_against_it():
    """TRL logs a reward only where it generates; reuse steps have none."""
    full = [{"reward": 0.7 if k < 60 else 0.1} for k in range(100)]
    gaps = [row for each in full for row in (each, {"loss": 0.1})]
    assert [e.detector for e in watch(gaps) if e.severity == "stop"] == ["reward_collapse"]


@pytest.mark.parametrize("name", ["self_reward_hacking", "update_explosion", "constant_answer"])
@pytest.mark.parametrize("cut", [3, 84, 113])
def test_memory_through_json_is_exact(name, cut):
    rows = FAILURES[name](0)
    first = Engine()
    before = [event for row in rows[:cut] for event in first.update(row)]
    second = Engine()
    second.load_state(json.loads(json.dumps(first.state())))
    after = [event for row in rows[cut:] for event in second.update(row)]
    assert before + after == watch(rows)
    for row in rows[cut:]:
        first.update(row)
    assert second.state() == first.state()


def test_memory_is_bounded():
    engine = Engine()
    sizes = []
    for k, row in enumerate(healthy(0, steps=1200)):
        engine.update(row)
        if k in (300, 1199):
            sizes.append(len(json.dumps(engine.state())))
    assert sizes[1] < 1.2 * sizes[0]  # later steps have more digits


@pytest.mark.parametrize("field", ["warmup", "window", "patience"])
def test_settings_that_cannot_work_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} 0"):
        Engine(replace(WatchSettings(), **{field: 0}))


# the data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_detectors_are_complete(detector):
    assert set(detector.metrics) <= set(METRICS)
    for text in (detector.diagnosis, detector.remedy, detector.source):
        assert text
        assert not text.endswith(".")
    assert detector.cases
    assert all(detector.cases)
    json.dumps(Engine(detectors=[detector])._event(detector, (), 0).record())


def test_remedies_name_fields_of_the_training_config():
    from mesotron.config import TrainConfig

    for change in (change for detector in DETECTORS for change in detector.changes):
        value = TrainConfig()
        for part in change.field.split("."):
            value = getattr(value, part)


@pytest.mark.parametrize(
    ("logged", "ours"),
    [
        ("critic/score/mean", "reward"), ("actor/entropy", "entropy"), ("train/reward", "reward"),
        ("frac_reward_zero_std", "zero_signal"), ("response_length/clip_ratio", "truncated"),
        ("rewards/format_reward/mean", "formatted"), ("run-3 - train/kl", "kl"),
        ("val-core/openai/gsm8k/reward/mean@1", "heldout"), ("optim/muon rows:16/update_rms",
        "update_rms"), ("timing_s/step", "step_time"), ("watch/length", "length"),
    ],
)  # fmt: skip
def test_names_of_other_trainers_are_known(logged, ours):
    assert canonical({logged: 0.25})[ours] == 0.25


def test_a_better_source_wins_and_groups_are_combined():
    assert canonical({"kl/start": 2.0, "kl": 1.0, "actor/ppo_kl": 3.0}) == {"kl": 1.0}
    groups = {"optim/muon/update_rms": 1.0, "optim/adamw/update_rms": 3.0,
              "optim/muon/dead_blocks": 0.0, "optim/muon per_head/dead_blocks": 1.0}  # fmt: skip
    assert canonical(groups) == {"update_rms": 3.0, "dead_blocks": 0.5}
    assert canonical({"reward_std": 1.0, "rewards/f/std": 2.0}) == {}


def test_noise_is_measured_without_the_trend():
    draw = random.Random(0)
    noisy = [0.01 * k + draw.gauss(0, 0.2) for k in range(2000)]
    assert deviation(noisy) == pytest.approx(0.2, rel=0.08)
    assert deviation([5.0 * k for k in range(50)]) == 0.0


def test_one_wild_row_moves_nothing():
    calm, wild = Track(warmup=10, window=5), Track(warmup=10, window=5)
    for k in range(60):
        calm.add(1.0)
        wild.add(1e6 if k in (4, 40) else 1.0)
    short = wild.window(0)
    assert short is not None
    assert (short.now, short.reference("start"), short.best) == (1.0, 1.0, 1.0)


# the story ---------------------------------------------------------------------------------------


def test_the_story_of_a_dead_run():
    told = story(FAILURES["parser_drift"](3))
    text = told.text()
    assert text.startswith("steps 0-")
    assert "dead after step" in text
    assert "cause: parser drift" in text
    assert "length x2" in text
    assert told.useful_step is not None
    assert TURN - 15 <= told.useful_step <= TURN + 5
    assert told.wasted == pytest.approx(0.5, abs=0.08)
    assert told.unit == "time"
    for a, b in zip(told.phases, told.phases[1:]):
        assert a.last == b.first
    json.dumps(told.record())


def test_what_a_dead_run_does_later_is_not_called_its_cause():
    # Right answers go first; that it repeats itself, which is higher in the table, comes later.
    rows = [{"step": k, "reward": 0.6 if k < 70 else 0.1, "correct": 0.6 if k < 40 else 0.1,
             "repetition": 0.0 if k < 70 else 0.7} for k in range(100)]  # fmt: skip
    told = story([{("facts/" if n == "correct" else "") + n: x for n, x in row.items()}
                  for row in rows])  # fmt: skip
    assert "repetition" in {event.detector for event in told.events if event.severity == "stop"}
    assert told.cause == "accuracy_collapse"


def test_a_warning_that_is_over_is_not_called_the_cause():
    lengths = [100.0] * 30 + [20.0] * 10 + [100.0] * 60
    rows = [{"step": k, "completions/mean_length": x, "entropy": 1.0 if k < 70 else 3.5}
            for k, x in enumerate(lengths)]  # fmt: skip
    told = story(rows)
    assert [(event.detector, event.severity) for event in told.events] == [
        ("length_collapse", "warn"), ("length_collapse", "clear"), ("entropy_explosion", "warn"),
    ]  # fmt: skip
    assert (told.condition, told.cause) == ("drifting", "entropy_explosion")


def test_cost_is_counted_in_what_there_is():
    rewards = [0.7] * 50 + [0.1] * 50
    plain = [{"step": k, "reward": r} for k, r in enumerate(rewards)]
    assert story(plain).unit == "steps"
    # Completions of the second half are three times as long.
    tokens = [row | {"num_tokens": k if k < 50 else 50 + 3.0 * (k - 50)}
              for k, row in enumerate(plain)]  # fmt: skip
    told = story(tokens)
    assert told.unit == "tokens"
    assert told.wasted == pytest.approx(0.75, abs=0.03)
    timed = [row | {"step_time": 1.0 if k < 50 else 9.0} for k, row in enumerate(plain)]
    assert story(timed).wasted == pytest.approx(0.9, abs=0.02)


def test_a_healthy_run_has_one_phase_and_no_cause():
    told = story(healthy(0))
    assert [phase.condition for phase in told.phases] == ["healthy"]
    assert told.phases[0].last == STEPS - 1
    assert told.cause is None
    assert told.wasted is None


def test_a_run_of_one_row_has_a_story():
    assert story([{"step": 3, "reward": 0.1}]).text() == "steps 3-3 healthy"


# the pages ---------------------------------------------------------------------------------------


def test_the_page_lists_the_detectors_in_their_order():
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", page, re.MULTILINE)
    assert [row[0] for row in rows] == NAMES
    for (_, diagnosis, reads), detector in zip(rows, DETECTORS, strict=True):
        assert diagnosis == detector.diagnosis
        assert re.findall(r"`(\w+)`", reads) == list(detector.metrics)


def stops_of(rates, share):
    """Detectors that stop a run whose steps are `share` of its learning rates."""
    engine = Engine()
    rows = [{"learning_rate": lr, "optim/muon/update_rms": share * lr} for lr in rates]
    events = [event for row in rows for event in engine.update(row)]
    return {event.detector for event in events if event.severity == "stop"}


def test_a_schedule_at_its_end_or_its_start_is_no_dead_optimizer():
    tail = [1e-6 * 0.5 * (1 + math.cos(math.pi * k / 400)) for k in range(400)]
    assert stops_of(tail, 0.2) == set()
    assert stops_of([1e-6 * k / 1000 for k in range(1, 400)], 0.2) == set()
    assert stops_of([1e-6] * 40, 0.005) == {"dead_optimizer"}


def test_a_row_is_quiet_once_however_many_cases_were_judged():
    cases = tuple((Symptom(name, "above", level=1.0),) for name in ("kl", "entropy"))
    detector = Detector(name="d", cases=cases, diagnosis="", remedy="", source="")
    engine = Engine(detectors=[detector])
    ill = [engine.update({"kl": 2.0, "entropy": 0.1}) for _ in range(20)]
    assert [event.severity for events in ill for event in events] == ["warn"]
    rows = [engine.update({"kl": 0.1, "entropy": 0.1}) for _ in range(40)]
    cleared = next(k for k, events in enumerate(rows) if events)
    # The present is a median of five (gone after three), and four times the patience is waited.
    assert cleared >= 4 * 3


def test_a_run_that_is_continued_dead_is_told_so(caplog):
    history = [{"step": k, "loss": 0.0, "reward": 0.7 if k < 20 else 0.1} for k in range(40)]
    state: Any = SimpleNamespace(global_step=39, log_history=history, is_world_process_zero=True)
    Watch(guard="stop").on_train_begin(cast(Any, None), state, cast(Any, None))
    assert "stopped for reward collapse" in caplog.text
    assert "will not stop it for that again" in caplog.text


def test_weights_that_are_no_numbers_are_not_saved_by_a_stop():
    model, watch = torch.nn.Linear(1, 1), Watch(guard="stop")
    with torch.no_grad():
        model.weight.fill_(math.nan)
    control: Any = SimpleNamespace(should_training_stop=False, should_save=True)
    for step in range(6):
        state: Any = SimpleNamespace(global_step=step, is_world_process_zero=True)
        watch.on_log(cast(Any, None), state, control, logs={"loss": math.nan}, model=model)
    assert control.should_training_stop
    assert not control.should_save
