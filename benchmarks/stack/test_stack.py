"""The plan and the table; the cells themselves are tried with --small."""

from argparse import Namespace

import torch

from benchmarks.stack import passes
from benchmarks.stack import plan as plans
from benchmarks.stack.__main__ import plan, table


def given(**changed):
    common = {
        "part": "accuracy",
        "model": "m",
        "steps": 4,
        "small": False,
        "seeds": (0, 1, 2),
        "names": None,
    }
    return Namespace(**(common | changed))


def test_parts_without_a_gpu_leave_vllm_out():
    names = [name for name, _, _ in plan(given())]
    assert len(names) == 6
    assert [name for name, _, _ in plan(given(small=True))] == ["accuracy/fast/0"]
    assert [name for name, _, _ in plan(given(names=["vllm"], seeds=(2,)))] == ["accuracy/vllm/2"]

    assert [name for name, _, _ in plan(given(part="mismatch"))] == [
        "mismatch/fresh",
        "mismatch/stale",
    ]


def test_table():
    step = {
        "row": "r",
        "tokens_per_s": 10.0,
        "bookkeeping_ms": 2.0,
    }

    cells = {
        "r/TRL + vLLM": step | {"contender": "TRL + vLLM", "step_ms": 200.0},
        "r/vLLM": step | {"contender": "vLLM", "step_ms": 100.0},
        "r/fast": {"failed": "out of memory"},
        "accuracy/fast/0": {"after": 0.5},
        "accuracy/vllm/0": {"after": 0.75},
    }

    text = table(cells)
    assert "| r | TRL + vLLM | 200 | 10 | 2.00 | 1.0% |" in text
    assert "+0.250" in text
    assert "out of memory" in text


def test_passes_over_a_tiny_rollout(monkeypatch, tmp_path, capsys):
    out = tmp_path / "passes.json"
    arguments = ["passes", "--small", "--out", str(out), "--warm", "0", "--count", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    passes.main()

    result = passes.read_json(out)
    assert [cell["kind"] for cell in result["cells"]] == [*passes.KINDS] * 2
    assert not any("failed" in cell for cell in result["cells"])
    assert result["errors"]["small"]["ragged"]["logprob_max"] < 1e-5
    assert "| small | real | ragged |" in capsys.readouterr().out


def test_rollouts_have_the_lengths_of_answers():
    rows = passes.make_rows("real", 1000, torch.device("cpu"), small=False)
    own = rows.mask[:, -rows.length :].sum(1).float()
    assert len(own) == 256
    assert 80 < own.mean() < 105
    assert own.max() <= 240


def test_only_our_passes_without_vllm_are_larger():
    row = plans.ROWS["qwen0.5b-256"]
    sizes = {name: one.micro(row) for name, one in plans.CONTENDERS.items()}
    assert {name for name, size in sizes.items() if size == row.own_micro} == {"fast"}
    assert plans.CONTENDERS["fast"].micro(plans.SMALL["small-6"]) == 8
