"""The training comparison: data, divergence, rate search, resuming, the page."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks._lib.results import read_json
from benchmarks.training import __main__ as training
from benchmarks.training.__main__ import Config
from benchmarks.training.language_model import (
    VOCABULARY,
    RunSettings,
    has_diverged,
    read_corpus,
    train,
)
from benchmarks.training.search import Ledger, Point, Search, beside, interval

FOLDER = Path(__file__).parent


def test_corpus_is_sampled_by_seed():
    corpus = read_corpus()
    assert int(corpus.train.max()) < VOCABULARY
    first, again, other = (corpus.batches(seed, 3, 2, 16) for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_divergence():
    uniform = math.log(VOCABULARY)
    assert has_diverged([2.0, math.nan])
    assert has_diverged([uniform * 1.3] * 8)
    assert not has_diverged([uniform * 1.3] * 7)
    assert not has_diverged([uniform] * 8)

    settings = RunSettings(
        optimizer="muon_sgd", lr=100.0, aux_lr=1e4, seed=0, steps=30, batch=2, context=16, layers=1
    )
    record = train(settings, read_corpus(), torch.device("cpu"))
    assert record["loss"] is None
    assert record["diverged_at"] == len(record["train_losses"]) < 30


def parabola(best_lr, best_aux=None):
    def measure(point, seed):
        loss = math.log(point.lr / best_lr) ** 2 + 0.001 * seed
        return loss + (math.log(point.aux_lr / best_aux) ** 2 if best_aux else 0)

    return measure


@pytest.mark.parametrize("best_lr", [0.0005, 0.002, 0.004, 0.032])
def test_best_rate_is_never_at_an_edge(best_lr):
    search = Search(parabola(best_lr), (0.002, 0.004, 0.008), (None,), (0, 1, 2))
    assert search.run() == Point(best_lr, None)

    for lr in (best_lr / 2, best_lr, best_lr * 2):
        assert set(search.losses[Point(lr, None)]) == {0, 1, 2}


def test_search_covers_auxiliary_rates_divergence_and_more_seeds():
    search = Search(parabola(0.004, 4.0), (0.002, 0.004, 0.008), (0.5, 1.0, 2.0), (0, 1))
    assert search.run() == Point(0.004, 4.0)

    diverging = Search(
        lambda p, seed: math.inf if p.lr > 3 else -p.lr, (1.0, 2.0, 4.0), (None,), (0, 1)
    )
    assert diverging.run().lr == 2.0

    def first_seed_prefers_2(point, seed):
        return {
            1.0: 5,
            2.0: 0 if seed == 0 else 9,
            4.0: 1,
            8.0: 5,
            16.0: 9,
        }[point.lr]

    moved = Search(first_seed_prefers_2, (1.0, 2.0, 4.0), (None,), (0, 1, 2))
    assert moved.run().lr == 4.0


def test_neighbors_and_interval():
    assert beside(2.0, [1.0, 2.0, 8.0]) == (1.0, 8.0)
    assert beside(1.0, [1.0, 2.0, 8.0]) == (0.5, 2.0)
    assert beside(3.0, [3.0]) == (1.5, 6.0)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(2.4841, abs=1e-4)
    assert interval([1.0]) is None


def test_ledger_loses_only_a_torn_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    ran = []

    def fill(ledger):
        for seed in (0, 1):
            ledger.get_or_run({"seed": seed}, lambda seed=seed: ran.append(seed) or {"loss": seed})

    fill(Ledger(path, {"corpus": "x"}))
    path.write_text(path.read_text()[:-9])  # killed while it wrote the second run
    fill(Ledger(path, {"corpus": "x"}))

    assert ran == [0, 1, 1]
    assert sorted(run["loss"] for run in Ledger(path, {"corpus": "x"}).runs.values()) == [0, 1]

    fill(Ledger(path, {"corpus": "y"}))
    assert ran == [0, 1, 1, 0, 1]


@pytest.mark.slow
def test_an_interrupted_sweep_resumes_to_the_same_result(tmp_path, monkeypatch):
    config = Config(
        optims=("adamw", "pion_per_head"),
        lrs=(0.004, 0.008),
        seeds=(0, 1),
        steps=2,
        device="cpu",
        out=tmp_path / "result.json",
    )

    monkeypatch.setattr("benchmarks.training.search.MAX_MOVES", 1)
    first = training.compare(config)
    start = {(r["optimizer"], r["seed"]): r["train_losses"][0] for r in first["runs"]}

    assert start["adamw", 0] == start["pion_per_head", 0] != start["adamw", 1]
    monkeypatch.setattr(training, "train", lambda *_: pytest.fail("a finished run was repeated"))
    assert training.compare(config) == first

    summary = {entry["optimizer"]: entry for entry in first["summary"]}
    assert summary["adamw"]["versus_adamw"] == 0
    assert summary["pion_per_head"]["interval"] > 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"steps": 0}, "--steps"),
        ({"lrs": (0.01, math.nan)}, "learning rate"),
        ({"seeds": (0, 1, 0)}, "--seeds"),
        ({"optims": ("mun",)}, "mun"),
    ],
)
def test_bad_values_are_refused(wrong, named):
    with pytest.raises(ValueError, match=named):
        training.run(Config(**wrong))


def test_explicit_values_win_over_the_quick_preset():
    config = training.complete(
        Config(
            quick=True,
            steps=120,
            optims=("pion",),
        )
    )

    assert (config.steps, config.optims, config.lrs) == (120, ("pion",), training.QUICK["lrs"])


def test_page_and_plot_show_the_result(tmp_path):
    page = (FOLDER / "README.md").read_text()
    result = read_json(FOLDER / "result.json.gz")
    for entry in result["summary"]:
        assert f"| {' | '.join(training.table_row(entry))} |" in page

    assert result["corpus"]["sha256"] in page
    training.draw(result, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size > 5000
