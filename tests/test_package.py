"""The package as a user installs it: without torch the watch and the report work on logs."""

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

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
    rows = [{"step": k, "loss": 0.1, "reward": 0.7 if k < 30 else 0.1} for k in range(60)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_watch_on_a_log_and_a_sentence_for_the_rest_without_torch(log):
    def mesotron(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_EXTRAS, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=log.parent)

    done = mesotron("watch", str(log))
    assert done.returncode == 0, done.stderr
    assert "reward collapse" in done.stdout
    refused = mesotron("eval", "tiny")
    assert refused.returncode == 2
    assert "mesotron[rlvr]" in refused.stderr
    assert "Traceback" not in refused.stderr


def requirements_of(name: str, seen: set[str]) -> None:
    """Adds the installed distributions that a name needs, without extras, to `seen`."""
    if name in seen:
        return
    seen.add(name)
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            requirements_of(needed.name, seen)


@pytest.mark.slow
def test_the_wheel_in_a_fresh_environment(log, tmp_path):
    """Only what the wheel's own metadata requires is on the path, linked from this environment."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("mesotron-*.whl")
    home = tmp_path / "fresh"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], check=True, capture_output=True)
    (site,) = home.glob("lib/python*/site-packages")
    shown = "import importlib.metadata as m; print(*m.requires('mesotron'), sep='\\n')"
    listed = subprocess.run([str(python), "-c", shown], capture_output=True, text=True, check=True)
    seen: set[str] = set()
    for line in listed.stdout.splitlines():
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            requirements_of(needed.name, seen)
    assert seen
    assert "torch" not in seen
    for name in seen:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            source, target = Path(str(found.locate_file(top))), site / top
            if source.exists() and not target.exists():
                target.symlink_to(source)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def mesotron(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(home / "bin" / "mesotron"), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    absent = subprocess.run([str(python), "-c", "import torch"], env=environment, cwd=tmp_path,
                            capture_output=True)  # fmt: skip
    assert absent.returncode == 1
    for words in (("--version",), ("watch", str(log)), ("report", str(log), "--out", "page.html")):
        done = mesotron(*words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000
    refused = mesotron("train")
    assert refused.returncode == 2
    assert "mesotron[rlvr]" in refused.stderr
