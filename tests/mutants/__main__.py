"""`make mutants`: change the package at random places and see which changes no test notices.

See tests/mutants/README.md.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mutants.changes import Change, changes_of
from mutants.forked import ROOT, import_all, run_pytest
from mutants.plugin import FirstFailure
from mutants.reach import Reach, read_reach

PLACES = (
    "optim",
    "spectral",
    "rlvr",
    "runs",
    "rewards",
    "answers",
    "watch/guard.py",
    "watch/engine.py",
)
# Kernels need a GPU; the others print tables.
LEFT_OUT = (
    "optim/triton/",
    "optim/routing/command.py",
    "spectral/spectrum.py",
    "runs/console.py",
    "runs/doctor.py",
    "runs/markdown.py",
)
TEST_ROOMS = (
    *("answers", "optim", "spectral", "rewards", "runs", "watch", "rlvr"),
    *("config", "evaluate", "sampling", "serve", "tasks"),
)
_WORK = ROOT / ".mutants"
_TREE = _WORK / "tree"


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=200, help="how many changes")
    parser.add_argument("--only", nargs="+", default=PLACES, help="packages or files")
    parser.add_argument("--rooms", nargs="+", default=TEST_ROOMS, help="folders of tests")
    args = parser.parse_args()

    import_all()
    copy_tree()
    files = [file for room in args.rooms for file in _test_files(room)]
    reach = read_reach(_TREE, files, _WORK / "reach")

    drawn = draw(args.only, args.seed, args.num)
    results = _WORK / f"seed-{args.seed}.jsonl"
    done = _read(results)
    for number, change in enumerate(drawn, start=1):
        key = _key(change)
        if key not in done:
            done[key] = try_change(change, reach)
            with open(results, "a") as file:
                file.write(json.dumps(done[key]) + "\n")

        place = f"{change.path}:{change.line}"
        print(f"{number}/{len(drawn)} {done[key]['outcome']:<9} {place}", flush=True)

    print_table([done[_key(change)] for change in drawn])
    return 0


def copy_tree() -> None:
    """The files that git knows or would add, as they are now."""
    shutil.rmtree(_TREE, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            target = _TREE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def _test_files(room: str) -> list[str]:
    found = (_TREE / "tests" / room).rglob("test_*.py")
    return sorted(path.relative_to(_TREE).as_posix() for path in found)


def draw(places: Sequence[str], seed: int, num: int) -> list[Change]:
    """Changes at random lines: each line that can be changed is as likely as any other."""
    root = _TREE / "src" / "mesotron"
    lines: dict[tuple[str, int], list[Change]] = defaultdict(list)
    for place in places:
        inside = root / place
        found = sorted(inside.rglob("*.py")) if inside.is_dir() else [inside]
        for path in (file.relative_to(root).as_posix() for file in found):
            if not path.startswith(LEFT_OUT):
                for change in changes_of(root, path):
                    lines[path, change.line].append(change)

    generator = random.Random(seed)
    keys = generator.sample(sorted(lines), min(num, len(lines)))
    return [generator.choice(lines[key]) for key in keys]


def try_change(change: Change, reach: Reach) -> dict[str, object]:
    """Run the tests that reach a change until one fails that passes without it."""
    file = _TREE / "src" / "mesotron" / change.path
    source = file.read_bytes()
    start = time.monotonic()

    tests = reach.tests_for(change)
    outcome = "unreached"
    failed = None
    while tests:
        file.write_bytes(change.apply(source))
        try:
            outcome, failed = _run(tests, reach)
        finally:
            file.write_bytes(source)

        if failed is None or _run([failed], reach)[0] == "survived":
            break

        del reach.seconds[failed]  # it fails without the change too
        tests = reach.tests_for(change)

    return {
        **asdict(change),
        "outcome": outcome,
        "noticed_by": failed,
        "tests": len(tests),
        "seconds": round(time.monotonic() - start, 1),
    }


def _run(tests: list[str], reach: Reach) -> tuple[str, str | None]:
    """ "survived", "noticed" (with the test) or "endless"."""
    first = _WORK / "failed.txt"
    first.unlink(missing_ok=True)

    limit = 90 + 5 * sum(reach.seconds[test] for test in tests)
    code = run_pytest(_TREE, ["-x", *tests], FirstFailure(first), limit)
    if code is None:
        return "endless", None
    if code == 0:
        return "survived", None

    failed = first.read_text() if first.exists() else ""
    return "noticed", failed if failed in reach.seconds else None


def _key(change: Change) -> str:
    return f"{change.path}:{change.line}:{change.before}:{change.after}"


def _read(results: Path) -> dict[str, dict[str, object]]:
    done = {}
    if results.exists():
        for line in results.read_text().splitlines():
            row = json.loads(line)
            done[f"{row['path']}:{row['line']}:{row['before']}:{row['after']}"] = row

    return done


def print_table(rows: list[dict[str, object]]) -> None:
    missed = [row for row in rows if row["outcome"] in ("survived", "unreached")]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} changes noticed; not noticed:\n")
    print("| place | before | after | tests |\n|---|---|---|---|")
    for row in missed:
        before = " ".join(str(row["before"]).split())
        after = " ".join(str(row["after"]).split())
        print(f"| {row['path']}:{row['line']} | `{before}` | `{after}` | {row['tests']} |")


if __name__ == "__main__":
    sys.exit(main())
