"""Run a tier of the tests: `python -m tests [check | long | times] [arguments of pytest]`.

- ``check``: linters, types, the tests in `tests/unit` and those marked `smoke`. One minute; for each change.
- no word: all tests but those marked `long`. For each landing; continuous integration runs this tier.
- ``long``: the tests marked `long`. A whole run is recorded in `tests/long_run.json`; the default tier checks its age.
- ``times``: what each module cost in the last run of the default or the long tier.

Every test runs once. A test that cannot be trusted is named in `tests/quarantine.json`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tests import long_run, quarantine, times

ROOT = Path(__file__).parents[1]
PROCESSES = 3
"""Processes that share the tests without Ray on two cores. Half of their time is waiting."""
PASSED, NONE_CHOSEN = 0, 5
"""Exit codes of pytest."""


class Job:
    """A command that runs beside others. Its output is printed once it has ended, unless it is shown as it comes."""

    def __init__(self, name: str, command: Sequence[str], *, is_shown: bool = False) -> None:
        self.name = name
        self._started = time.monotonic()
        self._output = None if is_shown else TemporaryFile()  # noqa: SIM115, open until the command ends
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT)

    def wait(self) -> int:
        """Return the exit code, after printing what was not shown before."""
        code = self._process.wait()
        seconds = time.monotonic() - self._started
        if self._output is not None:
            self._output.seek(0)
            print(f"\n== {self.name}", flush=True)
            sys.stdout.buffer.write(self._output.read())
        print(f"== {self.name}: exit code {code}, {seconds:.0f} s", flush=True)
        return code

    def end(self) -> None:
        """Terminate the command if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def pytest(name: str, *arguments: str, is_shown: bool = True) -> Job:
    """Start a run of pytest."""
    return Job(name, [sys.executable, "-m", "pytest", *arguments], is_shown=is_shown)


def outcome(jobs: Sequence[Job]) -> int:
    """Wait for all jobs. Return the first exit code that is a failure; else 0, or 5 where no job chose a test."""
    try:
        codes = [job.wait() for job in jobs]
    finally:
        for job in jobs:
            job.end()
    return worst(codes)


def worst(codes: Sequence[int]) -> int:
    """Return the first failure; else 0 if a job passed, and 5 if none of them chose a test."""
    failures = [code for code in codes if code not in (PASSED, NONE_CHOSEN)]
    return failures[0] if failures else min(codes)


def check(arguments: list[str]) -> int:
    """Run linters and types beside the unit tests and the smoke tests; those with Ray have a process of their own."""
    modules = {str(path): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    smoke = [path for path, text in modules.items() if "mark.smoke" in text]
    with_ray = [path for path in smoke if "mark.ray" in modules[path]]
    lint = Job("lint", ["make", "--no-print-directory", "lint"])
    shared = ("-n", "2", "--dist", "loadfile", "-m", "(unit or smoke) and not (long or ray)")
    tests = pytest("tests", *shared, "tests/unit", *smoke, *arguments)
    beside = pytest("tests with Ray", "-m", "ray and smoke and not long", *with_ray, *arguments, is_shown=False)
    return outcome([tests, beside, lint])


def default(arguments: list[str]) -> int:
    """Run all tests but the long ones: first those without Ray in parallel, then those with Ray, then those alone.

    Tests with Ray took 950 s beside three other processes on two cores, and 100 s by themselves.
    """
    print(long_run.shown(), quarantine.shown(), sep="\n", flush=True)
    if long_run.is_outdated() or quarantine.is_broken():
        return 1
    times.begin()
    parallel = ("-n", str(PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder")
    groups = {
        "tests": (*parallel, "-m", "not (long or alone or ray)"),
        "tests with Ray": ("-m", "ray and not (long or alone)"),
        "tests that run alone": ("-m", "alone and not long"),
    }
    codes = []
    for name, options in groups.items():
        codes.append(outcome([pytest(name, *options, *arguments)]))
        if codes[-1] not in (PASSED, NONE_CHOSEN):
            break
    return worst(codes)


def long(arguments: list[str]) -> int:
    """Run the long tests one after another. Record a whole run that passed."""
    times.begin()
    started = time.monotonic()
    code = outcome([pytest("long tests", "-m", "long", *arguments)])
    if code == PASSED and not arguments:
        long_run.record(seconds=time.monotonic() - started, tests=times.count())
    return code


def show_times(arguments: list[str]) -> int:
    """Print the table of the last run."""
    print(times.table())
    return 0


TIERS: dict[str, Callable[[list[str]], int]] = {"check": check, "long": long, "times": show_times}


def main(arguments: list[str]) -> int:
    """Run the tier that the first argument names, or the default one."""
    tier = TIERS.get(arguments[0]) if arguments else None
    return default(arguments) if tier is None else tier(arguments[1:])


def leave(*_: Any) -> None:
    """End on SIGTERM as on an exception, so that the jobs are ended too."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same modules
    sys.exit(main(sys.argv[1:]))
