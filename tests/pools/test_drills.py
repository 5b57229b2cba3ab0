"""Faults that no other module has."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from families import Of
from waiting import until
from workload import wait_as_work

from benchmarks.drills.trainer import Work
from benchmarks.drills.watched import AFTER, Watched
from dpex import DpexDataLoader
from dpex.schedule.sample_policy import SamplePolicy

ROOT = Path(__file__).parents[2]
WALL_CLOCK = {"telemetry/loader_metrics.py", "autotune/runtime/trace.py"}
"""Where the time of day is told to people and to Prometheus."""
ASKS_THE_TIME = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow|today)\b|from time import .*\btime\b")
COUNT = 300
TIMEOUT_S = 0.5
STILL_S = 3 * TIMEOUT_S


def test_nothing_that_waits_goes_by_the_wall_clock() -> None:
    found = {
        path.relative_to(ROOT / "dpex").as_posix()
        for path in (ROOT / "dpex").rglob("*.py")
        if ASKS_THE_TIME.search(path.read_text())
    }
    assert found == WALL_CLOCK


def greedy_at(index: int) -> torch.Tensor:
    """One sample asks for more memory than there can be."""
    return torch.empty(1 << 60 if index == 3 else 1, dtype=torch.uint8).fill_(index)


def test_a_sample_that_finds_no_memory_is_the_error_of_its_batch() -> None:
    with DpexDataLoader(Of(greedy_at, 8), batch_size=2, num_workers=1) as loader:
        batches = iter(loader)
        got = [next(batches).flatten().tolist()]
        with pytest.raises(RuntimeError):
            next(batches)
        got += [batch.flatten().tolist() for batch in batches]
        assert loader.stats().deaths == 0
    assert got == [[0, 1], [4, 5], [6, 7]]


TRAINER = """
import sys, torch
from torch.utils.data import TensorDataset
from dpex import DpexDataLoader

with DpexDataLoader(TensorDataset(torch.arange({count})), num_workers=2, seeding="batch", prefetch_factor=4) as loader:
    for (numbers,) in loader:
        print(int(numbers), flush=True)
    print(loader.stats().deaths, flush=True)
"""


def test_a_trainer_that_was_stopped_goes_on_with_all_batches() -> None:
    """It stands still until its workers have nothing more to do."""
    command = [sys.executable, "-c", TRAINER.format(count=COUNT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        assert trainer.stdout is not None
        try:
            got = [trainer.stdout.readline() for _ in range(10)]
            os.kill(trainer.pid, signal.SIGSTOP)
            family = psutil.Process(trainer.pid)
            until(lambda: family.status() == psutil.STATUS_STOPPED)
            until(lambda: all(each.status() == psutil.STATUS_SLEEPING for each in family.children(recursive=True)))
            os.kill(trainer.pid, signal.SIGCONT)
            got += list(trainer.stdout)
        finally:
            trainer.kill()
    assert [int(line) for line in got] == [*range(COUNT), 0]


@pytest.mark.long
def test_a_suspended_training_and_its_workers_continue_unchanged() -> None:
    """As when a laptop sleeps, but that all clocks go on meanwhile, which no sample and no decision may suffer from."""
    with Watched(Work(workers=0, options={"sample_policy": SamplePolicy(timeout_s=TIMEOUT_S)})) as training:
        training.until(lambda: training.running == 2)
        training.take(AFTER)
        trainer = psutil.Process(training.process.pid)
        family = [trainer, *trainer.children(recursive=True)]
        for each in family:
            each.suspend()
        until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in family))
        wait_as_work(STILL_S)
        assert training.hear()
        before = len(training.batches)
        for each in family[::-1]:
            each.resume()
        training.take(5 * AFTER)
        assert training.finish() == 0, training.errors()
    assert {told.running["local"] for told in training.batches[before:]} == {2}, training.end["decisions"]
    assert training.longest_wait_s(training.batches[before - 1].at) > STILL_S
    assert (training.lost, training.repeated, training.deaths, training.warnings) == (0, 0, 0, [])
    assert training.end["failed_samples"] == 0
