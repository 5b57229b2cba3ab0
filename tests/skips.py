"""Which tests may be skipped: under ``DPEX_TEST_REQUIRE=all`` only those that need what nobody can install.

A skipped test proves nothing, and a run without Prometheus or Chromium skips dozens of them. The switch turns every
skip into a failure unless its reason is in `ALLOWED`; continuous integration sets it.
"""

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

SWITCH = "DPEX_TEST_REQUIRE"
ALLOWED = (
    "needs a CUDA device",
    "this driver does not offer PCIe counts",
    "this machine has the library",  # NVIDIA's: the test shows what happens without a GPU
    "torch was built with CUDA",  # the test shows what happens without
    "says what happens without an accelerator",
    "this kernel does not count it",
    "only root can give a directory away",
    "only root can mount a file system",
    "network namespaces need root",
    "this machine's root may not make network namespaces",
    "this torch has no",  # see `torch_features`
    "needs Python 3.11",  # Grafana's types
    "needs Python 3.12",  # immortal objects
    "this Python has immortal objects",  # the test shows what happens without
    "this machine has no Python 3.1",
)
"""Reasons that are about the machine (its GPU, its kernel, its user), or the versions of Python and torch."""


def is_strict() -> bool:
    """Whether a skip for want of a program is a failure.

    Raises:
        pytest.UsageError: the switch has a value that means nothing.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "all"):
        raise pytest.UsageError(f'{SWITCH}={value!r}: set it to "all", or leave it unset')
    return value == "all"


def check_switch() -> None:
    """Refuse a wrong value before any test runs."""
    is_strict()


def _must_run(report: Any) -> bool:
    if not (report.skipped and is_strict()) or hasattr(report, "wasxfail"):
        return False
    return not any(re.search(re.escape(reason), _reason(report)) for reason in ALLOWED)


def _reason(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


def _fail(report: Any) -> None:
    report.longrepr = f"{_reason(report)}\nUnder {SWITCH}=all it must run: install what it needs (see CONTRIBUTING.md)."
    report.outcome = "failed"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Fail the test that was skipped and should have run."""
    report = yield
    if _must_run(report):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Fail the module that was skipped as a whole, as `pytest.importorskip` does."""
    report = yield
    if _must_run(report):
        _fail(report)
    return report
