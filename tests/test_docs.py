"""The pages claim nothing that is not there: Python runs, commands are understood, names exist.

A comment before a block of Python says what the test must know of it:
`<!-- given: model -->` names what the reader has at hand (`GIVEN` makes it), and
`<!-- not run: why -->` leaves it at its syntax and its imports. Blocks of a page share names.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mesotron import cli
from mesotron.cli import parse
from mesotron.config.base import flags_of
from mesotron.runs import RunFolder
from mesotron.watch import DETECTORS
from support.quick_jax import quick_compilation  # noqa: F401

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>given|not run): (?P<words>.*?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# Flags of other programs that the pages name.
FOREIGN = {"--config_file", "--model", "--help", "--version", "--json-config", "--no-deps"}
ELSEWHERE = ("README.md", "jax.md")  # test_readme and test_jax_stats run their Python
QUICK = ("spectrum",)  # commands that are also run


class Block(NamedTuple):
    language: str
    text: str
    given: tuple[str, ...]
    run: bool


def blocks_of(page: Path) -> list[Block]:
    found = []
    for match in FENCE.finditer(page.read_text()):
        words = match["words"] if match["mark"] == "given" else ""
        given = tuple(word.strip() for word in words.split(",") if word.strip())
        found.append(Block(match["language"], match["text"], given, match["mark"] != "not run"))
    return found


def python_pages() -> list[Path]:
    own = [page for page in PAGES if page.name not in ELSEWHERE]
    return [page for page in own if any(b.language == "python" for b in blocks_of(page))]


def language_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def policy() -> nn.Module:
    parts = {name: nn.Linear(8, 8) for name in ("vision_tower", "language_model", "action_head")}
    return nn.ModuleDict({**parts, "head": nn.Linear(8, 2)})


def trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(language_model(), TrainingArguments("out", report_to="none", use_cpu=True))


def finished_run() -> None:
    from mesotron.runs import RunFolder

    run = RunFolder.create(Path("runs/arith"), {}, {})  # and runs/last leads to it
    run.append("metrics", {"step": 1, "reward": 0.5})


GIVEN = {
    "model": language_model,
    "policy": policy,
    "trainer": trainer,
    "runs/last": finished_run,
}


# An example's own libraries may warn its user.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", python_pages(), ids=lambda page: page.stem)
def test_python_runs_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language != "python":
            continue
        code = compile(block.text, page.name, "exec")
        if block.run:
            names |= {name: GIVEN[name]() for name in block.given}
            exec(code, names)
        else:
            check_imports(block.text)


def check_imports(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mesotron"):
            home = importlib.import_module(node.module)
            for alias in node.names:
                assert getattr(home, alias.name)


def command_lines(page: Path) -> list[str]:
    """Every `mesotron ...` of a page's blocks, without what is said about it on its right."""
    found = []
    for block in blocks_of(page):
        if block.language not in ("", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            line = re.sub(r" +", " ", line) if "\\\n" in block.text else line
            match = re.match(r"(?:\$ |accelerate launch .*-m )?(mesotron [a-z-].*)", line)
            if match:
                found.append(re.split(r" {2,}|\s#|\s>", match[1])[0])
    return found


COMMANDS = sorted({line for page in PAGES for line in command_lines(page)})


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    """A folder with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('recipe = "arith"\nsteps = 3\n')
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line, somewhere, capsys):
    words = shlex.split(line)[1:]
    if words == ["--version"]:
        return
    name, rest = cli.split_name(words)
    command = cli.COMMANDS[name]
    if "--resume" in rest:  # the flags' defaults are then those of the run, by the name runs/last
        RunFolder.create(Path("runs/stopped"), command.config_type(), {})
    parse(command.config_type, rest, f"mesotron {name}", command.presets)
    if name in QUICK:
        assert cli.main(words) == 0


def test_there_are_commands_and_code_to_test():
    assert len(COMMANDS) > 30
    assert len(python_pages()) > 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_flags_exist(page):
    flags = [name for c in cli.COMMANDS.values() for name in flags_of(c.config_type)]
    known = {"--config", *(f"--{no}{name}" for name in flags for no in ("", "no-"))}
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w.-]*\w)", page.read_text()))
    assert {flag.replace("_", "-") for flag in named - FOREIGN} <= known


def documented() -> set[str]:
    text = (DOCS / "metrics.md").read_text()
    first_cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}


def test_troubleshooting_names_what_there_is():
    text = (DOCS / "troubleshooting.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    known = {re.sub(r"^(<group>/.*|skipped)$", r"optim/\1", name) for name in documented()}
    for row in rows:
        for name in re.findall(r"`([^`]+)`", row[0]):
            assert name in known, name
        for name in re.findall(r"`([^`]+)`", row[2]):
            assert name in {detector.name for detector in DETECTORS}, name


def test_troubleshooting_knows_every_detector():
    text = (DOCS / "troubleshooting.md").read_text()
    missing = [detector.name for detector in DETECTORS if f"`{detector.name}`" not in text]
    assert missing == []


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "api" / "optim.html").read_text()
    assert "torch.optim.Optimizer" in reference
    assert ">>> " not in reference.replace('<span class="gp">&gt;&gt;&gt; </span>', "")
    assert "https://fonts" not in reference
