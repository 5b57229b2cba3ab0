"""The workers of a local pool: how many there are to be, how they are started, and what follows when one ends.

Workers that are wanted are *promised* until what starts processes is ready and has few others to start; only then
there is a worker for each. A worker is a process, or where the dataset allows it a thread of one (`packing`). What a
dead worker held is known from the messages sent to it, or from the board when the queue is shared.
"""

from __future__ import annotations

import contextlib
import select
import signal
from abc import ABC, abstractmethod
from collections import deque

from dpex.pools.base import PoolCounts
from dpex.pools.local.fork_server import private_pair
from dpex.pools.local.handles import LocalWorkerHandle, ProcessHandle, WorkerProcess, how_it_ended
from dpex.pools.local.packing import Packing
from dpex.pools.local.process_pool import DIED_TOGETHER, DREW, WorkerProcesses
from dpex.pools.local.shared_queue import Board, TicketQueue
from dpex.pools.local.starter import Starter
from dpex.schedule.events import Notice, PoolEvent, WorkerGone
from dpex.schedule.failures import CRASHES_IN_A_ROW
from dpex.schedule.names import LOCAL
from dpex.schedule.worker_life import ENDS, LIFE, RUNNING, STAYING, UP

FORKS_AT_ONCE = 64
"""Workers that are asked for before the first of them serves; as many requests fit in a template's socket."""
NO_ROOM = (
    "{wanted} local workers are wanted, and so many cannot be started ({why}). Those that run go on. If a limit on "
    "processes (a container's pids limit, ulimit -u), descriptors (ulimit -n) or memory is reached, raise it; or ask "
    "for fewer workers."
)
COULD_NOT_BEGIN = (
    "no local worker can be started: process {pid} ended before it was ready (exit code {code}; "
    "what it printed says more)"
)
STARTS_IN_A_ROW = 2
"""Templates, or workers where each imports for itself, that may end before they were ready while no worker runs."""


class LocalWorkers(ABC):
    """See the module. `dpex.pools.local.pool.LocalPool` adds the tickets."""

    name = LOCAL
    handle_type: type[LocalWorkerHandle] = LocalWorkerHandle
    """What a worker is to this pool."""

    def __init__(self, starter: Starter, *, shared_queue: bool, packing: Packing | None = None) -> None:
        self.counts = PoolCounts()
        self.failed: str | None = None
        self._workers: dict[int, LocalWorkerHandle] = {}
        self._by_fd: dict[int, LocalWorkerHandle] = {}
        self._next_worker = 0
        self._promised = 0
        self._failed_starts = 0
        self._epoch = 0
        self._events: deque[PoolEvent] = deque()
        self._closed = False
        self._suspicious = False
        self._was_refused = False
        self._crowded = False
        self._crashes = 0
        self._starter = starter
        self._epoll = select.epoll()
        self._board = Board()
        self._queue = TicketQueue() if shared_queue else None
        shared = [self._board.fd] if self._queue is None else [self._board.fd, self._queue.reading_end]
        self._fleet = WorkerProcesses(packing or Packing(), shared)

    @abstractmethod
    def _drain(self, worker: LocalWorkerHandle) -> None:
        """Take in what a worker has sent."""

    @abstractmethod
    def _lose_the_rest(self) -> None:
        """Nobody holds a ticket, or is left to read the queue: take back what is out."""

    @property
    def handles(self) -> list[ProcessHandle]:
        """The latest process at each place, as torch lists its workers."""
        return self._fleet.handles

    def pids(self) -> list[int]:
        """Return the processes that run."""
        return [one.pid for one in self.handles if one.pid and one.exitcode is None]

    # -- starting -------------------------------------------------------------------------------------------------

    def _open_source(self) -> None:
        self._source = self._starter.open()
        self._epoll.register(self._source.fileno(), select.EPOLLIN)

    def _keep_promises(self) -> None:
        """Ask for workers that were promised, as far as what starts them can take it."""
        while self._promised and self._source.ready and len(self._workers) - self.counts.running < FORKS_AT_ONCE:
            if not self._fleet.has_room():
                break
            self._add_worker()
            self._promised -= 1  # where a signal handler raised, it is asked for again
        self.counts.requested = len(self._workers) + self._promised

    def _add_worker(self) -> None:
        number, self._next_worker = self._next_worker, self._next_worker + 1
        taken = {worker.worker_id for worker in self._workers.values()}
        worker_id = next(it for it in range(len(taken) + 1) if it not in taken)
        row = self._board.take_row()
        ours, theirs = private_pair()
        with theirs:
            process = self._fleet.start(number, worker_id, row, theirs.fileno(), self._source)
        worker = self._workers[number] = process.workers[number] = self.handle_type(
            number, worker_id, process, ours, row
        )
        self._by_fd[ours.fileno()] = worker
        self._epoll.register(ours.fileno(), select.EPOLLIN)

    # -- size -----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """See `WorkerPool.resize`."""
        self.counts.wanted, self.counts.most = wanted, None
        if self.failed is not None and wanted:
            self.failed, self._failed_starts = None, 0
            self._open_source()
        self._adjust()

    def _adjust(self) -> None:
        """Promise what is missing; let leave what is too much, unless logical workers are on it."""
        counts = self.counts
        surplus = self._staying() - (counts.wanted if counts.most is None else min(counts.wanted, counts.most))
        if self._queue is not None:
            surplus += self._queue.cancel_leaves(-surplus)
            self._crowded = not self._queue.ask_to_leave(surplus)
        self._promised = max(0, -surplus) if self.failed is None else 0
        self._keep_promises()

    def _staying(self) -> int:
        """Workers that were not asked to leave. In the shared queue nobody knows yet who will take the requests."""
        staying = sum(worker.stage in STAYING for worker in self._workers.values())
        return staying - self._queue.leaves if self._queue is not None else staying

    def workers(self) -> list[int]:
        """See `WorkerPool.workers`; a worker that is being forked counts, as its messages wait for it in the socket.

        Where each must unpickle the dataset first, only those count that have. Somebody will take each request to leave
        that is queued: nothing may be queued behind the last of them.
        """
        serving = STAYING if self._starter.is_quick else {UP}
        staying = [h.number for h in self._workers.values() if h.stage in serving and not h.hung_up]
        return staying if self._queue is None else staying[: max(0, len(staying) - self._queue.leaves)]

    # -- ends -----------------------------------------------------------------------------------------------------

    def _hear_source(self) -> None:
        for news in self._source.news():
            if news[0] == "refused":
                self._cannot_start(*news[1:])
            elif news[0] == "unfit":
                self._cannot_serve(news[1])
            else:
                self._note(*news)

    def _note(self, what: str, number: int = -1, pid: int = 0, code: int = 0) -> None:
        process = self._fleet.processes.get(number)
        if what == "dead":
            self._source_died()
        elif what == "ready":
            self._keep_promises()
        elif process is None:
            return
        elif what == "up":
            process.handle.pid = pid
        else:
            for worker in list(process.workers.values()):
                if not worker.hung_up:
                    with contextlib.suppress(OSError):  # what cannot be taken in is made again
                        self._drain(worker)
            self._ended(process, code)

    def _cannot_start(self, number: int, why: str) -> None:
        """This process cannot be started."""
        if number in self._fleet.processes:
            self._refused(self._fleet.ended(number, 0), why)

    def _cannot_serve(self, why: str) -> None:
        """The dataset cannot be unpacked: there will be no worker."""
        self._fail(f"the dataset cannot be opened: {why}")

    def _fail(self, why: str) -> None:
        """Start no worker until `resize` asks for some again."""
        self.failed = why
        self._events.append(Notice(why))
        self._adjust()
        for what, *about in self._source.join(1.0):
            if what == "exit":
                self._note(what, *about)

    def _refused(self, workers: list[LocalWorkerHandle], why: str) -> None:
        """The system has no room for these: those that run go on, and no more are asked for until somebody does."""
        for worker in workers:
            lost, _ = self._bury(worker)
            if not worker.process.workers:
                worker.process.shut()
            self._tell_end(worker.number, f"it could not be started: {why}", lost, pid=0)
        if self._queue is not None and not self._workers:
            self._lose_the_rest()
        self.counts.most, self.counts.why_most = max(0, self._staying()), why
        self._adjust()
        if not self._was_refused:
            self._was_refused = True
            self._events.append(Notice(NO_ROOM.format(wanted=self.counts.wanted, why=why)))

    def _source_died(self) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._epoll.unregister(self._source.fileno())
        if self._closed or self.failed is not None:
            return
        came_up, why_not = self._source.ready, "" if self._source.ready else self._source.why_not()
        self._source.join(1.0)
        if came_up:
            self._failed_starts = 0
            self._crashes += 1
            text = "the process that starts dpex's local workers ended, and they with it"
        else:
            self._failed_starts += 1
            text = f"no local worker can be started: the process that starts them {why_not}"
            if self._failed_starts >= STARTS_IN_A_ROW:
                self._fail(text)
                return
        self._events.append(Notice(f"{text}; starting anew"))
        self._open_source()
        for process in list(self._fleet.processes.values()):
            self._ended(process, -signal.SIGKILL, by_source=True)

    def _hang_up(self, worker: LocalWorkerHandle) -> None:
        """The worker's end of the socket is closed; how it ended comes from what started it."""
        if not worker.hung_up:
            worker.hung_up = True
            fd = worker.socket.fileno()
            self._epoll.unregister(fd)
            del self._by_fd[fd]
            worker.socket.close()

    def _ended(self, process: WorkerProcess, code: int, *, by_source: bool = False) -> None:
        """A process ended, and with it the workers that were still there; ``by_source``: because what started it did.

        Where several of them worked, nobody knows whose ticket was at fault, and none is held guilty. Nor is one if the
        template ended: that makes no batches.
        """
        workers = self._fleet.ended(process.number, code)
        if not workers:
            return
        never_began = code > 0 and all(worker.stage not in RUNNING for worker in workers)
        expected = code == 0 and (process.drew or all(worker.stage not in STAYING for worker in workers))
        held = [self._bury(worker) for worker in workers]
        at_work = [guilty for _, guilty in held if guilty is not None]
        lost = tuple(number for numbers, _ in held for number in numbers)
        pid = process.handle.pid or 0
        guilty = at_work[0] if len(at_work) == 1 and not (expected or by_source) else None
        hung, why = workers[0].hung or (None, how_it_ended(pid, code))
        self._tell_end(workers[0].number, why, lost, guilty, expected=expected, pid=pid, hung=hung)
        for worker in workers[1:]:
            self._tell_end(worker.number, "its process ended", pid=pid)
        if self._closed:
            return
        if len(at_work) > 1 and not (expected or by_source) and self._fleet.packing.died_together():
            self._events.append(Notice(DIED_TOGETHER))
        if never_began and not self._starter.is_quick and not self.counts.running and self.failed is None:
            self._failed_starts += 1
            if self._failed_starts >= STARTS_IN_A_ROW:
                self._fail(COULD_NOT_BEGIN.format(pid=pid, code=code))
                return
        self._after_an_end(expected, doubtful=not expected or process.drew)

    def _tell_end(
        self,
        number: int,
        why: str,
        lost: tuple[int, ...] = (),
        guilty: int | None = None,
        *,
        expected: bool = True,
        pid: int | None = None,
        hung: int | None = None,
    ) -> None:
        self._events.append(WorkerGone(self.name, number, self._epoch, lost, guilty, expected, why, pid, hung))

    def _left(self, worker: LocalWorkerHandle) -> None:
        """A worker that is a thread left; its process may go on."""
        self._bury(worker)
        self._tell_end(worker.number, "it left", pid=worker.process.handle.pid)
        if not self._closed:
            self._after_an_end(expected=True, doubtful=False)

    def _after_an_end(self, expected: bool, doubtful: bool) -> None:
        if self._queue is not None and not self._workers:
            self._lose_the_rest()
        self._crashes += not expected
        self._suspicious = self._suspicious or (doubtful and self._queue is not None)
        if self._crashes <= CRASHES_IN_A_ROW + self.counts.wanted:  # else the engine ends the epoch
            self._adjust()

    def _bury(self, worker: LocalWorkerHandle) -> tuple[tuple[int, ...], int | None]:
        """Forget a worker; returns the tickets it held, and the one it was working on."""
        self._hang_up(worker)
        del self._workers[worker.number]
        del worker.process.workers[worker.number]
        self.counts.requested -= 1
        self.counts.running -= worker.stage in RUNNING
        worker.stage = LIFE[worker.stage, ENDS]
        held = self._what_it_held(worker)
        self._board.give_row(worker.row)
        return held

    def _drew(self, process: WorkerProcess, generator: str) -> None:
        """A ticket moved a global generator: no two workers share a process from now on. See `dpex.worker.threads`."""
        process.drew = True
        if self._fleet.packing.keep_apart():
            self._events.append(Notice(DREW.format(generator=generator)))
            self._keep_promises()

    def _what_it_held(self, worker: LocalWorkerHandle) -> tuple[tuple[int, ...], int | None]:
        group, guilty = self._board.read(worker.row)
        sent = [ticket for (epoch, _), ticket in worker.held.items() if epoch == self._epoch]
        tickets = sent if self._queue is None else self._queue.groups.pop(group, [])
        return tuple(t.number for t in tickets), guilty

    @property
    def crashes(self) -> int:
        """Unexpected ends since the last result of any worker."""
        return self._crashes

    # -- closing --------------------------------------------------------------------------------------------------

    def _release_resources(self) -> None:
        for worker in self._workers.values():
            worker.socket.close()
        self._fleet.close()
        self._workers.clear()
        self._by_fd.clear()
        if self._queue is not None:
            self._queue.close()
        self._epoll.close()
        self._board.close()
        self._starter.close()
        self._events.clear()
