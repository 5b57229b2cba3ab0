"""A stubbed training run: real pynvml over the stub of the driver's library, a stand-in for the stream, a real loader.

The loop does nothing but wait for batches that take 30 ms each. Where the GPU is busy all the same nothing is lost, and
where it starves all is.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from nvmlstub import built_in

from tests.telemetry.test_gpu_export import PRETEND, forker_with, run

LOOP = """
from dpex import AutotuneConfig
from dpex.autotune.law import Law

class Data:
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        wait_as_work(0.03)
        return index

class Mark:
    at = 0.0

class BusyStream(Stream):
    \"\"\"Always has work: it comes to the mark of an entry only when the return is marked too.\"\"\"
    @staticmethod
    def record(like=None):
        mark = Mark()
        mark.at = time.perf_counter()
        if like is not None:
            like.at = mark.at
        return mark
    apart_s = staticmethod(lambda first, second: second.at - first.at)

class NoStream(Stream):
    is_open = staticmethod(lambda: False)

windows = []
step = Law.step

def watched(self, sample):
    decision = step(self, sample)
    windows.append((sample, decision))
    return decision

Law.step = watched
used[0] = first

def train(stream, busy, enough):
    windows.clear()
    say(0, "busy", busy)
    dpex.engine.with_workers.cuda_stall = lambda share: GpuStall(stream, share)
    deadline = time.monotonic() + 60
    with DpexDataLoader(Data(), num_workers="auto", autotune=AutotuneConfig(max_local=8)) as loader:
        for batch in loader:
            if enough(windows):
                break
            assert time.monotonic() < deadline, windows[-3:]
        waited_s = sum(sample.wait_s + sample.own_s for sample, _ in windows)
        return (
            [(d.new.workers - d.old.workers, d.signal, d.text) for d in loader.decisions],
            waited_s / sum(sample.seconds for sample, _ in windows),
        )

def seen_for_long(windows):
    return sum(sample.seconds for sample, _ in windows) > 4

def has_grown(windows):
    return any(d is not None and d.new.workers > d.old.workers for _, d in windows)
"""


RUNS = """
answer = {
    "busy, events": train(BusyStream(), 98, seen_for_long),
    "busy, nvml": train(NoStream(), 98, seen_for_long),
    "starved, events": train(Stream(), 4, has_grown),
    "starved, nvml": train(NoStream(), 4, has_grown),
}
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By run: changes of the number of workers with their signal and text; the share of the loop's waiting."""
    folder = tmp_path_factory.mktemp("gpu")
    with closing(forker_with(str(built_in(folder)), folder)) as forker:
        return run(RUNS, forker, PRETEND + LOOP)


@pytest.mark.parametrize("signal", ["events", "nvml"])
def test_a_loop_that_waits_under_a_busy_gpu_gets_no_more_workers(answers: Any, signal: str) -> None:
    decisions, waited = answers[f"busy, {signal}"]
    assert waited > 0.5
    assert [change for change, _, _ in decisions if change > 0] == []
    assert {said for _, said, _ in decisions} <= {signal}
    assert all("GPU" in text for _, _, text in decisions)


@pytest.mark.parametrize(("signal", "clock"), [("events", "CUDA events"), ("nvml", "NVML")])
def test_a_loop_whose_gpu_starves_gets_more(answers: Any, signal: str, clock: str) -> None:
    decisions, waited = answers[f"starved, {signal}"]
    assert waited > 0.5
    change, said, text = decisions[-1]
    assert change > 0
    assert said == signal
    assert "the GPU" in text
    assert clock in text
