"""The cost of each module of tests: counted in every run of `python -m tests`, shown by `make test-times`."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / ".test-times.jsonl"
"""Seconds and number of tests by module, a line for each run of pytest. Git ignores the file."""
SWITCH = "DPEX_TEST_TIMES"
"""Variable that `python -m tests` sets; a run of pytest by hand is not counted."""


def begin() -> None:
    """Forget the last run, and count those that this process starts."""
    FILE.unlink(missing_ok=True)
    os.environ[SWITCH] = "1"


class Times:
    """Adds up the phases of all tests, in the process that reports."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        module = report.nodeid.partition("::")[0]
        self._seconds[module] += report.duration
        self._tests[module] += report.when == "call" and report.outcome != "skipped"

    def pytest_sessionfinish(self) -> None:
        """Append this run's line."""
        with FILE.open("a") as file:
            print(json.dumps({"seconds": self._seconds, "tests": self._tests}), file=file)


def pytest_configure(config: pytest.Config) -> None:
    """Count in this run if `python -m tests` started it and this is the process that reports."""
    if os.environ.get(SWITCH) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Times())


def _total(what: str) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for line in FILE.read_text().splitlines() if FILE.exists() else []:
        for module, amount in json.loads(line)[what].items():
            total[module] += amount
    return total


def count() -> int:
    """Tests that ran."""
    return int(sum(_total("tests").values()))


def table() -> str:
    """Return seconds and tests of each module that took at least one second, slowest first."""
    seconds, tests = _total("seconds"), _total("tests")
    if not seconds:
        return "No run of `make test` or `make test-long` is recorded here yet."
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    lines = [f"{spent:8.1f} s {tests[module]:6.0f} tests  {module}" for module, spent in rows if spent >= 1]
    rest = [module for module, spent in rows if spent < 1]
    few = sum(seconds[module] for module in rest), sum(tests[module] for module in rest)
    lines.append(f"{few[0]:8.1f} s {few[1]:6.0f} tests  in {len(rest)} modules under one second each")
    lines.append(f"{sum(seconds.values()):8.1f} s {sum(tests.values()):6.0f} tests  in all, added over all processes")
    return "\n".join(lines)
