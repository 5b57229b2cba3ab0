"""The pool of this machine with real worker processes, driven with tickets, without a loader."""

import errno
import gc
import mmap
import multiprocessing
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from families import has_made_all, setup_of
from torch.utils.data import IterableDataset
from waiting import until

from dpex import DpexDataLoader, WorkerDiedError
from dpex.pools.local import worker_process
from dpex.pools.local.clean_server import starter_for
from dpex.pools.local.fork_server import ForkStarter, TemplateHandle
from dpex.pools.local.forking import ProcessHandle
from dpex.pools.local.handles import BOARD_ROWS, LocalWorkerHandle
from dpex.pools.local.pool import LocalPool
from dpex.pools.local.worker_process import WorkerPlan, receive
from dpex.schedule.events import Notice, Snapshot, TicketMade, WorkerGone
from dpex.schedule.events import PoolEvent as Event
from dpex.schedule.schedule import Ticket
from dpex.worker.fetch import Failure
from dpex.worker.states import DatasetState, LogicalState, pack_state, unpack_state

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


class Gated:
    """Gives samples once the folder has a file ``open``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        until((self.folder / "open").exists)
        return index


class Driver:
    """Stands in for the engine: sends tickets, and takes down what happens."""

    def __init__(self, workers: int, *, shared_queue: bool, dataset: Any = None, **setup_fields: Any) -> None:
        setup = setup_of(dataset or Rows(), num_workers=workers, per_batch_seed=shared_queue, **setup_fields)
        context = multiprocessing.get_context("fork")
        self.pool = LocalPool(
            starter_for(context, WorkerPlan(setup, shared_queue)), shared_queue=shared_queue, first_workers=workers
        )
        self.pool.new_epoch(0)
        self.events: list[Event] = []

    def listen(self) -> None:
        heard = self.pool.poll()
        self.events += heard
        heard.clear()

    def listen_until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            select.select(self.pool.descriptors(), [], [], 0.05)
            self.listen()

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def send(self, *numbers: int, epoch: int = 0, worker: int | None = None) -> None:
        """One message for each ticket."""
        for number in numbers:
            assert self.pool.send([Ticket(number, [number], 0)], epoch, worker)

    def wait_until_made(self, tickets: int) -> None:
        """So many results, of whatever epoch, were taken in."""
        self.listen_until(lambda: self.pool.times.reading().tickets >= tickets)

    def lent(self) -> int:
        """Slots that the trainer's side holds."""
        segments = [segment for worker in self.pool._workers.values() for segment in worker.segments.values()]
        return sum(sum(segment.flags[1::2]) for segment in segments)

    def pids(self) -> list[int]:
        return [worker.process.pid or 0 for worker in self.pool._workers.values()]


@contextmanager
def driven(workers: int, *, shared_queue: bool = True, **options: Any) -> Iterator[Driver]:
    driver = Driver(workers, shared_queue=shared_queue, **options)
    try:
        driver.listen_until(lambda: driver.pool.counts.running == workers)
        if not shared_queue:
            for worker in driver.pool.workers():
                driver.pool.adopt(worker, worker, None)
        yield driver
    finally:
        driver.pool.close(5.0)


def test_batches_hold_their_slots_until_they_are_dropped() -> None:
    with driven(2) as driver:
        driver.send(*range(6))
        driver.listen_until(lambda: len(driver.of(TicketMade)) == 6)
        assert driver.lent() == 6
        batches = {made.number: made.value() for made in driver.of(TicketMade)}
        assert all(torch.equal(batch, torch.full((1, LARGE), float(n))) for n, batch in batches.items())
        batches.clear()
        assert driver.lent() == 0


def test_a_death_in_an_old_epochs_ticket_spares_its_new_namesake() -> None:
    with driven(1, shared_queue=False, dataset=Hangs()) as driver:
        (worker,) = driver.pool.workers()
        driver.send(0, worker=worker)
        until(lambda: not has_made_all(driver.pool))
        driver.pool.new_epoch(1)
        driver.send(0, epoch=1, worker=worker)
        os.kill(driver.pids()[0], signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert (gone.epoch, gone.lost, gone.working_on) == (1, (0,), None)


@pytest.mark.parametrize("shared_queue", [True, False])
def test_an_old_epochs_results_are_dropped_and_free_their_slots(shared_queue: bool) -> None:
    """They arrive after the next epoch has begun, undecoded: nobody else would let go of them."""
    with driven(1, shared_queue=shared_queue) as driver:
        (worker,) = driver.pool.workers()
        to = None if shared_queue else worker
        driver.send(0, 1, 2, worker=to)
        until(lambda: unread(driver) and idle(driver))
        driver.pool.new_epoch(1)
        driver.wait_until_made(3)
        assert driver.of(TicketMade) == []
        assert driver.lent() == 0
        driver.send(0, epoch=1, worker=to)
        driver.listen_until(lambda: driver.of(TicketMade))
        assert [(made.epoch, made.number) for made in driver.of(TicketMade)] == [(1, 0)]


def test_a_worker_waits_while_too_many_descriptors_are_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts those that lie unread in sockets, for each user: other trainings may be late."""
    gate, trainer, send_fds = tmp_path / "read", os.getpid(), socket.send_fds

    def refused(sock: socket.socket, buffers: Any, fds: Any, *more: Any) -> int:
        if os.getpid() != trainer and not gate.exists():
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send_fds(sock, buffers, fds, *more)

    monkeypatch.setattr(socket, "send_fds", refused)
    monkeypatch.setattr(worker_process, "_PATIENCE_S", 0.0)
    with driven(1) as driver:
        driver.send(0)
        driver.listen_until(lambda: driver.of(Notice))
        assert "ulimit -n" in driver.of(Notice)[0].text
        gate.touch()
        driver.listen_until(lambda: driver.of(TicketMade))
        assert torch.equal(driver.of(TicketMade)[0].value(), torch.zeros(1, LARGE))
        assert driver.of(WorkerGone) == []


class CannotBeDecoded:
    """A batch that no process can unpickle."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.memory = samples[0]

    def __setstate__(self, state: Any) -> None:
        raise ValueError("cannot be unpickled")


def test_an_old_epochs_undecodable_result_raises_no_error() -> None:
    with driven(1, collate_fn=CannotBeDecoded) as driver:
        driver.send(0, 1)
        until(lambda: unread(driver) and idle(driver))
        driver.pool.new_epoch(1)
        driver.wait_until_made(2)
        assert driver.lent() == 0


def unread(driver: Driver) -> bool:
    """Whether results lie in a socket."""
    return any(select.select([worker.socket], [], [], 0)[0] for worker in driver.pool._workers.values())


def idle(driver: Driver) -> bool:
    """Whether every worker waits for its next message, and none is left for it to take."""
    return has_made_all(driver.pool) and all(state_of(pid) == "S" for pid in driver.pids())


def state_of(pid: int) -> str:
    """As in ``/proc``: R runs, S sleeps, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state_of(pid) == "T")


def test_a_ticket_taken_but_unrecorded_at_a_death_is_lost(tmp_path: Path) -> None:
    """Between taking a message from the shared socket and writing its number on the board a worker can be killed.

    The other worker has work all the time, so nothing would show that loss later.
    """
    with driven(2, dataset=Gated(tmp_path)) as driver:
        pool, (first, second) = driver.pool, driver.pids()
        queue = pool._queue
        assert queue is not None
        stop(first)
        driver.send(6)
        until(lambda: any(pool._board.read(worker.row)[0] for worker in pool._workers.values()))
        stop(second)
        driver.send(7, 8)
        assert receive(queue._theirs, queue._buffer) is not None  # in the place of the worker that is about to die
        os.kill(first, signal.SIGKILL)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        died, found = driver.of(WorkerGone)
        assert (died.lost, died.expected) == ((), False), "the board knew of none"
        assert (found.lost, found.working_on, found.expected) == ((7, 8), None, True)
        assert list(queue.groups) == [1], "a living worker has that one"
        os.kill(second, signal.SIGCONT)
        (tmp_path / "open").touch()
        driver.listen_until(lambda: driver.of(TicketMade) and pool.counts.running == 2)
        assert [made.number for made in driver.of(TicketMade)] == [6]


def test_results_that_lie_unread_at_a_death_are_not_lost() -> None:
    """Their tickets are on no row of the board any more."""
    with driven(2) as driver:
        pool, (first, second) = driver.pool, driver.pids()
        stop(first)
        driver.send(0, 1, 2)
        until(lambda: unread(driver) and has_made_all(pool))
        stop(second)  # so that the death is read first: the source's descriptor is the oldest
        os.kill(first, signal.SIGKILL)
        until(lambda: pool._source.news())
        pool._take_source_news()
        driver.listen_until(lambda: driver.of(WorkerGone))
        assert [gone.lost for gone in driver.of(WorkerGone)] == [()]
        assert sorted(made.number for made in driver.of(TicketMade)) == [0, 1, 2]


def test_a_ticket_that_counts_as_lost_too_early_is_made_twice() -> None:
    """A living worker has taken it at the moment of another's death, and not written it down."""
    with driven(2) as driver:
        pool, (first, second) = driver.pool, driver.pids()
        queue = pool._queue
        assert queue is not None
        stop(first)
        stop(second)
        driver.send(5)
        message = receive(queue._theirs, queue._buffer)
        assert message is not None
        os.kill(first, signal.SIGKILL)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        assert driver.of(WorkerGone)[1].lost == (5,)
        queue.socket.send(message[0])  # which the worker goes on with
        driver.send(5)
        os.kill(second, signal.SIGCONT)
        driver.wait_until_made(2)
        assert [made.number for made in driver.of(TicketMade)] == [5, 5]
        assert not queue.groups


def test_a_dead_worker_held_tickets_of_this_epoch_alone() -> None:
    with driven(1, shared_queue=False) as driver:
        (worker,), (pid,) = driver.pool.workers(), driver.pids()
        stop(pid)
        driver.send(0, 1, 2, worker=worker)
        driver.pool.new_epoch(1)
        driver.send(0, 1, epoch=1, worker=worker)
        os.kill(pid, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert (gone.lost, gone.expected) == ((0, 1), False)


def test_results_sent_before_a_death_with_unread_tickets_count() -> None:
    """The kernel reports such an end ahead of the messages that lie in the socket."""
    with driven(1, shared_queue=False) as driver:
        (worker,), (pid,) = driver.pool.workers(), driver.pids()
        driver.send(0, worker=worker)
        until(lambda: unread(driver) and idle(driver))
        stop(pid)
        driver.send(1, worker=worker)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists())
        driver.listen_until(lambda: driver.of(WorkerGone))
        assert [made.number for made in driver.of(TicketMade)] == [0]
        assert driver.of(WorkerGone)[0].lost == (1,)


def test_a_dataset_error_is_reported_after_the_fork_server_ended() -> None:
    """A machine that is busy looks late. The requests for workers are unread then, as the template opens first."""

    def prepare() -> Any:
        raise ModuleNotFoundError("No module named 'rare_codec'")

    template = TemplateHandle(ForkStarter(prepare))
    template.start_process(0, [], ())
    template._process.join()
    assert list(template.news()) == [("unfit", "ModuleNotFoundError: No module named 'rare_codec'"), ("dead",)]
    template.join(1.0)


@pytest.mark.parametrize("whose", ["the worker", "the template"])
def test_a_ticket_is_a_suspect_in_worker_not_fork_server_deaths(whose: str) -> None:
    with driven(1, dataset=Hangs()) as driver:
        pool, (worker,) = driver.pool, driver.pool._workers.values()
        driver.send(5)
        until(lambda: pool._board.read(worker.row)[1] == 5)
        os.kill(driver.pids()[0] if whose == "the worker" else pool._source._process.pid, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert (gone.lost, gone.working_on) == ((5,), 5 if whose == "the worker" else None)


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
def test_a_failed_worker_start_does_not_affect_running_workers(gate: Path, shared_queue: bool) -> None:
    with driven(1, shared_queue=shared_queue) as driver:
        pool, (pid,) = driver.pool, driver.pids()
        gate.touch()
        pool.resize(4)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 3)
        assert [(gone.lost, gone.working_on, gone.expected) for gone in driver.of(WorkerGone)] == [((), None, True)] * 3
        assert (pool.counts.most, pool.counts.running, pool.counts.requested) == (1, 1, 1)
        assert "Resource temporarily unavailable" in pool.counts.why_most
        (note,) = driver.of(Notice)
        assert "4 local workers" in note.text
        driver.send(0, worker=None if shared_queue else pool.workers()[0])
        driver.wait_until_made(1)
        assert driver.pids() == [pid]
        left_open = descriptors(pool._source._process.pid)  # it has told of the last attempt, so that it rests
        pool.resize(4)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 6)
        assert descriptors(pool._source._process.pid) == left_open
        gate.unlink()
        pool.resize(4)
        driver.listen_until(lambda: pool.counts.running == 4)
        assert pool.counts.most is None


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> mmap.mmap:
    """Byte 0: attempts of templates to fork. They wait in each until byte 1 is set."""
    counts, fork, mine = mmap.mmap(-1, 2), os.fork, os.getpid()

    def counted() -> int:
        if os.getpid() != mine:
            counts[0] += 1
            until(lambda: counts[1])
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    return counts


@pytest.mark.parametrize("shared_queue", [True, False])
def test_closing_forks_no_worker_that_was_asked_for_before(
    attempts: mmap.mmap, monkeypatch: pytest.MonkeyPatch, shared_queue: bool
) -> None:
    """The template is in the first fork of eight when the pool closes. It reads the other requests after that."""
    attempts[1] = 1
    with driven(1, shared_queue=shared_queue) as driver:
        pool, before, end = driver.pool, attempts[0], TemplateHandle.end
        attempts[1] = 0
        pool.resize(9)
        until(lambda: attempts[0] > before)

        def end_and_go_on(template: TemplateHandle, grace_s: float) -> None:
            end(template, grace_s)
            attempts[1] = 1

        monkeypatch.setattr(TemplateHandle, "end", end_and_go_on)
        pool.close()
        assert attempts[0] == before + 1
        assert [process.exitcode for process in pool.handles] == [0] * 9


def test_workers_released_before_their_fork_leave(attempts: mmap.mmap) -> None:
    """Their sockets are open, so that each is forked, takes its request to leave, and gives back what it held."""
    attempts[1] = 1
    with driven(1) as driver:
        pool = driver.pool
        template = pool._source._process.pid
        held, rows = descriptors(template), len(pool._board._free)
        attempts[1] = 0
        pool.resize(5)
        pool.resize(1)
        attempts[1] = 1
        # any worker may take a request to leave, so the one that stays may be one that does not serve yet
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 4 and pool.counts.running == 1)
        assert all(gone.expected for gone in driver.of(WorkerGone))
        assert (pool.counts.running, pool.counts.requested, pool.crashes) == (1, 1, 0)
        assert (descriptors(template), len(pool._board._free)) == (held, rows)
        driver.send(0)
        driver.wait_until_made(1)


def test_a_busy_fork_server_gets_other_requests_once_it_reads() -> None:
    """The system refuses nothing then, so no limit is to blame. A request that was not sent holds no board row."""
    with driven(1) as driver:
        pool = driver.pool
        pool._source._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: few requests
        stop(pool._source._process.pid)
        pool.resize(20)
        assert 1 < len(pool._workers) < 20
        assert pool.counts.requested == 20
        os.kill(pool._source._process.pid, signal.SIGCONT)
        driver.listen_until(lambda: pool.counts.running == 20)
        assert (driver.of(Notice), pool.counts.most) == ([], None)
        assert len(pool._board._free) == BOARD_ROWS - 1 - 20


def test_a_process_that_got_the_pid_of_a_worker_is_not_killed() -> None:
    """The template reaps workers, so their numbers are free before the trainer learns of their ends."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with driven(1) as driver, stranger:
        (handle,) = driver.pool.handles
        (worker,) = driver.pids()
        handle.pid = stranger.pid
        handle.kill()
        assert not handle.is_alive()
        assert stranger.poll() is None
        handle.pid = worker
        handle.kill()
        driver.listen_until(lambda: driver.of(WorkerGone))
        stranger.kill()


def test_a_fork_server_out_of_descriptors_refuses_and_recovers() -> None:
    with driven(1) as driver:
        pool = driver.pool
        template = pool._source._process.pid
        soft, hard = resource.prlimit(template, resource.RLIMIT_NOFILE)
        resource.prlimit(template, resource.RLIMIT_NOFILE, (3, hard))
        pool.resize(2)
        driver.listen_until(lambda: driver.of(WorkerGone))
        assert pool.counts.most == 1
        resource.prlimit(template, resource.RLIMIT_NOFILE, (soft, hard))
        pool.resize(2)
        driver.listen_until(lambda: pool.counts.running == 2)


@pytest.mark.filterwarnings("ignore:Could not start all:RuntimeWarning")
@pytest.mark.parametrize("options", [{}, {"seeding": "batch"}, {"num_workers": "auto"}])
def test_without_a_single_worker_the_error_says_why(gate: Path, options: dict[str, Any]) -> None:
    gate.touch()
    with pytest.raises(WorkerDiedError, match=r"no local worker can be started: .*Resource temporarily.*num_workers=0"):
        list(DpexDataLoader(range(32), batch_size=4, **{"num_workers": 2, **options}))


class Ids:
    """Sample: the number of the worker that made it."""

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        return -1 if info is None else info.id


def test_a_worker_that_takes_another_s_place_has_its_number() -> None:
    with driven(2, dataset=Ids()) as driver:
        first = driver.pids()[0]
        os.kill(first, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone) and driver.pool.counts.running == 2)
        driver.send(*range(20))
        driver.listen_until(lambda: len(driver.of(TicketMade)) == 20)
        assert {int(made.value()) for made in driver.of(TicketMade)} <= {0, 1}


@pytest.mark.parametrize(("asked_for", "most"), [(2, 2), (None, 5)])
def test_extra_workers_whose_init_function_fails_are_given_up(asked_for: int | None, most: int) -> None:
    """A list of CPUs, say, is as long as the number of workers in the script. Asked for, a worker's error is the answer
    to its tickets."""
    with driven(2, dataset=Ids(), worker_init_fn=[0, 1].__getitem__, own_workers=asked_for) as driver:
        driver.pool.resize(5)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 5 - most and driver.pool.counts.running == most)
        notes = [note.text for note in driver.of(Notice)]
        assert len(notes) == (most < 5)
        assert all(note.startswith("IndexError") and "worker_init_fn" in note for note in notes)
        driver.send(*range(40))
        driver.listen_until(lambda: len(driver.of(TicketMade)) == 40)
        failed = [made for made in driver.of(TicketMade) if isinstance(made.value(), Failure)]
        assert most == 5 or not failed


class Indices:
    """Hands on what it was asked for."""

    def __getitem__(self, index: int) -> int:
        return index


def many_words(indices: list[int]) -> list[str]:
    return ["x" * 10] * 3500 + [str(indices[0])]  # 42 kB, which travel in the message itself


def test_a_request_is_queued_while_a_socket_is_full_in_both_ways() -> None:
    """Trainer and worker once waited for each other to read. The question comes after the tickets sent before it."""
    with driven(1, shared_queue=False, dataset=Indices(), collate_fn=many_words) as driver:
        pool, (worker,) = driver.pool, driver.pool.workers()
        sent = refused = 0

        def is_full() -> bool:
            """The worker takes nothing any more: it waits for the trainer to read its results."""
            nonlocal sent, refused
            took = pool.send([Ticket(sent, [sent] * 15000, 0)], 0, worker)
            sent += took
            refused = 0 if took else refused + 1
            return refused == 200

        until(is_full)
        pool.ask_state(worker, 0)
        assert pool._workers[worker].outbox
        assert not pool.send([Ticket(sent, [sent], 0)], 0, worker)
        # Everything was made, and the state after all of it has come: others come now and then.
        driver.listen_until(lambda: len(driver.of(TicketMade)) == sent and isinstance(driver.events[-1], Snapshot))
        assert [made.number for made in driver.of(TicketMade)] == list(range(sent))
        assert driver.of(Snapshot)[-1].number == sent - 1
        driver.send(sent, worker=worker)
        driver.listen_until(lambda: driver.of(TicketMade)[-1].number == sent)


class AppliesLate(IterableDataset[int]):
    """Applies a loaded state in ``__iter__``, so until the first sample its state is that before loading."""

    def __init__(self) -> None:
        self.begin = self.at = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.begin, 100):
            self.at = number + 1
            yield number

    def state_dict(self) -> int:
        return self.at

    def load_state_dict(self, state: int) -> None:
        self.begin = state


def test_a_dataset_given_its_state_is_asked_after_its_next_batch() -> None:
    given = pack_state(LogicalState(dataset=DatasetState(dataset=5)))
    with driven(1, shared_queue=False, dataset=AppliesLate(), iterable=True, snapshot_every=1) as driver:
        (worker,) = driver.pool.workers()
        driver.pool.adopt(worker, 0, given)
        driver.pool.ask_state(worker, 0)
        assert driver.pool.send([Ticket(0, [None, None], 0)], 0, worker)
        driver.listen_until(lambda: any(told.state for told in driver.of(Snapshot)))
        told = [(told.number, unpack_state(told.state).dataset) for told in driver.of(Snapshot) if told.state]
        assert [(number, state and state.dataset) for number, state in told] == [(0, 7)]


def test_an_unreferenced_worker_is_freed_without_collection() -> None:
    """Its memory may be hundreds of megabytes, and Python collects garbage by the number of objects."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = LocalWorkerHandle(0, 0, ProcessHandle("", 0), ours, 0)
        alive = weakref.ref(worker)
        gc.disable()
        try:
            del worker
            assert alive() is None
        finally:
            gc.enable()
