"""Several trainings on one Ray cluster, each a process: they have equal shares, and one that dies leaves all."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from shared_ray import started
from waiting import until

from benchmarks.drills.training import LOOKS, Training

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(400)]

ROOM = 6
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head for the trainings, which has no place for workers, and a node that has."""
    cluster = started(nodes=[{"num_cpus": ROOM}])
    yield cluster.address
    cluster.shutdown()


def wait_of(training: Training) -> float:
    """The share of the time that the loop waited, over the latest lines."""
    return sum(line["wait"] for line in training.lines[-LOOKS:]) / LOOKS


def while_they_train(enough: Callable[[], bool], *trainings: Training) -> float:
    """Seconds until then; AssertionError when one of them ends or patience does."""

    def is_so() -> bool:
        for training in trainings:
            assert training.process.poll() is None, training.errors
        return enough()

    began = time.monotonic()
    until(is_so, PATIENCE_S, pause_s=0.05, told=lambda: [training.lines[-20:] for training in trainings])
    return time.monotonic() - began


def are_shown_equal(address: str, *trainings: Training) -> bool:
    """Whether `dpex cluster` says so from outside: as many workers wanted, granted and running of each."""
    command = [sys.executable, "-m", "dpex", "cluster", "--once", "--address", address]
    wide = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, env=wide, check=True).stdout
    rows = [line.split() for t in trainings for line in shown.splitlines() if f":{t.process.pid} " in line]
    if len(rows) < len(trainings):
        return False  # the latest report of one was late, and it counts as gone until the next
    assert all(row[1:3] == ["training.py", "#1"] for row in rows), shown
    return all(row[3:6] == ["3"] * 3 for row in rows)


def test_two_trainings_have_equal_shares_and_one_alone_has_all(address: str) -> None:
    first = Training(address, 0.05)
    try:
        while_they_train(lambda: first.workers == {ROOM}, first)
        second = Training(address, 0.05)
        try:
            while_they_train(lambda: len(second.lines) > 0, first, second)
            took_s = while_they_train(lambda: first.workers == second.workers == {ROOM // 2}, first, second)
            print(f"equal shares {took_s:.1f} s after the second one's first batch")
            while_they_train(lambda: wait_of(first) == pytest.approx(wait_of(second), abs=0.1), first, second)
            while_they_train(lambda: are_shown_equal(address, first, second), first, second)
        finally:
            second.kill()
        took_s = while_they_train(lambda: first.workers == {ROOM}, first)
        print(f"the other one has everything {took_s:.1f} s after that died")
    finally:
        first.kill()


def test_a_loader_of_twice_the_weight_gets_twice_the_workers(address: str) -> None:
    heavy, light = Training(address, 0.05, weight=2.0), Training(address, 0.05)
    try:
        while_they_train(lambda: heavy.workers == {4} and light.workers == {2}, heavy, light)
    finally:
        heavy.kill()
        light.kill()
