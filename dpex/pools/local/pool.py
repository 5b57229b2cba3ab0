"""Worker processes on this machine, without a thread in the trainer. See `fork_server` and `worker_process`.

The trainer owns one socket per worker (results, and tickets when there are logical workers), and what all workers share
(`shared_queue`). What a dead worker held is known from the messages sent to it, or from the board when the queue is
shared; the moment between taking a message and writing it down is covered by a recount.

Workers that are wanted are *promised* until the template is ready and has few others to fork; only then there is a
host for each. A host is a process, or where the dataset allows it a thread of one (`packing`).
"""

from __future__ import annotations

import contextlib
import marshal
import pickle
import select
import signal
from collections import deque
from itertools import islice
from typing import Any

from dpex.core.schedule import Ticket
from dpex.pools.base import CRASHES_IN_A_ROW, Event, Gone, LaneCounts, LaneTimes, Made, Note, Released, Snapshot, Up
from dpex.pools.local.clean_fork_server import starter_for
from dpex.pools.local.fork_server import TemplateHandle, private_pair
from dpex.pools.local.handles import Host, ProcessHandle, Result, WorkerProcess, how_it_ended
from dpex.pools.local.packing import Packing
from dpex.pools.local.process_pool import DIED_TOGETHER, DREW, Fleet
from dpex.pools.local.shared_queue import LEAVE, Board, TicketQueue, hang_up, pack, write
from dpex.pools.local.worker_process import END, TICKET_BYTES, WorkerPlan
from dpex.worker.core import RngState, WorkerSetup

FORKS_AT_ONCE = 64
"""Workers that are asked for before the first of them serves; as many requests fit in the template's socket."""
NO_ROOM = (
    "{wanted} local workers are wanted, and so many cannot be started ({why}). Those that run go on; without any, "
    "batches are made in the training process where seeding='batch' allows it. If a limit on processes (a container's "
    "pids limit, ulimit -u), descriptors (ulimit -n) or memory is reached, raise it; or ask for fewer workers."
)
STARTS_IN_A_ROW = 2
"""Templates that may end before they were ready."""


class LocalLane:
    """See the module; implements `dpex.pools.base.Lane`."""

    name = "local"

    def __init__(
        self,
        setup: WorkerSetup,
        context: Any,
        *,
        shared_queue: bool,
        first_hosts: int,
        packing: Packing | None = None,
    ) -> None:
        self.counts = LaneCounts()
        self.times = LaneTimes()
        self.failed: str | None = None
        self._hosts: dict[int, Host] = {}
        self._by_fd: dict[int, Host] = {}
        self._group = 0
        self._next_host = 0
        self._promised = 0
        self._failed_starts = 0
        self._epoch = 0
        self._events: deque[Event] = deque()
        self._closed = False
        self._suspicious = False
        self._was_refused = False
        self._crowded = False
        self._crashes = 0
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self._arrived: deque[Any] = deque()
        """The message that lies in the buffer and is not yet taken in, if any; see `dpex.system.interrupts`."""
        self._sender: Host | None = None
        self._taken_in = 0
        """How many of its results are."""
        self._starter = starter_for(context, WorkerPlan(setup, shared_queue))
        self._epoll = select.epoll()
        self._board = Board()
        self._queue = TicketQueue() if shared_queue else None
        shared = [self._board.fd] if self._queue is None else [self._board.fd, self._queue.reading_end]
        self._fleet = Fleet(packing or Packing(), shared)
        try:
            self._start_template()
            self.resize(first_hosts)
        except BaseException:
            self._release_resources()
            raise

    @property
    def handles(self) -> list[ProcessHandle]:
        """The latest process at each place, as torch lists its workers."""
        return self._fleet.handles

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_template(self) -> None:
        self._template = TemplateHandle(self._starter)
        self._epoll.register(self._template.socket.fileno(), select.EPOLLIN)

    def _keep_promises(self) -> None:
        """Ask for workers that were promised, as far as the template can take it."""
        while self._promised and self._template.ready and len(self._hosts) - self.counts.running < FORKS_AT_ONCE:
            if not self._fleet.has_room():
                break
            self._promised -= 1
            self._add_host()
        self.counts.requested = len(self._hosts) + self._promised

    def _add_host(self) -> None:
        number, self._next_host = self._next_host, self._next_host + 1
        taken = {host.worker_id for host in self._hosts.values()}
        worker_id = next(it for it in range(len(taken) + 1) if it not in taken)
        row = self._board.take_row()
        ours, theirs = private_pair()
        with theirs:
            process = self._fleet.start(number, worker_id, row, theirs.fileno(), self._template)
        host = self._hosts[number] = process.hosts[number] = Host(number, worker_id, process, ours, row)
        self._by_fd[ours.fileno()] = host
        self._epoll.register(ours.fileno(), select.EPOLLIN)

    # -- size ----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """See `Lane.resize`."""
        self.counts.wanted, self.counts.most = wanted, None
        if self.failed is not None and wanted:
            self.failed, self._failed_starts = None, 0
            self._start_template()
        self._adjust()

    def _adjust(self) -> None:
        """Promise what is missing; let leave what is too much (with logical workers, the engine does)."""
        counts = self.counts
        surplus = self._staying() - (counts.wanted if counts.most is None else min(counts.wanted, counts.most))
        if self._queue is not None:
            surplus += self._queue.cancel_leaves(-surplus)
            self._crowded = not self._queue.ask_to_leave(surplus)
        self._promised = max(0, -surplus) if self.failed is None else 0
        self._keep_promises()

    def _staying(self) -> int:
        """Hosts that were not asked to leave. In the shared queue nobody knows yet who will take the requests."""
        staying = sum(not host.leaving for host in self._hosts.values())
        return staying - self._queue.leaves if self._queue is not None else staying

    def dismiss(self, number: int) -> None:
        """Let one host leave after what it was sent so far (logical workers must have been released before)."""
        host = self._hosts[number]
        if not host.leaving:
            host.leaving = True
            self._post(host, LEAVE)

    @property
    def starts_slowly(self) -> bool:
        """See `Lane.starts_slowly`."""
        return not self._starter.is_quick

    def at_work(self) -> int:
        """Hosts that have something to do, at most."""
        return self.counts.running

    def hosts(self) -> list[int]:
        """See `Lane.hosts`; a host that is being forked counts, as its messages wait for it in the socket.

        Where each must unpickle the dataset first, only those count that have. Somebody will take each request to leave
        that is queued: nothing may be queued behind the last of them.
        """
        slow = self.starts_slowly
        staying = [h.number for h in self._hosts.values() if not (h.leaving or h.ended or (slow and not h.started))]
        return staying if self._queue is None else staying[: max(0, len(staying) - self._queue.leaves)]

    # -- tickets -------------------------------------------------------------------------------------------------

    def send(self, tickets: list[Ticket], epoch: int, host: int | None = None, sent: list[Any] | None = None) -> bool:
        """See `Lane.send`; all tickets of a message belong to one logical worker."""
        sent = [] if sent is None else sent
        self._group = group = self._group + 1
        data = pack(("tickets", group, epoch, tickets[0].queue, [(t.number, t.index) for t in tickets]))
        if host is None:
            assert self._queue is not None
            self._queue.send(group, tickets, data, sent)
        elif self._flush(place := self._hosts[host]):
            held = {(epoch, t.number): t for t in tickets}
            place.held.update(held)
            write(place.socket, data, sent)
            if not sent:
                for key in held:
                    del place.held[key]
        return bool(sent)

    def adopt(self, host: int, logical: int, state: RngState | None) -> None:
        """See `Lane.adopt`."""
        self._post(self._hosts[host], pickle.dumps(("adopt", logical, state)))

    def release(self, host: int, logical: int) -> None:
        """See `Lane.release`."""
        self._post(self._hosts[host], pickle.dumps(("release", logical)))

    def _post(self, host: Host, data: bytes) -> None:
        """Send this to a host now or, as its socket is full, before anything else that it is sent.

        Nobody may wait for room here: the host may itself be waiting for the trainer to read its results.
        """
        host.outbox.append(data)
        self._flush(host)

    def _flush(self, host: Host) -> bool:
        """Send what was kept back, in order; True if nothing is left of it."""
        outbox = host.outbox
        while outbox:
            sent: list[Any] = []
            if not write(host.socket, outbox[0], sent):
                self._epoll.modify(host.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
                return False
            del outbox[0]
        return True

    def _room_again(self, host: Host) -> None:
        """The socket of a host takes something again."""
        if self._flush(host) and not host.ended:
            self._epoll.modify(host.socket.fileno(), select.EPOLLIN)

    def new_epoch(self, epoch: int) -> None:
        """See `Lane.new_epoch`."""
        self._epoch = epoch
        self._fleet.packing.new_epoch()
        if self._queue is not None:
            self._queue.groups.clear()
        self._board.new_epoch(epoch)

    # -- what happened -------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """See `Lane.descriptors`: the lane's own epoll."""
        return [self._epoll.fileno()]

    def poll(self) -> deque[Event]:
        """See `Lane.poll`."""
        if self._closed:
            return self._events
        self._take_in()
        for fd, what in self._epoll.poll(0):
            host = self._by_fd.get(fd)
            if host is None:
                self._hear_template()
                continue
            if what & select.EPOLLOUT:
                self._room_again(host)
            if what & ~select.EPOLLOUT:
                self._drain(host)
        if not self._template.ready and self._template.overdue:
            self._template_died()
        if self._suspicious:
            self._recount()
        if self._crowded:
            self._adjust()
        return self._events

    def _drain(self, host: Host) -> None:
        self._take_in()
        while not host.ended:
            self._sender = host
            try:
                if host.announces_memory:
                    host.map_announced(self._buffer)
                self._arrived.extend(map(host.socket.recv_into, (self._buffer,)))
            except BlockingIOError:
                return
            except ConnectionResetError:
                self._hang_up(host)
            self._take_in()

    def _take_in(self) -> None:
        """Read the message in the buffer, if there is one; what an exception broke off is gone on with."""
        if not self._arrived:
            return
        host = self._sender
        assert host is not None
        count = self._arrived[0]
        if count:
            self._read(host, *marshal.loads(self._buffer[:count]))
        else:
            self._hang_up(host)
        self._taken_in = 0
        del self._arrived[0]

    def _read(self, host: Host, message: Any, retired: list[int]) -> None:
        kind = message[0]
        if kind == "made":
            self._made(host, message[1], message[2])
            if self._fleet.packing.untried and message[2]:
                self._fleet.packing.tried()
                self._keep_promises()
        elif kind == "coming":
            host.announces_memory = True
        elif kind == "segments":  # they are mapped already
            host.announces_memory = False
        elif kind == "released":
            self._tell(Released(message[1], host.number, message[2]))
        elif kind == "snapshot":
            self._tell(Snapshot(*message[1:]))
        elif kind == "serving":
            self._serves(host, message[1])
        elif kind == "bye":
            self._leaves(host)
        elif kind == "draws":
            self._drew(host.process, message[1])
        elif kind == "refused":
            self._refused([host], message[1])
        for number in retired:
            host.segments.pop(number, None)

    def _serves(self, host: Host, pid: int) -> None:
        host.process.handle.pid = pid  # the template's news may come later than the last batch
        if not host.started:
            self.counts.running += 1
            host.started = True
        self._tell(Up(host.number))
        self._keep_promises()

    def _leaves(self, host: Host) -> None:
        if self._queue is not None and not host.leaving:
            self._queue.leaves -= self._queue.leaves > 0  # without a call: see `dpex.system.interrupts`
        host.leaving = True
        if host.is_thread:
            self._left(host)

    def _tell(self, event: Event) -> None:
        """Tell of the message that is being read; once, even if it is read again."""
        if not self._taken_in:
            self._events += (event,)  # from here on without a call: see `dpex.system.interrupts`
            self._taken_in = 1

    def _made(self, host: Host, group: int, results: list[tuple[Any, ...]]) -> None:
        count, epoch_now = self.times.count, self._epoch
        for epoch, number, kind, node, stages, cpu_s, encode_s, nbytes in islice(results, self._taken_in, None):
            host.held.pop((epoch, number), None)
            service_s = count(stages, cpu_s, encode_s, nbytes)
            self._crashes = 0
            if epoch == epoch_now:
                value = Result(host, kind, node)
                making = (stages[0], stages[2], stages[1], encode_s, 0.0)
                end, samples = kind == END, stages[4]
                rest = (service_s, nbytes, samples, making, stages[6])
                event = Made(epoch, number, host.number, value, end, *rest)
                self._events += (event,)  # from here on without a call: see `dpex.system.interrupts`
                self._taken_in += 1
            else:
                self._taken_in += 1
                if kind != END:
                    host.decoder.decode(node)  # nobody wants it: its slots go back at once
                    host.leased = {}
        if group and self._queue is not None:
            self._queue.groups.pop(group, None)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _hear_template(self) -> None:
        for news in self._template.news():
            if news[0] == "refused":
                self._cannot_start(*news[1:])
            else:
                self._note(*news)

    def _note(self, what: str, number: int = -1, pid: int = 0, code: int = 0) -> None:
        process = self._fleet.processes.get(number)
        if what == "dead":
            self._template_died()
        elif what == "ready":
            self._keep_promises()
        elif process is None:
            return
        elif what == "up":
            process.handle.pid = pid
        else:
            for host in list(process.hosts.values()):
                if not host.ended:
                    with contextlib.suppress(OSError):  # what cannot be taken in is made again
                        self._drain(host)
            self._ended(process, code)

    def _cannot_start(self, number: int, why: str) -> None:
        """The template cannot start this process."""
        if number in self._fleet.processes:
            self._refused(self._fleet.ended(number, 0), why)

    def _refused(self, hosts: list[Host], why: str) -> None:
        """The system has no room for these: those that run go on, and no more are asked for until somebody does."""
        for host in hosts:
            lost, _ = self._bury(host)
            if not host.process.hosts:
                host.process.shut()
            self._events.append(Gone(host.number, lost, None, True, f"it could not be started: {why}", 0))
        if self._queue is not None and not self._hosts:
            self._lose_the_rest()
        self.counts.most, self.counts.why_most = max(0, self._staying()), why
        self._adjust()
        if not self._was_refused:
            self._was_refused = True
            self._events.append(Note(NO_ROOM.format(wanted=self.counts.wanted, why=why)))

    def _template_died(self) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._epoll.unregister(self._template.socket.fileno())
        if self._closed:
            return
        came_up, why_not = self._template.ready, "" if self._template.ready else self._template.why_not()
        self._template.join(1.0)
        if came_up:
            self._failed_starts = 0
            self._crashes += 1
            text = "the process that starts dpex's local workers ended, and they with it"
        else:
            self._failed_starts += 1
            text = f"no local worker can be started: the process that starts them {why_not}"
            if self._failed_starts >= STARTS_IN_A_ROW:
                self.failed = text
                self._events.append(Note(text))
                self._adjust()
                return
        self._events.append(Note(f"{text}; starting anew"))
        self._start_template()
        for process in list(self._fleet.processes.values()):
            self._ended(process, -signal.SIGKILL, by_template=True)

    def _hang_up(self, host: Host) -> None:
        """The worker's end of the socket is closed; how it ended comes from the template."""
        if not host.ended:
            host.ended = True
            fd = host.socket.fileno()
            self._epoll.unregister(fd)
            del self._by_fd[fd]
            host.socket.close()

    def _ended(self, process: WorkerProcess, code: int, *, by_template: bool = False) -> None:
        """A process ended, and with it the hosts that were still there; ``by_template``: because the template did.

        Where several of them worked, nobody knows whose ticket was at fault, and none is held guilty. Nor is one if the
        template ended: it makes no batches.
        """
        hosts = self._fleet.ended(process.number, code)
        if not hosts:
            return
        expected = code == 0 and (process.drew or all(host.leaving for host in hosts))
        held = [self._bury(host) for host in hosts]
        at_work = [guilty for _, guilty in held if guilty is not None]
        lost = tuple(number for numbers, _ in held for number in numbers)
        pid = process.handle.pid or 0
        guilty = at_work[0] if len(at_work) == 1 and not (expected or by_template) else None
        self._events.append(Gone(hosts[0].number, lost, guilty, expected, how_it_ended(pid, code), pid))
        self._events += [Gone(host.number, (), None, True, "its process ended", pid) for host in hosts[1:]]
        if self._closed:
            return
        if len(at_work) > 1 and not (expected or by_template) and self._fleet.packing.died_together():
            self._events.append(Note(DIED_TOGETHER))
        self._after_an_end(expected, doubtful=not expected or process.drew)

    def _left(self, host: Host) -> None:
        """A host that is a thread left; its process may go on."""
        self._bury(host)
        self._events.append(Gone(host.number, (), None, True, "it left", host.process.handle.pid))
        if not self._closed:
            self._after_an_end(expected=True, doubtful=False)

    def _after_an_end(self, expected: bool, doubtful: bool) -> None:
        if self._queue is not None and not self._hosts:
            self._lose_the_rest()
        self._crashes += not expected
        self._suspicious = self._suspicious or (doubtful and self._queue is not None)
        if self._crashes <= CRASHES_IN_A_ROW + self.counts.wanted:  # else the engine ends the epoch
            self._adjust()

    def _bury(self, host: Host) -> tuple[tuple[int, ...], int | None]:
        """Forget a host; returns the tickets it held, and the one it was working on."""
        self._hang_up(host)
        del self._hosts[host.number]
        del host.process.hosts[host.number]
        self.counts.requested -= 1
        self.counts.running -= host.started
        held = self._what_it_held(host)
        self._board.give_row(host.row)
        return held

    def _drew(self, process: WorkerProcess, generator: str) -> None:
        """A ticket moved a global generator: no two hosts share a process from now on. See `dpex.worker.threads`."""
        process.drew = True
        if self._fleet.packing.keep_apart():
            self._events.append(Note(DREW.format(generator=generator)))
            self._keep_promises()

    def _what_it_held(self, host: Host) -> tuple[tuple[int, ...], int | None]:
        group, guilty = self._board.read(host.row)
        sent = [ticket for (epoch, _), ticket in host.held.items() if epoch == self._epoch]
        tickets = sent if self._queue is None else self._queue.groups.pop(group, [])
        return tuple(t.number for t in tickets), guilty

    @property
    def crashes(self) -> int:
        """Unexpected ends since the last result of any worker."""
        return self._crashes

    def _recount(self) -> None:
        """After a death: when the queue is empty and every worker idle, whatever is still out was lost unseen."""
        if self._in_doubt():
            return
        for host in list(self._by_fd.values()):
            self._drain(host)
        if self._in_doubt():
            return
        self._suspicious = False
        self._lose_the_rest()  # with it goes a request to leave that somebody took as it died
        self._adjust()

    def _in_doubt(self) -> bool:
        assert self._queue is not None
        busy = any(not self._board.is_idle(host.row) for host in self._hosts.values())
        return busy or not self._queue.is_empty()

    def _lose_the_rest(self) -> None:
        """Nobody holds a ticket, or is left to read the queue: take back what is out."""
        assert self._queue is not None
        lost = self._queue.forget()
        if lost:
            self._events.append(Gone(-1, lost, None, True, "a worker died as it took them"))

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float = 5.0) -> None:
        """See `Lane.close`; idle workers end at once."""
        if self._closed:
            return
        self._closed = True
        self._board.end()
        self._hear_template()
        if self._queue is not None:
            self._queue.shut_down()
        for process in self._fleet.processes.values():
            if process.control is not None:
                hang_up(process.control)
        for host in self._hosts.values():
            if not host.ended:
                hang_up(host.socket)
        self._template.end(grace_s)
        for what, *about in self._template.join(grace_s + 3.0):
            if what == "exit" and about[0] in self._fleet.processes:
                self._fleet.processes[about[0]].handle.exitcode = about[2]
        self.counts = LaneCounts()
        self._release_resources()

    def _release_resources(self) -> None:
        for host in self._hosts.values():
            host.socket.close()
        self._fleet.close()
        self._hosts.clear()
        self._by_fd.clear()
        if self._queue is not None:
            self._queue.close()
        self._epoll.close()
        self._board.close()
        self._starter.close()
        self._events.clear()
