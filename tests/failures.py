"""Which tests failed in a run, written to a file for whoever started it (`python -m tests`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FILE = "DPEX_TEST_FAILED"
"""The variable that names the file; without it nothing is written."""


class Failures:
    """Collects them in the process that reports, which is told of those in other processes too."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a test of which a phase failed."""
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        """Write one to a line."""
        self._file.write_text("".join(f"{each}\n" for each in self._failed))


def pytest_configure(config: pytest.Config) -> None:
    """Collect in this run, if somebody asked for it and this is the process that reports."""
    file = os.environ.get(FILE)
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(file)))
