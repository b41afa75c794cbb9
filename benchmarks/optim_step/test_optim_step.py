"""The step benchmark: ratios, peers that cannot run, and pages that equal their results."""

from pathlib import Path

import pytest
import torch

from benchmarks._lib.peers import PEERS, Peer
from benchmarks._lib.results import read_json
from benchmarks._lib.shapes import Projection
from benchmarks.optim_step import __main__ as optim_step
from benchmarks.optim_step.__main__ import HEADINGS, Config, accuracy_row, step_row, without_empty

CPU = torch.device("cpu")


def test_missing_peers_are_left_out_with_a_reason():
    assert Peer(PEERS["muon"].build, package="no_such_package").missing(CPU)
    available, left_out = optim_step.available(("muon", "muon_sgd", "dion"), Config(), CPU)
    assert available == ["muon"]
    assert set(left_out) == {"muon_sgd", "dion"}


def test_an_emulated_peer_is_timed_once_or_extrapolated(monkeypatch):
    shapes = [Projection(32, 16)] * 3
    row = optim_step.time_emulated(PEERS["torch_muon"], shapes, CPU)
    assert row["seconds"] == row["all"][0]

    monkeypatch.setattr(optim_step, "BEARABLE_SECONDS", 0.0)
    row = optim_step.time_emulated(PEERS["torch_muon"], shapes, CPU)
    assert row["seconds"] == pytest.approx(3 * row["all"][0])


def test_a_result_has_ratios_buckets_and_statistics(tmp_path):
    out = tmp_path / "result.json"
    config = Config(
        models=("micro_192x576",),
        layers=1,
        repeats=2,
        device="cpu",
        accuracy=False,
        optims=("adamw_fused", "muon", "pion_per_head"),
        out=out,
        buckets=True,
        stats_cost=True,
    )

    assert optim_step.run(config) == 0
    (model,) = read_json(out)["models"]
    rows = {row["optimizer"]: row for row in model["rows"]}
    seconds = rows["muon"]["seconds"]

    assert rows["muon"]["versus_adamw"] == pytest.approx(seconds / rows["adamw_fused"]["seconds"])
    assert rows["muon"]["versus_floor"] == pytest.approx(seconds / model["floor_seconds"])
    assert "stats_share" in rows["muon"]
    assert "stats_share" not in rows["adamw_fused"]
    assert [bucket["shape"] for bucket in model["buckets"]] == [[192, 576]]


@pytest.mark.parametrize("wrong", [{"models": ("gpt5",)}, {"optims": ("lion",)}, {"repeats": 0}])
def test_bad_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s").removesuffix("im")):
        optim_step.run(Config(**wrong))


@pytest.mark.parametrize(
    ("name", "data"), [("details.md", "cpu.json.gz"), ("h200.md", "h200.json.gz")]
)
def test_pages_show_rows_of_the_results_beside_them(name, data):
    """Every row that a page shows is in the JSON, and Muon's of every model are shown."""
    folder = Path(__file__).parent
    result = read_json(folder / data)
    known = {tuple(accuracy_row(row)) for row in result["accuracy"]}
    for model in result["models"]:
        _, rows = without_empty(HEADINGS, [step_row(row) for row in model["rows"]])
        known |= set(map(tuple, rows))

    names = {row[0] for row in known}
    shown = set()
    for line in (folder / name).read_text().splitlines():
        cells = tuple(line[2:-2].split(" | "))
        if line.startswith("| ") and cells[0] in names:
            shown.add(cells)

    assert shown <= known
    assert len([row for row in shown if row[0] == "muon"]) >= 4


def test_the_first_table_is_part_of_the_results():
    """Rows of the page: model, optimizer, ms, over the floor, faster than torch's Muon."""
    folder = Path(__file__).parent
    known = set()
    for model in read_json(folder / "cpu.json.gz")["models"]:
        for row in model["rows"]:
            optimizer, ms, _, floor, faster, *_ = step_row(row)
            known.add((model["model"], optimizer, ms, floor, faster))

    model = ""
    shown = set()
    for line in (folder / "README.md").read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| model"):
            first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            model = first or model
            shown.add((model, *cells))

    assert len(shown) == 12
    assert shown <= known
