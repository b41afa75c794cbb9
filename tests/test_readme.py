"""The README claims nothing that is not there: its commands and Python run, its links lead on."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mesotron.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WRITTEN = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
# Findings are parts of the pages one folder up, where their links begin.
PAGES = sorted(page for page in WRITTEN if page.parent.name != "findings")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def console_lines() -> list[str]:
    lines = "\n".join(blocks("console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def test_the_readme_has_what_is_tested_here():
    assert blocks("python")
    assert console_lines()
    assert {kind for kind, _ in BLOCKS} == {"", "python", "console"}


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs_as_printed(text, tmp_path):
    (tmp_path / "readme.py").write_text(text)
    command = [sys.executable, "-W", "error", "readme.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", console_lines())
def test_commands_run_as_printed(line, mesotron, tmp_path):
    program, *words = shlex.split(line)
    assert program == "mesotron"
    done = mesotron(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_command_table_is_the_list_of_commands():
    rows = re.findall(r"^\| `mesotron ([a-z ]+?)(?: \[?[A-Z]+\]?)?` \|", README, re.MULTILINE)
    assert rows == list(COMMANDS)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make (\w+)", "\n".join(blocks("")), re.MULTILINE))
    assert named == {"demo", "test"}
    assert named <= targets


def test_the_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (installed,) = re.findall(r"'\.\[([\w,]+)\]'", README)
    listed = re.findall(r"`(\w+)`", README.split("Extras:")[1].split("\n\n")[0])
    assert set(listed) == set(extras)
    assert set(installed.split(",")) <= set(extras)


def test_torch_comes_first_and_is_the_pinned_one():
    pinned = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == ["torch==2.13.0"]
    for text in (README, (ROOT / "Makefile").read_text()):
        assert 0 < text.index(pinned[0]) < text.index("-e '.[")


def test_every_benchmark_has_its_row():
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    folders = [path.name for path in (ROOT / "benchmarks").iterdir() if any(path.glob("*.md"))]
    assert len(folders) > 10
    assert [name for name in folders if f"| [{name}]({name}/" not in listed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
