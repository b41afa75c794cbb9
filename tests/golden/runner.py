"""Runs cases: each command in a forked child of a process that has imported the libraries."""

import json
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from golden.cases import CASES, Killed
from golden.digest import digest_folder, without_clocks

ROOT = Path(__file__).parents[2]
INPUTS = Path(__file__).parent / "inputs"
TIME_LIMIT = 400.0  # seconds of one command
# One thread, no network, and quick compilers: set before the libraries are imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "PYTHONHASHSEED": "0",
    "COLUMNS": "100",
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
}


class CaseFailed(Exception):
    """A command of a case ended with an error."""


def run_cases(names: Iterable[str], out: Path, src: Path) -> int:
    """Run cases with the package in `src`; writes OUT/NAME.json. Returns 1 if any failed."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    import_package(src.resolve())

    failed = 0
    for name in names:
        began = time.monotonic()
        try:
            digest = run_case(name, out / name)
        except CaseFailed as error:
            failed = 1
            digest = {"failed": str(error)}

        text = json.dumps(digest, indent=1, sort_keys=True)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        state = digest.get("failed", "done")
        print(f"{name:<24} {time.monotonic() - began:5.1f} s  {state}", flush=True)
    return failed


def import_package(src: Path) -> None:
    """Import the package from a folder, and PyTorch and TRL with it; children share them."""
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = str(src)  # of the processes that a command starts
    sys.path.insert(0, str(src))

    import mesotron

    if Path(mesotron.__file__).parents[1] != src:
        raise SystemExit(f"mesotron was imported from {mesotron.__file__}, not from {src}")
    mesotron.GRPOTrainer  # noqa: B018


def run_case(name: str, folder: Path) -> dict:
    """Run the commands of a case in a fresh folder; returns what they made."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(INPUTS, folder)

    for number, step in enumerate(CASES[name].steps, start=1):
        log = folder / f"output-{number}.txt"
        run_step(step, folder, log)

    digest = digest_folder(folder, INPUTS)

    if CASES[name].shown:
        for log in sorted(folder.glob("output-*.txt")):
            digest[log.name] = without_clocks(log.read_text(encoding="utf-8")).splitlines()

    for heavy in [*folder.rglob("checkpoints"), *folder.rglob("export")]:
        shutil.rmtree(heavy, ignore_errors=True)

    return digest


def run_step(step: str | Killed, folder: Path, log: Path) -> None:
    words = step.command.split() if isinstance(step, Killed) else step.split()
    most_rows = step.rows if isinstance(step, Killed) else None
    expected = -signal.SIGKILL if isinstance(step, Killed) else 0

    pid = fork(words, folder, log)
    code = wait(pid, folder / "run" / "metrics.jsonl", most_rows)
    if code != expected:
        last = errors_of(log).read_text(errors="replace").strip().splitlines()[-1:]
        raise CaseFailed(f"exit code {code} of {' '.join(words[:3])}: {' '.join(last)}")


def wait(pid: int, metrics: Path, most_rows: int | None) -> int:
    """The exit code of a child, which is killed at `most_rows` logged steps or when it hangs."""
    deadline = time.monotonic() + TIME_LIMIT
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)

        has_rows = most_rows is not None and count_lines(metrics) >= most_rows
        if has_rows or time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)


def count_lines(path: Path) -> int:
    if path.exists():
        return path.read_bytes().count(b"\n")

    return 0


def fork(words: list[str], folder: Path, log: Path) -> int:
    """Start a command in a child; returns its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid

    code = 70
    try:
        os.setsid()  # a group of its own, which ends with it
        os.chdir(folder)
        redirect(log)
        code = execute(words)
    except SystemExit as stop:
        if isinstance(stop.code, int):
            code = stop.code
        else:
            code = int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def redirect(log: Path) -> None:
    """Send this process's output, and that of its children, to a file; errors to one beside it."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(log, flags), 1)
    os.dup2(os.open(errors_of(log), flags), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def errors_of(log: Path) -> Path:
    return log.with_name(log.name.replace("output", "errors"))


def execute(words: list[str]) -> int:
    """Run a script of `inputs`, or the command line as `python -m mesotron` does."""
    if words[0].endswith(".py"):
        sys.argv = words
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = ["mesotron", *words]
        runpy.run_module("mesotron", run_name="__main__", alter_sys=True)
    return 0
