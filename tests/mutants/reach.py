"""Which tests run which statement: noted once for each content of a test file, in one file."""

import gzip
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.changes import Change
from mutants.forked import run_pytest
from mutants.plugin import Tracing
from mutants.probes import Hits, insert, keys_of

# A test file that takes longer than this is not used.
TRACE_LIMIT = 900.0


@dataclass(frozen=True)
class How:
    """How tests are run."""

    end: float  # in the time of `time.time`, after which nothing new begins
    budget: float  # seconds of tests for each change
    words: tuple[str, ...]  # for pytest

    def left(self) -> float:
        return self.end - time.time()


@dataclass
class Reach:
    """The tests that pass on the unchanged package, and what they run."""

    seconds: dict[str, float] = field(default_factory=dict)
    width: dict[str, int] = field(default_factory=dict)  # statements that a test runs
    by_key: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, tests: dict[str, Any]) -> None:
        for test, noted in tests.items():
            self.seconds[test] = noted["seconds"]
            self.width[test] = len(noted["ran"])
            for key in noted["ran"]:
                self.by_key[key].add(test)

    def tests_for(self, change: Change, source: bytes, budget: float) -> list[str]:
        """Those that run the fewest other statements first, while `budget` seconds last."""
        chosen: list[str] = []
        total = 0.0
        for test in sorted(self._running(change, source), key=lambda test: self.width[test]):
            if chosen and total + self.seconds[test] > budget:
                continue

            total += self.seconds[test]
            chosen.append(test)

        return chosen

    def _running(self, change: Change, source: bytes) -> set[str]:
        """Tests that run the statement; failing these, its function, its file, or those of its
        room: a worker may run where no probe is seen."""
        key = keys_of(change.path, source).get(change.line, "")
        if self.by_key.get(key):
            return self.by_key[key]

        function = key.rpartition(":")[0]
        found = self._with_prefix(f"{function}:") if key else set()
        found = found or self._with_prefix(f"{change.path}:")
        room = f"tests/{change.path.partition('/')[0]}/"
        return found or {test for test in self.seconds if test.startswith(room)}

    def _with_prefix(self, prefix: str) -> set[str]:
        found: set[str] = set()
        for key, tests in self.by_key.items():
            if key.startswith(prefix):
                found |= tests

        return found


class Notes:
    """The notes on every test file, kept from one call to the next."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._by_file: dict[str, dict[str, Any]] = {}
        if file.exists():
            self._by_file = json.loads(gzip.decompress(file.read_bytes()))

    def keep(self, file: str, digest: str, noted: dict[str, Any]) -> None:
        self._by_file[file] = {"digest": digest, **noted}

    def save(self) -> None:
        draft = self._file.with_suffix(".writing")
        draft.write_bytes(gzip.compress(json.dumps(self._by_file).encode(), 3))
        draft.replace(self._file)

    def missing(self, tree: Path, files: Iterable[str]) -> list[str]:
        return [file for file in files if self._digest_of(file) != digest(tree / file)]

    def _digest_of(self, file: str) -> str:
        return self._by_file.get(file, {}).get("digest", "")

    def reach(self, files: Iterable[str]) -> Reach:
        reach = Reach()
        for file in files:
            noted = self._by_file.get(file, {})
            names = noted.get("keys", [])
            for one in noted.get("tests", {}).values():
                one["ran"] = [names[number] for number in one["ran"]]

            reach.add(noted.get("tests", {}))

        return reach


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def trace(probed: Path, tree: Path, file: str, keys: list[str], how: How) -> dict[str, Any] | None:
    """Run a test file on the copy with probes; None if it did not end.

    A compiler that reads the code fails because of the probes: what passes without them counts as
    running all that the others of the file run.
    """
    noted = _note(probed, file, how)
    if noted is None:
        return None

    noted = _compact(noted, keys)
    if noted["failed"]:
        again = _note(tree, file, how, noted["failed"])
        passed = again["tests"] if again is not None else {}
        for test in passed.values():
            test["ran"] = list(range(len(noted["keys"])))

        noted["tests"] |= passed
        noted["failed"] = [test for test in noted["failed"] if test not in passed]

    return noted


def _note(tree: Path, file: str, how: How, only: Sequence[str] = ()) -> dict[str, Any] | None:
    out = tree.parent / f"noted-{tree.name}.json"
    out.unlink(missing_ok=True)
    hits = Hits(tree.parent / f"hits-{tree.name}")
    limit = min(TRACE_LIMIT, how.left())
    code = run_pytest(tree, [file, *how.words], Tracing(hits, out, only), limit)
    if code is None:
        return None

    if not out.exists():
        return {"tests": {}, "failed": []}

    return json.loads(out.read_text())


def _compact(noted: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """With numbers of keys of its own, since those of the probes change with the sources."""
    numbers: dict[str, int] = {}
    for one in noted["tests"].values():
        ran = {keys[number] for number in one["ran"]}
        one["ran"] = sorted(numbers.setdefault(key, len(numbers)) for key in ran)

    return {**noted, "keys": list(numbers)}


def put_probes(tree: Path, paths: list[str]) -> list[str]:
    return insert(tree / "src" / "mesotron", paths)
