"""`make mutants`: change the package at random places and see which changes no test notices.

See tests/mutants/README.md.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mutants.changes import Change, changes_of
from mutants.forked import ROOT, import_all, run_pytest
from mutants.plugin import Chosen
from mutants.reach import How, Notes, Reach, digest, put_probes, trace

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
    "rlvr/passes/kernels/",
    "optim/routing/command.py",
    "spectral/spectrum.py",
    "runs/console.py",
    "runs/doctor.py",
    "runs/markdown.py",
)
TEST_ROOMS = (
    *("rlvr", "optim", "answers", "spectral", "rewards", "runs", "watch"),
    *("config", "evaluate", "sampling", "serve", "tasks", "models"),
)
_WORK = ROOT / ".mutants"
_TREE = _WORK / "tree"
_COPIES = _WORK / "copies"  # one for each worker
_FOLDERS = ("src", "tests", "benchmarks", "docs", "examples", "sweeps")  # where git is not known


def main() -> int:
    args = parse()
    how = How(time.time() + 60 * args.minutes, args.budget, tuple(args.pytest.split()))
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    import_all()
    copy_tree()
    files = [file for room in args.rooms for file in _test_files(room)]
    notes = Notes(out / "reach.json.gz")
    trace_all(notes, files, args.jobs, how)
    if notes.missing(_TREE, files):
        print("not all tests are traced yet: the same command goes on")
        return 1

    drawn = draw(args.only, args.seed, args.num)
    results = out / f"seed-{args.seed}.jsonl"
    done = try_all(drawn, notes.reach(files), args.jobs, how, results)
    print_table([done[_key(change)] for change in drawn if _key(change) in done], len(drawn))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num", type=int, default=200, help="how many changes")
    parser.add_argument("--only", nargs="+", default=PLACES, help="packages or files")
    parser.add_argument("--rooms", nargs="+", default=TEST_ROOMS, help="folders or files of tests")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are tried at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="nothing new begins after these")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests for each change")
    parser.add_argument("--out", type=Path, default=_WORK, help="folder of notes and results")
    parser.add_argument("--pytest", default="", help="more words for pytest")
    return parser.parse_args()


def copy_tree() -> None:
    """The files that git knows or would add, as they are now."""
    shutil.rmtree(_TREE, ignore_errors=True)
    shutil.rmtree(_COPIES, ignore_errors=True)
    for name in _names():
        if (ROOT / name).is_file():
            target = _TREE / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def _names() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        return listed.stdout.splitlines()

    inside = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*")]
    paths = [path for path in (*ROOT.iterdir(), *inside) if "__pycache__" not in path.parts]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def _test_files(room: str) -> list[str]:
    inside = _TREE / "tests" / room
    found = inside.rglob("test_*.py") if inside.is_dir() else [inside]
    return sorted(path.relative_to(_TREE).as_posix() for path in found)


def sources(places: Iterable[str]) -> list[str]:
    root = _TREE / "src" / "mesotron"
    found: list[str] = []
    for place in places:
        inside = root / place
        files = sorted(inside.rglob("*.py")) if inside.is_dir() else [inside]
        found += [file.relative_to(root).as_posix() for file in files]

    return [path for path in found if not path.startswith(LEFT_OUT)]


# Tracing


def trace_all(notes: Notes, files: list[str], jobs: int, how: How) -> None:
    """Note what the test files run that have changed since the last time."""
    missing = notes.missing(_TREE, files)
    if not missing:
        return

    if jobs > 1:  # the largest first, which take longest
        missing.sort(key=lambda file: -(_TREE / file).stat().st_size)

    probed = _WORK / "probed"
    shutil.rmtree(probed, ignore_errors=True)
    shutil.copytree(_TREE, probed)
    keys = put_probes(probed, sources(PLACES))

    work = [(probed, file, keys, how) for file in missing]
    for number, (file, noted) in enumerate(_crew(_trace_one, work, jobs), start=1):
        if noted is None:
            continue

        notes.keep(file, digest(_TREE / file), noted)
        if number % 10 == 0:
            notes.save()

        failed = f", not used: {' '.join(noted['failed'])}" if noted["failed"] else ""
        print(f"traced {number}/{len(missing)} {file}{failed[:500]}", flush=True)

    notes.save()
    shutil.rmtree(probed)


def _trace_one(
    probed: Path, file: str, keys: list[str], how: How
) -> tuple[str, dict[str, Any] | None]:
    if how.left() < 20:
        return file, None

    copies = _own_copy(probed, "probed"), _own_copy(_TREE, "tree")
    noted = trace(*copies, file, keys, how)
    if noted is None and how.left() > 1:
        noted = {"tests": {}, "failed": [file], "keys": []}  # it takes too long

    return file, noted


# Trying


def draw(places: Sequence[str], seed: int, num: int) -> list[Change]:
    """Changes at random lines: each line that can be changed is as likely as any other."""
    root = _TREE / "src" / "mesotron"
    lines: dict[tuple[str, int], list[Change]] = defaultdict(list)
    for path in sources(places):
        for change in changes_of(root, path):
            lines[path, change.line].append(change)

    generator = random.Random(seed)
    keys = generator.sample(sorted(lines), min(num, len(lines)))
    return [generator.choice(lines[key]) for key in keys]


def try_all(
    drawn: list[Change], reach: Reach, jobs: int, how: How, results: Path
) -> dict[str, dict[str, Any]]:
    """The results by the key of each change; what survived a smaller budget is tried again."""
    done = _read(results)
    open_ = [change for change in drawn if not _is_settled(done.get(_key(change)), how)]

    work = [(change, reach, how) for change in open_]
    with open(results, "a") as file:
        for number, row in enumerate(_crew(_try_one, work, jobs), start=1):
            if row is None:
                continue

            done[_row_key(row)] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            place = f"{row['path']}:{row['line']} {row['function']}"
            print(f"{number}/{len(work)} {row['outcome']:<9} {row['seconds']:>5} s {place}")
            sys.stdout.flush()

    return done


def _is_settled(row: dict[str, Any] | None, how: How) -> bool:
    if row is None:
        return False

    return row["outcome"] != "survived" or row["budget"] >= how.budget


def _try_one(change: Change, reach: Reach, how: How) -> dict[str, Any] | None:
    if how.left() < 20:
        return None

    return try_change(_own_copy(_TREE, "tree"), change, reach, how)


def try_change(tree: Path, change: Change, reach: Reach, how: How) -> dict[str, Any] | None:
    """Run the tests that reach a change until one fails that passes without it."""
    file = tree / "src" / "mesotron" / change.path
    source = file.read_bytes()
    start = time.monotonic()

    tests = reach.tests_for(change, source, how.budget)
    outcome, failed = "unreached", None
    unsteady: set[str] = set()
    while tests:
        limit = 40 + 4 * sum(reach.seconds[test] for test in tests)
        file.write_bytes(change.apply(source))
        try:
            outcome, failed = _run(tree, tests, limit, how)
        finally:
            file.write_bytes(source)

        if failed is None or _run(tree, [failed], 90, how)[0] == "survived":
            break

        unsteady.add(failed)  # it fails without the change, too
        tests = [test for test in tests if test not in unsteady]

    if how.left() < 0:
        return None

    return {
        **asdict(change),
        "outcome": outcome,
        "noticed_by": failed,
        "tests": len(tests),
        "budget": how.budget,
        "seconds": round(time.monotonic() - start, 1),
    }


def _run(tree: Path, tests: list[str], limit: float, how: How) -> tuple[str, str | None]:
    """ "survived", "noticed" (with the test, if one failed) or "endless"."""
    first = tree.parent / f"failed-{tree.name}.txt"
    first.unlink(missing_ok=True)

    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    most = max(1.0, min(limit, how.left()))
    code = run_pytest(tree, ["-x", *files, *how.words], Chosen(tests, first), most)
    if code is None:
        return "endless", None
    if code == 0:
        return "survived", None

    failed = first.read_text() if first.exists() else ""
    return "noticed", failed if failed in tests else None


# Workers


def _crew(work: Callable[..., Any], items: list[tuple[Any, ...]], jobs: int) -> Iterator[Any]:
    """The results as they come, by so many processes, which are forks of this one."""
    global _items
    _items = items
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        futures = [pool.submit(_work_on, work, number) for number in range(len(items))]
        for future in as_completed(futures):
            yield future.result()


_items: list[tuple[Any, ...]] = []  # of the fork: large ones are not sent


def _work_on(work: Callable[..., Any], number: int) -> Any:
    return work(*_items[number])


def _own_copy(tree: Path, name: str) -> Path:
    """A copy of the tree for this worker alone."""
    own = _COPIES / f"{name}-{os.getpid()}"
    if not own.exists():
        own.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(tree, own)

    return own


# Results


def _key(change: Change) -> str:
    return _row_key(asdict(change))


def _row_key(row: dict[str, Any]) -> str:
    return f"{row['path']}:{row['line']}:{row['before']}:{row['after']}"


def _read(results: Path) -> dict[str, dict[str, Any]]:
    done = {}
    if results.exists():
        for line in results.read_text().splitlines():
            row = json.loads(line)
            done[_row_key(row)] = row

    return done


def print_table(rows: list[dict[str, Any]], drawn: int) -> None:
    missed = [row for row in rows if row["outcome"] in ("survived", "unreached")]
    print(
        f"\n{len(rows) - len(missed)} of {len(rows)} changes noticed ({drawn} drawn); not noticed:"
    )
    print("\n| place | before | after | tests |\n|---|---|---|---|")
    for row in missed:
        before = " ".join(str(row["before"]).split())
        after = " ".join(str(row["after"]).split())
        print(f"| {row['path']}:{row['line']} | `{before}` | `{after}` | {row['tests']} |")


if __name__ == "__main__":
    sys.exit(main())
