"""What holds for every test, whichever tier of the Makefile it belongs to."""

import contextlib
import gc
import re
import signal
import sys
from collections.abc import Iterator
from datetime import date
from importlib import metadata
from multiprocessing import resource_sharer
from pathlib import Path

import long_run
import pytest
import quarantine
import skips
from shared_ray import ray_of_session, shared_ray
from skips import pytest_make_collect_report, pytest_runtest_makereport

from dpex.loader.unused import ABOUT
from dpex.system.user_warnings import is_first

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport", "ray_of_session", "shared_ray"]

with contextlib.suppress(ImportError):  # `make test-gpu` does without
    from hypothesis import HealthCheck, settings

    # A busy machine is no failure.
    settings.register_profile("dpex", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("dpex")

WHOLE = "not (long or alone or ray)"
"""The marks with which `make test` begins."""
NEEDS_RAY = re.compile(r"mark\.ray\b|^ *(import|from) ray\b|\"ray[a-z._]*\"", re.MULTILINE)
"""A module whose text has this is left out where Ray is not installed, as in the runs of CI without it."""
OF_ALL = r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.(?:{})\b"
"""The marks that all tests of a module have."""
LAST = "frameworks"
"""Folder of the tests that import large packages. Afterwards each fork of their process copies more page tables."""


def pytest_configure(config: pytest.Config) -> None:
    """Check the switches. Refuse `make test` where the long tests or the quarantine are out of date."""
    skips.check_switch()
    if config.option.markexpr == WHOLE and (long_run.is_outdated() or quarantine.faults(date.today())):
        raise pytest.UsageError(f"{long_run.shown()}\n{quarantine.shown()}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say how old the last long run is, and which failures do not count."""
    return [long_run.shown(), quarantine.shown()] if config.option.markexpr == WHOLE else []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a run pass that finds no test with its marks, as one command of a tier may. Record a whole long run."""
    config = session.config
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and config.option.markexpr:
        session.exitstatus = pytest.ExitCode.OK
    is_part = (
        config.args_source is not config.ArgsSource.TESTPATHS or config.option.keyword or config.option.collectonly
    )
    if exitstatus == pytest.ExitCode.OK and config.option.markexpr == "long" and not is_part:
        stats = config.pluginmanager.get_plugin("terminalreporter").stats
        long_run.record(tests=len(stats.get("passed", ())))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that have no test with the marks that the run asks for, or that need a Ray that is missing."""
    if not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    unasked = re.fullmatch(r"not \((.+)\)", config.option.markexpr)
    if unasked and re.search(OF_ALL.format("|".join(unasked[1].split(" or "))), text, re.MULTILINE):
        return True
    asked = re.sub(r"not (\w+|\(.*?\))", "True", config.option.markexpr) or "True"
    marks = {name: f"mark.{name}" in text for name in re.findall(r"\w+", asked)}
    has_marked = eval(asked, {**marks, "unit": "unit" in collection_path.parts, "True": True})
    needs_ray = NEEDS_RAY.search(text) is not None and not list(metadata.distributions(name="ray"))
    return True if needs_ray or not has_marked else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply the quarantine. Let tests of frameworks come last, and then tests with Ray.

    Once a process is connected to Ray, dpex starts workers there in another way.
    """
    quarantine.pytest_collection_modifyitems(items)
    items.sort(key=lambda item: (item.get_closest_marker("ray") is not None, item.path.parent.name == LAST))


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> Iterator[None]:
    """Restore SIGINT, which a shell ignores in background jobs, as would all processes that the tests start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def unused_loaders_are_not_told() -> None:
    """Count the warning of loaders without one ``iter()`` as said. Only `test_unused` wants it."""
    is_first(ABOUT)


@pytest.fixture(scope="module", autouse=True)
def cheap_collections() -> Iterator[None]:
    """Take what earlier modules have left out of garbage collection, which most tests call.

    A collection took 0.5 s where many modules had run before, and 0.01 s in a new process.
    """
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def no_foreign_thread_stays() -> Iterator[None]:
    """Stop the threads of tqdm, and of torch for handing tensors to another process. dpex expects of a foreign thread
    that it may draw random numbers."""
    yield
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and tqdm.monitor is not None:
        tqdm.monitor.exit()
        tqdm.monitor = None
    if resource_sharer._resource_sharer._thread is not None:
        resource_sharer.stop(timeout=5.0)
