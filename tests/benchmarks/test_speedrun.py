"""The speedrun's scripts at a tiny size: both kinds of contender race, and are timed."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "speedrun"
pytestmark = pytest.mark.usefixtures("beside_scripts")


def test_every_contender_is_a_whole_config():
    from contenders import make_config
    from entries import NAMES

    from mesotron.rlvr.train import check

    configs = {name: make_config(name, 3, None, small=False) for name in NAMES}
    for config in configs.values():
        check(config)
        assert config.seed == 3
        assert config.task == configs["stock"].task
        assert config.reward == configs["stock"].reward
    assert not configs["stock"].rollout.fast
    assert configs["recorded"].rollout.fast


def test_the_recipe_is_what_has_the_record():
    """So that whoever trains it has the seconds that README tells."""
    from dataclasses import replace

    from contenders import make_config

    from mesotron.recipes import make_recipe

    task = ["reward.parts=two_part,near,overlong", "reward.overlong_buffer=1"]
    raced = make_config("falling_2e-4_of192", 1, None, False, task)
    assert replace(raced, recipe="arith_smollm2_fast") == replace(
        make_recipe("arith_smollm2_fast"), seed=1
    )


def test_plain_trl_in_micro_batches_makes_whole_steps(tmp_path):
    from contenders import Contestant, make_config

    common = ["rollout.micro_batch=8"]
    whole, cut = (make_config("stock", 0, "tiny", True, x) for x in ([], common))
    args = [Contestant("stock", config, tmp_path / str(k)).trainer.args
            for k, config in enumerate((whole, cut))]  # fmt: skip
    sizes = [(x.per_device_train_batch_size, x.gradient_accumulation_steps) for x in args]
    assert sizes == [(16, 1), (8, 2)]


@pytest.mark.parametrize("name", ["stock", "muon"])
def test_a_race_counts_training_alone(tmp_path, name):
    from racing import race

    given = {"model": "tiny", "small": True, "common": [], "every": 0.0, "target": 2.0}
    given["limit"] = 0.5
    row = race(name, 0, tmp_path, 60.0, given)
    assert row["seconds_to_target"] is None
    assert row["steps"] >= 1
    assert [point["step"] for point in row["curve"]] == list(range(row["steps"] + 1))
    assert row["curve"][0]["seconds"] == 0.0
    won = race(name, 0, tmp_path / "won", 60.0, given | {"target": 0.0})
    assert won["steps"] == 1
    assert won["seconds_to_target"] == pytest.approx(won["first_step_s"])


def test_beside_others_steps_are_counted_at_the_pace_of_one_alone(tmp_path):
    from racing import race

    given = {"model": "tiny", "small": True, "common": [], "every": 0.0, "target": 2.0}
    row = race("muon", 0, tmp_path, 60.0, given | {"limit": 130.0, "pace": (100.0, 20.0)})
    assert [point["seconds"] for point in row["curve"]] == [0.0, 100.0, 120.0, 140.0]
    assert row["beside_others"]


def test_evaluations_stop_the_clock(monkeypatch):
    import types

    import racing

    now = [1000.0]
    monkeypatch.setattr(racing, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow:
        def accuracy(self):
            now[0] += 100.0
            return 0.5

    clock = racing.Clock(Slow(), every=2.0, target=0.9, seconds=5.0, deadline=1e9)  # pyright: ignore
    control = types.SimpleNamespace(should_training_stop=False)
    clock.on_train_begin()
    for step in (1, 2, 3, 4):
        now[0] += 1.5
        clock.on_step_end(None, types.SimpleNamespace(global_step=step), control)
        assert control.should_training_stop == (step == 4)
    seconds = {point["step"]: point["seconds"] for point in clock.curve}
    assert seconds == {0: 0.0, 2: 3.0, 4: 6.0}
    assert clock.row()["settled_step_s"] == 1.5
    assert not clock.row()["cut_short"], "its own limit ended it"
    clock.deadline = now[0]
    now[0] += 1.5
    clock.on_step_end(None, types.SimpleNamespace(global_step=5), control)
    assert clock.row()["cut_short"]


def test_runs_side_by_side_get_the_pace_of_their_contender_alone(tmp_path, monkeypatch):
    import argparse
    from contextlib import nullcontext

    import run

    asked = {}

    class Told(nullcontext):
        def __init__(self, *_):
            super().__init__(self)

        def run(self, folder, seconds, name, seed, given):
            asked[name, seed] = given["limit"], given.get("pace")
            slow = 2.0 if name == "b" else 1.0
            paces = {"first_step_s": 6 * slow, "settled_step_s": slow}
            return {"steps": 9, "cut_short": (name, seed) == ("a", 2), **paces}

    monkeypatch.setattr(run, "Children", Told)
    monkeypatch.setattr(run, "mps", lambda *_: nullcontext())
    given = argparse.Namespace(
        names=["a", "b"], seeds=2, seconds=60.0, out=tmp_path / "out.json", model=None, small=True,
        set=[], every=4.0, target=0.9, limit=600.0, pace=None,
    )  # fmt: skip
    run.Race(given, tmp_path).beside()
    alone = (run.PACE_SECONDS, None)
    assert asked == {
        ("a", 0): alone, ("a", 1): (600.0, (6.0, 1.0)), ("a", 2): (600.0, (6.0, 1.0)),
        ("b", 0): alone, ("b", 1): (600.0, (12.0, 2.0)), ("b", 2): (600.0, (12.0, 2.0)),
    }  # fmt: skip
    asked.clear()
    run.Race(given, tmp_path).beside()
    assert set(asked) == {("a", 2)}, "what the call's time cut short is run again, and nothing else"
    asked.clear()
    given.pace, given.out = [5.0, 0.5], tmp_path / "known.json"
    run.Race(given, tmp_path).beside()
    assert asked == {(name, seed): (600.0, [5.0, 0.5]) for name in "ab" for seed in (1, 2)}


def test_a_contender_whose_rate_falls_ends_with_its_steps(tmp_path, monkeypatch):
    from entries import NAMES
    from racing import race

    falling = NAMES["muon"] | {"steps": 3, "optim.schedule": "linear"}
    monkeypatch.setitem(NAMES, "falling", falling)
    given = {"model": "tiny", "small": True, "common": [], "every": 1e9, "target": 2.0}
    row = race("falling", 0, tmp_path, 60.0, given | {"limit": 1e9})
    assert [point["step"] for point in row["curve"]] == [0, 3]
    assert row["seconds_to_target"] is None


@pytest.mark.parametrize("name", ["stock", "muon"])
def test_the_phases_add_up_to_the_step(tmp_path, name):
    from stopwatch import PHASES, measure

    given = {"model": "tiny", "small": True, "common": ["task.few_shot=1"], "warm": 1, "count": 2}
    row = measure(name, tmp_path, 60.0, given)
    assert row["step_ms"] > 0
    seen = row["phases_ms"]
    asked = set(PHASES) - ({"clip", "log"} if name == "stock" else set())  # stock logs each tenth
    assert asked <= seen.keys()
    assert min(seen.values()) > -1.0
    first = row["first_phases_ms"]
    assert {"sample", "forward", "optimizer"} <= first.keys()
    assert sum(first.values()) == pytest.approx(row["first_ms"])


def ran(name: str, seconds: float, reached: bool = True) -> dict:
    curve = [{"step": 9, "seconds": seconds, "accuracy": 0.9}]
    return {"name": name, "curve": curve, "seconds_to_target": seconds if reached else None}


def test_a_rival_that_has_not_arrived_is_a_bound():
    from page import verdict

    cells = {"a/1": ran("a", 20.0), "a/2": ran("a", 30.0), "stock/1": ran("stock", 100.0)}
    whole = verdict(cells | {"stock/2": ran("stock", 150.0)})
    assert whole[-1] == "a / stock: 0.20"
    bound = verdict(cells | {"stock/2": ran("stock", 150.0, reached=False)})
    assert bound[-1] == "a / stock: at most 0.20"
    lost = {"a/1": ran("a", 20.0, reached=False), "a/2": ran("a", 30.0)}
    assert all("/" not in line for line in verdict(cells | lost)), "ours must arrive"


def test_the_run_that_tells_the_pace_is_no_final():
    from page import verdict

    seeds = {f"{name}/{seed}": ran(name, s) for name, s in (("a", 20.0), ("stock", 100.0))
             for seed in (1, 2, 3)}  # fmt: skip
    pace = {"stock/0": ran("stock", 16.0, reached=False), "a/0": ran("a", 5.0)}
    assert verdict(seeds | pace) == verdict(seeds)
    assert verdict(seeds)[-1] == "a / stock: 0.20"


def test_stock_may_take_so_many_times_as_long_as_ours():
    import argparse

    from run import limit_of

    given = argparse.Namespace(
        what="final", ours="a", stock="stock", patience=3.5, limit=30.0, seeds=2, set=["x=1"],
        target=0.9,
    )  # fmt: skip
    rules = "x=1/target=0.9"
    cells = {f"a/1/{rules}": ran("a", 20.0), f"a/2/{rules}": ran("a", 30.0)}
    # Of the grid and of other rules: they are no finals of this race.
    cells |= {f"a/0/{rules}": ran("a", 9.0, reached=False), "a/1/target=0.9": ran("a", 99.0)}
    assert limit_of(given, "a", cells) == 30.0
    assert limit_of(given, "stock", cells) == 87.5
    lost = {f"a/2/{rules}": ran("a", 30.0, reached=False)}
    assert limit_of(given, "stock", cells | lost) == 30.0
    assert limit_of(given, "stock", {}) == 30.0
