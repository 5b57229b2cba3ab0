"""Planted bottlenecks in real loaders on this machine: each is found, and the first advice is an argument, or names
other programs.

Other programs may run beside them: `check` accepts what they cause, if the workers were truly kept waiting for a CPU.
"""

import subprocess
import sys

import pytest

from dpex.diagnose.what_if import AT_HAND
from dpex.system.cpus import usable_cpus
from tests.diagnose.planted import ADVICE, CASES, check, is_crowded


@pytest.mark.parametrize("name", CASES)
def test_the_planted_bottleneck_is_found(name: str) -> None:
    found = check(CASES[name])
    if found.verdict.cause in {*CASES[name].accepted} - {"consumer", "too-early"}:
        assert found.facts.wait_ratio > 0.3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.alone) if name == "a free CPU" else name for name in ADVICE]
)
def test_the_first_advice_is_an_argument(name: str) -> None:
    case, change = ADVICE[name]
    found = check(case)
    assert change in found.advice or is_crowded(found), str(found)
    best = found.recommendation
    assert best is not None
    assert best.kind in AT_HAND, str(found)


def test_the_first_advice_names_programs_that_take_the_cpus() -> None:
    command = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(command, start_new_session=True) for _ in range(2 * round(usable_cpus()))]
    try:
        found = CASES["computing"].run()
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert found.advice.startswith("without the other programs, which use "), str(found)
