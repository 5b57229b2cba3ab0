"""The lane of this machine with real worker processes, driven with tickets, without a loader."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from families import until
from torch.utils.data import default_collate

from dpex import DpexDataLoader, WorkerDiedError
from dpex.core.schedule import Ticket
from dpex.pools.base import Event, Gone, Made, Note
from dpex.pools.local.pool import LocalLane
from dpex.pools.local.worker_process import receive
from dpex.worker.core import Failure, WorkerSetup

pytestmark = pytest.mark.timeout(60)
DEADLINE_S = 30.0
LARGE = 4096
"""Numbers in a sample: too many to travel in the message itself, so that a batch takes a slot."""
Kind = TypeVar("Kind", bound=Event)


class Rows:
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LARGE,), float(index))


class Hangs:
    def __getitem__(self, index: int) -> torch.Tensor:
        while True:
            signal.pause()


class Driver:
    """Stands in for the engine: sends tickets, and takes down what happens."""

    def __init__(self, workers: int, *, shared_queue: bool, dataset: Any = None, **setup_fields: Any) -> None:
        setup = WorkerSetup(
            dataset=dataset or Rows(),
            collate_fn=default_collate,
            iterable=False,
            auto_collation=True,
            drop_last=False,
            num_workers=workers,
            base_seed=11,
            per_batch_seed=shared_queue,
            **{"worker_init_fn": None, **setup_fields},
        )
        context = multiprocessing.get_context("fork")
        self.lane = LocalLane(setup, context, shared_queue=shared_queue, first_hosts=workers)
        self.lane.new_epoch(0)
        self.events: list[Event] = []

    def listen(self) -> None:
        heard = self.lane.poll()
        self.events += heard
        heard.clear()

    def listen_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            select.select(self.lane.descriptors(), [], [], 0.05)
            self.listen()

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def send(self, *numbers: int, epoch: int = 0, worker: int | None = None) -> None:
        """One message for each ticket."""
        for number in numbers:
            assert self.lane.send([Ticket(number, [number], 0)], epoch, worker)

    def wait_until_made(self, tickets: int) -> None:
        """So many results, of whatever epoch, were taken in."""
        self.listen_until(lambda: self.lane.times.tickets >= tickets)

    def lent(self) -> int:
        """Slots that the trainer's side holds."""
        segments = [segment for host in self.lane._hosts.values() for segment in host.segments.values()]
        return sum(sum(segment.flags[1::2]) for segment in segments)

    def pids(self) -> list[int]:
        return [host.process.handle.pid or 0 for host in self.lane._hosts.values()]


@contextmanager
def driven(workers: int, *, shared_queue: bool = True, **options: Any) -> Iterator[Driver]:
    driver = Driver(workers, shared_queue=shared_queue, **options)
    try:
        driver.listen_until(lambda: driver.lane.counts.running == workers)
        if not shared_queue:
            for worker in driver.lane.hosts():
                driver.lane.adopt(worker, worker, None)
        yield driver
    finally:
        driver.lane.close(5.0)


def test_batches_arrive_in_slots_that_are_lent_until_they_are_dropped() -> None:
    with driven(2) as driver:
        driver.send(*range(6))
        driver.listen_until(lambda: len(driver.of(Made)) == 6)
        assert driver.lent() == 6
        batches = {made.number: made.value() for made in driver.of(Made)}
        assert all(torch.equal(batch, torch.full((1, LARGE), float(n))) for n, batch in batches.items())
        batches.clear()
        assert driver.lent() == 0


@pytest.mark.parametrize("shared_queue", [True, False])
def test_results_of_an_earlier_epoch_are_not_told_of_and_give_their_slots_back(shared_queue: bool) -> None:
    """They arrive after the next epoch has begun, undecoded: nobody else would let go of them."""
    with driven(1, shared_queue=shared_queue) as driver:
        (worker,) = driver.lane.hosts()
        to = None if shared_queue else worker
        driver.send(0, 1, 2, worker=to)
        until(lambda: unread(driver) and idle(driver))
        driver.lane.new_epoch(1)
        driver.wait_until_made(3)
        assert driver.of(Made) == []
        assert driver.lent() == 0
        driver.send(0, epoch=1, worker=to)
        driver.listen_until(lambda: driver.of(Made))
        assert [(made.epoch, made.number) for made in driver.of(Made)] == [(1, 0)]


def unread(driver: Driver) -> bool:
    """Whether results lie in a socket."""
    return any(select.select([host.socket], [], [], 0)[0] for host in driver.lane._hosts.values())


def idle(driver: Driver) -> bool:
    """Whether every worker waits for its next message, and none is left for it to take."""
    queue = driver.lane._queue
    asleep = all(state_of(pid) == "S" for pid in driver.pids())
    rows = all(driver.lane._board.is_idle(host.row) for host in driver.lane._hosts.values())
    return asleep and rows and (queue is None or queue.is_empty())


def state_of(pid: int) -> str:
    """As in ``/proc``: R runs, S sleeps, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")


def test_what_a_worker_took_and_did_not_write_down_before_it_died_is_found_by_counting_again() -> None:
    """Between taking a message from the shared socket and writing its number on the board a worker can be killed."""
    with driven(2) as driver:
        lane, (first, second) = driver.lane, driver.pids()
        stop(first)
        stop(second)
        driver.send(7, 8)
        queue = lane._queue
        assert queue is not None
        assert receive(queue._theirs, queue._buffer) is not None  # in the place of the worker that is about to die
        os.kill(first, signal.SIGKILL)
        driver.listen_until(lambda: [gone for gone in driver.of(Gone) if not gone.expected])
        assert [gone.lost for gone in driver.of(Gone)] == [()], "the board knew of none"
        os.kill(second, signal.SIGCONT)
        driver.listen_until(lambda: len(driver.of(Gone)) == 2)
        found = driver.of(Gone)[1]
        assert (found.lost, found.guilty, found.expected) == ((7,), None, True)
        assert {made.number for made in driver.of(Made)} == {8}
        assert not queue.groups
        driver.listen_until(lambda: lane.counts.running == 2)


def test_a_dead_worker_held_tickets_of_this_epoch_alone() -> None:
    with driven(1, shared_queue=False) as driver:
        (worker,), (pid,) = driver.lane.hosts(), driver.pids()
        stop(pid)
        driver.send(0, 1, 2, worker=worker)
        driver.lane.new_epoch(1)
        driver.send(0, 1, epoch=1, worker=worker)
        os.kill(pid, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(Gone))
        (gone,) = driver.of(Gone)
        assert (gone.lost, gone.expected) == ((0, 1), False)


@pytest.mark.parametrize("whose", ["the worker", "the template"])
def test_a_ticket_is_held_guilty_of_its_worker_s_death_but_not_of_the_template_s(whose: str) -> None:
    with driven(1, dataset=Hangs()) as driver:
        lane, (worker,) = driver.lane, driver.lane._hosts.values()
        driver.send(5)
        until(lambda: lane._board.read(worker.row)[1] == 5)
        os.kill(driver.pids()[0] if whose == "the worker" else lane._template._process.pid, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(Gone))
        (gone,) = driver.of(Gone)
        assert (gone.lost, gone.guilty) == ((5,), 5 if whose == "the worker" else None)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """While this file is there, no process that was forked from this one can fork: as where a pids limit is reached."""
    closed, fork, mine = tmp_path / "closed", os.fork, os.getpid()

    def limited() -> int:
        if os.getpid() != mine and closed.exists():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    return closed


@pytest.mark.parametrize("shared_queue", [True, False])
def test_a_worker_that_cannot_be_started_costs_those_that_run_nothing(gate: Path, shared_queue: bool) -> None:
    with driven(1, shared_queue=shared_queue) as driver:
        lane, (pid,) = driver.lane, driver.pids()
        before = descriptors(lane._template._process.pid)
        gate.touch()
        lane.resize(4)
        driver.listen_until(lambda: len(driver.of(Gone)) == 3)
        assert [(gone.lost, gone.guilty, gone.expected) for gone in driver.of(Gone)] == [((), None, True)] * 3
        assert (lane.counts.most, lane.counts.running, lane.counts.requested) == (1, 1, 1)
        assert "Resource temporarily unavailable" in lane.counts.why_most
        (note,) = driver.of(Note)
        assert "4 local workers are wanted" in note.text
        assert descriptors(lane._template._process.pid) == before
        driver.send(0, worker=None if shared_queue else lane.hosts()[0])
        driver.wait_until_made(1)
        assert driver.pids() == [pid]
        gate.unlink()
        lane.resize(4)
        driver.listen_until(lambda: lane.counts.running == 4)
        assert lane.counts.most is None


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_template_without_a_descriptor_left_refuses_and_goes_on() -> None:
    with driven(1) as driver:
        lane = driver.lane
        template = lane._template._process.pid
        soft, hard = resource.prlimit(template, resource.RLIMIT_NOFILE)
        resource.prlimit(template, resource.RLIMIT_NOFILE, (3, hard))
        lane.resize(2)
        driver.listen_until(lambda: driver.of(Gone))
        assert lane.counts.most == 1
        resource.prlimit(template, resource.RLIMIT_NOFILE, (soft, hard))
        lane.resize(2)
        driver.listen_until(lambda: lane.counts.running == 2)


@pytest.mark.filterwarnings("ignore:2 local workers are wanted:RuntimeWarning")
def test_without_a_single_worker_the_training_process_makes_the_batches_or_says_why_it_cannot(gate: Path) -> None:
    gate.touch()
    made = DpexDataLoader(Rows32(), batch_size=4, num_workers=2, seeding="batch")
    assert torch.equal(torch.cat(list(made)), torch.arange(32))
    assert made.stats().lanes["inline"].tickets == 8
    with pytest.raises(WorkerDiedError, match=r"no local worker can be started: .*Resource temporarily"):
        list(DpexDataLoader(Rows32(), batch_size=4, num_workers=2))


class Rows32:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return index


class Ids(Rows32):
    """Sample: the number of the worker that made it."""

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        return -1 if info is None else info.id


def needs_a_cpu_of_its_own(worker: int) -> None:
    [0, 1][worker]


def test_a_worker_that_takes_another_s_place_has_its_number() -> None:
    with driven(2, dataset=Ids()) as driver:
        first = driver.pids()[0]
        os.kill(first, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(Gone) and driver.lane.counts.running == 2)
        driver.send(*range(20))
        driver.listen_until(lambda: len(driver.of(Made)) == 20)
        assert {int(made.value()) for made in driver.of(Made)} <= {0, 1}


@pytest.mark.parametrize(("asked_for", "most"), [(2, 2), (None, 5)])
def test_workers_that_nobody_asked_for_are_done_without_where_the_init_function_fails_for_them(
    asked_for: int | None, most: int
) -> None:
    """A list of CPUs, say, is as long as the number of workers in the script. Asked for, a worker's error is the answer
    to its tickets."""
    with driven(2, dataset=Ids(), worker_init_fn=needs_a_cpu_of_its_own, own_workers=asked_for) as driver:
        driver.lane.resize(5)
        driver.listen_until(lambda: len(driver.of(Gone)) == 5 - most and driver.lane.counts.running == most)
        notes = [note.text for note in driver.of(Note)]
        assert len(notes) == (most < 5)
        assert all("5 local workers are wanted" in note and "failed: IndexError" in note for note in notes)
        driver.send(*range(40))
        driver.listen_until(lambda: len(driver.of(Made)) == 40)
        failed = [made for made in driver.of(Made) if isinstance(made.value(), Failure)]
        assert most == 5 or not failed
