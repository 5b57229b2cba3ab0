"""The examples of the 2021 Dpex and `auto.py` run as people run them, with this machine's workers and small limits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parent.parent / "examples"


ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run(name: str, *arguments: str) -> tuple[str, str]:
    """What the example printed, and what it printed to stderr; it must end with 0."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_single_device() -> None:
    out, _ = run("single_device.py", "--local", "--num-workers", "2", "--epochs", "2", "--limit", "3")
    assert re.findall(r"epoch (\d): (\d+) images, loss [\d.]+, accuracy [\d.]+%", out) == [("1", "300"), ("2", "300")]


def test_data_parallel() -> None:
    out, err = run("data_parallel.py", "--local", "--num-workers", "2", "--epochs", "2")
    lines = [f"epoch {epoch}: input (30, 5), output (30, 2)" for epoch in (1, 2)]
    assert (out.splitlines(), err) == (lines, "")


def test_ddp_shows_every_row_once_and_another_order_each_epoch() -> None:
    out, _ = run("ddp.py", "--local", "--num-workers", "2", "--epochs", "2", "--rows", "600", "--ranks", "2")
    said = re.findall(r"epoch (\d): each of 600 rows seen once; rank 0 began with rows \[([\d, ]+)\]", out)
    assert [epoch for epoch, _ in said] == ["1", "2"]
    assert said[0][1] != said[1][1]


def test_ddp_with_a_limit_stops_half_way_in_every_rank() -> None:
    out, _ = run("ddp.py", "--local", "--num-workers", "1", "--rows", "200", "--limit", "20")
    assert "seen: 160 rows 0 times, 40 rows 1 times" in out


def test_an_error_in_the_dataset_reaches_the_loop() -> None:
    out, _ = run("dataset_error.py", "--local", "--num-workers", "2")
    assert "the loop caught a ZeroDivisionError" in out
    assert "Caught ZeroDivisionError in DataLoader worker process 0." in out
    assert "return torch.tensor(index / 0)" in out


def test_deleting_loaders_half_way_leaves_nothing() -> None:
    out, _ = run("delete_loader.py", "--local", "--num-workers", "3", "--limit", "2")
    assert re.search(r"taken: 2 batches to train, 1 to test; held: .*process: [1-9]", out)
    assert re.search(r"the test loader goes on: [1-9]\d* more batches", out)
    assert "test loader deleted; left: nothing" in out


def test_auto_shows_what_it_decides_and_why() -> None:
    out, _ = run("auto.py", "--seconds", "16")
    told = " ".join(out.split())
    assert re.search(r"decision 1: From \d local, depth \d+ to \d+ local, depth \d+, as [1-9]\d? % of the time", told)
    assert re.search(r"[█·]{20} stall +\d+%, +[\d.]+/s, \d+ workers", out)
    rows = re.findall(r"^ +(fixed, 2|auto) +(\d+) ms +(\d+) ms +[\d.]+ +\d+% +\d+% +\d+ *$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["fixed, 2"] * 2 + ["auto"] * 3
    assert [row[1:] for row in rows[:2]] == [row[1:] for row in rows[2:4]]


def test_auto_stopped_by_ctrl_c_says_what_it_saw() -> None:
    started = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "auto.py"), "--seconds", "60"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert any("workers" in line for line in started.stdout)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=30)
    assert started.returncode == 130
    assert re.search(r"stopped\n(.*\n)+ +fixed, 2 ", out)
    assert err == ""
