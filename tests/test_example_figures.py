"""What the demo says at its end: what was measured, and what that is worth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def figures() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import figures
    finally:
        sys.path.remove(str(EXAMPLES))
    return figures


def said(figures: Any, torchs: float, tuned: float, *, others: float | None = 0.0, found: int = 4) -> str:
    from show import Stretch

    fixed = Stretch(batches=round(10 * torchs), seconds=10.0, wait_s=4.0)
    auto = Stretch(batches=round(10 * tuned), seconds=10.0, wait_s=0.5)
    return str(figures.conclusion(fixed, 2, auto, found, others, 2))


@pytest.mark.parametrize(
    ("torchs", "tuned", "compared"),
    [
        (4.1, 2.8, "32% fewer batches."),
        (4.1, 3.8, "7% fewer batches."),
        (4.0, 4.1, "the same rate, as exactly as this shows it."),
        (4.0, 3.9, "the same rate, as exactly as this shows it."),
        (4.7, 5.7, "21% more batches."),
        (4.0, 12.0, "3.0 times as many batches."),
        (4.0, 0.0, "too little to compare."),
    ],
)
def test_it_says_what_was_measured_and_no_more(figures: Any, torchs: float, tuned: float, compared: str) -> None:
    torch_made = (
        f"PyTorch's loader with 2 workers made {torchs:.1f} batches/s, and the loop waited for 40% of the time."
    )
    auto_made = (
        f'"auto" made {tuned:.1f} in its last 10 seconds, with 4 workers, and the loop waited for 5%: {compared}'
    )
    assert said(figures, torchs, tuned) == f"{torch_made} {auto_made}"


@pytest.mark.parametrize(("others", "is_busy"), [(None, False), (0.0, False), (0.19, False), (0.2, True), (1.6, True)])
def test_on_a_busy_machine_the_figures_are_said_to_mean_little(
    figures: Any, others: float | None, is_busy: bool
) -> None:
    told = said(figures, 4.1, 3.8, others=others)
    assert told.endswith("Run it again when the machine is quiet.") == is_busy
    assert (f"Other programs kept up to {others} of the 2 CPUs busy meanwhile" in told) == is_busy
    assert (figures.warning(others, 2) != "") == is_busy


def test_one_worker_is_one(figures: Any) -> None:
    assert "with 1 worker, and" in said(figures, 4.0, 4.0, found=1)


def test_what_others_do_is_all_but_what_this_process_and_those_below_it_do(figures: Any) -> None:
    before, after = figures.Look(10.0, 100.0, 5.0), figures.Look(20.0, 118.0, 8.0)
    assert figures.others_cpus(before, after) == pytest.approx(1.5)
    assert figures.others_cpus(before, figures.Look(20.0, 102.0, 8.0)) == 0.0, "clocks count in ticks"
    assert figures.others_cpus(None, after) is figures.others_cpus(before, None) is None
    assert figures.others_cpus(before, before) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_work_of_a_child_is_own_work(figures: Any) -> None:
    before = figures.look()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    after = figures.look()
    assert after.own_s - before.own_s >= 0.4
    assert after.busy_s - before.busy_s >= 0.4
