"""Runs pytest on a copy of the repository in a fork of this process, which has the slow imports."""

import os
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL
from typing import Any

IMPORTS = ("torch", "transformers", "trl", "peft", "datasets", "sympy", "pytest")
ROOT = Path(__file__).parents[2]
# Of plugins that are imported before the fork.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def import_all() -> None:
    """Before the first run; none of these may be imported by the package's own tests first."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_INTERPRET": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    sys.dont_write_bytecode = True

    for name in IMPORTS:
        import_module(name)


def run_pytest(tree: Path, words: list[str], plugin: Any, limit: float) -> int | None:
    """The exit code; None if it took longer than `limit` seconds. Ends all that the tests began."""
    child = get_context("fork").Process(target=_run, args=(tree, words, plugin))
    child.start()
    child.join(limit)
    is_endless = child.is_alive()

    assert child.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(child.pid, SIGKILL)

    child.join()
    return None if is_endless else child.exitcode


def _run(tree: Path, words: list[str], plugin: Any) -> None:
    os.setsid()
    os.chdir(tree)
    output = os.open(tree.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)

    _use(tree)

    import pytest

    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tree), *_QUIET]
    code = pytest.main([*options, *words], plugins=[plugin])
    os._exit(int(code))


def _use(tree: Path) -> None:
    """Import the package and the tests' helpers from the copy, in new processes too."""
    here = (str(ROOT / "src"), str(ROOT / "tests"), str(ROOT), "src", "tests", ".", "")
    outside = [path for path in sys.path if path not in here]
    sys.path[:] = [str(tree / "src"), *outside]

    beside = os.environ.get("REACH_PATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [beside, str(tree / "src")]))
