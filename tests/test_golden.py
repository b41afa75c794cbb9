"""Help pages, parsed command lines and verdicts are those committed in tests/golden.

After a change that is meant: `PYTHONPATH=src:tests python -m golden update`, and read the diff.
"""

import json

import pytest

from golden import committed
from golden.digest import differences, without_volatile


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def assert_committed(texts: dict[str, str], folder: str) -> None:
    files = {f"{folder}/{path.name}" for path in (committed.HERE / folder).iterdir()}
    assert files == texts.keys()

    for name, text in texts.items():
        assert text == (committed.HERE / name).read_text(encoding="utf-8"), name


def test_help_pages():
    assert_committed(committed.help_pages(), "help")


def test_parsed_command_lines():
    assert_committed(committed.parsed_lines(), "parsed")


@pytest.mark.skipif(committed.public_runs() is None, reason="the public logs are not here")
def test_verdicts_on_public_logs():
    known = json.loads((committed.HERE / committed.VERDICTS).read_text(encoding="utf-8"))
    assert json.loads(committed.verdicts()) == known


def test_differences_name_the_place():
    first = {"metrics": [{"loss": 0.1}, {"loss": float("nan")}], "weights": {"a": "1"}}
    second = {"metrics": [{"loss": 0.2}, {"loss": float("nan")}], "weights": {"b": "1"}}

    assert list(differences(first, first)) == []
    assert list(differences(first, second)) == [
        "metrics[0]/loss: 0.1 -> 0.2",
        "weights/a: only in the first",
        "weights/b: only in the second",
    ]


def test_a_case_that_failed_is_not_equal_to_itself():
    failed = {"failed": "exit code 2"}
    assert list(differences(failed, failed))


def test_clocks_are_left_out_and_metrics_are_not():
    row = {"loss": 0.1, "step_time": 3.0, "time/rollout": 1.0, "completions/mean_length": 9.0}
    assert without_volatile([row]) == [{"loss": 0.1, "completions/mean_length": 9.0}]
