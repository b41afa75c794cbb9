"""The registry of log formats: one decorated class is all that a format needs."""

import re
from typing import ClassVar

import pytest

from mesotron.config.registry import FORMATS
from mesotron.watch.find import by_rank, find_runs, recognize
from mesotron.watch.log import Stream, read_log
from mesotron.watch.metrics import canonical
from mesotron.watch.reader import LineReader, log_format
from mesotron.watch.rows import Row

LINES = """Loading the model
<1 of 500> Prize: 0.2500, Actor Loss: 0.10
<2 of 500> Prize: 0.5000, Actor Loss: 0.20
"""


@pytest.fixture
def miniature(monkeypatch):
    """A framework that puts the step in angle brackets and calls the reward a prize."""
    by_rank()  # what is imported now stays known afterwards
    monkeypatch.setattr(FORMATS, "_entries", dict(FORMATS._entries))
    pattern = re.compile(r"<(\d+) of \d+> (.*)")

    @log_format("miniature", about="A framework of the tests")
    class Miniature(LineReader):
        printed = True
        names: ClassVar = {"Prize": "reward", "Actor Loss": "loss"}

        @classmethod
        def recognizes(cls, head: bytes) -> bool:
            return pattern.search(head.decode(errors="replace")) is not None

        def parse(self, line: str) -> list[Row]:
            match = pattern.match(line)
            if not match:
                return []

            row = {"step": float(match[1])}
            for part in match[2].split(", "):
                name, _, value = part.partition(": ")
                row[name] = float(value)

            return [row]

    return Miniature


def test_a_new_format_is_one_class(miniature, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LINES)

    log = read_log(path)
    assert log.kind == "miniature"
    assert log.rows == [
        {"step": 1, "reward": 0.25, "loss": 0.1},
        {"step": 2, "reward": 0.5, "loss": 0.2},
    ]
    assert find_runs(tmp_path) == [path]
    assert read_log(path, "miniature").rows == log.rows


def test_a_new_format_is_followed_while_it_grows(miniature, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LINES[:65])
    stream = Stream(path)

    assert stream.poll() == 1
    path.write_text(LINES)
    assert stream.poll() == 1
    assert canonical(stream.log.rows[-1])["reward"] == 0.5


def test_without_the_format_its_lines_are_not_read(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LINES)
    assert "miniature" not in FORMATS
    with pytest.raises(ValueError, match="no row of numbers"):
        read_log(path)


@pytest.mark.parametrize("name", FORMATS.names())
def test_each_file_is_the_format_of_its_name(name):
    log_format = FORMATS[name]
    assert log_format.kind == name
    assert log_format.__module__.endswith(f".{name}")
    assert 0 < len(log_format.about.split()) <= 20


def test_the_most_general_format_is_sought_last():
    assert by_rank()[-1] is FORMATS["console"]


def test_an_unknown_format_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step,reward\n1,0.5\n")
    for target in (path, tmp_path):
        with pytest.raises(ValueError, match="tsv"):
            read_log(target, "tsv")

    assert recognize(path) is FORMATS["csv"]
