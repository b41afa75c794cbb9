"""The plan and the table; the cells themselves are tried with --small."""

from argparse import Namespace

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
