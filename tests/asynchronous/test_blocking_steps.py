"""Asynchronous datasets: code that blocks the event loop is found by its place, and computing is not taken for it."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dpex import DpexDataLoader
from dpex.measure.batch_times import BatchTimes
from dpex.worker import blocking_steps
from dpex.worker.blocking_steps import BlockingSteps
from tests.asynchronous.works import Indices, turn


class Machine:
    """A clock, and the system's counts of a thread."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.switches = 0

    def usage(self) -> Any:
        return SimpleNamespace(ru_utime=self.cpu_s, ru_stime=0.0, ru_nvcsw=self.switches)

    def block(self) -> None:
        self.now_s += 0.005
        self.switches += 1

    def compute(self) -> None:
        self.now_s += 0.005
        self.cpu_s += 0.005


async def sample(machine: Machine) -> None:
    machine.compute()
    await turn()
    machine.block()
    await turn()
    await turn()
    machine.block()


def found(machine: Machine, steps: BlockingSteps, load_s: float) -> dict[str, tuple[Any, ...]]:
    """Return the rows of a batch of one sample, by name."""
    coroutine = sample(machine)
    for _ in range(4):
        steps.begin(coroutine)
        try:
            coroutine.send(None)
        except StopIteration:
            pass
        finally:
            steps.end(coroutine)
    rows = steps.rows(Indices(), BatchTimes(samples=1, load_s=load_s), draws=False)
    return {row[0]: row[1:] for row in rows}


def test_steps_that_wait_without_an_await_are_named() -> None:
    machine = Machine()
    steps = BlockingSteps(clock=lambda: machine.now_s, usage=machine.usage)
    line = sample.__code__.co_firstlineno
    first, second = (
        f"sample between its awaits in lines {line + 2} and {line + 4}",
        f"sample after its await in line {line + 5}",
    )
    assert set(found(machine, steps, 0.02)) == {"Indices", f"Indices > {first}", f"Indices > {second}", "collate"}
    rows = found(machine, steps, 0.02)
    assert rows[f"Indices > {first}"][:3] == (1, pytest.approx(0.005), 0.0)
    assert rows["Indices"][:2] == (1, pytest.approx(0.01))
    assert sum(row[1] for row in rows.values()) == pytest.approx(0.02)


def test_seconds_of_a_batch_that_ends_later_are_taken_from_it() -> None:
    machine = Machine()
    steps = BlockingSteps(clock=lambda: machine.now_s, usage=machine.usage)
    found(machine, steps, 0.1)
    assert found(machine, steps, 0.001)["Indices"][1] == 0.0
    assert found(machine, steps, 0.1)["Indices"][1] == pytest.approx(0.101 - 0.02)


def test_a_sample_that_only_computes_has_no_row() -> None:
    machine = Machine()
    machine.block = machine.compute  # type: ignore[method-assign]
    steps = BlockingSteps(clock=lambda: machine.now_s, usage=machine.usage)
    assert [found(machine, steps, 0.1) for _ in range(3)] == [{}] * 3


class Blocks(Indices):
    """Each sample waits for a thread, without an await. All steps of its worker are taken as long ones."""

    async def __getitem__(self, index: int) -> Any:
        blocking_steps.LONG_S = 0.0
        await turn()
        ends = os.pipe()
        threading.Thread(target=os.write, args=(ends[1], b"x")).start()
        os.read(ends[0], 1)
        for end in ends:
            os.close(end)
        return index


def test_a_worker_reports_the_code_that_blocks_its_loop() -> None:
    with DpexDataLoader(Blocks(64), batch_size=8, num_workers=1, collate_fn=list) as loader:
        assert len(list(loader)) == 8
        facts = loader.diagnose().facts
    line = Blocks.__getitem__.__code__.co_firstlineno + 2
    (step,) = [one for one in facts.transforms if one.short == f"Blocks.__getitem__ after its await in line {line}"]
    assert facts.is_asynchronous
    assert step.calls > 8
