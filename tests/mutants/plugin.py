"""Plugins of pytest: one that notes what each test runs, one that picks tests, in an order."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mutants.probes import Hits


class Tracing:
    """Which tests pass, how long they take, and the statements that they run.

    What a fixture of a module or session runs counts for every test of the file.
    """

    def __init__(self, hits: Hits, out: Path, only: Sequence[str] = ()) -> None:
        self._hits = hits
        self._out = out
        self._only = only
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._ran: dict[str, set[int]] = {}
        self._shared: set[int] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._only:
            items[:] = [item for item in items if item.nodeid in self._only]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._hits.clear()
        try:
            return (yield)
        finally:
            self._ran[item.nodeid] = self._hits.read()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before = self._hits.read() if fixturedef.scope != "function" else None
        try:
            return (yield)
        finally:
            if before is not None:
                self._shared |= self._hits.read() - before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = seconds + report.duration
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        tests = {}
        for test, seconds in self._seconds.items():
            if test not in self._failed:
                ran = sorted(self._ran.get(test, set()) | self._shared)
                tests[test] = {"seconds": round(seconds, 3), "ran": ran}

        found = {"tests": tests, "failed": sorted(self._failed)}
        self._out.write_text(json.dumps(found))


class Chosen:
    """Runs these tests alone, in this order, until one fails, whose name goes to a file."""

    def __init__(self, tests: Sequence[str], failed: Path) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._failed = failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(kept, key=lambda item: self._order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed.exists():
            self._failed.write_text(report.nodeid)
