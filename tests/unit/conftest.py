"""Tests of this folder start no process, so that `make check` runs them all. The layout is that of `dpex/`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen")
"""Events of Python's audit hooks."""
_running: list[str] = []


def _refuse(event: str, _: Any) -> None:
    if event in STARTS and _running and os.getpid() == _OWN_PID:
        raise AssertionError(f"{_running[0]} starts a process ({event}): move it out of tests/unit")


_OWN_PID = os.getpid()
sys.addaudithook(_refuse)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, whichever others are collected beside them."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.unit)


@pytest.fixture(autouse=True)
def no_process_is_started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test fail that starts one."""
    _running.append(request.node.nodeid)
    yield
    _running.clear()
