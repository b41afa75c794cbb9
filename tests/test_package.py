"""The package as a user installs it: without torch the watch and the report work on logs."""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# Runs mesotron in an interpreter that cannot import what the extras install.
WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "trl", "accelerate", "jax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from mesotron.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def log(tmp_path) -> Path:
    rows = [
        {
            "step": k,
            "loss": 0.1,
            "reward": 0.7 if k < 30 else 0.1,
        }
        for k in range(60)
    ]

    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return path


def test_watch_reads_a_log_without_torch(log):
    command = [sys.executable, "-c", WITHOUT_EXTRAS, "watch", str(log)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=log.parent,
    )

    assert done.returncode == 0, done.stderr
    assert "reward collapse" in done.stdout


def add_requirements(lines: list[str] | None, seen: set[str]) -> set[str]:
    """The installed distributions that these lines need, without extras."""
    for needed in map(Requirement, lines or ()):
        if needed.name not in seen and (not needed.marker or needed.marker.evaluate({"extra": ""})):
            seen.add(needed.name)
            add_requirements(distribution(needed.name).requires, seen)

    return seen


@pytest.mark.slow
def test_the_wheel_alone_with_what_it_requires(log, tmp_path):
    """Only what the wheel's own metadata requires is on the path, linked from this environment."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(
        build,
        cwd=ROOT,
        check=True,
        capture_output=True,
    )

    (wheel,) = tmp_path.glob("mesotron-*.whl")
    site = tmp_path / "site"
    with ZipFile(wheel) as file:
        file.extractall(site)

    (installed,) = distributions(path=[str(site)])
    needed = add_requirements(installed.requires, set())
    assert "torch" not in needed

    for found in map(distribution, needed):
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            source = Path(str(found.locate_file(top)))
            target = site / top
            if source.exists() and not target.exists():
                target.symlink_to(source)

    (script,) = installed.entry_points
    module, function = script.value.split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"

    def run(*words: str, code: str = code) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", code, *words]  # without this environment's packages
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert "No module named 'torch'" in run(code="import torch").stderr
    for words in (("--version",), ("watch", str(log)), ("report", str(log), "--out", "page.html")):
        done = run(*words)
        assert done.returncode == 0, done.stderr

    assert (tmp_path / "page.html").stat().st_size > 10_000
    refused = run("train")
    assert refused.returncode == 2
    assert "mesotron[rlvr]" in refused.stderr
