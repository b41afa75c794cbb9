"""Golden references: bit-equal runs, and texts that do not depend on the machine.

    python -m golden list                         the cases, by room
    python -m golden run --out DIR                run the cases with this checkout's code
    python -m golden compare DIR1 DIR2            a table per case; exit 1 if any differs
    python -m golden against REV                  run REV's code and today's, then compare
    python -m golden update                       write the committed references again

Run them from the root of the repository with PYTHONPATH=src:tests, or use `make golden BASE=REV`.
`--only` takes names of cases and of rooms; `--only quick` is a first look.

Floating-point results are equal to the last bit on one machine only, so they are not committed:
`against` makes both sides here. The cases use the command line and public names alone, so they run
with older and newer code. What does not depend on the machine (help pages, parsed command lines,
verdicts on public logs) is committed beside this file and checked by tests/test_golden.py.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from golden import committed
from golden.cases import CASES, choose
from golden.digest import compare_folders
from golden.runner import ROOT, run_cases


def main() -> int:
    arguments = parse_arguments()

    if arguments.command == "list":
        return list_cases()
    if arguments.command == "run":
        return run_cases(choose(arguments.only), arguments.out, arguments.src)
    if arguments.command == "compare":
        return compare_folders(arguments.first, arguments.second, arguments.only)
    if arguments.command == "against":
        return run_against(arguments.rev, arguments.only)

    committed.update()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="golden", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("list")
    commands.add_parser("update")

    run = commands.add_parser("run")
    run.add_argument("--out", type=Path, required=True)

    run.add_argument(
        "--src",
        type=Path,
        default=ROOT / "src",
        help="folder of the package",
    )

    compare = commands.add_parser("compare")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)

    against = commands.add_parser("against")
    against.add_argument("rev")

    for each in (run, compare, against):
        each.add_argument(
            "--only",
            nargs="+",
            default=[],
            metavar="NAME",
        )

    return parser.parse_args()


def list_cases() -> int:
    width = max(map(len, CASES))
    for name, case in CASES.items():
        print(f"{name:<{width}}  {' '.join(case.rooms)}")
    return 0


def run_against(rev: str, only: list[str]) -> int:
    """Run the cases with the code of a revision and with today's, each in its own process."""
    names = ["--only", *choose(only)]
    python = [sys.executable, "-m", "golden", "run"]

    with tempfile.TemporaryDirectory(prefix="golden-") as scratch, worktree(rev) as base:
        sides = {base / "src": Path(scratch) / "base", ROOT / "src": Path(scratch) / "today"}
        for src, out in sides.items():
            print(f"code of {src}", flush=True)
            subprocess.run([*python, "--src", src, "--out", out, *names], check=False)

        return compare_folders(*sides.values())


@contextmanager
def worktree(rev: str) -> Iterator[Path]:
    """A temporary checkout of a revision."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="golden-base-") as scratch:
        path = Path(scratch) / "checkout"
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), rev], check=True)

        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "100")
    sys.exit(main())
