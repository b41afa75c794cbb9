"""Rows of a run folder: one JSON object a line."""

import pytest

from mesotron.runs.files import append_row, check_writable, read_row, read_rows


@pytest.mark.parametrize("line", ["7", "[1, 2]", "null", '"text"', "[{}]", "nan?"])
@pytest.mark.parametrize("torn", [False, True])
def test_a_line_that_is_no_object_is_named_unless_it_is_the_torn_last(tmp_path, line, torn):
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"step": 1})
    with path.open("a") as file:
        file.write(line if torn else f"{line}\n")

    if torn:
        assert read_rows(path) == [{"step": 1}]
    else:
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 2"):
            read_rows(path)


def test_blank_lines_are_skipped_and_rows_kept_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n{"step": 2}\n')
    assert read_rows(path) == [{"step": 1}, {"step": 2}]
    assert read_row(b'{"a": [1]}') == {"a": [1]}


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder.*scores\.json"):
        check_writable(tmp_path, "scores.json")

    new = tmp_path / "new" / "scores.json"
    check_writable(new)
    assert not new.exists()
    assert new.parent.is_dir()
