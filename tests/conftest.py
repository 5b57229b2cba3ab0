"""What must hold for every test, however they were started."""

import gc
import signal
from collections.abc import Iterator
from multiprocessing import resource_sharer

import failures
import pytest
import skips
from sharing import pytest_collection_modifyitems, pytest_ignore_collect, pytest_xdist_make_scheduler
from skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_xdist_make_scheduler",
]


def pytest_configure(config: pytest.Config) -> None:
    """Check the switches, and collect what fails where that was asked for."""
    skips.check_switch()
    failures.pytest_configure(config)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and so would be whatever the tests start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> Iterator[None]:
    """Many tests collect garbage, and all modules and tests would be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nobody_shares_resources() -> Iterator[None]:
    """Torch's own way of handing tensors to another process starts a thread, which stays; dpex counts it as one that
    may draw random numbers."""
    yield
    if resource_sharer._resource_sharer._thread is not None:
        resource_sharer.stop(timeout=5.0)
