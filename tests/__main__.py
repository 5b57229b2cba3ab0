"""Run the tests in the least time: `python -m tests [arguments of pytest]`.

First those that may share the CPUs run in several processes, each module in one of them; then those that are marked
`alone` run one after another. `-m` chooses among both, and each run of pytest is given all other arguments.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from typing import Any

import pytest

from dpex.system.cpus import usable_cpus

MOST_PROCESSES = 8
"""A module is not divided, so that more processes would wait for the longest one; each takes half a GB of memory."""
PER_CPU = 1.5
"""A third of a test's time is waiting: for processes to start, and for what it planted."""
STOPPING = ("-x", "--exitfirst", "--maxfail")


def process_count() -> int:
    """How many processes keep the CPUs of this machine busy."""
    return max(1, min(MOST_PROCESSES, int(PER_CPU * usable_cpus())))


def runs(arguments: list[str]) -> list[list[str]]:
    """The arguments of both runs of pytest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", default="")
    chosen, rest = parser.parse_known_args(arguments)
    also = f"({chosen.m}) and " if chosen.m else ""
    shared = ["-n", str(process_count()), "--dist", "loadfile", "-m", f"{also}not alone"]
    return [[*shared, *rest], ["-m", f"{also}alone", *rest]]


def run(arguments: list[str]) -> int:
    """The exit code of pytest, which also ends where this process is interrupted or terminated."""
    process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments])
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # it was pressed for pytest as well, which reports and ends
    finally:
        process.terminate()


def ends(code: int, arguments: list[str]) -> bool:
    """Whether nothing more is to be run after a run with that exit code."""
    if code == pytest.ExitCode.TESTS_FAILED:
        return any(argument.startswith(STOPPING) for argument in arguments)
    return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def main(arguments: list[str]) -> int:
    """The worse exit code of both runs; having no tests matters only where neither has any."""
    codes = []
    for each in runs(arguments):
        codes.append(run(each))
        if ends(codes[-1], arguments):
            return codes[-1]
    return max(codes, key=lambda code: (code != pytest.ExitCode.NO_TESTS_COLLECTED, code))


def leave(*_: Any) -> None:
    """End on SIGTERM as on other exceptions, so that pytest is ended as well."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main(sys.argv[1:]))
