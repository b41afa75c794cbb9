"""The plan of the study follows the protocol, its command lines are valid, and its tools work."""

import pytest

from benchmarks._lib.rows import distinct, where
from benchmarks.gsm8k.__main__ import main, minutes_of, pick, write_sums, write_tuning
from benchmarks.gsm8k.calculator import calculate
from benchmarks.gsm8k.plan import (
    ARMS,
    GUARD_FACTOR,
    HEADLINE_SEEDS,
    PARTS,
    Places,
    chosen_rate,
    key_of,
    last_of_each,
    models_of,
    plan,
    train_flags,
)
from benchmarks.gsm8k.tables import differences, gain, show
from mesotron import cli
from mesotron.config import TrainConfig
from mesotron.runs.files import read_rows

PLACES = Places("models", "gsm8k", "tuning")


def finish(parts, accuracy):
    """Finish the plan with invented results; returns the cells by name."""
    done = {}
    while True:
        new = [cell for cell in plan(parts, done) if key_of(cell) not in done]
        if not new:
            return done

        for cell in new:
            done[key_of(cell)] = cell | {"accuracy": accuracy(cell), "steps": 1, "seconds": 60}


def best_at_twice(cell):
    """Each arm is best a step above the middle of its grid."""
    grid = ARMS[cell["arm"]].grid if cell["part"] == "search" else None
    return 0.5 if grid and cell["rate"] == grid.rate(1) else 0.1


@pytest.fixture(scope="module")
def cells():
    return list(finish(PARTS, best_at_twice).values())


def test_rates_are_searched_alike_on_a_tuning_seed_and_reported_on_others(cells):
    tuning = where(cells, use="tuning")
    assert distinct(tuning, "seed") == [130]
    assert {len(where(tuning, arm=arm)) for arm in distinct(tuning, "arm")} == {4}

    headline = where(cells, part="headline")
    assert len(headline) == len(ARMS) * len(HEADLINE_SEEDS)
    for cell in headline:
        grid = ARMS[cell["arm"]].grid
        assert cell["rate"] == (grid.rate(1) if grid else ARMS[cell["arm"]].rate)

    reports = where(cells, use="reporting")
    assert all(200 <= cell["seed"] < 300 for cell in reports)

    ordered = list(plan(("headline",), {key_of(cell): cell for cell in cells}))
    assert [cell["seed"] for cell in ordered[: len(ARMS)]] == [HEADLINE_SEEDS[0]] * len(ARMS)


def test_the_guard_runs_at_eight_times_the_rate_on_five_seeds(cells):
    guard = where(cells, part="guard")
    rate = ARMS["muon"].grid.rate(1)
    assert distinct(guard, "rate") == [GUARD_FACTOR * rate]
    assert len(where(guard, arm="off")) == len(where(guard, arm="rollback")) == 5

    running = pick(iter(guard), {key_of(guard[0])})
    assert running is None
    assert pick(iter(guard), set()) == guard[0]


def test_nothing_reports_before_its_search(cells):
    assert not list(plan(("headline",), {}))[len(HEADLINE_SEEDS) :]  # plain TRL alone
    assert chosen_rate("muon", {}) is None


@pytest.mark.parametrize("part", PARTS)
def test_every_command_line_is_one_of_mesotron_train(cells, part):
    for cell in where(cells, part=part):
        words = train_flags(cell, PLACES)
        config = cli.parse(TrainConfig, words, "mesotron train", cli.RECIPE)
        is_tuning = cell["use"] == "tuning"

        assert config.optim.lr == pytest.approx(cell["rate"], rel=1e-5)
        assert config.seed == cell["seed"]
        assert config.task.data == (PLACES.tuning if is_tuning else PLACES.report,)
        assert config.task.num_eval == (300 if is_tuning else 1000)
        assert config.guard == (cell["arm"] if part == "guard" else "off")
        assert bool(config.sft.steps) == (part == "smollm2" or cell["arm"] == "gemma270m")
        if cell["arm"] != "gemma270m" and part != "smollm2":
            assert config.rollout.max_tokens == 512


def test_the_models_of_the_parts_are_those_of_their_runs(cells):
    for part in PARTS:
        used = {train_flags(cell, PLACES)[2] for cell in where(cells, part=part)}
        assert set(models_of([part], PLACES.models)) == used


def test_what_comes_last_counts():
    words = ["--guard", "off", "--a", "1", "2", "--fast", "--guard", "rollback", "--a", "3"]
    assert last_of_each(words) == ["--fast", "--guard", "rollback", "--a", "3"]


def test_the_search_sees_no_test_problem(tmp_path):
    data = write_sums(tmp_path / "sums")
    tuning = write_tuning(data, tmp_path / "tuning")
    parts = [
        read_rows(folder / name)
        for folder, name in ((tuning, "train.jsonl"), (tuning, "test.jsonl"), (data, "test.jsonl"))
    ]
    train, held_out, test = ({row["question"] for row in rows} for rows in parts)

    assert train | held_out == {row["question"] for row in read_rows(data / "train.jsonl")}
    assert not train & held_out
    assert not (train | held_out) & test


def test_gains_are_paired_by_problem():
    assert differences("0011", "0111") == [0, 1, 0, 0]
    before = {"solved": "0" * 80 + "1" * 20}
    after = {"solved": "0" * 50 + "1" * 50}
    score = gain({"before": before, "after": after})
    assert score.value == pytest.approx(0.3)
    assert 0.2 < score.low < 0.3 < score.high < 0.4


def test_a_run_of_qwen_stays_within_fifteen_minutes(cells):
    for cell in where(cells, part="headline"):
        assert 2 < minutes_of(cell) < 15, cell["arm"]


def test_the_tables_name_unfinished_runs(cells):
    assert "not finished" in show(cells)


def test_the_calculator_computes_and_refuses_everything_else():
    assert calculate("(12 + 3.5) * 2 - -1") == "32"
    assert calculate("7 / 2") == "3.5"
    for text in ("1 / 0", "2 ** 9", "__import__('os')", "1 +", "9" * 300, "x"):
        with pytest.raises(ValueError, match=r"\w"):
            calculate(text)


@pytest.mark.slow
def test_a_trial_trains_samples_and_resumes(tmp_path, capsys):
    words = ["--dry", "--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    words += ["--protocol", "none", "--parts", "smollm2", "--samples", "2", "--minutes", "5"]
    main(words)
    main(words)

    assert "3 cells, 0 known to go, 0 failed" in capsys.readouterr().out.splitlines()[-1]
    assert "smollm2" in (tmp_path / "out" / "tables.md").read_text()
