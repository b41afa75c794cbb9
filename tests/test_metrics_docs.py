"""The documentation of numbers against the numbers: stats() and docs/api/metrics.md, lr units in
docs/learning_rate.md, state in docs/optimizer_memory.md."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mesotron import cli
from mesotron.config import ObjectiveConfig
from mesotron.optim import Muon, Pion
from mesotron.runs import RunFolder
from mesotron.spectral.scale import SCALES, step_scale
from mesotron.watch import DETECTORS
from support.rlvr_tiny import make_trainer, rows

DOCS = Path(__file__).parents[1] / "docs"
METRICS = DOCS / "api" / "metrics.md"


def table(path: Path, heading: str) -> list[list[str]]:
    lines = path.read_text().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(f"| {heading} |"))

    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])

    return rows


def stats_of(optimizer: torch.optim.Optimizer) -> set[str]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)

    optimizer.step()
    names = [group["name"] for group in optimizer.param_groups]

    keys = set()
    for key in optimizer.stats():
        group, _, statistic = key.rpartition("/")
        assert not group or group in names
        keys.add(f"<group>/{statistic}" if group else statistic)

    return keys


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))]


@pytest.mark.parametrize("aux", ["adamw", "sgd"])
@pytest.mark.parametrize("make", [Muon, Pion])
def test_every_statistic_is_documented_and_every_documented_one_exists(make, aux):
    rows = table(METRICS, "key")
    documented = [row[0] for row in rows]
    assert len(set(documented)) == len(documented)
    assert stats_of(make(parameters(), aux=aux, leash=0.5)) == set(documented)

    for row in rows:
        assert len(row) == 4
        assert all(row), row[0]


def test_the_table_of_rates_makes_equal_steps():
    rows = table(DOCS / "learning_rate.md", "`scale`")
    named = [row[0].strip('"') for row in rows]
    assert set(SCALES) <= set(named)

    for name, row in zip(named, rows, strict=True):
        scale = name if name in SCALES else float(name)
        for (m, n), factor in zip(((1024, 1024), (1024, 4096), (4096, 1024)), row[2:], strict=True):
            # The element RMS of a step of full rank, all singular values being 1.
            rms = float(factor) * step_scale(scale, m, n) * (min(m, n) / (m * n)) ** 0.5
            assert rms == pytest.approx(0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [None, "bfloat16"])
@pytest.mark.parametrize(("rule", "column"), [("muon", 1), ("adamw", 2), ("sgd", 2)])
def test_the_table_of_memory_is_what_a_step_leaves(rule, column, kept, dtype):
    p = nn.Parameter(torch.randn(16, 16, dtype=dtype))
    optimizer = Muon([{"params": [p], "rule": rule}], momentum_dtype=kept)
    stats_of(optimizer)
    state = [t for key, t in optimizer.state[p].items() if key != "step"]
    found = sum(t.numel() * t.element_size() for t in state) / p.numel()
    rows = {row[0]: row for row in table(DOCS / "optimizer_memory.md", "state")}
    row = rows["muon_sgd" if rule == "sgd" else "muon, pion"]
    cell = row[column + (column == 2 and dtype == torch.bfloat16)]
    plain, *narrow = re.findall(r"\d+", re.sub("bfloat16", "", cell))

    assert found == float(narrow[0] if rule == "muon" and kept else plain)


def metrics_on_the_page() -> set[str]:
    cells = re.findall(r"^\| (`.*?) \|", METRICS.read_text(), re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def known(key: str) -> bool:
    """Whether a key of a row has a line on the page; names of groups and rewards are left open."""
    names = metrics_on_the_page()
    for stem in ("entropy/trajectory", "entropy/token"):
        names |= {f"{stem}_q{k}" for k in (1, 2, 3)}

    if key.startswith("optim/"):
        rest = key.removeprefix("optim/")
        return rest in names or f"<group>/{rest.rpartition('/')[2]}" in names

    return re.sub(r"^rewards/.*/(mean|std)$", r"rewards/F/\1", key) in names


def test_troubleshooting_names_existing_metrics_and_every_detector():
    metrics = {re.sub(r"^(<group>/.*|skipped)$", r"optim/\1", x) for x in metrics_on_the_page()}
    detectors = {detector.name for detector in DETECTORS}
    text = (DOCS / "troubleshooting.md").read_text() + (DOCS / "worse.md").read_text()
    rows = re.findall(r"^\|( `(?!mesotron).*?)\|.*?\|(.*?)\|", text, re.MULTILINE)

    assert rows
    for named, found_by in rows:
        assert set(re.findall(r"`([^`]+)`", named)) <= metrics
        assert set(re.findall(r"`([^`]+)`", found_by)) <= detectors

    assert [name for name in detectors if f"`{name}`" not in text] == []


OBJECTIVES = {
    "kl and several updates": {"objective": ObjectiveConfig(name="grpo", beta=0.1)},
    "an anchor": {"objective": ObjectiveConfig(name="mgrpo", loss="gmpo"), "optim": "muon"},
    "resampling": {"objective": ObjectiveConfig(name="cispo", dynamic_sampling="resample")},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", OBJECTIVES)
def test_every_key_of_a_trainers_rows_is_on_the_page(case, tmp_path):
    settings = {
        "max_steps": 2,
        "steps_per_generation": 2,
        "entropy_coef": 0.01,
    }

    trainer = make_trainer(tmp_path, parts=OBJECTIVES[case], **settings)
    trainer.train()
    keys = {key for row in rows(trainer) for key in row} - {"step"}

    assert len(keys) > 30
    assert {key for key in keys if not known(key)} == set()


@pytest.mark.filterwarnings("default")
def test_every_key_of_a_runs_rows_is_on_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = (
        "--steps 2 --batch 2 --group 4 --max-tokens 4 --device cpu "
        "--task.num-train 8 --task.num-eval 2 --eval-every 1 --price 3 --watch.snr-every 1"
    )

    assert cli.main(["train", *sizes.split(), "--out", "run"]) == 0
    found = RunFolder(tmp_path / "run").rows("metrics")
    keys = {key for row in found for key in row} - {"step"}

    assert {"eval/greedy", "cost/spent", "facts/correct", "gradient/snr"} <= keys
    assert {key for key in keys if not known(key)} == set()
