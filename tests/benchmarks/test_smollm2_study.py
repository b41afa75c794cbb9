"""The SmolLM2 study's plan goes all the way to its finals, and its measures know what they say."""

import argparse
import random
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "smollm2"
pytestmark = pytest.mark.usefixtures("beside_scripts")


@pytest.fixture
def given(tmp_path):
    return argparse.Namespace(
        parts=["tournament", "levers", "spectrum", "box", "horizon", "map", "gsm8k"], levers=[],
        lever_seeds=[1, 2],
        contenders=["adamw", "muon", "pion_cutoff"], search_steps=60, final_steps=120,
        map_rollouts=40, box_steps=80, horizon_steps=1500, horizon_rate=1e-4, horizon_seeds=1,
        horizon_optim="muon",
        gsm8k_steps=60, state=tmp_path, folder="tiny", device="cpu", micro_batch=256, set=[],
        plain=False, gsm8k=tmp_path,
    )  # fmt: skip


def finish(cell: dict, share: float) -> dict:
    draws = random.Random(str(cell))
    solved = "".join(str(int(draws.random() < share)) for _ in range(512))
    rows = {"facts/correct": [[1, 0.9], [2, share]]}
    return cell | {"solved": solved, "update_ratio": 0.05, "rows": rows}


def run_all(given) -> dict:
    """Every cell that comes up, each rate as good as it is near to 8e-5."""
    from plan import key_of, plan

    done: dict = {}
    while new := [cell for cell in plan(given, done) if key_of(cell) not in done]:
        near = abs(new[0].get("rate", 8e-5) - 8e-5) / 8e-5
        done[key_of(new[0])] = finish(new[0], max(0.6 - 0.4 * near, 0.02))
    return done


def test_the_plan_reaches_finals_of_fresh_seeds_at_the_best_rate(given):
    from plan import FINAL_SEEDS

    cells = list(run_all(given).values())
    finals = [c for c in cells if (c["part"], c["stage"]) == ("tournament", "final")]
    assert {cell["rate"] for cell in finals} == {8e-5}
    assert len(finals) == 3 * len(FINAL_SEEDS)
    searched = {cell["seed"] for cell in cells if cell["stage"] == "search"}
    assert not searched & {cell["seed"] for cell in finals}
    gains = {cell["optim"]: cell["gain"] for cell in finals}
    assert gains == {"adamw": 1.0, "muon": 4.0, "pion_cutoff": 4.0}, "0.2 over the measured 0.05"
    mapped = {cell["rate"] for cell in cells if cell["part"] == "map"}
    assert mapped == {4e-5, 1.6e-4, 6.4e-4}, "around the best rate that the search found"


def test_every_training_cell_is_a_config_that_can_run(given):
    from training import config_of

    from mesotron.rlvr.train import check

    trained = [cell for cell in run_all(given).values() if "optim" in cell]
    for cell in trained:
        config = config_of(cell, given, given.state / "run")
        check(config)
        assert (config.steps, config.seed) == (cell["steps"], cell["seed"])
        assert config.optim.lr == pytest.approx(cell["rate"] * cell["gain"])
        plain = cell["stage"] == "adamw, plain passes"
        assert config.rollout.fast == (not plain)


def test_the_problems_that_choose_do_not_judge():
    from plan import accuracy

    from mesotron.compare.kind import is_for_choosing

    marks = "".join(str(int(is_for_choosing(f"sums-eval-{k}"))) for k in range(512))
    cell = {"solved": marks}
    assert accuracy(cell, choosing=True) == 1.0
    assert accuracy(cell, choosing=False) == 0.0
    assert 0.4 < accuracy(cell) < 0.6


def test_the_best_number_of_directions_is_the_signals_rank():
    """Three directions of signal under noise: a filter that passes just them is the best."""
    from spectrum import measure

    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(size, 3)).Q for size in (32, 64))
    signal = 3.0 * U @ V.T
    G = signal + 0.02 * torch.randn(16, 32, 64)
    found = measure(G[:, None])
    assert found["8"]["best_rank"] == 3
    assert found["8"]["passed"]["k_p=1"] == 3  # each has 1 / sqrt(3) of the norm
    cosine = found["8"]["cosine"]
    assert cosine["k_p=1"] == cosine["best"] == pytest.approx(1.0, abs=5e-3)
    assert found["8"]["passed"]["measured"] == 3
    assert cosine["k_p=0"] == 0.0, "no direction has two thirds of the energy"
    assert cosine["muon"] == pytest.approx((3 / 32) ** 0.5, abs=0.05)
    assert cosine["gradient"] < cosine["best"], "noise is in it"
    assert found["1"]["noise_top"] == pytest.approx(found["edge"], rel=0.1), "it is white"
    assert found["snr"] == pytest.approx(27 / (0.02**2 * 32 * 64), rel=0.1)


def test_a_measured_edge_keeps_out_noise_that_is_not_white():
    """Noise whose rows differ in size reaches above the edge of white noise: only the sample of it
    tells how far."""
    from spectrum import measure

    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(size, 1)).Q for size in (32, 64))
    rows = torch.where(torch.arange(32) < 2, 1.0, 0.05)[:, None]
    found = measure((12.0 * u @ v.T + rows * torch.randn(16, 32, 64))[:, None])
    assert found["1"]["passed"]["measured"] == 1
    assert found["1"]["passed"]["noise"] > 1
    assert found["1"]["cosine"]["measured"] > found["1"]["cosine"]["noise"]


def test_heads_are_cut_from_rows_of_q_and_columns_of_o():
    from spectrum import cut

    G = torch.arange(24.0).reshape(1, 4, 6)
    assert torch.equal(cut(G, "0.q_proj", 2)[0, 1], G[0, 2:])
    assert torch.equal(cut(G, "0.o_proj", 2)[0, 1], G[0, :, 3:])


def trained(cell: dict, share: float, problems: int = 512) -> dict:
    """What a cell that trained leaves, invented."""
    solved = finish(cell, share)["solved"][:problems]
    reached = solved.count("1") / problems
    rows = {
        name: [[step, 0.5] for step in (1, 2)]
        for name in ("facts/correct", "groups/zero_signal", "facts/truncated", "entropy")
    }
    return cell | {
        "solved": solved, "accuracy": reached, "diverged": False, "rows": rows,
        "steps_done": cell["steps"],
        "curve": [[1, 0.07], [2, reached]], "dead_blocks": None, "health": ["healthy", None, "ok"],
    }  # fmt: skip


def write_pages(cells: list[dict], folder: Path) -> None:
    import json

    import page

    found = {
        "settings": {"model": "/a/place"},
        "machine": {"device": "a GPU", "torch": "2", "transformers": "5"},
        "cells": cells,
    }
    (folder / "results.json").write_text(json.dumps(found))
    page.main([str(folder / "results.json")], folder)


def lines_of(page: Path, first: str) -> list[list[str]]:
    """The table's rows that begin with a word, cut at the bars."""
    rows = [line[2:-2].split(" | ") for line in page.read_text().splitlines()]
    return [row for row in rows if row[0] == first]


def test_gsm8k_takes_the_rate_that_samples_more_to_fresh_seeds(given):
    cells = [cell for cell in run_all(given).values() if cell["part"] == "gsm8k"]
    for name in ("adamw", "muon", "pion_cutoff"):
        mine = [cell for cell in cells if cell.get("optim") == name]
        assert {cell["rate"] for cell in mine if cell["stage"] == "search"} == {4e-5, 8e-5}
        finals = [cell for cell in mine if cell["stage"] == "final"]
        assert [(cell["rate"], cell["seed"]) for cell in finals] == [(8e-5, k) for k in (1, 2, 3)]
        several = [cell for cell in mine if cell["stage"] == "several"]
        assert [cell["objective"] for cell in several] == ["grpo", "gmpo"]
        assert {cell["steps"] for cell in several} == {4 * given.gsm8k_steps}


def test_a_page_of_gsm8k_says_who_is_behind_whom(given, tmp_path):
    from plan import make

    warm = {"part": "gsm8k", "stage": "warm", "seed": 0, "curve": [[0, 0.01], [467, 0.12]],
            "accuracy": 0.12}  # fmt: skip
    shares = {"adamw": 0.1, "muon": 0.4, "pion_cutoff": 0.38}
    runs = [
        trained(make("gsm8k", stage, optim=name, rate=1e-5, steps=60, seed=seed), share, 256)
        | {"rows": {"facts/correct": [[1, 0.0], [2, share]]}}
        for stage in ("search", "final", "several")
        for seed in (1, 2, 3)
        for name, share in shares.items()
    ]
    write_pages([warm, *runs], tmp_path)
    page = tmp_path / "gsm8k.md"
    assert "0.010 before, 0.120 after 467 steps" in page.read_text()
    assert "greedy on 256" in page.read_text()
    plain = {name: lines_of(page, name)[0] for name in shares}
    assert [plain[name][4] for name in shares] == ["0.1000", "0.4000", "0.3800"]
    compared = {name: next(row for row in lines_of(page, name) if len(row) == 8) for name in shares}
    assert compared["muon"][4] == "", "nobody is before the first"
    low = float(compared["adamw"][4].split("[")[1].split(",")[0])
    assert low > 0, "a third of the problems is a real difference"
    assert float(compared["pion_cutoff"][4].split("[")[1].split(",")[0]) < 0
    assert (tmp_path / "gsm8k.png").stat().st_size > 1000


def test_a_supervised_start_alone_is_a_page(tmp_path):
    warm = {"part": "gsm8k", "stage": "warm", "seed": 0, "curve": [[0, 0.0], [9, 0.1]],
            "accuracy": 0.1}  # fmt: skip
    write_pages([warm], tmp_path)
    assert "0.100 after 9 steps" in (tmp_path / "gsm8k.md").read_text()


def test_levers_are_means_of_their_seeds_and_no_place_is_kept(given, tmp_path):
    from plan import LEVERS, levers
    from results import read_results

    cells = levers(given, {})
    assert len(cells) == 2 * len(LEVERS)
    made = [trained(cell, 0.1 * cell["seed"]) for cell in cells]
    late = made[1] | {"steps_done": 77}
    write_pages([made[0], late, *made[2:]], tmp_path)
    assert "(step 77)" in lines_of(tmp_path / "levers.md", late["stage"])[0][3]
    row = lines_of(tmp_path / "levers.md", "stock")[0]
    both = [float(word) for word in row[3].split(", ")]
    assert row[2] == f"{sum(both) / 2:.3f} (2)"
    assert row[-1] == "", "what was not logged is left out"
    assert read_results(tmp_path / "results.json.gz")["settings"] == {}


def test_a_batch_in_pieces_has_the_gradient_of_the_whole(monkeypatch):
    import supervised
    import torch
    from supervised import IGNORED, Supervised

    from mesotron.config import ModelConfig, TaskConfig, TrainConfig

    config = TrainConfig(model=ModelConfig(name="tiny"), task=TaskConfig(num_eval=2), device="cpu")
    made = Supervised(config, 1)
    batch = next(made.batches())
    batch["labels"][0, :-1] = IGNORED  # rows with few tokens weigh less

    def gradient(rows):
        monkeypatch.setattr(supervised, "ROWS", rows)
        made.model.zero_grad()
        made.backward(batch)
        return torch.cat([p.grad.flatten() for p in made.model.parameters()])

    made.model(**batch).loss.backward()
    whole = torch.cat([p.grad.flatten() for p in made.model.parameters()])
    torch.testing.assert_close(gradient(len(batch["labels"])), whole)
    torch.testing.assert_close(gradient(3), whole, rtol=1e-4, atol=1e-6)
