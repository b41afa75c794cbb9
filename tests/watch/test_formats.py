"""The registry of log formats: one decorated class is all that a format needs."""

import re
from pathlib import Path
from typing import ClassVar

import pytest

from mesotron.watch.find import by_rank, find_runs, recognize
from mesotron.watch.formats import FORMATS
from mesotron.watch.log import Stream, read_log
from mesotron.watch.metrics import canonical
from mesotron.watch.reader import LineReader, log_format
from mesotron.watch.rows import Row

ROOT = Path(__file__).parents[2]
LINES = """Loading the model
Epoch:[1/1](1/500), Prize: 0.2500, Actor Loss: 0.10
Epoch:[1/1](2/500), Prize: 0.5000, Actor Loss: 0.20
"""


@pytest.fixture
def miniature():
    """A framework that puts the step in parentheses and calls the reward a prize."""
    pattern = re.compile(r"Epoch:\[\d+/\d+\]\((\d+)/\d+\), (.*)")

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

    yield Miniature
    del FORMATS["miniature"]


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
    path.write_text(LINES[:80])
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


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="csv"):
        log_format("csv", about="")


def test_every_file_of_the_folder_is_the_format_of_its_name():
    folder = ROOT / "src" / "mesotron" / "watch" / "formats"
    files = {file.stem for file in folder.glob("[a-z]*.py")}
    assert files == FORMATS.keys()


def test_the_docs_list_the_formats():
    page = (ROOT / "docs" / "watch.md").read_text()
    section = page.split("## What it reads")[1].split("## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)

    assert rows == [(each.kind, each.about) for each in by_rank()]
    assert all(len(each.about.split()) <= 20 for each in by_rank())


def test_an_unknown_format_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step,reward\n1,0.5\n")
    for target in (path, tmp_path):
        with pytest.raises(ValueError, match="--kind tsv"):
            read_log(target, "tsv")

    assert recognize(path) is FORMATS["csv"]
