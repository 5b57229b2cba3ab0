"""The soak sees what rises, and a short one is flat."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import ALLOWED, LEAST_LOOKS, Look, curve, report, rise

ROOT = Path(__file__).parents[1]
FLAT = [
    Look(batches=100 * at, memory_mb=300.0 + at % 3, descriptors=20.0, threads=2.0, processes=1.0) for at in range(40)
]


def test_a_line_rises_by_its_slope_over_all_of_it() -> None:
    assert rise([1.0, 2.0, 3.0, 4.0]) == pytest.approx(3.0)
    assert rise([5.0, 5.0, 5.0]) == 0.0
    assert rise([4.0, 2.0]) == pytest.approx(-2.0)


def test_what_stays_is_flat(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(FLAT)
    assert len(capsys.readouterr().out.splitlines()) == len(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_rises_is_found(name: str) -> None:
    step = 3 * ALLOWED[name] / len(FLAT)
    assert not report([replace(each, **{name: getattr(each, name) + step * at}) for at, each in enumerate(FLAT)])


def test_too_few_looks_prove_nothing() -> None:
    assert not report(FLAT[: LEAST_LOOKS // 2])


def test_a_curve_is_drawn_from_the_least_to_the_largest() -> None:
    assert curve([0.0, 7.0, 3.5]) == "▁█▄"
    assert curve([2.0, 2.0]) == "▁▁"


@pytest.mark.long
def test_a_short_soak_is_flat() -> None:
    """In a process of its own, whose memory is nobody else's."""
    command = [sys.executable, "-m", "benchmarks.soak", "--batches", "60000", "--resize-every", "80"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60,000 tiny batches" in done.stdout
    assert "0 deaths" in done.stdout
