"""What must hold for every test, however they were started."""

import signal
from collections.abc import Iterator

import pytest
from sharing import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from skips import pytest_configure, pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_xdist_make_scheduler",
]


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and so would be whatever the tests start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
