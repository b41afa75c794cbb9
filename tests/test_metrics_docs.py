"""The documentation of numbers against the numbers: stats() and docs/metrics.md, lr units and
docs/optimizers.md."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mesotron.optim.optimizer import Muon, Pion
from mesotron.spectral.scale import SCALES, step_scale

DOCS = Path(__file__).parents[1] / "docs"
AUXILIARY = {"<group>/update_rms", "<group>/cosine", "<group>/skipped"}


def table(path: Path, heading: str) -> list[list[str]]:
    """The rows of the first table whose first heading is `heading`, without code marks."""
    lines = path.read_text().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def stats_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """The keys after one step, with the group's name left open."""
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
    rows = table(DOCS / "metrics.md", "key")
    documented = [row[0] for row in rows]
    assert len(set(documented)) == len(documented)
    assert stats_of(make(parameters(), aux=aux)) == set(documented)
    for row in rows:
        assert len(row) == 4
        assert all(row), row[0]


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_auxiliary_groups_have_what_the_page_says(rule):
    optimizer = Muon([{"params": parameters(), "rule": rule}])
    assert stats_of(optimizer) == {*AUXILIARY, "skipped"}


def test_before_the_first_step_as_the_page_says():
    assert set(Muon(parameters()).stats()) == {"skipped"}


def test_the_table_of_rates_makes_equal_steps():
    rows = table(DOCS / "optimizers.md", "`scale`")
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
    rows = {row[0]: row for row in table(DOCS / "optimizers.md", "state")}
    row = rows["muon_sgd" if rule == "sgd" else "muon, pion"]
    cell = row[column + (column == 2 and dtype == torch.bfloat16)]
    plain, *narrow = re.findall(r"\d+", re.sub("bfloat16", "", cell))
    assert found == float(narrow[0] if rule == "muon" and kept else plain)


@pytest.mark.parametrize("page", ["optimizers.md"])
def test_code_on_the_page_runs(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
    assert "update_rms" in capsys.readouterr().out
