"""Help pages, parsed command lines and verdicts are those committed in tests/golden.

After a change that is meant: `PYTHONPATH=src:tests python -m golden update`, and read the diff.
"""

import json

import pytest

from golden import committed


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
