"""The pages match the package: Python runs, commands parse, flags and links exist.

A comment before a block of Python says what the test must know of it: `<!-- given: model -->` names
what the reader has at hand (`GIVEN` makes it), and `<!-- not run: why -->` leaves it at its syntax
and imports. Blocks of a page share names.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from mesotron import cli
from mesotron.cli import parse
from mesotron.config.base import flags_of
from mesotron.rlvr.trl_options import grpo_fields
from mesotron.runs import RunFolder
from support.quick_jax import quick_compilation  # noqa: F401
from support.rlvr_tiny import (
    make_data,
    make_model,
    make_network,
    make_tokenizer,
    small_digits,
)

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
LINKING = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/**/*.md")]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>given|not run): (?P<words>.*?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
# Flags of other programs that the pages name: of LeRobot, Slurm, Ray, torchrun, Accelerate, pip.
FOREIGN = {
    "--optimizer.discover_packages_path",
    "--optimizer.type",
    "--optimizer.perception",
    "--use_policy_training_preset",
    "--scheduler.type",
    "--nodes",
    "--ntasks-per-node",
    "--gpus-per-node",
    "--nnodes",
    "--nproc_per_node",
    "--node_rank",
    "--master_addr",
    "--master_port",
    "--num_machines",
    "--num_processes",
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
    "--address",
    "--min-nodes",
    "--head",
    "--port",
    "--batch-size",
    "--learning_rate",
    "--config_file",
    "--help",
    "--version",
    "--json-config",
    "--no-deps",
}
OFFLINE = {"--probe", "--target", "--piece", "--bare", "--files"}  # of benchmarks.offline
SLOW = ("jax.md", "ppo.md", "evaluating.md", "own_data.md", "trl_script.md")


class Block(NamedTuple):
    language: str
    text: str
    given: tuple[str, ...]
    run: bool


def blocks_of(page: Path, *languages: str) -> list[Block]:
    blocks = []
    for match in FENCE.finditer(page.read_text()):
        words = match["words"] if match["mark"] == "given" else ""
        given = tuple(word.strip() for word in words.split(",") if word.strip())
        blocks.append(Block(match["language"], match["text"], given, match["mark"] != "not run"))

    return [block for block in blocks if block.language in languages]


def policy() -> nn.Module:
    parts = {name: nn.Linear(8, 8) for name in ("vision_tower", "language_model", "action_head")}
    return nn.ModuleDict({**parts, "head": nn.Linear(8, 2)})


def trainer() -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(make_network(), TrainingArguments("out", report_to="none", use_cpu=True))


def finished_run() -> None:
    run = RunFolder.create(Path("runs/arith"), {}, {})  # and runs/last points at it
    run.append("metrics", {"step": 1, "reward": 0.5})


def setup() -> dict[str, Any]:
    """What a TRL script has before its two lines change."""
    from trl import GRPOConfig

    how = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    args = GRPOConfig("out", max_steps=1, report_to="none", use_cpu=True, bf16=False, **how)
    return {
        "model": make_model(),
        "reward_funcs": small_digits,
        "args": args,
        "train_dataset": make_data(),
        "processing_class": make_tokenizer(),
    }


GIVEN = {
    "setup": setup,
    "model": make_network,
    "policy": policy,
    "trainer": trainer,
    "runs/last": finished_run,
}
PYTHON_PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.name in SLOW))
    for page in PAGES
    if blocks_of(page, "python")
]


@pytest.mark.filterwarnings("default")  # an example's own libraries may warn its user
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_runs_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page, "python"):
        code = compile(block.text, page.name, "exec")
        if block.run:
            names |= {name: GIVEN[name]() for name in block.given}
            exec(code, names)
            continue

        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mesotron"):
                module = importlib.import_module(node.module)
                assert all(getattr(module, alias.name) for alias in node.names)


def command_lines(page: Path) -> list[str]:
    lines = []
    for block in blocks_of(page, "", "console"):
        for line in re.sub(r" *\\\n *", " ", block.text).splitlines():
            match = re.match(r"(?:\$ |accelerate launch .*-m )?(mesotron [a-z-].*)", line)
            if match:
                lines.append(re.split(r" {2,}|\s#|\s>", match[1])[0])

    return lines


@pytest.mark.parametrize(
    "page", [page for page in PAGES if command_lines(page)], ids=lambda p: p.stem
)
def test_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('recipe = "arith"\nsteps = 3\n')

    for block in blocks_of(page, "toml"):
        (tmp_path / "run.toml").write_text(block.text)

    for line in sorted({*command_lines(page)} - {"mesotron --version"}):
        name, rest = cli.split_name(shlex.split(line)[1:])
        command = cli.COMMANDS[name]
        if "--resume" in rest:  # the defaults are then those of the run, by the name runs/last
            (tmp_path / "runs").mkdir(exist_ok=True)
            path = tmp_path / "runs" / f"stopped-{name.replace(' ', '-')}"
            if not path.exists():
                run = RunFolder.create(path, command.config_type(), {})
                run.append("metrics", {"step": 1})

        parse(command.config_type, rest, f"mesotron {name}", command.presets)


def test_flags_exist():
    flags = {name for c in cli.COMMANDS.values() for name in flags_of(c.config_type)}
    known = {"--config", *flags, *(name.replace("--", "--no-", 1) for name in flags)}
    known.add("--help-all")

    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])(--[a-z][\w.-]*\w)", page.read_text()))
        options = {flag for flag in named if flag.startswith("--trl.")}
        assert {flag[6:] for flag in options} <= {"KEY", *grpo_fields()}, page
        named -= options

        assert {flag.replace("_", "-") for flag in named - FOREIGN - OFFLINE} <= known, page


def test_links_lead_to_files():
    for page in LINKING:
        if page.parent.name != "findings":  # parts of pages one folder up, where their links begin
            prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
            targets = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
            local = [target for target in targets if not target.startswith("http")]
            assert [target for target in local if not (page.parent / target).exists()] == [], page

            if DOCS in page.parents:  # the site has no other files
                assert all(DOCS in (page.parent / one).resolve().parents for one in local), page


def test_commands_extras_and_pinned_torch_match_the_package():
    index = (DOCS / "index.md").read_text()
    rows = re.findall(r"^\| `mesotron ([a-z ]+?)(?: \[?[A-Z]+\]?)?` \|", index, re.MULTILINE)
    assert rows == list(cli.COMMANDS)

    text = README.read_text()
    quickstart = (DOCS / "quickstart.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"`(\w+)`", quickstart.split("Extras:")[1].split("\n\n")[0])

    assert set(listed) == set(project["optional-dependencies"])
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= targets

    pinned = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    for installer in (quickstart, makefile):  # torch first, and the pinned one
        assert 0 < installer.index(pinned[0]) < installer.index("-e '.[")


def test_every_benchmark_is_listed():
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    folders = []
    for path in (ROOT / "benchmarks").iterdir():
        if any(path.glob("*.md")):
            folders.append(path.name)

    assert [name for name in folders if f"| [{name}]({name}/" not in listed] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )

    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "api" / "optim.html").read_text()
    assert "torch.optim.Optimizer" in reference
    assert ">>> " not in reference.replace('<span class="gp">&gt;&gt;&gt; </span>', "")
    assert "https://fonts" not in reference
