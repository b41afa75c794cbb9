"""The SmolLM2 study: its plan has the published cells, its measures and pages are right."""

import argparse
import random
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks._lib.results import read_json, write_json
from benchmarks._lib.rows import by_key, distinct, values, where
from benchmarks.smollm2 import page, supervised
from benchmarks.smollm2.plan import BEST_RATES, FINAL_SEEDS, LEVERS, key_of, levers, make, plan
from benchmarks.smollm2.spectrum import cut, measure
from benchmarks.smollm2.training import config_of
from mesotron.config import ModelConfig, TaskConfig, TrainConfig
from mesotron.rlvr.train import check


@pytest.fixture
def given(tmp_path):
    rows = "".join(f'{{"question": "{k}+1?", "answer": "#### {k + 1}"}}\n' for k in range(99))
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows.replace("?", f" in {name}?"))

    return argparse.Namespace(
        parts=["levers", "spectrum", "map", "gsm8k"],
        levers=[],
        lever_seeds=[1, 2],
        spectrum_steps=60,
        final_steps=120,
        map_rollouts=40,
        gsm8k_steps=60,
        state=tmp_path,
        folder="tiny",
        device="cpu",
        micro_batch=256,
        set=[],
        plain=False,
        gsm8k=tmp_path,
    )


def finish(cell: dict, share: float) -> dict:
    draws = random.Random(str(cell))
    solved = "".join(str(int(draws.random() < share)) for _ in range(512))
    rows = {"facts/correct": [[1, 0.9], [2, share]]}

    return cell | {"solved": solved, "rows": rows}


def run_all(given) -> list[dict]:
    """Every cell that the plan asks for; the larger a rate, the better."""
    done: dict = {}
    while True:
        new = []
        for cell in plan(given, done):
            if key_of(cell) not in done:
                new.append(cell)

        if not new:
            return list(done.values())
        done[key_of(new[0])] = finish(new[0], 0.1 + 1e3 * new[0].get("rate", 0.0))


def test_the_map_has_the_published_cells(given):
    given.parts = ["map"]
    published = read_json(Path(page.__file__).with_name("results.json.gz"))["cells"]
    keys = by_key(where(published, part="map"), key_of).keys()
    assert by_key(plan(given, {}), key_of).keys() == keys


def test_finals_use_fresh_seeds_at_the_best_rate(given):
    given.parts = ["gsm8k"]
    cells = run_all(given)
    for name, (rate, gain) in BEST_RATES.items():
        searched = where(cells, optim=name, stage="search")
        assert values(searched, "rate") == [rate / 2, rate]
        assert distinct(searched, "seed") == [0]

        finals = where(cells, optim=name, stage="final")
        assert distinct(finals, "rate") == [rate]
        assert distinct(finals, "gain") == [gain]
        assert values(finals, "seed") == list(FINAL_SEEDS)


@pytest.mark.slow
def test_every_training_cell_is_a_valid_config(given):
    for cell in run_all(given):
        if "optim" not in cell:
            continue

        config = config_of(cell, given, given.state / "run")
        check(config)
        assert (config.steps, config.seed) == (cell["steps"], cell["seed"])
        assert config.optim.lr == pytest.approx(cell["rate"] * cell["gain"])


def test_the_best_rank_is_the_rank_of_the_signal():
    torch.manual_seed(0)
    U = torch.linalg.qr(torch.randn(32, 3)).Q
    V = torch.linalg.qr(torch.randn(64, 3)).Q
    spectra = measure((3.0 * U @ V.T + 0.02 * torch.randn(16, 32, 64))[:, None])
    cosine = spectra["8"]["cosine"]
    passed = spectra["8"]["passed"]

    assert spectra["8"]["best_rank"] == passed["k_p=1"] == passed["measured"] == 3
    assert cosine["k_p=1"] == cosine["best"] == pytest.approx(1.0, abs=5e-3)
    assert cosine["k_p=0"] == 0.0  # no direction has two thirds of the energy
    assert cosine["muon"] == pytest.approx((3 / 32) ** 0.5, abs=0.05)
    assert spectra["1"]["noise_top"] == pytest.approx(spectra["edge"], rel=0.1)  # white
    assert spectra["snr"] == pytest.approx(27 / (0.02**2 * 32 * 64), rel=0.1)


def test_a_measured_edge_excludes_noise_that_is_not_white():
    torch.manual_seed(0)
    u = torch.linalg.qr(torch.randn(32, 1)).Q
    v = torch.linalg.qr(torch.randn(64, 1)).Q
    rows = torch.where(torch.arange(32) < 2, 1.0, 0.05)[:, None]
    spectra = measure((12.0 * u @ v.T + rows * torch.randn(16, 32, 64))[:, None])

    assert spectra["1"]["passed"]["measured"] == 1 < spectra["1"]["passed"]["noise"]
    assert spectra["1"]["cosine"]["measured"] > spectra["1"]["cosine"]["noise"]


def test_heads_are_rows_of_q_and_columns_of_o():
    G = torch.arange(24.0).reshape(1, 4, 6)
    assert torch.equal(cut(G, "0.q_proj", 2)[0, 1], G[0, 2:])
    assert torch.equal(cut(G, "0.o_proj", 2)[0, 1], G[0, :, 3:])


def trained(cell: dict, share: float, problems: int = 512) -> dict:
    solved = finish(cell, share)["solved"][:problems]
    reached = solved.count("1") / problems
    names = ("facts/correct", "groups/zero_signal", "facts/truncated", "entropy")
    return cell | {
        "solved": solved,
        "accuracy": reached,
        "diverged": False,
        "steps_done": cell["steps"],
        "rows": {name: [[1, 0.5], [2, 0.5]] for name in names},
        "curve": [[1, 0.07], [2, reached]],
        "dead_blocks": None,
        "health": ["healthy", None, "ok"],
    }


def write_pages(cells: list[dict], folder: Path) -> None:
    machine = {"device": "a GPU", "torch": "2", "transformers": "5"}
    record = {"settings": {"model": "/a/place"}, "machine": machine, "cells": cells}
    write_json(record, folder / "results.json")
    page.main([str(folder / "results.json")], folder)


def rows_of(path: Path, first: str) -> list[list[str]]:
    rows = [line[2:-2].split(" | ") for line in path.read_text().splitlines()]
    return [row for row in rows if row[0] == first]


@pytest.mark.slow
def test_pages_show_intervals_and_means(given, tmp_path):
    warm = {
        "part": "gsm8k",
        "stage": "warm",
        "seed": 0,
        "curve": [[0, 0.01], [467, 0.12]],
        "accuracy": 0.12,
    }

    shares = {"adamw": 0.1, "muon": 0.4, "pion_cutoff": 0.38}
    changes = levers(given, {})
    assert len(changes) == 2 * len(LEVERS)

    cells = [warm]
    for stage, seed, name in product(("search", "final", "several"), (1, 2, 3), shares):
        cell = make("gsm8k", stage, optim=name, rate=1e-5, steps=60, seed=seed)
        rows = {"facts/correct": [[1, 0.0], [2, shares[name]]]}
        cells.append(trained(cell, shares[name], 256) | {"rows": rows})
    cells += [trained(cell, 0.1 * cell["seed"]) for cell in changes]
    write_pages(cells, tmp_path)

    tables = tmp_path / "tables.md"
    assert low_end(tables, "muon") == ""  # the leader
    assert float(low_end(tables, "adamw")) > 0 > float(low_end(tables, "pion_cutoff"))
    assert (tmp_path / "gsm8k.png").stat().st_size > 1000

    row = rows_of(tables, "stock")[0]
    first, second = row[3].split(", ")
    assert row[2] == f"{(float(first) + float(second)) / 2:.3f} (2)"
    assert read_json(tmp_path / "results.json.gz")["settings"] == {}


def low_end(tables: Path, name: str) -> str:
    """The low end of the interval by which an optimizer is behind the first."""
    row = next(row for row in rows_of(tables, name) if len(row) == 8)
    return row[4].partition("[")[2].partition(",")[0]


@pytest.mark.slow
def test_a_batch_in_pieces_has_the_gradient_of_the_whole(monkeypatch):
    model = ModelConfig(name="tiny")
    config = TrainConfig(model=model, task=TaskConfig(num_eval=2), device="cpu")
    made = supervised.Supervised(config, 1)
    batch = next(made.batches())
    batch["labels"][0, :-1] = supervised.IGNORED  # rows with few tokens weigh less

    def gradient(rows):
        monkeypatch.setattr(supervised, "ROWS", rows)
        made.model.zero_grad()
        made.backward(batch)
        return torch.cat([p.grad.flatten() for p in made.model.parameters()])

    made.model(**batch).loss.backward()
    whole = torch.cat([p.grad.flatten() for p in made.model.parameters()])
    torch.testing.assert_close(gradient(len(batch["labels"])), whole)
    torch.testing.assert_close(gradient(3), whole, rtol=1e-4, atol=1e-6)
