"""Worker processes on this machine, without a thread in the trainer. See `fork_server` and `worker_process`.

The trainer owns one socket per worker (results, and tickets when there are logical workers), and shares one queue and
one board with all workers (see `handles`). The trainer derives the tickets of a dead worker from the messages that it
sent to the worker or, with the shared queue, from the board. If a worker dies after taking a message and before writing
it on the board, the board does not show the loss. So after each death the queue is emptied, and every ticket that is on
no living worker's row is sent again.

A start request is a *promise* until the template (the source of processes) is ready and has few starts pending. Then
the promise becomes a worker.
"""

from __future__ import annotations

import contextlib
import marshal
import pickle
import select
import signal
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count as numbers_from
from typing import Any

from dpex.measure.batch_times import PoolTimes, batch_times
from dpex.measure.settings import LOCAL
from dpex.pools.base import PoolCounts
from dpex.pools.local.fork_server import TemplateHandle, TemplateStarter, private_pair
from dpex.pools.local.forking import ProcessHandle, require_descriptors
from dpex.pools.local.handles import (
    BOARD_BYTES,
    NO_ROOM,
    NOT_BEGUN,
    Board,
    LocalWorkerHandle,
    Result,
    TicketQueue,
    hang_up,
    how_it_ended,
    pack,
    write,
)
from dpex.pools.local.worker_process import END, TICKET_BYTES
from dpex.schedule.events import Notice, PoolEvent, Snapshot, TicketMade, WorkerGone, WorkerUp, ticket_made_of
from dpex.schedule.placement import CRASHES_IN_A_ROW
from dpex.schedule.schedule import Ticket
from dpex.transport.codec import slots_of
from dpex.worker.states import RngState

FORKS_AT_ONCE = 64
"""Maximum number of workers that are requested and do not serve yet. A template's socket has room for the requests."""
STARTS_IN_A_ROW = 2
"""Number of failed starts in a row, of templates or of workers killed by a signal, after which the pool gives up."""
_EVENTS: dict[str, Callable[..., PoolEvent]] = {"snapshot": Snapshot, "notice": Notice}
"""The event for each kind of worker message that has the same fields as the event."""


class LocalPool:
    """See the module; implements `dpex.pools.base.WorkerPool`.

    Args:
        shared_queue: True if all workers take tickets from one queue, and any worker may take any ticket.
        on_result: A function that is called for each result of the present epoch, instead of an event `TicketMade`. Its
            arguments are worker, epoch, number, kind, node, and the fields of `BatchTimes`. It must lease the slots
            that it keeps (`slots_of`). A pool with this function counts no times.
    """

    name = LOCAL
    handle_type: type[LocalWorkerHandle] = LocalWorkerHandle
    """The class of the handles of this pool's workers."""

    def __init__(
        self,
        starter: TemplateStarter,
        *,
        shared_queue: bool,
        first_workers: int,
        on_result: Callable[..., None] | None = None,
    ) -> None:
        self.counts: PoolCounts = PoolCounts()
        self.times: PoolTimes = PoolTimes()
        self.failed: str | None = None
        self.crashes: int = 0
        """Unexpected ends of workers since the last result from any worker."""
        self.handles: list[ProcessHandle] = []
        """The processes of workers, listed as torch lists its own. A new process replaces an ended one in the list."""
        self._workers: dict[int, LocalWorkerHandle] = {}
        self._by_fd: dict[int, LocalWorkerHandle] = {}
        self._numbers: Iterator[int] = numbers_from(0)
        self._promised = 0
        self._failed_starts = 0
        self._epoch = 0
        self._group, self._first_group = 0, 0
        self._events: deque[PoolEvent] = deque()
        self._closed = False
        self._untold: str | None = None
        """The notice of missing workers, held until a worker runs; "" once sent. If no worker ever runs, an error gives
        the reason."""
        self._crowded = False
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self._starter = starter
        self._on_result = on_result
        self._epoll = select.epoll()
        self._board = Board()
        self._queue = TicketQueue() if shared_queue else None
        try:
            self._open_source()
            self.resize(first_workers)
        except BaseException:
            self._release_resources()
            raise

    # -- size ----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        self.counts.wanted, self.counts.most = wanted, None
        self._untold = self._untold and None
        if self.failed is not None and wanted:
            self.failed, self._failed_starts = None, 0
            self._open_source()
        self._adjust()

    def _adjust(self) -> None:
        """Promise missing workers. Ask surplus workers to leave, unless they serve logical workers."""
        counts = self.counts
        surplus = self._staying() - (counts.wanted if counts.most is None else min(counts.wanted, counts.most))
        if self._queue is not None:
            self._crowded = not self._queue.ask_to_leave(surplus)
        self._promised = max(0, -surplus) if self.failed is None else 0
        self._keep_promises()

    def _staying(self) -> int:
        """Return the number of workers that are not leaving, less the requests to leave in the shared queue."""
        staying = sum(not worker.is_leaving for worker in self._workers.values())
        return staying - self._queue.leaves if self._queue is not None else staying

    def workers(self) -> list[int]:
        """See `WorkerPool.workers`. A worker that is being forked counts, because messages wait for it in its socket.

        If workers must first unpickle the dataset, only workers that are up count. Each queued request to leave removes
        one worker from the list, because no worker may be left for the tickets that are queued behind the request.
        """
        staying = [
            worker.number
            for worker in self._workers.values()
            if not (worker.is_leaving or worker.hung_up) and (worker.is_up or self._starter.is_quick)
        ]
        return staying if self._queue is None else staying[: max(0, len(staying) - self._queue.leaves)]

    def at_work(self) -> int:
        return self.counts.running

    def pids(self) -> list[int]:
        return [one.pid for one in self.handles if one.pid and one.exitcode is None]

    # -- starting ------------------------------------------------------------------------------------------------

    def _open_source(self) -> None:
        self._source = TemplateHandle(self._starter)
        self._epoll.register(self._source.fileno(), select.EPOLLIN)

    def _keep_promises(self) -> None:
        """Request promised workers, as long as the template can take requests and descriptors are left.

        Raises OSError if no descriptor is left for the first worker.
        """
        while self._promised and self._source.ready and len(self._workers) - self.counts.running < FORKS_AT_ONCE:
            try:
                self._add_worker()
            except OSError as error:
                if not self._workers:
                    raise
                if isinstance(error, BlockingIOError):
                    break  # the template's socket is full. The answer to one of the requests in it continues this loop.
                self._promised = 0
                self._cannot_grow(self._staying(), str(error), NO_ROOM)
        self.counts.requested = len(self._workers) + self._promised

    def _add_worker(self) -> None:
        require_descriptors(len(self._workers), self._board.fd)
        number = next(self._numbers)
        taken = {worker.worker_id for worker in self._workers.values()}
        worker_id = next(it for it in range(len(taken) + 1) if it not in taken)
        shared = [self._board.fd] if self._queue is None else [self._board.fd, self._queue.reading_end]
        ours, theirs = private_pair()
        row = self._board.take_row()
        try:
            with theirs:
                process = self._source.start_process(number, [theirs.fileno(), *shared], (BOARD_BYTES, worker_id, row))
        except BaseException:
            self._board.give_row(row)
            ours.close()
            raise
        worker = self.handle_type(number, worker_id, process, ours, row)
        fd = ours.fileno()
        self._epoll.register(fd, select.EPOLLIN)
        self._workers[number] = self._by_fd[fd] = worker
        self._promised -= 1
        self._list(worker.process)

    def _list(self, process: ProcessHandle) -> None:
        for place, former in enumerate(self.handles):
            if former.exitcode is not None:
                self.handles[place] = process
                return
        self.handles.append(process)

    # -- tickets -------------------------------------------------------------------------------------------------

    def send(self, tickets: list[Ticket], epoch: int, worker: int | None = None) -> bool:
        """See `WorkerPool.send`. All tickets of a message belong to one logical worker."""
        self._group = group = self._group + 1
        data = pack(("tickets", group, epoch, tickets[0].queue, [(t.number, t.index) for t in tickets]))
        if worker is None:
            assert self._queue is not None
            return self._queue.send(group, epoch, tickets, data)
        place = self._workers[worker]
        if not self._flush(place) or not write(place.socket, data):
            return False
        place.held.update({(epoch, t.number): t for t in tickets})
        return True

    def adopt(self, worker: int, logical: int, state: RngState | None) -> None:
        self._post(self._workers[worker], pickle.dumps(("adopt", logical, state)))

    def ask_state(self, worker: int, logical: int) -> None:
        self._post(self._workers[worker], pickle.dumps(("ask_state", logical)))

    def _post(self, worker: LocalWorkerHandle, data: bytes) -> None:
        """Send ``data`` to a worker now or, if its socket is full, later, before any other message.

        Waiting for room could deadlock, because the worker may be waiting for the trainer to read its results.
        """
        worker.outbox.append(data)
        self._flush(worker)

    def _flush(self, worker: LocalWorkerHandle) -> bool:
        """Send the outbox, in order; return True if it is empty."""
        outbox = worker.outbox
        while outbox:
            if not write(worker.socket, outbox[0]):
                self._epoll.modify(worker.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return False
            del outbox[0]
        return True

    def new_epoch(self, epoch: int) -> None:
        self._epoch, self._first_group = epoch, self._group + 1
        if self._queue is not None:
            self._queue.groups = {}
            self._board.want_from(self._first_group)
        if self.crashes:
            self.crashes = 0
            self._adjust()

    # -- results -------------------------------------------------------------------------------------------------

    @property
    def is_unsettled(self) -> bool:
        """True if `poll` has work to do that no descriptor shows."""
        return self._crowded

    def descriptors(self) -> list[int]:
        return [self._epoll.fileno()]

    def poll(self) -> deque[PoolEvent]:
        if self._closed:
            return self._events
        for fd, what in self._epoll.poll(0):
            worker = self._by_fd.get(fd)
            if worker is None:
                self._take_source_news()
                continue
            if what & select.EPOLLOUT and self._flush(worker) and not worker.hung_up:
                self._epoll.modify(fd, select.EPOLLIN)
            if what & ~select.EPOLLOUT:
                self._drain(worker)
        if self._source.unheard:
            self._take_source_news()
        if self._crowded:
            self._adjust()
        return self._events

    def _drain(self, worker: LocalWorkerHandle) -> None:
        while not worker.hung_up:
            try:
                if worker.announces_memory:
                    worker.map_announced(self._buffer)
                count = worker.socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the worker ended with tickets unread; its results can still be read
                continue
            if count:
                self._read(worker, *marshal.loads(self._buffer[:count]))
            else:
                self._hang_up(worker)

    def _read(self, worker: LocalWorkerHandle, message: Any, retired: list[int]) -> None:
        kind = message[0]
        if kind == "made":
            self._made(worker, message[1], message[2])
        elif kind == "coming":
            worker.announces_memory = True
        elif kind == "segments":  # `map_announced` has mapped them
            worker.announces_memory = False
        elif kind == "spilled":
            self._read(worker, marshal.loads(worker.lease(*message[1:])), [])
        elif kind in _EVENTS:
            self._events.append(_EVENTS[kind](*message[1:]))
        elif kind == "serving":
            self._serves(worker, message[1])
        elif kind == "begun":
            worker.has_begun, self._failed_starts = True, 0
        elif kind == "bye":
            self._leaves(worker)
        elif kind == "hung":
            worker.hung = message[1], message[2]
        elif kind == "refused":
            worker.refused = message[1]
        for number in retired:
            worker.segments.pop(number, None)

    def _serves(self, worker: LocalWorkerHandle, pid: int) -> None:
        worker.process.pid = pid  # set here too, because the template may report the pid only after the last batch
        if not worker.is_up:
            self.counts.running += 1
            worker.is_up = True
        self._events.append(WorkerUp(self.name, worker.number))
        self._tell_what_is_missing()
        self._keep_promises()

    def _leaves(self, worker: LocalWorkerHandle) -> None:
        if self._queue is not None and not worker.is_leaving:
            self._queue.leaves -= self._queue.leaves > 0
        worker.is_leaving = True

    def _made(self, worker: LocalWorkerHandle, group: int, results: list[tuple[Any, ...]]) -> None:
        for result in results:
            worker.held.pop(result[:2], None)
            self.crashes = 0
            self._result(worker, *result)
        if group and self._queue is not None:
            self._queue.groups.pop(group, None)

    def _result(
        self, worker: LocalWorkerHandle, epoch: int, number: int, kind: int, node: Any, fields: tuple[Any, ...]
    ) -> None:
        """Pass on a result. ``fields``: the fields of its `BatchTimes`."""
        if self._on_result is None:
            times = batch_times(fields)
            self.times.count(times)
        if epoch < self._epoch:
            if kind != END:
                slots_of(node, worker.lease)  # the worker gets the slots back at once
        elif self._on_result is None:
            value = Result(worker.lease, kind, node)
            self._events.append(ticket_made_of(TicketMade, (epoch, number, worker.number, value, kind == END, times)))
        else:
            self._on_result(worker, epoch, number, kind, node, fields)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _take_source_news(self) -> None:
        source = self._source
        news = source.news()
        while news:
            what, *about = news.popleft()
            if what == "dead":
                self._source_died()
            elif what == "ready":
                self._keep_promises()
            elif what == "notice":
                self._events.append(Notice(about[0], warning=False, once=about[0]))
            elif what == "unfit":
                self._fail(f"the dataset cannot be opened: {about[0]}")
            else:
                self._note(what, *about)
            if source is not self._source:
                return

    def _note(self, what: str, number: int, *about: Any) -> None:
        """Take in news of one process: "up" (its pid), "refused" (why) or "exit" (its pid and exit code)."""
        worker = self._workers.get(number)
        if worker is None:
            return
        if what == "up":
            worker.process.pid = about[0]
        elif what == "refused":
            self._refused(worker, about[0])
        else:
            if not worker.hung_up:
                with contextlib.suppress(OSError):  # results that cannot be mapped are made again
                    self._drain(worker)
            self._ended(worker, about[1])

    def _fail(self, why: str) -> None:
        """End the template and all workers, and start none until `resize` asks for workers again."""
        self.failed = why
        self._adjust()
        self._source.end(0.0)
        for what, *about in self._source.join(3.0):
            if what == "exit":
                self._note(what, *about)

    def _did_not_begin(self, worker: LocalWorkerHandle, why: str) -> None:
        """Start no more workers, because the user's code ended this one before its first batch, and would end
        others."""
        if self._queue is None or len(self._workers) == 1:
            self._fail(f"no local worker can be started: {why}")
        self._refused(worker, why, NOT_BEGUN)

    def _refused(self, worker: LocalWorkerHandle, why: str, text: str = NO_ROOM) -> None:
        """Remove a worker that cannot be started. Keep the others, and request no more until `resize` is called."""
        worker.process.exitcode = worker.process.exitcode or 0
        epoch, lost, _ = self._held_by(worker)
        gone = f"it could not be started: {why}"
        self._cannot_grow(max(0, self._staying() - (not worker.is_leaving)), why, text)
        self._remove(worker, (WorkerGone(self.name, worker.number, epoch, lost, None, True, gone, 0),))
        self._replace_missing()

    def _cannot_grow(self, most: int, why: str, text: str) -> None:
        self.counts.most, self.counts.why_most = most, why
        if self._untold is None:
            self._untold = text.format(wanted=self.counts.wanted, why=why)
        self._tell_what_is_missing()

    def _tell_what_is_missing(self) -> None:
        if self._untold and self.counts.running and self.failed is None:
            self._events.append(Notice(self._untold))
            self._untold = ""

    def _source_died(self) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._epoll.unregister(self._source.fileno())
        if self._closed or self.failed is not None:
            return
        came_up, why_not = self._source.ready, "" if self._source.ready else self._starter.why_not()
        self._source.join(1.0)
        if came_up:
            self._failed_starts = 0
            self.crashes += 1
            text = "the process that starts dpex's local workers ended, and they with it"
        else:
            self._failed_starts += 1
            text = f"no local worker can be started: the process that starts them {why_not}"
            if self._failed_starts >= STARTS_IN_A_ROW:
                self._fail(text)
                return
        self._events.append(Notice(f"{text}; starting anew", warning=came_up))
        for worker in list(self._workers.values()):
            self._ended(worker, -signal.SIGKILL, by_source=text)
        self._open_source()
        self._replace_missing()

    def _hang_up(self, worker: LocalWorkerHandle) -> None:
        """Close the socket of a worker that has closed its end. The template (``_source``) reports its exit code."""
        worker.hung_up = True
        fd = worker.socket.fileno()
        if fd >= 0:
            self._epoll.unregister(fd)
            self._by_fd.pop(fd, None)
            worker.socket.close()

    def _ended(self, worker: LocalWorkerHandle, code: int, *, by_source: str = "") -> None:
        """Report the end of a worker. ``by_source``: how the template ended, if that ended the worker."""
        pid = worker.process.pid or 0
        worker.process.exitcode = code
        how, is_told = by_source or how_it_ended(pid, code), bool(by_source)
        has_begun = worker.has_begun or self._closed or (code == 0 and worker.is_leaving)
        if not (is_told or has_begun or self.failed is not None):
            if worker.refused or code >= 0 or self._failed_starts:
                printed = "; its output says more" if code > 0 else ""
                self._did_not_begin(worker, worker.refused or f"{how} before its first batch{printed}")
                return
            self._failed_starts, is_told = 1, True
            self._events.append(Notice(f"{how} before its first batch. Another one is started."))
        expected = self.failed is not None or (code == 0 and worker.is_leaving)
        epoch, lost, working_on = self._held_by(worker)
        working_on = None if expected or by_source else working_on
        hung, why = worker.hung or (None, how)
        event = WorkerGone(self.name, worker.number, epoch, lost, working_on, expected, why, pid, hung, is_told)
        self._remove(worker, (event,), crashed=not expected and not self._closed)
        if not self._closed and not by_source:
            self._replace_missing()

    def _held_by(self, worker: LocalWorkerHandle) -> tuple[int, tuple[int, ...], int | None]:
        """Return the epoch, the numbers of a worker's tickets in this epoch, and the number of its current ticket."""
        groups, working_on = self._board.read(worker.row)
        if self._queue is None:
            tickets = [ticket for (of, _), ticket in worker.held.items() if of == self._epoch]
            if groups and groups[0] < self._first_group:
                working_on = None  # a ticket of an earlier epoch
        else:
            held = [self._queue.groups[group] for group in groups if group in self._queue.groups]
            tickets = [ticket for epoch, several in held if epoch == self._epoch for ticket in several]
        return self._epoch, tuple([t.number for t in tickets]), working_on

    def _remove(self, worker: LocalWorkerHandle, events: tuple[PoolEvent, ...], *, crashed: bool = False) -> None:
        self._hang_up(worker)
        groups, _ = self._board.read(worker.row)
        del self._workers[worker.number]
        self._events += events
        self.counts.requested -= 1
        self.counts.running -= worker.is_up
        for group in groups if self._queue is not None else ():
            self._queue.groups.pop(group, None)  # type: ignore[union-attr]
        self.crashes += crashed
        self._board.give_row(worker.row)
        if crashed and self._queue is not None:
            self._take_stock(self._queue)

    def _replace_missing(self) -> None:
        if self._queue is not None and not self._workers:
            self._take_stock(self._queue)
        if self.crashes <= CRASHES_IN_A_ROW + self.counts.wanted:  # else the engine ends the epoch
            self._adjust()

    def _take_stock(self, queue: TicketQueue) -> None:
        """Empty the queue, and report as lost every ticket that no living worker has on its board row.

        A living worker that has just taken a message may not have written it down yet. The message's tickets are then
        made twice, and the first result counts. Requests to leave are lost as well, and `_adjust` repeats them.
        """
        queue.drain()
        held = {group for worker in self._workers.values() for group in self._board.read(worker.row)[0]}
        for worker in list(self._by_fd.values()):  # take in results sent before the rows were read: they are not lost
            with contextlib.suppress(OSError):  # results that cannot be mapped are made again
                self._drain(worker)
        lost: dict[int, list[int]] = {}
        for group in [group for group in queue.groups if group not in held]:
            epoch, tickets = queue.groups.pop(group)
            lost.setdefault(epoch, []).extend(ticket.number for ticket in tickets)
        why = "a worker died as it took them"
        self._events += [WorkerGone(self.name, -1, epoch, tuple(some), None, True, why) for epoch, some in lost.items()]

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float = 5.0) -> None:
        """See `WorkerPool.close`; idle workers end at once."""
        if self._closed:
            return
        self._closed = True
        self._board.end()
        self._take_source_news()
        if self._queue is not None:
            hang_up(self._queue.socket)  # which wakes every worker that waits for a message
        for worker in self._workers.values():
            if not worker.hung_up:
                hang_up(worker.socket)
        self._source.end(grace_s)
        for what, *about in self._source.join(grace_s + 3.0):
            if what == "exit" and about[0] in self._workers:
                self._workers[about[0]].process.exitcode = about[2]
        self.counts = PoolCounts()
        self._release_resources()

    def _release_resources(self) -> None:
        for worker in self._workers.values():
            worker.socket.close()
        self._workers.clear()
        self._by_fd.clear()
        if self._queue is not None:
            self._queue.close()
        self._epoll.close()
        self._board.close()
        self._starter.close()
        self._events.clear()
