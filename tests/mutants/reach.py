"""Which tests run which function: noted once for each content of a test file."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mutants.changes import Change
from mutants.forked import run_pytest
from mutants.plugin import Tracing

HERE = Path(__file__).parent
# A file that takes longer than this is not used.
_LIMIT_S = 1800
# The tests of one change take at most about this long without it, the quickest first.
_BUDGET_S = 240.0


@dataclass
class Reach:
    seconds: dict[str, float] = field(default_factory=dict)  # of each test that passes
    by_function: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))

    def tests_for(self, change: Change) -> list[str]:
        """Those of the room first, and the quick ones of them; then others, while time is left."""
        room = f"tests/{Path(change.path).parts[0]}/"
        tests = self._running(change)
        order = sorted(tests, key=lambda t: (not t.startswith(room), self.seconds[t]))

        chosen: list[str] = []
        total = 0.0
        for test in order:
            total += self.seconds[test]
            if chosen and total > _BUDGET_S:
                break
            chosen.append(test)

        return chosen

    def _running(self, change: Change) -> set[str]:
        reached = self.by_function.get((change.path, change.function), set())
        if not change.function or not reached:  # of a module or class, or found by no test
            keys = [key for key in self.by_function if key[0] == change.path]
            if change.function:
                keys = [key for key in keys if key[1].startswith(f"{change.function}.")]

            reached = set().union(*(self.by_function[key] for key in keys))

        return {test for test in reached if test in self.seconds}

    def read(self, folder: Path, file: str) -> None:
        seconds: dict[str, float] = json.loads((folder / "tests.json").read_text())
        self.seconds |= seconds

        for line in (folder / "functions.txt").read_text().splitlines():
            test, path, function = line.split("\t")
            if function == "<module>":
                continue

            whole_file = [t for t in seconds if t.startswith(f"{file}::")]
            self.by_function[path, function] |= {test} if test else set(whole_file)


def read_reach(tree: Path, files: Iterable[str], cache: Path) -> Reach:
    """Run the test files that have changed since the last time under the tracer; read them all."""
    reach = Reach()
    for file in files:
        digest = hashlib.sha256((tree / file).read_bytes()).hexdigest()[:16]
        folder = cache / f"{file.replace('/', '.')}-{digest}"
        if not (folder / "tests.json").exists():
            _trace(tree, file, folder)

        reach.read(folder, file)

    return reach


def _trace(tree: Path, file: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    functions = folder / "functions.txt"
    functions.write_text("")
    passed = folder / "tests.json"

    print(f"tracing {file}", flush=True)
    os.environ["REACH_FILE"] = str(functions.resolve())
    os.environ["REACH_PATH"] = str(HERE / "trace")
    try:
        code = run_pytest(tree, [file], Tracing(passed.resolve()), _LIMIT_S)
    finally:
        del os.environ["REACH_FILE"]
        del os.environ["REACH_PATH"]

    if code is None:
        print(f"{file} took more than {_LIMIT_S} seconds and is not used", flush=True)
    if not passed.exists():
        passed.write_text("{}")

    _keep_each_line_once(functions)


def _keep_each_line_once(file: Path) -> None:
    lines = sorted(set(file.read_text().splitlines()))
    file.write_text("".join(f"{line}\n" for line in lines))
