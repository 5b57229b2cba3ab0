"""Run the tests in the least time: `python -m tests [arguments of pytest]`.

First those that may share the CPUs run in several processes, each module in one of them; then those that are marked
`alone` run one after another. `-m` chooses among both, and each run of pytest is given all other arguments.

A few that fail are run again by themselves when all is done: on a busy machine a deadline may pass that has nothing to
do with what is tested, and what measures may have measured a neighbour. Both outcomes are printed. More than
`MOST_AGAIN` failures of one run are no accident, and stand.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dpex.system.cpus import usable_cpus
from tests.failures import FILE

MOST_PROCESSES = 8
"""A module is not divided, so that more processes would wait for the longest one; each takes half a GB of memory."""
PER_CPU = 2.0
"""Half of the tests' time is waiting: for processes to start, and for what they planted."""
MOST_AGAIN = 3
"""Of some eight thousand tests. Each that passes then is a defect of the test all the same, and is named at the end."""
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


def run(arguments: list[str]) -> tuple[int, list[str]]:
    """The exit code of pytest, which also ends where this process is interrupted or terminated, and what failed."""
    with TemporaryDirectory() as directory:
        failed = Path(directory) / "failed"
        command = [sys.executable, "-m", "pytest", *arguments]
        code = wait(subprocess.Popen(command, env={**os.environ, FILE: str(failed)}))
        return code, failed.read_text().splitlines() if failed.exists() else []


def wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code."""
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # it was pressed for pytest as well, which reports and ends
    finally:
        process.terminate()


def stops(code: int, arguments: list[str]) -> bool:
    """Whether nothing more is to be run after a run with that exit code."""
    if code == pytest.ExitCode.TESTS_FAILED:
        return any(argument.startswith(STOPPING) for argument in arguments)
    return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def run_again(failed: list[str]) -> int:
    """The exit code of these tests, run with nothing beside them."""
    print(f"These failed, and run again by themselves: {' '.join(failed)}", flush=True)
    code, _ = run(failed)
    if code == pytest.ExitCode.OK:
        print(f"Failed at first and passed by themselves: {' '.join(failed)}", flush=True)
    return code


def may_run_again(code: int, failed: list[str]) -> bool:
    """Whether so few tests of a run failed that another look is worth it."""
    return code == pytest.ExitCode.TESTS_FAILED and 0 < len(failed) <= MOST_AGAIN


def main(arguments: list[str]) -> int:
    """The worst exit code of the runs; having no tests matters only where none has any."""
    codes, again = [], []
    for chosen in runs(arguments):
        code, failed = run(chosen)
        if stops(code, arguments):
            return code
        codes.append(code)
        if may_run_again(code, failed):
            codes.pop()
            again += failed
    if again:
        codes.append(run_again(again))
    return max(codes, key=lambda code: (code != pytest.ExitCode.NO_TESTS_COLLECTED, code))


def leave(*_: Any) -> None:
    """End on SIGTERM as on other exceptions, so that pytest is ended as well."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    sys.exit(main(sys.argv[1:]))
