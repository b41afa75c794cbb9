"""Detectors on synthetic runs: each fires on its failure, all are silent on healthy noise."""

import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest

from mesotron.config import TrainConfig
from mesotron.watch import DETECTORS, Engine, Event
from mesotron.watch.detectors import Detector, explain, share_right, wilson
from mesotron.watch.engine import Monitor
from mesotron.watch.metrics import METRICS, canonical
from mesotron.watch.tracks import Symptom, Track, deviation
from support.watch_streams import FAILURES, ONLY_WARN, TURN, diagnosis_of, failing, healthy

NAMES = [detector.name for detector in DETECTORS]


def events_of(rows) -> list[Event]:
    engine = Engine()
    events = []
    for row in rows:
        events += engine.update(row)

    return events


def test_without_a_record_a_detector_may_warn_but_not_stop():
    symptom = Symptom("length", "above", level=20.0)
    rows = [{"completions/mean_length": 40.0 + k} for k in range(40)]
    for trust, severities in ((None, {"warn"}), (0.9, {"warn", "stop"})):
        detector = Detector(
            name="own",
            cases=((symptom,),),
            fatal=((),),
            fatal_patience=2,
            diagnosis="",
            remedy="",
            trust=trust,
        )
        engine = Engine(detectors=[detector])
        events = [event for row in rows for event in engine.update(row)]
        assert {event.severity for event in events} == severities
        assert {event.confidence for event in events} == {trust}
        assert not engine.ending()


def test_what_was_said_of_another_range_of_rewards_is_dropped():
    engine = Engine()
    for k in range(30):
        engine.update({"step": k, "reward": 0.3 + 0.01 * (k % 3)})

    assert engine.tracks["bounded_reward"].num_seen > 20

    engine.update({"step": 30, "reward": -0.5})  # so it was no share of what can be earned
    assert engine.tracks["bounded_reward"].num_seen == 1


def test_the_denser_share_of_two_held_out_scores_is_judged():
    monitor = Monitor()
    for k in range(0, 100, 5):
        row = {"step": k, "reward": 0.5}
        if k % 40 == 0:
            row["val/reward"] = 3.0 - k / 40
        if k % 10 == 5:
            row["eval/accuracy"] = 0.4 + k / 1000
        monitor.update(row)

    track = monitor.engine.tracks["heldout"]
    assert track.recent == pytest.approx([0.4 + k / 1000 for k in range(5, 100, 10)])
    assert track.steps == list(range(5, 100, 10))
    assert "val/reward" not in {key for row in monitor.rows for key in row}
    assert not monitor.events


def test_the_interval_of_a_record():
    low, high = wilson(8, 2)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    assert share_right((0, 0), (100, 0)) is None
    assert "uncalibrated" in explain("update_explosion")
    assert "interval" in explain("reward_collapse")


@pytest.mark.parametrize("name", NAMES)
def test_a_detector_fires_on_its_failure_and_is_the_cause(name):
    diagnosis = diagnosis_of(FAILURES[name](1))
    detector = next(each for each in DETECTORS if each.name == name)
    severity = "warn" if name in ONLY_WARN or not detector.may_stop else "stop"
    found = [event for event in diagnosis.events if event.detector == name]
    event = next(event for event in found if event.severity == severity)

    assert event.evidence
    assert all(math.isfinite(item.now) for item in event.evidence)

    from_the_start = name in ("dead_optimizer", "no_labels", "reward_starvation", "constant_reward")
    assert event.step < TURN if from_the_start else event.step >= TURN

    if name not in ONLY_WARN:
        assert (diagnosis.condition, diagnosis.cause) == ("dead", name)


def solved():
    """Entropy, spread and signal all vanish when every answer is correct."""
    for row in healthy(0, steps=300):
        share = min(row["step"] / 150, 1.0)
        yield row | {
            "reward": 0.35 + 0.65 * share,
            "entropy": 0.9 - 0.85 * share,
            "groups/zero_signal": 0.2 + 0.8 * share,
            "groups/all_right": share,
            "groups/all_wrong": 0.2 * (1 - share),
            "grad_norm": 0.5 * (1.02 - share),
        }


def saturated(**sampling: float):
    """Dynamic sampling may fill the batch with groups that have a signal."""
    ends = {
        "groups/zero_signal": 0.85,
        "groups/all_right": 0.8,
        "reward": 1.9,
    }
    return [row | {f"dynamic/{k}": v for k, v in sampling.items()} for row in failing(3, ends)]


def certain(distinct: float = 1.05):
    """One answer to each question, a quarter of them wrong, while other tokens stay open."""
    ends = {
        "groups/zero_signal": 0.95,
        "groups/all_right": 0.7,
        "groups/all_wrong": 0.25,
        "answers/distinct_in_group": distinct,
        "reward": 1.6,
    }
    return failing(3, ends)


def updates(rates, ratio: float):
    return [
        {
            "step": step,
            "learning_rate": lr,
            "optim/muon/update_rms": ratio * lr,
        }
        for step, lr in enumerate(rates)
    ]


COSINE = [1e-6 * 0.5 * (1 + math.cos(math.pi * k / 400)) for k in range(400)]
WARMUP = [1e-6 * k / 100 for k in range(1, 100)]


@pytest.mark.parametrize(
    ("rows", "detectors"),
    [
        (healthy(0), set()),
        ([*solved()], {"reward_saturation"}),
        (saturated(), {"reward_saturation"}),
        (saturated(filled=0.9), set()),
        (saturated(filled=0.2), {"reward_saturation"}),
        (certain(), {"lost_exploration"}),
        (certain(distinct=1.9), {"reward_saturation"}),
        (updates(COSINE, 0.2), set()),
        (updates(WARMUP + COSINE, 0.2), set()),
        (updates([1e-6 * k / 1000 for k in range(1, 400)], 0.2), set()),
        (updates([1e-6] * 40, 0.005), {"dead_optimizer"}),
    ],
    ids=[
        "healthy",
        "solved",
        "saturated",
        "filled",
        "not filled",
        "certain",
        "open",
        "end of a schedule",
        "warmup and schedule",
        "warmup",
        "dead",
    ],
)
def test_what_is_normal_and_what_is_not(rows, detectors):
    diagnosis = diagnosis_of(rows)
    assert {event.detector for event in diagnosis.events} == detectors
    assert (diagnosis.condition == "dead") == ("dead_optimizer" in detectors)


def test_a_reward_may_have_any_unit_and_sign():
    draw = random.Random(0)
    for scale, shift in itertools.product((1.0, 100.0), (0.0, -1.0)):
        levels = [scale * ((0.7 if k < 60 else 0.1) + shift) for k in range(100)]
        assert severities([{"reward": x} for x in levels], "reward_collapse")[-1] == "stop"
        flat = [{"reward": scale * (shift - 0.3 + draw.gauss(0, 0.05))} for _ in range(100)]

        assert events_of(flat) == []


def severities(rows, name: str) -> list[str]:
    return [event.severity for event in events_of(rows) if event.detector == name]


def test_a_warning_is_cleared():
    rows = failing(0, {"entropy": 4.0, "reward": 0.3})
    for row in rows[TURN + 30 :]:
        row |= {"entropy": 0.7, "reward": 0.6}

    assert severities(rows, "entropy_explosion") == ["warn", "clear"]
    conditions = [phase.condition for phase in diagnosis_of(rows).phases]
    assert conditions[::2] == ["healthy", "healthy"]


def test_a_row_counts_once_toward_clearing_however_many_cases_there_are():
    cases = tuple((Symptom(name, "above", level=1.0),) for name in ("kl", "entropy"))
    detector = Detector(
        name="d",
        cases=cases,
        diagnosis="",
        remedy="",
        source="",
    )

    engine = Engine(detectors=[detector])
    sick = [engine.update({"kl": 2.0, "entropy": 0.1}) for _ in range(20)]
    assert [event.severity for events in sick for event in events] == ["warn"]

    rows = [engine.update({"kl": 0.1, "entropy": 0.1}) for _ in range(40)]
    assert next(k for k, events in enumerate(rows) if events) >= 4 * 3


def test_a_slow_collapse_is_reported_before_half_of_the_reward_is_lost():
    rows = failing(5, {"reward": 0.0, "facts/correct": 0.0}, over=60)
    first = next(event for event in events_of(rows) if event.detector == "reward_collapse")
    reward = next(item for item in first.evidence if item.metric == "reward")

    assert reward.now > (reward.before or 0.0) / 2


# Rows


def test_the_order_of_names_and_unknown_metrics_do_not_matter():
    rows = FAILURES["parser_drift"](0)
    draw = random.Random(0)

    shuffled = []
    for row in rows:
        items = [*row.items(), ("my/own", draw.random()), ("text", "hello"), ("flag", True)]
        draw.shuffle(items)
        shuffled.append(dict(items))

    assert events_of(shuffled) == events_of(rows)


def test_blind_detectors_name_the_missing_metrics():
    engine = Engine()
    for row in [{"reward": 0.5, "loss": 0.0}] * 3:
        engine.update(row)

    blind = engine.blind()
    assert blind["repetition"] == ("repetition",)
    assert blind["entropy_collapse"] == ("entropy",)
    assert not {"reward_collapse", "lying_loss"} & blind.keys()

    for row in healthy(0, steps=20):
        engine.update(row)

    assert engine.blind() == {}


@pytest.mark.parametrize("bad", [math.nan, 1e300])
def test_one_row_of_bad_numbers_is_reported_and_ignored(bad):
    rows = healthy(0)
    rows[100] = dict.fromkeys(rows[100], bad)
    found = [(e.detector, e.severity) for e in events_of(rows)]

    assert found == [("nonfinite", "warn"), ("nonfinite", "clear")]


def test_rows_without_a_step_or_a_reward():
    engine = Engine()
    rows = [{}, {"reward": 0.1}, {"step": None}, {"step": 7}, {"step": "9"}, {"step": math.nan}]
    assert [engine.update(row) for row in rows] == [[]] * 6
    assert engine.step == 9

    # TRL logs a reward only where it generates; reuse steps have none.
    full = [{"reward": 0.7 if k < 60 else 0.1} for k in range(100)]
    gaps = [row for each in full for row in (each, {"loss": 0.1})]
    assert [e.detector for e in events_of(gaps) if e.severity == "stop"] == ["reward_collapse"]


@pytest.mark.parametrize(("name", "cut"), [("self_reward_hacking", 113), ("constant_answer", 3)])
def test_the_state_survives_json(name, cut):
    rows = FAILURES[name](0)
    first = Engine()
    second = Engine()
    before = [event for row in rows[:cut] for event in first.update(row)]
    second.load_state(json.loads(json.dumps(first.state())))
    after = [event for row in rows[cut:] for event in second.update(row)]

    assert before + after == events_of(rows)
    for row in rows[cut:]:
        first.update(row)

    assert second.state() == first.state()


def test_the_state_is_bounded():
    engine = Engine()
    sizes = []
    for row in healthy(0, steps=350):
        engine.update(row)
        sizes.append(len(json.dumps(engine.state())) if row["step"] in (150, 349) else 0)

    assert sizes[349] < 1.2 * sizes[150]  # later steps have more digits


@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_detectors_are_complete(detector):
    assert set(detector.metrics) <= set(METRICS)
    assert all((detector.diagnosis, detector.remedy, detector.source, *detector.cases))

    text = explain(detector.name)
    assert all(part in text for part in (detector.diagnosis, detector.remedy, detector.source))
    assert all(metric.replace("_", " ") in text for metric in detector.metrics)

    for change in detector.changes:
        value = TrainConfig()
        for part in change.field.split("."):
            value = getattr(value, part)


def test_the_docs_list_the_detectors_in_their_order():
    page = (Path(__file__).parents[2] / "docs" / "detectors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", page, re.MULTILINE)
    documented = [(name, text, tuple(re.findall(r"`(\w+)`", reads))) for name, text, reads in rows]

    assert documented == [(d.name, d.diagnosis, d.metrics) for d in DETECTORS]


def test_the_best_source_wins_and_groups_are_combined():
    values = canonical(
        {
            "kl/start": 2.0,
            "kl": 1.0,
            "actor/ppo_kl": 3.0,
        }
    )

    assert values == {"kl": 1.0, "update_kl": 3.0}
    groups = {
        "optim/muon/update_rms": 1.0,
        "optim/adamw/update_rms": 3.0,
        "optim/muon/dead_blocks": 0.0,
        "optim/muon per_head/dead_blocks": 1.0,
    }

    assert canonical(groups) == {"update_rms": 3.0, "dead_blocks": 0.5}
    assert canonical({"reward_std": 1.0, "rewards/f/std": 2.0}) == {"reward_std": 1.0}


# Tracks


def test_noise_is_measured_without_the_trend():
    draw = random.Random(0)
    noisy = [0.01 * k + draw.gauss(0, 0.2) for k in range(2000)]
    assert deviation(noisy) == pytest.approx(0.2, rel=0.08)
    assert deviation([5.0 * k for k in range(50)]) == 0.0


def track_of(values, *size: int, pooled: bool = False) -> Track:
    track = Track(*size, pooled=pooled)
    for step, value in enumerate(values):
        track.add(value, step)
    return track


def test_one_outlier_moves_nothing():
    values = [1e6 if k in (4, 40) else 1.0 for k in range(60)]
    short = track_of(values, 10, 5).window(0)
    assert (short.now, short.reference("start"), short.best) == (1.0, 1.0, 1.0)


def test_the_onset_of_a_fall():
    values = [0.7] * 20 + [0.5, 0.3, 0.1, 0.1, 0.1, 0.1]
    short = track_of(values, 4, 2).window(0)
    assert Symptom("reward", "down", by=0.5).onset(short) == 20
    assert Symptom("reward", "not_up").onset(short) is None


def test_noise_may_hide_a_rise_in_five_rows_that_25_show():
    values = []
    for k in range(60):
        level = 0.2 if k < 10 else 0.4
        values.append(level + 0.11 * (-1) ** (k * k // 3))

    not_up = Symptom("reward", "not_up", by=0.1)
    assert not not_up.is_present(track_of(values, 10, 5).window(0), 4.0)

    lost = [*values, *[0.2] * 5]  # the five count
    assert not_up.is_present(track_of(lost, 10, 5).window(0), 4.0)


def test_a_fall_in_the_first_rows_is_remembered():
    values = [0.4] * 10 + [0.0] * 60
    long = track_of(values, 10, 5).window(1)
    assert long.best == pytest.approx(0.4)
    assert long.reference("best") == pytest.approx(0.4)


def test_the_best_single_evaluation_is_luck():
    track = track_of((0.3, 0.32, 0.5, 0.31, 0.3), 1, 1, pooled=True)
    best = (0.32 + 0.5 + 0.31) / 3
    last = (0.5 + 0.31 + 0.3) / 3
    assert track.window(0).reference("best") == pytest.approx(best)
    assert track.window(1).now == pytest.approx(last)


def test_the_noise_of_an_evaluation_is_that_of_its_problems():
    assert track_of((0.26, 0.45, 0.44), 1, 1).noise > 0.1  # the assumed number of problems
    engine = Engine()
    for step, accuracy in enumerate((0.26, 0.45, 0.44)):
        engine.update(
            {
                "step": step,
                "eval/greedy": accuracy,
                "eval/problems": 100,
            }
        )

    assert engine.tracks["heldout"].noise == pytest.approx(math.sqrt(0.45 * 0.55 / 100))


def gap_after(*rows, steps=0):
    """The gap of greedy and sampled accuracy after training and evaluations; None if unknown."""
    engine = Engine()
    for step in range(steps):
        engine.update({"step": step, "reward": 0.2, "facts/correct": 0.2})

    for step, row in enumerate(rows, steps):
        engine.update({"step": step} | row)

    track = engine.tracks.get("greedy_gap")
    return pytest.approx(track.recent[-1]) if track else None


def test_the_greedy_gap_is_that_of_the_evaluation_or_else_of_training():
    assert gap_after({"eval/greedy": 0.7, "eval/sampled": 0.4}) == 0.3
    assert gap_after({"eval/greedy": 0.4, "eval/sampled": 0.7}) == 0.3
    assert gap_after({"eval/greedy": 0.7}, steps=60) == 0.5
    assert gap_after({"eval/greedy": 0.7, "eval/sampled": 0.6}, steps=60) == 0.1

    assert gap_after({"eval/greedy": 0.7}) is None
    assert gap_after({"eval/sampled": 0.7}, steps=60) is None


def test_a_gap_of_greedy_and_sampled_accuracy_is_a_temperature_trap():
    def names(sampled):
        rows = []
        for row in healthy(0, steps=300):
            if row["step"] % 10 == 0:
                is_late = row["step"] >= TURN
                row = row | {"eval/greedy": 0.8, "eval/sampled": sampled if is_late else 0.75}
            rows.append(row)

        return {event.detector for event in events_of(rows)}

    assert "temperature_trap" in names(sampled=0.3)
    assert "temperature_trap" not in names(sampled=0.7)


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        ([{"reward": 0.25}, {"reward": 0.5}], 0.5),  # a share of completions
        ([{"reward": -0.5}, {"reward": 0.5}], 0.75),  # from -1 to 1
        ([{"reward": -0.5}, {"reward": -1.0}], 0.0),
        ([{"reward": 6.0, "reward_std": 3.0}, {"reward": 2.0, "reward_std": 2.0}], 0.5),
        ([{"reward": 3.0, "reward_std": 3.0}, {"reward": 6.0, "reward_std": 2.0}], 0.9),
        (
            [
                {"reward": 1.0, "reward_min": -2.0, "reward_max": 4.0},
                {"reward": 2.5, "reward_min": -1.0, "reward_max": 3.0},
            ],
            0.75,  # from the lowest to the highest that were logged
        ),
        ([{"reward": -3.0}, {"reward": 2.0}], None),  # of a range that is not known
        ([{"reward": 0.5}, {"reward": 0.5}], None),  # maybe one that was normalized
        ([{"reward": 0.25}, {"reward": math.nan}], None),
    ],
)
def test_rewards_are_placed_between_their_floor_and_the_most(rows, share):
    engine = Engine()
    for step, row in enumerate(rows * 3, start=1):
        engine.update({"step": step, "loss": 0.1, **row})

    found = engine._share_of_range({"step": 9, "loss": 0.1, **rows[-1]})
    assert found == (None if share is None else pytest.approx(share))


def test_a_metric_that_is_forgotten_begins_anew_and_others_go_on():
    engine = Engine()
    for step in range(1, 30):
        engine.update({"step": step, "reward": 0.5 - 0.01 * step, "loss": 0.1})

    before = {name: engine.tracks[name].num_seen for name in ("reward", "loss")}
    of_reward = {each.name for each in engine.detectors if "reward" in each.metrics}
    for name in engine.counts:
        engine.counts[name] = "counted"  # pyright: ignore

    engine.forget("reward")
    assert "reward" not in engine.tracks
    assert engine.tracks["loss"].num_seen == before["loss"]
    assert of_reward
    assert {name for name, counts in engine.counts.items() if counts != "counted"} == of_reward


def test_another_reward_is_forgotten_in_each_snapshot():
    monitor = Monitor()
    for step in range(1, 7):
        monitor.engine.update({"step": step, "reward": 0.1 * step, "loss": 0.1})
        if step % 3 == 0:
            monitor.save(step)

    monitor._forget_reward()
    seen = []
    for step in (3, 6):
        monitor.engine.load_state(monitor.snapshots[step])
        assert "reward" not in monitor.engine.tracks
        seen.append(monitor.engine.tracks["loss"].num_seen)

    assert seen == [3, 6]
