"""The clock of dpex under tests of users that stop or move the time."""

import re
import time
from pathlib import Path

import dpex
from dpex.system.clock import monotonic


def test_no_module_uses_a_clock_that_tests_of_users_replace() -> None:
    """freezegun replaces the functions of the module ``time`` in each module that holds one."""
    assert monotonic is not time.perf_counter
    clock = re.compile(r"\btime\.(monotonic|perf_counter)\(|from time import .*(monotonic|perf_counter)")
    sources = Path(dpex.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if clock.search(path.read_text())] == []


def test_the_clock_is_that_of_the_system() -> None:
    before, now, after = time.perf_counter(), monotonic(), time.perf_counter()
    assert before <= now <= after
