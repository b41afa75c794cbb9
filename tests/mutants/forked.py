"""Runs pytest on a copy of the repository in a fork of this process, which has the slow imports."""

import os
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from signal import SIGKILL
from typing import Any

IMPORTS = ("torch", "transformers", "trl", "peft", "datasets", "sympy", "hypothesis")
ROOT = Path(__file__).parents[2]
# Of plugins that are imported before the fork.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
# A change may allocate without end.
_MOST_MEMORY = 24 * 2**30


def import_all() -> None:
    """Before the first run; none of these may be imported by the package's own tests first."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_INTERPRET": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    sys.dont_write_bytecode = True

    import pytest  # noqa: F401

    for name in IMPORTS:
        with suppress(ImportError):  # then the tests that need it are left out
            import_module(name)


def run_pytest(tree: Path, words: list[str], plugin: Any, limit: float) -> int | None:
    """The exit code; None if it took longer than `limit` seconds. Ends all that the tests began."""
    place = Path(tempfile.mkdtemp(prefix="run-", dir=tree.parent))
    child = get_context("fork").Process(target=_run, args=(tree, words, plugin, place))
    child.start()
    child.join(limit)
    is_endless = child.is_alive()

    assert child.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(child.pid, SIGKILL)

    child.join()
    shutil.rmtree(place, ignore_errors=True)
    return None if is_endless else child.exitcode


def _run(tree: Path, words: list[str], plugin: Any, place: Path) -> None:
    os.setsid()
    os.chdir(tree)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    output = os.open(tree.parent / f"output-{tree.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)

    os.environ["TMPDIR"] = str(place)
    tempfile.tempdir = None
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

    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in given if path not in here]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), *kept])
