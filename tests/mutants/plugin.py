"""Plugins of pytest: one that traces what each test runs, one that names the first failure."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mutants.trace import tracer


class Tracing:
    """What a fixture of a module or session runs counts for every test of the file."""

    def __init__(self, passed: Path) -> None:
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._passed = passed

    def pytest_sessionstart(self) -> None:
        tracer.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        tracer.begin(item.nodeid)
        try:
            return (yield)
        finally:
            tracer.begin("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        test = os.environ.get("REACH_TEST", "")
        if fixturedef.scope != "function":
            tracer.begin("")

        try:
            return (yield)
        finally:
            tracer.begin(test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = seconds + report.duration
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {
            test: round(s, 2) for test, s in self._seconds.items() if test not in self._failed
        }
        self._passed.write_text(json.dumps(passed))


class FirstFailure:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write_text(report.nodeid)
